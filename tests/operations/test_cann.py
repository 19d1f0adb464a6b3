"""CANN's batch normalization by parts on every backend that computes, against the reference, and its rules."""

import gc
import itertools
import threading

import numpy as np
import pytest
from parts import (
    DTYPES,
    A,
    U,
    batch,
    fresh,
    hold,
    laid_out,
    perform,
    same,
    sums_errors,
    upload,
    wide,
)
from tables import table

import pybnorm
from pybnorm import cann, operations, reference
from pybnorm.check.judging import bounds

NULLPTR, INVALID = "ACLNN_ERR_PARAM_NULLPTR, 161001", "ACLNN_ERR_PARAM_INVALID, 161002"
DIMS = [(6, 5), (6, 1), (1, 5), (6, 5, 4), (4, 3, 5, 2), (2, 3, 4, 2, 3), (2, 3, 2, 1, 3, 2), (2, 3, 2, 1, 3, 2, 1, 2)]
ranks = pytest.mark.parametrize("dims", DIMS, ids=str)
# dtypes of data and of vectors, since CANN lets each vector have its own, and the memory order of the data
kinds = pytest.mark.parametrize(
    ("data", "vectors", "order"),
    [
        *(("f32", "f32", order) for order in ("C", "last", "gaps")),
        ("f32", "bf16", "C"),
        ("f32", "f16", "C"),
        ("bf16", "f32", "last"),
        ("bf16", "bf16", "gaps"),
        ("f16", "f32", "gaps"),
        ("f16", "f16", "last"),
    ],
)


def column(vector, rank):
    """A vector of C as the reference's shape of parameters."""
    return wide(vector).reshape([-1 if a == 1 else 1 for a in range(rank)])


def given(dims, data="f32", vectors="f32", order="C", seed=0):
    """dy, x, mean, invstd, weight."""
    random = np.random.default_rng([seed, *dims])
    dy, x = (laid_out(random.normal(0.5, 2, dims).astype(DTYPES[data]), order) for _ in range(2))
    mean, weight = (random.normal(0.5, 1, dims[1]).astype(DTYPES[vectors]) for _ in range(2))
    return dy, x, mean, random.uniform(0.3, 2, dims[1]).astype(DTYPES[vectors]), weight


def run(bench, name, *arguments, written):
    """In two phases, with exactly the workspace that the first one names; each executor works once."""

    def query(handle, *a):
        size, executor = getattr(cann, f"batch_norm_{name}_get_workspace_size")(handle, *a)
        assert size == executor.workspace_size
        assert not executor.used
        return size

    def call(handle, *a, workspace):
        _, executor = getattr(cann, f"batch_norm_{name}_get_workspace_size")(handle, *a)
        address, nbytes = workspace
        getattr(cann, f"batch_norm_{name}")(address, nbytes, executor, None)
        assert executor.used
        with pytest.raises(pybnorm.ArgumentError, match="has been used") as caught:
            getattr(cann, f"batch_norm_{name}")(address, nbytes, executor, None)
        assert caught.value.argument == "executor"

    perform(bench, f"cann.{name}", call, query, *arguments, written=written)


# ---------------------------------------------------------------- reduce backward


def check_reduce(case, sum_dy=None, sum_dy_xmu=None, grad_weight=None, grad_bias=None):
    """The outputs that are given, against the reference and within class A."""
    dy, x, mean, invstd, _ = case
    rank = x.ndim
    mu, iv = column(mean, rank), column(invstd, rank)
    want = reference.backward_reduce(x=x, dy=dy, mean=mu, inv_variance=iv)
    _, e_total, e_moment = sums_errors(x, dy, mu, mu.shape)
    for name, got in (("sum_dy", sum_dy), ("grad_bias", grad_bias)):
        if got is not None:
            hold(got, want.sum_dy.ravel(), e_total.ravel(), name=name)
    if sum_dy_xmu is not None:
        hold(sum_dy_xmu, want.sum_dy_xmu.ravel(), e_moment.ravel(), name="sum_dy_xmu")
    if grad_weight is not None:
        error = e_moment * iv + A * np.abs(want.dscale)
        hold(grad_weight, want.dscale.ravel(), error.ravel(), name="grad_weight")


@kinds
@ranks
def test_reduce_backward(bench, dims, data, vectors, order):
    case = given(dims, data, vectors, order)
    outputs = tuple(fresh(case[2]) for _ in range(4))
    run(bench, "reduce_backward", *case, True, True, True, *outputs, written=outputs)
    check_reduce(case, *outputs)


@pytest.mark.parametrize("vectors", ["f32", "bf16"])
def test_averages_in_place_of_sums(bench, vectors):
    """The old form: averages come out of `reduce_backward`, and into `elemt_backward`; the gradient is the same."""
    case = given((4, 3, 5, 2), "f32", vectors)
    n, results = 40, []
    for averages in (False, True):
        outputs = [upload(bench, fresh(case[2])) for _ in range(4)]
        inputs = [upload(bench, array) for array in case]
        options = {"averages": averages}
        size, executor = cann.batch_norm_reduce_backward_get_workspace_size(
            bench.handle, *inputs, True, True, True, *outputs, **options
        )
        _, address = bench.memory(size)
        cann.batch_norm_reduce_backward(address, size, executor)
        dx = upload(bench, np.empty_like(case[1]))
        arguments = (inputs[0], inputs[1], *inputs[2:5], *outputs[:2], [n], dx)
        size, executor = cann.batch_norm_elemt_backward_get_workspace_size(bench.handle, *arguments, **options)
        _, address = bench.memory(size)
        cann.batch_norm_elemt_backward(address, size, executor)
        results.append([wide(bench.device.to_numpy(a)) for a in (*outputs, dx)])
    sums, averages = results
    slack = 2.0**-7 if vectors == "bf16" else 1e-6
    for total, average in zip(sums[:2], averages[:2], strict=True):
        assert np.allclose(average, total / n, rtol=slack, atol=0)
        assert not np.allclose(average, total, rtol=0.5)
    for one, other in zip(sums[2:], averages[2:], strict=True):
        assert np.allclose(one, other, rtol=slack, atol=10 * slack)
    with pytest.raises(pybnorm.ArgumentTypeError, match="averages"):
        cann.elemt_backward(bench.handle, *arguments, averages="yes")


@pytest.mark.parametrize("sigma", [1.0, 2.0**-4])
def test_a_mean_of_1e4_sigma_does_not_cancel(bench, sigma):
    random = np.random.default_rng(3)
    dims = 16, 3, 8, 8
    x = (1e4 * sigma + sigma * random.normal(size=dims)).astype(np.float32)
    dy = random.normal(size=dims).astype(np.float32)
    mean = wide(x).mean(axis=(0, 2, 3)).astype(np.float32)
    invstd = (1 / wide(x).std(axis=(0, 2, 3))).astype(np.float32)
    case = dy, x, mean, invstd, None
    outputs = tuple(fresh(mean) for _ in range(4))
    run(bench, "reduce_backward", *case, True, True, True, *outputs, written=outputs)
    check_reduce(case, *outputs)
    # CANN's own form, in float32, is far outside of what is held here
    axes = (0, 2, 3)
    uncentred = (dy * x).sum(axis=axes, dtype=np.float32) - mean * dy.sum(axis=axes, dtype=np.float32)
    with pytest.raises(AssertionError):
        check_reduce(case, sum_dy_xmu=uncentred)


@table("masks", list(itertools.product([False, True], repeat=3)))
@table("absent", [True, False])
def test_masks(bench, masks, absent):
    case = given((4, 3, 5, 2))
    names = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
    wanted = dict(zip(names, (masks[0], *masks), strict=True))
    outputs = {n: fresh(case[2]) if wanted[n] or not absent else None for n in names}
    written = tuple(a for n, a in outputs.items() if wanted[n])  # the others must keep their poison
    run(bench, "reduce_backward", *case, *masks, *outputs.values(), written=written)
    check_reduce(case, **{n: a for n, a in outputs.items() if wanted[n]})
    if not any(masks):
        size, _ = cann.batch_norm_reduce_backward_get_workspace_size(
            bench.handle, *(upload(bench, a) for a in case), *masks, None, None, None, None
        )
        assert size == 0


@pytest.mark.parametrize("dims", [(0, 3), (0, 3, 4), (2, 3, 0), (2, 3, 0, 4), (0, 3, 0, 4, 5)], ids=str)
@pytest.mark.parametrize("vectors", ["f32", "bf16"])
def test_an_empty_batch_gives_zeros(bench, dims, vectors):
    case = given(dims, "f32", vectors)
    outputs = tuple(fresh(case[2]) for _ in range(4))
    run(bench, "reduce_backward", *case, True, True, True, *outputs, written=outputs)
    for got in outputs:
        same(got, np.zeros_like(got))


@kinds
def test_vectors_with_gaps(bench, data, vectors, order):
    case = given((6, 5, 4), data, vectors, order)
    case = *case[:2], *(np.repeat(v, 3)[::3] for v in case[2:])
    outputs = tuple(np.full(15, np.nan, DTYPES[vectors])[::3] for _ in range(4))
    run(bench, "reduce_backward", *case, True, True, True, *outputs, written=outputs)
    check_reduce(case, *outputs)


# ---------------------------------------------------------------- stats, elemt, elemt backward


@pytest.mark.parametrize("order", ["C", "last", "gaps"])
@pytest.mark.parametrize("data", ["f32", "bf16", "f16"])
@ranks
def test_stats(bench, dims, data, order):
    x = given(dims, data, order=order)[1]
    mean, invstd = fresh(np.ones(dims[1], np.float32)), fresh(np.ones(dims[1], np.float32))
    run(bench, "stats", x, 1e-3, mean, invstd, written=(mean, invstd))
    found, off = batch(x, tuple(d if a == 1 else 1 for a, d in enumerate(dims)), 1e-3)
    hold(mean, found.mean.ravel(), off.mean.ravel(), name="mean")
    hold(invstd, found.inv_variance.ravel(), off.inverse.ravel(), name="invstd")


def test_stats_of_an_empty_batch_are_zeros(bench):
    mean, invstd = np.full(9, np.nan, np.float32)[::3], fresh(np.ones(3, np.float32))
    run(bench, "stats", np.ones((0, 3, 4), np.float32), 1e-5, mean, invstd, written=(mean, invstd))
    assert not mean.any()
    assert not invstd.any()


@kinds
@ranks
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_elemt(bench, dims, data, vectors, order, affine):
    bias, x, mean, invstd, weight = given(dims, data, vectors, order)
    bias = np.ascontiguousarray(bias.reshape(dims)[0].reshape(dims[1], -1)[:, 0]).astype(DTYPES[vectors])
    y = fresh(x)
    affines = (weight, bias) if affine else (None, None)
    run(bench, "elemt", x, *affines, mean, invstd, 1e-3, y, written=(y,))
    w, b = (
        column(v, len(dims)) if affine else column(np.full(dims[1], d), len(dims))
        for v, d in zip((weight, bias), (1, 0), strict=True)
    )
    mu, iv = column(mean, len(dims)), column(invstd, len(dims))
    want = reference.elemt(x, w, b, mu, iv).y
    error = bounds.forward_error(wide(x), mu, iv, w, b, (np.zeros_like(mu), (A + 4 * U) * iv), U)
    hold(y, want, error, name="output")


@kinds
@ranks
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_elemt_backward(bench, dims, data, vectors, order, affine):
    dy, x, mean, invstd, weight = given(dims, data, vectors, order)
    random = np.random.default_rng(1)
    sum_dy, sum_dy_xmu = (random.normal(0, 3, dims[1]).astype(DTYPES[vectors]) for _ in range(2))
    counter = [x.size // dims[1], 7, 0]
    dx = fresh(x)
    run(bench, "elemt_backward", dy, x, mean, invstd, weight if affine else None, sum_dy, sum_dy_xmu, counter, dx,
        written=(dx,))  # fmt: skip
    rank, n = len(dims), sum(counter)
    mu, iv, total, moment = (column(v, rank) for v in (mean, invstd, sum_dy, sum_dy_xmu))
    w = column(weight, rank) if affine else np.ones_like(mu)
    want = reference.backward_elemt(
        x=x, dy=dy, scale=w, mean=mu, inv_variance=iv, sum_dy=total, sum_dy_xmu=moment, count=n
    )
    zero = np.zeros_like(mu)
    slope = w * iv**3 * moment / n
    first = w * iv * (wide(dy) - total / n)
    second = slope * (wide(x) - mu)
    # two inferences, the first of which is stored in the dtype of dx before the second is added to it
    error = bounds.forward_error(wide(dy), total / n, iv, w, zero, (3 * U * np.abs(total / n), (A + 4 * U) * iv), U)
    error = error + bounds.forward_error(wide(x), mu, np.ones_like(mu), slope, zero, (zero, zero + 4 * A), U)
    error = error + 2 * U * (np.abs(first) + np.abs(second))
    error = error + bounds.precision(
        pybnorm.DataType[{"f32": "FLOAT32", "f16": "FLOAT16", "bf16": "BFLOAT16"}[data]]
    ).u_out * (np.abs(first) + error)
    hold(dx, want, error, name="grad_input")


@pytest.mark.parametrize("dims", [(0, 3, 4), (2, 3, 0)], ids=str)
def test_elementwise_calls_on_an_empty_batch_do_nothing(bench, dims):
    dy, x, mean, invstd, weight = given(dims)
    run(bench, "elemt", x, weight, None, mean, invstd, 1e-5, dy.copy(), written=())
    run(bench, "elemt_backward", dy, x, mean, invstd, weight, mean.copy(), mean.copy(), [5], dy.copy(), written=())


# ---------------------------------------------------------------- gather


def gathered(mean, invstd, eps, counts):
    """Right mean and variance, and how far off they may be."""
    counts = np.array(counts, np.float64)[:, None]
    present = counts[:, 0] > 0
    share = counts[present] / counts.sum()
    mu, iv = wide(mean)[present], wide(invstd)[present]
    variances = 1 / iv**2 - eps
    depth = bounds.depth(len(mu))
    centre = (share * mu).sum(axis=0)
    d_mean = (depth + 6) * U * (share * np.abs(mu)).sum(axis=0)
    apart = mu - centre
    d_apart = d_mean + U * np.abs(centre) + 8 * U * (np.abs(mu) + np.abs(centre))
    spread = (share * (variances + apart**2)).sum(axis=0)
    # the product, its inverse root, the square of that and the subtraction of eps are an inference each
    d_spread = (share * (4 * A * (1 / iv**2 + eps) + 2 * np.abs(apart) * d_apart + d_apart**2)).sum(axis=0)
    d_spread = d_spread + (depth + 12) * U * (share * (np.abs(variances) + apart**2)).sum(axis=0)
    return centre, d_mean, spread, d_spread


@pytest.mark.parametrize("vectors", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    "counts", [[5], [5, 5, 5], [3, 60, 7], [0, 4, 0, 9], [0, 0, 6], [2.0, 3.0], np.array([4, 1, 0])], ids=str
)
@pytest.mark.parametrize("running", [True, False], ids=["running", "alone"])
def test_gather_stats_with_counts(bench, vectors, counts, running):
    ranks_, channels, eps, momentum = len(counts), 5, 1e-3, 0.25
    random = np.random.default_rng(ranks_)
    mean = random.normal(1, 2, (ranks_, channels)).astype(DTYPES[vectors])
    invstd = random.uniform(0.3, 2, (ranks_, channels)).astype(DTYPES[vectors])
    for rank, count in enumerate(counts):
        if not count:  # whatever an empty rank holds must not be looked at
            mean[rank] = invstd[rank] = np.nan
    old = random.normal(size=channels).astype(DTYPES[vectors]), random.uniform(size=channels).astype(DTYPES[vectors])
    running_mean, running_var = (old[0].copy(), old[1].copy()) if running else (None, None)
    outputs = fresh(mean[0]), fresh(mean[0])
    written = (*outputs, running_mean, running_var) if running else outputs
    numbers = counts.tolist() if isinstance(counts, np.ndarray) else counts
    x = np.ones((2, channels, 3), np.float32)
    run(bench, "gather_stats_with_counts", x, mean, invstd, running_mean, running_var, momentum, eps, numbers, *outputs,
        written=written)  # fmt: skip
    centre, d_mean, spread, d_spread = gathered(mean, invstd, eps, numbers)
    present = np.array(numbers) > 0
    variances = np.where(present[:, None], 1 / wide(invstd) ** 2 - eps, 0)
    want = reference.gather_stats(wide(mean), None, [int(c) for c in numbers], variances=variances, epsilon=eps)
    np.testing.assert_allclose(want.mean, centre, rtol=1e-12)
    np.testing.assert_allclose(want.variance, spread, rtol=1e-12)
    iv = want.inv_variance
    d_iv = np.maximum(1 / np.sqrt(spread - d_spread + eps) - iv, iv - 1 / np.sqrt(spread + d_spread + eps)) + A * iv
    hold(outputs[0], centre, d_mean, name="mean_all")
    hold(outputs[1], iv, d_iv, name="invstd_all")
    if running:
        n = sum(numbers)
        unbiased = spread * n / (n - 1)
        for name, got, before, value, error in (
            ("running_mean", running_mean, old[0], centre, d_mean + U * np.abs(centre)),
            ("running_var", running_var, old[1], unbiased, (d_spread + U * spread) * n / (n - 1)),
        ):
            blended = momentum * value + (1 - momentum) * wide(before)
            size = momentum * np.abs(value) + (1 - momentum) * np.abs(wide(before))
            hold(got, blended, momentum * error + 4 * U * size, name=name)


def test_gather_of_matrices_with_gaps(bench):
    mean = np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2]
    invstd = np.full((2, 9), 0.5, np.float32)[:, ::3]
    outputs = fresh(np.ones(3, np.float32)), fresh(np.ones(3, np.float32))
    running = tuple(np.arange(6, dtype=np.float32)[::2] for _ in range(2))
    x = np.ones((2, 3), np.float32)
    run(bench, "gather_stats_with_counts", x, mean, invstd, *running, 0.25, 0.5, [1, 3], *outputs,
        written=(*outputs, *running))  # fmt: skip
    centre, d_mean, spread, d_spread = gathered(mean, invstd, 0.5, [1, 3])
    hold(outputs[0], centre, d_mean)
    hold(outputs[1], 1 / np.sqrt(spread + 0.5), (d_spread + A) / np.sqrt(spread + 0.5))
    for got, value, error in ((running[0], centre, d_mean), (running[1], spread * 4 / 3, d_spread * 4 / 3)):
        want = 0.25 * value + 0.75 * np.array([0, 2, 4])
        hold(got, want, 0.25 * error + 4 * U * want)


# ---------------------------------------------------------------- the two phases and the one call


def reduce_case(bench, dims=(4, 3, 5)):
    case = given(dims)
    buffers = [upload(bench, a) for a in case]
    outputs = [upload(bench, fresh(case[2])) for _ in range(4)]
    first = cann.batch_norm_reduce_backward_get_workspace_size(bench.handle, *buffers, True, True, True, *outputs)
    return case, buffers, outputs, first


def test_one_call_is_the_two_phases(bench):
    case, buffers, outputs, (size, executor) = reduce_case(bench)
    again = [upload(bench, fresh(case[2])) for _ in range(4)]
    memory, address = bench.memory(size)
    assert executor.function == "batch_norm_reduce_backward"
    assert f"{size} bytes" in repr(executor)
    cann.batch_norm_reduce_backward(address, size, executor)
    assert "used" in repr(executor)
    cann.reduce_backward(bench.handle, *buffers, True, True, True, *again, workspace=(address, size))
    assert bench.intact(memory, address, size)
    for a, b in zip(outputs, again, strict=True):
        same(bench.device.to_numpy(a), bench.device.to_numpy(b))
    check_reduce(case, *(bench.device.to_numpy(a) for a in outputs))


def test_a_workspace_too_small_leaves_the_executor_usable(bench):
    case, _, outputs, (size, executor) = reduce_case(bench)
    assert size > 0
    memory, address = bench.memory(size)
    array = memory._replace(pointer=address, dims=(size // 4 + 1,), strides=(1,))
    bad = [
        ((address, size - 1), "workspace_size", f"at least {size} bytes"),
        ((address, 0), "workspace_size", f"at least {size} bytes"),
        ((0, size), "workspace", NULLPTR),
        ((None, size), "workspace", NULLPTR),
        ((address + 4, size), "workspace", "aligned to 64"),
        ((array, 4 * (size // 4 + 1) + 1), "workspace_size", "at most"),
    ]
    for arguments, argument, text in bad:
        with pytest.raises(pybnorm.WorkspaceError) as caught:
            cann.batch_norm_reduce_backward(*arguments, executor, None)
        assert caught.value.argument == argument
        assert text in str(caught.value)
        for output in outputs:
            assert np.isnan(bench.device.to_numpy(output)).all()
    cann.batch_norm_reduce_backward(array, size, executor, None)
    check_reduce(case, *(bench.device.to_numpy(a) for a in outputs))


def test_an_executor_is_for_one_execution_of_its_own_function(bench):
    *_, (size, executor) = reduce_case(bench)
    _, address = bench.memory(size)
    with pytest.raises(pybnorm.ArgumentError, match="an executor of batch_norm_reduce_backward") as caught:
        cann.batch_norm_stats(address, size, executor, None)
    assert caught.value.argument == "executor"
    for wrong, text in ((None, NULLPTR), (7, "an Executor")):
        with pytest.raises(pybnorm.ArgumentTypeError, match="executor") as caught:
            cann.batch_norm_reduce_backward(address, size, wrong, None)
        assert text in str(caught.value)
    outcomes = []

    def execute():
        try:
            cann.batch_norm_reduce_backward(address, size, executor, None)
            outcomes.append("done")
        except pybnorm.ArgumentError as error:
            outcomes.append(error.argument)

    threads = [threading.Thread(target=execute) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["done"] + ["executor"] * 7


def test_the_given_stream_is_the_one_that_computes(bench, monkeypatch):
    *_, (size, executor) = reduce_case(bench)
    _, address = bench.memory(size)
    seen, execute = [], operations.program.Prepared.execute

    def spy(prepared, handle, operation, *arguments):
        seen.append((operation, handle.stream))
        execute(prepared, handle, operation, *arguments)

    monkeypatch.setattr(operations.program.Prepared, "execute", spy)
    before = bench.handle.stream
    with pytest.raises(pybnorm.ArgumentError) as caught:
        cann.batch_norm_reduce_backward(address, size, executor, "stream")
    assert caught.value.argument == "stream"
    assert not executor.used
    with pybnorm.Handle(bench.handle.backend) as other:
        cann.batch_norm_reduce_backward(address, size, executor, other.stream)
        bench.device.synchronize()
        assert seen == [("reduce_backward", other.stream)]
        assert bench.handle.stream == before


def test_the_executor_keeps_its_arrays_alive(bench):
    dims = 64, 8, 64
    case, buffers, outputs, (size, executor) = reduce_case(bench, dims)
    del buffers
    gc.collect()
    _, address = bench.memory(size)
    noise = [upload(bench, np.full(dims, 1e30, np.float32)) for _ in range(8)]  # would reuse memory that was freed
    cann.batch_norm_reduce_backward(address, size, executor, None)
    check_reduce(case, *(bench.device.to_numpy(a) for a in outputs))
    assert len(noise) == 8


# ---------------------------------------------------------------- bad input

REDUCE = ["grad_out", "input", "mean", "invstd", "weight", "sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias"]
VECTORS = {
    "reduce_backward": REDUCE[2:],
    "stats": ["mean", "invstd"],
    "gather_stats_with_counts": ["running_mean", "running_var", "mean_all", "invstd_all"],
    "elemt": ["weight", "bias", "mean", "invstd"],
    "elemt_backward": ["mean", "invstd", "weight", "sum_dy", "sum_dy_xmu"],
}
DATA = {
    "reduce_backward": ["input", "grad_out"],
    "stats": ["input"],
    "gather_stats_with_counts": ["input"],
    "elemt": ["input", "output"],
    "elemt_backward": ["input", "grad_out", "grad_input"],
}
OPTIONAL = {
    "reduce_backward": ["weight"],
    "stats": [],
    "gather_stats_with_counts": ["running_mean", "running_var"],
    "elemt": ["weight", "bias"],
    "elemt_backward": ["weight"],
}
OUTPUTS = {
    "reduce_backward": REDUCE[5:],
    "stats": ["mean", "invstd"],
    "gather_stats_with_counts": ["running_mean", "running_var", "mean_all", "invstd_all"],
    "elemt": ["output"],
    "elemt_backward": ["grad_input"],
}
FUNCTIONS = list(DATA)


def good(name):
    fields = {n: np.ones((4, 3, 5), np.float32) for n in DATA[name]} | {
        n: np.ones(3, np.float32) for n in VECTORS[name]
    }
    if name == "reduce_backward":
        fields |= {"input_g": True, "weight_g": True, "bias_g": True}
    elif name == "gather_stats_with_counts":
        fields |= {"mean": np.ones((2, 3), np.float32), "invstd": np.ones((2, 3), np.float32)}
        fields |= {"momentum": 0.1, "eps": 1e-5, "counts": [20, 20]}
    elif name == "elemt_backward":
        fields["counter"] = [20]
    if name in ("stats", "elemt"):
        fields["eps"] = 1e-5
    return fields


def refuse(bench, name, fields, argument, text, kind=pybnorm.ArgumentError):
    """Refused in the first phase and in one call, with the argument's name and CANN's status; nothing is written."""
    uploaded = {n: upload(bench, a) if isinstance(a, np.ndarray) else a for n, a in fields.items()}
    for function in (getattr(cann, name), getattr(cann, f"batch_norm_{name}_get_workspace_size")):
        with pytest.raises(kind) as caught:
            function(bench.handle, **uploaded)
        assert caught.value.argument == argument
        assert text in str(caught.value), caught.value
    for n, value in fields.items():
        if isinstance(value, np.ndarray):
            same(bench.device.to_numpy(uploaded[n]), value)


EVERY = [(name, field) for name in FUNCTIONS for field in (*DATA[name], *VECTORS[name])]


@table(("name", "field"), EVERY)
def test_null(bench, name, field):
    if field in OPTIONAL[name]:
        if name != "gather_stats_with_counts":
            uploaded = {n: upload(bench, a) if isinstance(a, np.ndarray) else a for n, a in good(name).items()}
            getattr(cann, f"batch_norm_{name}_get_workspace_size")(bench.handle, **{**uploaded, field: None})
        else:
            refuse(bench, name, good(name) | {field: None}, field, "or both absent")
        return
    refuse(bench, name, good(name) | {field: None}, field, NULLPTR, pybnorm.ArgumentTypeError)


def test_what_is_masked_off_is_not_looked_at(bench):
    arguments = good("reduce_backward") | dict.fromkeys(("input_g", "weight_g"), False)
    arguments = {n: upload(bench, a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
    arguments |= dict.fromkeys(("sum_dy", "sum_dy_xmu", "grad_weight"), "no array")
    size, _ = cann.batch_norm_reduce_backward_get_workspace_size(bench.handle, **arguments)
    _, address = bench.memory(size)
    cann.reduce_backward(bench.handle, **arguments, workspace=(address, size))
    with pytest.raises(pybnorm.ArgumentTypeError, match="ACLNN_ERR_PARAM_INVALID") as caught:
        cann.reduce_backward(bench.handle, **arguments | {"input_g": True})
    assert caught.value.argument == "sum_dy"


def test_null_where_its_mask_is_set_says_so(bench):
    masks = {"sum_dy": "input_g", "sum_dy_xmu": "input_g", "grad_weight": "weight_g", "grad_bias": "bias_g"}
    for field, mask in masks.items():
        refuse(bench, "reduce_backward", good("reduce_backward") | {field: None}, field, f"because {mask} is True")


@table(("name", "field"), EVERY)
def test_dtypes(bench, name, field):
    fields = good(name)
    for kind in (np.float64, np.int32):
        value = fields[field].astype(kind)
        changed = fields | {field: value}
        if kind == np.int32:
            uploaded = {
                n: upload(bench, a) if isinstance(a, np.ndarray) and n != field else a for n, a in changed.items()
            }
            with pytest.raises(pybnorm.ArgumentTypeError, match=INVALID) as caught:
                getattr(cann, name)(bench.handle, **uploaded)
            assert caught.value.argument == field
        else:
            refuse(bench, name, changed, field, INVALID, pybnorm.ArgumentTypeError)
    if field in DATA[name][1:]:
        changed = fields | {field: fields[field].astype(DTYPES["bf16"])}
        refuse(bench, name, changed, field, "the dtype of input", pybnorm.ArgumentTypeError)


def test_stats_are_float32(bench):
    for field in ("mean", "invstd"):
        changed = good("stats") | {field: np.ones(3, DTYPES["bf16"])}
        refuse(bench, "stats", changed, field, INVALID, pybnorm.ArgumentTypeError)


@table("name", FUNCTIONS)
@table("dims", [(), (3,), (1, 3) + (1,) * 7, (4, 0, 5), (4, 0)])
def test_ranks_and_channels(bench, name, dims):
    fields = good(name) | {"input": np.ones(dims, np.float32)}
    refuse(bench, name, fields, "input", INVALID)


@pytest.mark.parametrize(("name", "field"), [(n, f) for n in FUNCTIONS for f in DATA[n][1:]])
def test_shapes_of_data(bench, name, field):
    for dims in ((4, 3, 4), (4, 3, 5, 1), (4, 3)):
        refuse(bench, name, good(name) | {field: np.ones(dims, np.float32)}, field, "the dims of input")


@table(("name", "field"), [(n, f) for n in FUNCTIONS for f in VECTORS[n]])
def test_shapes_of_vectors(bench, name, field):
    for dims in ((4,), (2,), (1, 3), (0,), ()):
        refuse(bench, name, good(name) | {field: np.ones(dims, np.float32)}, field, INVALID)


@table("mask", ["input_g", "weight_g", "bias_g"])
@table("value", [1, None, "True", 0.0])
def test_masks_are_bools(bench, mask, value):
    refuse(bench, "reduce_backward", good("reduce_backward") | {mask: value}, mask, "True or False")


@table("name", ["stats", "elemt", "gather_stats_with_counts"])
@table("value", [-1e-9, float("nan"), float("inf"), None, "0"])
def test_eps(bench, name, value):
    refuse(bench, name, good(name) | {"eps": value}, "eps", "a finite number >= 0")


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), None])
def test_momentum(bench, value):
    name = "gather_stats_with_counts"
    refuse(bench, name, good(name) | {"momentum": value}, "momentum", "from 0 to 1")


@pytest.mark.parametrize(("name", "field"), [("gather_stats_with_counts", "counts"), ("elemt_backward", "counter")])
def test_counts(bench, name, field):
    for value, text in (
        (None, NULLPTR),
        ([1.5, 2], "whole numbers"),
        ([-1, 2], "whole numbers"),
        ([float("nan"), 2], "whole numbers"),
        ([float("inf"), 2], "whole numbers"),
        (["1", 2], "whole numbers"),
        ([True, 2], "whole numbers"),
        (20, "whole numbers"),
        ("20", "whole numbers"),
        ([0, 0], "a sum above 0" if name == "elemt_backward" else "a sum above 1"),
    ):
        refuse(bench, name, good(name) | {field: value}, field, text)

    class OnDevice:
        __cuda_array_interface__ = None

        def tolist(self):
            return [20, 20]

    refuse(bench, name, good(name) | {field: OnDevice()}, field, "on the host")
    if field == "counts":
        refuse(bench, name, good(name) | {field: [20]}, field, "one for each of the 2 rows")
        refuse(bench, name, good(name) | {field: [1, 0]}, field, "a sum above 1")


def test_rows(bench):
    name = "gather_stats_with_counts"
    for field in ("mean", "invstd"):
        for dims in ((3,), (2, 4), (0, 3), (1, 2, 3)):
            refuse(bench, name, good(name) | {field: np.ones(dims, np.float32)}, field, INVALID)
        refuse(bench, name, good(name) | {field: None}, field, NULLPTR)
    refuse(bench, name, good(name) | {"invstd": np.ones((3, 3), np.float32)}, "invstd", "the dims of mean")


@table(("name", "field"), [(n, f) for n in FUNCTIONS for f in OUTPUTS[n]])
def test_outputs_are_writable_and_have_memory_of_their_own(bench, name, field):
    uploaded = {n: upload(bench, a) if isinstance(a, np.ndarray) else a for n, a in good(name).items()}
    with pytest.raises(pybnorm.ArgumentError, match="read-only") as caught:
        getattr(cann, name)(bench.handle, **{**uploaded, field: uploaded[field]._replace(writable=False)})
    assert caught.value.argument == field
    alike = DATA[name] if field in DATA[name] else VECTORS[name]
    for other in [n for n in alike if n != field]:
        with pytest.raises(pybnorm.ArgumentError, match="overlaps") as caught:
            getattr(cann, name)(bench.handle, **{**uploaded, field: uploaded[other]})
        assert caught.value.argument in (field, other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_handle_is_named(bench, name):
    with pytest.raises(pybnorm.ArgumentTypeError) as caught:
        getattr(cann, name)(None, **good(name))
    assert caught.value.argument == "handle"
    closed = pybnorm.Handle(bench.handle.backend)
    closed.close()
    with pytest.raises(pybnorm.ClosedError):
        getattr(cann, name)(closed, **good(name))
