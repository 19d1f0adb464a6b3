"""hipDNN's handles, and memory by address."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

import pybnorm
from pybnorm import _arguments, devices
from pybnorm.errors import ArgumentError, LibraryError, VendorError
from pybnorm.hipdnn.types import _StateError

_ORDER = ("miopen", "cudnn", "onednn")
_SIZES = {"float32": 4, "float16": 2, "float64": 8, "int32": 4, "uint8": 1, "int8": 1}


class EngineInfo(NamedTuple):
    """The result of `Handle.get_engine_info`."""

    engine_id: int
    engine_name: str
    plugin_name: str
    version: str
    type: str


class Handle:
    """A backend's handle.

    Parameters
    ----------
    stream : int, default 0
        Address of the stream to run on; 0 for the handle's own.
    backend : str, optional
        The first that works of ``"miopen"``, ``"cudnn"`` and ``"onednn"``.
    """

    def __init__(self, stream: int = 0, *, backend: str | None = None) -> None:
        stream = _arguments.integer(stream, "stream", 0, 2**64 - 1)
        opened = _open(backend)
        self._handle: pybnorm.Handle | None = opened
        self._closing = weakref.finalize(self, opened.close)  # hipDNN's scripts leave handles behind
        if stream:
            self._handle.set_stream(stream)

    def _there(self) -> pybnorm.Handle:
        if self._handle is None:
            raise _StateError("handle", "destroyed", "a handle that has not been destroyed")
        return self._handle

    def get(self) -> int:
        """The vendor's handle, as an address."""
        return self._there().pointer

    __int__ = __index__ = get

    def set_stream(self, stream: int) -> None:
        """Run on the stream at this address; 0 is the default one."""
        self._there().set_stream(_arguments.integer(stream, "stream", 0, 2**64 - 1))

    def get_stream(self) -> int:
        """The stream's address."""
        return self._there().stream

    def get_engine_info(self, engine_id: int) -> EngineInfo:
        """Describe the engine 0: the backend, and its library's version."""
        _engine(engine_id)
        library = self._there().library
        return EngineInfo(0, library.backend, library.label, ".".join(map(str, library.version)), "vendor library")

    def engine_id_to_name(self, engine_id: int) -> str:
        """The backend, for the engine 0."""
        return self.get_engine_info(engine_id).engine_name

    def get_loaded_engine_plugin_paths(self) -> list[str]:
        """The file of the backend's library."""
        return [self._there().library.path]

    def __repr__(self) -> str:
        handle = self._handle
        return f"<Handle {'destroyed' if handle is None else f'{handle.backend} at {handle.pointer:#x}'}>"


def _open(backend: str | None) -> pybnorm.Handle:
    if backend is not None:
        return pybnorm.Handle(backend)
    failures = []
    for name in _ORDER:
        try:
            return pybnorm.Handle(name)
        except (LibraryError, VendorError) as error:
            failures.append(error)
    raise failures[-1]


create_handle = Handle


def _engine(engine_id: object) -> None:
    _arguments.integer(engine_id, "engine_id", 0, 0, "0: there is one engine")


def engine_id_to_name(engine_id: int) -> str:
    """The name of an engine that every handle has: an empty string, because there is none.

    Parameters
    ----------
    engine_id : int

    Returns
    -------
    str

    See Also
    --------
    Handle.engine_id_to_name
    """
    _arguments.integer(engine_id, "engine_id", -(2**63), 2**63 - 1)
    return ""


def get_loaded_engine_plugin_paths(handle: Handle) -> list[str]:
    """The file of the library of a handle's backend.

    Parameters
    ----------
    handle : Handle

    Returns
    -------
    list of str
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    return handle.get_loaded_engine_plugin_paths()


def get_dtype_size(dtype: Any) -> int:
    """Bytes of an element.

    Parameters
    ----------
    dtype : dtype or str
        Of NumPy: float16, float32, float64, int8, int32 or uint8.

    Returns
    -------
    int
    """
    try:
        name = np.dtype(dtype).name
    except Exception:  # also the object's own
        name = ""
    if name not in _SIZES:
        raise ArgumentError("dtype", dtype, " | ".join(_SIZES))
    return _SIZES[name]


def _handle(handle: object) -> pybnorm.Handle:
    if issubclass(type(handle), Handle):
        return handle._there()  # type: ignore[attr-defined]
    _arguments.instance(handle, pybnorm.Handle, "handle", "a Handle")
    return handle  # type: ignore[return-value]


def destroy_handle(handle: Handle) -> None:
    """Close a handle; it is not to be used any more.

    Parameters
    ----------
    handle : Handle
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    handle._closing()
    handle._handle = None


def set_stream(handle: Handle, stream: int) -> None:
    """Compute on another stream from now on.

    Parameters
    ----------
    handle : Handle
    stream : int
        Its address.
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    handle.set_stream(stream)


def get_stream(handle: Handle) -> int:
    """The stream that a handle computes on.

    Parameters
    ----------
    handle : Handle

    Returns
    -------
    int
        Its address.
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    return handle.get_stream()


class DeviceBuffer:
    """Memory on the device of the backend that `create_handle` takes.

    Parameters
    ----------
    size_bytes : int
        At least 1.
    backend : str, optional
        As in `create_handle`.
    """

    def __init__(self, size_bytes: int, *, backend: str | None = None) -> None:
        nbytes = _arguments.integer(size_bytes, "size_bytes", 1, 2**63 - 1)
        with _open(backend) as handle:
            self._device = devices.device_for(handle.library.device_type, handle.device or 0)
        self._memory = self._device.from_numpy(np.zeros(-(-nbytes // 4), np.float32))
        self._nbytes = nbytes

    def ptr(self) -> int:
        """Give its address."""
        return self._memory.pointer

    def size(self) -> int:
        """Give its size in bytes."""
        return self._nbytes

    def copy_from_host(self, data: bytes) -> None:
        """Fill it.

        Parameters
        ----------
        data : bytes-like
            Of its size.
        """
        try:
            values = np.frombuffer(data, np.uint8)
        except Exception as error:  # also the object's own
            raise ArgumentError("data", f"{type(data).__name__}: {error}", f"{self._nbytes} bytes") from None
        if values.size != self._nbytes:
            raise _StateError("data", f"{values.size} bytes", f"{self._nbytes} bytes")
        self._device.refill(self._memory, values)

    def copy_to_host(self) -> bytes:
        """Copy its bytes, once all work on the device is done, of whichever stream."""
        self._device.synchronize_all()
        return bytes(self._device.to_numpy(self._memory).tobytes()[: self._nbytes])

    def zeros(self) -> None:
        """Fill it with zeros."""
        self.copy_from_host(bytes(self._nbytes))

    def __repr__(self) -> str:
        return f"<DeviceBuffer of {self._nbytes} bytes>"
