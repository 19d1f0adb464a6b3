"""Finds the known defects of a library that explain a verdict.

A known defect explains a verdict and does not excuse it: the case stays FAIL and only names the defect. Tests run the
case of each entry of `pybnorm.defects` on its library and fail when it no longer shows in a version that it names.
"""

from __future__ import annotations

from collections.abc import Sequence

from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.language.data import sums_are_exact
from pybnorm.check.language.problem import Problem
from pybnorm.defects import Call, Defect, Effect, known_defects

STATUSES = {Effect.WRONG: Status.FAIL, Effect.FAILS: Status.BUILD_FAILED, Effect.WEAK: Status.WARN}
"""What a defect's effect makes of a case."""
CHAINS = "sums in chains"
"""In the judge's note on an output that is CHAIN."""
_SUMS = {"sum_dy": "dbias", "sum_dy_xmu": "dscale"}
"""Outputs of backward_reduce, which are those of a backward call."""


def makes(defect: Defect, status: Status) -> bool:
    """Say whether a case of `status` may be its doing; a weakness's FAIL needs a note of its kind."""
    if defect.note == CHAINS:
        return status == Status.CHAIN
    if defect.effect == Effect.WEAK:
        told = defect.note != "" or defect.exact
        return status in (Status.WARN, Status.INCONCLUSIVE) or (status == Status.FAIL and told)
    return status == STATUSES[defect.effect]


def covers(defect: Defect, verdict: Verdict) -> bool:
    """Say whether a verdict of the defect's status is of an output, of a kind, and no larger than it explains."""
    output = _SUMS.get(verdict.output, verdict.output)
    if verdict.wild or output not in defect.outputs or defect.note not in verdict.note:
        return False
    return verdict.status != Status.FAIL or verdict.finite_ratio <= defect.largest(output)


def explain(
    backend: str,
    version: Sequence[int],
    problem: Problem,
    verdicts: Sequence[Verdict],
    status: Status = Status.FAIL,
    message: str = "",
    build: str = "",
    device: str = "",
) -> list[Defect]:
    """The known defects that together explain a case, or an empty list where something is left unexplained.

    `message` is that of a call that failed, without verdicts; `build` of the library and `device` may be unknown, "".
    """
    exact = sums_are_exact(problem)
    call = Call(*(getattr(problem, name) for name in Call._fields[:-1]))._replace(device=device)
    candidates = [
        d
        for d in known_defects(backend, call, version, build)
        if makes(d, status) and not (d.rounded if exact else d.exact) and problem.fill in (d.fills or (problem.fill,))
    ]
    if not verdicts:
        return [d for d in candidates if not d.outputs and d.note in message]
    causes = [[d for d in candidates if covers(d, v)] for v in verdicts if v.status == status]
    return [d for d in candidates if any(d in some for some in causes)] if all(causes) else []
