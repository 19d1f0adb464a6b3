"""The ways of a library to one batch-norm call: what ``"auto"`` takes of them for the calls of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import SLOT_BITS, Handle, cache, capability, way_of
from pybnorm._core import Plan as Way
from pybnorm.enums import Capability, Mode, Operation
from pybnorm.errors import UnsupportedError
from pybnorm.operations.views import Dims, _Axis, _views

MOST_WAYS = 256
"""Ways that a handle keeps: programs of other counts than the last are made of the same calls."""
_ALIGNMENT = 16
"""More is the same to every library."""


def slotted(buffer: Buffer, slot: int) -> Buffer:
    """An array at the begin of a program's slot; the owner is then what its address is a multiple of."""
    return buffer._replace(pointer=slot << SLOT_BITS, owner=_lowest(buffer.pointer))


def _lowest(address: int) -> int:
    return (address | _ALIGNMENT) & -(address | _ALIGNMENT)


def alignment_of(data: Iterable[Buffer]) -> int:
    """The largest power of two, up to 16, that divides all addresses."""
    return min(map(_aligned, data))


def _aligned(buffer: Buffer) -> int:
    return _lowest(buffer.pointer | (buffer.owner if isinstance(buffer.owner, int) else 0))


def auto(
    handle: Handle, operation: Operation, data: dict[str, Buffer], parameters: dict[str, Buffer],
    values: dict[str, Any], deterministic: bool, share: float = 0.0, sums_only: bool = False,
) -> Way | None:  # fmt: skip
    """The way of a call; None: the entry point.

    `deterministic`: only ways whose bits are known to repeat. `share`, `sums_only`: as `way_of` has them.
    """
    if values["mode"] == Mode.SPATIAL_PERSISTENT:
        return None
    statistics = "running_mean" in parameters, "saved_mean" in parameters
    asked = *statistics, deterministic, alignment_of(data.values())
    known = cache(handle, "ways")
    # Backward's share is read at each run: sums of any number of values go one way.
    key = (
        operation,
        *[(name, b.dtype, b.dims, b.strides) for name, b in data.items()],
        *values.items(),
        asked,
        share if operation == Operation.FORWARD_TRAINING else share != 0,
        sums_only,
    )
    if key in known:
        kept: Way | None = known[key]
        return kept
    tensors = {name: handle.descriptor(buffer, name) for name, buffer in data.items()}
    way = None
    with contextlib.suppress(UnsupportedError):
        way = way_of(handle, operation, tensors, values, *asked, share, sums_only)
    constant = operation == Operation.BACKWARD and "running_mean" in parameters
    if way is not None and way.algorithm in ("plain", "spatial") and not (share or sums_only or constant):
        way = None
    known.keep(key, way, MOST_WAYS)
    if handle.closed:  # by another thread, meanwhile
        known.clear()
    return way


def half(
    p: Any, operation: Operation, kept: Dims, data: dict[str, Buffer], parameters: dict[str, Buffer],
    *, share: float = 0.0, **options: float,
) -> bool:  # fmt: skip
    """Put half a synchronized batch norm into a program as one call; whether the library has it for these arrays.

    Of backward with a `share`, 1 over a number of values: dx from dbias and dscale, given as the sums of dy and of
    dy * (x - mean) over them. Without: the statistics of forward training, or dscale and dbias, and no y or dx.
    """
    handle, x = p.handle, data["x"]
    options = {"alpha": 1.0, "beta": 0.0, **options}
    if operation == Operation.BACKWARD:
        options |= {"alpha_param": 1.0, "beta_param": 0.0}
    for mode, axes in _views(kept, list(data.values())):
        dims = tuple(size for size, _ in axes)
        views = viewed(data, axes)
        layout = _arguments.layout_of(dims, views["x"].strides)
        bits, _ = capability(handle.backend, operation, mode, x.dtype, layout, len(dims))
        if not bits & Capability.HALVES:
            continue
        values = {"mode": mode, **options}
        way = auto(handle, operation, views, parameters, values, p.deterministic, share, not share)
        if way is not None:
            what = "of sums" if share else "sums"
            text = f"{operation.name.lower()} {what} {mode.name} {x.dtype.short} {dims} by {way.algorithm}"
            given = values | ({"share": share} if share else {"sums_only": True})
            arrays = views | shaped(parameters, dims, mode)
            p._step(operation, arrays, given, way.workspace_size, text, way)
            return True
    return False


def viewed(data: dict[str, Buffer], axes: Sequence[_Axis]) -> dict[str, Buffer]:
    """Arrays with the axes of one of their views."""
    dims = tuple(size for size, _ in axes)
    return {
        name: buffer._replace(dims=dims, strides=tuple(steps[i] for _, steps in axes))
        for i, (name, buffer) in enumerate(data.items())
    }


def shaped(vectors: dict[str, Buffer], dims: Dims, mode: Mode) -> dict[str, Buffer]:
    """Vectors in the shape of the parameters of a view."""
    shape = _arguments.derived_dims(dims, mode)
    steps = _arguments.packed_strides(shape)
    return {name: vector._replace(dims=shape, strides=steps) for name, vector in vectors.items()}


def merge(
    p: Any, means: Buffer, variances: Buffer, results: tuple[Buffer, Buffer, Buffer | None], running: Sequence[Buffer],
    *, within: float, n: int, **options: float,
) -> bool:  # fmt: skip
    """Put the merge of the statistics of several batches of one size into a program as one call; whether it is there.

    `means`, `variances`: a row for each batch; the sum of these is taken `within` times. `results`: mean, variance and
    inverse standard deviation. `n`: values of all.
    """
    operation, mode, rows = Operation.FORWARD_TRAINING, Mode.SPATIAL, means.dims
    layout = _arguments.layout_of(rows, _arguments.packed_strides(rows))
    if not capability(p.handle.backend, operation, mode, means.dtype, layout, 2)[0] & Capability.HALVES:
        return False
    mean, variance, inverse = results
    data = {"x": means, "y": variance._replace(dims=rows, strides=means.strides), "z": variances}
    parameters = {"scale": variance, "bias": variance}  # every training has them; these are not read
    parameters |= {"saved_mean": mean, "saved_inv_variance": inverse or p.scratch(mean.dims, mean.dtype)}
    parameters |= dict(zip(("running_mean", "running_variance"), running, strict=False))
    values = {"mode": mode, "alpha": within, "beta": 0.0, **options}
    way = auto(p.handle, operation, data, parameters, values, p.deterministic, 1 / n, True)
    if way is None:
        return False
    given = values | {"share": 1 / n, "sums_only": True}
    text = f"merge {means.dtype.short} {rows} by {way.algorithm}"
    p._step(operation, data | shaped(parameters, rows, mode), given, way.workspace_size, text, way)
    return True
