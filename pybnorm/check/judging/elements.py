"""Tells whether the elements of y or dx are off together, as a sum that was rounded makes them.

However its sums err, a kernel makes every element of a statistic from the same few numbers: y = a x + b, and with given
statistics dx = scale r dy + a x + b. So whatever a and b are, each element is off from that by roundings of its own and
by nothing else. a and b are found by least squares. Those stray, too: by p of the elements' own roundings e, of which
every one is within E. The projection leaves |p| at an element at most sqrt(leverage) |e|, so that with z, x in units of
its standard deviation about its own mean,

    |out - (a x + b)| <= E + rms(E) sqrt(1 + z**2)

for every data; no chance is in it. E is the bound of an element whose statistics are given. Beside long sums it is
some 600 times narrower at m = 401,408: this sees x read with fewer bits, a part of the elements that has statistics of
its own, and a few elements that are slightly off.
"""

from __future__ import annotations

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.formulas import Deviations, backward_weights, forward_weights
from pybnorm.check.judging.bounds.tally import Tally, compare
from pybnorm.check.judging.bounds.where import levels
from pybnorm.check.judging.deviations import least_squares
from pybnorm.enums import Operation
from pybnorm.reference.namespaces import Array

SHORTEST = 64
"""Terms of a sum from which the rule says more than the bound of an element."""
_TOGETHER = Tier("together", True, 0.0)
"""Class of a kernel whose sums are what they are; a dx that is folded rounds |x| and |mean|, as of one pass."""


def asked(expected: Expected, output: str) -> bool:
    """Say whether the rule is for an output: y or dx of sums so long that the bound of an element is wider."""
    problem = expected.problem
    if type(expected) is not Expected or problem.m < SHORTEST or expected.blend(output)[:2] != (1, 0):
        return False
    trained = output == "y" and problem.operation == Operation.FORWARD_TRAINING
    return trained or (output == "dx" and problem.operation == Operation.BACKWARD and problem.saved)


def apart(expected: Expected, output: str, got: Array) -> tuple[Tally, Array | None]:
    """Count the elements of y or dx that no statistics or sums explain together with the others; levels of where."""
    with np.errstate(all="ignore"):
        fitted = _Fitted(expected, output, got)
        tally = compare(fitted, output, got, (_TOGETHER,))
        return tally, levels(fitted, output, got, (_TOGETHER,)) if tally.over else None


class _Fitted(Expected):
    """The result of the statistics or sums that explain `got` best."""

    def __init__(self, expected: Expected, output: str, got: Array) -> None:
        vars(self).update(vars(expected))
        problem, p = expected.problem, expected.precision
        mean, inverse = expected.statistics
        fit = least_squares(expected, output, got, rounded=False)
        first, second = fit.first, fit.second
        size, scale, u = np.abs(inverse), self.wide("scale"), p.u
        gain = scale if output == "y" else scale * inverse
        slope, offset = (np.where(gain == 0, 0.0, a / gain) for a in (fit.slope, fit.offset))
        normal, gain = np.sqrt(second), np.abs(gain)
        if output == "y":
            self._inverse = inverse * (1 + slope)
            self._mean = mean - offset / self._inverse
            bias = np.abs(self.wide("bias"))
            result = gain * normal + bias
            error = 4 * u * (gain * (normal + 2 * np.abs(mean) * size) + bias)
        else:
            sums_of = expected.outputs
            moved = {"dbias": sums_of["dbias"] - offset * problem.m, "dscale": sums_of["dscale"] - slope * problem.m}
            self._parameters = {**self._parameters, **moved}
            centre, along = (np.abs(moved[name]) / problem.m for name in ("dbias", "dscale"))
            assert fit.dy is not None
            result = gain * (np.sqrt(fit.dy) + centre + normal * along)
            error = 7 * u * result + 3 * u * gain * along * (normal + 2 * np.abs(mean) * size)
        rms = error + p.u_out * result + p.tiny_out
        deviation = np.sqrt(second - first * first)
        self._room = rms * (1 + np.abs(first) / deviation), rms * size / deviation
        none = np.zeros(mean.shape)
        self.deviations = lambda tier: Deviations(none, none, none, none.astype(bool))

    def _weights(self, output: str, tier: Tier, lost: Array) -> tuple[Array, ...]:
        p, size, scale = self.precision, np.abs(self._inverse), self.wide("scale")
        none = np.zeros_like(size)
        if output == "y":
            off = none + p.tiny, none
            first, slope, *others = forward_weights(self._mean, size, scale, self.wide("bias"), off, p.u)
        else:
            sums = self._parameters["dscale"], self._parameters["dbias"]
            errors = none + p.tiny, none, none, np.where(lost, np.inf, none)
            first, slope, *others = backward_weights(
                self._mean, size, scale, *sums, errors, self.problem.m, p.u, tier.one_pass
            )
        return first + self._room[0], slope + self._room[1], *others
