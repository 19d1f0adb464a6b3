"""Cases of the packaged suites notice a change of each input, and are not asked again when they run."""

import functools

import pytest

from pybnorm.check.judging.bounds import trust, untrusted
from pybnorm.check.judging.bounds.trust import SUITES, case_key
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import load_suite
from pybnorm.check.language.problem import Problem

LINE = "train,spatial,f32,nchw,4x3x5x2,fill=randn"


@functools.cache
def cases():
    return list({case_key(p): p for suite in SUITES for p in load_suite(suite)}.values())


def blind(problems):
    return {str(p): names for p in problems if (names := untrusted(p, generate(p)))}


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
def test_every_packaged_case_is_trusted(share):
    assert len(cases()) > 3000
    assert not blind(cases()[share::8])


@pytest.mark.parametrize("other", ["infer,spatial,f32,nchw,4x3x5x2,fill=randn", LINE + ",seed=1", LINE + ",alpha=2"])
def test_another_case_has_another_key(other):
    assert case_key(Problem.parse(other)) != case_key(Problem.parse(LINE))


def test_how_a_case_is_called_makes_no_difference():
    assert case_key(Problem.parse(LINE)) == case_key(Problem.parse(LINE.replace("nchw", "nhwc") + ",misalign=1"))


@pytest.mark.slow
def test_only_other_cases_are_asked_and_once(monkeypatch):
    asked = []
    monkeypatch.setattr(trust, "_computed", {})
    monkeypatch.setattr(trust, "untrusted", lambda *arguments: asked.append(arguments) or ["bias"])
    for line in (str(cases()[0]), LINE + ",seed=77", LINE + ",seed=77"):
        problem = Problem.parse(line)
        blind = trust.blind_inputs(problem, generate(problem))
        assert blind == ([] if line == str(cases()[0]) else ["bias"])
    assert len(asked) == 1
    trust.blind_inputs(cases()[0], generate(cases()[0]), one_pass=True)  # the one-pass bound accepts more
    assert len(asked) == 2


def test_the_larger_suite_is_read_after_a_few_other_cases_only(monkeypatch):
    read, smoke = [], {case_key(p) for p in load_suite("smoke")}
    monkeypatch.setattr(trust, "_keys", lambda suite: read.append(suite) or frozenset())
    monkeypatch.setattr(trust, "_computed", {})
    monkeypatch.setattr(trust, "untrusted", lambda *arguments: [])
    for seed in range(trust.FEW + 1):
        assert set(read) <= {"smoke"}
        problem = Problem.parse(f"{LINE},seed={seed + 1000}")
        assert case_key(problem) not in smoke
        trust.blind_inputs(problem, generate(problem))
    assert "standard" in read
