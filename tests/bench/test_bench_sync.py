"""The order in which synchronized batch norm is measured, and what its benchmark says last."""

import pytest

from benchmarks import sync


@pytest.mark.parametrize("shapes", ["abcde", "ab", "abcdefgh"])
def test_every_shape_and_kind_comes_early_and_every_row_once(shapes):
    kinds = [1, 2, 3, 4, 5, 6]
    rows = sync.rows_of(shapes, kinds)
    assert sorted(rows) == [(shape, kind) for shape in shapes for kind in kinds]
    assert [shape for shape, _ in rows[: len(shapes)]] == list(shapes)
    half = rows[: len(rows) // 2]
    assert {kind for _, kind in half} == set(kinds) or len(shapes) < 4


def row(ratios, kinds=sync.OURS):
    seconds = {kind: {"forward": 1e-4, "backward": 2e-4} for kind in (*kinds, "torch")}
    both = {kind: {"both": ratio} for kind, ratio in zip(kinds, ratios, strict=True)}
    return {"shape": [2, 3], "dtype": "f32", "layout": "nchw", "seconds": seconds, "ratios": both}


def test_the_last_line_is_the_verdict():
    result = {"ranks": 2, "device": "a GPU", "library": "cuDNN 9", "torch": "2", "left_out": ["4x5 f16 nhwc"]}
    errors = {"dtype": "f32", "layout": "nchw", "kind": "reads", "errors": {"y": 0.0}, "torch": {"y": 0.0}}
    result["correctness"] = [errors | {"good": True}, errors | {"good": False}]
    result["speed"] = [row((0.5, 0.25, 1.0, 2.0)), row((0.5, 1.0, 1.0, 0.5))]
    *_, left, last = sync.render(result).splitlines()
    assert left == "left out for time: 4x5 f16 nhwc"
    assert last == (
        "time over PyTorch's (geometric mean): reads 0.50, highest 0.50, 0 of 2 rows above 1; promised 0.50, "
        "highest 1.00, 0 of 2 rows above 1; fixed 1.00, highest 1.00, 0 of 2 rows above 1; module 1.00, highest 2.00, "
        "1 of 2 rows above 1; 1 of 2 results WRONG"
    )
    result["correctness"][1]["good"] = True
    assert sync.render(result).endswith("; all results right")
    result["speed"] = [row((0.5,), ["module"]), row((2.0,), ["module"])]
    text = sync.render(result)
    assert "module 1.00, highest 2.00, 1 of 2 rows above 1" in text
    assert "promised" not in text
