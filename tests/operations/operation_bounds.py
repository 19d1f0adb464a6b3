"""A-priori bounds of composed operations, from the pieces of `pybnorm.check.judging.bounds`.

Every vendor call is one of its formulas; a composition passes the error of one call's result to the next as the error
of an input. Relative errors of chains of products are kept as (1 + e1)(1 + e2)... - 1. All arrays are float64 in x's
own rank; parameters have 1 in the reduced axes, so NumPy broadcasts them.
"""

import math

import numpy as np

from pybnorm import reference
from pybnorm.check.judging.bounds import (
    Moments,
    Tier,
    backward_error,
    depth,
    deviations,
    forward_error,
    precision,
    stored,
)


class Setting:
    """x, its axes and its precision."""

    def __init__(self, x, dtype, axis):
        self.x, self.dtype, self.p = x.astype(np.float64), dtype, precision(dtype)
        folded = reference.fold(x.shape, axis)
        self.derived = folded.derived
        self.reduced = tuple(
            a for a, (d, k) in enumerate(zip(x.shape, folded.derived, strict=True)) if k != d or d == 1
        )
        self.m = math.prod(x.shape) // math.prod(folded.derived)
        self.h = depth(self.m)

    def sum(self, values):
        return np.broadcast_to(values, self.x.shape).sum(axis=self.reduced, keepdims=True)

    # A product of vectors is the inference of one with the other as its scale, mean 0, variance 1, bias 0:
    # forward_error with r = 1, dmu = 0, dr = 4u is 8u |a b|; then it is stored.
    @property
    def product(self):
        return 8 * self.p.u + self.p.u_param

    # 1 / sqrt(v + eps) is the inference of ones with dr = 4u r: again 8u r, then stored.
    @property
    def inverse(self):
        return 8 * self.p.u + self.p.u_param

    # axpby of a vector by a factor: the factor is rounded, the product is, and it is stored.
    @property
    def scaling(self):
        return 2 * self.p.u + self.p.u_param

    def parameter(self, right, error):
        """(right, bound) of a vector as stored."""
        return right, error + self.p.u_param * (np.abs(right) + error) + self.p.tiny_param

    def data_stored(self, right, error, alpha=1.0, beta=0.0, prior=None):
        """(right, bound) of blended data as stored."""
        prior = None if prior is None else prior.astype(np.float64)
        return stored(error, right, alpha, beta, prior, self.p.u, self.p.u_out, self.p.tiny_out)

    def blended(self, right, error, alpha, beta, prior):
        """(right, bound) of a blended parameter as stored."""
        prior = None if prior is None else prior.astype(np.float64)
        return stored(error, right, alpha, beta, prior, self.p.u, self.p.u_param, self.p.tiny_param)

    def statistics(self, epsilon, one_pass=False):
        """`Moments` of x and the deviations of a stable or of a one-pass kernel."""
        found = reference.stats(self.x, epsilon=epsilon, axis=self.axis_of())
        moments = Moments(
            found.mean,
            found.variance,
            self.sum(np.abs(self.x)) / self.m,
            self.sum(self.x**2) / self.m,
            found.inv_variance,
        )
        d = deviations(moments, epsilon, self.p.u, Tier("B" if one_pass else "A", one_pass, self.h))
        assert one_pass or not d.undecided.any()
        return moments, d

    def axis_of(self):
        return tuple(a for a in range(self.x.ndim) if a not in self.reduced)

    def running(self, factor, old, batch, slack, roundings):
        """Bound of a running statistic: as in `pybnorm.check.judging.bounds`."""
        kept = np.abs((1 - factor) * old)
        return factor * slack + (roundings * self.p.u + self.p.u_param) * (kept + np.abs(factor * batch))

    def normalized(self, x, mean, r, scale, bias, d_mean, d_inverse, relative=0.0):
        """E of scale * r * (x - mean) + bias; `relative`: how far off the scale that the call was given is."""
        error = forward_error(x, mean, r, scale, bias, (d_mean, d_inverse), self.p.u)
        return error + relative * (np.abs(scale) * r * np.abs(x - mean) + error)

    def variance_by_running(self, moments, d):
        """(right, bound) of `stats`' variance: a running variance of factor 1 on a prior 0, times (m - 1) / m."""
        if self.m == 1:
            return moments.variance, np.full_like(moments.variance, self.p.tiny_param)
        c = self.m / (self.m - 1)
        unbiased = self.running(1.0, 0.0, c * moments.variance, c * d.variance, 5)
        scaled = unbiased + 2 * self.p.u * (c * moments.variance + unbiased)
        return self.parameter(moments.variance, scaled / c)

    def sums(self, dy, mean, r, dscale, dbias, d_mean=0.0, d_inverse=0.0):
        """E of dscale and dbias in class A, with `d_mean` and `d_inverse` of the statistics that the call is given."""
        weighted = self.sum(np.abs(dy) * (np.abs(self.x - mean) + d_mean) * (r + d_inverse))
        e_dscale = (self.h + 4) * self.p.u * weighted + r * d_mean * np.abs(dbias) + np.abs(dscale) * d_inverse / r
        return e_dscale, self.h * self.p.u * self.sum(np.abs(dy))

    def gradient(self, dy, dx, mean, r, scale, dscale, dbias, d_mean=0.0, d_inverse=0.0):
        """E of dx in class A."""
        e_dscale, e_dbias = self.sums(dy, mean, r, dscale, dbias, d_mean, d_inverse)
        errors = d_mean, d_inverse, e_dscale, e_dbias
        return backward_error(self.x, dy, dx, mean, r, scale, dscale, dbias, errors, self.m, self.p.u, False)


def chain(*relative):
    """Relative error of a product of factors that are each off by so much."""
    return math.prod(1 + e for e in relative) - 1
