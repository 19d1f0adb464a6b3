"""The function `batch_norm`, and the operators of PyTorch that it is made of.

``torch.ops.pybnorm`` has the calls: `batch_norm_training`, `batch_norm_inference`, `batch_norm_backward`, and
`update_running`, the only one that writes into what it is given. PyTorch's dispatcher is the one road to them, so that
compilers, exporters, modes and tensor subclasses see each call. Derivatives are functions around the operators
(``torch.autograd.Function`` with ``setup_context``), which every transform of ``torch.func`` takes; the second
derivative is a formula of PyTorch's own operations, so that all higher ones follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pybnorm import _arguments
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.torch import calls
from pybnorm.torch.calls import REFUSALS, Gradients, Optional, dense

__all__ = ["batch_norm", "update_running"]

_SCHEMAS = (
    "batch_norm_training(Tensor x, Tensor? weight, Tensor? bias, float eps, bool fallback, bool deterministic) "
    "-> (Tensor y, Tensor mean, Tensor inverse, Tensor variance)",
    "batch_norm_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "float eps, bool fallback, bool deterministic) -> Tensor",
    "batch_norm_backward(Tensor x, Tensor dy, Tensor? weight, Tensor mean, Tensor spread, float eps, bool training, "
    "bool[] wanted, bool fallback, bool deterministic) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    "update_running(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor variance, float momentum) "
    "-> ()",
)


def batch_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5, *, fallback: bool = False, deterministic: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``torch.nn.functional.batch_norm``, computed by pybnorm.

    Parameters
    ----------
    input : Tensor, shape (N, C, ...), rank 2 to 8
        On the CPU or a GPU. One that is neither contiguous nor channels-last is copied, as PyTorch does. An empty one
        is PyTorch's to compute.
    running_mean, running_var : Tensor, shape (C,), or None
        Updated if `training`, with the unbiased variance, and must not require a gradient then; needed if not.
    weight, bias : Tensor, shape (C,), or None
        All four are floating-point tensors on the device of `input`.
    training : bool
        True: the statistics are the batch's. False: they are the running ones, which are constants.
    momentum : float
        From 0 to 1: ``running = (1 - momentum) * running + momentum * batch``.
    eps : float
        At least 0. PyTorch 2.13 refuses 0 in training.
    fallback : bool
        Let PyTorch compute calls that are refused here.
    deterministic : bool
        Only algorithms whose bits repeat, forward and backward (`pybnorm.Plan.deterministic`), as also where
        ``torch.use_deterministic_algorithms(True)`` is set: else an UnsupportedError, with ``warn_only`` a warning.

    Returns
    -------
    Tensor
        Shape, dtype and memory format of `input`.

    Raises
    ------
    ArgumentError, UnsupportedError, LibraryNotFoundError, NotInitializedError, VendorError
        As `pybnorm.functional.batch_norm_training`; also for one value per channel while training.

    Notes
    -----
    ``torch.jit.trace`` and exporters write PyTorch's own batch norm down, so that the result runs without pybnorm.
    Forward mode is an error.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]], requires_grad=True)
    >>> pybnorm.torch.batch_norm(x, None, None, training=True).sum().backward()
    >>> x.grad.abs().max().item() < 1e-5
    True
    """
    given = input, running_mean, running_var, weight, bias
    try:
        _check(*given, training, momentum, eps, fallback, deterministic)
        if input.numel() and not written_down():
            return _computed(*given, training, momentum, eps, fallback, deterministic)
    except REFUSALS as error:
        if fallback is not True:
            if isinstance(error, ArgumentError) and error.argument in _NAMES:
                raise type(error)(_NAMES[error.argument], error.value, error.allowed) from None
            raise
    return torch.nn.functional.batch_norm(*given, training, momentum, eps)


_NAMES = {
    "x": "input",
    "scale": "weight",
    "running_variance": "running_var",
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
}
"""PyTorch's names of arguments, by ours."""


def written_down() -> bool:
    """Say whether the call is recorded to run elsewhere, where there may be no pybnorm."""
    if torch.compiler.is_dynamo_compiling():  # where PyTorch 2.11 says of every compiled call that it is exported
        return False
    return bool(torch.jit.is_tracing() or _exporting())


_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # PyTorch 2.7


def _check(
    x: Any, mean: Any, variance: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any, fallback: Any,
    deterministic: Any,
) -> None:  # fmt: skip
    _arguments.instance(x, torch.Tensor, "input", "a tensor")
    if torch.jit.is_tracing():  # what is asked of sizes would be written down; PyTorch's own operator asks it
        return
    if x.is_nested:  # of either layout, and without a shape
        raise ArgumentError("input", "a nested tensor", "a dense one, as torch.nested.to_padded_tensor makes it")
    if x.layout is not torch.strided:
        raise ArgumentError("input", f"a tensor of {x.layout}", "torch.strided")
    if x.dim() < 2:
        raise ArgumentError("input", f"shape {tuple(x.shape)}", "shape (N, C, ...)")
    if not x.is_floating_point():
        raise ArgumentTypeError("input", x.dtype, "a floating-point dtype")
    _arguments.instance(training, bool, "training", "a bool")
    _arguments.instance(fallback, bool, "fallback", "a bool")
    _arguments.instance(deterministic, bool, "deterministic", "a bool")
    place = x.device, x.size(1), x.dtype
    _check_vector("running_mean", mean, *place, training, True)
    _check_vector("running_var", variance, *place, training, True)
    _check_vector("weight", weight, *place, training, False)
    _check_vector("bias", bias, *place, training, False)
    if training and x.numel() == x.size(1) > 0:
        raise ArgumentError("input", f"shape {tuple(x.shape)}", "more than one value per channel when training")
    if not training and (mean is None or variance is None):
        raise ArgumentError("running_mean", "None", "running_mean and running_var where training is False")
    if training and (mean is None) != (variance is None):
        raise ArgumentError("running_var", "None", "a tensor where running_mean is one")
    _arguments.factor(momentum)
    _arguments.epsilon(eps)


def _check_vector(
    name: str, tensor: Any, device: torch.device, channels: int, dtype: torch.dtype, training: bool, statistic: bool
) -> None:  # fmt: skip
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(name, tensor, "a tensor or None")
    if tensor.device != device:  # the dispatcher would take one on meta for a call without data
        raise ArgumentError(name, f"a tensor on {tensor.device}", f"one on {device}, as input is")
    if tensor.layout is not torch.strided:
        raise ArgumentError(name, f"a tensor of {tensor.layout}", "torch.strided")
    if tensor.dim() != 1:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "shape (C,)")
    if tensor.size(0) != channels:
        raise ArgumentError("input", f"{channels} channels, on axis 1", f"{tensor.size(0)}, as {name} has")
    if not tensor.is_floating_point():  # running statistics would be cut to integers
        raise ArgumentTypeError(name, tensor.dtype, "a floating-point dtype")
    if (tensor.dtype == torch.float64) != (dtype == torch.float64):
        raise ArgumentTypeError(name, tensor.dtype, f"the precision of input, {dtype}: convert the module or the input")
    if statistic and training:  # written one after the other: both are checked first
        if tensor.requires_grad:
            raise ArgumentError(name, "a tensor that requires a gradient", "one that does not: call detach() on it")
        if not torch.compiler.is_compiling() and tensor.is_neg():  # which Dynamo cannot read
            raise ArgumentError(name, "a tensor that is lazily negated", "its resolve_neg()")
        if channels > 1 and not tensor.stride(0):
            raise ArgumentError(name, "elements that share memory", "its clone()")


def _computed(
    x: torch.Tensor, mean: Optional, variance: Optional, weight: Optional, bias: Optional, training: bool,
    momentum: float, eps: float, fallback: bool, deterministic: bool,
) -> torch.Tensor:  # fmt: skip
    y: torch.Tensor
    if not training and (mean.requires_grad or variance.requires_grad):  # type: ignore[union-attr]
        return _of_statistics(x, weight, bias, mean, variance, eps)
    compiling = torch.compiler.is_compiling()  # which takes the operators' own derivative, and no function around them
    if not training:
        infer = _inference if compiling else _Inference.apply
        y = infer(x, weight, bias, mean, variance, float(eps), fallback, deterministic)
        return y
    train = trained if compiling else _Training.apply
    y = train(x, weight, bias, mean, variance, float(momentum), float(eps), fallback, deterministic)[0]
    return y


def trained(
    x: torch.Tensor, weight: Optional, bias: Optional, mean: Optional, variance: Optional, momentum: float, eps: float,
    fallback: bool, deterministic: bool,
) -> Any:  # fmt: skip
    """The results of `batch_norm_training`, once the running statistics have taken the batch's in."""
    found = _training(x, weight, bias, eps, fallback, deterministic)
    if mean is not None and variance is not None:
        update_running(mean, variance, found[1], found[3], momentum)
    return found


def _of_statistics(
    x: torch.Tensor, weight: Optional, bias: Optional, mean: Any, variance: Any, eps: float
) -> torch.Tensor:
    """The formula by PyTorch's operations, for the rare call whose running statistics are no constants."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (1, -1, *[1] * (x.dim() - 2))
    mean, variance, weight, bias = (
        None if v is None else v.to(kind).view(shape) for v in (mean, variance, weight, bias)
    )
    y = (x.to(kind) - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def update_running(
    mean: torch.Tensor, variance: torch.Tensor, batch_mean: torch.Tensor, batch_variance: torch.Tensor, momentum: float
) -> None:
    """Take the batch's statistics into the running ones, in place, as autograd sees; momentum 1 does not read them."""
    torch.ops.pybnorm.update_running(mean, variance, batch_mean.detach(), batch_variance.detach(), momentum)


# ---------------------------------------------------------------- on memory


def _train(x: torch.Tensor, *arguments: Any) -> Any:
    return calls.train(dense(x), *arguments)


def _infer(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return calls.infer(dense(x), *arguments)


def _differentiate(x: torch.Tensor, *arguments: Any) -> Gradients:
    found = calls.differentiate(dense(x), *arguments)
    return tuple([x.new_empty(0) if gradient is None else gradient for gradient in found])  # an operator has no None


def _update(
    mean: torch.Tensor, variance: torch.Tensor, batch_mean: torch.Tensor, batch_variance: torch.Tensor, momentum: float
) -> None:
    for running, batch in ((mean, batch_mean), (variance, batch_variance)):
        if momentum == 1:
            running.copy_(batch)
        elif running.dtype == batch.dtype:
            running.mul_(1 - momentum).add_(batch, alpha=momentum)
        else:  # rounded once
            running.copy_(running.to(batch.dtype).mul_(1 - momentum).add_(batch, alpha=momentum))
    torch.autograd.graph.increment_version([mean, variance])  # what autograd saved of them is another now


# ---------------------------------------------------------------- on shapes


def _statistics_of(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _train_fake(x: torch.Tensor, *arguments: Any) -> Any:
    return (torch.empty_like(dense(x)), *[_statistics_of(x) for _ in range(3)])


def _infer_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty_like(dense(x))


def _differentiate_fake(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, spread: torch.Tensor, eps: float,
    training: bool, wanted: Sequence[bool], fallback: bool, deterministic: bool,
) -> Gradients:  # fmt: skip
    like = _statistics_of(x) if weight is None else weight
    made = [torch.empty_like(dense(x)), like.new_empty(x.shape[1]), like.new_empty(x.shape[1])]
    return tuple([one if want else x.new_empty(0) for one, want in zip(made, wanted, strict=True)])


def _update_fake(*arguments: Any) -> None:
    return None


# ---------------------------------------------------------------- torch.vmap


def _joined(size: int, tensor: Optional, axis: int | None, channels: int) -> Optional:
    """The mapped axis as part of the channels, which all have statistics of their own."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.movedim(0, channels).flatten(channels, channels + 1)


def _train_mapped(info: Any, axes: Any, x: torch.Tensor, *arguments: Any) -> Any:
    n, vectors, rest = info.batch_size, arguments[:2], arguments[2:]
    joined = [_joined(n, t, axis, 0) for t, axis in zip(vectors, axes[1:3], strict=True)]
    y, *saved = torch.ops.pybnorm.batch_norm_training(_joined(n, x, axes[0], 1), *joined, *rest)
    return (y.unflatten(1, (n, -1)), *(one.view(n, -1) for one in saved)), (1, 0, 0, 0)


def _infer_mapped(info: Any, axes: Any, x: torch.Tensor, *arguments: Any) -> Any:
    n, vectors, rest = info.batch_size, arguments[:4], arguments[4:]
    joined = [_joined(n, t, axis, 0) for t, axis in zip(vectors, axes[1:5], strict=True)]
    return torch.ops.pybnorm.batch_norm_inference(_joined(n, x, axes[0], 1), *joined, *rest).unflatten(1, (n, -1)), 1


def _differentiate_mapped(info: Any, axes: Any, x: torch.Tensor, dy: torch.Tensor, *arguments: Any) -> Any:
    n, vectors, rest, wanted = info.batch_size, arguments[:3], arguments[3:], arguments[5]
    joined = [_joined(n, t, axis, 0) for t, axis in zip(vectors, axes[2:5], strict=True)]
    data = _joined(n, x, axes[0], 1), _joined(n, dy, axes[1], 1)
    dx, *sums = torch.ops.pybnorm.batch_norm_backward(*data, *joined, *rest)
    dx = dx.unflatten(1, (n, -1)) if wanted[0] else dx.expand(n, 0)
    sums = [one.view(n, -1) if want else one.expand(n, 0) for one, want in zip(sums, wanted[1:], strict=True)]
    return (dx, *sums), (1 if wanted[0] else 0, 0, 0)


def _update_mapped(info: Any, axes: Any, mean: torch.Tensor, variance: torch.Tensor, *arguments: Any) -> Any:
    if axes[0] is None or axes[1] is None:
        raise ArgumentError(
            "running_mean", "one for all that torch.vmap maps over, of which each would write it",
            "statistics mapped over too, or None",
        )  # fmt: skip
    *batch, momentum = arguments
    moved = [
        tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        for tensor, axis in zip((mean, variance, *batch), axes[:4], strict=True)
    ]
    torch.ops.pybnorm.update_running(*moved, momentum)
    return None, None


# ---------------------------------------------------------------- registration

_library = torch.library.Library("pybnorm", "DEF")  # the operators live as long as it does


def register(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], mapped: Callable[..., Any],
    derivative: Any = None,
) -> Any:  # fmt: skip
    """Define an operator by its schema, its kernel, the one on shapes and that of ``torch.vmap``.

    `derivative` is the function around the operator, whose `setup_context` and `backward` are the operator's, too.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pybnorm::{name}", fake, lib=_library)
    torch.library.register_vmap(f"pybnorm::{name}", mapped, lib=_library)
    if derivative is not None:
        setup = derivative.setup_context
        torch.library.register_autograd(f"pybnorm::{name}", derivative.backward, setup_context=setup, lib=_library)
    return getattr(torch.ops.pybnorm, name).default


# ---------------------------------------------------------------- derivatives


class _Training(torch.autograd.Function):
    """Batch norm by the statistics of the batch, which have no derivative themselves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return trained(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, weight, bias), (eps, *rest) = inputs[:3], inputs[-3:]
        ctx.save_for_backward(x, weight, *output[1:3])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.rest = eps, True, [True, weight is not None, bias is not None], *rest
        ctx.others = len(inputs) - 3

    @staticmethod
    def backward(ctx: Any, dy: Optional, *unused: Any) -> Any:
        return (*back(ctx, dy), *(None,) * ctx.others)


class _Inference(torch.autograd.Function):
    """Batch norm by given statistics, which are constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _inference(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, mean, variance, *rest = inputs
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.set_materialize_grads(False)
        ctx.rest = rest[0], False, [True, weight is not None, bias is not None], *rest[1:]

    @staticmethod
    def backward(ctx: Any, dy: Optional) -> Any:
        _refuse_statistics(ctx)
        return (*back(ctx, dy), *(None,) * 5)


def _refuse_statistics(ctx: Any) -> None:
    """Refuse statistics of an outer level of torch.func, which the call's arguments do not show."""
    if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
        raise ArgumentError(
            "running_mean", "running statistics of an outer transform", "a gradient by them in the innermost one only"
        )


def back(ctx: Any, dy: Optional) -> tuple[Optional, ...]:
    """The gradients of x, weight and bias, by what `setup_context` saved: x, weight, mean, spread, and the rest."""
    if dy is None:
        return None, None, None
    x, weight, mean, spread = ctx.saved_tensors
    eps, training, there, fallback, deterministic = ctx.rest
    wanted = [need and is_there for need, is_there in zip(ctx.needs_input_grad[:3], there, strict=True)]
    found = Gradient.apply(x, dy, weight, mean, spread, eps, training, wanted, fallback, deterministic)
    return tuple([gradient if want else None for gradient, want in zip(found, wanted, strict=True)])


class Gradient(torch.autograd.Function):
    """The first derivative by `batch_norm_backward`; its own is `second`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.set_materialize_grads(False)
        ctx.rest = inputs[5:7]
        ctx.wanted = inputs[7]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.rest[1]:
            _refuse_statistics(ctx)
        given = [gradient if want else None for gradient, want in zip(gradients, ctx.wanted, strict=True)]
        x, dy, weight, mean, spread = ctx.saved_tensors
        eps, training = ctx.rest
        return (*second(x, dy, weight, mean, spread, eps, training, given), *(None,) * 7)


def second(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, spread: torch.Tensor, eps: float,
    training: bool, gradients: Sequence[Optional], total: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> tuple[Optional, Optional, Optional]:  # fmt: skip
    """The gradients of x, dy and weight, given those of dx, dweight and dbias, None for 0.

    Arguments are as in `calls.differentiate`; `total` adds up what each rank has of the batch, differentiably.

    r = 1/sqrt(var + eps), h = (x - mean) r, E is the mean over the batch, P(v) = v - E[v] - h E[h v]. Training has
    dx = w r P(dy), dweight = sum(h dy), dbias = sum(dy). P is self-adjoint; h changes by r P(.), r by -r^2 E[h .].
    With gx, gw, gb given and q = gx E[h dy] + dy E[h gx], the gradients are:

        of dy      w r P(gx) + gw h + gb
        of weight  sum(r gx P(dy))
        of x       gw r P(dy) - w r^2 (h E[gx P(dy)] + P(q))

    With constant statistics P is the identity, and only the first term is left of x's.
    """
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    gx, gw, gb = (None if g is None else g.to(kind) for g in gradients)
    gw, gb = (None if g is None else g.view(shape) for g in (gw, gb))
    wide, back = x.to(kind), dy.to(kind)
    w = torch.ones((), dtype=kind, device=x.device) if weight is None else weight.to(kind).view(shape)
    count: Any = total(mean.new_full((1,), x.numel() / x.shape[1], dtype=kind)) if training else 1

    def average(values: torch.Tensor) -> torch.Tensor:
        return total(values.sum(axes, keepdim=True)) / count

    if training:
        centred = wide - average(wide)
        r = torch.rsqrt(average(centred.square()) + eps)
    else:
        centred = wide - mean.to(kind).view(shape)
        r = torch.rsqrt(spread.to(kind).view(shape) + eps)
    h = centred * r

    def projected(v: torch.Tensor) -> torch.Tensor:
        return v - average(v) - h * average(h * v) if training else v

    of_x: Any = None if gw is None else gw * r * projected(back)
    of_dy: Any = None if gw is None else gw * h
    of_weight = None
    if gb is not None:
        of_dy = gb.expand(x.shape) if of_dy is None else of_dy + gb
    if gx is not None:
        of_dy = w * r * projected(gx) if of_dy is None else of_dy + w * r * projected(gx)
        if weight is not None:
            of_weight = (r * gx * projected(back)).sum(axes).to(weight.dtype)
        if training:
            q = gx * average(h * back) + back * average(h * gx)
            term = w * r.square() * (h * average(gx * projected(back)) + projected(q))
            of_x = -term if of_x is None else of_x - term
    return None if of_x is None else of_x.to(x.dtype), None if of_dy is None else of_dy.to(dy.dtype), of_weight


# the operators, once what they are made of is there
_training = register(_SCHEMAS[0], _train, _train_fake, _train_mapped, _Training)
_inference = register(_SCHEMAS[1], _infer, _infer_fake, _infer_mapped, _Inference)
_backward = register(_SCHEMAS[2], _differentiate, _differentiate_fake, _differentiate_mapped, Gradient)
register(_SCHEMAS[3], _update, _update_fake, _update_mapped)
