"""hipDNN's own Python names: a script of ``hipdnn_frontend`` runs with this import in place of its own.

::

    import pybnorm.hipdnn as hipdnn  # import hipdnn_frontend as hipdnn

The graphs are those of `pybnorm.graph`, on every backend. As in hipDNN a graph's stages return an `Error` object where
`pybnorm.graph` raises, and memory is given by address. What hipDNN has and this package has not (convolutions, matrix
products, engines to choose from, plugins) is an AttributeError whose sentence says why.

* `create_handle` takes the first of MIOpen, cuDNN and oneDNN that works, or the backend that is named.
* Backward without saved statistics takes hipDNN's epsilon, 1e-5.
* ``to_binary`` is the JSON's bytes: of this package, not hipDNN's flat buffer. A compiled plan's is the same: plans are
  made anew in no time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pybnorm import _arguments, graph
from pybnorm.graph import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    HeuristicMode,
)
from pybnorm.graph.log import _log
from pybnorm.graph.validation import _check_uids
from pybnorm.hipdnn.handles import (
    DeviceBuffer,
    EngineInfo,
    Handle,
    _engine,
    _handle,
    create_handle,
    destroy_handle,
    engine_id_to_name,
    get_dtype_size,
    get_loaded_engine_plugin_paths,
    get_stream,
    set_stream,
)
from pybnorm.hipdnn.types import (
    BehaviorNote,
    BuildPlanPolicy,
    DataType,
    Error,
    ErrorCode,
    PointwiseAttributes,
    PointwiseMode,
    Tensor,
    _raised,
    _refuse,
    _Refusing,
    _returned,
)

__all__ = [
    "BatchnormAttributes", "BatchnormBackwardAttributes", "BatchnormInferenceAttributes",
    "BatchnormInferenceAttributesVarianceExt", "BehaviorNote", "BuildPlanPolicy", "DataType", "DeviceBuffer",
    "EngineInfo", "Error", "ErrorCode", "Graph", "Handle", "HeuristicMode", "PointwiseAttributes", "PointwiseMode",
    "Tensor", "TensorAttributes", "create_handle", "destroy_handle", "engine_id_to_name", "get_dtype_size",
    "get_loaded_engine_plugin_paths", "get_stream", "set_stream",
]  # fmt: skip

TensorAttributes = Tensor
_EPSILON = 1e-5


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _refuse("", name)


def _stage(name: str, told: Callable[..., Any]) -> Any:
    """A method of `pybnorm.graph.Graph` whose errors are told hipDNN's way."""
    method = getattr(graph.Graph, name)

    @functools.wraps(method)
    def stage(self: Graph, *arguments: Any, **options: Any) -> Any:
        return told(functools.partial(method, self, *arguments, **options))

    stage.__doc__ = f"`pybnorm.graph.Graph.{name}`."
    return stage


class Graph(_Refusing, graph.Graph):
    """`pybnorm.graph.Graph` whose stages return an `Error` where that one raises.

    Examples
    --------
    >>> import pybnorm.hipdnn as hipdnn
    >>> graph = hipdnn.Graph().set_io_data_type(hipdnn.DataType.FLOAT).set_intermediate_data_type(hipdnn.DataType.FLOAT)
    >>> graph = graph.set_compute_data_type(hipdnn.DataType.FLOAT)
    >>> x = graph.tensor(hipdnn.Tensor().set_uid(1).set_dim([1, 1, 1, 2]).set_stride([2, 2, 2, 1]))
    >>> y = graph.relu(x).set_uid(2).set_output(True)
    >>> handle, (given, result) = hipdnn.create_handle(), (hipdnn.DeviceBuffer(8) for _ in range(2))
    >>> given.copy_from_host(np.float32([-1, 2]).tobytes())
    >>> graph.build(handle).is_good(), graph.execute(handle, {1: given, 2: result}).is_good()
    (True, True)
    >>> np.frombuffer(result.copy_to_host(), np.float32)
    array([0., 2.], dtype=float32)
    >>> hipdnn.destroy_handle(handle)
    """

    _tensor_type = Tensor

    validate = _stage("validate", _returned)
    create_execution_plans = _stage("create_execution_plans", _returned)
    check_support = _stage("check_support", _returned)
    get_workspace_size = _stage("get_workspace_size", _raised)
    get_plan_name = _stage("get_plan_name", _raised)
    to_json = _stage("to_json", _raised)

    def checkNoDuplicateTensorIds(self) -> Error:
        """Say whether each uid has one tensor."""
        return _returned(_check_uids, self._nodes)

    def topologicallySortGraph(self) -> Error:
        """Do nothing: nodes are added in the order of their tensors."""
        return Error()

    def build_operation_graph(self, handle: Any) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_operation_graph`."""
        return _returned(lambda: super(Graph, self).build_operation_graph(_handle(handle)))

    def build(  # type: ignore[override]
        self, handle: Any, modes: Iterable[graph.HeuristicMode | str] = (graph.HeuristicMode.FALLBACK,)
    ) -> Error:
        """`pybnorm.graph.Graph.build`."""
        return _returned(lambda: super(Graph, self).build(_handle(handle), modes))

    def build_plans(self, policy: BuildPlanPolicy = BuildPlanPolicy.HEURISTICS_CHOICE) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_plans`."""
        _arguments.instance(policy, BuildPlanPolicy, "policy", "a BuildPlanPolicy")
        return _returned(super().build_plans)

    def build_plan_at_index(self, plan_index: int) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_plan_at_index`."""

        def both() -> None:
            self._plan(plan_index)
            graph.Graph.check_support(self)
            graph.Graph.build_plans(self)

        return _returned(both)

    def get_plan_name_at_index(self, plan_index: int) -> str:
        """`pybnorm.graph.Graph.get_plan_name_at_index`."""
        return str(_raised(super().get_plan_name_at_index, plan_index))

    def get_workspace_size_plan_at_index(self, plan_index: int) -> int:
        """`pybnorm.graph.Graph.get_workspace_size_plan_at_index`."""
        return int(_raised(super().get_workspace_size_plan_at_index, plan_index))

    def get_autotune_workspace_size(self) -> int:
        """`get_workspace_size`: there is one plan."""
        return self.get_workspace_size()

    def execute(  # type: ignore[override]
        self, handle: Any, variant_pack: Mapping[Any, Any], workspace: Any = 0
    ) -> Error:
        """`pybnorm.graph.Graph.execute`; memory may be a `DeviceBuffer`, or an address, which is trusted."""

        def call() -> None:
            _arguments.instance(variant_pack, Mapping, "variant_pack", "a mapping from uids to arrays or addresses")
            pack = {_plain(key): _plain(memory) for key, memory in variant_pack.items()}
            place = _plain(workspace)
            if type(place) is int:
                size = graph.Graph.get_workspace_size(self)
                place = (_arguments.pointer(place, "workspace"), size) if place and size else None
            super(Graph, self).execute(_handle(handle), pack, place)

        return _returned(call)

    def execute_plan_at_index(  # type: ignore[override]
        self, handle: Any, variant_pack: Mapping[Any, Any], workspace: Any, plan_index: int
    ) -> Error:
        """`execute` with the plan 0, the only one."""
        wrong = _returned(self._plan, plan_index)
        return self.execute(handle, variant_pack, workspace) if wrong.is_good() else wrong

    def batchnorm_backward(
        self, dy: graph.TensorAttributes, x: graph.TensorAttributes, scale: graph.TensorAttributes,
        attributes: BatchnormBackwardAttributes,
    ) -> tuple[graph.TensorAttributes, graph.TensorAttributes, graph.TensorAttributes]:  # fmt: skip
        """`pybnorm.graph.Graph.batchnorm_backward`; without saved statistics and epsilon the epsilon is 1e-5."""
        _arguments.instance(attributes, BatchnormBackwardAttributes, "attributes", "a BatchnormBackwardAttributes")
        if attributes.get_epsilon() is None:
            attributes = copy.copy(attributes).set_epsilon(_EPSILON)
        return super().batchnorm_backward(dy, x, scale, attributes)

    @staticmethod
    def tensor(tensor: graph.TensorAttributes) -> graph.TensorAttributes:  # type: ignore[override]
        """A copy of a tensor."""
        return graph.Graph().tensor(tensor)

    def from_json(self, handle: Any = None, json_string: Any = None) -> Error:  # type: ignore[override]
        """``from_json(json_string)``, or ``from_json(handle, json_string)``, which builds the operation graph too."""
        return self._restored(handle, json_string)

    def to_binary(self) -> bytes:
        """`to_json` as bytes."""
        return self.to_json().encode()

    def from_binary(self, handle: Any = None, data: Any = None) -> Error:
        """``from_binary(data)``, or ``from_binary(handle, data)``: as `from_json`."""
        return self._restored(handle, data)

    def to_compiled_plan_binary(self) -> bytes:
        """Do as `to_binary`, for a graph that is built."""
        self.get_workspace_size()  # refuses one that is not
        return self.to_binary()

    def from_compiled_plan_binary(self, handle: Any, data: bytes) -> Error:
        """A graph that is built, from what `to_compiled_plan_binary` gave."""
        wrong = self.from_binary(data)
        return self.build(handle) if wrong.is_good() else wrong

    def _restored(self, handle: Any, text: Any) -> Error:
        if text is None:  # by position it comes first
            handle, text = None, handle

        def call() -> None:
            graph.Graph.from_json(self, text)
            if handle is not None:
                graph.Graph.validate(self)
                graph.Graph.build_operation_graph(self, _handle(handle))

        return _returned(call)

    # -------- engines: each backend is one

    def set_preferred_engine_id_ext(self, engineId: int | str | None = None) -> Graph:
        """Keep an engine for `get_preferred_engine_id_ext`; a handle's backend is its only engine."""
        if engineId is not None and not issubclass(type(engineId), str):
            engineId = _arguments.integer(engineId, "engineId", -(2**63), 2**63 - 1)
        self._preferred = engineId
        return self

    def get_preferred_engine_id_ext(self) -> int | str | None:
        """The engine that was set."""
        return self.__dict__.get("_preferred")

    def get_ranked_engine_ids(
        self, modes: Iterable[graph.HeuristicMode | str] = (graph.HeuristicMode.FALLBACK,)
    ) -> list[int]:
        """``[0]``: there is one engine."""
        _raised(self._require, 2, "get_ranked_engine_ids")
        return [0]

    def get_execution_plan_engine_id(self) -> int:
        """0: there is one engine."""
        _raised(self._require, 3, "get_execution_plan_engine_id")
        return 0

    def get_behavior_notes_for_engine(self, engine_id: int) -> list[BehaviorNote]:
        """Give none of hipDNN's notes."""
        _raised(_engine, engine_id)
        return []

    def get_knobs_for_engine(self, engine_id: int) -> list[Any]:
        """Give an empty list: there are no knobs."""
        _raised(_engine, engine_id)
        return []

    def get_knob_lookup_for_engine(self, engine_id: int) -> dict[str, Any]:
        """Give an empty dictionary: there are no knobs."""
        _raised(_engine, engine_id)
        return {}

    def create_execution_plan_ext(self, engine_id: int, knob_settings: Sequence[Any] = ()) -> Error:
        """`create_execution_plans` for the engine 0, the only one; knobs are ignored with a warning: it has none."""
        wrong = _returned(_engine, engine_id)
        if wrong.is_bad():
            return wrong
        if _arguments.items(knob_settings, "knob_settings", "a sequence"):
            _log.warning("%s: knob settings are ignored: there are no knobs", self._label())
        return self.create_execution_plans()


def _plain(given: Any) -> Any:
    """An integer of any type as int, a `DeviceBuffer` as its address."""
    if issubclass(type(given), DeviceBuffer):
        return given.ptr()
    number = _arguments.index(given)
    return given if number is None else number
