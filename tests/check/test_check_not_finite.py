"""Values that are not finite: what must be NaN or infinite is judged, whatever the order of operations."""

import dataclasses

import numpy as np
import pytest
from judged_calls import case, outputs_of

from pybnorm import reference
from pybnorm.check.judging.bounds import Status, expect, judge, not_finite, tiers
from pybnorm.check.judging.known_defects import explain
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.lines import expand
from pybnorm.check.run.runner import execute, run_case
from pybnorm.check.run.session import open_session
from pybnorm.check.selftest.simulated import STYLES, session

SEEDS = "0/1/2/3/4/6/7/9/10/12/13/14"
SPECIAL = f"train/infer/backward,spatial,f32,nchw,4x6x3x5,fill=special,seed={SEEDS}"


TRAIN = "train,spatial,f32,nchw,4x6x5x3"
INFER = "infer,spatial,f32,nchw,4x6x5x3"


# ---------------------------------------------------------------- honest kernels


@pytest.mark.parametrize("style", STYLES)
def test_no_honest_kernel_is_accused(style):
    """NaN and infinities in every array; +-inf that an order of operations makes NaN is a warning at most."""
    warned = 0
    for problem in expand(SPECIAL):
        result = run_case(problem, session(style))
        assert result.status in (Status.PASS, Status.WARN), (str(problem), result.verdicts)
        assert all(v.unjudged == 0 for v in result.verdicts), (str(problem), result.verdicts)
        for verdict in result.verdicts:
            if verdict.status == Status.WARN:
                warned += 1
                assert "as another order of operations may" in verdict.note
    assert warned < 25


@pytest.mark.parametrize("style", STYLES)
def test_results_beyond_the_range_are_infinite(style):
    for line in (
        "train/infer/backward,spatial,f16,nchw,4x6x5x3,fill=randn,alpha=60000",
        "train/infer/backward,spatial,f32/bf16,nchw,4x6x5x3,fill=randn,alpha=2e+38",
        "backward,spatial,f32,nchw,4x6x5x3,fill=randn,alpha_param=1e+38",
    ):
        for problem in expand(line):
            result = run_case(problem, session(style))
            assert result.status == Status.PASS, (str(problem), result)


def test_a_kernel_that_multiplies_by_alpha_first_may_overflow_on_the_way():
    problem, inputs, expected, outputs = outputs_of(f"{INFER},fill=randn,alpha=2e+38")
    inverse = 1 / np.sqrt(inputs.variance.astype(np.float64) + problem.eps)
    with np.errstate(all="ignore"):
        factor = (problem.alpha * inputs.scale * inverse * 4).astype(np.float32)
        y = ((inputs.x - inputs.mean) / 4 * factor + np.float32(problem.alpha) * inputs.bias).astype(np.float32)
    assert np.isfinite(outputs["y"][~np.isfinite(y)]).any()  # the order alone makes these
    assert judge(expected, "y", y).status in (Status.PASS, Status.WARN)
    wrong = np.where(np.isfinite(y), y * np.float32(0.999), y)
    assert judge(expected, "y", wrong).status == Status.FAIL


# ---------------------------------------------------------------- swallowed, spread, saturated


def swallow(values):
    return np.where(np.isfinite(values), values, 0).astype(values.dtype)


def saturate(values):
    dtype = values.dtype
    largest = {np.dtype(np.float16): 65504.0}.get(dtype, (2 - 2.0**-7) * 2.0**127)
    largest = float(np.finfo(dtype).max) if dtype in (np.float32, np.float64) else largest
    return np.where(np.isinf(values), np.sign(values.astype(np.float64)) * largest, values).astype(dtype)


def negate_infinity(values):
    return np.where(np.isinf(values), -values, values).astype(values.dtype)


def nan_to_infinity(values):
    return np.where(np.isnan(values), np.inf, values.astype(np.float64)).astype(values.dtype)


@pytest.mark.slow
def test_swallowed_is_found_in_every_output_that_must_not_be_finite():
    seen = set()
    for problem in expand(SPECIAL):
        _, _, expected, outputs = outputs_of(problem)
        for name, values in outputs.items():
            reached = not np.isfinite(values).all()
            verdict = judge(expected, name, swallow(values))
            assert (verdict.status == Status.FAIL) == reached, (str(problem), name, verdict)
            if reached:
                seen.add((problem.word, name, problem.seed // 3))
                assert "swallowed: finite where NaN or infinity must come out" in verdict.note
                assert verdict.worst[0].ratio == np.inf
                assert verdict.over == np.count_nonzero(~np.isfinite(values))
    # x reaches everything but dbias; dy dbias, too
    every = {"train": ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance"), "infer": ("y",)}
    every["backward"] = ("dx", "dscale")
    assert {(word, name, 0) for word, names in every.items() for name in names} <= seen
    assert {("backward", "dbias", 1), ("train", "y", 1), ("infer", "y", 4), ("backward", "dx", 2)} <= seen
    assert len(seen) == 24


@pytest.mark.parametrize("of", ["spatial,f32", "peract,bf16"])
def test_a_negative_variance_without_its_sign_is_a_warning_and_any_other_number_wrong(of):
    problem, inputs, expected, outputs = outputs_of(f"infer,{of},nchw,4x6x3x5,fill=special,seed=14")
    assert (inputs.variance < 0).any()
    positive = dataclasses.replace(inputs, variance=np.abs(inputs.variance))
    without_sign = execute(problem, positive, session()).outputs["y"]
    verdict = judge(expected, "y", without_sign)
    assert (verdict.status, verdict.wild) == (Status.WARN, 0)
    assert "as of |variance + epsilon|" in verdict.note
    (entry,) = explain("miopen", (3, 4, 0), problem, [verdict], Status.WARN)
    assert entry.id == "miopen-inference-absolute-variance"
    off = np.where(np.isnan(outputs["y"]), without_sign * without_sign.dtype.type(1.03), without_sign)
    verdict = judge(expected, "y", off)
    assert verdict.status == Status.FAIL
    assert "swallowed" in verdict.note


@pytest.mark.parametrize(
    "line",
    [
        "infer,spatial,f16,nchw,4x6x5x3,fill=randn,alpha=60000",
        "train,spatial,bf16,nchw,4x6x5x3,fill=randn,alpha=2e+38",
        "backward,spatial,f32,nchw,4x6x5x3,fill=randn,alpha=2e+38",
        "infer,spatial,f16,nchw,4x6x5x3,fill=special,seed=1",
        "backward,spatial,f32,nchw,4x6x5x3,fill=special,seed=4",
        "infer,spatial,f64,nchw,4x6x5x3,fill=special,seed=2",
    ],
)
def test_saturated_and_wrong_signs_are_found(line):
    problem, _, expected, outputs = outputs_of(line)
    name = next(iter(outputs))
    assert judge(expected, name, outputs[name]).status in (Status.PASS, Status.WARN)
    wrong = {"saturated: the type's largest finite number": saturate}
    wrong |= {"wrong sign": negate_infinity} if problem.word == "infer" else {}
    for said, change in wrong.items():
        verdict = judge(expected, name, change(outputs[name]))
        assert verdict.status == Status.FAIL
        assert said in verdict.note


def test_infinity_where_nan_must_come_out_and_nan_that_spreads_are_found():
    _, _, expected, outputs = outputs_of(f"{TRAIN},fill=special")
    verdict = judge(expected, "y", nan_to_infinity(outputs["y"]))
    assert verdict.status == Status.FAIL
    assert "infinite where NaN must come out" in verdict.note
    outputs["y"][:, 5] = np.nan
    verdict = judge(expected, "y", outputs["y"])
    assert verdict.status == Status.FAIL
    assert verdict.note.startswith("spread: 60 elements NaN or infinite where the correct value is finite")


# ---------------------------------------------------------------- what has no weight


@pytest.mark.parametrize(("factor", "poison"), [(1.0, "mean"), (1.0, "variance"), (0.0, "x")])
def test_running_statistics_of_no_weight_are_nan_or_left_out(factor, poison):
    problem, good, _, right = outputs_of(f"{TRAIN},fill=randn,factor={factor}")
    spoiled = getattr(good, poison).copy()
    spoiled.reshape(4 if poison == "x" else 1, 6, -1)[:, 2] = np.nan
    inputs = dataclasses.replace(good, **{poison: spoiled})
    literal = execute(problem, inputs, session()).outputs
    name = f"running_{poison}" if poison != "x" else "running_variance"
    assert np.isnan(literal[name]).any()
    other = right[name].copy()
    other[0, 2] *= 1.001
    for values, status, said in (
        (right[name], Status.PASS, ""),
        (literal[name], Status.WARN, "NaN of statistics that have no weight"),
        (other, Status.FAIL, "neither NaN nor what comes without"),
    ):
        verdict = judge(expect(problem, inputs), name, values)
        assert (verdict.status, verdict.unjudged) == (status, 0), verdict
        assert said in verdict.note
        assert bool(said) or "no weight" not in verdict.note


def test_at_a_factor_of_0_running_statistics_stay_even_where_the_batch_overflows():
    _, inputs, expected = case("train,spatial,f32,nchw,8x6x5x4,fill=range,magnitude=1e+37,factor=0")
    old = inputs.variance.copy()
    for values, status in ((old, "PASS"), (np.full_like(old, np.nan), "PASS"), (old * np.float32(1.01), "FAIL")):
        assert judge(expected, "running_variance", values).status.value == status


def test_alpha_0_leaves_the_result_open():
    _, inputs, expected = case(f"{INFER},fill=special,alpha=0,beta=1")
    for y in (inputs.prior, np.where(np.isnan(inputs.x), np.float32(np.nan), inputs.prior)):
        verdict = judge(expected, "y", y)
        assert (verdict.status, verdict.unjudged) == (Status.PASS, 1)
        assert "not judged" in verdict.note


def test_a_nan_that_is_blended_in_must_come_out():
    problem, inputs, _ = case(f"{INFER},fill=randn,alpha=0,beta=1")
    inputs.prior[0, 0, 0, 0] = np.nan
    expected = expect(problem, inputs)
    assert judge(expected, "y", inputs.prior).status == Status.PASS
    verdict = judge(expected, "y", np.nan_to_num(inputs.prior))
    assert verdict.status == Status.FAIL
    assert "swallowed" in verdict.note


# ---------------------------------------------------------------- the marks


def test_infinities_of_both_signs_and_a_scale_of_zero_make_nan():
    def change_x(inputs):
        inputs.x[0, 1, 0, 0], inputs.x[1, 1, 0, 0] = np.inf, -np.inf

    def change_scale(inputs):
        inputs.scale[...] = 0

    for line, name, change in (
        (f"{TRAIN},fill=randn", "saved_mean", change_x),
        (f"{INFER},fill=special,seed=1", "y", change_scale),
    ):
        problem, inputs, _ = case(line)
        change(inputs)
        values, expected = execute(problem, inputs, session()).outputs[name], expect(problem, inputs)
        assert np.isnan(values).any()
        assert judge(expected, name, values).status == Status.PASS
        assert "infinite where NaN must come out" in judge(expected, name, nan_to_infinity(values)).note


def test_a_case_of_finite_values_is_not_walked_twice(monkeypatch):
    _, _, expected, outputs = outputs_of(f"{TRAIN},fill=randn")
    monkeypatch.setattr(not_finite, "find", None)
    assert {v.status for v in judge_call(expected, outputs).values()} == {Status.PASS}


def test_a_tensor_without_a_finite_value_is_judged():
    problem, inputs, _ = case(f"{TRAIN},fill=randn,running=0")
    inputs.x[...] = np.nan
    expected, outputs = expect(problem, inputs), execute(problem, inputs, session()).outputs
    assert {v.status for v in judge_call(expected, outputs).values()} == {Status.PASS}
    assert judge(expected, "y", np.zeros_like(outputs["y"])).status == Status.FAIL


def test_findings_name_the_first_element():
    problem, _, expected, outputs = outputs_of(f"{INFER},fill=special,seed=1")
    where = np.argwhere(np.isinf(outputs["y"]))
    found = not_finite.find(expected, "y", swallow(outputs["y"]), tiers(problem, "y")[-1])
    assert found.judged == len(where) == 1
    (finding,) = found.found
    assert finding.index == tuple(where[0])
    assert str(finding).endswith(f"(first at {finding.index}: 0, definition {finding.right:g})")


def test_a_factor_of_1_replaces_running_statistics_unread(need_device):
    """One rule: of the reference's forward training, of `gather_stats`, and of oneDNN."""
    problem, inputs, _ = case(f"{TRAIN},fill=randn,factor=1,old=nan")
    unset = {"running_mean": inputs.mean, "running_variance": inputs.variance}
    right = reference.forward_training(
        inputs.x, inputs.scale, inputs.bias, epsilon=1e-5, exponential_average_factor=1.0, **unset
    )
    assert np.isfinite(right.running_mean).all()
    assert np.isfinite(right.running_variance).all()
    need_device("onednn")
    onednn = open_session("onednn")
    with onednn.handle:
        assert run_case(problem, onednn).status == Status.PASS
