"""One hostile value at a time for every argument of every public callable: no crash, no hang, no error but ours.

PYBNORM_FUZZ_CALLS calls (default 12,000) are made in worker processes, each of which lives until one of its calls ends
or stops it; the whole matrix, every value for every argument, is some 520,000, and what is made beyond that are values
of chance. PYBNORM_FUZZ_SEED is what their order is made from. A finding names the call and the command that makes it
again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import hostile_calls
import hostile_values
import pytest
from matrix_worker import CRASHED, HUNG, NOT_MADE, RAW, SPENT, UNNAMED, WORDS, Matrix, Try

import pybnorm

WORKER = Path(__file__).with_name("matrix_worker.py")
CALLS = int(os.environ.get("PYBNORM_FUZZ_CALLS", "12000"))
SEED = int(os.environ.get("PYBNORM_FUZZ_SEED", "20261120"))
CHUNK = 125_000
LIMIT = 120.0
"""Seconds in which a process must make a call, its start included; then that call hangs. Far above what one takes."""
PLANS = ("ForwardTrainingPlan", "ForwardInferencePlan", "BackwardPlan")
MOST = 20
"""Crashes and hangs after which no more calls of a chunk are made."""


class Finding(NamedTuple):
    """A call that must not have become what it did."""

    index: int
    what: int
    call: str
    text: str


def run(first, count, folder, *, worker=WORKER, clock=time.monotonic):
    """Make calls; what became of each, a byte for a call, and the findings."""
    journal, findings, said = (folder / f"{name}-{first}" for name in ("journal", "findings", "said"))
    journal.write_bytes(bytes([NOT_MADE]) * (first + count))
    findings.touch()
    lost = []
    at, end = first, first + count
    while at < end and len(lost) < MOST:
        command = [sys.executable, str(worker), "--seed", str(SEED), "--first", str(at), "--count", str(end - at)]
        command += ["--journal", str(journal), "--findings", str(findings)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYBNORM_TUNE_CACHE": str(folder / "tuned.json")}
        with said.open("wb") as told, journal.open("r+b") as file:
            options = {"stdin": subprocess.DEVNULL, "stdout": told, "stderr": told, "cwd": folder, "env": environment}
            with subprocess.Popen(command, **options) as child:
                try:
                    at, hung = watched(child, file, at, clock)
                finally:
                    child.kill()
            text = f"exit status {child.returncode}: {said.read_text(errors='replace')[-3000:]}"
            if at >= end:
                break
            if child.returncode == SPENT:
                continue
            assert hung or child.returncode < 0, f"the worker failed with {text}"
            what = HUNG if hung else CRASHED
            lost.append(Finding(at, what, str(Matrix(SEED)[at]), text))
            file.seek(at)
            file.write(bytes([what]))
            at += 1
    found = [Finding(*json.loads(line)) for line in findings.read_text("utf-8").splitlines()]
    return journal.read_bytes()[first:], sorted([*found, *lost])


def watched(child, journal, at, clock):
    """Wait for the process: the first call that it has not made, and whether it made none for too long."""
    last = clock()
    while True:
        try:
            child.wait(0.1)
        except subprocess.TimeoutExpired:
            ended = False
        else:
            ended = True
        journal.seek(at)
        made = journal.read()
        before, at = at, at + len(made.partition(bytes([NOT_MADE]))[0])
        if ended:
            return at, False
        if at > before:
            last = clock()
        elif clock() - last > LIMIT:
            return at, True


def table(became):
    """Counts per module, as text."""
    matrix = Matrix(SEED)
    counts = collections.defaultdict(collections.Counter)
    for index, what in enumerate(became):
        for module in (matrix[index].target.module, "all"):
            counts[module][what] += 1
    lines = [" " * 24 + "".join(f"{word:>24}" for word in WORDS[1:])]
    for module, row in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        lines.append(f"{module:24}" + "".join(f"{row[what]:24,}" for what in range(1, len(WORDS))))
    return "\n".join(lines)


@pytest.mark.slow
def test_hostile_values(tmp_path, capsys):
    chunks = [(first, min(CHUNK, CALLS - first)) for first in range(0, CALLS, CHUNK)]
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
        reports = list(pool.map(lambda chunk: run(*chunk, tmp_path), chunks))
    became = b"".join(part for part, _ in reports)
    findings = [finding for _, part in reports for finding in part]
    with capsys.disabled():
        print(f"\n{len(became)} hostile calls from seed {SEED} in {time.monotonic() - start:.0f} s")
        if len(chunks) > 1:
            print(table(became))
    for finding in findings[:100]:
        print(f"{WORDS[finding.what]}: call {finding.index}, {finding.call}\n  {finding.text}")
        print(f"  again: {sys.executable} {WORKER} --seed {SEED} --only {finding.index}")
    assert not findings, f"{len(findings)} of {CALLS} calls\n{table(became)}"
    assert NOT_MADE not in became


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("_core.CallList.run", "handle", "a handle that was not made"),
        ("_core.Handle.query_runtime_error", "mode", "a str's subclass that has no hash"),
        ("check.run.archive.read_run", "path", "10**5 letters"),
        ("check.Problem", "fill", "a str's subclass that has no hash"),
        ("devices.cpu.Device.from_numpy", "array", "an array of a class that fails"),
        ("directml.batch_normalization", "fused_activation", "an object whose every attribute fails"),
        ("directml.batch_normalization_training", "fused_activation", "an object whose __class__ fails"),
        ("known_defects", "backend", "an object whose every attribute fails"),
        ("miopen.cumulative_average_factor", "n", "10**400"),
        ("miopen.cumulative_average_factor", "n", "np.timedelta64(1, 's')"),
        ("reference.gather_stats", "means", "a matrix"),
        ("reference.stats", "axis", "an object whose __index__ changes"),
        ("sync.SyncBatchNorm", "handle", "a handle that was not made"),
        ("sync.SyncBatchNorm.forward", "x", "None"),
        ("sync.SyncBatchNorm.backward", "x", "None"),
    ],
)
def test_what_was_a_raw_error_in_the_whole_matrix(name, parameter, value, tmp_path, monkeypatch, need_device):
    need_device("onednn")  # what the good values are made of
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = {v.name: v for v in hostile_values.VALUES}
    call = Try(hostile_calls.TARGETS[f"pybnorm.{name}"], parameter, named[value])
    world = hostile_calls.World()
    with world.handle:
        became, text = call.perform(world, None)
    assert became < RAW, text


ONCE_CRASHED = (
    "None", "a handle that was not made", "a descriptor that was not made", "a plan that was not made",
    "a plan's base class", "the array's address", "an array of O",
    *(f"a DLPack tensor {name}, version {version}" for version in (0, 1)
      for name in ("of shape NULL", "of 2**30 axes", "of -1 axes", "of 65 axes", "at NULL", "at NULL with an offset",
                   "with an offset of 2**64 - 1", "of no lanes")),
)  # fmt: skip
"""Values that have ended the process: an address taken for an array, memory that is not there, what was never made."""


@pytest.mark.slow
def test_what_once_ended_the_process_is_refused_by_every_argument(tmp_path, monkeypatch, need_device):
    """Of the compiled module and of functional, whose second call of a kind takes another road than the first."""
    need_device("onednn")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = {v.name: v for v in hostile_values.VALUES}
    world, wrong, made = hostile_calls.World(), [], 0
    with world.handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, target in hostile_calls.TARGETS.items():
            if not name.startswith(("pybnorm._core.", "pybnorm.functional.")):
                continue
            if name not in hostile_calls.REFUSED:
                target.call(target.good(world))
            for parameter in target.parameters:
                for value in [named[n] for n in ONCE_CRASHED] if parameter != "self" else [None]:
                    if value is not None and value.address and parameter in target.addresses:
                        continue
                    became, text = (call := Try(target, parameter, value)).perform(world, None)
                    made += 1
                    if became >= RAW or (parameter == "self" and became == UNNAMED):
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


@pytest.mark.slow
def test_a_crash_a_hang_and_a_raw_error_are_found(tmp_path):
    hanging = tmp_path / "hanging"
    perform = "            became, text = matrix.perform(index, world)\n"
    broken = WORKER.read_text("utf-8").replace(
        perform,
        f"""
            if index == 12:
                __import__("os").abort()
            if index == 14:
                Path({str(hanging)!r}).touch()
                __import__("signal").pause()
            if index == 16:
                hostile_calls.CALLED_BACK = ()  # whichever argument is tried here
                matrix[index].target.function = {{}}.__getitem__
            if index == 17:
                matrix[index].target.function = out_of_memory
{perform}""",
    )
    assert "abort()" in broken
    out = """def out_of_memory(*_, **__):
    try:
        raise MemoryError
    except MemoryError as error:
        raise PybnormError("hidden") from error


def main("""
    broken = broken.replace("def main(", out)
    worker = tmp_path / "matrix_worker.py"
    worker.write_text(broken.replace("str(Path(__file__).parent)", repr(str(WORKER.parent))), "utf-8")
    jumps = itertools.count(1)

    def clock():  # goes on jumping until the hang is found, whenever the wait began
        waits = hanging.exists() and (tmp_path / "journal-10").read_bytes()[14] == NOT_MADE
        return time.monotonic() + (1e6 * next(jumps) if waits else 0)

    became, findings = run(10, 9, tmp_path, worker=worker, clock=clock)
    found = {finding.index: finding for finding in findings}
    assert {index: finding.what for index, finding in found.items()} == {12: CRASHED, 14: HUNG, 16: RAW, 17: RAW}
    assert [at for at, what in enumerate(became, 10) if what >= RAW] == [12, 14, 16, 17]
    assert "exit status -6" in found[12].text
    assert "Fatal Python error: Aborted" in found[12].text
    assert found[17].text.startswith("MemoryError behind PybnormError")
    assert found[16].call == str(Matrix(SEED)[16])
    assert all(WORDS[what] in table(became) for what in (RAW, CRASHED, HUNG))


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
    names = collections.Counter(value.name for value in hostile_values.VALUES)
    assert max(names.values()) == 1, names.most_common(3)
