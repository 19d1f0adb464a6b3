"""The CPU, with NumPy's memory and without streams."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable

from pybnorm import _arguments
from pybnorm._arrays import CPU
from pybnorm.devices import _copying
from pybnorm.devices._copying import Allocation, aligned_bytes
from pybnorm.errors import ArgumentError

__all__ = ["Allocation", "Device"]


class Device(_copying.Device):
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

    def _allocate(self, nbytes: int) -> tuple[object, int]:
        nbytes = _arguments.integer(nbytes, "nbytes", high=sys.maxsize - _arguments.ALIGNMENT)
        memory = aligned_bytes(nbytes)
        return memory, memory.ctypes.data

    def _copy(self, to: int, source: int, nbytes: int, from_host: bool) -> None:
        ctypes.memmove(to, source, nbytes)

    def _timed(self, call: Callable[[], object], repeats: int, calls: int) -> list[float]:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds.append(time.perf_counter() - start)
        return seconds


def device_count() -> int:
    """1: CPUs count as one device."""
    return 1


def driver() -> str:
    """Empty: there is none."""
    return ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
