"""Plans whose bits repeat: what is taken, refused and said. No GPU is needed: cuDNN and MIOpen are doubles."""

import textwrap

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

    def like(layout, gap=0):
        n, c, h, w = shape = (4, 8, 3, 5)
        strides = {"nchw": (c * h * w, h * w, w, 1), "nhwc": (c * h * w, 1, c * w, c)}[layout]
        strides = (h * w * (c + gap), 1, w * (c + gap), c + gap) if gap else strides
        return pybnorm.TensorDescriptor("cudnn", "f32", shape, strides)
    """


@pytest.fixture
def play(child, grapher):
    """Runs a script behind `PLANS`, on cuDNN's double with graphs."""

    def behind(script):
        return child(textwrap.dedent(PLANS) + textwrap.dedent(script), file=grapher)

    return behind


def test_all_of_cudnn_repeats(play):
    told = play(
        """
        told = []
        with pybnorm.Handle("cudnn") as handle:
            for (name, call), layout, algorithm in itertools.product(
                CALLS.items(), LAYOUTS, (None, *pybnorm.algorithms("cudnn"))
            ):
                x = like("nhwc", 3) if layout == "gap" else like(layout)
                try:
                    free = call(handle, x, algorithm=algorithm)
                except pybnorm.UnsupportedError:
                    continue
                plan = call(handle, x, algorithm=algorithm, deterministic=True)
                told.append([free.algorithm, free.deterministic, plan.algorithm, plan.deterministic])
        report(told)
        """
    )
    assert len(told) > 50
    for free, repeated, taken, repeats in told:
        assert (free, repeated, repeats) == (taken, True, True)


def test_a_vendor_whose_bits_are_not_known_to_repeat_is_refused(doubles, child):
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
