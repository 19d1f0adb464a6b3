"""The function `batch_norm` and its derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pybnorm import functional
from pybnorm.errors import ArgumentError, ArgumentTypeError, LibraryError, NotInitializedError, UnsupportedError

__all__ = ["batch_norm"]

_REFUSALS = (ArgumentError, UnsupportedError, LibraryError, NotInitializedError)  # before anything is written


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
    A second derivative is an error, raised by PyTorch's ``once_differentiable``.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]], requires_grad=True)
    >>> pybnorm.torch.batch_norm(x, None, None, training=True).sum().backward()
    >>> x.grad.abs().max().item() < 1e-5
    True
    """
    if _opaque is not None and torch.compiler.is_compiling():
        return _opaque(input, running_mean, running_var, weight, bias, training, momentum, eps, fallback)
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps, fallback)


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    fallback: bool,
) -> torch.Tensor:
    try:
        return _computed(input, running_mean, running_var, weight, bias, training, momentum, eps, fallback)
    except _REFUSALS:
        if not fallback:
            raise
    return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


# torch.compile does not trace into it. PyTorch 1 has no compiler.
_opaque = torch.compiler.disable(_batch_norm) if hasattr(getattr(torch, "compiler", None), "is_compiling") else None


def _computed(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    factor: float,
    eps: float,
    fallback: bool,
) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError("input", x, "a tensor")
    dense = x if x.is_contiguous() else _dense(x)
    if training:
        if x.dim() > 1 and x.numel() == x.shape[1]:
            raise ArgumentError("input", f"shape {tuple(x.shape)}", "more than one value per channel when training")
    elif mean is None or variance is None:
        raise ArgumentError("running_mean", "None", "running_mean and running_var where training is False")
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or _forward_mode()
    ):
        result: torch.Tensor
        if training:
            result = _Training.apply(dense, weight, bias, mean, variance, factor, eps, fallback)
        else:
            result = _Frozen.apply(dense, weight, bias, mean, variance, eps)
        return result
    if training:
        y: torch.Tensor = functional.batch_norm_training(
            dense, weight, bias, mean, variance, exponential_average_factor=factor, epsilon=eps
        )[0]
        return y
    found: torch.Tensor = functional.batch_norm_inference(dense, weight, bias, mean, variance, epsilon=eps)
    return found


def _forward_mode() -> bool:
    """Whether forward-mode derivatives are active: the functions below refuse them, a plain call would drop them."""
    return bool(getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps or overlaps, in an axis order that backends are fast on."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return x
    return x.contiguous()


def _like(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient with x's strides; the gradient of a sum is one value with strides 0."""
    return gradient if gradient.stride() == x.stride() else torch.empty_like(x).copy_(gradient)


class _Training(torch.autograd.Function):
    """Batch norm by the statistics of the batch."""

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
        fallback: bool,
    ) -> torch.Tensor:
        y: torch.Tensor
        y, saved_mean, saved_inv_variance = functional.batch_norm_training(
            x, weight, bias, mean, variance, exponential_average_factor=factor, epsilon=eps
        )
        ctx.save_for_backward(x, weight, saved_mean, saved_inv_variance)
        ctx.eps, ctx.fallback = eps, fallback
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, saved_mean, saved_inv_variance = ctx.saved_tensors
        dy, saved = _like(dy, x), (saved_mean, saved_inv_variance)
        try:
            found = functional.batch_norm_backward(x, dy, weight, *saved, epsilon=ctx.eps)
        except _REFUSALS:  # of what forward did not need
            if not ctx.fallback:
                raise
            native = torch.ops.aten.native_batch_norm_backward
            found = native(dy, x, weight, None, None, *saved, True, ctx.eps, [True, True, True])
        wanted = ctx.needs_input_grad
        dx, dscale, dbias = (gradient if needed else None for gradient, needed in zip(found, wanted, strict=False))
        return dx, dscale, dbias, None, None, None, None, None


class _Frozen(torch.autograd.Function):
    """Batch norm by given statistics, which are constants.

    ``dx = dy * weight / sqrt(variance + eps)`` is the inference of dy with mean and bias 0; ``dweight = sum(dy * (x -
    mean)) / sqrt(variance + eps)`` and ``dbias = sum(dy)`` are those of the backward with these statistics as the saved
    ones (`pybnorm.operations.backward_frozen`), whose dx is dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        y: torch.Tensor = functional.batch_norm_inference(x, weight, bias, mean, variance, epsilon=eps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        dy = _like(dy, x)
        dx = dscale = dbias = None
        if ctx.needs_input_grad[0]:
            zeros = torch.zeros_like(mean)
            dx = functional.batch_norm_inference(dy, weight, None, zeros, variance, epsilon=ctx.eps)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            inv_variance = torch.rsqrt(variance + ctx.eps)
            _, dscale, dbias = functional.batch_norm_backward(x, dy, weight, mean, inv_variance, epsilon=ctx.eps)
        wanted = ctx.needs_input_grad
        return dx, dscale if wanted[1] else None, dbias if wanted[2] else None, None, None, None
