"""The vendor call that a problem asks for: its method, its tensors and its options, from one table each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pybnorm import _core
from pybnorm.check.problem import Problem
from pybnorm.enums import Operation

__all__ = [
    "METHODS",
    "OPTIONS",
    "TENSORS",
    "Tensor",
    "make",
    "options",
    "outputs",
    "overwritten",
    "tensors",
    "workspace_options",
]

METHODS = {
    Operation.FORWARD_TRAINING: "forward_training",
    Operation.FORWARD_INFERENCE: "forward_inference",
    Operation.BACKWARD: "backward",
}
"""Of `pybnorm.Handle`."""


class Tensor(NamedTuple):
    """A tensor of a call, by the name of its argument."""

    name: str
    data: bool
    """Whether it has the shape of x; else that of scale."""
    written: bool
    values: str
    """The field of `pybnorm.check.data.Inputs` with its values before the call; empty if it has none."""
    when: str
    """What the call must have for it: "always", or the field of a problem that says so."""


_WRITTEN = {
    **{"y": "prior", "dx": "prior", "dscale": "prior_scale", "dbias": "prior_bias"},
    **{"running_mean": "mean", "running_variance": "variance"},
}
"""Fields with what a written tensor holds before the call, where it is read then."""
_READ = {"running_mean": "mean", "running_variance": "variance"}
"""Fields of tensors that are only read, where they have another name."""
_WHEN = ("always", "running", "saved")
"""Of the core's conditions, those that a problem can state."""


def _table(operation: Operation) -> tuple[Tensor, ...]:
    """What the core's table says of an operation's tensors, with the fields that their values come from."""
    return tuple(
        Tensor(
            row.name,
            not row.vector,
            row.written,
            _WRITTEN.get(row.name, "") if row.written else _READ.get(row.name, row.name),
            row.when,
        )
        for row in _core.tensors(operation)
        if row.when in _WHEN
    )


TENSORS = {operation: _table(operation) for operation in METHODS}
"""Tensors of each operation, in the order of the method's arguments."""
_COMMON = {"mode": "mode", "epsilon": "eps"}
OPTIONS = {
    Operation.FORWARD_TRAINING: _COMMON | {"alpha": "alpha", "beta": "beta", "exponential_average_factor": "factor"},
    Operation.FORWARD_INFERENCE: _COMMON | {"alpha": "alpha", "beta": "beta"},
    Operation.BACKWARD: _COMMON
    | {"alpha": "alpha", "beta": "beta", "alpha_param": "alpha_param", "beta_param": "beta_param"},
}
"""Keywords of each operation's method, with the field of a problem that has the value."""
_WORKSPACE = ("mode", "alpha", "beta", "alpha_param", "beta_param", "epsilon", "running", "saved")


def tensors(problem: Problem) -> list[Tensor]:
    """The tensors that the call of `problem` is given."""
    return [t for t in TENSORS[problem.operation] if t.when == "always" or getattr(problem, t.when)]


def outputs(problem: Problem) -> list[Tensor]:
    """Those of its tensors that the call of `problem` writes."""
    return [tensor for tensor in tensors(problem) if tensor.written]


def overwritten(problem: Problem) -> dict[str, str]:
    """Outputs of `problem` that have the memory of an input, and which."""
    if not problem.inplace:
        return {}
    return {"dx": "dy"} if problem.operation == Operation.BACKWARD else {"y": "x"}


def make(handle: Any, problem: Problem, buffers: Mapping[str, Any], workspace: Any) -> None:
    """Make the call of `problem` on tensors by name."""
    handle._in_place = problem.inplace
    try:
        getattr(handle, METHODS[problem.operation])(**buffers, **options(problem), workspace=workspace)
    finally:
        handle._in_place = False


def options(problem: Problem) -> dict[str, Any]:
    """The keywords of the call of `problem`, but for tensors and workspace."""
    found = {keyword: getattr(problem, name) for keyword, name in OPTIONS[problem.operation].items()}
    return found | _algorithm(problem)


def workspace_options(problem: Problem) -> dict[str, Any]:
    """The keywords of `pybnorm.Handle.workspace_size` for the call of `problem`."""
    return {name: getattr(problem, name) for name in _WORKSPACE} | _algorithm(problem)


def _algorithm(problem: Problem) -> dict[str, str]:
    return {"algorithm": problem.algorithm} if problem.algorithm else {}
