"""A known defect: its effect, the calls that meet it, the runs that showed it and the versions that have it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pybnorm import _arguments
from pybnorm.enums import DataType, Layout, Mode, Operation

Version = tuple[int, ...]


class Effect(enum.Enum):
    """The effect of a defect on a call."""

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
    running: bool = True
    """True where training is given running statistics."""
    device: str = ""
    """Its architecture, such as ``"gfx1151, wave size 32"`` or ``"compute capability 9.0"``, alone or in its name as
    `pybnorm info` says it; "": not known, and then what only certain cards have is left out."""

    @property
    def m(self) -> int:
        """Elements per statistic."""
        return _arguments.reduced_count(self.dims, self.mode)

    @property
    def recomputes(self) -> bool:
        """Tell whether the call takes mean and variance from x itself."""
        return self.operation == Operation.FORWARD_TRAINING or (self.operation == Operation.BACKWARD and not self.saved)


class Run(NamedTuple):
    """A run of `pybnorm check` on one build of a library: what the table is made of."""

    version: Version
    build: str
    """The digest of the library's file, as `pybnorm info` says it; "" where it was not recorded."""
    package: str
    card: str
    date: str
    file: str
    """Its file in docs/results."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """One defect of one library."""

    id: str
    """Short and stable; what reports print."""
    backend: str
    first: Version = ()
    """Oldest version that has it, compared over as many numbers as are given, where a run has shown an older one to be
    correct or it needs what came with this one; without it every older version is taken to have the defect."""
    fixed: Version | None = None
    """Oldest version that a run has shown to be correct; without it every later one is taken to have the defect."""
    seen: tuple[Run, ...]
    """Runs that showed it."""
    read: tuple[Version, ...] = ()
    """Oldest and newest version whose source was read and has it."""
    example: str
    """A call that users know."""
    effect: Effect
    outputs: tuple[str, ...] = ()
    """The outputs that it makes wrong. Empty where the call itself fails."""
    what: str
    """One sentence, with the condition in words."""
    links: tuple[str, ...] = ()
    """Reports upstream, ``owner/repository#number``."""
    case: str
    """A case of `pybnorm check` that shows it."""
    predicate: Callable[[Call], bool]
    """Returns True for a `Call` that meets it."""
    note: str = ""
    """For the check: what the note of an explained verdict must hold, or the message of a call that failed. With one a
    weakness explains what misses the bound, too."""
    ratio: float | Mapping[str, float] = 1.0
    """For the check: largest error / bound (of the loosest class) that is explained, of all outputs or by output."""
    rounded: bool = False
    """It shows only where sums round, and so not on data whose sums are exact."""
    exact: bool = False
    """It shows only on those. A weakness then explains what misses their bound, too."""
    fills: tuple[str, ...] = ()
    """For the check: the only data that show it; empty: any."""
    ways: tuple[str, ...] = ()
    """Algorithms of the library that do not have it: ``"auto"`` takes the first that can be built."""
    better: bool = False
    """A handle that avoids all has native compute a call with the weakness."""
    tuned: bool = False
    """Only a library that takes kernels by their times has it."""
    far: bool = False
    """A warning needs the statistics of a call: a mean far from 0 shows it."""
    refused: bool = False
    """Calls that have it are refused, where they are made by callers: those that write over their input."""
    cards: tuple[str, ...] = ()
    """Beginnings of the architectures of the cards that have it, as `pybnorm info` names the device; empty: any. The
    call's own error names the defect."""
    builds: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """Builds (the digest of the library's file, as `pybnorm info` says it) that are known to differ from their version,
    such as a distribution's with patches: whether they have it."""

    def __repr__(self) -> str:
        return f"<Defect {self.id}: {self.effect.value}>"

    def largest(self, output: str) -> float:
        """Largest error / bound of `output` that it explains; 0 where it makes nothing of it wrong."""
        if _arguments.text(output, "output") not in self.outputs:
            return 0.0
        return self.ratio if isinstance(self.ratio, (int, float)) else self.ratio[output]

    def in_version(self, version: Sequence[int], build: str = "") -> bool:
        """Tell whether `version` is one that has the defect; `build`: of the library, "" where it is not known."""
        numbers = numbers_of(version)
        if _arguments.text(build, "build") in self.builds:
            return self.builds[build]
        numbers = taken_for(self.backend, numbers)
        if numbers[: len(self.first)] < self.first:
            return False
        return self.fixed is None or numbers[: len(self.fixed)] < self.fixed

    def on_card(self, device: str) -> bool:
        """Return True where a device has it, as `Call` describes one."""
        return not self.cards or any(card in _arguments.text(device, "device") for card in self.cards)


NEWEST: dict[str, Version] = {}
"""The newest version of each library that was run; the package fills it."""


def taken_for(backend: str, version: Version) -> Version:
    """The version, or the newest that was run where it is newer than that."""
    newest = NEWEST.get(backend, version)
    return version if version[:2] <= newest[:2] else newest


def numbers_of(value: Sequence[int]) -> Version:
    """The version as a tuple of integers."""
    allowed = "a sequence of integers, such as (3, 4, 0)"
    return tuple(_arguments.integer(n, "version", allowed=allowed) for n in _arguments.items(value, "version", allowed))


TRAINING = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
BACKWARD = ("dx", "dscale", "dbias")
SIXTEEN_BITS = (DataType.FLOAT16, DataType.BFLOAT16)
BY_CHANNEL = (Mode.SPATIAL, Mode.SPATIAL_PERSISTENT)
ONE_PASS = (Operation.FORWARD_TRAINING, Operation.BACKWARD)
"""Operations that sum over a batch."""


def where(more: Callable[[Call], bool] = lambda call: True, **fields: object) -> Callable[[Call], bool]:
    """A predicate: each of these fields of a call is the value, or one of the tuple, and `more` holds."""
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in fields.items()}
    return lambda call: all(getattr(call, name) in values for name, values in allowed.items()) and more(call)


LONG_CHAIN = 400_000
"""Terms from which it misses the bound on ordinary data, whose roundings have no common sign: seen from 450,000 on."""
_IMAGES = 64
"""Images from which a single chain of sums may miss the bound: seen from 128 on."""


def chained(backend: str, seen: tuple[Run, ...], better: bool = False) -> Defect:
    """The entry of per-activation kernels of cuDNN and MIOpen, whose results are the same to three digits."""
    return Defect(
        id=f"{backend}-chained-sums",
        backend=backend,
        seen=seen,
        effect=Effect.WEAK,
        outputs=(*TRAINING, "dx", "dscale"),
        what="per-activation training, and backward without saved statistics, sum the images in one chain: some "
        "hundred are enough to miss the bound of blocked sums where roundings add up, on equal values or few that are "
        "not 0, some thousand of one sign (1 to 21 times the bound; on ordinary data not seen to 131,070 images)",
        example="BatchNorm1d on 1,280 rows of mostly zeros",
        case="train,peract,f32,nchw,1280x4x1x2,fill=sparse",
        predicate=where(lambda p: p.recomputes and p.m > _IMAGES, mode=Mode.PER_ACTIVATION),
        note="sums in chains",
        ratio=40.0,
        rounded=True,
        better=better,
    )
