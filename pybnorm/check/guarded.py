"""One call in guarded memory, where writes outside of the results and reads outside of the inputs are noticed.

Every array lies inside guard bytes, which also fill the gaps of strided data. Those of what is read are NaN in every
dtype, so that a value from outside makes a result NaN; those of what is only written are a pattern. Results without a
prior start as NaN. After the call the guards, the inputs and the statistics that were not given to it must be
unchanged.

With ``misalign`` every array starts so many elements behind an aligned address. With ``fence`` it lies against a page
without access (`pybnorm.check.fence`), and the guard is on its other side only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, errors
from pybnorm._arrays import Buffer, Memory
from pybnorm.check import calls
from pybnorm.check.calling import make
from pybnorm.check.data import Inputs, numpy_dtype
from pybnorm.check.fence import Fence, watched
from pybnorm.check.problem import Problem
from pybnorm.check.session import Session
from pybnorm.enums import DataType

__all__ = ["GUARD", "Observed", "execute"]

Array = npt.NDArray[Any]

GUARD = 256
"""Bytes on each side of an array; a multiple of every alignment that a library assumes of an allocation."""
PATTERN = 0xA7
"""Guard byte of outputs and workspace: no value that a kernel would write."""
POISON = 0xFF
"""Guard byte of what is read: NaN in all four types."""


@dataclasses.dataclass
class Observed:
    """The state of the memory after one call."""

    outputs: dict[str, Array]
    """As stored, contiguous, in logical order."""
    damage: list[str]
    """Memory that changed and should not have."""


class _Kind(NamedTuple):
    """How an array lies, its type, and the byte around it."""

    strides: tuple[int, ...]
    dtype: DataType
    guard: int


class _Guarded:
    """An array inside guard bytes, in device memory."""

    def __init__(self, name: str, values: Array, tensor: _Kind, problem: Problem, session: Session) -> None:
        self.dims, self.strides, self.dtype, self.guard = values.shape, tensor.strides, tensor.dtype, tensor.guard
        size, shift = _arguments.span(values.shape, self.strides) * self.dtype.itemsize, problem.misalign
        ends = (GUARD + shift * self.dtype.itemsize, GUARD)
        if problem.fence:  # no guard on that side
            ends = (shift * self.dtype.itemsize, GUARD) if problem.fence == "start" else (GUARD, 0)
        self.start = ends[0]
        self.before = np.full(size + sum(ends), self.guard, np.uint8)
        self._elements(self.before, numpy_dtype(self.dtype))[...] = values
        self.fence = Fence(name, self.before, problem.fence) if problem.fence else None
        self.memory = self.fence.buffer if self.fence else _upload(self.before, session)
        self.buffer = self.memory._replace(
            pointer=self.memory.pointer + self.start, dims=self.dims, strides=self.strides, dtype=self.dtype
        )

    def _elements(self, image: Array, dtype: np.dtype[Any]) -> Array:
        steps = tuple(s * dtype.itemsize for s in self.strides)
        return np.ndarray(self.dims, dtype, buffer=image, offset=self.start, strides=steps)

    def read(self, session: Session) -> tuple[Array, bool, bool]:
        """Values in logical order, whether the guards are intact, whether nothing at all changed."""
        after = _download(self.memory, session)
        values = self._elements(after, numpy_dtype(self.dtype)).copy()
        outside = after.copy()
        word = np.dtype(f"u{self.dtype.itemsize}")
        self._elements(outside, word)[...] = np.frombuffer(bytes([self.guard]) * word.itemsize, word)[0]
        return values, bool((outside == self.guard).all()), bool((after == self.before).all())


def _upload(image: Array, session: Session) -> Buffer:
    # devices copy floating-point arrays; these are bytes, copied as the narrowest of those types
    return session.device.from_numpy(image.view(np.float16))


def _download(memory: Buffer, session: Session) -> Array:
    result: Array = session.device.to_numpy(memory).view(np.uint8)
    return result


def _workspace(session: Session, size: int) -> tuple[Buffer | None, Memory | None]:
    if size == 0:
        return None, None
    memory = _upload(np.full(size + size % 2 + 2 * GUARD, PATTERN, np.uint8), session)
    return memory, Memory(
        memory.pointer + GUARD, size, memory.device_type, memory.device_id, memory.writable, memory.owner
    )


def execute(problem: Problem, inputs: Inputs, session: Session) -> Observed:
    """Make the problem's call once, in fresh memory.

    Returns
    -------
    Observed
        ``outputs`` has the keys of `Expected.outputs`.

    Raises
    ------
    PybnormError
        What the backend raised.
    """
    given = {tensor.name for tensor in calls.tensors(problem)}
    packed = _arguments.packed_strides(problem.parameter_dims)
    workspace_memory, workspace = _workspace(session, session.workspace_size(problem))
    arrays: dict[str, _Guarded] = {}
    overwritten = calls.overwritten(problem)
    for tensor in calls.around(problem):  # also those that are not given: the call must not write to them
        if tensor.name in overwritten:
            arrays[tensor.name] = arrays[overwritten[tensor.name]]
            continue
        values = getattr(inputs, tensor.values) if tensor.values and tensor.name in given else None
        guard = POISON if tensor.values and not tensor.values.startswith("prior") else PATTERN
        if tensor.data:
            dims, kind = problem.dims, _Kind(problem.strides, problem.dtype, guard)
        else:
            dims, kind = problem.parameter_dims, _Kind(packed, problem.parameter_dtype, guard)
        filled = np.full(dims, np.nan) if values is None else values
        arrays[tensor.name] = _Guarded(tensor.name, filled, kind, problem, session)
    buffers = {name: arrays[name].buffer for name in given}
    fences = [array.fence for array in arrays.values() if array.fence]
    with watched(fences):
        make(session, problem, buffers, workspace)
    try:
        session.device.synchronize()
    except errors.PybnormError:
        raise
    except Exception as error:  # of the driver: a failure of the call shows only here
        name = type(error).__name__
        raise errors.ExecutionError(
            backend=session.backend, function="synchronize", status=-1, status_name=name, text=str(error)
        ) from error
    observed = Observed({}, list(dict.fromkeys(text for fence in fences for text in fence.told())))
    for tensor in calls.around(problem):
        values, guarded, unchanged = arrays[tensor.name].read(session)
        if not guarded:
            observed.damage.append(f"wrote outside of {tensor.name}")
        if tensor.name in given and tensor.written:
            observed.outputs[tensor.name] = values
        elif guarded and not unchanged and tensor.name not in overwritten.values():
            what = "its input" if tensor.name in given else "what was not given to it,"
            observed.damage.append(f"changed {what} {tensor.name}")
    if workspace_memory is not None:
        after = _download(workspace_memory, session)
        if not ((after[:GUARD] == PATTERN).all() and (after[-GUARD:] == PATTERN).all()):
            observed.damage.append("wrote outside of the workspace")
    return observed
