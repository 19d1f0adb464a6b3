"""Known defects of vendor libraries, as data: what fails, in which versions, for exactly which problems.

A known defect explains a verdict and does not excuse it: the case stays FAIL and only names the defect. The table also
serves the tests, which run each entry's case on its library and fail when the defect no longer shows in a version that
the entry names, so that no entry outlives what it describes; of other versions they say whether it was seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pybnorm.check.bounds import Status, Verdict
from pybnorm.check.data import sums_are_exact
from pybnorm.check.problem import Problem
from pybnorm.enums import DataType, Layout, Mode, Operation

__all__ = ["DEFECTS", "Defect", "explain", "named"]

Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Defect:
    """One defect of one library.

    Parameters
    ----------
    id : str
        Short and stable; what reports print.
    backend : str
    first, last : tuple of int
        Oldest and newest version that has it, inclusive, compared over as many numbers as are given. ``last=None``:
        no version without it is known.
    status : Status
        What the defect makes of a case: FAIL, BUILD_FAILED, or WARN for a weakness that is no fault. A WARN entry also
        explains INCONCLUSIVE: an error so large that the bound of its kind says nothing any more.
    outputs : tuple of str
        The outputs that it makes wrong; another wrong output is not explained by it. Empty where the call itself fails.
    what : str
        One sentence, with the condition in words.
    links : tuple of str
        Reports upstream, ``owner/repository#number``.
    case : str
        A problem line that shows it.
    predicate : callable
        Whether a `Problem` meets it.
    note : str
        What the note of an explained verdict must hold, or the message of a call that failed.
    ratio : float
        Largest error / bound (of the loosest class) that is explained.
    """

    id: str
    backend: str
    first: Version
    last: Version | None
    status: Status
    outputs: tuple[str, ...]
    what: str
    links: tuple[str, ...]
    case: str
    predicate: Callable[[Problem], bool]
    note: str = ""
    ratio: float = math.inf

    def in_version(self, version: Sequence[int]) -> bool:
        """Whether `version` is one that has the defect."""
        numbers = tuple(version)
        if numbers[: len(self.first)] < self.first:
            return False
        return self.last is None or numbers[: len(self.last)] <= self.last

    def makes(self, status: Status) -> bool:
        """Whether a case of `status` may be its doing."""
        return status == self.status or (self.status == Status.WARN and status == Status.INCONCLUSIVE)

    def covers(self, verdict: Verdict) -> bool:
        """Whether a verdict of the defect's status is of an output, and of a kind, that it explains."""
        of_its_kind = self.note in verdict.note and min(verdict.ratios.values()) <= self.ratio
        return verdict.output in self.outputs and of_its_kind


def explain(
    backend: str,
    version: Sequence[int],
    problem: Problem,
    verdicts: Sequence[Verdict],
    status: Status = Status.FAIL,
    message: str = "",
) -> list[Defect]:
    """The known defects that together explain a case, or an empty list where something is left unexplained.

    Parameters
    ----------
    backend : str
    version : sequence of int
        Of the library that ran.
    problem : Problem
    verdicts : sequence of Verdict
        Of the case. Every output with the case's status needs an explanation.
    status : Status
        Of the case.
    message : str
        Of the case, where there are no verdicts because the call failed.
    """
    candidates = [
        d
        for d in DEFECTS
        if d.backend == backend and d.makes(status) and d.in_version(version) and d.predicate(problem)
    ]
    if not verdicts:
        return [d for d in candidates if not d.outputs and d.note in message]
    wrong = [v for v in verdicts if v.status == status]
    used = [d for d in candidates if any(d.covers(v) for v in wrong)]
    complete = wrong and all(any(d.covers(v) for d in used) for v in wrong)
    return used if complete else []


def named(identity: str) -> Defect:
    """The defect of an id.

    Raises
    ------
    KeyError
        There is none.
    """
    return {d.id: d for d in DEFECTS}[identity]


# ---------------------------------------------------------------- MIOpen

# The names of variants are those of MIOpen's solvers: which loop of its kernel a problem gets depends on sizes alone.

_TRAINING = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
_BACKWARD = ("dx", "dscale", "dbias")
_LARGE = 32 * 1024 * 1024
_SIXTEEN_BITS = (DataType.FLOAT16, DataType.BFLOAT16)


def _plane(problem: Problem) -> int:
    return math.prod(problem.dims[2:])


def _spatial(problem: Problem, operation: Operation, layout: Layout = Layout.CHANNELS_FIRST) -> bool:
    return problem.operation == operation and problem.mode == Mode.SPATIAL and problem.layout == layout


def _backward_variant_1(problem: Problem) -> bool:
    n, plane = problem.dims[0], _plane(problem)
    if not _spatial(problem, Operation.BACKWARD):
        return False
    if problem.dtype == DataType.FLOAT16 and 60 < plane < 200:
        return True
    return n * plane < _LARGE and (plane > 1024 or (plane > 512 and n >= 32))


def _training_variant_1(problem: Problem) -> bool:
    n, plane = problem.dims[0], _plane(problem)
    if not _spatial(problem, Operation.FORWARD_TRAINING):
        return False
    if problem.dtype in _SIXTEEN_BITS:
        return plane > 512 or (n >= 256 and plane > 60)
    return n * plane < _LARGE and plane > 1024 and n <= 768


def _training_variant_2(problem: Problem) -> bool:
    n, plane = problem.dims[0], _plane(problem)
    if not _spatial(problem, Operation.FORWARD_TRAINING) or problem.dtype in _SIXTEEN_BITS:
        return False
    return (n > 768 and plane > 150) or (plane > 512 and (n * plane >= _LARGE or plane <= 1024))


def _crosses(problem: Problem) -> bool:
    """Whether a read of four values reaches past an image into other data, or the last ones are left out.

    The images of a single channel follow one another, so there only the end of the last one counts.
    """
    n, c, plane = problem.dims[0], problem.dims[1], _plane(problem)
    return plane % 4 != 0 and (c > 1 or (n * plane) % 4 != 0)


_MIOPEN = (
    Defect(
        id="miopen-backward-vector-tail",
        backend="miopen",
        first=(2, 20),
        last=(3, 5),
        status=Status.FAIL,
        outputs=_BACKWARD,
        what="backward reads four values at a time across the end of an image, into the next channel, where H*W is "
        "not a multiple of 4 (kernel variant 1: H*W > 1024; H*W > 512 with N >= 32; float16 with 60 < H*W < 200)",
        links=("ROCm/MIOpen#2024",),
        case="backward,spatial,f32,nchw,2x3x33x33",
        predicate=lambda p: _backward_variant_1(p) and _crosses(p),
    ),
    Defect(
        id="miopen-backward-statistics-tail",
        backend="miopen",
        first=(2, 20),
        last=(3, 5),
        status=Status.FAIL,
        outputs=("dx", "dscale"),
        what="backward without saved statistics recomputes them with the wrong elements at the end where H*W >= 4096 "
        "and N*H*W is not a multiple of 4096 (kernel variant 1)",
        links=("ROCm/rocm-libraries#9030", "ROCm/MIOpen#762"),
        case="backward,spatial,f32,nchw,2x3x72x72,saved=0",
        # a single read of four at the end of a single channel is right again
        predicate=lambda p: (
            _backward_variant_1(p)
            and not p.saved
            and _plane(p) >= 4096
            and (p.dims[0] * _plane(p)) % 4096 not in ((0, 4) if p.dims[1] == 1 else (0,))
        ),
    ),
    Defect(
        id="miopen-training-vector-tail",
        backend="miopen",
        first=(2, 20),
        last=(3, 4),
        status=Status.FAIL,
        outputs=_TRAINING,
        what="training reads four values at a time across the end of an image, into the next channel, where "
        "H*W >= 4096 is not a multiple of 4 (kernel variant 1)",
        links=(),
        case="train,spatial,f32,nchw,2x3x73x73",
        predicate=lambda p: _training_variant_1(p) and _plane(p) >= 4096 and _crosses(p),
    ),
    Defect(
        id="miopen-training-stash",
        backend="miopen",
        first=(2, 20),
        last=(3, 4),
        status=Status.FAIL,
        outputs=_TRAINING,
        what="float32 training keeps four partial results in y for each 1024 values of an image, which overlap other "
        "data where the last part holds fewer than four, H*W % 1024 in 1, 2, 3 with H*W > 1024 (kernel variant 2: "
        "N > 768, or N*H*W >= 2^25)",
        links=(),
        case="train,spatial,f32,nchw,769x2x1x1025",
        predicate=lambda p: _training_variant_2(p) and _plane(p) > 1024 and 0 < _plane(p) % 1024 < 4,
    ),
    Defect(
        id="miopen-nhwc-training-kernel",
        backend="miopen",
        first=(3, 4),
        last=(3, 4),
        status=Status.BUILD_FAILED,
        outputs=(),
        what="channels-last float32 training asks for a kernel that its program lacks where 512 < H*W <= 1024, or "
        "N > 768 and H*W > 150 (kernel variant 2)",
        links=(),
        case="train,spatial,f32,nhwc,2x3x1x513",
        predicate=lambda p: (
            _spatial(p, Operation.FORWARD_TRAINING, Layout.CHANNELS_LAST)
            and p.dtype == DataType.FLOAT32
            and (512 < _plane(p) <= 1024 or (p.dims[0] > 768 and _plane(p) > 150))
        ),
        note="Empty code object path",
    ),
    Defect(
        id="miopen-bf16-truncation",
        backend="miopen",
        first=(3, 4),
        last=(3, 4),
        status=Status.FAIL,
        outputs=("y", "dx"),
        what="bfloat16 results are truncated, not rounded to nearest: an error of up to twice the bound",
        links=(),
        case="infer,spatial,bf16,nchw,4x6x5x5,fill=randn",
        predicate=lambda p: p.dtype == DataType.BFLOAT16,
        ratio=2.0,
    ),
    Defect(
        id="miopen-f16-blend",
        backend="miopen",
        first=(3, 4),
        last=(3, 4),
        status=Status.FAIL,
        outputs=("y", "dx"),
        what="miopenOpTensor, through which alpha and beta go, computes in float16: a blended result is rounded up to "
        "four times, and what cancels between result and prior leaves those errors behind",
        links=(),
        case="train,spatial,f16,nchw,4x6x8x9,fill=randn,beta=0.5",
        predicate=lambda p: p.dtype == DataType.FLOAT16 and p.beta != 0,
        ratio=16.0,
    ),
    Defect(
        id="miopen-one-pass-variance",
        backend="miopen",
        first=(2, 20),
        last=(3, 4),
        status=Status.WARN,
        outputs=(*_TRAINING, "dx", "dscale"),
        what="spatial training, and backward without saved statistics, compute the variance as E[x^2] - mean^2 in "
        "float32, whose error grows with (mean / deviation)^2",
        links=("ROCm/rocm-libraries#5013", "ROCm/MIOpen#3900"),
        case="train,spatial,f32,nchw,4x3x8x8,fill=randn,kappa=100",
        predicate=lambda p: p.mode == Mode.SPATIAL and p.recomputes,
    ),
)

# ---------------------------------------------------------------- oneDNN

_ONEDNN = (
    Defect(
        id="onednn-long-sums",
        backend="onednn",
        first=(3, 0),
        last=(3, 2),
        status=Status.FAIL,
        outputs=("y", "saved_inv_variance", "running_variance", "dx", "dscale"),
        what="a thread sums its part of a statistic in one float32 chain, which on ordinary data misses the bound from "
        "some 450,000 terms on; so the result depends on the number of threads",
        links=(),
        case="train,spatial,f32,nchw,1x1x1000x1000,fill=randn",
        predicate=lambda p: p.recomputes and p.m > 400_000 and not sums_are_exact(p),
        note="class C",
    ),
)

DEFECTS: tuple[Defect, ...] = (*_MIOPEN, *_ONEDNN)
"""Every known defect; the versions are those it has been seen in, or whose source has it unchanged."""
