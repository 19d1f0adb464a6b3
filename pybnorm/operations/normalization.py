"""Recipes of the forward pass: statistics, normalization, statistics of several batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import capability
from pybnorm.enums import Capability, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.operations import ways
from pybnorm.operations.preparation import alias, operation
from pybnorm.operations.program import Program, _need, _Shape
from pybnorm.operations.views import Axis, _row, _rows


@operation("x mean variance inv_variance")
def stats(
    p: Program, x: Any,
    *, mean: Any = None, variance: Any = None, inv_variance: Any = None, epsilon: float = 1e-5, axis: Axis = 1,
    workspace: Any = None, _sample: Buffer | None = None, _y: Buffer | None = None,
) -> None:  # fmt: skip
    """Mean, biased variance and inverse standard deviation of the batch.

    ``mean = sum(x) / m``, ``variance = sum((x - mean)**2) / m``, ``inv_variance = 1 / sqrt(variance + epsilon)``
    (Ioffe & Szegedy 2015, algorithm 1; PyTorch's ``batch_norm_stats``, ``aclnnBatchNormStats``).

    Parameters
    ----------
    x : array
        Rank 1 to 8.
    mean, variance, inv_variance : array, derived shape, optional
        Written; at least one.
    epsilon : float

    Examples
    --------
    >>> x, (mean, variance) = np.float32([[[1, 2, 3]]]), np.empty((2, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.stats(handle, x, mean=mean, variance=variance)
    >>> mean.ravel(), variance.ravel().round(3)
    (array([2.], dtype=float32), array([0.667], dtype=float32))
    """
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    epsilon = _arguments.epsilon(epsilon)
    if mean is None and variance is None and inv_variance is None:
        raise ArgumentError("mean", None, "an array, or one for variance or inv_variance")
    saved = p.result("mean", mean, shape), p.result("inv_variance", inv_variance, shape)
    target = None if variance is None else p.result("variance", variance, shape)
    running = None
    if target is not None and shape.m > 1:
        running = (saved[0], target) if _sample else (p.vector(shape), p.vector(shape))
    ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)
    written = (p.vector(shape), saved[1]) if running is not None and _sample else saved
    vectors = {"scale": ones, "bias": zeros, "saved_mean": written[0], "saved_inv_variance": written[1]}
    if running is not None:
        vectors |= {"running_mean": running[0], "running_variance": running[1]}
    options = {"epsilon": epsilon, "exponential_average_factor": 1.0}
    if not ways.half(p, Operation.FORWARD_TRAINING, shape.kept, {"x": xb, "y": xb}, vectors, **options):
        priors = () if running is None else running if _sample is None else (_sample,)
        for prior in priors:  # they are read, and 0 times what is in memory may be NaN
            p.fill(0.0, prior)
        p.training(shape.kept, xb, ones, zeros, _y, **options, running=running, saved=written)
    if running is not None and _sample:
        return
    if running is not None:
        p.axpby((shape.m - 1) / shape.m, running[1], 0.0, _need(target))
    elif target is not None:
        p.product(saved[0], zeros, target)  # 0, and NaN where the one element is not finite


@operation("x scale bias y running_mean running_variance saved_mean saved_inv_variance")
def forward_training(
    p: Program, x: Any, scale: Any, bias: Any, y: Any,
    *, alpha: float = 1.0, beta: float = 0.0, epsilon: float = 1e-5, exponential_average_factor: float = 0.1,
    unbiased: bool = True, running_mean: Any = None, running_variance: Any = None, saved_mean: Any = None,
    saved_inv_variance: Any = None, axis: Axis = 1, workspace: Any = None,
) -> None:  # fmt: skip
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
    unbiased : bool
        False: the running variance takes the biased variance too, as ONNX and TensorFlow do.
    running_mean, running_variance : array, derived shape, optional
        Updated in place; both or none; needs m > 1.
    saved_mean, saved_inv_variance : array, derived shape, optional
        Written; both or none.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3]], [[4, 6, 8]]])
    >>> y, (scale, bias) = np.empty_like(x), np.ones((2, 2, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.forward_training(handle, x, scale, bias, y, axis=0, epsilon=0)
    >>> y.round(3).reshape(2, 3)
    array([[-0.225,  1.   ,  2.225],
           [-0.225,  1.   ,  2.225]], dtype=float32)
    """
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    epsilon = _arguments.epsilon(epsilon)
    factor, unbiased = _arguments.factor(exponential_average_factor), _arguments.boolean(unbiased, "unbiased")
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    if has_running and shape.m == 1:
        allowed = "at least two elements per statistic when running statistics are updated"
        raise ArgumentError("x", f"dims {xb.dims} with axis {axis}", allowed)
    running = kept = saved = None
    if has_running:
        mean = p.result("running_mean", running_mean, shape, prior=True)
        kept = p.result("running_variance", running_variance, shape, prior=True)
        running = mean, kept
        if unbiased or factor == 0:
            kept = None
        else:
            running = mean, p.vector(shape)
            if factor != 1:
                p.axpby(1.0, kept, 0.0, running[1])
    if has_saved:
        saved = p.result("saved_mean", saved_mean, shape), p.result("saved_inv_variance", saved_inv_variance, shape)
    gain, offset = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
    options = {"alpha": alpha, "beta": beta, "epsilon": epsilon, "exponential_average_factor": factor}
    p.training(shape.kept, xb, gain, offset, yb, **options, running=running, saved=saved)
    if kept is not None and running is not None:  # what the library added to the copy is m / (m - 1) too large
        p.axpby((shape.m - 1) / shape.m, running[1], (1 - factor) / shape.m, kept)


@operation("x scale bias running_mean running_variance y")
def forward_inference(
    p: Program, x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any, y: Any,
    *, alpha: float = 1.0, beta: float = 0.0, epsilon: float = 1e-5, axis: Axis = 1, workspace: Any = None,
) -> None:  # fmt: skip
    """Normalize by the running mean and variance.

    ``y = alpha * (scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * y``
    (``cudnnBatchNormalizationForwardInference``, hipDNN's ``batchnorm_inference_variance_ext``).

    Parameters
    ----------
    x : array
        Rank 1 to 8; axes that are reduced may be empty, then nothing is done.
    running_mean, running_variance : array, derived shape
        A variance, not an inverse standard deviation.
    scale, bias, y, alpha, beta, epsilon
        As in `forward_training`.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3]]])
    >>> y, (scale, bias, mean, variance) = np.empty_like(x), np.ones((4, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.forward_inference(handle, x, scale, bias, mean, variance, y, epsilon=0)
    >>> y
    array([[[1., 2., 3.]]], dtype=float32)
    """
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    epsilon = _arguments.epsilon(epsilon)
    scale, bias = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
    mean = p.parameter("running_mean", running_mean, shape)
    variance = p.parameter("running_variance", running_variance, shape)
    p.inference(shape.kept, xb, scale, bias, mean, variance, yb, alpha=alpha, beta=beta, epsilon=epsilon)


@operation("x scale bias mean inv_variance y")
def forward_inference_inv_variance(
    p: Program, x: Any, scale: Any, bias: Any, mean: Any, inv_variance: Any, y: Any,
    *, alpha: float = 1.0, beta: float = 0.0, axis: Axis = 1, workspace: Any = None,
) -> None:  # fmt: skip
    """Normalize by a given mean and inverse standard deviation.

    ``y = alpha * (scale * inv_variance * (x - mean) + bias) + beta * y`` (hipDNN's ``batchnorm_inference``,
    ``miopenBatchNormForwardInferenceInvVariance``).

    Parameters
    ----------
    mean, inv_variance : array, derived shape
        `inv_variance` is 1 / sqrt(variance + epsilon).
    x, scale, bias, y, alpha, beta
        As in `forward_inference`.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3]]])
    >>> y, (scale, bias, mean, inv_variance) = np.empty_like(x), np.ones((4, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.forward_inference_inv_variance(handle, x, scale, bias, mean, inv_variance, y)
    >>> y
    array([[[1., 2., 3.]]], dtype=float32)
    """
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    gain = p.parameter("inv_variance", inv_variance, shape)
    bits, _ = capability(
        p.handle.backend, Operation.FORWARD_INFERENCE, Mode.SPATIAL, xb.dtype, Layout.CHANNELS_FIRST, 4
    )
    if bits & Capability.INVERSE:
        factor, offset = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
        centre = p.parameter("mean", mean, shape)
        p.inference(shape.kept, xb, factor, offset, centre, gain, yb, alpha=alpha, beta=beta, inverse=True)
        return
    if scale is not None:
        gain = p.product(p.parameter("scale", scale, shape), gain)
    offset, centre = p.parameter("bias", bias, shape, 0.0), p.parameter("mean", mean, shape)
    p.inference(shape.kept, xb, gain, offset, centre, p.constant(1.0, shape), yb, alpha=alpha, beta=beta)


elemt = alias(
    forward_inference_inv_variance,
    "elemt",
    """The elementwise half of a synchronized forward: `forward_inference_inv_variance` by its other name.

    ``y = alpha * (scale * inv_variance * (x - mean) + bias) + beta * y`` (PyTorch's ``batch_norm_elemt``,
    ``aclnnBatchNormElemt``).

    Parameters
    ----------
    x, scale, bias, mean, inv_variance, y, alpha, beta, axis, workspace
        As in `forward_inference_inv_variance`.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3]]])
    >>> y, (scale, bias, mean, inv_variance) = np.empty_like(x), np.full((4, 1, 1, 1), 2, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.elemt(handle, x, scale, bias, mean, inv_variance, y)
    >>> y
    array([[[-2.,  2.,  6.]]], dtype=float32)
    """,
)


def _runs(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, row after the last, count) of neighbouring rows with the same count; none of 0."""
    runs: list[tuple[int, int, int]] = []
    for row, count in enumerate(counts):
        if count and runs and runs[-1][1:] == (row, count):
            runs[-1] = (runs[-1][0], row + 1, count)
        elif count:
            runs.append((row, row + 1, count))
    return runs


@operation("means m2s variances mean variance inv_variance running_mean running_variance")
def gather_stats(
    p: Program, means: Any, m2s: Any, counts: Sequence[int],
    *, variances: Any = None, mean: Any = None, variance: Any = None, inv_variance: Any = None,
    running_mean: Any = None, running_variance: Any = None, exponential_average_factor: float = 0.1,
    unbiased: bool = True, epsilon: float = 1e-5, workspace: Any = None, _sample: bool = False,
) -> None:  # fmt: skip
    """Merge the statistics of several batches into those of their union.

    With ``n = sum(counts)``: ``mean = sum(n_k * mean_k) / n``,
    ``variance = (sum(M2_k) + sum(n_k * (mean_k - mean)**2)) / n``, ``inv_variance = 1 / sqrt(variance + epsilon)``;
    ``running = (1 - factor) * running + factor * batch`` with the variance times n / (n - 1) (Chan, Golub & LeVeque
    1983 for many parts at once; PyTorch's ``batch_norm_gather_stats_with_counts``). Rows are added in their order or as
    the vendor reduces, which is the same on every rank of one library.

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
    unbiased : bool
        False: the running variance takes the variance as it is.
    exponential_average_factor, epsilon : float

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        No count is above 0; both or none of `m2s` and `variances`; no output.

    Examples
    --------
    >>> means, m2s = np.float32([[1], [4]]), np.float32([[2], [0]])
    >>> mean, variance = np.empty((2, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.gather_stats(handle, means, m2s, [2, 1], mean=mean, variance=variance)
    >>> mean, variance.round(3)
    (array([2.], dtype=float32), array([2.667], dtype=float32))
    """
    rows = p.data("means", means)
    if len(rows.dims) != 2:
        raise ArgumentError("means", f"dims {rows.dims}", "two axes: ranks and statistics")
    if rows.dtype not in (DataType.FLOAT32, DataType.FLOAT64):
        raise ArgumentTypeError("means", f"dtype {rows.dtype.short}", "f32 or f64")
    if (m2s is None) == (variances is None):
        given = "None" if m2s is None else "an array beside variances"
        raise ArgumentError("m2s", given, "one of m2s and variances")
    squares = p.data(*(("m2s", m2s) if variances is None else ("variances", variances)), rows, "means")
    numbers = _arguments.counts(counts, rows.dims[0])
    n = sum(numbers)
    factor, epsilon = _arguments.factor(exponential_average_factor), _arguments.epsilon(epsilon)
    unbiased = _arguments.boolean(unbiased, "unbiased")
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
    within = [1.0 / n if variances is None else (count - _sample) / n for _, _, count in runs]
    shares = [count / n for _, _, count in runs]
    even = length == rows.dims[0] and len(runs) == 1  # one weight: of the sums, not of the rows
    if even and length > 1 and (unbiased or running is None) and ways.merge(
        p, rows, squares, (centre, spread, inverse), running or (), within=within[0], n=n,
        epsilon=epsilon, exponential_average_factor=factor,
    ):  # fmt: skip
        return
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

        present = rows if length == rows.dims[0] else weighted(rows, [1.0] * len(runs), True)
        unused, total = p.vector(shape), p.vector(shape)
        shared = rows if even else weighted(rows, shares, True)
        weight = shares[0] if even else 1.0
        p.gradient((1,), shared, shared, ones, None, unused, centre, alpha_param=weight, saved=(zeros, ones))
        apart = p.scratch(present.dims, rows.dtype)
        p.inference((1,), present, ones, zeros, centre, ones, apart)
        between = apart if even else weighted(apart, shares, False)
        p.gradient((1,), present, between, ones, None, spread, unused, saved=(centre, ones))
        inside = squares if even else weighted(squares, within, True)
        p.gradient((1,), inside, inside, ones, None, unused, total, saved=(zeros, ones))
        p.axpby(within[0] if even else 1.0, total, weight, spread)
    if inverse is not None:
        p.inverse(spread, epsilon, inverse)
    if running is not None:
        p.axpby(factor, centre, 1.0 - factor, running[0])
        p.axpby(factor * (n / (n - 1) if unbiased else 1.0), spread, 1.0 - factor, running[1])
