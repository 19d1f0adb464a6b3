"""PyTorch's own batch norm on the CPU, computed by plans: kernels in its dispatcher."""

from __future__ import annotations

import atexit
import threading
from types import TracebackType
from typing import Any

import numpy as np
import torch

from pybnorm import _core, functional
from pybnorm._arrays import CPU, Buffer
from pybnorm.enums import DataType, Operation
from pybnorm.errors import LibraryVersionError
from pybnorm.torch.calls import REFUSALS

__all__ = ["Installation", "install"]

_DTYPES = {5: DataType.FLOAT16, 6: DataType.FLOAT32, 15: DataType.BFLOAT16}  # by PyTorch's numbers
_lock = threading.Lock()
_installed: set[Installation] = set()


class Installation:
    """What `install` did: `remove` undoes it, and so does the end of a ``with`` block."""

    def remove(self) -> None:
        """PyTorch's own kernels compute again, once nothing else is installed. A second time does nothing."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
                if not _installed:
                    _core.remove_torch_kernels()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def install() -> Installation:
    """Have PyTorch's own batch norm on the CPU computed by oneDNN: ``torch.nn.BatchNorm2d`` and the like, unchanged.

    The kernels of ``aten::native_batch_norm`` and ``aten::native_batch_norm_backward`` are replaced in this
    process, for all threads. PyTorch's autograd stays around them, so no Python runs in a step. What pybnorm does
    not take (float64, 16-bit parameters, gaps between elements, gradients in another layout, evaluation's
    gradients) PyTorch's own kernels still compute. ``torch.compile`` makes code of its own in place of both.

    Returns
    -------
    Installation
        For ``with``, or to `~Installation.remove`. Without either it is for good.

    Raises
    ------
    LibraryVersionError
        PyTorch is older than 2.10.
    LibraryNotFoundError
        No oneDNN is here.

    Notes
    -----
    PyTorch warns once, on standard error, that its kernels are overridden. On a GPU nothing changes.

    Examples
    --------
    >>> import torch
    >>> norm = torch.nn.BatchNorm2d(16)
    >>> with pybnorm.torch.install():
    ...     y = norm(torch.randn(4, 16, 8, 8))
    >>> bool(y.mean().abs() < 1e-5)
    True
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise LibraryVersionError(
            f"install() needs PyTorch 2.10 or newer, this is {torch.__version__}; use convert()", backend="torch"
        )
    _core.load("onednn")
    made = Installation()
    with _lock:
        if not _installed:
            _core.install_torch_kernels("libtorch_cpu.so", functional._local, _plan_of)
        _installed.add(made)
    return made


def _plan_of(
    key: bytes,
    operation: int,
    dtype: int,
    dims: list[int],
    strides: list[int],
    training: bool,
    running: bool,
    epsilon: float,
    factor: float,
) -> tuple[Any, Any, Any]:
    """The plan of a key in this thread, and constants for parameters that are not there; None where there is none."""
    found: tuple[Any, Any, Any] = None, None, None
    x = Buffer(0, tuple(dims), tuple(strides), _DTYPES[dtype], CPU, 0, True, None)
    try:
        handle = functional._default_handle(x, "onednn", False)
        like = _core.TensorDescriptor("onednn", x.dtype, x.dims, x.strides)
        if operation == Operation.FORWARD_TRAINING:
            plan: Any = handle.plan_forward_training(
                like, epsilon=epsilon, exponential_average_factor=factor, running=running
            )
        elif operation == Operation.FORWARD_INFERENCE:
            plan = handle.plan_forward_inference(like, epsilon=epsilon)
        else:
            plan = handle.plan_backward(like, epsilon=epsilon)
        found = plan, np.ones(dims[1], np.float32), np.zeros(dims[1], np.float32)
    except REFUSALS:
        pass
    functional._local.ready.keep(key, found, functional.MOST_READY)
    return found


@atexit.register
def _remove() -> None:
    """Threads of autograd may still run when Python no longer does."""
    with _lock:
        _installed.clear()
        _core.remove_torch_kernels()
