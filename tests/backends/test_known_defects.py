"""Calls that a known defect makes wrong: warned of or refused, by whatever way they are made."""

import dataclasses
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import pybnorm
from pybnorm import defects, functional, operations
from pybnorm.enums import DataType, Mode, Operation

DIMS = (4, 8, 5, 7)
POINTED = "known defect onednn-made-up, wrong dx: for this test .owner/repository#1."


@pytest.fixture(autouse=True)
def onednn(load_library):
    load_library("onednn")


@pytest.fixture
def table(monkeypatch):
    """A table whose one entry is a defect of backward over five rows: oneDNN's own need arrays of some size."""

    def predicate(call):
        return call == defects.Call(Operation.BACKWARD, Mode.SPATIAL, DataType.FLOAT32, DIMS, saved=call.saved)

    made = dataclasses.replace(
        defects.named("onednn-long-sums"),
        note="",
        id="onednn-made-up",
        fixed=None,
        outputs=("dx",),
        what="for this test",
        links=("owner/repository#1",),
        predicate=predicate,
    )
    monkeypatch.setattr(defects, "DEFECTS", (made,))


def arrays(dims=DIMS):
    x, dy = np.random.default_rng(1).standard_normal((2, *dims)).astype(np.float32)
    return x, dy, np.ones(dims[1], np.float32)


def by_handle(handle, dims=DIMS):
    x, dy, scale = arrays(dims)
    handle.backward(x, dy, scale, np.empty_like(x), np.empty_like(scale), np.empty_like(scale))


def by_plan(handle, dims=DIMS):
    handle.plan_backward(pybnorm.TensorDescriptor("onednn", "f32", dims), algorithm="plain")


def by_address(handle, dims=DIMS):
    x, dy, scale = arrays(dims)
    dx, dscale, dbias = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    desc = pybnorm.TensorDescriptor("onednn", "f32", dims)
    param = pybnorm.derive_bn_tensor_descriptor(desc, "spatial")
    data = [part for array in (x, dy, dx) for part in (desc, array.ctypes.data)]
    vectors = [array.ctypes.data for array in (scale, dscale, dbias)]
    memory = np.empty((1 << 16) + 64, np.uint8)
    space = {"workspace": memory.ctypes.data + -memory.ctypes.data % 64, "workspace_size": 1 << 16}
    pybnorm.batch_normalization_backward(
        handle, "spatial", 1, 0, 1, 0, *data, param, *vectors, 1e-5, None, None, **space
    )


WAYS = [by_handle, by_plan, by_address]


@pytest.mark.parametrize("way", WAYS)
def test_a_warning_for_each_kind_of_call(way, table):
    with pybnorm.Handle("onednn", known_defects="warn") as handle:
        assert handle.known_defects == "warn"
        with pytest.warns(pybnorm.KnownDefectWarning, match=f"onednn .* of f32 4x8x5x7: {POINTED}") as seen:
            way(handle)
        assert seen[0].filename == __file__
        way(handle, (4, 8, 5, 8))
        if way is not by_plan:
            way(handle)  # kept: said once


@pytest.mark.parametrize(
    ("outputs", "told"), [(("y", "dx", "saved_mean"), "wrong dx: "), (("y",), None), ((), "the call fails: ")]
)
def test_a_warning_is_of_what_the_call_writes(outputs, told, table, monkeypatch):
    (made,) = defects.DEFECTS
    monkeypatch.setattr(defects, "DEFECTS", (dataclasses.replace(made, outputs=outputs),))
    with pybnorm.Handle("onednn", known_defects="warn") as handle, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        by_handle(handle)
    assert [f"onednn-made-up, {told}" in str(w.message) for w in seen] == ([] if told is None else [True])


@pytest.mark.parametrize("way", WAYS)
def test_refused_before_the_vendor_sees_it_ignored_or_avoided(way, table):
    with pybnorm.Handle("onednn", known_defects="error") as handle:
        with pytest.raises(pybnorm.UnsupportedError, match=POINTED):
            way(handle)
        way(handle, (4, 8, 5, 8))
    for policy in ["ignore", "avoid"][: 1 if way is by_plan else 2]:
        with pybnorm.Handle("onednn", known_defects=policy) as handle:
            assert handle.known_defects == policy
            way(handle)


@pytest.mark.parametrize("policy", ["avoid", "ignore"])
def test_lists_of_calls_and_functions_on_arrays_do_as_the_handle_says(policy, table, monkeypatch):
    x, dy, scale = arrays()
    monkeypatch.setenv("PYBNORM_KNOWN_DEFECTS", policy)
    sums = {name: np.empty_like(scale) for name in ("sum_dy", "sum_dy_xmu")}
    wanted = dy.sum((0, 2, 3), dtype=float)
    with pybnorm.Handle("onednn") as handle:
        operations.backward_reduce(handle, x=x, dy=dy, mean=scale, **sums)
        np.testing.assert_allclose(sums["sum_dy"], wanted, atol=1e-5)
        np.testing.assert_allclose(functional.batch_norm_backward(x, dy, scale, handle=handle)[2], wanted, atol=1e-5)


def test_the_caller_s_line_is_named_by_functions_too(table):
    x, dy, scale = arrays()
    with pybnorm.Handle("onednn", known_defects="warn") as handle:
        with pytest.warns(pybnorm.KnownDefectWarning, match=POINTED) as seen:
            functional.batch_norm_backward(x, dy, scale, handle=handle, algorithm="plain")
        assert seen[0].filename == __file__


def test_the_environment_decides_where_nobody_else_does(monkeypatch):
    monkeypatch.delenv("PYBNORM_KNOWN_DEFECTS")
    with pybnorm.Handle("onednn") as handle:
        assert handle.known_defects == "warn"
    monkeypatch.setenv("PYBNORM_KNOWN_DEFECTS", "error")
    with pybnorm.Handle("onednn") as handle, pybnorm.Handle("onednn", known_defects="warn") as other:
        assert (handle.known_defects, other.known_defects) == ("error", "warn")
        with pybnorm.Handle.from_pointer("onednn", handle.pointer, known_defects="ignore") as borrowed:
            assert borrowed.known_defects == "ignore"
    monkeypatch.setenv("PYBNORM_KNOWN_DEFECTS", "avoid it")
    with pytest.raises(
        pybnorm.ArgumentError, match=r"PYBNORM_KNOWN_DEFECTS: got avoid it .*, allowed: one of warn, avoid"
    ):
        pybnorm.Handle("onednn")
    with pytest.raises(
        pybnorm.ArgumentError, match="known_defects: got 1, allowed: one of warn, avoid, avoid_all, error, ignore"
    ):
        pybnorm.Handle("onednn", known_defects=1)


def test_the_real_table_reaches_a_user(tmp_path):
    """As the first script of somebody who knows nothing of it."""
    version = pybnorm.load("onednn").version
    if not defects.named("onednn-long-sums").in_version(version):
        pytest.skip("this oneDNN has no known defect")
    code = (
        "import numpy as np, pybnorm\n"
        "x, v = np.zeros((1, 1, 700, 700), 'f4'), [np.ones(1, 'f4') for _ in range(2)]\n"
        "with pybnorm.Handle('onednn') as handle:\n"
        "    handle.forward_training(x, *v, np.empty_like(x))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYBNORM_KNOWN_DEFECTS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "KnownDefectWarning: onednn" in done.stderr
    assert "f32 1x1x700x700: known defect onednn-long-sums, inexact y: " in done.stderr  # nothing else is written


def test_capability_names_the_defects_that_dims_have(table):
    ask = ("onednn", "backward", "spatial", "f32", "nchw")
    bits, reason = pybnorm.capability(*ask, DIMS)
    assert bits & pybnorm.Capability.RUNS
    assert reason == POINTED.removesuffix(" .owner/repository#1.") + " (owner/repository#1)"
    for without in ((*ask, [4, 8, 5, 8]), (*ask, 4), ("onednn", "train", *ask[2:], DIMS)):
        assert pybnorm.capability(*without) == (pybnorm.capability(*without[:5], 4)[0], "")
    for wrong in ((3,), (1,) * 9, (2, 0), "4", True):
        with pytest.raises((pybnorm.ArgumentError, pybnorm.ArgumentTypeError), match="rank"):
            pybnorm.capability(*ask, wrong)


@pytest.mark.parametrize("backend", ["miopen", "native"])
def test_arguments_are_looked_at_where_nothing_depends_on_them(backend):
    """A build without a version, and both where the backend has no defects."""
    for argument, value in (("build", 7), ("build", b"x"), ("version", "3.4"), ("version", (1, None))):
        with pytest.raises(pybnorm.ArgumentError, match=f"^{argument}: got"):
            pybnorm.known_defects(backend, "train,spatial,f32,nchw,2x3x4x5", **{argument: value})
