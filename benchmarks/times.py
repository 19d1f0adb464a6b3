"""Times of a way as a sum of a few terms: what `benchmarks.rules` may expect of shapes between the measured ones.

A random sweep has a few hundred shapes, and a table made of them alone errs where two bounds meet. Each way's time is
therefore fitted, for each operation, layout and size of an element, as a sum of `TERMS` with coefficients that are not
negative: a launch, memory, values of a channel in a row, channels and lines. Relative errors have the least squares.
Shapes drawn at random get these times, and count less than measured ones.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from benchmarks.shapes import random_shapes
from benchmarks.swept import TORCH, Row
from pybnorm.devices.timing import Array64

__all__ = ["TERMS", "Times", "between", "expected", "fit"]

Times = dict[str, dict[str, list[float]]]
"""Coefficients by kind of call and way."""
TERMS = (
    "a call", "x in MB", "values of a channel", "values by waves of channels", "lines", "channels", "tiles",
    "MB of lines that are not of 16 bytes", "MB of lines that are not of 4 bytes", "a little x", "short lines",
    "values up to 4096", "MB up to 60", "values of short lines by waves", "images", "columns",
)  # fmt: skip
"""What a coefficient is for."""
PROCESSORS = 132
"""Multiprocessors of an H200 and an H100: channels beyond them wait for another wave."""
RIDGE = 0.3
"""Weight of small coefficients against small errors."""
LEAST = 6
SHAPES, SEED, WEIGHT = 700, 5, 0.2
"""Made shapes, and what a row of them counts."""
MOST_VALUES = 100 << 20
UNSAVED = 0.4
KINDS = (("train", True), ("infer", True), ("backward", True), ("backward", False))


def terms(row: Row) -> Array64:
    """`TERMS` of a row."""
    images, channels, size = (row.value(name) for name in ("images", "channels", "size"))
    values, lines = images * size, images * channels
    megabytes = images * channels * size * row.item / 1e6
    inner = (size if row.first and not row.both else channels) * row.item
    wave = math.ceil(channels / PROCESSORS) * values / 1e3
    return np.array(
        [
            1.0,
            megabytes,
            values / 1e3,
            wave,
            lines / 1e3,
            channels / 1e3,
            math.ceil(values / 512) * math.ceil(channels / 64) / 1e3,
            megabytes * (inner % 16 != 0),
            megabytes * (inner % 4 != 0),
            max(0.0, 1 - megabytes / 30),
            lines / 1e3 * (size < 64),
            min(values, 4096) / 1e3,
            min(megabytes, 60.0),
            wave / 2 * (size < 1024),
            images / 1e3,
            channels * size / 1e6,
        ]
    )


def _kind(row: Row, way: str) -> str:
    """What has its own coefficients: ways of the library are the same for both 16-bit types, PyTorch's are not."""
    layout = "both" if row.both else row.layout
    saved = "saved" if row.saved or row.operation != "backward" else "unsaved"
    return f"{row.operation} {layout} {saved} {row.dtype if way in TORCH else row.item}"


def _least_squares(errors: Array64) -> Array64:
    """Coefficients that are not negative and make the rows' sums nearest to 1, by one coefficient after the other."""
    scale = errors.max(0) + 1e-12
    scaled = errors / scale
    square = scaled.T @ scaled + RIDGE**2 * np.eye(scaled.shape[1])
    target = scaled.sum(0)
    found = np.zeros(len(target))
    for _ in range(400):
        for i in range(len(target)):
            found[i] = max(0.0, found[i] - (square[i] @ found - target[i]) / square[i, i])
    return np.asarray(found / scale)


def fit(rows: Iterable[Row]) -> Times:
    """Coefficients for what these rows have."""
    some: dict[tuple[str, str], list[Array64]] = collections.defaultdict(list)
    counts: collections.Counter[str] = collections.Counter()
    for row in rows:
        counts[_kind(row, "")] += 1
        there = terms(row)
        for way, us in row.us.items():
            some[_kind(row, way), way].append(there / us)
    found: Times = {}
    for (kind, way), errors in sorted(some.items()):
        # A way that few shapes have is not expected of others.
        if len(errors) >= max(LEAST, 0 if way in TORCH else counts[kind] // 2):
            coefficients = _least_squares(np.array(errors))
            found.setdefault(kind, {})[way] = [float(f"{one:.3g}") for one in coefficients]
    return found


def expected(times: Times, row: Row) -> dict[str, float]:
    """Microseconds by way."""
    there, found = terms(row), {}
    for kind in dict.fromkeys((_kind(row, ""), _kind(row, TORCH[0]))):
        for way, coefficients in times.get(kind, {}).items():
            if way not in TORCH or row.saved or row.operation != "backward":
                found[way] = max(float(there @ np.array(coefficients)), 1.5)
    return found


def between(rows: Sequence[Row], times: Times) -> Iterator[Row]:
    """Rows of random shapes, with the times that are expected of them, and the ways that only "fast" may take."""
    unsafe: dict[str, frozenset[str]] = collections.defaultdict(frozenset)
    for row in rows:
        unsafe[_kind(row, "")] |= row.unsafe
    pick = random.Random(SEED)
    for dims in random_shapes(SHAPES, SEED, MOST_VALUES):
        dtype, layout = pick.choice(("f32", "f16", "bf16")), pick.choice(("nchw", "nhwc"))
        for operation, saved in KINDS:
            if not saved and pick.random() > UNSAVED:
                continue
            row = Row(operation, dtype, layout, tuple(dims), saved, "", "", {}, weight=WEIGHT)
            us = expected(times, row)
            if set(us) - set(TORCH):
                few = unsafe[_kind(row, "")] & set(us)
                yield Row(operation, dtype, layout, row.shape, saved, "", "", us, few, weight=WEIGHT)
