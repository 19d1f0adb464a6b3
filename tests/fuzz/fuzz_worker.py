"""Makes random calls in a process of its own and writes what became of them; a crash leaves the call's number behind.

    python fuzz_worker.py --backend miopen --seed 1 --first 0 --count 1000 --journal FILE
    python fuzz_worker.py --backend miopen --seed 1 --only 417      makes one call and tells of it

The journal is one line that is overwritten before each call: its index. On standard output: a JSON object.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_calls import Call, Maker

import pybnorm
from pybnorm import devices
from pybnorm.errors import WorkspaceError

MOST_FAILURES = 20


class Launches:
    """How many kernels the rig's HIP runtime was asked for; None on any other machine."""

    def __init__(self, handle: pybnorm.Handle | None) -> None:
        self.counters = None
        if handle is not None and handle.backend == "miopen":
            for name in ("libamdhip64.so.7", "libamdhip64.so.6"):  # the one that libMIOpen brought
                with contextlib.suppress(OSError, AttributeError):
                    self.counters = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD).hipcpuCounters

    def __call__(self) -> int:
        if self.counters is None:
            return 0
        numbers = [ctypes.c_size_t() for _ in range(3)]
        self.counters(*map(ctypes.byref, numbers))
        return numbers[0].value


def perform(call: Call, launches: Launches) -> str:
    """Make the call; what became of it, in a word or two. AssertionError: something is wrong."""
    launched = launches()
    try:
        result = call.call(**call.arguments)
    except pybnorm.UnsupportedError as error:
        assert error.text, "refused without a reason"
        untouched(call, launches() - launched)
        assert call.changed or call.support is not True, f"refused: {error.text}"
        return "unsupported, and bad" if call.changed else "unsupported"
    except pybnorm.ArgumentError as error:
        assert error.argument, "no argument is named"
        assert error.allowed, "what is allowed is not said"
        untouched(call, launches() - launched)
        assert call.changed or (call.activated and isinstance(error, WorkspaceError)), f"good, but refused: {error}"
        return "refused" if call.changed else "refused, its workspace"
    except pybnorm.VendorError as error:
        what = "bad and let through" if call.changed else "the vendor failed"
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from None
    assert not call.changed, "bad and accepted"
    assert call.support is not False, "accepted although this backend must refuse it"
    if call.activated:
        call.case.device.synchronize()
        return "accepted, with an activation"
    return call.judge(call, result)


def untouched(call: Call, launched: int) -> None:
    assert launched == 0, f"{launched} kernels were launched"
    if call.case is not None:
        call.case.device.synchronize()
        call.case.unchanged({**call.case.given, **call.case.made})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--journal")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about the reference of bad numbers
    handle, device, why = None, None, ""
    try:
        handle = pybnorm.Handle(options.backend)
        device = devices.device_for(handle.library.device_type, handle.device or 0)
        if device.stream:
            handle.set_stream(device.stream)
    except pybnorm.NotInitializedError as error:
        why = error.text or str(error)
    maker, launches = Maker(options.backend, options.seed, handle, device), Launches(handle)
    if options.only is not None:
        call = maker.make(options.only)
        print(call, flush=True)
        print(perform(call, launches))
        return
    journal = os.open(options.journal, os.O_WRONLY | os.O_CREAT, 0o644) if options.journal else None
    became: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    changed: collections.Counter[str] = collections.Counter()
    failures = []
    start = time.monotonic()
    for index in range(options.first, options.first + options.count):
        if journal is not None:
            os.pwrite(journal, b"%-12d\n" % index, 0)
        call = None
        try:
            call = maker.make(index)
            became[perform(call, launches)] += 1
        except Exception as error:
            text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            failures.append({"index": index, "call": str(call), "what": text})
            if len(failures) >= MOST_FAILURES:
                break
        if call is not None:
            kinds[f"{call.kind} on {call.level}"] += 1
            changed.update(f"{call.kind} on {call.level}: {name}" for name in call.changed)
    report = {
        "made": sum(kinds.values()),
        "seconds": round(time.monotonic() - start, 1),
        "device": why or device.name,
        "without_device": handle is None,
        "became": dict(became),
        "kinds": dict(kinds),
        "changed": dict(changed),
        "failures": failures,
    }
    print(json.dumps(report))
    if handle is not None:
        handle.close()


if __name__ == "__main__":
    main()
