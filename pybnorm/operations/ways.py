"""The ways of a library to one batch-norm call: what ``"auto"`` takes of them for the calls of a program."""

from __future__ import annotations

from typing import Any

from pybnorm._arrays import Buffer
from pybnorm._core import Handle, algorithms, way_of
from pybnorm._core import Plan as Way
from pybnorm.enums import Mode, Operation
from pybnorm.errors import UnsupportedError

_ALWAYS = "auto", "fast", "plain"


def several(handle: Handle) -> bool:
    """Whether the backend has more than one."""
    return len(algorithms(handle.backend)) > len(_ALWAYS)


def auto(
    handle: Handle, operation: Operation, data: dict[str, Buffer], parameters: dict[str, Buffer],
    values: dict[str, Any], deterministic: bool,
) -> Way | None:  # fmt: skip
    """The way of a spatial call; None: the entry point, or there is none without other calls in its place.

    `deterministic`: only ways whose bits are known to repeat.
    """
    if values["mode"] != Mode.SPATIAL:
        return None
    tensors = {name: handle.descriptor(buffer, name) for name, buffer in data.items()}
    statistics = "running_mean" in parameters, "saved_mean" in parameters
    try:
        way = way_of(handle, operation, tensors, values, *statistics, deterministic)
    except UnsupportedError:
        return None
    return None if way.algorithm in ("plain", "spatial") else way
