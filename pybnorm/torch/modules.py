"""Modules with the arguments and the state of PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.torch.calls import REFUSALS
from pybnorm.torch.operators import batch_norm, normalized

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]


_UNCONVERT = "for torch.jit.script and torch.fx call pybnorm.torch.unconvert(model) first"


class _BatchNorm:
    """Mixin for PyTorch's modules, which keep their parameters, buffers, state and arguments."""

    fallback = False
    """Let PyTorch compute calls that are refused here."""
    joins = True
    """Whether an activation may be part of the call."""

    def forward(
        self: Any, input: torch.Tensor, *, activation: str | None = None, residual: Any = None, in_place: bool = False
    ) -> torch.Tensor:
        """Normalize; see ``torch.nn.BatchNorm2d`` and `batch_norm`.

        Parameters
        ----------
        input : Tensor
        activation : None or "relu"
            What is taken of the result, as `convert` with ``fuse`` joins it.
        residual : Tensor, optional
            Added in front of the activation, by PyTorch's rules of shapes and dtypes.
        in_place : bool
            Those of an addition in place.

        Returns
        -------
        Tensor

        Raises
        ------
        ValueError
            `input` has a rank that the module does not take.
        ArgumentError, UnsupportedError, LibraryNotFoundError, NotInitializedError, VendorError

        Examples
        --------
        >>> import torch
        >>> pybnorm.torch.BatchNorm1d(3).forward(torch.ones(2, 3), activation="relu").sum().item()
        0.0
        """
        if not isinstance(input, torch.Tensor):  # torch.fx's tracer among others, which follows Python
            raise ArgumentTypeError("input", input, f"a tensor; {_UNCONVERT}")
        self._check_input_dim(input)
        mean, variance = _held(self, "_buffers", "running_mean"), _held(self, "_buffers", "running_var")
        batch = self.training or (mean is None and variance is None)
        if self.training and not self.track_running_stats:
            mean = variance = None
        counter = None
        if self.training and self.track_running_stats:
            counter = _held(self, "_buffers", "num_batches_tracked")
        momentum, average = self.momentum, None
        if momentum is None and batch:
            # Each new factor would need a new plan: take the batch's statistics with factor 1 and average them here.
            momentum = 1.0
            if counter is not None and mean is not None:
                average, mean, variance = (mean, variance), torch.zeros_like(mean), torch.zeros_like(variance)
        elif momentum is None:
            momentum = 0.0
        if counter is not None:
            counter.add_(1)  # first, as PyTorch: a checkpoint may end its second run within the call
        if average is None:
            y: torch.Tensor = self._computed((input, mean, variance, batch, momentum), activation, residual, in_place)
        else:
            try:
                y = self._computed((input, mean, variance, batch, momentum), activation, residual, in_place)
            except _STOP:
                _averaged(average, (mean, variance), counter)
                raise
            _averaged(average, (mean, variance), counter)
        return y

    def __prepare_scriptable__(self: Any) -> Any:
        """Refuse ``torch.jit.script``, which would compile this Python code."""
        raise ArgumentError("obj", f"{type(self).__name__} of pybnorm.torch", f"PyTorch's modules; {_UNCONVERT}")

    def _computed(
        self: Any, given: tuple[Any, ...], activation: str | None, residual: Any, in_place: bool
    ) -> torch.Tensor:
        """The result, once it is known with which statistics; `given` is what `_normalized` takes."""
        input, mean, variance, batch, momentum = given
        if activation == "relu" and (self.joins or not batch) and self._has_operator(input, residual):
            weight, bias = _held(self, "_parameters", "weight"), _held(self, "_parameters", "bias")
            try:
                return normalized(
                    input, mean, variance, weight, bias, residual, batch, momentum, self.eps, True, self.fallback
                )
            except REFUSALS:  # nothing is written: what follows refuses by PyTorch's names, or PyTorch computes
                pass
        y = self._normalized(*given)
        return y if activation is None else _activated(y, residual, in_place)

    def _has_operator(self: Any, input: torch.Tensor, residual: Any) -> bool:
        """Say whether one operator takes it: input not empty, residual of the shape and dtype of the sum."""
        if not torch.jit.is_tracing() and input.numel() == 0:
            return False
        return residual is None or (_like(residual, input) and residual.device == input.device)

    def _normalized(
        self: Any, input: torch.Tensor, mean: torch.Tensor | None, variance: torch.Tensor | None, batch: bool,
        momentum: float,
    ) -> torch.Tensor:  # fmt: skip
        """The batch norm by itself."""
        weight, bias = _held(self, "_parameters", "weight"), _held(self, "_parameters", "bias")
        return batch_norm(input, mean, variance, weight, bias, batch, momentum, self.eps, fallback=self.fallback)


def _held(module: Any, kind: str, name: str) -> Any:
    """A module's attribute: looked up where parameters or buffers are, which takes a quarter of the time."""
    held = module.__dict__[kind]
    return held[name] if name in held else getattr(module, name)


# Ends a checkpoint's second run where results are saved for backward, when statistics have been updated.
_STOP: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())


@torch.no_grad()
def _averaged(average: Any, statistics: Any, counter: torch.Tensor) -> None:
    """Running statistics as averages over all batches, on the device, without waiting for the count."""
    for kept, now in zip(average, statistics, strict=True):
        kept.add_((now - kept) / counter)


def _activated(y: torch.Tensor, residual: Any, in_place: bool) -> torch.Tensor:
    """``relu(y + residual)``; in place only as the model has it, since y may be a view of torch.vmap's."""
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    return torch.relu(y)


def _like(residual: Any, y: torch.Tensor) -> bool:
    """Say whether the sum has the shape and the dtype of y, and both are dense."""
    return (
        isinstance(residual, torch.Tensor)
        and residual.layout is torch.strided
        and (residual.shape, residual.dtype) == (y.shape, y.dtype)
    )


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``, arguments and state included, computed by the vendors' libraries.

    Examples
    --------
    >>> import torch
    >>> pybnorm.torch.BatchNorm1d(16)(torch.ones(2, 16, 4)).abs().max().item()
    0.0
    """


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, arguments and state included, computed by the vendors' libraries.

    Examples
    --------
    >>> import torch
    >>> pybnorm.torch.BatchNorm2d(16)(torch.ones(2, 16, 4, 4)).abs().max().item()
    0.0
    """


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``, arguments and state included, computed by the vendors' libraries.

    Examples
    --------
    >>> import torch
    >>> pybnorm.torch.BatchNorm3d(16)(torch.ones(2, 16, 4, 4, 4)).abs().max().item()
    0.0
    """
