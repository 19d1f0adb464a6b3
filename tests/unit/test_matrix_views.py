"""cuDNN's column and row views, on a double that computes on the host within the limits of cuDNN's own graphs."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
    shape, algorithm, saved, running = values["shape"], values["algorithm"], values["saved"], values["running"]
    axes, count = (0, *range(2, len(shape))), np.prod(shape) // shape[1]
    generator, worst = np.random.default_rng(7), {}

    def vector(fill=np.nan):
        return memory((shape[1],), fill)

    def data(fill=np.nan):
        if not values["last"]:
            return memory(shape, fill)
        array = memory((shape[0], *shape[2:], shape[1])).transpose(0, len(shape) - 1, *range(1, len(shape) - 1))
        array[...] = fill
        return array

    wide = tuple(shape[i] if i == 1 else 1 for i in range(len(shape)))
    x = data(generator.standard_normal(shape) + 5)
    dy = data(generator.standard_normal(shape))
    scale, bias = (vector(generator.standard_normal(shape[1])) for _ in range(2))
    mean, variance = x.mean(axes, dtype="f8"), x.var(axes, dtype="f8")
    inverse = 1 / np.sqrt(variance + 1e-3)
    normal = (x.astype("f8") - mean.reshape(wide)) * inverse.reshape(wide)
    with pybnorm.Handle("cudnn") as handle:
        with pybnorm.TensorDescriptor("cudnn", "f32", shape, [step // 4 for step in x.strides]) as desc:
            def call(plan, *arrays):
                "With a workspace of NaN of exactly the size that the plan says."
                space = memory((plan.workspace_size,), 0xff, np.uint8)
                addresses = [None if a is None else a.ctypes.data for a in arrays]
                for again in range(2):  # the second with what the first left
                    plan(*addresses, (space.ctypes.data, space.nbytes))
                return plan.algorithm

            y, means, inverses = data(), vector(), vector()
            olds = [vector(generator.random(shape[1])) for _ in range(2)]
            before = [old.astype("f8") for old in olds]
            plan = handle.plan_forward_training(
                desc, algorithm=algorithm, epsilon=1e-3, exponential_average_factor=0.25, saved=saved, running=running)
            stated = *(olds if running else (None, None)), *((means, inverses) if saved else (None, None))
            call(plan, x, scale, bias, y, *stated)
            worst["y"] = far(y, normal * scale.reshape(wide) + bias.reshape(wide))
            if saved:
                worst |= {"saved_mean": far(means, mean), "saved_inv_variance": far(inverses, inverse)}
            if running:
                unbiased = variance * count / (count - 1)
                for name, old, was, new in zip(("mean", "variance"), olds, before, (mean, unbiased)):
                    worst["running_" + name] = far(old, 0.75 * (0.75 * was + 0.25 * new) + 0.25 * new)

            if not values["last"]:
                y, stated = data(), [vector(v) for v in (mean, variance)]
                plan = handle.plan_forward_inference(desc, algorithm=algorithm, epsilon=1e-3)
                call(plan, x, scale, bias, *stated, y)
                worst["inference"] = far(y, normal * scale.reshape(wide) + bias.reshape(wide))

            dx, dscale, dbias = data(), vector(), vector()
            plan = handle.plan_backward(desc, algorithm=algorithm, epsilon=1e-3)
            call(plan, x, dy, scale, dx, dscale, dbias, vector(mean), vector(inverse))
            dbiases, dscales = dy.sum(axes, dtype="f8"), (dy * normal).sum(axes)
            want = dy - (dbiases.reshape(wide) + normal * dscales.reshape(wide)) / count
            worst |= {"dbias": far(dbias, dbiases), "dscale": far(dscale, dscales)}
            worst["dx"] = far(dx, want * (scale * inverse).reshape(wide))
    del plan, handle, desc
    gc.collect()
    report([worst, whole(), number("live").value])
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "saved", "running"),
    [
        ((3, 5, 4, 6), True, True),
        ((2, 3, 5, 7), False, True),
        ((4, 2, 3), True, False),
        ((2, 3, 32, 64), True, True),  # rows in two pieces
        ((1, 3, 16, 256), True, True),  # one image, rows in pieces
        ((2, 4, 4, 8, 64), False, False),
    ],
)
@pytest.mark.parametrize("algorithm", ["columns", "rows"])
def test_the_views_compute_right_inside_their_memory(
    compute: Any, algorithm: str, shape: tuple[int, ...], saved: bool, running: bool
) -> None:
    judge(compute(SCRIPT, algorithm=algorithm, shape=shape, saved=saved, running=running, last=False))


def judge(told: Any) -> None:
    worst, whole, live = told
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"
    assert max(worst.values()) < 2e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "saved", "running"),
    [
        ((3, 5, 4, 6), True, True),  # one column for each channel
        ((3, 5, 4, 6), False, False),
        ((8, 3, 16, 16), True, True),  # 8 of them
        ((2, 4, 8, 8, 12), False, True),
        ((6, 3, 199), True, False),
        ((1024, 3), True, True),
        ((5, 4, 1, 1), False, True),
        ((1, 7, 32, 32), True, True),
    ],
)
def test_columns_of_channels_last_memory(compute: Any, shape: tuple[int, ...], saved: bool, running: bool) -> None:
    judge(compute(SCRIPT, algorithm="columns:0", shape=shape, saved=saved, running=running, last=True))


def test_what_columns_of_channels_last_memory_are_not_for(child: Any, computing: str) -> None:
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        def last(n, c, h, w):
            return pybnorm.TensorDescriptor("cudnn", "f32", (n, c, h, w), (c * h * w, 1, c * w, c))
        with pybnorm.Handle("cudnn") as handle:
            report([attempt(call) for call in (
                lambda: handle.plan_forward_inference(last(2, 3, 4, 4), algorithm="columns"),
                lambda: handle.plan_forward_training(last(1, 8, 1, 1), running=False, algorithm="columns"),
                lambda: handle.plan_forward_training(last(1048583, 2, 1, 1), algorithm="columns"),
                lambda: handle.plan_backward(last(2, 65535 * 32 + 1, 1, 1), algorithm="columns"),
            )])
        """,
        file=computing,
    )
    for result, word in zip(told, ("pointwise graph", "one value in a channel", "524288 rows", "columns"), strict=True):
        assert result["error"] == "UnsupportedError", result
        assert word in result["text"], result


def test_one_row_for_each_channel_is_refused(child: Any, computing: str) -> None:
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", "f32", (1, 3, 5, 5)) as x:
            assert handle.plan_forward_inference(x, algorithm="rows").algorithm == "rows"
            report([attempt(lambda: make(x, algorithm="rows")) for make in (
                handle.plan_forward_training, handle.plan_backward)])
        """,
        file=computing,
    )
    for result in told:
        assert result["error"] == "UnsupportedError", result
        assert "nothing to merge" in result["text"], result


CHOICES = {
    "forward_inference f32 64x64x112x112": ("columns", "columns"),
    "forward_inference bf16 2x32x64x128x128": ("rows:1", "rows:1"),
    "forward_inference f32 1x64x512x512": ("spatial", "spatial"),
    "forward_inference f16 64x64x91x91": ("columns", "columns"),
    "forward_inference f32 2x32x514x514": ("rows:1", "rows:1"),
    "forward_inference f32 64x256x56x56": ("columns:1", "columns:1"),
    "forward_inference f32 72x256x56x56": ("columns:1", "columns:1"),
    "forward_inference f32 6x827x45x45": ("spatial", "spatial"),
    "forward_inference bf16 40x256x56x56": ("spatial", "spatial"),
    "forward_inference f32 8x9000x15x15": ("columns", "columns"),
    "backward f32 64x64x112x112": ("columns", "ex"),
    "backward f16 256x64x112x112": ("columns:1", "rows:1"),
    "backward f16 256x256x56x56": ("columns:1", "persistent"),
    "backward f32 256x512x28x28": ("spatial", "spatial"),
    "forward_training f32 256x64x112x112": ("columns:1", "ex"),
    "forward_training f32 417x8": ("spatial", "spatial"),
    "backward f16 945x8": ("spatial", "spatial"),
    "backward f16 253x544": ("ex", "ex"),
}


def test_what_is_chosen(child: Any, computing: str) -> None:
    """On the double every algorithm can be built, so that the rules alone decide."""
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        told = {}
        with pybnorm.Handle("cudnn") as handle:
            for line in values["lines"]:
                operation, dtype, shape = line.split()
                with pybnorm.TensorDescriptor("cudnn", dtype, tuple(map(int, shape.split("x")))) as x:
                    make = getattr(handle, "plan_" + operation)
                    told[line] = [make(x, algorithm=name).algorithm for name in ("auto", "fast")]
        report(told)
        """,
        file=computing,
        lines=list(CHOICES),
    )
    assert {line: tuple(names) for line, names in told.items()} == CHOICES


@pytest.mark.slow
@pytest.mark.parametrize("symbol", ["cudnnAddTensor", "cudnnSetTensor", "cudnnTransformTensor"])
def test_a_symbol_that_is_not_there_is_missed_when_planned(child: Any, computing_without: Any, symbol: str) -> None:
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", "f32", (2, 3, 8, 8)) as x:
            report([attempt(lambda: handle.plan_forward_training(x, algorithm=name)) for name in ("rows", "columns")])
        """,
        file=computing_without(symbol),
    )
    assert [result.get("error") for result in told] == [
        "UnsupportedError",
        None if symbol == "cudnnTransformTensor" else "UnsupportedError",
    ], told
