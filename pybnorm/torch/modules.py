"""Modules, and the switch for a model."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from pybnorm.errors import ArgumentTypeError
from pybnorm.torch.autograd import batch_norm

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "convert"]

_Module = TypeVar("_Module", bound=torch.nn.Module)


class _BatchNorm:
    """Added to PyTorch's modules, which keep their parameters, buffers, state and arguments."""

    fallback = False
    """Let PyTorch compute calls that are refused here."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Normalize; see ``torch.nn.BatchNorm2d`` and `batch_norm`.

        Parameters
        ----------
        input : Tensor

        Returns
        -------
        Tensor

        Raises
        ------
        ValueError
            `input` has a rank that the module does not take.
        ArgumentError, UnsupportedError, LibraryNotFoundError, NotInitializedError, VendorError
        """
        self._check_input_dim(input)
        mean, variance = self.running_mean, self.running_var
        batch = self.training or (mean is None and variance is None)
        if self.training and not self.track_running_stats:
            mean = variance = None
        counter = self.num_batches_tracked if self.training and self.track_running_stats else None
        momentum, average = self.momentum, None
        if momentum is None and batch:
            # Each new factor would need a new plan: take the batch's statistics with factor 1 and average them here.
            momentum = 1.0
            if counter is not None and mean is not None:
                average, mean, variance = (mean, variance), torch.zeros_like(mean), torch.zeros_like(variance)
        elif momentum is None:
            momentum = 0.0
        y = batch_norm(input, mean, variance, self.weight, self.bias, batch, momentum, self.eps, fallback=self.fallback)
        if counter is not None:
            counter.add_(1)
        if average is not None:
            with torch.no_grad():
                for kept, now in zip(average, (mean, variance), strict=True):
                    kept.add_((now - kept) / counter)  # on the device, without waiting for the count
        return y


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``, arguments and state included, computed by the vendors' libraries."""


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, arguments and state included, computed by the vendors' libraries."""


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``, arguments and state included, computed by the vendors' libraries."""


_OURS = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
}


def convert(model: _Module, *, fallback: bool = False) -> _Module:
    """Make the batch norms of a model those of this module, in place.

    Each module stays the same object and changes its class: its parameters, buffers, hooks, flags and device stay, and
    so do references to them, such as an optimizer's. Subclasses of PyTorch's three (lazy, synchronized, quantized,
    parametrized) behave differently and are not converted.

    Parameters
    ----------
    model : torch.nn.Module
    fallback : bool
        Let PyTorch compute calls that are refused here.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ArgumentTypeError
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError("model", model, "a torch.nn.Module")
    if not isinstance(fallback, bool):
        raise ArgumentTypeError("fallback", fallback, "a bool")
    for module in model.modules():
        ours = _OURS.get(type(module), type(module) if isinstance(module, _BatchNorm) else None)
        if ours is not None:
            module.__class__ = ours
            module.fallback = fallback
    return model
