"""What the tests of CANN's and DirectML's calls share: a run on the handle's device, and bounds as in check/bounds.

Bounds are for class A, centred sums of blocked or pairwise depth; `U` is the unit roundoff of float32, in which every
backend computes float32 and 16-bit data.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from operation_bench import coarse, gaps, worst

from pybnorm import reference
from pybnorm.check.judging import bounds
from pybnorm.enums import DataType
from pybnorm.errors import UnsupportedError

U = 2.0**-24
A = (
    9 * U
)  # relative error of a product or an inverse standard deviation, computed as a forward inference and stored in float32
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
_running = ["", "", ""]  # label, backend and dtype of the latest `perform`: where `hold` enters its ratio
_KINDS = {np.dtype(t): DataType[n] for t, n in zip(DTYPES.values(), ("FLOAT32", "FLOAT16", "BFLOAT16"), strict=True)}


def upload(bench, array):
    """The array on the handle's device."""
    return bench.device.from_numpy(array)


def perform(bench, label, call, query, *arguments, written, **options):
    """``call(handle, *arguments)`` with exactly the workspace that `query` names; results are copied into `written`.

    Nothing else may change: other arrays, what lies between the elements of strided ones, the bytes around the
    workspace; nor any array at all if the backend refuses the dtype; for that the test is skipped with the reason.
    `label` is the name in the table of worst ratios, for what `hold` judges next.
    """
    arrays = [a for a in [*arguments, *options.values()] if isinstance(a, np.ndarray)]
    _running[:] = label, bench.handle.backend, _KINDS[arrays[0].dtype].short
    buffers = {id(a): upload(bench, a) for a in arrays}

    def there(value):
        return buffers[id(value)] if isinstance(value, np.ndarray) else value

    args = [there(a) for a in arguments]
    opts = {name: there(o) for name, o in options.items()}
    try:
        nbytes = query(bench.handle, *args, **opts)
    except UnsupportedError as error:
        assert error.text
        if all(a.dtype == np.float32 for a in arrays):
            raise
        memory, address = bench.memory(1 << 20)
        with pytest.raises(UnsupportedError):
            call(bench.handle, *args, **opts, workspace=(address, 1 << 20))
        for a in arrays:
            same(bench.device.to_numpy(buffers[id(a)]), a)
        assert bench.intact(memory, address, 0)
        pytest.skip(f"{bench.handle.backend}: {error.text}")
    memory, address = bench.memory(nbytes)
    call(bench.handle, *args, **opts, workspace=(address, nbytes))
    assert bench.intact(memory, address, nbytes), "wrote outside its workspace"
    for a in arrays:
        back = bench.device.to_numpy(buffers[id(a)])
        if any(a is w for w in written):
            assert a.size == 0 or gaps(back) == gaps(a), "wrote between the elements"
            a[...] = back
        else:
            same(back, a)
    return nbytes


def same(got, want):
    """Bit-equal, NaN included."""
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def fresh(like):
    """An output full of poison, in the same memory order, gaps included."""
    if like.base is not None and not like.flags.forc:
        return laid_out(np.full(like.shape, np.nan, like.dtype), "gaps")
    return np.full_like(like, np.nan)


def laid_out(array, order):
    """The same values in another memory order: "C", "last" (axis 1 innermost) or "gaps"."""
    if order == "last" and array.ndim > 1:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    if order == "gaps":
        roomy = np.full([d + 1 for d in array.shape], 7, array.dtype)
        view = roomy[tuple(slice(0, d) for d in array.shape)]
        view[...] = array
        return view
    return np.ascontiguousarray(array)


def kept(*shapes):
    """The axes in which any of the shapes has parameters."""
    return tuple(a for a, sizes in enumerate(zip(*shapes, strict=True)) if any(s != 1 for s in sizes))


def wide(*arrays):
    """float64 copies."""
    found = [np.asarray(a).astype(np.float64) for a in arrays]
    return found[0] if len(found) == 1 else found


def hold(got, want, error, *, prior=None, beta=0.0, relu=False, name=""):
    """Every element within `error` of `want` once stored in the dtype of `got`.

    With `relu` of max(want, 0), which is 1-Lipschitz, so the bound carries over; and 0 where want is surely negative.
    """
    limits = bounds.precision(_KINDS[got.dtype])
    want, bound = bounds.stored(
        np.broadcast_to(error, got.shape), wide(want), 1.0, beta, prior, U, limits.u_out, limits.tiny_out
    )
    if _running[1] == "miopen":
        bound = bound + coarse(_KINDS[got.dtype], want, bound, prior, {"beta": beta})
    values = wide(got).reshape(want.shape)
    if relu:
        off = want < -bound
        assert off.any(), "relu has nothing to do"
        assert (want > bound).any(), "relu leaves nothing"
        assert not values[off].any(), f"{name}: not 0 where the input of relu is negative"
        want = np.maximum(want, 0)
    assert np.isfinite(values).all(), values
    ratio = np.abs(values - want) / bound
    highest = float(ratio.max(initial=0.0))
    assert highest <= 1, f"{name}: error / bound {highest:.3g} at {np.unravel_index(ratio.argmax(), ratio.shape)}"
    if any(_running):
        key = tuple(_running)
        worst[key] = max(worst[key], highest)


def over(terms, derived):
    """Sums over the axes in which `derived` has length 1."""
    axes = tuple(a for a, d in enumerate(derived) if d == 1)
    return terms.sum(axis=axes, keepdims=True)


def sums_errors(x, dy, mean, derived):
    """(m, h, error of sum(dy), error of sum(dy * (x - mean)))."""
    x, dy, mean = wide(x, dy, mean)
    m = x.size // int(np.prod(derived))
    h = bounds.depth(m)
    return m, h * U * over(np.abs(dy), derived), (h + 4) * U * over(np.abs(dy) * np.abs(x - mean), derived)


def batch(x, derived, epsilon):
    """Statistics of x (`reference.stats`) and how far class A may be off: mean, variance, 1/sigma."""
    found = reference.stats(x, epsilon=epsilon, axis=kept(derived))
    x = wide(x)
    m = x.size // int(np.prod(derived))
    moments = bounds.Moments(
        found.mean, found.variance, over(np.abs(x), derived) / m, over(x * x, derived) / m, found.inv_variance
    )
    return found, bounds.deviations(moments, epsilon, U, bounds.Tier("A", False, bounds.depth(m)))


def subsets(rank):
    """Every set of kept axes."""
    return [s for n in range(rank + 1) for s in itertools.combinations(range(rank), n)]
