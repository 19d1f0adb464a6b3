"""Every way of the library, and PyTorch's, timed on random shapes: `benchmarks.rules` makes auto's table of it.

    python -m benchmarks.sweep --shapes random:400:7 --seconds 330 --out sweep.jsonl

A line of JSON is what describes the run, and each that follows a row: one operation on one random shape, dtype and
layout, with microseconds by way. Lines are written as they are measured, so that a time limit loses none.

Times are those of `benchmarks.device`, of shorter measurements; of a way that takes `SLOW` times as long as the fastest
before it, one call is enough (``rough``). Plans are built by processes while one of them measures: what is measured is
queued on the device at once, and does not wait for the host. A way's first result is compared with float64 in two
channels; a wrong one is not timed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import math
import multiprocessing
import multiprocessing.connection
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import pybnorm
from benchmarks import case as cases
from benchmarks import rivals
from benchmarks.case import EPSILON, FACTOR, TOLERANCE, TOUCHED, Case, Contender, one_line
from benchmarks.device import BACKENDS, DTYPES, LAYOUTS, here
from benchmarks.machine import Machine, open_machine
from benchmarks.shapes import SHAPES, random_shapes
from pybnorm import _core
from pybnorm.devices.timing import buffer_sets
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, PybnormError

__all__ = ["SCHEMA", "run"]

SCHEMA = "pybnorm.sweep/1"
SLOW, SLOW_SECONDS = 3.0, 50e-6
"""A way is measured no closer if a call takes this many times the fastest way's time, and this much more."""
MEASUREMENT, REPLAYS = 1e-3, 3
"""Seconds of back-to-back calls in a measurement, and measurements."""
MOST_BYTES = {True: 400 << 20, False: 64 << 20}
"""Of x in float32, on a GPU and on the CPU."""
UNSAVED = 0.25
"""Share of the shapes whose backward is measured without saved statistics too."""
NAMED = 4
LAST_PLAN = {"columns": 1, "rows": 1}
"""Of numbered ways, where it is not 2, as of ``graph:2``: later plans take as long to build, and gain nothing."""
TORCH = ("torch", "torch-native")
Job = tuple[tuple[int, ...], DataType, str, tuple[tuple[str, bool], ...]]
"""A shape, its dtype and layout, and its rows: operations, and whether statistics are saved."""


@dataclass
class Built:
    """The plans of one row."""

    auto: str = ""
    fast: str = ""
    safe: list[str] = field(default_factory=list)
    """Ways that auto may take: whose results stay in the stable class."""
    plans: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


Plans = dict[tuple[str, bool], Built]
"""By operation and whether statistics are saved."""


def jobs(count: int, seed: int, gpu: bool, also: str = "") -> Iterator[Job]:
    """What a seed stands for; after each `NAMED` random shapes one of the set `also`, in any dtype and layout."""
    named = [
        (dims, dtype, layout, tuple((operation, True) for operation in TOUCHED))
        for dims in SHAPES.get(also, ())
        for dtype in DataType
        if dtype.short in DTYPES
        for layout in LAYOUTS
    ]
    random.Random(seed).shuffle(named)
    for i, dims in enumerate(random_shapes(count, seed, MOST_BYTES[gpu] // 4)):
        pick = random.Random(f"{seed} {i}")
        short, layout = pick.choice(DTYPES), pick.choice(tuple(LAYOUTS))
        dtype = next(t for t in DataType if t.short == short)
        unsaved = (("backward", False),) if pick.random() < UNSAVED else ()
        yield dims, dtype, layout, (*((operation, True) for operation in TOUCHED), *unsaved)
        if i % NAMED == NAMED - 1 and named:
            yield named.pop()


def build(handle: pybnorm.Handle, job: Job, more: Sequence[str] = ()) -> tuple[Any, Plans]:
    """The plan that makes statistics, and those of each row, also of `more` ways."""
    dims, dtype, layout, rows = job
    found: Plans = {}
    strides = pybnorm._arguments.packed_strides(dims, LAYOUTS[layout])
    with pybnorm.TensorDescriptor(handle.backend, dtype, dims, strides) as x:
        statistics = handle.plan_forward_training(x, running=False, epsilon=EPSILON)
        for operation, saved in rows:
            make = cases.planner(handle, operation)
            options = {} if operation == "infer" else {"saved": saved}
            auto = make(x, **options)
            built = Built(auto.algorithm, make(x, algorithm="fast", **options).algorithm)
            built.safe = list(_core.candidates(auto, False))
            missing: set[str] = set()
            for name in dict.fromkeys((auto.algorithm.partition("+")[0], *_core.candidates(auto, True), *more)):
                base, _, number = name.partition(":")
                if base in missing or int(number or 0) > LAST_PLAN.get(base, 2):
                    continue
                try:
                    built.plans[name] = make(x, algorithm=name, **options)
                except PybnormError as error:
                    built.refused[name] = one_line(error)
                    missing |= {base} if number else set()
            found[operation, saved] = built
    return statistics, found


def right(case: Case, operation: str) -> dict[str, Any]:
    """What is right in the checked channels of the first buffer set: float64, where the data are."""
    machine, first = case.machine, case.sets[0]
    x, dy, scale, bias, mean, variance = (
        machine.picked(array, case.channels)
        for array in (first.x, first.dy, case.scale, case.bias, case.running_mean, case.running_variance)
    )
    if operation == "infer":
        return {"y": (x - mean) * (scale * (variance + EPSILON) ** -0.5) + bias}
    count = x.shape[0] * x.shape[2]
    average = x.mean((0, 2))[None, :, None]
    deviation = ((x - average) ** 2).mean((0, 2))[None, :, None]
    inverse = (deviation + EPSILON) ** -0.5
    normal = (x - average) * inverse
    if operation == "train":
        return {
            "y": normal * scale + bias,
            "running_mean": (1 - FACTOR) * mean + FACTOR * average,
            "running_variance": (1 - FACTOR) * variance + FACTOR * deviation * (count / (count - 1)),
            "saved_mean": average,
            "saved_inv_variance": inverse,
        }
    dbias = dy.sum((0, 2))[None, :, None]
    dscale = (dy * normal).sum((0, 2))[None, :, None]
    return {"dx": scale * inverse * (dy - dbias / count - normal * (dscale / count)), "dscale": dscale, "dbias": dbias}


def error(case: Case, outputs: dict[str, Any], expected: dict[str, Any]) -> float:
    """As `benchmarks.case.error`, where the data are."""
    worst = 0.0
    for name, array in outputs.items():
        largest = float(abs(expected[name]).max())
        difference = float(abs(case.machine.picked(array, case.channels) - expected[name]).max())
        worst = max(worst, difference / largest if math.isfinite(difference) else math.inf)
    return worst


class _Sweep:
    def __init__(self, machine: Machine, write: Callable[[dict[str, Any]], object]) -> None:
        self.machine, self.write = machine, write
        torch = rivals.presence("torch", machine)
        self.rivals = () if "absent" in torch else TORCH if machine.gpu else TORCH[:1]
        self.torch = torch

    def shape(
        self, handle: pybnorm.Handle, job: Job, ways: Sequence[str] = (), wait: Callable[[], object] = lambda: None
    ) -> None:
        """Write the rows of a job; `wait` is called between its plans and its measurements."""
        try:
            plans = build(handle, job, ways)
            wait()
            self.measure(handle, job, *plans)
        except (PybnormError, RuntimeError) as problem:
            print(f"left out: {job}: {one_line(problem)}", file=sys.stderr)
        self.machine.release()

    def measure(self, handle: pybnorm.Handle, job: Job, statistics: Any, rows: Plans) -> None:
        """Write the rows of a job."""
        dims, dtype, layout, _ = job
        tensor_bytes = math.prod(dims) * dtype.itemsize
        sets = buffer_sets(tensor_bytes, self.machine.cache_bytes)
        case = cases.make(self.machine, handle, dims, dtype, LAYOUTS[layout], sets, statistics)
        for (operation, saved), plans in rows.items():
            row: dict[str, Any] = {
                "operation": operation,
                "dtype": dtype.short,
                "layout": layout,
                "shape": list(dims),
                "saved": saved,
                "sets": sets,
                "auto": plans.auto,
                "fast": plans.fast,
                "safe": plans.safe,
                "us": {},
                "rough": [],
                "wrong": {},
                "refused": plans.refused,
            }
            expected = right(case, operation)
            fastest = math.inf
            for name in (*plans.plans, *(self.rivals if saved else ())):
                try:
                    fastest = min(
                        fastest, self._one(case, handle, operation, saved, plans, name, row, expected, fastest)
                    )
                except (PybnormError, RuntimeError) as problem:
                    row["refused"][name] = one_line(problem)
            self.write(row)

    def _one(
        self,
        case: Case,
        handle: pybnorm.Handle,
        operation: str,
        saved: bool,
        plans: Built,
        name: str,
        row: dict[str, Any],
        expected: dict[str, Any],
        fastest: float,
    ) -> float:
        """Seconds of one way, which are in the row then; infinite if it is wrong."""
        contender: Contender
        if name in TORCH:
            contender = rivals.torch_calls(case, operation, native=name == "torch-native")
        else:
            contender = cases.planned(case, operation, plans.plans[name], saved=saved)
        handle.fill(57.0, case.sets[0].y)  # far from every right result: what is not written is seen
        with contender.context():
            contender.calls[0]()
            self.machine.synchronize()
        wrong_by = error(case, contender.outputs(), expected)
        if not wrong_by <= TOLERANCE:
            row["wrong"][name] = float(f"{wrong_by:.2g}") if math.isfinite(wrong_by) else None
            if name not in TORCH:
                return math.inf
        # PyTorch's own way is what the others are held against, so it is measured to the end.
        limit = math.inf if name in TORCH else max(SLOW * fastest, fastest + SLOW_SECONDS)
        with contender.context():
            timing = self.machine.time(contender.calls, REPLAYS, seconds=MEASUREMENT, limit=limit)
        row["us"][name] = float(f"{timing.seconds * 1e6:.4g}")
        if timing.replays == 1:
            row["rough"].append(name)
        return timing.seconds


def run(
    count: int,
    seed: int,
    write: Callable[[dict[str, Any]], object],
    *,
    backend: str | None = None,
    also: str = "",
    ways: Sequence[str] = (),
    seconds: float = math.inf,
    processes: int | None = None,
) -> int:
    """Measure.

    Parameters
    ----------
    count, seed : int
        Of `shapes.random_shapes`.
    write : callable
        Takes the head, and then the rows.
    backend : str, optional
        As in `benchmarks.device.run`.
    also : str
        A set of `shapes.SHAPES`.
    ways : sequence of str
        Algorithms that are measured besides those which auto and fast may take.
    seconds : float
        After them no other shape is begun.
    processes : int, optional
        That build plans; by default 14, on the CPU none but this one.

    Returns
    -------
    int
        Shapes that were measured.
    """
    end = time.monotonic() + seconds
    backend = here() if backend is None else backend
    if backend not in BACKENDS:
        raise ArgumentError("backend", backend, " | ".join(BACKENDS))
    library = pybnorm.load(backend)
    machine = open_machine(library.device_type)
    todo = list(jobs(count, seed, machine.gpu, also))
    with machine.current():
        sweep = _Sweep(machine, write)
        speed, how = machine.copy_speed()
        write(
            {
                "schema": SCHEMA,
                "backend": backend,
                "device": machine.name,
                "library": [library.label, *library.version],
                "torch": sweep.torch,
                "shapes": f"random:{count}:{seed}",
                "also": also,
                "most_bytes": MOST_BYTES[machine.gpu],
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                "copy": {"bytes_per_second": speed, "how": how},
            }
        )
        machine.release()
        processes = (14 if machine.gpu else 0) if processes is None else processes
        if processes:
            return _by_processes(processes, (backend, todo, tuple(ways)), write, end)
        with pybnorm.Handle(backend, stream=machine.stream or None) as handle:
            for done, job in enumerate(todo):
                if time.monotonic() >= end:
                    return done
                sweep.shape(handle, job, ways)
    return len(todo)


def _by_processes(count: int, given: tuple[Any, ...], write: Callable[[dict[str, Any]], object], end: float) -> int:
    """Shapes that were measured: processes make their plans at once, and measure one at a time.

    Threads would not do: the compiler of cuDNN's graphs serves one at a time in a process.
    """
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, Any] = {}
    pipe: Any
    measuring: Any = None
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, *given), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)  # what still makes plans when the time is over
            theirs.close()
            workers[ours] = process
        left, built, done = iter(range(len(given[1]))), collections.deque[Any](), 0
        while workers and time.monotonic() < end:
            for pipe in multiprocessing.connection.wait(list(workers), timeout=0.5):
                try:
                    said = pipe.recv()
                except EOFError:  # it has ended, or died
                    workers.pop(pipe)
                    measuring = None if measuring is pipe else measuring
                    continue
                if isinstance(said, dict):
                    write(said)
                elif said == "built":
                    built.append(pipe)
                else:
                    done, measuring = (done + 1, None) if measuring is pipe else (done, measuring)
                    pipe.send(next(left, None))
            while measuring is None and built:
                measuring = built.popleft()
                if measuring in workers:
                    measuring.send("measure")
                else:
                    measuring = None
    return done


def _work(pipe: Any, backend: str, todo: Sequence[Job], ways: Sequence[str]) -> None:
    """Measure the shapes that the other end of a pipe names, each when it says so."""
    machine = open_machine(pybnorm.load(backend).device_type)

    def wait() -> None:
        pipe.send("built")
        pipe.recv()

    with machine.current(), pybnorm.Handle(backend, stream=machine.stream or None) as handle:
        sweep = _Sweep(machine, pipe.send)
        while True:
            pipe.send("next")
            number = pipe.recv()
            if number is None:
                return
            sweep.shape(handle, todo[number], ways, wait)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    parser.add_argument("--backend", help="cudnn or onednn; by default cudnn where it finds a GPU")
    parser.add_argument("--shapes", default="random:400:0", metavar="random:COUNT:SEED")
    parser.add_argument("--also", default="", choices=list(SHAPES), help="a set of shapes among them, in all dtypes")
    parser.add_argument("--way", dest="ways", default=[], action="append", help="besides those that auto may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no shape after this time")
    parser.add_argument("--processes", type=int, help="that build plans")
    parser.add_argument("--out", default="-", help="the file; - is standard output")
    given = parser.parse_args()
    _, count, seed = given.shapes.split(":")
    with contextlib.ExitStack() as stack:
        target: TextIO = sys.stdout if given.out == "-" else stack.enter_context(open(given.out, "w", encoding="utf-8"))

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=target, flush=True)

        options = {name: getattr(given, name) for name in ("backend", "also", "ways", "seconds", "processes")}
        done = run(int(count), int(seed), write, **options)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(_main())
