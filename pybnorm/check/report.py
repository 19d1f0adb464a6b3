"""The old name of `pybnorm.check.results`, `pybnorm.check.environment` and `pybnorm.check.terminal`."""

from pybnorm.check.environment import machine
from pybnorm.check.results import *  # noqa: F403
from pybnorm.check.terminal import *  # noqa: F403

environment = machine
