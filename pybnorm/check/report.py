"""The old name of `pybnorm.check.results`, `environment` and `terminal`, kept for one version."""

import warnings

from pybnorm.check.environment import machine
from pybnorm.check.results import *  # noqa: F403
from pybnorm.check.terminal import *  # noqa: F403

environment = machine
warnings.warn(
    f"{__name__} is deprecated; import pybnorm.check.results, pybnorm.check.environment or pybnorm.check.terminal",
    DeprecationWarning,
    stacklevel=2,
)
