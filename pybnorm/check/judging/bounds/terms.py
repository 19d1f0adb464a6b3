"""The terms of a bound at one element, by their causes, with their sizes."""

from __future__ import annotations

import copy
import dataclasses
import math

from pybnorm.check.judging.bounds.classes import Tier
from pybnorm.check.judging.bounds.expected import Expected


@dataclasses.dataclass(frozen=True)
class Term:
    """One summand of a bound."""

    cause: str
    size: float


def terms(expected: Expected, output: str, index: tuple[int, ...], tier: Tier) -> list[Term]:
    """The summands of the bound of `output` at `index`: what each cause adds, taken away one after the other."""
    p, one = expected.precision, copy.copy(expected)
    causes: dict[str, tuple[str, ...]] = {
        f"sums: h = {tier.h:.4g}": (),
        "the result, stored: u_o": ("u_out",),
        "parameters and vectors, stored: u_p": ("u_param",),
        "flushed: t, t_o, t_p": ("tiny", "tiny_out", "tiny_param"),
    }
    found, before = [], _bound(expected, output, index, tier)
    if math.isfinite(before):
        for text, none in causes.items():
            one.precision = one.precision._replace(**dict.fromkeys(none, 0.0))
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
