"""Timing of calls on a device: random arrays, replays of captured graphs, the speed of a copy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, devices
from pybnorm._arrays import CPU, CUDA, numpy_dtype
from pybnorm.devices._copying import allocation_of, rebuilt
from pybnorm.enums import DataType, Layout
from pybnorm.errors import NotInitializedError

__all__ = ["Call", "Plain", "Timing", "best_in_turn", "buffer_sets"]

MEAN, DEVIATION = 0.5, 2.0
"""Mean and standard deviation of the random values."""
_TILE = 4_000_037  # values drawn on the host before they repeat; prime, so that no shape divides it
MEASUREMENT = 8e-3  # seconds of back-to-back calls in one measurement of at most _MOST_CALLS
_MOST_CALLS = 50
_PIECE = 2e-4  # seconds that no other process interrupts, as a rule
_SLOW, _VERY_SLOW = 3e-3, 20e-3  # seconds per call; beyond them 5 and 3 measurements are enough
COPY_BYTES = 1 << 30
_CPU_COPY_BYTES = 256 << 20

HOT_BYTES = 8 << 20
_MOST_SETS = 8

Array64 = npt.NDArray[np.float64]
Call = Callable[[], object]


class Timing(NamedTuple):
    """One measured time."""

    seconds: float
    """Seconds per call: the median of the measurements, on the CPU the best."""
    spread: float
    """Slowest less fastest measurement, over `seconds`."""
    calls: int
    """Calls in a measurement, back to back."""
    replays: int
    """Number of measurements."""
    method: str
    """``"graph replay"``, ``"events around calls"`` or ``"wall clock"``."""


def no_device(reason: str) -> NotInitializedError:
    """The error of a machine without a device."""
    return NotInitializedError(backend="cuda", function="cuInit", status=0, status_name="no device", text=reason)


def buffer_sets(tensor_bytes: int, cache_bytes: int) -> int:
    """Number of array sets used in turn, so that none is still in the cache when it is used again.

    Their x and y together have four times the size of the cache. One set if the tensor is meant to stay in the cache,
    or if there is no cache.
    """
    if not cache_bytes or tensor_bytes < HOT_BYTES:
        return 1
    return min(max(math.ceil(4 * cache_bytes / (2 * tensor_bytes)), 1), _MOST_SETS)


class Plain:
    """A device of `pybnorm.devices`: CUDA without PyTorch, or the CPU."""

    def __init__(self, device: devices.Device) -> None:
        self.device = device
        self.name = device.name
        self.gpu = device.device_type != CPU
        self.stream = device.stream
        self._driver = _Driver(device) if device.device_type == CUDA else None
        self.cache_bytes = self._driver.cache_bytes() if self._driver is not None else 0

    def current(self) -> contextlib.AbstractContextManager[object]:
        """An empty context: there is no framework whose device must be current."""
        return contextlib.nullcontext()

    def tensor(self, dims: tuple[int, ...], dtype: DataType, layout: Layout, seed: int) -> Any:
        """A `Buffer` of normal random values, drawn on the host and repeated after some millions."""
        size = math.prod(dims)
        drawn = np.random.default_rng(seed).standard_normal(min(size, _TILE), np.float32)
        values = np.resize((drawn * DEVIATION + MEAN).astype(numpy_dtype(dtype)), size)
        strides = _arguments.packed_strides(dims, layout)
        order = sorted(range(len(dims)), key=lambda axis: -strides[axis])
        array = values.reshape([dims[axis] for axis in order]).transpose(np.argsort(order))
        return self.device.from_numpy(array)

    def vector(self, values: npt.NDArray[np.floating[Any]]) -> Any:
        """A `Buffer` of rank 1, of the type of `values`."""
        return self.device.from_numpy(values)

    def empty_bytes(self, nbytes: int) -> Any:
        """A `Memory`."""
        return self.device.empty_bytes(nbytes)

    def address(self, array: Any) -> int:
        """Give the address of the first element."""
        return int(array.pointer)

    def sample(self, array: Any, channels: Sequence[int]) -> Array64:
        """Channels in float64 on the host; also of a NumPy array, as rivals on the CPU return them."""
        host = array if isinstance(array, np.ndarray) else self.device.to_numpy(array)
        rows = host.reshape(1, -1) if host.ndim == 1 else host
        chosen: Array64 = rows[:, list(channels)].astype(np.float64)
        return chosen.reshape(*chosen.shape[:2], -1)

    def view(self, array: Any) -> npt.NDArray[Any]:
        """Give the NumPy array over the memory of a `tensor` or a `vector` on the CPU."""
        memory: Any = allocation_of(array).memory
        view: npt.NDArray[Any] = rebuilt(memory, array)
        return view

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.device.synchronize()

    def picked(self, array: Any, channels: Sequence[int]) -> Array64:
        """Do as `sample`."""
        return self.sample(array, channels)

    def time(
        self, calls: Sequence[Call], replays: int, *, seconds: float = MEASUREMENT, limit: float = math.inf
    ) -> Timing:
        """Time on CUDA as `TorchCuda.time`; on the CPU the best of the measurements by the wall clock."""
        device = self.device
        in_turn(calls, 2 if self.gpu else 1)
        once = device.time(lambda: in_turn(calls, 1), calls=2)[0] / len(calls)
        if once > limit:
            return timing_of([once], 2 * len(calls), "wall clock")
        count, replays = rounds_of(once, len(calls), replays, seconds)
        total = count * len(calls)
        if not self.gpu:
            found = device.time(lambda: in_turn(calls, count), repeats=replays)
            return timing_of([s / total for s in found], total, "wall clock")
        executable = None
        if self._driver is not None:
            device.synchronize()
            with no_garbage_collection():
                executable = self._driver.captured(lambda: in_turn(calls, count))
        if executable is None or self._driver is None:
            found = device.time(lambda: in_turn(calls, count), repeats=replays)
            return timing_of([s / total for s in found], total, "events around calls")
        driver = self._driver
        found = device.time(lambda: driver.launch(executable), repeats=replays, warmup=1)
        driver.destroy(executable)
        return timing_of([s / total for s in found], total, "graph replay")

    def time_in_turn(self, works: Sequence[Sequence[Call]], replays: int) -> list[Timing]:
        """Time on the CPU, as `best_in_turn`."""
        return best_in_turn(works, replays)

    def copy_speed(self) -> tuple[float, str]:
        """Measure a device-to-device copy by the driver; on the CPU one by as many threads as there are processors."""
        if self._driver is None:
            return _cpu_copy_speed()
        nbytes = min(COPY_BYTES, self._driver.free_bytes() // 4)
        source, target = (self.device.empty_bytes(nbytes) for _ in range(2))
        driver = self._driver
        copy = lambda: driver.copy(target.pointer, source.pointer, nbytes)  # noqa: E731
        seconds = statistics.median(self.device.time(copy, repeats=11, warmup=3))
        return 2 * nbytes / seconds, f"device-to-device copy of {nbytes >> 20} MiB by the driver"

    def free_bytes(self) -> int | None:
        """Give the free bytes of the device, or of the host."""
        if self._driver is not None:
            return self._driver.free_bytes()
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None

    def release(self) -> None:
        """Arrays are freed with their last reference."""
        self.synchronize()
        gc.collect()


class _Driver:
    """The few functions of the CUDA driver that ``cuda.core`` names differently from release to release."""

    _L2_CACHE_SIZE = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    _THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

    def __init__(self, device: devices.Device) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._stream = ctypes.c_void_p(device.stream)
        self._ordinal = device.device_id

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise no_device(f"{name}: CUresult {status}")

    def cache_bytes(self) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), self._L2_CACHE_SIZE, self._ordinal)
        return value.value

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def copy(self, target: int, source: int, nbytes: int) -> None:
        size = ctypes.c_size_t(nbytes)
        self._call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), size, self._stream)

    def captured(self, work: Call) -> ctypes.c_void_p | None:
        """A graph of what the work enqueues, ready to launch; None if it cannot be captured."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        if self._library.cuStreamBeginCapture_v2(self._stream, self._THREAD_LOCAL):
            return None
        good = True
        try:
            work()
        except Exception:  # raised again when the work is measured without a graph
            good = False
        if self._library.cuStreamEndCapture(self._stream, ctypes.byref(graph)) or not good or not graph:
            return None
        failed = self._library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self._library.cuGraphDestroy(graph)
        return None if failed else executable

    def launch(self, executable: ctypes.c_void_p) -> None:
        self._call("cuGraphLaunch", executable, self._stream)

    def destroy(self, executable: ctypes.c_void_p) -> None:
        self._call("cuGraphExecDestroy", executable)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def in_turn(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def rounds_of(once: float, sets: int, replays: int, seconds: float = MEASUREMENT) -> tuple[int, int]:
    """(rounds over the buffer sets in a measurement of `seconds`, measurements) for calls of `once` seconds."""
    calls = min(max(int(seconds / max(once, 1e-9)), 3), _MOST_CALLS)
    if once > _SLOW:
        replays = min(replays, 5)
    if once > _VERY_SLOW:
        replays = min(replays, 3)
    return max(-(-calls // sets), 1), replays


def best_in_turn(
    works: Sequence[Sequence[Call]], replays: int, elapsed: Callable[[Call], float] | None = None, piece: float = _PIECE
) -> list[Timing]:
    """The best time per call of each work, measured in pieces of so many seconds, of which each has some in turn."""
    elapsed = elapsed or _wall
    rounds = [_piece(calls, elapsed, piece) for calls in works]
    best: list[list[float]] = [[] for _ in works]
    for _ in range(replays):
        for calls, (count, pieces), found in zip(works, rounds, best, strict=True):
            in_turn(calls, 1)  # the data in the cache, the threads awake
            work = functools.partial(in_turn, calls, count)
            found.append(min(elapsed(work) for _ in range(pieces)) / (count * len(calls)))
    return [
        timing_of(seconds, count * len(calls), "wall clock")
        for seconds, (count, _), calls in zip(best, rounds, works, strict=True)
    ]


def _wall(work: Call) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _piece(calls: Sequence[Call], elapsed: Callable[[Call], float], seconds: float) -> tuple[int, int]:
    """(rounds over the calls in a piece, pieces in a turn): what other work interrupts is a piece, not the turn."""
    in_turn(calls, 1)
    once = min(elapsed(lambda: in_turn(calls, 1)) for _ in range(3))
    rounds = math.ceil(seconds / max(once, 1e-9))
    return rounds, max(min(int(MEASUREMENT / (rounds * once)), _MOST_CALLS), 1)


def timing_of(seconds: Sequence[float], calls: int, method: str) -> Timing:
    value = min(seconds) if method == "wall clock" else statistics.median(seconds)
    return Timing(value, (max(seconds) - min(seconds)) / value, calls, len(seconds), method)


def _cpu_copy_speed() -> tuple[float, str]:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    source, target = np.ones(_CPU_COPY_BYTES, np.uint8), np.zeros(_CPU_COPY_BYTES, np.uint8)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    best = math.inf
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(6):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))  # without the GIL
            best = min(best, time.perf_counter() - start)
    text = f"copy of {_CPU_COPY_BYTES >> 20} MiB by {threads} thread{'s' if threads > 1 else ''} of NumPy, best of 6"
    return 2 * _CPU_COPY_BYTES / best, text
