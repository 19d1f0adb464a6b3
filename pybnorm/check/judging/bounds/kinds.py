"""Finds the class that has the bounds of a problem."""

from __future__ import annotations

from pybnorm.check.judging.bounds.activated import Activated
from pybnorm.check.judging.bounds.composed import (
    BackwardElemt,
    BackwardReduce,
    Frozen,
    GatherStats,
    SyncBackward,
    SyncTraining,
    TrainingGrad,
)
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.language.data import Inputs
from pybnorm.check.language.problem import Problem, checked

_KINDS = (
    Expected,
    Activated,
    GatherStats,
    SyncTraining,
    SyncBackward,
    TrainingGrad,
    Frozen,
    BackwardReduce,
    BackwardElemt,
)


def expect(problem: Problem, inputs: Inputs) -> Expected:
    """The right outputs of a problem and the bounds of each; `inputs`, as stored, need not be `generate`'s."""
    checked(problem)
    kind = next(kind for kind in _KINDS if kind.knows(problem))
    return kind(problem, inputs)
