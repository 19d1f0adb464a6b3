"""Measurements of pybnorm: ``python -m benchmarks`` in this source tree, or there ``pybnorm bench``.

They measure against vendors' C interfaces, PyTorch and NumPy, on machines of developers. No user's call needs them, so
the wheel leaves them out.
"""

import sys
from pathlib import Path

# `python -m` looks into this tree first. If the pybnorm of the tree is not built, take the installed one.
_TREE = Path(__file__).resolve().parents[1]
if Path(sys.path[0]).resolve() == _TREE and not any((_TREE / "pybnorm").glob("_core.*.so")):
    sys.path.append(sys.path.pop(0))
