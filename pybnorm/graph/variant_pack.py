"""The variant pack: the memory that a caller gives to a graph's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import Handle
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.graph.attributes import TensorAttributes
from pybnorm.graph.rules import _Record
from pybnorm.operations.program import region


def _bound(
    handle: Handle,
    variant_pack: Mapping[Any, Any],
    records: Mapping[int, _Record],
    by_uid: Mapping[int, _Record | None],
) -> dict[_Record, Buffer]:
    """The memory of every tensor that is neither virtual nor passed by value."""
    _arguments.instance(variant_pack, Mapping, "variant_pack", "a mapping from uids to arrays or addresses")
    own = [r for r in by_uid.values() if r is not None and not r.virtual]
    buffers: dict[_Record, Buffer] = {}
    for key, value in variant_pack.items():
        if issubclass(type(key), TensorAttributes):
            known = records.get(id(key))
            if known is None:
                raise ArgumentError("variant_pack", f"key {key!r}", "tensors of the graph that have memory")
            record: _Record | None = known
        else:
            if issubclass(type(key), bool) or not issubclass(type(key), int):
                raise ArgumentTypeError("variant_pack", f"key {key!r}", "integers, or tensors of the graph")
            if key not in by_uid:
                raise ArgumentError("variant_pack", f"uid {key}", f"uids of the graph: {_listed(own)}")
            record = by_uid[key]
        if record is None:
            raise ArgumentError("variant_pack", f"uid {key}", "no entry: this scalar is passed by value")
        where = f"variant_pack[{record.uid}] ({record.name})"
        if record.virtual:
            raise ArgumentError(where, value, "no entry: this tensor is virtual and lies in the workspace")
        if record in buffers:
            raise ArgumentError(where, value, "one entry, by its uid or by the tensor")
        buffers[record] = _memory_of(handle, record, value, where)
    missing = [r for r in own if r not in buffers]
    if missing:
        raise ArgumentError("variant_pack", f"no entry for {_listed(missing)}", f"an entry for each of {_listed(own)}")
    return buffers


def _listed(records: list[_Record]) -> str:
    return ", ".join(f"{r.uid} ({r.name})" for r in records)


def _check_overlaps(buffers: dict[_Record, Buffer], shared: set[_Record], workspace: tuple[int, int]) -> None:
    """Refuse outputs that overlap anything else. Tensors in `shared` are updated in place."""
    outputs: list[_arguments.Region] = []
    inputs: list[_arguments.Region] = []
    for record, buffer in buffers.items():
        if record in shared:
            continue
        (outputs if record.output else inputs).append(region(f"{record.name} (uid {record.uid})", buffer))
    address, nbytes = workspace
    if nbytes:
        outputs.append(_arguments.Region("workspace", address, (nbytes,), (1,), 1))
    _arguments.disjoint(outputs, inputs)


def _memory_of(handle: Handle, record: _Record, value: Any, where: str) -> Buffer:
    """Check an entry of the variant pack; a view of it with the tensor's dims and strides."""
    if isinstance(value, int) and not isinstance(value, bool):
        pointer = _arguments.pointer(value, where)
        if pointer % record.dtype.itemsize:
            raise ArgumentError(where, f"address {pointer:#x}", f"an address aligned to {record.dtype.itemsize} bytes")
        return record.at(pointer, handle.library.device_type)
    buffer = handle.buffer(value, where, output=record.output)
    if buffer.dtype != record.dtype:
        raise ArgumentTypeError(where, f"dtype {buffer.dtype.short}", record.dtype.short)
    if record.parameter:
        _arguments.parameter_dims(where, buffer.dims, buffer.strides, record.dims)
    elif buffer.dims != record.dims:
        raise ArgumentError(where, f"shape {buffer.dims}", f"shape {record.dims}")
    elif any(d > 1 and s != r for d, s, r in zip(buffer.dims, buffer.strides, record.strides, strict=True)):
        raise ArgumentError(where, f"strides {buffer.strides}", f"strides {record.strides}")
    return buffer._replace(dims=record.dims, strides=record.strides)
