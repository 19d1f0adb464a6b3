"""Whether an output deviates from its right value as a named bug would make it deviate.

The bound of a sum of m terms grows with m, and the effect of one term on a mean falls with it: from some 10**5 terms on
a dropped element is far within the bound. But what it does to each channel can be predicted. That is a matched filter:
the prediction p of a bug is held against the measured deviation d, channel by channel.

`deviations` measures d, `hypotheses` has the predictions and their test.

On exact data a factor of the mean, such as a wrong 1/m, deviates alike in all channels, by many units in the last
place; Welford's recurrence, which may be as far off, does not. The deviations are held against the means: Student's t,
with at least a unit in the last place as what is left of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pybnorm.check.data import sums_are_exact
from pybnorm.check.matched_filters.deviations import Rows, measured
from pybnorm.check.matched_filters.hypotheses import EXPLAINED, LEVEL, Match, Search, Tried, scan, sums_of
from pybnorm.enums import Operation

if TYPE_CHECKING:
    from pybnorm.check.bounds import Expected
    from pybnorm.check.problem import Problem

__all__ = ["EXPLAINED", "LEVEL", "SHORTEST", "Match", "Tried", "matches", "measured", "not_tried"]

Array = npt.NDArray[Any]

SHORTEST = 2048
"""Terms of a sum below which its bound shows a single one."""
FILLS = ("randn", "sqrteps", "exact", "paired")
"""Data whose channels are drawn independently, each element like any other of its channel."""
_LARGEST_CORRELATION = 0.25
_NO_EFFECT = 0.15
"""Root mean square of D that is too small for a term that is missing."""
_LEAST_FACTOR = 32.0
"""Units in the last place that a factor of the mean is off by at least."""
_FEWEST_MEANS = 8


def _factor(expected: Expected, rows: Rows, d: Array) -> Match | None:
    """A factor of the mean that explains the mean's deviations on exact data."""
    u, kappa = expected.precision.u, rows.kappa
    own = kappa != 0
    d, kappa = d[own], kappa[own]
    count = len(d)
    if count < _FEWEST_MEANS:
        return None
    size = float(kappa @ kappa)
    slope = float(d @ kappa) / size
    if abs(slope) < _LEAST_FACTOR * u * rows.m:
        return None
    left = np.maximum(np.abs(d - slope * kappa), u * rows.m * np.abs(kappa))
    t2 = slope**2 * size * (count - 1) / float(left @ left)
    # P(|T| > t) = I_x(a, 1/2) with x = v / (v + t**2) and a = v/2, which is below x**a / (a B(a, 1/2) sqrt(1 - x))
    a, x = (count - 1) / 2, (count - 1) / (count - 1 + t2)
    beta = math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    log = a * math.log(x) - math.log(a) - beta - 0.5 * math.log1p(-x) + math.log(3 * 8)
    if log >= math.log(LEVEL):
        return None
    factor = 1 + slope / rows.m
    return Match(f"the mean were multiplied by {factor:.9g}", math.exp(max(log, -690.0)), factor)


def not_tried(problem: Problem) -> str:
    """Why no case of this problem can be asked for the bugs; empty if it can."""
    if problem.operation == Operation.FORWARD_INFERENCE:
        return "inference has no sums"
    if problem.composed == "gather_stats":
        return "it merges the sums of others"
    if problem.m < SHORTEST:
        return f"sums of fewer than {SHORTEST:,} terms: the bound shows a single one"
    if problem.fill not in FILLS:
        return f"fill={problem.fill} is not drawn independently for each channel"
    return ""


def matches(expected: Expected, outputs: Mapping[str, Array], tried: list[Tried] | None = None) -> dict[str, Match]:
    """Outputs that deviate as a bug would make them, with the bug.

    Parameters
    ----------
    expected : Expected
    outputs : mapping of str to ndarray
        What the library wrote.
    tried : list of Tried, optional
        Takes what was tried, of every sum that an output tells of.
    """
    problem = expected.problem
    if not_tried(problem):
        return {}
    if problem.operation == Operation.FORWARD_TRAINING and problem.factor == 0:
        outputs = {name: a for name, a in outputs.items() if not name.startswith("running")}
    rows = Rows(expected)
    if len(rows.chosen) < 4:
        return {}
    sums = sums_of(expected, rows)
    off: list[tuple[str, str, Array]] = []
    for output, got in outputs.items():
        for name, deviations in measured(expected, output, got).items():
            d = deviations[rows.chosen]
            size = math.sqrt(float(np.mean(d * d)))
            if np.isfinite(d).all() and size > _NO_EFFECT:
                off.append((output, name, d))
            elif tried is not None:
                tried.append(Tried(output, name, size, 0))
    if not off or not _independent(rows):
        return {}
    found: dict[str, Match] = {}
    if sums_are_exact(problem):
        factors = {output: _factor(expected, rows, d) for output, name, d in off if name == "mean"}
        found |= {output: match for output, match in factors.items() if match is not None}
        if found:
            return found

    def search(asked: str) -> None:
        searches = [
            (output, name, Search(rows, sums[name], d, asked))
            for output, name, d in off
            if not (asked and output in found)
        ]
        for _, _, one in searches:
            one.ends()
        scan(rows, [one for _, _, one in searches if one.scanned()])
        for output, name, one in searches:
            if asked and output in found:
                continue
            match = one.found
            if tried is not None and not asked:
                tried.append(one.told(output, name))
            if match is not None and (output not in found or match.probability < found[output].probability):
                found[output] = match

    search("")
    if found:
        search(min(found.values(), key=lambda match: match.probability).bug)
    return found


def _independent(rows: Rows) -> bool:
    """Whether no two channels go together, in x, its square or dy."""
    z, dy = rows.at(np.random.default_rng(7).integers(0, rows.m, 4096))
    for values in (z, z * z, dy):
        if values is None:
            continue
        centred = values - values.mean(axis=1, keepdims=True)
        size = np.sqrt((centred**2).sum(axis=1, keepdims=True))
        with np.errstate(all="ignore"):
            unit = np.where(size > 0, centred / size, 0.0)
        together = np.abs(unit @ unit.T)
        np.fill_diagonal(together, 0)
        if float(together.max(initial=0.0)) > _LARGEST_CORRELATION:
            return False
    return True
