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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pybnorm import reference
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


class Made(NamedTuple):
    """An output as conventions make it."""

    texts: tuple[str, ...]
    switch: str
    values: Array


@dataclasses.dataclass
class Given:
    """Numbers of some statistics, (statistics, 1), and elements of each, (statistics, places), in float64."""

    problem: Problem
    mean: Array
    inverse: Array
    scale: Array
    bias: Array
    variance: Array | None = None
    """Biased; None where the inverse standard deviation is given."""
    old_mean: Array | None = None
    old_variance: Array | None = None
    own: tuple[Array, Array] | None = None
    """Mean and variance of x, where statistics are given."""
    dscale: Array | None = None
    dbias: Array | None = None
    x: Array | None = None
    dy: Array | None = None
    fields: tuple[tuple[str, Array, Array], ...] = ()
    """Mean and variance over other axes, at the elements, with their names."""

    @property
    def m(self) -> int:
        """Elements of a statistic."""
        return self.problem.m

    @property
    def bessel(self) -> float:
        """The factor of the unbiased variance."""
        return self.m / (self.m - 1) if self.m > 1 else 1.0

    def updated(self, old: Array, batch: Array) -> Array:
        """A running statistic after its update."""
        return self.problem.factor * batch + (1 - self.problem.factor) * old

    def first(self) -> Given:
        """The same at the first few elements."""
        x, dy = (None if a is None else a[:, :FEW] for a in (self.x, self.dy))
        return dataclasses.replace(self, x=x, dy=dy)


def convention_of(expected: Expected, output: str, got: Array) -> Convention | None:
    """The convention that explains an output that is wrong; None if none does."""
    problem = expected.problem
    if problem.composed not in _KNOWN or problem.activation:
        return None
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        if not seen.usable:
            return None
        found = []
        for made in seen.candidates():
            bits = seen.evidence.bits(made.values) - EACH * (len(made.texts) - 1)
            if bits >= NEEDED:
                found.append(Convention(" and ".join(made.texts), made.switch, bits))
    if not found:
        return None
    most = max(one.bits for one in found)
    like = [one for one in found if one.bits > most - 1]  # these data do not tell them apart
    texts = list(dict.fromkeys(one.text for one in like))[:ALIKE]
    return Convention("; or ".join(texts), like[0].switch if len(texts) == 1 else "", like[0].bits)


class Evidence:
    """The results and the correct ones; conventions are weighed against both.

    `got`, `right` and `allowed`, of shape (statistics, places), are what came, what is correct, and how far off it may
    be; `rounding` is that of what is stored, the least that an error is counted as.
    """

    def __init__(self, got: Array, right: Array, allowed: Array, rounding: float) -> None:
        self._got, self._allowed, self._rounding = got, allowed, rounding
        self._size = np.abs(right).max(axis=1, keepdims=True)
        some = self._size > 0
        shares = allowed.max(axis=1, keepdims=True)[some] / self._size[some]
        self._relative = float(np.median(shares)) if shares.size else 0.0
        self._before = np.sqrt(((got - right) ** 2).mean(axis=1))
        largest = np.abs(got).max(axis=1, keepdims=True) + 2 * allowed.max(axis=1, keepdims=True)
        largest = largest / (1 - 2 * self._relative) if self._relative < 0.5 else np.full_like(largest, np.inf)
        # of a convention that is within its bound: no element of it is larger than `largest`
        reach = 2 * (allowed + self._relative * np.maximum(largest - self._size, 0))
        self._low, self._high = ((got + way * reach)[:, :FEW] for way in (-1, 1))

    def may_fit(self, made: Array) -> Array:
        """Say which of some conventions, (..., statistics, `FEW` places), may be within their bounds."""
        return ((made >= self._low) & (made <= self._high)).all(axis=(-2, -1))

    def bits(self, made: Array) -> float:
        """Bits by which `made` explains what came better than what is correct does; 0 if it is not within its bound."""
        if made.shape != self._got.shape:
            made = np.broadcast_to(made, self._got.shape)
        size = np.abs(made).max(axis=1, keepdims=True)
        more = self._relative * np.maximum(size - self._size, 0)  # of what is larger
        if not np.isfinite(size).all() or not (np.abs(self._got - made) <= 2 * (self._allowed + more)).all():
            return 0.0
        floor = self._rounding * np.sqrt((made**2).mean(axis=1)) + np.finfo(np.float64).tiny
        after = np.maximum(np.sqrt(((self._got - made) ** 2).mean(axis=1)), floor)
        return float(np.clip(np.log2(np.maximum(self._before, floor) / after), -MOST, MOST).sum())


class _Seen:
    """Some statistics of an output, and elements of each: what came, what is correct, and how far off it may be."""

    def __init__(self, expected: Expected, output: str, got: Array) -> None:
        self.expected, self.output = expected, output
        problem, data = expected.problem, output in DATA_OUTPUTS
        self.count = count = expected.statistics[0].size
        chosen = np.unique(np.linspace(0, count - 1, min(count, STATISTICS if data else VECTOR)).astype(int))
        rng = np.random.default_rng(3)
        self.places = rng.integers(0, problem.m, PLACES) if problem.m > PLACES else np.arange(problem.m)
        values = self.columns(self.picked(got) if data else got, chosen)
        finite = np.isfinite(values).all(axis=1)
        self.chosen, self.got = chosen[finite], values[finite]
        self.usable = bool(finite.any())
        if not self.usable:
            return
        tier = Tier("", True, depth(problem.m))
        next(iter(expected.parts(output, None, (tier,))))  # what all elements need is found once
        seen = copy.copy(expected)
        if data:
            arrays = {
                n: self.picked(a) for n, a in expected.inputs.arrays().items() if a.shape == expected.inputs.x.shape
            }
            seen.inputs = dataclasses.replace(expected.inputs, **arrays)
        right, allowed = np.empty((2, *seen.shape(output)))
        for part in seen.parts(output, None, (tier,)):
            right[part.index], allowed[part.index] = on_host(part.reference), on_host(part.classes[0][0])
        self.right, self.allowed = self.columns(right), self.columns(allowed)
        self.usable = bool(np.isfinite(self.right + self.allowed).all())
        alpha, beta, prior = seen.blend(output)
        self.blend = alpha, beta, None if prior is None else self.columns(prior)
        self.given = self._given(seen.inputs if data else None)
        p = expected.precision_of(output)
        self.evidence = Evidence(self.got, self.right, self.allowed, p.u_out if data else p.u_param)

    def picked(self, array: Any) -> Array:
        """The elements that are looked at of an array of x's shape: places in place of images and positions."""
        dims, parameter = self.expected.problem.dims, self.expected.problem.parameter_dims
        whole = array.reshape((dims[0], self.count, -1))
        inner = whole.shape[2]
        image, inside = (a[:, None] for a in np.divmod(self.places, inner))
        return on_host(whole[image, np.arange(self.count), inside]).reshape(-1, *parameter[1:])

    def columns(self, array: Any, chosen: Array | None = None) -> Array:
        """The statistics that are looked at of an array of the parameters' size, or of what `picked` gives."""
        rows = np.asarray(on_host(array), np.float64).reshape(-1, self.count)
        return rows[:, self.chosen if chosen is None else chosen].T

    def _given(self, picked: Inputs | None) -> Given:
        """The numbers of the statistics; `picked` has the elements of y or dx."""
        expected, problem, inputs = self.expected, self.expected.problem, self.expected.inputs
        (mean, inverse), training = (
            map(self.columns, expected.statistics),
            problem.operation == Operation.FORWARD_TRAINING,
        )
        zero = np.zeros_like(mean)
        found = Given(
            problem,
            mean,
            inverse,
            self.columns(inputs.scale) if inputs.scale is not None else zero + 1,
            self.columns(inputs.bias) if inputs.bias is not None else zero,
        )
        if problem.recomputes:
            found.variance = self.columns(expected.moments.variance)
        elif inputs.variance is not None and not problem.inverse:
            found.variance = self.columns(inputs.variance)
        if training and inputs.mean is not None and problem.old != "nan":
            found.old_mean, found.old_variance = self.columns(inputs.mean), self.columns(inputs.need("variance"))
        small = inputs.x.size <= LARGEST
        if not problem.recomputes and small:
            axis = 1 if problem.mode != Mode.PER_ACTIVATION else tuple(range(1, len(problem.dims)))
            own = reference.stats(inputs.x, epsilon=0.0, axis=axis)
            found.own = self.columns(own.mean), self.columns(own.variance)
        for name in ("dscale", "dbias"):
            if name in expected.outputs:
                setattr(found, name, self.columns(expected.outputs[name]))
        if picked is not None:
            found.x = self.columns(picked.x)
            found.dy = None if picked.dy is None else self.columns(picked.dy)
            if problem.recomputes and small:
                found.fields = tuple(self._fields())
        return found

    def _fields(self) -> Iterator[tuple[str, Array, Array]]:
        """Mean and variance over other axes, at the elements, with their names."""
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
            yield text, mean, variance

    def candidates(self) -> Iterator[Made]:
        """The output as each convention makes it that may be within its bound, blended."""
        alpha, beta, prior = self.blend
        few = None if prior is None else prior[:, :FEW]
        first = self.given.first()
        for block in _MAKERS[self.output](self.given) if self.output in _MAKERS else ():
            fits = self.evidence.may_fit(blended(block.made(first, *block.stacked()), alpha, beta, few))
            for chosen in np.argwhere(fits):
                ways = [row[i] for row, i in zip(block.ways, chosen, strict=True)]
                values = block.made(self.given, *(value for way in ways for value in way.values))
                texts = tuple(way.text for way in ways if way.text)
                switch = "; ".join(dict.fromkeys(way.switch for way in ways if way.switch))
                yield Made(texts, switch, blended(values, alpha, beta, prior))
        yield from self._other_layout()

    def _other_layout(self) -> Iterator[Made]:
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
        yield Made((word,), AXIS, blended(values, *self.blend))


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


class _Way(NamedTuple):
    """One way of something; without a text the right one."""

    text: str
    switch: str
    values: tuple[Any, ...]


class _Block(NamedTuple):
    """Every combination of some ways, one of each row, and the output that the numbers make with their values."""

    ways: tuple[list[_Way], ...]
    made: Callable[..., Array]

    def stacked(self) -> Iterator[Array]:
        """The values of all ways at the first few elements: an axis for each row, then statistics and places."""
        for axis, row in enumerate(self.ways, 1):
            for same in zip(*(way.values for way in row), strict=True):
                whole = np.stack(np.broadcast_arrays(*(np.atleast_2d(a)[:, :FEW] for a in same)))
                yield whole.reshape(len(row), *(1,) * (len(self.ways) - axis), *whole.shape[1:])


def _forms(*ways: tuple[str, str, Array]) -> list[_Way]:
    return [_Way(text, switch, (values,)) for text, switch, values in ways]


def _alone(*ways: tuple[str, str, Array]) -> _Block:
    """An output's forms, with their texts and switches."""
    return _Block((_forms(*ways),), lambda g, values: values)


def _epsilons(epsilon: float) -> Iterator[tuple[str, str, float]]:
    words = {10: "10 times", 100: "100 times", 0.1: "a tenth of", 0.01: "a hundredth of"}
    ways = [(f"epsilon is {value:g}, not {epsilon:g}", where, value) for value, where in DEFAULTS.items()]
    for times, word in words.items():
        value = epsilon * times
        ways.append((f"epsilon is {word} what it should be: {value:g}, not {epsilon:g}", "", value))
    ways.append(("epsilon is missing", "", 0.0))
    ways.append((f"epsilon is added twice: {2 * epsilon:g}", "", 2 * epsilon))
    seen = [epsilon]
    for way in ways:
        if not any(math.isclose(way[2], other, rel_tol=1e-6) for other in seen):
            seen.append(way[2])
            yield way


def _spreads(g: Given) -> Iterator[_Way]:
    """The inverse standard deviation from the variance, and what it is in other conventions."""
    yield _Way("", "", (g.inverse,))
    v, epsilon = g.variance, g.problem.epsilon
    if v is None:
        s = g.inverse
        yield _Way("the inverse standard deviation is taken for a variance", VARIANCE, (1 / np.sqrt(s + epsilon),))
        yield _Way("the inverse standard deviation is taken for a standard deviation", "", (1 / s,))
        yield _Way("epsilon is added to what has it already", "", (1 / np.sqrt(1 / s**2 + epsilon),))
        return
    for text, switch, value in _epsilons(epsilon):
        yield _Way(text, switch, (1 / np.sqrt(v + value),))
    c, rms = g.bessel, v + g.mean**2
    unbiased = "the unbiased standard deviation plus epsilon: sqrt(var m / (m - 1)) + eps"
    roots = "the root of epsilon is added to the standard deviation: sqrt(var) + sqrt(eps)"
    yield _Way("epsilon is added to the standard deviation: sqrt(var) + eps", OUTSIDE, (1 / (np.sqrt(v) + epsilon),))
    yield _Way(roots, "", (1 / (np.sqrt(v) + math.sqrt(epsilon)),))
    yield _Way("max(var, eps) in place of var + eps", "", (1 / np.sqrt(np.maximum(v, epsilon)),))
    yield _Way("normalized by the unbiased variance, m / (m - 1) too large", "", (1 / np.sqrt(v * c + epsilon),))
    yield _Way(unbiased, "PyTorch: x.std(); NumPy: x.std(ddof=1)", (1 / (np.sqrt(v * c) + epsilon),))
    yield _Way("divided by the variance, without its root", "", (1 / (v + epsilon),))
    yield _Way("multiplied by the standard deviation, not by its inverse", "", (np.sqrt(v + epsilon),))
    yield _Way("the variance is taken for an inverse standard deviation", VARIANCE, (v,))
    yield _Way("the variance is taken for a standard deviation", "", (1 / v,))
    yield _Way("not divided by the standard deviation", "", (np.ones_like(v),))
    yield _Way("the mean square in place of the variance", "", (1 / np.sqrt(rms + epsilon),))


def _statistics(g: Given) -> Iterator[_Way]:
    """Mean and inverse standard deviation that y or dx is made with."""
    for way in _spreads(g):
        yield way._replace(values=(g.mean, *way.values))
    zero, v, epsilon = np.zeros_like(g.mean), g.variance, g.problem.epsilon
    yield _Way("the mean is not subtracted", "", (zero, g.inverse))
    yield _Way("the mean is added, not subtracted", "", (-g.mean, g.inverse))
    others = [(text, AXIS, mean, variance) for text, mean, variance in g.fields]
    if v is not None:
        rms = "the mean is not subtracted, and the mean square is the variance (RMS norm)"
        others.append((rms, "", zero, v + g.mean**2))
    if g.old_mean is not None and g.old_variance is not None and v is not None:
        text = "training normalizes by the running statistics"
        others.append((text, EVALUATION, g.old_mean, g.old_variance))
        mean = g.updated(g.old_mean, g.mean)
        for word, c in (("", g.bessel), (", biased", 1.0)):
            others.append((f"{text} after their update{word}", "", mean, g.updated(g.old_variance, c * v)))
    if g.own is not None:
        others.append(("x's own statistics in place of those that are given", EVALUATION, *g.own))
    for text, switch, mean, variance in others:
        yield _Way(text, switch, (mean, 1 / np.sqrt(variance + epsilon)))


def _scales(g: Given) -> Iterator[_Way]:
    one = np.ones_like(g.scale)
    yield _Way("", "", (g.scale,))
    yield _Way("gamma is missing, or fixed at 1", AFFINE, (one,))
    yield _Way("abs(gamma) in place of gamma", "", (np.abs(g.scale),))
    yield _Way("1 + gamma in place of gamma", "", (one + g.scale,))
    yield _Way("gamma squared in place of gamma", "", (g.scale**2,))


def _affine(g: Given) -> Iterator[_Way]:
    for way in _scales(g):
        yield way._replace(values=(*way.values, g.bias))
    zero = np.zeros_like(g.bias)
    yield _Way("beta is missing", AFFINE, (g.scale, zero))
    yield _Way("gamma and beta are missing", AFFINE, (np.ones_like(g.scale), zero))
    yield _Way("gamma and beta are taken for one another", "", (g.bias, g.scale))
    yield _Way("beta is added before gamma: gamma (x_hat + beta)", "", (g.scale, g.scale * g.bias))
    yield _Way("beta is subtracted", "", (g.scale, -g.bias))
    yield _Way("divided by gamma, not multiplied", "", (1 / g.scale, g.bias))
    yield _Way("y has the other sign", "", (-g.scale, -g.bias))


def _y(g: Given) -> Iterator[_Block]:
    def made(g: Given, mean: Array, inverse: Array, scale: Array, bias: Array) -> Array:
        assert g.x is not None
        return scale * ((g.x - mean) * inverse) + bias

    statistics, affine = list(_statistics(g)), list(_affine(g))
    yield _Block((statistics, affine), made)
    cut = _Way("an activation is applied: max(y, 0)", "", (0.0,))
    yield _Block((statistics[:1], affine[:1], [cut]), lambda g, *values: np.maximum(made(g, *values[:-1]), values[-1]))


def _terms(g: Given) -> Iterator[_Way]:
    """The factors of the means of dy and of dy x_hat in the gradient of x."""
    yield _Way("", "", (1.0, 1.0))
    if g.dscale is None or g.dbias is None:
        return
    m, r = float(g.m), g.inverse
    yield _Way("dx is that of evaluation, without the sums", EVALUATION, (0.0, 0.0))
    yield _Way("dx without the term of dbias, the mean of dy", "", (0.0, 1.0))
    yield _Way("dx without the term of dscale, the projection on x_hat", "", (1.0, 0.0))
    yield _Way("dx with sums in place of means", "", (m, m))
    yield _Way("dx with the sum of dy in place of its mean", "", (m, 1.0))
    yield _Way("dx with the sum dscale in place of its mean", "", (1.0, m))
    yield _Way("dx without 1/sigma in its projection", "", (1.0, 1 / r))
    yield _Way("dx with 1/sigma squared in its projection", "", (1.0, r))
    yield _Way("dx with the terms added, not subtracted", "", (-1.0, -1.0))
    yield _Way("dx with a projection divided by m - 1", "", (1.0, g.bessel))
    yield _Way("dx with means divided by m - 1", "", (g.bessel, g.bessel))


def _inner(g: Given, inverse: Any, centre: Any, along: Any) -> Array:
    """The gradient of x before scale and 1/sigma, with factors of its terms."""
    assert g.x is not None
    assert g.dy is not None
    if g.dscale is None or g.dbias is None:
        return g.dy
    projection = along * (g.dscale * (inverse / g.inverse) / g.m)
    return g.dy - centre * (g.dbias / g.m) - (g.x - g.mean) * inverse * projection


def _dx(g: Given) -> Iterator[_Block]:
    def made(g: Given, inverse: Array, centre: Any, along: Any, scale: Array) -> Array:
        return scale * inverse * _inner(g, inverse, centre, along)

    spreads, terms = list(_spreads(g)), list(_terms(g))
    yield _Block((spreads, terms, list(_scales(g))), made)
    last = [
        _Way("dx is multiplied by the standard deviation", "", (g.scale / g.inverse**2,)),
        _Way("dx is multiplied by m", "", (g.scale * g.m,)),
        _Way("dx is divided by gamma", "", (1 / g.scale,)),
    ]
    yield _Block((spreads[:1], terms, last), made)


def _dscale(g: Given) -> Iterator[_Block]:
    if g.dscale is None or g.dbias is None:
        return
    d, b, r = g.dscale, g.dbias, g.inverse
    forms = _forms(
        ("", "", d),
        ("dscale without 1/sigma", "", d / r),
        ("dscale with 1/sigma squared", "", d * r),
        ("dscale by y in place of x_hat", "", g.scale * d + g.bias * b),
        ("dscale by x in place of x_hat", "", d / r + g.mean * b),
        ("dscale by x / sigma, without the mean", "", d + g.mean * r * b),
        ("dscale divided by gamma", "", d / g.scale),
        ("dscale multiplied by gamma", "", d * g.scale),
        ("dscale is a mean, not a sum", "", d / g.m),
        ("dscale has the other sign", "", -d),
        ("dscale and dbias are taken for one another", "", b),
    )
    yield _Block((list(_spreads(g)), forms), lambda g, inverse, values: values * inverse / g.inverse)


def _dbias(g: Given) -> Iterator[_Block]:
    if g.dscale is None or g.dbias is None:
        return
    b = g.dbias
    yield _alone(
        ("", "", b),
        ("dbias is a mean, not a sum", "", b / g.m),
        ("dbias has the other sign", "", -b),
        ("dscale and dbias are taken for one another", "", g.dscale),
        ("dbias multiplied by gamma", "", b * g.scale),
        ("dbias divided by gamma", "", b / g.scale),
        ("dbias multiplied by 1/sigma", "", b * g.inverse),
    )


def _saved_mean(g: Given) -> Iterator[_Block]:
    forms = [
        ("", "", g.mean),
        ("the sum is saved, not the mean", "", g.mean * g.m),
        ("the mean is saved with the other sign", "", -g.mean),
        ("the mean is divided by m - 1", "", g.mean * g.bessel),
    ]
    if g.old_mean is not None:
        new = g.updated(g.old_mean, g.mean)
        forms.append(("the running mean of before is saved, not the batch's", EVALUATION, g.old_mean))
        forms.append(("the running mean after its update is saved, not the batch's", "", new))
    yield _alone(*forms)


_SAVED = (
    "the variance is taken for an inverse standard deviation",
    "multiplied by the standard deviation, not by its inverse",
    "divided by the variance, without its root",
)
"""Of `_spreads`, what is saved under another name."""


def _saved_spread(g: Given) -> Iterator[_Block]:
    v, e, c, saves_variance = g.variance, g.problem.epsilon, g.bessel, g.problem.saves_variance
    if v is None:
        return
    what = "the variance" if saves_variance else "the inverse standard deviation"
    others: dict[str, tuple[str, Array]] = {
        "the variance": (VARIANCE, v),
        "the unbiased variance": (VARIANCE, c * v),
        "the variance with epsilon": (VARIANCE, v + e),
        "the standard deviation": ("", np.sqrt(v)),
        "the standard deviation with epsilon": ("", np.sqrt(v + e)),
        "the standard deviation of the unbiased variance": ("", np.sqrt(c * v)),
        "the inverse variance": ("", 1 / (v + e)),
        "the sum of squares, not divided by m": ("", v * g.m),
        "the mean square": ("", v + g.mean**2),
        "the inverse standard deviation": (VARIANCE, g.inverse),
    }
    forms = [("", "", others.pop(what)[1])]
    forms += [(f"{name} is saved, not {what}", switch, values) for name, (switch, values) in others.items()]
    if not saves_variance:
        forms += [(w.text, w.switch, *w.values) for w in _spreads(g) if w.text and w.text not in _SAVED]
    if g.old_variance is not None:
        new = g.updated(g.old_variance, c * v if g.problem.unbiased else v)
        old, new = (a if saves_variance else 1 / np.sqrt(a + e) for a in (g.old_variance, new))
        forms.append(("the running variance of before is saved, not the batch's", EVALUATION, old))
        forms.append(("the running variance itself is saved", "", g.old_variance))
        forms.append(("the running variance after its update is saved, not the batch's", "", new))
    yield _alone(*forms)


def _averages(f: float) -> Iterator[_Way]:
    """The weights of the batch's statistic and of the old one."""
    yield _Way("", "", (f, 1 - f))
    text = "momentum is the other way round: running = factor * old + (1 - factor) * batch"
    yield _Way(text, MOMENTUM, (1 - f, f))
    yield _Way("the running statistic is not updated", EVALUATION, (0.0, 1.0))
    yield _Way("the running statistic is the batch's: the factor is 1", "PyTorch: momentum=1", (1.0, 0.0))
    yield _Way("the old running statistic is not weighed down: old + factor * batch", "", (f, 1.0))
    yield _Way("the batch's is not weighed down: (1 - factor) * old + batch", "", (1.0, 1 - f))
    for value in (0.1, 0.01, 0.9, 0.99, 0.5):
        if not math.isclose(value, f) and not math.isclose(value, 1 - f):
            yield _Way(f"the factor is {value:g}, not {f:g}", "", (value, 1 - value))
    yield _Way("the update is made twice", "", (f + (1 - f) * f, (1 - f) ** 2))


def _running(g: Given, old: Array, *kinds: tuple[str, str, Array]) -> Iterator[_Block]:
    averages = list(_averages(g.problem.factor))
    yield _Block((_forms(*kinds), averages), lambda g, batch, new, kept: new * batch + kept * old)


def _running_mean(g: Given) -> Iterator[_Block]:
    if g.old_mean is not None:
        yield from _running(
            g,
            g.old_mean,
            ("", "", g.mean),
            ("the running mean takes sums, not means", "", g.mean * g.m),
            ("the running mean takes a sum over m - 1", "", g.mean * g.bessel),
        )


def _running_variance(g: Given) -> Iterator[_Block]:
    if g.old_mean is None or g.old_variance is None or g.variance is None:
        return
    v, c, takes = g.variance, g.bessel, "running_variance takes the"
    own, other = c * v, (f"{takes} biased variance (a sum over m, not m - 1)", BIASED, v)
    if not g.problem.unbiased:
        own, other = v, (f"{takes} unbiased variance (a sum over m - 1, not m)", BIASED, c * v)
    yield from _running(
        g,
        g.old_variance,
        ("", "", own),
        other,
        (f"{takes} standard deviation", "", np.sqrt(v)),
        (f"{takes} inverse standard deviation", "", g.inverse),
        (f"{takes} variance with epsilon", "", v + g.problem.epsilon),
        (f"{takes} sum of squares, not divided by m", "", v * g.m),
        ("running_variance takes m / (m - 1) twice", "", c * c * v),
        ("running_variance takes (m - 1) / m in place of m / (m - 1)", "", v / c),
        (f"{takes} mean square", "", v + g.mean**2),
        (f"{takes} variance about the old running mean", "", v + (g.mean - g.old_mean) ** 2),
    )


_MAKERS: dict[str, Callable[[Given], Iterator[_Block]]] = {
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
        for made in seen.candidates() if seen.usable else ():
            near = np.abs(made.values - seen.got) <= seen.allowed
            other = np.abs(made.values - seen.right) > 1e-9 * seen.allowed
            if len(made.texts) == 1 and near.all() and other.any():
                found[made.texts[0]] = None
    return list(found)


def fitted(expected: Expected, output: str, got: Array) -> str:
    """The epsilon or factor that explains y, 1/sigma or a running statistic best, in words; empty if none does."""
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        if seen.usable and output in ("y", "saved_inv_variance"):
            return _fitted_epsilon(seen)
        return _fitted_factor(seen) if seen.usable and output.startswith("running") else ""


def _fitted_epsilon(seen: _Seen) -> str:
    g, inverse = seen.given, seen.got
    if g.variance is None:
        return ""
    if g.x is not None:
        normal = g.scale * (g.x - g.mean)
        normal = normal - normal.mean(axis=1, keepdims=True)
        inverse = (normal * seen.got).sum(axis=1, keepdims=True) / (normal**2).sum(axis=1, keepdims=True)
    epsilon = float(np.median(1 / inverse**2 - g.variance))
    made = 1 / np.sqrt(g.variance + epsilon)
    if g.x is not None:
        made = g.scale * (g.x - g.mean) * made + g.bias
    fits = epsilon >= 0 and (np.abs(made - seen.got) <= 4 * seen.allowed).all()
    return f"epsilon={epsilon:.3g} fits" if fits else ""


def _fitted_factor(seen: _Seen) -> str:
    g, mean = seen.given, seen.output == "running_mean"
    old, batch = (g.old_mean, g.mean) if mean else (g.old_variance, g.variance)
    if old is None or batch is None:
        return ""
    for word, own in (("", batch if mean else g.bessel * batch), (" with the biased variance", batch)):
        apart = own - old
        factor = float(((seen.got - old) * apart).sum() / (apart**2).sum())
        if (np.abs(factor * own + (1 - factor) * old - seen.got) <= 4 * seen.allowed).all():
            return f"factor={factor:.4g}{word} fits"
    return ""
