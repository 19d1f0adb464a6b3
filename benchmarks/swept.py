"""Rows of a sweep, and the file that keeps them: what `benchmarks.sweep` wrote, as a table of text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.sweep import TORCH

__all__ = ["DIVISORS", "SIZES", "SPATIAL", "TORCH", "Row", "Sweep", "load", "store"]

SIZES = ("images", "channels", "size", "values", "lines", "kilobytes")
"""N, C, S, N * S, N * C and x in KiB: the spans of a rule in rules.h, in its order."""
DIVISORS = {"row_bytes": (4, 16), "channel_bytes": (4, 16)}
SPATIAL = "spatial"


@dataclass(frozen=True)
class Row:
    """One operation on one shape, dtype and layout: microseconds by way."""

    operation: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    saved: bool
    auto: str
    fast: str
    us: dict[str, float]
    unsafe: frozenset[str] = frozenset()
    """Ways that only "fast" may take."""
    rough: frozenset[str] = frozenset()
    wrong: frozenset[str] = frozenset()
    weight: float = 1.0
    """1 of what was measured, less of what `benchmarks.times` expects."""

    @property
    def first(self) -> bool:
        """Channels-first memory, which some channels-last memory is too."""
        return self.layout == "nchw" or self.both

    @property
    def both(self) -> bool:
        """Memory that is channels-first and channels-last."""
        return self.shape[1] == 1 or math.prod(self.shape[2:]) == 1

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "f32" else 2

    @property
    def named(self) -> bool:
        """A layer of a network, and not drawn."""
        return any(self.shape in shapes for shapes in SHAPES.values())

    def value(self, name: str) -> int:
        """One of `SIZES` or `DIVISORS`."""
        images, channels, *spatial = self.shape
        size = math.prod(spatial)
        return {
            "images": images,
            "channels": channels,
            "size": size,
            "values": images * size,
            "lines": images * channels,
            "kilobytes": images * channels * size * self.item >> 10,
            "row_bytes": size * self.item,
            "channel_bytes": channels * self.item,
        }[name]

    def ways(self, fast: bool) -> list[str]:
        """Those that auto, or fast, may take."""
        return [way for way in self.us if way not in TORCH and (fast or way not in self.unsafe)]

    @property
    def torch(self) -> float | None:
        """PyTorch's time by default, where it is right."""
        return self.us.get("torch") if "torch" not in self.wrong else None


@dataclass
class Sweep:
    """What is known of one device."""

    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)


def load(paths: Iterable[Path | str]) -> Sweep:
    """Rows of files of `benchmarks.sweep`, or of one that was stored; those of one device."""
    sweep: Sweep | None = None
    for path in paths:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
        if sweep is None:
            sweep = Sweep(head)
        elif any(head[name] != sweep.head[name] for name in ("device", "library", "torch")):
            raise ValueError(f"{path} is of another device or library than the files before it")
        else:
            sweep.head["shapes"] += f" {head['shapes']}"
        compact = "ways" in head
        sweep.rows += [
            _from_text(line, head["ways"]) if compact else _from_json(json.loads(line)) for line in lines[1:]
        ]
    if sweep is None:
        raise ValueError("no file")
    return sweep


def _from_json(found: dict[str, Any]) -> Row:
    dims = tuple(found["shape"])
    row = Row(
        found["operation"],
        found["dtype"],
        found["layout"],
        dims,
        found["saved"],
        found["auto"],
        found["fast"],
        {way: us for way, us in found["us"].items() if way in TORCH or way not in found["wrong"]},
        rough=frozenset(found["rough"]),
        wrong=frozenset(found["wrong"]),
    )
    unsafe = {way for way in row.us if way not in TORCH and way not in found["safe"]}
    if row.operation == "infer" and not row.first:
        unsafe.add(SPATIAL)  # known defect cudnn-channels-last-inference: weak, and auto has ways without it
    return replace(row, unsafe=frozenset(unsafe & set(row.us)))


_MARKS = {"unsafe": "!", "rough": "~", "wrong": "x"}


def store(sweep: Sweep, path: Path | str) -> None:
    """Keep rows as lines of text: what the row is, the choices, and a column for each way."""
    ways = sorted({way for row in sweep.rows for way in (*row.us, *row.wrong)})
    columns = "operation dtype layout saved shape auto fast, us by way: ! for fast only, ~ of one call, x wrong, - none"
    lines = [json.dumps(sweep.head | {"rows": columns, "ways": ways})]
    for row in sweep.rows:
        cells = []
        for way in ways:
            text = f"{row.us[way]:.4g}" if way in row.us else "-" if way not in row.wrong else ""
            text = f"{float(text):g}" if text not in ("", "-") else text
            cells.append(text + "".join(mark for name, mark in _MARKS.items() if way in getattr(row, name)))
        dims = "x".join(map(str, row.shape))
        kind = "saved" if row.saved else "unsaved"
        lines.append(" ".join((row.operation, row.dtype, row.layout, kind, dims, row.auto, row.fast, *cells)))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _from_text(line: str, ways: Sequence[str]) -> Row:
    operation, dtype, layout, kind, dims, auto, fast, *cells = line.split()
    us: dict[str, float] = {}
    marked: dict[str, set[str]] = {name: set() for name in _MARKS}
    for way, cell in zip(ways, cells, strict=True):
        number = cell.rstrip("".join(_MARKS.values()))
        if number not in ("", "-"):
            us[way] = float(number)
        for name, mark in _MARKS.items():
            if mark in cell[len(number) :]:
                marked[name].add(way)
    shape = tuple(map(int, dims.split("x")))
    unsafe, rough, wrong = (frozenset(marked[name]) for name in ("unsafe", "rough", "wrong"))
    return Row(operation, dtype, layout, shape, kind == "saved", auto, fast, us, unsafe, rough, wrong)
