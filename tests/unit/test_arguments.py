"""The neutral validator: what it accepts, and that every refusal names argument, value and what is allowed."""

import contextlib
import itertools
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

import pybnorm
from pybnorm import _arguments as arguments
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError


def refused(kind, argument, function, *args):
    with pytest.raises(kind) as info:
        function(*args)
    assert info.value.argument == argument
    assert info.value.argument in str(info.value)
    assert info.value.value in str(info.value)
    assert info.value.allowed.partition(" (did you mean")[0] in str(info.value)
    return info.value


NAMES, NUMBERED = ("auto", "plain", "graph", "columns"), ("graph", "columns")


def test_algorithms_are_names_and_numbers():
    for value in ("auto", "plain", "graph", "graph:0", "columns:9"):
        assert arguments.algorithm(value, NAMES, NUMBERED) == value
    for value in ("", ":", ":1", "quick", "Auto", "auto:1", "plain:0", "graph:", "graph:10", "graph:x", "graph:1:2",
                  "graph:1\0", "graph:\u0661", "graph :1", "g", "graphs", "graph\u00e9"):  # fmt: skip
        with pytest.raises(
            ArgumentError, match=r"^algorithm: got .*auto \| plain .*; graph, columns also with :0 to :9"
        ):
            arguments.algorithm(value, NAMES, NUMBERED)
    for value in (None, 3, True, ["auto"], b"auto", Mode.SPATIAL):
        assert refused(ArgumentTypeError, "algorithm", arguments.algorithm, value, NAMES).allowed == "a string"
    with pytest.raises(ArgumentError, match=r" \(did you mean 'plain'\?\), allowed: .*plain \| x$"):
        arguments.algorithm("plain:1", ("plain", "x"))


@table(
    ("read", "member", "words"),
    [
        (arguments.mode, Mode.SPATIAL, (1, "SPATIAL", "spatial", "Spatial", Mode.SPATIAL, np.int64(1))),
        (arguments.mode, Mode.PER_ACTIVATION, ("peract",)),
        (arguments.mode, Mode.SPATIAL_PERSISTENT, ("Persistent",)),
        (arguments.operation, Operation.FORWARD_TRAINING, ("train", "training", "Forward_Training")),
        (arguments.operation, Operation.FORWARD_INFERENCE, ("infer", "INFERENCE", "forward_inference")),
        (arguments.operation, Operation.BACKWARD, ("backward",)),
        (arguments.layout, Layout.CHANNELS_FIRST, ("nchw", "NCHW", "channels_first", Layout(0), 0)),
        (arguments.layout, Layout.CHANNELS_LAST, ("nhwc",)),
        (arguments.layout, Layout.STRIDED, ("strides", "strided")),
        (arguments.data_type, DataType.FLOAT16, ("float16",)),
        (arguments.data_type, DataType.FLOAT32, ("f32", "F32", np.float32)),
        (arguments.data_type, DataType.FLOAT64, (np.dtype("float64"),)),
        (
            arguments.data_type,
            DataType.BFLOAT16,
            ("BFloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), DataType.BFLOAT16),
        ),
        (arguments.plan_activation, Activation.RELU, ("ReLU",)),
        (arguments.plan_activation, Activation.NONE, ("none",)),
    ],
)
def test_words_numbers_and_members_are_taken(read, member, words):
    for word in words:
        assert read(word) is member


@table(
    ("read", "argument", "kind", "values", "allowed"),
    [
        (arguments.mode, "mode", ArgumentError, (3, -1, "spacial", None, True, 1.5, [], float("nan")), "'persistent'"),
        (arguments.operation, "operation", ArgumentError, (9, "trains", False), "'backward'"),
        (arguments.data_type, "dtype", ArgumentTypeError, ("int8", np.int32, None, True, 7, object()), "bfloat16"),
    ],
)
def test_other_words_are_refused(read, argument, kind, values, allowed):
    for value in values:
        assert allowed in refused(kind, argument, read, value).allowed


@table(
    ("read", "word", "near"),
    [
        (arguments.data_type, "float", "f32"),
        (arguments.data_type, "Single", "f32"),
        (arguments.data_type, "half", "f16"),
        (arguments.data_type, "double", "f64"),
        (arguments.layout, "ndhwc", "nhwc"),
        (arguments.layout, "nc", "nchw"),
        (arguments.operation, "fwd", "train"),
        (arguments.mode, "per_channel", "spatial"),
        (arguments.mode, "spacial", "spatial"),
        (pybnorm.Handle, "onedn", "onednn"),
        (pybnorm.Handle, "oneDNN", "onednn"),
        (pybnorm.load, "dnnl", "onednn"),
        (pybnorm.loaded, "hip", "miopen"),
    ],
)
def test_words_of_other_systems_have_a_hint(read, word, near):
    with pytest.raises(ArgumentError, match=rf" \(did you mean {near!r}\?\), allowed: "):
        read(word)
    assert "did you mean" not in refused(ArgumentError, "mode", arguments.mode, "spatial" * 9).allowed


@table("dtype", DataType)
def test_what_float32_rounds_to_zero_is_refused_unless_the_data_are_float64(dtype):
    for name, check in (
        ("epsilon", lambda value: arguments.epsilon(value, dtype)),
        ("factor", lambda value: arguments.factor(value, "factor", dtype)),
        ("alpha", lambda value: arguments.scalar(value, "alpha", dtype)),
    ):
        for value in (0.0, 2.0**-149, 1e-40, 0.5):
            assert np.float32(check(value)) == np.float32(value)
        for value in (1.39e-45, 2.0**-150, 1e-50, 5e-324):
            if dtype == DataType.FLOAT64:
                assert check(value) == value
            else:
                assert "1.4e-45" in refused(ArgumentError, name, check, value).allowed
    if dtype != DataType.FLOAT64:
        refused(ArgumentError, "alpha", arguments.scalar, -1e-50, "alpha", dtype)


@given(st.permutations(range(4)), st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 3))
def test_every_permuted_packed_layout_is_accepted(order, dims, gap):
    strides, step = [0] * 4, 1
    for axis in order:
        strides[axis] = step
        step = step * dims[axis] + gap
    assert arguments.strides(strides, tuple(dims)) == tuple(strides)
    assert arguments.strides((1, 1, 1), (1, 4, 1)) == (1, 1, 1)  # axes of length 1 are free


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_accepted_strides_never_overlap(dims, data):
    strides = data.draw(st.lists(st.integers(1, 30), min_size=len(dims), max_size=len(dims)))
    try:
        arguments.strides(strides, tuple(dims))
    except ArgumentError:
        return
    offsets = sum(np.ix_(*[np.arange(d) * s for d, s in zip(dims, strides, strict=True)])).ravel()
    assert len(set(offsets.tolist())) == offsets.size


@table("dims", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_layouts(dims):
    last = arguments.packed_strides(dims, Layout.CHANNELS_LAST)
    moved = np.moveaxis(np.empty([dims[0], *dims[2:], dims[1]], np.int8), -1, 1)
    assert last == moved.strides
    assert arguments.layout_of(dims, arguments.packed_strides(dims)) is Layout.CHANNELS_FIRST
    expected = Layout.CHANNELS_FIRST if len(dims) == 2 else Layout.CHANNELS_LAST
    assert arguments.layout_of(dims, last) is expected
    assert arguments.layout_of(dims, tuple(2 * s for s in last)) is Layout.STRIDED
    refused(ArgumentError, "layout", arguments.packed_strides, dims, Layout.STRIDED)


def test_derived():
    assert arguments.derived_dims((8, 3, 4, 5), Mode.SPATIAL) == (1, 3, 1, 1)
    assert arguments.derived_dims((8, 3, 4, 5), Mode.SPATIAL_PERSISTENT) == (1, 3, 1, 1)
    assert arguments.derived_dims((8, 3, 4, 5), Mode.PER_ACTIVATION) == (1, 3, 4, 5)
    assert arguments.reduced_count((8, 3, 4, 5), Mode.SPATIAL) == 160
    assert arguments.reduced_count((8, 3, 4, 5), Mode.PER_ACTIVATION) == 8
    assert arguments.derived_data_type(DataType.FLOAT64) is DataType.FLOAT64
    assert arguments.derived_data_type(DataType.BFLOAT16) is DataType.FLOAT32
    for shape in ((3,), (1, 3, 1, 1), (3, 1)):
        arguments.parameter_dims("scale", shape, (1,) * len(shape), (1, 3, 1, 1))
    told = r"allowed: shape \(32,\): x has 32 channels, on axis 1. Where .* x\.transpose\(0, 3, 1, 2\)"
    with pytest.raises(pybnorm.ArgumentError, match=told):
        arguments.parameter_dims("scale", (64,), None, (1, 32, 1, 1))


# ---------------------------------------------------------------- aliasing


def region(name, pointer, dims=(4,), strides=(4,), itemsize=4):
    return arguments.Region(name, pointer, dims, strides, itemsize)


def region_of(name, a):
    return arguments.Region(name, a.__array_interface__["data"][0], a.shape, a.strides, a.itemsize)


def test_disjoint_sees_past_a_long_input_and_tells_channel_slices_apart():
    """The overlap is not between neighbours by start address."""
    with pytest.raises(ArgumentError, match="overlaps x"):
        arguments.disjoint([region("y", 1200)], [region("x", 1000, (100,), (4,)), region("scale", 1100)])
    base = np.zeros((4, 5, 5, 16), np.float32)
    left, right, both = base[..., :8], base[..., 8:], base[..., 4:12]
    arguments.disjoint([region_of("y", left)], [region_of("x", right)])
    with pytest.raises(ArgumentError):
        arguments.disjoint([region_of("y", left)], [region_of("x", both)])


@given(st.data())
def test_disjoint_agrees_with_numpy_for_equal_strides(data):
    outer = data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=3))
    base = np.zeros(outer, np.int16)
    inner = [data.draw(st.integers(1, n)) for n in outer]
    starts = [[data.draw(st.integers(0, n - k)) for n, k in zip(outer, inner, strict=True)] for _ in range(2)]
    y, x = (base[tuple(slice(s, s + k) for s, k in zip(start, inner, strict=True))] for start in starts)
    with pytest.raises(ArgumentError) if np.shares_memory(x, y) else contextlib.nullcontext():
        arguments.disjoint([region_of("y", y)], [region_of("x", x)])


# ---------------------------------------------------------------- values that only look like what is wanted


NUMBERS = [1, 1.0, np.float32(1), np.float16(1), np.float64(1), np.int8(1), np.uint64(1), np.array(1.0), np.array(1),
           Fraction(1), Decimal(1)]  # fmt: skip


@table("value", NUMBERS)
def test_numbers_of_every_kind_are_taken(value):
    found = arguments.scalar(value, "alpha"), arguments.epsilon(value), arguments.factor(value)
    assert found == (1.0, 1.0, 1.0)
    assert {type(number) for number in found} == {float}


def test_integers_of_numpy_are_integers_and_endless_sequences_end():
    assert arguments.pointer(np.uint64(2**63), "x") == 2**63
    assert arguments.dims(np.array([2, 3])) == (2, 3)
    assert arguments.axes(np.int8(-1), 3) == (2,)
    for name, call in (
        ("dims", arguments.dims),
        ("strides", lambda v: arguments.strides(v, (2, 3))),
        ("axis", lambda v: arguments.axes(v, 3)),
    ):
        with pytest.raises(ArgumentError, match=rf"^{name}: got count\(\d+\), allowed: .*at most 64"):
            call(itertools.count(1))


class Nameless:
    @property
    def name(self):
        raise RuntimeError

    __hash__ = None


def test_a_dtype_that_says_nothing():
    for value in (Nameless(), [], type("Named", (), {"name": []})()):
        with pytest.raises(ArgumentTypeError, match=r"^dtype: got"):
            arguments.data_type(value)
