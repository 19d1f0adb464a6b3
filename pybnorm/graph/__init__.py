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
* Training with running statistics and inference from an inverse standard deviation run on every backend.
* batchnorm_backward without saved statistics takes them from x with an epsilon that must be given
  (`BatchnormBackwardAttributes.set_epsilon`); hipDNN has no such attribute and a constant of 1e-5.
* ``RELU_BWD``: hipDNN's reference and samples take (x, dy), its porting guide and cuDNN (dy, x). `Graph.pointwise`
  takes (x, dy); `Graph.relu_backward` takes cuDNN's names.
* execute takes a workspace with its size, an array or (address, bytes), and checks it.
* One data type for all data tensors that nodes connect, float32, float16 or bfloat16; float32 accumulation.

Intermediate data type. A virtual tensor lies in the workspace in the io data type, also where its own is float32:
only where that makes no difference, and create_execution_plans refuses everything else. It makes none before a ReLU
(rounding and ReLU commute), for the mask of a ReLU gradient (the sign survives rounding, except that a float16 value
below 2**-25 becomes 0), and behind a ReLU of io data. Batch norm followed by an addition is one call that adds
before it rounds. Setting the virtual tensor's data type to the io data type asks for the rounding and is always
served.

``PYBNORM_LOG_LEVEL=off|info|warn|error`` sends the messages of the loggers ``pybnorm.*`` of that level to standard
error, as ``HIPDNN_LOG_LEVEL`` does; unset, they go wherever the application's logging sends them.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm._arguments import ALIGNMENT
from pybnorm._arrays import Buffer
from pybnorm._core import Handle
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError, PybnormError, UnsupportedError, WorkspaceError
from pybnorm.graph.attributes import (
    _DATA_ROLES,
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    HeuristicMode,
    PointwiseAttributes,
    PointwiseMode,
    Tensor,
    TensorAttributes,
    _data_type,
    _log,
    _Method,
    _scalar,
    _tensor,
)
from pybnorm.graph.lowering import _STAGES, _Lowering, _rounded, _Step
from pybnorm.graph.rules import _MISSING, _RULES, _dtype_of, _Node, _Record
from pybnorm.operations.program import Prepared, unsupported

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

_LEVELS = {"off": logging.CRITICAL + 1, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


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
        self._programs: list[Prepared] = []
        self._places: list[list[_Record | None]] = []  # of each program's arrays
        self._virtual: list[_Record] = []
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
        """``y = scale * (x - mean) * inv_variance + bias``, the inverse standard deviation given.

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
            Saved mean and inverse standard deviation, or an epsilon to take them from x with.

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
        self._programs = []
        for step in self._steps:
            try:
                program = step.checked(handle)
            except UnsupportedError as error:
                raise self._unsupported(error.function, f"{step.node}: {error.text}") from error
            self._programs.append(program)
            for copied in program.copies:
                _log.warning("%s: %s copies %s", self._label(), step.node, copied)
            _log.info("%s: %s: %s", self._label(), step.node, ", ".join(program.calls))
        self._stage = 4

    def _unsupported(self, function: str, text: str) -> UnsupportedError:
        assert self._handle is not None
        return unsupported(self._handle, function, text)

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
        self._places = [step.places() for step in self._steps]
        self._virtual = list({r: None for places in self._places for r in places if r is not None and r.virtual})
        for record in self._virtual:
            record.offset = used
            used += _rounded(record.nbytes)
        inner = max((program.nbytes for program in self._programs), default=0)
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
        places = {record: buffer.pointer for record, buffer in buffers.items()}
        for record in self._virtual:
            assert record.offset is not None
            places[record] = base + record.offset
        _log.info("%s: execute on %s", self._label(), handle.backend)
        for index, (step, program) in enumerate(zip(self._steps, self._programs, strict=True)):
            if index in skipped:
                continue
            # Never None where something is needed: it would be memory of the handle's.
            scratch = (base + self._inner, program.nbytes) if program.nbytes else None
            addresses = [0 if record is None else places[record] for record in self._places[index]]
            program.execute(handle, step.function, (0, *addresses), scratch)

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
