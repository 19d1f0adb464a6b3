"""The old name of `pybnorm.check.selftest.detection`, kept for one version."""

import sys
import warnings

from pybnorm.check.selftest import detection as _module
from pybnorm.check.selftest.detection import *  # noqa: F403 (for type checkers)

warnings.warn(f"{__name__} is deprecated; import {_module.__name__}", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = _module
