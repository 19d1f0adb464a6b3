"""Batch norm, an addition and ReLU as one call, forward and backward: cuDNN's fused plans on PyTorch's tensors.

Three calls read and write the data five times forward and eight times backward, where the fused ones do three and five
times, and a bit for each element. Both directions' plans are made together, since one reads what the other leaves
(the plans' reserve). None in place of a result says that there is no such call, and nothing was written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pybnorm import functional
from pybnorm._core import Cache, Handle, TensorDescriptor, call_overridable
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, NotSupportedError
from pybnorm.torch.autograd import _tracing, _transformed
from pybnorm.torch.calls import REFUSALS, Optional, like
from pybnorm.torch.derivatives import DIRECT, Function, forward_mode

__all__ = ["aligned", "batch_norm_relu", "fits"]

_DTYPES = {torch.float32: DataType.FLOAT32, torch.float16: DataType.FLOAT16, torch.bfloat16: DataType.BFLOAT16}
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
_ALIGNMENT = 16  # of every tensor that a fused plan takes


def batch_norm_relu(
    x: torch.Tensor,
    mean: Optional,
    variance: Optional,
    weight: Optional,
    bias: Optional,
    residual: Any,
    training: bool,
    factor: float,
    eps: float,
    deterministic: bool,
) -> torch.Tensor | None:
    """``relu(batch_norm(x) + residual)``, or None.

    Parameters
    ----------
    x, mean, variance, weight, bias, training, factor, eps
        As `pybnorm.torch.batch_norm` has them.
    residual : Tensor or None
        Like x.
    deterministic : bool
        Only ways whose bits repeat.
    """
    if not x.is_cuda or type(x) is not torch.Tensor or _transformed() or forward_mode() or _tracing():
        return None
    # The bits of all fused plans repeat: as the operators ask for them, so that both have the same ones.
    plans = _plans_of(x, residual is not None, training, mean is not None, factor, eps, True)
    if plans is None:
        return None
    direct = kernels.get("cuda") if training else None
    rest = factor, eps, False, deterministic
    if direct is None or direct[2] is None or not torch.is_grad_enabled():
        return _called(plans, direct, x, mean, variance, weight, bias, residual, training, rest)
    # What else the kernels in C refuse, those in Python copy.
    if weight is None or bias is None or weight.dtype is not torch.float32 or not _fits(residual, x):
        return None
    vectors = weight, bias, mean, variance
    tracked: torch.Tensor = call_overridable(direct[2], x, *vectors, residual, factor, eps, deterministic)
    return tracked


def _called(
    plans: _Plans, direct: Any, x: torch.Tensor, mean: Optional, variance: Optional, weight: Any, bias: Any,
    residual: Any, training: bool, rest: tuple[Any, ...],
) -> torch.Tensor | None:  # fmt: skip
    """The call where the derivative is Python's, or there is none."""
    if x.data_ptr() % _ALIGNMENT or (residual is not None and not _alike(x, residual)):
        return None
    vectors: tuple[Any, ...] = (weight, bias) if mean is None else (weight, bias, mean, variance)
    if direct is None:
        if not fits(x, vectors) or any([v.data_ptr() % _ALIGNMENT for v in vectors]):
            return None
    elif any([v is None or v.dtype is not torch.float32 for v in vectors]):
        return None
    y: torch.Tensor
    if torch.is_grad_enabled():
        if not training and any(t is not None and t.requires_grad for t in (x, weight, bias, residual)):
            return None
        if training:
            y = _fused(x, weight, bias, residual, mean, variance, (plans, direct, rest))
            return y
    if direct is not None:
        y = direct[0](x, weight, bias, mean, variance, residual, *rest)[0]
    else:
        y = plans.forward(x, weight, bias, residual, mean, variance)[0]
    return y


def fits(x: torch.Tensor, vectors: Sequence[Optional]) -> bool:
    """Whether dtypes, shapes and memory formats are those of fused plans; addresses, which compilers have not, are not
    looked at.
    """
    return _data(x) and all(
        [v is not None and v.dtype is torch.float32 and v.is_contiguous() and v.device == x.device for v in vectors]
    )


def _data(x: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and x.dim() in _LAYOUTS
        and x.is_contiguous(memory_format=_LAYOUTS[x.dim()])
        and x.numel() > x.shape[1]  # of one value in a channel batch_norm says what is wrong
    )


def aligned(tensor: torch.Tensor, alignment: int = _ALIGNMENT) -> torch.Tensor:
    """The tensor, or a copy where its address is less aligned."""
    return tensor.clone() if tensor.data_ptr() % alignment else tensor


def _alike(x: torch.Tensor, other: Any) -> bool:
    return _fits(other, x) and not other.data_ptr() % _ALIGNMENT


def _fits(residual: Any, x: torch.Tensor) -> bool:
    """Whether a residual is none, or is like x."""
    return residual is None or (
        type(residual) is torch.Tensor
        and residual.shape == x.shape
        and residual.dtype is x.dtype
        and residual.device == x.device
        and residual.stride() == x.stride()
    )


class _Shared:
    """A device's handle for these calls and what was prepared with it, for all threads: autograd has its own.

    A thread holds the lock from the choice of the stream to the end of the call.
    """

    def __init__(self, index: int) -> None:
        self.lock, self.plans = threading.RLock(), Cache()
        with torch.cuda.device(index):
            self.handle = Handle("cudnn")


_devices: dict[int, _Shared] = {}
ready = Cache()
"""What kernels in C have asked for, by their keys."""
kernels: dict[str, Any] = {}
"""By kind of device, once plans were made: what `fused_operators.kernels` returned."""
find_kernels: Callable[[str], Any] | None = None
"""Has the kernels of a dispatch key; from `fused_operators`, which is above this module."""
_making = [threading.Lock()]


def _after_fork_in_child() -> None:
    """Handles cannot be used after a fork."""
    _devices.clear()
    ready.clear()
    _making[:] = [threading.Lock()]


os.register_at_fork(after_in_child=_after_fork_in_child)


def _plans_of(
    x: torch.Tensor, residual: bool, training: bool, running: bool, factor: float, eps: float, deterministic: bool,
    *, known: bool = False,
) -> _Plans | None:  # fmt: skip
    """The plans of a call, which are made once; None: there are none.

    While a graph is captured none can be made: None too, or an `ArgumentError` where it has to be `known`.
    """
    options = residual, training, running, factor, eps, deterministic
    key = (x.dtype, x.shape, x.stride(), *options)
    shared = _devices.get(x.get_device())
    if shared is not None:
        try:
            found: _Plans | None = shared.plans[key]
        except KeyError:
            pass
        else:
            return found
    if torch.version.hip is not None or not _data(x):
        return None
    if torch.cuda.is_current_stream_capturing():
        if known:
            raise ArgumentError("x", "the first call of its kind while a graph is captured", "one such call before")
        return None
    try:
        with _making[0], torch.cuda.device(x.device):
            shared = _devices.get(x.device.index) or _devices.setdefault(x.device.index, _Shared(x.device.index))
            found = _Plans(shared, x, *options)
        _accelerate(x)
    except (*REFUSALS, NotSupportedError):
        found = None
    if shared is not None:
        shared.plans.keep(key, found, functional.MOST_READY)
    return found


def _accelerate(x: torch.Tensor) -> None:
    """Have kernels in C, where there can be any; only now, since these need the library."""
    if x.device.type not in kernels and find_kernels is not None:
        kernels[x.device.type] = find_kernels(x.device.type.upper())


class _Plans:
    """A forward plan and, in training, its backward's."""

    def __init__(
        self, shared: _Shared, x: torch.Tensor, residual: bool, training: bool, running: bool, factor: float,
        eps: float, deterministic: bool,
    ) -> None:  # fmt: skip
        self.handle, self.lock, self.place = shared.handle, shared.lock, x.device
        self.residual, self.running = residual, running
        described = TensorDescriptor(shared.handle.backend, _DTYPES[x.dtype], tuple(x.shape), x.stride())
        options: dict[str, Any] = {"activation": "relu", "epsilon": eps, "deterministic": deterministic}
        if residual:
            options["z"] = True
        self.reserve_size = self.back_workspace = 0
        if training:
            self.plan: Any = self.handle.plan_forward_training(
                described, running=running, exponential_average_factor=factor, **options
            )
            self.back: Any = self.handle.plan_backward(described, **options)
            self.reserve_size, self.back_workspace = self.plan.reserve_size, self.back.workspace_size
            way, back = (plan.algorithm.partition(":")[0] for plan in (self.plan, self.back))
            if residual and (way, self.reserve_size) != (back, self.back.reserve_size):
                raise NotSupportedError(
                    backend="cudnn", function="plan", status=0, status_name="two ways", text=""
                )  # caught
        else:
            self.plan, self.back = self.handle.plan_forward_inference(described, **options), None
        self.workspace = self.plan.workspace_size

    def space(self, nbytes: int) -> torch.Tensor | None:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.place) if nbytes else None

    def forward(
        self, x: torch.Tensor, weight: Any, bias: Any, residual: Any, mean: Any, variance: Any, reserve: Any = None
    ) -> tuple[torch.Tensor, Any, Any, Any]:
        """The result y, the batch's mean and inverse standard deviation, and the reserve (as given) or None."""
        y, space = torch.empty_like(x), self.space(self.workspace)
        given = {} if residual is None else {"z": residual}
        if self.back is None:
            with self.lock:
                self.handle.follow_stream(x)
                self.plan(x, weight, bias, mean, variance, y, _region(space), **given)
            return y, None, None, None
        saved, inverse = torch.empty_like(weight), torch.empty_like(weight)
        reserve = self.space(self.reserve_size) if reserve is None else reserve
        if reserve is not None:
            given["reserve"] = _region(reserve)
        with self.lock:
            self.handle.follow_stream(x)
            self.plan(x, weight, bias, y, mean, variance, saved, inverse, _region(space), **given)
        return y, saved, inverse, reserve

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, weight: Any, bias: Any, y: torch.Tensor, saved: Any, inverse: Any,
        reserve: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:  # fmt: skip
        """dx, dweight, dbias, and dz or None."""
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        dz = torch.empty_like(x) if self.residual else None
        given = {} if dz is None else {"dz": dz}
        space = self.space(self.back_workspace)
        if reserve is not None:
            given["reserve"] = _region(reserve)
        with self.lock:
            self.handle.follow_stream(x)
            self.back(x, dy, weight, dx, dweight, dbias, saved, inverse, _region(space), y=y, bias=bias, **given)
        return dx, dweight, dbias, dz


def _region(space: torch.Tensor | None) -> tuple[int, int] | None:
    """As a plan takes it with the fewest questions."""
    return None if space is None else (space.data_ptr(), space.numel())


class _Fused(Function):
    """The call with its derivative; a second one goes over `Differentiate`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        residual: Optional,
        mean: Optional,
        variance: Optional,
        rest: tuple[Any, ...],
    ) -> torch.Tensor:
        plans, direct, question = rest
        if direct is None:
            y, saved, inverse, reserve = plans.forward(x, weight, bias, residual, mean, variance)
        else:
            y, saved, inverse, reserve = direct[0](x, weight, bias, mean, variance, residual, *question)
        ctx.save_for_backward(x, weight, bias, y, saved, inverse, reserve)
        ctx.rest = rest
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Optional, ...]:
        x, weight, bias, y, saved, inverse, reserve = ctx.saved_tensors
        plans, direct, question = ctx.rest
        if torch.is_grad_enabled():
            dz = dy * (y > 0)
            back = x, dz, weight, saved, inverse, question[1], True, (True,) * 3, *question[2:]
            dx, dweight, dbias = DIRECT.back(*back)
        elif direct is None:
            dy = aligned(like(dy, x))
            dx, dweight, dbias, dz = plans.backward(x, dy, weight, bias, y, saved, inverse, reserve)
        else:
            given = x, dy, weight, bias, y, saved, inverse, reserve, plans.residual, plans.running
            dx, dweight, dbias, dz = direct[1](*given, *question)
        return dx, dweight, dbias, dz if plans.residual else None, None, None, None


_fused = _Fused.apply
