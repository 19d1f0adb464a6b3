"""Conventions of other software: each is named where a kernel has it, and nowhere else."""

import re
import types

import numpy as np
import pytest
from judged_calls import made
from selftest_tool.rows import BUGS, STYLES, Kernel, outputs
from tables import table

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.conventions import convention_of
from pybnorm.check.judging.whole_call import judge_call

TRAIN = "train,spatial,f32,nchw,8x6x7x9,fill=randn,kappa=1,factor=0.3,eps=1e-4"
SMALL = "train,spatial,f32,nchw,8x6x7x9,fill=sqrteps,kappa=1,factor=0.3,eps=1e-4"
INFER = "infer,spatial,f32,nchw,8x6x7x9,fill=sqrteps"
BACKWARD = "backward,spatial,f32,nchw,8x6x7x9,fill=randn,kappa=1"
AGAIN = "backward,spatial,f32,nhwc,8x6x7x9,fill=sqrteps,kappa=1,saved=0"
f32 = np.float32


def numbers(problem, inputs):
    """One call's numbers, in float32, on the way to its results; a convention changes some."""
    given = {name: None if a is None else a.astype(f32) for name, a in inputs.arrays().items()}
    x, mean, variance = given["x"], given.get("mean"), given.get("variance")
    old = {"old_mean": mean, "old_variance": variance}
    if problem.recomputes:
        mean = x.mean(axis=(0, 2, 3), keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=(0, 2, 3), keepdims=True)
    elif "saved_mean" in given:
        mean, variance = given["saved_mean"], None
    own = {"x": x, "scale": given["scale"], "bias": given.get("bias", f32(0)), "dy": given.get("dy")}
    options = {"eps": problem.epsilon, "factor": problem.factor, "m": problem.m}
    return types.SimpleNamespace(**own, **options, **old, mean=mean, variance=variance)


def root(n, variance=None, eps=None):
    return 1 / np.sqrt((n.variance if variance is None else variance) + f32(n.eps if eps is None else eps))


def y(n, mean=None, inverse=None, scale=None, bias=None):
    mean, inverse = n.mean if mean is None else mean, root(n) if inverse is None else inverse
    return (n.x - mean) * inverse * (n.scale if scale is None else scale) + (n.bias if bias is None else bias)


def running(n, old, batch, factor=None):
    factor = f32(n.factor if factor is None else factor)
    return factor * batch + (1 - factor) * old


def bessel(n):
    return n.variance * f32(n.m / (n.m - 1))


def over(axes):
    """y by the statistics over other axes."""

    def made(n):
        mean = n.x.mean(axis=axes, keepdims=True)
        variance = ((n.x - mean) ** 2).mean(axis=axes, keepdims=True)
        return y(n, mean, root(n, variance))

    return made


def misread(n):
    """y of an NCHW tensor whose memory is taken for NHWC's."""
    shape = n.x.shape
    x = n.x.reshape(shape[0], *shape[2:], shape[1])
    mean = x.mean(axis=(0, 1, 2))
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axis=(0, 1, 2)) + f32(n.eps))
    return ((x - mean) * inverse * n.scale.ravel() + n.bias.ravel()).reshape(shape)


FORWARD = {
    ("y", TRAIN): {
        "normalized by the unbiased variance": lambda n: y(n, inverse=root(n, bessel(n))),
        "training normalizes by the running statistics": lambda n: y(n, n.old_mean, root(n, n.old_variance)),
        "after their update": lambda n: y(
            n, running(n, n.old_mean, n.mean), root(n, running(n, n.old_variance, bessel(n)))
        ),
        "gamma is missing, or fixed at 1": lambda n: y(n, scale=f32(1)),
        "abs(gamma)": lambda n: y(n, scale=np.abs(n.scale)),
        "1 + gamma": lambda n: y(n, scale=1 + n.scale),
        "beta is missing": lambda n: y(n, bias=f32(0)),
        "gamma and beta are missing": lambda n: y(n, scale=f32(1), bias=f32(0)),
        "gamma and beta are taken for one another": lambda n: y(n, scale=n.bias, bias=n.scale),
        "gamma (x_hat + beta)": lambda n: n.scale * (y(n, scale=f32(1))),
        "the mean is not subtracted": lambda n: y(n, mean=f32(0)),
        "RMS norm": lambda n: y(n, f32(0), root(n, (n.x**2).mean(axis=(0, 2, 3), keepdims=True))),
        "divided by the variance, without its root": lambda n: y(n, inverse=1 / (n.variance + f32(n.eps))),
        "instance norm": over((2, 3)),
        "layer norm": over((1, 2, 3)),
        "per activation": over(0),
        "statistics are over all elements": over((0, 1, 2, 3)),
        "statistics are over all axes but the last": over((0, 1, 2)),
        "NCHW is read as NHWC": misread,
        "gamma squared": lambda n: y(n, scale=n.scale**2),
        "divided by gamma, not multiplied": lambda n: y(n, scale=1 / n.scale),
        "y has the other sign": lambda n: -y(n),
        "the mean is added": lambda n: y(n, mean=-n.mean),
        "max(y, 0)": lambda n: np.maximum(y(n), 0),
    },
    ("y", SMALL): {
        "epsilon is added to the standard deviation": lambda n: y(n, inverse=1 / (np.sqrt(n.variance) + f32(n.eps))),
        "epsilon is missing": lambda n: y(n, inverse=root(n, eps=0)),
        "epsilon is added twice": lambda n: y(n, inverse=root(n, eps=2 * n.eps)),
        "max(var, eps)": lambda n: y(n, inverse=1 / np.sqrt(np.maximum(n.variance, f32(n.eps)))),
        "epsilon is 0.001, not 0.0001 (the default of Keras": lambda n: y(n, inverse=root(n, eps=1e-3)),
        "epsilon is 1e-05, not 0.0001 (the default of PyTorch": lambda n: y(n, inverse=root(n, eps=1e-5)),
        "epsilon is 1e-06, not 0.0001": lambda n: y(n, inverse=root(n, eps=1e-6)),
        "epsilon is 100 times": lambda n: y(n, inverse=root(n, eps=1e-2)),
        "sqrt(var) + sqrt(eps)": lambda n: y(n, inverse=1 / (np.sqrt(n.variance) + f32(n.eps**0.5))),
        "sqrt(var m / (m - 1)) + eps": lambda n: y(n, inverse=1 / (np.sqrt(bessel(n)) + f32(n.eps))),
    },
    ("y", INFER): {
        "gamma is missing, or fixed at 1 (PyTorch: affine": lambda n: y(n, scale=f32(1)),
        "x's own statistics": lambda n: y(
            n, n.x.mean(axis=(0, 2, 3), keepdims=True), root(n, n.x.var(axis=(0, 2, 3), keepdims=True))
        ),
        "the variance is taken for an inverse standard deviation": lambda n: y(n, inverse=n.variance),
        "the variance is taken for a standard deviation": lambda n: y(n, inverse=1 / n.variance),
        "epsilon is missing and beta is missing": lambda n: y(n, inverse=root(n, eps=0), bias=f32(0)),
    },
    ("saved_inv_variance", TRAIN): {
        "the running variance after its update is saved": lambda n: root(n, running(n, n.old_variance, bessel(n))),
        "the variance is saved": lambda n: n.variance,
        "the unbiased variance is saved": bessel,
        "the inverse variance is saved": lambda n: root(n) ** 2,
        "the sum of squares, not divided by m is saved": lambda n: n.variance * n.m,
    },
    ("saved_inv_variance", SMALL): {
        "the standard deviation is saved": lambda n: np.sqrt(n.variance),
        "the standard deviation with epsilon is saved": lambda n: 1 / root(n),
    },
    ("saved_mean", TRAIN): {
        "the sum is saved": lambda n: n.mean * n.m,
        "the running mean of before is saved": lambda n: n.old_mean,
        "the running mean after its update is saved": lambda n: running(n, n.old_mean, n.mean),
    },
    ("running_mean", TRAIN): {
        "running = factor * old + (1 - factor) * batch (Keras": lambda n: running(n, n.old_mean, n.mean, 1 - n.factor),
        "is not updated": lambda n: n.old_mean,
        "the factor is 1": lambda n: n.mean,
        "the factor is 0.1": lambda n: running(n, n.old_mean, n.mean, 0.1),
        "not weighed down": lambda n: n.old_mean + f32(n.factor) * n.mean,
        "the running mean takes a sum over m - 1": lambda n: running(n, n.old_mean, n.mean * f32(n.m / (n.m - 1))),
    },
    ("running_variance", TRAIN): {
        "running_variance takes the biased variance": lambda n: running(n, n.old_variance, n.variance),
        "not m - 1) and momentum is the other way round": lambda n: running(
            n, n.old_variance, n.variance, 1 - n.factor
        ),
        "about the old running mean": lambda n: running(n, n.old_variance, n.variance + (n.mean - n.old_mean) ** 2),
        "takes the inverse standard deviation": lambda n: running(n, n.old_variance, root(n)),
        "takes the standard deviation": lambda n: running(n, n.old_variance, np.sqrt(n.variance)),
        "m / (m - 1) twice": lambda n: running(n, n.old_variance, bessel(n) * f32(n.m / (n.m - 1))),
    },
}


def total(a):
    return a.sum(axis=(0, 2, 3), keepdims=True)


def gradients(n, inverse):
    normal = (n.x - n.mean) * inverse
    return normal, total(n.dy * normal), total(n.dy)


def dx(terms, scale=None):
    """dx of what a function makes of dy, x_hat, dscale and dbias."""

    def made(n, r):
        normal, dscale, dbias = gradients(n, r)
        return (n.scale if scale is None else scale(n)) * r * terms(n, normal, dscale, dbias)

    return made


def whole(n, normal, dscale, dbias):
    return n.dy - (dbias + normal * dscale) / f32(n.m)


GRADIENTS = {
    "dx is that of evaluation": ("dx", dx(lambda n, z, s, b: n.dy)),
    "without the term of dbias": ("dx", dx(lambda n, z, s, b: n.dy - z * s / f32(n.m))),
    "without the term of dscale": ("dx", dx(lambda n, z, s, b: n.dy - b / f32(n.m))),
    "sums in place of means": ("dx", dx(lambda n, z, s, b: n.dy - b - z * s)),
    "projection divided by m - 1": ("dx", dx(lambda n, z, s, b: n.dy - b / f32(n.m) - z * s / f32(n.m - 1))),
    "the terms added": ("dx", dx(lambda n, z, s, b: n.dy + (b + z * s) / f32(n.m))),
    "gamma is missing": ("dx", dx(whole, lambda n: f32(1))),
    "abs(gamma) in place": ("dx", dx(whole, lambda n: np.abs(n.scale))),
    "dx is divided by gamma": ("dx", dx(whole, lambda n: 1 / n.scale)),
    "dscale without 1/sigma": ("dscale", lambda n, r: gradients(n, r)[1] / r),
    "dscale divided by gamma": ("dscale", lambda n, r: gradients(n, r)[1] / n.scale),
    "dscale is a mean": ("dscale", lambda n, r: gradients(n, r)[1] / f32(n.m)),
    "dscale by x in place": ("dscale", lambda n, r: total(n.dy * n.x)),
    "taken for one another": ("dscale", lambda n, r: gradients(n, r)[2]),
    "dbias is a mean": ("dbias", lambda n, r: total(n.dy) / f32(n.m)),
    "dbias has the other sign": ("dbias", lambda n, r: -total(n.dy)),
}


def named(line, output, change):
    """The verdict on the results of a call, one of which is made another way."""
    expected, by_channel = made(line)
    problem, inputs, results = expected.problem, expected.inputs, outputs(Kernel(), by_channel)
    n = numbers(problem, inputs)
    if n.dy is not None:
        r = inputs.saved_inv_variance if problem.saved else root(n)
        values = change(n, r.astype(f32))
    else:
        values = change(n)
    results[output] = values.astype(f32).reshape(results[output].shape)
    return judge_call(expected, results)[output]


@table("output, line, said", [(*key, said) for key, own in FORWARD.items() for said in own])
def test_each_convention_of_training_and_inference_is_named(output, line, said):
    verdict = named(line, output, FORWARD[output, line][said])
    assert verdict.status == Status.FAIL
    assert said in verdict.convention
    assert verdict.note.startswith(verdict.convention)
    assert "chains" not in verdict.note


@table("line", [BACKWARD, AGAIN])
@table("said", GRADIENTS)
def test_each_convention_of_backward_is_named(said, line):
    verdict = named(line, *GRADIENTS[said])
    assert (verdict.status, said in verdict.convention) == (Status.FAIL, True)


LINES = (TRAIN, SMALL, INFER, BACKWARD, AGAIN, "train,spatial,bf16,nhwc,8x6x7x9", "backward,spatial,f16,nchw,8x6x7x9")


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_no_convention_is_seen_in_a_correct_kernel(line):
    expected, by_channel = made(line)
    assert len(STYLES) >= 30
    for style, kernel in STYLES.items():
        for name, values in outputs(kernel, by_channel).items():
            assert convention_of(expected, name, values) is None, (style, name)


NO_CONVENTION = re.compile("element|row|tile|block|term|swapped|through|partial sums|results of|neighbour")


@pytest.mark.slow
@pytest.mark.parametrize("line", [TRAIN, INFER, BACKWARD, AGAIN])
def test_what_is_no_convention_is_not_called_one(line):
    expected, by_channel = made(line)
    bugs = [name for name in BUGS if NO_CONVENTION.search(name) and "old and new" not in name]
    assert len(bugs) > 40
    for bug in bugs:
        for name, values in outputs(BUGS[bug], by_channel).items():
            assert convention_of(expected, name, values) is None, (bug, name)


def test_a_value_that_is_not_finite_is_no_convention():
    expected, by_channel = made(TRAIN)
    results = outputs(Kernel(), by_channel)
    results["y"] = y(numbers(expected.problem, expected.inputs), scale=f32(1))
    results["y"][0, 3, 2, 2] = np.nan
    assert judge_call(expected, results)["y"].convention == ""
