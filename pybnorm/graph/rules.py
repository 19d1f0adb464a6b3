"""Nodes, and the rules for their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.graph.attributes import _DATA_ROLES, PointwiseMode, TensorAttributes

_CLIPS = {"relu_lower_clip": 0.0, "relu_upper_clip": math.inf, "relu_lower_clip_slope": 0.0}


class _Node(NamedTuple):
    """One operation as the caller described it."""

    kind: str
    attributes: Any
    inputs: dict[str, TensorAttributes]
    outputs: dict[str, TensorAttributes]
    scalars: dict[str, TensorAttributes]

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
        self.offset: int | None = None  # in the workspace, if the tensor is virtual and used

    @property
    def nbytes(self) -> int:
        return _arguments.span(self.dims, self.strides) * self.dtype.itemsize

    def at(self, pointer: int, device_type: int) -> Buffer:
        """The tensor at an address, a parameter as a flat vector."""
        dims, strides = ((math.prod(self.dims),), (1,)) if self.parameter else (self.dims, self.strides)
        return Buffer(pointer, dims, strides, self.dtype, device_type, -1, True, self)


def _dtype_of(tensor: TensorAttributes) -> DataType:
    dtype = tensor.get_data_type()
    assert dtype is not None
    return dtype


_TRAINED = ("batchnorm", "batchnorm_backward")
_MISSING = {
    "prev_running_mean": "a tensor: previous mean, previous variance and momentum go together",
    "prev_running_variance": "a tensor: previous mean, previous variance and momentum go together",
    "momentum": "a scalar: previous mean, previous variance and momentum go together",
    "mean": "a tensor: mean and inverse standard deviation go together",
    "inv_variance": "a tensor: mean and inverse standard deviation go together",
    "epsilon": "a scalar, by set_epsilon",
}


def _data_rules(node: _Node, role: str, low: int = 2) -> tuple[int, ...]:
    """Check the dims and strides of an input; returns the dims."""
    tensor, where = node.inputs[role], f"{role} of {node.name}"
    dims = tuple(tensor.get_dim())
    if not low <= len(dims) <= 8:
        raise ArgumentError(where, f"dim {dims}", f"rank {low} to 8")
    if not tensor.get_stride():
        raise ArgumentError(where, "no strides", "strides, by set_stride")
    _arguments.strides(tensor.get_stride(), dims, f"stride of {where}")
    return dims


def _same_dims(node: _Node, role: str, dims: tuple[int, ...], other: str) -> None:
    tensor = {**node.inputs, **node.outputs}[role]
    if tuple(tensor.get_dim()) != dims:
        raise ArgumentError(f"{role} of {node.name}", f"dim {tuple(tensor.get_dim())}", f"{dims}, as {other}")


def _inferred(node: _Node, role: str, dims: tuple[int, ...], strides: Sequence[int], other: str) -> None:
    """Infer what an output does not set; what it sets must agree with `other`."""
    tensor = node.outputs[role]
    if not tensor.get_dim():
        tensor.set_dim(dims)
    _same_dims(node, role, dims, other)
    if not tensor.get_stride():
        tensor.set_stride(strides)
    _arguments.strides(tensor.get_stride(), dims, f"stride of {role} of {node.name}")


def _parameter_rules(node: _Node, channels: int, rank: int) -> None:
    """Check parameters and statistics, which have one element for each channel."""
    for role, tensor in node.tensors():
        if role in _DATA_ROLES:
            continue
        where = f"{role} of {node.name}"
        if role in node.outputs and not tensor.get_dim():
            tensor.set_dim([channels if axis == 1 else 1 for axis in range(rank)])
        dims = tuple(tensor.get_dim())
        if len(dims) < 2 or dims[1] != channels or any(d != 1 for d in (dims[0], *dims[2:])):
            raise ArgumentError(where, f"dim {dims}", f"(1, {channels}, 1...), one element for each channel")
        if not tensor.get_stride():
            tensor.set_stride([1 if axis == 1 else channels for axis in range(len(dims))])
        strides = _arguments.strides(tensor.get_stride(), dims, f"stride of {where}")
        if channels > 1 and strides[1] != 1:
            raise ArgumentError(where, f"stride {strides}", "1 between channels")


def _scalar_of(node: _Node, role: str) -> float:
    value = node.scalars[role].get_value()
    return _arguments.epsilon(value) if role == "epsilon" else _arguments.factor(value, role)


def _batchnorm_rules(node: _Node) -> None:
    """Training, inference and backward."""
    dims = _data_rules(node, "x")
    if "dy" in node.inputs:
        _data_rules(node, "dy")
        _same_dims(node, "dy", dims, "x")
    _inferred(node, "dx" if "dx" in node.outputs else "y", dims, node.inputs["x"].get_stride(), "x")
    _parameter_rules(node, dims[1], len(dims))
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
    dims = _data_rules(node, "in_0")
    for role in list(node.inputs)[1:]:
        _data_rules(node, role)
        _same_dims(node, role, dims, "in_0; nothing is broadcast")
    _inferred(node, "out_0", dims, node.inputs["in_0"].get_stride(), "in_0")
