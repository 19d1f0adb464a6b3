"""The benchmarks are in the source tree. It goes last on the path: pybnorm is the package that was imported before."""

import sys
from pathlib import Path

import pybnorm  # noqa: F401 (before the tree is on the path)

sys.path.append(str(Path(__file__).parents[2]))
