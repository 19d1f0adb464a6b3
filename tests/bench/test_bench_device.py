"""`pybnorm bench device` on the CPU for real, its arithmetic on made-up numbers, and on a GPU where there is one."""

import importlib.resources
import itertools
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from tables import table

import pybnorm
from benchmarks import case as cases
from benchmarks import device, host, machine, plot, shapes, tables, timing
from pybnorm import DataType, Layout, cli, devices


@pytest.fixture(autouse=True)
def onednn(load_library, monkeypatch):
    """The library, and a ceiling of 1 GB/s: percents are known without a quarter of a second per test."""
    load_library("onednn")
    monkeypatch.setattr(timing, "_cpu_copy_speed", lambda: (1e9, "made up"))
    monkeypatch.setattr(host, "CALLS", 3)
    monkeypatch.setattr(host, "QUICK_BATCHES", 2)


def measured(backend="onednn", **options):
    tiny = {"shapes": ["2x8x5x6"], "dtypes": ["f32"], "rivals": [], "quick": True, "host": False}
    return device.run(backend, **(tiny | options))


def shown(result):
    with open(os.devnull, "w", encoding="utf-8") as file:
        console = Console(width=200, record=True, file=file)
        tables.render(result, console)
        return console.export_text()


# ---------------------------------------------------------------- on the CPU


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "itemsize"), [("onednn", "f32", 4), ("onednn", "bf16", 2), ("native", "f64", 8)]
)
def test_every_operation_is_measured_and_right(backend, dtype, itemsize):
    result = measured(backend, dtypes=[dtype], rivals=["numpy"])
    assert (result["good"], result["complete"]) == (True, True)
    wanted = list(itertools.product(("nchw", "nhwc"), ("train", "infer", "backward")))
    assert [(r["layout"], r["operation"]) for r in result["rows"]] == wanted
    for row in result["rows"]:
        assert row["tensor_bytes"] == 2 * 8 * 5 * 6 * itemsize
        assert row["floor_bytes"] == row["tensor_bytes"] * (3 if row["operation"] == "backward" else 2)
        assert (row["sets"], row["hot"]) == (1, False)
        assert list(row["contenders"]) == ["auto", "numpy"]
        for found in row["contenders"].values():
            assert found["seconds"] > 0
            assert found["method"] == "wall clock"
            assert found["error"] < {"f64": 1e-13, "f32": 1e-5, "bf16": 1e-2}[dtype]
            assert found["error"] > 0 or dtype == "f64"  # in which NumPy is the reference
            assert found["percent"] == pytest.approx(100 * row["floor_bytes"] / found["seconds"] / 1e9)
        assert row["contenders"]["auto"]["algorithm"] == "plain"
    assert (result["summary"]["auto"]["rows"], result["summary"]["auto"]["base"]) == (6, "numpy")
    text = shown(result)
    assert "numpy: " + np.__version__ in text
    assert text.count("2x8x5x6") >= 6


def test_pytorch_on_the_cpu():
    pytest.importorskip("torch")
    result = measured(rivals=["torch"], dtypes=["f32", "bf16"])
    assert all("seconds" in row["contenders"]["torch"] for row in result["rows"])
    assert result["rivals"]["torch"]["threads"]


def test_random_shapes_are_those_of_their_seed():
    one, again, other = (shapes.shapes_of(["random:50:" + seed], gpu=False) for seed in ("1", "1", "2"))
    assert one == again != other
    assert (len(set(one)), {len(dims) for dims in one}) == (50, {2, 3, 4, 5})
    sizes = [math.prod(dims) for dims in one]
    assert shapes.LEAST_ELEMENTS / 2 < min(sizes) < 1 << 14
    assert 1 << 20 < max(sizes) < 2 * shapes.MOST_ELEMENTS[False]
    assert max(map(math.prod, shapes.shapes_of(["random:50:1"], gpu=True))) > max(sizes)
    (name,) = shapes.drawn(["random:3"])
    result = measured(shapes=[name], seconds=0)
    assert result["shapes"] == [name]
    assert len(result["left_out"]) == 6
    assert f"shapes: {name}" in shown(result)


def test_contenders_take_turns(monkeypatch):
    """What slows the machine for a moment slows all of them; and the best piece of each counts."""
    order, now = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def work(name, seconds):
        def call():
            order.append(name)
            now[0] += seconds(order.count(name))

        return [call]

    works = [work("one", lambda count: 0.004), work("two", lambda count: 0.001 if count == 9 else 0.004)]
    one, two = timing.Plain(devices.device_for(1)).time_in_turn(works, 3)
    assert [name for name, _ in itertools.groupby(order)] == ["one", "two"] * 4  # one turn more, before the first
    assert (one.seconds, one.spread, one.replays) == (pytest.approx(0.004), pytest.approx(0), 3)
    assert (two.seconds, two.spread) == (pytest.approx(0.001), pytest.approx(3))


def test_random_values_of_the_machine():
    bench = machine.open_machine(1)
    one, other = (bench.tensor((4, 6, 5, 7), DataType.FLOAT32, Layout.CHANNELS_LAST, seed) for seed in (0, 1))
    assert one.strides == (210, 1, 42, 6)
    values = bench.view(one)
    assert values.shape == (4, 6, 5, 7)
    assert abs(values.mean() - machine.MEAN) < 0.3
    assert abs(values.std() - machine.DEVIATION) < 0.3
    assert np.unique(values).size > 800
    assert not np.array_equal(values, bench.view(other))
    np.testing.assert_array_equal(bench.sample(one, (0, 5)), values[:, [0, 5]].reshape(4, 2, 35))
    np.testing.assert_array_equal(bench.sample(bench.vector(np.arange(4, dtype=np.float32)), (1, 3)), [[[1], [3]]])


@pytest.fixture
def harmed(monkeypatch):
    """Has calls of ours do something else: `harm(call, tensors, algorithm)`."""
    true = cases.ours

    def use(harm):
        def ours(case, handle, operation, algorithm):
            made = true(case, handle, operation, algorithm)
            calls = tuple(harm(call, s, algorithm) for call, s in zip(made.calls, case.sets, strict=True))
            names = ("dx",) if operation == "backward" else ("y",)
            return cases.Contender(calls, lambda: {n: v for n, v in made.outputs().items() if n in names})

        monkeypatch.setattr(cases, "ours", ours)

    return use


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["nothing", "slightly"])
def test_what_is_wrong_is_not_timed(harmed, harm):
    """What computes nothing finds the right result of the algorithm before it gone."""
    bench = machine.open_machine(1)

    def harmful(call, tensors, algorithm):
        def wrong():
            if harm == "slightly":
                call()
                bench.view(tensors.y)[-1, -1, 0, 0] += 0.5  # one element of the last channel

        return call if algorithm == "auto" else wrong

    harmed(harmful)
    result = measured(rivals=["numpy"], algorithms=["auto", "plain"])
    assert not result["good"]
    for row in result["rows"]:
        assert row["contenders"]["plain"]["failure"].startswith("wrong: error")
        assert ["seconds" in row["contenders"][name] for name in ("auto", "plain", "numpy")] == [True, False, True]
    assert result["summary"]["plain"]["rows"] == 0
    assert "FAILED" in shown(result)


@pytest.mark.slow
def test_host_time_of_every_way_to_call(monkeypatch):
    """A value-returning call that fails is named; a call of ours that fails fails the run."""
    calls = ["Handle call, NumPy arrays", "pybnorm.operations, NumPy arrays", "functional, NumPy arrays"]
    calls = ["plan plain, addresses", "plan plain, NumPy arrays", *calls, "numpy"]
    monkeypatch.setattr(pybnorm.functional, "batch_norm_inference", None)
    operations = ["infer", "backward"]
    result = measured(host=True, rivals=["numpy"], operations=operations)
    assert [(r["operation"], r["call"]) for r in result["host"]] == list(itertools.product(operations, calls))
    (failed,) = (row for row in result["host"] if "failure" in row)
    assert (failed["operation"], failed["call"], "NoneType" in failed["failure"]) == ("infer", calls[4], True)
    assert all(row["microseconds"] > 0 for row in result["host"] if row is not failed)
    assert result["complete"]
    text = shown(result)
    assert "plan, addresses" in text
    assert "NoneType" in text
    monkeypatch.setattr(host, "_handle_call", lambda operation: "closed")
    with pytest.raises(AttributeError, match="closed"):
        measured(host=True, operations=["infer"])


def test_what_is_left_out_is_named(monkeypatch):
    result = measured(seconds=0)
    assert [left["case"] for left in result["left_out"]] == ["2x8x5x6 f32 nchw", "2x8x5x6 f32 nhwc"]
    assert result["rows"] == []
    assert not result["good"]  # nothing was measured
    assert "left out: 2x8x5x6 f32 nchw, 2x8x5x6 f32 nhwc: after 0 s" in shown(result)
    # kinds rather than shapes
    result = measured(shapes=["random:7:5"], dtypes=["f32", "f16", "bf16"], seconds=0)
    left = [left["case"].partition(" ") for left in result["left_out"]]
    assert len(set(left)) == len(left) == 42
    for turn in range(6):
        shapes_of_turn, _, kinds = zip(*left[7 * turn : 7 * turn + 7], strict=True)
        assert (len(set(shapes_of_turn)), len(set(kinds))) == (7, 6)
    assert "and 38 more: after 0 s" in shown(result)
    monkeypatch.setattr(timing.Plain, "free_bytes", lambda self: 1000)
    assert "are free" in measured(layouts=["nchw"])["left_out"][0]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyboardInterrupt(), "interrupted"), (RuntimeError("illegal address"), "RuntimeError: illegal address")],
)
def test_what_is_finished_is_kept(monkeypatch, error, text):
    true, count = device._Bench.measure, []

    def measure(self, *arguments):
        count.append(1)
        if len(count) == 2:
            raise error
        return true(self, *arguments)

    monkeypatch.setattr(device._Bench, "measure", measure)
    result = measured()
    assert (result["complete"], result["stopped"]) == (False, text)
    assert result["good"] == (text == "interrupted")
    assert len(result["rows"]) == 3
    assert f"{text}: the rows above" in shown(result)


@pytest.mark.slow
def test_an_absent_rival_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = measured(layouts=["nchw"], operations=["infer"], rivals=None)
    assert result["rivals"]["torch"] == {"absent": "PyTorch is not installed"}
    assert list(result["rows"][0]["contenders"]) == ["auto", "numpy"]
    assert "torch: not measured, PyTorch is not installed" in shown(result)


@table(
    ("argument", "values"),
    [
        ("algorithms", ["nonsense"]),
        ("shapes", ["resnet", "2x0x3", "2xx3", "random:3:x", "random:3:-1", "random:123456", "random"]),
        ("dtypes", ["f8"]),
        ("layouts", ["nchwc"]),
        ("operations", ["relu"]),
        ("rivals", ["cudnn-frontend"]),  # not on the CPU
        ("eager", [True]),  # not on the CPU
    ],
)
def test_bad_arguments(argument, values):
    for value in values:
        with pytest.raises(pybnorm.ArgumentError, match=argument):
            measured(**{argument: value if argument == "eager" else [value]})


# ---------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch):
    """Calls ``pybnorm bench device``."""
    monkeypatch.chdir(Path(__file__).parents[2])
    return lambda *words: CliRunner().invoke(cli.main, ["bench", "device", "--backend", "onednn", *words])


TINY = ["--quick", "--no-host", "--shapes", "2x8x5x6", "--dtype", "f32"]


@pytest.mark.slow
def test_the_command_prints_and_writes(command, tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]
    done = command(*TINY, "--rival", "numpy", *files)
    assert done.exit_code == 0, done.output
    assert "auto against numpy" in done.stdout
    result = json.loads((tmp_path / "bench.json").read_text())
    assert len(result["rows"]) == 6
    assert result["environment"]["pybnorm"] == pybnorm.__version__
    picture = (tmp_path / "bench.svg").read_text()
    assert picture.count("<!-- ") > 6  # matplotlib puts every text beside its glyphs
    assert "<!-- time of numpy / auto -->" in picture
    assert all(f"<!-- {operation} (2) -->" in picture for operation in ("train", "infer", "backward"))
    ordered = plot.ratios(result, "auto", "numpy")
    assert len(ordered) == 6
    assert ordered == sorted(ordered)
    assert ordered[0][0] == pytest.approx(result["summary"]["auto"]["worst"]["ratio"])
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((importlib.resources.files("pybnorm.check") / "schema.json").read_text())
    errors = jsonschema.Draft202012Validator(schema).iter_errors(result)
    assert [f"{e.json_path}: {e.message}" for e in errors] == []


@pytest.mark.slow
def test_the_command_without_rivals_prints_json(command):
    done = command(*TINY, "--layout", "nhwc", "--operation", "infer", "--rival", "none", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert list(result["rows"][0]["contenders"]) == ["auto"]
    assert result["summary"] == {}


@table(
    ("arguments", "message"),
    [
        (["--shapes", "2x3x"], "NxCxHxW"),
        (["--algorithm", "nonsense"], "auto | fast | plain"),
        (["--plot", "picture.txt"], ".svg"),
        (["--plot", "nowhere/picture.svg"], "folder that exists"),
        (["--json", "nowhere/bench.json"], "--json"),
    ],
)
def test_the_command_refuses(command, arguments, message):
    done = command(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""
