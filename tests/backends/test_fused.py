"""Batch norm, residual and ReLU in one call of a plan: judged where a library has it, refused by name elsewhere."""

import dataclasses
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import test_calls
from place import device_of

import pybnorm
from pybnorm import Activation, DataType, Mode
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import generate, numpy_dtype
from pybnorm.check.language.problem import Problem

DIMS = ["8x64x9x7", "3x4x5x5", "16x12x17x13", "64x16", "8x16x33", "2x8x4x5x6", "4x1024x3x3", "8x64x56x56"]
HAVE_IT = {"cudnn", "native", "native_cuda", "native_rocm"}
STATISTICS = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")


def wrong_of(problem, inputs, seen):
    """Names of the outputs that are not PASS."""
    expected = bounds.expect(problem, inputs)
    verdicts = {n: bounds.judge(expected, n, seen[n].reshape(expected.shape(n))) for n in expected.outputs}
    return [n for n, v in verdicts.items() if v.status != Status.PASS]


class Case:
    """Inputs of calls of training and backward."""

    def __init__(self, dims, dtype, z):
        rest = f"spatial,{dtype},nhwc,{dims},fill=randn,kappa=2,activation=relu,residual={int(z)}"
        self.problem, self.backward = (Problem.parse(f"{w},{rest}") for w in ("train", "backward"))
        self.dtype, self.inputs, self.given = self.problem.dtype, generate(self.problem), generate(self.backward)
        self.z, self.dy = self.inputs.z, self.given.dy

    def judge_forward(self, seen):
        """Names of the outputs that are wrong."""
        return wrong_of(self.problem, self.inputs, seen)

    def judge_backward(self, seen, forward):
        """The same; `forward` is what backward was given of it."""
        shape = self.backward.parameter_dims
        given = {n: forward[n].reshape(shape) for n in ("saved_mean", "saved_inv_variance")}
        given |= {n: getattr(self.inputs, n) for n in ("x", "scale", "bias")}
        given |= {} if self.z is None else {"y": forward["y"]}
        return wrong_of(self.backward, dataclasses.replace(self.given, **given), seen)


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
@pytest.mark.parametrize("z", [0, 1], ids=["activation", "residual"])
def test_fused_inference_is_within_the_bound(handle, z, dtype, dims):
    fused(handle)
    line = f"infer,spatial,{dtype},nhwc,{dims},fill=randn,kappa=2,activation=relu,residual={z}"
    for algorithm in ("auto", "pointwise") if handle.backend == "cudnn" else ("auto", "plain"):
        case = test_calls.Case(handle, Problem.parse(line))
        assert case.run_plan(algorithm).algorithm.startswith(("pointwise", "plain"))
        case.judge()


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
