"""A CUDA device by ``cuda.core``: memory, a stream, and timing by events."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

from pybnorm._arrays import CUDA
from pybnorm.devices import _copying
from pybnorm.errors import ArgumentError, LibraryNotFoundError, NotInitializedError

__all__ = ["Device"]


class Device(_copying.Device):
    """A CUDA device with a stream of its own, current on the thread that made it.

    Parameters
    ----------
    device_id : int
        Ordinal.

    Raises
    ------
    LibraryNotFoundError
        ``cuda-core`` or ``cuda-bindings`` is not installed.
    NotInitializedError
        There is no driver, or it cannot use a device.
    ArgumentError
        It has devices, but not this one.

    Notes
    -----
    The stream does not synchronise with the legacy default stream: a handle must be given `stream`.
    """

    device_type = CUDA

    def __init__(self, device_id: int = 0) -> None:
        self._core = _cuda_core()
        try:
            self._device = self._core.Device(device_id)
            self._device.set_current()
            self._stream = self._device.create_stream()
            self.stream = int(self._stream.handle)
            self.device_id = device_id
            self.name = str(self._device.name)
        except ValueError as error:
            raise ArgumentError("device_id", device_id, f"an ordinal of the CUDA driver's ({error})") from error
        except Exception as error:  # of cuda.core and cuda.bindings, whose classes differ between releases
            raise _unusable(error, f"Device({device_id})") from error

    def synchronize(self) -> None:
        """Wait for the stream; an error of earlier asynchronous work is raised here."""
        self._stream.sync()

    def synchronize_all(self) -> None:
        """Wait for every stream of the device; an error of earlier asynchronous work is raised here."""
        self._device.sync()

    def _timed(self, call: Callable[[], object], repeats: int, calls: int) -> list[float]:
        self._stream.sync()
        # No waiting between repeats, so that the device is not idle while the host prepares the next one.
        events = [self._event() for _ in range(repeats + 1)]
        self._stream.record(events[0])
        for event in events[1:]:
            for _ in range(calls):
                call()
            self._stream.record(event)
        self._stream.sync()
        return [(end - start) * 1e-3 for start, end in itertools.pairwise(events)]

    def _allocate(self, nbytes: int) -> tuple[object, int]:
        # Stream-ordered: the memory is freed on this stream, after the work that still uses it.
        memory = self._device.allocate(max(nbytes, 1), stream=self._stream)
        return memory, int(memory.handle)

    def _copy(self, to: int, source: int, nbytes: int, from_host: bool) -> None:
        from_handle = self._core.Buffer.from_handle
        from_handle(to, nbytes).copy_from(from_handle(source, nbytes), stream=self._stream)
        self._stream.sync()

    def _event(self) -> Any:
        try:
            options = self._core.EventOptions(timing_enabled=True)
        except TypeError:  # its name before cuda-core 1.0
            options = self._core.EventOptions(enable_timing=True)
        return self._device.create_event(options)


def device_count() -> int:
    """Number of devices that this process sees."""
    _asked("cuInit", 0)
    return int(_asked("cuDeviceGetCount") or 0)


def driver() -> str:
    """The newest CUDA version that the driver supports; needs no device."""
    number = _asked("cuDriverGetVersion")
    return "" if number is None else f"CUDA driver {number // 1000}.{number % 1000 // 10}"


def _asked(function: str, *arguments: int) -> Any:
    """The answer of a function of the driver; None where its status is an error."""
    _cuda_core()
    try:
        status, *found = getattr(importlib.import_module("cuda.bindings.driver"), function)(*arguments)
    except Exception as error:
        raise _unusable(error, function) from error
    return found[0] if found and int(status) == 0 else None


def _unusable(error: Exception, function: str) -> NotInitializedError:
    """The error of a missing driver; the bindings' own class for it differs between releases."""
    return NotInitializedError(
        backend="cuda",
        function=function,
        status=-2,
        status_name="PBN_E_NOT_LOADED",
        text=f"the CUDA driver or its device cannot be used: {type(error).__name__}: {error}",
    )


def _cuda_core() -> Any:
    try:
        core = importlib.import_module("cuda.core")
        # Before 0.5 everything was in cuda.core.experimental.
        return core if hasattr(core, "Device") else importlib.import_module("cuda.core.experimental")
    except ImportError as error:
        raise LibraryNotFoundError(
            f"CUDA memory and streams need the Python packages cuda-core and cuda-bindings ({error}): "
            "pip install cuda-core[cu13] (or [cu12])",
            backend="cuda",
        ) from error
