"""Batch norm with an activation where no kernel of the library has both: for use inside the package.

The activation comes first, alpha and beta blend its result. Forward's result is rounded to the data's dtype before it,
and so the gradient's mask is that of the rounded value.
"""

from __future__ import annotations

from typing import Any

from pybnorm import _arguments
from pybnorm.operations import elementwise
from pybnorm.operations.elementwise import Limits
from pybnorm.operations.preparation import Recipe, operation
from pybnorm.operations.program import Program

RECIPES: dict[str, Recipe] = {}


@operation(
    "x scale bias y running_mean running_variance saved_mean saved_inv_variance z previous_mean previous_variance "
    "inv_variance",
    RECIPES,
)
def activated_forward(
    p: Program, x: Any, scale: Any, bias: Any, y: Any, *, training: bool, alpha: float, beta: float, epsilon: float,
    axis: Any, limits: Limits | None, exponential_average_factor: float = 0.0, running_mean: Any = None,
    running_variance: Any = None, saved_mean: Any = None, saved_inv_variance: Any = None, z: Any = None,
    previous_mean: Any = None, previous_variance: Any = None, inv_variance: Any = None, workspace: Any = None,
) -> None:  # fmt: skip
    """``y = alpha * act(forward(...) + z) + beta * y``; without `limits` there is no activation, and no `z`.

    Training starts from ``previous_mean`` and ``previous_variance``, inference from ``inv_variance``, where given.
    """
    alpha, beta = _arguments.scalar(alpha, "alpha", y.dtype), _arguments.scalar(beta, "beta", y.dtype)
    statistics = {"running_mean": running_mean, "running_variance": running_variance}
    previous = {"previous_mean": previous_mean, "previous_variance": previous_variance, "inv_variance": inv_variance}
    saved = {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
    written = {"y": y} | (statistics | saved if training else {})
    _note(p, {"x": x, "scale": scale, "bias": bias, "z": z, **previous} | ({} if training else statistics), written)
    inner = y if limits is None else p.scratch_like(y)
    blend: dict[str, Any] = {"axis": axis} | ({"alpha": alpha, "beta": beta} if limits is None else {})
    if training:
        if previous_mean is not None:
            elementwise.axpby(p, 1.0, previous_mean, 0.0, running_mean)
            elementwise.axpby(p, 1.0, previous_variance, 0.0, running_variance)
        options = {"exponential_average_factor": exponential_average_factor, **statistics, **saved, **blend}
        p.then("forward_training", x, scale, bias, inner, epsilon=epsilon, **options)
    elif inv_variance is not None:
        p.then("forward_inference_inv_variance", x, scale, bias, running_mean, inv_variance, inner, **blend)
    else:
        p.then("forward_inference", x, scale, bias, running_mean, running_variance, inner, epsilon=epsilon, **blend)
    if limits is None:
        return
    if z is not None:
        elementwise.axpby(p, 1.0, z, 1.0, inner)
    passed = y if (alpha, beta) == (1.0, 0.0) else p.scratch_like(y)
    elementwise.activation(p, limits, inner, passed)
    if passed is not y:
        elementwise.axpby(p, alpha, passed, beta, y)


@operation("x dy scale bias dx dscale dbias saved_mean saved_inv_variance y dz", RECIPES)
def activated_backward(
    p: Program, x: Any, dy: Any, scale: Any, bias: Any, dx: Any, dscale: Any, dbias: Any, saved_mean: Any,
    saved_inv_variance: Any, *, alpha: float, beta: float, alpha_param: float, beta_param: float, epsilon: float,
    axis: Any, limits: Limits, y: Any = None, dz: Any = None, workspace: Any = None,
) -> None:  # fmt: skip
    """Backward of the gradient that the activation lets through, which is ``dz``; the mask is that of forward's result.

    The result is `y`, or made again.
    """
    saved = {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
    outputs = {"dx": dx, "dscale": dscale, "dbias": dbias}
    _note(p, {"x": x, "dy": dy, "scale": scale, "bias": bias, "y": y, **saved}, outputs | {"dz": dz})
    inner = p.scratch_like(dy) if y is None else y
    gradient = p.scratch_like(dy) if dz is None else dz
    if y is None and saved_mean is not None:
        p.then("forward_inference_inv_variance", x, scale, bias, saved_mean, saved_inv_variance, inner, axis=axis)
    elif y is None:
        p.then("forward_training", x, scale, bias, inner, epsilon=epsilon, axis=axis)
    elementwise.activation_backward(p, limits, inner, dy, gradient)
    p.then(
        "backward", x, gradient, scale, **outputs, epsilon=epsilon, axis=axis, **saved,
        alpha=alpha, beta=beta, alpha_param=alpha_param, beta_param=beta_param,
    )  # fmt: skip


@operation("x y", RECIPES)
def activation(p: Program, x: Any, y: Any, *, limits: Limits, workspace: Any = None) -> None:
    """``y = act(x)``."""
    _note(p, {"x": x}, {"y": y})
    elementwise.activation(p, limits, x, y)


@operation("x dy dx", RECIPES)
def activation_backward(p: Program, x: Any, dy: Any, dx: Any, *, limits: Limits, workspace: Any = None) -> None:
    """``dx = act'(x) * dy``."""
    _note(p, {"x": x, "dy": dy}, {"dx": dx})
    elementwise.activation_backward(p, limits, x, dy, dx)


def _note(p: Program, read: dict[str, Any], written: dict[str, Any]) -> None:
    for arrays, output in ((read, False), (written, True)):
        for name, array in arrays.items():
            if array is not None:
                p.note(name, array, output)
