"""Tells whether a sum of ordinary data is off by more than roundings leave, whatever it is that is missing.

A bound holds for every data. Of terms that are drawn independently, partial sums are small in any order that does not
look at them: of k terms with mean kappa, in units of their size, some sqrt(k) + k |kappa|. An addition rounds by up to
u times its result. Roundings of either sign so come to about

    u m (1 + |kappa| sqrt(m))

in terms of the sum, in one chain, and to less in every other order; the mean over, of one pass, in dscale that times
1 + |kappa of x|. Measured on the 33 styles of `selftest_tool`, m from 3,136 to 401,408: at most 2.6 of it in
the mean, which may be shifted by an element, 0.6 in dbias, 2.1 in dscale. `REACH` of it is allowed.

This says nothing of a variance, whose terms are of one sign and whose chains err by their bias (but see
`pybnorm.check.judging.one_term`); of dscale where the
mean is computed anew, whose error it has; of what is blended; of an activation, where one element near a limit may be
masked or not. y, dx and the running mean have roundings of their own, which are allowed beside; they may all be of one
sign. Where those are larger than what a sum is off by, as 16-bit results make them, an output is as wrong as the sum
where it deviates as it does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from pybnorm.check.judging.bounds.classes import LONG
from pybnorm.check.judging.deviations import Rows, measured, own_moments, some_of
from pybnorm.check.judging.one_term import RANDOM, one_term
from pybnorm.check.language.data import sums_are_exact
from pybnorm.check.language.problem import FILE
from pybnorm.enums import Operation
from pybnorm.reference.namespaces import Array

if TYPE_CHECKING:
    from pybnorm.check.judging.bounds import Expected


LEVEL = 1e-12
"""Probability that a case whose kernel is right is taken for one that is wrong by chance."""
EXPLAINED = 0.75
"""Share of a squared deviation that another must explain to be its cause."""
REACH = {"mean": 64.0, "dbias": 32.0, "dscale": 32.0}
"""How many times the size of roundings a sum may be off."""
_FOLLOW = ("y", "dx", "running_mean")
"""Outputs whose elements have roundings of their own beside those of the sums that they are made with."""
_LEAST = 0.15
"""Terms of a sum that are never too many."""
_PLACES = 512
FILLS = ("randn", "sqrteps", "paired", "exact", "relu", "image", "sparse", "level", FILE)
"""Data in an order that says nothing of their values; of a file's that is looked at."""
_CHANNELS, _WANDERS, _DISTINCT = 8, 8.0, 16
"""Statistics of a file that are looked at, how many times the size of random partial sums theirs may be, and how many
values its gradients have at least."""


@dataclasses.dataclass(frozen=True)
class Beyond:
    """A deviation that roundings do not explain."""

    notes: dict[str, str]
    """By output."""
    noticed: dict[str, float]
    """Smallest relative error of an output that would have been seen."""
    sizes: dict[str, str]
    """How far each sum is off, and what is allowed, where they are nearest."""
    over: dict[str, Array]
    """Of each output with a note 1 for the statistics that are off by more, else 0."""


def beyond(expected: Expected, outputs: Mapping[str, Array]) -> Beyond:
    """Outputs whose sums are off by more than roundings leave."""
    found = Beyond({}, {}, {}, {})
    problem = expected.problem
    if problem.operation == Operation.FORWARD_INFERENCE or problem.composed == "gather_stats" or problem.activation:
        return found
    if problem.m < LONG or problem.fill not in FILLS or sums_are_exact(problem):  # bounds that are no wider
        return found
    rows = Rows(expected)
    if not len(rows.chosen) or (problem.fill == FILE and not _in_no_order(rows)):
        return found
    gradient = _size(rows)
    mean, variance = own_moments(expected)
    wrong: dict[str, tuple[str, Array]] = {}
    deviations = {name: measured(expected, name, got) for name, got in outputs.items() if _shows(expected, name)}
    for output, name in ((o, n) for o, own in deviations.items() for n in own if n in REACH):
        size = 1.0 if name == "mean" else gradient
        with np.errstate(all="ignore"):
            sums = mean * problem.m / np.sqrt(variance) if name == "mean" else expected.outputs[name].ravel()
            value = np.abs(sums)
            allowed = _allowed(expected, name, value, size) + _own(expected, output, size)
            if output not in ("y", "dx"):
                found.noticed[output] = float(np.fmin.reduce(allowed / value, initial=math.inf))
            deviation = deviations[output][name]
            ratio = np.where(np.isinf(deviation), np.nan, np.abs(deviation) / allowed)  # beyond the dtype's range
        if np.isnan(ratio).all():
            continue
        worst = int(np.nanargmax(ratio))
        text = (
            f"off by {abs(deviation[worst]) / size:.3g} terms of {name} in channel {worst}, by roundings less than "
            f"{allowed[worst] / size:.3g}"
        )
        found.sizes[output] = "; ".join(filter(None, [found.sizes.get(output), text]))
        if (ratio > 1).any():
            wrong.setdefault(name, (output, deviation))
            found.notes[output] = f"as if terms were missing or wrong: {text}"
            found.over[output] = (ratio > 1).astype(np.uint8)
    for output in (name for name in _FOLLOW if wrong and name in deviations):
        for name, deviation in deviations[output].items():
            if name in wrong and _alike(deviation, wrong[name][1]):
                found.notes.setdefault(output, f"off as {wrong[name][0]} is, by more than roundings")
                found.over.setdefault(output, found.over[wrong[name][0]])
    if problem.fill in RANDOM:
        for name in ("mean", "variance", "dbias", "dscale"):
            own = {output: values[name] for output, values in deviations.items() if name in values}
            for output, note in one_term(rows, name, own, LEVEL).items():
                found.notes.setdefault(output, note)
                found.over.setdefault(output, np.ones(expected.statistics[0].size, np.uint8))
    return found


def _shows(expected: Expected, output: str) -> bool:
    """Say whether an output tells of sums, and of no other error."""
    problem = expected.problem
    if problem.composed == "backward_elemt" or expected.blend(output)[1]:  # its sums are given
        return False
    if problem.recomputes and output in ("dscale", "sum_dy_xmu", "dx"):
        return False
    return not (output.startswith("running") and problem.factor == 0)


_LEAST_FACTOR, _FEWEST_MEANS = 32.0, 8
"""Units in the last place that a factor of the mean is off by at least, and the means other than 0 that show it."""


def factors(expected: Expected, outputs: Mapping[str, Array]) -> dict[str, str]:
    """Outputs whose means are multiplied by one factor, such as a wrong 1/m, on data whose sums are exact.

    A factor deviates alike in all channels; Welford's recurrence, which may be as far off, does not. The deviations are
    held against the means: Student's t, with at least a unit in the last place as what is left of each.
    """
    found: dict[str, str] = {}
    problem = expected.problem
    if problem.operation != Operation.FORWARD_TRAINING or not sums_are_exact(problem) or problem.m < LONG:
        return found
    rows = Rows(expected)
    own = rows.mean != 0
    kappa, unit = (rows.mean / rows.deviation)[own], expected.precision.u * rows.m
    count, size = len(kappa), float(kappa @ kappa)
    names = ("saved_mean", "y", *(("running_mean",) if problem.factor else ()))
    for name in [n for n in outputs if n in names] if count >= _FEWEST_MEANS else ():
        d = measured(expected, name, outputs[name])["mean"][rows.chosen][own]
        slope = float(d @ kappa) / size
        if not abs(slope) >= _LEAST_FACTOR * unit:  # NaN is no factor
            continue
        left = np.maximum(np.abs(d - slope * kappa), unit * np.abs(kappa))
        t2 = slope**2 * size * (count - 1) / float(left @ left)
        # P(|T| > t) = I_x(a, 1/2) with x = v / (v + t**2) and a = v/2, which is below x**a / (a B(a, 1/2) sqrt(1 - x))
        a, x = (count - 1) / 2, (count - 1) / (count - 1 + t2)
        beta = math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
        if a * math.log(x) - math.log(a) - beta - 0.5 * math.log1p(-x) + math.log(3 * 8) < math.log(LEVEL):
            found[name] = f"as if the mean were multiplied by {1 + slope / rows.m:.9g}"
    return found


def _in_no_order(rows: Rows) -> bool:
    """Say whether partial sums in the order of a file's data stay small, too: sorted data would not."""
    for number in some_of(len(rows.chosen), _CHANNELS):
        z, dy = rows.channel(number)
        if dy is not None and len(np.unique(dy[:_PLACES])) < _DISTINCT:
            return False  # of equal terms all roundings are of one sign
        for terms in (z,) if dy is None else (dy - dy.mean(), dy * z - (dy * z).mean()):
            size = math.sqrt(float((terms * terms).sum()))
            if float(np.abs(terms.cumsum()).max()) > _WANDERS * size:
                return False
    return True


def _size(rows: Rows) -> float:
    """Root mean square of dy, in the channel where it is largest; 1 where there is none."""
    if rows.dy is None:
        return 1.0
    image, inside = np.divmod(np.random.default_rng(5).integers(0, rows.m, _PLACES), rows.inner)
    dy = rows.dy[image, rows.chosen[:, None], inside].astype(np.float64)
    return math.sqrt(float((dy * dy).mean(axis=1).max()))


def _own(expected: Expected, output: str, size: float) -> Array | float:
    """Say how far the roundings of an output's own elements may seem to move the sum."""
    problem, p = expected.problem, expected.precision
    if output not in _FOLLOW:
        return 0.0
    mean, variance = own_moments(expected)
    kappa = np.abs(mean) / np.sqrt(variance)
    if output == "running_mean":
        kept = abs(1 - problem.factor) * np.abs(expected.wide("mean").ravel()) / (problem.factor * np.sqrt(variance))
        return problem.m * (3 * p.u + p.u_param) * (kept + kappa)
    scale = np.abs(expected.wide("scale").ravel())
    rounded = 2 * p.u_out + (4 if output == "y" else 10) * p.u * (1 + 2 * kappa)
    if output == "y":
        rounded = rounded * (1 + np.abs(expected.wide("bias").ravel()) / scale)
        rounded = rounded * np.sqrt((variance + problem.epsilon) / variance)
    return 2 * problem.m * size * rounded + 0 / scale


def _allowed(expected: Expected, name: str, value: Array, size: float) -> Array:
    """Say how far a sum of that value may be off whose terms are of that size."""
    m, precision = expected.problem.m, expected.precision
    roundings = REACH[name] * precision.u * (m * size + math.sqrt(m) * value)
    if name == "dscale":
        mean, variance = own_moments(expected)
        roundings = roundings * (1 + np.abs(mean) / np.sqrt(variance))
    return np.maximum(roundings + 2 * precision.u_param * value, _LEAST * size)


def _alike(deviation: Array, other: Array) -> bool:
    known = np.isfinite(deviation) & np.isfinite(other)
    d, to = deviation[known], other[known]
    square = float(to @ to)
    if not square or not float(d @ d):
        return False
    return abs(float(d @ to) / square - 1) < 0.2 and 1 - float((d - to) @ (d - to)) / float(d @ d) > EXPLAINED
