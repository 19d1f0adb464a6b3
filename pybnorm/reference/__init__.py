"""Batch normalization in NumPy, in float64; results of all backends are compared with it.

The functions take arrays as a vendor call does and return float64 results, not rounded to a narrower type. Those of the
vendors' three calls, `derive` and the blocks take the vendors' `mode`, the others `axis`, any axes to keep. They are
vectorized and two-pass, and their extra memory is bounded: beyond inputs and results they hold a few blocks of `BLOCK`
elements, whatever the shape. `iterate_blocks` and `reduce_blocks` offer the same blocks to other modules.

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
Results are new float64 arrays (data in the memory order of x, parameters in the derived shape), or the arrays given in
`out`, of any of the four dtypes and any strides without overlap, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pybnorm import _arguments
from pybnorm.enums import Mode, Operation
from pybnorm.reference.axes import (
    BackwardReduce,
    Folded,
    GatherStats,
    Stats,
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
from pybnorm.reference.blocks import BLOCK, Block, _data, _parameter, _Walk, iterate_blocks, reduce_blocks
from pybnorm.reference.mathematics import (
    Backward,
    Derived,
    ForwardInference,
    ForwardTraining,
    _blend,
    _data_result,
    _disjoint,
    _gradient_terms,
    _input_gradient,
    _inverse,
    _normalize,
    _not_negative,
    _outputs,
    _ParameterResult,
    _prior,
    _statistics,
    _write,
    derive,
)
from pybnorm.reference.rounding import Array, _load, round_to

__all__ = [
    "BLOCK",
    "Backward",
    "BackwardReduce",
    "Block",
    "Derived",
    "Folded",
    "ForwardInference",
    "ForwardTraining",
    "GatherStats",
    "Stats",
    "axpby",
    "backward",
    "backward_elemt",
    "backward_frozen",
    "backward_reduce",
    "derive",
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
    prior: Array | None = None, out: Mapping[str, Array] | None = None,
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
        Derived shape. Both or neither. They are not written unless `out` names them.
    unbiased : bool
        Whether the running variance takes the unbiased variance (cuDNN, MIOpen, hipDNN, PyTorch) or the biased one
        (ONNX).
    prior : ndarray, optional
        Prior value of y, shape of x, any of the four dtypes; required if beta is not 0.
    out : mapping of str to ndarray, optional
        Arrays to write results into, by field name. None may share memory with an input or with another, except that
        y may be `prior` itself, and the running statistics theirs.

    Returns
    -------
    ForwardTraining
        y, saved_mean, saved_inv_variance, running_mean, running_variance, variance.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Names the argument, its value and what is allowed; nothing has been written then. Running statistics with
        one element per statistic are refused, because the unbiased variance is 0 / 0.

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
    derived = _arguments.derived_dims(x.shape, bn_mode)
    scales, biases = _parameter("scale", scale, derived), _parameter("bias", bias, derived)
    prior = _prior("prior", prior, "beta", beta)
    if prior is not None:
        _data("prior", prior, x.shape)
    allowed = [f for f in ForwardTraining._fields if running or not f.startswith("running")]
    given = _outputs(out, allowed)
    y = _data_result(given, "y", x)
    results = {name: _ParameterResult(given, name, derived) for name in allowed if name != "y"}
    old = {}
    if running:
        old["running_mean"] = _parameter("running_mean", running_mean, derived)
        old["running_variance"] = _parameter("running_variance", running_variance, derived)
    _disjoint(
        given,
        {"x": x, "scale": scales, "bias": biases, "prior": prior, **old},
        {"prior": "y", "running_mean": "running_mean", "running_variance": "running_variance"},
    )

    walk = _Walk(x, bn_mode, 2)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        with np.errstate(invalid="ignore"):  # inf and signalling NaN in x give NaN
            mean, squares = _statistics(walk, kept, x)
        variance = squares / walk.count
        inv_variance = _inverse(variance, epsilon)
        batch = {"saved_mean": mean, "saved_inv_variance": inv_variance, "variance": variance}
        if running:
            estimate = squares / (walk.count - 1) if unbiased else variance
            for name, values in (("running_mean", mean), ("running_variance", estimate)):
                batch[name] = _blend(factor, values, 1.0 - factor, None if factor == 1 else old[name], index)
        for name, values in batch.items():
            results[name].store(index, values)
        with np.errstate(invalid="ignore", over="ignore"):  # of an infinite inv_variance: inf and NaN, as in IEEE 754
            slope = alpha * (_load(scales[index]) * inv_variance)
            _normalize(walk, kept, x, mean, slope, alpha * _load(biases[index]), beta, prior, y)
    arrays = {name: result.array for name, result in results.items()}
    return ForwardTraining(
        y,
        arrays["saved_mean"],
        arrays["saved_inv_variance"],
        arrays.get("running_mean"),
        arrays.get("running_variance"),
        arrays["variance"],
    )


def forward_inference(
    x: Array, scale: Array, bias: Array, running_mean: Array, running_variance: Array, *,
    mode: Mode | int | str = Mode.SPATIAL, alpha: float = 1.0, beta: float = 0.0, epsilon: float = 1e-5,
    prior: Array | None = None, out: Mapping[str, Array] | None = None,
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
    out : mapping of str to ndarray, optional
        ``{"y": array}``; see `forward_training`.

    Returns
    -------
    ForwardInference
        y.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Names the argument, its value and what is allowed; nothing has been written then.

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
    derived = _arguments.derived_dims(x.shape, bn_mode)
    scales, biases = _parameter("scale", scale, derived), _parameter("bias", bias, derived)
    means = _parameter("running_mean", running_mean, derived)
    variances = _parameter("running_variance", running_variance, derived)
    prior = _prior("prior", prior, "beta", beta)
    if prior is not None:
        _data("prior", prior, x.shape)
    given = _outputs(out, ForwardInference._fields)
    y = _data_result(given, "y", x)
    inputs = {"x": x, "scale": scales, "bias": biases, "running_mean": means, "running_variance": variances}
    _disjoint(given, {**inputs, "prior": prior}, {"prior": "y"})

    walk = _Walk(x, bn_mode, 2)
    _not_negative("running_variance", walk, variances)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        inv_variance = _inverse(_load(variances[index]), epsilon)
        with np.errstate(invalid="ignore", over="ignore"):  # of an infinite inv_variance: inf and NaN, as in IEEE 754
            factor = alpha * (_load(scales[index]) * inv_variance)
            _normalize(walk, kept, x, _load(means[index]), factor, alpha * _load(biases[index]), beta, prior, y)
    return ForwardInference(y)


def backward(
    x: Array, dy: Array, scale: Array, *, mode: Mode | int | str = Mode.SPATIAL, alpha: float = 1.0,
    beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, epsilon: float = 1e-5,
    saved_mean: Array | None = None, saved_inv_variance: Array | None = None, prior_dx: Array | None = None,
    prior_dscale: Array | None = None, prior_dbias: Array | None = None, out: Mapping[str, Array] | None = None,
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
    out : mapping of str to ndarray, optional
        dx, dscale, dbias; see `forward_training`. Each may be its own prior.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Names the argument, its value and what is allowed; nothing has been written then.

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
    derived = _arguments.derived_dims(x.shape, bn_mode)
    inputs = {"x": x, "dy": dy, "scale": _parameter("scale", scale, derived)}
    saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    if saved:
        inputs["saved_mean"] = _parameter("saved_mean", saved_mean, derived)
        inputs["saved_inv_variance"] = _parameter("saved_inv_variance", saved_inv_variance, derived)
    prior_dx = _prior("prior_dx", prior_dx, "beta", beta)
    if prior_dx is not None:
        _data("prior_dx", prior_dx, x.shape)
    olds = {}
    for name, prior in (("prior_dscale", prior_dscale), ("prior_dbias", prior_dbias)):
        read = _prior(name, prior, "beta_param", beta_param)
        olds[name] = None if read is None else _parameter(name, read, derived)
    given = _outputs(out, Backward._fields)
    dx = _data_result(given, "dx", x)
    dscales = _ParameterResult(given, "dscale", derived)
    dbiases = _ParameterResult(given, "dbias", derived)
    priors = {"prior_dx": prior_dx, **olds}
    _disjoint(given, {**inputs, **priors}, {f"prior_{name}": name for name in Backward._fields})

    walk = _Walk(x, bn_mode, 2)
    for kept in walk.kept_tiles():
        index = walk.parameter_index(kept)
        with np.errstate(invalid="ignore"):  # as in forward_training
            if saved:
                mean = _load(inputs["saved_mean"][index])
                inv_variance = _load(inputs["saved_inv_variance"][index])
            else:
                mean, squares = _statistics(walk, kept, x)
                inv_variance = _inverse(squares / walk.count, epsilon)
            dbias, moment = walk.reduce(kept, _gradient_terms, (x, dy), (mean,), walk.read)
        with np.errstate(invalid="ignore", over="ignore"):  # of an infinite inv_variance: inf and NaN, as in IEEE 754
            dscale = inv_variance * moment
            slope = inv_variance * (dscale / walk.count)
            factor = alpha * (_load(inputs["scale"][index]) * inv_variance)
            _input_gradient(walk, kept, x, dy, mean, slope, dbias / walk.count, factor, beta, prior_dx, dx)
        dscales.store(index, _blend(alpha_param, dscale, beta_param, olds["prior_dscale"], index))
        dbiases.store(index, _blend(alpha_param, dbias, beta_param, olds["prior_dbias"], index))
    return Backward(dx, dscales.array, dbiases.array)


def axpby(a: float, x: Array, b: float, y: Array | None = None, *, out: Array | None = None) -> Array:
    """``a * x + b * y``.

    Parameters
    ----------
    a, b : float
        Finite. With b 0, `y` is never read.
    x : ndarray
        Rank 2 to 8, any of the four dtypes, any strides.
    y : ndarray, optional
        Shape of x; required if b is not 0. Not written unless it is `out` too.
    out : ndarray, optional
        Array to write the result into, shape of x; may be `y` itself.

    Returns
    -------
    ndarray
        `out`, or a fresh float64 array in the memory order of x.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Names the argument, its value and what is allowed; nothing has been written then.

    Examples
    --------
    >>> pybnorm.reference.axpby(2, np.float32([[1, 2]]), 0.5, np.float32([[10, 10]]))
    array([[7., 9.]])
    """
    tensor = _data("x", x)
    a, b = _arguments.scalar(a, "a", tensor.dtype), _arguments.scalar(b, "b", tensor.dtype)
    y = _prior("y", y, "b", b)
    if y is not None:
        _data("y", y, x.shape)
    given = _outputs(None if out is None else {"out": out}, ["out"])
    result = _data_result(given, "out", x)
    _disjoint(given, {"x": x, "y": y}, {"y": "out"})
    walk = _Walk(x, Mode.SPATIAL, 2)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN
        for kept in walk.kept_tiles():
            for index in walk.blocks(kept):
                block = walk.load(0, x, index)
                block *= a
                _write(walk, index, block, b, y, result)
    return result
