"""The operations that ranks share: merged statistics, empty ranks, and the whole against one batch."""

import numpy as np
import pytest
from operation_bench import DTYPES, NUMPY, expected_support
from operation_bounds import Setting

from pybnorm import ArgumentError, ArgumentTypeError, DataType, operations, reference
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
@pytest.mark.parametrize("factor", [0.25, 1.0])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
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


@pytest.mark.parametrize("shards", [[4, 2, 3], [5, 0, 4], [1, 1, 7]], ids=str)
def test_ranks_together_are_one_batch(bench, shards):
    """Stats, gather, elemt, reduce, elemt of the shards against the reference of their concatenation."""
    rng = np.random.default_rng(shards)
    dims = (sum(shards), 3, 4, 5)
    x = rng.normal(2.0, 1.5, dims).astype(np.float32)
    dy = rng.normal(0.0, 1.0, dims).astype(np.float32)
    scale, bias = rng.normal(1.0, 0.3, 3).astype(np.float32), rng.normal(0.0, 1.0, 3).astype(np.float32)
    parts = np.split(np.arange(dims[0]), np.cumsum(shards)[:-1])
    counts = [len(part) * 20 for part in parts]
    h = bench.handle

    def call(operation, arrays, outputs, **options):
        return bench.run(operation, arrays, outputs, options)

    empty = np.full(3, np.nan, np.float32)
    means, variances = np.full((2, len(shards), 3), np.nan, np.float32)
    for rank, part in enumerate(parts):
        if len(part):
            found = call("stats", {"x": x[part], "mean": empty.copy(), "variance": empty.copy()}, ("mean", "variance"))
            means[rank], variances[rank] = found["mean"], found["variance"]
    given = {"means": means, "m2s": None, "variances": variances}
    given |= {n: empty.copy() for n in ("mean", "variance", "inv_variance")}
    whole = call("gather_stats", given, ("mean", "variance", "inv_variance"), counts=counts, epsilon=EPSILON)
    statistics = {"mean": whole["mean"], "inv_variance": whole["inv_variance"]}
    sums = np.zeros((2, 3), np.float32)
    y, dx = np.empty_like(x), np.empty_like(x)
    for part in parts:
        given = {"x": x[part], "scale": scale, "bias": bias, **statistics, "y": np.full_like(x[part], np.nan)}
        if len(part):
            y[part] = call("elemt", given, ("y",))["y"]
            given = {"dy": dy[part], "x": x[part], **statistics, "sum_dy": empty.copy(), "sum_dy_xmu": empty.copy()}
            found = call("backward_reduce", given, ("sum_dy", "sum_dy_xmu"))
            sums += found["sum_dy"], found["sum_dy_xmu"]
    for part in parts:
        given = {"dy": dy[part], "x": x[part], **statistics, "scale": scale}
        given |= {"sum_dy": sums[0], "sum_dy_xmu": sums[1], "dx": np.full_like(x[part], np.nan)}
        if len(part):
            dx[part] = call("backward_elemt", given, ("dx",), count=sum(counts))["dx"]
    # one batch of the concatenation, with the bound of one kernel over it: the split adds a few roundings per
    # element (gather, products), which twice that bound covers because h = 16 + 4 sqrt(m) counts m sums
    s = Setting(x, DataType.FLOAT32, 1)
    moments, d = s.statistics(EPSILON)
    wide = (1, 3, 1, 1)
    g, b = scale.astype(np.float64).reshape(wide), bias.astype(np.float64).reshape(wide)
    right = reference.forward_training(s.x, g, b, epsilon=EPSILON)
    error = s.normalized(s.x, moments.mean, moments.inverse, g, b, d.mean, d.inverse)
    assert (np.abs(y - right.y) <= 2 * s.data_stored(right.y, error)[1]).all()
    back = reference.backward(s.x, dy.astype(np.float64), g, epsilon=EPSILON)
    error = s.gradient(
        dy.astype(np.float64), back.dx, moments.mean, moments.inverse, g, back.dscale, back.dbias, d.mean, d.inverse
    )
    assert (np.abs(dx - back.dx) <= 2 * s.data_stored(back.dx, error)[1]).all()
    assert h is bench.handle


@pytest.mark.parametrize("dims", [(0, 3, 4), (2, 3, 0), (0, 3)], ids=str)
def test_empty_ranks(bench, dims):
    """Sums over nothing are 0, and there is nothing to normalize."""
    from pybnorm import DataType as D
    from pybnorm._arrays import Buffer

    handle = bench.handle
    steps = tuple(int(np.prod(dims[i + 1 :])) or 1 for i in range(len(dims)))
    nothing = Buffer(0, dims, steps, D.FLOAT32, handle.library.device_type, handle.device or 0, True, None)
    vectors = bench.put(
        {n: np.full(3, v, np.float32) for n, v in [("mean", 1.0), ("inv_variance", 2.0), ("scale", 1.0)]}
    )
    outputs = bench.put({n: np.full(3, np.nan, np.float32) for n in ("sum_dy", "sum_dy_xmu", "dscale", "dbias")})
    mean, inv = vectors["mean"], vectors["inv_variance"]
    operations.backward_reduce(handle, x=nothing, dy=nothing, mean=mean, inv_variance=inv, **outputs)
    for name, buffer in outputs.items():
        assert (bench.device.to_numpy(buffer) == 0).all(), name
    given = {"x": nothing, "dy": nothing, "mean": mean, "inv_variance": inv, **outputs}
    assert operations.plan(handle, "backward_reduce", **given).nbytes == 0
    before = {name: bench.device.to_numpy(buffer) for name, buffer in vectors.items()}
    for operation, given in [
        (
            "elemt",
            {"x": nothing, "scale": vectors["scale"], "bias": None, "mean": mean, "inv_variance": inv, "y": nothing},
        ),
        (
            "backward_elemt",
            {"dy": nothing, "x": nothing, "mean": mean, "inv_variance": inv, "scale": None, "dx": nothing}
            | {"sum_dy": outputs["sum_dy"], "sum_dy_xmu": outputs["dbias"], "count": 3},
        ),
    ]:
        size = operations.workspace_size(handle, operation, **given)
        buffer, address = bench.memory(size)
        getattr(operations, operation)(handle, **given, workspace=(address, size))
        assert bench.intact(buffer, address, size)
    for name, buffer in vectors.items():
        assert (bench.device.to_numpy(buffer) == before[name]).all()
    with pytest.raises(ArgumentError, match=r"x|dims"):
        operations.stats(handle, nothing, mean=outputs["dbias"])
