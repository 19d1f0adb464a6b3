"""What `benchmarks.device` measures on: a device through PyTorch where it is installed, else one of pybnorm."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import statistics
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.timing import (
    COPY_BYTES,
    DEVIATION,
    MEAN,
    MEASUREMENT,
    Array64,
    Call,
    Plain,
    Timing,
    best_in_turn,
    in_turn,
    no_device,
    no_garbage_collection,
    rounds_of,
    timing_of,
)
from pybnorm import _arguments, devices
from pybnorm._arrays import CUDA
from pybnorm.enums import DataType, Layout

__all__ = ["Machine", "TorchCuda", "open_machine"]

_QUEUED = 2e-3  # seconds of calls between two events; what the host takes to start them is little of it
_PAUSE = 400_000
"""Cycles of a device's clock, about 0.2 ms."""


class Machine(Protocol):
    """A device to measure on, or the CPU. Everything happens inside `current`, on `stream`."""

    name: str
    gpu: bool
    stream: int
    cache_bytes: int
    """Of the last level on the device; 0 where buffer sets need not rotate."""

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Makes the stream the one that frameworks work on."""
        ...

    def tensor(self, dims: tuple[int, ...], dtype: DataType, layout: Layout, seed: int) -> Any:
        """An array of normal random values."""
        ...

    def vector(self, values: npt.NDArray[np.floating[Any]]) -> Any:
        """An array of rank 1, of the type of `values`."""
        ...

    def empty_bytes(self, nbytes: int) -> Any:
        """Memory for a workspace, an object with its address as `address` gives it."""
        ...

    def address(self, array: Any) -> int:
        """Of the first element, or of a workspace."""
        ...

    def sample(self, array: Any, channels: Sequence[int]) -> Array64:
        """Channels of an (N, C, spatial...) array, or elements of a vector, on the host: (N, channels, values)."""
        ...

    def picked(self, array: Any, channels: Sequence[int]) -> Any:
        """As `sample`, where the array is."""
        ...

    def time(
        self, calls: Sequence[Call], replays: int, *, seconds: float = MEASUREMENT, limit: float = math.inf
    ) -> Timing:
        """Time per call of calls made in turn, back to back, in measurements of `seconds`.

        Of calls that take more than `limit`, the time of one is enough.
        """
        ...

    def time_in_turn(self, works: Sequence[Sequence[Call]], replays: int) -> list[Timing]:
        """On the CPU, time per call of several contenders, a piece of each at a time."""
        ...

    def synchronize(self) -> None:
        """Wait for the stream."""
        ...

    def copy_speed(self) -> tuple[float, str]:
        """Bytes read and written per second of a large copy, and how it was done."""
        ...

    def free_bytes(self) -> int | None:
        """Memory left, if it is known."""
        ...

    def release(self) -> None:
        """Give memory that no array uses any more back to the device."""
        ...


def open_machine(device_type: int) -> Machine:
    """PyTorch's CUDA device where there is one, because PyTorch can then be measured too; else pybnorm's own device."""
    if device_type == CUDA and (torch := optional("torch")) is not None and torch.version.cuda:
        if not torch.cuda.is_available():
            raise no_device("PyTorch finds no CUDA device")
        return TorchCuda(torch)
    try:
        return Plain(devices.device_for(device_type))
    except RuntimeError as error:  # cuda.core has no class of its own for "no driver" and "no device"
        raise no_device(str(error)) from error


def optional(name: str) -> Any:
    """A module, or None where it is not installed or cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


class TorchCuda:
    """A CUDA device through PyTorch: its allocator, its graphs and events, on a stream of its own."""

    gpu = True

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._stream = torch.cuda.Stream()
        self.stream = int(self._stream.cuda_stream)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.name = str(properties.name)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 64 << 20))

    def current(self) -> contextlib.AbstractContextManager[object]:
        """PyTorch's context of the stream."""
        context: contextlib.AbstractContextManager[object] = self.torch.cuda.stream(self._stream)
        return context

    def dtype(self, dtype: DataType) -> Any:
        """PyTorch's dtype."""
        return getattr(self.torch, dtype.name.lower())

    def tensor(self, dims: tuple[int, ...], dtype: DataType, layout: Layout, seed: int) -> Any:
        """A tensor of normal random values, made on the device."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(seed)
        strides = _arguments.packed_strides(dims, layout)
        array = torch.empty_strided(dims, strides, dtype=self.dtype(dtype), device="cuda")
        return array.normal_(MEAN, DEVIATION, generator=generator)

    def vector(self, values: npt.NDArray[np.floating[Any]]) -> Any:
        """A tensor of rank 1, of the type of `values`."""
        return self.torch.from_numpy(values.copy()).to("cuda")

    def empty_bytes(self, nbytes: int) -> Any:
        """A tensor of bytes; PyTorch aligns to 512."""
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def address(self, array: Any) -> int:
        """Of the first element."""
        return int(array.data_ptr())

    def sample(self, array: Any, channels: Sequence[int]) -> Array64:
        """Channels in float64 on the host."""
        values: Array64 = self.picked(array, channels).cpu().numpy()
        return values

    def picked(self, array: Any, channels: Sequence[int]) -> Any:
        """Channels in float64 on the device."""
        rows = array.reshape(1, -1) if array.dim() == 1 else array
        chosen = rows[:, list(channels)].double()
        return chosen.reshape(*chosen.shape[:2], -1)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def time(
        self, calls: Sequence[Call], replays: int, *, seconds: float = MEASUREMENT, limit: float = math.inf
    ) -> Timing:
        """Median of replays of a captured graph between events; of plain calls where they cannot be captured."""
        calls[0]()
        if limit < math.inf and (alone := self._elapsed(calls[:1])[0]) > limit:
            return timing_of([alone], 1, "events around calls")
        for call in (*calls, *calls):
            call()
        once = self._elapsed([lambda: in_turn(calls, 2)])[0] / (2 * len(calls))
        count, replays = rounds_of(once, len(calls), replays, seconds)
        graph = self._captured(calls, count)
        if graph is None:
            found = self._elapsed([lambda: in_turn(calls, count)] * replays)
            method = "events around calls"
        else:
            graph.replay()  # the first uploads it
            found, method = self._elapsed([graph.replay] * replays), "graph replay"
            graph.reset()
        total = count * len(calls)
        return timing_of([s / total for s in found], total, method)

    def time_in_turn(self, works: Sequence[Sequence[Call]], replays: int) -> list[Timing]:
        """The best time per call of each work queued call by call, as a caller without a graph sees it."""
        return best_in_turn(works, replays, self._queued, _QUEUED)

    def _queued(self, work: Call) -> float:
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        self.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def _elapsed(self, works: Sequence[Call]) -> list[float]:
        """Seconds of each, all queued while the device pauses, so that short ones do not wait for the host."""
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        self.torch.cuda._sleep(_PAUSE)
        events[0].record()
        for work, event in zip(works, events[1:], strict=True):
            work()
            event.record()
        self.synchronize()
        return [events[i].elapsed_time(events[i + 1]) * 1e-3 for i in range(len(works))]

    def _captured(self, calls: Sequence[Call], count: int) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        self.synchronize()
        with no_garbage_collection():  # what it frees may not be freed during a capture
            try:
                # torch.cuda.graph() would empty the allocator's cache each time, which costs more than the measurement.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    in_turn(calls, count)
                finally:
                    graph.capture_end()
            except Exception:  # whatever cannot be captured is measured without; a broken call shows itself there
                self.synchronize()
                return None
        return graph

    def copy_speed(self) -> tuple[float, str]:
        """Of a device-to-device copy between two tensors."""
        free = self.torch.cuda.mem_get_info()[0]
        nbytes = min(COPY_BYTES, free // 4)
        source, target = self.empty_bytes(nbytes).fill_(1), self.empty_bytes(nbytes)
        self._elapsed([lambda: target.copy_(source)] * 3)
        seconds = statistics.median(self._elapsed([lambda: target.copy_(source)] * 11))
        return 2 * nbytes / seconds, f"device-to-device copy of {nbytes >> 20} MiB by PyTorch's copy_"

    def free_bytes(self) -> int | None:
        """Of the device, what PyTorch keeps in its cache included."""
        torch = self.torch
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + int(kept)

    def release(self) -> None:
        """Empty PyTorch's cache."""
        self.synchronize()
        gc.collect()
        self.torch.cuda.empty_cache()
