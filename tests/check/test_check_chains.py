"""CHAIN: sums in long chains are correct and less accurate, and nothing else that is off is taken for them."""

import dataclasses

import judged_calls
import numpy as np
import pytest
from judged_calls import made
from selftest_tool import rows
from selftest_tool.kernels import lanes
from selftest_tool.styles import STYLES

from pybnorm.check.judging.bounds import Status, expect
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import FILE, Problem


def sixteen_bits(a):
    """As bfloat16 holds it."""
    return ((a.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)


LINES = [
    "train,spatial,f32,nchw,16x8x14x14,fill=sparse",
    "train,spatial,f32,nchw,4x16x23x23,fill=sparse,seed=3",
    "train,spatial,f32,nchw,128x4x14x14,fill=relu",
    "train,spatial,f32,nchw,32x2x56x56,fill=image",
    "train,spatial,f32,nchw,32x4x56x56,fill=level",
    "backward,spatial,f32,nchw,16x4x56x56,fill=sparse,saved=0",
    "backward,spatial,f32,nchw,16x2x56x56,fill=level,saved=0",
]
CORRECT = {"one chain": rows.Kernel(total=rows.sequential), "blocks": STYLES["blocks of 1024 in sequence"]}
SHORT, PART = {"": sixteen_bits}, {"": lambda a: a[:, : a.shape[1] * 199 // 200]}
WRONG = {
    "inputs of 16 bits": rows.Kernel(reads=SHORT),
    "inputs of 16 bits in one chain": rows.Kernel(reads=SHORT, total=rows.sequential),
    "a part left out": rows.Kernel(reads=PART),
    "a part left out of one chain": rows.Kernel(reads=PART, total=rows.sequential),
}


@pytest.fixture(scope="module", params=LINES)
def judged(request):
    expected, by_channel = made(request.param)
    return lambda kernel: judge_call(expected, rows.outputs(kernel, by_channel))


def test_chains_are_no_failure_and_one_chain_is_seen(judged):
    for style, kernel in CORRECT.items():
        found = judged(kernel)
        assert {v.status for v in found.values()} <= {Status.PASS, Status.WARN, Status.CHAIN}, found
        assert all("sums in chains of " in v.note for v in found.values() if v.status == Status.CHAIN)
        assert style != "one chain" or Status.CHAIN in {v.status for v in found.values()}


@pytest.mark.slow
def test_a_chain_that_is_off_by_more_than_one_twice_as_long_is_seen():
    """As PyTorch's two threads sum equal values of channels-last tensors."""
    found = judged_calls.judged("train,spatial,f32,nhwc,32x2x56x56,fill=level", rows.Kernel(total=lanes(2)))
    assert found["saved_mean"].status == Status.CHAIN
    assert found["saved_mean"].note.startswith("sums in chains of 50176 terms")


def test_equal_gradients_of_a_file_are_no_missing_terms():
    """Their roundings are all of one sign: the gradient of a mean."""
    drawn = Problem.parse("backward,spatial,f32,nchw,16x2x56x56,fill=randn")
    problem = dataclasses.replace(drawn, fill=FILE, data="equal.npz")
    inputs = generate(drawn)
    inputs = dataclasses.replace(inputs, dy=np.full_like(inputs.dy, 1 / drawn.m))
    expected, by_channel = expect(problem, inputs), rows.Rows(problem, inputs)
    found = judge_call(expected, rows.outputs(CORRECT["one chain"], by_channel))
    assert found["dbias"].status == Status.CHAIN, found["dbias"]
    assert Status.FAIL in {
        v.status for v in judge_call(expected, rows.outputs(WRONG["a part left out"], by_channel)).values()
    }


@pytest.mark.slow
@pytest.mark.parametrize("bug", WRONG)
def test_what_is_wrong_stays_wrong(judged, bug):
    assert Status.FAIL in {v.status for v in judged(WRONG[bug]).values()}
