"""The arithmetic of `pybnorm bench device` on made-up numbers, and a GPU where there is one."""

import math
import sys

import numpy as np
import pytest

import pybnorm
from benchmarks import case as cases
from benchmarks import device, plot, tables, timing
from pybnorm import DataType, Layout

# ---------------------------------------------------------------- arithmetic


def row(operation, layout, dtype, times, *, tensor_bytes=1 << 20, hot=False, percent=50.0):
    contenders = {name: {"seconds": t, "percent": percent} if t else {"unsupported": "no"} for name, t in times.items()}
    place = {"operation": operation, "layout": layout, "dtype": dtype, "shape": [1, tensor_bytes], "hot": hot}
    return place | {"tensor_bytes": tensor_bytes, "contenders": contenders}


def test_the_summary_of_made_up_numbers():
    rows = [
        row("train", "nchw", "f32", {"auto": 1.0, "fast": 0.5, "torch": 2.0}),
        row("train", "nchw", "f32", {"auto": 1.0, "fast": 1.0, "torch": 8.0}, tensor_bytes=64 << 20, percent=80.0),
        row("train", "nchw", "f32", {"auto": 4.0, "fast": None, "torch": None}, tensor_bytes=99 << 20, percent=71.5),
        row("infer", "nhwc", "bf16", {"auto": 2.0, "fast": 2.0, "torch": 1.0}, hot=True),
        row("infer", "nhwc", "bf16", {"auto": 100.0, "fast": 1.0, "torch": 96.0}),
        row("infer", "nhwc", "f16", {"auto": 100.0, "fast": 1.0, "torch": 97.0}),
    ]
    summary = tables.summarize(rows, "auto", "torch")
    assert summary["rows"] == 5
    assert summary["geometric_mean"] == pytest.approx((2 * 8 * 0.5 * 0.96 * 0.97) ** (1 / 5))
    assert summary["worst"] == {
        "operation": "infer", "layout": "nhwc", "dtype": "bf16", "shape": [1, 1 << 20], "hot": True, "ratio": 0.5,
    }  # fmt: skip
    assert [r["ratio"] for r in summary["below"]] == [0.5, 0.96]
    groups = {(g["operation"], g["layout"], g["dtype"]): g for g in summary["groups"]}
    one, other = groups["train", "nchw", "f32"], groups["infer", "nhwc", "bf16"]
    assert (one["geometric_mean"], one["lowest"], one["lowest_percent"]) == (pytest.approx(4.0), 2.0, 71.5)
    assert (other["lowest_percent"], other["rows"]) == (None, 2)
    fast = tables.summarize(rows, "fast", "torch")
    assert fast["geometric_mean"] == pytest.approx((4 * 8 * 0.5 * 96 * 97) ** (1 / 5))
    summary = tables.summarize([row("train", "nchw", "f32", {"auto": 1.0, "torch": None})], "auto", "torch")
    assert (summary["rows"], summary["geometric_mean"], summary["worst"], summary["below"]) == (0, None, None, [])


def test_buffer_sets_leave_nothing_in_the_cache():
    l2 = 60 << 20
    assert device.buffer_sets(822_083_584, l2) == 1
    assert device.buffer_sets(device.HOT_BYTES - 1, l2) == 1
    assert device.buffer_sets(100 << 20, 0) == 1
    for tensor_bytes in (16 << 20, 25_690_112, 51_380_224, 102_760_448, 205_520_896):
        sets = device.buffer_sets(tensor_bytes, l2)
        assert 1 <= sets <= 8
        # Between two uses of an x lie the tensors of the other sets and its own y.
        assert (2 * sets - 1) * tensor_bytes >= 1.5 * l2


def test_measurements_of_a_slow_call_are_few_and_of_a_cpu_the_best_counts():
    calls = (2e-6, 1), (2e-6, 8), (1e-3, 1), (4e-3, 1), (40e-3, 1)
    assert [timing.rounds_of(*call, 9) for call in calls] == [(50, 9), (7, 9), (8, 9), (3, 5), (3, 3)]
    assert timing.timing_of([4.0, 1.0, 2.0], 7, "graph replay") == (2.0, 1.5, 7, 3, "graph replay")
    assert timing.timing_of([4.0, 1.0, 2.0], 7, "wall clock") == (1.0, 3.0, 7, 3, "wall clock")


def test_a_result_that_is_not_a_number_is_infinitely_wrong():
    class Host:
        def sample(self, array, channels):
            return array

    case = cases.Case(Host(), (1, 1), DataType.FLOAT32, Layout.CHANNELS_FIRST, (), *[None] * 6)
    right = {"y": np.array([1.0, -4.0])}
    assert cases.error(case, {"y": np.array([1.0, math.nan])}, right) == math.inf
    assert cases.error(case, {"y": np.array([2.0, -4.0])}, right) == 0.25


def test_the_plot_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(pybnorm.ArgumentError, match=r"pip install matplotlib"):
        plot.check(str(tmp_path / "bench.svg"))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("torch", ["with", "without"])
def test_a_gpu_is_measured(torch, monkeypatch, need_device, need_package):
    if torch == "without":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        pytest.importorskip("torch")
    need_device("cudnn")
    need_package("cuda.core")  # for its memory
    options = {"dtypes": ["f16", "f32"], "algorithms": ["auto"], "operations": ["train", "backward"]}
    result = device.run("cudnn", shapes=["4x64x9x9", "8x64x64x64"], quick=True, host=False, **options)
    assert result["good"], result["rows"]
    assert len(result["rows"]) == 16
    for row in result["rows"]:
        assert row["contenders"]["auto"]["method"] == "graph replay"
        assert all("failure" not in found for found in row["contenders"].values())
        if torch == "with":
            assert row["contenders"]["torch"]["method"] == "graph replay"
