"""The reference's results, and its formulas for one tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pybnorm.reference.blocks import _Read, _Walk
from pybnorm.reference.rounding import Array, Float64Array, Index, _load


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


def _affine(x: _Read, mean: Float64Array, factor: Float64Array, offset: Float64Array) -> Float64Array:
    """``factor * (x - mean) + offset``."""
    values, work = x
    np.subtract(values, mean, out=work)
    work *= factor
    work += offset
    return work


def _input_gradient(
    dy: _Read, x: _Read, mean: Float64Array, slope: Float64Array, centre: Float64Array, factor: Float64Array
) -> Float64Array:
    """``factor * (dy - centre - slope * (x - mean))``."""
    (gradient, work), (values, projection) = dy, x
    np.subtract(values, mean, out=projection)
    projection *= slope
    np.subtract(gradient, centre, out=work)
    work -= projection
    work *= factor
    return work
