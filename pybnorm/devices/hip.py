"""A ROCm device by the HIP runtime (libamdhip64, through ctypes): memory, a stream, and timing by events.

Not through hip-python: it calls the same functions, but of a copy that it searches for itself, and the loaded one must
be taken, see `SPEC`."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pybnorm._arrays import ROCM
from pybnorm._find import LibrarySpec, OpenFailed, find
from pybnorm.devices import _copying
from pybnorm.errors import (
    AllocationError,
    ArgumentError,
    BadParameterError,
    ExecutionError,
    NotInitializedError,
    NotSupportedError,
    VendorError,
)

__all__ = ["SPEC", "Device", "load"]

SPEC = LibrarySpec(
    backend="amdhip64",
    label="the HIP runtime",
    sonames=("libamdhip64.so.7",),
    hint="install ROCm's HIP runtime (package hip-runtime-amd, Debian and Ubuntu: libamdhip64-6), or AMD's rocm wheels",
    # PyTorch's ROCm wheels carry, and link to, a copy under the unversioned name.
    loaded_names=("libamdhip64.so",),
    rocm_sdk="amdhip64",
    roots=("ROCM_PATH", "ROCM_HOME", "HIP_PATH"),
    folders=("/opt/rocm/core*/lib", "/opt/rocm/lib", "/opt/rocm-*/lib"),
)
"""Search for the HIP runtime. A loaded copy (MIOpen links to one) comes first, because two HIP runtimes in one process
do not know each other's memory. ``PYBNORM_LIB_AMDHIP64`` names a file."""

_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(_POINTER)
# The same in HIP 5, 6 and 7. hipError_t and hipMemcpyKind are C enums.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "hipRuntimeGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "hipGetDeviceCount": (ctypes.POINTER(ctypes.c_int),),
    "hipSetDevice": (ctypes.c_int,),
    "hipDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "hipMalloc": (_OUT, ctypes.c_size_t),
    "hipFree": (_POINTER,),
    "hipMemcpyAsync": (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER),
    "hipStreamCreateWithFlags": (_OUT, ctypes.c_uint),
    "hipStreamDestroy": (_POINTER,),
    "hipStreamSynchronize": (_POINTER,),
    "hipDeviceSynchronize": (),
    "hipEventCreate": (_OUT,),
    "hipEventDestroy": (_POINTER,),
    "hipEventRecord": (_POINTER, _POINTER),
    "hipEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _POINTER, _POINTER),
}
_TEXTS = ("hipGetErrorName", "hipGetErrorString")
_PROPERTIES = "hipGetDevicePropertiesR0600"
"""Fills a hipDeviceProp_tR0600, since HIP 6: tests/abi holds these two of its offsets to be the header's."""
_ARCH, _WAVE = slice(1160, 1416), slice(308, 312)
_STREAM_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
_HOST_TO_DEVICE = 1
_DEVICE_TO_HOST = 2

# Of hipError_t; every other number is a VendorError.
_ERRORS: dict[int, type[VendorError]] = {
    1: BadParameterError,  # hipErrorInvalidValue
    2: AllocationError,  # hipErrorOutOfMemory
    3: NotInitializedError,  # hipErrorNotInitialized
    35: NotInitializedError,  # hipErrorInsufficientDriver
    100: NotInitializedError,  # hipErrorNoDevice
    400: BadParameterError,  # hipErrorInvalidHandle
    700: ExecutionError,  # hipErrorIllegalAddress
    719: ExecutionError,  # hipErrorLaunchFailure
    801: NotSupportedError,  # hipErrorNotSupported
}


class Runtime:
    """The loaded library; `call` turns a status that is not 0 into an exception."""

    def __init__(self, library: ctypes.CDLL, file: str) -> None:
        self.file = file
        self.found_via = ""
        self.functions: dict[str, Any] = {}
        for name in (*_PROTOTYPES, *_TEXTS):
            try:
                function = library[name]
            except AttributeError as error:
                raise OpenFailed("symbol", f"it has no symbol {name}") from error
            function.argtypes = _PROTOTYPES.get(name, (ctypes.c_int,))
            function.restype = ctypes.c_char_p if name in _TEXTS else ctypes.c_int
            self.functions[name] = function
        self._properties = getattr(library, _PROPERTIES, None)
        self._exchange_mode = getattr(library, "hipThreadExchangeStreamCaptureMode", None)
        number = ctypes.c_int()
        self.version: tuple[int, ...] = ()
        if self.functions["hipRuntimeGetVersion"](ctypes.byref(number)) == 0:
            self.version = (number.value // 10**7, number.value // 10**5 % 100, number.value % 10**5)

    def call(self, name: str, *arguments: Any) -> None:
        status = self.functions[name](*arguments)
        if status != 0:
            status_name, text = ((self.functions[t](status) or b"").decode(errors="replace") for t in _TEXTS)
            raise _ERRORS.get(status, VendorError)(
                backend="hip",
                function=name,
                status=status,
                status_name=status_name,
                text=text,
                library=self.file,
                version=self.version,
            )

    def free(self, address: int) -> None:
        """Free memory, also while this thread captures a graph, which a bare hipFree ends.

        The status is ignored: an error of a kernel is raised where the stream is waited for.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        if self._exchange_mode is not None:
            self._exchange_mode(ctypes.byref(mode))
        self.functions["hipFree"](address)
        if self._exchange_mode is not None:
            self._exchange_mode(ctypes.byref(mode))

    def name(self, device_id: int) -> str:
        """A device's name with its architecture, such as "AMD Radeon RX 7900 XTX (gfx1100, wave size 32)"."""
        name = ctypes.create_string_buffer(256)
        self.call("hipDeviceGetName", name, len(name), device_id)
        found, properties = name.value.decode(errors="replace"), ctypes.create_string_buffer(8192)
        if self._properties is None or self._properties(properties, device_id) != 0:
            return found
        arch = properties.raw[_ARCH].partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        wave = int.from_bytes(properties.raw[_WAVE], sys.byteorder)
        return f"{found} ({arch}, wave size {wave})" if arch.startswith("gfx") else found


class _Block:
    """Owner of device memory. hipFree waits for the device, so the memory is unused when it is freed."""

    def __init__(self, hip: Runtime, address: int, device: Device) -> None:
        self.address = address
        self._device = device  # keeps the stream alive as long as its memory
        weakref.finalize(self, hip.free, address)


_lock = threading.Lock()
_loaded: Runtime | None = None


def load(path: str | os.PathLike[str] | None = None) -> Runtime:
    """Load the HIP runtime once. Load MIOpen first, so that both use the same copy.

    Parameters
    ----------
    path : str or path-like, optional
        The file; without it the search of `SPEC`.

    Returns
    -------
    Runtime

    Raises
    ------
    LibraryNotFoundError, LibraryLoadError, SymbolNotFoundError
        As `pybnorm.load`.
    """
    global _loaded  # noqa: PLW0603 (a process has one HIP runtime)
    with _lock:
        if _loaded is None:
            runtime, how, _ = find(SPEC, _open, path)
            runtime.found_via = how
            _loaded = runtime
        return _loaded


class Device(_copying.Device):
    """A ROCm device with a stream of its own, current on the thread that made it or last asked it for memory or times.

    Parameters
    ----------
    device_id : int
        Ordinal.

    Raises
    ------
    LibraryNotFoundError
        No libamdhip64.
    NotInitializedError
        The HIP runtime finds no device.
    ArgumentError
        There is no device of that ordinal.

    Notes
    -----
    The stream does not synchronise with the null stream: a handle must be given `stream`. It lives as long as this
    object and the arrays made by it.
    """

    device_type = ROCM

    def __init__(self, device_id: int = 0) -> None:
        self._hip = hip = load()
        if device_id >= (count := device_count()):
            raise ArgumentError("device_id", device_id, f"0 to {count - 1}, the HIP runtime's devices")
        self.device_id = device_id
        self._go()
        self.name = hip.name(device_id)
        stream = _POINTER()
        hip.call("hipStreamCreateWithFlags", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        self.stream = stream.value or 0
        weakref.finalize(self, hip.functions["hipStreamDestroy"], stream.value)

    def synchronize(self) -> None:
        """Wait for the stream; an error of earlier asynchronous work is raised here."""
        self._hip.call("hipStreamSynchronize", self.stream)

    def synchronize_all(self) -> None:
        """Wait for every stream of the device; an error of earlier asynchronous work is raised here."""
        self._go()
        self._hip.call("hipDeviceSynchronize")

    def _timed(self, call: Callable[[], object], repeats: int, calls: int) -> list[float]:
        hip = self._hip
        self.synchronize()
        self._go()
        events: list[_POINTER] = []
        try:
            for _ in range(repeats + 1):
                event = _POINTER()
                hip.call("hipEventCreate", ctypes.byref(event))
                events.append(event)
            hip.call("hipEventRecord", events[0], self.stream)
            for event in events[1:]:
                for _ in range(calls):
                    call()
                hip.call("hipEventRecord", event, self.stream)
            self.synchronize()
            seconds = []
            for start, end in itertools.pairwise(events):
                elapsed = ctypes.c_float()
                hip.call("hipEventElapsedTime", ctypes.byref(elapsed), start, end)
                seconds.append(elapsed.value * 1e-3)
        finally:
            for event in events:
                hip.functions["hipEventDestroy"](event)
        return seconds

    def _copy(self, to: int, source: int, nbytes: int, from_host: bool) -> None:
        kind = _HOST_TO_DEVICE if from_host else _DEVICE_TO_HOST
        self._hip.call("hipMemcpyAsync", to, source, nbytes, kind, self.stream)
        self.synchronize()

    def _go(self) -> None:
        """Make the device current: HIP's memory and events are those of the one that is."""
        self._hip.call("hipSetDevice", self.device_id)

    def _allocate(self, nbytes: int) -> tuple[object, int]:
        self._go()
        address = _POINTER()
        self._hip.call("hipMalloc", ctypes.byref(address), max(nbytes, 1))
        return _Block(self._hip, address.value or 0, self), address.value or 0


def device_count() -> int:
    """Number of devices that this process sees."""
    count = ctypes.c_int()
    load().call("hipGetDeviceCount", ctypes.byref(count))
    return count.value


def driver() -> str:
    """The HIP runtime's version."""
    return "HIP runtime " + ".".join(map(str, load().version))


def _open(file: str, no_load: bool) -> Runtime:
    mode = os.RTLD_NOW | os.RTLD_LOCAL | (os.RTLD_NOLOAD if no_load else 0)
    try:
        library = ctypes.CDLL(file, mode)
    except OSError as error:
        raise OpenFailed("open", "not loaded in this process" if no_load else str(error)) from error
    return Runtime(library, file)
