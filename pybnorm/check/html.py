"""A run, or a comparison of runs, as one HTML page with style, script and plots in it: it loads no other file."""

from __future__ import annotations

import dataclasses
import importlib
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from pybnorm._text import write_visible
from pybnorm.check import compare, defects, vendor_lines
from pybnorm.check.bounds import Status
from pybnorm.check.environment import machine
from pybnorm.check.results import (
    OUTPUTS,
    BackendInfo,
    CaseResult,
    LostNode,
    groups,
    host_digest,
    label,
    labels,
    lost_text,
    not_run,
    place,
    ratio_text,
    repro,
    verdict_text,
    version_text,
    worst_ratios,
)
from pybnorm.check.support import NEWLY_UNSUPPORTED
from pybnorm.errors import ArgumentError

__all__ = ["require", "write", "write_comparison"]

COLOURS = {
    "PASS": "#2f9e5f",
    "WARN": "#c58a00",
    "UNSUPPORTED": "#6f8aa8",
    "INCONCLUSIVE": "#8a63d2",
    "MISTRUSTED": "#b657a6",
    "ERROR": "#5b5f66",
    "RESOURCE": "#b8693a",
    "BUILD_FAILED": "#96531c",
    "RAISED": "#96301c",
    "CRASHED": "#8c1c1c",
    "TIMEOUT": "#6d2048",
    "NONDETERMINISTIC": "#b0487a",
    "FAIL": "#e03131",
    "refused": "#6f8aa8",
    "agree": "#2f9e5f",
    "equal": "#2f9e5f",
    "within": "#3f7fbf",
    "undecided": "#8a63d2",
    "differ": "#8c1c1c",
    "beyond": "#e03131",
}
"""Of statuses and of outcomes, on light and dark alike."""
DETAILS = 500
"""Cases of which a page shows points; a page of thousands of failures would not open."""
ROWS = 20_000
"""Rows of a comparison above which equal cases have none."""
FLOOR, CEILING = 1e-5, 1e5
"""Ends of the scale of ratios; what is beyond them lies on them."""
RASTER = 3000
"""Points above which a plot is an image, because each point of a drawing costs a hundred bytes."""
_UNJUDGED = (
    *(Status.UNSUPPORTED, Status.ERROR, Status.RESOURCE, Status.BUILD_FAILED, Status.RAISED, Status.CRASHED),
    Status.TIMEOUT,
)
_TITLES = {name: title for own in OUTPUTS.values() for name, title in own.items()}
_INK = "#0b0c0d"  # replaced by the page's text colour


def require() -> None:
    """Raise an error that names what to install if the page cannot be made.

    Raises
    ------
    ArgumentError
        matplotlib or jinja2 is not installed.
    """
    for name in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ArgumentError(
                "--html", f"a Python without {name}", f"matplotlib and jinja2, pip install 'pybnorm[report]' ({error})"
            ) from None


def write(
    target: str | os.PathLike[str] | IO[str],
    environment: dict[str, Any],
    backends: Sequence[BackendInfo],
    results: Sequence[CaseResult],
    lost: Sequence[LostNode] = (),
) -> None:
    """Write the page of a run.

    Parameters
    ----------
    target : path or text stream
    environment : dict
        `pybnorm.check.environment.machine`.
    backends : sequence of BackendInfo
    results : sequence of CaseResult
    lost : sequence of LostNode, optional
        Nodes that were taken out.

    Raises
    ------
    ArgumentError
        matplotlib or jinja2 is not installed.
    OSError
        It cannot be written.
    """
    require()
    # from here on `backend` names a library; the backend alone does if all nodes had the same one
    plain = results
    results = [
        r if name == r.backend else dataclasses.replace(r, backend=name)
        for name, r in zip(labels(plain), plain, strict=True)
    ]
    names = list(dict.fromkeys(r.backend for r in results))
    bad = [i for i, r in enumerate(results) if r.status not in (Status.PASS, Status.UNSUPPORTED)]
    bad.sort(key=lambda i: (-results[i].status.severity, i))
    shown = bad[:DETAILS]
    columns = {n: t for n, t in _TITLES.items() if any(v.output == n for r in results for v in r.verdicts)}
    failures = [{"number": i, "result": results[i], "commands": _commands(plain[i])} for i in shown]
    layouts = sorted({r.case.split(",")[3].partition("=")[0] for r in results}, key=place)
    text = _render(
        "report.html",
        environment=environment,
        backends=[(label(info, backends), info) for info in backends],
        lost=[lost_text(dataclasses.replace(n, host=n.host and host_digest(n.host))) for n in lost],
        not_run=not_run(results),
        results=results,
        totals=[_total(name, [r for r in results if r.backend == name]) for name in names],
        layouts=layouts,
        groups=_groups(results, [(name, layout) for name in names for layout in layouts]),
        heat_map=_heat_map(results, names) if results else "",
        strips=_strips(_ratios(results, names)) if results else "",
        defects=_defects(results),
        failures=failures,
        left_out=len(bad) - len(shown),
        newly_unsupported=NEWLY_UNSUPPORTED,
        present=[s.value for s in Status if any(r.status == s for r in results)],
        operations=list(dict.fromkeys(_operation(r.case) for r in results)),
        columns=columns,
        rows=[_row(i, r, columns, i in set(shown)) for i, r in enumerate(results)],
    )
    write_visible(target, text)


def write_comparison(target: str | os.PathLike[str] | IO[str], comparison: compare.Comparison) -> None:
    """Write the page of a comparison.

    Parameters
    ----------
    target : path or text stream
    comparison : Comparison

    Raises
    ------
    ArgumentError
        matplotlib or jinja2 is not installed.
    OSError
        It cannot be written.
    """
    require()
    cases = comparison.cases
    bad = sorted((c for c in cases if not c.outcome.good), key=lambda c: -c.outcome.severity)
    links = {id(c): f"d{i}" for i, c in enumerate(bad[:DETAILS])}
    listed = cases if len(cases) <= ROWS else [c for c in cases if c.outcome != compare.Outcome.EQUAL]
    changes = []
    for pair in comparison.pairs:
        if pair.kind != "vendors":
            order = list(compare.Change)
            own = [c for c in cases if (c.first, c.second) == (pair.first, pair.second)]
            changed = sorted((c for c in own if c.change != compare.Change.NONE), key=lambda c: order.index(c.change))
            changes.append({"pair": pair, "cases": changed[:DETAILS], "left_out": max(0, len(changed) - DETAILS)})
    panels: dict[str, list[tuple[str, float, str]]] = {}
    for case in cases:
        points = [(o.output, o.ratio, o.outcome.value) for o in case.outputs if o.different]
        panels.setdefault(f"{case.first} and {case.second}", []).extend(points)
    panels = {title: points for title, points in panels.items() if points}
    text = _render(
        "compare.html",
        comparison=comparison,
        date=machine()["date"],
        lost_text=compare.lost_text,
        outcomes=[o.value for o in compare.Outcome if any(c.outcome == o for c in cases)],
        changes=changes,
        accuracy=compare.ACCURACY,
        reference_alone=compare.REFERENCE_ALONE,
        limit=DETAILS,
        beyond=bad[:DETAILS],
        left_out=max(0, len(bad) - DETAILS),
        has_outputs=bool(panels),
        strips=_strips(panels) if panels else "",
        firsts=list(dict.fromkeys(c.first for c in cases)),
        seconds=list(dict.fromkeys(c.second for c in cases)),
        operations=list(dict.fromkeys(_operation(c.case) for c in cases)),
        rows=[
            {
                "case": c,
                "operation": _operation(c.case),
                "ratio": ratio_text(max(o.ratio for o in c.outputs)) if c.outputs else "",
                "link": links.get(id(c)),
            }
            for c in listed
        ],
        equal_left_out=len(cases) - len(listed),
        judged=[s.value for s in Status if s not in _UNJUDGED],
        nearer_text=compare.nearer_text,
        output_text=compare.output_text,
    )
    write_visible(target, text)


# ---------------------------------------------------------------- page


def _render(template: str, **values: Any) -> str:
    import jinja2
    from markupsafe import Markup

    place = jinja2.Environment(
        loader=jinja2.PackageLoader("pybnorm.check"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    for name in ("heat_map", "strips"):
        if name in values:
            values[name] = Markup(values[name])
    words = {"ratio_text": ratio_text, "verdict_text": verdict_text, "version_text": version_text}
    text: str = place.get_template(template).render(colours=COLOURS, **words, **values)
    return text


def _commands(result: CaseResult) -> str:
    """How to run the case again, here and with the vendors' own tools."""
    lines = [repro(result)]
    for tool, line in vendor_lines.of_case(result.case).items():
        lines += [f"# {tool}", line]
    return "\n".join(lines)


def _operation(case: str) -> str:
    return case.partition(",")[0]


def _total(backend: str, results: Sequence[CaseResult]) -> dict[str, Any]:
    counts = Counter(r.status for r in results)
    known = Counter(r.status.value for r in results if r.known)
    return {
        "backend": backend,
        "cases": len(results),
        "counts": {s.value: counts[s] for s in Status if counts[s]},
        "known": known,
    }


def _groups(results: Sequence[CaseResult], columns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of the table of groups: operation, mode and dtype, and a cell for each backend and layout."""
    rows = []
    for operation in dict.fromkeys(_operation(r.case) for r in results):
        by_group = groups(r for r in results if _operation(r.case) == operation)
        for mode, dtype in dict.fromkeys(group[:2] for group in by_group):
            cells = []
            for backend, layout in columns:
                some = [r for r in by_group.get((mode, dtype, layout), ()) if r.backend == backend]
                cells.append(_group_cell(some) if some else None)
            rows.append({"name": (operation, mode, dtype), "cells": cells})
    return rows


def _group_cell(results: Sequence[CaseResult]) -> dict[str, Any]:
    refused = [r for r in results if r.status == Status.UNSUPPORTED]
    judged = [r for r in results if r.status not in (Status.UNSUPPORTED, Status.ERROR)]
    worst = max((r.status for r in results), key=lambda s: s.severity if s != Status.UNSUPPORTED else -1)
    right = sum(r.status in (Status.PASS, Status.WARN) for r in judged)
    ratios = worst_ratios(judged)
    return {
        "status": worst.value,
        "right": f"{right}/{len(judged)}" if judged else "",
        "ratio": ratio_text(max(ratios.values())) if ratios else "",
        "refused": len(refused),
    }


def _defects(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    """Each known defect that explains a result, with what is recorded about it."""
    counts = Counter(word for r in results for word in re.split(r",\s*", r.known) if word)
    recorded = {defect.id: defect for defect in defects.DEFECTS}
    rows = []
    for word, count in counts.most_common():
        defect = recorded.get(word)
        row = {"id": word, "count": count, "what": defect.what if defect else ""}
        rows.append(row | {"links": defect.links if defect else ()})
    return rows


def _row(number: int, result: CaseResult, columns: Mapping[str, str], linked: bool) -> dict[str, Any]:
    cells = {
        v.output: (ratio_text(v.ratio), f"{v.noticed:.0e}" if v.status == Status.PASS and v.noticed else "")
        for v in result.verdicts
    }
    return {
        "result": result,
        "operation": _operation(result.case),
        "cells": [cells.get(name, ("", "")) for name in columns],
        "repeat": {"": "", "equal": "="}.get(result.repeat, "differs"),
        "link": f"d{number}" if linked else "",
        "reason": result.message.partition("\n")[0] if result.status == Status.UNSUPPORTED else "",
    }


# ---------------------------------------------------------------- plots


def _ratios(results: Sequence[CaseResult], backends: Sequence[str]) -> dict[str, list[tuple[str, float, str]]]:
    return {
        b: [(v.output, v.ratio, v.status.value) for r in results if r.backend == b for v in r.verdicts]
        for b in backends
        if any(r.backend == b and r.verdicts for r in results)
    }


def _strips(panels: Mapping[str, Sequence[tuple[str, float, str]]]) -> str:
    """A panel for each title: a strip of ratios for each output, coloured by status or outcome.

    Parameters
    ----------
    panels : mapping of str to sequence
        (output, ratio, status or outcome).
    """
    if not panels:
        return "<p>No output was judged.</p>"
    outputs = [n for n in _TITLES if any(n == p[0] for points in panels.values() for p in points)]
    across = min(len(panels), 2)
    down = math.ceil(len(panels) / across)
    with _style():
        figure = _figure((6.2 * across + 0.6, 3.9 * down))
        axes = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
        for axis, (title, points) in zip(axes, panels.items(), strict=False):
            for status in dict.fromkeys(p[2] for p in points):
                own = [p for p in points if p[2] == status]
                # a golden-ratio sequence spreads the points of a strip evenly, and the same way every time
                spread = (np.arange(len(own)) * 0.6180339887498949) % 1 - 0.5
                x = np.array([outputs.index(p[0]) for p in own]) + 0.62 * spread
                y = np.clip([p[1] if not math.isnan(p[1]) else CEILING for p in own], FLOOR, CEILING)
                good = status in ("PASS", "UNSUPPORTED", "equal", "within")
                axis.scatter(
                    *(x, y, 7 if good else 26),
                    color=COLOURS[status],
                    marker="o" if good else "X",
                    linewidths=0,
                    alpha=0.65 if good else 0.95,
                    zorder=2 if good else 3,
                    label=f"{status} ({len(own)})",
                    rasterized=len(points) > RASTER,
                )
            axis.axhline(1, color=_INK, linewidth=0.9, linestyle="--", zorder=1)
            axis.set(yscale="log", ylim=(FLOOR / 2, CEILING * 2), xlim=(-0.5, len(outputs) - 0.5), title=title)
            axis.set_xticks(range(len(outputs)), [_TITLES[n] for n in outputs])
            axis.set_yticks(
                [FLOOR, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, 1e3, 1e4, CEILING],
                ["0", "1e-4", "1e-3", "0.01", "0.1", "1", "10", "100", "1e3", "1e4", "inf"],
            )
            axis.minorticks_off()
            axis.grid(axis="y", color=_INK, alpha=0.12, linewidth=0.6)
            axis.legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=5, frameon=False, fontsize=8, handletextpad=0.2
            )
        for axis in axes[len(panels) :]:
            axis.remove()
        return _svg(figure, "strips", "worst ratio of each output")


def _heat_map(results: Sequence[CaseResult], backends: Sequence[str]) -> str:
    """Status of each case (columns) on each backend (rows), operations one below the other."""
    from matplotlib.colors import ListedColormap

    statuses = list(Status)
    numbers = {s: i for i, s in enumerate(statuses)}
    colours = ListedColormap(["#00000000", *(COLOURS[s.value] for s in statuses)])
    by_operation: dict[str, dict[str, None]] = {}
    for result in results:
        by_operation.setdefault(_operation(result.case), {})[result.case] = None
    found = {(r.backend, r.case): r.status for r in results}
    height = 0.32 * len(backends) + 0.75
    with _style():
        figure = _figure((13, height * len(by_operation) + 0.45))
        axes = figure.subplots(len(by_operation), 1, squeeze=False).ravel()
        for axis, (operation, lines) in zip(axes, by_operation.items(), strict=True):
            cases = sorted(lines, key=_order)
            grid = [[numbers[found[b, c]] + 1 if (b, c) in found else 0 for c in cases] for b in backends]
            image = (colours, 0, len(statuses))
            axis.imshow(
                np.array(grid), cmap=image[0], vmin=image[1], vmax=image[2], aspect="auto", interpolation="nearest"
            )
            axis.set_yticks(range(len(backends)), backends)
            axis.set_title(f"{operation}: {len(cases)} cases", loc="left")
            starts = [i for i, c in enumerate(cases) if i == 0 or c.split(",")[2] != cases[i - 1].split(",")[2]]
            axis.set_xticks(starts, [cases[i].split(",")[2] for i in starts], ha="left")
            for i in starts[1:]:
                axis.axvline(i - 0.5, color=_INK, linewidth=0.8)
            for i in range(1, len(backends)):
                axis.axhline(i - 0.5, color=_INK, linewidth=0.4)
        present = [s for s in statuses if s in found.values()]
        handles = [_patch(COLOURS[s.value], s.value) for s in present]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(present), frameon=False, fontsize=8)
        return _svg(figure, "map", "status of each case on each backend")


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _order(case: str) -> tuple[int, int, int, str]:
    _, mode, dtype, layout, *rest = case.split(",")
    return place(dtype), place(layout.partition("=")[0]), place(mode), ",".join(rest)


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",  # text stays text, in the page's fonts
            "svg.hashsalt": "pybnorm",  # the same run, the same page
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
        }
    )


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and may want a screen

    return Figure(size, dpi=110, layout="constrained")


def _svg(figure: Any, name: str, label: str) -> str:
    """The drawing as an element to be put into a page, in the page's text colour, its ids beginning with `name`."""
    target = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(target, format="svg", transparent=True, metadata=nothing)
    text = target.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
