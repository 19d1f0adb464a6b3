"""Activations of batch norm's result, and the gradients that pass them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pybnorm import reference
from pybnorm.check.language.calls import axis
from pybnorm.check.language.problem import Problem
from pybnorm.enums import Activation, Mode
from pybnorm.reference.namespaces import Array


def limits(problem: Problem) -> tuple[float, float]:
    """Between which values the activation of `problem` changes nothing."""
    assert problem.low is not None
    assert problem.high is not None
    if problem.activation in (Activation.CLIPPED_RELU, Activation.CLAMP):
        return problem.low, problem.high
    return (0.0 if problem.activation else -np.inf), np.inf


def activate(problem: Problem, values: Array) -> Array:
    """The activation of `problem`, elementwise."""
    low, high = limits(problem)
    return np.minimum(np.maximum(values, low), high)


def passes(problem: Problem, values: Array) -> Array:
    """Say where the activation lets a gradient through that was given these values: above low, not above high."""
    low, high = limits(problem)
    return (values > low) & (values <= high)


def inside(problem: Problem, values: Array) -> Array:
    """1 where the activation changes nothing, not even of a value beside these, else 0."""
    low, high = limits(problem)
    return ((values > low) & (values < high)).astype(np.float64)


def before(problem: Problem, x: Array, scale: Array, bias: Array, statistics: tuple[Array, Array] | None) -> Array:
    """Batch norm's result in float64; with the statistics of x where none are given."""
    return reference.forward_inference_inv_variance(
        x, scale, bias, *(statistics or _statistics(problem, x)), axis=axis(problem)
    ).y


def store(
    problem: Problem,
    x: Array,
    scale: Array,
    bias: Array,
    statistics: tuple[Array, Array] | None,
    out: Array,
    rounded: Callable[[Array], Array],
) -> None:
    """Put what the activation makes of batch norm's result, and of a residual in `out`, there; images at a time."""
    statistics = statistics or _statistics(problem, x)
    step = max(1, (1 << 17) * len(x) // x.size)
    for first in range(0, len(x), step):
        some = slice(first, first + step)
        values = before(problem, x[some], scale, bias, statistics)
        if problem.residual:
            values += out[some].astype(np.float64)
        out[some] = rounded(activate(problem, values))


def _statistics(problem: Problem, x: Array) -> tuple[Array, Array]:
    mean, _, inverse = reference.stats(x, epsilon=problem.epsilon, axis=axis(problem))
    return mean, inverse


def passing(problem: Problem, x: Array, values: Array, dy: Array | None = None) -> int:
    """Index of the last element of the last statistic that the activation changes nothing of, else of its last one.

    One at a limit, or where dy is 0, only where there is no other. `values` are those before the activation.
    """
    last = np.zeros(x.shape, bool)
    rows = last.reshape(len(x), -1) if problem.mode == Mode.PER_ACTIVATION else last
    rows[:, -1] = True
    between = inside(problem, values) > 0
    for way in (between if dy is None else between & (dy != 0), between, passes(problem, values)):
        if (found := np.flatnonzero(last & way)).size:
            return int(found[-1])
    return x.size - 1
