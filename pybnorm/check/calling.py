"""Makes the call that a problem asks for: by the vendor's entry point, by a plan, or composed of several calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pybnorm import _core, errors, operations
from pybnorm.check.bounds import Status
from pybnorm.check.calls import METHODS, STATED, axis, method, options
from pybnorm.check.implementations import CallError
from pybnorm.check.problem import Problem
from pybnorm.check.ranks import synchronized
from pybnorm.check.session import Session
from pybnorm.enums import Activation, Capability, Operation
from pybnorm.operations import elementwise
from pybnorm.operations.preparation import Recipe, operation, prepare
from pybnorm.operations.program import Program

__all__ = ["make"]

_COMPOSED: dict[str, Recipe] = {}


def make(session: Session, problem: Problem, buffers: Mapping[str, Any], workspace: Any) -> None:
    """Make the call of `problem` on tensors by name.

    What no entry point has is composed of those that there are, as the package does it for its callers.
    """
    handle = session.handle
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
    # an algorithm is what callers get, who are refused where it is not right
    offered = problem.algorithm and problem.inplace and Capability.IN_PLACE in session.capability(problem)
    handle._in_place = problem.inplace and not offered
    try:
        getattr(handle, METHODS[problem.operation])(**buffers, **options(problem), workspace=workspace)
    finally:
        handle._in_place = False


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


# ---------------------------------------------------------------- composed calls


def _compose(session: Session, problem: Problem, buffers: Mapping[str, Any]) -> None:
    """The call of `problem` from the primitives that every backend has."""
    handle = session.handle
    if problem.activation != Activation.RELU:
        name = problem.activation.name.lower()
        raise _unsupported(handle, f"{name} needs a fused call of the vendor's; of primitives only relu is composed")
    numbers = {name: value for name, value in options(problem).items() if name not in ("mode", "activation")}
    backward = problem.operation == Operation.BACKWARD
    recipe = _COMPOSED["composed_backward" if backward else "composed_forward"]
    given = {name: buffers.get(name) for name, array in zip(recipe.names, recipe.arrays, strict=True) if array}
    others = {"axis": axis(problem), "numbers": numbers} | ({} if backward else {"name": METHODS[problem.operation]})
    values = tuple((given | others)[name] for name in recipe.names)
    prepared, addresses, _held = prepare(handle, recipe, values)
    memory = session.device.empty_bytes(prepared.nbytes) if prepared.nbytes else None
    prepared.execute(handle, recipe.name, addresses, memory)


def _note(p: Program, arrays: Mapping[str, Any], written: tuple[str, ...]) -> None:
    for name, array in arrays.items():
        if array is not None:
            p.note(name, array, name in written)


@operation("x scale bias y running_mean running_variance saved_mean saved_inv_variance z", _COMPOSED)
def _composed_forward(
    p: Program, x: Any, scale: Any, bias: Any, y: Any, running_mean: Any, running_variance: Any, saved_mean: Any,
    saved_inv_variance: Any, z: Any, name: str, axis: Any, numbers: dict[str, float], *, workspace: Any = None,
) -> None:  # fmt: skip
    """``y = alpha * relu(forward(...) + z) + beta * y``."""
    training = name == "forward_training"
    running = {"running_mean": running_mean, "running_variance": running_variance}
    saved = {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
    written = ("y", *saved, *(running if training else ()))
    _note(p, {"x": x, "scale": scale, "bias": bias, "y": y, "z": z, **running, **saved}, written)
    rest = dict(numbers)
    alpha, beta = rest.pop("alpha"), rest.pop("beta")
    inner = p.scratch_like(y)
    if training:
        p.then(name, x, scale, bias, inner, axis=axis, **rest, **running, **saved)
    else:
        p.then(name, x, scale, bias, running_mean, running_variance, inner, axis=axis, **rest)
    if z is not None:
        elementwise.axpby(p, 1.0, z, 1.0, inner)
    if (alpha, beta) == (1.0, 0.0):
        elementwise.relu(p, inner, y)
    else:
        positive = p.scratch_like(y)
        elementwise.relu(p, inner, positive)
        elementwise.axpby(p, alpha, positive, beta, y)


@operation("x dy scale bias y dx dscale dbias dz saved_mean saved_inv_variance", _COMPOSED)
def _composed_backward(
    p: Program, x: Any, dy: Any, scale: Any, bias: Any, y: Any, dx: Any, dscale: Any, dbias: Any, dz: Any,
    saved_mean: Any, saved_inv_variance: Any, axis: Any, numbers: dict[str, float], *, workspace: Any = None,
) -> None:  # fmt: skip
    """Backward of the gradient where forward's result, given or made again, is above 0; ``dz`` is that gradient."""
    saved = {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
    outputs = {"dx": dx, "dscale": dscale, "dbias": dbias}
    read = {"x": x, "dy": dy, "scale": scale, "bias": bias, "y": y, **saved}
    _note(p, {**read, **outputs, "dz": dz}, (*outputs, "dz"))
    inner = y
    if y is None:
        inner = p.scratch_like(dy)
        if saved_mean is not None:
            p.then("forward_inference_inv_variance", x, scale, bias, saved_mean, saved_inv_variance, inner, axis=axis)
        else:
            p.then("forward_training", x, scale, bias, inner, epsilon=numbers["epsilon"], axis=axis)
    gradient = p.scratch_like(dy) if dz is None else dz
    elementwise.relu_backward(p, inner, dy, gradient)
    p.then("backward", x, gradient, scale, **outputs, axis=axis, **saved, **numbers)
