"""Known defects of vendor libraries, as data: what is wrong, in which versions, for exactly which calls.

Sources are the reports that each entry links, and verdicts of `pybnorm check` on both sides of every edge.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pybnorm import _arguments
from pybnorm._find import SPECS, file_digest
from pybnorm.defects import cudnn, kinds, miopen, onednn
from pybnorm.defects.kinds import Call, Defect, Effect, Run
from pybnorm.enums import Layout
from pybnorm.errors import ArgumentError, ArgumentTypeError

__all__ = ["DEFECTS", "Call", "Defect", "Effect", "Run", "known_defects", "named", "unrecorded"]

DEFECTS: tuple[Defect, ...] = (*miopen.DEFECTS, *onednn.DEFECTS, *cudnn.DEFECTS)
"""Every known defect; a range of versions is open, up and down, until a run has shown a version to be correct."""

_RUNS = {"cudnn": cudnn.RUNS, "miopen": miopen.RUNS, "onednn": onednn.RUNS}
kinds.NEWEST.update({name: max(run.version for run in runs) for name, runs in _RUNS.items()})


def known_defects(backend: str, call: Any, version: Sequence[int] | None = None, build: str = "") -> list[Defect]:
    """The defects of a library that a call meets.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``.
    call : Call, pybnorm.check.Problem or str
        A str is a case, as in ``pybnorm check --case``. A Call may name its device; what only certain cards have is
        left out otherwise.
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
    numbers, digest = None if version is None else kinds.numbers_of(version), _arguments.text(build, "build")
    return [
        d
        for d in DEFECTS
        if d.backend == name
        and (numbers is None or d.in_version(numbers, digest))
        and (here or not d.tuned)
        and d.on_card(described.device)
        and d.predicate(described)
    ]


def unrecorded(backend: str, version: Sequence[int], build: str = "") -> str:
    """The warning of a version or a build that no run has seen; empty for one that some run has.

    Parameters
    ----------
    backend : str
    version : sequence of int
    build : str, optional
        The digest of the library's file, as `pybnorm info` says it; without it the version alone is looked at.

    Returns
    -------
    str

    Examples
    --------
    >>> pybnorm.defects.unrecorded("miopen", (3, 6, 0))
    'MIOpen 3.6.0 was not run: it is taken to have the known defects of 3.5.1, the newest that was'
    """
    name, digest = _arguments.text(backend, "backend"), _arguments.text(build, "build")
    numbers = kinds.numbers_of(version)
    if name not in _RUNS:
        return ""
    text = f"{SPECS[name].label} {'.'.join(map(str, numbers))}"
    taken = kinds.taken_for(name, numbers)
    if taken != numbers:
        known = ".".join(map(str, taken))
        return f"{text} was not run: it is taken to have the known defects of {known}, the newest that was"
    minor = numbers[:2]
    read = [d.read for d in DEFECTS if d.backend == name and d.read]
    if all(run.version[: len(minor)] != minor for run in _RUNS[name]) and all(not a <= minor <= b for a, b in read):
        return f"{text} was not run: it is taken to have every known defect of older and newer versions"
    if not digest or any(run.build == digest for run in _RUNS[name]):
        return ""
    return f"this build of {text} was not run: it is taken to have every known defect of its version"


def _takes_by_time(backend: str) -> bool:
    """Tell whether the library may take kernels by their times here, not by its rules.

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
        given = Call(*(getattr(call, name) for name in Call._fields[:-1]))._replace(device=getattr(call, "device", ""))
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
        _arguments.boolean(given.running, "running"),
        _arguments.text(given.device, "device"),
    )


def _of_library(library: Any, weak: bool = False, tuned: bool = False) -> tuple[Defect, ...]:
    """A library's defects that make results wrong or calls fail; with `weak` also what can be better.

    `tuned`: whether a handle takes kernels by their times, whatever the machine says.
    """
    tuned = tuned or _takes_by_time(library.backend)
    own = [d for d in DEFECTS if d.backend == library.backend and (tuned or not d.tuned) and not d.cards]
    build = file_digest(library.path) if any(d.builds for d in own) else ""
    found = [d for d in own if d.in_version(library.version, build)]
    return tuple(d for d in found if (weak and d.better) or d.effect != Effect.WEAK)


def _ways(met: Sequence[Defect]) -> tuple[str, ...]:
    """Algorithms that have none of the defects, in the order of the first one's."""
    first, *rest = [d.ways for d in met]
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
