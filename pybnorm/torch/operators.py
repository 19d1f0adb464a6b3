"""The function `batch_norm`, and the operators of PyTorch that it is made of.

``torch.ops.pybnorm.batch_norm_`` is a call, ReLU and residual included, that updates the running statistics;
`batch_norm_backward` has its gradients. From PyTorch 2.10 on both have kernels in C on CPUs and GPUs
(`pybnorm.torch.installation`); the functions here are theirs elsewhere. Compilers and mapped calls take
`batch_norm_training`, `batch_norm_inference` and `update_running`, of which only the last writes.

PyTorch's dispatcher is the one road to them, so that compilers, exporters, modes and tensor subclasses see each call.
Derivatives are functions around the operators (``torch.autograd.Function`` with ``setup_context``), which every
transform of ``torch.func`` takes; the second derivative is a formula of PyTorch's own operations, so that all higher
ones follow.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from pybnorm import _arguments
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.torch import calls
from pybnorm.torch.calls import REFUSALS, Gradients, Optional, dense, like

__all__ = ["batch_norm", "normalized"]

_SCHEMAS = (
    "batch_norm_training(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool relu, "
    "bool fallback) -> (Tensor y, Tensor mean, Tensor inverse, Tensor variance)",
    "batch_norm_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor running_mean, "
    "Tensor running_var, float eps, bool relu, bool fallback) -> Tensor",
    "batch_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? running_mean, Tensor? running_var, Tensor? mean, "
    "Tensor? inverse, bool training, float eps, bool[3] wanted, Tensor? bias, Tensor? y, bool residual, "
    "bool fallback) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dz)",
    "update_running(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor variance, float momentum) "
    "-> ()",
    "batch_norm_(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "bool training, float momentum, float eps, Tensor? residual, bool relu, bool fallback) "
    "-> (Tensor y, Tensor mean, Tensor inverse)",
)
_mask = torch.ops.aten.threshold_backward  # the derivative of ReLU by its result


def batch_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5, *, fallback: bool = False,
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
        return normalized(*given, None, training, momentum, eps, False, fallback)
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


def _is_written_down() -> bool:
    """Say whether the call is recorded to run elsewhere, where there may be no pybnorm."""
    if torch.jit.is_tracing():
        return True
    # Of every call that Dynamo compiles PyTorch 2.11 says that it is exported.
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling() and _exporting()


_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # PyTorch 2.7


def _check(
    x: Any, mean: Any, variance: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any, fallback: Any
) -> bool:
    """Check a call, and say whether the kernels in C take it."""
    _arguments.instance(x, torch.Tensor, "input", "a tensor")
    if torch.jit.is_tracing():  # what is asked of sizes would be written down; PyTorch's own operator asks it
        return False
    fits = calls.fits(x, weight, bias, mean, variance)  # most calls do, of which there is nothing more to ask
    if not fits:
        _check_tensors(x, mean, variance, weight, bias, training)
    for name, tensor in (("running_mean", mean), ("running_var", variance)) if training is True else ():
        # They are written one after the other: both are checked first.
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(name, "a tensor that requires a gradient", "one that does not: call detach() on it")
        if tensor is not None and not torch.compiler.is_compiling() and tensor.is_neg():  # which Dynamo cannot read
            raise ArgumentError(name, "a tensor that is lazily negated", "its resolve_neg()")
    _arguments.instance(training, bool, "training", "a bool")
    _arguments.instance(fallback, bool, "fallback", "a bool")
    if training and x.numel() == x.size(1) > 0:
        raise ArgumentError("input", f"shape {tuple(x.shape)}", "more than one value per channel when training")
    if not training and (mean is None or variance is None):
        raise ArgumentError("running_mean", "None", "running_mean and running_var where training is False")
    if training and (mean is None) != (variance is None):
        raise ArgumentError("running_var", "None", "a tensor where running_mean is one")
    _arguments.factor(momentum)
    _arguments.epsilon(eps)
    return fits


def _check_tensors(x: torch.Tensor, mean: Any, variance: Any, weight: Any, bias: Any, training: Any) -> None:
    if x.is_nested:  # of either layout, and without a shape
        raise ArgumentError("input", "a nested tensor", "a dense one, as torch.nested.to_padded_tensor makes it")
    if x.layout is not torch.strided:
        raise ArgumentError("input", f"a tensor of {x.layout}", "torch.strided")
    if x.dim() < 2:
        raise ArgumentError("input", f"shape {tuple(x.shape)}", "shape (N, C, ...)")
    if not x.is_floating_point():
        raise ArgumentTypeError("input", x.dtype, "a floating-point dtype")
    place = x.device, x.size(1), x.dtype
    _check_vector("running_mean", mean, *place, training is True)
    _check_vector("running_var", variance, *place, training is True)
    _check_vector("weight", weight, *place, False)
    _check_vector("bias", bias, *place, False)


def _check_vector(
    name: str, tensor: Any, device: torch.device, channels: int, dtype: torch.dtype, written: bool
) -> None:
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
    if written and channels > 1 and not tensor.stride(0):
        raise ArgumentError(name, "elements that share memory", "its clone()")


def normalized(
    x: torch.Tensor, mean: Optional, variance: Optional, weight: Optional, bias: Optional, residual: Optional,
    training: bool, momentum: float, eps: float, relu: bool, fallback: bool,
) -> torch.Tensor:  # fmt: skip
    """``relu(batch_norm(x) + residual)``; `residual` has the shape, dtype and device of x, and needs `relu`."""
    fits = _check(x, mean, variance, weight, bias, training, momentum, eps, fallback)
    if _is_written_down() or not x.numel():
        y = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
        return _then(y, residual, relu)
    if not training and (mean.requires_grad or variance.requires_grad):  # type: ignore[union-attr]
        return _then(_of_statistics(x, weight, bias, mean, variance, eps), residual, relu)
    arguments = x, weight, bias, residual, mean, variance
    options = fits, training, float(momentum), float(eps), relu, fallback
    if torch.compiler.is_compiling():  # which takes the operators' own derivative, and no function around them
        return _pure(*arguments, options)[0]
    if _is_constant(*arguments):
        return _normalize(*arguments, options)[0]
    return _Normalization.apply(*arguments, options)[0]


def _then(y: torch.Tensor, residual: Optional, relu: bool) -> torch.Tensor:
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y


def _is_constant(*tensors: Optional) -> bool:
    """Say whether a call of these needs no derivative, of either mode."""
    return not torch.is_grad_enabled() and all(
        [tensor is None or forward_ad.unpack_dual(tensor).tangent is None for tensor in tensors]
    )


def _normalize(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, mean: Optional, variance: Optional,
    options: tuple[bool, bool, float, float, bool, bool],
) -> Any:  # fmt: skip
    """Compute y and, in training, the batch's mean and inverse deviation; update the running statistics."""
    fits, training, momentum, eps, *rest = options
    if not fits:
        return _pure(x, weight, bias, residual, mean, variance, options)
    found = _update_and_normalize(x, weight, bias, mean, variance, training, momentum, eps, residual, *rest)
    if training and mean is not None:
        torch.autograd.graph.increment_version((mean, variance))  # what autograd saved of them is another now
    return found


def _called(operator: Callable[..., Any], *arguments: Any) -> Any:
    """The results of an operator whose kernel is in C; an error of what it leaves to Python keeps its class."""
    try:
        return operator(*arguments)
    except RuntimeError as error:
        own = vars(calls.raised).pop("error", None)
        if own is None or str(own) not in str(error):
            raise
    raise own


def _pure(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, mean: Optional, variance: Optional,
    options: tuple[bool, bool, float, float, bool, bool],
) -> Any:  # fmt: skip
    """Compute as `_normalize` does, by operators that write into nothing, or into the running statistics alone."""
    _, training, momentum, *rest = options
    if not training:
        return _inference(x, weight, bias, residual, mean, variance, *rest), x.new_empty(0), x.new_empty(0)
    *found, spread = _training(x, weight, bias, residual, *rest)
    if mean is not None and variance is not None:
        torch.ops.pybnorm.update_running(mean, variance, found[1].detach(), spread.detach(), momentum)
    return tuple(found)


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


# ---------------------------------------------------------------- on memory


def _finished(y: torch.Tensor, residual: Optional, relu: bool) -> torch.Tensor:
    """Add and clamp in place."""
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


def _train(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, eps: float, relu: bool, *rest: bool
) -> Any:
    x = dense(x)
    residual = None if residual is None else like(residual, x)
    mean, variance = _statistics_of(x), _statistics_of(x)  # with momentum 1 nothing is read of the two
    if calls.fits(x, weight, bias, mean, variance):
        found = _update_and_normalize(x, weight, bias, mean, variance, True, 1.0, eps, residual, relu, *rest)
        return *found, variance
    y, *saved = calls.train(x, weight, bias, eps, *rest)
    return _finished(y, residual, relu), *saved


def _infer(
    x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, mean: torch.Tensor, variance: torch.Tensor,
    eps: float, relu: bool, *rest: bool,
) -> torch.Tensor:  # fmt: skip
    x = dense(x)
    residual = None if residual is None else like(residual, x)
    if calls.fits(x, weight, bias, mean, variance):
        y: torch.Tensor = _update_and_normalize(
            x, weight, bias, mean, variance, False, 0.0, eps, residual, relu, *rest
        )[0]
        return y
    return _finished(calls.infer(x, weight, bias, mean, variance, eps, *rest), residual, relu)


def _normalize_by_calls(
    x: torch.Tensor, weight: Optional, bias: Optional, mean: Any, variance: Any, training: bool, momentum: float,
    eps: float, residual: Optional, relu: bool, *rest: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    packed = dense(x)
    near = None if residual is None else like(residual, packed)
    if (packed is not x or near is not residual) and calls.fits(packed, weight, bias):  # the kernel in C takes it then
        found = packed, weight, bias, mean, variance, training, momentum, eps, near, relu, *rest
        return _update_and_normalize(*found)
    if not training:
        y = calls.infer(x, weight, bias, mean, variance, eps, *rest)
        return _finished(y, residual, relu), _statistics_of(x)[:0], _statistics_of(x)[:0]
    y, *saved, spread = calls.train(x, weight, bias, eps, *rest)
    if mean is not None:
        _update(mean, variance, saved[0], spread, momentum)
    return _finished(y, residual, relu), *saved


def _differentiate(
    dy: torch.Tensor, x: torch.Tensor, weight: Optional, running_mean: Optional, running_var: Optional, mean: Optional,
    inverse: Optional, training: bool, eps: float, wanted: Sequence[bool], bias: Optional, y: Optional, residual: bool,
    fallback: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    packed = dense(x)
    dz, y = like(dy, packed), None if y is None else like(y, packed)
    statistics = running_mean, running_var, mean, inverse
    if y is not None and not training:  # the kernel in C has the gradient of ReLU by the batch's statistics alone
        dz = _mask(dz, y, 0)
        found = [x.new_empty(0) for _ in range(3)]
        if any(wanted):
            *found, _ = _backward(dz, packed, weight, *statistics, False, eps, wanted, None, None, False, fallback)
        return *found, dz if residual else x.new_empty(0)
    if (packed is not x or dz is not dy) and calls.fits(x, weight, bias):  # the kernel in C takes it then
        rest = training, eps, wanted, bias, y, residual, fallback
        result: tuple[torch.Tensor, ...] = _backward(dz, packed, weight, *statistics, *rest)
        return result
    dz = dz if y is None else _mask(dz, y, 0)
    by: tuple[Any, Any] = (mean, inverse) if training else (running_mean, running_var)
    made = (calls.differentiate if training else _of_constants)(packed, dz, weight, *by, eps, wanted, fallback)
    return tuple([x.new_empty(0) if one is None else one for one in (*made, dz if residual else None)])


def _of_constants(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, variance: torch.Tensor, eps: float,
    wanted: Sequence[bool], fallback: bool,
) -> Gradients:  # fmt: skip
    """Compute the gradients by constant statistics, by the operators themselves.

    ``dx = dy * weight / sqrt(variance + eps)`` is the inference of dy with mean and bias 0. The gradients of weight and
    bias are those of a backward with these statistics as the saved ones (`pybnorm.operations.backward_frozen`).
    """
    dx = dweight = dbias = None
    if wanted[0]:
        given = dy, weight, None, torch.zeros_like(mean), variance, False, 0.0, eps, None, False, fallback
        dx = _update_and_normalize(*given)[0]
    if wanted[1] or wanted[2]:
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        saved = mean.to(kind), torch.rsqrt(variance.to(kind) + eps)
        _, dweight, dbias, _ = _backward(
            dy, x, weight, None, None, *saved, True, eps, (False, *wanted[1:]), None, None, False, fallback
        )
    return dx, dweight if wanted[1] else None, dbias if wanted[2] else None


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


def _normalize_fake(x: torch.Tensor, *arguments: Any) -> Any:
    length = x.shape[1] if arguments[4] else 0
    return (torch.empty_like(dense(x)), *[_statistics_of(x)[:length] for _ in range(2)])


def _differentiate_fake(
    dy: torch.Tensor, x: torch.Tensor, weight: Optional, running_mean: Any, running_var: Any, mean: Any, inverse: Any,
    training: bool, eps: float, wanted: Sequence[bool], bias: Any, y: Any, residual: bool, *rest: Any,
) -> Gradients:  # fmt: skip
    vector = _statistics_of(x) if weight is None else weight
    made = [torch.empty_like(dense(x)), vector.new_empty(x.shape[1]), vector.new_empty(x.shape[1])]
    found = [one if want else x.new_empty(0) for one, want in zip(made, wanted, strict=True)]
    return (*found, torch.empty_like(dense(x)) if residual else x.new_empty(0))


def _update_fake(*arguments: Any) -> None:
    return None


# ---------------------------------------------------------------- torch.vmap


def _joined(size: int, tensor: Optional, axis: int | None, channels: int) -> Optional:
    """The mapped axis as part of the channels, which all have statistics of their own."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.movedim(0, channels).flatten(channels, channels + 1)


def _at_1(tensor: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """The tensor with its mapped axis in place 1: there the mapped operators put theirs."""
    if axis is None:
        return tensor.unsqueeze(1).expand(-1, size, *tensor.shape[1:])
    return tensor.movedim(axis, 1)


def _finished_mapped(y: torch.Tensor, info: Any, residual: Optional, axis: int | None, relu: bool) -> torch.Tensor:
    """The rest of a mapped call, by PyTorch: the residual's axes are not those of the joined call."""
    residual = None if residual is None else _at_1(residual, axis, info.batch_size)
    return _then(y.unflatten(1, (info.batch_size, -1)), residual, relu)


def _train_mapped(
    info: Any, axes: Any, x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, eps: float, relu: bool,
    *rest: bool,
) -> Any:  # fmt: skip
    n = info.batch_size
    joined = [_joined(n, t, axis, 0) for t, axis in zip((weight, bias), axes[1:3], strict=True)]
    y, *saved = _training(_joined(n, x, axes[0], 1), *joined, None, eps, False, *rest)
    return (_finished_mapped(y, info, residual, axes[3], relu), *(one.view(n, -1) for one in saved)), (1, 0, 0, 0)


def _infer_mapped(
    info: Any, axes: Any, x: torch.Tensor, weight: Optional, bias: Optional, residual: Optional, mean: Any,
    variance: Any, eps: float, relu: bool, *rest: bool,
) -> Any:  # fmt: skip
    vectors, places = (weight, bias, mean, variance), (*axes[1:3], *axes[4:6])
    w, b, *statistics = [_joined(info.batch_size, t, axis, 0) for t, axis in zip(vectors, places, strict=True)]
    y = _inference(_joined(info.batch_size, x, axes[0], 1), w, b, None, *statistics, eps, False, *rest)
    return _finished_mapped(y, info, residual, axes[3], relu), 1


def _normalize_mapped(
    info: Any, axes: Any, x: torch.Tensor, weight: Optional, bias: Optional, mean: Any, variance: Any, training: bool,
    momentum: float, eps: float, residual: Optional, relu: bool, *rest: bool,
) -> Any:  # fmt: skip
    data, places = (x, weight, bias, residual), (*axes[:3], axes[8])
    if not training:
        y, place = _infer_mapped(info, (*places, *axes[3:5]), *data, mean, variance, eps, relu, *rest)
        return (y, *(x.new_empty(info.batch_size, 0) for _ in range(2))), (place, 0, 0)
    (*found, spread), of = _train_mapped(info, places, *data, eps, relu, *rest)
    if mean is not None:
        _update_mapped(info, (*axes[3:5], 0, 0), mean, variance, found[1], spread, momentum)
    return tuple(found), of[:3]


def _differentiate_mapped(
    info: Any, axes: Any, dy: torch.Tensor, x: torch.Tensor, weight: Optional, running_mean: Any, running_var: Any,
    mean: Any, inverse: Any, training: bool, eps: float, wanted: Sequence[bool], bias: Any, y: Optional, residual: bool,
    *rest: bool,
) -> Any:  # fmt: skip
    n = info.batch_size
    dz = _at_1(dy, axes[0], n)
    if y is not None:
        dz = _mask(dz, _at_1(y, axes[11], n), 0)
    vectors = weight, running_mean, running_var, mean, inverse
    joined = [_joined(n, t, axis, 0) for t, axis in zip(vectors, axes[2:7], strict=True)]
    data = dz.flatten(1, 2), _joined(n, x, axes[1], 1)
    dx, *sums, _ = _backward(*data, *joined, training, eps, wanted, None, None, False, *rest)
    dx = dx.unflatten(1, (n, -1)) if wanted[0] else dx.expand(n, 0)
    sums = [one.view(n, -1) if want else one.expand(n, 0) for one, want in zip(sums, wanted[1:], strict=True)]
    of_residual = (dz, 1) if residual else (dz.new_empty(n, 0), 0)
    return (dx, *sums, of_residual[0]), (1 if wanted[0] else 0, 0, 0, of_residual[1])


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


def _register(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], mapped: Callable[..., Any],
    derivative: Any = None,
) -> Any:  # fmt: skip
    """Define an operator by its schema, kernels (on memory, on shapes, of ``torch.vmap``) and derivative."""
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


class _Function(torch.autograd.Function):
    """A function of PyTorch's whose arguments are read quickly."""

    generate_vmap_rule = True

    def __init_subclass__(cls) -> None:
        """PyTorch asks for forward's signature in each call: kept, it takes a quarter of the time."""
        cls.forward.__signature__ = inspect.signature(cls.forward)


class _Normalization(_Function):
    """The call; statistics have no derivative."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _normalize(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, residual, mean, variance, options = inputs
        _save(ctx, options, (x, weight, bias, residual, mean, variance), output)
        ctx.others = 3

    @staticmethod
    def backward(ctx: Any, dy: Optional, *unused: Any) -> Any:
        return _back(ctx, dy)


def _save(ctx: Any, options: Any, inputs: Any, output: Any) -> None:
    """Keep what the gradients need."""
    x, weight, bias, residual, *running = inputs
    _, training, _, eps, relu, *rest = options
    y, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    statistics = (None, None, *saved[:2]) if training else (*running, None, None)
    ctx.save_for_backward(x, weight, *statistics, *((bias, y) if relu else (None, None)))
    ctx.rest = training, eps, [True, weight is not None, bias is not None], residual is not None, rest


def _back(ctx: Any, dy: Optional) -> tuple[Optional, ...]:
    """The gradients of x, weight, bias and the residual, by what `_save` kept; None for the other arguments."""
    if dy is None:
        return (None,) * (4 + ctx.others)
    training, eps, there, residual, rest = ctx.rest
    needed = ctx.needs_input_grad
    _refuse_statistics(training, *needed[4:6])
    x, weight, *statistics, bias, y = ctx.saved_tensors
    wanted = [need and is_there for need, is_there in zip(needed[:3], there, strict=True)]
    arguments = dy, x, weight, *statistics, training, eps, wanted, bias, y, residual, *rest
    found = (_backward if _is_constant(dy, x, weight) else _Gradient.apply)(*arguments)
    kept = [gradient if want else None for gradient, want in zip(found, (*wanted, residual), strict=True)]
    return (*kept, *(None,) * ctx.others)


def _refuse_statistics(training: bool, *needed: bool) -> None:
    """Refuse statistics of an outer level of torch.func, which the call's arguments do not show."""
    if not training and any(needed):
        raise ArgumentError(
            "running_mean", "running statistics of an outer transform", "a gradient by them in the innermost one only"
        )


class _Gradient(_Function):
    """The first derivative by `batch_norm_backward`; its own is `second`."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        training, eps, wanted, _, y, residual = inputs[7:13]
        ctx.save_for_backward(*inputs[:7], y)
        ctx.set_materialize_grads(False)
        ctx.rest = training, eps, (*wanted, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        training, eps, wanted = ctx.rest
        _refuse_statistics(training, *ctx.needs_input_grad[3:5])
        dy, x, weight, *statistics, y = ctx.saved_tensors
        *given, of_residual = [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]
        dz = dy if y is None else dy * (y > 0)
        mean, spread = statistics[2:] if training else statistics[:2]
        of_x, of_dz, of_weight = second(x, dz, weight, mean, spread, eps, training, given)
        if of_residual is not None:
            of_dz = of_residual if of_dz is None else of_dz + of_residual
        if y is not None and of_dz is not None:
            of_dz = of_dz * (y > 0)
        return of_dz, of_x, of_weight, *(None,) * 11


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


class _Trained:
    """The derivative of `batch_norm_training`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        eps, relu, *rest = inputs[4:]
        _save(ctx, (True, True, 0.0, eps, relu, *rest), (*inputs[:4], None, None), output)
        ctx.others = len(inputs) - 4

    backward = _Normalization.backward


class _Inferred:
    """The derivative of `batch_norm_inference`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        eps, relu, *rest = inputs[6:]
        _save(ctx, (True, False, 0.0, eps, relu, *rest), inputs[:6], (output,))
        ctx.others = len(inputs) - 4

    backward = _Normalization.backward


# the operators, once what they are made of is there
_training = _register(_SCHEMAS[0], _train, _train_fake, _train_mapped, _Trained)
_inference = _register(_SCHEMAS[1], _infer, _infer_fake, _infer_mapped, _Inferred)
_backward = functools.partial(
    _called, _register(_SCHEMAS[2], _differentiate, _differentiate_fake, _differentiate_mapped)
)
_register(_SCHEMAS[3], _update, _update_fake, _update_mapped)
_update_and_normalize = functools.partial(
    _called, _register(_SCHEMAS[4], _normalize_by_calls, _normalize_fake, _normalize_mapped)
)
BY_CALLS: dict[str, Callable[..., Any]] = {"batch_norm_": _normalize_by_calls, "batch_norm_backward": _differentiate}
"""What computes where the kernels in C do not."""
