"""``prefer``: calls that PyTorch's own kernels make faster, as a table or a measurement says, are left to them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from pybnorm import _arguments
from pybnorm import functional as arrays
from pybnorm._arrays import as_buffer
from pybnorm._core import TensorDescriptor
from pybnorm.errors import ArgumentError
from pybnorm.torch import calls, faster, measured
from pybnorm.torch.calls import dense

__all__ = ["chosen", "own", "reason"]

_log = logging.getLogger("pybnorm.torch")


def chosen(operation: str, x: torch.Tensor) -> str | None:
    """Why a call is left to PyTorch, by the table for this device and these versions; None: it is not."""
    layout = measured.layout_of(x)
    if layout is None:
        return None
    size = x.shape[0], x.shape[1], math.prod(x.shape[2:]), x.numel() * x.element_size() / 1e6
    for *bounds, whole in _boxes(x.device, operation, str(x.dtype)[6:], layout):
        if whole in (None, x.shape[1] * x.element_size() % 16 == 0) and all(
            low <= value <= high for value, (low, high) in zip(size, bounds, strict=True)
        ):
            return f"PyTorch's own kernel: measured faster on {measured.place(x.device)}"
    return None


@functools.cache
def _boxes(device: torch.device, operation: str, dtype: str, layout: str) -> list[Any]:
    """The bounds of boxes that were measured here."""
    version = torch.backends.cudnn.version() if device.type == "cuda" and not torch.version.hip else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    here = (
        ".".join(torch.__version__.split(".")[:2]),
        "" if version is None else f"{version // 10000}.{version // 100 % 100}",
    )
    return [
        bounds
        for devices, *versions, boxes in faster.MEASURED
        if name in devices and tuple(versions) == here
        for what, dtypes, where, *bounds in boxes
        if what == operation and dtype in dtypes and where == layout
    ]


def own(
    operation: str,
    data: dict[str, Any],
    vectors: dict[str, Any],
    options: dict[str, Any],
    prefer: str,
    ours: Callable[[], tuple[Callable[..., Any], bool]],
) -> tuple[Callable[..., Any], bool] | None:
    """PyTorch's own call with the arguments of `functional`'s prepared ones, where it is chosen; else None.

    Also whether it may be kept.

    Parameters
    ----------
    operation : str
    data, vectors, options : dict
        As `functional` has them.
    prefer : "fastest" or "measured"
    ours : callable
        Prepares our call.
    """
    x, dy = data["x"], data.get("dy")
    if operation == "backward" and (
        vectors["saved_mean"] is None
        or not hasattr(torch.ops.aten, "batch_norm_backward")  # before PyTorch 2.4
        or not isinstance(dy, torch.Tensor)
        or (dy.shape, dy.stride(), dy.dtype) != (x.shape, x.stride(), x.dtype)
    ):
        return None
    call = _without_gradient(_CALLS[operation](**{name: options[name] for name in _USED[operation]}))
    if prefer == "measured":
        if any(v is not None and not (isinstance(v, torch.Tensor) and v.dim() == 1) for v in vectors.values()):
            return None
        found = measured.choose(operation, data, vectors, options, ours, call)
        if found is not None:
            return (call, True) if found.theirs else None
    why = chosen(operation, x)
    if why is None:
        return None
    _log.info("%s of %s %s: %s", operation, str(x.dtype)[6:], tuple(x.shape), why)
    return call, prefer == "fastest"


def _without_gradient(call: Callable[..., Any]) -> Callable[..., Any]:
    """As ``torch.no_grad()(call)``, in a quarter of its time."""

    def plain(*arrays: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*arrays)
        torch._C._set_grad_enabled(False)
        try:
            return call(*arrays)
        finally:
            torch._C._set_grad_enabled(True)

    return plain


def _training(epsilon: float, exponential_average_factor: float, saved: bool) -> Callable[..., Any]:
    def call(x: Any, scale: Any, bias: Any, mean: Any, variance: Any, out: None) -> Any:
        found = torch._batch_norm_impl_index(
            x, scale, bias, mean, variance, True, exponential_average_factor, epsilon, torch.backends.cudnn.enabled
        )
        return found[:3] if saved else (found[0], None, None)

    return call


def _inference(epsilon: float) -> Callable[..., Any]:
    def call(x: Any, scale: Any, bias: Any, mean: Any, variance: Any, out: None) -> Any:
        return torch.batch_norm(x, scale, bias, mean, variance, False, 0.0, epsilon, torch.backends.cudnn.enabled)

    return call


def _backward(epsilon: float) -> Callable[..., Any]:
    nothing: dict[torch.device, torch.Tensor] = {}
    operator = torch.ops.aten.batch_norm_backward.default

    def call(x: Any, dy: Any, scale: Any, mean: Any, inverse: Any, out: None) -> Any:
        if x.device not in nothing:
            nothing[x.device] = torch.empty(0, dtype=torch.uint8, device=x.device)  # what cuDNN reserves
        slope = torch.ones_like(mean) if scale is None else scale
        return operator(dy, x, slope, None, None, mean, inverse, True, epsilon, [True] * 3, nothing[x.device])

    return call


_CALLS: dict[str, Callable[..., Any]] = {"training": _training, "inference": _inference, "backward": _backward}
_USED = {
    "training": ("epsilon", "exponential_average_factor", "saved"), "inference": ("epsilon",), "backward": ("epsilon",)
}  # fmt: skip


def reason(operation: str, x: torch.Tensor, *, prefer: str | None = None) -> str:
    """Which way `batch_norm` computes tensors like x, and why.

    Parameters
    ----------
    operation : str
        "training", "inference" or "backward".
    x : Tensor, shape (N, C, ...)
    prefer : None, "fastest" or "measured"
        As for `batch_norm`. "measured" says what calls with such tensors have found, and itself measures nothing.

    Returns
    -------
    str
        A plan's algorithm and reason (`pybnorm.Plan`), or that the call is left to PyTorch's own kernel.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError, LibraryNotFoundError, NotInitializedError

    Examples
    --------
    >>> import torch
    >>> way, _, why = pybnorm.torch.reason("backward", torch.ones(2, 3, 4, 4)).partition(": ")
    >>> way == "plain" or way in pybnorm.algorithms("onednn")
    True
    """
    methods = {"training": "plan_forward_training", "inference": "plan_forward_inference", "backward": "plan_backward"}
    if not isinstance(operation, str) or operation not in methods:
        raise ArgumentError("operation", operation, "'training', 'inference' or 'backward'")
    _arguments.instance(x, torch.Tensor, "x", "a tensor")
    x = dense(x)
    why, more = None, ""
    if arrays._preferring(prefer) and not calls._asked():
        if prefer == "fastest":
            why = chosen(operation, x)
        else:
            found = measured.known(operation, x) or measured.Found(False, "not measured yet: the first call does")
            why, more = (found.why, "") if found.theirs else (None, f"; {found.why}")
    if why is not None:
        return why
    buffer = as_buffer(x, "x")
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        handle = arrays._default_handle(buffer, arrays._backend_of(buffer.device_type), x.is_cuda)
        plan = getattr(handle, methods[operation])(
            TensorDescriptor(handle.backend, buffer.dtype, buffer.dims, buffer.strides)
        )
    return f"{plan.algorithm}: {plan.reason}{more}"
