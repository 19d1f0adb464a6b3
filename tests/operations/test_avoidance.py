"""What becomes of calls that a library gets wrong or does not have: native, a warning, or a refusal."""

import dataclasses

import numpy as np
import pytest
from random_problems import WAYS, judged
from tables import table

import pybnorm
from pybnorm import defects, functional, operations
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.problem import Problem
from pybnorm.enums import Mode, Operation
from pybnorm.layer import BatchNorm

MIOPEN = """\
backward,spatial,f32,nchw,4x8x35x35,misalign=1
backward,spatial,f32,nchw,2x3x1x1031,alpha=0.75,beta=0.5,alpha_param=2,beta_param=-0.5
backward,spatial,f32,nchw,3x2x1x4099,saved=0
backward,spatial,f16,nchw,3x4x13x13,beta=0.5
backward,spatial,bf16,nhwc,2x3x5x5,alpha=0.5
backward,peract,bf16,nchw,5x3x4x4
infer,spatial,bf16,nchw,4x6x5x5,alpha=-2,beta=0.5
infer,peract,bf16,nchw,4x6x5x5
train,spatial,f32,nchw,769x2x1x1025,kappa=100
train,spatial,f16,nchw,2x3x73x73,factor=0
train,spatial,bf16,nchw,7x5,beta=0.5
train,spatial,f32,nhwc,769x3x1x151,beta=0.5
train,peract,bf16,nchw,7x5x3x3
train,spatial,f32,strides=15360x2x480x24,4x7x28x18
infer,spatial,f16,strides=15360x2x480x24,4x7x28x18
backward,peract,f32,nhwc,4x3x5x7
train,spatial,f64,nchw,4x3x5x7,beta=0.5
train,persistent,f32,nchw,4x3x5x7
"""


@table("line", MIOPEN.splitlines())
def test_native_computes_what_miopen_gets_wrong_or_does_not_have(line, need_device):
    need_device("miopen")
    (result,) = judged([Problem.parse(f"{line},fill=randn")], "plan", "miopen", "avoid")
    assert result.status == Status.PASS, result


@table("line", ["train,peract,f32,nchw,1280x4x1x2,fill=sparse", "train,peract,bf16,nchw,769x16,fill=sparse,factor=1"])
@table("way", WAYS)
def test_chained_sums_of_miopen_are_natives_where_a_handle_avoids_all(line, way, need_device):
    need_device("miopen")
    (result,) = judged([Problem.parse(line)], way, "miopen", "avoid_all")
    assert result.status == Status.PASS, result


@table("way", WAYS)
@table("backend, line", [
    ("onednn", "train,spatial,f64,nchw,4x3x5x7,beta=0.5"),
    ("onednn", "backward,peract,f64,nhwc,4x3x5x7"),
    ("miopen", "train,spatial,bf16,nchw,7x5,beta=0.5"),
    ("miopen", "backward,spatial,f32,strides=15360x2x480x24,4x7x28x18"),
])  # fmt: skip
def test_what_a_library_does_not_have_is_natives_where_the_handle_avoids(backend, line, way, need_device):
    need_device(backend)
    problem = Problem.parse(f"{line},fill=randn")
    for policy, status in (("avoid", Status.PASS), ("ignore", Status.UNSUPPORTED)):
        (result,) = judged([problem], way, backend, policy)
        copied = way == "operations" and "strides" in line  # packed copies are an operation's own
        assert result.status == (Status.PASS if copied else status), result
        assert ("Handle(known_defects='avoid') has native compute it" in result.message) == (
            result.status == Status.UNSUPPORTED
        )


LINES = """\
backward,spatial,f32,nchw,4x3x5x7
backward,spatial,f32,nchw,4x3x5x7,saved=0,kappa=30
backward,spatial,f32,nchw,4x3x5x7,alpha=0.75,beta=0.5,alpha_param=2,beta_param=-0.5
backward,spatial,f32,nhwc,4x3x5x7
backward,spatial,f32,nchw,48x5
train,spatial,f32,nchw,4x3x5x7,kappa=100
train,spatial,f32,nchw,4x3x5x7,alpha=0.75,beta=0.5,factor=1
train,spatial,f32,nchw,4x3x5x7,running=0
train,spatial,f32,nhwc,4x3x5x7
train,spatial,f32,nchw,48x5
"""


GAPS = "train,spatial,f32,strides=15360x2x480x24,4x7x28x18"  # elements of a plane lie apart


def many(call):
    """Made up: sums of more than 30 elements are wrong."""
    return call.operation != Operation.FORWARD_INFERENCE and call.mode == Mode.SPATIAL and call.m > 30


def only_defect(monkeypatch, predicate, **facts):
    known = dataclasses.replace(defects.named("onednn-long-sums"), id="onednn-made-up", fixed=None, ways=())
    made = dataclasses.replace(known, what="for this test", predicate=predicate, **facts)
    monkeypatch.setattr(defects, "DEFECTS", (made,))


@table("way", WAYS)
@table("line", [*LINES.splitlines(), GAPS])
def test_a_handle_that_avoids_has_native_compute_what_is_wrong(line, way, monkeypatch, load_library):
    load_library("onednn")
    only_defect(monkeypatch, many)
    problem = Problem.parse(f"{line},fill=randn")
    assert many(problem)
    (result,) = judged([problem], way, "onednn", "avoid")
    assert result.status == Status.PASS, result


def test_a_plan_says_what_it_avoids(monkeypatch, load_library):
    load_library("onednn")
    only_defect(monkeypatch, many)
    x, right = (pybnorm.TensorDescriptor("onednn", "f32", dims) for dims in ((4, 3, 5, 7), (4, 3, 1, 3)))
    with pybnorm.Handle("onednn", known_defects="avoid") as handle:
        for algorithm in ("auto", "fast", None):
            plan = handle.plan_backward(x, algorithm=algorithm)
            assert (plan.algorithm, plan.reason) == ("native", "avoids known defect onednn-made-up: for this test")
            assert handle.plan_backward(right, algorithm=algorithm).algorithm == "plain"
        with pytest.warns(pybnorm.KnownDefectWarning):
            assert handle.plan_backward(x, algorithm="plain").algorithm == "plain"


def test_another_handle_runs_the_vendor_and_says_what_is_wrong(monkeypatch, load_library):
    load_library("onednn")
    only_defect(monkeypatch, many)
    x, dy, scale = sums(4, 3, 5, 7)
    dx, shaped = np.empty_like(x), scale.reshape(1, 3, 1, 1)
    named = "known defect onednn-made-up"

    def calls(handle):
        yield lambda: handle.plan_backward(pybnorm.TensorDescriptor("onednn", "f32", x.shape))
        yield lambda: functional.batch_norm_backward(x, dy, scale, handle=handle)
        yield lambda: operations.backward(handle, x, dy, shaped, dx)
        with BatchNorm.spatial(handle) as layer:
            layer.stage(x)
            yield lambda: layer.forward_training(x, scale, -scale, np.empty_like(x))

    with pybnorm.Handle("onednn", known_defects="warn") as handle:
        for call in calls(handle):
            with pytest.warns(pybnorm.KnownDefectWarning, match=named):
                call()
    with pybnorm.Handle("onednn", known_defects="error") as handle:
        for call in calls(handle):
            with pytest.raises(pybnorm.UnsupportedError, match=named):
                call()
    with pybnorm.Handle("onednn", known_defects="ignore") as handle:
        assert handle.plan_backward(pybnorm.TensorDescriptor("onednn", "f32", x.shape)).algorithm == "plain"
        for call in calls(handle):
            call()


WEAK = """\
train,spatial,f32,nchw,32x2x56x56,fill=image
train,spatial,f32,nhwc,32x2x56x56,fill=level
train,spatial,bf16,nchw,6000x3x1x1,fill=relu,beta=0.5
backward,spatial,f32,nchw,32x2x56x56,fill=relu,saved=0
train,peract,f32,nchw,4096x2x1x2,fill=level
train,peract,f32,nhwc,1280x4x1x3,fill=sparse
backward,peract,f32,nhwc,1280x4x1x3,fill=sparse,saved=0,beta_param=0.5
"""


@pytest.mark.parametrize("line", WEAK.splitlines())
def test_a_weakness_is_avoided_where_a_handle_avoids_all(line, load_library):
    """Of one thread's chains, which are right in no entry point."""
    library = load_library("onednn")
    problem = Problem.parse(f"{line},repeats=1")
    weak = defects.known_defects("onednn", problem, library.version)
    (result,) = judged([problem], "entry", "onednn", "avoid_all")
    assert result.status == Status.PASS, result
    if weak:
        assert max(v.ratios["A"] for v in result.verdicts if v.output not in ("y", "dx")) < 0.5, result


def sums(*dims):
    x, dy = np.random.default_rng(1).standard_normal((2, *dims)).astype(np.float32)
    return x, dy, np.ones(dims[1], np.float32)


@pytest.mark.parametrize("dims", [(4, 3, 5, 7), (4, 3, 1, 3)])
def test_defects_are_asked_for_when_a_plan_is_made(dims, monkeypatch, load_library):
    """A layer asks once for each kind of call; a plan without a defect is the one call, at no cost."""
    load_library("onednn")
    asked = []
    only_defect(monkeypatch, lambda call: asked.append(call) or many(call))
    x, dy, scale = sums(*dims)
    dx, dscale, dbias = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    with pybnorm.Handle("onednn") as handle, BatchNorm.spatial(handle) as layer:
        plan = handle.plan_backward(x, saved=False)
        layer.stage(x)
        layer.forward_training(x, scale, -scale, np.empty_like(x))
        layer.backward(x, dy, scale, dx, dscale, dbias)
        before = len(asked)
        assert before > 0
        for _ in range(3):
            plan(x, dy, scale, dx, dscale, dbias)
            layer.forward_training(x, scale, -scale, np.empty_like(x))
            layer.backward(x, dy, scale, dx, dscale, dbias)
        assert len(asked) == before
