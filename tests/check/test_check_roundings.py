"""A sum of ordinary data that is off by more than roundings leave is wrong, whatever is missing; no right kernel is."""

import dataclasses

import numpy as np
import pytest
from judged_calls import made
from selftest_tool import rows
from selftest_tool.kernels import Kernel
from tables import table

from pybnorm.check.judging import roundings
from pybnorm.check.judging.bounds import Status, judge
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem

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


@pytest.mark.slow
@table("line", ["train,spatial,f32,nchw", "backward,spatial,f32,nhwc", "backward_reduce,spatial,f32,nchw"])
@table("bug", BUGS)
def test_terms_that_are_missing_are_seen_in_every_output_of_a_sum(line, bug):
    expected, by_channel = made(f"{line},{LONG},fill=randn")
    right, wrong = (rows.outputs(kernel, by_channel) for kernel in (Kernel(), BUGS[bug]))
    assert {v.status for v in judge_call(expected, right).values()} == {Status.PASS}
    verdicts = judge_call(expected, wrong)
    seen = roundings.beyond(expected, wrong).notes  # a case is not searched for them where a bound has failed
    missed = {name for name, v in verdicts.items() if v.status != Status.FAIL and name not in seen}
    assert missed <= {"saved_inv_variance", "running_variance"}
    assert Status.FAIL in {v.status for v in verdicts.values()}
    if bug == "two elements":
        assert any("by roundings less than" in v.note for v in verdicts.values())


@pytest.mark.slow
@table("line", [TRAIN, BACKWARD])
@table("options", ["f32", "f16,kappa=3", "f16,kappa=0.5"])
@table("style", rows.STYLES)
def test_no_right_way_to_add_is_beyond_a_tenth_of_what_is_allowed(line, options, style, monkeypatch):
    monkeypatch.setattr(roundings, "REACH", {name: most / 10 for name, most in roundings.REACH.items()})
    monkeypatch.setattr(roundings, "_LEAST", 0.0)
    expected, by_channel = made(line.replace("f32", options[:3]) + options[3:])
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


@pytest.mark.slow
def test_a_dropped_element_shows_on_data_like_those_of_networks():
    """m = 100,352, of one sign: within the bound at 0.35 to 0.64."""
    expected, by_channel = made(f"backward,spatial,f32,nchw,{LONG},fill=relu")
    for style in [*rows.STYLES][::6]:
        found = judge_call(expected, rows.outputs(rows.STYLES[style], by_channel)).values()
        assert Status.FAIL not in {v.status for v in found}, style
    dropped = judge_call(expected, rows.outputs(rows.BUGS["an element in the middle dropped"], by_channel))["dscale"]
    assert (dropped.ratio < 1, dropped.status) == (True, Status.FAIL)
    assert "terms" in dropped.note


@pytest.mark.slow
def test_a_files_data_are_held_against_roundings_where_they_are_in_no_order(tmp_path):
    own = Problem.parse("train,spatial,f32,nchw,32x8x56x56,fill=randn")
    data, file = generate(own), tmp_path / "own.npz"
    names = {"running_mean": data.mean, "running_variance": data.variance, "scale": data.scale, "bias": data.bias}
    order = np.moveaxis(data.x, 1, 0).reshape(8, -1)
    for x, seen in ((order, True), (np.sort(order, axis=1), False)):
        np.savez(file, x=np.moveaxis(x.reshape(8, 32, 56, 56), 0, 1), **names)
        expected, by_channel = made(f"train,spatial,f32,nchw,32x8x56x56,data={file}")
        outputs = rows.outputs(rows.BUGS["an element in the middle dropped"], by_channel)
        outputs["saved_mean"][:, 3] += np.float32(20 / own.m)
        verdict = judge_call(expected, outputs)["saved_mean"]
        assert (verdict.status == Status.FAIL) == seen
