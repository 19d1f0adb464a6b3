"""Simulated bugs are found as often as required, and a judge that misses them or cries wolf is found out."""

import importlib.resources
import json

import pytest
from click.testing import CliRunner
from selftest_tool import more_faults, power
from selftest_tool.rows import BUGS as BUGS_OF_ROWS
from selftest_tool.rows import STYLES as STYLES_OF_ROWS

from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.language.problem import COMPOSED
from pybnorm.check.selftest import detection, faults
from pybnorm.cli import main

SMALL = [(dtype, 12544) for dtype in detection.DTYPES]


def verdict(status):
    return Verdict("y", status, "A", 0.5, {"A": 0.5}, 1)


@pytest.mark.slow
def test_the_table():
    """Half of the settings, the shorter sums; with all six `pybnorm selftest` says the same in about ten seconds."""
    report = detection.run(SMALL)
    assert report.settings == ["f32 m=12544", "f16 m=12544", "bf16 m=12544"]
    assert report.good, detection.render(report)
    kernels = {k.kernel: k for k in report.kernels}
    assert list(kernels) == [*detection.CORRECT, *detection.REQUIRED]
    for style in detection.CORRECT:
        assert kernels[style].counts == {"randn": 0, "sqrteps": 0, "exact": 0, "together": 0}
    for bug, counts in detection.REQUIRED.items():
        if max(counts) == 6:
            assert kernels[bug].counts["together"] == 3, bug
    # with fewer settings that many fewer may be found
    assert kernels["dropped element"].required == {"randn": 0, "sqrteps": 0, "exact": 3, "together": 3}


@pytest.mark.slow
def test_the_longest_sums_in_the_hardest_dtype():
    report = detection.run([("f32", 100352)], {b: counts for b, counts in detection.REQUIRED.items() if counts[2] == 6})
    assert report.good, detection.render(report)
    assert all(k.counts["exact"] == 1 for k in report.kernels if not k.correct)


def test_steps_are_told():
    steps = []
    detection.run([("bf16", 12544)], {}, lambda *step: steps.append(step))
    assert [(done, total) for _, done, total in steps] == [(0, 3), (1, 3), (2, 3)]
    assert steps[0][0] == "bf16 m=12544, randn"


@pytest.mark.parametrize(
    ("status", "missed", "alarms"),
    [
        (Status.PASS, True, False),
        (Status.FAIL, False, True),
        (Status.WARN, False, True),
        (Status.INCONCLUSIVE, True, True),  # neither an acquittal nor a finding
    ],
)
def test_a_judge_that_always_says_the_same_is_found_out(monkeypatch, status, missed, alarms):
    monkeypatch.setattr(detection, "judge", lambda *_: verdict(status))
    report = detection.run(SMALL[:1], {"vector tail": detection.REQUIRED["vector tail"]})
    text = detection.render(report)
    assert not report.good
    assert ("MISSED" in text) == missed
    assert ("FALSE ALARM" in text) == alarms
    assert "NOT as required" in text


@pytest.mark.slow
@pytest.mark.parametrize("honest", [True, False])
def test_the_command(monkeypatch, tmp_path, honest):
    whole = detection.run
    required = dict(list(detection.REQUIRED.items())[:2])
    monkeypatch.setattr(detection, "run", lambda progress: whole(SMALL[:1], required, progress))
    few = faults.run(dict(list(faults.FAULTS.items())[:2]))
    monkeypatch.setattr(faults, "run", lambda: few)
    if not honest:
        monkeypatch.setattr(detection, "judge", lambda *_: verdict(Status.PASS))
    target = tmp_path / "table.json"
    shown = CliRunner().invoke(main, ["selftest", "--json", str(target)])
    assert shown.exit_code == (0 if honest else 1), shown.output
    assert "vector tail" in shown.stdout
    document = json.loads(target.read_text())
    assert document["good"] == honest
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((importlib.resources.files("pybnorm.check") / "schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert [f"{e.json_path}: {e.message}" for e in validator.iter_errors(document)] == []
    assert not validator.is_valid(document | {"unknown": 1})
    assert document["environment"]["numpy"]
    kernel = document["kernels"][-1]
    assert kernel["kernel"] == "vector tail"
    assert kernel["counts"]["together"] == (1 if honest else 0)
    assert kernel["found"]["exact"] == (["f32 m=12544"] if honest else [])
    printed = CliRunner().invoke(main, ["selftest", "--json"])
    assert json.loads(printed.stdout)["settings"] == ["f32 m=12544"]
    refused = CliRunner().invoke(main, ["selftest", "--json", str(tmp_path / "no" / "where")])
    assert refused.exit_code == 2


# ---------------------------------------------------------------- every length of a sum


@pytest.mark.slow
def test_bugs_are_seen_in_every_output_that_they_reach():
    """Sums of 64 and of 3,136 terms; the tool has longer ones, with --whole up to 10**6 terms."""
    shortest = [s for s in power.QUICK if s.m == 64 and s.dtype != "f16"]
    report = power.run(shortest)
    assert report.good, power.render(report)
    assert len(BUGS_OF_ROWS) >= 80
    longer = {"32 elements dropped, those of one warp", "32 elements twice, those of one warp"}
    longer |= {"last element of each block of 256 dropped"}
    unseen = {"every 32nd block of 1024 skipped"}
    assert set(report.found) == set(BUGS_OF_ROWS) - longer - unseen
    assert len({setting for setting, _ in report.found["last element dropped"]}) == 2 * 2 * 2 + 2 * (3 + 2) + 1 + 2 * 4
    assert len(shortest) == 2 * 2 * 3 + 2 * 7 + 1 + 2 * 5
    outputs = 2 * 2 * (5 + 3 + 1) + 2 * (12 + 5 + 3) + 5 + 2 * (5 + 5 + 1 + 3 + 4)
    assert report.judged == len(STYLES_OF_ROWS) * outputs
    assert len(STYLES_OF_ROWS) >= 20
    text = power.render(report)
    assert "rsqrt off by 2e-6: train m=64 f32 exact: y: no more than roundings of the result" in text
    assert "as required" in text
    more = power.run([s for s in power.QUICK if s.m == 3136 and s.fill == "exact"], longer, {})
    assert more.good, power.render(more)
    assert set(more.found) == longer


# ---------------------------------------------------------------- calls


@pytest.mark.slow
def test_faults_of_calls_are_found_and_the_right_kernel_passes():
    report = faults.run()
    more = faults.run(more_faults.FAULTS, more_faults.FaultyCalls)
    assert all(seen.good for seen in report + more), faults.render(report + more)
    assert [seen.fault for seen in report + more] == [*faults.FAULTS, *more_faults.FAULTS]
    assert all(seen.found for seen in report + more)
    every = {line.split(",")[0] for seen in more for line in seen.found}
    assert every >= {*COMPOSED, "train", "backward", "infer"}


def test_a_fault_that_is_missed_and_a_right_kernel_that_is_accused_are_told(monkeypatch):
    some = dict(list(faults.FAULTS.items())[:2])
    for status, missed, alarms in ((Status.PASS, 9, 0), (Status.FAIL, 0, 9)):
        made = CaseResult("onednn", "", status)
        monkeypatch.setattr(faults, "run_case", lambda *_, made=made: made)
        report = faults.run(some)
        assert [(len(s.missed), len(s.alarms)) for s in report] == [(missed, alarms)] * 2
        assert not any(seen.good for seen in report)
        assert ("MISSED" if missed else "FALSE ALARM") in faults.render(report)
