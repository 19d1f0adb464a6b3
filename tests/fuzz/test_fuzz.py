"""Calls of the public API that nobody wrote: none crashes or hangs, every bad one is refused by us and by name.

Random calls on each backend: every good one is right or a known defect. Hostile values for each argument of every
public callable: no error but ours; the whole matrix, every value for every argument, is some 520,000 calls.
PYBNORM_FUZZ_CALLS calls (default 1000 random and 12,000 hostile) are made from PYBNORM_FUZZ_SEED, in processes of their
own. A failure names the call and the command that makes it again.
"""

from __future__ import annotations

import collections
import importlib
import itertools
import os
import re
import sys
import time
import warnings

import fuzz_calls
import hostile_calls
import hostile_values
import numpy as np
import processes
import pytest
from fuzz_calls import PAIRS, Maker
from matrix import Try
from place import device_of  # beside test_calls, whose folder fuzz_calls has put on the path
from processes import ACCEPTED, CRASHED, HERE, HUNG, NOT_MADE, RAW, REFUSED, SEED, UNNAMED

import pybnorm

CALLS = int(os.environ.get("PYBNORM_FUZZ_CALLS", "0"))
PLANS = ("ForwardTrainingPlan", "ForwardInferencePlan", "BackwardPlan")


@pytest.mark.slow
@pytest.mark.parametrize("calls", [CALLS or 1000])
def test_random_calls(backend, calls, tmp_path, capsys):
    chunk = min(2500, -(-calls // (os.cpu_count() or 1)))
    told, tally = processes.make("fuzz_calls:Maker", calls, chunk, tmp_path, "--backend", backend)
    became = collections.Counter({word: n for word, n in tally.items() if ": " not in word})
    with capsys.disabled():
        print(f"\n{backend}: {told}: {became}")
    if calls < 1000:
        return
    good = sum(n for word, n in became.items() if word in ("right", "warned") or word.startswith("known"))
    assert good > calls / 10, became
    assert became["refused"] + became["unsupported, and bad"] > calls / 4, became
    kinds = [word for word in tally if word.startswith("kind: ")]
    if len(kinds) > 2:  # there is a device
        assert len(kinds) == 3 * 2 + 4 * 2 + 3 + 3, kinds  # batch norm, elementwise, queries, operations
        assert sum(word.startswith("changed: ") for word in tally) > 150, tally


def test_every_bad_argument_of_every_call_is_refused_by_its_name(handle):
    """A good call of each kind, one argument at a time; nothing is written, and in the end the good call is right."""
    maker = Maker(SEED, handle.backend, handle, device_of(handle))
    calls, wrong, made = {}, [], 0
    for index in range(600):
        call = maker.good(np.random.default_rng((SEED, index)))
        needed = {n for pair in PAIRS[call.case.problem.operation] for n in pair} if call.case else set()
        there = {n for n, v in call.arguments.items() if v is not None}
        if call.support is not False and needed <= there and "activation" not in there:
            calls.setdefault((call.kind, call.level), call)
        if len(calls) == 20:
            break
    assert len(calls) == 20, calls.keys()
    for call in calls.values():
        good = dict(call.arguments)
        for name, old in good.items():
            call.arguments = good
            for bad in map(fuzz_calls.made, maker.replacements(call, name, old)):
                made += 1
                call.arguments, call.changed = good | {name: bad}, [name]
                try:
                    call.call(**call.arguments)
                    wrong.append(f"{call}: accepted")
                except pybnorm.UnsupportedError:
                    pass
                except pybnorm.ArgumentError as error:
                    told = set(re.findall(r"\w+", str(error).replace("workspace_size", "workspace")))
                    if not told & {name, name.removesuffix("_desc"), name.removesuffix("_size")}:
                        wrong.append(f"{call}: {error}")
                call.changed = []
        assert not wrong, wrong
        call.arguments = good
        call.untouched()
        if call.case is not None and call.level == "addresses":
            with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
                call.call(**good | {"workspace": good["x"] // 64 * 64, "workspace_size": 1 << 16})
        call.judge(call.call(**good))
    assert made > 2000


@pytest.mark.slow
def test_hostile_values(tmp_path, capsys):
    told, _ = processes.make("matrix:Matrix", CALLS or 12_000, 125_000, tmp_path)
    with capsys.disabled():
        print(f"\nhostile {told}")


def tried(world, name, parameter, texts):
    """What became of a callable with each of the values for an argument."""
    target = hostile_calls.TARGETS[f"pybnorm.{name}"]
    for text in texts:
        value = None if parameter == "self" else next((v for v in hostile_values.VALUES if v.name == text), None)
        if value is None and parameter != "self":
            value = hostile_values.value(text)
        if value is None or not (value.address and parameter in target.addresses):
            call = Try(target, parameter, value)
            yield call, *call.perform(world)


@pytest.fixture
def world(tmp_path, monkeypatch, need_device):
    need_device("onednn")  # what the good values are made of
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = hostile_calls.World()
    with made.handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield made


TROUBLE = "liar(__getattr__=lambda s, name: fails) | liar(__getattribute__=fails)"
PEERS = "5 | None | itertools.repeat(1) | [5]"
ONCE_RAW = {
    ("_core.CallList.run", "handle"): "pybnorm.Handle.__new__(pybnorm.Handle)",
    ("_core.Handle.(buffer|descriptor)", "argument"): "None | 5 | b'x'",
    ("_core.Handle.buffer", "output"): "1",
    ("_core.Handle.fill", "y"): "buffer(good, dims=5) | buffer(good, dtype='f32') | buffer(good, device_type=[])",
    ("_core.Handle.query_runtime_error", "mode"): "type('Str', (str,), {'__hash__': None})('x')",
    ("_core.Handle(.set_stream)?", "stream"): f"{TROUBLE} | liar(__cuda_stream__=(0,)) | '0' | 1.5 | -1 | True",
    ("_core.(Handle|TensorDescriptor).from_pointer", "pointer"): "0 | None | -1 | 'x' | 2.0",
    (
        "_core.(Handle|TensorDescriptor|capability)",
        "backend",
    ): "'cuDNN' | '' | 'cuda' | 3 | None | b'cudnn' | 'cudnn\\0'",
    ("_core.capability", "operation|mode|layout|rank"): "9 | 'f8' | 4.0",
    ("check.run.archive.read_run", "path"): "'x' * 100_000",
    ("check.Problem", "fill"): "type('Str', (str,), {'__hash__': None})('x')",
    ("devices.cpu.Device.from_numpy", "array"): "np.zeros(good.shape, good.dtype).view(Failing)",
    ("directml.batch_normalization(_training)?", "fused_activation"): f"liar(__class__=failing) | {TROUBLE}",
    ("functional.batch_norm_training", "running_(mean|variance)"): TROUBLE,
    ("graph.(BatchnormAttributes|BatchnormBackwardAttributes).set_peer_stats", "peer_stats"): PEERS,
    ("graph.Graph.build", "modes"): "5 | None | itertools.repeat(graph.HeuristicMode.A) | [5] | 1.5",
    ("graph.Tensor(Attributes)?.set_dim", "dim"): "itertools.count(1)",
    ("known_defects", "backend"): TROUBLE,
    ("miopen.cumulative_average_factor", "n"): "10**400 | np.timedelta64(1, 's')",
    ("operations.backward_elemt", "count"): "10**400",
    ("operations.fill", "y"): "buffer(good, pointer='1') | buffer(good, strides=(1, True, 1, 1))",
    ("operations.forward_training", "axis"): "np.array(1) | itertools.count() | [[1]] | None | 1.0 | b'1' | True",
    (
        "operations.gather_stats",
        "counts",
    ): "5 | itertools.count(1) | '12' | [1, True] | [1.0, 2.0] | np.array(3) | None",
    ("operations.plan", "operation"): "[] | {} | 5 | 'nothing'",
    ("reference.gather_stats", "means"): "np.zeros((2, 3), good.dtype).view(np.matrix)",
    ("reference.stats", "axis"): "liar(__index__=changing(1, -1, 2**70, 3))",
    ("sync.SyncBatchNorm", "handle"): "pybnorm.Handle.__new__(pybnorm.Handle)",
    ("sync.SyncBatchNorm.(forward|backward)", "x"): "None",
}
"""What was an error of something else, as the calls by regular expressions, the argument, and the values."""
TAKEN = dict.fromkeys(("devices.cpu.Device.from_numpy", "reference.gather_stats", "reference.stats"), ACCEPTED)
TAKEN["check.run.archive.read_run"] = UNNAMED  # in the command's words


def test_what_was_a_raw_error_is_refused_by_name(world, monkeypatch):
    monkeypatch.setattr(hostile_values, "graph", pybnorm.graph, raising=False)
    wrong = []
    for (names, parameters), texts in ONCE_RAW.items():
        rows = [
            (name.removeprefix("pybnorm."), parameter)
            for name, target in hostile_calls.TARGETS.items()
            for parameter in target.parameters
            if re.fullmatch(f"pybnorm.{names}", name) and re.fullmatch(parameters, parameter)
        ]
        assert rows, names
        also = TAKEN.get(names, REFUSED)
        for row in rows:
            made = tried(world, *row, hostile_values.each(texts))
            wrong += [(str(call), what, text) for call, what, text in made if what not in (REFUSED, also)]
    assert not wrong


ONCE_CRASHED = [
    *("None", "pybnorm.Plan.__new__(pybnorm.Plan)", "good.ctypes.data", "np.zeros(good.shape, 'O')"),
    *(f"pybnorm.{n}.__new__(pybnorm.{n})" for n in ("Handle", "TensorDescriptor", "ForwardTrainingPlan")),
    *(f"Producer(good, {version}, {fields})" for version in (0, 1) for fields in (
        "shape=0", "ndim=2**30", "ndim=-1", "ndim=65", "data=0", "data=0, byte_offset=64", "byte_offset=2**64 - 1",
        "lanes=0")),
]  # fmt: skip
"""Values that have ended the process: an address taken for an array, memory that is not there, what was never made."""


@pytest.mark.slow
def test_what_once_ended_the_process_is_refused_by_every_argument(world):
    """Of the compiled module and of functional, whose second call of a kind takes another road than the first."""
    wrong, made = [], 0
    for name, target in hostile_calls.TARGETS.items():
        if not name.startswith(("pybnorm._core.", "pybnorm.functional.")):
            continue
        if name not in hostile_calls.REFUSED:
            target.call(target.good(world))
        for parameter in target.parameters:
            texts = ONCE_CRASHED if parameter != "self" else [""]
            for call, what, text in tried(world, name.removeprefix("pybnorm."), parameter, texts):
                made += 1
                if what >= RAW or (parameter == "self" and what == UNNAMED):
                    wrong.append(f"{call}: {text}")
    assert not wrong, wrong
    assert made > 5000


@pytest.mark.parametrize("name", ["Handle", "TensorDescriptor", "Plan", *PLANS])
def test_what_was_never_made_ends_no_process(name):
    """Each attribute, and each method without arguments; a subclass that does not call our constructor is the same."""
    kind = getattr(pybnorm._core, name)
    for made in (kind, type("Own", (kind,), {"__init__": lambda self: None})):
        for attribute in dir(kind):
            try:
                found = getattr(made.__new__(made), attribute)
                if callable(found) and attribute not in dir(object):
                    found()
            except (pybnorm.ArgumentError, TypeError) as error:  # TypeError: of Python, for arguments that lack
                assert isinstance(error, pybnorm.ArgumentError) or "argument" in str(error), (attribute, error)


BROKEN = """
import os, pathlib, signal
import hostile_calls, matrix
from pybnorm.errors import PybnormError


def out_of_memory(*_, **__):
    try:
        raise MemoryError
    except MemoryError as error:
        raise PybnormError("hidden") from error


class Broken(matrix.Matrix):
    def start(self):
        self.world = hostile_calls.World()

    def perform(self, index):
        if index == 12:
            os.abort()
        if index == 14:
            pathlib.Path("hanging").touch()
            signal.pause()
        if index in (16, 17):
            hostile_calls.CALLED_BACK = ()  # whichever argument is tried here
            self[index].target.function = {16: {}.__getitem__, 17: out_of_memory}[index]
        return super().perform(index)
"""


@pytest.mark.slow
def test_a_crash_a_hang_and_a_raw_error_are_found(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    jumps = itertools.count(1)

    def clock():  # goes on jumping until the hang is found, whenever the wait began
        waits = (tmp_path / "hanging").exists() and (tmp_path / "journal-10").read_bytes()[14] == NOT_MADE
        return time.monotonic() + (1e6 * next(jumps) if waits else 0)

    command = [sys.executable, str(HERE / "processes.py"), "broken:Broken", "--seed", str(SEED)]
    became, findings, _ = processes.run(command, 10, 9, tmp_path, clock)
    found = {finding.index: finding for finding in findings}
    assert {index: finding.what for index, finding in found.items()} == {12: CRASHED, 14: HUNG, 16: RAW, 17: RAW}
    assert [at for at, what in enumerate(became, 10) if what >= RAW] == [12, 14, 16, 17]
    assert "exit status -6" in found[12].text
    assert "Fatal Python error: Aborted" in found[12].text
    assert found[12].call.startswith("pybnorm.")
    assert found[17].text.startswith("MemoryError behind PybnormError")


def test_a_call_is_a_function_of_seed_and_index():
    def shown(index):
        return re.sub(r"0x[0-9a-f]+|\b\d{9,}\b", "address", str(maker[index]))

    with pybnorm.Handle("native") as handle:
        maker = Maker(SEED, "native", handle, device_of(handle))
        maker.start()
        calls = [shown(index) for index in range(8)]
        assert [shown(index) for index in range(7, -1, -1)] == calls[::-1]
        maker.handle.close()


def test_a_new_public_name_needs_good_arguments(monkeypatch):
    def new(surprise):
        return surprise

    monkeypatch.setattr(pybnorm.operations, "__all__", [*pybnorm.operations.__all__, "new"])
    monkeypatch.setattr(pybnorm.operations, "new", new, raising=False)
    with pytest.raises(LookupError, match=r"pybnorm\.operations\.new: no good value is known for surprise"):
        hostile_calls.targets()


@pytest.mark.filterwarnings("ignore:pybnorm.* is deprecated; import:DeprecationWarning")
def test_what_is_left_out_is_there():
    names = {*hostile_calls.LEFT_OUT, *hostile_calls.PUBLIC}
    for name in (n for n in names if not n.startswith(("pybnorm.cli", "pybnorm.__main__"))):
        importlib.import_module(name)
    for name in (*hostile_calls.NOT_CALLED, *hostile_calls.REFUSED):
        if name.startswith("pybnorm.torch.") and not hostile_calls._has("torch"):
            continue
        thing = importlib.import_module("pybnorm")
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)
        assert callable(thing), name


def test_no_hostile_value_has_the_name_of_another():
    assert len({value.name for value in hostile_values.VALUES}) == len(hostile_values.VALUES)
