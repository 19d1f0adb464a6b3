"""Random calls of the public API: no crash, every bad one refused by us, every good one right or a known defect.

PYBNORM_FUZZ_CALLS (default 1000) calls are made per backend, in child processes of at most 2,500, as many at once as
there are processors; PYBNORM_FUZZ_SEED is what they are made from. A failure names the call and the command that makes
it again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzz_calls import PAIRS, Maker
from fuzz_calls import made as object_of
from place import device_of  # beside test_calls, whose folder fuzz_calls has put on the path

import pybnorm

WORKER = Path(__file__).with_name("fuzz_worker.py")
CALLS = int(os.environ.get("PYBNORM_FUZZ_CALLS", "1000"))
SEED = int(os.environ.get("PYBNORM_FUZZ_SEED", "20261120"))
CHUNK = min(2500, -(-CALLS // (os.cpu_count() or 1)))


def run(backend, first, count, journal):
    """A child's report; a failure of the test where it crashed."""
    command = [sys.executable, str(WORKER), "--backend", backend, "--seed", str(SEED)]
    arguments = ["--first", str(first), "--count", str(count), "--journal", str(journal)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        last = journal.read_text().strip() if journal.exists() else "none"
        again = [*command, "--only", last]
        shown = subprocess.run(again, capture_output=True, text=True, check=False).stdout
        text = f"call {last} ended the process with {done.returncode}\n  {shown}\n{done.stderr[-3000:]}"
        pytest.fail(f"{text}\n  again: {' '.join(again)}")
    report = json.loads(done.stdout.splitlines()[-1])
    for failure in report["failures"]:
        failure["again"] = " ".join([*command, "--only", str(failure["index"])])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("calls", [CALLS])
def test_random_calls(backend, calls, tmp_path, capsys):
    totals = {"became": collections.Counter(), "kinds": collections.Counter(), "changed": collections.Counter()}
    made, seconds, failures, without_device = 0, 0.0, [], False
    chunks = [(first, min(CHUNK, calls - first)) for first in range(0, calls, CHUNK)]
    with concurrent.futures.ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
        reports = list(pool.map(lambda c: run(backend, *c, tmp_path / f"journal-{c[0]}"), chunks))
    for report in reports:
        made, seconds = made + report["made"], seconds + report["seconds"]
        failures += report["failures"]
        without_device = report["without_device"]
        for name, counter in totals.items():
            counter.update(report[name])
    with capsys.disabled():
        print(f"\n{backend}: {made} random calls from seed {SEED} in {seconds:.0f} s: {dict(totals['became'])}")
    for failure in failures:
        print(f"call {failure['index']}: {failure['call']}\n  {failure['what']}\n  again: {failure['again']}")
    assert not failures, f"{len(failures)} of {made} calls"
    assert made == calls
    if calls < 1000:
        return
    became, kinds = totals["became"], totals["kinds"]
    good = sum(n for word, n in became.items() if word in ("right", "warned") or word.startswith("known"))
    assert good > calls / 10, became
    assert became["refused"] + became["unsupported, and bad"] > calls / 4, became
    if without_device:
        return
    assert len(kinds) == 3 * 2 + 4 * 2 + 3 + 3, kinds  # batch norm, elementwise, queries, operations
    assert len(totals["changed"]) > 150, totals["changed"]


def test_every_bad_argument_of_every_call_is_refused_by_its_name(handle):
    """A good call of each kind, one argument at a time; nothing is written, and in the end the good call is right."""
    maker = Maker(handle.backend, SEED, handle, device_of(handle))
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
            for bad in map(object_of, maker.replacements(call, name, old)):
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
        if call.case is not None:
            call.case.device.synchronize()
            call.case.unchanged({**call.case.given, **call.case.made})
            if call.level == "addresses":
                with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
                    call.call(**good | {"workspace": good["x"] // 64 * 64, "workspace_size": 1 << 16})
        call.judge(call, call.call(**good))
    assert made > 2000


@pytest.mark.slow
def test_a_call_is_a_function_of_seed_and_index_and_a_crash_names_it(tmp_path, monkeypatch):
    command = [sys.executable, str(WORKER), "--backend", "native", "--seed", str(SEED), "--only", "7"]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    first, second = (re.sub(r"0x[0-9a-f]+|\b\d{9,}\b", "address", text) for text in runs)
    assert first == second
    assert first.count("\n") == 2
    made = "            call = maker.make(index)\n"
    broken = WORKER.read_text().replace(made, made + "            os.abort() if index == 3 else None\n")
    assert "os.abort()" in broken
    worker = tmp_path / "fuzz_worker.py"
    worker.write_text(broken.replace("str(Path(__file__).parent)", repr(str(WORKER.parent))))
    monkeypatch.setitem(globals(), "WORKER", worker)
    with pytest.raises(pytest.fail.Exception, match=r"call 3 ended the process with -6") as caught:
        run("native", 0, 5, tmp_path / "journal")
    assert "--only 3" in str(caught.value)
