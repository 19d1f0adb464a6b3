"""Batch norm in JAX: pybnorm check --implementation jax_batch_norm.py:Jax, or jax_batch_norm.py:Standardize"""

import inspect

import jax
from numpy_one_liner import OneLiner

jax.config.update("jax_enable_x64", True)


def compiled(method):
    static = {"self", "mode", "epsilon", "exponential_average_factor"} & set(inspect.signature(method).parameters)
    return jax.jit(method, static_argnames=tuple(static))


class Jax(OneLiner):
    """The NumPy one-liner, as jax.jit and XLA make it."""

    name, version, xp, arrays = "JAX one-liner", jax.__version__, jax.numpy, "jax"
    forward_training = compiled(OneLiner.forward_training)
    forward_inference = compiled(OneLiner.forward_inference)
    backward = compiled(OneLiner.backward)


class Standardize:
    """jax.nn.standardize, whose variance is E[x * x] - E[x] ** 2, and its gradient by JAX."""

    name, version, arrays = "jax.nn.standardize", jax.__version__, "jax"
    outputs, dtypes = ("y", "dx", "dscale", "dbias"), ("f32", "f64")  # 16-bit data are squared in 16 bits

    @compiled
    def forward_training(self, x, scale, bias, epsilon):
        normal = jax.nn.standardize(x, axis=(0, *range(2, x.ndim)), epsilon=epsilon)
        return {"y": (scale * normal + bias).astype(x.dtype)}

    @compiled
    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
        normal = jax.nn.standardize(x, mean=running_mean, variance=running_variance, epsilon=epsilon)
        return (scale * normal + bias).astype(x.dtype)

    @compiled
    def backward(self, x, dy, scale, epsilon):
        _, pullback = jax.vjp(lambda *a: self.forward_training(*a, epsilon)["y"], x, scale, 0 * scale)
        return pullback(dy)
