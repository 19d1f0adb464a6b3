"""What Welford's recurrence excuses, and when; what is not asked of a call that is wrong."""

import math

import pytest
from judged_calls import judged, made
from selftest_tool.rows import BUGS, STYLES, outputs

from pybnorm.check.judging import whole_call
from pybnorm.check.judging.bounds import LONG, Status
from pybnorm.check.judging.standalone import judge
from pybnorm.check.judging.whole_call import Record
from pybnorm.check.language.data import sums_are_exact
from pybnorm.check.language.lines import load_suite

FEW, ENOUGH = "train,spatial,f32,nchw,32x4x112x112", "train,spatial,f32,nchw,32x16x56x56"


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["partial sums in bfloat16", "rsqrt off by 1e-5"])
def test_few_channels_cannot_tell_and_sixteen_do(bug):
    few, enough = judged(FEW, BUGS[bug]), judged(ENOUGH, BUGS[bug])
    assert Status.FAIL not in {v.status for v in few.values()}
    untold = [v for v in few.values() if v.status == Status.MISTRUSTED]
    assert untold
    assert all("16 channels or more can" in v.note for v in untold)
    assert Status.FAIL in {v.status for v in enough.values()}


def test_such_a_case_is_mistrusted_as_a_whole():
    expected, by_channel = made(FEW)
    results = outputs(BUGS["partial sums in bfloat16"], by_channel)
    assert judge(expected.problem, results).status == Status.MISTRUSTED


@pytest.mark.slow
@pytest.mark.parametrize("line", [ENOUGH, "train,spatial,f16,nhwc,16x16x64x64", "train,spatial,f32,nchw,64x32x32x32"])
def test_a_running_variance_has_no_excuse_where_what_is_saved_is_exact(line):
    wrong = judged(line, BUGS["biased running variance"])["running_variance"]
    assert wrong.status == Status.FAIL
    assert "takes the biased variance" in wrong.convention
    for style, kernel in STYLES.items():
        verdicts = judged(line, kernel).values()
        assert all(v.status == Status.PASS for v in verdicts), (style, [(v.output, v.note) for v in verdicts])


@pytest.mark.slow
def test_long_exact_lines_have_sixteen_channels():
    for suite in ("smoke", "standard"):
        for problem in load_suite(suite):
            if sums_are_exact(problem) and problem.recomputes and problem.m >= LONG:
                assert math.prod(problem.parameter_dims) >= whole_call.FEWEST, str(problem)


def test_roundings_are_measured_where_nothing_is_wrong_or_if_asked(monkeypatch):
    asked, beyond = [], whole_call.beyond
    monkeypatch.setattr(whole_call, "beyond", lambda *given: asked.append(given) or beyond(*given))
    line = "train,spatial,f32,nchw,8x16x32x32,fill=randn"
    right, wrong = next(iter(STYLES.values())), BUGS["mean not subtracted"]
    for count, given in ((1, (right,)), (1, (wrong,)), (2, (wrong, Record()))):
        judged(line, *given)
        assert len(asked) == count
