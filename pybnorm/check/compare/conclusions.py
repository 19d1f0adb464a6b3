"""The findings of a comparison: one sentence for each two libraries, and one for each that stands alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from pybnorm.check.compare.comparison import REFERENCE, CasePair, Change, Comparison, Outcome, Pair, lost_text
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import cases_text, version_text


@dataclasses.dataclass(frozen=True)
class Found:
    """One sentence."""

    sentence: str
    good: bool
    """Nothing of it makes the exit status 1."""


def found(comparison: Comparison) -> list[Found]:
    """The sentences: lost cases and libraries that stand alone first, then each pair, those with differences first."""
    names = _names(comparison)
    said = [Found(f"{lost_text(item)}.", False) for item in comparison.lost]
    cases: dict[tuple[str, bool], set[str]] = {}
    for item in comparison.alone:
        cases.setdefault((item.alone, item.known), set()).add(item.case)
    for (alone, known), own in sorted(cases.items(), key=lambda item: (item[0][0] != REFERENCE, -len(item[1]))):
        allowed = known and comparison.allow_known
        by = f", by known defects{', which are allowed' if allowed else ''}" if known else ""
        if alone == REFERENCE:
            text = f"In {cases_text(len(own))} all libraries agree with one another and not with the reference{by}."
        elif alone:
            text = f"{names.get(alone, alone)} stands alone in {cases_text(len(own))}{by}."
        else:
            text = f"In {cases_text(len(own))} no single one stands alone{by}."
        said.append(Found(text, allowed))
    pairs = [_pair(comparison, pair, names) for pair in comparison.pairs]
    return said + sorted(pairs, key=lambda item: item.good)


def _names(comparison: Comparison) -> dict[str, str]:
    """Name each side's library and version; with its run's letter where several have the same."""
    sides = {f"{run.name}:{key}": (run.name, info) for run in comparison.runs for key, info in run.backends.items()}
    plain = {side: f"{i.label or i.backend} {version_text(i)}".strip() for side, (_, i) in sides.items()}
    counts = Counter(plain.values())
    return {side: name + (f" ({sides[side][0]})" if counts[name] > 1 else "") for side, name in plain.items()}


def _pair(comparison: Comparison, pair: Pair, names: dict[str, str]) -> Found:
    own = comparison.of(pair)
    counts = Counter(c.outcome for c in own)
    compared = len(own) - counts[Outcome.REFUSED]
    first, second = names.get(pair.first, pair.first), names.get(pair.second, pair.second)
    name = f"{first} and {second}" if pair.kind == "vendors" else f"{first} to {second}"
    if not own:
        return Found(f"{name}: {'; '.join(['no case in common', *_only(pair, first, second)])}.", True)
    parts = [
        f"{count} of {cases_text(compared)} {one if count == 1 else many} {words}"
        + _known([c for c in own if c.outcome == outcome])
        for outcome, one, many, words in (
            (Outcome.BEYOND, "is", "are", "farther apart than both bounds allow"),
            (Outcome.DIFFER, "is", "are", "correct on one side only"),
            (Outcome.UNDECIDED, "differs", "differ", "where no bound decides"),
        )
        if (count := counts[outcome])
    ]
    changes = Counter(c.change for c in own if c.change != Change.NONE)
    for change in Change:
        if change not in (Change.NONE, Change.BITS) and changes[change]:
            parts.append(f"{changes[change]} {change.value}{_known([c for c in own if c.change == change])}")
    bits = [c for c in own if c.change == Change.BITS]
    if bits:
        beyond = sum(not c.outcome.good for c in bits)
        kept = f"all but {beyond} changes" if beyond else "the change is" if len(bits) == 1 else "all changes are"
        kept = "the change is not" if beyond == len(bits) == 1 else kept
        parts.append(f"bits changed in {cases_text(len(bits))}, {kept} within the sum of both bounds{_wrong(bits)}")
    if not parts and pair.kind != "vendors":
        parts = [f"no change in {cases_text(compared)}{_wrong(own)}"]
    elif not parts and compared:
        parts = [f"{_agreement(counts, compared)}{_wrong(own)}"]
    if counts[Outcome.REFUSED]:
        parts.append(f"{cases_text(counts[Outcome.REFUSED])} refused by {_refuser(own, first, second)}")
    parts += _only(pair, first, second)
    return Found(f"{name}: {'; '.join(parts)}.", all(c.good for c in own))


def _wrong(cases: Sequence[CasePair]) -> str:
    """Count the cases that are wrong on both sides, however near the sides are to one another."""
    count = sum(not any(status.good for status in c.statuses) for c in cases)
    if len(cases) == count == 1:
        return ", but wrong in both"
    return f", {count} of them wrong in both" if count else ""


def _known(cases: Sequence[CasePair]) -> str:
    count = sum(c.by_known_defects for c in cases)
    allowed = ", allowed" if any(c.allowed for c in cases) else ""
    return f" ({count} by known defects{allowed})" if count else ""


def _only(pair: Pair, first: str, second: str) -> list[str]:
    """Name what only one of two libraries has, and so was not compared."""
    sides = ((first, pair.only_first), (second, pair.only_second))
    return [f"{cases_text(len(lines))} only in {side}, not compared" for side, lines in sides if lines]


def _agreement(counts: Counter[Outcome], compared: int) -> str:
    ways = [
        f"{counts[outcome]} {words}"
        for outcome, words in (
            (Outcome.EQUAL, "to the bit"),
            (Outcome.WITHIN, "within the sum of their bounds"),
            (Outcome.AGREE, "in their status"),
        )
        if counts[outcome]
    ]
    if compared == 1:
        return f"the one case agrees, {ways[0].removeprefix('1 ')}"
    return f"all {compared} cases agree, " + ", ".join(ways)


def _refuser(own: Sequence[CasePair], first: str, second: str) -> str:
    sides = {i for c in own if c.outcome == Outcome.REFUSED for i in (0, 1) if c.statuses[i] == Status.UNSUPPORTED}
    return "one or both" if len(sides) > 1 else (first, second)[sides.pop()]
