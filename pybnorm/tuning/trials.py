"""The candidates for one call, tried on a device: judged on ordinary data, then timed.

Memory, stream and handle are its own, so the caller's are not disturbed. A candidate runs once and is judged
(`pybnorm.check.bounds`) on two channels; if a result is not within the stable class, it is not timed. Times are those
of `pybnorm bench device`: replays of a captured graph of back-to-back calls, over as many buffer sets as the last-level
cache does not hold; one set, which stays there, for small tensors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, _core, devices
from pybnorm._arrays import CUDA, Buffer
from pybnorm.check import calls
from pybnorm.check.bounds import Expected, Status, expect, judge
from pybnorm.check.data import Inputs, numpy_dtype
from pybnorm.check.problem import Problem
from pybnorm.devices.cpu import Allocation
from pybnorm.devices.timing import Call, Plain, buffer_sets
from pybnorm.enums import DataType, Operation
from pybnorm.errors import ArgumentError, LibraryError, PybnormError

__all__ = ["METHODS", "NotMeasuredError", "Task", "Tensor", "Trial", "run", "undisturbed"]

METHODS = {operation: f"plan_{name}" for operation, name in calls.METHODS.items()}
"""Methods of a Handle, by what they plan."""
KAPPA = 3.0
"""Mean over standard deviation of x: with less, the cancellation of one-pass sums would not show."""
SLOW = 3.0
"""A candidate is not measured further if its first call takes this many times the fastest, and `HOST_SECONDS` more."""
HOST_SECONDS = 20e-6
"""What the launches of several kernels may add to a call by itself, and not to a graph's."""
NEAR = 1.1
"""A candidate is measured again if it takes at most this many times the fastest of the first round."""
REPLAYS = (3, 5, 5)
"""Measurements in each round; all candidates have their turn in one before the next begins, so that a change of the
device's clock meets all of them."""
UNWRITTEN = 57.0
"""What results hold before the first call: far from every right value."""
MANY = 1 << 20
"""If a channel has more values than this, one channel is judged."""
_MIDDLES = {
    **dict.fromkeys(("scale", "running_variance", "saved_inv_variance"), 1.0),
    **dict.fromkeys(("running_mean", "saved_mean"), KAPPA),
}
"""What random vectors lie about; others lie about 0."""
_TILE = 4_000_037  # values drawn before they repeat; prime, so that no shape divides it
_ALIGNMENT = 16
_log = logging.getLogger("pybnorm.tuning")
Array = npt.NDArray[Any]


class NotMeasuredError(Exception):
    """Why nothing was measured; a plan's reason quotes it."""


class Tensor(NamedTuple):
    """What a data tensor of the calls looks like."""

    dtype: DataType
    dims: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """What all candidates compute."""

    operation: Operation
    tensors: Mapping[str, Tensor]
    """By argument of the plan: x and y; x, dy and dx."""
    parameter: Tensor
    alignment: int
    """Alignment of the data addresses: a power of two up to 16."""
    options: Mapping[str, Any]
    """Keywords of the plan without tensors, algorithm and tune."""

    @property
    def nbytes(self) -> int:
        """Bytes of the data tensors together."""
        return sum(_arguments.span(t.dims, t.strides) * t.dtype.itemsize for t in self.tensors.values())


class Trial(NamedTuple):
    """What came of one candidate."""

    seconds: float | None
    """Seconds per call; None where it was not timed to the end."""
    status: Status | None
    """The worst verdict on its results; None where it did not run."""
    note: str


def undisturbed(device_type: int) -> contextlib.AbstractContextManager[None]:
    """Restore the calling thread's current device after the block."""
    if device_type != CUDA:
        return contextlib.nullcontext()
    from pybnorm.devices import cuda

    return cuda.current_kept()


def run(task: Task, backend: str, ordinal: int, names: Sequence[str], own: str) -> dict[str, Trial]:
    """Judge and time candidates.

    Parameters
    ----------
    task : Task
    backend : str
    ordinal : int
        Of the device.
    names : sequence of str
        Algorithms.
    own : str
        That of them which is taken if none is faster; timed unless it fails, and to the end.

    Returns
    -------
    dict
        Trials by name, in the order of `names`.

    Raises
    ------
    NotMeasuredError
        Too little memory, or a problem that the judge does not know.
    LibraryNotFoundError
        CUDA without the packages ``cuda-core`` and ``cuda-bindings``.
    """
    device_type = _core.load(backend).device_type
    with undisturbed(device_type):
        machine = _machine(devices.device_for(device_type, ordinal))
        with _core.Handle(backend, stream=machine.stream or None) as handle:
            try:
                return _Trials(task, machine, handle, names, own).run()
            finally:
                machine.release()


def _machine(device: devices.Device) -> Plain:
    try:
        return Plain(device)
    except OSError as error:  # no libcuda.so.1 under that name
        raise NotMeasuredError(str(error)) from None


class _Trials:
    def __init__(self, task: Task, machine: Plain, handle: _core.Handle, names: Sequence[str], own: str) -> None:
        self.task, self.machine, self.handle, self.names, self.own = task, machine, handle, names, own
        self.found: dict[str, Trial] = {}
        x = task.tensors["x"]
        free = machine.free_bytes()
        self.room = math.inf if free is None else free // 2  # the other half is left to others
        sets = buffer_sets(_arguments.span(x.dims, x.strides) * x.dtype.itemsize, machine.cache_bytes)
        while sets > 1 and sets * task.nbytes > self.room:
            sets -= 1
        if task.nbytes > self.room:
            raise NotMeasuredError(f"it takes {task.nbytes >> 20} MiB of memory, and {(free or 0) >> 20} MiB are free")
        self.room -= sets * task.nbytes
        self.scratch = _Scratch(task, machine, handle, sets)
        self.memory: Any = None
        self.workspace: tuple[int, int] | None = None

    def run(self) -> dict[str, Trial]:
        """All of them, in rounds."""
        plans = self._plans()
        first: dict[str, float] = {}
        for name, plan in plans.items():
            trial = self._judged(plan)
            self.found[name] = trial
            if trial.seconds is not None:
                first[name] = trial.seconds
            _log.debug("%s: %s", name, trial)
        fastest = min(first.values(), default=0.0)
        left = [name for name, seconds in first.items() if name == self.own or seconds <= SLOW * fastest + HOST_SECONDS]
        times: dict[str, list[float]] = {name: [] for name in left}
        for replays in REPLAYS:
            for name in left:
                try:
                    times[name].append(
                        self.machine.time(self.scratch.calls(plans[name], self.workspace), replays).seconds
                    )
                except PybnormError as error:
                    times[name].clear()
                    self.found[name] = Trial(None, self.found[name].status, _one_line(error))
            left = [name for name in left if times[name]]
            near = NEAR * min((statistics.median(times[name]) for name in left), default=0.0)
            left = [name for name in left if name == self.own or statistics.median(times[name]) <= near]
        for name, trial in self.found.items():
            if name in left:
                self.found[name] = trial._replace(seconds=statistics.median(times[name]))
            elif trial.seconds is not None:
                self.found[name] = trial._replace(seconds=None, note="slower")
        return {name: self.found[name] for name in self.names}

    def _plans(self) -> dict[str, Any]:
        """Those that can be built and have room for their workspace, which they share."""
        make = functools.partial(getattr(self.handle, METHODS[self.task.operation]), **self.task.options)
        plans: dict[str, Any] = {}
        missing: set[str] = set()
        for name in self.names:
            base = name.partition(":")[0]
            if base in missing:
                self.found[name] = Trial(None, None, f"no more plans than those before {name}")
                continue
            try:
                plan = make(**self.scratch.tensors(), algorithm=name)
            except PybnormError as error:
                self.found[name] = Trial(None, None, _one_line(error))
                missing |= {base} if ":" in name else set()
                continue
            if plan.workspace_size > self.room:
                self.found[name] = Trial(None, None, f"{plan.workspace_size >> 20} MiB of workspace")
            else:
                plans[name] = plan
        size = max((plan.workspace_size for plan in plans.values()), default=0)
        if size:
            self.memory = self.machine.empty_bytes(size)
            self.workspace = (self.machine.address(self.memory), size)
        return plans

    def _judged(self, plan: Any) -> Trial:
        """One call judged, and the time of a few more, which is that of the host where the device is faster."""
        own = plan.algorithm.partition("+")[0] == self.own
        try:
            self.scratch.renew()
            call = self.scratch.calls(plan, self.workspace)[0]
            call()
            status, note = self.scratch.verdict()
            if status == Status.FAIL or (status != Status.PASS and not own):
                return Trial(None, status, note)
            return Trial(min(self.machine.device.time(call, repeats=3, warmup=1)), status, note)
        except LibraryError:
            raise
        except PybnormError as error:
            return Trial(None, None, _one_line(error))


class _Scratch:
    """Buffers of the calls with ordinary random values, and what is right."""

    def __init__(self, task: Task, machine: Plain, handle: _core.Handle, sets: int) -> None:
        self.task, self.machine, self.handle = task, machine, handle
        self.outputs = [t.name for t in calls.TENSORS[task.operation] if t.data and t.written]
        generator = np.random.default_rng(0)
        drawn = generator.standard_normal(_TILE, np.float32)
        self.host = {
            name: self._flat(name, np.roll(drawn, 17 * i))
            for i, name in enumerate(task.tensors)
            if name not in self.outputs or self._beta
        }
        self.vectors = self._vectors(generator)
        self.sets = [{name: self._data(name) for name in task.tensors} for _ in range(sets)]
        self.arrays = self._parameters()
        self.expected = self._expected()  # of the first set, on the host

    def _flat(self, name: str, drawn: Array) -> Array:
        """The values of a tensor and its gaps, as they lie in memory, with room to be misaligned as the task's are."""
        tensor = self.task.tensors[name]
        values = drawn + np.float32(KAPPA if name == "x" else 0.25)
        return np.resize(values.astype(numpy_dtype(tensor.dtype)), self._size(tensor))

    def _size(self, tensor: Tensor) -> int:
        return _arguments.span(tensor.dims, tensor.strides) + _ALIGNMENT // tensor.dtype.itemsize

    @property
    def _beta(self) -> float:
        return float(self.task.options["beta"])

    @property
    def _offset(self) -> int:
        return self.task.alignment % _ALIGNMENT

    def _data(self, name: str) -> tuple[Buffer, Buffer]:
        """(all of the memory, the tensor in it)."""
        tensor = self.task.tensors[name]
        if name in self.host:
            memory = self.machine.device.from_numpy(self.host[name], tensor.dtype)
        else:
            size = self._size(tensor)
            nbytes = size * tensor.dtype.itemsize
            found = self.machine.device.empty_bytes(nbytes)
            owner = Allocation(found.owner, found.pointer, nbytes, numpy_dtype(tensor.dtype))
            memory = Buffer(found.pointer, (size,), (1,), tensor.dtype, found.device_type, found.device_id, True, owner)
        return memory, self._placed(memory, tensor)

    def _placed(self, memory: Buffer, tensor: Tensor) -> Buffer:
        return memory._replace(
            pointer=memory.pointer + self._offset, dims=tensor.dims, strides=tensor.strides, dtype=tensor.dtype
        )

    def _vectors(self, generator: np.random.Generator) -> dict[str, Array]:
        """Parameters and statistics by argument: random where the call reads them, else not a number."""
        dtype, dims, options = numpy_dtype(self.task.parameter.dtype), self.task.parameter.dims, self.task.options
        backward = self.task.operation == Operation.BACKWARD
        vectors = {}
        for tensor in calls.TENSORS[self.task.operation]:
            pair = tensor.name.partition("_")[0]  # running and saved are options
            if tensor.data or not options.get(pair, True):
                continue
            values = np.full(dims, np.nan)
            if tensor.values and not (backward and tensor.written and not options["beta_param"]):
                width = 0.1 if pair == "saved" else 0.5
                values = _MIDDLES.get(tensor.name, 0.0) + generator.uniform(-width, width, dims)
            vectors[tensor.name] = values.astype(dtype)
        return vectors

    def renew(self) -> None:
        """Outputs of the first set and all vectors as they were before the first call."""
        for name in self.outputs:
            memory, tensor = self.sets[0][name]
            if name not in self.host:
                try:
                    self.handle.fill(UNWRITTEN, tensor)
                    continue
                except PybnormError:  # an address or a layout that it does not take
                    size = self._size(self.task.tensors[name])
                    values = np.full(size, UNWRITTEN, numpy_dtype(tensor.dtype))
            else:
                values = self.host[name]
            del memory, tensor
            del self.sets[0][name]  # its memory is free before there is another
            memory = self.machine.device.from_numpy(values, self.task.tensors[name].dtype)
            self.sets[0][name] = memory, self._placed(memory, self.task.tensors[name])
        self.arrays = self._parameters()

    def _parameters(self) -> dict[str, Buffer]:
        return {name: self.machine.device.from_numpy(values) for name, values in self.vectors.items()}

    def tensors(self) -> dict[str, Buffer]:
        """Data tensors of the first set."""
        return {name: tensor for name, (_, tensor) in self.sets[0].items()}

    def calls(self, plan: Any, workspace: tuple[int, int] | None) -> list[Call]:
        """A call for each buffer set, by address."""
        vectors = {name: buffer.pointer for name, buffer in self.arrays.items()}
        enough = workspace if plan.workspace_size else None
        calls: list[Call] = []
        for buffers in self.sets:
            data = {name: tensor.pointer for name, (_, tensor) in buffers.items()}
            calls.append(functools.partial(plan, **data, **vectors, workspace=enough))
        return calls

    # ------------------------------------------------------------ what is right

    @property
    def _channels(self) -> list[int]:
        """Those judged: the first and the last; of long channels the last. Of 16-bit data it starts at a whole word."""
        x = self.task.tensors["x"]
        last = (x.dims[1] - 1) // (2 if x.dtype.itemsize == 2 else 1) * (2 if x.dtype.itemsize == 2 else 1)
        many = math.prod(x.dims) // x.dims[1] > MANY
        return [last] if many else sorted({0, last})

    def _sample(self, name: str, flat: Array) -> Array:
        """The judged channels of a data tensor; `flat` is its memory."""
        tensor = self.task.tensors[name]
        size = tensor.dtype.itemsize
        view: Array = np.ndarray(
            tensor.dims,
            flat.dtype,
            buffer=flat.view(np.uint8),
            offset=self._offset,
            strides=tuple(s * size for s in tensor.strides),
        )
        return np.ascontiguousarray(view[:, self._channels])

    def _expected(self) -> Expected:
        operation, options, x = self.task.operation, self.task.options, self.task.tensors["x"]
        values = {name: options[keyword] for keyword, name in calls.OPTIONS[operation].items()}
        values |= {name: options[name] for name in ("running", "saved") if name in options}
        values |= {"dtype": x.dtype, "params": self.task.parameter.dtype}
        dims = self._judged_dims
        fields = {tensor.name: tensor.values for tensor in calls.TENSORS[operation] if tensor.values}
        inputs = {fields[name]: v[:, self._channels] for name, v in self.vectors.items() if name in fields}
        inputs |= {fields[name]: self._sample(name, flat) for name, flat in self.host.items()}
        try:
            problem = Problem(operation, dims=dims, fill="randn", kappa=KAPPA, **values)
        except ArgumentError as error:
            raise NotMeasuredError(f"its results cannot be judged: {error}") from None
        if "prior" not in inputs:
            inputs["prior"] = np.full(dims, np.nan, numpy_dtype(x.dtype))
        return expect(problem, Inputs(**inputs))

    @property
    def _judged_dims(self) -> tuple[int, ...]:
        x = self.task.tensors["x"]
        return (x.dims[0], len(self._channels), *x.dims[2:])

    def verdict(self) -> tuple[Status, str]:
        """The worst of the verdicts on the outputs of the first set's latest call, and which output it is."""
        worst, note = Status.PASS, ""
        for name in self.expected.outputs:
            if name in self.outputs:
                found = self._gathered(name)
                status = Status.FAIL if found is None else self._status(name, found)
                if status != Status.PASS:  # the copy of the channels, or what they were copied from?
                    flat = self.machine.device.to_numpy(self.sets[0][name][0])
                    status = self._status(name, self._sample(name, flat))
            else:
                status = self._status(name, self.machine.device.to_numpy(self.arrays[name])[:, self._channels])
            if status.severity > worst.severity:
                worst, note = status, f"{name} {status.value}"
        return worst, note

    def _status(self, name: str, got: Array) -> Status:
        return judge(self.expected, name, got).status

    def _gathered(self, name: str) -> Array | None:
        """The judged channels of an output, copied beside one another on the device; None where the library cannot."""
        tensor = self.task.tensors[name]
        one = (tensor.dims[0], 1, *tensor.dims[2:])
        address = self.sets[0][name][1].pointer
        parts = []
        for channel in self._channels:
            source = self.sets[0][name][1]._replace(
                pointer=address + channel * tensor.strides[1] * tensor.dtype.itemsize, dims=one
            )
            target = self.machine.device.from_numpy(np.zeros(one, numpy_dtype(tensor.dtype)), tensor.dtype)
            try:
                self.handle.axpby(1.0, source, 0.0, target)
            except PybnormError:
                return None
            parts.append(self.machine.device.to_numpy(target))
        return np.concatenate(parts, axis=1)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {getattr(error, 'text', '') or error}".split())[:300]
