"""MIOpen's batch-norm calls by MIOpen's names and argument order, on every backend.

The calls of MIOpen's batch-norm page, plain and ``_V2``, in snake case. The mathematics is that of `pybnorm.Handle`;
what differs from MIOpen is what its documentation leaves open or its library gets wrong:

* Of a pair (running mean and variance, saved mean and inverse variance, estimated mean and variance) both are given or
  none. MIOpen silently skips the pair when one of the two is NULL.
* Inference without estimates normalizes by the batch, as MIOpen documents; here it says so in one place, needs both
  absent, and is composed from forward training without statistics, so it works where the vendor's own does not.
* alpha and beta are Python floats and blend on every backend. MIOpen reads ``float *`` whatever the data are and
  refuses all but 1 and 0, in training with a status that names nothing.
* The batch variance enters the running variance unbiased, times m / (m - 1), as MIOpen computes and does not say. With
  m = 1 that is undefined: running statistics are refused, where MIOpen leaves the correction out.
* ``saved_inv_variance`` is 1 / sqrt(biased variance + epsilon), an inverse standard deviation.
* epsilon must be finite and not negative. Where variance + epsilon is 0 the result is that of the division: NaN where
  x is the mean, infinite elsewhere; MIOpen takes the absolute value first.
* The output pointers of backward are all required; MIOpen does not look at two of them.
* Mode is PER_ACTIVATION (0) or SPATIAL (1), MIOpen's two; it takes any other number for the first.
* Parameters of float64 data are float64, also in `derive_bn_tensor_descriptor`; MIOpen derives float32.

The calls with an activation, which MIOpen 3.5 added, are that library's own fused ones where the loaded library has
them, the mode is SPATIAL (its per-activation kernels leave the activation out and report success) and the parameters
have the derived dtype. Elsewhere RELU is composed: batch norm into scratch, rounded there to
the data's dtype, and relu from there, so that of float16 and bfloat16 data the gradient's mask is that of the rounded
value. CLIPPEDRELU and CLAMP cannot be composed of the backends' common primitives and are refused by name. The
activation comes first, alpha and beta blend its result.

Not here: MIOpen's newest additions ``..._V3``, ``...Activation_V2`` and ``...InferenceInvVariance``, of which
`pybnorm.operations` has the mathematics.

Arguments of every call
-----------------------
handle : Handle
    Of any backend.
bn_mode : Mode
    `Mode.PER_ACTIVATION` or `Mode.SPATIAL`; their numbers are ``miopenBatchNormMode_t``'s.
..._desc : TensorDescriptor
    Of the handle's backend, rank 2 to 8; those of parameters as `derive_bn_tensor_descriptor` gives them, in the
    ``_v2`` calls of any dtype that `pybnorm.operations` takes for parameters.
data and parameters : int or array
    An address in memory of the handle's device, or an array that lies in memory as its descriptor says. None or 0 is
    NULL, where NULL is allowed.
workspace : array or (int, int), optional
    MIOpen has no such argument. Device backends need it for alpha and beta other than 1 and 0, for parameters of
    mixed dtypes, and for a composed activation; without it they raise WorkspaceError, which says how many bytes. On
    the CPU pybnorm keeps its own.

Errors name MIOpen's arguments, in snake case.
"""

from __future__ import annotations

import contextlib
import enum
import numbers
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pybnorm import _arguments, _sequence, operations
from pybnorm import _core as core
from pybnorm._arrays import Buffer
from pybnorm._core import Handle, TensorDescriptor
from pybnorm.enums import Activation, Capability, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError, UnsupportedError

__all__ = [
    "ActivationDescriptor",
    "ActivationMode",
    "batch_norm_backward_activation",
    "batch_norm_forward_inference_activation",
    "batch_norm_forward_training_activation",
    "batch_normalization_backward",
    "batch_normalization_backward_v2",
    "batch_normalization_forward_inference",
    "batch_normalization_forward_inference_v2",
    "batch_normalization_forward_training",
    "batch_normalization_forward_training_v2",
    "cumulative_average_factor",
    "derive_bn_tensor_descriptor",
]


def cumulative_average_factor(n: int) -> float:
    """The exponential average factor that makes running statistics the plain average over all calls so far.

    ``1 / (1 + n)``: with it the running mean after call n is the mean of the n + 1 batch means. MIOpen's and cuDNN's
    pages advise it; neither library computes it, a call uses the factor as given.

    Parameters
    ----------
    n : int
        Calls before this one: 0 for the first, which so replaces the initial values.

    Returns
    -------
    float

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `n` is not an integer, or negative.
    """
    number = _arguments.index(n)
    if number is None:
        raise ArgumentTypeError("n", n, "an integer from 0")
    if number < 0:
        raise ArgumentError("n", n, "an integer from 0")
    return 1 / (1 + number)


def derive_bn_tensor_descriptor(x_desc: TensorDescriptor, bn_mode: object) -> TensorDescriptor:
    """``miopenDeriveBNTensorDescriptor``: the descriptor of scale, bias and statistics.

    Parameters
    ----------
    x_desc : TensorDescriptor
        Rank 2 to 8; MIOpen itself writes out of bounds below 4 and refuses more than 5.
    bn_mode : Mode

    Returns
    -------
    TensorDescriptor
        (1, C, 1...) for SPATIAL, (1, C, spatial...) for PER_ACTIVATION; float64 for float64 data, else float32;
        packed. MIOpen's first argument, the descriptor to be set, is the result here.

    Raises
    ------
    ArgumentError, UnsupportedError

    Notes
    -----
    Vendor symbols: see `pybnorm.derive_bn_tensor_descriptor`.
    """
    with _words({"mode": "bn_mode"}):
        return core.derive_bn_tensor_descriptor(x_desc, _mode(bn_mode))


# ---------------------------------------------------------------- forward training


def batch_normalization_forward_training(
    handle: Handle,
    bn_mode: object,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: Any,
    y_desc: TensorDescriptor,
    y: Any,
    bn_scale_bias_mean_var_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    exp_avg_factor: float,
    result_running_mean: Any,
    result_running_variance: Any,
    epsilon: float,
    result_save_mean: Any,
    result_save_inv_variance: Any,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormalizationForwardTraining``: normalize by the statistics of the batch.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``,
    ``running = (1 - factor) * running + factor * batch``.

    Parameters
    ----------
    handle, bn_mode, workspace
        See the module.
    alpha, beta : float
        With beta 0 the prior y is not read.
    x_desc, y_desc : TensorDescriptor
        One shape and dtype, each its own strides.
    x, y : int or array
        y is written.
    bn_scale_bias_mean_var_desc : TensorDescriptor
        Of all parameters: the derived shape; float64 for float64 data, else float32.
    bn_scale, bn_bias : int or array
    exp_avg_factor : float
        From 0 to 1, used as given; `cumulative_average_factor` for a plain average.
    result_running_mean, result_running_variance : int or array or None
        Updated in place; both or none.
    epsilon : float
    result_save_mean, result_save_inv_variance : int or array or None
        Written; both or none.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Source of the formula: MIOpen's batch-norm page, with its silences filled as the module says.
    Vendor symbols: see `pybnorm.batch_normalization_forward_training`.
    Workspace: `Handle.workspace_size` of `Operation.FORWARD_TRAINING`.
    """
    _forward_training(
        handle,
        bn_mode,
        (alpha, beta),
        {"x": (x_desc, x), "y": (y_desc, y)},
        dict.fromkeys(("scale", "bias", "mean", "variance"), ("bn_scale_bias_mean_var", bn_scale_bias_mean_var_desc)),
        (bn_scale, bn_bias),
        exp_avg_factor,
        (result_running_mean, result_running_variance),
        epsilon,
        (result_save_mean, result_save_inv_variance),
        workspace,
    )


def batch_normalization_forward_training_v2(
    handle: Handle,
    bn_mode: object,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: Any,
    y_desc: TensorDescriptor,
    y: Any,
    scale_desc: TensorDescriptor,
    bias_desc: TensorDescriptor,
    saved_mean_desc: TensorDescriptor,
    saved_var_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    exp_avg_factor: float,
    result_running_mean: Any,
    result_running_variance: Any,
    epsilon: float,
    result_save_mean: Any,
    result_save_inv_variance: Any,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormalizationForwardTraining_V2``: a descriptor for each parameter, dtypes may differ.

    Parameters
    ----------
    scale_desc, bias_desc : TensorDescriptor
        Of `bn_scale` and `bn_bias` (MIOpen spells the second one ``biasVarDesc``).
    saved_mean_desc : TensorDescriptor
        Of `result_running_mean` and `result_save_mean`.
    saved_var_desc : TensorDescriptor
        Of `result_running_variance` and `result_save_inv_variance`.
    handle, bn_mode, alpha, beta, x_desc, x, y_desc, y, bn_scale, bn_bias, exp_avg_factor, result_running_mean, \
result_running_variance, epsilon, result_save_mean, result_save_inv_variance, workspace
        As in `batch_normalization_forward_training`. Parameters of data that are not float64 may each be float32,
        float16 or bfloat16.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: those of the plain call where all parameters have the derived dtype, else those of
    `pybnorm.operations.forward_training`, which widens 16-bit parameters in the workspace and rounds results once.
    Workspace: `Handle.workspace_size`, or `pybnorm.operations.workspace_size` for mixed dtypes.
    """
    _forward_training(
        handle,
        bn_mode,
        (alpha, beta),
        {"x": (x_desc, x), "y": (y_desc, y)},
        {
            "scale": ("scale", scale_desc),
            "bias": ("bias", bias_desc),
            "mean": ("saved_mean", saved_mean_desc),
            "variance": ("saved_var", saved_var_desc),
        },
        (bn_scale, bn_bias),
        exp_avg_factor,
        (result_running_mean, result_running_variance),
        epsilon,
        (result_save_mean, result_save_inv_variance),
        workspace,
    )


_TRAINING_WORDS = {
    "mode": "bn_mode",
    "scale": "bn_scale",
    "bias": "bn_bias",
    "exponential_average_factor": "exp_avg_factor",
    "running_mean": "result_running_mean",
    "running_variance": "result_running_variance",
    "saved_mean": "result_save_mean",
    "saved_inv_variance": "result_save_inv_variance",
}


def _forward_training(
    handle: Handle,
    bn_mode: object,
    blend: tuple[float, float],
    data: _Data,
    described: _Described,
    affine: tuple[Any, Any],
    factor: float,
    running: tuple[Any, Any],
    epsilon: float,
    saved: tuple[Any, Any],
    workspace: Any,
    activ_desc: object = None,
) -> None:
    with _words(_TRAINING_WORDS):
        mode = _mode(bn_mode)
        call = _Call(handle)
        x, y = call.data("x", data), call.data("y", data)
        scale = call.need("bn_scale", affine[0], described["scale"])
        bias = call.need("bn_bias", affine[1], described["bias"])
        running_mean = call.optional("result_running_mean", running[0], described["mean"])
        running_variance = call.optional("result_running_variance", running[1], described["variance"])
        saved_mean = call.optional("result_save_mean", saved[0], described["mean"])
        saved_inv_variance = call.optional("result_save_inv_variance", saved[1], described["variance"])
        options = {
            "alpha": blend[0],
            "beta": blend[1],
            "epsilon": epsilon,
            "exponential_average_factor": factor,
            "running_mean": running_mean,
            "running_variance": running_variance,
            "saved_mean": saved_mean,
            "saved_inv_variance": saved_inv_variance,
            "workspace": workspace,
        }
        act = _activation(activ_desc, x)
        if act and not _fused(call, Operation.FORWARD_TRAINING, mode, x):
            written = {"y": y, "running_mean": running_mean, "running_variance": running_variance}
            written |= {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
            _compose_forward(call, "forward_training", (x, scale, bias), y, mode, act, options, written)
        elif call.uniform(x):
            handle.forward_training(x, scale, bias, y, mode=mode, **options, **act)
        else:
            operations.forward_training(handle, x, scale, bias, y, axis=_axes(x, mode), **options)


# ---------------------------------------------------------------- forward inference


def batch_normalization_forward_inference(
    handle: Handle,
    bn_mode: object,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: Any,
    y_desc: TensorDescriptor,
    y: Any,
    bn_scale_bias_mean_var_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    estimated_mean: Any,
    estimated_variance: Any,
    epsilon: float,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormalizationForwardInference``: normalize by estimated statistics, or the batch's without them.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``

    Parameters
    ----------
    handle, bn_mode, workspace
        See the module.
    alpha, beta : float
        With beta 0 the prior y is not read.
    x_desc, y_desc : TensorDescriptor
        One shape and dtype, each its own strides.
    x, y : int or array
        y is written.
    bn_scale_bias_mean_var_desc : TensorDescriptor
        Of all parameters: the derived shape; float64 for float64 data, else float32.
    bn_scale, bn_bias : int or array
    estimated_mean, estimated_variance : int or array or None
        A mean and a variance (not an inverse deviation). Both, or none: mean and biased variance of x are used then,
        and nothing but y is written.
    epsilon : float

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Source of the formula: MIOpen's batch-norm page.
    Vendor symbols: see `pybnorm.batch_normalization_forward_inference`; without estimates
    `pybnorm.batch_normalization_forward_training`.
    Workspace: `Handle.workspace_size` of `Operation.FORWARD_INFERENCE`, without estimates of
    `Operation.FORWARD_TRAINING` with ``running=False, saved=False``.
    """
    _forward_inference(
        handle,
        bn_mode,
        (alpha, beta),
        {"x": (x_desc, x), "y": (y_desc, y)},
        dict.fromkeys(("scale", "bias", "mean", "variance"), ("bn_scale_bias_mean_var", bn_scale_bias_mean_var_desc)),
        (bn_scale, bn_bias),
        (estimated_mean, estimated_variance),
        epsilon,
        workspace,
    )


def batch_normalization_forward_inference_v2(
    handle: Handle,
    bn_mode: object,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: Any,
    y_desc: TensorDescriptor,
    y: Any,
    scale_desc: TensorDescriptor,
    bias_desc: TensorDescriptor,
    est_mean_desc: TensorDescriptor,
    est_variance_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    estimated_mean: Any,
    estimated_variance: Any,
    epsilon: float,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormalizationForwardInference_V2``: a descriptor for each parameter, dtypes may differ.

    Parameters
    ----------
    scale_desc, bias_desc, est_mean_desc, est_variance_desc : TensorDescriptor
        Of `bn_scale`, `bn_bias`, `estimated_mean` and `estimated_variance`.
    handle, bn_mode, alpha, beta, x_desc, x, y_desc, y, bn_scale, bn_bias, estimated_mean, estimated_variance, \
epsilon, workspace
        As in `batch_normalization_forward_inference`. Parameters of data that are not float64 may each be float32,
        float16 or bfloat16.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: those of the plain call where all parameters have the derived dtype, else those of
    `pybnorm.operations.forward_inference`, or `forward_training` without estimates, which widen 16-bit parameters in
    the workspace.
    Workspace: `Handle.workspace_size`, or `pybnorm.operations.workspace_size` for mixed dtypes.
    """
    _forward_inference(
        handle,
        bn_mode,
        (alpha, beta),
        {"x": (x_desc, x), "y": (y_desc, y)},
        {
            "scale": ("scale", scale_desc),
            "bias": ("bias", bias_desc),
            "mean": ("est_mean", est_mean_desc),
            "variance": ("est_variance", est_variance_desc),
        },
        (bn_scale, bn_bias),
        (estimated_mean, estimated_variance),
        epsilon,
        workspace,
    )


_INFERENCE_WORDS = {
    "mode": "bn_mode",
    "scale": "bn_scale",
    "bias": "bn_bias",
    "running_mean": "estimated_mean",
    "running_variance": "estimated_variance",
    "mean": "estimated_mean",
    "variance": "estimated_variance",
}


def _forward_inference(
    handle: Handle,
    bn_mode: object,
    blend: tuple[float, float],
    data: _Data,
    described: _Described,
    affine: tuple[Any, Any],
    estimated: tuple[Any, Any],
    epsilon: float,
    workspace: Any,
    activ_desc: object = None,
) -> None:
    with _words(_INFERENCE_WORDS):
        mode = _mode(bn_mode)
        call = _Call(handle)
        x, y = call.data("x", data), call.data("y", data)
        scale = call.need("bn_scale", affine[0], described["scale"])
        bias = call.need("bn_bias", affine[1], described["bias"])
        mean = call.optional("estimated_mean", estimated[0], described["mean"])
        variance = call.optional("estimated_variance", estimated[1], described["variance"])
        given = _arguments.pair("estimated_mean", mean, "estimated_variance", variance)
        options = {"alpha": blend[0], "beta": blend[1], "epsilon": epsilon, "workspace": workspace}
        act = _activation(activ_desc, x)
        operation = Operation.FORWARD_INFERENCE if given else Operation.FORWARD_TRAINING
        if act and not _fused(call, operation, mode, x):
            read = (x, scale, bias, mean, variance) if given else (x, scale, bias)
            _compose_forward(call, operation.name.lower(), read, y, mode, act, options, {"y": y})
        elif call.uniform(x):
            if given:
                handle.forward_inference(x, scale, bias, mean, variance, y, mode=mode, **options, **act)
            else:
                handle.forward_training(x, scale, bias, y, mode=mode, **options, **act)
        elif given:
            operations.forward_inference(handle, x, scale, bias, mean, variance, y, axis=_axes(x, mode), **options)
        else:
            operations.forward_training(handle, x, scale, bias, y, axis=_axes(x, mode), **options)


# ---------------------------------------------------------------- backward


def batch_normalization_backward(
    handle: Handle,
    bn_mode: object,
    alpha_data_diff: float,
    beta_data_diff: float,
    alpha_param_diff: float,
    beta_param_diff: float,
    x_desc: TensorDescriptor,
    x: Any,
    dy_desc: TensorDescriptor,
    dy: Any,
    dx_desc: TensorDescriptor,
    dx: Any,
    bn_scale_bias_diff_desc: TensorDescriptor,
    bn_scale: Any,
    result_bn_scale_diff: Any,
    result_bn_bias_diff: Any,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormalizationBackward``: gradients of forward training.

    With ``xhat = (x - mean) * inv``: ``dbias = sum(dy)``, ``dscale = sum(dy * xhat)``,
    ``dx = scale * inv * (dy - dbias / m - xhat * dscale / m)``; dx is blended by the data pair, dscale and dbias by
    the parameter pair.

    Parameters
    ----------
    handle, bn_mode, workspace
        See the module.
    alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff : float
        With a beta of 0 its prior is not read.
    x_desc, dy_desc, dx_desc : TensorDescriptor
        One shape and dtype, each its own strides.
    x, dy, dx : int or array
        dx is written.
    bn_scale_bias_diff_desc : TensorDescriptor
        Of all parameters: the derived shape; float64 for float64 data, else float32.
    bn_scale : int or array
    result_bn_scale_diff, result_bn_bias_diff : int or array
        Written; both required.
    epsilon : float
        Used only without saved statistics; must then be that of the forward call.
    saved_mean, saved_inv_variance : int or array or None
        As forward training wrote them, taken as they are; both, or none: computed from x.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Source of the formula: MIOpen's batch-norm page and Ioffe & Szegedy 2015, section 3.
    Vendor symbols: see `pybnorm.batch_normalization_backward`.
    Workspace: `Handle.workspace_size` of `Operation.BACKWARD`.
    """
    _backward(
        handle,
        bn_mode,
        (alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff),
        {"x": (x_desc, x), "dy": (dy_desc, dy), "dx": (dx_desc, dx)},
        dict.fromkeys(("scale", "bias", "mean", "variance"), ("bn_scale_bias_diff", bn_scale_bias_diff_desc)),
        (bn_scale, result_bn_scale_diff, result_bn_bias_diff),
        epsilon,
        (saved_mean, saved_inv_variance),
        workspace,
    )


def batch_normalization_backward_v2(
    handle: Handle,
    bn_mode: object,
    alpha_data_diff: float,
    beta_data_diff: float,
    alpha_param_diff: float,
    beta_param_diff: float,
    x_desc: TensorDescriptor,
    x: Any,
    dy_desc: TensorDescriptor,
    dy: Any,
    dx_desc: TensorDescriptor,
    dx: Any,
    scale_desc: TensorDescriptor,
    bias_desc: TensorDescriptor,
    saved_mean_desc: TensorDescriptor,
    saved_var_desc: TensorDescriptor,
    bn_scale: Any,
    result_bn_scale_diff: Any,
    result_bn_bias_diff: Any,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormalizationBackward_V2``: a descriptor for each parameter, dtypes may differ.

    Parameters
    ----------
    scale_desc : TensorDescriptor
        Of `bn_scale` and `result_bn_scale_diff`.
    bias_desc : TensorDescriptor
        Of `result_bn_bias_diff`.
    saved_mean_desc, saved_var_desc : TensorDescriptor
        Of `saved_mean` and `saved_inv_variance`.
    handle, bn_mode, alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff, x_desc, x, dy_desc, dy, \
dx_desc, dx, bn_scale, result_bn_scale_diff, result_bn_bias_diff, epsilon, saved_mean, saved_inv_variance, workspace
        As in `batch_normalization_backward`. Parameters of data that are not float64 may each be float32, float16 or
        bfloat16.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: those of the plain call where all parameters have the derived dtype, else those of
    `pybnorm.operations.backward`, which widens 16-bit parameters in the workspace and rounds results once.
    Workspace: `Handle.workspace_size`, or `pybnorm.operations.workspace_size` for mixed dtypes.
    """
    _backward(
        handle,
        bn_mode,
        (alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff),
        {"x": (x_desc, x), "dy": (dy_desc, dy), "dx": (dx_desc, dx)},
        {
            "scale": ("scale", scale_desc),
            "bias": ("bias", bias_desc),
            "mean": ("saved_mean", saved_mean_desc),
            "variance": ("saved_var", saved_var_desc),
        },
        (bn_scale, result_bn_scale_diff, result_bn_bias_diff),
        epsilon,
        (saved_mean, saved_inv_variance),
        workspace,
    )


_BACKWARD_WORDS = {
    "mode": "bn_mode",
    "alpha_data": "alpha_data_diff",
    "beta_data": "beta_data_diff",
    "alpha_param": "alpha_param_diff",
    "beta_param": "beta_param_diff",
    "scale": "bn_scale",
    "bias": "bn_bias",
    "dscale": "result_bn_scale_diff",
    "dbias": "result_bn_bias_diff",
}


def _backward(
    handle: Handle,
    bn_mode: object,
    blend: tuple[float, float, float, float],
    data: _Data,
    described: _Described,
    affine: tuple[Any, Any, Any],
    epsilon: float,
    saved: tuple[Any, Any],
    workspace: Any,
    activ_desc: object = None,
    bn_bias: Any = None,
) -> None:
    with _words(_BACKWARD_WORDS):
        mode = _mode(bn_mode)
        call = _Call(handle)
        x, dy, dx = call.data("x", data), call.data("dy", data), call.data("dx", data)
        scale = call.need("bn_scale", affine[0], described["scale"])
        dscale = call.need("result_bn_scale_diff", affine[1], described["scale"])
        dbias = call.need("result_bn_bias_diff", affine[2], described["bias"])
        options = {
            "alpha_data": blend[0],
            "beta_data": blend[1],
            "alpha_param": blend[2],
            "beta_param": blend[3],
            "epsilon": epsilon,
            "saved_mean": call.optional("saved_mean", saved[0], described["mean"]),
            "saved_inv_variance": call.optional("saved_inv_variance", saved[1], described["variance"]),
            "workspace": workspace,
        }
        act = _activation(activ_desc, x)
        bias = call.need("bn_bias", bn_bias, described["bias"]) if act else None
        if bias is not None and not _fused(call, Operation.BACKWARD, mode, x):
            _compose_backward(call, (x, dy, scale, bias), (dx, dscale, dbias), mode, act, options)
        elif call.uniform(x):
            handle.backward(x, dy, scale, dx, dscale, dbias, mode=mode, bias=bias, **options, **act)
        else:
            operations.backward(handle, x, dy, scale, dx, dscale, dbias, axis=_axes(x, mode), **options)


# ---------------------------------------------------------------- the calls with an activation


class ActivationMode(enum.IntEnum):
    """The activations that MIOpen's batch norm takes, with ``miopenActivationMode_t``'s numbers."""

    PASTHRU = 0
    """None."""
    RELU = 3
    """``max(x, 0)``"""
    CLIPPEDRELU = 7
    """``min(max(x, 0), alpha)``"""
    CLAMP = 10
    """``min(max(x, alpha), beta)``"""


class ActivationDescriptor(NamedTuple):
    """What ``miopenSetActivationDescriptor`` sets.

    Parameters
    ----------
    mode : ActivationMode
    alpha, beta : float
        The bounds that `mode` reads; others are ignored, as MIOpen does. CLIPPEDRELU's must be above 0, CLAMP's beta
        above its alpha.
    """

    mode: ActivationMode
    alpha: float = 0.0
    beta: float = 0.0


def batch_norm_forward_training_activation(
    handle: Handle,
    bn_mode: object,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: Any,
    y_desc: TensorDescriptor,
    y: Any,
    scale_desc: TensorDescriptor,
    bias_desc: TensorDescriptor,
    saved_mean_desc: TensorDescriptor,
    saved_var_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    exp_avg_factor: float,
    result_running_mean: Any,
    result_running_variance: Any,
    epsilon: float,
    result_save_mean: Any,
    result_save_inv_variance: Any,
    activ_desc: ActivationDescriptor | None,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormForwardTrainingActivation``: forward training, then an activation.

    ``y = alpha * act(scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``

    Parameters
    ----------
    activ_desc : ActivationDescriptor or None
        None is PASTHRU.
    handle, bn_mode, alpha, beta, x_desc, x, y_desc, y, scale_desc, bias_desc, saved_mean_desc, saved_var_desc, \
bn_scale, bn_bias, exp_avg_factor, result_running_mean, result_running_variance, epsilon, result_save_mean, \
result_save_inv_variance, workspace
        As in `batch_normalization_forward_training_v2`.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Source of the formula: MIOpen's header and the kernels that implement it.
    Vendor symbols: ``miopenBatchNormForwardTrainingActivation``, or those of `pybnorm.operations.forward_training`,
    ``relu`` and, for alpha and beta other than 1 and 0, ``axpby``.
    Workspace: `Handle.workspace_size` with the activation; composed as much as WorkspaceError says.
    """
    _forward_training(
        handle,
        bn_mode,
        (alpha, beta),
        {"x": (x_desc, x), "y": (y_desc, y)},
        {
            "scale": ("scale", scale_desc),
            "bias": ("bias", bias_desc),
            "mean": ("saved_mean", saved_mean_desc),
            "variance": ("saved_var", saved_var_desc),
        },
        (bn_scale, bn_bias),
        exp_avg_factor,
        (result_running_mean, result_running_variance),
        epsilon,
        (result_save_mean, result_save_inv_variance),
        workspace,
        activ_desc,
    )


def batch_norm_forward_inference_activation(
    handle: Handle,
    bn_mode: object,
    alpha: float,
    beta: float,
    x_desc: TensorDescriptor,
    x: Any,
    y_desc: TensorDescriptor,
    y: Any,
    scale_desc: TensorDescriptor,
    bias_desc: TensorDescriptor,
    est_mean_desc: TensorDescriptor,
    est_variance_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    estimated_mean: Any,
    estimated_variance: Any,
    epsilon: float,
    activ_desc: ActivationDescriptor | None,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormForwardInferenceActivation``: forward inference, then an activation.

    ``y = alpha * act(scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``

    Parameters
    ----------
    activ_desc : ActivationDescriptor or None
        None is PASTHRU.
    handle, bn_mode, alpha, beta, x_desc, x, y_desc, y, scale_desc, bias_desc, est_mean_desc, est_variance_desc, \
bn_scale, bn_bias, estimated_mean, estimated_variance, epsilon, workspace
        As in `batch_normalization_forward_inference_v2`.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Source of the formula: MIOpen's header and the kernels that implement it.
    Vendor symbols: ``miopenBatchNormForwardInferenceActivation``, or those of `pybnorm.operations.forward_inference`,
    ``relu`` and, for alpha and beta other than 1 and 0, ``axpby``; without estimates as in forward training.
    Workspace: as in `batch_norm_forward_training_activation`.
    """
    _forward_inference(
        handle,
        bn_mode,
        (alpha, beta),
        {"x": (x_desc, x), "y": (y_desc, y)},
        {
            "scale": ("scale", scale_desc),
            "bias": ("bias", bias_desc),
            "mean": ("est_mean", est_mean_desc),
            "variance": ("est_variance", est_variance_desc),
        },
        (bn_scale, bn_bias),
        (estimated_mean, estimated_variance),
        epsilon,
        workspace,
        activ_desc,
    )


def batch_norm_backward_activation(
    handle: Handle,
    bn_mode: object,
    alpha_data_diff: float,
    beta_data_diff: float,
    alpha_param_diff: float,
    beta_param_diff: float,
    x_desc: TensorDescriptor,
    x: Any,
    dy_desc: TensorDescriptor,
    dy: Any,
    dx_desc: TensorDescriptor,
    dx: Any,
    scale_desc: TensorDescriptor,
    bias_desc: TensorDescriptor,
    saved_mean_desc: TensorDescriptor,
    saved_var_desc: TensorDescriptor,
    bn_scale: Any,
    bn_bias: Any,
    result_bn_scale_diff: Any,
    result_bn_bias_diff: Any,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    activ_desc: ActivationDescriptor | None,
    *,
    workspace: Any = None,
) -> None:
    """``miopenBatchNormBackwardActivation``: gradients of forward training with an activation behind it.

    dy is the gradient at the activation's output. What `batch_normalization_backward` has for dy is here dy where
    ``0 < scale * xhat + bias`` (RELU), ``0 < ... <= alpha`` (CLIPPEDRELU) or ``alpha < ... <= beta`` (CLAMP), else 0.

    Parameters
    ----------
    bn_bias : int or array or None
        Required but with PASTHRU, which does not read it.
    bias_desc : TensorDescriptor
        Of `bn_bias` and `result_bn_bias_diff`.
    activ_desc : ActivationDescriptor or None
        None is PASTHRU.
    handle, bn_mode, alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff, x_desc, x, dy_desc, dy, \
dx_desc, dx, scale_desc, saved_mean_desc, saved_var_desc, bn_scale, result_bn_scale_diff, result_bn_bias_diff, \
epsilon, saved_mean, saved_inv_variance, workspace
        As in `batch_normalization_backward_v2`.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Source of the formula: MIOpen's header and the kernels that implement it.
    Vendor symbols: ``miopenBatchNormBackwardActivation``, or those of
    `pybnorm.operations.forward_inference_inv_variance` (without saved statistics: ``forward_training``),
    ``relu_backward`` and ``backward``.
    Workspace: as in `batch_norm_forward_training_activation`.
    """
    _backward(
        handle,
        bn_mode,
        (alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff),
        {"x": (x_desc, x), "dy": (dy_desc, dy), "dx": (dx_desc, dx)},
        {
            "scale": ("scale", scale_desc),
            "bias": ("bias", bias_desc),
            "mean": ("saved_mean", saved_mean_desc),
            "variance": ("saved_var", saved_var_desc),
        },
        (bn_scale, result_bn_scale_diff, result_bn_bias_diff),
        epsilon,
        (saved_mean, saved_inv_variance),
        workspace,
        activ_desc,
        bn_bias,
    )


_NEUTRAL = {
    ActivationMode.PASTHRU: Activation.NONE,
    ActivationMode.RELU: Activation.RELU,
    ActivationMode.CLIPPEDRELU: Activation.CLIPPED_RELU,
    ActivationMode.CLAMP: Activation.CLAMP,
}


def _activation(descriptor: object, x: Buffer) -> dict[str, Any]:
    """The activation as `Handle` takes it."""
    if descriptor is None:
        return {}
    if not issubclass(type(descriptor), ActivationDescriptor):
        raise ArgumentTypeError("activ_desc", descriptor, "an ActivationDescriptor or None")
    assert isinstance(descriptor, ActivationDescriptor)
    try:
        mode = ActivationMode(descriptor.mode)
    except ValueError:
        allowed = "one of " + ", ".join(f"ActivationMode.{m.name}" for m in ActivationMode)
        raise ArgumentError(
            "activ_desc", f"mode {descriptor.mode!r}", f"{allowed}: batch norm takes no other"
        ) from None
    names = {ActivationMode.CLIPPEDRELU: ("high",), ActivationMode.CLAMP: ("low", "high")}.get(mode, ())
    bounds = dict(zip((f"activation_{n}" for n in names), (descriptor.alpha, descriptor.beta), strict=False))
    low, high = bounds.get("activation_low"), bounds.get("activation_high")
    with _words(dict(zip(bounds, ("activ_desc.alpha", "activ_desc.beta"), strict=False))):
        found, _, _ = _arguments.activation(_NEUTRAL[mode], low, high, x.dtype)
    return {} if found == Activation.NONE else {"activation": found, **bounds}


def _fused(call: _Call, operation: Operation, mode: Mode, x: Buffer) -> bool:
    """Whether the call with an activation is one of the loaded library's."""
    layout = _arguments.layout_of(x.dims, x.strides)
    bits, _ = core.capability(call.handle.backend, operation, mode, x.dtype, layout, len(x.dims))
    return call.uniform(x) and Capability.ACTIVATION in bits


def _only_relu(handle: Handle, act: dict[str, Any], function: str) -> None:
    if act["activation"] != Activation.RELU:
        raise UnsupportedError(
            backend=handle.backend,
            function=f"miopen.{function}",
            status=-1,
            status_name="PBN_E_UNSUPPORTED",
            text=f"{act['activation'].name} needs MIOpen 3.5's fused call: SPATIAL, parameters of the derived dtype; "
            "of the backends' common primitives only RELU can be composed",
            library=handle.library.path,
            version=handle.library.version,
        )


def _compose_forward(
    call: _Call,
    operation: str,
    read: tuple[Buffer | None, ...],
    y: Buffer,
    mode: Mode,
    act: dict[str, Any],
    options: dict[str, Any],
    written: dict[str, Buffer | None],
) -> None:
    """``y = alpha * relu(operation(...)) + beta * y``."""
    _only_relu(call.handle, act, operation)
    alpha, beta = (_arguments.scalar(options[name], name, y.dtype) for name in ("alpha", "beta"))
    rest = {name: value for name, value in options.items() if name not in ("alpha", "beta", "workspace")}
    names = ("x", "scale", "bias", "running_mean", "running_variance")
    _sequence.disjoint(written, dict(zip(names, read, strict=False)))
    sequence = _sequence.Sequence(call.handle)
    inner = sequence.scratch_like(y)
    sequence.then(operation, *read, inner, axis=_axes(y, mode), **rest)
    if (alpha, beta) == (1.0, 0.0):
        sequence.then("relu", inner, y)
    else:
        positive = sequence.scratch_like(y)
        sequence.then("relu", inner, positive)
        sequence.then("axpby", alpha, positive, beta, y)
    sequence.run(options["workspace"])


def _compose_backward(
    call: _Call,
    read: tuple[Buffer, Buffer, Buffer, Buffer],
    written: tuple[Buffer, Buffer, Buffer],
    mode: Mode,
    act: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Backward of the gradient where batch norm's result, made again, is above 0."""
    _only_relu(call.handle, act, "backward")
    x, dy, scale, bias = read
    mean, inv_variance = options["saved_mean"], options["saved_inv_variance"]
    given = {"x": x, "dy": dy, "scale": scale, "bias": bias, "saved_mean": mean, "saved_inv_variance": inv_variance}
    _sequence.disjoint(dict(zip(("dx", "dscale", "dbias"), written, strict=True)), given)
    axis = _axes(x, mode)
    sequence = _sequence.Sequence(call.handle)
    inner, gradient = sequence.scratch_like(dy), sequence.scratch_like(dy)
    if _arguments.pair("saved_mean", mean, "saved_inv_variance", inv_variance):
        sequence.then("forward_inference_inv_variance", x, scale, bias, mean, inv_variance, inner, axis=axis)
    else:
        sequence.then("forward_training", x, scale, bias, inner, epsilon=options["epsilon"], axis=axis)
    sequence.then("relu_backward", inner, dy, gradient)
    rest = {name: value for name, value in options.items() if name != "workspace"}
    sequence.then("backward", x, gradient, scale, *written, axis=axis, **rest)
    sequence.run(options["workspace"])


# ---------------------------------------------------------------- arguments

_Data = dict[str, tuple[TensorDescriptor, Any]]
"""Descriptor and memory of each data argument, by its name."""
_Described = dict[str, tuple[str, TensorDescriptor]]
"""Name (without its ``_desc``) and descriptor of each role that a parameter has."""


class _Call:
    """Turns (descriptor, address or array) into the buffers of one call."""

    def __init__(self, handle: Handle) -> None:
        _arguments.instance(handle, Handle, "handle", "a Handle")
        self.handle = handle
        self.parameters: list[Buffer] = []

    def data(self, name: str, data: _Data) -> Buffer:
        descriptor, value = data[name]
        return self._buffer(name, value, name, descriptor)

    def need(self, name: str, value: Any, described: tuple[str, TensorDescriptor]) -> Buffer:
        buffer = self._buffer(name, value, *described)
        self.parameters.append(buffer)
        return buffer

    def optional(self, name: str, value: Any, described: tuple[str, TensorDescriptor]) -> Buffer | None:
        if value is None or (issubclass(type(value), numbers.Integral) and value == 0 and not isinstance(value, bool)):
            return None
        return self.need(name, value, described)

    def uniform(self, x: Buffer) -> bool:
        """Whether every parameter has the dtype that the vendors' own calls take."""
        derived = _arguments.derived_data_type(x.dtype)
        return all(parameter.dtype == derived for parameter in self.parameters)

    def _buffer(self, name: str, value: Any, of: str, descriptor: TensorDescriptor) -> Buffer:
        desc_name = f"{of}_desc"
        _arguments.instance(descriptor, TensorDescriptor, desc_name, "a TensorDescriptor")
        if descriptor.closed:
            raise ClosedError(desc_name)
        if descriptor.backend != self.handle.backend:
            raise ArgumentError(
                desc_name, f"a descriptor of backend {descriptor.backend}", f"one of backend {self.handle.backend}"
            )
        if value is None or issubclass(type(value), numbers.Integral):
            address = _arguments.pointer(0 if value is None else value, name)
            device_type = self.handle.library.device_type
            return Buffer(
                address, descriptor.dims, descriptor.strides, descriptor.dtype, device_type, -1, True, descriptor
            )
        buffer = self.handle.buffer(value, name)
        if buffer.dtype != descriptor.dtype:
            raise ArgumentTypeError(
                name, f"dtype {buffer.dtype.short}", f"{descriptor.dtype.short}, as {desc_name} says"
            )
        if _steps(buffer.dims, buffer.strides) != _steps(descriptor.dims, descriptor.strides):
            raise ArgumentError(
                name,
                f"dims {buffer.dims} with strides {buffer.strides}",
                f"dims {descriptor.dims} with strides {descriptor.strides}, as {desc_name} says; axes of length 1 may "
                "be left out",
            )
        return buffer._replace(dims=descriptor.dims, strides=descriptor.strides)


def _steps(dims: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(d, s) for d, s in zip(dims, strides, strict=True) if d != 1]


def _mode(bn_mode: object) -> Mode:
    mode = _arguments.mode(bn_mode)
    if mode == Mode.SPATIAL_PERSISTENT:
        raise ArgumentError("bn_mode", mode, "Mode.PER_ACTIVATION or Mode.SPATIAL, MIOpen's two modes")
    return mode


def _axes(x: Buffer, mode: Mode) -> tuple[int, ...]:
    return _arguments.kept_axes(len(x.dims), mode)


@contextlib.contextmanager
def _words(names: dict[str, str]) -> Iterator[None]:
    """Argument errors from below, in MIOpen's words."""
    try:
        yield
    except ClosedError:
        raise
    except ArgumentError as error:
        pattern = re.compile(r"\b(" + "|".join(names) + r")\b")
        argument, value, allowed = (
            pattern.sub(lambda found: names[found[0]], text) for text in (error.argument, error.value, error.allowed)
        )
        raise type(error)(argument, value, allowed) from error
