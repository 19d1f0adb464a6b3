"""Calls with an activation and a residual: oneDNN's compositions pass, and kernels that fuse them."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from judged_calls import case
from selftest_tool.composed import Activated

from pybnorm import devices
from pybnorm.check.judging.bounds import Status, expect, judge, untrusted
from pybnorm.check.language.activations import before, passes
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import Session, run_case
from pybnorm.check.run.session import open_session


def result_of(line):
    return run_case(Problem.parse(line), Session("onednn", Activated(), devices.device_for(1)))


LINES = [
    "train/infer/backward,spatial,f32/bf16,nchw,8x6x5x7,fill=randn/exact,activation=relu,residual=0/1",
    "train/infer/backward,spatial,f32,nhwc,8x6x5x7,fill=ramp/randn,activation=clipped_relu/clamp",
    "train/infer/backward,peract,f32,nchw,24x2x3,fill=randn,activation=clamp,low=-1,high=0.25,alpha=2,beta=0.5",
    # a limit that no binary fraction is may be rounded to float32 first
    "train/infer,spatial,f32/f16/bf16,nchw,8x6x5x7,fill=randn,activation=clamp,high=1.5/1.3,residual=0/1",
]


@pytest.mark.parametrize("line", LINES)
def test_kernels_that_fuse_rightly_pass(line):
    for problem in expand(line):
        result = result_of(str(problem))
        assert (result.status, result.message) == (Status.PASS, ""), problem


def test_rounded_exact_sums_are_excused_with_an_activation_too():
    """Whether the unbiased variance explains them is asked of the same kind of problem."""
    problem, _, expected = case("train,spatial,f32,nchw,8x6x5x8,activation=relu")
    unbiased = 1 / np.sqrt(problem.m / (problem.m - 1) * 3 / 16 + problem.epsilon)
    for value, right in ((2 * (1 + 1e-6), (Status.PASS, "A")), (unbiased, (Status.FAIL, "B"))):
        verdict = judge(expected, "saved_inv_variance", np.full(problem.parameter_dims, value, np.float32))
        assert (verdict.status, verdict.tier) == right


COMPOSED = """\
train/infer/backward,spatial,f32/bf16,nchw,8x6x5x7,activation=relu,residual=0/1
train/infer/backward,spatial,f32/bf16,nchw,8x6x5x7,fill=randn,activation=clipped_relu/clamp,residual=1
train/infer/backward,spatial/peract,f32/f16/bf16,nchw/nhwc,8x6x5x7,fill=randn,activation=clipped_relu/clamp
infer/backward,spatial,f32,nchw,8x6x5x7,fill=randn,activation=clamp,low=0.25,high=0.375,alpha=2,beta=0.5
infer/backward,spatial,f16,nchw,8x6x5x7,fill=randn,activation=clamp,low=-0.375,high=-0.25
"""


@pytest.mark.parametrize("line", COMPOSED.splitlines())
def test_activations_without_a_fused_kernel_are_composed(line, load_library):
    load_library("onednn")
    here = open_session("onednn")
    with here.handle:
        for problem in expand(line):
            result = run_case(problem, here)
            assert (result.status, result.message) == (Status.PASS, ""), problem
        result = run_case(Problem.parse("infer,spatial,f32,nchw,8x6x5x7,activation=clamp,inplace=1"), here)
    assert result.status == Status.UNSUPPORTED
    assert "in place" in result.message


@pytest.mark.parametrize("there", [False, True])
def test_a_gradient_whose_mask_rounding_decides_may_be_there_or_not(there):
    problem, inputs, _ = case("backward,spatial,f32,nchw,8x6x5x7,fill=randn,activation=relu")
    channel = [a.ravel()[2] for a in (inputs.scale, inputs.bias, inputs.saved_mean, inputs.saved_inv_variance)]
    scale, bias, mean, inverse = (np.float64(v) for v in channel)
    inputs.x[3, 2, 1, 1] = mean - bias / scale / inverse  # batch norm's result there is 0, but for the rounding of x
    inputs.dy[3, 2, 1, 1] = 64.0
    expected = expect(problem, inputs)
    assert np.count_nonzero(expected._uncertain) == 1
    plain = Problem.parse("backward,spatial,f32,nchw,8x6x5x7,fill=randn")
    statistics = inputs.saved_mean, inputs.saved_inv_variance
    result = before(problem, inputs.x, inputs.scale, inputs.bias, statistics)
    masked = np.where(passes(problem, result), inputs.dy, 0)
    masked[3, 2, 1, 1] = 64.0 if there else 0.0
    right = expect(plain, dataclasses.replace(inputs, dy=masked.astype(np.float32), bias=None))
    for name, values in right.outputs.items():
        verdict = judge(expected, name, values.astype(np.float32))
        assert verdict.status == Status.PASS, (name, verdict.note)
    masked[3, 2, 1, 2] += 64.0  # of an element whose mask is certain
    wrong = expect(plain, dataclasses.replace(inputs, dy=masked.astype(np.float32), bias=None))
    assert judge(expected, "dx", wrong.outputs["dx"].astype(np.float32)).status == Status.FAIL


@pytest.mark.parametrize(
    "line",
    [
        "train,spatial,f32,nchw,8x6x5x7,activation=clipped_relu",  # the last channel is at its limits
        "train,spatial,bf16,nchw,8x6x5x7,activation=clamp",  # or where scale makes no difference
        "train,peract,f32,nchw,2x64x7x7,fill=randn,activation=clipped_relu,residual=1",
        "backward,spatial,f32,nchw,16x16x14x14,activation=clamp",
        "backward,spatial,f32,nchw,2x3x3x3,activation=relu,residual=1",  # the gradient that passes last is 0
        "backward,peract,f64,nchw,4x4x4x4,fill=ramp,activation=clamp",
    ],
)
def test_what_an_activation_hides_in_one_place_shows_in_another(line):
    problem, inputs, _ = case(line)
    assert untrusted(problem, inputs) == []


def test_a_case_whose_results_are_all_at_a_limit_is_not_trusted():
    problem, inputs, _ = case("train,spatial,f32,nchw,8x6x5x7,activation=clipped_relu")
    inputs.bias[...] = -100
    assert "scale" in untrusted(problem, inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("residual", "most"), [("", 4.5), (",residual=1", 7)])
def test_a_large_backward_takes_little_memory_beside_its_arrays(residual, most):
    """x, dy, of a residual y, dy as it is masked, and that of which the mask is uncertain, with room for blocks."""
    problem = Problem.parse(f"backward,spatial,f32,nchw,16x64x64x64,fill=randn,activation=relu{residual}")
    tracemalloc.start()
    try:
        inputs = generate(problem)
        assert untrusted(problem, inputs) == []
        expected = expect(problem, inputs)
        if residual:
            assert judge(expected, "dz", expected.inputs.dy).status == Status.PASS
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * inputs.x.nbytes
