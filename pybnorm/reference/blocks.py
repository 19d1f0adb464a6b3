"""Iteration over arrays in blocks of float64, and sums over blocks, without a copy of the whole data."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pybnorm import _arguments
from pybnorm.enums import DataType, Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.reference import namespaces
from pybnorm.reference.namespaces import Foreign
from pybnorm.reference.rounding import (
    ARRAYS,
    Array,
    Float64Array,
    Index,
    _cut,
    _data_type,
    _even,
    _load,
    _plain,
    _widen,
)
from pybnorm.reference.threads import LARGE, in_threads, threads

_MOST_ARRAYS = 64
BLOCK = 1 << 16  # elements: large enough to hide NumPy's cost per call; a few of them fit a core's own cache
_KEPT = 1 << 13  # statistics per block if m is large enough to fill the block
_RUN = 1 << 13  # elements: for shorter inner loops NumPy copies broadcast operands into buffers

_SMALL = 1 << 12  # elements of a block that is done sooner than parameters are repeated
_PLANE = 1 << 9  # neighbours of one statistic from which a block is made of as few statistics as fill it


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One step of `iterate_blocks`.

    Examples
    --------
    >>> x, mean = np.float32([[1, 2], [3, 4]]), np.float32([1, 2])
    >>> [block] = pybnorm.reference.iterate_blocks((x,), "per_activation", (mean,))
    >>> block.arrays[0] - block.parameters[0]
    array([[0., 0.], [2., 2.]])
    """

    index: Index
    """Position of the block in the arrays: ``arrays[i][index]``."""
    parameter_index: Index
    """Position of its parameters in arrays of the derived shape."""
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

    Returns
    -------
    iterator of Block
        Each with index, parameter_index, float64 blocks, float64 parameters.

    Examples
    --------
    Write ``|x - mean|`` without a temporary of x's size::

        for block in iterate_blocks((x,), mode, (mean,)):
            (values,), (mu,) = block.arrays, block.parameters
            values -= mu
            out[block.index] = np.abs(values, out=values)
    """
    return share_of_blocks(arrays, mode, parameters, 0, 1)


def share_of_blocks(
    arrays: Sequence[Array], mode: Mode | int | str, parameters: Sequence[Array], number: int, shares: int
) -> Iterator[Block]:
    """Give one of so many runs of statistics that `iterate_blocks` is divided into, for threads."""
    walk, arrays, parameters = _walk(arrays, mode, parameters)
    tiles = list(walk.kept_tiles())
    for kept in tiles[len(tiles) * number // shares : len(tiles) * (number + 1) // shares]:
        own = walk.parameter_index(kept)
        for index, blocks, cut in walk.blocks(kept, arrays, [_load(p[own]) for p in parameters], walk.load):
            yield Block(index, own, tuple(blocks), tuple(cut))


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

    Examples
    --------
    Sums of ``|dy|`` and ``|dy * x_hat|``::

        def gradients(dy, x, mean, inv):
            np.abs(dy, out=dy)
            yield dy
            x -= mean
            x *= inv
            x *= dy
            yield np.abs(x, out=x)

        abs_dy, weighted = reduce_blocks(gradients, (dy, x), mode, (saved_mean, saved_inv_variance))
    """
    return reduce_in_threads(function, arrays, mode, parameters, most=1)


def reduce_in_threads(
    function: Callable[..., Float64Array | Iterable[Float64Array]],
    arrays: Sequence[Array],
    mode: Mode | int | str,
    parameters: Sequence[Array] = (),
    most: int | None = None,
) -> tuple[Float64Array, ...]:
    """`reduce_blocks`, to the same bits, of a function that may be called by so many threads at a time."""
    _arguments.function(function, "function")
    walk, arrays, parameters = _walk(arrays, mode, parameters)

    def terms(*blocks: Float64Array) -> Iterator[Float64Array]:
        values = function(*blocks)
        if isinstance(values, ARRAYS):
            values = [values]
        elif not isinstance(values, Iterable):
            raise ArgumentTypeError("function", f"one that returns {type(values).__name__}", "one that returns arrays")
        for value in values:
            yield np.broadcast_to(value, blocks[0].shape)

    results: list[Float64Array] = []

    def add(walk: _Walk, kept: Index) -> None:
        index = walk.parameter_index(kept)
        sums = walk.reduce(kept, terms, arrays, [_load(p[index]) for p in parameters], walk.load)
        if not results:
            results.extend(np.empty(walk.derived) for _ in sums)
        for result, total in zip(results, sums, strict=True):
            result[index] = total

    walk.each(add, most)
    return tuple(results)


_Read: TypeAlias = tuple[Float64Array, Float64Array]
_Get: TypeAlias = Callable[[int, Array, Index], Any]
"""`_Walk.load` or `_Walk.read`."""


class _Walk:
    """Divides arrays of one shape into tiles: axes in memory order, kept axes, and extents of a block.

    In each mode one axis stands alone: C is the only kept one in the spatial modes, N the only reduced one in
    per-activation. So a block in memory order is a contiguous array of three axes (outer, alone, inner), and sums run
    over `alone` or over the other two.
    """

    def __init__(self, x: Array, mode: Mode, slots: int) -> None:
        self.dims = x.shape
        self.kept_axes = _arguments.kept_axes(x.ndim, mode)
        self.reduced_axes = _arguments.reduced_axes(x.ndim, mode)
        self.derived = _arguments.derived_dims(x.shape, mode)
        self.count = _arguments.reduced_count(x.shape, mode)
        self.spatial = mode != Mode.PER_ACTIVATION
        # Outermost in memory first. The stride of an axis of length 1 means nothing.
        self.order = sorted(range(x.ndim), key=lambda a: (x.shape[a] != 1, -abs(x.strides[a]), a))
        self.inverse = sorted(range(x.ndim), key=self.order.__getitem__)
        self.alone = self.order.index(1 if self.spatial else 0)
        self.space = x.namespace if isinstance(x, Foreign) else None
        self.tile = self._extents(namespaces.BLOCK if self.space else BLOCK)
        self.steps = math.prod(-(-self.dims[a] // self.tile[a]) for a in self.reduced_axes)
        self.size = math.prod(self.tile)
        self._slots = slots
        self._make_buffers()

    def _make_buffers(self) -> None:
        size = self.size
        self._buffers = [
            self.space.empty((size,), np.dtype(np.float64)) if self.space else np.empty(size)
            for _ in range(self._slots)
        ]
        self._halves = np.empty(0 if self.space else size // 2 + 1)

    def each(self, function: Callable[[_Walk, Index], None], most: int | None = None) -> None:
        """Call a function of a walk and each kept tile, of large arrays in at most so many threads after the first.

        Each thread has a walk whose buffers are its own. No tile has a part in another's results, so that they are the
        same bits.
        """
        first, *tiles = self.kept_tiles()
        function(self, first)
        large = not self.space and math.prod(self.dims) >= LARGE
        count = (most or threads()) if large else 1
        share = _even(len(tiles), -(-len(tiles) // count)) if tiles else 1

        def run(start: int) -> None:
            own = self if count == 1 else copy.copy(self)
            if own is not self:
                own._make_buffers()
            for kept in tiles[start : start + share]:
                function(own, kept)

        in_threads(run, range(0, len(tiles), share))

    def _extents(self, room: int) -> tuple[int, ...]:
        """Extents of a full block of so many elements: whole innermost axes, then a part of the next."""
        # Bounded so that values per statistic cost little time and memory compared with the block.
        kept_room = max(_KEPT, room // max(self.count, 4))
        if self.spatial and self.space is None and room > _SMALL:
            inner = math.prod(self.dims[a] for a in self.order[self.alone + 1 :])
            if inner >= _PLANE:  # its parameters are then as good as numbers
                kept_room = max(1, room // self.count)
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

    def blocks(
        self, kept: Index, arrays: Sequence[Array], parameters: Sequence[Float64Array], get: _Get
    ) -> Iterator[tuple[Index, list[Any], list[Float64Array]]]:
        """Each block of one kept tile: its index, what `get` gives of the arrays there, and the tile's parameters."""
        spread = [self.spread(p) for p in parameters]
        for index in self._cuts(self.reduced_axes, kept):
            shape = tuple(s.stop - s.start for s in index)
            yield index, [get(slot, a, index) for slot, a in enumerate(arrays)], [_cut(p, shape) for p in spread]

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
        """The values of ``array[index]`` in float64, read-only, and buffer `slot` to compute in.

        Both are the same array, except for float64 data, which are read in place: copying would double the cost.
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
        if self.space:
            spread: Float64Array = self.space.of(parameter)
            return spread
        if self.size <= _SMALL or parameter.size == 1:
            return parameter
        extents = [parameter.shape[a] if a in self.kept_axes else self.tile[a] for a in range(len(self.dims))]
        target = list(parameter.shape)
        inner = math.prod(extents[a] for a in self.order[self.alone + 1 :])
        enough = _RUN if self.steps >= 4 else _RUN // 128  # with few blocks the repetition does not pay off
        if not (self.spatial and inner >= enough):  # else each inner loop has one parameter
            run = 1
            for axis in reversed(self.order):
                target[axis] = extents[axis]
                run *= extents[axis]
                if run >= enough:
                    break
        result = np.empty([target[a] for a in self.order]).transpose(self.inverse)
        result[...] = parameter
        return result

    def write(
        self, kept: Index, function: Callable[..., Float64Array], arrays: Sequence[Array],
        parameters: Sequence[Float64Array], beta: float, prior: Array | None, target: Array,
    ) -> None:  # fmt: skip
        """``target = function(*arrays, *parameters) + beta * prior``, of one kept tile."""
        for index, blocks, cut in self.blocks(kept, arrays, parameters, self.read):
            values = function(*blocks, *cut)
            if prior is not None:
                old = self.load(1, prior, index)
                old *= beta
                values += old
            target[index] = values

    def reduce(
        self, kept: Index, function: Callable[..., Iterable[Float64Array]], arrays: Sequence[Array],
        parameters: Sequence[Float64Array], get: _Get,
    ) -> list[Float64Array]:  # fmt: skip
        """Sums of what `function` gives over the reduced axes for one kept tile, each of the tile's derived shape."""
        totals: list[_Sum] = []
        for _, blocks, cut in self.blocks(kept, arrays, parameters, get):
            for i, values in enumerate(function(*blocks, *cut)):
                part = self._block_sum(values)
                if i == len(totals):
                    totals.append(_Sum(part))
                else:
                    totals[i].add(part)
        lengths = [kept[a].stop - kept[a].start if a in self.kept_axes else 1 for a in self.order]
        return [t.value().reshape(lengths).transpose(self.inverse) for t in totals]

    def _block_sum(self, values: Float64Array) -> Float64Array:
        ordered = values.transpose(self.order)
        if isinstance(ordered, Foreign):
            axes = tuple(i for i, a in enumerate(self.order) if a in self.reduced_axes)
            return np.asarray(ordered.sum(axes)).reshape(-1)
        outer = math.prod(ordered.shape[: self.alone])
        three = ordered.reshape(outer, ordered.shape[self.alone], -1)
        if self.spatial and three.shape[1] == 1:
            return _row_sums(three.reshape(1, -1))
        if self.spatial:
            return _row_sums(self._halve(three, 0)[0])
        return _row_sums(three[:, :, 0]) if three.shape[2] == 1 else self._halve(three, 1)

    def _halve(self, values: Float64Array, axis: int) -> Float64Array:
        """Pairwise sum along axis 0 or 1 of three, which is kept with length 1. Does not write `values`.

        As fast as ``np.sum``, which adds row after row along an outer axis, with an error that grows with m.
        """
        values = values.swapaxes(0, axis)
        shape = len(values) // 2, *values.shape[1:]
        sums = self._halves[: math.prod(shape)].reshape(shape)
        while (length := len(values)) > 1:
            half = length // 2
            into = np.add(values[:half], values[half : 2 * half], out=sums[:half])
            if length % 2:
                into[0] += values[-1]
            values = into
        return values.swapaxes(0, axis)


class _Sum:
    """Compensated sum of blocks (Ogita, Rump & Oishi 2005, Sum2)."""

    def __init__(self, first: Float64Array) -> None:
        self._total = first.copy()  # `first` may be a view of a buffer
        self._error = np.zeros_like(self._total)

    def add(self, part: Float64Array) -> None:
        with np.errstate(invalid="ignore"):  # inf - inf in the error term of an infinite sum
            total = self._total + part
            taken = total - self._total
            self._error += (self._total - (total - taken)) + (part - taken)
        self._total = total

    def value(self) -> Float64Array:
        return np.where(np.isfinite(self._error), self._total + self._error, self._total)


def _row_sums(rows: Float64Array) -> Float64Array:
    total: Float64Array
    if rows.shape[1] > 8:
        total = np.add.reduce(rows, axis=1)  # pairwise
        return total
    total = rows[:, 0].copy()  # NumPy is slow on short rows
    for column in range(1, rows.shape[1]):
        total += rows[:, column]
    return total


class _Tensor(NamedTuple):
    """The part of an array that the rules in `_arguments` read."""

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
        _arguments.instance(array, ARRAYS, f"arrays[{i}]", "a NumPy array")
    arrays = [_plain(a) for a in arrays]
    for i, array in enumerate(arrays):
        _data(f"arrays[{i}]", array, arrays[0].shape if i else None)
    walk = _Walk(arrays[0], bn_mode, len(arrays))
    return walk, arrays, [_parameter(f"parameters[{i}]", p, walk.derived) for i, p in enumerate(parameters)]


def _data(argument: str, array: Any, shape: tuple[int, ...] | None = None) -> _Tensor:
    _arguments.instance(array, ARRAYS, argument, "a NumPy array")
    try:
        shape_of = array.shape
    except Exception:  # raised by a subclass
        raise ArgumentTypeError(argument, f"a {type(array).__name__} whose shape fails", "a NumPy array") from None
    dtype = _data_type(array, argument)
    dims = _arguments.dims(shape_of, argument)
    if shape is not None and dims != shape:
        raise ArgumentError(argument, f"shape {dims}", f"shape {shape}")
    return _Tensor(dims, array.strides, dtype)


def _parameter(argument: str, array: Any, derived: tuple[int, ...]) -> Array:
    _arguments.instance(array, np.ndarray, argument, f"a NumPy array of shape {derived}")
    array = _plain(array)
    _data_type(array, argument)
    if array.shape == derived:
        return array
    _arguments.parameter_dims(argument, array.shape, None, derived)
    return array.reshape(derived)  # a view: only axes of length 1 are added or removed
