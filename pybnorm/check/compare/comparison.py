r"""Runs held against each other: two vendors, two versions of one library, two machines.

A *side* is one backend of one run. Every two sides are compared on every case that both have. Where both kept their
outputs (``check --save``) each element is judged: its inputs and its bounds follow from the problem's line, a side that
is correct is within the bound of its class (`pybnorm.check.judging.bounds`; the class that held the output when it was
judged, the loosest if none did), so two right sides are within the sum of both bounds. Sides that a wrong reference
would condemn alike still agree with each other, and the reference is then seen to stand alone.

Statuses are compared too, and alone if there are no outputs (files of ``check --json``, a crash): a FAIL against a PASS
is a difference even if the outputs are equal, as for a kernel that writes outside of its arrays.

What an earlier run judged and a later one could not, a whole backend or the rest of a run that is not complete, is
lost, and counts like a case that newly fails.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pybnorm import __version__, _arguments
from pybnorm._text import one_line
from pybnorm.check.judging.bounds import Expected, Status, Tier, Verdict, expect, tiers
from pybnorm.check.judging.bounds.verdict import WORST_POINTS
from pybnorm.check.judging.results import (
    OUTPUTS,
    BackendInfo,
    CaseResult,
    cases_text,
    html_table,
    label,
    ratio_text,
    verdict_text,
)
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import archive
from pybnorm.errors import ArgumentError
from pybnorm.reference.namespaces import Array

REFERENCE = "reference"
ACCURACY = 1.1
"""Factor between two worst ratios from which one is called better."""


class Outcome(enum.Enum):
    """The relation of two sides on one case or output; the worst output decides a case."""

    REFUSED = "refused"
    """At least one is UNSUPPORTED; nothing to compare."""
    AGREE = "agree"
    """No outputs of both; both good, or both bad."""
    EQUAL = "equal"
    """The same bits."""
    WITHIN = "within"
    """Every difference is within the sum of both bounds."""
    UNDECIDED = "undecided"
    """A difference that the bounds say nothing about."""
    DIFFER = "differ"
    """One good, one bad, whatever the outputs are."""
    BEYOND = "beyond"
    """A difference larger than the sum of both bounds: at least one is wrong."""

    @property
    def severity(self) -> int:
        """Position in the order above."""
        return list(Outcome).index(self)

    @property
    def good(self) -> bool:
        """True where a comparison with only such outcomes exits with 0."""
        return self.severity < Outcome.UNDECIDED.severity


class Change(enum.Enum):
    """The change of a case between two runs of one backend."""

    NONE = ""
    FAILING = "newly failing"
    """Was PASS, WARN, CHAIN or UNSUPPORTED."""
    UNSUPPORTED = "newly unsupported"
    """Was PASS, WARN or CHAIN."""
    WARNED = "less accurate"
    """PASS before, WARN or CHAIN now."""
    OTHERWISE = "fails otherwise"
    """One bad status before, another now; a refusal in place of a failure too."""
    PASSING = "newly passing"
    """PASS, WARN or CHAIN, and was bad."""
    SUPPORTED = "newly supported"
    UNWARNED = "more accurate"
    BITS = "bits changed"
    """The same status, other bits."""

    @property
    def regression(self) -> bool:
        """True where one such change makes the exit status 1."""
        return self in (Change.FAILING, Change.UNSUPPORTED)


# ---------------------------------------------------------------- runs


@dataclasses.dataclass(eq=False)
class Run:
    """One run, and the letter that it has in this comparison."""

    name: str
    path: str
    environment: dict[str, Any]
    backends: dict[str, BackendInfo]
    results: dict[tuple[str, str], CaseResult]
    complete: bool
    folder: Path | None
    """Where the outputs are; None for a JSON file."""


@dataclasses.dataclass(eq=False)
class Side:
    """One backend of one run."""

    run: Run
    info: BackendInfo
    results: dict[str, CaseResult]
    """By case; if the nodes of the run had several libraries of the backend, those of this one."""

    @property
    def name(self) -> str:
        """A name such as ``B:cudnn``; with the library's id if the nodes of a run had several."""
        return f"{self.run.name}:{label(self.info, self.run.backends.values())}"


def _sides(runs: Iterable[Run]) -> Iterator[Side]:
    for run in runs:
        counts = Counter(info.backend for info in run.backends.values())
        for info in run.backends.values():
            own = {case: result for (backend, case), result in run.results.items() if backend == info.backend}
            if counts[info.backend] > 1:
                own = {case: result for case, result in own.items() if result.library == info.id}
            if own:
                yield Side(run, info, own)


def read(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs at `paths`: folders of ``check --save`` or files of ``check --json``. Raises ArgumentError: none."""
    runs = []
    for number, path in enumerate(_arguments.items(paths, "paths", "a sequence of paths", 1 << 20)):
        document = _shown(archive.read_run(path))
        # an ERROR is a case that was not run
        results = {(c.backend, c.case): c for c in document["cases"] if c.status != Status.ERROR}
        infos = {label(b, document["backends"]): b for b in document["backends"]}
        named = {b.backend for b in document["backends"]}
        infos |= {backend: BackendInfo(backend) for backend, _ in results if backend not in named}
        name = chr(ord("A") + number) if number < 26 else f"run{number + 1}"
        folder = Path(path) if Path(path).is_dir() else None
        complete = bool(document.get("complete", True))
        runs.append(Run(name, str(path), document["environment"], infos, results, complete, folder))
    return runs


def _shown(value: Any) -> Any:
    """Make another machine's texts fit to be shown, each on one line: none can fake a line of ours.

    Of its results that which is compared: runs are large.
    """
    if isinstance(value, str):
        return sys.intern(one_line(value))  # most are in many cases
    if isinstance(value, dict):
        return {_shown(k): _shown(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shown(v) for v in value)
    if isinstance(value, Verdict):
        value.worst = []
        if value.status.good:  # else they are in what is said of it
            value.ratios = {}
    if isinstance(value, (BackendInfo, CaseResult, Verdict)):
        for name in value.__dataclass_fields__:  # vars() would make a dict for each to keep
            text = getattr(value, name)
            if isinstance(text, (str, tuple, dict)) or name == "verdicts":
                setattr(value, name, _shown(text))
    return value


def is_run(path: str | os.PathLike[str], runs: Sequence[Run]) -> bool:
    """Say whether a file is of one of `runs`, or holds a run of its own."""
    file = Path(_arguments.path(path, "path"))
    runs = _arguments.items(runs, "runs", "a sequence of runs", 1 << 20)
    for run in runs:
        _arguments.instance(run, Run, "runs", "a sequence of what read() returns")
    try:
        if not file.is_file():
            return False
        for run in runs:
            own = Path(run.path) if run.folder is None else run.folder / archive.DOCUMENT
            if own.exists() and own.samefile(file):
                return True
        archive.read_run(file)
    except (OSError, ValueError):  # ArgumentError is one: no run
        return False
    return True


# ---------------------------------------------------------------- results


@dataclasses.dataclass(frozen=True)
class Difference:
    """One element that two sides have differently."""

    index: tuple[int, ...]
    reference: float
    first: float
    second: float
    bound: float
    """Sum of both bounds."""
    ratio: float


@dataclasses.dataclass
class OutputPair:
    """Two sides' values of one output."""

    output: str
    outcome: Outcome
    elements: int
    different: int = 0
    """Elements that differ in a bit."""
    ratio: float = 0.0
    """Worst difference / sum of both bounds."""
    over: int = 0
    undecided: int = 0
    unjudged: int = 0
    """Elements that differ and have a correct value that is not finite or out of the type's range."""
    classes: tuple[str, str] = ("", "")
    """Whose bounds were added."""
    first_nearer: int = 0
    """Elements of which the first side is nearer to the reference."""
    second_nearer: int = 0
    worst: list[Difference] = dataclasses.field(default_factory=list)
    """Up to ten elements by falling ratio."""


@dataclasses.dataclass
class CasePair:
    """Two sides on one case."""

    case: str
    first: str
    second: str
    statuses: tuple[Status, Status]
    outcome: Outcome
    outputs: list[OutputPair] = dataclasses.field(default_factory=list)
    ratios: tuple[float, float] = (0.0, 0.0)
    """Worst error / bound of each side against the reference."""
    change: Change = Change.NONE
    repeatable: bool = True
    """Neither side gave other bits when it was called again."""
    known: tuple[str, str] = ("", "")
    reasons: tuple[str, str] = ("", "")
    """Why each side is not good; empty if it is."""
    allowed: bool = False
    """It is not good by known defects alone, which ``--allow-known`` lets pass."""

    @property
    def good(self) -> bool:
        """True where a comparison with only such cases exits with 0."""
        return self.allowed or (self.outcome.good and not self.change.regression)

    @property
    def by_known_defects(self) -> bool:
        """Known defects explain every side that is not good, and there is one."""
        bad = [bool(known) for status, known in zip(self.statuses, self.known, strict=True) if not status.good]
        return bool(bad) and all(bad)


@dataclasses.dataclass
class Lost:
    """Cases of a backend that an earlier run judged and a later one could not."""

    backend: str
    first: str
    """The earlier run."""
    second: str
    """The later run."""
    cases: int
    reason: str


@dataclasses.dataclass
class Pair:
    """Two sides on all cases that both have.

    `kind` is "vendors", "versions", "builds" (files), "machines", "settings" (environment variables) or "repeats".
    """

    first: str
    second: str
    kind: str
    outcomes: dict[str, int]
    changes: dict[str, int]
    better: int
    """Cases, passed by both, whose worst ratio is smaller in the second by the factor `ACCURACY`."""
    worse: int
    first_nearer: int
    second_nearer: int
    ratio: float
    """Worst difference / sum of both bounds."""
    only_first: list[str]
    only_second: list[str]
    same_bits: int = 0
    """Cases of which both kept outputs that are equal in every bit."""
    other_bits: int = 0
    """Cases of which both kept outputs that differ in a bit."""


@dataclasses.dataclass
class Alone:
    """An output on which sides, or a side and the reference, disagree."""

    case: str
    output: str
    groups: list[list[str]]
    """Groups that agree within themselves, the reference included; the largest first."""
    alone: str
    """The only one that disagrees, if all others agree with one another; else empty. The reference is alone only where
    two libraries agree with one another: versions and builds of one are one voice."""
    known: bool = False
    """Known defects explain every side that the reference disagrees with."""


@dataclasses.dataclass(repr=False)
class Comparison:
    """Everything that was found."""

    runs: list[Run]
    pairs: list[Pair]
    cases: list[CasePair]
    alone: list[Alone]
    only: dict[str, list[str]]
    """By run: cases that no other run has."""
    notices: list[str]
    lost: list[Lost] = dataclasses.field(default_factory=list)
    allow_known: bool = False
    """Known defects do not make the exit status 1."""

    def of(self, pair: Pair) -> list[CasePair]:
        """The cases of a pair."""
        return [c for c in self.cases if (c.first, c.second) == (pair.first, pair.second)]

    def __repr__(self) -> str:
        names = ", ".join(run.name for run in self.runs)
        return one_line(f"<Comparison of {names}: {cases_text(len(self.cases))}, exit status {self.exit_status}>")

    def _repr_html_(self) -> str:
        rows = [
            (
                p.first,
                p.second,
                ", ".join(f"{count} {name}" for name, count in p.outcomes.items() if count),
                f"{p.ratio:.3g}",
            )
            for p in self.pairs
        ]
        return html_table(repr(self)[1:-1], ("first", "second", "cases", "difference / both bounds"), rows)

    @property
    def exit_status(self) -> int:
        """0, 1 or 2.

        0: all that was compared is equal, within the sum of both bounds, or agrees in its status, or is an allowed
        defect. 1: something is beyond, differs in its status, is undecided, is a regression or is lost, or the
        reference stands alone. 2: there was nothing to compare.
        """
        if self.lost or any(not c.good for c in self.cases):
            return 1
        if any(item.alone == REFERENCE and not (self.allow_known and item.known) for item in self.alone):
            return 1
        return 0 if any(c.outcome != Outcome.REFUSED for c in self.cases) else 2


# ---------------------------------------------------------------- comparison


def compare(
    runs: Sequence[Run], progress: Callable[[int, int], object] = lambda done, total: None, allow_known: bool = False
) -> Comparison:
    """Compare every two sides of `runs`, of one run too; changes are told from an earlier run to a later one.

    `progress` is called with the number of finished cases and of all cases. With `allow_known`, known defects do not
    make the exit status 1. Raises ArgumentError: an output file is damaged.
    """
    sides = list(_sides(runs))
    lines = list(dict.fromkeys(case for run in runs for _, case in run.results))
    pairs: list[CasePair] = []
    alone: list[Alone] = []
    for number, case in enumerate(lines):
        progress(number, len(lines))
        present = {side: side.results[case] for side in sides if case in side.results}
        found, disagreements = _case(case, present)
        for pair in found:
            pair.allowed = allow_known and not pair.good and pair.by_known_defects
        pairs += found
        alone += disagreements
    progress(len(lines), len(lines))
    # two libraries of one backend in one run have no case in common
    summaries = [
        _summary(a, b, pairs)
        for a, b in itertools.combinations(sides, 2)
        if a.run is not b.run or a.info.backend != b.info.backend
    ]
    only = {}
    for run in runs if len(runs) > 1 else ():
        others = {case for other in runs if other is not run for _, case in other.results}
        only[run.name] = list(dict.fromkeys(case for _, case in run.results if case not in others))
    lost, notices = _lost(runs)
    return Comparison(list(runs), summaries, pairs, alone, only, _notices(runs) + notices, lost, allow_known)


def _lost(runs: Sequence[Run]) -> tuple[list[Lost], list[str]]:
    """Cases that earlier runs judged and later ones could not; and a notice for each that is no regression.

    A later run on another machine that judged a backend which the earlier run did not is of another kind of machine,
    such as one with another vendor's GPU: what it lacks is only noticed.
    """
    lost, notices = [], []
    for first, second in itertools.combinations(runs, 2):
        before, now = _judged(first), _judged(second)
        same_machine = first.environment.get("host") == second.environment.get("host")
        for backend, cases in before.items():
            info = next((i for i in second.backends.values() if i.backend == backend), None)
            if info is None:  # it was not asked for
                continue
            reason, missing = "were not run there: it is not complete", 0
            if info.problem:
                reason, missing = f"could not run there: {info.problem}", len(cases)
            elif not second.complete:
                missing = sum((backend, case) not in second.results for case in cases)
            item = Lost(backend, first.name, second.name, missing, reason)
            if missing and (same_machine or not (now.keys() - before.keys())):
                lost.append(item)
            elif missing:
                notices.append(lost_text(item))
    return lost, notices


def _judged(run: Run) -> dict[str, list[str]]:
    """Give the cases that each backend did not refuse."""
    cases: dict[str, list[str]] = {}
    for (backend, case), result in run.results.items():
        if result.status != Status.UNSUPPORTED:
            cases.setdefault(backend, []).append(case)
    return cases


def lost_text(lost: Lost) -> str:
    """Say in one line what is lost."""
    return f"{lost.second}:{lost.backend}: {cases_text(lost.cases)} that {lost.first} judged {lost.reason}"


def _notices(runs: Sequence[Run]) -> list[str]:
    notices = []
    for run in runs:
        version = run.environment.get("pybnorm", "")
        if version != __version__ and run.folder is not None:
            notices.append(
                f"{run.name} is of pybnorm {version}, this is {__version__}: its inputs are taken to be the same; "
                "where nearly all cases differ, run the check again with one version"
            )
        if not run.complete:
            notices.append(f"{run.name} is not complete")
        if run.folder is None:
            notices.append(f"{run.name} is a file without outputs: only its statuses and ratios are compared")
    return notices


class _Outputs:
    """The saved outputs of one case, read and judged no more than needed."""

    def __init__(self, case: str, present: Mapping[Side, CaseResult]) -> None:
        self.results = present
        self._read: dict[Side, dict[str, Array]] = {}
        self.digests: dict[Side, dict[str, str]] = {}
        for side, result in present.items():
            if side.run.folder is not None and result.saved:
                self.digests[side] = archive.output_digests(side.run.folder, result.saved, result.backend, result.case)
        try:
            self.problem = Problem.parse(case)
        except ArgumentError:  # written by a version with more options
            self.digests = {}

    def both(self, first: Side, second: Side) -> list[str]:
        """Outputs that both sides have."""
        one, two = self.digests.get(first, {}), self.digests.get(second, {})
        return [name for name in one if name in two and name in OUTPUTS[self.problem.word]]

    def pair(self, first: Side, second: Side, output: str) -> OutputPair:
        one, two = self._tier(first, output), self._tier(second, output)
        if self.digests[first][output] == self.digests[second][output]:
            elements = next((v.elements for v in self.results[first].verdicts if v.output == output), 0)
            return OutputPair(output, Outcome.EQUAL, elements, classes=(one.name, two.name))
        values = self._arrays(first)[output], self._arrays(second)[output]
        return compare_outputs(self._expected, output, values, (one, two))

    @functools.cached_property
    def _expected(self) -> Expected:
        return expect(self.problem, generate(self.problem))

    def _tier(self, side: Side, output: str) -> Tier:
        classes = tiers(self.problem, output)
        named = {v.tier for v in self.results[side].verdicts if v.output == output}
        return next((tier for tier in classes if tier.name in named), classes[-1])

    def _arrays(self, side: Side) -> dict[str, Array]:
        if side not in self._read:
            assert side.run.folder is not None
            self._read[side] = archive.read_outputs(side.run.folder, self.results[side].saved)
        return self._read[side]


def _case(case: str, present: Mapping[Side, CaseResult]) -> tuple[list[CasePair], list[Alone]]:
    outputs = _Outputs(case, present)
    pairs, agreement = [], {}
    for first, second in itertools.combinations(present, 2):
        results = present[first], present[second]
        found = [outputs.pair(first, second, name) for name in outputs.both(first, second)]
        for item in found:
            agreement[first.name, second.name, item.output] = item.outcome in (Outcome.EQUAL, Outcome.WITHIN)
        pair = CasePair(
            case=case,
            first=first.name,
            second=second.name,
            statuses=(results[0].status, results[1].status),
            outcome=_outcome(results, found),
            outputs=found,
            ratios=(results[0].ratio, results[1].ratio),
            repeatable=all(r.repeat in ("", "equal") for r in results),
            known=(results[0].known, results[1].known),
            reasons=(_reason(results[0]), _reason(results[1])),
        )
        if first.info.backend == second.info.backend:
            pair.change = _change(pair)
        pairs.append(pair)
    return pairs, _disagreements(case, present, agreement)


def _outcome(results: tuple[CaseResult, CaseResult], outputs: list[OutputPair]) -> Outcome:
    if any(r.status == Status.UNSUPPORTED for r in results):
        return Outcome.REFUSED
    agrees = results[0].status.good == results[1].status.good
    found = [o.outcome for o in outputs] or [Outcome.AGREE]
    return max([*found, Outcome.AGREE if agrees else Outcome.DIFFER], key=lambda o: o.severity)


def _reason(result: CaseResult) -> str:
    if result.status.good:
        return ""
    verdicts = [f"{v.output}: {verdict_text(v)}" for v in result.verdicts if not v.status.good]
    return "; ".join(filter(None, [result.message, *verdicts]))


def _change(pair: CasePair) -> Change:
    before, now = pair.statuses
    if Status.MISTRUSTED in (before, now) and before.good and now.good and Status.UNSUPPORTED not in (before, now):
        return Change.NONE  # of the data, not of the library
    if before == now:
        return Change.BITS if any(o.different for o in pair.outputs) else Change.NONE
    if now == Status.UNSUPPORTED:
        return Change.UNSUPPORTED if before.good else Change.OTHERWISE
    if not now.good:
        return Change.FAILING if before.good else Change.OTHERWISE
    if not before.good:
        return Change.PASSING
    if before == Status.UNSUPPORTED:
        return Change.SUPPORTED
    return Change.WARNED if now.severity > before.severity else Change.UNWARNED


def _disagreements(
    case: str, present: Mapping[Side, CaseResult], agreement: Mapping[tuple[str, str, str], bool]
) -> list[Alone]:
    """Outputs on which two of at least three, the reference being one, do not agree."""
    found = []
    sides = {side.name: side.info.backend for side in present}
    for output in dict.fromkeys(name for *_, name in agreement):
        edges = {frozenset(key[:2]): agrees for key, agrees in agreement.items() if key[2] == output}
        for side, result in present.items():
            for verdict in result.verdicts:
                if verdict.output == output and any(side.name in edge for edge in edges):
                    edges[frozenset((side.name, REFERENCE))] = verdict.status != Status.FAIL
        if all(edges.values()):
            continue
        groups = _connected(edges)
        voices = [{sides.get(name, REFERENCE) for name in group} for group in groups]
        single = [group for group, own in zip(groups, voices, strict=True) if len(own) == 1]
        if len(groups) == 2 and len(single) == 2:  # versions of one library, which say the same, and the reference
            continue
        alone = ""
        if len(groups) == 2 and single:
            alone = single[0][0] if len(single[0]) == 1 else sides[single[0][0]]
        wrong = [r for side, r in present.items() if not edges.get(frozenset((side.name, REFERENCE)), True)]
        found.append(Alone(case, output, groups, alone, bool(wrong) and all(r.known for r in wrong)))
    return found


def _connected(edges: Mapping[frozenset[str], bool]) -> list[list[str]]:
    groups = [{name} for name in dict.fromkeys(name for edge in edges for name in sorted(edge))]
    for edge, agrees in edges.items():
        if agrees:
            joined = [group for group in groups if group & edge]
            groups = [group for group in groups if not group & edge] + [set().union(*joined)]
    return sorted((sorted(group) for group in groups), key=lambda group: (-len(group), group))


def _summary(first: Side, second: Side, cases: Iterable[CasePair]) -> Pair:
    own = [c for c in cases if (c.first, c.second) == (first.name, second.name)]
    passed = [c for c in own if all(s.correct for s in c.statuses)]
    outputs = [o for c in own for o in c.outputs]
    return Pair(
        first=first.name,
        second=second.name,
        kind=_kind(first, second),
        outcomes=dict(Counter(c.outcome.value for c in own)),
        changes=dict(Counter(c.change.value for c in own if c.change != Change.NONE)),
        better=sum(c.ratios[1] * ACCURACY < c.ratios[0] for c in passed),
        worse=sum(c.ratios[0] * ACCURACY < c.ratios[1] for c in passed),
        first_nearer=sum(o.first_nearer for o in outputs),
        second_nearer=sum(o.second_nearer for o in outputs),
        ratio=max((o.ratio for o in outputs), default=0.0),
        only_first=[case for case in first.results if case not in second.results],
        only_second=[case for case in second.results if case not in first.results],
        same_bits=sum(bool(c.outputs) and not any(o.different for o in c.outputs) for c in own),
        other_bits=sum(any(o.different for o in c.outputs) for c in own),
    )


def _kind(first: Side, second: Side) -> str:
    if first.info.backend != second.info.backend:
        return "vendors"
    if first.info.version != second.info.version:
        return "versions"
    if first.info.digest and second.info.digest and first.info.digest != second.info.digest:
        return "builds"
    environments = [side.run.environment for side in (first, second)]
    if first.info.device != second.info.device or environments[0].get("host") != environments[1].get("host"):
        return "machines"
    return "settings" if archive.settings(environments[0]) != archive.settings(environments[1]) else "repeats"


# ---------------------------------------------------------------- elements


def compare_outputs(
    expected: Expected, output: str, values: tuple[Array, Array], classes: tuple[Tier, Tier]
) -> OutputPair:
    """Judge the difference of two sides' values of one output by the sum of the bounds of their classes.

    `values` are as stored, in logical order. Raises ArgumentError: an array is not of the output's shape.
    """
    shape = expected.outputs[output].shape
    for array in values:
        if array.size != int(np.prod(shape)):
            raise ArgumentError(output, f"shape {array.shape}", f"shape {shape}")
    first, second = (array.reshape(shape) for array in values)
    largest = expected.largest(output)
    pair = OutputPair(output, Outcome.EQUAL, int(np.prod(shape)), classes=(classes[0].name, classes[1].name))
    words = [np.dtype(f"u{array.dtype.itemsize}") for array in (first, second)]
    for part in expected.parts(output, None, classes):
        raw = first[part.index], second[part.index]
        with np.errstate(all="ignore"):
            bits = [np.ascontiguousarray(r).view(w) for r, w in zip(raw, words, strict=True)]
            pair.different += int(np.count_nonzero(bits[0] != bits[1])) if words[0] == words[1] else raw[0].size
            one, two = (r.astype(np.float64) for r in raw)
            right = part.reference
            (bound_one, unsure_one), (bound_two, unsure_two) = part.classes
            total, unsure = bound_one + bound_two, unsure_one | unsure_two
            judged = np.isfinite(right) & (np.abs(right) + np.maximum(bound_one, bound_two) <= largest)
            judged |= unsure & np.isfinite(right)  # its bound may be NaN
            same = (one == two) | (np.isnan(one) & np.isnan(two))
            difference = np.where(same, 0.0, np.abs(one - two))
            wild = ~same & ~np.isfinite(difference)
            ratio = np.where(same, 0.0, np.where(wild, np.inf, difference / total))
            held = ratio <= 1
            certain = judged & (~unsure | held | wild)
            errors = [np.where(np.isfinite(v), np.abs(v - right), np.inf) for v in (one, two)]
        pair.over += int(np.count_nonzero(certain & ~held))
        pair.undecided += int(np.count_nonzero(judged & ~certain))
        pair.unjudged += int(np.count_nonzero(~judged & ~same))
        pair.first_nearer += int(np.count_nonzero(judged & (errors[0] < errors[1])))
        pair.second_nearer += int(np.count_nonzero(judged & (errors[1] < errors[0])))
        _remember(pair.worst, part.index, right, one, two, total, np.where(certain, ratio, 0.0))
    pair.ratio = pair.worst[0].ratio if pair.worst else 0.0
    if pair.over:
        pair.outcome = Outcome.BEYOND
    elif pair.undecided:
        pair.outcome = Outcome.UNDECIDED
    elif pair.different:
        pair.outcome = Outcome.WITHIN
    return pair


def _remember(worst: list[Difference], place: tuple[slice, ...], *numbers: Array) -> None:
    """Merge a block's largest ratios, the last of its numbers, into the list of worst points."""
    ratio = numbers[-1]
    flat = ratio.ravel()
    chosen = np.argpartition(flat, -WORST_POINTS)[-WORST_POINTS:] if flat.size > WORST_POINTS else np.arange(flat.size)
    for i in chosen:
        if flat[i] > 0:
            local = np.unravel_index(int(i), ratio.shape)
            index = tuple(int(k) + s.start for k, s in zip(local, place, strict=True))
            worst.append(Difference(index, *(float(array[local]) for array in numbers)))
    worst.sort(key=lambda point: -point.ratio)
    del worst[WORST_POINTS:]


# ---------------------------------------------------------------- texts


def bits_text(pair: Pair) -> str:
    """Say in how many cases both sides have the same bits."""
    cases = pair.same_bits + pair.other_bits
    if cases == 1:
        return f"{'the same' if pair.same_bits else 'other'} bits in the one case"
    if not pair.other_bits:
        return f"the same bits in all {cases} cases"
    return f"the same bits in {pair.same_bits} of {cases} cases, different bits in {pair.other_bits}"


REFERENCE_ALONE = "Where the reference stands alone, it is wrong or all libraries share a convention that it does not."


def nearer_text(pair: Pair) -> str:
    """Say how often each side is nearer to the reference, in percent of the elements for which one of them is."""
    total = pair.first_nearer + pair.second_nearer
    if not total:
        return ""
    share = math.floor(100 * pair.first_nearer / total + 0.5)
    return f"{share} % : {100 - share} %"


def difference_cells(point: Difference) -> list[str]:
    """A point as the cells of a table."""
    numbers = (f"{value:.9g}" for value in (point.reference, point.first, point.second))
    return [",".join(map(str, point.index)), *numbers, f"{point.bound:.3g}", ratio_text(point.ratio)]


def output_text(output: OutputPair) -> str:
    """Counts of an output in one line."""
    parts = [f"{output.outcome.value}, {output.different} of {output.elements} elements differ"]
    if output.over:
        parts.append(f"{output.over} by more than both bounds")
    if output.undecided:
        parts.append(f"{output.undecided} undecided")
    if output.unjudged:
        parts.append(f"{output.unjudged} where the reference is not finite or out of range")
    parts.append(f"nearer to the reference: first {output.first_nearer}, second {output.second_nearer}")
    return "; ".join(parts)
