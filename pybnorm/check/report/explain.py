"""Explains how a case was judged: ``pybnorm check --explain CASE``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

from pybnorm.check.judging.bounds import Expected, Point, Status, Tier, Verdict, expect, tiers
from pybnorm.check.judging.bounds.tally import compare
from pybnorm.check.judging.bounds.terms import Term, terms
from pybnorm.check.judging.results import CaseResult, ratio_text, size_text
from pybnorm.check.judging.whole_call import Record, judge_call
from pybnorm.check.language.data import generate, sums_are_exact
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import runner
from pybnorm.check.run.guarded import execute
from pybnorm.check.run.session import Session
from pybnorm.reference.namespaces import Array

SCHEMA = "pybnorm.explain/1"


@dataclasses.dataclass
class Held:
    """An output held against one class."""

    name: str
    h: float
    gives: str
    """The status of an output that this class holds."""
    ratio: float
    over: int
    undecided: int
    noticed: float
    """Smallest relative error of an element that this class would not have held."""
    worst: Point | None
    terms: list[Term]
    """Of the bound at the worst element."""


@dataclasses.dataclass
class Shown:
    """The steps by which one output was judged."""

    output: str
    status: Status
    decided_by: str
    """The class whose verdict it is."""
    size: str
    """How far off it is, in words."""
    where: str
    """Where the wrong elements are."""
    note: str
    noticed: float
    classes: list[Held]
    """Those that were tried, strictest first."""
    not_needed: list[str]
    """Looser classes, which were not."""
    excuse: str
    roundings: str
    """How far its sum is off, and how far roundings leave it; empty if that is not asked."""


@dataclasses.dataclass
class Explanation:
    """The steps by which a call was judged."""

    case: str
    m: int
    channels: int
    u: float
    exact: bool
    """Whether no sum of the data rounds, in any order."""
    scatter: float
    outputs: list[Shown]
    judge: str = "numpy"
    """What judged the case (`pybnorm.check.run.judge_devices`); how it did is computed by NumPy."""


def explain(problem: Problem, expected: Expected, outputs: Mapping[str, Array]) -> Explanation:
    """Say how `outputs` are judged."""
    record = Record()
    verdicts = judge_call(expected, outputs, record)
    return Explanation(
        case=str(problem),
        m=problem.m,
        channels=math.prod(problem.parameter_dims),
        u=expected.precision.u,
        exact=sums_are_exact(problem),
        scatter=record.scatter,
        outputs=[_shown(expected, verdict, outputs[name], record) for name, verdict in verdicts.items()],
    )


def _shown(expected: Expected, verdict: Verdict, got: Array, record: Record) -> Shown:
    name = verdict.output
    classes = tiers(expected.problem, name)
    tried = [tier for tier in classes if tier.name in verdict.ratios]
    others = [tier.name for tier in classes if tier.name not in verdict.ratios]
    said = size_text(verdict), verdict.where, verdict.note, verdict.noticed
    held = [_held(expected, name, got, tier) for tier in tried]
    why = record.excuses.get(name, ""), record.roundings.get(name, "")
    return Shown(name, verdict.status, verdict.tier, *said, held, others, *why)


def _held(expected: Expected, output: str, got: Array, tier: Tier) -> Held:
    tally = compare(expected, output, got, (tier,))
    worst = tally.worst[0] if tally.worst else None
    index = worst.index if worst else (0,) * len(expected.shape(output))
    noticed = tally.noticed if math.isfinite(tally.noticed) else 0.0
    counts = tally.ratio, tally.over, tally.undecided
    return Held(tier.name, tier.h, tier.status.value, *counts, noticed, worst, terms(expected, output, index, tier))


def explain_line(opener: Callable[[str], Session], backend: str, case: str) -> tuple[CaseResult, Explanation | None]:
    """Run the problem of a line in this process, and say how it was judged; None if there was nothing to judge."""
    result = runner.run_line(opener, backend, case)
    if not result.verdicts:
        return result, None
    session = runner.opened(opener, backend)
    problem = session.claimed(Problem.parse(case))
    inputs = generate(problem)
    outputs = execute(problem, inputs, session).outputs
    return result, dataclasses.replace(explain(problem, expect(problem, inputs), outputs), judge=result.judge)


def lines(explanation: Explanation) -> Iterator[str]:
    """The explanation as text, within 80 columns but for what is longer in one piece."""
    e = explanation
    yield f"{e.m:,} terms in a sum, {e.channels} statistics, u = {e.u:.3g}"
    yield "sums of these data do not round, in any order" if e.exact else "sums of these data round"
    yield f"judged by {e.judge}"
    if math.isfinite(e.scatter):
        yield f"outputs that are exact leave the mean a scatter of {e.scatter:.3g} units in the last place"
    for shown in e.outputs:
        yield ""
        yield f"{shown.output}: {shown.status.value}, {shown.size}"
        if shown.where:
            yield f"  where: {shown.where}"
        if shown.note:
            yield f"  {shown.note}"
        if shown.noticed:
            yield f"  smallest relative error that would have been noticed: {shown.noticed:.1e}"
        for held in shown.classes:
            yield from _class_lines(held)
        if shown.not_needed:
            yield f"  not needed: class {', '.join(shown.not_needed)}"
        if shown.excuse:
            yield f"  excuse of Welford's recurrence: {shown.excuse}"
        if shown.roundings:
            yield f"  {shown.roundings}"


def _class_lines(held: Held) -> Iterator[str]:
    state = "held" if not held.over and not held.undecided else f"{held.over} elements over the bound"
    state += f", {held.undecided} undecided" if held.undecided else ""
    yield f"  class {held.name} (h = {held.h:.4g}, gives {held.gives}): {state}"
    if held.worst is None:
        yield "    no error at all; the bound of the first element:"
    else:
        point = held.worst
        yield f"    worst error / bound {ratio_text(point.ratio)} at [{','.join(map(str, point.index))}]:"
        yield f"      correct {point.reference:.9g}, got {point.got:.9g}, error {abs(point.got - point.reference):.3g}"
    whole = sum(term.size for term in held.terms)
    for term in held.terms:
        share = f"{100 * term.size / whole:5.1f} %" if 0 < whole < math.inf else ""
        yield f"      {term.cause:<56}{term.size:>10.3g} {share}".rstrip()
    yield f"      {'bound':<56}{whole:>10.3g}"
