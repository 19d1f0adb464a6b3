"""The verdict on an output: its status, its worst elements and the reason."""

from __future__ import annotations

import dataclasses
import enum
import math

WORST_POINTS = 10


class Status(enum.Enum):
    """Outcome of an output or of a case, never mixed up with one another.

    Examples
    --------
    >>> pybnorm.check.Status("WARN").good
    True
    """

    PASS = "PASS"
    """Within the bound of class A: sums in blocks or trees."""
    WARN = "WARN"
    """Within the bound of class B only: a one-pass variance cancels. Or infinity where the definition gives NaN, or NaN
    for infinity: from an input that is not finite another order of operations may give either."""
    CHAIN = "CHAIN"
    """Outside the bound of class A, and as accurate as sums in long chains of terms are on this data."""
    UNSUPPORTED = "UNSUPPORTED"
    """The backend refused the combination, by name."""
    MISTRUSTED = "MISTRUSTED"
    """Nothing is wrong, but a change of some input would not show with any fill: a warning."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The bound says nothing about this data."""
    ERROR = "ERROR"
    """Not run, so there is no verdict: the library cannot be used there, the node was lost, or this package failed."""
    RESOURCE = "RESOURCE"
    """There was no memory, or no room for the outputs."""
    BUILD_FAILED = "BUILD_FAILED"
    """The library could not compile its kernel."""
    RAISED = "RAISED"
    """The implementation under test raised an exception (`pybnorm.check.run.implementations`)."""
    CRASHED = "CRASHED"
    """The process of the library died."""
    TIMEOUT = "TIMEOUT"
    """The case took longer than its limit, and its process was ended."""
    NONDETERMINISTIC = "NONDETERMINISTIC"
    """Correct, but an equal call gave other bits, where the case (`bitwise=1`) or a record asks for equal ones."""
    FAIL = "FAIL"
    """Wrong."""

    @property
    def severity(self) -> int:
        """Position in the order above; the worst output decides a case."""
        return _SEVERITIES[self]

    @property
    def correct(self) -> bool:
        """True where the results are correct, however accurate."""
        return self in (Status.PASS, Status.WARN, Status.CHAIN)

    @property
    def good(self) -> bool:
        """True where a run with nothing but such cases exits with 0."""
        return self.correct or self in (Status.UNSUPPORTED, Status.MISTRUSTED)


_SEVERITIES = {status: number for number, status in enumerate(Status)}


@dataclasses.dataclass(frozen=True)
class Point:
    """One element of one output.

    Examples
    --------
    >>> [verdict] = pybnorm.check.judge("infer,spatial,f32,nchw,1x1x1x2", {"y": np.zeros((1, 1, 1, 2), "f4")}).verdicts
    >>> verdict.worst[0].index, verdict.worst[0].got
    ((0, 0, 0, 1), 0.0)
    """

    index: tuple[int, ...]
    reference: float
    got: float
    bound: float
    ratio: float


@dataclasses.dataclass(repr=False)
class Verdict:
    """The verdict on one output.

    Examples
    --------
    >>> [verdict] = pybnorm.check.judge("infer,spatial,f32,nchw,1x1x1x2", {"y": np.zeros((1, 1, 1, 2), "f4")}).verdicts
    >>> verdict.output, verdict.status.name, verdict.over
    ('y', 'FAIL', 2)
    """

    output: str
    status: Status
    tier: str
    """The strictest class that holds every element; of the loosest tried if none does."""
    ratio: float
    """Worst error / bound in the strictest class."""
    ratios: dict[str, float]
    """The same for every class that was tried."""
    elements: int
    over: int = 0
    """Elements that no conclusive class holds."""
    undecided: int = 0
    """Elements that no class can judge."""
    unjudged: int = 0
    """Elements whose correct value is not finite or out of the type's range, and of which nothing is certain."""
    identical: bool = False
    """Every judged element is the reference rounded to the output type."""
    noticed: float = 0.0
    """Smallest relative error of an element that the class `tier` would not have held; 0 if none could be judged."""
    worst: list[Point] = dataclasses.field(default_factory=list)
    """Up to ten elements by falling error / bound, in the class `tier`."""
    note: str = ""
    finite_ratio: float = math.inf
    """Worst error / bound of the elements that are finite, in the class `tier`."""
    wild: int = 0
    """Elements that are finite, or not, and must not be."""
    where: str = ""
    """The smallest description of the elements that are wrong (`pybnorm.check.judging.bounds.where`)."""
    covered: int = 0
    """Wrong elements in it."""
    included: int = 0
    """Correct elements in it."""
    convention: str = ""
    """The convention that explains it (`pybnorm.check.judging.conventions`)."""
    picture: list[str] = dataclasses.field(default_factory=list)
    """The wrong elements by channel, a string each, and position: "." is correct, 1 to 9 up to 2, 4, 8, ... times the
    bound, x not finite. Of more than some channels or positions the worst of each run."""

    def __repr__(self) -> str:
        return f"<Verdict {self.output}: {self.status.value}, {self.ratio:.3g} of its bound>"
