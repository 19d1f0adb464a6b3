"""tune=True: candidates are judged and timed for real, on the CPU as on a GPU; what cuDNN may take is listed."""

import ctypes
import importlib
import inspect

import numpy as np
import pytest
from place import device_of

import pybnorm
from pybnorm import DataType, Mode, Operation, tuning
from pybnorm.check.bounds import Status
from pybnorm.devices.timing import Plain
from pybnorm.tuning import cache as remembered
from pybnorm.tuning import choice, trials
from pybnorm.tuning.trials import METHODS, NotMeasuredError, Task, Tensor

DIMS = (4, 8, 6, 5)
NCHW, NHWC = (240, 30, 5, 1), (240, 1, 40, 8)
GAPS = (600, 60, 10, 2)
OPTIONS = {
    Operation.FORWARD_TRAINING: {"exponential_average_factor": 0.1, "running": True, "saved": True},
    Operation.FORWARD_INFERENCE: {},
    Operation.BACKWARD: {"alpha_param": 1.0, "beta_param": 0.0, "saved": True},
}


def task(operation, strides=NCHW, dtype=DataType.FLOAT32, dims=DIMS, alignment=16, **changes):
    options = {"mode": Mode.SPATIAL, "epsilon": 1e-5, "alpha": 1.0, "beta": 0.0}
    x = Tensor(dtype, dims, strides)
    tensors = {"x": x, "dy": x, "dx": x} if operation == Operation.BACKWARD else {"x": x, "y": x}
    kind = DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32
    parameter = Tensor(kind, (1, dims[1], 1, 1), (dims[1], 1, 1, 1))
    return Task(operation, tensors, parameter, alignment, options | OPTIONS[operation] | changes)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A file of its own, and nothing in memory."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    monkeypatch.setattr(remembered, "store", remembered._Store())
    return path


# ---------------------------------------------------------------- judging and timing


@pytest.mark.parametrize("operation", METHODS, ids=lambda o: o.name.lower())
@pytest.mark.parametrize(
    ("layout", "alignment", "changes"),
    [
        (NCHW, 16, {}),
        (NHWC, 4, {}),
        (NCHW, 8, {"alpha": 2.0, "beta": 0.5, "alpha_param": 0.5, "beta_param": 2.0}),
        (NCHW, 16, {"running": False, "saved": False}),
        (GAPS, 16, {}),
    ],
)
def test_plain_and_auto_are_judged_right_and_timed(handle, operation, layout, alignment, changes):
    if handle.backend == "miopen":
        pytest.skip("miopen has one way for every call, which test_calls judges, and never measures")
    base = task(operation)
    problem = task(operation, layout, alignment=alignment, **{n: v for n, v in changes.items() if n in base.options})
    try:
        found = trials.run(problem, handle.backend, handle.device or 0, ("plain", "auto", "nonsense"), "plain")
    except pybnorm.UnsupportedError as error:
        pytest.skip(f"{handle.backend}: {error.text}")
    assert list(found) == ["plain", "auto", "nonsense"]
    assert "nonsense" in found["nonsense"].note
    if found["plain"].note.startswith("UnsupportedError"):
        assert found["auto"].note.startswith("UnsupportedError")  # the backend has no such layout
        return
    # the plain entry point may cancel in one pass; its own choice is timed all the same
    assert found["plain"].status in (Status.PASS, Status.WARN), found
    assert found["auto"].status == Status.PASS or "aligned" in found["auto"].note, found
    assert found["plain"].seconds > 0
    assert found["auto"].seconds is None or found["auto"].seconds > 0


@pytest.mark.parametrize("dtype", [DataType.FLOAT64, DataType.FLOAT16, DataType.BFLOAT16])
def test_every_dtype_is_judged_where_it_runs(handle, dtype):
    if handle.backend == "miopen":
        pytest.skip("miopen has one way for every call, which test_calls judges, and never measures")
    for operation in METHODS:
        (found,) = trials.run(
            task(operation, dtype=dtype), handle.backend, handle.device or 0, ["plain"], "plain"
        ).values()
        assert found.status in (Status.PASS, Status.WARN) or "Unsupported" in found.note, found


class Harming:
    """A handle whose plans for one algorithm do harm behind the call."""

    def __init__(self, handle, harm):
        self.handle, self.harm = handle, harm
        self.backend, self.fill, self.axpby = handle.backend, handle.fill, handle.axpby
        for name in METHODS.values():
            setattr(self, name, lambda name=name, **options: self.plan(name, **options))

    def plan(self, method, *, algorithm, **options):
        plan = getattr(self.handle, method)(algorithm="plain", **options)
        return Harmed(plan, self.harm) if algorithm == "graph" else plan


class Harmed:
    def __init__(self, plan, harm):
        self.plan, self.harm = plan, harm
        self.algorithm, self.workspace_size = "graph", plan.workspace_size

    def __call__(self, **arguments):
        self.plan(**arguments)
        self.harm(arguments)


def float_at(address):
    return ctypes.c_float.from_address(address)


def raising(arguments):
    raise pybnorm.ExecutionError(backend="onednn", function="f", status=1, status_name="broken", text="it broke")


@pytest.mark.slow
@pytest.mark.parametrize("operation", METHODS, ids=lambda o: o.name.lower())
def test_a_wrong_candidate_is_not_timed(load_library, operation):
    load_library("onednn")
    output = "dx" if operation == Operation.BACKWARD else "y"
    vector = {Operation.FORWARD_TRAINING: "saved_mean", Operation.BACKWARD: "dbias"}.get(operation)

    def shift(name, element):
        def harm(arguments):
            value = float_at(arguments[name] + 4 * element)
            value.value += 0.01

        return harm

    harms = {"right": lambda arguments: None, "first": shift(output, 0), "last": shift(output, 959), "raises": raising}
    if vector:
        harms["vector"] = shift(vector, 7)
    with pybnorm.Handle("onednn") as handle:
        for name, harm in harms.items():
            machine = Plain(pybnorm.devices.device_for(1))
            made = trials._Trials(task(operation), machine, Harming(handle, harm), ("plain", "graph"), "plain")
            found = made.run()
            assert found["plain"].status == Status.PASS
            assert found["plain"].seconds > 0
            if name == "right":
                assert found["graph"].status == Status.PASS
            elif name == "raises":
                assert (found["graph"].status, found["graph"].seconds) == (None, None)
                assert "it broke" in found["graph"].note
            else:
                assert (found["graph"].status, found["graph"].seconds) == (Status.FAIL, None), (name, found)


def test_nothing_is_left_unwritten(load_library):
    """Results are spoilt before each candidate, so one that does nothing has not the right ones of the one before."""
    load_library("onednn")
    with pybnorm.Handle("onednn") as handle:
        machine = Plain(pybnorm.devices.device_for(1))
        idle = Harming(handle, None)
        real = idle.plan
        idle.plan = lambda method, *, algorithm, **options: (
            Idle() if algorithm == "graph" else real(method, algorithm=algorithm, **options)
        )
        found = trials._Trials(task(Operation.FORWARD_INFERENCE), machine, idle, ("plain", "graph"), "plain").run()
    assert found["plain"].status == Status.PASS
    assert (found["graph"].status, found["graph"].seconds) == (Status.FAIL, None)


class Idle:
    workspace_size, algorithm = 0, "graph"

    def __call__(self, **arguments):
        pass


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT16])
@pytest.mark.parametrize("strides", [NCHW, NHWC, GAPS])
def test_channels_are_copied_from_where_they_lie(handle, strides, dtype):
    device = device_of(handle)
    problem = task(Operation.FORWARD_TRAINING, strides, dtype, beta=0.5)  # y has values before the call
    scratch = trials._Scratch(problem, Plain(device), handle, 1)
    copied = scratch._gathered("y")
    # without, all of the tensor is copied to the host
    assert copied is not None or handle.backend == "miopen" or (handle.backend, dtype.short) == ("onednn", "f16")
    if copied is not None:
        assert copied.tobytes() == scratch._sample("y", device.to_numpy(scratch.sets[0]["y"][0])).tobytes()
        assert len(np.unique(copied)) > 100


def test_memory_that_is_not_there(load_library, monkeypatch):
    load_library("onednn")
    problem = task(Operation.FORWARD_TRAINING)
    monkeypatch.setattr(Plain, "free_bytes", lambda machine: 2 * problem.nbytes - 2)
    with pytest.raises(NotMeasuredError, match="MiB"):
        trials.run(problem, "onednn", 0, ["plain"], "plain")
    monkeypatch.setattr(Plain, "free_bytes", lambda machine: 2 * problem.nbytes)
    (found,) = trials.run(problem, "onednn", 0, ["plain"], "plain").values()
    assert found.status == Status.PASS or "workspace" in found.note


def test_buffer_sets_are_fewer_where_memory_is_short(load_library, monkeypatch):
    load_library("onednn")
    problem = task(Operation.FORWARD_TRAINING)
    monkeypatch.setattr(trials, "buffer_sets", lambda size, cache: 8)
    for room, sets in ((100, 8), (5, 5), (1, 1)):
        monkeypatch.setattr(Plain, "free_bytes", lambda machine, room=room: 2 * room * problem.nbytes)
        with pybnorm.Handle("onednn") as handle:
            made = trials._Trials(problem, Plain(pybnorm.devices.device_for(1)), handle, ["plain"], "plain")
        pointers = {s["y"][0].pointer for s in made.scratch.sets}
        assert len(pointers) == sets


def test_what_the_judge_does_not_know_is_not_measured(load_library):
    load_library("onednn")
    one = task(Operation.FORWARD_TRAINING, (8, 1, 1, 1), dims=(1, 8, 1, 1))  # its unbiased variance is undefined
    with pytest.raises(NotMeasuredError, match="judged"):
        trials.run(one, "onednn", 0, ["plain"], "plain")


# ---------------------------------------------------------------- the handle's methods


def test_every_argument_of_a_plan_reaches_the_choice(handle, monkeypatch):
    """Also those that the methods get later: one that is dropped would give a plan of another call."""
    seen = {}

    def choose(on, operation, x, algorithm, options):
        seen.update(options, x=x, algorithm=algorithm)
        return getattr(on, METHODS[operation])(x), "a reason"

    monkeypatch.setattr(tuning, "choose", choose)
    with pybnorm.TensorDescriptor(handle.backend, "f32", DIMS) as x:
        for operation, name in METHODS.items():
            method = getattr(handle, name)
            seen.clear()
            left_out = ("x", "tune", "alpha_data", "beta_data", "unknown")  # old names, and names that are none
            given = {p: object() for p in inspect.signature(method).parameters if p not in left_out}
            given["deterministic"] = True  # is checked before the choice
            plan = method(x, **given, tune=True)
            assert seen == given | {"x": x}, operation
            assert plan.reason == "a reason"


def test_tune_is_a_truth_value_and_of_no_named_algorithm(handle, cache):
    with pybnorm.TensorDescriptor(handle.backend, "f32", DIMS) as x:
        for name in METHODS.values():
            with pytest.raises((pybnorm.ArgumentError, pybnorm.ArgumentTypeError), match="tune"):
                getattr(handle, name)(x, tune="yes")
            with pytest.raises(pybnorm.ArgumentError, match="algorithm"):
                getattr(handle, name)(x, algorithm="plain", tune=True)
            with pytest.raises((pybnorm.ArgumentError, pybnorm.ArgumentTypeError), match="epsilon"):
                getattr(handle, name)(x, epsilon=-1.0, tune=True)


def test_one_way_is_said_and_nothing_is_measured(handle, cache, monkeypatch):
    if handle.backend == "cudnn":
        pytest.skip("cudnn has several ways")
    monkeypatch.setattr(trials, "run", None)
    mode = "per_activation" if handle.backend == "onednn" else "spatial"  # of which it has several
    with pybnorm.TensorDescriptor(handle.backend, "f32", (1, *DIMS[1:])) as x:
        for name in METHODS.values():
            options = {"running": False} if name == "plan_forward_training" else {}  # of one image
            plan = getattr(handle, name)(x, mode=mode, tune=True, **options)
            assert plan.algorithm == "plain"
            said = "nothing to measure it against"
            if handle.backend == "miopen" and handle.library.version >= (3, 5):
                said += "; the library's own tuning is left alone, as it keeps what is fastest, right or wrong"
            assert said in plan.reason
    assert not cache.exists()


# ---------------------------------------------------------------- cuDNN without a device

MEMORY = ctypes.create_string_buffer(1 << 16)


@pytest.fixture
def borrowed(load_library):
    """A handle that is none: plans of algorithms that ask the library nothing can be made, and not be run."""
    load_library("cudnn")
    return pybnorm.Handle.from_pointer("cudnn", ctypes.addressof(MEMORY))


def candidates(handle, line, fast):
    operation, dtype, strides, *rest = line.split()
    dims = tuple(map(int, rest[0].split("x"))) if rest else DIMS
    last = {"nchw": None, "gaps": GAPS}.get(strides, (dims[1] * dims[2] * dims[3], 1, dims[1] * dims[3], dims[1]))
    name = {"train": "plan_forward_training", "infer": "plan_forward_inference", "backward": "plan_backward"}
    options = {"mode": Mode.PER_ACTIVATION} if "peract" in rest else {}
    options |= {"saved": False} if "unsaved" in rest else {}
    with pybnorm.TensorDescriptor("cudnn", dtype, dims, last) as x:
        plan = getattr(handle, name[operation])(x, algorithm="plain", **options)
        return pybnorm._core.candidates(plan, fast)


GRAPHS = ("graph", "graph:1", "graph:2", "graph:3")
POINTWISE = ("pointwise", "pointwise:1", "pointwise:2", "pointwise:3")
COLUMNS = ("columns", "columns:1", "columns:2")
ROWS = ("rows", "rows:1", "rows:2")


@pytest.mark.parametrize(
    ("line", "auto", "fast"),
    [
        # the persistent kernels sum in fixed point, and Ex runs them over channels-first memory; rows sum in any order
        ("train f32 nchw", ("spatial", *GRAPHS, *COLUMNS), ("ex", *ROWS, "persistent")),
        ("backward f16 nchw", ("spatial", *GRAPHS, *COLUMNS), ("ex", *ROWS, "persistent")),
        ("train f32 nhwc", ("spatial", "ex", *GRAPHS), ("persistent",)),
        ("backward bf16 nhwc", ("spatial", "ex", *GRAPHS), ("persistent",)),
        ("train f32 nhwc 4x8x6x5 unsaved", ("spatial", *GRAPHS), ("ex", "persistent")),
        ("infer f32 nchw", ("spatial", *COLUMNS, *ROWS), ("persistent",)),
        ("infer f16 nhwc", ("spatial", *POINTWISE), ("persistent",)),
        ("infer f32 nchw 65536x2x2x1", ("spatial", *COLUMNS, "split"), ("persistent",)),
        ("train f64 nchw", ("spatial",), ("ex", "persistent")),
        ("train f64 nhwc", ("spatial", "dense"), ("ex", "persistent")),
        ("train f32 gaps", ("spatial", "dense"), ("ex", "persistent")),
        ("backward f32 nchw 4x8x6x5 peract", ("plain",), ()),
    ],
)
def test_what_cudnn_may_take(borrowed, line, auto, fast):
    assert set(candidates(borrowed, line, False)) == set(auto)
    assert set(candidates(borrowed, line, True)) == {*auto, *fast}


def test_a_choice_of_cudnn_from_call_to_file(borrowed, cache, monkeypatch):
    """Only the measuring is made up: rules, candidates, the plan by name and the reason are those of the library."""
    calls = []

    def measured(problem, backend, ordinal, names, own):
        calls.append((problem.operation, names, own))
        return {name: trials.Trial({"spatial": 2e-5, own: 3e-5}.get(name), Status.PASS, "") for name in names}

    monkeypatch.setattr(trials, "run", measured)
    monkeypatch.setattr(choice, "_device", lambda kind, ordinal: ("a GPU", ""))
    monkeypatch.setattr(choice, "_capturing", lambda handle: False)
    tensors = [pybnorm.TensorDescriptor("cudnn", "f32", dims) for dims in ((256, 64, 112, 112), (8, 64, 28, 28))]
    with tensors[0] as large, tensors[1] as x:
        for end in ("", "; remembered"):
            plan = borrowed.plan_forward_training(large, algorithm="fast", tune=True)
            assert plan.algorithm == "spatial"
            assert plan.reason == "measured: 20.0 us against 30.0 us of ex (the rule's choice)" + end
        plan = borrowed.plan_forward_training(x, tune=True)
        assert (plan.algorithm, plan.reason[:17]) == ("spatial", "measured: 30.0 us")
    assert [(operation, own) for operation, _, own in calls] == [
        (Operation.FORWARD_TRAINING, "ex"),
        (Operation.FORWARD_TRAINING, "spatial"),
    ]


# ---------------------------------------------------------------- cuDNN on a device


def on_a_device(handle):
    if handle.backend != "cudnn":
        pytest.skip(f"{handle.backend} has one way for most calls")
    return device_of(handle)


@pytest.mark.parametrize("algorithm", ["auto", "fast"])
@pytest.mark.parametrize("strides", [NCHW, NHWC], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("operation", METHODS, ids=lambda o: o.name.lower())
def test_a_tuned_plan_computes_right_and_is_remembered(handle, cache, monkeypatch, operation, strides, algorithm):
    device = on_a_device(handle)
    problem = task(operation, strides)
    options = {"algorithm": algorithm, "tune": True}
    with pybnorm.TensorDescriptor(handle.backend, "f32", DIMS, strides) as x:
        plan = getattr(handle, METHODS[operation])(x, **options)
        assert plan.reason.startswith("measured: "), plan.reason
        monkeypatch.setattr(trials, "run", None)
        again = getattr(handle, METHODS[operation])(x, **options)
        assert (again.algorithm, again.reason) == (plan.algorithm, plan.reason + "; remembered")
        monkeypatch.setattr(remembered, "store", remembered._Store())
        assert getattr(handle, METHODS[operation])(x, **options).reason == again.reason  # from the file
    assert cache.exists()
    scratch = trials._Scratch(problem, Plain(device), handle, 1)
    space = device.empty_bytes(max(plan.workspace_size, 1))
    scratch.renew()
    scratch.calls(plan, (space.pointer, plan.workspace_size))[0]()
    device.synchronize()
    assert scratch.verdict() == (Status.PASS, "")


def test_a_large_problem_is_measured_over_several_buffers(handle, cache):
    on_a_device(handle)
    with pybnorm.TensorDescriptor(handle.backend, "f16", (64, 256, 28, 28), (256 * 784, 1, 256 * 28, 256)) as x:
        plan = handle.plan_forward_training(x, tune=True)
    assert plan.reason.startswith("measured: "), plan.reason
    (entry,) = tuning.entries().values()
    assert entry["rule_seconds"] > 0
    assert entry["seconds"] <= entry["rule_seconds"]


def test_nothing_is_measured_while_the_stream_is_captured(handle, cache):
    device = on_a_device(handle)
    driver = importlib.import_module("cuda.bindings.driver")
    stream = driver.CUstream(device.stream)
    with (
        pybnorm.TensorDescriptor(handle.backend, "f32", DIMS) as x,
        pybnorm.TensorDescriptor(handle.backend, "f32", (3, *DIMS[1:])) as other,
    ):
        handle.plan_forward_inference(x, tune=True)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        assert int(driver.cuStreamBeginCapture(stream, mode)[0]) == 0
        try:
            with pytest.raises(pybnorm.ArgumentError, match="captured"):
                handle.plan_forward_training(other, tune=True)
            assert handle.plan_forward_inference(x, tune=True).reason.endswith("remembered")
        finally:
            status, graph = driver.cuStreamEndCapture(stream)
        assert int(status) == 0, "the capture was broken"
        driver.cuGraphDestroy(graph)
        assert handle.plan_forward_training(other, tune=True).reason.startswith("measured: ")


def test_the_threads_device_and_the_handles_stream_are_as_before(handle, cache):
    device = on_a_device(handle)
    driver = importlib.import_module("cuda.bindings.driver")
    before = int(driver.cuCtxGetCurrent()[1]), handle.stream
    with pybnorm.TensorDescriptor(handle.backend, "f32", DIMS) as x:
        handle.plan_backward(x, tune=True)
    assert (int(driver.cuCtxGetCurrent()[1]), handle.stream) == before
    device.synchronize()


def test_arrays_less_aligned_are_measured_as_such(handle, cache):
    device = on_a_device(handle)
    memory = device.from_numpy(np.ones(964, np.float32))
    shifted = memory._replace(pointer=memory.pointer + 4, dims=DIMS, strides=NHWC)
    shifted = shifted, shifted._replace(pointer=shifted.pointer + 4096)
    plan = handle.plan_forward_inference(*shifted, tune=True)  # less aligned memory leaves training one way only
    assert plan.reason.startswith("measured: "), plan.reason
    (key,) = tuning.entries()
    assert "aligned 4" in key
