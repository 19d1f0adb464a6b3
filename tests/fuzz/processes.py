"""Makes many calls in processes of their own, so that one which crashes or hangs ends no test and is named.

    python processes.py matrix:Matrix --seed 1 --first 0 --count 1000 --journal FILE --findings FILE
    python processes.py fuzz_calls:Maker --backend miopen --seed 1 --only 417      makes one call and tells of it

A class of calls is made of (seed, backend); `start()` readies it in the process that makes calls, `calls[index]` prints
as the call, and `calls.perform(index)` makes it: what became of it, and a text. The journal has a byte for each call,
which says what became of it; a finding is a line of JSON, and so is `calls.tally` in the end.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import faulthandler
import importlib
import json
import mmap
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SEED = int(os.environ.get("PYBNORM_FUZZ_SEED", "20261120"))
NOT_MADE, ACCEPTED, REFUSED, UNNAMED, RAW, CRASHED, HUNG = range(7)
"""What became of a call. UNNAMED: refused, without the argument's name; RAW: an error that is not ours, or wrong."""
WORDS = ("not made", "accepted", "refused", "refused without a name", "raw error", "crash", "hang")
SPENT = 75
"""Exit status after a call that took all memory: CPython does not give back all of it, and oneDNN writes to the NULL of
an allocation that failed, which would be a crash of some later, innocent call."""
LIMIT = 120.0
"""Seconds in which a process must make a call, its start included; then that call hangs. Far above what one takes."""
CAPTURED = {"capture_output": True, "text": True, "errors": "replace", "check": False}
MOST = 20
"""Crashes and hangs after which no more calls of a chunk are made."""


class Finding(NamedTuple):
    """A call that must not have become what it did."""

    index: int
    what: int
    call: str
    text: str


def run(command, first, count, folder, clock=time.monotonic):
    """Make calls; what became of each, a byte for a call, the findings and the tally."""
    journal, findings, said = (folder / f"{name}-{first}" for name in ("journal", "findings", "said"))
    journal.write_bytes(bytes([NOT_MADE]) * (first + count))
    findings.touch()
    lost, at, end = [], first, first + count
    while at < end and len(lost) < MOST:
        options = ["--first", at, "--count", end - at, "--journal", journal, "--findings", findings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYBNORM_TUNE_CACHE": str(folder / "tuned.json")}
        with said.open("wb") as told, journal.open("r+b") as file:
            with subprocess.Popen(
                [*command, *map(str, options)], stdin=subprocess.DEVNULL, stdout=told, stderr=told, cwd=folder,
                env=environment,
            ) as child:  # fmt: skip
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
            again = "" if hung else subprocess.run([*command, "--only", str(at)], **CAPTURED).stdout.partition("\n")[0]
            lost.append(Finding(at, what, again, text))
            file.seek(at)
            file.write(bytes([what]))
            at += 1
    lines = [json.loads(line) for line in findings.read_text("utf-8").splitlines()]
    tally = sum((collections.Counter(line) for line in lines if type(line) is dict), collections.Counter())
    return journal.read_bytes()[first:], [*(Finding(*line) for line in lines if type(line) is list), *lost], tally


def watched(child, journal, at, clock):
    """Wait for the process: the first call that it has not made, and whether it made none for too long."""
    last = clock()
    while True:
        try:
            ended = child.wait(0.1) is not None
        except subprocess.TimeoutExpired:
            ended = False
        journal.seek(at)
        before, at = at, at + len(journal.read().partition(bytes([NOT_MADE]))[0])
        if ended:
            return at, False
        if at > before:
            last = clock()
        elif clock() - last > LIMIT:
            return at, True


def make(calls, count, chunk, folder, *options):
    """Make calls of a class in as many processes at once as there are processors; fails with the findings."""
    command = [sys.executable, str(HERE / "processes.py"), calls, "--seed", str(SEED), *options]
    chunks = [(first, min(chunk, count - first)) for first in range(0, count, chunk)]
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
        reports = list(pool.map(lambda part: run(command, *part, folder), chunks))
    findings = [finding for _, part, _ in reports for finding in part]
    for finding in findings[:100]:
        print(f"{WORDS[finding.what]}: call {finding.index}, {finding.call}\n  {finding.text}")
        print(f"  again: {' '.join(command)} --only {finding.index}")
    assert not findings, f"{len(findings)} of {count} calls"
    assert NOT_MADE not in b"".join(became for became, _, _ in reports)
    tally = sum((part for _, _, part in reports), collections.Counter())
    return f"{count} calls from seed {SEED} in {time.monotonic() - start:.0f} s", tally


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("calls")
    parser.add_argument("--backend")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--findings", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    faulthandler.enable()
    module, name = options.calls.split(":")
    calls = getattr(importlib.import_module(module), name)(options.seed, options.backend)
    calls.start()
    if options.only is not None:
        print(calls[options.only], flush=True)
        what, text = calls.perform(options.only)
        print(WORDS[what], text)
        return
    with open(options.journal, "r+b") as file, open(options.findings, "a", encoding="utf-8") as findings:
        journal = mmap.mmap(file.fileno(), 0)
        for index in range(options.first, options.first + options.count):
            what, text = calls.perform(index)
            if what >= RAW:
                print(json.dumps([index, what, str(calls[index]), text]), file=findings, flush=True)
            journal[index] = what
            if text.startswith("MemoryError"):
                sys.exit(SPENT)
        print(json.dumps(calls.tally), file=findings)


if __name__ == "__main__":
    main()
