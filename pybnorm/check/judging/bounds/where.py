"""The smallest description of the elements of an output that are wrong, and a picture of them.

A description is a conjunction of up to `DEEPEST` conditions on the place of an element: its channel, image, row and
column, its place in a plane or a channel, its offset in memory; each one value, a few values, a range, both ends, or a
remainder by a power of two or a small number. The best is the one that says in the fewest bits which elements are
wrong: of a box of S elements with w wrong ones among T with W,

    bits = log2 binomial(S, w) + log2 binomial(T - S, W - w) + bits of the conditions

so that no threshold says when a pattern is one. Channel and place in the channel are told apart, and offsets in memory
are a sum of what each gives, so that S is counted without a look at the elements.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.tally import held
from pybnorm.check.judging.bounds.verdict import Verdict
from pybnorm.check.language.problem import DATA_OUTPUTS
from pybnorm.reference.namespaces import Array, on_host

Place = tuple[tuple[slice, ...], Array]
"""A block, and which of its elements."""

DEEPEST = 4
"""Conditions of a description."""
WIDEST = 4
"""Descriptions that are made longer at each step."""
LEAST, SHARE = 8.0, 0.02
"""Bits that a condition must save, by chance some of hundreds save a few; and of those that a list takes."""
SAMPLE = 1 << 15
"""Wrong elements that are looked at; all of them are counted at the end."""
LARGEST = 1 << 22
"""Places of a channel up to which conditions are counted."""
CHEAPEST = 2.0
"""Bits of the shortest condition."""
FEW = 4
"""Values that are listed."""
MODULUS = 1 << 12
"""The largest one."""
ODD = (3, 5, 6, 7, 12)
"""Others, of what does not lie in memory."""
STEP = 1 << 20
"""Elements that are counted at a time."""
CELLS = (24, 64)
"""Channels and positions of a picture."""
LEVELS = ".123456789x"
"""Of the largest error / bound in a cell: right, up to 2, 4, ... 256, more, and not finite."""


class Where(NamedTuple):
    """The place of an output's wrong elements."""

    text: str
    """The description; empty if there is no pattern."""
    wrong: int
    """Wrong elements that it covers."""
    right: int
    """Elements that it covers and that are not wrong."""
    picture: list[str]
    """A row for each channel, or some, with a letter of `LEVELS` for each position in it, or some."""


def levels(
    expected: Expected, output: str, got: Array, classes: tuple[Tier, ...], places: Iterable[Place] = ()
) -> Array:
    """Places of letters in `LEVELS` that say how wrong each element is; `places` has others that are wrong."""
    found = np.zeros(expected.shape(output), np.uint8)
    for part in expected.parts(output, got, classes):
        looked = held(expected, output, part)
        wrong, ratio = on_host(looked.over), on_host(looked.ratio)
        ratio = ratio[wrong]
        with np.errstate(all="ignore"):
            size = np.clip(np.ceil(np.log2(np.maximum(ratio, 1.0))), 1, 9)
        found[part.index][wrong] = np.where(np.isfinite(ratio), size, len(LEVELS) - 1)
    for index, where in places:
        found[index][on_host(where)] = len(LEVELS) - 1
    return found


def put(verdict: Verdict, found: Array, strides: tuple[int, ...]) -> None:
    """Say of a verdict where the elements are whose levels are not 0."""
    where = within(found, strides if verdict.output in DATA_OUTPUTS else ())
    verdict.where, verdict.covered, verdict.included, verdict.picture = where


def within(found: Array, strides: tuple[int, ...] = ()) -> Where:
    """Find where levels are not 0: of images, channels and a plane; `strides` are those of the output in memory."""
    grid = _Grid(found, strides)
    if not grid.wrong:
        return Where("", 0, 0, [])
    best = _search(grid)
    covered, size = grid.count(best)
    return Where(_text(grid, best, covered, size), covered, size - covered, _picture(found))


@dataclasses.dataclass(frozen=True, eq=False)
class _Axis:
    """A coordinate of an element: a function of its channel, of its place in the channel, or of both."""

    one: str
    letter: str
    size: int
    of: str
    """"channel", "place" or "memory"."""
    values: Callable[[Array, Array], Array]
    """The coordinate, by channel and place."""
    each: str = ""
    """The name of what has `size` of it."""


class _Grid:
    """The elements of an output as channels times places, with the coordinates of both."""

    def __init__(self, levels: Array, strides: tuple[int, ...]) -> None:
        images, self.channels, *plane = levels.shape
        self.inner = math.prod(plane)
        self.m = images * self.inner
        self.levels = levels.reshape(images, self.channels, self.inner)
        self.total, self.wrong = levels.size, int(np.count_nonzero(levels))
        names = {1: ("position",), 2: ("row", "column"), 3: ("slice", "row", "column")}
        inner = names.get(len(plane), tuple(f"index {i}" for i in range(len(plane))))
        axes = [_Axis("channel", "c", self.channels, "channel", lambda channel, place: channel)]
        axes += [_Axis("image", "n", images, "place", lambda channel, place: place // self.inner)]
        letters = "d" * (len(plane) - 2) + "hw"[max(0, 2 - len(plane)) :]
        steps = [math.prod(plane[i + 1 :]) for i in range(len(plane))]
        in_plane = [functools.partial(_index, step=step, size=size) for step, size in zip(steps, plane, strict=True)]
        axes += [_Axis(n, k, f.keywords["size"], "place", f) for n, k, f in zip(inner, letters, in_plane, strict=True)]
        element = functools.partial(_Axis, "element", "k")
        if len(plane) > 1:
            axes.append(element(self.inner, "place", lambda channel, place: place % self.inner, "plane"))
        if images > 1 and self.inner > 1:
            axes.append(element(self.m, "place", lambda channel, place: place, "channel"))
        if len(strides) == levels.ndim and self.m <= LARGEST:

            def offsets(channel: Array, place: Array) -> Array:
                place = place.astype(np.int64)
                own = sum(f(channel, place) * s for f, s in zip(in_plane, strides[2:], strict=True))
                return place // self.inner * strides[0] + channel * strides[1] + own

            axes.append(element(self.total, "memory", offsets, "memory"))
        self.axes = tuple(axis for axis in axes if axis.size > 1)
        self._coordinates: dict[_Axis, Array] = {}

    def sample(self) -> tuple[Array, Array]:
        """Channel and place in it of the wrong elements, or of `SAMPLE` of them."""
        flat = self.levels.ravel()
        if self.wrong > SAMPLE:
            rng = np.random.default_rng(11)
            drawn = rng.integers(0, flat.size, min(flat.size, int(1.2 * SAMPLE * self.total / self.wrong)))
            at = np.unique(drawn[flat[drawn] > 0])
        else:
            at = np.flatnonzero(flat)
        image, rest = np.divmod(at, self.channels * self.inner)
        channel, inside = np.divmod(rest, self.inner)
        return channel, image * self.inner + inside

    def coordinates(self, axis: _Axis) -> Array:
        """The coordinate of every channel, or of every place in the first one."""
        if axis.of == "channel":
            return np.arange(self.channels)
        if axis not in self._coordinates:
            self._coordinates[axis] = axis.values(np.zeros(1, int), np.arange(self.m, dtype=np.int32))
        return self._coordinates[axis]

    def count(self, conditions: tuple[_Condition, ...]) -> tuple[int, int]:
        """Wrong elements that hold all conditions, and all elements that do."""
        if not conditions:
            return self.wrong, self.total
        box = _Box(self, conditions)
        chosen, found = np.flatnonzero(box.masks["channel"]), 0
        places = box.masks["place"].reshape(-1, self.inner)
        memory = next((c for c in conditions if c.axis.of == "memory"), None)
        step = max(1, STEP // (self.channels * self.inner))
        for first in range(0, len(places), step):  # one by one: an output may be large
            own = places[first : first + step]
            if not own.any():
                continue
            wrong = (self.levels[first : first + step, chosen] > 0) & own[:, None]
            if memory is None:
                found += int(np.count_nonzero(wrong))
            elif wrong.any():
                image, channel, inside = np.nonzero(wrong)
                offsets = memory.axis.values(chosen[channel], (first + image) * self.inner + inside)
                found += int(np.count_nonzero(memory.holds(offsets)))
        return found, box.size(memory)


def _index(channel: Array, place: Array, step: int, size: int) -> Array:
    """An index of places in a plane; `numpy.unravel_index` makes all of them 64 bits wide."""
    return place // step % size


class _Box:
    """The elements that hold some conditions on channels and places, and how many of them hold one more."""

    def __init__(self, grid: _Grid, conditions: tuple[_Condition, ...]) -> None:
        self.grid = grid
        self.masks = {"channel": np.ones(grid.channels, bool), "place": np.ones(grid.m, bool)}
        for condition in conditions:
            if condition.axis.of != "memory":
                self.masks[condition.axis.of] &= condition.holds(grid.coordinates(condition.axis))
        self._sizes = {of: int(np.count_nonzero(mask)) for of, mask in self.masks.items()}
        self._counts: dict[_Axis, Array] = {}

    def size(self, condition: _Condition | None) -> int:
        """Elements that hold a condition, too."""
        if condition is None:
            return self._sizes["channel"] * self._sizes["place"]
        axis = condition.axis
        if axis.of == "memory":
            if condition.modulus:
                return condition.among(self._remainders)
            first, second = self._offsets
            ends = condition.low - 1, condition.high
            up_to = (int(np.searchsorted(second, end - first, side="right").sum()) for end in ends)
            below, within_ = up_to
            return within_ - below
        if axis not in self._counts:
            own = self.grid.coordinates(axis)[self.masks[axis.of]]
            self._counts[axis] = np.bincount(own, minlength=axis.size)
        return self._sizes["place" if axis.of == "channel" else "channel"] * condition.among(self._counts[axis])

    @functools.cached_property
    def _offsets(self) -> tuple[Array, Array]:
        """The share of each channel, and of each place in order, in an offset in memory."""
        (axis,) = (axis for axis in self.grid.axes if axis.of == "memory")
        channels = np.flatnonzero(self.masks["channel"])
        return axis.values(channels, np.zeros(1, int)), np.sort(self.grid.coordinates(axis)[self.masks["place"]])

    @functools.cached_property
    def _remainders(self) -> Array:
        """Numbers of elements by the remainder of their offset: those of channels and of places, convolved."""
        k = _largest_modulus(self.grid.total)
        counts = [np.fft.rfft(np.bincount(offsets % k, minlength=k)) for offsets in self._offsets]
        return np.rint(np.fft.irfft(counts[0] * counts[1])).astype(np.int64)


def _largest_modulus(size: int) -> int:
    """The largest power of 2 that tells coordinates below `size` apart."""
    return min(MODULUS, 1 << (size - 1).bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class _Condition:
    """Some values of a coordinate: those from `low` to `high`, of it or of its remainder, or a few."""

    axis: _Axis
    low: int
    high: int
    modulus: int = 0
    few: tuple[int, ...] = ()

    def holds(self, values: Array) -> Array:
        """Say which values are those."""
        if self.few:
            return np.isin(values, self.few)
        if self.modulus:
            values = values % self.modulus
        return (values >= self.low) & (values <= self.high)

    def among(self, counts: Array) -> int:
        """Elements that hold it, where so many have each value of the coordinate, or each remainder."""
        if self.few:
            return int(counts[list(self.few)].sum())
        if self.modulus:
            counts = np.pad(counts, (0, -len(counts) % self.modulus)).reshape(-1, self.modulus).sum(axis=0)
        return int(counts[self.low : self.high + 1].sum())

    @functools.cached_property
    def bits(self) -> float:
        """Bits to say it in: which of its kind it is, and 2 for the kind."""
        size = self.axis.size
        if self.few:
            return 4.0 if self._ends else 2 + _choices(size, len(self.few))
        if self.modulus:
            one = math.log2(self.modulus)
            return (6 if self.modulus in ODD else 4) + (
                one if self.low == self.high or self._at_an_end(self.modulus) else 2 * one
            )
        one = math.log2(size)
        return 2 + (one if self.low == self.high else one + 1 if self._at_an_end(size) else 2 * one)

    @property
    def _ends(self) -> bool:
        return self.axis.of == "place" and self.few == (0, self.axis.size - 1)

    def _at_an_end(self, size: int) -> bool:
        return self.low == 0 or self.high == size - 1

    def text(self) -> str:
        """Text such as "channels 1 to 5"."""
        axis, low, high = self.axis, self.low, self.high
        of = {"": "", "memory": " in memory"}.get(axis.each, f" of a {axis.each}")
        each = of.replace(" a ", " every ")
        if self.few:
            return f"the first and the last {axis.one}{of}" if self._ends else _listed(axis.one, self.few) + of
        if self.modulus:
            k = f"{axis.letter} % {self.modulus}"
            said = f"{k} == {low}"
            if low != high:
                said = f"{k} <= {high}" if low == 0 else f"{k} >= {low}"
                said = said if self._at_an_end(self.modulus) else f"{low} <= {k} <= {high}"
            apart = f" ({self.modulus} apart)" if axis.each and low == high else ""
            return f"{axis.one}s {axis.letter}{of} with {said}{apart}"
        count = high - low + 1
        if high == axis.size - 1:
            return f"the last {axis.one}{each}" if count == 1 else f"the last {count} {axis.one}s{each}"
        if count == 1:
            return f"{axis.one} {low}{of}"
        return f"the first {count} {axis.one}s{each}" if low == 0 else f"{axis.one}s {low} to {high}{of}"


def _conditions(axis: _Axis, values: Array) -> Iterator[tuple[_Condition, int]]:
    """List what may describe values of a coordinate that has others, too, and how many of them it does."""
    distinct, counts = np.unique(values, return_counts=True)
    sums = np.concatenate([[0], counts.cumsum()])
    low, high, size = int(distinct[0]), int(distinct[-1]), axis.size
    ends = {(low, high), (low, size - 1), (0, high)}
    most = int(distinct[counts.argmax()])
    ends |= {(most, most), (low, low), (high, high)}
    if len(distinct) > 1:  # where a gap tells the values apart, either side of it
        gap = int(np.diff(distinct).argmax())
        below, above = int(distinct[gap]), int(distinct[gap + 1])
        ends |= {(low, below), (above, high), (above, size - 1), (0, below)}
    for first, last in sorted(ends):
        inner = first > 0 and last < size - 1
        if (first, last) != (0, size - 1) and not (inner and axis.of == "memory"):  # which says little to a reader
            covered = sums[np.searchsorted(distinct, last, "right")] - sums[np.searchsorted(distinct, first)]
            yield _Condition(axis, first, last), int(covered)
    if 1 < len(distinct) <= FEW and axis.of == "channel":
        yield _Condition(axis, 0, 0, few=tuple(distinct.tolist())), len(values)
    elif axis.of == "place" and 2 == len(distinct) < size and (low, high) == (0, size - 1):
        yield _Condition(axis, 0, 0, few=(low, high)), len(values)
    powers = [1 << k for k in range(1, _largest_modulus(size).bit_length())]
    for modulus in powers if axis.of == "memory" else [*powers, *(k for k in ODD if 3 * k <= size)]:
        remainders = distinct % modulus
        weights = np.bincount(remainders, weights=counts, minlength=modulus)
        most = int(weights.argmax())
        yield _Condition(axis, most, most, modulus), int(weights[most])
        first, last = int(remainders.min()), int(remainders.max())
        if first < last and (first, last) != (0, modulus - 1):
            yield _Condition(axis, first, last, modulus), len(values)


def _choices(n: float, k: float) -> float:
    if not 0 < k < n:
        return 0.0
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _search(grid: _Grid) -> tuple[_Condition, ...]:
    """The conditions that say in the fewest bits which elements are wrong; none if all are, or without a pattern."""
    if grid.wrong == grid.total:
        return ()
    channel, place = grid.sample()
    share = grid.wrong / max(1, len(channel))
    best: tuple[_Condition, ...] = ()
    fewest = _choices(grid.total, grid.wrong)
    row, least = [(fewest, best)], max(LEAST, SHARE * fewest)
    axes = [axis for axis in grid.axes if grid.m <= LARGEST or axis.of == "channel"]
    coordinates = [(axis, axis.values(channel, place)) for axis in axes]
    seen: set[frozenset[_Condition]] = set()
    for deep in range(DEEPEST):
        if fewest < least + CHEAPEST * (deep + 1):
            break
        longer: list[tuple[float, tuple[_Condition, ...]]] = []
        for _, found in row:
            if any(c.axis.of == "memory" for c in found):
                continue  # what lies in memory says nothing of one coordinate alone: it comes last
            inside = np.ones(len(channel), bool)
            for condition in found:
                inside &= condition.holds(next(v for a, v in coordinates if a == condition.axis))
            if not inside.any():
                continue
            box = _Box(grid, found)
            for axis, values in coordinates:
                own = values[inside]
                for condition, covered in _conditions(axis, own):
                    conditions = (*found, condition)
                    if frozenset(conditions) in seen:
                        continue
                    seen.add(frozenset(conditions))
                    if 2 * covered >= len(own):
                        size = box.size(condition)
                        wrong = min(covered * share, size, grid.wrong)
                        missed = min(grid.wrong - wrong, grid.total - size)
                        bits = _choices(size, wrong) + _choices(grid.total - size, missed)
                        longer.append((sum(c.bits for c in conditions) + bits, conditions))
        longer.sort(key=lambda found: found[0])
        row = longer[:WIDEST]
        if not row or fewest - row[0][0] < least:
            break
        fewest, best = row[0]
    return best


def _text(grid: _Grid, conditions: tuple[_Condition, ...], covered: int, size: int) -> str:
    if not conditions:
        return _spread(grid)
    said = ", ".join(c.text() for c in sorted(conditions, key=lambda c: grid.axes.index(c.axis)))
    every = "is wrong" if size == 1 else f"all {size} elements are wrong"
    text = f"{said}: " + (every if covered == size else f"{covered} of {size} elements are wrong")
    missed = grid.wrong - covered
    return f"{text}, and {missed} elsewhere" if missed else f"{text}, no other"


def _listed(one: str, values: Sequence[int]) -> str:
    *others, last = map(str, values)
    return f"{one}s {', '.join(others)} and {last}" if others else f"{one} {last}"


def _spread(grid: _Grid) -> str:
    """The text where no description is shorter than a list."""
    if grid.wrong == grid.total:
        return "all elements are wrong"
    which = np.flatnonzero(grid.levels.any(axis=(0, 2)))
    if grid.wrong <= FEW and grid.m == 1:
        return f"{_listed('channel', which.tolist())}, no other"
    images = np.flatnonzero(grid.levels.any(axis=(1, 2)))
    counts = (("channel", len(which), grid.channels), ("image", len(images), grid.levels.shape[0]))
    said = [f"in {'all' if n == of else f'{n} of'} {of} {one}s" for one, n, of in counts if of > 1]
    text = ", ".join([f"{grid.wrong} of {grid.total} elements are wrong", *said])
    return f"{text}, without a pattern of places"


def _picture(found: Array) -> list[str]:
    images, channels, *plane = found.shape
    places = images * math.prod(plane)
    if places == 1:
        return []
    rows, columns = min(CELLS[0], channels), min(CELLS[1], places)
    ends = np.linspace(0, channels, rows + 1).astype(int)
    starts = np.linspace(0, places, columns, endpoint=False).astype(int)
    by_channel = found.reshape(images, channels, -1)
    cells = (
        np.maximum.reduceat(by_channel[:, first:last].max(axis=1).ravel(), starts)
        for first, last in itertools.pairwise(ends.tolist())
    )
    return ["".join(LEVELS[level] for level in row.tolist()) for row in cells]
