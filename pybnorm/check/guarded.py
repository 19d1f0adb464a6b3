"""One call in guarded memory, where writes outside of the results and reads outside of the inputs are noticed.

Every array lies inside guard bytes, which also fill the gaps of strided data. Those of what is read are NaN in every
dtype, so that a value from outside makes a result NaN; those of what is only written are a pattern. Results without a
prior start as NaN. After the call the guards, the inputs and the statistics that were not given to it must be
unchanged.

On the CPU the memory is filled, looked at and judged where it lies: a large case has no room, and no time, for copies
that only carry bytes about.

With ``misalign`` every array starts so many elements behind an aligned address. With ``fence`` it lies against a page
without access (`pybnorm.check.fence`), and the guard is on its other side only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, errors
from pybnorm._arrays import CPU, Buffer, Memory
from pybnorm.check import calls
from pybnorm.check.calling import make
from pybnorm.check.data import CHUNK, Inputs, numpy_dtype
from pybnorm.check.fence import Fence, watched
from pybnorm.check.problem import Problem
from pybnorm.check.session import Session
from pybnorm.devices.cpu import Allocation, aligned_bytes
from pybnorm.enums import DataType
from pybnorm.reference.namespaces import Foreign, Namespace

__all__ = ["GUARD", "Observed", "execute", "same_bits"]

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
    """An array inside guard bytes, in device memory; its elements are NaN where there are no `values`."""

    def __init__(
        self,
        name: str,
        values: Array | None,
        dims: tuple[int, ...],
        tensor: _Kind,
        problem: Problem,
        session: Session,
        judge: Namespace | None = None,
    ) -> None:
        self.values, self.dims, self.kind = values, dims, tensor
        self.dtype = numpy_dtype(tensor.dtype)
        size, shift = _arguments.span(dims, tensor.strides) * self.dtype.itemsize, problem.misalign
        ends = (GUARD + shift * self.dtype.itemsize, GUARD)
        if problem.fence:  # no guard on that side
            ends = (shift * self.dtype.itemsize, GUARD) if problem.fence == "start" else (GUARD, 0)
        self.start, self.end = ends[0], ends[0] + size
        self.gaps = size != math.prod(dims) * self.dtype.itemsize
        self.judge = judge
        nbytes = size + sum(ends)
        own = session.device.empty_bytes(nbytes) if judge else None
        image = aligned_bytes(nbytes) if own is None else self._seen(own, session)
        for part in [image] if self.gaps else self._outside(image):
            part[...] = tensor.guard
        self._elements(image)[...] = np.nan if values is None else values
        self.fence = Fence(name, image, problem.fence) if problem.fence else None
        self.memory: Buffer | Memory
        if own is not None:
            self.memory = own
        elif self.fence:
            self.memory = self.fence.buffer
        elif session.device.device_type == CPU:
            self.memory = _described(image)
        else:
            self.memory = _upload(image, session)
        at = self.memory
        self.buffer = Buffer(
            at.pointer + self.start, dims, tensor.strides, tensor.dtype, at.device_type, at.device_id, True, at.owner
        )

    def _seen(self, memory: Memory | Buffer, session: Session) -> Array:
        """Memory of the device as bytes of the judge's namespace."""
        assert self.judge is not None
        assert isinstance(memory, Memory)
        session.device.synchronize()  # it is allocated on the session's stream
        image: Array = self.judge.bytes_at(memory.pointer, memory.nbytes, memory.owner)
        return image

    def _outside(self, image: Array) -> tuple[Array, Array]:
        return image[: self.start], image[self.end :]

    def _elements(self, image: Array, dtype: np.dtype[Any] | None = None) -> Array:
        dtype = dtype or self.dtype
        if self.judge is not None:
            raw = self.judge.elements(image.raw, self.dims, dtype, self.kind.strides, self.start)  # type: ignore[attr-defined]
            return Foreign(raw, dtype, self.judge)  # type: ignore[return-value]
        steps = tuple(s * dtype.itemsize for s in self.kind.strides)
        return np.ndarray(self.dims, dtype, buffer=image, offset=self.start, strides=steps)

    def read(self, session: Session) -> tuple[Array, bool]:
        """Values in logical order, and whether the guards are intact."""
        owner: Any = self.memory.owner
        on_cpu = self.memory.device_type == CPU and isinstance(owner, Allocation) and self.fence is None
        image: Array
        if self.judge is not None:
            image = self._seen(self.memory, session)
        else:
            assert isinstance(self.memory, Buffer)
            image = owner.memory if on_cpu else _download(self.memory, session)
        guarded = all(bool((part == self.kind.guard).all()) for part in self._outside(image))
        values = self._elements(image)
        if self.gaps:
            outside, word = image.copy(), np.dtype(f"i{self.dtype.itemsize}")
            self._elements(outside, word)[...] = np.frombuffer(bytes([self.kind.guard]) * word.itemsize, word)[0]
            guarded = guarded and bool((outside == self.kind.guard).all())
            values = values.copy()
        return values, guarded

    def unchanged(self, values: Array) -> bool:
        """Whether `values` are what the array held before the call."""
        right = np.full(1, np.nan) if self.values is None else self.values
        if self.judge is not None and not isinstance(right, Foreign):
            right = self.judge.of(right.astype(self.dtype))
        with np.errstate(invalid="ignore", over="ignore"):
            right = right.astype(self.dtype, copy=False)
        return same_bits(values, np.broadcast_to(right, self.dims))


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays of one shape and dtype are equal to the bit, with little memory beside them."""
    if isinstance(one, Foreign):
        return one.same_bits(other)
    if not one.size:
        return True
    word = np.dtype(f"u{one.dtype.itemsize}")
    one, other = one.view(word), other.view(word)
    if one.flags.c_contiguous and other.flags.c_contiguous:
        one, other = one.reshape(-1), other.reshape(-1)
    step = max(1, CHUNK * len(one) // one.size) if one.ndim else 1
    if not one.ndim:
        return bool(one == other)
    return all(bool((one[i : i + step] == other[i : i + step]).all()) for i in range(0, len(one), step))


def _described(image: Array) -> Buffer:
    """Bytes of the CPU as a buffer."""
    address = image.ctypes.data
    allocation = Allocation(image, address, image.size, np.dtype(np.float16))
    return Buffer(address, (image.size // 2,), (1,), DataType.FLOAT16, CPU, 0, True, allocation)


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


def execute(
    problem: Problem,
    inputs: Inputs,
    session: Session,
    kept: dict[str, _Guarded] | None = None,
    judge: Namespace | None = None,
) -> Observed:
    """Make the problem's call once; all that it writes is fresh memory.

    Parameters
    ----------
    problem : Problem
    inputs : Inputs
    session : Session
    kept : dict, optional
        What equal calls only read, by name: taken from here where it is, and put here if the call left it as it was.
    judge : Namespace, optional
        Where data are filled, looked at and judged, in the memory that the call has (`pybnorm.check.judges`).

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
        if kept and tensor.name in kept:
            arrays[tensor.name] = kept.pop(tensor.name)
            continue
        values = getattr(inputs, tensor.values) if tensor.values and tensor.name in given else None
        guard = POISON if tensor.values and not tensor.values.startswith("prior") else PATTERN
        if tensor.data:
            dims, kind = problem.dims, _Kind(problem.strides, problem.dtype, guard)
        else:
            dims, kind = problem.parameter_dims, _Kind(packed, problem.parameter_dtype, guard)
        arrays[tensor.name] = _Guarded(
            tensor.name, values, dims, kind, problem, session, judge if tensor.data else None
        )
    buffers = {name: arrays[name].buffer for name in given}
    fences = [array.fence for array in arrays.values() if array.fence]
    if judge is not None:
        judge.synchronize()
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
        values, guarded = arrays[tensor.name].read(session)
        if not guarded:
            observed.damage.append(f"wrote outside of {tensor.name}")
        if tensor.name in given and tensor.written:
            observed.outputs[tensor.name] = values
        elif guarded and tensor.name not in overwritten.values():
            if not arrays[tensor.name].unchanged(values):
                what = "its input" if tensor.name in given else "what was not given to it,"
                observed.damage.append(f"changed {what} {tensor.name}")
            elif kept is not None and tensor.name in given and not problem.fence and problem.streams == 1:
                kept[tensor.name] = arrays[tensor.name]
    if workspace_memory is not None:
        after = _download(workspace_memory, session)
        if not ((after[:GUARD] == PATTERN).all() and (after[-GUARD:] == PATTERN).all()):
            observed.damage.append("wrote outside of the workspace")
    return observed
