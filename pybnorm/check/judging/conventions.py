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

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pybnorm import reference
from pybnorm.check.judging.bounds.classes import Tier, depth
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.formulas import backward_error, blended, forward_error, stored
from pybnorm.check.language.problem import DATA_OUTPUTS
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

    m: int
    epsilon: float
    factor: float
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
    training: bool = False
    unbiased: bool = True
    saves_variance: bool = False

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
        per_activation = problem.mode == Mode.PER_ACTIVATION
        self.shape = (problem.dims[0], -1, 1) if per_activation else (*problem.dims[:2], -1)
        count = expected.statistics[0].size
        chosen = np.unique(np.linspace(0, count - 1, min(count, STATISTICS if data else VECTOR)).astype(int))
        rng = np.random.default_rng(3)
        self.places = rng.integers(0, problem.m, PLACES) if problem.m > PLACES else np.arange(problem.m)
        values = self.elements(got, chosen) if data else self.vector(got, chosen)
        self.chosen = chosen[np.isfinite(values).all(axis=1)]
        self.usable = bool(len(self.chosen))
        if not self.usable:
            return
        self.got = values[np.isfinite(values).all(axis=1)]
        self.given = given_of(expected, self.chosen, self.picked if data else None)
        alpha, beta, prior = expected.blend(output)
        self.blend = alpha, beta, None if not beta else self.picked(prior) if data else self.vector(prior, self.chosen)
        right, error = self._data() if data else self._vector()
        self.rounding = expected.precision.u_out if data else expected.precision.u_param
        self.right, self.allowed = right, error
        self.usable = bool(np.isfinite(right + error).all())
        self.evidence = Evidence(self.got, right, error, self.rounding)

    def elements(self, array: Any, chosen: Array) -> Array:
        """Elements of an array of x's shape."""
        whole = array.reshape(self.shape)
        inner = whole.shape[2]
        return on_host(whole[self.places // inner, chosen[:, None], self.places % inner]).astype(np.float64)

    def picked(self, array: Any) -> Array:
        """The same of the statistics that are looked at."""
        return self.elements(array, self.chosen)

    def vector(self, array: Any, chosen: Array) -> Array:
        """The chosen elements of an array of the parameters' size, as a column."""
        return np.asarray(on_host(array), np.float64).reshape(-1)[chosen][:, None]

    def _vector(self) -> tuple[Array, Array]:
        tier = Tier("", True, depth(self.expected.problem.m))
        part = next(iter(self.expected.parts(self.output, None, (tier,))))
        return self.vector(part.reference, self.chosen), self.vector(part.classes[0][0], self.chosen)

    def _data(self) -> tuple[Array, Array]:
        expected, g, p = self.expected, self.given, self.expected.precision
        tier = Tier("", True, depth(expected.problem.m))
        d = expected.deviations(tier)
        errors = [
            self.vector(np.broadcast_to(a, expected.statistics[0].shape), self.chosen) for a in (d.mean, d.inverse)
        ]
        assert g.x is not None
        if self.output == "y":
            result = g.scale * (g.x - g.mean) * g.inverse + g.bias
            error = forward_error(g.x, g.mean, np.abs(g.inverse), g.scale, g.bias, errors, p.u)
        else:
            assert g.dy is not None
            made = g.scale * g.inverse * _inner(g, g.inverse, 1.0, 1.0)
            if g.dscale is None or g.dbias is None:
                result, sums = made, [np.zeros_like(g.mean)] * 2
                dscale = dbias = sums[0]
            else:
                dscale, dbias, result = g.dscale, g.dbias, made
                sums = [self.vector(a, self.chosen) for a in expected.sum_errors(tier)]
            error = backward_error(
                g.x, g.dy, result, g.mean, np.abs(g.inverse), g.scale, dscale, dbias, [*errors, *sums], g.m, p.u, True
            )
            error = error + np.abs(g.scale * g.inverse) * p.u_param * (np.abs(g.dy) + np.abs(dbias) / g.m)
        return stored(error, result, *self.blend, p.u, p.u_out, p.tiny_out)

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
        problem, inputs = self.expected.problem, self.expected.inputs
        inner = math.prod(problem.dims[2:])
        if problem.mode == Mode.PER_ACTIVATION or inputs.x.size > LARGEST or inner == 1 or problem.dims[1] == 1:
            return
        steps, dims = problem.strides, problem.dims
        last = steps[1] == 1 and steps[0] == inner * dims[1]
        first = steps[1] == inner and steps[0] == inner * dims[1]
        if not (last or first) or type(self.expected) is not Expected:
            return

        def read(array: Any) -> Array:
            memory = on_host(array).reshape(dims[0], dims[1], inner)
            memory = memory.transpose(0, 2, 1) if last else memory
            if last:  # channels last, read as channels first
                return np.ascontiguousarray(memory).reshape(dims)
            return np.ascontiguousarray(memory).reshape(dims[0], inner, dims[1]).transpose(0, 2, 1).reshape(dims)

        def written(array: Array) -> Array:
            memory = array.reshape(dims[0], dims[1], inner)
            if last:
                return memory.reshape(dims[0], inner, dims[1]).transpose(0, 2, 1).reshape(dims)
            return np.ascontiguousarray(memory.transpose(0, 2, 1)).reshape(dims)

        kept = self.expected.made
        if "layout" not in kept:
            changed = {n: read(a) for n, a in inputs.arrays().items() if a.shape == inputs.x.shape}
            kept["layout"] = type(self.expected)(problem, dataclasses.replace(inputs, **changed))
        other = kept["layout"]
        word = "NHWC is read as NCHW" if last else "NCHW is read as NHWC"
        values = other.outputs[self.output]
        if self.output in DATA_OUTPUTS:
            alpha, beta, prior = other.blend(self.output)
            blended_ = blended(values, alpha, beta, None if prior is None else prior.astype(np.float64))
            yield Made((word,), AXIS, self.picked(written(blended_)))
        else:
            yield Made((word,), AXIS, blended(self.vector(values, self.chosen), *self.blend))


def given_of(expected: Expected, chosen: Array, picked: Any = None) -> Given:
    """The numbers of some statistics; `picked` gives the elements of an array of x's shape."""
    problem, inputs = expected.problem, expected.inputs
    mean, inverse = expected.statistics

    def vector(array: Any, default: float = 0.0) -> Array:
        if array is None:
            return np.full((len(chosen), 1), default)
        return np.asarray(on_host(array), np.float64).reshape(-1)[chosen][:, None]

    found = Given(
        problem.m,
        problem.epsilon,
        problem.factor,
        vector(mean),
        vector(inverse),
        vector(inputs.scale, 1.0),
        vector(inputs.bias),
        training=problem.operation == Operation.FORWARD_TRAINING,
        unbiased=problem.unbiased,
        saves_variance=problem.saves_variance,
    )
    if problem.recomputes:
        found.variance = vector(expected.moments.variance)
    elif inputs.variance is not None and not problem.inverse:
        found.variance = vector(inputs.variance)
    if problem.operation == Operation.FORWARD_TRAINING and inputs.mean is not None and problem.old != "nan":
        found.old_mean, found.old_variance = vector(inputs.mean), vector(inputs.variance)
    if not problem.recomputes and inputs.x.size <= LARGEST:
        axis = 1 if problem.mode != Mode.PER_ACTIVATION else tuple(range(1, len(problem.dims)))
        own = reference.stats(inputs.x, epsilon=0.0, axis=axis)
        found.own = vector(own.mean), vector(own.variance)
    for name in ("dscale", "dbias"):
        if name in expected.outputs:
            setattr(found, name, vector(expected.outputs[name]))
    if picked is not None:
        found.x = picked(inputs.x)
        found.dy = None if inputs.dy is None else picked(inputs.dy)
        if problem.recomputes and inputs.x.size <= LARGEST:
            found.fields = tuple(_fields(expected, picked))
    return found


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


def _fields(expected: Expected, picked: Any) -> Iterator[tuple[str, Array, Array]]:
    shape, kept = expected.inputs.x.shape, expected.made
    own = (0,) if expected.problem.mode == Mode.PER_ACTIVATION else (0, *range(2, len(shape)))
    by_axes = {axes(len(shape)): text for text, axes in reversed(_AXES.items())}
    for over, text in reversed(by_axes.items()):
        if over == own or math.prod(shape[a] for a in over) == 1:
            continue
        if over not in kept:
            x = on_host(expected.inputs.x).astype(np.float64)
            kept[over] = x.mean(axis=over, keepdims=True), x.var(axis=over, keepdims=True)
        mean, variance = (picked(np.broadcast_to(a, shape)) for a in kept[over])
        yield text, mean, variance


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
        for axis, row in enumerate(self.ways):
            for same in zip(*(way.values for way in row), strict=True):
                arrays = [np.atleast_2d(a)[:, :FEW] for a in same]
                shape = [max(a.shape[i] for a in arrays) for i in (0, 1)]
                whole = np.empty((len(row), *(1,) * (len(self.ways) - axis - 1), *shape))
                for number, array in enumerate(arrays):
                    whole[number] = array
                yield whole


def _forms(*ways: tuple[str, str, Array]) -> Iterator[_Block]:
    """An output's forms, with their texts and switches."""
    yield _Block(([_Way(text, switch, (values,)) for text, switch, values in ways],), lambda g, values: values)


def _epsilons(epsilon: float) -> Iterator[tuple[str, str, float]]:
    seen = {epsilon, 0.0}
    for value, where in DEFAULTS.items():
        if not any(math.isclose(value, other, rel_tol=1e-6) for other in seen):
            seen.add(value)
            yield f"epsilon is {value:g}, not {epsilon:g}", where, value
    for times, word in ((10, "10 times"), (100, "100 times"), (0.1, "a tenth of"), (0.01, "a hundredth of")):
        value = epsilon * times
        if value and not any(math.isclose(value, other, rel_tol=1e-6) for other in seen):
            seen.add(value)
            yield f"epsilon is {word} what it should be: {value:g}, not {epsilon:g}", "", value
    if epsilon:
        yield "epsilon is missing", "", 0.0
        yield f"epsilon is added twice: {2 * epsilon:g}", "", 2 * epsilon


def _spreads(g: Given) -> Iterator[_Way]:
    """The inverse standard deviation from the variance, and what it is in other conventions."""
    yield _Way("", "", (g.inverse,))
    v, epsilon = g.variance, g.epsilon
    if v is None:
        s = g.inverse
        yield _Way("the inverse standard deviation is taken for a variance", VARIANCE, (1 / np.sqrt(s + epsilon),))
        yield _Way("the inverse standard deviation is taken for a standard deviation", "", (1 / s,))
        yield _Way("epsilon is added to what has it already", "", (1 / np.sqrt(1 / s**2 + epsilon),))
        return
    for text, switch, value in _epsilons(epsilon):
        yield _Way(text, switch, (1 / np.sqrt(v + value),))
    yield _Way("epsilon is added to the standard deviation: sqrt(var) + eps", OUTSIDE, (1 / (np.sqrt(v) + epsilon),))
    roots = np.sqrt(v) + math.sqrt(epsilon)
    yield _Way("the root of epsilon is added to the standard deviation: sqrt(var) + sqrt(eps)", "", (1 / roots,))
    yield _Way("max(var, eps) in place of var + eps", "", (1 / np.sqrt(np.maximum(v, epsilon)),))
    if g.m > 1:
        c = g.m / (g.m - 1)
        yield _Way("normalized by the unbiased variance, m / (m - 1) too large", "", (1 / np.sqrt(v * c + epsilon),))
        text = "the unbiased standard deviation plus epsilon: sqrt(var m / (m - 1)) + eps"
        yield _Way(text, "PyTorch: x.std(); NumPy: x.std(ddof=1)", (1 / (np.sqrt(v * c) + epsilon),))
    yield _Way("divided by the variance, without its root", "", (1 / (v + epsilon),))
    yield _Way("multiplied by the standard deviation, not by its inverse", "", (np.sqrt(v + epsilon),))
    yield _Way("the variance is taken for an inverse standard deviation", VARIANCE, (v,))
    yield _Way("the variance is taken for a standard deviation", "", (1 / v,))
    yield _Way("not divided by the standard deviation", "", (np.ones_like(v),))
    rms = v + g.mean**2
    yield _Way("the mean square in place of the variance", "", (1 / np.sqrt(rms + epsilon),))


def _statistics(g: Given) -> Iterator[_Way]:
    """Mean and inverse standard deviation that y or dx is made with."""
    for way in _spreads(g):
        yield way._replace(values=(g.mean, *way.values))
    zero = np.zeros_like(g.mean)
    yield _Way("the mean is not subtracted", "", (zero, g.inverse))
    yield _Way("the mean is added, not subtracted", "", (-g.mean, g.inverse))
    if g.variance is not None:
        rms = 1 / np.sqrt(g.variance + g.mean**2 + g.epsilon)
        yield _Way("the mean is not subtracted, and the mean square is the variance (RMS norm)", "", (zero, rms))
    if g.old_mean is not None and g.old_variance is not None and g.variance is not None:
        old = 1 / np.sqrt(g.old_variance + g.epsilon)
        yield _Way("training normalizes by the running statistics", EVALUATION, (g.old_mean, old))
        for word, c in (("", g.m / (g.m - 1) if g.m > 1 else 1.0), (", biased", 1.0)):
            mean = g.factor * g.mean + (1 - g.factor) * g.old_mean
            variance = g.factor * c * g.variance + (1 - g.factor) * g.old_variance
            text = f"training normalizes by the running statistics after their update{word}"
            yield _Way(text, "", (mean, 1 / np.sqrt(variance + g.epsilon)))
    if g.own is not None:
        mean, variance = g.own
        of = "x's own statistics in place of those that are given"
        yield _Way(of, EVALUATION, (mean, 1 / np.sqrt(variance + g.epsilon)))
    for text, mean, variance in g.fields:
        yield _Way(text, AXIS, (mean, 1 / np.sqrt(variance + g.epsilon)))


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
    if g.m > 1:
        c = g.m / (g.m - 1)
        yield _Way("dx with a projection divided by m - 1", "", (1.0, c))
        yield _Way("dx with means divided by m - 1", "", (c, c))


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
    forms = {
        "": d,
        "dscale without 1/sigma": d / r,
        "dscale with 1/sigma squared": d * r,
        "dscale by y in place of x_hat": g.scale * d + g.bias * b,
        "dscale by x in place of x_hat": d / r + g.mean * b,
        "dscale by x / sigma, without the mean": d + g.mean * r * b,
        "dscale divided by gamma": d / g.scale,
        "dscale multiplied by gamma": d * g.scale,
        "dscale is a mean, not a sum": d / g.m,
        "dscale has the other sign": -d,
        "dscale and dbias are taken for one another": b,
    }
    ways = [_Way(text, "", (values,)) for text, values in forms.items()]
    yield _Block((list(_spreads(g)), ways), lambda g, inverse, values: values * inverse / g.inverse)


def _dbias(g: Given) -> Iterator[_Block]:
    if g.dscale is None or g.dbias is None:
        return
    b = g.dbias
    yield from _forms(
        ("", "", b),
        ("dbias is a mean, not a sum", "", b / g.m),
        ("dbias has the other sign", "", -b),
        ("dscale and dbias are taken for one another", "", g.dscale),
        ("dbias multiplied by gamma", "", b * g.scale),
        ("dbias divided by gamma", "", b / g.scale),
        ("dbias multiplied by 1/sigma", "", b * g.inverse),
    )


def _saved_mean(g: Given) -> Iterator[_Block]:
    yield from _forms(
        ("", "", g.mean),
        ("the sum is saved, not the mean", "", g.mean * g.m),
        ("the mean is saved with the other sign", "", -g.mean),
    )
    if g.m > 1:
        yield from _forms(("the mean is divided by m - 1", "", g.mean * g.m / (g.m - 1)))
    if g.old_mean is not None:
        new = g.factor * g.mean + (1 - g.factor) * g.old_mean
        yield from _forms(
            ("the running mean of before is saved, not the batch's", EVALUATION, g.old_mean),
            ("the running mean after its update is saved, not the batch's", "", new),
        )


_SAVED = (
    "the variance is taken for an inverse standard deviation",
    "multiplied by the standard deviation, not by its inverse",
    "divided by the variance, without its root",
)
"""Of `_spreads`, what is saved under another name."""


def _saved_spread(g: Given) -> Iterator[_Block]:
    v, e = g.variance, g.epsilon
    if v is None:
        return
    c = g.m / (g.m - 1) if g.m > 1 else 1.0
    what = "the variance" if g.saves_variance else "the inverse standard deviation"
    forms: list[tuple[str, str, Array]] = [
        ("variance", VARIANCE, v),
        ("unbiased variance", VARIANCE, c * v),
        ("variance with epsilon", VARIANCE, v + e),
        ("standard deviation", "", np.sqrt(v)),
        ("standard deviation with epsilon", "", np.sqrt(v + e)),
        ("standard deviation of the unbiased variance", "", np.sqrt(c * v)),
        ("inverse variance", "", 1 / (v + e)),
        ("sum of squares, not divided by m", "", v * g.m),
        ("mean square", "", v + g.mean**2),
    ]
    inverse = ("inverse standard deviation", VARIANCE, g.inverse)
    if g.saves_variance:
        forms = [*forms[1:], inverse]
    yield from _forms(("", "", v if g.saves_variance else g.inverse))
    yield from _forms(*((f"the {name} is saved, not {what}", switch, values) for name, switch, values in forms))
    if not g.saves_variance:
        yield from _forms(*((w.text, w.switch, *w.values) for w in _spreads(g) if w.text and w.text not in _SAVED))
    if g.old_variance is not None:
        old = g.old_variance if g.saves_variance else 1 / np.sqrt(g.old_variance + e)
        yield from _forms(
            ("the running variance of before is saved, not the batch's", EVALUATION, old),
            ("the running variance itself is saved", "", g.old_variance),
        )
        new = g.factor * (v if not g.unbiased else c * v) + (1 - g.factor) * g.old_variance
        new = new if g.saves_variance else 1 / np.sqrt(new + e)
        yield from _forms(("the running variance after its update is saved, not the batch's", "", new))


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


def _running(g: Given, old: Array, kinds: list[_Way]) -> Iterator[_Block]:
    yield _Block((kinds, list(_averages(g.factor))), lambda g, batch, new, kept: new * batch + kept * old)


def _running_mean(g: Given) -> Iterator[_Block]:
    if g.old_mean is not None:
        kinds = [_Way("", "", (g.mean,)), _Way("the running mean takes sums, not means", "", (g.mean * g.m,))]
        if g.m > 1:
            kinds.append(_Way("the running mean takes a sum over m - 1", "", (g.mean * g.m / (g.m - 1),)))
        yield from _running(g, g.old_mean, kinds)


def _running_variance(g: Given) -> Iterator[_Block]:
    if g.old_variance is None or g.variance is None:
        return
    v, c = g.variance, g.m / (g.m - 1) if g.m > 1 else 1.0
    own, other = (c * v, v) if g.unbiased else (v, c * v)
    takes = "running_variance takes the biased variance (a sum over m, not m - 1)"
    if not g.unbiased:
        takes = "running_variance takes the unbiased variance (a sum over m - 1, not m)"
    kinds = [
        _Way("", "", (own,)),
        _Way(takes, BIASED, (other,)),
        _Way("running_variance takes the standard deviation", "", (np.sqrt(v),)),
        _Way("running_variance takes the inverse standard deviation", "", (g.inverse,)),
        _Way("running_variance takes the variance with epsilon", "", (v + g.epsilon,)),
        _Way("running_variance takes the sum of squares, not divided by m", "", (v * g.m,)),
        _Way("running_variance takes m / (m - 1) twice", "", (c * c * v,)),
        _Way("running_variance takes (m - 1) / m in place of m / (m - 1)", "", (v / c,)),
        _Way("running_variance takes the mean square", "", (v + g.mean**2,)),
    ]
    if g.old_mean is not None:
        about = v + (g.mean - g.old_mean) ** 2
        kinds.append(_Way("running_variance takes the variance about the old running mean", "", (about,)))
    yield from _running(g, g.old_variance, kinds)


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
        if not seen.usable:
            return []
        found = []
        for made in seen.candidates():
            near = np.abs(np.broadcast_to(made.values, seen.got.shape) - seen.got) <= seen.allowed
            same = np.array_equal(np.broadcast_to(made.values, seen.right.shape), seen.right)
            if len(made.texts) == 1 and near.all() and not same:
                found.append(made.texts[0])
    return list(dict.fromkeys(found))


def fitted_epsilon(expected: Expected, output: str, got: Array) -> str:
    """The epsilon that explains y or 1/sigma best, in words; empty if none does in every channel."""
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        if not seen.usable or seen.given.variance is None:
            return ""
        g, variance, inverse = seen.given, seen.given.variance, seen.got
        if output == "y":
            assert g.x is not None
            normal = g.scale * (g.x - g.mean)
            normal = normal - normal.mean(axis=1, keepdims=True)
            inverse = (normal * seen.got).sum(axis=1, keepdims=True) / (normal**2).sum(axis=1, keepdims=True)
        epsilon = float(np.median(1 / inverse**2 - variance))
        made = 1 / np.sqrt(variance + epsilon)
        if output == "y":
            made = g.scale * (g.x - g.mean) * made + g.bias
        if not (epsilon >= 0 and (np.abs(made - seen.got) <= 4 * seen.allowed).all()):
            return ""
    return f"epsilon={epsilon:.3g} fits"


def fitted_factor(expected: Expected, output: str, got: Array) -> str:
    """The factor that explains a running statistic best, in words; empty if none does in every channel."""
    with np.errstate(all="ignore"):
        seen = _Seen(expected, output, got)
        g = seen.given
        old, batch = (g.old_mean, g.mean) if output == "running_mean" else (g.old_variance, g.variance)
        if not seen.usable or old is None or batch is None:
            return ""
        c = g.m / (g.m - 1) if g.m > 1 and output == "running_variance" else 1.0
        for word, own in (("", c * batch), (" with the biased variance", batch)):
            apart = own - old
            factor = float(((seen.got - old) * apart).sum() / (apart**2).sum())
            if (np.abs(factor * own + (1 - factor) * old - seen.got) <= 4 * seen.allowed).all():
                return f"factor={factor:.4g}{word} fits"
    return ""
