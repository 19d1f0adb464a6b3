"""What the outputs of one call say together: on exact data an excuse for rounding must fit all of them."""

import numpy as np
import pytest
from judged_calls import case, made, outputs_of
from selftest_tool import kernels, rows

from pybnorm.check.judging import roundings
from pybnorm.check.judging.bounds import Status, judge, tiers
from pybnorm.check.judging.results import verdict_text
from pybnorm.check.judging.whole_call import counted, judge_call
from pybnorm.check.language.data import generate, sums_are_exact
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import execute
from pybnorm.check.selftest.simulated import session

STATISTICS = {"saved_mean", "saved_inv_variance", "running_mean", "running_variance"}


@pytest.fixture(scope="module")
def long():
    """m = 100,352, in 4 channels and in 32."""
    return {channels: case(f"train,spatial,f32,nchw,32x{channels}x56x56") for channels in (4, 32)}


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["exact", "randn"])
@pytest.mark.parametrize("word", ["sync_train", "sync_backward"])
def test_an_element_that_every_rank_drops_is_seen_in_every_output(word, fill):
    """m = 100,352: within the bound of so long a sum, and of the sums that ranks merge."""
    expected, by_channel = made(f"{word},spatial,f32,nchw,32x16x56x56,fill={fill}")
    right = judge_call(expected, rows.outputs(rows.Kernel(), by_channel))
    assert {v.status for v in right.values()} == {Status.PASS}, right
    for bug in ("last element dropped", "first element twice"):
        wrong = judge_call(expected, rows.outputs(rows.BUGS[bug], by_channel))
        hidden = {name for name in wrong if fill == "randn" and "variance" in name}  # only exact data show them
        assert {v.status for name, v in wrong.items() if name not in hidden} == {Status.FAIL}, (bug, wrong)


def test_ranks_of_exact_data_have_sums_without_rounding():
    problem = Problem.parse("sync_train,spatial,f32,nchw,7x16x3x5,ranks=4")
    x = generate(problem).x.astype(np.float64)
    assert sums_are_exact(problem)
    assert not sums_are_exact(Problem.parse("sync_train,spatial,f32,nchw,7x16x3x5,fill=paired"))
    shares, first, means = problem.shares, 0, []
    for images in shares:
        if images:
            own = np.moveaxis(x[first : first + images], 1, 0).reshape(16, -1)
            means.append(own.mean(axis=1))
            assert (own.mean(axis=1) * 2 % 1 == 0).all()  # a multiple of 1/2, from every one of its elements
        first += images
    assert len({tuple(mean) for mean in means}) == len(means) == 3  # the first rank has none


def test_welford_within_ranks_is_excused_and_what_no_rank_rounds_is_not():
    expected, by_channel = made("sync_train,spatial,f32,nchw,16x16x14x14")
    for style in ("Welford, one chain", "one pass", "multiplied by 1/m"):
        verdicts = judge_call(expected, rows.outputs(rows.STYLES[style], by_channel))
        allowed = {Status.PASS, Status.WARN} if style == "one pass" else {Status.PASS}
        assert {v.status for v in verdicts.values()} <= allowed, (style, verdicts)
    for bug in ("mean over m - 1", "1/m off by 1e-4", "unbiased variances of the ranks merged"):
        verdicts = judge_call(expected, rows.outputs(rows.BUGS[bug], by_channel))
        reached = STATISTICS - {"saved_mean", "running_mean"} if "unbiased" in bug else {"saved_mean", "running_mean"}
        assert {verdicts[name].status for name in reached} == {Status.FAIL}, (bug, verdicts)


@pytest.mark.parametrize("fill", ["exact", "paired"])
@pytest.mark.parametrize("output", ["saved_mean", "running_mean"])
def test_a_factor_of_the_mean_is_named_on_exact_data(fill, output):
    _, _, expected = case(f"train,spatial,f32,nchw,8x16x56x56,fill={fill}")
    right = {name: expected.outputs[name] for name in ("saved_mean", "running_mean")}

    def named(change):
        moved = right["saved_mean"] * change
        moved = {"saved_mean": right["saved_mean"] + moved, "running_mean": right["running_mean"] + 0.25 * moved}
        return roundings.factors(expected, {output: moved[output].astype(np.float32)})

    assert not named(0.0)
    assert named(1e-4)[output].startswith("as if the mean were multiplied by 1.0001")
    # alike in size, not in sign: what a recurrence may round
    assert not named(1e-4 * np.where(np.arange(16) % 3, 1, -1).reshape(right["saved_mean"].shape))


def test_an_output_that_is_exact_takes_the_excuse_from_the_others(long):
    problem, inputs, expected = long[32]
    outputs = execute(problem, inputs, session(bug="biased running variance")).outputs
    verdicts = judge_call(expected, outputs)
    assert {n for n, v in verdicts.items() if v.status == Status.FAIL} == {"running_variance"}
    assert "takes the biased variance" in verdicts["running_variance"].convention
    # with few channels, or a mean that is off as well, it may have been the recurrence
    outputs["saved_mean"] = np.nextafter(outputs["saved_mean"], np.float32(9))
    outputs["saved_inv_variance"] = outputs["saved_inv_variance"] * np.float32(1 + 2e-6)
    assert judge_call(expected, outputs)["running_variance"].status == Status.PASS


def test_a_mean_that_no_recurrence_makes_takes_the_excuse_from_the_others(long):
    """Where the mean is 0 the recurrence rounds next to nothing."""
    problem, inputs, expected = long[4]
    outputs = execute(problem, inputs, session("welford")).outputs
    outputs["saved_inv_variance"] *= np.float32(1 + 3e-6)
    untold = judge_call(expected, outputs)["saved_inv_variance"]
    assert (untold.status, "16 channels or more can" in untold.note) == (Status.MISTRUSTED, True)
    outputs["saved_mean"][0, 0] += 0.5 / problem.m
    verdicts = judge_call(expected, outputs)
    assert verdicts["saved_mean"].status == Status.FAIL
    assert verdicts["saved_inv_variance"].status == Status.FAIL
    assert "saved_mean is not as it rounds" in verdicts["saved_inv_variance"].note


@pytest.mark.parametrize("line", ["train,spatial,f32,nchw,4x3x3x4,fill=randn", "backward,spatial,bf16,nchw,4x3x4x4"])
def test_a_verdict_says_how_small_an_error_would_have_been_noticed(line):
    problem, _, expected, outputs = outputs_of(line)
    for name, verdict in judge_call(expected, outputs).items():
        assert verdict.status == Status.PASS
        assert 0 < verdict.noticed < 0.1
        parts = expected.parts(name, outputs[name], tiers(problem, name)[:1])
        ratio = np.concatenate([(p.classes[0][0] / np.abs(p.reference)).ravel() for p in parts])
        assert verdict.noticed == pytest.approx(ratio.min())
        assert f"a relative error of {verdict.noticed:.1e} would have been noticed" in verdict_text(verdict)
        assert expected.outputs[name].size == ratio.size


@pytest.mark.parametrize(("dims", "chains"), [("100352x16x1x1", 16), ("100352x16x1x1", 64), ("25088x64x1x1", 2)])
def test_the_width_of_the_excuse_is_that_of_the_recurrence(dims, chains):
    """Sums of squares in long chains are too small by more than the mean's scatter tells."""
    problem, inputs, expected = case(f"train,spatial,f32,nchw,{dims}")
    mean, variance = kernels.welford(rows.Rows(problem, inputs).x, chains)
    right, v = expected.moments.mean.reshape(-1, 1), expected.moments.variance.reshape(-1, 1)
    away = right != 0
    scatter = np.sqrt(np.mean(((mean - right)[away] / np.spacing(np.abs(right[away]).astype(np.float32))) ** 2))
    assert (np.abs(variance - v) <= counted(scatter, problem.m).spread * 2.0**-24 * v).all()


def test_data_whose_squares_overflow_say_what_is_correct():
    problem, _, expected = case("train,spatial,f32,nchw,8x3x4x4,fill=range,magnitude=1e20")
    wide, infinite = expected.outputs["saved_inv_variance"].astype(np.float32), np.zeros(problem.parameter_dims, "f4")
    for got in (wide, infinite):
        verdict = judge(expected, "saved_inv_variance", got)
        assert verdict.status == Status.INCONCLUSIVE
        assert "the squares of x overflow" in verdict.note
        assert "1/sigma 0" in verdict.note
    _, _, right = case("train,spatial,f32,nchw,8x3x4x4")
    assert "overflow" not in judge(right, "saved_mean", right.outputs["saved_mean"].astype(np.float32)).note
