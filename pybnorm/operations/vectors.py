"""Recipes of vectors and of elementwise operations."""

from __future__ import annotations

from typing import Any

from pybnorm import _arguments
from pybnorm.operations import elementwise
from pybnorm.operations.preparation import operation
from pybnorm.operations.program import Program, _parameter_dtype, _Shape


def _vectors(p: Program, first: str, array: Any) -> _Shape:
    """The shape that the first of several vectors sets for all."""
    buffer = p.handle.buffer(array, first)
    return _Shape(buffer, tuple(range(len(buffer.dims))))


@operation("a b out")
def multiply(
    p: Program, a: Any, b: Any, out: Any,
    *, alpha: float = 1.0, beta: float = 0.0, workspace: Any = None,
) -> None:  # fmt: skip
    """``out = alpha * a * b + beta * out`` for vectors of one length.

    Parameters
    ----------
    a, b, out : array
        Contiguous, any rank, one number of elements; float32, float16 or bfloat16 each, or float64 all.
    alpha, beta : float
        With beta 0 the prior `out` is not read.

    Examples
    --------
    >>> a, b, out = np.float32([1, 2, 3]), np.float32([4, 5, 6]), np.empty(3, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.multiply(handle, a, b, out)
    >>> out
    array([ 4., 10., 18.], dtype=float32)
    """
    shape = _vectors(p, "a", a)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    left, right = p.parameter("a", a, shape), p.parameter("b", b, shape)
    p.product(left, right, p.result("out", out, shape, prior=beta != 0), alpha=alpha, beta=beta)


@operation("variance inv_variance")
def inverse_standard_deviation(
    p: Program, variance: Any, inv_variance: Any,
    *, epsilon: float = 1e-5, workspace: Any = None,
) -> None:  # fmt: skip
    """``inv_variance = 1 / sqrt(variance + epsilon)`` for vectors of one length.

    Parameters
    ----------
    variance, inv_variance : array
        As the vectors of `multiply`.
    epsilon : float

    Examples
    --------
    >>> variance, inverse = np.float32([1, 4, 16]), np.empty(3, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.inverse_standard_deviation(handle, variance, inverse, epsilon=0)
    >>> inverse
    array([1.  , 0.5 , 0.25], dtype=float32)
    """
    shape = _vectors(p, "variance", variance)
    spread = p.parameter("variance", variance, shape)
    p.inverse(spread, _arguments.epsilon(epsilon), p.result("inv_variance", inv_variance, shape))


@operation("inv_variance variance")
def variance_from_inverse(
    p: Program, inv_variance: Any, variance: Any,
    *, epsilon: float = 1e-5, workspace: Any = None,
) -> None:  # fmt: skip
    """``variance = 1 / inv_variance**2 - epsilon`` for vectors of one length.

    The difference cancels where epsilon is the larger part: take the variance from `stats` where it can be had.

    Parameters
    ----------
    inv_variance, variance : array
        As the vectors of `multiply`.
    epsilon : float

    Examples
    --------
    >>> inverse, variance = np.float32([1, 0.5, 0.25]), np.empty(3, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.variance_from_inverse(handle, inverse, variance, epsilon=0)
    >>> variance
    array([ 1.,  4., 16.], dtype=float32)
    """
    shape = _vectors(p, "inv_variance", inv_variance)
    inv, target = p.parameter("inv_variance", inv_variance, shape), p.result("variance", variance, shape)
    deviation = p.inverse(p.product(inv, inv), 0.0)
    zeros, ones = p.constant(0.0, shape), p.constant(1.0, shape)
    shift = p.constant(-_arguments.epsilon(epsilon), shape)
    p.inference((0,), deviation, deviation, shift, zeros, ones, target)


@operation("source target")
def convert(p: Program, source: Any, target: Any, *, workspace: Any = None) -> None:
    """Copy a vector, changing its dtype between float32, float16 and bfloat16.

    Parameters
    ----------
    source, target : array
        As the vectors of `multiply`.

    Examples
    --------
    >>> source, target = np.float32([1, 0.1, 70000]), np.empty(3, np.float16)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.convert(handle, source, target)
    >>> target
    array([1. , 0.1, inf], dtype=float16)
    """
    shape = _vectors(p, "source", source)
    value, result = p.flat("source", source, shape.derived), p.flat("target", target, shape.derived, True)
    _parameter_dtype("target", result.dtype, shape.dtype)
    if value.dtype == result.dtype:
        p.axpby(1.0, value, 0.0, result)
    elif result.dtype == shape.dtype:
        p.widen(value, result)
    else:
        p.narrow(value if value.dtype == shape.dtype else p.widen(value), result)


@operation("x y")
def axpby(p: Program, a: float, x: Any, b: float, y: Any, *, workspace: Any = None) -> None:
    """``y = a * x + b * y`` elementwise; with ``b = 0`` the prior y is not read.

    MIOpen only copies bfloat16; other factors are those of float32 copies, rounded once.

    Parameters
    ----------
    a, b : float
    x, y : array, one shape and dtype
        Rank 1 to 8, any strides.

    Examples
    --------
    >>> x, y = np.float32([1, 2, 3]), np.float32([10, 10, 10])
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.axpby(handle, 2, x, 0.5, y)
    >>> y
    array([ 7.,  9., 11.], dtype=float32)
    """
    xb = p.data("x", x)
    yb = p.data("y", y, xb, output=True)
    a, b = _arguments.scalar(a, "a", xb.dtype), _arguments.scalar(b, "b", xb.dtype)
    elementwise.axpby(p, a, xb, b, yb)


@operation("y")
def fill(p: Program, value: float, y: Any, *, workspace: Any = None) -> None:
    """``y = value`` everywhere.

    Parameters
    ----------
    value : float
    y : array
        Rank 1 to 8, any strides.

    Examples
    --------
    >>> y = np.empty((2, 2), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.fill(handle, 0.5, y)
    >>> y
    array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    yb = p.data("y", y, output=True)
    p.fill(_arguments.fill(value, yb), yb)


@operation("x y")
def relu(p: Program, x: Any, y: Any, *, workspace: Any = None) -> None:
    """``y = max(x, 0)`` elementwise. What a NaN and minus infinity become is the vendor's: see `Handle.relu`.

    Parameters
    ----------
    x, y : array, one shape and dtype
        Rank 1 to 8, any strides. y is written and shares no memory with x.

    Examples
    --------
    >>> x, y = np.float32([-1, 0, 2]), np.empty(3, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.relu(handle, x, y)
    >>> y
    array([0., 0., 2.], dtype=float32)
    """
    xb = p.data("x", x)
    elementwise.relu(p, xb, p.data("y", y, xb, output=True))


@operation("x dy dx")
def relu_backward(p: Program, x: Any, dy: Any, dx: Any, *, workspace: Any = None) -> None:
    """``dx = dy where x > 0, else 0`` elementwise.

    Parameters
    ----------
    x, dy, dx : array, one shape and dtype
        Rank 1 to 8, any strides. x is the input of `relu`, or its output. dx is written and shares no memory with
        the others.

    Examples
    --------
    >>> x, dy, dx = np.float32([-1, 0, 2]), np.float32([5, 6, 7]), np.empty(3, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.operations.relu_backward(handle, x, dy, dx)
    >>> dx
    array([0., 0., 7.], dtype=float32)
    """
    xb = p.data("x", x)
    elementwise.relu_backward(p, xb, p.data("dy", dy, xb), p.data("dx", dx, xb, output=True))
