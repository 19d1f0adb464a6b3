"""`pybnorm.operations` over cuDNN's plans, on a double that computes on the host."""

import numpy as np
import pytest

import pybnorm
from pybnorm import Operation, _core
from pybnorm._arrays import as_buffer

SCRIPT = """
    from pybnorm import operations
    from pybnorm._arrays import CUDA, Buffer

    def on_device(case, names):
        "Arrays of a case as they lie on a device, vectors in the shape of the calls."
        found = {}
        for name in names.split():
            array = getattr(case, name)
            array = array if array.ndim > 1 else array.reshape(case.wide)
            steps = tuple(step // array.itemsize for step in array.strides)
            kind = pybnorm.DataType.FLOAT32 if array.itemsize == 4 else pybnorm.DataType.BFLOAT16
            found[name] = Buffer(array.ctypes.data, array.shape, steps, kind, CUDA, -1, True, None)
        return found

    def operate(handle, name, given):
        plan = operations.plan(handle, name, **given)
        space = memory((plan.nbytes,), 0xff, np.uint8)
        for again in range(2):
            getattr(operations, name)(handle, **given, workspace=(space.ctypes.data if plan.nbytes else 0, plan.nbytes))
        return plan.calls
    """


def test_backward_goes_by_the_entry_point_however_data_are_aligned(compute):
    calls, errors, slow, whole, live = compute(
        SCRIPT,
        """
    errors, slow, calls = [], [], []
    with pybnorm.Handle("cudnn") as handle:
        for shift in (0, 1):
            case = Case((8, 16, 9, 9), shift=shift)
            case.kind, case.saved_mean[...], case.saved_inv_variance[...] = "plan_backward", *case.statistics()
            given = on_device(case, "x dy scale dx dscale dbias saved_mean saved_inv_variance")
            calls += operate(handle, "backward", given)
            slow.append(number("slow").value)
            errors += case.errors().items()
    del handle
    finish(calls, errors, slow)
    """,
    )
    assert calls == ["backward SPATIAL f32 (8, 16, 9, 9)"] * 2
    assert max(error for _, error in errors) < 2e-5, errors
    assert slow == [2, 4], "the kernels that are slow over channels-last memory"
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


def test_sixteen_bit_data_off_their_pairs_are_refused_as_the_vendor_s_call_is(compute):
    """cuDNN's channels-first kernels would lose the context there: nothing is copied in secret."""
    told, error, whole, _ = compute(
        SCRIPT,
        """
    import warnings
    with pybnorm.Handle("cudnn") as handle, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        given = on_device(Case((4, 8, 6, 5), "nchw", "bf16", shift=1), "x scale bias y")
        error = attempt(lambda: operate(handle, "forward_training", given))
        finish([str(w.message) for w in found if w.category is pybnorm.KnownDefectWarning], error)
    """,
    )
    assert len(told) == 1
    assert "cudnn-misaligned" in told[0]
    assert error["error"] == "UnsupportedError"
    assert "4-byte aligned" in error["text"]
    assert whole, "something was written outside"


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_synchronized_batch_norm_over_plans(compute, layout):
    """Of two ranks, the other of which has the same data."""
    calls, errors, whole, live = compute(
        SCRIPT,
        """
    from pybnorm.sync import SyncBatchNorm
    own = {}

    class Mirror:
        rank, size, devices = 0, 2, (CUDA,)
        def vector(self, given, device, stream):
            made = memory(given.shape, given, given.dtype)
            kind = pybnorm._arguments.data_type(str(given.dtype))
            buffer = Buffer(made.ctypes.data, made.shape, (1,), kind, CUDA, -1, True, None)
            own[made.ctypes.data] = made
            return buffer
        def all_gather(self, send, received, stream):
            own[received.pointer].reshape(2, -1)[...] = own[send.pointer]
        def all_reduce(self, send, received, stream):
            own[received.pointer][...] = 2 * own[send.pointer]
        def read(self, vector, out, stream):
            out[...] = own[vector.pointer]

    with pybnorm.Handle("cudnn") as handle:
        case, wants = Case((4, 6, 16, 16), values["layout"], epsilon=1e-5), {}
        layer = SyncBatchNorm(handle, Mirror(), 6)
        for call, kind, names in (
            ("forward", "plan_forward_training", "x scale bias y running_mean running_variance"),
            ("backward", "plan_backward", "x dy scale dx dscale dbias"),
        ):
            given = on_device(case, names + " saved_mean saved_inv_variance")
            space = memory((layer.workspace_size(call, **given),), 0xff, np.uint8)
            getattr(layer, call)(**given, workspace=(space.ctypes.data, space.nbytes))
            case.kind = kind
            wants |= case.wanted()
        count = 2 * 4 * 16 * 16
        batch = case.x.astype("f8").var(case.axes) * count / (count - 1)
        wants["running_variance"] = 0.9 * case.old[1] + 0.1 * batch
        calls = [text for plan in layer._plans.values()
                 for part in (plan.before, plan.after(plan.expected), getattr(plan, "elementwise", None)) if part
                 for text in part.calls if str(case.shape) in text]
        errors = {name: far(getattr(case, name), want) for name, want in wants.items()}
    del handle, layer
    finish(calls, errors)
    """,
        layout=layout,
    )
    kinds = [call.partition(" SPATIAL")[0] for call in calls]
    assert kinds == ["forward_training", "forward_inference", "backward", *["forward_inference"] * 2]
    assert len(errors) == 8
    assert max(errors.values()) < 2e-5, errors
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


@pytest.mark.parametrize("made", [False, True])
def test_a_plan_of_given_variances_does_not_take_a_given_inverse(made):
    """Native on a GPU takes the form of the statistic when a plan is made."""
    values = {"mode": pybnorm.Mode.SPATIAL, "alpha": 1.0, "beta": 0.0, "epsilon": 0.0}
    shapes = {name: (2, 3, 4, 4) for name in ("x", "y")}
    shapes |= {name: (1, 3, 1, 1) for name in ("scale", "bias", "running_mean", "running_variance")}
    buffers = {name: as_buffer(np.ones(dims, np.float32), name)._replace(pointer=0) for name, dims in shapes.items()}
    with pybnorm.Handle("native") as handle:
        like = pybnorm.TensorDescriptor("native", "f32", shapes["x"])
        inverse, tensors = values | {"inverse": made}, {"x": like, "y": like}
        plan = _core.way_of(handle, Operation.FORWARD_INFERENCE, tensors, inverse, False, False, False, 16)
        calls = _core.CallList(handle)
        with pytest.raises(pybnorm.ArgumentError, match=r"plan: got .* what way_of said"):
            calls.append(handle, Operation.FORWARD_INFERENCE, buffers, (0, 0), plan, **values, inverse=not made)
        calls.append(handle, Operation.FORWARD_INFERENCE, buffers, (0, 0), plan, **inverse)
