"""A run as Markdown, for the summary of a CI job or a ticket, and as annotations that CI services show beside a build.

Both begin with what was found: one sentence per library. What is wrong follows, the worst first, each with the command
that shows it again; refusals are counted by their reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from pybnorm._text import one_line, write_visible
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import (
    BackendInfo,
    CaseResult,
    badness,
    by_label,
    cases_text,
    cell_text,
    library_text,
    not_run,
    repro,
)
from pybnorm.check.report.conclusions import by_status, conclusions, known_text
from pybnorm.defects import unrecorded

FAILURES = 20
"""Cases that are listed with their commands."""
_ANNOTATIONS = 10
"""Annotations that the service shows of one step."""


def write(
    target: str | IO[str], backends: Sequence[BackendInfo], results: Sequence[CaseResult], complete: bool = True
) -> None:
    """Write the run, which came to its end if `complete`."""
    write_visible(target, "\n".join(_lines(backends, results, complete)) + "\n")


def _lines(backends: Sequence[BackendInfo], results: Sequence[CaseResult], complete: bool) -> Iterator[str]:
    yield "# pybnorm check"
    yield ""
    for found in conclusions(backends, results, complete):
        worst = found.worst
        word = "known defects, allowed" if worst.allowed else "right" if worst.good else worst.status.value
        yield f"- **{word}**: {_plain(found.sentence)}"
    for info in backends:
        if info.problem:
            yield f"- {info.backend} did not run: {_plain(info.problem)}"
    if text := not_run(results):
        yield f"- **{text}**"
    yield ""
    present = by_status(results)
    libraries = {name: by_status(own) for name, own in by_label(results).items()}
    counts = (
        [name, *(f"{len(found)}{known_text(found)}" for found in (own.get(status, []) for status in present))]
        for name, own in libraries.items()
    )
    yield from table(("library", *(s.value for s in present)), counts)
    yield from _failures("What is wrong", _worst_first(r for r in results if not r.good))
    yield from _failures("Known defects, allowed", _worst_first(r for r in results if r.allowed))
    refused = Counter((r.backend, _first(r)) for r in results if r.status == Status.UNSUPPORTED)
    if refused:
        yield f"## Not supported: {cases_text(sum(refused.values()))}"
        yield ""
        reasons = ((backend, str(count), _plain(reason)) for (backend, reason), count in refused.most_common())
        yield from table(("library", "cases", "reason"), reasons)
    yield "## Libraries"
    yield ""
    for info in backends:
        if not info.problem:
            yield f"- {info.backend}: {_plain(library_text(info))}"
            if unseen := unrecorded(info.backend, info.version, info.digest):
                yield f"  - {_plain(unseen)}"


def _failures(title: str, bad: Sequence[CaseResult]) -> Iterator[str]:
    if not bad:
        return
    yield f"## {title}: {cases_text(len(bad))}"
    yield ""
    rows = (
        (r.status.value, _code(r.case), _worst(r), r.known or _plain(_first(r)), _code(repro(r)))
        for r in bad[:FAILURES]
    )
    yield from table(("status", "case", "worst error / bound", "why", "to see it again"), rows)
    if len(bad) > FAILURES:
        yield f"and {len(bad) - FAILURES} more."
        yield ""


def ci_annotations(results: Sequence[CaseResult]) -> list[str]:
    """Commands of GitHub's runner: an ``::error`` for each case that is wrong, a ``::notice`` for each allowed defect.

    The worst come first, ten of each kind at most; then a count.
    """
    lines = []
    kinds = (("error", "are wrong", [r for r in results if not r.good]),
             ("notice", "are known defects, allowed", [r for r in results if r.allowed]))  # fmt: skip
    for command, said, found in kinds:
        lines += [
            f"::{command} title={_escaped(f'{r.backend}: {r.status.value}', ',:')}::"
            + _escaped("\n".join([r.case, f"known defect {r.known}" if r.known else _first(r), _worst(r), repro(r)]))
            for r in _worst_first(found)[:_ANNOTATIONS]
        ]
        if len(found) > _ANNOTATIONS:
            lines.append(f"::notice::{len(found) - _ANNOTATIONS} more cases {said}; the report has all")
    return lines


def _worst_first(results: Iterable[CaseResult]) -> list[CaseResult]:
    return sorted(results, key=lambda r: (r.status.severity, not r.known, badness(r)), reverse=True)


def _first(result: CaseResult) -> str:
    return result.message.partition("\n")[0]


def _worst(result: CaseResult) -> str:
    return ", ".join(f"{v.output} {cell_text(v)}" for v in result.verdicts if not v.status.good)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table, and an empty line."""
    yield f"| {' | '.join(titles)} |"
    yield "|" + " --- |" * len(titles)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def _plain(text: str) -> str:
    """Text of a library or a user that neither formats nor links anything."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#" else c for c in one_line(text))


def _code(text: str) -> str:
    return f"`{one_line(text).replace('`', chr(39))}`"


def _escaped(text: str, more: str = "") -> str:
    """Escape as the runner reads it: percent, line ends and, in properties, `more` become hexadecimal."""
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)
