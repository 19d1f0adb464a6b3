"""Known defects of vendor libraries, as data: what is wrong, in which versions, for exactly which calls.

Sources are the reports that each entry links, and verdicts of `pybnorm check` on both sides of every edge.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm._find import SPECS, file_digest
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = ["DEFECTS", "Call", "Defect", "Effect", "known_defects", "named", "page", "unrecorded"]

Version = tuple[int, ...]


class Effect(enum.Enum):
    """What a defect does to a call."""

    WRONG = "wrong"
    """The call succeeds and a result is wrong."""
    FAILS = "fails"
    """The call fails, although its arguments are right."""
    WEAK = "weak"
    """The result is less exact than it could be; the library is not wrong."""


class Call(NamedTuple):
    """A batch-norm call, without its data."""

    operation: Operation
    mode: Mode
    dtype: DataType
    dims: tuple[int, ...]
    layout: Layout = Layout.CHANNELS_FIRST
    saved: bool = True
    """Whether backward is given saved statistics."""
    beta: float = 0.0
    alignment: int = 16
    """Bytes that the addresses of all data tensors are multiples of, up to 16."""
    inplace: bool = False
    """Whether y is written over x, or dx over dy."""

    @property
    def m(self) -> int:
        """Elements per statistic."""
        return _arguments.reduced_count(self.dims, self.mode)

    @property
    def recomputes(self) -> bool:
        """Whether the call takes mean and variance from x itself."""
        return self.operation == Operation.FORWARD_TRAINING or (self.operation == Operation.BACKWARD and not self.saved)


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
    effect : Effect
    outputs : tuple of str
        The outputs that it makes wrong. Empty where the call itself fails.
    what : str
        One sentence, with the condition in words.
    links : tuple of str
        Reports upstream, ``owner/repository#number``.
    case : str
        A case of `pybnorm check` that shows it.
    predicate : callable
        Whether a `Call` meets it.
    note : str
        For the check: what the note of an explained verdict must hold, or the message of a call that failed. With
        one a weakness explains what misses the bound, too.
    ratio : float or mapping of str to float
        For the check: largest error / bound (of the loosest class) that is explained, of all outputs or by output.
    nan : tuple of str
        For the check: the outputs that may be NaN or infinite in the last channel, because the vendor's kernel takes in
        what lies behind its input.
    rounded : bool
        Whether it shows only where sums round, and so not on data whose sums are exact.
    exact : bool
        Whether it shows only on those. A weakness then explains what misses their bound, too.
    fills : tuple of str
        For the check: the only data that show it; empty: any.
    ways : tuple of str
        Algorithms of the library (`pybnorm.algorithms`) that do not have it: what avoids it takes the first that can be
        built. Without any, other calls are made in place of the one.
    widest : int
        Spatial elements up to which `ways` do not have it.
    better : bool
        Whether calls without a weakness are known, which a handle that avoids all makes.
    avoided : bool
        Whether algorithm ``"auto"`` makes those calls, too: data that occur miss the bound.
    tuned : bool
        Whether only a library that takes kernels by their times has it.
    refused : bool
        Whether calls that have it are refused, where they are made by callers: those that write over their input.
    builds : mapping of str to bool
        Builds (the digest of the library's file, as `pybnorm info` says it) that are known to differ from their
        version, such as a distribution's with patches: whether they have it.
    """

    id: str
    backend: str
    first: Version
    last: Version | None
    effect: Effect
    outputs: tuple[str, ...]
    what: str
    links: tuple[str, ...]
    case: str
    predicate: Callable[[Call], bool]
    note: str = ""
    ratio: float | Mapping[str, float] = 1.0
    nan: tuple[str, ...] = ()
    rounded: bool = False
    exact: bool = False
    fills: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    widest: int = _arguments.INT32_MAX
    better: bool = False
    avoided: bool = False
    tuned: bool = False
    refused: bool = False
    builds: Mapping[str, bool] = dataclasses.field(default_factory=dict)

    def largest(self, output: str) -> float:
        """Largest error / bound of `output` that it explains; 0 where it makes nothing of it wrong."""
        if _arguments.text(output, "output") not in self.outputs:
            return 0.0
        return self.ratio if isinstance(self.ratio, (int, float)) else self.ratio[output]

    def in_version(self, version: Sequence[int], build: str = "") -> bool:
        """Whether `version` is one that has the defect; `build`: of the library, "" where it is not known."""
        numbers = _version(version)
        if _arguments.text(build, "build") in self.builds:
            return self.builds[build]
        if numbers[: len(self.first)] < self.first:
            return False
        return self.last is None or numbers[: len(self.last)] <= self.last


def known_defects(backend: str, call: Any, version: Sequence[int] | None = None, build: str = "") -> list[Defect]:
    """The defects of a library that a call meets.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``.
    call : Call, pybnorm.check.Problem or str
        A str is a case, as in ``pybnorm check --case``.
    version : sequence of int, optional
        Of the library; default: any.
    build : str, optional
        The digest of its file, as `pybnorm info` says it; see `Defect`.

    Returns
    -------
    list of Defect
        Those of tuned kernels only where this machine has some: see `Defect`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, its value and what is allowed.

    Examples
    --------
    >>> case = "backward,spatial,f32,nchw,4x8x35x35"
    >>> [defect.id for defect in pybnorm.known_defects("miopen", case, (3, 4, 0))]
    ['miopen-backward-vector-tail']
    """
    names = sorted({d.backend for d in DEFECTS} | SPECS.keys())
    name = str.__str__(backend) if issubclass(type(backend), str) else None
    if name not in names:
        raise ArgumentError("backend", backend, f"one of {', '.join(names)}")
    described, here = _described(call), _takes_by_time(name)
    return [
        d
        for d in DEFECTS
        if d.backend == name
        and (version is None or d.in_version(version, build))
        and (here or not d.tuned)
        and d.predicate(described)
    ]


def unrecorded(backend: str, version: Sequence[int]) -> str:
    """What to say of a version that the table was not made with; empty for one that it was.

    Parameters
    ----------
    backend : str
    version : sequence of int

    Returns
    -------
    str

    Examples
    --------
    >>> pybnorm.defects.unrecorded("miopen", (3, 6, 0))
    'no defects are recorded of this version, only of 2.20 to 3.5: what those have may be here, and is not avoided'
    """
    name, numbers = _arguments.text(backend, "backend"), _version(version)
    own = [d for d in DEFECTS if d.backend == name]
    oldest, newest = min([d.first for d in own], default=()), max([d.last or () for d in own], default=())
    if oldest <= numbers[: len(oldest)] and numbers[: len(newest)] <= newest:
        return ""
    first, last = (".".join(map(str, v)) for v in (oldest, newest))
    return (
        f"no defects are recorded of this version, only of {first} to {last}: what those have may be here, and is not "
        "avoided"
    )


def _takes_by_time(backend: str) -> bool:
    """Whether the library may take kernels by their times here, not by its rules.

    From MIOpen 3.5 on that is so after any program of this user has tuned a batch norm (``miopenSetTuningPolicy``,
    ``MIOPEN_FIND_ENFORCE``): the winners are kept in files of ``MIOPEN_USER_DB_PATH``, and every later program that
    makes the same call takes them.
    """
    if backend != "miopen":
        return False
    if os.environ.get("MIOPEN_FIND_ENFORCE", "").strip().lower() not in ("", "1", "none", "5", "clean", "db_clean"):
        return True
    try:
        folder = Path(os.environ.get("MIOPEN_USER_DB_PATH") or "~/.config/miopen").expanduser()
        return any(file.stat().st_size for file in folder.glob("batchnorm_*.udb.txt"))
    except (OSError, RuntimeError):  # a folder that cannot be read, a user without a home: no library reads it either
        return False


def _version(value: Sequence[int]) -> Version:
    allowed = "a sequence of integers, such as (3, 4, 0)"
    return tuple(_arguments.integer(n, "version", allowed=allowed) for n in _arguments.items(value, "version", allowed))


def _set_reader(reader: Callable[[str], Any]) -> None:
    """Have `reader` make a problem of a case: `pybnorm.check` lies above this module."""
    global _reader  # noqa: PLW0603 (set once, when the package is imported)
    _reader = reader


_reader: Callable[[str], Any]


def _described(call: Any) -> Call:
    """The call with its values checked."""
    if issubclass(type(call), str):
        try:
            call = _reader(str.__str__(call))
        except ArgumentError as error:
            raise ArgumentError("call", call, f"a case, a pybnorm.check.Problem or a Call ({error})") from None
    try:
        given = Call(*(getattr(call, name) for name in Call._fields))
    except Exception:
        raise ArgumentTypeError("call", call, "a case, a pybnorm.check.Problem or a pybnorm.defects.Call") from None
    _arguments.instance(given.layout, Layout, "layout", "a pybnorm.Layout")
    return Call(
        _arguments.operation(given.operation),
        _arguments.mode(given.mode),
        _arguments.data_type(given.dtype),
        _arguments.dims(given.dims),
        given.layout,
        _arguments.boolean(given.saved, "saved"),
        _arguments.scalar(given.beta, "beta"),
        _arguments.integer(given.alignment, "alignment", 1),
        _arguments.boolean(given.inplace, "inplace"),
    )


def _of_library(library: Any, weak: bool = False, tuned: bool = False, auto: bool = False) -> tuple[Defect, ...]:
    """A library's defects that make results wrong or calls fail; with `weak` also what can be better.

    `auto`: also the weaknesses that ``"auto"`` avoids.

    `tuned`: whether a handle takes kernels by their times, whatever the machine says.
    """
    tuned = tuned or _takes_by_time(library.backend)
    own = [d for d in DEFECTS if d.backend == library.backend and (tuned or not d.tuned)]
    build = file_digest(library.path) if any(d.builds for d in own) else ""
    found = [d for d in own if d.in_version(library.version, build)]
    return tuple(d for d in found if (weak and d.better) or (auto and d.avoided) or d.effect != Effect.WEAK)


def _ways(met: Sequence[Defect], call: Call) -> tuple[str, ...]:
    """Algorithms that have none of the defects, in the order of the first one's."""
    plane = math.prod(call.dims[2:])
    first, *rest = [d.ways if plane <= d.widest else () for d in met]
    return tuple(name for name in first if all(name in others for others in rest))


def named(identity: str) -> Defect:
    """The defect of an id.

    Parameters
    ----------
    identity : str

    Returns
    -------
    Defect

    Raises
    ------
    ArgumentError
        There is none.

    Examples
    --------
    >>> pybnorm.defects.named("miopen-bf16-truncation").effect
    <Effect.WRONG: 'wrong'>
    """
    found = {d.id: d for d in DEFECTS}.get(_arguments.text(identity, "identity"))
    if found is None:
        raise ArgumentError("identity", identity, f"one of {', '.join(d.id for d in DEFECTS)}")
    return found


# ---------------------------------------------------------------- MIOpen

# The names of variants are those of MIOpen's solvers: which loop of its kernel a problem gets depends on sizes alone.

_TRAINING = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
_BACKWARD = ("dx", "dscale", "dbias")
_LARGE = 32 * 1024 * 1024
_SIXTEEN_BITS = (DataType.FLOAT16, DataType.BFLOAT16)


def _plane(call: Call) -> int:
    return math.prod(call.dims[2:])


def _spatial(call: Call, operation: Operation, layout: Layout = Layout.CHANNELS_FIRST) -> bool:
    return call.operation == operation and call.mode == Mode.SPATIAL and call.layout == layout


def _backward_variant_1(call: Call) -> bool:
    n, plane = call.dims[0], _plane(call)
    if not _spatial(call, Operation.BACKWARD):
        return False
    if call.dtype == DataType.FLOAT16 and 60 < plane < 200:
        return True
    return n * plane < _LARGE and (plane > 1024 or (plane > 512 and n >= 32))


def _training_variant_1(call: Call) -> bool:
    n, plane = call.dims[0], _plane(call)
    if not _spatial(call, Operation.FORWARD_TRAINING):
        return False
    if call.dtype in _SIXTEEN_BITS:
        return plane > 512 or (n >= 256 and plane > 60)
    return n * plane < _LARGE and plane > 1024 and n <= 768


def _training_variant_2(call: Call) -> bool:
    n, plane = call.dims[0], _plane(call)
    if not _spatial(call, Operation.FORWARD_TRAINING) or call.dtype in _SIXTEEN_BITS:
        return False
    return (n > 768 and plane > 150) or (plane > 512 and (n * plane >= _LARGE or plane <= 1024))


def _crosses(call: Call) -> bool:
    """Whether a read of four values reaches past an image into other data, or the last ones are left out.

    The images of a single channel follow one another, so there only the end of the last one counts.
    """
    n, c, plane = call.dims[0], call.dims[1], _plane(call)
    return plane % 4 != 0 and (c > 1 or (n * plane) % 4 != 0)


def _backward_variant_2(call: Call) -> bool:
    return _spatial(call, Operation.BACKWARD) and call.dims[0] * _plane(call) >= _LARGE and _plane(call) > 512


def _over_sums(identity: str, version: Version, what: str, case: str, predicate: Callable[[Call], bool]) -> Defect:
    """Of MIOpen's kernels that keep partial results in their output before they have read all of their input."""
    return Defect(
        id=identity,
        backend="miopen",
        first=version,
        last=version,
        effect=Effect.WRONG,
        outputs=("y", *_BACKWARD),
        what="kernels keep partial results in y, or dx, before they have read all of x, or dy, and so are wrong where "
        f"the two are one array: {what}",
        links=(),
        case=case,
        predicate=lambda p: (
            p.inplace and p.mode == Mode.SPATIAL and p.operation != Operation.FORWARD_INFERENCE and predicate(p)
        ),
        ratio=1e10,  # sums of all values in place of one: 3e9 was seen of 246,080 values
        refused=True,
    )


_IMAGES = 64
"""Images from which a single chain of sums may miss the bound: seen from 128 on."""


def _chained(backend: str, first: Version, last: Version, better: bool = False) -> Defect:
    """Of the per-activation kernels of cuDNN and MIOpen, whose results are the same to three digits."""
    return Defect(
        id=f"{backend}-chained-sums",
        backend=backend,
        first=first,
        last=last,
        effect=Effect.WEAK,
        outputs=(*_TRAINING, "dx", "dscale"),
        what="per-activation training, and backward without saved statistics, sum the images in one chain: some "
        "hundred are enough to miss the bound of blocked sums where roundings add up, on equal values or few that are "
        "not 0, some thousand of one sign (1 to 14 times the bound; on ordinary data not seen to 65,536 images)",
        links=(),
        case="train,peract,f32,nchw,1280x4x1x2,fill=sparse",
        predicate=lambda p: p.mode == Mode.PER_ACTIVATION and p.recomputes and p.m > _IMAGES,
        note="class C",
        ratio=40.0,
        rounded=True,
        better=better,
        avoided=better,
    )


_MIOPEN = (
    Defect(
        id="miopen-backward-vector-tail",
        backend="miopen",
        first=(2, 20),
        last=(3, 5),
        effect=Effect.WRONG,
        outputs=_BACKWARD,
        what="backward reads four values at a time across the end of an image, into the next channel, where H*W is "
        "not a multiple of 4 (kernel variant 1: H*W > 1024; H*W > 512 with N >= 32; float16 with 60 < H*W < 200)",
        links=("ROCm/MIOpen#2024",),
        case="backward,spatial,f32,nchw,2x3x33x33",
        predicate=lambda p: _backward_variant_1(p) and _crosses(p),
        ratio={"dx": 1e6, "dscale": 1e7, "dbias": 1e7},
    ),
    Defect(
        id="miopen-backward-statistics-tail",
        backend="miopen",
        first=(2, 20),
        last=(3, 5),
        effect=Effect.WRONG,
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
        ratio=1e6,
    ),
    Defect(
        id="miopen-tuned-backward",
        backend="miopen",
        first=(3, 5),
        last=(3, 5),
        effect=Effect.WRONG,
        outputs=_BACKWARD,
        what="tuning times kernel variant 1 of backward for every size and keeps it where it is fastest, although it "
        "reads four values at a time across the end of an image where H*W is not a multiple of 4: once a program of "
        "this user has tuned batch norm (miopenSetTuningPolicy, MIOPEN_FIND_ENFORCE)",
        links=("ROCm/MIOpen#2024",),
        case="backward,spatial,f32,nchw,4x4x7x7,fill=randn",
        predicate=lambda p: _spatial(p, Operation.BACKWARD) and _crosses(p),
        ratio={"dx": 1e6, "dscale": 1e7, "dbias": 1e7},
        tuned=True,
    ),
    Defect(
        id="miopen-training-vector-tail",
        backend="miopen",
        first=(2, 20),
        last=(3, 5),
        effect=Effect.WRONG,
        outputs=_TRAINING,
        what="training reads four values at a time across the end of an image, into the next channel, where "
        "H*W >= 4096 is not a multiple of 4 (kernel variant 1)",
        links=(),
        case="train,spatial,f32,nchw,2x3x73x73",
        predicate=lambda p: _training_variant_1(p) and _plane(p) >= 4096 and _crosses(p),
        ratio=1e5,
    ),
    Defect(
        id="miopen-training-stash",
        backend="miopen",
        first=(2, 20),
        last=(3, 4),
        effect=Effect.WRONG,
        # Which of them: what the groups write over one another depends on the order in which they run.
        outputs=("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance"),
        what="float32 training keeps four partial results in y for each 1024 values of an image, which overlap other "
        "data where the last part holds fewer than four, H*W % 1024 in 1, 2, 3 with H*W > 1024 (kernel variant 2: "
        "N > 768, or N*H*W >= 2^25)",
        links=(),
        case="train,spatial,f32,nchw,769x2x1x1025",
        predicate=lambda p: _training_variant_2(p) and _plane(p) > 1024 and 0 < _plane(p) % 1024 < 4,
        ratio={"y": 1e6, "saved_mean": 1e5, "saved_inv_variance": 1e6, "running_mean": 1e5, "running_variance": 1e6},
    ),
    _over_sums(
        "miopen-in-place-f32",
        (3, 4),
        "float32 training of 512 < H*W <= 1024, of N > 768 with H*W > 150, or of N*H*W >= 2^25 (kernel variant 2), and "
        "backward of N*H*W >= 2^25",
        "train,spatial,f32,nchw,2x3x1x600,fill=randn,inplace=1",
        lambda p: _training_variant_2(p) or _backward_variant_2(p),
    ),
    _over_sums(
        "miopen-in-place",
        (3, 5),
        "channels-last training and backward, training of N > 768 with H*W > 150, and in float32 of 512 < H*W <= 1024 "
        "with N > 2, and both of N*H*W >= 2^25 (kernel variant 2)",
        "train,spatial,f32,nchw,769x2x1x160,fill=randn,inplace=1",
        lambda p: (
            p.layout == Layout.CHANNELS_LAST
            or (_plane(p) > 150 and p.dims[0] > 768)
            or (p.dims[0] > 2 and _training_variant_2(p))
            or _backward_variant_2(p)
        ),
    ),
    Defect(
        id="miopen-tuned-in-place",
        backend="miopen",
        first=(3, 5),
        last=(3, 5),
        effect=Effect.WRONG,
        outputs=(*_TRAINING, *_BACKWARD),
        what="tuning (miopenSetTuningPolicy, MIOPEN_FIND_ENFORCE) runs a call's kernels one after another on the "
        "caller's arrays, so that where y is x, or dx is dy, all but the first read what was written over; and it may "
        "keep kernel variant 2, which is wrong there, for any size",
        links=(),
        case="train,spatial,f32,nchw,4x4x8x8,fill=randn,inplace=1",
        predicate=lambda p: p.inplace,
        ratio=1e9,
        tuned=True,
        refused=True,
    ),
    Defect(
        id="miopen-nhwc-training-kernel",
        backend="miopen",
        first=(3, 4),
        last=(3, 4),
        effect=Effect.FAILS,
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
        id="miopen-nhwc-stash",
        backend="miopen",
        first=(3, 5),
        last=(3, 5),
        effect=Effect.WRONG,
        outputs=(*_TRAINING, *_BACKWARD),
        what="16-bit channels-last training and backward keep float32 partial results of four channels in two rows of "
        "y or dx, and those of the last four channels overlap those of the second four where C / 4 is odd, but 1",
        links=(),
        case="train,spatial,f16,nhwc,2x12x5x5,fill=randn",
        predicate=lambda p: (
            any(_spatial(p, o, Layout.CHANNELS_LAST) for o in (Operation.FORWARD_TRAINING, Operation.BACKWARD))
            and p.dtype in _SIXTEEN_BITS
            and p.dims[1] % 8 == 4
            and p.dims[1] > 4
            and _plane(p) > 1
        ),
        ratio=dict.fromkeys((*_TRAINING, *_BACKWARD), 1e7)
        | {"y": 1e8, "saved_inv_variance": 1e9, "running_variance": 1e8},
    ),
    Defect(
        id="miopen-bf16-truncation",
        backend="miopen",
        first=(3, 4),
        last=(3, 5),
        effect=Effect.WRONG,
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
        last=(3, 5),
        effect=Effect.WRONG,
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
        last=(3, 5),
        effect=Effect.WEAK,
        outputs=(*_TRAINING, "dx", "dscale"),
        what="spatial training, and backward without saved statistics, compute the variance as E[x^2] - mean^2 in "
        "float32, whose error grows with (mean / deviation)^2",
        links=("ROCm/rocm-libraries#5013", "ROCm/MIOpen#3900"),
        case="train,spatial,f32,nchw,4x3x8x8,fill=randn,kappa=100",
        predicate=lambda p: p.mode == Mode.SPATIAL and p.recomputes,
        better=True,
    ),
    _chained("miopen", (3, 4), (3, 5), better=True),
    Defect(
        id="miopen-inference-absolute-variance",
        backend="miopen",
        first=(3, 4),
        last=(3, 5),
        effect=Effect.WEAK,
        outputs=("y",),
        what="inference takes 1/sqrt(|variance + epsilon|): a negative running variance, which no batch has, gives "
        "finite results where a square root gives NaN, and so is not noticed",
        links=(),
        case="infer,spatial,f32,nchw,16x8x10x8,fill=special,seed=14",
        predicate=lambda p: p.operation == Operation.FORWARD_INFERENCE,
        note="|variance + epsilon|",
    ),
)

# ---------------------------------------------------------------- oneDNN

_CHAIN = 64
"""Terms from which a single chain of sums may miss the bound: seen from 128 on."""
_LONG_CHAIN = 400_000
"""Terms from which it misses the bound on ordinary data, whose roundings have no common sign: seen from 450,000 on."""

_WIDEST_ROW = 2_000_000
"""Terms up to which the 16 chains in which algorithm "rows" sums an image hold the bound on data of one sign."""

_ONEDNN = (
    Defect(
        id="onednn-long-sums",
        backend="onednn",
        first=(3, 0),
        last=(3, 13),
        effect=Effect.WRONG,
        outputs=(*_TRAINING, "dx", "dscale"),
        what="a thread sums its part of a statistic in one float32 chain, which on ordinary data misses the bound from "
        "some 450,000 terms on; so the result depends on the number of threads",
        links=(),
        case="train,spatial,f32,nchw,1x1x1000x1000,fill=randn",
        predicate=lambda p: p.recomputes and p.m > _LONG_CHAIN,
        note="class C",
        ratio=1024.0,  # of one chain of 2^24 terms: m / (16 + 4 sqrt(m))
        rounded=True,
        ways=("rows", "folded"),
        widest=_WIDEST_ROW,
    ),
    Defect(
        id="onednn-chained-sums",
        backend="onednn",
        first=(3, 0),
        last=(3, 13),
        effect=Effect.WEAK,
        outputs=(*_TRAINING, "dx", "dscale"),
        what="the same chain of up to 400,000 terms: a few hundred are enough to miss the bound of blocked sums where "
        "roundings add up, on data of one sign, equal values, or few that are not 0 (1 to 23 times the bound)",
        links=(),
        case="train,spatial,f32,nchw,32x2x56x56,fill=image",
        predicate=lambda p: p.recomputes and _CHAIN < p.m <= _LONG_CHAIN,
        note="class C",
        ratio=160.0,  # of the longest chain: m / (16 + 4 sqrt(m))
        rounded=True,
        ways=("rows", "folded"),
        widest=_WIDEST_ROW,
        better=True,
        avoided=True,
    ),
    Defect(
        id="onednn-chained-gradients",
        backend="onednn",
        first=(3, 2),
        last=(3, 2),
        effect=Effect.WEAK,
        outputs=_BACKWARD,
        what="backward sums dy, and its products with x, in chains as long as one thread's part: from some 100,000 "
        "terms on 16-bit gradients of few values, whose roundings add up, miss the bound (1 to 1.3 times)",
        links=(),
        case="backward,spatial,bf16,nchw,1x2x512x512,fill=ramp,repeats=1",
        predicate=lambda p: p.operation == Operation.BACKWARD and p.dtype in _SIXTEEN_BITS and p.m > 65536,
        note="class C",
        ratio=4.0,
        rounded=True,
    ),
)

# ---------------------------------------------------------------- cuDNN

_PER_CHANNEL = ("spatial", "ex", "graph", "columns", "dense")
"""Algorithms that sum in floating point and take the statistics from centred values."""


def _large_persistent(call: Call) -> bool:
    """Whether a channel is spread over several blocks, which add in fixed point; one block adds in floating point."""
    if call.mode != Mode.SPATIAL_PERSISTENT or call.operation == Operation.FORWARD_INFERENCE:
        return False
    if call.dtype == DataType.FLOAT64:
        return False
    backward = call.operation == Operation.BACKWARD
    single = 8192 if backward else 16384
    most = 4 * single if call.dtype in _SIXTEEN_BITS else single
    return call.m > most and (call.saved or not backward)


_CUDNN = (
    Defect(
        id="cudnn-inference-rows",
        backend="cudnn",
        first=(7,),
        last=None,
        effect=Effect.FAILS,
        outputs=(),
        what="spatial inference refuses N >= 65536 as not supported",
        links=("pytorch/pytorch#19911", "microsoft/onnxruntime#7095"),
        case="infer,spatial,f32,nchw,65536x2x1x1,fill=randn",
        predicate=lambda p: (
            p.operation == Operation.FORWARD_INFERENCE and p.mode != Mode.PER_ACTIVATION and p.dims[0] >= 65536
        ),
        note="NOT_SUPPORTED",
        ways=("split", "pointwise", "columns", "rows"),
    ),
    Defect(
        id="cudnn-per-activation-rows",
        backend="cudnn",
        first=(9,),
        last=None,
        effect=Effect.FAILS,
        outputs=(),
        what="per-activation training refuses N > 131070 as not supported, and inference N > 262136",
        links=("pytorch/pytorch#2917",),
        case="train,peract,f32,nchw,131071x2x1x1,fill=randn",
        predicate=lambda p: (
            p.mode == Mode.PER_ACTIVATION
            and p.operation != Operation.BACKWARD
            and p.dims[0] > (131070 if p.operation == Operation.FORWARD_TRAINING else 262136)
        ),
        note="NOT_SUPPORTED",
    ),
    Defect(
        id="cudnn-per-activation-chains",
        backend="cudnn",
        first=(9,),
        last=None,
        effect=Effect.WRONG,
        outputs=("dx",),
        what="per-activation backward without saved statistics sums them in one chain, which misses the bound from "
        "some 700,000 values on (1.4 times at a million)",
        links=(),
        case="backward,peract,f32,nchw,1000000x2x1x1,fill=randn,saved=0",
        predicate=lambda p: (
            p.mode == Mode.PER_ACTIVATION
            and p.operation == Operation.BACKWARD
            and not p.saved
            and p.dims[0] > _LONG_CHAIN
        ),
        ratio=4.0,
        rounded=True,
    ),
    Defect(
        id="cudnn-persistent-fixed-point",
        backend="cudnn",
        first=(9,),
        last=None,
        effect=Effect.WRONG,
        outputs=(*_TRAINING, *_BACKWARD),
        what="mode SPATIAL_PERSISTENT adds what several blocks of a channel have summed in fixed point (training of "
        "more than 16384 values for each channel, 65536 of 16 bits; backward with saved statistics of half as many): "
        "an absolute error of about 1e-6, so that gradients and deviations below 1e-4 lose their digits, and infinite "
        "sums above 1e10",
        links=("pytorch/pytorch#13844",),
        case="train,persistent,f32,nchw,4x4x4x4096,fill=range,magnitude=1e-06,eps=0",
        predicate=_large_persistent,
        ratio=1e7,
        fills=("range", "sqrteps"),
        ways=_PER_CHANNEL,
    ),
    Defect(
        id="cudnn-misaligned",
        backend="cudnn",
        first=(9,),
        last=None,
        effect=Effect.FAILS,
        outputs=(),
        what="the entry points read pairs of 16-bit elements unless all tensors are channels-last: an address that is "
        "no multiple of 4 would lose the CUDA context, so that it is refused before the call",
        links=(),
        case="train,spatial,f16,nchw,4x6x8x8,fill=randn,misalign=1",
        predicate=lambda p: p.dtype in _SIXTEEN_BITS and p.alignment < 4 and p.layout != Layout.CHANNELS_LAST,
        note="4-byte aligned",
    ),
    Defect(
        id="cudnn-channels-last-inference",
        backend="cudnn",
        first=(9,),
        last=None,
        effect=Effect.WEAK,
        outputs=("y",),
        what="channels-last inference computes x * a + b, whose error grows with mean / deviation: 4e-4 of y at 1e4, "
        "where the channels-first kernel errs by 5e-8",
        links=(),
        case="infer,spatial,f32,nhwc,8x16x14x14,fill=randn,kappa=10000",
        predicate=lambda p: (
            p.operation == Operation.FORWARD_INFERENCE
            and p.mode != Mode.PER_ACTIVATION
            and p.layout == Layout.CHANNELS_LAST
            and p.dtype != DataType.FLOAT64
        ),
        ways=("pointwise",),
        better=True,
    ),
    _chained("cudnn", (9, 19), (9, 28)),
    Defect(
        id="cudnn-persistent-mean",
        backend="cudnn",
        first=(9, 19),
        last=(9, 28),
        effect=Effect.WEAK,
        outputs=("saved_mean", "running_mean"),
        what="persistent training adds in steps of its own: the mean of data whose sums need no rounding is off by up "
        "to 4e-7 of their size (401,408 terms; not seen to 100,352)",
        links=(),
        case="train,persistent,f32,nchw,32x4x112x112",
        predicate=lambda p: (
            p.mode == Mode.SPATIAL_PERSISTENT and p.operation == Operation.FORWARD_TRAINING and p.m > 100_352
        ),
        ratio={"saved_mean": 4.0, "running_mean": 1.0},
        exact=True,
    ),
)

DEFECTS: tuple[Defect, ...] = (*_MIOPEN, *_ONEDNN, *_CUDNN)
"""Every known defect; the versions are those it has been seen in, or whose source has it unchanged."""


def page() -> str:
    """The table as a page of Markdown.

    Returns
    -------
    str

    Examples
    --------
    >>> pybnorm.defects.page().splitlines()[0]
    '# Known defects'
    """
    lines = [
        "# Known defects",
        "",
        "What `pybnorm.known_defects` knows of vendor libraries; made of the table in `pybnorm/defects.py` by "
        "`python ci/defects-page.py`.",
        "`pybnorm check --case CASE` shows a defect. `CASE,algorithm=auto` runs the way around it, which plans with "
        "algorithm `auto`, and all that is built on them, take.",
        "The vendor's entry points stay as they are: `Handle(known_defects=...)` says what they do.",
        '`Handle(known_defects="avoid_all")` also avoids what is only less exact, where something better is known.',
    ]
    for backend in sorted({d.backend for d in DEFECTS}):
        lines += ["", f"## {SPECS[backend].label}"]
        for d in DEFECTS:
            if d.backend == backend:
                lines += ["", f"### {d.id}", "", f"{d.what[0].upper()}{d.what[1:]}.", "", *_facts(d)]
    return "\n".join(lines) + "\n"


def _facts(defect: Defect) -> list[str]:
    """What else there is to say of a defect, as a list."""
    first, last = (".".join(map(str, v)) if v else "" for v in (defect.first, defect.last))
    effects = {Effect.WRONG: "wrong", Effect.FAILS: "the call fails", Effect.WEAK: "less exact than it could be"}
    links = [f"[{link}](https://github.com/{link.replace('#', '/issues/')})" for link in defect.links]
    outputs = f": {', '.join(f'`{name}`' for name in defect.outputs)}" if defect.outputs else ""
    by = f"by {' or '.join(f'`{name}`' for name in defect.ways)}" if defect.ways else "by other calls"
    avoided = "no: the call is refused" if defect.refused else f"yes, {by}"
    if defect.effect == Effect.WEAK and not defect.avoided:
        avoided = "where it takes" + by.removeprefix("by") if defect.ways else "no: it is no error"
        avoided += f'; `known_defects="avoid_all"` avoids it, {by}' if defect.better else ""
    return [
        f"* Versions: {first} to {last or 'the newest'}",
        *(f"* Build `{build}`: {'has it' if has else 'does not have it'}" for build, has in defect.builds.items()),
        f"* Effect: {effects[defect.effect]}{outputs}",
        f"* Avoided by algorithm `auto`: {avoided}",
        f"* Reported: {', '.join(links) or 'no'}",
        f"* Case: `{defect.case}`",
    ]
