"""Which missing, doubled or moved element explains a deviation, and how likely a right kernel looks so.

A right kernel does not know which element is the last. Its D of a channel, whatever it is, was made without regard to
the place that a hypothesis names; among many places drawn at random, the one that is named lies nearest to it as often
as any other. So

    U = (1 + number of drawn places whose prediction is at least as near to D as the named one's) / (1 + places drawn)

is uniform (or larger), whatever the noise of the kernel is: its size, its bias, its tails and how they differ from
channel to channel do not enter. Only the data must be drawn independently for each channel, which is checked. Of C
channels, k have a U of at most u with probability at most binomial(C, k) u**k, of which the least over k counts C
times; and -sum(log U) is at most gamma distributed with shape C (Fisher's test). The lesser of the two, times 2 and
times the number of hypotheses, is the probability that is stated, and must be below `LEVEL`. Hypotheses are counted in
three lots with a third of the level each: the ends of channels, of images, rows, blocks and ranks; every element,
aligned tile and image; and a mean that is off by one factor. A bug is named only if the prediction also explains most
of the deviation. Where one output has a bug, the others of the call are asked for the same one, and for no other, with
`FOLLOWS` in place of `LEVEL`: the case is judged already.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pybnorm.check.matched_filters.deviations import Rows
from pybnorm.enums import Operation
from pybnorm.reference.namespaces import Foreign

if TYPE_CHECKING:
    from pybnorm.check.bounds import Expected

__all__ = ["EXPLAINED", "LEVEL", "Match", "Search", "Sum", "Tried", "scan", "sums_of"]

Array = npt.NDArray[Any]

LEVEL = 1e-12
"""Probability that a case whose kernel is right is said to have one of the bugs."""
FOLLOWS = 1e-3
EXPLAINED = 0.75
"""Share of the squared deviation that a bug must explain to be named."""
PLACES = 1 << 16
"""Places drawn, of four channels; fewer of more, at least a sixteenth."""
_RUNS = (*range(1, 65), 96, 127, 128, 255, 256, 511, 512, 1023, 1024, 2048, 4096)
_SCANNED = 4
_SINGLE = 12.0
"""Median size of D that is too large for a single one."""
_SEVERAL = 64.0
"""And for a tile, or an image of as many elements as are looked at."""
_TILES = (4, 8, 16, 32, 64, 128, 256)
"""Lengths of runs of elements that begin at a multiple of it."""
_LARGEST_IMAGE = 4096
_LARGEST_GROUPS = 1 << 14
"""Places of a hypothesis of every image, row or block."""

Term = Callable[[Array, Array | None], Array]
"""Values of the terms of a sum, (channels, places), from the normalized x and dy there."""


@dataclasses.dataclass(frozen=True)
class Match:
    """A bug that explains an output's deviation."""

    bug: str
    probability: float
    """Bound of the probability that a right kernel looks so, times the hypotheses tried."""
    slope: float
    """Of the deviation over the prediction."""

    def __str__(self) -> str:
        return f"as if {self.bug} (by chance: {self.probability:.0e})"


@dataclasses.dataclass(frozen=True)
class Tried:
    """The bug that explains most of the deviation of one sum, as one output shows it."""

    output: str
    sum: str
    deviation: float
    """Root mean square of D, in terms of the sum."""
    hypotheses: int
    """How many were held against it; 0: too small a deviation for a term that is missing."""
    bug: str = ""
    slope: float = 0.0
    """Of the measured deviation over the predicted one, which would be 1."""
    explained: float = 0.0
    """Share of the squared deviation."""
    rank: float = 1.0
    """Median over the channels of the share of drawn places that lie as near as the named one."""
    probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum's terms, in a few ways to leave one out; each a function of z and dy at (channels, places)."""

    terms: tuple[tuple[str, Term], ...]
    paired: bool = False
    """Whether a term is of x and dy, so that one may be read from another place than the other."""


def sums_of(expected: Expected, rows: Rows) -> dict[str, Sum]:
    """The sums that a call may have wrong, by name."""
    kappa = rows.kappa[:, None]

    def need(dy: Array | None) -> Array:
        assert dy is not None
        return dy

    counted = " and not counted"
    sums = {
        "mean": Sum((("", lambda z, dy: z + kappa), (counted, lambda z, dy: z))),
        "variance": Sum(
            (
                ("", lambda z, dy: z * z),
                (counted, lambda z, dy: z * z - 1),
                ("", lambda z, dy: z * z - kappa * kappa),
            )
        ),
        "dbias": Sum((("", lambda z, dy: need(dy)),)),
    }
    terms: list[tuple[str, Term]] = [("", lambda z, dy: need(dy) * z)]
    if expected.problem.operation == Operation.BACKWARD and expected.problem.recomputes:
        m, chosen = expected.problem.m, rows.chosen
        dbias, dscale = (expected.outputs[n].ravel()[chosen][:, None] / m for n in ("dbias", "dscale"))

        def statistics(z: Array, dy: Array | None) -> Array:
            return -(z + kappa) * dbias - 0.5 * z * z * dscale

        terms += [
            (" of x's statistics", statistics),
            (" of every sum", lambda z, dy: need(dy) * z + statistics(z, dy)),
            (f" of x's statistics{counted}", lambda z, dy: -z * dbias - 0.5 * (z * z - 1) * dscale),
        ]
    sums["dscale"] = Sum(tuple(terms), paired=True)
    return sums


class Search:
    """Looks for the bug that explains one sum's deviation."""

    def __init__(self, rows: Rows, total: Sum, d: Array, asked: str = "") -> None:
        self.rows, self.total, self.d, self.asked = rows, total, d, asked
        self.found: Match | None = None
        self.nearest: tuple[float, float, str, Callable[[], Array], Array, float] | None = None
        """Of the bug that explains most: share, slope, name, what is drawn beside it, prediction, hypotheses."""
        rng = np.random.default_rng(20240229)
        count = max(255, min(max(PLACES * 4 // len(d), PLACES // 16), rows.m // 4))
        self._drawn, self._other = rng.integers(0, rows.m, (2, count))
        self._hypotheses = 1.0

    def ends(self) -> None:
        """Try what lies at the ends of channels and images."""
        self._hypotheses = 1.0 if self.asked else 3 * 8 * 4096.0
        for _, term in self.total.terms:
            self._runs(term)

    def scanned(self) -> bool:
        """Whether every place is to be looked at: nothing was found, and the deviation may be of a few terms."""
        return self.found is None and (bool(self.asked) or self._typical() <= _SEVERAL)

    def _typical(self) -> float:
        return math.sqrt(float(np.median(self.d**2)))

    def nearest_places(self) -> list[_Places]:
        """For each term what takes the nearest places."""
        largest = _SINGLE + 4 * self._typical()
        d = np.clip(self.d, -largest, largest)
        return [_Places(d) for _ in self.total.terms]

    def _near(self, p: Array, draws: Callable[[], Array], bug: str) -> bool:
        """Whether `p` explains most of the deviation, with a slope of 1."""
        largest = 3 * math.sqrt(float(np.mean(p * p))) + 1e-300
        d, to, off = (np.clip(a, -largest, largest) for a in (self.d, p, self.d - p))
        slope = float(d @ to) / max(float(to @ to), 1e-300)
        explained = 1 - float(off @ off) / max(float(d @ d), 1e-300)
        if self.nearest is None or explained > self.nearest[0]:
            self.nearest = explained, slope, bug, draws, p, self._hypotheses
        if self.asked:
            return abs(slope - 1) < 0.5 and explained > 0.25
        return abs(slope - 1) < 0.2 and explained > EXPLAINED

    def _try(self, p: Array, draws: Callable[[], Array], bug: str) -> None:
        if (self.asked and bug != self.asked) or not self._near(p, draws, bug):
            return
        log = self._by_chance(self._ranks(p, draws))
        least = math.log(self.found.probability) if self.found else math.log(FOLLOWS if self.asked else LEVEL)
        if log < least:
            self.found = Match(bug, math.exp(max(log, -690.0)), float(self.d @ p / (p @ p)))

    def _ranks(self, p: Array, draws: Callable[[], Array]) -> Array:
        """U of every channel, the least first."""
        drawn, off = draws(), np.abs(self.d - p)
        u = (1 + np.count_nonzero(np.abs(drawn - self.d[:, None]) <= off[:, None], axis=1)) / (1 + drawn.shape[1])
        u.sort()
        return u

    def _by_chance(self, u: Array) -> float:
        """Logarithm of the probability that a right kernel has such ranks, times the hypotheses."""
        count = len(u)
        k = np.arange(1, count + 1)
        ways = np.array([math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k])
        some = float((ways + k * np.log(u)).min()) + math.log(count)
        total = -float(np.log(u).sum())  # P(G > total) of a gamma distribution of shape `count`
        parts = np.array([i * math.log(max(total, 1e-300)) - math.lgamma(i + 1) for i in range(count)])
        every = -total + float(np.logaddexp.reduce(parts))
        return min(some, every) + math.log(2 * self._hypotheses)

    def told(self, output: str, name: str) -> Tried:
        """The bug that explains most."""
        deviation = math.sqrt(float(np.mean(self.d**2)))
        if self.nearest is None:
            return Tried(output, name, deviation, int(self._hypotheses))
        explained, slope, bug, draws, p, self._hypotheses = self.nearest
        u = self._ranks(p, draws)
        by_chance = math.exp(min(0.0, max(self._by_chance(u), -690.0)))
        return Tried(
            output, name, deviation, int(self._hypotheses), bug, slope, explained, float(np.median(u)), by_chance
        )

    def _terms(self, term: Term, places: Array) -> Array:
        return term(*self.rows.at(places))

    def _runs(self, term: Term) -> None:
        """Elements at the ends of a channel or of every image."""
        rows, m = self.rows, self.rows.m
        longest = min(m // 4, max(_RUNS))
        tails = {m % 2**k for k in range(2, 14)} | {rows.inner}
        lengths = sorted({k for k in {*_RUNS, *tails} if 0 < k <= longest})
        for word, places in (("last", m - 1 - np.arange(longest)), ("first", np.arange(longest))):
            elements = functools.partial(rows.at, places)
            ends = np.array(lengths) - 1

            def taken(elements: Callable[[], Any] = elements, word: str = word, ends: Array = ends) -> Array:
                result: Array = term(*rows.once(word, elements)).cumsum(axis=1)[:, ends]
                return result

            sums = rows.once((term, word), taken)
            for i, k in enumerate(lengths):
                name = f"the {word} element" if k == 1 else f"the {word} {k} elements"
                self._both(sums[:, i], self._runs_of(term, k), f"{name} of every channel")
        self._moved(term, m - 1, m - 2, "the last element")
        self._moved(term, 0, 1, "the first element")
        for what, starts, sizes, whole in rows.groups:
            shortest = int(sizes.min())
            for k in sorted({1, 2, 3, 4, 8, 16, 32, rows.row}) if whole else (1,):
                if k * 2 > shortest or k * len(starts) > _LARGEST_GROUPS:
                    continue
                for word, begin in (("last", starts + sizes - k), ("first", starts)):
                    ends = (begin[:, None] + np.arange(k)).ravel()
                    p = rows.once((term, what, word, k), lambda ends=ends: self._terms(term, ends).sum(axis=1))  # type: ignore[misc]

                    def some(k: int = k, starts: Array = starts, shortest: int = shortest) -> Array:
                        offsets = self._drawn[:255] % (shortest - k + 1)
                        places = starts[:, None] + np.arange(k)
                        drawn = [self._terms(term, (places + o).ravel()).sum(axis=1) for o in offsets]
                        return np.stack(drawn, axis=1)

                    name = "element" if k == 1 else f"{k} elements"
                    self._both(p, some, f"the {word} {name} of every {what}")
            if whole and shortest > 2 and len(starts) <= _LARGEST_GROUPS:
                self._exchanged(term, what, starts, sizes)

    def _exchanged(self, term: Term, what: str, starts: Array, sizes: Array) -> None:
        """Another element of an image or rank read at one of its ends, or neither end."""
        shortest = int(sizes.min())
        count = max(255, min(1023, (1 << 21) // (len(starts) * len(self.d))))
        first, last = starts, starts + sizes - 1

        def whole(places: Array) -> Array:
            return self._terms(term, places).sum(axis=1)

        def drawn(sign: int) -> Array:
            pairs = zip(self._drawn[:count] % shortest, self._other[:count] % shortest, strict=True)
            return np.stack([whole(starts + one) + sign * whole(starts + other) for one, other in pairs], axis=1)

        ends = {name: whole(places) for name, places in (("first", first), ("last", last))}
        for word, beside, other in (("last", last - 1, "first"), ("first", first + 1, "last")):
            name = f"the {word} element of every {what} were not read and"
            self._try(whole(beside) - ends[word], functools.partial(drawn, -1), f"{name} a neighbour twice")
            self._try(ends[other] - ends[word], functools.partial(drawn, -1), f"{name} the {other} one twice")
        self._both(
            ends["first"] + ends["last"], functools.partial(drawn, 1), f"the first and last element of every {what}"
        )

    def _both(self, p: Array, draws: Callable[[], Array], name: str) -> None:
        self._try(-p, lambda: -draws(), f"{name} were left out")
        self._try(p, draws, f"{name} were read twice")

    def _moved(self, term: Term, place: int, other: int, name: str) -> None:
        """`other` read at `place`, of x and dy, and of one of them."""

        def shifted(one: Array, two: Array, how: str) -> Array:
            (z, dy), (z2, dy2) = self.rows.at(one), self.rows.at(two)
            if how == "both":
                return term(z2, dy2) - term(z, dy)
            first = term(z2, dy) - term(z, dy)
            return first if how == "x" else first + term(z, dy2) - term(z2, dy2)

        ways = ["both", "x", "swapped"] if self.total.paired else ["both"]
        texts = {
            "both": f"{name} of every channel were not read and a neighbour twice",
            "x": f"{name} of every channel were taken from beside it in x alone",
            "swapped": f"{name} of every channel were swapped with its neighbour in x alone",
        }
        for how in ways:
            one, two = np.array([place]), np.array([other])
            p = shifted(one, two, how)[:, 0]
            self._try(p, functools.partial(shifted, self._drawn, self._other, how), texts[how])

    def places(self, term: Term, nearest: _Places) -> None:
        """Try one element anywhere, a neighbour in its place, or a tile: of all those that leave least deviation."""
        if not self.asked:
            self._hypotheses = 3 * 8 * 24.0 * self.rows.m
        for place in nearest.one.places:
            p = self._terms(term, np.array([place]))[:, 0]
            self._both(p, lambda: self._terms(term, self._drawn), f"element {place} of every channel")
        for place in nearest.neighbour.places:
            self._moved(term, place, place + 1, f"element {place}")
            self._moved(term, place + 1, place, f"element {place + 1}")
        for place in nearest.swapped.places:
            self._moved(term, place, place + 1, f"element {place}")
        for length, tiles in nearest.tiles.items():
            for tile in tiles.places:
                first = tile * length
                p = self._terms(term, first + np.arange(length)).sum(axis=1)
                self._both(p, self._runs_of(term, length), f"elements {first} to {first + length - 1} of every channel")

    def _runs_of(self, term: Term, k: int) -> Callable[[], Array]:
        """Sums of k neighbours at the drawn places."""

        def draws() -> Array:
            count = min(len(self._drawn), max(255, (1 << 20) // (k * len(self.d))))
            starts = self._drawn[:count] % (self.rows.m - k + 1)
            whole = self._terms(term, (starts[:, None] + np.arange(k)).ravel())
            return whole.reshape(len(self.d), count, k).sum(axis=2)

        return draws


class _Places:
    """What takes the nearest places of a term: one element, a neighbour in its place, a swap, a tile or an image."""

    def __init__(self, d: Array) -> None:
        self.d = d
        self.one, self.neighbour, self.swapped = _Nearest(d), _Nearest(d), _Nearest(d)
        self.tiles: dict[int, _Nearest] = {}

    def tile(self, length: int) -> _Nearest:
        """Of tiles of that length, which are numbered."""
        return self.tiles.setdefault(length, _Nearest(self.d))


class _Nearest:
    """The places whose terms, with either sign, are nearest to a deviation."""

    def __init__(self, d: Array) -> None:
        self._d = d
        self._best: list[tuple[float, int]] = []

    @property
    def places(self) -> list[int]:
        """The nearest first."""
        return [place for _, place in self._best]

    def add(self, values: Array, squares: Array, first: int) -> None:
        """Terms, (channels, places), of the places from `first` on, and the sums of their squares."""
        if isinstance(values, Foreign):
            left = np.asarray(squares - 2 * np.abs((values * self._d[:, None]).sum(0)))
        else:
            left = squares - 2 * np.abs(self._d.astype(values.dtype) @ values)
        chosen = np.argpartition(left, min(_SCANNED, left.size - 1))[:_SCANNED]
        self._best += [(float(left[i]), first + int(i)) for i in chosen]
        self._best.sort()
        del self._best[_SCANNED:]


def scan(rows: Rows, searches: list[Search]) -> None:
    """Every place of every search, in one walk over the data."""
    if not searches:
        return
    total = {id(one.total): one.total for one in searches}
    wanted = {key: [one.nearest_places() for one in searches if id(one.total) == key] for key in total}
    for first, z, dy in rows.blocks():
        for key, each in total.items():
            for i, (_, term) in enumerate(each.terms):
                values = term(z, dy)
                takers = [places[i] for places in wanted[key]]
                _take(values, [one.one for one in takers], first)
                if values.shape[1] > 1:
                    _take(np.diff(values, axis=1), [one.neighbour for one in takers], first)
                    if each.paired:
                        assert dy is not None
                        _take(np.diff(z, axis=1) * np.diff(dy, axis=1), [one.swapped for one in takers], first)
                for length, sums, number in _tiles(values, first, rows.inner):
                    _take(sums, [one.tile(length) for one in takers], number)
    for key in total:
        own = [one for one in searches if id(one.total) == key]
        for one, nearest in zip(own, wanted[key], strict=True):
            for (_, term), places in zip(one.total.terms, nearest, strict=True):
                one.places(term, places)


def _take(terms: Array, takers: list[_Nearest], first: int) -> None:
    squares = (terms * terms).sum(0) if isinstance(terms, Foreign) else np.einsum("cp,cp->p", terms, terms)
    for taker in takers:
        taker.add(terms, squares, first)


def _tiles(values: Array, first: int, inner: int) -> Iterator[tuple[int, Array, int]]:
    """Sums of the aligned tiles, and images, that a run of places from `first` on has, and the number of the first."""
    if 1 < inner <= _LARGEST_IMAGE and inner not in _TILES and first % inner == values.shape[1] % inner == 0:
        yield inner, values.reshape(len(values), -1, inner).sum(axis=2), first // inner
    length, number = 1, first
    while length < _TILES[-1]:
        skip = number % 2
        pairs = (values.shape[1] - skip) // 2
        if not pairs:
            return
        values = values[:, skip : skip + 2 * pairs : 2] + values[:, skip + 1 : skip + 2 * pairs : 2]
        length, number = 2 * length, (number + skip) // 2
        if length in _TILES:
            yield length, values, number
