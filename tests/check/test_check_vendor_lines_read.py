"""Lines of the vendors' own tools, read: the way back from vendor_lines, and words that are not understood."""

import dataclasses

import pytest
from click.testing import CliRunner
from tables import table

from pybnorm import _arguments
from pybnorm.check.language import benchdnn_lines
from pybnorm.check.language.lines import load_suite
from pybnorm.check.language.problem import Problem
from pybnorm.check.language.vendor_lines import benchdnn, miopen_driver
from pybnorm.check.language.vendor_lines_read import read_all
from pybnorm.cli import main
from pybnorm.enums import Layout, Operation
from pybnorm.errors import ArgumentError


def read(tool, line):
    (found,) = read_all(tool, line).found
    return found


NOT_SAID = ("fill", "eps", "magnitude", "kappa", "factor", "algorithm", "seed", "repeats", "streams", "bitwise")
NOT_SAID += ("scale", "old", "sign", "misalign", "fence")


def said_by_benchdnn(problem):
    """What of a problem its line says."""
    more = {field.name: field.default for field in dataclasses.fields(Problem) if field.name in NOT_SAID}
    more |= {"eps": problem.epsilon, "saved": True}
    if problem.layout != Layout.STRIDED:  # axes of length 1 have no place in memory
        more["strides"] = _arguments.packed_strides(problem.dims, problem.layout)
    if problem.operation == Operation.FORWARD_TRAINING:
        more["running"] = problem.m > 1
    return dataclasses.replace(problem, **more)


def said_by_the_driver(problem):
    spatial = (*problem.dims[2:], 1, 1)[: max(2, len(problem.dims) - 2)]
    return problem.operation, problem.mode, problem.dtype, (*problem.dims[:2], *spatial), problem.saved


def test_every_line_of_a_suite_is_read_back():
    seen = {benchdnn: 0, miopen_driver: 0}
    for problem in load_suite("smoke") + load_suite("product"):
        for tool, write in (("benchdnn", benchdnn), ("miopendriver", miopen_driver)):
            if (line := write(problem)) is None:
                continue
            found, notes = read(tool, line)
            assert (write(found), notes) == (line, ()), problem
            if tool == "benchdnn":
                assert found == said_by_benchdnn(problem)
            else:
                assert said_by_the_driver(found) == said_by_the_driver(problem)
                assert found.running == problem.running or found.word != "train"
            seen[write] += 1
    assert min(seen.values()) > 100


WRITTEN = {
    "benchdnn": r"""
        --bnorm --dir=FWD_I --flags=GCH ic64ih56n"resnet:conv1" -> infer,spatial,f32,nchw,2x64x56x56
        --bnorm --dir=BWD_DW --flags=GCH mb8ic3 -> frozen,spatial,f32,nchw,8x3
        ./build/benchdnn --bnorm --flags=CHR mb8ic3iw7 -> train,spatial,f32,nchw,8x3x7,activation=relu
        --bnorm --dt=bf16 --tag=nhwc --dir=BWD_D --flags=S mb2ic3id4 -> backward,spatial,bf16,nhwc,2x3x4x4x4
        --bnorm ic5 -> train,spatial,f32,nchw,2x5,eps=0.0625
        0:PASSED (12 ms) __REPRO: ./benchdnn --engine=cpu --bnorm --flags=CH mb8ic3 -> train,spatial,f32,nchw,8x3
    """,
    "BenchDNN": r"""
        --bnorm --flags=CH mb4ic3ih8eps1e-3 -> train,spatial,f32,nchw,4x3x8x8,eps=0.001
    """,
    "miopendriver": r"""
        bnorm -n 8 -c 64 -H 7 -W 9 -m 1 -F 1 -r 1 -s 1 -V 0 -t 1 -> train,spatial,f32,nchw,8x64x7x9,eps=0.001
        /opt/rocm/bin/MIOpenDriver bnormfp16 -n8 --in_channels=2 --forw 2 -r 1 ->
            infer,peract,f16,nchw,8x2x32x32,eps=0.001
        bnormbfp16 -n 8 -c 2 -D 3 -H 4 -W 5 -b 1 -m 1 -L NDHWC -> backward,spatial,bf16,nhwc,8x2x3x4x5,saved=0,eps=0.001
        bnorm -n 8 -c 2 -H 4 -W 5 -m 1 -F 2 -> train,spatial,f32,nchw,8x2x4x5,running=0,saved=0,eps=0.001
        bnorm -> train,peract,f32,nchw,32x3x32x32,running=0,saved=0,eps=0.001
        MIOPEN_LOG_LEVEL=6 ./bin/MIOpenDriver bnorm -n 8 -F 1 -m 1 -r 1 -s 1 -V 1 -t 1 2>&1 | tee log ->
            train,spatial,f32,nchw,8x3x32x32,eps=0.001
        MIOpen(HIP): Command [LogCmdBNorm] ./bin/MIOpenDriver bnormfp16 -n 8 -F 2 -r 1 -I 1 --tuning_policy 3 ->
            infer,peract,f16,nchw,8x3x32x32,inverse=1
        `$ ./bin/MIOpenDriver bnormbfp16 -n 8 -F 1 -m 1 -r 1 -s 1` -> train,spatial,bf16,nchw,8x3x32x32,eps=0.001
        bnorm -n 8 -F 2 -r 1 -m 1 -f 10 -x -0.25 -y 2 ->
            infer,spatial,f32,nchw,8x3x32x32,eps=0.001,activation=clamp,low=-0.25,high=2
        bnorm -n 8 -b 1 -m 1 -s 1 -f 7 -x 3 ->
            backward,spatial,f32,nchw,8x3x32x32,eps=0.001,activation=clipped_relu,high=3
    """,
}
"""Lines as people write them, and their cases."""


@table("tool", WRITTEN)
def test_lines_as_people_write_them(tool):
    text = WRITTEN[tool].replace("->\n", "-> ")
    for line, case in (row.split(" -> ") for row in text.strip().splitlines()):
        assert read(tool, line.strip()).problem == Problem.parse(case.strip()), line


@table(
    ("tool", "line", "word"),
    [
        ("benchdnn", "--bnorm --flags=CX mb8ic3", "and not X"),
        ("benchdnn", "--bnorm --batch=inputs/all", "--batch=inputs/all"),
        ("benchdnn", "--bnorm --dt=s8 mb8ic3", "--dt=s8"),
        ("benchdnn", "--bnorm --tag=aBx16b mb8ic3", "--tag=aBx16b"),
        ("benchdnn", "--bnorm --dir=BWD_DW --flags=GCHR mb8ic3", "frozen has no mask"),
        ("benchdnn", "--bnorm mb8ic3kh3", "mb8ic3kh3"),
        ("benchdnn", "--bnorm mb8ic3 --flags=CH", "--flags=CH"),
        ("benchdnn", "--bnorm --flags=CH", "a problem such as"),
        ("benchdnn", "--bnorm --attr-fpmath=bf16 mb8ic3", "--attr-fpmath=bf16"),
        ("benchdnn", "--bnorm --attr-post-ops=relu:0.05 mb8ic3", "--attr-post-ops=relu:0.05"),
        ("benchdnn", "--bnorm --inplace=true --dir=BWD_DW --flags=GCH mb8ic3", "--inplace=true"),
        ("benchdnn", "--bnorm --match=[a] mb8ic3", "--match=[a]"),
        ("benchdnn", "--bnorm mb8_ic3_x4", "mb8_ic3_x4"),
        ("benchdnn", "--bnorm --strides=8x2:9x2 mb8ic2", "--strides=8x2:9x2"),
        ("benchdnn", "--bnorm 'mb8", "No closing quotation"),
        ("miopendriver", "conv -n 8", "conv"),
        ("miopendriver", "bnorm -n 8 -z 3", "-z"),
        ("miopendriver", "bnorm -n eight", "-n eight"),
        ("miopendriver", "bnorm -F 3", "-F 3"),
        ("miopendriver", "bnorm -F 1 -I 1", "-I 1"),
        ("miopendriver", "bnorm -F 1 -Q 1", "-Q 1"),
        ("miopendriver", "bnorm -f 2", "-f 2"),
        ("miopendriver", "bnorm -f 7 -x one", "-x one"),
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
    assert read("benchdnn", "--bnorm --tag=axb ic3iw2").problem.layout == Layout.CHANNELS_LAST


def test_what_the_driver_would_do_otherwise_is_said():
    assert read("miopendriver", "bnorm -F 1 -b 1").notes == ("-b 1 beside -F: the driver runs forward only",)
    assert "in place" in read("miopendriver", "bnorm -F 1 -r 1 -Q 1").notes[0]
    assert read("miopendriver", "bnorm -J 1 -P 0 --gpubuffer_check 1").notes == ()


SHAPES = """# named shapes
mb96_ic192_ih71iw71_n"net:conv_4" # the first
ic3iw5eps1e-3_n"small:1"
"""
LISTS = """--reset --skip-impl=ref -v1
--mb=0,4 --dt=f32,s8 \\
 --tag=abx,aBx16b
--dir=FWD_D --flags=CH
--attr-post-ops=,relu --match=.*net.*
--batch=shapes
--reset
--dir=BWD_DW --flags=CHR --batch=shapes
"""


def test_files_of_benchdnn_are_read_with_their_lists(tmp_path):
    (tmp_path / "shapes").write_text(SHAPES)
    (tmp_path / "lists").write_text(LISTS)
    several = read_all("benchdnn", f"--bnorm --batch={tmp_path}/lists")
    cases = [str(found.problem) for found in several.found]
    net = "spatial,f32,nchw,{}x192x71x71{},eps=0.0625"
    assert [Problem.parse(case) for case in cases] == [
        Problem.parse(line)
        for line in (
            *("train," + net.format(batch, more) for batch in (96, 4) for more in ("", ",activation=relu")),
            "backward," + net.format(96, ",activation=relu"),
            "backward,spatial,f32,nchw,2x3x5,activation=relu,eps=0.001",
        )
    ]
    assert sum(several.refused.values()) == 12
    assert {feature.partition(":")[0] for feature in several.refused} == {"--dt=s8", "--tag=aBx16b"}
    assert several.notes == ("not looked at, as no problem depends on it: --skip-impl, --verbose",)
    line = f"--bnorm --batch={tmp_path}/lists"
    done = CliRunner().invoke(main, ["check", "--list", "--from", "benchdnn", line])
    assert done.exit_code == 0
    assert done.stdout.splitlines() == list(dict.fromkeys(cases))
    assert f"{line}: 8 not read: --dt=s8: f32 | f16 | bf16" in done.stderr


def test_files_of_benchdnn_end(tmp_path, monkeypatch):
    (tmp_path / "loop").write_text("--batch=loop")
    for name, said in (("loop", "at most 8 files"), ("nowhere", "a file of benchdnn's words"), (".", "a file of")):
        with pytest.raises(ArgumentError, match=said):
            read_all("benchdnn", f"--bnorm --batch {tmp_path}/{name}")
    monkeypatch.setattr(benchdnn_lines, "CASES_MAX", 10)
    with pytest.raises(ArgumentError, match="at most 10 problems"):
        read_all("benchdnn", "--bnorm --mb=1,2,3,4 --dt=f32,f16,bf16 ic3")
