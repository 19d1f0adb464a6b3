from collections import defaultdict
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NamedTuple, SupportsIndex

from pybnorm._arrays import Buffer
from pybnorm._find import LibrarySpec
from pybnorm._words import ActivationWord, AlgorithmWord, BackendWord, LayoutWord, ModeWord, OperationWord
from pybnorm.defects import Call, Defect
from pybnorm.enums import Activation, Capability, DataType, Layout, Mode, Operation

class Library(NamedTuple):
    backend: str
    label: str
    version: tuple[int, int, int]
    path: str
    found_via: str
    attempts: tuple[tuple[str, str, str], ...]
    device_type: int

def backends() -> tuple[str, ...]: ...
def search_spec(backend: BackendWord | str) -> LibrarySpec: ...
def describe(array: Any, argument: str) -> tuple[bytes | tuple[Any, ...], int]: ...
def device_types(backend: BackendWord | str) -> tuple[int, ...]: ...
def loaded(backend: BackendWord | str) -> Library | None: ...
def load(backend: BackendWord | str, path: str | bytes | PathLike[str] | None = None) -> Library: ...
def has_symbol(backend: BackendWord | str, name: str) -> bool | None: ...
def capability(
    backend: BackendWord | str,
    operation: Operation | int | OperationWord,
    mode: Mode | int | ModeWord,
    dtype: object,
    layout: Layout | int | LayoutWord,
    rank: int | Sequence[int],
) -> tuple[Capability, str]: ...

class TensorDescriptor:
    backend: str
    dtype: DataType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    layout: Layout
    def __init__(self, backend: BackendWord | str, dtype: object, dims: object, strides: object = None) -> None: ...
    @staticmethod
    def from_pointer(backend: BackendWord | str, pointer: SupportsIndex) -> TensorDescriptor: ...
    def query(self) -> tuple[DataType, tuple[int, ...], tuple[int, ...]]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pointer(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> TensorDescriptor: ...
    def __exit__(self, *_: object) -> None: ...

def derive_bn_tensor_descriptor(x_desc: TensorDescriptor, mode: Mode | int | ModeWord) -> TensorDescriptor: ...

class Handle:
    backend: str
    library: Library
    device: int | None
    _caches: defaultdict[str, Cache]
    _in_place: bool
    def _met(self, call: Call) -> tuple[Defect, ...]: ...
    def _look(
        self, names: tuple[str | None, ...], arguments: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...] | None, tuple[int, ...], list[Any]]: ...
    @property
    def known_defects(self) -> str: ...
    def __init__(
        self,
        backend: BackendWord | str,
        *,
        stream: Any = None,
        known_defects: Literal["warn", "avoid", "avoid_all", "error", "ignore"] | None = None,
    ) -> None: ...
    @staticmethod
    def from_pointer(
        backend: BackendWord | str,
        pointer: SupportsIndex,
        *,
        known_defects: Literal["warn", "avoid", "avoid_all", "error", "ignore"] | None = None,
    ) -> Handle: ...
    @property
    def pointer(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def workspace_nbytes(self) -> int: ...
    @property
    def stream(self) -> int: ...
    def set_stream(self, stream: Any) -> None: ...
    def query_runtime_error(self, mode: str = "blocking") -> str | None: ...
    def follow_stream(self, array: Any) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Handle: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None = ...,
        traceback: TracebackType | None = ...,
    ) -> None: ...
    def forward_training(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        *,
        mode: Mode | int | ModeWord = ...,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float = 1e-5,
        exponential_average_factor: float = 0.1,
        unbiased: bool = True,
        running_mean: Any = None,
        running_variance: Any = None,
        saved_mean: Any = None,
        saved_inv_variance: Any = None,
        activation: Activation | int | ActivationWord = ...,
        activation_low: float | None = None,
        activation_high: float | None = None,
        algorithm: AlgorithmWord | str | None = None,
        workspace: Any = None,
    ) -> None: ...
    def forward_inference(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        running_mean: Any,
        running_variance: Any,
        y: Any,
        *,
        mode: Mode | int | ModeWord = ...,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float = 1e-5,
        activation: Activation | int | ActivationWord = ...,
        activation_low: float | None = None,
        activation_high: float | None = None,
        algorithm: AlgorithmWord | str | None = None,
        workspace: Any = None,
    ) -> None: ...
    def backward(
        self,
        x: Any,
        dy: Any,
        scale: Any,
        dx: Any,
        dscale: Any,
        dbias: Any,
        *,
        mode: Mode | int | ModeWord = ...,
        alpha: float = 1.0,
        beta: float = 0.0,
        alpha_param: float = 1.0,
        beta_param: float = 0.0,
        epsilon: float = 1e-5,
        saved_mean: Any = None,
        saved_inv_variance: Any = None,
        bias: Any = None,
        activation: Activation | int | ActivationWord = ...,
        activation_low: float | None = None,
        activation_high: float | None = None,
        y: Any = None,
        algorithm: AlgorithmWord | str | None = None,
        workspace: Any = None,
        alpha_data: float | None = None,
        beta_data: float | None = None,
    ) -> None: ...
    def axpby(self, a: float, x: Any, b: float, y: Any, *, workspace: Any = None) -> None: ...
    def fill(self, value: float, y: Any) -> None: ...
    def relu(self, x: Any, y: Any) -> None: ...
    def relu_backward(self, x: Any, dy: Any, dx: Any) -> None: ...
    def buffer(self, array: Any, argument: str, *, output: bool = False) -> Buffer: ...
    def memory(self, workspace: Any) -> tuple[int, int]: ...
    def descriptor(self, array: Any, argument: str = "array") -> TensorDescriptor: ...
    def workspace_size(
        self,
        operation: Operation | int | OperationWord,
        x_desc: TensorDescriptor,
        *,
        mode: Mode | int | ModeWord = ...,
        y_desc: TensorDescriptor | None = None,
        dy_desc: TensorDescriptor | None = None,
        dx_desc: TensorDescriptor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        alpha_param: float = 1.0,
        beta_param: float = 0.0,
        epsilon: float = 1e-5,
        running: bool = True,
        saved: bool = True,
        unbiased: bool = True,
        algorithm: AlgorithmWord | str | None = None,
        activation: Activation | int | ActivationWord = ...,
        activation_low: float | None = None,
        activation_high: float | None = None,
    ) -> int: ...
    def plan_forward_training(
        self,
        x: Any,
        y: Any = None,
        *,
        mode: Mode | int | ModeWord = ...,
        algorithm: AlgorithmWord | str | None = "auto",
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float = 1e-5,
        exponential_average_factor: float = 0.1,
        unbiased: bool = True,
        running: bool = True,
        saved: bool = True,
        activation: Activation | int | ActivationWord = ...,
        z: Any = None,
        tune: bool = False,
        deterministic: bool = False,
    ) -> ForwardTrainingPlan: ...
    def plan_forward_inference(
        self,
        x: Any,
        y: Any = None,
        *,
        mode: Mode | int | ModeWord = ...,
        algorithm: AlgorithmWord | str | None = "auto",
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float = 1e-5,
        activation: Activation | int | ActivationWord = ...,
        z: Any = None,
        tune: bool = False,
        deterministic: bool = False,
    ) -> ForwardInferencePlan: ...
    def plan_backward(
        self,
        x: Any,
        dy: Any = None,
        dx: Any = None,
        *,
        mode: Mode | int | ModeWord = ...,
        algorithm: AlgorithmWord | str | None = "auto",
        alpha: float = 1.0,
        beta: float = 0.0,
        alpha_param: float = 1.0,
        beta_param: float = 0.0,
        epsilon: float = 1e-5,
        saved: bool = True,
        activation: Activation | int | ActivationWord = ...,
        z: Any = None,
        tune: bool = False,
        deterministic: bool = False,
        alpha_data: float | None = None,
        beta_data: float | None = None,
    ) -> BackwardPlan: ...

class Tensor(NamedTuple):
    name: str
    vector: bool
    written: bool
    when: str

def tensors(operation: Operation | int | OperationWord) -> tuple[Tensor, ...]: ...

SLOT_BITS: int

class Cache(dict[Any, Any]):
    def keep(self, key: Any, value: Any, most: int) -> None: ...

class CallList:
    def __init__(self, handle: Handle) -> None: ...
    def __len__(self) -> int: ...
    def append(
        self, handle: Handle, operation: Operation, arrays: dict[str, Buffer], workspace: tuple[int, int], **values: Any
    ) -> None: ...
    def reach(self, address: int, nbytes: int, element: int, written: bool) -> None: ...
    def apart(self, addresses: tuple[int, ...], workspace: int = 0) -> bool: ...
    def run(self, handle: Handle, addresses: tuple[int, ...]) -> None: ...

class Plan:
    @property
    def algorithm(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def workspace_size(self) -> int: ...
    @property
    def reserve_size(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...
    def _candidates(self, fast: bool) -> tuple[str, ...]: ...
    def _no_addresses(self) -> None: ...

class ForwardTrainingPlan(Plan):
    def __call__(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        running_mean: Any = None,
        running_variance: Any = None,
        saved_mean: Any = None,
        saved_inv_variance: Any = None,
        workspace: Any = None,
        *positional: Any,
        z: Any = None,
        reserve: Any = None,
    ) -> None: ...

class ForwardInferencePlan(Plan):
    def __call__(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        running_mean: Any,
        running_variance: Any,
        y: Any,
        workspace: Any = None,
        *positional: Any,
        z: Any = None,
    ) -> None: ...

class BackwardPlan(Plan):
    def __call__(
        self,
        x: Any,
        dy: Any,
        scale: Any,
        dx: Any,
        dscale: Any,
        dbias: Any,
        saved_mean: Any = None,
        saved_inv_variance: Any = None,
        workspace: Any = None,
        *positional: Any,
        y: Any = None,
        bias: Any = None,
        dz: Any = None,
        reserve: Any = None,
    ) -> None: ...

def algorithms(backend: BackendWord | str) -> tuple[str, ...]: ...
def numbered_algorithms(backend: BackendWord | str) -> tuple[str, ...]: ...
def batch_normalization_forward_training(
    handle: Handle,
    mode: Mode | int | ModeWord,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: SupportsIndex,
    y_desc: TensorDescriptor,
    y: SupportsIndex,
    param_desc: TensorDescriptor,
    scale: SupportsIndex,
    bias: SupportsIndex,
    exponential_average_factor: float,
    running_mean: SupportsIndex | None,
    running_variance: SupportsIndex | None,
    epsilon: float,
    saved_mean: SupportsIndex | None,
    saved_inv_variance: SupportsIndex | None,
    *,
    activation: Activation | int | ActivationWord = ...,
    activation_low: float | None = None,
    activation_high: float | None = None,
    workspace: SupportsIndex = 0,
    workspace_size: SupportsIndex = 0,
) -> None: ...
def batch_normalization_forward_inference(
    handle: Handle,
    mode: Mode | int | ModeWord,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: SupportsIndex,
    y_desc: TensorDescriptor,
    y: SupportsIndex,
    param_desc: TensorDescriptor,
    scale: SupportsIndex,
    bias: SupportsIndex,
    running_mean: SupportsIndex,
    running_variance: SupportsIndex,
    epsilon: float,
    *,
    activation: Activation | int | ActivationWord = ...,
    activation_low: float | None = None,
    activation_high: float | None = None,
    workspace: SupportsIndex = 0,
    workspace_size: SupportsIndex = 0,
) -> None: ...
def batch_normalization_backward(
    handle: Handle,
    mode: Mode | int | ModeWord,
    alpha: float,
    beta: float,
    alpha_param: float,
    beta_param: float,
    x_desc: TensorDescriptor,
    x: SupportsIndex,
    dy_desc: TensorDescriptor,
    dy: SupportsIndex,
    dx_desc: TensorDescriptor,
    dx: SupportsIndex,
    param_desc: TensorDescriptor,
    scale: SupportsIndex,
    dscale: SupportsIndex,
    dbias: SupportsIndex,
    epsilon: float,
    saved_mean: SupportsIndex | None,
    saved_inv_variance: SupportsIndex | None,
    *,
    bias: SupportsIndex | None = None,
    activation: Activation | int | ActivationWord = ...,
    activation_low: float | None = None,
    activation_high: float | None = None,
    workspace: SupportsIndex = 0,
    workspace_size: SupportsIndex = 0,
    alpha_data: float | None = None,
    beta_data: float | None = None,
) -> None: ...
def axpby(
    handle: Handle,
    a: float,
    x_desc: TensorDescriptor,
    x: SupportsIndex,
    b: float,
    y_desc: TensorDescriptor,
    y: SupportsIndex,
    *,
    workspace: SupportsIndex = 0,
    workspace_size: SupportsIndex = 0,
) -> None: ...
def fill(handle: Handle, value: float, y_desc: TensorDescriptor, y: SupportsIndex) -> None: ...
def relu(
    handle: Handle, x_desc: TensorDescriptor, x: SupportsIndex, y_desc: TensorDescriptor, y: SupportsIndex
) -> None: ...
def relu_backward(
    handle: Handle,
    x_desc: TensorDescriptor,
    x: SupportsIndex,
    dy_desc: TensorDescriptor,
    dy: SupportsIndex,
    dx_desc: TensorDescriptor,
    dx: SupportsIndex,
) -> None: ...
def current_stream(array: Any) -> int | None: ...
def set_avoider(avoider: Callable[..., tuple[CallList, int, tuple[str, ...]]]) -> None: ...
def set_tuner(tuner: Callable[..., tuple[Plan, str]]) -> None: ...
