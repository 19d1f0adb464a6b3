"""Calls that return their results: as right as the handle's, in the caller's framework, and found again cheaply."""

import functools
import gc
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from c_table import Exchanging
from frameworks import NUMPY
from tables import table

import pybnorm
from pybnorm import devices, functional
from pybnorm._arrays import as_buffer
from pybnorm._core import current_stream, describe, device_types
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand
from pybnorm.check.run import runner
from pybnorm.enums import DataType, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError

LINES = [
    "train/infer/backward,spatial,f32/bf16/f16/f64,nchw/nhwc,4x8x6x5",
    "train/infer/backward,spatial,f32,nchw/nhwc,2x16x3x4x5,fill=randn,kappa=3",
    "train/infer/backward,spatial,f32/bf16,nchw,32x7,fill=randn",
    "train/infer/backward,peract,f32,nchw,16x5x3x4,fill=randn",
    "train,spatial,f32,nchw,4x8x6x5,running=0",
    "train,spatial,f32,nchw,4x8x6x5,unbiased=0",
    "backward,spatial,f32,nchw,4x8x6x5,saved=0",
]
PROBLEMS = [problem for line in LINES for problem in expand(line)]
SHAPE = (4, 8, 6, 5)


def laid_out(values, problem):
    """The values in the problem's dtype and strides."""
    order = sorted(range(values.ndim), key=lambda axis: -problem.strides[axis])
    dense = np.ascontiguousarray(np.asarray(values).transpose(order)).astype(NUMPY[problem.dtype])
    return dense.transpose([order.index(axis) for axis in range(values.ndim)])


def perform(frame, problem, inputs, **options):
    """Outputs by name, as the framework's arrays."""

    def data(name):
        return frame.put(laid_out(getattr(inputs, name), problem))

    def vector(name):
        values = np.array(getattr(inputs, name), NUMPY[problem.parameter_dtype]).reshape(problem.parameter_dims)
        return frame.put(values)

    common = {"mode": problem.mode, "epsilon": problem.epsilon, **options}
    if problem.operation == Operation.FORWARD_TRAINING:
        running = {}
        if problem.running:
            running = {"running_mean": vector("mean"), "running_variance": vector("variance")}
            if not frame.mutable:
                running = {name: np.array(frame.get(array)) for name, array in running.items()}
        factor = {"exponential_average_factor": problem.factor, "unbiased": problem.unbiased}
        found = functional.batch_norm_training(
            data("x"), vector("scale"), vector("bias"), **running, **factor, **common
        )
        return dict(zip(("y", "saved_mean", "saved_inv_variance"), found, strict=True)) | running
    if problem.operation == Operation.FORWARD_INFERENCE:
        names = {"scale": "scale", "bias": "bias", "running_mean": "mean", "running_variance": "variance"}
        vectors = {name: vector(value) for name, value in names.items()}
        return {"y": functional.batch_norm_inference(data("x"), **vectors, **common)}
    saved = [vector("saved_mean"), vector("saved_inv_variance")] if problem.saved else []
    found = functional.batch_norm_backward(data("x"), data("dy"), vector("scale"), *saved, **common)
    return dict(zip(("dx", "dscale", "dbias"), found, strict=True))


@table("problem", PROBLEMS)
def test_results_are_within_the_bound(frame, problem):
    if frame.name == "cupy" and problem.dtype == DataType.BFLOAT16:
        pytest.skip("CuPy has no arrays of ml_dtypes' bfloat16")
    inputs = generate(problem)
    expected = bounds.expect(problem, inputs)
    try:
        found = perform(frame, problem, inputs)
    except pybnorm.UnsupportedError as error:
        assert error.text
        with pybnorm.Handle(frame.backend) as handle:
            session = runner.Session(frame.backend, handle, devices.device_for(handle.library.device_type, 0))
            with pytest.raises(pybnorm.UnsupportedError):
                runner.execute(problem, inputs, session)
        return
    except pybnorm.ArgumentTypeError as error:  # what takes the place of a call needs a workspace
        version = pybnorm.load(frame.backend).version
        assert "without an allocator" in str(error)
        combination = problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
        refused = not pybnorm.capability(frame.backend, *combination)[0]
        assert refused or not problem.unbiased or pybnorm.known_defects(frame.backend, problem, version)
        return
    frame.synchronize()
    for name in expected.outputs:
        values = np.array(found[name] if isinstance(found[name], np.ndarray) else frame.get(found[name]))
        verdict = bounds.judge(expected, name, values.reshape(np.shape(expected.outputs[name])))
        # On a GPU the plan may be the entry point itself, whose own tests say where it is of the lesser class.
        assert verdict.status in ((Status.PASS, Status.WARN) if frame.gpu else (Status.PASS,)), (name, verdict)
    assert all(frame.is_mine(array) for name, array in found.items() if not name.startswith("running"))
    main = found["dx" if problem.operation == Operation.BACKWARD else "y"]
    if frame.name != "jax":  # which has no strides
        assert frame.strides(main) == tuple(problem.strides)


class Set:
    """Arrays of one small problem, and what is right."""

    def __init__(self, frame, shape=SHAPE):
        rng = np.random.default_rng(5)
        self.frame = frame
        self.np_x, self.np_dy = (rng.normal(0.5, 1.0, shape).astype(np.float32) for _ in range(2))
        self.np_scale, self.np_bias = (rng.uniform(0.5, 1.5, shape[1]).astype(np.float32) for _ in range(2))
        for name in ("x", "dy", "scale", "bias"):
            setattr(self, name, frame.put(getattr(self, f"np_{name}")))

    def right(self, scale=None, bias=None):
        scale = self.np_scale if scale is None else scale
        bias = self.np_bias if bias is None else bias
        x = self.np_x.astype(np.float64)
        mean, variance = (f(x, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.var))
        return (x - mean) / np.sqrt(variance + 1e-5) * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)

    def got(self, array):
        self.frame.synchronize()
        return np.asarray(self.frame.get(array), np.float64)


@pytest.fixture
def arrays(frame):
    return Set(frame)


def ready():
    return functional._local.ready


def test_scale_and_bias_may_be_left_out(arrays):
    if arrays.frame.name == "dlpack":  # whose constants nobody here can make
        with pytest.raises(pybnorm.ArgumentError, match="scale"):
            functional.batch_norm_training(arrays.x, None, arrays.bias)
        return
    ones, zeros = np.ones(8), np.zeros(8)
    for scale, bias in [(None, arrays.bias), (arrays.scale, None), (None, None)]:
        right = arrays.right(ones if scale is None else None, zeros if bias is None else None)
        for _ in range(2):
            y, mean, inv = functional.batch_norm_training(arrays.x, scale, bias)
            assert np.allclose(arrays.got(y), right, atol=1e-5)
            assert arrays.got(mean).shape == arrays.got(inv).shape == (8,)
        running = {"running_mean": mean}
        running["running_variance"] = arrays.frame.put((1 / arrays.got(inv) ** 2 - 1e-5).astype(np.float32))
        again = functional.batch_norm_inference(arrays.x, scale=scale, bias=bias, **running)
        assert np.allclose(arrays.got(again), right, atol=1e-4)
        gradients = functional.batch_norm_backward(arrays.x, arrays.dy, scale, mean, inv)
        assert np.allclose(arrays.got(gradients[2]), arrays.np_dy.sum((0, 2, 3)), atol=1e-4)
    mode = "per_activation"
    y, mean, inv = functional.batch_norm_training(arrays.x, None, None, mode=mode)
    x = arrays.np_x.astype(np.float64)
    right = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    assert np.allclose(arrays.got(y), right, atol=1e-4)
    assert arrays.got(mean).shape == arrays.got(inv).shape == (1, *SHAPE[1:])
    _, dscale, dbias = functional.batch_norm_backward(arrays.x, arrays.dy, None, mean, inv, mode=mode)
    assert np.allclose(arrays.got(dscale)[0], (arrays.np_dy * right).sum(0), atol=1e-4)
    assert np.allclose(arrays.got(dbias)[0], arrays.np_dy.sum(0), atol=1e-4)


def test_a_kind_of_call_is_made_ready_once(arrays):
    if arrays.frame.name == "jax":
        pytest.skip("NumPy's calls are kept")
    functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias)
    before = dict(ready())
    for _ in range(3):
        functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias)
    assert dict(ready()) == before
    functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, epsilon=1e-3)
    assert len(set(ready()) - set(before)) == 1


def test_what_is_kept_is_bounded(arrays, monkeypatch):
    monkeypatch.setattr(functional, "MOST_READY", 3)
    for number in range(6):
        epsilon = 0.0011 + number / 1000
        y, _, _ = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, epsilon=epsilon)
        assert len(ready()) <= 3
    assert np.abs(arrays.got(y) - arrays.right()).max() < 1e-2


def test_results_go_where_they_are_wanted(arrays):
    frame = arrays.frame
    if not frame.mutable:
        y = np.empty(SHAPE, np.float32)
        found, mean, _ = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, out=(y, None, None))
        assert found is y
        assert frame.is_mine(mean)
        assert np.allclose(y, arrays.right(), atol=1e-5)
        return
    y, mean = frame.put(np.zeros(SHAPE, np.float32)), frame.put(np.zeros(8, np.float32))
    for out in [(y, mean, None), (None, mean, None), [y, None, None]]:
        found = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, out=out)
        assert all(given is None or given is got for given, got in zip(out, found, strict=True))
        assert np.allclose(arrays.got(found[0]), arrays.right(), atol=1e-5)
    other = frame.put(np.zeros((4, 6, 5, 8), np.float32).transpose(0, 3, 1, 2))  # y in another layout
    variance = frame.put(np.ones(8, np.float32))
    if frame.backend != "miopen":  # which copies in a workspace, for which this framework has no allocator
        vectors = {"running_mean": mean, "running_variance": variance, "scale": arrays.scale, "bias": arrays.bias}
        assert functional.batch_norm_inference(arrays.x, **vectors, out=other) is other
    dx, dscale, _ = functional.batch_norm_backward(
        arrays.x, arrays.dy, arrays.scale, mean, found[2], out=(y, None, None)
    )
    assert dx is y
    assert np.isfinite(arrays.got(dscale)).all()


def test_a_tensor_that_is_less_aligned_is_a_kind_of_its_own(frame):
    if not frame.mutable:
        pytest.skip("JAX has no views")
    rng = np.random.default_rng(1)
    values = rng.normal(size=4 * 8 * 6 * 4 + 8).astype(np.float16 if frame.gpu else np.float32)
    flat, ones, zeros = frame.put(values), frame.put(np.ones(8, np.float32)), frame.put(np.zeros(8, np.float32))
    count = len(values) - 8
    for offset in (0, 2, 4, 0, 2):
        x = flat[offset : offset + count].reshape(4, 8, 6, 4)
        y, _, _ = functional.batch_norm_training(x, ones, zeros)
        frame.synchronize()
        right = values[offset : offset + count].astype(np.float64).reshape(4, 8, 6, 4)
        right = (right - right.mean((0, 2, 3), keepdims=True)) / np.sqrt(right.var((0, 2, 3), keepdims=True) + 1e-5)
        assert np.abs(np.asarray(frame.get(y), np.float64) - right).max() < 5e-3


def test_bad_arguments_are_named(arrays):
    frame, call = arrays.frame, functional.batch_norm_training
    good = arrays.x, arrays.scale, arrays.bias
    call(*good)
    short = frame.put(np.ones(7, np.float32))
    infer = functools.partial(functional.batch_norm_inference, arrays.x, scale=arrays.scale, bias=arrays.bias)
    for bad, name in [
        (lambda: call("x", *good[1:]), "x"),
        (lambda: call(arrays.x, short, arrays.bias), "scale"),
        (lambda: call(arrays.x, arrays.scale, short), "bias"),
        (lambda: call(arrays.x, [1.0] * 8, arrays.bias), "scale"),
        (lambda: call(*good, running_mean=np.ones(8, np.float32)), "running_mean"),
        (lambda: call(*good, epsilon=-1.0), "epsilon"),
        (lambda: call(*good, epsilon=[1.0]), "epsilon"),
        (lambda: call(*good, exponential_average_factor=2.0, ), "exponential_average_factor"),
        (lambda: call(*good, mode="no"), "mode"),
        (lambda: call(*good, algorithm="no"), "algorithm"),
        (lambda: call(*good, handle="cudnn"), "handle"),
        (lambda: call(*good, out=(None, None)), "out"),
        (lambda: call(*good, out=np.zeros(3)), "out"),
        (lambda: infer(running_mean=None, running_variance=arrays.scale), "running_mean"),
        (lambda: infer(running_mean=arrays.scale, running_variance=arrays.scale, out=short), "out"),
        (lambda: functional.batch_norm_backward(arrays.x, short, arrays.scale), "dy"),
        (lambda: functional.batch_norm_backward(arrays.x, arrays.dy, arrays.scale, arrays.scale), "saved"),
    ]:  # fmt: skip
        for _ in range(2):  # a refusal is not kept
            with pytest.raises(pybnorm.ArgumentError, match=name):
                bad()
    for order in (call, functional.batch_norm_inference):  # x, mean, variance, weight, bias: PyTorch's order
        with pytest.raises(TypeError, match=r"positional arguments? but 5"):
            order(arrays.x, *[arrays.scale] * 4)


def test_only_arrays_of_one_framework_decide_where_results_are(frame):
    if frame.name == "numpy":
        pytest.skip("NumPy's is the other one")
    arrays = Set(frame)
    if frame.name == "jax":
        running = dict.fromkeys(("running_mean", "running_variance"), arrays.scale)
        with pytest.raises(pybnorm.ArgumentError, match=r"running_mean.*immutable"):
            functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, **running)
        with pytest.raises(pybnorm.ArgumentError, match=r"running_mean.*immutable"):
            functional.batch_norm_training(arrays.np_x, arrays.np_scale, arrays.np_bias, **running)
        with pytest.raises(pybnorm.ArgumentError, match=r"out\[0\].*immutable"):
            functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, out=(arrays.x, None, None))
        assert np.array_equal(frame.get(arrays.x), arrays.np_x)
    else:
        with pytest.raises(pybnorm.ArgumentError, match="scale"):
            functional.batch_norm_training(arrays.x, arrays.np_scale, arrays.bias)


class OnlyDlpack:
    """An object of no framework, which has DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_an_object_with_dlpack_alone_gets_numpys_arrays():
    rng = np.random.default_rng(1)
    plain = rng.standard_normal(SHAPE).astype(np.float32)
    vector = np.abs(rng.standard_normal(8)).astype(np.float32)
    vectors = OnlyDlpack(vector), OnlyDlpack(vector)
    for x in (plain, laid_out(plain, next(expand("infer,spatial,f32,nhwc,4x8x6x5"))), plain.astype(np.float64)):
        of_x = [v.astype(x.dtype) for v in (vector, vector)]
        given = [OnlyDlpack(v) for v in of_x]
        for scale, wanted in (((None, None), (None, None)), (given, of_x)):
            for _ in range(2):
                results = functional.batch_norm_training(OnlyDlpack(x), *scale)
                for got, right in zip(results, functional.batch_norm_training(x, *wanted), strict=True):
                    assert (type(got), got.strides) == (np.ndarray, right.strides)
                    np.testing.assert_array_equal(got, right)
    assert functional.batch_norm_inference(
        OnlyDlpack(plain), scale=None, bias=None, running_mean=vectors[0], running_variance=vectors[1]
    ).shape == SHAPE  # fmt: skip
    assert functional.batch_norm_backward(OnlyDlpack(plain), OnlyDlpack(plain), vectors[0])[1].shape == (8,)
    assert isinstance(functional.batch_norm_training(plain, *vectors)[1], np.ndarray)


def test_a_handle_given_is_used_and_keeps_its_calls(arrays):
    frame = arrays.frame
    with pybnorm.Handle(frame.backend) as handle:
        before = dict(ready())
        for _ in range(2):
            y, mean, inv = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, handle=handle)
            functional.batch_norm_backward(arrays.x, arrays.dy, arrays.scale, mean, inv, handle=handle)
        assert np.allclose(arrays.got(y), arrays.right(), atol=1e-5)
        assert dict(ready()) == before
        assert len(pybnorm._core.cache(handle, "functional")) == 2
    assert not pybnorm._core.cache(handle, "functional")
    with pytest.raises(pybnorm.ClosedError):
        functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, handle=handle)


@pytest.mark.slow
def test_each_thread_has_its_handle_and_the_next_one_takes_it_over(frame):
    arrays, seen = Set(frame), []

    def work(both=None):
        y, _, _ = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias)
        assert np.allclose(arrays.got(y), arrays.right(), atol=1e-5)
        seen.append({id(h) for h in functional._local.handles.values()})
        if both:
            both.wait(60)

    work()
    both = threading.Barrier(2)
    for threads in [[threading.Thread(target=work, args=(both,)) for _ in range(2)], [threading.Thread(target=work)]]:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        gc.collect()
    mine, first, second, later = seen
    assert not mine & (first | second)
    assert not first & second
    assert later <= first | second


FORKED = """
import os, sys, threading
import ml_dtypes
import numpy as np
from pybnorm import functional

def work():
    results.append(functional.batch_norm_training(x, ones, zeros)[0].tobytes())

results = []
x, ones, zeros = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype("f4"), np.ones(3, "f4"), np.zeros(3, "f4")
work()
child = os.fork()
if child == 0:
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        work()
        os._exit(0 if len(results) == 3 and len(set(results)) == 1 else 2)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_makes_its_own_handle(load_library, tmp_path):
    load_library("onednn")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- streams and graphs


def gpu(frame):
    if not frame.gpu:
        pytest.skip("the CPU has no streams")
    return frame


def test_the_frameworks_current_stream_is_followed(frame):
    arrays = Set(gpu(frame))
    stream, pointer = frame.stream()
    y, _, _ = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias)
    handle = functional._local.handles[functional._backend_of(device_types(frame.backend)[0]), 0]
    ordinary = handle.stream
    assert ordinary != pointer
    frame.synchronize()
    with frame.on_stream(stream):
        functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias)
        assert handle.stream == pointer
    y, _, _ = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias)
    assert handle.stream == ordinary
    assert np.allclose(arrays.got(y), arrays.right(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")  # of CuPy 14
def test_a_handle_given_keeps_its_stream(frame):
    arrays = Set(gpu(frame))
    _stream, pointer = frame.stream()
    frame.synchronize()
    with pybnorm.Handle(frame.backend, stream=pointer) as handle:
        for _ in range(2):
            y, _, _ = functional.batch_norm_training(arrays.x, arrays.scale, arrays.bias, handle=handle)
            assert handle.stream == pointer
        assert np.allclose(arrays.got(y), arrays.right(), atol=1e-5)


def test_a_call_that_is_ready_can_be_captured_and_one_that_is_not_is_refused(frame):
    arrays, torch = Set(gpu(frame)), frame.package
    if frame.name != "torch":
        pytest.skip("captured with PyTorch")
    arguments = arrays.x, arrays.scale, arrays.bias
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        functional.batch_norm_training(*arguments)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, _, _ = functional.batch_norm_training(*arguments)
        with pytest.raises(pybnorm.ArgumentError, match="captured"):
            functional.batch_norm_training(*arguments, epsilon=0.125)
    arrays.np_x = arrays.np_x[::-1].copy() * 2
    arrays.x.copy_(frame.put(arrays.np_x))
    graph.replay()
    assert np.allclose(arrays.got(y), arrays.right(), atol=1e-5)


# ---------------------------------------------------------------- what the C table of DLPack says


def test_a_key_has_all_that_a_plan_depends_on():
    def key(array):
        return describe(array, "x")[0]

    plain = key(Exchanging())
    assert plain == key(Exchanging(address=8192))
    assert isinstance(plain, bytes)
    differing = [
        {"shape": (3, 2)}, {"steps": (1, 2)}, {"dtype": (2, 16, 1)}, {"dtype": (4, 32, 1)}, {"dtype": (2, 32, 2)},
        {"device": (2, 0)}, {"device": (1, 1)}, {"address": 4104}, {"address": 4100}, {"shape": (6,), "steps": (1,)},
    ]  # fmt: skip
    others = [key(Exchanging(**change)) for change in differing]
    assert len({plain, *others}) == 1 + len(differing)
    for array in (Exchanging((1,) * 9, (1,) * 9), [1.0], None):
        with pytest.raises(ArgumentTypeError, match="x: got"):
            describe(array, "x")


def test_numpy_arrays_are_described_without_their_attributes():
    memory = np.zeros(64, np.uint8)
    base = -memory.ctypes.data % 16
    whole = memory[base : base + 32].view("f4")
    fixed = whole.view()
    fixed.flags.writeable = False
    arrays = [
        whole, whole[1:], whole[2:6:2], whole[::-1], whole.reshape(2, 4), whole.view("f8"), whole.view("f2"),
        whole.view(ml_dtypes.bfloat16), fixed,
    ]  # fmt: skip
    for array in arrays:
        key, address = describe(array, "x")
        assert isinstance(key, bytes)
        assert address == array.__array_interface__["data"][0]
    assert len({describe(array, "x")[0] for array in arrays}) == len(arrays)
    for odd in (whole.view(">f4"), whole.view("i4"), memory[base + 1 : base + 9].view("f4")):
        with pytest.raises(ArgumentError, match="x: got"):
            describe(odd, "x")


def test_a_buffer_is_described_by_values_that_cannot_change():
    given = as_buffer(np.zeros((2, 3), np.float32), "x")
    loose = given._replace(dims=[2, np.int64(3)], strides=[3, 1], device_id=np.int32(0), writable=1)
    assert describe(loose, "x") == describe(given, "x")
    assert {type(n) for n in (*as_buffer(loose, "x").dims, as_buffer(loose, "x").device_id)} == {int}
    assert describe(given._replace(writable=False), "x")[0] != describe(given, "x")[0]


def test_the_current_stream_is_that_of_the_arrays_device(load_library):
    assert current_stream(Exchanging(device=(2, 3))) == 2003
    assert current_stream(Exchanging(device=(10, 1))) == 10001
    assert current_stream(Exchanging()) is None
    assert current_stream(np.ones(3)) is None
    load_library("onednn")
    with pybnorm.Handle("onednn") as handle:
        before = handle.stream
        assert handle.follow_stream(Exchanging())
        assert not handle.follow_stream(Exchanging(device=(2, 0)))
        assert not handle.follow_stream(np.ones(3))
        assert handle.stream == before


# ---------------------------------------------------------------- bits that repeat, and statistics that nobody reads


@pytest.fixture
def some(load_library):
    load_library("onednn")
    generator = np.random.default_rng(5)
    x, dy = (generator.standard_normal(SHAPE).astype(np.float32) for _ in range(2))
    return x, dy, np.float32(generator.random(8)), np.float32(generator.random(8))


def test_calls_take_only_ways_whose_bits_repeat(some, monkeypatch):
    x, dy, scale, bias = some
    asked = []
    with pybnorm.Handle("onednn") as handle:

        class Spy:
            def __getattr__(self, name):
                return getattr(handle, name)

        for name in ("forward_training", "forward_inference", "backward"):
            make = getattr(handle, f"plan_{name}")

            def plan(*arrays, make=make, **options):
                asked.append(options["deterministic"])
                return make(*arrays, **options)

            setattr(Spy, f"plan_{name}", staticmethod(plan))
        monkeypatch.setattr(functional, "_default_handle", lambda *_: Spy())
        for deterministic in (False, True, True):
            how = {"deterministic": deterministic, "epsilon": 0.0625}
            _, mean, inverse = functional.batch_norm_training(x, scale, bias, **how)
            functional.batch_norm_inference(x, running_mean=mean, running_variance=mean + 1, **how)
            functional.batch_norm_backward(x, dy, scale, mean, inverse, **how)
        functional._local.ready.clear()
    assert asked == [False] * 3 + [True] * 3  # and the prepared call is found again


def test_training_without_saved_statistics(some):
    x, _, scale, bias = some
    running = {"running_mean": np.zeros(8, np.float32), "running_variance": np.ones(8, np.float32)}
    others = {name: array.copy() for name, array in running.items()}
    for out in (None, (np.empty_like(x), None, None)):
        y, mean, inverse = functional.batch_norm_training(x, scale, bias, **running, saved=False, out=out)
        assert (mean, inverse) == (None, None)
        assert out is None or y is out[0]
        np.testing.assert_array_equal(y, functional.batch_norm_training(x, scale, bias, **others)[0])
        np.testing.assert_array_equal(list(running.values()), list(others.values()))
    kept = np.empty(8, np.float32)
    with pytest.raises(ArgumentError, match="saved=False"):
        functional.batch_norm_training(x, scale, bias, saved=False, out=(None, kept, None))
    with pytest.raises(ArgumentTypeError, match="saved"):
        functional.batch_norm_training(x, scale, bias, saved="no")
