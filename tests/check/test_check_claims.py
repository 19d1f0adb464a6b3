"""Records made of runs, by version and device: what they hold, what losing it is, and how a runner demands one."""

import dataclasses
import json

import pytest
from command_here import run
from tables import table

from pybnorm import devices
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import support

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


def recorded(folder, *records):
    """The text of a file of records, one after another."""
    text = support.with_record([], records[0])
    for record in records[1:]:
        text = support.with_record(json.loads(text), record)
    (folder / "onednn.json").write_text(text)
    support.records.cache_clear()
    return [record["source"] for record in json.loads(text)]


def checked(version, device, build="", repeat="y"):
    """What the records say of a case that other calls do not repeat."""
    problem = Problem.parse("train,spatial,f32,nchw,2x3x4x5,fill=randn")
    return support.check("onednn", version, device, problem, Status.PASS, repeat, build)


def of_run(source, device=HERE, build="", results=RESULTS):
    return support.of_run(results, VERSION, device, source, build)


def test_a_record_of_this_version_holds_beside_the_other_and_can_be_lost(own_records):
    recorded(own_records, of_run("here"))
    assert support.run_of("onednn", VERSION, HERE)["source"] == "here"
    assert support.run_of("onednn", (3, 2, 8), HERE) is None
    assert support.record_of("onednn", VERSION)["first"] == [3, 0]
    assert checked(VERSION, HERE, repeat="equal") == support.CLAIMED
    assert checked(VERSION, HERE) == support.NO_LONGER_REPEATABLE
    assert checked((3, 2, 8), HERE) == support.CLAIMED
    assert recorded(own_records, of_run("here"), of_run("later", results=RESULTS[:2])) == ["later"]
    assert max(map(len, (own_records / "onednn.json").read_text().splitlines())) < 200


def test_what_repeats_on_one_device_is_no_claim_for_another(own_records):
    other = [dataclasses.replace(r, repeat="y") if r.repeat else r for r in RESULTS]
    assert recorded(own_records, of_run("here"), of_run("there", ELSEWHERE, results=other)) == ["here", "there"]
    assert checked(VERSION, HERE) == support.NO_LONGER_REPEATABLE
    assert checked(VERSION, ELSEWHERE) == support.CLAIMED
    assert support.run_of("onednn", VERSION, "a third") is None
    assert checked(VERSION, "a third") == support.CLAIMED  # of every device


def test_what_one_build_does_is_no_claim_for_another_of_its_version(own_records):
    recorded(own_records, of_run("every"))
    assert support.run_of("onednn", VERSION, HERE, "aa")["source"] == "every"
    builds = (of_run(f"of {build}", build=build) for build in ("aa", "bb", "aa"))
    assert recorded(own_records, of_run("every"), *builds) == ["of bb", "of aa"]
    for build, said in (("bb", support.NO_LONGER_REPEATABLE), ("cc", support.CLAIMED), ("", support.CLAIMED)):
        assert checked(VERSION, HERE, build) == said
    assert support.run_of("onednn", VERSION, HERE, "bb")["source"] == "of bb"
    assert support.run_of("onednn", VERSION, HERE, "cc") is None


@table(("backend", "version", "device"), [("onednn", (3, 2, 0), "AMD EPYC"), ("cudnn", (9, 19, 0), "NVIDIA H200")])
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
def test_a_run_is_recorded_and_a_runner_can_demand_the_record(onednn, tmp_path, own_records):
    version = ".".join(map(str, onednn.version))
    device, file = devices.device_for(1).name, tmp_path / "run.json"
    words = (
        "--require-claims",
        "--executor",
        "process",
        "--backend",
        "onednn",
        "--case",
        "infer,spatial,f32,nchw,2x3x4x5",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "run_of", lambda *_: None)  # as of a version that the package has none of
        done = run("check", *words, "--json", file)
        assert done.returncode == 1
        assert json.loads(file.read_text())["without_record"] == [f"onednn {version} on {device}"]
        assert f"onednn {version} on {device}: no record of a run of this version there" in done.stdout
    done = run("claims", "record", file, "--backend", "onednn", "--into", own_records)
    assert done.returncode == 0, done.stderr
    support.records.cache_clear()
    done = run("check", *words)
    assert (done.returncode, "no record" in done.stdout) == (0, False)
    for name in ("miopen", "mkl"):
        done = run("claims", "record", file, "--backend", name)
        assert (done.returncode, "Error: " in done.stderr) == (2, True)
