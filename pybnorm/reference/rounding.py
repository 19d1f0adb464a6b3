"""Conversion of arrays to float64, and rounding from float64 to any dtype in one step."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentTypeError
from pybnorm.reference.namespaces import Foreign, on_host

Array: TypeAlias = npt.NDArray[Any]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Index: TypeAlias = tuple[slice, ...]
ARRAYS = (np.ndarray, Foreign)
"""What data may be; `Foreign` is not offered to callers, who have arrays."""


def _plain(array: Array) -> Array:
    """The array as a plain ndarray: a subclass may override its attributes."""
    return array if type(array) in (np.ndarray, Foreign) else np.ndarray.view(array, np.ndarray)


def _even(length: int, most: int) -> int:
    return -(-length // -(-length // most))


def _cut(parameter: Float64Array, shape: tuple[int, ...]) -> Float64Array:
    """The part of a spread parameter that fits a block, which may be smaller at the end of an axis."""
    return parameter[tuple(map(slice, shape))]


def _widen(target: Float64Array, part: Array) -> None:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        np.copyto(target, part, casting="unsafe")


def _data_type(array: Array, argument: str) -> DataType:
    return _arguments.data_type(_plain(array).dtype, argument)


def _load(part: Array) -> Float64Array:
    with np.errstate(invalid="ignore"):
        result: Float64Array = on_host(part).astype(np.float64)
    return result


def round_to(values: Float64Array, dtype: npt.DTypeLike) -> Array:
    """Round float64 values to `dtype`, once, to nearest even.

    ml_dtypes rounds float64 to bfloat16 through float32, that is twice. Here the first step rounds to odd (Boldo &
    Melquiond 2008), so that the second one is correct.

    Parameters
    ----------
    values : ndarray of float64
        Any shape.
    dtype : dtype
        float16, bfloat16, float32 or float64.

    Returns
    -------
    ndarray
        A new array of `dtype`; overflow gives inf.

    Examples
    --------
    >>> pybnorm.reference.round_to(np.array([0.1, 1 / 3, 70000.0]), np.float16)
    array([0.1   , 0.3333,    inf], dtype=float16)
    """
    _arguments.instance(values, ARRAYS, "values", "a NumPy array of float64")
    _data_type(values, "values")
    try:
        target = np.dtype(dtype)
    except Exception as error:
        raise ArgumentTypeError("dtype", dtype, "float32, float64, float16 or bfloat16") from error
    if isinstance(values, Foreign):
        return values.astype(target)
    if _arguments.data_type(target) != DataType.BFLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(target)
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float32)
    back = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)  # towards zero; from inf to the largest finite float32
    bits |= back != values  # the last bit says "inexact"; a NaN stays one
    with np.errstate(over="ignore", under="ignore"):
        return narrow.astype(target)
