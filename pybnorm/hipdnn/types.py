"""hipDNN's names of values, the refusal of those that are absent, and the errors that its stages return."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from pybnorm import _arguments, enums, graph
from pybnorm.errors import ArgumentError, ArgumentTypeError, PybnormError, UnsupportedError

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
