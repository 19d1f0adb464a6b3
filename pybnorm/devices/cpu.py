"""The CPU, with NumPy's memory and without streams."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import CPU, Buffer, Memory, as_buffer
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = ["Allocation", "Device"]


class Allocation(NamedTuple):
    """Owner of a `Buffer` copied from a NumPy array; holds what `to_numpy` needs."""

    memory: object
    """Keeps the bytes alive."""
    address: int
    """Address of the lowest byte, which with negative strides lies before the first element."""
    nbytes: int
    numpy_dtype: np.dtype[Any]


class Device:
    """The CPU as a device.

    Parameters
    ----------
    device_id : int
        0.
    """

    device_type = CPU

    def __init__(self, device_id: int = 0) -> None:
        if _arguments.integer(device_id, "device_id") != 0:
            raise ArgumentError("device_id", device_id, "0, there is one CPU")
        self.device_id = 0
        self.name = _processor()

    @property
    def stream(self) -> int:
        """0: the CPU has no streams."""
        return 0

    def from_numpy(self, array: Any, dtype: DataType | None = None) -> Buffer:
        """Copy an array of any strides.

        Parameters
        ----------
        array : numpy.ndarray
            Strides and the bytes in the gaps between elements are kept.
        dtype : DataType, optional
            Element type if NumPy's dtype does not give it: bfloat16 as uint16 bits.

        Returns
        -------
        Buffer

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `array` is no NumPy array of `dtype`.
        """
        array, view = described(array, dtype)
        low, nbytes = extent(array)
        memory = aligned_bytes(nbytes)
        ctypes.memmove(memory.ctypes.data, view.pointer + low, nbytes)
        allocation = Allocation(memory, memory.ctypes.data, nbytes, array.dtype)
        return view._replace(pointer=memory.ctypes.data - low, writable=True, owner=allocation)

    def refill(self, buffer: Buffer, data: Any) -> None:
        """Copy bytes, a NumPy array of uint8, over those of what `from_numpy` made; waits for the stream."""
        allocation = refilled(buffer, data)
        ctypes.memmove(allocation.address, data.ctypes.data, data.size)

    def to_numpy(self, buffer: Buffer) -> Any:
        """Copy back what `from_numpy` made, gaps included.

        Parameters
        ----------
        buffer : Buffer

        Returns
        -------
        numpy.ndarray
            Of the original NumPy dtype and strides.
        """
        allocation = allocation_of(buffer)
        memory = aligned_bytes(allocation.nbytes)
        ctypes.memmove(memory.ctypes.data, allocation.address, allocation.nbytes)
        return rebuilt(memory, buffer)

    def empty_bytes(self, nbytes: int) -> Memory:
        """Uninitialised memory for a workspace, aligned to 64 bytes."""
        nbytes = _arguments.integer(nbytes, "nbytes", high=sys.maxsize - _arguments.ALIGNMENT)
        memory = aligned_bytes(nbytes)
        return Memory(memory.ctypes.data, nbytes, CPU, 0, True, memory)

    def synchronize(self) -> None:
        """Do nothing: calls on the CPU return when they are done."""

    def synchronize_all(self) -> None:
        """Do nothing."""

    def time(
        self, call: Callable[[], object], *, repeats: int = 1, calls: int = 1, warmup: int = 0
    ) -> tuple[float, ...]:
        """Time calls with the system's monotonic clock.

        Parameters
        ----------
        call : callable
            Without arguments.
        repeats : int
            Measurements.
        calls : int
            Calls per measurement.
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
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds.append((time.perf_counter() - start) / calls)
        return tuple(seconds)


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


def refilled(buffer: Buffer, data: Any) -> Allocation:
    """The memory of a buffer, for as many bytes as it has at most."""
    allocation = allocation_of(buffer)
    _arguments.instance(data, np.ndarray, "data", "a NumPy array of uint8")
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ArgumentTypeError("data", f"{data.dtype} of shape {data.shape}", "one contiguous axis of uint8")
    if data.size > allocation.nbytes:
        raise ArgumentError("data", f"{data.size} bytes", f"at most {allocation.nbytes} bytes")
    return allocation


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


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
