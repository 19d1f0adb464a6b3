"""Batch norm for PyTorch by the vendors' libraries: a function, modules, and a switch for a model.

``model = pybnorm.torch.convert(model)`` makes every ``BatchNorm1d``, ``BatchNorm2d``, ``BatchNorm3d`` and
``SyncBatchNorm`` of a model one of this module; `batch_norm` replaces ``torch.nn.functional.batch_norm``. All are
differentiable on PyTorch's current stream and in PyTorch's memory. Under autocast they work as
PyTorch's own, in the dtype of the input with float32 parameters; in a captured CUDA graph after a warm-up on the thread
that captures. Compilers, exporters and ``torch.func`` see custom operators from PyTorch 2.4 on; before,
``torch.compile`` calls them as they are.

If no vendor library here computes a call correctly, that is an error (`UnsupportedError`, `LibraryNotFoundError`,
`NotInitializedError`, `ArgumentError`); with ``fallback=True`` PyTorch computes it. The same holds for empty batches
and for parameters that are neither float32 nor, with float64 and 16-bit data, of its dtype.

This package alone imports PyTorch, 1.13 or newer, and no other module imports it, but for a tensor in a call of
`pybnorm.functional` with ``prefer``.
"""

from __future__ import annotations

from pybnorm.torch.autograd import batch_norm
from pybnorm.torch.conversion import convert
from pybnorm.torch.fusion import unfuse
from pybnorm.torch.installation import install
from pybnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d
from pybnorm.torch.preference import reason
from pybnorm.torch.sync import SyncBatchNorm

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "batch_norm", "convert", "install", "reason",
    "unfuse",
]  # fmt: skip
