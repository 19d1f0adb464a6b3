"""Runs a problem on a backend and judges it; a worker process per backend, so that a dying library takes one case.

A case makes its call twice on equal inputs in fresh memory. Every array lies inside guard bytes, which also fill the
gaps of strided data; results start as NaN. After the call guards and inputs must be unchanged, the results are judged
(`pybnorm.check.bounds`), and a case that could not have failed is MISTRUSTED.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, _core, devices, errors
from pybnorm._arrays import Buffer, Memory
from pybnorm.check.bounds import Expected, Status, Verdict, judge, untrusted
from pybnorm.check.data import Inputs, generate, numpy_dtype
from pybnorm.check.problem import Problem
from pybnorm.enums import Capability, DataType, Operation

__all__ = ["BackendInfo", "CaseResult", "Observed", "Session", "Worker", "execute", "open_session", "run_case"]

Array = npt.NDArray[Any]

GUARD = 256
"""Bytes on each side of an array; a multiple of every alignment that a library assumes of an allocation."""
PATTERN = 0xA7
_BUILD = re.compile(r"compil|hiprtc|nvrtc|comgr|build program|code object", re.IGNORECASE)


@dataclasses.dataclass
class BackendInfo:
    """What a backend's process says about its library."""

    backend: str
    label: str = ""
    version: tuple[int, ...] = ()
    path: str = ""
    found_via: str = ""
    attempts: tuple[tuple[str, str, str], ...] = ()
    device: str = ""
    problem: str = ""
    """Why no case can run; empty if cases can."""
    hint: str = ""
    """How to install the library, where it was searched for and not found."""
    override: str = ""
    """The environment variable that names the library's file, where that file cannot be used."""

    @property
    def loaded(self) -> bool:
        """Whether the library could be loaded, usable or not."""
        return bool(self.path)


@dataclasses.dataclass
class Session:
    """An open handle and the memory it computes in."""

    backend: str
    handle: Any
    device: devices.Device

    def capability(self, problem: Problem) -> Capability:
        """What the backend says about the problem's combination."""
        bits, _ = _core.capability(
            self.backend, problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
        )
        return bits

    def workspace_size(self, problem: Problem) -> int:
        """Bytes that the call needs from us; on the CPU the handle keeps its own."""
        if self.device.device_type == 1:
            return 0
        with _core.TensorDescriptor(self.backend, problem.dtype, problem.dims, problem.strides) as x_desc:
            return int(
                self.handle.workspace_size(
                    problem.operation,
                    x_desc,
                    mode=problem.mode,
                    alpha=problem.alpha,
                    beta=problem.beta,
                    alpha_param=problem.alpha_param,
                    beta_param=problem.beta_param,
                    epsilon=problem.epsilon,
                    running=problem.running,
                    saved=problem.saved,
                )
            )


@dataclasses.dataclass
class Observed:
    """What one call left behind."""

    outputs: dict[str, Array]
    """As stored, contiguous, in logical order."""
    damage: list[str]
    """Memory that changed and should not have."""


@dataclasses.dataclass
class CaseResult:
    """The outcome of one problem on one backend."""

    backend: str
    case: str
    status: Status
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    message: str = ""
    """The error, the damage, or the inputs that a mistrusted case would not notice."""
    repeat: str = ""
    """"equal" if the second call gave the same bits, else the outputs that differ."""
    capability: str = ""
    seconds: float = 0.0
    """Of the two calls, without data, judging and the first use of the library."""

    @property
    def ratio(self) -> float:
        """Worst error / bound of all outputs."""
        return max((v.ratio for v in self.verdicts), default=0.0)


# ---------------------------------------------------------------- memory


class _Guarded:
    """An array inside guard bytes, in device memory."""

    def __init__(self, values: Array, strides: tuple[int, ...], dtype: DataType, session: Session) -> None:
        self.dims, self.strides, self.dtype = values.shape, strides, dtype
        self.before = np.full(_arguments.span(values.shape, strides) * dtype.itemsize + 2 * GUARD, PATTERN, np.uint8)
        self._elements(self.before, numpy_dtype(dtype))[...] = values
        self.memory = _upload(self.before, session)
        self.buffer = self.memory._replace(
            pointer=self.memory.pointer + GUARD, dims=self.dims, strides=strides, dtype=dtype
        )

    def _elements(self, image: Array, dtype: np.dtype[Any]) -> Array:
        steps = tuple(s * dtype.itemsize for s in self.strides)
        return np.ndarray(self.dims, dtype, buffer=image, offset=GUARD, strides=steps)

    def read(self, session: Session) -> tuple[Array, bool, bool]:
        """Values in logical order, whether the guards are intact, whether nothing at all changed."""
        after = _download(self.memory, session)
        values = self._elements(after, numpy_dtype(self.dtype)).copy()
        outside = after.copy()
        word = np.dtype(f"u{self.dtype.itemsize}")
        self._elements(outside, word)[...] = np.frombuffer(bytes([PATTERN]) * word.itemsize, word)[0]
        return values, bool((outside == PATTERN).all()), bool((after == self.before).all())


def _upload(image: Array, session: Session) -> Buffer:
    # devices copy floating-point arrays; these are bytes, and travel as the narrowest of them
    return session.device.from_numpy(image.view(np.float16))


def _download(memory: Buffer, session: Session) -> Array:
    result: Array = session.device.to_numpy(memory).view(np.uint8)
    return result


def _workspace(session: Session, size: int) -> tuple[Buffer | None, Memory | None]:
    if size == 0:
        return None, None
    memory = _upload(np.full(size + size % 2 + 2 * GUARD, PATTERN, np.uint8), session)
    return memory, Memory(
        memory.pointer + GUARD, size, memory.device_type, memory.device_id, memory.writable, memory.owner
    )


# ---------------------------------------------------------------- one call


def execute(problem: Problem, inputs: Inputs, session: Session) -> Observed:
    """Make the problem's call once, in fresh memory.

    Returns
    -------
    Observed
        ``outputs`` has the keys of `Expected.outputs`.

    Raises
    ------
    PybnormError
        What the backend raised.
    """
    arrays: dict[str, _Guarded] = {}
    packed = _arguments.packed_strides(problem.parameter_dims)
    unwritten = np.full(problem.parameter_dims, np.nan)

    def data(name: str, values: Array | None) -> Buffer:
        assert values is not None
        arrays[name] = _Guarded(values, problem.strides, problem.dtype, session)
        return arrays[name].buffer

    def parameter(name: str, values: Array | None = None) -> Buffer:
        chosen = unwritten if values is None else values
        arrays[name] = _Guarded(chosen, packed, problem.parameter_dtype, session)
        return arrays[name].buffer

    workspace_memory, workspace = _workspace(session, session.workspace_size(problem))
    common = {"mode": problem.mode, "epsilon": problem.epsilon, "workspace": workspace}
    handle = session.handle
    if problem.operation == Operation.FORWARD_TRAINING:
        outputs = ["y"]
        optional: dict[str, Buffer] = {}
        if problem.running:
            optional |= {
                "running_mean": parameter("running_mean", inputs.mean),
                "running_variance": parameter("running_variance", inputs.variance),
            }
        if problem.saved:
            optional |= {
                "saved_mean": parameter("saved_mean"),
                "saved_inv_variance": parameter("saved_inv_variance"),
            }
        outputs += optional
        handle.forward_training(
            data("x", inputs.x),
            parameter("scale", inputs.scale),
            parameter("bias", inputs.bias),
            data("y", inputs.prior),
            alpha=problem.alpha,
            beta=problem.beta,
            exponential_average_factor=problem.factor,
            **optional,
            **common,
        )
    elif problem.operation == Operation.FORWARD_INFERENCE:
        outputs = ["y"]
        handle.forward_inference(
            data("x", inputs.x),
            parameter("scale", inputs.scale),
            parameter("bias", inputs.bias),
            parameter("running_mean", inputs.mean),
            parameter("running_variance", inputs.variance),
            data("y", inputs.prior),
            alpha=problem.alpha,
            beta=problem.beta,
            **common,
        )
    else:
        outputs = ["dx", "dscale", "dbias"]
        saved: dict[str, Buffer] = {}
        if problem.saved:
            saved = {
                "saved_mean": parameter("saved_mean", inputs.saved_mean),
                "saved_inv_variance": parameter("saved_inv_variance", inputs.saved_inv_variance),
            }
        handle.backward(
            data("x", inputs.x),
            data("dy", inputs.dy),
            parameter("scale", inputs.scale),
            data("dx", inputs.prior),
            parameter("dscale", inputs.prior_scale),
            parameter("dbias", inputs.prior_bias),
            alpha_data=problem.alpha,
            beta_data=problem.beta,
            alpha_param=problem.alpha_param,
            beta_param=problem.beta_param,
            **saved,
            **common,
        )
    session.device.synchronize()
    return _collect(arrays, outputs, workspace_memory, session)


def _collect(
    arrays: Mapping[str, _Guarded], outputs: list[str], workspace: Buffer | None, session: Session
) -> Observed:
    observed = Observed({}, [])
    for name, array in arrays.items():
        values, guarded, unchanged = array.read(session)
        if not guarded:
            observed.damage.append(f"wrote outside of {name}")
        if name in outputs:
            observed.outputs[name] = values
        elif guarded and not unchanged:
            observed.damage.append(f"changed its input {name}")
    if workspace is not None:
        after = _download(workspace, session)
        if not ((after[:GUARD] == PATTERN).all() and (after[-GUARD:] == PATTERN).all()):
            observed.damage.append("wrote outside of the workspace")
    return observed


# ---------------------------------------------------------------- one case


def run_case(problem: Problem, session: Session) -> CaseResult:
    """Run `problem` twice on `session` and judge it. Raises nothing that a library or its data can cause."""
    result = CaseResult(session.backend, str(problem), Status.PASS)
    try:
        inputs = generate(problem)
        started = time.perf_counter()
        first = execute(problem, inputs, session)
        second = execute(problem, inputs, session)
        result.seconds = time.perf_counter() - started
        result.capability = capability_words(session.capability(problem))
        expected = Expected(problem, inputs)
        result.verdicts = [judge(expected, name, first.outputs[name]) for name in expected.outputs]
        different = [n for n, values in first.outputs.items() if values.tobytes() != second.outputs[n].tobytes()]
        result.repeat = ", ".join(different) or "equal"
        for i, verdict in enumerate(result.verdicts):
            if verdict.output in different:
                again = judge(expected, verdict.output, second.outputs[verdict.output])
                if again.status.severity > verdict.status.severity:
                    again.note = "; ".join(filter(None, [again.note, "in the second of two equal calls"]))
                    result.verdicts[i] = again
        result.status = max((v.status for v in result.verdicts), key=lambda s: s.severity)
        damage = list(dict.fromkeys(first.damage + second.damage))
        if damage:
            result.status, result.message = Status.FAIL, "; ".join(damage)
        elif result.status in (Status.PASS, Status.WARN):
            blind = untrusted(problem, inputs, one_pass=result.status == Status.WARN)
            if blind:
                result.status = Status.MISTRUSTED
                result.message = "a change would not be noticed of: " + ", ".join(blind)
    except Exception as error:
        result.status, result.message = classify(error), f"{type(error).__name__}: {error}"
    return result


def capability_words(bits: Capability) -> str:
    """Names of the set bits."""
    return "|".join(c.name or "" for c in Capability if c in bits)


def classify(error: BaseException) -> Status:
    """The status that an exception of the backend, or of the harness, stands for."""
    if isinstance(error, (errors.UnsupportedError, errors.NotSupportedError)):
        return Status.UNSUPPORTED
    if isinstance(error, MemoryError):
        return Status.RESOURCE
    if isinstance(error, errors.VendorError) and _BUILD.search(f"{error.status_name} {error.text}"):
        return Status.BUILD_FAILED
    return Status.FAIL


# ---------------------------------------------------------------- processes


def open_session(backend: str) -> Session:
    """A handle on the real library of `backend`, and its device's memory.

    Raises
    ------
    LibraryError
        The library cannot be used.
    BackendError
        It gives no handle, for instance because there is no device.
    """
    library = _core.load(backend)
    device = devices.device_for(library.device_type)
    return Session(backend, _core.Handle(backend, stream=device.stream or None), device)


def describe(backend: str) -> BackendInfo:
    """What there is of `backend` in this process; never raises for a reason that lies in the library."""
    from pybnorm._find import SPECS

    info = BackendInfo(backend, label=SPECS[backend].label)
    try:
        library = _core.load(backend)
    except errors.LibraryError as error:
        info.problem = str(error).splitlines()[0].partition(" To have one")[0]
        info.attempts, info.override = error.attempts, override(backend)
        info.hint = "" if info.override else SPECS[backend].hint
        return info
    info.version, info.path = tuple(library.version), library.path
    info.found_via, info.attempts = library.found_via, tuple(library.attempts)
    try:
        info.device = open_session(backend).device.name
    except Exception as error:
        info.problem = f"{type(error).__name__}: {error}".splitlines()[0]
    return info


def override(backend: str) -> str:
    """The environment variable that names `backend`'s library, if it is set; nothing else is searched then."""
    from pybnorm._find import SPECS

    variable = SPECS[backend].variable
    return variable if os.environ.get(variable) else ""


_sessions: dict[str, Session] = {}  # of this worker process


def _work(opener: Callable[[str], Session], backend: str, case: str) -> CaseResult:
    if backend not in _sessions:
        _sessions[backend] = opener(backend)
    return run_case(Problem.parse(case), _sessions[backend])


def _ignore_interrupt() -> None:
    # Ctrl-C reaches every process of the terminal; the one that prints decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Worker:
    """A process that holds one backend's library. Usable as a context manager.

    A case during which the process dies, by a signal or because the library called ``exit()``, is CRASHED; the next
    case gets a new process.

    Parameters
    ----------
    backend : str
    opener : callable, optional
        Importable function that opens the session inside the process; `open_session` by default.
    """

    def __init__(self, backend: str, opener: Callable[[str], Session] = open_session) -> None:
        self.backend = backend
        self._opener = opener
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call an importable function in the process."""
        if self._executor is None:
            # spawn: a forked child would inherit the state of libraries and threads
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=_ignore_interrupt)
        # The process may start here. It inherits the mask, which covers its imports, before the initializer.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def describe(self) -> Future[BackendInfo]:
        """`describe` in the process, so that even loading a library cannot take this one down."""
        return self.submit(describe, self.backend)

    def run(self, problem: Problem) -> CaseResult:
        """Run one case."""
        try:
            result: CaseResult = self.submit(_work, self._opener, self.backend, str(problem)).result()
        except BrokenProcessPool:
            self.close()
            return CaseResult(self.backend, str(problem), Status.CRASHED, message="the library's process died")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return CaseResult(self.backend, str(problem), classify(error), message=text)
        return result

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        if self._executor is not None:
            for process in list((self._executor._processes or {}).values()):
                process.kill()
        self.close()

    def close(self) -> None:
        """End the process, after the case it is at."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
