"""Handles of two GPUs in one process, whichever of them is current; what doubles say of it: tests/unit/test_places.py.

PYBNORM_REQUIRE_SECOND_DEVICE=1: on this runner a missing second device is a failure.
"""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import pybnorm
from pybnorm import Mode, functional
from pybnorm._arrays import Buffer

SHAPE = (4, 8, 6, 10)
CURRENT = [0, 1]


@pytest.fixture(scope="module")
def torch() -> Any:
    reason = ""
    try:
        import torch

        count = torch.cuda.device_count() if torch.version.cuda else 0
        if count < 2:
            reason = f"PyTorch finds {count} CUDA devices"
    except ImportError:
        reason = "PyTorch is not installed"
    if not reason:
        try:
            pybnorm.load("cudnn")
        except pybnorm.LibraryError as error:
            reason = str(error).splitlines()[0]
    if reason:
        if os.environ.get("PYBNORM_REQUIRE_SECOND_DEVICE"):
            pytest.fail(f"PYBNORM_REQUIRE_SECOND_DEVICE is set but: {reason}")
        pytest.skip(f"no second device: {reason}")
    return torch


class On:
    """A handle of one device, arrays there, and what each call must give, by PyTorch on the CPU in float64."""

    def __init__(self, torch: Any, device: int) -> None:
        self.torch, self.device = torch, device
        torch.cuda.set_device(device)
        self.handle = pybnorm.Handle("cudnn")
        assert self.handle.device == device
        made = torch.Generator().manual_seed(device)
        self.host = SimpleNamespace()
        for name in ("x", "dy"):
            setattr(self.host, name, torch.randn(SHAPE, generator=made, dtype=torch.float64))
        for name in ("scale", "bias", "mean"):
            setattr(self.host, name, torch.randn(SHAPE[1], generator=made, dtype=torch.float64))
        self.host.variance = torch.rand(SHAPE[1], generator=made, dtype=torch.float64) + 0.5
        for name, value in list(vars(self.host).items()):
            setattr(self, name, value.float().to(f"cuda:{device}"))
            setattr(self.host, name, getattr(self, name).cpu().double())
        h, norm = self.host, torch.nn.functional.batch_norm
        leaf = h.x.clone().requires_grad_()
        h.y = norm(leaf, None, None, h.scale, h.bias, training=True)
        h.y.backward(h.dy)
        h.dx, h.y = leaf.grad, h.y.detach()
        h.inference = norm(h.x, h.mean, h.variance, h.scale, h.bias)
        self.xd = pybnorm.TensorDescriptor("cudnn", "f32", SHAPE)
        self.pd = pybnorm.derive_bn_tensor_descriptor(self.xd, Mode.SPATIAL)
        self.plan = self.handle.plan_forward_training(self.x, running=False, saved=False)
        self.inference_plan = self.handle.plan_forward_inference(self.x)
        self.space = self.empty(max(self.plan.workspace_size, self.inference_plan.workspace_size, 1), torch.uint8)

    def empty(self, shape: Any = SHAPE, dtype: Any = None) -> Any:
        full = 0 if dtype is not None else float("nan")
        return self.torch.full(shape if isinstance(shape, tuple) else (shape,), full, device=f"cuda:{self.device}",
                               dtype=dtype)  # fmt: skip

    def far(self, got: Any, want: Any) -> float:
        self.torch.cuda.synchronize(self.device)
        return float((got.cpu().double() - want).abs().max())

    def training(self) -> float:
        y = self.empty()
        self.handle.forward_training(self.x, self.scale, self.bias, y)
        return self.far(y, self.host.y)

    def inference(self) -> float:
        y = self.empty()
        self.handle.forward_inference(self.x, self.scale, self.bias, self.mean, self.variance, y)
        return self.far(y, self.host.inference)

    def backward(self) -> float:
        dx, dscale, dbias = self.empty(), self.empty(SHAPE[1]), self.empty(SHAPE[1])
        self.handle.backward(self.x, self.dy, self.scale, dx, dscale, dbias)
        return max(self.far(dx, self.host.dx), self.far(dbias, self.host.dy.sum((0, 2, 3))))

    def elementwise(self) -> float:
        y, dx, filled = self.empty(), self.empty(), self.empty()
        self.handle.relu(self.x, y)
        self.handle.relu_backward(self.x, self.dy, dx)
        self.handle.fill(2.5, filled)
        self.handle.axpby(3.0, self.x, 1.0, filled)
        h = self.host
        mask = (h.x > 0).double()
        return max(self.far(y, h.x * mask), self.far(dx, h.dy * mask), self.far(filled, 3 * h.x + 2.5))

    def plans(self) -> float:
        y, z = self.empty(), self.empty()
        space = self.space.data_ptr(), self.space.numel()
        self.plan(self.x, self.scale, self.bias, y, workspace=space)
        self.inference_plan(
            self.x.data_ptr(), self.scale.data_ptr(), self.bias.data_ptr(), self.mean.data_ptr(),
            self.variance.data_ptr(), z.data_ptr(), workspace=self.space,
        )  # fmt: skip
        return max(self.far(y, self.host.y), self.far(z, self.host.inference))

    def made_here(self) -> float:
        """A plan of the graph API that is compiled while the other device may be current."""
        x = self.x.contiguous(memory_format=self.torch.channels_last)
        y, space = self.torch.empty_like(x), self.empty(1 << 20, self.torch.uint8)
        plan = self.handle.plan_forward_inference(x, algorithm="pointwise")
        plan(x, self.scale, self.bias, self.mean, self.variance, y, workspace=space)
        return self.far(y, self.host.inference)

    def addresses(self) -> float:
        y = self.empty()
        p = {n: getattr(self, n).data_ptr() for n in ("x", "scale", "bias", "mean", "variance")}
        pybnorm.batch_normalization_forward_inference(
            self.handle, Mode.SPATIAL, 1.0, 0.0, self.xd, p["x"], self.xd, y.data_ptr(), self.pd, p["scale"], p["bias"],
            p["mean"], p["variance"], 1e-5,
        )  # fmt: skip
        return self.far(y, self.host.inference)

    def functions(self) -> float:
        y, *_ = functional.batch_norm_training(self.x, self.scale, self.bias, handle=self.handle)
        z, *_ = functional.batch_norm_training(self.x, self.scale, self.bias)
        return max(self.far(y, self.host.y), self.far(z, self.host.y))

    def own_handle(self) -> float:
        """Made and closed while the device of this object is not the one that is current."""
        before = self.torch.cuda.current_device()
        y = self.empty()
        with pybnorm.Handle("cudnn") as other:
            assert other.device == before
            if before != self.device:
                with pytest.raises(pybnorm.ArgumentError, match=f"memory of device {self.device}"):
                    other.relu(self.x, y)
        self.handle.set_stream(0)
        assert self.handle.stream == 0
        assert self.handle.query_runtime_error() is None
        return 0.0


CALLS = [
    "training",
    "inference",
    "backward",
    "elementwise",
    "plans",
    "made_here",
    "addresses",
    "functions",
    "own_handle",
]


@pytest.fixture(scope="module")
def both(torch: Any) -> Any:
    made = [On(torch, device) for device in (0, 1)]
    yield made
    for on in made:
        torch.cuda.set_device(1 - on.device)
        on.handle.close()


@pytest.mark.parametrize("call", CALLS)
def test_handles_of_both_in_turn_from_one_thread(torch: Any, both: Any, call: str) -> None:
    for _, current, on in itertools.product(range(1 if call == "made_here" else 3), CURRENT, both):
        torch.cuda.set_device(current)
        assert getattr(on, call)() < 1e-4
        assert torch.cuda.current_device() == current


def test_handles_of_both_from_two_threads(torch: Any, both: Any) -> None:
    """Each thread uses both handles, and has the other device current than the other thread."""
    found: dict[Any, Any] = {}

    def work(current: int) -> None:
        torch.cuda.set_device(current)
        for i, call, on in itertools.product(range(10), CALLS, both):
            if call == "functions" or (call == "made_here" and i > 0):  # their thread's handles; takes long
                continue
            try:
                found[current, i, call, on.device] = getattr(on, call)(), torch.cuda.current_device()
            except Exception as error:
                found[current, i, call, on.device] = repr(error), current

    threads = [threading.Thread(target=work, args=[current]) for current in CURRENT]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * (10 * (len(CALLS) - 2) + 1) * 2
    for (current, *rest), (error, after) in found.items():
        assert isinstance(error, float), (current, rest, error)
        assert error < 1e-4, (current, rest)
        assert after == current, rest


def test_a_thread_that_has_no_device_yet(torch: Any, both: Any) -> None:
    found = []
    results = {on: on.empty() for on in both}

    def work() -> None:
        for on, y in reversed(results.items()):
            on.handle.forward_training(on.x, on.scale, on.bias, y)
            found.append((on.far(y, on.host.y), torch.cuda.current_device()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [(error < 1e-4, current) for error, current in found] == [(True, 0), (True, 0)]


class Interface:
    """An array of a library that has no DLPack: its interface does not say the device."""

    def __init__(self, tensor: Any) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__
        self.kept = tensor


@pytest.mark.parametrize("current", CURRENT)
@pytest.mark.parametrize("device", [0, 1])
def test_memory_of_the_other_device_is_refused(torch: Any, both: Any, device: int, current: int) -> None:
    torch.cuda.set_device(current)
    on, other = both[device], both[1 - device]
    y, wrong = on.empty(), other.empty()
    plan, h = on.plan, on.handle
    bytes_there = other.empty(1 << 20, torch.uint8)
    vectors = on.scale, on.bias
    p = [t.data_ptr() for t in (on.x, on.scale, on.bias)]
    unsaid = Buffer(wrong.data_ptr(), SHAPE, wrong.stride(), pybnorm.DataType.FLOAT32, 2, -1, True, wrong)
    refused = {
        "y": [
            lambda: h.relu(on.x, wrong),
            lambda: h.relu(on.x, Interface(wrong)),
            lambda: h.forward_training(on.x, *vectors, wrong),
            lambda: plan(on.x, *vectors, wrong),
            lambda: plan(*p, wrong.data_ptr()),
            lambda: pybnorm.fill(h, 1.0, on.xd, wrong.data_ptr()),
            lambda: h.fill(1.0, unsaid),
        ],
        "scale": [
            lambda: h.forward_training(on.x, other.scale, on.bias, y),
            lambda: plan(p[0], other.scale.data_ptr(), p[2], y.data_ptr()),
        ],
        "x": [lambda: functional.batch_norm_training(wrong, *vectors, handle=h)],
        "workspace": [
            lambda: plan(on.x, *vectors, y, workspace=bytes_there),
            lambda: plan(on.x, *vectors, y, workspace=(bytes_there.data_ptr(), 1 << 20)),
            lambda: h.memory(Interface(bytes_there)),
        ],
        "reserve": [
            lambda: plan(on.x, *vectors, y, reserve=bytes_there, workspace=on.space),
            lambda: plan(on.x, *vectors, y, reserve=(bytes_there.data_ptr(), 1 << 20), workspace=on.space),
        ],
    }
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        refused["array"] = [lambda: h.follow_stream(wrong)]
    told = {}
    for argument, calls in refused.items():
        for i, call in enumerate(calls):
            wanted = f"{argument}: got memory of device {1 - device}, allowed: memory of device {device}, the handle's"
            try:
                call()
            except pybnorm.ArgumentError as error:
                told[argument, i] = "" if str(error) == wanted else str(error)
            else:
                told[argument, i] = "taken"
    assert {which: text for which, text in told.items() if text} == {}
    assert torch.cuda.current_device() == current
    # The same kinds of memory on the handle's own device, and pinned and managed memory, are good.
    y = on.empty()
    h.forward_training(Interface(on.x), *vectors, Interface(y))
    assert on.far(y, on.host.y) < 1e-4
    assert h.buffer(Interface(y), "y").device_id == device
    pinned = torch.zeros(SHAPE, pin_memory=True)
    pybnorm.fill(h, 2.0, on.xd, pinned.data_ptr())
    torch.cuda.synchronize(device)
    assert bool((pinned == 2).all())
    assert on.training() < 1e-4
    assert other.training() < 1e-4


@pytest.mark.parametrize("current", CURRENT)
@pytest.mark.parametrize("device", [0, 1])
def test_a_plan_is_captured_whichever_device_is_current(torch: Any, both: Any, device: int, current: int) -> None:
    on = both[device]
    y = on.empty()
    addresses = [getattr(on, n).data_ptr() for n in ("x", "scale", "bias", "mean", "variance")]
    on.plans()  # a first run, which loads what a capture must not
    torch.cuda.set_device(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    on.handle.set_stream(stream.cuda_stream)
    try:
        with torch.cuda.graph(graph, stream=stream):
            torch.cuda.set_device(current)
            on.inference_plan(*addresses, y.data_ptr(), workspace=on.space)
            assert torch.cuda.current_device() == current
            torch.cuda.set_device(device)
        assert bool(y.isnan().all())
        graph.replay()
        assert on.far(y, on.host.inference) < 1e-4
    finally:
        on.handle.set_stream(0)
