"""A sum of ordinary data that is off by more than roundings leave is wrong, whatever is missing; no right kernel is."""

import dataclasses

import numpy as np
import pytest

from pybnorm.check.bounds import Status, expect, judge
from pybnorm.check.data import generate
from pybnorm.check.matched_filters import roundings
from pybnorm.check.problem import Problem
from pybnorm.check.selftest import rows
from pybnorm.check.selftest.kernels import Kernel
from pybnorm.check.verdicts import judge_call

SHAPE = "8x16x56x56"  # m = 25,088
TRAIN = f"train,spatial,f32,nchw,{SHAPE},fill=randn"
LONG = "32x16x56x56"  # 100,352
BACKWARD = f"backward,spatial,f32,nchw,{SHAPE},fill=randn"


def without(places):
    """A kernel that leaves out, in every channel, what lies at `places`: a function of rows of terms."""

    def read(terms):
        terms = terms.copy()
        terms[places(terms)] = 0
        return terms

    return Kernel(reads={"": read})


BUGS = {
    "two elements": without(lambda a: (slice(None), [777, 20222])),
    "an element in one channel": without(lambda a: (3, a[3].argmax())),
    "another element in each channel": without(lambda a: (np.arange(16), np.arange(16) * 1000 + 5)),
    "each 5000th": without(lambda a: (slice(None), slice(77, None, 5000))),
    "a run at an odd place": without(lambda a: (slice(None), slice(10037, 10046))),
}


def made(line):
    problem = Problem.parse(line)
    inputs = generate(problem)
    return expect(problem, inputs), rows.Rows(problem, inputs)


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize(
    "line", ["train,spatial,f32,nchw", "backward,spatial,f32,nhwc", "backward_reduce,spatial,f32,nchw"]
)
def test_what_no_filter_foretells_is_seen_in_every_output_of_a_sum(line, bug):
    expected, by_channel = made(f"{line},{LONG},fill=randn")
    right, wrong = (rows.outputs(kernel, by_channel) for kernel in (Kernel(), BUGS[bug]))
    assert {v.status for v in judge_call(expected, right).values()} == {Status.PASS}
    verdicts = judge_call(expected, wrong)
    missed = {name for name, v in verdicts.items() if v.status != Status.FAIL}
    assert missed <= {"saved_inv_variance", "running_variance"}
    if bug == "two elements":
        assert any("by roundings less than" in v.note for v in verdicts.values())


@pytest.mark.parametrize("style", rows.STYLES)
def test_no_right_way_to_add_is_beyond_a_tenth_of_what_is_allowed(style, monkeypatch):
    monkeypatch.setattr(roundings, "REACH", {name: most / 10 for name, most in roundings.REACH.items()})
    monkeypatch.setattr(roundings, "_LEAST", 0.0)
    for line in (TRAIN, BACKWARD):
        for options in ("", ",kappa=3", ",kappa=0.5"):
            expected, by_channel = made(line.replace("f32", "f16" if options else "f32") + options)
            assert not roundings.beyond(expected, rows.outputs(rows.STYLES[style], by_channel)).notes


def test_a_pass_says_what_would_have_been_noticed():
    for line, name in ((TRAIN, "saved_mean"), (BACKWARD, "dbias"), (BACKWARD, "dscale")):
        expected, by_channel = made(line)
        outputs = rows.outputs(Kernel(), by_channel)
        told = judge_call(expected, outputs)[name].noticed
        assert 0 < told < judge(expected, name, outputs[name]).noticed / 1.5
        # as much more of it, where it is largest, is noticed
        wrong = outputs[name] * np.float32(1 + 1.5 * told)
        assert judge_call(expected, outputs | {name: wrong})[name].status == Status.FAIL


@pytest.mark.parametrize(
    ("line", "silent"),
    [
        (f"{BACKWARD},saved=0", {"dscale"}),  # has the error of the mean
        (f"{BACKWARD},beta_param=1", {"dscale", "dbias"}),
        (f"{BACKWARD},activation=relu,residual=1", {"dscale", "dbias", "dx"}),
        (TRAIN.replace("randn", "exact"), {"saved_mean"}),  # has no roundings
        (TRAIN.replace("randn", "relu"), {"saved_mean"}),
    ],
)
def test_of_other_data_and_calls_nothing_is_said(line, silent):
    expected, by_channel = made(line)
    outputs = rows.outputs(Kernel(), by_channel)
    wrong = {name: (array * array.dtype.type(1.5)) for name, array in outputs.items()}
    notes = [v.note for name, v in judge_call(expected, wrong).items() if name in silent]
    assert not any("roundings less" in note for note in notes)


def test_a_running_mean_without_weight_is_not_asked():
    expected, by_channel = made(f"{TRAIN},factor=0")
    outputs = rows.outputs(BUGS["two elements"], by_channel)
    verdicts = judge_call(expected, outputs)
    assert (verdicts["saved_mean"].status, verdicts["running_mean"].status) == (Status.FAIL, Status.PASS)
    assert dataclasses.asdict(roundings.beyond(expected, outputs))["sizes"]["saved_mean"].startswith("off by ")


@pytest.mark.parametrize(
    "operation", ["backward_elemt", "elemt", "frozen", "training_grad", "sync_train", "sync_backward"]
)
def test_right_results_of_composed_calls_pass(operation):
    expected, _ = made(f"{operation},spatial,f32,nchw,{SHAPE},fill=randn")
    right = {name: expected.outputs[name].astype(np.float32) for name in expected.outputs}
    assert {v.status for v in judge_call(expected, right).values()} == {Status.PASS}
