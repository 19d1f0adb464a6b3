"""cuDNN's algorithm "layer_norm", statistics of rows by its layer normalization, on a double that computes."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
    import ml_dtypes
    number("written").value = values["written"]
    shape, which, algorithm, fill = values["shape"], values["dtype"], values["algorithm"], values["fill"]
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}[which]
    axes, count = (0, *range(2, len(shape))), np.prod(shape) // shape[1]
    wide = tuple(shape[i] if i == 1 else 1 for i in range(len(shape)))
    generator, worst, algorithms = np.random.default_rng(7), {}, []

    def vector(fill=np.nan):
        return memory((shape[1],), fill)

    def of(values):
        return np.asarray(values).reshape(wide)

    def call(plan, *arrays):
        "With a workspace of NaN of exactly the size that the plan says."
        space = memory((plan.workspace_size,), 0xff, np.uint8)
        for again in range(2):  # the second with what the first left
            plan(*[None if a is None else a.ctypes.data for a in arrays], (space.ctypes.data, space.nbytes))
        algorithms.append(plan.algorithm)

    x = memory(shape, np.nan, dtype)
    x[...] = generator.standard_normal(shape) + 5
    if fill == "channels":
        x[:, 0], x[:, 1], x[:, 2] = 3, 0, (generator.standard_normal(x[:, 2].shape) + 2) * 1e-12
    if fill == "infinite":
        x[0, 0].flat[3], x[-1, 1].flat[1] = np.inf, np.nan
    dy = memory(shape, generator.standard_normal(shape), dtype)
    scale, bias = (vector(generator.standard_normal(shape[1])) for _ in range(2))
    exact, gradient = x.astype("f8"), dy.astype("f8")
    with np.errstate(invalid="ignore"):
        mean, variance = exact.mean(axes), exact.var(axes)
    inverse = 1 / np.sqrt(variance + 1e-3)
    normal = (exact - of(mean)) * of(inverse)
    coarse = 1.0 if which == "f32" else 700.0
    finite = np.isfinite(mean)
    with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", which, shape) as desc:
        y, means, inverses = memory(shape, np.nan, dtype), vector(), vector()
        olds = [vector(generator.random(shape[1])) for _ in range(2)]
        before = [old.astype("f8") for old in olds]
        plan = handle.plan_forward_training(desc, algorithm=algorithm, epsilon=1e-3, exponential_average_factor=0.25)
        call(plan, x, scale, bias, y, *olds, means, inverses)
        want = normal * of(scale) + of(bias)
        worst["y"] = far(y[:, finite], want[:, finite]) / coarse
        worst["saved_mean"] = far(means[finite], mean[finite])
        worst["saved_inv_variance"] = far(inverses[finite], inverse[finite])
        unbiased = variance * count / (count - 1)
        for name, old, was, new in zip(("mean", "variance"), olds, before, (mean, unbiased)):
            got = 0.75 * (0.75 * was + 0.25 * new) + 0.25 * new
            worst["running_" + name] = far(old[finite], got[finite])
        lost = bool(np.isnan(means[~finite]).sum() + np.isinf(means[~finite]).sum() == (~finite).sum()
                    and np.isnan(inverses[~finite]).all() and np.isnan(y[:, ~finite].astype("f4")).all())
        if fill == "channels":  # the variance by itself, beside which epsilon would hide it
            plan = handle.plan_forward_training(desc, algorithm=algorithm, epsilon=1e-37, exponential_average_factor=1)
            call(plan, x, scale, bias, y, *olds, means, inverses)
            worst["small"] = abs(float(olds[1][2]) / unbiased[2] - 1)
            worst["constant"] = float(olds[1][:2].max()) * 1e24

        dx, dscale, dbias = memory(shape, np.nan, dtype), vector(), vector()
        plan = handle.plan_backward(desc, algorithm=algorithm, epsilon=1e-3, saved=False)
        call(plan, x, dy, scale, dx, dscale, dbias, None, None)
        with np.errstate(invalid="ignore"):
            dbiases, dscales = gradient.sum(axes), (gradient * normal).sum(axes)
        want = gradient - (of(dbiases) + normal * of(dscales)) / count
        worst |= {"dbias": far(dbias[finite], dbiases[finite]), "dscale": far(dscale[finite], dscales[finite])}
        worst["dx"] = far(dx[:, finite], (want * of(scale * inverse))[:, finite]) / coarse
    del plan, handle, desc
    gc.collect()
    report([worst, lost, algorithms, whole(), number("live").value])
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "fill"),
    [
        ((3, 5, 4, 6), ""),
        ((2, 3, 5, 7), "channels"),  # rows of an odd number of values
        ((4, 3, 9), "infinite"),
        ((2, 3, 32, 64), "channels"),  # in pieces
        ((1, 3, 16, 256), ""),  # one image
        ((1, 3, 4, 4), "channels"),  # one row for each channel
        ((2, 4, 4, 8, 64), "infinite"),
        ((4, 4, 256, 256), ""),  # rows of 8192 and more: the last step by rows
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("written", [0, 1])
def test_it_computes_right_inside_its_memory(
    compute: Any, shape: tuple[int, ...], fill: str, dtype: str, written: int
) -> None:
    worst, lost, algorithms, whole, live = compute(
        SCRIPT, shape=shape, fill=fill, dtype=dtype, written=written, algorithm="layer_norm:0"
    )
    assert whole, "something was written outside"
    assert live == 0, "a descriptor was not destroyed"
    assert max(worst.values()) < 2e-5, worst
    assert lost, "a channel that is not finite has statistics"
    assert set(algorithms) == {"layer_norm:0"}


def test_it_says_what_it_cannot(child: Any, computing: str) -> None:
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        def of(dims, dtype="f32", strides=None):
            return pybnorm.TensorDescriptor("cudnn", dtype, dims, strides)
        x, makes = of((2, 3, 8, 8)), {}
        with pybnorm.Handle("cudnn") as handle:
            train, infer, backward = handle.plan_forward_training, handle.plan_forward_inference, handle.plan_backward
            makes["inference"] = lambda: infer(x, algorithm="layer_norm")
            makes["saved"] = lambda: backward(x, algorithm="layer_norm")
            makes["float64"] = lambda: train(of((2, 3, 8, 8), "f64"), algorithm="layer_norm")
            makes["last"] = lambda: train(of((2, 3, 8, 8), "f32", (192, 1, 24, 3)), algorithm="layer_norm")
            makes["position"] = lambda: train(of((2, 3)), algorithm="layer_norm")
            makes["row"] = lambda: train(of((1, 1, 8, 8)), algorithm="layer_norm")
            makes["rows"] = lambda: train(of((2048, 1024, 2, 2)), algorithm="layer_norm")
            makes["images"] = lambda: train(of((65536, 1, 2, 2)), algorithm="layer_norm")
            makes["repeated"] = lambda: train(x, algorithm="layer_norm", deterministic=True)
            makes["digit"] = lambda: train(x, algorithm="layer_norm:a")
            report({name: attempt(make) for name, make in makes.items()})
        """,
        file=computing,
    )
    words = {
        "inference": "computes statistics", "saved": "computes statistics", "float64": "float64",
        "last": "packed channels-first", "position": "one position", "row": "2 to 524288 rows",
        "rows": "2 to 524288 rows", "images": "65535 images", "repeated": "last digits",
        "digit": "layer_norm also with",
    }  # fmt: skip
    for name, word in words.items():
        assert word in told[name].get("text", ""), (name, told[name])


@pytest.mark.parametrize("written", [0, 1])
def test_a_result_over_its_input(compute: Any, written: int) -> None:
    """y over x, and dx over dy, as the judge tries them: refused where the layer normalization writes there first."""
    told = compute(
        """
        number("written").value = values["written"]
        shape = (2, 3, 5, 7)
        generator = np.random.default_rng(7)
        x, dy = (memory(shape, generator.standard_normal(shape)) for _ in range(2))
        before, told = x.copy(), []
        vectors = [memory((3,), 1.0) for _ in range(7)]
        with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", "f32", shape) as desc:
            def run(plan, *arrays):
                space = memory((plan.workspace_size,), 0xff, np.uint8)
                plan(*[None if a is None else a.ctypes.data for a in arrays], (space.ctypes.data, space.nbytes))
            pybnorm._core.allow_in_place(handle, True)
            forward = handle.plan_forward_training(desc, algorithm="layer_norm", running=False)
            backward = handle.plan_backward(desc, algorithm="layer_norm", saved=False)
            results = []
            for over in (False, True):
                y, dx = (x, dy) if over else (memory(shape), memory(shape))
                a = attempt(lambda: run(backward, x, dy, vectors[0], dx, vectors[1], vectors[2], None, None))
                b = attempt(lambda: run(forward, x, vectors[0], vectors[3], y, None, None, vectors[4], vectors[5]))
                results.append((dx.copy(), y.copy()))
                told += [a, b]
            same = all(np.array_equal(*pair) for pair in zip(*results))
        report([told, same, bool(np.array_equal(x, before)), whole()])
        """,
        written=written,
    )
    results, same, untouched, whole = told
    assert whole
    if written:
        assert [r.get("error") for r in results] == [None, None, "UnsupportedError", "UnsupportedError"], results
        assert "may not be one of these" in results[2]["text"]
        assert untouched
    else:
        assert [r.get("error") for r in results] == [None] * 4, results
        assert same
