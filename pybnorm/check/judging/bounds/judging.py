"""Holds an output against its classes, strictest first, gives the verdict that follows, and names causes."""

from __future__ import annotations

import math

import numpy as np

from pybnorm import _arguments
from pybnorm.check.judging.bounds import not_finite
from pybnorm.check.judging.bounds.chains import chain_length
from pybnorm.check.judging.bounds.classes import Tier, tiers
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.tally import compare
from pybnorm.check.judging.bounds.verdict import WORST_POINTS, Point, Status, Verdict
from pybnorm.check.judging.bounds.where import levels, put
from pybnorm.check.language.data import round_to, sums_are_exact
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.reference.namespaces import Array, Foreign, on_host
from pybnorm.reference.rounding import _data_type

TRUNCATED = "16-bit results are truncated, not rounded: up to 2x the bound"
"""Note of a FAIL that a store which truncates explains."""
UNBIASED = "normalized by the unbiased variance, m / (m - 1) too large"
"""Note of a FAIL on exact data."""
TRUNCATION_EVIDENCE = 20
"""Elements that must be no rounding before truncation is named: a library that rounds looks so once in 2**20."""


OVERFLOWS = (
    ": the squares of x overflow, so that its values in float64 are as correct as a variance of infinity, 1/sigma 0"
)


def judge(expected: Expected, output: str, got: Array) -> Verdict:
    """The verdict on one of ``expected.outputs``; `got` is what the library wrote, as stored, in logical order."""
    _arguments.instance(expected, Expected, "expected", "an Expected")
    if not issubclass(type(output), str) or output not in tuple(expected.outputs):  # a look-up would compute it
        raise ArgumentError("output", output, " | ".join(expected.outputs))
    _arguments.instance(got, (np.ndarray, Foreign), "got", f"a NumPy array of shape {expected.shape(output)}")
    if got.size != math.prod(expected.shape(output)):
        raise ArgumentError("got", f"shape {got.shape}", f"shape {expected.shape(output)}")
    _data_type(got, "got")
    return judge_by(expected, output, got, tiers(expected.problem, output))


def judge_by(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> Verdict:
    """`judge` by other classes than those of `tiers`; the arguments are not looked at."""
    ratios: dict[str, float] = {}
    for count in range(1, len(classes) + 1):
        tally = compare(expected, output, got, classes[:count])
        tier = classes[count - 1]
        ratios[tier.name] = tally.ratio
        if not tally.over and not tally.undecided:
            break
    status, notes = tier.status, []
    found = not_finite.find(expected, output, got, tier) if tally.unjudged else not_finite.Findings()
    tally.unjudged -= found.judged
    if tally.wild:
        notes.append(f"spread: {tally.wild} elements NaN or infinite where the correct value is finite")
    if tally.over:
        status = Status.FAIL
        length = 0 if sums_are_exact(expected.problem) or tally.wild else chain_length(expected, output, got)
        if length:
            status = Status.CHAIN
            notes.append(_chained(length, ratios[classes[0].name]))
        elif (
            output in ("y", "dx")
            and got.itemsize == expected.problem.dtype.itemsize == 2
            and is_truncated(expected, output, got, classes)
        ):
            notes.append(TRUNCATED)
    elif tally.undecided or tally.unjudged == tally.elements:
        status = Status.INCONCLUSIVE
        overflows = expected.problem.recomputes and np.isinf(expected.deviations(classes[0]).variance).all()
        notes.append(
            f"{tally.undecided} elements of statistics whose inverse standard deviation no bound holds"
            if tally.undecided
            else f"no element's correct value is in range{OVERFLOWS if overflows else ''}"
        )
    elif status == Status.WARN:
        status, note = _one_pass(expected, output, got, expected.kappa(tally.worst[0].index), ratios[classes[0].name])
        notes.append(note)
    elif count > 1 and normalized_by_unbiased(expected, output, got, classes[0]):
        # within what Welford's rounding excuses, but no rounding: every element says the same
        tier = classes[0]
        tally = compare(expected, output, got, (tier,))
        status = Status.FAIL
        notes.append(UNBIASED)
    elif count > 1:
        by = "an inexact 1/sigma" if expected.problem.takes_variance else "Welford's recurrence"
        notes.append(f"exact sums were rounded, as by {by}; within class {tier.name}")
    for finding in found.found:
        status = max(status, Status.FAIL if finding.wrong else Status.WARN, key=lambda s: s.severity)
        notes.append(str(finding))
    wrong = [finding for finding in found.found if finding.wrong]  # counted, and shown first
    tally.over += sum(finding.count for finding in wrong)
    tally.wild += sum(finding.count for finding in wrong)
    shown = [Point(finding.index, finding.right, finding.got, 0.0, math.inf) for finding in reversed(wrong)]
    tally.worst = [*shown, *tally.worst][:WORST_POINTS]
    if 0 < tally.unjudged < tally.elements:
        notes.append(f"{tally.unjudged} elements out of range or without a finite correct value are not judged")
    if output == "running_variance" and expected.problem.unbiased:
        notes += filter(None, [bessel_convention(expected, got)])
    elif output == "running_variance":
        notes.append("held against the biased variance: unbiased=0")
    elif output == "saved_inv_variance" and expected.problem.saves_variance:
        notes.append("held against the variance: saved=variance")
    verdict = Verdict(
        *(output, status, tier.name, ratios[classes[0].name], ratios, tally.elements),
        **{name: getattr(tally, name) for name in ("over", "undecided", "unjudged", "finite_ratio", "wild", "worst")},
        identical=not tally.different,
        noticed=tally.noticed if math.isfinite(tally.noticed) else 0.0,
        note="; ".join(notes),
    )
    if status == Status.FAIL:
        tried = (classes[0],) if UNBIASED in notes else classes
        put(verdict, levels(expected, output, got, tried, found.places), expected.problem.strides)
    return verdict


def _one_pass(expected: Expected, output: str, got: Array, kappa: float, ratio: float) -> tuple[Status, str]:
    """The status and note of an output that only the one-pass class holds."""
    # where next to nothing cancels, or x is all one value, the sums of two passes may be as far off
    if not 1 <= kappa < math.inf and (length := chain_length(expected, output, got, one_pass=False)):
        return Status.CHAIN, _chained(length, ratio)
    cause = "single-pass cancellation," if kappa >= 1 else "within the one-pass bound, though little cancels at"
    return Status.WARN, f"{cause} kappa={kappa:.3g}"


def _chained(length: int, ratio: float) -> str:
    return f"sums in chains of {length} terms: up to {ratio:.3g} times the bound of blocked sums"


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
