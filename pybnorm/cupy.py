"""CuPy's batch norm of cuDNN, by the names that CuPy 14 dropped with ``cupy.cudnn`` and ``cupyx.cudnn``.

``import pybnorm.cupy as cudnn`` in place of ``from cupy import cudnn`` keeps code written for CuPy 13:
`batch_normalization_forward_training`, its sibling `batch_normalization_forward_training_ex`,
`batch_normalization_forward_inference` and `batch_normalization_backward`, with its arguments and results. They are
calls of `pybnorm.functional`, so they take arrays of CuPy on CUDA and ROCm, and of NumPy. These were run; CuPy's
arrays on a GPU were not yet. Errors are those of `pybnorm.functional`, with CuPy's names of arguments.

Shared arguments:

x, gy
    Arrays of CuPy or NumPy; copied where they are not C-contiguous, as CuPy does.
gamma, beta, mean, var
    Parameters, one for each channel, or with ``PER_ACTIVATION`` for each value of an image. Of another dtype than the
    library computes in, such as float16, they are converted.
is_for_conv2d
    True: x is (N, C, H, W), or (N, H, W, C) with `d_layout` 1. False: x is (N, anything), one channel for each value.
cudnn_mode
    0 ``PER_ACTIVATION``, 1 ``SPATIAL``, 2 ``SPATIAL_PERSISTENT``: the fastest way, also one of limited range.
debug
    Accepted. An overflow that cuDNN's persistent kernels record is not looked for.
d_layout
    0 ``CUDNN_TENSOR_NCHW``, 1 ``CUDNN_TENSOR_NHWC``.
"""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np

from pybnorm import _arguments, functional
from pybnorm._arrays import as_buffer
from pybnorm.enums import DataType, Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "batch_normalization_backward", "batch_normalization_forward_inference", "batch_normalization_forward_training",
    "batch_normalization_forward_training_ex",
]  # fmt: skip


def batch_normalization_forward_training(
    x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, mean: Any, inv_std: Any, eps: float,
    decay: float, is_for_conv2d: bool, cudnn_mode: int, debug: bool, d_layout: int = 0,
) -> Any:  # fmt: skip
    """Normalize by the statistics of the batch.

    Parameters
    ----------
    x, gamma, beta
        See the module.
    running_mean, running_var : array, as gamma
        Updated in place: ``running = decay * running + (1 - decay) * batch``, with the unbiased variance.
    mean, inv_std : array or None
        Both or none. Written: the batch's mean and ``1 / sqrt(variance + eps)``.
    eps : float
    decay : float
        From 0 to 1.
    is_for_conv2d, cudnn_mode, debug, d_layout
        See the module.

    Returns
    -------
    y : array
        And, where `mean` is None, new arrays with what would be written there: ``(y, mean, inv_std)``.

    Examples
    --------
    >>> x, ones, zeros = np.float32([[1, 10], [3, 30]]), np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> y, mean, inv_std = pybnorm.cupy.batch_normalization_forward_training(
    ...     x, ones, zeros, zeros.copy(), ones.copy(), None, None, 0.0, 0.9, False, 1, False)
    >>> y, mean
    (array([[-1., -1.],
           [ 1.,  1.]], dtype=float32), array([ 2., 20.], dtype=float32))
    """
    found = batch_normalization_forward_training_ex(
        x, gamma, beta, running_mean, running_var, mean, inv_std, eps, decay, is_for_conv2d, cudnn_mode, debug, d_layout
    )[1:]
    return found if mean is None else found[0]


def batch_normalization_forward_training_ex(
    x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any, mean: Any, inv_std: Any, eps: float,
    decay: float, is_for_conv2d: bool, cudnn_mode: int, debug: bool, d_layout: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """`batch_normalization_forward_training` with a reserve space, which is None, in front of the results.

    Parameters
    ----------
    x, gamma, beta, running_mean, running_var, mean, inv_std, eps, decay, is_for_conv2d, cudnn_mode, debug, d_layout
        As there.

    Returns
    -------
    tuple
        ``(None, y)``, or where `mean` is None ``(None, y, mean, inv_std)``.

    Examples
    --------
    >>> x, ones, zeros = np.float32([[1, 10], [3, 30]]), np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> reserve_space, y, mean, inv_std = pybnorm.cupy.batch_normalization_forward_training_ex(
    ...     x, ones, zeros, zeros.copy(), ones.copy(), None, None, 0.0, 0.9, False, 1, False)
    >>> reserve_space, mean, inv_std
    (None, array([ 2., 20.], dtype=float32), array([1. , 0.1], dtype=float32))
    """
    call = _Call(x, is_for_conv2d, cudnn_mode, debug, d_layout)
    given = _arguments.pair("mean", mean, "inv_std", inv_std)
    factor = 1.0 - _arguments.factor(decay, "decay")
    written = {"running_mean": running_mean, "running_var": running_var}
    if given:
        written |= {"mean": mean, "inv_std": inv_std}
    for name, array in written.items():
        if not getattr(_array(array, name).flags, "writeable", True):
            raise ArgumentError(name, "a read-only array", "one that can be written")
    used = {name: call.vector(array, name) for name, array in written.items()}
    y, *statistics = call.run(
        functional.batch_norm_training, call.data(x, "x"), call.vector(gamma, "gamma"), call.vector(beta, "beta"),
        running_mean=used["running_mean"], running_variance=used["running_var"], epsilon=eps,
        exponential_average_factor=factor, out=(None, used.get("mean"), used.get("inv_std")),
    )  # fmt: skip
    for name, array in written.items():
        if not (array.dtype == used[name].dtype and array.flags.c_contiguous):  # else it is a view
            array[...] = used[name].reshape(array.shape)
    if given:
        return None, call.result(y)
    return None, call.result(y), *(one.reshape(gamma.shape) for one in statistics)


def batch_normalization_forward_inference(
    x: Any, gamma: Any, beta: Any, mean: Any, var: Any, eps: float, is_for_conv2d: bool, cudnn_mode: int,
    d_layout: int = 0,
) -> Any:  # fmt: skip
    """Normalize by given statistics: ``y = gamma * (x - mean) / sqrt(var + eps) + beta``.

    Parameters
    ----------
    x, gamma, beta, mean, var
        See the module.
    eps : float
    is_for_conv2d, cudnn_mode, d_layout
        See the module.

    Returns
    -------
    array
        y, shape and dtype of x.

    Examples
    --------
    >>> x, ones, zeros = np.float32([[1, 10], [3, 30]]), np.ones(2, np.float32), np.zeros(2, np.float32)
    >>> pybnorm.cupy.batch_normalization_forward_inference(x, ones, zeros, ones, 4 * ones, 0.0, False, 1)
    array([[ 0. ,  4.5],
           [ 1. , 14.5]], dtype=float32)
    """
    call = _Call(x, is_for_conv2d, cudnn_mode, False, d_layout)
    vectors = {"scale": call.vector(gamma, "gamma"), "bias": call.vector(beta, "beta")}
    vectors |= {"running_mean": call.vector(mean, "mean"), "running_variance": call.vector(var, "var")}
    return call.result(call.run(functional.batch_norm_inference, call.data(x, "x"), **vectors, epsilon=eps))


def batch_normalization_backward(
    x: Any, gamma: Any, gy: Any, mean: Any, inv_std: Any, eps: float, is_for_conv2d: bool, cudnn_mode: int,
    debug: bool, d_layout: int = 0, *, reserve_space: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of `batch_normalization_forward_training`.

    Parameters
    ----------
    x, gamma, gy
        See the module.
    mean, inv_std : array, as gamma
        What forward returned or wrote.
    eps : float
        Not used: `inv_std` has it.
    is_for_conv2d, cudnn_mode, debug, d_layout
        See the module.
    reserve_space : None
        What `batch_normalization_forward_training_ex` returned.

    Returns
    -------
    gx : array
        Shape and dtype of x.
    ggamma, gbeta : array
        Shape and dtype of gamma.

    Examples
    --------
    >>> x, gy, ones = np.float32([[1], [3]]), np.float32([[1], [4]]), np.ones(1, np.float32)
    >>> pybnorm.cupy.batch_normalization_backward(x, ones, gy, 2 * ones, ones, 0.0, False, 1, False)
    (array([[0.],
           [0.]], dtype=float32), array([3.], dtype=float32), array([5.], dtype=float32))
    """
    if reserve_space is not None:
        raise ArgumentTypeError("reserve_space", reserve_space, "None, as forward here returns it")
    call = _Call(x, is_for_conv2d, cudnn_mode, debug, d_layout)
    data = call.data(x, "x"), call.data(gy, "gy")
    given = [call.vector(array, name) for name, array in (("gamma", gamma), ("mean", mean), ("inv_std", inv_std))]
    gx, *sums = call.run(functional.batch_norm_backward, *data, *given, epsilon=eps)
    ggamma, gbeta = (one.reshape(gamma.shape).astype(gamma.dtype, copy=False) for one in sums)
    return call.result(gx), ggamma, gbeta


_NAMES = {
    "epsilon": "eps", "scale": "gamma", "bias": "beta", "dy": "gy", "running_variance": "running_var",
    "saved_mean": "mean", "saved_inv_variance": "inv_std", "out[1]": "mean", "out[2]": "inv_std",
}  # fmt: skip


class _Call:
    """The layout of a call's arrays, as `pybnorm.functional` takes them."""

    def __init__(self, x: Any, is_for_conv2d: object, cudnn_mode: object, debug: object, d_layout: object) -> None:
        dtype = as_buffer(_array(x, "x"), "x").dtype
        conv = _arguments.boolean(is_for_conv2d, "is_for_conv2d")
        mode = _arguments.integer(cudnn_mode, "cudnn_mode", 0, 2)
        _arguments.boolean(debug, "debug")
        self.last = _arguments.integer(d_layout, "d_layout", 0, 1) == 1 and conv
        if conv and x.ndim != 4:
            raise ArgumentError("x", f"shape {x.shape}", "four axes with is_for_conv2d=True")
        if not conv and (x.ndim < 1 or not x.size):
            raise ArgumentError("x", f"shape {x.shape}", "one axis or more, and an element in each")
        self.shape = x.shape
        self.dims = x.shape if conv else (x.shape[0], x.size // x.shape[0], 1, 1)
        _, c, h, w = (self.dims[i] for i in ((0, 3, 1, 2) if self.last else (0, 1, 2, 3)))
        self.parameters = (c,) if mode else (1, c, h, w)
        self.kind = "float64" if dtype == DataType.FLOAT64 else "float32"
        # What the persistent mode is for, where a library has it.
        how = {"mode": Mode.SPATIAL, "algorithm": "fast" if mode == 2 else "auto"}
        self.options: dict[str, Any] = how if mode else {"mode": Mode.PER_ACTIVATION}

    def run(self, function: Any, *arrays: Any, **options: Any) -> Any:
        """A function's call, whose errors have CuPy's names."""
        try:
            return function(*arrays, **options, **self.options)
        except ArgumentError as error:
            raise type(error)(_NAMES.get(error.argument, error.argument), error.value, error.allowed) from None

    def data(self, array: Any, name: str) -> Any:
        """Bring data to the axis order N, C, H, W; a view where it is contiguous."""
        if _array(array, name).shape != self.shape:
            raise ArgumentError(name, f"shape {array.shape}", f"{self.shape}, that of x")
        array = array if array.flags.c_contiguous else array.copy(order="C")
        return array.transpose(0, 3, 1, 2) if self.last else array.reshape(self.dims)

    def result(self, array: Any) -> Any:
        """Bring a result to the axis order of x."""
        return array.transpose(0, 2, 3, 1) if self.last else array.reshape(self.shape)

    def vector(self, array: Any, name: str) -> Any:
        """An array of the shape and the dtype that the library computes with; a view where it has these."""
        size = math.prod(self.parameters)
        if _array(array, name).size != size:
            raise ArgumentError(name, f"shape {array.shape}", f"{size} values, as x and cudnn_mode have parameters")
        as_buffer(array, name)  # refuses what are no numbers of a type that libraries have
        array = array if array.flags.c_contiguous else array.copy(order="C")
        return array.astype(self.kind, copy=False).reshape(self.parameters)


def _array(value: Any, name: str) -> Any:
    if type(value) is not np.ndarray and not array_api_compat.is_cupy_array(value):
        raise ArgumentTypeError(name, value, "an array of CuPy or NumPy")
    return value
