"""The plot of `pybnorm bench device`: each row's ratio to what it is compared with, sorted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.case import TOUCHED
from pybnorm import _files
from pybnorm.cli import output
from pybnorm.errors import ArgumentError

__all__ = ["KIND", "SUFFIXES", "check", "draw", "ratios"]

SUFFIXES = (".svg", ".png", ".pdf")
KIND = output.kind("--plot", "bench")
"""Only such a file is replaced."""
_MARKERS = dict(zip(TOUCHED, "o^s", strict=True))
_COLOURS = dict(zip(TOUCHED, ("#3c78b5", "#9a6c00", "#b33576"), strict=True))


def check(path: str) -> None:
    """Refuse a plot that could not be written, before the long run."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ArgumentError("plot", path, f"a file name that ends with {' | '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise ArgumentError("plot", path, "a file in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArgumentError("plot", path, "nothing without matplotlib: pip install matplotlib") from None


def ratios(result: Mapping[str, Any], name: str, base: str) -> list[tuple[float, str]]:
    """The time of `base` over that of `name`, and the operation, of each row that both measured, by rising ratio."""
    found = []
    for row in result["rows"]:
        own, other = row["contenders"].get(name, {}), row["contenders"].get(base, {})
        if "seconds" in own and "seconds" in other:
            found.append((other["seconds"] / own["seconds"], row["operation"]))
    return sorted(found)


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the rows of a result.

    One panel for each of our algorithms: a point per row, sorted by its ratio, a colour and a marker for each
    operation, and a line at 1, above which the algorithm is the faster one.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summary = result["summary"]
    names = [name for name in result["algorithms"] if name in summary] or [""]
    figure = Figure(figsize=(7, 2.9 * len(names) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 1, squeeze=False).ravel()
    for panel, name in zip(panels, names, strict=True):
        base = summary[name]["base"] if name else ""
        found = ratios(result, name, base)
        for operation in TOUCHED:
            points = [(i, ratio) for i, (ratio, own) in enumerate(found) if own == operation]
            if points:
                panel.scatter(
                    *zip(*points, strict=True),
                    s=16,
                    color=_COLOURS[operation],
                    marker=_MARKERS[operation],
                    linewidths=0,
                    label=f"{operation} ({len(points)})",
                )
        panel.axhline(1, color="black", linewidth=0.9, linestyle="--")
        panel.set_yscale("log")
        every = [float(f"{digit}e{power}") for power in range(-4, 5) for digit in (1, 2, 5)]
        ticks = [t for t in every if found and found[0][0] / 2 < t < found[-1][0] * 2]
        ticks = ticks if len(ticks) < 12 else [t for t in ticks if f"{t:e}".startswith("1")]
        panel.set_yticks(ticks, [f"{t:g}" for t in ticks])
        panel.minorticks_off()
        panel.grid(True, axis="y", linewidth=0.3)
        panel.set_ylabel(f"time of {base} / {name}" if name else "ratio")
        panel.set_xlabel(f"{len(found)} rows of operation, layout, dtype and shape, by ratio")
        panel.spines[["top", "right"]].set_visible(False)
        if found:
            panel.legend(loc="upper left", frameon=False, fontsize="small")
        else:
            panel.text(0.5, 0.5, "no rival was measured", transform=panel.transAxes, ha="center")
    version = ".".join(map(str, result["library"]["version"]))
    figure.suptitle(f"{result['library']['label']} {version}, {result['device']}", fontsize="medium")
    suffix = Path(path).suffix.lower().removeprefix(".")
    with _files.replaced("plot", path, KIND) as file:
        maker = {"Software" if suffix == "png" else "Creator": "pybnorm bench"}
        figure.savefig(file, format=suffix, dpi=150, metadata=maker)
