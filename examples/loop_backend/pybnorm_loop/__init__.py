"""A backend of pybnorm that computes in plain C loops: ``pybnorm.Handle("loop")``."""

import sysconfig
from pathlib import Path

library = Path(__file__).with_name("library" + sysconfig.get_config_var("EXT_SUFFIX"))
"""The shared library that exports ``pbn_backend_loop``; the entry point names this path."""
