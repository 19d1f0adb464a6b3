"""Memory, streams and timing: the CPU for real, CUDA and ROCm over a stand-in each and over the real ones."""

import ctypes
import os
import sys
import time
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from tables import table

from pybnorm._arrays import Buffer, as_buffer, as_memory
from pybnorm.devices import device_count, device_for, driver, hip
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, LibraryNotFoundError


def stand_in(event_option):
    """The part of cuda.core that is used, with host memory as the device's; ``event_option`` differs by version."""
    log = []

    class Memory:
        def __init__(self, address, size, keep=None):
            self.handle, self.size, self.keep = address, size, keep

        @staticmethod
        def from_handle(ptr, size):
            return Memory(ptr, size)

        def copy_from(self, src, *, stream):
            assert self.size == src.size
            log.append(("copy", self.size, stream))
            # Asynchronous: nothing is there before the stream is waited for.
            stream.pending.append(lambda: ctypes.memmove(self.handle, src.handle, self.size))

    class Event:
        def __init__(self, options):
            self.options, self.at = options, 0.0

        def __sub__(self, other):
            assert self.at
            assert other.at
            return (self.at - other.at) * 1e3

    class Stream:
        handle = 0xABC0

        def __init__(self):
            self.pending = []

        def sync(self):
            log.append("sync")
            while self.pending:
                self.pending.pop(0)()

        def record(self, event):
            self.pending.append(lambda: setattr(event, "at", time.perf_counter()))

    class Device:
        def __init__(self, device_id):
            self.device_id, self.name = device_id, "stand-in"

        def set_current(self):
            log.append(("current", self.device_id))

        def create_stream(self):
            return Stream()

        def create_event(self, options):
            return Event(options)

        def allocate(self, size, *, stream):
            assert size > 0
            memory = (ctypes.c_uint8 * (size + 8))()
            ctypes.memset(memory, 0xEE, size + 8)
            return Memory((ctypes.addressof(memory) + 7) // 8 * 8, size, memory)

    def event_options(**fields):
        if set(fields) != {event_option}:
            raise TypeError(f"unexpected {set(fields)}")
        return fields

    module = ModuleType("cuda.core")
    module.__dict__.update(Device=Device, Buffer=Memory, EventOptions=event_options, log=log)
    return module


@pytest.fixture
def posing(monkeypatch):
    """Has a stand-in pose for cuda.core, and functions for those of cuda.bindings.driver."""

    def pose(**functions):
        core, driver = stand_in("timing_enabled"), ModuleType("cuda.bindings.driver")
        vars(driver).update(functions)
        for name, module in (("cuda", ModuleType("cuda")), ("cuda.core", core), ("cuda.bindings.driver", driver)):
            monkeypatch.setitem(sys.modules, name, module)
        return core

    return pose


@pytest.fixture(params=["cpu", "cuda stand-in", "cuda", "hip stand-in", "hip"])
def device(request, monkeypatch):
    kind, _, double = request.param.partition(" ")
    if kind == "cpu":
        return device_for(1)
    if not double:
        request.getfixturevalue("need_device")({"cuda": "cudnn", "hip": "miopen"}[kind])
    if kind == "hip":
        monkeypatch.setattr(hip, "_loaded", None)
        if double:
            hip.load(request.getfixturevalue("hip_library"))
        return device_for(10)
    if double:
        request.getfixturevalue("posing")()
    return device_for(2)


DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
VIEWS = {
    "packed": lambda x: x,
    "channels last": lambda x: x.transpose(0, 3, 1, 2),
    "gaps": lambda x: x[:, 1::2, ::3],
    "backwards": lambda x: x[::-1, :, ::-2],
    "broadcast": lambda x: np.broadcast_to(x[:1], (4, *x.shape[1:])),
    "one element": lambda x: x[1:2, 2:3, 3:4, 4:5],
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[1, 2, 3, 4],
}


@table("view", VIEWS)
@table("dtype", DTYPES)
def test_there_and_back(device, dtype, view):
    base = np.random.default_rng(1).standard_normal((2, 3, 4, 5)).astype(dtype)
    x = np.asarray(VIEWS[view](base))
    buffer = device.from_numpy(x)
    assert as_buffer(buffer, "x") is buffer
    described = as_buffer(x, "x")
    assert (buffer.dims, buffer.strides, buffer.dtype) == (described.dims, described.strides, described.dtype)
    assert (buffer.device_type, buffer.device_id, buffer.writable) == (device.device_type, 0, True)
    assert buffer.pointer != described.pointer
    back = device.to_numpy(buffer)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    if x.size:
        assert back.strides == x.strides
    assert back.tobytes() == x.tobytes()
    assert not np.shares_memory(back, x)


def test_gaps_are_copied_both_ways_and_bits_are_bfloat16(device):
    base = np.arange(24, dtype=np.float32)
    x = base.reshape(4, 6)[1:3, 1::2]  # elements 7, 9, 11, 13, 15, 17
    back = device.to_numpy(device.from_numpy(x))
    lowest = back.__array_interface__["data"][0]
    assert np.frombuffer(ctypes.string_at(lowest, 11 * 4), np.float32).tolist() == list(range(7, 18))
    bits = np.array([[0x3F80, 0x4000, 0x4040]], np.uint16)[:, ::2]
    buffer = device.from_numpy(bits, DataType.BFLOAT16)
    assert (buffer.dtype, buffer.dims, buffer.strides) == (DataType.BFLOAT16, (1, 2), (3, 2))
    back = device.to_numpy(buffer)
    assert (back.tolist(), back.dtype) == ([[0x3F80, 0x4040]], np.uint16)


def test_what_the_caller_writes_later_is_not_seen(device):
    x = np.zeros(4, np.float32)
    buffer = device.from_numpy(x)
    x[:] = 1
    for _ in range(2):
        seen = device.to_numpy(buffer)
        assert seen.tolist() == [0, 0, 0, 0]
        seen[:] = 2


def test_arguments_are_checked(device):
    for array, dtype, told in (
        (np.zeros(3, np.float32), DataType.FLOAT64, "dtype float32, allowed: float64, as dtype says"),
        (np.zeros(3, np.uint16), None, "an array of dtype uint16"),
        (np.zeros(3, np.float16), DataType.BFLOAT16, "dtype float16, allowed: bfloat16 or uint16 bits"),
        ([1.0], None, r"\[1.0\]"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"array: got {told}"):
            device.from_numpy(array, dtype)
    with pytest.raises(ArgumentTypeError, match=r"buffer: got"):
        device.to_numpy(Buffer(64, (1,), (1,), DataType.FLOAT32, 1, 0, True, None))


@table("nbytes", [0, 1, 1000])
def test_workspace(device, nbytes):
    memory = device.empty_bytes(nbytes)
    assert as_memory(memory, "workspace") is memory
    assert memory[1:-1] == (nbytes, device.device_type, 0, True)
    if nbytes and device.name != "stand-in":
        assert memory.pointer % 64 == 0


def test_time_name_and_stream(device):
    calls = []
    seconds = device.time(lambda: calls.append(time.perf_counter()), repeats=3, calls=4, warmup=2)
    assert len(calls) == 2 + 3 * 4
    assert len(seconds) == 3
    assert all(0 <= s < 1 for s in seconds)
    device.synchronize()
    assert isinstance(device.name, str)
    assert device.name
    assert (device.stream == 0) == (device.device_type == 1)


def test_devices_are_counted_as_the_process_sees_them(posing):
    assert device_count(1) == 1
    for answer, count in (((0, 4), 4), ((100, 7), 0)):  # CUDA_ERROR_NO_DEVICE
        posing(cuInit=lambda flags: (0,), cuDeviceGetCount=lambda answer=answer: answer)
        assert device_count(2) == count
    with pytest.raises(ArgumentError, match="1 \\(CPU\\), 2 \\(CUDA\\) or 10"):
        device_count(3)


def test_cuda_core_before_it_left_experimental(monkeypatch):
    core = stand_in("enable_timing")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", ModuleType("cuda.core"))
    monkeypatch.setitem(sys.modules, "cuda.core.experimental", core)
    device = device_for(2, 3)
    assert device.device_id == 3
    assert core.log == [("current", 3)]
    assert len(device.time(lambda: None, repeats=2)) == 2  # its events had another spelling of their option


def test_devices_that_there_are_not(monkeypatch):
    with pytest.raises(ArgumentError, match=r"device_type: got 7, allowed: 1 \(CPU\), 2 \(CUDA\) or 10 \(ROCm\)"):
        device_for(7)
    for device_id in (-1, True, "0"):
        with pytest.raises(ArgumentError, match=r"device_id: got"):
            device_for(1, device_id)
    with pytest.raises(ArgumentError, match=r"there is one CPU"):
        device_for(1, 1)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(LibraryNotFoundError, match=r"cuda-core and cuda-bindings") as info:
        device_for(2)
    assert info.value.backend == "cuda"
    with pytest.raises(LibraryNotFoundError, match=r"cuda-core and cuda-bindings"):
        driver(2)
    with pytest.raises(ArgumentError, match="device_type: got 7"):
        driver(7)


def test_the_driver_says_its_version(posing):
    assert driver(1) == ""
    for answer, said in (((0, 12080), "CUDA driver 12.8"), ((0, 13010), "CUDA driver 13.1"), ((3, 0), "")):
        posing(cuDriverGetVersion=lambda answer=answer: answer)  # 3: not initialized
        assert driver(2) == said


def test_copies_wait_for_the_stream(posing):
    core = posing()
    device = device_for(2)
    core.log.clear()
    device.to_numpy(device.from_numpy(np.ones(4, np.float32)))
    assert [entry if entry == "sync" else entry[0] for entry in core.log] == ["copy", "sync"] * 2
    assert device.stream == 0xABC0


def test_the_real_bindings_without_a_driver(child):
    """They raise exceptions of their own; ours names the driver. ci/cpu.sh installs both packages."""
    answers = child(
        """
        from pybnorm import devices
        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as error:
            answers = str(error)
        else:
            try:
                found = [int(value) for value in (driver.cuInit(0)[0], driver.cuDeviceGetCount()[1])]
            except Exception as error:
                found = [type(error).__name__, type(error).__module__.partition(".")[0]]
            answers = [found, *map(attempt, (
                lambda: devices.device_for(2), lambda: devices.device_count(2), lambda: devices.driver(2),
                lambda: devices.device_for(2, 1000)))]
        report(answers)
        """
    )
    if isinstance(answers, str):
        required = "cuda-core" in os.environ.get("PYBNORM_REQUIRE_PACKAGES", "").replace(" ", "").split(",")
        (pytest.fail if required else pytest.skip)(f"cuda-core and cuda-bindings: {answers}")
    found, device, count, driver, beyond = answers
    if found[0] == 0 and found[1] > 0:  # there is a device
        assert count["value"] == found[1]
        assert driver["value"].startswith("CUDA driver ")
        assert beyond["error"] == "ArgumentError"
        return
    for result in (device, beyond) if found[0] == 0 else (device, count, driver, beyond):
        assert result.get("error") == "NotInitializedError", result
        assert result["text"].startswith("cuda ")
        assert "the CUDA driver or its device cannot be used" in result["text"]
