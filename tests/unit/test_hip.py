"""pybnorm.devices.hip over a double of libamdhip64: its search, its errors, and what it leaves behind."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

from pybnorm import errors
from pybnorm.devices import device_count, device_for, driver, hip

SOURCE = (Path(__file__).parents[1] / "doubles" / "hip.c").read_text()


class Control:
    """The double's variables."""

    def __init__(self, file):
        self._library = ctypes.CDLL(str(file))

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self._library, f"double_{name}").value

    def set(self, name, value):
        ctypes.c_int.in_dll(self._library, f"double_{name}").value = value

    def fail(self, function, status):
        (ctypes.c_char * 64).in_dll(self._library, "double_failing").value = function.encode()
        self.set("status", status)


@pytest.fixture
def double(hip_library, monkeypatch):
    control = Control(hip_library)
    monkeypatch.setattr(hip, "_loaded", None)
    hip.load(hip_library)
    yield control
    control.fail("", 0)
    control.set("devices", 2)


def test_the_runtime_is_loaded_once(double, hip_library):
    runtime = hip.load()
    assert runtime is hip.load(hip_library)
    assert (runtime.file, runtime.found_via, runtime.version) == (str(hip_library), "path", (6, 4, 43484))
    assert driver(10) == hip.driver() == "HIP runtime 6.4.43484"


def test_memory_and_streams_go_with_their_objects(double):
    assert device_count(10) == 2
    device = device_for(10, 1)
    assert double.current == 1
    assert (device.device_id, device.name) == (1, "double 1")
    buffer = device.from_numpy(np.arange(6.0).reshape(2, 3))
    memory = device.empty_bytes(0)
    assert (double.streams, double.blocks) == (1, 2)
    assert (buffer.device_type, buffer.device_id, buffer.writable) == (10, 1, True)
    view = buffer._replace(dims=(3,))
    del buffer, device
    gc.collect()
    assert (double.streams, double.blocks) == (1, 2)  # the view's work may be in the stream
    del memory
    gc.collect()
    assert (double.streams, double.blocks) == (1, 1)
    del view
    gc.collect()
    assert (double.streams, double.blocks) == (0, 0)


def test_memory_is_freed_as_a_capture_allows_it(double):
    """In the relaxed mode (2); the thread's own is back afterwards."""
    buffer = device_for(10).from_numpy(np.ones(3))
    assert buffer is not None
    del buffer
    gc.collect()
    assert (double.blocks, double.freed_in_mode, double.capture_mode) == (0, 2, 0)


def test_the_name_has_the_architecture_where_the_runtime_says_it(double, hip_library):
    """Without the flags that an architecture may be built with; HIP 5 does not say it."""
    architecture = (ctypes.c_char * 64).in_dll(ctypes.CDLL(str(hip_library)), "double_architecture")
    names = []
    for word, wave in ((b"gfx1151", 32), (b"gfx90a:sramecc+:xnack-", 64), (b"", 32)):
        architecture.value = word
        double.set("wave", wave)
        names.append(device_for(10).name)
    assert names == ["double 0 (gfx1151, wave size 32)", "double 0 (gfx90a, wave size 64)", "double 0"]


def test_memory_and_events_are_of_the_device_that_makes_them(double):
    device, other = device_for(10, 0), device_for(10, 1)
    asked = [lambda: device.empty_bytes(4), lambda: device.from_numpy(np.ones(3)), device.synchronize_all]
    for ask in (*asked, lambda: device.time(lambda: None)):
        other.synchronize_all()
        assert double.current == 1
        ask()
        assert double.current == 0


def test_a_failed_upload_leaves_no_memory(double):
    device = device_for(10)
    double.fail("hipMemcpyAsync", 719)
    with pytest.raises(errors.ExecutionError, match="hipMemcpyAsync"):
        device.from_numpy(np.ones(3))
    gc.collect()
    assert double.blocks == 0


def test_time_is_that_of_the_events_and_leaves_none(double):
    device = device_for(10)
    calls = []
    assert device.time(lambda: calls.append(1), repeats=3, calls=5, warmup=2) == pytest.approx([0.0003] * 3, rel=1e-6)
    assert len(calls) == 17
    assert double.events == 0
    with pytest.raises(ZeroDivisionError):
        device.time(lambda: 1 / 0)
    assert double.events == 0
    for function in ("hipEventCreate", "hipEventRecord", "hipStreamSynchronize", "hipEventElapsedTime"):
        double.fail(function, 719)
        with pytest.raises(errors.ExecutionError, match=function):
            device.time(lambda: None)
        assert double.events == 0


def test_all_streams_are_waited_for(double):
    device = device_for(10)
    before = double.waits
    device.synchronize_all()
    assert double.waits == before + 1
    double.fail("hipDeviceSynchronize", 719)
    with pytest.raises(errors.ExecutionError, match="hipDeviceSynchronize"):
        device.synchronize_all()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (1, errors.BadParameterError),
        (2, errors.AllocationError),
        (100, errors.NotInitializedError),
        (700, errors.ExecutionError),
        (801, errors.NotSupportedError),
        (998, errors.VendorError),  # without a text
        (999, errors.VendorError),
    ],
)
def test_statuses_become_exceptions(double, hip_library, status, kind):
    device = device_for(10)
    double.fail("hipMalloc", status)
    with pytest.raises(errors.VendorError) as info:
        device.empty_bytes(16)
    assert type(info.value) is kind
    assert (info.value.function, info.value.status, info.value.version) == ("hipMalloc", status, (6, 4, 43484))
    assert info.value.library == str(hip_library)
    assert info.value.backend == "hip"
    assert str(info.value).startswith("hip hipMalloc: ")
    names = {2: "hipErrorOutOfMemory", 998: ""}
    assert info.value.status_name == names.get(status, "hipErrorOfTheDouble")
    assert bool(info.value.text) == (status != 998)
    if status == 2:
        assert isinstance(info.value, MemoryError)


@pytest.mark.parametrize(
    "function", ["hipGetDeviceCount", "hipSetDevice", "hipDeviceGetName", "hipStreamCreateWithFlags"]
)
def test_no_device(double, function):
    double.fail(function, 100)
    with pytest.raises(errors.NotInitializedError, match=function):
        device_for(10)
    gc.collect()
    assert double.streams == 0


def test_an_ordinal_that_there_is_not(double):
    with pytest.raises(errors.ArgumentError, match=r"device_id: got 2, allowed: 0 to 1"):
        device_for(10, 2)


# ---- the search


def test_a_file_that_is_named_and_does_not_serve(doubles, monkeypatch, tmp_path):
    monkeypatch.setattr(hip, "_loaded", None)
    with pytest.raises(errors.LibraryLoadError, match="named by path"):
        hip.load(tmp_path / "absent.so")
    less = doubles.plain("libpybnorm-less-hip.so", SOURCE.replace("hipEventRecord", "renamed"))
    monkeypatch.setenv("PYBNORM_LIB_AMDHIP64", str(less))
    with pytest.raises(errors.SymbolNotFoundError, match="hipEventRecord"):
        device_for(10)
    assert hip._loaded is None


SEARCH = """
import ctypes
from pybnorm.devices import hip
held = [ctypes.CDLL(file) for file in values["first"]]
def search():
    runtime = hip.load()
    return [runtime.found_via, runtime.file]
report(attempt(search))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["libamdhip64.so.7", "libamdhip64.so.10", "libamdhip64.so"])
def test_a_copy_in_the_process_goes_first(child, doubles, name):
    here = doubles.plain(name, SOURCE)
    other = doubles.plain("libamdhip64.so.6", SOURCE)
    answer = child(SEARCH, {"LD_LIBRARY_PATH": other.parent}, first=[here])
    found = str(here) if name.endswith(".10") else name  # what no name is known of is opened by its path
    assert answer["value"] == ["already in the process", found]
