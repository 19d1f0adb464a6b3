"""The old name of `pybnorm.check.selftest.simulated`, kept for one version."""

import sys
import warnings

from pybnorm.check.selftest import simulated as _module
from pybnorm.check.selftest.simulated import *  # noqa: F403 (for type checkers)

warnings.warn(f"{__name__} is deprecated; import {_module.__name__}", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = _module
