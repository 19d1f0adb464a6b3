"""Every operation, backend, dtype, choice of axes, rank and memory order against the reference and its bound."""

import zlib

import numpy as np
import pytest
from operation_bench import DTYPES, LAYOUTS, NUMPY, arrays_of, expected_support, rounded, strided
from operation_bounds import Setting, chain
from tables import spread

from pybnorm import DataType, operations, reference
from pybnorm.check.judging.bounds import precision

CASES = [
    ((7,), 0),
    ((7,), ()),
    ((6, 5), 1),
    ((6, 5), 0),
    ((6, 5), ()),
    ((4, 3), (0, 1)),
    ((1, 9), 1),
    ((5, 3, 4), 1),
    ((5, 3, 4), -1),
    ((5, 3, 4), (1, 2)),
    ((5, 3, 4), (0, 2)),
    ((4, 3, 5, 6), 1),
    ((4, 3, 5, 6), 3),
    ((4, 3, 5, 6), (1, 3)),
    ((4, 3, 5, 6), (0, 2)),
    ((4, 3, 5, 6), (1, 2, 3)),
    ((4, 3, 5, 6), ()),
    ((2, 3, 2, 2), (0, 1, 2, 3)),
    ((4, 1, 3, 1), 1),
    ((2, 3, 2, 3, 4), 1),
    ((2, 3, 2, 3, 4), (1, 2, 3, 4)),
    ((2, 3, 2, 3, 4), (1, 3)),
    ((2, 3, 2, 2, 3, 2), 1),
    ((2, 3, 2, 2, 3, 2), (1, 3, 5)),
    ((2, 3, 2, 1, 2, 3, 2), (1, 4)),
    ((2, 2, 3, 2, 2, 2, 2, 3), (1, 3, 5, 7)),
    ((2, 3, 2, 1, 2, 1, 2, 2), -1),
]
EPSILON = 1e-3
VECTORS = ("scale", "bias", "mean", "variance", "old_mean", "old_variance", "sums", "prior")


def named(value):
    return str(value).replace(" ", "") if isinstance(value, tuple) else None


class Arrays:
    """Inputs of a case: data in a memory order, parameters that have nothing to do with the batch's statistics."""

    def __init__(self, dims, axis, dtype, layout, narrow=False, **options):
        rng = np.random.default_rng([len(dims), *dims])
        self.dtype, self.axis, self.dims = dtype, axis, dims
        self.data = arrays_of(rng, dims, dtype, layout, **options)
        self.derived = reference.fold(dims, axis).derived
        self.parameter = NUMPY[dtype] if narrow else NUMPY[operations.derive(dims, dtype, axis).data_type]
        self.vectors = {
            name: np.asarray(rng.uniform(1.0, 2.0, self.derived) if "variance" in name else
                             rng.normal(1.0 if name == "scale" else 3.0, 0.5, self.derived)).astype(self.parameter)
            for name in VECTORS
        }  # fmt: skip
        self.layout, self.turn = layout, 0
        self.setting = Setting(self.data["x"], dtype, axis)

    def __getitem__(self, name):
        """Values in float64."""
        return (self.data | self.vectors)[name].astype(np.float64)

    def support(self, bench):
        return expected_support(bench.handle.backend, self.dtype)

    def output(self, beta=0.0):
        """An array like x: NaN where the prior is not to be read."""
        values = (
            np.full(self.dims, np.nan) if beta == 0 else np.linspace(-1, 1, int(np.prod(self.dims))).reshape(self.dims)
        )
        out = np.copy(self.data["x"], order="K") if self.data["x"].base is None else None
        if out is None:
            out = strided(self.data["x"], "gaps", 2)
        out[...] = values.astype(out.dtype)
        return out

    def vector(self, beta=0.0):
        """A parameter array: NaN where the prior is not to be read."""
        return np.full(self.derived, np.nan, self.parameter) if beta == 0 else self.vectors["prior"].copy()

    def stored(self, expected):
        """Results in 16-bit parameters are rounded once more."""
        if self.parameter.itemsize > 2:
            return expected
        return rounded(*expected, self.dtype)


@pytest.fixture(params=DTYPES, ids=lambda d: d.short)
def dtype(request):
    return request.param


def pytest_generate_tests(metafunc):
    """Every choice of axes, and every memory order with every dtype; which of them meet differs."""
    if "arrays" in metafunc.fixturenames:
        combined = spread(CASES, LAYOUTS, DTYPES, turn=zlib.crc32(metafunc.function.__name__.encode()))
        names = [f"{case}-{layout}-{dtype.short}".replace(" ", "") for case, layout, dtype in combined]
        metafunc.parametrize("arrays", combined, indirect=True, ids=names)


@pytest.fixture
def arrays(request):
    """Of what else varies every value meets each choice of axes and each memory order."""
    case, layout, dtype = request.param
    made = Arrays(*case, dtype, layout)
    made.turn = CASES.index(case) + LAYOUTS.index(layout)
    return made


BLENDS = [(1.0, 0.0), (0.75, -0.5)]


def test_stats(bench, arrays):
    s = arrays.setting
    moments, d = s.statistics(EPSILON)
    expected = {
        "mean": s.parameter(moments.mean, d.mean),
        "variance": s.variance_by_running(moments, d),
        "inv_variance": s.parameter(moments.inverse, d.inverse),
    }
    given = {"x": arrays.data["x"], **{name: arrays.vector() for name in expected}}
    bench.check("stats", given, expected, {"epsilon": EPSILON, "axis": arrays.axis}, support=arrays.support(bench))


def test_forward_training(bench, arrays):
    alpha, beta = BLENDS[arrays.turn % 2]
    s, factor = arrays.setting, 0.3
    moments, d = s.statistics(EPSILON)
    scale, bias = arrays["scale"], arrays["bias"]
    given = {"x": arrays.data["x"], "scale": arrays.vectors["scale"], "bias": arrays.vectors["bias"]}
    given |= {"y": arrays.output(beta), "saved_mean": arrays.vector(), "saved_inv_variance": arrays.vector()}
    right = scale * moments.inverse * (s.x - moments.mean) + bias
    error = s.normalized(s.x, moments.mean, moments.inverse, scale, bias, d.mean, d.inverse)
    expected = {
        "y": s.data(right, error, alpha, beta, given["y"]),
        "saved_mean": s.parameter(moments.mean, d.mean),
        "saved_inv_variance": s.parameter(moments.inverse, d.inverse),
    }
    unbiased = arrays.turn % 3 != 0
    if s.m > 1:
        c = s.m / (s.m - 1) if unbiased else 1.0
        for name, old, batch, slack, roundings in [
            ("running_mean", "old_mean", moments.mean, d.mean, 3),
            # of the biased one: stored, as the unbiased one is, then two factors, two products, a sum
            ("running_variance", "old_variance", c * moments.variance, c * d.variance, 5 if unbiased else 11),
        ]:
            given[name] = arrays.vectors[old].copy()
            value = (1 - factor) * arrays[old] + factor * batch
            expected[name] = value, s.running(factor, arrays[old], batch, slack, roundings)
    options = {"alpha": alpha, "beta": beta, "epsilon": EPSILON, "axis": arrays.axis, "unbiased": unbiased}
    bench.check(
        "forward_training", given, expected, options | {"exponential_average_factor": factor},
        support=arrays.support(bench),
    )  # fmt: skip


def test_forward_inference(bench, arrays):
    alpha, beta = BLENDS[arrays.turn % 2]
    s = arrays.setting
    scale, bias, mean = arrays["scale"], arrays["bias"], arrays["mean"]
    r = 1 / np.sqrt(arrays["variance"] + EPSILON)
    given = {"x": arrays.data["x"], **{n: arrays.vectors[n] for n in ("scale", "bias")}}
    given |= {"running_mean": arrays.vectors["mean"], "running_variance": arrays.vectors["variance"]}
    given["y"] = arrays.output(beta)
    error = s.normalized(s.x, mean, r, scale, bias, 0.0, 4 * s.p.u * r)
    expected = {"y": s.data(scale * r * (s.x - mean) + bias, error, alpha, beta, given["y"])}
    options = {"alpha": alpha, "beta": beta, "epsilon": EPSILON, "axis": arrays.axis}
    bench.check("forward_inference", given, expected, options, support=arrays.support(bench))


def test_inference_with_inverse(bench, arrays):
    alpha, beta = BLENDS[arrays.turn % 2]
    operation = ("forward_inference_inv_variance", "elemt")[arrays.turn // 2 % 2]
    s = arrays.setting
    scale, bias, mean, inv = arrays["scale"], arrays["bias"], arrays["mean"], arrays["variance"]
    given = {"x": arrays.data["x"], **{n: arrays.vectors[n] for n in ("scale", "bias", "mean")}}
    given |= {"inv_variance": arrays.vectors["variance"], "y": arrays.output(beta)}
    right = getattr(reference, operation)(arrays.data["x"], scale, bias, mean, inv, axis=arrays.axis).y
    # the given scale is a product of vectors, r is 1
    error = s.normalized(s.x, mean, 1.0, scale * inv, bias, 0.0, 4 * s.p.u, s.product)
    expected = {"y": s.data(right, error, alpha, beta, given["y"])}
    options = {"alpha": alpha, "beta": beta, "axis": arrays.axis}
    bench.check(operation, given, expected, options, support=arrays.support(bench))


def gradients(arrays, beta, beta_param, *names):
    given = {n: arrays.data[n] for n in ("x", "dy")} | {n: arrays.vectors[n] for n in ("scale", *names)}
    return given | {
        "dx": arrays.output(beta),
        "dscale": arrays.vector(beta_param),
        "dbias": arrays.vector(beta_param),
    }


FACTORS = [(1.0, 0.0, 1.0, 0.0), (0.75, -0.5, 2.0, 0.25)]
FACTOR_NAMES = ("alpha", "beta", "alpha_param", "beta_param")


def judge_gradient(bench, arrays, operation, given, right, e_dx, sums, factors, **options):
    s = arrays.setting
    a, b, ap, bp = factors
    expected = {
        "dx": s.data(right.dx, e_dx, a, b, given["dx"]),
        "dscale": s.blended(right.dscale, sums[0], ap, bp, given["dscale"]),
        "dbias": s.blended(right.dbias, sums[1], ap, bp, given["dbias"]),
    }
    options |= dict(zip(FACTOR_NAMES, factors, strict=True)) | {"axis": arrays.axis}
    bench.check(operation, given, expected, options, support=arrays.support(bench))


@pytest.mark.parametrize("saved", [True, False])
def test_backward(bench, arrays, saved):
    factors = FACTORS[arrays.turn % 2]
    s, dy, scale = arrays.setting, arrays["dy"], arrays["scale"]
    given = gradients(arrays, factors[1], factors[3])
    if saved:
        given |= {"saved_mean": arrays.vectors["mean"], "saved_inv_variance": arrays.vectors["variance"]}
        mean, r, slack = arrays["mean"], arrays["variance"], (0.0, 0.0)
    else:
        moments, d = s.statistics(EPSILON)
        mean, r, slack = moments.mean, moments.inverse, (d.mean, d.inverse)
    # r = 1 / sqrt(v + eps) gives the reference any r: eps = 0 and v = 1 / r**2
    right = reference.training_grad(s.x, dy, scale=scale, mean=mean, variance=1 / r**2, epsilon=0.0, axis=arrays.axis)
    error = s.gradient(dy, right.dx, mean, r, scale, right.dscale, right.dbias, *slack)
    sums = s.sums(dy, mean, r, right.dscale, right.dbias, *slack)
    judge_gradient(bench, arrays, "backward", given, right, error, sums, factors, epsilon=EPSILON)


def test_backward_frozen(bench, arrays):
    factors = FACTORS[arrays.turn % 2]
    s, dy, scale, mean = arrays.setting, arrays["dy"], arrays["scale"], arrays["mean"]
    given = gradients(arrays, factors[1], factors[3], "mean", "variance")
    r = 1 / np.sqrt(arrays["variance"] + EPSILON)
    variance = arrays["variance"]
    right = reference.backward_frozen(
        s.x, dy, scale=scale, mean=mean, variance=variance, epsilon=EPSILON, axis=arrays.axis
    )
    error = s.normalized(dy, 0.0, r, scale, 0.0, 0.0, 4 * s.p.u * r)  # the inference of dy
    sums = s.sums(dy, mean, r, right.dscale, right.dbias, 0.0, s.inverse * r)
    judge_gradient(bench, arrays, "backward_frozen", given, right, error, sums, factors, epsilon=EPSILON)


def test_training_grad(bench, arrays):
    factors = FACTORS[arrays.turn % 2]
    s, dy, scale, mean = arrays.setting, arrays["dy"], arrays["scale"], arrays["mean"]
    given = gradients(arrays, factors[1], factors[3], "mean", "variance")
    r = 1 / np.sqrt(arrays["variance"] + EPSILON)
    variance = arrays["variance"]
    right = reference.training_grad(
        s.x, dy, scale=scale, mean=mean, variance=variance, epsilon=EPSILON, axis=arrays.axis
    )
    slack = 0.0, s.inverse * r
    error = s.gradient(dy, right.dx, mean, r, scale, right.dscale, right.dbias, *slack)
    sums = s.sums(dy, mean, r, right.dscale, right.dbias, *slack)
    judge_gradient(bench, arrays, "training_grad", given, right, error, sums, factors, epsilon=EPSILON)


def reduce_expected(arrays, mean, inv):
    """(right, bound) of the four sums: backward with r = 1, then one product of vectors."""
    s = arrays.setting
    right = reference.backward_reduce(x=s.x, dy=arrays["dy"], mean=mean, inv_variance=inv, axis=arrays.axis)
    e_moment, e_total = s.sums(arrays["dy"], mean, np.ones(arrays.derived), right.sum_dy_xmu, right.sum_dy)
    moment = s.parameter(right.sum_dy_xmu, e_moment)
    total = s.parameter(right.sum_dy, e_total)
    slack = np.abs(inv) * (moment[1] + 8 * s.p.u * (np.abs(right.sum_dy_xmu) + moment[1]))
    return {
        "sum_dy": total,
        "sum_dy_xmu": moment,
        "dscale": s.parameter(right.dscale, slack),
        "dbias": total,
    }


WANTED = [("sum_dy", "sum_dy_xmu", "dscale", "dbias"), ("dscale",), ("dbias",), ("sum_dy_xmu",)]


def test_backward_reduce(bench, arrays):
    wanted = WANTED[arrays.turn % 4]
    every = reduce_expected(arrays, arrays["mean"], arrays["variance"])
    expected = {name: every[name] for name in wanted}
    given = {n: arrays.data[n] for n in ("x", "dy")} | {name: arrays.vector() for name in wanted}
    given |= {"mean": arrays.vectors["mean"], "inv_variance": arrays.vectors["variance"]}
    bench.check("backward_reduce", given, expected, {"axis": arrays.axis}, support=arrays.support(bench))


def test_backward_elemt(bench, arrays):
    alpha, beta = BLENDS[arrays.turn % 2]
    s, dy, scale, mean, inv = arrays.setting, arrays["dy"], arrays["scale"], arrays["mean"], arrays["variance"]
    count = 3 * s.m + 1
    given = {n: arrays.data[n] for n in ("x", "dy")} | {n: arrays.vectors[n] for n in ("scale", "mean")}
    given |= {"inv_variance": arrays.vectors["variance"], "sum_dy": arrays.vectors["sums"]}
    given |= {"sum_dy_xmu": arrays.vectors["prior"], "dx": arrays.output(beta)}
    total, moment = arrays["sums"], arrays["prior"]
    right = reference.backward_elemt(
        x=s.x, dy=dy, scale=scale, mean=mean, inv_variance=inv, sum_dy=total, sum_dy_xmu=moment, count=count,
        axis=arrays.axis,
    )  # fmt: skip
    # dx = alpha * t + beta * prior is stored, then alpha * w + 1 * dx: two inferences with variance 1
    centre, gain = total / count, scale * inv
    slope = -gain * inv * inv * moment / count
    t = gain * (dy - centre)
    e_t = s.normalized(dy, centre, 1.0, gain, 0.0, s.scaling * np.abs(centre), 4 * s.p.u, s.product)
    first = s.data(t, e_t, alpha, beta, given["dx"])
    again = bench.coarse(s.dtype, *first, given["dx"], {"beta": beta})
    w = slope * (s.x - mean)
    # three products make the slope of a vector, the last with a rounded factor -1 / count; the gain is one more
    off = chain(s.product, s.product, s.product, s.product, 3 * s.p.u)
    e_w = s.normalized(s.x, mean, 1.0, slope, 0.0, 0.0, 4 * s.p.u, off)
    blended, bound = s.data(w, e_w, alpha, 1.0, first[0])
    bound = bound + (1 + 2 * s.p.u + s.p.u_out) * (first[1] + again)
    expected = {"dx": (blended, bound + bench.coarse(s.dtype, blended, bound, first[0], {"beta": 1.0}))}
    prior = 0 if beta == 0 else beta * given["dx"].astype(np.float64)
    assert np.allclose(blended, alpha * right + prior, rtol=1e-12, atol=1e-12)
    options = {"count": count, "alpha": alpha, "beta": beta, "axis": arrays.axis}
    support = arrays.support(bench)
    bench.check("backward_elemt", given, expected, options, support=support, blended_once=False)


# ---------------------------------------------------------------- harder data


def test_frozen_statistics_far_from_the_batch(bench, dtype):
    arrays = Arrays((8, 3, 5, 6), 1, dtype, "packed")
    mean, variance = (30.0, 0.1) if dtype == DataType.FLOAT16 else (1000.0, 1e-4)  # gradients within float16's range
    arrays.vectors["mean"] = np.full(arrays.derived, mean, arrays.parameter)
    arrays.vectors["variance"] = np.full(arrays.derived, variance, arrays.parameter)
    test_backward_frozen(bench, arrays)
    test_training_grad(bench, arrays)
    test_forward_inference(bench, arrays)


@pytest.mark.parametrize("axis", [1, (1, 3), -1], ids=named)
def test_sums_about_a_mean_of_ten_thousand_deviations(bench, axis):
    """Class A: sum(dy * x) - mean * sum(dy) would be off by 1e4 times its bound."""
    arrays = Arrays((16, 3, 8, 7), axis, DataType.FLOAT32, "packed", mean=1e4)
    s = arrays.setting
    mean = reference.stats(arrays.data["x"], axis=axis).mean.astype(np.float32)
    expected = reduce_expected(arrays, mean.astype(np.float64), arrays["variance"])
    uncentred = s.sum(arrays["dy"] * s.x).astype(np.float32) - mean * s.sum(arrays["dy"]).astype(np.float32)
    right, bound = expected["sum_dy_xmu"]
    assert (np.abs(uncentred - right) > bound).any()  # the test can tell
    given = {n: arrays.data[n] for n in ("x", "dy")} | {name: arrays.vector() for name in expected}
    given |= {"mean": mean, "inv_variance": arrays.vectors["variance"]}
    bench.check("backward_reduce", given, expected, {"axis": axis}, support=arrays.support(bench))


def test_stats_of_a_mean_of_ten_thousand_deviations(bench):
    """MIOpen takes one pass: its variance meets class B, and its inverse standard deviation means nothing here."""
    arrays = Arrays((16, 3, 8, 7), 1, DataType.FLOAT32, "packed", mean=1e4)
    if bench.handle.backend != "miopen":
        test_stats(bench, arrays)
        return
    s = arrays.setting
    moments, d = s.statistics(EPSILON, one_pass=True)
    expected = {"mean": s.parameter(moments.mean, d.mean), "variance": s.variance_by_running(moments, d)}
    given = {"x": arrays.data["x"], "mean": arrays.vector(), "variance": arrays.vector()}
    bench.check("stats", given, expected, {"epsilon": EPSILON, "axis": 1})


@pytest.mark.parametrize("operation", ["stats", "elemt", "backward_frozen", "training_grad", "backward_reduce"])
@pytest.mark.parametrize("kind", [DataType.FLOAT16, DataType.BFLOAT16], ids=lambda d: d.short)
def test_parameters_of_16_bits(bench, operation, kind):
    """DirectML's and CANN's: statistics in the dtype of x, or of their own; results are rounded once."""
    dims, axis = (6, 3, 4, 5), (1, 3)
    arrays = Arrays(dims, axis, kind, "packed", narrow=True)
    s = arrays.setting
    given = dict(arrays.data)
    options = {"axis": axis}
    scale, mean, variance, dy = (arrays[n] for n in ("scale", "mean", "variance", "dy"))
    names = ()
    if operation == "stats":
        moments, d = s.statistics(EPSILON)
        del given["dy"]
        options["epsilon"] = EPSILON
        expected = {
            "mean": s.parameter(moments.mean, d.mean),
            "variance": s.variance_by_running(moments, d),
            "inv_variance": s.parameter(moments.inverse, d.inverse),
        }
        given |= {n: arrays.vector() for n in expected}
    elif operation == "elemt":
        del given["dy"]
        given |= {"inv_variance": arrays.vectors["variance"], "y": arrays.output()}
        names = ("scale", "bias", "mean")
        right = reference.elemt(s.x, scale, arrays["bias"], mean, variance, axis=axis).y
        error = s.normalized(s.x, mean, 1.0, scale * variance, arrays["bias"], 0.0, 4 * s.p.u, s.product)
        expected = {"y": s.data(right, error)}
    elif operation == "backward_reduce":
        given["inv_variance"] = arrays.vectors["variance"]
        names = ("mean",)
        expected = reduce_expected(arrays, mean, variance)
        given |= {n: arrays.vector() for n in expected}
    else:
        options["epsilon"] = EPSILON
        options |= {"alpha_param": 2.0, "beta_param": 0.5}
        names = ("mean", "variance", "scale")
        r = 1 / np.sqrt(variance + EPSILON)
        right = getattr(reference, operation)(
            s.x, dy, scale=scale, mean=mean, variance=variance, epsilon=EPSILON, axis=axis
        )
        sums = s.sums(dy, mean, r, right.dscale, right.dbias, 0.0, s.inverse * r)
        given |= {"dx": arrays.output(), "dscale": arrays.vector(0.5), "dbias": arrays.vector(0.5)}
        if operation == "backward_frozen":
            error = s.normalized(dy, 0.0, r, scale, 0.0, 0.0, 4 * s.p.u * r)
        else:
            error = s.gradient(dy, right.dx, mean, r, scale, right.dscale, right.dbias, 0.0, s.inverse * r)
        expected = {
            "dx": s.data(right.dx, error),
            "dscale": s.blended(right.dscale, sums[0], 2.0, 0.5, given["dscale"]),
            "dbias": s.blended(right.dbias, sums[1], 2.0, 0.5, given["dbias"]),
        }
    given |= {n: arrays.vectors[n] for n in names}
    expected = {n: e if n in ("y", "dx") else arrays.stored(e) for n, e in expected.items()}
    bench.check(operation, given, expected, options, support=arrays.support(bench))


@pytest.mark.parametrize("kind", [DataType.FLOAT16, DataType.BFLOAT16], ids=lambda d: d.short)
def test_conversions_are_exact_or_rounded_once(bench, kind):
    support = expected_support(bench.handle.backend, kind)
    wide = np.linspace(-3, 3, 37).astype(np.float32) ** 3
    narrow = reference.round_to(wide.astype(np.float64), NUMPY[kind])
    zero = np.zeros(37)
    exact = narrow.astype(np.float64), zero
    once = exact
    if bench.handle.backend == "miopen" and kind == DataType.BFLOAT16:  # truncates: within one unit, not half
        once = wide.astype(np.float64), 2 * precision(kind).u_out * np.abs(wide) + precision(kind).tiny_out
    bench.check("convert", {"source": wide, "target": np.empty_like(narrow)}, {"target": once}, {}, support=support)
    bench.check("convert", {"source": narrow, "target": np.empty_like(wide)}, {"target": exact}, {}, support=support)


def test_vectors(bench, dtype):
    if NUMPY[dtype].itemsize == 2:
        pytest.skip("16-bit vectors are test_conversions' and test_parameters_of_16_bits'")
    arrays = Arrays((1, 11), 1, dtype, "packed")
    s, support = arrays.setting, expected_support(bench.handle.backend, dtype)
    a, b, out = arrays["scale"], arrays["bias"], arrays["prior"]
    given = {"a": arrays.vectors["scale"], "b": arrays.vectors["bias"], "out": arrays.vectors["prior"].copy()}
    expected = {"out": s.blended(a * b, 8 * s.p.u * np.abs(a * b), 0.5, 2.0, out)}
    bench.check("multiply", given, expected, {"alpha": 0.5, "beta": 2.0}, support=support)
    v = arrays["variance"]
    r = 1 / np.sqrt(v + EPSILON)
    given = {"variance": arrays.vectors["variance"], "inv_variance": arrays.vector()}
    expected = {"inv_variance": s.parameter(r, 8 * s.p.u * r)}
    bench.check("inverse_standard_deviation", given, expected, {"epsilon": EPSILON}, support=support)
    # 1 / sqrt(iv * iv), whose square is 1 / iv**2; the root halves the product's error; then epsilon as the bias
    given = {"inv_variance": arrays.vectors["variance"], "variance": arrays.vector()}
    deviation = chain(s.product / 2, s.inverse)
    value = 1 / v**2
    error = (chain(deviation, deviation) + 8 * s.p.u) * value + 4 * s.p.u * EPSILON
    bench.check(
        "variance_from_inverse", given, {"variance": s.parameter(value - EPSILON, error)}, {"epsilon": EPSILON},
        support=support,
    )  # fmt: skip


@pytest.mark.parametrize("layouts", [("packed", "reversed"), ("gaps", "packed"), ("reversed", "gaps")], ids=str)
@pytest.mark.parametrize("dims", [(5,), (4, 3), (2, 3, 4), (2, 3, 2, 3, 2, 2, 2, 2)], ids=named)
def test_axpby_and_fill(bench, dtype, dims, layouts):
    rng = np.random.default_rng(5)
    x = strided(reference.round_to(rng.normal(0, 1, dims), NUMPY[dtype]), layouts[0], 1)
    y = strided(reference.round_to(rng.normal(0, 1, dims), NUMPY[dtype]), layouts[1], 2)
    support = expected_support(bench.handle.backend, dtype)
    if bench.handle.backend == "onednn":
        support = True  # plain C in the adapter
    s = Setting(x, dtype, ())
    before = y.astype(np.float64)
    expected = {"y": s.data(x.astype(np.float64), 0.0, 0.75, -2.0, before)}
    bench.check("axpby", {"x": x, "y": y}, expected, {"a": 0.75, "b": -2.0}, support=support)
    y[...] = np.nan
    expected = {"y": s.data(x.astype(np.float64), 0.0, 0.75)}
    bench.check("axpby", {"x": x, "y": y}, expected, {"a": 0.75, "b": 0.0}, support=support)
    value = reference.round_to(np.array([0.1]), NUMPY[dtype]).astype(np.float64)[0]
    bench.check("fill", {"y": y}, {"y": (np.full(dims, value), 0.0)}, {"value": 0.1}, support=support)


@pytest.mark.parametrize("layouts", [("packed",) * 2, ("reversed",) * 2, ("packed", "reversed"), ("gaps", "packed"),
                                     ("reversed", "gaps"), ("gaps", "mixed")], ids=str)  # fmt: skip
@pytest.mark.parametrize("dims", [(5,), (4, 3), (2, 3, 4), (2, 3, 2, 3, 2), (2, 3, 2, 3, 2, 2, 2, 2)], ids=named)
def test_relu(bench, dtype, dims, layouts):
    """Exact, and with more than five axes that do not merge in several calls."""
    x = strided(reference.round_to(np.random.default_rng(6).normal(0, 1, dims), NUMPY[dtype]), layouts[0], 1)
    y = strided(np.full(dims, np.nan, NUMPY[dtype]), layouts[1], 2)
    support = expected_support(bench.handle.backend, dtype)
    if bench.handle.backend == "onednn":
        support = True  # plain C in the adapter
    right = np.maximum(x.astype(np.float64), 0)
    bench.check("relu", {"x": x, "y": y}, {"y": (right, 0.0)}, {}, support=support)


@pytest.mark.parametrize("layouts", [("packed",) * 3, ("reversed",) * 3, ("gaps",) * 3, ("packed", "reversed", "gaps")],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("dims", [(5,), (4, 3), (2, 3, 4), (2, 3, 2, 3, 2), (2, 3, 2, 3, 2, 2, 2, 2)], ids=named)
def test_relu_backward(bench, dtype, dims, layouts):
    """Exact."""
    rng = np.random.default_rng(8)
    arrays = {n: reference.round_to(rng.normal(0, 1, dims), NUMPY[dtype]) for n in ("x", "dy")}
    x, dy = (strided(a, layout, i) for i, (a, layout) in enumerate(zip(arrays.values(), layouts, strict=False)))
    dx = strided(np.full(dims, np.nan, NUMPY[dtype]), layouts[2], 2)
    support = expected_support(bench.handle.backend, dtype)
    if bench.handle.backend == "onednn":
        support = True  # plain C in the adapter
    right = np.where(x.astype(np.float64) > 0, dy.astype(np.float64), 0.0)
    bench.check("relu_backward", {"x": x, "dy": dy, "dx": dx}, {"dx": (right, 0.0)}, {}, support=support)
