"""The findings of a run, in one sentence for each library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import (
    BackendInfo,
    CaseResult,
    badness,
    by_label,
    cases_text,
    decisive,
    label,
    version_text,
    worst_verdict,
)
from pybnorm.check.run.support import NEWLY_UNSUPPORTED

_SAID: dict[Status | str, str] = {
    Status.FAIL: "are wrong",
    NEWLY_UNSUPPORTED: "are newly refused",
    Status.NONDETERMINISTIC: "are correct with other bits at another equal call",
    Status.TIMEOUT: "did not end in time",
    Status.CRASHED: "crashed",
    Status.RAISED: "raised an exception",
    Status.BUILD_FAILED: "could not be compiled",
    Status.RESOURCE: "found too little memory or room",
    Status.ERROR: "did not run",
    Status.INCONCLUSIVE: "cannot be judged by their bounds",
    Status.MISTRUSTED: "could not have failed, which shows nothing",
    Status.PASS: "are within their bounds",
    Status.WARN: "are only within a looser bound (WARN)",
    Status.CHAIN: "are as accurate as sums in long chains, and no more (CHAIN)",
    Status.UNSUPPORTED: "are not supported",
}
"""The words of a conclusion by status, the worst first."""


class Conclusion(NamedTuple):
    """The findings about one library."""

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
        worst = max(own, key=lambda r: (not r.good, r.status != Status.UNSUPPORTED, *badness(r)))
        sentence = f"{name}: {'' if complete else 'so far, '}{_conclusion(own, worst)}."
        found.append(Conclusion(sentence, worst))
    return found


def by_status(results: Iterable[CaseResult]) -> dict[Status, list[CaseResult]]:
    """The results of each status that there is, from good to bad."""
    found: dict[Status, list[CaseResult]] = {status: [] for status in Status}
    for result in results:
        found[result.status].append(result)
    return {status: own for status, own in found.items() if own}


def known_text(results: Sequence[CaseResult]) -> str:
    """Counts, in brackets, of results that known defects do not explain, and do; empty where they explain none."""
    known = [r for r in results if r.known]
    allowed = ", allowed" if any(r.allowed for r in known) else ""
    return f" ({len(results) - len(known)} new, {len(known)} known{allowed})" if known else ""


def _conclusion(own: Sequence[CaseResult], worst: CaseResult) -> str:
    kinds: dict[Status | str, list[CaseResult]] = {}
    for result in own:
        kinds.setdefault(result.claim if result.claim == NEWLY_UNSUPPORTED else result.status, []).append(result)
    refused = len(kinds.get(Status.UNSUPPORTED, ()))
    loose = "".join(
        f", {len(kinds[status])} only within {of}"
        for status, of in (
            (Status.WARN, "a looser one (WARN)"),
            (Status.CHAIN, "that of long chains of sums (CHAIN)"),
        )
        if status in kinds
    )
    if refused == len(own):
        return "the one case is not supported" if refused == 1 else f"none of {refused} cases is supported"
    supported = cases_text(len(own) - refused, "supported ")
    if worst.allowed:
        allowed = sum(r.allowed for r in own)
        are = "is" if allowed == 1 else "are"
        parts = [f"{allowed} of {supported} {are} wrong by known defects, which {are} allowed"]
        parts += [f"all others are within their bounds{loose}"] if allowed + refused < len(own) else []
    elif worst.good:
        one = len(own) - refused == 1
        parts = ["the one supported case is within its bounds" if one else f"all {supported} are within their bounds"]
        blind = len(kinds.get(Status.MISTRUSTED, ()))
        parts[0] += loose + (f", {blind} could not have failed, which shows nothing (MISTRUSTED)" if blind else "")
    else:
        return _wrong(own, worst, kinds)
    return "; ".join([*parts, *([_said(refused, Status.UNSUPPORTED)] if refused else [])])


def _wrong(own: Sequence[CaseResult], worst: CaseResult, kinds: Mapping[Status | str, Sequence[CaseResult]]) -> str:
    """The conclusion where some case is wrong: counts of every kind, the worst first."""
    parts: list[str] = []
    for kind in _SAID:
        if found := kinds.get(kind, []):
            text = _said(len(found), kind, "" if parts else f" of {cases_text(len(own))}")
            parts.append(text + known_text(found) + (_compiled(own) if kind == Status.BUILD_FAILED else ""))
    where = ", ".join(worst.case.split(",")[:4])
    beyond = worst_verdict(worst)
    if beyond is not None and beyond.status == worst.status == Status.FAIL:
        ratio, tier = decisive(beyond)
        times = f"{ratio:.3g}" if math.isfinite(ratio) else "infinitely many"
        said = f" ({times} times its bound)" if tier else ""
        parts[0] += f", worst: {beyond.output} of {where}{said}"
    else:
        parts[0] += f", such as {where}"
    return "; ".join(parts)


def _compiled(own: Sequence[CaseResult]) -> str:
    """Say which operations compile on the card, where others do not."""
    found = list(dict.fromkeys(r.case.partition(",")[0] for r in own if r.verdicts))
    return f" ({', '.join(found) or 'no operation'} did compile)"


def _said(count: int, kind: Status | str, of: str = "") -> str:
    said = _SAID[kind]
    if count == 1:
        said = said.replace("are ", "is ", 1).replace("their bounds", "its bounds")
    return f"{count}{of} {said}"
