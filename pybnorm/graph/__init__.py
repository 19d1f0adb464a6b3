"""Graphs of batch norm with the API of hipDNN and of the cuDNN frontend, on every backend.

Describe tensors and nodes, go through hipDNN's stages, then execute::

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

`Graph.build` does all five stages. Names are those of hipDNN's frontend (``hipdnn_frontend::graph``); failures are
exceptions instead of error objects. Nodes run in order through `pybnorm.operations`, on the handle's stream, without
synchronisation and without a branch on the vendor.

This module differs from hipDNN, or decides what hipDNN leaves open:

* The running variance takes the unbiased batch variance, as in hipDNN's reference; hipDNN's README says plain variance,
  which `BatchnormAttributes.set_unbiased` (False) asks for.
  If next is the same memory as prev, it is updated in place. Otherwise prev is copied to next first.
* Parameters and statistics without a data type are float32. hipDNN would give them the io data type, which its MIOpen
  provider refuses.
* Training with running statistics, and inference from an inverse standard deviation, run on every backend.
* batchnorm_backward without saved statistics computes them from x. It needs an epsilon
  (`BatchnormBackwardAttributes.set_epsilon`); hipDNN has no such attribute and uses 1e-5.
* ``RELU_BWD``: hipDNN's reference and samples take (x, dy), its porting guide and cuDNN (dy, x). `Graph.pointwise`
  takes (x, dy); `Graph.relu_backward` takes cuDNN's names.
* peer_stats join ranks, not devices of one process: `Graph.set_communicator` has them exchange messages as
  `pybnorm.sync` does, and dscale and dbias stay sums over the local data.
* execute takes a workspace with its size, as an array or (address, bytes), and checks it.
* A ReLU with clips or a slope is some ten calls, and as many tensors of workspace: fill, axpby and relu_backward, which
  picks elements by a sign. Its results are exact but for the rounding of clips and of the slope's product. At the upper
  clip itself the gradient is dy.
* All data tensors that nodes connect have one data type: float32, float16 or bfloat16. Accumulation is float32.

Intermediate data type. A virtual tensor is stored in the workspace in the io data type, even if its own data type is
float32. That is allowed only where it does not change results; create_execution_plans refuses the other cases. Results
do not change before a ReLU (rounding and ReLU commute), in the mask of a ReLU gradient (rounding keeps the sign, except
that a float16 value below 2**-25 becomes 0), and after a ReLU of io data. Batch norm followed by an addition is one
call, which adds before it rounds. To ask for the rounding, set the virtual tensor's data type to the io data type.

``PYBNORM_LOG_LEVEL=off|info|warn|error|fatal``, or without it ``HIPDNN_LOG_LEVEL``, sends messages of the loggers
``pybnorm.*`` from this level on to standard error. Without both they go where the application's logging sends them.

`Graph.to_json` and `Graph.from_json` speak hipDNN's JSON. `pybnorm.hipdnn` has hipDNN's own Python names, error objects
and handles: a script needs another import only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pybnorm import _arguments
from pybnorm._arguments import ALIGNMENT
from pybnorm._arrays import Buffer, note_written
from pybnorm._core import Handle
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError, UnsupportedError, WorkspaceError
from pybnorm.graph.attributes import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    HeuristicMode,
    PointwiseAttributes,
    PointwiseMode,
    Tensor,
    TensorAttributes,
    _member,
)
from pybnorm.graph.description import _Description
from pybnorm.graph.log import _configure_logging, _log, _staged
from pybnorm.graph.lowering import _STAGES, _Exchange, _Lowering, _Step
from pybnorm.graph.validation import _dtype_of, _peers, _Record, _tensors, _validated, _with_uids
from pybnorm.operations.program import Prepared, region, unsupported
from pybnorm.sync.communicators import Communicator, _connect

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


class Graph(_Description):
    """A graph of batch-norm and elementwise nodes.

    Examples
    --------
    >>> graph = pybnorm.graph.Graph().set_io_data_type("float").set_intermediate_data_type("float")
    >>> graph = graph.set_compute_data_type("float")
    >>> x = graph.tensor(name="x", dim=(1, 1, 1, 3), stride=(3, 3, 3, 1))
    >>> y = graph.relu(x)
    >>> y = y.set_output(True)
    >>> result = np.empty((1, 1, 1, 3), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     graph.build(handle)
    ...     graph.execute(handle, {x: np.float32([[[[-1, 0, 2]]]]), y: result})
    >>> result.ravel()
    array([0., 0., 2.], dtype=float32)

    ``build`` does all stages; one by one, for a graph from JSON:

    >>> copy = pybnorm.graph.Graph()
    >>> copy.from_json(graph.to_json())
    >>> copy.validate()
    >>> with pybnorm.Handle("onednn") as handle:
    ...     copy.build_operation_graph(handle)
    ...     copy.create_execution_plans()
    ...     copy.check_support()
    ...     copy.build_plans()
    ...     copy.build_plan_at_index(0)  # the same: there is one plan
    ...     memory = {x.get_uid(): np.float32([[[[1, 0, -2]]]]), y.get_uid(): result}
    ...     copy.execute_plan_at_index(handle, memory, None, 0)
    >>> result.ravel()
    array([1., 0., 0.], dtype=float32)

    Nodes take tensors and return their outputs:

    >>> from pybnorm.graph import BatchnormAttributes, BatchnormBackwardAttributes, BatchnormInferenceAttributes
    >>> from pybnorm.graph import BatchnormInferenceAttributesVarianceExt, PointwiseAttributes
    >>> scale, bias, mean, var = (graph.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1)) for _ in range(4))
    >>> y, saved, inverse, _, _ = graph.batchnorm(x, scale, bias, BatchnormAttributes().set_epsilon(1e-5))
    >>> statistics = BatchnormBackwardAttributes().set_saved_mean_and_inv_variance(saved, inverse)
    >>> dx, dscale, dbias = graph.batchnorm_backward(graph.tensor_like(x), x, scale, statistics)
    >>> y = graph.batchnorm_inference(x, mean, inverse, scale, bias, BatchnormInferenceAttributes())
    >>> given = BatchnormInferenceAttributesVarianceExt()
    >>> z = graph.add(y, graph.batchnorm_inference_variance_ext(x, mean, var, scale, bias, 1e-5, given))
    >>> positive = graph.pointwise(z, PointwiseAttributes().set_mode("relu_fwd"))
    >>> graph.relu_backward(dx, z).get_is_virtual()
    True
    """

    def __init__(self) -> None:
        _configure_logging()
        super().__init__()
        self._handle: Handle
        self._storage: dict[TensorAttributes, DataType] = {}
        self._records: dict[TensorAttributes, _Record] = {}
        self._by_uid: dict[int, _Record | None] = {}  # None: passed by value
        self._communicator: Communicator | None = None
        self._peers: set[Any] = set()  # their uids and tensors, which take no memory
        self._steps: list[_Step] = []
        self._in_place: list[tuple[int, _Record, _Record]] = []
        self._programs: list[Prepared | _Exchange] = []
        self._virtual: dict[_Record, int] = {}  # their offsets in the workspace
        self._inner = 0
        self._workspace_size = 0

    def _label(self) -> str:
        return f"graph {self._name!r}" if self._name else "graph"

    def _checked(self, handle: Any) -> Handle:
        _arguments.instance(handle, Handle, "handle", "a Handle")
        if handle.closed:
            raise ClosedError("handle")
        return handle

    # -------- ranks

    def set_communicator(self, communicator: Any) -> Graph:
        """Join the ranks of nodes with peer_stats: their statistics are those of all ranks' data.

        Parameters
        ----------
        communicator : object
            As `pybnorm.sync.SyncBatchNorm` takes it.

        Notes
        -----
        All ranks build and execute the same nodes in the same order: `check_support` and `execute` are collectives
        then, and `execute` takes the handle that the graph was built with. The tensors of peer_stats say only that a
        node is joined: they take no memory, and a variant pack may leave them out.
        """
        self._communicator = _connect(communicator)
        self._stage = 0
        return self

    # -------- validate

    @_staged(0, 1)
    def validate(self) -> None:
        """Check the graph, and infer the shapes, strides and data types of outputs."""
        self._stage = 0
        self._storage = _validated(self._nodes, self._io, self._intermediate, self._compute)
        for node in self._nodes:
            if _peers([node]) and self._communicator is None:
                raise ArgumentError(f"peer_stats of {node.name}", "tensors", "none without set_communicator")
        _log.info("%s: validated: %s", self._label(), ", ".join(f"{n.name} ({n.kind})" for n in self._nodes))

    # -------- build

    def _require(self, stage: int, method: str) -> None:
        if self._stage < stage:
            allowed = f"one that is {_STAGES[stage]} before {method}; build(handle) does all stages"
            raise ArgumentError("graph", f"one that is {_STAGES[self._stage]}", allowed)

    @_staged(1, 2)
    def build_operation_graph(self, handle: Handle) -> None:
        """Fix the graph for a backend: assign uids, and ignore later changes of its tensors.

        Parameters
        ----------
        handle : Handle
            Any handle of the backend that will execute the graph.
        """
        self._handle = handle = self._checked(handle)
        by_value = [t for t in _with_uids(self._nodes) if t.get_pass_by_value()]
        tensors, peers = _tensors(self._nodes), _peers(self._nodes)
        data = {t for node in self._nodes for t in node.data()}
        outputs = {t for node in self._nodes for t in node.outputs.values()}
        self._records = {t: _Record(t, self._storage[t], t not in data, t in outputs) for t in tensors}
        self._by_uid = {r.uid: r for r in self._records.values()}
        self._by_uid |= dict.fromkeys((t.get_uid() for t in by_value), None)
        self._peers = {*peers, *(t.get_uid() for t in peers)}
        _log.info("%s: %d tensors, %d nodes for %s", self._label(), len(tensors), len(self._nodes), handle.backend)

    @_staged(2, 3)
    def create_execution_plans(self, modes: Iterable[HeuristicMode | str] = (HeuristicMode.FALLBACK,)) -> None:
        """Choose the calls. There is one plan, whatever the modes."""
        allowed = "a sequence of " + ", ".join(f"HeuristicMode.{m.name}" for m in HeuristicMode)
        given: Any = (modes,) if issubclass(type(modes), (str, HeuristicMode)) else modes
        for mode in _arguments.items(given, "modes", allowed):
            _member(HeuristicMode, mode, "modes", allowed)
        lowering = _Lowering(self._nodes, self._records)
        for tensor in lowering.unfaithful():
            record = self._records[tensor]
            text = (
                f"virtual tensor {record.name!r} of data type {_dtype_of(tensor).short} would be stored in "
                f"{record.dtype.short}, the data type of the tensors around it, and rounded once more than its data "
                f"type says; set its data type to {record.dtype.short} to ask for that"
            )
            raise unsupported(self._handle, "create_execution_plans", text)
        lowering.lower()
        self._steps, self._in_place = lowering.steps, lowering.in_place
        _log.info("%s: 1 plan: %s", self._label(), ", ".join(f"{s.node}: {s.recipe.name}" for s in self._steps))

    def get_execution_plan_count(self) -> int:
        """1, once create_execution_plans has been called."""
        return 1 if self._stage >= 3 else 0

    def get_plan_name(self) -> str:
        """The backend and the operations of the plan, in order, such as ``"onednn: axpby, forward_training"``."""
        self._require(3, "get_plan_name")
        return f"{self._handle.backend}: {', '.join(step.recipe.name for step in self._steps)}"

    def get_plan_name_at_index(self, index: int) -> str:
        """`get_plan_name` of the plan 0, the only one."""
        self._plan(index)
        return self.get_plan_name()

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """`get_workspace_size` of the plan 0, the only one."""
        self._plan(index)
        return self.get_workspace_size()

    def build_plan_at_index(self, index: int) -> None:
        """`check_support` and `build_plans` of the plan 0, the only one."""
        self._plan(index)
        Graph.check_support(self)
        Graph.build_plans(self)

    def execute_plan_at_index(
        self, handle: Handle, variant_pack: Mapping[int | TensorAttributes, Any], workspace: Any, index: int
    ) -> None:
        """`execute` with the plan 0, the only one; raises as it does."""
        self._plan(index)
        self.execute(handle, variant_pack, workspace)

    @staticmethod
    def _plan(index: int) -> None:
        _arguments.integer(index, "index", 0, 0, "0: there is one plan")

    @_staged(3, 4)
    def check_support(self) -> None:
        """Check every call of the plan with the backend."""
        handle = self._checked(self._handle)
        self._programs = []
        for step in self._steps:
            try:
                program = step.ready(handle, self._communicator)
            except UnsupportedError as error:
                raise unsupported(handle, error.function, f"{step.node}: {error.text}") from error
            self._programs.append(program)
            for copied in program.copies:
                _log.warning("%s: %s copies %s", self._label(), step.node, copied)
            _log.info("%s: %s: %s", self._label(), step.node, ", ".join(program.calls))

    @_staged(4, 5)
    def build_plans(self) -> None:
        """Lay out the workspace."""
        used, self._virtual = 0, {}
        for record in (r for step in self._steps for r in step.places):
            if record is not None and record.virtual and record not in self._virtual:
                self._virtual[record] = used
                used += _rounded(_arguments.span(record.dims, record.strides) * record.dtype.itemsize)
        inner = max((program.nbytes for program in self._programs), default=0)
        self._inner = used
        # 63 bytes more: the caller's memory may start anywhere, and everything in it is aligned to 64.
        self._workspace_size = used + inner + ALIGNMENT - 1 if used + inner else 0
        _log.info("%s: built, %d bytes of workspace", self._label(), self._workspace_size)

    def build(self, handle: Handle, modes: Iterable[HeuristicMode | str] = (HeuristicMode.FALLBACK,)) -> None:
        """Do all five stages: validate, build_operation_graph, create_execution_plans, check_support, build_plans."""
        Graph.validate(self)  # not a subclass's, which may return its errors
        Graph.build_operation_graph(self, handle)
        Graph.create_execution_plans(self, modes)
        Graph.check_support(self)
        Graph.build_plans(self)

    @_staged(5)
    def get_workspace_size(self) -> int:
        """Bytes of workspace that execute needs: virtual tensors and what the calls ask for."""
        return self._workspace_size

    # -------- execute

    @_staged(5)
    def execute(
        self, handle: Handle, variant_pack: Mapping[int | TensorAttributes, Any], workspace: Any = None
    ) -> None:
        """Run the built graph on the handle's stream.

        Parameters
        ----------
        handle : Handle
            Of the backend that the graph was built for.
        variant_pack : mapping
            From uid, or tensor, to memory: an array of any framework, or an address. It has every tensor that is
            neither virtual nor passed by value, and no other. An array must have the tensor's data type, shape and
            strides; parameters may leave out axes of length 1. An address is trusted.
        workspace : array or (int, int), optional
            At least `get_workspace_size` bytes on the handle's device: an array, or address and bytes.
        """
        handle = self._checked(handle)
        if handle.backend != self._handle.backend:
            allowed = f"one of {self._handle.backend}, which the graph was built for"
            raise ArgumentError("handle", f"one of backend {handle.backend}", allowed)
        _arguments.instance(variant_pack, Mapping, "variant_pack", "a mapping from uids to arrays or addresses")
        pack = variant_pack
        if self._peers:
            pack = {key: memory for key, memory in variant_pack.items() if key not in self._peers}
        buffers = _bound(handle, pack, self._records, self._by_uid)
        address, size = handle.memory(workspace)
        if size < self._workspace_size:
            allowed = f"at least {self._workspace_size} bytes on the handle's device"
            raise WorkspaceError("workspace", f"{size} bytes", allowed)
        same = {i: prev for i, prev, after in self._in_place if buffers[prev].pointer == buffers[after].pointer}
        regions: dict[bool, list[_arguments.Region]] = {True: [], False: []}
        for record, buffer in buffers.items():
            if record not in same.values():  # else it is updated in place
                regions[record.output].append(region(f"{record.name} (uid {record.uid})", buffer))
        if self._workspace_size:
            regions[True].append(_arguments.Region("workspace", address, (self._workspace_size,), (1,), 1))
        _arguments.disjoint(regions[True], regions[False])
        base = _rounded(address)
        places = {record: buffer.pointer for record, buffer in buffers.items()}
        places |= {record: base + offset for record, offset in self._virtual.items()}
        _log.info("%s: execute on %s", self._label(), handle.backend)
        for index, (step, program) in enumerate(zip(self._steps, self._programs, strict=True)):
            if index in same:
                continue
            # Never None if memory is needed: with None a CPU backend would use the handle's.
            scratch = (base + self._inner, program.nbytes) if program.nbytes else None
            addresses = (0 if record is None else places[record] for record in step.places)
            program.execute(handle, step.recipe.name, (0, *addresses), scratch)
        note_written([buffer for record, buffer in buffers.items() if record.output])


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------- the variant pack


def _bound(
    handle: Handle,
    variant_pack: Mapping[Any, Any],
    records: Mapping[TensorAttributes, _Record],
    by_uid: Mapping[int, _Record | None],
) -> dict[_Record, Buffer]:
    """The memory of every tensor that is neither virtual nor passed by value."""
    own = [record for record in records.values() if not record.virtual]
    buffers: dict[_Record, Buffer] = {}
    for key, value in variant_pack.items():
        if issubclass(type(key), TensorAttributes):
            if key not in records:
                raise ArgumentError("variant_pack", f"key {key!r}", "tensors of the graph that have memory")
            record: _Record | None = records[key]
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
