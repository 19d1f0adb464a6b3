"""The terms of a bound at one element, by the formulas in `pybnorm.check.judging.bounds`, with their sizes."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.reference.namespaces import Array


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a bound."""

    formula: str
    size: float


def terms(expected: Expected, output: str, index: tuple[int, ...], tier: Tier) -> list[Term]:
    """The summands of the bound of `output` at `index` in one class; their sum is the bound."""
    if type(expected) is not Expected:  # with formulas of its own
        return _by_cause(expected, output, index, tier)
    element = _Element(expected, index, tier)
    with np.errstate(all="ignore"):
        found: list[Term] = getattr(element, output)()
    return found


def _by_cause(expected: Expected, output: str, index: tuple[int, ...], tier: Tier) -> list[Term]:
    """The bound of formulas that have no terms by name here: what each cause adds, taken away one after the other."""
    p, one = expected.precision, copy.copy(expected)
    causes: tuple[tuple[str, dict[str, float]], ...] = (
        (f"sums: h = {tier.h:.4g}", {}),
        ("the result, stored: u_o", {"u_out": 0.0}),
        ("parameters and vectors, stored: u_p", {"u_param": 0.0}),
        ("flushed: t, t_o, t_p", {"tiny": 0.0, "tiny_out": 0.0, "tiny_param": 0.0}),
    )
    found, before = [], _bound(expected, output, index, tier)
    if math.isfinite(before):
        for text, less in causes:
            one.precision = one.precision._replace(**less)
            now = _bound(one, output, index, tier._replace(h=0.0))
            found.append(Term(text, before - now))
            before = now
    found.append(Term(f"statistics, products and differences: u = {p.u:.3g}", before))
    return [term for term in found if term.size != 0] or found[-1:]


def _bound(expected: Expected, output: str, index: tuple[int, ...], tier: Tier) -> float:
    for part in expected.parts(output, None, (tier,)):
        if all(s.start <= i < s.stop for i, s in zip(index, part.index, strict=True)):
            return float(part.classes[0][0][tuple(i - s.start for i, s in zip(index, part.index, strict=True))])
    return math.nan


class _Element:
    """The quantities of the statistic that an element belongs to."""

    def __init__(self, expected: Expected, index: tuple[int, ...], tier: Tier) -> None:
        self.expected, self.index, self.tier = expected, index, tier
        mean, inverse = expected.statistics
        self.place = tuple(min(i, n - 1) for i, n in zip(index, mean.shape, strict=True))
        self.mean, self.r = float(mean[self.place]), float(inverse[self.place])
        with np.errstate(all="ignore"):
            d = expected.deviations(tier)
        self.d_mean, self.d_variance, self.d_inverse = (float(a[self.place]) for a in (d.mean, d.variance, d.inverse))
        self.p, self.m = expected.precision, expected.problem.m

    def at(self, array: Array) -> float:
        """The value of this statistic in an array of the parameters' size."""
        return float(array.reshape(self.expected.statistics[0].shape)[self.place])

    def mean_formula(self) -> str:
        """Write the formula of dmu in this class."""
        tier = self.tier
        if not self.expected.problem.recomputes:
            return "t"
        text = "8 u ((h+1) |mu| + sqrt(v)) + 2 u A" if tier.recurrence else "(h+1) u A"
        return text + (f" + {tier.spread:.3g} u |mu|" if tier.spread is not None else "")

    def saved_mean(self) -> list[Term]:
        return [
            Term(f"dmu = {self.mean_formula()}", self.d_mean),
            Term("stored: u_p |mu|", self.p.u_param * abs(self.mean)),
            Term("flushed: t_p", self.p.tiny_param),
        ]

    def saved_inv_variance(self) -> list[Term]:
        if self.expected.problem.saves_variance:
            size = float(self.expected.moments.variance[self.place])
            return [
                Term("dv", self.d_variance),
                Term("(4 u + u_p) v", (4 * self.p.u + self.p.u_param) * size),
                Term("flushed: t_p", self.p.tiny_param),
            ]
        return [
            Term(f"dr, r over v -+ dv with dv = {self.d_variance:.3g}, + 4 u r", self.d_inverse),
            Term("stored: u_p r", self.p.u_param * self.r),
            Term("flushed: t_p", self.p.tiny_param),
        ]

    def running(self, text: str, old: Array, new: float, slack: float, roundings: int) -> list[Term]:
        f, p = self.expected.problem.factor, self.p
        kept = abs((1 - f) * self.at(old.astype(np.float64))) + abs(f * new)
        return [
            Term(text, f * slack),
            Term(f"({roundings} u + u_p) (|(1-f) old| + |f new|)", (roundings * p.u + p.u_param) * kept),
            Term("flushed: t_p", p.tiny_param),
        ]

    def running_mean(self) -> list[Term]:
        old = self.expected.inputs.need("mean")
        return self.running(f"f dmu, dmu = {self.mean_formula()}", old, self.mean, self.d_mean, 3)

    def running_variance(self) -> list[Term]:
        c = self.expected.problem.correction
        variance = float(self.expected.moments.variance[self.place])
        old = self.expected.inputs.need("variance")
        return self.running(
            "f dv m/(m-1)" if self.expected.problem.unbiased else "f dv", old, c * variance, c * self.d_variance, 5
        )

    def dbias(self) -> list[Term]:
        text = "E_b = 4 u |dbias|" if self.tier.exact else f"E_b = h u S, h = {self.tier.h:.4g}"
        right = self.at(self.expected.outputs["dbias"])
        return self.finish("dbias", right, [Term(text, self.at(self.expected.sum_errors(self.tier)[1]))])

    def dscale(self) -> list[Term]:
        return self.finish("dscale", self.at(self.expected.outputs["dscale"]), self.dscale_terms())

    def dscale_terms(self) -> list[Term]:
        tier = self.tier
        whole = self.at(self.expected.sum_errors(tier)[0])
        dscale, dbias = (abs(self.at(self.expected.outputs[n])) for n in ("dscale", "dbias"))
        if math.isinf(whole):
            return [Term("a product or sum may be out of range", whole)]
        if tier.exact and not self.expected.problem.recomputes:
            return [Term("E_s = 6 u |dscale| + r t S", whole)]
        moved = [
            Term("r dmu |dbias|", self.r * self.d_mean * dbias),
            Term("|dscale| dr/r", dscale * self.d_inverse / self.r),
        ]
        depth = "16" if tier.recurrence else f"(h+4), h = {tier.h:.4g},"
        return [Term(f"{depth} u W + r t S", whole - sum(term.size for term in moved)), *moved]

    def y(self) -> list[Term]:
        x = self.values("x")
        signed, shift = self.parameter("scale"), self.parameter("bias")
        scale, bias = abs(signed), abs(shift)
        size = scale * self.r * (abs(x) + abs(self.mean)) + bias
        found = [
            Term(f"|scale| r dmu, dmu = {self.mean_formula()}", scale * self.r * self.d_mean),
            Term("|scale| |x-mu| dr", scale * abs(x - self.mean) * self.d_inverse),
            Term("4 u (|scale| r (|x|+|mu|) + |bias|)", 4 * self.p.u * size),
        ]
        return self.finish("y", signed * self.r * (x - self.mean) + shift, found)

    def dx(self) -> list[Term]:
        u, m, r = self.p.u, self.m, self.r
        x, dy, signed = self.values("x"), self.values("dy"), self.parameter("scale")
        scale = abs(signed)
        mean_dy, slope = (self.at(self.expected.outputs[n]) / m for n in ("dbias", "dscale"))
        e_dscale, e_dbias = (self.at(e) for e in self.expected.sum_errors(self.tier))
        normal = abs(x - self.mean) * r
        w = (abs(x) + abs(self.mean)) * r if self.tier.one_pass else normal
        moved = r * self.d_mean + normal * self.d_inverse / r + 3 * u * w
        result = signed * r * (dy - mean_dy - (x - self.mean) * r * slope)
        size = abs(dy) + abs(mean_dy) + normal * abs(slope)
        found = [
            Term("|scale| r 5 u (|dy| + |dbias|/m + |x_hat| |dscale|/m)", scale * r * 5 * u * size),
            Term("|scale| r E_b/m", scale * r * e_dbias / m),
            Term("|scale| r |x_hat| E_s/m", scale * r * normal * e_dscale / m),
            Term("|scale| r |dscale|/m D", scale * r * abs(slope) * moved),
            Term("|dx| (dr/r + 2 u)", abs(result) * (self.d_inverse / r + 2 * u)),
        ]
        if self.expected.problem.parameter_dtype.itemsize == 2:
            kept = scale * r * self.p.u_param * (abs(mean_dy) + normal * abs(slope))
            found.append(Term("|scale| r u_p (|dbias| + |x_hat| |dscale|)/m", kept))
        return self.finish("dx", result, found)

    def values(self, name: str) -> float:
        return float(self.expected.inputs.need(name)[self.index])

    def parameter(self, name: str) -> float:
        return self.at(self.expected.inputs.need(name).astype(np.float64))

    def finish(self, output: str, right: float, found: list[Term]) -> list[Term]:
        """Blended and stored."""
        p, data = self.p, output in ("y", "dx")
        alpha, beta, prior = self.expected.blend(output)
        out = alpha * right
        if alpha != 1 or beta != 0:
            found = [Term(f"|alpha| {term.formula}", abs(alpha) * term.size) for term in found]
            size = abs(out)
            if prior is not None and beta != 0:
                before = float(prior.reshape(self.expected.shape(output))[self.index])
                out, size = out + beta * before, size + abs(beta * before)
            found.append(Term("blended: 2 u (|alpha out| + |beta prior|)", 2 * p.u * size))
        error = sum(term.size for term in found)
        u_out, tiny = (p.u_out, p.tiny_out) if data else (p.u_param, p.tiny_param)
        name = "o" if data else "p"
        stored = Term(f"stored: u_{name} (|out| + E)", u_out * (abs(out) + error))
        return [*found, stored, Term(f"flushed: t_{name}", tiny)]
