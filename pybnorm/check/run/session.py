"""A backend opened in this process: its library, a handle and the memory it computes in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from typing import Any

from pybnorm import _core, devices, errors
from pybnorm._arrays import CPU, Buffer
from pybnorm._find import file_digest
from pybnorm.check.judging.results import BackendInfo, is_implementation
from pybnorm.check.language.calls import METHODS, activation_options, options, stated, workspace_options
from pybnorm.check.language.calls import tensors as tensors_of
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.environment import cpu_flags, variables
from pybnorm.check.run.implementations import Implementation, load
from pybnorm.enums import Capability


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

    def lost(self) -> bool:
        """Tell whether the device is lost here, as after a kernel's fault, which all later calls report."""
        try:
            self.device.synchronize()
        except Exception:
            return True
        return False

    def claimed(self, problem: Problem) -> Problem:
        """The problem as it is run and judged here: of an implementation, by what it declares."""
        return self.handle.claimed(problem) if isinstance(self.handle, Implementation) else problem

    def capability(self, problem: Problem) -> Capability:
        """The backend's answer about the problem's combination; nothing of an implementation."""
        if isinstance(self.handle, Implementation):
            return Capability(0)
        bits, _ = _core.capability(
            self.backend, problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
        )
        return bits

    def workspace_size(self, problem: Problem) -> int:
        """Bytes of workspace that the call needs; 0 on the CPU, where the handle keeps its own."""
        on_cpu = self.device.device_type == CPU
        if on_cpu or isinstance(self.handle, Implementation) or problem.composed:  # calls with memory of their own
            return 0
        if problem.misalign and problem.algorithm:
            return int(self._plan(problem).workspace_size)
        with _core.TensorDescriptor(self.backend, problem.dtype, problem.dims, problem.strides) as x_desc:
            chosen = workspace_options(problem)
            if problem.algorithm or Capability.ACTIVATION in self.capability(problem):
                chosen |= activation_options(problem)
            return int(self.handle.workspace_size(problem.operation, x_desc, **chosen))

    def repeats(self, problem: Problem) -> bool:
        """Tell whether the plan of the problem's call says that equal calls give the same bits."""
        if problem.composed or problem.activation or problem.inverse or not hasattr(self.handle, "plan_backward"):
            return False
        try:
            return bool(self._plan(problem).deterministic)
        except errors.PybnormError:
            return False

    def _plan(self, problem: Problem) -> Any:
        """The plan for arrays that lie as the problem's do, whose alignment descriptors do not have."""
        address = 256 + problem.misalign * problem.dtype.itemsize
        place = self.device.device_type, self.device.device_id
        like = Buffer(address, problem.dims, problem.strides, problem.dtype, *place, True, None)
        tensors = {tensor.name: like for tensor in tensors_of(problem) if tensor.data}
        make = getattr(self.handle, f"plan_{METHODS[problem.operation]}")
        return make(**tensors, **({"algorithm": None} | options(problem)), **stated(problem))


def open_session(backend: str) -> Session:
    """A session on the real library of `backend` and its device, or on an implementation."""
    if is_implementation(backend):
        found = load(backend)
        return Session(backend, found, devices.device_for(found.memory_type))
    library = _core.load(backend)
    device = devices.device_for(library.device_type)
    return Session(backend, _core.Handle(backend, stream=device.stream or None, known_defects="ignore"), device)


def describe(backend: str, session: Session | None = None) -> BackendInfo:
    """Say which library of `backend` this process has, by an open session if there is one; never raises."""
    info = BackendInfo(backend, label=label_of(backend))
    try:
        if is_implementation(backend):
            found = load(backend)
            info.label, info.version, info.path, kind = found.name, found.version, found.path, found.device_type
            info.found_via, info.device = "--implementation", devices.device_for(kind).name
        else:
            library = _core.load(backend)
            info.version, info.path, kind = tuple(library.version), library.path, library.device_type
            info.found_via, info.attempts = library.found_via, tuple(library.attempts)
            opened = session or open_session(backend)
            with contextlib.nullcontext() if session else opened.handle:
                info.device = opened.device.name
        info.driver = devices.driver(kind)
    except Exception as error:
        if isinstance(error, errors.LibraryError) and not info.path and not is_implementation(backend):
            info.problem = str(error).splitlines()[0].partition(" To have one")[0]
            info.attempts, info.override = error.attempts, override(backend)
            info.hint = "" if info.override else _core.search_spec(backend).hint
        else:
            name = "" if isinstance(error, errors.ArgumentError) else f"{type(error).__name__}: "
            info.problem = f"{name}{error}".splitlines()[0]
        return info
    info.digest, info.variables = file_digest(info.path), variables(backend)
    info.cpu_flags = cpu_flags() if kind == CPU else []
    return identified(info)


def label_of(backend: str) -> str:
    """The name of `backend`'s library; of an implementation its own, which only `describe` knows."""
    return backend if is_implementation(backend) else _core.search_spec(backend).label


def identified(info: BackendInfo) -> BackendInfo:
    """`info` with its `id`, of what may change results: not of the path, the host or which of equal devices it is."""
    facts = (info.version, info.digest, info.device, info.driver, sorted(info.variables.items()), info.cpu_flags)
    mark = hashlib.blake2b(repr(facts).encode(errors="replace"), digest_size=4).hexdigest()
    return dataclasses.replace(info, id=f"{'.'.join(map(str, info.version))}-{mark}")


def override(backend: str) -> str:
    """The environment variable that names `backend`'s library, if it is set; no other place is searched then."""
    variable = "" if is_implementation(backend) else _core.search_spec(backend).variable
    return variable if os.environ.get(variable) else ""


@functools.cache
def capability_words(bits: Capability) -> str:
    """Names of the set bits."""
    return "|".join(c.name or "" for c in Capability if c in bits)
