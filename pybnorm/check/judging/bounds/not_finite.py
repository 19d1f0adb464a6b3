"""Values that are not finite: what IEEE 754 says of an output whose correct value is NaN, infinite or too large.

Where the reference is finite, and in the output's range, the bound judges, and a NaN or infinity is FAIL: *spread* from
somewhere else. Where it is not finite because an input is not, no formula of batch norm, in no order, gives a finite
result; what it gives is certain only in part:

NaN must come out
    where a NaN goes in: of x (in inference for that element alone, else for the whole statistic: mean, 1/sigma, both
    running statistics, y, dscale and dx, but not dbias), of dy (dbias, dscale, dx), of scale, bias, a given mean,
    variance or 1/sigma, of a prior that is read. Also for an infinity in x where the statistics come from x: x - mean
    is inf - inf, so 1/sigma, y, the running variance, dscale and dx are NaN; for infinities of both signs in one sum;
    for the square root of a negative number; for 0 * inf of a scale of 0 in inference.
Infinity of a certain sign must come out
    where the definition says so and sums or products of one infinity make it: mean, running mean and dbias, y of
    inference, and every finite result that is beyond the range of the output's type by more than its bound.
NaN or infinity must come out
    in all other places. Which of them depends on the order of operations.

A finite value in such a place is FAIL: *swallowed* (a maximum with 0, a mask, a skipped element), or *saturated* where
it is the largest finite number of the type. So are infinity where NaN must come out and the wrong sign where it is
certain. NaN where the definition says infinity, infinity where it says NaN, are WARN: formulas that are correct may
differ there (Welford's recurrence makes inf - inf of an infinite mean).

Batch norm of a negative variance is not defined. IEEE's square root makes NaN of it, which shows that a running
variance is spoilt; a library that takes |variance + epsilon| hides it. Values of inference that are just that, to
within twice their bound, are WARN and not swallowed: no document of a vendor says that they must be NaN.

A right library may skip what has no weight: alpha = 0, the batch's statistics at a factor of 0, the old ones at a
factor of 1. Running statistics are then what there is without it, or NaN, which is WARN; any other value is FAIL. Open
is y or dx of alpha = 0, what comes of finite inputs by overflow on the way, and of a variance + epsilon of 0. With an
alpha beyond the square root of the range, kernels that multiply by it first overflow on the way: NaN and infinity of
either sign are then right in another order, and finite values alone are judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected, Part
from pybnorm.enums import Operation
from pybnorm.reference.namespaces import Array

_SIGNED = ("saved_mean", "running_mean", "dbias")
"""Outputs whose infinity has the definition's sign in every formula; y of inference too."""


@dataclasses.dataclass
class Finding:
    """Elements of one output that are not what they must be, all in one way."""

    text: str
    wrong: bool
    """Whether no correct kernel does it: FAIL, else WARN."""
    count: int
    index: tuple[int, ...]
    """Of the first of them."""
    right: float
    """The value of the definition there."""
    got: float

    def __str__(self) -> str:
        elements = f"{self.count} element{'s' if self.count > 1 else ''}"
        return f"{elements} {self.text} (first at {self.index}: {self.got:g}, definition {self.right:g})"


@dataclasses.dataclass
class Findings:
    """The findings about one output."""

    judged: int = 0
    """Elements that must not be finite, or must be infinite."""
    found: list[Finding] = dataclasses.field(default_factory=list)
    places: list[tuple[tuple[slice, ...], Array]] = dataclasses.field(default_factory=list)
    """Blocks, and which elements of each are wrong."""


def find(expected: Expected, output: str, got: Array, tier: Tier) -> Findings:
    """Hold elements that no bound judges against what IEEE 754 makes of them; `tier` is the loosest class."""
    marks = _certain(expected, output)
    largest = expected.largest(output)
    overflows = expected.overflows(output)
    signed = output in _SIGNED or expected.problem.operation == Operation.FORWARD_INFERENCE
    result, found = Findings(), dict[str, Finding]()
    unsigned = _without_sign(expected, output, tier)
    for part in expected.parts(output, got, (tier,)):
        assert part.got is not None
        right, values, bound = part.reference, part.got, part.classes[0][0]
        other = next(unsigned, None)
        here = [np.broadcast_to(a, expected.shape(output))[part.index] for a in (marks.reached, marks.nan, marks.open)]
        with np.errstate(all="ignore"):
            finite = np.isfinite(right)
            certain = ~finite & here[0] & ~here[2]
            must_nan = certain & here[1]
            beyond = finite & (np.abs(right) - bound > largest)
            either = certain & ~must_nan
            opposite = np.sign(values) == -np.sign(right)
            infinite, not_a_number = np.isinf(values), np.isnan(values)
            in_range, ends = np.isfinite(values), np.abs(values) == largest
            absolute = np.zeros(right.shape, bool)
            if other is not None:  # twice: a store that truncates is judged where the value is certain
                absolute = must_nan & (np.abs(values - other.reference) <= 2 * other.classes[0][0])
            weightless = np.zeros(right.shape, bool)
            if output.startswith("running"):
                lost = finite & np.isinf(bound) & (expected.problem.factor == 0)
                weightless = (~finite & here[0] & here[2]) | lost
            other_sign = infinite & np.isinf(right) & either & opposite
            wrong_sign = (beyond & infinite & opposite) | (other_sign & signed)
            kinds = (
                ((must_nan | either) & in_range & ~ends & ~absolute, True, _SWALLOWED),
                ((must_nan | either | beyond) & ends & ~absolute, True, _SATURATED),
                (absolute, False, _WITHOUT_SIGN),
                (beyond & in_range & ~ends, True, "finite where infinity must come out"),
                (weightless & in_range & _other(expected, output, values, tier, weightless), True, _WEIGHTLESS),
                (weightless & not_a_number & ~finite, False, "NaN of statistics that have no weight, which were read"),
                (must_nan & infinite, True, "infinite where NaN must come out"),
                (wrong_sign & (not overflows), True, "infinite with the wrong sign"),
                ((other_sign & (not signed)) | (wrong_sign & overflows), False, _OTHER_SIGN),
                ((beyond | (either & np.isinf(right))) & not_a_number, False, _NAN_FOR_INFINITY),
                (either & np.isnan(right) & infinite, False, _INFINITY_FOR_NAN),
            )
        result.judged += int(np.count_nonzero(certain | beyond | weightless))
        for where, wrong, text in kinds:
            if not where.any():
                continue
            if wrong:
                result.places.append((part.index, where))
            if text not in found:
                local = np.unravel_index(int(np.argmax(where)), where.shape)
                index = tuple(int(k) + s.start for k, s in zip(local, part.index, strict=True))
                found[text] = Finding(text, wrong, 0, index, float(right[local]), float(values[local]))
            found[text].count += int(np.count_nonzero(where))
    result.found = list(found.values())
    return result


def _without_sign(expected: Expected, output: str, tier: Tier) -> Iterator[Part]:
    """Blocks of inference from the absolute value of variance + epsilon; none if no variance is negative."""
    problem, inputs = expected.problem, expected.inputs
    if problem.operation != Operation.FORWARD_INFERENCE or problem.inverse:
        return
    total = expected.wide("variance") + problem.epsilon
    if (total < 0).any():
        changed = dataclasses.replace(inputs, variance=np.abs(total) - problem.epsilon)
        yield from expected.varied(problem, changed).parts(output, None, (tier,))


def _other(expected: Expected, output: str, values: Array, tier: Tier, where: Array) -> Array:
    """Say which running statistics are not those without what has no weight."""
    if not where.any():
        return where
    problem, inputs = expected.problem, expected.inputs
    zero = {name: np.zeros_like(inputs.need(name)) for name in ("mean", "variance")}
    if problem.factor == 0:
        right = expected.wide(output.removeprefix("running_"))
        bound = 4 * expected.precision.u_param * np.abs(right) + expected.precision.tiny_param
    else:
        (part,) = type(expected)(problem, dataclasses.replace(inputs, **zero)).parts(output, values, (tier,))
        right, bound = part.reference, part.classes[0][0]
    return ~(np.abs(values - right) <= bound)


_WEIGHTLESS = "neither NaN nor what comes without the statistics that have no weight"
_SWALLOWED = "swallowed: finite where NaN or infinity must come out"
_SATURATED = "saturated: the type's largest finite number where NaN or infinity must come out"
_WITHOUT_SIGN = "of a negative variance finite, as of |variance + epsilon|, where a square root is NaN"
_OTHER_SIGN = "infinite with another sign than the definition's"
_NAN_FOR_INFINITY = "NaN where the definition gives infinity, as another order of operations may"
_INFINITY_FOR_NAN = "infinite where the definition gives NaN, as another order of operations may"


@dataclasses.dataclass
class _Marks:
    """Elements that an input that is not finite reaches: those of NaN, and those where that is open."""

    reached: Any
    nan: Any
    open: Any = False

    def __or__(self, other: _Marks) -> _Marks:
        return _Marks(self.reached | other.reached, self.nan | other.nan, self.open | other.open)


def _certain(expected: Expected, output: str) -> _Marks:
    with np.errstate(all="ignore"):
        marks = _MARKS[expected.problem.operation](expected, output)
        alpha, beta, prior = expected.blend(output)
        # what an activation makes of NaN is not fixed
        marks.open = np.asarray(marks.open) | (marks.reached & (alpha == 0 or bool(expected.problem.activation)))
        if beta != 0 and prior is not None:
            marks |= _of(prior)
            marks.open = marks.open & ~np.isnan(prior)
    return marks


def _of(array: Array) -> _Marks:
    return _Marks(~np.isfinite(array), np.isnan(array))


def _any_of(expected: Expected, array: Array) -> _Marks:
    """Say which statistics have an element that is not finite, and which a NaN."""
    values = np.isfinite(array), ~np.isnan(array)
    finite, number = (np.asarray(np.all(a, axis=expected.problem.reduced_axes, keepdims=True)) for a in values)
    return _Marks(~finite, ~number)


def _sum_of(expected: Expected, array: Array) -> _Marks:
    """Follow NaN and infinity into the sum over each statistic's elements."""
    axes = expected.problem.reduced_axes
    up, down = ((array == end).any(axis=axes, keepdims=True) for end in (np.inf, -np.inf))
    return _any_of(expected, array) | _Marks(False, up & down)


def _root(expected: Expected) -> _Marks:
    """Follow NaN and infinity into a given inverse standard deviation, or into that of a given variance."""
    problem, inverse = expected.problem, expected.statistics[1]
    if problem.takes_variance or (problem.operation == Operation.FORWARD_INFERENCE and not problem.inverse):
        return _Marks(np.isnan(inverse), np.isnan(inverse))
    return _of(inverse)


def _training(expected: Expected, output: str) -> _Marks:
    inputs, factor = expected.inputs, expected.problem.factor
    mean = _sum_of(expected, inputs.x)
    inverse = _Marks(mean.reached, mean.reached)  # of x - mean, both from x: inf - inf
    if output == "y":
        return inverse | _of(inputs.scale) | _of(inputs.need("bias"))
    batch = mean if output.endswith("mean") else inverse
    if not output.startswith("running"):
        return batch
    old = _of(inputs.need(output.removeprefix("running_")))
    return _Marks(
        batch.reached | old.reached,
        (batch.nan & (factor != 0)) | (old.nan & (factor != 1)),
        (batch.reached & (factor == 0)) | (old.reached & (factor == 1)),
    )


def _inference(expected: Expected, output: str) -> _Marks:
    inputs = expected.inputs
    mean, inverse = expected.statistics
    centred = _of(inputs.x) | _of(mean)
    nothing = _Marks(False, centred.reached & (expected.wide("scale") * inverse == 0))
    return centred | _root(expected) | _of(inputs.scale) | _of(inputs.need("bias")) | nothing


def _backward(expected: Expected, output: str) -> _Marks:
    inputs, composed, mean = expected.inputs, expected.problem.composed, expected.statistics[0]
    own = inputs.need("dy")
    sums = _sum_of(expected, own)
    if output in ("dbias", "sum_dy"):
        return sums
    if output == "dx" and composed not in ("", "sync_backward"):  # a statistic's elements do not meet
        marks = _of(own) | _of(inputs.scale) | _root(expected)
        if composed == "frozen":
            return marks
        marks |= _of(inputs.x) | _of(mean)
        if composed == "backward_elemt":
            return marks | _of(inputs.need("sum_dy")) | _of(inputs.need("sum_dy_xmu"))
        return marks | _any_of(expected, inputs.x) | _any_of(expected, own) | sums  # of training_grad, but its sums do
    x, dy = (_any_of(expected, a) for a in (inputs.x, own))
    if expected.problem.recomputes:
        x = _Marks(x.reached, x.reached)
    else:  # products of two infinities with what they meet may have one sign
        x |= _of(mean) if output == "sum_dy_xmu" else _of(mean) | _root(expected)
    return x | dy if output in ("dscale", "sum_dy_xmu") else x | dy | sums | _of(inputs.scale)


_MARKS = {
    Operation.FORWARD_TRAINING: _training,
    Operation.FORWARD_INFERENCE: _inference,
    Operation.BACKWARD: _backward,
}
