"""Batch norm kernels on rows, one for each channel: twenty honest styles, and the bugs that the judge must see.

A kernel computes in float32 from x and dy of shape (channels, m) and stores as a library would. A bug changes one step
of the two-pass kernel. What it is, and nothing that was measured, says which outputs it reaches: those whose bits are
not those of the same kernel without it. `pybnorm.check.selftest.simulated` has the faults of memory, which need a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pybnorm.check.data import Inputs
from pybnorm.check.problem import Problem
from pybnorm.enums import Operation

__all__ = ["BUGS", "STYLES", "Kernel", "Rows", "outputs"]

Array = npt.NDArray[Any]
Change = Callable[[Any, "Rows"], Any]
Store = Callable[[Array, "np.dtype[Any]"], Array]
f32 = np.float32
bf16 = ml_dtypes.bfloat16


@dataclasses.dataclass
class Rows:
    """A problem's inputs by channel."""

    problem: Problem
    inputs: Inputs

    def __post_init__(self) -> None:
        dims = self.problem.dims
        self.shape, self.channels = dims, dims[1]
        self.inner = int(np.prod(dims[2:]))
        self.x, self.dy = self._rows(self.inputs.x), self._rows(self.inputs.dy)
        self.prior = self._rows(self.inputs.prior)
        named = ("scale", "bias", "mean", "variance", "saved_mean", "saved_inv_variance", "sum_dy", "sum_dy_xmu")
        self.parameters = {n: self._parameter(getattr(self.inputs, n)) for n in named}

    def _rows(self, array: Array | None) -> Array:
        if array is None:
            return np.zeros((self.channels, 0), f32)
        return np.moveaxis(array, 1, 0).reshape(self.channels, -1).astype(f32)

    def _parameter(self, array: Array | None) -> Array:
        return np.zeros((self.channels, 1), f32) if array is None else array.reshape(-1, 1).astype(f32)

    def data(self, rows: Array, store: Store) -> Array:
        """Rows as stored in the tensor's dtype and logical order."""
        n, c, *rest = self.shape
        stored = store(rows, self.inputs.x.dtype)
        assert stored.dtype == self.inputs.x.dtype
        return np.moveaxis(stored.reshape(c, n, *rest), 0, 1)


# ---------------------------------------------------------------- sums


def sequential(a: Array) -> Array:
    return np.add.accumulate(a, axis=1, dtype=f32)[:, -1:]


def lanes(count: int) -> Callable[[Array], Array]:
    """As SIMD does it: so many chains, added up one after the other."""

    def total(a: Array) -> Array:
        whole = a.shape[1] // count * count
        if not whole:
            return sequential(a)
        chains = np.add.accumulate(a[:, :whole].reshape(len(a), -1, count), axis=1, dtype=f32)[:, -1]
        result = sequential(chains)
        return result + sequential(a[:, whole:]) if whole < a.shape[1] else result

    return total


def pairwise(a: Array) -> Array:
    return np.add.reduce(np.ascontiguousarray(a), axis=1, dtype=f32, keepdims=True)


def tree(a: Array) -> Array:
    while a.shape[1] > 1:
        if a.shape[1] % 2:
            a = np.pad(a, ((0, 0), (0, 1)))
        a = a[:, ::2] + a[:, 1::2]
    return a


def blocked(size: int, inner: Callable[[Array], Array] = pairwise) -> Callable[[Array], Array]:
    """Blocks by `inner`, then one after the other."""

    def total(a: Array) -> Array:
        a = np.pad(a, ((0, 0), (0, -a.shape[1] % size)))
        return sequential(inner(a.reshape(-1, size)).reshape(len(a), -1))

    return total


def wide(a: Array) -> Array:
    return a.sum(axis=1, dtype=np.float64, keepdims=True).astype(f32)


def compensated(a: Array) -> Array:
    """Kahan's, in 64 chains."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % 64))).reshape(len(a), -1, 64)
    total, lost = np.zeros_like(a[:, 0]), np.zeros_like(a[:, 0])
    for i in range(a.shape[1]):
        term = a[:, i] - lost
        new = total + term
        lost = (new - total) - term
        total = new
    return sequential(total)


def welford(x: Array, chains: int, in_a_tree: bool = True) -> tuple[Array, Array]:
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


def _merge(one: tuple[Array, Array, int], two: tuple[Array, Array, int]) -> tuple[Array, Array, int]:
    (a, s, n), (b, t, k) = one, two
    delta, share = b - a, f32(k) / f32(n + k)
    return a + delta * share, s + t + delta * delta * (f32(n) * share), n + k


# ---------------------------------------------------------------- stores


def nearest(values: Array, dtype: np.dtype[Any]) -> Array:
    """Rounded to nearest, ties to even."""
    return values.astype(dtype)


def _neighbours(values: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The nearest 16-bit number, and the next one on the other side of the value, or itself where it is exact."""
    near = values.astype(dtype)
    wide = near.astype(f32)
    bits = near.view(np.uint16)
    further = np.where(np.abs(wide) > np.abs(values), bits - np.uint16(1), bits + np.uint16(1))
    exact = (wide == values) | ~np.isfinite(wide) | (wide == 0)
    return near, np.where(exact, bits, further).astype(np.uint16).view(dtype)


def _chosen(choose: Callable[[Array, Array, Array], Array]) -> Store:
    """Between the two neighbours of a value, by their values; of 32-bit data nothing is changed."""

    def store(values: Array, dtype: np.dtype[Any]) -> Array:
        if dtype.itemsize != 2:
            return values.astype(dtype)
        near, other = _neighbours(values, dtype)
        with np.errstate(all="ignore"):
            takes = choose(values, near.astype(f32), other.astype(f32))
        return np.where(takes, other.view(np.uint16), near.view(np.uint16)).view(dtype)

    return store


ties_away = _chosen(lambda v, near, other: (np.abs(v - near) == np.abs(v - other)) & (np.abs(other) > np.abs(near)))
ties_to_zero = _chosen(lambda v, near, other: (np.abs(v - near) == np.abs(v - other)) & (np.abs(other) < np.abs(near)))
toward_zero = _chosen(lambda v, near, other: np.abs(other) < np.abs(near))
away_from_zero = _chosen(lambda v, near, other: np.abs(other) > np.abs(near))
upward = _chosen(lambda v, near, other: other > near)


def without_denormals(values: Array, dtype: np.dtype[Any]) -> Array:
    """To nearest; 16-bit results below the smallest normal number are 0."""
    stored = values.astype(dtype)
    tiny = f32(2.0**-14 if dtype == np.float16 else 2.0**-126)
    return np.where(np.abs(stored.astype(f32)) < tiny, dtype.type(0), stored)


def _through_other(values: Array, dtype: np.dtype[Any]) -> Array:
    """16-bit results through the other 16-bit type."""
    if dtype.itemsize != 2:
        return values.astype(dtype)
    return values.astype(np.float16 if dtype == bf16 else bf16).astype(dtype)


def _low_half(values: Array, dtype: np.dtype[Any]) -> Array:
    """The last bit of each 16-bit result is lost."""
    stored = values.astype(dtype)
    return (stored.view(np.uint16) & np.uint16(0xFFFE)).view(dtype) if dtype.itemsize == 2 else stored


def _every_other(values: Array, dtype: np.dtype[Any]) -> Array:
    """Pairs of 16-bit results change places."""
    stored = values.astype(dtype)
    if dtype.itemsize == 2:
        whole = stored.shape[1] // 2 * 2
        stored[:, :whole] = stored[:, :whole].reshape(len(stored), -1, 2)[:, :, ::-1].reshape(len(stored), -1)
    return stored


# ---------------------------------------------------------------- kernels


class Kernel:
    """The two-pass kernel; what a bug or a style changes are its members."""

    total: Callable[[Array], Array] = staticmethod(pairwise)
    reads: Mapping[str, Callable[[Array], Array]] = {}
    """What is done to the terms of a sum before they are added: "mean", "variance", "dscale", "dbias", or "" of all."""
    after: Mapping[str, Change] = {}
    """What is done to a value: mean, variance, inverse, y, dscale, dbias, dx, and what is stored, "stored y"."""
    store: Store = staticmethod(nearest)
    """How y and dx are rounded to the tensor's type."""
    chains: int = 0
    """Of Welford's recurrence, if it is used; negative: merged one by one."""
    folded = one_pass = shifted = reciprocal = fused = False

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)

    def hook(self, name: str, value: Any, rows: Rows) -> Any:
        """`value`, or what the kernel makes of it."""
        change = self.after.get(name)
        return value if change is None else change(value, rows)

    def sum(self, name: str, terms: Array) -> Array:
        """Sum of the terms that are read."""
        read = self.reads.get(name, self.reads.get(""))
        return self.total(terms if read is None else read(terms))

    def over(self, total: Array, m: int) -> Array:
        """The sum divided by m."""
        return total * (f32(1) / f32(m)) if self.reciprocal else total / f32(m)

    def product(self, a: Array, b: Array) -> Array:
        """a * b, with all its digits where it is fused into the sum."""
        return (a.astype(np.float64) * b).astype(f32) if self.fused else a * b

    def moments(self, x: Array) -> tuple[Array, Array]:
        """Mean and biased variance."""
        m = x.shape[1]
        if self.chains:
            mean, variance = welford(x, min(abs(self.chains), max(1, m // 8)), self.chains > 0)
        elif self.one_pass or self.shifted:
            pivot = x[:, :1] if self.shifted else f32(0)
            moved = x - pivot
            one = self.over(self.sum("mean", moved), m)
            variance = self.over(self.sum("variance", self.product(moved, moved)), m) - one * one
            mean = one + pivot
        else:
            mean = self.over(self.sum("mean", x), m)
            centred = x - mean
            variance = self.over(self.sum("variance", self.product(centred, centred)), m)
        return mean, variance

    def statistics(self, rows: Rows) -> tuple[Array, Array, Array]:
        """Mean, variance and inverse standard deviation."""
        mean, variance = self.moments(rows.x)
        mean, variance = self.hook("mean", mean, rows), self.hook("variance", variance, rows)
        return mean, variance, self.inverse(variance, rows)

    def inverse(self, variance: Array, rows: Rows) -> Array:
        """1 / sqrt(variance + epsilon)."""
        with np.errstate(all="ignore"):
            plain = f32(1) / np.sqrt(variance + f32(rows.problem.epsilon))
            other = self.after.get("of variance")
            return self.hook("inverse", plain if other is None else other(variance, rows), rows)

    def y(self, rows: Rows, mean: Array, inverse: Array) -> Array:
        """Normalized, scaled and blended."""
        scale = self.hook("scale", rows.parameters["scale"], rows)
        bias = self.hook("bias", rows.parameters["bias"], rows)
        if self.folded:
            slope = scale * inverse
            result = rows.x * slope + (bias - mean * slope)
        else:
            result = (rows.x - mean) * inverse * scale + bias
        return self.blend(self.hook("y", result, rows), rows)

    def blend(self, result: Array, rows: Rows) -> Array:
        """alpha * result + beta * prior."""
        p = rows.problem
        alpha, beta = self.hook("alpha", f32(p.alpha), rows), self.hook("beta", f32(p.beta), rows)
        return alpha * result + beta * rows.prior if beta else alpha * result


def outputs(kernel: Kernel, rows: Rows) -> dict[str, Array]:
    """What `kernel` makes of the problem, as stored."""
    problem, p = rows.problem, rows.parameters
    shape = problem.parameter_dims
    found: dict[str, Array] = {}

    def keep(name: str, values: Array) -> None:
        values = kernel.hook(f"stored {name}", values, rows)
        found[name] = rows.data(values, kernel.store) if name in ("y", "dx") else values.astype(f32).reshape(shape)

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
        dbias = kernel.hook("dbias", kernel.sum("dbias", rows.dy), rows)
        paired = kernel.hook("x of dscale", normal, rows)
        if kernel.one_pass:
            dscale = (kernel.sum("dscale", rows.dy * rows.x) - mean * dbias) * inverse
        else:
            dscale = kernel.sum("dscale", kernel.product(rows.dy, paired))
        dscale = kernel.hook("dscale", dscale, rows)
        centre = kernel.hook("centre", kernel.over(dbias, m), rows)
        slope = kernel.hook("slope", kernel.over(dscale, m), rows)
        inner = rows.dy - centre - normal * slope
        if (problem.composed == "frozen") != ("other gradient" in kernel.after):
            inner = rows.dy
        dx = kernel.hook("scale", p["scale"], rows) * inverse * inner
        keep("dx", kernel.blend(kernel.hook("dx", dx, rows), rows))
        keep("dscale", dscale)
        keep("dbias", dbias)
    return found


def _averaged(
    kernel: Kernel, rows: Rows, mean: Array, variance: Array, m: int, keep: Callable[[str, Array], None]
) -> None:
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


def _gathered(kernel: Kernel, rows: Rows, keep: Callable[[str, Array], None]) -> None:
    """Statistics of several ranks, merged."""
    problem = rows.problem
    counts = np.array(problem.counts)
    m2s = rows._rows(rows.inputs.m2s)[:, counts > 0]
    means, counts = rows.x[:, counts > 0], kernel.hook("counts", counts[counts > 0].astype(f32), rows)
    n = int(counts.sum())
    if kernel.chains:
        parts = [(means[:, i : i + 1], m2s[:, i : i + 1], int(c)) for i, c in enumerate(counts)]
        while len(parts) > 1:
            parts[:2] = [_merge(*parts[:2])]
        mean, variance = parts[0][0], parts[0][1] / f32(n)
    else:
        pivot = means[:, :1] if kernel.shifted else f32(0)
        mean = kernel.hook("mean", kernel.over(kernel.sum("mean", (means - pivot) * counts), n) + pivot, rows)
        apart = means if kernel.one_pass else means - mean
        between = kernel.hook("between", kernel.over(kernel.sum("variance", apart * apart * counts), n), rows)
        within = kernel.hook("within", kernel.over(kernel.sum("within", m2s), n), rows)
        variance = kernel.hook("variance", within + (between - mean * mean if kernel.one_pass else between), rows)
    inverse = kernel.inverse(variance, rows)
    for name, value in (("mean", mean), ("variance", variance), ("inv_variance", inverse)):
        keep(name, value)
    _averaged(kernel, rows, mean, variance, n, keep)


def _of_ranks(rows: Rows, array: Array) -> list[Array]:
    """The part of each rank that has images."""
    ends = np.cumsum(rows.problem.shares)[:-1] * rows.inner
    return [part for part in np.split(array, ends, axis=1) if part.shape[1]]


def _synchronized(kernel: Kernel, rows: Rows, keep: Callable[[str, Array], None]) -> None:
    """Training over ranks: each one's statistics, gathered and merged; running averages once."""
    parts = _of_ranks(rows, rows.x)
    own = [kernel.moments(x) for x in parts]
    sizes = np.array([x.shape[1] for x in parts], f32)
    if "unbiased ranks" in kernel.after:
        own = [(mean, variance * n / (n - _one)) for (mean, variance), n in zip(own, sizes, strict=True)]
    gathered = np.stack([np.concatenate(values, axis=1) for values in zip(*own, strict=True)])
    gathered, counts = kernel.hook("gathered", (gathered, kernel.hook("counts", sizes, rows)), rows)
    means, variances = gathered
    n = int(counts.sum())
    if kernel.chains:
        merged = means[:, :1], variances[:, :1] * counts[0], int(counts[0])
        for i in range(1, len(counts)):
            merged = _merge(merged, (means[:, i : i + 1], variances[:, i : i + 1] * counts[i], int(counts[i])))
        mean, variance = merged[0], merged[1] / f32(n)
    else:
        pivot = means[:, :1] if kernel.shifted else f32(0)
        mean = kernel.over(pairwise((means - pivot) * counts), n) + pivot
        apart = means if kernel.one_pass else means - mean
        between = kernel.hook("between", kernel.over(pairwise(apart * apart * counts), n), rows)
        within = kernel.hook("within", kernel.over(pairwise(variances * counts), n), rows)
        variance = within + (between - mean * mean if kernel.one_pass else between)
    mean, variance = kernel.hook("mean", mean, rows), kernel.hook("variance", variance, rows)
    inverse = kernel.inverse(variance, rows)
    columns = np.repeat(np.arange(len(parts)), [x.shape[1] for x in parts])
    own_inverse = np.concatenate([kernel.inverse(v, rows) for _, v in own], axis=1)
    all_means = np.concatenate([m for m, _ in own], axis=1)
    each = all_means[:, columns], own_inverse[:, columns]
    used, _ = kernel.hook("used", ((mean, inverse), each), rows)
    keep("y", kernel.y(rows, *used))
    keep("saved_mean", mean)
    keep("saved_inv_variance", inverse)
    _averaged(kernel, rows, mean, variance, kernel.hook("count", n, rows), keep)


def _synchronized_backward(
    kernel: Kernel, rows: Rows, mean: Array, inverse: Array, keep: Callable[[str, Array], None]
) -> None:
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


def _reduced(kernel: Kernel, rows: Rows, mean: Array, inverse: Array, keep: Callable[[str, Array], None]) -> None:
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


def _from_sums(kernel: Kernel, rows: Rows, mean: Array, inverse: Array) -> Array:
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


def _ulps(count: int) -> Change:
    """A value that is off by up to so many units in the last place, now up, now down."""

    def change(value: Array, rows: Rows) -> Array:
        direction = np.where(np.arange(len(value))[:, None] % 3 == 0, f32(np.inf), f32(-np.inf))
        for _ in range(count):
            value = np.nextafter(value, direction)
        return value

    return change


def _flushed(value: Array, rows: Rows) -> Array:
    return np.where(np.abs(value) < np.finfo(f32).tiny, f32(0), value)


STYLES: dict[str, Kernel] = {
    "two-pass, pairwise": Kernel(),
    "two-pass, sequential": Kernel(total=sequential),
    "4 lanes": Kernel(total=lanes(4)),
    "16 lanes": Kernel(total=lanes(16)),
    "64 lanes": Kernel(total=lanes(64)),
    "binary tree": Kernel(total=tree),
    "blocks of 256": Kernel(total=blocked(256)),
    "blocks of 1024 in sequence": Kernel(total=blocked(1024, sequential)),
    "float64 sums": Kernel(total=wide),
    "compensated sums": Kernel(total=compensated),
    "Welford, one chain": Kernel(chains=1),
    "Welford, 64 chains in a tree": Kernel(chains=64),
    "Welford, 256 chains one by one": Kernel(chains=-256),
    "Welford, 1024 chains in a tree": Kernel(chains=1024),
    "shifted by the first element": Kernel(shifted=True),
    "folded to a x + b": Kernel(folded=True),
    "multiplied by 1/m": Kernel(reciprocal=True),
    "fused multiply-add": Kernel(fused=True, total=lanes(16)),
    "rsqrt within 1 ulp": Kernel(after={"inverse": _ulps(1)}),
    "rsqrt within 2 ulp": Kernel(after={"inverse": _ulps(2)}),
    "flushes to zero": Kernel(after={n: _flushed for n in ("y", "dx", "dscale", "dbias", "mean", "variance")}),
    "16-bit stores, ties away from zero": Kernel(store=ties_away),
    "16-bit stores, ties to zero": Kernel(store=ties_to_zero),
    "16-bit stores without denormals": Kernel(store=without_denormals),
    "one pass": Kernel(one_pass=True, total=lanes(64)),
}
"""Right ways to compute; the last is right as far as its cancellation lets it be, and may be WARN."""
ONE_CHAIN = frozenset({"two-pass, sequential", "Welford, one chain"})
"""Right as long as a sum is short (`pybnorm.check.selftest.power.LONGEST_CHAIN`)."""


# ---------------------------------------------------------------- bugs


def _reads(change: Callable[[Array], Array], *names: str) -> Kernel:
    return Kernel(reads=dict.fromkeys(names or ("",), change))


def _after(**changes: Change) -> Kernel:
    return Kernel(after={name.replace("__", " "): change for name, change in changes.items()})


def _without(a: Array, places: Any) -> Array:
    a = a.copy()
    a[:, places] = 0
    return a


def _from(a: Array, place: Any, other: Any) -> Array:
    a = a.copy()
    a[:, place] = a[:, other]
    return a


def _twice(a: Array, places: Any) -> Array:
    a = a.copy()
    a[:, places] *= 2
    return a


def _swapped(a: Array, i: int, k: int) -> Array:
    a = a.copy()
    a[:, [i, k]] = a[:, [k, i]]
    return a


def _put(a: Array, place: Any, value: Any) -> Array:
    a = a.copy()
    a[place] = value
    return a


def _through(dtype: Any) -> Change:
    return lambda value, rows: value.astype(dtype).astype(f32)


def _tf32(a: Array) -> Array:
    """Ten bits behind the point, rounded."""
    return ((a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(f32)


def _partials(dtype: Any) -> Callable[[Array], Array]:
    def total(a: Array) -> Array:
        a = np.pad(a, ((0, 0), (0, -a.shape[1] % 256)))
        return pairwise(pairwise(a.reshape(-1, 256)).reshape(len(a), -1).astype(dtype).astype(f32))

    return total


def _fixed(a: Array) -> Array:
    """Partial sums in steps of 2**-6."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % 64)))
    return pairwise(np.floor(pairwise(a.reshape(-1, 64)).reshape(len(a), -1) * f32(64)) / f32(64))


def _epsilon(change: Callable[[Array, f32], Array]) -> Kernel:
    return Kernel(after={"of variance": lambda v, rows: change(v, f32(rows.problem.epsilon))})


def _own_count(rows: Rows) -> int:
    """Elements per statistic of one rank."""
    if not rows.problem.composed.startswith("sync"):
        return rows.problem.m
    return next(images for images in rows.problem.shares if images) * rows.inner


def _fewer(counts: Any) -> Any:
    """Without the last rank, of which a single number tells nothing."""
    return counts[:-1] if isinstance(counts, np.ndarray) else counts


def _more(counts: Any) -> Any:
    return np.append(counts, counts[-1]) if isinstance(counts, np.ndarray) else counts


def _m(rows: Rows) -> f32:
    return f32(rows.problem.m)


def _unbiased(inverse: Array, rows: Rows) -> Array:
    variance = np.maximum(_one / (inverse * inverse) - f32(rows.problem.epsilon), 0)
    return _one / np.sqrt(variance * _m(rows) / (_m(rows) - _one) + f32(rows.problem.epsilon))


_one = f32(1)
BUGS: dict[str, Kernel] = {
    # elements of every sum
    "last element dropped": _reads(lambda a: a[:, :-1]),
    "first element dropped": _reads(lambda a: a[:, 1:]),
    "an element in the middle dropped": _reads(lambda a: np.delete(a, a.shape[1] // 3, axis=1)),
    "last element twice": _reads(lambda a: _twice(a, -1)),
    "first element twice": _reads(lambda a: _twice(a, 0)),
    "an element in the middle twice": _reads(lambda a: _twice(a, a.shape[1] // 3)),
    "last element read from beside it": _reads(lambda a: _from(a, -1, -2)),
    "first element read from beside it": _reads(lambda a: _from(a, 0, 1)),
    "an element in the middle read from beside it": _reads(lambda a: _from(a, a.shape[1] // 3, a.shape[1] // 3 + 1)),
    "last 2 elements dropped": _reads(lambda a: a[:, :-2]),
    "last 3 elements dropped": _reads(lambda a: a[:, :-3]),
    "last 4 elements dropped": _reads(lambda a: a[:, :-4]),
    "last 7 elements dropped": _reads(lambda a: a[:, :-7]),
    "last 16 elements dropped": _reads(lambda a: a[:, :-16]),
    "last 32 elements dropped": _reads(lambda a: a[:, :-32]),
    "last 2 elements twice": _reads(lambda a: _twice(a, slice(-2, None))),
    "last 16 elements twice": _reads(lambda a: _twice(a, slice(-16, None))),
    "every 16th element dropped": _reads(lambda a: _without(a, slice(0, None, 16))),
    "last quarter read with a stride of 2": _reads(
        lambda a: np.concatenate([a[:, : -(a.shape[1] // 4)], np.repeat(a[:, -(a.shape[1] // 4) :: 2], 2, axis=1)], 1)
    ),
    "last eighth read from the start": _reads(
        lambda a: _from(a, slice(-(a.shape[1] // 8), None), slice(0, a.shape[1] // 8))
    ),
    "last half not read": _reads(lambda a: a[:, : a.shape[1] // 2]),
    # one sum alone
    "last element dropped from the mean": _reads(lambda a: a[:, :-1], "mean"),
    "last element dropped from the variance": _reads(lambda a: a[:, :-1], "variance"),
    "last element dropped from dscale": _reads(lambda a: a[:, :-1], "dscale"),
    "last element dropped from dbias": _reads(lambda a: a[:, :-1], "dbias"),
    "last element twice in dscale": _reads(lambda a: _twice(a, -1), "dscale"),
    "last element twice in dbias": _reads(lambda a: _twice(a, -1), "dbias"),
    "x of the last two elements swapped in dscale": _after(x__of__dscale=lambda a, r: _swapped(a, -1, -2)),
    "x of two neighbours swapped in dscale": _after(
        x__of__dscale=lambda a, r: _swapped(a, a.shape[1] // 3, a.shape[1] // 3 + 1)
    ),
    "x one element behind dy in dscale": _after(x__of__dscale=lambda a, r: np.roll(a, 1, axis=1)),
    "dy of the last element from beside it": _reads(lambda a: _from(a, -1, -2), "dbias"),
    # channels
    "statistics of two channels swapped": _after(
        mean=lambda v, r: _put(v, [0, 1], v[[1, 0]]), inverse=lambda v, r: _put(v, [0, 1], v[[1, 0]])
    ),
    "last channel has its neighbour's mean": _after(mean=lambda v, r: _put(v, -1, v[-2])),
    "means shifted by one channel": _after(mean=lambda v, r: np.roll(v, 1, axis=0)),
    "first channel's scale for all": _after(scale=lambda v, r: v * 0 + v[:1]),
    "first channel's bias for all": _after(bias=lambda v, r: v * 0 + v[:1]),
    "scales of two channels swapped": _after(scale=lambda v, r: _put(v, [1, 2], v[[2, 1]])),
    "sign of the scale lost": _after(scale=lambda v, r: np.abs(v)),
    "bias left out": _after(bias=lambda v, r: v * 0),
    # conventions
    "normalized by the unbiased variance": _after(inverse=_unbiased),
    "biased running variance": Kernel(after={"biased": lambda v, r: v}),
    "m / (m - 1) applied twice": _after(unbiased=lambda v, r: v * _m(r) / (_m(r) - _one)),
    "mean over m - 1": _after(mean=lambda v, r: v * _m(r) / (_m(r) - _one)),
    "mean over m + 1": _after(mean=lambda v, r: v * _m(r) / (_m(r) + _one)),
    "variance over m + 1": _after(variance=lambda v, r: v * _m(r) / (_m(r) + _one)),
    "variance saved in place of its inverse root": _after(
        stored__saved_inv_variance=lambda v, r: _one / (v * v) - f32(r.problem.epsilon)
    ),
    "standard deviation saved in place of its inverse": _after(stored__saved_inv_variance=lambda v, r: _one / v),
    "mean not subtracted": _after(mean=lambda v, r: v * 0),
    "second moment for the variance": _after(
        variance=lambda v, r: v + (r.x[:, :1] * 0 + r.x.mean(1, keepdims=True)) ** 2
    ),
    "statistics of the first image alone": _after(mean=lambda v, r: r.x[:, : r.inner].mean(axis=1, keepdims=True)),
    # running averages
    "old and new swapped in the running average": _after(factor=lambda f, r: _one - f),
    "factor taken for 1": _after(factor=lambda f, r: f * 0 + 1),
    "running statistics not updated": _after(factor=lambda f, r: f * 0),
    "factor 1 % too large": _after(factor=lambda f, r: f * f32(1.01)),
    "running variance of its root": _after(unbiased=lambda v, r: np.sqrt(v)),
    "epsilon in the running variance": _after(unbiased=lambda v, r: v + f32(r.problem.epsilon)),
    "running mean not written": _after(stored__running_mean=lambda v, r: v * f32(np.nan)),
    # epsilon
    "epsilon outside the root": _epsilon(lambda v, e: _one / (np.sqrt(v) + e)),
    "epsilon missing": _epsilon(lambda v, e: _one / np.sqrt(v)),
    "epsilon 1e-3 in its place": _epsilon(lambda v, e: _one / np.sqrt(v + f32(1e-3))),
    "epsilon twice": _epsilon(lambda v, e: _one / np.sqrt(v + e + e)),
    "epsilon as a lower limit": _epsilon(lambda v, e: _one / np.sqrt(np.maximum(v, e))),
    "epsilon subtracted": _epsilon(lambda v, e: _one / np.sqrt(np.maximum(v - e, f32(1e-9)))),
    "epsilon squared": _epsilon(lambda v, e: _one / np.sqrt(v + e * e)),
    # precision
    "partial sums in float16": Kernel(total=_partials(np.float16)),
    "partial sums in bfloat16": Kernel(total=_partials(bf16)),
    "terms in tf32": _reads(_tf32),
    "partial sums in fixed point": Kernel(total=_fixed),
    "mean through bfloat16": _after(mean=_through(bf16)),
    "mean through float16": _after(mean=_through(np.float16)),
    "variance through bfloat16": _after(variance=_through(bf16)),
    "inverse through float16": _after(inverse=_through(np.float16)),
    "rsqrt off by 1e-4": _after(inverse=lambda v, r: v * f32(1 + 1e-4)),
    "rsqrt off by 1e-5": _after(inverse=lambda v, r: v * f32(1 + 1e-5)),
    "rsqrt off by 2e-6": _after(inverse=lambda v, r: v * f32(1 + 2e-6)),
    "1/m off by 1e-4": _after(mean=lambda v, r: v * f32(1 + 1e-4), centre=lambda v, r: v * f32(1 + 1e-4)),
    "results through bfloat16": _after(y=_through(bf16), dx=_through(bf16)),
    "dscale and dbias through bfloat16": _after(dscale=_through(bf16), dbias=_through(bf16)),
    "saved mean through float16": _after(stored__saved_mean=_through(np.float16)),
    "saved inverse through bfloat16": _after(stored__saved_inv_variance=_through(bf16)),
    # backward
    "dx without mean(dy)": _after(centre=lambda v, r: v * 0),
    "dx without projection": _after(slope=lambda v, r: v * 0),
    "dx with sums not divided by m": _after(slope=lambda v, r: v * _m(r)),
    "dx with m - 1": _after(
        slope=lambda v, r: v * _m(r) / (_m(r) - _one), centre=lambda v, r: v * _m(r) / (_m(r) - _one)
    ),
    "dx without the scale": _after(dx=lambda v, r: v / r.parameters["scale"]),
    "dscale without the inverse": _after(dscale=lambda v, r: v / (_one / r.x.std(axis=1, keepdims=True))),
    "dscale with the wrong sign": _after(dscale=lambda v, r: -v),
    "dbias with the wrong sign": _after(dbias=lambda v, r: -v),
    "saved statistics recomputed": Kernel(after={"recomputes": lambda v, r: v}),
    # operations that are composed
    "gradient of the other pass": Kernel(after={"other gradient": lambda v, r: v}),
    "given statistics shifted by one channel": _after(given=lambda v, r: np.roll(v, 1, axis=0)),
    "variance taken for its inverse root": _after(given=lambda v, r: _one / (v * v) - f32(r.problem.epsilon)),
    "sums averaged": _after(total=lambda v, r: v / _m(r), moment=lambda v, r: v / _m(r)),
    "sum_dy_xmu times the inverse": _after(moment=lambda v, r: v * r.parameters["saved_inv_variance"]),
    "sum_dy_xmu without the mean": _after(
        x__of__dscale=lambda a, r: a + r.parameters["saved_mean"] if r.problem.composed == "backward_reduce" else a
    ),
    "own count in place of all ranks'": _after(count=lambda n, r: _own_count(r)),
    "sums taken for averages": _after(count=lambda n, r: 1),
    "own sums in place of all ranks'": _after(
        sums=lambda v, r: (
            pairwise(r.dy),
            pairwise(r.dy * (r.x - r.parameters["saved_mean"])),
        )
    ),
    "sums of dy and dy x swapped": _after(sums=lambda v, r: v[::-1]),
    "inverse once where its square is right": _after(second=lambda v, r: v * 0 + _one),
    "each rank counted alike": _after(counts=lambda c, r: c * 0 + c.mean().round()),
    "first rank's count for all": _after(counts=lambda c, r: c * 0 + c[:1]),
    "variance between the ranks left out": _after(between=lambda v, r: v * 0),
    "variance within the ranks left out": _after(within=lambda v, r: v * 0),
    # ranks
    "last rank left out": _after(gathered=lambda v, r: (v[0][..., :-1], _fewer(v[1]))),
    "last rank's statistics or sums left out, its elements counted": _after(
        gathered=lambda v, r: (_put(v[0], (..., -1), 0), v[1])
    ),
    "last rank twice": _after(gathered=lambda v, r: (v[0][..., [*range(v[0].shape[2]), -1]], _more(v[1]))),
    "first rank's statistics or sums for every rank": _after(
        gathered=lambda v, r: (v[0][..., [0] * v[0].shape[2]], v[1])
    ),
    "ranks gathered in float16": _after(gathered=lambda v, r: (_through(np.float16)(v[0], r), v[1])),
    "ranks gathered in bfloat16": _after(gathered=lambda v, r: (_through(bf16)(v[0], r), v[1])),
    "each rank's own statistics or sums": _after(used=lambda v, r: v[::-1]),
    "unbiased variances of the ranks merged": Kernel(after={"unbiased ranks": lambda v, r: v}),
    "running statistics updated once for each rank": _after(updates=lambda n, r: sum(s > 0 for s in r.problem.shares)),
    "dscale and dbias of all ranks taken for each rank's own": _after(kept=lambda v, r: v * f32(v.shape[2])),
    "dscale and dbias averaged over the ranks": _after(kept=lambda v, r: v / f32(v.shape[2])),
    "dscale and dbias of the first rank alone": _after(kept=lambda v, r: v[..., :1]),
    # elements of a result
    "last element not written": _after(
        stored__y=lambda v, r: _put(v, (-1, -1), np.nan), stored__dx=lambda v, r: _put(v, (-1, -1), np.nan)
    ),
    "last element of each channel 0": _after(
        stored__y=lambda v, r: _put(v, (slice(None), -1), 0), stored__dx=lambda v, r: _put(v, (slice(None), -1), 0)
    ),
    "an element from beside it": _after(
        stored__y=lambda v, r: _from(v, v.shape[1] // 3, v.shape[1] // 3 + 1),
        stored__dx=lambda v, r: _from(v, v.shape[1] // 3, v.shape[1] // 3 + 1),
    ),
    "two neighbours swapped in the result": _after(
        stored__y=lambda v, r: _swapped(v, 5, 6), stored__dx=lambda v, r: _swapped(v, 5, 6)
    ),
    "last element from the channel before": _after(
        stored__y=lambda v, r: _put(v, (-1, -1), v[-2, -1]), stored__dx=lambda v, r: _put(v, (-1, -1), v[-2, -1])
    ),
    "result shifted by one element": _after(
        stored__y=lambda v, r: np.roll(v, 1, axis=1), stored__dx=lambda v, r: np.roll(v, 1, axis=1)
    ),
    "one element infinite": _after(
        stored__y=lambda v, r: _put(v, (0, 7), np.inf), stored__dx=lambda v, r: _put(v, (0, 7), np.inf)
    ),
    "results clamped at 1": _after(
        stored__y=lambda v, r: np.clip(v, -1, 1), stored__dx=lambda v, r: np.clip(v, f32(-0.1), f32(0.1))
    ),
    "negative results 0": _after(stored__y=lambda v, r: np.maximum(v, 0), stored__dx=lambda v, r: np.maximum(v, 0)),
    "saved statistics of two channels swapped": _after(
        stored__saved_mean=lambda v, r: _put(v, [0, 1], v[[1, 0]]),
        stored__running_variance=lambda v, r: _put(v, [0, 1], v[[1, 0]]),
    ),
    # 16-bit stores
    "16-bit results truncated": Kernel(store=toward_zero),
    "16-bit results rounded away from zero": Kernel(store=away_from_zero),
    "16-bit results rounded upward": Kernel(store=upward),
    "16-bit results through the other 16-bit type": Kernel(store=_through_other),
    "last bit of 16-bit results lost": Kernel(store=_low_half),
    "halves of packed 16-bit results swapped": Kernel(store=_every_other),
    # blending
    "alpha ignored": _after(alpha=lambda a, r: f32(1)),
    "beta ignored": _after(beta=lambda a, r: f32(0)),
    "alpha twice": _after(alpha=lambda a, r: a * a),
}
"""What goes wrong in kernels, each a change of one step."""
