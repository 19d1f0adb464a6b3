"""The cases of a run that did not pass, grouped by what they have in common and the others do not."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import TITLES, CaseResult, by_label

WORDS = 3
"""Words that a cause may have."""
MOST = 8
"""Causes of one kind of failure; the rest of its cases are one more."""
_SHAPE = 4  # position of the shape in a case: the least telling word
_NUMBER = re.compile(r"0x[0-9a-f]+|\d[\d.e+-]*")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Cases of one library that did not pass, in the same way."""

    library: str
    """As `pybnorm.check.judging.results.by_label` names it."""
    status: Status
    known: str
    """The known defect that explains them, if one does."""
    words: tuple[str, ...]
    """Of the problem language, which all of `cases` have; none: they have nothing in common."""
    judged: int
    """Cases of the library with these words that were not refused; `cases` are among them."""
    cases: tuple[CaseResult, ...]
    """The smallest first."""

    @property
    def outputs(self) -> list[str]:
        """The outputs that did not pass in any of the cases, as tables call them."""
        wrong = {v.output for r in self.cases for v in r.verdicts if v.status != Status.PASS}
        return list(dict.fromkeys(title for name, title in TITLES.items() if name in wrong))

    @property
    def text(self) -> str:
        """Text such as "bf16 and nhwc: 18 of 18, y and dx"."""
        every = "every case" if len(self.cases) == self.judged else "cases with no word in common"
        words = _listed(self.words) or every
        return ", ".join(filter(None, [f"{words}: {len(self.cases)} of {self.judged}", _listed(self.outputs)]))


def _listed(words: Sequence[str]) -> str:
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last


def causes(results: Sequence[CaseResult]) -> list[Cause]:
    """The faults of the libraries of a run: the worst status first, then the most cases."""
    found: list[Cause] = []
    for library, own in by_label(results).items():
        kinds: dict[tuple[Status, str, str], list[int]] = {}
        judged = [r for r in own if r.status != Status.UNSUPPORTED]
        for i, result in enumerate(judged):
            if result.status != Status.PASS:
                said = _NUMBER.sub("#", result.message.partition("\n")[0])[:120]
                kinds.setdefault((result.status, result.known, said), []).append(i)
        having: dict[str, int] = {}  # by word, the cases that have it, each a bit
        for i, result in enumerate(judged):
            for word in _words(result):
                having[word] = having.get(word, 0) | 1 << i
        every = (1 << len(judged)) - 1
        for (status, known, _), members in kinds.items():
            for words, some in [(_common(judged, members), members)] if known else _split(judged, members, having):
                size = _all(words, having, every).bit_count()
                cases = sorted((judged[i] for i in some), key=_elements)
                found.append(Cause(library, status, known, words, size, tuple(cases)))
    return sorted(found, key=lambda cause: (-cause.status.severity, bool(cause.known), -len(cause.cases)))


def _words(result: CaseResult) -> list[str]:
    """The words of the case that can be in common, the most telling first."""
    words = [word for word in result.case.split(",") if not word.startswith("seed=")]
    return words[:_SHAPE] + words[_SHAPE + 1 :] + words[_SHAPE : _SHAPE + 1]


def _elements(result: CaseResult) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", result.case.split(",")[_SHAPE]))


def _common(judged: Sequence[CaseResult], members: Sequence[int]) -> tuple[str, ...]:
    first, *others = (_words(judged[i]) for i in members)
    return tuple(word for word in first if all(word in other for other in others))


def _all(words: Sequence[str], having: dict[str, int], every: int) -> int:
    for word in words:
        every &= having[word]
    return every


def _split(
    judged: Sequence[CaseResult], members: Sequence[int], having: dict[str, int]
) -> Iterator[tuple[tuple[str, ...], list[int]]]:
    """Parts of `members`, each with the words that hold the most of what is left and the fewest of other cases."""
    left, every = sum(1 << i for i in members), (1 << len(judged)) - 1
    length = WORDS if len(members) <= 500 else WORDS - 1
    for _ in range(MOST):
        if not left:
            return
        tried: dict[tuple[str, ...], None] = {}
        for i in _numbers(left):
            for count in range(1, length + 1):
                tried.update(dict.fromkeys(itertools.combinations(_words(judged[i]), count)))
        best: tuple[str, ...] = ()
        share = 0.0
        for words in tried:  # fewer words, and the more telling ones, come first
            held = _all(words, having, every)
            score = 2 * (held & left).bit_count() / (held.bit_count() + left.bit_count())
            if score > share or (score == share and len(words) < len(best)):
                best, share = words, score
        some = _all(best, having, every) & left
        yield best, _numbers(some)
        left &= ~some
    if left:
        yield _common(judged, _numbers(left)), _numbers(left)


def _numbers(bits: int) -> list[int]:
    """The positions of the bits that are set."""
    return [i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]
