"""A whole run that is interrupted: nothing that was finished is lost, and nothing is told twice."""

import contextlib
import json
import signal
import sys
from concurrent.futures import Executor, Future

import pytest

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import BackendInfo, CaseResult
from pybnorm.check.language.lines import expand
from pybnorm.check.run import archive, executors, whole_run
from pybnorm.check.run.whole_run import WholeRun

PROBLEMS = tuple(expand("infer,spatial,f32,nchw,2x3x4x4,seed=1/2/3"))
STEPPED = {whole_run.__file__, executors.__file__, archive.__file__}


class Farm(Executor):
    """Two libraries, whose cases are finished when they are handed in."""

    lost, notice = [], ""

    def __init__(self):
        self.ran = []

    def describe(self, backend):
        return [BackendInfo(backend, version=(1,), path="/lib", device="a device", id=f"1-{backend}")]

    def executor(self, backend, cases):
        return self

    def submit(self, function, opener, backend, case, keep):
        future = Future()
        self.ran.append((backend, case))
        future.set_result((CaseResult(backend, case, Status.PASS, library=f"1-{backend}"), None))
        return future


@pytest.fixture(autouse=True)
def interruptible():
    """Also where the tests were started in the background, whose interrupts a shell has ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting:
    """Sends the process an interrupt before one line of the run loop, counted from its first."""

    def __init__(self, at):
        self.at, self.lines = at, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in STEPPED:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


@contextlib.contextmanager
def stepping(tracer):
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted(at, journal=None):
    """The run that gets an interrupt before its line `at`; what ran; how many lines there were."""
    farm, tracer = Farm(), Interrupting(at)
    run = WholeRun(farm, journal, False, lambda result: False)
    run.describe(["onednn", "cudnn"])
    with run.uninterrupted(), stepping(tracer):
        run.run(PROBLEMS, lambda name, done, total: None)
    return run, farm.ran, tracer.lines


def test_an_interrupt_at_any_step_loses_nothing_and_tells_nothing_twice():
    *_, lines = interrupted(0)
    assert lines > 100
    whole = [(backend, str(p)) for backend in ("onednn", "cudnn") for p in PROBLEMS]
    seen = set()
    for at in range(1, lines + 1):
        run, ran, _ = interrupted(at)
        told = [(r.backend, r.case) for r in run.results]
        assert told == ran, at
        assert run.interrupted == (told != whole), at
        seen.add(len(told))
    assert seen == {0, 3, 6}


@pytest.mark.slow
def test_an_interrupt_at_any_step_leaves_a_journal_of_what_is_told(tmp_path):
    with archive.Journal(tmp_path / "whole") as journal:
        *_, lines = interrupted(0, journal)
    for at in range(1, lines + 1, 17):
        folder = tmp_path / str(at)
        with archive.Journal(folder) as journal:
            run, ran, _ = interrupted(at, journal)
        told = [(r.backend, r.case) for r in run.results]
        written = [json.loads(line) for line in (folder / archive.JOURNAL).read_text().splitlines()]
        assert told == ran == [(r["backend"], r["case"]) for r in written if "case" in r], at
        with archive.Journal(folder, resume=True) as journal:
            rest, more, _ = interrupted(0, journal)
        assert [(r.backend, r.case) for r in rest.results] == ran + more, at
        assert not rest.interrupted


def test_an_interrupted_search_for_libraries_leaves_the_earlier_run(tmp_path):
    with archive.Journal(tmp_path) as journal:
        interrupted(0, journal)
    with archive.Journal(tmp_path, resume=True) as journal:
        run = WholeRun(Farm(), journal, False, lambda result: False)
        with stepping(Interrupting(2)):
            run.describe(["onednn"])
        run.run(PROBLEMS, lambda name, done, total: None)
    assert run.interrupted
    assert not run.begun
    assert run.results == []


def test_libraries_that_join_are_beside_those_of_their_backend():
    run = WholeRun(Farm(), None, False, lambda result: False)
    run.describe(["onednn", "cudnn"])
    run._add([BackendInfo("onednn", id="2-onednn")])
    assert [info.id for info in run.found] == ["1-onednn", "2-onednn", "1-cudnn"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_the_handler_of_before_is_put_back(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        run = WholeRun(Farm(), None, False, lambda result: False)
        with run.uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
        assert run.interrupted == (handler is not signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)
