"""One call in guarded memory, where writes outside of the results and reads outside of the inputs are noticed.

Every array lies inside guard bytes, which also fill the gaps of strided data. Those of what is read are NaN in every
dtype, so that a value from outside makes a result NaN; those of what is only written are a pattern. Results without a
prior start as NaN. After the call the guards, the inputs and the statistics that were not given to it must be
unchanged.

A large case has no room, and no time, for copies: on the CPU the memory is filled, looked at and judged where it lies,
data are made with room for the guards around them, and of what is only read a few numbers are kept (`_mark`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from pybnorm import _arguments, errors
from pybnorm._arrays import CPU, Buffer, Memory
from pybnorm.check.language import calls
from pybnorm.check.language.data import Inputs, numpy_dtype, surrounded
from pybnorm.check.language.fills import GUARD
from pybnorm.check.language.generator import CHUNK, splitmix64
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.fence import Fence, described, watched
from pybnorm.check.run.perform import make
from pybnorm.check.run.session import Session
from pybnorm.devices._copying import Allocation, aligned_bytes
from pybnorm.reference.namespaces import Array, Foreign, Namespace
from pybnorm.reference.threads import LARGE, in_threads

PATTERN = 0xA7
"""Guard byte of outputs and workspace: no value that a kernel would write."""
POISON = 0xFF
"""Guard byte of what is read: NaN in all four types."""


@dataclasses.dataclass
class Observed:
    """The state of the memory after one call."""

    outputs: dict[str, Array]
    """Outputs as stored, contiguous, in logical order."""
    damage: list[str]
    """Memory that changed and should not have."""


class _Guarded:
    """An array inside guard bytes, in device memory; its elements are NaN where there are no `values`.

    With `take` the values themselves may become what the call gets, where they have room for the guards.
    """

    def __init__(
        self,
        tensor: calls.Tensor,
        values: Array | None,
        problem: Problem,
        session: Session,
        judge: Namespace | None,
        *,
        reads: bool,
        take: bool,
    ) -> None:
        self.values, self.judge = values, judge if tensor.data else None
        self.guard = POISON if tensor.values and not tensor.values.startswith("prior") else PATTERN
        self.dims, dtype = calls.kind(problem, tensor)
        strides = problem.strides if tensor.data else _arguments.packed_strides(self.dims)
        self.word, fence = numpy_dtype(dtype), problem.fence
        size = self.word.itemsize
        self.strides, self.steps = strides, tuple(s * size for s in strides)
        self.start = (0 if fence == "start" else GUARD) + problem.misalign * size  # no guard at the fence
        self.end = self.start + _arguments.span(self.dims, strides) * size
        nbytes = self.end + (0 if fence == "end" else GUARD)
        self.gaps = self.end - self.start != math.prod(self.dims) * size
        own = session.device.empty_bytes(nbytes) if self.judge else None
        image: Array | None = None
        if own is not None:
            image = self._seen(own, session)
        elif take and values is not None and (self.start, self.end + GUARD) == (GUARD, nbytes):
            image = surrounded(values, self.steps)
        taken = image is not None and own is None
        if image is None:
            image = aligned_bytes(nbytes)
        for part in [image] if self.gaps else self._outside(image):
            part[...] = self.guard
        if not taken:
            _fill(self._elements(image), values)
        self.fence = Fence(tensor.name, image, fence) if fence else None
        self.memory: Buffer | Memory
        if own is not None:
            self.memory = own
        elif self.fence:
            self.memory = self.fence.buffer
        elif session.device.device_type == CPU:
            self.memory = described(image, image.ctypes.data, image.size)
        else:
            self.memory = _upload(image, session)
        at = self.memory
        place = at.pointer + self.start, self.dims, strides, dtype, at.device_type, at.device_id
        self.buffer = Buffer(*place, True, at.owner)
        self._marked = _mark(image) if reads and self.judge is None else None

    def _seen(self, memory: Memory | Buffer, session: Session) -> Array:
        """Memory of the device as bytes of the judge's namespace."""
        assert self.judge is not None
        assert isinstance(memory, Memory)
        session.device.synchronize()  # it is allocated on the session's stream
        return self.judge.bytes_at(memory.pointer, memory.nbytes, memory.owner)

    def _outside(self, image: Array) -> tuple[Array, Array]:
        return image[: self.start], image[self.end :]

    def _elements(self, image: Array, dtype: np.dtype[Any] | None = None) -> Array:
        dtype = dtype or self.word
        if self.judge is not None:
            raw = self.judge.elements(image.raw, self.dims, dtype, self.strides, self.start)  # type: ignore[attr-defined]
            return Foreign(raw, dtype, self.judge)  # type: ignore[return-value]
        return np.ndarray(self.dims, dtype, buffer=image, offset=self.start, strides=self.steps)

    def _image(self, session: Session) -> Array:
        """All bytes, as they are now."""
        if self.judge is not None:
            return self._seen(self.memory, session)
        assert isinstance(self.memory, Buffer)
        owner: Any = self.memory.owner
        if self.memory.device_type == CPU and isinstance(owner, Allocation) and self.fence is None:
            return np.asarray(owner.memory)
        return _download(self.memory, session)

    def read(self, session: Session) -> tuple[Array, bool]:
        """Values in logical order, and whether the guards are intact."""
        image, guard = self._image(session), self.guard
        guarded = all(bool((part == guard).all()) for part in self._outside(image))
        values = self._elements(image)
        if self.gaps:
            outside, word = image.copy(), np.dtype(f"i{self.word.itemsize}")
            self._elements(outside, word)[...] = np.frombuffer(bytes([guard]) * word.itemsize, word)[0]
            guarded = guarded and bool((outside == guard).all())
            values = values.copy()
        return values, guarded

    def as_remembered(self, session: Session) -> bool:
        """Tell whether all bytes of what is only read, the guards' too, are what they were."""
        return self._marked is not None and self._marked == _mark(self._image(session))

    def unchanged(self, values: Array) -> bool:
        """Tell whether `values` are what an array of a judge's namespace held before the call."""
        if self.judge is None:
            return False  # else it were as remembered
        right = np.full(1, np.nan) if self.values is None else self.values
        if not isinstance(right, Foreign):
            right = self.judge.of(right.astype(self.word))
        return same_bits(values, np.broadcast_to(right.astype(self.word, copy=False), self.dims))


def _fill(elements: Array, values: Array | None) -> None:
    """Give an array its values, NaN where there are none."""
    step = len(elements) if isinstance(elements, Foreign) else max(1, LARGE // 8 * len(elements) // elements.size)

    def fill(first: int) -> None:
        elements[first : first + step] = np.nan if values is None else values[first : first + step]

    in_threads(fill, range(0, len(elements), step))


_COPIED = 1 << 16
"""Bytes of an array of which a copy is kept."""


@functools.cache
def _weights() -> Array:
    """An odd number for each word of a run: no change of one word is lost, and an exchange of two next to never."""
    return splitmix64(0, 0, CHUNK) | np.uint64(1)


def _mark(image: Array) -> bytes:
    """The digest of bytes: themselves, or of many one number for each run of words, the sum of their products with
    `_weights` modulo 2**64, and what is left over."""
    if image.size <= _COPIED:
        return image.tobytes()
    whole = image.size // 8 * 8
    words, weights = image[:whole].view(np.uint64), _weights()
    sums = np.empty(-(-words.size // CHUNK), np.uint64)

    def add(number: int) -> None:
        run = words[number * CHUNK : (number + 1) * CHUNK]
        sums[number] = np.dot(run, weights[: run.size])

    in_threads(add, range(sums.size))
    return sums.tobytes() + image[whole:].tobytes()


def same_bits(one: Array, other: Array) -> bool:
    """Tell whether two arrays of one shape and dtype are equal to the bit, with little memory beside them."""
    if isinstance(one, Foreign):
        return one.same_bits(other)
    if one.nbytes <= _COPIED:
        return one.tobytes() == other.tobytes()
    word = np.dtype(f"u{one.dtype.itemsize}")
    one, other = one.view(word), other.view(word)
    if one.flags.c_contiguous and other.flags.c_contiguous:
        one, other = one.reshape(-1), other.reshape(-1)
    step = max(1, CHUNK * len(one) // one.size)
    return all(bool((one[i : i + step] == other[i : i + step]).all()) for i in range(0, len(one), step))


def _upload(image: Array, session: Session) -> Buffer:
    return session.device.from_numpy(image.view(np.float16))  # of the types that devices copy, the narrowest


def _download(memory: Buffer, session: Session) -> Array:
    return session.device.to_numpy(memory).view(np.uint8)


def _workspace(session: Session, size: int) -> tuple[Buffer | None, Memory | None]:
    if size == 0:
        return None, None
    memory = _upload(np.full(size + size % 2 + 2 * GUARD, PATTERN, np.uint8), session)
    return memory, Memory(memory.pointer + GUARD, size, *memory[4:])


def execute(
    problem: Problem,
    inputs: Inputs | None,
    session: Session,
    kept: dict[str, _Guarded] | None = None,
    judge: Namespace | None = None,
) -> Observed:
    """Make the problem's call once; all that it writes is fresh memory.

    Without `inputs` all are NaN, to see whether the call is refused. `kept` is what equal calls only read, by name:
    taken from here where it is, and put here if the call left it as it was. Where it is given the call may get large
    `inputs` themselves, and spoil them if it damages what it reads. `judge` is where data are filled, looked at and
    judged, in the memory that the call has (`pybnorm.check.run.judge_devices`). The outputs have the keys of
    `Expected.outputs`.
    """
    around, overwritten = calls.around(problem), calls.overwritten(problem)
    given = {tensor.name for tensor in calls.tensors(problem)}
    written = {tensor.name for tensor in around if tensor.written and tensor.name in given} | set(overwritten.values())
    workspace_memory, workspace = _workspace(session, session.workspace_size(problem))
    arrays: dict[str, _Guarded] = {}
    for tensor in around:  # also those that are not given: the call must not write to them
        if tensor.name in overwritten:
            arrays[tensor.name] = arrays[overwritten[tensor.name]]
            continue
        if kept and tensor.name in kept:
            arrays[tensor.name] = kept.pop(tensor.name)
            continue
        values = getattr(inputs, tensor.values, None) if tensor.values and tensor.name in given else None
        reads = tensor.name not in written
        take = reads and kept is not None
        arrays[tensor.name] = _Guarded(tensor, values, problem, session, judge, reads=reads, take=take)
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
    for tensor in around:
        array = arrays[tensor.name]
        if not array.as_remembered(session):
            values, guarded = array.read(session)
            if not guarded:
                observed.damage.append(f"wrote outside of {tensor.name}")
            if tensor.name in given and tensor.written:
                observed.outputs[tensor.name] = values
                continue
            if not guarded or tensor.name in overwritten.values():
                continue
            if not array.unchanged(values):
                what = "its input" if tensor.name in given else "what was not given to it,"
                observed.damage.append(f"changed {what} {tensor.name}")
                continue
        if kept is not None and tensor.name in given and not problem.fence and problem.streams == 1:
            kept[tensor.name] = array
    if workspace_memory is not None:
        after = _download(workspace_memory, session)
        if not (after[[*range(GUARD), *range(-GUARD, 0)]] == PATTERN).all():
            observed.damage.append("wrote outside of the workspace")
    return observed
