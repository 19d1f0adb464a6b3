"""The switch for a model."""

from __future__ import annotations

from typing import TypeVar

import torch

from pybnorm.errors import ArgumentTypeError
from pybnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNorm
from pybnorm.torch.sync import SyncBatchNorm

__all__ = ["convert"]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_OURS = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
    torch.nn.SyncBatchNorm: SyncBatchNorm,
}


def convert(model: _Module, *, fallback: bool = False) -> _Module:
    """Make the batch norms of a model those of this module, in place.

    Each module stays the same object and changes its class: its parameters, buffers, hooks, flags and device stay, and
    so do references to them, such as an optimizer's. Other subclasses of PyTorch's batch norms than its
    synchronized one (lazy, quantized, parametrized) behave differently and are not converted.

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

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16))
    >>> type(pybnorm.torch.convert(model)[1]).__module__
    'pybnorm.torch.modules'
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
