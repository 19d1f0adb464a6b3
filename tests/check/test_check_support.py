"""Recorded support claims: what must run, on which machine, and what happens when it no longer does."""

import json
import typing
from pathlib import Path

import numpy as np
import pytest
from simulated import Kernels, array_of

import pybnorm
from pybnorm import _core, devices, errors
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.lines import expand, load_suite
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import executors, support
from pybnorm.check.run.runner import BackendInfo, Session, run_line
from pybnorm.check.run.session import open_session

INFO = BackendInfo("onednn", version=(3, 2, 0))


@pytest.mark.parametrize("backend", pybnorm.backends())
def test_records_are_complete_and_in_the_words_of_the_problem_language(backend):
    file = Path(support.__file__).parent / "support" / f"{backend}.json"
    for record in json.loads(file.read_text()):
        of_run = "repeatable" in record
        device = ["device"] if of_run else []  # every shipped record of a run says on what
        device += ["build"] * ("build" in record)
        names = ["first", "last", *device, "source", "below", "combinations"]
        assert list(record) == names + ["repeatable"] * of_run
        assert "repeatable" not in record or record["first"] == record["last"]
        assert list(record["below"]) == ["batch", "elements"]
        assert record["source"]
        for combination in record["combinations"]:
            assert list(combination) == ["operations", "modes", "dtypes", "layouts", "ranks", "blends"]
            words = ("/".join(combination[name]) for name in ("operations", "modes", "dtypes"))
            assert expand(f"{','.join(words)},nchw,2x3")
            assert set(combination["layouts"]) <= {"nchw", "nhwc", "strides"}
            assert set(combination["ranks"]) <= set(range(2, 9))


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ((2, 9, 9), None),
        ((3, 0, 0), [3, 0]),
        ((3, 2, 0), [3, 0]),
        ((3, 3, 1), [3, 3]),
        ((3, 4, 0), [3, 0]),
        ((9,), [3, 0]),
    ],
)
def test_the_newest_record_of_a_version_counts(monkeypatch, version, found):
    records = ({"first": [3, 0], "last": None}, {"first": [3, 3], "last": [3, 3]})
    monkeypatch.setattr(support, "records", lambda _: records)
    record = support.record_of("onednn", version)
    assert (record and record["first"]) == found


ONEDNN = {
    "train,spatial,f32,nchw,2x3x4x5": True,
    "backward,peract,f32,nhwc,2x3x4": True,
    "train,spatial,f32,strides=60x20x5x2,2x3x4x2": True,
    "train,spatial,f16,nchw,2x3x4x5": True,
    "train,spatial,f64,nchw,2x3x4x5": False,
    "train,persistent,f32,nchw,2x3x4x5": False,
    "train,spatial,f32,nchw,2x3x4x5,alpha=2,beta=0.5": True,
    "train,spatial,f32,nchw,2x3x4x5,alpha=1e-40,beta=0.5": False,
    "train,spatial,f32,nchw,2x3x4x5,streams=2": False,
    "train,spatial,f32,nchw,2x3x4x5,algorithm=ex": False,
    "train,spatial,f32,nchw,2x3x4x5,algorithm=auto": True,
    "train,spatial,f32,nchw,2x3x4x5,params=f16": False,
    "train,spatial,f32,nchw,2x3x4x5,unbiased=0": False,
    "train,spatial,f32,nchw,2x3x4x5,saved=variance": False,
    "backward,spatial,f32,nchw,16x8x6x6,fill=range,magnitude=1e+30": False,
}
CUDNN = {
    "infer,spatial,f32,nchw,65535x1x1x1": True,
    "infer,spatial,f32,nchw,65536x1x1x1": False,
    "train,persistent,f64,nhwc,2x3x4x5": True,
    "train,spatial,f32,strides=120x40x20x5x2,2x3x2x4x2": True,
    "train,spatial,f32,strides=60x20x5,2x3x4": False,
    "train,spatial,f16,nchw,2047x64x128x128": True,
    "train,spatial,f16,nchw,1x1x1x2147483647": False,
}
MIOPEN = {
    "infer,spatial,f32,nhwc,2x3x4x5": False,
    "train,spatial,bf16,nhwc,2x3x4x5": True,
    "train,spatial,f32,nchw,2x3x4x5,beta=1": True,
    "train,spatial,f16,nchw,2x3x4x5,beta=1": False,
}


@pytest.mark.parametrize(
    ("backend", "version", "lines"),
    [("onednn", (3, 2, 0), ONEDNN), ("cudnn", (9, 30), CUDNN), ("miopen", (3, 4), MIOPEN)],
)
def test_what_is_claimed(backend, version, lines):
    record = support.record_of(backend, version)
    assert {line: support.claimed(record, Problem.parse(line)) for line in lines} == lines


def test_a_record_is_made_of_what_the_query_says():
    def row(operation, dtype, layout, capability="RUNS|BLEND_NATIVE", mode="spatial", ranks=(4, 2)):
        return dict(operation=operation, mode=mode, dtype=dtype, layout=layout, ranks=ranks, capability=capability)

    rows = [
        *(row(o, d, y) for o in ("train", "backward") for d in ("f32", "f16") for y in ("nchw", "nhwc")),
        row("infer", "f32", "nchw"),
        row("infer", "f32", "nchw", ranks=(5,)),
        row("infer", "f32", "nhwc", capability=""),
        row("train", "bf16", "nchw", capability="RUNS"),
        row("axpby", "f32", "nchw"),
    ]
    record = support.recorded(rows, (3, 4, 0), "somewhere")
    assert (record["first"], record["last"], record["source"]) == ([3, 4, 0], None, "somewhere")
    common = {"modes": ["spatial"], "ranks": [2, 4], "blends": True}
    assert record["combinations"] == [
        {"operations": ["train", "backward"], "dtypes": ["f32", "f16"], "layouts": ["nchw", "nhwc"]} | common,
        {"operations": ["infer"], "dtypes": ["f32"], "layouts": ["nchw"]} | common | {"ranks": [2, 4, 5]},
        {"operations": ["train"], "dtypes": ["bf16"], "layouts": ["nchw"]} | common | {"blends": False},
    ]


# ---------------------------------------------------------------- a capability that is lost


class Claimed(Kernels):
    library = _core.Library("onednn", "oneDNN", (3, 2, 0), "/x/libdnnl.so.3", "", (), 1)


def run(kernels, line):
    return run_line(lambda backend: Session("onednn", kernels, devices.device_for(1)), "onednn", line)


class Lost(Claimed):
    """Refuses channels-last training, by name, as a library does that has dropped it."""

    def forward_training(self, x, *arguments, **options):
        if x.strides[1] == 1:
            raise errors.UnsupportedError(
                backend="onednn", function="f", status=-1, status_name="PBN_E_UNSUPPORTED", text="no longer"
            )
        super().forward_training(x, *arguments, **options)


def test_newly_unsupported_is_a_failure_that_no_known_defect_excuses(load_library):
    load_library("onednn")
    lost = run(Lost(), "train,spatial,f32,nhwc,2x3x4x5")
    assert (lost.status, lost.claim) == (Status.FAIL, "newly unsupported")
    assert lost.message.startswith("newly unsupported, but recorded as running in this version: UnsupportedError: ")
    assert executors.annotated(lost, INFO, Problem.parse(lost.case)).known == ""
    kept = run(Lost(), "train,spatial,f32,nchw,2x3x4x5")
    assert (kept.status, kept.claim) == (Status.PASS, "claimed")
    never = run(Lost(), "train,spatial,f64,nhwc,2x3x4x5")
    assert (never.status, never.claim) == (Status.UNSUPPORTED, "not claimed")


class Wavers(Claimed):
    """Gives another y at every second call, in the last bit."""

    calls = 0

    def forward_inference(self, x, scale, bias, running_mean, running_variance, y, *, algorithm=None, **options):
        super().forward_inference(x, scale, bias, running_mean, running_variance, y, **options)
        self.calls += 1
        if self.calls % 2:
            out = array_of(y)
            out.flat[0] = np.nextafter(out.flat[0], np.float32(9))


def test_what_was_recorded_as_repeatable_and_is_no_longer_is_a_failure(monkeypatch, load_library):
    load_library("onednn")
    record = support.record_of("onednn", (3, 2, 0))
    row = {"operations": ["infer"], "modes": ["spatial"], "dtypes": ["f32"], "layouts": ["nchw"]}
    row |= {"algorithms": [""], "saved": [True], "elements": 1000}
    monkeypatch.setattr(support, "record_of", lambda *_: record)
    monkeypatch.setattr(support, "run_of", lambda *_: record | {"combinations": [], "repeatable": [row]})
    line = "infer,spatial,f32,nchw,2x3x4x5,fill=randn"
    result = run(Wavers(), line)
    assert (result.status, result.claim) == (Status.NONDETERMINISTIC, "no longer repeatable")
    assert "recorded as giving the same bits at every call: y differ" in result.message
    assert executors.annotated(result, INFO, Problem.parse(line)).known == ""
    for other in ("infer,spatial,f32,nhwc,2x3x4x5,fill=randn", "infer,spatial,f32,nchw,9x30x4x5,fill=randn"):
        assert run(Wavers(), other).status == Status.PASS


class Planned(Wavers):
    """With plans that say whether their bits repeat."""

    asked: typing.ClassVar = []

    def plan_forward_inference(self, x, y, *, algorithm, deterministic=False, **options):
        self.asked.append((x.dims, algorithm))
        return type("Plan", (), {"deterministic": algorithm != "graph"})()

    plan_backward = plan_forward_training = plan_forward_inference


def test_a_plan_that_says_that_its_bits_repeat_is_held_to_it(monkeypatch, load_library):
    """What `deterministic=True` rests on: each case with other bits is one more look at it."""
    load_library("onednn")
    monkeypatch.setattr(support, "run_of", lambda *_: None)
    line = "infer,spatial,f32,nchw,2x3x4x5,fill=randn"
    result = run(Planned(), line)
    assert (result.status, result.repeat) == (Status.NONDETERMINISTIC, "y")
    assert result.message == "Plan.deterministic says that equal calls give the same bits: y differ"
    assert run(Planned(), f"{line},algorithm=graph").status == Status.PASS
    assert Planned.asked == [((2, 3, 4, 5), None), ((2, 3, 4, 5), "graph")]


def test_nothing_is_said_of_a_version_without_a_record(monkeypatch, load_library):
    load_library("onednn")
    monkeypatch.setattr(support, "records", lambda _: ())
    result = run(Lost(), "train,spatial,f32,nhwc,2x3x4x5")
    assert (result.status, result.claim) == (Status.UNSUPPORTED, "")


@pytest.mark.slow
def test_the_smoke_suite_holds_every_claim_about_onednn_on_this_machine(load_library):
    load_library("onednn")
    seen = [run_line(open_session, "onednn", str(problem)).claim for problem in load_suite("smoke")]
    assert support.NEWLY_UNSUPPORTED not in seen
    assert seen.count(support.CLAIMED) >= 100


def test_a_library_still_says_that_it_runs_what_is_claimed_of_it(backend):
    """Every combination, also those that the suite above has no case of."""
    record = support.record_of(backend, pybnorm.load(backend).version)
    assert record is not None
    checked = 0
    for problem in expand(
        "train/infer/backward,spatial/persistent/peract,f32/f64/f16/bf16,nchw/nhwc,2x3/2x3x4/2x3x4x5/2x3x4x5x2"
    ):
        if support.claimed(record, problem):
            query = problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
            assert pybnorm.capability(backend, *query)[0], str(problem)
            checked += 1
    assert checked >= 24
