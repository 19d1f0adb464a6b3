"""First and second derivatives, for the calls themselves and for the operators over them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from pybnorm._words import PreferWord
from pybnorm.torch import calls
from pybnorm.torch.calls import Gradients, Optional

Rest: TypeAlias = "tuple[Any, ...]"

__all__ = [
    "DIRECT", "WAYS", "Differentiate", "Function", "Inference", "Training", "Way", "WholeTraining", "forward_mode",
    "second",
]  # fmt: skip


Function: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)
"""The function below that of PyTorch 2, whose ``apply`` looks at each argument for what `batch_norm` has seen to, and
which PyTorch 2.14 refuses within the transforms of ``torch.func``, of which operators see one level alone."""


class Way:
    """How a derivative's calls are made: here as they are; the operators that a compiler sees have another."""

    train: Any = staticmethod(calls.train)
    infer: Any = staticmethod(calls.infer)
    differentiate: Any = staticmethod(calls.differentiate)

    def back(
        self, x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, spread: torch.Tensor, *rest: Any
    ) -> Gradients:
        """`calls.differentiate`, differentiable itself where that is wanted."""
        if not torch.is_grad_enabled():
            return self.differentiate(x, dy, weight, mean, spread, *rest)
        found: Gradients = Differentiate.apply(x, dy, weight, mean, spread, (self, *rest))
        return found


class _Preferring(Way):
    """PyTorch's own kernels where they are faster."""

    def __init__(self, prefer: PreferWord) -> None:
        self.train, self.infer, self.differentiate = (
            functools.partial(call, prefer=prefer) for call in (calls.train, calls.infer, calls.differentiate)
        )


DIRECT = Way()
WAYS = {None: DIRECT, "fastest": _Preferring("fastest"), "measured": _Preferring("measured")}
"""By `prefer`."""


def forward_mode() -> bool:
    """Whether forward-mode derivatives are active: the functions refuse them, a plain call would drop them."""
    return bool(getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0)


def _back(ctx: Any, dy: torch.Tensor, *unused: Any) -> Gradients:
    """The backward of all functions below that are no backward themselves."""
    x, weight, mean, spread = ctx.saved_tensors
    way, eps, training, fallback, deterministic = ctx.rest
    wanted = ctx.needs_input_grad[:3]
    dx, dweight, dbias = way.back(x, dy, weight, mean, spread, eps, training, wanted, fallback, deterministic)
    return (
        dx if wanted[0] else None, dweight if wanted[1] else None, dbias if wanted[2] else None, None, None, None,
    )  # fmt: skip


class Training(Function):
    """Batch norm by the statistics of the batch; `rest` has the way and what `calls.train` takes behind the tensors."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        weight: Optional,
        bias: Optional,
        mean: Optional,
        variance: Optional,
        rest: Rest,
    ) -> Any:
        way, factor, eps, fallback, deterministic = rest
        y, saved_mean, inverse = way.train(x, weight, bias, mean, variance, factor, eps, fallback, deterministic)
        ctx.save_for_backward(x, weight, saved_mean, inverse)
        ctx.rest = way, eps, True, fallback, deterministic
        return y

    backward = staticmethod(_back)


class WholeTraining(Function):
    """`Training` with all results of the operator, of which the statistics have no derivative."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:  # noqa: D102
        *tensors, (way, *rest) = arguments
        found = way.train(*tensors, *rest)
        ctx.save_for_backward(*tensors[:2], *found[1:])
        ctx.mark_non_differentiable(*found[1:])
        ctx.rest = way, rest[1], True, *rest[2:]
        return found

    backward = staticmethod(_back)


class Inference(Function):
    """Batch norm by given statistics, which are constants; `rest` as for `calls.infer`."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        weight: Optional,
        bias: Optional,
        mean: torch.Tensor,
        variance: torch.Tensor,
        rest: Rest,
    ) -> torch.Tensor:
        way, eps, fallback, deterministic = rest
        y = way.infer(x, weight, bias, mean, variance, eps, fallback, deterministic)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.rest = way, eps, False, fallback, deterministic
        return y

    backward = staticmethod(_back)


class Differentiate(Function):
    """The first derivative by the vendor; its own derivatives are those of `_formula`, by PyTorch."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        x: torch.Tensor,
        dy: torch.Tensor,
        weight: Optional,
        mean: torch.Tensor,
        spread: torch.Tensor,
        rest: Rest,
    ) -> Gradients:
        ctx.save_for_backward(x, dy, weight, mean, spread)
        ctx.rest = rest[1:3]
        return rest[0].differentiate(x, dy, weight, mean, spread, *rest[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Gradients:  # noqa: D102
        *leaves, mean, spread = ctx.saved_tensors
        return *second(leaves, gradients, mean, spread, *ctx.rest), None, None, None


def second(given: Sequence[Any], gradients: Sequence[Optional], *rest: Any) -> list[Optional]:
    """The gradients of x, dy and weight, given those of the results of `_formula`, which takes `rest` behind these."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [leaf if leaf is None else leaf.view_as(leaf) for leaf in given]
        found = _formula(leaves[0], leaves[1], leaves[2], *rest)
        of = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        # Of dy alone the sum over it depends: where dy is a constant, so is that.
        pairs = [
            (f, g)
            for f, g in zip(found, gradients, strict=True)
            if g is not None and f.shape == g.shape and f.requires_grad
        ]
        results, along = zip(*pairs, strict=True)
        values = iter(torch.autograd.grad(results, of, along, create_graph=again, allow_unused=True))
    return [next(values) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def _formula(
    x: Any, dy: Any, weight: Optional, mean: Any, spread: Any, eps: float, training: bool, total: Any = torch.clone
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first derivative, of operations that PyTorch differentiates; the batch's statistics are functions of x.

    `total` adds up what each rank has of the batch, differentiably.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    wide, back = x.to(kind), dy.to(kind)
    count = total(mean.new_full((1,), x.numel() / x.shape[1], dtype=kind))

    def average(values: torch.Tensor) -> torch.Tensor:
        return total(values.sum(axes, keepdim=True)) / count

    if training:
        centred = wide - average(wide)
        inverse = torch.rsqrt(average(centred.square()) + eps)
    else:
        centred = wide - mean.to(kind).view(shape)
        inverse = torch.rsqrt(spread.to(kind).view(shape) + eps)
    normal = centred * inverse
    slope = inverse if weight is None else inverse * weight.to(kind).view(shape)
    product = back * normal
    dx = back
    if training:
        dx = back - average(back) - normal * average(product)
    of = kind if weight is None else weight.dtype
    return (slope * dx).to(x.dtype), product.sum(axes).to(of), back.sum(axes).to(of)
