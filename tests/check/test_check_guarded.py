"""What a kernel reads or writes outside of its arrays shows in the verdict."""

import ctypes
import dataclasses
import math
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from pybnorm import _arguments, devices
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import fence, guarded, runner
from pybnorm.check.run.runner import Session, run_case
from pybnorm.check.run.session import open_session
from pybnorm.check.selftest.simulated import Kernels, array_of
from pybnorm.reference import threads
from pybnorm.reference.threads import LARGE

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are fenced with Linux only")


@pytest.fixture
def onednn(need_device):
    need_device("onednn")
    session = open_session("onednn")
    with session.handle:
        yield session


class Reads(Kernels):
    """Adds elements to the last sum that do not belong to the array `name`: `count` behind it, or a stride's gap."""

    def __init__(self, name, count, gap=False):
        super().__init__()
        self.name, self.count, self.gap, self.outside = name, count, gap, None

    def look(self, buffer):
        values = array_of(buffer)
        place = buffer.strides[0] - self.count if self.gap else _arguments.span(buffer.dims, buffer.strides)
        memory = (ctypes.c_char * (self.count * values.itemsize)).from_address(buffer.pointer + place * values.itemsize)
        self.outside = np.frombuffer(memory, values.dtype).astype(np.float64).copy()

    def sum(self, values, short):
        total = super().sum(values, short)
        total[-1] += values.dtype.type(self.outside.sum())
        return total

    def forward_training(self, x, *arguments, **options):
        self.look(x)
        super().forward_training(x, *arguments, **options)

    def backward(self, x, dy, *arguments, **options):
        self.look({"x": x, "dy": dy}[self.name])
        super().backward(x, dy, *arguments, **options)


def result_of(line, kernel):
    return run_case(Problem.parse(line), Session("onednn", kernel, devices.device_for(1)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("line", "name", "gap"),
    [
        ("train,spatial,{},nchw,2x3x4x5,fill=randn", "x", False),
        ("backward,spatial,{},nchw,2x3x4x5,fill=randn", "dy", False),
        ("backward,spatial,{},nhwc,2x3x4x5,fill=exact", "x", False),
        ("train,spatial,{},strides=300x90x18x3,2x3x4x5,fill=randn", "x", True),
    ],
)
def test_a_read_outside_of_an_input_makes_a_nan(dtype, count, line, name, gap):
    result = result_of(line.format(dtype), Reads(name, count, gap))
    assert result.status == Status.FAIL
    assert any("spread" in v.note for v in result.verdicts)


def test_a_pattern_that_is_a_small_number_would_hide_it(monkeypatch):
    """What the guards of inputs were: -4.7e-15 in float32 is lost in any sum."""
    monkeypatch.setattr(guarded, "POISON", guarded.PATTERN)
    assert result_of("train,spatial,f32,nchw,2x3x4x5,fill=randn", Reads("x", 3)).status == Status.PASS


def test_guards_are_nan_around_what_is_read_and_a_pattern_around_what_is_written():
    seen = {}

    class Looking(Kernels):
        def forward_training(self, x, scale, bias, y, **options):
            for name, buffer in {"x": x, "scale": scale, "bias": bias, "y": y, **options}.items():
                if hasattr(buffer, "pointer"):
                    size = _arguments.span(buffer.dims, buffer.strides) * buffer.dtype.itemsize
                    ends = buffer.pointer - 8, buffer.pointer + size
                    seen[name] = {bytes((ctypes.c_char * 8).from_address(end)) for end in ends}
            super().forward_training(x, scale, bias, y, **options)

    result_of("train,spatial,bf16,nchw,2x3x4x5", Looking())
    read = {"x", "scale", "bias", "running_mean", "running_variance"}
    assert {name for name, ends in seen.items() if ends == {b"\xff" * 8}} == read
    assert {name for name, ends in seen.items() if ends == {b"\xa7" * 8}} == {"y", "saved_mean", "saved_inv_variance"}


@pytest.mark.parametrize("offset", [-1, 10])
def test_a_write_beside_the_workspace_is_told(monkeypatch, offset):
    class Writing(Kernels):
        def forward_training(self, *arguments, workspace, **options):
            ctypes.c_char.from_address(workspace.pointer + offset).value = b"w"
            super().forward_training(*arguments, workspace=workspace, **options)

    monkeypatch.setattr(Session, "workspace_size", lambda *_: 10)
    result = result_of("train,spatial,bf16,nchw,2x3x4x5", Writing())
    assert (result.status, result.message) == (Status.FAIL, "wrote outside of the workspace")


# ---------------------------------------------------------------- alignment


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2), ("f64", 8)])
@pytest.mark.parametrize("misalign", [0, 1, 3])
def test_every_array_is_off_by_so_many_elements(dtype, size, misalign):
    seen = {}

    class Looking(Kernels):
        def forward_training(self, x, scale, bias, y, **options):
            seen.update({"x": x, "scale": scale, "bias": bias, "y": y, **options})
            super().forward_training(x, scale, bias, y, **options)

    line = f"train,spatial,{dtype},nchw,2x3x4x5,fill=randn,misalign={misalign}"
    assert result_of(line, Looking()).status == Status.PASS
    for name, buffer in seen.items():
        if hasattr(buffer, "pointer"):
            assert buffer.pointer % 64 == misalign * buffer.dtype.itemsize, name
    assert seen["x"].dtype.itemsize == size


# ---------------------------------------------------------------- fences


class Touches(Kernels):
    """Reads or writes one byte at an offset from an array's start (before) or its end (behind)."""

    def __init__(self, name, offset, write=False):
        super().__init__()
        self.name, self.offset, self.write = name, offset, write

    def forward_training(self, x, scale, bias, y, **options):
        buffer = {"x": x, "scale": scale, "bias": bias, "y": y, **options}[self.name]
        size = _arguments.span(buffer.dims, buffer.strides) * buffer.dtype.itemsize
        address = buffer.pointer + (self.offset if self.offset < 0 else size + self.offset)
        place = ctypes.c_uint8.from_address(address)
        if self.write:
            place.value = 1
        else:
            assert place.value == 0xFF  # and is not used
        super().forward_training(x, scale, bias, y, **options)


@needs_linux
@pytest.mark.parametrize("name", ["x", "scale", "y", "running_variance", "saved_mean"])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("fence", "offset", "where"),
    [
        ("end", 0, "0 bytes behind its end"),
        ("end", 40, "40 bytes behind its end"),
        ("start", -1, "1 bytes before its start"),
    ],
)
def test_a_touch_outside_of_an_array_is_told_as_what_it_is(name, write, fence, offset, where):
    line = f"train,spatial,bf16,nchw,2x3x5x7,fill=randn,fence={fence},repeats=1"
    result = result_of(line, Touches(name, offset, write))
    assert result.status == Status.FAIL
    assert result.message == f"{'wrote' if write else 'read'} outside of {name}: {where}"
    assert result_of(line, Kernels()).status == Status.PASS
    if not write and name in ("x", "scale", "running_variance"):  # a guard does not show a read that changes nothing
        assert result_of(line.replace(f",fence={fence}", ""), Touches(name, offset)).status == Status.PASS


@needs_linux
def test_a_fault_elsewhere_ends_the_process_as_before(tmp_path):
    code = (
        "import ctypes, numpy as np; from pybnorm.check.run.fence import Fence, watched\n"
        "with watched([Fence('x', np.zeros(9, np.uint8), 'end')]): ctypes.string_at(8)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL, timeout=120)
    assert done.returncode == -signal.SIGSEGV


def test_a_gpu_has_no_pages_to_fence():
    assert "only the memory of a CPU" in fence.reason(2)
    session = Session("onednn", Kernels(), types.SimpleNamespace(device_type=2))
    result = run_case(Problem.parse("train,spatial,f32,nchw,2x3x4x5,fence=end"), session)
    assert result.status == Status.UNSUPPORTED
    assert result.message.startswith("fence=end: only the memory of a CPU")


@needs_linux
@pytest.mark.parametrize("word", ["train", "infer", "backward"])
def test_onednn_stays_inside_of_its_arrays(word, onednn):
    for problem in expand(f"{word},spatial,f32/bf16,nchw/nhwc,2x3x4x5/1x17x3x7,fill=randn,fence=start/end,repeats=1"):
        assert run_case(problem, onednn).status == Status.PASS, str(problem)


# ---------------------------------------------------------------- large data, which lie once

LARGE_CASE = "train,spatial,f32,nchw,8x33x64x64,fill=randn"


class Exchanges(Kernels):
    """Exchanges two words of x, or changes a bit of it, after it has been read."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def forward_training(self, x, *arguments, **options):
        super().forward_training(x, *arguments, **options)
        words = array_of(x).reshape(-1).view(np.uint64)
        if len(self.places) == 1:
            words[self.places[0]] ^= 1
        else:
            words[list(self.places)] = words[list(reversed(self.places))]


@pytest.mark.parametrize("places", [(0, 1), (7, 540_671), (540_671,), (32_700,), (), (100, 100 + 32_768)])
def test_a_change_of_a_large_input_is_seen_and_the_results_are_judged_by_what_it_was(places):
    """Of x there is neither a copy nor a second one: it is told by sums and made again."""
    assert math.prod(Problem.parse(LARGE_CASE).dims) >= LARGE
    result, right = result_of(LARGE_CASE, Exchanges(places)), result_of(LARGE_CASE, Kernels())
    assert right.status == Status.PASS
    assert (result.status, result.message) == ((Status.FAIL, "changed its input x") if places else (Status.PASS, ""))
    assert [v.ratios for v in result.verdicts] == [v.ratios for v in right.verdicts]


def test_a_large_input_lies_once(monkeypatch):
    seen = []

    class Looks(Kernels):
        def forward_training(self, x, *arguments, **options):
            seen.append(x.pointer)
            super().forward_training(x, *arguments, **options)

    generated = []
    monkeypatch.setattr(runner, "generate", lambda *given: generated.append(generate(*given)) or generated[-1])
    result_of(LARGE_CASE, Looks())
    assert set(seen) == {generated[0].x.ctypes.data}


@pytest.mark.parametrize(
    "line",
    [LARGE_CASE, "backward,spatial,bf16,nhwc,8x33x64x64", "backward,peract,f32,nchw,64x20x32x32,fill=randn",
     "infer,spatial,f32,nchw,8x33x64x64,fill=special"],
)  # fmt: skip
def test_threads_change_nothing_of_a_verdict(line, monkeypatch):
    found = []
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)))
    for count in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        found.append(repr(dataclasses.asdict(dataclasses.replace(result_of(line, Kernels()), seconds=0.0))))
    assert found[0] == found[1] == found[2]


def test_a_call_that_is_refused_needs_no_data(onednn, monkeypatch):
    monkeypatch.setattr(runner, "generate", None)
    result = run_case(Problem.parse("train,spatial,f64,nchw,8x3x4x4"), onednn)
    assert result.status == Status.UNSUPPORTED
    assert "no float64" in result.message
