"""Fills: how data are made, by the word that a line names.

exact
    Data whose sums have no rounding in any order (Welford's recurrence excepted, which divides by 1 ... m).
    m divisible by 8: x = mu + {0 in m/4, +1/2 in 3m/8, -1/2 in 3m/8}, so that the variance is 3/16 and, with epsilon
    1/16, the inverse standard deviation is exactly 2. Other even m: x = mu +- 1/2, epsilon 3/4. Odd m: one element is
    mu and the rest are mu +- 1/2; the variance is then not dyadic. Of sync_train each rank's share is such data, with
    means that lie apart where mu is not 0: the sums of a rank, too, have no rounding, and nor has its mean. dy holds
    integers from -2 to 2, scale is a power of two, bias a multiple of 1/4, and (scale, bias) differ from channel to
    channel, so that a permutation of channels shows.
paired
    Exact sums too, with as many distinct values as they leave room for (the idea is oneDNN's benchdnn's): neighbours
    are mu + d and mu - d, so the mean is exact, d is an integer from A/2 to A times a power of two and differs from
    pair to pair. Epsilon is 1/16; the rest is as for exact.
randn
    x = sigma * (z + kappa) per channel, with alternating sign of the offset and sigma in {0.1, 0.5, 3, 8}: never 1,
    where a variance and its inverse look alike. dy = z + min(kappa, 1/2) with the same signs.
sqrteps
    randn with sigma = sqrt(epsilon) in every channel: epsilon left out, clamped, or outside the root shows.
ramp
    Every element differs from its neighbours by place, not by chance: multiples of a golden-section step modulo a prime
    that the dtype can hold exactly (8388593; 2039 in float16 and 251 in bfloat16, for tensors of so many elements).
    Within that many elements no channel has a value twice; larger tensors are rounded to the dtype, because few values
    over and over make roundings of one sign. Scale, bias, mean and deviation differ from channel to channel. An index
    error, or a layout taken for another, moves most results by a good part of a deviation.
constant
    Every second statistic but the last is of equal elements: magnitude, 0, magnitude/128 in turn. Its variance is 0,
    what it is in the saved and running statistics as well; the others are randn.
range
    x reaches to +-magnitude: on both sides of zero, far on one side of it, far on the other, and within 1/64 of it, in
    turn. In backward scale is of the deviation's size, so that dx stays in range.
special
    randn with one NaN or infinity in one statistic, the middle one; the others must not notice. seed mod 3 says which
    (0 NaN, 1 +inf, 2 -inf), seed div 3 where: in turn x, (backward) dy, scale, (else) bias, and what there is of given
    mean and variance or 1/sigma.
relu
    What a ReLU leaves: sigma * max(z, 0), dy = max(z, 0). Half of the elements are 0; the sums have one sign, so that
    rounding errors of one sign add up.
image
    An image of 8 bits on a plain ground: the first half of each statistic's elements in logical order are 0.9, the
    others k/255 with k from 0 to 255; sums have one sign.
sparse
    One element in 16 is not 0, and one in 1024 is an outlier 16 times as large.
level
    Every second statistic but the last is of equal elements that no binary fraction is: 1, -0.3 and 0.7 times
    magnitude in turn, which is 0.1 by default. The sums of constant have no rounding; these have one of the same sign
    at every step.
file
    Tensors of a NumPy archive (`read`).

Options: ``scale=zero`` makes every second scale but the last 0; ``scale=small`` makes these and their biases 1e-7 and
1e-30 times as large in turn; ``sign=negative`` gives every second saved 1/sigma
the other sign; ``old=nan`` leaves running statistics NaN.

With an activation the bias is a small part of the scale and inference's mean is near that of x, so that about
half of the values pass and none is at the limit 0 by design.

All give inference a running variance that is far from 1 (not negative, and 0 beside a constant statistic only), and
backward saved statistics that every second channel deviates from x's own (constant ones excepted), so that a library
which recomputes them instead of reading them is found out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pybnorm import reference
from pybnorm._arrays import numpy_dtype
from pybnorm.check.language import generator
from pybnorm.check.language.generator import CHUNK, normal, splitmix64, uniform
from pybnorm.check.language.problem import Problem
from pybnorm.devices._copying import aligned_bytes
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.reference import namespaces
from pybnorm.reference.namespaces import Array, Namespace
from pybnorm.reference.threads import LARGE, in_threads

GUARD = 256
"""Bytes on each side of an array of a call; a multiple of every alignment that a library assumes of an allocation."""
_EXACT_MEANS = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.0, -2.0])
_EXACT_MEANS_LONG = np.array([0.0, 0.5, -1.0, 0.0, 1.0, -0.5, 0.0, 1.5])
_LONG = 1 << 14
_APART = np.array([0.0, 0.5, -0.5])
_EXACT_SCALES = np.array([1.0, -0.5, 2.0, -1.0, 0.25, -2.0, 0.5, -0.25])
_EXACT_VARIANCE_PLUS_EPSILON = np.array([0.25, 4.0, 16.0])
_SIGMAS = np.array([0.5, 3.0, 0.1, 8.0])
_CONSTANTS = np.array([1.0, 0.0, 1 / 128])
_RANGE_CENTRES = np.array([0.0, 0.75, -0.75, 0.0])
_RANGE_HALVES = np.array([1.0, 0.25, 0.25, 1 / 64])
_GOLDEN_SECTION = 0.6180339887498949
_PLASTIC = 0.7548776662466927  # 1 / the plastic number; it and its square are the golden section of two dimensions
_RANGE_DEVIATION = 0.7637626158259734  # of +-(1/2 ... 1)
_UNIFORM_DEVIATION = 0.57735026918962576  # of the uniform distribution on (-1, 1)
_RAMP_PRIMES = {DataType.FLOAT16: 2039, DataType.BFLOAT16: 251}
_RAMP_PRIME = 8388593
_SPECIAL = (np.nan, np.inf, -np.inf)
_RELU_MEAN = 0.3989422804014327  # of max(z, 0), and its deviation
_RELU_DEVIATION = 0.5837967186270446
_VARIANCE_MAX = {DataType.FLOAT64: 2.0**1000, DataType.FLOAT16: 2.0**12}
_STREAM_NAMES = "x dy scale bias mean variance prior prior_scale prior_bias order special z m2s"
STREAMS = {name: i for i, name in enumerate(_STREAM_NAMES.split(), 1)}


def round_to(values: Array, dtype: DataType) -> Array:
    """float64 `values` as stored in `dtype`, rounded once to nearest even."""
    return reference.round_to(values, numpy_dtype(dtype))


def exact_means(problem: Problem) -> Array:
    """Means of the exact fill, dealt to the channels in turn: of long sums as large as leaves them exact.

    Of long sums three in eight are 0: Welford's recurrence rounds least there.
    """
    if problem.m < _LONG:
        return _EXACT_MEANS
    digits = 53 if problem.dtype == DataType.FLOAT64 else 24
    fit = problem.m * (2 * (np.abs(_EXACT_MEANS_LONG) + reach(problem))) ** 2 < 2.0**digits
    return _EXACT_MEANS_LONG[fit] if fit.any() else _EXACT_MEANS_LONG[:1]


def reach(problem: Problem) -> float:
    """Say how far an element of the exact fill may be from its channel's mean."""
    return 1.0 if problem.composed == "sync_train" else 0.5


def paired_size(problem: Problem) -> int:
    """Largest \\|x\\| of the paired fill in units, a power of two from 2 to 2048; half of it is the mean's share."""
    digits = {DataType.FLOAT64: 53}.get(problem.dtype, 24)
    stored = {DataType.FLOAT16: 11, DataType.BFLOAT16: 8}.get(problem.dtype, 11)
    bits = stored
    while bits > 1 and problem.m << 2 * bits >= 1 << digits:
        bits -= 1
    return 1 << bits


class Chunk:
    """A run of elements of one array: their places in logical order and the generator's words for them."""

    def __init__(self, problem: Problem, name: str, first: int, count: int, judge: Namespace | None = None) -> None:
        self.problem, self.name, self.first, self.count, self.judge = problem, name, first, count, judge

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """One word per element."""
        return splitmix64(self.problem.seed, STREAMS[self.name], self.count, self.first, self.judge)

    @property
    def place(self) -> npt.NDArray[np.int64]:
        """Logical index of each element."""
        if self.judge is not None:
            return self.judge.arange(self.first, self.first + self.count, np.int64)
        return np.arange(self.first, self.first + self.count, dtype=np.int64)

    @functools.cached_property
    def channel(self) -> npt.NDArray[np.int64]:
        """Index of each element's statistic."""
        if self.judge is not None or self._inner == 1:
            return self.place // self._inner % self._channels
        first, stop, inner = self.first, self.first + self.count, self._inner
        runs = np.arange(first // inner, (stop - 1) // inner + 1)  # a division by element takes long
        lengths = np.minimum((runs + 1) * inner, stop) - np.maximum(runs * inner, first)
        return np.repeat(runs % self._channels, lengths)

    def of(self, parameter: Array) -> Array:
        """The value of each element's statistic, of all of them in a parameter's shape."""
        return np.take(parameter, self.channel)

    @property
    def rank(self) -> npt.NDArray[np.int64]:
        """Index of each element among those of its statistic, in logical order."""
        place = self.place
        return place // (self._inner * self._channels) * self._inner + place % self._inner

    def locate(self, channel: int, rank: int) -> int:
        """Logical index of the element that has this `channel` and `rank`."""
        inner = self._inner
        return (rank // inner * self._channels + channel) * inner + rank % inner

    @property
    def _channels(self) -> int:
        return int(np.prod(self.problem.parameter_dims))

    @property
    def _inner(self) -> int:
        """Neighbours in logical order that share a statistic."""
        return 1 if self.problem.mode == Mode.PER_ACTIVATION else self.problem.m // self.problem.dims[0]


class _Fill:
    """The base of all fills. Methods return float64 values, of a chunk or of all statistics in a parameter's shape."""

    judge: Namespace | None = None
    """The namespace that makes the data; None: NumPy."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.parameters = problem.parameter_dims
        self.channels = int(np.prod(self.parameters))
        self.index = np.arange(self.channels)

    def data(self, name: str) -> Array:
        """The array x, dy or prior as stored."""
        values = getattr(self, "prior" if name == "z" else name)
        result = self.empty()
        flat = result.reshape(-1)
        step = CHUNK if self.judge is None else namespaces.BLOCK

        def make(first: int) -> None:
            count = min(step, flat.size - first)
            chunk = Chunk(self.problem, name, first, count, self.judge)
            flat[first : first + count] = round_to(values(chunk), self.problem.dtype)

        self._each(make, range(0, flat.size, step), flat.size)
        return result

    def _each(self, make: Callable[[int], None], firsts: range, size: int) -> None:
        """Make every part of an array of `size` elements, of a large one in threads."""
        if self.judge is None and size >= LARGE:
            in_threads(make, firsts)
            return
        for first in firsts:
            make(first)

    def empty(self) -> Array:
        """Memory for data; of a large array with room for guards."""
        dims, dtype = self.problem.dims, numpy_dtype(self.problem.dtype)
        if self.judge is not None:
            return self.judge.empty(dims, dtype)
        size = math.prod(dims)
        if size < LARGE:
            return np.empty(dims, dtype)
        image = aligned_bytes(size * dtype.itemsize + 2 * GUARD)
        return image[GUARD:-GUARD].view(dtype).reshape(dims)

    def words(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        return splitmix64(self.problem.seed, STREAMS[name], count)

    def cycle(self, values: Array, step: int = 1) -> Array:
        """`values` dealt to the channels in turn, in the shape of a parameter."""
        return values[(self.index // step) % len(values)].reshape(self.parameters)

    def every_second(self) -> Array:
        """Every second statistic, but not the last."""
        return ((self.index % 2 == 0) & (self.index != self.channels - 1)).reshape(self.parameters)


class _Dyadic(_Fill):
    """Everything but x and the saved inverse standard deviation of the fills whose sums are exact."""

    def dy(self, chunk: Chunk) -> Array:
        return ((chunk.words >> np.uint64(32)) % np.uint64(5)).astype(np.float64) - 2.0

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

    def prior(self, chunk: Chunk) -> Array:
        return (((chunk.words >> np.uint64(32)) % np.uint64(17)).astype(np.float64) - 8.0) / 4.0


class _Exact(_Dyadic):
    @staticmethod
    def _pattern(m: int) -> tuple[list[float], list[int], float]:
        """Deviations from the mean of m elements, how often each is there, and 1/sqrt(variance + epsilon) if dyadic."""
        if m % 8 == 0:
            return [0.0, 0.5, -0.5], [m // 4, 3 * m // 8, 3 * m // 8], 2.0
        if m % 2 == 0:
            return [0.5, -0.5], [m // 2, m // 2], 1.0
        return [0.0, 0.5, -0.5], [1, m // 2, m // 2], 2.0

    def data(self, name: str) -> Array:
        if name != "x":
            return super().data(name)
        problem, result, first = self.problem, self.empty(), 0
        means = self.cycle(exact_means(problem)).reshape(-1, 1)
        for rank, images in enumerate(problem.shares if problem.composed == "sync_train" else problem.dims[:1]):
            if images:
                own = means + _APART[rank % len(_APART)] * (means != 0)
                self._shuffle(result[first : first + images], own, (problem.seed + (rank << 32)) % 2**64)
            first += images
        return result

    def _shuffle(self, result: Array, means: Array, seed: int) -> None:
        """Fill whole statistics at a time: each is the pattern about its mean, in an order of its own."""
        problem, m = self.problem, result.size // self.channels
        if problem.mode == Mode.PER_ACTIVATION:
            rows = result.reshape(m, 1, self.channels).transpose(2, 0, 1)
        else:
            rows = result.reshape(len(result), self.channels, -1).transpose(1, 0, 2)
        kinds, counts = self._pattern(m)[:2]
        ends = np.cumsum(counts)[:-1]
        step = max(1, (CHUNK if self.judge is None else namespaces.BLOCK) // m)

        def make(first: int) -> None:
            some = means[first : first + step] + kinds
            words = splitmix64(seed, STREAMS["order"], len(some) * m, first * m, self.judge)
            order = generator.order(words.reshape(len(some), m))
            values = some[:, -1:]
            for kind, end in reversed(list(enumerate(ends))):
                values = np.where(order < int(end), some[:, kind : kind + 1], values)
            rows[first : first + step] = round_to(values, problem.dtype).reshape(rows[first : first + step].shape)

        self._each(make, range(0, self.channels, step), result.size)

    def saved(self) -> tuple[Array, Array]:
        inverse = self._pattern(self.problem.m)[2]
        return self.cycle(exact_means(self.problem)), self.cycle(np.array([inverse, inverse / 2]))


class _Paired(_Dyadic):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.half = paired_size(problem) // 2

    def _means(self) -> Array:
        """Draw means in units of 1 / half: 0, +-half and, where there is room, +-half/2."""
        return self.cycle(np.array([0, 2, -2, 1, -1])) * self.half // 2

    def x(self, chunk: Chunk) -> Array:
        m, rank, channel = self.problem.m, chunk.rank, chunk.channel
        # the pair is drawn at its first element, the one without a partner is the mean
        pair = channel * m + rank // 2 * 2
        words = generator.words_at(self.problem.seed, STREAMS["x"], pair.astype(np.uint64))
        size = self.half - ((words >> np.uint64(32)) % np.uint64(self.half // 2 + 1)).astype(np.int64)
        sign = 1 - 2 * ((words.astype(np.int64) ^ rank) & 1)
        deviation = np.where((m % 2 == 1) & (rank == m - 1), 0, sign * size)
        return (chunk.of(self._means()) + deviation) / self.half

    def saved(self) -> tuple[Array, Array]:
        # 1/sqrt(variance + 1/16) is about 1.25
        return self._means() / self.half, self.cycle(np.array([1.0, 0.5]))


class _Randn(_Fill):
    deviation = 1.0
    """Of x in units of `_SIGMAS`."""

    def _sigma(self) -> Array:
        return self.cycle(_SIGMAS) * self.deviation

    def _offset(self) -> Array:
        """Mean in units of sigma."""
        return self.cycle(np.array([1.0, -1.0]) * self.problem.kappa, step=len(_SIGMAS))

    def _mean(self) -> Array:
        return self._sigma() * self._offset()

    def x(self, chunk: Chunk) -> Array:
        return chunk.of(self._sigma()) * (normal(chunk.words) + chunk.of(self._offset()))

    def dy(self, chunk: Chunk) -> Array:
        # a sum near 0 hides what is done to it
        offset = self.cycle(np.array([1.0, -1.0]) * min(self.problem.kappa, 0.5), step=len(_SIGMAS))
        return normal(chunk.words) + chunk.of(offset)

    def prior(self, chunk: Chunk) -> Array:
        return normal(chunk.words)

    def scale(self) -> Array:
        words = self.words("scale", self.channels)
        sign = np.where(words & np.uint64(1), 1.0, -1.0)
        return (sign * (0.5 + 1.5 * uniform(words))).reshape(self.parameters)

    def bias(self) -> Array:
        return normal(self.words("bias", self.channels)).reshape(self.parameters)

    def estimates(self) -> tuple[Array, Array]:
        jitter = 0.75 + 0.5 * uniform(self.words("variance", self.channels)).reshape(self.parameters)
        shift = 0.5 * normal(self.words("mean", self.channels)).reshape(self.parameters)
        sigma = self._sigma()
        return sigma * (self._offset() + shift), 1.5 * sigma * sigma * jitter

    def saved(self) -> tuple[Array, Array]:
        other = self.cycle(np.array([0.0, 1.0]))
        return self._sigma() * (self._offset() + 0.25 * other), (1.0 - 0.25 * other) / self._sigma()


class _SqrtEps(_Randn):
    def _sigma(self) -> Array:
        return np.full(self.parameters, np.sqrt(self.problem.epsilon))

    def saved(self) -> tuple[Array, Array]:
        mean, inverse = super().saved()
        return mean, inverse * np.sqrt(0.5)  # the variance is epsilon: 1/sqrt(2 epsilon)


class _Ramp(_Randn):
    """x = unit * (k + o), integers that the place (k) and the channel (o) give; unit is a power of two."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        short = _RAMP_PRIMES.get(problem.dtype, _RAMP_PRIME)
        self.prime = short if self.channels * problem.m <= short else _RAMP_PRIME
        self.unit = 4.0 / 2.0 ** self.prime.bit_length()

    def _steps(self, index: npt.NDArray[np.int64], golden: float) -> npt.NDArray[np.int64]:
        """Take for each index as many steps of `golden` * prime, modulo the prime, centred at 0."""
        return index * int(golden * self.prime) % self.prime - self.prime // 2

    def _centre(self) -> npt.NDArray[np.int64]:
        """o of each channel."""
        return self._steps(self.index, _PLASTIC)

    def _power(self) -> Array:
        return self.cycle(np.array([1.0, 0.5, 2.0]))

    def _sigma(self) -> Array:
        return self._power() * (self.unit * self.prime * 0.5 * _UNIFORM_DEVIATION)

    def _offset(self) -> Array:
        return self._centre().reshape(self.parameters) / (self.prime * 0.5 * _UNIFORM_DEVIATION)

    def x(self, chunk: Chunk) -> Array:
        steps = self._steps(chunk.place, _GOLDEN_SECTION) + chunk.of(self._centre())
        return steps * (self.unit * chunk.of(self._power()))

    def dy(self, chunk: Chunk) -> Array:
        # with an offset and a part of x's steps: else dbias and dscale, and their share in dx, are next to nothing
        own = self._steps(chunk.place, _PLASTIC**2) // 2 + self._steps(chunk.place, _GOLDEN_SECTION) // 2
        return (own + (chunk.channel % 3 - 1) * (self.prime // 4)) * self.unit

    def prior(self, chunk: Chunk) -> Array:
        return self._steps(chunk.place, _PLASTIC) * self.unit

    def scale(self) -> Array:
        return self.cycle(np.array([1.0, -1.0])) * (1.25 + 1.5 * self._fraction(_GOLDEN_SECTION))

    def bias(self) -> Array:
        return 4.0 * self._fraction(_PLASTIC**2)

    def _fraction(self, golden: float) -> Array:
        """A number in (-1/2, 1/2) for each channel; no two are equal."""
        whole = self.index * int(golden * _RAMP_PRIME) % _RAMP_PRIME - _RAMP_PRIME // 2
        return (whole / _RAMP_PRIME).reshape(self.parameters)


class _Constant(_Randn):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.constant = self.every_second()
        self.values = round_to(self._values(), problem.dtype).astype(np.float64)

    def _values(self) -> Array:
        # Short, so that 2**16 of them add up without rounding: the errors of a sum of equal terms have one sign, and a
        # plain chain of a thousand would err by more than sums of as many different terms do.
        short = round_to(_CONSTANTS * self.problem.magnitude, DataType.BFLOAT16).astype(np.float64)
        return self.cycle(short, step=2)

    def x(self, chunk: Chunk) -> Array:
        return np.where(chunk.of(self.constant), chunk.of(self.values), super().x(chunk))

    def estimates(self) -> tuple[Array, Array]:
        mean, variance = super().estimates()
        return np.where(self.constant, self.values, mean), np.where(self.constant, 0.0, variance)

    def saved(self) -> tuple[Array, Array]:
        mean, inverse = super().saved()
        with np.errstate(divide="ignore"):
            of_zero = 1.0 / np.sqrt(np.float64(self.problem.epsilon))
        return np.where(self.constant, self.values, mean), np.where(self.constant, of_zero, inverse)


class _Level(_Constant):
    def _values(self) -> Array:
        return self.cycle(np.array([1.0, -0.3, 0.7]) * self.problem.magnitude, step=2)


class _Relu(_Randn):
    deviation = _RELU_DEVIATION

    def _offset(self) -> Array:
        return np.full(self.parameters, _RELU_MEAN / _RELU_DEVIATION)

    def x(self, chunk: Chunk) -> Array:
        return chunk.of(self.cycle(_SIGMAS)) * np.maximum(normal(chunk.words), 0.0)

    def dy(self, chunk: Chunk) -> Array:
        return np.maximum(normal(chunk.words), 0.0)


class _Image(_Randn):
    def _sigma(self) -> Array:
        return np.full(self.parameters, 0.2875)

    def _offset(self) -> Array:
        return np.full(self.parameters, 0.7 / 0.2875)

    def x(self, chunk: Chunk) -> Array:
        levels = (chunk.words >> np.uint64(56)).astype(np.float64) / 255.0
        return np.where(chunk.rank < self.problem.m // 2, 0.9, levels)


class _Sparse(_Randn):
    deviation = 0.5590169943749475

    def x(self, chunk: Chunk) -> Array:
        # the low bits, which the normal does not use, say which elements there are
        words = chunk.words
        size = np.where(words % np.uint64(16) == 3, 1.0, 0.0) + np.where(words % np.uint64(1024) == 5, 16.0, 0.0)
        return chunk.of(self.cycle(_SIGMAS)) * normal(words) * size


class _Range(_Randn):
    def _sigma(self) -> Array:
        return self.cycle(_RANGE_HALVES) * _RANGE_DEVIATION * (self.problem.magnitude or 0.0)

    def _offset(self) -> Array:
        return self.cycle(_RANGE_CENTRES / (_RANGE_HALVES * _RANGE_DEVIATION))

    def x(self, chunk: Chunk) -> Array:
        kind = chunk.channel % len(_RANGE_CENTRES)
        side = 1.0 - 2.0 * (chunk.rank % 2)
        unit = np.take(_RANGE_CENTRES, kind) + np.take(_RANGE_HALVES, kind) * side * (0.5 + 0.5 * uniform(chunk.words))
        return unit * self.problem.magnitude

    def scale(self) -> Array:
        return super().scale() * (self._sigma() if self.problem.operation == Operation.BACKWARD else 1.0)

    def estimates(self) -> tuple[Array, Array]:
        mean, variance = super().estimates()
        return mean, np.minimum(variance, _VARIANCE_MAX.get(self.problem.parameter_dtype, 2.0**120))


class _Special(_Randn):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        backward = problem.operation == Operation.BACKWARD
        places = ["x", "dy", "scale"] if backward else ["x", "scale", "bias"]
        if problem.saved if backward else problem.running or not problem.recomputes:
            places += ["mean", "variance"]
        if problem.composed == "backward_reduce":
            places.remove("scale")
        self.place = places[problem.seed // 3 % len(places)]

    def _put(self, name: str, values: Array, place: int = -1) -> Array:
        if name == self.place:
            values.reshape(-1)[(self.channels - 1) // 2 if place < 0 else place] = _SPECIAL[self.problem.seed % 3]
        return values

    def data(self, name: str) -> Array:
        rank = int(self.words("special", 1)[0]) % self.problem.m
        place = Chunk(self.problem, name, 0, 1).locate((self.channels - 1) // 2, rank)
        return self._put(name, super().data(name), place)

    def scale(self) -> Array:
        return self._put("scale", super().scale())

    def bias(self) -> Array:
        return self._put("bias", super().bias())

    def estimates(self) -> tuple[Array, Array]:
        mean, variance = super().estimates()
        return self._put("mean", mean), self._put("variance", variance)

    def saved(self) -> tuple[Array, Array]:
        mean, inverse = super().saved()
        return self._put("mean", mean), self._put("variance", inverse)


Kind = _Exact | _Paired | _Randn

KINDS: dict[str, type[Kind]] = {
    **{"exact": _Exact, "paired": _Paired, "randn": _Randn, "sqrteps": _SqrtEps, "ramp": _Ramp, "constant": _Constant},
    **{"range": _Range, "special": _Special, "relu": _Relu, "image": _Image, "sparse": _Sparse, "level": _Level},
}
"""The class of each fill."""
