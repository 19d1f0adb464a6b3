"""Batch norm, residual and ReLU in one call of a plan: judged where a library has it, refused by name elsewhere."""

import dataclasses
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from place import device_of
from test_calls import Case

import pybnorm
from pybnorm import Activation, Mode
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem

DIMS = ["8x64x9x7", "3x4x5x5", "16x12x17x13", "64x16", "8x16x33", "2x8x4x5x6", "4x1024x3x3", "8x64x56x56"]
HAVE_IT = {"cudnn", "native", "native_cuda", "native_rocm"}
STATISTICS = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")


def fused(handle, algorithm="auto"):
    if not HAVE_IT & {handle.backend} or (handle.backend != "cudnn" and algorithm != "auto"):
        what = "no plan with an activation; that it refuses is tested" if algorithm == "auto" else f"no {algorithm}"
        pytest.skip(f"{handle.backend} has {what}")


class Pair:
    """Training with an activation, and its backward on what forward has left."""

    def __init__(self, handle, dims, dtype, z, algorithm="auto", inputs=None):
        fused(handle)
        words = (f"{w},spatial,{dtype},nhwc,{dims},fill=randn,kappa=2,activation=relu" for w in ("train", "backward"))
        problem, self.problem = (Problem.parse(f"{line},residual={int(z)}") for line in words)
        self.forward = Case(handle, problem, inputs=inputs)
        self.plan, run = self.forward.planned(algorithm)
        size, self.reserve = self.plan.reserve_size, None
        if size:
            self.space = self.forward.device.empty_bytes(size)
            self.reserve = self.space.pointer, size
        run(reserve=self.reserve)
        self.forward.device.synchronize()

    def backward(self, algorithm="auto"):
        """The case, when its call is made, and its plan."""
        case, made, inputs = self.forward, self.forward.made, self.forward.inputs
        seen = {n: case.device.to_numpy(made[n]) for n in ("saved_mean", "saved_inv_variance", "y")}
        seen |= {n: getattr(inputs, n) for n in ("x", "scale", "bias")}
        if not self.problem.residual:
            seen.pop("y")
        given = dataclasses.replace(generate(self.problem), **seen)
        backward = Case(case.handle, self.problem, inputs=given)
        plan, run = backward.planned(algorithm)
        run(reserve=self.reserve)
        return backward, plan


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("z", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("algorithm", ["auto", "ex", "graph", "graph:1", "graph:2"])
def test_fused_calls_are_within_the_bound(handle, algorithm, z, dtype, dims):
    fused(handle, algorithm)
    try:
        pair = Pair(handle, dims, dtype, z, algorithm)
        backward, plan = pair.backward(algorithm)
    except (pybnorm.UnsupportedError, pybnorm.NotSupportedError) as error:
        # NVIDIA documents the fused kernels for float16 images; what else a version takes is its own answer.
        whole = int(dims.split("x")[1]) % 8 == 0  # bytes of a mask, which the graph takes
        if handle.backend != "cudnn" or (
            dtype == "f16"
            and dims.count("x") == 3
            and (algorithm in ("auto", "ex") or (algorithm == "graph" and whole))
        ):
            raise
        pytest.skip(f"cudnn fuses no {'residual' if z else 'activation'} for {dtype} {dims}: {error.status_name}")
    ways = {p.algorithm.partition(":")[0] for p in (pair.plan, plan)}
    assert ways <= {"ex", "graph"} or ways == {"plain"}
    assert not z or len(ways) == 1, "one reads what the other left"
    assert pair.plan.reserve_size == plan.reserve_size
    pair.forward.judge()
    backward.judge()


def test_the_same_call_gives_the_same(handle):
    first = Pair(handle, DIMS[0], "f16", True)
    second = Pair(handle, DIMS[0], "f16", True, first.plan.algorithm)
    assert first.forward.outputs() == second.forward.outputs()
    assert first.backward()[0].outputs() == second.backward()[0].outputs()


def test_a_nan_stays_in_its_channel(handle):
    def seen(case):
        return {n: case.device.to_numpy(array).squeeze() for n, array in case.made.items()}

    case = Pair(handle, DIMS[0], "f16", True).forward
    right, x = seen(case), case.inputs.x.copy()
    x[3, 5, 2, 2] = np.nan
    found = seen(Pair(handle, DIMS[0], "f16", True, inputs=dataclasses.replace(case.inputs, x=x)).forward)
    others = np.arange(64) != 5
    # native sums the channels of a part again, in double, where one of them needs it: the last bit may change
    near = 0 if handle.backend == "cudnn" else 2 * np.spacing(np.abs(right["y"][:, others]))
    assert (np.abs(found["y"][:, others] - right["y"][:, others]) <= near).all()
    assert (np.isnan(found["y"][:, 5]) | (found["y"][:, 5] == 0)).all()  # max(NaN, 0) is either, by the kernel
    assert np.isnan(found["saved_mean"][5])
    for name in STATISTICS:
        rtol = 0 if handle.backend == "cudnn" else 1e-6
        assert np.allclose(found[name][others], right[name][others], rtol=rtol, atol=0)


@pytest.mark.parametrize("dims", [*DIMS, "8x7x5x3"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("z", [0, 1], ids=["activation", "residual"])
def test_fused_inference_is_within_the_bound(handle, z, dtype, dims):
    fused(handle)
    line = f"infer,spatial,{dtype},nhwc,{dims},fill=randn,kappa=2,activation=relu,residual={z}"
    for algorithm in ("auto", "pointwise") if handle.backend == "cudnn" else ("auto", "plain"):
        case = Case(handle, Problem.parse(line))
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
