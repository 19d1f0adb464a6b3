"""ROCm memory in the array-level calls: pybnorm's own buffers, DLPack's kDLROCM and bare addresses give one result.

Needs libMIOpen, libamdhip64 and a device: a ROCm machine, or ci/miopen-on-cpu.
"""

import ctypes
import os

import numpy as np
import pytest
from c_table import managed_tensor
from on import On

import pybnorm
from pybnorm._arrays import ROCM, as_buffer
from pybnorm.devices import hip


@pytest.fixture
def case(need_device):
    need_device("miopen")
    on = On()
    with on.handle:
        yield on.case()


class Foreign:
    """An array of a framework that speaks only DLPack, on a ROCm device."""

    def __init__(self, buffer, device_id=0):
        self.address, self.shape, self.steps, self.device = (
            buffer.pointer,
            buffer.dims,
            buffer.strides,
            (ROCM, device_id),
        )
        self.dtype, self.asked = (2, 8 * buffer.dtype.itemsize, 1), []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        self.asked.append(stream)
        self.managed = managed_tensor(self)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)


def test_one_runtime_in_the_process(case):
    assert hip.load().found_via == "already in the process"
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert len({line.split()[-1] for line in maps if "libamdhip64" in line}) == 1


def test_arrays_of_another_library(case):
    foreign = {name: Foreign(buffer) for name, buffer in {**case.given, **case.made}.items()}
    seen, x = as_buffer(foreign["x"], "x"), case.given["x"]
    assert (seen.pointer, seen.device_type, seen.dims) == (x.pointer, ROCM, x.dims)
    case.handle.forward_training(**foreign)
    assert foreign["x"].asked[-1] == -1  # nobody synchronises behind the caller's back
    case.judge()


def test_memory_of_another_device_or_of_the_host_is_refused(case):
    x = case.given["x"]
    for bad in (Foreign(x, device_id=7), np.ones(x.dims, np.float32)):
        with pytest.raises(pybnorm.ArgumentError) as info:
            case.handle.forward_training(**{**case.given, **case.made, "x": bad})
        assert info.value.argument == "x"
    case.device.synchronize()
    case.unchanged(case.before)


def test_memory_that_is_not_there(case):
    with pytest.raises(pybnorm.AllocationError, match="hipMalloc: hipErrorOutOfMemory"):
        case.device.empty_bytes(1 << 62)
    assert case.device.empty_bytes(1000).pointer % int(os.environ.get("HIPCPU_ALIGN", "256")) == 0
