"""The conventions that batch norms differ in, as formulas: which of them explains an output that is wrong.

A kernel that takes momentum the other way round, adds epsilon to the standard deviation or saves the variance is wrong
in every element by what a formula says. Each formula is evaluated in float64, on some statistics and elements, and held
against what came. A convention is named where every element is within twice the bound of it, and it explains the output
in more bits than chance does:

    bits = sum over statistics of log2(rms of got - right / rms of got - convention)

with the rounding of what is stored as the least that either is, at most `MOST` of a statistic, and `EACH` less for each
convention beyond the first where several go together. `NEEDED` are more than the choice among all formulas takes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pybnorm import reference
from pybnorm.check.judging.bounds import UNBIASED
from pybnorm.check.judging.bounds.classes import Tier, depth
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.formulas import blended
from pybnorm.check.language.data import Inputs
from pybnorm.check.language.problem import DATA_OUTPUTS, Problem
from pybnorm.enums import Mode, Operation
from pybnorm.reference.namespaces import Array, on_host

NEEDED = 16.0
EACH = 6.0
MOST = 20.0
ALIKE = 3
"""Conventions that are named where the data do not tell them apart."""
STATISTICS, PLACES, VECTOR = 16, 64, 256
"""Statistics and elements of each that are looked at of y or dx, and statistics of other outputs."""
FEW = 8
"""Elements of a statistic that are looked at first."""
LARGEST = 1 << 22
"""Elements of x up to which other axes and layouts are tried."""
_KNOWN = ("", "elemt", "sync_train", "sync_backward", "training_grad", "frozen")

MOMENTUM = "Keras, TensorFlow, ONNX and flax: momentum = 1 - factor of PyTorch, cuDNN and MIOpen"
BIASED = "ONNX, Keras and flax; PyTorch, cuDNN and MIOpen take the unbiased one"
DEFAULTS = {
    1e-3: "the default of Keras and TensorFlow, and of MIOpenDriver",
    1e-5: "the default of PyTorch, ONNX and flax",
    1e-6: "",
}
OUTSIDE = "as Keras documented its first versions"
VARIANCE = "oneDNN saves the variance; cuDNN, MIOpen and PyTorch the inverse standard deviation"
EVALUATION = "PyTorch: training=False, eval(); Keras: training=False; TensorFlow: is_training=False"
AFFINE = "PyTorch: affine=False; Keras: scale=False, center=False; flax: use_scale, use_bias"
DDOF = "PyTorch: x.std(); NumPy: x.std(ddof=1)"
AXIS = "Keras: axis; flax: axis, reduction axes; PyTorch's channels are axis 1, Keras's and flax's the last"


@dataclasses.dataclass(frozen=True)
class Convention:
    """A convention that explains an output."""

    text: str
    switch: str = ""
    """Where it is the rule, or which option makes it so."""
    bits: float = 0.0
    """By how much it explains the output better than the definition."""

    def __str__(self) -> str:
        return self.text + (f" ({self.switch})" if self.switch else "")


_Way: TypeAlias = tuple[Any, ...]
"""One way of something: its text, "" of the correct one; its switch; and the numbers that it consists of."""


_Made: TypeAlias = tuple[list[str], str, Array]
"""The texts of conventions, their switch, and an output as they make it."""


@dataclasses.dataclass
class Given:
    """Numbers of some statistics, (statistics, 1), and elements of each, (statistics, places), in float64."""

    problem: Problem
    mean: Array
    inverse: Array
    scale: Array
    bias: Array
    variance: Any = None
    """Biased; None where the inverse standard deviation is given."""
    old_mean: Any = None
    old_variance: Any = None
    dscale: Any = None
    dbias: Any = None
    x: Any = None
    dy: Any = None
    others: Sequence[tuple[str, str, Array, Array]] = ()
    """Mean and variance over other axes, at the elements, or those of x where others are given: text and switch."""

    @property
    def bessel(self) -> float:
        """The factor of the unbiased variance."""
        m = self.problem.m
        return m / (m - 1) if m > 1 else 1.0

    def updated(self, old: Array, batch: Array) -> Array:
        """A running statistic after its update."""
        return self.problem.factor * batch + (1 - self.problem.factor) * old


def convention_of(expected: Expected, output: str, got: Array) -> Convention | None:
    """The convention that explains an output that is wrong; None if none does."""
    problem, found = expected.problem, []
    if problem.composed not in _KNOWN or problem.activation:
        return None
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        for texts, switch, values in seen.candidates():
            bits = seen.bits(values) - EACH * (len(texts) - 1)
            if bits >= NEEDED:
                found.append(Convention(" and ".join(texts), switch, bits))
    if not found:
        return None
    most = max(one.bits for one in found)
    like = [one for one in found if one.bits > most - 1]  # these data do not tell them apart
    named = list(dict.fromkeys(one.text for one in like))[:ALIKE]
    return Convention("; or ".join(named), like[0].switch if len(named) == 1 else "", like[0].bits)


class _Seen:
    """Some statistics of an output, and elements of each: what came, what is correct, and how far off it may be."""

    usable = False
    """True where enough of the output is finite."""

    def __init__(self, expected: Expected, output: str, got: Array) -> None:
        self.expected, self.output = expected, output
        problem, inputs, data = expected.problem, expected.inputs, output in DATA_OUTPUTS
        self.count = count = expected.statistics[0].size
        self.chosen = np.unique(np.linspace(0, count - 1, min(count, STATISTICS if data else VECTOR)).astype(int))
        rng = np.random.default_rng(3)
        self.places = rng.integers(0, problem.m, PLACES) if problem.m > PLACES else np.arange(problem.m)
        values = self.columns(self.picked(got) if data else got)
        finite = np.isfinite(values).all(axis=1)
        self.chosen, self.got = self.chosen[finite], values[finite]
        if not finite.any():
            return
        tier = Tier("", True, depth(problem.m))
        next(iter(expected.parts(output, None, (tier,))))  # what all elements need is found once
        seen = copy.copy(expected)
        if data:
            arrays = {n: self.picked(a) for n, a in inputs.arrays().items() if a.shape == inputs.x.shape}
            seen.inputs = dataclasses.replace(inputs, **arrays)
        right, allowed = np.empty((2, *seen.shape(output)))
        for part in seen.parts(output, None, (tier,)):
            right[part.index], allowed[part.index] = on_host(part.reference), on_host(part.classes[0][0])
        self.right, self.allowed = self.columns(right), self.columns(allowed)
        self.usable = bool(np.isfinite(self.right + self.allowed).all())
        alpha, beta, prior = seen.blend(output)
        self.blend = alpha, beta, None if prior is None else self.columns(prior)
        self.given = self._given(seen.inputs if data else None)
        p = expected.precision_of(output)
        self._rounding = p.u_out if data else p.u_param  # of what is stored: the least that an error is counted as
        self._size = np.abs(self.right).max(axis=1, keepdims=True)
        some, largest = self._size > 0, self.allowed.max(axis=1, keepdims=True)
        shares = largest[some] / self._size[some]
        self._relative = float(np.median(shares)) if shares.size else 0.0

    def _reach(self, size: Array) -> Array:
        """Say how far off a convention may be whose values are of that size."""
        return 2 * (self.allowed + self._relative * np.maximum(size - self._size, 0))

    def bits(self, made: Array) -> float:
        """Bits by which `made` explains what came better than what is correct does; 0 if it is not within its bound."""
        size = np.abs(made).max(axis=1, keepdims=True)
        if not np.isfinite(size).all() or not (np.abs(self.got - made) <= self._reach(size)).all():
            return 0.0
        before, after = (np.sqrt(((self.got - values) ** 2).mean(axis=1)) for values in (self.right, made))
        floor = self._rounding * np.sqrt((made**2).mean(axis=1)) + np.finfo(np.float64).tiny
        return float(np.clip(np.log2(np.maximum(before, floor) / np.maximum(after, floor)), -MOST, MOST).sum())

    def picked(self, array: Any) -> Array:
        """The elements that are looked at of an array of x's shape: places in place of images and positions."""
        dims, parameter = self.expected.problem.dims, self.expected.problem.parameter_dims
        whole = array.reshape((dims[0], self.count, -1))
        inner = whole.shape[2]
        image, inside = (a[:, None] for a in np.divmod(self.places, inner))
        return on_host(whole[image, np.arange(self.count), inside]).reshape(-1, *parameter[1:])

    def columns(self, array: Any) -> Array:
        """The statistics that are looked at of an array of the parameters' size, or of what `picked` gives."""
        return np.asarray(on_host(array), np.float64).reshape(-1, self.count)[:, self.chosen].T

    def _given(self, picked: Inputs | None) -> Given:
        """The numbers of the statistics; `picked` has the elements of y or dx."""
        expected, problem, inputs = self.expected, self.expected.problem, self.expected.inputs
        mean, inverse = map(self.columns, expected.statistics)
        bias = np.zeros_like(mean) if inputs.bias is None else self.columns(inputs.bias)
        found = Given(problem, mean, inverse, self.columns(inputs.scale), bias)
        if problem.recomputes:
            found.variance = self.columns(expected.moments.variance)
        elif inputs.variance is not None and not problem.inverse:
            found.variance = self.columns(inputs.variance)
        if problem.operation == Operation.FORWARD_TRAINING and inputs.mean is not None and problem.old != "nan":
            found.old_mean, found.old_variance = self.columns(inputs.mean), self.columns(inputs.need("variance"))
        small = inputs.x.size <= LARGEST
        if not problem.recomputes and small:
            axis = 1 if problem.mode != Mode.PER_ACTIVATION else tuple(range(1, len(problem.dims)))
            own = reference.stats(inputs.x, epsilon=0.0, axis=axis)
            text = "x's own statistics in place of those that are given"
            found.others = [(text, EVALUATION, self.columns(own.mean), self.columns(own.variance))]
        for name in ("dscale", "dbias"):
            if name in expected.outputs:
                setattr(found, name, self.columns(expected.outputs[name]))
        if picked is not None:
            found.x = self.columns(picked.x)
            found.dy = None if picked.dy is None else self.columns(picked.dy)
            if problem.recomputes and small:
                found.others = list(self._fields())
        return found

    def _fields(self) -> Iterator[tuple[str, str, Array, Array]]:
        """Mean and variance over other axes, at the elements."""
        expected, shape = self.expected, self.expected.inputs.x.shape
        own = (0,) if expected.problem.mode == Mode.PER_ACTIVATION else (0, *range(2, len(shape)))
        by_axes = {axes(len(shape)): text for text, axes in reversed(_AXES.items())}
        for over, text in reversed(by_axes.items()):
            if over == own or math.prod(shape[a] for a in over) == 1:
                continue
            if over not in expected.made:
                x = on_host(expected.inputs.x).astype(np.float64)
                expected.made[over] = x.mean(axis=over, keepdims=True), x.var(axis=over, keepdims=True)
            mean, variance = (self.columns(self.picked(np.broadcast_to(a, shape))) for a in expected.made[over])
            yield text, AXIS, mean, variance

    def candidates(self) -> Iterator[_Made]:
        """The output as each convention makes it that may be within its bound, blended."""
        if not self.usable:
            return
        alpha, beta, prior = self.blend
        few = None if prior is None else prior[:, :FEW]
        x, dy = (None if a is None else a[:, :FEW] for a in (self.given.x, self.given.dy))
        first = dataclasses.replace(self.given, x=x, dy=dy)
        # of a convention that is within its bound: no element of it is larger
        largest = np.abs(self.got).max(axis=1, keepdims=True) + 2 * self.allowed.max(axis=1, keepdims=True)
        largest = largest / (1 - 2 * self._relative) if self._relative < 0.5 else np.full_like(largest, np.inf)
        low, high = ((self.got + way * self._reach(largest))[:, :FEW] for way in (-1, 1))
        for block in _MAKERS[self.output](self.given) if self.output in _MAKERS else ():
            made = blended(block.made(first, *block.stacked()), alpha, beta, few)
            fits = ((made >= low) & (made <= high)).all(axis=(-2, -1))
            for chosen in np.argwhere(fits):
                ways = [row[i] for row, i in zip(block.ways, chosen, strict=True)]
                values = block.made(self.given, *(value for way in ways for value in way[2:]))
                texts, switches = ([way[i] for way in ways if way[i]] for i in (0, 1))
                values = np.broadcast_to(blended(values, alpha, beta, prior), self.got.shape)
                yield texts, "; ".join(dict.fromkeys(switches)), values
        yield from self._other_layout()

    def _other_layout(self) -> Iterator[_Made]:
        problem, inputs, kept = self.expected.problem, self.expected.inputs, self.expected.made
        images, channels, *plane = problem.dims
        inner = math.prod(plane)
        last, first = (problem.strides[:2] == (inner * channels, step) for step in (1, inner))
        if problem.mode == Mode.PER_ACTIVATION or inputs.x.size > LARGEST or 1 in (inner, channels):
            return
        if not (last or first) or type(self.expected) is not Expected:
            return

        def read(array: Any, last: bool) -> Array:
            """An array whose memory is read as that of the other layout; `last`: its channels are last in memory."""
            whole = on_host(array).reshape(images, channels, inner)
            whole = whole.swapaxes(1, 2) if last else whole.reshape(images, inner, channels).swapaxes(1, 2)
            return np.ascontiguousarray(whole).reshape(problem.dims)

        if "layout" not in kept:
            changed = {n: read(a, last) for n, a in inputs.arrays().items() if a.shape == inputs.x.shape}
            kept["layout"] = type(self.expected)(problem, dataclasses.replace(inputs, **changed))
        values = kept["layout"].outputs[self.output]
        values = self.columns(self.picked(read(values, not last)) if self.output in DATA_OUTPUTS else values)
        word = "NHWC is read as NCHW" if last else "NCHW is read as NHWC"
        yield [word], AXIS, blended(values, *self.blend)


_AXES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "each image has statistics of its own (instance norm)": lambda d: tuple(range(2, d)),
    "statistics are over channels and positions of an image (layer norm)": lambda d: tuple(range(1, d)),
    "statistics are over channels, not over images and positions": lambda d: (1,),
    "statistics are over images alone (per activation)": lambda d: (0,),
    "statistics are over images and positions (spatial)": lambda d: (0, *range(2, d)),
    "statistics are over all elements": lambda d: tuple(range(d)),
    "statistics are over the last axis": lambda d: (d - 1,),
    "statistics are over all axes but the last": lambda d: tuple(range(d - 1)),
}


class _Block(NamedTuple):
    """Every combination of some ways, one of each row, and the output that the numbers make with their values."""

    ways: tuple[list[_Way], ...]
    made: Callable[..., Array]

    def stacked(self) -> Iterator[Array]:
        """The values of all ways at the first few elements: an axis for each row, then statistics and places."""
        for axis, row in enumerate(self.ways, 1):
            for same in zip(*(way[2:] for way in row), strict=True):
                whole = np.stack(np.broadcast_arrays(*(np.atleast_2d(a)[:, :FEW] for a in same)))
                yield whole.reshape(len(row), *(1,) * (len(self.ways) - axis), *whole.shape[1:])


def _alone(*ways: _Way) -> list[_Block]:
    """The forms of an output that is made of nothing else."""
    return [_Block(([*ways],), lambda g, values: values)]


def _epsilons(epsilon: float) -> Iterator[tuple[str, str, float]]:
    words = {10: "10 times", 100: "100 times", 0.1: "a tenth of", 0.01: "a hundredth of"}
    ways = [(f"epsilon is {value:g}, not {epsilon:g}", where, value) for value, where in DEFAULTS.items()]
    for times, word in words.items():
        text = f"epsilon is {word} what it should be: {epsilon * times:g}, not {epsilon:g}"
        ways.append((text, "", epsilon * times))
    ways += [("epsilon is missing", "", 0.0), (f"epsilon is added twice: {2 * epsilon:g}", "", 2 * epsilon)]
    seen = [epsilon]
    for way in ways:
        if not any(math.isclose(way[2], other, rel_tol=1e-6) for other in seen):
            seen.append(way[2])
            yield way


def _spreads(g: Given) -> list[_Way]:
    """The inverse standard deviation from the variance, and what it is in other conventions."""
    v, s, epsilon = g.variance, g.inverse, g.problem.epsilon
    correct = ("", "", s)
    if v is None:
        return [
            correct,
            ("the inverse standard deviation is taken for a variance", VARIANCE, 1 / np.sqrt(s + epsilon)),
            ("the inverse standard deviation is taken for a standard deviation", "", 1 / s),
            ("epsilon is added to what has it already", "", 1 / np.sqrt(1 / s**2 + epsilon)),
        ]
    c, rms, deviation = g.bessel, v + g.mean**2, np.sqrt(v)
    roots = 1 / (deviation + math.sqrt(epsilon))
    unbiased = 1 / (np.sqrt(v * c) + epsilon)
    return [
        correct,
        *((text, switch, 1 / np.sqrt(v + value)) for text, switch, value in _epsilons(epsilon)),
        ("epsilon is added to the standard deviation: sqrt(var) + eps", OUTSIDE, 1 / (deviation + epsilon)),
        ("the root of epsilon is added to the standard deviation: sqrt(var) + sqrt(eps)", "", roots),
        ("max(var, eps) in place of var + eps", "", 1 / np.sqrt(np.maximum(v, epsilon))),
        (UNBIASED, "", 1 / np.sqrt(v * c + epsilon)),
        ("the unbiased standard deviation plus epsilon: sqrt(var m / (m - 1)) + eps", DDOF, unbiased),
        ("divided by the variance, without its root", "", 1 / (v + epsilon)),
        ("multiplied by the standard deviation, not by its inverse", "", np.sqrt(v + epsilon)),
        ("the variance is taken for an inverse standard deviation", VARIANCE, v),
        ("the variance is taken for a standard deviation", "", 1 / v),
        ("not divided by the standard deviation", "", np.ones_like(v)),
        ("the mean square in place of the variance", "", 1 / np.sqrt(rms + epsilon)),
    ]


def _statistics(g: Given) -> list[_Way]:
    """Mean and inverse standard deviation that y or dx is made with."""
    zero, v, epsilon = np.zeros_like(g.mean), g.variance, g.problem.epsilon
    others = [*g.others]
    if v is not None:
        rms = "the mean is not subtracted, and the mean square is the variance (RMS norm)"
        others.append((rms, "", zero, v + g.mean**2))
    if g.old_mean is not None:
        text = "training normalizes by the running statistics"
        others.append((text, EVALUATION, g.old_mean, g.old_variance))
        mean = g.updated(g.old_mean, g.mean)
        for word, c in (("", g.bessel), (", biased", 1.0)):
            others.append((f"{text} after their update{word}", "", mean, g.updated(g.old_variance, c * v)))
    return [
        *((text, switch, g.mean, inverse) for text, switch, inverse in _spreads(g)),
        ("the mean is not subtracted", "", zero, g.inverse),
        ("the mean is added, not subtracted", "", -g.mean, g.inverse),
        *((text, switch, mean, 1 / np.sqrt(variance + epsilon)) for text, switch, mean, variance in others),
    ]


def _scales(g: Given) -> list[_Way]:
    one = np.ones_like(g.scale)
    return [
        ("", "", g.scale),
        ("gamma is missing, or fixed at 1", AFFINE, one),
        ("abs(gamma) in place of gamma", "", np.abs(g.scale)),
        ("1 + gamma in place of gamma", "", one + g.scale),
        ("gamma squared in place of gamma", "", g.scale**2),
    ]


def _affine(g: Given) -> list[_Way]:
    zero = np.zeros_like(g.bias)
    return [
        *((*way, g.bias) for way in _scales(g)),
        ("beta is missing", AFFINE, g.scale, zero),
        ("gamma and beta are missing", AFFINE, np.ones_like(g.scale), zero),
        ("gamma and beta are taken for one another", "", g.bias, g.scale),
        ("beta is added before gamma: gamma (x_hat + beta)", "", g.scale, g.scale * g.bias),
        ("beta is subtracted", "", g.scale, -g.bias),
        ("divided by gamma, not multiplied", "", 1 / g.scale, g.bias),
        ("y has the other sign", "", -g.scale, -g.bias),
    ]


def _y(g: Given) -> list[_Block]:
    def made(g: Given, mean: Array, inverse: Array, scale: Array, bias: Array) -> Array:
        return scale * ((g.x - mean) * inverse) + bias

    statistics, affine = _statistics(g), _affine(g)
    cut: _Way = ("an activation is applied: max(y, 0)", "", 0.0)
    activated = (statistics[:1], affine[:1], [cut])
    return [
        _Block((statistics, affine), made),
        _Block(activated, lambda g, *values: np.maximum(made(g, *values[:-1]), values[-1])),
    ]


def _terms(g: Given) -> list[_Way]:
    """The factors of the means of dy and of dy x_hat in the gradient of x."""
    m, r = float(g.problem.m), g.inverse
    return [
        ("", "", 1.0, 1.0),
        ("dx is that of evaluation, without the sums", EVALUATION, 0.0, 0.0),
        ("dx without the term of dbias, the mean of dy", "", 0.0, 1.0),
        ("dx without the term of dscale, the projection on x_hat", "", 1.0, 0.0),
        ("dx with sums in place of means", "", m, m),
        ("dx with the sum of dy in place of its mean", "", m, 1.0),
        ("dx with the sum dscale in place of its mean", "", 1.0, m),
        ("dx without 1/sigma in its projection", "", 1.0, 1 / r),
        ("dx with 1/sigma squared in its projection", "", 1.0, r),
        ("dx with the terms added, not subtracted", "", -1.0, -1.0),
        ("dx with a projection divided by m - 1", "", 1.0, g.bessel),
        ("dx with means divided by m - 1", "", g.bessel, g.bessel),
    ]


def _dx(g: Given) -> list[_Block]:
    def made(g: Given, inverse: Any, centre: Any, along: Any, scale: Array) -> Array:
        projection = along * (g.dscale * (inverse / g.inverse) / g.problem.m)
        inner = g.dy - centre * (g.dbias / g.problem.m) - (g.x - g.mean) * inverse * projection
        return scale * inverse * inner

    spreads, terms = _spreads(g), _terms(g)
    last: list[_Way] = [
        ("dx is multiplied by the standard deviation", "", g.scale / g.inverse**2),
        ("dx is multiplied by m", "", g.scale * g.problem.m),
        ("dx is divided by gamma", "", 1 / g.scale),
    ]
    return [_Block((spreads, terms, _scales(g)), made), _Block((spreads[:1], terms, last), made)]


def _dscale(g: Given) -> list[_Block]:
    d, b, r = g.dscale, g.dbias, g.inverse
    forms: list[_Way] = [
        ("", "", d),
        ("dscale without 1/sigma", "", d / r),
        ("dscale with 1/sigma squared", "", d * r),
        ("dscale by y in place of x_hat", "", g.scale * d + g.bias * b),
        ("dscale by x in place of x_hat", "", d / r + g.mean * b),
        ("dscale by x / sigma, without the mean", "", d + g.mean * r * b),
        ("dscale divided by gamma", "", d / g.scale),
        ("dscale multiplied by gamma", "", d * g.scale),
        ("dscale is a mean, not a sum", "", d / g.problem.m),
        ("dscale has the other sign", "", -d),
        ("dscale and dbias are taken for one another", "", b),
    ]
    return [_Block((_spreads(g), forms), lambda g, inverse, values: values * inverse / g.inverse)]


def _dbias(g: Given) -> list[_Block]:
    b = g.dbias
    return _alone(
        ("", "", b),
        ("dbias is a mean, not a sum", "", b / g.problem.m),
        ("dbias has the other sign", "", -b),
        ("dscale and dbias are taken for one another", "", g.dscale),
        ("dbias multiplied by gamma", "", b * g.scale),
        ("dbias divided by gamma", "", b / g.scale),
        ("dbias multiplied by 1/sigma", "", b * g.inverse),
    )


def _saved_mean(g: Given) -> list[_Block]:
    ways: list[_Way] = [
        ("", "", g.mean),
        ("the sum is saved, not the mean", "", g.mean * g.problem.m),
        ("the mean is saved with the other sign", "", -g.mean),
        ("the mean is divided by m - 1", "", g.mean * g.bessel),
    ]
    if g.old_mean is not None:
        new = g.updated(g.old_mean, g.mean)
        ways.append(("the running mean of before is saved, not the batch's", EVALUATION, g.old_mean))
        ways.append(("the running mean after its update is saved, not the batch's", "", new))
    return _alone(*ways)


_SAVED = (
    "the variance is taken for an inverse standard deviation",
    "multiplied by the standard deviation, not by its inverse",
    "divided by the variance, without its root",
)
"""Of `_spreads`, what is saved under another name."""


def _saved_spread(g: Given) -> list[_Block]:
    v, e, c, saves_variance = g.variance, g.problem.epsilon, g.bessel, g.problem.saves_variance
    if v is None:
        return []
    what = "the variance" if saves_variance else "the inverse standard deviation"
    others: dict[str, tuple[str, Array]] = {
        "the variance": (VARIANCE, v),
        "the unbiased variance": (VARIANCE, c * v),
        "the variance with epsilon": (VARIANCE, v + e),
        "the standard deviation": ("", np.sqrt(v)),
        "the standard deviation with epsilon": ("", np.sqrt(v + e)),
        "the standard deviation of the unbiased variance": ("", np.sqrt(c * v)),
        "the inverse variance": ("", 1 / (v + e)),
        "the sum of squares, not divided by m": ("", v * g.problem.m),
        "the mean square": ("", v + g.mean**2),
        "the inverse standard deviation": (VARIANCE, g.inverse),
    }
    ways: list[_Way] = [("", "", others.pop(what)[1])]
    ways += [(f"{name} is saved, not {what}", *other) for name, other in others.items()]
    if not saves_variance:
        ways += [way for way in _spreads(g) if way[0] and way[0] not in _SAVED]
    if g.old_variance is not None:
        new = g.updated(g.old_variance, c * v if g.problem.unbiased else v)
        old, new = (a if saves_variance else 1 / np.sqrt(a + e) for a in (g.old_variance, new))
        ways.append(("the running variance of before is saved, not the batch's", EVALUATION, old))
        ways.append(("the running variance itself is saved", "", g.old_variance))
        ways.append(("the running variance after its update is saved, not the batch's", "", new))
    return _alone(*ways)


def _running(g: Given, old: Array, kinds: list[_Way]) -> list[_Block]:
    """A running statistic by what it takes of the batch, and by the weights of that and of the old one."""
    f = g.problem.factor
    swapped = "momentum is the other way round: running = factor * old + (1 - factor) * batch"
    averages: list[_Way] = [
        ("", "", f, 1 - f),
        (swapped, MOMENTUM, 1 - f, f),
        ("the running statistic is not updated", EVALUATION, 0.0, 1.0),
        ("the running statistic is the batch's: the factor is 1", "PyTorch: momentum=1", 1.0, 0.0),
        ("the old running statistic is not weighed down: old + factor * batch", "", f, 1.0),
        ("the batch's is not weighed down: (1 - factor) * old + batch", "", 1.0, 1 - f),
    ]
    for value in (0.1, 0.01, 0.9, 0.99, 0.5):
        if not math.isclose(value, f) and not math.isclose(value, 1 - f):
            averages.append((f"the factor is {value:g}, not {f:g}", "", value, 1 - value))
    averages.append(("the update is made twice", "", f + (1 - f) * f, (1 - f) ** 2))
    return [_Block((kinds, averages), lambda g, batch, new, kept: new * batch + kept * old)]


def _running_mean(g: Given) -> list[_Block]:
    if g.old_mean is None:
        return []
    kinds: list[_Way] = [
        ("", "", g.mean),
        ("the running mean takes sums, not means", "", g.mean * g.problem.m),
        ("the running mean takes a sum over m - 1", "", g.mean * g.bessel),
    ]
    return _running(g, g.old_mean, kinds)


def _running_variance(g: Given) -> list[_Block]:
    if g.old_mean is None:
        return []
    v, c, takes = g.variance, g.bessel, "running_variance takes the"
    own, other = c * v, (f"{takes} biased variance (a sum over m, not m - 1)", BIASED, v)
    if not g.problem.unbiased:
        own, other = v, (f"{takes} unbiased variance (a sum over m - 1, not m)", BIASED, c * v)
    kinds: list[_Way] = [
        ("", "", own),
        other,
        (f"{takes} standard deviation", "", np.sqrt(v)),
        (f"{takes} inverse standard deviation", "", g.inverse),
        (f"{takes} variance with epsilon", "", v + g.problem.epsilon),
        (f"{takes} sum of squares, not divided by m", "", v * g.problem.m),
        ("running_variance takes m / (m - 1) twice", "", c * c * v),
        ("running_variance takes (m - 1) / m in place of m / (m - 1)", "", v / c),
        (f"{takes} mean square", "", v + g.mean**2),
        (f"{takes} variance about the old running mean", "", v + (g.mean - g.old_mean) ** 2),
    ]
    return _running(g, g.old_variance, kinds)


_MAKERS: dict[str, Callable[[Given], list[_Block]]] = {
    "y": _y,
    "dx": _dx,
    "dscale": _dscale,
    "dbias": _dbias,
    "saved_mean": _saved_mean,
    "saved_inv_variance": _saved_spread,
    "running_mean": _running_mean,
    "running_variance": _running_variance,
}
"""An output as each convention makes it; without a text as the definition does."""


def alike(expected: Expected, output: str, got: Array) -> list[str]:
    """Conventions that make of these data what the definition makes, within the bound; only those that stand alone."""
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        found: dict[str, None] = {}
        for texts, _, values in seen.candidates():
            near = np.abs(values - seen.got) <= seen.allowed
            other = np.abs(values - seen.right) > 1e-9 * seen.allowed
            if len(texts) == 1 and near.all() and other.any():
                found[texts[0]] = None
    return list(found)


def fitted(expected: Expected, output: str, got: Array) -> str:
    """The epsilon or factor that explains y, 1/sigma or a running statistic best, in words; empty if none does."""
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        if not seen.usable or seen.given.variance is None:
            return ""
        if output in ("y", "saved_inv_variance"):
            return _fitted_epsilon(seen.given, seen)
        return _fitted_factor(seen.given, seen) if seen.given.old_mean is not None else ""


def _fitted_epsilon(g: Given, seen: _Seen) -> str:
    inverse, normal = seen.got, None if g.x is None else g.scale * (g.x - g.mean)
    if normal is not None:
        centred = normal - normal.mean(axis=1, keepdims=True)
        inverse = (centred * seen.got).sum(axis=1, keepdims=True) / (centred**2).sum(axis=1, keepdims=True)
    epsilon = float(np.median(1 / inverse**2 - g.variance))
    made = 1 / np.sqrt(g.variance + epsilon)
    made = made if normal is None else normal * made + g.bias
    fits = epsilon >= 0 and (np.abs(made - seen.got) <= 4 * seen.allowed).all()
    return f"epsilon={epsilon:.3g} fits" if fits else ""


def _fitted_factor(g: Given, seen: _Seen) -> str:
    kinds = {
        "running_mean": {"": (g.old_mean, g.mean)},
        "running_variance": {
            "": (g.old_variance, g.bessel * g.variance),
            " with the biased variance": (g.old_variance, g.variance),
        },
    }
    for word, (old, own) in kinds.get(seen.output, {}).items():
        apart = own - old
        factor = float(((seen.got - old) * apart).sum() / (apart**2).sum())
        if (np.abs(factor * own + (1 - factor) * old - seen.got) <= 4 * seen.allowed).all():
            return f"factor={factor:.4g}{word} fits"
    return ""
