"""`pybnorm bench reference`: every combination is measured, and what is beyond a limit is marked."""

import itertools

import numpy as np
import pytest

from benchmarks import reference as bench
from pybnorm import DataType, Layout, Mode, _arguments
from pybnorm.errors import ArgumentError


def test_bench_measures_every_combination():
    layouts, dtypes = (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST), ("f32", "bf16", DataType.FLOAT64)
    result = bench.run(shapes=[(4, 3, 8, 8), (9, 2)], dtypes=dtypes, layouts=layouts, repeats=2)
    expected = itertools.product(([4, 3, 8, 8], [9, 2]), ("f32", "bf16", "f64"), ("channels_first", "channels_last"))
    rows = result["rows"]
    keys = {(tuple(r["shape"]), r["dtype"], r["layout"], r["operation"]) for r in rows}
    assert keys == {(tuple(s), d, lay, o) for (s, d, lay), o in itertools.product(expected, bench.OPERATIONS)}
    for row in rows:
        assert row["seconds"] > 0
        assert row["ratio"] == row["seconds"] / row["yardstick_seconds"]
        assert 0 < row["extra_bytes"] < bench.LIMIT_BYTES
    assert result["libraries"]["numpy"] == np.__version__
    text = bench.render(result)
    assert len(text.splitlines()) == len(rows) + 4
    assert "9x2" in text


@pytest.mark.parametrize("layout", [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST])
def test_bench_measures_the_layout_it_names(layout):
    case = bench._Case((2, 3, 4, 5), DataType.FLOAT32, layout, Mode.SPATIAL)
    for array in (case.x, case.dy, case.x64):
        expected = _arguments.packed_strides((2, 3, 4, 5), layout)
        assert array.strides == tuple(s * array.itemsize for s in expected)
    assert not np.array_equal(case.x, case.dy)


def test_bench_marks_what_is_beyond_a_limit():
    options = {"shapes": [(4, 3)], "dtypes": ["f32"], "layouts": [Layout.CHANNELS_FIRST], "operations": ["backward"]}
    result = bench.run(**options, repeats=1)
    for ratio, extra_bytes, marked in ((2.0, 1, False), (3.5, 1, True), (1.0, bench.LIMIT_BYTES, True)):
        result["rows"][0] |= {"ratio": ratio, "extra_bytes": extra_bytes}
        assert bench.render(result).splitlines()[1].endswith("!") == marked


@pytest.mark.parametrize(
    ("key", "value"), [("repeats", 0), ("operations", ["derive"]), ("shapes", [(3,)]), ("mode", 9)]
)
def test_bench_refuses(key, value):
    with pytest.raises(ArgumentError) as info:
        bench.run(**{key: value})
    assert info.value.argument == key
