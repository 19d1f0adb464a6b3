"""The vendors' calls on PyTorch's tensors, without a derivative: dtypes, gaps, alignment, and what PyTorch computes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from pybnorm import functional
from pybnorm._arrays import CUDA, ROCM
from pybnorm.errors import ArgumentError, LibraryError, NotInitializedError, UnsupportedError

__all__ = ["REFUSALS", "dense", "differentiate", "fits", "gpu", "infer", "like", "train"]

REFUSALS = (ArgumentError, UnsupportedError, LibraryError, NotInitializedError)
"""Raised before anything is written."""

Optional: TypeAlias = "torch.Tensor | None"
Gradients: TypeAlias = "tuple[torch.Tensor | None, ...]"

_SHORT = (torch.float16, torch.bfloat16)
_DTYPES = {torch.float64, torch.float32, *_SHORT}


class Gpu(NamedTuple):
    """The GPUs that a build of PyTorch names cuda, whoever made them."""

    backend: str
    memory: int
    """DLPack's number of its memory."""
    operator: str
    """The operator that PyTorch prefers there."""
    library: str


_OF_ROCM = Gpu("native_rocm", ROCM, "miopen_batch_norm", "libtorch_hip.so")
_OF_CUDA = Gpu("native_cuda", CUDA, "cudnn_batch_norm", "libtorch_cuda.so")


def gpu() -> Gpu | None:
    """This PyTorch's GPUs; None where it has none."""
    return _OF_ROCM if torch.version.hip is not None else _OF_CUDA if torch.version.cuda is not None else None


raised = threading.local()
"""The error of a call that a kernel in C left to Python, of this thread: `error`."""
compiled = False
"""True when PyTorch's dispatcher has this package's kernels in C (`pybnorm.torch.installation`)."""


def fits(x: torch.Tensor, *vectors: Any) -> bool:
    """Say whether the kernels in C take x with these parameters and statistics."""
    if not compiled or torch.compiler.is_compiling():  # which takes other operators, and cannot trace what follows
        return False
    if x.dtype not in _DTYPES or x.layout is not torch.strided or x.is_nested or not 2 <= x.dim() <= 8:
        return False
    kinds: tuple[Any, ...] = (torch.float64 if x.dtype is torch.float64 else torch.float32, x.dtype)
    channels, device = x.shape[1:2], x.device
    for v in vectors:
        if v is None:
            continue
        if not (
            isinstance(v, torch.Tensor)
            and v.dtype in kinds
            and v.shape == channels
            and v.device == device
            and v.layout is torch.strided
            and v.is_contiguous()
        ):
            return False
        kinds = (v.dtype,)  # all of one
    return x.is_cpu or (x.is_cuda and _on_gpu())


@functools.cache
def _on_gpu() -> bool:
    """Say whether native computes on this PyTorch's GPUs."""
    place = gpu()
    return place is not None and functional._backend_of(place.memory) == place.backend


def train(x: torch.Tensor, weight: Optional, bias: Optional, eps: float, fallback: bool) -> tuple[torch.Tensor, ...]:
    """Normalize a dense x by the batch: y, the batch's mean, its inverse standard deviation and its unbiased variance.

    16-bit `weight` and `bias`, where x is of their dtype, are computed with in float32.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, variance = (torch.empty(x.shape[1], dtype=kind, device=x.device) for _ in range(2))
    running = {"running_mean": mean, "running_variance": variance}
    options = {"exponential_average_factor": 1.0, "epsilon": eps}  # with 1 nothing is read of the two
    try:
        call = _repeating(functional.batch_norm_training)
        y, *saved = call(x, _wide(weight, x), _wide(bias, x), **running, **options)
    except REFUSALS:
        if not fallback:
            raise
        native = torch.ops.aten.native_batch_norm
        y, *saved = native(x, _wide(weight, x), _wide(bias, x), mean.zero_(), variance.fill_(1), True, 1.0, eps)
    return y, *saved, variance


def infer(
    x: torch.Tensor, weight: Optional, bias: Optional, mean: torch.Tensor, variance: torch.Tensor, eps: float,
    fallback: bool,
) -> torch.Tensor:  # fmt: skip
    """Normalize by given statistics; arguments as those of `train`."""
    vectors = {"running_mean": mean, "running_variance": variance, "scale": weight, "bias": bias}
    try:
        wide = {name: _wide(vector, x) for name, vector in vectors.items()}
        y: torch.Tensor = _repeating(functional.batch_norm_inference)(x, **wide, epsilon=eps)
    except REFUSALS:
        if not fallback:
            raise
        y = torch.ops.aten.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
    return y


def differentiate(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, inverse: torch.Tensor, eps: float,
    wanted: Sequence[bool], fallback: bool,
) -> Gradients:  # fmt: skip
    """dx, dweight and dbias by the batch's statistics; None for what is not `wanted`."""
    try:
        call = _repeating(functional.batch_norm_backward)
        dx, *sums = call(x, dy, _wide(weight, x), mean, inverse, epsilon=eps)
    except REFUSALS:  # of what forward did not need
        if not fallback:
            raise
        slope = torch.ones_like(mean) if weight is None else _wide(weight, x)  # without one there are no sums on CUDA
        native = torch.ops.aten.native_batch_norm_backward
        dx, *sums = native(dy, x, slope, None, None, mean, inverse, True, eps, [True, True, True])
    kind = mean.dtype if weight is None else weight.dtype
    found = dx, sums[0].to(kind), sums[1].to(kind)
    return tuple([one if want else None for one, want in zip(found, wanted, strict=True)])


def _repeating(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `functional`, whose bits repeat where PyTorch's switch asks for it: those of native always do."""
    return functools.partial(function, deterministic=torch.are_deterministic_algorithms_enabled())


# ---------------------------------------------------------------- what the libraries take


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps or overlaps, in an axis order that backends are fast on; PyTorch copies the same."""
    if x.is_contiguous():
        return x
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and (x.is_contiguous(memory_format=formats[x.dim()]) or _is_channels_last(x)):
        return x.contiguous(memory_format=formats[x.dim()])  # which is x itself where it is
    return x.contiguous()


def _is_channels_last(x: torch.Tensor) -> bool:
    """Say whether the axes lie in memory as those of channels last, with gaps, by PyTorch's rule."""
    last = 0
    for axis in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.size(axis) == 0 or x.stride(axis) < last or (axis == 0 and last == x.stride(1)):
            return False
        last = x.stride(axis) * max(x.size(axis), 1)
    return bool(x.stride(1))


def like(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient with x's strides."""
    return gradient if gradient.stride() == x.stride() else torch.empty_like(x).copy_(gradient)


def _wide(vector: Optional, x: torch.Tensor) -> Optional:
    """A parameter of x's 16-bit dtype as the libraries take it."""
    return vector.float() if vector is not None and vector.dtype == x.dtype in _SHORT else vector
