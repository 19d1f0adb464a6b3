from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, NamedTuple, SupportsIndex

from pybnorm._arrays import Buffer
from pybnorm._find import LibrarySpec
from pybnorm._words import ActivationWord, AlgorithmWord, BackendWord, LayoutWord, ModeWord, OperationWord
from pybnorm.defects import Call, Defect
from pybnorm.enums import Activation, Capability, DataType, Layout, Mode, Operation

_Backend = BackendWord | str
_Mode = Mode | int | ModeWord
_Operation = Operation | int | OperationWord
_Activation = Activation | int | ActivationWord
_Algorithm = AlgorithmWord | str
_Policy = Literal["warn", "avoid", "avoid_all", "error", "ignore"]

class Library(NamedTuple):
    """A loaded vendor library."""

    backend: str
    label: str
    version: tuple[int, int, int]
    path: str
    found_via: str
    attempts: tuple[tuple[str, str, str], ...]
    device_type: int

def backends() -> tuple[str, ...]:
    """Names of all backends, loaded or not: those of this build, then those of other distributions."""

def search_spec(backend: _Backend) -> LibrarySpec:
    """Say where a backend's library is looked for."""

def describe(array: Any, argument: str) -> tuple[bytes | tuple[Any, ...], int]:
    """The part of a plan's key that an array makes, and the address of the array."""

def device_types(backend: _Backend) -> tuple[int, ...]:
    """DLPack device types of the memory that a backend's calls reach; its device's own comes first."""

def loaded(backend: _Backend) -> Library | None:
    """The libraries that `load` has loaded in this process."""

def load(backend: _Backend, path: str | bytes | PathLike[str] | None = None) -> Library:
    """Load a backend's vendor library, once per process."""

def has_symbol(backend: _Backend, name: str) -> bool | None:
    """Say whether the loaded library has an optional symbol."""

def capability(
    backend: _Backend, operation: _Operation, mode: _Mode, dtype: object, layout: Layout | int | LayoutWord,
    rank: int | Sequence[int],
) -> tuple[Capability, str]:  # fmt: skip
    """Say whether and how a backend computes one combination."""

class TensorDescriptor:
    """Shape, memory order and element type of a tensor, as a vendor's descriptor."""

    backend: str
    dtype: DataType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    layout: Layout
    def __init__(self, backend: _Backend, dtype: object, dims: object, strides: object = None) -> None: ...
    @staticmethod
    def from_pointer(backend: _Backend, pointer: SupportsIndex) -> TensorDescriptor:
        """Wrap a vendor's descriptor that somebody else owns."""
    def query(self) -> tuple[DataType, tuple[int, ...], tuple[int, ...]]:
        """The descriptor's contents, read back from the vendor's library."""
    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, as the vendor reports it."""
    @property
    def pointer(self) -> int:
        """Address of the vendor's descriptor."""
    @property
    def closed(self) -> bool:
        """True once `close` has been called."""
    def close(self) -> None:
        """End the use of this descriptor; further calls do nothing."""
    def __enter__(self) -> TensorDescriptor: ...
    def __exit__(self, *_: object) -> None: ...

def derive_bn_tensor_descriptor(x_desc: TensorDescriptor, mode: _Mode) -> TensorDescriptor:
    """Descriptor of scale, bias and statistics for data described by `x_desc`."""

class Handle:
    """A vendor library's handle: the device and stream that calls go to."""

    backend: str
    library: Library
    device: int | None
    @property
    def known_defects(self) -> str:
        """The word given to `Handle` for calls that have a known defect."""
    def __init__(
        self,
        backend: _Backend,
        *,
        device: str | None = None,
        stream: Any = None,
        known_defects: _Policy | None = None,
    ) -> None: ...
    @staticmethod
    def from_pointer(backend: _Backend, pointer: SupportsIndex, *, known_defects: _Policy | None = None) -> Handle:
        """Use a vendor's handle that somebody else owns."""
    @property
    def pointer(self) -> int:
        """Address of the vendor's handle."""
    @property
    def closed(self) -> bool:
        """True once `close` has been called."""
    @property
    def workspace_nbytes(self) -> int:
        """Bytes of workspace the handle keeps for calls on CPU arrays; grows with the largest call."""
    @property
    def stream(self) -> int:
        """The stream that calls go to, as an integer."""
    def set_stream(self, stream: Any) -> None:
        """Send later calls to `stream`: an integer, an object with ``__cuda_stream__``, a stream of hip-python."""
    def query_runtime_error(self, mode: str = "blocking") -> str | None:
        """Read what the kernels of this handle's calls have recorded on the device; the vendor then forgets it."""
    def follow_stream(self, array: Any) -> bool:
        """Send later calls to the stream that is current for an array in its framework."""
    def close(self) -> None:
        """Destroy the vendor's handle if it is ours; further calls do nothing."""
    def __enter__(self) -> Handle: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None = ...,
        traceback: TracebackType | None = ...,
    ) -> None: ...
    def forward_training(
        self, x: Any, scale: Any, bias: Any, y: Any, *, mode: _Mode = ..., alpha: float = 1.0, beta: float = 0.0,
        epsilon: float = 1e-5, exponential_average_factor: float = 0.1, unbiased: bool = True, running_mean: Any = None,
        running_variance: Any = None, saved_mean: Any = None, saved_inv_variance: Any = None,
        activation: _Activation = ..., activation_low: float | None = None, activation_high: float | None = None,
        algorithm: _Algorithm | None = None, workspace: Any = None,
    ) -> None:  # fmt: skip
        """Batch norm with the statistics of the batch, on arrays."""
    def forward_inference(
        self, x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any, y: Any, *, mode: _Mode = ...,
        alpha: float = 1.0, beta: float = 0.0, epsilon: float = 1e-5, activation: _Activation = ...,
        activation_low: float | None = None, activation_high: float | None = None, algorithm: _Algorithm | None = None,
        workspace: Any = None,
    ) -> None:  # fmt: skip
        """Batch norm with given statistics, on arrays."""
    def backward(
        self, x: Any, dy: Any, scale: Any, dx: Any, dscale: Any, dbias: Any, *, mode: _Mode = ..., alpha: float = 1.0,
        beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, epsilon: float = 1e-5,
        saved_mean: Any = None, saved_inv_variance: Any = None, bias: Any = None, activation: _Activation = ...,
        activation_low: float | None = None, activation_high: float | None = None, y: Any = None,
        algorithm: _Algorithm | None = None, workspace: Any = None,
    ) -> None:  # fmt: skip
        """Gradients of `forward_training`, on arrays."""
    def axpby(self, a: float, x: Any, b: float, y: Any, *, workspace: Any = None) -> None:
        """``y = a * x + b * y`` elementwise, on arrays of one shape and dtype; each with its own strides."""
    def fill(self, value: float, y: Any) -> None:
        """``y = value`` everywhere, on an array of any strides; what lies between its elements is not written."""
    def relu(self, x: Any, y: Any) -> None:
        """``y = max(x, 0)`` elementwise, on arrays of one shape and dtype; each with its own strides."""
    def relu_backward(self, x: Any, dy: Any, dx: Any) -> None:
        """``dx = dy where x > 0, else 0`` elementwise, on arrays of one shape and dtype."""
    def buffer(self, array: Any, argument: str, *, output: bool = False) -> Buffer:
        """Describe an array that this handle's calls can reach, without calling the vendor."""
    def memory(self, workspace: Any) -> tuple[int, int]:
        """Address and bytes of a workspace that this handle's calls can reach; (0, 0) for ``None``."""
    def descriptor(self, array: Any, argument: str = "array") -> TensorDescriptor:
        """The descriptor of a data array, from the handle's bounded cache; the array's memory is not touched."""
    def workspace_size(
        self, operation: _Operation, x_desc: TensorDescriptor, *, mode: _Mode = ...,
        y_desc: TensorDescriptor | None = None, dy_desc: TensorDescriptor | None = None,
        dx_desc: TensorDescriptor | None = None, alpha: float = 1.0, beta: float = 0.0, alpha_param: float = 1.0,
        beta_param: float = 0.0, epsilon: float = 1e-5, running: bool = True, saved: bool = True, unbiased: bool = True,
        algorithm: _Algorithm | None = None, activation: _Activation = ..., activation_low: float | None = None,
        activation_high: float | None = None,
    ) -> int:  # fmt: skip
        """Bytes of workspace that a call needs."""
    def plan_forward_training(
        self, x: Any, y: Any = None, *, mode: _Mode = ..., algorithm: _Algorithm | None = "auto", alpha: float = 1.0,
        beta: float = 0.0, epsilon: float = 1e-5, exponential_average_factor: float = 0.1, unbiased: bool = True,
        running: bool = True, saved: bool = True, activation: _Activation = ..., z: Any = None,
        deterministic: bool = False, parameters: Any = None,
    ) -> ForwardTrainingPlan:  # fmt: skip
        """Make a forward training call ready: everything but the pointers is validated and fixed now."""
    def plan_forward_inference(
        self, x: Any, y: Any = None, *, mode: _Mode = ..., algorithm: _Algorithm | None = "auto", alpha: float = 1.0,
        beta: float = 0.0, epsilon: float = 1e-5, activation: _Activation = ..., z: Any = None,
        deterministic: bool = False, parameters: Any = None,
    ) -> ForwardInferencePlan:  # fmt: skip
        """Make a forward inference call ready; parameters as in `plan_forward_training`."""
    def plan_backward(
        self, x: Any, dy: Any = None, dx: Any = None, *, mode: _Mode = ..., algorithm: _Algorithm | None = "auto",
        alpha: float = 1.0, beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, epsilon: float = 1e-5,
        saved: bool = True, running: bool = False, activation: _Activation = ..., z: Any = None,
        deterministic: bool = False, parameters: Any = None,
    ) -> BackwardPlan:  # fmt: skip
        """Make a backward call ready; parameters as in `plan_forward_training`, dy and dx like x by default."""

class Tensor(NamedTuple):
    """A tensor of a call: name, parameter or not, written or not, when it is there, capability needed."""

    name: str
    vector: bool
    written: bool
    when: str
    needs: Capability

def tensors(operation: _Operation) -> tuple[Tensor, ...]:
    """The tensors of an operation's call, in the order of a plan's arguments."""

SLOT_BITS: int

class Cache(dict[Any, Any]):
    """A dictionary that keeps the newest of what was made."""
    def keep(self, key: Any, value: Any, most: int) -> None:
        """Keep a value; the oldest of more than `most` go. A key without a hash is not kept."""

class CallList:
    """A handle's calls in a row, checked once and run again and again on other memory."""
    def __new__(cls, handle: Handle) -> CallList: ...
    def __len__(self) -> int: ...
    def append(
        self, handle: Handle, operation: Operation, arrays: dict[str, Buffer], workspace: tuple[int, int],
        plan: Plan | None = None, **values: Any,
    ) -> None:  # fmt: skip
        """Add one call."""
    def reach(self, address: int, nbytes: int, element: int, written: bool) -> None:
        """Say that memory is read or written, for `apart`."""
    def apart(self, addresses: tuple[int, ...], workspace: int = 0) -> bool:
        """Say whether the memory is there and aligned, and no written range overlaps another."""
    def written(self) -> list[int]:
        """The slots whose memory is written, without that of the workspace."""
    def run(self, handle: Handle, addresses: tuple[int, ...]) -> None:
        """Make the calls."""

class Plan:
    """A call made ready by `Handle.plan_forward_training`, `~Handle.plan_forward_inference` or
    `~Handle.plan_backward`."""
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

class ForwardTrainingPlan(Plan):
    """A forward training call made ready; see `Plan` and `Handle.forward_training`."""
    def __call__(
        self, x: Any, scale: Any, bias: Any, y: Any, running_mean: Any = None, running_variance: Any = None,
        saved_mean: Any = None, saved_inv_variance: Any = None, workspace: Any = None, *, z: Any = None,
        reserve: Any = None,
    ) -> None:  # fmt: skip
        """Run it on addresses, or on arrays as planned; statistics and z are given exactly where they were planned."""

class ForwardInferencePlan(Plan):
    """A forward inference call made ready; see `Plan` and `Handle.forward_inference`."""
    def __call__(
        self, x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any, y: Any, workspace: Any = None,
        *, z: Any = None,
    ) -> None:  # fmt: skip
        """Run it on addresses, or on arrays as planned; z is given exactly where it was planned."""

class BackwardPlan(Plan):
    """A backward call made ready; see `Plan` and `Handle.backward`."""
    def __call__(
        self, x: Any, dy: Any, scale: Any, dx: Any, dscale: Any, dbias: Any, saved_mean: Any = None,
        saved_inv_variance: Any = None, workspace: Any = None, *, y: Any = None, bias: Any = None,
        dz: Any = None, reserve: Any = None, running_mean: Any = None, running_variance: Any = None,
    ) -> None:  # fmt: skip
        """Run it on addresses, or on arrays as planned; statistics are given exactly where they were planned."""

def algorithms(backend: _Backend) -> tuple[str, ...]:
    """Names that a plan's ``algorithm`` takes on a backend."""

def numbered_algorithms(backend: _Backend) -> tuple[str, ...]:
    """The algorithms that also take a plan's number after a colon, ``"graph:2"``."""

def batch_normalization_forward_training(
    handle: Handle, mode: _Mode, alpha: float, beta: float, x_desc: TensorDescriptor, x: SupportsIndex,
    y_desc: TensorDescriptor, y: SupportsIndex, param_desc: TensorDescriptor, scale: SupportsIndex, bias: SupportsIndex,
    exponential_average_factor: float, running_mean: SupportsIndex | None, running_variance: SupportsIndex | None,
    epsilon: float, saved_mean: SupportsIndex | None, saved_inv_variance: SupportsIndex | None, *,
    activation: _Activation = ..., activation_low: float | None = None, activation_high: float | None = None,
    workspace: SupportsIndex = 0, workspace_size: SupportsIndex = 0,
) -> None:  # fmt: skip
    """The vendor's forward training call on addresses, in the vendors' argument order."""

def batch_normalization_forward_inference(
    handle: Handle, mode: _Mode, alpha: float, beta: float, x_desc: TensorDescriptor, x: SupportsIndex,
    y_desc: TensorDescriptor, y: SupportsIndex, param_desc: TensorDescriptor, scale: SupportsIndex, bias: SupportsIndex,
    running_mean: SupportsIndex, running_variance: SupportsIndex, epsilon: float, *, activation: _Activation = ...,
    activation_low: float | None = None, activation_high: float | None = None, workspace: SupportsIndex = 0,
    workspace_size: SupportsIndex = 0,
) -> None:  # fmt: skip
    """The vendor's forward inference call on addresses, in the vendors' argument order."""

def batch_normalization_backward(
    handle: Handle, mode: _Mode, alpha: float, beta: float, alpha_param: float, beta_param: float,
    x_desc: TensorDescriptor, x: SupportsIndex, dy_desc: TensorDescriptor, dy: SupportsIndex, dx_desc: TensorDescriptor,
    dx: SupportsIndex, param_desc: TensorDescriptor, scale: SupportsIndex, dscale: SupportsIndex, dbias: SupportsIndex,
    epsilon: float, saved_mean: SupportsIndex | None, saved_inv_variance: SupportsIndex | None, *,
    bias: SupportsIndex | None = None, activation: _Activation = ..., activation_low: float | None = None,
    activation_high: float | None = None, workspace: SupportsIndex = 0, workspace_size: SupportsIndex = 0,
) -> None:  # fmt: skip
    """The vendor's backward call on addresses, in the vendors' argument order."""

def axpby(
    handle: Handle, a: float, x_desc: TensorDescriptor, x: SupportsIndex, b: float, y_desc: TensorDescriptor,
    y: SupportsIndex, *, workspace: SupportsIndex = 0, workspace_size: SupportsIndex = 0,
) -> None:  # fmt: skip
    """``y = a * x + b * y`` elementwise on addresses; with ``b = 0`` the prior y is not read."""

def fill(handle: Handle, value: float, y_desc: TensorDescriptor, y: SupportsIndex) -> None:
    """``y = value`` everywhere, on an address; what lies between the elements is not written."""

def relu(
    handle: Handle, x_desc: TensorDescriptor, x: SupportsIndex, y_desc: TensorDescriptor, y: SupportsIndex
) -> None:
    """``y = max(x, 0)`` elementwise, on addresses."""

def relu_backward(
    handle: Handle, x_desc: TensorDescriptor, x: SupportsIndex, dy_desc: TensorDescriptor, dy: SupportsIndex,
    dx_desc: TensorDescriptor, dx: SupportsIndex,
) -> None:  # fmt: skip
    """``dx = dy where x > 0, else 0`` elementwise, on addresses."""

def current_stream(array: Any) -> int | None:
    """The stream that is current for an array in its framework."""

def bound(
    defaults: dict[str, Any], front: tuple[str, ...], required: tuple[str, ...], positional: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[Any, ...] | None:  # fmt: skip
    """A call's arguments in the order of `defaults`, or None where they do not fit."""

def cache(handle: Handle, owner: str) -> Cache:
    """Give the cache where module `owner` keeps calls made ready for this handle; closing it empties that."""

def defects_of(handle: Handle, call: Call) -> tuple[Defect, ...]:
    """The known defects that a `defects.Call` has."""

def allow_in_place(handle: Handle, allowed: bool) -> None:
    """Set whether an output may be an input itself; to callers that is refused, the judge asks for it."""

def look(
    handle: Handle, names: tuple[str | None, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, tuple[int, ...], list[Any]]:
    """The key of the calls that serve these arguments, and the addresses of their arrays."""

def refuse_addresses(plan: Plan) -> None:
    """Have calls of a plan take arrays only from now on: for callers whose own arguments are arrays."""

def way_of(
    handle: Handle, operation: Operation, tensors: dict[str, TensorDescriptor], values: dict[str, Any], running: bool,
    saved: bool, deterministic: bool, alignment: int, share: float = 0.0, sums_only: bool = False,
    bound: bool = False, parameters: DataType | None = None,
) -> Plan:  # fmt: skip
    """The way that ``"auto"`` takes for a batch-norm call, for `CallList.append`."""

def tell_of_defects(handle: Handle, call: Any, written: list[str], way: Plan | None = None) -> None:
    """Warn of a call that has known defects, or refuse it, as the handle's policy says."""

def install_torch_kernels(
    threads: object, host: object, operators: Sequence[tuple[str, str]], files: tuple[str, str | None]
) -> None:
    """Have PyTorch's dispatcher call these kernels and no others, in this process; what is there already stays."""

def remove_torch_kernels() -> None:
    """PyTorch's own kernels are in their place again."""
