"""hipDNN's own Python names: a script of ``hipdnn_frontend`` runs with this import in place of its own.

::

    import pybnorm.hipdnn as hipdnn  # import hipdnn_frontend as hipdnn

The graphs are those of `pybnorm.graph`, on every backend. As in hipDNN a graph's stages return an `Error` object where
`pybnorm.graph` raises, and memory is given by address. What hipDNN has and this package has not (convolutions, matrix
products, engines to choose from) is not here.

* `create_handle` takes the first of MIOpen, cuDNN and oneDNN that works, or the backend that is named.
* Backward without saved statistics takes hipDNN's epsilon, 1e-5.
* ``to_binary`` is the JSON's bytes: of this package, not hipDNN's flat buffer. A compiled plan's is the same: plans are
  made anew in no time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import pybnorm
from pybnorm import _arguments, devices, enums, graph
from pybnorm.errors import ArgumentError, LibraryError, PybnormError, UnsupportedError, VendorError
from pybnorm.graph import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    PointwiseAttributes,
    PointwiseMode,
    Tensor,
    TensorAttributes,
)
from pybnorm.graph.validation import _check_uids

__all__ = [
    "BatchnormAttributes",
    "BatchnormBackwardAttributes",
    "BatchnormInferenceAttributes",
    "BatchnormInferenceAttributesVarianceExt",
    "BuildPlanPolicy",
    "DataType",
    "DeviceBuffer",
    "Error",
    "ErrorCode",
    "Graph",
    "Handle",
    "HeuristicMode",
    "PointwiseAttributes",
    "PointwiseMode",
    "Tensor",
    "TensorAttributes",
    "create_handle",
    "destroy_handle",
    "get_stream",
    "set_stream",
]

HeuristicMode = graph.HeuristicMode
_EPSILON = 1e-5
_ORDER = ("miopen", "cudnn", "onednn")


class DataType:
    """hipDNN's names of data types; the values are `pybnorm.DataType`'s, and None for one that is not set."""

    NOT_SET = None
    FLOAT = enums.DataType.FLOAT32
    HALF = enums.DataType.FLOAT16
    BFLOAT16 = enums.DataType.BFLOAT16
    DOUBLE = enums.DataType.FLOAT64


class BuildPlanPolicy(enum.Enum):
    """Which plans `Graph.build_plans` builds; there is one."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class ErrorCode(enum.Enum):
    """hipDNN's codes that occur here."""

    OK = "OK"
    INVALID_VALUE = "INVALID_VALUE"
    HIPDNN_BACKEND_ERROR = "HIPDNN_BACKEND_ERROR"
    GRAPH_NOT_SUPPORTED = "GRAPH_NOT_SUPPORTED"


class Error:
    """What a stage returns.

    Parameters
    ----------
    code : ErrorCode, default ErrorCode.OK
    err_msg : str, default ""
    """

    def __init__(self, code: ErrorCode = ErrorCode.OK, err_msg: str = "") -> None:
        _arguments.instance(code, ErrorCode, "code", "an ErrorCode")
        self.code = code
        self.err_msg = _arguments.text(err_msg, "err_msg")

    def get_code(self) -> ErrorCode:
        """Its code."""
        return self.code

    def get_message(self) -> str:
        """Its text; empty where nothing is wrong."""
        return self.err_msg

    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return self.code is ErrorCode.OK

    def is_bad(self) -> bool:
        """Whether something is wrong."""
        return not self.is_good()


def _returned(call: Callable[..., object], *arguments: Any) -> Error:
    try:
        call(*arguments)
    except UnsupportedError as error:
        return Error(ErrorCode.GRAPH_NOT_SUPPORTED, str(error))
    except ArgumentError as error:
        return Error(ErrorCode.INVALID_VALUE, str(error))
    except PybnormError as error:
        return Error(ErrorCode.HIPDNN_BACKEND_ERROR, str(error))
    return Error()


class Handle:
    """A backend's handle.

    Parameters
    ----------
    stream : int, default 0
        Address of the stream to run on; 0 for the handle's own.
    backend : str, optional
        The first that works of ``"miopen"``, ``"cudnn"`` and ``"onednn"``.

    Raises
    ------
    ArgumentError
        A wrong `stream` or `backend`.
    LibraryNotFoundError
        No backend works.
    """

    def __init__(self, stream: int = 0, *, backend: str | None = None) -> None:
        stream = _arguments.integer(stream, "stream", 0, 2**64 - 1)
        self._handle: pybnorm.Handle | None = _open(backend)
        if stream:
            self._handle.set_stream(stream)

    def _there(self) -> pybnorm.Handle:
        if self._handle is None:
            raise ArgumentError("handle", "destroyed", "a handle that has not been destroyed")
        return self._handle

    def get(self) -> int:
        """The vendor's handle, as an address."""
        return self._there().pointer

    __int__ = __index__ = get

    def set_stream(self, stream: int) -> None:
        """Run on the stream at this address; 0 is the default one."""
        self._there().set_stream(_arguments.integer(stream, "stream", 0, 2**64 - 1))

    def get_stream(self) -> int:
        """The stream's address."""
        return self._there().stream


def _open(backend: str | None) -> pybnorm.Handle:
    if backend is not None:
        return pybnorm.Handle(backend)
    failures = []
    for name in _ORDER:
        try:
            return pybnorm.Handle(name)
        except (LibraryError, VendorError) as error:
            failures.append(error)
    raise failures[-1]


def create_handle(stream: int = 0, *, backend: str | None = None) -> Handle:
    """A `Handle`; parameters and errors are its.

    Parameters
    ----------
    stream : int, default 0
    backend : str, optional

    Returns
    -------
    Handle
    """
    return Handle(stream, backend=backend)


def _handle(handle: object) -> pybnorm.Handle:
    if issubclass(type(handle), Handle):
        return handle._there()  # type: ignore[attr-defined]
    _arguments.instance(handle, pybnorm.Handle, "handle", "a Handle")
    return handle  # type: ignore[return-value]


def destroy_handle(handle: Handle) -> None:
    """Close a handle; it is not to be used any more.

    Parameters
    ----------
    handle : Handle
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    if handle._handle is not None:
        handle._handle.close()
    handle._handle = None


def set_stream(handle: Handle, stream: int) -> None:
    """Compute on another stream from now on.

    Parameters
    ----------
    handle : Handle
    stream : int
        Its address.
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    handle.set_stream(stream)


def get_stream(handle: Handle) -> int:
    """The stream that a handle computes on.

    Parameters
    ----------
    handle : Handle

    Returns
    -------
    int
        Its address.
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    return handle.get_stream()


class DeviceBuffer:
    """Memory on the device of the backend that `create_handle` takes.

    Parameters
    ----------
    nbytes : int
        At least 1.
    backend : str, optional
        As in `create_handle`.
    """

    def __init__(self, nbytes: int, *, backend: str | None = None) -> None:
        nbytes = _arguments.integer(nbytes, "nbytes", 1)
        with _open(backend) as handle:
            self._device = devices.device_for(handle.library.device_type, handle.device or 0)
        self._memory = self._device.from_numpy(np.zeros(-(-nbytes // 4), np.float32))
        self._nbytes = nbytes

    def ptr(self) -> int:
        """Its address."""
        return self._memory.pointer

    def size(self) -> int:
        """Its bytes."""
        return self._nbytes

    def copy_from_host(self, data: bytes) -> None:
        """Fill it.

        Parameters
        ----------
        data : bytes-like
            Of its size.
        """
        try:
            values = np.frombuffer(data, np.uint8)
        except Exception as error:  # also the object's own
            raise ArgumentError("data", f"{type(data).__name__}: {error}", f"{self._nbytes} bytes") from None
        if values.size != self._nbytes:
            raise ArgumentError("data", f"{values.size} bytes", f"{self._nbytes} bytes")
        self._device.refill(self._memory, values)

    def copy_to_host(self) -> bytes:
        """What is in it, once all work on the device is done, of whichever stream."""
        self._device.synchronize_all()
        return bytes(self._device.to_numpy(self._memory).tobytes()[: self._nbytes])


class Graph(graph.Graph):
    """`pybnorm.graph.Graph` whose stages return an `Error` where that one raises."""

    def validate(self) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.validate`."""
        return _returned(super().validate)

    def checkNoDuplicateTensorIds(self) -> Error:
        """Whether each uid has one tensor."""
        return _returned(_check_uids, self._nodes)

    def topologicallySortGraph(self) -> Error:
        """Nothing: nodes are added in the order of their tensors."""
        return Error()

    def build_operation_graph(self, handle: Any) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_operation_graph`."""
        return _returned(lambda: super(Graph, self).build_operation_graph(_handle(handle)))

    def create_execution_plans(  # type: ignore[override]
        self, modes: Iterable[graph.HeuristicMode | str] = (graph.HeuristicMode.FALLBACK,)
    ) -> Error:
        """`pybnorm.graph.Graph.create_execution_plans`."""
        return _returned(super().create_execution_plans, modes)

    def check_support(self) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.check_support`."""
        return _returned(super().check_support)

    def build_plans(self, policy: BuildPlanPolicy = BuildPlanPolicy.HEURISTICS_CHOICE) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_plans`."""
        _arguments.instance(policy, BuildPlanPolicy, "policy", "a BuildPlanPolicy")
        return _returned(super().build_plans)

    def build_plan_at_index(self, index: int) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_plan_at_index`."""

        def both() -> None:
            self._plan(index)
            graph.Graph.check_support(self)
            graph.Graph.build_plans(self)

        return _returned(both)

    def execute(  # type: ignore[override]
        self, handle: Any, variant_pack: Mapping[Any, Any], workspace: Any = 0
    ) -> Error:
        """`pybnorm.graph.Graph.execute`; `workspace` may be an address, which is trusted."""

        def call() -> None:
            memory = workspace
            if issubclass(type(workspace), int) and not issubclass(type(workspace), bool):
                size = super(Graph, self).get_workspace_size()
                memory = (_arguments.pointer(workspace, "workspace"), size) if workspace and size else None
            super(Graph, self).execute(_handle(handle), variant_pack, memory)

        return _returned(call)

    def execute_plan_at_index(  # type: ignore[override]
        self, handle: Any, variant_pack: Mapping[Any, Any], workspace: Any, index: int
    ) -> Error:
        """`execute` with the plan 0, the only one."""
        wrong = _returned(self._plan, index)
        return self.execute(handle, variant_pack, workspace) if wrong.is_good() else wrong

    def batchnorm_backward(
        self,
        dy: TensorAttributes,
        x: TensorAttributes,
        scale: TensorAttributes,
        attributes: BatchnormBackwardAttributes,
    ) -> tuple[TensorAttributes, TensorAttributes, TensorAttributes]:
        """`pybnorm.graph.Graph.batchnorm_backward`; without saved statistics and epsilon the epsilon is 1e-5."""
        attributes = self._attributes(attributes, BatchnormBackwardAttributes, "BatchnormBackward")
        if attributes.get_mean() is None and attributes.get_inv_variance() is None and attributes.get_epsilon() is None:
            attributes.set_epsilon(_EPSILON)
        return super().batchnorm_backward(dy, x, scale, attributes)

    @staticmethod
    def tensor(tensor: TensorAttributes) -> TensorAttributes:  # type: ignore[override]
        """A copy of a tensor."""
        return graph.Graph().tensor(tensor)

    def from_json(self, *arguments: Any) -> Error:  # type: ignore[override]
        """``from_json(text)``, or ``from_json(handle, text)``, which builds the operation graph too."""
        return self._restored(arguments)

    def to_binary(self) -> bytes:
        """`to_json` as bytes."""
        return self.to_json().encode()

    def from_binary(self, *arguments: Any) -> Error:
        """``from_binary(data)``, or ``from_binary(handle, data)``: as `from_json`."""
        return self._restored(arguments)

    def to_compiled_plan_binary(self) -> bytes:
        """As `to_binary`, of a graph that is built."""
        super().get_workspace_size()  # refuses one that is not
        return self.to_binary()

    def from_compiled_plan_binary(self, handle: Any, data: bytes) -> Error:
        """A graph that is built, from what `to_compiled_plan_binary` gave."""

        def call() -> None:
            graph.Graph.from_json(self, data)
            self._rebuilt(_handle(handle))

        return _returned(call)

    def _restored(self, arguments: tuple[Any, ...]) -> Error:
        def call() -> None:
            if not 1 <= len(arguments) <= 2:
                raise ArgumentError("arguments", f"{len(arguments)}", "a handle if any, then the text or bytes")
            graph.Graph.from_json(self, arguments[-1])
            if len(arguments) == 2:
                graph.Graph.validate(self)
                graph.Graph.build_operation_graph(self, _handle(arguments[0]))

        return _returned(call)

    def _rebuilt(self, handle: pybnorm.Handle) -> None:
        graph.Graph.validate(self)
        graph.Graph.build_operation_graph(self, handle)
        graph.Graph.create_execution_plans(self)
        graph.Graph.check_support(self)
        graph.Graph.build_plans(self)

    # -------- engines: each backend is one

    def set_preferred_engine_id_ext(self, engine_id: int | str | None = None) -> Graph:
        """Kept for `get_preferred_engine_id_ext`; a handle's backend is its only engine."""
        if engine_id is not None and not issubclass(type(engine_id), str):
            engine_id = _arguments.integer(engine_id, "engine_id", -(2**63), 2**63 - 1)
        self._engine = engine_id
        return self

    def get_preferred_engine_id_ext(self) -> int | str | None:
        """What was set."""
        return getattr(self, "_engine", None)

    def get_ranked_engine_ids(
        self, modes: Iterable[graph.HeuristicMode | str] = (graph.HeuristicMode.FALLBACK,)
    ) -> list[int]:
        """``[0]``: there is one engine."""
        self._require(2, "get_ranked_engine_ids")
        return [0]

    def get_execution_plan_engine_id(self) -> int:
        """0: there is one engine."""
        self._require(3, "get_execution_plan_engine_id")
        return 0

    def get_behavior_notes_for_engine(self, engine_id: int) -> list[Any]:
        """None of hipDNN's notes."""
        _arguments.integer(engine_id, "engine_id", 0, 0, "0: there is one engine")
        return []

    def create_execution_plan_ext(self, engine_id: int) -> Error:
        """`create_execution_plans` for the engine 0, the only one."""
        wrong = _returned(self.get_behavior_notes_for_engine, engine_id)
        return self.create_execution_plans() if wrong.is_good() else wrong
