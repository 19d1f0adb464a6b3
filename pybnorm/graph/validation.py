"""Nodes, the rules for their tensors, uids and data types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.graph.attributes import (
    _DATA_ROLES,
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    PointwiseAttributes,
    PointwiseMode,
    TensorAttributes,
)

_CLIPS = {"relu_lower_clip": 0.0, "relu_upper_clip": math.inf, "relu_lower_clip_slope": 0.0}
_TRAINED = ("batchnorm", "batchnorm_backward")
_TRIO = "a tensor: previous mean, previous variance and momentum go together"
_PAIR = "a tensor: mean and inverse standard deviation go together"
_MISSING = {
    "prev_running_mean": _TRIO,
    "prev_running_variance": _TRIO,
    "momentum": _TRIO.replace("tensor", "scalar"),
    "mean": _PAIR,
    "inv_variance": _PAIR,
    "epsilon": "a scalar, by set_epsilon",
}


class _Form:
    """The tensors of a kind of node by their roles, separated by spaces; those `together` are all given or none."""

    def __init__(self, attributes: type[Any], inputs: str, outputs: str, scalars: str = "", together: str = "") -> None:
        self.attributes = attributes
        self.inputs, self.outputs, self.scalars = inputs.split(), outputs.split(), scalars.split()
        self.together = together.split()


_FORMS = {
    "batchnorm": _Form(
        BatchnormAttributes,
        "x scale bias prev_running_mean prev_running_variance",
        "y mean inv_variance next_running_mean next_running_variance",
        "epsilon momentum",
        "prev_running_mean prev_running_variance momentum",
    ),
    "batchnorm_backward": _Form(
        BatchnormBackwardAttributes,
        "dy x scale mean inv_variance",
        "dx dscale dbias",
        "epsilon",  # hipDNN has none
        "mean inv_variance",
    ),
    "batchnorm_inference": _Form(BatchnormInferenceAttributes, "x mean inv_variance scale bias", "y"),
    "batchnorm_inference_variance_ext": _Form(
        BatchnormInferenceAttributesVarianceExt, "x mean variance scale bias", "y", "epsilon"
    ),
    "pointwise": _Form(PointwiseAttributes, "in_0 in_1", "out_0", together="in_1"),
}


class _Node(NamedTuple):
    """One operation as the caller described it."""

    kind: str
    attributes: Any
    inputs: dict[str, TensorAttributes]
    outputs: dict[str, TensorAttributes]
    scalars: dict[str, TensorAttributes]

    @classmethod
    def of(cls, kind: str, attributes: Any, given: dict[str, Any], outputs: dict[str, TensorAttributes]) -> _Node:
        """A node of what is given, where None is reported by validate.

        What goes together is left out where nothing of it is given, and backward's epsilon where statistics are.
        """
        form = _FORMS[kind]
        absent = set() if any(given[role] is not None for role in form.together) else set(form.together)
        if kind == "batchnorm_backward" and not absent:
            absent = {"epsilon"}
        inputs, scalars = ({r: given[r] for r in roles if r not in absent} for roles in (form.inputs, form.scalars))
        return cls(kind, attributes, inputs, outputs, scalars)

    @property
    def name(self) -> str:
        return str(self.attributes.get_name())

    @property
    def mode(self) -> PointwiseMode | None:
        """The elementwise operation; None for batch norm."""
        return self.attributes.get_mode() if self.kind == "pointwise" else None

    @property
    def clips(self) -> tuple[float, float, float]:
        """Lower and upper clip and the slope below the lower one; 0, infinity and 0 unless set."""
        lower, upper, slope = (self.attributes._slots.get(name, unset) for name, unset in _CLIPS.items())
        return lower, upper, slope

    def tensors(self) -> Iterator[tuple[str, TensorAttributes]]:
        """Roles and tensors with memory."""
        yield from self.inputs.items()
        yield from self.outputs.items()

    def data(self) -> Iterator[TensorAttributes]:
        """Tensors of x's kind."""
        for role, tensor in self.tensors():
            if role in _DATA_ROLES:
                yield tensor


class _Record:
    """A tensor as build_operation_graph saw it. Later changes of its attributes do not reach the plan."""

    def __init__(self, tensor: TensorAttributes, storage: DataType, parameter: bool, output: bool) -> None:
        self.uid = tensor.get_uid()
        self.name = tensor.get_name()
        self.dims = tuple(tensor.get_dim())
        self.strides = tuple(tensor.get_stride())
        self.dtype = storage
        self.virtual = tensor.get_is_virtual()
        self.parameter = parameter
        self.output = output

    def at(self, pointer: int, device_type: int) -> Buffer:
        """The tensor at an address, a parameter as a flat vector."""
        dims, strides = ((math.prod(self.dims),), (1,)) if self.parameter else (self.dims, self.strides)
        return Buffer(pointer, dims, strides, self.dtype, device_type, -1, True, self)


def _dtype_of(tensor: TensorAttributes) -> DataType:
    dtype = tensor.get_data_type()
    assert dtype is not None
    return dtype


def _scalar_of(node: _Node, role: str) -> float:
    value = node.scalars[role].get_value()
    return _arguments.epsilon(value) if role == "epsilon" else _arguments.factor(value, role)


def _shape_rules(node: _Node) -> tuple[int, ...]:
    """Check dims and strides, and infer what outputs and parameters do not set; returns the dims of the data."""
    base = "x" if "x" in node.inputs else "in_0"
    dims, steps = tuple(node.inputs[base].get_dim()), node.inputs[base].get_stride()
    if not 2 <= len(dims) <= 8:
        raise ArgumentError(f"{base} of {node.name}", f"dim {dims}", "rank 2 to 8")
    for role, tensor in node.tensors():
        where, is_data = f"{role} of {node.name}", role in _DATA_ROLES
        if role in node.outputs and not tensor.get_dim():
            tensor.set_dim(dims if is_data else [size if axis == 1 else 1 for axis, size in enumerate(dims)])
        own = tuple(tensor.get_dim())
        if is_data and own != dims:
            raise ArgumentError(where, f"dim {own}", f"{dims}, as {base}: nothing is broadcast")
        if not is_data and (len(own) < 2 or own[1] != dims[1] or math.prod(own) != dims[1]):
            raise ArgumentError(where, f"dim {own}", f"(1, {dims[1]}, 1...), one element for each channel")
        if role in node.inputs and is_data and not tensor.get_stride():
            raise ArgumentError(where, "no strides", "strides, by set_stride")
        if not tensor.get_stride():
            tensor.set_stride(steps if is_data else [1 if axis == 1 else dims[1] for axis in range(len(own))])
        strides = _arguments.strides(tensor.get_stride(), own, f"stride of {where}")
        if not is_data and dims[1] > 1 and strides[1] != 1:
            raise ArgumentError(where, f"stride {strides}", "1 between channels")
    return dims


def _batchnorm_rules(node: _Node) -> None:
    """Training, inference and backward."""
    dims = _shape_rules(node)
    if node.kind in _TRAINED:
        if math.prod(dims) == dims[1]:
            raise ArgumentError(f"x of {node.name}", f"dim {dims}", "more than one element for each channel")
        if node.attributes.get_peer_stats() and "dy" in node.inputs and "mean" not in node.inputs:
            raise ArgumentError(f"peer_stats of {node.name}", "tensors", "none without saved statistics")
    for role in node.scalars:
        _scalar_of(node, role)


def _pointwise_rules(node: _Node) -> None:
    mode = node.mode
    if mode is None:
        raise ArgumentError(f"mode of {node.name}", None, "a PointwiseMode, by set_mode")
    wanted = 1 if mode == PointwiseMode.RELU_FWD else 2
    if len(node.inputs) != wanted:
        raise ArgumentError(f"inputs of {node.name}", f"{len(node.inputs)} for {mode.name}", str(wanted))
    if mode == PointwiseMode.ADD and (clips := [name for name in node.attributes._slots if name in _CLIPS]):
        raise ArgumentError(f"{clips[0]} of {node.name}", mode.name, "a ReLU, or none")
    lower, upper, _ = node.clips
    if not lower < upper:
        raise ArgumentError(f"relu_upper_clip of {node.name}", upper, f"above the lower clip, {lower}")
    _shape_rules(node)


# ---------------------------------------------------------------- the graph


def _validated(
    nodes: Sequence[_Node], io: DataType | None, intermediate: DataType | None, compute: DataType | None
) -> dict[TensorAttributes, DataType]:
    """Check nodes and infer their outputs; returns the data type that each tensor is stored in."""
    if not nodes:
        raise ArgumentError("graph", "no nodes", "at least one")
    produced: set[TensorAttributes] = set()
    for node in nodes:
        _check_inputs(node, produced)
        (_pointwise_rules if node.kind == "pointwise" else _batchnorm_rules)(node)
        kind = node.attributes.get_compute_data_type() or compute or DataType.FLOAT32
        if kind != DataType.FLOAT32:
            raise ArgumentTypeError(f"compute_data_type of {node.name}", kind.short, "f32")
        produced |= set(node.outputs.values())
    _check_uids(nodes)
    storage = _fill_data_types(nodes, io, intermediate)
    if all(tensor.get_is_virtual() for tensor in produced):
        raise ArgumentError("graph", "virtual tensors only", "an output: set_output(True) on a tensor of a node")
    return storage


def _tensors(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """Tensors with memory, each once, in the order of nodes."""
    return list(dict.fromkeys(t for node in nodes for _, t in node.tensors() if t is not None))


def _peers(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """The tensors of peer_stats, each once; the memory of ranks is `pybnorm.sync`'s, and they take none."""
    return list(dict.fromkeys(t for n in nodes if n.kind in _TRAINED for t in n.attributes.get_peer_stats()))


def _everything(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """Tensors with memory, those passed by value and those of peer_stats, each once."""
    by_value = dict.fromkeys(t for node in nodes for t in node.scalars.values() if t is not None)
    return [*_tensors(nodes), *by_value, *_peers(nodes)]


def _with_uids(nodes: Sequence[_Node]) -> list[TensorAttributes]:
    """`_everything`, each with a uid."""
    everything = _everything(nodes)
    used = {t.get_uid() for t in everything if t.has_uid()}
    free = (uid for uid in range(1, 2**63) if uid not in used)
    for tensor in everything:
        if not tensor.has_uid():
            tensor.set_uid(next(free))
    return everything


def _check_inputs(node: _Node, produced: set[TensorAttributes]) -> None:
    for role, tensor in {**node.inputs, **node.scalars}.items():
        where = f"{role} of {node.name}"
        if tensor is None:
            raise ArgumentError(where, None, _MISSING.get(role, "a tensor"))
        if role in node.scalars:
            if not tensor.get_pass_by_value():
                raise ArgumentError(where, "a tensor without a value", "a scalar passed by value (set_value)")
        elif tensor.get_pass_by_value():
            raise ArgumentError(where, "a scalar passed by value", "a tensor with memory")
        elif tensor.get_is_virtual() and tensor not in produced:
            raise ArgumentError(where, "a virtual tensor that no node before produces", "a tensor that exists")


def _check_uids(nodes: Sequence[_Node]) -> None:
    seen: dict[int, TensorAttributes] = {}
    for tensor in _everything(nodes):
        other = seen.setdefault(tensor.get_uid(), tensor) if tensor.has_uid() else tensor
        if other is not tensor:
            both = f"{other.get_name()!r} and {tensor.get_name()!r}"
            raise ArgumentError("uid", tensor.get_uid(), f"one tensor for each: {both} have it")


def _fill_data_types(
    nodes: Sequence[_Node], io: DataType | None, intermediate: DataType | None
) -> dict[TensorAttributes, DataType]:
    """Infer missing data types; returns the data type that each tensor is stored in."""
    data = {t for node in nodes for t in node.data()}
    for tensor in _tensors(nodes):
        if tensor.get_data_type() is not None:
            continue
        default = DataType.FLOAT32 if tensor not in data else intermediate if tensor.get_is_virtual() else io
        if default is None:
            setter = "set_intermediate_data_type" if tensor.get_is_virtual() else "set_io_data_type"
            raise ArgumentError(f"data_type of {tensor.get_name()!r}", None, f"one, by set_data_type or {setter}")
        tensor.set_data_type(default)
    storage = {tensor: _dtype_of(tensor) for tensor in _tensors(nodes)}
    for group in _connected(nodes):
        real = [t for t in group if not t.get_is_virtual()]
        first = (real or group)[0]
        dtype = _dtype_of(first)
        for tensor in real:
            if _dtype_of(tensor) != dtype:
                allowed = f"{dtype.short}, as {first.get_name()!r} has, which nodes connect with it"
                raise ArgumentTypeError(f"data_type of {tensor.get_name()!r}", _dtype_of(tensor).short, allowed)
        storage |= dict.fromkeys(group, dtype)
    return storage


def _connected(nodes: Sequence[_Node]) -> list[list[TensorAttributes]]:
    """Groups of data tensors that nodes connect, directly or through others."""
    groups: list[list[TensorAttributes]] = []
    for node in nodes:
        own = list(node.data())
        touched = [group for group in groups if not set(own).isdisjoint(group)]
        groups = [group for group in groups if group not in touched]
        groups.append(list(dict.fromkeys(t for group in [*reversed(touched), own] for t in group)))
    return groups
