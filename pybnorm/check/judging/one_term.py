"""Finds the one term that is missing from a long sum, counted twice, or read from beside it, in every channel.

Roundings leave a variance of m = 100,352 terms off by 1.7 of its terms where it is one chain, and class A allows 8: a
term that is missing lies within the bound. But where the same place is missing in every channel, the deviations are
the terms of that place. The deviations of k channels are a point, the terms of each place another. By chance the
nearest of these is nearer than the next one, or than the origin (nothing is missing), by a factor f with a probability
of

    P(r1 < f r2) = f**k

since near the point there are as many others as there is volume, whatever their distribution, where channels are
independent. So this is for `RANDOM` fills and `LEAST` channels or more: where channels share values, or a term is 0 in
most of them, the points have fewer dimensions. The last and the first few terms are looked at together, too. A kernel
whose own roundings are as large as a term hides it, as one chain does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from pybnorm.check.judging.deviations import Rows, some_of
from pybnorm.reference.namespaces import Array

CHANNELS = 32
"""Channels that are looked at."""
LEAST = 4
"""Fewer channels say nothing."""
RANDOM = ("randn", "sqrteps", "relu")
"""Fills whose channels are independent, and whose terms are not 0 in most of them."""
ENDS = 32
"""Terms at either end that may be missing together."""
LONGEST = 1 << 20
"""Terms of a sum from which the rounding of a stored statistic is as large as a term."""
_WORDS = {1: "counted twice", -1: "missing"}
_EITHER = {"first": slice(None), "last": slice(None, None, -1)}


def one_term(rows: Rows, name: str, found: Mapping[str, Array], level: float) -> dict[str, str]:
    """Outputs whose deviations of a sum, by channel, are the terms of one place or of an end, and which.

    `level` is the probability that a correct kernel is taken for one that is wrong by chance.
    """
    picked = some_of(len(rows.chosen), CHANNELS)
    own = {output: values[rows.chosen[picked]] for output, values in found.items()}
    own = {output: values for output, values in own.items() if np.isfinite(values).all()}
    if not own or rows.m > LONGEST or len(picked) < LEAST:
        return {}
    terms, notes = _Terms(rows, name, picked, np.stack(list(own.values()))), {}
    for number, output in enumerate(own):
        nearest = list(terms.nearest(number))
        ratio, place, text = min(nearest)
        if len(picked) / 2 * math.log(max(ratio, 1e-300)) < math.log(level / (len(nearest) * len(own))):
            image, inside = divmod(place, rows.inner)
            notes[output] = "as if " + text.format(n=place + 1, name=name, place=f"image {image}, element {inside}")
    return notes


class _Terms:
    """The terms of a sum at every place, and their products with the deviations of some outputs."""

    def __init__(self, rows: Rows, name: str, picked: Array, deviations: Array) -> None:
        m, self.deviations = rows.m, deviations
        self.products, self.squares, self.beside = np.zeros((len(deviations), m)), np.zeros(m), np.zeros(m - 1)
        self.ends = {end: np.zeros(ENDS) for end in _EITHER}
        shifts: list[tuple[float, ...]] = []
        self.shifted: list[Array] = []
        for number, own in zip(picked, deviations.T, strict=True):
            terms, more = _terms(rows, name, number)
            shifts.append(more)
            self.products += own[:, None] * terms
            self.squares += terms * terms
            self.beside += terms[1:] * terms[:-1]
            self.shifted = self.shifted or [np.zeros(m) for _ in more]
            self.shifted = [total + shift * terms for total, shift in zip(self.shifted, more, strict=True)]
            for end, order in _EITHER.items():
                self.ends[end] += np.cumsum(terms[order][:ENDS]) ** 2
        self.shifts = np.array(shifts).T

    def nearest(self, number: int) -> Iterator[tuple[float, int, str]]:
        """(r1 / r2)**2 of every kind of mistake, its place, and its text."""
        products, d = self.products[number], self.deviations[number]
        size = float(d @ d)
        steps = self.squares[1:] + self.squares[:-1] - 2 * self.beside
        for sign, word in _WORDS.items():
            for shift, total in zip(self.shifts, self.shifted, strict=True):
                points = self.squares + 2 * total + shift @ shift - 2 * sign * (products + d @ shift)
                yield *_ratio(points, size), f"one term of the {{name}} was {word} in every channel: {{place}}"
            text = "one term of the {name} was read from beside it in every channel: {place}"
            yield *_ratio(steps - 2 * sign * (products[1:] - products[:-1]), size), text
            for end, order in _EITHER.items():
                points = self.ends[end] - 2 * sign * np.cumsum(products[order][:ENDS])
                yield (
                    *_ratio(points, size),
                    f"the {end} terms of the {{name}}, {{n}} of them, were {word} in every channel",
                )


def _ratio(points: Array, size: float) -> tuple[float, int]:
    """The squared ratio of the least distance to the next one, or to that of the origin, and the place of the least."""
    first, second = np.partition(points, 1)[:2].tolist()
    other = min(size + second, size)
    return max(size + first, 0.0) / other if other > 0 else 1.0, int(points.argmin())


def _terms(rows: Rows, name: str, number: int) -> tuple[Array, tuple[float, ...]]:
    """A channel's terms of a sum, and what a kernel that leaves one out may add to it."""
    z, dy = rows.channel(number)
    kappa = float(rows.mean[number] / rows.deviation[number])
    if name == "mean":
        return z, (0.0, kappa)  # divided by m - 1, or by m
    if name == "variance":
        return z * z, (0.0, -1.0, -kappa * kappa)  # by m, by m - 1, or x taken for 0
    assert dy is not None
    return (dy if name == "dbias" else dy * z), (0.0,)
