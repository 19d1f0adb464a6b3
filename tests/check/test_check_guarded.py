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
from simulated import Kernels, Watched, array_of
from tables import table

from pybnorm import _arguments, devices
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import fence, runner
from pybnorm.check.run.runner import Session, run_case
from pybnorm.check.run.session import open_session
from pybnorm.reference import threads
from pybnorm.reference.threads import LARGE

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are fenced with Linux only")


@pytest.fixture
def onednn(need_device):
    need_device("onednn")
    session = open_session("onednn")
    with session.handle:
        yield session


class Reads(Watched):
    """Adds elements to the last sum that do not belong to the array `name`: `count` behind it, or a stride's gap."""

    def __init__(self, name, count, gap=False):
        super().__init__(self.look)
        self.name, self.count, self.gap, self.outside = name, count, gap, None

    def look(self, call):
        buffer = call[self.name]
        values = array_of(buffer)
        place = buffer.strides[0] - self.count if self.gap else _arguments.span(buffer.dims, buffer.strides)
        memory = (ctypes.c_char * (self.count * values.itemsize)).from_address(buffer.pointer + place * values.itemsize)
        self.outside = np.frombuffer(memory, values.dtype).astype(np.float64).copy()

    def sum(self, values, short):
        total = super().sum(values, short)
        total[-1] += values.dtype.type(self.outside.sum())
        return total


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


def bytes_at(address, count=8):
    return bytes((ctypes.c_char * count).from_address(address))


def buffers(call):
    return {name: buffer for name, buffer in call.items() if hasattr(buffer, "pointer")}


def size(buffer):
    return _arguments.span(buffer.dims, buffer.strides) * buffer.dtype.itemsize


def test_guards_are_nan_around_what_is_read_and_a_pattern_around_what_is_written():
    seen = {}

    def look(call):
        for name, buffer in buffers(call).items():
            seen[name] = {bytes_at(end) for end in (buffer.pointer - 8, buffer.pointer + size(buffer))}

    result_of("train,spatial,bf16,nchw,2x3x4x5", Watched(look))
    read = {"x", "scale", "bias", "running_mean", "running_variance"}
    assert {name for name, ends in seen.items() if ends == {b"\xff" * 8}} == read
    assert {name for name, ends in seen.items() if ends == {b"\xa7" * 8}} == {"y", "saved_mean", "saved_inv_variance"}


@pytest.mark.parametrize("offset", [-1, 10])
def test_a_write_beside_the_workspace_is_told(monkeypatch, offset):
    def write(call):
        ctypes.c_char.from_address(call["workspace"].pointer + offset).value = b"w"

    monkeypatch.setattr(Session, "workspace_size", lambda *_: 10)
    result = result_of("train,spatial,bf16,nchw,2x3x4x5", Watched(write))
    assert (result.status, result.message) == (Status.FAIL, "wrote outside of the workspace")


@table(("dtype", "misalign"), [("f32", 0), ("f32", 1), ("bf16", 3), ("bf16", 1), ("f64", 3)])
def test_every_array_is_off_by_so_many_elements(dtype, misalign):
    seen = {}
    line = f"train,spatial,{dtype},nchw,2x3x4x5,fill=randn,misalign={misalign}"
    assert result_of(line, Watched(lambda call: seen.update(buffers(call)))).status == Status.PASS
    assert len(seen) == 8
    for name, buffer in seen.items():
        assert buffer.pointer % 64 == misalign * buffer.dtype.itemsize, name


# ---------------------------------------------------------------- fences


def touching(name, offset, write=False):
    """Kernels that read or write one byte at an offset from an array's start (before) or its end (behind)."""

    def touch(call):
        address = call[name].pointer + (offset if offset < 0 else size(call[name]) + offset)
        if write:
            ctypes.c_uint8.from_address(address).value = 1
        else:
            assert bytes_at(address, 1) == b"\xff"  # and is not used

    return Watched(touch)


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
    result = result_of(line, touching(name, offset, write))
    assert result.status == Status.FAIL
    assert result.message == f"{'wrote' if write else 'read'} outside of {name}: {where}"
    assert result_of(line, Kernels()).status == Status.PASS
    if not write and name in ("x", "scale", "running_variance"):  # a guard does not show a read that changes nothing
        assert result_of(line.replace(f",fence={fence}", ""), touching(name, offset)).status == Status.PASS


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


def exchanging(places):
    """Kernels that exchange two words of x, or change a bit of it, after it has been read."""

    def exchange(call):
        words = array_of(call["x"]).reshape(-1).view(np.uint64)
        if len(places) == 1:
            words[places[0]] ^= 1
        else:
            words[list(places)] = words[list(reversed(places))]

    return Watched(after=exchange)


@pytest.mark.parametrize("places", [(0, 1), (7, 540_671), (540_671,), (32_700,), (), (100, 100 + 32_768)])
def test_a_change_of_a_large_input_is_seen_and_the_results_are_judged_by_what_it_was(places):
    """Of x there is neither a copy nor a second one: it is told by sums and made again."""
    assert math.prod(Problem.parse(LARGE_CASE).dims) >= LARGE
    result, right = result_of(LARGE_CASE, exchanging(places)), result_of(LARGE_CASE, Kernels())
    assert right.status == Status.PASS
    assert (result.status, result.message) == ((Status.FAIL, "changed its input x") if places else (Status.PASS, ""))
    assert [v.ratios for v in result.verdicts] == [v.ratios for v in right.verdicts]


def test_a_large_input_lies_once(monkeypatch):
    seen, generated = [], []
    monkeypatch.setattr(runner, "generate", lambda *given: generated.append(generate(*given)) or generated[-1])
    result_of(LARGE_CASE, Watched(lambda call: seen.append(call["x"].pointer)))
    assert set(seen) == {generated[0].x.ctypes.data}


@pytest.mark.slow
@pytest.mark.parametrize("line", [LARGE_CASE, "backward,peract,bf16,nhwc,64x20x32x32,fill=randn"])
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
