"""Cases that are known to notice a change of each of their inputs, so that it is not computed again.

`pybnorm.check.bounds.trust.untrusted` is a function of a case alone, and of none of its options that say how it is
called (`_HOW`). What it found of the packaged suites lies in a file, made by ``ci/trusted-lines.py``: the fingerprint
of the code that it came of, then a line with the digest of each case of which it found nothing, in hexadecimal. With
other code the file counts for nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib

from pybnorm.check.bounds import untrusted as computed
from pybnorm.check.data import Inputs
from pybnorm.check.problem import FILE, Problem

__all__ = ["FILE_NAME", "SOURCES", "digest", "fingerprint", "kept", "untrusted"]

FILE_NAME = "trusted.txt"
SOURCES = (
    *("enums.py", "_arguments.py", "_arrays.py", "reference/*.py"),
    *("check/problem.py", "check/data.py", "check/generator.py", "check/activations.py", "check/calls.py"),
    "check/bounds/*.py",
)
"""Files of the package that decide what is found."""
_HOW = frozenset({"strides", "inplace", "bitwise", "misalign", "fence", "repeats", "streams"})
_MOST = 1 << 16
_HERE = pathlib.Path(__file__).parent


def untrusted(problem: Problem, inputs: Inputs, one_pass: bool = False) -> list[str]:
    """`pybnorm.check.bounds.trust.untrusted` of a problem and the inputs that it makes; looked up where it is kept."""
    if problem.fill == FILE:  # whose content may change
        return computed(problem, inputs, one_pass)
    key = digest(problem, one_pass)
    if key in kept():
        return []
    if key not in _found:
        if len(_found) == _MOST:
            _found.clear()
        _found[key] = computed(problem, inputs, one_pass)
    return list(_found[key])


_found: dict[int, list[str]] = {}  # of this process


def digest(problem: Problem, one_pass: bool = False) -> int:
    """A number of 64 bits for a problem, equal for those that differ in how they are called only."""
    values = [getattr(problem, name) for name in _NAMES]
    text = repr([one_pass, *(int(v) if isinstance(v, int) else v for v in values)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


_NAMES = [field.name for field in dataclasses.fields(Problem) if field.name not in _HOW]


@functools.cache
def kept() -> frozenset[int]:
    """Digests of the cases of which nothing was found; empty if other code found it."""
    try:
        made_by, *digests = (_HERE / FILE_NAME).read_text("ascii").split()
        same = made_by == fingerprint()
    except OSError:  # sources that are not there cannot be compared
        return frozenset()
    return frozenset(int(d, 16) for d in digests) if same else frozenset()


def fingerprint() -> str:
    """Of the code that decides what is found.

    Raises
    ------
    OSError
        A source cannot be read.
    """
    found = hashlib.sha256()
    for pattern in SOURCES:
        paths = sorted(_HERE.parent.glob(pattern))
        if not paths:
            raise FileNotFoundError(pattern)
        for path in paths:
            text = path.read_bytes()
            found.update(f"{pattern} {path.name} {len(text)}\n".encode() + text)
    return found.hexdigest()
