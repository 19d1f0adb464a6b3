"""Handles of every backend that finds a device: ownership, threads, errors, shutdown."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
from place import device_of

import pybnorm


def data(handle, dims=(2, 3, 4, 4)):
    device = device_of(handle)
    x, one = np.random.default_rng(0).standard_normal(dims).astype(np.float32), np.ones(dims[1], np.float32)
    arrays = {"x": x, "scale": one, "bias": one, "y": np.full_like(x, np.nan)}
    return device, {name: device.from_numpy(array) for name, array in arrays.items()}


def test_close_is_idempotent(handle):
    with pybnorm.Handle(handle.backend) as opened:
        assert opened.pointer
        assert handle.backend in repr(opened)
        assert not opened.closed
    opened.close()
    assert opened.closed
    assert repr(opened) == "<Handle closed>"


def test_a_closed_handle_is_refused_everywhere(handle):
    _, arrays = data(handle)
    closed = pybnorm.Handle(handle.backend)
    closed.close()
    x = pybnorm.TensorDescriptor(handle.backend, "f32", (2, 3, 4, 4))
    p = pybnorm.derive_bn_tensor_descriptor(x, 1)
    uses = [
        lambda: closed.pointer,
        lambda: closed.stream,
        lambda: closed.set_stream(0),
        lambda: closed.forward_training(**arrays),
        lambda: closed.axpby(1, arrays["x"], 0, arrays["y"]),
        lambda: closed.workspace_size("backward", x),
        closed.__enter__,
        lambda: pybnorm.axpby(closed, 1, x, 64, 0, x, 64),
        lambda: pybnorm.batch_normalization_forward_inference(closed, 1, 1, 0, x, 1, x, 2, p, 3, 4, 5, 6, 1e-5),
    ]
    for use in uses:
        with pytest.raises(pybnorm.ClosedError, match="handle"):
            use()


def test_a_foreign_handle_is_used_and_left_open(handle):
    with pybnorm.Handle(handle.backend) as owner:
        borrowed = pybnorm.Handle.from_pointer(handle.backend, owner.pointer)
        assert borrowed.pointer == owner.pointer
        device, arrays = data(borrowed)
        borrowed.forward_training(**arrays)
        device.synchronize()
        first = device.to_numpy(arrays["y"])
        borrowed.close()
        assert np.isfinite(first).all()
        device, arrays = data(owner)
        owner.forward_training(**arrays)
        device.synchronize()
        assert (device.to_numpy(arrays["y"]) == first).all()


def test_a_leaked_handle_warns_and_is_released(handle):
    opened = pybnorm.Handle(handle.backend)
    reference = weakref.ref(opened)
    with pytest.warns(ResourceWarning, match="unclosed <Handle"):
        del opened
        gc.collect()
    assert reference() is None


def test_objects_of_a_process_do_not_pickle(handle):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(handle)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(pybnorm.TensorDescriptor(handle.backend, "f32", (2, 3)))


def test_a_plan_is_not_copied():
    with pybnorm.Handle("native") as handle:
        plan = handle.plan_forward_inference(pybnorm.TensorDescriptor("native", "f32", (2, 3, 4, 4)))
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a plan belongs to its handle and cannot be copied or pickled"):
                duplicate(plan)


def test_streams_are_kept(handle):
    device_of(handle)
    before = handle.stream
    try:
        handle.set_stream(before)
        assert handle.stream == before

        class Stream:
            def __cuda_stream__(self):
                return (0, before)

        handle.set_stream(Stream())
        assert handle.stream == before
    finally:
        handle.set_stream(before)


class _Pointer:
    """As hip-python's streams: `int` takes them, and `operator.index` does not."""

    def __init__(self, address):
        self.address = address

    def __int__(self):
        return self.address


@pytest.mark.parametrize("module", ["hip.hip", "rocm.bindings.hip", "hipster"])
def test_streams_of_hip_python_are_taken_and_no_others_by_int(handle, module):
    device_of(handle)
    before, kind = handle.stream, type("ihipStream_t", (_Pointer,), {"__module__": module})
    try:
        if module == "hipster":
            with pytest.raises(pybnorm.ArgumentError, match=r"^stream: "):
                handle.set_stream(kind(before))
        else:
            handle.set_stream(kind(before))
            assert handle.stream == before
            with pytest.raises(pybnorm.ArgumentError, match=r"^stream: got ihipStream_t .*TypeError"):
                handle.set_stream(kind("no address"))
    finally:
        handle.set_stream(before)


def test_hip_pythons_own_stream(handle):
    pytest.importorskip("hip")
    from hip import hip  # no module in version 10, but an attribute

    device_of(handle)
    before = handle.stream
    handle.set_stream(hip.ihipStream_t(before))
    assert handle.stream == before


def test_closing_a_cached_descriptor_does_not_poison_the_handle(handle):
    device, arrays = data(handle)
    with handle.descriptor(arrays["x"]):
        pass
    handle.forward_training(**arrays)
    device.synchronize()
    assert np.isfinite(device.to_numpy(arrays["y"])).all()


def test_a_handle_closed_by_an_array_of_the_call(handle):
    """An array's own protocol runs Python code; the vendor must not see the handle after it was closed there."""
    device, arrays = data(handle)
    if device.stream:
        pytest.skip(f"{handle.backend}: the protocol is the CPU's here")
    y = device.to_numpy(arrays["y"])

    class Closes:
        def __init__(self, own):
            self.own = own

        def __dlpack_device__(self):
            return y.__dlpack_device__()

        def __dlpack__(self, **options):
            self.own.close()
            return y.__dlpack__()

    before = y.copy()
    for call in (
        lambda h: h.fill(3.0, Closes(h)),
        lambda h: h.axpby(1.0, arrays["x"], 0.0, Closes(h)),
        lambda h: h.forward_training(**(arrays | {"y": Closes(h)})),
    ):
        own = pybnorm.Handle(handle.backend)
        with pytest.raises(pybnorm.ClosedError, match="handle"):
            call(own)
        assert np.array_equal(y, before, equal_nan=True)


SHUTDOWN = """
import sys, pybnorm
kept = pybnorm.Handle({backend!r})
x = pybnorm.TensorDescriptor({backend!r}, "f32", (2, 3, 4, 4))
p = pybnorm.derive_bn_tensor_descriptor(x, 1)
sys.kept = kept  # outlives the module's own teardown
"""


def test_a_leaked_handle_survives_interpreter_shutdown(handle, tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHUTDOWN.format(backend=handle.backend)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "Error" not in run.stderr


def test_the_workspace_grows_only_with_need(handle):
    if handle.library.device_type != 1:
        pytest.skip(f"{handle.backend}: device backends are given their workspace")
    one = np.ones(3, np.float32)
    with pybnorm.Handle(handle.backend) as own:
        sizes = [own.workspace_nbytes]
        for rows in (2, 2, 60_000, 2):
            x, y = np.ones((rows, 3, 1, 8), np.float32), np.empty((rows, 3, 1, 8), np.float32)
            own.forward_training(x, one, one, y, alpha=2.0)
            sizes.append(own.workspace_nbytes)
    assert sizes[0] == 0
    assert sizes[1] == sizes[2] < sizes[3] == sizes[4]


def test_a_missing_workspace_is_named_with_its_size(handle):
    shape = (4, 5, 128, 128) if handle.backend.startswith("native") else (4, 5, 6, 7)  # where a call needs any
    x = pybnorm.TensorDescriptor(handle.backend, "f32", shape)
    size = handle.workspace_size("forward_training", x, alpha=2.0, beta=0.5, running=False, saved=False)
    if handle.backend == "cudnn":
        assert size == 0
        return
    assert size > 0
    device, arrays = data(handle, shape)
    p = pybnorm.derive_bn_tensor_descriptor(x, 1)
    a = {n: b.pointer for n, b in arrays.items()}
    short = device.empty_bytes(size)
    for workspace, nbytes in [(0, 0), (short.pointer, size - 1), (short.pointer + 1, size)]:
        with pytest.raises(pybnorm.WorkspaceError, match=f"at least {size} bytes"):
            pybnorm.batch_normalization_forward_training(
                handle, 1, 2.0, 0.5, x, a["x"], x, a["y"], p, a["scale"], a["bias"], 0.1, None, None, 1e-5, None, None,
                workspace=workspace, workspace_size=nbytes,
            )  # fmt: skip
    assert np.isnan(device.to_numpy(arrays["y"])).all()
