"""Comparisons of runs, and versions side by side, as HTML pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO

from pybnorm._text import write_visible
from pybnorm.check.compare import comparison as compare
from pybnorm.check.compare import conclusions, versions
from pybnorm.check.judging.bounds import Status
from pybnorm.check.report import page_data, plots
from pybnorm.check.report.html import DETAILS, LISTED, ROWS, UNJUDGED, render
from pybnorm.check.report.page_data import Block, Column
from pybnorm.check.report.plots import operation
from pybnorm.check.run.environment import machine


def write_comparison(target: str | os.PathLike[str] | IO[str], comparison: compare.Comparison) -> None:
    """Write the page of a comparison."""
    cases = comparison.cases
    bad = sorted((c for c in cases if not c.outcome.good), key=lambda c: (c.allowed, -c.outcome.severity))
    listed = cases if len(cases) <= ROWS else [c for c in cases if c.outcome != compare.Outcome.EQUAL]
    changes = []
    for pair in comparison.pairs:
        if pair.kind != "vendors":
            order = list(compare.Change)
            changed = sorted(
                (c for c in comparison.of(pair) if c.change != compare.Change.NONE), key=lambda c: order.index(c.change)
            )
            changes.append({"pair": pair, "cases": changed[:LISTED], "left_out": max(0, len(changed) - LISTED)})
    panels: dict[str, list[plots.Point]] = {}
    for i, case in enumerate(listed):
        points = [(o.output, o.ratio, o.outcome.value, i) for o in case.outputs if o.different]
        panels.setdefault(f"{case.first} and {case.second}", []).extend(points)
    panels = {title: points for title, points in panels.items() if points}
    text = render(
        "compare.html",
        comparison=comparison,
        found=conclusions.found(comparison),
        date=machine()["date"],
        compare=compare,
        outcomes=[o.value for o in compare.Outcome if any(c.outcome == o for c in cases)],
        changes=changes,
        limit=LISTED,
        details=min(len(bad), DETAILS),
        left_out=max(0, len(bad) - DETAILS),
        has_outputs=bool(panels),
        strips=plots.strips(panels) if panels else "",
        equal_left_out=len(cases) - len(listed),
        judged=[s.value for s in Status if s not in UNJUDGED],
        data=_case_pairs(listed, bad[:DETAILS]),
    )
    write_visible(target, text)


def _case_pairs(listed: Sequence[compare.CasePair], shown: Sequence[compare.CasePair]) -> str:
    """The table of cases of a comparison."""
    statuses = [s.value for s in Status]
    outcomes = [o.value for o in compare.Outcome]
    columns = [
        Column("outcome", "badge", [c.outcome.value for c in listed], outcomes),
        Column("first", "pick", [c.first for c in listed]),
        Column("status of the first", "pick", [c.statuses[0].value for c in listed], statuses),
        Column("second", "pick", [c.second for c in listed]),
        Column("status of the second", "pick", [c.statuses[1].value for c in listed], statuses),
        Column("change", "pick", [c.change.value for c in listed]),
        Column("operation", "hidden", [operation(c.case) for c in listed]),
        Column("difference / bound", "ratio", [max(o.ratio for o in c.outputs) if c.outputs else "" for c in listed]),
        Column("case", "case", [c.case for c in listed]),
    ]
    rows = {id(c): i for i, c in enumerate(listed)}
    return page_data.script(columns, details={rows[id(c)]: _difference(c) for c in shown})


def _difference(case: compare.CasePair) -> list[Block]:
    """The details of one case of a comparison, shown below its row."""
    word = "known defect, allowed:" if case.allowed else "known defect"
    blocks: list[Block] = [("p", f"{word} {known}") for known in dict.fromkeys(case.known) if known]
    blocks += [("p", reason) for reason in case.reasons if reason]
    for output in case.outputs:
        if not output.outcome.good:
            blocks.append(("p", f"{output.output}: {compare.output_text(output)}"))
            bound = f"bound ({'+'.join(output.classes)})"
            titles = ["index", "reference", case.first, case.second, bound, "difference / bound"]
            points = [compare.difference_cells(p) for p in output.worst]
            blocks.append(("table", f"the worst elements of {output.output}", titles, points))
    return blocks


def write_versions(target: str | os.PathLike[str] | IO[str], found: versions.Matrix) -> None:
    """Write the page of versions side by side."""
    lines, statuses = found.lines, [s.value for s in Status]
    columns = [Column("case", "case", [line.case for line in lines])]
    for i, version in enumerate(found.versions):
        columns.append(Column(version.name, "badge", [line.results[i].status.value for line in lines], statuses))
        judged = [line.results[i].ratio if line.results[i].verdicts else "" for line in lines]
        columns.append(Column(f"{version.name} error / bound", "ratio", judged))
    columns.append(Column("first bad", "word", [line.first_bad for line in lines]))
    columns.append(Column("first good after it", "word", [line.first_good for line in lines]))
    text = render(
        "versions.html",
        found=found,
        sentences=versions.sentences(found),
        date=machine()["date"],
        data=page_data.script(columns),
    )
    write_visible(target, text)
