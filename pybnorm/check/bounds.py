r"""The a-priori error bound of every output, per element, and the verdict that follows from it.

Symbols: ``u`` unit roundoff of the compute type (2**-24 for float32, float16 and bfloat16 data, 2**-53 for float64),
``u_o`` of the output type, ``u_p`` of parameters and statistics, ``t_o`` the smallest normal of the output type (a
library may flush to zero), ``m`` elements per statistic and ``h`` the depth of a sum. Per statistic: mean ``mu``,
biased variance ``v``, ``A`` = mean \|x\|, ``Q`` = mean x**2, ``r`` = 1 / sqrt(v + epsilon) and
``kappa`` = \|mu\| / sqrt(v). The reference is float64 on the inputs as stored, so quantising the inputs costs nothing.

Classes
-------
A (stable)
    Two-pass, Welford, shifted or float64-accumulating kernels meet it: PASS.
B (one-pass)
    E[x**2] - mu**2 and the uncentred sum(dy*x) - mu*sum(dy). Met by B but not by A: WARN.
C (diagnosis only)
    B with h = m, one sequential chain. Meeting it explains a FAIL and never excuses it.

``h = min(m, 16 + 4 sqrt(m))`` covers blocked and pairwise sums. Where every sum of the data is free of rounding in any
order (`pybnorm.check.data.sums_are_exact`) the sums contribute nothing and what is left is the one rounding of the
division by m, or of the multiplication by a rounded 1/m: h = 1, the class called "exact". From `LONG` terms on, sums
over dy have not even that: E_b = 4 u \|dbias\| and, with given statistics, E_s = 6 u \|dscale\|.

Welford's recurrence divides by 1 ... m and so rounds even there; an output that depends on statistics taken from x may
therefore fall back from "exact" and still pass, which the verdict says. With less than `LONG` terms it falls back to A.
With more to the class "rounded", which is as wide as the recurrence is: its running mean wanders about mu, so that
dmu = 8 u ((h+1) \|mu\| + sqrt(v)) + 2 u A, next to nothing where mu is 0; E_s has 16 u W in place of (h+4) u W. No
excuse has a result that an unbiased variance, v m / (m - 1), explains within "exact": that is FAIL. More is said by the
outputs of a call together (`pybnorm.check.verdicts`).

Forward
-------
* mean: dmu = (h+1) u A; stored + u_p \|mu\|
* variance, A: dv = (h+4) u (v + \|mu\| sqrt(v)) + dmu**2 (the kappa**1 term is Welford's);
  B: max(A, (h+3) u Q + 2 \|mu\| dmu + dmu**2 + 2 u mu**2)
* inverse standard deviation: dr = max(1/sqrt(max(v-dv, 0) + eps) - r, r - 1/sqrt(v+dv+eps)) + 4 u r; stored + u_p r
* y: E = \|scale\| (r dmu + \|x-mu\| dr) + 4 u (\|scale\| r (\|x\|+\|mu\|) + \|bias\|); bound E + u_o (\|y\|+E) + t_o.
  Inference: dmu = 0 and dr = 4 u r. \|x\|+\|mu\|, not \|x-mu\|, because a kernel may fold to y = a x + b.
* running mean: f dmu + (3u+u_p) (\|(1-f) old\| + \|f mu\|)
* running variance: f c dv + (5u+u_p) (\|(1-f) old\| + f c v), c = m/(m-1)

Backward
--------
With x_hat = (x-mu) r, S = sum \|dy\|, W = sum \|dy\| w, w = \|x_hat\| (A) or (\|x\|+\|mu\|) r (B); saved
statistics have dmu = dr = 0:

* dbias: E_b = h u S; + u_p \|dbias\|
* dscale: E_s = (h+4) u W + r dmu \|dbias\| + \|dscale\| dr/r; + u_p \|dscale\|
* dx: with D = r dmu + \|x_hat\| dr/r + 3 u w,
  E = \|scale\| r [5u (\|dy\| + \|dbias\|/m + \|x_hat\| \|dscale\|/m) + E_b/m + \|x_hat\| E_s/m + (\|dscale\|/m) D]
  + \|dx\| (dr/r + 2u); bound E + u_o (\|dx\|+E) + t_o. Where parameters have 16 bits, dscale and dbias may have been
  stored before dx took them: E + \|scale\| r u_p (\|dbias\| + \|x_hat\| \|dscale\|)/m

Blending out = alpha res + beta prior: \|alpha\| E + 2u (\|alpha res\| + \|beta prior\|), then stored as above. With
beta = 0 the prior is poison and a finite result is required.

Range
-----
A library may flush what is below the smallest normal ``t`` of the compute type: dmu + t, dv + t (2 + 4 sqrt(v)); given
statistics have dmu = t. Where a sum or product that a correct kernel may form is beyond half the largest number of the
compute type (m A, m v, the terms of y, m times those of dx), the right result may be lost on the way to it, and what
follows from it is not judged; the same where v and epsilon may both be flushed to 0.

Verdicts
--------
A NaN or infinity where the reference is finite and \|reference\| + bound is in range is FAIL. Elements whose
reference is not finite, or out of the output's range, are not judged. Where dr/r > 1/4 the first-order terms above mean
nothing: elements of that statistic that depend on dr are INCONCLUSIVE, unless a stricter class that is conclusive holds
them.

A store that truncates to 16 bits is off by up to one ulp, twice what rounding is, and is a FAIL. Truncation is
monotone, so the values that it makes of [reference - E, reference + E] are those from the truncated lower to the
truncated upper end. Where every judged element is one of them, and many are no rounding of any value in the interval,
the verdict says that the results are truncated.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, reference
from pybnorm.check.data import Inputs, round_to, sums_are_exact
from pybnorm.check.problem import Problem, checked
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError

__all__ = [
    "LONG",
    "TRUNCATED",
    "UNBIASED",
    "Expected",
    "Point",
    "Precision",
    "Status",
    "Tier",
    "Verdict",
    "bessel_convention",
    "depth",
    "judge",
    "judge_by",
    "precision",
    "tiers",
    "untrusted",
]

Array = npt.NDArray[Any]
WORST_POINTS = 10
TRUNCATED = "16-bit results are truncated, not rounded: up to 2x the bound"
"""Note of a FAIL that a store which truncates explains."""
UNBIASED = "normalized by the unbiased variance, m / (m - 1) too large"
"""Note of a FAIL on exact data."""
LONG = 2048
"""Terms of a sum beside which the effect of one is small, and from which exact data are judged more sharply."""
TRUNCATION_EVIDENCE = 20
"""Elements that must be no rounding before truncation is named: a library that rounds looks so once in 2**20."""


class Status(enum.Enum):
    """Outcome of an output or of a case, never mixed up with one another."""

    PASS = "PASS"
    """Within the stable bound."""
    WARN = "WARN"
    """Outside the stable bound, within the one-pass bound: single-pass cancellation."""
    UNSUPPORTED = "UNSUPPORTED"
    """The backend refused the combination, by name."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The bound says nothing about this data."""
    MISTRUSTED = "MISTRUSTED"
    """The case could not have failed."""
    ERROR = "ERROR"
    """Not run, and no verdict: the library cannot be used there, the node was lost, or this package failed."""
    RESOURCE = "RESOURCE"
    """Memory, or room for the outputs, could not be had."""
    BUILD_FAILED = "BUILD_FAILED"
    """The library could not compile its kernel."""
    CRASHED = "CRASHED"
    """The process of the library died."""
    TIMEOUT = "TIMEOUT"
    """The case did not end in the time it had, and its process was ended."""
    FAIL = "FAIL"
    """Wrong."""

    @property
    def severity(self) -> int:
        """Position in the order above; the worst output decides a case."""
        return list(Status).index(self)

    @property
    def good(self) -> bool:
        """Whether a run with nothing but such cases exits with 0."""
        return self in (Status.PASS, Status.WARN, Status.UNSUPPORTED)


# ---------------------------------------------------------------- symbols


class Precision(NamedTuple):
    """The roundoffs of a data type's computation."""

    u: float
    u_out: float
    u_param: float
    tiny_out: float
    tiny_param: float
    max_out: float
    max_param: float
    tiny: float
    """Smallest normal of the compute type."""
    reach: float
    """Half its largest number: what is formed on the way to a result must stay below."""


_ROUNDOFF = {
    DataType.FLOAT64: (2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    DataType.FLOAT32: (2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    DataType.FLOAT16: (2.0**-11, 2.0**-14, 65504.0),
    DataType.BFLOAT16: (2.0**-8, 2.0**-126, (2.0 - 2.0**-7) * 2.0**127),
}


def precision(dtype: DataType, parameter: DataType | None = None) -> Precision:
    """Unit roundoffs, smallest normals and largest finite values for data of `dtype`.

    `parameter` is the dtype of parameters and statistics, by default that of the computation.
    """
    compute = DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32
    u, tiny, largest = _ROUNDOFF[compute]
    u_out, tiny_out, max_out = _ROUNDOFF[dtype]
    u_param, tiny_param, max_param = _ROUNDOFF[compute if parameter is None else parameter]
    return Precision(u, u_out, u_param, tiny_out, tiny_param, max_out, max_param, tiny, largest / 2)


def depth(m: int) -> float:
    """Roundings on the longest path of a blocked or pairwise sum of m terms."""
    return min(float(m), 16.0 + 4.0 * math.sqrt(m))


class Tier(NamedTuple):
    """One class of kernels: its name, whether it may take one pass, and the depth of its sums."""

    name: str
    one_pass: bool
    h: float
    exact: bool = False
    """Whether sums over dy are free of rounding."""
    recurrence: bool = False
    """Whether only Welford's recurrence rounds, on exact data."""
    spread: float | None = None
    """What is allowed of mean and variance beyond "exact", in u times their size; None: as h says."""

    @property
    def status(self) -> Status:
        """The verdict of an output that this class holds."""
        return Status.WARN if self.one_pass else Status.PASS


def tiers(problem: Problem, output: str) -> tuple[Tier, ...]:
    """The classes to try for one output, strictest first."""
    h = depth(problem.m)
    stable, one_pass = Tier("A", False, h), Tier("B", True, h)
    if not sums_are_exact(problem):
        return stable, one_pass
    exact = problem.m >= LONG
    if not problem.recomputes or output == "dbias":
        return Tier("exact", False, 1.0, exact), Tier("B", True, 1.0, exact)
    if exact:
        return Tier("exact", False, 1.0, exact), Tier("rounded", False, h, exact, recurrence=True)
    return Tier("exact", False, 1.0), stable, one_pass


# ---------------------------------------------------------------- formulas


class Moments(NamedTuple):
    """What the bound needs of x, per statistic, in float64 and the derived shape."""

    mean: Array
    variance: Array
    absolute: Array
    """A = mean of \\|x\\|."""
    square: Array
    """Q = mean of x**2."""
    inverse: Array
    """r."""


class Deviations(NamedTuple):
    """How far a class of kernels may be off in mean, variance and inverse standard deviation."""

    mean: Array
    variance: Array
    inverse: Array
    undecided: Array
    """True where dr/r > 1/4."""


def deviations(moments: Moments, epsilon: float, u: float, tier: Tier, tiny: float = 0.0) -> Deviations:
    """Bounds of statistics recomputed from x, before they are stored; what is below `tiny` may be flushed to 0."""
    h, mean, v, r = tier.h, np.abs(moments.mean), moments.variance, moments.inverse
    with np.errstate(all="ignore"):
        d_mean = (h + 1) * u * moments.absolute + tiny
        if tier.recurrence:
            d_mean = 8 * u * ((h + 1) * mean + np.sqrt(v)) + 2 * u * moments.absolute + tiny
        d_variance = (h + 4) * u * (v + mean * np.sqrt(v)) + d_mean**2 + tiny * (2 + 4 * np.sqrt(v))
        if tier.spread is not None:
            d_mean = d_mean + tier.spread * u * mean
            d_variance += tier.spread * u * v
        if tier.one_pass:
            d_variance = np.maximum(
                d_variance, (h + 3) * u * moments.square + 2 * mean * d_mean + d_mean**2 + 2 * u * mean**2
            )
        above = 1 / np.sqrt(np.maximum(v - d_variance, 0) + (epsilon if epsilon >= tiny else 0.0)) - r
        below = r - 1 / np.sqrt(v + d_variance + epsilon)
        d_inverse = np.maximum(above, below) + 4 * u * r
        undecided = ~(d_inverse <= 0.25 * r)
    return Deviations(d_mean, d_variance, d_inverse, undecided)


def given(inverse: Array, relative: Array, tiny: float) -> Deviations:
    """Statistics that the caller gives: x - mean within `tiny`, the inverse standard deviation within `relative`."""
    zero = np.zeros_like(inverse)
    return Deviations(zero + tiny, zero, relative * inverse, np.zeros(inverse.shape, bool))


def forward_error(
    x: Array, mean: Array, r: Array, scale: Array, bias: Array, errors: Sequence[Array], u: float
) -> Array:
    """E of y, before y is stored; `errors` are dmu and dr."""
    d_mean, d_inverse = errors
    scale = np.abs(scale)
    spread = scale * (r * d_mean + np.abs(x - mean) * d_inverse)
    result: Array = spread + 4 * u * (scale * r * (np.abs(x) + np.abs(mean)) + np.abs(bias))
    return result


def backward_error(
    x: Array,
    dy: Array,
    dx: Array,
    mean: Array,
    r: Array,
    scale: Array,
    dscale: Array,
    dbias: Array,
    errors: Sequence[Array],
    m: int,
    u: float,
    one_pass: bool,
) -> Array:
    """E of dx, before dx is stored; `errors` are dmu, dr, E of dscale and E of dbias."""
    d_mean, d_inverse, e_dscale, e_dbias = errors
    dscale, dbias = np.abs(dscale) / m, np.abs(dbias) / m
    normal = np.abs(x - mean) * r
    w = (np.abs(x) + np.abs(mean)) * r if one_pass else normal
    relative = d_inverse / r
    d_normal = r * d_mean + normal * relative + 3 * u * w
    inner = 5 * u * (np.abs(dy) + dbias + normal * dscale) + e_dbias / m + normal * (e_dscale / m) + dscale * d_normal
    result: Array = np.abs(scale) * r * inner + np.abs(dx) * (relative + 2 * u)
    return result


def stored(
    error: Array, result: Array, alpha: float, beta: float, prior: Array | None, u: float, u_out: float, tiny: float
) -> tuple[Array, Array]:
    """(alpha * result + beta * prior, bound of it as stored), from E of the unblended result."""
    out = result
    if alpha != 1 or beta != 0:
        out = alpha * result
        size = np.abs(out)
        if beta != 0:
            assert prior is not None
            blend = beta * prior
            out, size = out + blend, size + np.abs(blend)
        error = abs(alpha) * error + 2 * u * size
    return out, error + u_out * (np.abs(out) + error) + tiny


# ---------------------------------------------------------------- the reference beside its bounds


@dataclasses.dataclass(frozen=True)
class _Part:
    """A block of one output: where it is, what is right, what came, and each class's bound and undecided elements."""

    index: tuple[slice, ...]
    reference: Array
    got: Array | None
    classes: list[tuple[Array, Array]]


class _Outputs(Mapping[str, Array]):
    """Float64 results by name; those of x's size are computed when they are asked for, and not kept."""

    def __init__(self, parameters: dict[str, Array], names: Sequence[str], data: Callable[[str], Array]) -> None:
        self._parameters, self._names, self._data = parameters, names, data

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._parameters[name] if name in self._parameters else self._data(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Expected:
    """The right outputs of a problem and the bounds of each.

    Holds arrays of the parameters' shape only: y and dx are computed in blocks, as often as they are walked.

    Parameters
    ----------
    problem : Problem
    inputs : Inputs
        As stored; need not be the ones `pybnorm.check.data.generate` gives.

    Attributes
    ----------
    outputs : mapping of str to ndarray
        float64 results before blending: y | saved_mean, saved_inv_variance | running_mean, running_variance |
        dx, dscale, dbias, as the problem has them. y and dx are computed anew each time they are looked up; `shape`
        tells their shape without that.
    biased_running_variance : ndarray or None
        What a library that leaves out m / (m - 1) would write.
    """

    _normalize_unbiased = False
    """For diagnosis: what comes of the usual mistake to normalize by v m / (m - 1)."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        checked(problem)
        _arguments.instance(inputs, Inputs, "inputs", "Inputs, as pybnorm.check.data.generate makes them")
        self.problem, self.inputs = problem, inputs
        self.precision = precision(problem.dtype, problem.parameter_dtype)
        self.biased_running_variance: Array | None = None
        self._axis = 1 if problem.mode != Mode.PER_ACTIVATION else tuple(range(1, len(problem.dims)))
        self._parameters: dict[str, Array] = {}
        self._sums: dict[bool, tuple[Array, Array]] = {}
        operation = problem.operation
        with np.errstate(all="ignore"):  # 0 * inf and the like are part of what is judged
            if operation == Operation.FORWARD_TRAINING:
                self._training()
            elif operation == Operation.FORWARD_INFERENCE:
                self._inference()
            else:
                self._backward()
        data = "dx" if operation == Operation.BACKWARD else "y"
        self.outputs: Mapping[str, Array] = _Outputs(self._parameters, (data, *self._parameters), self._whole)

    def shape(self, output: str) -> tuple[int, ...]:
        """Shape of an output."""
        return self.inputs.x.shape if output in ("y", "dx") else self._parameters[output].shape

    def _training(self) -> None:
        problem, inputs = self.problem, self.inputs
        self._take_moments()
        mean, variance = self._moments.mean, self._moments.variance
        if problem.saved:
            self._parameters |= {"saved_mean": mean, "saved_inv_variance": self._inverse}
        if problem.running:
            f, m = problem.factor, problem.m
            old_mean = inputs.need("mean").astype(np.float64)
            old_variance = inputs.need("variance").astype(np.float64)
            self._parameters |= {
                "running_mean": f * mean + (1 - f) * old_mean,
                "running_variance": f * (variance * m / (m - 1)) + (1 - f) * old_variance,
            }
            self.biased_running_variance = f * variance + (1 - f) * old_variance

    def _inference(self) -> None:
        p, problem, inputs = self.precision, self.problem, self.inputs
        self._mean = inputs.need("mean").astype(np.float64)
        variance = inputs.need("variance").astype(np.float64)
        self._inverse = 1 / np.sqrt(variance + problem.epsilon)
        # both flushed: a division by 0
        relative = np.where((variance < p.tiny) & (problem.epsilon < p.tiny), np.inf, 4 * p.u)
        self._deviations: Callable[[Tier], Deviations] = lambda tier: given(self._inverse, relative, p.tiny)

    def _backward(self) -> None:
        p, problem, inputs = self.precision, self.problem, self.inputs
        if problem.saved:
            self._mean = inputs.need("saved_mean").astype(np.float64)
            self._inverse = inputs.need("saved_inv_variance").astype(np.float64)
            self._deviations = lambda tier: given(self._inverse, np.zeros(()), p.tiny)
        else:
            self._take_moments()
        sums = reference.backward_reduce(inputs.need("dy"), inputs.x, self._mean, self._inverse, axis=self._axis)
        assert sums.dscale is not None
        self._parameters |= {"dscale": sums.dscale, "dbias": sums.dbias}

    def _take_moments(self) -> None:
        """Statistics of x, and what their bounds need."""

        def powers(x: Array) -> Iterator[Array]:
            yield np.abs(x)
            x *= x
            yield x

        p, problem = self.precision, self.problem
        mean, variance, inverse = reference.stats(self.inputs.x, epsilon=problem.epsilon, axis=self._axis)
        absolute, square = reference.reduce_blocks(powers, (self.inputs.x,), problem.mode)
        m = problem.m
        if self._normalize_unbiased:
            variance = variance * m / (m - 1)
            inverse = 1 / np.sqrt(variance + problem.epsilon)
        self._mean, self._inverse = mean, inverse
        self._moments = Moments(mean, variance, absolute / m, square / m, inverse)
        lost_mean = absolute > p.reach
        lost_variance = lost_mean | (m * variance > p.reach)

        def within_range(tier: Tier) -> Deviations:
            d = deviations(self._moments, problem.epsilon, p.u, tier, p.tiny)
            return Deviations(
                np.where(lost_mean, np.inf, d.mean),
                np.where(lost_variance, np.inf, d.variance),
                np.where(lost_variance, np.inf, d.inverse),
                d.undecided & ~lost_variance,
            )

        self._deviations = within_range

    def formula(self, output: str) -> tuple[list[Array], Callable[..., Array]]:
        """What y or dx is made of beside x, dy and the mean, of the derived shape, and the reference's formula."""
        gain = self.inputs.scale.astype(np.float64) * self._inverse
        if output == "y":
            return [gain, self.inputs.need("bias")], lambda x, mean, gain, bias: (x - mean) * gain + bias
        m = self.problem.m
        centre, slope = self._parameters["dbias"] / m, self._inverse * (self._parameters["dscale"] / m)
        return [gain, centre, slope], lambda x, dy, mean, gain, centre, slope: (dy - centre - (x - mean) * slope) * gain

    def _whole(self, output: str) -> Array:
        """y or dx before blending."""
        parameters, formula = self.formula(output)
        arrays = [self.inputs.x] if output == "y" else [self.inputs.x, self.inputs.need("dy")]
        whole = np.empty_like(self.inputs.x, dtype=np.float64)
        with np.errstate(all="ignore"):
            for block in reference.iterate_blocks(arrays, self.problem.mode, (self._mean, *parameters)):
                whole[block.index] = formula(*block.arrays, *block.parameters)
        return whole

    @property
    def statistics(self) -> tuple[Array, Array]:
        """Mean and inverse standard deviation that y or dx is made with."""
        return self._mean, self._inverse

    @property
    def moments(self) -> Moments:
        """Of x, where the statistics come from it."""
        return self._moments

    def ordinary(self, tier: Tier) -> Array:
        """Which statistics are finite, within what `tier` can judge, and of data that are not all one value."""
        rows = self.inputs.x.reshape(self.problem.dims[0], -1) if self._axis != 1 else self.inputs.x
        axes = self.problem.reduced_axes if self._axis == 1 else (0,)
        values = rows.astype(np.float64)
        with np.errstate(all="ignore"):
            d = self._deviations(tier)
            differ = (values.max(axis=axes) > values.min(axis=axes)) | (self.problem.m == 1)
            right = np.isfinite(self._mean + self._inverse + d.mean + d.inverse) & ~d.undecided
        found: Array = differ.reshape(right.shape) & right
        return found

    def _absolute_sums(self, one_pass: bool) -> tuple[Array, Array]:
        """S and W of backward."""
        if one_pass not in self._sums:

            def weights(dy: Array, x: Array, mean: Array, r: Array) -> Iterator[Array]:
                np.abs(dy, out=dy)
                yield dy
                yield dy * ((np.abs(x) + np.abs(mean)) * r if one_pass else np.abs(x - mean) * r)

            sums = reference.reduce_blocks(
                weights, (self.inputs.need("dy"), self.inputs.x), self.problem.mode, (self._mean, self._inverse)
            )
            self._sums[one_pass] = sums[0], sums[1]
        return self._sums[one_pass]

    def _sum_errors(self, tier: Tier, d: Deviations) -> tuple[Array, Array]:
        """E of dscale and of dbias."""
        u = self.precision.u
        total, weighted = self._absolute_sums(tier.one_pass)
        dscale, dbias = np.abs(self._parameters["dscale"]), np.abs(self._parameters["dbias"])
        r, reach = self._inverse, self.precision.reach
        with np.errstate(all="ignore"):
            terms = 16.0 if tier.recurrence else tier.h + 4
            if tier.exact and not self.problem.recomputes:
                e_dscale = 6 * u * dscale
            else:
                e_dscale = terms * u * weighted + r * d.mean * dbias + dscale * d.inverse / r
            e_dbias = 4 * u * dbias if tier.exact else tier.h * u * total
            # the same sum before the multiplication by r counts as well
            lost = self._absolute_sums(False)[1] * np.maximum(1, 1 / r) > reach
        return np.where(lost, np.inf, e_dscale), np.where(total > reach, np.inf, e_dbias)

    def blend(self, output: str) -> tuple[float, float, Array | None]:
        """alpha, beta and prior of an output."""
        problem, inputs = self.problem, self.inputs
        if output in ("y", "dx"):
            return problem.alpha, problem.beta, inputs.prior
        if output in ("dscale", "dbias"):
            prior = inputs.prior_scale if output == "dscale" else inputs.prior_bias
            return problem.alpha_param, problem.beta_param, prior
        return 1.0, 0.0, None

    def kappa(self, index: tuple[int, ...]) -> float:
        """\\|mean\\| / standard deviation of the statistic that the element at `index` of any output belongs to."""
        place = tuple(min(i, n - 1) for i, n in zip(index, self._mean.shape, strict=True))
        with np.errstate(all="ignore"):
            deviation = np.sqrt(self._moments.variance[place]) if self.problem.recomputes else 1 / self._inverse[place]
            return float(np.abs(self._mean[place]) / deviation)

    def parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[_Part]:
        """Walk one output in blocks (all at once where it is a parameter), with the bound of each of `classes`."""
        with np.errstate(all="ignore"):
            if output in ("y", "dx"):
                yield from self._data_parts(output, got, classes)
            else:
                yield self._parameter_part(output, got, classes)

    def _data_parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[_Part]:
        p, inputs, m = self.precision, self.inputs, self.problem.m
        alpha, beta, prior = self.blend(output)
        arrays = [inputs.x] if output == "y" else [inputs.x, inputs.need("dy")]
        made_of, formula = self.formula(output)
        parameters = [self._mean, *made_of]
        sources, end = len(arrays), len(parameters)
        scale = inputs.scale.astype(np.float64)
        # the largest factor that a kernel may put before a term, in whatever order it multiplies
        factor = np.maximum(1, np.abs(scale)) * np.maximum(1, self._inverse)
        if output == "y":
            parameters += [self._inverse, scale, inputs.need("bias"), p.reach / factor]
        else:
            sums = self._absolute_sums(False)
            lost = m * factor * (sums[0] + sums[1]) > p.reach
            parameters += [self._inverse, scale, self._parameters["dscale"], self._parameters["dbias"]]
        first = len(parameters)
        undecided = []
        for tier in classes:
            d = self._deviations(tier)
            undecided.append(d.undecided)
            parameters += [d.mean, d.inverse]
            if output == "dx":
                e_dscale, e_dbias = self._sum_errors(tier, d)
                parameters += [e_dscale, np.where(lost, np.inf, e_dbias)]
        step = (len(parameters) - first) // max(len(classes), 1)
        if got is not None:
            arrays.append(got)
        if beta != 0:
            assert prior is not None
            arrays.append(prior)
        for block in reference.iterate_blocks(arrays, self.problem.mode, parameters):
            x, *rest = block.arrays[:sources]
            others = list(block.arrays[sources:])
            values = others.pop(0) if got is not None else None
            before = others.pop(0) if beta != 0 else None
            mean, r, scale = block.parameters[0], block.parameters[end], block.parameters[end + 1]
            result = formula(x, *rest, *block.parameters[:end])
            out, _ = stored(np.zeros(()), result, alpha, beta, before, p.u, p.u_out, p.tiny_out)
            bounds = []
            for i, tier in enumerate(classes):
                own = block.parameters[first + i * step : first + (i + 1) * step]
                if output == "y":
                    bias, reach = block.parameters[end + 2 : first]
                    error = forward_error(x, mean, r, scale, bias, own, p.u)
                    error = _without_lost(error, x, mean, reach)
                else:
                    dscale, dbias = block.parameters[end + 2 : first]
                    error = backward_error(
                        x, rest[0], result, mean, r, scale, dscale, dbias, own, m, p.u, tier.one_pass
                    )
                    if self.problem.parameter_dtype.itemsize == 2:
                        normal = np.abs(x - mean) * r
                        error += np.abs(scale) * r * p.u_param * (np.abs(dbias) + normal * np.abs(dscale)) / m
                _, bound = stored(error, result, alpha, beta, before, p.u, p.u_out, p.tiny_out)
                bounds.append((bound, np.broadcast_to(undecided[i][block.parameter_index], bound.shape)))
            yield _Part(block.index, out, values, bounds)

    def _parameter_part(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> _Part:
        p, problem, inputs, result = self.precision, self.problem, self.inputs, self._parameters[output]
        alpha, beta, prior = self.blend(output)
        before = None if prior is None else prior.astype(np.float64)
        out, _ = stored(np.zeros(()), result, alpha, beta, before, p.u, p.u_param, p.tiny_param)
        bounds = []
        for tier in classes:
            d = self._deviations(tier)
            undecided = np.zeros(result.shape, bool)
            if output in ("dscale", "dbias"):
                error = self._sum_errors(tier, d)[0 if output == "dscale" else 1]
                _, bound = stored(error, result, alpha, beta, before, p.u, p.u_param, p.tiny_param)
                if output == "dscale":
                    undecided = d.undecided
            elif output == "saved_mean":
                bound = d.mean + p.u_param * np.abs(result) + p.tiny_param
            elif output == "saved_inv_variance":
                bound = d.inverse + p.u_param * result + p.tiny_param
                undecided = d.undecided
            else:
                bound = self._running_bound(output, d, problem.factor, inputs) + p.tiny_param
            bounds.append((bound, undecided))
        index = tuple(slice(0, n) for n in result.shape)
        values = None if got is None else got.astype(np.float64).reshape(result.shape)
        return _Part(index, out, values, bounds)

    def _running_bound(self, output: str, d: Deviations, f: float, inputs: Inputs) -> Array:
        u, u_p, m = self.precision.u, self.precision.u_param, self.problem.m
        if output == "running_mean":
            old, batch, slack, roundings = inputs.need("mean"), self._moments.mean, d.mean, 3
        else:
            c = m / (m - 1)
            old, batch, slack, roundings = inputs.need("variance"), c * self._moments.variance, c * d.variance, 5
        kept = np.abs((1 - f) * old.astype(np.float64))
        result: Array = f * slack + (roundings * u + u_p) * (kept + np.abs(f * batch))
        return result


def _without_lost(error: Array, x: Array, mean: Array, reach: Array) -> Array:
    """`error`, infinite where \\|x\\| + \\|mean\\| is beyond `reach`."""
    largest = max(float(x.max()), -float(x.min())) + float(np.abs(mean).max())
    if largest <= float(reach.min()):  # as nearly always, at the cost of two passes; not so if a NaN is among them
        return error
    return np.where(np.abs(x) + np.abs(mean) > reach, np.inf, error)


# ---------------------------------------------------------------- verdicts


@dataclasses.dataclass(frozen=True)
class Point:
    """One element of one output."""

    index: tuple[int, ...]
    reference: float
    got: float
    bound: float
    ratio: float


@dataclasses.dataclass
class Verdict:
    """What was found about one output."""

    output: str
    status: Status
    tier: str
    """The strictest class that holds every element; of the loosest tried if none does."""
    ratio: float
    """Worst error / bound in the strictest class."""
    ratios: dict[str, float]
    """The same for every class that was tried."""
    elements: int
    over: int = 0
    """Elements that no conclusive class holds."""
    undecided: int = 0
    """Elements that no class can judge."""
    unjudged: int = 0
    """Elements whose right value is not finite or out of the type's range."""
    identical: bool = False
    """Every judged element is the reference rounded to the output type."""
    noticed: float = 0.0
    """Smallest relative error of an element that the class `tier` would not have held; 0 if none could be judged."""
    worst: list[Point] = dataclasses.field(default_factory=list)
    """Up to ten elements by falling error / bound, in the class `tier`."""
    note: str = ""


@dataclasses.dataclass
class _Tally:
    ratio: float = 0.0
    over: int = 0
    undecided: int = 0
    unjudged: int = 0
    different: int = 0
    elements: int = 0
    noticed: float = math.inf
    worst: list[Point] = dataclasses.field(default_factory=list)


def judge(expected: Expected, output: str, got: Array) -> Verdict:
    """The verdict on one output.

    Parameters
    ----------
    expected : Expected
    output : str
        A key of ``expected.outputs``.
    got : ndarray
        What the library wrote, as stored, in logical order.
    """
    _arguments.instance(expected, Expected, "expected", "an Expected")
    if not issubclass(type(output), str) or output not in tuple(expected.outputs):  # a look-up would compute it
        raise ArgumentError("output", output, " | ".join(expected.outputs))
    _arguments.instance(got, np.ndarray, "got", f"a NumPy array of shape {expected.shape(output)}")
    if got.size != math.prod(expected.shape(output)):
        raise ArgumentError("got", f"shape {got.shape}", f"shape {expected.shape(output)}")
    _arguments.data_type(got.dtype, "got")
    return judge_by(expected, output, got, tiers(expected.problem, output))


def judge_by(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> Verdict:
    """`judge` by other classes than those of `tiers`; the arguments are not looked at."""
    ratios: dict[str, float] = {}
    for count in range(1, len(classes) + 1):
        tally = _compare(expected, output, got, classes[:count])
        tier = classes[count - 1]
        ratios[tier.name] = tally.ratio
        if not tally.over and not tally.undecided:
            break
    status, notes = tier.status, []
    if tally.over:
        status = Status.FAIL
        chain = Tier("C", True, float(expected.problem.m))
        if _compare(expected, output, got, (chain,)).ratio <= 1:
            notes.append("as one sequential chain of sums would err (class C)")
        if (
            output in ("y", "dx")
            and got.itemsize == expected.problem.dtype.itemsize == 2
            and _is_truncated(expected, output, got, classes)
        ):
            notes.append(TRUNCATED)
    elif tally.undecided or tally.unjudged == tally.elements:
        status = Status.INCONCLUSIVE
        notes.append(
            f"{tally.undecided} elements of statistics whose inverse standard deviation no bound holds"
            if tally.undecided
            else "no element's right value is in range"
        )
    elif status == Status.WARN:
        notes.append(f"single-pass cancellation, kappa={expected.kappa(tally.worst[0].index):.3g}")
    elif count > 1 and _normalized_by_unbiased(expected, output, got, classes[0]):
        # within what Welford's rounding excuses, but no rounding: every element says the same
        tier = classes[0]
        tally = _compare(expected, output, got, (tier,))
        status = Status.FAIL
        notes.append(UNBIASED)
    elif count > 1:
        notes.append(f"exact sums were rounded, as by Welford's recurrence; within class {tier.name}")
    if 0 < tally.unjudged < tally.elements:
        notes.append(f"{tally.unjudged} elements out of range or without a finite right value are not judged")
    if output == "running_variance":
        notes.append(f"variance convention: {bessel_convention(expected, got)}")
    return Verdict(
        output=output,
        status=status,
        tier=tier.name,
        ratio=ratios[classes[0].name],
        ratios=ratios,
        elements=tally.elements,
        over=tally.over,
        undecided=tally.undecided,
        unjudged=tally.unjudged,
        identical=not tally.different,
        noticed=tally.noticed if math.isfinite(tally.noticed) else 0.0,
        worst=tally.worst,
        note="; ".join(notes),
    )


def _compare(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> _Tally:
    """Count what `classes` together do not hold; ratios and points are those of the last class."""
    tally = _Tally()
    data = output in ("y", "dx")
    largest = expected.precision.max_out if data else expected.precision.max_param
    dtype = expected.problem.dtype if data else expected.problem.parameter_dtype
    for part in expected.parts(output, got, classes):
        assert part.got is not None
        right, values = part.reference, part.got
        with np.errstate(all="ignore"):
            error = np.abs(values - right)
            finite, size = np.isfinite(values), np.abs(right)
            held = np.zeros(right.shape, bool)
            judged = np.zeros(right.shape, bool)
            for bound, undecided in part.classes:
                in_range = np.isfinite(right) & (size + bound <= largest)
                judged |= in_range
                ratio = np.where(error == 0, 0.0, error / bound)
                ratio = np.where(in_range, np.where(finite, ratio, np.inf), 0.0)
                held |= in_range & ~undecided & (ratio <= 1)
            wild = judged & ~finite
            # a class whose bound is out of range says as little as one that is undecided
            open_ = judged & ~held & ~wild & (undecided | ~in_range)
            ratio = np.where(wild, np.inf, ratio)
            different = round_to(right, dtype).astype(np.float64) != values
            relative = np.where(judged & (size > 0) & ~undecided, bound / size, np.inf)
        tally.noticed = min(tally.noticed, float(relative.min(initial=math.inf)))
        tally.elements += right.size
        tally.different += int(np.count_nonzero(judged & different))
        tally.unjudged += int(np.count_nonzero(~judged))
        tally.over += int(np.count_nonzero(judged & ~held & ~open_))
        tally.undecided += int(np.count_nonzero(open_))
        tally.ratio = max(tally.ratio, float(ratio.max(initial=0.0)))
        _remember(tally.worst, part, error, bound, ratio)
    return tally


def _remember(worst: list[Point], part: _Part, error: Array, bound: Array, ratio: Array) -> None:
    """Merge a block's largest ratios into the list of worst points."""
    floor = worst[-1].ratio if len(worst) == WORST_POINTS else 0.0
    flat = ratio.ravel()
    chosen = np.flatnonzero(flat > floor)
    if chosen.size > WORST_POINTS:
        chosen = chosen[np.argpartition(flat[chosen], -WORST_POINTS)[-WORST_POINTS:]]
    for i in chosen:
        local = np.unravel_index(int(i), ratio.shape)
        index = tuple(int(k) + s.start for k, s in zip(local, part.index, strict=True))
        assert part.got is not None
        values = (float(part.reference[local]), float(part.got[local]), float(bound[local]))
        worst.append(Point(index, *values, float(flat[i])))
    worst.sort(key=lambda point: -point.ratio)
    del worst[WORST_POINTS:]


def truncate(values: Array, dtype: DataType) -> Array:
    """float64 `values` as stored in a 16-bit dtype, rounded once toward zero."""
    nearest = round_to(values, dtype)
    bits = nearest.view(np.uint16)
    with np.errstate(invalid="ignore"):
        bits -= np.abs(nearest.astype(np.float64)) > np.abs(values)  # from inf to the largest finite number too
    return nearest


def _may_be_stored(
    values: Array, ends: tuple[Array, Array], store: Callable[[Array, DataType], Array], dtype: DataType
) -> Array:
    """Which `values` a monotone `store` makes of something between the ends."""
    low, high = (store(end, dtype).astype(np.float64) for end in ends)
    result: Array = (low <= values) & (values <= high)
    return result


def _is_truncated(expected: Expected, output: str, got: Array, classes: tuple[Tier, ...]) -> bool:
    """Whether every judged element is a value within its bound, truncated, and enough are none rounded to nearest."""
    p, dtype = expected.precision, expected.problem.dtype
    evidence = 0
    for part in expected.parts(output, got, classes):
        assert part.got is not None
        right, values = part.reference, part.got
        truncated, rounded, judged = (np.zeros(right.shape, bool) for _ in range(3))
        with np.errstate(all="ignore"):
            for bound, undecided in part.classes:
                decided = ~undecided & np.isfinite(right) & (np.abs(right) + bound <= p.max_out)
                # what the bound was before the result was stored
                error = np.maximum((bound - p.tiny_out - p.u_out * np.abs(right)) / (1 + p.u_out), 0)
                flushed = (values == 0) & (np.abs(right) - error <= p.tiny_out)
                ends = right - error, right + error
                truncated |= decided & (_may_be_stored(values, ends, truncate, dtype) | flushed)
                rounded |= decided & (_may_be_stored(values, ends, round_to, dtype) | flushed)
                judged |= decided
        if (judged & ~truncated).any():
            return False
        evidence += int(np.count_nonzero(truncated & ~rounded))
    return evidence >= TRUNCATION_EVIDENCE


class _Unbiased(Expected):
    _normalize_unbiased = True


def _normalized_by_unbiased(expected: Expected, output: str, got: Array, exact: Tier) -> bool:
    """Whether exact sums and a variance that is too large by m / (m - 1) explain an output to the last rounding."""
    problem = expected.problem
    if not problem.recomputes or problem.m == 1:
        return False
    tally = _compare(_Unbiased(problem, expected.inputs), output, got, (exact,))
    return not tally.over and not tally.undecided and tally.unjudged < tally.elements


def bessel_convention(expected: Expected, got: Array) -> str:
    """Which variance went into the running variance: "unbiased", "biased", "cannot tell" or "neither".

    pybnorm's rule is the unbiased one; the other is evaluated to name what a wrong library did.
    """
    tier = tiers(expected.problem, "running_variance")[-1]
    part = expected._parameter_part("running_variance", got, (tier,))
    assert part.got is not None
    assert expected.biased_running_variance is not None
    bound = part.classes[0][0]
    judged = np.isfinite(part.reference) & (np.abs(part.reference) + bound <= expected.precision.max_param)
    with np.errstate(all="ignore"):
        # the bound of the biased form is smaller by (m-1)/m, which the comparison need not know
        unbiased, biased = (
            bool(np.all((np.abs(part.got - right) <= bound)[judged]))
            for right in (part.reference, expected.biased_running_variance)
        )
    if unbiased and biased:
        return "cannot tell"
    return "unbiased" if unbiased else "biased" if biased else "neither"


# ---------------------------------------------------------------- trust


def untrusted(problem: Problem, inputs: Inputs, one_pass: bool = False) -> list[str]:
    """Inputs whose change this case would not notice; not empty means MISTRUSTED.

    Each input that the operation reads is changed in one place, and the reference must move by more than the bound in
    some output: by the loosest stable bound, or with `one_pass`, for a case that only the one-pass bound accepted, by
    that. At most four statistics are looked at, the first three and the last, because each is independent of the
    others. The change is in the last one; where that is constant, not finite or beyond what the bound can say, as some
    fills make some, in an ordinary one instead.

    Not required, because the formulas do not depend on it (or, for epsilon, because only some fills make it
    comparable with the variance):

    * epsilon unless the fill is exact, sqrteps or paired; epsilon in backward with saved statistics
    * x, scale and epsilon where m = 1 and the statistics come from x: x_hat is 0, and dx with it, so that alpha does
      not show either (but the statistics that training saves or updates show x)
    * scale and alpha in backward where m <= 2 and the statistics come from x: dx is 0 up to epsilon
    * what only alpha = 0 hides, a prior where its beta is 0, running priors where the factor is 1
    """
    count = int(np.prod(problem.parameter_dims))
    small, small_inputs = _few(problem, inputs, sorted({*range(min(3, count)), count - 1}))
    baseline = Expected(small, small_inputs)
    tier = [t for t in tiers(small, "y") if one_pass or not t.one_pass][-1]
    if not baseline.ordinary(tier).flat[-1]:
        small, small_inputs = _few(problem, inputs, _with_an_ordinary_last(problem, inputs, tier))
        baseline = Expected(small, small_inputs)
    bounds = _bounds(baseline, one_pass)
    return [
        name for name, changed, other in _changes(small, small_inputs) if not _moved(bounds, Expected(changed, other))
    ]


def _few(problem: Problem, inputs: Inputs, chosen: list[int]) -> tuple[Problem, Inputs]:
    """The problem of the chosen statistics alone."""
    per_activation = problem.mode == Mode.PER_ACTIVATION
    few = Inputs(**{name: _pick(a, chosen, per_activation) for name, a in inputs.arrays().items()})
    return dataclasses.replace(problem, dims=few.x.shape, strides=()), few


def _with_an_ordinary_last(problem: Problem, inputs: Inputs, tier: Tier) -> list[int]:
    """Statistics to look at where the last one is special: one that can be judged comes last, if there is any."""
    count = int(np.prod(problem.parameter_dims))
    candidates = sorted({*range(min(16, count)), count - 1})
    ordinary = Expected(*_few(problem, inputs, candidates)).ordinary(tier).ravel()
    last = max((i for i, good in zip(candidates, ordinary, strict=True) if good), default=count - 1)
    return [*(i for i in candidates[:3] if i != last), last]


def _pick(array: Array, chosen: list[int], per_activation: bool) -> Array:
    if per_activation:
        return array.reshape(array.shape[0], -1)[:, chosen]
    return np.take(array, chosen, axis=1)


def _bounds(expected: Expected, one_pass: bool) -> dict[str, list[tuple[Array, Array]]]:
    """Every output with its loosest bound, in the blocks of `Expected.parts`."""
    result = {}
    for name in expected.outputs:
        tier = [t for t in tiers(expected.problem, name) if one_pass or not t.one_pass][-1]
        result[name] = [(part.reference.copy(), part.classes[0][0]) for part in expected.parts(name, None, (tier,))]
    return result


def _moved(before: dict[str, list[tuple[Array, Array]]], after: Expected) -> bool:
    """Whether some output is off by more than its bound."""
    with np.errstate(all="ignore"):
        return any(
            bool(np.any(np.abs(part.reference - right) > bound))
            for name, blocks in before.items()
            for part, (right, bound) in zip(after.parts(name, None, ()), blocks, strict=True)
        )


_SHOW_EPSILON = ("exact", "sqrteps", "paired")
"""Fills whose epsilon is comparable with the variance."""


def _changes(problem: Problem, inputs: Inputs) -> Iterator[tuple[str, Problem, Inputs]]:
    operation, m = problem.operation, problem.m
    backward = operation == Operation.BACKWARD
    normal_is_zero = problem.recomputes and m == 1
    dx_is_zero = problem.recomputes and m <= 2

    def array(name: str, change: Callable[[Array], Array]) -> tuple[str, Problem, Inputs]:
        old = getattr(inputs, name)
        dtype = problem.dtype if name in ("x", "dy", "prior") else problem.parameter_dtype
        new, place = old.astype(np.float64), old.size - 1
        before = float(new.flat[place])
        with np.errstate(invalid="ignore", over="ignore"):
            after = change(new.flat[place])
            # where the type's range ends: as far the other way, else with the other sign
            for new.flat[place] in (after, 2 * before - after, -before):
                stored_ = round_to(new, dtype)
                if np.isfinite(stored_.astype(np.float64).flat[place]):
                    break
        return name, problem, dataclasses.replace(inputs, **{name: stored_})

    def further(value: Array) -> Array:
        return value + max(1.0, abs(value))

    def option(name: str, value: float) -> tuple[str, Problem, Inputs]:
        changes: dict[str, Any] = {name: value}
        return name, dataclasses.replace(problem, **changes), inputs

    last_channel = inputs.x.reshape(inputs.x.shape[0], inputs.x.shape[1], -1)[:, -1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        spread = float(last_channel.max() - last_channel.min())
    if not 0 < spread < math.inf:
        spread = 1.0 + abs(float(last_channel.flat[-1]))
    shows_x = operation == Operation.FORWARD_TRAINING and problem.saved
    shows_normal = not normal_is_zero and bool(problem.alpha or (backward and problem.alpha_param))
    updates = operation == Operation.FORWARD_TRAINING and problem.running
    if shows_x or shows_normal or updates:
        yield array("x", lambda value: value + spread)
    if problem.alpha and not normal_is_zero and not (backward and dx_is_zero):
        yield array("scale", lambda value: 1.5 * value)
    if problem.fill in _SHOW_EPSILON and not (backward and problem.saved) and (shows_x or shows_normal):
        yield option("eps", 2 * problem.epsilon if problem.epsilon else 1.0)
    if inputs.bias is not None and problem.alpha:
        yield array("bias", further)
    if inputs.dy is not None and (problem.alpha or problem.alpha_param):
        yield array("dy", further)
    reads_statistics = operation == Operation.FORWARD_INFERENCE and problem.alpha
    reads_running = updates and problem.factor != 1
    if reads_statistics or reads_running:
        deviation = math.sqrt(float(inputs.need("variance").astype(np.float64).flat[-1]))
        yield array("mean", lambda value: value + deviation)
        yield array("variance", lambda value: 4 * value if value < 1e30 else value / 4)
    if updates:
        yield option("factor", problem.factor / 2 if problem.factor else 0.5)
    if backward and problem.saved:
        one_deviation = 1 / float(inputs.need("saved_inv_variance").astype(np.float64).flat[-1])
        yield array("saved_mean", lambda value: value + one_deviation)
        yield array("saved_inv_variance", lambda value: 1.5 * value)
    if not (backward and (normal_is_zero or dx_is_zero)):
        yield option("alpha", 1.5 * problem.alpha or 0.5)
    if problem.beta:
        yield option("beta", 1.5 * problem.beta)
        yield array("prior", further)
    if backward:
        yield option("alpha_param", 1.5 * problem.alpha_param or 0.5)
        if problem.beta_param:
            yield option("beta_param", 1.5 * problem.beta_param)
            yield array("prior_scale", further)
            yield array("prior_bias", further)
