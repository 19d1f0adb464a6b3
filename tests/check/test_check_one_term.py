"""One term that is missing from long sums is found among the places of the data; a correct kernel has none."""

import numpy as np
import pytest
from judged_calls import made
from selftest_tool import rows
from tables import table

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.deviations import Rows
from pybnorm.check.judging.one_term import one_term
from pybnorm.check.judging.roundings import beyond
from pybnorm.check.judging.whole_call import judge_call

LONG = "32x16x56x56"  # m = 100,352
FOUND = {
    "last element dropped from the variance": "the last terms of the variance, 1 of them, were missing",
    "an element in the middle dropped": "variance was missing in every channel: image 10, element 2090",
    "first element twice": "the first terms of the variance, 1 of them, were counted twice",
    "an element in the middle read from beside it": "one term of the variance was read from beside it",
    "last 7 elements dropped": "the last terms of the variance, 7 of them, were missing",
}


@pytest.mark.slow
@table("line", ["train,spatial,f32,nchw,{},fill=randn", "train,spatial,f32,nhwc,{},fill=relu"])
@table("bug", FOUND)
def test_what_hides_in_the_width_of_a_variance_is_found(line, bug):
    expected, by_channel = made(line.format(LONG))
    got = rows.outputs(rows.BUGS[bug], by_channel)
    assert Status.FAIL in {v.status for v in judge_call(expected, got).values()}
    seen = beyond(expected, got)  # a case is not searched for them where a bound has failed
    assert FOUND[bug] in seen.notes["saved_inv_variance"]
    assert seen.over["saved_inv_variance"].all()


# One channel, channels that share values, and terms that are 0 in most channels: there is no place among them.
CORRECT = [
    *(f"train,spatial,f32,nchw,8x32x28x28,fill={fill}" for fill in ("randn", "image", "level")),
    *(f"backward,spatial,bf16,nchw,8x32x28x28,fill={fill}" for fill in ("relu", "sparse", "level")),
    "train,spatial,f32,nchw,32x1x56x56,fill=randn,seed=6",
    "train,spatial,bf16,nchw,2x32x32x32,fill=sparse,seed=33",
    "train,spatial,f32,nchw,8x64x32x33,fill=image",
    "backward,spatial,f32,nchw,8x64x32x33,fill=level,seed=2",
]


@pytest.mark.slow
@table("line", CORRECT)
@table("style", rows.STYLES)
def test_no_correct_kernel_lacks_a_term(line, style):
    expected, by_channel = made(line)
    found = judge_call(expected, rows.outputs(rows.STYLES[style], by_channel)).values()
    assert Status.FAIL not in {v.status for v in found}


def test_deviations_of_0_and_of_no_place_say_nothing():
    expected, _ = made("train,spatial,f32,nchw,4x16x28x28,fill=relu")
    by_place = Rows(expected)
    other = np.random.default_rng(1).normal(size=16)
    for deviations in (np.zeros(16), other, np.full(16, np.nan)):
        assert one_term(by_place, "mean", {"saved_mean": deviations}, 1e-12) == {}
    deviations = -np.array([by_place.channel(number)[0][700] for number in range(16)])
    assert "image 0, element 700" in one_term(by_place, "mean", {"saved_mean": deviations}, 1e-12)["saved_mean"]
