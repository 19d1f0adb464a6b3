"""Operations that are composed of vendor calls, as problems: oneDNN's pass, and wrong ones are found."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner
from selftest_tool.composed import Composed

from pybnorm import cli, devices
from pybnorm.check import arguments, judge
from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.judging.known_defects import covers
from pybnorm.check.language.calls import COMPOSED as CALLS
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import COMPOSED, Problem
from pybnorm.check.run import perform
from pybnorm.check.run.runner import Session, run_case
from pybnorm.check.run.session import open_session
from pybnorm.defects import named
from pybnorm.errors import ArgumentError

SHAPE = "spatial,f32,nchw,4x6x5x3"
MATRIX = "spatial,f32,nchw,4x6"
SPLIT = [word for word in COMPOSED if word != "gather_stats" and not word.startswith("sync")]
LINES = {word: f"{word},{MATRIX if word == 'gather_stats' else SHAPE},fill=randn" for word in COMPOSED}

SPLIT_BOUNDS = (
    "spatial/peract,f32/bf16,nchw/nhwc,4x6x5x3,fill=exact/randn/range",
    "spatial,f32,strides=300x90x18x3,2x3x4x5",
    f"{SHAPE},fill=special,seed=0/1/2/3/4/5",
)
EMPTY = ("spatial,f32,nchw,8x3x4x5,fill=randn,ranks=3", "peract,f32,nchw,3x3x4x5,fill=randn,ranks=3")
BOUNDS = {
    "gather_stats": ("spatial,f32,nchw,3x5/8x33,fill=exact/randn/range/constant,running=0/1,seed=0/1",),
    "sync_train": EMPTY,  # one rank of three
    "sync_backward": EMPTY,
}


@pytest.fixture
def onednn(load_library):
    load_library("onednn")
    session = open_session("onednn")
    with session.handle:
        yield session


@pytest.mark.parametrize("word", COMPOSED)
def test_a_line_is_read_back_and_has_its_own_options(word):
    problem = Problem.parse(LINES[word])
    assert (problem.word, problem.composed) == (word, word)
    assert Problem.parse(str(problem)) == problem
    persistent = LINES[word].replace("spatial", "persistent")
    for line, text in ((f"{LINES[word]},algorithm=auto", "option: got algorithm=auto"), (persistent, "mode: got pers")):
        with pytest.raises(ArgumentError, match=text):
            Problem.parse(line)
    for changes, text in (({"inplace": True}, "inplace"), ({"composed": "frozn"}, "composed: got frozn")):
        with pytest.raises(ArgumentError, match=text):
            dataclasses.replace(problem, **changes)


def test_an_operation_is_like_its_own():
    with pytest.raises(ArgumentError, match="composed: got frozen, allowed: elemt"):
        dataclasses.replace(Problem.parse(f"infer,{SHAPE}"), composed="frozen")


@pytest.mark.parametrize("word", COMPOSED)
def test_onednn_is_within_the_bounds_and_keeps_what_is_not_finite_where_it_belongs(onednn, word):
    for line in BOUNDS.get(word, SPLIT_BOUNDS):
        for problem in expand(f"{word},{line}"):
            result = run_case(problem, onednn)
            right = (Status.PASS, Status.WARN) if problem.fill == "special" else (Status.PASS,)
            assert result.status in right, (str(problem), result.message, result.verdicts)
            assert result.repeat == "equal"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f"gather_stats,{SHAPE}", "dims: got 4x6x5x3, allowed: RxC for gather_stats"),
        ("gather_stats,peract,f32,nchw,4x6", "mode: got peract"),
        ("gather_stats,spatial,bf16,nchw,4x6", "dtype: got .*allowed: f32 | f64"),
        ("gather_stats,spatial,f32,nchw,4x6,fill=special", "fill: got special"),
    ],
)
def test_what_no_ranks_can_have_is_refused(line, text):
    with pytest.raises(ArgumentError, match=text):
        Problem.parse(line)


class Wrong(Composed):
    """Kernels whose results something is done to."""

    def write(self, given, name, result, *blend):
        super().write(given, name, self.change(result), *blend)


def run(line, wrong=lambda values: values):
    kernels = Wrong()
    kernels.change = wrong
    return run_case(Problem.parse(line), Session("onednn", kernels, devices.device_for(1)))


@pytest.mark.parametrize("word", [*SPLIT, "sync_train", "sync_backward"])
def test_a_kernel_of_ones_own_is_judged(word):
    line = f"{word},spatial,f16,nchw,4x6x5x3,fill=randn"
    assert run(line).status == Status.PASS
    assert run(line, lambda values: values * (1 + 2.0**-7)).status == Status.FAIL
    assert run(f"{line.replace('randn', 'special')},seed=0", np.nan_to_num).status == Status.FAIL


def test_a_known_defect_of_backward_is_known_of_its_sums():
    defect = named("onednn-chained-gradients")
    note = "sums in chains of 262144 terms"
    assert "dbias" in defect.outputs
    for name, explained in (("dbias", True), ("sum_dy", True), ("sum_dy_xmu", "dscale" in defect.outputs)):
        verdict = Verdict(name, Status.CHAIN, "B", 1.2, {"A": 1.2, "B": 1.2}, 4, over=2, note=note, finite_ratio=1.2)
        assert covers(defect, verdict) == explained


SYNC = [f"{word},{EMPTY[0]}" for word in ("sync_train", "sync_backward")]


def test_ranks_have_shares_of_which_one_may_be_empty():
    assert Problem.parse(f"sync_train,{EMPTY[0]}").shares == (1, 3, 4)
    assert Problem.parse(f"sync_train,{EMPTY[1]}").shares == (0, 1, 2)


@pytest.mark.parametrize("line", [*SYNC, f"{SYNC[1]},bitwise=1"])
def test_sums_of_another_rank_that_are_not_added_are_found(onednn, monkeypatch, line):
    exchange = perform.Threads._exchange

    def without_statistics(self, send, put):
        """The last rank's first statistic does not arrive; its header, at the end, does."""
        if self.rank == self.size - 1 and send.dims[0] > 8:
            send = self._device.from_numpy(self._device.to_numpy(send) * (np.arange(send.dims[0]) > 0))
        exchange(self, send, put)

    problem = Problem.parse(line)
    assert run_case(problem, onednn).status == Status.PASS
    monkeypatch.setattr(perform.Threads, "_exchange", without_statistics)
    result = run_case(problem, onednn)
    assert result.status == Status.FAIL, (result.message, result.verdicts)


def test_ranks_that_do_not_agree_are_found(onednn, monkeypatch):
    one = perform._rank

    def other(*given):
        found = one(*given)
        return {name: values + (given[4] == 1) for name, values in found.items()}

    monkeypatch.setattr(perform, "_rank", other)
    result = run_case(Problem.parse(SYNC[0]), onednn)
    assert (result.status, result.message) == (Status.FAIL, "rank 1 has another running_mean than rank 0")
    assert run_case(Problem.parse(SYNC[1]), onednn).status == Status.FAIL


def test_a_rank_that_raises_ends_the_call(onednn, monkeypatch):
    def fails(self, send, received, stream):
        if self.rank == 2:
            raise ValueError("the link is down")
        self._exchange(send, lambda rank, vector: None)

    monkeypatch.setattr(perform.Threads, "all_gather", fails)
    result = run_case(Problem.parse(SYNC[0]), onednn)
    assert (result.status, result.message) == (Status.ERROR, "ValueError: the link is down")


def test_what_an_object_does_not_have_is_unsupported():
    result = run_case(Problem.parse(f"frozen,{SHAPE},fill=randn"), Session("onednn", object(), devices.device_for(1)))
    assert (result.status, result.message) == (Status.UNSUPPORTED, "onednn has no backward_frozen")


@pytest.mark.parametrize("word", COMPOSED)
def test_arguments_are_those_of_the_function(word):
    given = arguments(LINES[word])
    assert [n for n in given if n in {t.name for t in CALLS[word].tensors}] == [t.name for t in CALLS[word].tensors]
    assert ("axis" in given) == (word != "gather_stats")
    assert ("shares" in given) == word.startswith("sync")
    assert "mode" not in given


def test_the_judge_takes_arrays():
    line = f"backward_elemt,{SHAPE},fill=randn"
    g = arguments(line)
    g = {n: np.asarray(v, np.float64) for n, v in g.items()}
    right = g["dy"] - g["sum_dy"] / g["count"]
    right -= (g["x"] - g["mean"]) * g["inv_variance"] ** 2 * g["sum_dy_xmu"] / g["count"]
    right *= g["scale"] * g["inv_variance"]
    assert judge(line, {"dx": right.astype(np.float32)}).status == Status.PASS
    assert judge(line, {"dx": (right * 1.0001).astype(np.float32)}).status == Status.FAIL


@pytest.mark.slow
def test_reports_have_every_output(tmp_path, load_library):
    load_library("onednn")

    def command(*words):
        done = CliRunner().invoke(cli.main, words)
        return done.exit_code, done.stdout

    line, page, one, two = (
        f"backward_reduce/frozen,{SHAPE},fill=randn",
        *(tmp_path / name for name in ("html", "1", "2")),
    )
    check = "check", "--backend", "onednn", "--executor", "process", "--case", line, "--save"
    assert command(*check, str(one))[0] == 0
    status, text = command(*check, str(two), "--html", str(page), "--json", "-")
    assert status == 0
    outputs = [[v["output"] for v in r["verdicts"]] for r in json.loads(text)["cases"]]
    assert outputs == [["sum_dy", "sum_dy_xmu", "dscale", "dbias"], ["dx", "dscale", "dbias"]]
    assert "sum_dy_xmu" in page.read_text()
    assert "the same bits in all 2 cases" in command("compare", str(one), str(two))[1]
    status, text = command("check", "--backend", "onednn", "--explain", f"backward_reduce,{SHAPE},fill=randn")
    assert status == 0
    assert "sum_dy_xmu" in text
