"""Nodes with peer_stats: their statistics are those of all ranks, by `pybnorm.sync`."""

from __future__ import annotations

from typing import Any

from pybnorm._arguments import ALIGNMENT
from pybnorm._core import Handle
from pybnorm.errors import ArgumentError
from pybnorm.graph.lowering import _Joined
from pybnorm.graph.rules import _Record
from pybnorm.sync import SyncBatchNorm


class _Exchange:
    """A call that is ready to run any number of times, on arrays at any addresses; see `Prepared`."""

    copies = ()

    def __init__(self, handle: Handle, communicator: Any, step: _Joined) -> None:
        x: _Record = step.arguments[0]
        self._handle, self._step = handle, step
        self._layer = SyncBatchNorm(handle, communicator, x.dims[1], x.dtype)
        self.calls = (f"SyncBatchNorm.{step.function}",)
        kind = handle.library.device_type
        places = {record: ALIGNMENT * i for i, record in enumerate(step.places(), 1)}
        arguments, options = step.bound(lambda record: record.at(places[record], kind))
        self.nbytes = self._layer.workspace_size(step.function, *arguments, **options)

    def execute(self, handle: Handle, _function: str, addresses: tuple[int, ...], scratch: Any) -> None:
        """Run it; `addresses` has the workspace's, which is not used, then one for each of the step's places."""
        if handle is not self._handle:
            raise ArgumentError("handle", "another", "the one that the graph was built with, as its peer_stats need")
        kind = handle.library.device_type
        places = dict(zip(self._step.places(), addresses[1:], strict=True))
        arguments, options = self._step.bound(lambda record: record.at(places[record], kind))
        getattr(self._layer, self._step.function)(*arguments, workspace=scratch, **options)
