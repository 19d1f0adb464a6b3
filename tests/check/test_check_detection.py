"""Simulated bugs are found as often as required, and a judge that misses them or cries wolf is found out."""

import json

import pytest
from click.testing import CliRunner

from pybnorm.check.bounds import Status, Verdict
from pybnorm.check.selftest import detection, power
from pybnorm.check.selftest.rows import BUGS as BUGS_OF_ROWS
from pybnorm.check.selftest.simulated import BUGS, STYLES
from pybnorm.cli import main

SMALL = [(dtype, 12544) for dtype in detection.DTYPES]


def verdict(status):
    return Verdict("y", status, "A", 0.5, {"A": 0.5}, 1)


def test_the_table():
    """Half of the settings, the shorter sums; with all six `pybnorm selftest` says the same in about ten seconds."""
    report = detection.run(SMALL)
    assert report.settings == ["f32 m=12544", "f16 m=12544", "bf16 m=12544"]
    assert report.good, detection.render(report)
    kernels = {k.kernel: k for k in report.kernels}
    assert list(kernels) == [*detection.CORRECT, *(row.bug for row in detection.REQUIRED)]
    for style in detection.CORRECT:
        assert kernels[style].counts == {"randn": 0, "sqrteps": 0, "exact": 0, "together": 0}
    for row in detection.REQUIRED:
        if row.together == 6:
            assert kernels[row.bug].counts["together"] == 3, row.bug
    # with fewer settings that many fewer may be found
    assert kernels["dropped element"].required == {"randn": 0, "sqrteps": 0, "exact": 3, "together": 3}


def test_the_longest_sums_in_the_hardest_dtype():
    rows = [r for r in detection.REQUIRED if r.exact == 6]
    report = detection.run([("f32", 100352)], rows)
    assert report.good, detection.render(report)
    assert all(k.counts["exact"] == 1 for k in report.kernels if not k.correct)


def test_the_table_is_of_kernels_that_exist():
    assert {row.bug for row in detection.REQUIRED} <= set(BUGS)
    assert set(detection.CORRECT) == set(STYLES) - {"one_pass"}
    assert {m for _, m in detection.SETTINGS} == {12544, 100352}
    assert len(detection.SETTINGS) == 6


def test_steps_are_told():
    steps = []
    detection.run([("bf16", 12544)], [], lambda *step: steps.append(step))
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
    report = detection.run(SMALL[:1], detection.REQUIRED[1:2])
    text = detection.render(report)
    assert not report.good
    assert ("MISSED" in text) == missed
    assert ("FALSE ALARM" in text) == alarms
    assert "NOT as required" in text


@pytest.mark.parametrize("honest", [True, False])
def test_the_command(monkeypatch, tmp_path, honest):
    whole = detection.run
    monkeypatch.setattr(detection, "run", lambda progress: whole(SMALL[:1], detection.REQUIRED[:2], progress))
    monkeypatch.setattr(power, "QUICK", power.QUICK[:2])
    if not honest:
        monkeypatch.setattr(detection, "judge", lambda *_: verdict(Status.PASS))
    target = tmp_path / "table.json"
    shown = CliRunner().invoke(main, ["selftest", "--json", str(target)])
    assert shown.exit_code == (0 if honest else 1), shown.output
    assert "vector tail" in shown.stdout
    document = json.loads(target.read_text())
    assert document["good"] == honest
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


def test_bugs_are_seen_in_every_output_that_they_reach():
    """The shortest sums, in a few seconds; `pybnorm selftest` has longer ones, with --whole up to 10**6 terms."""
    report = power.run(power.QUICK[:6])
    assert report.good, power.render(report)
    assert len(BUGS_OF_ROWS) >= 80
    assert set(report.found) == set(BUGS_OF_ROWS)
    assert len(report.found["last element dropped"]) == 4
    assert report.judged == 22 * 2 * (5 + 3 + 1)
    text = power.render(report)
    assert "rsqrt off by 2e-6: train m=64 f32 exact: y: no more than roundings of the result" in text
    assert "as required" in text


def test_a_bug_that_is_missed_and_a_style_that_is_accused_are_found_out(monkeypatch):
    monkeypatch.setattr(power, "judge_call", lambda expected, outputs: {n: verdict(Status.PASS) for n in outputs})
    blind = power.run(power.QUICK[1:2])
    assert not blind.good
    assert not blind.found
    assert "MISSED last element dropped: backward m=64 f32 exact: dx: PASS, dscale: PASS, dbias: PASS" in power.render(
        blind
    )
    monkeypatch.setattr(power, "judge_call", lambda expected, outputs: {n: verdict(Status.FAIL) for n in outputs})
    loud = power.run(power.QUICK[2:3])
    assert not loud.missed
    assert len(loud.alarms) == 22
    assert "FALSE ALARM infer m=64 f32 exact: 16 lanes: y FAIL" in power.render(loud)
