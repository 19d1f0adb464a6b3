"""Batch norm, an addition and ReLU as one custom operator of PyTorch, and its backward as another.

``torch.ops.pybnorm.batch_norm_relu_training`` and ``batch_norm_relu_backward``: the fused plans where there are any,
else the calls one after the other. Without operators (PyTorch before 2.4) these names are None here.

With a residual backward reads the reserve that forward wrote, and nothing in it says who wrote it. So both ask
`_plans_of` with the same question: dtypes, shapes and strides of what both are given, and never an address.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from pybnorm import _core
from pybnorm.errors import ArgumentError
from pybnorm.torch import calls, fused, installation, operators
from pybnorm.torch.autograd import _check
from pybnorm.torch.calls import Gradients, Optional, dense, like
from pybnorm.torch.derivatives import Function
from pybnorm.torch.fused import aligned

__all__ = ["batch_norm_relu", "training"]

_SCHEMAS = (
    "batch_norm_relu_training(Tensor x, Tensor weight, Tensor bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor? residual, float momentum, float eps, bool fallback, bool deterministic) "
    "-> (Tensor y, Tensor mean, Tensor inverse, Tensor reserve)",
    "batch_norm_relu_backward(Tensor x, Tensor dy, Tensor weight, Tensor bias, Tensor y, Tensor mean, Tensor inverse, "
    "Tensor reserve, bool residual, bool running, float momentum, float eps, bool fallback, bool deterministic) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz)",
)
_ALL = (True, True, True)
_RESERVE_ALIGNMENT = 64

_mask = torch.ops.aten.threshold_backward  # the derivative of ReLU by its result


def batch_norm_relu(
    x: torch.Tensor,
    mean: Optional,
    variance: Optional,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: Optional,
    factor: float,
    eps: float,
    fallback: bool,
    deterministic: bool,
) -> torch.Tensor:
    """``relu(batch_norm(x) + residual)`` by the batch's statistics, as an operator that a compiler sees.

    Parameters
    ----------
    x, mean, variance, weight, bias, factor, eps, fallback, deterministic
        As `pybnorm.torch.batch_norm` has them.
    residual : Tensor or None
        Of the shape and dtype of x.
    """
    _check(x, mean, variance, True)
    _look_at(x, residual, mean, variance)
    given = dense(x), weight, bias, mean, variance, residual, factor, eps, fallback, deterministic
    y: torch.Tensor = training(*given)[0]
    return y


# ---------------------------------------------------------------- on memory

_absent: set[Any] = set()
"""Calls without fused plans, for good: what forward was refused, backward must not be given."""


def _plans_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: bool, running: bool, factor: float, eps: float
) -> Any:
    """The fused plans of a call, or None; those of one question have one answer, in both directions.

    The bits of all fused plans repeat. They are always asked for so, because PyTorch's switch may be turned between
    forward and backward.
    """
    if not fused.fits(x, (weight, bias)):
        return None
    key = (x.device, x.dtype, x.shape, x.stride(), residual, running, factor, eps)
    if key in _absent:
        return None
    found = fused._plans_of(x, residual, True, running, factor, eps, True, known=True)
    if found is None or found.reserve_size > _reserve_size(x, residual):
        _absent.add(key)
        return None
    return found


def _reserve_size(x: torch.Tensor, residual: bool) -> int:
    """Bytes, which shapes alone say: a bit for each element, of which cuDNN 9.19's Ex has 64 channels and 32 places at
    once, and what libraries round up.
    """
    places = math.prod((x.shape[0], *x.shape[2:]))
    return (x.shape[1] + 63) // 64 * 64 * ((places + 31) // 32 * 4) + 4096 if residual else 0


def _taken(statistic: Optional) -> Optional:
    """Running statistics as fused plans take them; others are copied, and what was written is copied back."""
    if statistic is None or (statistic.dtype is torch.float32 and statistic.is_contiguous()):
        return statistic if statistic is None else aligned(statistic)
    return aligned(statistic.float().contiguous())


def _look_at(x: torch.Tensor, residual: Optional, mean: Any, variance: Any) -> None:
    if residual is not None and (residual.shape, residual.dtype, residual.device) != (x.shape, x.dtype, x.device):
        raise ArgumentError("residual", f"{residual.dtype} {tuple(residual.shape)}", "like x: its shape, dtype, device")
    if (mean is None) != (variance is None) or (mean is not None and not mean.device == variance.device == x.device):
        raise ArgumentError("running_mean", "apart from running_var or x", "both or none, where x is")


def _train(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: Optional, variance: Optional, residual: Optional,
    factor: float, eps: float, fallback: bool, deterministic: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    x = dense(x)
    _look_at(x, residual, mean, variance)
    plans = _plans_of(x, weight, bias, residual is not None, mean is not None, factor, eps)
    reserve = x.new_empty(_reserve_size(x, residual is not None), dtype=torch.uint8)
    if plans is None:
        y, saved, inverse = calls.train(x, weight, bias, mean, variance, factor, eps, fallback, deterministic)
        y = (y if residual is None else y.add_(residual)).relu_()
        return y, saved, inverse, reserve.zero_()
    kept, used = (mean, variance), (_taken(mean), _taken(variance))
    z = None if residual is None else aligned(like(residual, x))
    part = reserve[: plans.reserve_size] if plans.reserve_size else None
    y, saved, inverse, _ = plans.forward(aligned(x), aligned(weight), aligned(bias), z, *used, part)
    for old, new in zip(kept, used, strict=True):
        if old is not None and new is not old:
            old.copy_(new)
    return y, saved, inverse, reserve


def _differentiate(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, mean: torch.Tensor,
    inverse: torch.Tensor, reserve: torch.Tensor, residual: bool, running: bool, factor: float, eps: float,
    fallback: bool, deterministic: bool,
) -> Gradients:  # fmt: skip
    x = dense(x)
    dy, y = like(dy, x), like(y, x)
    plans = _plans_of(x, weight, bias, residual, running, factor, eps)
    if plans is None:
        dz = _mask(dy, y, 0)
        found: Any = calls.differentiate(x, dz, weight, mean, inverse, eps, True, _ALL, fallback, deterministic)
    else:
        part = aligned(reserve, _RESERVE_ALIGNMENT)[: plans.reserve_size] if plans.reserve_size else None
        *found, dz = plans.backward(*[aligned(t) for t in (x, dy, weight, bias, y, mean, inverse)], part)
    return (*found, dz if residual else x.new_empty(0))


def _unpacked(function: Any, x: Any, *call: Any) -> Any:
    """A function's result for what autograd in C++ keeps: mean, inverse and reserve may be parts of one tensor."""
    dy, weight, bias, y, mean, inverse, reserve, *rest = call
    if inverse is None:
        second, third = _core.packed_parts(x.shape[1])
        packed = mean
        mean, inverse = (packed[n : n + 4 * x.shape[1]].view(torch.float32) for n in (0, second))
        reserve = packed[third:]
    return function(x, dy, weight, bias, y, mean, inverse, reserve, *rest)


_JOINED = installation.Joined(
    {
        "batch_norm_relu_training": _train,
        "batch_norm_relu_backward": lambda *call: _unpacked(_differentiate, *call),
    },
    {"batch_norm_relu_backward": lambda *call: _unpacked(_differentiate_apart, *call)},
    lambda *call: found if isinstance(found := _plans_of(*call), fused._Plans) else None,
    fused.ready,
)


def kernels(key: str) -> tuple[Any, Any, Any] | None:
    """The operators' kernels under a dispatch key, from now on in C, as functions; None where PyTorch has no such.

    The third is PyTorch's overridable operator, by which `_core.call_overridable` calls forward with autograd in C++;
    None where this PyTorch's is another one.
    """
    if training is None or not installation.join(key, _JOINED):
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    forward, back = (functools.partial(operator._handle.redispatch_boxed, keys) for operator in (training, backward))
    return forward, back, installation.overridable(key)


fused.find_kernels = kernels
installation.at_end(fused.kernels.clear)


# ---------------------------------------------------------------- on shapes


def _train_fake(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    residual = arguments[4] is not None
    return (*operators._train_fake(x), x.new_empty(_reserve_size(x, residual), dtype=torch.uint8))


def _differentiate_fake(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, mean: torch.Tensor,
    inverse: torch.Tensor, reserve: torch.Tensor, residual: bool, *rest: Any,
) -> Gradients:  # fmt: skip
    found = operators._differentiate_fake(x, dy, weight, mean, inverse, 0.0, True, _ALL, False)
    return (*found, torch.empty_like(dense(x)) if residual else x.new_empty(0))


# ---------------------------------------------------------------- derivatives, and torch.func.vmap


class _Training(Function):
    """`training`, whose statistics and reserve have no derivative."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *given, (way, *rest) = arguments
        found = way._call(training, (*given, *rest))
        ctx.save_for_backward(*given[:3], *found)
        ctx.mark_non_differentiable(*found[1:])
        ctx.rest = given[5] is not None, given[3] is not None, *rest
        return found

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *unused: Any) -> Gradients:
        x, *saved = ctx.saved_tensors
        dx, dweight, dbias, dz = backward(x, dy, *saved, *ctx.rest)
        found = dx, dweight, dbias, None, None, dz, None
        return tuple([g if want else None for g, want in zip(found, ctx.needs_input_grad, strict=True)])


def _train_tracked(keys: Any, *arguments: Any) -> Any:
    for changed in arguments[3:5]:
        if changed is not None:
            torch.autograd.graph.increment_version(changed)
    way = operators._Below(keys)
    if not operators._tracked(*arguments[:3], arguments[5]):
        return way._call(training, arguments)
    return operators._apply(_Training, *arguments[:6], (way, *arguments[6:]))


def _differentiate_tracked(keys: Any, *arguments: Any) -> Any:
    if not operators._tracked(*arguments[:3]):
        return operators._Below(keys)._call(backward, arguments)
    return _differentiate_apart(*arguments)


def _differentiate_apart(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor, mean: torch.Tensor,
    inverse: torch.Tensor, reserve: torch.Tensor, residual: bool, running: bool, factor: float, *rest: Any,
) -> Gradients:  # fmt: skip
    """`backward` by operators that are there already, each of which has a derivative; the reserve is not read."""
    eps, *asked = rest
    dz = _mask(dy, y.detach(), 0)
    found = operators.backward(x, dz, weight, mean, inverse, eps, True, _ALL, *asked)
    return (*found, dz if residual else x.new_empty(0))


def _mapped_at_1(tensor: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """The tensor with its mapped axis in place 1: there the mapped operators put theirs."""
    if axis is None:
        return tensor.unsqueeze(1).expand(-1, size, *tensor.shape[1:])
    return tensor.movedim(axis, 1)


def _train_mapped(info: Any, axes: Any, *arguments: Any) -> Any:
    """By the operator of the batch norm alone, as the backward: no fused plan takes mapped channels."""
    *given, residual = arguments[:6]
    (y, *saved), places = operators._train_mapped(info, axes[:5], *given, *arguments[6:])
    if residual is not None:
        y = y + _mapped_at_1(residual, axes[5], info.batch_size)
    return (y.relu(), *saved, y.new_empty(0, dtype=torch.uint8)), (*places, None)


def _differentiate_mapped(
    info: Any, axes: Any, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, y: torch.Tensor,
    mean: torch.Tensor, inverse: torch.Tensor, reserve: torch.Tensor, residual: bool, running: bool, factor: float,
    *rest: Any,
) -> Any:  # fmt: skip
    eps, *asked = rest
    dz = _mask(_mapped_at_1(dy, axes[1], info.batch_size), _mapped_at_1(y, axes[4], info.batch_size), 0)
    places = axes[0], 1, axes[2], axes[5], axes[6]
    given = x, dz, weight, mean, inverse, eps, True, _ALL, *asked
    found, of = operators._differentiate_mapped(info, places, *given)
    return (*found, dz if residual else dz.new_empty(0)), (*of, 1 if residual else None)


# ---------------------------------------------------------------- registration

training: Any = None
backward: Any = None
if operators.training is not None:
    # A compiler keeps the strides that it was told: with others the directions could go two ways.
    _kept = getattr(torch.Tag, "needs_exact_strides", getattr(torch.Tag, "needs_fixed_stride_order", None))
    _library = operators._register(
        (_SCHEMAS[0], _train, _train_fake, _train_tracked, _train_mapped),
        (_SCHEMAS[1], _differentiate, _differentiate_fake, _differentiate_tracked, _differentiate_mapped),
        tags=() if _kept is None else (_kept,),
        keys=("CompositeExplicitAutograd",),  # which kernels in C stand before
    )
    training = torch.ops.pybnorm.batch_norm_relu_training.default
    backward = torch.ops.pybnorm.batch_norm_relu_backward.default
