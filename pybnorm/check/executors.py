"""Where cases run: processes of this machine, this process, the ranks of an MPI job, or a dask cluster.

Each is a :class:`concurrent.futures.Executor` for one backend whose calls happen in a process that holds the backend's
library. A rank or a dask worker gives its cases to a process of its own (`pybnorm.check.worker`), so a library that
dies or hangs costs one case there too, and never the job.

=========  ==========================================================================================================
pool       worker processes: for a library on the CPU as many as there are cores, with the cores divided among their
           OpenMP threads (jobs x OMP_NUM_THREADS = cores, unless that variable is set); for a GPU one per device, the
           device chosen by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES before the library is loaded
process    this process, without isolation or time-out
mpi        the other ranks: ``mpiexec -n N python -m mpi4py.futures -m pybnorm check --executor mpi``; devices and
           threads of a rank are the launcher's matter
dask       ``dask:ADDRESS`` the cluster of a scheduler, ``dask`` alone a cluster on this machine
=========  ==========================================================================================================
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import Any, Protocol

from pybnorm import devices
from pybnorm._arrays import CPU, CUDA
from pybnorm._find import SPECS
from pybnorm.check import claims, defects
from pybnorm.check.problem import Problem
from pybnorm.check.runner import (
    BackendInfo,
    CaseResult,
    Session,
    describe,
    device_type,
    open_session,
    override,
    run_line,
)
from pybnorm.check.worker import TimeLimitError, Worker, failed
from pybnorm.errors import ArgumentError

__all__ = [
    "NAMES",
    "TIMEOUT",
    "TIMEOUT_MAX",
    "Farm",
    "Pool",
    "check_timeout",
    "described",
    "environments",
    "isolated",
    "opened",
    "run_cases",
]

NAMES = ("pool", "process", "mpi", "dask")
TIMEOUT = 300.0
"""Seconds that a case may take where nobody says."""
TIMEOUT_MAX = 1e6
"""The most seconds: eleven days; a wait for a pipe takes no more than 24."""
_THREADS = "OMP_NUM_THREADS"


def check_timeout(option: str, seconds: float | None) -> None:
    """Refuse what is no time to wait.

    Raises
    ------
    ArgumentError
        It is neither None nor a number above 0 and at most `TIMEOUT_MAX`.
    """
    if seconds is not None and not 0 < seconds <= TIMEOUT_MAX:
        raise ArgumentError(option, seconds, f"seconds > 0, at most {TIMEOUT_MAX:.0f}")


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
        return BackendInfo(backend, label=SPECS[backend].label, problem=problem, attempts=attempts, override=named)


class Farm(Protocol):
    """Somewhere that backends can run."""

    def describe(self, backend: str) -> BackendInfo:
        """What there is of `backend` there. Raises what the loading library does to its process."""
        ...

    def executor(self, backend: str, cases: int) -> Executor:
        """For up to `cases` calls at a time on `backend`."""
        ...


@contextlib.contextmanager
def opened(
    name: str,
    *,
    jobs: int | None = None,
    timeout: float | None = None,
    share: tuple[int, int] | None = None,
) -> Iterator[Farm | None]:
    """The farm of an option's value, open for the duration of a ``with`` block.

    Parameters
    ----------
    name : str
        ``pool``, ``process``, ``mpi``, ``dask`` or ``dask:ADDRESS``.
    jobs : int, optional
        Worker processes of ``pool`` and of ``dask`` on this machine.
    timeout : float, optional
        Seconds for each call; not for ``process``.
    share : tuple of int, optional
        (k, n) for a ``pool`` of one process with the k-th of n shares of the machine, the first being 0.

    Yields
    ------
    Farm or None
        None on an MPI rank that only served the first one, and has nothing to do or print.

    Raises
    ------
    ArgumentError
        Another name, an option that the executor has not, or a package that is not installed.
    """
    kind, _, address = name.partition(":")
    if kind not in NAMES or (address and kind != "dask"):
        raise ArgumentError("--executor", name, "pool | process | mpi | dask | dask:ADDRESS")
    if jobs is not None and (kind in ("process", "mpi") or address):
        raise ArgumentError("--jobs", jobs, f"not with --executor {name}, whose processes are already there")
    if kind == "pool":
        yield _Local(jobs, timeout, share)
    elif kind == "process":
        yield _Here()
    elif kind == "mpi":
        with _imported("mpi4py.futures", "mpi").MPICommExecutor() as executor:
            yield None if executor is None else _Remote(executor, timeout)
    else:
        distributed = _imported("distributed", "dask")
        with contextlib.ExitStack() as stack:
            target: Any = address
            if not address:
                workers = jobs or cores()
                target = stack.enter_context(
                    distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
                )
            try:
                client = stack.enter_context(distributed.Client(target, timeout=30, set_as_default=False))
            except (OSError, ValueError) as error:
                raise ArgumentError("--executor", name, f"the address of a dask scheduler ({error})") from None
            yield _Remote(client.get_executor(), timeout)


def _imported(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        allowed = f"{extra} with its package: pip install 'pybnorm[{extra}]' ({error})"
        raise ArgumentError("--executor", extra, allowed) from None


# ---------------------------------------------------------------- this machine


class Pool(Executor):
    """Worker processes of one backend; a call takes the next idle one.

    Parameters
    ----------
    workers : sequence of Worker
        Become the pool's.
    """

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
                worker.kill()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.close()


class _Local:
    def __init__(self, jobs: int | None, timeout: float | None, share: tuple[int, int] | None) -> None:
        self._jobs, self._timeout, self._share = jobs, timeout, share
        self._places: dict[str, tuple[int, int]] = {}

    def describe(self, backend: str) -> BackendInfo:
        with Worker(backend, timeout=self._timeout) as worker:
            info = worker.describe()
            if not info.problem:
                self._places[backend] = worker.call(place, backend, timeout=self._timeout)
        return info

    def executor(self, backend: str, cases: int) -> Executor:
        if self._share is not None:
            number, shares = self._share
            variables = [environments(*self._places[backend], jobs=shares)[number % shares]]
        else:
            variables = environments(*self._places[backend], jobs=self._jobs)[: max(1, cases)]
        return Pool([Worker(backend, timeout=self._timeout, environment=v) for v in variables])


class _Here:
    def describe(self, backend: str) -> BackendInfo:
        return describe(backend)

    def executor(self, backend: str, cases: int) -> Executor:
        # one thread, because a device is current on the thread that opened it
        return ThreadPoolExecutor(1)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def place(backend: str) -> tuple[int, int]:
    """(DLPack device type, devices) of a backend whose library can be loaded into this process."""
    kind = device_type(backend)
    return kind, devices.device_count(kind)


def environments(
    kind: int, count: int, *, jobs: int | None = None, variables: Mapping[str, str] | None = None
) -> list[dict[str, str]]:
    """The variables of each worker process, which say what part of the machine is its own.

    Parameters
    ----------
    kind : int
        DLPack device type of the backend.
    count : int
        Devices of that type.
    jobs : int, optional
        Processes; by default one per core (and OMP_NUM_THREADS), or one per GPU.
    variables : mapping, optional
        The environment; this process's by default.
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


# ---------------------------------------------------------------- other processes' processes


class _Remote:
    def __init__(self, executor: Executor, timeout: float | None) -> None:
        self._executor, self._timeout = executor, timeout

    def describe(self, backend: str) -> BackendInfo:
        info: BackendInfo = self.executor(backend, 1).submit(describe, backend).result()
        return info

    def executor(self, backend: str, cases: int) -> Executor:
        return _Isolating(self._executor, backend, self._timeout)


class _Isolating(Executor):
    """Calls on another executor, each in a process that its worker keeps for the backend."""

    def __init__(self, inner: Executor, backend: str, timeout: float | None) -> None:
        self._inner, self._backend, self._timeout = inner, backend, timeout

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._inner.submit(isolated, self._backend, self._timeout, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass  # the inner executor serves the next backend


_kept: dict[str, list[Worker]] = {}  # idle processes, by backend
_keeping = threading.Lock()


def isolated(backend: str, timeout: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a process that this one keeps for `backend`; for any thread.

    Raises
    ------
    DiedError, TimeLimitError
        As `pybnorm.check.worker.Worker.call`.
    Exception
        What the function raised.
    """
    with _keeping:
        idle = _kept.setdefault(backend, [])
        worker = idle.pop() if idle else Worker(backend)
    try:
        return worker.call(function, *arguments, timeout=timeout)
    finally:
        with _keeping:
            idle.append(worker)


# ---------------------------------------------------------------- cases


def run_cases(
    executor: Executor,
    info: BackendInfo,
    problems: Sequence[Problem],
    keep: str | None = None,
    opener: Callable[[str], Session] = open_session,
) -> Generator[CaseResult, None, None]:
    """The results of `problems`, as they are finished, with known defects looked up.

    Closing the generator cancels what has not begun.

    Parameters
    ----------
    executor : Executor
        Of the backend.
    info : BackendInfo
        Of the library that runs there.
    problems : sequence of Problem
    keep : str, optional
        As in `pybnorm.check.runner.run_case`.
    opener : callable, optional
        Importable function that opens the session.
    """
    futures = {executor.submit(run_line, opener, info.backend, str(p), keep): p for p in problems}
    try:
        for future in as_completed(futures):
            problem = futures[future]
            try:
                result: CaseResult = future.result()
            except Exception as error:
                result = failed(info.backend, str(problem), error)
            yield annotated(result, info, problem)
    finally:
        for future in futures:
            future.cancel()


def annotated(result: CaseResult, info: BackendInfo, problem: Problem) -> CaseResult:
    """`result` with `known`: damage, a failing check of trust or a lost claim is nothing that a defect explains."""
    if not (result.verdicts and result.message) and result.claim != claims.NEWLY_UNSUPPORTED:
        known = defects.explain(info.backend, info.version, problem, result.verdicts, result.status, result.message)
        result.known = ", ".join(d.id for d in known)
    return result
