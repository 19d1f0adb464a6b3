"""Runs a problem on a backend, in this process, and judges it.

A case makes its call several times on equal inputs, each in fresh guarded memory (`pybnorm.check.run.guarded`). What
its data could not show, another fill shows in one more call; where none does, the case is MISTRUSTED.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pybnorm import _arguments, _core, errors
from pybnorm._arrays import CPU
from pybnorm._find import file_digest
from pybnorm._text import reason
from pybnorm.check.judging.bounds import Status, expect, judge
from pybnorm.check.judging.bounds.trust import blind_inputs
from pybnorm.check.judging.results import BackendInfo, CaseResult, is_implementation
from pybnorm.check.judging.standalone import as_numpy, settle
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import Inputs, generate
from pybnorm.check.language.problem import FILE, Problem, checked
from pybnorm.check.run import archive, fence, judge_devices, support
from pybnorm.check.run.environment import visible
from pybnorm.check.run.guarded import execute, same_bits
from pybnorm.check.run.implementations import CallError, Implementation
from pybnorm.check.run.session import Session, capability_words, describe
from pybnorm.diagnostics import vendor_stderr
from pybnorm.errors import ArgumentError
from pybnorm.reference.namespaces import Array, Namespace, on_host

NOT_KEPT = "the outputs could not be kept: "
"""Beginning of a reason at the end of a result's message; after it nothing more can be saved."""
own_process = False
"""Whether this process is a worker's, so that its standard error may be captured (`pybnorm.vendor_stderr`)."""
_BUILD = re.compile(r"compil|hiprtc|nvrtc|comgr|build program|code object", re.IGNORECASE)


def run_case(problem: Problem, session: Session, keep: str | None = None) -> CaseResult:
    """Run `problem` on `session` and judge it. Raises nothing that a library or its data can cause.

    Parameters
    ----------
    problem : Problem
    session : Session
    keep : str, optional
        Archive folder that the outputs of the first call are written to (`pybnorm.check.run.archive.write_outputs`).

    Returns
    -------
    CaseResult

    Examples
    --------
    >>> from pybnorm.check.run.session import open_session
    >>> problem = pybnorm.check.Problem.parse("infer,spatial,f32,nchw,2x3x4x4")
    >>> session = open_session("onednn")
    >>> with session.handle:
    ...     pybnorm.check.run_case(problem, session).status.name
    'PASS'
    """
    checked(problem)
    _arguments.instance(session, Session, "session", "a Session")
    result = CaseResult(session.backend, str(problem), Status.PASS, host=host(), visible=visible())
    asked = problem
    try:
        problem = session.claimed(problem)
        if problem.streams > 1 and session.device.device_type == CPU:
            raise CallError(Status.UNSUPPORTED, f"streams={problem.streams}: a CPU has no streams")
        if problem.fence and (why := fence.reason(session.device.device_type)):
            raise CallError(Status.UNSUPPORTED, f"fence={problem.fence}: {why}")
        judge_on = judge_devices.chosen(problem, session.device)
        result.judge = judge_on.name if judge_on else "numpy"
        capability = session.capability(problem)
        if not capability and isinstance(session.handle, _core.Handle):
            execute(problem, None, session)  # to be refused before data are made
        inputs = generate(problem, judge_on)
        if judge_on:
            judge_on.release()
        calls = _Calls(problem, inputs, session, judge_on)
        inputs = calls.inputs
        result.seconds = calls.seconds
        result.capability = capability_words(capability)
        expected = expect(problem, inputs)
        verdicts = judge_call(expected, calls.first)
        if problem.repeats > 1:
            result.repeat = ", ".join(dict.fromkeys(name for name, _, _ in calls.different)) or "equal"
        for name, number, values in calls.different:
            again = judge(expected, name, values)
            if again.status.severity > verdicts[name].status.severity:
                again.note = "; ".join(filter(None, [again.note, f"in call {number} of {problem.repeats} equal ones"]))
                verdicts[name] = again
        settle(result, problem, inputs, verdicts)
        if result.status == Status.MISTRUSTED and not calls.damage:
            _judge_with_another_fill(result, problem, inputs, session, judge_on)
        if calls.damage:
            result.status, result.message = Status.FAIL, "; ".join(calls.damage)
        elif result.status.correct and calls.beside:  # a kernel that is wrong alone says so itself
            result.status, result.message = Status.FAIL, "; ".join(calls.beside)
        elif result.status.correct and problem.bitwise and calls.different:
            result.status = Status.NONDETERMINISTIC
            result.message = f"other bits at another equal call: {result.repeat}"
        if keep is not None:
            _keep(result, keep, asked, {name: on_host(a) for name, a in calls.first.items()})
    except Exception as error:
        named = "" if isinstance(error, CallError) else f"{type(error).__name__}: "
        result.status, result.message = classify(error), f"{named}{error}"
        if isinstance(error, ArgumentError) and problem.parameter_dtype != problem.default_params:
            result.status = Status.UNSUPPORTED  # refused by the package, before the library sees the call
    return result


_FILLS = ("randn", "sqrteps", "paired", "exact", "ramp")
"""Fills that are tried where a case's own shows not everything."""
_WITH_EPSILON = ("sqrteps", "paired", "exact")
"""Fills whose epsilon is comparable with the variance."""


def _judge_with_another_fill(
    result: CaseResult, problem: Problem, inputs: Inputs, session: Session, judge_on: Namespace | None
) -> None:
    """Make the call of a mistrusted case once more on data that show what its own do not, and take that verdict too."""
    seen = max((v.status for v in result.verdicts), key=lambda s: s.severity)
    blind = blind_inputs(problem, inputs, one_pass=seen != Status.PASS)
    if not blind:  # the data show everything, but too few channels whether sums were rounded
        return
    for fill in _WITH_EPSILON if "eps" in blind else _FILLS:
        try:
            other = dataclasses.replace(problem, fill=fill, kappa=0.0, magnitude=None, data="")
        except ArgumentError:  # an option that this fill has not
            continue
        made = generate(other, judge_on)
        if fill == problem.fill or set(blind) & set(blind_inputs(other, made)):
            continue
        calls = _Calls(other, made, session, judge_on)
        result.seconds += calls.seconds
        again = CaseResult(result.backend, str(other), Status.PASS)
        settle(again, other, calls.inputs, judge_call(expect(other, calls.inputs), calls.first))
        again.status = Status.FAIL if calls.damage else again.status
        told = f"fill={fill} shows {', '.join(blind)}, which fill={problem.fill} does not"
        if again.status.severity > seen.severity:
            result.verdicts = again.verdicts
        for verdict in result.verdicts:
            verdict.note = "; ".join(filter(None, [verdict.note, told]))
        result.status = max(seen, again.status, key=lambda s: s.severity)
        result.message = "; ".join(calls.damage)
        return


def _keep(result: CaseResult, folder: str, problem: Problem, outputs: Mapping[str, Array]) -> None:
    try:
        result.saved = archive.write_outputs(folder, result.backend, problem, outputs)
    except (OSError, ArgumentError) as error:  # not the library's fault
        if result.status.good:
            result.status = Status.RESOURCE
        result.message = "; ".join(filter(None, [result.message, f"{NOT_KEPT}{reason(error)}"]))


_FEWEST = 4
"""Calls on the second thread: results may lie in a few buffers in turn."""


def neighbour_of(problem: Problem) -> Problem | None:
    """A small case of another shape with as many channels; None where the line allows none."""
    if problem.fill == FILE or problem.composed in ("gather_stats", "sync_train", "sync_backward"):
        return None
    images, channels, *space = problem.dims
    dims = (5 - min(images, 3), channels, *(min(n, 5) + 1 for n in space))
    layout = str(problem).split(",")[3]
    line = ",".join([*str(problem).split(",")[:3], layout, "x".join(map(str, dims)), "fill=randn"])
    own = ("algorithm", "inverse", "saved", "running", "activation", "residual", "params", "inplace", "unbiased")
    try:
        other = Problem.parse(line)
        same = {name: getattr(problem, name) for name in (*own, "saves_variance", "factor")}
        return dataclasses.replace(other, **same)
    except ArgumentError:
        return None


@contextlib.contextmanager
def neighbour(problem: Problem, session: Session, first: dict[str, Array], damage: list[str]) -> Iterator[None]:
    """Make calls of another shape beside one: what a kernel keeps from one call to the next shows in them.

    The first case of each operation, mode, dtype and layout that a process runs on an implementation has a neighbour.
    It is called and judged before the block, and called again on another thread until the block ends. The arrays that
    the call before, which gave `first`, returned must be what they were. `damage` gets what went wrong.
    """
    handle, key = session.handle, (problem.operation, problem.composed, problem.mode, problem.dtype, problem.layout)
    has_none = not isinstance(handle, Implementation) or problem.fence or problem.misalign or key in handle.neighbours
    small = None if has_none else neighbour_of(problem)
    if not has_none:
        handle.neighbours.add(key)
    if small is None:
        yield
        return
    problem, own, returned = small, copy.copy(handle), handle._returned
    own._returned = {}
    beside = dataclasses.replace(session, handle=own)
    inputs = generate(problem)
    try:
        outputs = execute(problem, inputs, beside).outputs
    except Exception:  # what it cannot do is said where it is a case
        yield
        return
    expected = expect(problem, inputs)

    def look(outputs: dict[str, Array], when: str) -> None:
        verdicts = judge_call(expected, outputs).items()
        if wrong := [name for name, verdict in verdicts if verdict.status == Status.FAIL]:
            damage.append(f"{', '.join(wrong)} wrong in a call {when}: {problem}")

    look(outputs, "after it of another shape")
    done, other = threading.Event(), dict[str, Array]()

    def call() -> None:
        for number in itertools.count():
            if number >= _FEWEST and done.is_set():
                return
            found = execute(problem, inputs, beside).outputs
            if not other and not all(same_bits(found[name], outputs[name]) for name in outputs):
                other.update(found)

    with ThreadPoolExecutor(1, "pybnorm neighbour") as thread:
        future = thread.submit(call) if beside.device.device_type == CPU else None
        try:
            yield
        finally:
            done.set()
    if other:
        look(other, "beside it on a second thread")
    if future and (error := future.exception()):
        damage.append(f"a call on a second thread raised {type(error).__name__}: {error}")
    for name, value in returned.items():
        if name in first and first[name].size == value.size:
            now = as_numpy(name, value).reshape(first[name].shape)
            if not same_bits(now, first[name]):
                damage.append(f"{name} that a call returned changed in calls of another shape and thread")


class _Calls:
    """The equal calls of one case: the first one's outputs, and those of later calls that differ in a bit."""

    def __init__(self, problem: Problem, inputs: Inputs, session: Session, judge_on: Namespace | None = None) -> None:
        self.first: dict[str, Array] = {}
        self.different: list[tuple[str, int, Array]] = []
        """Output, number of the call from 1, and values; results that came before are left out."""
        self.seconds = 0.0
        damage: dict[str, None] = {}
        kept: dict[str, Any] = {}
        self.beside: list[str] = []
        try:
            for number in range(problem.repeats):
                place = session.on_stream(number % problem.streams) if problem.streams > 1 else session
                started = time.perf_counter()
                with contextlib.ExitStack() as stack:
                    if own_process:
                        stack.enter_context(vendor_stderr())
                    if number == 1:
                        stack.enter_context(neighbour(problem, session, self.first, self.beside))
                    observed = execute(problem, inputs, place, kept, judge_on)
                self.seconds += time.perf_counter() - started
                damage |= dict.fromkeys(observed.damage)
                if observed.damage:  # of the inputs themselves, perhaps
                    inputs = generate(problem, judge_on)
                self.first = self.first or observed.outputs
                for name, values in observed.outputs.items():
                    before = [self.first[name], *(v for n, _, v in self.different if n == name)]
                    if not any(same_bits(values, one) for one in before):
                        self.different.append((name, number + 1, values))
                del observed
        finally:
            if problem.streams > 1:
                session.on_stream(0)
        self.damage, self.inputs = list(damage), inputs


def classify(error: BaseException) -> Status:
    """The status of a case that raised `error`: FAIL only if the library was called and reported a failure."""
    if isinstance(error, CallError):
        return error.status
    if isinstance(error, (errors.UnsupportedError, errors.NotSupportedError)):
        return Status.UNSUPPORTED
    # another backend's algorithm, or an activation that no plan has: a valid case that is not offered
    if isinstance(error, ArgumentError) and error.argument in ("algorithm", "activation"):
        return Status.UNSUPPORTED
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:  # PyTorch's is none
        return Status.RESOURCE
    if isinstance(error, errors.VendorError) and _BUILD.search(f"{error.status_name} {error.text}"):
        return Status.BUILD_FAILED
    return Status.FAIL if isinstance(error, errors.BackendError) else Status.ERROR


_sessions: list[Session] = []  # of this process


@functools.cache
def opened(opener: Callable[[str], Session], backend: str) -> Session:
    """The session of this process that `opener` makes for the first case."""
    _sessions.append(opener(backend))
    return _sessions[-1]


def device_lost() -> bool:
    """Tell whether a call has left the device of one of this process's sessions unusable."""
    return any(session.lost() for session in _sessions)


_build = functools.cache(file_digest)


def run_line(opener: Callable[[str], Session], backend: str, case: str, keep: str | None = None) -> CaseResult:
    """`run_case` of a line, on a session that `opener` makes for the first one; what is recorded of it must hold."""
    session, problem = opened(opener, backend), Problem.parse(case)
    result = run_case(problem, session, keep)
    library = getattr(session.handle, "library", None)  # simulated kernels have none
    if library is not None:
        result.claim = support.check(
            backend, library.version, session.device.name, problem, result.status, result.repeat, _build(library.path)
        )
    if result.claim == support.NEWLY_UNSUPPORTED:
        result.status = Status.FAIL
        result.message = f"{result.claim}, but recorded as running in this version: {result.message}"
    elif result.claim == support.NO_LONGER_REPEATABLE and result.status.good:
        result.status = Status.NONDETERMINISTIC
        result.message = f"{result.claim}, but recorded as giving the same bits at every call: {result.repeat} differ"
    elif result.repeat not in ("", "equal") and result.status.good and session.repeats(problem):
        result.status = Status.NONDETERMINISTIC
        result.message = f"Plan.deterministic says that equal calls give the same bits: {result.repeat} differ"
    return result


def run_recorded(
    opener: Callable[[str], Session], backend: str, case: str, keep: str | None = None
) -> tuple[CaseResult, BackendInfo | None]:
    """`run_line`, and the library it ran on; None for simulated kernels."""
    result = run_line(opener, backend, case, keep)
    for verdict in result.verdicts:
        if verdict.status == Status.PASS:
            del verdict.worst[1:]  # worst points would be nine tenths of a good run's size
    info = _described(opener, backend)
    result.library = info.id if info else ""
    return result, info


@functools.cache
def _described(opener: Callable[[str], Session], backend: str) -> BackendInfo | None:
    """The library of the session that `opener` made; None for simulated kernels."""
    session = opened(opener, backend)
    real = is_implementation(backend) or getattr(session.handle, "library", None) is not None
    return describe(backend, session) if real else None


@functools.cache
def host() -> str:
    """Host name and process id of this process, joined by a colon."""
    return f"{socket.gethostname()}:{os.getpid()}"
