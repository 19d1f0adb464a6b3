"""Batch norm kernels on rows, one for each channel, whose every step a style or a bug may change.

A kernel computes in float32 from x and dy of shape (channels, m) and stores as a library would.
`selftest_tool.rows` has the styles and the bugs.
"""

import dataclasses
from typing import ClassVar

import ml_dtypes
import numpy as np

from pybnorm.check.language import activations
from pybnorm.check.language.data import Inputs
from pybnorm.check.language.problem import DATA_OUTPUTS, Problem
from pybnorm.enums import Operation

f32 = np.float32
bf16 = ml_dtypes.bfloat16


@dataclasses.dataclass
class Rows:
    """A problem's inputs by channel."""

    problem: Problem
    inputs: Inputs

    def __post_init__(self):
        dims = self.problem.dims
        self.shape, self.channels = dims, dims[1]
        self.inner = int(np.prod(dims[2:]))
        self.x, self.dy = self._rows(self.inputs.x), self._rows(self.inputs.dy)
        self.prior, self.z, self.given = (self._rows(getattr(self.inputs, n)) for n in ("prior", "z", "y"))
        named = ("scale", "bias", "mean", "variance", "saved_mean", "saved_inv_variance", "sum_dy", "sum_dy_xmu")
        self.parameters = {n: self._parameter(getattr(self.inputs, n)) for n in named}

    def _rows(self, array):
        if array is None:
            return np.zeros((self.channels, 0), f32)
        return np.moveaxis(array, 1, 0).reshape(self.channels, -1).astype(f32)

    def _parameter(self, array):
        return np.zeros((self.channels, 1), f32) if array is None else array.reshape(-1, 1).astype(f32)

    def data(self, rows, store):
        """Rows as stored in the tensor's dtype and logical order."""
        n, c, *rest = self.shape
        stored = store(rows, self.inputs.x.dtype)
        assert stored.dtype == self.inputs.x.dtype
        return np.moveaxis(stored.reshape(c, n, *rest), 0, 1)


# ---------------------------------------------------------------- sums


def sequential(a):
    """One chain."""
    return np.add.accumulate(a, axis=1, dtype=f32)[:, -1:]


def lanes(count):
    """As SIMD does it: so many chains, added up one after the other."""

    def total(a):
        whole = a.shape[1] // count * count
        if not whole:
            return sequential(a)
        chains = np.add.accumulate(a[:, :whole].reshape(len(a), -1, count), axis=1, dtype=f32)[:, -1]
        result = sequential(chains)
        return result + sequential(a[:, whole:]) if whole < a.shape[1] else result

    return total


def pairwise(a):
    """As NumPy adds."""
    return np.add.reduce(np.ascontiguousarray(a), axis=1, dtype=f32, keepdims=True)


def tree(a):
    """Neighbours, then the sums of neighbours."""
    while a.shape[1] > 1:
        if a.shape[1] % 2:
            a = np.pad(a, ((0, 0), (0, 1)))
        a = a[:, ::2] + a[:, 1::2]
    return a


def blocked(size, inner=pairwise):
    """Blocks by `inner`, then one after the other."""

    def total(a):
        a = np.pad(a, ((0, 0), (0, -a.shape[1] % size)))
        return sequential(inner(a.reshape(-1, size)).reshape(len(a), -1))

    return total


def wide(a):
    """In float64, rounded once."""
    return a.sum(axis=1, dtype=np.float64, keepdims=True).astype(f32)


def compensated(a):
    """Kahan's, in 64 chains."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % 64))).reshape(len(a), -1, 64)
    total, lost = np.zeros_like(a[:, 0]), np.zeros_like(a[:, 0])
    for i in range(a.shape[1]):
        term = a[:, i] - lost
        new = total + term
        lost = (new - total) - term
        total = new
    return sequential(total)


def welford(x, chains, in_a_tree=True):
    """Mean and biased variance by the recurrence, in chains that are merged as Chan, Golub & LeVeque do."""
    rest = x[:, x.shape[1] // chains * chains :]
    lanes_ = x[:, : x.shape[1] - rest.shape[1]].reshape(len(x), -1, chains)
    mean, squares = np.zeros_like(lanes_[:, 0]), np.zeros_like(lanes_[:, 0])
    for i in range(lanes_.shape[1]):
        delta = lanes_[:, i] - mean
        mean = mean + delta / f32(i + 1)
        squares = squares + delta * (lanes_[:, i] - mean)
    parts = [(mean[:, i : i + 1], squares[:, i : i + 1], lanes_.shape[1]) for i in range(chains)]
    parts += [(rest[:, i : i + 1], np.zeros_like(rest[:, :1]), 1) for i in range(rest.shape[1])]
    while len(parts) > 1:
        if in_a_tree:
            merged = [_merge(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
            parts = merged + parts[len(parts) - len(parts) % 2 :]
        else:
            parts[:2] = [_merge(*parts[:2])]
    return parts[0][0], parts[0][1] / f32(x.shape[1])


def _merge(one, two):
    (a, s, n), (b, t, k) = one, two
    delta, share = b - a, f32(k) / f32(n + k)
    return a + delta * share, s + t + delta * delta * (f32(n) * share), n + k


# ---------------------------------------------------------------- stores


def nearest(values, dtype):
    """Rounded to nearest, ties to even."""
    return values.astype(dtype)


# ---------------------------------------------------------------- kernels


_LIMITS = ("low", "high")


class Kernel:
    """The two-pass kernel; what a bug or a style changes are its members."""

    total = staticmethod(pairwise)
    reads: ClassVar = {}
    """What is done to the terms of a sum before they are added: "mean", "variance", "dscale", "dbias", or "" of all."""
    after: ClassVar = {}
    """What is done to a value: mean, variance, inverse, y, dscale, dbias, dx, and what is stored, "stored y"."""
    store = staticmethod(nearest)
    """How y and dx are rounded to the tensor's type."""
    chains = 0
    """Of Welford's recurrence, if it is used; negative: merged one by one."""
    shifted = 0
    """Elements whose mean is taken off first."""
    folded = one_pass = reciprocal = fused = False

    def __init__(self, **members):
        vars(self).update(members)

    def hook(self, name, value, rows):
        """`value`, or what the kernel makes of it."""
        change = self.after.get(name)
        return value if change is None else change(value, rows)

    def sum(self, name, terms):
        """Sum of the terms that are read."""
        read = self.reads.get(name, self.reads.get(""))
        return self.total(terms if read is None else read(terms))

    def over(self, total, m):
        """The sum divided by m."""
        return total * (f32(1) / f32(m)) if self.reciprocal else total / f32(m)

    def product(self, a, b):
        """a * b, with all its digits where it is fused into the sum."""
        return (a.astype(np.float64) * b).astype(f32) if self.fused else a * b

    def moments(self, x):
        """Mean and biased variance."""
        m = x.shape[1]
        if self.chains:
            mean, variance = welford(x, min(abs(self.chains), max(1, m // 8)), self.chains > 0)
        elif self.one_pass or self.shifted:
            pivot = x[:, : self.shifted].mean(axis=1, keepdims=True, dtype=f32) if self.shifted else f32(0)
            moved = x - pivot
            one = self.over(self.sum("mean", moved), m)
            variance = self.over(self.sum("variance", self.product(moved, moved)), m) - one * one
            mean = one + pivot
        else:
            mean = self.over(self.sum("mean", x), m)
            centred = x - mean
            variance = self.over(self.sum("variance", self.product(centred, centred)), m)
        return mean, variance

    def statistics(self, rows):
        """Mean, variance and inverse standard deviation."""
        mean, variance = self.moments(rows.x)
        mean, variance = self.hook("mean", mean, rows), self.hook("variance", variance, rows)
        return mean, variance, self.inverse(variance, rows)

    def inverse(self, variance, rows):
        """1 / sqrt(variance + epsilon)."""
        with np.errstate(all="ignore"):
            plain = f32(1) / np.sqrt(variance + f32(rows.problem.epsilon))
            other = self.after.get("of variance")
            return self.hook("inverse", plain if other is None else other(variance, rows), rows)

    def y(self, rows, mean, inverse):
        """Normalized, scaled and blended."""
        scale = self.hook("scale", rows.parameters["scale"], rows)
        bias = self.hook("bias", rows.parameters["bias"], rows)
        if self.folded:
            slope = scale * inverse
            result = self.product(rows.x, slope) + (bias - mean * slope)
        else:
            result = (rows.x - mean) * inverse * scale + bias
        return self.blend(self.activated(self.hook("y", result, rows), rows), rows)

    def activated(self, value, rows):
        """With the residual added, and between the limits."""
        if not rows.problem.activation:
            return value
        if rows.problem.residual:
            value = value + self.hook("residual", rows.z, rows)
        low, high = (self.hook(n, f32(v), rows) for n, v in zip(_LIMITS, activations.limits(rows.problem), strict=True))
        change = self.after.get("activation")
        return np.minimum(np.maximum(value, low), high) if change is None else change(value, rows)

    def masked(self, rows, mean, inverse):
        """The gradient that the activation lets through."""
        if not rows.problem.activation:
            return rows.dy
        value, change = rows.given, self.after.get("mask")
        if not rows.problem.residual:
            value = (rows.x - mean) * inverse * rows.parameters["scale"] + rows.parameters["bias"]
        passes = activations.passes(rows.problem, value) if change is None else change(value, rows)
        return np.where(passes, rows.dy, f32(0))

    def blend(self, result, rows):
        """alpha * result + beta * prior."""
        p = rows.problem
        alpha, beta = self.hook("alpha", f32(p.alpha), rows), self.hook("beta", f32(p.beta), rows)
        return alpha * result + beta * self.hook("prior", rows.prior, rows) if beta else alpha * result


def outputs(kernel, rows):
    """What `kernel` makes of the problem, as stored."""
    problem, p = rows.problem, rows.parameters
    shape = problem.parameter_dims
    found = {}

    def keep(name, values):
        values = kernel.hook(f"stored {name}", values, rows)
        found[name] = rows.data(values, kernel.store) if name in DATA_OUTPUTS else values.astype(f32).reshape(shape)

    with np.errstate(all="ignore"):
        if problem.operation == Operation.FORWARD_INFERENCE:
            given = p["saved_inv_variance"] if problem.inverse else kernel.inverse(p["variance"], rows)
            mean = p["saved_mean"] if problem.inverse else p["mean"]
            keep("y", kernel.y(rows, kernel.hook("mean", mean, rows), kernel.hook("given", given, rows)))
            return found
        m = problem.m
        if problem.composed == "gather_stats":
            _gathered(kernel, rows, keep)
            return found
        if problem.composed == "sync_train":
            _synchronized(kernel, rows, keep)
            return found
        if problem.operation == Operation.FORWARD_TRAINING:
            mean, variance, inverse = kernel.statistics(rows)
            keep("y", kernel.y(rows, mean, inverse))
            keep("saved_mean", mean)
            keep("saved_inv_variance", inverse)
            _averaged(kernel, rows, mean, variance, m, keep)
            return found
        if "recomputes" in kernel.after or not problem.saved:
            mean, _, inverse = kernel.statistics(rows)
        elif problem.takes_variance:
            mean, inverse = kernel.hook("mean", p["mean"], rows), kernel.inverse(p["variance"], rows)
        else:
            mean, inverse = kernel.hook("mean", p["saved_mean"], rows), p["saved_inv_variance"]
        inverse = kernel.hook("given", inverse, rows)
        if problem.composed == "backward_reduce":
            _reduced(kernel, rows, mean, inverse, keep)
            return found
        if problem.composed == "backward_elemt":
            keep("dx", kernel.blend(kernel.hook("dx", _from_sums(kernel, rows, mean, inverse), rows), rows))
            return found
        if problem.composed == "sync_backward":
            _synchronized_backward(kernel, rows, mean, inverse, keep)
            return found
        normal = (rows.x - mean) * inverse
        dy = kernel.masked(rows, mean, inverse)
        if problem.residual:
            keep("dz", kernel.hook("dz", dy, rows))
        summed = kernel.hook("dy of sums", dy, rows)
        dbias = kernel.hook("dbias", kernel.sum("dbias", summed), rows)
        paired = kernel.hook("x of dscale", normal, rows)
        if kernel.one_pass:
            dscale = (kernel.sum("dscale", summed * rows.x) - mean * dbias) * inverse
        else:
            dscale = kernel.sum("dscale", kernel.product(summed, paired))
        dscale = kernel.hook("dscale", dscale, rows)
        centre = kernel.hook("centre", kernel.over(dbias, m), rows)
        slope = kernel.hook("slope", kernel.over(dscale, m), rows)
        inner = dy - centre - normal * slope
        if (problem.composed == "frozen") != ("other gradient" in kernel.after):
            inner = dy
        dx = kernel.hook("scale", p["scale"], rows) * inverse * inner
        keep("dx", kernel.blend(kernel.hook("dx", dx, rows), rows))
        keep("dscale", dscale)
        keep("dbias", dbias)
    return found


def _averaged(kernel, rows, mean, variance, m, keep):
    """Running statistics."""
    p = rows.parameters
    f = kernel.hook("factor", f32(rows.problem.factor), rows)
    unbiased = kernel.hook("unbiased", variance * f32(m) / f32(m - 1), rows)
    unbiased = variance if "biased" in kernel.after else unbiased
    average, spread = p["mean"], p["variance"]
    for _ in range(kernel.hook("updates", 1, rows)):
        average, spread = (1 - f) * average + f * mean, (1 - f) * spread + f * unbiased
    keep("running_mean", average)
    keep("running_variance", spread)


def _merged(kernel, rows, means, squares, counts, total):
    """Mean and variance of ranks by their means and sums of squares; `total` adds terms up, by the sum's name."""
    n = int(counts.sum())
    if kernel.chains:
        parts = [(means[:, i : i + 1], squares[:, i : i + 1], int(c)) for i, c in enumerate(counts)]
        while len(parts) > 1:
            parts[:2] = [_merge(*parts[:2])]
        mean, variance = parts[0][0], parts[0][1] / f32(n)
    else:
        pivot = means[:, :1] if kernel.shifted else f32(0)
        mean = kernel.over(total("mean", (means - pivot) * counts), n) + pivot
        apart = means if kernel.one_pass else means - mean
        between = kernel.hook("between", kernel.over(total("variance", apart * apart * counts), n), rows)
        within = kernel.hook("within", kernel.over(total("within", squares), n), rows)
        variance = within + (between - mean * mean if kernel.one_pass else between)
    mean, variance = kernel.hook("mean", mean, rows), kernel.hook("variance", variance, rows)
    return mean, variance, kernel.inverse(variance, rows), n


def _gathered(kernel, rows, keep):
    """Statistics of several ranks, merged."""
    counts = np.array(rows.problem.counts)
    own = counts > 0
    squares, weights = rows._rows(rows.inputs.m2s)[:, own], kernel.hook("counts", counts[own].astype(f32), rows)
    mean, variance, inverse, n = _merged(kernel, rows, rows.x[:, own], squares, weights, kernel.sum)
    for name, value in (("mean", mean), ("variance", variance), ("inv_variance", inverse)):
        keep(name, value)
    _averaged(kernel, rows, mean, variance, n, keep)


def _of_ranks(rows, array):
    """The part of each rank that has images."""
    ends = np.cumsum(rows.problem.shares)[:-1] * rows.inner
    return [part for part in np.split(array, ends, axis=1) if part.shape[1]]


def _synchronized(kernel, rows, keep):
    """Training over ranks: each one's statistics, gathered and merged; running averages once."""
    parts = _of_ranks(rows, rows.x)
    own = [kernel.moments(x) for x in parts]
    sizes = np.array([x.shape[1] for x in parts], f32)
    if "unbiased ranks" in kernel.after:
        own = [(mean, variance * n / (n - f32(1))) for (mean, variance), n in zip(own, sizes, strict=True)]
    gathered = np.stack([np.concatenate(values, axis=1) for values in zip(*own, strict=True)])
    gathered, counts = kernel.hook("gathered", (gathered, kernel.hook("counts", sizes, rows)), rows)
    means, variances = gathered
    merged = kernel, rows, means, variances * counts, counts, lambda name, terms: pairwise(terms)
    mean, variance, inverse, n = _merged(*merged)
    columns = np.repeat(np.arange(len(parts)), [x.shape[1] for x in parts])
    own_inverse = np.concatenate([kernel.inverse(v, rows) for _, v in own], axis=1)
    all_means = np.concatenate([m for m, _ in own], axis=1)
    each = all_means[:, columns], own_inverse[:, columns]
    used, _ = kernel.hook("used", ((mean, inverse), each), rows)
    keep("y", kernel.y(rows, *used))
    keep("saved_mean", mean)
    keep("saved_inv_variance", inverse)
    _averaged(kernel, rows, mean, variance, kernel.hook("count", n, rows), keep)


def _synchronized_backward(kernel, rows, mean, inverse, keep):
    """Backward over ranks: their sums added up; dscale and dbias are each rank's own, which the check adds up."""
    parts = list(zip(_of_ranks(rows, rows.dy), _of_ranks(rows, rows.x), strict=True))
    dbias = np.concatenate([kernel.sum("dbias", dy) for dy, _ in parts], axis=1)
    moments = []
    for (dy, x), total in zip(parts, dbias.T, strict=True):
        if kernel.one_pass:
            moments.append(kernel.sum("dscale", dy * x) - mean * total[:, None])
        else:
            paired = kernel.hook("x of dscale", x - mean, rows)
            moments.append(kernel.sum("dscale", kernel.product(dy, paired)))
    own = np.stack([dbias, np.concatenate(moments, axis=1)])
    gathered, n = kernel.hook("gathered", (own, rows.problem.m), rows)
    total, moment = (pairwise(values) for values in gathered)
    n = int(kernel.hook("count", n, rows))
    centre, slope = kernel.over(total, n), kernel.over(moment, n)
    columns = np.repeat(np.arange(len(parts)), [x.shape[1] for _, x in parts])
    each = tuple(kernel.over(a[:, columns], n) for a in own)
    (centre, slope), _ = kernel.hook("used", ((centre, slope), each), rows)
    centre = kernel.hook("centre", centre, rows)
    slope = kernel.hook("slope", slope * inverse, rows) * kernel.hook("second", inverse, rows)
    gain = kernel.hook("scale", rows.parameters["scale"], rows) * inverse
    dx = gain * (rows.dy - centre - (rows.x - mean) * slope)
    keep("dx", kernel.blend(kernel.hook("dx", dx, rows), rows))
    kept = kernel.hook("kept", own, rows)
    keep("dscale", kernel.hook("dscale", pairwise(kept[1] * inverse), rows))
    keep("dbias", kernel.hook("dbias", pairwise(kept[0]), rows))


def _reduced(kernel, rows, mean, inverse, keep):
    """The sums of backward."""
    total = kernel.hook("dbias", kernel.sum("dbias", rows.dy), rows)
    if kernel.one_pass:
        moment = kernel.sum("dscale", rows.dy * rows.x) - mean * total
    else:
        moment = kernel.sum("dscale", kernel.product(rows.dy, kernel.hook("x of dscale", rows.x - mean, rows)))
    moment = kernel.hook("moment", moment, rows)
    keep("sum_dy", kernel.hook("total", total, rows))
    keep("sum_dy_xmu", moment)
    keep("dscale", kernel.hook("dscale", moment * inverse, rows))
    keep("dbias", total)


def _from_sums(kernel, rows, mean, inverse):
    """dx from sums that are given."""
    p, n = rows.parameters, int(kernel.hook("count", rows.problem.count, rows))
    total, moment = kernel.hook("sums", (p["sum_dy"], p["sum_dy_xmu"]), rows)
    gain = kernel.hook("scale", p["scale"], rows) * inverse
    centre = kernel.hook("centre", kernel.over(total, n), rows)
    slope = kernel.hook("slope", kernel.over(moment, n) * inverse, rows) * kernel.hook("second", inverse, rows)
    if kernel.folded:
        first, second = gain, gain * slope
        return rows.dy * first - rows.x * second + (mean * second - centre * first)
    return gain * (rows.dy - centre - (rows.x - mean) * slope)
