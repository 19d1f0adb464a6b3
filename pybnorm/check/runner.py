"""Runs a problem on a backend, in this process, and judges it.

A case makes its call several times on equal inputs in fresh memory. Every array lies inside guard bytes, which also
fill the gaps of strided data; results start as NaN. After the call guards, inputs and statistics that were not given
must be unchanged, the results are judged (`pybnorm.check.bounds`), and a case that could not have failed is MISTRUSTED.
`pybnorm.check.worker` does the same in a process of its own, `pybnorm.check.executors` in many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, _core, devices, errors
from pybnorm._arrays import CPU, Buffer, Memory
from pybnorm._find import SPECS
from pybnorm.check import archive, support
from pybnorm.check.bounds import Expected, Status, judge, untrusted
from pybnorm.check.data import Inputs, generate, numpy_dtype
from pybnorm.check.environment import cpu_flags, file_digest, variables, visible
from pybnorm.check.problem import Problem, checked
from pybnorm.check.results import BackendInfo, CaseResult
from pybnorm.diagnostics import vendor_stderr
from pybnorm.enums import Capability, DataType, Operation

__all__ = [
    "BackendInfo",
    "CaseResult",
    "Observed",
    "Session",
    "classify",
    "describe",
    "device_type",
    "execute",
    "identified",
    "open_session",
    "run_case",
    "run_line",
    "run_recorded",
]

Array = npt.NDArray[Any]

GUARD = 256
"""Bytes on each side of an array; a multiple of every alignment that a library assumes of an allocation."""
PATTERN = 0xA7
_STATISTICS = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")
NOT_KEPT = "the outputs could not be kept: "
"""Before the reason, at the end of a result's message: nothing more can be saved."""
own_process = False
"""Whether this process is a worker's, so that its standard error may be captured (`pybnorm.vendor_stderr`)."""
_BUILD = re.compile(r"compil|hiprtc|nvrtc|comgr|build program|code object", re.IGNORECASE)


@dataclasses.dataclass
class Session:
    """An open handle and the memory it computes in."""

    backend: str
    handle: Any
    device: devices.Device
    others: list[devices.Device] = dataclasses.field(default_factory=list, repr=False)
    """The same device again, each with a stream of its own."""

    def on_stream(self, number: int) -> Session:
        """This session with the handle and the memory on another stream; 0 is the first."""
        while len(self.others) < number:
            self.others.append(devices.device_for(self.device.device_type, self.device.device_id))
        device = (self.device, *self.others)[number]
        self.handle.set_stream(device.stream)
        return Session(self.backend, self.handle, device)

    def capability(self, problem: Problem) -> Capability:
        """What the backend says about the problem's combination."""
        bits, _ = _core.capability(
            self.backend, problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
        )
        return bits

    def workspace_size(self, problem: Problem) -> int:
        """Bytes that the call needs from us; on the CPU the handle keeps its own."""
        if self.device.device_type == CPU:
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
                    **_algorithm(problem),
                )
            )


@dataclasses.dataclass
class Observed:
    """What one call left behind."""

    outputs: dict[str, Array]
    """As stored, contiguous, in logical order."""
    damage: list[str]
    """Memory that changed and should not have."""


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


def _algorithm(problem: Problem) -> dict[str, str]:
    return {"algorithm": problem.algorithm} if problem.algorithm else {}


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
    not_given: list[str] = []
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
    common = {"mode": problem.mode, "epsilon": problem.epsilon, "workspace": workspace, **_algorithm(problem)}
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
        for name in _STATISTICS:
            if name not in optional:
                parameter(name)  # beside the others and not given: nobody may write to it
                not_given.append(name)
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
    try:
        session.device.synchronize()
    except errors.PybnormError:
        raise
    except Exception as error:  # the driver's own exception: what the call did shows here
        name = type(error).__name__
        raise errors.ExecutionError(
            backend=session.backend, function="synchronize", status=-1, status_name=name, text=str(error)
        ) from error
    return _collect(arrays, outputs, not_given, workspace_memory, session)


def _collect(
    arrays: Mapping[str, _Guarded],
    outputs: list[str],
    not_given: list[str],
    workspace: Buffer | None,
    session: Session,
) -> Observed:
    observed = Observed({}, [])
    for name, array in arrays.items():
        values, guarded, unchanged = array.read(session)
        if not guarded:
            observed.damage.append(f"wrote outside of {name}")
        if name in outputs:
            observed.outputs[name] = values
        elif guarded and not unchanged:
            what = "what was not given to it," if name in not_given else "its input"
            observed.damage.append(f"changed {what} {name}")
    if workspace is not None:
        after = _download(workspace, session)
        if not ((after[:GUARD] == PATTERN).all() and (after[-GUARD:] == PATTERN).all()):
            observed.damage.append("wrote outside of the workspace")
    return observed


# ---------------------------------------------------------------- one case


def run_case(problem: Problem, session: Session, keep: str | None = None) -> CaseResult:
    """Run `problem` on `session` and judge it. Raises nothing that a library or its data can cause.

    Parameters
    ----------
    problem : Problem
    session : Session
    keep : str, optional
        Archive folder that the outputs of the first call are written to (`pybnorm.check.archive.write_outputs`).
    """
    checked(problem)
    _arguments.instance(session, Session, "session", "a Session")
    result = CaseResult(session.backend, str(problem), Status.PASS, host=host(), visible=visible())
    try:
        if problem.streams > 1 and session.device.device_type == CPU:
            result.status, result.message = Status.UNSUPPORTED, f"streams={problem.streams}: a CPU has no streams"
            return result
        inputs = generate(problem)
        calls = _Calls(problem, inputs, session)
        result.seconds = calls.seconds
        result.capability = capability_words(session.capability(problem))
        expected = Expected(problem, inputs)
        verdicts = {name: judge(expected, name, calls.first[name]) for name in expected.outputs}
        if problem.repeats > 1:
            result.repeat = ", ".join(dict.fromkeys(name for name, _, _ in calls.different)) or "equal"
        for name, number, values in calls.different:
            again = judge(expected, name, values)
            if again.status.severity > verdicts[name].status.severity:
                again.note = "; ".join(filter(None, [again.note, f"in call {number} of {problem.repeats} equal ones"]))
                verdicts[name] = again
        result.verdicts = list(verdicts.values())
        result.status = max((v.status for v in result.verdicts), key=lambda s: s.severity)
        if calls.damage:
            result.status, result.message = Status.FAIL, "; ".join(calls.damage)
        elif result.status in (Status.PASS, Status.WARN):
            blind = untrusted(problem, inputs, one_pass=result.status == Status.WARN)
            if blind:
                result.status = Status.MISTRUSTED
                result.message = "a change would not be noticed of: " + ", ".join(blind)
        if keep is not None:
            _keep(result, keep, problem, calls.first)
    except Exception as error:
        result.status, result.message = classify(error), f"{type(error).__name__}: {error}"
        derived = _arguments.derived_data_type(problem.dtype)
        if isinstance(error, errors.ArgumentError) and problem.parameter_dtype != derived:
            result.status = Status.UNSUPPORTED  # the package's own refusal, before the library sees the call
    return result


def _keep(result: CaseResult, folder: str, problem: Problem, outputs: Mapping[str, Array]) -> None:
    try:
        result.saved = archive.write_outputs(folder, result.backend, problem, outputs)
    except (OSError, errors.ArgumentError) as error:  # no fault of the library
        if result.status.good:
            result.status = Status.RESOURCE
        result.message = "; ".join(filter(None, [result.message, f"{NOT_KEPT}{error}"]))


class _Calls:
    """The equal calls of one case: what the first gave, and what of the others is not the same bits."""

    def __init__(self, problem: Problem, inputs: Inputs, session: Session) -> None:
        self.first: dict[str, Array] = {}
        self.different: list[tuple[str, int, Array]] = []
        """Output, number of the call from 1, and values; results that came before are left out."""
        self.seconds = 0.0
        damage: dict[str, None] = {}
        seen: dict[str, set[bytes]] = {}
        try:
            for number in range(problem.repeats):
                place = session.on_stream(number % problem.streams) if problem.streams > 1 else session
                started = time.perf_counter()
                with vendor_stderr() if own_process else contextlib.nullcontext():
                    observed = execute(problem, inputs, place)
                self.seconds += time.perf_counter() - started
                damage |= dict.fromkeys(observed.damage)
                for name, values in observed.outputs.items():
                    bits = hashlib.sha256(values.tobytes()).digest()
                    if number and bits not in seen[name]:
                        self.different.append((name, number + 1, values))
                    seen.setdefault(name, set()).add(bits)
                self.first = self.first or observed.outputs
        finally:
            if problem.streams > 1:
                session.on_stream(0)
        self.damage = list(damage)


def capability_words(bits: Capability) -> str:
    """Names of the set bits."""
    return "|".join(c.name or "" for c in Capability if c in bits)


def classify(error: BaseException) -> Status:
    """The status that an exception stands for: FAIL only where the library was called and said so itself."""
    if isinstance(error, (errors.UnsupportedError, errors.NotSupportedError)):
        return Status.UNSUPPORTED
    if isinstance(error, errors.ArgumentError) and error.argument == "algorithm":  # another backend's
        return Status.UNSUPPORTED
    if isinstance(error, MemoryError):
        return Status.RESOURCE
    if isinstance(error, errors.VendorError) and _BUILD.search(f"{error.status_name} {error.text}"):
        return Status.BUILD_FAILED
    return Status.FAIL if isinstance(error, errors.BackendError) else Status.ERROR


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


def describe(backend: str, session: Session | None = None) -> BackendInfo:
    """What there is of `backend` in this process; never raises for a reason that lies in the library.

    `session` is one that is open already.
    """
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
        info.device = (session or open_session(backend)).device.name
        info.driver = devices.driver(library.device_type)
    except Exception as error:
        info.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        return info
    info.digest, info.variables = file_digest(info.path), variables(backend)
    info.cpu_flags = cpu_flags() if library.device_type == CPU else []
    return identified(info)


def identified(info: BackendInfo) -> BackendInfo:
    """`info` with its `id`: two are equal where nothing tells that the libraries would compute differently.

    The file's path is not in it, nor which of several equal devices it is, nor the host.
    """
    facts = (info.version, info.digest, info.device, info.driver, sorted(info.variables.items()), info.cpu_flags)
    mark = hashlib.blake2b(repr(facts).encode(errors="replace"), digest_size=4).hexdigest()
    return dataclasses.replace(info, id=f"{'.'.join(map(str, info.version))}-{mark}")


def device_type(backend: str) -> int:
    """DLPack device type of the memory that the library of `backend` computes in."""
    return _core.load(backend).device_type


def override(backend: str) -> str:
    """The environment variable that names `backend`'s library, if it is set; nothing else is searched then."""
    variable = SPECS[backend].variable
    return variable if os.environ.get(variable) else ""


_sessions: dict[tuple[Callable[[str], Session], str], Session] = {}  # of this process
_described: dict[tuple[Callable[[str], Session], str], BackendInfo | None] = {}


def run_line(opener: Callable[[str], Session], backend: str, case: str, keep: str | None = None) -> CaseResult:
    """Run the problem of a line in this process, on a session that `opener` makes for the first one.

    Here and not where results meet, because what is claimed may depend on the processor: a claim that does not hold
    makes the case FAIL.

    Raises
    ------
    Exception
        What `opener` raised.
    """
    key = opener, backend
    if key not in _sessions:
        _sessions[key] = opener(backend)
    problem = Problem.parse(case)
    result = run_case(problem, _sessions[key], keep)
    library = getattr(_sessions[key].handle, "library", None)  # simulated kernels have none
    if library is not None:
        result.claim = support.check(backend, library.version, problem, result.status)
    if result.claim == support.NEWLY_UNSUPPORTED:
        result.status = Status.FAIL
        result.message = f"{result.claim}, but recorded as running in this version: {result.message}"
    return result


def run_recorded(
    opener: Callable[[str], Session], backend: str, case: str, keep: str | None = None
) -> tuple[CaseResult, BackendInfo | None]:
    """`run_line`, and what library it ran on; None for simulated kernels.

    Raises
    ------
    Exception
        What `opener` raised.
    """
    result = run_line(opener, backend, case, keep)
    for verdict in result.verdicts:
        if verdict.status == Status.PASS:
            del verdict.worst[1:]  # nine tenths of what a run of good results would hold, write and send
    key = opener, backend
    if key not in _described:
        real = getattr(_sessions[key].handle, "library", None) is not None
        _described[key] = describe(backend, _sessions[key]) if real else None
    info = _described[key]
    result.library = info.id if info else ""
    return result, info


@functools.cache
def host() -> str:
    """Host name and process id of this process, joined by a colon."""
    return f"{socket.gethostname()}:{os.getpid()}"
