"""Views: tensors as vendors take them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm.enums import Mode

Axis: TypeAlias = int | Sequence[int]
Dims: TypeAlias = tuple[int, ...]
MAX_RANK = 5  # axes that every backend takes with any strides
_Axis: TypeAlias = "tuple[int, tuple[int, ...]]"  # size, and the stride of each array


def _by_stride(axes: list[int], x: Buffer) -> list[int]:
    """Outermost in memory first."""
    return sorted(axes, key=lambda a: (-x.strides[a], a))


def _groups(axes: Sequence[int], arrays: Sequence[Buffer]) -> list[_Axis]:
    """The axes in this order, those of length 1 left out and neighbours merged that every array can merge."""
    groups: list[_Axis] = []
    for a in axes:
        size = arrays[0].dims[a]
        steps = tuple(b.strides[a] for b in arrays)
        if size == 1:
            continue
        if groups and all(outer == size * s for outer, s in zip(groups[-1][1], steps, strict=True)):
            groups[-1] = (groups[-1][0] * size, steps)
        else:
            groups.append((size, steps))
    return groups


def _single(axes: Sequence[_Axis], arrays: Sequence[Buffer]) -> _Axis:
    """An axis of length 1 outside of all others."""
    return 1, tuple(
        min(max((size * steps[i] for size, steps in axes), default=1), _arguments.INT32_MAX) for i in range(len(arrays))
    )


def _views(kept: Dims, arrays: Sequence[Buffer]) -> Iterator[tuple[Mode, list[_Axis]]]:
    """Views of the arrays that the vendors' modes describe, the vendors' own form first."""
    dims = arrays[0].dims
    rank = len(dims)
    whole = [(dims[a], tuple(b.strides[a] for b in arrays)) for a in range(rank)]
    if 2 <= rank <= MAX_RANK:
        if kept == (1,):
            yield Mode.SPATIAL, whole
        if kept == tuple(range(1, rank)):
            yield Mode.PER_ACTIVATION, whole
    inside = _groups(kept, arrays)
    outside = _groups(_by_stride([a for a in range(rank) if a not in kept], arrays[0]), arrays)
    one = _single([*inside, *outside], arrays)
    if len(inside) <= 1:
        channels = inside[0] if inside else one
        if len(outside) <= 1:
            first = outside[0] if outside else one
            if not outside:
                yield Mode.PER_ACTIVATION, [one, channels]
            else:
                yield Mode.SPATIAL, [one, channels, first]
            yield Mode.SPATIAL, [first, channels]
            if outside:
                yield Mode.PER_ACTIVATION, [first, channels]
        elif len(outside) <= MAX_RANK - 1:
            yield Mode.SPATIAL, [outside[0], channels, *outside[1:]]
    elif len(outside) <= 1 and len(inside) <= MAX_RANK - 1:
        yield Mode.PER_ACTIVATION, [outside[0] if outside else one, *inside]


def _pieces(*arrays: Buffer) -> Iterator[tuple[Buffer, ...]]:
    """Views of arrays of the same dims that have 2 to 5 axes: one each, unless more than 5 axes do not merge."""
    axes = _groups(_by_stride(list(range(len(arrays[0].dims))), arrays[-1]), arrays)
    cut = sorted(axes, key=lambda axis: axis[0])[: max(0, len(axes) - MAX_RANK)]
    rest = [axis for axis in axes if axis not in cut]
    while len(rest) < 2:
        rest.insert(0, _single(rest, arrays))
    dims = tuple(size for size, _ in rest)
    for index in itertools.product(*(range(size) for size, _ in cut)):
        yield tuple(
            b._replace(
                pointer=b.pointer
                + b.dtype.itemsize * sum(k * steps[i] for k, (_, steps) in zip(index, cut, strict=True)),
                dims=dims,
                strides=tuple(steps[i] for _, steps in rest),
            )
            for i, b in enumerate(arrays)
        )


def _row(matrix: Buffer, row: int) -> Buffer:
    """A row, as a vector."""
    one = _rows(matrix, row, row + 1)
    return one._replace(dims=one.dims[1:], strides=one.strides[1:])


def _rows(buffer: Buffer, start: int, stop: int) -> Buffer:
    """Rows of a matrix."""
    return buffer._replace(
        pointer=buffer.pointer + start * buffer.strides[0] * buffer.dtype.itemsize,
        dims=(stop - start, *buffer.dims[1:]),
    )
