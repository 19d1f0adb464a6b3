"""The reference of the neutral operations: every subset of the axes against NumPy's own sums, and its refusals."""

import itertools

import numpy as np
import pytest
from tables import table

from pybnorm import ArgumentError, ArgumentTypeError, reference

EPSILON = 1e-3
SHAPES = [(7,), (4, 3), (3, 4, 5), (2, 3, 4, 3), (2, 1, 3, 2, 2), (2, 2, 3, 1, 2, 2, 2, 2)]
CASES = [
    (dims, axis)
    for dims in SHAPES
    for n in range(len(dims) + 1)
    for axis in itertools.combinations(range(len(dims)), n)
    if len(dims) < 6 or n in (0, 1, 4, 8)
]


class Plain:
    """The formulas as anybody would write them in NumPy."""

    def __init__(self, dims, axis, seed=0):
        rng = np.random.default_rng(seed)
        self.reduced = tuple(a for a in range(len(dims)) if a not in axis)
        self.derived = tuple(d if a in axis else 1 for a, d in enumerate(dims))
        self.m = np.prod([dims[a] for a in self.reduced], dtype=int)
        self.x, self.dy, self.prior = rng.normal(1.0, 2.0, (3, *dims))
        self.scale, self.bias, self.mean, self.total, self.moment = rng.normal(1.0, 0.5, (5, *self.derived))
        self.variance, self.old = rng.uniform(0.5, 2.0, (2, *self.derived))
        self.inv = 1 / np.sqrt(self.variance + EPSILON)

    def sum(self, values):
        return values.sum(axis=self.reduced, keepdims=True)


each_case = table("case", CASES)


def close(got, right):
    assert got.shape == right.shape
    np.testing.assert_allclose(got, right, rtol=1e-11, atol=1e-11)


@each_case
def test_stats(case):
    axis, p = case[1], Plain(*case)
    got = reference.stats(p.x, epsilon=EPSILON, axis=axis)
    mean = p.sum(p.x) / p.m
    variance = p.sum((p.x - mean) ** 2) / p.m
    close(got.mean, mean)
    close(got.variance, variance)
    close(got.inv_variance, 1 / np.sqrt(variance + EPSILON))


@each_case
def test_elemt(case):
    axis, p = case[1], Plain(*case)
    right = 0.5 * (p.scale * p.inv * (p.x - p.mean) + p.bias) - 2 * p.prior
    for function in (reference.elemt, reference.forward_inference_inv_variance):
        got = function(p.x, p.scale, p.bias, p.mean, p.inv, alpha=0.5, beta=-2.0, axis=axis, prior=p.prior)
        close(got.y, right)
    close(reference.elemt(p.x, None, None, p.mean, p.inv, axis=axis).y, p.inv * (p.x - p.mean))


@pytest.mark.parametrize("frozen", [True, False])
@each_case
def test_gradients(case, frozen):
    axis, p = case[1], Plain(*case)
    total, moment = p.sum(p.dy), p.inv * p.sum(p.dy * (p.x - p.mean))
    centred = p.dy if frozen else p.dy - total / p.m - (p.x - p.mean) * p.inv * moment / p.m
    function = reference.backward_frozen if frozen else reference.training_grad
    got = function(
        p.x, p.dy, scale=p.scale, mean=p.mean, variance=p.variance, alpha=0.5, beta=2.0, alpha_param=-1.0,
        beta_param=3.0, epsilon=EPSILON, axis=axis, prior_dx=p.prior, prior_dscale=p.old, prior_dbias=p.bias,
    )  # fmt: skip
    close(got.dx, 0.5 * p.scale * p.inv * centred + 2 * p.prior)
    close(got.dscale, -moment + 3 * p.old)
    close(got.dbias, -total + 3 * p.bias)


@each_case
def test_backward_reduce(case):
    axis, p = case[1], Plain(*case)
    got = reference.backward_reduce(x=p.x, dy=p.dy, mean=p.mean, inv_variance=p.inv, axis=axis)
    moment = p.sum(p.dy * (p.x - p.mean))
    close(got.sum_dy, p.sum(p.dy))
    close(got.dbias, p.sum(p.dy))
    close(got.sum_dy_xmu, moment)
    close(got.dscale, moment * p.inv)
    assert reference.backward_reduce(x=p.x, dy=p.dy, mean=p.mean, axis=axis).dscale is None


@each_case
def test_backward_elemt(case):
    axis, p = case[1], Plain(*case)
    got = reference.backward_elemt(
        x=p.x, dy=p.dy, scale=p.scale, mean=p.mean, inv_variance=p.inv, sum_dy=p.total, sum_dy_xmu=p.moment, count=17,
        alpha=0.5, beta=2.0, axis=axis, prior=p.prior,
    )  # fmt: skip
    right = p.scale * p.inv * (p.dy - p.total / 17 - (p.x - p.mean) * p.inv**2 * p.moment / 17)
    close(got, 0.5 * right + 2 * p.prior)


@pytest.mark.parametrize("shards", [[5, 3], [0, 8], [1, 0, 4, 3]], ids=str)
@pytest.mark.parametrize("by_m2", [True, False])
def test_gather_stats(shards, by_m2):
    x = np.random.default_rng(1).normal(1e4, 1.0, (sum(shards), 5))
    means, variances = np.full((2, len(shards), 5), np.nan)
    for rank, part in enumerate(np.split(x, np.cumsum(shards)[:-1])):
        if len(part):
            means[rank], variances[rank] = part.mean(0), part.var(0)
    parts = {"m2s": variances * np.array(shards)[:, None]} if by_m2 else {"m2s": None, "variances": variances}
    old = np.full(5, 2.0)
    got = reference.gather_stats(
        means, counts=shards, **parts, running_mean=old, running_variance=old, exponential_average_factor=0.25,
        epsilon=EPSILON,
    )  # fmt: skip
    np.testing.assert_allclose(got.mean, x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(got.variance, x.var(0), rtol=1e-9)
    np.testing.assert_allclose(got.inv_variance, 1 / np.sqrt(x.var(0) + EPSILON), rtol=1e-9)
    np.testing.assert_allclose(got.running_mean, 0.75 * 2 + 0.25 * x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(got.running_variance, 0.75 * 2 + 0.25 * x.var(0, ddof=1), rtol=1e-9)
    poisoned = np.full(5, np.nan)
    got = reference.gather_stats(
        means, counts=shards, **parts, running_mean=poisoned, running_variance=poisoned, exponential_average_factor=1.0
    )
    assert np.isfinite(got.running_mean).all()
    assert np.isfinite(got.running_variance).all()


def frozen(vector):
    return dict.fromkeys(("scale", "mean", "variance"), vector)


def halves(x, vector, count):
    vectors = dict.fromkeys(("scale", "mean", "inv_variance", "sum_dy", "sum_dy_xmu"), vector)
    return reference.backward_elemt(x=x, dy=x, **vectors, count=count)


def test_empty_batches():
    x = np.empty((0, 3, 4))
    one = np.ones(3)
    sums = reference.backward_reduce(x=x, dy=x, mean=one, inv_variance=one)
    assert all((s == 0).all() and s.shape == (1, 3, 1) for s in sums)
    assert reference.elemt(x, one, one, one, one).y.shape == x.shape
    assert halves(x, one, 5).shape == x.shape
    for call in (lambda: reference.stats(x), lambda: reference.backward_frozen(x, x, **frozen(one))):
        with pytest.raises(ArgumentError, match="x"):
            call()
    with pytest.raises(ArgumentError, match="x"):
        reference.backward_reduce(x=np.empty((4, 0)), dy=np.empty((4, 0)), mean=one)


def test_fold_says_when_arrays_stay_as_they_are():
    dims = (2, 3, 4, 5)
    assert reference.fold(dims, 1).dims == dims
    assert reference.fold(dims, (1, 2, 3)).dims == dims
    assert reference.fold(dims, (1, 3)).dims == (1, 15, 8)
    x = np.arange(120.0).reshape(dims)
    for axis in (1, (1, 2, 3), (1, 3), (), (0, 1, 2, 3), -1):
        folded = reference.fold(dims, axis)
        np.testing.assert_array_equal(folded._restore(folded._view(x), dims), x)


@table(
    ("call", "argument"),
    [
        (lambda x, v: reference.stats(x, axis=4), "axis"),
        (lambda x, v: reference.stats(x, axis=(1, 1)), "axis"),
        (lambda x, v: reference.stats(x, epsilon=-1.0), "epsilon"),
        (lambda x, v: reference.stats([1.0]), "x"),
        (lambda x, v: reference.stats(x.astype(int)), "x"),
        (lambda x, v: reference.elemt(x, v, v, v, np.ones(4)), "inv_variance"),
        (lambda x, v: reference.elemt(x, v, v, None, v), "mean"),
        (lambda x, v: reference.elemt(x, v, v, v, v, beta=1.0), "prior"),
        (lambda x, v: reference.elemt(x, v, v, v, v, alpha=float("nan")), "alpha"),
        (lambda x, v: reference.backward_frozen(x, x[:1], **frozen(v)), "dy"),
        (lambda x, v: reference.backward_frozen(x, x, **frozen(v) | {"variance": -v}), "variance"),
        (lambda x, v: reference.training_grad(x, x, **frozen(v), beta_param=1.0), "prior_dscale"),
        (lambda x, v: halves(x, v, 0), "count"),
        (lambda x, v: reference.gather_stats(x[:, :, 0], None, [1, 1]), "m2s"),
        (lambda x, v: reference.gather_stats(x, x, [1, 1]), "means"),
        (lambda x, v: reference.gather_stats(x[:, :, 0], x[:, :, 0], [0, 0]), "counts"),
        (lambda x, v: reference.gather_stats(x[:, :, 0], x[:, :, 0], [1, -1]), "counts"),
        (
            lambda x, v: reference.gather_stats(x[:, :, 0], x[:, :, 0], [1, 0], running_mean=v, running_variance=v),
            "counts",
        ),
    ],
)
def test_bad_arguments_are_named(call, argument):
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        call(np.ones((2, 3, 4)), np.ones(3))
    assert caught.value.argument == argument
