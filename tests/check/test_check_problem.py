"""The problem language: exact round trips, defaults left out, errors that name the token."""

import importlib.resources
import math
import pickle
import shlex

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pybnorm.check.problem import OPTIONS, Problem, expand, read_suite
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

EXAMPLE = (
    "train,spatial,f32,nchw,8x64x32x32,fill=randn,kappa=3,alpha=2,beta=0.5,running=0,saved=0,factor=0.1,eps=0.001,"
    "seed=7"
)
finite = st.floats(-(2.0**100), 2.0**100)


@st.composite
def problems(draw):
    operation = draw(st.sampled_from(list(OPTIONS)))
    dims = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=8)))
    order = draw(st.permutations(range(len(dims))))
    strides, step = [0] * len(dims), 1
    for axis in order:
        strides[axis] = step
        step *= dims[axis] * draw(st.integers(1, 2))
    fill = draw(st.sampled_from(["exact", "randn"]))
    drawn = {
        "kappa": draw(st.floats(0, 1e6)) if fill == "randn" else 0.0,
        "alpha": draw(finite),
        "beta": draw(finite),
        "alpha_param": draw(finite),
        "beta_param": draw(finite),
        "running": draw(st.booleans()),
        "saved": draw(st.booleans()),
        "factor": draw(st.floats(0, 1)),
        "eps": draw(st.none() | st.floats(0, 1e3)),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    allowed = OPTIONS[operation]
    mode = draw(st.sampled_from(list(Mode)))
    m = dims[0] if mode == Mode.PER_ACTIVATION else math.prod(dims) // dims[1]
    assume(not (m == 1 and operation == Operation.FORWARD_TRAINING and drawn["running"]))
    return Problem(
        operation,
        mode,
        draw(st.sampled_from(list(DataType))),
        dims,
        draw(st.just(()) | st.just(tuple(strides))),
        fill,
        **{name: value for name, value in drawn.items() if name in allowed},
    )


@settings(max_examples=400, deadline=None)
@given(problems())
def test_a_printed_problem_is_read_back_equal_and_needs_no_quotes(problem):
    line = str(problem)
    assert Problem.parse(line) == problem
    assert str(Problem.parse(line)) == line
    assert shlex.quote(line) == line
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_the_example_line():
    problem = Problem.parse(EXAMPLE)
    assert str(problem) == EXAMPLE
    assert problem.operation == Operation.FORWARD_TRAINING
    assert (problem.mode, problem.dtype, problem.layout) == (Mode.SPATIAL, DataType.FLOAT32, Layout.CHANNELS_FIRST)
    assert problem.dims == (8, 64, 32, 32)
    assert (problem.kappa, problem.alpha, problem.beta) == (3.0, 2.0, 0.5)
    assert (problem.running, problem.saved, problem.factor, problem.eps) == (False, False, 0.1, 0.001)
    assert problem.seed == 7


def test_defaults_are_left_out():
    line = "backward,peract,bf16,nhwc,2x3x4x5"
    spelt = line + ",fill=exact,kappa=0,alpha=1,beta=0,alpha_param=1,beta_param=0,saved=1,eps=0.75,seed=0"
    assert str(Problem.parse(spelt)) == line
    assert Problem.parse(line).strides == (60, 1, 15, 3)


@pytest.mark.parametrize(
    ("dims", "epsilon"), [("8x3x4x4", 0.0625), ("2x3x3x3", 0.75), ("3x3x3x3", 0.0625), ("1x2x1x2", 0.75)]
)
def test_the_exact_fill_has_the_epsilon_that_makes_it_exact(dims, epsilon):
    assert Problem.parse(f"train,spatial,f32,nchw,{dims}").epsilon == epsilon
    assert Problem.parse(f"train,spatial,f32,nchw,{dims},fill=randn").epsilon == 1e-5


@pytest.mark.parametrize(
    ("line", "token", "allowed"),
    [
        ("train,spatial,f32,nchw", "train,spatial,f32,nchw", "operation,mode,dtype,layout,dims"),
        ("forward,spatial,f32,nchw,2x3", "forward", "train | infer | backward"),
        ("train,batch,f32,nchw,2x3", "batch", "spatial | persistent | peract"),
        ("train,spatial,f8,nchw,2x3", "f8", "f32 | f64 | f16 | bf16"),
        ("train,spatial,f32,chwn,2x3", "chwn", "nchw | nhwc | strides="),
        ("train,spatial,f32,strides=3x1x1,2x3", "(3, 1, 1)", "one stride for each of the 2"),
        ("train,spatial,f32,strides=1x1,2x3", "(1, 1)", "overlap"),
        ("train,spatial,f32,nchw,2x-3", "2x-3", "8x64x32x32"),
        ("train,spatial,f32,nchw,0x3", "(0, 3)", "sizes from 1"),
        ("train,spatial,f32,nchw,5", "(5,)", "rank 2 to 8"),
        ("train,spatial,f32,nchw,2x3,alpha=two", "two", "a number"),
        ("train,spatial,f32,nchw,2x3,alpha=inf", "inf", "finite"),
        ("train,spatial,f32,nchw,2x3,alpha_param=2", "alpha_param=2", "factor="),
        ("infer,spatial,f32,nchw,2x3,saved=0", "saved=0", "kappa="),
        ("train,spatial,f32,nchw,2x3,running", "running", "running="),
        ("train,spatial,f32,nchw,2x3,running=yes", "yes", "0 (absent) or 1 (given)"),
        ("train,spatial,f32,nchw,2x3,fill=zeros", "zeros", "exact | randn"),
        ("train,spatial,f32,nchw,2x3,kappa=3", "3.0", "fill=randn"),
        ("train,spatial,f32,nchw,2x3,fill=randn,kappa=-1", "-1.0", ">= 0"),
        ("train,spatial,f32,nchw,2x3,factor=1.5", "1.5", "from 0 to 1"),
        ("train,spatial,f32,nchw,2x3,eps=-1", "-1.0", ">= 0"),
        ("train,spatial,f32,nchw,2x3,seed=-1", "-1", "from 0 to"),
        ("train,spatial,f32,nchw,2x3,seed=18446744073709551616", "18446744073709551616", "from 0 to"),
        ("train,spatial,f32,nchw,2x3,seed=1,seed=2", "seed=2", "once"),
        ("train,spatial,f32,nchw,1x3x1x1", "1", "running=0"),
    ],
)
def test_an_error_names_the_token_and_what_is_allowed(line, token, allowed):
    with pytest.raises(ArgumentError) as caught:
        Problem.parse(line)
    assert token in caught.value.value
    assert allowed in caught.value.allowed
    assert token in str(caught.value)


def test_alternatives_multiply_out_with_the_last_token_fastest():
    lines = [str(p) for p in expand("train/infer,spatial,f32,nchw/nhwc,2x3x4x4,fill=randn,seed=1/2")]
    head = ["train,spatial,f32,nchw", "train,spatial,f32,nhwc", "infer,spatial,f32,nchw", "infer,spatial,f32,nhwc"]
    assert lines == [f"{h},2x3x4x4,fill=randn,seed={seed}" for h in head for seed in (1, 2)]


def test_strides_and_words_are_alternatives_of_one_token():
    layouts = [p.layout for p in expand("infer,spatial,f32,nchw/strides=100x20x5x1,2x3x4x4")]
    assert layouts == [Layout.CHANNELS_FIRST, Layout.STRIDED]


def test_a_suite_skips_comments_and_says_which_line_is_wrong():
    text = "# all\n\ntrain,spatial,f32/bf16,nchw,2x3   # two\n"
    assert [p.dtype.short for p in read_suite(text)] == ["f32", "bf16"]
    with pytest.raises(ArgumentError, match=r"mine:4: mode: got oops"):
        read_suite(text + "train,oops,f32,nchw,2x3\n", "mine")
    with pytest.raises(ArgumentError, match=r"mine:4: case: .* on line 3 too"):
        read_suite(text + "train,spatial,f32,nchw,2x3\n", "mine")
    assert len(read_suite("infer,spatial,f32,nchw/nhwc,4x3")) == 1  # the same memory: one case, no complaint
    with pytest.raises(ArgumentError, match="at least one case"):
        read_suite("# nothing\n")


def test_the_smoke_suite_covers_every_operation_mode_dtype_layout_and_option():
    text = (importlib.resources.files("pybnorm.check") / "suites" / "smoke.txt").read_text()
    suite = read_suite(text, "smoke")
    for operation, options in OPTIONS.items():
        own = [p for p in suite if p.operation == operation]
        assert {p.dtype for p in own} == set(DataType)
        assert {p.layout for p in own} >= {Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST}
        assert {p.mode for p in own} >= {Mode.SPATIAL, Mode.PER_ACTIVATION}
        assert {len(p.dims) for p in own} >= {2, 4, 5}
        for option in set(options) - {"seed"}:
            assert len({getattr(p, option) for p in own}) > 1, (operation, option)
    assert {p.mode for p in suite} == set(Mode)
    assert {p.layout for p in suite} == set(Layout)
    assert all(p.m < 2**14 for p in suite)
