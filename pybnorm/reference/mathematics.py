"""The reference's results, checks of its arguments, and its formulas for one tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments
from pybnorm.enums import DataType, Mode
from pybnorm.errors import ArgumentError
from pybnorm.reference.blocks import _data, _parameter, _Read, _Walk
from pybnorm.reference.rounding import Array, Float64Array, Index, _cut, _load, _plain, _store


class Derived(NamedTuple):
    """Result of `derive`."""

    dims: tuple[int, ...]
    """Shape of scale, bias and statistics."""
    data_type: DataType
    """float64 for float64 data, else float32."""


class ForwardTraining(NamedTuple):
    """Results of `forward_training`."""

    y: Array
    """Shape of x."""
    saved_mean: Array
    """Batch mean, derived shape."""
    saved_inv_variance: Array
    """1 / sqrt(variance + epsilon), the inverse standard deviation, which vendors call InvVariance; derived shape."""
    running_mean: Array | None
    """Updated running mean; None without running statistics."""
    running_variance: Array | None
    """Updated running variance; None without running statistics."""
    variance: Array
    """Biased batch variance, derived shape."""


class ForwardInference(NamedTuple):
    """Result of `forward_inference`."""

    y: Array
    """Shape of x."""


class Backward(NamedTuple):
    """Results of `backward`."""

    dx: Array
    """Shape of x."""
    dscale: Array
    """Derived shape."""
    dbias: Array
    """Derived shape."""


def _prior(argument: str, array: Array | None, beta_name: str, beta: float) -> Array | None:
    if beta == 0.0:
        if array is not None:
            _arguments.instance(array, np.ndarray, argument, "a NumPy array")
        return None
    if array is None:
        raise ArgumentError(argument, None, f"an array, because {beta_name} is {beta}")
    return array


def _outputs(out: Mapping[str, Array] | None, allowed: Sequence[str]) -> dict[str, Array]:
    """Check `out` except for shapes: names, arrays, dtypes, writability, no element twice."""
    if out is None:
        return {}
    _arguments.instance(out, Mapping, "out", "a mapping from result names to arrays")
    for name, given in out.items():
        if name not in allowed:
            raise ArgumentError("out", f"key {name!r}", "keys among " + ", ".join(allowed))
        argument = f"out[{name!r}]"
        _arguments.instance(given, np.ndarray, argument, "a NumPy array")
        array = _plain(given)
        _arguments.data_type(array.dtype, argument)
        if not array.flags.writeable:
            raise ArgumentError(argument, "a read-only array", "a writable array")
        # NumPy's stride of an axis of length 1 is arbitrary, and unused.
        steps = [abs(s) if d > 1 else array.itemsize for s, d in zip(array.strides, array.shape, strict=True)]
        if any(s % array.itemsize for s in steps):
            raise ArgumentError(argument, f"byte strides {array.strides}", f"multiples of {array.itemsize}")
        _arguments.strides([s // array.itemsize for s in steps], array.shape, argument)
    return dict(out)


def _data_result(out: Mapping[str, Array], name: str, x: Array) -> Array:
    if name not in out:
        return np.empty_like(x, dtype=np.float64, subok=False)
    _data(f"out[{name!r}]", out[name], x.shape)
    return out[name]


class _ParameterResult:
    """A result of derived shape: the array to return, and a view of it in that shape."""

    def __init__(self, out: Mapping[str, Array], name: str, derived: tuple[int, ...]) -> None:
        self.array = out[name] if name in out else np.empty(derived)
        self._view = _parameter(f"out[{name!r}]", self.array, derived)

    def store(self, index: Index, values: Float64Array) -> None:
        _store(self._view, index, values)


def _disjoint(outputs: Mapping[str, Array], inputs: Mapping[str, Array | None], own: Mapping[str, str]) -> None:
    """Refuse outputs that overlap an input or another output. An output may be its own prior value (`own`)."""
    regions = []
    for name, array in inputs.items():
        output = outputs.get(own.get(name, ""))
        if array is not None and (output is None or _place(output) != _place(array)):
            regions.append(_region(name, array))
    _arguments.disjoint([_region(f"out[{name!r}]", a) for name, a in outputs.items()], regions)


def _place(array: Array) -> tuple[object, ...]:
    """A key that is equal for arrays with the same elements in the same order, ignoring axes of length 1."""
    steps = [(d, s) for d, s in zip(array.shape, array.strides, strict=True) if d > 1]
    return array.ctypes.data, steps, array.dtype


def _region(name: str, array: Array) -> _arguments.Region:
    # With a negative stride the first element is the last in memory.
    start = array.ctypes.data + sum((d - 1) * s for d, s in zip(array.shape, array.strides, strict=True) if s < 0)
    return _arguments.Region(name, start, array.shape, tuple(abs(s) for s in array.strides), array.itemsize)


def _not_negative(argument: str, walk: _Walk, variance: Array) -> None:
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        values = _load(variance[index])
        if (values < 0.0).any():
            first = float(values[values < 0.0][0])
            raise ArgumentError(argument, f"an element {first!r}", "variances >= 0")


def _statistics(walk: _Walk, kept: Index, x: Array) -> tuple[Float64Array, Float64Array]:
    first = _load(x[tuple(s if a in walk.kept_axes else slice(0, 1) for a, s in enumerate(kept))])
    # A pivot of inf would turn an infinite mean into NaN, and one near the largest float64 would overflow.
    pivot = np.where(np.abs(first) < 1e300, first, 0.0)
    (total,) = walk.reduce(kept, _deviation, (x,), (pivot,), walk.read)
    mean = pivot + total / walk.count
    rest, squares = walk.reduce(kept, _deviation_and_square, (x,), (mean,), walk.read)
    correction = rest / walk.count
    squares = np.maximum(squares - rest * correction, 0.0)
    return np.where(np.isfinite(correction), mean + correction, mean), squares


def _deviation(x: _Read, centre: Float64Array) -> Iterator[Float64Array]:
    values, work = x
    yield np.subtract(values, centre, out=work)


def _deviation_and_square(x: _Read, centre: Float64Array) -> Iterator[Float64Array]:
    values, work = x
    yield np.subtract(values, centre, out=work)
    work *= work
    yield work


def _gradient_terms(x: _Read, dy: _Read, mean: Float64Array) -> Iterator[Float64Array]:
    yield dy[0]
    values, work = x
    np.subtract(values, mean, out=work)
    work *= dy[0]
    yield work


def _inverse(variance: Float64Array, epsilon: float) -> Float64Array:
    with np.errstate(divide="ignore"):  # variance + epsilon = 0 gives inf
        return 1.0 / np.sqrt(variance + epsilon)


def _blend(a: float, value: Float64Array, b: float, prior: Array | None, index: Index) -> Float64Array:
    """``a * value + b * prior[index]``; without prior, ``a * value``."""
    with np.errstate(invalid="ignore", over="ignore"):
        blended = a * value
        if prior is not None:
            blended += b * _load(prior[index])
    return blended


def _write(walk: _Walk, index: Index, values: Float64Array, beta: float, prior: Array | None, target: Array) -> None:
    """``target[index] = values + beta * prior[index]``, through buffer 1."""
    if prior is not None:
        old = walk.load(1, prior, index)
        old *= beta
        values += old
    _store(target, index, values)


def _normalize(
    walk: _Walk,
    kept: Index,
    x: Array,
    mean: Float64Array,
    factor: Float64Array,
    offset: Float64Array,
    beta: float,
    prior: Array | None,
    y: Array,
) -> None:
    """``y = factor * (x - mean) + offset + beta * prior``."""
    mean, factor, offset = walk.spread(mean), walk.spread(factor), walk.spread(offset)
    for index in walk.blocks(kept):
        values, block = walk.read(0, x, index)
        np.subtract(values, _cut(mean, block.shape), out=block)
        block *= _cut(factor, block.shape)
        block += _cut(offset, block.shape)
        _write(walk, index, block, beta, prior, y)


def derive(dims: Sequence[int], data_type: DataType | str | npt.DTypeLike, mode: Mode | int | str) -> Derived:
    """Shape and dtype of scale, bias and statistics.

    As by ``cudnnDeriveBNTensorDescriptor`` and ``miopenDeriveBNTensorDescriptor``, except that MIOpen returns float32
    for float64 data too.

    Parameters
    ----------
    dims : sequence of int
        Shape of x, (N, C, spatial...), rank 2 to 8.
    data_type : DataType, str or dtype
        dtype of x.
    mode : Mode
        `PER_ACTIVATION` keeps every axis but N; `SPATIAL` and `SPATIAL_PERSISTENT` keep C.

    Returns
    -------
    Derived
        dims, with 1 in the reduced axes; data_type, float64 for float64 x, else float32.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Names the argument, its value and what is allowed.

    Examples
    --------
    >>> pybnorm.reference.derive((8, 64, 32, 32), "bf16", "spatial")
    Derived(dims=(1, 64, 1, 1), data_type=DataType.FLOAT32)
    """
    bn_mode = _arguments.mode(mode)
    shape = _arguments.dims(dims)
    dtype = _arguments.data_type(data_type, "data_type")
    return Derived(_arguments.derived_dims(shape, bn_mode), _arguments.derived_data_type(dtype))


def _input_gradient(
    walk: _Walk,
    kept: Index,
    x: Array,
    dy: Array,
    mean: Float64Array,
    slope: Float64Array,
    centre: Float64Array,
    factor: Float64Array,
    beta: float,
    prior: Array | None,
    dx: Array,
) -> None:
    """``dx = factor * (dy - centre - slope * (x - mean)) + beta * prior``."""
    mean, slope, centre, factor = (walk.spread(p) for p in (mean, slope, centre, factor))
    for index in walk.blocks(kept):
        (gradient, block), (values, projection) = walk.read(0, dy, index), walk.read(1, x, index)
        np.subtract(values, _cut(mean, block.shape), out=projection)
        projection *= _cut(slope, block.shape)
        np.subtract(gradient, _cut(centre, block.shape), out=block)
        block -= projection
        block *= _cut(factor, block.shape)
        _write(walk, index, block, beta, prior, dx)
