"""Batch norm over ranks is batch norm of what they have together, and no mistake of one rank leaves the others hanging.

The ranks' results come from one launch for each kind of communicator (see sync_launch); here they are judged.
"""

import gc
import inspect
import threading
import unittest.mock
import weakref

import numpy as np
import pytest
import sync_worker
from sync_launch import GPU_KINDS, KINDS, absent, launch, over_threads, ranks_of
from sync_worker import COMPUTED, ORDERS, AllReduced, Threads, case_of, rows_of
from tables import table

import pybnorm
from pybnorm import ArgumentError, operations, reference, sync
from pybnorm._arrays import as_buffer
from pybnorm.check.judging.bounds import Status, expect, judge, precision, tiers
from pybnorm.enums import DataType
from pybnorm.sync import SyncBatchNorm, messages
from pybnorm.sync.plans import _Terms


@pytest.fixture(scope="session", params=KINDS)
def ranks(request, tmp_path_factory, need_device):
    """Results by rank of one launch with every scenario."""
    kind = request.param
    size = ranks_of(kind)
    need_device("cudnn" if kind in GPU_KINDS else "onednn")
    return launch(kind, size, tmp_path_factory.mktemp(kind))


# ---------------------------------------------------------------- what all ranks have together


def judged(problem, inputs, output, got):
    expected = expect(problem, inputs)
    verdict = judge(expected, output, got)
    if output == "dx" and problem.dtype in (DataType.FLOAT16, DataType.BFLOAT16):
        # backward_elemt stores the part with dy before it adds the part with x: one more rounding than one call has.
        dy = inputs.dy.astype(np.float64) - expected.outputs["dbias"] / problem.m
        first = problem.alpha * inputs.scale * inputs.saved_inv_variance.astype(np.float64) * dy
        (part,) = expected.parts("dx", got, (tiers(problem, "dx")[-1],))
        bound = part.classes[0][0] + 2 * precision(problem.dtype).u_out * np.abs(first)
        assert np.all(np.abs(got.astype(np.float64) - part.reference) <= bound)
    else:
        assert verdict.status in (Status.PASS, Status.WARN), verdict


def judge_together(call, name, results):
    """One call of all ranks."""
    problem, inputs = case_of(call, name)
    for output in results[0]:
        parts = [result[output] for result in results]
        if output in ("y", "dx"):
            got = np.concatenate(parts)
        elif call == "train":
            got = parts[0].reshape(problem.parameter_dims)
            assert len({part.tobytes() for part in parts}) == 1, f"{output} differs between ranks"
        else:  # local sums: those of all ranks together are the sums of the whole
            total = sum(part.astype(np.float64) for part in parts)
            got = reference.round_to(total.reshape(problem.parameter_dims), parts[0].dtype)
        judged(problem, inputs, output, got)


@table(("name", "order"), COMPUTED)
def test_a_call_is_that_of_the_concatenation(ranks, name, order):
    if f"{name}, {order}" not in ranks[0]:
        pytest.skip("oneDNN has no such dtype on every processor")
    for call in ("train", "backward"):
        judge_together(call, name, [result[f"{name}, {order}"][call] for result in ranks])
    problem, inputs = case_of("backward", name)
    axes = tuple(a for a, d in enumerate(problem.parameter_dims) if d == 1)
    for rank, result in enumerate(ranks):
        dy = inputs.dy[rows_of(name, len(ranks), rank)].astype(np.float64)
        dbias = result[f"{name}, {order}"]["backward"]["dbias"].reshape(problem.parameter_dims)
        limit = 2.0**-20 * np.abs(dy).sum(axis=axes, keepdims=True)
        assert np.all(np.abs(dbias - dy.sum(axis=axes, keepdims=True)) <= limit), f"dbias of rank {rank} is not local"


@table("name", sync_worker.GRAPHS)
def test_a_graph_with_peer_stats_is_batch_norm_of_the_concatenation(ranks, name):
    for call in ("train", "backward"):
        judge_together(call, name, [result[f"graph, {name}"][call] for result in ranks])


def test_fixed_order_and_promised_counts_give_the_same_bits(ranks):
    for result in ranks:
        for name, calls in result["again"].items():
            for call, outputs in calls.items():
                first = result[f"{name}, fixed order"][call]
                assert {n: a.tobytes() for n, a in outputs.items()} == {n: a.tobytes() for n, a in first.items()}, name


def test_each_mistake_is_told_on_every_rank_and_the_next_call_works(ranks):
    assert [result["wrong"] for result in ranks] == [[]] * len(ranks)


# ---------------------------------------------------------------- what a call costs


@pytest.fixture
def each(need_device):
    """Results of `work(communicator, handle)` on each of some threads."""
    need_device("onednn")

    def run(work, size=4):
        def with_handle(communicator):
            with pybnorm.Handle("onednn") as handle:
                return work(communicator, handle)

        return over_threads(with_handle, size)

    return run


@pytest.fixture
def before(monkeypatch):
    """Has a function called with each program, its operation and workspace before it runs."""
    execute = operations.program.Prepared.execute

    def use(note):
        def noted(program, handle, operation, addresses, workspace):
            note(program, operation, workspace)
            execute(program, handle, operation, addresses, workspace)

        monkeypatch.setattr(operations.program.Prepared, "execute", noted)

    return use


def saved(channels):
    """What forward writes for backward."""
    return {"saved_mean": np.zeros(channels, np.float32), "saved_inv_variance": np.ones(channels, np.float32)}


def step(layer, x, dy=None, **options):
    """y and dx of a forward and a backward."""
    y, dx, kept = np.empty_like(x), np.zeros_like(x), saved(x.shape[1])
    layer.forward(x, None, None, y, **kept, **options)
    layer.backward(x, x if dy is None else dy, None, dx, **kept, **options)
    return y, dx


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(seed, 1.5, shape).astype(np.float32)


def test_the_running_variance_may_take_the_biased_variance(each):
    x = normal(2, 4, 5, 6)

    def work(communicator, handle):
        layer, mine = SyncBatchNorm(handle, communicator, 5), np.ascontiguousarray(x[communicator.rank :: 2])
        running = {"running_mean": np.full(5, 0.5, np.float32), "running_variance": np.full(5, 2.0, np.float32)}
        layer.forward(mine, None, None, np.empty_like(mine), **running, exponential_average_factor=0.25, unbiased=False)
        return running.values()

    for mean, variance in each(work, 2):
        np.testing.assert_allclose(mean, 0.75 * 0.5 + 0.25 * x.mean((0, 2), dtype=np.float64), rtol=1e-6)
        np.testing.assert_allclose(variance, 0.75 * 2 + 0.25 * x.var((0, 2), dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_one_collective_a_call_and_no_memory_after_the_constructor(each, order):
    kind, deterministic = ORDERS[order]

    def work(communicator, handle):
        layer = kind(handle, communicator, 20, deterministic=deterministic)
        built = communicator.vectors, layer.nbytes
        for rows in (2, 3, 2):
            step(layer, normal(rows, rows * (communicator.rank != 1), 20, 7))
        return communicator.collectives, built == (communicator.vectors, layer.nbytes)

    for calls, kept in each(work):
        length = 2 * 32 + 16  # mean and M2, padded to 64 bytes, and the header
        back = "all_reduce" if order == "all_reduce" else "all_gather"
        assert calls[0][0] == "all_gather"  # of the constructor
        assert calls[1:] == [("all_gather", length), (back, length)] * 3
        assert kept


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_on_a_device_every_program_has_a_workspace_from_the_start(each, before, monkeypatch, order, whole):
    """The caller's before the collective and for the last step; the object's own, made with it, for what merges."""

    monkeypatch.setattr(sync.memory, "CPU", -1)  # where the handle has no workspace to lend
    if not whole:
        monkeypatch.setattr(sync.memory, "_WHOLE", 0)  # as if messages were too long to be read for their headers
    kind, deterministic = ORDERS[order]
    seen = []
    before(lambda program, operation, workspace: seen.append((operation, program.nbytes, workspace)))

    def work(communicator, handle):
        layer = kind(handle, communicator, 64, deterministic=deterministic)
        built = communicator.vectors
        workspace = communicator.vector(np.zeros(1 << 16, np.uint8), 1, 0)
        for rows in (2, 3, 0):
            step(layer, normal(rows, rows + communicator.rank, 64, 7), workspace=workspace)
        return communicator.vectors - built

    assert each(work) == [1] * 4  # no vector but the caller's workspace
    assert sum(nbytes > 0 for _, nbytes, _ in seen) >= 4 * 3 * (3 if order == "all_reduce" else 4)
    assert sum(name == "headers" for name, *_ in seen) == (0 if whole else 4 * 3 * 2)
    assert all(workspace is not None for _, nbytes, workspace in seen if nbytes)


@pytest.mark.parametrize("dims", [(4, 6, 5), (2, 6, 2, 3, 2, 2, 2)])
def test_a_call_is_planned_once_and_works_wherever_arrays_are(each, dims):
    """Also for arrays so full of gaps that they are copied in pieces."""

    def gaps(array):
        memory = np.full([d + 1 for d in array.shape], np.nan, np.float32)
        view = memory[tuple(slice(0, d) for d in array.shape)]
        view[...] = array
        return view

    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, dims[1])
        results = []
        for seed in (0, 1, 0):
            x = normal(seed, *dims)
            for lay in (gaps, np.copy):
                out, kept = [lay(np.zeros_like(x)) for _ in range(2)], saved(dims[1])
                given = lay(x), lay(x[::-1] * 2)
                layer.forward(given[0], None, None, out[0], **kept)
                layer.backward(*given, None, out[1], **kept)
                results.append((x, out, given, kept))  # the next arrays get other addresses
        return results, len(layer._plans)

    for results, plans in each(work, 2):
        assert plans == 4  # forward and backward of two layouts
        for x, (y, dx), *_ in results:
            ones = np.ones((1, dims[1]) + (1,) * (len(dims) - 2))
            assert np.abs(y - reference.forward_training(x, ones, 0 * ones).y).max() < 5e-6
            assert np.abs(dx - reference.backward(x, x[::-1] * 2, ones).dx).max() < 5e-6


@pytest.mark.parametrize("kind", [SyncBatchNorm, AllReduced])
@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_backward_of_another_number_of_elements_than_forward_had(each, kind, beta):
    """It is computed before that number is known, unless dx is also read."""

    def work(communicator, handle):
        layer, mine, results = kind(handle, communicator, 5), slice(communicator.rank, None, 4), []
        for rows in (2, 3, 3, 1):
            small = np.ascontiguousarray(normal(2, 8, 5, 2)[mine])
            layer.forward(small, None, None, np.empty_like(small))
            x, dy, old = (normal(seed, 4 * rows, 5, 2) for seed in (1, 2, 3))
            kept = {"saved_mean": x.mean((0, 2)), "saved_inv_variance": (x.var((0, 2)) + np.float32(1e-5)) ** -0.5}
            wide = x.astype(np.float64), dy.astype(np.float64)
            right = reference.backward(*wide, np.ones((1, 5, 1)), epsilon=1e-5).dx + beta * old
            dx = np.ascontiguousarray(old[mine])
            total = layer.backward(*map(np.ascontiguousarray, (x[mine], dy[mine])), None, dx, beta=beta, **kept)
            results.append((total - 8 * rows, np.abs(dx - right[mine]).max()))
        return results

    assert all(more == 0 and error < 5e-6 for results in each(work) for more, error in results)


def test_backward_computes_while_its_headers_are_read(each, before):
    """Where a communicator has a read that can be begun; forward needs them first."""
    here = threading.local()

    class Begins(Threads):
        def begin_read(self, vector, out, stream):
            here.events.append("begin")
            return lambda: here.events.append("end") or self.read(vector, out, stream)

    def work(communicator, handle):
        here.events = []
        layer = SyncBatchNorm(handle, Begins(communicator._shared, communicator.rank), 5)
        for _ in range(2):
            here.events.clear()
            step(layer, np.ones((3, 5, 4), np.float32))
        return here.events

    before(lambda program, operation, workspace: here.events.append(program.calls[-1].split(" ")[0]))
    for events in each(work, 2):
        assert events[:3] == ["forward_training", "begin", "end"]
        assert events[-4:] == ["begin", "backward", "forward_inference", "end"]


def test_an_output_over_what_is_read_after_it_is_refused_on_all_ranks(each):
    """Statistics are written before scale is read, dscale before dx is computed."""

    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, 3)
        x, scale, other = np.ones((2, 3, 4), np.float32), np.ones(3, np.float32), np.ones(3, np.float32)
        over = scale if communicator.rank == 1 else other
        running = {"running_mean": over, "running_variance": other.copy()}
        outcomes = [
            sync_worker.attempt(layer.forward, x, scale, None, np.empty_like(x), **running),
            sync_worker.attempt(layer.backward, x, x, scale, np.empty_like(x), over, **saved(3)),
        ]
        assert np.all(scale == 1)
        return [f"{name} {text}" for name, text, _ in outcomes]

    first, second = each(work, 2)
    assert [text.split()[0] for text in first] == ["RankError"] * 2
    assert [text.split()[1] for text in second] == ["running_mean:", "dscale:"]


def test_the_memory_goes_with_the_object(each):
    def work(communicator, handle):
        layer = SyncBatchNorm(handle, communicator, 3)
        step(layer, np.ones((2, 3, 4), np.float32))
        watched = weakref.ref(layer)
        del layer
        return watched() is None

    gc.disable()
    try:
        assert each(work, 2) == [True, True]
    finally:
        gc.enable()


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_that_fails_in_the_vendor_ends_the_call_on_all(each, before, order):
    kind, deterministic = ORDERS[order]
    here = threading.local()

    def fail(program, operation, workspace):
        if operation == getattr(here, "fails", None):
            raise pybnorm.ExecutionError(backend="onednn", function="f", status=6, status_name="RUNTIME")

    def work(communicator, handle):
        layer = kind(handle, communicator, 3, deterministic=deterministic)
        x, outcomes = np.ones((2, 3, 4), np.float32), []
        for here.fails in ("forward", "backward", None):
            here.fails = here.fails if communicator.rank == 2 else None
            outcomes.append(sync_worker.attempt(layer.forward, x, None, None, np.empty_like(x)))
            outcomes.append(sync_worker.attempt(layer.backward, x, x.copy(), None, np.empty_like(x), **saved(3)))
        return [outcome and outcome[0] for outcome in outcomes]

    before(fail)
    for rank, outcomes in enumerate(each(work)):
        error = "ExecutionError" if rank == 2 else "RankError"
        assert outcomes == [error, None, None, error, None, None]


def test_a_call_is_few_calls_of_the_library(each, before):
    """Each tensor is read and written as seldom as the library's operations allow, and the small steps are few."""
    seen = []
    before(lambda program, operation, workspace: seen.append((operation, program)))

    def work(communicator, handle):
        def meet():
            communicator.all_gather(np.zeros(1, np.float32), np.zeros(communicator.size, np.float32), 0)

        rank = communicator.rank
        rows = 3 if rank < 2 else 2 + rank  # of 2 ranks even counts, of 4 uneven ones
        for layout in ((0, 1, 2, 3), (0, 3, 1, 2)):
            x = normal(rank, rows, 7, 15, 16).transpose(np.argsort(layout))
            x = np.ascontiguousarray(x).transpose(layout)
            scale, bias, mean, variance, dscale, dbias = (np.ones(x.shape[1], np.float32) for _ in range(6))
            layer, kept = SyncBatchNorm(handle, communicator, x.shape[1]), saved(x.shape[1])
            for _ in range(2):  # the first learns the counts
                meet()
                if not rank:
                    seen.clear()
                meet()
                y = np.empty_like(x)
                layer.forward(x, scale, bias, y, running_mean=mean, running_variance=variance, **kept)
                layer.backward(x, x, scale, y, dscale, dbias, **kept)
                meet()
            if not rank:
                found.append(list(seen))
            meet()

    for size, most in ((2, {"forward": 11, "backward": 10}), (4, {"forward": 21, "backward": 10})):
        found = []
        each(work, size)
        assert len(found) == 2
        for steps in found:
            for operation, number in most.items():
                calls = [c for name, program in steps if name == operation for c in program.calls]
                assert len(calls) <= number * size, (operation, calls)
                sizes = [np.prod([int(d) for d in c[c.index("(") + 1 : c.index(")")].split(",") if d]) for c in calls]
                data = [c for c, n in zip(calls, sizes, strict=True) if n >= 3 * 7 * 15 * 16]
                assert len(data) == (2 if operation == "forward" else 3) * size, data
            assert not any(program.copies for _, program in steps)
            # Backward's workspace is for oneDNN's own blend.
            assert max(program.nbytes for name, program in steps if name == "forward") < 3 * 7 * 15 * 16 * 4


def test_counts_beyond_float32_survive_the_message_and_more_than_its_digits_are_refused():
    """Arrays of so many are made of one element, with strides of 0."""
    most = messages._BASE**messages._DIGITS
    for number in (0, 1, 4095, 4096, 2**24 + 1, 2**31 - 1, most - 1):
        digits = np.array(messages._digits(number), np.float32)
        assert messages._number(digits) == number
        assert messages._number(sum(digits for _ in range(4096))) == 4096 * number

    def examined(count):
        array = np.broadcast_to(np.float32(1), (count, 2))
        return _Terms((2,), DataType.FLOAT32, 1, None).examine(as_buffer(array, "x"))

    assert examined(most - 1) == (most - 1, (1, 2))
    with pytest.raises(ArgumentError, match=rf"^x: got {most} elements per statistic, allowed: fewer than {most}$"):
        examined(most)


# ---------------------------------------------------------------- adapters whose communicators need a GPU


def test_nccl4py_has_the_calls_that_the_adapter_makes():
    """Signatures of the real package; that they compute is shown where two GPUs are."""
    try:
        import nccl.core as nccl
    except ImportError as error:
        absent("nccl4py", f"nccl4py cannot be imported: {error}")
    for name, right in (("allgather", "sendbuf recvbuf stream"), ("allreduce", "sendbuf recvbuf op stream")):
        found = list(inspect.signature(getattr(nccl.Communicator, name)).parameters)
        assert found[1 : 2 + right.count(" ")] == right.split()
    for name in ("rank", "nranks", "device"):
        assert isinstance(inspect.getattr_static(nccl.Communicator, name), property)
    assert hasattr(nccl, "SUM")
    assert nccl.Communicator.__module__.startswith("nccl.")


@pytest.fixture
def adapter():
    """Over a double of ``torch`` on GPUs whose current stream is 0."""
    made = object.__new__(sync.communicators._Torch)
    made._torch, made._current, made._kept = unittest.mock.MagicMock(), lambda place: 0, (-1, -1, None)
    made._pinned, made._copied = {}, None
    return made


def test_pytorchs_stream_is_changed_only_where_another_one_is_current(adapter):
    cuda, call, nothing = adapter._torch.cuda, unittest.mock.call, sync.communicators._NOTHING
    assert adapter._on(5, -1) is nothing  # the CPU
    for stream, place, current, made in (
        (0, 0, 0, []),
        (7, 1, 0, [call.ExternalStream(7, device=1)]),
        (7, 1, 0, []),
        (7, 0, 0, [call.ExternalStream(7, device=0)]),
        (7, 1, 7, []),
        (0, 1, 7, [call.default_stream(1)]),
        (9, 0, None, [call.ExternalStream(9, device=0)]),  # of a PyTorch that cannot be asked
    ):
        cuda.reset_mock()
        adapter._current = None if current is None else {place: current}.get
        used = adapter._on(stream, place)
        assert (used is nothing) == (stream == current)
        assert cuda.mock_calls == made + ([] if used is nothing else [call.stream(adapter._kept[2])])


def test_a_read_from_a_gpu_goes_over_pinned_memory_and_waits_once(adapter):
    torch, out, values = adapter._torch, np.zeros(3), np.zeros(3)
    torch.empty.return_value.numpy.return_value = values
    for first in (1.0, 4.0):
        torch.reset_mock()
        vector = unittest.mock.MagicMock(dtype="f32")
        vector.get_device.return_value, vector.numel.return_value = 0, 3
        end = adapter.begin_read(vector, out, 7)
        queued = [name for name, *_ in torch.mock_calls]
        assert queued[-4:] == [
            "cuda.stream().__enter__", "empty().copy_", "cuda.Event().record", "cuda.stream().__exit__",
        ]  # fmt: skip
        torch.empty.return_value.copy_.assert_called_once_with(vector, non_blocking=True)
        torch.cuda.Event.return_value.record.assert_called_once_with(adapter._kept[2])
        values[:] = first + np.arange(3)  # the copy ends
        assert out[0] != first
        end()
        assert [name for name, *_ in torch.mock_calls[len(queued) :]] == ["cuda.Event().synchronize"]
        assert out.tolist() == values.tolist()
    assert len(adapter._pinned) == 1
