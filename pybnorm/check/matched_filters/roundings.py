"""Whether a sum of ordinary data is off by more than roundings leave, whatever it is that is missing.

A bound holds for every data. Of terms that are drawn independently, partial sums are small in any order that does not
look at them: of k terms with mean kappa, in units of their size, some sqrt(k) + k |kappa|. An addition rounds by up to
u times its result. Roundings of either sign so come to about

    u m (1 + |kappa| sqrt(m))

in terms of the sum, in one chain, and to less in every other order; the mean over, of one pass, in dscale that times
1 + |kappa of x|. Measured on the 33 styles of `pybnorm.check.selftest`, m from 3,136 to 401,408: at most 2.6 of it in
the mean, which may be shifted by an element, 0.6 in dbias, 2.1 in dscale. `REACH` of it is allowed.

This says nothing of a variance, whose terms are of one sign and whose chains err by their bias; of dscale where the
mean is computed anew, whose error it has; of what is blended; of an activation, where one element near a limit may be
masked or not. y, dx and the running mean have roundings of their own, which are allowed beside; they may all be of one
sign. Where those are larger than what a sum is off by, as 16-bit results make them, an output is as wrong as the sum
where it deviates as it does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pybnorm.check.data import sums_are_exact
from pybnorm.check.matched_filters.deviations import Rows, measured, own_moments
from pybnorm.check.matched_filters.hypotheses import EXPLAINED

if TYPE_CHECKING:
    from pybnorm.check.bounds import Expected

__all__ = ["REACH", "Beyond", "beyond"]

Array = npt.NDArray[Any]

REACH = {"mean": 64.0, "dbias": 32.0, "dscale": 32.0}
"""How many times the size of roundings a sum may be off."""
_SUMS = {
    "saved_mean": ("mean",),
    "running_mean": ("mean",),
    "y": ("mean",),
    "dbias": ("dbias",),
    "sum_dy": ("dbias",),
    "dscale": ("dscale",),
    "sum_dy_xmu": ("dscale",),
    "dx": ("dbias", "dscale"),
}
"""Outputs, and the sums that they tell of."""
_FOLLOW = ("y", "dx", "running_mean")
_LEAST = 0.15
"""Terms of a sum that are never too many."""
_PLACES = 512


@dataclasses.dataclass(frozen=True)
class Beyond:
    """What roundings do not explain."""

    notes: dict[str, str]
    """By output."""
    noticed: dict[str, float]
    """Smallest relative error of an output that would have been seen."""
    sizes: dict[str, str]
    """How far each sum is off, and what is allowed, where they are nearest."""


def beyond(expected: Expected, outputs: Mapping[str, Array]) -> Beyond:
    """Outputs whose sums are off by more than roundings leave.

    Parameters
    ----------
    expected : Expected
        Of a problem that filters are tried on (`pybnorm.check.matched_filters.not_tried`).
    outputs : mapping of str to ndarray
        What the library wrote.
    """
    found = Beyond({}, {}, {})
    problem = expected.problem
    if sums_are_exact(problem) or problem.activation:
        return found
    rows = Rows(expected)
    if not len(rows.chosen):
        return found
    gradient = _size(rows)
    wrong: dict[str, tuple[str, Array]] = {}
    for output, name in ((o, n) for o, names in _SUMS.items() if o in outputs for n in names):
        if (problem.recomputes and (name == "dscale" or output == "dx")) or expected.blend(output)[1]:
            continue
        if output == "running_mean" and problem.factor == 0:
            continue
        if problem.composed == "backward_elemt":  # its sums are given
            continue
        size = 1.0 if name == "mean" else gradient
        with np.errstate(all="ignore"):
            value = np.abs(_value(expected, name))
            allowed = _allowed(expected, name, value, size) + _own(expected, output, size)
            if output not in ("y", "dx"):
                found.noticed[output] = float(np.fmin.reduce(allowed / value, initial=math.inf))
            deviation = measured(expected, output, outputs[output]).get(name, np.full(1, np.nan))
            ratio = np.abs(deviation) / allowed
        if np.isnan(ratio).all():
            continue
        worst = int(np.nanargmax(ratio))
        text = (
            f"off by {abs(deviation[worst]) / size:.3g} terms of {name} in channel {worst}, by roundings less than "
            f"{allowed[worst] / size:.3g}"
        )
        found.sizes[output] = "; ".join(filter(None, [found.sizes.get(output), text]))
        over = np.count_nonzero(ratio > 1)
        if over:
            wrong.setdefault(name, (output, deviation))
            found.notes[output] = f"as if terms were missing or wrong: {text}; so in {over} of {ratio.size}"
    for output in (name for name in _FOLLOW if wrong and name in outputs):
        if output == "running_mean" and problem.factor == 0:
            continue
        for name, deviation in measured(expected, output, outputs[output]).items():
            if name in wrong and _alike(deviation, wrong[name][1]):
                found.notes.setdefault(output, f"off as {wrong[name][0]} is, by more than roundings")
    return found


def _size(rows: Rows) -> float:
    """Root mean square of dy, in the channel where it is largest; 1 where there is none."""
    _, dy = rows.at(np.random.default_rng(5).integers(0, rows.m, _PLACES))
    return 1.0 if dy is None else math.sqrt(float((dy * dy).mean(axis=1).max()))


def _value(expected: Expected, name: str) -> Array:
    """A sum, as `measured` counts its deviation."""
    if name == "mean":
        mean, variance = own_moments(expected)
        return mean * expected.problem.m / np.sqrt(variance)
    sums = expected.outputs
    if name in sums:
        return sums[name].ravel()
    return sums["sum_dy"].ravel() if name == "dbias" else sums["sum_dy_xmu"].ravel() * expected.statistics[1].ravel()


def _own(expected: Expected, output: str, size: float) -> Array | float:
    """How far the roundings of an output's own elements may seem to move the sum."""
    problem, p = expected.problem, expected.precision
    if output not in ("y", "dx", "running_mean"):
        return 0.0
    mean, variance = own_moments(expected)
    kappa = np.abs(mean) / np.sqrt(variance)
    if output == "running_mean":
        old = np.abs(expected.inputs.need("mean").astype(np.float64).ravel())
        kept = abs(1 - problem.factor) * old / (problem.factor * np.sqrt(variance))
        own: Array = problem.m * (3 * p.u + p.u_param) * (kept + kappa)
        return own
    scale = np.abs(expected.inputs.scale.astype(np.float64).ravel())
    rounded = 2 * p.u_out + (4 if output == "y" else 10) * p.u * (1 + 2 * kappa)
    if output == "y":
        bias = np.abs(expected.inputs.need("bias").astype(np.float64).ravel())
        rounded = rounded * (1 + bias / scale) * np.sqrt((variance + problem.epsilon) / variance)
    own = 2 * problem.m * size * rounded + 0 / scale
    return own


def _allowed(expected: Expected, name: str, value: Array, size: float) -> Array:
    """How far a sum of that value may be off whose terms are of that size."""
    m, precision = expected.problem.m, expected.precision
    roundings = REACH[name] * precision.u * (m * size + math.sqrt(m) * value)
    if name == "dscale":
        mean, variance = own_moments(expected)
        roundings = roundings * (1 + np.abs(mean) / np.sqrt(variance))
    allowed: Array = np.maximum(roundings + 2 * precision.u_param * value, _LEAST * size)
    return allowed


def _alike(deviation: Array, other: Array) -> bool:
    """Whether one explains most of the other."""
    known = np.isfinite(deviation) & np.isfinite(other)
    d, to = deviation[known], other[known]
    square = float(to @ to)
    if not square or not float(d @ d):
        return False
    return abs(float(d @ to) / square - 1) < 0.2 and 1 - float((d - to) @ (d - to)) / float(d @ d) > EXPLAINED
