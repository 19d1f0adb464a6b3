"""native on a CPU: the same bits on any number of threads, and right where sums in float32 about 0 are not."""

import hashlib
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import pybnorm
from pybnorm import operations

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def arrays(seed):
    """A drawn problem: x and dy of any layout, gaps and axes' lengths of 1 among them, and the parameters."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 4]
    rank = int(rng.integers(2, 6))
    dims = [int(rng.choice([1, 2, 3, 7, 16, 31, 64, 130])) for _ in range(rank)]
    dims[int(rng.integers(rank))] = int(rng.choice([1, 5, 257, 1200]))
    while np.prod(dims) > 400_000:
        dims[int(np.argmax(dims))] //= 2
    if np.prod(dims) // dims[1] < 2:
        dims[0] = 2
    order = rng.permutation(rank) if rng.random() < 0.5 else np.arange(rank)
    gap = int(rng.random() < 0.3)

    def data(mean):
        memory = np.zeros([dims[a] + gap for a in order], dtype)
        view = memory[tuple(slice(0, dims[a]) for a in order)].transpose(np.argsort(order))
        view[...] = (rng.normal(mean, 1, dims)).astype(dtype)
        return view

    mean = float(rng.choice([0, 3, 100])) if dtype in (np.float32, np.float64) else 1.0
    kept = np.float64 if dtype == np.float64 else np.float32
    return data(mean), data(0), *(rng.normal(1, 0.3, dims[1]).astype(kept) for _ in range(2))


def computed(handle, x, dy, scale, bias):
    """All results of training and of its backward."""
    y, dx = (np.lib.stride_tricks.as_strided(np.empty(span(x), x.dtype), x.shape, x.strides) for _ in range(2))
    mean, inverse, dscale, dbias = (np.empty_like(scale) for _ in range(4))
    handle.forward_training(x, scale, bias, y, saved_mean=mean, saved_inv_variance=inverse)
    handle.backward(x, dy, scale, dx, dscale, dbias, saved_mean=mean, saved_inv_variance=inverse)
    return y, mean, inverse, dx, dscale, dbias


def span(x):
    return sum((d - 1) * s for d, s in zip(x.shape, x.strides, strict=True)) // x.itemsize + 1


def digest(seeds):
    found = hashlib.sha256()
    with pybnorm.Handle("native") as handle:
        for seed in seeds:
            for result in computed(handle, *arrays(seed)):
                found.update(np.ascontiguousarray(result).tobytes())
    return found.hexdigest()


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_threads():
    here = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_native; print(test_native.digest(range(60)))"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": str(threads)}, text=True, check=True,
            capture_output=True,
        ).stdout
        for threads in (1, 2, 3, 5)
    }  # fmt: skip
    assert len(told) == 1


def within_a_strict_bound(handle, name, x, dy, scale, bias):
    """16 + 4 log2(m) units in the last place of what is summed, and one rounding to the dtype."""
    y, mean, inverse, dx, dscale, dbias = computed(handle, x, dy, scale, bias)
    axes, wide = tuple(a for a in range(x.ndim) if a != 1), (1, -1, *(1,) * (x.ndim - 2))
    v, d, g, b = (a.astype(np.longdouble) for a in (x, dy, scale, bias))  # sums of float64 need more
    m = x.size // x.shape[1]
    unit = np.finfo(scale.dtype).eps * (16 + 4 * np.log2(m))
    store = max(float(ml_dtypes.finfo(x.dtype).eps), unit)
    centred = v - v.mean(axes, keepdims=True)
    variance = (centred**2).mean(axes)
    inv = 1 / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(mean, v.mean(axes), rtol=unit, atol=unit * np.sqrt(variance).max(), err_msg=name)
    np.testing.assert_allclose(inverse, inv, rtol=unit, err_msg=name)
    hat = centred * inv.reshape(wide)
    expected = hat * g.reshape(wide) + b.reshape(wide)
    np.testing.assert_allclose(y.astype(float), expected, rtol=store, atol=8 * unit, err_msg=name)
    # The gradient is of the saved statistics as they are stored.
    hat = (v - mean.astype(np.longdouble).reshape(wide)) * inverse.astype(np.longdouble).reshape(wide)
    sums, dots = d.sum(axes), (d * hat).sum(axes)
    sizes = np.abs(d).sum(axes), np.abs(d * hat).sum(axes)
    assert (abs(dbias - sums) <= unit * sizes[0]).all(), name
    assert (abs(dscale - dots) <= unit * sizes[1]).all(), name
    slope = (g * inverse.astype(float)).reshape(wide)
    gradient = slope * (d - (sums / m).reshape(wide) - hat * (dots / m).reshape(wide))
    atol = unit * abs(slope).max() * (1 + abs(hat).max()) * (abs(d).max() + 1)
    np.testing.assert_allclose(dx.astype(float), gradient, rtol=store, atol=atol, err_msg=name)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 160), marks=pytest.mark.slow)], ids=str)
def test_drawn_problems_are_within_a_strict_bound(seeds):
    with pybnorm.Handle("native") as handle:
        for seed in seeds:
            within_a_strict_bound(handle, str(seed), *arrays(seed))


@pytest.mark.parametrize("channel", [(1,), (2,), (3,), (3, 2), (5, 3, 4), (100,), (127,)], ids=str)
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_a_short_last_row_may_be_the_only_one_of_its_part(channel, more):
    """Images of few values are rows of 256 together, a part is 256 rows: some columns of the last part are empty."""
    rng = np.random.default_rng(5)
    images = 256 // int(np.prod(channel)) * 256 + more
    x, dy = (rng.normal(3, 1, (images, *channel)).astype(np.float32) for _ in range(2))
    with pybnorm.Handle("native") as handle:
        within_a_strict_bound(handle, "", x, dy, *(rng.normal(1, 0.3, channel[0]).astype(np.float32) for _ in range(2)))


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize(("mean", "deviation"), [(1e6, 1.0), (1e25, 3e24), (0.0, 1e-25), (-3e4, 1e-2)])
def test_neither_the_mean_nor_the_size_of_values_matters(layout, mean, deviation):
    shape = (6, 3, 40, 50) if layout == "rows" else (12_000, 3)
    x = (np.random.default_rng(3).normal(mean, deviation, shape)).astype(np.float32)
    y, scale, bias = np.empty_like(x), np.ones(3, np.float32), np.zeros(3, np.float32)
    with pybnorm.Handle("native") as handle:
        handle.forward_training(x, scale, bias, y, epsilon=0.0)
    axes = (0, 2, 3)[: x.ndim - 1]
    v = x.astype(np.float64)
    expected = (v - v.mean(axes, keepdims=True)) / v.std(axes, keepdims=True)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_first_values_far_from_the_others_do_not_matter(layout):
    """Sums are about a mean of the first values; where that is far off they are taken again."""
    shape = (1, 3, 1, 16_000) if layout == "rows" else (256, 96)
    x = (np.random.default_rng(4).normal(1000, 1e-3, shape)).astype(np.float32)
    x[(..., slice(256)) if layout == "rows" else slice(8)] = 0
    scale, inverse, mean = np.ones(shape[1], np.float32), np.empty(shape[1], np.float32), np.empty(shape[1], np.float32)
    with pybnorm.Handle("native") as handle:
        handle.forward_training(
            x, scale, scale, np.empty_like(x), epsilon=0.0, saved_mean=mean, saved_inv_variance=inverse
        )
    deviation = x.astype(np.float64).std((0, 2, 3)[: x.ndim - 1])
    np.testing.assert_allclose(inverse, 1 / deviation, rtol=6e-7)


def test_its_version_is_the_packages():
    assert ".".join(map(str, pybnorm.load("native").version)) == pybnorm.__version__


def test_what_ranks_contribute_is_computed_without_results():
    """Statistics and sums of a rank, and the gradient by all ranks' sums: none takes memory like x."""
    x, dy = (np.random.default_rng(s).normal(3, 1, (16, 70, 15, 15)).astype(np.float32) for s in (1, 2))
    mean, variance, total, moment, scale = (np.ones((1, 70, 1, 1), np.float32) for _ in range(5))
    sums = {"x": x, "dy": dy, "mean": mean, "inv_variance": variance, "sum_dy": total, "sum_dy_xmu": moment}
    calls = {
        "stats": ((x,), {"mean": mean, "inv_variance": variance}),
        "backward_reduce": ((), sums),
        "backward_elemt": ((), sums | {"scale": scale, "count": 16 * 225, "dx": np.empty_like(x)}),
    }
    with pybnorm.Handle("native") as handle:
        for name, (given, named) in calls.items():
            assert operations.workspace_size(handle, name, *given, **named) < x.nbytes / 8, name
            getattr(operations, name)(handle, *given, **named)
    wide, axes = x.astype(float), (0, 2, 3)
    right = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
    dx = dy - dy.mean(axes, keepdims=True) - right * (right * dy).mean(axes, keepdims=True)
    dx *= 1 / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
    assert np.abs(calls["backward_elemt"][1]["dx"] - dx).max() < 1e-5


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(8, 5, 7, 9), (64, 300), (3, 700, 1, 2), (20, 2, 60, 60)], ids=str)
def test_parameters_of_16_bits_give_what_float32_gives_rounded_once(dtype, shape):
    rng, c, found = np.random.default_rng(1), shape[1], []
    x, dy = (rng.normal(mean, 2, shape).astype(dtype) for mean in (1, 0.1))
    own = rng.uniform(0.5, 1.5, (4, c)).astype(dtype)
    saved = np.empty((2, c), np.float32)
    with pybnorm.Handle("native") as handle:
        for kind in (dtype, np.float32):
            scale, bias, mean, variance = own.astype(kind)
            running, (given, again, dscale, dbias) = np.stack((mean, variance)), np.full((4, c), 2).astype(kind)
            y, z, dx, last = (np.empty_like(x) for _ in range(4))
            pair = {"saved_mean": saved[0], "saved_inv_variance": saved[1]}
            running_pair = {"running_mean": running[0], "running_variance": running[1]}
            handle.forward_training(x, scale, bias, y, **running_pair, **pair)
            handle.forward_inference(x, scale, bias, mean, variance, z)
            handle.backward(x, dy, scale, dx, given, again, beta_param=0.5, **pair)
            name = np.dtype(kind).name
            plan = handle.plan_backward(x, saved=False, activation="relu", algorithm=None, parameters=name)
            plan(x, dy, scale, last, dscale, dbias, bias=bias)
            plan = handle.plan_backward(x, saved=False, running=True, parameters=name)
            frozen, *sums = np.empty_like(x), *np.empty((2, c), kind)
            plan(x, dy, scale, frozen, *sums, running_mean=mean, running_variance=variance)
            results = y, z, dx, last, running, given, again, dscale, dbias, frozen, *sums
            found.append([*(v.astype(dtype) for v in results), saved.copy()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_constant_statistics():
    x, dy, dx = np.float32([[[[1, np.inf, 3]]], [[[1, 2, 3]]], [[[0, 0, 0]]]])
    ones, *sums = np.ones((3, 1), np.float32)
    with pybnorm.Handle("native") as handle:
        plan = handle.plan_backward(x, saved=False, running=True, epsilon=0)
        plan(x, dy, ones, dx, *sums, running_mean=ones, running_variance=4 * ones)
        assert (*dx.flat, *sums[0], *sums[1]) == (0.5, 1, 1.5, np.inf, 6)  # dx whatever x is
        with pytest.raises(pybnorm.UnsupportedError, match="in place of saved ones"):
            handle.plan_backward(x, running=True)


def test_parameters_of_16_bits_are_refused_where_they_are_not_known(load_library):
    load_library("onednn")
    x, scale = np.ones((4, 3, 5), ml_dtypes.bfloat16), np.ones(3, ml_dtypes.bfloat16)
    with pybnorm.Handle("onednn") as handle, pytest.raises(pybnorm.UnsupportedError, match="OWN_PARAMETERS is not set"):
        handle.forward_training(x, scale, scale, np.empty_like(x))
    with pybnorm.Handle("native") as handle, pytest.raises(pybnorm.ArgumentTypeError, match="f32 or bf16 for bf16"):
        handle.plan_forward_training(x, parameters="f16")
    with pybnorm.Handle("native") as handle, pytest.raises(pybnorm.ArgumentTypeError, match=r"running_mean: .*bf16"):
        handle.forward_training(
            x, scale, scale, np.empty_like(x), running_mean=np.ones(3, np.float32), running_variance=scale
        )
