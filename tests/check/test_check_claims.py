"""Records made of runs, by version and device: what they hold, what losing it is, and how a runner demands one."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from pybnorm import devices
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import support
from pybnorm.cli import main

VERSION = (3, 2, 7)
HERE, ELSEWHERE = "one processor", "another"


def result(line, status=Status.PASS, repeat="equal"):
    return CaseResult("onednn", line, status, repeat="" if status == Status.UNSUPPORTED else repeat)


RESULTS = [
    result("train,spatial,f32,nchw,2x3x4x5"),
    result("train,spatial,f32,nhwc,2x3x4x5"),
    result("train,spatial,f32,nchw,2x3x4x5,beta=1"),
    result("train,spatial,f32,nhwc,2x3x4x5,beta=1", Status.UNSUPPORTED),
    result("train,spatial,bf16,nchw,4x3x4x5"),
    result("train,spatial,bf16,nchw,2x3", Status.UNSUPPORTED),
    result("backward,spatial,f32,nchw,2x3x4x5", repeat="dx"),
    result("backward,spatial,f32,nchw,2x3x4x6"),
    result("backward,spatial,f32,nchw,2x3x4x6,saved=0"),
    result("infer,spatial,f32,nchw,2x3x4x5,algorithm=auto"),
    result("infer,spatial,f32,nchw,2x3x4x5,fill=range", Status.UNSUPPORTED),
    result("a line of another version"),
]


def test_a_record_holds_what_ran_and_what_repeated():
    record = support.of_run(RESULTS, VERSION, HERE, "here")
    assert (record["first"], record["last"], record["source"]) == ([3, 2, 7], [3, 2, 7], "here")
    claimed = {
        "train,spatial,f32,nchw,2x3x4x5": True,
        "train,spatial,f32,nchw,2x3x4x5,alpha=2": True,
        "train,spatial,f32,nhwc,2x3x4x5": True,
        "train,spatial,f32,nhwc,2x3x4x5,alpha=2": False,
        "train,spatial,bf16,nchw,2x3x4x5": True,
        "train,spatial,bf16,nchw,2x3": False,
        "train,spatial,f32,nchw,2x3x4": False,
        "train,spatial,f32,nchw,9x3x40x50": False,
        "backward,spatial,f32,nchw,2x3x4x5": True,
        "infer,spatial,f32,nchw,2x3x4x5": True,
        "infer,peract,f32,nchw,2x3x4x5": False,
    }
    assert {line: support.claimed(record, Problem.parse(line)) for line in claimed} == claimed
    repeatable = {
        "train,spatial,f32,nchw,2x3x4x5,fill=randn": True,
        "train,spatial,f32,nchw,9x3x4x5": False,
        "backward,spatial,f32,nchw,2x3x4x5": False,
        "backward,spatial,f32,nchw,2x3x4x5,saved=0": True,
        "infer,spatial,f32,nchw,2x3x4x5": False,
        "infer,spatial,f32,nchw,2x3x4x5,algorithm=auto": True,
    }
    assert {line: support.repeatable(record, Problem.parse(line)) for line in repeatable} == repeatable


@pytest.fixture
def own_records(tmp_path, monkeypatch):
    monkeypatch.setenv(support.VARIABLE, str(tmp_path))
    support.records.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    support.records.cache_clear()


def test_a_record_of_this_version_holds_beside_the_other_and_can_be_lost(own_records):
    text = support.with_record([], support.of_run(RESULTS, VERSION, HERE, "here"))
    (own_records / "onednn.json").write_text(text)
    assert support.run_of("onednn", VERSION, HERE)["source"] == "here"
    assert support.run_of("onednn", (3, 2, 8), HERE) is None
    assert support.record_of("onednn", VERSION)["first"] == [3, 0]
    problem = Problem.parse("train,spatial,f32,nchw,2x3x4x5,fill=randn")
    assert support.check("onednn", VERSION, HERE, problem, Status.PASS, "equal") == support.CLAIMED
    assert support.check("onednn", VERSION, HERE, problem, Status.PASS, "y") == support.NO_LONGER_REPEATABLE
    assert support.check("onednn", (3, 2, 8), HERE, problem, Status.PASS, "y") == support.CLAIMED
    again = support.with_record(json.loads(text), support.of_run(RESULTS[:2], VERSION, HERE, "later"))
    assert [r["source"] for r in json.loads(again)] == ["later"]
    assert max(map(len, again.splitlines())) < 200


def test_what_repeats_on_one_device_is_no_claim_for_another(own_records):
    problem = Problem.parse("train,spatial,f32,nchw,2x3x4x5,fill=randn")
    other = [dataclasses.replace(r, repeat="y") if r.repeat else r for r in RESULTS]
    text = support.with_record([], support.of_run(RESULTS, VERSION, HERE, "here"))
    text = support.with_record(json.loads(text), support.of_run(other, VERSION, ELSEWHERE, "there"))
    assert [r["device"] for r in json.loads(text)] == [HERE, ELSEWHERE]
    (own_records / "onednn.json").write_text(text)
    assert support.check("onednn", VERSION, HERE, problem, Status.PASS, "y") == support.NO_LONGER_REPEATABLE
    assert support.check("onednn", VERSION, ELSEWHERE, problem, Status.PASS, "y") == support.CLAIMED
    assert support.run_of("onednn", VERSION, "a third") is None
    assert support.check("onednn", VERSION, "a third", problem, Status.PASS, "y") == support.CLAIMED  # of every device


def test_what_one_build_does_is_no_claim_for_another_of_its_version(own_records):
    problem = Problem.parse("train,spatial,f32,nchw,2x3x4x5,fill=randn")
    text = support.with_record([], support.of_run(RESULTS, VERSION, HERE, "every"))
    (own_records / "onednn.json").write_text(text)
    assert support.run_of("onednn", VERSION, HERE, "aa")["source"] == "every"
    for build in ("aa", "bb", "aa"):
        text = support.with_record(json.loads(text), support.of_run(RESULTS, VERSION, HERE, f"of {build}", build))
    assert [r["source"] for r in json.loads(text)] == ["of bb", "of aa"]
    (own_records / "onednn.json").write_text(text)
    support.records.cache_clear()
    for build, said in (("bb", support.NO_LONGER_REPEATABLE), ("cc", support.CLAIMED), ("", support.CLAIMED)):
        assert support.check("onednn", VERSION, HERE, problem, Status.PASS, "y", build) == said
    assert support.run_of("onednn", VERSION, HERE, "bb")["source"] == "of bb"
    assert support.run_of("onednn", VERSION, HERE, "cc") is None


@pytest.mark.parametrize(
    ("backend", "version", "device"), [("onednn", (3, 2, 0), "AMD EPYC"), ("cudnn", (9, 19, 0), "NVIDIA H200")]
)
def test_the_record_of_a_run_that_the_package_has_holds_there_alone(backend, version, device):
    problem = Problem.parse("backward,spatial,f32,nchw,8x6x8x5,fill=randn")
    assert support.check(backend, version, device, problem, Status.PASS, "dx") == support.NO_LONGER_REPEATABLE
    assert support.check(backend, version, device, problem, Status.UNSUPPORTED) == support.NEWLY_UNSUPPORTED
    assert support.check(backend, version, "another device", problem, Status.PASS, "dx") == support.CLAIMED
    assert support.run_of(backend, (*version[:2], 99), device) is None


def test_the_record_of_cudnn_knows_what_it_refuses_and_what_is_timed():
    def said(line, status=Status.PASS, repeat="equal"):
        return support.check("cudnn", (9, 19, 0), "NVIDIA H200", Problem.parse(line), status, repeat)

    assert said("infer,spatial,f32,nchw,65536x4,fill=randn", Status.UNSUPPORTED, "") == support.NOT_CLAIMED
    assert said("backward,spatial,f32,nchw,2x3x4x5,fill=randn,algorithm=auto", repeat="dx") == support.CLAIMED


@pytest.mark.slow
def test_a_run_is_recorded_and_a_runner_can_demand_the_record(load_library, tmp_path, own_records):
    version = ".".join(map(str, load_library("onednn").version))
    device, call = devices.device_for(1).name, CliRunner().invoke
    run = tmp_path / "run.json"
    check = ["check", "--require-claims", "--jobs=1", "--backend=onednn", "--case=infer,spatial,f32,nchw,2x3x4x5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "run_of", lambda *_: None)  # as of a version that the package has none of
        done = call(main, [*check, f"--json={run}"])
        assert (done.exit_code, json.loads(run.read_text())["without_record"]) == (1, [f"onednn {version} on {device}"])
        assert f"onednn {version} on {device}: no record of a run of this version there" in done.stdout
    done = call(main, ["claims", "record", str(run), "--backend", "onednn", "--into", str(own_records)])
    assert done.exit_code == 0, done.output
    support.records.cache_clear()
    done = call(main, check)
    assert (done.exit_code, "no record" in done.stdout) == (0, False)
    for arguments in (["--backend", "miopen"], ["--backend", "mkl"]):
        done = call(main, ["claims", "record", str(run), *arguments])
        assert (done.exit_code, "Error: " in done.stderr) == (2, True)
