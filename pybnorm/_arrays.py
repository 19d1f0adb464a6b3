"""Describes arrays of any framework by what a call needs: pointer, dims, strides, dtype, device.

Protocols, in the order of trying: `Buffer` itself, NumPy, PyTorch, ``__cuda_array_interface__``, DLPack, the buffer
protocol. If an object has a protocol and it fails, the error names the argument. No framework is imported, no data is
copied and no stream is synchronised: the caller orders the producer's stream before the call, as for every
asynchronous vendor call.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = ["Buffer", "Memory", "as_buffer", "as_memory"]

CPU = 1
CUDA = 2
ROCM = 10
UNKNOWN_DEVICE = -1

_DTYPES = "float32, float64, float16 or bfloat16"
_PROTOCOLS = "NumPy, PyTorch, DLPack, __cuda_array_interface__, the buffer protocol or a pybnorm Buffer"


class Buffer(NamedTuple):
    """Description of an array. Callers make one to pass memory of which they have only the address.

    The memory spans from the lowest to the highest element that `dims` and `strides` reach.
    """

    pointer: int
    """Address of element (0, 0, ...)."""
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; may be 0 or negative."""
    dtype: DataType
    device_type: int
    """As in DLPack: 1 CPU, 2 CUDA, 3 CUDA pinned host, 10 ROCm, 11 ROCm pinned host, 13 CUDA managed."""
    device_id: int
    """-1 if the producer does not give it."""
    writable: bool
    owner: object
    """Keeps the memory alive."""


class Memory(NamedTuple):
    """Contiguous bytes, such as a workspace."""

    pointer: int
    nbytes: int
    device_type: int
    device_id: int
    writable: bool
    owner: object


class _View(NamedTuple):
    """An array as its protocol describes it, of any element type: its dtype is None where that is none of ours."""

    buffer: Buffer
    dtype_name: str  # for errors; may be empty where dtype is not None
    itemsize: int


def as_buffer(obj: Any, argument: str) -> Buffer:
    """Describe an array of any rank and strides; a `Buffer` is returned with fields of exact types.

    An ArgumentTypeError says that it is no array, or of another dtype or byte order; an ArgumentError that its strides
    are not whole elements, its address is NULL or not aligned, it has a mask, or its own protocol failed.
    """
    if type(obj) is Buffer:
        checked: Buffer = _exact(obj, argument)
        return checked
    view = _view(obj, argument)
    buffer = view.buffer
    if buffer.dtype is None:
        raise ArgumentTypeError(argument, f"an array of dtype {view.dtype_name}", _DTYPES)
    _check_address(view, argument)
    if buffer.pointer % view.itemsize:
        raise ArgumentError(argument, f"address {buffer.pointer:#x}", f"an address aligned to {view.itemsize} bytes")
    return buffer


def as_memory(obj: Any, argument: str) -> Memory:
    """Describe contiguous memory of any element type that `as_buffer`'s protocols can express, such as a workspace."""
    if type(obj) is Memory:
        checked: Memory = _exact(obj, argument)
        return checked
    made = type(obj) is Buffer
    view = _View(_exact(obj, argument), "", obj.dtype.itemsize) if made else _view(obj, argument)
    pointer, dims, strides = view.buffer[:3]
    if any(d < 0 for d in dims):
        raise ArgumentError(argument, f"dims {dims}", "sizes of 0 or more")
    count = math.prod(dims)
    if count and any(d > 1 and s != p for d, s, p in zip(dims, strides, _packed(dims), strict=True)):
        raise ArgumentError(argument, f"dims {dims} with strides {strides} in elements", "C-contiguous memory")
    _check_address(view, argument)
    return Memory(pointer, count * view.itemsize, *view.buffer[4:])


_TRACED = (
    "a JAX array outside of jax.jit, grad and vmap, which have no memory to give: there only a handler of XLA's FFI "
    "could compute, which must be compiled against XLA's headers and is not part of pybnorm"
)


def _check_address(view: _View, argument: str) -> None:
    pointer = view.buffer.pointer
    if pointer == 0 and view.itemsize and 0 not in view.buffer.dims:
        raise ArgumentError(argument, "an array at address 0", "an array with memory")
    if not 0 <= pointer < 1 << 64:
        raise ArgumentError(argument, f"address {pointer}", "an address of 64 bits")


def _exact(said: Any, argument: str) -> Any:
    """A `Buffer` or `Memory` made by the caller, with fields of exact types; values are checked where they are used."""
    numbers: tuple[Any, ...] = (said.pointer, said.device_type, said.device_id)
    exact = type(said.writable) is bool
    if type(said) is Buffer:
        dims, strides = said.dims, said.strides
        if not isinstance(dims, (tuple, list)) or not isinstance(strides, (tuple, list)) or len(dims) != len(strides):
            raise ArgumentError(argument, f"a Buffer of dims {dims!r} and strides {strides!r}", "tuples of one length")
        if type(said.dtype) is not DataType:
            raise ArgumentTypeError(argument, f"a Buffer of dtype {said.dtype!r}", "a DataType")
        exact = exact and type(dims) is type(strides) is tuple
        numbers = (*numbers, *dims, *strides)
    else:
        numbers = (*numbers, said.nbytes)
    for number in numbers:
        if type(number) is not int:
            exact = False
            if isinstance(number, bool) or not hasattr(type(number), "__index__"):
                what = "address" if number is said.pointer else f"a {type(said).__name__} with"
                raise ArgumentTypeError(argument, f"{what} {number!r}", "an integer")
    if not exact:
        try:
            pointer, device_type, device_id, *others = map(operator.index, numbers)
            place = device_type, device_id, bool(said.writable), said.owner
        except Exception as error:
            _failed(argument, said, "fields", error)
        if type(said) is Buffer:
            rank = len(said.dims)
            return Buffer(pointer, tuple(others[:rank]), tuple(others[rank:]), said.dtype, *place)
        said = Memory(pointer, others[0], *place)
    if type(said) is Memory and not 0 <= said.nbytes < 1 << 64:
        raise ArgumentError(argument, f"a Memory of {said.nbytes} bytes", "a number of bytes, as an integer of 64 bits")
    return said


def _view(obj: Any, argument: str) -> _View:
    if issubclass(type(obj), np.ndarray):
        return _numpy(obj, argument, obj)
    try:
        torch = sys.modules.get("torch")
        tensor = getattr(torch, "Tensor", None)  # absent while another thread is importing torch
        if tensor is not None and isinstance(obj, tensor):
            return _torch(obj, argument, torch)
        if type(obj).__name__.endswith("Tracer") and type(obj).__module__.startswith("jax."):
            raise ArgumentTypeError(argument, f"a {type(obj).__name__} of JAX", _TRACED)
        for protocol in (_cuda_array_interface, _dlpack, _buffer_protocol):
            view = protocol(obj, argument)
            if view is not None:
                return view
    except ArgumentError:
        raise
    except Exception as error:  # the object's own code may raise anything
        _failed(argument, obj, "attributes", error)
    given = f"a {type(obj).__name__}" if issubclass(type(obj), (list, tuple)) else obj  # whose values are many
    raise ArgumentTypeError(argument, given, f"an array of {_DTYPES}, by {_PROTOCOLS}")


# ---- NumPy

_BY_NAME = {dtype.name.lower(): dtype for dtype in DataType}
_OF_NUMPY: dict[DataType, np.dtype[Any]] = {d: np.dtype(n) for n, d in _BY_NAME.items() if d != DataType.BFLOAT16}
_NUMPY_DTYPES = {dtype: ours for ours, dtype in _OF_NUMPY.items()}


def numpy_dtype(dtype: DataType) -> np.dtype[Any]:
    """The NumPy dtype of `dtype`; bfloat16 is ml_dtypes', and an ImportError without that package."""
    if dtype == DataType.BFLOAT16:
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return _OF_NUMPY[dtype]


def _data_type(dtype: np.dtype[Any]) -> DataType | None:
    found = _NUMPY_DTYPES.get(dtype)  # other byte orders are other keys
    if found is None and dtype.name == "bfloat16" and dtype.isnative and dtype.itemsize == 2:
        return DataType.BFLOAT16  # of ml_dtypes, which need not be importable here
    return found


def _numpy(array: np.ndarray[Any, Any], argument: str, owner: object) -> _View:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise ArgumentTypeError(argument, "a masked array", "an array without a mask, such as its filled()")
    if type(array) is not np.ndarray:  # a subclass may override its attributes
        array = np.ndarray.view(array, np.ndarray)
    dtype = array.dtype
    if dtype.hasobject:
        raise ArgumentTypeError(argument, f"an array of dtype {dtype}, references to Python objects", _DTYPES)
    found: Any = _data_type(dtype)
    address, strides = array.__array_interface__["data"][0], array.strides
    strides = _element_strides(array.shape, strides, dtype.itemsize, argument)
    name = "" if found is not None else f"{dtype}" if dtype.isnative else f"{dtype} (not this machine's byte order)"
    buffer = Buffer(address, array.shape, strides, found, CPU, 0, array.flags.writeable, owner)
    return _View(buffer, name, dtype.itemsize)


def _element_strides(dims: tuple[int, ...], strides: tuple[int, ...], itemsize: int, argument: str) -> tuple[int, ...]:
    if not itemsize:  # NumPy's empty strings
        return (0,) * len(dims)
    for dim, stride in zip(dims, strides, strict=True):
        if stride % itemsize and dim > 1:  # nothing is ever stepped along an axis of length 1
            raise ArgumentError(argument, f"strides of {strides} bytes", f"multiples of the {itemsize} byte element")
    return tuple([stride // itemsize for stride in strides])


def _packed(dims: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(dims)
    for axis in range(len(dims) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(dims[axis], 1)
    return tuple(strides)


# ---- PyTorch


def _torch(tensor: Any, argument: str, torch: Any) -> _View:
    # Attributes instead of DLPack: faster, and it also takes tensors that require a gradient.
    try:
        device = tensor.device
        name = str(tensor.dtype)
        address = tensor.data_ptr()  # fails by itself for sparse, meta and wrapped tensors
        dims, strides = tuple(tensor.shape), tuple(tensor.stride())
        dtype: Any = _BY_NAME.get(name.removeprefix("torch."))
        # ROCm builds of PyTorch call their devices cuda too.
        kind = CPU if device.type == "cpu" else ROCM if getattr(torch.version, "hip", None) else CUDA
        buffer = Buffer(address, dims, strides, dtype, kind, device.index or 0, True, tensor)
        view = _View(buffer, name, tensor.element_size())
        negated = tensor.is_neg()
    except Exception as error:
        _failed(argument, tensor, "PyTorch's tensor attributes", error)
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(argument, f"a tensor on {device}", "a tensor on a cpu or cuda device")
    if negated:
        raise ArgumentError(argument, "a tensor that is lazily negated", "its resolve_neg()")
    if wants_gradient(tensor):
        raise ArgumentError(
            argument, "a tensor that requires a gradient, which would be lost",
            "its detach(), or the call under torch.no_grad(); pybnorm.torch has gradients",
        )  # fmt: skip
    return view


def wants_gradient(tensor: Any) -> bool:
    """Say whether autograd would have to record what is done with a PyTorch tensor, as its ``numpy()`` asks, too."""
    return bool(getattr(tensor, "requires_grad", False) and sys.modules["torch"].is_grad_enabled())


def note_written(arrays: Iterable[Any]) -> None:
    """Tell PyTorch which of the caller's tensors were written: what its autograd has saved of them is another now.

    Of arrays of any framework, addresses and None it looks only at PyTorch's tensors and `Buffer` of them.
    """
    torch = sys.modules.get("torch")
    bump = getattr(getattr(getattr(torch, "autograd", None), "graph", None), "increment_version", None)  # PyTorch 2.2
    if torch is None or bump is None:
        return
    for given in arrays:
        array = given.owner if type(given) is Buffer else given
        if isinstance(array, torch.Tensor) and not array.is_inference():
            bump(array)


# ---- __cuda_array_interface__

_MAX_RANK = 64  # as in NumPy; more is a broken or hostile object
_TYPESTRS = {"<f4": DataType.FLOAT32, "<f8": DataType.FLOAT64, "<f2": DataType.FLOAT16}


def of_hip_python(obj: Any) -> bool:
    """Say whether an object is of AMD's hip-python: modules ``hip`` or, from version 10 on, ``rocm.bindings``."""
    return type(obj).__module__.partition(".")[0] in ("hip", "rocm")


def _cuda_array_interface(obj: Any, argument: str) -> _View | None:
    protocol = "__cuda_array_interface__"
    try:
        interface = obj.__cuda_array_interface__
    except AttributeError:
        return None
    except Exception as error:
        _failed(argument, obj, protocol, error)
    try:
        typestr = interface["typestr"]
        on_rocm = of_hip_python(obj)
        if on_rocm:
            typestr = np.dtype(typestr).str  # it hands on NumPy's other names, such as float32 and B
        if typestr not in _TYPESTRS and hasattr(obj, "__dlpack__"):
            return None  # the interface has no bfloat16; DLPack has
        address, read_only = interface["data"]
        pointer = operator.index(address or 0)
        dims = _sizes(interface["shape"], "shape")
        if any(dim < 0 for dim in dims):
            raise ValueError(f"shape {dims}")
        byte_strides = interface.get("strides")
        if byte_strides is not None:
            byte_strides = _sizes(byte_strides, "strides")
            if len(byte_strides) != len(dims):
                raise ValueError(f"shape {dims} with strides {byte_strides}")
        mask = interface.get("mask")
        itemsize = int(typestr[2:])
        device_type, device_id = ROCM if on_rocm else CUDA, UNKNOWN_DEVICE
        if hasattr(obj, "__dlpack_device__"):
            device_type, device_id = map(int, obj.__dlpack_device__())
    except Exception as error:
        _failed(argument, obj, protocol, error)
    if mask is not None:
        raise ArgumentTypeError(argument, "a masked array", "an array without a mask")
    strides = _packed(dims) if byte_strides is None else _element_strides(dims, byte_strides, itemsize, argument)
    dtype: Any = _TYPESTRS.get(typestr)
    return _View(Buffer(pointer, dims, strides, dtype, device_type, device_id, not read_only, obj), typestr, itemsize)


def _sizes(said: Any, what: str) -> tuple[int, ...]:
    """Integers from a foreign iterable, which may be endless."""
    found = tuple(map(operator.index, itertools.islice(said, _MAX_RANK + 1)))
    if len(found) > _MAX_RANK:
        raise ValueError(f"{what} of more than {_MAX_RANK} axes")
    return found


# ---- DLPack

_DL_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_read_capsule: Any = None
"""Set by `pybnorm._core`, which has DLPack's structures in C. Takes a capsule and the argument's name; returns address,
dims, strides, (code, bits, lanes), device type, device, writable."""


def _dlpack(obj: Any, argument: str) -> _View | None:
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        return None
    try:
        on_cpu = int(obj.__dlpack_device__()[0]) == CPU
        # -1: no synchronisation; ordering is the caller's. Producers on the CPU take no stream.
        stream = {} if on_cpu else {"stream": -1}
        try:
            capsule = obj.__dlpack__(max_version=(1, 1), copy=False, **stream)
        except TypeError:  # a producer from before DLPack 1.0
            capsule = obj.__dlpack__(**stream)
    except Exception as error:
        _failed(argument, obj, "__dlpack__", error)
    # The capsule is not consumed: it stays the owner, and its destructor releases the tensor.
    pointer, dims, strides, (code, bits, lanes), device_type, device_id, writable = _read_capsule(capsule, argument)
    name = f"{_DL_CODES.get(code, f'code {code} ')}{bits}{f'x{lanes}' if lanes != 1 else ''}"
    dtype: Any = _BY_NAME.get(name)
    buffer = Buffer(pointer, dims, strides, dtype, device_type, device_id, writable, capsule)
    return _View(buffer, name, (bits * lanes + 7) // 8)


# ---- buffer protocol (PEP 3118)


def _buffer_protocol(obj: Any, argument: str) -> _View | None:
    try:
        memory = memoryview(obj)
    except TypeError:
        return None
    except Exception as error:
        _failed(argument, obj, "buffer protocol", error)
    try:
        array = np.asarray(memory)  # reads the format; holds the buffer
    except Exception as error:
        _failed(argument, obj, f"buffer protocol (format {memory.format!r})", error)
    return _numpy(array, argument, array)


def _failed(argument: str, obj: object, protocol: str, error: Exception) -> NoReturn:
    raise ArgumentError(
        argument,
        f"{type(obj).__module__}.{type(obj).__qualname__} whose {protocol} failed: {type(error).__name__}: {error}",
        f"an array of {_DTYPES}, by {_PROTOCOLS}",
    ) from error
