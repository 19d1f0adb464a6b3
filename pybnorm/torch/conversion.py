"""The switch for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from pybnorm import _arguments, functional
from pybnorm._words import PreferWord
from pybnorm.torch import fusion
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


def convert(
    model: _Module,
    *,
    fallback: bool = False,
    deterministic: bool = False,
    prefer: PreferWord | None = None,
    fuse: bool | Sequence[tuple[str, str]] = False,
) -> _Module:
    """Make the batch norms of a model those of this module, in place.

    Each module stays the same object and changes its class: its parameters, buffers, hooks, flags and device stay, and
    so do references to them, such as an optimizer's. Other subclasses of PyTorch's batch norms than its
    synchronized one (lazy, quantized, parametrized) behave differently and are not converted.

    Parameters
    ----------
    model : torch.nn.Module
    fallback : bool
        Let PyTorch compute calls that are refused here.
    deterministic : bool
        Only ways whose bits repeat; see `batch_norm`.
    prefer : None, "fastest" or "measured"
        Leave to PyTorch's own kernels what they compute faster, as known or measured; see `batch_norm`.
    fuse : bool or list of (str, str)
        True: a batch norm whose result only ReLU gets, or only an addition and then ReLU, becomes one module with them,
        where ``torch.fx`` shows it. What a ``forward`` decides by attributes of its module, other than ``training``, is
        decided now. Hooks that are added later to such a batch norm see the result of ReLU, and those of the ReLU
        nothing. Pairs: names of a batch norm and of the ``torch.nn.ReLU`` that alone gets its result and nothing else.
        `unfuse` undoes it.

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
    _arguments.instance(deterministic, bool, "deterministic", "a bool")
    functional._preferring(prefer)
    for module in model.modules():
        ours = _OURS.get(type(module), type(module) if isinstance(module, _BatchNorm) else None)
        if ours is not None:
            module.__class__ = ours
            module.fallback, module.deterministic, module.prefer = fallback, deterministic, prefer
    if fuse is not False:
        fusion.fuse(model, None if fuse is True else fuse)
    return model
