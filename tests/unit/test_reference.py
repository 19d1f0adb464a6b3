"""The judge judged: the reference against formulas written another way, in exact or extended arithmetic."""

import math
import tracemalloc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from pybnorm import reference
from pybnorm.enums import Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.reference import blocks as walk

MODES = list(Mode)
DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
SHAPES = [
    (7, 5),
    (5, 3, 4),
    (3, 4, 5, 6),
    (2, 3, 4, 3, 5),
    (3, 2, 2, 3, 2, 3),
    (2, 3, 2, 1, 2, 3, 2),
    (2, 3, 1, 2, 2, 2, 1, 3),
]
MEBIBYTE = 1 << 20
U64 = 2.0**-53


@pytest.fixture(params=["whole", "tiny", "odd"])
def blocks(request, monkeypatch):
    """Block sizes: the real ones, and such that small arrays are cut along every axis."""
    if request.param != "whole":
        block, kept, run = {"tiny": (8, 2, 4), "odd": (37, 5, 11)}[request.param]
        monkeypatch.setattr(walk, "BLOCK", block)
        monkeypatch.setattr(walk, "_KEPT", kept)
        monkeypatch.setattr(walk, "_RUN", run)
    return request.param


def reduced(rank, mode):
    return (0,) if mode == Mode.PER_ACTIVATION else (0, *range(2, rank))


def derived(shape, mode):
    axes = reduced(len(shape), mode)
    return tuple(1 if a in axes else d for a, d in enumerate(shape))


def count(shape, mode):
    return math.prod(shape[a] for a in reduced(len(shape), mode))


def laid_out(values, layout):
    """The same values with other strides."""
    rank = values.ndim
    if layout == "channels_first":
        return np.ascontiguousarray(values)
    if layout == "channels_last":
        order = [0, *range(2, rank), 1]
    elif layout == "reversed":
        order = list(reversed(range(rank)))
    elif layout == "batch_inside":  # C, N, spatial
        order = [1, 0, *range(2, rank)]
    elif layout == "gaps":
        big = np.full([2 * d + 1 for d in values.shape], np.nan).astype(values.dtype)
        view = big[tuple(slice(1, None, 2) for _ in values.shape)]
        view[...] = values
        return view
    elif layout == "backwards":
        flip = tuple(slice(None, None, -1) for _ in values.shape)
        return np.ascontiguousarray(values[flip])[flip]
    inverse = sorted(range(rank), key=order.__getitem__)
    return np.ascontiguousarray(values.transpose(order)).transpose(inverse)


LAYOUTS = ["channels_first", "channels_last", "reversed", "batch_inside", "gaps", "backwards"]


def random(shape, dtype=np.float64, seed=0, scale=1.0, offset=0.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale + offset).astype(dtype)


class Naive:
    """Batch norm statistic by statistic in ``np.longdouble``; arrays of shape (m, statistics)."""

    def __init__(self, x, mode, epsilon):
        self.shape, self.mode, self.epsilon = x.shape, mode, np.longdouble(epsilon)
        self.axes = reduced(x.ndim, mode)
        self.x = self.flat(x)
        self.m = self.x.shape[0]
        self.mean = self.x.sum(axis=0) / self.m
        self.variance = ((self.x - self.mean) ** 2).sum(axis=0) / self.m
        self.inv = 1 / np.sqrt(self.variance + self.epsilon)

    def flat(self, values):
        kept = [a for a in range(len(self.shape)) if a not in self.axes]
        wide = np.asarray(values).astype(np.float64).astype(np.longdouble)
        return wide.transpose([*self.axes, *kept]).reshape(-1, math.prod(self.shape[a] for a in kept))

    def parameter(self, values):
        return np.asarray(values).astype(np.float64).astype(np.longdouble).reshape(-1)

    def forward(self, scale, bias):
        return (self.x - self.mean) * self.inv * self.parameter(scale) + self.parameter(bias)

    def backward(self, dy, scale, mean=None, inv=None):
        mean, inv = (self.mean, self.inv) if mean is None else (self.parameter(mean), self.parameter(inv))
        dy, x_hat = self.flat(dy), (self.x - mean) * inv
        dbias, dscale = dy.sum(axis=0), (dy * x_hat).sum(axis=0)
        return self.parameter(scale) * inv * (dy - dbias / self.m - x_hat * dscale / self.m), dscale, dbias


def close(got, expected, magnitude=1.0, units=40):
    """Within some float64 units of the magnitude of the terms."""
    expected = np.asarray(expected, dtype=np.longdouble).reshape(np.shape(got))
    error = np.abs(np.asarray(got, dtype=np.longdouble) - expected)
    bound = units * U64 * np.maximum(np.abs(expected), magnitude)
    assert np.all(error <= bound), f"error {np.max(error / bound) * units} units"


# ---------------------------------------------------------------- against the naive formula


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"rank{len(s)}")
def test_every_mode_rank_and_layout(shape, mode, layout, blocks):
    dtype = DTYPES[len(shape) % 4]
    x = laid_out(random(shape, dtype, 1, scale=3, offset=2), layout)
    dy = laid_out(random(shape, dtype, 2), LAYOUTS[LAYOUTS.index(layout) - 1])  # another layout than x's
    scale, bias = random(derived(shape, mode), np.float32, 3), random(derived(shape, mode), np.float32, 4)
    mean, variance = random(derived(shape, mode), np.float32, 5), random(derived(shape, mode), np.float32, 6) ** 2
    if mode == Mode.SPATIAL_PERSISTENT:  # without their axes of length 1, and with gaps
        scale, bias, mean, variance = (np.repeat(a.ravel(), 2)[::2] for a in (scale, bias, mean, variance))
    naive = Naive(x, mode, 1e-3)

    got = reference.forward_training(x, scale, bias, mode=mode, epsilon=1e-3)
    close(got.saved_mean.ravel(), naive.mean, 5)
    close(got.variance.ravel(), naive.variance, 10)
    close(got.saved_inv_variance.ravel(), naive.inv)
    close(naive.flat(got.y), naive.forward(scale, bias), 5 * np.max(naive.inv))
    assert got.running_mean is None
    assert got.running_variance is None
    assert got.saved_mean.shape == got.saved_inv_variance.shape == got.variance.shape == derived(shape, mode)
    assert {a.dtype for a in got if a is not None} == {np.dtype(np.float64)}

    close(
        naive.flat(reference.forward_inference(x, scale, bias, mean, variance, mode=mode, epsilon=1e-3).y),
        (naive.x - naive.parameter(mean)) / np.sqrt(naive.parameter(variance) + naive.epsilon) * naive.parameter(scale)
        + naive.parameter(bias),
        300,
    )

    for saved in ({}, {"saved_mean": mean, "saved_inv_variance": variance}):  # in which epsilon plays no part
        gradients = reference.backward(x, dy, scale, mode=mode, epsilon=1e-3, **saved)
        magnitude = 1000 if saved else 10 * max(1, np.max(naive.inv) ** 2)
        for value, expected in zip(gradients, naive.backward(dy, scale, *saved.values()), strict=True):
            value = naive.flat(value) if value.shape == shape else value.ravel()
            close(value, expected, magnitude, units=200)


@pytest.mark.parametrize("mode", MODES)
def test_exact_data_give_exact_results(mode, blocks):
    """Of which no float64 sum or quotient is rounded: m is a power of 2, the variance 1/4, its inverse 1."""
    shape, small = (8, 3, 4, 2), derived((8, 3, 4, 2), mode)
    mean, scale, bias = (np.random.default_rng(i).integers(-8, 8, small) / 4 for i in range(3))
    dy, half = random(shape).round(), np.resize([0.5, -0.5], (8, 1, 1, 1)) + np.zeros(shape)
    x, axes, m = mean + half, reduced(4, mode), count(shape, mode)
    got = reference.forward_training(x, scale, bias, mode=mode, epsilon=0.75)
    np.testing.assert_array_equal(got.y, scale * half + bias)
    np.testing.assert_array_equal(got.saved_mean, mean)
    assert (np.unique(got.variance), np.unique(got.saved_inv_variance)) == (0.25, 1.0)
    dbias, dscale = (terms.sum(axis=axes, keepdims=True) for terms in (dy, dy * half))
    exact = scale * (dy - dbias / m - half * dscale / m), dscale, dbias
    for value, right in zip(reference.backward(x, dy, scale, mode=mode, epsilon=0.75), exact, strict=True):
        np.testing.assert_array_equal(value, right)


# ---------------------------------------------------------------- numerics


def exact_moments(values):
    exact = [Fraction(float(v)) for v in values]
    mean = sum(exact) / len(exact)
    return mean, sum((v - mean) ** 2 for v in exact) / len(exact)


@pytest.mark.parametrize(
    "column",
    [
        random(3001, scale=1e-3, offset=1e7),
        random(3001, scale=1, offset=1e12),
        np.concatenate([[1e15], random(3000)]),  # the pivot is the outlier
        np.concatenate([random(3000), [-1e15]]),
        random(3001, scale=1e-150),
        random(3001, scale=1e120),
    ],
    ids=["kappa 1e10", "kappa 1e12", "outlier first", "outlier last", "small", "large"],
)
def test_hard_float64_columns(column, blocks):
    mean, variance = exact_moments(column)
    for x in (column.reshape(-1, 1), column.reshape(1, 1, -1)):
        got = reference.forward_training(x, np.ones(1), np.ones(1))
        allowed = 2 * U64 * abs(mean) + U64 * Fraction(float(np.mean(np.abs(column - float(mean)))))
        assert abs(Fraction(got.saved_mean.item()) - mean) <= allowed
        assert abs(Fraction(got.variance.item()) - variance) <= 64 * U64 * variance


def test_sums_over_many_blocks_are_compensated(monkeypatch):
    """With blocks of one element a plain running sum of 0.1 would be off by 1e-13 relative."""
    monkeypatch.setattr(walk, "BLOCK", 1)
    x = np.full((2_000, 1), 0.1)
    (total,) = reference.reduce_blocks(lambda v: v, (x,), Mode.SPATIAL)
    exact = 2_000 * Fraction(0.1)
    assert abs(Fraction(total.item()) - exact) <= U64 * exact


@pytest.mark.parametrize("value", [0.1, 100.0, 1e10, -1 / 3, 1e-30, 5e-324])
@pytest.mark.parametrize("mode", MODES)
def test_constant_channels_have_variance_zero(value, mode, blocks):
    x = np.full((7, 3, 11), value)
    got = reference.forward_training(x, np.ones(derived(x.shape, mode)), np.zeros(derived(x.shape, mode)), mode=mode)
    assert np.all(got.variance == 0.0)
    assert np.all(got.saved_mean == value)
    assert np.all(got.y == 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_zero_variance_with_zero_epsilon_is_ieee_and_silent(mode, blocks):
    x = np.full((4, 2, 3), 2.5)
    x[:, 1] = random((4, 3))
    shape = derived(x.shape, mode)
    got = reference.forward_training(x, np.ones(shape), np.zeros(shape), mode=mode, epsilon=0)  # a warning is an error
    assert np.all(got.saved_inv_variance[:, 0] == np.inf)
    assert np.all(np.isnan(got.y[:, 0]))  # 0 * inf
    assert np.all(np.isfinite(got.y[:, 1]))
    assert np.all(np.isfinite(got.saved_inv_variance[:, 1]))
    gradients = reference.backward(x, np.ones_like(x), np.ones(shape), mode=mode, epsilon=0)
    assert np.all(np.isnan(gradients.dx[:, 0]))
    assert np.all(np.isfinite(gradients.dx[:, 1]))
    assert np.all(gradients.dbias == count(x.shape, mode))
    inferred = reference.forward_inference(
        x, np.ones(shape), np.zeros(shape), np.ones(shape), np.zeros(shape), mode=mode, epsilon=0
    )
    assert np.all(inferred.y[:, 0] == np.inf)  # 1.5 / 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_inf_stay_in_their_statistic(mode, layout, value, blocks):
    shape = (5, 4, 3, 2)
    clean, dy = random(shape, seed=1), random(shape, seed=2)
    ones = np.ones(derived(shape, mode))
    dirty = clean.copy()
    dirty[0, 2, 1, 1] = dirty[3, 2, 1, 1] = value
    x, x0 = laid_out(dirty, layout), laid_out(clean, layout)
    got, got0 = (reference.forward_training(a, ones, ones, mode=mode) for a in (x, x0))
    grad, grad0 = (reference.backward(a, dy, ones, mode=mode) for a in (x, x0))
    touched = np.zeros(derived(shape, mode), bool)
    touched[(0, 2, 1, 1) if mode == Mode.PER_ACTIVATION else (0, 2, 0, 0)] = True
    np.testing.assert_array_equal(got.saved_mean[touched], [value])
    assert np.all(np.isnan(got.variance[touched]))
    everywhere = np.broadcast_to(touched, shape)
    assert np.all(np.isnan(got.y[everywhere]))
    assert np.all(np.isnan(grad.dx[everywhere]))
    for a, b in zip((*got, *grad), (*got0, *grad0), strict=True):
        if a is not None:
            mask = np.broadcast_to(touched, a.shape) & (a is not grad.dbias)
            np.testing.assert_array_equal(a[~mask], b[~mask])


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(np.float16, 0x7C01), (ml_dtypes.bfloat16, 0x7F81), (np.float32, 0x7F800001), (np.float64, 0x7FF0000000000001)],
)
def test_signalling_nan_is_a_nan_and_silent(dtype, bits):
    x, one = random((4, 3), dtype), np.ones(3)
    x.view(f"u{x.itemsize}")[1, 2] = bits
    assert np.isnan(reference.forward_training(x, one, one).saved_mean).tolist() == [[False, False, True]]
    assert np.isnan(reference.backward(x, x, one).dbias).tolist() == [[False, False, True]]
    for arrays, count in (((x, one, one, one, one), 1), ((np.ones((4, 3)), x[1], one, one, one), 4)):
        assert np.isnan(reference.forward_inference(*arrays).y).sum() == count
    assert sum(np.isnan(b.arrays[0]).sum() for b in reference.iterate_blocks((x,), Mode.SPATIAL)) == 1


def test_values_near_the_end_of_the_range_do_not_overflow_the_mean():
    with np.errstate(over="ignore"):  # of the squares, of which not each of NumPy's ways to sum them warns
        got = reference.forward_training(np.array([[1.7e308], [-1.7e308]]), np.ones(1), np.zeros(1))
    assert (got.saved_mean.item(), got.variance.item(), got.saved_inv_variance.item()) == (0.0, np.inf, 0.0)


# ---------------------------------------------------------------- blending


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (2.5, 0.0), (1.0, 1.0), (-0.5, 0.25), (0.0, 2.0), (0.0, 0.0)])
def test_blending(mode, alpha, beta, blocks):
    shape, small = (5, 4, 3), derived((5, 4, 3), mode)
    x, dy = random(shape, seed=1), random(shape, seed=2)
    scale, bias, mean = (random(small, seed=i) for i in (3, 4, 5))
    variance = random(small, seed=6) ** 2
    prior = laid_out(random(shape, np.float32, 7), "reversed")
    small_priors = [random(small, np.float32, 8), random(small, np.float32, 9)]
    if beta == 0:  # must not be read
        prior, *small_priors = (np.full_like(a, np.nan) for a in (prior, *small_priors))

    def results(of_data=(1.0, 0.0), of_parameters=(1.0, 0.0), prior=None, small_priors=(None, None)):
        p = {"mode": mode, "alpha": of_data[0], "beta": of_data[1]}
        q = p | {"alpha_param": of_parameters[0], "beta_param": of_parameters[1]}
        q |= {"prior_dx": prior, "prior_dscale": small_priors[0], "prior_dbias": small_priors[1]}
        return (
            reference.forward_training(x, scale, bias, prior=prior, **p).y,
            reference.forward_inference(x, scale, bias, mean, variance, prior=prior, **p).y,
            *reference.backward(x, dy, scale, **q),
        )

    of_data, of_parameters = (alpha, beta), (alpha - 3, 2 * beta)
    old, factors = (prior, prior, prior, *small_priors), [of_data] * 3 + [of_parameters] * 2
    for priors in ((prior, small_priors), ())[: 1 + (beta == 0)]:  # which may be left out
        blended = results(of_data, of_parameters, *priors)
        for got, result, before, (a, b) in zip(blended, results(), old, factors, strict=True):
            close(got, a * result + (b * before if b else 0.0), 10 * np.max(np.abs(result)))
            assert np.all(np.isfinite(got))


# ---------------------------------------------------------------- running statistics


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [0.0, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("unbiased", [True, False])
def test_running_statistics_in_both_conventions(mode, factor, unbiased, blocks):
    shape, small = (3, 4, 2), derived((3, 4, 2), mode)
    x = random(shape, seed=1, scale=3)
    old_mean, old_variance = random(small, np.float32, 2), random(small, np.float32, 3) ** 2
    naive, f = Naive(x, mode, 0), np.longdouble(factor)
    options = {"mode": mode, "exponential_average_factor": factor, "unbiased": unbiased}
    options |= {"running_mean": old_mean, "running_variance": old_variance}
    got = reference.forward_training(x, np.ones(small), np.zeros(small), **options)
    estimate = naive.variance * naive.m / (naive.m - 1) if unbiased else naive.variance
    close(got.running_mean.ravel(), (1 - f) * naive.parameter(old_mean) + f * naive.mean)
    close(got.running_variance.ravel(), (1 - f) * naive.parameter(old_variance) + f * estimate)
    close(got.variance.ravel(), naive.variance)  # the saved ones are biased in either convention


def test_one_element_per_statistic():
    for shape, mode in (((1, 3, 1, 1), Mode.SPATIAL), ((1, 3, 2, 2), Mode.PER_ACTIVATION), ((1, 3), Mode.SPATIAL)):
        x, ones = random(shape), np.ones(derived(shape, mode))
        with pytest.raises(ArgumentError, match=r"^x: .*two elements"):
            reference.forward_training(x, ones, ones, mode=mode, running_mean=ones, running_variance=ones)
        got = reference.forward_training(x, ones, 2 * ones, mode=mode)
        assert np.all(got.y == 2.0)
        assert np.all(got.variance == 0.0)
        np.testing.assert_array_equal(got.saved_mean.ravel(), x.ravel())
        assert np.all(reference.backward(x, x, ones, mode=mode).dx == 0.0)


def test_fresh_results_follow_the_layout_of_x():
    x = laid_out(random((4, 3, 5, 6), np.float32), "channels_last")
    got = reference.forward_training(x, np.ones(3), np.ones(3))
    assert np.argsort(got.y.strides).tolist() == np.argsort(x.strides).tolist()


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_round_to_is_to_nearest_even_once(dtype):
    """Around the midpoints of the type, where rounding twice goes wrong, and anywhere: no neighbour is nearer."""
    generator, unsigned = np.random.default_rng(1), np.dtype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):  # of NaN and inf, which are left out
        values = generator.integers(0, 2 ** (8 * dtype.itemsize), 3000).astype(unsigned).view(dtype).astype(np.float64)
        values += generator.choice([0.0, 0.5, 1.0, -0.5], 3000) * np.abs(values) * float(ml_dtypes.finfo(dtype).eps) / 2
        values *= 1 + generator.choice([0.0, 1.0, -1.0], 3000) * 2.0 ** generator.integers(-52, -20, 3000)
        values = np.concatenate([values, np.frombuffer(generator.bytes(8 * 3000))])
        values = np.append(values[np.isfinite(values)], [1e300, -3.4e38, 1 + 2.0**-8 + 2.0**-40, -(1 + 3 * 2.0**-8)])
        got = reference.round_to(values, dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    step = largest - float((np.array(largest, dtype).view(unsigned) - unsigned.type(1)).view(dtype))
    beyond = np.abs(values) >= largest + step / 2
    np.testing.assert_array_equal(got[beyond].astype(np.float64), np.copysign(np.inf, values[beyond]))
    got, values = got[~beyond], values[~beyond]
    np.testing.assert_array_equal(np.signbit(got.astype(np.float64)), np.signbit(values))
    for neighbour in (got.view(unsigned) + unsigned.type(1), got.view(unsigned) - unsigned.type(1)):
        wide = neighbour.view(dtype).astype(np.float64)
        there = np.isfinite(wide) & ((wide > 0) == (got.astype(np.float64) > 0))
        own, other = (
            np.abs(a[there] - values[there]) for a in (got.astype(np.float64), wide)
        )  # exact, as they are near
        even = got.view(unsigned)[there] % 2 == 0
        assert ((own < other) | ((own == other) & even)).all()
    assert np.isnan(reference.round_to(np.array([np.nan]), dtype).astype(np.float64)).all()
    with pytest.raises(ArgumentTypeError, match="int32"):
        reference.round_to(values, np.int32)


# ---------------------------------------------------------------- memory

HALF = np.dtype(np.float16)
LARGE = 1_000_000
NASTY = [
    ((1, 1, 1000, 1000), "channels_first", Mode.SPATIAL),
    ((LARGE, 1), "channels_first", Mode.SPATIAL),
    ((2, LARGE // 12, 2, 3), "channels_last", Mode.SPATIAL),
    ((1, LARGE), "channels_first", Mode.SPATIAL),
    ((3, 2, LARGE // 6), "reversed", Mode.PER_ACTIVATION),
    ((LARGE // 2, 2), "channels_first", Mode.PER_ACTIVATION),
    ((3, 500, 2, 400), "batch_inside", Mode.PER_ACTIVATION),
    ((4, 15, LARGE // 60), "gaps", Mode.SPATIAL),
]


@pytest.mark.parametrize(("shape", "layout", "mode"), NASTY, ids=str)
def test_extra_memory_is_bounded(shape, layout, mode):
    """Nothing but the results stays."""
    x = laid_out((np.arange(math.prod(shape), dtype=np.uint16) & 0x3FFF).view(HALF).reshape(shape), layout)
    p = np.ones(derived(shape, mode), HALF)
    running = {"running_mean": p, "running_variance": p} if count(shape, mode) > 1 else {}
    tracemalloc.start()
    try:
        for call in (
            lambda: reference.forward_training(x, p, p, mode=mode, beta=1, prior=x, **running),
            lambda: reference.forward_inference(x, p, p, p, p, mode=mode),
            lambda: reference.backward(x, x, p, mode=mode),
        ):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            results = call()
            extra = tracemalloc.get_traced_memory()[1] - before - sum(a.nbytes for a in results if a is not None)
            # The promise is 128 MiB for any input; a block walk needs a small part of it, and a float64 copy
            # of an array of this size more than this.
            assert extra < 16 * MEBIBYTE, f"{extra / MEBIBYTE:.0f} MiB"
            del results
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- the walk


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_blocks_visit_every_element_once_with_its_parameters(data):
    rank = data.draw(st.integers(2, 6))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank), label="shape"))
    mode = data.draw(st.sampled_from(MODES), label="mode")
    order = data.draw(st.permutations(range(rank)), label="order")
    x = np.arange(1.0, 1 + math.prod(shape)).reshape([shape[a] for a in order]).transpose(np.argsort(order))
    other = np.ascontiguousarray(-x).astype(np.float32)
    p = np.arange(float(math.prod(derived(shape, mode)))).reshape(derived(shape, mode))
    seen, reach = np.zeros(shape), np.full(shape, -1.0)
    with pytest.MonkeyPatch.context() as patch:
        block_size = data.draw(st.integers(1, 100), label="block")
        patch.setattr(walk, "BLOCK", block_size)
        patch.setattr(walk, "_KEPT", data.draw(st.integers(1, 20), label="kept"))
        patch.setattr(walk, "_RUN", data.draw(st.integers(1, 40), label="run"))
        for block in reference.iterate_blocks((x, other), mode, (p,)):
            (a, b), (q,) = block.arrays, block.parameters
            assert a.shape == b.shape == x[block.index].shape
            assert a.size <= block_size
            assert a.dtype == b.dtype == q.dtype == np.float64
            np.testing.assert_array_equal(a, x[block.index])
            np.testing.assert_array_equal(b, -a)
            np.testing.assert_array_equal(
                np.broadcast_to(q, a.shape), np.broadcast_to(p[block.parameter_index], a.shape)
            )
            seen[block.index] += 1
            reach[block.index] = q
            a[...] = b[...] = 0.0  # ours to overwrite
        sums = reference.reduce_blocks(lambda v, w, q: (v, w * q), (x, other), mode, (p,))
    assert np.all(seen == 1)
    np.testing.assert_array_equal(reach, np.broadcast_to(p, shape))
    axes = reduced(rank, mode)
    np.testing.assert_array_equal(sums[0], x.sum(axis=axes, keepdims=True))  # integers: exact in any order
    np.testing.assert_array_equal(sums[1], (-x * p).sum(axis=axes, keepdims=True))
    np.testing.assert_array_equal(np.sort(x, axis=None), np.arange(1.0, 1 + x.size))  # x has not been written


@pytest.mark.parametrize(
    ("layout", "extents"),
    [
        ("channels_first", (1, 2, 8, 8)),
        ("channels_last", (1, 8, 2, 8)),
        ("batch_inside", (2, 1, 8, 8)),
        ("reversed", (4, 8, 4, 1)),
        ("gaps", (1, 2, 8, 8)),
    ],
)
def test_blocks_follow_memory(layout, extents, monkeypatch):
    monkeypatch.setattr(walk, "BLOCK", 128)
    x = laid_out(random((4, 8, 8, 8)), layout)
    blocks = list(reference.iterate_blocks((x,), Mode.SPATIAL))
    assert {b.arrays[0].shape for b in blocks} == {extents}
    if layout != "gaps":
        offsets = [np.tensordot(x.strides, np.indices(x[b.index].shape), axes=1) for b in blocks]
        assert all(np.ptp(of_block) == 127 * 8 for of_block in offsets)


def test_reduce_blocks_takes_arrays_tuples_and_generators(blocks):
    x = random((6, 5, 4), np.float32)

    def generator(v):
        yield v
        v *= v
        yield v

    (one,) = reference.reduce_blocks(np.abs, (x,), Mode.SPATIAL)
    both = reference.reduce_blocks(lambda v: (v, v * v), (x,), Mode.SPATIAL)
    lazily = reference.reduce_blocks(generator, (x,), Mode.SPATIAL)
    wide = x.astype(np.longdouble)
    close(one, np.abs(wide).sum(axis=(0, 2), keepdims=True), 10)
    for first, second in (both, lazily):
        close(first, wide.sum(axis=(0, 2), keepdims=True), 10)
        close(second, (wide**2).sum(axis=(0, 2), keepdims=True), 10)
    (ones,) = reference.reduce_blocks(lambda v: np.ones(()), (x,), Mode.SPATIAL)  # broadcasts
    assert np.all(ones == 24)


def test_walk_refuses_bad_arguments():
    x = random((2, 3, 4))
    for call, argument in (
        (lambda: next(reference.iterate_blocks((), Mode.SPATIAL)), "arrays"),
        (lambda: next(reference.iterate_blocks((x, x[:1]), Mode.SPATIAL)), "arrays[1]"),
        (lambda: next(reference.iterate_blocks((x,), 3)), "mode"),
        (lambda: reference.reduce_blocks(np.abs, (x,), Mode.SPATIAL, (np.ones(4),)), "parameters[0]"),
    ):
        with pytest.raises(ArgumentError) as info:
            call()
        assert info.value.argument == argument


# ---------------------------------------------------------------- bad arguments

X, V = random((4, 3, 2, 2), np.float32, 1), np.ones(3)


NEGATIVE = np.array([1.0, -0.25, np.nan])
TRAINING = {
    "x": [[1.0], X[0, 0, 0], X.astype(np.int32), np.ones((1,) * 9), np.ones((2, 0)), X.astype(np.complex64)],
    "scale": [None, 1.0, np.ones(4), np.ones((3, 2)), np.ones(3, np.int64), np.ones((1, 3, 2, 2))],
    "bias": [None, np.ones(2), np.ones(3, bool)],
    "mode": [3, "batch", None, True],
    "alpha": [math.nan, math.inf, "1", None],
    "beta": [math.nan, -math.inf, 1e39],  # beyond the float32 that a vendor reads
    "epsilon": [-1e-5, math.nan, math.inf, None],
    "exponential_average_factor": [-0.1, 1.5, math.nan, "half"],
    "running_mean": [None, np.ones(4), 0.0],
    "running_variance": [None, np.ones((2, 3))],
    "unbiased": [1, None],
    "prior": [None, X[:2], X.astype(int), 0.0],
}


def like(*names):
    return {name: TRAINING[name] for name in names}


INFERENCE = like("x", "scale", "bias", "mode", "alpha", "beta", "epsilon", "running_mean", "prior") | {
    "running_variance": [None, np.ones(2), NEGATIVE],
    "prior": TRAINING["prior"],
}
BACKWARD = like("x", "scale", "mode", "alpha", "beta", "epsilon") | {
    "dy": [None, X[:3], X.astype(np.float64), X.astype(int)],
    "alpha_param": TRAINING["alpha"],
    "beta_param": TRAINING["beta"],
    "saved_mean": [None, np.ones(4)],
    "saved_inv_variance": [None, np.ones((3, 3))],
    "prior_dx": TRAINING["prior"],
    "prior_dscale": [None, np.ones(4), 1.0],
    "prior_dbias": [None, np.ones((1, 4, 1, 1))],
}
FORWARD = {"x": X, "scale": V, "bias": V, "running_mean": V, "running_variance": V, "beta": 1.0, "prior": X + 1}
GRADIENT = {"x": X, "dy": X + 2, "scale": V, "saved_mean": V, "saved_inv_variance": V, "beta": 1.0, "beta_param": 1.0}
CALLS = [
    (reference.forward_training, FORWARD, TRAINING),
    (reference.forward_inference, FORWARD, INFERENCE),
    (reference.backward, GRADIENT | {"prior_dx": X + 1, "prior_dscale": V, "prior_dbias": V}, BACKWARD),
]


@table(
    ("function", "good", "argument", "value"),
    [
        pytest.param(function, good, argument, value, id=f"{function.__name__}-{argument}-{i}")
        for function, good, bad in CALLS
        for argument, values in bad.items()
        for i, value in enumerate(values)
    ],
)
def test_bad_arguments_are_named(function, good, argument, value):
    function(**good)  # else the rest proves nothing
    with pytest.raises(ArgumentError) as info:
        function(**good | {argument: value})
    assert info.value.argument == argument
    assert info.value.value
    assert info.value.value in str(info.value)
    assert info.value.allowed


def test_negative_running_variance_says_which():
    with pytest.raises(ArgumentError, match=r"running_variance: .*-0\.25"):
        reference.forward_inference(X, V, V, V, NEGATIVE)
    reference.forward_inference(X, V, V, V, np.array([-0.0, np.nan, 1.0]))  # -0 and NaN are none


@pytest.mark.parametrize("bad", [object(), 1.0, b"x"])
def test_a_prior_that_is_no_array_is_refused_though_beta_is_0(bad):
    x, one = np.float32([[1], [2]]), np.ones((1, 1), np.float32)
    calls = {
        "prior": lambda **prior: reference.forward_training(x, one, one, **prior),
        "prior_dscale": lambda **prior: reference.backward(x, x, one, **prior),
        "prior_dx": lambda **prior: reference.backward_frozen(x, x, scale=one, mean=one, variance=one, **prior),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError, match=f"^{name}: got"):
            call(**{name: bad})
