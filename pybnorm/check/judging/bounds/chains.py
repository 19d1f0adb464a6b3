"""The sums that a kernel takes in long chains, made on the very data: what is as near to them as to right sums.

The depth of class A holds for every sum that is blocked by at most `BLOCK` terms and then pairwise. A textbook loop, or
one with a few lanes, is correct too, and where roundings add up (terms of one sign, equal, or mostly 0) it is further
off. Its class of depth m would hold much that no chain does. So the chains are made, in the compute type, of all m
terms and of a half, a quarter, ... of them, of runs whose lengths are powers of 2, and Welford's recurrence. An output
is a chain's where every element is as near to that chain's result as class A (of one pass: B) is to the correct one.
What is off by another cause is not: it would have to be off by as much and to the same side as a chain, in every
statistic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from pybnorm.check.judging.bounds.classes import BLOCK, Tier, depth
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.tally import compare, held
from pybnorm.check.language.data import round_to
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.reference.namespaces import Array, on_host

LARGEST = 1 << 26
"""Elements of x of which chains are made; a larger case has none."""
LONGEST = 1 << 17
"""Terms of a chain of Welford's recurrence that is made: it takes a step for each."""
SPREAD = 8.0
"""How much more a chain may be off than the longest: of equal terms half as many once were off by 3.2 times as much."""


def chain_length(expected: Expected, output: str, got: Array, one_pass: bool = True) -> int:
    """The terms of each chain of sums that gives `output`, or 0: no chain does; `one_pass`: those of one pass, too."""
    problem = expected.problem
    if problem.composed or problem.m <= BLOCK or expected.inputs.x.size > LARGEST:
        return 0
    if not (problem.recomputes or output in ("dx", "dscale", "dbias")):
        return 0  # there is no sum in it
    if compare(expected, output, got, (Tier("chain", True, float(problem.m)),)).ratio > 1:
        return 0  # no order of any sums
    stable = Tier("A", False, depth(problem.m))
    off, longest = compare(expected, output, got, (stable,)).ratio, 0.0
    count = 1
    while problem.m > BLOCK * count:
        for made in _chains(expected, count, one_pass):
            tier = stable._replace(one_pass=made.way == "one pass")
            if _holds(made, output, got, tier):
                return -(-problem.m // count)
            if count == 1:
                whole = np.empty(made.shape(output))
                for part in made.parts(output, None, (tier,)):
                    whole[part.index] = on_host(part.reference)
                rounded = round_to(whole, expected.dtype(output))
                longest = max(longest, compare(expected, output, rounded, (stable,)).ratio)
        if off > 1 + SPREAD * longest:
            return 0  # by more than shorter ones are, too
        count *= 2
    return 0


def _holds(made: _Chained, output: str, got: Array, tier: Tier) -> bool:
    """Say whether an output is a chain's within a class: up to the first block that is not."""
    judged = False
    for part in made.parts(output, got, (tier,)):
        looked = held(made, output, part)
        if bool(looked.over.any()) or bool(looked.open.any()):
            return False
        judged = judged or bool(looked.judged.any())
    return judged


def _chains(expected: Expected, count: int, one_pass: bool) -> Iterator[_Chained]:
    problem = expected.problem
    ways = {
        "": True,
        "one pass": one_pass,
        "runs": count > 1,
        "normalized": problem.operation == Operation.BACKWARD,
        "recurrence": problem.recomputes and problem.m <= LONGEST * count,
    }
    for way in (way for way, asked in ways.items() if asked):
        if (way, count) not in expected.made:
            made = type("Chained", (_Chained, type(expected)), {"chains": count, "way": way})
            expected.made[way, count] = made(problem, expected.inputs)
        yield expected.made[way, count]


def _padded(rows: Array, multiple: int) -> Array:
    """Rows with zeros behind, so that their length is a multiple."""
    whole = np.zeros((len(rows), -(-rows.shape[1] // multiple) * multiple), rows.dtype)
    whole[:, : rows.shape[1]] = rows
    return whole


class _Chained(Expected):
    """The results of sums that are some chains each."""

    chains = 1
    way = ""
    """Every `chains`-th term is of one chain, and sums are of two passes; or otherwise.

    "runs": each chain is a run of terms. "normalized": sums of dy x_hat in place of dy (x - mean). "one pass": the
    variance is E[x^2] - mean^2, and dscale of the sums of dy x and dy. "recurrence": Welford's.
    """

    def _rows(self, array: Array) -> Array:
        """(statistics, m) in the compute type."""
        work = np.float64 if self.problem.dtype == DataType.FLOAT64 else np.float32
        array = on_host(array)  # where accumulate adds in order
        if self.problem.mode == Mode.PER_ACTIVATION:
            return array.reshape(array.shape[0], -1).T.astype(work)
        return np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(work)

    def _sum(self, rows: Array) -> Array:
        """Sum of each row, which stays with length 1: of chains, then a tree of them."""
        if self.way == "runs":
            length = 1 << ((rows.shape[1] // self.chains).bit_length() - 1)
            terms = _padded(rows, length).reshape(len(rows), -1, length).swapaxes(1, 2)
        else:
            terms = _padded(rows, self.chains).reshape(len(rows), -1, self.chains)
        ends = np.add.accumulate(terms, axis=1, dtype=rows.dtype)[:, -1]
        while ends.shape[1] > 1:
            ends = _padded(ends, 2)
            ends = ends[:, ::2] + ends[:, 1::2]
        return ends

    def _moments_of(self, x: Array) -> tuple[Array, Array]:
        if self.way == "recurrence":
            return _welford(x, math.gcd(self.chains, x.shape[1]))
        m = x.dtype.type(x.shape[1])
        mean = self._sum(x) / m
        if self.way == "one pass":
            return mean, np.maximum(self._sum(x * x) / m - mean * mean, 0)
        return mean, self._sum((x - mean) ** 2) / m

    def _take_moments(self) -> None:
        super()._take_moments()
        mean, variance = self._moments_of(self._rows(self.inputs.x))
        shape = self._mean.shape
        self._mean, wide = (a.astype(np.float64).reshape(shape) for a in (mean, variance))
        self._inverse = 1 / np.sqrt(wide + self.problem.epsilon)
        self.moments = self.moments._replace(mean=self._mean, variance=wide, inverse=self._inverse)

    def _take_sums(self) -> None:
        x, dy = self._rows(self.inputs.x), self._rows(self.inputs.need("dy"))
        mean, inverse = (a.reshape(-1, 1).astype(x.dtype) for a in (self._mean, self._inverse))
        total = self._sum(dy)
        if self.way == "one pass":
            products = (self._sum(dy * x) - mean * total) * inverse
        elif self.way == "normalized":
            products = self._sum(dy * ((x - mean) * inverse))
        else:
            products = self._sum(dy * (x - mean)) * inverse
        shape = self._mean.shape
        dscale, dbias = (a.astype(np.float64).reshape(shape) for a in (products, total))
        self._parameters |= {"dscale": dscale, "dbias": dbias}


def _welford(x: Array, chains: int) -> tuple[Array, Array]:
    """Mean and variance by Welford's recurrence, in as many chains as divide the terms, merged in pairs."""
    rows, m = x.shape
    terms = np.ascontiguousarray(x.reshape(rows, -1, chains).transpose(1, 0, 2))
    mean, squares = np.zeros((2, rows, chains), x.dtype)
    for k, term in enumerate(terms):
        off = term - mean
        mean += off / x.dtype.type(k + 1)
        squares += off * (term - mean)
    count = len(terms)
    while mean.shape[1] > 1:
        off = mean[:, 1::2] - mean[:, ::2]
        squares = squares[:, ::2] + squares[:, 1::2] + off * off * x.dtype.type(count / 2)
        mean, count = mean[:, ::2] + off / x.dtype.type(2), 2 * count
    return mean, squares / x.dtype.type(m)
