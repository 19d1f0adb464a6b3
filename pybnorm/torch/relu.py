"""Batch norm, an addition and ReLU as operators of PyTorch: one call of `native` where it takes them, else three."""

from __future__ import annotations

from typing import Any

import torch

from pybnorm.torch import calls, fused, operators
from pybnorm.torch.calls import Gradients, Optional, dense, like
from pybnorm.torch.operators import second, update_running

__all__ = ["batch_norm_relu", "inferred"]

_SCHEMAS = (
    "batch_norm_relu_training(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool fallback, "
    "bool deterministic) -> (Tensor y, Tensor mean, Tensor inverse, Tensor variance)",
    "batch_norm_relu_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor running_mean, "
    "Tensor running_var, float eps, bool fallback, bool deterministic) -> Tensor",
    "batch_norm_relu_backward(Tensor x, Tensor dy, Tensor? weight, Tensor? bias, Tensor y, Tensor mean, "
    "Tensor inverse, bool residual, float eps, bool fallback, bool deterministic) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz)",
)
_ALL = [True, True, True]
_mask = torch.ops.aten.threshold_backward  # the derivative of ReLU by its result


def batch_norm_relu(
    x: torch.Tensor, mean: Optional, variance: Optional, weight: Optional, bias: Optional, residual: Optional,
    factor: float, eps: float, fallback: bool, deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)`` by the batch's statistics; `residual` has the shape, dtype and device of x."""
    operators._check(x, mean, variance, weight, bias, True, factor, eps, fallback, deterministic)
    train = _trained if torch.compiler.is_compiling() else _Training.apply
    y: torch.Tensor = train(
        x, weight, bias, residual, mean, variance, float(factor), float(eps), fallback, deterministic
    )[0]
    return y


def inferred(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, weight: Optional, bias: Optional, residual: Optional,
    eps: float, fallback: bool, deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)`` by given statistics, without a derivative; arguments as `batch_norm_relu`."""
    operators._check(x, mean, variance, weight, bias, False, 0.0, eps, fallback, deterministic)
    y: torch.Tensor = _inference(x, weight, bias, residual, mean, variance, float(eps), fallback, deterministic)
    return y


def _trained(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, mean: Optional, variance: Optional,
    factor: float, *rest: Any,
) -> Any:  # fmt: skip
    found = _training(x, weight, bias, residual, *rest)
    if mean is not None and variance is not None:
        update_running(mean, variance, found[1], found[3], factor)
    return found


# ---------------------------------------------------------------- on memory


def _train(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, eps: float, fallback: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    x = dense(x)
    if weight is not None and bias is not None and fused.fits(x, (weight, bias)):
        return fused.train(x, weight, bias, None if residual is None else like(residual, x), eps)
    y, *saved = calls.train(x, weight, bias, eps, fallback, deterministic)
    return (y if residual is None else y.add_(residual)).relu_(), *saved


def _infer(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, mean: torch.Tensor, variance: torch.Tensor,
    eps: float, fallback: bool, deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    x = dense(x)
    if weight is not None and bias is not None and fused.fits(x, (weight, bias, mean, variance)):
        return fused.infer(x, weight, bias, mean, variance, None if residual is None else like(residual, x), eps)
    y = calls.infer(x, weight, bias, mean, variance, eps, fallback, deterministic)
    return (y if residual is None else y.add_(residual)).relu_()


def _differentiate(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, bias: Optional, y: torch.Tensor, mean: torch.Tensor,
    inverse: torch.Tensor, residual: bool, eps: float, fallback: bool, deterministic: bool,
) -> Gradients:  # fmt: skip
    x = dense(x)
    dy, y = like(dy, x), like(y, x)
    if weight is not None and bias is not None and fused.fits(x, (weight, bias)):
        *found, dz = fused.differentiate(x, dy, weight, bias, y, mean, inverse, residual, eps)
    else:
        dz = _mask(dy, y, 0)
        found = list(calls.differentiate(x, dz, weight, mean, inverse, eps, True, _ALL, fallback, deterministic))
    return (*found, x.new_empty(0) if dz is None or not residual else dz)


# ---------------------------------------------------------------- on shapes


def _train_fake(x: torch.Tensor, *arguments: Any) -> Any:
    return operators._train_fake(x)


def _infer_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty_like(dense(x))


def _differentiate_fake(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, bias: Optional, y: torch.Tensor, mean: torch.Tensor,
    inverse: torch.Tensor, residual: bool, *rest: Any,
) -> Gradients:  # fmt: skip
    found = operators._differentiate_fake(x, dy, weight, mean, inverse, 0.0, True, _ALL, False, False)
    return (*found, torch.empty_like(dense(x)) if residual else x.new_empty(0))


# ---------------------------------------------------------------- torch.vmap


def _mapped_at_1(tensor: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """The tensor with its mapped axis in place 1: there the mapped operators put theirs."""
    if axis is None:
        return tensor.unsqueeze(1).expand(-1, size, *tensor.shape[1:])
    return tensor.movedim(axis, 1)


def _train_mapped(info: Any, axes: Any, x: torch.Tensor, weight: Any, bias: Any, residual: Any, *rest: Any) -> Any:
    """Train by the operator of the batch norm alone, as the backward does: no fused plan takes mapped channels."""
    (y, *saved), places = operators._train_mapped(info, axes[:3], x, weight, bias, *rest)
    if residual is not None:
        y = y + _mapped_at_1(residual, axes[3], info.batch_size)
    return (y.relu(), *saved), places


def _infer_mapped(info: Any, axes: Any, x: torch.Tensor, weight: Any, bias: Any, residual: Any, *rest: Any) -> Any:
    y, place = operators._infer_mapped(info, (*axes[:3], *axes[4:]), x, weight, bias, *rest)
    if residual is not None:
        y = y + _mapped_at_1(residual, axes[3], info.batch_size)
    return y.relu(), place


def _differentiate_mapped(
    info: Any, axes: Any, x: torch.Tensor, dy: torch.Tensor, weight: Optional, bias: Optional, y: torch.Tensor,
    mean: torch.Tensor, inverse: torch.Tensor, residual: bool, eps: float, *rest: Any,
) -> Any:  # fmt: skip
    n = info.batch_size
    dz = _mask(_mapped_at_1(dy, axes[1], n), _mapped_at_1(y, axes[4], n), 0)
    places = axes[0], 1, axes[2], axes[5], axes[6]
    found, of = operators._differentiate_mapped(info, places, x, dz, weight, mean, inverse, eps, True, _ALL, *rest)
    return (*found, dz if residual else dz.new_empty(n, 0)), (*of, 1 if residual else 0)


# ---------------------------------------------------------------- derivatives


class _Training(torch.autograd.Function):
    """The call, whose statistics have no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _trained(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, weight, bias, residual), rest = inputs[:4], inputs[-3:]
        y, mean, inverse, _ = output
        ctx.save_for_backward(x, weight, bias, y, mean, inverse)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.rest = residual is not None, *rest
        ctx.others = len(inputs) - 4

    @staticmethod
    def backward(ctx: Any, dy: Optional, *unused: Any) -> Any:
        if dy is None:
            return (None,) * (4 + ctx.others)
        x, *saved = ctx.saved_tensors
        dx, dweight, dbias, dz = _Gradient.apply(x, dy, *saved, *ctx.rest)
        found = dx, dweight, dbias, dz
        return (
            *[g if want else None for g, want in zip(found, ctx.needs_input_grad[:4], strict=True)],
            *(None,) * ctx.others,
        )


class _Gradient(torch.autograd.Function):
    """The first derivative; its own is that of `Gradient` at the gradient that ReLU lets pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, dy, weight, _, y, mean, inverse, residual, eps, *_ = inputs
        ctx.save_for_backward(x, dy, weight, y, mean, inverse)
        ctx.set_materialize_grads(False)
        ctx.rest = residual, eps

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, dy, weight, y, mean, inverse = ctx.saved_tensors
        residual, eps = ctx.rest
        passed = (y > 0).to(dy.dtype)
        of_x, of_dz, of_weight = second(x, dy * passed, weight, mean, inverse, eps, True, gradients[:3])
        if residual and gradients[3] is not None:
            of_dz = gradients[3] if of_dz is None else of_dz + gradients[3]
        return of_x, None if of_dz is None else of_dz * passed, of_weight, *(None,) * 8


_training = operators.register(_SCHEMAS[0], _train, _train_fake, _train_mapped, _Training)
_inference = operators.register(_SCHEMAS[1], _infer, _infer_fake, _infer_mapped)
_backward = operators.register(_SCHEMAS[2], _differentiate, _differentiate_fake, _differentiate_mapped, _Gradient)
