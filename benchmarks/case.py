"""One problem of `benchmarks.device`: its arrays, who computes it, and what is right."""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pybnorm
from benchmarks.machine import Machine
from benchmarks.timing import Array64, Call
from pybnorm import reference
from pybnorm.check.language.calls import METHODS, TENSORS
from pybnorm.check.language.problem import OPERATIONS
from pybnorm.enums import DataType, Layout
from pybnorm.errors import BackendError

__all__ = [
    "EPSILON",
    "FACTOR",
    "TOLERANCE",
    "TOUCHED",
    "Case",
    "Contender",
    "Tensors",
    "arguments",
    "error",
    "expected",
    "make",
    "one_line",
    "ours",
    "planned",
    "planner",
]

TOUCHED = {"train": 2, "infer": 2, "backward": 3}
"""Operations, and how many tensors each reads or writes at least: x and y; x, dy and dx."""
EPSILON = 1e-5
FACTOR = 0.1
TOLERANCE = 1e-2
"""Largest difference over the largest right value with which a result is still timed: what `pybnorm check` judges
closely is here only to be the right computation, of 16-bit data too."""


@dataclass(frozen=True)
class Tensors:
    """Buffers of one call; backward writes dx into y."""

    x: Any
    dy: Any
    y: Any

    def of(self, argument: str) -> Any:
        """By the argument of a call."""
        return getattr(self, "y" if argument == "dx" else argument)


@dataclass(frozen=True)
class Case:
    """Random arrays of one shape, dtype and layout."""

    machine: Machine
    dims: tuple[int, ...]
    dtype: DataType
    layout: Layout
    sets: tuple[Tensors, ...]
    scale: Any
    bias: Any
    running_mean: Any
    """Running statistics of inference, and those that training starts from."""
    running_variance: Any
    saved_mean: Any
    """Statistics of x of the first set, which backward is given."""
    saved_inv_variance: Any

    @property
    def tensor_bytes(self) -> int:
        """Of x."""
        return math.prod(self.dims) * self.dtype.itemsize

    @property
    def channels(self) -> tuple[int, ...]:
        """Those whose results are checked: the first and the last."""
        return tuple(sorted({0, self.dims[1] - 1}))

    def running(self) -> tuple[Any, Any]:
        """Running statistics for a contender of its own, as they are before the first call."""
        parameters = _parameters(self.dims[1], self.dtype)
        return self.machine.vector(parameters["running_mean"]), self.machine.vector(parameters["running_variance"])

    def unwritten(self) -> Any:
        """A vector for a result."""
        return self.machine.vector(np.full(self.dims[1], np.nan, _parameter_type(self.dtype)))


@dataclass(frozen=True)
class Contender:
    """Something that computes a case: one call for each buffer set."""

    calls: tuple[Call, ...]
    outputs: Callable[[], dict[str, Any]]
    """Results of the latest call by name."""
    algorithm: str = ""
    reason: str = ""
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    bare: Call | None = None
    """The first call without what keeps its result, where that takes host time."""


def make(
    machine: Machine,
    handle: pybnorm.Handle,
    dims: tuple[int, ...],
    dtype: DataType,
    layout: Layout,
    sets: int,
    plan: pybnorm.ForwardTrainingPlan | None = None,
) -> Case:
    """Allocate and fill; the statistics for backward are those of the library's own forward training, of `plan`."""
    tensors = tuple(Tensors(*(machine.tensor(dims, dtype, layout, 3 * i + j) for j in range(3))) for i in range(sets))
    vectors = {name: machine.vector(values) for name, values in _parameters(dims[1], dtype).items()}
    nothing = np.full(dims[1], np.nan, _parameter_type(dtype))
    saved = {name: machine.vector(nothing) for name in ("saved_mean", "saved_inv_variance")}
    case = Case(machine, dims, dtype, layout, tensors, **vectors, **saved)
    address = machine.address
    first = tensors[0]
    if plan is None:
        plan = handle.plan_forward_training(first.x, first.y, running=False, epsilon=EPSILON)
    memory, workspace = _workspace(machine, plan.workspace_size)
    plan(
        address(first.x),
        address(case.scale),
        address(case.bias),
        address(first.y),
        None,
        None,
        address(case.saved_mean),
        address(case.saved_inv_variance),
        workspace,
    )
    machine.synchronize()
    del memory
    return case


def _parameter_type(dtype: DataType) -> type[np.floating[Any]]:
    return np.float64 if dtype == DataType.FLOAT64 else np.float32


def _parameters(channels: int, dtype: DataType) -> dict[str, npt.NDArray[np.floating[Any]]]:
    generator = np.random.default_rng(0)
    names = ("scale", "bias", "running_mean", "running_variance")
    return {name: generator.uniform(0.5, 1.5, channels).astype(_parameter_type(dtype)) for name in names}


def _workspace(machine: Machine, nbytes: int) -> tuple[Any, tuple[int, int] | None]:
    """(memory, what a plan takes)."""
    if nbytes == 0:
        return None, None
    memory = machine.empty_bytes(nbytes)
    return memory, (machine.address(memory), nbytes)


def arguments(case: Case, operation: str) -> dict[str, Any]:
    """The arrays of a call by argument, data of the first buffer set; what it writes is its own but for y and dx."""
    running: dict[str, Any] = {}
    if operation == "train":
        running = dict(zip(("running_mean", "running_variance"), case.running(), strict=True))
    found = {}
    for tensor in TENSORS[OPERATIONS[operation]]:
        if tensor.data:
            found[tensor.name] = case.sets[0].of(tensor.name)
        elif tensor.written:
            found[tensor.name] = running[tensor.name] if tensor.name in running else case.unwritten()
        else:
            found[tensor.name] = getattr(case, tensor.name)
    return found


def ours(case: Case, handle: pybnorm.Handle, operation: str, algorithm: str) -> Contender:
    """A plan of pybnorm, called with addresses.

    Raises
    ------
    UnsupportedError
        The algorithm cannot do it.
    """
    first, data = case.sets[0], [t.name for t in TENSORS[OPERATIONS[operation]] if t.data]
    return planned(case, operation, planner(handle, operation)(*map(first.of, data), algorithm=algorithm))


def planner(handle: pybnorm.Handle, operation: str) -> Callable[..., Any]:
    """The method of the handle, with what all plans of a case share."""
    factor = {"exponential_average_factor": FACTOR} if operation == "train" else {}
    return functools.partial(getattr(handle, f"plan_{METHODS[OPERATIONS[operation]]}"), epsilon=EPSILON, **factor)


def planned(case: Case, operation: str, plan: Any, *, saved: bool = True) -> Contender:
    """The calls of a plan; if not `saved`, one that was made without saved statistics."""
    address, given = case.machine.address, arguments(case, operation)
    tensors = TENSORS[OPERATIONS[operation]]
    if not saved:
        given |= dict.fromkeys(("saved_mean", "saved_inv_variance"))
    memory, workspace = _workspace(case.machine, plan.workspace_size)
    calls = []
    for one in case.sets:
        arrays = [one.of(t.name) if t.data else given[t.name] for t in tensors]
        calls.append(functools.partial(plan, *(None if a is None else address(a) for a in arrays), workspace))

    def outputs(memory: Any = memory) -> dict[str, Any]:  # the workspace lives as long as the calls
        return {t.name: given[t.name] for t in tensors if t.written}

    return Contender(tuple(calls), outputs, plan.algorithm, plan.reason)


def expected(case: Case, operation: str) -> dict[str, Array64]:
    """What `pybnorm.reference` makes in float64 of the checked channels of the first buffer set.

    Returns
    -------
    dict
        Arrays of shape (N or 1, channels, values) by the name of the output.
    """
    machine, channels, first = case.machine, case.channels, case.sets[0]
    x = machine.sample(first.x, channels)
    scale, bias, mean, variance = (
        machine.sample(v, channels) for v in (case.scale, case.bias, case.running_mean, case.running_variance)
    )
    if operation == "train":
        options: dict[str, Any] = {"epsilon": EPSILON, "exponential_average_factor": FACTOR}
        result = reference.forward_training(x, scale, bias, running_mean=mean, running_variance=variance, **options)
        names = ("y", "running_mean", "running_variance", "saved_mean", "saved_inv_variance")
        return {name: np.asarray(getattr(result, name), np.float64) for name in names}
    if operation == "infer":
        return {"y": reference.forward_inference(x, scale, bias, mean, variance, epsilon=EPSILON).y}
    gradients = reference.backward(x, machine.sample(first.dy, channels), scale, epsilon=EPSILON)
    return {name: np.asarray(getattr(gradients, name), np.float64) for name in ("dx", "dscale", "dbias")}


def error(case: Case, outputs: dict[str, Any], right: dict[str, Array64]) -> float:
    """The largest difference over the largest right value, of all outputs; infinite where one is not a number."""
    worst = 0.0
    for name, array in outputs.items():
        difference = np.abs(case.machine.sample(array, case.channels) - right[name]).max()
        worst = max(worst, float(difference / np.abs(right[name]).max()) if np.isfinite(difference) else math.inf)
    return worst


def one_line(error: BaseException) -> str:
    """An error as one line of a table; where it was raised, if it says nothing: a bare assert, also of a compiler."""
    text = str(error.text if isinstance(error, BackendError) and error.text else error)
    first = text.strip().partition("\n")[0].strip()
    if not first or first.endswith(":"):
        inner = error
        while inner.__cause__ is not None:
            inner = inner.__cause__
        for frame in traceback.extract_tb(inner.__traceback__)[-1:]:
            place = "/".join(Path(frame.filename).parts[-2:])
            text = f"{first} at {place}:{frame.lineno} in {frame.name}: {frame.line}"
    return " ".join(f"{type(error).__name__}: {text}".split())[:300]
