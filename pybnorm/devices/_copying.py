"""Common parts of the devices: copies of NumPy's arrays, workspaces and timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import Buffer, Memory, as_buffer
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError


class Allocation(NamedTuple):
    """Owner of a `Buffer` copied from a NumPy array; holds what `to_numpy` needs."""

    memory: object
    """Keeps the bytes alive."""
    address: int
    """Address of the lowest byte, which with negative strides lies before the first element."""
    nbytes: int
    numpy_dtype: np.dtype[Any]


class Device:
    """Base class of `pybnorm.devices.cpu.Device`, `pybnorm.devices.cuda.Device` and `pybnorm.devices.hip.Device`.

    Each brings `_allocate`, `_copy` and `_timed`.

    Examples
    --------
    >>> cpu = pybnorm.devices.device_for(1)
    >>> buffer = cpu.from_numpy(np.zeros(3, np.float32))
    >>> cpu.refill(buffer, np.float32([1, 2, 3]).view(np.uint8))
    >>> cpu.synchronize()
    >>> cpu.synchronize_all()
    >>> cpu.to_numpy(buffer)
    array([1., 2., 3.], dtype=float32)
    >>> cpu.empty_bytes(256).nbytes, len(cpu.time(lambda: None, repeats=2))
    (256, 2)
    """

    device_type: int
    """Device type as in DLPack."""
    device_id: int
    name: str
    stream: int = 0
    """Address of the stream of the device's copies and events, for `Handle.set_stream`. 0 on the CPU."""

    def synchronize(self) -> None:
        """Wait for the stream; on the CPU calls return when they are done."""

    def synchronize_all(self) -> None:
        """Wait for every stream of the device, as work on a stream that is not known needs it."""

    def from_numpy(self, array: Any, dtype: DataType | None = None) -> Buffer:
        """Copy an array of any strides to the device, on the stream, and wait for it.

        Parameters
        ----------
        array : numpy.ndarray
            Strides and the bytes in the gaps between elements are kept.
        dtype : DataType, optional
            Element type if NumPy's dtype does not give it: bfloat16 as uint16 bits.

        Returns
        -------
        Buffer
            In device memory.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `array` is no NumPy array of `dtype`.
        AllocationError
            No device memory is left.
        """
        array, view = described(array, dtype)
        low, nbytes = extent(array)
        memory, address = self._allocate(nbytes)
        if nbytes:
            self._copy(address, view.pointer + low, nbytes, True)
        return view._replace(
            pointer=address - low,
            device_type=self.device_type,
            device_id=self.device_id,
            writable=True,
            owner=Allocation(memory, address, nbytes, array.dtype),
        )

    def refill(self, buffer: Buffer, data: Any) -> None:
        """Copy bytes, a NumPy array of uint8, over those of what `from_numpy` made; waits for the stream."""
        allocation = allocation_of(buffer)
        _arguments.instance(data, np.ndarray, "data", "a NumPy array of uint8")
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise ArgumentTypeError("data", f"{data.dtype} of shape {data.shape}", "one contiguous axis of uint8")
        if data.size > allocation.nbytes:
            raise ArgumentError("data", f"{data.size} bytes", f"at most {allocation.nbytes} bytes")
        if data.size:
            self._copy(allocation.address, data.ctypes.data, data.size, True)

    def to_numpy(self, buffer: Buffer) -> Any:
        """Copy back what `from_numpy` made, gaps included, after all work on the stream.

        Parameters
        ----------
        buffer : Buffer

        Returns
        -------
        numpy.ndarray
            Of the original NumPy dtype and strides.
        """
        allocation = allocation_of(buffer)
        host = aligned_bytes(allocation.nbytes)
        if allocation.nbytes:
            self._copy(host.ctypes.data, allocation.address, allocation.nbytes, False)
        return rebuilt(host, buffer)

    def empty_bytes(self, nbytes: int) -> Memory:
        """Uninitialised memory for a workspace, aligned to 64 bytes on the CPU, to 256 by the others' allocators."""
        memory, address = self._allocate(nbytes)
        return Memory(address, nbytes, self.device_type, self.device_id, True, memory)

    def time(
        self, call: Callable[[], object], *, repeats: int = 1, calls: int = 1, warmup: int = 0
    ) -> tuple[float, ...]:
        """Time what calls enqueue on the stream, between two events; on the CPU with the system's monotonic clock.

        Parameters
        ----------
        call : callable
            Without arguments; must work on `stream`.
        repeats : int
            Measurements.
        calls : int
            Calls per measurement; many small ones in one hide the gaps between launches.
        warmup : int
            Calls before the first measurement.

        Returns
        -------
        tuple of float
            Seconds per call, one for each repeat.
        """
        _arguments.function(call, "call")
        repeats = _arguments.integer(repeats, "repeats")
        calls = _arguments.integer(calls, "calls", low=1)
        for _ in range(_arguments.integer(warmup, "warmup")):
            call()
        return tuple([seconds / calls for seconds in self._timed(call, repeats, calls)])

    def _allocate(self, nbytes: int) -> tuple[object, int]:
        """Memory, which its owner keeps, and its address."""
        raise NotImplementedError

    def _copy(self, to: int, source: int, nbytes: int, from_host: bool) -> None:
        """Copy on the stream, and wait for it."""
        raise NotImplementedError

    def _timed(self, call: Callable[[], object], repeats: int, calls: int) -> list[float]:
        """Seconds of each repeat."""
        raise NotImplementedError


def described(array: Any, dtype: DataType | None) -> tuple[np.ndarray[Any, Any], Buffer]:
    """The array as a plain ndarray, and its `Buffer`; `dtype` names the type of bits given as uint16."""
    _arguments.instance(array, np.ndarray, "array", "a NumPy array")
    array = np.ndarray.view(array, np.ndarray)
    if dtype is not None:
        dtype = _arguments.data_type(dtype)
    if dtype is DataType.BFLOAT16 and array.dtype == np.uint16:
        return array, as_buffer(array.view(np.float16), "array")._replace(dtype=dtype)
    buffer = as_buffer(array, "array")
    if dtype is not None and buffer.dtype != dtype:
        bits = " or uint16 bits" if dtype is DataType.BFLOAT16 else ""
        raise ArgumentTypeError("array", f"dtype {array.dtype}", f"{dtype.name.lower()}{bits}, as dtype says")
    return array, buffer


def extent(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """(offset of the lowest byte from the first element, bytes from the lowest to the highest)."""
    if array.size == 0:
        return 0, 0
    steps = [(dim - 1) * stride for dim, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(step for step in steps if step < 0)
    high = sum(step for step in steps if step > 0)
    return low, high - low + array.itemsize


def aligned_bytes(nbytes: int) -> np.ndarray[Any, Any]:
    """Uninitialised bytes at a 64-byte boundary."""
    memory = np.empty(nbytes + _arguments.ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _arguments.ALIGNMENT
    return memory[start : start + nbytes]


def allocation_of(buffer: Buffer) -> Allocation:
    """The owner that `from_numpy` gave the buffer."""
    allowed = "a Buffer that from_numpy of a pybnorm device returned"
    _arguments.instance(buffer, Buffer, "buffer", allowed)
    if not isinstance(buffer.owner, Allocation):
        raise ArgumentTypeError("buffer", buffer, allowed)
    return buffer.owner


def rebuilt(memory: np.ndarray[Any, Any], buffer: Buffer) -> np.ndarray[Any, Any]:
    """The array over a copy of the bytes of a buffer."""
    allocation = allocation_of(buffer)
    itemsize = buffer.dtype.itemsize
    return np.ndarray(
        buffer.dims,
        allocation.numpy_dtype,
        buffer=memory,
        offset=buffer.pointer - allocation.address,
        strides=tuple(stride * itemsize for stride in buffer.strides),
    )
