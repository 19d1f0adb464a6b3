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
from pybnorm.check.language.problem import DATA_OUTPUTS, vector_dtype
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
    return _together(tallies)


def _together(tallies: list[Tally]) -> Tally:
    counted = ("over", "undecided", "unjudged", "wild", "different", "elements")
    points = sorted((point for tally in tallies for point in tally.worst), key=lambda point: -point.ratio)
    return Tally(
        ratio=max(tally.ratio for tally in tallies),
        finite_ratio=max(tally.finite_ratio for tally in tallies),
        noticed=min(tally.noticed for tally in tallies),
        worst=points[:WORST_POINTS],
        **{name: sum(getattr(tally, name) for tally in tallies) for name in counted},
    )


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
    tally = Tally()
    data = output in DATA_OUTPUTS
    largest = expected.largest(output)
    dtype = expected.problem.dtype if data else vector_dtype(expected.problem, output)
    for part in expected.parts(output, got, classes):
        assert part.got is not None
        right, values = part.reference, part.got
        bound, undecided = part.classes[-1]
        with np.errstate(all="ignore"):
            error = values - right
            np.abs(error, out=error)
            if _add_ordinary(tally, part, error, largest, dtype):
                continue
            looked = held(expected, output, part)
            finite, size, judged, wild = np.isfinite(values), np.abs(right), looked.judged, looked.wild
            tally.finite_ratio = max(tally.finite_ratio, float(looked.ratio.max(initial=0.0, where=finite)))
            different = round_to(right, dtype).astype(np.float64) != values
            relative = np.where(judged & (size > 0) & ~undecided, bound / size, np.inf)
        tally.noticed = min(tally.noticed, float(relative.min(initial=math.inf)))
        tally.elements += right.size
        tally.different += int(np.count_nonzero(judged & different))
        tally.unjudged += int(np.count_nonzero(~judged))
        tally.over += int(np.count_nonzero(looked.over))
        tally.wild += int(np.count_nonzero(wild))
        tally.undecided += int(np.count_nonzero(looked.open))
        tally.ratio = max(tally.ratio, float(looked.ratio.max(initial=0.0)))
        _remember(tally.worst, part, error, bound, looked.ratio)
    return tally


def _add_ordinary(tally: Tally, part: Part, error: Array, largest: float, dtype: DataType) -> bool:
    """Count a block that the last class holds, with a sharp look at none; False if it takes one.

    Ordinary is a block without a NaN or infinity in what is correct, what came and the bound, in the range of the type,
    decided everywhere and within the bound. A NaN makes every comparison of a largest or least value false.
    """
    bound, undecided = part.classes[-1]
    if _any(undecided):
        return False
    size = np.abs(part.reference)
    most = float(error.max(initial=0.0))
    if not (float((size + bound).max(initial=0.0)) <= largest and most < math.inf):
        return False
    ratio, worst = error, 0.0
    if most > 0:
        ratio = error / bound
        worst = float(ratio.max(initial=0.0))
    noticed = float((bound / size).min(initial=math.inf))
    if not (worst <= 1 and noticed >= 0):
        return False
    tally.elements += error.size
    tally.noticed = min(tally.noticed, noticed)
    tally.ratio, tally.finite_ratio = max(tally.ratio, worst), max(tally.finite_ratio, worst)
    if most > 0:
        if not tally.different:  # whether there is any is all that is asked
            stored = round_to(part.reference, dtype).astype(np.float64)
            tally.different = int(np.count_nonzero(stored != part.got))
        if worst > _floor(tally.worst):
            _remember(tally.worst, part, error, bound, ratio)
    return True


def _any(values: Array) -> bool:
    """Say whether an element is true, of an array that may be spread from a smaller one."""
    if isinstance(values, Foreign):
        return bool(values.any())
    return bool(values[tuple(slice(None) if step else slice(0, 1) for step in values.strides)].any())


def _floor(worst: list[Point]) -> float:
    return worst[-1].ratio if len(worst) == WORST_POINTS else 0.0


def _largest(flat: Foreign, floor: float) -> Array:
    flat = flat.copy()
    found: list[int] = []
    while len(found) < WORST_POINTS and float(flat[place := int(np.argmax(flat))]) > floor:
        found.append(place)
        flat[place] = 0.0
    return np.array(found, int)


def _remember(worst: list[Point], part: Part, error: Array, bound: Array, ratio: Array) -> None:
    """Merge a block's largest ratios into the list of worst points."""
    floor = _floor(worst)
    flat = ratio.ravel()
    if isinstance(flat, Foreign):
        chosen = _largest(flat, floor)
    else:
        chosen = np.flatnonzero(flat > floor)
        if chosen.size > WORST_POINTS:
            least = np.partition(flat[chosen], -WORST_POINTS)[-WORST_POINTS]  # of equal ones the first
            above, equal = chosen[flat[chosen] > least], chosen[flat[chosen] == least]
            chosen = np.sort(np.concatenate([above, equal[: WORST_POINTS - above.size]]))
    assert part.got is not None
    local = np.unravel_index(chosen, ratio.shape)
    places = [(k + s.start).tolist() for k, s in zip(local, part.index, strict=True)]
    values = [np.asarray(a[local]).tolist() for a in (part.reference, part.got, bound)]
    worst += map(Point, zip(*places, strict=True), *values, np.asarray(flat[chosen]).tolist())
    worst.sort(key=lambda point: -point.ratio)
    del worst[WORST_POINTS:]
