"""``pybnorm.torch.SyncBatchNorm`` on some ranks is PyTorch's batch norm of the whole batch in one process.

PYBNORM_REQUIRE_SECOND_DEVICE=1: on this runner fewer than 2 GPUs are a failure.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SECONDS = 280


@pytest.fixture(scope="module")
def ranks(torch, ours):
    """The module that each rank runs."""
    assert ours
    return pytest.importorskip("ranks")


def absent(reason):
    """Skip, or fail where a second device is required."""
    if os.environ.get("PYBNORM_REQUIRE_SECOND_DEVICE"):
        pytest.fail(f"PYBNORM_REQUIRE_SECOND_DEVICE is set but: {reason}")
    pytest.skip(reason)


def size_of(torch, backend):
    """The number of ranks over a backend of ``torch.distributed``, or a skip."""
    there = torch.distributed.is_available()
    if backend == "gloo":
        if not (there and torch.distributed.is_gloo_available()):
            pytest.skip("this PyTorch has no gloo")
        return 3
    if not (there and torch.distributed.is_nccl_available()):
        absent("this PyTorch has no NCCL")
    devices = torch.cuda.device_count()
    if devices < 2:
        absent(f"ranks over NCCL need 2 GPUs, and PyTorch finds {devices}")
    return min(devices, 3)


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def results(request, torch, ranks, need_device, tmp_path_factory):
    """What each rank found, of one launch for all tests."""
    backend = request.param
    size, folder = size_of(torch, backend), tmp_path_factory.mktemp(backend)
    need_device("onednn" if backend == "gloo" else "cudnn")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(size):
        command = [sys.executable, str(Path(ranks.__file__)), str(rank), str(size), backend, str(folder)]
        with (folder / f"log{rank}.txt").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        codes = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log{rank}.txt").read_text(errors="replace")[-2000:] for rank in range(size))
    assert codes == [0] * size, logs
    files = [folder / f"rank{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=False, map_location="cpu") for file in files]


def of(results, size):
    """Those of a group of some ranks."""
    if len(results) < size:
        pytest.skip(f"{len(results)} GPUs are no {size} ranks")
    return results[:size]


def near(torch, got, right, case="", tolerance=3e-5):
    tolerance = 0.06 if got.dtype == torch.bfloat16 else 2e-3 if "far" in case else tolerance
    got, right = got.detach(), right.detach().double()
    return float((got.double() - right).abs().max()) <= tolerance * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("way", [(), ("merged",)], ids=["waits", "merged"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", range(10))
def test_steps_are_those_of_the_whole_batch(torch, ranks, results, number, size, way):
    case = list(ranks.CASES)[number]
    assert len(ranks.CASES) == 10
    theirs = torch.nn.BatchNorm1d if len(ranks.CASES[case].get("space", (6, 7))) < 2 else torch.nn.BatchNorm2d
    theirs = torch.nn.BatchNorm3d if len(ranks.CASES[case].get("space", (6, 7))) == 3 else theirs
    module = ranks.module_of(theirs, case)
    right = ranks.steps(module.double(), case, size, wide=True)
    for step, (y, dx, gradients, buffers) in enumerate(right):
        mine = [result[(*way, size, case)][step] for result in of(results, size)]
        assert near(torch, torch.cat([m[0] for m in mine]), y, case)
        assert near(torch, torch.cat([m[1] for m in mine]), dx, case)
        for at, wanted in enumerate(gradients):
            assert near(torch, sum(m[2][at] for m in mine), wanted, case)
        for at, wanted in enumerate(buffers):
            for m in mine:
                assert near(torch, m[3][at], wanted, case)
                assert torch.equal(m[3][at], mine[0][3][at])
        if "last" in case:
            assert all(m[n].is_contiguous(memory_format=torch.channels_last) for m in mine for n in (0, 1))


def test_ddp_trains_as_one_process_with_the_whole_batch(torch, ranks, results):
    right = ranks.trained(ranks.network())
    for result in results:
        assert result["types"] == ["SyncBatchNorm"] * 2
        assert result["ddp"].keys() == right.keys()
        for name, wanted in right.items():
            assert near(torch, result["ddp"][name], wanted), name


def test_what_is_not_synchronized_and_what_is_refused(torch, ranks, results):
    size = len(results)
    x = ranks.batch("first", size, 0)[0]
    plain = ranks.module_of(torch.nn.BatchNorm2d, "first")
    parts = [ranks.part_of("first", size, rank) for rank in range(size)]
    plain.eval()
    assert near(torch, torch.cat([r["eval"] for r in results]), plain(x))
    plain.train()
    assert near(torch, torch.cat([r["copy"] for r in results]), plain(x))
    assert near(torch, torch.cat([r["autocast"] for r in results]), plain(x))
    for number, some in enumerate((x, x[:, :1])):  # of a module without parameters
        wanted = torch.nn.functional.batch_norm(some, None, None, training=True)
        assert near(torch, torch.cat([r["channels"][number] for r in results]), wanted)
    for result, part in zip(results, parts, strict=True):
        assert near(torch, result["alone"], plain(x[part]))
        assert result["frozen in part"] == [False, True]
    assert [r["disagreement"] for r in results] == ["ArgumentError"] * size
    assert [r["one refused"] for r in results] == ["ArgumentTypeError"] + ["RankError"] * (size - 1)


def test_without_a_group_it_is_batch_norm(torch, ours, ranks, device):
    case = "last"
    mine = ours.convert(ranks.module_of(torch.nn.SyncBatchNorm, case)).to(device)
    assert type(mine) is ours.SyncBatchNorm
    x = ranks.batch(case, 2, 0)[0].to(device)
    right = ranks.module_of(torch.nn.BatchNorm2d, case).to(device)(x)
    assert near(torch, mine(x), right)


def test_the_stream_is_followed_also_where_pytorch_does_not_say_it_in_c(torch, ours, monkeypatch):
    """A double of a GPU: PyTorch before 2.10, and a tensor on another stream than the handle's."""
    from pybnorm.torch import sync

    log = []
    made = object.__new__(sync._Ranks)
    made.handle = SimpleNamespace(follow_stream=lambda x: x.said, set_stream=lambda stream: log.append(stream))
    made.layer = SimpleNamespace(_reads=True, _fail=lambda *given: log.append("forward"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=device + 70))
    for said, on_gpu, right in ((False, True, [71, "forward"]), (True, True, ["forward"]), (False, False, ["forward"])):
        log.clear()
        made.refuse(2, SimpleNamespace(said=said, is_cuda=on_gpu, device=1), None)
        assert log == right


def test_each_backward_is_of_the_elements_of_its_own_forward(torch, ranks, results):
    """Forwards of several numbers of elements, then backwards in another order and again; none reads a header."""
    size = len(results)
    for at, case in enumerate(ranks.LATER):
        x, dy = (t.double() for t in ranks.batch(case, size, 0))
        leaf = x.requires_grad_()
        y = ranks.module_of(torch.nn.BatchNorm2d, "first").double()(leaf)
        (right,) = torch.autograd.grad(y, leaf, dy)
        for turn in range(2):
            assert near(torch, torch.cat([r["later"][turn][at] for r in results]), right), (case, turn)
    reads = {r["later"][2] for r in results}
    assert reads == {0}


def test_what_fails_on_one_rank_is_told_when_the_others_read_its_counts(torch, ranks, results):
    """As on a device, where nothing is waited for: a backward in the next forward, until when the gradients are NaN; a
    forward in backward or the next forward. Later steps are right."""
    for rank, result in enumerate(results):
        first, after = ("OutOfMemoryError",) * 2 if rank == 0 else ("nan", "RankError")
        assert result["failing backward"] == [first, after, "right"]
        for last in ("backward", "forward"):
            first = "ArgumentTypeError" if rank == 0 else "nan"
            second = "" if rank == 0 and last == "backward" else "RankError"
            assert result["failing forward", last] == [first, second, "right"]


@pytest.mark.parametrize("size", [2, 3])
def test_second_and_third_derivatives_are_those_of_the_whole_batch(torch, ranks, results, size):
    for case in ranks.TWICE:
        module = ranks.module_of(torch.nn.BatchNorm2d if case != "one axis" else torch.nn.BatchNorm1d, case)
        dx, *parameters, third = ranks.twice(ranks.Formula(module.double()), case, size, wide=True)
        mine = [result["twice", size, case] for result in of(results, size)]
        assert near(torch, torch.cat([m[0] for m in mine]), dx), case
        assert near(torch, torch.cat([m[-1] for m in mine]), third, tolerance=1e-3), case
        for at, wanted in enumerate(parameters):
            assert near(torch, sum(m[1 + at] for m in mine), wanted), case


def test_a_compiled_network_is_as_it_is_without(torch, ranks, results):
    """The synchronized calls are left out of the compiler's graphs, and their statistics are not lost."""
    if not hasattr(torch, "compile"):
        pytest.skip("this PyTorch has no compiler")
    right = ranks.trained(ranks.network())
    for result in results[:2]:
        assert result["compiled"]["state"].keys() == right.keys()
        for name, wanted in right.items():
            assert near(torch, result["compiled"]["state"][name], wanted), name
        assert result["compiled"]["breaks"] > 0  # or it was not what ran
