"""Batch norm for PyTorch: kernels in PyTorch's own operators, a switch for one model, modules and a function.

``pybnorm.torch.install()`` puts kernels of ours into PyTorch's own operators, so that nothing else changes.
``model = pybnorm.torch.convert(model)`` makes every ``BatchNorm1d``, ``BatchNorm2d``, ``BatchNorm3d`` and
``SyncBatchNorm`` of one model a module of this package, `unconvert` gives PyTorch's back, and `batch_norm` replaces
``torch.nn.functional.batch_norm``. All are differentiable to any order on PyTorch's current stream and in PyTorch's
memory. Under autocast they work as PyTorch's own, in the dtype of the input with float32 parameters; in a captured CUDA
graph after a warm-up on the thread that captures. Compilers, modes and ``torch.func`` see custom operators.

If no library here computes a call correctly, that is an error (`UnsupportedError`, `LibraryNotFoundError`,
`NotInitializedError`, `ArgumentError`); with ``fallback=True`` PyTorch computes it.

This package alone imports PyTorch, 2.5 or newer, and no other module imports it.
"""

from __future__ import annotations

from pybnorm.torch.conversion import convert, unconvert
from pybnorm.torch.installation import Installation, install
from pybnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d
from pybnorm.torch.operators import batch_norm
from pybnorm.torch.sync import SyncBatchNorm

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Installation", "SyncBatchNorm", "batch_norm", "convert", "install",
    "unconvert",
]  # fmt: skip
