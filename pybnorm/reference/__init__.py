"""Batch normalization in NumPy, in float64; results of all backends are compared with it.

The functions take arrays as a vendor call does and return float64 results, not rounded to a narrower type. Those of the
vendors' three calls and the blocks take the vendors' `mode`, the others `axis`, any axes to keep. They are vectorized
and two-pass, and their extra memory is bounded: beyond inputs and results they hold a few blocks of `BLOCK` elements,
whatever the shape. `iterate_blocks` and `reduce_blocks` offer the same blocks to other modules.

Formulas. With m elements per statistic (Ioffe & Szegedy 2015, algorithm 1; cuDNN, MIOpen and hipDNN agree)::

    mean         = sum(x) / m                       variance = sum((x - mean)**2) / m       (biased)
    inv_variance = 1 / sqrt(variance + epsilon)     x_hat = (x - mean) * inv_variance
    y            = alpha * (scale * x_hat + bias) + beta * prior
    running     <- (1 - f) * running + f * batch    batch: mean; variance * m / (m - 1), or variance

and backward (the same paper, section 3, in the centred form)::

    dbias = sum(dy)      dscale = inv_variance * sum(dy * (x - mean))
    dx    = scale * inv_variance * (dy - dbias / m - x_hat * dscale / m)

Numerics. The mean is computed relative to a pivot, the first element of each statistic, and corrected by a second pass;
the variance is the corrected two-pass sum (Chan, Golub & LeVeque 1983). Sums are pairwise inside a block and
compensated across blocks (Neumaier 1974), so the error does not grow with m. A constant channel has variance exactly 0,
and data with sums that are exact in float64 give exact statistics. If variance + epsilon is 0, results are inf and NaN
as in IEEE 754, without a warning. A NaN or inf affects its own statistic only. Values beyond about 1e150 overflow when
squared, as in any float64 code, and NumPy warns of it.

Arrays. Data are NumPy arrays in logical order N, C, spatial..., rank 2 to 8, of float16, bfloat16 (ml_dtypes), float32
or float64; their strides give the layout. Parameters have the derived shape, ``(1, C, 1...)`` or ``(1, C, D...)``, in
which axes of length 1 may be left out: ``(C,)`` is enough in the spatial modes; any of the four dtypes and any strides.
Results are new float64 arrays: data in the memory order of x, parameters in the derived shape.

Errors. Each function raises `ArgumentError` or `ArgumentTypeError`, which name the argument, its value and what is
allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pybnorm import _arguments
from pybnorm.enums import Mode, Operation
from pybnorm.reference.axes import (
    BackwardReduce,
    Folded,
    GatherStats,
    Stats,
    _Case,
    _given,
    _gradients,
    backward_elemt,
    backward_frozen,
    backward_reduce,
    elemt,
    fold,
    forward_inference_inv_variance,
    gather_stats,
    stats,
    training_grad,
)
from pybnorm.reference.blocks import BLOCK, Block, _data, iterate_blocks, reduce_blocks
from pybnorm.reference.mathematics import (
    Backward,
    ForwardInference,
    ForwardTraining,
    _blend,
    _inverse,
    _statistics,
)
from pybnorm.reference.rounding import Array, Index, _load, round_to

__all__ = [
    "BLOCK",
    "Backward",
    "BackwardReduce",
    "Block",
    "Folded",
    "ForwardInference",
    "ForwardTraining",
    "GatherStats",
    "Stats",
    "backward",
    "backward_elemt",
    "backward_frozen",
    "backward_reduce",
    "elemt",
    "fold",
    "forward_inference",
    "forward_inference_inv_variance",
    "forward_training",
    "gather_stats",
    "iterate_blocks",
    "reduce_blocks",
    "round_to",
    "stats",
    "training_grad",
]


def forward_training(
    x: Array, scale: Array, bias: Array, *, mode: Mode | int | str = Mode.SPATIAL, alpha: float = 1.0,
    beta: float = 0.0, epsilon: float = 1e-5, exponential_average_factor: float = 0.1,
    running_mean: Array | None = None, running_variance: Array | None = None, unbiased: bool = True,
    prior: Array | None = None,
) -> ForwardTraining:  # fmt: skip
    """Normalize by the batch's own statistics.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * prior`` (Ioffe & Szegedy 2015,
    algorithm 1), blended as by ``cudnnBatchNormalizationForwardTraining``. Running statistics become
    ``(1 - f) * running + f * batch`` with f the `exponential_average_factor`.

    Parameters
    ----------
    x : ndarray
        Shape (N, C, spatial...), rank 2 to 8; float16, bfloat16, float32 or float64; any strides.
    scale, bias : ndarray
        Derived shape (see `derive`), axes of length 1 may be left out; any of the four dtypes.
    mode : Mode
        `SPATIAL_PERSISTENT` has the mathematics of `SPATIAL`.
    alpha, beta : float
        Finite. With beta 0, `prior` is never read.
    epsilon : float
        Finite, at least 0.
    exponential_average_factor : float
        From 0 to 1. A factor of 1 replaces the running statistics unread.
    running_mean, running_variance : ndarray, optional
        Derived shape. Both or neither. They are not written.
    unbiased : bool
        Whether the running variance takes the unbiased variance (cuDNN, MIOpen, hipDNN, PyTorch) or the biased one
        (ONNX).
    prior : ndarray, optional
        Prior value of y, shape of x, any of the four dtypes; required if beta is not 0.

    Returns
    -------
    ForwardTraining
        y, saved_mean, saved_inv_variance, running_mean, running_variance, variance.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3, 4]]])
    >>> found = pybnorm.reference.forward_training(x, np.ones((1, 1, 1)), np.zeros((1, 1, 1)), epsilon=0)
    >>> found.y.round(3), found.saved_mean.ravel(), found.variance.ravel()
    (array([[[-1.342, -0.447,  0.447,  1.342]]]), array([2.5]), array([1.25]))
    """
    tensor = _data("x", x)
    running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    bn_mode, alpha, beta, factor, epsilon = _arguments.call(
        Operation.FORWARD_TRAINING, {"x": tensor}, None, running, mode=mode, alpha=alpha, beta=beta, epsilon=epsilon,
        exponential_average_factor=exponential_average_factor,
    )  # fmt: skip
    unbiased = _arguments.boolean(unbiased, "unbiased")
    case = _Case(x, mode=bn_mode)
    walk, scales, biases = case.walk, case.parameter("scale", scale), case.parameter("bias", bias)
    prior = case.prior("prior", prior, "beta", beta)
    old = {}
    if running:
        old = {"running_mean": case.parameter("running_mean", running_mean)}
        old["running_variance"] = case.parameter("running_variance", running_variance)
    results: dict[str, Any] = dict.fromkeys(("running_mean", "running_variance"))
    results |= {name: np.empty(case.derived) for name in ("saved_mean", "saved_inv_variance", "variance", *old)}

    def statistics(kept: Index, i: Index) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore"):  # inf and signalling NaN in x give NaN
            mean, squares = _statistics(walk, kept, case.x)
        variance = squares / walk.count
        inv_variance = _inverse(variance, epsilon)
        batch = {"saved_mean": mean, "saved_inv_variance": inv_variance, "variance": variance}
        if running:
            estimates = mean, squares / (walk.count - 1) if unbiased else variance
            for estimate, (name, values) in zip(estimates, old.items(), strict=True):
                batch[name] = _blend(factor, estimate, 1.0 - factor, None if factor == 1 else values, i)
        for name, values in batch.items():
            results[name][i] = values
        return mean, inv_variance

    y = case.normalized(scales, biases, statistics, alpha, beta, prior).y
    return ForwardTraining(y, **results)


def forward_inference(
    x: Array, scale: Array, bias: Array, running_mean: Array, running_variance: Array, *,
    mode: Mode | int | str = Mode.SPATIAL, alpha: float = 1.0, beta: float = 0.0, epsilon: float = 1e-5,
    prior: Array | None = None,
) -> ForwardInference:  # fmt: skip
    """Normalize by given statistics.

    ``y = alpha * (scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * prior``, as
    ``cudnnBatchNormalizationForwardInference``.

    Parameters
    ----------
    x, scale, bias, mode, alpha, beta, epsilon, prior
        As for `forward_training`.
    running_mean, running_variance : ndarray
        Derived shape, both required. The variance may hold no negative value; a NaN is allowed and stays in its
        statistic.

    Returns
    -------
    ForwardInference
        y.

    Examples
    --------
    >>> x, one = np.float32([[[1, 2, 3]]]), np.ones((1, 1, 1))
    >>> pybnorm.reference.forward_inference(x, one, one, one, one, epsilon=0).y
    array([[[1., 2., 3.]]])
    """
    tensor = _data("x", x)
    bn_mode, alpha, beta, epsilon = _arguments.call(
        Operation.FORWARD_INFERENCE, {"x": tensor}, mode=mode, alpha=alpha, beta=beta, epsilon=epsilon
    )
    case = _Case(x, mode=bn_mode)
    statistics = _given(case, epsilon, running_mean=running_mean, running_variance=running_variance)
    scales, biases = case.parameter("scale", scale), case.parameter("bias", bias)
    return case.normalized(scales, biases, statistics, alpha, beta, prior)


def backward(
    x: Array, dy: Array, scale: Array, *, mode: Mode | int | str = Mode.SPATIAL, alpha: float = 1.0,
    beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, epsilon: float = 1e-5,
    saved_mean: Array | None = None, saved_inv_variance: Array | None = None, prior_dx: Array | None = None,
    prior_dscale: Array | None = None, prior_dbias: Array | None = None,
) -> Backward:  # fmt: skip
    """Gradients of `forward_training` with alpha 1 and beta 0.

    ``dbias = sum(dy)``, ``dscale = inv_variance * sum(dy * (x - mean))`` and ``dx = scale * inv_variance *
    (dy - dbias / m - (x - mean) * inv_variance * dscale / m)`` (Ioffe & Szegedy 2015, section 3), blended as by
    ``cudnnBatchNormalizationBackward``: dx by alpha and beta, dscale and dbias by alpha_param and beta_param. The
    dscale and dbias inside dx are unblended.

    Parameters
    ----------
    x, scale, mode
        As for `forward_training`.
    dy : ndarray
        Gradient of y; shape and dtype of x, any strides.
    alpha, beta, alpha_param, beta_param : float
        Finite. With a beta of 0 its priors are never read.
    epsilon : float
        Finite, at least 0. Used only if the statistics are computed from x; must then be that of forward.
    saved_mean, saved_inv_variance : ndarray, optional
        Derived shape, both or neither; computed from x if absent. They need not be the statistics of x: other
        operations are composed with other values.
    prior_dx, prior_dscale, prior_dbias : ndarray, optional
        Prior values of the outputs; required if the beta is not 0.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> found = pybnorm.reference.backward(x, dy, np.ones((1, 1, 1)), epsilon=0)
    >>> found.dx.round(3), found.dscale.ravel().round(3), found.dbias.ravel()
    (array([[[ 0.204, -0.408,  0.204]]]), array([1.225]), array([1.]))
    """
    tensor, gradient = _data("x", x), _data("dy", dy)
    bn_mode, alpha, beta, alpha_param, beta_param, epsilon = _arguments.call(
        Operation.BACKWARD, {"x": tensor, "dy": gradient}, mode=mode, alpha=alpha, beta=beta, alpha_param=alpha_param,
        beta_param=beta_param, epsilon=epsilon,
    )  # fmt: skip
    case = _Case(x, mode=bn_mode)
    saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    if saved:
        means = case.parameter("saved_mean", saved_mean)
        inverses = case.parameter("saved_inv_variance", saved_inv_variance)

    def statistics(kept: Index, i: Index) -> tuple[Array, Array]:
        if saved:
            return _load(means[i]), _load(inverses[i])
        mean, squares = _statistics(case.walk, kept, case.x)
        return mean, _inverse(squares / case.walk.count, epsilon)

    factors, priors = (alpha, beta, alpha_param, beta_param), (prior_dx, prior_dscale, prior_dbias)
    return _gradients(case, dy, case.parameter("scale", scale), statistics, factors, priors)
