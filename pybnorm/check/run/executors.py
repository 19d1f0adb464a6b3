"""Where cases run: processes of this machine, this process, or a dask cluster.

Each is a :class:`concurrent.futures.Executor` for one backend whose calls happen in a process that holds the backend's
library. A dask worker gives its cases to a process of its own (`pybnorm.check.run.worker`), so a library that
dies or hangs costs one case there too, and never the job.

=========  ==========================================================================================================
pool       worker processes: for a library on the CPU as many as there are cores, with the cores divided among their
           OpenMP threads (jobs x OMP_NUM_THREADS = cores, unless that variable is set); for a GPU one per device, the
           device chosen by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES before the library is loaded
process    this process, without isolation or time-out
dask       ``dask:ADDRESS`` the cluster of a scheduler, ``dask`` alone a cluster on this machine
=========  ==========================================================================================================

Dask workers are nodes (`pybnorm.check.run.nodes`): a node that cannot run the library is named and taken out,
and nodes of one host get a GPU each, unless their launcher gave each its own. Threads are the launcher's matter.

A dask scheduler is trusted: what it sends is unpickled, so it and all who can connect to it can run code here. On a
network that is not trusted, use TLS: ``dask:tls://HOST:8786``, with certificates from distributed's own configuration
(``distributed.comm.tls`` in ``~/.config/dask``, or ``DASK_DISTRIBUTED__COMM__TLS__CA_FILE`` and so on).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one from Python 3.11
from typing import Any

from pybnorm import devices
from pybnorm._arrays import CPU, CUDA
from pybnorm.check.judging import known_defects
from pybnorm.check.judging.results import BackendInfo, CaseResult, LostNode, is_implementation
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import environment, support
from pybnorm.check.run.nodes import GRACE, DaskNodes, Dealer, Node, NotRunError, greeted
from pybnorm.check.run.runner import run_recorded
from pybnorm.check.run.session import Session, describe, device_type, identified, label_of, open_session, override
from pybnorm.check.run.worker import TimeLimitError, Worker, failed
from pybnorm.errors import ArgumentError

NAMES = ("pool", "process", "dask")
TIMEOUT = 300.0
"""Seconds that a case may take by default."""
CONNECT = 30.0
"""Seconds that a scheduler and its workers have to answer."""
_THREADS = "OMP_NUM_THREADS"


def described(backend: str, describe: Callable[[], BackendInfo], option: str = "--timeout") -> BackendInfo:
    """What `describe` says of `backend`; if its process died while it loaded the library, or did not answer, that.

    `option` is what the user sets the time with.
    """
    try:
        return describe()
    except Exception as error:
        if isinstance(error, TimeLimitError):
            problem = f"did not answer in {error.seconds:g} s ({option})"
            what = "the process did not answer in time"
        else:
            problem = f"{type(error).__name__}: {error}"
            what = "the process died while it loaded the file"
        named = override(backend)
        attempts = ((named, os.environ[named], what),) if named else ()
        return BackendInfo(backend, label=label_of(backend), problem=problem, attempts=attempts, override=named)


class Farm:
    """Somewhere that backends can run."""

    lost: list[LostNode] = []  # noqa: RUF012 (of one machine, which is never lost: it stays empty)
    """Nodes that were taken out."""

    def describe(self, backend: str) -> BackendInfo:
        """What there is of `backend` there. Raises what the loading library does to its process."""
        raise NotImplementedError

    def others(self, backend: str) -> list[BackendInfo]:
        """What else there is of `backend` on nodes that differ from those of `describe`, which comes first."""
        return []

    def executor(self, backend: str, cases: int) -> Executor:
        """For up to `cases` calls at a time on `backend`."""
        raise NotImplementedError


@contextlib.contextmanager
def opened(
    name: str,
    *,
    jobs: int | None = None,
    timeout: float | None = None,
    share: tuple[int, int] | None = None,
    connect: float | None = None,
) -> Iterator[Farm]:
    """The farm of an option's value, open for the duration of a ``with`` block.

    `jobs`: worker processes of ``pool`` and of ``dask`` on this machine. `timeout`: seconds for each call; not for
    ``process``. `share`: (k, n) for a ``pool`` of one process with the k-th of n shares of the machine, from 0.
    `connect`: seconds that the scheduler of ``dask``, and then its workers, have to answer. Raises ArgumentError:
    another name, an option that the executor has not, a package that is not installed, or no node but this one.
    """
    kind, _, address = name.partition(":")
    if kind not in NAMES or (address and kind != "dask"):
        raise ArgumentError("--executor", name, "pool | process | dask | dask:ADDRESS")
    if jobs is not None and (kind == "process" or address):
        raise ArgumentError("--jobs", jobs, f"not with --executor {name}, whose processes are already there")
    if connect is not None and kind != "dask":
        raise ArgumentError("--scheduler-timeout", connect, f"with --executor dask, not {name}")
    if kind == "pool":
        yield _Local(jobs, timeout, share)
    elif kind == "process":
        yield _Here()
    else:
        try:
            distributed = importlib.import_module("distributed")
        except ImportError as error:
            allowed = f"dask with its package: pip install 'pybnorm[dask]' ({error})"
            raise ArgumentError("--executor", "dask", allowed) from None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet("distributed"))
            target: Any = address
            if not address:
                workers = jobs or cores()
                cluster = distributed.LocalCluster(
                    n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
                target = stack.enter_context(cluster)
            seconds = connect or CONNECT
            try:
                if address:
                    # in a thread, as a notebook's has an event loop of its own
                    ThreadPoolExecutor(1).submit(asyncio.run, _greet(distributed, address, seconds)).result()
                client = stack.enter_context(distributed.Client(target, timeout=seconds, set_as_default=False))
            except (OSError, ValueError, TypeError) as error:  # TypeError: TLS without certificates
                allowed = (
                    f"the address of a dask scheduler that answers in {seconds:g} s, --scheduler-timeout ({error})"
                )
                raise ArgumentError("--executor", name, allowed) from None
            try:
                client.wait_for_workers(1, timeout=seconds)
            except OSError as error:
                allowed = f"a scheduler that has a worker within {seconds:g} s, --scheduler-timeout ({error})"
                raise ArgumentError("--executor", name, allowed) from None
            found = stack.enter_context(contextlib.closing(DaskNodes(client)))
            yield _Remote(found.nodes, timeout, seconds)


async def _greet(distributed: Any, address: str, seconds: float) -> None:
    """Shake hands with a scheduler: a client waits for ever where a port is open and not one's, as a dashboard's is."""
    options = distributed.Security().get_connection_args("client")
    try:
        meeting = distributed.comm.connect(address, timeout=seconds, **options)
        comm = await asyncio.wait_for(meeting, seconds + 1)  # that it cannot connect, it says itself
    except (asyncio.TimeoutError, MemoryError):  # silence, or words that it takes for an enormous length
        raise OSError("what listens there is no dask scheduler; a dashboard has a port of its own") from None
    await comm.close()


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a package's loggers: messages about the end of its cluster are no part of a report."""
    names = [n for n in (name, *logging.root.manager.loggerDict) if n == name or n.startswith(f"{name}.")]
    before = {logger: logger.level for logger in map(logging.getLogger, names)}  # some have a level of their own
    for logger in before:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


class Pool(Executor):
    """Worker processes of one backend, which become the pool's; a call takes the next idle one."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = tuple(workers)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="pybnorm pool")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call an importable function in a worker process."""
        if kwargs:
            raise TypeError("a worker's calls have positional arguments only")
        return self._threads.submit(self._call, fn, args)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(fn, *args, timeout=worker.timeout)
        finally:
            self._idle.put(worker)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, after the calls in progress if `wait`, else at once."""
        self._threads.shutdown(wait=False, cancel_futures=cancel_futures or not wait)
        if not wait:
            for worker in self._workers:
                worker.end()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.close()


class _Local(Farm):
    def __init__(self, jobs: int | None, timeout: float | None, share: tuple[int, int] | None) -> None:
        self._jobs, self._timeout, self._share = jobs, timeout, share
        self._places: dict[str, tuple[int, int]] = {}

    def describe(self, backend: str) -> BackendInfo:
        with Worker(backend, timeout=self._timeout) as worker:
            info = worker.describe()
            if not info.problem:
                self._places[backend] = worker.call(place, backend, timeout=self._timeout)
        if backend in self._places:
            known = os.environ | self._variables(backend)[0]
            info = identified(dataclasses.replace(info, variables=environment.variables(backend, known)))
        return info

    def _variables(self, backend: str) -> list[dict[str, str]]:
        if self._share is None:
            return environments(*self._places[backend], jobs=self._jobs)
        number, shares = self._share
        return [environments(*self._places[backend], jobs=shares)[number % shares]]

    def executor(self, backend: str, cases: int) -> Executor:
        variables = self._variables(backend)[: max(1, cases)]
        return Pool([Worker(backend, timeout=self._timeout, environment=v) for v in variables])


class _Here(Farm):
    def describe(self, backend: str) -> BackendInfo:
        return describe(backend)

    def executor(self, backend: str, cases: int) -> Executor:
        # one thread, because a device is current on the thread that opened it
        return ThreadPoolExecutor(1)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def place(backend: str) -> tuple[int, int]:
    """(DLPack device type, number of devices) of a backend; its library must be loadable in this process."""
    kind = device_type(backend)
    return kind, devices.device_count(kind)


def environments(
    kind: int, count: int, *, jobs: int | None = None, variables: Mapping[str, str] | None = None
) -> list[dict[str, str]]:
    """The variables of each worker process, which say what part of the machine is its own.

    `kind`: DLPack device type of the backend. `count`: devices of that type. `jobs`: processes; by default one per core
    (and OMP_NUM_THREADS), or one per GPU. `variables`: the environment; this process's by default.
    """
    known = os.environ if variables is None else variables
    if kind == CPU:
        given = known.get(_THREADS, "").partition(",")[0]
        threads = int(given) if given.isdigit() and int(given) else 0
        jobs = jobs or max(1, cores() // (threads or 1))
        return [{} if threads else {_THREADS: str(max(1, cores() // jobs))} for _ in range(jobs)]
    name = "CUDA_VISIBLE_DEVICES" if kind == CUDA else "HIP_VISIBLE_DEVICES"
    visible = [part.strip() for part in known.get(name, "").split(",") if part.strip()]
    visible = (visible or [str(i) for i in range(count)])[:count]
    jobs = jobs or count
    return [{} if count == 1 else {name: visible[i % count]} for i in range(jobs)]


class _Remote(Farm):
    def __init__(self, nodes: Sequence[Node], timeout: float | None, connect: float | None) -> None:
        self._nodes, self._timeout = nodes, timeout
        self._limit = None if timeout is None else timeout + GRACE
        self._able: dict[str, list[Node]] = {}
        self._entries: dict[str, list[BackendInfo]] = {}
        self.lost = [LostNode(node.name, node.host, "", reason) for node, reason in greeted(nodes, connect)]

    def describe(self, backend: str) -> BackendInfo:
        asked = [(n, n.submit(settled, backend, self._timeout, n.index)) for n in self._nodes if not n.ended]
        entries: dict[str, BackendInfo] = {}
        lost, bad = [], []
        self._able[backend] = []
        for node, future in asked:
            try:
                info, node.environments[backend] = future.result(self._limit)
                tried = [f"{file}: {why}" for _, file, why in info.attempts] if info.override else []
                problem = "; ".join(filter(None, [info.problem, *tried]))
            except FutureTimeoutError:
                problem = node.ended = f"gave no answer in {self._limit:g} s"
            except (Exception, CancelledError) as error:
                bad.append(error)
                problem = f"{type(error).__name__}: {error}"
            else:
                if not problem:
                    self._able[backend].append(node)
                    entries.setdefault(info.id, info)
                    continue
                bad.append(info)
            lost.append(LostNode(node.name, node.host, backend, problem))
        self._entries[backend] = list(entries.values())
        if entries:
            self.lost += lost
            return self._entries[backend][0]
        first = next((b for b in bad if isinstance(b, BackendInfo)), *bad[:1])
        if isinstance(first, BackendInfo):
            return first
        raise first or NotRunError("no node is left: " + "; ".join(f"{n}: {n.ended}" for n in self._nodes))

    def others(self, backend: str) -> list[BackendInfo]:
        return self._entries.get(backend, [])[1:]

    def executor(self, backend: str, cases: int) -> Executor:
        def wrap(node: Node, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return isolated, backend, self._timeout, node.environments.get(backend, {}), function, *arguments

        return Dealer(self._able.get(backend, self._nodes), backend, wrap, self._limit, self.lost)


_kept: dict[tuple[str, tuple[tuple[str, str], ...]], list[Worker]] = {}  # idle processes, by backend and variables
_keeping = threading.Lock()


def isolated(
    backend: str, timeout: float | None, variables: Mapping[str, str], function: Callable[..., Any], *arguments: Any
) -> Any:
    """Call `function` in a process that this one keeps for `backend` and `variables`; for any thread.

    Raises what `pybnorm.check.run.worker.Worker.call` raises.
    """
    with _keeping:
        idle = _kept.setdefault((backend, tuple(sorted(variables.items()))), [])
        worker = idle.pop() if idle else Worker(backend, environment=variables)
    try:
        return worker.call(function, *arguments, timeout=timeout)
    finally:
        with _keeping:
            idle.append(worker)


def settled(backend: str, timeout: float | None, index: int) -> tuple[BackendInfo, dict[str, str]]:
    """What there is of `backend` on this node, and the variables of its process: a GPU of its own.

    `timeout`: seconds for each call. `index`: of this node among those of its host that have the same devices.
    """
    info: BackendInfo = isolated(backend, timeout, {}, describe, backend)
    if info.problem:
        return info, {}
    kind, count = isolated(backend, timeout, {}, place, backend)
    own = {} if kind == CPU else environments(kind, count, jobs=index + 1)[index]
    if own:
        info = isolated(backend, timeout, own, describe, backend)
        with _keeping:
            for worker in _kept.pop((backend, ()), []):
                worker.close()  # it may hold a context on the first device
    return info, own


def run_cases(
    executor: Executor,
    info: BackendInfo,
    problems: Sequence[Problem],
    keep: str | None = None,
    opener: Callable[[str], Session] = open_session,
    entries: dict[str, BackendInfo] | None = None,
    done: queue.SimpleQueue[Future[Any] | None] | None = None,
) -> Generator[CaseResult, None, None]:
    """The results of `problems`, as they are finished, with known defects looked up.

    Closing the generator cancels what has not begun.

    `info`: of the library that runs there. `keep`: as in `pybnorm.check.run.runner.run_case`. `opener`: importable
    function that opens the session. `entries`: gets the libraries that ran, by their `BackendInfo.id`. `done`: gets
    each finished future; a None that is put there ends the results, after those that are finished.
    """
    known = {} if entries is None else entries
    done = queue.SimpleQueue() if done is None else done
    futures: dict[Future[Any], Problem] = {}
    waits = True
    try:
        for problem in problems:
            future = executor.submit(run_recorded, opener, info.backend, str(problem), keep)
            futures[future] = problem
            future.add_done_callback(done.put)
        while futures:
            try:
                finished = done.get(block=waits)
            except queue.Empty:
                break
            if finished is None:
                waits = False
                continue
            problem = futures.pop(finished)  # with what it holds: the description of a library, of every case
            ran = None
            try:
                result, ran = finished.result()
            except Exception as error:
                result = failed(info.backend, str(problem), error)
            del finished
            if ran is not None:
                ran = known.setdefault(ran.id, ran)
            yield annotated(result, ran or info, problem)
    finally:
        for future in futures:
            future.cancel()


def annotated(result: CaseResult, info: BackendInfo, problem: Problem) -> CaseResult:
    """`result` with `known`. A known defect never explains damage, a failed check of trust or lost support."""
    explained = not (result.verdicts and result.message) and result.claim not in support.LOST
    if explained and not is_implementation(info.backend):
        verdict = result.verdicts, result.status, result.message
        known = known_defects.explain(info.backend, info.version, problem, *verdict, info.digest, info.device)
        result.known = ", ".join(d.id for d in known)
    return result
