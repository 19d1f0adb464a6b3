"""Batch norm, residual and ReLU in one call of a plan: judged where a library has it, refused by name elsewhere.

y = relu(bn(x) + z) is judged by the bound of bn(x) and the roundings behind it; ReLU makes no error larger. Backward's
mask is not continuous: where bn(x) + z is within that bound of 0, dy is 0, so that nothing hangs on the mask. With the
masked dy in place of dy the right dx, dscale and dbias are those of batch norm alone, and so are their bounds.
"""

import dataclasses
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from place import device_of

import pybnorm
from pybnorm import Activation, DataType, Mode
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import generate, numpy_dtype, round_to
from pybnorm.check.language.problem import Problem

DIMS = ["8x64x9x7", "3x4x5x5", "16x12x17x13", "64x16", "8x16x33", "2x8x4x5x6", "4x1024x3x3", "8x64x56x56"]
HAVE_IT = {"cudnn", "native", "native_cuda"}
STATISTICS = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")


def before_relu(expected, z):
    """What the activation is applied to, in float64, and a bound of what is stored behind it."""
    problem = expected.problem
    result, bound = np.empty(problem.dims), np.empty(problem.dims)
    for part in expected.parts("y", None, bounds.tiers(problem, "y")[:1]):
        result[part.index], bound[part.index] = part.reference, part.classes[0][0]
    if z is not None:
        result += z
    p = bounds.precision(problem.dtype)  # the sum may be rounded once more, and so is what is stored
    return result, bound + 2 * p.u_out * (np.abs(result) + bound) + p.tiny_out


class Case:
    """Inputs of a forward and a backward call, and what is right of their outputs."""

    def __init__(self, dims, dtype, z):
        self.problem = Problem.parse(f"train,spatial,{dtype},nhwc,{dims},fill=randn,kappa=2")
        backward = Problem.parse(f"backward,spatial,{dtype},nhwc,{dims},fill=randn")
        self.dtype, self.z = self.problem.dtype, None
        self.inputs = generate(self.problem)
        self.expected = bounds.expect(self.problem, self.inputs)
        rng = np.random.default_rng(29)
        if z:
            self.z = round_to(rng.standard_normal(self.problem.dims), self.dtype)
        self.result, self.bound = result, _ = before_relu(self.expected, self.z)
        self.near = np.abs(result) <= self.bound
        assert self.near.mean() < 0.05
        self.dy = round_to(np.where(self.near, 0, rng.standard_normal(result.shape)), self.dtype)
        self.masked = np.where(result > 0, self.dy, np.zeros((), self.dy.dtype))
        assert 0.2 < (self.masked != 0).mean() < 0.8
        self.backward = backward

    def judge_forward(self, seen):
        """Names of the outputs that are wrong."""
        with np.errstate(invalid="ignore"):
            right = np.abs(seen["y"].astype(np.float64) - np.maximum(self.result, 0)) <= self.bound
        wrong = [] if right.all() else ["y"]
        return wrong + [
            n for n in STATISTICS if bounds.judge(self.expected, n, seen[n].reshape(-1)).status != Status.PASS
        ]

    def judge_backward(self, seen, saved):
        """The same; `saved` are the statistics that backward was given."""
        shape = self.backward.parameter_dims
        given = {n: saved[n].reshape(shape) for n in ("saved_mean", "saved_inv_variance")}
        inputs = dataclasses.replace(
            generate(self.backward), x=self.inputs.x, scale=self.inputs.scale, dy=self.masked, **given
        )
        expected = bounds.expect(self.backward, inputs)
        wrong = [
            n for n in ("dx", "dscale", "dbias")
            if bounds.judge(expected, n, seen[n].reshape(expected.shape(n))).status != Status.PASS
        ]  # fmt: skip
        if self.z is not None and not (seen["dz"].astype(np.float64) == self.masked.astype(np.float64)).all():
            wrong.append("dz")
        return wrong


# ---------------------------------------------------------------- the judge, on what NumPy computes


def computed(case, defect=""):
    """Both calls in float32, with one mistake or none."""
    f = np.float32
    axes = (0, *range(2, case.inputs.x.ndim))
    x, n = case.inputs.x.astype(f), case.problem.m
    scale, bias = case.inputs.scale.astype(f), case.inputs.bias.astype(f)
    mean, variance = x.mean(axes, keepdims=True, dtype=np.float64), x.var(axes, keepdims=True, dtype=np.float64)
    inverse = (1 / np.sqrt(variance + case.problem.epsilon)).astype(f)
    normal = (x - mean.astype(f)) * inverse
    bn = normal * scale + bias
    z = np.zeros((), f) if case.z is None or defect == "no z" else case.z.astype(f)
    result = bn + z
    y = result if defect == "no relu" else np.maximum(result, 0)
    if defect == "relu before z":
        y = np.maximum(bn, 0) + z
    factor = case.problem.factor
    unbiased = variance if defect == "biased" else variance * n / (n - 1)
    forward = {
        "y": round_to(y.astype(np.float64), case.dtype),
        "saved_mean": mean.astype(f),
        "saved_inv_variance": inverse,
        "running_mean": ((1 - factor) * case.inputs.mean + factor * mean).astype(f),
        "running_variance": ((1 - factor) * case.inputs.variance + factor * unbiased).astype(f),
    }
    mask = {"no mask": np.ones_like(bn), "mask of bn": bn > 0}.get(defect, result > 0)
    g = np.where(mask, case.dy.astype(f), f(0))
    dbias, dscale = g.sum(axes, keepdims=True), (g * normal).sum(axes, keepdims=True)
    dx = scale * inverse * (g - dbias / f(n) - normal * dscale / f(n))
    backward = {"dx": round_to(dx.astype(np.float64), case.dtype), "dscale": dscale, "dbias": dbias}
    backward["dz"] = case.dy if defect == "dz is dy" else round_to(g.astype(np.float64), case.dtype)
    return forward, backward


@pytest.mark.parametrize("dims", DIMS[:-1])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_judge_accepts_what_is_right(dtype, dims):
    for z in (False, True):
        case = Case(dims, dtype, z)
        forward, backward = computed(case)
        assert case.judge_forward(forward) == []
        assert case.judge_backward(backward, forward) == []


@pytest.mark.parametrize(("defect", "z", "forward", "backward"), [
    ("no relu", False, ["y"], []),
    ("no relu", True, ["y"], []),
    ("no z", True, ["y"], ["dx", "dscale", "dbias", "dz"]),
    ("relu before z", True, ["y"], []),
    ("biased", False, ["running_variance"], []),
    ("no mask", False, [], ["dx", "dscale", "dbias"]),
    ("no mask", True, [], ["dx", "dscale", "dbias", "dz"]),
    ("mask of bn", True, [], ["dx", "dscale", "dbias", "dz"]),
    ("dz is dy", True, [], ["dz"]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_judge_sees_what_is_wrong(dtype, defect, z, forward, backward):
    case = Case(DIMS[0], dtype, z)
    seen = computed(case, defect)
    assert case.judge_forward(seen[0]) == forward
    assert case.judge_backward(seen[1], computed(case)[0]) == backward


class Inference:
    """Inputs of a forward inference call, and what is right of y."""

    def __init__(self, dims, dtype, z):
        self.problem = Problem.parse(f"infer,spatial,{dtype},nhwc,{dims},fill=randn,kappa=2")
        self.dtype, self.inputs = self.problem.dtype, generate(self.problem)
        values = np.random.default_rng(31).standard_normal(self.problem.dims)
        self.z = round_to(values, self.dtype) if z else None
        self.result, self.bound = before_relu(bounds.expect(self.problem, self.inputs), self.z)

    def right(self, y):
        with np.errstate(invalid="ignore"):
            return bool((np.abs(y.astype(np.float64) - np.maximum(self.result, 0)) <= self.bound).all())


@pytest.mark.parametrize("z", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_judge_of_inference(dtype, z):
    case = Inference(DIMS[0], dtype, z)
    inputs, f = case.inputs, np.float32
    root = 1 / np.sqrt(inputs.variance.astype(f) + f(case.problem.epsilon))
    bn = (inputs.x.astype(f) - inputs.mean) * root * inputs.scale + inputs.bias
    total = bn if case.z is None else bn + case.z.astype(f)

    def stored(values):
        return round_to(values.astype(np.float64), case.dtype)

    assert case.right(stored(np.maximum(total, 0)))
    assert not case.right(stored(total))
    assert not case.right(stored(np.maximum(-total, 0)))
    assert z == (not case.right(stored(np.maximum(bn, 0))))


# ---------------------------------------------------------------- on a device


def fused(handle, algorithm="auto"):
    if not HAVE_IT & {handle.backend} or (handle.backend != "cudnn" and algorithm != "auto"):
        what = "no plan with an activation; that it refuses is tested" if algorithm == "auto" else f"no {algorithm}"
        pytest.skip(f"{handle.backend} has {what}")
    return device_of(handle)


def channels_last(array):
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def put(device, case, array):
    array = channels_last(array)
    if case.dtype == DataType.BFLOAT16:
        return device.from_numpy(array.view(np.uint16), DataType.BFLOAT16)
    return device.from_numpy(array)


class OnDevice:
    """The arrays of a case on the device, and its plans."""

    def __init__(self, handle, case, algorithm="auto"):
        self.device, self.case = fused(handle), case
        self.kept = []
        inputs, c = case.inputs, case.problem.dims[1]
        nan = np.full(inputs.x.shape, np.nan, inputs.x.dtype)
        self.memory = {n: self.data(v) for n, v in {"x": inputs.x, "dy": case.dy, "y": nan, "dx": nan}.items()}
        if case.z is not None:
            self.memory |= {"z": self.data(case.z), "dz": self.data(nan)}
        lost = np.full(c, np.nan, np.float32)
        for name, values in {
            "scale": inputs.scale, "bias": inputs.bias, "running_mean": inputs.mean,
            "running_variance": inputs.variance, "saved_mean": lost, "saved_inv_variance": lost, "dscale": lost,
            "dbias": lost,
        }.items():  # fmt: skip
            self.memory[name] = self.device.from_numpy(np.ascontiguousarray(values.reshape(-1)))
        p = case.problem
        options = {"activation": "relu", "z": self.memory.get("z"), "epsilon": p.epsilon, "algorithm": algorithm}
        x, y, dx = (self.memory[n] for n in ("x", "y", "dx"))
        self.forward = handle.plan_forward_training(x, y, exponential_average_factor=p.factor, **options)
        self.backward = handle.plan_backward(x, self.memory["dy"], dx, **options | {"z": self.memory.get("dz")})
        self.reserve = self.space(self.forward.reserve_size)

    def data(self, array):
        return put(self.device, self.case, array)

    def space(self, size):
        if size == 0:
            return None
        self.kept.append(self.device.empty_bytes(size))
        return self.kept[-1].pointer, size

    def named(self, *names):
        return {n: self.memory[n] for n in names if n in self.memory}

    def run_forward(self):
        names = ("x", "scale", "bias", "y", *STATISTICS, "z")
        self.forward(**self.named(*names), workspace=self.space(self.forward.workspace_size), reserve=self.reserve)
        return self.read("y", *STATISTICS)

    def run_backward(self):
        names = ("x", "dy", "scale", "dx", "dscale", "dbias", "saved_mean", "saved_inv_variance", "y", "bias", "dz")
        self.backward(**self.named(*names), workspace=self.space(self.backward.workspace_size), reserve=self.reserve)
        return self.read("dx", "dscale", "dbias", "dz")

    def read(self, *names):
        self.device.synchronize()
        seen = {n: self.device.to_numpy(b) for n, b in self.named(*names).items()}
        kind = numpy_dtype(self.case.dtype)
        return {n: v.view(kind) if v.dtype == np.uint16 else v for n, v in seen.items()}


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("z", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("algorithm", ["auto", "ex", "graph", "graph:1", "graph:2"])
def test_fused_calls_are_within_the_bound(handle, algorithm, z, dtype, dims):
    fused(handle, algorithm)
    case = Case(dims, dtype, z)
    try:
        on = OnDevice(handle, case, algorithm)
        before = on.read("x", "dy", "z", "scale", "bias")
        seen = on.run_forward()
        gradients = on.run_backward()
    except (pybnorm.UnsupportedError, pybnorm.NotSupportedError) as error:
        # NVIDIA documents the fused kernels for float16 images; what else a version takes is its own answer.
        whole = case.problem.dims[1] % 8 == 0  # bytes of a mask, which the graph takes
        if handle.backend != "cudnn" or (
            dtype == "f16"
            and dims.count("x") == 3
            and (algorithm in ("auto", "ex") or (algorithm == "graph" and whole))
        ):
            raise
        pytest.skip(f"cudnn fuses no {'residual' if z else 'activation'} for {dtype} {dims}: {error.status_name}")
    ways = {plan.algorithm.partition(":")[0] for plan in (on.forward, on.backward)}
    assert ways <= {"ex", "graph"} or ways == {"plain"}
    assert not z or len(ways) == 1, "one reads what the other left"
    assert on.forward.reserve_size == on.backward.reserve_size
    assert case.judge_forward(seen) == []
    assert case.judge_backward(gradients, seen) == []
    after = on.read("x", "dy", "z", "scale", "bias", "y")
    assert after.pop("y").tobytes() == seen["y"].tobytes()
    assert {n: v.tobytes() for n, v in after.items()} == {n: v.tobytes() for n, v in before.items()}


def test_the_same_call_gives_the_same(handle):
    fused(handle)
    first = OnDevice(handle, Case(DIMS[0], "f16", True))
    second = OnDevice(handle, Case(DIMS[0], "f16", True), algorithm=first.forward.algorithm)
    for run in ("run_forward", "run_backward"):
        one, two = getattr(first, run)(), getattr(second, run)()
        assert {n: v.tobytes() for n, v in one.items()} == {n: v.tobytes() for n, v in two.items()}


def test_a_nan_stays_in_its_channel(handle):
    fused(handle)
    case = Case(DIMS[0], "f16", True)
    right = OnDevice(handle, case).run_forward()
    case.inputs.x[3, 5, 2, 2] = np.nan
    seen = OnDevice(handle, case).run_forward()
    others = np.arange(64) != 5
    # native sums the channels of a part again, in double, where one of them needs it: the last bit may change
    near = 0 if handle.backend == "cudnn" else 2 * np.spacing(np.abs(right["y"][:, others]))
    assert (np.abs(seen["y"][:, others] - right["y"][:, others]) <= near).all()
    assert (np.isnan(seen["y"][:, 5]) | (seen["y"][:, 5] == 0)).all()  # max(NaN, 0) is either, by the kernel
    assert np.isnan(seen["saved_mean"][5])
    for name in STATISTICS:
        assert np.allclose(
            seen[name][others], right[name][others], rtol=0 if handle.backend == "cudnn" else 1e-6, atol=0
        )


@pytest.mark.parametrize("dims", [*DIMS, "8x7x5x3"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("z", [False, True], ids=["activation", "residual"])
def test_fused_inference_is_within_the_bound(handle, z, dtype, dims):
    device = fused(handle)
    case = Inference(dims, dtype, z)
    inputs, kind = case.inputs, numpy_dtype(case.dtype)
    x, y = (put(device, case, a) for a in (inputs.x, np.full(inputs.x.shape, np.nan, kind)))
    residual = {} if case.z is None else {"z": put(device, case, case.z)}
    vectors = [
        device.from_numpy(np.ascontiguousarray(v.reshape(-1)))
        for v in (inputs.scale, inputs.bias, inputs.mean, inputs.variance)
    ]
    for algorithm in ("auto", "pointwise") if handle.backend == "cudnn" else ("auto", "plain"):
        plan = handle.plan_forward_inference(
            x, y, algorithm=algorithm, epsilon=case.problem.epsilon, activation="relu", **residual
        )
        assert plan.algorithm.startswith(("pointwise", "plain"))
        space = device.empty_bytes(plan.workspace_size) if plan.workspace_size else None
        plan(x, *vectors, y, None if space is None else (space.pointer, space.nbytes), **residual)
        device.synchronize()
        assert case.right(device.to_numpy(y).view(kind)), algorithm


def test_recorded_errors_of_good_calls(handle):
    if handle.backend != "cudnn":
        with pytest.raises(pybnorm.UnsupportedError, match="record no errors"):
            handle.query_runtime_error()
        return
    device = device_of(handle)
    x = device.from_numpy(np.random.default_rng(3).standard_normal((16, 8, 32, 32)).astype(np.float32))
    y = device.from_numpy(np.full((16, 8, 32, 32), np.nan, np.float32))
    ones, zeros = (device.from_numpy(np.full(8, v, np.float32)) for v in (1, 0))
    for mode in ("blocking", "nonblocking", "raw"):
        handle.forward_training(x, ones, zeros, y, mode=Mode.SPATIAL_PERSISTENT)
        device.synchronize()
        assert handle.query_runtime_error(mode) is None, mode
    with pytest.raises(pybnorm.ArgumentError, match="mode"):
        handle.query_runtime_error("raise")


def test_an_overflow_of_the_persistent_kernels_is_asked_for_by_name(handle):
    """x beyond 1e10: sums in fixed point overflow. That it is recorded is documented for some kernels only."""
    if handle.backend != "cudnn":
        pytest.skip(f"{handle.backend} has no such kernels")
    device = device_of(handle)
    values = 1e15 * np.random.default_rng(3).standard_normal((64, 32, 112, 112)).astype(np.float32)
    x, y = (device.from_numpy(v) for v in (values, np.empty_like(values)))
    ones, zeros = (device.from_numpy(np.full(32, v, np.float32)) for v in (1, 0))
    handle.forward_training(x, ones, zeros, y, mode=Mode.SPATIAL_PERSISTENT)
    found = handle.query_runtime_error("blocking")
    assert found in (None, "CUDNN_STATUS_RUNTIME_FP_OVERFLOW")
    assert handle.query_runtime_error("blocking") is None  # forgotten


# ---------------------------------------------------------------- everywhere


def test_other_backends_refuse(handle):
    if handle.backend in HAVE_IT:
        pytest.skip(f"{handle.backend} has it")
    with pybnorm.TensorDescriptor(handle.backend, "f32", (2, 8, 3, 5)) as x:
        for make in (handle.plan_forward_training, handle.plan_forward_inference, handle.plan_backward):
            for options in ({}, {"z": True}, {"z": x}):
                tensor = "dz" if make == handle.plan_backward else "z"
                match = f"no tensor '{tensor}' here: Capability.RESIDUAL" if options else "activation"
                with pytest.raises(pybnorm.UnsupportedError, match=match) as caught:
                    make(x, activation=Activation.RELU, **options)
                assert caught.value.backend == handle.backend
            with pytest.raises(pybnorm.ArgumentError, match="z"):
                make(x, z=True)
            with pytest.raises(pybnorm.ArgumentError, match="activation"):
                make(x, activation="clamp")
            plan = make(x, activation="none", z=False)
            assert plan.reserve_size == 0


def test_a_lost_context_is_named_and_left_in_order(handle):
    """In a process of its own: an address that is mapped nowhere, in a call that is right otherwise."""
    if handle.backend != "cudnn":
        pytest.skip(f"{handle.backend}: written with cuDNN's")
    device_of(handle)
    script = """
        import gc, sys
        import numpy as np
        import pybnorm
        from pybnorm import devices

        unraisable = []
        sys.unraisablehook = lambda hook: unraisable.append(repr(hook.exc_value))
        handle = pybnorm.Handle("cudnn")
        device = devices.device_for(handle.library.device_type, 0)
        handle.set_stream(device.stream)
        array = np.zeros((4, 8, 3, 5), np.float32)
        y, one = device.from_numpy(array), device.from_numpy(np.ones(8, np.float32))
        plan = handle.plan_forward_training(y, algorithm="plain", running=False, saved=False)
        with pybnorm.TensorDescriptor("cudnn", "f32", (4, 64, 4, 4), (1024, 1, 256, 64)) as x:
            graph = handle.plan_forward_training(x, algorithm="graph")
            fused = handle.plan_forward_training(x, activation="relu", z=True)
        other = handle.plan_forward_training(y, algorithm="plain", running=False, saved=False)
        plan(0x1000, one, one, y.pointer)
        try:
            device.synchronize()
        except Exception as error:
            print("synchronize:", type(error).__name__)
        else:
            sys.exit("the kernel read an address that is mapped nowhere")
        try:
            other(y.pointer, one.pointer, one.pointer, y.pointer + 4096)
        except pybnorm.ContextLostError as error:
            assert isinstance(error, pybnorm.ExecutionError)
            assert "nothing more can run" in str(error), error
            assert "CUDA_ERROR" in str(error), error
            print("call:", error)
        else:
            sys.exit("a call after that succeeded")
        try:
            pybnorm.Handle("cudnn").close()
        except pybnorm.VendorError as error:
            print("handle:", error)
        del plan, graph, fused
        gc.collect()
        try:
            handle.close()
        except pybnorm.VendorError as error:
            print("close:", error)
        assert handle.closed
        handle.close()
        del other, handle
        gc.collect()
        assert not unraisable, unraisable
        print("in order")
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("in order"), done.stdout + done.stderr
    device_of(handle).synchronize()  # this process' context is not that one
