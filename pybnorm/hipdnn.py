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
import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

import pybnorm
from pybnorm import _arguments, devices, enums, graph
from pybnorm.errors import ArgumentError, ArgumentTypeError, LibraryError, PybnormError, UnsupportedError, VendorError
from pybnorm.graph import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    HeuristicMode,
)
from pybnorm.graph.log import _log
from pybnorm.graph.validation import _check_uids

__all__ = [
    "BatchnormAttributes", "BatchnormBackwardAttributes", "BatchnormInferenceAttributes",
    "BatchnormInferenceAttributesVarianceExt", "BehaviorNote", "BuildPlanPolicy", "DataType", "DeviceBuffer",
    "EngineInfo", "Error", "ErrorCode", "Graph", "Handle", "HeuristicMode", "PointwiseAttributes", "PointwiseMode",
    "Tensor", "TensorAttributes", "create_handle", "destroy_handle", "engine_id_to_name", "get_dtype_size",
    "get_loaded_engine_plugin_paths", "get_stream", "set_stream",
]  # fmt: skip


_ORDER = ("miopen", "cudnn", "onednn")
_SIZES = {"float32": 4, "float16": 2, "float64": 8, "int32": 4, "uint8": 1, "int8": 1}
_EPSILON = 1e-5
_HERE = (
    "this package has batch norm, ReLU and addition; a handle's backend is its only engine, with one plan, without "
    "knobs and plugins, and pybnorm.devices has streams and times"
)


def _refuse(owner: str, name: str) -> NoReturn:
    """Raise the `AttributeError` of a name that is absent; `owner` is a class, or empty for the module."""
    shown = f"{owner}.{name}" if owner else name
    raise AttributeError(f"pybnorm.hipdnn.{shown} is not here: {_HERE}")


class _Chosen(type):
    """Metaclass of an enumeration's names, some of which are here: any other is refused by a sentence."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            here = ", ".join(member for member in vars(cls) if member.isupper())
            raise AttributeError(f"pybnorm.hipdnn.{cls.__name__}.{name} is not here; these are: {here}")


class _Refusing:
    """Objects whose absent attributes are refused by a sentence."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            _refuse(type(self).__name__, name)


class DataType(metaclass=_Chosen):
    """hipDNN's names of data types; the values are `pybnorm.DataType`'s, and None for one that is not set."""

    NOT_SET = None
    FLOAT = enums.DataType.FLOAT32
    HALF = enums.DataType.FLOAT16
    BFLOAT16 = enums.DataType.BFLOAT16
    DOUBLE = enums.DataType.FLOAT64


class PointwiseMode(metaclass=_Chosen):
    """hipDNN's names of elementwise operations; the values are `pybnorm.graph.PointwiseMode`'s."""

    ADD = graph.PointwiseMode.ADD
    RELU_BWD = graph.PointwiseMode.RELU_BWD
    RELU_FWD = graph.PointwiseMode.RELU_FWD


class BuildPlanPolicy(enum.Enum):
    """The plans that `Graph.build_plans` builds; there is one."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class BehaviorNote(enum.Enum):
    """hipDNN's notes on engines; `Graph.get_behavior_notes_for_engine` has none of them."""

    RUNTIME_COMPILATION = 0
    REQUIRES_LAYOUT_TRANSFORM = 1
    SUPPORTS_GRAPH_CAPTURE = 2
    EXTERNAL_LIBRARY_DEPENDENCY = 3
    SUPPORTS_EXECUTION_PLAN_SERIALIZATION = 4


class ErrorCode(enum.Enum):
    """hipDNN's codes, of which OK, INVALID_VALUE, HIPDNN_BACKEND_ERROR and GRAPH_NOT_SUPPORTED occur here."""

    OK = "OK"
    INVALID_VALUE = "INVALID_VALUE"
    HIPDNN_BACKEND_ERROR = "HIPDNN_BACKEND_ERROR"
    ATTRIBUTE_NOT_SET = "ATTRIBUTE_NOT_SET"
    GRAPH_NOT_SUPPORTED = "GRAPH_NOT_SUPPORTED"
    SHAPE_DEDUCTION_FAILED = "SHAPE_DEDUCTION_FAILED"
    INVALID_TENSOR_NAME = "INVALID_TENSOR_NAME"
    INVALID_VARIANT_PACK = "INVALID_VARIANT_PACK"
    GRAPH_EXECUTION_PLAN_CREATION_FAILED = "GRAPH_EXECUTION_PLAN_CREATION_FAILED"
    GRAPH_EXECUTION_FAILED = "GRAPH_EXECUTION_FAILED"
    HEURISTIC_QUERY_FAILED = "HEURISTIC_QUERY_FAILED"
    UNSUPPORTED_GRAPH_FORMAT = "UNSUPPORTED_GRAPH_FORMAT"
    CUDA_API_FAILED = "CUDA_API_FAILED"
    CUDNN_BACKEND_API_FAILED = "CUDNN_BACKEND_API_FAILED"
    INVALID_CUDA_DEVICE = "INVALID_CUDA_DEVICE"
    HANDLE_ERROR = "HANDLE_ERROR"
    NVRTC_COMPILATION_FAILED = "NVRTC_COMPILATION_FAILED"


class Error:
    """The result of a stage.

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
        """Give its code."""
        return self.code

    def get_message(self) -> str:
        """Give its text; empty where nothing is wrong."""
        return self.err_msg

    def is_good(self) -> bool:
        """Say whether nothing is wrong."""
        return self.code is ErrorCode.OK

    def is_bad(self) -> bool:
        """Say whether something is wrong."""
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


class _StateError(ArgumentError, RuntimeError):
    """Raised where hipDNN's Python raises a RuntimeError."""


def _raised(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns; its errors are also hipDNN's RuntimeError, but for those of types."""
    try:
        return call(*arguments)
    except ArgumentTypeError:
        raise
    except ArgumentError as error:
        raise _StateError(error.argument, error.value, error.allowed) from None


class Tensor(graph.TensorAttributes):
    """`pybnorm.graph.TensorAttributes`, with hipDNN's `validate` and its data types of scalars."""

    def set_value(self, value: float, data_type: object = None) -> Tensor:
        """Do as `pybnorm.graph.TensorAttributes.set_value`; the default data type is the tensor's, else FLOAT."""
        given = (data_type, self.get_data_type(), enums.DataType.FLOAT32)
        super().set_value(value, next(dtype for dtype in given if dtype is not None))
        return self

    def validate(self) -> Error:
        """Say whether it has dims, as many strides, and a data type."""

        def check() -> None:
            if not self.get_dim():
                raise ArgumentError("dim", self.get_dim(), "the shape, by set_dim")
            if len(self.get_stride()) != len(self.get_dim()):
                raise ArgumentError("stride", self.get_stride(), f"{len(self.get_dim())} strides, by set_stride")
            if self.get_data_type() is None:
                raise ArgumentError("data_type", None, "one, by set_data_type")

        return _returned(check)


class PointwiseAttributes(_Refusing, graph.PointwiseAttributes):
    """`pybnorm.graph.PointwiseAttributes`."""


TensorAttributes = Tensor


# ---------------------------------------------------------------- handles and memory by address


class EngineInfo(NamedTuple):
    """The result of `Handle.get_engine_info`."""

    engine_id: int
    engine_name: str
    plugin_name: str
    version: str
    type: str


class Handle:
    """A backend's handle.

    Parameters
    ----------
    stream : int, default 0
        Address of the stream to run on; 0 for the handle's own.
    backend : str, optional
        The first that works of ``"miopen"``, ``"cudnn"`` and ``"onednn"``.
    """

    def __init__(self, stream: int = 0, *, backend: str | None = None) -> None:
        stream = _arguments.integer(stream, "stream", 0, 2**64 - 1)
        opened = _open(backend)
        self._handle: pybnorm.Handle | None = opened
        self._closing = weakref.finalize(self, opened.close)  # hipDNN's scripts leave handles behind
        if stream:
            self._handle.set_stream(stream)

    def _there(self) -> pybnorm.Handle:
        if self._handle is None:
            raise _StateError("handle", "destroyed", "a handle that has not been destroyed")
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

    def get_engine_info(self, engine_id: int) -> EngineInfo:
        """Describe the engine 0: the backend, and its library's version."""
        _engine(engine_id)
        library = self._there().library
        return EngineInfo(0, library.backend, library.label, ".".join(map(str, library.version)), "vendor library")

    def engine_id_to_name(self, engine_id: int) -> str:
        """The backend, for the engine 0."""
        return self.get_engine_info(engine_id).engine_name

    def get_loaded_engine_plugin_paths(self) -> list[str]:
        """The file of the backend's library."""
        return [self._there().library.path]

    def __repr__(self) -> str:
        handle = self._handle
        return f"<Handle {'destroyed' if handle is None else f'{handle.backend} at {handle.pointer:#x}'}>"


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


create_handle = Handle


def _engine(engine_id: object) -> None:
    _arguments.integer(engine_id, "engine_id", 0, 0, "0: there is one engine")


def engine_id_to_name(engine_id: int) -> str:
    """The name of an engine that every handle has: an empty string, because there is none.

    Parameters
    ----------
    engine_id : int

    Returns
    -------
    str

    See Also
    --------
    Handle.engine_id_to_name
    """
    _arguments.integer(engine_id, "engine_id", -(2**63), 2**63 - 1)
    return ""


def get_loaded_engine_plugin_paths(handle: Handle) -> list[str]:
    """The file of the library of a handle's backend.

    Parameters
    ----------
    handle : Handle

    Returns
    -------
    list of str
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    return handle.get_loaded_engine_plugin_paths()


def get_dtype_size(dtype: Any) -> int:
    """Bytes of an element.

    Parameters
    ----------
    dtype : dtype or str
        Of NumPy: float16, float32, float64, int8, int32 or uint8.

    Returns
    -------
    int
    """
    try:
        name = np.dtype(dtype).name
    except Exception:  # also the object's own
        name = ""
    if name not in _SIZES:
        raise ArgumentError("dtype", dtype, " | ".join(_SIZES))
    return _SIZES[name]


def destroy_handle(handle: Handle) -> None:
    """Close a handle; it is not to be used any more.

    Parameters
    ----------
    handle : Handle
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    handle._closing()
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
    size_bytes : int
        At least 1.
    backend : str, optional
        As in `create_handle`.
    """

    def __init__(self, size_bytes: int, *, backend: str | None = None) -> None:
        nbytes = _arguments.integer(size_bytes, "size_bytes", 1, 2**63 - 1)
        with _open(backend) as handle:
            self._device = devices.device_for(handle.library.device_type, handle.device or 0)
        self._memory = self._device.from_numpy(np.zeros(-(-nbytes // 4), np.float32))
        self._nbytes = nbytes

    def ptr(self) -> int:
        """Give its address."""
        return self._memory.pointer

    def size(self) -> int:
        """Give its size in bytes."""
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
            raise _StateError("data", f"{values.size} bytes", f"{self._nbytes} bytes")
        self._device.refill(self._memory, values)

    def copy_to_host(self) -> bytes:
        """Copy its bytes, once all work on the device is done, of whichever stream."""
        self._device.synchronize_all()
        return bytes(self._device.to_numpy(self._memory).tobytes()[: self._nbytes])

    def zeros(self) -> None:
        """Fill it with zeros."""
        self.copy_from_host(bytes(self._nbytes))

    def __repr__(self) -> str:
        return f"<DeviceBuffer of {self._nbytes} bytes>"


def _plain(given: Any) -> Any:
    """An integer of any type as int, a `DeviceBuffer` as its address."""
    if issubclass(type(given), DeviceBuffer):
        return given.ptr()
    number = _arguments.index(given)
    return given if number is None else number


# ---------------------------------------------------------------- graphs


def _stage(name: str, told: Callable[..., Any] = _returned) -> Any:
    """A method of `pybnorm.graph.Graph` whose errors are told hipDNN's way."""
    method = getattr(graph.Graph, name)

    @functools.wraps(method)
    def stage(self: Graph, *arguments: Any, **options: Any) -> Any:
        return told(functools.partial(method, self, *arguments, **options))

    stage.__doc__ = f"`pybnorm.graph.Graph.{name}`."
    if told is _returned:
        stage.__signature__ = inspect.signature(method).replace(return_annotation="Error")  # type: ignore[attr-defined]
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

    validate = _stage("validate")
    build_operation_graph = _stage("build_operation_graph")
    create_execution_plans = _stage("create_execution_plans")
    check_support = _stage("check_support")
    build = _stage("build")
    get_workspace_size = _stage("get_workspace_size", _raised)
    get_plan_name = _stage("get_plan_name", _raised)
    to_json = _stage("to_json", _raised)

    def _checked(self, handle: Any) -> pybnorm.Handle:
        return super()._checked(handle._there() if issubclass(type(handle), Handle) else handle)

    def checkNoDuplicateTensorIds(self) -> Error:
        """Say whether each uid has one tensor."""
        return _returned(_check_uids, self._nodes)

    def topologicallySortGraph(self) -> Error:
        """Do nothing: nodes are added in the order of their tensors."""
        return Error()

    def build_plans(self, policy: BuildPlanPolicy = BuildPlanPolicy.HEURISTICS_CHOICE) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_plans`."""
        _arguments.instance(policy, BuildPlanPolicy, "policy", "a BuildPlanPolicy")
        return _returned(super().build_plans)

    def build_plan_at_index(self, plan_index: int) -> Error:  # type: ignore[override]
        """`pybnorm.graph.Graph.build_plan_at_index`."""
        return _returned(super().build_plan_at_index, plan_index)

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
            super(Graph, self).execute(handle, pack, place)

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
        if json_string is None:  # by position it comes first
            handle, json_string = None, handle

        def call() -> None:
            graph.Graph.from_json(self, json_string)
            if handle is not None:
                graph.Graph.validate(self)
                graph.Graph.build_operation_graph(self, handle)

        return _returned(call)

    def to_binary(self) -> bytes:
        """`to_json` as bytes."""
        return self.to_json().encode()

    def from_binary(self, handle: Any = None, data: Any = None) -> Error:
        """``from_binary(data)``, or ``from_binary(handle, data)``: as `from_json`."""
        return self.from_json(handle, data)

    def to_compiled_plan_binary(self) -> bytes:
        """Do as `to_binary`, for a graph that is built."""
        self.get_workspace_size()  # refuses one that is not
        return self.to_binary()

    def from_compiled_plan_binary(self, handle: Any, data: bytes) -> Error:
        """A graph that is built, from what `to_compiled_plan_binary` gave."""
        wrong = self.from_binary(data)
        return self.build(handle) if wrong.is_good() else wrong

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


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _refuse("", name)
