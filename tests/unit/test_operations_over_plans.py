"""`pybnorm.operations` over cuDNN's plans, on a double that computes on the host."""

import numpy as np
import pytest

import pybnorm
from pybnorm import Operation, _core
from pybnorm._arrays import as_buffer

SCRIPT = """
    from pybnorm import operations
    from pybnorm._arrays import CUDA, Buffer

    shape = values["shape"]
    axes, count, wide = (0, 2, 3), shape[0] * shape[2] * shape[3], (1, shape[1], 1, 1)
    generator = np.random.default_rng(5)

    def data(fill, shift=0):
        "Channels last if nothing else is said; `shift` values further on than aligned memory begins."
        kind = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[values.get("dtype", "f32")]
        flat = memory((int(np.prod(shape)) + shift,), dtype=kind)[shift:]
        array = flat.reshape(shape)
        if values.get("layout") != "nchw":
            array = flat.reshape(shape[0], *shape[2:], shape[1]).transpose(0, 3, 1, 2)
        array[...] = fill
        return array

    def on_device(array):
        steps = tuple(step // array.itemsize for step in array.strides)
        kind = pybnorm.DataType.FLOAT32 if array.itemsize == 4 else pybnorm.DataType.BFLOAT16
        return Buffer(array.ctypes.data, array.shape, steps, kind, CUDA, -1, True, None)

    def vector(fill=np.nan):
        return memory((shape[1],), fill).reshape(wide)

    def run(handle, name, **arrays):
        given = {n: on_device(a) if isinstance(a, np.ndarray) else a for n, a in arrays.items()}
        plan = operations.plan(handle, name, **given)
        space = memory((plan.nbytes,), 0xff, np.uint8)
        for again in range(2):
            getattr(operations, name)(handle, **given, workspace=(space.ctypes.data if plan.nbytes else 0, plan.nbytes))
        return plan.calls

    def gradients(x, dy, scale, mean, inverse):
        x, dy, scale, mean, inverse = (a.astype("f8") for a in (x, dy, scale, mean, inverse))
        dscale, dbias = (dy * (x - mean) * inverse).sum(axes, keepdims=True), dy.sum(axes, keepdims=True)
        return scale * inverse * (dy - (dbias + (x - mean) * inverse * dscale) / count), dscale, dbias
    """


def test_backward_goes_by_the_entry_point_however_data_are_aligned(compute):
    calls, errors, slow, whole, live = compute(
        SCRIPT,
        """
    errors, slow, calls = {}, [], []
    with pybnorm.Handle("cudnn") as handle:
        for shift in (0, 1):
            x, dy = (data(generator.standard_normal(shape), shift) for _ in range(2))
            scale, mean, inverse = (vector(generator.random(shape[1]) + 0.5) for _ in range(3))
            dx, dscale, dbias = data(np.nan, shift), vector(), vector()
            calls += run(
                handle, "backward", x=x, dy=dy, scale=scale, dx=dx, dscale=dscale, dbias=dbias,
                saved_mean=mean, saved_inv_variance=inverse)
            slow.append(number("slow").value)
            for name, got, want in zip(("dx", "dscale", "dbias"), (dx, dscale, dbias),
                                       gradients(x, dy, scale, mean, inverse)):
                errors[f"{name} {shift}"] = far(got, want)
    del handle
    gc.collect()
    report([calls, errors, slow, whole(), number("live").value])
    """,
        shape=(8, 16, 9, 9),
    )
    assert calls == ["backward SPATIAL f32 (8, 16, 9, 9)"] * 2
    assert max(errors.values()) < 2e-5, errors
    assert slow == [2, 4], "the kernels that are slow over channels-last memory"
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


def test_sixteen_bit_data_off_their_pairs_are_refused_as_the_vendor_s_call_is(compute):
    """cuDNN's channels-first kernels would lose the context there: nothing is copied in secret."""
    told, error, whole = compute(
        SCRIPT,
        """
    import warnings
    with pybnorm.Handle("cudnn") as handle, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        x, y, scale, bias = data(1, 1), data(np.nan, 1), vector(1), vector(0)
        error = attempt(lambda: run(handle, "forward_training", x=x, scale=scale, bias=bias, y=y))
        report([[str(w.message) for w in found if w.category is pybnorm.KnownDefectWarning], error, whole()])
    """,
        shape=(4, 8, 6, 5),
        layout="nchw",
        dtype="bf16",
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
        x, dy, y, dx = (data(f) for f in (generator.standard_normal(shape) + 3, generator.standard_normal(shape), 0, 0))
        scale, bias, running_mean, running_variance = (vector(generator.random(shape[1]) + 0.5) for _ in range(4))
        old = running_mean.astype("f8"), running_variance.astype("f8")
        saved_mean, saved_inv_variance, dscale, dbias = (vector() for _ in range(4))
        layer = SyncBatchNorm(handle, Mirror(), shape[1])
        on = {name: on_device(globals()[name]) for name in (
            "x", "dy", "y", "dx", "scale", "bias", "running_mean", "running_variance", "saved_mean",
            "saved_inv_variance", "dscale", "dbias")}
        names = {
            "forward": ("x", "scale", "bias", "y", "running_mean", "running_variance", "saved_mean",
                        "saved_inv_variance"),
            "backward": ("x", "dy", "scale", "dx", "dscale", "dbias", "saved_mean", "saved_inv_variance")}
        for call in names:
            given = {name: on[name] for name in names[call]}
            space = memory((layer.workspace_size(call, **given),), 0xff, np.uint8)
            getattr(layer, call)(**given, workspace=(space.ctypes.data, space.nbytes))
        calls = [text for plan in layer._plans.values()
                 for part in (plan.before, plan.after(plan.expected), getattr(plan, "elementwise", None)) if part
                 for text in part.calls if str(tuple(shape)) in text]
        a = x.astype("f8")
        mean, variance = a.mean(axes, keepdims=True), a.var(axes, keepdims=True)
        inverse = 1 / np.sqrt(variance + 1e-5)
        wants = dict(zip(("dx", "dscale", "dbias"), gradients(x, dy, scale, mean, inverse)))
        wants |= {"y": scale * (a - mean) * inverse + bias, "saved_mean": mean, "saved_inv_variance": inverse,
                  "running_mean": 0.9 * old[0] + 0.1 * mean,
                  "running_variance": 0.9 * old[1] + 0.1 * variance * 2 * count / (2 * count - 1)}
        errors = {name: far(globals()[name], want) for name, want in wants.items()}
    del handle, layer
    gc.collect()
    report([calls, errors, whole(), number("live").value])
    """,
        shape=(4, 6, 16, 16),
        layout=layout,
    )
    kinds = [call.partition(" SPATIAL")[0] for call in calls]
    assert kinds == ["forward_training", "forward_inference", "backward", *["forward_inference"] * 2]
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
