"""The plots of a page, as SVG that takes the page's text colour; needs matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import TITLES, CaseResult, cases_text, place

COLOURS = {
    "PASS": "#278550",
    "WARN": "#9a6c00",
    "CHAIN": "#8a7000",
    "UNSUPPORTED": "#5b7796",
    "INCONCLUSIVE": "#865ed0",
    "MISTRUSTED": "#b34fa2",
    "ERROR": "#63676f",
    "RESOURCE": "#ac6236",
    "BUILD_FAILED": "#9a551d",
    "RAISED": "#b83b22",
    "CRASHED": "#c52727",
    "TIMEOUT": "#b33576",
    "NONDETERMINISTIC": "#b0487a",
    "FAIL": "#df2c2c",
    "refused": "#5b7796",
    "agree": "#278550",
    "equal": "#278550",
    "within": "#3c78b5",
    "undecided": "#865ed0",
    "differ": "#c52727",
    "beyond": "#df2c2c",
}
"""Colours of statuses and outcomes; with white text, and on a light and a dark page, they have AA contrast (WCAG)."""
FLOOR, CEILING = 1e-5, 1e5
"""Ends of the scale of ratios; what is beyond them lies on them."""
RASTER = 1500
"""Points above which those that are good are an image, because each point of a drawing costs a hundred bytes."""
LINKS = 400
"""Points that link to their case; the rest of thousands of failures is only drawn."""
INK = "#0b0c0d"
"""Replaced by the page's text colour."""
Point = tuple[str, float, str, int]
"""Output, ratio, status or outcome, and the number of the case's row."""
_GOOD = ("PASS", "UNSUPPORTED", "refused", "agree", "equal", "within")
_MARKERS = {
    "WARN": "^",
    "CHAIN": "v",
    "undecided": "^",
    "INCONCLUSIVE": "s",
    "MISTRUSTED": "D",
    "NONDETERMINISTIC": "P",
}
"""Beside the colour; what is good is a dot, anything else a cross."""


def operation(case: str) -> str:
    """The first word of a case."""
    return case.partition(",")[0]


def strips(panels: Mapping[str, Sequence[Point]]) -> str:
    """A drawing for each title: a strip of ratios for each output, coloured by status; what is not good links."""
    outputs = [n for n in TITLES if any(n == p[0] for points in panels.values() for p in points)]
    with _style():
        drawn = [_panel(*panel, outputs, f"strips{i}") for i, panel in enumerate(panels.items())]
    return "\n".join(drawn) or "<p>No output was judged.</p>"


def _panel(title: str, points: Sequence[Point], outputs: Sequence[str], name: str) -> str:
    figure = _figure((6.2, 3.9))
    axis = figure.subplots()
    for status in dict.fromkeys(p[2] for p in points):
        own = [p for p in points if p[2] == status]
        # a golden-ratio sequence spreads the points of a strip evenly, and the same way every time
        spread = (np.arange(len(own)) * 0.6180339887498949) % 1 - 0.5
        x = np.array([outputs.index(p[0]) for p in own]) + 0.62 * spread
        y = np.clip([p[1] if not math.isnan(p[1]) else CEILING for p in own], FLOOR, CEILING)
        good = status in _GOOD
        drawn = axis.scatter(
            *(x, y, 7 if good else 26),
            color=COLOURS[status],
            marker="o" if good else _MARKERS.get(status, "X"),
            linewidths=0,
            alpha=0.65 if good else 0.95,
            zorder=2 if good else 3,
            label=f"{status} ({len(own)})",
            rasterized=len(own) > (RASTER if good else LINKS),
        )
        if not good and len(own) <= LINKS:
            drawn.set_urls([f"#case-{p[3]}" for p in own])
    axis.axhline(1, color=INK, linewidth=0.9, linestyle="--", zorder=1)
    axis.set(yscale="log", ylim=(FLOOR / 2, CEILING * 2), xlim=(-0.5, len(outputs) - 0.5), title=_drawn(title))
    axis.set_xticks(range(len(outputs)), [TITLES[n] for n in outputs])
    axis.set_yticks(
        [FLOOR, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, 1e3, 1e4, CEILING],
        ["0", "1e-4", "1e-3", "0.01", "0.1", "1", "10", "100", "1e3", "1e4", "inf"],
    )
    axis.minorticks_off()
    axis.grid(axis="y", color=INK, alpha=0.12, linewidth=0.6)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=5, frameon=False, fontsize=8, handletextpad=0.2)
    return _svg(figure, name, "worst ratio of each output")


def heat_map(results: Sequence[CaseResult], backends: Sequence[str]) -> str:
    """Status of each case (columns) on each backend (rows); what is not good has a cross that links to its row."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    statuses = list(Status)
    numbers = {s: i for i, s in enumerate(statuses)}
    colours = ListedColormap(["#00000000", *(COLOURS[s.value] for s in statuses)])
    by_operation: dict[str, dict[str, None]] = {}
    for result in results:
        by_operation.setdefault(operation(result.case), {})[result.case] = None
    found = {(r.backend, r.case): r.status for r in results}
    rows = {(r.backend, r.case): i for i, r in enumerate(results) if not r.status.good}
    height = 0.32 * len(backends) + 0.75
    with _style():
        figure = _figure((13, height * len(by_operation) + 0.45))
        axes = figure.subplots(len(by_operation), 1, squeeze=False).ravel()
        for axis, (word, lines) in zip(axes, by_operation.items(), strict=True):
            cases = sorted(lines, key=_order)
            grid = [[numbers[found[b, c]] + 1 if (b, c) in found else 0 for c in cases] for b in backends]
            image = {"cmap": colours, "vmin": 0, "vmax": len(statuses), "interpolation": "nearest"}
            axis.imshow(np.array(grid), aspect="auto", **image)
            marks = [(x, y, rows[b, c]) for y, b in enumerate(backends) for x, c in enumerate(cases) if (b, c) in rows]
            if 0 < len(marks) <= LINKS:
                x, y, _ = zip(*marks, strict=True)
                drawn = axis.scatter(x, y, 22, color="white", marker="x", zorder=4)
                drawn.set_urls([f"#case-{m[2]}" for m in marks])
            axis.set_yticks(range(len(backends)), [_drawn(name) for name in backends])
            axis.set_title(f"{word}: {cases_text(len(cases))}", loc="left")
            starts = [i for i, c in enumerate(cases) if i == 0 or c.split(",")[2] != cases[i - 1].split(",")[2]]
            axis.set_xticks(starts, [cases[i].split(",")[2] for i in starts], ha="left")
            for i in starts[1:]:
                axis.axvline(i - 0.5, color=INK, linewidth=0.8)
            for i in range(1, len(backends)):
                axis.axhline(i - 0.5, color=INK, linewidth=0.4)
        present = [s for s in statuses if s in found.values()]
        handles = [Patch(color=COLOURS[s.value], label=s.value) for s in present]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(present), frameon=False, fontsize=8)
        return _svg(figure, "map", "status of each case on each backend")


def _drawn(text: str) -> str:
    """Text without what UTF-8 cannot hold, which fonts refuse: a file's name can be any bytes."""
    return text.encode(errors="backslashreplace").decode()


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
            **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
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
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(\bid="|href="#(?!case-)|url\(#)', rf"\1{name}-", text)
    role = "group" if "#case-" in text else "img"  # links of an image are none to a screen reader
    return text.replace("<svg ", f'<svg role="{role}" aria-label="{label}" ', 1)
