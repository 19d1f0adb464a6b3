"""Checks of arguments, shared by all backends and the reference.

The rules come from the definition of batch norm and from what vendor libraries do with bad input: crash, write out of
bounds, return success with NaN. No rule depends on one vendor. Every function returns the value in its canonical form
or raises `ArgumentError` or `ArgumentTypeError`, which name the argument, its value and what is allowed.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import os
import struct
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from pybnorm._words import meant
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError

_T = TypeVar("_T")

ALIGNMENT = 64  # bytes: of a workspace, as backends ask for, and of what lies in it
INT32_MAX = 2**31 - 1  # dims and strides are C int in cuDNN's and MIOpen's descriptors
POINTER_MAX = 2**64 - 1
_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 1.4e-45  # less may be 0 in float32
_OR_ZERO = ", of magnitude 1.4e-45 or more, or 0"
_FLOAT64_MAX = 1.7976931348623157e308
_LARGEST = {
    DataType.FLOAT64: _FLOAT64_MAX,
    DataType.FLOAT32: _FLOAT32_MAX,
    DataType.FLOAT16: 65504.0,
    DataType.BFLOAT16: (2.0 - 2.0**-7) * 2.0**127,
}

_NO_ACTIVATION = (Activation.NONE, 0.0, 0.0)
_ACTIVATIONS, _MODES, _OPERATIONS, _LAYOUTS, _DATA_TYPES = (
    dict[object, Any]([*zip(kind, kind, strict=True), *((member.name.lower(), member) for member in kind)])
    for kind in (Activation, Mode, Operation, Layout, DataType)
)
# the words of the command line
_MODES |= {"peract": Mode.PER_ACTIVATION, "persistent": Mode.SPATIAL_PERSISTENT}
_OPERATIONS |= dict.fromkeys(("train", "training"), Operation.FORWARD_TRAINING)
_OPERATIONS |= dict.fromkeys(("infer", "inference"), Operation.FORWARD_INFERENCE)
_LAYOUTS |= {"nchw": Layout.CHANNELS_FIRST, "nhwc": Layout.CHANNELS_LAST, "strides": Layout.STRIDED}
_DATA_TYPES |= {d.short: d for d in DataType}


class TensorLike(Protocol):
    """The part of a tensor that the rules of calls read: of a descriptor or of an array's `Buffer`."""

    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DataType: ...


class Region(NamedTuple):
    """The memory that one argument touches: first byte, and its shape and strides in bytes."""

    name: str
    pointer: int
    dims: tuple[int, ...]
    byte_strides: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        end = self.pointer + self.itemsize
        for d, s in zip(self.dims, self.byte_strides, strict=True):
            end += (d - 1) * s
        return end


# ---------------------------------------------------------------- scalars and words


def mode(value: object, argument: str = "mode") -> Mode:
    """A `Mode` from itself, its number or a word."""
    return _member(_MODES, value, argument)


def operation(value: object) -> Operation:
    """An `Operation` from itself, its number or a word."""
    return _member(_OPERATIONS, value, "operation")


def layout(value: object, argument: str = "layout") -> Layout:
    """A `Layout` from itself, its number or a word."""
    return _member(_LAYOUTS, value, argument)


def activation_kind(value: object) -> Activation:
    """An `Activation` from itself, its number or a word."""
    return _member(_ACTIVATIONS, value, "activation")


def activation(
    value: object, low: object, high: object, dtype: DataType = DataType.FLOAT32
) -> tuple[Activation, float, float]:
    """An `Activation` from itself, its number or a word, and its bounds, 0 for each that it does not have."""
    if value is Activation.NONE and low is None and high is None:
        return _NO_ACTIVATION
    found = activation_kind(value)
    bounded = found in (Activation.CLIPPED_RELU, Activation.CLAMP)
    for name, given, wanted in (
        ("activation_low", low, found == Activation.CLAMP),
        ("activation_high", high, bounded),
    ):
        if (given is not None) != wanted:
            allowed = "a number" if wanted else "None"
            raise ArgumentError(name, given, f"{allowed} with activation {found.name.lower()!r}")
    if not bounded:
        return found, 0.0, 0.0
    bottom = 0.0 if low is None else scalar(low, "activation_low", dtype)
    top = scalar(high, "activation_high", dtype)
    if not _stored(bottom, dtype) < _stored(top, dtype):
        raise ArgumentError("activation_high", high, f"a number above {'0' if low is None else 'activation_low'}")
    return found, bottom, top


def activation_bias(value: Activation, bias: object) -> None:
    """Backward needs the bias with an activation, to recompute its mask, and takes none without."""
    if (bias is not None) != (value != Activation.NONE):
        allowed = (
            "None without an activation" if bias is not None else f"the bias with activation {value.name.lower()!r}"
        )
        raise ArgumentError("bias", bias, allowed)


def activation_result(masked: bool, y: object) -> None:
    """Backward needs forward's y if its named algorithm takes the mask from y, and takes none otherwise."""
    if (y is not None) != masked:
        fused = "with an activation of a named algorithm"
        raise ArgumentError("y", y, f"what forward wrote, {fused}" if masked else f"None; forward's y only {fused}")


def plan_activation(value: object) -> Activation:
    """An activation that a plan takes: none, or the one without bounds."""
    found = _lookup(_ACTIVATIONS, value)
    if found not in (Activation.NONE, Activation.RELU):
        raise ArgumentError("activation", value, "'none' or 'relu' in a plan")
    return found


def residual(value: Activation, z: TensorLike, x: TensorLike) -> None:
    """Rules of z, which is added to batch norm's result before the activation."""
    if value == Activation.NONE:
        raise ArgumentError("z", f"dims {z.dims}", "None without an activation: the sum is what it is applied to")
    _same("z", z, x)


def _stored(value: float, dtype: DataType) -> float:
    """The scalar as vendors read it: as float32 unless the data are float64."""
    return value if dtype == DataType.FLOAT64 else struct.unpack("f", struct.pack("f", value))[0]


def data_type(value: object, argument: str = "dtype") -> DataType:
    """A `DataType` from itself, its number, a word (``"f32"``, ``"float32"``) or a NumPy-like dtype."""
    if type(value) is DataType:
        return value
    found = _lookup(_DATA_TYPES, value)
    if found is None and not issubclass(type(value), (int, str)) and _attribute(value, "isnative", True) is True:
        name = _attribute(value, "name") or _attribute(value, "__name__")  # np.dtype | np.float32, ml_dtypes
        found = _lookup(_DATA_TYPES, name) if type(name) is str else None
    if found is None:
        raise ArgumentTypeError(argument, value, _words(_DATA_TYPES, value))
    return found


def largest(dtype: DataType) -> float:
    """The largest finite value of `dtype`."""
    return _LARGEST[dtype]


def _member(table: dict[object, Any], value: object, argument: str) -> Any:
    """The member of a word or a number, or an error."""
    found = _lookup(table, value)
    if found is None:
        raise ArgumentError(argument, value, _words(table, value))
    return found


def _lookup(table: dict[object, Any], value: object) -> Any:
    """The member of a word, in upper or lower case, or of a number. True is not 1 here, nor are 1.0 and np.True_."""
    kind = type(value)
    if kind is bool:
        return None
    if issubclass(kind, str):  # as a plain str: a subclass may hash and compare differently
        word = str.__str__(value)
        return table[word] if word in table else table.get(word.lower())
    return table.get(int.__index__(value) if issubclass(kind, int) else index(value))  # type: ignore[arg-type]


def _words(table: dict[object, Any], value: object) -> str:
    """The words that are allowed, those of one meaning together, and the one most like what was given."""
    names: dict[Any, list[str]] = {}
    for word, member in table.items():
        if type(word) is str:
            names.setdefault(member, []).append(repr(word))
    allowed = ", ".join(" or ".join(words) for words in names.values())
    return allowed + meant(value, [word for word in table if type(word) is str])


def _attribute(value: object, name: str, default: object = None) -> Any:
    """An attribute of a foreign object; the default if reading it fails."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def index(value: Any) -> int | None:
    """An integer of any type as int; None for anything else, also for bools, NumPy's bools and arrays."""
    kind = type(value)
    if kind is int:
        return value
    if kind is bool or hasattr(kind, "__len__") or not hasattr(kind, "__index__"):
        return None
    try:
        return operator.index(value)
    except Exception:
        return None


def scalar(value: object, argument: str, dtype: DataType = DataType.FLOAT64) -> float:
    """A finite float: the host-side alpha and beta, which vendors read as float32 unless the data are float64."""
    wide = dtype == DataType.FLOAT64
    allowed = "a finite number" if wide else "a finite number that float32 can hold" + _OR_ZERO
    limit = _FLOAT64_MAX if wide else _FLOAT32_MAX
    number = _float(value, argument, allowed)
    if not -limit <= number <= limit or _lost(number, dtype):
        raise ArgumentError(argument, value, allowed)
    return number


def epsilon(value: object, dtype: DataType = DataType.FLOAT64, argument: str = "epsilon") -> float:
    """A finite float >= 0. cuDNN takes NaN with status 0; MIOpen checks nothing."""
    allowed = "a finite number >= 0 that float32 can hold"
    number = _float(value, argument, allowed)
    if _FLOAT32_TINY <= number <= _FLOAT32_MAX:  # the usual case, first: every call of a Handle comes here
        return number
    if not 0.0 <= number <= _FLOAT32_MAX or _lost(number, dtype):
        raise ArgumentError(argument, value, allowed + ("" if dtype == DataType.FLOAT64 else _OR_ZERO))
    return number


def factor(value: object, argument: str = "exponential_average_factor", dtype: DataType = DataType.FLOAT64) -> float:
    """A float in [0, 1]."""
    allowed = "a number from 0 to 1"
    number = _float(value, argument, allowed)
    if _FLOAT32_TINY <= number <= 1.0:
        return number
    if not 0.0 <= number <= 1.0 or _lost(number, dtype):
        raise ArgumentError(argument, value, allowed + ("" if dtype == DataType.FLOAT64 else _OR_ZERO))
    return number


def _lost(number: float, dtype: DataType) -> bool:
    """Say whether the number may become 0 in float32, which all vendors read unless the data are float64."""
    return dtype != DataType.FLOAT64 and 0.0 < abs(number) < _FLOAT32_TINY


def boolean(value: object, argument: str) -> bool:
    """A bool."""
    if type(value) is not bool:
        raise ArgumentTypeError(argument, value, "True or False")
    return value


def _float(value: object, argument: str, allowed: str) -> float:
    if type(value) is float:
        return value
    if type(value) is not int and not _is_real(value):
        raise ArgumentTypeError(argument, value, allowed)
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ArgumentError(argument, value, allowed) from None
    except Exception:
        raise ArgumentTypeError(argument, value, allowed) from None


_REAL_TYPES = ("float", "bfloat", "int", "uint")


def _is_real(value: object) -> bool:
    """Say whether float() converts the value without parsing text or dropping an imaginary part."""
    kind = type(value)
    if issubclass(kind, float):
        return True
    if issubclass(kind, (bool, str, bytes)) or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        return False
    if issubclass(kind, numbers.Complex) and not issubclass(kind, numbers.Real):
        return False
    dtype = _attribute(value, "dtype")  # NumPy's scalars, and arrays without axes of any framework
    if dtype is None:
        return True
    name = _attribute(dtype, "name")
    try:
        name = (name if type(name) is str else str(dtype)).rpartition(".")[2]
    except Exception:
        return False
    return name.startswith(_REAL_TYPES) and _attribute(value, "ndim") in (0, None)


def pointer(value: object, argument: str) -> int:
    """A non-zero address."""
    address = _address(value, argument)
    if address == 0:
        raise ArgumentError(argument, value, "a non-NULL address")
    return address


def optional_pointer(value: object, argument: str) -> int:
    """An address, or 0 for ``None`` and 0."""
    return 0 if value is None else _address(value, argument)


def runtime_query(value: object) -> int:
    """Read the word that says when a recorded error is read: a pbn_query of shim.h."""
    words = "raw", "nonblocking", "blocking"
    name = str.__str__(value) if issubclass(type(value), str) else ""
    if name not in words:
        raise ArgumentError("mode", value, " | ".join(words))
    return words.index(name)


def algorithm(value: object, names: Collection[str], numbered: Collection[str] = ()) -> str:
    """One of `names`; those also in `numbered` may be followed by ``:`` and a digit."""
    value = text(value, "algorithm")
    name, colon, number = value.partition(":")
    if name not in names or (colon and (name not in numbered or number not in tuple("0123456789"))):
        allowed = " | ".join(names)
        if numbered:
            allowed += f"; {', '.join(numbered)} also with :0 to :9 after the name"
        raise ArgumentError("algorithm", value, allowed)
    return value


def byte_count(value: object, argument: str) -> int:
    """A number of bytes."""
    return integer(value, argument, 0, POINTER_MAX, "a number of bytes, 0 or more, as an integer of 64 bits")


def _address(value: object, argument: str) -> int:
    address = index(value)
    if address is None:
        raise ArgumentTypeError(argument, value, "an address as an integer")
    if not 0 <= address <= POINTER_MAX:
        raise ArgumentError(argument, value, "an address of 64 bits")
    return address


def instance(value: object, kind: type | tuple[type, ...], argument: str, allowed: str) -> None:
    """An object of that class; what its own ``__class__`` says, as a mock's does, is not asked."""
    if not issubclass(type(value), kind):
        raise ArgumentTypeError(argument, value, allowed)


def integer(value: object, argument: str, low: int = 0, high: int = INT32_MAX, allowed: str = "") -> int:
    """An integer of that range."""
    allowed = allowed or f"an integer from {low} to {high}"
    number = index(value)
    if number is None:
        raise ArgumentTypeError(argument, value, allowed)
    if not low <= number <= high:
        raise ArgumentError(argument, value, allowed)
    return number


def count(value: object, argument: str, low: int) -> int:
    """A number of elements, which need not be in memory."""
    return integer(value, argument, low, (1 << 63) - 1, f"an integer from {low} to 2**63 - 1")


def counts(value: object, ranks: int) -> list[int]:
    """Elements of each rank; on the host, because calls and their factors depend on them."""
    given = items(value, "counts", "a sequence of integers on the host", most=max(ranks, 64))
    numbers = [count(c, "counts", 0) for c in given]
    if len(numbers) != ranks:
        raise ArgumentError("counts", numbers, f"a count for each of the {ranks} rows of means")
    if not any(numbers):
        raise ArgumentError("counts", numbers, "at least one count above 0")
    return numbers


def text(value: object, argument: str) -> str:
    """A string."""
    instance(value, str, argument, "a string")
    return str.__str__(value)


def function(value: object, argument: str) -> None:
    """Check that the value can be called."""
    if not callable(value):
        raise ArgumentTypeError(argument, value, "a callable")


def path(value: object, argument: str, allowed: str = "a path") -> str:
    """A path as text that the system can be given."""
    try:
        text = os.fsdecode(value)  # type: ignore[arg-type]
        named = os.fsencode(text)
    except Exception as error:
        kind = ArgumentError if issubclass(type(value), (str, bytes, os.PathLike)) else ArgumentTypeError
        raise kind(argument, value, allowed) from error
    if not named or b"\0" in named:
        raise ArgumentError(argument, value, allowed)
    return text


# ---------------------------------------------------------------- shapes


def dims(value: object, argument: str = "dims", low: int = 2, high: int = 8) -> tuple[int, ...]:
    """A shape: `low` to `high` integers, each from 1 to 2**31 - 1."""
    shape = _integers(value, argument)
    if not low <= len(shape) <= high:
        raise ArgumentError(argument, _named("dims", argument, shape), f"rank {low} to {high}")
    for d in shape:
        if not 1 <= d <= INT32_MAX:
            raise ArgumentError(argument, _named("dims", argument, shape), f"sizes from 1 to {INT32_MAX}")
    return shape


def strides(value: object, shape: tuple[int, ...], argument: str = "strides") -> tuple[int, ...]:
    """Strides in elements: positive, at most 2**31 - 1, and such that no two elements share memory.

    The overlap test is the sufficient one: ordered by stride, each axis steps over all that the smaller ones span.
    """
    steps = _integers(value, argument)
    if len(steps) != len(shape):
        raise ArgumentError(argument, steps, f"one stride for each of the {len(shape)} sizes {shape}")
    for s in steps:
        if not 1 <= s <= INT32_MAX:
            raise ArgumentError(argument, _named("strides", argument, steps), f"strides from 1 to {INT32_MAX}")
    reach = 0
    for s, d in sorted([(s, d) for s, d in zip(steps, shape, strict=True) if d > 1]):
        if s <= reach:
            raise ArgumentError(
                argument,
                _named("strides", argument, steps),
                f"strides under which no two elements of {shape} overlap",
            )
        reach += (d - 1) * s
    return steps


def _named(what: str, argument: str, value: tuple[int, ...]) -> object:
    """The value for an error: bare if the argument is the dims or strides itself, else with the word."""
    return value if argument == what else f"{what} {value}"


def _integers(value: object, argument: str, allowed: str = "a sequence of integers") -> tuple[int, ...]:
    given = items(value, argument, allowed)
    if {*map(type, given)} == {int}:
        return given
    found = tuple([index(item) for item in given])
    if None in found:
        raise ArgumentTypeError(argument, value, allowed)
    return found  # type: ignore[return-value]


def items(value: Any, argument: str, allowed: str, most: int = 64) -> tuple[Any, ...]:
    """The items of an iterable other than text. More than `most` are refused before they are read."""
    if type(value) is tuple and len(value) <= most:
        return value
    if issubclass(type(value), (str, bytes, bytearray, memoryview)):
        raise ArgumentTypeError(argument, value, allowed)
    try:
        found = tuple(itertools.islice(value, most + 1))
    except Exception:
        raise ArgumentTypeError(argument, value, allowed) from None
    if len(found) > most:
        raise ArgumentError(argument, value, f"{allowed}, at most {most}")
    return found


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    return math.prod(shape)


def span(shape: tuple[int, ...], steps: tuple[int, ...]) -> int:
    """Elements from the first to the last one, both included."""
    return 1 + sum((d - 1) * s for d, s in zip(shape, steps, strict=True))


def packed_strides(shape: tuple[int, ...], layout: Layout = Layout.CHANNELS_FIRST) -> tuple[int, ...]:
    """Strides of the packed tensor in `layout`, in elements."""
    rank = len(shape)
    if layout == Layout.CHANNELS_FIRST:
        order = list(range(rank))
    elif layout == Layout.CHANNELS_LAST:
        order = [0, *range(2, rank), 1] if rank > 1 else [0]
    else:
        raise ArgumentError("layout", layout, "CHANNELS_FIRST or CHANNELS_LAST")
    steps = [0] * rank
    step = 1
    for axis in reversed(order):
        steps[axis] = step
        step *= shape[axis]
    return tuple(steps)


def layout_of(shape: tuple[int, ...], steps: tuple[int, ...]) -> Layout:
    """The layout of these strides; channels first if both packed layouts match."""
    for layout in (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST):
        packed = packed_strides(shape, layout)
        if all(d == 1 or s == p for d, s, p in zip(shape, steps, packed, strict=True)):
            return layout
    return Layout.STRIDED


def is_packed_vector(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Say whether the elements are contiguous, in order."""
    expected = 1
    for d, s in zip(reversed(shape), reversed(steps), strict=True):
        if d != 1:
            if s != expected:
                return False
            expected *= d
    return True


def kept_axes(rank: int, bn_mode: Mode) -> tuple[int, ...]:
    """Axes that parameters keep."""
    return (1,) if bn_mode != Mode.PER_ACTIVATION else tuple(range(1, rank))


def axes(value: object, rank: int, argument: str = "axis") -> tuple[int, ...]:
    """Axes of data of `rank`, from one or several integers: ascending, each once, negative ones from the end."""
    allowed = "an integer or a tuple of integers"
    single = index(value)
    found = (single,) if single is not None else _integers(value, argument, allowed)
    if any(not -rank <= a < rank for a in found):
        raise ArgumentError(argument, value, f"axes from {-rank} to {rank - 1} for data of rank {rank}")
    if len({a % rank for a in found}) != len(found):
        raise ArgumentError(argument, value, "each axis once")
    return tuple(sorted(a % rank for a in found))


def reduced_axes(rank: int, bn_mode: Mode) -> tuple[int, ...]:
    """Axes that statistics sum over."""
    return (0, *range(2, rank)) if bn_mode != Mode.PER_ACTIVATION else (0,)


def derived_dims(shape: tuple[int, ...], bn_mode: Mode) -> tuple[int, ...]:
    """Shape of scale, bias and statistics for data of `shape`: rank kept, reduced axes 1."""
    kept = kept_axes(len(shape), bn_mode)
    return tuple(d if axis in kept else 1 for axis, d in enumerate(shape))


def derived_data_type(dtype: DataType) -> DataType:
    """dtype of scale, bias and statistics: float64 for float64 data, else float32."""
    return DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32


def reduced_count(shape: tuple[int, ...], bn_mode: Mode) -> int:
    """Elements per statistic, the m of the formulas."""
    return math.prod(shape[axis] for axis in reduced_axes(len(shape), bn_mode))


def parameter_dims(
    argument: str, shape: tuple[int, ...], steps: tuple[int, ...] | None, derived: tuple[int, ...]
) -> None:
    """A parameter array: the derived shape, or the same without (some of) its axes of length 1; contiguous."""
    if shape != derived and [d for d in shape if d != 1] != [d for d in derived if d != 1]:
        allowed = f"shape {derived}, axes of length 1 may be left out"
        if len(derived) > 2 and len(shape) == 1 and derived.count(1) >= len(derived) - 1:
            last = ", ".join(map(str, (0, len(derived) - 1, *range(1, len(derived) - 1))))
            channels = math.prod(derived)
            allowed = f"shape ({channels},): x has {channels} channels, on axis 1. Where they are last, pass "
            allowed += f"x.transpose({last})"
        raise ArgumentError(argument, f"shape {shape}", allowed)
    if steps is not None and not is_packed_vector(shape, steps):
        raise ArgumentError(argument, f"strides {steps}", "a contiguous array")


def pair(name_a: str, a: object, name_b: str, b: object) -> bool:
    """Both given (True) or neither (False)."""
    if (a is None) != (b is None):
        missing, given = (name_a, name_b) if a is None else (name_b, name_a)
        raise ArgumentError(missing, None, f"to be given, because {given} is, or both absent")
    return a is not None


# ---------------------------------------------------------------- aliasing


def disjoint(outputs: list[Region], inputs: list[Region]) -> None:
    """No output shares memory with an input or with another output; every address is aligned to its element.

    Interleaved views of one buffer with equal strides (two channel slices) are told apart exactly; other views
    whose byte ranges overlap are refused.
    """
    regions: list[tuple[int, int, bool, Region]] = []
    for group, written in ((outputs, True), (inputs, False)):
        for r in group:
            pointer, end = r.pointer, r.end
            if pointer % r.itemsize:
                raise ArgumentError(r.name, f"address {pointer:#x}", f"an address aligned to {r.itemsize} bytes")
            if end > POINTER_MAX:
                raise ArgumentError(r.name, f"address {pointer:#x}", "memory that ends below 2**64")
            regions.append((pointer, end, written, r))
    regions.sort(key=operator.itemgetter(0))
    for i, (_, end, is_output, region) in enumerate(regions):
        for start, _, other_is_output, other in regions[i + 1 :]:
            if start >= end:
                break
            if (is_output or other_is_output) and _share(region, other):
                output, blamed = (region, other) if is_output else (other, region)
                raise ArgumentError(
                    output.name, f"memory that overlaps {blamed.name}", f"memory of its own, apart from {blamed.name}"
                )


def _share(a: Region, b: Region) -> bool:
    if a.byte_strides != b.byte_strides or a.dims != b.dims or a.itemsize != b.itemsize:
        return True
    distance = b.pointer - a.pointer
    if distance % a.itemsize:
        return True
    axes = sorted(
        ((s, d) for s, d in zip(a.byte_strides, a.dims, strict=True) if d > 1), key=operator.itemgetter(0), reverse=True
    )
    return _reachable(distance, axes)


def _reachable(distance: int, axes: list[tuple[int, int]]) -> bool:
    """Say whether sum(q_i * stride_i) == distance has a solution with |q_i| < size_i (axes by falling stride)."""
    if not axes:
        return distance == 0
    (step, size), rest = axes[0], axes[1:]
    reach = sum((d - 1) * s for s, d in rest)
    low = max(-(size - 1), -((reach - distance) // step))
    high = min(size - 1, (distance + reach) // step)
    return any(_reachable(distance - q * step, rest) for q in range(low, high + 1))


# ---------------------------------------------------------------- the calls


def _same(argument: str, t: TensorLike, x: TensorLike, other: str = "x") -> None:
    if t.dims != x.dims:
        raise ArgumentError(argument, f"dims {t.dims}", f"the dims of {other}, {x.dims}")
    if t.dtype != x.dtype:
        raise ArgumentTypeError(argument, f"dtype {t.dtype.short}", f"the dtype of {other}, {x.dtype.short}")


def _param(param: TensorLike, x: TensorLike, bn_mode: Mode) -> None:
    derived = derived_dims(x.dims, bn_mode)
    if param.dims != derived:
        raise ArgumentError(
            "param_desc", f"dims {param.dims}", f"{derived}, as derived from x {x.dims} in mode {bn_mode.name}"
        )
    allowed = dict.fromkeys((derived_data_type(x.dtype), *([x.dtype] if x.dtype.itemsize == 2 else [])))
    if param.dtype not in allowed:
        words = " or ".join(dtype.short for dtype in allowed)
        raise ArgumentTypeError("param_desc", f"dtype {param.dtype.short}", f"{words} for {x.dtype.short} data")


SCALARS: dict[Operation, tuple[str, ...]] = {
    Operation.FORWARD_TRAINING: ("mode", "alpha", "beta", "exponential_average_factor", "epsilon"),
    Operation.FORWARD_INFERENCE: ("mode", "alpha", "beta", "epsilon"),
    Operation.BACKWARD: ("mode", "alpha", "beta", "alpha_param", "beta_param", "epsilon"),
    Operation.AXPBY: ("a", "b"),
    Operation.FILL: ("value",),
    Operation.RELU: (),
    Operation.RELU_BACKWARD: (),
}
"""The scalars of each call, by their names in `Handle`'s methods."""


def call(
    op: Operation, tensors: Mapping[str, TensorLike], param: TensorLike | None = None, running: bool = False,
    **values: object,
) -> tuple[Any, ...]:  # fmt: skip
    """Rules of every call; returns its `SCALARS` in canonical form.

    `tensors`: those that are like the first. `running`: with running statistics.
    """
    (_, x), *others = tensors.items()
    found = tuple([_scalar_of(name, values[name], x) for name in SCALARS[op]])
    for name, tensor in others:
        _same(name, tensor, x)
    if param is not None:
        _param(param, x, found[0])
    if op == Operation.FORWARD_TRAINING and running and reduced_count(x.dims, found[0]) == 1:
        # The unbiased variance is 0/0: cuDNN writes NaN, MIOpen omits the correction, PyTorch refuses.
        raise ArgumentError(
            "x",
            f"dims {x.dims} in mode {found[0].name}",
            "at least two elements per statistic when running statistics are updated",
        )
    return found


def _scalar_of(name: str, value: object, x: TensorLike) -> Any:
    if name == "mode":
        return mode(value)
    if name == "epsilon":
        return epsilon(value, x.dtype)
    if name == "exponential_average_factor":
        return factor(value, dtype=x.dtype)
    return fill(value, x) if name == "value" else scalar(value, name, x.dtype)


def fill(value: object, y: TensorLike) -> float:
    """Rules of y = value; returns the value in canonical form."""
    allowed = f"a finite number that {y.dtype.name.lower()} can hold"
    number = _float(value, "value", allowed)
    if not abs(number) <= _LARGEST[y.dtype]:
        raise ArgumentError("value", value, allowed)
    return number
