"""Counts the elements of an output that classes of kernels hold, and keeps the worst."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected, Part
from pybnorm.check.judging.bounds.verdict import WORST_POINTS, Point
from pybnorm.check.language.data import round_to
from pybnorm.enums import DataType
from pybnorm.reference.namespaces import Array, Foreign
from pybnorm.reference.threads import in_threads


@dataclasses.dataclass
class Tally:
    """Counts of an output's elements, and the worst of them."""

    ratio: float = 0.0
    finite_ratio: float = 0.0
    """Of the elements that are finite."""
    over: int = 0
    undecided: int = 0
    unjudged: int = 0
    wild: int = 0
    """Of `over`: elements that are not finite."""
    different: int = 0
    """Elements that are not the correct value, rounded; not all are counted where there is one."""
    elements: int = 0
    noticed: float = math.inf
    worst: list[Point] = dataclasses.field(default_factory=list)

    @property
    def floor(self) -> float:
        """The ratio that a point must be beyond to be one of the worst."""
        return self.worst[-1].ratio if len(self.worst) == WORST_POINTS else 0.0

    def add(self, other: Tally) -> None:
        """Add the counts of other elements."""
        for name in ("over", "undecided", "unjudged", "wild", "different", "elements"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ratio, self.finite_ratio = max(self.ratio, other.ratio), max(self.finite_ratio, other.finite_ratio)
        self.noticed = min(self.noticed, other.noticed)
        self.worst = sorted([*self.worst, *other.worst], key=lambda point: -point.ratio)[:WORST_POINTS]


def compare(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> Tally:
    """Count what `classes` together do not hold; ratios and points are those of the last class."""
    shares = expected.shares(output)
    if len(shares) == 1:
        return _compare(expected, output, got, classes)
    next(expected.parts(output, got, classes))  # what all need is found once
    tallies = [Tally() for _ in shares]

    def count(number: int) -> None:
        tallies[number] = _compare(shares[number], output, got, classes)

    in_threads(count, range(len(shares)))
    whole = tallies[0]
    for tally in tallies[1:]:
        whole.add(tally)
    return whole


class Held(NamedTuple):
    """A block of an output, held against its classes together; ratios are those of the last."""

    judged: Array
    """Elements of which the correct value is certain."""
    over: Array
    """Judged elements that no class holds."""
    open: Array
    """Elements that no class can judge."""
    wild: Array
    """Elements that are not finite."""
    ratio: Array


def held(expected: Expected, output: str, part: Part) -> Held:
    """Say which elements of a block are wrong."""
    assert part.got is not None
    largest = expected.largest(output)
    right, values = part.reference, part.got
    with np.errstate(all="ignore"):
        error = np.abs(values - right)
        finite, size = np.isfinite(values), np.abs(right)
        inside = np.zeros_like(right, bool)
        judged = np.zeros_like(right, bool)
        for bound, undecided in part.classes:
            in_range = np.isfinite(right) & (size + bound <= largest)
            if expected.overflows(output):
                in_range &= finite
            judged |= in_range
            ratio = np.where(error == 0, 0.0, error / bound)
            ratio = np.where(in_range, np.where(finite, ratio, np.inf), 0.0)
            inside |= in_range & ~undecided & (ratio <= 1)
        wild = judged & ~finite
        # a class whose bound is out of range says as little as one that is undecided
        open_ = judged & ~inside & ~wild & (undecided | ~in_range)
        return Held(judged, judged & ~inside & ~open_, open_, wild, np.where(wild, np.inf, ratio))


def _compare(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> Tally:
    tally, largest, dtype = Tally(), expected.largest(output), expected.dtype(output)
    for part in expected.parts(output, got, classes):
        assert part.got is not None
        with np.errstate(all="ignore"):
            error = part.got - part.reference
            np.abs(error, out=error)
            if _add_ordinary(tally, part, error, largest, dtype):
                continue
            looked, size, (bound, undecided) = held(expected, output, part), np.abs(part.reference), part.classes[-1]
            different = round_to(part.reference, dtype).astype(np.float64) != part.got
            relative = np.where(looked.judged & (size > 0) & ~undecided, bound / size, np.inf)
        whole = Tally(
            ratio=float(looked.ratio.max(initial=0.0)),
            finite_ratio=float(looked.ratio.max(initial=0.0, where=np.isfinite(part.got))),
            elements=size.size,
            noticed=float(relative.min(initial=math.inf)),
            worst=_worst(tally, part, looked.ratio),
        )
        counted = {"over": looked.over, "undecided": looked.open, "unjudged": ~looked.judged, "wild": looked.wild}
        for name, where in (counted | {"different": looked.judged & different}).items():
            setattr(whole, name, int(np.count_nonzero(where)))
        tally.add(whole)
    return tally


def _add_ordinary(tally: Tally, part: Part, error: Array, largest: float, dtype: DataType) -> bool:
    """Count a block that is finite, in range, decided and held by the last class everywhere; False if it is not.

    A NaN makes every comparison of a largest or least value false.
    """
    bound, undecided = part.classes[-1]
    if not isinstance(undecided, Foreign):  # it may be spread from a smaller array
        undecided = undecided[tuple(slice(None) if step else slice(0, 1) for step in undecided.strides)]
    if bool(undecided.any()):
        return False
    size = np.abs(part.reference)
    most = float(error.max(initial=0.0))
    if not (float((size + bound).max(initial=0.0)) <= largest and most < math.inf):
        return False
    ratio = error / bound if most > 0 else error
    whole = Tally(elements=error.size, noticed=float((bound / size).min(initial=math.inf)))
    whole.ratio = whole.finite_ratio = float(ratio.max(initial=0.0)) if most > 0 else 0.0
    if not (whole.ratio <= 1 and whole.noticed >= 0):
        return False
    if most > 0:
        if not tally.different:  # whether there is any is all that is asked
            stored = round_to(part.reference, dtype).astype(np.float64)
            whole.different = int(np.count_nonzero(stored != part.got))
        if whole.ratio > tally.floor:
            whole.worst = _worst(tally, part, ratio)
    tally.add(whole)
    return True


def _worst(tally: Tally, part: Part, ratio: Array) -> list[Point]:
    """The points of a block's largest ratios that are among the worst with those that are there."""
    flat = ratio.ravel()
    if isinstance(flat, Foreign):
        chosen = _largest(flat, tally.floor)
    else:
        chosen = np.flatnonzero(flat > tally.floor)
        if chosen.size > WORST_POINTS:
            least = np.partition(flat[chosen], -WORST_POINTS)[-WORST_POINTS]  # of equal ones the first
            above, equal = chosen[flat[chosen] > least], chosen[flat[chosen] == least]
            chosen = np.sort(np.concatenate([above, equal[: WORST_POINTS - above.size]]))
    assert part.got is not None
    local = np.unravel_index(chosen, ratio.shape)
    places = [(k + s.start).tolist() for k, s in zip(local, part.index, strict=True)]
    values = [np.asarray(a[local]).tolist() for a in (part.reference, part.got, part.classes[-1][0])]
    return list(map(Point, zip(*places, strict=True), *values, np.asarray(flat[chosen]).tolist()))


def _largest(flat: Foreign, floor: float) -> Array:
    flat = flat.copy()
    found: list[int] = []
    while len(found) < WORST_POINTS and float(flat[place := int(np.argmax(flat))]) > floor:
        found.append(place)
        flat[place] = 0.0
    return np.array(found, int)
