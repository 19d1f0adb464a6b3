"""Batch norm as it is written on a blackboard: pybnorm check --implementation numpy_one_liner.py:OneLiner

float16 and bfloat16 are computed in float32, as libraries do.
"""

import numpy as np


class OneLiner:
    """Spatial and per-activation, any dtype and layout; no blending."""

    name, version, xp = "NumPy one-liner", np.__version__, np

    def forward_training(
        self, x, scale, bias, epsilon, exponential_average_factor, mode="spatial", running_mean=None,
        running_variance=None,
    ):  # fmt: skip
        wide, axes = self.wide(x, mode)
        mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
        inverse = 1 / self.xp.sqrt(variance + wide.dtype.type(epsilon))
        found = {"y": scale * (wide - mean) * inverse + bias, "saved_mean": mean, "saved_inv_variance": inverse}
        if running_mean is not None:
            factor, m = wide.dtype.type(exponential_average_factor), x.size // mean.size
            found["running_mean"] = (1 - factor) * running_mean + factor * mean
            found["running_variance"] = (1 - factor) * running_variance + factor * variance * m / (m - 1)
        return {name: value.astype(x.dtype if name == "y" else scale.dtype) for name, value in found.items()}

    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon, mode="spatial"):
        wide, _ = self.wide(x, mode)
        inverse = 1 / self.xp.sqrt(running_variance.astype(wide.dtype) + wide.dtype.type(epsilon))
        return (scale * (wide - running_mean) * inverse + bias).astype(x.dtype)

    def backward(self, x, dy, scale, epsilon, mode="spatial", saved_mean=None, saved_inv_variance=None):
        (wide, axes), (slope, _) = self.wide(x, mode), self.wide(dy, mode)
        if saved_mean is None:
            saved_mean = wide.mean(axes, keepdims=True)
            saved_inv_variance = 1 / self.xp.sqrt(wide.var(axes, keepdims=True) + wide.dtype.type(epsilon))
        normal = (wide - saved_mean) * saved_inv_variance
        dscale, dbias = (slope * normal).sum(axes, keepdims=True), slope.sum(axes, keepdims=True)
        dx = scale * saved_inv_variance * (slope - (dbias + normal * dscale) * saved_mean.size / x.size)
        return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(scale.dtype)

    def wide(self, array, mode):
        wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
        return wide, (0,) if mode == "peract" else (0, *range(2, array.ndim))
