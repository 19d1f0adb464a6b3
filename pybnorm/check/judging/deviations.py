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
from typing import TYPE_CHECKING, Any

import numpy as np

from pybnorm.check.language import activations
from pybnorm.check.language.data import round_to
from pybnorm.enums import Mode, Operation
from pybnorm.reference.blocks import reduce_in_threads
from pybnorm.reference.namespaces import Array

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
        self.chosen = (
            chosen[np.linspace(0, len(chosen) - 1, min(CHANNELS, len(chosen))).astype(int)] if len(chosen) else chosen
        )
        self.mean, self.deviation = mean[self.chosen], np.sqrt(variance[self.chosen])

    def at(self, places: Array) -> tuple[Array, Array | None]:
        """z and dy at `places` of every channel: (channels, places)."""
        image, inside = places // self.inner, places % self.inner
        channels = self.chosen[:, None]
        z = (self.x[image, channels, inside].astype(np.float64) - self.mean[:, None]) / self.deviation[:, None]
        return z, None if self.dy is None else self.dy[image, channels, inside].astype(np.float64)


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
    """D of every sum that `output` tells of, by channel: mean, variance, dbias, dscale.

    In units of the standard deviation, of the variance, of dy and of dy * x_hat.
    """
    problem = expected.problem
    m, epsilon = problem.m, problem.epsilon
    with np.errstate(all="ignore"):
        if output == "dz" or (output == "dx" and problem.composed in ("frozen", "backward_elemt")):
            return {}  # nothing in it is a sum of x and dy
        if output in ("y", "dx"):
            return _fitted(expected, output, got)
        right, values = expected.outputs[output].ravel(), got.astype(np.float64).ravel()
        alpha, beta, prior = expected.blend(output)
        if beta:
            assert prior is not None
            values = values - beta * prior.astype(np.float64).ravel()
        values = values / alpha if alpha else np.full_like(values, np.nan)
        if output in _SUMS:
            unit = expected.statistics[1].ravel() if output == "sum_dy_xmu" else 1.0
            return {_SUMS[output]: (values - right) * unit}
        variance = own_moments(expected)[1]
        if output == "saved_mean":
            return {"mean": (values - right) * m / np.sqrt(variance)}
        if output == "saved_inv_variance" and problem.saves_variance:
            return {"variance": (values / variance - 1) * m}
        if output == "saved_inv_variance":
            return {"variance": ((1 / values**2 - epsilon) / variance - 1) * m}
        if output == "running_mean":
            return {"mean": (values - right) / problem.factor * m / np.sqrt(variance)}
        return {"variance": (values - right) / problem.factor * m / problem.correction / variance}


def _fitted(expected: Expected, output: str, got: Array) -> dict[str, Array]:
    """Fit how far the statistics or sums are off that y or dx was made with, by least squares over its elements."""
    problem = expected.problem
    mean, inverse = expected.statistics
    gain = expected.blend(output)[0] * expected.inputs.scale.astype(np.float64)
    if output == "dx":
        gain = gain * inverse

    arrays, formula = expected.formula(output)
    parameters = [mean, inverse, *arrays]
    alpha, beta, prior = expected.blend(output)
    data = [expected.inputs.x, got.reshape(expected.inputs.x.shape)]
    if output == "dx":
        data.append(expected.inputs.need("dy"))
    if beta:
        assert prior is not None
        data.append(prior)
    if output == "y" and problem.residual:
        data.append(expected.inputs.need("z"))

    def products(x: Array, values: Array, *others: Array) -> Iterator[Array]:
        mean, inverse, *made_of = others[len(data) - 2 :]
        dy = others[: 1 if output == "dx" else 0]
        right = formula(x - mean, *dy, *made_of)
        normal = (x - mean) * inverse
        inside: Any = None
        if output == "y" and problem.activation:
            if problem.residual:
                right = right + others[len(data) - 3]
            inside = activations.inside(problem, right)
            right = activations.activate(problem, right)
        right = alpha * right
        if beta:
            right += beta * others[len(dy)]
        off = values - round_to(right, problem.dtype).astype(np.float64)
        if inside is not None:
            off, normal = off * inside, normal * inside
            yield inside
        yield off
        yield off * normal
        yield normal
        yield normal * normal

    *counted, off, tilted, normal, square = reduce_in_threads(products, data, problem.mode, parameters)
    m, n = problem.m, counted[0] if counted else problem.m
    # least squares with the regressors 1 and x_hat
    determinant = n * square - normal**2
    slope = (n * tilted - normal * off) / determinant / gain
    offset = (square * off - normal * tilted) / determinant / gain
    if output == "dx":
        return {"dbias": (-offset * m).ravel(), "dscale": (-slope * m).ravel()}
    variance = own_moments(expected)[1]
    plus = variance + problem.epsilon
    return {
        "mean": -offset.ravel() * m * np.sqrt(plus / variance),
        "variance": -2 * slope.ravel() * m * plus / variance,
    }
