"""Batch norm, an addition and ReLU as one call of `native` on PyTorch's tensors.

Three calls read and write the data five times forward and eight times backward, where one does three and five times.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pybnorm import functional
from pybnorm._core import Cache, Handle, TensorDescriptor
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.torch import calls
from pybnorm.torch.calls import Optional

__all__ = ["differentiate", "fits", "infer", "train"]

_DTYPES = {
    torch.float64: DataType.FLOAT64,
    torch.float32: DataType.FLOAT32,
    torch.float16: DataType.FLOAT16,
    torch.bfloat16: DataType.BFLOAT16,
}


def fits(x: torch.Tensor, vectors: Sequence[Optional]) -> bool:
    """Say whether one call takes a dense x and its parameters and statistics."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.dtype in _DTYPES
        and 2 <= x.dim() <= 8
        and x.numel() > x.shape[1]  # of one value in a channel batch_norm says what is wrong
        and all([v is not None and v.dtype is kind and v.is_contiguous() and v.device == x.device for v in vectors])
        and (x.device.type == "cpu" or (x.is_cuda and _gpu_backend() is not None))
    )


def _gpu_backend() -> str | None:
    """The kernels of ours for this PyTorch's GPUs; None where they cannot be compiled."""
    place = calls.gpu()
    return place.backend if place and functional._backend_of(place.memory) == place.backend else None


class _Device:
    """A device's handle for these calls and what was prepared with it, for all threads: autograd has its own.

    A thread holds the lock from the choice of the stream to the end of the call.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock, self.plans, self.device = threading.RLock(), Cache(), device
        with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):
            self.handle = Handle("native" if device.type == "cpu" else _gpu_backend() or "")

    def plan(self, x: torch.Tensor, residual: bool, eps: float, make: Callable[..., Any], **options: Any) -> Any:
        """The plan of a call, which is made once."""
        key = (make.__name__, x.dtype, x.shape, x.stride(), residual, eps)
        found = self.plans.get(key)
        if found is None:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ArgumentError(
                    "input", "the first call of its kind while a graph is captured", "one such call before"
                )
            with TensorDescriptor(self.handle.backend, _DTYPES[x.dtype], tuple(x.shape), x.stride()) as like:
                found = make(self.handle, like, activation="relu", epsilon=eps, z=residual, **options)
            self.plans.keep(key, found, functional.MOST_READY)
        return found

    def call(self, plan: Any, x: torch.Tensor, *arguments: Any, **more: Any) -> None:
        """Run a plan on PyTorch's current stream, with a workspace from its allocator."""
        given = {name: tensor for name, tensor in more.items() if tensor is not None}
        space = None
        if plan.workspace_size:
            memory = torch.empty(plan.workspace_size, dtype=torch.uint8, device=self.device)
            space = memory.data_ptr(), plan.workspace_size
        with self.lock:
            if self.device.type != "cpu":
                self.handle.follow_stream(x)
            plan(x, *arguments, space, **given)


_devices: dict[torch.device, _Device] = {}
_making = [threading.Lock()]


def _after_fork_in_child() -> None:
    """Handles cannot be used after a fork."""
    _devices.clear()
    _making[:] = [threading.Lock()]


os.register_at_fork(after_in_child=_after_fork_in_child)


def _of(x: torch.Tensor) -> _Device:
    found = _devices.get(x.device)
    if found is None:
        with _making[0]:
            found = _devices.get(x.device) or _devices.setdefault(x.device, _Device(x.device))
    return found


def train(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: Optional, eps: float
) -> tuple[torch.Tensor, ...]:
    """``relu(batch_norm(x) + residual)``; the batch's mean, inverse standard deviation and unbiased variance.

    x, weight and bias are as `fits` has them, `residual` has the shape, strides and dtype of x.
    """
    on, y = _of(x), torch.empty_like(x)
    plan = on.plan(
        x, residual is not None, eps, Handle.plan_forward_training, running=True, exponential_average_factor=1.0
    )
    mean, inverse, running, variance = (torch.empty_like(weight) for _ in range(4))
    on.call(plan, x, weight, bias, y, running, variance, mean, inverse, z=residual)
    return y, mean, inverse, variance


def infer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor,
    residual: Optional, eps: float,
) -> torch.Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)`` by given statistics; arguments as those of `train`."""
    on, y = _of(x), torch.empty_like(x)
    plan = on.plan(x, residual is not None, eps, Handle.plan_forward_inference)
    on.call(plan, x, weight, bias, mean, variance, y, z=residual)
    return y


def differentiate(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, mean: torch.Tensor,
    inverse: torch.Tensor, residual: bool, eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional]:  # fmt: skip
    """dx, dweight, dbias, and the residual's gradient or None; dy and y have the shape, strides and dtype of x."""
    on = _of(x)
    plan = on.plan(x, residual, eps, Handle.plan_backward)
    dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    dz = torch.empty_like(x) if residual else None
    on.call(plan, x, dy, weight, dx, dweight, dbias, mean, inverse, y=y, bias=bias, dz=dz)
    return dx, dweight, dbias, dz
