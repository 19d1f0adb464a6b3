"""Roundoffs of the data types, and the classes of kernels, each with its bound."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pybnorm.check.judging.bounds.verdict import Status
from pybnorm.check.language.data import sums_are_exact
from pybnorm.check.language.problem import Problem
from pybnorm.enums import DataType

BLOCK = 64
"""Terms that a sum may add in one chain before it is pairwise, and is never further off than its class."""

LONG = 2048
"""Terms of a sum beside which the effect of one is small, and from which exact data are judged more sharply."""


class Precision(NamedTuple):
    """The roundoffs of a data type's computation."""

    u: float
    u_out: float
    u_param: float
    tiny_out: float
    tiny_param: float
    max_out: float
    max_param: float
    tiny: float
    """Smallest normal of the compute type."""
    reach: float
    """Half its largest number: what is formed on the way to a result must stay below."""


_ROUNDOFF = {
    DataType.FLOAT64: (2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    DataType.FLOAT32: (2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    DataType.FLOAT16: (2.0**-11, 2.0**-14, 65504.0),
    DataType.BFLOAT16: (2.0**-8, 2.0**-126, (2.0 - 2.0**-7) * 2.0**127),
}


def precision(dtype: DataType, parameter: DataType | None = None) -> Precision:
    """The roundoffs for data of `dtype`, and parameters and statistics of `parameter`, by default as computed."""
    compute = DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32
    u, tiny, largest = _ROUNDOFF[compute]
    u_out, tiny_out, max_out = _ROUNDOFF[dtype]
    u_param, tiny_param, max_param = _ROUNDOFF[compute if parameter is None else parameter]
    return Precision(u, u_out, u_param, tiny_out, tiny_param, max_out, max_param, tiny, largest / 2)


def depth(m: int) -> float:
    """Roundings on the longest path of a sum of m terms by blocks of at most `BLOCK` that are then added pairwise.

    The square root, wider from 144 terms on, leaves room for longer chains whose roundings do not add up.
    """
    pairwise = BLOCK + math.ceil(math.log2(max(1.0, m / BLOCK)))
    return min(float(m), max(16.0 + 4.0 * math.sqrt(m), pairwise))


class Tier(NamedTuple):
    """One class of kernels: its name, whether it may take one pass, and the depth of its sums."""

    name: str
    one_pass: bool
    h: float
    exact: bool = False
    """Whether sums over dy are free of rounding."""
    recurrence: bool = False
    """Whether only Welford's recurrence rounds, on exact data."""
    spread: float | None = None
    """What is allowed of mean and variance beyond "exact", in u times their size; None: as h says."""

    @property
    def status(self) -> Status:
        """The verdict of an output that this class holds."""
        return Status.WARN if self.one_pass else Status.PASS


def tiers(problem: Problem, output: str) -> tuple[Tier, ...]:
    """The classes to try for one output, strictest first."""
    h = depth(problem.m)
    stable, one_pass = Tier("A", False, h), Tier("B", True, h)
    if not sums_are_exact(problem):
        return stable, one_pass
    exact = problem.m >= LONG
    own = Tier("exact", False, 1.0, exact)
    rounded = Tier("rounded", False, h, True, recurrence=True)
    if problem.takes_variance:  # sums of uncentred terms have no rounding either; those with an inexact 1/sigma have
        return (own,) if output == "dbias" else (own, rounded)
    if not problem.recomputes or output == "dbias":
        return own, Tier("B", True, 1.0, exact)
    if problem.composed == "sync_train":  # one pass over ranks, however exact each one's sums are, rounds
        one_pass = Tier("B", True, 1.0, exact)
    if not exact:
        return own, stable, one_pass
    merged = problem.composed == "sync_train" and not output.endswith("_mean")
    return (own, rounded, one_pass) if merged else (own, rounded)
