"""Batch norm over ranks is batch norm of what they have together, and no mistake of one rank leaves the others hanging.

The ranks' results come from one launch for each kind of communicator (see sync_launch); here they are judged.
"""

import collections
import contextlib
import gc
import importlib.util
import inspect
import threading
import types
import weakref

import numpy as np
import pytest
import sync_worker
from sync_launch import absent, launch, mpiexec, ranks_of, required, scenarios_of
from sync_worker import CASES, COMPUTED, ORDERS, AllReduced, Threads, bounds_of
from tables import table

import pybnorm
from pybnorm import ArgumentError, ArgumentTypeError, operations, reference, sync
from pybnorm._arrays import as_buffer
from pybnorm.check.judging.bounds import Status, expect, judge, precision, tiers
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.enums import DataType
from pybnorm.sync import SyncBatchNorm, messages
from pybnorm.sync.plans import _Terms

worst = collections.defaultdict(float)  # (kind, dtype, output) -> error / bound

# ---------------------------------------------------------------- right


def ratio_of(problem, inputs, output, got):
    """Worst error / bound; at most 1 is right."""
    expected = expect(problem, inputs)
    verdict = judge(expected, output, got)
    if output == "dx" and problem.dtype in (DataType.FLOAT16, DataType.BFLOAT16):
        # backward_elemt stores the part with dy before it adds the part with x: one more rounding than one call has.
        m = problem.m
        dbias = expected.outputs["dbias"]
        first = inputs.scale * inputs.saved_inv_variance.astype(np.float64) * (inputs.dy.astype(np.float64) - dbias / m)
        (part,) = expected.parts("dx", got, (tiers(problem, "dx")[-1],))
        bound = part.classes[0][0] + 2 * precision(problem.dtype).u_out * np.abs(problem.alpha * first)
        return float(np.max(np.abs(got.astype(np.float64) - part.reference) / bound))
    assert verdict.status in (Status.PASS, Status.WARN, Status.FAIL), verdict
    return verdict.ratios[verdict.tier] if verdict.status != Status.FAIL else max(2.0, verdict.ratio)


def hold(kind, problem, inputs, output, got):
    ratio = ratio_of(problem, inputs, output, got)
    key = kind, problem.dtype.short, output
    worst[key] = max(worst[key], ratio)
    assert ratio <= 1, f"{output} over {kind}: error / bound {ratio}"


def same_on_all(results, name):
    first = results[0][name]
    for rank, other in enumerate(results):
        assert np.array_equal(other[name].view(np.uint8), first.view(np.uint8)), f"{name} of rank {rank} differs"
    return first


def shaped(problem, vector):
    return np.asarray(vector).reshape(problem.parameter_dims)


@table(("name", "order"), COMPUTED)
def test_forward_is_batch_norm_of_the_concatenation(ranks, name, order):
    kind, _, results = ranks
    if f"{name}, {order}" not in results[0]:
        pytest.skip("oneDNN has no such dtype on every processor")
    parts = [r[f"{name}, {order}"]["forward"] for r in results]
    problem = Problem.parse("train," + CASES[name][0])
    inputs = generate(problem)
    assert {p["total"] for p in parts} == {problem.m}
    hold(kind, problem, inputs, "y", np.concatenate([p["y"] for p in parts]))
    for output in ("saved_mean", "saved_inv_variance", "running_mean", "running_variance"):
        hold(kind, problem, inputs, output, shaped(problem, same_on_all(parts, output)))


@table(("name", "order"), COMPUTED)
def test_backward_is_that_of_the_concatenation(ranks, name, order):
    kind, size, results = ranks
    if f"{name}, {order}" not in results[0]:
        pytest.skip("oneDNN has no such dtype on every processor")
    parts = [r[f"{name}, {order}"]["backward"] for r in results]
    problem = Problem.parse("backward," + CASES[name][0])
    inputs = generate(problem)
    assert {p["total"] for p in parts} == {problem.m}
    hold(kind, problem, inputs, "dx", np.concatenate([p["dx"] for p in parts]))
    # Local sums: those of all ranks together are the sums of the whole.
    for output in ("dscale", "dbias"):
        total = sum(p[output].astype(np.float64) for p in parts)
        stored = reference.round_to(shaped(problem, total), parts[0][output].dtype)
        hold(kind, problem, inputs, output, stored)
    bounds = bounds_of(name, size)
    for rank, part in enumerate(parts):
        dy = inputs.dy[bounds[rank] : bounds[rank + 1]].astype(np.float64)
        axes = tuple(a for a, d in enumerate(problem.parameter_dims) if d == 1)
        local = dy.sum(axis=axes, keepdims=True)
        limit = 2.0**-20 * np.abs(dy).sum(axis=axes, keepdims=True)
        assert np.all(np.abs(shaped(problem, part["dbias"]) - local) <= limit), f"dbias of rank {rank} is not local"


@table("name", sync_worker.GRAPHS)
def test_a_graph_with_peer_stats_is_batch_norm_of_the_concatenation(ranks, name):
    kind, _, results = ranks
    for call in ("train", "backward"):
        problem = Problem.parse(f"{call}," + CASES[name][0])
        inputs = generate(problem)
        parts = [r[f"graph, {name}"][call] for r in results]
        whole, *others = (output for output in parts[0] if output not in ("alone", "refused", "plan"))
        hold(kind, problem, inputs, whole, np.concatenate([p[whole] for p in parts]))
        for output in others:
            if call == "train":
                got = same_on_all(parts, output)
            else:  # local sums
                got = sum(p[output].astype(np.float64) for p in parts).astype(parts[0][output].dtype)
            hold(kind, problem, inputs, output, shaped(problem, got))
        for part in parts:
            error, text, _ = part["alone"]
            assert (error, "peer_stats" in text, "set_communicator" in text) == ("ArgumentError", True, True)
            assert "handle" in part["refused"][1]
            assert "peer_stats" in part["refused"][1]
            assert part["plan"].split(": ")[1].split(", ")[-1] == ("forward" if call == "train" else "backward")


def test_without_optional_arrays_and_with_counts_that_change(ranks):
    _, _, results = ranks
    for step in range(3):
        for result in results:
            whole, start, rows, y, total = result["statistics only"][step]
            assert total == whole.shape[0] * whole.shape[2]
            right = reference.forward_training(whole, np.ones((1, 3, 1)), np.zeros((1, 3, 1))).y
            assert np.abs(y - right[start : start + rows]).max(initial=0) < 5e-6


def test_promised_counts_give_the_same_bits(ranks):
    _, _, results = ranks
    for result in results:
        for name in ("even", "empty"):
            for call in ("forward", "backward"):
                told, gathered = result["promised"][name][call], result[f"{name}, fixed order"][call]
                assert told["total"] == gathered["total"]
                for key, value in told.items():
                    assert np.array_equal(value, gathered[key]), (name, call, key)


# ---------------------------------------------------------------- the same every time


def arrays_of(results):
    """Every array of the scenarios in fixed order, by (scenario, call, name, rank)."""
    for rank, result in enumerate(results):
        for scenario, calls in result.items():
            if scenario.endswith("fixed order"):
                for call, values in calls.items():
                    for name, value in values.items():
                        yield (scenario, call, name, rank), np.asarray(value)


def assert_same_bits(one, other):
    left, right = dict(arrays_of(one)), dict(arrays_of(other))
    assert left
    for key in left.keys() & right.keys():
        assert left[key].tobytes() == right[key].tobytes(), key
    return len(left.keys() & right.keys())


def test_fixed_order_gives_the_same_bits_in_every_run(ranks, tmp_path):
    """In another launch: gloo's, whose processes are slow to start, in one over MPI where that is here."""
    kind, _, results = ranks
    other = "mpi4py" if kind == "gloo" and mpiexec() and importlib.util.find_spec("mpi4py") else kind
    names = [n for n in scenarios_of(kind) if n.endswith("fixed order")]
    assert assert_same_bits(results, launch(other, ranks_of(other), tmp_path, names)) > 50


# ---------------------------------------------------------------- mistakes


@table(
    ("case", "argument", "shown"),
    [
        ("channels", "channels", "rank 0: 4, rank 1: 5"),
        ("many channels", "channels", "rank 0: 10000, rank 1: 10001"),
        ("order of sizes", "channels", "rank 0: (6, 4), rank 1: (4, 6)"),
        ("dtype", "dtype", "rank 0: f32, rank 1: bf16"),
        ("deterministic", "deterministic", "rank 0: False, rank 1: True"),
        ("counts", "counts", "rank 0: #"),
        ("counts on one", "counts", "rank 0: None, rank 1: #"),
        ("backend", "handle", "rank 0: "),
    ],
)
def test_disagreement_is_an_error_on_every_rank(ranks, case, argument, shown):
    kind, _, results = ranks
    if case == "backend" and kind == "threads":
        pytest.skip("threads share the module that pretends")
    for result in results:
        name, text, _ = result["disagreements"][case]
        assert name == "ArgumentError"
        assert text.startswith(f"{argument}: got ")
        assert shown in text


@table(
    ("case", "error", "argument"),
    [
        ("bad channels", "ArgumentError", "channels"),
        ("bad handle", "ArgumentTypeError", "handle"),
        ("bad dtype", "ArgumentTypeError", "dtype"),
        ("bad counts", "ArgumentError", "counts"),
        ("bad axis", "ArgumentError", "axis"),
    ],
)
def test_a_bad_argument_on_one_rank_ends_the_constructor_on_all(ranks, case, error, argument):
    _, _, results = ranks
    for rank, result in enumerate(results):
        name, text, concerned = result["disagreements"][case]
        if rank == 1:
            assert name == error
            assert text.startswith(f"{argument}: got ")
        else:
            assert (name, concerned) == ("RankError", (1,))
            assert "refused on rank 1" in text


def test_agreement_is_possible_after_disagreement(ranks):
    _, size, results = ranks
    assert [r["disagreements"]["all the same"] for r in results] == [None] * size


FAILING = {
    "channels of x": "x: got dims (2, 4, 4)",
    "dtype of x": "x: got dtype f16",
    "shape of y": "y: got dims (1, 3, 4)",
    "y over x": "y: got ",
    "epsilon": "epsilon: got -1.0",
    "half a pair": "running_variance: got None",
    "workspace": "workspace: got 64 bytes",
    "shape of dx": "dx: got dims (1, 3, 4)",
    "no saved mean": "saved_mean: got None",
    "channels of backward's x": "x: got dims (2, 4, 4)",
}


@table("order", ORDERS)
@table("case", FAILING)
def test_a_call_that_fails_on_one_rank_fails_on_all_and_the_next_works(ranks, case, order):
    _, size, results = ranks
    culprit = size - 1
    for rank, result in enumerate(results):
        name, text, concerned = result["failing calls"][case, order]
        if rank == culprit:
            assert name.startswith(("ArgumentError", "ArgumentTypeError", "WorkspaceError"))
            assert text.startswith(FAILING[case])
        else:
            assert (name, concerned) == ("RankError", (culprit,))
            assert f"failed on rank {culprit}" in text
        assert result["failing calls"][case, order, "next"] == (None, None)


@table("order", ["any order", "fixed order"])
def test_forward_and_backward_at_once_are_noticed_where_both_gather(ranks, order):
    _, size, results = ranks
    for rank, result in enumerate(results):
        name, text, concerned = result["failing calls"]["another call", order]
        others = tuple(r for r in range(size) if (r == size - 1) != (rank == size - 1))
        assert (name, concerned) == ("RankError", others)
        assert f"rank {rank} called {'backward' if rank == size - 1 else 'forward'}" in text
        assert result["failing calls"]["another call", order, "next"] == (None, None)


def test_nothing_to_normalize_is_an_error_on_every_rank(ranks):
    _, _, results = ranks
    for result in results:
        found = result["nothing anywhere"]
        for call in ("forward", "backward"):
            assert found[call][0] == "ArgumentError"
            assert found[call][1].startswith("x: got no elements on any rank")
        assert found["running"][0] == "ArgumentError"
        assert "x: got 1 element on all ranks" in found["running"][1]
        assert found["no running"] is None


def test_a_broken_promise_of_counts(ranks):
    kind, _, results = ranks
    for rank, result in enumerate(results):
        first, y, checked, second, checked_again = result["broken promise"]
        if rank == 0:
            assert first[0] == "ArgumentError"
            assert first[1].startswith("x: got 12 elements per statistic, allowed: 8, as counts promised")
        elif kind in ("nccl", "cupy", "nccl4py"):  # nobody waits, so the call itself cannot know
            assert first is None
            assert np.isnan(y).all()
        else:
            assert (first[0], first[2]) == ("RankError", (0,))
        assert (checked[0], checked[2]) == ("RankError", (0,))
        assert second is None
        assert checked_again is None


def test_one_rank_is_refused(ranks):
    _, _, results = ranks
    for result in results:
        for case, (name, text, _) in result["alone"].items():
            assert name == ("ArgumentTypeError" if case == "no communicator" else "ArgumentError")
            assert text.startswith("communicator: got ")
        if "one rank" in result["alone"]:
            assert "2 ranks or more" in result["alone"]["one rank"][1]


# ---------------------------------------------------------------- what a call costs


@pytest.fixture
def over_threads(need_device):
    """Results of `work(communicator, handle)` on each of some threads."""
    need_device("onednn")
    return _over_threads


def _over_threads(work, size=4):
    shared = {"slots": [None] * size, "barrier": threading.Barrier(size)}
    results, errors = [None] * size, []

    def main(rank):
        try:
            with pybnorm.Handle("onednn") as handle:
                results[rank] = work(Threads(shared, rank), handle)
        except BaseException as error:
            errors.append(error)
            shared["barrier"].abort()

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


def test_the_running_variance_may_take_the_biased_variance(over_threads):
    x = np.random.default_rng(1).normal(2, 3, (4, 5, 6)).astype(np.float32)

    def work(communicator, handle):
        layer, mine = SyncBatchNorm(handle, communicator, 5), np.ascontiguousarray(x[communicator.rank :: 2])
        running = {"running_mean": np.full(5, 0.5, np.float32), "running_variance": np.full(5, 2.0, np.float32)}
        layer.forward(mine, None, None, np.empty_like(mine), **running, exponential_average_factor=0.25, unbiased=False)
        return running

    for running in over_threads(work, 2):
        batch = x.mean((0, 2), dtype=np.float64), x.var((0, 2), dtype=np.float64)
        for got, old, new in zip(running.values(), (0.5, 2.0), batch, strict=True):
            np.testing.assert_allclose(got, 0.75 * old + 0.25 * new, rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_one_collective_a_call_and_no_memory_after_the_constructor(over_threads, order):
    kind, deterministic = ORDERS[order]

    def work(communicator, handle):
        layer = kind(handle, communicator, 20, deterministic=deterministic)
        built = communicator.vectors, layer.nbytes
        setup = list(communicator.collectives)
        communicator.collectives.clear()
        for rows in (2, 3, 2):
            x = np.random.default_rng(rows).normal(size=(rows * (communicator.rank != 1), 20, 7)).astype(np.float32)
            y, dx = np.empty_like(x), np.empty_like(x)
            saved = {"saved_mean": np.zeros(20, np.float32), "saved_inv_variance": np.zeros(20, np.float32)}
            layer.forward(x, None, None, y, **saved)
            layer.backward(x, y, None, dx, **saved)
        return setup, communicator.collectives, built == (communicator.vectors, layer.nbytes)

    for setup, calls, kept in over_threads(work):
        assert [name for name, _ in setup] == ["all_gather"]
        length = 2 * 32 + 16  # mean and M2, padded to 64 bytes, and the header
        back = "all_reduce" if order == "all_reduce" else "all_gather"
        assert calls == [("all_gather", length), (back, length)] * 3
        assert kept


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_on_a_device_every_program_has_a_workspace_from_the_start(over_threads, monkeypatch, order, whole):
    """The caller's before the collective and for the last step; the object's own, made with it, for what merges."""

    class Aligned(Threads):  # as allocators of devices do
        def vector(self, values, device_type, stream):
            self.vectors += 1
            memory = np.empty(values.nbytes + 64, np.uint8)
            start = -memory.ctypes.data % 64
            vector = memory[start : start + values.nbytes].view(values.dtype)
            vector[:] = values
            return vector

    monkeypatch.setattr(sync.memory, "CPU", -1)  # where the handle has no workspace to lend
    if not whole:
        monkeypatch.setattr(sync.memory, "_WHOLE", 0)  # as if messages were too long to be read for their headers
    kind, deterministic = ORDERS[order]
    run, seen, names = operations.program.Prepared.execute, [], []

    def execute(prepared, handle, operation, addresses, workspace):
        seen.append((prepared.nbytes, workspace))
        names.append(operation)
        run(prepared, handle, operation, addresses, workspace)

    def work(communicator, handle):
        communicator = Aligned(communicator._shared, communicator.rank)
        layer = kind(handle, communicator, 64, deterministic=deterministic)
        built = communicator.vectors
        workspace = communicator.vector(np.zeros(1 << 16, np.uint8), 1, 0)
        for rows in (2, 3, 0):
            x = np.random.default_rng(rows).normal(size=(rows + communicator.rank, 64, 7)).astype(np.float32)
            saved = {"saved_mean": np.zeros(64, np.float32), "saved_inv_variance": np.zeros(64, np.float32)}
            layer.forward(x, None, None, np.empty_like(x), **saved, workspace=workspace)
            layer.backward(x, x.copy(), None, np.empty_like(x), **saved, workspace=workspace)
        return communicator.vectors - built

    monkeypatch.setattr(operations.program.Prepared, "execute", execute)
    assert over_threads(work) == [1] * 4  # no vector but the caller's workspace
    assert sum(nbytes > 0 for nbytes, _ in seen) >= 4 * 3 * (3 if order == "all_reduce" else 4)
    assert sum(name == "headers" for name in names) == (0 if whole else 4 * 3 * 2)
    assert all(workspace is not None for nbytes, workspace in seen if nbytes)


@pytest.mark.parametrize("dims", [(4, 6, 5), (2, 6, 2, 3, 2, 2, 2)])
def test_a_call_is_planned_once_and_works_wherever_arrays_are(over_threads, dims):
    """Also for arrays so full of gaps that they are copied in pieces."""

    def gaps(array):
        memory = np.full([d + 1 for d in array.shape], np.nan, np.float32)
        view = memory[tuple(slice(0, d) for d in array.shape)]
        view[...] = array
        return view

    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, dims[1])
        results, keep = [], []
        for seed in (0, 1, 0):
            x = np.random.default_rng(seed).normal(seed, 1, dims).astype(np.float32)
            dy, saved = x[::-1] * 2, [np.zeros(dims[1], np.float32) for _ in range(2)]
            named = {"saved_mean": saved[0], "saved_inv_variance": saved[1]}
            for lay in (gaps, np.copy):
                given = [lay(a) for a in (x, dy, np.zeros_like(x), np.zeros_like(x))]
                layer.forward(given[0], None, None, given[2], **named)
                layer.backward(given[0], given[1], None, given[3], **named)
                results.append((seed, given[2].copy(), given[3].copy()))
                keep.append((given, saved))  # the next arrays get other addresses
        return results, len(layer._plans)

    for results, plans in over_threads(work, 2):
        assert plans == 4  # forward and backward of two layouts
        for seed, y, dx in results:
            x = np.random.default_rng(seed).normal(seed, 1, dims).astype(np.float32)
            shape = (1, dims[1]) + (1,) * (len(dims) - 2)
            ones = np.ones(shape)
            assert np.abs(y - reference.forward_training(x, ones, 0 * ones).y).max() < 5e-6
            assert np.abs(dx - reference.backward(x, x[::-1] * 2, ones).dx).max() < 5e-6


@pytest.mark.parametrize("kind", [SyncBatchNorm, AllReduced])
@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_backward_of_another_number_of_elements_than_forward_had(over_threads, kind, beta):
    """It is computed before that number is known, unless dx is also read."""

    def batch(rows):
        return np.random.default_rng(rows).normal(2, 3, (3, 4 * rows, 5, 2)).astype(np.float32)

    def work(communicator, handle):
        layer, results = kind(handle, communicator, 5), []
        for rows in (2, 3, 3, 1):
            x, dy, dx = (np.ascontiguousarray(part[communicator.rank :: 4]) for part in batch(rows))
            small = np.ascontiguousarray(batch(2)[0][communicator.rank :: 4])
            layer.forward(small, None, None, np.empty_like(small))
            whole = batch(rows)[0].astype(np.float64)
            saved = {"saved_mean": whole.mean((0, 2)), "saved_inv_variance": (whole.var((0, 2)) + 1e-5) ** -0.5}
            saved = {name: value.astype(np.float32) for name, value in saved.items()}
            results.append((rows, layer.backward(x, dy, None, dx, beta=beta, **saved), dx))
        return results

    for rank, results in enumerate(over_threads(work)):
        for rows, total, dx in results:
            x, dy, old = (part.astype(np.float64) for part in batch(rows))
            right = reference.backward(x, dy, np.ones((1, 5, 1)), epsilon=1e-5).dx + beta * old
            assert total == 4 * rows * 2
            assert np.abs(dx - right[rank::4]).max() < 5e-6


def test_backward_computes_while_its_headers_are_read(over_threads, monkeypatch):
    """Where a communicator has a read that can be begun; forward needs them first."""
    run = operations.program.Prepared.execute
    here = threading.local()

    class Begins(Threads):
        def begin_read(self, vector, out, stream):
            here.events.append("begin")

            def end():
                here.events.append("end")
                self.read(vector, out, stream)

            return end

    def execute(prepared, handle, operation, addresses, workspace):
        here.events.append(prepared.calls[-1].split(" ")[0])
        run(prepared, handle, operation, addresses, workspace)

    def work(communicator, handle):
        here.events = []
        layer = SyncBatchNorm(handle, Begins(communicator._shared, communicator.rank), 5)
        x, saved = np.ones((3, 5, 4), np.float32), [np.ones(5, np.float32) for _ in range(2)]
        saved = dict(zip(("saved_mean", "saved_inv_variance"), saved, strict=True))
        for _ in range(2):
            here.events.clear()
            layer.forward(x, None, None, x.copy(), **saved)
            forward, here.events = here.events, []
            layer.backward(x, x, None, x.copy(), **saved)
        return forward, here.events

    monkeypatch.setattr(operations.program.Prepared, "execute", execute)
    for forward, backward in over_threads(work, 2):
        assert forward[:3] == ["forward_training", "begin", "end"]
        assert backward[-4:] == ["begin", "backward", "forward_inference", "end"]


def test_an_output_over_what_is_read_after_it_is_refused_on_all_ranks(over_threads):
    """Statistics are written before scale is read, dscale before dx is computed."""

    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, 3)
        x, scale, other = np.ones((2, 3, 4), np.float32), np.ones(3, np.float32), np.ones(3, np.float32)
        last = communicator.rank == 1
        running = {"running_mean": scale if last else other.copy(), "running_variance": other.copy()}
        saved = {"saved_mean": np.zeros(3, np.float32), "saved_inv_variance": np.ones(3, np.float32)}
        outcomes = [
            sync_worker.attempt(layer.forward, x, scale, None, np.empty_like(x), **running),
            sync_worker.attempt(layer.backward, x, x, scale, np.empty_like(x), scale if last else other, **saved),
        ]
        assert np.all(scale == 1)
        return outcomes

    first, second = over_threads(work, 2)
    assert [outcome[0] for outcome in first] == ["RankError"] * 2
    assert [outcome[1][:15] for outcome in second] == ["running_mean: g", "dscale: got mem"]


def test_the_memory_goes_with_the_object(over_threads):
    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, 3)
        x = np.ones((2, 3, 4), np.float32)
        saved = {"saved_mean": np.zeros(3, np.float32), "saved_inv_variance": np.zeros(3, np.float32)}
        layer.forward(x, None, None, np.empty_like(x), **saved)
        layer.backward(x, x.copy(), None, np.empty_like(x), **saved)
        watched = weakref.ref(layer)
        del layer
        return watched() is None

    gc.disable()
    try:
        assert over_threads(work, 2) == [True, True]
    finally:
        gc.enable()


def test_counts_beyond_float32_survive_the_message():
    for number in (0, 1, 4095, 4096, 2**24 + 1, 2**31 - 1, 2**36 - 1):
        digits = np.array(messages._digits(number), np.float32)
        assert messages._number(digits) == number
        assert messages._number(sum(digits for _ in range(4096))) == 4096 * number


def test_workspace_size_is_asked_by_call(over_threads):
    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, 3)
        x = np.zeros((2, 3, 4), np.float32)
        sizes = layer.workspace_size("forward", x, None, None, x.copy())
        with pytest.raises(ArgumentError, match="call: got inference"):
            layer.workspace_size("inference", x, None, None, x.copy())
        layer.check()  # before any call there is nothing to raise
        return sizes

    assert all(size > 0 for size in over_threads(work, 2))


def test_an_object_that_only_looks_like_a_communicator_is_refused(need_device):
    need_device("onednn")

    class Almost:
        rank, size, devices = 0, 2, (1,)

        def all_gather(self):
            pass

    with pybnorm.Handle("onednn") as handle, pytest.raises(ArgumentTypeError, match="communicator: got"):
        SyncBatchNorm(handle, Almost(), 3)


def test_a_communicator_for_other_memory_is_refused_on_every_rank(over_threads):
    def work(communicator, handle):
        communicator.devices = (1,) if communicator.rank else (2,)
        with pytest.raises((ArgumentError, sync.RankError)) as caught:
            SyncBatchNorm(handle, communicator, 3)
        return str(caught.value)

    first, *others = over_threads(work)
    assert first.startswith(
        "communicator: got one for memory of DLPack device type 2, allowed: one for memory of type 1"
    )
    assert all("refused on rank 0" in text for text in others)


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_that_fails_in_the_vendor_ends_the_call_on_all(over_threads, monkeypatch, order):
    kind, deterministic = ORDERS[order]
    broken = pybnorm.ExecutionError(backend="onednn", function="f", status=6, status_name="RUNTIME")
    whole = operations.program.Prepared.execute
    here = threading.local()

    def execute(prepared, handle, operation, addresses, workspace):
        if operation == getattr(here, "fails", None):
            raise broken
        whole(prepared, handle, operation, addresses, workspace)

    monkeypatch.setattr(operations.program.Prepared, "execute", execute)

    def work(communicator, handle):
        layer = kind(handle, communicator, 3, deterministic=deterministic)
        x, mean, inv = np.ones((2, 3, 4), np.float32), np.zeros(3, np.float32), np.ones(3, np.float32)
        outcomes = []
        for operation in ("forward", "backward", None):
            here.fails = operation if communicator.rank == 2 else None
            outcomes.append(sync_worker.attempt(layer.forward, x, None, None, np.empty_like(x)))
            saved = {"saved_mean": mean, "saved_inv_variance": inv}
            outcomes.append(sync_worker.attempt(layer.backward, x, x.copy(), None, np.empty_like(x), **saved))
        return [outcome and outcome[0] for outcome in outcomes]

    for rank, outcomes in enumerate(over_threads(work)):
        error = "ExecutionError" if rank == 2 else "RankError"
        assert outcomes == [error, None, None, error, None, None]


# ---------------------------------------------------------------- adapters whose communicators need a GPU


def test_nccl4py_has_the_calls_that_the_adapter_makes():
    """Signatures of the real package; that they compute is shown where two GPUs are."""
    nccl = pytest.importorskip("nccl", reason="nccl4py is not installed") if not required("nccl4py") else None
    try:
        import nccl.core as nccl
    except ImportError as error:
        absent("nccl4py", f"nccl4py cannot be imported: {error}")
    communicator = nccl.Communicator
    assert list(inspect.signature(communicator.allgather).parameters)[:4] == ["self", "sendbuf", "recvbuf", "stream"]
    assert list(inspect.signature(communicator.allreduce).parameters)[:5] == [
        "self",
        "sendbuf",
        "recvbuf",
        "op",
        "stream",
    ]
    for name in ("rank", "nranks", "device"):
        assert isinstance(inspect.getattr_static(communicator, name), property)
    assert hasattr(nccl, "SUM")
    assert communicator.__module__.startswith("nccl.")


class Streams:
    """Of ``torch`` what the adapter asks of a GPU: its streams, and a memory whose copies end at an event."""

    def __init__(self):
        self.current, self.made, self.log = {0: 0, 1: 0}, [], []
        self.cuda = self._C = self
        self._cuda_getCurrentRawStream = self.current.__getitem__

    def ExternalStream(self, address, device):
        self.made.append((address, device))
        return address, device

    def default_stream(self, device):
        return self.ExternalStream(0, device)

    @contextlib.contextmanager
    def stream(self, made):
        address, device = made
        before, self.current[device] = self.current[device], address
        yield
        self.current[device] = before

    def Event(self):
        return types.SimpleNamespace(
            record=lambda stream: self.log.append(("record", stream)), synchronize=lambda: self.log.append(("wait",))
        )

    def empty(self, shape, dtype, pin_memory):
        assert pin_memory
        values = np.full(shape, np.nan, dtype)

        def copy_(vector, non_blocking):
            assert non_blocking
            self.log.append(("copy", self.current[vector.get_device()]))
            values[:] = vector.values

        return types.SimpleNamespace(numpy=lambda: values, copy_=copy_)


def adapter_over(torch):
    made = object.__new__(sync.communicators._Torch)
    made._torch, made._current, made._kept = torch, torch._cuda_getCurrentRawStream, (-1, -1, None)
    made._pinned, made._copied = {}, None
    return made


def test_pytorchs_stream_is_changed_only_where_another_one_is_current():
    torch = Streams()
    adapter = adapter_over(torch)
    for stream, place, current, made in (
        (0, 0, 0, []),
        (7, 1, 0, [(7, 1)]),
        (7, 1, 0, []),
        (7, 0, 0, [(7, 0)]),
        (7, 1, 7, []),
        (0, 1, 7, [(0, 1)]),
    ):
        torch.made.clear()
        torch.current[place] = current
        with adapter._on(stream, place):
            assert torch.current[place] == stream
        assert torch.current[place] == current
        assert torch.made == made
    assert adapter._on(5, -1) is sync.communicators._NOTHING  # the CPU
    adapter._current = None  # a PyTorch that cannot be asked
    with adapter._on(9, 0):
        assert torch.current[0] == 9


def test_a_read_from_a_gpu_goes_over_pinned_memory_and_waits_once():
    torch, out = Streams(), np.zeros(3)
    adapter = adapter_over(torch)

    def vector(*values):
        told = np.array(values)
        return types.SimpleNamespace(
            get_device=lambda: 0, numel=lambda: told.size, shape=told.shape, dtype=told.dtype, values=told
        )

    for values in ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)):
        torch.log.clear()
        end = adapter.begin_read(vector(*values), out, 7)
        assert torch.log == [("copy", 7), ("record", (7, 0))]
        assert tuple(out) != values
        end()
        assert torch.log[2:] == [("wait",)]
        assert tuple(out) == values
    assert len(adapter._pinned) == 1


def test_scenarios_cover_every_case():
    assert {n.partition(",")[0] for n in sync_worker.SCENARIOS if n.endswith("order")} == set(CASES)


def test_a_call_is_few_calls_of_the_library(over_threads, monkeypatch):
    """Each tensor is read and written as seldom as the library's operations allow, and the small steps are few."""
    whole, seen = operations.program.Prepared.execute, []

    def execute(prepared, handle, operation, addresses, workspace):
        seen.append((operation, prepared.calls, prepared.copies, prepared.nbytes))
        whole(prepared, handle, operation, addresses, workspace)

    def work(communicator, handle):
        rank = communicator.rank
        rows = 3 if rank < 2 else 2 + rank  # of 2 ranks even counts, of 4 uneven ones
        for layout in ((0, 1, 2, 3), (0, 3, 1, 2)):
            x = np.random.default_rng(rank).normal(size=(rows, 7, 15, 16)).astype(np.float32)
            x = np.ascontiguousarray(x.transpose(np.argsort(layout))).transpose(layout)
            vectors = [np.ones(x.shape[1], np.float32) for _ in range(8)]
            scale, bias, mean, variance, dscale, dbias, *own = vectors
            saved = dict(zip(("saved_mean", "saved_inv_variance"), own, strict=True))
            layer = SyncBatchNorm(handle, communicator, x.shape[1])
            for step in range(2):  # the first learns the counts
                if step and not rank:
                    seen.clear()
                communicator.all_gather(np.zeros(1, np.float32), np.zeros(communicator.size, np.float32), 0)
                y, dx = np.empty_like(x), np.empty_like(x)
                running = {"running_mean": mean, "running_variance": variance}
                layer.forward(x, scale, bias, y, **running, **saved)
                layer.backward(x, x, scale, dx, dscale, dbias, **saved)
                communicator.all_gather(np.zeros(1, np.float32), np.zeros(communicator.size, np.float32), 0)
            if not rank:
                found.append(list(seen))
            communicator.all_gather(np.zeros(1, np.float32), np.zeros(communicator.size, np.float32), 0)

    monkeypatch.setattr(operations.program.Prepared, "execute", execute)
    for size, most in ((2, {"forward": 11, "backward": 10}), (4, {"forward": 21, "backward": 10})):
        found = []
        over_threads(work, size)
        assert len(found) == 2
        for steps in found:
            for operation, number in most.items():
                calls = [c for name, made, _, _ in steps if name == operation for c in made]
                assert len(calls) <= number * size, (operation, calls)
                sizes = [np.prod([int(d) for d in c[c.index("(") + 1 : c.index(")")].split(",") if d]) for c in calls]
                data = [c for c, n in zip(calls, sizes, strict=True) if n >= 3 * 7 * 15 * 16]
                assert len(data) == (2 if operation == "forward" else 3) * size, data
            assert not any(copies for _, _, copies, _ in steps)
            # Backward's workspace is for oneDNN's own blend.
            assert max(n for name, _, _, n in steps if name == "forward") < 3 * 7 * 15 * 16 * 4


def test_more_elements_than_a_count_has_digits_for_are_refused():
    """Arrays of so many are made of one element, with strides of 0."""
    most = messages._BASE**messages._DIGITS
    terms = _Terms((2,), DataType.FLOAT32, 1, None)

    def examined(count):
        array = np.broadcast_to(np.float32(1), (count, 2))
        return terms.examine(as_buffer(array, "x"))

    assert examined(most - 1) == (most - 1, (1, 2))
    with pytest.raises(ArgumentError, match=rf"^x: got {most} elements per statistic, allowed: fewer than {most}$"):
        examined(most)
