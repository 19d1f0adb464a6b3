"""Where cases run: pools, this process and dask workers give the same results."""

import concurrent.futures
import contextlib
import gc
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from command_here import run
from simulated import faults, open_exiting, open_faulting, open_simulated
from tables import table

from pybnorm._arrays import CPU, CUDA, ROCM
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import executors
from pybnorm.check.run.executors import Pool, environments, isolated, opened, run_cases
from pybnorm.check.run.runner import BackendInfo, CaseResult
from pybnorm.check.run.worker import DiedError, TimeLimitError, Worker
from pybnorm.errors import ArgumentError

INFO = BackendInfo("onednn", version=(3, 2, 0), path="/x")
GOOD = "infer/train,spatial,f32/bf16,nchw/nhwc,8x3x4"
BAD = "train,spatial,f32,nchw,8x3x4x4"  # on which open_exiting does


def problems(*lines):
    return [problem for line in lines for problem in expand(line)]


def pool(opener, jobs):
    return Pool([Worker("onednn", opener, timeout=60) for _ in range(jobs)])


# ---------------------------------------------------------------- collecting


def test_what_came_with_a_result_is_not_kept_with_it():
    """The description of its library, which comes with every one: of many cases more than all else."""
    described = []

    def ran(opener, backend, case, keep):
        info = BackendInfo(backend, version=(3, 2, 0), path="/x", id="same")
        described.append(weakref.ref(info))
        return CaseResult(backend, case, Status.PASS), info

    class Here(concurrent.futures.ThreadPoolExecutor):
        def submit(self, function, *arguments):
            return super().submit(ran, *arguments)

    with Here(1) as executor:
        results = run_cases(executor, INFO, problems("infer,spatial,f32,nchw,8x3x4x4,seed=" + "/".join("123456789")))
        found = [next(results) for _ in range(9)]
        executor.shutdown()
        gc.collect()
        assert sum(info() is not None for info in described) <= 2  # the one of all, and the last
        results.close()
    assert {r.status for r in found} == {Status.PASS}


# ---------------------------------------------------------------- the pool


@pytest.mark.slow
def test_one_bad_case_costs_exactly_one_case():
    cases = problems(GOOD, BAD, "infer,spatial,f32,nchw,8x3x4x4,seed=1/2/3/4")
    with pool(open_exiting, 2) as executor:
        results = list(run_cases(executor, INFO, cases, opener=open_exiting))
    assert sorted(r.case for r in results) == sorted(map(str, cases))
    assert [(r.case, r.status) for r in results if r.status != Status.PASS] == [(BAD, Status.CRASHED)]
    assert len({r.host for r in results if r.host}) >= 2


@pytest.mark.slow
def test_a_device_that_a_case_left_unusable_costs_no_other_case():
    with Worker("onednn", open_faulting, timeout=60) as worker:
        assert worker.run(Problem.parse(BAD)).status == Status.ERROR
        before = worker.pid
        assert worker.call(faults, timeout=60) == 0  # the program has begun again
        assert worker.run(Problem.parse("infer,spatial,f32,nchw,8x3x4x4")).status == Status.PASS
        assert worker.run(Problem.parse("train,spatial,f32,nchw,8x3x4")).status == Status.PASS
        assert worker.pid == before


@pytest.mark.slow
def test_closing_the_results_cancels_what_has_not_begun():
    cases = problems("infer,spatial,f32,nchw,8x3x4x4,seed=" + "/".join(map(str, range(1, 301))))
    futures = []
    with pool(open_simulated, 1) as executor:
        noting = SimpleNamespace(submit=lambda *given: futures.append(executor.submit(*given)) or futures[-1])
        results = run_cases(noting, INFO, cases, opener=open_simulated)
        next(results)
        results.close()
        assert sum(future.cancelled() for future in futures) > 200
    with pytest.raises(RuntimeError):
        executor.submit(os.getpid)


@pytest.mark.slow
def test_a_pool_that_is_not_waited_for_ends_in_the_middle_of_a_case():
    executor = pool(open_simulated, 2)
    processes = [executor.submit(os.getpid).result() for _ in range(2)]
    pending = [executor.submit(time.sleep, 600) for _ in range(5)]
    while sum(future.running() for future in pending) < 2:
        time.sleep(0.01)
    executor.shutdown(wait=False)
    assert sum(future.cancelled() for future in pending) == 3
    assert [type(f.exception()) for f in pending if not f.cancelled()] == [DiedError, DiedError]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("ends", ["before the call", "while the process starts"])
def test_a_worker_that_was_ended_starts_no_process_for_a_call(monkeypatch, ends):
    with Worker("simulated", open_simulated) as worker:
        if ends == "before the call":
            worker.end()
        else:
            start = worker._start

            def ended():
                worker.end()  # finds no process yet
                start()

            monkeypatch.setattr(worker, "_start", ended)
        with pytest.raises(DiedError, match="was ended before the call"):
            worker.call(time.sleep, 600)


# ---------------------------------------------------------------- whose part of the machine


@table(
    ("kind", "count", "jobs", "variables", "workers"),
    [
        (CPU, 1, None, {}, [{"OMP_NUM_THREADS": "1"}] * 4),
        (CPU, 1, 2, {}, [{"OMP_NUM_THREADS": "2"}] * 2),
        (CPU, 1, 8, {}, [{"OMP_NUM_THREADS": "1"}] * 8),
        (CPU, 1, None, {"OMP_NUM_THREADS": "2,1"}, [{}] * 2),
        (CPU, 1, None, {"OMP_NUM_THREADS": "9"}, [{}]),
        (CPU, 1, 3, {"OMP_NUM_THREADS": "2"}, [{}] * 3),
        (CUDA, 1, None, {}, [{}]),
        (CUDA, 1, 3, {}, [{}] * 3),
        (CUDA, 2, None, {}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (CUDA, 2, 3, {}, [{"CUDA_VISIBLE_DEVICES": str(i)} for i in (0, 1, 0)]),
        (CUDA, 2, None, {"CUDA_VISIBLE_DEVICES": "3, 5"}, [{"CUDA_VISIBLE_DEVICES": i} for i in "35"]),
        (ROCM, 2, None, {"CUDA_VISIBLE_DEVICES": "3"}, [{"HIP_VISIBLE_DEVICES": i} for i in "01"]),
        (ROCM, 2, None, {"HIP_VISIBLE_DEVICES": "4,2"}, [{"HIP_VISIBLE_DEVICES": i} for i in "42"]),
    ],
)
def test_each_worker_has_its_part_of_the_machine(monkeypatch, kind, count, jobs, variables, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(os, "environ", variables)
    assert environments(kind, count, jobs) == workers


@pytest.mark.slow
def test_the_pool_of_a_cpu_library_has_those_workers(onednn, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with opened("pool", jobs=2, timeout=77) as farm:
        (info,) = farm.describe("onednn")
        assert not info.problem
        with farm.executor("onednn", 100) as executor:
            futures = [executor.submit(os.getenv, "OMP_NUM_THREADS") for _ in range(2)]
            assert {f.result() for f in futures} == {str(max(1, executors.cores() // 2))}
            assert [worker.timeout for worker in executor._workers] == [77, 77]
        with farm.executor("onednn", 1) as executor:
            assert len(executor._workers) == 1


# ---------------------------------------------------------------- processes of other processes


@pytest.mark.slow
def test_isolated_keeps_a_process_and_gives_each_thread_its_own(monkeypatch):
    monkeypatch.setattr(executors, "_kept", {})
    first = isolated("onednn", None, {}, os.getpid)
    assert first != os.getpid()
    assert isolated("onednn", None, {}, os.getpid) == first
    assert isolated("miopen", None, {}, os.getpid) != first
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        barrier = threading.Barrier(2)
        started = [
            threads.submit(lambda: (barrier.wait(), isolated("onednn", None, {}, time.sleep, 1))) for _ in range(2)
        ]
        [future.result() for future in started]
    kept = executors._kept["onednn", ()]
    assert len({worker.pid for worker in kept}) == 2
    with pytest.raises(TimeLimitError):
        isolated("onednn", 0.1, {}, time.sleep, 60)
    with pytest.raises(DiedError, match="exit status 3"):
        isolated("onednn", None, {}, os._exit, 3)
    assert isolated("onednn", None, {}, len, "ab") == 2
    for worker in [w for workers in executors._kept.values() for w in workers]:
        worker.close()


@table(
    ("name", "options", "allowed"),
    [
        ("slurm", {}, "pool | process | dask"),
        ("pool:x", {}, "pool | process | dask"),
        ("process", {"jobs": 2}, "not with --executor process"),
        ("dask:tcp://x:1", {"jobs": 2}, "not with --executor dask:"),
    ],
)
def test_bad_executors_are_refused(name, options, allowed):
    with pytest.raises(ArgumentError) as caught, opened(name, **options):
        pass
    assert allowed in str(caught.value)


def test_tls_without_certificates_is_an_error_of_ours():
    pytest.importorskip("distributed")
    with pytest.raises(ArgumentError, match="TLS"), opened("dask:tls://127.0.0.1:9"):
        pass


@pytest.mark.parametrize("words", [b"", b"HTTP/1.0 400 Bad request\r\n\r\n"])
def test_a_port_that_is_not_a_scheduler_is_an_error(words):
    pytest.importorskip("distributed")
    import dask

    with contextlib.ExitStack() as kept, socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    connection = kept.enter_context(server.accept()[0])
                except OSError:  # shut down
                    return
                with contextlib.suppress(OSError):  # the client was faster
                    connection.sendall(words)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"dask:tcp://127.0.0.1:{server.getsockname()[1]}"
        try:
            soon = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
            with soon, pytest.raises(ArgumentError, match="is no dask scheduler"), opened(address):
                pass
        finally:
            server.shutdown(socket.SHUT_RDWR)  # which wakes accept; close does not
            thread.join()


def test_an_absent_package_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ArgumentError, match=r"pybnorm\[dask\]"), opened("dask"):
        pass


# ---------------------------------------------------------------- the command, the same report either way


CASES = ("--case", "train/infer/backward,spatial/peract,f32/f16,nchw/nhwc,4x3x5x4,fill=randn")


def need_dask():
    if importlib.util.find_spec("distributed") is None:
        if "dask" in os.environ.get("PYBNORM_REQUIRE_PACKAGES", "").replace(" ", "").split(","):
            pytest.fail("dask is listed in PYBNORM_REQUIRE_PACKAGES but not installed")
        pytest.skip("dask: the package distributed is not installed")


def check(name, folder, *options):
    """The report of the cases, without what differs from run to run, and the processes that ran them."""
    file = folder / "run.json"
    words = ("check", "--backend", "onednn", "--executor", name, *CASES, *options, "--json", file)
    done = run(*words, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-3000:]
    document = json.loads(file.read_text())
    document["environment"].pop("date")
    hosts = {case.pop("host") for case in document["cases"]}
    for case in document["cases"]:
        case.pop("seconds")
        case.pop("node")
    return document, hosts


@pytest.fixture(scope="module")
def of_the_pool(onednn, tmp_path_factory):
    document, hosts = check("pool", tmp_path_factory.mktemp("pool"), "--jobs", "2")
    assert len(document["cases"]) == 24
    assert {c["status"] for c in document["cases"]} <= {"PASS", "UNSUPPORTED"}
    assert len(hosts) == 2
    return document


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes", "options"), [("process", 1, ()), ("dask", 2, ("--jobs", "2"))])
def test_every_executor_gives_the_same_report(of_the_pool, tmp_path, capfd, name, processes, options):
    if name == "dask":
        need_dask()
    document, hosts = check(name, tmp_path, *options)
    assert capfd.readouterr().err == ""  # distributed says nothing
    assert document == of_the_pool
    assert len(hosts) == processes


@pytest.mark.slow
def test_dask_at_an_address(of_the_pool, tmp_path):
    need_dask()
    import distributed

    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        document, hosts = check(f"dask:{cluster.scheduler_address}", tmp_path)
    assert document == of_the_pool
    assert len(hosts) == 2
