"""Executors of cases: processes of this machine, this process, or a dask cluster.

Each is a :class:`concurrent.futures.Executor` for one backend. A dask worker, too, gives its cases to a process of its
own (`pybnorm.check.run.worker`), so a library that dies or hangs costs one case.

=========  ==========================================================================================================
pool       worker processes: for a library on the CPU as many as there are cores, with the cores divided among their
           OpenMP threads (jobs x OMP_NUM_THREADS = cores, unless that variable is set); for a GPU one per device, the
           device chosen by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES before the library is loaded
process    this process, without isolation or time-out
dask       ``dask:ADDRESS`` the cluster of a scheduler, ``dask`` alone a cluster on this machine
=========  ==========================================================================================================

A dask worker that cannot run the library is named and gets no case of it. When a worker ends or is silent, and how
often a case is tried again, dask's own settings say. What a scheduler sends is unpickled: it is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from pybnorm import __version__, _core, devices
from pybnorm._arrays import CPU, CUDA
from pybnorm.check.judging import known_defects
from pybnorm.check.judging.results import BackendInfo, CaseResult, LostNode, is_implementation
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import environment, implementations, support
from pybnorm.check.run.runner import run_recorded
from pybnorm.check.run.session import Session, describe, identified, label_of, open_session, override
from pybnorm.check.run.worker import TimeLimitError, Worker, failed
from pybnorm.errors import ArgumentError

NAMES = ("pool", "process", "dask")
TIMEOUT = 300.0
"""Seconds that a case may take by default."""
_GRACE = 30.0
"""Seconds that a dask worker has for its answer beyond the time of its call."""
_RESTART = 10.0
"""Seconds without any worker after which a dask cluster has none left."""
_TRIES = 3
"""Calls of one case that get no answer from a dask cluster, before the case is given up."""
_THREADS = "OMP_NUM_THREADS"


def described(backend: str, describe: Callable[[], list[BackendInfo]], option: str = "--timeout") -> list[BackendInfo]:
    """The answer of `describe`, or that the process died or took longer than `option` says."""
    try:
        return describe()
    except Exception as error:
        problem, what = f"{type(error).__name__}: {error}", "the process died while it loaded the file"
        if isinstance(error, TimeLimitError):
            problem = f"did not answer in {error.seconds:g} s ({option})"
            what = "the process did not answer in time"
        named = override(backend)
        attempts = ((named, os.environ[named], what),) if named else ()
        return [BackendInfo(backend, label=label_of(backend), problem=problem, attempts=attempts, override=named)]


class Farm:
    """Somewhere that backends can run."""

    @property
    def lost(self) -> list[LostNode]:
        """Nodes that were taken out."""
        return []

    def describe(self, backend: str) -> list[BackendInfo]:
        """The libraries of `backend` there that differ. Raises what a loading library does to its process."""
        return [describe(backend)]

    def executor(self, backend: str, cases: int) -> Executor:
        """An executor of up to `cases` calls at a time on `backend`; here on one thread, whose device is current."""
        return ThreadPoolExecutor(1)


@contextlib.contextmanager
def opened(
    name: str, *, jobs: int | None = None, timeout: float | None = None, share: tuple[int, int] | None = None
) -> Iterator[Farm]:
    """The farm of an option's value, open for the duration of a ``with`` block.

    `jobs`: worker processes of ``pool`` and of ``dask`` on this machine. `timeout`: seconds for each call; not for
    ``process``. `share`: (k, n) for a ``pool`` of one process with the k-th of n shares of the machine, from 0.
    Raises ArgumentError: another name, an option that the executor has not, or no cluster.
    """
    kind, _, address = name.partition(":")
    if kind not in NAMES or (address and kind != "dask"):
        raise ArgumentError("--executor", name, "pool | process | dask | dask:ADDRESS")
    if jobs is not None and (kind == "process" or address):
        raise ArgumentError("--jobs", jobs, f"not with --executor {name}, whose processes are already there")
    if kind == "pool":
        yield _Local(jobs, timeout, share)
    elif kind == "process":
        yield Farm()
    else:
        with contextlib.ExitStack() as stack:
            yield _Cluster(_client(stack, name, jobs or cores()), timeout)


def _client(stack: contextlib.ExitStack, name: str, workers: int) -> Any:
    """A client of the scheduler that `name` has the address of, or of a cluster on this machine; `stack` closes it."""
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        allowed = f"dask with its package: pip install 'pybnorm[dask]' ({error})"
        raise ArgumentError("--executor", "dask", allowed) from None
    stack.enter_context(_quiet("distributed"))
    address = name.partition(":")[2]
    target: Any = address
    if not address:
        # With None dask still serves HTTP at port 8787, and warns where another run has it.
        options = {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}
        cluster = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, **options)
        target = stack.enter_context(cluster)
    seconds = _patience()
    try:
        if address:
            # in a thread, as a notebook's has an event loop of its own
            ThreadPoolExecutor(1).submit(asyncio.run, _greet(distributed, address, seconds)).result()
        client = stack.enter_context(distributed.Client(target, timeout=seconds, set_as_default=False))
        client.wait_for_workers(1, timeout=seconds)
    except (OSError, ValueError, TypeError) as error:  # TypeError: TLS without certificates
        allowed = (
            f"the address of a dask scheduler that answers, and has a worker, in {seconds:g} s ({error}); "
            "dask's setting distributed.comm.timeouts.connect gives it longer"
        )
        raise ArgumentError("--executor", name, allowed) from None
    return client


def _patience() -> float:
    """Seconds that dask gives a connection."""
    import dask

    setting = dask.config.get("distributed.comm.timeouts.connect")
    try:
        return float(dask.utils.parse_timedelta(setting, "s"))
    except (LookupError, TypeError, ValueError):
        allowed = "a time such as 30s in dask's setting distributed.comm.timeouts.connect"
        raise ArgumentError("--executor", repr(setting), allowed) from None


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

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """Call an importable function in a worker process."""
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

    def describe(self, backend: str) -> list[BackendInfo]:
        with Worker(backend, timeout=self._timeout) as worker:
            info = worker.describe()
            if not info.problem:
                self._places[backend] = worker.call(place, backend, timeout=self._timeout)
        if backend in self._places:
            known = os.environ | self._variables(backend)[0]
            info = identified(dataclasses.replace(info, variables=environment.variables(backend, known)))
        return [info]

    def _variables(self, backend: str) -> list[dict[str, str]]:
        if self._share is None:
            return environments(*self._places[backend], self._jobs)
        number, shares = self._share
        return [environments(*self._places[backend], shares)[number % shares]]

    def executor(self, backend: str, cases: int) -> Executor:
        variables = self._variables(backend)[: max(1, cases)]
        return Pool([Worker(backend, timeout=self._timeout, environment=v) for v in variables])


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def place(backend: str) -> tuple[int, int]:
    """(DLPack device type, number of devices) of a backend; its library must be loadable in this process."""
    found: Any = implementations.load(backend) if is_implementation(backend) else _core.load(backend)
    return found.device_type, devices.device_count(found.device_type)


def environments(kind: int, count: int, jobs: int | None = None) -> list[dict[str, str]]:
    """The variables of each worker process, which say what part of the machine is its own.

    `kind`: DLPack device type of the backend. `count`: devices of that type. `jobs`: processes; by default one per core
    (and OMP_NUM_THREADS), or one per GPU.
    """
    if kind == CPU:
        given = os.environ.get(_THREADS, "").partition(",")[0]
        threads = int(given) if given.isdigit() and int(given) else 0
        jobs = jobs or max(1, cores() // (threads or 1))
        return [{} if threads else {_THREADS: str(max(1, cores() // jobs))} for _ in range(jobs)]
    name = "CUDA_VISIBLE_DEVICES" if kind == CUDA else "HIP_VISIBLE_DEVICES"
    visible = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
    visible = (visible or [str(i) for i in range(count)])[:count]
    jobs = jobs or count
    return [{} if count == 1 else {name: visible[i % count]} for i in range(jobs)]


class NotRunError(RuntimeError):
    """A call that no dask worker could make."""


class _Cluster(Farm):
    """The workers that a dask cluster has when the run begins."""

    def __init__(self, client: Any, timeout: float | None) -> None:
        self._client, self._timeout = client, timeout
        self._limit = None if timeout is None else timeout + _GRACE
        self._nodes: dict[str, tuple[str, str, int]] = {}
        """By address: name, host, and number among the workers of its host that were given the same devices."""
        self._able: dict[str, dict[str, dict[str, str]]] = {}
        """By backend and address, the variables of the process that holds the library."""
        self._unable: list[LostNode] = []
        self._threads: dict[str, int] = client.nthreads()
        places: Counter[tuple[str, str]] = Counter()
        for address, answer in self._ask(_patience(), greet, {address: () for address in self._threads}).items():
            if isinstance(answer, BaseException):
                self._unable.append(LostNode(f"worker {address}", "", "", _problem(answer)))
                continue
            name, host, visible, version = answer
            if version != __version__:
                problem = f"has pybnorm {version}, and this is {__version__}"
                self._unable.append(LostNode(f"worker {name}", host, "", problem))
                continue
            self._nodes[address] = f"worker {name}", host, places[host, visible]
            places[host, visible] += 1

    @property
    def lost(self) -> list[LostNode]:
        """The workers that could not be used, and those that are gone."""
        present = self._present()
        gone = [LostNode(*node[:2], "", "its worker is gone") for a, node in self._nodes.items() if a not in present]
        return [*self._unable, *gone]

    def _present(self) -> Mapping[str, int]:
        """The threads of the workers that are there, by address."""
        try:
            present: dict[str, int] = self._client.nthreads()
        except Exception:  # the scheduler is gone
            return {}
        return present

    def _ask(self, seconds: float | None, function: Any, arguments: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call `function` on workers, by address with its arguments; what each returned, or an exception."""
        import distributed

        futures = {
            address: self._client.submit(function, *values, workers=[address], allow_other_workers=False, pure=False)
            for address, values in arguments.items()
        }
        end = None if seconds is None else time.monotonic() + seconds
        for future in futures.values():
            with contextlib.suppress(distributed.TimeoutError, distributed.CancelledError):
                future.exception(None if end is None else max(0.0, end - time.monotonic()))
        silence = NotRunError(f"gave no answer in {seconds or 0:g} s")
        return {
            address: f.result() if f.status == "finished" else f.exception() if f.status == "error" else silence
            for address, f in futures.items()
        }

    def describe(self, backend: str) -> list[BackendInfo]:
        arguments = {address: (backend, self._timeout, number) for address, (_, _, number) in self._nodes.items()}
        entries: dict[str, BackendInfo] = {}
        bad: list[Any] = []
        unable: list[LostNode] = []
        able = self._able[backend] = {}
        for address, answer in self._ask(self._limit, settled, arguments).items():
            info, variables = answer if isinstance(answer, tuple) else (answer, {})
            if problem := _problem(info):
                bad.append(info)
                unable.append(LostNode(*self._nodes[address][:2], backend, problem))
            else:
                able[address] = variables
                entries.setdefault(info.id, info)
        if entries:
            self._unable += unable
            return list(entries.values())
        first = next((b for b in bad if isinstance(b, BackendInfo)), *bad[:1])
        if isinstance(first, BackendInfo):
            return [first]
        raise first or NotRunError("no node is left: " + "; ".join(f"{n.node}: {n.reason}" for n in self._unable))

    def executor(self, backend: str, cases: int) -> Executor:
        able = self._able.get(backend, {address: {} for address in self._nodes})
        variables = {self._nodes[address][0]: own for address, own in able.items() if own}
        # where all can run it so can a worker that joins or begins again, which has another address
        chosen = None if len(able) == len(self._threads) else list(able)
        submit = functools.partial(self._client.submit, on_worker, variables, self._timeout, workers=chosen, pure=False)
        threads = sum(self._threads[address] for address in able)
        return Tasks(submit, threads, self._limit, lambda: any(a in (chosen or [a]) for a in self._present()))


class Tasks(Executor):
    """Calls on a dask cluster's workers; the scheduler has no more of them than its workers can make at a time.

    Dask suspects every call that a worker has when it ends, those that wait there too: so none waits there.
    """

    def __init__(
        self, submit: Callable[..., Any], threads: int, limit: float | None, left: Callable[[], object]
    ) -> None:
        self._dask, self._limit, self._left = submit, limit, left
        self._threads = ThreadPoolExecutor(max(1, threads), thread_name_prefix="pybnorm dask")
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        self._closed = ""
        """Why no call is made any more."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:  # type: ignore[override]
        """Call an importable function on some worker."""
        return self._threads.submit(self._call, fn, args)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make a call; again where its connection broke or its worker was silent, and it has no answer."""
        import distributed

        for _ in range(_TRIES):
            with self._lock:
                if self._closed:
                    raise NotRunError(self._closed)
                task = self._dask(fn, *args)
                self._open.add(task)
            with contextlib.suppress(distributed.TimeoutError, distributed.CancelledError):
                task.exception(self._limit)
            self._open.discard(task)
            if task.status in ("finished", "error"):
                return task.result()
            if not self._is_left():
                self._closed = "no worker is left"
        raise NotRunError(self._closed or f"no worker gave an answer in {self._limit or 0:g} s")

    def _is_left(self) -> bool:
        """Say whether a worker is there; one that its nanny starts again has `_RESTART` seconds to come back."""
        end = time.monotonic() + _RESTART
        while not (left := bool(self._left())) and not self._closed and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End after the calls in progress if `wait`, else without their answers."""
        self._threads.shutdown(wait=False, cancel_futures=cancel_futures or not wait)
        if not wait:
            with self._lock:
                self._closed = "the run has ended"
            for task in list(self._open):
                task.cancel()
        self._threads.shutdown(wait=True)


def greet() -> tuple[str, str, str, str]:
    """The name, the host, the visible devices and the version of this dask worker."""
    import distributed

    return str(distributed.get_worker().name), socket.gethostname(), environment.visible(), __version__


def on_worker(
    variables: Mapping[str, Mapping[str, str]],
    timeout: float | None,
    function: Callable[..., Any],
    opener: Callable[[str], Session],
    backend: str,
    *arguments: Any,
) -> Any:
    """Call `run_recorded` in a process of this dask worker, with its own of the `variables`."""
    import distributed

    name = f"worker {distributed.get_worker().name}"
    result, info = isolated(backend, timeout, variables.get(name, {}), function, opener, backend, *arguments)
    result.node = name
    return result, info


def _problem(answer: BackendInfo | BaseException) -> str:
    """Why a worker that gave this answer cannot be used; empty if it can."""
    if isinstance(answer, BackendInfo):
        tried = [f"{file}: {why}" for _, file, why in answer.attempts] if answer.override else []
        return "; ".join(filter(None, [answer.problem, *tried]))
    return str(answer) if isinstance(answer, NotRunError) else f"{type(answer).__name__}: {answer}"


_kept: dict[tuple[str, tuple[tuple[str, str], ...]], list[Worker]] = {}  # idle processes, by backend and variables
_keeping = threading.Lock()


def isolated(
    backend: str, timeout: float | None, variables: Mapping[str, str], function: Callable[..., Any], *arguments: Any
) -> Any:
    """`pybnorm.check.run.worker.Worker.call` in a process kept for `backend` and `variables`; for any thread."""
    with _keeping:
        idle = _kept.setdefault((backend, tuple(sorted(variables.items()))), [])
        worker = idle.pop() if idle else Worker(backend, environment=variables)
    try:
        return worker.call(function, *arguments, timeout=timeout)
    finally:
        with _keeping:
            idle.append(worker)


def settled(backend: str, timeout: float | None, index: int) -> tuple[BackendInfo, dict[str, str]]:
    """The library of `backend` on this node, the `index`-th of its host, and the variables of its process."""
    info: BackendInfo = isolated(backend, timeout, {}, describe, backend)
    if info.problem:
        return info, {}
    kind, count = isolated(backend, timeout, {}, place, backend)
    own = {} if kind == CPU else environments(kind, count, index + 1)[index]
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
    """The results of `problems`, as they are finished, with known defects looked up; closing it cancels the rest.

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
            problem = futures.pop(finished)
            try:
                result, ran = finished.result()
            except Exception as error:
                result, ran = failed(info.backend, str(problem), error), None
            del finished  # with what it holds: the description of a library, of every case
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
