"""Workspace, plans, overlaps and bad arguments of the operations."""

import gc
import inspect
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import typing
import weakref

import numpy as np
import pytest
from tables import table

import pybnorm
from pybnorm import ArgumentError, ArgumentTypeError, ClosedError, WorkspaceError, _core, operations
from pybnorm._arrays import Buffer
from pybnorm.operations import preparation, program

DIMS = (4, 3, 5, 2)
PARAMETERS = ("scale", "bias", "mean", "variance", "inv_variance", "dscale", "dbias", "sum_dy", "sum_dy_xmu",
              "saved_mean", "saved_inv_variance", "running_mean", "running_variance")  # fmt: skip


def given(bench, operation, axis=1):
    """Arguments of every operation by name, on the device."""
    rng, arrays = np.random.default_rng(3), {}
    derived = (4,) if operation == "gather_stats" else operations.derive(DIMS, "f32", axis).dims
    others = {"counts": [2, 0, 3], "count": 20, "value": 1.0, "axis": axis}
    if operation == "axpby":
        others |= {"a": 2.0, "b": 0.5}
    for name in inspect.signature(getattr(operations, operation)).parameters:
        if name in ("x", "y", "dy", "dx"):
            arrays[name] = rng.normal(0, 1, DIMS).astype(np.float32)
        elif name in others:
            arrays[name] = others[name]
        elif name in ("means", "m2s", "a", "b", "out", "source", "target", *PARAMETERS):
            dims = {"means": (3, 4), "m2s": (3, 4)}.get(name, derived if name in PARAMETERS else 6)
            arrays[name] = rng.uniform(1, 2, dims).astype(np.float32)
    placed = bench.put(arrays)
    bench.watched = [a for a in placed.values() if isinstance(a, Buffer)]
    return placed


@pytest.fixture
def cpu_bench(bench):
    if bench.handle.library.device_type != 1:
        pytest.skip(f"{bench.handle.backend}: of CPU backends")
    return bench


def opened(bench):
    """Another handle of the backend, on the same stream."""
    return pybnorm.Handle(bench.handle.backend, stream=bench.device.stream or None)


EVERY = sorted(program.RECIPES)
WITH_AXIS = [o for o in EVERY if "axis" in inspect.signature(getattr(operations, o)).parameters]


def call(bench, operation, arguments, **changes):
    getattr(operations, operation)(bench.handle, **arguments, **changes)


def contents(bench):
    """All bytes of the arrays that `given` made last, whatever a test has put in their place."""
    return [bench.device.to_numpy(a).tobytes() for a in bench.watched]


@table("axis", [1, (0, 2)])
@table("operation", EVERY)
def test_the_query_is_what_is_needed(bench, operation, axis):
    """One byte less, or another alignment, is refused before anything is written."""
    arguments = given(bench, operation, axis)
    size = operations.workspace_size(bench.handle, operation, **arguments)
    plan = operations.plan(bench.handle, operation, **arguments)
    assert plan.nbytes == size
    assert plan.calls
    buffer, address = bench.memory(size + 64)
    if size:
        before = contents(bench)
        for place, room in [(address, size - 1), (address + 1, size), (address, 0)]:
            with pytest.raises(WorkspaceError) as caught:
                call(bench, operation, arguments, workspace=(place, room))
            assert str(size) in str(caught.value)
            assert operation in str(caught.value)
        assert contents(bench) == before
    call(bench, operation, arguments, workspace=(address, size))
    assert bench.intact(buffer, address, size)


@table("operation", EVERY)
def test_without_a_workspace(bench, operation):
    """CPU backends keep one that grows; elsewhere the bytes are named."""
    arguments = given(bench, operation)
    size = operations.workspace_size(bench.handle, operation, **arguments)
    if bench.handle.library.device_type == 1 or not size:
        call(bench, operation, arguments)
        assert not size or program._kept[bench.handle].memory.nbytes >= size
    else:
        with pytest.raises(WorkspaceError, match=str(size)):
            call(bench, operation, arguments)
        assert bench.handle not in program._kept


def test_threads_share_a_handle_and_its_kept_workspace(cpu_bench):
    rng = np.random.default_rng(1)
    batches = [rng.normal(i, 1.0, (8, 3, 40 + 20 * i)).astype(np.float32) for i in range(4)]
    wrong = []

    def work(x):
        mean, variance = np.empty((2, 3), np.float32)
        for _ in range(30):
            operations.stats(cpu_bench.handle, x, mean=mean, variance=variance)
            if not np.allclose(variance, x.var(axis=(0, 2)), rtol=1e-4):
                wrong.append(variance.copy())

    threads = [threading.Thread(target=work, args=(x,)) for x in batches]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_copies_are_reported(bench, caplog):
    arguments = given(bench, "backward_frozen", (0, 2))
    plan = operations.plan(bench.handle, "backward_frozen", **arguments)
    assert plan.copies
    assert all("do not merge" in c for c in plan.copies)
    buffer, address = bench.memory(plan.nbytes)
    with caplog.at_level(logging.INFO, "pybnorm.operations"):
        call(bench, "backward_frozen", arguments, workspace=(address, plan.nbytes))
    assert len([r for r in caplog.records if "copied" in r.getMessage()]) == len(plan.copies)
    assert bench.intact(buffer, address, plan.nbytes)
    for axis in (1, (1, 2, 3), -1, 0, (), (0, 1, 2, 3)):
        assert not operations.plan(bench.handle, "backward_frozen", **given(bench, "backward_frozen", axis)).copies


@pytest.mark.parametrize(("operation", "calls"), [
    ("forward_inference", ["forward_inference SPATIAL f32 (4, 3, 5, 2)"]),
    ("relu", ["relu f32 (1, 120)"]),
    ("training_grad", ["fill f32 (1, 3)", "fill f32 (1, 3)", "forward_inference PER_ACTIVATION f32 (1, 3)",
                       "backward SPATIAL f32 (4, 3, 5, 2)"]),
])  # fmt: skip
def test_the_plan_names_the_calls(bench, operation, calls):
    found = operations.plan(bench.handle, operation, **given(bench, operation)).calls
    assert [call.partition(" by ")[0] for call in found] == calls


ONE_WAY = ("miopen", "native", "native_cuda", "native_rocm", "onednn")


def test_spatial_calls_go_the_way_that_auto_takes_and_the_plan_names_it(bench):
    """That of a handle's plan for the same call; the entry point's, where that is the way, has no name."""
    handle, seen = bench.handle, set()
    for shape in ((4, 3, 5, 2), (8, 64, 32, 32)):
        for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
            memory = np.zeros([shape[a] for a in order], np.float32).transpose(np.argsort(order))
            x, y, dx = (bench.device.from_numpy(memory) for _ in range(3))
            vectors = [bench.device.from_numpy(np.ones((1, shape[1], 1, 1), np.float32)) for _ in range(4)]
            tensor = handle.descriptor(x)
            plans = {
                "forward_training": (handle.plan_forward_training(tensor, running=False), (x, *vectors[:2], y)),
                "forward_inference": (handle.plan_forward_inference(tensor), (x, *vectors, y)),
                "backward": (handle.plan_backward(tensor), (x, y, vectors[0], dx, *vectors[1:3])),
            }
            for operation, (plan, arguments) in plans.items():
                names = ("saved_mean", "saved_inv_variance") if operation != "forward_inference" else ()
                saved = dict(zip(names, vectors[2:] if operation == "forward_training" else vectors[::3], strict=False))
                (call,) = operations.plan(handle, operation, *arguments, **saved).calls
                seen.add(call.partition(" by ")[2])
                entry = plan.algorithm in ("plain", "spatial")
                assert call.partition(" by ")[2] == ("" if entry else plan.algorithm)
    assert len(seen) > 1 or handle.backend in ONE_WAY


# ---------------------------------------------------------------- bad arguments


def refused(bench, operation, arguments, argument, error=ArgumentError):
    """The call and the query refuse, name the argument, and nothing is written."""
    before = contents(bench)
    buffer, address = bench.memory(1 << 16)
    with pytest.raises(error) as caught:
        call(bench, operation, arguments, workspace=(address, 1 << 16))
    assert caught.value.argument == argument
    assert caught.value.allowed
    with pytest.raises(error):
        operations.workspace_size(bench.handle, operation, **arguments)
    assert contents(bench) == before
    assert bench.intact(buffer, address, 0)


def as_dtype(bench, arguments, name, kind):
    array = bench.device.to_numpy(arguments[name]).astype(kind)
    return arguments | bench.put({name: array})


def of_shape(bench, arguments, name, dims):
    return arguments | bench.put({name: np.ones(dims, np.float32)})


@table("operation", WITH_AXIS)
@table(
    ("axis", "error"),
    [
        (4, ArgumentError),
        (-5, ArgumentError),
        ((1, 1), ArgumentError),
        ((1, -3), ArgumentError),
        (1.0, ArgumentTypeError),
        ("1", ArgumentTypeError),
        (True, ArgumentTypeError),
        ((0, None), ArgumentTypeError),
    ],
)
def test_bad_axis(bench, operation, axis, error):
    refused(bench, operation, given(bench, operation) | {"axis": axis}, "axis", error)


def arrays_in(operation, *names):
    parameters = inspect.signature(getattr(operations, operation)).parameters
    return [(operation, n) for n in names if n in parameters]


@table(("operation", "name"), [p for o in WITH_AXIS for p in arrays_in(o, "x", "y", "dy", "dx")])
def test_bad_data(bench, operation, name):
    arguments = given(bench, operation)
    refused(bench, operation, arguments | {name: "x"}, name, ArgumentTypeError)
    refused(bench, operation, arguments | {name: arguments[name]._replace(device_type=99)}, name)
    overlapping = arguments[name]._replace(strides=(1, 1, 1, 1))
    refused(bench, operation, arguments | {name: overlapping}, name)
    backwards = arguments[name]._replace(strides=(30, 10, 2, -1))
    refused(bench, operation, arguments | {name: backwards}, name)
    if name != "x":
        refused(bench, operation, of_shape(bench, arguments, name, (4, 3, 5, 3)), name)
        refused(bench, operation, as_dtype(bench, arguments, name, np.float64), name, ArgumentTypeError)
    if name in ("y", "dx"):
        refused(bench, operation, arguments | {name: arguments[name]._replace(writable=False)}, name)
        with pytest.raises(ArgumentError) as caught:
            call(bench, operation, arguments | {name: arguments["x"]})
        assert caught.value.argument == name
    else:
        rank9 = bench.put({"x": np.ones((1,) * 9, np.float32)})["x"]
        every = {n: rank9 if n in ("x", "y", "dy", "dx") else a for n, a in arguments.items()}
        refused(bench, operation, every, "x")


@table(("operation", "name"), [p for o in WITH_AXIS for p in arrays_in(o, *PARAMETERS)])
def test_bad_parameters(bench, operation, name):
    arguments = given(bench, operation)
    refused(bench, operation, arguments | {name: 3.0}, name, ArgumentTypeError)
    refused(bench, operation, of_shape(bench, arguments, name, (4,)), name)
    refused(bench, operation, of_shape(bench, arguments, name, (3, 5)), name)
    refused(bench, operation, as_dtype(bench, arguments, name, np.float64), name, ArgumentTypeError)
    gapped = arguments[name]._replace(dims=(3,), strides=(2,))
    refused(bench, operation, arguments | {name: gapped}, name)
    refused(bench, operation, arguments | {name: arguments[name]._replace(device_type=99)}, name)


def is_required(operation, name):
    parameter = inspect.signature(getattr(operations, operation)).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty and name not in ("scale", "bias")


REQUIRED = [(o, n) for o in WITH_AXIS for n in PARAMETERS if is_required(o, n)]


@table(("operation", "missing", "argument"), [
    *[(operation, (name,), name) for operation, name in REQUIRED],
    ("stats", ("mean", "variance", "inv_variance"), "mean"),
    *[(o, ("dx", "dscale", "dbias"), "dx") for o in ("backward", "backward_frozen", "training_grad")],
    *[(o, (n,), n) for o, n in (("backward", "saved_mean"), ("forward_training", "saved_inv_variance"),
                                ("forward_training", "running_mean"), ("backward_reduce", "inv_variance"))],
])  # fmt: skip
def test_missing_parameters_outputs_and_halves_of_pairs(bench, operation, missing, argument):
    refused(bench, operation, given(bench, operation) | dict.fromkeys(missing), argument)


@pytest.mark.parametrize(("operation", "outputs"), [
    ("stats", ("mean", "variance", "inv_variance")),
    ("backward", ("dx", "dscale", "dbias")),
    ("backward_frozen", ("dx", "dscale", "dbias")),
    ("training_grad", ("dx", "dscale", "dbias")),
    ("backward_reduce", ("sum_dy", "sum_dy_xmu", "dscale", "dbias")),
])  # fmt: skip
def test_each_output_alone_is_written(bench, operation, outputs):
    """And with the value that it has where all are asked for, of which only dx may be rounded by another kernel."""

    def written(*names):
        arguments = given(bench, operation) | dict.fromkeys(set(outputs) - set(names))
        results = {n: bench.device.from_numpy(np.full(arguments[n].dims, 77, np.float32)) for n in names}
        size = operations.workspace_size(bench.handle, operation, **arguments | results)
        _held, address = bench.memory(size + 64)
        call(bench, operation, arguments | results, workspace=(address, size))
        return {name: bench.device.to_numpy(array) for name, array in results.items()}

    together = written(*outputs)
    assert not any((array == 77).any() for array in together.values())
    for name in outputs:
        np.testing.assert_allclose(written(name)[name], together[name], rtol=1e-5, atol=1e-5)


SCALARS = {
    "epsilon": [-1.0, float("nan"), float("inf")],
    "alpha": [float("nan"), float("inf"), 1e39],
    "beta": [float("nan"), float("inf")],
    "alpha_param": [float("nan")],
    "beta_param": [-float("inf")],
    "exponential_average_factor": [-0.1, 1.1, float("nan")],
    "count": [0, -3],
    "value": [1e39, float("nan"), float("inf")],
}


@table(("operation", "name", "value"), [(o, n, v) for o in EVERY for n in SCALARS for _ in arrays_in(o, n)
                                         for v in SCALARS[n]])  # fmt: skip
def test_bad_scalars(bench, operation, name, value):
    refused(bench, operation, given(bench, operation) | {name: value}, name)
    for other in ("one", True):
        refused(bench, operation, given(bench, operation) | {name: other}, name, ArgumentTypeError)


def test_running_statistics_need_two_elements(bench):
    arguments = {n: a for n, a in given(bench, "forward_training").items() if n != "axis"}
    single = {n: arguments[n]._replace(dims=(1, 3, 1, 1), strides=(3, 1, 1, 1)) for n in ("x", "y")}
    refused(bench, "forward_training", arguments | single, "x")


@table("operation", EVERY)
def test_bad_handles(bench, operation):
    arguments = given(bench, operation)
    with pytest.raises(ArgumentTypeError, match="handle"):
        getattr(operations, operation)(None, **arguments)
    closed = pybnorm.Handle(bench.handle.backend)
    closed.close()
    with pytest.raises(ClosedError):
        getattr(operations, operation)(closed, **arguments)


def test_bad_queries(bench):
    for name, error in [("normalize", ArgumentError), (3, ArgumentTypeError)]:
        with pytest.raises(error, match="operation"):
            operations.workspace_size(bench.handle, name)
    with pytest.raises(ArgumentError, match="workspace"):
        operations.plan(bench.handle, "fill", 1.0, np.ones(3, np.float32), workspace=None)
    with pytest.raises(TypeError, match="nonsense"):
        operations.plan(bench.handle, "fill", 1.0, np.ones(3, np.float32), nonsense=1)


def test_outputs_and_workspace_keep_apart(bench):
    arguments = given(bench, "training_grad")
    size = operations.workspace_size(bench.handle, "training_grad", **arguments)
    for changes, argument in [
        ({"dscale": arguments["mean"]}, ("dscale",)),
        ({"dbias": arguments["dscale"]}, ("dscale", "dbias")),
        ({"dx": arguments["dy"]}, ("dx",)),
    ]:
        _, address = bench.memory(size)
        with pytest.raises(ArgumentError) as caught:
            call(bench, "training_grad", arguments | changes, workspace=(address, size))
        assert caught.value.argument in argument
    buffer, address = bench.memory(size + 1024)
    inside = arguments["x"]._replace(pointer=address + 64)
    with pytest.raises(ArgumentError, match="workspace"):
        call(bench, "training_grad", arguments | {"x": inside}, workspace=(address, size))
    assert buffer.pointer <= inside.pointer


def test_derive():
    assert operations.derive((4, 3, 5), "bf16", (0, -1)) == ((4, 1, 5), pybnorm.DataType.FLOAT32)
    assert operations.derive((4,), "f64", ()) == ((1,), pybnorm.DataType.FLOAT64)
    for bad in [((), "f32", 1), ((0, 2), "f32", 1), ((1,) * 9, "f32", 1), ((4, 3), "i8", 1), ((4, 3), "f32", 2)]:
        with pytest.raises(ArgumentError):
            operations.derive(*bad)


# ---------------------------------------------------------------- what a handle keeps of its calls

KEPT = {  # axes and dtypes with scratch arrays, packed copies and 16-bit parameters among what the call was made of
    "plain": (1, None),
    "copies": ((0, 2), None),
    "16-bit parameters": (1, "f16"),
}


def variants(bench, operation, axis, narrow):
    """Two sets of arguments of one kind, with other values at other addresses; the names of what is written."""
    sets = []
    for shift in (1.0, 1.5):
        arguments = given(bench, operation, axis)
        arrays = {n: bench.device.to_numpy(a) * shift for n, a in arguments.items() if isinstance(a, Buffer)}
        if narrow:
            arrays = {n: a.astype(np.float16) if n in PARAMETERS else a for n, a in arrays.items()}
        sets.append(arguments | bench.put(arrays))
    return sets


def outcome(bench, handle, operation, arguments):
    """Every byte of the arguments after the call on copies of them."""
    placed = {n: bench.device.from_numpy(bench.device.to_numpy(a)) if isinstance(a, Buffer) else a
              for n, a in arguments.items()}  # fmt: skip
    size = operations.workspace_size(handle, operation, **placed)
    buffer, address = bench.memory(size)
    getattr(operations, operation)(handle, **placed, workspace=(address, size))
    assert bench.intact(buffer, address, size)
    return {n: bench.device.to_numpy(a).tobytes() for n, a in placed.items() if isinstance(a, Buffer)}


@pytest.mark.parametrize(("axis", "narrow"), KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("operation", EVERY)
def test_what_is_kept_of_a_call_serves_other_memory(bench, operation, axis, narrow):
    first, second = variants(bench, operation, axis, narrow)
    fresh = []
    for arguments in (first, second):
        with opened(bench) as own:
            try:
                fresh.append(outcome(bench, own, operation, arguments))
            except (pybnorm.UnsupportedError, ArgumentTypeError) as error:
                assert narrow, error  # of a vendor without 16-bit data, or an operation without such parameters
                pytest.skip(f"{bench.handle.backend}: {error}".splitlines()[0])
    assert fresh[0] != fresh[1] or operation == "fill"
    with opened(bench) as own:
        assert outcome(bench, own, operation, first) == fresh[0]
        kept = dict(_core.cache(own, "operations"))
        assert kept
        assert outcome(bench, own, operation, second) == fresh[1]
        assert outcome(bench, own, operation, first) == fresh[0]
        assert _core.cache(own, "operations") == kept, "each was prepared again"
    assert not _core.cache(own, "operations")


def test_what_was_allowed_does_not_allow_what_is_equal_to_it(bench):
    """1, 1.0 and True are one key of a dictionary."""
    arguments = given(bench, "backward_elemt")
    for good, bad in [({"axis": 1}, {"axis": True}), ({"axis": 1}, {"axis": 1.0}), ({"axis": (1,)}, {"axis": (True,)}),
                      ({"alpha": 1.0}, {"alpha": True}), ({"count": 1}, {"count": True})]:  # fmt: skip
        operations.workspace_size(bench.handle, "backward_elemt", **arguments | good)
        with pytest.raises(ArgumentTypeError):
            operations.workspace_size(bench.handle, "backward_elemt", **arguments | bad)
    merge = given(bench, "gather_stats")
    operations.workspace_size(bench.handle, "gather_stats", **merge | {"counts": [1, 0, 3]})
    with pytest.raises(ArgumentTypeError):
        operations.workspace_size(bench.handle, "gather_stats", **merge | {"counts": [True, 0, 3]})


def test_a_kept_call_is_as_careful_as_the_first(bench):
    arguments = given(bench, "axpby")
    call(bench, "axpby", arguments)
    before = contents(bench)
    y = arguments["y"]
    for changes, text in [
        ({"y": y._replace(writable=False)}, "y: got a read-only array"),
        ({"y": arguments["x"]}, "y: got memory that overlaps x"),
        ({"y": arguments["x"]._replace(pointer=arguments["x"].pointer + 4)}, "y: got memory that overlaps x"),
        ({"y": y._replace(pointer=y.pointer + 2)}, "y: got address .*aligned to 4 bytes"),
        ({"y": y._replace(device_type=77)}, "y: got memory of device type 77"),
        ({"y": y._replace(pointer=0)}, "y: got address 0"),
        ({"y": y._replace(pointer=None)}, "y: got address None"),
        ({"x": y._replace(pointer=-8)}, "x: got address -8"),
        ({"x": y._replace(pointer=2**64)}, "x: got address"),
        ({"x": y._replace(pointer=2**64 - 4)}, "x: got address"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            call(bench, "axpby", arguments | changes)
    assert contents(bench) == before


def test_interleaved_views_are_apart(bench):
    interleaved = bench.device.from_numpy(np.ones((4, 6), np.float32))
    even = interleaved._replace(dims=(4, 3), strides=(6, 2))
    odd = even._replace(pointer=even.pointer + 4)
    for _ in range(2):  # their ranges overlap, their elements do not
        operations.fill(bench.handle, 3.0, even)
        operations.fill(bench.handle, 2.0, odd)
    assert bench.device.to_numpy(interleaved).tolist() == [[3.0, 2.0] * 3] * 4


def test_no_more_calls_are_kept_than_said(bench):
    x, y = (bench.device.from_numpy(np.ones((2, 3), np.float32)) for _ in range(2))
    with opened(bench) as own:
        for i in range(operations.MOST_PREPARED + 20):
            operations.axpby(own, float(i), x, 0.0, y)
        assert len(_core.cache(own, "operations")) == operations.MOST_PREPARED
        operations.axpby(own, 0.0, x, 0.0, y)  # among those that had to go
        assert bench.device.to_numpy(y).tolist() == [[0.0] * 3] * 2
        with pytest.raises(TypeError, match="nonsense"):
            operations.axpby(own, 1.0, x, 0.0, y, nonsense=1)
        odd = type("Odd", (), {"__float__": lambda _: 4.0, "__hash__": None})()
        operations.axpby(own, odd, x, 0.0, y)  # without a hash: done, not kept
        assert bench.device.to_numpy(y).tolist() == [[4.0] * 3] * 2


def test_a_list_of_calls_runs_on_its_backend_only(bench):
    calls = _core.CallList(bench.handle)
    y = bench.device.from_numpy(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="slot 32"):
        calls.append(bench.handle, pybnorm.Operation.FILL, {"y": y._replace(pointer=32 << 56)}, (0, 0), value=2.0)
    assert len(calls) == 0
    calls.append(bench.handle, pybnorm.Operation.FILL, {"y": y._replace(pointer=1 << 56)}, (0, 0), value=2.0)
    with pytest.raises(ValueError, match="1 addresses for 2 slots"):
        calls.run(bench.handle, (0,))
    calls.run(bench.handle, (0, y.pointer))
    assert bench.device.to_numpy(y).tolist() == [[2.0] * 3] * 2
    closed = pybnorm.Handle(bench.handle.backend)
    closed.close()
    with pytest.raises(ClosedError):
        calls.run(closed, (0, y.pointer))


class Answers:
    """A producer of DLPack that says something else each time."""

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def _next(self):
        return self.arrays.pop(0) if len(self.arrays) > 1 else self.arrays[0]

    def __dlpack__(self, **options):
        return self._next().__dlpack__(**options)

    def __dlpack_device__(self):
        return self.arrays[0].__dlpack_device__()


def test_an_array_is_asked_once(cpu_bench):
    store = np.zeros((40, 5), np.float32)
    with pybnorm.Handle(cpu_bench.handle.backend) as own:
        operations.fill(own, 7.0, Answers(store[:2], store))
        assert store.sum() == 70.0
        operations.fill(own, 8.0, Answers(store[:2]))
        assert store.sum() == 80.0
        store.flags.writeable = False
        with pytest.raises(ArgumentError, match="y: got a read-only array"):
            operations.fill(own, 7.0, Answers(store[:2]))
        ones = np.ones(5, np.float32)
        x, y = np.ones((4, 5), np.float32), np.zeros((4, 5), np.float32)
        own.forward_inference(Answers(x[:2], x), ones, ones, ones, ones, Answers(y[:2], y))
        assert np.allclose(y, [[1.0] * 5] * 2 + [[0.0] * 5] * 2)
        own.forward_inference(Answers(x), ones, ones, ones, ones, Answers(y))
        assert np.allclose(y, 1.0)


def test_a_numpy_array_that_became_read_only_is_not_written(cpu_bench):
    y = np.zeros((4, 5), np.float32)
    operations.fill(cpu_bench.handle, 7.0, y)
    y.flags.writeable = False
    with pytest.raises(ArgumentError, match="y: got a read-only array"):
        operations.fill(cpu_bench.handle, 7.0, y)


class Changing:
    """A number that counts how often it is asked, hashed by identity."""

    def __init__(self, value, step):
        self.value, self.step = value, step

    def __float__(self):
        self.value += self.step
        return self.value - self.step


def test_a_number_that_changes_is_read_at_every_call(bench):
    x, y = (bench.device.from_numpy(np.ones((4, 5), np.float32)) for _ in range(2))
    parameters = [bench.device.from_numpy(np.ones(5, np.float32)) for _ in range(4)]
    number, memory = Changing(2.0, 1.0), Changing(0.0, 0.0)
    memory.ballast = np.empty(8)
    seen = weakref.ref(memory.ballast)
    size = operations.workspace_size(bench.handle, "axpby", 1.0, x, 0.0, y)
    _buffer, address = bench.memory(size)
    space = (address, size)
    with opened(bench) as own:
        for value in (2.0, 3.0):
            operations.axpby(own, number, x, 0.0, y, workspace=space)
            assert bench.device.to_numpy(y)[0, 0] == value
        operations.axpby(own, memory, x, 0.0, y, workspace=space)
        del memory
        gc.collect()
        assert seen() is None, "a number is kept"
        own.forward_inference(x, *parameters, y, epsilon=Changing(3.0, 5.0))
        own.forward_inference(x, *parameters, y, epsilon=3.0)
        first = bench.device.to_numpy(y)
        with opened(bench) as fresh:
            fresh.forward_inference(x, *parameters, y, epsilon=3.0)
            assert bench.device.to_numpy(y).tobytes() == first.tobytes()


def test_zeros_of_either_sign_are_two_numbers(bench):
    y = bench.device.from_numpy(np.ones((4, 5), np.float32))

    def negative(handle, value):
        operations.fill(handle, value, y)
        return bool(np.signbit(bench.device.to_numpy(y)[0, 0]))

    with opened(bench) as one, opened(bench) as other:
        assert (negative(one, 0.0), negative(one, -0.0)) == (negative(one, 0.0), negative(other, -0.0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_refused_before_any_lock(cpu_bench):
    """Also of what was prepared, and while another thread of the parent computes."""
    code = """
        import os, sys, threading, numpy as np, pybnorm
        from pybnorm import operations as op
        handle = pybnorm.Handle(sys.argv[1])
        x, mean, variance = np.ones((8, 3, 400), "f4"), np.empty(3, "f4"), np.empty(3, "f4")
        op.stats(handle, x, mean=mean, variance=variance)
        going = True
        def work():
            mine = np.empty((2, 3), "f4")
            while going:
                op.stats(handle, x, mean=mine[0], variance=mine[1])
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(4):
            child = os.fork()
            if child == 0:
                good = 0
                for call in (op.stats, lambda handle, *a, **n: op.workspace_size(handle, "stats", *a, **n)):
                    try:
                        call(handle, x, mean=mean, variance=variance)
                    except pybnorm.ArgumentError as error:
                        good += "fork" in str(error)
                os._exit(2 - good)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        going = False
        thread.join()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), cpu_bench.handle.backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0"] * 4, "")


def test_a_signal_handler_may_call_the_same_operation(cpu_bench):
    x = np.ones((8, 3, 40), np.float32)
    mean, variance = np.empty((2, 3), np.float32)
    calls = []
    other = np.full((8, 3, 40), 2.0, np.float32)
    theirs = np.empty((2, 3), np.float32)

    def handler(*_):
        operations.stats(cpu_bench.handle, other, mean=theirs[0], variance=theirs[1])
        calls.append(theirs[0, 0])
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # none while this one is at work

    lent = program._kept_of(cpu_bench.handle).lent
    with lent(64) as outer, lent(64) as inner:
        assert abs(outer - inner) >= 64
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        until = time.monotonic() + 60.0
        while len(calls) <= 10 and time.monotonic() < until:
            operations.stats(cpu_bench.handle, x, mean=mean, variance=variance)
            assert mean.tolist() == [1.0] * 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) > 10
    assert set(calls) == {2.0}


def test_a_recipe_that_declares_an_argument_it_has_not_is_refused():
    with pytest.raises(TypeError, match="_do_nothing has no argument dx"):
        preparation.operation("x dx")(_do_nothing)
    assert "do_nothing" not in program.RECIPES


@table("operation", EVERY)
def test_an_operation_is_a_plain_function_with_its_recipe_s_arguments(operation):
    function, recipe = getattr(operations, operation), program.RECIPES[operation]
    names = list(inspect.signature(function).parameters)
    assert names == ["handle", *recipe.names, "workspace"]
    assert (function.__name__, function.__module__) == (operation, "pybnorm.operations")
    assert set(typing.get_type_hints(function)) == {*names, "return"}
    doc = inspect.getdoc(function)
    assert doc.count("Parameters\n---") == doc.count("Raises\n---") == 1
    assert "workspace" in doc
    with pytest.raises(TypeError, match=rf"{operation}\(\) got an unexpected keyword argument 'bogus'"):
        function(None, **dict.fromkeys(recipe.names), bogus=1)


def _do_nothing(program, x):
    pass


def test_a_handle_that_is_closed_meanwhile_keeps_nothing(bench, monkeypatch):
    """By another thread, while an operation is made ready."""
    make = preparation._prepare
    with pybnorm.Handle(bench.handle.backend) as handle:

        def slow(on, recipe, values):
            made = make(on, recipe, values)
            on.close()
            return made

        monkeypatch.setattr(preparation, "_prepare", slow)
        recipe = program.RECIPES["backward"]
        preparation.prepare(handle, recipe, recipe.bind((), given(bench, "backward")))
        assert not _core.cache(handle, "operations")


def test_a_call_list_has_every_tensor_of_the_operation_and_its_memory(bench):
    """Vendors are given what a list has, unlooked at."""
    real = given(bench, "stats")["x"]
    array = real._replace(pointer=1 << _core.SLOT_BITS)
    calls = _core.CallList(bench.handle)
    with pytest.raises(ArgumentError, match=r"^arrays: got dy, allowed: the tensors of fill alone"):
        calls.append(bench.handle, "fill", {"y": array, "dy": array}, (0, 0), value=0.0)
    values = {"mode": "spatial", "alpha": 1.0, "beta": 0.0, "epsilon": 1e-5, "exponential_average_factor": 0.1}
    with pytest.raises(ArgumentError, match=r"^arrays: got no scale, allowed: every tensor of batch_norm"):
        calls.append(bench.handle, "train", {"x": array, "y": array}, (0, 0), **values)
    assert len(calls) == 0
    for slot in (1, 2):
        calls.append(bench.handle, "fill", {"y": real._replace(pointer=slot << _core.SLOT_BITS)}, (0, 0), value=7.0)
    before = bench.device.to_numpy(real)
    with pytest.raises(ArgumentError, match=r"^addresses: .*an address for each array's slot"):
        calls.run(bench.handle, (0, real.pointer, 0))
    assert np.array_equal(bench.device.to_numpy(real), before), "a call was made before the refusal"
