"""Arrays of other array namespaces, which NumPy's functions take: what is written for NumPy runs on a GPU as it is.

A `Foreign` holds an array of CuPy, PyTorch or NumPy itself and says to NumPy, by ``__array_ufunc__`` and
``__array_function__``, how its functions are done there: one after the other in float64 and 64-bit integers, so that
each result that IEEE 754 defines is the same to the bit on every device. Only sums are added in another order. Data
live there; what has one value per statistic stays in NumPy, and is copied where it meets data.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm.errors import ArgumentError, LibraryNotFoundError

__all__ = ["NAMES", "Foreign", "Namespace", "beside", "namespace", "on_host"]

Array = npt.NDArray[Any]
NAMES = ("numpy", "cupy", "torch")
BLOCK = 1 << 22
"""Elements of a block there: a GPU wants many at a time."""
_FLOAT, _INT, _WORD, _BOOL = (np.dtype(t) for t in (np.float64, np.int64, np.uint64, np.bool_))
_COMPARE = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isfinite", "isnan", "isinf")


class Namespace:
    """One library's functions for the reference and the judge; `namespace` gives them by name."""

    name = "numpy"
    place: dict[str, str] = {}  # noqa: RUF012 (a constant)
    """Keywords that say where the library makes an array."""
    renamed = {"abs": "absolute", "bitwise_not": "invert"}  # noqa: RUF012 (a constant)
    """The library's names of NumPy's ufuncs, where they differ."""

    def __init__(self, device_id: int = 0) -> None:
        self.device_id = device_id
        self.lib: Any = importlib.import_module(self.name)

    @property
    def on_cpu(self) -> bool:
        """True where its arrays are in the memory of the CPU."""
        return True

    def functions(self, name: str) -> Callable[..., Any]:
        """The library's function for a ufunc of NumPy."""
        function: Callable[..., Any] = getattr(self.lib, self.renamed.get(name, name))
        return function

    # ------------------------------------------------------------ arrays

    def raw_type(self, dtype: np.dtype[Any]) -> Any:
        """The library's type that holds `dtype`: bfloat16 as 16 bits where it has no such type."""
        return np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype

    def put(self, host: Array) -> Any:
        """A copy of a NumPy array."""
        return self.lib.array(np.ascontiguousarray(host).view(self.raw_type(host.dtype)))

    def get(self, raw: Any, dtype: np.dtype[Any]) -> Array:
        """A copy as a NumPy array."""
        result: Array = np.array(raw).view(dtype)
        return result

    def of(self, host: Array) -> Any:
        """A copy of a NumPy array."""
        return Foreign(self.put(host), host.dtype, self)

    def scalar(self, value: Any, dtype: np.dtype[Any]) -> Any:
        """A number as an operand."""
        return dtype.type(value)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array of any content."""
        return Foreign(self.lib.empty(shape, dtype=self.raw_type(dtype), **self.place), dtype, self)

    def arange(self, first: int, stop: int, dtype: Any) -> Any:
        """Consecutive integers."""
        kind = np.dtype(dtype)
        return Foreign(self.lib.arange(first, stop, dtype=self.raw_type(kind), **self.place), kind, self)

    def strides(self, raw: Any, dtype: np.dtype[Any]) -> tuple[int, ...]:
        """Give the strides in bytes."""
        return tuple(raw.strides)

    def elements(self, image: Any, dims: tuple[int, ...], dtype: np.dtype[Any], steps: tuple[int, ...], at: int) -> Any:
        """A view of bytes as elements; steps in elements, `at` in bytes."""
        raw = self.raw_type(dtype)
        return np.ndarray(dims, raw, image, at, tuple(s * dtype.itemsize for s in steps))

    def bytes_at(self, pointer: int, nbytes: int, owner: object) -> Any:
        """Memory that is there already."""
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
        protocol = "__array_interface__" if self.on_cpu else "__cuda_array_interface__"
        memory = type("Memory", (), {protocol: interface, "owner": owner})()
        return Foreign(self.shared(memory), np.dtype(np.uint8), self)

    def shared(self, memory: Any) -> Any:
        """An array over the memory that an interface describes."""
        return self.lib.asarray(memory)

    def transpose(self, raw: Any, axes: tuple[int, ...]) -> Any:
        """A view with the axes in another order."""
        return raw.transpose(axes)

    def convert(self, raw: Any, old: np.dtype[Any], new: np.dtype[Any]) -> Any:
        """Convert to another type; to 16 bits by `narrowed`."""
        if old.name == "bfloat16":
            raw = self.bits(self.bits_as(raw, np.uint32) << 16, np.float32)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return self.bits_as(raw, new)

    def bits_as(self, raw: Any, dtype: Any) -> Any:
        """Converted by the library's own rules."""
        return raw.astype(self.raw_type(np.dtype(dtype)))

    def bits(self, raw: Any, dtype: Any) -> Any:
        """The same bits as another type of the same size."""
        return raw.view(self.raw_type(np.dtype(dtype)))

    def narrowed(self, raw: Any, dtype: np.dtype[Any]) -> Any:
        """float64 rounded once to 16 bits: to odd in float32 first (`pybnorm.reference.round_to`)."""
        lib = self.lib
        with np.errstate(over="ignore", under="ignore"):
            narrow = self.bits_as(raw, np.float32)
        back = self.bits_as(narrow, np.float64)
        bits = self.bits(narrow, np.int32)
        bits -= self.bits_as(lib.abs(back) > lib.abs(raw), np.int32)
        bits |= self.bits_as(back != raw, np.int32)
        if dtype.name != "bfloat16":
            with np.errstate(over="ignore", under="ignore"):
                return self.bits_as(narrow, dtype)
        return self.to_bfloat16(narrow, bits)

    def to_bfloat16(self, narrow: Any, bits: Any) -> Any:
        """float32 rounded to nearest even, as 16 bits."""
        up = bits + (0x7FFF + ((bits >> 16) & 1))
        up = self.lib.where(self.lib.isnan(narrow), (bits | 0x400000) & -0x10000, up)
        return self.bits_as((up >> 16) & 0xFFFF, np.uint16)

    def right_shift(self, raw: Any, count: int) -> Any:
        """Shift words without a sign."""
        return raw >> np.uint64(count)

    def order(self, raw: Any) -> Any:
        """The stable order of words along the last axis."""
        return self.lib.argsort(raw, axis=-1, kind="stable")

    def synchronize(self) -> None:
        """Wait for the device."""

    def release(self) -> None:
        """Give back what the library keeps of memory that is free: a vendor's library needs it."""


class _Cupy(Namespace):
    name = "cupy"

    @functools.cached_property
    def on_cpu(self) -> bool:
        try:
            return float(self.lib.ones(2).sum()) != 2.0
        except Exception:  # of a driver, a device or a compiler that is not there
            return True

    def get(self, raw: Any, dtype: np.dtype[Any]) -> Array:
        result: Array = raw.get().view(dtype)
        return result

    def elements(self, image: Any, dims: tuple[int, ...], dtype: np.dtype[Any], steps: tuple[int, ...], at: int) -> Any:
        strides = tuple(s * dtype.itemsize for s in steps)
        return self.lib.ndarray(dims, self.raw_type(dtype), image.data + at, strides)

    def order(self, raw: Any) -> Any:
        return self.lib.stack([self.lib.argsort(row) for row in raw])  # which is stable

    def synchronize(self) -> None:
        self.lib.cuda.Device(self.device_id).synchronize()

    def release(self) -> None:
        self.lib.get_default_memory_pool().free_all_blocks()


class _Torch(Namespace):
    name = "torch"
    renamed = {  # noqa: RUF012 (a constant)
        "negative": "neg", "equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt",
        "greater_equal": "ge", "invert": "bitwise_not",
    }  # fmt: skip

    def __init__(self, device_id: int = 0) -> None:
        super().__init__(device_id)
        self.device = f"cuda:{device_id}" if self.lib.cuda.is_available() else "cpu"
        self.place = {"device": self.device}

    def functions(self, name: str) -> Callable[..., Any]:
        # On the CPU PyTorch's own is not always the nearest number.
        return self._sqrt if name == "sqrt" and self.on_cpu else super().functions(name)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def _sqrt(self, raw: Any, out: Any = None) -> Any:
        result = self.lib.from_numpy(np.asarray(np.sqrt(raw.numpy())))
        return result if out is None else out.copy_(result)

    def raw_type(self, dtype: np.dtype[Any]) -> Any:
        return getattr(self.lib, {"uint64": "int64", "uint32": "int32", "uint16": "int16"}.get(dtype.name, dtype.name))

    def put(self, host: Array) -> Any:
        signed = {2: np.int16, 8: np.int64}
        plain = np.array(host, order="C")
        if host.dtype.name in ("bfloat16", "uint64"):
            plain = plain.view(signed[host.itemsize])
        raw = self.lib.from_numpy(plain).to(self.device)
        return raw.view(self.lib.bfloat16) if host.dtype.name == "bfloat16" else raw

    def get(self, raw: Any, dtype: np.dtype[Any]) -> Array:
        raw = raw.detach()
        plain = raw.view(self.lib.int16) if dtype.name == "bfloat16" else raw
        result: Array = np.array(plain.cpu().numpy()).view(dtype)
        return result

    def scalar(self, value: Any, dtype: np.dtype[Any]) -> Any:
        if dtype == _WORD:
            value = int(value) - (1 << 64 if int(value) >> 63 else 0)
        return self.lib.tensor(value, dtype=self.raw_type(dtype))  # of a CPU: one number may meet any device

    def strides(self, raw: Any, dtype: np.dtype[Any]) -> tuple[int, ...]:
        return tuple(s * dtype.itemsize for s in raw.stride())

    def elements(self, image: Any, dims: tuple[int, ...], dtype: np.dtype[Any], steps: tuple[int, ...], at: int) -> Any:
        size = dtype.itemsize
        usable = (image.numel() - at) // size * size
        return image[at : at + usable].view(self.raw_type(dtype)).as_strided(dims, steps)

    def shared(self, memory: Any) -> Any:
        return self.lib.as_tensor(np.asarray(memory) if self.on_cpu else memory, device=self.device)

    def transpose(self, raw: Any, axes: tuple[int, ...]) -> Any:
        return raw.permute(axes)

    def convert(self, raw: Any, old: np.dtype[Any], new: np.dtype[Any]) -> Any:
        return self.bits_as(raw, new)

    def bits_as(self, raw: Any, dtype: Any) -> Any:
        return raw.to(self.raw_type(np.dtype(dtype)), copy=True)

    def to_bfloat16(self, narrow: Any, bits: Any) -> Any:
        return narrow.to(self.lib.bfloat16)

    def right_shift(self, raw: Any, count: int) -> Any:
        return raw >> count & ((1 << 64 - count) - 1) if count else raw

    def order(self, raw: Any) -> Any:
        return self.lib.argsort(raw ^ -(1 << 63), dim=-1, stable=True)

    def synchronize(self) -> None:
        if self.device != "cpu":
            self.lib.cuda.synchronize(self.device)

    def release(self) -> None:
        if self.device != "cpu":
            self.lib.cuda.empty_cache()


_CLASSES: dict[str, type[Namespace]] = {"numpy": Namespace, "cupy": _Cupy, "torch": _Torch}


@functools.cache
def namespace(name: str, device_id: int = 0) -> Namespace:
    """The namespace of that name.

    Raises
    ------
    ArgumentError
        Another name.
    LibraryNotFoundError
        The library cannot be imported.
    """
    if name not in _CLASSES:
        raise ArgumentError("judge", name, " | ".join(NAMES))
    try:
        return _CLASSES[name](device_id)
    except ImportError as error:
        raise LibraryNotFoundError(f"the judge on {name} needs that package ({error})", backend=name) from error


def beside(host: Any, data: Any) -> Any:
    """`host`, an array of NumPy's, where `data` is."""
    return data.namespace.of(host) if isinstance(data, Foreign) else host


def on_host(data: Any) -> Any:
    """`data` as an array of NumPy's."""
    return np.asarray(data) if isinstance(data, Foreign) else data


# ---------------------------------------------------------------- arrays


class Foreign(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of another namespace, which NumPy's functions take."""

    __slots__ = ("dtype", "namespace", "raw")

    def __init__(self, raw: Any, dtype: np.dtype[Any], namespace: Namespace) -> None:
        self.raw, self.dtype, self.namespace = raw, np.dtype(dtype), namespace

    def _like(self, raw: Any, dtype: Any = None) -> Foreign:
        return Foreign(raw, self.dtype if dtype is None else dtype, self.namespace)

    @property
    def shape(self) -> tuple[int, ...]:
        """The same as of any array."""
        return tuple(self.raw.shape)

    @property
    def ndim(self) -> int:
        """The same as of any array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The same as of any array."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides in bytes."""
        return self.namespace.strides(self.raw, self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __float__(self) -> float:
        return float(np.asarray(self).item())

    def __int__(self) -> int:
        return int(np.asarray(self).item())

    def __bool__(self) -> bool:
        return bool(np.asarray(self).item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host = self.namespace.get(self.raw, self.dtype)
        return host if dtype is None else host.astype(dtype)

    def astype(self, dtype: Any, copy: bool = True) -> Foreign:
        """A copy in another type, rounded once."""
        new, space = np.dtype(dtype), self.namespace
        if new == self.dtype:
            return self.copy() if copy else self
        if self.dtype == _FLOAT and new.itemsize == 2 and new.kind not in "iu":
            return self._like(space.narrowed(self.raw, new), new)
        return self._like(space.convert(self.raw, self.dtype, new), new)

    def copy(self) -> Foreign:
        """A copy."""
        return self._like(self.namespace.lib.clone(self.raw) if self.namespace.name == "torch" else self.raw.copy())

    def reshape(self, *shape: Any) -> Foreign:
        """Give it another shape; a view where there is one."""
        return self._like(
            self.raw.reshape(tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        )

    def ravel(self) -> Foreign:
        """Give it one axis."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> Foreign:
        """Put its axes in another order."""
        return self._like(self.namespace.transpose(self.raw, tuple(axes[0] if len(axes) == 1 else axes)))

    def _reduced(self, name: str, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Foreign:
        lib = self.namespace.lib
        axes = tuple(range(self.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        if self.namespace.name != "torch":
            return self._like(getattr(lib, name)(self.raw, axis=axes, keepdims=keepdims), dtype)
        if name in ("any", "all"):
            raw = self.raw if name == "any" else ~self.raw
            for a in sorted(axes, reverse=True):
                raw = raw.any(dim=a, keepdim=keepdims)
            return self._like(raw if name == "any" else ~raw, dtype)
        return self._like(
            getattr(lib, {"max": "amax", "min": "amin"}.get(name, name))(self.raw, axes, keepdim=keepdims)
        )

    def max(self, axis: Any = None, initial: Any = None, keepdims: bool = False, where: Any = None) -> Any:
        """The largest."""
        if where is not None:
            chosen: Any = np.where(where, self, float(initial))
            return chosen.max(axis, initial, keepdims)
        return initial if initial is not None and not self.size else self._reduced("max", axis, keepdims)

    def min(self, axis: Any = None, initial: Any = None, keepdims: bool = False) -> Any:
        """The least."""
        return initial if initial is not None and not self.size else self._reduced("min", axis, keepdims)

    sum = functools.partialmethod(_reduced, "sum")  # of any order
    any, all = functools.partialmethod(_reduced, "any"), functools.partialmethod(_reduced, "all")

    def order(self) -> Foreign:
        """The stable order along the last axis."""
        return self._like(self.namespace.order(self.raw), _INT)

    def same_bits(self, other: Foreign) -> bool:
        """Say whether two arrays of one type are equal to the bit."""
        space, word = self.namespace, {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[self.itemsize]
        return bool((space.bits(self.raw, word) == space.bits(other.raw, word)).all())

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, np.ndarray) for k in keys):  # some elements, for NumPy
            own = tuple(self.namespace.put(k) if isinstance(k, np.ndarray) else k for k in keys)
            return np.asarray(self._like(self.raw[own]))
        own = tuple(k.raw if isinstance(k, Foreign) else k for k in keys)
        return self._like(self.raw[own if isinstance(key, tuple) else own[0]])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, Foreign):
            value = value.astype(self.dtype, copy=False).raw
        elif np.ndim(value):
            value = self.namespace.put(np.asarray(value).astype(self.dtype))
        elif self.dtype.name == "bfloat16":
            value = self.namespace.put(np.asarray(value, np.float64).astype(self.dtype).reshape(1))[0]
        self.raw[key.raw if isinstance(key, Foreign) else key] = value

    # ------------------------------------------------------------ NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        space, name = self.namespace, ufunc.__name__
        if name == "frexp":
            return _frexp(inputs[0])
        kind = _kind(inputs)
        if name in ("right_shift", "left_shift"):
            to_right = space.right_shift if kind == _WORD else operator.rshift
            shift = to_right if name == "right_shift" else operator.lshift
            return self._like(shift(inputs[0].raw, int(inputs[1])), inputs[0].dtype)
        if name in ("divide", "true_divide", "sqrt"):
            kind = _FLOAT
        operands = [_operand(space, a, kind, name == "divide") for a in inputs]
        result = _BOOL if name in _COMPARE or name.startswith("logical") else kind
        function = space.functions(name)
        if out is not None and isinstance(out[0], Foreign) and out[0].dtype == result:
            function(*operands, out=out[0].raw)
            return out[0]
        raw = function(*operands)
        if out is None:
            return self._like(raw, result)
        out[0][...] = self._like(raw, result)
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known = _FUNCTIONS.get(function)
        return NotImplemented if known is None else known(self.namespace, *args, **kwargs)


def _kind(inputs: tuple[Any, ...]) -> np.dtype[Any]:
    """The type that operands are computed in."""
    kinds = {np.asarray(a).dtype.kind if not isinstance(a, Foreign) else a.dtype.kind for a in inputs}
    if kinds & {"f", "V"}:
        return _FLOAT
    if "u" in kinds and any(getattr(a, "dtype", None) == _WORD for a in inputs):
        return _WORD
    return _INT if kinds & {"i", "u"} else _BOOL


def _operand(space: Namespace, value: Any, kind: np.dtype[Any], divided: bool = False) -> Any:
    """An operand in the library's own terms."""
    if isinstance(value, Foreign):
        return value.astype(kind, copy=False).raw
    if np.ndim(value):
        return space.put(np.asarray(value).astype(kind, copy=False))
    if divided:  # PyTorch would multiply by the rounded inverse of a number
        return space.put(np.asarray(value, kind))
    return space.scalar(np.asarray(value).item(), kind)


def _frexp(values: Any) -> tuple[Any, Any]:
    """Mantissa and exponent by comparisons and powers of two, which are exact everywhere."""
    mantissa = values.copy()
    exponent = np.zeros_like(values)
    for step in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        small = mantissa < 2.0**-step
        mantissa = np.where(small, mantissa * 2.0**step, mantissa)
        exponent = exponent - np.where(small, float(step), 0.0)
        large = mantissa >= 2.0**step
        mantissa = np.where(large, mantissa * 2.0**-step, mantissa)
        exponent = exponent + np.where(large, float(step), 0.0)
    top = mantissa >= 1.0
    mantissa = np.where(top, mantissa * 0.5, mantissa)
    exponent = exponent + np.where(top, 1.0, 0.0)
    return mantissa, exponent


def _where(space: Namespace, condition: Any, one: Any, other: Any) -> Foreign:
    kind = _kind((one, other))
    test = _operand(space, condition, _BOOL)
    return Foreign(space.lib.where(test, _operand(space, one, kind), _operand(space, other, kind)), kind, space)


def _filled(value: Any) -> Callable[..., Foreign]:
    def like(space: Namespace, array: Any, dtype: Any = None, **_: Any) -> Foreign:
        result = space.empty(array.shape, np.dtype(dtype) if dtype is not None else array.dtype)
        if value is not None:
            result[...] = value
        return result

    return like


def _take(space: Namespace, array: Any, indices: Any, axis: int | None = None) -> Any:
    if not isinstance(indices, Foreign):  # some elements, for NumPy
        return array[(slice(None),) * (axis or 0) + (np.asarray(indices),)]
    values = space.put(np.asarray(array).ravel())
    return Foreign(values[indices.raw], np.asarray(array).dtype, space)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.zeros_like: _filled(0),
    np.empty_like: _filled(None),
    np.take: _take,
    np.broadcast_to: lambda space, a, shape, **_: Foreign(space.lib.broadcast_to(a.raw, tuple(shape)), a.dtype, space),
    np.count_nonzero: lambda space, a: int(space.lib.count_nonzero(a.raw)),
    np.any: lambda space, a, axis=None, keepdims=False: a.any(axis, keepdims),
    np.all: lambda space, a, axis=None, keepdims=False: a.all(axis, keepdims),
    np.diff: lambda space, a, axis: a[:, 1:] - a[:, :-1],  # of two axes, along the second
    np.argmax: lambda space, a: int(space.lib.argmax(a.raw)),
    np.copyto: lambda space, to, values, **_: operator.setitem(to, ..., values),
}
