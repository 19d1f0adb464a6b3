"""The plot of `pybnorm bench device`: how near each call comes to the speed of a copy, against the tensor's size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.case import TOUCHED
from pybnorm import _files
from pybnorm.cli import output
from pybnorm.errors import ArgumentError

__all__ = ["KIND", "SUFFIXES", "check", "draw"]

SUFFIXES = (".svg", ".png", ".pdf")
KIND = output.kind("--plot", "bench")
"""Only such a file is replaced."""
_MARKERS = {"f32": "o", "f16": "^", "bf16": "s"}


def check(path: str) -> None:
    """Refuse a plot that could not be written, before the long run.

    Parameters
    ----------
    path : str

    Raises
    ------
    ArgumentError
        Another suffix than `SUFFIXES`, a folder that is not there, or matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ArgumentError("plot", path, f"a file name that ends with {' | '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise ArgumentError("plot", path, "a file in a folder that exists")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ArgumentError("plot", path, "nothing without matplotlib: pip install 'pybnorm[report]'") from None


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the rows of a result.

    One panel for each operation and layout: bytes of the floor per second against the bytes of x, a colour for each
    contender, a marker for each dtype, and the ceiling.

    Parameters
    ----------
    result : mapping
        What `benchmarks.device.run` returned.
    path : str
        SVG, PNG or PDF.

    Raises
    ------
    ArgumentError
        As `check`, or the file is not a plot of pybnorm.
    OSError
        It cannot be written.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = result["rows"]
    operations = [o for o in TOUCHED if any(row["operation"] == o for row in rows)] or list(TOUCHED)
    layouts = list(dict.fromkeys(row["layout"] for row in rows)) or ["nchw"]
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    dtypes = [d for d in _MARKERS if any(row["dtype"] == d for row in rows)]
    ceiling = result["ceiling"]["bytes_per_second"] / 1e9
    figure = Figure(figsize=(4.2 * len(operations) + 1.6, 3.4 * len(layouts) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(layouts), len(operations), squeeze=False, sharex=True, sharey=True)
    for line, layout in zip(panels, layouts, strict=True):
        for panel, operation in zip(line, operations, strict=True):
            panel.axhline(ceiling, color="black", linewidth=1, linestyle="--")
            for name in names:
                for dtype in dtypes:
                    points = sorted(
                        (row["tensor_bytes"] / 2**20, row["floor_bytes"] / row["contenders"][name]["seconds"] / 1e9)
                        for row in rows
                        if (row["operation"], row["layout"], row["dtype"]) == (operation, layout, dtype)
                        and "seconds" in row["contenders"].get(name, {})
                    )
                    if points:
                        panel.plot(
                            *zip(*points, strict=True),
                            color=colours[name],
                            marker=_MARKERS[dtype],
                            markersize=4,
                            linewidth=1.6 if name in result["algorithms"] else 0.8,
                            zorder=2 + len(names) - names.index(name),  # ours come first, and on top
                        )
            panel.set(xscale="log", yscale="log", title=f"{operation}, {layout.upper()}")
            panel.grid(True, which="major", linewidth=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("tensor, MiB")
    for line in panels:
        line[0].set_ylabel("floor bytes / time, GB/s")
    keys = [Line2D([], [], color="black", linestyle="--", label=f"copy, {ceiling:.0f} GB/s")]
    keys += [Line2D([], [], color=colours[name], label=name) for name in names]
    keys += [Line2D([], [], color="grey", linestyle="", marker=_MARKERS[d], label=d) for d in dtypes]
    figure.legend(handles=keys, loc="outside right upper", fontsize="small")
    version = ".".join(map(str, result["library"]["version"]))
    figure.suptitle(f"{result['library']['label']} {version}, {result['device']}", fontsize="medium")
    suffix = Path(path).suffix.lower().removeprefix(".")
    with _files.replaced("plot", path, KIND) as file:
        maker = {"Software" if suffix == "png" else "Creator": "pybnorm bench"}
        figure.savefig(file, format=suffix, dpi=150, metadata=maker)
