"""The problem language: exact round trips, defaults left out, errors that name the token."""

import contextlib
import dataclasses
import os
import pickle
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

import pybnorm
from pybnorm.check.language import lines as language
from pybnorm.check.language.lines import expand, load_suite, read_suite, select
from pybnorm.check.language.problem import FILLS, OPERATIONS, OPTIONS, Problem
from pybnorm.enums import DataType, Layout, Mode
from pybnorm.errors import ArgumentError

NUMBERED = "graph, pointwise also with :0 to :9 after the name"

EXAMPLE = (
    "train,spatial,f32,nchw,8x64x32x32,fill=randn,kappa=3,alpha=2,beta=0.5,running=0,saved=0,factor=0.1,eps=0.001,"
    "seed=7"
)


NUMBERS = ("kappa", "magnitude", "alpha", "beta", "alpha_param", "beta_param", "factor", "eps", "low", "high", "seed")
numbers = st.floats(-(2.0**100), 2.0**100) | st.floats(0, 1) | st.integers(0, 2**64 - 1)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.deferred(lambda: st.sampled_from(load_suite("product"))),
    st.dictionaries(st.sampled_from(NUMBERS), numbers, max_size=5),
)
def test_a_printed_problem_is_read_back_equal_and_needs_no_quotes(problem, numbers):
    for name, value in numbers.items():
        with contextlib.suppress(ArgumentError):  # an option or a value that the problem cannot have
            problem = dataclasses.replace(problem, **{name: value})
    line = str(problem)
    assert Problem.parse(line) == problem
    assert str(Problem.parse(line)) == line
    assert shlex.quote(line) == line
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_the_example_line():
    given = {"fill": "randn", "kappa": 3, "alpha": 2, "beta": 0.5, "running": False, "saved": False, "factor": 0.1}
    problem = Problem("train", "spatial", "f32", (8, 64, 32, 32), **given, eps=0.001, seed=7)
    assert Problem.parse(EXAMPLE) == problem
    assert (str(problem), problem.layout) == (EXAMPLE, Layout.CHANNELS_FIRST)


def test_defaults_are_left_out():
    line = "backward,peract,bf16,nhwc,2x3x4x5"
    spelt = line + ",fill=exact,kappa=0,magnitude=0,alpha=1,beta=0,alpha_param=1,beta_param=0,saved=1,eps=0.75,seed=0"
    assert str(Problem.parse(spelt + ",params=f32,repeats=2,streams=1")) == line
    assert Problem.parse(line).strides == (60, 1, 15, 3)


@pytest.mark.parametrize(
    ("dims", "epsilon"), [("8x3x4x4", 0.0625), ("2x3x3x3", 0.75), ("3x3x3x3", 0.0625), ("1x2x1x2", 0.75)]
)
def test_the_exact_fill_has_the_epsilon_that_makes_it_exact(dims, epsilon):
    assert Problem.parse(f"train,spatial,f32,nchw,{dims}").epsilon == epsilon
    assert Problem.parse(f"train,spatial,f32,nchw,{dims},fill=randn").epsilon == 1e-5


@pytest.mark.parametrize(
    ("tail", "magnitude", "epsilon"),
    [
        ("f32,nchw,4x3x5,fill=range", 1e15, 1e-5),
        ("bf16,nchw,4x3x5,fill=range", 1e15, 1e-5),
        ("f16,nchw,4x3x5,fill=range", 6e4, 1e-5),
        ("f64,nchw,4x3x5,fill=range", 1e100, 1e-5),
        ("f32,nchw,4x3x5,fill=range,magnitude=0.125", 0.125, 1e-5 / 64),
        ("f32,nchw,4x3x5,fill=constant", 1.0, 1e-5),
        ("f32,nchw,4x3x5,fill=paired", 0.0, 0.0625),
        ("f32,nchw,4x3x5,fill=sqrteps", 0.0, 1e-5),
        ("f64,nchw,4x3x5,fill=ramp", 0.0, 1e-5),
    ],
)
def test_magnitude_epsilon_and_parameter_dtype_have_defaults_of_the_fill_and_the_dtype(tail, magnitude, epsilon):
    problem = Problem.parse("train,spatial," + tail)
    assert (problem.magnitude, problem.epsilon) == (magnitude, epsilon)
    assert problem.parameter_dtype == (DataType.FLOAT64 if "f64" in tail else DataType.FLOAT32)
    assert str(problem) == "train,spatial," + tail


@table(
    ("line", "token", "allowed"),
    [
        ("train,spatial,f32,nchw,2x3,fill=sqrteps,eps=0", "0.0", "fill=sqrteps"),
        ("train,spatial,f32,nchw,2x3,magnitude=2", "2.0", "fill=range/constant/level only (fill=exact)"),
        ("train,spatial,f32,nchw,2x3,fill=range,magnitude=0", "0.0", "> 0 that f32 can hold"),
        ("train,spatial,f16,nchw,2x3,fill=range,magnitude=7e4", "70000.0", "> 0 that f16 can hold"),
        ("train,spatial,f32,nchw,4x1x2,fill=special", "special", "two statistics"),
        ("infer,peract,f32,nchw,4x1,fill=constant", "constant", "two statistics"),
        ("train,spatial,f32,nchw,2x3,params=f8", "f8", "f32 | f64 | f16 | bf16"),
        ("train,spatial,f32,nchw,2x3,inplace=2", "2", "0 (absent) or 1 (given)"),
        ("train,spatial,f32,nchw,2x3,inplace=1,beta=1", "1", "beta=0 with inplace=1"),
        ("train,spatial,f32,nchw,2x3,activation=gelu", "gelu", "none | relu | clipped_relu | clamp"),
        ("train,spatial,f32,nchw,2x3,activation=relu,high=1", "1.0", "None with activation 'relu'"),
        ("train,spatial,f32,nchw,2x3,activation=clamp,low=2,high=1", "1.0", "above"),
        ("train,spatial,f32,nchw,2x3,residual=1", "1", "with an activation"),
        ("train,spatial,f32,nchw,8x3,activation=relu,residual=1,inplace=1", "1", "inplace=0"),
        ("train,spatial,f32,nchw,8x3,fill=special,activation=relu", "special", "what it makes of NaN"),
        ("train,spatial,f32,nchw,2x3,bitwise=1,repeats=1", "1", "at least two calls"),
        ("infer,spatial,f32,nchw,2x3,inverse=1,activation=relu", "1", "inverse=1 without"),
        ("train,spatial,f32,nchw,2x3,inverse=1", "inverse=1", "after train"),
        ("train,spatial,f32,nchw,2x3,fil=randn", "fil=randn", "(did you mean 'fill'?)"),
        ("train,spatial,f32,nchw,2x3,epsilon=1", "epsilon=1", "(did you mean 'eps'?)"),
        (
            "train,spatial,f32,nchw,2x3,momentum=1",
            "momentum=1",
            "(did you mean 'factor'? It is PyTorch's momentum, and 1 - ",
        ),
        ("train,f32,2x3", "train,f32,2x3", "such as train,spatial,f32,nchw,"),
        ("train,spatial,f32,nchw,2x3,repeats=0", "0", "from 1 to 1000"),
        ("train,spatial,f32,nchw,2x3,repeats=1001", "1001", "from 1 to 1000"),
        ("train,spatial,f32,nchw,2x3,repeats=two", "two", "from 1 to 1000"),
        ("train,spatial,f32,nchw,2x3,repeats=20,streams=9", "9", "from 1 to 8"),
        ("train,spatial,f32,nchw,2x3,streams=3", "3", "repeats=2"),
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
        ("train,spatial,f32,nchw,2x3,algorithm=atuo", "atuo", "auto | fast | plain | "),
        ("train,spatial,f32,nchw,2x3,algorithm=graphs", "graphs", NUMBERED),
        ("train,spatial,f32,nchw,2x3,algorithm=auto:1", "auto:1", "auto | fast"),
        ("train,spatial,f32,nchw,2x3,algorithm=ex:0", "ex:0", "ex | "),
        ("train,spatial,f32,nchw,2x3,algorithm=graph:", "graph:", NUMBERED),
        ("train,spatial,f32,nchw,2x3,algorithm=graph:12", "graph:12", NUMBERED),
        ("train,spatial,f32,nchw,2x3,algorithm=:1", ":1", NUMBERED),
        ("train,spatial,f32,nchw," + "9" * 5000 + "x3", "9" * 50, "8x64x32x32"),
        ("train,spatial,f32,strides=1x" + "9" * 5000 + ",2x3", "9" * 50, "8x64x32x32"),
        ("train,spatial,f32,nchw,2x3,seed=" + "9" * 5000, "9" * 50, "from 0 to"),
        ("train,spatial,f32,nchw,2x3,seed=any", "any", "an integer from 0 to"),
        ("train,spatial,f32,nchw,2x3,fill=file", "", "data=FILE.npz with fill=file"),
        ("train,spatial,f32,nchw,2x3,fill=randn,data=a.npz", "a.npz", "data=FILE.npz with fill=file"),
        ("train,spatial,f32,nchw,4x3,scale=one", "one", "drawn | zero | small"),
        ("train,spatial,f32,nchw,4x3,fence=middle", "middle", "start | end"),
        ("train,spatial,f32,nchw,4x3,fence=end,misalign=1", "1", "0 with fence=end"),
        ("train,spatial,f32,nchw,4x3,misalign=64", "64", "integer from 0 to 63"),
        ("train,spatial,f32,nchw,4x3,old=nan", "nan", "running=1 and factor=1"),
    ],
)
def test_an_error_names_the_token_and_what_is_allowed(line, token, allowed):
    with pytest.raises(ArgumentError) as caught:
        Problem.parse(line)
    assert token in caught.value.value
    assert allowed in caught.value.allowed
    assert token in str(caught.value)


def test_every_algorithm_of_a_backend_has_a_line():
    for name in {name for backend in pybnorm.backends() for name in pybnorm.algorithms(backend)}:
        line = f"train,spatial,f32,nchw,2x3,algorithm={name}"
        assert str(Problem.parse(line)) == line
    for name in ("graph:0", "pointwise:3", "graph:9"):
        assert Problem.parse(f"train,spatial,f32,nchw,2x3,algorithm={name}").algorithm == name


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


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode(errors="surrogatepass"))  # or none of UTF-8


CASE = "infer,spatial,f32,nchw,2x3"


@pytest.mark.parametrize(
    ("files", "seeds"),
    [
        # relative to the file that includes
        ({"top": f"{CASE}\n@sub/middle  # more\n{CASE},seed=4\n", "sub__middle": f"{CASE},seed=1\n@leaf\n",
          "sub__leaf": f"{CASE},seed=2\n{CASE},seed=1\n{CASE}\n"}, [0, 1, 2, 4]),
        # a file beside the suite goes before a packaged one
        ({"top": "@smoke\n", "smoke": CASE}, [0]),
        # what two suites share is one case, and a diamond no circle
        ({"top": "@a\n@b\n", "a": "@leaf\n", "b": f"@leaf\n{CASE}\n", "leaf": CASE}, [0]),
    ],
)  # fmt: skip
def test_a_suite_includes_others(tmp_path, files, seeds):
    write(tmp_path, **files)
    problems = load_suite(str(tmp_path / "top"))
    assert [p.seed for p in problems] == seeds
    write(tmp_path, more="@top\n@product\n")
    assert load_suite(tmp_path / "more") == [*problems, *load_suite("product")]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"top": f"{CASE}\n@b\n", "b": "@c\n", "c": "@top\n"},
         r"top:2: .*b:1: .*c:1: suite: got .*top -> .*b -> .*, allowed: "),
        ({"top": "@top"}, "circle"),
        ({"top": "@missing"}, r"top:1: suite: got missing, allowed: .*smoke.* \| a readable file"),
        ({"top": f"@bad\n{CASE}", "bad": "train,oops,f32,nchw,2x3"}, r"top:1: .*bad:1: mode: got oops"),
        ({"top": "\ud800"}, "a readable file"),
    ],
)  # fmt: skip
def test_a_suite_that_cannot_be_read_says_where_and_why(tmp_path, files, text):
    write(tmp_path, **files)
    with pytest.raises(ArgumentError, match=text):
        load_suite(tmp_path / "top")


HUGE = f"{CASE},seed={'/'.join(map(str, range(1000)))},alpha={'/'.join(map(str, range(1, 1000)))}"


def hostile_suites(folder):
    """Names of suites that went on for long, for ever or into a traceback, and what is said of them now."""
    for i in range(500):
        write(folder, **{f"chain{i}": f"@chain{i + 1}\n", f"twice{i}": f"@twice{i + 1}\n@./twice{i + 1}\n"})
    write(folder, chain500=CASE, twice20=CASE, huge=HUGE, many=f"{CASE}\n@huge\n", name="@a\0b", surrogate="@a\u2028b")
    (folder / "loop").symlink_to("pool")
    (folder / "pool").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    yield "chain0", "allowed: includes at most 20 deep"
    yield "loop", "Too many levels of symbolic links"
    yield "/dev/zero", "no regular file"
    yield "pipe", "no regular file"
    yield "sparse", "larger than 33554432 bytes"
    yield "huge", "allowed: at most 200000 cases, alternatives multiplied out; these are 999000"
    yield "many", "these are 999000"
    yield "name", "embedded null byte"
    yield "surrogate", "No such file"
    yield "x" * 5000, "File name too long"


@pytest.mark.slow
def test_suites_that_would_go_on_for_ever_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in hostile_suites(tmp_path):
        with pytest.raises(ArgumentError, match=re.escape(text)):
            load_suite(name)
    read, names = language._files.read, []

    def once(name, largest):
        names.append(name)
        assert len(names) < 100
        return read(name, largest)

    monkeypatch.setattr(language._files, "read", once)
    assert [str(p) for p in load_suite("twice0")] == [CASE]  # 2**20 ways to one leaf
    assert len(names) == 21
    with pytest.raises(ArgumentError, match="at most 200000 cases"):
        select([HUGE], [])
    monkeypatch.setattr(language, "CASES_MAX", 1000)
    line = f"{CASE},seed={'/'.join(map(str, range(400)))}"
    assert len(select([line, line], [])) == 400
    write(tmp_path, rows="".join(f"{line},alpha={i}\n" for i in range(3)))
    for cases, suites in (([line] * 3, []), ([line], [tmp_path / "rows"]), ([], ["rows"])):
        with pytest.raises(ArgumentError, match="these are 1001"):
            select(cases, suites)


def test_the_smallest_suites_cover_every_operation_mode_dtype_layout_and_option():
    suite = load_suite("smoke") + load_suite("product")
    assert {p.fill for p in suite} == set(FILLS)
    for word, operation in OPERATIONS.items():
        own = [p for p in suite if p.operation == operation]
        assert {p.dtype for p in own} == set(DataType)
        assert {p.layout for p in own} >= {Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST}
        assert {p.mode for p in own} >= {Mode.SPATIAL, Mode.PER_ACTIVATION}
        assert {len(p.dims) for p in own} >= {2, 4, 5}
        for option in set(OPTIONS[word]) - {"seed", "data", "fence", "unbiased"}:  # the last no vendor's call has
            assert len({getattr(p, option) for p in own}) > 1, (operation, option)
    assert {p.mode for p in suite} == set(Mode)
    assert {p.layout for p in suite} == set(Layout)
    assert all(p.m < 2**14 for p in suite)


def test_a_random_seed_is_drawn_and_printed():
    lines = {str(Problem.parse("train,spatial,f32,nchw,4x3x5,seed=random")) for _ in range(3)}
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"train,spatial,f32,nchw,4x3x5,seed=\d+", line)
        assert str(Problem.parse(line)) == line


def test_the_name_of_a_file_may_have_folders():
    (problem,) = expand("train,spatial,f32,nchw,4x3x5,data=one/two.npz")
    assert (problem.fill, problem.data) == ("file", "one/two.npz")
    assert Problem.parse(str(problem)) == problem
