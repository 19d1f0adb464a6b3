"""The switch for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from pybnorm import _arguments
from pybnorm.torch import fusion
from pybnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, _BatchNorm
from pybnorm.torch.sync import SyncBatchNorm

__all__ = ["convert", "unconvert"]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_OURS = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
    torch.nn.SyncBatchNorm: SyncBatchNorm,
}


def convert(model: _Module, *, fallback: bool = False, fuse: bool | Sequence[tuple[str, str]] = False) -> _Module:
    """Make the batch norms of a model those of this module, in place.

    Each module stays the same object and changes its class: its parameters, buffers, hooks, flags and device stay, and
    so do references to them, such as an optimizer's. Other subclasses of PyTorch's batch norms than its
    synchronized one (lazy, quantized, parametrized) behave differently and are not converted.

    Parameters
    ----------
    model : torch.nn.Module
    fallback : bool
        Let PyTorch compute calls that are refused here.
    fuse : bool or list of (str, str)
        True: a batch norm whose result only ReLU gets, or only an addition and then ReLU, becomes one module with them,
        where ``torch.fx`` shows it. What a ``forward`` decides by attributes of its module, other than ``training``, is
        decided now. Hooks that are added later to such a batch norm see the result of ReLU, and those of the ReLU
        nothing. Pairs: names of a batch norm and of the ``torch.nn.ReLU`` that alone gets its result and nothing else.
        `unconvert` undoes it.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `fuse` names what is not there; the batch norms were converted.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16))
    >>> type(pybnorm.torch.convert(model)[1]).__module__
    'pybnorm.torch.modules'
    """
    _arguments.instance(model, torch.nn.Module, "model", "a torch.nn.Module")
    _arguments.instance(fallback, bool, "fallback", "a bool")
    for module in model.modules():
        ours = _OURS.get(type(module), type(module) if isinstance(module, _BatchNorm) else None)
        if ours is not None:
            module.__class__ = ours
            module.fallback = fallback
    if fuse is not False:
        fusion.fuse(model, None if fuse is True else fuse)
    return model


def unconvert(model: _Module) -> _Module:
    """Give a model PyTorch's own batch norms back, in place: what `convert` did is undone, fused ones included.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    torch.nn.Module
        `model`. Parameters, buffers and hooks stay.

    Raises
    ------
    ArgumentTypeError

    Examples
    --------
    >>> import torch
    >>> model = pybnorm.torch.convert(torch.nn.Sequential(torch.nn.BatchNorm2d(16), torch.nn.ReLU()), fuse=True)
    >>> type(pybnorm.torch.unconvert(model)[0])
    <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
    """
    _arguments.instance(model, torch.nn.Module, "model", "a torch.nn.Module")
    fusion.unfuse(model)
    for module in model.modules():
        if type(module) in _THEIRS:
            for name in ("fallback", "_joined"):
                module.__dict__.pop(name, None)
            module.__class__ = _THEIRS[type(module)]
    return model


_THEIRS: dict[type, type] = {ours: theirs for theirs, ours in _OURS.items()}
