"""Batch norm on arrays of any framework, which returns its results as new arrays, with little host time.

``y, saved_mean, saved_inv_variance = batch_norm_training(x, scale, bias)`` with arrays of PyTorch, CuPy, NumPy or JAX:
results are new arrays of the same framework, from its own allocator, in x's memory format; or the arrays in `out`. An
object on the CPU that has no framework here, but DLPack or the buffer protocol, gets NumPy's arrays. The
first call with given dtype, shape, strides, device and scalars makes a handle and a plan, which later calls reuse: they
cost a look-up, the allocations and one call of a `pybnorm.Plan`.

Shared arguments:

x, dy, y, dx
    Shape (N, C, spatial...), rank 2 to 8, any strides that the backend takes. Parameters belong to axis 1.
mode
    `Mode.SPATIAL`: statistics per channel; `Mode.PER_ACTIVATION`: per element of (C, spatial...).
algorithm, deterministic
    As in `Handle.plan_forward_training`.
handle
    None: a handle per thread and device, made at first use: native for the CPU, and for a GPU where NVRTC or hipRTC is,
    else cuDNN or MIOpen. It works on the framework's current stream. A `Handle`: calls and allocations go to its
    stream, and the caller orders that stream with others.
out
    Arrays to write and return instead of new ones, in the order of the results; None for a new one.

Limits. Before a graph capture make one such call on the capturing thread: plans cannot be made during a capture. Each
value of a scalar needs its own plan; the latest `MOST_READY` plans are kept per thread, or per handle given. Making one
may take tenths of a second with cuDNN. JAX's arrays are immutable and are only read, through DLPack, outside of
``jax.jit``: on the CPU results are computed in NumPy's memory and given to JAX, elsewhere `out` must hold arrays that
can be written. Nothing here is differentiable; for PyTorch use `pybnorm.torch`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import array_api_compat
import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import CPU, Buffer, as_buffer, numpy_dtype
from pybnorm._core import Cache, Handle, backends, cache, current_stream, describe, device_types, refuse_addresses
from pybnorm._words import AlgorithmWord, ModeWord
from pybnorm.enums import DataType, Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError, LibraryError, NotInitializedError

__all__ = ["MOST_READY", "batch_norm_backward", "batch_norm_inference", "batch_norm_training"]

MOST_READY = 256
"""Number of prepared calls that each thread, or each handle given, keeps."""

_Array = TypeVar("_Array")  # what comes in goes out
Call: TypeAlias = Callable[..., Any]
Context: TypeAlias = "contextlib.AbstractContextManager[object]"


def batch_norm_training(
    x: _Array, scale: Any, bias: Any, *, running_mean: Any = None, running_variance: Any = None,
    exponential_average_factor: float = 0.1, unbiased: bool = True, saved: bool = True, epsilon: float = 1e-5,
    mode: Mode | int | ModeWord = Mode.SPATIAL, algorithm: AlgorithmWord | str = "auto", deterministic: bool = False,
    handle: Handle | None = None, out: Sequence[Any] | None = None,
) -> tuple[_Array, Any, Any]:  # fmt: skip
    """Normalize by the statistics of the batch.

    ``y = scale * (x - mean) / sqrt(variance + epsilon) + bias`` (Ioffe & Szegedy 2015, algorithm 1).

    Parameters
    ----------
    x : array, shape (N, C, spatial...)
        float32, float64, float16 or bfloat16, as the backend has them.
    scale, bias : array, shape (C,) or (1, C, 1...), or None
        With PER_ACTIVATION (1, C, spatial...). Contiguous; float64 for float64 x, else float32. None: 1 and 0.
    running_mean, running_variance : array, as scale, optional
        Updated in place, both or none: ``(1 - factor) * running + factor * batch``.
    exponential_average_factor : float
        That factor, from 0 to 1.
    unbiased : bool
        Whether the running variance takes the unbiased batch variance. False: the biased one, as ONNX and TensorFlow.
    saved : bool
        False, where no `batch_norm_backward` follows: in place of the last two results is None, also in `out`.
    epsilon : float
        Finite, not negative.
    mode, algorithm, deterministic, handle, out
        See the module; `out` is (y, saved_mean, saved_inv_variance).

    Returns
    -------
    y : array
        Shape and dtype of x, in its memory format.
    saved_mean, saved_inv_variance : array
        Shape and dtype of scale: the batch's mean and ``1 / sqrt(biased variance + epsilon)``, for
        `batch_norm_backward`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Names the argument; nothing was written.
    UnsupportedError
        The backend has no correct way to compute the combination.
    LibraryNotFoundError, NotInitializedError, VendorError

    Examples
    --------
    >>> x, ones, zeros = np.float32([[[1, 2, 3, 4]]]), np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> y, mean, inv_variance = pybnorm.functional.batch_norm_training(x, ones, zeros, epsilon=0)
    >>> y.round(3)
    array([[[-1.342, -0.447,  0.447,  1.342]]], dtype=float32)
    >>> mean, inv_variance.round(3)
    (array([2.5], dtype=float32), array([0.894], dtype=float32))
    """
    ready = _local.ready if handle is None else _ready_of(handle)
    key = (
        "training", type(x), describe(x, "x")[0], type(scale), bias is None,
        type(running_mean), type(running_variance), type(exponential_average_factor), exponential_average_factor,
        type(epsilon), epsilon, type(mode), mode, algorithm, None if out is None else _out_key(out, 3), unbiased,
        deterministic, saved,
    )  # fmt: skip
    try:
        call = ready[key]
    except Exception:  # KeyError, or an argument's hash fails; then the call is refused or not kept
        running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
        data = {"x": x, "y": None if out is None else out[0]}
        options: dict[str, Any] = {"epsilon": epsilon, "mode": mode, "algorithm": algorithm, "running": running}
        options |= {"exponential_average_factor": exponential_average_factor, "unbiased": unbiased}
        options |= {"deterministic": deterministic, "saved": _arguments.boolean(saved, "saved")}
        if not saved and out is not None and (out[1] is not None or out[2] is not None):
            raise ArgumentError("out", "arrays for saved statistics", "None in their place with saved=False") from None
        vectors = {"scale": scale, "bias": bias, "running_mean": running_mean, "running_variance": running_variance}
        call, kept = _prepare("training", handle, data, vectors, options, out)
        if kept:
            ready.keep(key, call, MOST_READY)
    found: tuple[_Array, Any, Any] = call(x, scale, bias, running_mean, running_variance, out)
    return found


def batch_norm_inference(
    x: _Array, *, running_mean: Any, running_variance: Any, scale: Any = None, bias: Any = None, epsilon: float = 1e-5,
    mode: Mode | int | ModeWord = Mode.SPATIAL, algorithm: AlgorithmWord | str = "auto", deterministic: bool = False,
    handle: Handle | None = None, out: Any = None,
) -> _Array:  # fmt: skip
    """Normalize by given statistics: ``y = scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias``.

    Parameters
    ----------
    x
        As in `batch_norm_training`. All else is given by name: other libraries have these arrays in other orders.
    running_mean, running_variance : array, as scale
    scale, bias, epsilon, mode, algorithm, deterministic, handle
        As in `batch_norm_training`. Without `scale` it is 1, without `bias` 0.
    out : array, shape and dtype of x, optional
        Written and returned.

    Returns
    -------
    array
        y, shape and dtype of x, in its memory format.

    Examples
    --------
    >>> x, ones, zeros = np.float32([[[1, 2, 3, 4]]]), np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> pybnorm.functional.batch_norm_inference(x, running_mean=ones, running_variance=4 * ones, bias=zeros, epsilon=0)
    array([[[0. , 0.5, 1. , 1.5]]], dtype=float32)
    """
    ready = _local.ready if handle is None else _ready_of(handle)
    key = (
        "inference", type(x), describe(x, "x")[0], scale is None, bias is None,
        type(epsilon), epsilon, type(mode), mode, algorithm,
        None if out is None else (type(out), describe(out, "out")[0]), deterministic,
    )  # fmt: skip
    try:
        call = ready[key]
    except Exception:
        options = {"epsilon": epsilon, "mode": mode, "algorithm": algorithm, "deterministic": deterministic}
        vectors = {"scale": scale, "bias": bias, "running_mean": running_mean, "running_variance": running_variance}
        call, kept = _prepare(
            "inference", handle, {"x": x, "y": out}, vectors, options, None if out is None else (out,)
        )
        if kept:
            ready.keep(key, call, MOST_READY)
    y: _Array = call(x, scale, bias, running_mean, running_variance, out)
    return y


def batch_norm_backward(
    x: _Array, dy: Any, scale: Any, saved_mean: Any = None, saved_inv_variance: Any = None, *, epsilon: float = 1e-5,
    mode: Mode | int | ModeWord = Mode.SPATIAL, algorithm: AlgorithmWord | str = "auto", deterministic: bool = False,
    handle: Handle | None = None, out: Sequence[Any] | None = None,
) -> tuple[_Array, Any, Any]:  # fmt: skip
    """Gradients of `batch_norm_training`; the formulas are in `Handle.backward`.

    Parameters
    ----------
    x, dy : array, shape (N, C, spatial...), one dtype
    scale : array, as in `batch_norm_training`, or None
    saved_mean, saved_inv_variance : array, as scale, optional
        What `batch_norm_training` returned. Both or none; without them they are computed from x and `epsilon`.
    epsilon : float
        Used only without saved statistics.
    mode, algorithm, deterministic, handle, out
        See the module; `out` is (dx, dscale, dbias).

    Returns
    -------
    dx : array
        Shape and dtype of x, in its memory format.
    dscale, dbias : array
        Shape and dtype of scale.

    Examples
    --------
    >>> x, dy, ones = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]]), np.ones(1, np.float32)
    >>> dx, dscale, dbias = pybnorm.functional.batch_norm_backward(x, dy, ones, epsilon=0)
    >>> dx.round(3), dscale.round(3), dbias
    (array([[[ 0.204, -0.408,  0.204]]], dtype=float32), array([1.225], dtype=float32), array([1.], dtype=float32))
    """
    ready = _local.ready if handle is None else _ready_of(handle)
    key = (
        "backward", type(x), describe(x, "x")[0], describe(dy, "dy")[0], type(scale),
        saved_mean is None, type(epsilon), epsilon, type(mode), mode, algorithm,
        None if out is None else _out_key(out, 3), deterministic,
    )  # fmt: skip
    try:
        call = ready[key]
    except Exception:
        saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
        data = {"x": x, "dy": dy, "dx": None if out is None else out[0]}
        vectors = {"scale": scale, "saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
        options = {"epsilon": epsilon, "mode": mode, "algorithm": algorithm, "saved": saved}
        options["deterministic"] = deterministic
        call, kept = _prepare("backward", handle, data, vectors, options, out)
        if kept:
            ready.keep(key, call, MOST_READY)
    found: tuple[_Array, Any, Any] = call(x, dy, scale, saved_mean, saved_inv_variance, out)
    return found


# ---------------------------------------------------------------- what is kept


class _Kept:
    """Handles by backend and device, and the calls prepared with them."""

    def __init__(self) -> None:
        self.handles: dict[tuple[str, int | None], Handle] = {}
        self.ready = Cache()


class _Owner:
    """Lives in a thread's local storage, and so until the thread ends."""


class _Local(threading.local):
    """Handles of each thread: with a shared handle threads would wait for each other.

    A finished thread's handles go to the next new thread: destroying them would wait for the device.
    """

    def __init__(self) -> None:
        try:
            self.own(_spare.pop())
        except IndexError:
            self.own(_Kept())

    def own(self, kept: _Kept) -> None:
        """Use these handles in this thread; they are handed on when it ends, but not when the interpreter does."""
        self.handles, self.ready, self.owner = kept.handles, kept.ready, _Owner()
        self.release = weakref.finalize(self.owner, _spare.append, kept)
        self.release.atexit = False


_spare: collections.deque[_Kept] = collections.deque()
_local = _Local()


def _after_fork_in_child() -> None:
    """Handles cannot be used after a fork; the child makes its own."""
    _local.release.detach()
    _local.own(_Kept())
    _spare.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _ready_of(handle: Handle) -> Cache:
    _arguments.instance(handle, Handle, "handle", "a Handle or None")
    return cache(handle, "functional")


def _out_key(out: Any, count: int) -> Any:
    if not issubclass(type(out), (tuple, list)) or len(out) != count:
        raise ArgumentTypeError("out", out, f"a tuple of {count}, arrays or None")
    first = out[0]
    return type(first), None if first is None else describe(first, "out[0]")[0], *map(type, out[1:])


# ---------------------------------------------------------------- frameworks


class _Home:
    """A framework: this class for NumPy and for frameworks that have no class here."""

    has_memory = False

    def on(self, device: int) -> Context:
        """Make a device current."""
        return contextlib.nullcontext()

    def elsewhere(self, device: int) -> bool:
        """Say whether another device is current."""
        return False

    def devices(self) -> int:
        return 1

    def stream(self, device: int) -> int | None:
        return None

    def on_stream(self, stream: int, device: int) -> Context:
        return contextlib.nullcontext()

    def capturing(self) -> bool:
        return False

    def memory(self, nbytes: int, device: int) -> Callable[[], Any]:
        raise NotImplementedError

    def address(self, memory: Any) -> int:
        raise NotImplementedError

    def constant(self, values: Any, like: Any) -> Any:
        """The values, copied to the device of `like` when this returns."""
        return values


class _Torch(_Home):
    has_memory = True

    def __init__(self) -> None:
        self.torch: Any = sys.modules["torch"]

    def on(self, device: int) -> Context:
        context: Context = self.torch.cuda.device(device)
        return context

    def elsewhere(self, device: int) -> bool:
        return bool(self.torch.cuda.current_device() != device)

    def devices(self) -> int:
        return int(self.torch.cuda.device_count())

    def stream(self, device: int) -> int | None:
        return int(self.torch.cuda.current_stream(device).cuda_stream)

    def on_stream(self, stream: int, device: int) -> Context:
        cuda = self.torch.cuda
        there = cuda.ExternalStream(stream, device=device) if stream else cuda.default_stream(device)
        context: Context = cuda.stream(there)
        return context

    def capturing(self) -> bool:
        return bool(self.torch.cuda.is_current_stream_capturing())

    def memory(self, nbytes: int, device: int) -> Callable[[], Any]:
        return functools.partial(self.torch.empty, nbytes, dtype=self.torch.uint8, device=f"cuda:{device}")

    def address(self, memory: Any) -> int:
        return int(memory.data_ptr())

    def constant(self, values: Any, like: Any) -> Any:
        dtype = self.torch.float64 if values.dtype == np.float64 else self.torch.float32
        return self.torch.full(values.shape, float(values.flat[0]), dtype=dtype).to(like.device)  # waits for the copy


class _Cupy(_Home):
    has_memory = True

    def __init__(self) -> None:
        self.cupy: Any = sys.modules["cupy"]

    def on(self, device: int) -> Context:
        context: Context = self.cupy.cuda.Device(device)
        return context

    def elsewhere(self, device: int) -> bool:
        return bool(self.cupy.cuda.runtime.getDevice() != device)

    def devices(self) -> int:
        return int(self.cupy.cuda.runtime.getDeviceCount())

    def stream(self, device: int) -> int | None:
        return int(self.cupy.cuda.get_current_stream().ptr)

    def on_stream(self, stream: int, device: int) -> Context:
        context: Context = self.cupy.cuda.ExternalStream(stream, device)
        return context

    def capturing(self) -> bool:
        return bool(self.cupy.cuda.get_current_stream().is_capturing())

    def memory(self, nbytes: int, device: int) -> Callable[[], Any]:
        return functools.partial(self.cupy.empty, nbytes, dtype=self.cupy.uint8)

    def address(self, memory: Any) -> int:
        return int(memory.data.ptr)

    def constant(self, values: Any, like: Any) -> Any:
        array = self.cupy.asarray(values)
        self.cupy.cuda.get_current_stream().synchronize()
        return array


def _home_of(array: Any) -> _Home:
    if array_api_compat.is_torch_array(array):
        return _Torch()
    if array_api_compat.is_cupy_array(array):
        return _Cupy()
    return _Home()


# ---------------------------------------------------------------- making a call ready


def _prepare(
    operation: str, handle: Handle | None, data: dict[str, Any], vectors: dict[str, Any], options: dict[str, Any],
    out: Sequence[Any] | None,
) -> tuple[Call, bool]:  # fmt: skip
    """Prepare a call; whether it may be kept. `data` has the data arrays by name; the last is the result, or None."""
    *inputs, result = data
    x = data["x"]
    waiting, unsaved = False, operation == "training" and not options["saved"]
    buffer = as_buffer(x, "x")
    for name in inputs:
        as_buffer(data[name], name)
    names = ("out",) if operation == "inference" else ("out[0]", "out[1]", "out[2]")
    results = dict(zip(names, out or (), strict=False))
    given_arrays = {name: array for name, array in (vectors | results).items() if array is not None}
    for name, array in given_arrays.items():
        as_buffer(array, name)
        written = name in results or (operation == "training" and name.startswith("running"))
        if written and array_api_compat.is_jax_array(array):
            raise ArgumentError(name, "a JAX array, which is immutable", "an array that can be written, as NumPy's")
    home = _home_of(x)
    if array_api_compat.is_jax_array(x):
        if buffer.device_type == CPU:
            # Not kept: the call with NumPy's arrays inside it is, under its own key.
            return _through_numpy(operation, handle, options), False
        if out is None or any(array is None for array in (out[:1] if unsaved else out)):
            raise ArgumentError("out", out, "arrays that can be written, for all results, where x is JAX's on a GPU")
        home, waiting = _home_of(out[0]), True
    device = max(buffer.device_id, 0)
    backend = _backend_of(buffer.device_type)
    on_gpu = backend is None or device_types(backend)[0] != CPU
    if on_gpu and home.capturing():
        raise ArgumentError(
            "x", "the first call of its kind while a graph is captured", "one such call before, on the same thread"
        )
    around = home.on(device) if on_gpu else contextlib.nullcontext()
    with around:
        used = _default_handle(buffer, backend, on_gpu) if handle is None else handle
        used.buffer(x, "x")
        like = _maker(x, "x", data[result])
        constants = {name: None for name in ("scale", "bias") if vectors.get(name, 0) is None}
        given = operation == "inference" or (out is not None and out[1] is not None and out[2] is not None)
        if constants:
            unknown = type(home) is _Home and not isinstance(x, np.ndarray) and like is not _numpy_like
            if unknown and (on_gpu or not given):
                raise ArgumentError(
                    next(iter(constants)), None,
                    f"an array: of {type(x).__name__}, x's type, no framework is known here that could make one",
                )  # fmt: skip
            constants = _constants(buffer, home, x, options["mode"], tuple(constants))
        scale = constants.get("scale", vectors["scale"])
        like_scale: Call | None = None
        if operation != "inference":
            like_scale = _nothing if unsaved else _maker(scale, "scale", scale if given else None)
            if not given:
                _one_framework(x, scale)
        theirs = handle is not None and on_gpu
        with _stream_of(used, home, x, device) if theirs else contextlib.nullcontext():
            target = like(x) if data[result] is None else data[result]
            arrays = [*(data[name] for name in inputs), target]
            method = {"training": "forward_training", "inference": "forward_inference"}.get(operation, operation)
            try:
                plan = getattr(used, f"plan_{method}")(*arrays, **options)
            except ArgumentError as error:
                raise _renamed(error, (), **{result: names[0]}) from error.__cause__
            refuse_addresses(plan)
    memory = _memory(plan, used, home, device) if plan.workspace_size and on_gpu else None
    follow = _follower(used, home, x, device) if handle is None and on_gpu else None
    call: Call = _CALLS[operation](plan, like, like_scale, memory, follow, constants)
    if not on_gpu:
        return call, True
    if waiting:
        call = _when_ready(call)
    if handle is not None:
        call = _on_the_handles_stream(call, handle, home, device)
    elif home.devices() > 1:
        call = _on_the_device(call, home, device)
    return call, True


def _backend_of(device_type: int) -> str | None:
    """The backend that computes where no handle is given: kernels of our own where they reach the memory."""
    ours = ("native", "native_cuda", "native_rocm")
    reached = [name for name in (*ours, *backends()) if device_type in device_types(name)]
    return next((name for name in reached if name not in ours[1:] or _compiles_kernels(name)), None)


@functools.cache
def _compiles_kernels(backend: str) -> bool:
    """Say whether native's kernels can be compiled and run for a GPU: NVRTC or hipRTC, and a driver, are here."""
    try:
        Handle(backend).close()
    except (LibraryError, NotInitializedError):
        return False
    return True


def _default_handle(buffer: Buffer, backend: str | None, on_gpu: bool) -> Handle:
    if backend is None:
        raise ArgumentError("x", f"memory of device type {buffer.device_type}", "memory of the CPU, CUDA or ROCm")
    device = buffer.device_id if on_gpu and buffer.device_id >= 0 else None
    found: Handle | None = _local.handles.get((backend, device))
    if found is None:
        found = Handle(backend)
        if device is not None and found.device not in (None, device):
            current = found.device
            found.close()
            raise ArgumentError("x", f"an array of device {device}", f"one of device {current}, the current one")
        _local.handles[backend, device] = found
    return found


def _maker(array: Any, argument: str, given: Any) -> Call:
    """A function that makes an array like the one given, in its framework."""
    if given is not None:
        return _no_maker
    if type(array) is np.ndarray:
        return np.empty_like  # as the namespace's, which wraps it
    try:
        maker: Call = array_api_compat.array_namespace(array).empty_like
    except TypeError:
        if as_buffer(array, argument).device_type == CPU:
            return _numpy_like
        raise ArgumentTypeError(
            argument, array, "an array of a framework of the array API, such as PyTorch or CuPy; others take out="
        ) from None
    return maker


def _numpy_like(array: Any) -> Any:
    """A NumPy array with the dims, dtype and memory order of one of a framework that is not known here."""
    buffer = as_buffer(array, "x")
    axes = sorted(range(len(buffer.dims)), key=lambda axis: -buffer.strides[axis])
    try:
        made = np.empty([buffer.dims[axis] for axis in axes], numpy_dtype(buffer.dtype))
    except ValueError:
        raise ArgumentError("x", f"dims {buffer.dims}", "dims of an array that an address space can hold") from None
    return made.transpose(np.argsort(axes))


def _no_maker(array: Any) -> Any:
    raise AssertionError("the array was given")


def _nothing(array: Any) -> None:
    """Give nothing, in place of what is neither computed nor returned."""


def _one_framework(x: Any, scale: Any) -> None:
    makers = [_maker(array, name, None) for array, name in ((x, "x"), (scale, "scale"))]
    if _numpy_like in makers and all(maker in (_numpy_like, np.empty_like) for maker in makers):
        return
    spaces = [array_api_compat.array_namespace(array) for array in (x, scale)]
    if spaces[0] is not spaces[1]:
        raise ArgumentTypeError("scale", scale, "an array of x's framework, or out= for all results")


def _constants(buffer: Buffer, home: _Home, x: Any, mode: object, names: tuple[str, ...]) -> dict[str, Any]:
    kind = _arguments.mode(mode)
    dims = _arguments.dims(buffer.dims, "x")
    shape = _arguments.derived_dims(dims, kind) if kind == Mode.PER_ACTIVATION else dims[1:2]
    dtype = np.float64 if buffer.dtype == DataType.FLOAT64 else np.float32
    values = {"scale": np.ones(shape, dtype), "bias": np.zeros(shape, dtype)}
    return {name: home.constant(values[name], x) for name in names}


def _memory(plan: Any, handle: Handle, home: _Home, device: int) -> Callable[[], tuple[Any, tuple[int, int]]]:
    """A function that allocates from the framework, in stream order: (memory, workspace argument of a plan)."""
    if not home.has_memory:
        raise ArgumentTypeError(
            "x", "an array of a framework without an allocator that is known here",
            f"one of PyTorch or CuPy, for the {plan.workspace_size} bytes of workspace; others call a plan",
        )  # fmt: skip
    nbytes, make, address = int(plan.workspace_size), home.memory(plan.workspace_size, device), home.address

    def memory() -> tuple[Any, tuple[int, int]]:
        made = make()
        return made, (address(made), nbytes)

    return memory


def _follower(handle: Handle, home: _Home, x: Any, device: int) -> Call | None:
    """A function that sets the handle's stream before each call; also sets it now."""
    if handle.follow_stream(x):
        return handle.follow_stream
    stream = home.stream(device)
    if stream is None:
        return None

    def follow(array: Any) -> None:
        current = home.stream(device)
        if current != handle.stream:
            handle.set_stream(current)

    follow(x)
    return follow


def _stream_of(handle: Handle, home: _Home, x: Any, device: int) -> Context:
    """Make the handle's stream the framework's current one, so that allocations belong to it."""
    stream, current = handle.stream, current_stream(x)
    if current is None:
        current = home.stream(device)
    return contextlib.nullcontext() if current in (None, stream) else home.on_stream(stream, device)


def _on_the_handles_stream(call: Call, handle: Handle, home: _Home, device: int) -> Call:
    def placed(x: Any, *arguments: Any) -> Any:
        with home.on(device), _stream_of(handle, home, x, device):
            return call(x, *arguments)

    return placed


def _when_ready(call: Call) -> Call:
    """Wait for JAX's arrays before the call: JAX has no current stream."""

    def waited(*arguments: Any) -> Any:
        for array in arguments:
            if array_api_compat.is_jax_array(array):
                array.block_until_ready()
        return call(*arguments)

    return waited


def _on_the_device(call: Call, home: _Home, device: int) -> Call:
    def placed(*arguments: Any) -> Any:
        if home.elsewhere(device):
            with home.on(device):
                return call(*arguments)
        return call(*arguments)

    return placed


# ---------------------------------------------------------------- the calls


_NO_MEMORY = None, None
_NO_OUT = None, None, None


def _training_call(
    plan: Any, like: Call, like_scale: Call, memory: Call | None, follow: Call | None, constants: dict[str, Any]
) -> Call:
    ones, zeros = constants.get("scale"), constants.get("bias")

    def call(x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any, out: Any) -> tuple[Any, Any, Any]:
        if scale is None:
            scale = ones
        if bias is None:
            bias = zeros
        if follow is not None:
            follow(x)
        y, mean, inverse = _NO_OUT if out is None else out
        y = like(x) if y is None else y
        mean, inverse = like_scale(scale) if mean is None else mean, like_scale(scale) if inverse is None else inverse
        try:
            # The memory returns to the stream's pool after the call.
            _kept, workspace = _NO_MEMORY if memory is None else memory()
            plan(x, scale, bias, y, running_mean, running_variance, mean, inverse, workspace)
        except ArgumentError as error:
            raise _renamed(error, ("y", "saved_mean", "saved_inv_variance")) from error.__cause__
        return y, mean, inverse

    return call


def _inference_call(
    plan: Any, like: Call, like_scale: None, memory: Call | None, follow: Call | None, constants: dict[str, Any]
) -> Call:
    ones, zeros = constants.get("scale"), constants.get("bias")

    def call(x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any, out: Any) -> Any:
        if follow is not None:
            follow(x)
        y = like(x) if out is None else out
        scale, bias = ones if scale is None else scale, zeros if bias is None else bias
        try:
            _kept, workspace = _NO_MEMORY if memory is None else memory()
            plan(x, scale, bias, running_mean, running_variance, y, workspace)
        except ArgumentError as error:
            raise _renamed(error, (), y="out") from error.__cause__
        return y

    return call


def _backward_call(
    plan: Any, like: Call, like_scale: Call, memory: Call | None, follow: Call | None, constants: dict[str, Any]
) -> Call:
    ones = constants.get("scale")

    def call(x: Any, dy: Any, scale: Any, saved_mean: Any, saved_inv_variance: Any, out: Any) -> tuple[Any, Any, Any]:
        if scale is None:
            scale = ones
        if follow is not None:
            follow(x)
        dx, dscale, dbias = _NO_OUT if out is None else out
        dx = like(x) if dx is None else dx
        dscale, dbias = like_scale(scale) if dscale is None else dscale, like_scale(scale) if dbias is None else dbias
        try:
            _kept, workspace = _NO_MEMORY if memory is None else memory()
            plan(x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, workspace)
        except ArgumentError as error:
            raise _renamed(error, ("dx", "dscale", "dbias")) from error.__cause__
        return dx, dscale, dbias

    return call


def _renamed(error: ArgumentError, results: tuple[str, ...], **names: str) -> ArgumentError:
    """A plan's error with this module's names of the arguments."""
    names |= {name: f"out[{i}]" for i, name in enumerate(results)}
    name = names.get(error.argument)
    return error if name is None else type(error)(name, error.value, error.allowed)


_CALLS: dict[str, Call] = {"training": _training_call, "inference": _inference_call, "backward": _backward_call}


def _inferred(x: Any, scale: Any, bias: Any, mean: Any, variance: Any, **options: Any) -> Any:
    return batch_norm_inference(x, running_mean=mean, running_variance=variance, scale=scale, bias=bias, **options)


def _through_numpy(operation: str, handle: Handle | None, options: dict[str, Any]) -> Call:
    """A call for JAX arrays on the CPU: they are read in place, and results are computed in NumPy's memory."""
    made = ("running", "saved") if operation == "backward" else ("running",)  # of what is given
    options = {name: value for name, value in options.items() if name not in made}
    functions: dict[str, Call] = {"training": batch_norm_training, "inference": _inferred}
    function: Call = functions.get(operation, batch_norm_backward)
    asarray: Call = sys.modules["jax"].numpy.asarray

    def read(value: Any) -> Any:
        # waits until the values are computed
        return np.asarray(value) if array_api_compat.is_jax_array(value) else value

    def give(value: Any, given: Any) -> Any:
        return asarray(value) if given is None and value is not None else given

    def call(*arguments: Any) -> Any:
        *arrays, out = arguments
        found: Any = function(*map(read, arrays), handle=handle, out=out, **options)
        if operation == "inference":
            return give(found, out)
        return tuple(map(give, found, out or (None, None, None)))

    return call
