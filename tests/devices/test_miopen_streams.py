"""MIOpen's calls on what PyTorch and others give them: graphs, several streams, a stream's own memory, tensors.

Needs libMIOpen, libamdhip64 and a device: a ROCm machine, or ci/miopen-on-cpu, whose runtime has no graphs; what a
runtime lacks is a skip that names it, and the run lists those.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from test_miopen_two_devices import CHANNELS, SHAPE, On

import pybnorm
from pybnorm._arrays import ROCM, Buffer
from pybnorm.devices import hip
from pybnorm.enums import DataType

POINTER = ctypes.c_void_p
GLOBAL = 0  # hipStreamCaptureModeGlobal, the strictest


def absent(reason: str) -> NoReturn:
    if "miopen" in os.environ.get("PYBNORM_REQUIRE_DEVICE", "").replace(" ", "").split(","):
        pytest.fail(f"miopen is listed in PYBNORM_REQUIRE_DEVICE but: {reason}")
    pytest.skip(f"miopen: {reason}")


@pytest.fixture
def on() -> Any:
    try:
        pybnorm.load("miopen")  # first: the HIP runtime that it links to is then the one in the process
        found = On(0)
    except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:
        absent(str(error).splitlines()[0])
    with found.handle:
        yield found


class Hip:
    """Functions of the loaded runtime; the ones that it lacks make the test a skip."""

    def __init__(self, *names: str) -> None:
        library = ctypes.CDLL(hip.load().file)
        lacking = [name for name in names if not hasattr(library, name)]
        if lacking:
            pytest.skip(f"miopen: this HIP runtime has no {', '.join(lacking)}")
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = self._library[name]

        def call(*arguments: Any) -> None:
            status = function(*[POINTER(a) if type(a) is int and a > 2**31 else a for a in arguments])
            assert status == 0, f"{name} returned {status}"

        return call


GRAPHS = (
    *("hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphInstantiate", "hipGraphLaunch"),
    *("hipGraphExecDestroy", "hipGraphDestroy"),
)


def captured(on: On, work: Callable[[], None]) -> Callable[[], None]:
    """What launches `work` again, and waits for it."""
    runtime, graph, launch = Hip(*GRAPHS), POINTER(), POINTER()
    runtime.hipStreamBeginCapture(on.device.stream, GLOBAL)
    try:
        work()
    finally:
        runtime.hipStreamEndCapture(on.device.stream, ctypes.byref(graph))
    runtime.hipGraphInstantiate(ctypes.byref(launch), graph, None, None, ctypes.c_size_t(0))

    def again() -> None:
        runtime.hipGraphLaunch(launch, POINTER(on.device.stream))
        on.device.synchronize()

    return again


def calls(on: On, algorithm: str | None) -> dict[str, tuple[Callable[[], None], Any, Any]]:
    """What makes a planned call, the array that it writes, and what that has to be."""
    mean, inverse = on.empty((CHANNELS,)), on.empty((CHANNELS,))
    outputs = {"forward_training": on.y, "forward_inference": on.inferred, "backward": on.dx}
    made = {}
    for name, want in outputs.items():
        given = {"running": False} if name == "forward_training" else {}
        plan = getattr(on.handle, f"plan_{name}")(on.arrays["x"], **given, algorithm=algorithm)
        space, out = on.device.empty_bytes(max(plan.workspace_size, 1)), on.empty()
        arrays = {n: on.arrays[n] for n in ("x", "scale")}
        if name == "backward":
            sums = {n: on.empty((CHANNELS,)) for n in ("dscale", "dbias")}
            arrays |= {"dy": on.arrays["dy"], "saved_mean": mean, "saved_inv_variance": inverse, "dx": out, **sums}
        elif name == "forward_training":
            arrays |= {"bias": on.arrays["bias"], "saved_mean": mean, "saved_inv_variance": inverse, "y": out}
        else:
            estimates = {f"running_{n}": on.arrays[n] for n in ("mean", "variance")}
            arrays |= {"bias": on.arrays["bias"], "y": out, **estimates}
        made[name] = functools.partial(plan, **arrays, workspace=space), out, want
    return made


def refill(on: On, out: Any) -> None:
    on.device.refill(out, np.full(on.device.to_numpy(out).nbytes, 0xFF, np.uint8))


@pytest.mark.parametrize("algorithm", [None, "auto"])
def test_every_plan_is_captured_and_launched_again(on: On, algorithm: str | None) -> None:
    """After one call that compiles, as the plans' documentation asks."""
    for name, (make, out, want) in calls(on, algorithm).items():
        make()
        again = captured(on, make)
        for _ in range(2):
            refill(on, out)
            again()
            assert on.far(out, want) < 1e-4, name


def test_an_array_that_is_dropped_during_a_capture_does_not_end_it(on: On) -> None:
    make, out, want = calls(on, None)["forward_inference"]
    make()
    dropped = [on.empty()]

    def work() -> None:
        dropped.clear()  # its finalizer is hipFree
        make()

    again = captured(on, work)
    refill(on, out)
    again()
    assert on.far(out, want) < 1e-4


def test_calls_on_several_streams_are_each_right(on: On) -> None:
    """None is waited for before all are enqueued; each stream's calls go one after another."""
    others = [on, On(0), On(0)]
    assert len({other.device.stream for other in others}) == 3
    made = [calls(other, "auto") for other in others]
    for _ in range(4):
        for name in ("forward_training", "forward_inference", "backward"):
            for each in made:
                each[name][0]()
    for other, each in zip(others, made, strict=True):
        for name, (_, out, want) in each.items():
            assert other.far(out, want) < 1e-4, name
        if other is not on:
            other.handle.close()


def test_a_handle_goes_from_stream_to_stream(on: On) -> None:
    """A call waits for nothing but its own stream: the first one is waited for before the second is used."""
    make, out, want = calls(on, None)["forward_training"]
    other = On(0)
    for stream in (other.device, on.device, other.device):
        on.handle.set_stream(stream.stream)
        refill(on, out)
        make()
        stream.synchronize()
        assert on.far(out, want) < 1e-4
    other.handle.close()


def test_memory_of_a_stream_s_own_pool(on: On) -> None:
    """What hipMallocAsync gives, as PyTorch's and RMM's allocators may; freed on the stream behind the call."""
    runtime, address = Hip("hipMallocAsync", "hipFreeAsync"), POINTER()
    nbytes = int(np.prod(SHAPE)) * 4
    runtime.hipMallocAsync(ctypes.byref(address), ctypes.c_size_t(nbytes), POINTER(on.device.stream))
    strides = tuple(s // 4 for s in on.host["x"].strides)
    y = Buffer(address.value or 0, SHAPE, strides, DataType.FLOAT32, ROCM, 0, True, None)
    a, out = on.arrays, on.empty()
    on.handle.forward_inference(*[a[n] for n in ("x", "scale", "bias", "mean", "variance")], y)
    on.handle.axpby(1.0, y, 0.0, out)
    runtime.hipFreeAsync(address, POINTER(on.device.stream))
    assert on.far(out, on.inferred) < 1e-4


def test_tensors_of_pytorch_for_rocm(on: On) -> None:
    torch = pytest.importorskip("torch", reason="miopen: PyTorch for ROCm is not installed")
    if torch.version.hip is None or not torch.cuda.is_available():
        pytest.skip("miopen: PyTorch is not of ROCm, or finds no device")
    names = ("x", "scale", "bias", "mean", "variance")
    stream = torch.cuda.current_stream()
    on.handle.set_stream(stream.cuda_stream)
    tensors = [torch.from_numpy(on.host[name]).cuda() for name in names]
    y = torch.empty_like(tensors[0])
    on.handle.forward_inference(*tensors, y)
    assert float(np.abs(y.cpu().numpy() - on.inferred).max()) < 1e-4
    with pytest.raises(pybnorm.ArgumentError, match="memory"):
        on.handle.forward_inference(*tensors[:-1], tensors[-1].cpu(), y)
