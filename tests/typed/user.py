"""What a user's strict type checker accepts and refuses; never run. mypy reads it with the package (pyproject.toml).

A line that is refused carries the error's name; an error that is not there any more is reported, too.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import pybnorm
from pybnorm.functional import batch_norm_backward, batch_norm_inference, batch_norm_training

Array = NDArray[np.float32]


def handles(x: Array, scale: Array, bias: Array, y: Array, backend: str) -> None:
    with pybnorm.Handle("onednn", known_defects="error") as handle:
        handle.forward_training(x, scale, bias, y, mode="spatial", algorithm="auto", activation="relu")
        handle.forward_training(x, scale, bias, y, mode=pybnorm.Mode.PER_ACTIVATION, algorithm="graph:2")
        handle.forward_training(x, scale, bias, y, mode="spatail")  # type: ignore[arg-type]
        handle.forward_training(x, scale, bias, y, activation="gelu")  # type: ignore[arg-type]
        handle.forward_training(x, scale, bias, y, eps=1e-3)  # type: ignore[call-arg]
        handle.forward_training(x, scale, bias)  # type: ignore[call-arg]
        plan: pybnorm.ForwardTrainingPlan = handle.plan_forward_training(x)
        plan(x, scale, bias, y)
        nbytes: int = handle.workspace_size("forward_training", handle.descriptor(x))
        handle.workspace_size("forwards", handle.descriptor(x))  # type: ignore[arg-type]
    pybnorm.Handle(backend)  # of one's own, too
    pybnorm.Handle("onednn", known_defects="ignored")  # type: ignore[arg-type]
    able: tuple[pybnorm.Capability, str] = pybnorm.capability("onednn", "train", "spatial", "f32", "nchw", 4)
    pybnorm.capability("onednn", "train", "spatial", "f32", "nwhc", 4)  # type: ignore[arg-type]
    print(nbytes, able)


def arrays(x: Array, dy: Array, scale: Array, bias: Array) -> Array:
    y, mean, inv_variance = batch_norm_training(x, scale, bias, mode="spatial")
    same: Array = y
    other: NDArray[np.float64] = y  # type: ignore[assignment]
    batch_norm_training(x, scale, bias, mode="channels")  # type: ignore[arg-type]
    dx, _, _ = batch_norm_backward(x, dy, scale, mean, inv_variance)
    gradient: Array = dx
    inferred: Array = batch_norm_inference(x, running_mean=mean, running_variance=inv_variance)
    found: list[Any] = [same, other, gradient, inferred]
    result: Array = found[0]
    return result
