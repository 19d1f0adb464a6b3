"""Operations with `axis`: statistics and gradients over any subset of the axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pybnorm import _arguments
from pybnorm.enums import Mode
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.reference.blocks import _data, _parameter, _Walk
from pybnorm.reference.mathematics import (
    Backward,
    ForwardInference,
    _affine,
    _blend,
    _gradient_terms,
    _input_gradient,
    _inverse,
    _statistics,
)
from pybnorm.reference.rounding import ARRAYS, Array, Float64Array, Index, _load, _plain

_Statistics: TypeAlias = Callable[[Index, Index], tuple[Float64Array, Float64Array]]
"""Mean and inverse standard deviation of a tile, and of its index in arrays of the derived shape."""


class Folded(NamedTuple):
    """Result of `fold`."""

    mode: Mode
    dims: tuple[int, ...]
    """Shape in which `mode` reduces the requested axes."""
    derived: tuple[int, ...]
    """Shape of parameters in the array's rank: 1 in the reduced axes."""
    order: tuple[int, ...]
    """The array's axes in the order of `dims`."""

    def _view(self, array: Array) -> Array:
        """The array in the shape that `mode` reduces; a copy if no view has it."""
        return array.transpose(self.order).reshape(self.dims)

    def _restore(self, array: Array, dims: tuple[int, ...]) -> Array:
        """The inverse of `_view`: the array in shape `dims`."""
        ordered = array.reshape([dims[a] for a in self.order])
        return ordered.transpose(sorted(range(len(dims)), key=self.order.__getitem__))


def fold(dims: Sequence[int], axis: int | Sequence[int]) -> Folded:
    """Express any subset of kept axes as one of the two modes.

    ``axis=1`` is the spatial mode and all axes but 0 the per-activation one, on the array as it is. Every other subset
    K, with the rest R, is the spatial mode on ``(1, prod K, prod R)``.

    Parameters
    ----------
    dims : sequence of int
        Rank 1 to 8.
    axis : int or sequence of int
        The axes that parameters keep.

    Returns
    -------
    Folded

    Examples
    --------
    >>> pybnorm.reference.fold((8, 64, 32, 32), (0, 1)).dims
    (1, 512, 1024)
    """
    shape = _arguments.dims(dims, low=1)
    rank = len(shape)
    kept = _arguments.axes(axis, rank)
    derived = tuple(d if a in kept else 1 for a, d in enumerate(shape))
    own = tuple(range(rank))
    if rank > 1 and kept == (1,):
        return Folded(Mode.SPATIAL, shape, derived, own)
    if rank > 1 and kept == own[1:]:
        return Folded(Mode.PER_ACTIVATION, shape, derived, own)
    count = math.prod(derived)
    order = (*kept, *(a for a in own if a not in kept))
    return Folded(Mode.SPATIAL, (1, count, math.prod(shape) // count), derived, order)


class Stats(NamedTuple):
    """Results of `stats`, each of the derived shape."""

    mean: Float64Array
    variance: Float64Array
    """Biased."""
    inv_variance: Float64Array
    """1 / sqrt(variance + epsilon)."""


class BackwardReduce(NamedTuple):
    """Results of `backward_reduce`, each of the derived shape."""

    sum_dy: Float64Array
    sum_dy_xmu: Float64Array
    dscale: Float64Array | None
    """None without the inverse standard deviation."""
    dbias: Float64Array


class GatherStats(NamedTuple):
    """Results of `gather_stats`, each of shape (C,)."""

    mean: Float64Array
    variance: Float64Array
    """Biased."""
    inv_variance: Float64Array
    running_mean: Float64Array | None
    running_variance: Float64Array | None


class _Case:
    """The checked arrays of an operation with `axis`, or `mode` in its place, folded."""

    def __init__(
        self, x: Array, axis: int | Sequence[int] = 1, *, mode: Mode | None = None, may_be_empty: bool = False
    ) -> None:
        _arguments.instance(x, ARRAYS, "x", "a NumPy array")
        x = _plain(x)
        _arguments.data_type(x.dtype, "x")
        self.own_dims = x.shape
        if not 1 <= x.ndim <= 8:
            raise ArgumentError("x", f"shape {x.shape}", "rank 1 to 8")
        kept = _arguments.axes(axis, x.ndim) if mode is None else _arguments.kept_axes(x.ndim, mode)
        self.empty = 0 in x.shape
        self.derived = tuple(d if a in kept else 1 for a, d in enumerate(x.shape))
        if 0 in self.derived:
            raise ArgumentError("x", f"shape {x.shape}", "at least one statistic")
        if self.empty and not may_be_empty:
            raise ArgumentError("x", f"shape {x.shape}", "at least one element per statistic")
        self.x, self.shape = x, self.derived
        if not self.empty:
            self.fold = fold(x.shape, kept)
            self.x = self.fold._view(x)
            mode = self.fold.mode if mode is None else mode
            self.shape = _arguments.derived_dims(self.x.shape, mode)
            self.walk = _Walk(self.x, mode, 2)

    def data(self, name: str, array: Array | None) -> Array:
        """Check an array of x's shape; its folded form."""
        if not issubclass(type(array), ARRAYS):
            raise ArgumentTypeError(name, array, "a NumPy array")
        array = _plain(array)  # type: ignore[arg-type]
        _arguments.data_type(array.dtype, name)
        if array.shape != self.own_dims:
            raise ArgumentError(name, f"shape {array.shape}", f"shape {self.own_dims}")
        return array if self.empty else self.fold._view(array)

    def prior(
        self, name: str, array: Array | None, beta_name: str, beta: float, check: Callable[..., Array] | None = None
    ) -> Array | None:
        """The folded prior value, or None if beta is 0 and it is not read; `check` is `data` or `parameter`."""
        if beta == 0.0:
            if array is not None:
                _arguments.instance(array, np.ndarray, name, "a NumPy array")
            return None
        if array is None:
            raise ArgumentError(name, None, f"an array, because {beta_name} is {beta}")
        return (check or self.data)(name, array)

    def parameter(self, name: str, array: Array | None, default: float | None = None) -> Array:
        """Check a parameter; it has the folded derived shape."""
        if array is None and default is not None:
            return np.broadcast_to(np.float64(default), self.shape)
        return _parameter(name, array, self.derived).reshape(self.shape)

    def variance(self, name: str, array: Array) -> Array:
        """Check a parameter without a negative value."""
        values = self.parameter(name, array)
        for _, index in self.tiles():
            part = _load(values[index])
            if (part < 0.0).any():
                raise ArgumentError(name, f"an element {float(part[part < 0.0][0])!r}", "variances >= 0")
        return values

    def tiles(self) -> Iterator[tuple[Index, Index]]:
        """Each kept tile, and its index in arrays of the derived shape."""
        for kept in () if self.empty else self.walk.kept_tiles():
            yield kept, self.walk.parameter_index(kept)

    def normalized(
        self, scale: Array | None, bias: Array | None, statistics: _Statistics, alpha: float, beta: float,
        prior: Array | None,
    ) -> ForwardInference:  # fmt: skip
        """``y = alpha * (scale * inverse * (x - mean) + bias) + beta * prior``."""
        scales, offsets = self.parameter("scale", scale, 1.0), self.parameter("bias", bias, 0.0)
        old, y = self.prior("prior", prior, "beta", beta), self.result()
        for kept, i in self.tiles():
            mean, inverse = statistics(kept, i)
            with np.errstate(invalid="ignore", over="ignore"):  # an infinite inverse gives inf and NaN, as in IEEE 754
                factor, offset = alpha * (_load(scales[i]) * inverse), alpha * _load(offsets[i])
                self.walk.write(kept, _affine, (self.x,), (mean, factor, offset), beta, old, y)
        return ForwardInference(self.restore(y))

    def result(self) -> Float64Array:
        """An array for data results."""
        return np.empty_like(self.x, dtype=np.float64, subok=False)

    def restore(self, array: Array) -> Array:
        """A data result in x's own shape."""
        return array if self.empty else self.fold._restore(array, self.own_dims)


def stats(x: Array, *, epsilon: float = 1e-5, axis: int | Sequence[int] = 1) -> Stats:
    """Mean, biased variance and inverse standard deviation of the batch.

    Parameters
    ----------
    x : ndarray
        Rank 1 to 8, any of the four dtypes, any strides.
    epsilon : float
        Finite, at least 0.
    axis : int or sequence of int
        The axes that are kept; any subset, see `fold`.

    Returns
    -------
    Stats
        mean, variance, inv_variance.

    Examples
    --------
    >>> found = pybnorm.reference.stats(np.float32([[[1, 2, 3]]]))
    >>> found.mean.ravel(), found.variance.ravel().round(3)
    (array([2.]), array([0.667]))
    """
    epsilon = _arguments.epsilon(epsilon)
    case = _Case(x, axis)
    mean, variance = np.empty(case.shape), np.empty(case.shape)

    def take(walk: _Walk, kept: Index) -> None:
        index = walk.parameter_index(kept)
        mean[index], squares = _statistics(walk, kept, case.x)
        variance[index] = squares / walk.count

    case.walk.each(take)
    inv = _inverse(variance, epsilon)
    return Stats(mean.reshape(case.derived), variance.reshape(case.derived), inv.reshape(case.derived))


def forward_inference_inv_variance(
    x: Array, scale: Array | None, bias: Array | None, mean: Array, inv_variance: Array, *, alpha: float = 1.0,
    beta: float = 0.0, axis: int | Sequence[int] = 1, prior: Array | None = None,
) -> ForwardInference:  # fmt: skip
    """Normalize by a given mean and inverse standard deviation.

    ``y = alpha * (scale * inv_variance * (x - mean) + bias) + beta * prior`` (hipDNN's ``batchnorm_inference``).

    Parameters
    ----------
    x : ndarray
        Rank 1 to 8; reduced axes may be empty.
    scale, bias : ndarray or None
        Derived shape; None: 1 and 0.
    mean, inv_variance : ndarray
        Derived shape.
    alpha, beta : float
        Finite. With beta 0, `prior` is never read.
    axis : int or sequence of int
        The axes that parameters keep; any subset, see `fold`.
    prior : ndarray, optional
        What y held before; required if beta is not 0.

    Returns
    -------
    ForwardInference
        y.

    Examples
    --------
    >>> x, one = np.float32([[[1, 2, 3]]]), np.ones((1, 1, 1))
    >>> pybnorm.reference.forward_inference_inv_variance(x, one, one, one, one).y
    array([[[1., 2., 3.]]])
    """
    case = _Case(x, axis, may_be_empty=True)
    alpha, beta = _arguments.scalar(alpha, "alpha"), _arguments.scalar(beta, "beta")
    means, inverses = case.parameter("mean", mean), case.parameter("inv_variance", inv_variance)
    return case.normalized(scale, bias, lambda _, i: (_load(means[i]), _load(inverses[i])), alpha, beta, prior)


elemt = forward_inference_inv_variance
"""`forward_inference_inv_variance` by the name that PyTorch and CANN give it in synchronized batch norm."""


def _gradients(
    case: _Case, dy: Array, scale: Array | None, statistics: _Statistics, factors: Sequence[float],
    priors: Sequence[Array | None], *, frozen: bool = False,
) -> Backward:  # fmt: skip
    """Blended gradients. The mean and inverse deviation are the batch's, or constants if `frozen`."""
    names = ("alpha", "beta", "alpha_param", "beta_param")
    alpha, beta, alpha_param, beta_param = map(_arguments.scalar, factors, names)
    walk, dys, scales = case.walk, case.data("dy", dy), case.parameter("scale", scale, 1.0)
    old = case.prior("prior_dx", priors[0], "beta", beta)
    old_parameters = [
        case.prior(name, prior, "beta_param", beta_param, case.parameter)
        for name, prior in zip(("prior_dscale", "prior_dbias"), priors[1:], strict=True)
    ]
    dx, results = case.result(), (np.empty(case.shape), np.empty(case.shape))
    for kept, i in case.tiles():
        with np.errstate(invalid="ignore"):  # inf and signalling NaN in x give NaN
            mean, inverse = statistics(kept, i)
            dbias, moment = walk.reduce(kept, _gradient_terms, (case.x, dys), (mean,), walk.read)
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite inverse gives inf and NaN, as in IEEE 754
            dscale = inverse * moment
            factor = alpha * (_load(scales[i]) * inverse)
            if frozen:
                zero = np.zeros_like(factor)
                walk.write(kept, _affine, (dys,), (zero, factor, zero), beta, old, dx)
            else:
                terms = mean, inverse * (dscale / walk.count), dbias / walk.count, factor
                walk.write(kept, _input_gradient, (dys, case.x), terms, beta, old, dx)
        for result, values, prior in zip(results, (dscale, dbias), old_parameters, strict=True):
            result[i] = _blend(alpha_param, values, beta_param, prior, i)
    return Backward(case.restore(dx), *(result.reshape(case.derived) for result in results))


def _given(case: _Case, epsilon: float, **statistics: Array) -> _Statistics:
    """The statistics of the caller: his mean and variance, by the names of his arguments."""
    (mean_name, mean), (variance_name, variance) = statistics.items()
    epsilon, means = _arguments.epsilon(epsilon), case.parameter(mean_name, mean)
    variances = case.variance(variance_name, variance)
    return lambda _, i: (_load(means[i]), _inverse(_load(variances[i]), epsilon))


def backward_frozen(
    x: Array, dy: Array, *, scale: Array | None, mean: Array, variance: Array, alpha: float = 1.0,
    beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, epsilon: float = 1e-5,
    axis: int | Sequence[int] = 1, prior_dx: Array | None = None, prior_dscale: Array | None = None,
    prior_dbias: Array | None = None,
) -> Backward:  # fmt: skip
    """Gradients of `forward_inference`: the statistics are constants.

    With ``c = 1 / sqrt(variance + epsilon)``: ``dx = dy * scale * c``, ``dscale = c * sum(dy * (x - mean))``,
    ``dbias = sum(dy)`` (DirectML's ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy : ndarray
        One shape, rank 1 to 8.
    scale : ndarray or None
        Derived shape; None: 1.
    mean, variance : ndarray
        Derived shape; no negative variance.
    axis : int or sequence of int
        The axes that parameters keep; any subset, see `fold`.
    alpha, beta, alpha_param, beta_param, epsilon, prior_dx, prior_dscale, prior_dbias
        As for `backward`.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Examples
    --------
    >>> x, dy, one = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]]), np.ones((1, 1, 1))
    >>> found = pybnorm.reference.backward_frozen(x, dy, scale=one, mean=one, variance=one, epsilon=0)
    >>> found.dx, found.dscale.ravel(), found.dbias.ravel()
    (array([[[0., 0., 1.]]]), array([2.]), array([1.]))
    """
    case = _Case(x, axis)
    statistics = _given(case, epsilon, mean=mean, variance=variance)
    factors, priors = (alpha, beta, alpha_param, beta_param), (prior_dx, prior_dscale, prior_dbias)
    return _gradients(case, dy, scale, statistics, factors, priors, frozen=True)


def training_grad(
    x: Array, dy: Array, *, scale: Array | None, mean: Array, variance: Array, alpha: float = 1.0,
    beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0, epsilon: float = 1e-5,
    axis: int | Sequence[int] = 1, prior_dx: Array | None = None, prior_dscale: Array | None = None,
    prior_dbias: Array | None = None,
) -> Backward:  # fmt: skip
    """Gradients of `forward_training` from the batch mean and biased variance.

    With ``c = 1 / sqrt(variance + epsilon)``: ``dbias = sum(dy)``, ``dscale = c * sum(dy * (x - mean))``,
    ``dx = scale * c * (dy - dbias / m - (x - mean) * c * dscale / m)`` (DirectML's
    ``DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy, scale, mean, variance, axis
        As for `backward_frozen`.
    alpha, beta, alpha_param, beta_param, epsilon, prior_dx, prior_dscale, prior_dbias
        As for `backward`.

    Returns
    -------
    Backward
        dx, dscale, dbias.

    Examples
    --------
    >>> x, dy, one = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]]), np.ones((1, 1, 1))
    >>> pybnorm.reference.training_grad(x, dy, scale=one, mean=2 * one, variance=2 / 3 * one, epsilon=0).dx.round(3)
    array([[[ 0.204, -0.408,  0.204]]])
    """
    case = _Case(x, axis)
    statistics = _given(case, epsilon, mean=mean, variance=variance)
    factors, priors = (alpha, beta, alpha_param, beta_param), (prior_dx, prior_dscale, prior_dbias)
    return _gradients(case, dy, scale, statistics, factors, priors)


def backward_reduce(
    *, x: Array, dy: Array, mean: Array, inv_variance: Array | None = None, axis: int | Sequence[int] = 1
) -> BackwardReduce:
    """The sums of backward.

    ``sum_dy = dbias = sum(dy)``, ``sum_dy_xmu = sum(dy * (x - mean))``, ``dscale = sum_dy_xmu * inv_variance``
    (``aclnnBatchNormReduceBackward``), sums where the older CANN golden code averages.

    Parameters
    ----------
    x, dy : ndarray
        One shape, rank 1 to 8; reduced axes may be empty: all sums are 0 then.
    mean : ndarray
        Derived shape.
    inv_variance : ndarray, optional
        Derived shape.
    axis : int or sequence of int
        The axes that are kept; any subset, see `fold`.

    Returns
    -------
    BackwardReduce
        sum_dy, sum_dy_xmu, dscale, dbias.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> found = pybnorm.reference.backward_reduce(x=x, dy=dy, mean=np.full((1, 1, 1), 2.0))
    >>> found.sum_dy.ravel(), found.sum_dy_xmu.ravel()
    (array([1.]), array([1.]))
    """
    case = _Case(x, axis, may_be_empty=True)
    dys, means = case.data("dy", dy), case.parameter("mean", mean)
    inverses = None if inv_variance is None else case.parameter("inv_variance", inv_variance)
    total, moment = np.zeros(case.shape), np.zeros(case.shape)

    def take(walk: _Walk, kept: Index) -> None:
        i = walk.parameter_index(kept)
        total[i], moment[i] = walk.reduce(kept, _gradient_terms, (case.x, dys), (_load(means[i]),), walk.read)

    if not case.empty:
        case.walk.each(take)
    dscale = None if inverses is None else (moment * _load(inverses)).reshape(case.derived)
    total, moment = total.reshape(case.derived), moment.reshape(case.derived)
    return BackwardReduce(total, moment, dscale, total.copy())


def gather_stats(
    means: Array, m2s: Array | None, counts: Sequence[int], *, variances: Array | None = None,
    running_mean: Array | None = None, running_variance: Array | None = None,
    exponential_average_factor: float = 0.1, epsilon: float = 1e-5,
) -> GatherStats:  # fmt: skip
    """Merge the statistics of several batches into those of their union.

    With ``n = sum(counts)``: ``mean = sum(n_k * mean_k) / n``,
    ``variance = (sum(M2_k) + sum(n_k * (mean_k - mean)**2)) / n`` (Chan, Golub & LeVeque 1983 for many parts at once).
    A factor of 1 replaces the running statistics unread.

    Parameters
    ----------
    means : ndarray, shape (R, C)
    m2s : ndarray, shape (R, C), or None
        Sums of squared deviations; None: `variances` is given.
    counts : sequence of R int
        Rows of ranks with 0 are not read.
    variances : ndarray, shape (R, C), optional
        Biased variances instead of `m2s`.
    running_mean, running_variance : ndarray, shape (C,), optional
        Both or neither. They are not written.
    exponential_average_factor, epsilon : float

    Returns
    -------
    GatherStats
        mean, variance, inv_variance, running_mean, running_variance.

    Examples
    --------
    >>> found = pybnorm.reference.gather_stats(np.float32([[1], [4]]), np.float32([[2], [0]]), [2, 1])
    >>> found.mean, found.variance.round(3)
    (array([2.]), array([2.667]))
    """
    _data("means", means)
    means = _plain(means)
    if means.ndim != 2:
        raise ArgumentError("means", f"shape {means.shape}", "two axes: ranks and statistics")
    if (m2s is None) == (variances is None):
        raise ArgumentError("m2s", m2s if m2s is None else "an array beside variances", "one of m2s and variances")
    name, squares = ("m2s", m2s) if variances is None else ("variances", variances)
    _data(name, squares, means.shape)
    factor = _arguments.factor(exponential_average_factor)
    epsilon = _arguments.epsilon(epsilon)
    numbers = np.array(_arguments.counts(counts, means.shape[0]), np.float64)
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    n = float(numbers.sum())
    if has_running and n == 1:
        raise ArgumentError("counts", counts, "a sum above 1 when running statistics are updated")
    present = numbers > 0
    weight = (numbers[present] / n)[:, None]
    rows, parts = means[present].astype(np.float64), np.asarray(squares)[present].astype(np.float64)
    pivot = rows[0]
    mean = pivot + (weight * (rows - pivot)).sum(axis=0)
    within = parts / n if variances is None else weight * parts
    variance = (within + weight * (rows - mean) ** 2).sum(axis=0)
    running: list[Float64Array | None] = [None, None]
    if has_running:
        old = [
            _load(_parameter(n_, a, mean.shape))
            for n_, a in (("running_mean", running_mean), ("running_variance", running_variance))
        ]
        batch = mean, variance * (n / (n - 1))
        running = [b if factor == 1 else factor * b + (1 - factor) * o for b, o in zip(batch, old, strict=True)]
    return GatherStats(mean, variance, _inverse(variance, epsilon), running[0], running[1])


def backward_elemt(
    *, x: Array, dy: Array, scale: Array | None, mean: Array, inv_variance: Array, sum_dy: Array,
    sum_dy_xmu: Array, count: int, alpha: float = 1.0, beta: float = 0.0, axis: int | Sequence[int] = 1,
    prior: Array | None = None,
) -> Array:  # fmt: skip
    """The elementwise half of a synchronized backward.

    ``dx = alpha * scale * inv_variance * (dy - sum_dy / count - (x - mean) * inv_variance**2 * sum_dy_xmu / count)
    + beta * prior`` (PyTorch's ``batch_norm_backward_elemt``).

    Parameters
    ----------
    x, dy : ndarray
        One shape, rank 1 to 8; reduced axes may be empty.
    scale, mean, inv_variance : ndarray
        Derived shape, of all ranks; a scale of None: 1.
    sum_dy, sum_dy_xmu : ndarray
        Derived shape; sums over all ranks.
    count : int
        Elements per statistic of all ranks.
    alpha, beta, axis, prior
        As for `forward_inference_inv_variance`.

    Returns
    -------
    ndarray

    Examples
    --------
    >>> x, dy, one = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]]), np.ones((1, 1, 1))
    >>> pybnorm.reference.backward_elemt(
    ...     x=x, dy=dy, scale=one, mean=2 * one, inv_variance=one, sum_dy=one, sum_dy_xmu=one, count=3
    ... ).round(3)
    array([[[ 0.   , -0.333,  0.333]]])
    """
    case = _Case(x, axis, may_be_empty=True)
    dys = case.data("dy", dy)
    alpha, beta = _arguments.scalar(alpha, "alpha"), _arguments.scalar(beta, "beta")
    count = _arguments.count(count, "count", 1)
    vectors = {"mean": mean, "inv_variance": inv_variance, "sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu}
    checked = [case.parameter(name, vector) for name, vector in vectors.items()]
    checked.append(case.parameter("scale", scale, 1.0))
    old, dx = case.prior("prior", prior, "beta", beta), case.result()
    for kept, i in case.tiles():
        means, inverses, total, moment, scales = (_load(vector[i]) for vector in checked)
        terms = means, inverses * inverses * (moment / count), total / count, alpha * (scales * inverses)
        case.walk.write(kept, _input_gradient, (dys, case.x), terms, beta, old, dx)
    return case.restore(dx)
