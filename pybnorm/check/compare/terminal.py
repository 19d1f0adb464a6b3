"""A comparison in the terminal. Only the command line prints with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pybnorm.check.compare import conclusions
from pybnorm.check.compare.comparison import (
    ACCURACY,
    REFERENCE,
    REFERENCE_ALONE,
    CasePair,
    Change,
    Comparison,
    Outcome,
    Pair,
    bits_text,
    difference_cells,
    lost_text,
    nearer_text,
    output_text,
)
from pybnorm.check.judging.results import cases_text, ratio_text, version_text
from pybnorm.check.report.console import print_points

STYLES = {
    Outcome.REFUSED: "cyan",
    **dict.fromkeys((Outcome.AGREE, Outcome.EQUAL, Outcome.WITHIN), "green"),
    Outcome.UNDECIDED: "magenta",
    **dict.fromkeys((Outcome.DIFFER, Outcome.BEYOND), "bold red"),
}
SHOWN = 20
"""Rows of a list in the terminal, unless all are asked for."""
POINTS = 3
"""Elements of an output, likewise."""


def print_comparison(console: Console, comparison: Comparison, verbose: bool = False) -> None:
    """Print tables, then the findings in sentences; long lists are cut and say so, unless `verbose`."""
    for run in comparison.runs:
        libraries = ", ".join(
            f"{f'{info.label or info.backend} {version_text(info)}'.strip()} on {info.device}"
            for info in run.backends.values()
            if not info.problem
        )
        environment = run.environment
        made = f"pybnorm {environment.get('pybnorm')}, {environment.get('date', '')}, {environment.get('host', '')}"
        console.print(Text.assemble((f"{run.name} = {run.path}: ", "bold"), f"{libraries}; {made}"), soft_wrap=True)
    for notice in comparison.notices:
        console.print(Text(notice, "yellow"))
    for item in comparison.lost:
        console.print(Text(lost_text(item), "bold red"), soft_wrap=True)
    if comparison.pairs:
        _print_pairs(console, comparison)
    for pair in comparison.pairs:
        _print_changes(console, comparison, pair, verbose)
    _print_beyond(console, comparison, verbose)
    _print_alone(console, comparison, verbose)
    for name, lines in comparison.only.items():
        _print_list(console, f"only in {name}: {cases_text(len(lines))}", lines, verbose)
    for found in conclusions.found(comparison):
        console.print(Text(found.sentence, "green" if found.good else "bold red"), soft_wrap=True)


def _print_pairs(console: Console, comparison: Comparison) -> None:
    present = [o for o in Outcome if any(o.value in pair.outcomes for pair in comparison.pairs)]
    words = [Column(name, no_wrap=True) for name in ("first", "second", "kind")]
    table = Table(*words, box=box.SIMPLE_HEAD, title="pairs; ratio is the worst difference / sum of both bounds")
    for name in ("cases", *(o.value for o in present), "ratio", "nearer to the reference", "only first", "only second"):
        table.add_column(name, justify="right")
    for pair in comparison.pairs:
        counts = [Text(str(pair.outcomes.get(o.value, "")), STYLES[o]) for o in present]
        ratio = ratio_text(pair.ratio) if pair.ratio else ""
        only = [str(len(lines) or "") for lines in (pair.only_first, pair.only_second)]
        names = pair.first, pair.second, pair.kind
        table.add_row(*names, str(sum(pair.outcomes.values())), *counts, ratio, nearer_text(pair), *only)
    console.print(table)


def _print_changes(console: Console, comparison: Comparison, pair: Pair, verbose: bool) -> None:
    """The changes between two runs of one backend."""
    if pair.kind == "vendors":
        return
    own = comparison.of(pair)
    if not own:
        return
    title = f"{pair.first} to {pair.second} ({pair.kind})"
    counts = ", ".join(f"{number} {name}" for name, number in pair.changes.items()) or "no case changed"
    if pair.same_bits or pair.other_bits:
        counts += f"; {bits_text(pair)}"
    accuracy = f"nearer to the reference by a factor of {ACCURACY}: {cases_text(pair.better)}, farther: {pair.worse}"
    console.print(Text.assemble((f"{title}: ", "bold"), f"{counts}; {accuracy}"))
    for change in Change:
        changed = [c for c in own if c.change == change]
        if change in (Change.NONE, Change.BITS) and not (verbose and change == Change.BITS):
            continue
        lines = [f"{c.statuses[0].value} -> {c.statuses[1].value} {c.case}{_known(c)}" for c in changed]
        bad = change.regression and not all(c.allowed for c in changed)
        _print_list(console, f"{change.value}: {len(lines)}", lines, verbose, "red" if bad else "")
    moved = [c for c in own if c.change == Change.BITS and _factor(c) > ACCURACY]
    moved.sort(key=_factor, reverse=True)
    lines = [f"{ratio_text(c.ratios[0])} -> {ratio_text(c.ratios[1])} {c.case}" for c in moved]
    _print_list(console, f"bits and worst error / bound changed: {len(lines)}", lines, verbose)


def _factor(case: CasePair) -> float:
    low, high = sorted(case.ratios)
    return high / low if low else math.inf if high else 1.0


def _known(case: CasePair) -> str:
    known = ", ".join(dict.fromkeys(filter(None, case.known)))
    return f" (known defect {known})" if known else ""


def _print_beyond(console: Console, comparison: Comparison, verbose: bool) -> None:
    bad = sorted((c for c in comparison.cases if not c.outcome.good), key=lambda c: c.allowed)
    for case in bad if verbose else bad[:SHOWN]:
        names = (
            f" {case.first} {case.statuses[0].value}, {case.second} {case.statuses[1].value}: {case.case}{_known(case)}"
        )
        style = "yellow" if case.allowed else STYLES[case.outcome]
        console.print(Text.assemble((case.outcome.value, style), ", allowed" if case.allowed else "", names))
        for side, reason in zip((case.first, case.second), case.reasons, strict=True):
            if reason and case.outcome == Outcome.DIFFER:
                console.print(f"  {side}: {reason}", soft_wrap=True)
        for output in case.outputs:
            if not output.outcome.good:
                console.print(f"  {output.output}: {output_text(output)}")
                if output.worst:
                    bound = f"bound ({'+'.join(output.classes)})"
                    titles = ("index", "reference", case.first, case.second, bound, "ratio")
                    print_points(console, titles, map(difference_cells, output.worst[: None if verbose else POINTS]))
    if len(bad) > SHOWN and not verbose:
        console.print(f"and {len(bad) - SHOWN} more; all with -v, --json or --html")


def _print_alone(console: Console, comparison: Comparison, verbose: bool) -> None:
    if not comparison.alone:
        return
    case = Column("CASE", overflow="fold")
    table = Table("alone", "output", "agree with one another", case, box=box.SIMPLE_HEAD, title="who stands alone")
    for item in comparison.alone if verbose else comparison.alone[:SHOWN]:
        groups = " | ".join(", ".join(group) for group in item.groups if item.alone not in group)
        table.add_row(Text(item.alone or "no single one", "bold"), item.output, groups, Text(item.case))
    console.print(table)
    if any(item.alone == REFERENCE for item in comparison.alone):
        console.print(REFERENCE_ALONE)


def _print_list(console: Console, title: str, lines: Sequence[str], verbose: bool, style: str = "") -> None:
    if not lines:
        return
    console.print(Text(f"  {title}", style))
    for line in lines if verbose else lines[:SHOWN]:
        console.print(f"    {line}", soft_wrap=True)
    if len(lines) > SHOWN and not verbose:
        console.print(f"    and {len(lines) - SHOWN} more; all with -v or --json")
