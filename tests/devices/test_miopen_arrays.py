"""ROCm memory in the array-level calls: pybnorm's own buffers, DLPack's kDLROCM and bare addresses give one result.

Needs libMIOpen, libamdhip64 and a device: a ROCm machine, or ci/miopen-on-cpu.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn

import numpy as np
import pytest
from c_table import Managed

import pybnorm
from pybnorm import devices
from pybnorm._arrays import ROCM, Buffer, as_buffer
from pybnorm.devices import hip

DIMS = (4, 3, 5, 6)


def absent(reason: str) -> NoReturn:
    if "miopen" in os.environ.get("PYBNORM_REQUIRE_DEVICE", "").replace(" ", "").split(","):
        pytest.fail(f"miopen is listed in PYBNORM_REQUIRE_DEVICE but: {reason}")
    pytest.skip(f"miopen: {reason}")


@pytest.fixture(scope="module")
def device() -> Any:
    try:
        pybnorm.load("miopen")  # first: the HIP runtime that it links to is then the one in the process
        return devices.device_for(ROCM)
    except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:
        absent(str(error).splitlines()[0])


@pytest.fixture(scope="module")
def handle(device: Any) -> Any:
    with pybnorm.Handle("miopen", stream=device.stream) as opened:
        yield opened


class Foreign:
    """An array of a framework that speaks only DLPack, on a ROCm device."""

    def __init__(self, buffer: Buffer, device_id: int = 0) -> None:
        self.buffer, self.device_id = buffer, device_id
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return (ROCM, self.device_id)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        b = self.buffer
        rank = len(b.dims)
        self.shape = (ctypes.c_int64 * rank)(*b.dims)
        self.strides = (ctypes.c_int64 * rank)(*b.strides)
        managed = self.managed = Managed()
        tensor = managed.tensor
        tensor.data, tensor.device[:], tensor.ndim = b.pointer, (ROCM, self.device_id), rank
        tensor.code, tensor.bits, tensor.lanes = 2, 8 * b.dtype.itemsize, 1
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(managed), b"dltensor", None)


def inputs(device: Any) -> dict[str, Buffer]:
    rng = np.random.default_rng(5)
    x = rng.standard_normal(DIMS).astype(np.float32)
    named = {"x": x, "scale": x[0, :, 0, 0], "bias": x[1, :, 0, 0], "y": np.full_like(x, np.nan)}
    return {name: device.from_numpy(np.ascontiguousarray(value)) for name, value in named.items()}


def expected() -> Any:
    x = np.random.default_rng(5).standard_normal(DIMS).astype(np.float32).astype(np.float64)
    scale, bias = x[0, :, 0, 0].reshape(1, 3, 1, 1), x[1, :, 0, 0].reshape(1, 3, 1, 1)
    centred = x - x.mean((0, 2, 3), keepdims=True)
    return scale * centred / np.sqrt((centred**2).mean((0, 2, 3), keepdims=True) + 1e-5) + bias


def test_one_runtime_in_the_process(device: Any) -> None:
    assert hip.load().found_via == "already in the process"
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert len({line.split()[-1] for line in maps if "libamdhip64" in line}) == 1


@pytest.mark.parametrize("kind", ["buffer", "dlpack", "address"])
def test_arrays_of_every_kind(device: Any, handle: Any, kind: str) -> None:
    own = inputs(device)
    if kind == "buffer":
        handle.forward_training(**own)
    elif kind == "dlpack":
        foreign = {name: Foreign(buffer) for name, buffer in own.items()}
        seen = as_buffer(foreign["x"], "x")
        assert (seen.pointer, seen.device_type, seen.dims) == (own["x"].pointer, ROCM, DIMS)
        handle.forward_training(**foreign)
        assert foreign["x"].asked[-1] == -1  # nobody synchronises behind the caller's back
    else:
        x = pybnorm.TensorDescriptor("miopen", "f32", DIMS)
        p = pybnorm.derive_bn_tensor_descriptor(x, "spatial")
        at = {name: buffer.pointer for name, buffer in own.items()}
        pybnorm.batch_normalization_forward_training(
            handle, "spatial", 1.0, 0.0, x, at["x"], x, at["y"], p, at["scale"], at["bias"], 0.1, None, None, 1e-5,
            None, None,
        )  # fmt: skip
    got = device.to_numpy(own["y"])
    assert np.abs(got - expected()).max() < 4e-6


def test_dlpack_of_another_device_is_refused(device: Any, handle: Any) -> None:
    own = inputs(device)
    with pytest.raises(pybnorm.ArgumentError) as info:
        handle.forward_training(**(own | {"x": Foreign(own["x"], device_id=7)}))
    assert info.value.argument == "x"
    assert np.isnan(device.to_numpy(own["y"])).all()


def test_host_memory_is_refused(device: Any, handle: Any) -> None:
    own = inputs(device)
    with pytest.raises(pybnorm.ArgumentError) as info:
        handle.forward_training(**(own | {"x": np.ones(DIMS, np.float32)}))
    assert info.value.argument == "x"


def test_memory_that_is_not_there(device: Any) -> None:
    with pytest.raises(pybnorm.AllocationError, match="hipMalloc: hipErrorOutOfMemory"):
        device.empty_bytes(1 << 62)
    assert device.empty_bytes(1000).pointer % int(os.environ.get("HIPCPU_ALIGN", "256")) == 0
