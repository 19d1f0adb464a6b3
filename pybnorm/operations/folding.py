"""Batch norm of inference as one multiplication and one addition."""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import as_buffer
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = ["Folded", "fold"]


class Folded(NamedTuple):
    """``y = a * x + b`` for each statistic."""

    a: Any
    b: Any


def fold(mean: Any, variance: Any, scale: Any = None, bias: Any = None, *, epsilon: float = 1e-5) -> Folded:
    """The factor and the offset that batch norm of inference applies to x.

    ``a = scale / sqrt(variance + epsilon)`` and ``b = bias - mean * a``. A convolution before it, or a linear layer,
    takes both: its weights are multiplied by `a` along their output channels, and its bias becomes ``a * bias + b``.
    After a transposed convolution the output channels are the weights' second axis. A convolution behind it takes
    them too, but only without padding: a padded 0 is not ``b``.

    Parameters
    ----------
    mean, variance : array
        NumPy, PyTorch, CuPy or JAX arrays of one shape, on any device. Wide ones give more: of float16 arrays the
        results are float16.
    scale, bias : array, optional
        1 and 0 where left out.
    epsilon : float, optional

    Returns
    -------
    Folded
        `a` and `b`, new arrays beside `variance`.

    Notes
    -----
    Computed by the operators of the arrays, with no vendor call and no handle.

    Examples
    --------
    >>> mean, variance = np.float64([1, 2]), np.float64([0.25, 4])
    >>> folded = pybnorm.operations.fold(mean, variance, np.float64([1, 3]), np.float64([0, 1]), epsilon=0.0)
    >>> folded.a, folded.b
    (array([2. , 1.5]), array([-2., -2.]))
    """
    epsilon = _arguments.scalar(epsilon, "epsilon")
    if epsilon < 0:
        raise ArgumentError("epsilon", epsilon, "0 or larger")
    variance, mean = _known(variance, "variance"), _known(mean, "mean")
    scale = None if scale is None else _known(scale, "scale")
    bias = None if bias is None else _known(bias, "bias")
    for name, array in {"mean": mean, "scale": scale, "bias": bias}.items():
        if array is not None and array.shape != variance.shape:
            raise ArgumentError(name, f"shape {tuple(array.shape)}", f"that of variance, {tuple(variance.shape)}")
    a = (variance + epsilon) ** -0.5
    if scale is not None:
        a = scale * a
    shift = mean * a
    return Folded(a, -shift if bias is None else bias - shift)


def _known(array: Any, name: str) -> Any:
    """An array of a known framework; one that is traced has no memory to look at."""
    frameworks = (array_api_compat.is_torch_array, array_api_compat.is_cupy_array, array_api_compat.is_jax_array)
    try:
        if any(known(array) for known in frameworks):
            return array
        on_cpu = array_api_compat.is_numpy_array(array)
    except Exception:  # a class of the caller's that fails when it is asked what it is
        on_cpu = False
    if not on_cpu:
        raise ArgumentTypeError(name, type(array).__name__, "a NumPy, PyTorch, CuPy or JAX array")
    as_buffer(array, name)  # refuses another dtype
    return np.asarray(array)
