"""Memory, streams and timing of devices, for checks, benchmarks, layers and tests."""

from __future__ import annotations

from typing import Any

from pybnorm import _arguments
from pybnorm._arrays import CPU, CUDA, ROCM
from pybnorm.devices import cpu, cuda, hip
from pybnorm.devices._copying import Device
from pybnorm.errors import ArgumentError

__all__ = ["Device", "device_count", "device_for", "driver"]

_MODULES: dict[int, Any] = {CPU: cpu, CUDA: cuda, ROCM: hip}


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
    """The module of a kind of device."""
    allowed = f"{CPU} (CPU), {CUDA} (CUDA) or {ROCM} (ROCm)"
    number = _arguments.integer(device_type, "device_type", CPU, ROCM, allowed)
    if number not in _MODULES:
        raise ArgumentError("device_type", device_type, allowed)
    return _MODULES[number]
