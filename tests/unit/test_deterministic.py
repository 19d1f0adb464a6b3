"""Plans whose bits repeat: what is taken, refused and said. No GPU is needed: cuDNN and MIOpen are doubles."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

PLANS = """
    import itertools, pybnorm
    pybnorm.load("cudnn", values["file"])

    CALLS = {
        "forward": lambda handle, x, **how: handle.plan_forward_training(x, **how),
        "inference": lambda handle, x, **how: handle.plan_forward_inference(x, **how),
        "backward": lambda handle, x, **how: handle.plan_backward(x, **how),
        "unsaved": lambda handle, x, **how: handle.plan_backward(x, saved=False, **how),
    }
    LAYOUTS = "nchw", "nhwc", "gap"
    LARGE, SMALL = (64, 32, 128, 96), (4, 8, 3, 5)

    def like(shape, layout, gap=0):
        n, c, h, w = shape
        strides = {"nchw": (c * h * w, h * w, w, 1), "nhwc": (c * h * w, 1, c * w, c)}[layout]
        strides = (h * w * (c + gap), 1, w * (c + gap), c + gap) if gap else strides
        return pybnorm.TensorDescriptor("cudnn", "f32", shape, strides)
    """


@pytest.fixture
def play(child: Any, grapher: str) -> Any:
    """Runs a script behind `PLANS`, on cuDNN's double with graphs."""

    def behind(script: str) -> Any:
        return child(textwrap.dedent(PLANS) + textwrap.dedent(script), file=grapher)

    return behind


def test_auto_and_fast_take_only_ways_whose_bits_repeat(play: Any) -> None:
    told = play(
        """
        told = {}
        with pybnorm.Handle("cudnn") as handle:
            for (name, call), shape, layout in itertools.product(CALLS.items(), (LARGE, SMALL), LAYOUTS):
                x = like(shape, "nhwc", 3) if layout == "gap" else like(shape, layout)
                for algorithm in ("auto", "fast", None):
                    free = call(handle, x, algorithm=algorithm)
                    plan = call(handle, x, algorithm=algorithm, deterministic=True)
                    key = f"{name} {'large' if shape is LARGE else 'small'} {layout} {algorithm}"
                    told[key] = [free.algorithm, free.deterministic, plan.algorithm, plan.deterministic]
        report(told)
        """
    )
    assert all(repeats for *_, repeats in told.values())
    for key, (free, repeated, taken, _) in told.items():
        assert repeated == (free == taken), key  # nothing is given up without need
    changed = {key: (free, taken) for key, (free, _, taken, _) in told.items() if free != taken}
    assert changed["forward large nchw auto"] == ("columns", "spatial")
    assert changed["backward large nchw auto"] == ("columns", "spatial")
    assert changed["unsaved large nchw auto"] == ("columns", "spatial")
    assert changed["unsaved large nhwc auto"] == ("graph:1", "spatial")
    assert changed["unsaved large gap auto"] == ("dense+graph:1", "dense+spatial")
    assert changed["unsaved large nchw fast"] == ("columns", "spatial")
    assert not [key for key in changed if key.startswith("inference") or key.endswith("None")]


def test_an_algorithm_by_name_is_taken_or_the_error_names_those_that_repeat(play: Any) -> None:
    told = play(
        """
        told = {}
        with pybnorm.Handle("cudnn") as handle:
            for (name, call), algorithm in itertools.product(CALLS.items(), pybnorm.algorithms("cudnn")):
                for layout in ("nchw", "nhwc"):
                    try:
                        call(handle, like(SMALL, layout), algorithm=algorithm)
                    except pybnorm.UnsupportedError:
                        continue
                    told[f"{name} {algorithm} {layout}"] = attempt(
                        lambda: call(handle, like(SMALL, layout), algorithm=algorithm, deterministic=True).algorithm)
        report(told)
        """
    )
    refused = {key: result for key, result in told.items() if "error" in result}
    assert sorted(refused) == [
        "backward columns nchw", "backward columns nhwc", "backward rows nchw", "forward columns nchw",
        "forward columns nhwc", "forward layer_norm nchw", "forward rows nchw", "unsaved columns nchw",
        "unsaved columns nhwc", "unsaved ex nhwc", "unsaved graph nchw", "unsaved graph nhwc",
        "unsaved layer_norm nchw", "unsaved rows nchw",
    ]  # fmt: skip
    for result in refused.values():
        assert result["error"] == "UnsupportedError"
        assert "the bits of spatial repeat, and with saved statistics those of ex and graph" in result["text"]
    assert told["inference columns nchw"] == {"value": "columns"}  # without sums


def test_tuning_measures_only_ways_whose_bits_repeat(play: Any) -> None:
    free, repeated = play(
        """
        with pybnorm.Handle("cudnn") as handle:
            x = like(LARGE, "nchw")
            plans = [CALLS["backward"](handle, x, deterministic=d) for d in (False, True)]
            report([pybnorm._core.candidates(plan, True) for plan in plans])
        """
    )
    assert repeated == [name for name in free if name.partition(":")[0] not in ("columns", "rows")]
    assert len(repeated) < len(free)


def test_a_vendor_whose_bits_are_not_known_to_repeat_is_refused(doubles: Any, child: Any) -> None:
    told = child(
        """
        import numpy as np, pybnorm
        pybnorm.load("miopen", values["file"])
        told = []
        with pybnorm.Handle("miopen") as handle:
            with pybnorm.TensorDescriptor("miopen", "f32", (2, 3, 4, 5)) as x:
                for make in (handle.plan_forward_training, handle.plan_forward_inference, handle.plan_backward):
                    told += [make(x).deterministic, attempt(lambda: make(x, deterministic=True))]
        report(told)
        """,
        file=str(doubles.build("miopen", defines=("DOUBLE_COMPUTES",))),
    )
    assert told[::2] == [False, False, False]
    for result in told[1::2]:
        assert result["error"] == "UnsupportedError"
        assert "deterministic=True: the bits of miopen's batch norms are not known to repeat" in result["text"]
