"""The verdicts on a whole call: what its outputs say together.

Exact data
----------
Where the data's sums have no rounding, only Welford's recurrence may round. That excuse is gone

* if a statistic of the call is wrong even for the recurrence: what else was rounded, was not rounded by it;
* as far as the mean, or the inverse standard deviation, shows that there was no rounding. Let the recurrence scatter
  the mean by s units in the last place. Each of n channels then hits the correct value, rounded, with a probability of
  P(|N(0, s)| < 1/2) at most; that all n hit it has a probability below `LEVEL` if s is larger than a certain s(n). The
  variance is allowed 16 + (25 + sqrt(m)/10) s(n) times u v beside what "exact" allows. The 25: a chain rounds its sum
  of squares as often, and as much of it, as its mean, so that both scatter alike, in u v as in u |mean|, which is at
  most 2 s; were roundings independent, 12 standard deviations (2e-33). They are not: a sum of squares of L terms is
  too small by up to u v L/100, in every chain, and merging more chains lessens the scatter of the mean and not this.
  s falls as L/sqrt(m), hence sqrt(m)/10. Measured on 1 to 1,024 chains of 98 to 100,352 terms, merged one by one or in
  a tree, 140,000 statistics of m to 1.6 million terms: at most 0.85 of this width. The other way round it is the
  same; a variance may be off by 2 u v and its inverse standard deviation be correct, so that the 1/2 above is 2. Where
  both that are saved are correct to the bit, y and the running statistics are made of them and have no excuse.

Fewer than `FEWEST` statistics leave s(n) so large that nothing is told. A case of so few, long sums and an output that
only the recurrence excuses, by more than `WIDEST` u, is MISTRUSTED: it could not tell.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping

from pybnorm.check.judging.bounds import Expected, Status, Tier, Verdict, judge, judge_by, tiers
from pybnorm.check.judging.bounds.classes import depth
from pybnorm.check.judging.bounds.where import put
from pybnorm.check.judging.conventions import convention_of
from pybnorm.check.judging.elements import apart, asked
from pybnorm.check.judging.roundings import LEVEL, beyond, factors
from pybnorm.reference.namespaces import Array


@dataclasses.dataclass
class Record:
    """The steps by which a call was judged, beside its verdicts."""

    scatter: float = math.inf
    """s(n) of the outputs that are correct to the bit; infinite: none is, or the data are not exact."""
    excuses: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of each output that only Welford's recurrence could excuse, whether it does and why."""
    roundings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of each sum of ordinary data, how far it is off and how far roundings leave it."""


_STAYS = ("held against", "elements out of range")
"""Text in the notes that a convention leaves."""
_APART = "elements apart from the others: no statistics or sums, however rounded, give all of them"


def judge_call(expected: Expected, outputs: Mapping[str, Array], record: Record | None = None) -> dict[str, Verdict]:
    """The verdict on every output of a call, as stored, in logical order; `record` takes how it was judged.

    Each is held against its bound (`bounds.judge`), elements against the others of their statistic (`elements`), sums
    of ordinary data against roundings (`roundings`), and what is wrong against other software (`conventions`).
    """
    verdicts = {name: judge(expected, name, outputs[name]) for name in expected.outputs}
    _excuse(expected, outputs, verdicts, record or Record())
    for name, verdict in verdicts.items():
        if verdict.status == Status.FAIL and not verdict.wild:
            convention = convention_of(expected, name, outputs[name])
            if convention is not None:  # in place of what else might explain the output
                kept = [note for note in verdict.note.split("; ") if any(word in note for word in _STAYS)]
                verdict.convention = str(convention)
                verdict.note = "; ".join([verdict.convention, *kept])
    if not any(v.status == Status.FAIL for v in verdicts.values()):
        for name, note in factors(expected, outputs).items():
            _fail(verdicts[name], note)
    held = not any(v.status == Status.FAIL for v in verdicts.values())
    for name, verdict in verdicts.items():
        if verdict.status.correct and asked(expected, name):
            tally, where = apart(expected, name, outputs[name])
            verdict.noticed = min(verdict.noticed, tally.noticed)
            if where is not None:
                put(verdict, where, expected.problem.strides)
                verdict.over, verdict.worst = tally.over, tally.worst
                _fail(verdict, f"{tally.over} {_APART}")
    if held or record is not None:
        found = beyond(expected, outputs)
        for name, relative in found.noticed.items():
            verdicts[name].noticed = min(verdicts[name].noticed, relative)
        for name, note in found.notes.items():
            if verdicts[name].status != Status.FAIL:
                _fail(verdicts[name], note)
                put(verdicts[name], found.over[name].reshape(expected.statistics[0].shape), ())
        if record is not None:
            record.roundings = found.sizes
    return verdicts


def _fail(verdict: Verdict, note: str) -> None:
    verdict.status, verdict.note = Status.FAIL, "; ".join(filter(None, [note, verdict.note]))


FEWEST = 16
"""Statistics that can tell rounded sums from Welford's recurrence."""
WIDEST = 1024.0
"""Units in the last place that its excuse may allow where there are fewer."""
_CANNOT_TELL = f"cannot tell rounded sums from Welford's recurrence: {FEWEST} channels or more can"
_STATISTICS = ("saved_mean", "running_mean", "saved_inv_variance", "running_variance", "dscale")


def _excuse(expected: Expected, outputs: Mapping[str, Array], verdicts: dict[str, Verdict], record: Record) -> None:
    """Take Welford's excuse back from the outputs that have it without a right to it."""

    def rounded() -> list[Verdict]:
        return [v for v in verdicts.values() if v.tier == "rounded" and v.status == Status.PASS]

    def wrong() -> list[str]:
        return [name for name in _STATISTICS if name in verdicts and verdicts[name].status == Status.FAIL]

    for name, within in (("saved_mean", 0.5), ("saved_inv_variance", 2.0)) if rounded() else ():
        if name in verdicts and verdicts[name].identical and verdicts[name].status == Status.PASS:
            record.scatter = min(record.scatter, scatter_of(verdicts[name].elements, within))
    widths = dict.fromkeys(verdicts, 8 * (depth(expected.problem.m) + 1))  # in u, of class "rounded"
    for verdict in rounded():
        record.excuses[verdict.output] = "granted: no output of the call shows that sums were not rounded"
    if record.scatter < math.inf and not wrong():
        saved = all(name in verdicts and verdicts[name].identical for name in ("saved_mean", "saved_inv_variance"))
        for verdict in rounded():
            own, *others = tiers(expected.problem, verdict.output)
            made = saved and (verdict.output == "y" or verdict.output.startswith("running"))
            mine = counted(0.0 if made else record.scatter, expected.problem.m)
            if made and verdict.output != "y":  # a variance may be off by 2 u v where its inverse root is correct
                mine = mine._replace(spread=4.0)
            classes = own, mine, *(tier for tier in others if tier.one_pass)
            again = judge_by(expected, verdict.output, outputs[verdict.output], classes)
            widths[verdict.output] = classes[1].spread or 0.0
            width = f"{classes[1].spread:.3g} u of its size, as far as exact outputs of the call leave room"
            record.excuses[verdict.output] = f"granted: within {width}"
            if again.status == Status.WARN:
                verdicts[verdict.output] = again
                record.excuses[verdict.output] = f"refused: not within {width}, and one pass"
            elif again.status == Status.FAIL:
                for name in ("status", "worst", "over", "where", "covered", "included", "picture"):
                    setattr(verdict, name, getattr(again, name))
                record.excuses[verdict.output] = f"refused: not within {width}"
                verdict.note = "exact sums were rounded, and not by Welford's recurrence, which rounds the others too"
    if expected.statistics[0].size < FEWEST and not wrong():
        for verdict in rounded():
            if widths[verdict.output] > WIDEST:
                verdict.status = Status.MISTRUSTED
                verdict.note = f"{verdict.note}; {_CANNOT_TELL}"
                record.excuses[verdict.output] = _CANNOT_TELL
    for name in wrong()[:1]:
        for verdict in rounded():
            record.excuses[verdict.output] = f"refused: {name} is wrong even for the recurrence"
            verdict.status = Status.FAIL
            verdict.note = f"exact sums were rounded, and not by Welford's recurrence: {name} is not as it rounds"


def counted(scatter: float, m: int) -> Tier:
    """The class of a recurrence over m terms that scatters the mean by `scatter` units in the last place."""
    return Tier("counted", False, 1.0, exact=True, spread=16 + (25 + math.sqrt(m) / 10) * scatter)


def scatter_of(channels: int, within: float = 0.5) -> float:
    """s(n): a larger one would not be correct in all of `channels`, to `within` units, but for a chance of `LEVEL`."""
    return within / statistics.NormalDist().inv_cdf((1 + LEVEL ** (1 / channels)) / 2)
