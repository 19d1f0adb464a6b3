"""Host time per call of a tiny tensor, for every way to call."""

from __future__ import annotations

import contextlib
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pybnorm
from benchmarks import case as cases
from benchmarks.case import EPSILON, FACTOR, Case, Contender, one_line
from benchmarks.machine import Machine, TorchCuda
from pybnorm import operations as array_level
from pybnorm.check.language.calls import METHODS, TENSORS
from pybnorm.check.language.problem import OPERATIONS
from pybnorm.enums import DataType, Layout
from pybnorm.errors import UnsupportedError

__all__ = ["SHAPE", "Host"]

BATCHES, QUICK_BATCHES = 100, 20
CALLS = 100
"""Between two synchronizations, so that the launch queue never fills."""
ROUNDS = 3
SHAPE = (2, 8, 4, 4)

Row = dict[str, Any]


class _Way(NamedTuple):
    """A way to call: a statement, which timeit runs in its own loop. In it x is an array and a_x its address."""

    name: str
    statement: str
    ours: bool = False
    """Nothing but a bug can make it fail."""
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


class Host:
    """Measures host time.

    Parameters
    ----------
    machine : Machine
    handle : Handle
    algorithm : str
        Of plans and functional calls.
    rivals : sequence of str
    contender : callable
        Of a case, an operation and a rival's name.
    quick : bool
        Fewer measurements.
    """

    def __init__(
        self,
        machine: Machine,
        handle: pybnorm.Handle,
        algorithm: str,
        rivals: Sequence[str],
        contender: Callable[[Case, str, str], Contender],
        quick: bool,
    ) -> None:
        self._machine, self._handle, self._algorithm = machine, handle, algorithm
        self._rivals, self._contender = rivals, contender
        self._batches = QUICK_BATCHES if quick else BATCHES
        self._case = cases.make(machine, handle, SHAPE, DataType.FLOAT32, Layout.CHANNELS_FIRST, 1)

    def rows(self, operation: str) -> list[Row]:
        """``microseconds`` per call, or ``failure``, of each way to call."""
        machine = self._machine
        here: Callable[[Any], Any] = lambda array: array  # noqa: E731
        kind = "buffers"
        if isinstance(machine, TorchCuda):
            kind = "torch tensors"
        elif not machine.gpu:
            here, kind = machine.view, "NumPy arrays"  # type: ignore[attr-defined]
        arrays = cases.arguments(self._case, operation)
        known: dict[str, Any] = {
            f"a_{name}": machine.address(array) for name, array in arrays.items()
        }  # a_x: the address of x
        known |= {name: here(array) for name, array in arrays.items()}
        memory = machine.empty_bytes(1 << 20)
        known |= {"handle": self._handle, "array_level": array_level, "workspace": (machine.address(memory), 1 << 20)}
        known |= {"EPSILON": EPSILON, "FACTOR": FACTOR, "ALGORITHM": self._algorithm}
        ways, failed = self._ours(operation, kind, known)
        returning, why_not = self._returning(operation, kind, known)
        failed |= why_not
        ways += [*returning, *self._theirs(operation, known)]
        names = [*failed, *(way.name for way in ways)]
        times = self._timed(operation, ways, known, failed)
        rows: list[Row] = []
        for name in names:
            row = {"operation": operation, "call": name}
            if name in failed:
                rows.append(row | {"failure": failed[name]})
            elif name in times:
                rows.append(row | {"microseconds": statistics.median(times[name]) * 1e6})
        return rows

    def _ours(self, operation: str, kind: str, known: dict[str, Any]) -> tuple[list[_Way], dict[str, str]]:
        """(ways, failures by name): a plan, the handle's call, that of operations."""
        call, x = _handle_call(operation), self._case.sets[0].x
        ways = [
            _Way(f"Handle call, {kind}", f"handle.{call}", ours=True),
            _Way(f"pybnorm.operations, {kind}", f"array_level.{call.replace('(', '(handle, ', 1)}", ours=True),
        ]
        try:
            method = f"plan_{METHODS[OPERATIONS[operation]]}"
            plan = getattr(self._handle, method)(x, algorithm=self._algorithm, epsilon=EPSILON)
        except UnsupportedError as error:
            return ways, {"plan, addresses": one_line(error)}
        known |= {"plan": plan, "own": known["workspace"] if plan.workspace_size else None}
        order = [tensor.name for tensor in TENSORS[OPERATIONS[operation]]]
        addresses = ", ".join(f"a_{name}" for name in order)
        return [
            _Way(f"plan {plan.algorithm}, addresses", f"plan({addresses}, own)", ours=True),
            _Way(f"plan {plan.algorithm}, {kind}", f"plan({', '.join(order)}, own)", ours=True),
            *ways,
        ], {}

    def _returning(self, operation: str, kind: str, known: dict[str, Any]) -> tuple[list[_Way], dict[str, str]]:
        """(ways, failures by name) of the calls that return new arrays, with and without gradients.

        These choose handle, stream and memory themselves, so they can fail.
        """
        if kind == "buffers":  # no framework can make more of them
            return [], {}
        name = f"functional, {kind}"
        try:
            from pybnorm import functional
        except ImportError as error:
            return [], {name: one_line(error)}
        known["functional"] = functional
        ways = [_Way(name, f"functional.{_functional_call(operation)}")]
        if operation != "train" or not isinstance(self._machine, TorchCuda):
            return ways, {}
        torch = self._machine.torch
        name = "forward and backward by autograd, pybnorm.torch"
        try:
            from pybnorm.torch import batch_norm
        except Exception as error:  # of PyTorch, in any of its versions
            return ways, {name: one_line(error)}
        leaves = [known[key].detach().clone().requires_grad_() for key in ("x", "scale", "bias")]
        dy = self._case.sets[0].dy

        def both(call: Callable[..., Any], x: Any = leaves[0], scale: Any = leaves[1], bias: Any = leaves[2]) -> None:
            y = call(x, known["running_mean"], known["running_variance"], scale, bias, True, FACTOR, EPSILON)
            torch.autograd.grad(y, leaves, dy)

        known |= {"both": both, "our_batch_norm": batch_norm, "torch_batch_norm": torch.nn.functional.batch_norm}
        ways.append(_Way(name, "both(our_batch_norm)"))
        if "torch" in self._rivals:
            ways.append(_Way("forward and backward by autograd, torch", "both(torch_batch_norm)"))
        return ways, {}

    def _theirs(self, operation: str, known: dict[str, Any]) -> list[_Way]:
        ways = []
        for number, name in enumerate(self._rivals):
            try:
                contender = self._contender(self._case, operation, name)
            except Exception:  # the device's rows say why
                continue
            known[f"rival_{number}"] = contender.bare or contender.calls[0]
            ways.append(_Way(name, f"rival_{number}()", context=contender.context))
        return ways

    def _timed(
        self, operation: str, ways: Sequence[_Way], known: dict[str, Any], failed: dict[str, str]
    ) -> dict[str, list[float]]:
        """Seconds of each way. In rounds: what slows the machine for a moment slows every way alike."""
        times: dict[str, list[float]] = {}
        rounds = min(ROUNDS, self._batches)
        for _turn in range(rounds):
            for way in ways:
                if way.name in failed:
                    continue
                try:
                    timer = timeit.Timer(way.statement, globals=known)
                    with way.context():
                        timer.timeit(1)
                except Exception as error:
                    if way.ours:
                        raise
                    failed[way.name] = one_line(error)
                    continue
                with way.context():
                    times.setdefault(way.name, []).extend(self._batch(timer, self._batches // rounds))
        return times

    def _batch(self, timer: timeit.Timer, batches: int) -> list[float]:
        for _ in range(self._batches // 5):  # until the processor's clock has risen
            timer.timeit(CALLS)
            self._machine.synchronize()
        self._machine.synchronize()
        seconds = []
        for _ in range(batches):
            seconds.append(timer.timeit(CALLS) / CALLS)
            self._machine.synchronize()
        return seconds


def _handle_call(operation: str) -> str:
    """The call of a Handle: statistics that may be absent by keyword."""
    optional = () if operation == "infer" else ("running", "saved")
    names = [tensor.name for tensor in TENSORS[OPERATIONS[operation]]]
    given = [f"{name}={name}" if name.startswith(optional) else name for name in names]
    return f"{METHODS[OPERATIONS[operation]]}({', '.join(given)}, epsilon=EPSILON, workspace=workspace)"


def _functional_call(operation: str) -> str:
    """The call of `pybnorm.functional`, which makes its results."""
    names = [t.name for t in TENSORS[OPERATIONS[operation]] if not t.written or t.name.startswith("running")]
    named = ("running", "scale", "bias") if operation == "infer" else "running"
    given = [f"{name}={name}" if name.startswith(named) else name for name in names]
    name = {"train": "training", "infer": "inference"}.get(operation, operation)
    factor = "exponential_average_factor=FACTOR, " if operation == "train" else ""
    return f"batch_norm_{name}({', '.join(given)}, epsilon=EPSILON, {factor}algorithm=ALGORITHM)"
