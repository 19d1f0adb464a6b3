"""MIOpen's calls on what PyTorch and others give them: graphs, several streams, a stream's own memory, tensors.

Needs libMIOpen, libamdhip64 and a device: a ROCm machine, or ci/miopen-on-cpu, whose runtime has no graphs; what a
runtime lacks is a skip that names it, and the run lists those.
"""

import ctypes

import numpy as np
import pytest
from on import WORDS, On

import pybnorm
from pybnorm.check.judging import bounds
from pybnorm.devices import hip

POINTER = ctypes.c_void_p
GLOBAL = 0  # hipStreamCaptureModeGlobal, the strictest


@pytest.fixture
def on(need_device):
    need_device("miopen")
    found = On()
    with found.handle:
        yield found


class Hip:
    """Functions of the loaded runtime; the ones that it lacks make the test a skip."""

    def __init__(self, *names):
        library = ctypes.CDLL(hip.load().file)
        lacking = [name for name in names if not hasattr(library, name)]
        if lacking:
            pytest.skip(f"miopen: this HIP runtime has no {', '.join(lacking)}")
        self._library = library

    def __getattr__(self, name):
        function = self._library[name]

        def call(*arguments):
            status = function(*[POINTER(a) if type(a) is int and a > 2**31 else a for a in arguments])
            assert status == 0, f"{name} returned {status}"

        return call


GRAPHS = (
    *("hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphInstantiate", "hipGraphLaunch"),
    *("hipGraphExecDestroy", "hipGraphDestroy"),
)


def captured(on, work):
    """What launches `work` again."""
    runtime, graph, launch = Hip(*GRAPHS), POINTER(), POINTER()
    runtime.hipStreamBeginCapture(on.device.stream, GLOBAL)
    try:
        work()
    finally:
        runtime.hipStreamEndCapture(on.device.stream, ctypes.byref(graph))
    runtime.hipGraphInstantiate(ctypes.byref(launch), graph, None, None, ctypes.c_size_t(0))
    return lambda: runtime.hipGraphLaunch(launch, POINTER(on.device.stream))


def refill(case):
    for name, buffer in case.made.items():
        case.device.refill(buffer, np.full(case.before[name].nbytes, 0xFF, np.uint8))


@pytest.mark.parametrize("algorithm", [None, "auto"])
def test_every_plan_is_captured_and_launched_again(on, algorithm):
    """After one call that compiles, as the plans' documentation asks."""
    for word in WORDS:
        case = on.case(word)
        _, run = case.planned(algorithm)
        run()
        again = captured(on, run)
        for _ in range(2):
            refill(case)
            again()
            case.judge()


def test_an_array_that_is_dropped_during_a_capture_does_not_end_it(on):
    case, dropped = on.case("infer"), [on.empty()]
    _, run = case.planned()
    run()

    def work():
        dropped.clear()  # its finalizer is hipFree
        run()

    again = captured(on, work)
    refill(case)
    again()
    case.judge()


def test_calls_on_several_streams_are_each_right(on):
    """None is waited for before all are enqueued; each stream's calls go one after another."""
    others = [on, On(), On()]
    assert len({other.device.stream for other in others}) == 3
    cases = [[other.case(word) for word in WORDS] for other in others]
    runs = [[case.planned("auto")[1] for case in each] for each in cases]
    for _ in range(4):
        for calls in zip(*runs, strict=True):
            for call in calls:
                call()
    for other, each in zip(others, cases, strict=True):
        for case in each:
            case.judge()
        if other is not on:
            other.handle.close()


def test_a_handle_goes_from_stream_to_stream(on):
    """A call waits for nothing but its own stream: the first one is waited for before the second is used."""
    case, other = on.case(), On()
    _, run = case.planned()
    for stream in (other.device, on.device, other.device):
        on.handle.set_stream(stream.stream)
        refill(case)
        run()
        stream.synchronize()
        case.judge()
    other.handle.close()


def test_memory_of_a_stream_s_own_pool(on):
    """What hipMallocAsync gives, as PyTorch's and RMM's allocators may; freed on the stream behind the call."""
    runtime, address = Hip("hipMallocAsync", "hipFreeAsync"), POINTER()
    case = on.case("infer")
    y = case.made["y"]
    nbytes = ctypes.c_size_t(case.before["y"].nbytes)
    runtime.hipMallocAsync(ctypes.byref(address), nbytes, POINTER(on.device.stream))
    case.made["y"] = y._replace(pointer=address.value, owner=None)
    case.run_arrays(sized=False)
    on.handle.axpby(1.0, case.made["y"], 0.0, y)
    runtime.hipFreeAsync(address, POINTER(on.device.stream))
    case.made["y"] = y
    case.judge()


def test_tensors_of_pytorch_for_rocm(on):
    torch = pytest.importorskip("torch", reason="miopen: PyTorch for ROCm is not installed")
    if torch.version.hip is None or not torch.cuda.is_available():
        pytest.skip("miopen: PyTorch is not of ROCm, or finds no device")
    case = on.case("infer")
    on.handle.set_stream(torch.cuda.current_stream().cuda_stream)
    inputs = [getattr(case.inputs, name) for name in ("x", "scale", "bias", "mean", "variance")]
    tensors = [torch.from_numpy(np.ascontiguousarray(values)).cuda() for values in inputs]
    y = torch.empty_like(tensors[0])
    on.handle.forward_inference(*tensors, y)
    assert bounds.judge(case.expected, "y", y.cpu().numpy()).status == bounds.Status.PASS
    with pytest.raises(pybnorm.ArgumentError, match="memory"):
        on.handle.forward_inference(*tensors[:-1], tensors[-1].cpu(), y)
