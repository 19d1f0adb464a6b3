"""Starting ranks: threads here, or processes over MPI, gloo or NCCL; each kind runs all scenarios in one launch."""

import importlib.util
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import sync_worker

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH_SECONDS = 240
GPU_KINDS = ("nccl", "cupy", "nccl4py")
KINDS = ("threads", "mpi4py", "gloo", *GPU_KINDS)
NEEDS = {"mpi4py": "mpi4py", "gloo": "torch", "nccl": "torch", "cupy": "cupy", "nccl4py": "nccl"}
REQUIRED_AS = {"mpi4py": "mpi4py", "gloo": "torch", "nccl": "nccl", "cupy": "cupy", "nccl4py": "nccl4py"}
NOT_ON_CPU = {"f64"}


def required(kind):
    return REQUIRED_AS.get(kind) in os.environ.get("PYBNORM_REQUIRE_PACKAGES", "").replace(" ", "").split(",")


def absent(kind, reason):
    """Skip with the reason, or fail where PYBNORM_REQUIRE_PACKAGES lists it."""
    if required(kind):
        pytest.fail(f"{REQUIRED_AS[kind]} is listed in PYBNORM_REQUIRE_PACKAGES but: {reason}")
    pytest.skip(f"sync over {kind}: {reason}")


def mpiexec():
    """The launcher beside this Python, as in the wheels of MPICH and Open MPI, or the system's."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")


def ranks_of(kind):
    """Number of ranks, or a skip."""
    if kind == "threads":
        return 4
    if importlib.util.find_spec(NEEDS[kind]) is None:
        absent(kind, f"the package {NEEDS[kind]} is not installed")
    if kind == "mpi4py":
        if mpiexec() is None:
            absent(kind, "mpi4py is here but no mpiexec (pip install mpich, or a system's MPI)")
        return 4
    if kind == "gloo":
        return 4
    import torch

    devices = torch.cuda.device_count()
    if devices < 2:
        absent(kind, f"needs 2 CUDA devices and finds {devices}")
    return 4 if devices >= 4 else 2


def scenarios_of(kind, names=None):
    chosen = list(sync_worker.SCENARIOS) if names is None else list(names)
    return [n for n in chosen if kind in GPU_KINDS or n.partition(",")[0] not in NOT_ON_CPU]


def launch(kind, size, folder, names):
    """Run scenarios on all ranks; {scenario: results by rank}. A hang is a failure that says where."""
    folder.mkdir(parents=True, exist_ok=True)
    return _threads(size, names) if kind == "threads" else _processes(kind, size, folder, names)


def _threads(size, names):
    shared = {"slots": [None] * size, "barrier": threading.Barrier(size)}
    results, errors = [{} for _ in range(size)], []

    def work(rank):
        try:
            context = sync_worker.Context("threads", sync_worker.Threads(shared, rank), rank, size)
            for name, result in sync_worker.run(context, names, lambda line: None):
                results[rank][name] = result
        except BaseException as error:
            errors.append((rank, error))
            shared["barrier"].abort()  # or the others would wait for the time-out

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LAUNCH_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        real = [e for e in errors if not isinstance(e[1], threading.BrokenBarrierError)] or errors
        raise AssertionError(f"rank {real[0][0]} ended after {list(results[real[0][0]])}") from real[0][1]
    return results


def _processes(kind, size, folder, names):
    worker = [sys.executable, str(pathlib.Path(sync_worker.__file__)), kind]
    tail = [str(size), str(folder), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Open MPI refuses root and more ranks than cores, unless told; MPICH does not know these.
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    environment |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    if kind == "mpi4py":
        commands = [[mpiexec(), "-n", str(size), *worker, "0", *tail]]
    else:
        commands = [[*worker, str(rank), *tail] for rank in range(size)]
    logs = [folder / f"log{i}.txt" for i in range(len(commands))]
    started = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as out:
            options = {"stdout": out, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
            started.append(subprocess.Popen(command, **options))
    hung = False
    try:
        for process in started:
            process.wait(LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        hung = True
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the group that start_new_session made
                process.wait()
    text = "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
    assert not hung, f"ranks hang over {kind} after {LAUNCH_SECONDS} s:\n{text}"
    assert all(p.returncode == 0 for p in started), f"{kind}: exit codes {[p.returncode for p in started]}:\n{text}"
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(size)]
