"""The old name of `pybnorm.check.support`, kept for one version."""

import sys
import warnings

from pybnorm.check import support as _module
from pybnorm.check.support import *  # noqa: F403 (for type checkers)

warnings.warn(f"{__name__} is deprecated; import {_module.__name__}", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = _module
