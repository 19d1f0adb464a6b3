"""The formulas of the bounds: how far a class of kernels may be off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.reference.namespaces import Array


class Moments(NamedTuple):
    """The statistics of x that the bound needs, in float64 and the derived shape."""

    mean: Array
    variance: Array
    absolute: Array
    """A = mean of \\|x\\|."""
    square: Array
    """Q = mean of x**2."""
    inverse: Array
    """r."""


class Deviations(NamedTuple):
    """The largest errors of a class of kernels in mean, variance and inverse standard deviation."""

    mean: Array
    variance: Array
    inverse: Array
    undecided: Array
    """True where dr/r > 1/4."""


def deviations(moments: Moments, epsilon: float, u: float, tier: Tier, tiny: float = 0.0) -> Deviations:
    """Bounds of statistics recomputed from x, before they are stored; what is below `tiny` may be flushed to 0."""
    h, mean, v = tier.h, np.abs(moments.mean), moments.variance
    with np.errstate(all="ignore"):
        d_mean = mean_deviation(tier, h + 1, moments.mean, v, moments.absolute, u, tiny)
        d_variance = (h + 4) * u * (v + mean * np.sqrt(v)) + d_mean**2 + tiny * (2 + 4 * np.sqrt(v))
        if tier.spread is not None:
            d_mean = d_mean + tier.spread * u * mean
            d_variance += tier.spread * u * v
        return completed(moments, d_mean, d_variance, h + 3 if tier.one_pass else None, 4 * u, epsilon, u, tiny)


def mean_deviation(
    tier: Tier, roundings: float, mean: Array, variance: Array, absolute: Array, u: float, tiny: float
) -> Array:
    """The bound of a mean that is made with so many roundings, or by the recurrence of a class."""
    if tier.recurrence:
        return 8 * u * ((tier.h + 1) * np.abs(mean) + np.sqrt(variance)) + 2 * u * absolute + tiny
    return roundings * u * absolute + tiny


def completed(
    moments: Moments,
    d_mean: Array,
    d_variance: Array,
    one_pass: float | None,
    relative: float,
    epsilon: float,
    u: float,
    tiny: float,
) -> Deviations:
    """The deviations that follow from those of mean and variance, `one_pass` roundings of x**2, `relative` of r."""
    mean, v, r = np.abs(moments.mean), moments.variance, moments.inverse
    if one_pass is not None:
        other = one_pass * u * moments.square + 2 * mean * d_mean + d_mean**2 + 2 * u * mean**2
        d_variance = np.maximum(d_variance, other)
    above = 1 / np.sqrt(np.maximum(v - d_variance, 0) + (epsilon if epsilon >= tiny else 0.0)) - r
    below = r - 1 / np.sqrt(v + d_variance + epsilon)
    d_inverse = np.maximum(above, below) + relative * r
    return Deviations(d_mean, d_variance, d_inverse, ~(d_inverse <= 0.25 * r))


def in_range(d: Deviations, lost: Array, lost_mean: Array | None = None) -> Deviations:
    """The deviations, without a limit where sums leave the compute type's range (`lost`, `lost_mean` of the mean)."""
    d_mean = np.where(lost if lost_mean is None else lost_mean, np.inf, d.mean)
    d_variance, d_inverse = (np.where(lost, np.inf, a) for a in (d.variance, d.inverse))
    return Deviations(d_mean, d_variance, d_inverse, d.undecided & ~lost)


def given(inverse: Array, relative: Array, tiny: float) -> Deviations:
    """Statistics that the caller gives: x - mean within `tiny`, the inverse standard deviation within `relative`."""
    zero = np.zeros_like(inverse)
    return Deviations(zero + tiny, zero, relative * inverse, np.zeros(inverse.shape, bool))


def forward_error(
    x: Array, mean: Array, r: Array, scale: Array, bias: Array, errors: Sequence[Array], u: float
) -> Array:
    """E of y, before y is stored; `errors` are dmu and dr."""
    return combined(forward_weights(mean, r, scale, bias, errors, u), x - mean, x)


def forward_weights(
    mean: Array, r: Array, scale: Array, bias: Array, errors: Sequence[Array], u: float
) -> tuple[Array, Array, Array]:
    """Give the parts of E of y: one without an element, and the factors of the sizes of x - mean and x."""
    d_mean, d_inverse = errors
    scale = np.abs(scale)
    gain = 4 * u * scale * r
    return scale * r * d_mean + gain * np.abs(mean) + 4 * u * np.abs(bias), scale * d_inverse, gain


def combined(weights: Sequence[Array], *terms: Array) -> Array:
    """The first weight, and each other one times the size of its term."""
    first, *others = weights
    result: Array = np.abs(terms[0])
    result *= others[0]
    result += first
    for weight, term in zip(others[1:], terms[1:], strict=True):
        size = np.abs(term)
        size *= weight
        result += size
    return result


def backward_error(x: Array, dy: Array, dx: Array, mean: Array, *numbers: Any) -> Array:
    """E of dx, before dx is stored; `numbers` are what `backward_weights` takes after the mean, up to `one_pass`."""
    return combined(backward_weights(mean, *numbers), x - mean, dy, dx, *([x] if numbers[-1] else []))


def backward_weights(
    mean: Array,
    r: Array,
    scale: Array,
    dscale: Array,
    dbias: Array,
    errors: Sequence[Array],
    m: int,
    u: float,
    one_pass: bool,
    u_param: float = 0.0,
) -> tuple[Array, ...]:
    """Give the parts of E of dx: one without an element, and factors of x - mean, dy, dx and, of one pass, x.

    `errors` are dmu, dr, E of dscale and E of dbias; `u_param` is of sums that may be stored before dx takes them.
    """
    d_mean, d_inverse, e_dscale, e_dbias = errors
    dscale, dbias = np.abs(dscale) / m, np.abs(dbias) / m
    gain, relative = np.abs(scale) * r, d_inverse / r
    first = gain * ((5 * u + u_param) * dbias + e_dbias / m + dscale * r * d_mean)
    slope = (5 * u + u_param) * dscale + e_dscale / m + dscale * relative
    width = 3 * u * dscale * r * gain
    if one_pass:
        return first + width * np.abs(mean), gain * r * slope, 5 * u * gain, relative + 2 * u, width
    return first, gain * r * slope + width, 5 * u * gain, relative + 2 * u


def stored(
    error: Array, result: Array, alpha: float, beta: float, prior: Array | None, u: float, u_out: float, tiny: float
) -> tuple[Array, Array]:
    """(alpha * result + beta * prior, bound of it as stored), from E of the unblended result."""
    out = blended(result, alpha, beta, prior)
    if alpha != 1 or beta != 0:
        size = np.abs(alpha * result)
        if beta != 0 and prior is not None:
            size = size + np.abs(beta * prior)
        error = abs(alpha) * error + 2 * u * size
    return out, error + u_out * (np.abs(out) + error) + tiny


def blended(result: Array, alpha: float, beta: float, prior: Array | None) -> Array:
    """alpha * result + beta * prior."""
    if beta != 0:
        assert prior is not None
        return alpha * result + beta * prior
    return result if alpha == 1 else alpha * result


def normalized(centred: Array, gain: Array, bias: Array) -> Array:
    """Y of x - mean."""
    result: Array = centred * gain
    result += bias
    return result


def gradient(centred: Array, dy: Array, gain: Array, centre: Array, slope: Array) -> Array:
    """Dx of x - mean and dy."""
    result: Array = dy - centre
    result -= centred * slope
    result *= gain
    return result
