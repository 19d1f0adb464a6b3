"""A run as one HTML page with style, script and plots in it: it loads no other file."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import IO, Any

from pybnorm._text import write_visible
from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.judging.results import (
    NO_VERDICT,
    TITLES,
    BackendInfo,
    CaseResult,
    LostNode,
    badness,
    by_label,
    cases_text,
    cell_text,
    decisive,
    groups,
    host_digest,
    label,
    labels,
    lost_text,
    not_run,
    place,
    plain,
    point_cells,
    point_titles,
    ratio_text,
    repro,
    verdict_text,
    version_text,
    worst_verdict,
)
from pybnorm.check.language import vendor_lines
from pybnorm.check.report import page_data, plots
from pybnorm.check.report.conclusions import by_status, conclusions, known_text
from pybnorm.check.report.page_data import Block, Column
from pybnorm.check.report.patterns import causes
from pybnorm.check.report.plots import operation
from pybnorm.check.run.support import NEWLY_UNSUPPORTED
from pybnorm.defects import DEFECTS, unrecorded
from pybnorm.errors import ArgumentError

DETAILS = 100
"""Cases of which a page has the points; a page of thousands of failures would not open."""
ROWS = 20_000
"""Rows of a comparison above which equal cases have none."""
LISTED = 500
"""Rows of a list of what changed, or of who stands alone."""
UNJUDGED = (Status.UNSUPPORTED, *NO_VERDICT)
_PICTURE = (
    "the error by channel, from the top, and position, from the left; darker is more times the bound, black not finite"
)


def require() -> None:
    """Raise an ArgumentError that names what to install if the page cannot be made."""
    for name in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ArgumentError(
                "--html", f"a Python without {name}", f"one with both: pip install matplotlib jinja2 ({error})"
            ) from None


def write(
    target: str | os.PathLike[str] | IO[str],
    environment: dict[str, Any],
    backends: Sequence[BackendInfo],
    results: Sequence[CaseResult],
    lost: Sequence[LostNode] = (),
    complete: bool = True,
) -> None:
    """Write the page of a run; `environment` is `pybnorm.check.run.environment.machine`, `lost` are nodes taken out."""
    # from here on `backend` names a library; the backend alone does if all nodes had the same one
    plainly = results
    results = [
        r if name == r.backend else dataclasses.replace(r, backend=name)
        for name, r in zip(labels(plainly), plainly, strict=True)
    ]
    names = list(dict.fromkeys(r.backend for r in results))
    numbers = {id(r): i for i, r in enumerate(plainly)}
    found = causes(plainly)
    bad = [i for i, r in enumerate(results) if r.status not in (Status.PASS, Status.UNSUPPORTED)]
    bad.sort(key=lambda i: (-results[i].status.severity, i))
    # of each cause the case to look at first, then the others
    shown = list(dict.fromkeys([*(numbers[id(cause.cases[0])] for cause in found), *bad]))[:DETAILS]
    layouts = sorted({r.case.split(",")[3].partition("=")[0] for r in results}, key=place)
    refused = Counter((r.backend, _note(r)) for r in results if r.status == Status.UNSUPPORTED)
    ratios: dict[str, list[plots.Point]] = {name: [] for name in names}
    for i, r in enumerate(results):
        ratios[r.backend] += [(v.output, v.ratio, v.status.value, i) for v in r.verdicts]
    text = render(
        "report.html",
        environment=environment,
        backends=[(label(info, backends), info) for info in backends],
        conclusions=[(c, "" if c.worst.good else repro(c.worst)) for c in conclusions(backends, plainly, complete)],
        lost=[lost_text(dataclasses.replace(n, host=n.host and host_digest(n.host))) for n in lost],
        not_run=not_run(results),
        results=results,
        libraries=by_label(plainly),
        causes=[
            {
                "cause": cause,
                "number": numbers[id(cause.cases[0])],
                "repro": repro(cause.cases[0]),
                "vendors": vendor_lines.of_case(cause.cases[0].case),
                "ratio": _times(cause.cases),
                "name": f"{number} {cause.text}",
            }
            for number, cause in enumerate(found, 1)
        ],
        refusals=[(*key, count) for key, count in refused.most_common()],
        layouts=layouts,
        groups=_groups(results, [(name, layout) for name in names for layout in layouts]),
        heat_map=plots.heat_map(results, names) if results else "",
        strips=plots.strips({name: points for name, points in ratios.items() if points}) if results else "",
        known=Counter(w for r in results for w in re.split(r",\s*", r.known) if w).most_common(),
        recorded={defect.id: defect for defect in DEFECTS},
        left_out=len(bad) - sum(results[i].status != Status.UNSUPPORTED for i in shown),
        details=len(shown),
        data=_cases(results, plainly, found, shown),
    )
    write_visible(target, text)


def _cases(
    results: Sequence[CaseResult], plainly: Sequence[CaseResult], found: Sequence[Any], shown: Sequence[int]
) -> str:
    """The table of cases."""
    outputs = [n for n in TITLES if any(v.output == n for r in results for v in r.verdicts)]
    cause = {id(r): f"{number} {c.text}" for number, c in enumerate(found, 1) for r in c.cases}
    columns = [
        Column("status", "badge", [r.status.value for r in results], [s.value for s in Status]),
        Column("library", "pick", [r.backend for r in results]),
        Column("operation", "hidden", [operation(r.case) for r in results]),
        Column("cause", "hidden", [cause.get(id(r), "") for r in plainly], list(dict.fromkeys(cause.values()))),
        Column("note", "note", [_note(r) for r in results]),
        Column("case", "case", [r.case for r in results]),
    ]
    verdicts = [{v.output: v for v in r.verdicts} for r in results]
    columns += [Column(TITLES[n], "ratio", [_cell(own.get(n)) for own in verdicts]) for n in outputs]
    columns.append(Column("repeat", "pick", [{"": "", "equal": "="}.get(r.repeat, "differs") for r in results]))
    commands = {
        r.backend: repro(dataclasses.replace(p, case="CASE", judge="")) for r, p in zip(results, plainly, strict=True)
    }
    return page_data.script(columns, commands, {i: _details(results[i]) for i in shown})


def _cell(verdict: Verdict | None) -> Any:
    if verdict is None:
        return ""
    noticed = verdict.noticed if verdict.status == Status.PASS else 0
    ratio = decisive(verdict)[0] or verdict.ratio
    return (ratio, noticed) if noticed else ratio


def _times(cases: Sequence[CaseResult]) -> str:
    """The largest of the ratios that made the status of the cases, such as "3.67 times the bound"."""
    worst = worst_verdict(max(cases, key=badness))
    ratio = decisive(worst)[0] if worst is not None and worst.status == cases[0].status else 0.0
    return f"{ratio_text(ratio)} times the bound" if ratio > 1 else ""


def _note(result: CaseResult) -> str:
    if result.status == Status.UNSUPPORTED:
        return plain(result.message.partition("\n")[0])
    return f"known defect{', allowed' if result.allowed else ''} {result.known}" if result.known else ""


def _details(result: CaseResult) -> list[Block]:
    """The details of one case, shown below its row."""
    blocks: list[Block] = [("p", text) for text in (result.claim,) if text == NEWLY_UNSUPPORTED]
    if result.judge not in ("", "numpy"):
        blocks.append(("p", f"judged by {result.judge}: --judge {result.judge}"))
    if result.message:
        blocks.append(("pre", result.message))
    if result.repeat not in ("", "equal"):
        blocks.append(("p", f"other bits in equal calls: {result.repeat}"))
    for tool, line in vendor_lines.of_case(result.case).items():
        blocks += [("p", f"with {tool}:"), ("pre", line)]
    for verdict in result.verdicts:
        if verdict.status != Status.PASS:
            blocks.append(("p", f"{verdict.output}: {verdict_text(verdict)}"))
            if verdict.worst:
                points = [point_cells(p) for p in verdict.worst]
                blocks.append(("table", f"the worst elements of {verdict.output}", point_titles(verdict), points))
            if verdict.picture:
                blocks.append(("picture", f"{verdict.output}: {_PICTURE}", verdict.picture))
    return blocks


@functools.cache
def _templates() -> Any:
    """The templates of this package, each compiled once."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("pybnorm.check.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(template: str, **values: Any) -> str:
    """A page from a template of this package."""
    from markupsafe import Markup, escape

    values |= {name: Markup(values[name]) for name in ("heat_map", "strips", "data") if name in values}
    words: dict[str, Any] = {
        f.__name__: f for f in (ratio_text, version_text, unrecorded, cases_text, by_status, known_text)
    }
    words["breakable"] = lambda case: escape(case).replace(",", Markup(",<wbr>"))  # a line may end behind each word
    return _templates().get_template(template).render(colours=plots.COLOURS, **words, **values)


def _groups(results: Sequence[CaseResult], columns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of the table of groups: operation, mode and dtype, and a cell for each backend and layout."""
    rows = []
    for word in dict.fromkeys(operation(r.case) for r in results):
        by_group = groups(r for r in results if operation(r.case) == word)
        for mode, dtype in dict.fromkeys(group[:2] for group in by_group):
            cells = []
            for backend, layout in columns:
                some = [r for r in by_group.get((mode, dtype, layout), ()) if r.backend == backend]
                cells.append(_group_cell(some) if some else None)
            rows.append({"name": (word, mode, dtype), "cells": cells})
    return rows


def _group_cell(results: Sequence[CaseResult]) -> dict[str, Any]:
    refused = [r for r in results if r.status == Status.UNSUPPORTED]
    judged = [r for r in results if r.status not in (Status.UNSUPPORTED, Status.ERROR)]
    worst = max((r.status for r in results), key=lambda s: s.severity if s != Status.UNSUPPORTED else -1)
    right = sum(r.status.correct for r in judged)
    one = worst_verdict(max(judged, key=badness)) if judged else None
    return {
        "status": worst.value,
        "right": f"{right}/{len(judged)}" if judged else "",
        "ratio": cell_text(one) if one is not None else "",
        "refused": len(refused),
    }
