"""Makes the call that a problem asks for: by the vendor's entry point, by a plan, or composed of several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pybnorm import _core, errors, operations
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.activations import limits
from pybnorm.check.language.calls import METHODS, STATED, axis, method, options
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.implementations import CallError
from pybnorm.check.run.ranks import synchronized
from pybnorm.check.run.session import Session
from pybnorm.enums import Capability, Operation
from pybnorm.operations import activated
from pybnorm.operations.preparation import prepare


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
    if problem.inverse:
        _from_inverse(session, problem, buffers)
        return
    if problem.activation and isinstance(handle, _core.Handle):
        if not problem.algorithm and (problem.residual or Capability.ACTIVATION not in session.capability(problem)):
            _compose(session, problem, buffers)
            return
        if problem.residual:
            _planned(session, problem, buffers)
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


def _from_inverse(session: Session, problem: Problem, buffers: Mapping[str, Any]) -> None:
    """Inference from the inverse standard deviation, which is in the place of the running variance."""
    given: dict[str, Any] = {name: buffers[name] for name in ("x", "scale", "bias", "y")}
    given |= {"mean": buffers["running_mean"], "inv_variance": buffers["running_variance"]}
    given |= {"alpha": problem.alpha, "beta": problem.beta, "axis": axis(problem)}
    _operation(session, "forward_inference_inv_variance", given)


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
    if problem.operation == Operation.BACKWARD:
        like.pop("y", None)
    flags = {name: getattr(problem, name) for name in STATED[problem.operation]}
    residual = buffers["dz"] if problem.operation == Operation.BACKWARD else buffers["z"]
    plan = getattr(handle, f"plan_{METHODS[problem.operation]}")(**like, **chosen, **flags, z=residual)
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
    low, high = limits(problem)
    numbers |= {"axis": axis(problem), "kind": int(problem.activation), "low": low, "high": high}
    recipe = activated.RECIPES["activated_backward"]
    if problem.operation != Operation.BACKWARD:
        recipe = activated.RECIPES["activated_forward"]
        numbers["training"] = problem.operation == Operation.FORWARD_TRAINING
        numbers["factor"] = numbers.pop("exponential_average_factor", 0.0)
    values = tuple(numbers[name] if name in numbers else buffers.get(name) for name in recipe.names)
    prepared, addresses, _held = prepare(handle, recipe, values)
    memory = session.device.empty_bytes(prepared.nbytes) if prepared.nbytes else None
    prepared.execute(handle, recipe.name, addresses, memory)
