"""MIOpen's handles of two devices in one process, whichever of them is current.

Needs libMIOpen, libamdhip64 and two devices: a ROCm machine, or ci/miopen-on-cpu with HIPCPU_DEVICES=2, where a kernel
that is given memory, a stream or a module of the other device is an error. PYBNORM_REQUIRE_SECOND_DEVICE=1: on this
runner a missing second device is a failure.
"""

import itertools
import os
import threading

import numpy as np
import pytest
from on import WORDS, On

import pybnorm
from pybnorm import devices, functional
from pybnorm._arrays import ROCM
from pybnorm.devices import hip

CALLS = [*itertools.product(WORDS, ("arrays", "addresses", "plan")), ("train", "function"), ("train", "timed")]


def absent(reason):
    if os.environ.get("PYBNORM_REQUIRE_SECOND_DEVICE"):
        pytest.fail(f"PYBNORM_REQUIRE_SECOND_DEVICE is set but: {reason}")
    pytest.skip(f"no second device: {reason}")


def go(device):
    hip.load().call("hipSetDevice", device)


def current():
    with pybnorm.Handle("miopen") as found:  # of the device that is current
        return found.device


@pytest.fixture(scope="module")
def both():
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


def right(on, first, word, way):
    """A call while a device is current, judged."""
    case = on.case(word)
    go(first)
    if way == "function":
        out = [case.made[name] for name in ("y", "saved_mean", "saved_inv_variance")]
        functional.batch_norm_training(*(case.given[n] for n in ("x", "scale", "bias")), out=out, handle=on.handle)
    elif way == "timed":
        assert all(s > 0 for s in on.device.time(case.run_arrays, repeats=2))
    else:
        getattr(case, f"run_{way}")()
    case.judge()


@pytest.mark.parametrize("call", CALLS, ids="-".join)
def test_handles_of_both_in_turn_from_one_thread(both, call):
    for _, first, on in itertools.product(range(2), (0, 1), both):
        right(on, first, *call)


def test_a_call_leaves_the_thread_s_device(both):
    for on, first in itertools.product(both, (0, 1)):
        case = on.case()
        go(first)
        case.run_arrays(sized=False)
        assert current() == first


def test_handles_of_both_from_two_threads(both):
    """Each thread uses both handles, and has the other device current than the other thread."""
    wrong, made = {}, []

    def work(first):
        for i, call, on in itertools.product(range(3), CALLS, both):
            try:
                right(on, first, *call)
                made.append(call)
            except Exception as error:
                wrong[first, i, call, on.ordinal] = repr(error)

    threads = [threading.Thread(target=work, args=[first]) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == {}
    assert len(made) == 2 * 3 * len(CALLS) * 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ordinal", [0, 1])
def test_memory_of_the_other_device_is_refused(both, ordinal, first):
    on, other = both[ordinal], both[1 - ordinal]
    case, foreign, wrong = on.case(), other.case(), other.empty()
    plan, _ = case.planned()
    space, theirs = (o.device.empty_bytes(max(plan.workspace_size, 1)) for o in (on, other))
    arrays = {**case.given, **case.made}
    addresses = {name: buffer.pointer for name, buffer in arrays.items()}
    go(first)
    refused = [
        ("y", lambda: on.handle.relu(arrays["x"], wrong)),
        ("y", lambda: on.handle.forward_training(**arrays | {"y": wrong})),
        ("y", lambda: plan(**addresses | {"y": wrong.pointer}, workspace=space)),
        ("y", lambda: on.handle.fill(1.0, wrong._replace(device_id=-1))),
        ("scale", lambda: on.handle.forward_training(**arrays | {"scale": foreign.given["scale"]})),
    ]
    if plan.workspace_size:
        refused.append(("workspace", lambda: plan(**addresses, workspace=theirs)))
    for argument, call in refused:
        with pytest.raises(pybnorm.ArgumentError) as info:
            call()
        wanted = f"got memory of device {1 - ordinal}, allowed: memory of device {ordinal}, the handle's"
        assert str(info.value) == f"{argument}: {wanted}"
    assert np.isnan(other.device.to_numpy(wrong)).all()
    right(on, first, "train", "arrays")


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_device_s_arrays_are_its_own(both, ordinal):
    """Whichever was made last, or is current."""
    on = both[ordinal]
    go(1 - ordinal)
    filled, space = on.empty(), on.device.empty_bytes(64)
    go(1 - ordinal)
    on.handle.fill(2.0, filled._replace(device_id=-1))  # the driver is asked whose memory it is
    with pytest.raises(pybnorm.ArgumentError, match=f"memory of device {ordinal}, allowed"):
        both[1 - ordinal].handle.memory(space._replace(device_id=-1))
    assert (on.device.to_numpy(filled) == 2).all()
