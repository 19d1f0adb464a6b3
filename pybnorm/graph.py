"""Graphs of batch norm in the shape of hipDNN and the cuDNN frontend, on every backend.

Tensors and nodes are described first; then the graph goes through hipDNN's stages and is executed::

    graph = Graph().set_io_data_type("bfloat16").set_intermediate_data_type("float")
    x = graph.tensor(name="x", dim=(16, 16, 16, 16), stride=(4096, 256, 16, 1))
    ...
    y, mean, inv_variance, _, _ = graph.batchnorm(x, scale, bias, BatchnormAttributes().set_epsilon(1e-5))
    y.set_output(True)
    graph.validate()
    graph.build_operation_graph(handle)
    graph.create_execution_plans()
    graph.check_support()
    graph.build_plans()
    workspace = numpy.empty(graph.get_workspace_size(), numpy.uint8)
    graph.execute(handle, {x.get_uid(): x_array, ...}, workspace)

`Graph.build` does the five stages at once. Names are those of hipDNN's frontend (``hipdnn_frontend::graph``); failures
are exceptions instead of error objects. Nodes run one after the other through `pybnorm.operations`, on the handle's
stream, without synchronisation and without a branch on the vendor.

Where hipDNN is silent or wrong, or this module differs:

* Running variance takes the unbiased batch variance, as hipDNN's reference does; its README says plain variance.
  next may be the same memory as prev: it is updated in place then. Otherwise prev is copied to next first.
* Parameters and statistics whose data type is not set are float32. hipDNN would give them the io data type, which its
  MIOpen provider refuses.
* Training with running statistics and inference from an inverse deviation run on every backend.
* batchnorm_backward without saved statistics takes them from x with an epsilon that must be given
  (`BatchnormBackwardAttributes.set_epsilon`); hipDNN has no such attribute and a constant of 1e-5.
* ``RELU_BWD``: hipDNN's reference and samples take (x, dy), its porting guide and cuDNN (dy, x). `Graph.pointwise`
  takes (x, dy); `Graph.relu_backward` takes cuDNN's names.
* execute takes a workspace with its size, an array or (address, bytes), and checks it.
* One data type for all data tensors that nodes connect, float32, float16 or bfloat16; float32 accumulation.

Intermediate data type. A virtual tensor lies in the workspace in the io data type, also where its own is float32:
only where that makes no difference, and create_execution_plans refuses everything else. It makes none before a ReLU
(rounding and ReLU commute), for the mask of a ReLU gradient (the sign survives rounding, except that a float16 value
below 2**-25 becomes 0), and behind a ReLU of io data. Batch norm with an addition behind it is one call that adds
before it rounds. Setting the virtual tensor's data type to the io data type asks for the rounding and is always
served.

``PYBNORM_LOG_LEVEL=off|info|warn|error`` sends the messages of the loggers ``pybnorm.*`` of that level to standard
error, as ``HIPDNN_LOG_LEVEL`` does; unset, they go wherever the application's logging sends them.
"""

from __future__ import annotations

import copy
import enum
import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pybnorm import _arguments, operations
from pybnorm._arrays import Buffer
from pybnorm._core import Handle, capability
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError, PybnormError, UnsupportedError, WorkspaceError

__all__ = [
    "BatchnormAttributes",
    "BatchnormBackwardAttributes",
    "BatchnormInferenceAttributes",
    "BatchnormInferenceAttributesVarianceExt",
    "Graph",
    "HeuristicMode",
    "PointwiseAttributes",
    "PointwiseMode",
    "Tensor",
    "TensorAttributes",
]

ALIGNMENT = 64  # of everything in the workspace

_log = logging.getLogger("pybnorm.graph")
logging.getLogger("pybnorm").addHandler(logging.NullHandler())  # silent unless somebody asks
_LEVELS = {"off": logging.CRITICAL + 1, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_NAMES = {"float": DataType.FLOAT32, "half": DataType.FLOAT16, "double": DataType.FLOAT64}  # hipDNN's words
_SUPPORTED = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)
_DATA_ROLES = frozenset({"x", "y", "dy", "dx", "in_0", "in_1", "out_0"})

_Self = TypeVar("_Self", bound="_Attributes")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class PointwiseMode(enum.IntEnum):
    """Elementwise operations, with hipDNN's numbers."""

    ADD = 2
    """``in_0 + in_1``."""
    RELU_BWD = 33
    """``in_1 where in_0 > 0, else 0``: in_0 is x, in_1 is dy."""
    RELU_FWD = 34
    """``max(in_0, 0)``."""


class HeuristicMode(enum.IntEnum):
    """What create_execution_plans is given; there is one plan whatever the mode."""

    FALLBACK = 0
    A = 1
    B = 2


# ---------------------------------------------------------------- tensors


class TensorAttributes:
    """A tensor of a graph: what it looks like, not where it is.

    Attributes are set and read by methods, as in hipDNN; setters return the tensor, so that they chain.

    Parameters
    ----------
    value : float, optional
        Makes it a scalar that is passed by value (`set_value`).
    """

    def __init__(self, value: float | None = None) -> None:
        self._uid: int | None = None
        self._name = ""
        self._data_type: DataType | None = None
        self._dim: tuple[int, ...] = ()
        self._stride: tuple[int, ...] = ()
        self._virtual = False
        self._value: float | None = None
        if value is not None:
            self.set_value(value)

    @staticmethod
    def create(dims: Sequence[int], data_type: object) -> TensorAttributes:
        """A packed, channels-first tensor."""
        tensor = TensorAttributes().set_dim(dims).set_data_type(data_type)
        return tensor.set_stride(_arguments.packed_strides(tuple(tensor.get_dim())))

    def set_uid(self, uid: int) -> TensorAttributes:
        """The key of this tensor in the variant pack: any 64-bit integer that no other tensor of the graph has."""
        if issubclass(type(uid), bool) or not issubclass(type(uid), int):
            raise ArgumentTypeError("uid", uid, "an integer")
        if not -(2**63) <= uid < 2**63:
            raise ArgumentError("uid", uid, "an integer of 64 bits")
        self._uid = uid
        return self

    def get_uid(self) -> int:
        """The uid; without `set_uid` build_operation_graph gives one, and it is 0 until then."""
        return 0 if self._uid is None else self._uid

    def has_uid(self) -> bool:
        """Whether it has been set or given."""
        return self._uid is not None

    def clear_uid(self) -> TensorAttributes:
        """Forget the uid."""
        self._uid = None
        return self

    def set_name(self, name: str) -> TensorAttributes:
        """The name that errors and messages use."""
        if not issubclass(type(name), str):
            raise ArgumentTypeError("name", name, "a string")
        self._name = name
        return self

    def get_name(self) -> str:
        """The name; may be empty."""
        return self._name

    def set_data_type(self, data_type: object) -> TensorAttributes:
        """float32, float16 or bfloat16; also by hipDNN's names, "float" and "half"."""
        self._data_type = _data_type(data_type, "data_type")
        return self

    def get_data_type(self) -> DataType | None:
        """The data type; None if it has not been set, nor filled in by validate."""
        return self._data_type

    def set_dim(self, dim: Sequence[int]) -> TensorAttributes:
        """Shape in the logical order N, C, spatial, whatever the layout."""
        self._dim = _arguments.dims(dim, "dim", low=1)
        return self

    def get_dim(self) -> list[int]:
        """The shape; empty if not set."""
        return list(self._dim)

    def set_stride(self, stride: Sequence[int]) -> TensorAttributes:
        """Strides in elements; they are checked against the shape by validate."""
        self._stride = tuple(_arguments.dims(stride, "stride", low=1))
        return self

    def get_stride(self) -> list[int]:
        """The strides; empty if not set."""
        return list(self._stride)

    def get_volume(self) -> int:
        """Number of elements."""
        return math.prod(self._dim)

    def set_is_virtual(self, is_virtual: bool) -> TensorAttributes:
        """Whether it exists inside the graph only."""
        self._virtual = _arguments.boolean(is_virtual, "is_virtual")
        return self

    def get_is_virtual(self) -> bool:
        """Whether it exists inside the graph only, as outputs of nodes do unless `set_output` says otherwise."""
        return self._virtual

    def set_output(self, output: bool) -> TensorAttributes:
        """Whether the caller gives memory for it: the opposite of virtual."""
        return self.set_is_virtual(not _arguments.boolean(output, "output"))

    def set_value(self, value: float) -> TensorAttributes:
        """Make it a scalar of one element that is passed by value."""
        self._value = _arguments.scalar(value, "value")
        self._data_type = DataType.FLOAT64
        self._dim = self._stride = (1,)
        return self

    def get_value(self) -> float | None:
        """The scalar's value; None for a tensor with memory."""
        return self._value

    def clear_value(self) -> TensorAttributes:
        """Make it a tensor with memory again."""
        self._value = None
        return self

    def get_pass_by_value(self) -> bool:
        """Whether it is a scalar that is passed by value."""
        return self._value is not None

    def __repr__(self) -> str:
        kind = "by value" if self._value is not None else "virtual" if self._virtual else "real"
        dtype = self._data_type.short if self._data_type is not None else "no data type"
        return f"<Tensor {self._name!r} uid={self._uid} {kind} {dtype} dim={self._dim} stride={self._stride}>"


Tensor = TensorAttributes


def _data_type(value: object, argument: str) -> DataType:
    found = _NAMES.get(_arguments.text(value, argument).lower()) if issubclass(type(value), str) else None
    found = _arguments.data_type(value, argument) if found is None else found
    if found not in _SUPPORTED:
        raise ArgumentTypeError(argument, found.short, "f32, f16 or bf16")
    return found


def _tensor(value: object, argument: str) -> TensorAttributes:
    if not issubclass(type(value), TensorAttributes):
        raise ArgumentTypeError(argument, value, "a TensorAttributes")
    return value  # type: ignore[return-value]


def _scalar(value: object, argument: str) -> TensorAttributes:
    """A tensor passed by value, also from a plain number."""
    if issubclass(type(value), TensorAttributes):
        return value  # type: ignore[return-value]
    return TensorAttributes(_arguments.scalar(value, argument)).set_name(argument)


# ---------------------------------------------------------------- attributes of nodes


class _Attributes:
    """What all nodes have."""

    def __init__(self) -> None:
        self._name = ""
        self._compute: DataType | None = None

    def set_name(self: _Self, name: str) -> _Self:
        """The node's name; default: kind and number."""
        if not issubclass(type(name), str):
            raise ArgumentTypeError("name", name, "a string")
        self._name = name
        return self

    def get_name(self) -> str:
        """The node's name; may be empty."""
        return self._name

    def set_compute_data_type(self: _Self, data_type: object) -> _Self:
        """float32, the only one; default: the graph's."""
        self._compute = _data_type(data_type, "compute_data_type")
        return self

    def get_compute_data_type(self) -> DataType | None:
        """None where the graph's holds."""
        return self._compute


class BatchnormAttributes(_Attributes):
    """Attributes of `Graph.batchnorm`. Scalars are tensors passed by value or plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._epsilon: TensorAttributes | None = None
        self._momentum: TensorAttributes | None = None
        self._prev_running_mean: TensorAttributes | None = None
        self._prev_running_variance: TensorAttributes | None = None
        self._peer_stats: tuple[TensorAttributes, ...] = ()

    def set_epsilon(self, epsilon: TensorAttributes | float) -> BatchnormAttributes:
        """Added to the variance; required."""
        self._epsilon = _scalar(epsilon, "epsilon")
        return self

    def get_epsilon(self) -> TensorAttributes | None:
        """The epsilon's tensor."""
        return self._epsilon

    def set_previous_running_stats(
        self, mean: TensorAttributes, variance: TensorAttributes, momentum: TensorAttributes | float
    ) -> BatchnormAttributes:
        """Ask for next = (1 - momentum) * previous + momentum * batch, with the unbiased batch variance."""
        return self.set_prev_running_mean(mean).set_prev_running_variance(variance).set_momentum(momentum)

    def set_prev_running_mean(self, mean: TensorAttributes) -> BatchnormAttributes:
        """The first of the three that go together."""
        self._prev_running_mean = _tensor(mean, "prev_running_mean")
        return self

    def set_prev_running_variance(self, variance: TensorAttributes) -> BatchnormAttributes:
        """The second of the three that go together."""
        self._prev_running_variance = _tensor(variance, "prev_running_variance")
        return self

    def set_momentum(self, momentum: TensorAttributes | float) -> BatchnormAttributes:
        """The third of the three that go together; from 0 to 1."""
        self._momentum = _scalar(momentum, "momentum")
        return self

    def get_prev_running_mean(self) -> TensorAttributes | None:
        """None without running statistics."""
        return self._prev_running_mean

    def get_prev_running_variance(self) -> TensorAttributes | None:
        """None without running statistics."""
        return self._prev_running_variance

    def get_momentum(self) -> TensorAttributes | None:
        """None without running statistics."""
        return self._momentum

    def set_peer_stats(self, peer_stats: Sequence[TensorAttributes]) -> BatchnormAttributes:
        """Several devices in one graph: refused by validate; `pybnorm.sync` joins devices over a communicator."""
        given = _arguments.items(peer_stats, "peer_stats", "a sequence of TensorAttributes")
        self._peer_stats = tuple(_tensor(t, "peer_stats") for t in given)
        return self

    def get_peer_stats(self) -> list[TensorAttributes]:
        """Empty unless set."""
        return list(self._peer_stats)


class BatchnormInferenceAttributes(_Attributes):
    """Attributes of `Graph.batchnorm_inference`."""


class BatchnormInferenceAttributesVarianceExt(_Attributes):
    """Attributes of `Graph.batchnorm_inference_variance_ext`; the epsilon is an argument there."""


class BatchnormBackwardAttributes(_Attributes):
    """Attributes of `Graph.batchnorm_backward`."""

    def __init__(self) -> None:
        super().__init__()
        self._mean: TensorAttributes | None = None
        self._inv_variance: TensorAttributes | None = None
        self._epsilon: TensorAttributes | None = None
        self._peer_stats: tuple[TensorAttributes, ...] = ()

    def set_saved_mean_and_inv_variance(
        self, mean: TensorAttributes, inv_variance: TensorAttributes
    ) -> BatchnormBackwardAttributes:
        """The statistics that batchnorm saved, 1 / sqrt(biased variance + epsilon) the second."""
        return self.set_mean(mean).set_inv_variance(inv_variance)

    def set_mean(self, mean: TensorAttributes) -> BatchnormBackwardAttributes:
        """One of the pair."""
        self._mean = _tensor(mean, "mean")
        return self

    def set_inv_variance(self, inv_variance: TensorAttributes) -> BatchnormBackwardAttributes:
        """The other of the pair."""
        self._inv_variance = _tensor(inv_variance, "inv_variance")
        return self

    def get_mean(self) -> TensorAttributes | None:
        """None where statistics are taken from x."""
        return self._mean

    def get_inv_variance(self) -> TensorAttributes | None:
        """None where statistics are taken from x."""
        return self._inv_variance

    def set_epsilon(self, epsilon: TensorAttributes | float) -> BatchnormBackwardAttributes:
        """The forward pass' epsilon: required without saved statistics, unused with them."""
        self._epsilon = _scalar(epsilon, "epsilon")
        return self

    def get_epsilon(self) -> TensorAttributes | None:
        """None unless set."""
        return self._epsilon

    def set_peer_stats(self, peer_stats: Sequence[TensorAttributes]) -> BatchnormBackwardAttributes:
        """As in `BatchnormAttributes.set_peer_stats`."""
        given = _arguments.items(peer_stats, "peer_stats", "a sequence of TensorAttributes")
        self._peer_stats = tuple(_tensor(t, "peer_stats") for t in given)
        return self

    def get_peer_stats(self) -> list[TensorAttributes]:
        """Empty unless set."""
        return list(self._peer_stats)


class PointwiseAttributes(_Attributes):
    """Attributes of `Graph.pointwise`."""

    def __init__(self) -> None:
        super().__init__()
        self._mode: PointwiseMode | None = None
        self._clips: dict[str, float] = {}

    def set_mode(self, mode: PointwiseMode | str) -> PointwiseAttributes:
        """Which operation; required."""
        given: Any = mode
        found = PointwiseMode.__members__.get(str.upper(given)) if issubclass(type(given), str) else given
        if type(found) is not PointwiseMode:
            raise ArgumentError("mode", mode, "one of " + ", ".join(f"PointwiseMode.{m.name}" for m in PointwiseMode))
        self._mode = found
        return self

    def get_mode(self) -> PointwiseMode | None:
        """None unless set."""
        return self._mode

    def set_relu_lower_clip(self, value: float) -> PointwiseAttributes:
        """0, the only one that validate accepts."""
        self._clips["relu_lower_clip"] = _arguments.scalar(value, "relu_lower_clip")
        return self

    def set_relu_upper_clip(self, value: float) -> PointwiseAttributes:
        """Refused by validate: no clipped ReLU yet."""
        self._clips["relu_upper_clip"] = _arguments.scalar(value, "relu_upper_clip")
        return self

    def set_relu_lower_clip_slope(self, value: float) -> PointwiseAttributes:
        """0, the only one that validate accepts."""
        self._clips["relu_lower_clip_slope"] = _arguments.scalar(value, "relu_lower_clip_slope")
        return self


# ---------------------------------------------------------------- what a graph is made of


class _Node(NamedTuple):
    """One operation, as it was asked for."""

    kind: str
    attributes: Any
    inputs: dict[str, TensorAttributes]
    outputs: dict[str, TensorAttributes]
    scalars: dict[str, TensorAttributes]

    @property
    def name(self) -> str:
        return str(self.attributes.get_name())

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
    """A tensor as build_operation_graph found it: later changes of the attributes do not reach the plan."""

    def __init__(self, tensor: TensorAttributes, storage: DataType, parameter: bool, output: bool) -> None:
        self.uid = tensor.get_uid()
        self.name = tensor.get_name()
        self.dims = tuple(tensor.get_dim())
        self.strides = tuple(tensor.get_stride())
        self.dtype = storage
        self.virtual = tensor.get_is_virtual()
        self.parameter = parameter
        self.output = output
        self.offset: int | None = None  # in the workspace, where a virtual tensor is needed

    @property
    def nbytes(self) -> int:
        return _arguments.span(self.dims, self.strides) * self.dtype.itemsize

    def copied_like(self, other: _Record) -> _Record:
        """A tensor in the workspace with these values in the memory order of another."""
        made = copy.copy(self)
        made.strides, made.virtual = other.strides, True
        return made

    def at(self, pointer: int, device_type: int) -> Buffer:
        """The tensor at an address."""
        return Buffer(pointer, self.dims, self.strides, self.dtype, device_type, -1, True, self)


class _Vector(NamedTuple):
    """A parameter tensor, given to an operation without its axes of length 1."""

    record: _Record


class _Step(NamedTuple):
    """One call of `pybnorm.operations`, or of Handle for ReLU; records stand for arrays."""

    node: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def records(self) -> Iterator[_Record]:
        """Every tensor that the call reads or writes."""
        for value in (*self.arguments, *self.options.values()):
            if isinstance(value, _Vector):
                yield value.record
            elif isinstance(value, _Record):
                yield value


_RELU = {"relu": Operation.RELU, "relu_backward": Operation.RELU_BACKWARD}
_STAGES = ("described", "validated", "operation graph built", "execution plans created", "support checked", "built")


def _logged(method: _Method) -> _Method:
    """Log what a method raises."""

    @functools.wraps(method)
    def wrapper(self: Graph, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except PybnormError as error:
            _log.error("%s: %s: %s", self._label(), method.__name__, error)
            raise

    return wrapper  # type: ignore[return-value]


def _configure_logging() -> None:
    value = os.environ.get("PYBNORM_LOG_LEVEL")
    if value is None:
        return
    level = _LEVELS.get(value.strip().lower())
    if level is None:
        raise ArgumentError("PYBNORM_LOG_LEVEL", value, ", ".join(_LEVELS))
    logger = logging.getLogger("pybnorm")
    logger.setLevel(level)
    listening = [*logger.handlers, *logging.getLogger().handlers]
    if all(isinstance(h, logging.NullHandler) for h in listening):  # else the application has said where messages go
        stream = logging.StreamHandler()
        stream.setFormatter(logging.Formatter("[%(levelname)s] %(name)s: %(message)s"))
        logger.addHandler(stream)


class Graph:
    """A graph of batch-norm and elementwise nodes.

    Examples
    --------
    See the module and ``examples/``.
    """

    def __init__(self) -> None:
        _configure_logging()
        self._name = ""
        self._io: DataType | None = None
        self._intermediate: DataType | None = None
        self._compute: DataType | None = None
        self._nodes: list[_Node] = []
        self._stage = 0
        self._handle: Handle | None = None
        self._storage: dict[int, DataType] = {}
        self._records: dict[int, _Record] = {}  # by id of the tensor
        self._by_uid: dict[int, _Record | None] = {}  # None: passed by value
        self._steps: list[_Step] = []
        self._in_place: list[tuple[int, _Record, _Record]] = []
        self._sizes: list[int] = []
        self._inner = 0
        self._workspace_size = 0

    def _label(self) -> str:
        return f"graph {self._name!r}" if self._name else "graph"

    # -------- attributes of the graph

    def set_name(self, name: str) -> Graph:
        """The name that messages use."""
        if not issubclass(type(name), str):
            raise ArgumentTypeError("name", name, "a string")
        self._name = name
        return self

    def get_name(self) -> str:
        """The name; may be empty."""
        return self._name

    def set_io_data_type(self, data_type: object) -> Graph:
        """Data type of data tensors that are not virtual and have none: float32, float16 or bfloat16."""
        self._io = _data_type(data_type, "io_data_type")
        self._stage = 0
        return self

    def get_io_data_type(self) -> DataType | None:
        """None unless set."""
        return self._io

    def set_intermediate_data_type(self, data_type: object) -> Graph:
        """Data type of virtual data tensors that have none."""
        self._intermediate = _data_type(data_type, "intermediate_data_type")
        self._stage = 0
        return self

    def get_intermediate_data_type(self) -> DataType | None:
        """None unless set."""
        return self._intermediate

    def set_compute_data_type(self, data_type: object) -> Graph:
        """Data type of accumulation, statistics and parameters: float32, the only one."""
        self._compute = _data_type(data_type, "compute_data_type")
        self._stage = 0
        return self

    def get_compute_data_type(self) -> DataType | None:
        """None unless set: float32."""
        return self._compute

    # -------- tensors

    def tensor(
        self,
        attributes: TensorAttributes | None = None,
        *,
        name: str | None = None,
        dim: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        data_type: object = None,
        uid: int | None = None,
        is_virtual: bool | None = None,
    ) -> TensorAttributes:
        """A new tensor: a copy of `attributes` as in C++, changed by the keywords that cuDNN's Python has.

        Parameters
        ----------
        attributes : TensorAttributes, optional
        name : str, optional
        dim, stride : sequence of int, optional
        data_type : DataType or str, optional
        uid : int, optional
        is_virtual : bool, optional

        Returns
        -------
        TensorAttributes
        """
        tensor = TensorAttributes() if attributes is None else copy.copy(_tensor(attributes, "attributes"))
        if name is not None:
            tensor.set_name(name)
        if dim is not None:
            tensor.set_dim(dim)
        if stride is not None:
            tensor.set_stride(stride)
        if data_type is not None:
            tensor.set_data_type(data_type)
        if uid is not None:
            tensor.set_uid(uid)
        if is_virtual is not None:
            tensor.set_is_virtual(is_virtual)
        return tensor

    @staticmethod
    def tensor_like(tensor: TensorAttributes, name: str = "") -> TensorAttributes:
        """A copy with another name and no uid."""
        return copy.copy(_tensor(tensor, "tensor")).clear_uid().set_name(name)

    # -------- nodes

    def batchnorm(
        self,
        x: TensorAttributes,
        scale: TensorAttributes,
        bias: TensorAttributes,
        attributes: BatchnormAttributes,
    ) -> tuple[TensorAttributes, TensorAttributes, TensorAttributes, TensorAttributes | None, TensorAttributes | None]:
        """Batch norm with the statistics of the batch.

        ``y = scale * (x - mean) * inv_variance + bias`` with ``inv_variance = 1 / sqrt(biased variance + epsilon)``;
        ``next = (1 - momentum) * previous + momentum * batch`` with the unbiased variance.

        Parameters
        ----------
        x : TensorAttributes, dim (N, C, spatial...)
            Rank 2 to 8, more than one element for each channel.
        scale, bias : TensorAttributes, dim (1, C, 1...)
        attributes : BatchnormAttributes
            Epsilon is required.

        Returns
        -------
        y, mean, inv_variance : TensorAttributes
        next_running_mean, next_running_variance : TensorAttributes or None
            None without previous statistics and momentum. All five are virtual until ``set_output(True)``.

        Notes
        -----
        `pybnorm.operations.forward_training`; before it axpby from prev to next, unless they are the same memory.
        """
        attributes = self._attributes(attributes, BatchnormAttributes, "Batchnorm")
        inputs: dict[str, Any] = {"x": x, "scale": scale, "bias": bias}
        outputs = ["y", "mean", "inv_variance"]
        running = {
            "prev_running_mean": attributes.get_prev_running_mean(),
            "prev_running_variance": attributes.get_prev_running_variance(),
            "momentum": attributes.get_momentum(),
        }
        scalars = {"epsilon": attributes.get_epsilon()}
        if any(value is not None for value in running.values()):
            scalars["momentum"] = running.pop("momentum")
            inputs |= running
            outputs += ["next_running_mean", "next_running_variance"]
        made = self._add("batchnorm", attributes, inputs, outputs, scalars)
        y, mean, inv_variance = made[:3]
        following = made[3:]
        return y, mean, inv_variance, *((following[0], following[1]) if following else (None, None))

    def batchnorm_inference(
        self,
        x: TensorAttributes,
        mean: TensorAttributes,
        inv_variance: TensorAttributes,
        scale: TensorAttributes,
        bias: TensorAttributes,
        attributes: BatchnormInferenceAttributes,
    ) -> TensorAttributes:
        """``y = scale * (x - mean) * inv_variance + bias``, the inverse deviation given.

        Parameters
        ----------
        x : TensorAttributes, dim (N, C, spatial...)
        mean, inv_variance, scale, bias : TensorAttributes, dim (1, C, 1...)
        attributes : BatchnormInferenceAttributes

        Returns
        -------
        y : TensorAttributes

        Notes
        -----
        `pybnorm.operations.forward_inference_inv_variance`.
        """
        attributes = self._attributes(attributes, BatchnormInferenceAttributes, "BatchnormInference")
        inputs = {"x": x, "mean": mean, "inv_variance": inv_variance, "scale": scale, "bias": bias}
        return self._add("batchnorm_inference", attributes, inputs, ["y"])[0]

    def batchnorm_inference_variance_ext(
        self,
        x: TensorAttributes,
        mean: TensorAttributes,
        variance: TensorAttributes,
        scale: TensorAttributes,
        bias: TensorAttributes,
        epsilon: TensorAttributes | float,
        attributes: BatchnormInferenceAttributesVarianceExt,
    ) -> TensorAttributes:
        """``y = scale * (x - mean) / sqrt(variance + epsilon) + bias``.

        Parameters
        ----------
        x : TensorAttributes, dim (N, C, spatial...)
        mean, variance, scale, bias : TensorAttributes, dim (1, C, 1...)
        epsilon : TensorAttributes passed by value, or float
        attributes : BatchnormInferenceAttributesVarianceExt

        Returns
        -------
        y : TensorAttributes

        Notes
        -----
        `pybnorm.operations.forward_inference`.
        """
        attributes = self._attributes(
            attributes, BatchnormInferenceAttributesVarianceExt, "BatchnormInferenceVarianceExt"
        )
        inputs = {"x": x, "mean": mean, "variance": variance, "scale": scale, "bias": bias}
        scalars = {"epsilon": _scalar(epsilon, "epsilon")}
        return self._add("batchnorm_inference_variance_ext", attributes, inputs, ["y"], scalars)[0]

    def batchnorm_backward(
        self,
        dy: TensorAttributes,
        x: TensorAttributes,
        scale: TensorAttributes,
        attributes: BatchnormBackwardAttributes,
    ) -> tuple[TensorAttributes, TensorAttributes, TensorAttributes]:
        """Gradients of `batchnorm`.

        With ``x_hat = (x - mean) * inv_variance``: ``dbias = sum(dy)``, ``dscale = sum(dy * x_hat)``,
        ``dx = scale * inv_variance * (dy - (dbias + x_hat * dscale) / m)``.

        Parameters
        ----------
        dy, x : TensorAttributes, dim (N, C, spatial...)
            More than one element for each channel.
        scale : TensorAttributes, dim (1, C, 1...)
        attributes : BatchnormBackwardAttributes
            Saved mean and inverse deviation, or an epsilon to take them from x with.

        Returns
        -------
        dx, dscale, dbias : TensorAttributes

        Notes
        -----
        `pybnorm.operations.backward`.
        """
        attributes = self._attributes(attributes, BatchnormBackwardAttributes, "BatchnormBackward")
        inputs: dict[str, Any] = {"dy": dy, "x": x, "scale": scale}
        pair = {"mean": attributes.get_mean(), "inv_variance": attributes.get_inv_variance()}
        scalars = {}
        if any(value is not None for value in pair.values()):
            inputs |= pair
        else:
            scalars["epsilon"] = attributes.get_epsilon()
        dx, dscale, dbias = self._add("batchnorm_backward", attributes, inputs, ["dx", "dscale", "dbias"], scalars)
        return dx, dscale, dbias

    def pointwise(self, in_0: TensorAttributes, *rest: Any) -> TensorAttributes:
        """An elementwise node: ``pointwise(in_0, attributes)`` or ``pointwise(in_0, in_1, attributes)``.

        Parameters
        ----------
        in_0, in_1 : TensorAttributes
            Of one shape; nothing is broadcast. For `PointwiseMode.RELU_BWD` x and dy, in this order.
        attributes : PointwiseAttributes

        Returns
        -------
        out_0 : TensorAttributes

        Notes
        -----
        `Handle.relu`, `Handle.relu_backward`; the addition by `pybnorm.operations.axpby`, or by the beta of the batch
        norm before it.
        """
        if not 1 <= len(rest) <= 2:
            raise ArgumentError("inputs", f"{len(rest)} arguments after in_0", "in_1 if any, then the attributes")
        attributes = self._attributes(rest[-1], PointwiseAttributes, "Pointwise")
        inputs = {"in_0": in_0}
        if len(rest) == 2:
            inputs["in_1"] = rest[0]
        return self._add("pointwise", attributes, inputs, ["out_0"])[0]

    def relu(self, input: TensorAttributes, name: str = "") -> TensorAttributes:
        """``max(input, 0)``, as cuDNN's Python has it."""
        return self.pointwise(input, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.RELU_FWD))

    def relu_backward(self, loss: TensorAttributes, input: TensorAttributes, name: str = "") -> TensorAttributes:
        """``loss where input > 0, else 0``, as cuDNN's Python has it."""
        return self.pointwise(input, loss, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.RELU_BWD))

    def add(self, a: TensorAttributes, b: TensorAttributes, name: str = "") -> TensorAttributes:
        """``a + b``, as cuDNN's Python has it."""
        return self.pointwise(a, b, PointwiseAttributes().set_name(name).set_mode(PointwiseMode.ADD))

    def _attributes(self, given: Any, kind: type[Any], prefix: str) -> Any:
        """A copy, as C++ passes attributes by value, with a name."""
        _arguments.instance(given, kind, "attributes", f"a {kind.__name__}")
        attributes = copy.copy(given)
        if not attributes.get_name():
            attributes.set_name(f"{prefix}_{len(self._nodes)}")
        return attributes

    def _add(
        self,
        kind: str,
        attributes: Any,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        scalars: Mapping[str, Any] | None = None,
    ) -> list[TensorAttributes]:
        name = attributes.get_name()
        for role, tensor in {**inputs, **(scalars or {})}.items():
            if tensor is not None:  # absent ones are what validate is for
                _tensor(tensor, role)
        for role, tensor in inputs.items():
            if tensor is not None and not tensor.get_name():
                tensor.set_name(f"{name}::{role.upper()}")
        made = {role: TensorAttributes().set_name(f"{name}::{role.upper()}").set_is_virtual(True) for role in outputs}
        self._nodes.append(_Node(kind, attributes, dict(inputs), made, dict(scalars or {})))
        self._stage = 0
        return list(made.values())

    # -------- validate

    @_logged
    def validate(self) -> None:
        """Check the graph by itself and fill in what follows from it: shapes, strides and data types of outputs.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The graph is empty or has no output, a tensor is missing, of a wrong shape or without data type, two
            tensors have one uid, a group of tensors is incomplete, channels have one element in training or backward.
        """
        self._stage = 0
        if not self._nodes:
            raise ArgumentError("graph", "no nodes", "at least one")
        produced: set[int] = set()
        for node in self._nodes:
            self._check_inputs(node, produced)
            _RULES[node.kind](node)
            self._check_compute(node)
            produced |= {id(t) for t in node.outputs.values()}
        self._check_uids()
        self._fill_data_types()
        if not any(id(t) in produced and not t.get_is_virtual() for t in self._tensors()):
            raise ArgumentError("graph", "virtual tensors only", "an output: set_output(True) on a tensor of a node")
        self._stage = 1
        _log.info("%s: validated: %s", self._label(), ", ".join(f"{n.name} ({n.kind})" for n in self._nodes))

    def _tensors(self) -> list[TensorAttributes]:
        """Tensors with memory, each once, in the order of nodes."""
        found = {id(t): t for node in self._nodes for _, t in node.tensors() if t is not None}
        return list(found.values())

    def _check_inputs(self, node: _Node, produced: set[int]) -> None:
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

    def _check_compute(self, node: _Node) -> None:
        compute = node.attributes.get_compute_data_type() or self._compute or DataType.FLOAT32
        if compute != DataType.FLOAT32:
            raise ArgumentTypeError(f"compute_data_type of {node.name}", compute.short, "f32")

    def _check_uids(self) -> None:
        seen: dict[int, TensorAttributes] = {}
        by_value = {id(t): t for node in self._nodes for t in node.scalars.values()}
        for tensor in (*self._tensors(), *by_value.values()):
            if not tensor.has_uid():
                continue
            other = seen.setdefault(tensor.get_uid(), tensor)
            if other is not tensor:
                raise ArgumentError(
                    "uid",
                    tensor.get_uid(),
                    f"one tensor for each: {other.get_name()!r} and {tensor.get_name()!r} have it",
                )

    def _fill_data_types(self) -> None:
        parameters = {id(t) for n in self._nodes for role, t in n.tensors() if role not in _DATA_ROLES}
        data = {id(t) for node in self._nodes for t in node.data()}
        for tensor in self._tensors():
            if tensor.get_data_type() is not None:
                continue
            if id(tensor) in parameters and id(tensor) not in data:
                tensor.set_data_type(DataType.FLOAT32)
                continue
            default = self._intermediate if tensor.get_is_virtual() else self._io
            if default is None:
                setter = "set_intermediate_data_type" if tensor.get_is_virtual() else "set_io_data_type"
                raise ArgumentError(f"data_type of {tensor.get_name()!r}", None, f"one, by set_data_type or {setter}")
            tensor.set_data_type(default)
        self._storage = {}
        for group in self._connected():
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
            self._storage |= {id(t): dtype for t in group}
        for tensor in self._tensors():
            self._storage.setdefault(id(tensor), _dtype_of(tensor))

    def _connected(self) -> list[list[TensorAttributes]]:
        """Data tensors in groups that nodes connect."""
        groups: list[list[TensorAttributes]] = []
        for node in self._nodes:
            joined = list(node.data())
            ids = {id(t) for t in joined}
            apart = []
            for group in groups:
                if ids & {id(t) for t in group}:
                    joined = group + [t for t in joined if id(t) not in {id(g) for g in group}]
                else:
                    apart.append(group)
            groups = [*apart, joined]
        return groups

    # -------- build

    def _require(self, stage: int, method: str) -> None:
        if self._stage < stage:
            raise ArgumentError(
                "graph",
                f"one that is {_STAGES[self._stage]}",
                f"one that is {_STAGES[stage]} before {method}; build(handle) does all stages",
            )

    @_logged
    def build_operation_graph(self, handle: Handle) -> None:
        """Fix the graph for a backend: uids are given, and later changes of its tensors have no effect.

        Parameters
        ----------
        handle : Handle
            Of the backend that will execute it.

        Raises
        ------
        ArgumentError
            Not validated.
        """
        self._require(1, "build_operation_graph")
        _check_handle(handle)
        self._handle = handle
        tensors = self._tensors()
        by_value = list({id(t): t for node in self._nodes for t in node.scalars.values()}.values())
        used = {t.get_uid() for t in (*tensors, *by_value) if t.has_uid()}
        free = (uid for uid in range(1, 2**63) if uid not in used)
        for tensor in (*tensors, *by_value):
            if not tensor.has_uid():
                tensor.set_uid(next(free))
        data = {id(t) for node in self._nodes for t in node.data()}
        outputs = {id(t) for node in self._nodes for t in node.outputs.values()}
        self._records = {id(t): _Record(t, self._storage[id(t)], id(t) not in data, id(t) in outputs) for t in tensors}
        self._by_uid = {r.uid: r for r in self._records.values()}
        self._by_uid |= dict.fromkeys((t.get_uid() for t in by_value), None)
        self._stage = 2
        _log.info("%s: %d tensors, %d nodes for %s", self._label(), len(tensors), len(self._nodes), handle.backend)

    @_logged
    def create_execution_plans(self, modes: Iterable[HeuristicMode | str] = (HeuristicMode.FALLBACK,)) -> None:
        """Decide the calls. There is one plan, whatever the modes.

        Parameters
        ----------
        modes : sequence of HeuristicMode

        Raises
        ------
        ArgumentError
            An unknown mode, or the operation graph has not been built.
        UnsupportedError
            An intermediate data type cannot be honoured, see the module.
        """
        self._require(2, "create_execution_plans")
        allowed = "a sequence of " + ", ".join(f"HeuristicMode.{m.name}" for m in HeuristicMode)
        given: Any = (modes,) if issubclass(type(modes), (str, HeuristicMode)) else modes
        for mode in _arguments.items(given, "modes", allowed):
            found = HeuristicMode.__members__.get(str.upper(mode)) if issubclass(type(mode), str) else mode
            if type(found) is not HeuristicMode:
                raise ArgumentError("modes", mode, allowed)
        lowering = _Lowering(self._nodes, self._records)
        for tensor in lowering.unfaithful():
            record = self._records[id(tensor)]
            raise self._unsupported(
                "create_execution_plans",
                f"virtual tensor {record.name!r} of data type {_dtype_of(tensor).short} would be stored in "
                f"{record.dtype.short}, the data type of the tensors around it, and rounded once more than its data "
                f"type says; set its data type to {record.dtype.short} to ask for that",
            )
        self._steps, self._in_place = lowering.steps()
        self._stage = 3
        _log.info("%s: 1 plan: %s", self._label(), ", ".join(f"{s.node}: {s.function}" for s in self._steps))

    def get_execution_plan_count(self) -> int:
        """1, once create_execution_plans has been called."""
        return 1 if self._stage >= 3 else 0

    @_logged
    def check_support(self) -> None:
        """Ask the backend about every call of the plan.

        Raises
        ------
        ArgumentError
            No plan has been created.
        UnsupportedError
            The backend has no right path for one of the calls; the error names it.
        """
        self._require(3, "check_support")
        handle = self._handle
        _check_handle(handle)
        assert handle is not None
        self._sizes = []
        for step in self._steps:
            arguments, options = _placed(step, lambda r: r.at(0, handle.library.device_type))
            if step.function in _RELU:
                self._check_relu(step, arguments)
                self._sizes.append(0)
                continue
            plan = operations.plan(handle, step.function, *arguments, **options)
            self._sizes.append(plan.nbytes)
            for copied in plan.copies:
                _log.warning("%s: %s copies %s", self._label(), step.node, copied)
            _log.info("%s: %s: %s", self._label(), step.node, ", ".join(plan.calls))
        self._stage = 4

    def _check_relu(self, step: _Step, buffers: tuple[Any, ...]) -> None:
        assert self._handle is not None
        for buffer in buffers:
            layout = _arguments.layout_of(buffer.dims, buffer.strides)
            bits, why = capability(
                self._handle.backend,
                _RELU[step.function],
                Mode.SPATIAL,
                buffer.dtype,
                layout,
                len(buffer.dims),
            )
            if not bits:
                raise self._unsupported(step.function, f"{step.node}: {why}")

    def _unsupported(self, function: str, text: str) -> UnsupportedError:
        assert self._handle is not None
        library = self._handle.library
        return UnsupportedError(
            backend=self._handle.backend,
            function=function,
            status=-1,
            status_name="PBN_E_UNSUPPORTED",
            text=text,
            library=library.path,
            version=library.version,
        )

    @_logged
    def build_plans(self) -> None:
        """Lay out the workspace.

        Raises
        ------
        ArgumentError
            Support has not been checked.
        """
        self._require(4, "build_plans")
        used = 0
        for record in {id(r): r for step in self._steps for r in step.records() if r.virtual}.values():
            record.offset = used
            used += _rounded(record.nbytes)
        inner = max(self._sizes, default=0)
        self._inner = used
        # The caller's memory may start anywhere; everything in it starts at a multiple of 64.
        self._workspace_size = used + inner + ALIGNMENT - 1 if used + inner else 0
        self._stage = 5
        _log.info("%s: built, %d bytes of workspace", self._label(), self._workspace_size)

    def build(self, handle: Handle, modes: Iterable[HeuristicMode | str] = (HeuristicMode.FALLBACK,)) -> None:
        """All five stages: validate, build_operation_graph, create_execution_plans, check_support, build_plans."""
        self.validate()
        self.build_operation_graph(handle)
        self.create_execution_plans(modes)
        self.check_support()
        self.build_plans()

    @_logged
    def get_workspace_size(self) -> int:
        """Bytes of workspace that execute needs: virtual tensors and what the calls ask for.

        Returns
        -------
        int
            0 where none is needed.

        Raises
        ------
        ArgumentError
            Not built.
        """
        self._require(5, "get_workspace_size")
        return self._workspace_size

    # -------- execute

    @_logged
    def execute(
        self,
        handle: Handle,
        variant_pack: Mapping[int | TensorAttributes, Any],
        workspace: Any = None,
    ) -> None:
        """Run the built graph on the handle's stream.

        Parameters
        ----------
        handle : Handle
            Of the backend that the graph was built for.
        variant_pack : mapping
            From uid, or tensor, to memory: an array of any framework, or an address. Every tensor that is neither
            virtual nor passed by value, and no other. An array must have the tensor's data type, shape and strides;
            parameters may leave out axes of length 1. Of an address nothing can be checked.
        workspace : array or (int, int), optional
            At least `get_workspace_size` bytes on the handle's device: an array, or address and bytes.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not built, built for another backend, an incomplete or wrong variant pack, outputs that overlap inputs.
            Nothing was called and nothing written.
        WorkspaceError
            The workspace is missing or too small.
        VendorError
            The vendor returned a status other than success.
        """
        self._require(5, "execute")
        _check_handle(handle)
        assert self._handle is not None
        if handle.backend != self._handle.backend:
            raise ArgumentError(
                "handle",
                f"one of backend {handle.backend}",
                f"one of {self._handle.backend}, which the graph was built for",
            )
        buffers = self._bind(handle, variant_pack)
        address, size = handle.memory(workspace)
        if size < self._workspace_size:
            raise WorkspaceError(
                "workspace", f"{size} bytes", f"at least {self._workspace_size} bytes on the handle's device"
            )
        skipped = {
            index for index, prev, following in self._in_place if buffers[prev].pointer == buffers[following].pointer
        }
        self._check_overlaps(buffers, (address, size), skipped)
        base = _rounded(address)
        device_type = handle.library.device_type
        for record in {id(r): r for step in self._steps for r in step.records() if r.virtual}.values():
            assert record.offset is not None
            buffers[record] = record.at(base + record.offset, device_type)
        _log.info("%s: execute on %s", self._label(), handle.backend)
        for index, (step, nbytes) in enumerate(zip(self._steps, self._sizes, strict=True)):
            if index in skipped:
                continue
            arguments, options = _placed(step, buffers.__getitem__)
            if step.function in _RELU:
                getattr(handle, step.function)(*arguments)
                continue
            # Never None where something is needed: operations would fall back on memory of its own.
            scratch = (base + self._inner, nbytes) if nbytes else None
            getattr(operations, step.function)(handle, *arguments, **options, workspace=scratch)

    def _bind(self, handle: Handle, variant_pack: Mapping[Any, Any]) -> dict[_Record, Buffer]:
        """The memory of every tensor that has its own."""
        _arguments.instance(variant_pack, Mapping, "variant_pack", "a mapping from uids to arrays or addresses")
        buffers: dict[_Record, Buffer] = {}
        for key, value in variant_pack.items():
            if issubclass(type(key), TensorAttributes):
                known = self._records.get(id(key))
                if known is None:
                    raise ArgumentError("variant_pack", f"key {key!r}", "tensors of the graph that have memory")
                record: _Record | None = known
            else:
                if issubclass(type(key), bool) or not issubclass(type(key), int):
                    raise ArgumentTypeError("variant_pack", f"key {key!r}", "integers, or tensors of the graph")
                if key not in self._by_uid:
                    raise ArgumentError("variant_pack", f"uid {key}", f"uids of the graph: {self._wanted()}")
                record = self._by_uid[key]
            if record is None:
                raise ArgumentError("variant_pack", f"uid {key}", "no entry: this scalar is passed by value")
            where = f"variant_pack[{record.uid}] ({record.name})"
            if record.virtual:
                raise ArgumentError(where, value, "no entry: this tensor is virtual and lies in the workspace")
            if record in buffers:
                raise ArgumentError(where, value, "one entry, by its uid or by the tensor")
            buffers[record] = _memory_of(handle, record, value, where)
        missing = [r for r in self._by_uid.values() if r is not None and not r.virtual and r not in buffers]
        if missing:
            names = ", ".join(f"{r.uid} ({r.name})" for r in missing)
            raise ArgumentError("variant_pack", f"no entry for {names}", f"an entry for each of {self._wanted()}")
        return buffers

    def _wanted(self) -> str:
        return ", ".join(f"{r.uid} ({r.name})" for r in self._by_uid.values() if r is not None and not r.virtual)

    def _check_overlaps(self, buffers: dict[_Record, Buffer], workspace: tuple[int, int], in_place: set[int]) -> None:
        shared = {prev for index, prev, _ in self._in_place if index in in_place}
        outputs: list[_arguments.Region] = []
        inputs: list[_arguments.Region] = []
        for record, buffer in buffers.items():
            if record in shared:
                continue
            size = buffer.dtype.itemsize
            steps = tuple(s * size for s in buffer.strides)
            region = _arguments.Region(f"{record.name} (uid {record.uid})", buffer.pointer, buffer.dims, steps, size)
            (outputs if record.output else inputs).append(region)
        if self._workspace_size:
            outputs.append(_arguments.Region("workspace", workspace[0], (self._workspace_size,), (1,), 1))
        _arguments.disjoint(outputs, inputs)


def _check_handle(handle: Any) -> None:
    _arguments.instance(handle, Handle, "handle", "a Handle")
    if handle.closed:
        raise ClosedError("handle")


def _dtype_of(tensor: TensorAttributes) -> DataType:
    dtype = tensor.get_data_type()
    assert dtype is not None
    return dtype


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _placed(step: _Step, where: Callable[[_Record], Buffer]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with memory for records."""

    def place(value: Any) -> Any:
        if isinstance(value, _Vector):
            buffer = where(value.record)
            return buffer._replace(dims=(math.prod(buffer.dims),), strides=(1,))
        return where(value) if isinstance(value, _Record) else value

    return tuple(place(a) for a in step.arguments), {name: place(o) for name, o in step.options.items()}


def _memory_of(handle: Handle, record: _Record, value: Any, where: str) -> Buffer:
    """An entry of the variant pack as the tensor that it stands for."""
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


# ---------------------------------------------------------------- rules of the nodes

_MISSING = {
    "prev_running_mean": "a tensor: previous mean, previous variance and momentum go together",
    "prev_running_variance": "a tensor: previous mean, previous variance and momentum go together",
    "momentum": "a scalar: previous mean, previous variance and momentum go together",
    "mean": "a tensor: mean and inverse deviation go together",
    "inv_variance": "a tensor: mean and inverse deviation go together",
    "epsilon": "a scalar, by set_epsilon",
}


def _data_rules(node: _Node, role: str, low: int = 2) -> tuple[int, ...]:
    """Dims and strides of a data tensor that must be known."""
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
    """An output: what is not set follows from `other`, what is set must agree."""
    tensor = node.outputs[role]
    if not tensor.get_dim():
        tensor.set_dim(dims)
    _same_dims(node, role, dims, other)
    if not tensor.get_stride():
        tensor.set_stride(strides)
    _arguments.strides(tensor.get_stride(), dims, f"stride of {role} of {node.name}")


def _parameter_rules(node: _Node, channels: int, rank: int) -> None:
    """Inputs and outputs of one element for each channel."""
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


def _peer_rules(node: _Node) -> None:
    if node.attributes.get_peer_stats():
        raise ArgumentError(f"peer_stats of {node.name}", "tensors", "none: pybnorm.sync joins devices")


def _several(node: _Node, dims: tuple[int, ...]) -> None:
    if math.prod(dims) == dims[1]:
        raise ArgumentError(f"x of {node.name}", f"dim {dims}", "more than one element for each channel")


def _scalar_of(node: _Node, role: str) -> float:
    value = node.scalars[role].get_value()
    return _arguments.epsilon(value) if role == "epsilon" else _arguments.factor(value, role)


def _batchnorm_rules(node: _Node) -> None:
    dims = _data_rules(node, "x")
    _inferred(node, "y", dims, node.inputs["x"].get_stride(), "x")
    _parameter_rules(node, dims[1], len(dims))
    _several(node, dims)
    _peer_rules(node)
    for role in node.scalars:
        _scalar_of(node, role)


def _inference_rules(node: _Node) -> None:
    dims = _data_rules(node, "x")
    _inferred(node, "y", dims, node.inputs["x"].get_stride(), "x")
    _parameter_rules(node, dims[1], len(dims))
    for role in node.scalars:
        _scalar_of(node, role)


def _backward_rules(node: _Node) -> None:
    dims = _data_rules(node, "x")
    _data_rules(node, "dy")
    _same_dims(node, "dy", dims, "x")
    _inferred(node, "dx", dims, node.inputs["x"].get_stride(), "x")
    _parameter_rules(node, dims[1], len(dims))
    _several(node, dims)
    _peer_rules(node)
    for role in node.scalars:
        _scalar_of(node, role)


def _pointwise_rules(node: _Node) -> None:
    mode = node.attributes.get_mode()
    if mode is None:
        raise ArgumentError(f"mode of {node.name}", None, "a PointwiseMode, by set_mode")
    wanted = 1 if mode == PointwiseMode.RELU_FWD else 2
    if len(node.inputs) != wanted:
        raise ArgumentError(f"inputs of {node.name}", f"{len(node.inputs)} for {mode.name}", str(wanted))
    for clip, value in node.attributes._clips.items():
        if clip == "relu_upper_clip" or value != 0.0:
            allowed = "none, or a lower clip or slope of 0: ReLU is max(x, 0)"
            raise ArgumentError(f"{clip} of {node.name}", value, allowed)
    dims = _data_rules(node, "in_0")
    for role in list(node.inputs)[1:]:
        _data_rules(node, role)
        _same_dims(node, role, dims, "in_0; nothing is broadcast")
    _inferred(node, "out_0", dims, node.inputs["in_0"].get_stride(), "in_0")


_RULES: dict[str, Callable[[_Node], None]] = {
    "batchnorm": _batchnorm_rules,
    "batchnorm_inference": _inference_rules,
    "batchnorm_inference_variance_ext": _inference_rules,
    "batchnorm_backward": _backward_rules,
    "pointwise": _pointwise_rules,
}


# ---------------------------------------------------------------- from nodes to calls


class _Lowering:
    """Which calls the nodes become, and whether the data types of virtual tensors are honoured by them."""

    def __init__(self, nodes: Sequence[_Node], records: Mapping[int, _Record]) -> None:
        self.nodes = nodes
        self.records = records
        self.producer = {id(t): i for i, node in enumerate(nodes) for t in node.outputs.values()}
        self.consumers: dict[int, list[tuple[_Node, str]]] = {}
        for node in nodes:
            for role, tensor in node.inputs.items():
                self.consumers.setdefault(id(tensor), []).append((node, role))
        self.fused = self._find_fused()

    def record(self, tensor: TensorAttributes) -> _Record:
        """The record of a tensor."""
        return self.records[id(tensor)]

    def wanted(self, tensor: TensorAttributes) -> bool:
        """Whether anybody sees it."""
        return not self.record(tensor).virtual or id(tensor) in self.consumers

    # -------- additions that the batch norm before them does

    def _find_fused(self) -> dict[int, tuple[TensorAttributes, TensorAttributes]]:
        """For a batch norm (by index) whose y goes into one addition only: the other summand, and the sum."""
        fused: dict[int, tuple[TensorAttributes, TensorAttributes]] = {}
        for index, node in enumerate(self.nodes):
            if "y" not in node.outputs or not self.record(node.outputs["y"]).virtual:
                continue
            consumers = self.consumers.get(id(node.outputs["y"]), [])
            if len(consumers) != 1 or _mode(consumers[0][0]) != PointwiseMode.ADD:
                continue
            addition, role = consumers[0]
            if id(addition) in {id(self.nodes[self.producer[id(total)]]) for _, total in fused.values()}:
                continue
            other = addition.inputs["in_1" if role == "in_0" else "in_0"]
            if self.producer.get(id(other), -1) < index:
                fused[index] = other, addition.outputs["out_0"]
        return fused

    # -------- data types

    def unfaithful(self) -> Iterator[TensorAttributes]:
        """Virtual tensors whose storage changes results against their data type."""
        for node in self.nodes:
            for tensor in node.outputs.values():
                record = self.record(tensor)
                differs = record.virtual and _dtype_of(tensor) != record.dtype
                if differs and not self._exact(tensor) and not self._late(tensor):
                    yield tensor

    def _exact(self, tensor: TensorAttributes) -> bool:
        """Whether its values are values of the storage type anyway."""
        index = self.producer.get(id(tensor))
        if index is None or not self.record(tensor).virtual:
            return True
        mode = _mode(self.nodes[index])
        if mode == PointwiseMode.RELU_FWD:
            return self._exact(self.nodes[index].inputs["in_0"])
        if mode == PointwiseMode.RELU_BWD:
            return self._exact(self.nodes[index].inputs["in_1"])
        return False

    def _late(self, tensor: TensorAttributes) -> bool:
        """Whether rounding now gives what rounding after its consumers would."""
        if id(tensor) in {id(self.nodes[i].outputs["y"]) for i in self.fused}:
            return True  # never stored
        for node, role in self.consumers.get(id(tensor), []):
            mode = _mode(node)
            if mode == PointwiseMode.RELU_BWD and role == "in_0":
                continue
            if mode not in (PointwiseMode.RELU_FWD, PointwiseMode.RELU_BWD):
                return False
            out = node.outputs["out_0"]
            if _dtype_of(out) != self.record(out).dtype and not self._late(out):
                return False
        return True

    # -------- calls

    def steps(self) -> tuple[list[_Step], list[tuple[int, _Record, _Record]]]:
        """The calls, and those that copy previous to next running statistics, with the two."""
        steps: list[_Step] = []
        copies: list[tuple[int, _Record, _Record]] = []
        sums = {id(total) for _, total in self.fused.values()}
        for index, node in enumerate(self.nodes):
            if node.kind == "pointwise":
                if id(node.outputs["out_0"]) not in sums:
                    steps += self._pointwise(node)
                continue
            if node.kind == "batchnorm_backward":
                steps.append(self._backward(node))
                continue
            blend = {}
            y = self.record(node.outputs["y"])
            if index in self.fused:
                other, total = self.fused[index]
                y, blend = self.record(total), {"beta": 1.0}
                steps.append(_Step(node.name, "axpby", (1.0, self.record(other), 0.0, y), {}))
            if node.kind == "batchnorm":
                made, copied = self._training(node, y, blend, len(steps))
                steps += made
                copies += copied
            else:
                steps.append(self._inference(node, y, blend))
        return steps, copies

    def _vector(self, tensor: TensorAttributes) -> _Vector:
        return _Vector(self.record(tensor))

    def _training(
        self, node: _Node, y: _Record, blend: dict[str, float], place: int
    ) -> tuple[list[_Step], list[tuple[int, _Record, _Record]]]:
        steps: list[_Step] = []
        copies: list[tuple[int, _Record, _Record]] = []
        options: dict[str, Any] = {"epsilon": _scalar_of(node, "epsilon"), **blend}
        if any(self.wanted(node.outputs[role]) for role in ("mean", "inv_variance")):
            options["saved_mean"] = self._vector(node.outputs["mean"])
            options["saved_inv_variance"] = self._vector(node.outputs["inv_variance"])
        pair = ("running_mean", "running_variance")
        if "momentum" in node.scalars and any(self.wanted(node.outputs[f"next_{name}"]) for name in pair):
            options["exponential_average_factor"] = _scalar_of(node, "momentum")
            for name in pair:
                prev, following = self.record(node.inputs[f"prev_{name}"]), self.record(node.outputs[f"next_{name}"])
                if prev.dtype == following.dtype:
                    if not prev.virtual and not following.virtual:
                        copies.append((place + len(steps), prev, following))
                    arguments: tuple[Any, ...] = (1.0, _Vector(prev), 0.0, _Vector(following))
                    steps.append(_Step(node.name, "axpby", arguments, {}))
                else:
                    steps.append(_Step(node.name, "convert", (_Vector(prev), _Vector(following)), {}))
                options[name] = _Vector(following)
        vectors = [self._vector(node.inputs[role]) for role in ("scale", "bias")]
        steps.append(_Step(node.name, "forward_training", (self.record(node.inputs["x"]), *vectors, y), options))
        return steps, copies

    def _inference(self, node: _Node, y: _Record, blend: dict[str, float]) -> _Step:
        x = self.record(node.inputs["x"])
        given = node.kind == "batchnorm_inference"
        function = "forward_inference_inv_variance" if given else "forward_inference"
        roles = ("scale", "bias", "mean", "inv_variance" if given else "variance")
        options: dict[str, float] = dict(blend)
        if not given:
            options["epsilon"] = _scalar_of(node, "epsilon")
        return _Step(node.name, function, (x, *[self._vector(node.inputs[r]) for r in roles], y), options)

    def _backward(self, node: _Node) -> _Step:
        options: dict[str, Any] = {}
        if "mean" in node.inputs:
            options["saved_mean"] = self._vector(node.inputs["mean"])
            options["saved_inv_variance"] = self._vector(node.inputs["inv_variance"])
        else:
            options["epsilon"] = _scalar_of(node, "epsilon")
        outputs: list[Any] = [
            (self.record(t) if role == "dx" else self._vector(t)) if self.wanted(t) else None
            for role, t in node.outputs.items()
        ]
        if not any(outputs):
            outputs[0] = self.record(node.outputs["dx"])
        arguments = (self.record(node.inputs["x"]), self.record(node.inputs["dy"]), self._vector(node.inputs["scale"]))
        return _Step(node.name, "backward", (*arguments, *outputs), options)

    def _pointwise(self, node: _Node) -> list[_Step]:
        inputs = [self.record(t) for t in node.inputs.values()]
        out = self.record(node.outputs["out_0"])
        mode = _mode(node)
        if mode == PointwiseMode.ADD:
            return [
                _Step(node.name, "axpby", (1.0, inputs[0], 0.0, out), {}),
                _Step(node.name, "axpby", (1.0, inputs[1], 1.0, out), {}),
            ]
        steps = []
        for i, record in enumerate(inputs):  # not every vendor's activation takes tensors of different layouts
            if any(d > 1 and s != o for d, s, o in zip(out.dims, record.strides, out.strides, strict=True)):
                _log.warning("%s copies %r into the memory order of %r", node.name, record.name, out.name)
                inputs[i] = record.copied_like(out)
                steps.append(_Step(node.name, "axpby", (1.0, record, 0.0, inputs[i]), {}))
        function = "relu" if mode == PointwiseMode.RELU_FWD else "relu_backward"
        return [*steps, _Step(node.name, function, (*inputs, out), {})]


def _mode(node: _Node) -> PointwiseMode | None:
    """The elementwise operation of a node; None for batch norm."""
    return node.attributes.get_mode() if node.kind == "pointwise" else None
