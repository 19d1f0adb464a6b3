"""Starting ranks: threads here, or processes over MPI, gloo or NCCL; each kind runs all scenarios in one launch."""

import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import sync_worker

LAUNCH_SECONDS = 240
GPU_KINDS = ("nccl", "cupy", "nccl4py")
NEEDS = {"mpi4py": "mpi4py", "gloo": "torch", "nccl": "torch", "cupy": "cupy", "nccl4py": "nccl"}
KINDS = ("threads", *NEEDS)
REQUIRED_AS = NEEDS | {"nccl": "nccl", "nccl4py": "nccl4py"}


def absent(kind, reason):
    """Skip with the reason, or fail where PYBNORM_REQUIRE_PACKAGES lists it."""
    if REQUIRED_AS[kind] in os.environ.get("PYBNORM_REQUIRE_PACKAGES", "").replace(" ", "").split(","):
        pytest.fail(f"{REQUIRED_AS[kind]} is listed in PYBNORM_REQUIRE_PACKAGES but: {reason}")
    pytest.skip(f"sync over {kind}: {reason}")


def mpiexec():
    """The launcher beside this Python, as in the wheels of MPICH and Open MPI, or the system's."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")


def ranks_of(kind):
    """Number of ranks, or a skip."""
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        absent(kind, f"the package {NEEDS[kind]} is not installed")
    if kind == "mpi4py" and mpiexec() is None:
        absent(kind, "mpi4py is here but no mpiexec (pip install mpich, or a system's MPI)")
    if kind not in GPU_KINDS:
        return 4
    import torch

    devices = torch.cuda.device_count()
    if devices < 2:
        absent(kind, f"needs 2 CUDA devices and finds {devices}")
    return 4 if devices >= 4 else 2


def launch(kind, size, folder):
    """Run the scenarios on all ranks; each rank's results. A hang is a failure that says where."""
    if kind == "threads":
        return over_threads(lambda mine: sync_worker.run(sync_worker.Context(kind, mine, mine.rank, size)), size)
    worker, tail = [sys.executable, sync_worker.__file__, kind], [str(size), str(folder)]
    commands = [[*worker, str(rank), *tail] for rank in range(size)]
    if kind == "mpi4py":
        commands = [[mpiexec(), "-n", str(size), *worker, "0", *tail]]
    # Open MPI refuses root and more ranks than cores, unless told; MPICH does not know these.
    names = "ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe"
    environment = os.environ | {f"OMPI_{name}": "1" for name in names} | {"OMP_NUM_THREADS": "1"}
    environment |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    with (log := folder / "log").open("wb") as out:
        options = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
        started = [subprocess.Popen(command, **options) for command in commands]
        try:
            codes = [process.wait(LAUNCH_SECONDS) for process in started]
        except subprocess.TimeoutExpired:
            codes = f"none after {LAUNCH_SECONDS} s"
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the group that start_new_session made
                    process.wait()
    text = log.read_text(errors="replace")[-6000:]
    assert codes == [0] * len(started), f"ranks over {kind}: exit codes {codes}:\n{text}"
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(size)]


def over_threads(work, size=4):
    """Results of `work(communicator)` on each of some threads."""
    shared = {"slots": [None] * size, "barrier": threading.Barrier(size)}
    results, errors = [None] * size, []

    def main(rank):
        try:
            results[rank] = work(sync_worker.Threads(shared, rank))
        except BaseException as error:
            errors.append(error)
            shared["barrier"].abort()  # or the others would wait for the time-out

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LAUNCH_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results
