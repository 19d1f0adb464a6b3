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

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm._core import Handle
from pybnorm.errors import ArgumentError
from pybnorm.operations.preparation import MOST_PREPARED, _perform, prepare
from pybnorm.operations.program import Derived, Plan, Prepared, _derived, _kept, kept_axes
from pybnorm.operations.recipes import _RECIPES
from pybnorm.operations.views import Axis

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
