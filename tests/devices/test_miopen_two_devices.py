"""MIOpen's handles of two devices in one process, whichever of them is current.

Needs libMIOpen, libamdhip64 and two devices: a ROCm machine, or ci/miopen-on-cpu with HIPCPU_DEVICES=2, where a kernel
that is given memory, a stream or a module of the other device is an error. PYBNORM_REQUIRE_SECOND_DEVICE=1: on this
runner a missing second device is a failure.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any, NoReturn

import numpy as np
import pytest

import pybnorm
from pybnorm import devices, functional
from pybnorm._arrays import ROCM
from pybnorm.devices import hip

SHAPE = (4, 3, 5, 6)
CHANNELS = SHAPE[1]
AXES = (0, 2, 3)


def absent(reason: str) -> NoReturn:
    if os.environ.get("PYBNORM_REQUIRE_SECOND_DEVICE"):
        pytest.fail(f"PYBNORM_REQUIRE_SECOND_DEVICE is set but: {reason}")
    pytest.skip(f"no second device: {reason}")


def go(device: int) -> None:
    hip.load().call("hipSetDevice", device)


def current() -> int:
    found = pybnorm.Handle("miopen")  # of the device that is current
    try:
        return found.device
    finally:
        found.close()


class On:
    """A device, a handle on its stream, arrays there, and what each call must give, in float64."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.device = devices.device_for(ROCM, ordinal)
        self.handle = pybnorm.Handle("miopen", stream=self.device.stream)
        assert self.handle.device == ordinal
        rng = np.random.default_rng(ordinal)
        self.host = {name: rng.standard_normal(SHAPE).astype(np.float32) for name in ("x", "dy")}
        for name in ("scale", "bias", "mean", "variance"):
            self.host[name] = (rng.random(CHANNELS) + 0.5).astype(np.float32)
        self.arrays = {name: self.device.from_numpy(value) for name, value in self.host.items()}
        h = {name: value.astype(np.float64) for name, value in self.host.items()}
        scale, bias, mean, variance = (h[n].reshape(1, -1, 1, 1) for n in ("scale", "bias", "mean", "variance"))
        inverse = 1 / np.sqrt(h["x"].var(AXES, keepdims=True) + 1e-5)
        normal = (h["x"] - h["x"].mean(AXES, keepdims=True)) * inverse
        self.y = normal * scale + bias
        self.inferred = (h["x"] - mean) / np.sqrt(variance + 1e-5) * scale + bias
        means = [(h["dy"] * part).mean(AXES, keepdims=True) for part in (1, normal)]
        self.dx = scale * inverse * (h["dy"] - means[0] - normal * means[1])
        self.plan = self.handle.plan_forward_training(self.arrays["x"], running=False, saved=False)
        self.space = self.device.empty_bytes(max(self.plan.workspace_size, 1))

    def empty(self, shape: tuple[int, ...] = SHAPE) -> Any:
        return self.device.from_numpy(np.full(shape, np.nan, np.float32))

    def far(self, got: Any, want: Any) -> float:
        return float(np.abs(self.device.to_numpy(got).astype(np.float64) - want).max())

    def training(self) -> float:
        y = self.empty()
        self.handle.forward_training(self.arrays["x"], self.arrays["scale"], self.arrays["bias"], y)
        return self.far(y, self.y)

    def inference(self) -> float:
        y = self.empty()
        a = self.arrays
        self.handle.forward_inference(a["x"], a["scale"], a["bias"], a["mean"], a["variance"], y)
        return self.far(y, self.inferred)

    def backward(self) -> float:
        a, dx, sums = self.arrays, self.empty(), [self.empty((CHANNELS,)) for _ in range(2)]
        self.handle.backward(a["x"], a["dy"], a["scale"], dx, *sums)
        return max(self.far(dx, self.dx), self.far(sums[1], self.host["dy"].astype(np.float64).sum(AXES)))

    def plans(self) -> float:
        y = self.empty()
        self.plan(self.arrays["x"], self.arrays["scale"], self.arrays["bias"], y, workspace=self.space)
        return self.far(y, self.y)

    def addresses(self) -> float:
        y = self.empty()
        p = [self.arrays[n].pointer for n in ("x", "scale", "bias")]
        self.plan(*p, y.pointer, workspace=(self.space.pointer, self.space.nbytes))
        return self.far(y, self.y)

    def functions(self) -> float:
        out = (self.empty(), self.empty((CHANNELS,)), self.empty((CHANNELS,)))
        functional.batch_norm_training(*(self.arrays[n] for n in ("x", "scale", "bias")), out=out, handle=self.handle)
        return self.far(out[0], self.y)

    def timed(self) -> float:
        seconds = self.device.time(self.training, repeats=2)
        return 0.0 if all(s > 0 for s in seconds) else 1.0


CALLS = ["training", "inference", "backward", "plans", "addresses", "functions", "timed"]


@pytest.fixture(scope="module")
def both() -> Any:
    try:
        pybnorm.load("miopen")  # first: the HIP runtime that it links to is then the one in the process
        count = devices.device_count(ROCM)
    except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:
        absent(str(error).splitlines()[0])
    if count < 2:
        absent(f"HIP has {count}")
    made = [On(ordinal) for ordinal in (0, 1)]
    yield made
    for on in made:
        go(1 - on.ordinal)
        on.handle.close()


@pytest.mark.parametrize("call", CALLS)
def test_handles_of_both_in_turn_from_one_thread(both: Any, call: str) -> None:
    for _, first, on in itertools.product(range(2), (0, 1), both):
        go(first)
        assert getattr(on, call)() < 4e-6, (first, on.ordinal)


def test_a_call_leaves_the_thread_s_device(both: Any) -> None:
    for on, first in itertools.product(both, (0, 1)):
        y = on.empty()
        go(first)
        on.handle.forward_training(on.arrays["x"], on.arrays["scale"], on.arrays["bias"], y)
        assert current() == first


def test_handles_of_both_from_two_threads(both: Any) -> None:
    """Each thread uses both handles, and has the other device current than the other thread."""
    found: dict[Any, Any] = {}

    def work(first: int) -> None:
        for i, call, on in itertools.product(range(5), CALLS, both):
            go(first)
            try:
                found[first, i, call, on.ordinal] = getattr(on, call)()
            except Exception as error:
                found[first, i, call, on.ordinal] = repr(error)

    threads = [threading.Thread(target=work, args=[first]) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 * 5 * len(CALLS) * 2
    assert {which: error for which, error in found.items() if not (isinstance(error, float) and error < 4e-6)} == {}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_memory_of_the_other_device_is_refused(both: Any, ordinal: int, first: int) -> None:
    on, other = both[ordinal], both[1 - ordinal]
    y, wrong = on.empty(), other.empty()
    a = on.arrays
    p = [a[n].pointer for n in ("x", "scale", "bias")]
    go(first)
    refused = {
        "y": [
            lambda: on.handle.relu(a["x"], wrong),
            lambda: on.handle.forward_training(a["x"], a["scale"], a["bias"], wrong),
            lambda: on.plan(*p, wrong.pointer, workspace=on.space),
            lambda: on.handle.fill(1.0, wrong._replace(device_id=-1)),
        ],
        "scale": [lambda: on.handle.forward_training(a["x"], other.arrays["scale"], a["bias"], y)],
    }
    if on.plan.workspace_size:
        refused["workspace"] = [lambda: on.plan(*p, y.pointer, workspace=other.space)]
    wanted = f"got memory of device {1 - ordinal}, allowed: memory of device {ordinal}, the handle's"
    for argument, calls in refused.items():
        for call in calls:
            with pytest.raises(pybnorm.ArgumentError) as info:
                call()
            assert str(info.value) == f"{argument}: {wanted}"
    assert np.isnan(other.device.to_numpy(wrong)).all()
    assert on.training() < 4e-6


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_device_s_arrays_are_its_own(both: Any, ordinal: int) -> None:
    """Whichever was made last, or is current."""
    on = both[ordinal]
    go(1 - ordinal)
    filled, space = on.empty(), on.device.empty_bytes(64)
    go(1 - ordinal)
    on.handle.fill(2.0, filled._replace(device_id=-1))  # the driver is asked whose memory it is
    with pytest.raises(pybnorm.ArgumentError, match=f"memory of device {ordinal}, allowed"):
        both[1 - ordinal].handle.memory(space._replace(device_id=-1))
    assert on.far(filled, 2.0) == 0
