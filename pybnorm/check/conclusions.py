"""What a run found, in one sentence of plain words for each library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pybnorm.check.bounds import Status
from pybnorm.check.results import BackendInfo, CaseResult, by_label, cases_text, label, version_text
from pybnorm.check.support import NEWLY_UNSUPPORTED

__all__ = ["Conclusion", "conclusions"]

_SAID: dict[Status | str, str] = {
    Status.FAIL: "are wrong",
    NEWLY_UNSUPPORTED: "are newly refused",
    Status.NONDETERMINISTIC: "are right with other bits at another equal call",
    Status.TIMEOUT: "did not end in time",
    Status.CRASHED: "crashed",
    Status.RAISED: "raised an exception",
    Status.BUILD_FAILED: "could not be compiled",
    Status.RESOURCE: "found too little memory or room",
    Status.ERROR: "did not run",
    Status.MISTRUSTED: "could not have failed, which shows nothing",
    Status.INCONCLUSIVE: "cannot be judged by their bounds",
    Status.PASS: "are within their bounds",
    Status.WARN: "are only within a looser bound (WARN)",
    Status.UNSUPPORTED: "are not supported",
}
"""What a conclusion says of cases, the worst first."""


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """What was found of one library."""

    library: str
    """As `pybnorm.check.results.by_label` names it."""
    sentence: str
    worst: CaseResult
    """The case to look at first; its status is that of the library."""


def conclusions(infos: Sequence[BackendInfo], results: Sequence[CaseResult], complete: bool = True) -> list[Conclusion]:
    """One for each library with results, in their order."""
    names = {label(info, infos): f"{info.label} {version_text(info)}".strip() for info in infos}
    found = []
    for library, own in by_label(results).items():
        name = names.get(library) or library
        if "@" in library and library in names:
            name += f" ({library})"
        worst = max(own, key=lambda r: (r.status != Status.UNSUPPORTED, r.status.severity, r.ratio))
        sentence = f"{name}: {'' if complete else 'so far, '}{_conclusion(own, worst)}."
        found.append(Conclusion(library, sentence, worst))
    return found


def _conclusion(own: Sequence[CaseResult], worst: CaseResult) -> str:
    kinds: dict[Status | str, list[CaseResult]] = {}
    for result in own:
        kinds.setdefault(result.claim if result.claim == NEWLY_UNSUPPORTED else result.status, []).append(result)
    refused, loose = len(kinds.get(Status.UNSUPPORTED, ())), len(kinds.get(Status.WARN, ()))
    if refused == len(own):
        return "the one case is not supported" if refused == 1 else f"none of {refused} cases is supported"
    if worst.status.good:
        parts = [f"all {cases_text(len(own) - refused, 'supported ')} are within their bounds"]
        if len(own) - refused == 1:
            parts = ["the one supported case is within its bounds"]
        parts[0] += f", {loose} only within a looser one (WARN)" if loose else ""
        parts += [_said(refused, Status.UNSUPPORTED)] if refused else []
        return "; ".join(parts)
    parts = []
    for kind in _SAID:
        if found := kinds.get(kind, []):
            known = sum(bool(r.known) for r in found)
            text = _said(len(found), kind, "" if parts else f" of {cases_text(len(own))}")
            parts.append(text + (f" ({known} by known defects)" if known else ""))
    where = ", ".join(worst.case.split(",")[:4])
    beyond = max((v for v in worst.verdicts if v.status == Status.FAIL), key=lambda v: v.ratio, default=None)
    if beyond:
        times = f"{beyond.ratio:.3g}" if math.isfinite(beyond.ratio) else "infinitely many"
        parts[0] += f", worst: {beyond.output} of {where} ({times} times its bound)"
    else:
        parts[0] += f", such as {where}"
    return "; ".join(parts)


def _said(count: int, kind: Status | str, of: str = "") -> str:
    said = _SAID[kind]
    if count == 1:
        said = said.replace("are ", "is ", 1).replace("their bounds", "its bounds")
    return f"{count}{of} {said}"
