"""Inputs of a problem: a function of its line and of nothing else.

The generator is counter-based (SplitMix64 over the element's logical index), so a value depends neither on the layout,
nor on how many values were drawn before, nor on the machine or the NumPy version: it is made of 64-bit integer
operations and of IEEE additions, multiplications, divisions and square roots, never of a libm function.

Fills
-----
exact
    Data whose sums have no rounding in any order (Welford's recurrence excepted, which divides by 1 ... m).
    m divisible by 8: x = mu + {0 in m/4, +1/2 in 3m/8, -1/2 in 3m/8}, so that the variance is 3/16 and, with epsilon
    1/16, the inverse standard deviation is exactly 2. Other even m: x = mu +- 1/2, epsilon 3/4. Odd m: one element is
    mu and the rest are mu +- 1/2; the variance is then not dyadic. dy holds integers from -2 to 2, scale is a power of
    two, bias a multiple of 1/4, and (scale, bias) differ from channel to channel, so that a permutation of channels
    shows.
randn
    x = sigma * (z + kappa) per channel, with alternating sign of the offset and sigma in {0.1, 0.5, 3, 8}: never 1,
    where a variance and its inverse look alike.

Both give inference a running variance that is positive and far from 1, and backward saved statistics that every second
channel deviates from x's own, so that a library which recomputes them instead of reading them is found out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm import reference
from pybnorm.check.problem import Problem
from pybnorm.enums import DataType, Mode, Operation

__all__ = ["Inputs", "generate", "normal", "numpy_dtype", "round_to", "splitmix64", "sums_are_exact"]

Array = npt.NDArray[Any]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_EXACT_MEANS = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.0, -2.0])
_EXACT_SCALES = np.array([1.0, -0.5, 2.0, -1.0, 0.25, -2.0, 0.5, -0.25])
_EXACT_VARIANCE_PLUS_EPSILON = np.array([0.25, 4.0, 16.0])
_SIGMAS = np.array([0.5, 3.0, 0.1, 8.0])
_STREAMS = {
    name: i
    for i, name in enumerate(
        ("x", "dy", "scale", "bias", "mean", "variance", "prior", "prior_scale", "prior_bias", "order"), 1
    )
}


def numpy_dtype(dtype: DataType) -> np.dtype[Any]:
    """The NumPy dtype of `dtype`; bfloat16 is ml_dtypes'.

    Raises
    ------
    ImportError
        bfloat16 without the ml_dtypes package.
    """
    if dtype == DataType.BFLOAT16:
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype.name.lower())


def round_to(values: Array, dtype: DataType) -> Array:
    """float64 `values` as stored in `dtype`, rounded once to nearest even."""
    return reference.round_to(values, numpy_dtype(dtype))


# ---------------------------------------------------------------- generator


def splitmix64(seed: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` uniform 64-bit words of stream `stream`: word i depends on (seed, stream, i) alone."""
    start = _mix(_mix(seed + _GOLDEN) ^ (stream * _GOLDEN & _MASK))
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def uniform(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniform in (0, 1): the middle of one of 2**32 cells."""
    return ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


def normal(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Standard normal by inversion: Wichura's PPND7 (Applied Statistics AS 241), good to about 1e-7."""
    q = uniform(words) - 0.5
    r = 0.180625 - q * q
    z = (
        q
        * (((5.9109374720e01 * r + 1.5929113202e02) * r + 5.0434271938e01) * r + 3.3871327179e00)
        / (((6.7187563600e01 * r + 7.8757757664e01) * r + 1.7895169469e01) * r + 1.0)
    )
    tail = np.abs(q) > 0.425
    p = 0.5 - np.abs(q[tail])
    r = np.sqrt(-_log(p))
    near = r <= 5.0
    a, b = r - 1.6, r - 5.0
    z_near = (((1.7023821103e-1 * a + 1.3067284816) * a + 2.7568153900) * a + 1.4234372777) / (
        (1.2021132975e-1 * a + 7.3700164250e-1) * a + 1.0
    )
    z_far = (((1.7337203997e-2 * b + 4.2868294337e-1) * b + 3.0812263860) * b + 6.6579051150) / (
        (1.2258202635e-2 * b + 2.4197894225e-1) * b + 1.0
    )
    z[tail] = np.copysign(np.where(near, z_near, z_far), q[tail])
    return z


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
        series = series * square + 1.0 / k
    return 2.0 * s * series + exponent * 0.6931471805599453


# ---------------------------------------------------------------- inputs


@dataclasses.dataclass
class Inputs:
    """What the call reads, as stored, in logical N, C, spatial order; ``None`` where the operation has no such array.

    ``mean`` and ``variance`` are the estimated statistics of inference and the running statistics before training;
    ``prior`` is y or dx before the call. Where beta is 0 a prior is all NaN, because it must not be read.
    """

    x: Array
    scale: Array
    bias: Array | None = None
    dy: Array | None = None
    mean: Array | None = None
    variance: Array | None = None
    saved_mean: Array | None = None
    saved_inv_variance: Array | None = None
    prior: Array | None = None
    prior_scale: Array | None = None
    prior_bias: Array | None = None

    def need(self, name: str) -> Array:
        """The array of that field, which the operation is known to have."""
        value: Array | None = getattr(self, name)
        assert value is not None, name
        return value

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by field name."""
        items = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in items if value is not None}


def sums_are_exact(problem: Problem) -> bool:
    """Whether every sum of `problem` is free of rounding in the compute type, whatever the order.

    Sums of squares of values up to \\|mu\\| + 1/2 in steps of 1/4 must stay below 2**24 quarters (float32), and epsilon
    must be the fill's own, else the normalized values are not short.
    """
    if problem.fill != "exact" or problem.epsilon != problem.default_epsilon:
        return False
    digits = 53 if problem.dtype == DataType.FLOAT64 else 24
    return 4 * problem.m * (float(np.abs(_EXACT_MEANS).max()) + 0.5) ** 2 < 2.0**digits


def generate(problem: Problem) -> Inputs:
    """The inputs of `problem`.

    Returns
    -------
    Inputs
        Data in the problem's dtype and dims, parameters and statistics in ``parameter_dtype`` and ``parameter_dims``.
    """
    fields = _Exact(problem) if problem.fill == "exact" else _Randn(problem)
    values: dict[str, Array] = {"x": fields.x(), "scale": fields.scale()}
    operation = problem.operation
    beta_prior = {"prior": problem.beta}
    if operation != Operation.BACKWARD:
        values["bias"] = fields.bias()
    if operation == Operation.FORWARD_INFERENCE or (operation == Operation.FORWARD_TRAINING and problem.running):
        values["mean"], values["variance"] = fields.estimates()
    if operation == Operation.BACKWARD:
        values["dy"] = fields.dy()
        beta_prior |= {"prior_scale": problem.beta_param, "prior_bias": problem.beta_param}
        if problem.saved:
            values["saved_mean"], values["saved_inv_variance"] = fields.saved()
    for name, beta in beta_prior.items():
        shape = problem.dims if name == "prior" else problem.parameter_dims
        values[name] = fields.prior(name, shape) if beta else np.full(shape, np.nan)
    data = ("x", "dy", "prior")
    return Inputs(
        **{n: round_to(v, problem.dtype if n in data else problem.parameter_dtype) for n, v in values.items()}
    )


class _Fill:
    """What the fills share; each method returns float64 values in logical order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parameters = problem.parameter_dims
        self.channels = int(np.prod(self.parameters))
        self.index = np.arange(self.channels)

    def words(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        return splitmix64(self.problem.seed, _STREAMS[name], count)

    def cycle(self, values: Array, step: int = 1) -> Array:
        """`values` dealt to the channels in turn, in the shape of a parameter."""
        result: Array = values[(self.index // step) % len(values)].reshape(self.parameters)
        return result


class _Exact(_Fill):
    def _pattern(self) -> tuple[Array, float]:
        """Deviations from the mean of one statistic, and 1/sqrt(variance + default epsilon) where it is dyadic."""
        m = self.problem.m
        if m % 8 == 0:
            return np.repeat([0.0, 0.5, -0.5], [m // 4, 3 * m // 8, 3 * m // 8]), 2.0
        if m % 2 == 0:
            return np.repeat([0.5, -0.5], m // 2), 1.0
        return np.repeat([0.0, 0.5, -0.5], [1, m // 2, m // 2]), 2.0

    def x(self) -> Array:
        problem = self.problem
        keys = self.words("order", self.channels * problem.m).reshape(self.channels, problem.m)
        values = self._pattern()[0][np.argsort(keys, axis=1, kind="stable")]
        values += self.cycle(_EXACT_MEANS).reshape(-1, 1)
        dims = problem.dims
        if problem.mode == Mode.PER_ACTIVATION:
            return np.ascontiguousarray(values.T).reshape(dims)
        return np.ascontiguousarray(np.moveaxis(values.reshape(dims[1], dims[0], *dims[2:]), 0, 1))

    def dy(self) -> Array:
        words = self.words("dy", int(np.prod(self.problem.dims)))
        return ((words >> np.uint64(32)) % np.uint64(5)).astype(np.float64).reshape(self.problem.dims) - 2.0

    def scale(self) -> Array:
        return self.cycle(_EXACT_SCALES)

    def bias(self) -> Array:
        # 33 and the 8 scales are coprime: 264 channels before a pair (scale, bias) repeats. Not larger than 4, lest
        # the rounding of a 16-bit y hide what happens to the normalized value beside it.
        return self.cycle((np.arange(33) * 7 % 33 - 16.0) / 4.0)

    def estimates(self) -> tuple[Array, Array]:
        # variance + epsilon is a power of four, 1/sqrt of it a power of two
        variance = np.maximum(_EXACT_VARIANCE_PLUS_EPSILON - self.problem.epsilon, 0.1875)
        return self.cycle(np.roll(_EXACT_MEANS, 3)), self.cycle(variance)

    def saved(self) -> tuple[Array, Array]:
        inverse = self._pattern()[1]
        return self.cycle(_EXACT_MEANS), self.cycle(np.array([inverse, inverse / 2]))

    def prior(self, name: str, shape: tuple[int, ...]) -> Array:
        words = self.words(name, int(np.prod(shape)))
        return (((words >> np.uint64(32)) % np.uint64(17)).astype(np.float64).reshape(shape) - 8.0) / 4.0


class _Randn(_Fill):
    def _sigma(self) -> Array:
        return self.cycle(_SIGMAS)

    def _offset(self) -> Array:
        """Mean in units of sigma."""
        return self.cycle(np.array([1.0, -1.0]) * self.problem.kappa, step=len(_SIGMAS))

    def _normal(self, name: str, shape: tuple[int, ...]) -> Array:
        return normal(self.words(name, int(np.prod(shape)))).reshape(shape)

    def x(self) -> Array:
        return self._sigma() * (self._normal("x", self.problem.dims) + self._offset())

    def dy(self) -> Array:
        return self._normal("dy", self.problem.dims)

    def scale(self) -> Array:
        words = self.words("scale", self.channels)
        sign = np.where(words & np.uint64(1), 1.0, -1.0)
        return (sign * (0.5 + 1.5 * uniform(words))).reshape(self.parameters)

    def bias(self) -> Array:
        return self._normal("bias", self.parameters)

    def estimates(self) -> tuple[Array, Array]:
        jitter = 0.75 + 0.5 * uniform(self.words("variance", self.channels)).reshape(self.parameters)
        sigma = self._sigma()
        return sigma * (self._offset() + 0.5 * self._normal("mean", self.parameters)), 1.5 * sigma * sigma * jitter

    def saved(self) -> tuple[Array, Array]:
        other = self.cycle(np.array([0.0, 1.0]))
        return self._sigma() * (self._offset() + 0.25 * other), (1.0 - 0.25 * other) / self._sigma()

    def prior(self, name: str, shape: tuple[int, ...]) -> Array:
        return self._normal(name, shape)
