"""The vendor call that a problem asks for: its method, its tensors and its options, from one table each."""

from __future__ import annotations

from typing import Any, NamedTuple

from pybnorm.check.problem import Problem
from pybnorm.enums import Operation

__all__ = ["METHODS", "OPTIONS", "TENSORS", "Tensor", "options", "outputs", "tensors", "workspace_options"]

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


_X = Tensor("x", True, False, "x")
_SCALE = Tensor("scale", False, False, "scale")
_BIAS = Tensor("bias", False, False, "bias")
_Y = Tensor("y", True, True, "prior")
TENSORS = {
    Operation.FORWARD_TRAINING: (
        *(_X, _SCALE, _BIAS, _Y),
        Tensor("running_mean", False, True, "mean"),
        Tensor("running_variance", False, True, "variance"),
        Tensor("saved_mean", False, True, ""),
        Tensor("saved_inv_variance", False, True, ""),
    ),
    Operation.FORWARD_INFERENCE: (
        *(_X, _SCALE, _BIAS),
        Tensor("running_mean", False, False, "mean"),
        Tensor("running_variance", False, False, "variance"),
        _Y,
    ),
    Operation.BACKWARD: (
        *(_X, Tensor("dy", True, False, "dy"), _SCALE, Tensor("dx", True, True, "prior")),
        Tensor("dscale", False, True, "prior_scale"),
        Tensor("dbias", False, True, "prior_bias"),
        Tensor("saved_mean", False, False, "saved_mean"),
        Tensor("saved_inv_variance", False, False, "saved_inv_variance"),
    ),
}
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
    left_out = (() if problem.running else ("running_mean", "running_variance")) + (
        () if problem.saved else ("saved_mean", "saved_inv_variance")
    )
    return [tensor for tensor in TENSORS[problem.operation] if tensor.name not in left_out]


def outputs(problem: Problem) -> list[Tensor]:
    """Those of its tensors that the call of `problem` writes."""
    return [tensor for tensor in tensors(problem) if tensor.written]


def options(problem: Problem) -> dict[str, Any]:
    """The keywords of the call of `problem`, but for tensors and workspace."""
    found = {keyword: getattr(problem, name) for keyword, name in OPTIONS[problem.operation].items()}
    return found | _algorithm(problem)


def workspace_options(problem: Problem) -> dict[str, Any]:
    """The keywords of `pybnorm.Handle.workspace_size` for the call of `problem`."""
    return {name: getattr(problem, name) for name in _WORKSPACE} | _algorithm(problem)


def _algorithm(problem: Problem) -> dict[str, str]:
    return {"algorithm": problem.algorithm} if problem.algorithm else {}
