"""Recipes of the backward pass: gradients, and the two halves of a synchronized backward."""

from __future__ import annotations

from typing import Any

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import capability
from pybnorm.enums import Capability, Layout, Mode, Operation
from pybnorm.errors import ArgumentError
from pybnorm.operations import elementwise, ways
from pybnorm.operations.preparation import alias, operation
from pybnorm.operations.program import Program, _need, _Shape
from pybnorm.operations.views import Axis

_BLENDS = Capability.BLEND_NATIVE | Capability.BLEND_SCRATCH


def _gradients(p: Program, arrays: dict[str, Any], factors: dict[str, float], axis: Axis) -> Any:
    """Check what the backward operations share: the shape, x, dy and what `Program.gradient` writes and blends by."""
    xb = p.data("x", arrays["x"])
    shape = _Shape(xb, axis)
    dyb = p.data("dy", arrays["dy"], xb)
    blend = dict(zip(factors, p.scalars(shape, **factors), strict=True))
    if all(arrays[name] is None for name in ("dx", "dscale", "dbias")):
        raise ArgumentError("dx", None, "an array, or one for dscale or dbias")
    dxb = None if arrays["dx"] is None else p.data("dx", arrays["dx"], xb, output=True)
    if dxb is None:
        blend["beta"] = 0.0  # a scratch dx has no prior
    prior = blend["beta_param"] != 0
    sums = [p.result(name, arrays[name], shape, prior=prior) for name in ("dscale", "dbias")]
    return shape, xb, dyb, (dxb, *sums), blend


@operation("x dy scale dx dscale dbias saved_mean saved_inv_variance")
def backward(
    p: Program, x: Any, dy: Any, scale: Any, dx: Any = None, dscale: Any = None, dbias: Any = None,
    *, alpha: float = 1.0, beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0,
    epsilon: float = 1e-5, saved_mean: Any = None, saved_inv_variance: Any = None, axis: Axis = 1,
    workspace: Any = None,
) -> None:  # fmt: skip
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
        Written. Read only if `beta` is not 0.
    dscale, dbias : array, derived shape, or None
        Written. Read only if `beta_param` is not 0. At least one of the three outputs.
    alpha, beta, alpha_param, beta_param : float
    epsilon : float
        Used only without saved statistics.
    saved_mean, saved_inv_variance : array, derived shape, optional
        Any values; both, or none: taken from x then.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> dx, (scale, dscale, dbias) = np.empty_like(x), np.ones((3, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.backward(handle, x, dy, scale, dx, dscale, dbias, epsilon=0)
    >>> dx.round(3), dscale.ravel().round(3), dbias.ravel()
    (array([[[ 0.204, -0.408,  0.204]]], dtype=float32), array([1.225], dtype=float32), array([1.], dtype=float32))
    """
    arrays = {"x": x, "dy": dy, "dx": dx, "dscale": dscale, "dbias": dbias}
    factors = {"alpha": alpha, "beta": beta, "alpha_param": alpha_param, "beta_param": beta_param}
    shape, xb, dyb, results, blend = _gradients(p, arrays, factors, axis)
    epsilon = _arguments.epsilon(epsilon)
    saved = None
    if _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance):
        centre = p.parameter("saved_mean", saved_mean, shape)
        saved = centre, p.parameter("saved_inv_variance", saved_inv_variance, shape)
    gain = p.parameter("scale", scale, shape, 1.0)
    p.gradient(shape.kept, xb, dyb, gain, *results, **blend, epsilon=epsilon, saved=saved)


@operation("x dy scale mean variance dx dscale dbias")
def backward_frozen(
    p: Program, x: Any, dy: Any,
    *, scale: Any, mean: Any, variance: Any, dx: Any = None, dscale: Any = None, dbias: Any = None,
    alpha: float = 1.0, beta: float = 0.0, alpha_param: float = 1.0, beta_param: float = 0.0,
    epsilon: float = 1e-5, axis: Axis = 1, workspace: Any = None, _frozen: bool = True,
) -> None:  # fmt: skip
    """Gradients of `forward_inference`: the statistics are constants.

    ``dx = dy * scale / sqrt(variance + epsilon)``, ``dscale = sum(dy * (x - mean)) / sqrt(variance + epsilon)``,
    ``dbias = sum(dy)`` (DirectML's ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    mean, variance : array, derived shape
    x, dy, scale, dx, dscale, dbias, alpha, beta, alpha_param, beta_param, epsilon
        As in `backward`.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> dx, (scale, mean, variance, dscale, dbias) = np.empty_like(x), np.ones((5, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.backward_frozen(
    ...         handle, x, dy, scale=scale, mean=mean, variance=variance, dx=dx, dscale=dscale, dbias=dbias, epsilon=0
    ...     )
    >>> dx, dscale.ravel(), dbias.ravel()
    (array([[[0., 0., 1.]]], dtype=float32), array([2.], dtype=float32), array([1.], dtype=float32))
    """
    arrays = {"x": x, "dy": dy, "dx": dx, "dscale": dscale, "dbias": dbias}
    factors = {"alpha": alpha, "beta": beta, "alpha_param": alpha_param, "beta_param": beta_param}
    shape, xb, dyb, results, blend = _gradients(p, arrays, factors, axis)
    epsilon = _arguments.epsilon(epsilon)
    centre, spread = p.parameter("mean", mean, shape), p.parameter("variance", variance, shape)
    gain = p.parameter("scale", scale, shape, 1.0)
    sums = dscale is not None or dbias is not None
    if _frozen and dx is not None and sums and _takes_constants(p, xb):
        p.gradient(shape.kept, xb, dyb, gain, *results, **blend, epsilon=epsilon, running=(centre, spread))
        return
    if _frozen and dx is not None:
        zeros, options = p.constant(0.0, shape), {"alpha": blend["alpha"], "beta": blend["beta"], "epsilon": epsilon}
        p.inference(shape.kept, dyb, gain, zeros, zeros, spread, results[0], **options)
    if _frozen:
        gain, results = p.constant(1.0, shape), (None, *results[1:])
        blend |= {"alpha": 1.0, "beta": 0.0}
    if not _frozen or sums:
        saved = centre, p.inverse(spread, epsilon)
        p.gradient(shape.kept, xb, dyb, gain, *results, **blend, saved=saved)


def _takes_constants(p: Program, x: Buffer) -> bool:
    bits, _ = capability(p.handle.backend, Operation.BACKWARD, Mode.SPATIAL, x.dtype, Layout.CHANNELS_FIRST, 4)
    return bool(bits & Capability.CONSTANTS)


training_grad = alias(
    backward_frozen,
    "training_grad",
    """Gradients of `forward_training` from the batch mean and biased variance that it computed.

    With ``c = 1 / sqrt(variance + epsilon)``: ``dbias = sum(dy)``, ``dscale = c * sum(dy * (x - mean))``,
    ``dx = scale * c * (dy - dbias / m - (x - mean) * c * dscale / m)`` (DirectML's
    ``DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC``), blended as in `backward`.

    Parameters
    ----------
    x, dy, scale, mean, variance, dx, dscale, dbias, alpha, beta, alpha_param, beta_param, epsilon, axis, workspace
        As in `backward_frozen`.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 4]]]), np.float32([[[0, 0, 1]]])
    >>> dx, (scale, mean, variance) = np.empty_like(x), np.float32([1, 7 / 3, 14 / 9]).reshape(3, 1, 1, 1)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.training_grad(handle, x, dy, scale=scale, mean=mean, variance=variance, dx=dx, epsilon=0)
    >>> dx.round(3)
    array([[[ 0.115, -0.172,  0.057]]], dtype=float32)
    """,
    _frozen=False,
)


@operation("x dy mean inv_variance sum_dy sum_dy_xmu dscale dbias")
def backward_reduce(
    p: Program,
    *, x: Any, dy: Any, mean: Any, inv_variance: Any = None, sum_dy: Any = None, sum_dy_xmu: Any = None,
    dscale: Any = None, dbias: Any = None, axis: Axis = 1, workspace: Any = None, _dx: Buffer | None = None,
) -> None:  # fmt: skip
    """The sums of backward, to be joined over ranks before `backward_elemt`.

    ``sum_dy = dbias = sum(dy)``, ``sum_dy_xmu = sum(dy * (x - mean))``, ``dscale = sum_dy_xmu * inv_variance``
    (``aclnnBatchNormReduceBackward``, PyTorch's ``batch_norm_backward_reduce``). The differences are taken before the
    sum, so a mean far from 0 does not cancel. All arguments are given by name: PyTorch has dy before x.

    Parameters
    ----------
    x, dy : array, one shape and dtype
        Rank 1 to 8; axes that are reduced may be empty: all sums are 0 then.
    mean : array, derived shape
        Any; in synchronized batch norm that of all ranks.
    inv_variance : array, derived shape, optional
        Needed for `dscale` only.
    sum_dy, sum_dy_xmu, dscale, dbias : array, derived shape, optional
        Written. Without any nothing is done.

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> mean, sum_dy, sum_dy_xmu = np.full((3, 1, 1, 1), 2, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.backward_reduce(handle, x=x, dy=dy, mean=mean, sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu)
    >>> sum_dy.ravel(), sum_dy_xmu.ravel()
    (array([1.], dtype=float32), array([1.], dtype=float32))
    """
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
    vectors = {"scale": ones, "dscale": moment, "dbias": total, "saved_mean": centre, "saved_inv_variance": ones}
    if not ways.half(p, Operation.BACKWARD, shape.kept, {"x": xb, "dy": dyb, "dx": xb}, vectors, epsilon=0.0):
        p.gradient(shape.kept, xb, dyb, ones, _dx, moment, total, saved=(centre, ones))
    if "dscale" in wanted:
        p.product(moment, _need(inv), wanted["dscale"])
    for other in totals[1:]:
        p.axpby(1.0, total, 0.0, other)


@operation("x dy scale mean inv_variance sum_dy sum_dy_xmu dx")
def backward_elemt(
    p: Program,
    *, x: Any, dy: Any, scale: Any, mean: Any, inv_variance: Any, sum_dy: Any, sum_dy_xmu: Any, count: int, dx: Any,
    alpha: float = 1.0, beta: float = 0.0, axis: Axis = 1, workspace: Any = None,
) -> None:  # fmt: skip
    """The elementwise half of a synchronized backward.

    ``dx = alpha * scale * inv_variance * (dy - sum_dy / count - (x - mean) * inv_variance**2 * sum_dy_xmu / count)
    + beta * dx`` (PyTorch's ``batch_norm_backward_elemt``, ``aclnnBatchNormElemtBackward``). All
    arguments are given by name: PyTorch has dy before x.

    Parameters
    ----------
    x, dy : array, one shape and dtype
        Rank 1 to 8; axes that are reduced may be empty, then nothing is done.
    scale : array, derived shape, or None
        None: 1.
    mean, inv_variance : array, derived shape
        Of all ranks.
    sum_dy, sum_dy_xmu : array, derived shape
        The sums of `backward_reduce`, added up over all ranks. Sums, not averages.
    count : int
        Elements per statistic of all ranks, at least 1.
    dx : array, shape and dtype of x
        Written. Read only if `beta` is not 0.
    alpha, beta : float

    Examples
    --------
    >>> x, dy = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> dx, (one, mean) = np.empty_like(x), np.float32([[[[1]]], [[[2]]]])
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.backward_elemt(
    ...         handle, x=x, dy=dy, scale=one, mean=mean, inv_variance=one, sum_dy=one, sum_dy_xmu=one, count=3, dx=dx
    ...     )
    >>> dx.round(3)
    array([[[ 0.   , -0.333,  0.333]]], dtype=float32)
    """
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb, empty=True)
    dxb = p.data("dx", dx, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    n = _arguments.count(count, "count", 1)
    centre, inv = p.parameter("mean", mean, shape), p.parameter("inv_variance", inv_variance, shape)
    factor = None if scale is None else p.parameter("scale", scale, shape)
    total, moment = p.parameter("sum_dy", sum_dy, shape), p.parameter("sum_dy_xmu", sum_dy_xmu, shape)
    if (alpha, beta) == (1.0, 0.0) and 0 not in xb.dims:
        vectors = {"scale": p.constant(1.0, shape) if factor is None else factor, "dscale": moment, "dbias": total}
        vectors |= {"saved_mean": centre, "saved_inv_variance": inv}
        data = {"x": xb, "dy": dyb, "dx": dxb}
        if ways.half(p, Operation.BACKWARD, shape.kept, data, vectors, share=1 / n, epsilon=0.0):
            return
    gain = inv if factor is None else p.product(factor, inv)
    average = p.vector(shape)
    p.axpby(1.0 / n, total, 0.0, average)
    slope = p.product(p.product(moment, inv), inv)
    slope = p.product(slope, gain, alpha=-1.0 / n)
    ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)
    p.inference(shape.kept, dyb, gain, zeros, average, ones, dxb, alpha=alpha, beta=beta)
    kind = Mode.SPATIAL, xb.dtype, Layout.CHANNELS_FIRST, 4
    bits, _ = capability(p.handle.backend, Operation.FORWARD_INFERENCE, *kind)
    if bits & _BLENDS and not bits & Capability.BLEND_ROUNDS:
        p.inference(shape.kept, xb, slope, zeros, centre, ones, dxb, alpha=alpha, beta=1.0)
        return
    rest = p.scratch_like(dxb)  # MIOpen blends no bfloat16, and float16 with two roundings
    p.inference(shape.kept, xb, slope, zeros, centre, ones, rest, alpha=alpha)
    elementwise.axpby(p, 1.0, rest, 1.0, dxb)
