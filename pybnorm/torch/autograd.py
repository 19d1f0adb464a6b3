"""The function `batch_norm`: which way a call takes."""

from __future__ import annotations

from typing import Any

import torch

from pybnorm import _arguments, functional
from pybnorm._core import call_miopen
from pybnorm._words import PreferWord
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.torch import calls, installation, operators
from pybnorm.torch.calls import REFUSALS, Gradients, Optional, dense
from pybnorm.torch.derivatives import WAYS, Inference, Training, forward_mode

__all__ = ["batch_norm"]


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    fallback: bool = False,
    deterministic: bool = False,
    prefer: PreferWord | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.batch_norm``, computed by cuDNN, MIOpen or oneDNN.

    Parameters
    ----------
    input : Tensor, shape (N, C, ...), rank 2 to 8
        On the CPU or a GPU. One that is neither contiguous nor channels-last is copied, as PyTorch does.
    running_mean, running_var : Tensor, shape (C,), or None
        Updated if `training`, with the unbiased variance; needed if not.
    weight, bias : Tensor, shape (C,), or None
    training : bool
        Whether to use the statistics of the batch. If not, statistics are constants, also for the gradient.
    momentum : float
        From 0 to 1: ``running = (1 - momentum) * running + momentum * batch``.
    eps : float
    fallback : bool
        Let PyTorch compute calls that are refused here.
    deterministic : bool
        Only ways whose bits repeat, forward and backward (`pybnorm.Plan.deterministic`), as also where
        ``torch.use_deterministic_algorithms(True)`` is set: else an UnsupportedError, with ``warn_only`` a warning.
    prefer : None, "fastest" or "measured"
        "fastest": leave to PyTorch's own kernel, forward and backward each, what a table for this device and these
        versions knows it to compute faster (`reason`). Compilers and ``torch.func`` are not asked.
        "measured": the first call of its kind in this process (operation, device, dtype, shape, strides, which vectors
        are there, epsilon) times both, some 30 calls in all, and later ones take PyTorch's kernel where it took 3 %
        less; not where it is known to err. Only results that nobody sees are written. While a CUDA graph is captured
        that table decides; do not measure while another thread captures one.

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
    The first derivative is the vendor's. Further ones are PyTorch's own, of the formula. Forward mode is an error.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]], requires_grad=True)
    >>> pybnorm.torch.batch_norm(x, None, None, training=True).sum().backward()
    >>> x.grad.abs().max().item() < 1e-5
    True
    """
    if _compiling():
        if operators.training is None:
            return _opaque(
                input, running_mean, running_var, weight, bias, training, momentum, eps, fallback=fallback,
                deterministic=deterministic,
            )  # fmt: skip
        return _operator(
            input, running_mean, running_var, weight, bias, training, momentum, eps, fallback, deterministic
        )
    try:  # all in one function, and what calls have most often first: each step counts with small tensors
        if prefer is not None:
            functional._preferring(prefer)
        if type(input) is not torch.Tensor or _transformed():
            _arguments.instance(input, torch.Tensor, "input", "a tensor")
            if operators.training is not None:
                return _operator(
                    input, running_mean, running_var, weight, bias, training, momentum, eps, fallback, deterministic
                )
            if _transformed():
                raise ArgumentError(
                    "input", "a tensor of torch.func's transforms (vmap, grad, ...)", "with PyTorch 2.5 or newer"
                )
        x = input if input.is_contiguous() else dense(input)
        _check(x, running_mean, running_var, training)
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or forward_mode()
        ):
            return _with_derivative(
                x, running_mean, running_var, weight, bias, training, momentum, eps, fallback, deterministic, prefer
            )
        if training:
            return calls.train(
                x, weight, bias, running_mean, running_var, momentum, eps, fallback, deterministic, False, prefer
            )[0]
        return calls.infer(x, weight, bias, running_mean, running_var, eps, fallback, deterministic, prefer)
    except REFUSALS as error:
        if not fallback:
            if type(error) is ArgumentTypeError and error.argument in _NAMES:
                raise ArgumentTypeError(_NAMES[error.argument], error.value, error.allowed) from None
            if type(error) is ArgumentError and error.argument in _NAMES:
                raise ArgumentError(_NAMES[error.argument], error.value, error.allowed) from None
            raise
    except Exception:
        tensors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
        for name, given in tensors.items():  # only now: a call that is right does not wait for it
            if given is not None:
                _arguments.instance(given, torch.Tensor, name, "a tensor or None")
        raise
    return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


_NAMES = {
    "x": "input",
    "scale": "weight",
    "running_variance": "running_var",
    "exponential_average_factor": "momentum",
    "epsilon": "eps",
}
"""PyTorch's names of arguments, by ours."""

_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", bool)
# Before PyTorch 2.4 there are no operators: torch.compile does not trace into it. PyTorch 1 has no compiler.
_opaque: Any = None
if operators.training is None and _compiling is not bool:
    _opaque = torch.compiler.disable(batch_norm)

_DTYPES = torch.float32, torch.float16, torch.bfloat16
_operator_lent: list[Any] = []
"""PyTorch's operator for MIOpen, by which autograd in C++ is around the kernels; None: it cannot be had."""


def _lent() -> Any:
    kernels = {"miopen_batch_norm": _refuse, "miopen_batch_norm_backward": _differentiated}
    _operator_lent[:] = [installation.lend(kernels, {"miopen_batch_norm_backward": _differentiated_again})]
    return _operator_lent[0]


def _stay_in_python() -> None:
    _operator_lent[:] = [None]


installation.at_end(_stay_in_python)


def _with_derivative(
    x: torch.Tensor, mean: Optional, variance: Optional, weight: Optional, bias: Optional, training: bool,
    factor: float, eps: float, fallback: bool, deterministic: bool, prefer: PreferWord | None,
) -> torch.Tensor:  # fmt: skip
    """The call with autograd around it: in C++ where kernels in C take a training."""
    if (
        training
        and prefer is None
        and not (fallback or deterministic or forward_mode() or _tracing())
        and type(factor) is type(eps) is float
        and weight is not None
        and weight.dtype is torch.float32
        and x.dtype in _DTYPES
    ):
        operator = _operator_lent[0] if _operator_lent else _lent()
        if operator is not None:
            try:
                y: torch.Tensor = call_miopen(operator, x, weight, bias, mean, variance, factor, eps)
                return y
            except _RefusedError:
                pass
    way = WAYS[prefer]
    if training:
        rest: tuple[Any, ...] = way, factor, eps, fallback, deterministic
    else:
        rest = way, eps, fallback, deterministic
    result: torch.Tensor = (_train if training else _infer)(x, weight, bias, mean, variance, rest)
    return result


class _RefusedError(Exception):
    """The kernels in C do not take a call; nothing was written."""


def _refuse(*call: Any) -> Any:
    raise _RefusedError


def _differentiated(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, running_mean: Optional, running_var: Optional,
    mean: torch.Tensor, inverse: torch.Tensor, eps: float,
) -> Gradients:  # fmt: skip
    return calls.differentiate(x, dy, weight, mean, inverse, eps, True, (True,) * 3, False)


def _differentiated_again(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, running_mean: Optional, running_var: Optional,
    mean: torch.Tensor, inverse: torch.Tensor, eps: float,
) -> Gradients:  # fmt: skip
    """With derivatives of its own, whose sums are not of 16 bits as PyTorch's are."""
    return WAYS[None].back(x, dy, weight, mean, inverse, eps, True, (True,) * 3, False, False)


_train = Training.apply
_infer = Inference.apply
_tracing = getattr(torch._C, "_get_tracing_state", bool)
"""Of ``torch.jit.trace``: what it writes down would be replayed without us."""
_transformed = getattr(torch._C, "_are_functorch_transforms_active", bool)


def _operator(
    x: torch.Tensor,
    mean: Optional,
    variance: Optional,
    weight: Optional,
    bias: Optional,
    training: bool,
    factor: float,
    eps: float,
    fallback: bool,
    deterministic: bool,
) -> torch.Tensor:
    """The call as an operator of PyTorch, which compilers, exporters, modes and subclasses of tensors see."""
    _check(x, mean, variance, training)
    x = dense(x)
    result: torch.Tensor
    if training:
        result = operators.training(x, weight, bias, mean, variance, factor, eps, fallback, deterministic)[0]
    else:
        result = operators.inference(x, weight, bias, mean, variance, eps, fallback, deterministic)
    return result


def _check(x: torch.Tensor, mean: Optional, variance: Optional, training: bool) -> None:
    if training is True:
        if x.dim() > 1 and x.numel() == x.size(1):
            raise ArgumentError("input", f"shape {tuple(x.shape)}", "more than one value per channel when training")
    elif training is not False:
        raise ArgumentTypeError("training", training, "a bool")
    elif mean is None or variance is None:
        raise ArgumentError("running_mean", "None", "running_mean and running_var where training is False")
