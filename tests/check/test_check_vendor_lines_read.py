"""Lines of the vendors' own tools, read: the way back from vendor_lines, and words that are not understood."""

import dataclasses
import math

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pybnorm import _arguments
from pybnorm.check.problem import Problem, load_suite
from pybnorm.check.vendor_lines import benchdnn, miopen_driver
from pybnorm.check.vendor_lines_read import read, read_benchdnn, read_miopen_driver
from pybnorm.cli import main
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

PLAIN = {"fill": "exact", "eps": None, "magnitude": None, "kappa": 0.0, "factor": 0.25, "algorithm": "", "seed": 0}
PLAIN |= {"repeats": 2, "streams": 1, "bitwise": False}


def said_by_benchdnn(problem):
    """What of a problem its line says."""
    more = {"eps": problem.epsilon, "saved": True}
    if problem.layout != Layout.STRIDED:  # axes of length 1 have no place in memory
        more["strides"] = _arguments.packed_strides(problem.dims, problem.layout)
    if problem.operation == Operation.FORWARD_TRAINING:
        more["running"] = problem.m > 1
    return dataclasses.replace(problem, **(PLAIN | more))


def said_by_the_driver(problem):
    spatial = (*problem.dims[2:], 1, 1)[: max(2, len(problem.dims) - 2)]
    dims = (*problem.dims[:2], *spatial)
    return problem.operation, problem.mode, problem.dtype, dims, problem.running, problem.saved


@st.composite
def problems(draw):
    operation = draw(st.sampled_from([Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD]))
    dims = (draw(st.integers(1, 9)), draw(st.integers(1, 9)), *draw(st.lists(st.integers(1, 7), max_size=3)))
    mode = draw(st.sampled_from([Mode.SPATIAL, Mode.PER_ACTIVATION]))
    m = dims[0] if mode == Mode.PER_ACTIVATION else math.prod(dims) // dims[1]
    values = {"fill": draw(st.sampled_from(["exact", "randn"])), "seed": draw(st.integers(0, 9))}
    if operation != Operation.FORWARD_INFERENCE:
        values["saved"] = draw(st.booleans())
    if operation == Operation.FORWARD_TRAINING:
        values["running"] = draw(st.booleans()) and m > 1
    if draw(st.booleans()):
        values["inplace"] = True
    elif draw(st.booleans()):
        values |= {"activation": 1, "residual": draw(st.booleans())}
    strides = ()
    if draw(st.booleans()):
        order = (0, *range(2, len(dims)), 1)
        step, steps = draw(st.integers(1, 2)), [0] * len(dims)
        for axis in reversed(order):
            steps[axis], step = step, step * dims[axis]
        strides = tuple(steps)
    dtype = draw(st.sampled_from([DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16]))
    return Problem(operation, mode, dtype, dims, strides, **values)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_line_of_benchdnn_is_read_back(problem):
    line = benchdnn(problem)
    if line is None:
        return
    found, notes = read_benchdnn(line)
    assert benchdnn(found) == line
    assert not notes
    assert found == said_by_benchdnn(problem)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_line_of_the_driver_is_read_back(problem):
    line = miopen_driver(problem)
    if line is None:
        return
    found, notes = read_miopen_driver(line)
    assert miopen_driver(found) == line.replace(
        " -r 1", " -r 0" if not found.running and found.word == "train" else " -r 1"
    )
    assert not notes
    assert said_by_the_driver(found)[:4] == said_by_the_driver(problem)[:4]
    assert (found.running, found.saved) == (problem.running, problem.saved) or found.word != "train"


def test_every_line_of_a_suite_is_read_back():
    seen = 0
    for problem in load_suite("smoke"):
        for write, back in ((benchdnn, read_benchdnn), (miopen_driver, read_miopen_driver)):
            line = write(problem)
            if line is not None:
                assert write(back(line).problem) == line
                seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    ("tool", "line", "case"),
    [
        ("benchdnn", '--bnorm --dir=FWD_I --flags=GCH ic64ih56n"resnet:conv1"', "infer,spatial,f32,nchw,2x64x56x56"),
        ("benchdnn", "--bnorm --dir=BWD_DW --flags=GCH mb8ic3", "frozen,spatial,f32,nchw,8x3"),
        ("benchdnn", "./build/benchdnn --bnorm mb8ic3iw7 --flags=CHR", "train,spatial,f32,nchw,8x3x7,activation=relu"),
        (
            "benchdnn",
            "--bnorm --dt=bf16 --tag=nhwc --dir=BWD_D --flags=S mb2ic3id4",
            "backward,spatial,bf16,nhwc,2x3x4x4x4",
        ),
        ("BenchDNN", "--bnorm --flags=CH mb4ic3ih8eps1e-3", "train,spatial,f32,nchw,4x3x8x8,eps=0.001"),
        ("miopendriver", "bnorm -n 8 -c 64 -H 7 -W 9 -m 1 -F 1 -r 1 -s 1 -V 0 -t 1", "train,spatial,f32,nchw,8x64x7x9"),
        (
            "miopendriver",
            "/opt/rocm/bin/MIOpenDriver bnormfp16 -n8 --in_channels=2 --forw 2 -r 1",
            "infer,peract,f16,nchw,8x2x32x32",
        ),
        (
            "miopendriver",
            "bnormbfp16 -n 8 -c 2 -D 3 -H 4 -W 5 -b 1 -m 1 -L NDHWC",
            "backward,spatial,bf16,nhwc,8x2x3x4x5,saved=0",
        ),
        ("miopendriver", "bnorm -n 8 -c 2 -H 4 -W 5 -m 1 -F 2", "train,spatial,f32,nchw,8x2x4x5,running=0,saved=0"),
    ],
)
def test_lines_as_people_write_them(tool, line, case):
    assert read(tool, line).problem == Problem.parse(case)


@pytest.mark.parametrize(
    ("tool", "line", "word"),
    [
        ("benchdnn", "--bnorm --flags=CX mb8ic3", "and not X"),
        ("benchdnn", "--bnorm --batch=inputs/all", "--batch=inputs/all"),
        ("benchdnn", "--bnorm --dt=s8 mb8ic3", "--dt=s8"),
        ("benchdnn", "--bnorm --tag=aBx16b mb8ic3", "--tag=aBx16b"),
        ("benchdnn", "--bnorm --dir=BWD_DW --flags=GCHR mb8ic3", "frozen has no mask"),
        ("benchdnn", "--bnorm mb8ic3kh3", "mb8ic3kh3"),
        ("benchdnn", "--bnorm mb8ic3 ic4", "ic4"),
        ("benchdnn", "--bnorm --strides=8x2:9x2 mb8ic2", "--strides=8x2:9x2"),
        ("benchdnn", "--bnorm 'mb8", "No closing quotation"),
        ("miopendriver", "conv -n 8", "conv"),
        ("miopendriver", "bnorm -n 8 -z 3", "-z"),
        ("miopendriver", "bnorm -n eight", "-n eight"),
        ("miopendriver", "bnorm -F 3", "-F 3"),
        ("miopendriver", "bnorm -F 1 -b 1", "one of forward"),
        ("miopendriver", "bnorm -F 1 -L NCHWc", "-L NCHWc"),
        ("miopendriver", "bnorm -F", "-F"),
        ("cudnn", "x", "cudnn"),
    ],
)
def test_what_is_not_understood_is_named(tool, line, word):
    with pytest.raises(ArgumentError) as caught:
        read(tool, line)
    assert word in str(caught.value)


def test_the_command_reads_a_line_and_says_what_is_otherwise():
    line = "--bnorm --dir=FWD_I mb4ic3iw5"
    done = CliRunner().invoke(main, ["check", "--list", "--from", "benchdnn", line])
    assert done.exit_code == 0
    assert done.stdout == "train,spatial,f32,nchw,4x3x5,running=0,saved=0,eps=0.0625\n"
    assert f"{line}: inference with the statistics of the batch" in done.stderr
    assert f"{line}: scale and shift are given" in done.stderr
    assert CliRunner().invoke(main, ["check", "--from", "benchdnn", "--bnorm --dt=s8 ic3"]).exit_code == 2
    assert read_benchdnn("--bnorm --tag=axb ic3iw2").problem.layout == Layout.CHANNELS_LAST
