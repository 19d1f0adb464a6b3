"""A run in the terminal: tables and texts for people. Only the command line and the pytest plugin print with it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pybnorm._text import one_line
from pybnorm.check import vendor_lines
from pybnorm.check.bounds import Status, Verdict
from pybnorm.check.results import (
    OUTPUTS,
    BackendInfo,
    CaseResult,
    by_label,
    groups,
    label,
    ratio_text,
    repro,
    verdict_text,
    version_text,
    worst_ratios,
)
from pybnorm.check.support import NEWLY_UNSUPPORTED, NO_LONGER_REPEATABLE

__all__ = [
    "WIDTH",
    "print_attempts",
    "print_backends",
    "print_conclusions",
    "print_details",
    "print_results",
    "print_totals",
    "shown",
]

STYLES = {
    Status.PASS: "green",
    Status.WARN: "yellow",
    Status.UNSUPPORTED: "cyan",
    Status.INCONCLUSIVE: "magenta",
    Status.MISTRUSTED: "magenta",
    Status.ERROR: "red",
    Status.RESOURCE: "red",
    Status.BUILD_FAILED: "red",
    Status.RAISED: "red",
    Status.CRASHED: "bold red",
    Status.TIMEOUT: "bold red",
    Status.NONDETERMINISTIC: "bold red",
    Status.FAIL: "bold red",
}
SAID: dict[Status | str, str] = {
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
MANY = 200
"""With more cases than this the terminal shows groups of them instead of each."""
DETAILS = 50
"""Failures shown with their points if there are many cases."""
WIDTH = 200
"""Columns of output that goes to no terminal: wide enough for every case line."""
REFUSALS = 3
"""Cases shown for each reason of a refusal if there are many cases."""


def print_backends(console: Console, infos: Iterable[BackendInfo]) -> None:
    """One line per backend: what runs, or why it does not."""
    every = [shown(info) for info in infos]
    for info in every:
        name = label(info, every)
        if info.problem:
            word = f"unusable: {info.label} {version_text(info)}, {info.path}: " if info.loaded else "absent: "
            console.print(Text.assemble((f"{name}: ", "bold"), (word, "yellow"), info.problem))
            if info.override:
                print_attempts(console, info)
        else:
            text = f"{info.label} {version_text(info)}, {info.path} (found via {info.found_via}), on {info.device}"
            text += info.driver and f", {info.driver}"
            text += "".join(one_line(f", {k}={v}") for k, v in info.variables.items()) if name != info.backend else ""
            console.print(Text.assemble((f"{name}: ", "bold"), text))


def shown(info: BackendInfo) -> BackendInfo:
    """`info` with hidden characters written out; rich would drop the carriage return of a path or message."""
    texts: dict[str, Any] = {n: one_line(v) for n, v in vars(info).items() if isinstance(v, str)}
    return dataclasses.replace(info, **texts)


def print_attempts(console: Console, info: BackendInfo) -> None:
    """Every file that was tried, and why it could not be used."""
    for how, file, why in info.attempts:
        console.print(one_line(f"    {how}: {file}: {why}"), soft_wrap=True, markup=False)


def print_results(console: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """A table per backend and operation: status, worst error / bound of each output, and the case.

    A letter after a ratio above 1 names the class whose bound holds. Of more than `MANY` cases only those that are
    neither PASS nor UNSUPPORTED have a row, unless `verbose`; a table of groups comes first.
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
        console.print(f"{len(results)} cases; PASS and UNSUPPORTED have no row, all have one with -v", highlight=False)


def _print_rows(console: Console, title: str, rows: Sequence[CaseResult], columns: Mapping[str, str]) -> None:
    prefix = repro(rows[0]).removesuffix(f"'{rows[0].case}'")
    console.print(Text(f"{title}: worst error / bound; to run one again: {prefix}'CASE'", "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("status", no_wrap=True)
    for name in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("repeat", no_wrap=True)
    known = any(r.known for r in rows)
    if known:
        table.add_column("known")
    table.add_column("CASE", overflow="fold")
    for result in rows:
        by_name = {v.output: v for v in result.verdicts}
        cells: list[Text | str] = [_cell(by_name.get(name)) for name in columns]
        cells.append("" if not result.repeat else "=" if result.repeat == "equal" else "differs")
        if known:
            cells.append(Text(result.known))
        table.add_row(Text(result.status.value, STYLES[result.status]), *cells, Text(result.case))
    console.print(table)


def _print_groups(console: Console, title: str, rows: Sequence[CaseResult], columns: Mapping[str, str]) -> None:
    """Cases of each dtype and layout: how many have which status, and the worst error / bound."""
    console.print(Text(f"{title}: worst error / bound of each group, inf left out", "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("mode", "dtype", "layout"):
        table.add_column(name, no_wrap=True)
    table.add_column("cases", justify="right", no_wrap=True)
    present = [status for status in Status if any(r.status == status for r in rows)]
    for status in present:
        table.add_column(status.value, justify="right", no_wrap=True)
    for name in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    for group, members in groups(rows).items():
        counts = Counter(r.status for r in members)
        cells = [Text(str(counts[s] or ""), STYLES[s]) for s in present]
        worst = worst_ratios(members)
        table.add_row(*group, str(len(members)), *cells, *(ratio_text(worst[n]) if n in worst else "" for n in columns))
    console.print(table)


def _cell(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("")
    text = ratio_text(verdict.ratio)
    if verdict.status in (Status.PASS, Status.WARN) and verdict.tier != next(iter(verdict.ratios)):
        text += verdict.tier
    return Text(text, "" if verdict.status == Status.PASS else STYLES[verdict.status])


def print_details(console: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """What is wrong with each case that did not pass, and its repro line; of all cases if `verbose`."""
    refusals: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.status == Status.UNSUPPORTED:
            reason = result.message.partition("\n")[0]
            refusals.setdefault(f"{result.backend}: {reason}", []).append(result)
    few = verbose or len(results) <= MANY
    shown = None if few else REFUSALS
    for reason, refused in refusals.items():  # there are few reasons and many cases
        console.print(Text.assemble((Status.UNSUPPORTED.value, STYLES[Status.UNSUPPORTED]), f" {reason}"))
        for result in refused[:shown]:
            console.print(f"  {repro(result)}", markup=False, highlight=False, soft_wrap=True)
        if shown and len(refused) > shown:
            console.print(f"  and {len(refused) - shown} more cases", highlight=False)
    detailed = [r for r in results if r.status != Status.UNSUPPORTED and (r.status != Status.PASS or verbose)]
    for result in detailed if few else detailed[:DETAILS]:
        console.print(Text.assemble((result.status.value, STYLES[result.status]), f" {result.backend} {result.case}"))
        if result.known:
            console.print(Text(f"  known defect: {result.known}", "yellow"))
        if result.claim in (NEWLY_UNSUPPORTED, NO_LONGER_REPEATABLE):
            console.print(Text(f"  support: {result.claim}", "bold red"))
        if result.message:
            console.print(f"  {result.message}", markup=False, highlight=False)
        for verdict in result.verdicts:
            if verdict.status != Status.PASS or verbose:
                _print_verdict(console, verdict)
        console.print(f"  {repro(result)}", markup=False, highlight=False, soft_wrap=True)
        for line in vendor_lines.of_case(result.case).values():
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if not few and len(detailed) > DETAILS:
        console.print(f"and details of {len(detailed) - DETAILS} more cases, all with -v, --json or --html")


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print(f"  {verdict.output}: {verdict_text(verdict)}", markup=False, highlight=False)
    if verdict.status == Status.PASS or not verdict.worst:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for title in ("index", "reference", "got", f"bound ({verdict.tier})", "error / bound"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in verdict.worst:
        numbers = (f"{point.reference:.9g}", f"{point.got:.9g}", f"{point.bound:.3g}", ratio_text(point.ratio))
        table.add_row(",".join(map(str, point.index)), *numbers)
    console.print(table)


def print_totals(console: Console, results: Sequence[CaseResult], seconds: float) -> None:
    """Cases of each status, per backend."""
    for backend, own in by_label(results).items():
        counts = Counter(r.status for r in own)
        text = Text.assemble((f"{backend}: ", "bold"), f"{len(own)} cases")
        for status in Status:
            if counts[status]:
                text.append(f", {counts[status]} ")
                text.append(status.value, STYLES[status])
                known = sum(bool(r.known) for r in own if r.status == status)
                if known:
                    text.append(f" ({known} known)")
        console.print(text)
    console.print(f"{seconds:.1f} s", highlight=False)


def print_conclusions(
    console: Console, infos: Sequence[BackendInfo], results: Sequence[CaseResult], complete: bool = True
) -> None:
    """One sentence per library that says what was found, and how to see the worst case again."""
    every = [shown(info) for info in infos]
    names = {label(info, every): f"{info.label} {version_text(info)}".strip() for info in every}
    for library, own in by_label(results).items():
        name = names.get(library) or library
        if "@" in library and library in names:
            name += f" ({library})"
        worst = max(own, key=lambda r: (r.status != Status.UNSUPPORTED, r.status.severity, r.ratio))
        text = Text(f"{name}: {'' if complete else 'so far, '}{_conclusion(own, worst)}.", STYLES[worst.status])
        if not worst.status.good:
            text.append(f" See it again: {repro(worst)}", "default")
        console.print(text, soft_wrap=True)


def _conclusion(own: Sequence[CaseResult], worst: CaseResult) -> str:
    kinds: dict[Status | str, list[CaseResult]] = {}
    for result in own:
        kinds.setdefault(result.claim if result.claim == NEWLY_UNSUPPORTED else result.status, []).append(result)
    refused, loose = len(kinds.get(Status.UNSUPPORTED, ())), len(kinds.get(Status.WARN, ()))
    if refused == len(own):
        return f"none of {_cases(refused)} is supported"
    if worst.status.good:
        parts = [f"all {_cases(len(own) - refused, 'supported ')} are within their bounds"]
        if len(own) - refused == 1:
            parts = ["the one supported case is within its bounds"]
        parts[0] += f", {loose} only within a looser one (WARN)" if loose else ""
        parts += [_said(refused, Status.UNSUPPORTED)] if refused else []
        return "; ".join(parts)
    parts = []
    for kind in SAID:
        if found := kinds.get(kind, []):
            known = sum(bool(r.known) for r in found)
            text = _said(len(found), kind, "" if parts else f" of {_cases(len(own))}")
            parts.append(text + (f" ({known} by known defects)" if known else ""))
    where = ", ".join(worst.case.split(",")[:4])
    beyond = max((v for v in worst.verdicts if v.status == Status.FAIL), key=lambda v: v.ratio, default=None)
    if beyond:
        times = f"{beyond.ratio:.3g}" if math.isfinite(beyond.ratio) else "infinitely many"
        parts[0] += f", worst: {beyond.output} of {where} ({times} times its bound)"
    else:
        parts[0] += f", such as {where}"
    return "; ".join(parts)


def _cases(count: int, kind: str = "") -> str:
    return f"{count} {kind}case{'' if count == 1 else 's'}"


def _said(count: int, kind: Status | str, of: str = "") -> str:
    said = SAID[kind]
    if count == 1:
        said = said.replace("are ", "is ", 1).replace("their bounds", "its bounds")
    return f"{count}{of} {said}"
