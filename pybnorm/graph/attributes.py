"""The attributes of tensors and nodes."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from pybnorm import _arguments, reference
from pybnorm._arrays import numpy_dtype
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError

_NAMES = {"float": DataType.FLOAT32, "half": DataType.FLOAT16, "double": DataType.FLOAT64}  # hipDNN's words
_SUPPORTED = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)
_DATA_ROLES = frozenset({"x", "y", "dy", "dx", "in_0", "in_1", "out_0"})
_Enum = TypeVar("_Enum", bound=enum.Enum)
_Self = TypeVar("_Self", bound="_Named")
_SelfNode = TypeVar("_SelfNode", bound="_Attributes")
_SelfStatistics = TypeVar("_SelfStatistics", bound="_StatisticsAttributes")


class PointwiseMode(enum.IntEnum):
    """Elementwise operations, with hipDNN's numbers."""

    ADD = 2
    """``in_0 + in_1``."""
    RELU_BWD = 33
    """``in_1 where in_0 > 0, else 0``: in_0 is x, in_1 is dy."""
    RELU_FWD = 34
    """``max(in_0, 0)``."""


class HeuristicMode(enum.IntEnum):
    """Modes of create_execution_plans. There is one plan, whatever the mode."""

    FALLBACK = 0
    A = 1
    B = 2


class _Named:
    """An object with a name; setters return the object, so that they chain."""

    def __init__(self) -> None:
        self._name = ""

    def set_name(self: _Self, name: str) -> _Self:
        """Set the name that errors and messages use."""
        self._name = _arguments.text(name, "name")
        return self

    def get_name(self) -> str:
        """The name; may be empty."""
        return self._name


class TensorAttributes(_Named):
    """The description of a tensor of a graph, without its memory.

    Methods set and read the attributes, as in hipDNN. Setters return the tensor, so that they chain.

    Parameters
    ----------
    value : float, optional
        Makes it a scalar that is passed by value (`set_value`).

    Examples
    --------
    >>> x = pybnorm.graph.Tensor.create((2, 3, 4, 4), "half").set_name("x").set_uid(1)
    >>> x.get_stride(), x.has_uid(), x.clear_uid().has_uid()
    ([48, 16, 4, 1], True, False)
    >>> epsilon = pybnorm.graph.Tensor(0.5)
    >>> epsilon.get_value(), epsilon.clear_value().get_pass_by_value()
    (0.5, False)
    """

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self._uid: int | None = None
        self._data_type: DataType | None = None
        self._dim: tuple[int, ...] = ()
        self._stride: tuple[int, ...] = ()
        self._virtual = False
        self._value: float | None = None
        if value is not None:
            self.set_value(value)

    @classmethod
    def create(cls, dims: Sequence[int], data_type: object) -> TensorAttributes:
        """A packed, channels-first tensor."""
        tensor = cls().set_dim(dims).set_data_type(data_type)
        return tensor.set_stride(_arguments.packed_strides(tuple(tensor.get_dim())))

    def set_uid(self, uid: int) -> TensorAttributes:
        """Set the tensor's key in the variant pack: a 64-bit integer, unique in the graph."""
        if issubclass(type(uid), bool) or not issubclass(type(uid), int):
            raise ArgumentTypeError("uid", uid, "an integer")
        if not -(2**63) <= uid < 2**63:
            raise ArgumentError("uid", uid, "an integer of 64 bits")
        self._uid = uid
        return self

    def get_uid(self) -> int:
        """The uid. Without `set_uid` build_operation_graph assigns one; before that it is 0."""
        return 0 if self._uid is None else self._uid

    def has_uid(self) -> bool:
        """Say whether the tensor has a uid."""
        return self._uid is not None

    def clear_uid(self) -> TensorAttributes:
        """Forget the uid."""
        self._uid = None
        return self

    def set_data_type(self, data_type: object) -> TensorAttributes:
        """Set float32, float16 or bfloat16; hipDNN's names "float" and "half" are taken too."""
        self._data_type = _data_type(data_type, "data_type")
        return self

    def get_data_type(self) -> DataType | None:
        """The data type; None until it is set, or inferred by validate."""
        return self._data_type

    def set_dim(self, dim: Sequence[int]) -> TensorAttributes:
        """Set the shape in the logical order N, C, spatial, whatever the layout."""
        self._dim = _arguments.dims(dim, "dim", low=1)
        return self

    def get_dim(self) -> list[int]:
        """The shape; empty if not set."""
        return list(self._dim)

    def set_stride(self, stride: Sequence[int]) -> TensorAttributes:
        """Set the strides in elements; validate checks them against the shape."""
        self._stride = tuple(_arguments.dims(stride, "stride", low=1))
        return self

    def get_stride(self) -> list[int]:
        """The strides; empty if not set."""
        return list(self._stride)

    def get_volume(self) -> int:
        """Number of elements."""
        return math.prod(self._dim)

    def set_is_virtual(self, is_virtual: bool) -> TensorAttributes:
        """Set whether the tensor exists only inside the graph."""
        self._virtual = _arguments.boolean(is_virtual, "is_virtual")
        return self

    def get_is_virtual(self) -> bool:
        """Say whether the tensor exists only inside the graph, the default of nodes' outputs."""
        return self._virtual

    def set_output(self, output: bool) -> TensorAttributes:
        """Set whether the caller provides the memory: the opposite of virtual."""
        return self.set_is_virtual(not _arguments.boolean(output, "output"))

    def set_value(self, value: float, data_type: object = DataType.FLOAT64) -> TensorAttributes:
        """Make the tensor a scalar, passed by value and rounded to the data type."""
        number = _arguments.scalar(value, "value")
        dtype = _any_data_type(data_type, "data_type")
        if dtype != DataType.FLOAT64:
            number = _arguments.scalar(reference.round_to(np.array([number]), numpy_dtype(dtype))[0], "value")
        self._value, self._data_type = number, dtype
        self._dim = self._stride = (1,)
        return self

    def get_value(self) -> float | None:
        """The scalar's value; None for a tensor with memory."""
        return self._value

    def clear_value(self) -> TensorAttributes:
        """Undo `set_value`: the tensor has memory again."""
        self._value = None
        return self

    def get_pass_by_value(self) -> bool:
        """Say whether the tensor is a scalar, passed by value."""
        return self._value is not None

    def get_is_pass_by_value(self) -> bool:
        """Do as `get_pass_by_value`; hipDNN's Python has this name."""
        return self.get_pass_by_value()

    def get_is_runtime_pass_by_value(self) -> bool:
        """False: a scalar's value is part of the graph, by `set_value`."""
        return False

    def set_is_pass_by_value(self, is_pass_by_value: bool) -> TensorAttributes:
        """False only: a scalar's value is part of the graph, by `set_value`; the variant pack has none."""
        if _arguments.boolean(is_pass_by_value, "is_pass_by_value"):
            allowed = "False; set_value makes a scalar, whose value the graph keeps"
            raise ArgumentError("is_pass_by_value", True, allowed)
        return self.clear_value()

    def __repr__(self) -> str:
        kind = "by value" if self._value is not None else "virtual" if self._virtual else "real"
        dtype = self._data_type.short if self._data_type is not None else "no data type"
        return f"<Tensor {self._name!r} uid={self._uid} {kind} {dtype} dim={self._dim} stride={self._stride}>"


Tensor = TensorAttributes


def _member(kind: type[_Enum], value: Any, argument: str, allowed: str) -> _Enum:
    """A member of an enumeration, from itself or its name."""
    found = kind.__members__.get(str.upper(value)) if issubclass(type(value), str) else value
    if type(found) is not kind:
        raise ArgumentError(argument, value, allowed)
    return found


def _any_data_type(value: object, argument: str) -> DataType:
    found = _NAMES.get(_arguments.text(value, argument).lower()) if issubclass(type(value), str) else None
    return _arguments.data_type(value, argument) if found is None else found


def _data_type(value: object, argument: str) -> DataType:
    found = _any_data_type(value, argument)
    if found not in _SUPPORTED:
        raise ArgumentTypeError(argument, found.short, "f32, f16 or bf16")
    return found


def _tensor(value: object, argument: str) -> TensorAttributes:
    _arguments.instance(value, TensorAttributes, argument, "a TensorAttributes")
    return value  # type: ignore[return-value]


def _scalar(value: object, argument: str) -> TensorAttributes:
    """A tensor passed by value, also from a plain number."""
    if issubclass(type(value), TensorAttributes):
        return value  # type: ignore[return-value]
    return TensorAttributes(_arguments.scalar(value, argument)).set_name(argument)


class _Attributes(_Named):
    """Attributes of all nodes. Without a name a node is called by its kind and number."""

    def __init__(self) -> None:
        super().__init__()
        self._compute: DataType | None = None
        self._slots: dict[str, Any] = {}

    def set_compute_data_type(self: _SelfNode, data_type: object) -> _SelfNode:
        """Set float32, the only one; default: the graph's."""
        self._compute = _data_type(data_type, "compute_data_type")
        return self

    def get_compute_data_type(self) -> DataType | None:
        """The data type of the arithmetic; None if the graph's is used."""
        return self._compute


def _slot(
    role: str,
    check: Callable[[Any, str], Any] = _tensor,
    setting: str = "Keep {0} for `get_{0}`, as hipDNN does; the graph's method decides what the node's is.",
    getting: str = "Return what `set_{0}` was given; None unless set.",
) -> tuple[Callable[[_SelfNode, Any], _SelfNode], Callable[[_Attributes], Any]]:
    """hipDNN's setter and getter of an attribute."""

    def setter(self: _SelfNode, value: Any) -> _SelfNode:
        self._slots = {**self._slots, role: check(value, role)}  # a copy of the node's attributes keeps the old one
        return self

    def getter(self: _Attributes) -> Any:
        return self._slots.get(role)

    setter.__name__, getter.__name__ = f"set_{role}", f"get_{role}"
    setter.__doc__, getter.__doc__ = setting.format(role), getting.format(role)
    return setter, getter


class _StatisticsAttributes(_Attributes):
    """Attributes of nodes that take statistics from x: scalars are tensors passed by value or plain numbers."""

    _peer_stats: tuple[TensorAttributes, ...] = ()
    set_epsilon, get_epsilon = _slot(
        "epsilon",
        _scalar,
        "Set what is added to the variance. Required; in backward without saved statistics only, unused with them.",
    )

    def set_peer_stats(self: _SelfStatistics, peer_stats: Sequence[TensorAttributes]) -> _SelfStatistics:
        """Give any tensors: statistics are those of all ranks of the graph's `set_communicator`, by `pybnorm.sync`."""
        given = _arguments.items(peer_stats, "peer_stats", "a sequence of TensorAttributes")
        self._peer_stats = tuple(_tensor(t, "peer_stats") for t in given)
        return self

    def get_peer_stats(self) -> list[TensorAttributes]:
        """The tensors that join the ranks; empty unless set."""
        return list(self._peer_stats)


class BatchnormAttributes(_StatisticsAttributes):
    """Attributes of `Graph.batchnorm`. Scalars are tensors passed by value or plain numbers.

    Examples
    --------
    >>> mean, variance = (pybnorm.graph.Tensor.create((1, 3, 1, 1), "float") for _ in range(2))
    >>> attributes = pybnorm.graph.BatchnormAttributes().set_epsilon(1e-5)
    >>> attributes.set_previous_running_stats(mean, variance, 0.1).get_momentum().get_value()
    0.1
    """

    _unbiased = True

    def set_previous_running_stats(
        self, mean: TensorAttributes, variance: TensorAttributes, momentum: TensorAttributes | float
    ) -> BatchnormAttributes:
        """Ask for next = (1 - momentum) * previous + momentum * batch; `set_unbiased` says which batch variance."""
        return self.set_prev_running_mean(mean).set_prev_running_variance(variance).set_momentum(momentum)

    def set_unbiased(self, unbiased: bool) -> BatchnormAttributes:
        """Say whether the running variance takes the unbiased variance, as hipDNN does; its README says the plain
        one."""
        self._unbiased = _arguments.boolean(unbiased, "unbiased")
        return self

    def get_unbiased(self) -> bool:
        """The flag; True unless set."""
        return self._unbiased

    set_prev_running_mean, get_prev_running_mean = _slot(
        "prev_running_mean", setting="Set the previous mean, together with the variance and the momentum."
    )
    set_prev_running_variance, get_prev_running_variance = _slot(
        "prev_running_variance", setting="Set the previous variance, together with the mean and the momentum."
    )
    set_momentum, get_momentum = _slot(
        "momentum", _scalar, "Set the factor, from 0 to 1, together with the previous mean and variance."
    )
    set_x, get_x = _slot("x")
    set_scale, get_scale = _slot("scale")
    set_bias, get_bias = _slot("bias")
    set_y, get_y = _slot("y")
    set_mean, get_mean = _slot("mean")
    set_inv_variance, get_inv_variance = _slot("inv_variance")
    set_next_running_mean, get_next_running_mean = _slot("next_running_mean")
    set_next_running_variance, get_next_running_variance = _slot("next_running_variance")


class _InferenceAttributes(_Attributes):
    set_x, get_x = _slot("x")
    set_mean, get_mean = _slot("mean")
    set_scale, get_scale = _slot("scale")
    set_bias, get_bias = _slot("bias")
    set_y, get_y = _slot("y")


class BatchnormInferenceAttributes(_InferenceAttributes):
    """Attributes of `Graph.batchnorm_inference`.

    Examples
    --------
    >>> pybnorm.graph.BatchnormInferenceAttributes().set_name("bn1").get_name()
    'bn1'
    """

    set_inv_variance, get_inv_variance = _slot("inv_variance")


class BatchnormInferenceAttributesVarianceExt(_InferenceAttributes):
    """Attributes of `Graph.batchnorm_inference_variance_ext`; the epsilon is an argument there.

    Examples
    --------
    >>> pybnorm.graph.BatchnormInferenceAttributesVarianceExt().set_name("bn1").get_name()
    'bn1'
    """

    set_variance, get_variance = _slot("variance")
    set_epsilon, get_epsilon = _slot("epsilon")


class BatchnormBackwardAttributes(_StatisticsAttributes):
    """Attributes of `Graph.batchnorm_backward`.

    Examples
    --------
    >>> mean, inverse = (pybnorm.graph.Tensor.create((1, 3, 1, 1), "float") for _ in range(2))
    >>> attributes = pybnorm.graph.BatchnormBackwardAttributes()
    >>> attributes.set_saved_mean_and_inv_variance(mean, inverse).get_mean() is mean
    True
    """

    def set_saved_mean_and_inv_variance(
        self, mean: TensorAttributes, inv_variance: TensorAttributes
    ) -> BatchnormBackwardAttributes:
        """Set the statistics that batchnorm saved; inv_variance is 1 / sqrt(biased variance + epsilon)."""
        return self.set_mean(mean).set_inv_variance(inv_variance)

    set_mean, get_mean = _slot("mean", setting="Set the saved mean, together with the inverse standard deviation.")
    set_inv_variance, get_inv_variance = _slot(
        "inv_variance", setting="Set the saved inverse standard deviation, together with the mean."
    )
    set_dy, get_dy = _slot("dy")
    set_x, get_x = _slot("x")
    set_scale, get_scale = _slot("scale")
    set_dx, get_dx = _slot("dx")
    set_dscale, get_dscale = _slot("dscale")
    set_dbias, get_dbias = _slot("dbias")


class PointwiseAttributes(_Attributes):
    """Attributes of `Graph.pointwise`.

    Examples
    --------
    >>> pybnorm.graph.PointwiseAttributes().set_mode("relu_fwd").get_mode().name
    'RELU_FWD'
    """

    _mode: PointwiseMode | None = None

    def set_mode(self, mode: PointwiseMode | str) -> PointwiseAttributes:
        """Set the operation; required."""
        allowed = "one of " + ", ".join(f"PointwiseMode.{m.name}" for m in PointwiseMode)
        self._mode = _member(PointwiseMode, mode, "mode", allowed)
        return self

    def get_mode(self) -> PointwiseMode | None:
        """The operation; None unless set."""
        return self._mode

    set_relu_lower_clip, get_relu_lower_clip = _slot(
        "relu_lower_clip",
        _arguments.scalar,
        "Set where the slope below begins, 0 unless set: y is the clip plus slope times the distance from it.",
    )
    set_relu_upper_clip, get_relu_upper_clip = _slot(
        "relu_upper_clip", _arguments.scalar, "Set the largest y; infinity unless set."
    )
    set_relu_lower_clip_slope, get_relu_lower_clip_slope = _slot(
        "relu_lower_clip_slope", _arguments.scalar, "Set the slope below the lower clip; 0 unless set."
    )
    set_input_0, get_input_0 = _slot("input_0")
    set_input_1, get_input_1 = _slot("input_1")
    set_input_2, get_input_2 = _slot("input_2")
    set_output_0, get_output_0 = _slot("output_0")
