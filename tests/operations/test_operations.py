"""Every operation, backend, dtype, choice of axes, rank and memory order against the reference and its bound."""

import zlib

import numpy as np
import pytest
from operation_bench import DTYPES, LAYOUTS, NUMPY, arrays_of, expected_support, rounded, strided
from operation_bounds import Setting, chain
from tables import spread, table

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
BLENDS = [(1.0, 0.0), (0.75, -0.5)]
FACTORS = [(1.0, 0.0, 1.0, 0.0), (0.75, -0.5, 2.0, 0.25)]
HALVES = (DataType.FLOAT16, DataType.BFLOAT16)


class Arrays(Setting):
    """Inputs of a case: data in a memory order, parameters that have nothing to do with the batch's statistics.

    Of what else varies every value of `turn` meets each choice of axes and each memory order.
    """

    one_pass = False

    def __init__(self, dims, axis, dtype, layout="packed", narrow=False, turn=0, **options):
        rng = np.random.default_rng([len(dims), *dims])
        self.data = arrays_of(rng, dims, dtype, layout, **options)
        super().__init__(self.data["x"], dtype, axis)
        self.axis, self.narrow, self.turn = axis, narrow, turn
        self.parameters = NUMPY[dtype] if narrow else NUMPY[operations.derive(dims, dtype, axis).data_type]
        self.vectors = {
            name: np.asarray(rng.uniform(1.0, 2.0, self.derived) if "variance" in name else
                             rng.normal(1.0 if name == "scale" else 3.0, 0.5, self.derived)).astype(self.parameters)
            for name in VECTORS
        }  # fmt: skip
        self.vectors["inv_variance"] = self.vectors["variance"]
        self.r = 1 / np.sqrt(self["variance"] + EPSILON)

    def __getitem__(self, name):
        """Values in float64."""
        return (self.data | self.vectors)[name].astype(np.float64)

    def given(self, *names, **renamed):
        """Inputs by argument names."""
        found = self.data | self.vectors
        return {n: found[n] for n in names} | {n: found[other] for n, other in renamed.items()}

    def output(self, beta=0.0):
        """An array like x: NaN where the prior is not to be read."""
        x, count = self.data["x"], self.x.size
        out = np.copy(x, order="K") if x.base is None else strided(x, "gaps", 2)
        out[...] = (np.full(count, np.nan) if beta == 0 else np.linspace(-1, 1, count)).reshape(x.shape)
        return out

    def vector(self, beta=0.0):
        """A parameter array: NaN where the prior is not to be read."""
        return np.full(self.derived, np.nan, self.parameters) if beta == 0 else self.vectors["prior"].copy()


def judge(bench, c, case):
    """`case` has an operation, its inputs and outputs, (right, bound) of each output, and options."""
    operation, given, expected, options = case
    if c.narrow:  # parameters are rounded once more
        expected = {n: e if n in ("y", "dx") else rounded(*e, c.dtype) for n, e in expected.items()}
    support = expected_support(bench.handle.backend, c.dtype)
    bench.check(operation, given, expected, options | {"axis": c.axis}, support=support,
                blended_once=operation != "backward_elemt")  # fmt: skip


def held(make):
    """A test of each choice of axes; `make` gives the case from the arrays and the bench."""

    def test(bench, arrays):
        judge(bench, arrays, make(arrays, bench))

    test.__name__, test.make = make.__name__, make
    return test


def pytest_generate_tests(metafunc):
    """Every choice of axes, and every memory order with every dtype; which of them meet differs."""
    if "arrays" in metafunc.fixturenames:
        combined = spread(CASES, LAYOUTS, DTYPES, turn=zlib.crc32(metafunc.function.__name__.encode()))
        names = [f"{case}-{layout}-{dtype.short}".replace(" ", "") for case, layout, dtype in combined]
        metafunc.parametrize("arrays", combined, indirect=True, ids=names)


@pytest.fixture
def arrays(request):
    case, layout, dtype = request.param
    return Arrays(*case, dtype, layout, turn=CASES.index(case) + LAYOUTS.index(layout))


@pytest.fixture(params=DTYPES, ids=lambda d: d.short)
def dtype(request):
    return request.param


@held
def test_stats(c, bench):
    moments, d = c.statistics(EPSILON, c.one_pass)
    expected = {"mean": c.parameter(moments.mean, d.mean), "variance": c.variance_by_running(moments, d)}
    if not c.one_pass:
        expected["inv_variance"] = c.parameter(moments.inverse, d.inverse)
    return "stats", c.given("x") | {name: c.vector() for name in expected}, expected, {"epsilon": EPSILON}


@held
def test_forward_training(c, bench):
    alpha, beta = BLENDS[c.turn % 2]
    factor, unbiased = 0.3, c.turn % 3 != 0
    moments, d = c.statistics(EPSILON)
    given = c.given("x", "scale", "bias")
    given |= {"y": c.output(beta), "saved_mean": c.vector(), "saved_inv_variance": c.vector()}
    right = c["scale"] * moments.inverse * (c.x - moments.mean) + c["bias"]
    error = c.normalized(c.x, moments.mean, moments.inverse, c["scale"], c["bias"], d.mean, d.inverse)
    expected = {
        "y": c.data_stored(right, error, alpha, beta, given["y"]),
        "saved_mean": c.parameter(moments.mean, d.mean),
        "saved_inv_variance": c.parameter(moments.inverse, d.inverse),
    }
    if c.m > 1:
        correction = c.m / (c.m - 1) if unbiased else 1.0
        for name, old, batch, slack, roundings in [
            ("running_mean", "old_mean", moments.mean, d.mean, 3),
            # of the biased one: stored, as the unbiased one is, then two factors, two products, a sum
            ("running_variance", "old_variance", correction * moments.variance, correction * d.variance,
             5 if unbiased else 11),
        ]:  # fmt: skip
            given[name] = c.vectors[old].copy()
            value = (1 - factor) * c[old] + factor * batch
            expected[name] = value, c.running(factor, c[old], batch, slack, roundings)
    options = {"alpha": alpha, "beta": beta, "epsilon": EPSILON, "unbiased": unbiased}
    return "forward_training", given, expected, options | {"exponential_average_factor": factor}


@held
def test_forward_inference(c, bench):
    alpha, beta = BLENDS[c.turn % 2]
    given = c.given("x", "scale", "bias", running_mean="mean", running_variance="variance") | {"y": c.output(beta)}
    error = c.normalized(c.x, c["mean"], c.r, c["scale"], c["bias"], 0.0, 4 * c.p.u * c.r)
    right = c["scale"] * c.r * (c.x - c["mean"]) + c["bias"]
    options = {"alpha": alpha, "beta": beta, "epsilon": EPSILON}
    return "forward_inference", given, {"y": c.data_stored(right, error, alpha, beta, given["y"])}, options


@held
def test_inference_with_inverse(c, bench):
    alpha, beta = BLENDS[c.turn % 2]
    operation = ("forward_inference_inv_variance", "elemt")[c.turn // 2 % 2]
    given = c.given("x", "scale", "bias", "mean", "inv_variance") | {"y": c.output(beta)}
    scale, bias, mean, inv = (c[n] for n in ("scale", "bias", "mean", "inv_variance"))
    right = getattr(reference, operation)(c.data["x"], scale, bias, mean, inv, axis=c.axis).y
    # the given scale is a product of vectors, r is 1
    error = c.normalized(c.x, mean, 1.0, scale * inv, bias, 0.0, 4 * c.p.u, c.product)
    expected = {"y": c.data_stored(right, error, alpha, beta, given["y"])}
    return operation, given, expected, {"alpha": alpha, "beta": beta}


def gradient(c, operation, given, right, mean, r, slack=(0.0, 0.0), e_dx=None):
    """A case of dx, dscale and dbias; `slack` is that of mean and r."""
    names = ("alpha", "beta", "alpha_param", "beta_param")
    options = dict(zip(names, FACTORS[c.turn % 2], strict=True))
    a, b, ap, bp = options.values()
    given = c.given("x", "dy", "scale") | given | {"dx": c.output(b), "dscale": c.vector(bp), "dbias": c.vector(bp)}
    if e_dx is None:
        e_dx = c.gradient(c["dy"], right.dx, mean, r, c["scale"], right.dscale, right.dbias, *slack)
    sums = c.sums(c["dy"], mean, r, right.dscale, right.dbias, *slack)
    expected = {"dx": c.data_stored(right.dx, e_dx, a, b, given["dx"])}
    for name, error in zip(("dscale", "dbias"), sums, strict=True):
        expected[name] = c.blended(getattr(right, name), error, ap, bp, given[name])
    return operation, given, expected, options | {"epsilon": EPSILON}


def backward(c, saved):
    given, mean, r, slack = {}, c["mean"], c["inv_variance"], (0.0, 0.0)
    if saved:
        given = c.given(saved_mean="mean", saved_inv_variance="inv_variance")
    else:
        moments, d = c.statistics(EPSILON)
        mean, r, slack = moments.mean, moments.inverse, (d.mean, d.inverse)
    # r = 1 / sqrt(v + eps) gives the reference any r: eps = 0 and v = 1 / r**2
    right = reference.training_grad(c.x, c["dy"], scale=c["scale"], mean=mean, variance=1 / r**2, epsilon=0.0,
                                    axis=c.axis)  # fmt: skip
    return gradient(c, "backward", given, right, mean, r, slack)


@held
def test_backward(c, bench):
    return backward(c, False)


@held
def test_backward_from_saved_statistics(c, bench):
    return backward(c, True)


def constant_statistics(c, operation, e_dx=None):
    right = getattr(reference, operation)(
        c.x, c["dy"], **{n: c[n] for n in ("scale", "mean", "variance")}, epsilon=EPSILON, axis=c.axis
    )
    given = c.given("mean", "variance")
    return gradient(c, operation, given, right, c["mean"], c.r, (0.0, c.inverse * c.r), e_dx)


@held
def test_backward_frozen(c, bench):
    inference_of_dy = c.normalized(c["dy"], 0.0, c.r, c["scale"], 0.0, 0.0, 4 * c.p.u * c.r)
    return constant_statistics(c, "backward_frozen", inference_of_dy)


@held
def test_training_grad(c, bench):
    return constant_statistics(c, "training_grad")


WANTED = [("sum_dy", "sum_dy_xmu", "dscale", "dbias"), ("dscale",), ("dbias",), ("sum_dy_xmu",)]


@held
def test_backward_reduce(c, bench):
    """(right, bound) of the four sums: backward with r = 1, then one product of vectors."""
    mean, inv = c["mean"], c["inv_variance"]
    right = reference.backward_reduce(x=c.x, dy=c["dy"], mean=mean, inv_variance=inv, axis=c.axis)
    e_moment, e_total = c.sums(c["dy"], mean, np.ones(c.derived), right.sum_dy_xmu, right.sum_dy)
    moment, total = c.parameter(right.sum_dy_xmu, e_moment), c.parameter(right.sum_dy, e_total)
    slack = np.abs(inv) * (moment[1] + 8 * c.p.u * (np.abs(right.sum_dy_xmu) + moment[1]))
    every = {"sum_dy": total, "sum_dy_xmu": moment, "dscale": c.parameter(right.dscale, slack), "dbias": total}
    expected = {name: every[name] for name in WANTED[c.turn % 4]}
    given = c.given("x", "dy", "mean", "inv_variance") | {name: c.vector() for name in expected}
    return "backward_reduce", given, expected, {}


@held
def test_backward_elemt(c, bench):
    alpha, beta = BLENDS[c.turn % 2]
    count, dy = 3 * c.m + 1, c["dy"]
    given = c.given("x", "dy", "scale", "mean", "inv_variance", sum_dy="sums", sum_dy_xmu="prior")
    given["dx"] = c.output(beta)
    scale, mean, inv, total, moment = (c[n] for n in ("scale", "mean", "inv_variance", "sums", "prior"))
    right = reference.backward_elemt(
        x=c.x, dy=dy, scale=scale, mean=mean, inv_variance=inv, sum_dy=total, sum_dy_xmu=moment, count=count,
        axis=c.axis,
    )  # fmt: skip
    # dx = alpha * t + beta * prior is stored, then alpha * w + 1 * dx: two inferences with variance 1
    centre, gain = total / count, scale * inv
    slope = -gain * inv * inv * moment / count
    t = gain * (dy - centre)
    e_t = c.normalized(dy, centre, 1.0, gain, 0.0, c.scaling * np.abs(centre), 4 * c.p.u, c.product)
    first = c.data_stored(t, e_t, alpha, beta, given["dx"])
    again = bench.coarse(c.dtype, *first, given["dx"], {"beta": beta})
    w = slope * (c.x - mean)
    # three products make the slope of a vector, the last with a rounded factor -1 / count; the gain is one more
    off = chain(c.product, c.product, c.product, c.product, 3 * c.p.u)
    e_w = c.normalized(c.x, mean, 1.0, slope, 0.0, 0.0, 4 * c.p.u, off)
    blended, bound = c.data_stored(w, e_w, alpha, 1.0, first[0])
    bound = bound + (1 + 2 * c.p.u + c.p.u_out) * (first[1] + again)
    expected = {"dx": (blended, bound + bench.coarse(c.dtype, blended, bound, first[0], {"beta": 1.0}))}
    prior = 0 if beta == 0 else beta * given["dx"].astype(np.float64)
    assert np.allclose(blended, alpha * right + prior, rtol=1e-12, atol=1e-12)
    return "backward_elemt", given, expected, {"count": count, "alpha": alpha, "beta": beta}


# ---------------------------------------------------------------- harder data


def test_frozen_statistics_far_from_the_batch(bench, dtype):
    c = Arrays((8, 3, 5, 6), 1, dtype)
    mean, variance = (30.0, 0.1) if dtype == DataType.FLOAT16 else (1000.0, 1e-4)  # gradients within float16's range
    c.vectors["mean"][...], c.vectors["variance"][...] = mean, variance
    c.r = 1 / np.sqrt(c["variance"] + EPSILON)
    for test in (test_backward_frozen, test_training_grad, test_forward_inference):
        test(bench, c)


@pytest.mark.parametrize("axis", [1, (1, 3), -1], ids=str)
def test_sums_about_a_mean_of_ten_thousand_deviations(bench, axis):
    """Class A: sum(dy * x) - mean * sum(dy) would be off by 1e4 times its bound."""
    c = Arrays((16, 3, 8, 7), axis, DataType.FLOAT32, mean=1e4)
    mean = c.vectors["mean"] = reference.stats(c.data["x"], axis=axis).mean.astype(np.float32)
    case = test_backward_reduce.make(c, bench)
    right, bound = case[2]["sum_dy_xmu"]
    uncentred = c.sum(c["dy"] * c.x).astype(np.float32) - mean * c.sum(c["dy"]).astype(np.float32)
    assert (np.abs(uncentred - right) > bound).any()  # the test can tell
    judge(bench, c, case)


def test_stats_of_a_mean_of_ten_thousand_deviations(bench):
    """MIOpen takes one pass: its variance meets class B, and its inverse standard deviation means nothing here."""
    c = Arrays((16, 3, 8, 7), 1, DataType.FLOAT32, mean=1e4)
    c.one_pass = bench.handle.backend == "miopen"
    test_stats(bench, c)


@pytest.mark.parametrize(
    "test",
    [test_stats, test_inference_with_inverse, test_backward_frozen, test_training_grad, test_backward_reduce],
    ids=lambda test: test.__name__,
)
@table("kind", HALVES)
def test_parameters_of_16_bits(bench, test, kind):
    """DirectML's and CANN's: statistics in the dtype of x, or of their own; results are rounded once."""
    for turn in (3, 4):  # blended or not
        test(bench, Arrays((6, 3, 4, 5), (1, 3), kind, narrow=True, turn=turn))


@table("kind", HALVES)
def test_conversions_are_exact_or_rounded_once(bench, kind):
    support = expected_support(bench.handle.backend, kind)
    wide = np.linspace(-3, 3, 37).astype(np.float32) ** 3
    narrow = reference.round_to(wide.astype(np.float64), NUMPY[kind])
    exact = once = narrow.astype(np.float64), np.zeros(37)
    if bench.handle.backend == "miopen" and kind == DataType.BFLOAT16:  # truncates: within one unit, not half
        once = wide.astype(np.float64), 2 * precision(kind).u_out * np.abs(wide) + precision(kind).tiny_out
    bench.check("convert", {"source": wide, "target": np.empty_like(narrow)}, {"target": once}, {}, support=support)
    bench.check("convert", {"source": narrow, "target": np.empty_like(wide)}, {"target": exact}, {}, support=support)


@table("dtype", [DataType.FLOAT32, DataType.FLOAT64])
def test_vectors(bench, dtype):
    c, support = Arrays((1, 11), 1, dtype), expected_support(bench.handle.backend, dtype)
    product, v = c["scale"] * c["bias"], c["variance"]
    blended = c.blended(product, 8 * c.p.u * np.abs(product), 0.5, 2.0, c["prior"])
    given = c.given(a="scale", b="bias") | {"out": c.vector(1.0)}
    bench.check("multiply", given, {"out": blended}, {"alpha": 0.5, "beta": 2.0}, support=support)
    # 1 / sqrt(iv * iv), whose square is 1 / iv**2; the root halves the product's error; then epsilon as the bias
    deviation = chain(c.product / 2, c.inverse)
    error = (chain(deviation, deviation) + 8 * c.p.u) / v**2 + 4 * c.p.u * EPSILON
    for operation, read, written, expected in [
        ("inverse_standard_deviation", "variance", "inv_variance", c.parameter(c.r, 8 * c.p.u * c.r)),
        ("variance_from_inverse", "inv_variance", "variance", c.parameter(1 / v**2 - EPSILON, error)),
    ]:
        given = c.given(read) | {written: c.vector()}
        bench.check(operation, given, {written: expected}, {"epsilon": EPSILON}, support=support)


SHAPES = [(5,), (4, 3), (2, 3, 4), (2, 3, 2, 3, 2), (2, 3, 2, 3, 2, 2, 2, 2)]  # more than five axes: several calls
ORDERS = [*((layout,) * 3 for layout in ("packed", "reversed", "gaps")), ("packed", "reversed", "gaps"),
          ("gaps", "mixed", "packed"), ("reversed", "gaps", "reversed")]  # fmt: skip


@pytest.mark.parametrize("operation", ["axpby", "fill", "relu", "relu_backward"])
@table(("dims", "layouts"), [(SHAPES[i % 5], ORDERS[i % 6]) for i in range(10)])
def test_elementwise(bench, dtype, operation, dims, layouts):
    rng, kind = np.random.default_rng(5), NUMPY[dtype]
    x, dy, out = (strided(reference.round_to(rng.normal(0, 1, dims), kind), o, i) for i, o in enumerate(layouts))
    c, wide = Setting(x, dtype, ()), dy.astype(np.float64)
    support = bench.handle.backend == "onednn" or expected_support(bench.handle.backend, dtype)  # its own plain C
    if operation == "axpby":
        for b in (-2.0, 0.0):
            expected = c.data_stored(c.x, 0.0, 0.75, b, out if b else None)
            bench.check("axpby", {"x": x, "y": out}, {"y": expected}, {"a": 0.75, "b": b}, support=support)
            out[...] = np.nan
        return
    out[...] = np.nan
    given, written, right, options = {
        "fill": ({}, "y", float(np.array(0.1).astype(kind)), {"value": 0.1}),
        "relu": ({"x": x}, "y", np.maximum(c.x, 0), {}),
        "relu_backward": ({"x": x, "dy": dy}, "dx", np.where(c.x > 0, wide, 0.0), {}),
    }[operation]
    exact = {written: (np.broadcast_to(right, dims), 0.0)}
    bench.check(operation, given | {written: out}, exact, options, support=support)
