"""Measures how far the sums are off that an output was made with.

Deviations are counted in terms of the sum, D = d m: a term left out moves D by -t, its own value in units of the
standard deviation. y and dx are not sums; least squares over their elements gives how far the mean and the inverse
standard deviation (y), or the two sums and the inverse standard deviation (dx), are off that they were made with. In a
16-bit output the correct value, rounded, is subtracted: rounding then cancels but for the elements that the deviation
carries across a boundary.

With an activation, y's elements tell of its sums where they are between the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pybnorm.check.judging.bounds.formulas import blended
from pybnorm.check.language import activations
from pybnorm.check.language.data import round_to
from pybnorm.enums import Mode, Operation
from pybnorm.reference.blocks import reduce_in_threads
from pybnorm.reference.namespaces import Array, on_host

if TYPE_CHECKING:
    from pybnorm.check.judging.bounds import Expected

CHANNELS = 256
"""Channels looked at of a tensor that has more."""


class Rows:
    """x and dy by channel, normalized: z = (x - mean) / standard deviation, over at most `CHANNELS` channels."""

    def __init__(self, expected: Expected) -> None:
        problem, inputs = expected.problem, expected.inputs
        self.m = problem.m
        per_activation = problem.mode == Mode.PER_ACTIVATION
        shape = (self.m, -1, 1) if per_activation else (*problem.dims[:2], -1)
        self.x = inputs.x.reshape(shape)
        self.dy = None if inputs.dy is None else inputs.dy.reshape(shape)
        self.inner = self.x.shape[2]
        mean, variance = own_moments(expected)
        with np.errstate(all="ignore"):
            good = np.isfinite(mean + variance) & (variance > 0)
        chosen = np.flatnonzero(good)
        self.chosen = chosen[some_of(len(chosen), CHANNELS)]
        self.mean, self.deviation = mean[self.chosen], np.sqrt(variance[self.chosen])

    def channel(self, number: int) -> tuple[Array, Array | None]:
        """z and dy of one of the channels."""
        x, dy = (None if a is None else on_host(a[:, self.chosen[number]]).ravel() for a in (self.x, self.dy))
        assert x is not None
        z = (x.astype(np.float64) - self.mean[number]) / self.deviation[number]
        return z, None if dy is None else dy.astype(np.float64)


def some_of(count: int, most: int) -> Array:
    """At most so many places of `count`, evenly, with both ends."""
    return np.linspace(0, count - 1, min(most, count)).astype(int)


def own_moments(expected: Expected) -> tuple[Array, Array]:
    """Give what z is made with, by channel: x's mean and variance in training, in backward those that it uses."""
    if expected.problem.operation == Operation.FORWARD_TRAINING:
        return expected.moments.mean.ravel(), expected.moments.variance.ravel()
    mean, inverse = expected.statistics
    with np.errstate(all="ignore"):
        return mean.ravel(), 1 / inverse.ravel() ** 2


_SUMS = {"dscale": "dscale", "dbias": "dbias", "sum_dy": "dbias", "sum_dy_xmu": "dscale"}
"""Outputs that are sums, and of what."""


def measured(expected: Expected, output: str, got: Array) -> dict[str, Array]:
    """D of every sum that `output` tells of, by channel, in units of sigma, the variance, dy or dy * x_hat."""
    problem = expected.problem
    m, epsilon = problem.m, problem.epsilon
    with np.errstate(all="ignore"):
        if output == "dz" or (output == "dx" and problem.composed in ("frozen", "backward_elemt")):
            return {}  # nothing in it is a sum of x and dy
        if output in ("y", "dx"):
            return _fitted(expected, output, got)
        right, values = expected.outputs[output].ravel(), got.astype(np.float64).ravel()
        alpha, beta, prior = expected.blend(output)
        if beta and prior is not None:
            values = values - beta * prior.ravel()
        values = values / alpha if alpha else np.full_like(values, np.nan)
        if output in _SUMS:
            unit = expected.statistics[1].ravel() if output == "sum_dy_xmu" else 1.0
            return {_SUMS[output]: (values - right) * unit}
        variance = own_moments(expected)[1]
        if output == "saved_inv_variance":
            saved = values if problem.saves_variance else 1 / values**2 - epsilon
            return {"variance": (saved / variance - 1) * m}
        off = (values - right) / (1 if output == "saved_mean" else problem.factor) * m
        if output.endswith("mean"):
            return {"mean": off / np.sqrt(variance)}
        return {"variance": off / problem.correction / variance}


class Fit(NamedTuple):
    """The line in x_hat that fits best what y or dx is off by, and means of x_hat, its square and that of dy."""

    offset: Array
    slope: Array
    first: Array
    second: Array
    dy: Array | None


def least_squares(expected: Expected, output: str, got: Array, rounded: bool) -> Fit:
    """The line of each statistic; `rounded`: what is correct is rounded as `got` is before it is subtracted."""
    problem, backward = expected.problem, output == "dx"
    mean, inverse = expected.statistics
    made_of, formula = expected.formula(output)
    alpha, beta, prior = expected.blend(output)
    data = [expected.inputs.x, got.reshape(expected.inputs.x.shape)]
    data += [expected.inputs.need("dy")] if backward else []
    data += [prior] if beta and prior is not None else []
    with_z, activated = output == "y" and problem.residual, output == "y" and bool(problem.activation)
    data += [expected.inputs.need("z")] if with_z else []

    def products(x: Array, off: Array, *others: Array) -> Iterator[Array]:
        more, (mean, inverse, *parameters) = others[: len(data) - 2], others[len(data) - 2 :]
        x -= mean
        right = formula(x, *more[:backward], *parameters)
        x *= inverse
        inside: Any = 1.0
        if activated:
            right = right + more[-1] if with_z else right
            inside = activations.inside(problem, right)
            right = activations.activate(problem, right)
            yield inside
        if (alpha, beta) != (1, 0):
            right = blended(right, alpha, beta, more[backward] if beta else None)
        off -= round_to(right, problem.dtype).astype(np.float64) if rounded else right
        if activated:
            off, x = off * inside, x * inside
        yield off
        off *= x
        yield off
        yield x
        x *= x
        yield x
        if backward:
            yield more[0] * more[0]

    sums = list(reduce_in_threads(products, data, problem.mode, [mean, inverse, *made_of]))
    count = sums.pop(0) if activated else problem.m
    off, tilted, first, second, *squares = (s / count for s in sums)
    slope = (tilted - off * first) / (second - first * first)
    return Fit(off - slope * first, slope, first, second, squares[0] if backward else None)


def _fitted(expected: Expected, output: str, got: Array) -> dict[str, Array]:
    """Say how far the statistics or sums are off that y or dx was made with, by least squares over its elements."""
    fit, m = least_squares(expected, output, got, rounded=True), expected.problem.m
    gain = expected.blend(output)[0] * expected.wide("scale")
    if output == "dx":
        gain = gain * expected.statistics[1] / m
        return {"dbias": (-fit.offset / gain).ravel(), "dscale": (-fit.slope / gain).ravel()}
    variance = own_moments(expected)[1]
    plus = (variance + expected.problem.epsilon) / variance
    offset, slope = ((a / gain).ravel() for a in (fit.offset, fit.slope))
    return {"mean": -offset * m * np.sqrt(plus), "variance": -2 * slope * m * plus}
