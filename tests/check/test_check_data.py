"""Inputs depend on the line alone, and the exact fill is exact."""

import hashlib
import math
import statistics

import numpy as np
import pytest

from pybnorm.check.data import generate, normal, splitmix64, sums_are_exact, uniform
from pybnorm.check.problem import Problem
from pybnorm.enums import Operation

LINES = [
    "train,spatial,f32,nchw,4x9x3x4",
    "train,peract,bf16,nchw,8x3x2x2,fill=randn,kappa=3,beta=0.5",
    "backward,spatial,f16,nchw,5x3x3x3,beta_param=1,beta=1",
    "backward,spatial,f64,nchw,2x4x7,fill=randn,seed=5",
    "infer,spatial,f32,nchw,3x5x2x2",
    "infer,spatial,f64,nchw,3x5x2x2,fill=randn,kappa=100",
]
DIGESTS = [
    "611b43ae1b9ffec9",
    "0d395697e4016cb7",
    "78676c9d2f3119a9",
    "9c6d4eaa601580fd",
    "585f0e6eb059a626",
    "03c0d20bf81e36a1",
]


def digest(line):
    h = hashlib.sha256()
    for name, array in generate(Problem.parse(line)).arrays().items():
        h.update(name.encode())
        # a NaN's payload is no part of the contract
        h.update(np.where(np.isnan(array), 0, array).astype(array.dtype).tobytes())
    return h.hexdigest()[:16]


@pytest.mark.parametrize(("line", "expected"), list(zip(LINES, DIGESTS, strict=True)))
def test_inputs_are_the_same_on_every_machine(line, expected):
    assert digest(line) == expected


def test_splitmix64_is_the_published_generator():
    """The recurrence of Vigna's splitmix64.c, entered at a state that hashes seed and stream."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def word(state):
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    assert [word(golden), word(2 * golden & mask)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # the known first words
    start = word(word((7 + golden) & mask) ^ (3 * golden & mask))
    assert [int(w) for w in splitmix64(7, 3, 5)] == [word((start + i * golden) & mask) for i in range(1, 6)]
    streams = [int(w) for seed in (0, 1) for stream in (1, 2) for w in splitmix64(seed, stream, 8)]
    assert len(set(streams)) == 32


def test_normal_is_the_inverse_of_the_normal_distribution():
    words = splitmix64(3, 1, 20000)
    words[:2] = [0, 2**64 - 1]
    exact = [statistics.NormalDist().inv_cdf(p) for p in uniform(words)]
    np.testing.assert_allclose(normal(words), exact, rtol=2e-7, atol=2e-7)
    assert normal(words)[0] == -normal(words)[1]
    assert abs(normal(words).mean()) < 0.03
    assert abs(normal(words).std() - 1) < 0.03


def test_values_do_not_depend_on_the_layout():
    first, last = (
        generate(Problem.parse(f"train,spatial,f32,{layout},3x4x5x6,fill=randn")) for layout in ("nchw", "nhwc")
    )
    for name, array in first.arrays().items():
        assert array.tobytes() == getattr(last, name).tobytes()


def test_seeds_and_streams_differ():
    a, b = (generate(Problem.parse(f"backward,spatial,f64,nchw,3x4x5,fill=randn,seed={s}")) for s in (0, 1))
    assert not np.any(a.x == b.x)
    assert not np.any(a.x == a.dy)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize(
    ("mode", "dims", "variance", "inverse"),
    [
        ("spatial", "8x11x3x4", 3 / 16, 2.0),
        ("spatial", "2x9x3x3", 1 / 4, 1.0),
        ("spatial", "3x9x3x3", 26 / 27 / 4, None),
        ("peract", "16x3x2x3", 3 / 16, 2.0),
        ("peract", "6x3x2x3", 1 / 4, 1.0),
        ("peract", "5x3x2x3", 1 / 5, None),
    ],
)
def test_the_exact_fill_has_the_variance_it_promises(dtype, mode, dims, variance, inverse):
    problem = Problem.parse(f"train,{mode},{dtype},nchw,{dims}")
    x = generate(problem).x.astype(np.float64)
    assert sums_are_exact(problem)
    axes = problem.reduced_axes
    mean = x.mean(axis=axes, keepdims=True)
    means = {0, 0.5, -0.5, 1, -1, 1.5, 2, -2}
    assert len(set(np.round(mean.ravel(), 9))) > 4
    assert all(min(abs(v - known) for known in means) < 1e-12 for v in mean.ravel())
    np.testing.assert_allclose(x.var(axis=axes), variance, rtol=1e-12)
    if inverse is not None:
        assert 1 / math.sqrt(variance + problem.epsilon) == inverse
        # no order of float32 additions rounds: forwards, backwards and blocked agree to the bit with the true sums
        rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1) if mode == "spatial" else x.reshape(len(x), -1).T
        for order in (rows, rows[:, ::-1]):
            chain = np.add.accumulate(order.astype(np.float32), axis=1)[:, -1]
            squares = np.add.accumulate(order.astype(np.float32) ** 2, axis=1)[:, -1]
            assert [float(v) for v in chain] == [math.fsum(row) for row in rows]
            assert [float(v) for v in squares] == [math.fsum(row**2) for row in rows]


def test_exactness_ends_where_float32_ends():
    assert sums_are_exact(Problem.parse("train,spatial,f32,nchw,64x1x101x101"))
    assert not sums_are_exact(Problem.parse("train,spatial,f32,nchw,64x1x103x103"))
    assert sums_are_exact(Problem.parse("train,spatial,f64,nchw,64x1x103x103"))
    assert not sums_are_exact(Problem.parse("train,spatial,f32,nchw,8x1,eps=1e-05"))
    assert not sums_are_exact(Problem.parse("train,spatial,f32,nchw,8x1,fill=randn"))


def test_channels_are_told_apart():
    inputs = generate(Problem.parse("train,spatial,f32,nchw,8x200"))
    pairs = set(zip(inputs.scale.ravel().tolist(), inputs.bias.ravel().tolist(), strict=True))
    assert len(pairs) == 200


@pytest.mark.parametrize("kappa", [0, 3, 100])
def test_kappa_is_mean_over_deviation(kappa):
    problem = Problem.parse(f"train,spatial,f64,nchw,64x16x8x8,fill=randn,kappa={kappa}")
    x = generate(problem).x
    measured = np.abs(x.mean(axis=(0, 2, 3))) / x.std(axis=(0, 2, 3))
    np.testing.assert_allclose(measured, kappa, rtol=0.05, atol=0.05)
    assert len(set(np.sign(x.mean(axis=(0, 2, 3))))) == 2


@pytest.mark.parametrize("fill", ["exact", "randn"])
def test_given_variances_are_positive_and_far_from_one(fill):
    variance = generate(Problem.parse(f"infer,spatial,f32,nchw,2x64x2x2,fill={fill}")).variance
    assert (variance > 0).all()
    assert not ((variance > 0.6) & (variance < 1.6)).any()


@pytest.mark.parametrize("line", LINES)
def test_a_prior_is_poison_exactly_where_beta_is_zero(line):
    problem = Problem.parse(line)
    inputs = generate(problem)
    assert np.isnan(inputs.prior).all() == (problem.beta == 0)
    if problem.operation == Operation.BACKWARD:
        assert np.isnan(inputs.prior_scale).all() == (problem.beta_param == 0)
        assert np.isnan(inputs.prior_bias).all() == (problem.beta_param == 0)


def test_saved_statistics_are_not_all_those_of_x():
    for fill in ("exact", "randn"):
        problem = Problem.parse(f"backward,spatial,f64,nchw,64x8x8x8,fill={fill}")
        inputs = generate(problem)
        inverse = 1 / np.sqrt(inputs.x.var(axis=(0, 2, 3)) + problem.epsilon)
        ratio = inputs.saved_inv_variance.ravel() / inverse
        assert (np.abs(ratio[::2] - 1) < 0.05).all()
        assert (ratio[1::2] < 0.8).all()
