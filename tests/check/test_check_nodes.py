"""Dask workers that fail: no case is lost, none is counted twice, and none of it is a verdict about a library."""

import contextlib
import os
import queue
import signal
import threading
import time
from unittest.mock import Mock

import pytest
from tables import table
from test_check_executors import need_dask

from pybnorm import errors
from pybnorm._arrays import CPU, CUDA
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import LostNode
from pybnorm.check.language.lines import expand
from pybnorm.check.run import environment, executors
from pybnorm.check.run.runner import BackendInfo, CaseResult
from pybnorm.check.run.session import identified

LIMIT = 120
INFO = BackendInfo("onednn", version=(3, 2, 0), path="/x")
PROBLEMS = list(expand("infer,spatial,f32,nchw,8x3x4x4,seed=" + "/".join(map(str, range(1, 41)))))
CASES = [str(p) for p in PROBLEMS]
ENTRIES = [identified(BackendInfo("onednn", "double", version, digest="d")) for version in ((3, 1, 0), (3, 2, 0))]
GREET = executors.greet
started, go = queue.SimpleQueue(), threading.Event()


def here(backend, timeout, variables, function, *arguments):
    """`executors.isolated` without a process."""
    return function(*arguments)


def own_number():
    from distributed import get_worker

    return int(get_worker().name)


def settled(backend, timeout, number):
    """Two versions, a file that is not there, an error, and a library of the first version."""
    answers = [ENTRIES[0], ENTRIES[1], BackendInfo("onednn", problem="no library here")]
    if own_number() == 3:
        raise errors.LibraryLoadError("onednn: /nonexistent", backend="onednn")
    return [*answers, None, ENTRIES[0]][own_number()], {"OF": str(number)}


def passing(opener, backend, case, keep):
    return CaseResult("onednn", case, Status.PASS), None


def gated(opener, backend, case, keep):
    started.put(case)
    assert go.wait(LIMIT)
    return passing(opener, backend, case, keep)


def gated_on_the_first(opener, backend, case, keep):
    return (passing if own_number() else gated)(opener, backend, case, keep)


@contextlib.contextmanager
def farm(monkeypatch, function, workers=2):
    """The farm of a cluster of threads that run `function` for each case; its cluster and its client."""
    need_dask()
    import distributed

    go.clear()
    while not started.empty():  # of a test before
        started.get_nowait()
    monkeypatch.setattr(executors, "isolated", here)
    monkeypatch.setattr(executors, "run_recorded", function)
    options = {"n_workers": workers, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        executors._quiet("distributed"),
        distributed.LocalCluster(protocol="tcp://", silence_logs=False, **options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield executors._Cluster(client, LIMIT), cluster, client


@contextlib.contextmanager
def running(executor):
    """The results of all cases, complete at the end of the block."""
    done = []
    thread = threading.Thread(target=lambda: done.extend(executors.run_cases(executor, INFO, PROBLEMS)))
    thread.start()
    try:
        started.get(timeout=LIMIT)
        yield done
    finally:
        go.set()
        thread.join(LIMIT)
        executor.shutdown()
    assert sorted(r.case for r in done) == sorted(CASES)  # nothing lost, nothing twice


def greeting():
    return (str(own_number()), "host", "", "0.0.1") if own_number() == 5 else GREET()


def no_library(backend, timeout, number):
    raise errors.LibraryLoadError("onednn: /nonexistent", backend="onednn")


@pytest.mark.slow
def test_workers_with_two_versions_of_the_library_and_those_that_cannot_run_it(monkeypatch):
    monkeypatch.setattr(executors, "greet", greeting)
    with farm(monkeypatch, passing, 6) as (found, *_):
        (other,) = found.lost
        assert other == LostNode("worker 5", "host", "", f"has pybnorm 0.0.1, and this is {executors.__version__}")
        monkeypatch.setattr(executors, "settled", settled)
        assert sorted(i.id for i in found.describe("onednn")) == [i.id for i in ENTRIES]
        assert sorted((n.node, n.backend, n.reason) for n in found.lost if n != other) == [
            ("worker 2", "onednn", "no library here"),
            ("worker 3", "onednn", "LibraryLoadError: onednn: /nonexistent"),
        ]
        with found.executor("onednn", 9) as executor:
            results = list(executors.run_cases(executor, INFO, PROBLEMS))
            assert executor._threads._max_workers == 3
            numbers = {v["OF"] for v in executor._dask.args[1].values()}
        monkeypatch.setattr(executors, "settled", no_library)
        with pytest.raises(errors.LibraryLoadError, match="/nonexistent"):
            found.describe("onednn")
    assert {r.status for r in results} == {Status.PASS}
    assert {r.node for r in results} <= {"worker 0", "worker 1", "worker 4"}
    assert len(numbers) == 3  # of a host whose workers see the same devices: one each


def test_a_connection_that_breaks_costs_neither_a_worker_nor_a_case(monkeypatch):
    with farm(monkeypatch, gated) as (found, _, client):
        before = client.scheduler_comm

        async def broken():
            client.scheduler_comm.comm.abort()

        with running(found.executor("onednn", 9)) as done:
            client.sync(broken)
            while client.scheduler_comm in (None, before):
                time.sleep(0.01)
        assert found.lost == []
    assert {(r.status, r.message) for r in done} == {(Status.PASS, "")}


def test_a_worker_that_is_gone_is_named_and_its_case_goes_to_another(monkeypatch):
    with farm(monkeypatch, gated_on_the_first) as (found, cluster, _):
        first = next(w for w in cluster.workers.values() if str(w.name) == "0")
        with running(found.executor("onednn", 9)) as done:
            cluster.sync(first.close, nanny=False, executor_wait=False)
            while len(done) < len(CASES):
                time.sleep(0.01)
        assert [(n.node, n.reason) for n in found.lost] == [("worker 0", "its worker is gone")]
    assert {r.status for r in done} == {Status.PASS}
    assert {r.node for r in done} == {"worker 1"}


@pytest.mark.slow
def test_where_no_worker_is_left_every_case_says_so(monkeypatch):
    monkeypatch.setattr(executors, "_RESTART", 1.0)
    with farm(monkeypatch, gated) as (found, cluster, _):
        found._limit = 1
        with running(found.executor("onednn", 9)) as done:
            for worker in list(cluster.workers.values()):
                cluster.sync(worker.close, nanny=False, executor_wait=False)
            while len(done) < len(CASES):
                time.sleep(0.01)
    assert {(r.status, r.message) for r in done} == {(Status.ERROR, "NotRunError: no worker is left")}


def test_an_executor_that_is_not_waited_for_ends_at_once(monkeypatch):
    with farm(monkeypatch, gated) as (found, cluster, _):
        executor = found.executor("onednn", 9)
        results = executors.run_cases(executor, INFO, PROBLEMS)
        reading = threading.Thread(target=lambda: list(results))
        reading.start()
        started.get(timeout=LIMIT)
        started.get(timeout=LIMIT)
        assert len(cluster.scheduler.tasks) == 2  # none waits on a worker, whose end would count against it
        executor.shutdown(wait=False, cancel_futures=True)
        reading.join(LIMIT)
        assert not reading.is_alive()
        go.set()
        with pytest.raises(RuntimeError):
            executor.submit(passing, None, "onednn", CASES[0], None)


def deadly(opener, backend, case, keep):
    if case == CASES[3]:
        os.kill(os.getppid(), signal.SIGKILL)  # the dask worker
    if case == CASES[5]:
        os._exit(3)  # the library, in its process
    return passing(opener, backend, case, keep)


@pytest.mark.slow
def test_a_case_that_ends_its_workers_is_an_error_and_costs_no_other(monkeypatch):
    need_dask()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(executors, "run_recorded", deadly)
    import dask
    import distributed  # noqa: F401  # now: what it adds to the configuration would end with the block

    fewer = dask.config.set({"distributed.scheduler.allowed-failures": 1})  # each takes seconds
    with fewer, executors.opened("dask", jobs=2, timeout=LIMIT) as found, found.executor("onednn", 9) as executor:
        results = {r.case: r for r in executors.run_cases(executor, INFO, PROBLEMS)}
        assert {n.reason for n in found.lost} == {"its worker is gone"}
    deadly_one, dying = results.pop(CASES[3]), results.pop(CASES[5])
    assert deadly_one.status == Status.ERROR
    assert "KilledWorker" in deadly_one.message
    assert (dying.status, dying.message) == (Status.CRASHED, "the library's process died: exit status 3")
    assert {r.status for r in results.values()} == {Status.PASS}
    assert sorted(results) == sorted(CASES[:3] + CASES[4:5] + CASES[6:])


def test_a_run_goes_on_where_all_workers_begin_again_at_once(monkeypatch):
    pytest.importorskip("distributed", reason="dask is not installed")
    monkeypatch.setattr(executors, "_RESTART", 0.3)
    asked = []
    broken = Mock(status="lost")
    answer = Mock(status="finished", **{"result.return_value": "an answer"})
    futures = iter([broken, answer])
    with executors.Tasks(lambda *_: next(futures), 1, 1.0, lambda: asked.append(1) or len(asked) > 1) as tasks:
        assert tasks.submit(len, ()).result() == "an answer"
    assert len(asked) > 1


# ---------------------------------------------------------------- whose device


@table(
    ("kind", "count", "variables", "index", "own"),
    [
        (CPU, 1, {}, 3, {}),
        (CUDA, 1, {}, 0, {}),
        (CUDA, 2, {}, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        (CUDA, 2, {}, 2, {"CUDA_VISIBLE_DEVICES": "0"}),
        (CUDA, 2, {"CUDA_VISIBLE_DEVICES": "1,0"}, 0, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_worker_gives_its_process_a_device(monkeypatch, kind, count, variables, index, own):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", os.environ | variables)
    calls = []

    def isolated(backend, timeout, environment, function, *arguments):
        calls.append((function.__name__, environment))
        return (kind, count) if function.__name__ == "place" else INFO

    monkeypatch.setattr(executors, "isolated", isolated)
    assert executors.settled("cudnn", None, index) == (INFO, own)
    assert calls[-1] == (("describe", own) if own else ("place", {}))


# ---------------------------------------------------------------- what ran


def test_an_id_is_of_what_changes_results_and_not_of_where():
    base = BackendInfo("onednn", "oneDNN", (3, 2, 0), "/a", "x", device="EPYC", digest="d", variables={"A": "1"})
    same = identified(base).id
    assert same.startswith("3.2.0-")

    def changed(**values):
        return identified(BackendInfo(**(vars(base) | values))).id

    assert changed(path="/b", found_via="y") == same
    facts = {"version": (3, 1, 0), "digest": "e", "device": "Xeon", "variables": {"A": "2"}}
    facts |= {"cpu_flags": ["avx512_fp16"], "driver": "13.0"}
    assert len({same, *(changed(**{name: value}) for name, value in facts.items())}) == 7


def test_only_variables_of_the_backend_are_recorded():
    own = {
        "onednn": {"ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "PYBNORM_LIB_ONEDNN"},
        "cudnn": {"NVIDIA_TF32_OVERRIDE", "PYBNORM_LIB_CUDNN"},
        "miopen": {"MIOPEN_FIND_MODE"},
    }
    given = dict.fromkeys(set().union(*own.values(), {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HOME"}), "1")
    assert {backend: set(environment.variables(backend, given)) for backend in own} == own
