"""The generator of data: 64-bit words by number, and normal values and orders of them, the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pybnorm.reference.namespaces import Foreign, Namespace

CHUNK = 1 << 15
"""Elements made at a time: what NumPy costs per call hardly counts, and float64 scratch fits a core's cache."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_RADIX = 1 << 11


def splitmix64(
    seed: int, stream: int, count: int, first: int = 0, judge: Namespace | None = None
) -> npt.NDArray[np.uint64]:
    """`count` uniform 64-bit words of `stream`, from the one numbered `first`: each depends on its number alone."""
    if judge is not None:
        return words_at(seed, stream, judge.arange(first, first + count, np.uint64))
    stop = first + count
    parts = (np.arange(i, min(i + CHUNK, stop), dtype=np.uint64) for i in range(first, stop, CHUNK))
    return np.concatenate([words_at(seed, stream, part) for part in parts])


def words_at(seed: int, stream: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The words of `stream` that have these numbers."""
    start = _mix(_mix(seed + _GOLDEN) ^ (stream * _GOLDEN & _MASK))
    z = index + np.uint64(1)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(start)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform in (0, 1): the middle of one of 2**32 cells."""
    values = (words >> np.uint64(32)).astype(np.float64)
    values += 0.5
    values *= 2.0**-32
    return values


def normal(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Standard normal by inversion: Wichura's PPND7 (Applied Statistics AS 241), good to about 1e-7."""
    q = uniform(words)
    q -= 0.5
    r = q * q
    r *= -1.0
    r += 0.180625
    z = _polynomial(r, 5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00)
    z *= q
    z /= _polynomial(r, 6.7187563600e01, 7.8757757664e01, 1.7895169469e01, 1.0)
    tail = np.abs(q) > 0.425
    p = 0.5 - np.abs(q[tail])
    r = np.sqrt(-_log(p))  # at most 4.8: no word is nearer to 0 or 1
    r -= 1.6
    far = _polynomial(r, 1.7023821103e-1, 1.3067284816, 2.7568153900, 1.4234372777)
    far /= _polynomial(r, 1.2021132975e-1, 7.3700164250e-1, 1.0)
    z[tail] = np.copysign(far, q[tail])
    return z


def _polynomial(values: npt.NDArray[np.float64], *coefficients: float) -> npt.NDArray[np.float64]:
    """Horner's rule, the coefficient of the highest power first."""
    first, second, *others = coefficients
    result = values * first
    result += second
    for coefficient in others:
        result *= values
        result += coefficient
    return result


def _log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Natural logarithm from exact operations only: libm's differ in the last bit between machines."""
    mantissa, exponent = np.frexp(values)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    exponent = exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.zeros_like(s)
    for k in range(17, 0, -2):
        series *= square
        series += 1.0 / k
    return 2.0 * s * series + exponent * 0.6931471805599453


def order(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """The stable order of each row's keys, of long rows by two radix sorts of 16 bits each."""
    if isinstance(keys, Foreign):
        return keys.order()
    if keys.shape[1] < _RADIX:
        return np.argsort(keys, axis=1, kind="stable")
    order = np.empty(keys.shape, np.intp)
    for row, into in zip(keys, order, strict=True):
        top = (row >> np.uint64(32)).astype(np.uint32)
        first = np.argsort(top.astype(np.uint16), kind="stable")
        into[:] = first[np.argsort((top >> np.uint32(16)).astype(np.uint16)[first], kind="stable")]
        ordered = top[into]
        equal = np.flatnonzero(ordered[1:] == ordered[:-1])  # in those bits: next to none
        while (wrong := equal[row[into[equal]] > row[into[equal + 1]]]).size:
            wrong = wrong[wrong % 2 == wrong[0] % 2]  # no element in two of the swaps
            into[wrong], into[wrong + 1] = into[wrong + 1], into[wrong]
    return order
