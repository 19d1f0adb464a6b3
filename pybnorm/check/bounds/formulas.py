"""The formulas of the bounds: how far a class of kernels may be off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm.check.bounds.classes import Tier

__all__ = [
    "Deviations",
    "Moments",
    "backward_error",
    "deviations",
    "forward_error",
    "given",
    "in_range",
    "inverse_deviation",
    "stored",
]

Array = npt.NDArray[Any]


class Moments(NamedTuple):
    """What the bound needs of x, per statistic, in float64 and the derived shape."""

    mean: Array
    variance: Array
    absolute: Array
    """A = mean of \\|x\\|."""
    square: Array
    """Q = mean of x**2."""
    inverse: Array
    """r."""


class Deviations(NamedTuple):
    """How far a class of kernels may be off in mean, variance and inverse standard deviation."""

    mean: Array
    variance: Array
    inverse: Array
    undecided: Array
    """True where dr/r > 1/4."""


def deviations(moments: Moments, epsilon: float, u: float, tier: Tier, tiny: float = 0.0) -> Deviations:
    """Bounds of statistics recomputed from x, before they are stored; what is below `tiny` may be flushed to 0."""
    h, mean, v, r = tier.h, np.abs(moments.mean), moments.variance, moments.inverse
    with np.errstate(all="ignore"):
        d_mean = (h + 1) * u * moments.absolute + tiny
        if tier.recurrence:
            d_mean = 8 * u * ((h + 1) * mean + np.sqrt(v)) + 2 * u * moments.absolute + tiny
        d_variance = (h + 4) * u * (v + mean * np.sqrt(v)) + d_mean**2 + tiny * (2 + 4 * np.sqrt(v))
        if tier.spread is not None:
            d_mean = d_mean + tier.spread * u * mean
            d_variance += tier.spread * u * v
        if tier.one_pass:
            d_variance = np.maximum(
                d_variance, (h + 3) * u * moments.square + 2 * mean * d_mean + d_mean**2 + 2 * u * mean**2
            )
        d_inverse = inverse_deviation(v, d_variance, r, epsilon, tiny) + 4 * u * r
        undecided = ~(d_inverse <= 0.25 * r)
    return Deviations(d_mean, d_variance, d_inverse, undecided)


def inverse_deviation(variance: Array, d_variance: Array, r: Array, epsilon: float, tiny: float) -> Array:
    """How far 1 / sqrt(variance + epsilon) is off for a variance that is off by `d_variance`, without roundings."""
    above = 1 / np.sqrt(np.maximum(variance - d_variance, 0) + (epsilon if epsilon >= tiny else 0.0)) - r
    below = r - 1 / np.sqrt(variance + d_variance + epsilon)
    deviation: Array = np.maximum(above, below)
    return deviation


def in_range(d_mean: Array, d_variance: Array, d_inverse: Array, r: Array, lost: Array) -> Deviations:
    """The deviations, without a limit where sums leave the compute type's range (`lost`)."""
    undecided = ~(d_inverse <= 0.25 * r) & ~lost
    d_mean, d_variance, d_inverse = (np.where(lost, np.inf, d) for d in (d_mean, d_variance, d_inverse))
    return Deviations(d_mean, d_variance, d_inverse, undecided)


def given(inverse: Array, relative: Array, tiny: float) -> Deviations:
    """Statistics that the caller gives: x - mean within `tiny`, the inverse standard deviation within `relative`."""
    zero = np.zeros_like(inverse)
    return Deviations(zero + tiny, zero, relative * inverse, np.zeros(inverse.shape, bool))


def forward_error(
    x: Array, mean: Array, r: Array, scale: Array, bias: Array, errors: Sequence[Array], u: float
) -> Array:
    """E of y, before y is stored; `errors` are dmu and dr."""
    d_mean, d_inverse = errors
    scale = np.abs(scale)
    spread = scale * (r * d_mean + np.abs(x - mean) * d_inverse)
    result: Array = spread + 4 * u * (scale * r * (np.abs(x) + np.abs(mean)) + np.abs(bias))
    return result


def backward_error(
    x: Array,
    dy: Array,
    dx: Array,
    mean: Array,
    r: Array,
    scale: Array,
    dscale: Array,
    dbias: Array,
    errors: Sequence[Array],
    m: int,
    u: float,
    one_pass: bool,
) -> Array:
    """E of dx, before dx is stored; `errors` are dmu, dr, E of dscale and E of dbias."""
    d_mean, d_inverse, e_dscale, e_dbias = errors
    dscale, dbias = np.abs(dscale) / m, np.abs(dbias) / m
    normal = np.abs(x - mean) * r
    w = (np.abs(x) + np.abs(mean)) * r if one_pass else normal
    relative = d_inverse / r
    d_normal = r * d_mean + normal * relative + 3 * u * w
    inner = 5 * u * (np.abs(dy) + dbias + normal * dscale) + e_dbias / m + normal * (e_dscale / m) + dscale * d_normal
    result: Array = np.abs(scale) * r * inner + np.abs(dx) * (relative + 2 * u)
    return result


def stored(
    error: Array, result: Array, alpha: float, beta: float, prior: Array | None, u: float, u_out: float, tiny: float
) -> tuple[Array, Array]:
    """(alpha * result + beta * prior, bound of it as stored), from E of the unblended result."""
    out = result
    if alpha != 1 or beta != 0:
        out = alpha * result
        size = np.abs(out)
        if beta != 0:
            assert prior is not None
            blend = beta * prior
            out, size = out + blend, size + np.abs(blend)
        error = abs(alpha) * error + 2 * u * size
    return out, error + u_out * (np.abs(out) + error) + tiny
