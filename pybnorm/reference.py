"""Batch normalization in NumPy, in float64: the judge of every backend.

The functions take the arrays as a vendor call would and return float64 results that were rounded to nothing narrower.
They are vectorized and two-pass, and their extra memory is bounded: beyond inputs and results they hold a few blocks
of `BLOCK` elements, whatever the shape. `iterate_blocks` and `reduce_blocks` give the same walk to other modules.

Formulas. With m elements per statistic (Ioffe & Szegedy 2015, algorithm 1; cuDNN, MIOpen and hipDNN agree)::

    mean = sum(x) / m                    v = sum((x - mean)**2) / m          (biased)
    iv   = 1 / sqrt(v + epsilon)         x_hat = (x - mean) * iv
    y    = alpha * (scale * x_hat + bias) + beta * prior
    running <- (1 - f) * running + f * batch       batch = mean, and v * m / (m - 1) or v for the variance

and backward (the same paper, section 3, in the centred form)::

    dbias = sum(dy)      dscale = iv * sum(dy * (x - mean))
    dx    = scale * iv * (dy - dbias / m - x_hat * dscale / m)

Numerics. The mean is taken about a pivot, the first element of each statistic, and corrected by a second pass; the
variance is the corrected two-pass sum (Chan, Golub & LeVeque 1983). Inside a block sums are pairwise, across blocks
they are compensated (Neumaier 1974), so the error does not grow with m. A constant channel has variance exactly 0, and
data whose sums are exact in float64 give exact statistics. Where v + epsilon is 0 the results are the inf and NaN of
IEEE 754, without a warning. A NaN or inf stays in its own statistic. Values beyond about 1e150 overflow when squared,
as in any float64 code, and NumPy warns of that.

Arrays. x, dy and the like are NumPy arrays in logical order N, C, spatial..., rank 2 to 8, of float16, bfloat16
(ml_dtypes), float32 or float64; their strides say the layout. Parameters have the derived shape, ``(1, C, 1...)`` or
``(1, C, D...)``, in which axes of length 1 may be left out, so ``(C,)`` serves in the spatial modes; any of the four
dtypes and any strides. Results are fresh float64 arrays (data in the memory order of x, parameters in the derived
shape), or the arrays given in `out`, of any of the four dtypes and any strides without overlap, rounded once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments
from pybnorm.enums import DataType, Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "BLOCK",
    "Backward",
    "Block",
    "Derived",
    "ForwardInference",
    "ForwardTraining",
    "axpby",
    "backward",
    "derive",
    "forward_inference",
    "forward_training",
    "iterate_blocks",
    "reduce_blocks",
    "round_to",
]

Array: TypeAlias = npt.NDArray[Any]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Index: TypeAlias = tuple[slice, ...]

_MOST_ARRAYS = 64
BLOCK = 1 << 18  # elements: long enough to hide what NumPy costs per call, short enough for a last-level cache
_KEPT = 1 << 13  # statistics per block, when m is large enough to fill the block otherwise
_RUN = 1 << 13  # elements: over shorter inner loops NumPy copies what broadcasts into its own buffers


class Derived(NamedTuple):
    """What `derive` returns."""

    dims: tuple[int, ...]
    """Shape of scale, bias and statistics."""
    data_type: DataType
    """float64 for float64 data, else float32."""


class ForwardTraining(NamedTuple):
    """What `forward_training` returns."""

    y: Array
    """Shape of x."""
    saved_mean: Array
    """Batch mean, derived shape."""
    saved_inv_variance: Array
    """1 / sqrt(variance + epsilon), derived shape: the inverse standard deviation that vendors call InvVariance."""
    running_mean: Array | None
    """Updated running mean; None without running statistics."""
    running_variance: Array | None
    """Updated running variance; None without running statistics."""
    variance: Array
    """Biased batch variance, derived shape."""


class ForwardInference(NamedTuple):
    """What `forward_inference` returns."""

    y: Array
    """Shape of x."""


class Backward(NamedTuple):
    """What `backward` returns."""

    dx: Array
    """Shape of x."""
    dscale: Array
    """Derived shape."""
    dbias: Array
    """Derived shape."""


# ---------------------------------------------------------------- the walk over blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One step of `iterate_blocks`."""

    index: Index
    """Where the block lies in the arrays: ``arrays[i][index]``."""
    parameter_index: Index
    """Where its parameters lie in arrays of the derived shape."""
    arrays: tuple[Float64Array, ...]
    """float64 copies of ``arrays[i][index]``, in the same axis order, free to overwrite until the next step."""
    parameters: tuple[Float64Array, ...]
    """float64 copies of the parameters that broadcast against `arrays`; not to be written."""


def iterate_blocks(
    arrays: Sequence[Array], mode: Mode | int | str, parameters: Sequence[Array] = ()
) -> Iterator[Block]:
    """Walk arrays of one shape in cache-sized float64 blocks, with the parameters that belong to each block.

    Every element is visited once. Blocks follow the memory order of ``arrays[0]`` as far as the mode lets them: all
    blocks of one set of statistics come before the next set. Holds ``len(arrays) + len(parameters)`` buffers of
    `BLOCK` float64 elements at most, whatever the shape, and reuses them from step to step.

    Parameters
    ----------
    arrays : sequence of ndarray
        At least one; all of one shape, rank 2 to 8, any strides, any of the four dtypes each.
    mode : Mode
        Decides the derived shape.
    parameters : sequence of ndarray
        Arrays of the derived shape (axes of length 1 may be left out), any of the four dtypes.

    Yields
    ------
    Block
        index, parameter_index, float64 blocks, float64 parameters.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A shape, dtype or mode that is not allowed.

    Examples
    --------
    Write ``|x - mean|`` without a temporary of x's size::

        for block in iterate_blocks((x,), mode, (mean,)):
            (values,), (mu,) = block.arrays, block.parameters
            values -= mu
            out[block.index] = np.abs(values, out=values)
    """
    walk, arrays, parameters = _walk(arrays, mode, parameters)
    for kept in walk.kept_tiles():
        spread = [walk.spread(_load(p[walk.parameter_index(kept)])) for p in parameters]
        for index in walk.blocks(kept):
            blocks = tuple(walk.load(slot, a, index) for slot, a in enumerate(arrays))
            yield Block(index, walk.parameter_index(kept), blocks, tuple(_cut(p, blocks[0].shape) for p in spread))


def reduce_blocks(
    function: Callable[..., Float64Array | Iterable[Float64Array]],
    arrays: Sequence[Array],
    mode: Mode | int | str,
    parameters: Sequence[Array] = (),
) -> tuple[Float64Array, ...]:
    """Sum elementwise quantities over the reduced axes of `mode`, by blocks, in float64.

    Pairwise within a block, compensated across blocks: the relative error is a few float64 units for terms of one
    sign, whatever m. Memory as for `iterate_blocks`, plus one block for each array that `function` allocates.

    Parameters
    ----------
    function : callable
        Called as ``function(*blocks, *parameter_blocks)`` for every block. Returns one array of the block's shape, or
        an iterable of several; a generator is best, because each array is summed before the next is asked for. It may
        overwrite its blocks, not its parameter blocks.
    arrays, mode, parameters
        As for `iterate_blocks`.

    Returns
    -------
    tuple of ndarray
        One float64 array of the derived shape for each array that `function` gives.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A shape, dtype or mode that is not allowed.

    Examples
    --------
    Sums of ``|x|`` and ``x**2``, and of ``|dy|`` and ``|dy * x_hat|``::

        def moments(x):
            np.abs(x, out=x)
            yield x
            x *= x
            yield x

        abs_x, squares = reduce_blocks(moments, (x,), mode)

        def gradients(dy, x, mean, inv):
            np.abs(dy, out=dy)
            yield dy
            x -= mean
            x *= inv
            x *= dy
            yield np.abs(x, out=x)

        abs_dy, weighted = reduce_blocks(gradients, (dy, x), mode, (saved_mean, saved_inv_variance))
    """
    _arguments.function(function, "function")
    walk, arrays, parameters = _walk(arrays, mode, parameters)

    def terms(*blocks: Float64Array) -> Iterator[Float64Array]:
        values = function(*blocks)
        if not isinstance(values, Iterable):
            raise ArgumentTypeError("function", f"one that returns {type(values).__name__}", "one that returns arrays")
        for value in [values] if isinstance(values, np.ndarray) else values:
            yield np.broadcast_to(value, blocks[0].shape)

    results: list[Float64Array] = []
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        sums = walk.reduce(kept, terms, arrays, [_load(p[index]) for p in parameters], walk.load)
        if not results:
            results = [np.empty(walk.derived) for _ in sums]
        for result, total in zip(results, sums, strict=True):
            result[index] = total
    return tuple(results)


_Read: TypeAlias = tuple[Float64Array, Float64Array]


class _Walk:
    """Tiles of one shape: the axes in memory order, which of them the parameters keep, and a block's extents.

    In either mode one axis stands alone, C in the spatial modes and N in per-activation, so any block, taken in memory
    order, is a contiguous array of three axes (outer, alone, inner) of which either the one or the two are summed.
    """

    def __init__(self, x: Array, mode: Mode, slots: int) -> None:
        self.dims = x.shape
        self.kept_axes = _arguments.kept_axes(x.ndim, mode)
        self.reduced_axes = _arguments.reduced_axes(x.ndim, mode)
        self.derived = _arguments.derived_dims(x.shape, mode)
        self.count = _arguments.reduced_count(x.shape, mode)
        self.spatial = mode != Mode.PER_ACTIVATION
        # Outermost in memory first. An axis of length 1 has no place in memory, whatever its stride says.
        self.order = sorted(range(x.ndim), key=lambda a: (x.shape[a] != 1, -abs(x.strides[a]), a))
        self.inverse = sorted(range(x.ndim), key=self.order.__getitem__)
        self.alone = self.order.index(1 if self.spatial else 0)
        self.tile = self._extents()
        self.steps = math.prod(-(-self.dims[a] // self.tile[a]) for a in self.reduced_axes)
        size = math.prod(self.tile)
        self._buffers = [np.empty(size) for _ in range(slots)]
        self._halves = np.empty(size // 2 + 1)

    def _extents(self) -> tuple[int, ...]:
        """Extents of a full block: innermost axes whole, then a cut."""
        room = BLOCK
        # Bounded so that what is kept per statistic costs little time and memory beside the block itself.
        kept_room = max(_KEPT, BLOCK // max(self.count, 4))
        tile = [1] * len(self.dims)
        for axis in reversed(self.order):
            kept = axis in self.kept_axes
            extent = min(self.dims[axis], room, kept_room if kept else room)
            extent = _even(self.dims[axis], extent)
            tile[axis] = extent
            room //= extent
            if kept:
                kept_room //= extent
        return tuple(tile)

    def kept_tiles(self) -> Iterator[Index]:
        """Indices that cut the kept axes only."""
        yield from self._cuts(self.kept_axes, tuple(slice(0, d) for d in self.dims))

    def blocks(self, kept: Index) -> Iterator[Index]:
        """Indices that cut the reduced axes of one kept tile."""
        yield from self._cuts(self.reduced_axes, kept)

    def _cuts(self, axes: Sequence[int], index: Index) -> Iterator[Index]:
        ordered = [a for a in self.order if a in axes]
        steps = [range(0, self.dims[a], self.tile[a]) for a in ordered]
        for starts in itertools.product(*steps):
            cut = list(index)
            for axis, start in zip(ordered, starts, strict=True):
                cut[axis] = slice(start, min(start + self.tile[axis], self.dims[axis]))
            yield tuple(cut)

    def parameter_index(self, kept: Index) -> Index:
        """The same tile in an array of the derived shape."""
        return tuple(s if a in self.kept_axes else slice(0, 1) for a, s in enumerate(kept))

    def load(self, slot: int, array: Array, index: Index) -> Float64Array:
        """A float64 copy of ``array[index]`` in buffer `slot`, contiguous in memory order, axes in logical order."""
        part = array[index]
        block = self._buffer(slot, part)
        _widen(block, part)
        return block

    def read(self, slot: int, array: Array, index: Index) -> _Read:
        """The values of ``array[index]`` in float64, only to be read, and buffer `slot` for what is made of them.

        The two are one array, except that float64 data are read where they are: a copy would cost as much as the rest.
        """
        part = array[index]
        block = self._buffer(slot, part)
        if part.dtype == np.float64:
            return part, block
        _widen(block, part)
        return block, block

    def _buffer(self, slot: int, part: Array) -> Float64Array:
        shape = tuple(part.shape[a] for a in self.order)
        return self._buffers[slot][: part.size].reshape(shape).transpose(self.inverse)

    def spread(self, parameter: Float64Array) -> Float64Array:
        """The parameters of a tile, repeated along inner reduced axes until inner loops are long."""
        extents = [parameter.shape[a] if a in self.kept_axes else self.tile[a] for a in range(len(self.dims))]
        target = list(parameter.shape)
        inner = math.prod(extents[a] for a in self.order[self.alone + 1 :])
        enough = _RUN if self.steps >= 4 else _RUN // 128  # for few blocks the repetition costs what it saves
        if not (self.spatial and inner >= enough):  # there each loop has one parameter
            run = 1
            for axis in reversed(self.order):
                target[axis] = extents[axis]
                run *= extents[axis]
                if run >= enough:
                    break
        result = np.empty([target[a] for a in self.order]).transpose(self.inverse)
        result[...] = parameter
        return result

    def reduce(
        self,
        kept: Index,
        function: Callable[..., Iterable[Float64Array]],
        arrays: Sequence[Array],
        parameters: Sequence[Float64Array],
        get: Callable[[int, Array, Index], Any],
    ) -> list[Float64Array]:
        """Sums over the reduced axes for one kept tile, each of the tile's derived shape.

        `function` is called with what `get` (`load` or `read`) returns for each array, then with the parameters.
        """
        spread = [self.spread(p) for p in parameters]
        totals: list[_Sum] = []
        for index in self.blocks(kept):
            shape = tuple(s.stop - s.start for s in index)
            blocks = [get(slot, a, index) for slot, a in enumerate(arrays)]
            for i, values in enumerate(function(*blocks, *(_cut(p, shape) for p in spread))):
                part = self._block_sum(values)
                if i == len(totals):
                    totals.append(_Sum(part))
                else:
                    totals[i].add(part)
        lengths = [kept[a].stop - kept[a].start if a in self.kept_axes else 1 for a in self.order]
        return [t.value().reshape(lengths).transpose(self.inverse) for t in totals]

    def _block_sum(self, values: Float64Array) -> Float64Array:
        ordered = values.transpose(self.order)
        outer = math.prod(ordered.shape[: self.alone])
        three = ordered.reshape(outer, ordered.shape[self.alone], -1)
        if self.spatial:
            return _row_sums(self._halve(three, 0)[0])
        return _row_sums(three[:, :, 0]) if three.shape[2] == 1 else self._halve(three, 1)

    def _halve(self, values: Float64Array, axis: int) -> Float64Array:
        """Pairwise sum along axis 0 or 1 of three, that axis kept with length 1. Does not write `values`.

        As fast as ``np.sum``, which adds along an outer axis one row after the other, with an error that grows as m.
        """
        length = values.shape[axis]
        if length == 1:
            return values
        half = length // 2
        shape = (half, *values.shape[1:]) if axis == 0 else (values.shape[0], half, values.shape[2])
        sums = self._halves[: math.prod(shape)].reshape(shape)
        while length > 1:
            half = length // 2
            into = _part(sums, axis, 0, half)
            np.add(_part(values, axis, 0, half), _part(values, axis, half, 2 * half), out=into)
            if length % 2:
                first = _part(into, axis, 0, 1)
                first += _part(values, axis, length - 1, length)
            values, length = into, half
        return values


class _Sum:
    """Compensated sum of blocks (Ogita, Rump & Oishi 2005, Sum2)."""

    def __init__(self, first: Float64Array) -> None:
        self._total = first.copy()  # `first` may be a view of a buffer
        self._error = np.zeros_like(self._total)

    def add(self, part: Float64Array) -> None:
        with np.errstate(invalid="ignore"):  # inf - inf, in the error term of a sum that is inf already
            total = self._total + part
            taken = total - self._total
            self._error += (self._total - (total - taken)) + (part - taken)
        self._total = total

    def value(self) -> Float64Array:
        return np.where(np.isfinite(self._error), self._total + self._error, self._total)


def _part(values: Float64Array, axis: int, start: int, stop: int) -> Float64Array:
    return values[start:stop] if axis == 0 else values[:, start:stop]


def _row_sums(rows: Float64Array) -> Float64Array:
    total: Float64Array
    if rows.shape[1] > 8:
        total = np.add.reduce(rows, axis=1)  # pairwise
        return total
    total = rows[:, 0].copy()  # NumPy is slow on short rows
    for column in range(1, rows.shape[1]):
        total += rows[:, column]
    return total


def _even(length: int, most: int) -> int:
    """The extent of at most `most` that cuts `length` into parts as equal as can be."""
    return -(-length // -(-length // most))


def _cut(parameter: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """The part of a spread parameter that fits a block, which may be smaller at the end of an axis."""
    return parameter[tuple(map(slice, shape))]


def _widen(target: Float64Array, part: Array) -> None:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        np.copyto(target, part, casting="unsafe")


def _load(part: Array) -> Float64Array:
    with np.errstate(invalid="ignore"):
        return part.astype(np.float64)


# ---------------------------------------------------------------- rounding


def round_to(values: Float64Array, dtype: npt.DTypeLike) -> Array:
    """Round float64 values to `dtype`, once, to nearest even.

    ml_dtypes rounds float64 to bfloat16 by way of float32, that is twice; here the first step rounds to odd (Boldo &
    Melquiond 2008), after which the second one is right.

    Parameters
    ----------
    values : ndarray of float64
        Any shape.
    dtype : dtype
        float16, bfloat16, float32 or float64.

    Returns
    -------
    ndarray
        A new array of `dtype`; what overflows is inf.

    Raises
    ------
    ArgumentTypeError
        Any other dtype.
    """
    _arguments.instance(values, np.ndarray, "values", "a NumPy array of float64")
    _arguments.data_type(values.dtype, "values")
    try:
        target = np.dtype(dtype)
    except Exception as error:
        raise ArgumentTypeError("dtype", dtype, "float32, float64, float16 or bfloat16") from error
    if _arguments.data_type(target) != DataType.BFLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(target)
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float32)
    back = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)  # towards zero; from inf to the largest finite float32
    bits |= back != values  # the last bit says "inexact"; a NaN stays one
    with np.errstate(over="ignore", under="ignore"):
        return narrow.astype(target)


def _store(target: Array, index: Index, values: Float64Array) -> None:
    """Write values, rounded once."""
    target[index] = values if target.dtype == np.float64 else round_to(values, target.dtype)


# ---------------------------------------------------------------- arguments and results


class _Tensor(NamedTuple):
    """What the call rules of `_arguments` read."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DataType


def _walk(
    arrays: Sequence[Array], mode: Mode | int | str, parameters: Sequence[Array]
) -> tuple[_Walk, Sequence[Array], list[Array]]:
    bn_mode = _arguments.mode(mode)
    arrays = _arguments.items(arrays, "arrays", "a sequence of NumPy arrays", _MOST_ARRAYS)
    parameters = _arguments.items(parameters, "parameters", "a sequence of NumPy arrays", _MOST_ARRAYS)
    if not arrays:
        raise ArgumentError("arrays", "none", "at least one array")
    for i, array in enumerate(arrays):
        _arguments.instance(array, np.ndarray, f"arrays[{i}]", "a NumPy array")
    arrays = [_plain(a) for a in arrays]
    for i, array in enumerate(arrays):
        _data(f"arrays[{i}]", array, arrays[0].shape if i else None)
    walk = _Walk(arrays[0], bn_mode, len(arrays))
    return walk, arrays, [_parameter(f"parameters[{i}]", p, walk.derived) for i, p in enumerate(parameters)]


def _plain(array: Array) -> Array:
    """The array without a class of its own, which may say what is not so."""
    return array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)


def _data(argument: str, array: Any, shape: tuple[int, ...] | None = None) -> _Tensor:
    """Check an array of x's kind."""
    _arguments.instance(array, np.ndarray, argument, "a NumPy array")
    try:
        shape_of = array.shape
    except Exception:  # the class's own
        raise ArgumentTypeError(argument, f"a {type(array).__name__} whose shape fails", "a NumPy array") from None
    dtype = _arguments.data_type(array.dtype, argument)
    dims = _arguments.dims(shape_of, argument)
    if shape is not None and dims != shape:
        raise ArgumentError(argument, f"shape {dims}", f"shape {shape}")
    return _Tensor(dims, array.strides, dtype)


def _parameter(argument: str, array: Any, derived: tuple[int, ...]) -> Array:
    """Check a parameter; a view of it in the derived shape."""
    _arguments.instance(array, np.ndarray, argument, f"a NumPy array of shape {derived}")
    array = _plain(array)
    _arguments.data_type(array.dtype, argument)
    _arguments.parameter_dims(argument, array.shape, None, derived)
    return array.reshape(derived)  # a view: only axes of length 1 come or go


def _prior(argument: str, array: Array | None, beta_name: str, beta: float) -> Array | None:
    """The prior value, or None where it is not to be read."""
    if beta == 0.0:
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
        # The step along an axis of length 1 is arbitrary in NumPy, and never taken.
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
    """An array of statistics or parameter gradients: the one to return, and a view of it in the derived shape."""

    def __init__(self, out: Mapping[str, Array], name: str, derived: tuple[int, ...]) -> None:
        self.array = out[name] if name in out else np.empty(derived)
        self._view = _parameter(f"out[{name!r}]", self.array, derived)

    def store(self, index: Index, values: Float64Array) -> None:
        _store(self._view, index, values)


def _disjoint(outputs: Mapping[str, Array], inputs: Mapping[str, Array | None], own: Mapping[str, str]) -> None:
    """No output overlaps an input or another output; one that *is* its own prior value (`own`) is updated in place."""
    regions = []
    for name, array in inputs.items():
        output = outputs.get(own.get(name, ""))
        if array is not None and (output is None or _place(output) != _place(array)):
            regions.append(_region(name, array))
    _arguments.disjoint([_region(f"out[{name!r}]", a) for name, a in outputs.items()], regions)


def _place(array: Array) -> tuple[object, ...]:
    """Equal for arrays with the same elements in the same order, axes of length 1 apart."""
    steps = [(d, s) for d, s in zip(array.shape, array.strides, strict=True) if d > 1]
    return array.ctypes.data, steps, array.dtype


def _region(name: str, array: Array) -> _arguments.Region:
    # A negative stride starts at the far end of the same memory.
    start = array.ctypes.data + sum((d - 1) * s for d, s in zip(array.shape, array.strides, strict=True) if s < 0)
    return _arguments.Region(name, start, array.shape, tuple(abs(s) for s in array.strides), array.itemsize)


def _not_negative(argument: str, walk: _Walk, variance: Array) -> None:
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        values = _load(variance[index])
        if (values < 0.0).any():
            first = float(values[values < 0.0][0])
            raise ArgumentError(argument, f"an element {first!r}", "variances >= 0")


# ---------------------------------------------------------------- the mathematics of one kept tile


def _statistics(walk: _Walk, kept: Index, x: Array) -> tuple[Float64Array, Float64Array]:
    """Mean, and sum of squared deviations from it."""
    first = _load(x[tuple(s if a in walk.kept_axes else slice(0, 1) for a, s in enumerate(kept))])
    # A pivot of inf would make NaN of a mean that is inf, and one near the range's end would overflow.
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
    with np.errstate(divide="ignore"):  # v + epsilon = 0: inf
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


# ---------------------------------------------------------------- the operations


def derive(dims: Sequence[int], data_type: DataType | str | npt.DTypeLike, mode: Mode | int | str) -> Derived:
    """Shape and dtype of scale, bias and statistics.

    What ``cudnnDeriveBNTensorDescriptor`` and ``miopenDeriveBNTensorDescriptor`` answer, except that MIOpen says
    float32 for float64 data too.

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
        Naming the argument, its value and what is allowed.
    """
    bn_mode = _arguments.mode(mode)
    shape = _arguments.dims(dims)
    dtype = _arguments.data_type(data_type, "data_type")
    return Derived(_arguments.derived_dims(shape, bn_mode), _arguments.derived_data_type(dtype))


def forward_training(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    mode: Mode | int | str = Mode.SPATIAL,
    alpha: float = 1.0,
    beta: float = 0.0,
    epsilon: float = 1e-5,
    exponential_average_factor: float = 0.1,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
    unbiased: bool = True,
    prior: Array | None = None,
    out: Mapping[str, Array] | None = None,
) -> ForwardTraining:
    """Normalize by the batch's own statistics.

    ``y = alpha * (scale * (x - mean) / sqrt(v + epsilon) + bias) + beta * prior``: Ioffe & Szegedy 2015, algorithm 1,
    with the blending of ``cudnnBatchNormalizationForwardTraining``. Running statistics become
    ``(1 - f) * running + f * batch`` with f the `exponential_average_factor`.

    Parameters
    ----------
    x : ndarray
        Shape (N, C, spatial...), rank 2 to 8; float16, bfloat16, float32 or float64; any strides.
    scale, bias : ndarray
        Derived shape (see `derive`), axes of length 1 may be left out; any of the four dtypes.
    mode : Mode
        `SPATIAL_PERSISTENT` has the mathematics of `SPATIAL`.
    alpha, beta : float
        Finite. With beta 0, `prior` is never read.
    epsilon : float
        Finite, at least 0.
    exponential_average_factor : float
        From 0 to 1. The formula is taken literally: a running NaN stays NaN even with factor 1.
    running_mean, running_variance : ndarray, optional
        Derived shape. Both or neither. They are not written unless `out` names them.
    unbiased : bool
        Whether the running variance takes ``v * m / (m - 1)`` (cuDNN, MIOpen, hipDNN, PyTorch) or ``v`` (ONNX).
    prior : ndarray, optional
        What y held before, shape of x, any of the four dtypes; required if beta is not 0.
    out : mapping of str to ndarray, optional
        Arrays to write results into, by field name. None may share memory with an input or with another, except that
        y may be `prior` itself, and the running statistics theirs.

    Returns
    -------
    ForwardTraining
        y, saved_mean, saved_inv_variance, running_mean, running_variance, variance.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed; nothing has been written then. Running statistics with
        one element per statistic are refused, because the unbiased variance is 0 / 0.
    """
    tensor = _data("x", x)
    running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    bn_mode, alpha, beta, factor, epsilon = _arguments.forward_training(
        mode, alpha, beta, tensor, tensor, None, exponential_average_factor, epsilon, running
    )
    unbiased = _arguments.boolean(unbiased, "unbiased")
    derived = _arguments.derived_dims(x.shape, bn_mode)
    scales, biases = _parameter("scale", scale, derived), _parameter("bias", bias, derived)
    prior = _prior("prior", prior, "beta", beta)
    if prior is not None:
        _data("prior", prior, x.shape)
    allowed = [f for f in ForwardTraining._fields if running or not f.startswith("running")]
    given = _outputs(out, allowed)
    y = _data_result(given, "y", x)
    results = {name: _ParameterResult(given, name, derived) for name in allowed if name != "y"}
    old = {}
    if running:
        old["running_mean"] = _parameter("running_mean", running_mean, derived)
        old["running_variance"] = _parameter("running_variance", running_variance, derived)
    _disjoint(
        given,
        {"x": x, "scale": scales, "bias": biases, "prior": prior, **old},
        {"prior": "y", "running_mean": "running_mean", "running_variance": "running_variance"},
    )

    walk = _Walk(x, bn_mode, 2)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        with np.errstate(invalid="ignore"):  # inf and signalling NaN in x: the answer, NaN, says it
            mean, squares = _statistics(walk, kept, x)
        variance = squares / walk.count
        inv = _inverse(variance, epsilon)
        batch = {"saved_mean": mean, "saved_inv_variance": inv, "variance": variance}
        if running:
            estimate = squares / (walk.count - 1) if unbiased else variance
            batch["running_mean"] = _blend(factor, mean, 1.0 - factor, old["running_mean"], index)
            batch["running_variance"] = _blend(factor, estimate, 1.0 - factor, old["running_variance"], index)
        for name, values in batch.items():
            results[name].store(index, values)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite inv: the inf and NaN of IEEE 754
            gain = alpha * (_load(scales[index]) * inv)
            _normalize(walk, kept, x, mean, gain, alpha * _load(biases[index]), beta, prior, y)
    arrays = {name: result.array for name, result in results.items()}
    return ForwardTraining(
        y,
        arrays["saved_mean"],
        arrays["saved_inv_variance"],
        arrays.get("running_mean"),
        arrays.get("running_variance"),
        arrays["variance"],
    )


def forward_inference(
    x: Array,
    scale: Array,
    bias: Array,
    running_mean: Array,
    running_variance: Array,
    *,
    mode: Mode | int | str = Mode.SPATIAL,
    alpha: float = 1.0,
    beta: float = 0.0,
    epsilon: float = 1e-5,
    prior: Array | None = None,
    out: Mapping[str, Array] | None = None,
) -> ForwardInference:
    """Normalize by given statistics.

    ``y = alpha * (scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * prior``, as
    ``cudnnBatchNormalizationForwardInference``.

    Parameters
    ----------
    x, scale, bias, mode, alpha, beta, epsilon, prior
        As for `forward_training`.
    running_mean, running_variance : ndarray
        Derived shape, both required. The variance may hold no negative value; a NaN is allowed and stays in its
        statistic.
    out : mapping of str to ndarray, optional
        ``{"y": array}``; see `forward_training`.

    Returns
    -------
    ForwardInference
        y.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed; nothing has been written then.
    """
    tensor = _data("x", x)
    bn_mode, alpha, beta, epsilon = _arguments.forward_inference(mode, alpha, beta, tensor, tensor, None, epsilon)
    derived = _arguments.derived_dims(x.shape, bn_mode)
    scales, biases = _parameter("scale", scale, derived), _parameter("bias", bias, derived)
    means = _parameter("running_mean", running_mean, derived)
    variances = _parameter("running_variance", running_variance, derived)
    prior = _prior("prior", prior, "beta", beta)
    if prior is not None:
        _data("prior", prior, x.shape)
    given = _outputs(out, ForwardInference._fields)
    y = _data_result(given, "y", x)
    inputs = {"x": x, "scale": scales, "bias": biases, "running_mean": means, "running_variance": variances}
    _disjoint(given, {**inputs, "prior": prior}, {"prior": "y"})

    walk = _Walk(x, bn_mode, 2)
    _not_negative("running_variance", walk, variances)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        inv = _inverse(_load(variances[index]), epsilon)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite inv: the inf and NaN of IEEE 754
            gain = alpha * (_load(scales[index]) * inv)
            _normalize(walk, kept, x, _load(means[index]), gain, alpha * _load(biases[index]), beta, prior, y)
    return ForwardInference(y)


def backward(
    x: Array,
    dy: Array,
    scale: Array,
    *,
    mode: Mode | int | str = Mode.SPATIAL,
    alpha_data: float = 1.0,
    beta_data: float = 0.0,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    epsilon: float = 1e-5,
    saved_mean: Array | None = None,
    saved_inv_variance: Array | None = None,
    prior_dx: Array | None = None,
    prior_dscale: Array | None = None,
    prior_dbias: Array | None = None,
    out: Mapping[str, Array] | None = None,
) -> Backward:
    """Gradients of `forward_training` with alpha 1 and beta 0.

    ``dbias = sum(dy)``, ``dscale = iv * sum(dy * (x - mean))`` and
    ``dx = scale * iv * (dy - dbias / m - (x - mean) * iv * dscale / m)`` (Ioffe & Szegedy 2015, section 3), blended as
    by ``cudnnBatchNormalizationBackward``: dx by the data pair, dscale and dbias by the param pair. The dscale and
    dbias inside dx are unblended.

    Parameters
    ----------
    x, scale, mode
        As for `forward_training`.
    dy : ndarray
        Gradient of y; shape and dtype of x, any strides.
    alpha_data, beta_data, alpha_param, beta_param : float
        Finite. With a beta of 0 its priors are never read.
    epsilon : float
        Finite, at least 0. Used only when the statistics are recomputed, and must be forward's then.
    saved_mean, saved_inv_variance : ndarray, optional
        Derived shape, both or neither; recomputed from x when absent. Any values are honoured, not only x's own: the
        compositions of other operations rest on that.
    prior_dx, prior_dscale, prior_dbias : ndarray, optional
        What the outputs held before; required where the beta is not 0.
    out : mapping of str to ndarray, optional
        dx, dscale, dbias; see `forward_training`. Each may be its own prior.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed; nothing has been written then.
    """
    tensor, gradient = _data("x", x), _data("dy", dy)
    bn_mode, alpha_data, beta_data, alpha_param, beta_param, epsilon = _arguments.backward(
        mode, alpha_data, beta_data, alpha_param, beta_param, tensor, gradient, tensor, None, epsilon
    )
    derived = _arguments.derived_dims(x.shape, bn_mode)
    inputs = {"x": x, "dy": dy, "scale": _parameter("scale", scale, derived)}
    saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    if saved:
        inputs["saved_mean"] = _parameter("saved_mean", saved_mean, derived)
        inputs["saved_inv_variance"] = _parameter("saved_inv_variance", saved_inv_variance, derived)
    prior_dx = _prior("prior_dx", prior_dx, "beta_data", beta_data)
    if prior_dx is not None:
        _data("prior_dx", prior_dx, x.shape)
    prior_dscale = _prior("prior_dscale", prior_dscale, "beta_param", beta_param)
    if prior_dscale is not None:
        prior_dscale = _parameter("prior_dscale", prior_dscale, derived)
    prior_dbias = _prior("prior_dbias", prior_dbias, "beta_param", beta_param)
    if prior_dbias is not None:
        prior_dbias = _parameter("prior_dbias", prior_dbias, derived)
    given = _outputs(out, Backward._fields)
    dx = _data_result(given, "dx", x)
    dscales = _ParameterResult(given, "dscale", derived)
    dbiases = _ParameterResult(given, "dbias", derived)
    priors = {"prior_dx": prior_dx, "prior_dscale": prior_dscale, "prior_dbias": prior_dbias}
    _disjoint(given, {**inputs, **priors}, {f"prior_{name}": name for name in Backward._fields})

    walk = _Walk(x, bn_mode, 2)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        with np.errstate(invalid="ignore"):  # as in forward_training
            if saved:
                mean, inv = _load(inputs["saved_mean"][index]), _load(inputs["saved_inv_variance"][index])
            else:
                mean, squares = _statistics(walk, kept, x)
                inv = _inverse(squares / walk.count, epsilon)
            dbias, moment = walk.reduce(kept, _gradient_terms, (x, dy), (mean,), walk.read)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite inv: the inf and NaN of IEEE 754
            dscale = inv * moment
            slope = inv * (dscale / walk.count)
            gain = alpha_data * (_load(inputs["scale"][index]) * inv)
            _input_gradient(walk, kept, x, dy, mean, slope, dbias / walk.count, gain, beta_data, prior_dx, dx)
        dscales.store(index, _blend(alpha_param, dscale, beta_param, prior_dscale, index))
        dbiases.store(index, _blend(alpha_param, dbias, beta_param, prior_dbias, index))
    return Backward(dx, dscales.array, dbiases.array)


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


def axpby(a: float, x: Array, b: float, y: Array | None = None, *, out: Array | None = None) -> Array:
    """``a * x + b * y``, the blend by itself.

    Parameters
    ----------
    a, b : float
        Finite. With b 0, `y` is never read.
    x : ndarray
        Rank 2 to 8, any of the four dtypes, any strides.
    y : ndarray, optional
        Shape of x; required if b is not 0. Not written unless it is `out` too.
    out : ndarray, optional
        Array to write the result into, shape of x; may be `y` itself.

    Returns
    -------
    ndarray
        `out`, or a fresh float64 array in the memory order of x.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed; nothing has been written then.
    """
    tensor = _data("x", x)
    a, b = _arguments.axpby(a, b, tensor, tensor)
    y = _prior("y", y, "b", b)
    if y is not None:
        _data("y", y, x.shape)
    given = _outputs(None if out is None else {"out": out}, ["out"])
    result = _data_result(given, "out", x)
    _disjoint(given, {"x": x, "y": y}, {"y": "out"})
    walk = _Walk(x, Mode.SPATIAL, 2)
    with np.errstate(invalid="ignore"):  # inf - inf: the answer, NaN, says it
        for kept in walk.kept_tiles():
            for index in walk.blocks(kept):
                block = walk.load(0, x, index)
                block *= a
                _write(walk, index, block, b, y, result)
    return result


# ---------------------------------------------------------------- any subset of the axes


class Folded(NamedTuple):
    """What `fold` returns."""

    mode: Mode
    dims: tuple[int, ...]
    """Shape under which `mode` reduces the axes that were asked for."""
    derived: tuple[int, ...]
    """Shape of parameters in the array's own terms: its rank, 1 in the reduced axes."""
    order: tuple[int, ...]
    """The array's axes in the order of `dims`, where that is not their own."""

    def view(self, array: Array) -> Array:
        """The array as `mode` takes it: itself, or transposed and merged, which copies it if no view can."""
        return array.transpose(self.order).reshape(self.dims)

    def restore(self, array: Array, dims: tuple[int, ...]) -> Array:
        """The array of shape `dims` that `view` came from."""
        ordered = array.reshape([dims[a] for a in self.order])
        return ordered.transpose(sorted(range(len(dims)), key=self.order.__getitem__))


def fold(dims: Sequence[int], axis: int | Sequence[int]) -> Folded:
    """How parameters that keep any subset of the axes are one of the two modes.

    ``axis=1`` is the spatial mode and all axes but 0 the per-activation one, on the array as it is. Every other subset
    K, with the rest R, is the spatial mode on ``(1, prod K, prod R)``.

    Parameters
    ----------
    dims : sequence of int
        Rank 1 to 8.
    axis : int or sequence of int
        The axes that parameters keep.

    Returns
    -------
    Folded

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    shape = _arguments.dims(dims, low=1)
    rank = len(shape)
    kept = _arguments.axes(axis, rank)
    derived = tuple(d if a in kept else 1 for a, d in enumerate(shape))
    own = tuple(range(rank))
    if rank > 1 and kept == (1,):
        return Folded(Mode.SPATIAL, shape, derived, own)
    if rank > 1 and kept == own[1:]:
        return Folded(Mode.PER_ACTIVATION, shape, derived, own)
    count = math.prod(derived)
    order = (*kept, *(a for a in own if a not in kept))
    return Folded(Mode.SPATIAL, (1, count, math.prod(shape) // count), derived, order)


class Stats(NamedTuple):
    """What `stats` returns, each of the derived shape."""

    mean: Float64Array
    variance: Float64Array
    """Biased."""
    inv_variance: Float64Array
    """1 / sqrt(variance + epsilon)."""


class BackwardReduce(NamedTuple):
    """What `backward_reduce` returns, each of the derived shape."""

    sum_dy: Float64Array
    sum_dy_xmu: Float64Array
    dscale: Float64Array | None
    """None without the inverse deviation."""
    dbias: Float64Array


class GatherStats(NamedTuple):
    """What `gather_stats` returns, each of shape (C,)."""

    mean: Float64Array
    variance: Float64Array
    """Biased."""
    inv_variance: Float64Array
    running_mean: Float64Array | None
    running_variance: Float64Array | None


class _Case:
    """Checked arrays of an operation with `axis`, folded."""

    def __init__(self, name: str, x: Array, axis: int | Sequence[int]) -> None:
        _arguments.instance(x, np.ndarray, name, "a NumPy array")
        x = _plain(x)
        _arguments.data_type(x.dtype, name)
        self.own_dims = x.shape
        kept = _arguments.axes(axis, _rank(name, x))
        self.empty = 0 in x.shape
        self.derived = tuple(d if a in kept else 1 for a, d in enumerate(x.shape))
        if 0 in self.derived:
            raise ArgumentError(name, f"shape {x.shape}", "at least one statistic")
        if not self.empty:
            self.fold = fold(x.shape, axis)
            self.mode = self.fold.mode
            self.x = self.fold.view(x)
            self.shape = _arguments.derived_dims(self.x.shape, self.mode)

    def data(self, name: str, array: Array | None) -> Array:
        """Check an array of x's shape; its folded form."""
        if not issubclass(type(array), np.ndarray):
            raise ArgumentTypeError(name, array, "a NumPy array")
        array = _plain(array)  # type: ignore[arg-type]
        _arguments.data_type(array.dtype, name)
        if array.shape != self.own_dims:
            raise ArgumentError(name, f"shape {array.shape}", f"shape {self.own_dims}")
        return array if self.empty else self.fold.view(array)

    def prior(self, name: str, array: Array | None, beta_name: str, beta: float) -> Array | None:
        """The folded prior value, or None where it is not to be read."""
        given = _prior(name, array, beta_name, beta)
        return None if given is None else self.data(name, given)

    def parameter(self, name: str, array: Array | None, default: float | None = None) -> Float64Array:
        """Check a parameter; float64, of the folded derived shape."""
        if array is None and default is not None:
            return np.full(self.derived if self.empty else self.shape, default)
        values = _load(_parameter(name, array, self.derived))
        return values if self.empty else values.reshape(self.shape)

    def result(self) -> Float64Array:
        """An array for data results."""
        return np.empty(self.own_dims) if self.empty else np.empty_like(self.x, dtype=np.float64, subok=False)

    def restore(self, array: Array) -> Array:
        """A data result in x's own shape."""
        return array if self.empty else self.fold.restore(array, self.own_dims)


def _rank(name: str, x: Array) -> int:
    if not 1 <= x.ndim <= 8:
        raise ArgumentError(name, f"shape {x.shape}", "rank 1 to 8")
    return x.ndim


def stats(x: Array, *, epsilon: float = 1e-5, axis: int | Sequence[int] = 1) -> Stats:
    """Mean, biased variance and inverse deviation of the batch.

    Parameters
    ----------
    x : ndarray
        Rank 1 to 8, any of the four dtypes, any strides.
    epsilon : float
        Finite, at least 0.
    axis : int or sequence of int
        The axes that are kept; any subset, see `fold`.

    Returns
    -------
    Stats
        mean, variance, inv_variance.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    epsilon = _arguments.epsilon(epsilon)
    case = _Case("x", x, axis)
    if case.empty:
        raise ArgumentError("x", f"shape {x.shape}", "at least one element per statistic")
    walk = _Walk(case.x, case.mode, 2)
    mean, variance = np.empty(case.shape), np.empty(case.shape)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        mean[index], squares = _statistics(walk, kept, case.x)
        variance[index] = squares / walk.count
    inv = _inverse(variance, epsilon)
    return Stats(mean.reshape(case.derived), variance.reshape(case.derived), inv.reshape(case.derived))


def forward_inference_inv_variance(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_variance: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    axis: int | Sequence[int] = 1,
    prior: Array | None = None,
) -> ForwardInference:
    """Normalize by a given mean and inverse deviation.

    ``y = alpha * (scale * inv_variance * (x - mean) + bias) + beta * prior`` (hipDNN's ``batchnorm_inference``).

    Parameters
    ----------
    x : ndarray
        Rank 1 to 8; reduced axes may be empty.
    scale, bias : ndarray or None
        Derived shape; None: 1 and 0.
    mean, inv_variance : ndarray
        Derived shape.
    alpha, beta : float
        Finite. With beta 0, `prior` is never read.
    axis : int or sequence of int
        The axes that parameters keep; any subset, see `fold`.
    prior : ndarray, optional
        What y held before; required if beta is not 0.

    Returns
    -------
    ForwardInference
        y.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    case = _Case("x", x, axis)
    alpha, beta = _arguments.scalar(alpha, "alpha"), _arguments.scalar(beta, "beta")
    gains, offsets = case.parameter("scale", scale, 1.0), case.parameter("bias", bias, 0.0)
    means, invs = case.parameter("mean", mean), case.parameter("inv_variance", inv_variance)
    old = case.prior("prior", prior, "beta", beta)
    y = case.result()
    if not case.empty:
        walk = _Walk(case.x, case.mode, 2)
        for kept in walk.kept_tiles():
            i = walk.parameter_index(kept)
            _normalize(walk, kept, case.x, means[i], alpha * (gains[i] * invs[i]), alpha * offsets[i], beta, old, y)
    return ForwardInference(case.restore(y))


def elemt(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mean: Array,
    inv_variance: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    axis: int | Sequence[int] = 1,
    prior: Array | None = None,
) -> ForwardInference:
    """`forward_inference_inv_variance` by the name that PyTorch and CANN give it in synchronized batch norm.

    Parameters
    ----------
    x, scale, bias, mean, inv_variance, alpha, beta, axis, prior
        As there.

    Returns
    -------
    ForwardInference
        y.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    return forward_inference_inv_variance(
        x, scale, bias, mean, inv_variance, alpha=alpha, beta=beta, axis=axis, prior=prior
    )


def backward_frozen(
    x: Array,
    dy: Array,
    mean: Array,
    variance: Array,
    scale: Array | None,
    *,
    alpha_data: float = 1.0,
    beta_data: float = 0.0,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    epsilon: float = 1e-5,
    axis: int | Sequence[int] = 1,
    prior_dx: Array | None = None,
    prior_dscale: Array | None = None,
    prior_dbias: Array | None = None,
) -> Backward:
    """Gradients of `forward_inference`: the statistics are constants.

    With ``c = 1 / sqrt(variance + epsilon)``: ``dx = dy * scale * c``, ``dscale = c * sum(dy * (x - mean))``,
    ``dbias = sum(dy)`` (DirectML's ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy : ndarray
        One shape, rank 1 to 8.
    mean, variance : ndarray
        Derived shape; no negative variance.
    scale : ndarray or None
        Derived shape; None: 1.
    alpha_data, beta_data, alpha_param, beta_param : float
        Finite. With a beta of 0 its priors are never read.
    epsilon : float
        Finite, at least 0.
    axis : int or sequence of int
        The axes that parameters keep; any subset, see `fold`.
    prior_dx, prior_dscale, prior_dbias : ndarray, optional
        What the outputs held before; required where the beta is not 0.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    case, dys, factors, priors = _gradient_case(
        x, dy, axis, (alpha_data, beta_data, alpha_param, beta_param), (prior_dx, prior_dscale, prior_dbias)
    )
    means, invs = case.parameter("mean", mean), _given_inverse(case, variance, epsilon)
    gains = case.parameter("scale", scale, 1.0)
    dx, dscale, dbias = case.result(), np.empty(case.shape), np.empty(case.shape)
    walk = _Walk(case.x, case.mode, 2)
    for kept in walk.kept_tiles():
        i = walk.parameter_index(kept)
        dbias[i], moment = walk.reduce(kept, _gradient_terms, (case.x, dys), (means[i],), walk.read)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite inverse: the inf and NaN of IEEE 754
            dscale[i] = invs[i] * moment
            gain = factors[0] * (gains[i] * invs[i])
            zero = np.zeros_like(gain)
            _normalize(walk, kept, dys, zero, gain, zero, factors[1], priors[0], dx)
    return _gradient_result(case, dx, dscale, dbias, factors, priors)


def training_grad(
    x: Array,
    dy: Array,
    mean: Array,
    variance: Array,
    scale: Array | None,
    *,
    alpha_data: float = 1.0,
    beta_data: float = 0.0,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    epsilon: float = 1e-5,
    axis: int | Sequence[int] = 1,
    prior_dx: Array | None = None,
    prior_dscale: Array | None = None,
    prior_dbias: Array | None = None,
) -> Backward:
    """Gradients of `forward_training` from the batch mean and biased variance.

    With ``c = 1 / sqrt(variance + epsilon)``: ``dbias = sum(dy)``, ``dscale = c * sum(dy * (x - mean))``,
    ``dx = scale * c * (dy - dbias / m - (x - mean) * c * dscale / m)`` (DirectML's
    ``DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy, mean, variance, scale, alpha_data, beta_data, alpha_param, beta_param, epsilon, axis
        As for `backward_frozen`.
    prior_dx, prior_dscale, prior_dbias : ndarray, optional
        As for `backward_frozen`.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    case, dys, factors, priors = _gradient_case(
        x, dy, axis, (alpha_data, beta_data, alpha_param, beta_param), (prior_dx, prior_dscale, prior_dbias)
    )
    means, invs = case.parameter("mean", mean), _given_inverse(case, variance, epsilon)
    gains = case.parameter("scale", scale, 1.0)
    dx, dscale, dbias = case.result(), np.empty(case.shape), np.empty(case.shape)
    walk = _Walk(case.x, case.mode, 2)
    for kept in walk.kept_tiles():
        i = walk.parameter_index(kept)
        dbias[i], moment = walk.reduce(kept, _gradient_terms, (case.x, dys), (means[i],), walk.read)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite inverse: the inf and NaN of IEEE 754
            dscale[i] = invs[i] * moment
            gain = factors[0] * (gains[i] * invs[i])
            slope, centre = invs[i] * (dscale[i] / walk.count), dbias[i] / walk.count
            _input_gradient(walk, kept, case.x, dys, means[i], slope, centre, gain, factors[1], priors[0], dx)
    return _gradient_result(case, dx, dscale, dbias, factors, priors)


_Factors: TypeAlias = tuple[float, float, float, float]
_Priors: TypeAlias = tuple[Array | None, Array | None, Array | None]


def _gradient_case(
    x: Array, dy: Array, axis: int | Sequence[int], given: _Factors, given_priors: _Priors
) -> tuple[_Case, Array, _Factors, _Priors]:
    case = _Case("x", x, axis)
    if case.empty:
        raise ArgumentError("x", f"shape {x.shape}", "at least one element per statistic")
    names = ("alpha_data", "beta_data", "alpha_param", "beta_param")
    a_data, b_data, a_param, b_param = (_arguments.scalar(v, n) for v, n in zip(given, names, strict=True))
    dys = case.data("dy", dy)
    prior_dx = case.prior("prior_dx", given_priors[0], "beta_data", b_data)
    old = [
        _prior(f"prior_{n}", p, "beta_param", b_param)
        for n, p in zip(("dscale", "dbias"), given_priors[1:], strict=True)
    ]
    scales, biases = (
        None if p is None else case.parameter(f"prior_{n}", p) for n, p in zip(("dscale", "dbias"), old, strict=True)
    )
    return case, dys, (a_data, b_data, a_param, b_param), (prior_dx, scales, biases)


def _given_inverse(case: _Case, variance: Array, epsilon: float) -> Float64Array:
    epsilon = _arguments.epsilon(epsilon)
    values = case.parameter("variance", variance)
    if (values < 0.0).any():
        raise ArgumentError("variance", f"an element {float(values.min())!r}", "variances >= 0")
    return _inverse(values, epsilon)


def _gradient_result(
    case: _Case, dx: Array, dscale: Float64Array, dbias: Float64Array, factors: _Factors, priors: _Priors
) -> Backward:
    everything = (slice(None),)
    return Backward(
        case.restore(dx),
        _blend(factors[2], dscale, factors[3], priors[1], everything).reshape(case.derived),
        _blend(factors[2], dbias, factors[3], priors[2], everything).reshape(case.derived),
    )


def backward_reduce(
    dy: Array, x: Array, mean: Array, inv_variance: Array | None = None, *, axis: int | Sequence[int] = 1
) -> BackwardReduce:
    """The sums of backward.

    ``sum_dy = dbias = sum(dy)``, ``sum_dy_xmu = sum(dy * (x - mean))``, ``dscale = sum_dy_xmu * inv_variance``
    (``aclnnBatchNormReduceBackward``), sums where the older CANN golden code averages.

    Parameters
    ----------
    dy, x : ndarray
        One shape, rank 1 to 8; reduced axes may be empty: all sums are 0 then.
    mean : ndarray
        Derived shape.
    inv_variance : ndarray, optional
        Derived shape.
    axis : int or sequence of int
        The axes that are kept; any subset, see `fold`.

    Returns
    -------
    BackwardReduce
        sum_dy, sum_dy_xmu, dscale, dbias.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    case = _Case("x", x, axis)
    dys = case.data("dy", dy)
    means = case.parameter("mean", mean)
    invs = None if inv_variance is None else case.parameter("inv_variance", inv_variance)
    total, moment = np.zeros(means.shape), np.zeros(means.shape)
    if not case.empty:
        walk = _Walk(case.x, case.mode, 2)
        for kept in walk.kept_tiles():
            i = walk.parameter_index(kept)
            total[i], moment[i] = walk.reduce(kept, _gradient_terms, (case.x, dys), (means[i],), walk.read)
    total, moment = total.reshape(case.derived), moment.reshape(case.derived)
    dscale = None if invs is None else moment * invs.reshape(case.derived)
    return BackwardReduce(total, moment, dscale, total.copy())


def gather_stats(
    means: Array,
    m2s: Array | None,
    counts: Sequence[int],
    *,
    variances: Array | None = None,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
    exponential_average_factor: float = 0.1,
    epsilon: float = 1e-5,
) -> GatherStats:
    """Merge the statistics of several batches into those of their union.

    With ``n = sum(counts)``: ``mean = sum(n_k * mean_k) / n``,
    ``variance = (sum(M2_k) + sum(n_k * (mean_k - mean)**2)) / n`` (Chan, Golub & LeVeque 1983 for many parts at once).
    A factor of 1 replaces the running statistics unread.

    Parameters
    ----------
    means : ndarray, shape (R, C)
    m2s : ndarray, shape (R, C), or None
        Sums of squared deviations; None: `variances` is given.
    counts : sequence of R int
        Rows of ranks with 0 are not read.
    variances : ndarray, shape (R, C), optional
        Biased variances instead of `m2s`.
    running_mean, running_variance : ndarray, shape (C,), optional
        Both or neither. They are not written.
    exponential_average_factor, epsilon : float

    Returns
    -------
    GatherStats
        mean, variance, inv_variance, running_mean, running_variance.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    _data("means", means)
    if means.ndim != 2:
        raise ArgumentError("means", f"shape {means.shape}", "two axes: ranks and statistics")
    if (m2s is None) == (variances is None):
        raise ArgumentError("m2s", m2s if m2s is None else "an array beside variances", "one of m2s and variances")
    name, squares = ("m2s", m2s) if variances is None else ("variances", variances)
    _data(name, squares, means.shape)
    factor = _arguments.factor(exponential_average_factor)
    epsilon = _arguments.epsilon(epsilon)
    numbers = np.array([int(c) for c in counts], np.float64)
    if numbers.shape != means.shape[:1] or (numbers < 0).any() or not numbers.any():
        raise ArgumentError("counts", counts, f"{means.shape[0]} integers >= 0, not all 0")
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    n = float(numbers.sum())
    if has_running and n == 1:
        raise ArgumentError("counts", counts, "a sum above 1 when running statistics are updated")
    present = numbers > 0
    weight = (numbers[present] / n)[:, None]
    rows, parts = means[present].astype(np.float64), np.asarray(squares)[present].astype(np.float64)
    pivot = rows[0]
    mean = pivot + (weight * (rows - pivot)).sum(axis=0)
    within = parts / n if variances is None else weight * parts
    variance = (within + weight * (rows - mean) ** 2).sum(axis=0)
    running: list[Float64Array | None] = [None, None]
    if has_running:
        old = [
            _load(_parameter(n_, a, mean.shape))
            for n_, a in (("running_mean", running_mean), ("running_variance", running_variance))
        ]
        batch = mean, variance * (n / (n - 1))
        running = [b if factor == 1 else factor * b + (1 - factor) * o for b, o in zip(batch, old, strict=True)]
    return GatherStats(mean, variance, _inverse(variance, epsilon), running[0], running[1])


def backward_elemt(
    dy: Array,
    x: Array,
    mean: Array,
    inv_variance: Array,
    scale: Array | None,
    sum_dy: Array,
    sum_dy_xmu: Array,
    count: int,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    axis: int | Sequence[int] = 1,
    prior: Array | None = None,
) -> Array:
    """The elementwise half of a synchronized backward.

    ``dx = alpha * scale * iv * (dy - sum_dy / count - (x - mean) * iv**2 * sum_dy_xmu / count) + beta * prior``
    (PyTorch's ``batch_norm_backward_elemt``).

    Parameters
    ----------
    dy, x : ndarray
        One shape, rank 1 to 8; reduced axes may be empty.
    mean, inv_variance : ndarray
        Derived shape, of all ranks.
    scale : ndarray or None
        Derived shape; None: 1.
    sum_dy, sum_dy_xmu : ndarray
        Derived shape; sums over all ranks.
    count : int
        Elements per statistic of all ranks.
    alpha, beta : float
        Finite. With beta 0, `prior` is never read.
    axis : int or sequence of int
        The axes that parameters keep; any subset, see `fold`.
    prior : ndarray, optional
        What dx held before; required if beta is not 0.

    Returns
    -------
    ndarray
        dx.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.
    """
    case = _Case("x", x, axis)
    dys = case.data("dy", dy)
    alpha, beta = _arguments.scalar(alpha, "alpha"), _arguments.scalar(beta, "beta")
    if count < 1:
        raise ArgumentError("count", count, "an integer from 1")
    means, invs = case.parameter("mean", mean), case.parameter("inv_variance", inv_variance)
    gains = case.parameter("scale", scale, 1.0)
    centre = case.parameter("sum_dy", sum_dy) / count
    slope = invs * invs * (case.parameter("sum_dy_xmu", sum_dy_xmu) / count)
    old = case.prior("prior", prior, "beta", beta)
    dx = case.result()
    if not case.empty:
        walk = _Walk(case.x, case.mode, 2)
        for kept in walk.kept_tiles():
            i = walk.parameter_index(kept)
            gain = alpha * (gains[i] * invs[i])
            _input_gradient(walk, kept, case.x, dys, means[i], slope[i], centre[i], gain, beta, old, dx)
    return case.restore(dx)
