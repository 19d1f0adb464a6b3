"""How far one sequential chain of sums is off on the very data: no more than that is explained by one.

Class C bounds every chain, and so holds much that no chain does: of 100,352 ordinary terms a float32 chain is off by a
hundredth of what it may be, and a kernel that leaves out a part of its data is not. So the chain is made, of two passes
and of one, in the compute type. An output that is off by more than `MARGIN` times as much as either is like none: other
orders of the same length err more or less by chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm.check.bounds.classes import Tier
from pybnorm.check.bounds.expected import Expected
from pybnorm.check.bounds.tally import compare
from pybnorm.check.data import round_to
from pybnorm.check.problem import DATA_OUTPUTS
from pybnorm.enums import DataType, Mode
from pybnorm.reference.namespaces import on_host

__all__ = ["LARGEST", "MARGIN", "errs_like_a_chain"]

Array = npt.NDArray[Any]
MARGIN = 8.0
LARGEST = 1 << 26
"""Elements of x of which it is made; of more, class C alone is asked."""


def errs_like_a_chain(expected: Expected, output: str, got: Array) -> bool:
    """Whether `output` is off by what one chain of sums may be, and on these data is."""
    chain = (Tier("C", True, float(expected.problem.m)),)
    seen = compare(expected, output, got, chain).ratio
    if seen > 1 or type(expected) is not Expected or expected.inputs.x.size > LARGEST:
        return seen <= 1
    made = (kind(expected.problem, expected.inputs) for kind in (_Chained, _OnePass))
    return any(seen <= MARGIN * compare(expected, output, _results(one, output), chain).ratio for one in made)


def _results(expected: Expected, output: str) -> Array:
    """All of an output as stored."""
    problem = expected.problem
    whole = np.empty(expected.shape(output))
    for part in expected.parts(output, None, (Tier("exact", False, 1.0),)):
        whole[part.index] = part.reference
    return round_to(whole, problem.dtype if output in DATA_OUTPUTS else problem.parameter_dtype)


class _Chained(Expected):
    """What comes of sums that are one chain each."""

    def _rows(self, array: Array) -> Array:
        """(statistics, m) in the compute type."""
        work = np.float64 if self.problem.dtype == DataType.FLOAT64 else np.float32
        array = on_host(array)  # where accumulate adds in order
        if self.problem.mode == Mode.PER_ACTIVATION:
            return array.reshape(array.shape[0], -1).T.astype(work)
        return np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(work)

    def _sum(self, rows: Array) -> Array:
        """Of each row, which stays with length 1."""
        result: Array = np.add.accumulate(rows, axis=1, dtype=rows.dtype)[:, -1:]
        return result

    def _variance(self, x: Array, mean: Array) -> Array:
        centred = x - mean
        return self._sum(centred * centred) / x.dtype.type(x.shape[1])

    def _take_moments(self) -> None:
        super()._take_moments()
        x = self._rows(self.inputs.x)
        mean = self._sum(x) / x.dtype.type(x.shape[1])
        variance = np.maximum(self._variance(x, mean), 0)
        shape = self._mean.shape
        self._mean, wide = (a.astype(np.float64).reshape(shape) for a in (mean, variance))
        self._inverse = 1 / np.sqrt(wide + self.problem.epsilon)
        self._moments = self._moments._replace(mean=self._mean, variance=wide, inverse=self._inverse)

    def _take_sums(self) -> None:
        x, dy = self._rows(self.inputs.x), self._rows(self.inputs.need("dy"))
        mean, inverse = (a.reshape(-1, 1).astype(x.dtype) for a in (self._mean, self._inverse))
        sums = {"dscale": self._sum(dy * ((x - mean) * inverse)), "dbias": self._sum(dy)}
        shape = self._mean.shape
        self._parameters |= {name: a.astype(np.float64).reshape(shape) for name, a in sums.items()}


class _OnePass(_Chained):
    """The variance as E[x^2] - mean^2."""

    def _variance(self, x: Array, mean: Array) -> Array:
        return self._sum(x * x) / x.dtype.type(x.shape[1]) - mean * mean
