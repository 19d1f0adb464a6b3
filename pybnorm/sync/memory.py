"""The memory that a `SyncBatchNorm` owns: its messages, what it receives, and the merged statistics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import SLOT_BITS, Handle
from pybnorm.enums import DataType
from pybnorm.operations.program import Prepared, Program
from pybnorm.sync.communicators import Array, Communicator
from pybnorm.sync.messages import _ALIGN, _HEADER, BACKWARD, FAILED, FORWARD, _message, _read_headers

_WHOLE = 1 << 16
"""Bytes: of what is no longer than this, a device's headers are read with the rest, which is faster than packing."""


class _Memory:
    """The vectors that calls need beside the caller's arrays and workspace, allocated once.

    A program knows a vector by its slot. `addresses` says where the slots begin, after a 0 for the workspace.
    `channels` are the sizes of the kept axes, `dtype` is that of parameters and messages. With `gathers` backward
    gathers the sums of the ranks, and each rank adds them in the same order.
    """

    def __init__(
        self, handle: Handle, communicator: Communicator, channels: tuple[int, ...], dtype: DataType,
        deterministic: bool, gathers: bool,
    ) -> None:  # fmt: skip
        self.deterministic = deterministic
        self.gathered = {FORWARD: True, BACKWARD: gathers}
        """Whether a call receives each rank's message, or their sum."""
        self.handle, self.communicator, self.channels, self.dtype = handle, communicator, channels, dtype
        self.device = handle.library.device_type
        self.width = math.prod(channels)
        self.section = section = -(-self.width // _ALIGN) * _ALIGN
        self.length = length = 2 * section + _HEADER
        self.nbytes = 0
        self.carried = {FORWARD: 0, BACKWARD: 0}
        """The count that each message's header holds now."""
        # Else a read begins only when it is waited for.
        later = functools.partial(functools.partial, communicator.read)
        self._begin_read: Callable[..., Callable[[], None]] = getattr(communicator, "begin_read", later)
        number, rank, size = np.dtype(dtype.name.lower()), communicator.rank, communicator.size
        message = functools.partial(_message, 2 * section, number, rank)
        contents: dict[int | str, Array] = {
            # A failed rank sends NaN, so that results are NaN where the other ranks do not read the header.
            FAILED: message(FAILED, math.nan),
            FORWARD: message(FORWARD),
            BACKWARD: message(BACKWARD),
            "empty": message(FORWARD, 1.0),  # finite as variances and as their inverse roots
            "received": np.zeros(size * length, number),
            "sums": np.zeros(length, number),
            "statistics": np.zeros(2 * section, number),  # mean, variance
            "headers": np.zeros(size * _HEADER, number),
            "ones": np.ones(2 * section, number),
            "zeros": np.zeros(2 * section, number),
        }
        self.vectors = {name: self._new(values) for name, values in contents.items()}
        # Host memory is read as it is, headers among the rest; what a device has much of is packed first.
        rows = {code: size if gathered else 1 for code, gathered in self.gathered.items()}
        packed = [c for c, n in rows.items() if self.device != CPU and n * length * number.itemsize > _WHOLE]
        shapes = {c: (size, _HEADER) if c in packed else (n, length) for c, n in rows.items()}
        self._host = {code: np.zeros(shape, number) for code, shape in shapes.items()}
        self._told: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        """The headers of the last good call, and the counts in them."""
        self._room, self._room_nbytes = (0, 0), 0
        buffers = {n: handle.buffer(vector, "communicator", output=True) for n, vector in self.vectors.items()}
        self.addresses: tuple[int, ...] = (0, *[buffer.pointer for buffer in buffers.values()])
        self._slots = {
            name: buffer._replace(pointer=slot << SLOT_BITS, owner=None)
            for slot, (name, buffer) in enumerate(buffers.items(), 1)
        }
        both = (2 * section,)
        self._known = {(value, dtype): self.part(name, 0, both) for value, name in ((1.0, "ones"), (0.0, "zeros"))}
        heads = {True: self.rows(2 * section, _HEADER), False: self.part("sums", 2 * section, (1, _HEADER))}
        self._pack = {
            c: self.program("axpby", 1.0, heads[self.gathered[c]], 0.0, self.part("headers", 0, (rows[c], _HEADER)))
            for c in packed
        }
        self._add: Prepared | None = None
        if gathers:
            given, total, zeros = self.rows(0, 2 * section), self.part("sums", 0, both), self.part("zeros", 0, both)
            adding = self.started(deterministic=True)  # which costs nothing here
            adding.then("backward_reduce", x=given, dy=given, mean=zeros, sum_dy=total, axis=1)
            self._add = adding.finish()
        flat = {n: self.statistic(i, flat=True) for i, n in enumerate(("mean", "variance"))}
        # A merge needs most where no rank is empty and no counts are equal.
        self._reserve(*filter(None, (self._add, *self._pack.values())), self.merge(range(1, size + 1), **flat))

    def _new(self, values: Array) -> Any:
        self.nbytes += values.nbytes
        return self.communicator.vector(values, self.device, self.handle.stream)

    def part(self, name: int | str, start: int = 0, dims: tuple[int, ...] | None = None) -> Buffer:
        """Part of a vector, in the vector's slot; by default as long as a parameter."""
        whole = self._slots[name]
        shape = self.channels if dims is None else dims
        pointer = whole.pointer + start * whole.dtype.itemsize
        return whole._replace(pointer=pointer, dims=shape, strides=_arguments.packed_strides(shape))

    def statistic(self, index: int, *, flat: bool = False) -> Buffer:
        """The merged mean (0) or variance (1)."""
        return self.part("statistics", index * self.section, (self.width,) if flat else None)

    def rows(self, start: int, width: int) -> Buffer:
        """Part of each rank's message in what was received, as a matrix."""
        return self.part("received", start, (self.communicator.size, width))._replace(strides=(self.length, 1))

    def started(self, *, deterministic: bool = False) -> Program:
        """A program with vectors of ones and zeros at hand."""
        made = Program(self.handle, deterministic=deterministic or self.deterministic)
        made.known = self._known
        return made

    def program(self, operation: str, *arguments: Any, **options: Any) -> Prepared:
        """An operation on slots, checked and ready to run."""
        made = self.started()
        made.then(operation, *arguments, **options)
        return made.finish()

    def merge(self, counts: Sequence[int], **options: Any) -> Prepared:
        """`gather_stats` of what was received, of ranks with these counts."""
        means, variances = (self.rows(start, self.width) for start in (0, self.section))
        return self.program("gather_stats", means, None, counts, variances=variances, _sample=True, **options)

    def exchange(self, code: int, row: int | str, stream: int) -> None:
        """The collective of a call, with this vector as the message."""
        if self.gathered[code]:
            self.communicator.all_gather(self.vectors[row], self.vectors["received"], stream)
        else:
            self.communicator.all_reduce(self.vectors[row], self.vectors["sums"], stream)

    def add_rows(self) -> None:
        """Add the sums that were received, in the order of the ranks, if backward gathers them."""
        if self._add is not None:
            self.run(self._add, "backward_reduce")

    def run(self, program: Prepared, name: str, addresses: tuple[int, ...] = ()) -> None:
        """Run a program in this object's workspace; on the CPU in the handle's.

        The counts decide what the merge needs, and they are known only after the collective: too late for the caller.
        """
        room = None
        if self.device != CPU and program.nbytes:
            self._reserve(program)
            room = self._room
        program.execute(self.handle, name, addresses or self.addresses, room)

    def _reserve(self, *programs: Prepared) -> None:
        """Make the workspace large enough for these programs."""
        nbytes = max(program.nbytes for program in programs)
        if self.device != CPU and self._room_nbytes < nbytes:
            self._room_nbytes = -(-nbytes // 4) * 4
            self._room_vector = self._new(np.zeros(self._room_nbytes // 4, np.float32))
            self._room = self.handle.memory(self._room_vector)

    def counts(self, code: int, stream: int) -> Callable[[], tuple[int, ...]]:
        """Begin to read the headers of the last call; the function that is returned waits for them.

        It returns the counts of the ranks, or only their sum, and raises if a rank failed or none has any element.
        """
        source = "received" if self.gathered[code] else "sums"
        if code in self._pack:
            self.run(self._pack[code], "headers")
            source = "headers"
        wait = self._begin_read(self.vectors[source], self._host[code].reshape(-1), stream)
        return functools.partial(self._counts, code, wait)

    def _counts(self, code: int, wait: Callable[[], None]) -> tuple[int, ...]:
        wait()
        heads = self._host[code][:, -_HEADER:]
        heard, (known, counts) = heads.tobytes(), self._told.get(code, (b"", ()))
        if heard != known:
            counts = _read_headers(heads, code, self.gathered[code], self.communicator)
            self._told[code] = heard, counts
        return counts
