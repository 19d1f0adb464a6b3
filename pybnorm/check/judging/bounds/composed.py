r"""Bounds of the operations that are composed of vendor calls (`pybnorm.operations`).

They hold for a kernel of one's own as well as for the composition. A product of two vectors is, composed, a forward
inference: off by 8u of itself, then stored. 1 / sqrt(variance + epsilon) is too: r is off by dr = 9u r + u_p r (4u of a
kernel that does not store it). Symbols as in `pybnorm.check.judging.bounds`.

training_grad
    As backward with saved statistics, with that dr: E_s + \|dscale\| dr/r on exact data, too. Where 1/sigma is
    not the power of two that exact data have, terms and sums are rounded there: the class "rounded", with 16 u W.
frozen
    dscale and dbias as there. dx is a forward inference of dy: E = \|scale dy\| (dr + 4u r + ...) with mean and bias 0.
backward_reduce
    sum_dy: E_b. sum_dy_xmu: E_s of r = 1. dscale: r times that, stored between, + (8u + u_p) \|dscale\|.
backward_elemt
    With g = scale r, c = sum_dy/n and s = g r**2 sum_dy_xmu/n, dx = (g (dy - c)) - (s (x - mu)), either part alone
    first: of g (dy - c), E_1 = \|g\| (\|c\| dc + 4u (\|dy\| + \|c\|)) + \|g (dy - c)\| (4u + dg), dg = 8u + u_p,
    dc = 2u + u_p; of s (x - mu), E_2 = \|s\| 4u (\|x\| + \|mu\|) + \|s (x - mu)\| (4u + 5 (8u + u_p)). The first part
    may be stored and blended before the second is added: u_o \|alpha g (dy - c) + beta prior\| + t_o more. One that
    flushes: \|g\| t_p, and \|x - mu\| (1 + \|g\| (1 + r)/n) t_p.
elemt
    Inference from the inverse standard deviation.
gather_stats
    Of R ranks with the weights w = n_k/n, h the depth of a sum of R terms and d_k = mean_k - mean: mean,
    dmu = (h+6) u sum w \|mean_k\|; variance, A: dv = (h+12) u v + sum w (2 \|d_k\| e_k + e_k**2) with
    e_k = dmu + 9u (\|mean_k\| + \|mean\|), B: max(A, (h+8) u Q + 2 \|mean\| dmu + dmu**2 + 2 u mean**2) with Q
    the mean of x**2; the inverse standard deviation as of training, + 9u r; running averages as there with 5 u and 7 u
    in place of 3 u and 5 u. Rows of ranks without elements are not read.
sync_train
    Each rank's statistics as of training, merged as by gather_stats: dmu = (h + R + 8) u A, dv = (R + 20) u v and the
    weighted sum over the ranks of what their own variances and their means' distances are off by; y by elemt, whose
    product and 1/sigma are stored between: dr + (17u + 2 u_p) r. One-pass as there. On exact data the sums of each rank
    have no rounding: h = 1, else what Welford's recurrence rounds in each rank, else one pass, which cancels what is
    rounded behind the sums. What is allowed of a rank's recurrence in u of its size is sqrt(R) times that of one batch:
    the ranks' scatters add up in squares.
sync_backward
    The sums over ranks: h + R in place of h, and what is stored between, (8u + 2 u_p) W and u_p S; dx as of
    backward_elemt, + \|g\| (E_b + \|x_hat\| E_s)/m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from pybnorm import reference
from pybnorm.check.judging.bounds.activated import Activated
from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected, Part, decided
from pybnorm.check.judging.bounds.formulas import (
    Deviations,
    Moments,
    completed,
    gradient,
    in_range,
    mean_deviation,
    stored,
)
from pybnorm.check.language.data import Inputs
from pybnorm.check.language.problem import Problem, checked
from pybnorm.reference.namespaces import Array


class TrainingGrad(Expected):
    """Backward from the batch's mean and variance."""

    composed = ("training_grad",)

    def _has(self, *names: str) -> bool:
        """Say whether these inputs are those of the one that this varies, and the statistics with them."""
        like = self._like
        return (
            super()._has(*names, "mean", "variance")
            and like is not None
            and like.problem.epsilon == self.problem.epsilon
        )

    def _take_saved(self) -> None:
        self._take_estimated(9 * self.precision.u + self.precision.u_param)

    def sum_errors(self, tier: Tier) -> tuple[Array, Array]:
        """E of dscale and of dbias."""
        e_dscale, e_dbias = super().sum_errors(tier)
        if tier.recurrence:
            e_dscale = np.maximum(e_dscale, 16 * self.precision.u * self._absolute_sums(False)[1])
        if tier.exact:
            e_dscale = e_dscale + np.abs(self._parameters["dscale"]) * self.deviations(tier).inverse / self._inverse
        return e_dscale, e_dbias


class Frozen(TrainingGrad):
    """Backward of inference: the statistics are constants."""

    composed = ("frozen",)

    def formula(self, output: str) -> tuple[list[Array], Callable[..., Array]]:
        """dx is scale * r * dy."""
        gain = self.wide("scale") * self._inverse
        return [gain], lambda centred, dy, gain: dy * gain

    def _data_parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[Part]:
        p, r, scale = self.precision, self._inverse, self.wide("scale")
        alpha, beta, _ = self.blend(output)
        reach = p.reach / (np.maximum(1, np.abs(scale)) * np.maximum(1, r))
        relative = self.deviations(classes[0]).inverse / r if classes else np.zeros_like(r)
        for block, (_, dy), values, before in self._walk(output, got, (scale * r, relative + 4 * p.u, reach)):
            gains, off, most = block.parameters
            result = dy * gains
            error = np.abs(result) * off + np.abs(gains) * p.tiny
            error = np.where(np.abs(dy) > most, np.inf, error)
            out, bound = stored(error, result, alpha, beta, before, p.u, p.u_out, p.tiny_out)
            yield Part(block.index, out, values, [(bound, decided(bound)) for _ in classes])


class BackwardReduce(Expected):
    """The sums of backward, about a given mean; the sums of the base class are those of r = 1."""

    composed = ("backward_reduce",)
    _sum_names = ("sum_dy_xmu", "sum_dy")

    def _take_saved(self) -> None:
        super()._take_saved()
        self._given, self._inverse = self._inverse, np.ones_like(self._inverse)

    def _take_sums(self) -> None:
        super()._take_sums()
        moment, total = (self._parameters[name] for name in self._sum_names)
        self._parameters |= {"dscale": moment * self._given, "dbias": total}

    def _names(self) -> tuple[str, ...]:
        return "sum_dy", "sum_dy_xmu", "dscale", "dbias"

    @property
    def statistics(self) -> tuple[Array, Array]:
        """The mean and the inverse standard deviation that are given."""
        return self._mean, self._given

    def _parameter_bound(self, output: str, right: Array, tier: Tier) -> tuple[Array, None]:
        p = self.precision
        error = self.sum_errors(tier)[output in ("sum_dy", "dbias")]
        if output == "dscale":
            moment = np.abs(self._parameters["sum_dy_xmu"])
            between = error + p.u_param * (moment + error) + p.tiny_param
            error = np.abs(self._given) * between + 8 * p.u * np.abs(right)
            error = np.where(np.abs(right) + moment > p.reach, np.inf, error)
        return stored(error, right, 1.0, 0.0, None, p.u, p.u_param, p.tiny_param)[1], None


class BackwardElemt(Expected):
    """dx from sums that are given."""

    composed = ("backward_elemt",)

    def _take_sums(self) -> None:
        """The sums are inputs."""

    def _totals(self) -> tuple[Array, Array, int]:
        return self.wide("sum_dy"), self.wide("sum_dy_xmu"), self.problem.count

    def _total_errors(self, tier: Tier) -> tuple[Array, Array]:
        """Say how far sum_dy and r sum_dy_xmu may be off."""
        return np.zeros(self._mean.shape), np.zeros(self._mean.shape)

    def formula(self, output: str) -> tuple[list[Array], Callable[..., Array]]:
        """The terms of dx."""
        total, moment, n = self._totals()
        return [self.wide("scale") * self._inverse, total / n, self._inverse * self._inverse * (moment / n)], gradient

    def _data_parts(self, output: str, got: Array | None, classes: tuple[Tier, ...]) -> Iterator[Part]:
        p, (total, moment, n) = self.precision, self._totals()
        alpha, beta, _ = self.blend(output)
        (gain, *others), _ = self.formula(output)
        size = np.maximum(1, np.abs(self._inverse))
        factor = np.maximum(1, np.abs(self.wide("scale"))) * size
        lost = factor * size**2 * (np.abs(total) + np.abs(moment)) > p.reach
        flushed = p.tiny_param * (1 + np.abs(gain) * (1 + np.abs(self._inverse)) / n)
        parameters = [self._mean, gain, *others, np.where(lost, np.inf, 0.0), flushed]
        for tier in classes:
            e_total, e_moment = self._total_errors(tier)
            parameters += [np.abs(gain) * e_total / n, np.abs(gain * self._inverse) * e_moment / n]
        product = 8 * p.u + p.u_param
        for block, (x, dy), values, before in self._walk(output, got, parameters):
            mean, g, c, s, infinite, small, *own = block.parameters
            size = np.abs(g)
            apart, centred = dy - c, x - mean
            first, second = g * apart, g * s * centred
            error = size * ((2 * p.u + p.u_param) * np.abs(c) + 4 * p.u * (np.abs(dy) + np.abs(c)) + p.tiny_param)
            error += np.abs(first) * (4 * p.u + product) + np.abs(second) * (4 * p.u + 5 * product)
            error += size * np.abs(s) * (4 * p.u * (np.abs(x) + np.abs(mean)) + p.tiny)
            error += np.abs(centred) * small + infinite
            kept = alpha * first
            out = (apart - centred * s) * g * alpha
            spread = np.abs(alpha * first) + np.abs(alpha * second)
            if before is not None:
                more = beta * before
                kept, out, spread = kept + more, out + more, spread + 2 * np.abs(more)
            bounds = []
            for i in range(len(classes)):
                whole = error + own[2 * i] + np.abs(centred) * own[2 * i + 1]
                whole = abs(alpha) * whole + 4 * p.u * spread + p.u_out * np.abs(kept) + p.tiny_out
                bound = whole + p.u_out * (np.abs(out) + whole) + p.tiny_out
                bounds.append((bound, decided(bound)))
            yield Part(block.index, out, values, bounds)


class SyncBackward(BackwardElemt):
    """Backward over ranks: their sums, added up, and `BackwardElemt` of them."""

    composed = ("sync_backward",)

    def _take_sums(self) -> None:
        Expected._take_sums(self)

    def _totals(self) -> tuple[Array, Array, int]:
        return self._parameters["dbias"], self._parameters["dscale"] / self._inverse, self.problem.m

    def _total_errors(self, tier: Tier) -> tuple[Array, Array]:
        e_dscale, e_dbias = self.sum_errors(tier)
        return e_dbias, e_dscale

    def sum_errors(self, tier: Tier) -> tuple[Array, Array]:
        """E of dscale and of dbias."""
        p, ranks = self.precision, self.problem.ranks
        e_dscale, e_dbias = super().sum_errors(tier if tier.exact else tier._replace(h=tier.h + ranks))
        total, weighted = self._absolute_sums(False)
        stored_ = 0.0 if tier.exact else p.u_param * total
        return e_dscale + (8 * p.u + 2 * p.u_param) * weighted, e_dbias + stored_


class SyncTraining(Expected):
    """Training over ranks, whose statistics are merged."""

    composed = ("sync_train",)

    def _take_moments(self) -> None:
        super()._take_moments()
        problem, moments, p, start = self.problem, self.moments, self.precision, 0
        own = []
        for images in problem.shares:
            x, share = self.inputs.x[start : start + images], images / problem.dims[0]
            start += images
            if images:
                found = reference.stats(x, epsilon=problem.epsilon, axis=self._axis)
                total = reference.reduce_blocks(np.abs, (x,), problem.mode)[0]
                own.append((share, found.mean, found.variance, total / (problem.m * images / problem.dims[0])))
        weights, means, variances, absolutes = (np.stack(a) for a in zip(*own, strict=True))
        weights = weights.reshape(-1, *(1,) * moments.mean.ndim)
        ranks, size, v = len(own), np.abs(moments.mean), moments.variance
        lost = (moments.absolute * problem.m > p.reach) | (problem.m * v > p.reach)

        def of(tier: Tier) -> Deviations:
            h, u = tier.h, p.u
            spread = None if tier.spread is None else math.sqrt(ranks) * tier.spread * u
            of_rank = mean_deviation(tier, h + 2, means, variances, absolutes, u, p.tiny)
            within = (h + 4) * u * (variances + np.abs(means) * np.sqrt(variances))
            if spread is not None:
                of_rank = of_rank + spread * np.abs(means)
            d_mean = sum(weights * of_rank, (ranks + 6) * u * moments.absolute + p.tiny)
            each = of_rank + d_mean + 9 * u * (np.abs(means) + size)
            apart = 2 * np.abs(means - moments.mean) * each + each**2
            within = within + of_rank**2
            if spread is not None:
                within = within + spread * variances
            d_variance = sum(weights * (apart + within), (ranks + 20) * u * v + p.tiny * (4 + 4 * np.sqrt(v)))
            one_pass = h + ranks + 8 if tier.one_pass else None
            stored_ = 17 * u + 2 * p.u_param
            d = completed(moments, d_mean, d_variance, one_pass, stored_, problem.epsilon, u, p.tiny)
            return in_range(d, lost)

        self.deviations = of

    def _running_bound(self, output: str, d: Deviations) -> Array:
        return super()._running_bound(output, d) + 2 * self.precision.u * np.abs(self._parameters[output])


class GatherStats(Expected):
    """Statistics of several batches, merged."""

    composed = ("gather_stats",)

    def _names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def ordinary(self, tier: Tier) -> Array:
        """Say which statistics can be judged."""
        d = self.deviations(tier)
        return np.isfinite(self._mean + self._inverse + d.mean + d.inverse) & ~d.undecided

    def _training(self) -> None:
        problem, inputs = self.problem, self.inputs
        m2s, n = inputs.need("m2s"), sum(problem.counts)
        old = {name: inputs.need(name).reshape(-1) for name in ("mean", "variance") if problem.running}
        found = reference.gather_stats(
            inputs.x, m2s, problem.counts, running_mean=old.get("mean"), running_variance=old.get("variance"),
            exponential_average_factor=problem.factor, epsilon=problem.epsilon,
        )  # fmt: skip
        shape = problem.parameter_dims
        self._parameters = {name: value.reshape(shape) for name, value in found._asdict().items() if value is not None}
        self._mean, variance, self._inverse = (self._parameters[n] for n in ("mean", "variance", "inv_variance"))
        present = np.array(problem.counts) > 0
        weights = (np.array(problem.counts, np.float64)[present] / n).reshape(-1, 1)
        means = inputs.x.astype(np.float64)[present]
        absolute, second = ((weights * a).sum(axis=0, keepdims=True) for a in (np.abs(means), means**2))
        square = second + m2s.astype(np.float64)[present].sum(axis=0, keepdims=True) / n
        self.moments = Moments(self._mean, variance, absolute, square, self._inverse)
        size, apart = np.abs(self._mean), np.abs(means - self._mean)
        p, lost = self.precision, n * np.maximum(absolute, square) > self.precision.reach

        def of(tier: Tier) -> Deviations:
            h, u = tier.h, p.u
            d_mean = (h + 6) * u * absolute + p.tiny
            each = d_mean + 9 * u * (np.abs(means) + size)
            d_variance = (h + 12) * u * variance + (weights * (2 * apart * each + each**2)).sum(axis=0, keepdims=True)
            d_variance = d_variance + p.tiny * (2 + 4 * np.sqrt(variance))
            one_pass = h + 8 if tier.one_pass else None
            d = completed(self.moments, d_mean, d_variance, one_pass, 9 * u, problem.epsilon, u, p.tiny)
            return in_range(d, lost)

        self.deviations = of

    def _parameter_bound(self, output: str, right: Array, tier: Tier) -> tuple[Array, Array | None]:
        p, problem, d = self.precision, self.problem, self.deviations(tier)
        n, f = sum(problem.counts), problem.factor
        name = output.removeprefix("running_")
        error = {"mean": d.mean, "variance": d.variance, "inv_variance": d.inverse}[name]
        if name == output:
            bound = error + p.u_param * (np.abs(right) + error) + p.tiny_param
            return bound, d.undecided if name == "inv_variance" else None
        c, roundings = (1.0, 5) if name == "mean" else (n / (n - 1), 7)
        kept = np.abs((1 - f) * self.wide(name)) if f != 1 else 0.0
        size = kept + np.abs(f * c * self._parameters[name])
        return f * c * error + (roundings * p.u + p.u_param) * size + p.tiny_param, None


_KINDS = (
    *(Expected, Activated, GatherStats, SyncTraining, SyncBackward, TrainingGrad, Frozen),
    *(BackwardReduce, BackwardElemt),
)
"""The classes that have the bounds of a problem."""


def expect(problem: Problem, inputs: Inputs) -> Expected:
    """The right outputs of a problem and the bounds of each; `inputs`, as stored, need not be `generate`'s."""
    checked(problem)
    return next(kind for kind in _KINDS if kind.knows(problem))(problem, inputs)
