"""Where the wrong elements of an output are: the smallest description, and what of it the verdict says."""

import math
import types

import numpy as np
import pytest
from judged_calls import made
from selftest_tool.rows import Kernel, outputs
from tables import table

from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.judging.bounds.where import within
from pybnorm.check.judging.results import CaseResult, from_json, to_json, verdict_text
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.report import html

NCHW, NHWC = (3136, 196, 14, 1), (3136, 1, 224, 16)
SHAPE = (8, 16, 14, 14)


def places(shape, strides):
    """Every coordinate of every element."""
    n, c, *plane = np.indices(shape)
    inner = math.prod(shape[2:])
    p = np.zeros(shape, int)
    for axis, size in zip(plane, shape[2:], strict=True):
        p = p * size + axis
    memory = sum(i * s for i, s in zip((n, c, *plane), strides, strict=True))
    own = dict(zip("hw", plane[-2:], strict=False))
    return types.SimpleNamespace(**own, n=n, c=c, p=p, k=n * inner + p, memory=memory)


KINDS = {
    "channel 5": (lambda a: a.c == 5, NCHW),
    "image 3": (lambda a: a.n == 3, NHWC),
    "row 6": (lambda a: a.h == 6, NCHW),
    "the last column": (lambda a: a.w == 13, NCHW),
    "the first 3 channels": (lambda a: a.c < 3, NCHW),
    "the last 4 channels": (lambda a: a.c > 11, NHWC),
    "channels 4 to 8": (lambda a: (a.c > 3) & (a.c < 9), NCHW),
    "channels 3 and 10": (lambda a: (a.c == 3) | (a.c == 10), NCHW),
    "channels c with c % 4 == 3": (lambda a: a.c % 4 == 3, NCHW),
    "images n with n % 2 == 1": (lambda a: a.n % 2 == 1, NCHW),
    "the last 4 elements of every plane": (lambda a: a.p >= 192, NCHW),
    "the first 5 elements of every plane": (lambda a: a.p < 5, NCHW),
    "the last 31 elements of every channel": (lambda a: a.k >= 1537, NCHW),
    "channels c with c % 3 == 1": (lambda a: a.c % 3 == 1, NCHW),
    "rows h with h % 3 == 2": (lambda a: a.h % 3 == 2, NHWC),
    "the first and the last column": (lambda a: (a.w == 0) | (a.w == 13), NCHW),
    "elements k of a channel with k % 64 >= 60": (lambda a: a.k % 64 >= 60, NCHW),
    "elements k in memory with k % 64 == 7 (64 apart)": (lambda a: a.memory % 64 == 7, NCHW),
    "elements k in memory with k % 64 == 9 (64 apart)": (lambda a: a.memory % 64 == 9, NHWC),
    "the last 3 elements in memory": (lambda a: a.memory >= 25085, NCHW),
    "the first 24 elements in memory": (lambda a: a.memory < 24, NHWC),
    "channel 2, image 6": (lambda a: (a.c == 2) & (a.n == 6), NCHW),
    "channels 1 to 5, the last 31 elements of every plane": (lambda a: ((a.c > 0) & (a.c < 6)) & (a.p >= 165), NCHW),
    "the last 8 channels, row 0": (lambda a: (a.h == 0) & (a.c >= 8), NCHW),
}
"""What is said of elements whose coordinates are so: n, c, h, w, p in the plane, k in the channel, and in memory."""


@table("share", [1.0, 0.5])
@table("said", KINDS)
def test_each_kind_of_place_is_named_whether_all_or_half_of_it_is_wrong(said, share):
    wrong, strides = KINDS[said]
    found = wrong(places(SHAPE, strides)) & (np.random.default_rng(4).random(SHAPE) < share)
    where = within(found.astype(np.uint8), strides)
    described = where.text.partition(":")[0]
    if share == 1 or np.count_nonzero(found) > 20:  # of a dozen the half may look like less
        assert described == said, where.text
    assert where.wrong == np.count_nonzero(found)
    if share == 1:
        assert where.right == 0
        assert where.text.endswith("all" not in where.text or "elements are wrong, no other"), where.text


def test_what_is_not_in_the_description_is_counted():
    found = np.zeros(SHAPE, np.uint8)
    found[:, 5] = 1
    found[3, 9, 4, 4] = found[7, 1, 0, 13] = 1
    where = within(found, NCHW)
    assert where.text == "channel 5: all 1568 elements are wrong, and 2 elsewhere"
    assert (where.wrong, where.right) == (1568, 0)


@pytest.mark.parametrize("share", [0.003, 0.05, 0.4, 0.9])
def test_elements_without_a_pattern_are_not_given_one(share):
    for seed in range(8):
        found = np.random.default_rng(seed).random(SHAPE) < share
        assert "without a pattern" in within(found.astype(np.uint8), NCHW).text
    assert within(np.zeros(SHAPE, np.uint8), NCHW).text == ""
    assert within(np.ones(SHAPE, np.uint8), NCHW).text == "all elements are wrong"


def test_few_statistics_are_listed():
    found = np.zeros((1, 6, 1, 1), np.uint8)
    found[:, 5] = 1
    assert within(found).text == "channel 5, no other"
    found[:, 1] = 1
    assert within(found).text == "channels 1 and 5, no other"
    assert within(found).picture == []


def test_the_picture_shows_channels_and_positions():
    found = np.zeros((2, 48, 4, 16), np.uint8)
    found[1, 5, 3, 15] = 10
    found[0, 40, 0, 0] = 2
    picture = within(found, (3072, 64, 16, 1)).picture
    assert (len(picture), {len(row) for row in picture}) == (24, {64})
    assert [(r, c, x) for r, row in enumerate(picture) for c, x in enumerate(row) if x != "."] == [
        (2, 63, "x"),
        (20, 0, "2"),
    ]


def test_a_verdict_says_where_and_how_far_off():
    expected, by_channel = made("train,spatial,f32,nchw,6x18x7x2,fill=randn")
    outputs_ = outputs(Kernel(), by_channel)
    right = judge_call(expected, outputs_)
    assert {(v.status, v.where, v.covered, len(v.picture)) for v in right.values()} == {(Status.PASS, "", 0, 0)}
    outputs_["y"][:, 5] += 1
    outputs_["saved_mean"][:, 17] = np.nan
    verdicts = judge_call(expected, outputs_)
    y, mean = verdicts["y"], verdicts["saved_mean"]
    assert y.where == "channel 5: all 84 elements are wrong, no other"
    assert (y.covered, y.included, y.over) == (84, 0, 84)
    assert y.picture[5] == y.picture[5].replace(".", "")
    assert set("".join(y.picture[:5] + y.picture[6:])) == {"."}
    assert mean.where == "channel 17, no other"
    text = verdict_text(y)
    assert text.startswith("FAIL, wrong: ")
    assert f"; {y.where}" in text
    assert "class B" not in text


def test_a_page_and_a_document_have_the_picture():
    verdict = Verdict("y", Status.FAIL, "A", 2.0, {"A": 2.0}, 6, where="channel 1", covered=2, picture=["...", ".9x"])
    result = CaseResult("onednn", "train,spatial,f32,nchw,1x2x3", Status.FAIL, [verdict])
    assert [block[2] for block in html._details(result) if block[0] == "picture"] == [["...", ".9x"]]
    assert from_json(CaseResult, to_json(result)).verdicts == [verdict]


def test_elements_that_must_not_be_finite_are_found():
    expected, _ = made("infer,spatial,f32,nchw,4x5x6x6,fill=special")
    with np.errstate(all="ignore"):
        y = expected.outputs["y"].astype(np.float32)
    swallowed = np.isfinite(y)
    y[~swallowed] = 1.0
    verdict = judge_call(expected, {"y": y})["y"]
    assert verdict.status == Status.FAIL
    assert verdict.where != ""
    assert verdict.covered > 0


def test_a_large_output_is_looked_at_in_parts():
    """Most of the places of a channel are drawn, all are counted."""
    found = (np.random.default_rng(1).random((32, 8, 64, 64)) < 0.5).astype(np.uint8)
    found[:, :, :, 60:] = 0
    found[:, [0, 1, 7]] = 0
    where = within(found, (32768, 4096, 64, 1))
    assert where.text.startswith("channels 2 to 6, the first 60 columns: ")
    assert where.wrong == np.count_nonzero(found)
    assert where.right == 32 * 5 * 64 * 60 - where.wrong
