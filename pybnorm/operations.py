"""The neutral operations: what MIOpen, cuDNN, DirectML, CANN and hipDNN do with batch norm, on every backend.

Each operation is composed once from the primitives that every backend has: forward training, forward inference,
backward, axpby, fill and relu. There is no branch on the vendor here and nothing is computed on the host: also products
and roots of parameter vectors are the vendor's, on the handle's stream, without synchronisation.

Every function takes the handle first, then arrays of any framework (`pybnorm._arrays.as_buffer`), the outputs among
them given by the caller, and writes nothing before all arguments have been checked. Shared arguments:

axis
    The axes that parameters keep, an int or a tuple; negative ones count from the end. Any subset of the axes of an x
    of rank 1 to 8, also none and all. ``axis=1`` is the vendors' spatial mode, all axes but 0 the per-activation one.
data (x, y, dy, dx)
    One shape and dtype; any positive strides without overlap, each its own.
parameters (scale, bias, statistics and their gradients)
    `derive`'s shape, axes of length 1 may be left out; contiguous; float64 for float64 data, else float32, float16 or
    bfloat16, whatever the data. 16-bit parameters are widened to float32 in the workspace and results rounded once.
workspace
    An array of bytes or (address, bytes), at least `workspace_size` of the same arguments, aligned to 64. None: on
    CPU backends memory that this module keeps per handle (`kept_workspace_nbytes`); elsewhere WorkspaceError if the
    operation needs any.

Folding. The vendors know two kinds of kept axes and 4 or 5 axes. Other calls are views of the same memory: axes of
length 1 are dropped, axes of one kind that are contiguous to each other in every array are merged, and what is left
is given as (R, K, R...) in spatial mode if there is one kept group, or as (R, K, K...) in per-activation mode if there
is one reduced group. Where no view serves, or the backend has no path for one, arrays are copied packed through axpby
in the workspace. That is never silent: `plan` lists the copies and the logger ``pybnorm.operations`` tells of each.

Host time. What the first call of a kind (operation, shapes, strides, dtypes, devices, scalars) has checked and worked
out is kept by the handle, for `MOST_PREPARED` kinds; later ones take the addresses, see that memory is apart, and run
the calls in C. Calls with scalars of other types than Python's and NumPy's numbers are worked out each time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import SLOT_BITS, CallList, Handle, capability
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, UnsupportedError, WorkspaceError

__all__ = [
    "MOST_PREPARED",
    "Derived",
    "Plan",
    "axpby",
    "backward",
    "backward_elemt",
    "backward_frozen",
    "backward_reduce",
    "convert",
    "derive",
    "elemt",
    "fill",
    "forward_inference",
    "forward_inference_inv_variance",
    "forward_training",
    "gather_stats",
    "inverse_deviation",
    "kept_axes",
    "kept_workspace_nbytes",
    "multiply",
    "plan",
    "relu",
    "relu_backward",
    "stats",
    "training_grad",
    "variance_from_inverse",
    "workspace_size",
]

Axis: TypeAlias = "int | Sequence[int]"
Dims: TypeAlias = tuple[int, ...]

ALIGNMENT = 64  # what backends ask of a workspace; scratch arrays start at multiples of it
CPU = 1  # DLPack's device type
MAX_RANK = 5  # axes that every backend takes with any strides

_log = logging.getLogger("pybnorm.operations")


class Derived(NamedTuple):
    """What `derive` returns."""

    dims: Dims
    """Shape of scale, bias and statistics: x's rank, 1 in the reduced axes."""
    data_type: DataType
    """float64 for float64 data, else float32."""


class Plan(NamedTuple):
    """What `plan` returns."""

    operation: str
    nbytes: int
    """Bytes of workspace."""
    calls: tuple[str, ...]
    """The primitive calls in order, such as ``"backward SPATIAL f32 (4, 3, 5)"``."""
    copies: tuple[str, ...]
    """Arrays that are copied because no view of them serves, with the reason."""


def kept_axes(axis: Axis, rank: int) -> Dims:
    """The axes that parameters keep, ascending and not negative.

    Parameters
    ----------
    axis : int or sequence of int
        From -rank to rank - 1, none twice.
    rank : int

    Returns
    -------
    tuple of int

    Raises
    ------
    ArgumentError, ArgumentTypeError
    """
    return _arguments.axes(axis, _count("rank", rank, 0))


def _derived(dims: Dims, kept: Dims) -> Dims:
    return tuple(d if a in kept else 1 for a, d in enumerate(dims))


# ---------------------------------------------------------------- the operations


def derive(dims: Sequence[int], dtype: object, axis: Axis = 1) -> Derived:
    """Shape and dtype of scale, bias and statistics.

    Parameters
    ----------
    dims : sequence of int
        Shape of x, rank 1 to 8.
    dtype : DataType, str or dtype
        dtype of x.
    axis : int or tuple of int
        The axes that parameters keep; any subset, negative ones count from the end.

    Returns
    -------
    Derived
        dims, of x's rank with 1 in the reduced axes; data_type, float64 for float64 x, else float32.

    Raises
    ------
    ArgumentError, ArgumentTypeError

    Notes
    -----
    Makes no vendor call: ``cudnnDeriveBNTensorDescriptor`` and ``miopenDeriveBNTensorDescriptor`` know two of the
    subsets only (`pybnorm.derive_bn_tensor_descriptor`). The rule for any subset is that of DirectML's
    ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``, whose MeanTensor has 1 or the size of InputTensor in every axis.
    """
    shape = _arguments.dims(dims, low=1)
    kind = _arguments.data_type(dtype)
    kept = kept_axes(axis, len(shape))
    return Derived(_derived(shape, kept), _arguments.derived_data_type(kind))


def stats(
    handle: Handle,
    x: Any,
    *,
    mean: Any = None,
    variance: Any = None,
    inv_variance: Any = None,
    epsilon: float = 1e-5,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Mean, biased variance and inverse deviation of the batch.

    ``mean = sum(x) / m``, ``variance = sum((x - mean)**2) / m``, ``inv_variance = 1 / sqrt(variance + epsilon)``
    (Ioffe & Szegedy 2015, algorithm 1; PyTorch's ``batch_norm_stats``, ``aclnnBatchNormStats``).

    Parameters
    ----------
    x : array
        Rank 1 to 8.
    mean, variance, inv_variance : array, derived shape, optional
        Written; at least one.
    epsilon : float
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: fill for a scale of 1 and a bias of 0; forward training with y in scratch and, for `variance`, running
    statistics of factor 1, which give the unbiased variance; axpby by (m - 1) / m. That way no significant digit is
    lost, as it would be in ``1 / inv_variance**2 - epsilon`` where epsilon is the larger part. With m = 1 the
    variance is a product of the mean with 0.
    Workspace: one array of x's size for y, up to 6 parameter vectors, and what the calls ask for.
    """
    options = {"mean": mean, "variance": variance, "inv_variance": inv_variance, "epsilon": epsilon, "axis": axis}
    _perform(handle, workspace, "stats", x, **options)


def forward_training(
    handle: Handle,
    x: Any,
    scale: Any,
    bias: Any,
    y: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    epsilon: float = 1e-5,
    exponential_average_factor: float = 0.1,
    running_mean: Any = None,
    running_variance: Any = None,
    saved_mean: Any = None,
    saved_inv_variance: Any = None,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Normalize by the batch's own statistics.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y`` with the biased variance;
    ``running = (1 - factor) * running + factor * batch`` with the unbiased one (Ioffe & Szegedy 2015;
    ``cudnnBatchNormalizationForwardTraining``).

    Parameters
    ----------
    x : array
        Rank 1 to 8.
    scale, bias : array, derived shape, or None
        None: 1 and 0.
    y : array, shape and dtype of x
        Written. Read only if `beta` is not 0.
    alpha, beta, epsilon, exponential_average_factor : float
    running_mean, running_variance : array, derived shape, optional
        Updated in place; both or none; needs m > 1.
    saved_mean, saved_inv_variance : array, derived shape, optional
        Written; both or none.
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward training; fill where scale or bias is None.
    Workspace: none beyond the call's own, unless arrays are copied or converted.
    """
    options = {
        "alpha": alpha,
        "beta": beta,
        "epsilon": epsilon,
        "exponential_average_factor": exponential_average_factor,
        "running_mean": running_mean,
        "running_variance": running_variance,
        "saved_mean": saved_mean,
        "saved_inv_variance": saved_inv_variance,
        "axis": axis,
    }
    _perform(handle, workspace, "forward_training", x, scale, bias, y, **options)


def forward_inference(
    handle: Handle,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    y: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    epsilon: float = 1e-5,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Normalize by a given mean and variance.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``
    (``cudnnBatchNormalizationForwardInference``, hipDNN's ``batchnorm_inference_variance_ext``).

    Parameters
    ----------
    x : array
        Rank 1 to 8; axes that are reduced may be empty, then nothing is done.
    scale, bias : array, derived shape, or None
        None: 1 and 0.
    mean, variance : array, derived shape
        `variance` is a variance, not an inverse deviation.
    y : array, shape and dtype of x
        Written. Read only if `beta` is not 0.
    alpha, beta, epsilon : float
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward inference; fill where scale or bias is None.
    Workspace: none beyond the call's own, unless arrays are copied or converted.
    """
    options = {"alpha": alpha, "beta": beta, "epsilon": epsilon, "axis": axis}
    _perform(handle, workspace, "forward_inference", x, scale, bias, mean, variance, y, **options)


def forward_inference_inv_variance(
    handle: Handle,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_variance: Any,
    y: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Normalize by a given mean and inverse deviation.

    ``y = alpha * (scale * inv_variance * (x - mean) + bias) + beta * y`` (hipDNN's ``batchnorm_inference``,
    ``miopenBatchNormForwardInferenceInvVariance``).

    Parameters
    ----------
    x : array
        Rank 1 to 8; axes that are reduced may be empty, then nothing is done.
    scale, bias : array, derived shape, or None
        None: 1 and 0.
    mean, inv_variance : array, derived shape
        `inv_variance` is 1 / sqrt(variance + epsilon).
    y : array, shape and dtype of x
        Written. Read only if `beta` is not 0.
    alpha, beta : float
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward inference on vectors for ``scale * inv_variance``, then forward inference with that as the scale,
    variance 1 and epsilon 0.
    Workspace: up to 4 parameter vectors and what the calls ask for.
    """
    options = {"alpha": alpha, "beta": beta, "axis": axis}
    _perform(handle, workspace, "forward_inference_inv_variance", x, scale, bias, mean, inv_variance, y, **options)


def backward(
    handle: Handle,
    x: Any,
    dy: Any,
    scale: Any,
    dx: Any = None,
    dscale: Any = None,
    dbias: Any = None,
    *,
    alpha_data: float = 1.0,
    beta_data: float = 0.0,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    epsilon: float = 1e-5,
    saved_mean: Any = None,
    saved_inv_variance: Any = None,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Gradients of `forward_training`.

    With ``xhat = (x - mean) * inv``: ``dbias = sum(dy)``, ``dscale = sum(dy * xhat)``,
    ``dx = scale * inv * (dy - dbias / m - xhat * dscale / m)``, dx blended by the data pair, dscale and dbias by the
    parameter pair (Ioffe & Szegedy 2015, section 3; ``cudnnBatchNormalizationBackward``).

    Parameters
    ----------
    x, dy : array, one shape and dtype
        Rank 1 to 8.
    scale : array, derived shape, or None
        None: 1.
    dx : array, shape and dtype of x, or None
        Written. Read only if `beta_data` is not 0.
    dscale, dbias : array, derived shape, or None
        Written. Read only if `beta_param` is not 0. At least one of the three outputs.
    alpha_data, beta_data, alpha_param, beta_param : float
    epsilon : float
        Used only without saved statistics.
    saved_mean, saved_inv_variance : array, derived shape, optional
        Any values; both, or none: taken from x then.
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: backward; fill where scale is None.
    Workspace: x's size where dx is None, a vector for each other output that is None, and what the call asks for.
    """
    options = {
        "alpha_data": alpha_data,
        "beta_data": beta_data,
        "alpha_param": alpha_param,
        "beta_param": beta_param,
        "epsilon": epsilon,
        "saved_mean": saved_mean,
        "saved_inv_variance": saved_inv_variance,
        "axis": axis,
    }
    _perform(handle, workspace, "backward", x, dy, scale, dx, dscale, dbias, **options)


def backward_frozen(
    handle: Handle,
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    dx: Any = None,
    dscale: Any = None,
    dbias: Any = None,
    *,
    alpha_data: float = 1.0,
    beta_data: float = 0.0,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    epsilon: float = 1e-5,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Gradients of `forward_inference`: the statistics are constants.

    ``dx = dy * scale / sqrt(variance + epsilon)``, ``dscale = sum(dy * (x - mean)) / sqrt(variance + epsilon)``,
    ``dbias = sum(dy)`` (DirectML's ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy : array, one shape and dtype
        Rank 1 to 8.
    mean, variance : array, derived shape
    scale : array, derived shape, or None
        None: 1.
    dx : array, shape and dtype of x, or None
    dscale, dbias : array, derived shape, or None
        At least one of the three outputs.
    alpha_data, beta_data, alpha_param, beta_param, epsilon : float
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: for dx forward inference on dy with mean 0 and bias 0; for dscale and dbias forward inference on a vector
    of ones, which gives the inverse deviation, and backward with it and `mean` as the saved statistics and a
    scratch dx.
    Workspace: x's size for the scratch dx where dscale or dbias is asked for, up to 7 parameter vectors, and what the
    calls ask for.
    """
    options = {
        "alpha_data": alpha_data,
        "beta_data": beta_data,
        "alpha_param": alpha_param,
        "beta_param": beta_param,
        "epsilon": epsilon,
        "axis": axis,
    }
    _perform(handle, workspace, "backward_frozen", x, dy, mean, variance, scale, dx, dscale, dbias, **options)


def training_grad(
    handle: Handle,
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    dx: Any = None,
    dscale: Any = None,
    dbias: Any = None,
    *,
    alpha_data: float = 1.0,
    beta_data: float = 0.0,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    epsilon: float = 1e-5,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """Gradients of `forward_training` from the batch mean and biased variance that it computed.

    With ``c = 1 / sqrt(variance + epsilon)``: ``dbias = sum(dy)``, ``dscale = c * sum(dy * (x - mean))``,
    ``dx = scale * c * (dy - dbias / m - (x - mean) * c * dscale / m)`` (DirectML's
    ``DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy, mean, variance, scale, dx, dscale, dbias, axis, workspace
        As in `backward_frozen`.
    alpha_data, beta_data, alpha_param, beta_param, epsilon : float

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward inference on a vector of ones for c, then backward with `mean` and c as the saved statistics.
    Workspace: x's size where dx is None, up to 6 parameter vectors, and what the calls ask for.
    """
    options = {
        "alpha_data": alpha_data,
        "beta_data": beta_data,
        "alpha_param": alpha_param,
        "beta_param": beta_param,
        "epsilon": epsilon,
        "axis": axis,
    }
    _perform(handle, workspace, "training_grad", x, dy, mean, variance, scale, dx, dscale, dbias, **options)


def backward_reduce(
    handle: Handle,
    dy: Any,
    x: Any,
    mean: Any,
    inv_variance: Any = None,
    *,
    sum_dy: Any = None,
    sum_dy_xmu: Any = None,
    dscale: Any = None,
    dbias: Any = None,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """The sums of backward, to be joined over ranks before `backward_elemt`.

    ``sum_dy = dbias = sum(dy)``, ``sum_dy_xmu = sum(dy * (x - mean))``, ``dscale = sum_dy_xmu * inv_variance``
    (``aclnnBatchNormReduceBackward``, PyTorch's ``batch_norm_backward_reduce``). The differences are taken before the
    sum, so a mean far from 0 does not cancel.

    Parameters
    ----------
    dy, x : array, one shape and dtype
        Rank 1 to 8; axes that are reduced may be empty: all sums are 0 then.
    mean : array, derived shape
        Any; in synchronized batch norm that of all ranks.
    inv_variance : array, derived shape, optional
        Needed for `dscale` only.
    sum_dy, sum_dy_xmu, dscale, dbias : array, derived shape, optional
        Written. Without any nothing is done.
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: backward with saved statistics `mean` and 1 and scratch dx; forward inference on vectors for the product
    with `inv_variance`; axpby where both `sum_dy` and `dbias` are asked for.
    Workspace: x's size, up to 6 parameter vectors, and what the calls ask for.
    """
    options = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "dscale": dscale, "dbias": dbias, "axis": axis}
    _perform(handle, workspace, "backward_reduce", dy, x, mean, inv_variance, **options)


def elemt(
    handle: Handle,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_variance: Any,
    y: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """The elementwise half of a synchronized forward: `forward_inference_inv_variance` by its other name.

    ``y = alpha * (scale * inv_variance * (x - mean) + bias) + beta * y`` (PyTorch's ``batch_norm_elemt``,
    ``aclnnBatchNormElemt``).

    Parameters
    ----------
    x, scale, bias, mean, inv_variance, y, alpha, beta, axis, workspace
        As in `forward_inference_inv_variance`.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls and workspace: those of `forward_inference_inv_variance`.
    """
    _perform(handle, workspace, "elemt", x, scale, bias, mean, inv_variance, y, alpha=alpha, beta=beta, axis=axis)


def gather_stats(
    handle: Handle,
    means: Any,
    m2s: Any,
    counts: Sequence[int],
    *,
    variances: Any = None,
    mean: Any = None,
    variance: Any = None,
    inv_variance: Any = None,
    running_mean: Any = None,
    running_variance: Any = None,
    exponential_average_factor: float = 0.1,
    epsilon: float = 1e-5,
    workspace: Any = None,
) -> None:
    """Merge the statistics of several batches into those of their union.

    With ``n = sum(counts)``: ``mean = sum(n_k * mean_k) / n``,
    ``variance = (sum(M2_k) + sum(n_k * (mean_k - mean)**2)) / n``, ``inv_variance = 1 / sqrt(variance + epsilon)``;
    ``running = (1 - factor) * running + factor * batch`` with the variance times n / (n - 1) (Chan, Golub & LeVeque
    1983 for many parts at once; PyTorch's ``batch_norm_gather_stats_with_counts``).

    Parameters
    ----------
    means : array, shape (R, C), float32 or float64
        A row for each rank; C is the number of statistics.
    m2s : array, shape and dtype of `means`, or None
        Sums of squared deviations. None: `variances` is given.
    counts : sequence of R int
        Elements per statistic of each rank, on the host. The rows of ranks with 0 are not read.
    variances : array, shape and dtype of `means`, optional
        Biased variances, instead of `m2s`; M2_k is n_k times them.
    mean, variance, inv_variance : array of C elements, optional
        Written.
    running_mean, running_variance : array of C elements, optional
        Updated in place; both or none; needs n > 1. A factor of 1 replaces them unread.
    exponential_average_factor, epsilon : float
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        No count is above 0; both or none of `m2s` and `variances`; no output.

    Notes
    -----
    Calls: axpby for each run of ranks with equal counts, to weight rows; backward on the weighted rows, whose dbias
    and dscale are the sums over ranks; forward inference for the differences from the mean and for the inverse
    deviation; axpby for running statistics. Rows are added in their order or as the vendor reduces, which is the same
    on every rank of one library.
    Workspace: 5 arrays of (R, C), up to 10 vectors, and what the calls ask for.
    """
    options = {
        "variances": variances,
        "mean": mean,
        "variance": variance,
        "inv_variance": inv_variance,
        "running_mean": running_mean,
        "running_variance": running_variance,
        "exponential_average_factor": exponential_average_factor,
        "epsilon": epsilon,
    }
    _perform(handle, workspace, "gather_stats", means, m2s, counts, **options)


def backward_elemt(
    handle: Handle,
    dy: Any,
    x: Any,
    mean: Any,
    inv_variance: Any,
    scale: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    count: int,
    dx: Any,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    axis: Axis = 1,
    workspace: Any = None,
) -> None:
    """The elementwise half of a synchronized backward.

    ``dx = alpha * scale * inv_variance * (dy - sum_dy / count - (x - mean) * inv_variance**2 * sum_dy_xmu / count)
    + beta * dx`` (PyTorch's ``batch_norm_backward_elemt``, ``aclnnBatchNormElemtBackward``).

    Parameters
    ----------
    dy, x : array, one shape and dtype
        Rank 1 to 8; axes that are reduced may be empty, then nothing is done.
    mean, inv_variance : array, derived shape
        Of all ranks.
    scale : array, derived shape, or None
        None: 1.
    sum_dy, sum_dy_xmu : array, derived shape
        The sums of `backward_reduce`, added up over all ranks. Sums, not averages.
    count : int
        Elements per statistic of all ranks, at least 1.
    dx : array, shape and dtype of x
        Written. Read only if `beta` is not 0.
    alpha, beta : float
    axis, workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward inference and axpby on vectors for the factors; then forward inference on dy, with mean
    sum_dy / count and scale ``scale * inv_variance``, and forward inference on x, added with beta 1. For 16-bit data dx
    is rounded by each of the two.
    Workspace: up to 9 parameter vectors and what the calls ask for.
    """
    options = {"alpha": alpha, "beta": beta, "axis": axis}
    arguments = (dy, x, mean, inv_variance, scale, sum_dy, sum_dy_xmu, count, dx)
    _perform(handle, workspace, "backward_elemt", *arguments, **options)


# ---------------------------------------------------------------- vectors, constants and copies


def multiply(
    handle: Handle, a: Any, b: Any, out: Any, *, alpha: float = 1.0, beta: float = 0.0, workspace: Any = None
) -> None:
    """``out = alpha * a * b + beta * out`` for vectors of one length.

    Parameters
    ----------
    a, b, out : array
        Contiguous, any rank, one number of elements; float32, float16 or bfloat16 each, or float64 all.
    alpha, beta : float
        With beta 0 the prior `out` is not read.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward inference on `a` with scale `b`, mean 0, variance 1, epsilon 0 and bias 0; fill for the constants.
    """
    _perform(handle, workspace, "multiply", a, b, out, alpha=alpha, beta=beta)


def inverse_deviation(
    handle: Handle, variance: Any, inv_variance: Any, *, epsilon: float = 1e-5, workspace: Any = None
) -> None:
    """``inv_variance = 1 / sqrt(variance + epsilon)`` for vectors of one length.

    Parameters
    ----------
    variance, inv_variance : array
        As the vectors of `multiply`.
    epsilon : float
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: forward inference on ones, with mean 0 and bias 0; fill for the constants.
    """
    _perform(handle, workspace, "inverse_deviation", variance, inv_variance, epsilon=epsilon)


def variance_from_inverse(
    handle: Handle, inv_variance: Any, variance: Any, *, epsilon: float = 1e-5, workspace: Any = None
) -> None:
    """``variance = 1 / inv_variance**2 - epsilon`` for vectors of one length.

    The difference cancels where epsilon is the larger part: take the variance from `stats` where it can be had.

    Parameters
    ----------
    inv_variance, variance : array
        As the vectors of `multiply`.
    epsilon : float
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: `multiply` for the square, forward inference on ones for its inverse root, `multiply` again, axpby.
    """
    _perform(handle, workspace, "variance_from_inverse", inv_variance, variance, epsilon=epsilon)


def convert(handle: Handle, source: Any, target: Any, *, workspace: Any = None) -> None:
    """Copy a vector, changing its dtype between float32, float16 and bfloat16.

    Parameters
    ----------
    source, target : array
        As the vectors of `multiply`.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: to float32, forward training over one element per statistic, whose saved mean is the value; to 16 bits,
    forward inference of zeros with scale 0 and the vector as the bias, which rounds once; axpby within one dtype.
    """
    _perform(handle, workspace, "convert", source, target)


def axpby(handle: Handle, a: float, x: Any, b: float, y: Any, *, workspace: Any = None) -> None:
    """``y = a * x + b * y`` elementwise; with ``b = 0`` the prior y is not read.

    Parameters
    ----------
    a, b : float
    x, y : array, one shape and dtype
        Rank 1 to 8, any strides.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: axpby, on the view of least rank.
    """
    _perform(handle, workspace, "axpby", a, x, b, y)


def fill(handle: Handle, value: float, y: Any, *, workspace: Any = None) -> None:
    """``y = value`` everywhere.

    Parameters
    ----------
    value : float
    y : array
        Rank 1 to 8, any strides.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: fill, on the view of least rank.
    """
    _perform(handle, workspace, "fill", value, y)


def relu(handle: Handle, x: Any, y: Any, *, workspace: Any = None) -> None:
    """``y = max(x, 0)`` elementwise.

    Parameters
    ----------
    x, y : array, one shape and dtype
        Rank 1 to 8, any strides. y is written and shares no memory with x.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: relu, on the view of least rank; several where more than 5 axes do not merge. What a NaN and minus infinity
    become is the vendor's: see `Handle.relu`. MIOpen takes float32 and float16, packed, x and y in one memory order.
    Workspace: none.
    """
    _perform(handle, workspace, "relu", x, y)


def relu_backward(handle: Handle, x: Any, dy: Any, dx: Any, *, workspace: Any = None) -> None:
    """``dx = dy where x > 0, else 0`` elementwise.

    Parameters
    ----------
    x, dy, dx : array, one shape and dtype
        Rank 1 to 8, any strides. x is the input of `relu`, or its output. dx is written and shares no memory with
        the others.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Calls: relu_backward, on the view of least rank; several where more than 5 axes do not merge. x and dy that do not
    lie as dx does are copied (axpby), because cuDNN takes arrays of the same strides only. MIOpen takes float32 and
    float16, packed, in one memory order.
    Workspace: for the copies.
    """
    _perform(handle, workspace, "relu_backward", x, dy, dx)


# ---------------------------------------------------------------- queries


def plan(handle: Handle, operation: str, *arguments: Any, **options: Any) -> Plan:
    """What an operation would do; nothing is executed, and no array's memory is read or written.

    Parameters
    ----------
    handle : Handle
    operation : str
        Name of an operation of this module, such as ``"backward_frozen"``.
    *arguments, **options
        Those of the operation, without `handle` and `workspace`. Arrays may be `pybnorm._arrays.Buffer` with any
        address, also 0: where arrays lie is not looked at, and overlaps are not.

    Returns
    -------
    Plan
        nbytes of workspace, the calls in order, and the copies with the reason for each.

    Raises
    ------
    ArgumentError, UnsupportedError
        As the operation would.
    """
    found = asked(handle, operation, arguments, options)[0]
    return Plan(operation, found.nbytes, found.calls, found.copies)


def workspace_size(handle: Handle, operation: str, *arguments: Any, **options: Any) -> int:
    """Bytes of workspace that an operation needs, aligned to 64.

    Parameters
    ----------
    handle, operation, *arguments, **options
        As in `plan`.

    Returns
    -------
    int
        0 where none is needed.

    Raises
    ------
    ArgumentError, UnsupportedError
        As the operation would.
    """
    return asked(handle, operation, arguments, options)[0].nbytes


def kept_workspace_nbytes(handle: Handle) -> int:
    """Bytes that this module keeps for a handle's calls on CPU arrays without a workspace; grows with the largest."""
    _arguments.instance(handle, Handle, "handle", "a Handle")
    kept = _kept.get(handle)
    return 0 if kept is None else kept.memory.nbytes


# ---------------------------------------------------------------- the program: what will be called, before anything is


class _Shape:
    """What an axis choice makes of x."""

    def __init__(self, x: Buffer, axis: Axis) -> None:
        self.kept = kept_axes(axis, len(x.dims))
        self.derived = _derived(x.dims, self.kept)
        self.count = math.prod(self.derived)
        if self.count == 0:
            raise ArgumentError("x", f"dims {x.dims} with axis {axis}", "at least one statistic")
        self.m = math.prod(x.dims) // self.count
        self.dtype = _arguments.derived_data_type(x.dtype)


class _Step(NamedTuple):
    """One primitive call."""

    operation: Operation
    arrays: dict[str, Buffer]
    values: dict[str, Any]
    inner: int
    """Bytes of workspace of its own."""
    text: str


_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)

_OPERATIONS = {
    "forward_training": Operation.FORWARD_TRAINING,
    "forward_inference": Operation.FORWARD_INFERENCE,
    "backward": Operation.BACKWARD,
}


class Program:
    """Checks an operation's arguments and collects its primitive calls and the scratch memory they need.

    Collecting executes nothing, so a refusal by any of the calls comes before the first, and the workspace query and
    the execution are the same code. Where arrays lie does not count: they have made-up addresses as in `CallList`
    (slot 0 is the workspace, slot i + 1 the array argument i), and what `finish` makes runs wherever they are.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.device_type = handle.library.device_type
        self.steps: list[_Step] = []
        self.copies: list[str] = []
        self.used = 0  # bytes of scratch so far
        self.inner = 0  # the largest workspace that a call asks for
        self.inputs: list[_arguments.Region] = []
        self.outputs: list[_arguments.Region] = []
        self._constants: dict[tuple[float, int, DataType], Buffer] = {}
        self._packed: dict[tuple[int, Dims], Buffer] = {}
        self._pending: list[tuple[Buffer, Buffer]] = []

    # -------- arguments

    def data(
        self,
        name: str,
        array: Any,
        like: Buffer | None = None,
        other: str = "x",
        *,
        output: bool = False,
        empty: bool = False,
    ) -> Buffer:
        """Check an array of x's kind."""
        buffer = self.handle.buffer(array, name, output=output)
        if like is not None:
            if buffer.dims != like.dims:
                raise ArgumentError(name, f"dims {buffer.dims}", f"the dims of {other}, {like.dims}")
            if buffer.dtype != like.dtype:
                raise ArgumentTypeError(
                    name, f"dtype {buffer.dtype.short}", f"the dtype of {other}, {like.dtype.short}"
                )
        if empty and 0 in buffer.dims and 1 <= len(buffer.dims) <= 8:
            return buffer._replace(strides=_arguments.packed_strides(buffer.dims))
        dims = _arguments.dims(buffer.dims, name, low=1)
        strides = tuple([s if d > 1 else max(1, s) for d, s in zip(dims, buffer.strides, strict=True)])
        buffer = buffer._replace(dims=dims, strides=_arguments.strides(strides, dims, name))
        self._note(name, buffer, output)
        return buffer

    def flat(self, name: str, array: Any, dims: Dims, output: bool = False) -> Buffer:
        """Check a contiguous array of these dims; a view of it with one axis."""
        buffer = self.handle.buffer(array, name, output=output)
        _arguments.parameter_dims(name, buffer.dims, buffer.strides, dims)
        buffer = buffer._replace(dims=(math.prod(dims),), strides=(1,))
        self._note(name, buffer, output)
        return buffer

    def parameter(self, name: str, array: Any, shape: _Shape, default: float | None = None) -> Buffer:
        """A parameter vector in the vendors' dtype, widened if it is a 16-bit one."""
        if array is None and default is not None:
            return self.constant(default, shape)
        if array is None:
            raise ArgumentError(name, None, f"an array of shape {shape.derived}")
        buffer = self.flat(name, array, shape.derived)
        _parameter_dtype(name, buffer.dtype, shape.dtype)
        return buffer if buffer.dtype == shape.dtype else self.widen(buffer)

    def result(self, name: str, array: Any, shape: _Shape, *, prior: bool = False) -> Buffer:
        """A vector in the vendors' dtype that ends up in `array`; scratch if that is None.

        `prior`: its value is read too.
        """
        if array is None:
            return self.vector(shape)
        buffer = self.flat(name, array, shape.derived, True)
        _parameter_dtype(name, buffer.dtype, shape.dtype)
        if buffer.dtype == shape.dtype:
            return buffer
        wide = self.widen(buffer) if prior else self.vector(shape)
        self._pending.append((wide, buffer))
        return wide

    def scalars(self, shape: _Shape, **values: float) -> list[float]:
        """alpha and beta in canonical form."""
        return [_arguments.scalar(value, name, shape.dtype) for name, value in values.items()]

    def _note(self, name: str, buffer: Buffer, output: bool) -> None:
        size = buffer.dtype.itemsize
        region = _arguments.Region(name, buffer.pointer, buffer.dims, tuple([s * size for s in buffer.strides]), size)
        (self.outputs if output else self.inputs).append(region)

    # -------- scratch

    def scratch(self, dims: Dims, dtype: DataType, strides: Dims | None = None) -> Buffer:
        """An uninitialised dense array in the workspace."""
        start = self.used
        nbytes = math.prod(dims) * dtype.itemsize
        self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        steps = _arguments.packed_strides(dims) if strides is None else strides
        return Buffer(start, dims, steps, dtype, self.device_type, -1, True, None)

    def vector(self, shape: _Shape) -> Buffer:
        """An uninitialised parameter vector."""
        return self.scratch((shape.count,), shape.dtype)

    def filled(self, value: float, shape: _Shape) -> Buffer:
        """A parameter vector of one value."""
        vector = self.vector(shape)
        self.fill(value, vector)
        return vector

    def constant(self, value: float, shape: _Shape, dtype: DataType | None = None) -> Buffer:
        """The same, only to be read: one for all who ask."""
        key = value, shape.count, dtype or shape.dtype
        if key not in self._constants:
            vector = self.scratch((shape.count,), key[2])
            self.fill(value, vector)
            self._constants[key] = vector
        return self._constants[key]

    # -------- vector algebra

    def product(
        self, a: Buffer, b: Buffer, out: Buffer | None = None, *, alpha: float = 1.0, beta: float = 0.0
    ) -> Buffer:
        """``out = alpha * a * b + beta * out``."""
        shape = _Shape(a, 0)
        target = self.vector(shape) if out is None else out
        zeros, ones = self.constant(0.0, shape), self.constant(1.0, shape)
        self.inference(shape.kept, a, b, zeros, zeros, ones, target, alpha=alpha, beta=beta)
        return target

    def inverse(self, variance: Buffer, epsilon: float, out: Buffer | None = None) -> Buffer:
        """``out = 1 / sqrt(variance + epsilon)``."""
        shape = _Shape(variance, 0)
        target = self.vector(shape) if out is None else out
        zeros, ones = self.constant(0.0, shape), self.constant(1.0, shape)
        self.inference(shape.kept, ones, ones, zeros, zeros, variance, target, epsilon=epsilon)
        return target

    def widen(self, narrow: Buffer, out: Buffer | None = None) -> Buffer:
        """float32 values of a 16-bit vector: the saved means of a training with one element per statistic."""
        shape = _Shape(narrow, 0)
        target = self.vector(shape) if out is None else out
        ones, zeros = self.constant(1.0, shape), self.constant(0.0, shape)
        self.training(shape.kept, narrow, ones, zeros, None, epsilon=1.0, saved=(target, self.vector(shape)))
        return target

    def narrow(self, wide: Buffer, target: Buffer) -> None:
        """Round a float32 vector: the inference of zeros, with the vector as the bias."""
        shape = _Shape(target, 0)
        zeros, ones = self.constant(0.0, shape), self.constant(1.0, shape)
        self.inference(shape.kept, self.constant(0.0, shape, target.dtype), zeros, wide, zeros, ones, target)

    # -------- primitives

    def training(
        self,
        kept: Dims,
        x: Buffer,
        scale: Buffer,
        bias: Buffer,
        y: Buffer | None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float,
        factor: float = 0.0,
        running: tuple[Buffer, Buffer] | None = None,
        saved: tuple[Buffer, Buffer] | None = None,
    ) -> None:
        """Forward training; y None: scratch."""
        parameters = {"scale": scale, "bias": bias}
        if running is not None:
            parameters |= {"running_mean": running[0], "running_variance": running[1]}
        if saved is not None:
            parameters |= {"saved_mean": saved[0], "saved_inv_variance": saved[1]}
        options = {"alpha": alpha, "beta": beta, "epsilon": epsilon, "exponential_average_factor": factor}
        self._call("forward_training", kept, {"x": x, "y": y}, {"y": beta}, parameters, options)

    def inference(
        self,
        kept: Dims,
        x: Buffer,
        scale: Buffer,
        bias: Buffer,
        mean: Buffer,
        variance: Buffer,
        y: Buffer,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float = 0.0,
    ) -> None:
        """Forward inference; nothing for an empty x."""
        if 0 in x.dims:
            return
        parameters = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance}
        options = {"alpha": alpha, "beta": beta, "epsilon": epsilon}
        self._call("forward_inference", kept, {"x": x, "y": y}, {"y": beta}, parameters, options)

    def gradient(
        self,
        kept: Dims,
        x: Buffer,
        dy: Buffer,
        scale: Buffer,
        dx: Buffer | None,
        dscale: Buffer,
        dbias: Buffer,
        alpha_data: float = 1.0,
        beta_data: float = 0.0,
        alpha_param: float = 1.0,
        beta_param: float = 0.0,
        *,
        epsilon: float = 0.0,
        saved: tuple[Buffer, Buffer] | None = None,
    ) -> None:
        """Backward; dx None: scratch."""
        parameters = {"scale": scale, "dscale": dscale, "dbias": dbias}
        if saved is not None:
            parameters |= {"saved_mean": saved[0], "saved_inv_variance": saved[1]}
        options = {
            "alpha_data": alpha_data,
            "beta_data": beta_data,
            "alpha_param": alpha_param,
            "beta_param": beta_param,
            "epsilon": epsilon,
        }
        self._call("backward", kept, {"x": x, "dy": dy, "dx": dx}, {"dx": beta_data}, parameters, options)

    def axpby(self, a: float, x: Buffer, b: float, y: Buffer) -> None:
        """``y = a * x + b * y``."""
        for xs, ys in _pieces(x, y):
            xd = self.handle.descriptor(xs, "x")
            inner = self.handle.workspace_size(
                Operation.AXPBY, xd, y_desc=self.handle.descriptor(ys, "y"), alpha=a, beta=b
            )
            text = f"axpby {xs.dtype.short} {xs.dims}"
            self._step(Operation.AXPBY, {"x": xs, "y": ys}, {"a": a, "b": b}, inner, text)

    def fill(self, value: float, y: Buffer) -> None:
        """``y = value``."""
        for ys, _ in _pieces(y, y):
            self._require(Operation.FILL, "fill", "y", ys)
            self._step(Operation.FILL, {"y": ys}, {"value": value}, 0, f"fill {ys.dtype.short} {ys.dims}")

    def relu(self, x: Buffer, y: Buffer) -> None:
        """``y = max(x, 0)``."""
        for xs, ys in _pieces(x, y):
            self._require(Operation.RELU, "relu", "x", xs)
            self._require(Operation.RELU, "relu", "y", ys)
            self._step(Operation.RELU, {"x": xs, "y": ys}, {}, 0, f"relu {xs.dtype.short} {xs.dims}")

    def relu_backward(self, x: Buffer, dy: Buffer, dx: Buffer) -> None:
        """``dx = dy where x > 0, else 0``; cuDNN wants one memory order, so others are copied, whatever the backend."""
        target = dx
        if any(b.strides != dx.strides for b in (x, dy)):
            if math.prod(dx.dims) != _arguments.span(dx.dims, dx.strides):
                dx = self.scratch(dx.dims, dx.dtype)
                self.copies.append("dx of relu_backward: its memory order is not that of x and dy")
            x, dy = (self._in_order(b, dx, name) for b, name in ((x, "x"), (dy, "dy")))
        for xs, dys, dxs in _pieces(x, dy, dx):
            for name, array in (("x", xs), ("dy", dys), ("dx", dxs)):
                self._require(Operation.RELU_BACKWARD, "relu_backward", name, array)
            arrays = {"x": xs, "dy": dys, "dx": dxs}
            self._step(Operation.RELU_BACKWARD, arrays, {}, 0, f"relu_backward {xs.dtype.short} {xs.dims}")
        if dx is not target:
            self.axpby(1.0, dx, 0.0, target)

    def _in_order(self, array: Buffer, like: Buffer, name: str) -> Buffer:
        """The array, or a copy that lies as the dense `like` does."""
        if array.strides == like.strides:
            return array
        self.copies.append(f"{name} of relu_backward: its memory order is not that of dx")
        copy = self.scratch(like.dims, like.dtype, like.strides)
        self.axpby(1.0, array, 0.0, copy)
        return copy

    def _require(self, operation: Operation, method: str, name: str, array: Buffer) -> None:
        """Refuse before the first call what a call without a workspace query would refuse later."""
        layout = _arguments.layout_of(array.dims, array.strides)
        backend = self.handle.backend
        bits, why = capability(backend, operation, Mode.SPATIAL, array.dtype, layout, len(array.dims))
        if not bits:
            raise UnsupportedError(
                backend=backend,
                function=method,
                status=-1,
                status_name="PBN_E_UNSUPPORTED",
                text=why,
                library=self.handle.library.path,
                version=self.handle.library.version,
                descriptors=(f"{name}: {array.dtype.short} dims={array.dims} strides={array.strides}",),
            )

    def _step(
        self, operation: Operation, arrays: dict[str, Buffer], values: dict[str, Any], inner: int, text: str
    ) -> None:
        self.inner = max(self.inner, inner)
        self.steps.append(_Step(operation, arrays, values, inner, text))

    def _call(
        self,
        method: str,
        kept: Dims,
        data: dict[str, Buffer | None],
        written: dict[str, float],
        parameters: dict[str, Buffer],
        options: dict[str, Any],
    ) -> None:
        """A batch-norm call on the first view that the backend takes, or on packed copies.

        `data` starts with x; None stands for a scratch array. `written` has the beta of the output.
        """
        refusal = None
        present = [b for b in data.values() if b is not None]
        for mode, axes in _views(kept, present):
            mark = self.used
            strides = iter(range(len(present)))
            viewed = {}
            for name, buffer in data.items():
                if buffer is None:
                    viewed[name] = self._unused(present[0].dtype, axes)
                else:
                    i = next(strides)
                    viewed[name] = buffer._replace(
                        dims=tuple(size for size, _ in axes), strides=tuple(steps[i] for _, steps in axes)
                    )
            try:
                self._emit(method, mode, viewed, parameters, options)
                return
            except UnsupportedError as error:
                self.used = mark
                refusal = refusal or error
        reason = "its axes of either kind do not merge"
        if refusal is not None:
            reason = f"the backend has no path for a view: {refusal.text}"
        try:
            self._on_copies(method, kept, data, written, parameters, options, reason)
        except UnsupportedError as error:
            raise (refusal or error) from None

    def _on_copies(
        self,
        method: str,
        kept: Dims,
        data: dict[str, Buffer | None],
        written: dict[str, float],
        parameters: dict[str, Buffer],
        options: dict[str, Any],
        reason: str,
    ) -> None:
        x = next(b for b in data.values() if b is not None)
        # One order for the calls of a program: they share the copies.
        order = [*kept, *(a for a in range(len(x.dims)) if a not in kept)]
        dims = tuple(x.dims[a] for a in order)
        count = math.prod(x.dims[a] for a in kept)
        packed, back = {}, []
        for name, buffer in data.items():
            if buffer is None:
                packed[name] = self.scratch(dims, x.dtype)
                continue
            key = buffer.pointer, buffer.dims
            if name not in written and key in self._packed:
                packed[name] = self._packed[key]
                continue
            packed[name] = self.scratch(dims, x.dtype)
            original = buffer._replace(dims=dims, strides=tuple(buffer.strides[a] for a in order))
            self.copies.append(f"{name} of {method}: {reason}")
            if name not in written:
                self._packed[key] = packed[name]
            if written.get(name) != 0.0:
                self.axpby(1.0, original, 0.0, packed[name])
            if name in written:
                back.append((packed[name], original))
        m = math.prod(dims) // count
        viewed = {n: b._replace(dims=(1, count, m), strides=(count * m, m, 1)) for n, b in packed.items()}
        self._emit(method, Mode.SPATIAL, viewed, parameters, options)
        for source, target in back:
            self.axpby(1.0, source, 0.0, target)

    def _unused(self, dtype: DataType, axes: list[_Axis]) -> Buffer:
        """Scratch for an output nobody wants, in the memory order of the first array."""
        dims = tuple(size for size, _ in axes)
        steps = [0] * len(dims)
        step = 1
        for a in sorted(range(len(dims)), key=lambda a: (axes[a][1][0], dims[a] == 1)):
            steps[a] = step
            step *= dims[a]
        return self.scratch(dims, dtype, tuple(steps))

    def _emit(
        self, method: str, mode: Mode, data: dict[str, Buffer], parameters: dict[str, Buffer], options: dict[str, Any]
    ) -> None:
        """One call on views that the vendors know."""
        descriptors: dict[str, Any] = {
            f"{name}_desc": self.handle.descriptor(buffer, name) for name, buffer in data.items()
        }
        x = data["x"]
        query = {name: value for name, value in options.items() if name in ("alpha", "beta", "epsilon")}
        if method == "backward":
            query |= {"alpha": options["alpha_data"], "beta": options["beta_data"]}
            query |= {"alpha_param": options["alpha_param"], "beta_param": options["beta_param"]}
        inner = self.handle.workspace_size(
            _OPERATIONS[method],
            descriptors.pop("x_desc"),
            mode=mode,
            **descriptors,
            **query,
            running="running_mean" in parameters,
            saved="saved_mean" in parameters,
        )
        dims = _arguments.derived_dims(x.dims, mode)
        steps = _arguments.packed_strides(dims)
        shaped = {name: vector._replace(dims=dims, strides=steps) for name, vector in parameters.items()}
        text = f"{method} {mode.name} {x.dtype.short} {x.dims}"
        self._step(_OPERATIONS[method], {**data, **shaped}, {"mode": mode, **options}, inner, text)

    # -------- the end

    def finish(self) -> Prepared:
        """Round the results that were asked for in 16 bits, and make it ready to run."""
        for wide, target in self._pending:
            self.narrow(wide, target)
        self._pending.clear()
        return Prepared(self)


class Prepared:
    """An operation, checked and ready to run any number of times, on arrays that lie anywhere.

    Attributes
    ----------
    nbytes : int
        Bytes of workspace: the scratch arrays, then what the greediest call asks for.
    calls, copies : tuple of str
        As in `Plan`.
    """

    def __init__(self, program: Program) -> None:
        self.nbytes = program.used + program.inner
        self.calls = tuple([step.text for step in program.steps])
        self.copies = tuple(program.copies)
        self._regions = program.outputs, program.inputs
        self._list = CallList(program.handle)
        for step in program.steps:
            inner = program.used, step.inner
            self._list.append(program.handle, step.operation, step.arrays, inner, **step.values)
        for regions, written in ((program.outputs, True), (program.inputs, False)):
            for region in regions:
                self._list.reach(region.pointer, region.end - region.pointer, region.itemsize, written)

    def check(self, addresses: tuple[int, ...], workspace: int = 0) -> None:
        """Refuse arrays that overlap where they must not.

        Parameters
        ----------
        addresses : tuple of int
            Of the workspace, then those of the array arguments.
        workspace : int
            Bytes of it that are held against the arrays too.
        """
        if self._list.apart(addresses, workspace):
            return
        outputs, inputs = ([_moved(r, addresses) for r in regions] for regions in self._regions)
        for region in (*outputs, *inputs):
            if region.pointer == 0:
                raise ArgumentError(region.name, "address 0", "a non-NULL address of 64 bits")
        if workspace:
            outputs.append(_arguments.Region("workspace", addresses[0], (workspace,), (1,), 1))
        _arguments.disjoint(outputs, inputs)

    def execute(self, handle: Handle, operation: str, addresses: tuple[int, ...], workspace: Any) -> None:
        """Check the workspace and overlaps, then make the calls.

        Parameters
        ----------
        handle : Handle
            The one that it was prepared for.
        operation : str
            Its name in errors and messages.
        addresses : tuple of int
            As in `check`.
        workspace : array, (address, bytes) or None
        """
        address, size = (0, 0) if workspace is None else handle.memory(workspace)
        given = workspace is not None
        if self.nbytes and given and (size < self.nbytes or address % ALIGNMENT):
            raise WorkspaceError("workspace", f"{size} bytes at {address:#x}", self._needed(operation))
        addresses = (address, *addresses[1:])
        self.check(addresses, self.nbytes if given else 0)
        for copy in self.copies:
            _log.info("%s: copied %s", operation, copy)
        if given or not self.nbytes:
            self._list.run(handle, addresses)
            return
        if handle.library.device_type != CPU:
            raise WorkspaceError("workspace", "None", self._needed(operation))
        with _kept_of(handle).lent(self.nbytes) as start:
            self._list.run(handle, (start, *addresses[1:]))

    def _needed(self, operation: str) -> str:
        return f"at least {self.nbytes} bytes for {operation}, aligned to {ALIGNMENT}, on the handle's device"


def _moved(region: _arguments.Region, addresses: tuple[int, ...]) -> _arguments.Region:
    slot, offset = divmod(region.pointer, 1 << SLOT_BITS)
    return region._replace(pointer=addresses[slot] + offset)


class _Kept:
    """Workspace that is kept for a handle of a CPU backend."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.memory = np.empty(0, np.uint8)
        self._usable = self._address = 0
        self._in_use = False

    @contextlib.contextmanager
    def lent(self, nbytes: int) -> Iterator[int]:
        """Address of so many bytes; of other ones for a signal handler's call during a call of its thread."""
        with self.lock:
            if self._in_use:
                other = np.empty(nbytes + ALIGNMENT, np.uint8)
                yield _aligned(other)
                return
            self._in_use = True
            try:
                if self._usable < nbytes:
                    self._usable = 0
                    self.memory = np.empty(0, np.uint8)  # before the next: both need not exist at once
                    self.memory = np.empty(nbytes + ALIGNMENT, np.uint8)
                    self._address = _aligned(self.memory)
                    self._usable = nbytes
                yield self._address
            finally:
                self._in_use = False


def _aligned(memory: np.ndarray[Any, Any]) -> int:
    return -(-int(memory.ctypes.data) // ALIGNMENT) * ALIGNMENT


_kept: weakref.WeakKeyDictionary[Handle, _Kept] = weakref.WeakKeyDictionary()


def _kept_of(handle: Handle) -> _Kept:
    return _kept.get(handle) or _kept.setdefault(handle, _Kept())  # without a lock, which a fork could leave taken


# ---------------------------------------------------------------- views

_Axis: TypeAlias = "tuple[int, tuple[int, ...]]"  # size, and the stride of each array


def _by_stride(axes: list[int], x: Buffer) -> list[int]:
    """Outermost in memory first."""
    return sorted(axes, key=lambda a: (-x.strides[a], a))


def _groups(axes: Sequence[int], arrays: Sequence[Buffer]) -> list[_Axis]:
    """The axes in this order, those of length 1 left out and neighbours merged that every array can merge."""
    groups: list[_Axis] = []
    for a in axes:
        size = arrays[0].dims[a]
        steps = tuple(b.strides[a] for b in arrays)
        if size == 1:
            continue
        if groups and all(outer == size * s for outer, s in zip(groups[-1][1], steps, strict=True)):
            groups[-1] = (groups[-1][0] * size, steps)
        else:
            groups.append((size, steps))
    return groups


def _single(axes: Sequence[_Axis], arrays: Sequence[Buffer]) -> _Axis:
    """An axis of length 1 outside of all others."""
    return 1, tuple(
        min(max((size * steps[i] for size, steps in axes), default=1), _arguments.INT32_MAX) for i in range(len(arrays))
    )


def _views(kept: Dims, arrays: Sequence[Buffer]) -> Iterator[tuple[Mode, list[_Axis]]]:
    """Views of the arrays that the vendors' modes describe, the vendors' own form first."""
    dims = arrays[0].dims
    rank = len(dims)
    whole = [(dims[a], tuple(b.strides[a] for b in arrays)) for a in range(rank)]
    if 2 <= rank <= MAX_RANK:
        if kept == (1,):
            yield Mode.SPATIAL, whole
        if kept == tuple(range(1, rank)):
            yield Mode.PER_ACTIVATION, whole
    inside = _groups(kept, arrays)
    outside = _groups(_by_stride([a for a in range(rank) if a not in kept], arrays[0]), arrays)
    one = _single([*inside, *outside], arrays)
    if len(inside) <= 1:
        channels = inside[0] if inside else one
        if len(outside) <= 1:
            first = outside[0] if outside else one
            if not outside:
                yield Mode.PER_ACTIVATION, [one, channels]
            else:
                yield Mode.SPATIAL, [one, channels, first]
            yield Mode.SPATIAL, [first, channels]
            if outside:
                yield Mode.PER_ACTIVATION, [first, channels]
        elif len(outside) <= MAX_RANK - 1:
            yield Mode.SPATIAL, [outside[0], channels, *outside[1:]]
    elif len(outside) <= 1 and len(inside) <= MAX_RANK - 1:
        yield Mode.PER_ACTIVATION, [outside[0] if outside else one, *inside]


def _pieces(*arrays: Buffer) -> Iterator[tuple[Buffer, ...]]:
    """Views of arrays of the same dims that have 2 to 5 axes: one each, unless more than 5 axes do not merge."""
    axes = _groups(_by_stride(list(range(len(arrays[0].dims))), arrays[-1]), arrays)
    cut = sorted(axes, key=lambda axis: axis[0])[: max(0, len(axes) - MAX_RANK)]
    rest = [axis for axis in axes if axis not in cut]
    while len(rest) < 2:
        rest.insert(0, _single(rest, arrays))
    dims = tuple(size for size, _ in rest)
    for index in itertools.product(*(range(size) for size, _ in cut)):
        yield tuple(
            b._replace(
                pointer=b.pointer
                + b.dtype.itemsize * sum(k * steps[i] for k, (_, steps) in zip(index, cut, strict=True)),
                dims=dims,
                strides=tuple(steps[i] for _, steps in rest),
            )
            for i, b in enumerate(arrays)
        )


def _row(matrix: Buffer, row: int) -> Buffer:
    """A row, as a vector."""
    one = _rows(matrix, row, row + 1)
    return one._replace(dims=one.dims[1:], strides=one.strides[1:])


def _rows(buffer: Buffer, start: int, stop: int) -> Buffer:
    """Rows of a matrix."""
    return buffer._replace(
        pointer=buffer.pointer + start * buffer.strides[0] * buffer.dtype.itemsize,
        dims=(stop - start, *buffer.dims[1:]),
    )


class _Gradients(NamedTuple):
    """The arguments that the three backward operations share."""

    shape: _Shape
    x: Buffer
    dy: Buffer
    dx: Buffer | None
    dscale: Buffer
    dbias: Buffer
    factors: tuple[float, float, float, float]
    """alpha_data, beta_data, alpha_param, beta_param."""


def _gradients(
    p: Program,
    x: Any,
    dy: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    axis: Axis,
) -> _Gradients:
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb)
    a_data, b_data, a_param, b_param = p.scalars(
        shape, alpha_data=alpha_data, beta_data=beta_data, alpha_param=alpha_param, beta_param=beta_param
    )
    if dx is None and dscale is None and dbias is None:
        raise ArgumentError("dx", None, "an array, or one for dscale or dbias")
    dxb = None if dx is None else p.data("dx", dx, xb, output=True)
    blended = b_param != 0
    return _Gradients(
        shape,
        xb,
        dyb,
        dxb,
        p.result("dscale", dscale, shape, prior=blended),
        p.result("dbias", dbias, shape, prior=blended),
        # A scratch dx has no prior.
        (a_data, b_data if dx is not None else 0.0, a_param, b_param),
    )


def _parameter_dtype(name: str, dtype: DataType, expected: DataType) -> None:
    allowed = (expected, *_NARROW) if expected == DataType.FLOAT32 else (expected,)
    if dtype not in allowed:
        raise ArgumentTypeError(name, f"dtype {dtype.short}", " or ".join(d.short for d in allowed))


def _count(name: str, value: object, low: int) -> int:
    number, allowed = _arguments.index(value), f"an integer from {low} to 2**63 - 1"
    if number is None:
        raise ArgumentTypeError(name, value, allowed)
    if not low <= number < 1 << 63:
        raise ArgumentError(name, value, allowed)
    return number


def _counts(counts: object, ranks: int) -> list[int]:
    """Elements of each rank; on the host, because calls and their factors depend on them."""
    given = _arguments.items(counts, "counts", "a sequence of integers on the host", most=max(ranks, 64))
    numbers = [_count("counts", c, 0) for c in given]
    if len(numbers) != ranks:
        raise ArgumentError("counts", numbers, f"a count for each of the {ranks} rows of means")
    if not any(numbers):
        raise ArgumentError("counts", numbers, "at least one count above 0")
    return numbers


def _runs(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, row behind the last, count) of neighbouring rows with the same count; none of 0."""
    runs: list[tuple[int, int, int]] = []
    for row, count in enumerate(counts):
        if count and runs and runs[-1][1:] == (row, count):
            runs[-1] = (runs[-1][0], row + 1, count)
        elif count:
            runs.append((row, row + 1, count))
    return runs


def _need(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer


# ---------------------------------------------------------------- recipes: an operation in terms of the program's steps


_RECIPES: dict[str, Callable[..., None]] = {}
_NAMES: dict[str, tuple[tuple[str, ...], tuple[str | None, ...]]] = {}
"""Of each operation: the names of its arguments, and of those that are arrays."""


def _recipe(arrays: str, *, also: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a recipe under its own name and `also`; `arrays` says which of its arguments are arrays."""
    declared = set(arrays.split())

    def register(recipe: Callable[..., None]) -> Callable[..., None]:
        names = tuple(inspect.signature(recipe).parameters)[1:]  # the first is the program
        if not declared <= set(names):
            raise TypeError(f"{recipe.__name__} has no argument {', '.join(sorted(declared - set(names)))}")
        for operation in (recipe.__name__.removeprefix("_do_"), *also.split()):
            _RECIPES[operation] = recipe
            _NAMES[operation] = names, tuple([name if name in declared else None for name in names])
        return recipe

    return register


@_recipe("x mean variance inv_variance")
def _do_stats(p: Program, x: Any, mean: Any, variance: Any, inv_variance: Any, epsilon: float, axis: Axis) -> None:
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    epsilon = _arguments.epsilon(epsilon)
    if mean is None and variance is None and inv_variance is None:
        raise ArgumentError("mean", None, "an array, or one for variance or inv_variance")
    saved = p.result("mean", mean, shape), p.result("inv_variance", inv_variance, shape)
    target = None if variance is None else p.result("variance", variance, shape)
    running = None
    if target is not None and shape.m > 1:
        running = p.filled(0.0, shape), p.filled(0.0, shape)
    ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)
    p.training(shape.kept, xb, ones, zeros, None, epsilon=epsilon, factor=1.0, running=running, saved=saved)
    if running is not None:
        p.axpby((shape.m - 1) / shape.m, running[1], 0.0, _need(target))
    elif target is not None:
        p.product(saved[0], zeros, target)  # 0, and NaN where the one element is not finite


@_recipe("x scale bias y running_mean running_variance saved_mean saved_inv_variance")
def _do_forward_training(
    p: Program,
    x: Any,
    scale: Any,
    bias: Any,
    y: Any,
    alpha: float,
    beta: float,
    epsilon: float,
    exponential_average_factor: float,
    running_mean: Any,
    running_variance: Any,
    saved_mean: Any,
    saved_inv_variance: Any,
    axis: Axis,
) -> None:
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    epsilon = _arguments.epsilon(epsilon)
    factor = _arguments.factor(exponential_average_factor)
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    if has_running and shape.m == 1:
        raise ArgumentError(
            "x",
            f"dims {xb.dims} with axis {axis}",
            "at least two elements per statistic when running statistics are updated",
        )
    running = saved = None
    if has_running:
        running = (
            p.result("running_mean", running_mean, shape, prior=True),
            p.result("running_variance", running_variance, shape, prior=True),
        )
    if has_saved:
        saved = (
            p.result("saved_mean", saved_mean, shape),
            p.result("saved_inv_variance", saved_inv_variance, shape),
        )
    gain, offset = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
    p.training(
        shape.kept, xb, gain, offset, yb,
        alpha=alpha, beta=beta, epsilon=epsilon, factor=factor, running=running, saved=saved,
    )  # fmt: skip


@_recipe("x scale bias mean variance y")
def _do_forward_inference(
    p: Program,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    y: Any,
    alpha: float,
    beta: float,
    epsilon: float,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    epsilon = _arguments.epsilon(epsilon)
    gain, offset = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
    centre, spread = p.parameter("mean", mean, shape), p.parameter("variance", variance, shape)
    p.inference(shape.kept, xb, gain, offset, centre, spread, yb, alpha=alpha, beta=beta, epsilon=epsilon)


@_recipe("x scale bias mean inv_variance y", also="elemt")
def _do_forward_inference_inv_variance(
    p: Program,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_variance: Any,
    y: Any,
    alpha: float,
    beta: float,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    gain = p.parameter("inv_variance", inv_variance, shape)
    if scale is not None:
        gain = p.product(p.parameter("scale", scale, shape), gain)
    offset, centre = p.parameter("bias", bias, shape, 0.0), p.parameter("mean", mean, shape)
    p.inference(shape.kept, xb, gain, offset, centre, p.constant(1.0, shape), yb, alpha=alpha, beta=beta)


@_recipe("x dy scale dx dscale dbias saved_mean saved_inv_variance")
def _do_backward(
    p: Program,
    x: Any,
    dy: Any,
    scale: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    axis: Axis,
) -> None:
    g = _gradients(p, x, dy, dx, dscale, dbias, alpha_data, beta_data, alpha_param, beta_param, axis)
    epsilon = _arguments.epsilon(epsilon)
    saved = None
    if _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance):
        saved = (
            p.parameter("saved_mean", saved_mean, g.shape),
            p.parameter("saved_inv_variance", saved_inv_variance, g.shape),
        )
    gain = p.parameter("scale", scale, g.shape, 1.0)
    p.gradient(g.shape.kept, g.x, g.dy, gain, g.dx, g.dscale, g.dbias, *g.factors, epsilon=epsilon, saved=saved)


@_recipe("x dy mean variance scale dx dscale dbias")
def _do_backward_frozen(
    p: Program,
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    epsilon: float,
    axis: Axis,
) -> None:
    g = _gradients(p, x, dy, dx, dscale, dbias, alpha_data, beta_data, alpha_param, beta_param, axis)
    epsilon = _arguments.epsilon(epsilon)
    centre, spread = p.parameter("mean", mean, g.shape), p.parameter("variance", variance, g.shape)
    gain = p.parameter("scale", scale, g.shape, 1.0)
    zeros = p.constant(0.0, g.shape)
    if g.dx is not None:
        alpha, beta, *_ = g.factors
        p.inference(g.shape.kept, g.dy, gain, zeros, zeros, spread, g.dx, alpha=alpha, beta=beta, epsilon=epsilon)
    if dscale is not None or dbias is not None:
        saved = centre, p.inverse(spread, epsilon)
        ones = p.constant(1.0, g.shape)
        p.gradient(
            g.shape.kept, g.x, g.dy, ones, None, g.dscale, g.dbias, 1.0, 0.0, *g.factors[2:], epsilon=0.0, saved=saved
        )


@_recipe("x dy mean variance scale dx dscale dbias")
def _do_training_grad(
    p: Program,
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    epsilon: float,
    axis: Axis,
) -> None:
    g = _gradients(p, x, dy, dx, dscale, dbias, alpha_data, beta_data, alpha_param, beta_param, axis)
    epsilon = _arguments.epsilon(epsilon)
    saved = (
        p.parameter("mean", mean, g.shape),
        p.inverse(p.parameter("variance", variance, g.shape), epsilon),
    )
    gain = p.parameter("scale", scale, g.shape, 1.0)
    p.gradient(g.shape.kept, g.x, g.dy, gain, g.dx, g.dscale, g.dbias, *g.factors, epsilon=0.0, saved=saved)


@_recipe("dy x mean inv_variance sum_dy sum_dy_xmu dscale dbias")
def _do_backward_reduce(
    p: Program,
    dy: Any,
    x: Any,
    mean: Any,
    inv_variance: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    dscale: Any,
    dbias: Any,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb, empty=True)
    centre = p.parameter("mean", mean, shape)
    inv = None
    if dscale is not None or inv_variance is not None:
        inv = p.parameter("inv_variance", inv_variance, shape)
    named = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "dscale": dscale, "dbias": dbias}
    wanted = {name: p.result(name, array, shape) for name, array in named.items() if array is not None}
    if shape.m == 0:
        for target in wanted.values():
            p.fill(0.0, target)
        return
    if not wanted:
        return
    totals = [wanted[name] for name in ("sum_dy", "dbias") if name in wanted]
    total = totals[0] if totals else p.vector(shape)
    moment = wanted.get("sum_dy_xmu") or p.vector(shape)
    ones = p.constant(1.0, shape)
    p.gradient(shape.kept, xb, dyb, ones, None, moment, total, saved=(centre, ones))
    if "dscale" in wanted:
        p.product(moment, _need(inv), wanted["dscale"])
    for other in totals[1:]:
        p.axpby(1.0, total, 0.0, other)


@_recipe("means m2s variances mean variance inv_variance running_mean running_variance")
def _do_gather_stats(
    p: Program,
    means: Any,
    m2s: Any,
    counts: Sequence[int],
    variances: Any,
    mean: Any,
    variance: Any,
    inv_variance: Any,
    running_mean: Any,
    running_variance: Any,
    exponential_average_factor: float,
    epsilon: float,
) -> None:
    rows = p.data("means", means)
    if len(rows.dims) != 2:
        raise ArgumentError("means", f"dims {rows.dims}", "two axes: ranks and statistics")
    if rows.dtype not in (DataType.FLOAT32, DataType.FLOAT64):
        raise ArgumentTypeError("means", f"dtype {rows.dtype.short}", "f32 or f64")
    if (m2s is None) == (variances is None):
        given = "None" if m2s is None else "an array beside variances"
        raise ArgumentError("m2s", given, "one of m2s and variances")
    squares = p.data(*(("m2s", m2s) if variances is None else ("variances", variances)), rows, "means")
    numbers = _counts(counts, rows.dims[0])
    n = sum(numbers)
    factor, epsilon = _arguments.factor(exponential_average_factor), _arguments.epsilon(epsilon)
    shape = _Shape(rows, 1)
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    if has_running and n == 1:
        raise ArgumentError("counts", numbers, "a sum above 1 when running statistics are updated")
    if not has_running and mean is None and variance is None and inv_variance is None:
        raise ArgumentError("mean", None, "an array, or one for variance, inv_variance or the running statistics")
    centre, spread = p.result("mean", mean, shape), p.result("variance", variance, shape)
    inverse = None if inv_variance is None else p.result("inv_variance", inv_variance, shape)
    running = None
    if has_running:
        running = [
            p.result("running_mean", running_mean, shape, prior=factor != 1.0),
            p.result("running_variance", running_variance, shape, prior=factor != 1.0),
        ]

    runs = _runs(numbers)
    length = sum(stop - start for start, stop, _ in runs)
    within = [1.0 / n if variances is None else count / n for _, _, count in runs]
    if length == 1:
        (start, _, _), single = runs[0], within[0]
        p.axpby(1.0, _row(rows, start), 0.0, centre)
        p.axpby(single, _row(squares, start), 0.0, spread)
    else:
        places = [0, *itertools.accumulate(stop - start for start, stop, _ in runs)][:-1]
        ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)

        def weighted(source: Buffer, factors: Sequence[float], gap: bool) -> Buffer:
            """Rows of ranks that have elements, each times its factor; `gap`: the other rows are there too."""
            target = p.scratch((length, rows.dims[1]), rows.dtype)
            for (start, stop, _), place, weight in zip(runs, places, factors, strict=True):
                after = place + stop - start
                taken = _rows(source, start, stop) if gap else _rows(source, place, after)
                p.axpby(weight, taken, 0.0, _rows(target, place, after))
            return target

        shares = [count / n for _, _, count in runs]
        present = rows if length == rows.dims[0] else weighted(rows, [1.0] * len(runs), True)
        shared, unused = weighted(rows, shares, True), p.vector(shape)
        p.gradient((1,), shared, shared, ones, None, unused, centre, saved=(zeros, ones))
        apart = p.scratch(present.dims, rows.dtype)
        p.inference((1,), present, ones, zeros, centre, ones, apart)
        between = weighted(apart, shares, False)
        p.gradient((1,), present, between, ones, None, spread, unused, saved=(centre, ones))
        inside, total = weighted(squares, within, True), p.vector(shape)
        p.gradient((1,), inside, inside, ones, None, unused, total, saved=(zeros, ones))
        p.axpby(1.0, total, 1.0, spread)
    if inverse is not None:
        p.inverse(spread, epsilon, inverse)
    if running is not None:
        p.axpby(factor, centre, 1.0 - factor, running[0])
        p.axpby(factor * (n / (n - 1)), spread, 1.0 - factor, running[1])


@_recipe("dy x mean inv_variance scale sum_dy sum_dy_xmu dx")
def _do_backward_elemt(
    p: Program,
    dy: Any,
    x: Any,
    mean: Any,
    inv_variance: Any,
    scale: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    count: int,
    dx: Any,
    alpha: float,
    beta: float,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb, empty=True)
    dxb = p.data("dx", dx, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    n = _count("count", count, 1)
    centre, inv = p.parameter("mean", mean, shape), p.parameter("inv_variance", inv_variance, shape)
    gain = inv if scale is None else p.product(p.parameter("scale", scale, shape), inv)
    average = p.vector(shape)
    p.axpby(1.0 / n, p.parameter("sum_dy", sum_dy, shape), 0.0, average)
    slope = p.product(p.product(p.parameter("sum_dy_xmu", sum_dy_xmu, shape), inv), inv)
    slope = p.product(slope, gain, alpha=-1.0 / n)
    ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)
    p.inference(shape.kept, dyb, gain, zeros, average, ones, dxb, alpha=alpha, beta=beta)
    p.inference(shape.kept, xb, slope, zeros, centre, ones, dxb, alpha=alpha, beta=1.0)


def _vectors(p: Program, first: str, array: Any) -> _Shape:
    """The shape that the first of several vectors sets for all."""
    buffer = p.handle.buffer(array, first)
    return _Shape(buffer, tuple(range(len(buffer.dims))))


@_recipe("a b out")
def _do_multiply(p: Program, a: Any, b: Any, out: Any, alpha: float, beta: float) -> None:
    shape = _vectors(p, "a", a)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    left, right = p.parameter("a", a, shape), p.parameter("b", b, shape)
    p.product(left, right, p.result("out", out, shape, prior=beta != 0), alpha=alpha, beta=beta)


@_recipe("variance inv_variance")
def _do_inverse_deviation(p: Program, variance: Any, inv_variance: Any, epsilon: float) -> None:
    shape = _vectors(p, "variance", variance)
    spread = p.parameter("variance", variance, shape)
    p.inverse(spread, _arguments.epsilon(epsilon), p.result("inv_variance", inv_variance, shape))


@_recipe("inv_variance variance")
def _do_variance_from_inverse(p: Program, inv_variance: Any, variance: Any, epsilon: float) -> None:
    shape = _vectors(p, "inv_variance", inv_variance)
    inv, target = p.parameter("inv_variance", inv_variance, shape), p.result("variance", variance, shape)
    deviation = p.inverse(p.product(inv, inv), 0.0)
    zeros, ones = p.constant(0.0, shape), p.constant(1.0, shape)
    shift = p.constant(-_arguments.epsilon(epsilon), shape)
    p.inference((0,), deviation, deviation, shift, zeros, ones, target)


@_recipe("source target")
def _do_convert(p: Program, source: Any, target: Any) -> None:
    shape = _vectors(p, "source", source)
    value, result = p.flat("source", source, shape.derived), p.flat("target", target, shape.derived, True)
    _parameter_dtype("target", result.dtype, shape.dtype)
    if value.dtype == result.dtype:
        p.axpby(1.0, value, 0.0, result)
    elif result.dtype == shape.dtype:
        p.widen(value, result)
    else:
        p.narrow(value if value.dtype == shape.dtype else p.widen(value), result)


@_recipe("x y")
def _do_axpby(p: Program, a: float, x: Any, b: float, y: Any) -> None:
    xb = p.data("x", x)
    yb = p.data("y", y, xb, output=True)
    a, b = _arguments.axpby(a, b, xb, yb)
    p.axpby(a, xb, b, yb)


@_recipe("y")
def _do_fill(p: Program, value: float, y: Any) -> None:
    yb = p.data("y", y, output=True)
    p.fill(_arguments.fill(value, yb), yb)


@_recipe("x y")
def _do_relu(p: Program, x: Any, y: Any) -> None:
    xb = p.data("x", x)
    p.relu(xb, p.data("y", y, xb, output=True))


@_recipe("x dy dx")
def _do_relu_backward(p: Program, x: Any, dy: Any, dx: Any) -> None:
    xb = p.data("x", x)
    p.relu_backward(xb, p.data("dy", dy, xb), p.data("dx", dx, xb, output=True))


MOST_PREPARED = 256
"""Kinds of operations that a handle keeps ready, those that came up last."""


def prepare(
    handle: Handle, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Prepared, tuple[int, ...], list[Any]]:
    """Check an operation, or find one alike that was checked before; for use inside the package.

    Parameters
    ----------
    handle : Handle
    operation : str
        Name of an operation of this module.
    arguments : tuple
        Those of the operation behind `handle`.
    options : dict
        The rest by name, all of them: defaults are not filled in, and `workspace` is an argument of `Prepared.execute`.

    Returns
    -------
    Prepared
    addresses : tuple of int
        Those of the arrays, for `Prepared.execute`.
    held : list
        What has to live as long as these addresses are used: the arguments, or what they said of themselves.

    Raises
    ------
    ArgumentError, ArgumentTypeError, ClosedError, UnsupportedError
        As the operation would, before anything is written.
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    names, arrays = _NAMES[operation]
    key, addresses, held = handle._look(arrays, (*arguments, *[options[name] for name in names[len(arguments) :]]))
    known = handle._prepared
    found = None if key is None else known.get((operation, key))
    if found is not None:
        return found, addresses, held
    found = _prepare(handle, operation, arrays, held)
    if key is not None:
        known[operation, key] = found
        while len(known) > MOST_PREPARED:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread with this handle has changed it
                known.pop(next(iter(known)), None)
        if handle.closed:  # by another thread, meanwhile
            known.clear()
    return found, addresses, held


def _prepare(handle: Handle, operation: str, arrays: tuple[str | None, ...], values: Sequence[Any]) -> Prepared:
    made = Program(handle)
    given: list[Any] = []
    slot = 0
    for name, value in zip(arrays, values, strict=True):
        slot += name is not None
        if name is not None and value is not None:
            given.append(handle.buffer(value, name)._replace(pointer=slot << SLOT_BITS, owner=None))
        else:
            given.append(value)
    _RECIPES[operation](made, *given)
    return made.finish()


def _perform(handle: Handle, workspace: Any, operation: str, *arguments: Any, **options: Any) -> None:
    prepared, addresses, _held = prepare(handle, operation, arguments, options)
    prepared.execute(handle, operation, addresses, workspace)


@functools.cache
def _signature_of(operation: str) -> tuple[inspect.Signature, dict[str, None], int, dict[str, Any]]:
    """Of an operation's function: its signature, and its arguments but handle and workspace, with the defaults."""
    signature = inspect.signature(globals()[operation])
    rest = [p for p in signature.parameters.values() if p.name not in ("handle", "workspace")]
    positional = len([p for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD])
    defaults = {p.name: p.default for p in rest if p.default is not p.empty}
    return signature, dict.fromkeys(p.name for p in rest), positional, defaults


def asked(
    handle: Handle, operation: str, arguments: Sequence[Any], options: dict[str, Any]
) -> tuple[Prepared, tuple[int, ...], list[Any]]:
    """`prepare` of an operation by name, with the defaults of its function; for use inside the package."""
    operation = _arguments.text(operation, "operation")
    if operation not in _RECIPES:
        raise ArgumentError("operation", operation, "one of " + ", ".join(_RECIPES))
    if "workspace" in options:
        raise ArgumentError("workspace", "an argument of a query", "no workspace: its size is what is asked for")
    signature, names, positional, defaults = _signature_of(operation)
    by_place = dict(zip(names, arguments, strict=False))
    named = {**defaults, **by_place, **options}
    if len(arguments) > positional or named.keys() != names.keys() or not by_place.keys().isdisjoint(options):
        signature.bind(handle, *arguments, **options)  # says what is wrong
    return prepare(handle, operation, (), named)
