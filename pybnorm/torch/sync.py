"""Synchronized batch norm: the module, and its derivative over `pybnorm.sync`."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TypeVar

import torch

from pybnorm import sync
from pybnorm._arrays import CPU, as_buffer
from pybnorm._core import Handle, backends, device_types
from pybnorm.torch import calls
from pybnorm.torch.derivatives import second
from pybnorm.torch.modules import _BatchNorm

__all__ = ["SyncBatchNorm"]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_handles: dict[tuple[str, int], Handle] = {}
os.register_at_fork(after_in_child=_handles.clear)


class _Ranks:
    """Batch norm with the other ranks, for one dtype and device. Making one is a collective."""

    def __init__(self, group: Any, x: torch.Tensor, deterministic: bool) -> None:
        self.group = group
        buffer = as_buffer(x, "input")
        self.on_cpu = buffer.device_type == CPU
        # No handle of `functional`: autograd runs backward in another thread, while that one may follow its stream.
        key = next(name for name in backends() if buffer.device_type in device_types(name)), buffer.device_id
        if key not in _handles:
            with contextlib.nullcontext() if self.on_cpu else torch.cuda.device(x.device):
                _handles[key] = Handle(key[0])
        self.handle = _handles[key]
        self.handle.follow_stream(x)
        self.layer = sync.SyncBatchNorm(self.handle, group, x.shape[1], buffer.dtype, deterministic=deterministic)
        self._sizes: dict[Any, int] = {}

    def call(self, name: str, x: torch.Tensor, *arrays: torch.Tensor | None, **options: Any) -> None:
        """``forward`` or ``backward`` on PyTorch's current stream, with a workspace from its allocator."""
        self.handle.follow_stream(x)
        call = getattr(self.layer, name)
        if self.on_cpu:
            call(x, *arrays, **options)
            return
        given = [(a.dtype, a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in options.values()]
        key = name, x.shape, x.stride(), *(None if a is None else (a.dtype, a.stride()) for a in arrays), *given
        if key not in self._sizes:
            self._sizes[key] = self.layer.workspace_size(name, x, *arrays, **options)
        memory = torch.empty(self._sizes[key], dtype=torch.uint8, device=x.device)
        call(x, *arrays, **options, workspace=memory)


class _Synchronized(torch.autograd.Function):
    """Batch norm by the statistics of all ranks' batches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        factor: float,
        eps: float,
        ranks: _Ranks,
    ) -> torch.Tensor:
        y, kind = torch.empty_like(x), torch.float64 if x.dtype == torch.float64 else torch.float32
        saved = [torch.empty(x.shape[1], dtype=kind, device=x.device) for _ in range(2)]
        ranks.call(
            "forward", x, weight, bias, y, epsilon=eps, exponential_average_factor=factor, running_mean=mean,
            running_variance=variance, saved_mean=saved[0], saved_inv_variance=saved[1],
        )  # fmt: skip
        ctx.save_for_backward(x, weight, *saved)
        ctx.eps, ctx.ranks = eps, ranks
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        found = _Differentiate.apply(x, dy, weight, *saved, ctx.eps, ctx.needs_input_grad[:3], ctx.ranks)
        return *(one if need else None for one, need in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 5


class _Differentiate(torch.autograd.Function):
    """The first derivative by the library; its own is that of the formula, in which sums are those of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dy: torch.Tensor, weight: Any, mean: Any, inverse: Any, eps: float, wanted: Any,
        ranks: _Ranks,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        like = mean if weight is None else weight
        # dx is computed also where nobody wants it: the other ranks, which may, wait in the same collective.
        dx, *sums = torch.empty_like(x), *(torch.empty_like(like) if need else None for need in wanted[1:])
        ranks.call("backward", x, calls.like(dy, x), weight, dx, *sums, saved_mean=mean, saved_inv_variance=inverse)
        ctx.save_for_backward(x, dy, weight, mean, inverse)
        ctx.eps, ctx.ranks = eps, ranks
        return dx, *sums

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        *leaves, mean, inverse = ctx.saved_tensors

        def total(values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = _Total.apply(values, ctx.ranks.group)
            return found

        found = second(leaves, gradients, mean, inverse, ctx.eps, True, total)
        return *found, None, None, None, None, None


class _Total(torch.autograd.Function):
    """The sum of all ranks' tensors, on which each rank's depends."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, found = group, values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Total.apply(gradient, ctx.group), None


def _synchronized(
    module: Any, group: Any, input: torch.Tensor, mean: torch.Tensor | None, variance: torch.Tensor | None,
    momentum: float,
) -> torch.Tensor:  # fmt: skip
    x = calls.dense(input)
    joined = module.__dict__.setdefault("_joined", {})
    deterministic = module.deterministic or torch.are_deterministic_algorithms_enabled()
    key = group, x.dtype, x.device, x.shape[1], deterministic
    ranks = joined.get(key)
    if ranks is None:
        ranks = joined[key] = _Ranks(group, x, deterministic)
    y: torch.Tensor = _Synchronized.apply(x, module.weight, module.bias, mean, variance, momentum, module.eps, ranks)
    return y


if hasattr(getattr(torch, "compiler", None), "disable"):  # PyTorch 1 has no compiler; a collective is none of a graph
    _synchronized = torch.compiler.disable(_synchronized)


class SyncBatchNorm(_BatchNorm, torch.nn.modules.batchnorm._BatchNorm):
    """``torch.nn.SyncBatchNorm``, arguments and state included, computed by the vendors' libraries.

    It computes on CPUs too, over gloo. The batches of ranks may differ in size, and may be empty. Without a process
    group, with a group of one rank, and in evaluation it is `BatchNorm2d` for any number of axes.

    Parameters
    ----------
    num_features, eps, momentum, affine, track_running_stats, device, dtype
        As in ``torch.nn.BatchNorm2d``.
    process_group : optional
        The ranks whose batches make the statistics. Default: all.
    **options
        What later versions of PyTorch know, such as ``bias``.

    Notes
    -----
    A second derivative, where it is taken, must be taken on all ranks: its sums are theirs. Compilers leave
    synchronized calls out of their graphs. The first call in training for each dtype is one collective more, in which
    the ranks compare their arguments. A rank whose call is refused raises its own error and the others `RankError`;
    `fallback` is for what is not synchronized, because a rank cannot leave its call to PyTorch alone. It is no subclass
    of ``torch.nn.SyncBatchNorm``, because DistributedDataParallel refuses that on CPUs.
    """

    joins = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _normalized(
        self: Any,
        input: torch.Tensor,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        batch: bool,
        momentum: float,
    ) -> torch.Tensor:
        group = _group(self.process_group) if batch and self.training else None
        if group is None:
            return super()._normalized(input, mean, variance, batch, momentum)
        return _synchronized(self, group, input, mean, variance, momentum)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and files: without what was made with the other ranks."""
        return {name: value for name, value in self.__dict__.items() if name != "_joined"}

    @classmethod
    def convert_sync_batchnorm(cls, module: _Module, process_group: Any = None) -> _Module:
        """Replace all batch norms of a model by this class, as ``torch.nn.SyncBatchNorm``'s method does.

        Parameters
        ----------
        module : torch.nn.Module
        process_group : optional
            Default: all ranks.

        Returns
        -------
        torch.nn.Module
            `module`; a new one where it is a batch norm itself.
        """
        found: _Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for part in found.modules():
            if type(part) is torch.nn.SyncBatchNorm:
                part.__class__ = cls
        return found


def _group(given: Any) -> Any:
    """The process group to synchronize in; None where there is nothing to synchronize."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    group = given or torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None
