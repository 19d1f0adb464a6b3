"""Device time of pybnorm's plans against the speed of a copy and against what else the machine has; host time per call.

A call that reads and writes each tensor once (training and inference x and y, backward x, dy and dx) and nothing else
would take those bytes over the speed of a large copy, which is measured in the same run: ``percent`` is how near a
call comes. Times on a GPU are those of a captured graph of back-to-back calls, replayed between events, over as many
buffer sets in turn as the last-level cache does not hold; tensors under `HOT_BYTES` have one set, stay in the cache,
and are marked. On the CPU they are wall times over one set.

Every measured call is first held against float64, loosely: what is wrong is reported and not timed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pybnorm
from benchmarks import case as cases
from benchmarks import rivals as others
from benchmarks.case import EPSILON, FACTOR, TOLERANCE, Case, Contender
from benchmarks.machine import Machine, TorchCuda, open_machine, parse_shape
from pybnorm import _core
from pybnorm import operations as array_level
from pybnorm._arrays import CPU, CUDA
from pybnorm.devices.timing import HOT_BYTES, buffer_sets
from pybnorm.enums import DataType, Layout
from pybnorm.errors import ArgumentError, BackendError, PybnormError, UnsupportedError

__all__ = ["BACKENDS", "DTYPES", "LAYOUTS", "LOW_RATIO", "OPERATIONS", "SHAPES", "render", "run", "summarize"]

BACKENDS = tuple(name for name in pybnorm.backends() if _core.device_types(name)[0] in (CPU, CUDA))
"""Those whose device can be timed here."""
SHAPES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "h200": (
        (256, 64, 112, 112),
        (256, 256, 56, 56),
        (256, 512, 28, 28),
        (256, 1024, 14, 14),
        (256, 2048, 7, 7),
        (8, 64, 32, 32),
        (8, 64, 16, 64, 64),
    ),
    "resnet50": (
        (64, 64, 112, 112),
        (64, 64, 56, 56),
        (64, 256, 56, 56),
        (64, 128, 28, 28),
        (64, 512, 28, 28),
        (64, 256, 14, 14),
        (64, 1024, 14, 14),
        (64, 512, 7, 7),
        (64, 2048, 7, 7),
    ),
    "mobilenetv2": (
        (64, 32, 112, 112),
        (64, 96, 112, 112),
        (64, 144, 56, 56),
        (64, 192, 28, 28),
        (64, 384, 14, 14),
        (64, 960, 7, 7),
        (64, 1280, 7, 7),
    ),
    "unet3d": (
        (2, 32, 128, 128, 128),
        (2, 64, 64, 64, 64),
        (2, 128, 32, 32, 32),
        (2, 256, 16, 16, 16),
        (2, 320, 8, 8, 8),
    ),
    "small": ((32, 64, 56, 56), (32, 256, 14, 14), (32, 512, 7, 7)),
}
"""Named sets of shapes of x: those of the measurements on an H200, networks' layers at usual batches, and for a CPU."""
DTYPES = ("f32", "f16", "bf16")
OPERATIONS = tuple(cases.TOUCHED)
LAYOUTS = {"nchw": Layout.CHANNELS_FIRST, "nhwc": Layout.CHANNELS_LAST}
REPLAYS, QUICK_REPLAYS = 9, 3
HOST_BATCHES, QUICK_HOST_BATCHES = 100, 20
HOST_CALLS = 100
"""Between two synchronizations, so that the launch queue never fills."""
HOST_ROUNDS = 3
HOST_SHAPE = (2, 8, 4, 4)
LARGE_BYTES = 50 << 20
"""From here on a tensor's percent of the ceiling goes into the summary."""
LOW_RATIO = 0.97
"""A row whose ratio is below this is listed."""

Row = dict[str, Any]


def run(
    backend: str = "cudnn",
    *,
    algorithms: Sequence[str] = (),
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = DTYPES,
    layouts: Sequence[str] = tuple(LAYOUTS),
    operations: Sequence[str] = OPERATIONS,
    rivals: Sequence[str] | None = None,
    quick: bool = False,
    host: bool = True,
    tune: bool = False,
    seconds: float = math.inf,
    progress: Callable[[str, int], object] = lambda text, total: None,
) -> dict[str, Any]:
    """Measure.

    Parameters
    ----------
    backend : str
        Among `BACKENDS`.
    algorithms : sequence of str
        Of the plans; by default ``"auto"`` and, on cuDNN, ``"fast"``. The first is the one whose host time is measured.
    shapes : sequence of str
        Names of `SHAPES` and shapes as ``"NxCxHxW"``; by default ``"h200"``, on the CPU or if `quick` ``"small"``.
    dtypes, layouts, operations : sequence of str
        ``"f32"``, ``"f16"``, ``"bf16"``; ``"nchw"``, ``"nhwc"``; ``"train"``, ``"infer"``, ``"backward"``.
    rivals : sequence of str, optional
        Names of `rivals.GPU_RIVALS` or `rivals.CPU_RIVALS`; by default all. Of an absent one the reason is given.
    quick : bool
        Fewer measurements of each time, and small shapes.
    host : bool
        Also host microseconds per call.
    tune : bool
        ``"auto"`` and ``"fast"`` also as plans of ``tune=True``, by the names ``"auto tuned"`` and ``"fast tuned"``;
        what `pybnorm.tuning` remembers of them is used and added to.
    seconds : float
        After this time no other shape, dtype and layout is begun; what is left out is listed.
    progress : callable
        Called with a text and the number of texts that will come.

    Returns
    -------
    dict
        ``device``, ``library``, ``ceiling``, ``rivals``; ``rows``, each with its ``contenders`` by name, of which one
        has ``seconds`` and ``percent``, or ``unsupported``, or ``failure``; ``host``; ``summary`` by algorithm, as
        `summarize` makes it; ``left_out``; ``complete``, if not why it ``stopped``; ``good`` (nothing of ours failed).

    Raises
    ------
    ArgumentError
        Naming the argument.
    LibraryNotFoundError, NotInitializedError
        No library or no device.
    """
    start = time.monotonic()
    _known("backend", [backend], BACKENDS)
    cpu = _core.device_types(backend)[0] == 1
    chosen = _shapes(shapes or (("small",) if cpu or quick else ("h200",)))
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
    if tune:
        names += tuple(name + cases.TUNED for name in names if name in ("auto", "fast"))
    library = pybnorm.load(backend)
    machine = open_machine(library.device_type)
    result: dict[str, Any] = {
        "backend": backend,
        "device": machine.name,
        "library": {"label": library.label, "version": list(library.version), "found_via": library.found_via},
        "method": {"replays": QUICK_REPLAYS if quick else REPLAYS, "cache_bytes": machine.cache_bytes},
        "algorithms": list(names),
        "rivals": {},
        "rows": [],
        "host": [],
        "left_out": [],
        "complete": False,
        "stopped": "",
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine.current())
        handle = stack.enter_context(pybnorm.Handle(backend, stream=machine.stream or None))
        bench = _Bench(machine, handle, names, wanted, operations, quick, result, stack)
        speed, how = machine.copy_speed()
        machine.release()
        result["ceiling"] = {"bytes_per_second": speed, "how": how}
        todo = [
            (dims, dtype, layout)
            for dims in chosen
            for dtype in _data_types(dtypes)
            for layout in dict.fromkeys(layouts)
        ]
        try:
            if host:
                progress("host time", len(todo) + 1)
                result["host"] = bench.host()
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
            result["stopped"] = _one_line(error)
    base = next((name for name in all_rivals if "version" in result["rivals"].get(name, {})), None)
    result["summary"] = {name: summarize(result["rows"], name, base) for name in names} if base else {}
    found = [row["contenders"][name] for row in result["rows"] for name in names]
    failed = result["stopped"] not in ("", "interrupted") or any("failure" in f for f in found)
    result["good"] = not failed and any("seconds" in f for f in found)
    result["wall_seconds"] = time.monotonic() - start
    return result


def _known(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ArgumentError(argument, name, " | ".join(known))


def _shapes(names: Sequence[str]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for name in names:
        if name not in SHAPES and not name[:1].isdigit():
            raise ArgumentError("shapes", name, " | ".join((*SHAPES, "NxCxHxW")))
        found += SHAPES[name] if name in SHAPES else (parse_shape(name),)
    return list(dict.fromkeys(found))


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
        result: dict[str, Any],
        stack: contextlib.ExitStack,
    ) -> None:
        self.machine, self.handle, self.algorithms, self.result = machine, handle, algorithms, result
        self.operations = tuple(dict.fromkeys(operations))
        self.replays = QUICK_REPLAYS if quick else REPLAYS
        self.batches = QUICK_HOST_BATCHES if quick else HOST_BATCHES
        self.raw: others.Raw | None = None
        self.frontend: others.Frontend | None = None
        found: dict[str, dict[str, str]] = result["rivals"]
        for name in rivals:
            if name == "raw":
                try:
                    self.raw = others.Raw(handle.library.path)
                    stack.callback(self.raw.close)
                    found[name] = {"version": "the plain entry points of the library above"}
                except RuntimeError as error:
                    found[name] = {"absent": str(error)}
            else:
                found[name] = others.presence(name, machine)
            if name == "cudnn-frontend" and "absent" not in found[name] and isinstance(machine, TorchCuda):
                try:
                    self.frontend = others.Frontend(machine)
                    stack.callback(self.frontend.close)
                except Exception as error:  # of a package that is not ours, in any of its versions
                    found[name] = {"absent": _one_line(error)}
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
            return _one_line(error)
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
            for name in (*self.algorithms, *self.rivals):
                found = self._contend(case, operation, name, right)
                if "seconds" in found:
                    found["percent"] = 100 * floor / found["seconds"] / self.result["ceiling"]["bytes_per_second"]
                row["contenders"][name] = found
            self.result["rows"].append(row)
        return ""

    def _contend(self, case: Case, operation: str, name: str, right: Mapping[str, Any]) -> dict[str, Any]:
        if name == "raw":
            assert self.raw is not None
            try:
                found = self.raw.time(case, operation, self.replays)
            except RuntimeError as error:  # it has ended
                return {"unsupported": _one_line(error)}
            if "failure" in found:
                return {"unsupported": found["failure"]}
            wrong = found["error"] is None or found["error"] > TOLERANCE
            return {"failure": f"wrong: error {found['error']}"} if wrong else found
        own = name in self.algorithms
        try:
            contender = self._contender(case, operation, name)
        except UnsupportedError as error:
            return {"unsupported": _one_line(error)}
        except PybnormError as error:
            return {"failure": _one_line(error)}
        except Exception as error:
            if own:
                raise
            return {"unsupported": _one_line(error)}
        found = {"algorithm": contender.algorithm, "reason": contender.reason} if own else {}
        self.handle.fill(57.0, case.sets[0].y)  # far from every right result: what is not written is seen
        try:
            with contender.context():
                contender.calls[0]()
                self.machine.synchronize()
                wrong_by = cases.error(case, contender.outputs(), dict(right))
                if not wrong_by <= TOLERANCE:
                    return found | {"failure": f"wrong: error {wrong_by:.2g}"}
                timing = self.machine.time(contender.calls, self.replays)
        except PybnormError as error:
            return found | {"failure": _one_line(error)}
        except RuntimeError as error:
            if own:
                raise
            return {"unsupported": _one_line(error)}
        return found | timing._asdict() | {"error": wrong_by}

    def _contender(self, case: Case, operation: str, name: str) -> Contender:
        if name in self.algorithms:
            return cases.ours(case, self.handle, operation, name)
        if name == "numpy":
            return others.numpy_formula(case, operation)
        if name == "cudnn-frontend":
            assert self.frontend is not None
            return self.frontend.contender(case, operation)
        return others.torch_calls(case, operation, native=name == "torch-native")

    # ------------------------------------------------------------ host time

    def host(self) -> list[dict[str, Any]]:
        """Microseconds per call of a tiny tensor, for each operation and way to call."""
        case = cases.make(self.machine, self.handle, HOST_SHAPE, DataType.FLOAT32, Layout.CHANNELS_FIRST, 1)
        return [row for operation in self.operations for row in self._host(case, operation)]

    def _host(self, case: Case, operation: str) -> list[dict[str, Any]]:
        machine, handle, first = self.machine, self.handle, case.sets[0]
        here: Callable[[Any], Any] = lambda array: array  # noqa: E731
        kind = "buffers"
        if isinstance(machine, TorchCuda):
            kind = "torch tensors"
        elif not machine.gpu:
            here, kind = machine.view, "NumPy arrays"  # type: ignore[attr-defined]
        arrays = {"x": first.x, "dy": first.dy, "y": first.y, "scale": case.scale, "bias": case.bias}
        arrays |= {"mean": case.mean, "variance": case.variance}
        arrays |= {"saved_mean": case.saved_mean, "saved_inv": case.saved_inv_variance}
        arrays |= {name: case.unwritten() for name in ("out_mean", "out_inv", "dscale", "dbias")}
        arrays |= dict(zip(("running_mean", "running_variance"), case.running(), strict=True))
        # a_x is the address of x. timeit puts the statements into its own loop, so that no call of ours is timed too.
        known: dict[str, Any] = {f"a_{name}": machine.address(array) for name, array in arrays.items()}
        known |= {name: here(array) for name, array in arrays.items()}
        memory = machine.empty_bytes(1 << 20)
        known |= {"handle": handle, "array_level": array_level, "workspace": (machine.address(memory), 1 << 20)}
        known |= {"EPSILON": EPSILON, "FACTOR": FACTOR}
        method, order, call = _HOST_CALLS[operation]
        ways = [
            (f"Handle call, {kind}", f"handle.{call}"),
            (f"pybnorm.operations, {kind}", f"array_level.{call.replace('(', '(handle, ', 1)}"),
        ]
        rows: list[dict[str, Any]] = []
        try:
            plan = getattr(handle, method)(first.x, algorithm=self.algorithms[0], epsilon=EPSILON)
        except UnsupportedError as error:
            rows.append({"operation": operation, "call": "plan, addresses", "failure": _one_line(error)})
        else:
            known |= {"plan": plan, "own": known["workspace"] if plan.workspace_size else None}
            addresses = ", ".join(f"a_{name}" for name in order)
            ways[:0] = [
                (f"plan {plan.algorithm}, addresses", f"plan({addresses}, own)"),
                (f"plan {plan.algorithm}, {kind}", f"plan({', '.join(order)}, own)"),
            ]
        statements: list[tuple[str, str, Callable[[], contextlib.AbstractContextManager[object]]]] = [
            (name, statement, contextlib.nullcontext) for name, statement in ways
        ]
        more, why_not = self._returning(operation, kind, known)
        statements += [(name, statement, contextlib.nullcontext) for name, statement in more.items()]
        rows += [{"operation": operation, "call": name, "failure": why} for name, why in why_not.items()]
        for name in self.rivals:
            if name == "raw":
                continue
            try:
                contender = self._contender(case, operation, name)
            except Exception:  # the device's rows say why
                continue
            variable = f"rival_{len(statements)}"
            known[variable] = contender.bare or contender.calls[0]
            statements.append((name, f"{variable}()", contender.context))
        times: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        # In rounds, so that what slows the machine for a moment slows every way of calling alike.
        rounds = min(HOST_ROUNDS, self.batches)
        for _turn in range(rounds):
            for name, statement, context in statements:
                if name in failed:
                    continue
                with context():
                    timer = timeit.Timer(statement, globals=known)
                    try:
                        timer.timeit(1)
                    except Exception as error:
                        if name not in more and name not in self.rivals:
                            raise  # a call of ours that nothing but a bug can make fail
                        failed[name] = _one_line(error)  # more: these choose handle, stream and memory themselves
                        continue
                    for _ in range(self.batches // 5):  # until the processor's clock has risen
                        timer.timeit(HOST_CALLS)
                        machine.synchronize()
                    machine.synchronize()
                    for _ in range(self.batches // rounds):
                        times.setdefault(name, []).append(timer.timeit(HOST_CALLS) / HOST_CALLS)
                        machine.synchronize()
            if self.raw is not None and "raw C" not in failed:
                try:
                    answer = self.raw.host(operation, self.batches // rounds, HOST_CALLS)
                except RuntimeError as error:
                    failed["raw C"] = _one_line(error)
                else:
                    times.setdefault("raw C", []).append(answer["microseconds"] * 1e-6)
        for name in [*[name for name, *_ in statements], "raw C"]:
            if name in failed:
                rows.append({"operation": operation, "call": name, "failure": failed[name]})
            elif name in times:
                rows.append(
                    {"operation": operation, "call": name, "microseconds": statistics.median(times[name]) * 1e6}
                )
        return rows

    def _returning(self, operation: str, kind: str, known: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
        """(statements by name, failures by name) of the calls that return new arrays, with and without gradients."""
        if kind == "buffers":  # of which no framework can make more
            return {}, {}
        name = f"functional, {kind}"
        try:
            from pybnorm import functional
        except ImportError as error:
            return {}, {name: _one_line(error)}
        known |= {"functional": functional, "ALGORITHM": self.algorithms[0]}
        statements = {name: f"functional.{_RETURNING_CALLS[operation]}"}
        if operation != "train" or not isinstance(self.machine, TorchCuda):
            return statements, {}
        torch = self.machine.torch
        name = "forward and backward by autograd, pybnorm.torch"
        try:
            from pybnorm.torch import batch_norm
        except Exception as error:  # of PyTorch, in any of its versions
            return statements, {name: _one_line(error)}
        leaves = [known[key].detach().clone().requires_grad_() for key in ("x", "scale", "bias")]

        def both(call: Callable[..., Any], x: Any = leaves[0], scale: Any = leaves[1], bias: Any = leaves[2]) -> None:
            y = call(x, known["running_mean"], known["running_variance"], scale, bias, True, FACTOR, EPSILON)
            torch.autograd.grad(y, leaves, known["dy"])

        known |= {"both": both, "our_batch_norm": batch_norm, "torch_batch_norm": torch.nn.functional.batch_norm}
        statements[name] = "both(our_batch_norm)"
        if "torch" in self.rivals:
            statements["forward and backward by autograd, torch"] = "both(torch_batch_norm)"
        return statements, {}


# The calls of pybnorm.functional that return new arrays.
_RETURNING_CALLS = {
    "train": "batch_norm_training(x, scale, bias, running_mean, running_variance, epsilon=EPSILON, "
    "exponential_average_factor=FACTOR, algorithm=ALGORITHM)",
    "infer": "batch_norm_inference(x, scale, bias, mean, variance, epsilon=EPSILON, algorithm=ALGORITHM)",
    "backward": "batch_norm_backward(x, dy, scale, saved_mean, saved_inv, epsilon=EPSILON, algorithm=ALGORITHM)",
}
# The method that makes a plan, the order of the plan's arguments, and the same call by keywords of a Handle and,
# behind the handle, of pybnorm.operations.
_HOST_CALLS = {
    "train": (
        "plan_forward_training",
        ("x", "scale", "bias", "y", "running_mean", "running_variance", "out_mean", "out_inv"),
        "forward_training(x, scale, bias, y, running_mean=running_mean, running_variance=running_variance, "
        "saved_mean=out_mean, saved_inv_variance=out_inv, epsilon=EPSILON, workspace=workspace)",
    ),
    "infer": (
        "plan_forward_inference",
        ("x", "scale", "bias", "mean", "variance", "y"),
        "forward_inference(x, scale, bias, mean, variance, y, epsilon=EPSILON, workspace=workspace)",
    ),
    "backward": (
        "plan_backward",
        ("x", "dy", "scale", "y", "dscale", "dbias", "saved_mean", "saved_inv"),
        "backward(x, dy, scale, y, dscale, dbias, saved_mean=saved_mean, saved_inv_variance=saved_inv, "
        "epsilon=EPSILON, workspace=workspace)",
    ),
}


def _one_line(error: BaseException) -> str:
    text = error.text if isinstance(error, BackendError) and error.text else error
    return " ".join(f"{type(error).__name__}: {text}".split())[:300]


# ---------------------------------------------------------------- what it comes to


def summarize(rows: Sequence[Row], name: str, base: str) -> dict[str, Any]:
    """The ratios of a rival's times to those of one algorithm; above 1 the algorithm is faster.

    Parameters
    ----------
    rows : sequence of dict
        As `run` makes them.
    name, base : str
        Contenders: ours and the rival.

    Returns
    -------
    dict
        ``base``; ``rows``, how many have both; ``geometric_mean`` of all and ``worst``, the lowest (None without rows);
        ``below``, the rows under `LOW_RATIO`, lowest first; ``groups`` by operation, layout and dtype with
        ``geometric_mean``, ``lowest``, and ``lowest_percent`` of the ceiling among tensors of `LARGE_BYTES` and more
        (None without).
    """
    found = []
    percents: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        group = (row["operation"], row["layout"], row["dtype"])
        own, other = row["contenders"].get(name, {}), row["contenders"].get(base, {})
        if "seconds" in own and row["tensor_bytes"] >= LARGE_BYTES:
            percents.setdefault(group, []).append(own["percent"])
        if "seconds" in own and "seconds" in other:
            keys = ("operation", "layout", "dtype", "shape", "hot")
            found.append({key: row[key] for key in keys} | {"ratio": other["seconds"] / own["seconds"]})
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in found:
        groups.setdefault((row["operation"], row["layout"], row["dtype"]), []).append(row["ratio"])
    ordered = sorted(found, key=lambda row: row["ratio"])
    return {
        "base": base,
        "rows": len(found),
        "geometric_mean": statistics.geometric_mean([row["ratio"] for row in found]) if found else None,
        "worst": ordered[0] if found else None,
        "below": [row for row in ordered if row["ratio"] < LOW_RATIO],
        "groups": [
            {
                "operation": group[0],
                "layout": group[1],
                "dtype": group[2],
                "rows": len(ratios),
                "geometric_mean": statistics.geometric_mean(ratios),
                "lowest": min(ratios),
                "lowest_percent": min(percents[group]) if group in percents else None,
            }
            for group, ratios in groups.items()
        ],
    }


def render(result: Mapping[str, Any], console: Any) -> None:
    """Print what `run` returned as tables.

    Parameters
    ----------
    result : mapping
    console : rich.console.Console
    """
    from rich.table import Table
    from rich.text import Text

    def table(*columns: str, left: int) -> Table:
        made = Table(box=None, padding=(0, 2, 0, 0))
        for number, column in enumerate(columns):
            made.add_column(column, justify="left" if number < left else "right", no_wrap=True)
        return made

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    library = result["library"]
    say(f"{library['label']} {'.'.join(map(str, library['version']))} ({library['found_via']}) on {result['device']}")
    ceiling = result["ceiling"]
    say(f"ceiling {ceiling['bytes_per_second'] / 1e9:.0f} GB/s: {ceiling['how']}")
    for name, found in result["rivals"].items():
        if "absent" in found:
            say(f"{name}: not measured, {found['absent']}", "yellow")
        else:
            say(f"{name}: " + ", ".join(v if k == "version" else f"{k} {v}" for k, v in found.items()))
    if result["host"]:
        console.print()
        say(f"host microseconds per call, tensor {'x'.join(map(str, HOST_SHAPE))} f32 nchw")
        kinds = list(dict.fromkeys(row["operation"] for row in result["host"]))
        rows = table("call", *kinds, left=1)
        # An algorithm's name differs between operations; the way to call is what counts in a line.
        ways: dict[str, dict[str, str]] = {}
        for row in result["host"]:
            way = row["call"]
            note = ""
            if way.startswith("plan "):
                algorithm, _, rest = way[5:].partition(", ")
                way, note = f"plan, {rest}", f" {algorithm}"
            text = f"{row['microseconds']:.2f}{note}" if "microseconds" in row else row["failure"]
            ways.setdefault(way, {})[row["operation"]] = text
        for way, cells in ways.items():
            rows.add_row(way, *(cells.get(kind, "-") for kind in kinds))
        console.print(rows)
    if result["rows"]:
        console.print()
        say(
            "microseconds per call, percent of the ceiling; * hot: stays in the cache, ! spread over 5 %, "
            "~ events around plain calls"
        )
        names = list(result["rows"][0]["contenders"])
        rows = table("operation", "layout", "dtype", "shape", *names, left=4)
        for row in result["rows"]:
            shape = "x".join(map(str, row["shape"])) + ("*" if row["hot"] else "")
            rows.add_row(
                row["operation"],
                row["layout"],
                row["dtype"],
                shape,
                *(_cell(row["contenders"][name]) for name in names),
            )
        console.print(rows)
        notes = [
            f"{name}, {_row_name(row)}: {found['failure']}"
            for row in result["rows"]
            for name, found in row["contenders"].items()
            if "failure" in found
        ]
        for note in notes:
            say(note, "bold red")
    for name, summary in result["summary"].items():
        console.print()
        if not summary["rows"]:
            say(f"{name}: no row to compare with {summary['base']}")
            continue
        worst = summary["worst"]
        say(
            f"{name} against {summary['base']}, ratio of times (above 1: {name} is faster): geometric mean "
            f"{summary['geometric_mean']:.2f} over {summary['rows']} rows, worst {worst['ratio']:.2f} "
            f"({_row_name(worst)}), {len(summary['below'])} below {LOW_RATIO}"
        )
        rows = table("operation", "layout", "dtype", "geometric mean", "lowest", "lowest % of ceiling, large", left=3)
        for group in summary["groups"]:
            percent = group["lowest_percent"]
            rows.add_row(
                group["operation"],
                group["layout"],
                group["dtype"],
                f"{group['geometric_mean']:.2f}",
                f"{group['lowest']:.2f}",
                "-" if percent is None else f"{percent:.0f}",
            )
        console.print(rows)
        for row in summary["below"]:
            say(f"  {row['ratio']:.2f}  {_row_name(row)}")
    for left in result["left_out"]:
        say(f"left out: {left['case']}: {left['reason']}", "yellow")
    if not result["complete"]:
        say(f"{result['stopped']}: the rows above are those that were finished", "bold red")


def _row_name(row: Mapping[str, Any]) -> str:
    name = f"{row['operation']} {row['layout']} {row['dtype']} {'x'.join(map(str, row['shape']))}"
    return name + (" hot" if row["hot"] else "")


def _cell(found: Mapping[str, Any]) -> str:
    if "seconds" not in found:
        return "FAILED" if "failure" in found else "n/s"
    marks = ("!" if found["spread"] > 0.05 else "") + ("~" if found["method"] == "events around calls" else "")
    words = [f"{found['seconds'] * 1e6:.4g}{marks}", f"{found['percent']:.0f}%"]
    if found.get("algorithm"):
        words.append(found["algorithm"])
    return " ".join(words)
