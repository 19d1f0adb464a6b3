"""What tune=True chooses, says and remembers, over made-up measurements; the measuring itself is in tests/backends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import pybnorm
from pybnorm import Operation, _core, cli, tuning
from pybnorm.check.bounds import Status
from pybnorm.devices import cuda
from pybnorm.tuning import cache, choice, trials
from pybnorm.tuning.trials import NotMeasuredError, Trial

NAMES = ("spatial", "graph", "graph:1", "dense")
DEFAULTS = {
    "y": None, "mode": "spatial", "alpha": 1.0, "beta": 0.0, "epsilon": 1e-5, "exponential_average_factor": 0.1,
    "running": True, "saved": True,
}  # fmt: skip


def timed(**seconds: float | str) -> dict[str, Trial]:
    """Trials of `NAMES`; ``graph_1`` stands for graph:1, a text for why there is no time."""
    found = {name.replace("_", ":"): value for name, value in seconds.items()}
    return {
        name: Trial(None, None, value) if isinstance(value := found.get(name, "not built"), str)
        else Trial(value, Status.PASS, "")
        for name in NAMES
    }  # fmt: skip


class Plan:
    def __init__(self, algorithm: str, candidates: tuple[str, ...], reason: str) -> None:
        self.algorithm, self.candidates, self.reason = algorithm, candidates, reason
        self.asked: list[bool] = []


def candidates(plan: Plan, fast: bool) -> tuple[str, ...]:
    plan.asked.append(fast)
    return plan.candidates


class Handle:
    """Plans of any algorithm, by names as cuDNN has them, over a real library's descriptors."""

    def __init__(self) -> None:
        self.backend, self.device, self.stream = "onednn", None, 7
        self.library = pybnorm.load("onednn")
        self.own, self.candidates, self.broken = "spatial", NAMES, set[str]()
        self.made: list[str] = []
        self.addresses: dict[str, int] = {}

    def plan_forward_training(self, x: Any, *, algorithm: str, **options: Any) -> Plan:
        self.made.append(algorithm)
        if algorithm in self.broken:
            raise pybnorm.UnsupportedError(backend="onednn", function="plan", status=-1, status_name="", text="gone")
        chosen = self.own if algorithm in ("auto", "fast") else algorithm
        return Plan(chosen, self.candidates, "by the rules" if chosen == self.own else "asked for")

    def descriptor(self, array: Any, name: str) -> Any:
        return array.like

    def buffer(self, array: Any, name: str) -> Any:
        return SimpleNamespace(pointer=array.pointer)


class Measured:
    """A double of `trials.run`."""

    def __init__(self) -> None:
        self.trials: Any = timed(spatial=15e-6, graph=12.34e-6, graph_1=13e-6)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> dict[str, Trial]:
        self.calls.append(arguments)
        if isinstance(self.trials, Exception):
            raise self.trials
        return self.trials


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    double = Measured()
    monkeypatch.setattr(trials, "run", double)
    monkeypatch.setattr(_core, "candidates", candidates)
    return double


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "tuning.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    anew(monkeypatch)
    return path


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would begin: with the file only."""
    monkeypatch.setattr(cache, "store", cache._Store())


@pytest.fixture
def handle(load_library: Any) -> Handle:
    load_library("onednn")
    return Handle()


@pytest.fixture
def x(handle: Handle) -> Any:
    with pybnorm.TensorDescriptor("onednn", "f32", (4, 8, 6, 5)) as made:
        yield made


def choose(handle: Handle, x: Any, algorithm: str = "auto", **options: Any) -> tuple[Any, str]:
    return tuning.choose(handle, Operation.FORWARD_TRAINING, x, algorithm, DEFAULTS | options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the choice


def test_the_fastest_is_taken_and_remembered(handle, x, file, measured, monkeypatch):
    plan, reason = choose(handle, x)
    assert (plan.algorithm, reason) == ("graph", "measured: 12.3 us against 15.0 us of spatial (the rule's choice)")
    ((task, backend, ordinal, names, own),) = measured.calls
    assert (backend, ordinal, names, own) == ("onednn", 0, NAMES, "spatial")
    assert task.tensors["x"] == task.tensors["y"] == (pybnorm.DataType.FLOAT32, (4, 8, 6, 5), (240, 30, 5, 1))
    assert task.parameter.dims == (1, 8, 1, 1)
    monkeypatch.setattr(trials, "run", None)  # measuring again would fail
    for fresh in (False, True):
        if fresh:
            anew(monkeypatch)
        plan, again = choose(handle, x)
        assert (plan.algorithm, again) == ("graph", reason + "; remembered")
    (entry,) = tuning.entries().values()
    assert entry["trials"] == {"spatial": 15e-6, "graph": 12.34e-6, "graph:1": 13e-6, "dense": "not built"}


def test_a_second_plan_reads_no_file(handle, x, file, measured, monkeypatch):
    anew(monkeypatch)
    choose(handle, x)
    monkeypatch.setattr(cache, "_read", None)
    monkeypatch.setattr(trials, "run", None)
    assert choose(handle, x)[0].algorithm == "graph"


@pytest.mark.parametrize(("graph", "taken"), [(9.85e-6, "spatial"), (9.79e-6, "graph"), (10.1e-6, "spatial")])
def test_the_rules_choice_stays_unless_beaten_by_the_margin(handle, x, file, measured, graph, taken):
    measured.trials = timed(spatial=10e-6, graph=graph)
    plan, reason = choose(handle, x)
    assert plan.algorithm == taken
    if taken == "spatial":
        assert reason == "measured: 10.0 us, which no other way beats by 2%"
        assert handle.made == ["auto"]  # the rules' plan itself


def test_a_rules_choice_that_fails_is_replaced(handle, x, file, measured):
    measured.trials = timed(graph=10e-6, spatial="y FAIL")
    plan, reason = choose(handle, x)
    assert plan.algorithm == "graph"
    assert reason == "measured: 10.0 us; spatial (the rule's choice) did not run within its bound"


def test_what_could_not_be_measured_is_said_and_not_remembered(handle, x, file, measured, caplog):
    measured.trials = timed()
    plan, reason = choose(handle, x)
    assert plan.algorithm == "spatial"
    assert reason.startswith("by the rules; not measured: no candidate ran within its bound (spatial: not built")
    measured.trials = NotMeasuredError("it takes 7 MiB")
    assert choose(handle, x)[1] == "by the rules; not measured: it takes 7 MiB"
    measured.trials = OSError("of cuda.core")
    assert choose(handle, x)[1] == "by the rules; not measured: OSError: of cuda.core"
    assert "measuring failed" in caplog.text
    measured.trials = pybnorm.LibraryNotFoundError("no cuda-core", backend="cudnn")
    with pytest.raises(pybnorm.LibraryNotFoundError):
        choose(handle, x)
    assert len(measured.calls) == 4
    assert not file.exists()


def test_an_algorithm_by_name_is_not_tuned(handle, x, file, measured):
    for bad in ("graph", "plain", "", "auto:1"):
        with pytest.raises(pybnorm.ArgumentError, match=r"algorithm.*'auto' or 'fast'"):
            choose(handle, x, bad)
    with pytest.raises(pybnorm.ArgumentTypeError, match="algorithm"):
        choose(handle, x, 3)
    assert not handle.made


@pytest.mark.parametrize("candidates", [(), ("plain",)])
def test_one_way_is_not_measured(handle, x, file, measured, candidates):
    handle.candidates = candidates
    assert choose(handle, x)[1] == "by the rules; nothing to measure it against"
    assert not measured.calls


def test_arguments_that_nobody_here_knows_are_not_measured(handle, x, file, measured):
    assert "not measured: with residual" in choose(handle, x, residual=object())[1]
    assert not measured.calls
    choose(handle, x, residual=None, activation=pybnorm.Activation.NONE)
    assert len(measured.calls) == 1


def test_no_measuring_while_the_stream_is_captured(handle, x, file, measured, monkeypatch):
    monkeypatch.setattr(choice, "_capturing", lambda handle: True)
    with pytest.raises(pybnorm.ArgumentError, match=r"tune.*captured"):
        choose(handle, x)
    assert not measured.calls
    monkeypatch.setattr(choice, "_capturing", lambda handle: False)
    choose(handle, x)
    monkeypatch.setattr(choice, "_capturing", lambda handle: True)
    assert choose(handle, x)[0].algorithm == "graph"  # remembered


def test_a_remembered_algorithm_that_is_gone_is_measured_anew(handle, x, file, measured, monkeypatch, caplog):
    choose(handle, x)
    measured.trials = timed(spatial=15e-6, graph_1=11e-6)
    handle.broken = {"graph"}
    plan, _ = choose(handle, x)
    assert plan.algorithm == "graph:1"
    assert "graph was remembered and can no longer be built" in caplog.text
    handle.candidates = ("spatial", "dense")  # the file names one that may not be taken here
    measured.trials = timed(spatial=15e-6, dense=11e-6)
    assert choose(handle, x)[0].algorithm == "dense"
    assert len(measured.calls) == 3


def test_copies_go_by_the_name_of_their_algorithm(handle, x, file, measured):
    handle.own = "dense+spatial"
    measured.trials = timed(spatial=15e-6, dense=10e-6)
    assert choose(handle, x)[0].algorithm == "dense+spatial"
    assert measured.calls[0][-1] == "dense"


# ---------------------------------------------------------------- the key


class Array:
    def __init__(self, like: Any, pointer: int) -> None:
        self.like, self.pointer = like, pointer


def described(dtype: str = "f32", dims: tuple[int, ...] = (4, 8, 6, 5), strides: Any = None) -> Any:
    return pybnorm.TensorDescriptor("onednn", dtype, dims, strides)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"x": lambda: described(dims=(4, 8, 6, 6))}, id="dims"),
        pytest.param({"x": lambda: described(strides=(240, 1, 40, 8))}, id="strides"),
        pytest.param({"x": lambda: described("f64")}, id="dtype"),
        pytest.param({"x": lambda: Array(described(), 4096 + 4)}, id="alignment"),
        pytest.param({"y": lambda: described(strides=(240, 1, 40, 8))}, id="strides of y"),
        pytest.param({"y": lambda: Array(described(), 4096 + 8)}, id="alignment of y"),
        pytest.param({"algorithm": "fast"}, id="fast"),
        pytest.param({"mode": "per_activation"}, id="mode"),
        pytest.param({"alpha": 2.0}, id="alpha"),
        pytest.param({"beta": 1.0}, id="beta"),
        pytest.param({"beta": 0.5}, id="another beta"),
        pytest.param({"epsilon": 1e-60}, id="epsilon"),
        pytest.param({"running": False}, id="running"),
        pytest.param({"saved": False}, id="saved"),
    ],
)
def test_another_problem_is_measured_by_itself(handle, x, file, measured, change):
    choose(handle, x)
    change = {name: value() if callable(value) else value for name, value in change.items()}
    for _ in range(2):
        choose(handle, change.get("x", x), **{k: v for k, v in change.items() if k != "x"})
    assert len(measured.calls) == 2
    assert len(tuning.entries()) == 2


def test_what_does_not_matter_is_not_measured_again(handle, x, file, measured):
    choose(handle, x)
    for options in ({"exponential_average_factor": 0.5}, {"epsilon": 1e-3}, {"y": described()}, {"alpha": 1}):
        choose(handle, x, **options)
    choose(handle, Array(x, 1 << 20))
    assert len(measured.calls) == 1


def test_another_version_or_device_is_measured_by_itself(handle, x, file, measured, monkeypatch):
    choose(handle, x)
    handle.library = handle.library._replace(version=(9, 99, 0))
    choose(handle, x)
    monkeypatch.setattr(pybnorm, "__version__", "77.0")
    choose(handle, x)
    monkeypatch.setattr(choice, "_device", lambda kind, ordinal: ("another device", ""))
    choose(handle, x)
    monkeypatch.setattr(choice, "_device", lambda kind, ordinal: ("another device", "driver 5"))
    choose(handle, x)
    assert len(measured.calls) == 5
    assert "another device | driver 5" in list(tuning.entries())[-1]


# ---------------------------------------------------------------- the file


def entry(algorithm: str = "graph") -> dict[str, Any]:
    return {"algorithm": algorithm, "seconds": 1e-5, "rule": "spatial", "rule_seconds": 2e-5}


OURS = b'{"pybnorm tuning": 1, "entries": {'


@pytest.mark.parametrize("content", [OURS, OURS + b"\xff\xfe", OURS + b'"a":' + b"[" * 100_000])
def test_a_corrupt_file_is_set_aside(handle, x, file, measured, caplog, content):
    file.parent.mkdir()
    file.write_bytes(content)
    choose(handle, x)
    (aside,) = file.parent.glob("tuning.json.corrupt-*")
    assert aside.read_bytes() == content
    assert "was corrupt" in caplog.text
    assert len(tuning.entries()) == 1


@pytest.mark.parametrize(
    "content",
    [
        *("", "thesis", "{", "[" * 100_000, "[]", '"notes"', "{}", '{"pybnorm tuning": 2, "entries": {}}'),
        *('{"pybnorm tuning": 1, "entries": []}', '{"a": 1, "pybnorm tuning": 1, "entries": {}}'),
    ],
    ids=range(10),
)
def test_a_file_of_somebody_else_is_left_alone(handle, x, file, measured, caplog, content):
    file.parent.mkdir()
    file.write_text(content)
    for _ in range(2):
        assert choose(handle, x)[0].algorithm == "graph"
    assert file.read_text() == content
    assert len(measured.calls) == 1  # remembered by the process
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    with pytest.raises(pybnorm.ArgumentError, match=tuning.VARIABLE):
        tuning.clear()
    assert file.read_text() == content
    assert list(file.parent.iterdir()) == [file]


def test_what_is_no_file_is_left_alone(handle, x, measured, monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        monkeypatch.setenv(tuning.VARIABLE, str(path))
        anew(monkeypatch)
        kind = stat.S_IFMT(os.stat(path).st_mode)
        assert choose(handle, x)[0].algorithm == "graph"
        assert stat.S_IFMT(os.stat(path).st_mode) == kind


def test_bad_entries_are_as_absent(handle, x, file, measured, monkeypatch):
    choose(handle, x)
    content = json.loads(file.read_text())
    (key,) = content["entries"]
    bad = [None, 3, {}, entry() | {"algorithm": 3}, entry() | {"seconds": -1.0}, entry() | {"rule_seconds": "fast"}]
    for i, value in enumerate(bad):
        content["entries"][key] = value
        file.write_text(json.dumps(content))
        anew(monkeypatch)
        choose(handle, x)
        assert len(measured.calls) == i + 2, value


def test_a_link_is_written_and_cleared_where_it_points(handle, x, file, measured):
    file.parent.mkdir()
    real = file.parent / "real.json"
    file.symlink_to(real)
    choose(handle, x)
    assert file.is_symlink()
    assert len(json.loads(real.read_text())["entries"]) == 1
    assert tuning.clear() == 1
    assert sorted(file.parent.iterdir()) == [file]
    assert file.is_symlink()
    real.write_text("thesis")
    with pytest.raises(pybnorm.ArgumentError, match="which alone is replaced or removed"):
        tuning.clear()
    assert real.read_text() == "thesis"


def test_a_folder_that_cannot_be_written(handle, x, measured, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "file" / "tuning.json"))
    anew(monkeypatch)
    for running in (True, False, True):
        choose(handle, x, running=running)
    assert len(measured.calls) == 2
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "cannot be written" in record.getMessage()


def test_a_write_that_fails_leaves_the_old_file(file, monkeypatch, caplog):
    cache.store.put("one", entry())
    before = file.read_text()

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    cache.store.put("two", entry())
    assert "disk full" in caplog.text
    assert file.read_text() == before
    assert sorted(p.name for p in file.parent.iterdir()) == ["tuning.json"]
    assert cache.store.get("two") == entry()


WRITER = """
import sys
from pybnorm.tuning import cache
for i in range(15):
    cache.store.put(f"{sys.argv[1]} {i}", dict(algorithm="graph", seconds=1e-5, rule="spatial", rule_seconds=None))
"""


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(file, tmp_path):
    jobs = [subprocess.Popen([sys.executable, "-c", WRITER, str(n)], cwd=tmp_path) for n in range(4)]
    assert [job.wait(60) for job in jobs] == [0] * 4
    assert set(tuning.entries()) == {f"{n} {i}" for n in range(4) for i in range(15)}
    assert sorted(p.name for p in file.parent.iterdir()) == ["tuning.json"]


def test_what_another_process_has_added_is_seen(file):
    cache.store.put("mine", entry())
    assert cache.store.get("theirs") is None
    content = json.loads(file.read_text())
    content["entries"]["theirs"] = entry("ex")
    cache._write(str(file), content["entries"])
    assert cache.store.get("theirs") == entry("ex")


def test_a_lock_that_is_not_given_back(file, monkeypatch, caplog):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    file.parent.mkdir()
    held = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.store.put("one", entry())
    finally:
        os.close(held)
    assert "lock is held" in caplog.text
    assert not file.exists()
    assert cache.store.get("one") == entry()


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert tuning.cache_file() == str(tmp_path / ".cache/pybnorm/tuning.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning.cache_file() == str(tmp_path / ".cache/pybnorm/tuning.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning.cache_file() == str(tmp_path / "xdg/pybnorm/tuning.json")
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert tuning.cache_file() == str(tmp_path / "xdg/pybnorm/tuning.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(tuning.VARIABLE, "here.json")
    assert tuning.cache_file() == str(tmp_path / "here.json")


def test_without_a_home_the_process_remembers(handle, x, measured, monkeypatch, caplog):
    monkeypatch.setattr(cache, "cache_file", lambda: None)
    anew(monkeypatch)
    for _ in range(2):
        choose(handle, x)
    assert len(measured.calls) == 1
    assert "no home" in caplog.text
    assert (tuning.entries(), tuning.clear()) == ({}, 0)


# ---------------------------------------------------------------- the command


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.main, ["tune", *arguments])


def test_the_command_shows_and_clears(handle, x, file, measured):
    assert command().output == f"{file}: 0 remembered\n"
    choose(handle, x)
    shown = command()
    assert shown.exit_code == 0
    assert "1 remembered" in shown.output
    assert "graph 12.3 us (spatial 15.0 us): onednn" in shown.output
    found = json.loads(command("--json").output)
    assert found["file"] == str(file)
    assert [e["algorithm"] for e in found["entries"].values()] == ["graph"]
    assert "1 forgotten" in command("--clear").output
    assert not file.exists()
    choose(handle, x)
    assert len(measured.calls) == 2  # forgotten by the process too


@pytest.mark.parametrize("content", ["thesis", "", "[]"])
def test_the_command_clears_nothing_of_somebody_else(file, content):
    file.parent.mkdir()
    file.write_text(content)
    done = command("--clear")
    assert done.exit_code == 2
    assert f"{tuning.VARIABLE}: got {file}, allowed: a new file or a file of remembered choices" in done.output
    assert file.read_text() == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device"])
def test_the_command_clears_nothing_but_files(file, monkeypatch, kind):
    file.parent.mkdir()
    if kind == "a device":
        monkeypatch.setenv(tuning.VARIABLE, "/dev/zero")
    elif kind == "a pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    before = list(file.parent.iterdir())
    done = command("--clear")
    assert done.exit_code == 2
    assert "this is no regular file" in done.output
    assert list(file.parent.iterdir()) == before


# ---------------------------------------------------------------- what it asks CUDA


class Driver:
    """cuda.bindings.driver, as far as `devices.cuda` asks."""

    def __init__(self) -> None:
        self.current: Any = "theirs"
        self.get_status, self.capture = 0, (0, 0)

    CUstream = staticmethod(lambda address: ("stream", address))

    def cuCtxGetCurrent(self) -> tuple[int, Any]:
        return self.get_status, self.current

    def cuCtxSetCurrent(self, context: Any) -> tuple[int]:
        self.current = context
        return (0,)

    def cuStreamIsCapturing(self, stream: Any) -> tuple[int, int]:
        assert stream == ("stream", 7)
        return self.capture


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    double = Driver()
    monkeypatch.setattr(cuda, "_cuda_core", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", double)
    return double


def test_the_current_device_is_kept(driver):
    def fail() -> None:
        with trials.undisturbed(2):
            driver.current = "ours"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert driver.current == "theirs"
    with trials.undisturbed(1):
        driver.current = "ours"
    assert driver.current == "ours"


@pytest.mark.parametrize(("answer", "capturing"), [((0, 0), False), ((0, 1), True), ((0, 2), True), ((906, 0), True)])
def test_a_capture_is_seen(driver, answer, capturing):
    driver.capture = answer
    on_cuda = SimpleNamespace(library=SimpleNamespace(device_type=2), stream=7)
    assert choice._capturing(on_cuda) is capturing
    assert choice._capturing(SimpleNamespace(library=SimpleNamespace(device_type=1))) is False
