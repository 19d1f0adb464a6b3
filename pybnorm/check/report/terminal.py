"""A run in the terminal: tables and texts for people. Only the command line and the pytest plugin print with it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pybnorm._text import one_line
from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.judging.results import (
    OUTPUTS,
    BackendInfo,
    CaseResult,
    badness,
    by_label,
    cases_text,
    cell_text,
    groups,
    label,
    plain,
    point_cells,
    point_titles,
    repro,
    verdict_text,
    version_text,
    without_codes,
    worst_verdict,
    worst_verdicts,
)
from pybnorm.check.language import vendor_lines
from pybnorm.check.report.conclusions import by_status, conclusions, known_text
from pybnorm.check.report.console import number, print_points
from pybnorm.check.run.support import NEWLY_UNSUPPORTED, NO_LONGER_REPEATABLE

STYLES = {
    Status.PASS: "green",
    **dict.fromkeys((Status.WARN, Status.CHAIN), "yellow"),
    Status.UNSUPPORTED: "cyan",
    **dict.fromkeys((Status.INCONCLUSIVE, Status.MISTRUSTED), "magenta"),
    **dict.fromkeys((Status.ERROR, Status.RESOURCE, Status.BUILD_FAILED, Status.RAISED), "red"),
    **dict.fromkeys((Status.CRASHED, Status.TIMEOUT, Status.NONDETERMINISTIC, Status.FAIL), "bold red"),
}
MANY = 200
"""With more cases than this the terminal shows groups of them instead of each."""
WIDE = 120
"""Columns from which the numbers of all outputs stand beside a case."""
DETAILS = 50
"""Failures shown with their points if there are many cases."""
WIDTH = 200
"""Columns of output that goes to no terminal: wide enough for every case line."""


def _style(result: CaseResult) -> str:
    return STYLES[Status.WARN if result.allowed else result.status]


def print_backends(console: Console, infos: Iterable[BackendInfo]) -> None:
    """One line per backend: what runs, or why it does not."""
    every = [shown(info) for info in infos]
    for info in every:
        name = label(info, every)
        if info.problem:
            word = f"unusable: {info.label} {version_text(info)}, {info.path}: " if info.loaded else "absent: "
            console.print(Text.assemble((f"{name}: ", "bold"), (word, "yellow"), info.problem), soft_wrap=True)
            if info.override:
                print_attempts(console, info)
        else:
            text = f"{info.label} {version_text(info)}".strip()
            text += f", {info.path} (found via {info.found_via}), on {info.device}"
            text += info.driver and f", {info.driver}"
            text += "".join(one_line(f", {k}={v}") for k, v in info.variables.items()) if name != info.backend else ""
            console.print(Text.assemble((f"{name}: ", "bold"), text), soft_wrap=True)


def shown(info: BackendInfo) -> BackendInfo:
    """`info` with hidden characters written out; rich would drop the carriage return of a path or message."""
    texts: dict[str, Any] = {n: one_line(v) for n, v in vars(info).items() if isinstance(v, str)}
    return dataclasses.replace(info, **texts)


def print_attempts(console: Console, info: BackendInfo, whole: bool = False) -> None:
    """Every file that was tried, and why it could not be used; if `whole`, how to have the library too."""
    for how, file, why in info.attempts:
        console.print(one_line(f"    {how}: {file}: {why}"), soft_wrap=True)
    if whole and info.hint:
        console.print(f"    to have it: {info.hint}", soft_wrap=True)


def print_results(console: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """A table per backend and operation: status, worst error / bound of each output, and the case.

    A letter after a ratio names the class whose bound holds; of a FAIL the loosest, which does not. Of more than
    `MANY` cases only those that are neither PASS nor UNSUPPORTED have a row, unless `verbose`; a table of groups comes
    first.
    """
    many = len(results) > MANY and not verbose
    for backend, own in by_label(results).items():
        for word, titles in OUTPUTS.items():
            rows = [r for r in own if r.case.startswith(word + ",")]
            if not rows:
                continue
            judged = {verdict.output for row in rows for verdict in row.verdicts}
            columns = {name: title for name, title in titles.items() if name in judged or name != "dz"}
            if many:
                _print_groups(console, f"{backend} {word}", rows, columns)
                rows = [r for r in rows if r.status not in (Status.PASS, Status.UNSUPPORTED)]
            if rows:
                _print_rows(console, f"{backend} {word}", rows, columns)
    if many:
        shown = sum(r.status not in (Status.PASS, Status.UNSUPPORTED) for r in results)
        text = f"{len(results)} cases; those that are neither PASS nor UNSUPPORTED ({shown}) have a row, with -v all"
        console.print(text, soft_wrap=True)


def _print_rows(console: Console, title: str, rows: Sequence[CaseResult], columns: Mapping[str, str]) -> None:
    prefix = repro(dataclasses.replace(rows[0], case="", judge="")).removesuffix("''")
    console.print(Text(f"{title}: worst error / bound; to run one again: {prefix}'CASE'", "bold"), soft_wrap=True)
    if console.width < WIDE:
        _print_narrow(console, rows)
        return
    known = any(r.known for r in rows)
    status, repeat = Column("status", no_wrap=True), Column("repeat", no_wrap=True)
    last = [*[Column("known")] * known, Column("CASE", overflow="fold")]
    table = Table(status, *map(number, columns.values()), repeat, *last, box=box.SIMPLE_HEAD)
    for result in rows:
        by_name = {v.output: v for v in result.verdicts}
        cells = [Text(result.status.value, _style(result)), *(_cell(by_name.get(name)) for name in columns)]
        cells += [Text({"": "", "equal": "="}.get(result.repeat, "differs")), *[Text(result.known)] * known]
        table.add_row(*cells, Text(result.case))
    console.print(table)


def _print_narrow(console: Console, rows: Sequence[CaseResult]) -> None:
    """Each case first and in one piece, whatever the width, with its status and worst output behind or below it."""
    for result in rows:
        worst = worst_verdict(result)
        parts = [f"{cell_text(worst)} {worst.output}"] if worst else []
        parts += [f"repeat {'equal' if result.repeat == 'equal' else 'differs'}"] if result.repeat else []
        parts += [f"known: {result.known}"] if result.known else []
        told = Text.assemble("  ", (result.status.value, _style(result)), f" {', '.join(parts)}".rstrip())
        together = len(result.case) + len(told.plain) < console.width
        for line in [Text.assemble(result.case, told)] if together else [Text(result.case), told]:
            console.print(line, soft_wrap=True)
    console.print()


def _print_groups(console: Console, title: str, rows: Sequence[CaseResult], columns: Mapping[str, str]) -> None:
    """Cases of each dtype and layout: how many have which status, and the worst error / bound."""
    console.print(Text(f"{title}: the worst error / bound of each group", "bold"))
    present, narrow = by_status(rows), console.width < WIDE
    numbers = ["cases", *(status.value for status in present), *(["worst"] if narrow else columns.values())]
    words = [Column(name, no_wrap=True) for name in ("mode", "dtype", "layout")]
    table = Table(*words, *map(number, numbers), box=box.SIMPLE_HEAD)
    for group, members in groups(rows).items():
        counts = Counter(r.status for r in members)
        cells: list[Text | str] = [*group, str(len(members)), *(Text(str(counts[s] or ""), STYLES[s]) for s in present)]
        worst, one = worst_verdicts(members), worst_verdict(max(members, key=badness))
        if narrow:
            table.add_row(*cells, f"{cell_text(one)} {one.output}" if one else "")
        else:
            table.add_row(*cells, *(_cell(worst.get(n)) for n in columns))
    console.print(table)


def _cell(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("")
    return Text(cell_text(verdict), "" if verdict.status == Status.PASS else STYLES[verdict.status])


def print_details(console: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """Print the fault of each case that did not pass, and its command; all cases if `verbose`.

    Of a case that fails no run, such as a WARN, points and vendors' lines are shown only if `verbose`.
    """
    few = verbose or len(results) <= MANY
    refusals: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.status == Status.UNSUPPORTED:
            reason = result.message.partition("\n")[0]
            refusals.setdefault(f"{result.backend}: {reason if verbose else plain(reason)}", []).append(result)
    for reason, refused in refusals.items():  # there are few reasons and many cases
        word = (Status.UNSUPPORTED.value, STYLES[Status.UNSUPPORTED])
        count = "" if verbose else f" ({len(refused)} case{'s' * (len(refused) > 1)})"
        console.print(Text.assemble(word, f" {reason}{count}"), soft_wrap=True)
        for result in refused if verbose else ():
            console.print(f"  {repro(result)}", soft_wrap=True)
    detailed = [r for r in results if r.status != Status.UNSUPPORTED and (r.status != Status.PASS or verbose)]
    for result in detailed if few else detailed[:DETAILS]:
        headline = Text.assemble((result.status.value, _style(result)), f" {result.backend} {result.case}")
        console.print(headline, soft_wrap=True)
        if result.known:
            console.print(Text(f"  known defect{', allowed' if result.allowed else ''}: {result.known}", "yellow"))
        if result.claim in (NEWLY_UNSUPPORTED, NO_LONGER_REPEATABLE):
            console.print(Text(f"  support: {result.claim}", "bold red"))
        if result.message:
            message = result.message if verbose else without_codes(result.message)
            console.print(f"  {message}", soft_wrap=True)
        whole = verbose or not result.good
        for verdict in result.verdicts:
            if verdict.status != Status.PASS or verbose:
                console.print(f"  {verdict.output}: {verdict_text(verdict)}", soft_wrap=True)
                if verdict.status != Status.PASS and whole and verdict.worst:
                    print_points(console, point_titles(verdict), map(point_cells, verdict.worst))
        console.print(f"  {repro(result)}", soft_wrap=True)
        for line in vendor_lines.of_case(result.case).values() if whole else ():
            console.print(f"  {line}", soft_wrap=True)
    if not few and len(detailed) > DETAILS:
        console.print(f"and details of {len(detailed) - DETAILS} more cases, all with -v, --json or --html")


def print_totals(console: Console, results: Sequence[CaseResult], seconds: float, notes: Iterable[str] = ()) -> None:
    """Cases of each status, per backend, and what else is to be said of them all."""
    for backend, own in by_label(results).items():
        text = Text.assemble((f"{backend}: ", "bold"), cases_text(len(own)))
        for status, found in by_status(own).items():
            text.append(f", {len(found)} ")
            text.append(status.value, STYLES[status])
            text.append(known_text(found))
        console.print(text)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"{seconds:.1f} s")


def print_conclusions(
    console: Console, infos: Sequence[BackendInfo], results: Sequence[CaseResult], complete: bool = True
) -> None:
    """One sentence per library that says what was found, and how to see the worst case again."""
    for found in conclusions([shown(info) for info in infos], results, complete):
        text = Text(found.sentence, _style(found.worst))
        if not found.worst.good:
            text.append(f" See it again: {repro(found.worst)}", "default")
        console.print(text, soft_wrap=True)
