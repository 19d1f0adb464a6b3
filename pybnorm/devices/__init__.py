"""Memory, streams and timing of devices, for checks, benchmarks, layers and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pybnorm import _arguments
from pybnorm._arrays import CPU, CUDA, ROCM, Buffer, Memory
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError

__all__ = ["Device", "device_count", "device_for", "driver"]


class Device(Protocol):
    """Interface of `pybnorm.devices.cpu.Device`, `pybnorm.devices.cuda.Device` and `pybnorm.devices.hip.Device`.

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

    @property
    def stream(self) -> int:
        """Address of the stream of the device's copies and events, for `Handle.set_stream`. 0 on the CPU."""
        ...

    def from_numpy(self, array: Any, dtype: DataType | None = None) -> Buffer:
        """Copy an array of any strides: the result has the same strides, and the bytes in its gaps are copied too."""
        ...

    def refill(self, buffer: Buffer, data: Any) -> None:
        """Copy bytes, a NumPy array of uint8, over those of what `from_numpy` made; waits for the stream."""
        ...

    def to_numpy(self, buffer: Buffer) -> Any:
        """Copy back what `from_numpy` made; waits for the stream."""
        ...

    def empty_bytes(self, nbytes: int) -> Memory:
        """Uninitialised memory for a workspace, aligned to at least 64 bytes."""
        ...

    def synchronize(self) -> None:
        """Wait for the stream."""
        ...

    def synchronize_all(self) -> None:
        """Wait for every stream of the device, as work on a stream that is not known needs it."""
        ...

    def time(
        self, call: Callable[[], object], *, repeats: int = 1, calls: int = 1, warmup: int = 0
    ) -> tuple[float, ...]:
        """Seconds per call, one number per repeat of `calls` calls, after `warmup` calls that are not timed."""
        ...


def device_for(device_type: int, device_id: int = 0) -> Device:
    """The device of a DLPack device type, such as a `Library`'s.

    Parameters
    ----------
    device_type : int
        1 (CPU), 2 (CUDA) or 10 (ROCm).
    device_id : int, default 0
        Ordinal.

    Returns
    -------
    Device

    Raises
    ------
    ArgumentError
        Another device type, or an ordinal that is not a non-negative integer or that no device has.
    LibraryNotFoundError
        CUDA without the packages ``cuda-core`` and ``cuda-bindings``, ROCm without libamdhip64.
    NotInitializedError
        CUDA without a driver or without a device; ROCm without a device that the HIP runtime finds.

    Examples
    --------
    >>> device = pybnorm.devices.device_for(1)  # DLPack's number of the CPU
    >>> device.to_numpy(device.from_numpy(np.float32([1, 2])))
    array([1., 2.], dtype=float32)
    """
    device_id = _arguments.integer(device_id, "device_id")
    device: Device = _module(device_type).Device(device_id)
    return device


def device_count(device_type: int) -> int:
    """Count the devices of a DLPack device type that this process sees; 1 for the CPU.

    Parameters
    ----------
    device_type : int

    Returns
    -------
    int

    Raises
    ------
    ArgumentError, LibraryNotFoundError, NotInitializedError
        As `device_for`.

    Examples
    --------
    >>> pybnorm.devices.device_count(1)  # CPUs count as one device
    1
    """
    return int(_module(device_type).device_count())


def driver(device_type: int) -> str:
    """The driver or runtime of a DLPack device type and its version; empty for the CPU.

    Parameters
    ----------
    device_type : int

    Returns
    -------
    str

    Raises
    ------
    ArgumentError, LibraryNotFoundError, NotInitializedError
        As `device_for`.

    Examples
    --------
    >>> pybnorm.devices.driver(1)
    ''
    """
    return str(_module(device_type).driver())


def _module(device_type: object) -> Any:
    """The module of a kind of device, imported when one is asked for."""
    allowed = f"{CPU} (CPU), {CUDA} (CUDA) or {ROCM} (ROCm)"
    number = _arguments.integer(device_type, "device_type", CPU, ROCM, allowed)
    if number == CPU:
        from pybnorm.devices import cpu

        return cpu
    if number == CUDA:
        from pybnorm.devices import cuda

        return cuda
    if number == ROCM:
        from pybnorm.devices import hip

        return hip
    raise ArgumentError("device_type", device_type, allowed)
