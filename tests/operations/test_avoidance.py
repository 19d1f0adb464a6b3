"""Ways around known defects give right results, by the judge of the check, and are what algorithm "auto" takes."""

import dataclasses

import numpy as np
import pytest
import random_problems

import pybnorm
from pybnorm import defects, functional, operations
from pybnorm.check.bounds import Status
from pybnorm.check.problem import Problem
from pybnorm.check.runner import run_case
from pybnorm.check.session import open_session
from pybnorm.check.worker import Worker
from pybnorm.enums import Mode, Operation
from pybnorm.layer import BatchNorm

MIOPEN = """\
backward,spatial,f32,nchw,4x8x35x35
backward,spatial,f32,nchw,2x3x1x1031,alpha=0.75,beta=0.5,alpha_param=2,beta_param=-0.5
backward,spatial,f32,nchw,3x2x1x4099,saved=0
backward,spatial,f32,nchw,2x3x72x72,saved=0
backward,spatial,f32,nchw,32x5x19x27,kappa=30
backward,spatial,f32,nchw,2x3x3x11x33
backward,spatial,f16,nchw,3x4x13x13,beta=0.5
backward,spatial,f16,nchw,3x4x9x9,saved=0
backward,spatial,bf16,nchw,2x3x33x33
backward,spatial,bf16,nhwc,2x3x5x5,alpha=0.5
backward,peract,bf16,nchw,5x3x4x4
backward,peract,f16,nchw,5x3x4x4,beta=0.5
infer,spatial,bf16,nchw,4x6x5x5,alpha=-2
infer,peract,bf16,nchw,4x6x5x5
infer,spatial,f16,nchw,4x6x8x9,beta=0.5
train,spatial,f32,nchw,2x3x73x73,beta=0.5
train,spatial,f32,nchw,2x3x1x4099,factor=1
train,spatial,f32,nchw,769x2x1x1025,kappa=100
train,spatial,f16,nchw,2x3x73x73,factor=0
train,spatial,bf16,nchw,2x3x73x73,saved=0
train,spatial,bf16,nhwc,4x5x9x9,running=0
train,spatial,bf16,nchw,7x5
train,spatial,f32,nhwc,2x3x1x513
train,spatial,f32,nhwc,769x3x1x151,beta=0.5
train,peract,bf16,nchw,7x5x3x3
"""


@pytest.mark.parametrize("line", MIOPEN.splitlines())
def test_what_miopen_gets_wrong_is_right_another_way(line, need_device):
    need_device("miopen")
    problem = Problem.parse(f"{line},fill=randn,algorithm=auto")
    assert defects.known_defects("miopen", problem, (3, 4, 0))
    session = open_session("miopen")
    with session.handle:
        result = run_case(problem, session)
    assert result.status == Status.PASS, result


# ---------------------------------------------------------------- with defects made up, on the CPU

LINES = """\
backward,spatial,f32,nchw,4x3x5x7
backward,spatial,f32,nchw,4x3x5x7,saved=0,kappa=30
backward,spatial,f32,nchw,4x3x5x7,alpha=0.75,beta=0.5,alpha_param=2,beta_param=-0.5
backward,spatial,f32,nchw,4x3x5x7,inplace=1
backward,spatial,f32,nhwc,4x3x5x7
backward,spatial,f32,nchw,48x5
train,spatial,f32,nchw,4x3x5x7,kappa=100
train,spatial,f32,nchw,4x3x5x7,alpha=0.75,beta=0.5,factor=1
train,spatial,f32,nchw,4x3x5x7,inplace=1,saved=0
train,spatial,f32,nchw,4x3x5x7,running=0
train,spatial,f32,nhwc,4x3x5x7
train,spatial,f32,nchw,48x5
"""


def many(call):
    """Made up: sums of more than 30 elements are wrong."""
    return call.operation != Operation.FORWARD_INFERENCE and call.mode == Mode.SPATIAL and call.m > 30


def table(monkeypatch, predicate, **facts):
    known = dataclasses.replace(defects.named("onednn-long-sums"), id="onednn-made-up", last=None, ways=())
    made = dataclasses.replace(known, what="for this test", predicate=predicate, **facts)
    monkeypatch.setattr(defects, "DEFECTS", (made,))


@pytest.fixture
def session(monkeypatch, load_library):
    load_library("onednn")
    table(monkeypatch, many)
    opened = open_session("onednn")
    with opened.handle:
        yield opened


@pytest.mark.parametrize("line", LINES.splitlines())
def test_calls_in_place_of_one_with_a_defect(line, session):
    problem = Problem.parse(f"{line},fill=randn,algorithm=auto")
    assert many(problem)
    result = run_case(problem, session)
    assert result.status == Status.PASS, result


@pytest.mark.parametrize(
    "line",
    [
        "backward,spatial,f32,nchw,1x2x1x400009,saved=0",
        "train,spatial,f32,nchw,1x1x701x599",
        "train,peract,f32,nchw,420000x2",
        "train,peract,f32,nhwc,420000x3x1x2",
        "backward,peract,f32,nchw,500000x2x1x2,saved=0",
    ],
)
def test_long_sums_of_onednn_are_of_parts(line, load_library):
    """The table's own entry; the first has a prime number of elements."""
    library = load_library("onednn")
    with open_session("onednn").handle as handle:
        found = pybnorm._core.defects_of(handle, Problem.parse(line))
    assert bool(found) == defects.named("onednn-long-sums").in_version(library.version)
    with Worker("onednn", timeout=300, environment={"OMP_NUM_THREADS": "1"}) as worker:
        result = worker.run(Problem.parse(f"{line},fill=randn,algorithm=auto"))
    assert result.status == Status.PASS, result
    if found:
        assert max(v.ratios["A"] for v in result.verdicts) < 0.2, "as if it were one sum"


def sums(*dims):
    x, dy = np.random.default_rng(1).standard_normal((2, *dims)).astype(np.float32)
    return x, dy, np.ones(dims[1], np.float32)


def test_a_plan_says_what_it_avoids_and_does_not_hold_what_it_was_made_of(session):
    plan = session.handle.plan_backward(pybnorm.TensorDescriptor("onednn", "f32", (4, 3, 5, 7)))
    assert (plan.algorithm, plan.reason) == ("composed", "avoids known defect onednn-made-up: for this test")
    assert plan.workspace_size > 0
    right = session.handle.plan_backward(pybnorm.TensorDescriptor("onednn", "f32", (4, 3, 1, 3)))
    assert right.algorithm != "composed"
    assert "defect" not in right.reason
    with pybnorm.Handle("onednn", known_defects="avoid") as handle:
        x = pybnorm.TensorDescriptor("onednn", "f32", (4, 3, 5, 7))
        assert handle.workspace_size("backward", x) == plan.workspace_size
        assert handle.workspace_size("backward", x, algorithm="plain") < plan.workspace_size


def test_an_algorithm_without_the_defect_is_taken_where_it_can_be_built(monkeypatch, load_library):
    load_library("onednn")
    table(monkeypatch, many, ways=("rows",), widest=35)
    with pybnorm.Handle("onednn", known_defects="avoid") as handle:
        for dims, found in (((4, 3, 5, 7), "rows"), ((4, 3, 6, 7), "composed"), ((40, 3), "composed")):
            x = pybnorm.TensorDescriptor("onednn", "f32", dims)
            for algorithm in ("auto", "fast", None):
                plan = handle.plan_backward(x, algorithm=algorithm)
                assert plan.algorithm == found
                assert plan.reason.endswith("avoids known defect onednn-made-up: for this test")
        with pytest.warns(pybnorm.KnownDefectWarning):
            assert handle.plan_backward(x, algorithm="plain").algorithm == "plain"


WEAK = """\
train,spatial,f32,nchw,32x2x56x56,fill=image
train,spatial,f32,nhwc,32x2x56x56,fill=level
train,spatial,bf16,nchw,6000x3x1x1,fill=relu,beta=0.5
backward,spatial,f32,nchw,32x2x56x56,fill=relu,saved=0
train,peract,f32,nchw,4096x2x1x2,fill=level
train,peract,f32,nhwc,1280x4x1x3,fill=sparse
backward,peract,f32,nhwc,1280x4x1x3,fill=sparse,saved=0,beta_param=0.5
"""


@pytest.mark.parametrize(("way", "policy"), [("avoid", "avoid_all"), ("plan", "ignore"), ("operations", "ignore")])
@pytest.mark.parametrize("line", WEAK.splitlines())
def test_a_weakness_is_avoided_by_auto_and_where_a_handle_avoids_all(line, way, policy, load_library):
    """Of one thread's chains, which are right in no entry point."""
    library = load_library("onednn")
    problem = Problem.parse(f"{line},repeats=1")
    weak = defects.known_defects("onednn", problem, library.version)
    taken = random_problems.WAYS[way]("onednn", policy)
    with taken.handle:
        result = random_problems.run(problem, taken)
        assert bool(pybnorm._core.defects_of(taken.handle, problem)) == bool(weak)
    assert result.status == Status.PASS, result
    if weak:
        assert max(v.ratios["A"] for v in result.verdicts if v.output not in ("y", "dx")) < 0.5, result


@pytest.mark.parametrize(
    "line",
    ["train,peract,f32,nchw,1280x4x1x2,fill=sparse", "train,peract,bf16,nchw,769x16,fill=sparse,factor=1,seed=592"],
)
@pytest.mark.parametrize(("way", "policy"), [("avoid", "avoid_all"), ("plan", "ignore"), ("operations", "ignore")])
def test_chained_sums_of_miopen_are_avoided_by_auto_and_where_a_handle_avoids_all(line, way, policy, need_device):
    need_device("miopen")
    taken = random_problems.WAYS[way]("miopen", policy)
    with taken.handle:
        result = random_problems.run(Problem.parse(line), taken)
    assert result.status == Status.PASS, result


def test_what_is_only_weak_is_called_where_nothing_is_better(monkeypatch, load_library):
    load_library("onednn")
    table(monkeypatch, lambda call: True, effect=defects.Effect.WEAK)
    x, dy, scale = sums(4, 3, 5, 7)
    bias = dy[0, :, 0, 0].copy()
    with pybnorm.Handle("onednn", known_defects="avoid_all") as handle:
        y = functional.batch_norm_inference(x, scale, bias, 0 * scale, scale, handle=handle, epsilon=0.0)
        z = np.empty_like(x)
        operations.forward_inference(
            handle, x, scale.reshape(1, 3, 1, 1), None, 0 * scale.reshape(1, 3, 1, 1), scale.reshape(1, 3, 1, 1), z
        )
    np.testing.assert_allclose(y, x + bias.reshape(3, 1, 1), atol=1e-6)
    np.testing.assert_allclose(z, x, atol=1e-4)


REFUSED = """\
infer,spatial,f32,nchw,41x3x5x7
infer,spatial,f16,nhwc,41x3x5x7,beta=0.5
infer,peract,f32,nchw,41x3x5x7
train,peract,f32,nchw,41x3x5x7,beta=0.5
train,spatial,f16,nchw,4x3x5x7,misalign=1,beta=0.5
train,spatial,f16,nchw,4x3x5x7,misalign=1
backward,spatial,bf16,nchw,4x3x5x7,misalign=3
backward,peract,bf16,nchw,4x3x5x7,misalign=3
infer,spatial,bf16,nchw,4x3x5x7,misalign=1
"""


def refused(call):
    """Made up, as cuDNN has it: too many images; 16-bit data off their pairs."""
    few = 40 if call.operation == Operation.FORWARD_TRAINING else 16
    images = call.dims[0] > few and (call.mode != Mode.SPATIAL or call.operation == Operation.FORWARD_INFERENCE)
    return (images and call.operation != Operation.BACKWARD) or call.alignment < 4


@pytest.mark.parametrize("line", REFUSED.splitlines())
def test_calls_in_place_of_one_that_would_be_refused(line, monkeypatch, load_library):
    load_library("onednn")
    table(monkeypatch, refused, effect=defects.Effect.FAILS, outputs=())
    problem = Problem.parse(f"{line},fill=randn")
    assert refused(problem)
    way = random_problems.Avoid("onednn")
    with way.handle:
        result = random_problems.run(problem, way)
        asked = way.handle.descriptor(np.zeros((41, 3, 2), np.float32))
        assert way.handle.plan_forward_inference(asked).algorithm == "composed"
    assert result.status == Status.PASS, result


def test_functions_and_operations_avoid_what_an_entry_point_with_that_policy_avoids(session):
    x, dy, scale = sums(4, 3, 5, 7)
    with pybnorm.Handle("onednn", known_defects="avoid") as handle:
        gradients = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
        handle.backward(x, dy, scale, *gradients)
    for given, wanted in zip(
        functional.batch_norm_backward(x, dy, scale, handle=session.handle), gradients, strict=True
    ):
        np.testing.assert_array_equal(given.ravel(), wanted.ravel())
    dx, dscale, dbias = (np.empty_like(a) for a in gradients)
    shape = 1, 3, 1, 1
    operations.backward(session.handle, x, dy, scale.reshape(shape), dx, dscale.reshape(shape), dbias.reshape(shape))
    for given, wanted in zip((dx, dscale, dbias), gradients, strict=True):
        np.testing.assert_array_equal(given, wanted)
    calls = operations.plan(session.handle, "backward", x, dy, None, dx).calls
    assert "backward SPATIAL f32 (4, 3, 5, 7)" not in calls
    assert any(call.startswith("backward SPATIAL f32 (") for call in calls)


def test_a_layer_avoids_whatever_the_policy_and_says_its_workspace(session):
    x, dy, scale = sums(4, 3, 5, 7)
    names = "running_mean", "running_variance", "saved_mean", "saved_inv_variance"

    def outputs():
        return np.empty_like(x), np.empty_like(scale), np.empty_like(scale)

    with pybnorm.Handle("onednn", known_defects="avoid") as handle:
        state = {name: np.full(3, float(name == "running_variance"), np.float32) for name in names}
        wanted, (y, _, _) = outputs(), outputs()
        handle.forward_training(x, scale, -scale, y, **state)
        handle.backward(x, dy, scale, *wanted, **{name: state[name] for name in names[2:]})
    described = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    for policy in ("warn", "avoid", "error", "ignore"):
        with pybnorm.Handle("onednn", known_defects=policy) as handle, BatchNorm.spatial(handle) as layer:
            layer.stage(x)
            given, (trained, _, _) = outputs(), outputs()
            layer.forward_training(x, scale, -scale, trained)
            layer.backward(x, dy, scale, *given)
            info = layer.info()
            for a, b in zip(
                (trained, *given, *(getattr(info, n) for n in names)), (y, *wanted, *state.values()), strict=True
            ):
                np.testing.assert_array_equal(a.ravel(), b.ravel())
            for call in ("forward_training", "backward"):
                size = layer.workspace_size(call, described)
                assert size == handle.workspace_size(call, described, algorithm="auto")
                assert size > handle.workspace_size(call, described, algorithm="plain")
            with pytest.raises(pybnorm.WorkspaceError):
                layer.forward_training(x, scale, -scale, trained, workspace=np.empty(64, np.uint8))


@pytest.mark.parametrize("dims", [(4, 3, 5, 7), (4, 3, 1, 3)])
def test_a_layer_asks_for_defects_once_for_each_kind_of_call(dims, monkeypatch, load_library):
    load_library("onednn")
    asked = []
    table(monkeypatch, lambda call: asked.append(call) or many(call))
    x, dy, scale = sums(*dims)
    with pybnorm.Handle("onednn") as handle, BatchNorm.spatial(handle) as layer:
        layer.stage(x)
        counts = []
        for _ in range(3):
            layer.forward_training(x, scale, -scale, np.empty_like(x))
            layer.backward(x, dy, scale, np.empty_like(x), np.empty_like(scale), np.empty_like(scale))
            counts.append(len(asked))
    assert counts == [counts[0]] * 3
    assert counts[0] > 0


def test_where_no_way_is_right_the_error_names_the_defect(monkeypatch, load_library):
    load_library("onednn")
    table(monkeypatch, lambda call: call.mode == Mode.SPATIAL and call.operation != Operation.FORWARD_INFERENCE)
    x, dy, scale = sums(4, 3, 5, 7)
    named = "known defect onednn-made-up: for this test; no other way of this library is known to be right"
    for policy in ("warn", "avoid", "error", "ignore"):
        with pybnorm.Handle("onednn", known_defects=policy) as handle:
            with pytest.raises(pybnorm.UnsupportedError, match=named):
                handle.plan_backward(pybnorm.TensorDescriptor("onednn", "f32", x.shape))
            with pytest.raises(pybnorm.UnsupportedError, match=named):
                functional.batch_norm_backward(x, dy, scale, handle=handle)
            with BatchNorm.spatial(handle) as layer:
                layer.stage(x)
                with pytest.raises(pybnorm.UnsupportedError, match=named):
                    layer.forward_training(x, scale, -scale, np.empty_like(x))


@pytest.mark.parametrize("dims", [(4, 3, 5, 7), (4, 3, 5, 8)])
def test_a_call_without_a_defect_is_the_one_call(dims, monkeypatch, load_library):
    """No step more, and so no cost: the table is asked when a plan is made."""
    load_library("onednn")
    asked = []
    table(monkeypatch, lambda call: asked.append(call) or call.dims == (9, 9, 9))
    x, dy, scale = sums(*dims)
    with pybnorm.Handle("onednn") as handle:
        plan = handle.plan_backward(x, saved=False)
        before = len(asked)
        for _ in range(3):
            plan(x, dy, scale, np.empty_like(x), np.empty_like(scale), np.empty_like(scale))
        assert plan.algorithm != "composed"
        assert len(asked) == before
