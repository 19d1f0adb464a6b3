"""`benchmarks.sweep`: what is right, what a seed stands for, and the rows of a run on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pybnorm
from benchmarks import case as cases
from benchmarks import sweep
from benchmarks.machine import TorchCuda, open_machine
from pybnorm.enums import DataType, Layout

ROOT = Path(__file__).parents[2]


@pytest.fixture
def case():
    machine = open_machine(pybnorm.load("onednn").device_type)
    with pybnorm.Handle("onednn") as handle:
        yield cases.make(machine, handle, (5, 4, 3, 2), DataType.FLOAT32, Layout.CHANNELS_LAST, 1)


@pytest.mark.parametrize("operation", ["train", "infer", "backward"])
def test_what_is_right_is_the_reference(case, operation):
    right, reference = sweep.right(case, operation), cases.expected(case, operation)
    assert set(right) == set(reference)
    for name, values in reference.items():
        np.testing.assert_allclose(right[name], values, rtol=1e-12, atol=1e-12)


def test_a_wrong_result_is_seen(case):
    right = sweep.right(case, "infer")
    with pybnorm.Handle("onednn") as handle:
        contender = cases.ours(case, handle, "infer", "auto")
        contender.calls[0]()
        assert sweep.error(case, contender.outputs(), right) < 1e-5
        handle.fill(57.0, case.sets[0].y)
        assert sweep.error(case, contender.outputs(), right) > 1
    assert sweep.error(case, {"y": np.full(case.dims, np.nan)}, right) == float("inf")


class Clock:
    """A framework's device on which only calls take time, by a clock of its own."""

    def __init__(self):
        self.now, self.pauses = 0.0, 0
        clock = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = clock.now

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class Graph:
            def capture_begin(self, capture_error_mode):
                self.start = clock.now

            def capture_end(self):
                self.seconds, clock.now = clock.now - self.start, self.start

            def replay(self):
                clock.now += self.seconds

            def reset(self):
                pass

        self.cuda = SimpleNamespace(Event=Event, CUDAGraph=Graph, _sleep=self.pause)

    def pause(self, cycles):
        self.pauses += 1
        self.now += cycles * 1e-9

    def call(self):
        self.now += 2e-5


def test_a_slow_call_is_measured_once_and_others_to_the_end():
    clock = Clock()
    machine = TorchCuda.__new__(TorchCuda)
    machine.torch, machine._stream = clock, SimpleNamespace(synchronize=lambda: None)
    slow = machine.time([clock.call] * 4, 3, seconds=1e-3, limit=1e-5)
    assert (slow.replays, slow.calls, slow.method) == (1, 1, "events around calls")
    assert slow.seconds == pytest.approx(2e-5)
    assert clock.pauses == 1
    timing = machine.time([clock.call] * 4, 3, seconds=1e-3, limit=1e-4)
    assert (timing.replays, timing.method) == (3, "graph replay")
    assert timing.calls in (48, 52)
    assert timing.seconds == pytest.approx(2e-5)


def test_a_seed_stands_for_the_same_rows():
    first, again = (list(sweep.jobs(40, 7, gpu=False)) for _ in range(2))
    assert first == again
    assert {dtype.short for _, dtype, _, _ in first} == {"f32", "f16", "bf16"}
    assert {layout for _, _, layout, _ in first} == {"nchw", "nhwc"}
    unsaved = sum(("backward", False) in rows for _, _, _, rows in first)
    assert 0 < unsaved < 20
    more = list(sweep.jobs(400, 7, gpu=False, also="small"))
    assert more[4] not in first
    assert len(more) == 400 + 3 * 3 * 2
    assert set(more) > set(sweep.jobs(400, 7, gpu=False))


@pytest.mark.parametrize("processes", ["0", "2"])
def test_rows_of_a_run(tmp_path, processes):
    out = tmp_path / "sweep.jsonl"
    command = [sys.executable, "-m", "benchmarks.sweep", "--backend", "onednn", "--shapes", "random:3:9"]
    subprocess.run([*command, "--processes", processes, "--out", out], cwd=ROOT, check=True, timeout=300)
    head, *rows = map(json.loads, out.read_text().splitlines())
    assert head["schema"] == sweep.SCHEMA
    assert head["shapes"] == "random:3:9"
    assert {(tuple(row["shape"]), row["operation"], row["saved"]) for row in rows} == {
        (dims, operation, saved) for dims, _, _, kinds in sweep.jobs(3, 9, gpu=False) for operation, saved in kinds
    }
    for row in rows:
        ways = set(row["us"]) - {"torch"}
        assert row["auto"] in ways
        assert set(row["safe"]) == ways | set(row["refused"])
        assert not row["wrong"]
        assert all(us > 0 for us in row["us"].values())
