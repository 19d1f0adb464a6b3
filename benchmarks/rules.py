"""The table that auto takes its ways from, made from sweeps; and where PyTorch's own kernels are faster.

    python -m benchmarks.rules store docs/results/h200-sweep.txt sweep.jsonl...  keeps what `benchmarks.sweep` wrote
    python -m benchmarks.rules write                                             makes files of the package
    python -m benchmarks.rules report                                            says what they gain on shapes held out
    python -m benchmarks.rules plot docs/results/rules.svg                       draws that

One table is made from the sweeps of all devices (`STORED`): they are of one architecture, and on shapes held out it
loses less on each than a table from that device's sweep alone.

The model is a small tree for each operation, layout and kind of statistics: at each step the one bound of one size is
taken that saves most, and a leaf has the way with the least loss over its shapes, measured ones and those between them
whose times `benchmarks.times` expects. The loss of a way on a shape is the
logarithm of its time over the fastest one's, and once more where it is slower than PyTorch and the fastest is not. How
much a step must save is found by cross-validation: trees from some shapes are judged on others. A leaf is a rule; a way
that cannot be built for a call leaves the call to the next rules, here as in the library.

The files are rules_swept.h, which rules.h includes in front of its own rules, and faster.py of `pybnorm.torch`.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import plot, times
from benchmarks.sweep import SCHEMA
from benchmarks.swept import DIVISORS, SIZES, SPATIAL, Row, Sweep, load, store
from pybnorm.devices.timing import Array64

__all__ = [
    "Row",
    "Rule",
    "Sweep",
    "chosen",
    "faster",
    "faster_source",
    "header",
    "learn",
    "left",
    "load",
    "made",
    "report",
    "store",
]

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "pybnorm" / "backends" / "cudnn" / "rules_swept.h"
FASTER = ROOT / "pybnorm" / "torch" / "faster.py"
OPERATIONS = {
    "train": "PBN_OP_FORWARD_TRAINING",
    "infer": "PBN_OP_FORWARD_INFERENCE",
    "backward": "PBN_OP_BACKWARD",
}
LEAST_ROWS = 6
"""In a leaf."""
DEPTH = 6
FOLDS = 5
NEED = 0.8
"""What a split must save, in sums of logarithms: of `NEEDS` what loses least on shapes held out, as the report says."""
NEEDS = (0.3, 0.8, 1.6)
NAMED = 4.0
"""What a row of a layer of a network counts: their shapes are used more than any one that was drawn."""
WRONG = 5.0
"""The loss of a wrong result."""
NEAR = 0.97
"""A row counts as lost where PyTorch takes less than this share of our time."""
BUT = {
    "ex": "over channels-first memory it is persistent",
    "persistent": "sums in fixed point: the absolute error of a gradient is about 2e-6 for 800000 values, and values "
    "below 1e-5 or above 1e10 lose their digits",
    "rows": "less exact than columns where a channel begins with a value far from its others",
    "spatial": "its error grows with mean / deviation: 4e-4 of y at 1e4",
}
"""What speaks against ways that only "fast" may take."""


# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """A line of the table; the fields are those of rules.h."""

    operation: str
    dtypes: frozenset[str]
    layout: str
    """FIRST or LAST."""
    algorithm: str
    saved: int = 0
    fast: bool = False
    spans: tuple[tuple[str, int, int], ...] = ()
    """(size, from, below); below 0 has no end."""
    divisors: tuple[tuple[str, int], ...] = ()
    why: str = ""

    def fits(self, row: Row, fast: bool) -> bool:
        """As ``fits`` of plans.c."""
        return (
            self.operation == row.operation
            and row.dtype in self.dtypes
            and (row.first if self.layout == "FIRST" else row.layout == "nhwc" or row.both)
            and (fast or not self.fast)
            and (self.saved == 0 or (self.saved > 0) == row.saved)
            and all(
                row.value(name) >= low and (below == 0 or row.value(name) < below) for name, low, below in self.spans
            )
            and all(row.value(name) % divisor == 0 for name, divisor in self.divisors)
        )


def chosen(rules: Sequence[Rule], row: Row, fast: bool = False) -> str:
    """The way of the first rule that fits and can be built, else the plain one; auto's is stable, as in plans.c."""
    for rule in rules:
        if (rule.algorithm in row.wrong or _has(row, rule.algorithm, fast)) and rule.fits(row, fast):
            return rule.algorithm
    return SPATIAL


def _has(row: Row, way: str, fast: bool) -> bool:
    return way in row.us and (fast or way not in row.unsafe)


@dataclass(frozen=True)
class _Class:
    """Rows that one tree is for."""

    operation: str
    layout: str
    saved: int
    """As of a rule."""
    fast: bool

    def holds(self, row: Row) -> bool:
        return (
            row.operation == self.operation
            and row.first == (self.layout == "FIRST")
            and (self.saved == 0 or (self.saved > 0) == row.saved)
        )


CLASSES = tuple(
    _Class(operation, layout, saved, fast)
    for layout in ("FIRST", "LAST")
    for fast in (True, False)
    for operation, saved in (("train", 0), ("infer", 0), ("backward", 1), ("backward", -1))
)
"""In the order of the table: a rule of LAST fits what is FIRST too; what is for "fast" only precedes what is for both.
Training that saves no statistics is not measured, and goes as training that does, by the ways that are stable then."""
Ints = npt.NDArray[np.intp]
Box = tuple[frozenset[str], tuple[tuple[str, int, int], ...], tuple[tuple[str, int], ...]]
"""Dtypes, spans, and divisors, of which a negative one does not divide."""
ANY: Box = (frozenset(("f32", "f16", "bf16")), (), ())


def _loss(row: Row, us: float, fast: bool) -> float:
    """Of a row that counts 1."""
    best = min((row.us[way] for way in row.ways(fast)), default=us)
    loss = max(math.log(us / best), 0.0)
    if row.torch is not None:
        loss += max(math.log(us / row.torch), 0.0) - max(math.log(best / row.torch), 0.0)
    return loss


class _Tree:
    """The tree of a class, as boxes with ways.

    Parameters
    ----------
    rows : sequence of Row
        Of the class.
    ways : sequence of str
        What a leaf may take.
    losses : array
        By row and way.
    known : array
        Whether a row has the way: with fewer than `least` of them a leaf may not take it.
    need : float
        What a split must save.
    sizes, divisors, dtypes
        What splits may use; `dtypes` are halves of them.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        ways: Sequence[str],
        losses: Array64,
        known: npt.NDArray[np.bool_],
        need: float,
        sizes: Sequence[str] = SIZES,
        divisors: dict[str, tuple[int, ...]] | None = None,
        dtypes: Sequence[frozenset[str]] = (frozenset(("f32",)),),
        least: int = LEAST_ROWS,
    ) -> None:
        self.ways, self.losses, self.known, self.need, self.least = ways, losses, known * 1.0, need, least
        self.splits: list[tuple[Any, ...]] = []
        masks = []
        for some in dtypes:
            self.splits.append(("dtypes", some))
            masks.append(np.array([row.dtype in some for row in rows], bool))
        for name, numbers in (DIVISORS if divisors is None else divisors).items():
            values = np.array([row.value(name) for row in rows])
            self.splits += [("divisor", name, number) for number in numbers]
            masks += [values % number == 0 for number in numbers]
        for name in sizes:
            values = np.array([row.value(name) for row in rows])
            bounds = _bounds(int(values.min()), int(values.max()))
            self.splits += [("size", name, bound) for bound in bounds]
            masks += [values < bound for bound in bounds]
        self.masks = np.array(masks)
        self.leaves = list(self._grow(np.arange(len(rows)), ANY, DEPTH))

    def _grow(self, index: Ints, box: Box, depth: int) -> Iterator[tuple[Box, str, Ints]]:
        saved, best = self._split(index)
        if saved < self.need and depth > 1:
            saved, best = self._pair(index)
        if not depth or saved < self.need:
            yield box, self.ways[int(self._sums(index).argmin())], index
            return
        what, inside = self.splits[best], self.masks[best, index]
        yield from self._grow(index[inside], _within(box, what, inside=True), depth - 1)
        yield from self._grow(index[~inside], _within(box, what, inside=False), depth - 1)

    def _sums(self, index: Ints) -> Array64:
        """Losses of all ways over rows."""
        return self._held(self.losses[index].sum(0), self.known[index].sum(0))

    def _held(self, sums: Array64, known: Array64) -> Array64:
        held: Array64 = sums + WRONG * np.maximum(self.least - known, 0)
        return held

    def _split(self, index: Ints) -> tuple[float, int]:
        """(what the best split of rows saves, which it is)."""
        losses, known, inside = self.losses[index], self.known[index], self.masks[:, index]
        counts, left = inside.sum(1), inside.astype(np.float64)
        sums, numbers = left @ losses, left @ known
        saved = self._sums(index).min() - self._held(sums, numbers).min(1)
        saved -= self._held(losses.sum(0) - sums, known.sum(0) - numbers).min(1)
        saved[np.minimum(counts, len(index) - counts) < self.least] = -1
        best = _first(saved)
        return float(saved[best]), best

    def _pair(self, index: Ints) -> tuple[float, int]:
        """As `_split`, of two splits in a row, where one alone saves nothing; half of what both save."""
        counts = self.masks[:, index].sum(1)
        tried = np.flatnonzero(np.minimum(counts, len(index) - counts) >= self.least)
        if not len(tried):
            return -1.0, 0
        inside = self.masks[np.ix_(tried, index)] * 1.0
        # By row, way and what is summed: losses, whether the way is there, rows. Then also by split, and by two splits.
        rows = np.stack((self.losses[index], self.known[index], np.ones((len(index), len(self.ways)))), 2)
        whole, one = rows.sum(0), np.einsum("in,nws->iws", inside, rows, optimize=True)
        two = np.stack([(inside * rows[:, way, what]) @ inside.T for way, what in np.ndindex(*whole.shape[:2])], -1)
        two = two.reshape(len(tried), len(tried), *whole.shape)
        saved, more = self._least(whole) - self._least(one) - self._least(whole - one), np.zeros(len(tried))
        for half, part in ((one, two), (whole - one, one[None] - two)):
            rest = half[:, None] - part
            gains = self._least(half)[:, None] - self._least(part) - self._least(rest)
            gains[np.minimum(part[..., 0, 2], rest[..., 0, 2]) < self.least] = 0.0
            more = np.maximum(more, gains.max(1))
        best = _first(saved + more)
        return float(saved[best] + more[best]) / 2, int(tried[best])

    def _least(self, sums: Array64) -> Array64:
        """The loss of the best way, by sums of losses and of rows that have the way."""
        best: Array64 = self._held(sums[..., 0], sums[..., 1]).min(-1)
        return best


def _first(saved: Array64) -> int:
    """Of the greatest, where sums in another order of the same numbers are equal."""
    return int(saved.round(9).argmax())


def _bounds(low: int, high: int) -> list[int]:
    """Round numbers to split at: 2^k and 3 * 2^k, and one more than powers of two, at which "up to" ends."""
    found = set()
    for k in range(40):
        found |= {1 << k, 3 << k, (1 << k) + 1} if k < 13 else {1 << k, 3 << k}
    return sorted(bound for bound in found if low < bound <= high)


def _within(box: Box, what: tuple[Any, ...], *, inside: bool) -> Box:
    dtypes, spans, divisors = box
    if what[0] == "dtypes":
        return (dtypes & what[1] if inside else dtypes - what[1]), spans, divisors
    if what[0] == "divisor":
        _, name, number = what
        others = tuple(one for one in divisors if one[0] != name or one[1] < 0 or number % one[1])
        return dtypes, spans, ((*others, (name, number)) if inside else (*divisors, (name, -number)))
    _, name, bound = what
    low, below = next(((a, b) for n, a, b in spans if n == name), (0, 0))
    kept = tuple(span for span in spans if span[0] != name)
    return dtypes, (*kept, (name, low, bound) if inside else (name, bound, below)), divisors


def learn(rows: Sequence[Row], need: float = NEED, between: Sequence[Row] = ()) -> list[Rule]:
    """The table for these rows, and those that are expected `between` them."""
    rows = [*(replace(row, weight=NAMED) if row.named else row for row in rows), *between]
    general = {kind: _rules(kind, rows, need, []) for kind in CLASSES if not kind.fast}
    whole = list(itertools.chain(*general.values()))
    found = (_rules(kind, rows, need, whole) if kind.fast else general[kind] for kind in CLASSES)
    return list(itertools.chain(*found))


def _rules(kind: _Class, rows: Sequence[Row], need: float, general: Sequence[Rule]) -> list[Rule]:
    """Of one class; for "fast" those whose way the rules of auto do not have."""
    rows = [row for row in rows if kind.holds(row)]
    counts = collections.Counter(
        way for row in rows for way in row.ways(kind.fast) if not kind.fast or way in row.unsafe
    )
    ways = sorted(way for way, count in counts.items() if count >= LEAST_ROWS)
    if len(rows) < LEAST_ROWS or not ways:
        return []
    ways = ["", *ways] if kind.fast else ways
    others = [SPATIAL] * len(rows)

    def table() -> Array64:
        pairs = zip(rows, others, strict=True)
        return np.array([[_cost(row, way, other, kind.fast) for way in ways] for row, other in pairs])

    last: list[Rule] = []
    if kind.fast:
        others = [chosen(general, row) for row in rows]
    else:  # what is left where a leaf's way cannot be built
        for _ in range(2):
            way = ways[int(table().sum(0).argmin())]
            if way == SPATIAL or any(rule.algorithm == way for rule in last):
                break
            last.append(_rule(kind, ANY, way, ""))
            others = [chosen(last, row) for row in rows]
    found = []
    known = np.array([[not way or way in row.wrong or _has(row, way, kind.fast) for way in ways] for row in rows])
    for box, way, index in _Tree(rows, ways, table(), known, need).leaves:
        if way:
            rule = _rule(kind, box, way, "")
            found.append(replace(rule, why=_why([rows[i] for i in index], way, kind.fast)))
    return found + [replace(rule, why=_why(rows, rule.algorithm, False)) for rule in last if not _total(found, rule)]


def _total(found: Sequence[Rule], rule: Rule) -> bool:
    """Whether the rule has come before for whatever it fits."""
    return any(
        one.algorithm == rule.algorithm and not one.spans and not one.divisors and one.dtypes >= rule.dtypes
        for one in found
    )


def _cost(row: Row, way: str, other: str, fast: bool) -> float:
    taken = way if _has(row, way, fast) else other
    if way in row.wrong or taken not in row.us:
        return WRONG * row.weight
    return _loss(row, row.us[taken], fast) * row.weight


def _rule(kind: _Class, box: Box, way: str, why: str) -> Rule:
    dtypes, spans, divisors = box
    divisors = tuple(one for one in divisors if one[1] > 0)  # the rules for what they divide come before
    saved = kind.saved
    ordered = tuple(sorted(spans, key=lambda span: SIZES.index(span[0])))
    return Rule(kind.operation, dtypes, kind.layout, way, saved, kind.fast, ordered, divisors, why)


def _why(rows: Sequence[Row], way: str, fast: bool) -> str:
    """A sentence from the data."""
    rows = [row for row in rows if row.weight >= 1 and _has(row, way, fast)]
    if not rows:
        return "between the shapes of the sweep the fastest by its expected time"
    near = sum(row.us[way] <= 1.03 * min(row.us[one] for one in row.ways(fast)) for row in rows)
    text = f"of all ways the fastest, or within 3 % of it, on {near} of {len(rows)} shapes of the sweep"
    ratios = [row.us[SPATIAL] / row.us[way] for row in rows if SPATIAL in row.us]
    if ratios and statistics.median(ratios) >= 1.05:
        text += f", in the median {statistics.median(ratios):.2g} times as fast as spatial"
    return text + (f"; but {BUT[way.partition(':')[0]]}" if fast and way.partition(":")[0] in BUT else "")


# ---------------------------------------------------------------- what it gains


def folds(sweeps: Sequence[Sweep]) -> Iterator[tuple[list[Sweep], list[Row]]]:
    """Sweeps to learn from and rows to judge by, of different shapes."""
    shapes = list(dict.fromkeys(row.shape for sweep in sweeps for row in sweep.rows if not row.named))
    for i in range(FOLDS):
        held = set(shapes[i::FOLDS])
        some = [replace(sweep, rows=[row for row in sweep.rows if row.shape not in held]) for sweep in sweeps]
        yield some, [row for sweep in sweeps for row in sweep.rows if row.shape in held]


def held_out(sweeps: Sequence[Sweep], need: float) -> Iterator[tuple[Row, str, str, bool]]:
    """Rows of shapes that the table was not made from, the ways of auto and fast, and whether PyTorch takes it."""
    for some, others in folds(sweeps):
        rules = learn(_rows(some), need, [row for one in some for row in times.between(one.rows, times.fit(one.rows))])
        boxes = faster(_rows(some), rules)
        for row in others:
            yield row, chosen(rules, row), chosen(rules, row, fast=True), left(boxes, row)


def _rows(sweeps: Iterable[Sweep]) -> list[Row]:
    return [row for sweep in sweeps for row in sweep.rows]


@dataclass(frozen=True)
class Score:
    """Speed over PyTorch's of a choice."""

    mean: float
    lowest: float
    lost: int
    """Rows below `NEAR`."""
    avoidable: int
    """Those of them where a way that may be taken is not."""
    rows: int
    slowdown: float
    """Time over that of the fastest way, geometric mean over all rows."""

    def __str__(self) -> str:
        return (
            f"{self.mean:.3f} (lowest {self.lowest:.2f}), {self.lost} of {self.rows} rows below {NEAR}, "
            f"{self.avoidable} of them avoidable; {self.slowdown:.3f} times the fastest way's time"
        )


def score(rows: Iterable[Row], choice: Callable[[Row], str], fast: bool = False) -> Score:
    """Of ways chosen for rows."""
    ratios, slowdowns, avoidable = [], [], 0
    for row in rows:
        us = row.us.get(choice(row))
        ways = row.ways(fast)
        if us is None or not ways:
            continue
        best = min(row.us[way] for way in ways)
        slowdowns.append(math.log(us / best))
        if row.torch is None:
            continue
        ratios.append(row.torch / us)
        avoidable += ratios[-1] < NEAR <= row.torch / best
    lost = sum(ratio < NEAR for ratio in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan
    over = math.exp(statistics.fmean(slowdowns)) if slowdowns else math.nan
    return Score(mean, min(ratios, default=math.nan), lost, avoidable, len(ratios), over)


def _best(fast: bool) -> Callable[[Row], str]:
    return lambda row: min(row.ways(fast), key=lambda way: row.us[way], default=SPATIAL)


def report(sweeps: Sequence[Sweep]) -> str:
    """Lines about the table: on the shapes that it was made from, and on shapes held out."""
    rules = rules_of(sweeps)
    judged = {need: list(held_out(sweeps, need)) for need in NEEDS}
    losses = {
        need: statistics.fmean(_cost(row, way, SPATIAL, False) for row, way, *_ in judged[need]) for need in NEEDS
    }
    lines = [
        f"{len(rules)} rules. Loss on shapes held out, by what a split must save: "
        + ", ".join(f"{need:g}: {loss:.4f}" for need, loss in losses.items())
    ]
    boxes = faster(_rows(sweeps), rules)
    lines.append(f'{len(boxes)} boxes of what is left to PyTorch by prefer="fastest"')
    out = {id(row): (auto, fast, gone) for row, auto, fast, gone in judged[NEED]}
    return "\n".join(itertools.chain(lines, *(["", *_of_device(sweep, rules, boxes, out)] for sweep in sweeps)))


def _of_device(
    sweep: Sweep, rules: Sequence[Rule], boxes: Sequence[Left], out: dict[int, tuple[str, str, bool]]
) -> Iterator[str]:
    """Lines of the report; `out` has what is taken by tables that were made without a row's shape."""
    drawn, named = [row for row in sweep.rows if not row.named], [row for row in sweep.rows if row.named]
    torch = sweep.head["torch"]
    choices: list[tuple[str, Callable[[Row], str], bool]] = [
        ("auto when swept", lambda row: row.auto.partition("+")[0], False),
        ("auto of this table", lambda row: chosen(rules, row), False),
        ("auto, shapes held out", lambda row: out[id(row)][0], False),
        ("the fastest way auto may take", _best(False), False),
        ("fast when swept", lambda row: row.fast.partition("+")[0], True),
        ("fast of this table", lambda row: chosen(rules, row, True), True),
        ("fast, shapes held out", lambda row: out[id(row)][1], True),
        ("the fastest way of all", _best(True), True),
    ]
    yield (
        f"{sweep.head['device']}, {' '.join(map(str, sweep.head['library']))}, PyTorch {torch.get('version', 'none')}, "
        f"{sweep.head['date']}: {len(drawn)} rows of {len({row.shape for row in drawn})} random shapes "
        f"({sweep.head['shapes']}), {len(named)} of layers of networks"
    )
    yield "Speed over PyTorch's, geometric mean:"
    for name, choice, fast in choices:
        yield f"  {name:29} {score(drawn, choice, fast)}"
    for name, choice, fast in choices[:2] if named else ():
        yield f"  {'networks: ' + name:29} {score(named, choice, fast)}"
    yield 'With prefer="fastest", where PyTorch\'s kernel may take the call:'
    some = [row for row in drawn if comparable(row)]
    yield f"  {'without it':29} {score(some, lambda row: out[id(row)][0])}"
    yield f"  {'shapes held out':29} {score(some, lambda row: 'torch' if out[id(row)][2] else out[id(row)][0])}"
    for name, of in (("of this table", drawn), ("networks: of this table", named)):
        some = [row for row in of if comparable(row)]
        yield f"  {name:29} {score(some, lambda row: 'torch' if left(boxes, row) else chosen(rules, row))}"
    yield "By operation, layout and dtype, shapes held out:"
    for operation, layout, dtype in itertools.product(OPERATIONS, ("nchw", "nhwc"), ("f32", "f16", "bf16")):
        some = [r for r in drawn if (r.operation, r.layout, r.dtype) == (operation, layout, dtype) and r.saved]
        if some:
            yield f"  {operation:8} {layout} {dtype:4} {score(some, lambda row: out[id(row)][0])}"
    lost = [row for row in drawn if row.torch and row.torch / min(row.us[w] for w in row.ways(False)) < NEAR]
    yield f"Rows below {NEAR} whatever way auto takes: {len(lost)}"
    for row in sorted(lost, key=lambda row: (row.torch or 0) / min(row.us[w] for w in row.ways(False))):
        way = _best(False)(row)
        dims = "x".join(map(str, row.shape))
        ratio = (row.torch or 0) / row.us[way]
        yield f"  {ratio:.2f} {row.operation:8} {row.dtype:4} {row.layout} {dims:20} {way} {row.us[way]:g} us"


def plotted(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """What `benchmarks.plot` draws: auto beside PyTorch on random shapes held out, as a contender for each device."""
    names = {id(row): f"auto, {sweep.head['device'].removeprefix('NVIDIA ')}" for sweep in sweeps for row in sweep.rows}
    judged = [
        {
            "operation": row.operation,
            "contenders": {names[id(row)]: {"seconds": row.us[way]}, "torch": {"seconds": row.torch}},
        }
        for row, way, *_ in held_out(sweeps, NEED)
        if row.torch is not None and way in row.us and not row.named
    ]
    devices = list(dict.fromkeys(names.values()))
    label, *version = sweeps[0].head["library"]
    return {
        "rows": judged,
        "algorithms": devices,
        "summary": {name: {"base": "torch"} for name in devices},
        "library": {"label": label, "version": version},
        "device": "random shapes that the table was not made from",
    }


# ---------------------------------------------------------------- files of the package


def header(rules: Sequence[Rule], sweeps: Sequence[Sweep], sources: Sequence[str]) -> str:
    """C: rows of an array of ``rule``."""
    lines = ["/* Made by `python -m benchmarks.rules write` from times in"]
    for sweep, source in zip(sweeps, sources, strict=True):
        label, *version = sweep.head["library"]
        what = f"{sweep.head['device']}, {label} {'.'.join(map(str, version))}, {sweep.head['date']}"
        lines.append(f" * {source}: {what}{'. */' if sweep is sweeps[-1] else ','}")
    for rule in rules:
        names = {"f32": "SINGLE", "f16": "HALVES", "bf16": "HALVES"}
        dtypes = " | ".join(sorted({names[name] for name in rule.dtypes}))
        parts = [OPERATIONS[rule.operation], dtypes, rule.layout]
        parts += [f".saved = {rule.saved}"] * bool(rule.saved) + [".fast = 1"] * rule.fast
        parts += [f".{name} = {number}" for name, number in rule.divisors]
        parts += [f".{name} = {{{low}, {below}}}" for name, low, below in rule.spans]
        parts.append(f'.algorithm = "{rule.algorithm}"')
        lines += _wrapped([f"{part}," for part in parts], rule.why)
    return "\n".join(lines) + "\n"


def _wrapped(parts: Sequence[str], why: str) -> list[str]:
    """One initializer in lines of 120."""
    lines = ["    {" + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) > 120:
            lines.append("     " + part)
        else:
            lines[-1] += " " + part
    words, pieces = why.split(), [""]
    for i, word in enumerate(words):
        piece = pieces[-1] + word + (" " if i < len(words) - 1 else "")
        if len(piece) > 100:
            pieces.append("")
            piece = word + (" " if i < len(words) - 1 else "")
        pieces[-1] = piece
    for i, piece in enumerate(pieces):
        lines.append(("     .why = " if not i else "            ") + f'"{piece}"')
    lines[-1] += "},"
    return lines


# ---------------------------------------------------------------- where PyTorch is faster

TORCH_NAMES = {"train": "training", "infer": "inference", "backward": "backward"}
DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
LOST = 0.1
"""What a row that is slower than PyTorch's costs besides."""


def comparable(row: Row) -> bool:
    """Whether PyTorch's kernel may take the call: right, and memory that `pybnorm.torch` knows by its layout.

    It rounds dscale and dbias of 16-bit backward over channels-first memory to x's dtype where its own kernel runs, and
    its channels-last inference in float32 loses digits where the mean is large.
    """
    if row.torch is None or not row.saved or (not row.first and len(row.shape) == 3):
        return False
    if (
        row.operation == "backward"
        and row.first
        and (row.dtype == "bf16" or (row.dtype == "f16" and len(row.shape) == 2))
    ):
        return False
    return not (row.operation == "infer" and not row.first and row.dtype == "f32")


Left = tuple[str, bool, tuple[str, ...], dict[str, tuple[int, int]], bool | None]
"""A box: operation, whether memory is channels-first, dtypes, spans by size, and whether an image's channels at one
position fill whole 16 bytes; None: either."""
LEFT_SIZES, WHOLE = ("images", "channels", "size", "kilobytes"), ("channel_bytes", 16)


def faster(rows: Sequence[Row], rules: Sequence[Rule]) -> list[Left]:
    """Boxes where PyTorch takes less time than what auto takes by these rules.

    What is left to PyTorch costs what ours would have saved; what is not costs `LOST` if it is slower.
    """
    boxes: list[Left] = []
    for operation, first in itertools.product(OPERATIONS, (True, False)):
        some = [row for row in rows if row.operation == operation and row.first == first and comparable(row)]
        some = [row for row in some if chosen(rules, row) in row.us]
        if len(some) < 2 * LEAST_ROWS:
            continue
        ratios = np.array([math.log((row.torch or 0) / row.us[chosen(rules, row)]) for row in some])
        losses = np.stack((LOST * (ratios < math.log(NEAR)), ratios), 1)
        splits = [frozenset((name,)) for name in ("f32", "bf16")]
        whole: dict[str, tuple[int, ...]] = {WHOLE[0]: WHOLE[1:]}
        tree = _Tree(some, ("ours", "torch"), losses, np.ones(losses.shape, np.bool_), NEED, LEFT_SIZES, whole, splits)
        for (dtypes, spans, divisors), way, index in tree.leaves:
            if way == "torch":
                names = tuple(sorted({some[i].dtype for i in index} & dtypes))
                bounds = {name: (low, below) for name, low, below in spans}
                boxes.append((operation, first, names, bounds, divisors[0][1] > 0 if divisors else None))
    return boxes


def left(boxes: Iterable[Left], row: Row) -> bool:
    """Whether ``prefer="fastest"`` leaves a call to PyTorch."""
    return comparable(row) and any(
        (operation, first) == (row.operation, row.first)
        and row.dtype in dtypes
        and all(low <= row.value(name) < (below or math.inf) for name, (low, below) in spans.items())
        and whole in (None, row.value(WHOLE[0]) % WHOLE[1] == 0)
        for operation, first, dtypes, spans, whole in boxes
    )


def faster_source(boxes: Sequence[Left], sweeps: Sequence[Sweep]) -> str:
    """Python: the table of the boxes.

    Raises
    ------
    ValueError
        The sweeps are of different versions.
    """
    if not boxes:
        return "MEASURED: tuple[Any, ...] = ()\n"
    versions = {
        (".".join(sweep.head["torch"]["version"].split(".")[:2]), ".".join(map(str, sweep.head["library"][1:3])))
        for sweep in sweeps
    }
    if len(versions) != 1:
        raise ValueError(f"sweeps of different versions: {sorted(versions)}")
    lines = ["MEASURED: tuple[Any, ...] = (", "    ("]
    devices = ", ".join(f'"{sweep.head["device"]}"' for sweep in sweeps)
    lines += [f"        ({devices}{',' * (len(sweeps) == 1)}),"]
    lines += [f'        "{word}",' for version in versions for word in version]
    found = []
    for operation, first, dtypes, spans, whole in boxes:
        names = ", ".join(f'"{DTYPE_NAMES[name]}"' for name in dtypes) + ("," if len(dtypes) == 1 else "")
        parts = [f'"{TORCH_NAMES[operation]}"', f"({names})", '"first"' if first else '"last"']
        for name in ("images", "channels", "size"):
            low, below = spans.get(name, (0, 0))
            parts.append(f"({max(low, 1)}, {below - 1 if below else '1 << 40'})")
        low, below = spans.get("kilobytes", (0, 0))
        parts += [f"({low * 1024 / 1e6!r}, {below * 1024 / 1e6 if below else '1e9'})", str(whole)]
        line = f"            ({', '.join(parts)}),"
        lines_of = ["            (", *(f"                {part}," for part in parts), "            ),"]
        found += [line] if len(line) <= 120 else lines_of
    alone = f"        ({found[0].strip()}),"
    lines += [alone] if len(found) == 1 and len(alone) <= 120 else ["        (", *found, "        ),"]
    return "\n".join([*lines, "    ),", ")"]) + "\n"


KNOWN = (Rule("train", frozenset(("f32",)), "FIRST", SPATIAL, spans=(("channels", 192, 0), ("size", 2, 0))),)
"""Too few shapes for a leaf of the tree, and they are common ones: float32 layers of image networks."""


def rules_of(sweeps: Sequence[Sweep]) -> list[Rule]:
    """The rules of what was stored, those of `KNOWN` in front of auto's."""
    rows = _rows(sweeps)
    found = learn(rows, between=[row for one in sweeps for row in times.between(one.rows, one.head["times"])])
    front = next((i for i, rule in enumerate(found) if not rule.fast), len(found))
    known = [replace(one, why=_why([r for r in rows if one.fits(r, False)], one.algorithm, False)) for one in KNOWN]
    return [*found[:front], *known, *found[front:]]


def made(paths: Sequence[Path]) -> tuple[str, str]:
    """The header and the module from stored rows, of a file for each device."""
    sweeps = [load([path]) for path in paths]
    rules = rules_of(sweeps)
    names = [
        str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else path.name for path in paths
    ]
    head = FASTER.read_text(encoding="utf-8").partition("\nMEASURED")[0]  # what it says of itself
    return header(rules, sweeps, names), f"{head}\n{faster_source(faster(_rows(sweeps), rules), sweeps)}"


STORED = tuple(ROOT / "docs" / "results" / f"{name}-sweep.txt" for name in ("h200", "h100"))
"""What the files of the package are made from."""


def _main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rules", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("store")
    keep.add_argument("file", type=Path, help="takes the rows")
    keep.add_argument("sweeps", nargs="+", type=Path, help=f"files of the schema {SCHEMA}, of one device")
    for name in ("write", "report"):
        commands.add_parser(name).add_argument("files", nargs="*", type=Path, default=STORED, help="of one device each")
    commands.add_parser("plot").add_argument("target", help="SVG, PNG or PDF")
    given = parser.parse_args()
    if given.command == "store":
        sweep = load(given.sweeps)
        store(replace(sweep, head=sweep.head | {"times": times.fit(sweep.rows)}), given.file)
    elif given.command == "write":
        for target, text in zip((HEADER, FASTER), made(given.files), strict=True):
            target.write_text(text, encoding="utf-8")
    elif given.command == "plot":
        plot.check(given.target)
        plot.draw(plotted([load([path]) for path in STORED]), given.target)
    else:
        print(report([load([path]) for path in given.files]))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
