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

``h = min(m, max(16 + 4 sqrt(m), 64 + log2(m / 64)))``. No sum of at most 64 terms, in any order, has more roundings on
a path, and no sum by blocks of at most 64 terms that are then added pairwise: no such kernel can break A, whatever the
data. Long chains can, where roundings add up. They are CHAIN (`pybnorm.check.judging.bounds.chains`): the chains are
made on the very data, and every element has to be as near to their result as the class allows about the correct one.

Where every sum of the data is free of rounding in any order (`pybnorm.check.language.data.sums_are_exact`) the sums
contribute nothing and what is left is the one rounding of the division by m, or of the multiplication by a rounded 1/m:
h = 1, the class called "exact". From `LONG` terms on, sums over dy have not even that: E_b = 4 u \|dbias\| and, with
given statistics, E_s = 6 u \|dscale\|.

Welford's recurrence divides by 1 ... m and so rounds even there; an output that depends on statistics taken from x may
therefore fall back from "exact" and still pass, which the verdict says. With less than `LONG` terms it falls back to A.
With more to the class "rounded", which is as wide as the recurrence is: its running mean wanders about mu, so that
dmu = 8 u ((h+1) \|mu\| + sqrt(v)) + 2 u A, next to nothing where mu is 0; E_s has 16 u W in place of (h+4) u W. An
update k rounds by at most u \|mean\| and of that k/m is left at the end: at most u \|mu\| (m+1)/2, which dmu holds to
m = 4,500; beyond, roundings that were independent would exceed it with probability 2 exp(-55**2/2), and the wandering
part, u sqrt(v/2), 8 sqrt(v) u with 2 exp(-11**2/2). They are not quite independent: of 140,000 statistics (one to 256
chains, m to 401,408) the worst mean is at 0.34 of its bound and the worst variance at 0.69. No
excuse has a result that an unbiased variance, v m / (m - 1), explains within "exact": that is FAIL. More is said by the
outputs of a call together (`pybnorm.check.judging.whole_call`).

Forward
-------
* mean: dmu = (h+1) u A; stored + u_p \|mu\|
* variance, A: dv = (h+4) u (v + \|mu\| sqrt(v)) + dmu**2 (the kappa**1 term is Welford's);
  B: max(A, (h+3) u Q + 2 \|mu\| dmu + dmu**2 + 2 u mu**2)
* inverse standard deviation: dr = max(1/sqrt(max(v-dv, 0) + eps) - r, r - 1/sqrt(v+dv+eps)) + 4 u r; stored + u_p r
* y: E = \|scale\| (r dmu + \|x-mu\| dr) + 4 u (\|scale\| r (\|x\|+\|mu\|) + \|bias\|); bound E + u_o (\|y\|+E) + t_o.
  Inference: dmu = 0 and dr = 4 u r. \|x\|+\|mu\|, not \|x-mu\|, because a kernel may fold to y = a x + b.
* running mean: f dmu + (3u+u_p) (\|(1-f) old\| + \|f mu\|)
* running variance: f c dv + (5u+u_p) (\|(1-f) old\| + f c v), c = m/(m-1), with unbiased=0 1

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
statistics have dmu = t; and E_s + r t S, because each x may be flushed whatever the sign of its dy. Where a sum or
product that a correct kernel may form is beyond half the largest number of the compute type (m A, m v, the terms of y,
m times those of dx), the correct result may be lost on the way to it, and what follows from it is not judged; the same
where v and epsilon may both be flushed to 0.

Verdicts
--------
A NaN or infinity where the reference is finite and \|reference\| + bound is in range is FAIL. What must come out where
the reference is not finite, or certainly out of the output's range, says `pybnorm.check.judging.bounds.not_finite`;
elements of which it says nothing are not judged. Where dr/r > 1/4 the first-order terms above mean nothing: elements of
that statistic that depend on dr are INCONCLUSIVE, unless a stricter class that is conclusive holds them.

A store that truncates to 16 bits is off by up to one ulp, twice what rounding is, and is a FAIL. Truncation is
monotone, so the values that it makes of [reference - E, reference + E] are those from the truncated lower to the
truncated upper end. Where every judged element is one of them, and many are no rounding of any value in the interval,
the verdict says that the results are truncated.
"""

from pybnorm.check.judging.bounds.classes import LONG, Tier, depth, precision, tiers
from pybnorm.check.judging.bounds.composed import expect
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.judging.bounds.formulas import Moments, backward_error, deviations, forward_error, stored
from pybnorm.check.judging.bounds.judging import TRUNCATED, UNBIASED, judge, judge_by
from pybnorm.check.judging.bounds.trust import untrusted
from pybnorm.check.judging.bounds.verdict import Point, Status, Verdict

__all__ = [
    "LONG",
    "TRUNCATED",
    "UNBIASED",
    "Expected",
    "Moments",
    "Point",
    "Status",
    "Tier",
    "Verdict",
    "backward_error",
    "depth",
    "deviations",
    "expect",
    "forward_error",
    "judge",
    "judge_by",
    "precision",
    "stored",
    "tiers",
    "untrusted",
]
