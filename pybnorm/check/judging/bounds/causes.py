"""Causes of a wrong output: truncation, the unbiased variance, the convention of the running variance."""

from __future__ import annotations

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier, tiers
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.tally import compare
from pybnorm.check.language.data import round_to
from pybnorm.enums import DataType
from pybnorm.reference.namespaces import Array, on_host

TRUNCATED = "16-bit results are truncated, not rounded: up to 2x the bound"
"""Note of a FAIL that a store which truncates explains."""
UNBIASED = "normalized by the unbiased variance, m / (m - 1) too large"
"""Note of a FAIL on exact data."""
TRUNCATION_EVIDENCE = 20
"""Elements that must be no rounding before truncation is named: a library that rounds looks so once in 2**20."""


def truncate(values: Array, dtype: DataType) -> Array:
    """float64 `values` as stored in a 16-bit dtype, rounded once toward zero."""
    nearest = round_to(values, dtype)
    bits = nearest.view(np.uint16)
    with np.errstate(invalid="ignore"):
        bits -= np.abs(nearest.astype(np.float64)) > np.abs(values)  # from inf to the largest finite number too
    return nearest


def is_truncated(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> bool:
    """Say whether every judged element is a truncated value within its bound, and enough are not to nearest."""
    p, dtype = expected.precision, expected.problem.dtype
    evidence = 0
    for part in expected.parts(output, got, classes):
        assert part.got is not None
        right, values = on_host(part.reference), on_host(part.got)
        truncated, rounded, judged = (np.zeros(right.shape, bool) for _ in range(3))
        with np.errstate(all="ignore"):
            for bound, undecided in ((on_host(b), on_host(u)) for b, u in part.classes):
                decided = ~undecided & np.isfinite(right) & (np.abs(right) + bound <= p.max_out)
                # what the bound was before the result was stored
                error = np.maximum((bound - p.tiny_out - p.u_out * np.abs(right)) / (1 + p.u_out), 0)
                flushed = (values == 0) & (np.abs(right) - error <= p.tiny_out)
                for found, store in ((truncated, truncate), (rounded, round_to)):  # both are monotone
                    low, high = (store(end, dtype).astype(np.float64) for end in (right - error, right + error))
                    found[decided & (((low <= values) & (values <= high)) | flushed)] = True
                judged |= decided
        if (judged & ~truncated).any():
            return False
        evidence += int(np.count_nonzero(truncated & ~rounded))
    return evidence >= TRUNCATION_EVIDENCE


def normalized_by_unbiased(expected: Expected, output: str, got: Array, exact: Tier) -> bool:
    """Say whether exact sums and a variance that is too large by m / (m - 1) explain an output to the last rounding."""
    problem = expected.problem
    if not problem.recomputes or problem.m == 1:
        return False
    kind = type("Unbiased", (type(expected),), {"_normalize_unbiased": True})
    tally = compare(kind(problem, expected.inputs), output, got, (exact,))
    return not tally.over and not tally.undecided and tally.unjudged < tally.elements


def bessel_convention(expected: Expected, got: Array) -> str:
    """Say which variance the running variance takes; empty: neither. The biased one is what a wrong library did."""
    tier = tiers(expected.problem, "running_variance")[-1]
    (part,) = expected.parts("running_variance", got, (tier,))
    assert part.got is not None
    assert expected.biased_running_variance is not None
    bound = part.classes[0][0]
    judged = np.isfinite(part.reference) & (np.abs(part.reference) + bound <= expected.precision.max_param)
    with np.errstate(all="ignore"):
        # the bound of the biased form is smaller by (m-1)/m, which the comparison need not know
        unbiased, biased = (
            bool(np.all((np.abs(part.got - right) <= bound)[judged]))
            for right in (part.reference, expected.biased_running_variance)
        )
        # where one may be rounded to the other, a long chain's error looks like a convention
        apart = np.abs(part.reference - expected.biased_running_variance) > 2 * bound
    if (unbiased and biased) or (biased and not apart[judged].any()):
        return "running_variance is as near to the biased variance as to the unbiased one"
    if biased:
        return "running_variance takes the biased variance (a sum over m, not m - 1)"
    return "running_variance takes the unbiased variance, as defined" if unbiased else ""
