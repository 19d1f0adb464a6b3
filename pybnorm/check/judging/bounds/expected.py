"""The reference of a problem beside its bounds, walked in blocks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from pybnorm import _arguments, reference
from pybnorm.check.judging.bounds.classes import Precision, Tier, precision
from pybnorm.check.judging.bounds.formulas import (
    Deviations,
    Moments,
    backward_weights,
    blended,
    combined,
    deviations,
    forward_weights,
    given,
    gradient,
    in_range,
    normalized,
    stored,
)
from pybnorm.check.language.data import Inputs
from pybnorm.check.language.problem import DATA_OUTPUTS, Problem, checked, vector_dtype
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError
from pybnorm.reference.blocks import Block, reduce_in_threads, share_of_blocks
from pybnorm.reference.namespaces import Array, Foreign, beside
from pybnorm.reference.threads import LARGE, threads


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of one output: where it is, what is correct, what came, and each class's bound and undecided elements."""

    index: tuple[slice, ...]
    reference: Array
    got: Array | None
    classes: list[tuple[Array, Array]]


def decided(bound: Array) -> Array:
    """Mark a bound as deciding everywhere: no element is undecided."""
    return np.broadcast_to(beside(np.zeros((1,) * bound.ndim, bool), bound), bound.shape)


class _Outputs(Mapping[str, Array]):
    """Float64 results by name; those of x's size are computed when they are asked for, and not kept."""

    def __init__(self, names: Sequence[str], value: Callable[[str], Array]) -> None:
        self._names, self._value = names, value

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Expected:
    """The right outputs of a problem and the bounds of each; `pybnorm.check.judging.bounds.expect` finds the class.

    Holds arrays of the parameters' shape only: y and dx are computed in blocks, as often as they are walked or looked
    up. `outputs` are float64 results before blending, as the problem has them.
    """

    _normalize_unbiased = False
    """For diagnosis: what comes of the usual mistake to normalize by v m / (m - 1)."""

    composed: ClassVar[tuple[str, ...]] = ("", "elemt")
    """Words of the composed operations (`Problem.composed`) whose bounds this class has; "": of none."""
    activated: ClassVar[bool] = False
    """Whether it has them with an activation, or without one."""

    _sum_names: ClassVar[tuple[str, ...]] = ("dscale", "dbias")
    """The names of the sums that are made with `_inverse`."""

    _share = (0, 1)
    """Which run of statistics `parts` walks in y and dx, and of how many."""
    moments: Moments
    """The moments of x, where the statistics come from it."""
    deviations: Callable[[Tier], Deviations]
    """Says how far a class may be off in mean, variance and inverse standard deviation."""
    _like: Expected | None = None
    """Another one, whose statistics and sums are this one's where they are made of the same arrays."""

    @classmethod
    def knows(cls, problem: Problem) -> bool:
        """Say whether this class has the bounds of a problem."""
        return problem.composed in cls.composed and bool(problem.activation) == cls.activated

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        checked(problem)
        if not self.knows(problem):
            raise ArgumentError(
                "problem", str(problem), f"one that {type(self).__name__} knows; expect() finds the class"
            )
        _arguments.instance(inputs, Inputs, "inputs", "Inputs, as pybnorm.check.language.data.generate makes them")
        self.problem, self.inputs = problem, inputs
        self.precision = precision(problem.dtype, problem.parameter_dtype)
        self._axis = 1 if problem.mode != Mode.PER_ACTIVATION else tuple(range(1, len(problem.dims)))
        self._parameters: dict[str, Array] = {}
        self._sums: dict[bool, tuple[Array, Array]] = {}
        self.made: dict[Any, Any] = {}
        """Results of other kernels for the same inputs, as they were asked for (chains of sums, another layout)."""
        backward = problem.operation == Operation.BACKWARD
        with np.errstate(all="ignore"):  # 0 * inf and the like are part of what is judged
            if problem.operation == Operation.FORWARD_TRAINING:
                self._training()
            elif backward and not problem.saved:
                self._take_moments()
            elif backward or problem.inverse:
                self._take_saved()
            else:
                self._take_estimated(4 * self.precision.u)
            if backward:
                self._take_sums()
        self.outputs: Mapping[str, Array] = _Outputs(self._names(), self._value)

    def _names(self) -> tuple[str, ...]:
        """The outputs; those of x's size come first."""
        return "dx" if self.problem.operation == Operation.BACKWARD else "y", *self._parameters

    def _value(self, output: str) -> Array:
        return self._whole(output) if output in DATA_OUTPUTS else self._parameters[output]

    def varied(self, problem: Problem, inputs: Inputs) -> Expected:
        """The same of a problem and inputs that share arrays with these, of which nothing is computed again."""
        other = object.__new__(type(self))
        other._like = self
        other.__init__(problem, inputs)  # type: ignore[misc]
        other._like = None
        return other

    def wide(self, name: str) -> Array:
        """An input of the parameters' size in float64."""
        return self.inputs.need(name).astype(np.float64)

    def _has(self, *names: str) -> bool:
        """Say whether these inputs are those of the one that this varies."""
        like = self._like
        return like is not None and all(getattr(like.inputs, n) is getattr(self.inputs, n) for n in names)

    def precision_of(self, output: str) -> Precision:
        """`precision`, by the dtype that an output has where it is none of x's shape."""
        p = self.precision
        if output in DATA_OUTPUTS or vector_dtype(self.problem, output) == self.problem.parameter_dtype:
            return p
        wide = precision(self.problem.dtype)
        u, tiny = min(p.u_param, wide.u_param), min(p.tiny_param, wide.tiny_param)
        return p._replace(u_param=u, tiny_param=tiny, max_param=wide.max_param)

    def dtype(self, output: str) -> DataType:
        """The dtype of an output."""
        return self.problem.dtype if output in DATA_OUTPUTS else vector_dtype(self.problem, output)

    def largest(self, output: str) -> float:
        """Largest finite number of an output's dtype."""
        return self.precision.max_out if output in DATA_OUTPUTS else self.precision_of(output).max_param

    def shape(self, output: str) -> tuple[int, ...]:
        """Shape of an output."""
        return self.inputs.x.shape if output in DATA_OUTPUTS else self._parameters[output].shape

    def _training(self) -> None:
        problem = self.problem
        self._take_moments()
        mean, variance = self.moments.mean, self.moments.variance
        if problem.saved:
            spread = variance if problem.saves_variance else self._inverse
            self._parameters |= {"saved_mean": mean, "saved_inv_variance": spread}
        if problem.running:
            f, old_mean, old_variance = problem.factor, self.wide("mean"), self.wide("variance")
            self._parameters |= {
                "running_mean": f * mean + (1 - f) * old_mean,
                "running_variance": f * (variance * problem.correction) + (1 - f) * old_variance,
            }

    def _take_estimated(self, relative: float) -> None:
        """Take the mean and variance that are given; the inverse standard deviation is off by `relative` of itself."""
        p, epsilon = self.precision, self.problem.epsilon
        self._mean, variance = self.wide("mean"), self.wide("variance")
        self._inverse = 1 / np.sqrt(variance + epsilon)
        # both flushed: a division by 0
        off = np.where((variance < p.tiny) & (epsilon < p.tiny), np.inf, relative)
        self.deviations = lambda tier: given(self._inverse, off, p.tiny)

    def _take_saved(self) -> None:
        self._mean, self._inverse = self.wide("saved_mean"), self.wide("saved_inv_variance")
        self.deviations = lambda tier: given(self._inverse, np.zeros(()), self.precision.tiny)

    def _take_sums(self) -> None:
        inputs, like = self.inputs, self._like
        if like is not None and self._has("x", "dy", "saved_mean", "saved_inv_variance"):
            given_ = self.problem.saved and like.problem.saved
            if given_ or (self._mean is like._mean and self._inverse is like._inverse):
                self._parameters |= {name: like._parameters[name] for name in self._sum_names}
                return
        sums = reference.backward_reduce(
            x=inputs.x, dy=inputs.need("dy"), mean=self._mean, inv_variance=self._inverse, axis=self._axis
        )
        assert sums.dscale is not None
        self._parameters |= zip(self._sum_names, (sums.dscale, sums.dbias), strict=True)

    def _take_moments(self) -> None:
        p, problem, like = self.precision, self.problem, self._like
        if like is not None and self._has("x") and like.problem.epsilon == problem.epsilon:
            self._mean, self._inverse, self.moments = like._mean, like._inverse, like.moments
            self.deviations = like.deviations
            return
        mean, variance, inverse = reference.stats(self.inputs.x, epsilon=problem.epsilon, axis=self._axis)
        (absolute,) = reduce_in_threads(lambda x: np.abs(x, out=x), (self.inputs.x,), problem.mode)
        m = problem.m
        square = variance + mean * mean
        if self._normalize_unbiased:
            variance = variance * m / (m - 1)
            inverse = 1 / np.sqrt(variance + problem.epsilon)
        self._mean, self._inverse = mean, inverse
        self.moments = Moments(mean, variance, absolute / m, square, inverse)
        lost_mean = absolute > p.reach
        lost_variance = lost_mean | (m * variance > p.reach)

        def within_range(tier: Tier) -> Deviations:
            return in_range(deviations(self.moments, problem.epsilon, p.u, tier, p.tiny), lost_variance, lost_mean)

        self.deviations = functools.cache(within_range)

    def formula(self, output: str) -> tuple[list[Array], Callable[..., Array]]:
        """Give what y or dx is made of beside x - mean and dy, of the derived shape, and the reference's formula."""
        gain = self.wide("scale") * self._inverse
        if output == "y":
            return [gain, self.inputs.need("bias")], normalized
        m = self.problem.m
        centre, slope = self._parameters["dbias"] / m, self._inverse * (self._parameters["dscale"] / m)
        return [gain, centre, slope], gradient

    def _whole(self, output: str) -> Array:
        parameters, formula = self.formula(output)
        whole = np.empty_like(self.inputs.x, dtype=np.float64)
        with np.errstate(all="ignore"):
            for block, (x, *others), _, _ in self._walk(output, None, (self._mean, *parameters)):
                mean, *own = block.parameters
                whole[block.index] = formula(x - mean, *others, *own)
        return whole

    @property
    def biased_running_variance(self) -> Array:
        """The running variance of a library that leaves out m / (m - 1)."""
        return self.problem.factor * self.moments.variance + (1 - self.problem.factor) * self.wide("variance")

    @property
    def statistics(self) -> tuple[Array, Array]:
        """Mean and inverse standard deviation that y or dx is made with."""
        return self._mean, self._inverse

    def ordinary(self, tier: Tier) -> Array:
        """Say which statistics are finite, within what `tier` can judge, and of data that are not all one value."""
        values, axes = self.inputs.x.astype(np.float64), self.problem.reduced_axes
        with np.errstate(all="ignore"):
            d = self.deviations(tier)
            differ = (values.max(axis=axes) > values.min(axis=axes)) | (self.problem.m == 1)
            right = np.isfinite(self._mean + self._inverse + d.mean + d.inverse) & ~d.undecided
        return differ.reshape(right.shape) & right

    def _absolute_sums(self, one_pass: bool) -> tuple[Array, Array]:
        """S and W of backward."""
        if one_pass not in self._sums:

            def weights(dy: Array, x: Array, mean: Array) -> Iterator[Array]:
                np.abs(dy, out=dy)
                yield dy
                yield (np.abs(x) + np.abs(mean) if one_pass else np.abs(x - mean)) * dy

            total, weighted = reduce_in_threads(
                weights, (self.inputs.need("dy"), self.inputs.x), self.problem.mode, (self._mean,)
            )
            self._sums[one_pass] = total, weighted * np.abs(self._inverse)
        return self._sums[one_pass]

    def sum_errors(self, tier: Tier) -> tuple[Array, Array]:
        """E of dscale and of dbias."""
        d, u = self.deviations(tier), self.precision.u
        total, weighted = self._absolute_sums(tier.one_pass)
        dscale, dbias = (np.abs(self._parameters[name]) for name in self._sum_names)
        r, reach = np.abs(self._inverse), self.precision.reach
        with np.errstate(all="ignore"):
            terms = 16.0 if tier.recurrence else tier.h + 4
            if tier.exact and not self.problem.recomputes:
                e_dscale = 6 * u * dscale
            else:
                e_dscale = terms * u * weighted + r * d.mean * dbias + dscale * d.inverse / r
            e_dbias = 4 * u * dbias if tier.exact else tier.h * u * total
            e_dscale = e_dscale + r * self.precision.tiny * total  # each x may be flushed, whatever dy's sign
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
            return problem.alpha_param, problem.beta_param, None if prior is None else prior.astype(np.float64)
        return 1.0, 0.0, None

    def overflows(self, output: str) -> bool:
        """Say whether a kernel that multiplies by alpha first may overflow where the result is in range."""
        return abs(self.blend(output)[0]) > math.sqrt(self.precision.reach)

    def kappa(self, index: tuple[int, ...]) -> float:
        """\\|mean\\| / standard deviation of the statistic that the element at `index` of any output belongs to."""
        place = tuple(min(i, n - 1) for i, n in zip(index, self._mean.shape, strict=True))
        with np.errstate(all="ignore"):
            deviation = np.sqrt(self.moments.variance[place]) if self.problem.recomputes else 1 / self._inverse[place]
            return float(np.abs(self._mean[place]) / deviation)

    def shares(self, output: str) -> list[Expected]:
        """Give this one, or for large data one for each thread, whose `parts` together are this one's, in order."""
        count = threads() if type(self) is Expected and output in DATA_OUTPUTS else 1
        if count == 1 or self.inputs.x.size < LARGE or isinstance(self.inputs.x, Foreign):
            return [self]
        found = []
        for number in range(count):
            other = copy.copy(self)
            other._share = (number, count)
            found.append(other)
        return found

    def parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[Part]:
        """Walk one output in blocks (all at once where it is a parameter), with the bound of each of `classes`."""
        with np.errstate(all="ignore"):
            if output in DATA_OUTPUTS:
                yield from self._data_parts(output, got, classes)
            else:
                yield self._parameter_part(output, got, classes)

    def _walk(
        self, output: str, got: Array | None, parameters: Sequence[Array]
    ) -> Iterator[tuple[Block, tuple[Array, ...], Array | None, Array | None]]:
        """Blocks of x, with dy but for y; of what came there; and of the prior, if it is read."""
        _, beta, prior = self.blend(output)
        sources = [self.inputs.x] if output == "y" else [self.inputs.x, self.inputs.need("dy")]
        others = [a for a in (got, prior if beta != 0 else None) if a is not None]
        for block in share_of_blocks([*sources, *others], self.problem.mode, parameters, *self._share):
            rest = list(block.arrays[len(sources) :])
            values = rest.pop(0) if got is not None else None
            yield block, block.arrays[: len(sources)], values, rest[0] if rest else None

    def _data_parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[Part]:
        p, m = self.precision, self.problem.m
        alpha, beta, _ = self.blend(output)
        made_of, formula = self.formula(output)
        parameters = [self._mean, *made_of]
        end = len(parameters)
        # the largest factor that a kernel may put before a term, in whatever order it multiplies
        factor = np.maximum(1, np.abs(self.wide("scale"))) * np.maximum(1, np.abs(self._inverse))
        lost: Any = False
        if output == "y":
            reach = p.reach / factor
            if self.problem.recomputes and bool((m * self.moments.absolute + np.abs(self._mean) <= reach).all()):
                reach = np.full(1, np.inf)  # the sum of all \|x\| is within
            parameters.append(np.broadcast_to(reach, self._mean.shape))
        else:
            sums = self._absolute_sums(False)
            lost = m * factor * (sums[0] + sums[1]) > p.reach
        first = len(parameters)
        # where it is stored as it is, that is a part of the weights
        plain = (alpha, beta) == (1, 0) and type(self)._finished is Expected._finished
        for tier in classes:
            weights = self._weights(output, tier, lost)
            parameters += [weight * (1 + p.u_out) for weight in weights] if plain else weights
            if plain:
                parameters[-len(weights)] += p.tiny_out
        undecided = [self.deviations(tier).undecided for tier in classes]
        for block, (x, *rest), values, before in self._walk(output, got, parameters):
            mean, *own = block.parameters[:end]
            centred = x - mean
            result, finish = self._finished(output, block.index, formula(centred, *rest, *own))
            out = blended(result, alpha, beta, before)
            bounds = []
            given_weights = iter(block.parameters[first:])
            for i, tier in enumerate(classes):
                elements = [centred, x] if output == "y" else [centred, *rest, result]
                if output == "dx" and tier.one_pass:
                    elements.append(x)
                weights = tuple(next(given_weights) for _ in range(len(elements) + 1))
                bound = combined(weights, *elements)
                if output == "y":
                    bound = _without_lost(bound, x, mean, block.parameters[end])
                if plain:
                    size = np.abs(out)
                    size *= p.u_out
                    bound += size
                else:
                    _, bound = stored(finish(bound), result, alpha, beta, before, p.u, p.u_out, p.tiny_out)
                bounds.append((bound, np.broadcast_to(beside(undecided[i][block.parameter_index], bound), bound.shape)))
            yield Part(block.index, out, values, bounds)

    def _weights(self, output: str, tier: Tier, lost: Array) -> tuple[Array, ...]:
        """Give the factors of a bound's elements; `lost` are statistics whose terms may be out of range."""
        p, problem, d, scale = self.precision, self.problem, self.deviations(tier), self.wide("scale")
        size = np.abs(self._inverse)  # of a given one, which may have any sign
        if output == "y":
            return forward_weights(self._mean, size, scale, self.wide("bias"), (d.mean, d.inverse), p.u)
        e_dscale, e_dbias = self.sum_errors(tier)
        errors = d.mean, d.inverse, e_dscale, np.where(lost, np.inf, e_dbias)
        u_stored = p.u_param if problem.parameter_dtype.itemsize == 2 else 0.0
        dscale, dbias = self._parameters["dscale"], self._parameters["dbias"]
        return backward_weights(self._mean, size, scale, dscale, dbias, errors, problem.m, p.u, tier.one_pass, u_stored)

    def _finished(self, output: str, index: tuple[slice, ...], result: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Finish a block of batch norm's result, and its error, before it is blended."""
        return result, lambda error: error

    def _parameter_part(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Part:
        right = self._value(output)
        values = None if got is None else got.astype(np.float64).reshape(right.shape)
        made = (self._parameter_bound(output, right, tier) for tier in classes)
        bounds = [(bound, decided(bound) if undecided is None else undecided) for bound, undecided in made]
        return Part(tuple(slice(0, n) for n in right.shape), blended(right, *self.blend(output)), values, bounds)

    def _parameter_bound(self, output: str, right: Array, tier: Tier) -> tuple[Array, Array | None]:
        """The bound of an output of the parameters' size, and where it decides nothing; None: it decides everywhere."""
        p, d = self.precision_of(output), self.deviations(tier)
        if output in ("dscale", "dbias"):
            error = self.sum_errors(tier)[output == "dbias"]
            _, bound = stored(error, right, *self.blend(output), p.u, p.u_param, p.tiny_param)
            return bound, d.undecided if output == "dscale" else None
        if output == "saved_mean":
            return d.mean + p.u_param * np.abs(right) + p.tiny_param, None
        if output == "saved_inv_variance" and self.problem.saves_variance:
            return d.variance + (4 * p.u + p.u_param) * right + p.tiny_param, None
        if output == "saved_inv_variance":
            return d.inverse + p.u_param * right + p.tiny_param, d.undecided
        return self._running_bound(output, d) + p.tiny_param, None

    def _running_bound(self, output: str, d: Deviations) -> Array:
        f, u, u_p = self.problem.factor, self.precision.u, self.precision.u_param
        batch, slack, roundings = self.moments.mean, d.mean, 3
        if output == "running_variance":
            c = self.problem.correction
            batch, slack, roundings = c * self.moments.variance, c * d.variance, 5
        kept = np.abs((1 - f) * self.wide(output.removeprefix("running_")))
        # where the batch's statistics may be lost on the way, 0 times them may be NaN
        share = np.where(np.isinf(slack), np.inf, f * slack)
        return share + (roundings * u + u_p) * (kept + np.abs(f * batch))


def _without_lost(error: Array, x: Array, mean: Array, reach: Array) -> Array:
    """`error`, infinite where \\|x\\| + \\|mean\\| is beyond `reach`."""
    least = float(reach.min())
    if least == math.inf:
        return error
    largest = max(float(x.max()), -float(x.min())) + float(np.abs(mean).max())
    if largest <= least:  # as nearly always, at the cost of two passes; not so if a NaN is among them
        return error
    return np.where(np.abs(x) + np.abs(mean) > reach, np.inf, error)
