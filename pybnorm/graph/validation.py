"""Validation of a graph: its nodes, uids and data types."""

from __future__ import annotations

from collections.abc import Sequence

from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.graph.attributes import _DATA_ROLES, TensorAttributes
from pybnorm.graph.rules import _MISSING, _TRAINED, _batchnorm_rules, _dtype_of, _Node, _pointwise_rules


def _validated(
    nodes: Sequence[_Node], io: DataType | None, intermediate: DataType | None, compute: DataType | None
) -> dict[int, DataType]:
    """Check nodes and infer their outputs; returns the data type that each tensor is stored in, by id."""
    if not nodes:
        raise ArgumentError("graph", "no nodes", "at least one")
    produced: set[int] = set()
    for node in nodes:
        _check_inputs(node, produced)
        (_pointwise_rules if node.kind == "pointwise" else _batchnorm_rules)(node)
        _check_compute(node, compute)
        produced |= {id(t) for t in node.outputs.values()}
    _check_uids(nodes)
    storage = _fill_data_types(nodes, io, intermediate)
    if not any(id(t) in produced and not t.get_is_virtual() for t in _tensors(nodes)):
        raise ArgumentError("graph", "virtual tensors only", "an output: set_output(True) on a tensor of a node")
    return storage


def _tensors(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """Tensors with memory, each once, in the order of nodes."""
    found = {id(t): t for node in nodes for _, t in node.tensors() if t is not None}
    return list(found.values())


def _peers(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """The tensors of peer_stats, each once; the memory of ranks is `pybnorm.sync`'s, and they take none."""
    given = [t for node in nodes if node.kind in _TRAINED for t in node.attributes.get_peer_stats()]
    return list({id(t): t for t in given}.values())


def _everything(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """Tensors with memory, those passed by value and those of peer_stats, each once."""
    by_value = {id(t): t for node in nodes for t in node.scalars.values() if t is not None}
    return [*_tensors(nodes), *by_value.values(), *_peers(nodes)]


def _with_uids(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """`_everything`, each with a uid."""
    everything = _everything(nodes)
    used = {t.get_uid() for t in everything if t.has_uid()}
    free = (uid for uid in range(1, 2**63) if uid not in used)
    for tensor in everything:
        if not tensor.has_uid():
            tensor.set_uid(next(free))
    return everything


def _check_inputs(node: _Node, produced: set[int]) -> None:
    for role, tensor in {**node.inputs, **node.scalars}.items():
        where = f"{role} of {node.name}"
        if tensor is None:
            raise ArgumentError(where, None, _MISSING.get(role, "a tensor"))
        if role in node.scalars:
            if not tensor.get_pass_by_value():
                raise ArgumentError(where, "a tensor without a value", "a scalar passed by value (set_value)")
        elif tensor.get_pass_by_value():
            raise ArgumentError(where, "a scalar passed by value", "a tensor with memory")
        elif tensor.get_is_virtual() and id(tensor) not in produced:
            raise ArgumentError(where, "a virtual tensor that no node before produces", "a tensor that exists")


def _check_compute(node: _Node, default: DataType | None) -> None:
    compute = node.attributes.get_compute_data_type() or default or DataType.FLOAT32
    if compute != DataType.FLOAT32:
        raise ArgumentTypeError(f"compute_data_type of {node.name}", compute.short, "f32")


def _check_uids(nodes: Sequence[_Node]) -> None:
    seen: dict[int, TensorAttributes] = {}
    for tensor in _everything(nodes):
        other = seen.setdefault(tensor.get_uid(), tensor) if tensor.has_uid() else tensor
        if other is not tensor:
            both = f"{other.get_name()!r} and {tensor.get_name()!r}"
            raise ArgumentError("uid", tensor.get_uid(), f"one tensor for each: {both} have it")


def _fill_data_types(nodes: Sequence[_Node], io: DataType | None, intermediate: DataType | None) -> dict[int, DataType]:
    """Infer missing data types; returns the data type that each tensor is stored in, by id."""
    parameters = {id(t) for n in nodes for role, t in n.tensors() if role not in _DATA_ROLES}
    data = {id(t) for node in nodes for t in node.data()}
    for tensor in _tensors(nodes):
        if tensor.get_data_type() is not None:
            continue
        if id(tensor) in parameters and id(tensor) not in data:
            tensor.set_data_type(DataType.FLOAT32)
            continue
        default = intermediate if tensor.get_is_virtual() else io
        if default is None:
            setter = "set_intermediate_data_type" if tensor.get_is_virtual() else "set_io_data_type"
            raise ArgumentError(f"data_type of {tensor.get_name()!r}", None, f"one, by set_data_type or {setter}")
        tensor.set_data_type(default)
    storage: dict[int, DataType] = {}
    for group in _connected(nodes):
        real = [t for t in group if not t.get_is_virtual()]
        first = (real or group)[0]
        dtype = _dtype_of(first)
        for tensor in real:
            if _dtype_of(tensor) != dtype:
                raise ArgumentTypeError(
                    f"data_type of {tensor.get_name()!r}",
                    _dtype_of(tensor).short,
                    f"{dtype.short}, as {first.get_name()!r} has, which nodes connect with it",
                )
        storage |= {id(t): dtype for t in group}
    for tensor in _tensors(nodes):
        storage.setdefault(id(tensor), _dtype_of(tensor))
    return storage


def _connected(nodes: Sequence[_Node]) -> list[list[TensorAttributes]]:
    """Groups of data tensors that nodes connect, directly or through others."""
    groups: list[dict[int, TensorAttributes]] = []
    for node in nodes:
        joined = {id(t): t for t in node.data()}
        touched = [group for group in groups if group.keys() & joined.keys()]
        groups = [group for group in groups if not group.keys() & joined.keys()]
        for group in touched:
            joined = group | joined
        groups.append(joined)
    return [list(group.values()) for group in groups]
