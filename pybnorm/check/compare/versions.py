"""Runs of several versions of a library side by side: what each gets wrong, and from which version to which."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pybnorm._text import one_line
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import CaseResult, cases_text, cell_text, to_json, version_text, worst_verdict
from pybnorm.check.language.lines import load_suite, packaged_suites
from pybnorm.check.report.conclusions import by_status, known_text
from pybnorm.check.report.markdown import table
from pybnorm.check.run import archive
from pybnorm.errors import ArgumentError

SCHEMA = "pybnorm.versions/1"
_RIGHT = tuple(status for status in Status if status.good)
_COLUMNS = (Status.PASS, Status.WARN, Status.CHAIN, Status.UNSUPPORTED)


@dataclasses.dataclass
class Version:
    """A run of one version."""

    name: str
    machine: str
    results: dict[str, CaseResult]

    @property
    def by_status(self) -> dict[Status, list[CaseResult]]:
        """The cases of each status, from good to bad."""
        return by_status(self.results.values())


@dataclasses.dataclass(frozen=True)
class Share:
    """The cases of a suite on one version."""

    right: int
    judged: int
    """Cases that were not refused."""
    run: int
    cases: int
    """Cases of the suite."""

    def __str__(self) -> str:
        if not self.run:
            return ""
        return f"{self.right}/{self.judged}" + ("" if self.run == self.cases else f", {self.run} of {self.cases} run")


@dataclasses.dataclass
class Line:
    """A case that not every version gets right, or that they get differently."""

    case: str
    results: list[CaseResult]
    first_bad: str
    """The first version that is wrong; empty: none."""
    first_good: str
    """The first after it that is correct; empty: none."""


@dataclasses.dataclass
class Matrix:
    """Every version, every suite, and the cases to tell of."""

    versions: list[Version]
    suites: dict[str, list[Share]]
    """By suite that a version ran as a whole, the share of each version."""
    common: int
    """Cases that all versions ran."""
    left_out: int
    """Of them, those that `without` leaves out."""
    lines: list[Line]


def read(paths: Sequence[str | os.PathLike[str]]) -> list[Version]:
    """The runs at `paths`, folders of ``check --save`` or files of ``check --json``, each of the same one library."""
    versions: list[Version] = []
    backends: list[str] = []
    for path in paths:
        run = archive.read_run(path)
        infos = [info for info in run["backends"] if not info.problem]
        if len(infos) != 1 or (backends and infos[0].backend != backends[0]):
            raise ArgumentError("RUN", str(path), f"a run of one library{''.join(f', {b}' for b in backends[:1])}")
        backends.append(infos[0].backend)
        versions.append(Version(version_text(infos[0]), infos[0].device, {r.case: r for r in run["cases"]}))
    plain = Counter(v.name for v in versions)
    for version, path in zip(versions, paths, strict=True):
        if plain[version.name] > 1:  # another build, machine or setting
            version.name += f" ({one_line(Path(path).stem)})"
    return versions


def matrix(versions: Sequence[Version], without: str = "") -> Matrix:
    """The changes from version to version, the oldest first; without cases whose message has the text `without`."""
    every = sorted(set.intersection(*(set(v.results) for v in versions)))
    common = [c for c in every if not (without and any(without in v.results[c].message for v in versions))]
    lines = []
    for case in common:
        results = [v.results[case] for v in versions]
        statuses = [r.status for r in results]
        if len(set(statuses)) > 1 or statuses[0] not in _RIGHT:
            bad = next((i for i, s in enumerate(statuses) if s not in _RIGHT), len(statuses))
            good = next((i for i, s in enumerate(statuses) if i > bad and s in _RIGHT), len(statuses))
            names = [*(v.name for v in versions), ""]
            lines.append(Line(case, results, names[bad], names[good]))
    suites = {}
    for name in packaged_suites():
        own = {str(problem) for problem in load_suite(name)}
        shares = []
        for version in versions:
            run = [r.status for c, r in version.results.items() if c in own]
            statuses = [s for s in run if s != Status.UNSUPPORTED]
            shares.append(Share(sum(s in _RIGHT for s in statuses), len(statuses), len(run), len(own)))
        if any(share.run == share.cases for share in shares):
            suites[name] = shares
    return Matrix(list(versions), suites, len(every), len(every) - len(common), lines)


def worst(result: CaseResult) -> str:
    """The status, where it was judged the error / bound that made it, and the known defects that explain it."""
    one = worst_verdict(result) if result.status.correct or result.status == Status.FAIL else None
    parts = [result.status.value, *([cell_text(one)] if one is not None else [])]
    return " ".join([*parts, *([f"({one_line(result.known)})"] if result.known else [])])


def sentences(found: Matrix) -> list[tuple[str, bool]]:
    """One for each version: how many cases are wrong, and what changed from the one before; whether all is correct."""
    said = []
    for i, version in enumerate(found.versions):
        wrong = [line for line in found.lines if line.results[i].status not in _RIGHT]
        of = f"of {cases_text(found.common - found.left_out)}"
        text = f"{version.name}: {len(wrong) or 'none'} {of} {'are' if len(wrong) > 1 else 'is'} wrong"
        known = sorted({line.results[i].known for line in wrong if line.results[i].known})
        explained = sum(bool(line.results[i].known) for line in wrong)
        text += f" ({explained} by known defects: {one_line(', '.join(known))})" if known else ""
        if i:
            new = sum(line.results[i - 1].status in _RIGHT for line in wrong)
            gone = sum(line.results[i - 1].status not in _RIGHT for line in found.lines) - (len(wrong) - new)
            other = sum(line.results[i - 1].status != line.results[i].status for line in found.lines) - new - gone
            parts = [f"{new} newly" if new else "", f"{gone} no longer" if gone else ""]
            parts += [f"{other} with another status" if other else ""]
            text += f"; {', '.join(filter(None, parts)) or 'no change'}"
        said.append((f"{text}.", not wrong))
    return said


def _told(found: Matrix) -> str:
    out = f"{cases_text(found.left_out)} {'is' if found.left_out == 1 else 'are'} left out. " if found.left_out else ""
    return out + f"{cases_text(found.common - found.left_out)} ran on all."


def markdown(found: Matrix) -> str:
    """Tables of the versions, of the suites, and of the cases that are not correct on all, or differ."""
    return "\n".join(_lines(found))


def _lines(found: Matrix) -> Iterator[str]:
    names = [v.name for v in found.versions]
    yield from (f"- {sentence}" for sentence, _ in sentences(found))
    yield ""
    rows = []
    for version in found.versions:
        own = version.by_status
        others = (f"{len(found)} {s.value}{known_text(found)}" for s, found in own.items() if s not in _COLUMNS)
        row = [version.name, version.machine, str(len(version.results)), *(str(len(own.get(s, ()))) for s in _COLUMNS)]
        rows.append([*row, ", ".join(others) or "0"])
    yield from table(["version", "machine", "cases", *(s.value for s in _COLUMNS), "others"], rows)
    if found.suites:
        yield from ("Correct cases, of those that were not refused, by suite:", "")
        yield from table(["suite", *names], ([name, *map(str, own)] for name, own in found.suites.items()))
    if not found.lines:
        yield from (f"{_told(found)} No change: every case is correct on all.", "")
        return
    yield f"{_told(found)} Cases that are wrong on a version, or have another status, with the worst error / bound:"
    yield ""
    lines = (
        [f"`{line.case}`", *map(worst, line.results), line.first_bad or "-", line.first_good or "-"]
        for line in found.lines
    )
    yield from table(["case", *names, "first bad", "first good after it"], lines)


def document(found: Matrix) -> dict[str, Any]:
    """Give it as plain values."""
    return {
        "versions": [
            {"version": v.name, "machine": v.machine, "counts": {s.value: len(own) for s, own in v.by_status.items()}}
            for v in found.versions
        ],
        "suites": {name: [vars(share) for share in shares] for name, shares in found.suites.items()},
        "common": found.common,
        "left_out": found.left_out,
        "cases": [
            {
                "case": line.case,
                "results": [
                    {"status": r.status.value, "ratio": to_json(r.ratio), "known": r.known} for r in line.results
                ],
                "first_bad": line.first_bad,
                "first_good": line.first_good,
            }
            for line in found.lines
        ],
    }
