"""Synchronized batch norm: the module, and its derivative over `pybnorm.sync`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from pybnorm import functional, sync
from pybnorm._arrays import CPU, as_buffer
from pybnorm._core import Handle
from pybnorm.sync.messages import _WEIGHT, BACKWARD, FORWARD
from pybnorm.torch import calls
from pybnorm.torch.calls import Gradients, Optional
from pybnorm.torch.modules import _BatchNorm
from pybnorm.torch.operators import second

__all__ = ["SyncBatchNorm"]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_handles: dict[tuple[str, int], Handle] = {}
os.register_at_fork(after_in_child=_handles.clear)


class _Ranks:
    """Batch norm with the other ranks, for one dtype and device. Making one is a collective."""

    def __init__(self, group: Any, x: torch.Tensor, deterministic: bool) -> None:
        self.group = group
        buffer = as_buffer(x, "input")
        on_cpu = buffer.device_type == CPU
        # No handle of `functional`: autograd runs backward in another thread, while that one may follow its stream.
        key = functional._backend_of(buffer.device_type) or "", buffer.device_id
        with contextlib.nullcontext() if on_cpu else torch.cuda.device(x.device):
            if key not in _handles:
                _handles[key] = Handle(key[0])
            self.handle = _handles[key]
            self._follow(x)
            self.layer = sync.SyncBatchNorm(self.handle, group, x.shape[1], buffer.dtype, deterministic=deterministic)
        if not on_cpu:
            self.layer._room = functools.partial(_room, x.device)
        self.merges = not on_cpu
        """Whether the ranks' statistics are merged by PyTorch, which reads their counts on the device."""
        memory, channels = self.layer._memory, x.shape[1]
        rows, section = memory.vectors["received"].view(-1, memory.length), memory.section
        self.received = rows[:, :channels], rows[:, section : section + channels], rows[:, 2 * section + _WEIGHT]
        self.places = rows.new_zeros(channels), rows.new_zeros(channels)

    def forward(
        self, x: torch.Tensor, weight: Optional, bias: Optional, y: torch.Tensor, mean: Optional, variance: Optional,
        factor: float, eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], int]]:  # fmt: skip
        """The layer's forward on PyTorch's current stream, with a workspace from its allocator.

        Returns the saved statistics, and what knows the number of elements of all ranks.
        """
        self._follow(x)
        means, inverses, weights = self.received
        if self.merges and (mean is None or mean.dtype == means.dtype):
            given = x, weight, bias, y, mean, variance, *self.places, 1.0, 0.0, eps, factor, True
            counts, finish = self.layer._begin(given)
            merge = torch.batch_norm_gather_stats_with_counts
            saved = merge(means, means, inverses, mean, variance, factor, eps, weights)
            finish(saved[0].data_ptr(), saved[1].data_ptr())
            return *saved, counts.total
        saved = torch.empty_like(self.places[0]), torch.empty_like(self.places[0])
        total = self.layer.forward(
            x, weight, bias, y, epsilon=eps, exponential_average_factor=factor, running_mean=mean,
            running_variance=variance, saved_mean=saved[0], saved_inv_variance=saved[1],
        )  # fmt: skip
        return *saved, lambda: total

    def backward(self, total: int, x: torch.Tensor, *arrays: torch.Tensor | None) -> None:
        """The layer's backward, with the number of elements that forward had: a device waits for nothing."""
        self._follow(x)
        self.layer._differentiate((x, *arrays, 1.0, 0.0), total, None, (total,))

    def refuse(self, code: int, x: torch.Tensor, error: Exception) -> NoReturn:
        """Join the collective of a call as a rank that failed."""
        self._follow(x)
        self.layer._fail(code, error, code == FORWARD or self.layer._reads)

    def _follow(self, x: torch.Tensor) -> None:
        if not self.handle.follow_stream(x) and x.is_cuda:  # PyTorch before 2.10 does not say it in C
            self.handle.set_stream(torch.cuda.current_stream(x.device).cuda_stream)


def _room(device: torch.device, nbytes: int) -> tuple[tuple[int, int], torch.Tensor]:
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return (memory.data_ptr(), nbytes), memory


class _Synchronized(torch.autograd.Function):  # which says under torch.func that it is not for that
    """Batch norm by the statistics of all ranks' batches."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Optional, bias: Optional, mean: Optional, variance: Optional,
        rest: tuple[float, float, _Ranks],
    ) -> torch.Tensor:  # fmt: skip
        factor, eps, ranks = rest
        try:
            y = torch.empty_like(x)
        except Exception as error:  # most likely no memory: the other ranks wait in the collective
            ranks.refuse(FORWARD, x, error)
        *saved, total = ranks.forward(x, weight, bias, y, mean, variance, factor, eps)
        ctx.save_for_backward(x, weight, *saved)
        ctx.rest = eps, ranks, total
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Gradients:
        x, weight, mean, inverse = ctx.saved_tensors
        eps, ranks, counts = ctx.rest
        total = counts()
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            found = _Differentiate.apply(x, dy, weight, mean, inverse, (eps, ranks, total, wanted))
        else:
            found = _differentiate(x, dy, weight, mean, inverse, ranks, total, wanted)
        dx, dweight, dbias = found
        return dx if wanted[0] else None, dweight, dbias, None, None, None


def _differentiate(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, inverse: torch.Tensor, ranks: _Ranks,
    total: int, wanted: Any,
) -> Gradients:  # fmt: skip
    """The first derivative; dx also where nobody wants it: the other ranks, which may, wait in the same collective."""
    like = mean if weight is None else weight
    try:
        dx = torch.empty_like(x)
        dweight, dbias = [torch.empty_like(like) if need else None for need in wanted[1:]]
        dy = calls.like(dy, x)
    except Exception as error:  # most likely no memory: the other ranks wait in the collective
        ranks.refuse(BACKWARD, x, error)
    ranks.backward(total, x, dy, weight, dx, dweight, dbias, mean, inverse)
    return dx, dweight, dbias


class _Differentiate(torch.autograd.Function):
    """The first derivative by the library; its own is that of the formula, in which sums are those of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, inverse: torch.Tensor,
        rest: tuple[float, _Ranks, int, Any],
    ) -> Gradients:  # fmt: skip
        ctx.save_for_backward(x, dy, weight, mean, inverse)
        ctx.rest = rest[:2]
        return _differentiate(x, dy, weight, mean, inverse, *rest[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Gradients:
        eps, ranks = ctx.rest

        def total(values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = _Total.apply(values, ranks.group)
            return found

        x, dy, weight, mean, inverse = ctx.saved_tensors
        return *second(x, dy, weight, mean, inverse, eps, True, gradients, total), None, None, None


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


@torch.compiler.disable  # a collective is none of a graph
def _synchronized(
    module: Any, group: Any, input: torch.Tensor, mean: torch.Tensor | None, variance: torch.Tensor | None,
    momentum: float,
) -> torch.Tensor:  # fmt: skip
    x = calls.dense(input)
    joined = module.__dict__.setdefault("_joined", {})
    deterministic = torch.are_deterministic_algorithms_enabled()
    key = group, x.dtype, x.device, x.shape[1], deterministic
    ranks = joined.get(key)
    if ranks is None:
        ranks = joined[key] = _Ranks(group, x.detach(), deterministic)
    rest = momentum, module.eps, ranks
    y: torch.Tensor = _Synchronized.apply(x, module.weight, module.bias, mean, variance, rest)
    return y


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
    the ranks compare their arguments. A rank whose call is refused raises its own error and the others `RankError`: on
    CPUs in the same call. On a device the others learn of it later: their results are NaN then, running statistics
    included; after a forward their backward or next forward raises, after a backward the next step.
    Devices merge the ranks' statistics by PyTorch's own kernel. `fallback` is for what is not synchronized, because a
    rank cannot leave its call to PyTorch alone. It is no subclass of ``torch.nn.SyncBatchNorm``, because
    DistributedDataParallel refuses that on CPUs.

    Examples
    --------
    >>> import torch
    >>> pybnorm.torch.SyncBatchNorm(16)(torch.ones(2, 16, 4, 4)).abs().max().item()  # of one rank
    0.0
    """

    joins = False

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Any = None, device: Any = None, dtype: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _normalized(
        self: Any, input: torch.Tensor, mean: torch.Tensor | None, variance: torch.Tensor | None, batch: bool,
        momentum: float,
    ) -> torch.Tensor:  # fmt: skip
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

        Examples
        --------
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm2d(16))
        >>> type(pybnorm.torch.SyncBatchNorm.convert_sync_batchnorm(model)[0]).__name__
        'SyncBatchNorm'
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
