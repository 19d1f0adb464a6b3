"""The neutral validator: what it accepts, and that every refusal names argument, value and what is allowed."""

import array
import itertools
import math
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


@pytest.mark.parametrize("value", ["auto", "plain", "graph", "graph:0", "columns:9"])
def test_algorithm_accepts_names_and_numbers(value):
    assert arguments.algorithm(value, NAMES, NUMBERED) == value


@table(
    "value",
    ["", ":", ":1", "quick", "Auto", "auto:1", "plain:0", "graph:", "graph:10", "graph:x", "graph:1:2", "graph:1\0",
     "graph:\u0661", "graph :1", "g", "graphs", "graph\u00e9"],
)  # fmt: skip
def test_algorithm_refuses_other_names_and_numbers(value):
    with pytest.raises(ArgumentError, match=r"^algorithm: got .*auto \| plain .*; graph, columns also with :0 to :9"):
        arguments.algorithm(value, NAMES, NUMBERED)


@pytest.mark.parametrize("value", [None, 3, True, ["auto"], b"auto", Mode.SPATIAL])
def test_algorithm_is_a_string(value):
    assert refused(ArgumentTypeError, "algorithm", arguments.algorithm, value, NAMES).allowed == "a string"
    with pytest.raises(ArgumentError, match=r" \(did you mean 'plain'\?\), allowed: .*plain \| x$"):
        arguments.algorithm("plain:1", ("plain", "x"))


@pytest.mark.parametrize("value", [1, "SPATIAL", "spatial", "Spatial", Mode.SPATIAL])
def test_mode_accepts_number_and_name(value):
    assert arguments.mode(value) is Mode.SPATIAL


@pytest.mark.parametrize("value", [3, -1, "spacial", None, True, 1.5, [], float("nan")])
def test_mode_refuses(value):
    allowed = refused(ArgumentError, "mode", arguments.mode, value).allowed
    near = " (did you mean 'spatial'?)" if value == "spacial" else ""
    assert allowed == f"'per_activation' or 'peract', 'spatial', 'spatial_persistent' or 'persistent'{near}"


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (arguments.mode, {"peract": Mode.PER_ACTIVATION, "Persistent": Mode.SPATIAL_PERSISTENT}),
        (arguments.operation, {w: Operation.FORWARD_TRAINING for w in ("train", "training", "Forward_Training")}),
        (arguments.operation, {w: Operation.FORWARD_INFERENCE for w in ("infer", "INFERENCE", "forward_inference")}),
        (arguments.layout, {w: Layout.CHANNELS_FIRST for w in ("nchw", "NCHW", "channels_first", Layout(0), 0)}),
        (arguments.layout, {"nhwc": Layout.CHANNELS_LAST, "strides": Layout.STRIDED, "strided": Layout.STRIDED}),
        (arguments.data_type, {"F32": DataType.FLOAT32, "BFloat16": DataType.BFLOAT16}),
        (arguments.plan_activation, {"ReLU": Activation.RELU, "none": Activation.NONE}),
    ],
)
def test_words_of_the_command_line_are_taken(read, words):
    for word, member in words.items():
        assert read(word) is member


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
        (pybnorm.Handle, "onedn", "onednn"),
        (pybnorm.Handle, "oneDNN", "onednn"),
        (pybnorm.load, "dnnl", "onednn"),
        (pybnorm.loaded, "hip", "miopen"),
    ],
)
def test_words_of_other_systems_have_a_hint(read, word, near):
    with pytest.raises(ArgumentError, match=rf" \(did you mean {near!r}\?\), allowed: "):
        read(word)


def test_a_long_word_is_compared_with_none():
    assert "did you mean" not in refused(ArgumentError, "mode", arguments.mode, "spatial" * 9).allowed


@pytest.mark.parametrize("value", [9, "trains", False])
def test_operation_refuses(value):
    refused(ArgumentError, "operation", arguments.operation, value)
    assert arguments.operation("backward") is Operation.BACKWARD


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("f32", DataType.FLOAT32),
        (np.float32, DataType.FLOAT32),
        (np.dtype("float64"), DataType.FLOAT64),
        ("float16", DataType.FLOAT16),
        (ml_dtypes.bfloat16, DataType.BFLOAT16),
        (np.dtype(ml_dtypes.bfloat16), DataType.BFLOAT16),
        (DataType.BFLOAT16, DataType.BFLOAT16),
    ],
)
def test_data_type_accepts(value, expected):
    assert arguments.data_type(value) is expected


@pytest.mark.parametrize("value", ["int8", np.int32, None, True, 7, object()])
def test_data_type_refuses(value):
    assert "bfloat16" in refused(ArgumentTypeError, "dtype", arguments.data_type, value).allowed


def test_epsilon_refuses_an_integer_beyond_float():
    refused(ArgumentError, "epsilon", arguments.epsilon, 10**400)


def test_scalar_limits_depend_on_the_data_type():
    assert arguments.scalar(1e300, "alpha") == 1e300
    refused(ArgumentError, "alpha", arguments.scalar, 1e300, "alpha", DataType.FLOAT32)
    refused(ArgumentError, "alpha", arguments.scalar, math.inf, "alpha")
    refused(ArgumentError, "alpha", arguments.scalar, math.nan, "alpha")


@pytest.mark.parametrize("dtype", DataType)
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


@pytest.mark.parametrize("value", [-1, 2**64])
def test_pointer_refuses_values(value):
    refused(ArgumentError, "x", arguments.pointer, value, "x")


def test_pointer_null():
    refused(ArgumentError, "x", arguments.pointer, 0, "x")
    assert arguments.optional_pointer(None, "x") == 0
    assert arguments.optional_pointer(0, "x") == 0


@pytest.mark.parametrize("value", [(3,), (1,) * 9, (2, 0), (2, -1), (2, 2**31), ()])
def test_dims_refuses_values(value):
    refused(ArgumentError, "dims", arguments.dims, value)


@pytest.mark.parametrize(
    "value",
    [
        (1,),
        (12, 4, 1),
        (0, 1),  # broadcast over N
        (2, 1),  # rows overlap
        (-3, 1),
        (2**31, 1),
    ],
)
def test_strides_refuses(value):
    refused(ArgumentError, "strides", arguments.strides, value, (4, 3))


def test_strides_of_length_one_axes_are_free():
    assert arguments.strides((1, 1, 1), (1, 4, 1)) == (1, 1, 1)


@given(st.permutations(range(4)), st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 3))
def test_every_permuted_packed_layout_is_accepted(order, dims, gap):
    strides, step = [0] * 4, 1
    for axis in order:
        strides[axis] = step
        step = step * dims[axis] + gap
    assert arguments.strides(strides, tuple(dims)) == tuple(strides)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_accepted_strides_never_overlap(dims, data):
    strides = data.draw(st.lists(st.integers(1, 30), min_size=len(dims), max_size=len(dims)))
    try:
        arguments.strides(strides, tuple(dims))
    except ArgumentError:
        return
    offsets = sum(np.ix_(*[np.arange(d) * s for d, s in zip(dims, strides, strict=True)])).ravel()
    assert len(set(offsets.tolist())) == offsets.size


@pytest.mark.parametrize("dims", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
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


@pytest.mark.parametrize(("a", "b", "missing"), [(1, None, "b"), (None, 1, "a")])
def test_pair_refuses_one(a, b, missing):
    refused(ArgumentError, missing, arguments.pair, "a", a, "b", b)


def test_pair():
    assert arguments.pair("a", 1, "b", 2) is True
    assert arguments.pair("a", None, "b", None) is False


@pytest.mark.parametrize("shape", [(3,), (1, 3, 1, 1), (3, 1)])
def test_parameter_dims_accepts(shape):
    arguments.parameter_dims("scale", shape, (1,) * len(shape), (1, 3, 1, 1))


@pytest.mark.parametrize("shape", [(4,), (1, 1, 3, 3), (), (3, 3)])
def test_parameter_dims_refuses_shape(shape):
    refused(ArgumentError, "scale", arguments.parameter_dims, "scale", shape, None, (1, 3, 1, 1))


def test_parameter_dims_refuses_gaps():
    refused(ArgumentError, "scale", arguments.parameter_dims, "scale", (3,), (2,), (1, 3, 1, 1))


# ---------------------------------------------------------------- aliasing


def region(name, pointer, dims=(4,), strides=(4,), itemsize=4):
    return arguments.Region(name, pointer, dims, strides, itemsize)


def test_disjoint_accepts_neighbours_and_shared_inputs():
    arguments.disjoint([region("y", 1000)], [region("x", 1016), region("scale", 984), region("bias", 984)])


@pytest.mark.parametrize("at", [988, 1000, 1004, 1012])
def test_disjoint_refuses_overlap(at):
    error = refused(ArgumentError, "y", arguments.disjoint, [region("y", 1000)], [region("x", at)])
    assert "x" in error.value


def test_addresses_are_aligned_and_end_in_memory():
    for name, at in [("y", 1002), ("y", 2**64 - 4)]:
        refused(ArgumentError, name, arguments.disjoint, [region(name, at)], [])
        refused(ArgumentError, "x", arguments.disjoint, [], [region("x", at)])


@pytest.mark.parametrize("value", [-1, 2**64])
def test_byte_count_refuses_values(value):
    assert "bytes" in refused(ArgumentError, "n", arguments.byte_count, value, "n").allowed


def test_other_byte_orders_are_refused():
    refused(ArgumentTypeError, "dtype", arguments.data_type, np.dtype(">f4"))


def test_disjoint_refuses_overlapping_outputs():
    with pytest.raises(ArgumentError, match="overlaps"):
        arguments.disjoint([region("y", 1000), region("saved_mean", 1008)], [])


def test_disjoint_sees_past_a_long_input():
    """The overlap is not between neighbours by start address."""
    long_input = region("x", 1000, (100,), (4,))
    with pytest.raises(ArgumentError, match="overlaps x"):
        arguments.disjoint([region("y", 1200)], [long_input, region("scale", 1100)])


def test_disjoint_tells_interleaved_channel_slices_apart():
    base = np.zeros((4, 5, 5, 16), np.float32)
    left, right, both = base[..., :8], base[..., 8:], base[..., 4:12]

    def of(name, a):
        return arguments.Region(name, a.__array_interface__["data"][0], a.shape, a.strides, 4)

    arguments.disjoint([of("y", left)], [of("x", right)])
    with pytest.raises(ArgumentError):
        arguments.disjoint([of("y", left)], [of("x", both)])


@given(st.data())
def test_disjoint_agrees_with_numpy_for_equal_strides(data):
    outer = data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=3))
    base = np.zeros(outer, np.int16)
    inner = [data.draw(st.integers(1, n)) for n in outer]
    starts = [[data.draw(st.integers(0, n - k)) for n, k in zip(outer, inner, strict=True)] for _ in range(2)]
    views = [base[tuple(slice(s, s + k) for s, k in zip(start, inner, strict=True))] for start in starts]
    regions = [
        arguments.Region(n, v.__array_interface__["data"][0], v.shape, v.strides, 2)
        for n, v in zip(("y", "x"), views, strict=True)
    ]
    if np.shares_memory(*views):
        with pytest.raises(ArgumentError):
            arguments.disjoint(regions[:1], regions[1:])
    else:
        arguments.disjoint(regions[:1], regions[1:])


# ---------------------------------------------------------------- values that only look like what is wanted


class Answers:
    """A number that answers with something else."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    def __index__(self):
        raise self.error

    def __iter__(self):
        raise self.error


NO_NUMBERS = [
    True, np.True_, None, "1", b"1", bytearray(b"1"), memoryview(b"1"), array.array("b", b"1"), np.void(b"1"),
    np.array("1"), np.array(b"1"), np.str_("1"), np.array(True), np.array(1, object), np.datetime64(1, "s"),
    np.timedelta64(1, "s"), np.array([1.0]), np.ones(3), 1j, np.complex64(1 + 5j), np.array(1 + 5j), [1.0],
    {}, object(),
    Answers(ZeroDivisionError()), Answers(TypeError()), Answers(RuntimeError()),
]  # fmt: skip
NUMBERS = [1, 1.0, np.float32(1), np.float16(1), np.float64(1), np.int8(1), np.uint64(1), np.array(1.0), np.array(1),
           Fraction(1), Decimal(1)]  # fmt: skip
NO_INTEGERS = [*NO_NUMBERS, 1.0, np.float32(1), np.array(1), Fraction(1), Decimal(1)]


def kind(value):
    return f"{type(value).__name__}-{getattr(value, 'dtype', '')}"


@table("value", NO_NUMBERS)
def test_what_is_no_number_is_not_converted(value):
    for call, name in (
        (lambda: arguments.scalar(value, "alpha"), "alpha"),
        (lambda: arguments.epsilon(value), "epsilon"),
        (lambda: arguments.factor(value), "exponential_average_factor"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, allowed: a "):
            call()


@pytest.mark.parametrize("value", NUMBERS, ids=kind)
def test_numbers_of_every_kind_are_taken(value):
    found = arguments.scalar(value, "alpha"), arguments.epsilon(value), arguments.factor(value)
    assert found == (1.0, 1.0, 1.0)
    assert {type(number) for number in found} == {float}


@table("value", NO_INTEGERS)
def test_what_is_no_integer_is_none(value):
    for call, name in (
        (lambda: arguments.pointer(value, "x"), "x"),
        (lambda: arguments.byte_count(value, "workspace_size"), "workspace_size"),
        (lambda: arguments.dims((2, value)), "dims"),
        (lambda: arguments.strides((value, 1), (2, 3)), "strides"),
        (lambda: arguments.axes((0, value), 3), "axis"),
    ):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, allowed: a"):
            call()


@table("value", [v for v in NO_INTEGERS if not isinstance(v, str)])
def test_what_is_no_word_and_no_integer_is_none(value):
    with pytest.raises(ArgumentError, match=r"^mode: got"):
        arguments.mode(value)
    with pytest.raises(ArgumentError, match=r"^operation: got"):
        arguments.operation(value)
    with pytest.raises(ArgumentError, match=r"^dtype: got"):
        arguments.data_type(value)


def test_integers_of_numpy_are_integers():
    assert arguments.pointer(np.uint64(2**63), "x") == 2**63
    assert arguments.dims(np.array([2, 3])) == (2, 3)
    assert arguments.axes(np.int8(-1), 3) == (2,)
    assert arguments.mode(np.int64(1)) is Mode.SPATIAL


@pytest.mark.parametrize(
    "value",
    [np.array(1), 1.5, None, Answers(OSError()), {"a": 1}, b"12", bytearray(b"12"), memoryview(b"12"), "12", [[1]]],
    ids=kind,
)
def test_what_is_no_sequence_of_integers(value):
    for call, name in ((arguments.dims, "dims"), (lambda v: arguments.axes(v, 3), "axis")):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got .*, allowed: a"):
            call(value)


def test_endless_sequences_end():
    for call, name in (
        (arguments.dims, "dims"),
        (lambda v: arguments.strides(v, (2, 3)), "strides"),
        (lambda v: arguments.axes(v, 3), "axis"),
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


def test_a_vector_of_another_length_is_told_of_channels_last_memory():
    told = r"allowed: shape \(32,\): x has 32 channels, on axis 1. Where .* x\.transpose\(0, 3, 1, 2\)"
    with pytest.raises(pybnorm.ArgumentError, match=told):
        arguments.parameter_dims("scale", (64,), None, (1, 32, 1, 1))
