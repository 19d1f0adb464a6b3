"""Ranks and workers that fail: no case is lost, none is counted twice, and none of it is a verdict about a library."""

import concurrent.futures
import contextlib
import queue
import threading
import time

import pytest
from test_check_executors import launcher

from pybnorm import errors
from pybnorm._arrays import CPU, CUDA
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import exit_status
from pybnorm.check.language.lines import expand
from pybnorm.check.run import executors, nodes
from pybnorm.check.run.nodes import Dealer, Greeting, LostNode, Node, greeted
from pybnorm.check.run.runner import BackendInfo, CaseResult
from pybnorm.check.run.session import identified
from pybnorm.check.run.worker import DiedError

LIMIT = 120
INFO = BackendInfo("onednn", version=(3, 2, 0), path="/x")
CASES = [str(p) for p in expand("infer,spatial,f32,nchw,8x3x4x4,seed=" + "/".join(map(str, range(1, 41))))]


class Table:
    """Nodes that are threads, and what each does with a case."""

    def __init__(self, *doings, slots=1):
        pool = concurrent.futures.ThreadPoolExecutor
        self.threads = [pool(slots, thread_name_prefix=str(i)) for i in range(len(doings))]
        self.nodes = []
        self.asked = {f"rank {i}": [] for i in range(1, len(doings) + 1)}
        self.lost = []
        for i, (doing, thread) in enumerate(zip(doings, self.threads, strict=True), 1):
            self.nodes.append(Node(f"rank {i}", self._submitter(f"rank {i}", doing, thread), slots))

    def _submitter(self, name, doing, thread):
        def run(case):
            self.asked[name].append(case)
            return doing(case), None

        return lambda function, case: thread.submit(run, case)

    def dealer(self, seconds=None):
        def wrap(node, function, arguments):
            return function, arguments[2]

        self.dealt = Dealer(self.nodes, "onednn", wrap, seconds, self.lost)
        return self.dealt

    def results(self, cases=CASES, seconds=None):
        problems = [p for case in cases for p in expand(case)]
        with self.dealer(seconds) as dealer:
            results = list(executors.run_cases(dealer, INFO, problems))
        for thread in self.threads:
            thread.shutdown(wait=False)
        assert sorted(r.case for r in results) == sorted(cases)  # nothing lost, nothing twice
        return {r.case: r for r in results}


def number():
    """Of the node that this thread is, from 0."""
    return int(threading.current_thread().name.partition("_")[0])


def good(case):
    return CaseResult("onednn", case, Status.PASS)


def wrong(case):
    return CaseResult("onednn", case, Status.FAIL)


def no_library(case):
    raise errors.LibraryLoadError("onednn: /nonexistent", backend="onednn")


def harness(case):
    return CaseResult("onednn", case, Status.ERROR, message="KeyError: 'of ours'")


def test_a_node_without_the_library_is_taken_out_and_blames_nobody():
    table = Table(no_library, good)
    results = table.results()
    assert {r.status for r in results.values()} == {Status.PASS}
    assert {r.node for r in results.values()} == {"rank 2"}
    assert table.lost == [LostNode("rank 1", "", "onednn", "LibraryLoadError: onednn: /nonexistent")]
    assert len(table.asked["rank 1"]) <= 2  # it does not drink the queue
    assert not table.nodes[0].ended  # another backend may be there


def test_verdicts_are_not_retried():
    def dies(case):
        raise DiedError("the library's process died: SIGSEGV")

    table = Table(wrong, dies)
    results = table.results()
    assert {r.status for r in results.values()} == {Status.FAIL, Status.CRASHED}
    assert table.lost == []
    assert sum(map(len, table.asked.values())) == len(CASES)


def test_a_node_that_hangs_is_lost_and_its_late_answer_does_not_count():
    hanging, late = threading.Event(), []

    def hangs(case):
        hanging.wait(LIMIT)
        late.append(case)
        return wrong(case)

    table = Table(hangs, good)
    problems = [p for case in CASES for p in expand(case)]
    with table.dealer(seconds=0.5) as dealer:
        results = executors.run_cases(dealer, INFO, problems)
        found = [next(results) for _ in CASES]
        hanging.set()  # now it answers, with a FAIL
        table.threads[0].shutdown()
        found += list(results)
    assert late
    assert sorted(r.case for r in found) == sorted(CASES)
    assert {(r.status, r.node) for r in found} == {(Status.PASS, "rank 2")}
    assert [(n.node, n.backend) for n in table.lost] == [("rank 1", "")]
    assert "gave no answer in 0.5 s" in table.lost[0].reason
    assert table.nodes[0].ended


def test_the_answer_of_a_lost_node_never_counts():
    """Not even where it comes before that of the node that got the case."""
    hanging, go = threading.Event(), threading.Event()

    def hangs(case):
        assert hanging.wait(LIMIT)
        return wrong(case)

    def waits(case):
        assert go.wait(LIMIT)
        return good(case)

    table = Table(hangs, waits)
    with table.dealer() as dealer:
        results = executors.run_cases(dealer, INFO, [p for case in CASES for p in expand(case)])
        first = threading.Thread(target=lambda: found.append(next(results)))
        found = []
        first.start()
        while not table.asked["rank 1"]:
            time.sleep(0.01)
        table.nodes[0].ended = "its worker is gone"
        while not table.lost:
            time.sleep(0.01)
        hanging.set()
        table.threads[0].shutdown()
        go.set()
        first.join()
        found += list(results)
    assert sorted(r.case for r in found) == sorted(CASES)
    assert {(r.status, r.node) for r in found} == {(Status.PASS, "rank 2")}


def test_an_error_of_ours_is_tried_elsewhere_and_is_never_fail():
    bad = CASES[5:26:20]
    table = Table(*[lambda case: harness(case) if case in bad else good(case)] * 4)
    results = table.results()
    assert {results[case].status for case in bad} == {Status.ERROR}
    assert {results[case].message for case in bad} == {"KeyError: 'of ours'"}
    assert {r.status for case, r in results.items() if case not in bad} == {Status.PASS}
    assert sum(asked.count(case) for asked in table.asked.values() for case in bad) == nodes.LIVES * len(bad)
    assert table.lost == []  # some bad cases are no bad node


def test_a_node_of_nothing_but_errors_is_taken_out():
    table = Table(harness, good)
    results = table.results()
    assert {r.status for r in results.values()} == {Status.PASS}
    assert [n.node for n in table.lost] == ["rank 1"]
    assert "3 cases in a row ended in an error: KeyError" in table.lost[0].reason


def test_where_no_node_is_left_every_case_says_so():
    table = Table(no_library, no_library)
    results = table.results()
    assert {r.status for r in results.values()} == {Status.ERROR}
    assert any("no node is left" in r.message for r in results.values())
    assert exit_status(list(results.values()), []) == 2
    assert [n.node for n in table.lost] == ["rank 1", "rank 2"]


def test_a_node_that_has_ended_gives_back_all_it_has():
    started, stop = threading.Event(), threading.Event()

    def never(case):
        started.set()
        stop.wait(LIMIT)
        return wrong(case)

    def slowly(case):
        assert started.wait(LIMIT)
        table.nodes[0].ended = "its worker is gone"
        return good(case)

    table = Table(never, slowly)
    results = table.results()
    stop.set()
    assert {(r.status, r.node) for r in results.values()} == {(Status.PASS, "rank 2")}
    assert [n.reason for n in table.lost] == ["its worker is gone"]


def test_closing_the_results_cancels_what_no_node_has():
    table = Table(good)
    with table.dealer() as dealer:
        results = executors.run_cases(dealer, INFO, [p for case in CASES for p in expand(case)])
        next(results)
        results.close()
    with pytest.raises(RuntimeError):
        dealer.submit(good, 1, 2, CASES[0])


def test_a_case_that_ends_its_nodes_is_given_up_and_takes_few_of_them():
    def ends(case):
        if case == CASES[0]:
            table.nodes[number()].ended = "its worker is gone"
            stop.wait(LIMIT)
        return good(case)

    stop = threading.Event()
    table = Table(*[ends] * 6)
    results = table.results()
    stop.set()
    assert results.pop(CASES[0]).status == Status.ERROR
    assert {r.status for r in results.values()} == {Status.PASS}
    assert len(table.lost) == nodes.LIVES


def test_a_case_is_not_to_blame_for_nodes_that_are_lost_together():
    """As those of a rack that loses its power: not even where it meets more such racks than it has lives."""
    stop = threading.Event()

    def ends(case):
        own = number() // 2 * 2
        with table.dealt._lock:  # so that nobody looks between the two
            table.nodes[own].ended = table.nodes[own + 1].ended = "its worker is gone"
        stop.wait(LIMIT)
        return wrong(case)

    racks = nodes.LIVES + 1
    table = Table(*[ends] * 2 * racks, good)
    results = table.results(CASES[:1])
    stop.set()
    assert {(r.status, r.node) for r in results.values()} == {(Status.PASS, f"rank {2 * racks + 1}")}
    assert len(table.lost) == 2 * racks


def test_what_a_lost_node_had_waits_behind_all_others():
    stop = threading.Event()

    def ends(case):
        table.nodes[0].ended = "its worker is gone"
        stop.wait(LIMIT)
        return wrong(case)

    def slowly(case):
        while not table.lost:
            time.sleep(0.01)
        return good(case)

    table = Table(ends, slowly)
    table.results()
    stop.set()
    assert table.asked["rank 2"][-1] == table.asked["rank 1"][0]


# ---------------------------------------------------------------- dask's own client


@pytest.fixture(scope="module")
def dask_cluster():
    """Of two workers in this process."""
    launcher("dask")
    import distributed

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with (
        executors._quiet("distributed"),
        distributed.LocalCluster(protocol="tcp://", silence_logs=False, **options) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def dask_client(dask_cluster):
    import distributed

    with distributed.Client(dask_cluster.scheduler_address, set_as_default=False) as client:
        yield client


@pytest.mark.parametrize("trouble", ["another look", "no answer"])
def test_a_scheduler_that_does_not_say_who_is_there_takes_nobody_out(dask_client, monkeypatch, trouble):
    update, cancel, looks = dask_client._update_scheduler_info, nodes.DaskNodes._cancel, []

    async def and_another(**options):  # the client's own look, which asks for no workers, before the answer is read
        await update(**options)
        await update()

    async def nothing(**options):
        raise OSError("Timed out")

    monkeypatch.setattr(nodes, "_POLL", 0.01)
    monkeypatch.setattr(nodes.DaskNodes, "_cancel", lambda self: (looks.append(self), cancel(self)))
    if trouble == "another look":
        monkeypatch.setattr(dask_client, "_update_scheduler_info", and_another)
    with contextlib.closing(nodes.DaskNodes(dask_client)) as found:
        assert len(found.nodes) == 2
        if trouble == "no answer":
            monkeypatch.setattr(dask_client.scheduler, "identity", nothing, raising=False)
        looks.clear()
        while len(looks) < 3:  # before the third there were two whole ones
            time.sleep(0.01)
        assert [node.ended for node in found.nodes] == ["", ""]


_started, _go = queue.SimpleQueue(), threading.Event()


def gated(case):
    _started.put(case)
    assert _go.wait(LIMIT)
    return good(case), None


@pytest.mark.parametrize("trouble", ["broken", "broken, not told", "forgotten"])
def test_calls_that_the_scheduler_loses_cost_neither_a_node_nor_a_case(dask_cluster, dask_client, monkeypatch, trouble):
    """A connection breaks; or the scheduler learns late that it broke, and forgets what came by the new one."""
    monkeypatch.setattr(nodes, "_POLL", 0.1)
    if trouble != "broken":  # of the calls that the scheduler forgot
        monkeypatch.setattr("distributed.client.FutureState.cancel", lambda *args, **options: None)

    def wrap(node, function, arguments):
        return gated, arguments[2]

    async def broken():
        dask_client.scheduler_comm.comm.abort()

    async def forgotten():
        scheduler = dask_cluster.scheduler
        scheduler.client_releases_keys(keys=list(scheduler.tasks), client=dask_client.id)

    lost, before = [], dask_client.scheduler_comm
    problems = [p for case in CASES for p in expand(case)]
    with contextlib.closing(nodes.DaskNodes(dask_client)) as found:
        with Dealer(found.nodes, "onednn", wrap, None, lost) as dealer:
            results = executors.run_cases(dealer, INFO, problems)
            collecting = concurrent.futures.ThreadPoolExecutor(1)
            every = collecting.submit(list, results)
            _started.get(timeout=LIMIT)
            if trouble == "forgotten":
                dask_client.sync(forgotten)
            else:
                dask_client.sync(broken)
                while dask_client.scheduler_comm in (None, before):
                    time.sleep(0.01)
            _go.set()
            done = every.result(LIMIT)
        collecting.shutdown()
    assert lost == []
    assert sorted(r.case for r in done) == sorted(CASES)
    assert {(r.status, r.message) for r in done} == {(Status.PASS, "")}


_held, _stop = threading.Event(), threading.Event()


def never(case):
    _held.set()
    _stop.wait(LIMIT)


def test_a_worker_that_is_gone_is_taken_out(monkeypatch):
    """Its calls never come back; another one has them made."""
    launcher("dask")
    import distributed

    monkeypatch.setattr(nodes, "_POLL", 0.1)
    lost = []

    def wrap(node, function, arguments):
        return (never if node is found.nodes[0] else gated), arguments[2]

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with (
        executors._quiet("distributed"),
        distributed.LocalCluster(protocol="tcp://", silence_logs=False, **options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        contextlib.closing(nodes.DaskNodes(client)) as found,
        Dealer(found.nodes, "onednn", wrap, None, lost) as dealer,
        concurrent.futures.ThreadPoolExecutor(1) as collecting,
    ):
        gone = next(w for w in cluster.workers.values() if w.address == found.nodes[0].address)
        every = collecting.submit(list, executors.run_cases(dealer, INFO, [p for c in CASES for p in expand(c)]))
        try:
            assert _held.wait(LIMIT)
            cluster.sync(gone.close, nanny=False, executor_wait=False)
            _go.set()
            done = every.result(LIMIT)
        finally:
            _stop.set()
            found.nodes[0].ended = found.nodes[0].ended or "nobody has noticed"
    assert [n.reason for n in lost] == ["its worker is gone"]
    assert sorted(r.case for r in done) == sorted(CASES)
    assert {(r.status, r.node) for r in done} == {(Status.PASS, found.nodes[1].name)}


def test_workers_with_two_versions_and_one_without_the_library():
    entries = [identified(BackendInfo("onednn", "double", version, digest="d")) for version in ((3, 1, 0), (3, 2, 0))]
    answers = [*entries, entries[0], BackendInfo("onednn", problem="no library here")]

    def node(number, answer):
        def submit(function, *arguments):
            future = concurrent.futures.Future()
            future.set_result(Greeting("a", number, "") if function is nodes.greet else (answer, {}))
            return future

        return Node(f"worker {number}", submit)

    remote = executors._Remote([node(i, answer) for i, answer in enumerate(answers)], None, None)
    assert [remote.describe("onednn"), *remote.others("onednn")] == entries
    assert [(n.node, n.reason) for n in remote.lost] == [("worker 3", "no library here")]
    with remote.executor("onednn", 9) as dealer:
        assert [n.name for n in dealer._seats] == ["worker 0", "worker 1", "worker 2"]


_end = threading.Event()


def endless():
    _end.wait(LIMIT)


def test_calls_that_never_end_do_not_keep_it_from_closing(dask_client, monkeypatch):
    """As those that a client made after it had lost its scheduler, which nobody cancels."""
    found, waiting = nodes.DaskNodes(dask_client), threading.Event()
    look = found._completed.next_batch

    def batch(block):
        if found._completed.count():
            waiting.set()
        return look(block=block)

    monkeypatch.setattr(found._completed, "next_batch", batch)
    monkeypatch.setattr(dask_client, "cancel", lambda futures: None)
    with concurrent.futures.ThreadPoolExecutor(1) as closing:
        try:
            found.nodes[0].submit(endless)
            assert waiting.wait(LIMIT)
            closing.submit(found.close).result(LIMIT / 2)
        finally:
            _end.set()


# ---------------------------------------------------------------- whose device


def test_nodes_of_a_host_that_see_the_same_devices_are_numbered():
    answers = [
        Greeting("a", 1, ""),
        Greeting("a", 2, ""),
        Greeting("b", 1, ""),
        Greeting("b", 2, "CUDA_VISIBLE_DEVICES=0,1"),  # as dask-cuda does: each list begins with its own
        Greeting("b", 3, "CUDA_VISIBLE_DEVICES=1,0"),
        Greeting("a", 3, "", version="0.0.1"),
    ]

    def node(number, answer):
        future = concurrent.futures.Future()
        if answer is not None:
            future.set_result(answer)
        return Node(f"worker {number}", lambda _: future)

    asked = [node(i, answer) for i, answer in enumerate([*answers, None])]
    lost = dict(greeted(asked, 0.1))
    assert [(n.host, n.index) for n in asked[:5]] == [("a", 0), ("a", 1), ("b", 0), ("b", 0), ("b", 0)]
    assert list(lost) == asked[5:]
    assert "has pybnorm 0.0.1" in lost[asked[5]]
    assert lost[asked[6]] == asked[6].ended == "did not answer in 0.1 s"


@pytest.mark.parametrize(
    ("kind", "count", "variables", "index", "own"),
    [
        (CPU, 1, {}, 3, {}),
        (CUDA, 1, {}, 0, {}),
        (CUDA, 2, {}, 0, {"CUDA_VISIBLE_DEVICES": "0"}),
        (CUDA, 2, {}, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        (CUDA, 2, {}, 2, {"CUDA_VISIBLE_DEVICES": "0"}),
        (CUDA, 2, {"CUDA_VISIBLE_DEVICES": "1,0"}, 0, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_node_gives_its_process_a_device(monkeypatch, kind, count, variables, index, own):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
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
    others = [
        changed(version=(3, 1, 0)),
        changed(digest="e"),
        changed(device="Xeon"),
        changed(variables={"A": "2"}),
        changed(cpu_flags=["avx512_fp16"]),
        changed(driver="13.0"),
    ]
    assert len({same, *others}) == 7


def test_only_variables_of_the_backend_are_recorded():
    from pybnorm.check.run.environment import variables

    given = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OMP_NUM_THREADS": "4",
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUDA_VISIBLE_DEVICES": "1",
        "HIP_VISIBLE_DEVICES": "1",
        "MIOPEN_FIND_MODE": "1",
        "PYBNORM_LIB_ONEDNN": "/x",
        "PYBNORM_LIB_CUDNN": "/y",
        "HOME": "/root",
    }
    assert set(variables("onednn", given)) == {"ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "PYBNORM_LIB_ONEDNN"}
    assert set(variables("cudnn", given)) == {"NVIDIA_TF32_OVERRIDE", "PYBNORM_LIB_CUDNN"}
    assert set(variables("miopen", given)) == {"MIOPEN_FIND_MODE"}
