"""The bugs that the judge must see, each a change of one step of a batch norm kernel.

A bug changes one step of the two-pass kernel of `selftest_tool.kernels`. What it is, and nothing that was
measured, says which outputs it reaches: those whose bits are not those of the same kernel without it.
`pybnorm.check.selftest.simulated` has the faults of memory, which need a call.
"""

import numpy as np

from pybnorm.check.language import activations
from selftest_tool import stores
from selftest_tool.kernels import Kernel, Rows, bf16, f32, outputs, pairwise, sequential
from selftest_tool.styles import ONE_CHAIN, STYLES

__all__ = ["BUGS", "ONE_CHAIN", "STYLES", "Kernel", "Rows", "outputs", "sequential"]


def _reads(change, *names):
    return Kernel(reads=dict.fromkeys(names or ("",), change))


def _after(**changes):
    return Kernel(after={name.replace("__", " "): change for name, change in changes.items()})


def _each(change, *names):
    """The same change of several values; without names, of what is stored of y and dx."""
    return Kernel(after=dict.fromkeys(names or ("stored y", "stored dx"), change))


def _put(a, place, value):
    a = a.copy()
    a[place] = value
    return a


def _without(a, places):
    return _put(a, (slice(None), places), 0)


def _from(a, place, other):
    return _put(a, (slice(None), place), a[:, other])


def _twice(a, places):
    return _put(a, (slice(None), places), 2 * a[:, places])


def _swapped(a, i, k):
    return _from(a, [i, k], [k, i])


def _through(dtype):
    return lambda value, rows: value.astype(dtype).astype(f32)


def _partials(dtype):
    def total(a):
        a = np.pad(a, ((0, 0), (0, -a.shape[1] % 256)))
        return pairwise(pairwise(a.reshape(-1, 256)).reshape(len(a), -1).astype(dtype).astype(f32))

    return total


def _fixed(a):
    """Partial sums in steps of 2**-6."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % 64)))
    return pairwise(np.floor(pairwise(a.reshape(-1, 64)).reshape(len(a), -1) * f32(64)) / f32(64))


def _epsilon(change):
    return Kernel(after={"of variance": lambda v, rows: change(v, f32(rows.problem.epsilon))})


def _own_count(rows):
    """Elements per statistic of one rank."""
    if not rows.problem.composed.startswith("sync"):
        return rows.problem.m
    return next(images for images in rows.problem.shares if images) * rows.inner


def _own_bessel(rows):
    """What an unbiased variance by the count of one rank is of the right one."""
    n, own = f32(rows.problem.m), f32(_own_count(rows))
    return (n - _one) / n * own / (own - _one) if rows.problem.composed.startswith("sync") else _one


def _of_own(values, rows, which):
    """Of two vectors of all ranks, one that is each rank's own; of training both are as they were."""
    ranks, own = values
    if rows.problem.composed != "sync_backward":
        return values
    return tuple(own[i] if i == which else ranks[i] for i in range(2)), own


def _fewer(counts):
    """Without the last rank, of which a single number tells nothing."""
    return counts[:-1] if isinstance(counts, np.ndarray) else counts


def _more(counts):
    return np.append(counts, counts[-1]) if isinstance(counts, np.ndarray) else counts


def _m(rows):
    return f32(rows.problem.m)


def _unbiased(inverse, rows):
    variance = np.maximum(_one / (inverse * inverse) - f32(rows.problem.epsilon), 0)
    return _one / np.sqrt(variance * _m(rows) / (_m(rows) - _one) + f32(rows.problem.epsilon))


def _tile(a, times):
    """One warp's 32 elements, an aligned run in the middle, so many times."""
    first = a.shape[1] // 96 * 32
    return _put(a, (slice(None), _run(first, 32)), f32(times) * a[:, _run(first, 32)]) if first else a


def _blocks(a):
    return _without(a, slice(255, None, 256)) if a.shape[1] > 256 else a


def _skipped(a):
    places = np.arange(a.shape[1])
    return _without(a, places // 1024 % 32 == 31)


def _run(first, count):
    return slice(first, first + count)


def _less_a_block(value, rows):
    """Divided by a count that lacks a block of 256."""
    return value * _m(rows) / (_m(rows) - min(f32(256), np.floor(_m(rows) / 4)))


def _averaged(value, rows):
    return _put(value, [0, 1], (value[:1] + value[1:2]) / 2)


def _one_step(variance, rows):
    """1 / sqrt from the exponent, and one step of Newton's."""
    value = (variance + f32(rows.problem.epsilon)).astype(f32)
    near = (np.uint32(0x5F3759DF) - (value.view(np.uint32) >> np.uint32(1))).view(f32)
    return near * (f32(1.5) - f32(0.5) * value * near * near)


def _in_pairs(a, rows):
    """Neighbours exchanged, of each four."""
    whole = a.shape[1] // 4 * 4
    return _from(a, np.arange(whole), np.arange(whole) ^ 1)


def _of_17_bits(value, rows):
    digits, exponent = np.frexp(value)
    return np.ldexp(np.round(digits * f32(2.0**17)) / f32(2.0**17), exponent)


def _last_quarter(value, rows):
    last = slice(None), slice(-(value.shape[1] // 4), None)
    return _put(value, last, value[last] * f32(1 + 5e-6))


def _in_16_bits(a):
    """Sums of 32 elements, added up in float16."""
    parts = np.pad(a, ((0, 0), (0, -a.shape[1] % 1024))).reshape(len(a), -1, 1024).sum(axis=2, dtype=f32)
    total = np.zeros((len(a), 1), np.float16)
    for i in range(parts.shape[1]):
        total = (total.astype(f32) + parts[:, i : i + 1]).astype(np.float16)
    return total.astype(f32)


def _limits(rows):
    return activations.limits(rows.problem)


def _clipped(value, rows):
    low, high = _limits(rows)
    return np.minimum(np.maximum(value, f32(low)), f32(high))


def _early(value, rows):
    return _clipped(value - rows.z, rows) + rows.z if rows.problem.residual else _clipped(value, rows)


def _sloped(value, rows):
    low = f32(_limits(rows)[0])
    return np.where(value > low, _clipped(value, rows), low + (value - low) * f32(1e-3))


def _passing(value, rows):
    return activations.passes(rows.problem, value)


def _before_residual(value, rows):
    p = rows.parameters
    plain = (rows.x - p["saved_mean"]) * p["saved_inv_variance"] * p["scale"] + p["bias"]
    return _passing(plain, rows)


_one = f32(1)
_OFF = ("1e-4", "1e-5", "2e-6")
BUGS = {
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
    **{f"last {n} elements dropped": _reads(lambda a, n=n: a[:, :-n]) for n in (2, 3, 4, 7, 16, 32)},
    **{f"last {n} elements twice": _reads(lambda a, n=n: _twice(a, slice(-n, None))) for n in (2, 16)},
    "every 16th element dropped": _reads(lambda a: _without(a, slice(0, None, 16))),
    "last quarter read with a stride of 2": _reads(
        lambda a: np.concatenate([a[:, : -(a.shape[1] // 4)], np.repeat(a[:, -(a.shape[1] // 4) :: 2], 2, axis=1)], 1)
    ),
    "last eighth read from the start": _reads(
        lambda a: _from(a, slice(-(a.shape[1] // 8), None), slice(0, a.shape[1] // 8))
    ),
    "last half not read": _reads(lambda a: a[:, : a.shape[1] // 2]),
    "32 elements dropped, those of one warp": _reads(lambda a: _tile(a, 0)),
    "32 elements twice, those of one warp": _reads(lambda a: _tile(a, 2)),
    "last element of each block of 256 dropped": _reads(_blocks),
    # terms at places that nothing foretells
    "two terms dropped, far apart": _reads(lambda a: _without(a, [a.shape[1] // 7, a.shape[1] // 7 * 5])),
    "another term dropped in each channel": _reads(
        lambda a: _put(a, (np.arange(len(a)), np.arange(len(a)) % a.shape[1]), 0)
    ),
    "last term dropped in every second channel": _reads(lambda a: _put(a, (slice(None, None, 2), -1), 0)),
    "last term dropped in one channel": _reads(lambda a: _put(a, (len(a) // 2, -1), 0)),
    "9 terms twice, from an odd place on": _reads(lambda a: _twice(a, _run(a.shape[1] // 5 * 2 + 3, 9))),
    "last term from the next channel": _reads(lambda a: _put(a, (slice(None), -1), np.roll(a[:, 0], -1))),
    "last block of 1024 twice": _reads(lambda a: np.concatenate([a, a[:, -(a.shape[1] % 1024 or 1024) :]], axis=1)),
    "every 32nd block of 1024 skipped": _reads(_skipped),
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
    "x of pairs exchanged in dscale": _after(x__of__dscale=_in_pairs),
    "dy of the last element from beside it": _reads(lambda a: _from(a, -1, -2), "dbias"),
    # channels
    "statistics of two channels swapped": _each(lambda v, r: _put(v, [0, 1], v[[1, 0]]), "mean", "inverse"),
    "last channel has its neighbour's mean": _after(mean=lambda v, r: _put(v, -1, v[-2])),
    "last channel has its neighbour's inverse": _each(lambda v, r: _put(v, -1, v[-2]), "inverse", "given"),
    "last channel has its neighbour's dscale and dbias": _each(lambda v, r: _put(v, -1, v[-2]), "dscale", "dbias"),
    "dscale and dbias of two channels averaged": _each(_averaged, "dscale", "dbias"),
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
    "averages over m less a block": _each(_less_a_block, "mean", "centre", "slope"),
    "inverse by one step of Newton's": _after(of__variance=_one_step),
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
    "running variance about the old mean": _after(
        stored__running_variance=lambda v, r: (
            v + f32(r.problem.factor) * (r.x.mean(axis=1, keepdims=True) - r.parameters["mean"]) ** 2
        )
    ),
    "running mean of the neighbouring channel": _after(stored__running_mean=lambda v, r: np.roll(v, 1, axis=0)),
    # epsilon
    "epsilon missing from the saved inverse": _after(
        stored__saved_inv_variance=lambda v, r: _one / np.sqrt(_one / (v * v) - f32(r.problem.epsilon))
    ),
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
    "warps added up in float16": Kernel(total=_in_16_bits),
    "terms in tf32": _reads(stores.tf32),
    "partial sums in fixed point": Kernel(total=_fixed),
    "mean through bfloat16": _after(mean=_through(bf16)),
    "mean through float16": _after(mean=_through(np.float16)),
    "variance through bfloat16": _after(variance=_through(bf16)),
    "inverse through float16": _after(inverse=_through(np.float16)),
    **{f"rsqrt off by {by}": _after(inverse=lambda v, r, by=by: v * f32(1 + float(by))) for by in _OFF},
    "1/m off by 1e-4": _each(lambda v, r: v * f32(1 + 1e-4), "mean", "centre"),
    "results through bfloat16": _each(_through(bf16), "y", "dx"),
    "results of 17 bits": _each(_of_17_bits, "y", "dx"),
    "last quarter of the results 5e-6 too large": _each(_last_quarter, "y", "dx"),
    "sums of dx alone through bfloat16": _each(_through(bf16), "centre", "slope"),
    "dscale and dbias through bfloat16": _each(_through(bf16), "dscale", "dbias"),
    "saved mean through float16": _after(stored__saved_mean=_through(np.float16)),
    "saved inverse through bfloat16": _after(stored__saved_inv_variance=_through(bf16)),
    # backward
    "dx without mean(dy)": _after(centre=lambda v, r: v * 0),
    "dx without projection": _after(slope=lambda v, r: v * 0),
    "dx with sums not divided by m": _after(slope=lambda v, r: v * _m(r)),
    "dx with m - 1": _each(lambda v, r: v * _m(r) / (_m(r) - _one), "slope", "centre"),
    "dscale of y in place of x-hat": _after(
        x__of__dscale=lambda a, r: a * r.parameters["scale"] + r.parameters["bias"] if r.problem.composed == "" else a
    ),
    "dx with the projection added": _after(slope=lambda v, r: -v),
    "dx with the neighbour's projection": _after(slope=lambda v, r: np.roll(v, 1, axis=0)),
    "dx without the scale": _after(dx=lambda v, r: v / r.parameters["scale"]),
    "dscale without the inverse": _after(dscale=lambda v, r: v / (_one / r.x.std(axis=1, keepdims=True))),
    "dscale with the wrong sign": _after(dscale=lambda v, r: -v),
    "dbias with the wrong sign": _after(dbias=lambda v, r: -v),
    "saved statistics recomputed": Kernel(after={"recomputes": lambda v, r: v}),
    # operations that are composed
    "gradient of the other pass": Kernel(after={"other gradient": lambda v, r: v}),
    "given statistics shifted by one channel": _after(given=lambda v, r: np.roll(v, 1, axis=0)),
    "variance taken for its inverse root": _after(given=lambda v, r: _one / (v * v) - f32(r.problem.epsilon)),
    "sums averaged": _each(lambda v, r: v / _m(r), "total", "moment"),
    "sum_dy_xmu times the inverse": _after(moment=lambda v, r: v * r.parameters["saved_inv_variance"]),
    "sum_dy_xmu without the mean": _after(
        x__of__dscale=lambda a, r: a + r.parameters["saved_mean"] if r.problem.composed == "backward_reduce" else a
    ),
    "own count in place of all ranks'": _after(count=lambda n, r: _own_count(r)),
    "sums taken for averages": _after(count=lambda n, r: 1),
    "own sums in place of all ranks'": _after(
        sums=lambda v, r: (pairwise(r.dy), pairwise(r.dy * (r.x - r.parameters["saved_mean"])))
    ),
    "sums of dy and dy x swapped": _after(sums=lambda v, r: v[::-1]),
    "inverse once where its square is right": _after(second=lambda v, r: v * 0 + _one),
    "each rank counted alike": _after(counts=lambda c, r: c * 0 + c.mean().round()),
    "first rank's count for all": _after(counts=lambda c, r: c * 0 + c[:1]),
    "variance between the ranks left out": _after(between=lambda v, r: v * 0),
    "variance within the ranks left out": _after(within=lambda v, r: v * 0),
    # activations
    "ReLU with a slope": _after(activation=_sloped),
    "upper limit a number too high": _after(high=lambda v, r: np.nextafter(v, f32(np.inf))),
    "upper limit a number too low": _after(high=lambda v, r: np.nextafter(v, f32(0))),
    "upper limit ignored": _after(high=lambda v, r: f32(np.inf)),
    "lower limit taken for 0": _after(low=lambda v, r: f32(0)),
    "activation before the residual": _after(activation=_early),
    "residual left out": _after(residual=lambda v, r: v * 0),
    "residual twice": _after(residual=lambda v, r: v * 2),
    "residual of the last four left out": _after(residual=lambda v, r: _without(v, slice(-4, None))),
    "mask from x": _after(mask=lambda v, r: r.x > 0),
    "mask from before the residual": _after(mask=_before_residual),
    "mask with the lower limit": _after(mask=lambda v, r: _passing(v, r) | (v == f32(_limits(r)[0]))),
    "mask without the upper limit": _after(mask=lambda v, r: v > f32(_limits(r)[0])),
    "mask that ends below the upper limit": _after(mask=lambda v, r: _passing(v, r) & (v < f32(_limits(r)[1]))),
    "mask of the neighbour": _after(mask=lambda v, r: np.roll(_passing(v, r), 1, axis=1)),
    "mask of the last four true": _after(mask=lambda v, r: _put(_passing(v, r), (slice(None), slice(-4, None)), True)),
    "mask ignored": _after(mask=lambda v, r: np.ones(v.shape, bool)),
    "sums of the whole gradient": _after(dy__of__sums=lambda v, r: r.dy),
    "gradient of the residual not masked": _after(dz=lambda v, r: r.dy),
    "gradient of the residual is dx": _after(
        dz=lambda v, r: v * r.parameters["scale"] * r.parameters["saved_inv_variance"]
    ),
    # ranks
    "unbiased by one rank's count": _after(unbiased=lambda v, r: v * _own_bessel(r)),
    "sum of dy of each rank's own": _after(used=lambda v, r: _of_own(v, r, 0)),
    "sum of dy x of each rank's own": _after(used=lambda v, r: _of_own(v, r, 1)),
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
    "last element not written": _each(lambda v, r: _put(v, (-1, -1), np.nan)),
    "last element of each channel 0": _each(lambda v, r: _put(v, (slice(None), -1), 0)),
    "an element from beside it": _each(lambda v, r: _from(v, v.shape[1] // 3, v.shape[1] // 3 + 1)),
    "two neighbours swapped in the result": _each(lambda v, r: _swapped(v, 5, 6)),
    "last element from the channel before": _each(lambda v, r: _put(v, (-1, -1), v[-2, -1])),
    "result shifted by one element": _each(lambda v, r: np.roll(v, 1, axis=1)),
    "one element infinite": _each(lambda v, r: _put(v, (0, 7), np.inf)),
    "results clamped at 1": _after(
        stored__y=lambda v, r: np.clip(v, -1, 1), stored__dx=lambda v, r: np.clip(v, f32(-0.1), f32(0.1))
    ),
    "negative results 0": _each(lambda v, r: np.maximum(v, 0)),
    "saved statistics of two channels swapped": _each(
        lambda v, r: _put(v, [0, 1], v[[1, 0]]), "stored saved_mean", "stored running_variance"
    ),
    # 16-bit stores
    "16-bit results truncated": Kernel(store=stores.toward_zero),
    "16-bit results rounded away from zero": Kernel(store=stores.away_from_zero),
    "16-bit results rounded upward": Kernel(store=stores.upward),
    "16-bit results through the other 16-bit type": Kernel(store=stores.through_other),
    "last bit of 16-bit results lost": Kernel(store=stores.low_half),
    "16-bit results rounded twice": Kernel(store=stores.twice_rounded),
    "last eighth of 16-bit results rounded by chance": Kernel(store=stores.by_chance),
    "halves of packed 16-bit results swapped": Kernel(store=stores.every_other),
    # blending
    "alpha ignored": _after(alpha=lambda a, r: f32(1)),
    "beta ignored": _after(beta=lambda a, r: f32(0)),
    "alpha twice": _after(alpha=lambda a, r: a * a),
    "alpha and beta swapped": _after(
        alpha=lambda a, r: f32(r.problem.beta or r.problem.alpha),
        beta=lambda b, r: f32(r.problem.alpha if r.problem.beta else 0),
    ),
    "prior of the neighbour": _after(prior=lambda v, r: np.roll(v, 1, axis=1)),
}
"""What goes wrong in kernels, each a change of one step."""
