"""The NumPy one-liner in CuPy, on a GPU: pybnorm check --implementation cupy_one_liner.py:Cupy"""

import cupy
from numpy_one_liner import OneLiner


class Cupy(OneLiner):
    """CuPy's sums and elementwise kernels."""

    name, version, xp, arrays = "CuPy one-liner", cupy.__version__, cupy, "cupy"
