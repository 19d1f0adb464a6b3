"""Makes the call that a problem asks for: by the vendor's entry point, by a plan, or composed of several calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pybnorm import _core, devices, errors, operations, sync
from pybnorm._arrays import Buffer, numpy_dtype
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language import calls
from pybnorm.check.language.activations import limits
from pybnorm.check.language.calls import METHODS, method, options, stated
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.implementations import CallError
from pybnorm.check.run.session import Session
from pybnorm.enums import Capability, Operation
from pybnorm.operations import activated
from pybnorm.operations.preparation import prepare
from pybnorm.reference.namespaces import Array

TIMEOUT = 120.0
"""Seconds that a rank waits for the others."""


class Threads:
    """A `pybnorm.sync.Communicator` between threads, whose vectors lie on one device and are copied by axpby."""

    def __init__(
        self, barrier: threading.Barrier, sent: list[Any], rank: int, handle: _core.Handle, device: devices.Device
    ) -> None:
        self.rank, self.size, self.devices = rank, len(sent), (device.device_type,)
        self._barrier, self._sent, self._handle, self._device = barrier, sent, handle, device

    def vector(self, values: Array, device_type: int, stream: int) -> Buffer:
        """A copy on the device."""
        return self._device.from_numpy(values)

    def all_gather(self, send: Buffer, received: Buffer, stream: int) -> None:
        """Write the vectors of all ranks to `received`."""
        length = send.dims[0]

        def put(rank: int, vector: Buffer) -> None:
            place = received.pointer + rank * length * received.dtype.itemsize
            part = received._replace(pointer=place, dims=send.dims, strides=send.strides)
            operations.axpby(self._handle, 1.0, vector, 0.0, part)

        self._exchange(send, put)

    def all_reduce(self, send: Buffer, received: Buffer, stream: int) -> None:
        """Write the sum over all ranks to `received`."""
        self._exchange(send, lambda rank, v: operations.axpby(self._handle, 1.0, v, float(rank > 0), received))

    def read(self, vector: Buffer, out: Array, stream: int) -> None:
        """Copy a vector to NumPy, and wait for it."""
        out[:] = self._device.to_numpy(vector)

    def _exchange(self, send: Buffer, put: Callable[[int, Buffer], None]) -> None:
        self._device.synchronize()
        self._sent[self.rank] = send
        self._barrier.wait(TIMEOUT)
        for rank, vector in enumerate(self._sent):
            put(rank, vector)
        self._device.synchronize()
        self._barrier.wait(TIMEOUT)


def synchronized(session: Session, problem: Problem, buffers: Mapping[str, Any]) -> None:
    """The call of `problem` on `Problem.shares` of its batch, each by a rank of its own.

    Statistics are those of the first rank; dscale and dbias, which each rank sums over its own data, are added up here.
    Raises CallError: the bits of a rank's statistics are not the first one's.
    """
    ranks = len(problem.shares)
    shared = threading.Barrier(ranks), [None] * ranks
    written = [t.name for t in calls.outputs(problem) if not t.data]
    before = {name: _values(session, buffers[name]) for name in written}

    def rank(number: int) -> dict[str, Array]:
        try:
            return _rank(session, problem, buffers, shared, number, before)
        except BaseException:
            shared[0].abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(rank, number) for number in range(ranks)]
    if errors := [error for future in futures if (error := future.exception())]:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    found = [future.result() for future in futures]
    for name in written:
        values = [own[name] for own in found]
        if name in ("dscale", "dbias"):
            total = np.sum([v.astype(np.float64) for v in values], axis=0).astype(values[0].dtype)
        else:
            total = values[0]
            for number, other in enumerate(values):
                if other.tobytes() != total.tobytes():
                    raise CallError(Status.FAIL, f"rank {number} has another {name} than rank 0")
        operations.axpby(session.handle, 1.0, session.device.from_numpy(total), 0.0, buffers[name])
    session.device.synchronize()


def _values(session: Session, buffer: Buffer) -> Array:
    """The contents of a parameter inside guarded memory."""
    copy = session.device.from_numpy(np.zeros(buffer.dims, numpy_dtype(buffer.dtype)))
    operations.axpby(session.handle, 1.0, buffer, 0.0, copy)
    session.device.synchronize()
    return session.device.to_numpy(copy)


def _rank(
    session: Session, problem: Problem, buffers: Mapping[str, Any], shared: tuple[threading.Barrier, list[Any]],
    number: int, before: Mapping[str, Array],
) -> dict[str, Array]:  # fmt: skip
    """Outputs of one rank beside its part of y or dx."""
    device = devices.device_for(session.device.device_type, session.device.device_id)
    start, images = sum(problem.shares[:number]), problem.shares[number]
    given: dict[str, Any] = {}
    for tensor in calls.tensors(problem):
        buffer = buffers[tensor.name]
        if tensor.data:
            step = buffer.strides[0] * buffer.dtype.itemsize
            buffer = buffer._replace(pointer=buffer.pointer + start * step, dims=(images, *buffer.dims[1:]))
        elif tensor.written:
            buffer = device.from_numpy(before[tensor.name])
        given[tensor.name] = buffer
    chosen = {n: v for n, v in calls.options(problem).items() if n not in ("axis", "shares")}
    axis = calls.axis(problem)
    channels = tuple(problem.dims[a] for a in np.atleast_1d(axis))
    with _core.Handle(session.backend, stream=device.stream or None, known_defects="ignore") as handle:
        layer = sync.SyncBatchNorm(
            handle, Threads(*shared, number, handle, device), channels, dtype=problem.dtype, axis=axis,
            deterministic=problem.bitwise,
        )  # fmt: skip
        name = "backward" if "dy" in given else "forward"
        nbytes = layer.workspace_size(name, **given, **chosen)
        memory = device.empty_bytes(nbytes) if nbytes else None
        getattr(layer, name)(**given, **chosen, workspace=memory)
        device.synchronize()
        return {n: device.to_numpy(given[n]) for n in before}


def make(session: Session, problem: Problem, buffers: Mapping[str, Any], workspace: Any) -> None:
    """Make the call of `problem` on tensors by name; what no entry point has is composed, as the package does it."""
    handle = session.handle
    if isinstance(handle, _core.Handle) and (problem.saves_variance or not problem.unbiased):
        what = "saved=variance" if problem.saves_variance else "unbiased=0"
        raise _unsupported(handle, f"{what}: no vendor's call has it")
    if problem.composed.startswith("sync") and isinstance(handle, _core.Handle):
        synchronized(session, problem, buffers)
        return
    if problem.composed:
        _operation(session, method(problem), dict(buffers) | options(problem))
        return
    if problem.inverse:  # the inverse standard deviation is in the place of the running variance
        given: dict[str, Any] = {name: buffers[name] for name in ("x", "scale", "bias", "y")}
        given |= {"mean": buffers["running_mean"], "inv_variance": buffers["running_variance"]}
        given |= {"alpha": problem.alpha, "beta": problem.beta, "axis": calls.axis(problem)}
        _operation(session, "forward_inference_inv_variance", given)
        return
    if problem.activation and isinstance(handle, _core.Handle):
        whole = not problem.residual and Capability.ACTIVATION in session.capability(problem)
        if problem.residual or not (whole or problem.algorithm):
            (_planned if problem.algorithm else _compose)(session, problem, buffers)
            return
    # an algorithm is what callers get, who are refused where it is not correct
    offered = problem.algorithm and problem.inplace and Capability.IN_PLACE in session.capability(problem)
    _allow_in_place(handle, problem.inplace and not offered)
    try:
        getattr(handle, METHODS[problem.operation])(**buffers, **options(problem), workspace=workspace)
    finally:
        _allow_in_place(handle, False)


def _allow_in_place(handle: Any, allowed: bool) -> None:
    if isinstance(handle, _core.Handle):
        _core.allow_in_place(handle, allowed)
    else:
        handle.in_place = allowed


def _operation(session: Session, name: str, given: Mapping[str, Any]) -> None:
    """The call of a function of `pybnorm.operations`."""
    handle = session.handle
    if not isinstance(handle, _core.Handle):  # simulated, or an implementation
        if not hasattr(handle, name):
            raise CallError(Status.UNSUPPORTED, f"{session.backend} has no {name}")
        getattr(handle, name)(**given)
        return
    nbytes = operations.workspace_size(handle, name, **given)
    memory = session.device.empty_bytes(nbytes) if nbytes else None
    getattr(operations, name)(handle, **given, workspace=memory)


def _planned(session: Session, problem: Problem, buffers: Mapping[str, Any]) -> None:
    """The call with a residual: only plans take one."""
    handle = session.handle
    chosen = {name: value for name, value in options(problem).items() if not name.startswith("activation_")}
    like = {name: buffers[name] for name in ("x", "y", "dy", "dx") if name in buffers}
    residual = buffers.get("dz", buffers.get("z"))
    if "dz" in buffers:
        like.pop("y", None)
    plan = getattr(handle, f"plan_{METHODS[problem.operation]}")(**like, **chosen, **stated(problem), z=residual)
    if plan.reserve_size:
        text = "the residual's gradient of this algorithm needs what forward left in its reserve space"
        raise _unsupported(handle, text)
    memory = session.device.empty_bytes(plan.workspace_size) if plan.workspace_size else None
    plan(**buffers, workspace=memory)


def _unsupported(handle: _core.Handle, text: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        backend=handle.backend, function="check", status=-1, status_name="PBN_E_UNSUPPORTED", text=text
    )


def _compose(session: Session, problem: Problem, buffers: Mapping[str, Any]) -> None:
    """The call of `problem` from the primitives that every backend has."""
    handle = session.handle
    if problem.inplace:
        raise _unsupported(handle, "in place: an activation without a fused kernel is composed on memory of its own")
    numbers = {name: value for name, value in options(problem).items() if not name.startswith(("mode", "activation"))}
    numbers |= {"axis": calls.axis(problem), "limits": (*limits(problem), 0.0)}
    recipe = activated.RECIPES["activated_backward"]
    if problem.operation != Operation.BACKWARD:
        recipe = activated.RECIPES["activated_forward"]
        numbers["training"] = problem.operation == Operation.FORWARD_TRAINING
        numbers.setdefault("exponential_average_factor", 0.0)
    values = tuple(numbers[name] if name in numbers else buffers.get(name) for name in recipe.names)
    prepared, addresses, _held = prepare(handle, recipe, values)
    memory = session.device.empty_bytes(prepared.nbytes) if prepared.nbytes else None
    prepared.execute(handle, recipe.name, addresses, memory)
