"""pybnorm.devices.hip over a double of libamdhip64: its search, its errors, and what it leaves behind."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
from tables import table

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
        kind = ctypes.c_int if isinstance(value, int) else ctypes.c_char * 64
        kind.in_dll(self._library, f"double_{name}").value = value

    def fail(self, function, status):
        self.set("failing", function.encode())
        self.set("status", status)


@pytest.fixture
def double(hip_library, monkeypatch):
    control = Control(hip_library)
    monkeypatch.setattr(hip, "_loaded", None)
    hip.load(hip_library)
    yield control
    gc.collect()
    assert (control.streams, control.blocks, control.events) == (0, 0, 0)
    control.fail("", 0)


def test_the_runtime_is_loaded_once(double, hip_library):
    runtime = hip.load()
    assert runtime is hip.load(hip_library)
    assert (runtime.file, runtime.found_via, runtime.version) == (str(hip_library), "path", (6, 4, 43484))
    assert driver(10) == hip.driver() == "HIP runtime 6.4.43484"


def test_memory_and_streams_go_with_their_objects(double):
    """Memory is freed as a capture allows it: in the relaxed mode (2); the thread's own is back afterwards."""
    assert device_count(10) == 2
    device = device_for(10, 1)
    assert (device.device_id, device.name, double.current) == (1, "double 1", 1)
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
    assert (double.freed_in_mode, double.capture_mode) == (2, 0)


def test_the_name_has_the_architecture_where_the_runtime_says_it(double):
    """Without the flags that an architecture may be built with; HIP 5 does not say it."""
    names = []
    for word, wave in ((b"gfx1151", 32), (b"gfx90a:sramecc+:xnack-", 64), (b"", 32)):
        double.set("architecture", word)
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


def test_time_is_that_of_the_events_and_leaves_none(double):
    device = device_for(10)
    calls = []
    assert device.time(lambda: calls.append(1), repeats=3, calls=5, warmup=2) == pytest.approx([0.0003] * 3, rel=1e-6)
    assert len(calls) == 17
    with pytest.raises(ZeroDivisionError):
        device.time(lambda: 1 / 0)
    assert double.events == 0


def test_all_streams_are_waited_for(double):
    before = double.waits
    device_for(10).synchronize_all()
    assert double.waits == before + 1


@table(
    ("function", "call"),
    [
        ("hipMemcpyAsync", lambda device: device.from_numpy(np.ones(3))),
        ("hipDeviceSynchronize", lambda device: device.synchronize_all()),
        *(
            (function, lambda device: device.time(lambda: None))
            for function in ("hipEventCreate", "hipEventRecord", "hipStreamSynchronize", "hipEventElapsedTime")
        ),
    ],
)
def test_what_fails_leaves_nothing_behind(double, function, call):
    double.fail(function, 719)
    with pytest.raises(errors.ExecutionError, match=function):
        call(device_for(10))
    gc.collect()
    assert (double.events, double.blocks) == (0, 0)


@table(
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
    error = info.value
    assert type(error) is kind
    assert (error.function, error.status, error.version) == ("hipMalloc", status, (6, 4, 43484))
    assert (error.library, error.backend) == (str(hip_library), "hip")
    assert str(error).startswith("hip hipMalloc: ")
    assert error.status_name == {2: "hipErrorOutOfMemory", 998: ""}.get(status, "hipErrorOfTheDouble")
    assert bool(error.text) == (status != 998)


@table("function", ["hipGetDeviceCount", "hipSetDevice", "hipDeviceGetName", "hipStreamCreateWithFlags"])
def test_no_device(double, function):
    double.fail(function, 100)
    with pytest.raises(errors.NotInitializedError, match=function):
        device_for(10)


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


@table("name", ["libamdhip64.so.7", "libamdhip64.so.10", "libamdhip64.so"])
def test_a_copy_in_the_process_goes_first(child, doubles, name):
    here, other = doubles.plain(name, SOURCE), doubles.plain("libamdhip64.so.6", SOURCE)
    answer = child(
        """
        import ctypes
        from pybnorm.devices import hip
        os.environ["LD_LIBRARY_PATH"] = values["folder"]
        held = ctypes.CDLL(values["first"])
        runtime = hip.load()
        report([runtime.found_via, runtime.file])
        """,
        folder=other.parent,
        first=here,
    )
    found = str(here) if name.endswith(".10") else name  # what no name is known of is opened by its path
    assert answer == ["already in the process", found]
