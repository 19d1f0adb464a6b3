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


def size_of(torch, backend):
    """The number of ranks over a backend of ``torch.distributed``, or a skip."""
    distributed, devices = torch.distributed, torch.cuda.device_count() if backend == "nccl" else 3
    there = distributed.is_available() and getattr(distributed, f"is_{backend}_available")()
    if there and devices > 1:
        return min(devices, 3)
    reason = f"ranks over {backend} need 2 devices, and PyTorch finds {devices}" if there else f"no {backend} here"
    if backend == "nccl" and os.environ.get("PYBNORM_REQUIRE_SECOND_DEVICE"):
        pytest.fail(f"PYBNORM_REQUIRE_SECOND_DEVICE is set but: {reason}")
    pytest.skip(reason)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_compute_what_one_process_does_with_the_whole_batch(torch, ours, need_device, tmp_path, backend):
    """See ranks.py."""
    size = size_of(torch, backend)
    need_device("onednn" if backend == "gloo" else "cudnn")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(size):
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(rank), str(size), backend]
        with (tmp_path / f"log{rank}").open("wb") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment}
            started.append(subprocess.Popen([*command, str(tmp_path)], **options))
    try:
        codes = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"log{rank}").read_text(errors="replace") for rank in range(size)]
    assert codes == [0] * size, "\n".join(log[-2000:] for log in logs)
    assert [line for log in logs for line in log.splitlines() if line.startswith("rank ")] == []


def test_without_a_group_it_is_batch_norm(torch, ours, device):
    ranks = pytest.importorskip("ranks")
    mine = ours.convert(ranks.module_of(torch.nn.SyncBatchNorm, "last")).to(device)
    assert type(mine) is ours.SyncBatchNorm
    x = ranks.batch("last", 2, 0)[0].to(device)
    torch.testing.assert_close(mine(x), ranks.module_of(torch.nn.BatchNorm2d, "last").to(device)(x))


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
