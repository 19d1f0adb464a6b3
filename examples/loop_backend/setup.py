"""The backend's shared library; everything else is in pyproject.toml."""

from setuptools import Extension, setup

import pybnorm

library = Extension("pybnorm_loop.library", ["loop.c"], include_dirs=[pybnorm.get_include()], libraries=["m"])
setup(ext_modules=[library])
