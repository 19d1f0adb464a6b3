"""Device time of pybnorm's plans against the speed of a copy and against what else the machine has; host time per call.

A call that reads and writes each tensor once (training and inference x and y, backward x, dy and dx) and nothing else
would take those bytes over the speed of a large copy, which is measured in the same run: ``percent`` is how near a
call comes. Times on a GPU are those of a captured graph of back-to-back calls, replayed between events, over as many
buffer sets in turn as the last-level cache does not hold; tensors under `HOT_BYTES` have one set, stay in the cache,
and are marked. On the CPU they are wall times over one set, the best of many short measurements in which all
contenders take turns.

Every call is first compared with float64 within a loose tolerance; a wrong one is reported and not timed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pybnorm
from benchmarks import case as cases
from benchmarks import rivals as others
from benchmarks import tables
from benchmarks.case import TOLERANCE, Case, Contender, one_line
from benchmarks.host import SHAPE as HOST_SHAPE
from benchmarks.host import Host
from benchmarks.machine import Machine, TorchCuda, open_machine
from benchmarks.shapes import drawn, shapes_of
from benchmarks.timing import HOT_BYTES, buffer_sets
from pybnorm import _core
from pybnorm._arrays import CPU, CUDA
from pybnorm.enums import DataType, Layout
from pybnorm.errors import ArgumentError, LibraryError, NotInitializedError, PybnormError, UnsupportedError

__all__ = ["BACKENDS", "DTYPES", "LAYOUTS", "OPERATIONS", "here", "run"]

BACKENDS = tuple(name for name in pybnorm.backends() if _core.device_types(name)[0] in (CPU, CUDA))
"""Backends with a device that can be timed here."""
DTYPES = ("f32", "f16", "bf16", "f64")  # the first three where none is named
OPERATIONS = tuple(cases.TOUCHED)
LAYOUTS = {"nchw": Layout.CHANNELS_FIRST, "nhwc": Layout.CHANNELS_LAST}
REPLAYS, QUICK_REPLAYS = 9, 3

Row = dict[str, Any]


def here() -> str:
    """The first of `BACKENDS` that finds its library and a device here, GPUs before the CPU.

    Raises
    ------
    LibraryNotFoundError, NotInitializedError
        None does; the error is that of the last.
    """
    *others, last = sorted(BACKENDS, key=lambda name: _core.device_types(name)[0] == CPU)
    for name in others:
        with contextlib.suppress(LibraryError, NotInitializedError):
            pybnorm.Handle(name).close()
            return name
    pybnorm.Handle(last).close()
    return last


def run(
    backend: str | None = None,
    *,
    algorithms: Sequence[str] = (),
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = DTYPES[:3],
    layouts: Sequence[str] = tuple(LAYOUTS),
    operations: Sequence[str] = OPERATIONS,
    rivals: Sequence[str] | None = None,
    quick: bool = False,
    host: bool = True,
    eager: bool = False,
    seconds: float = math.inf,
    progress: Callable[[str, int], object] = lambda text, total: None,
) -> dict[str, Any]:
    """Measure.

    Parameters
    ----------
    backend : str, optional
        Among `BACKENDS`; by default the first of them that finds a device here, GPUs before the CPU.
    algorithms : sequence of str
        Of the plans; by default ``"auto"`` and, on cuDNN, ``"fast"``. The first is the one whose host time is measured.
    shapes : sequence of str
        Names of `shapes.SHAPES`, ``"random:COUNT"`` and ``"random:COUNT:SEED"``, and shapes as ``"NxCxHxW"``; by
        default ``"h200"``, on the CPU or if `quick` ``"small"``.
    dtypes, layouts, operations : sequence of str
        ``"f32"``, ``"f16"``, ``"bf16"``, ``"f64"``; ``"nchw"``, ``"nhwc"``; ``"train"``, ``"infer"``, ``"backward"``.
    rivals : sequence of str, optional
        Names of `rivals.GPU_RIVALS` or `rivals.CPU_RIVALS`; by default all. Of an absent one the reason is given.
    quick : bool
        Fewer measurements of each time, and small shapes.
    host : bool
        Also host microseconds per call.
    eager : bool
        On a GPU with PyTorch, times of calls queued one by one, which the host may slow, in place of a graph's.
    seconds : float
        After this time no other shape, dtype and layout is begun; what is left out is listed. With a limit each shape
        comes in one dtype and layout, in turn, before any comes in a second.
    progress : callable
        Called with a text and the number of texts that will come.

    Returns
    -------
    dict
        ``device``, ``library``, ``ceiling``, ``rivals``; ``shapes``, by name, of random ones with the seed; ``rows``,
        each with its ``contenders`` by name, of which one has ``seconds`` and ``percent``, or ``unsupported``, or
        ``failure``; ``host``; ``summary`` by algorithm, as `tables.summarize` makes it; ``left_out``; ``complete``, if
        not why it ``stopped``; ``good`` (nothing of ours failed).

    Raises
    ------
    ArgumentError
        Naming the argument.
    LibraryNotFoundError, NotInitializedError
        No library or no device.
    """
    start = time.monotonic()
    backend = here() if backend is None else backend
    _known("backend", [backend], BACKENDS)
    cpu = _core.device_types(backend)[0] == CPU
    shapes = drawn(shapes or (("small",) if cpu or quick else ("h200",)))
    chosen = shapes_of(shapes, gpu=not cpu)
    all_rivals = others.CPU_RIVALS if cpu else others.GPU_RIVALS
    wanted = all_rivals if rivals is None else tuple(dict.fromkeys(rivals))
    names = tuple(dict.fromkeys(algorithms or (("auto",) if cpu else ("auto", "fast"))))
    for argument, given, known in (
        ("rivals", wanted, all_rivals),
        ("dtypes", dtypes, DTYPES),
        ("layouts", layouts, LAYOUTS),
        ("operations", operations, OPERATIONS),
        ("algorithms", [name.partition(":")[0] for name in names], _core.algorithms(backend)),
    ):
        _known(argument, given, known)
    library = pybnorm.load(backend)
    machine = open_machine(library.device_type)
    if eager and not isinstance(machine, TorchCuda):
        raise ArgumentError("eager", eager, "False but on a GPU with PyTorch; on the CPU all calls are timed so")
    result: dict[str, Any] = {
        "backend": backend,
        "device": machine.name,
        "library": {"label": library.label, "version": list(library.version), "found_via": library.found_via},
        "method": {"replays": QUICK_REPLAYS if quick else REPLAYS, "cache_bytes": machine.cache_bytes},
        "algorithms": list(names),
        "shapes": shapes,
        "rivals": {},
        "rows": [],
        "host": [],
        "host_shape": list(HOST_SHAPE),
        "left_out": [],
        "complete": False,
        "stopped": "",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine.current())
        handle = stack.enter_context(pybnorm.Handle(backend, stream=machine.stream or None))
        bench = _Bench(machine, handle, names, wanted, operations, quick, eager, result, stack)
        speed, how = machine.copy_speed()
        machine.release()
        result["ceiling"] = {"bytes_per_second": speed, "how": how}
        kinds = [(dtype, layout) for dtype in _data_types(dtypes) for layout in dict.fromkeys(layouts)]
        if seconds < math.inf:  # a time limit leaves out dtypes and layouts rather than shapes
            turns = range(len(kinds))
            todo = [(dims, *kinds[(i + turn) % len(kinds)]) for turn in turns for i, dims in enumerate(chosen)]
        else:
            todo = [(dims, *kind) for dims in chosen for kind in kinds]
        try:
            if host:
                progress("host time", len(todo) + 1)
                host_time = Host(machine, handle, names[0], bench.rivals, bench.contender, quick)
                result["host"] = [row for operation in bench.operations for row in host_time.rows(operation)]
            for dims, dtype, layout in todo:
                text = f"{'x'.join(map(str, dims))} {dtype.short} {layout}"
                progress(text, len(todo) + host)
                if time.monotonic() - start > seconds:
                    result["left_out"].append({"case": text, "reason": f"after {seconds:g} s"})
                    continue
                reason = bench.measure(dims, dtype, layout)
                if reason:
                    result["left_out"].append({"case": text, "reason": reason})
                machine.release()
            result["complete"] = True
        except KeyboardInterrupt:
            result["stopped"] = "interrupted"
        except RuntimeError as error:  # the device's context is lost, or a bug: what was measured before counts
            result["stopped"] = one_line(error)
    base = next((name for name in all_rivals if "version" in result["rivals"].get(name, {})), None)
    result["summary"] = {name: tables.summarize(result["rows"], name, base) for name in names} if base else {}
    found = [row["contenders"][name] for row in result["rows"] for name in names]
    failed = result["stopped"] not in ("", "interrupted") or any("failure" in f for f in found)
    result["good"] = not failed and any("seconds" in f for f in found)
    result["wall_seconds"] = time.monotonic() - start
    return result


def _known(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ArgumentError(argument, name, " | ".join(known))


def _data_types(names: Sequence[str]) -> list[DataType]:
    return [next(t for t in DataType if t.short == name) for name in dict.fromkeys(names)]


class _Bench:
    """What all measurements of one run share."""

    def __init__(
        self,
        machine: Machine,
        handle: pybnorm.Handle,
        algorithms: Sequence[str],
        rivals: Sequence[str],
        operations: Sequence[str],
        quick: bool,
        eager: bool,
        result: dict[str, Any],
        stack: contextlib.ExitStack,
    ) -> None:
        self.machine, self.handle, self.algorithms, self.result = machine, handle, algorithms, result
        self.operations = tuple(dict.fromkeys(operations))
        self.replays, self.eager = QUICK_REPLAYS if quick else REPLAYS, eager
        self.frontend: others.Frontend | None = None
        found: dict[str, dict[str, str]] = result["rivals"]
        for name in rivals:
            found[name] = others.presence(name, machine)
            if name == "cudnn-frontend" and "absent" not in found[name] and isinstance(machine, TorchCuda):
                try:
                    self.frontend = others.Frontend(machine)
                    stack.callback(self.frontend.close)
                except Exception as error:  # of a package that is not ours, in any of its versions
                    found[name] = {"absent": one_line(error)}
        self.rivals = [name for name in rivals if "absent" not in found[name]]

    # ------------------------------------------------------------ device time

    def measure(self, dims: tuple[int, ...], dtype: DataType, layout: str) -> str:
        """The rows of one shape, dtype and layout into the result; or why they were left out."""
        machine = self.machine
        tensor_bytes = math.prod(dims) * dtype.itemsize
        sets = buffer_sets(tensor_bytes, machine.cache_bytes)
        free = machine.free_bytes()
        need = tensor_bytes * (4 * sets + 2)  # PyTorch's results too, and room for workspaces
        if free is not None and need > free:
            return f"needs about {need >> 20} MiB, {free >> 20} MiB are free"
        try:
            case = cases.make(machine, self.handle, dims, dtype, LAYOUTS[layout], sets)
        except (UnsupportedError, ArgumentError) as error:
            return one_line(error)
        for operation in self.operations:
            floor = cases.TOUCHED[operation] * tensor_bytes
            row: Row = {
                "operation": operation,
                "layout": layout,
                "dtype": dtype.short,
                "shape": list(dims),
                "tensor_bytes": tensor_bytes,
                "floor_bytes": floor,
                "sets": sets,
                "hot": machine.gpu and tensor_bytes < HOT_BYTES,
                "contenders": {},
            }
            right = cases.expected(case, operation)
            ready: dict[str, Contender] = {}
            for name in (*self.algorithms, *self.rivals):
                row["contenders"][name] = self._contend(case, operation, name, right, ready)
            timings = self.machine.time_in_turn([contender.calls for contender in ready.values()], self.replays)
            for name, timing in zip(ready, timings, strict=True):
                row["contenders"][name] |= timing._asdict()
            for found in row["contenders"].values():
                if "seconds" in found:
                    found["percent"] = 100 * floor / found["seconds"] / self.result["ceiling"]["bytes_per_second"]
            self.result["rows"].append(row)
        return ""

    def _contend(
        self, case: Case, operation: str, name: str, right: Mapping[str, Any], ready: dict[str, Contender]
    ) -> dict[str, Any]:
        """The time of one contender; ``unsupported`` or, of what must work, ``failure``.

        On the CPU those that are right become `ready` to be timed in turn, because other work there slows whoever is
        timed meanwhile.
        """
        own = name in self.algorithms
        found: dict[str, Any] = {}
        try:
            contender = self.contender(case, operation, name)
            found = {"algorithm": contender.algorithm, "reason": contender.reason} if own else {}
            found |= self._time(case, contender, right)
            if "error" in found and not self.machine.gpu:
                ready[name] = contender
            return found
        except UnsupportedError as error:  # a plan that was made may not refuse the call
            return found | {"failure" if found else "unsupported": one_line(error)}
        except PybnormError as error:
            return found | {"failure": one_line(error)}
        except Exception as error:  # of a framework, in any of its versions
            if own:
                raise
            return {"unsupported": one_line(error)}

    def _time(self, case: Case, contender: Contender, right: Mapping[str, Any]) -> dict[str, Any]:
        self.handle.fill(57.0, case.sets[0].y)  # far from every right result: what is not written is seen
        with contender.context():
            contender.calls[0]()
            self.machine.synchronize()
            wrong_by = cases.error(case, contender.outputs(), dict(right))
            if not wrong_by <= TOLERANCE:
                return {"failure": f"wrong: error {wrong_by:.2g}"}
            if not self.machine.gpu:
                return {"error": wrong_by}
            if self.eager:
                (timing,) = self.machine.time_in_turn([contender.calls], self.replays)
            else:
                timing = self.machine.time(contender.calls, self.replays)
            return timing._asdict() | {"error": wrong_by}

    def contender(self, case: Case, operation: str, name: str) -> Contender:
        """The algorithm or rival `name`; raises what it raises if it cannot do the operation."""
        if name in self.algorithms:
            return cases.ours(case, self.handle, operation, name)
        if name == "numpy":
            return others.numpy_formula(case, operation)
        if name == "cudnn-frontend":
            assert self.frontend is not None
            return self.frontend.contender(case, operation)
        return others.torch_calls(case, operation, native=name == "torch-native")
