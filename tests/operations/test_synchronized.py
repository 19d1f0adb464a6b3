"""The operations that ranks share: merged statistics, empty ranks, and the whole against one batch."""

import numpy as np
import pytest
from operation_bench import DTYPES, NUMPY, expected_support
from tables import table

from pybnorm import ArgumentError, ArgumentTypeError, DataType, operations, reference
from pybnorm._arrays import Buffer
from pybnorm.check.judging.bounds import depth, precision

EPSILON = 1e-3
COUNTS = [[5], [4, 4, 4], [3, 0, 3, 3, 7], [0, 0, 9], [0, 2, 0, 2], [1, 0], [10**6, 1, 5]]
COLUMNS = 13
FLOATS = [d for d in DTYPES if NUMPY[d].itemsize > 2]


def rows(counts, kind, offset=3.0):
    """Means and biased variances by rank; NaN where a rank has no elements, so that reading it shows."""
    rng = np.random.default_rng(counts)
    means = rng.normal(offset, 1.0, (len(counts), COLUMNS)).astype(kind)
    variances = rng.uniform(0.5, 2.0, means.shape).astype(kind)
    for row, count in enumerate(counts):
        if count == 0:
            means[row] = variances[row] = np.nan
    return means, variances


def gathered(dtype, means, parts, counts, by_m2, factor, old, unbiased):
    """(right, bound) of every output."""
    p, n = precision(dtype), sum(counts)
    u, h = p.u, depth(sum(c > 0 for c in counts))
    present = [i for i, c in enumerate(counts) if c]
    weight = np.array([counts[i] / n for i in present])[:, None]
    mu, part = means[present].astype(np.float64), parts[present].astype(np.float64)
    options = {"m2s": parts, "variances": None} if by_m2 else {"m2s": None, "variances": parts}
    running = {} if old is None else dict(zip(("running_mean", "running_variance"), old, strict=True))
    right = reference.gather_stats(
        means, counts=counts, **options, **running, exponential_average_factor=factor, epsilon=EPSILON
    )
    # a row times its share by axpby: factor and product rounded, stored; then dbias of backward over the rows
    scaling = 2 * u + p.u_param
    d_mean = (h * u + scaling) * (weight * np.abs(mu)).sum(0) + p.u_param * np.abs(right.mean)
    # the differences: an inference with scale 1 and variance 1, whose mean is off by d_mean
    apart = np.abs(mu - right.mean)
    d_apart = d_mean + 4 * u * apart + 4 * u * (np.abs(mu) + np.abs(right.mean)) + p.u_param * apart
    # dscale of backward: sum of share * difference * (mean_k - mean)
    size = apart + d_apart
    d_between = (weight * (size * d_mean + d_apart * size)).sum(0) + ((h + 4) * u + scaling) * (weight * size**2).sum(0)
    share = 1 / n if by_m2 else weight
    d_within = (h * u + scaling) * (share * part).sum(0)
    d_variance = d_between + d_within + (2 * u + 2 * p.u_param) * right.variance
    r = right.inv_variance
    above = 1 / np.sqrt(np.maximum(right.variance - d_variance, 0) + EPSILON) - r
    below = r - 1 / np.sqrt(right.variance + d_variance + EPSILON)
    expected = {
        "mean": (right.mean, d_mean + p.tiny_param),
        "variance": (right.variance, d_variance + p.tiny_param),
        "inv_variance": (r, np.maximum(above, below) + (8 * u + p.u_param) * r),
    }
    if old is not None:
        c = n / (n - 1) if unbiased else 1.0
        for name, batch, slack, before in [
            ("running_mean", right.mean, d_mean, old[0]),
            ("running_variance", c * right.variance, c * d_variance, old[1]),
        ]:
            kept = 0 if factor == 1 else np.abs((1 - factor) * before)
            # both factors rounded, both products, their sum; stored
            bound = factor * slack + (4 * u + p.u_param) * (kept + np.abs(factor * batch)) + p.tiny_param
            expected[name] = getattr(right, name), bound
        if not unbiased:
            kept = 0 if factor == 1 else (1 - factor) * old[1]
            expected["running_variance"] = kept + factor * right.variance, bound
    return expected


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.short)
@pytest.mark.parametrize("by_m2", [True, False])
@table("factor", [0.25, 1.0])
@table("counts", COUNTS)
def test_gather_stats(bench, dtype, counts, by_m2, factor):
    kind = NUMPY[dtype]
    means, parts = rows(counts, kind)
    if by_m2:
        parts = parts * np.array(counts, kind)[:, None]
    names = ["mean", "variance", "inv_variance"]
    old = None
    if sum(counts) > 1:
        names += ["running_mean", "running_variance"]
        fill = np.nan if factor == 1 else 1.5  # a factor of 1 does not read them
        old = np.full(COLUMNS, fill, kind), np.full(COLUMNS, fill, kind)
    unbiased = by_m2 == (factor == 1)
    expected = gathered(dtype, means, parts, counts, by_m2, factor, old, unbiased)
    given = {"means": means, "m2s": parts if by_m2 else None, "variances": None if by_m2 else parts}
    given |= {name: np.full(COLUMNS, np.nan, kind) for name in names[:3]}
    if old is not None:
        given |= dict(zip(names[3:], (a.copy() for a in old), strict=True))
    options = {"counts": counts, "epsilon": EPSILON, "exponential_average_factor": factor, "unbiased": unbiased}
    bench.check("gather_stats", given, expected, options, support=expected_support(bench.handle.backend, dtype))


def test_gather_stats_of_strided_rows(bench):
    """Columns of a wider matrix, as an all-gather of mean and M2 side by side leaves them."""
    counts = [3, 0, 4]
    means, parts = rows(counts, np.float32)
    wide = np.concatenate([means, parts], axis=1)
    expected = gathered(DataType.FLOAT32, means, parts, counts, True, 0.1, None, True)
    given = {"means": wide[:, :COLUMNS], "m2s": wide[:, COLUMNS:]}
    given |= {name: np.full(COLUMNS, np.nan, np.float32) for name in ("mean", "variance", "inv_variance")}
    support = expected_support(bench.handle.backend, DataType.FLOAT32)
    bench.check("gather_stats", given, expected, {"counts": counts, "epsilon": EPSILON}, support=support)


def test_gather_stats_refuses(bench):
    means, parts = rows([2, 3], np.float32)
    put = bench.put({"means": means, "m2s": parts, "mean": np.zeros(COLUMNS, np.float32)})

    def call(**changes):
        given = {"counts": [2, 3], **put, **changes}
        operations.gather_stats(bench.handle, given.pop("means"), given.pop("m2s"), given.pop("counts"), **given)

    for changes, argument in [
        ({"counts": [0, 0]}, "counts"),
        ({"counts": [2]}, "counts"),
        ({"counts": [2, -1]}, "counts"),
        ({"counts": "23"}, "counts"),
        ({"counts": [2, 2.5]}, "counts"),
        ({"counts": [2, True]}, "counts"),
        ({"counts": 5}, "counts"),
        ({"m2s": None}, "m2s"),
        ({"variances": put["m2s"]}, "m2s"),
        ({"mean": None}, "mean"),
        ({"running_mean": put["mean"]}, "running_variance"),
        ({"exponential_average_factor": 1.5}, "exponential_average_factor"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"mean": put["means"]}, "mean"),
    ]:
        with pytest.raises(ArgumentError) as caught:
            call(**changes)
        assert caught.value.argument == argument, changes
    one = bench.put({n: np.zeros(COLUMNS, np.float32) for n in ("running_mean", "running_variance")})
    with pytest.raises(ArgumentError, match="counts"):
        call(counts=[1, 0], **one)
    with pytest.raises(ArgumentTypeError, match="means"):
        call(means=bench.put({"m": reference.round_to(means.astype(float), np.float16)})["m"])


@table("shards", [[4, 2, 3], [5, 0, 4], [1, 1, 7]])
def test_ranks_together_are_one_batch(bench, shards):
    """Stats, gather, elemt, reduce, elemt of the shards against the reference of their concatenation."""
    rng = np.random.default_rng(shards)
    x, dy = (rng.normal(mean, 1.5, (sum(shards), 3, 4, 5)).astype(np.float32) for mean in (2.0, 0.0))
    scale, bias = rng.normal(1.0, 0.3, (2, 3)).astype(np.float32)
    present = [part for part in np.split(np.arange(len(x)), np.cumsum(shards)[:-1]) if len(part)]

    def call(operation, outputs, given, **options):
        given = given | {n: np.full_like(given["x"] if n in ("y", "dx") else scale, np.nan) for n in outputs}
        return bench.run(operation, given, outputs, options)

    rows = {"means": np.full((len(shards), 3), np.nan, np.float32), "m2s": None}
    rows["variances"] = rows["means"].copy()
    for rank, part in zip(np.flatnonzero(shards), present, strict=True):
        found = call("stats", ("mean", "variance"), {"x": x[part]})
        rows["means"][rank], rows["variances"][rank] = found["mean"], found["variance"]
    counts = [20 * n for n in shards]
    whole = call("gather_stats", ("mean", "inv_variance"), rows, counts=counts, epsilon=EPSILON)
    y, dx, sums = np.empty_like(x), np.empty_like(x), {n: np.zeros(3, np.float32) for n in ("sum_dy", "sum_dy_xmu")}
    for part in present:
        y[part] = call("elemt", ("y",), {"x": x[part], "scale": scale, "bias": bias, **whole})["y"]
        for name, total in call("backward_reduce", tuple(sums), {"dy": dy[part], "x": x[part], **whole}).items():
            sums[name] += total
    for part in present:
        given = {"dy": dy[part], "x": x[part], "scale": scale, **whole, **sums}
        dx[part] = call("backward_elemt", ("dx",), given, count=sum(counts))["dx"]
    x, dy, scale, bias = (a.astype(np.float64) for a in (x, dy, scale, bias))
    right = reference.forward_training(x, scale, bias, epsilon=EPSILON).y
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, reference.backward(x, dy, scale, epsilon=EPSILON).dx, rtol=1e-5, atol=1e-5)


def test_an_empty_rank_needs_no_workspace_and_has_no_statistics(bench):
    """Its sums are 0, and there is nothing to normalize, as tests of CANN's names hold."""
    handle, dims = bench.handle, (0, 3, 4)
    nothing = Buffer(0, dims, (12, 4, 1), DataType.FLOAT32, handle.library.device_type, handle.device or 0, True, None)
    vectors = bench.put({n: np.ones(3, np.float32) for n in ("mean", "inv_variance", "sum_dy", "dscale")})
    assert operations.plan(handle, "backward_reduce", x=nothing, dy=nothing, **vectors).nbytes == 0
    with pytest.raises(ArgumentError, match=r"x|dims"):
        operations.stats(handle, nothing, mean=vectors["mean"])
