"""A process that holds one backend's library, so that a library that dies or hangs costs one case only.

:mod:`multiprocessing` cannot start children from its own daemons (as dask's workers are) or end a call that hangs.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import BackendInfo, CaseResult
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import runner
from pybnorm.check.run.runner import run_line
from pybnorm.check.run.session import Session, describe, open_session
from pybnorm.errors import ArgumentError

_START = "import sys; sys.path[:] = {path!r}; from pybnorm.check.run.worker import serve; serve({calls}, {lifeline})"
TIMEOUT_MAX = 1e6
"""The most seconds: eleven days; a wait for a pipe takes no more than 24."""
_GRACE = 10.0
"""Seconds that a process has to end by itself after its pipe is closed."""


class DiedError(RuntimeError):
    """The process ended during a call."""


class TimeLimitError(RuntimeError):
    """The call took longer than it may, and the process was ended."""

    seconds = 0.0
    """Seconds that it may take."""


def check_timeout(option: str, seconds: float | None) -> None:
    """Raise an ArgumentError for what is neither None nor a number above 0 and at most `TIMEOUT_MAX`."""
    if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds <= TIMEOUT_MAX):
        raise ArgumentError(option, seconds, f"seconds > 0, at most {TIMEOUT_MAX:.0f}")


class Worker:
    """A process that holds one backend's library. Usable as a context manager.

    A case during which the process dies, by a signal or because the library called ``exit()``, is CRASHED; one that
    takes longer than `timeout` is TIMEOUT and its process is killed. The next case gets a new process.

    Parameters
    ----------
    backend : str
    opener : callable, optional
        Importable function that opens the session inside the process; `open_session` by default.
    timeout : float, optional
        Seconds that a case may take, the start of the process and of the library included.
    environment : mapping of str to str, optional
        Variables that the process has in addition to those of this one.

    Raises
    ------
    ArgumentError
        `timeout` is no number of seconds above 0.

    Examples
    --------
    >>> problem = pybnorm.check.Problem.parse("infer,spatial,f32,nchw,2x3x4x4")
    >>> with pybnorm.check.Worker("onednn", timeout=60) as worker:
    ...     result = worker.run(problem)
    >>> result.status.name
    'PASS'
    """

    def __init__(
        self,
        backend: str,
        opener: Callable[[str], Session] = open_session,
        *,
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        check_timeout("timeout", timeout)
        self.backend = backend
        self.timeout = timeout
        self.environment = dict(environment or {})
        self._opener = opener
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: Connection | None = None
        self._lifeline = -1
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return getattr(self._process, "pid", None)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
        """Call an importable function in the process, one call at a time; raises what it raised.

        Raises
        ------
        DiedError
            The process ended.
        TimeLimitError
            `timeout` seconds have passed; the process has been killed.
        """
        message = pickle.dumps((function, arguments))
        if self._process is not None and self._process.poll() is not None:
            self._forget()  # it was killed, or died, between two calls
        if self._process is None and not self._ended:
            self._start()
        if self._ended:  # perhaps while the process started, unseen by `end`
            self.kill()
            raise DiedError("the worker was ended before the call")
        process, calls = self._process, self._calls
        assert process is not None
        assert calls is not None
        try:
            calls.send_bytes(message)
            in_time = calls.poll(timeout)
            good, value = pickle.loads(calls.recv_bytes()) if in_time else (False, None)
        except (EOFError, OSError):
            self.kill()  # and every process that it has started
            self._forget()
            raise DiedError(f"the library's process died: {_ending(process)}") from None
        if not in_time:
            self.kill()
            self._forget()
            error = TimeLimitError(f"not done after {timeout:g} s; the process was killed")
            error.seconds = timeout or 0.0  # outside of the arguments, so that it survives pickling
            raise error
        if isinstance(value, Exception) and not good:
            raise value
        return value

    def describe(self) -> BackendInfo:
        """`pybnorm.check.run.session.describe` in the process: even loading a library cannot take this one down."""
        return self.call(describe, self.backend, timeout=self.timeout)

    def run(self, problem: Problem, keep: str | None = None) -> CaseResult:
        """Run one case; `keep` as in `pybnorm.check.run.runner.run_case`."""
        arguments = self._opener, self.backend, str(problem), keep
        try:
            result: CaseResult = self.call(run_line, *arguments, timeout=self.timeout)
        except Exception as error:
            return failed(self.backend, str(problem), error)
        return result

    def kill(self) -> None:
        """End the process at once, and what it has started. For any thread; a call in progress raises `DiedError`."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end(self) -> None:
        """`kill` for good: a call that has not reached the process raises `DiedError`, too, and starts no other."""
        self._ended = True
        self.kill()

    def close(self) -> None:
        """End the process."""
        process = self._process
        if process is not None:
            assert self._calls is not None
            self._calls.close()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.kill()
            self._forget()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        watched, self._lifeline = os.pipe()
        # copies above the numbers of the standard streams, which may be closed here and are set anew there
        passed = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (theirs.fileno(), watched)]
        code = _START.format(path=sys.path, calls=passed[0], lifeline=passed[1])
        # a library's own output must not get into a report on standard output
        stderr = subprocess.DEVNULL if sys.__stderr__ is None else 2
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | self.environment,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,  # a terminal's Ctrl-C does not reach it; the one that prints decides what ends
            )
        finally:
            theirs.close()
            for fd in (watched, *passed):
                os.close(fd)
        self._calls = ours

    def _forget(self) -> None:
        assert self._calls is not None
        self._calls.close()
        os.close(self._lifeline)
        self._process = self._calls = None


def failed(backend: str, case: str, error: BaseException) -> CaseResult:
    """The result of a case that raised an exception."""
    if isinstance(error, (DiedError, TimeLimitError)):
        status = Status.CRASHED if isinstance(error, DiedError) else Status.TIMEOUT
        return CaseResult(backend, case, status, message=str(error))
    # any other error kept the case from running; it is no verdict on the library
    status = Status.RESOURCE if isinstance(error, MemoryError) else Status.ERROR
    return CaseResult(backend, case, status, message=f"{type(error).__name__}: {error}")


def _ending(process: subprocess.Popen[bytes]) -> str:
    code, names = process.wait(), {number.value: number.name for number in signal.Signals}
    return f"exit status {code}" if code >= 0 else names.get(-code, f"signal {-code}")


def serve(calls: int, lifeline: int) -> None:
    """Answer the calls of a connection until it is closed; `lifeline` is a pipe that is closed when the owner ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner.own_process = True
    for fd in (calls, lifeline):
        os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_owner, args=(lifeline,), daemon=True).start()
    connection = Connection(calls)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(answered(message))
        if runner.device_lost():  # the next case gets a new context, which only a new program does
            for fd in (calls, lifeline):
                os.set_inheritable(fd, True)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def answered(message: bytes) -> bytes:
    """Make a pickled call, a function and its arguments: pickled, (True, result) or (False, what it raised)."""
    try:
        function, arguments = pickle.loads(message)
        return pickle.dumps((True, function(*arguments)))
    except Exception as error:
        with contextlib.suppress(Exception):
            answer = pickle.dumps((False, error))
            pickle.loads(answer)
            return answer
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


def _end_with_owner(lifeline: int) -> None:
    os.read(lifeline, 1)  # an owner that ends in order closes this after the process has ended
    os._exit(1)
