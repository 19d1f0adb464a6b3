"""`pybnorm.operations` over cuDNN's plans, on a double that computes on the host."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
    from pybnorm import operations
    from pybnorm.operations import ways
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


def test_backward_goes_by_ex_and_less_aligned_data_by_the_entry_point(compute: Any) -> None:
    calls, errors, slow, whole, live = compute(
        SCRIPT
        + """
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
    assert calls == ["backward SPATIAL f32 (8, 16, 9, 9) by ex", "backward SPATIAL f32 (8, 16, 9, 9)"]
    assert max(errors.values()) < 2e-5, errors
    assert slow == [0, 2], "the kernels that are slow over channels-last memory"
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


def test_sixteen_bit_data_off_their_pairs_are_copied(compute: Any) -> None:
    """cuDNN's channels-first kernels would lose the context there, and the adapter refuses the entry point."""
    calls, copies, errors, whole = compute(
        SCRIPT
        + """
    with pybnorm.Handle("cudnn") as handle:
        x, dy = (data(generator.standard_normal(shape), 1) for _ in range(2))
        scale, mean, inverse = (vector(generator.random(shape[1]) + 0.5) for _ in range(3))
        dx, dscale, dbias = data(np.nan, 1), vector(), vector()
        given = dict(
            x=x, dy=dy, scale=scale, dx=dx, dscale=dscale, dbias=dbias, saved_mean=mean, saved_inv_variance=inverse)
        calls = run(handle, "backward", **given)
        on = {n: on_device(a) for n, a in given.items()}
        want = gradients(x, dy, scale, mean, inverse)
        errors = [far(got, w) for got, w in zip((dx, dscale, dbias), want)]
        report([calls, operations.plan(handle, "backward", **on).copies, errors, whole()])
    """,
        shape=(4, 8, 6, 5),
        layout="nchw",
        dtype="bf16",
    )
    assert [call.partition(" ")[0] for call in calls] == ["axpby", "axpby", "backward", "axpby"]
    assert [copy.partition(" ")[0] for copy in copies] == ["x", "dy", "dx"]
    assert errors[0] < 2.0**-8
    assert max(errors[1:]) < 2e-5
    assert whole, "something was written outside"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("layout", "way"), [("nhwc", "pointwise"), ("nchw", "columns:1")])
@pytest.mark.parametrize("shape", [(4, 8, 6, 5), (1, 3, 7, 9)], ids=str)
def test_the_elementwise_half_of_backward_is_one_call(
    compute: Any, shape: Any, layout: str, way: str, dtype: str
) -> None:
    calls, error, kept, whole, live = compute(
        SCRIPT
        + """
    ways.TAKEN["half"] = "fast"
    with pybnorm.Handle("cudnn") as handle:
        x, dy, dx = (data(f) for f in (generator.standard_normal(shape) + 3, generator.standard_normal(shape), np.nan))
        scale, inverse = (vector(generator.random(shape[1]) + 0.5) for _ in range(2))
        mean, total, moment = (vector(generator.standard_normal(shape[1]) * 5 + 3) for _ in range(3))
        a, b, s, m, r, t, p = (v.astype("f8") for v in (x, dy, scale, mean, inverse, total, moment))
        error, ways_kept = 0.0, []
        for n in (3 * count, 5, 3 * count):
            calls = run(
                handle, "backward_elemt", x=x, dy=dy, scale=scale, mean=mean, inv_variance=inverse, sum_dy=total,
                sum_dy_xmu=moment, count=n, dx=dx)
            error = max(error, far(dx, s * r * (b - t / n - (a - m) * r**2 * p / n)))
            ways_kept.append(len(pybnorm._core.cache(handle, "ways")))
    del handle
    gc.collect()
    report([calls, error, ways_kept, whole(), number("live").value])
    """,
        shape=shape,
        layout=layout,
        dtype=dtype,
    )
    assert calls == [f"backward of sums SPATIAL {dtype} {tuple(shape)} by {way}"]
    assert error < (2.0**-8 if dtype == "bf16" else 2e-6)
    assert kept == [1, 1, 1], "a plan for each number of values"
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("shape", [(8, 6, 16, 16), (3, 5, 4, 6)], ids=str)
def test_sums_are_one_pass_that_writes_nothing_else(compute: Any, shape: Any, layout: str, dtype: str) -> None:
    calls, errors, same, whole, live = compute(
        SCRIPT
        + """
    ways.TAKEN["half"] = "fast"
    with pybnorm.Handle("cudnn") as handle:
        x, dy = (data(generator.standard_normal(shape) + far) for far in (3, 0.5))
        before = x.tobytes(), dy.tobytes()
        mean, variance, inverse, centre, total, moment = (vector() for _ in range(6))
        centre[...] = generator.standard_normal(centre.shape) + 3
        calls = run(handle, "stats", x=x, mean=mean, variance=variance, inv_variance=inverse, epsilon=1e-3)
        calls += run(handle, "backward_reduce", x=x, dy=dy, mean=centre, sum_dy=total, sum_dy_xmu=moment)
        a, b = x.astype("f8"), dy.astype("f8")
        v = a.var(axes, keepdims=True)
        errors = {
            "mean": far(mean, a.mean(axes, keepdims=True)), "variance": far(variance, v),
            "inverse": far(inverse, 1 / np.sqrt(v + 1e-3)), "sum_dy": far(total, b.sum(axes, keepdims=True)),
            "sum_dy_xmu": far(moment, (b * (a - centre)).sum(axes, keepdims=True))}
        same = before == (x.tobytes(), dy.tobytes())
    del handle
    gc.collect()
    report([calls, errors, same, whole(), number("live").value])
    """,
        shape=shape,
        layout=layout,
        dtype=dtype,
    )
    data = [call for call in calls if f"{dtype} {tuple(shape)}" in call]
    kinds = "forward_training", "backward"
    assert data == [f"{kind} sums SPATIAL {dtype} {tuple(shape)} by columns" for kind in kinds]
    assert max(errors.values()) < 2e-5, errors
    assert same
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


def test_auto_takes_the_halves_that_were_the_faster_ones_on_an_h200(compute: Any) -> None:
    taken = compute(
        SCRIPT
        + """
    taken = {}
    rest = CUDA, -1, True, None
    with pybnorm.Handle("cudnn") as handle:
        for shape in ((32, 64, 112, 112), (32, 512, 28, 28), (32, 2048, 7, 7), (4, 256, 64, 64)):
            for dtype in (pybnorm.DataType.FLOAT32, pybnorm.DataType.BFLOAT16):
                for last in (False, True):
                    order = (0, 2, 3, 1) if last else (0, 1, 2, 3)
                    strides = pybnorm._arguments.packed_strides(tuple(shape[a] for a in order))
                    x = Buffer(0, shape, tuple(strides[order.index(a)] for a in range(4)), dtype, *rest)
                    vector = Buffer(0, shape[1:2], (1,), pybnorm.DataType.FLOAT32, *rest)
                    both = dict.fromkeys(("saved_mean", "saved_inv_variance"), vector)
                    one = dict.fromkeys(("scale", "bias", "running_mean", "running_variance"), vector) | both
                    two = dict.fromkeys(("scale", "dscale", "dbias"), vector) | both
                    three = {"x": x, "dy": x, "dx": x}
                    training, backward = pybnorm.Operation.FORWARD_TRAINING, pybnorm.Operation.BACKWARD
                    for half, operation, given, data, vectors in (
                        ("forward", training, {"exponential_average_factor": 1.0}, {"x": x, "y": x}, one),
                        ("sums", backward, {}, three, two), ("dx", backward, {"share": 1e-5}, three, two)):
                        p = operations.program.Program(handle)
                        if ways.half(p, operation, (1,), data, vectors, epsilon=0.0, **given):
                            where = f"{shape[1]} {dtype.short} {'nhwc' if last else 'nchw'}"
                            taken.setdefault(half, []).append(where)
    report(taken)
    """,
        shape=(1, 1, 1, 1),
    )
    last = [f"{c} {d} nhwc" for c in (64, 512, 2048, 256) for d in ("f32", "bf16")]
    first = [f"{c} {d} nchw" for c in (64, 512, 2048) for d in ("f32", "bf16")]
    assert sorted(taken["forward"]) == ["64 bf16 nchw", "64 f32 nchw", "64 f32 nhwc"]
    assert sorted(taken["sums"]) == sorted([*first, *[row for row in last if not row.startswith("2048")]])
    assert sorted(taken["dx"]) == sorted([*first, *last])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_synchronized_program_that_is_to_repeat_takes_ways_that_do(compute: Any, deterministic: bool) -> None:
    (text,) = compute(
        SCRIPT
        + """
    from pybnorm.operations.program import Program
    with pybnorm.Handle("cudnn") as handle:
        made = Program(handle, deterministic=values["deterministic"])
        rest = pybnorm.DataType.FLOAT32, CUDA, -1, True, None
        x = Buffer(0, shape, pybnorm._arguments.packed_strides(shape), *rest)
        vector = Buffer(0, shape[1:2], (1,), *rest)
        made.gradient((1,), x, x, vector, x, vector, vector, saved=(vector, vector))
        report([step.text for step in made.steps])
    """,
        shape=(64, 96, 64, 64),
        deterministic=deterministic,
    )
    assert text.partition(" by ")[2].partition(":")[0] == ("" if deterministic else "columns")


@pytest.mark.parametrize("kernels", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("factor", [0.1, 1.0])
def test_the_statistics_of_equal_ranks_are_merged_by_one_call(
    compute: Any, ranks: int, kernels: int, factor: float
) -> None:
    calls, uneven, more, errors, whole, live = compute(
        SCRIPT
        + """
    ways.TAKEN["merge"] = "fast"
    ranks, factor, most = values["ranks"], values["factor"], number("ops")
    if values["kernels"] == 2:
        most.value = 6 * ranks - 1
    received = memory((ranks + 1, 2 * 48 + 16))
    received[:, :37] = 1e3 + 0.1 * generator.standard_normal((ranks + 1, 37))
    received[:, 48 : 48 + 37] = 1e-3 * (generator.random((ranks + 1, 37)) + 1e-3)
    means, variances = received[:ranks, :37], received[:ranks, 48 : 48 + 37]
    mean, variance, inverse, running_mean, running_variance = (vector(0.5) for _ in range(5))
    if factor == 1:
        running_mean[...] = running_variance[...] = np.nan
    given = dict(m2s=None, mean=mean, variance=variance, inv_variance=inverse, running_mean=running_mean,
                 running_variance=running_variance, exponential_average_factor=factor, epsilon=1e-3)
    with pybnorm.Handle("cudnn") as handle:
        calls = run(handle, "gather_stats", means=means, variances=variances, counts=[5] * ranks, **given)
        a, v = means.astype("f8"), variances.astype("f8")
        v = v.mean(0) + a.var(0)
        keep = (1 - factor) ** 2
        wants = {"mean": a.mean(0), "variance": v, "inverse": 1 / np.sqrt(v + 1e-3),
                 "running_mean": 0.5 * keep + (1 - keep) * a.mean(0),
                 "running_variance": 0.5 * keep + (1 - keep) * v * 5 * ranks / (5 * ranks - 1)}
        errors = {n: far(globals()[n].reshape(-1), want, 0.0) for n, want in wants.items()}
        rest = {n: on_device(a) if isinstance(a, np.ndarray) else a for n, a in given.items()}
        both = {"means": on_device(means), "variances": on_device(variances)}
        uneven = operations.plan(handle, "gather_stats", **both, counts=[5] * (ranks - 1) + [4], **rest).calls
        both = {"means": on_device(received[:, :37]), "variances": on_device(received[:, 48 : 48 + 37])}
        more = operations.plan(handle, "gather_stats", **both, counts=[5] * (ranks + 1), **rest).calls
    del handle
    gc.collect()
    report([calls, uneven, more, errors, whole(), number("live").value])
    """,
        shape=(1, 37, 1, 1),
        ranks=ranks,
        kernels=kernels,
        factor=factor,
    )
    assert calls == [f"merge f32 {ranks, 37} by merge"]
    assert len(uneven) > 8
    assert (len(more) == 1) == (ranks < 8 and kernels == 1)
    assert max(errors.values()) < 1e-6, errors
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"


@pytest.mark.parametrize("way", ["plain", "fast"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_synchronized_batch_norm_over_plans(compute: Any, layout: str, way: str) -> None:
    """Of two ranks, the other of which has the same data."""
    calls, errors, whole, live = compute(
        SCRIPT
        + """
    from pybnorm.sync import SyncBatchNorm
    ways.TAKEN.update(dict.fromkeys(ways.TAKEN, values["way"]))
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
        way=way,
    )
    kinds = [call.partition(" SPATIAL")[0] for call in calls]
    elements = ["backward of sums"] if way == "fast" else ["forward_inference"] * 2
    sums = " sums" if way == "fast" else ""
    assert kinds == [f"forward_training{sums}", "forward_inference", f"backward{sums}", *elements]
    assert max(errors.values()) < 2e-5, errors
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"
