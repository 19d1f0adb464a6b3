"""Recorded support: which combinations a library is known to run, so that one it no longer runs is a failure.

``support/BACKEND.json`` holds records, each for a range of versions. A record is made by ``pybnorm info --claims`` on a
machine that has the library, and reviewed: conditions that the capability query cannot know, such as the largest batch,
are added by hand::

    {"first": [3, 2], "last": null, "source": "...", "below": {"batch": null, "elements": 2147483648},
     "combinations": [{"operations": ["train"], "modes": ["spatial"], "dtypes": ["f16"], "layouts": ["nchw", "nhwc"],
                       "ranks": [2, 3, 4], "blends": true}]}

A record holds for the entry point and for the algorithms that every backend has, auto, fast and plain.
``first`` and ``last`` are inclusive, ``last`` null means every later version; the record with the newest ``first``
counts. ``blends``: alpha and beta may be other than 1 and 0. ``repeatable``, which a record may have, lists what gives
the same bits at every equal call, by algorithm, whether there are saved statistics, and for x of up to so many
elements::

    {"operations": ["train"], "modes": ["spatial"], "dtypes": ["f32"], "layouts": ["nchw"], "algorithms": [""],
     "saved": [true, false], "elements": 32768}
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm.check.bounds import Status
from pybnorm.check.problem import MODES, Problem
from pybnorm.enums import Layout

__all__ = [
    "CLAIMED",
    "LOST",
    "NEWLY_UNSUPPORTED",
    "NOT_CLAIMED",
    "NO_LONGER_REPEATABLE",
    "check",
    "claimed",
    "record_of",
    "recorded",
    "repeatable",
]

CLAIMED = "claimed"
NOT_CLAIMED = "not claimed"
NEWLY_UNSUPPORTED = "newly unsupported"
NO_LONGER_REPEATABLE = "no longer repeatable"
LOST = (NEWLY_UNSUPPORTED, NO_LONGER_REPEATABLE)
"""What is a failure, whatever defects are known."""

_LAYOUTS = {Layout.CHANNELS_FIRST: "nchw", Layout.CHANNELS_LAST: "nhwc", Layout.STRIDED: "strides"}
_ANY_WAY = ("", "auto", "fast", "plain")  # a supported combination runs with these; other algorithms may refuse it
_FACTORS = (1e-30, 1e30)  # magnitudes that every backend can read, whatever type its factors have


def check(backend: str, version: Sequence[int], problem: Problem, status: Status, repeat: str = "") -> str:
    """What is recorded about a case that ended with `status`; `repeat` is as in `CaseResult`.

    Returns
    -------
    str
        `CLAIMED`, `NOT_CLAIMED`, `NEWLY_UNSUPPORTED` for a claimed case that is UNSUPPORTED, `NO_LONGER_REPEATABLE` for
        one that is recorded as giving the same bits at every call and did not, or "" if there is no record for the
        version.
    """
    record = record_of(backend, tuple(version))
    if record is None:
        return ""
    if repeat not in ("", "equal") and repeatable(record, problem):
        return NO_LONGER_REPEATABLE
    if not claimed(record, problem):
        return NOT_CLAIMED
    return NEWLY_UNSUPPORTED if status == Status.UNSUPPORTED else CLAIMED


def claimed(record: Mapping[str, Any], problem: Problem) -> bool:
    """Whether a record says that `problem` runs."""
    batch, elements = record["below"]["batch"], record["below"]["elements"]
    if batch is not None and problem.dims[0] >= batch:
        return False
    if _arguments.span(problem.dims, problem.strides) >= elements:
        return False
    if problem.fill in ("range", "special"):
        return False  # an adapter may refuse the values: statistics that another form of them cannot hold
    if problem.algorithm not in _ANY_WAY or problem.streams > 1 or problem.inplace or problem.activation:
        return False
    if problem.parameter_dtype != _arguments.derived_data_type(problem.dtype):
        return False
    factors = (problem.alpha, problem.beta, problem.alpha_param, problem.beta_param)
    blends = factors != (1, 0, 1, 0)
    if any(f and not _FACTORS[0] <= abs(f) <= _FACTORS[1] for f in factors):
        return False
    mode = next(word for word, value in MODES.items() if value == problem.mode)
    return any(
        problem.word in c["operations"]
        and mode in c["modes"]
        and problem.dtype.short in c["dtypes"]
        and _LAYOUTS[problem.layout] in c["layouts"]
        and len(problem.dims) in c["ranks"]
        and (c["blends"] or not blends)
        for c in record["combinations"]
    )


def repeatable(record: Mapping[str, Any], problem: Problem) -> bool:
    """Whether a record says that equal calls of `problem` give the same bits."""
    if problem.inplace or problem.activation:
        return False
    kind = _kind(problem)
    return any(
        math.prod(problem.dims) <= row["elements"] and all(value in row[name] for name, value in kind.items())
        for row in record.get("repeatable", ())
    )


def _kind(problem: Problem) -> dict[str, Any]:
    """What repeatability is recorded by, in the names of a record."""
    return {
        "operations": problem.word,
        "modes": next(word for word, value in MODES.items() if value == problem.mode),
        "dtypes": problem.dtype.short,
        "layouts": _LAYOUTS[problem.layout],
        "algorithms": problem.algorithm,
        "saved": problem.saved,
    }


def record_of(backend: str, version: Sequence[int]) -> dict[str, Any] | None:
    """The record that holds for a version, the one with the newest ``first``."""
    numbers = list(version)
    found = [
        record
        for record in _records(backend)
        if numbers[: len(record["first"])] >= record["first"]
        and (record["last"] is None or numbers[: len(record["last"])] <= record["last"])
    ]
    return max(found, key=lambda record: list(record["first"]), default=None)


@functools.cache
def _records(backend: str) -> tuple[dict[str, Any], ...]:
    file = importlib.resources.files("pybnorm.check") / "support" / f"{backend}.json"
    if not file.is_file():
        return ()
    return tuple(json.loads(file.read_text(encoding="utf-8")))


def recorded(rows: Iterable[Mapping[str, Any]], version: Sequence[int], source: str) -> dict[str, Any]:
    """A record of what a library on this machine says that it runs, to be reviewed.

    Parameters
    ----------
    rows : iterable of mapping
        ``operation``, ``mode``, ``dtype``, ``layout``, ``ranks`` and ``capability``, as ``pybnorm info --json`` has
        them.
    version : sequence of int
    source : str
        Where the record was made.

    Returns
    -------
    dict
        Combinations that differ in one list only are joined.
    """
    single: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if row["capability"] and row["operation"] in ("train", "infer", "backward"):
            key = (row["operation"], row["mode"], row["dtype"], row["layout"], "BLEND" in row["capability"])
            single.setdefault(key, set()).update(row["ranks"])
    groups = [
        ((operation,), (mode,), (dtype,), (layout,), tuple(sorted(ranks)), blends)
        for (operation, mode, dtype, layout, blends), ranks in single.items()
    ]
    for axis in (3, 2, 0, 1):
        groups = _joined(groups, axis)
    names = ("operations", "modes", "dtypes", "layouts", "ranks")
    return {
        "first": list(version),
        "last": None,
        "source": source,
        "below": {"batch": None, "elements": 2**31 - 1},
        "combinations": [
            {name: list(group[i]) for i, name in enumerate(names)} | {"blends": group[5]} for group in groups
        ],
    }


def _joined(groups: Sequence[tuple[Any, ...]], axis: int) -> list[tuple[Any, ...]]:
    def rest(group: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*group[:axis], *group[axis + 1 :])

    together: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for group in groups:
        together.setdefault(rest(group), []).append(group[axis])
    return [(*key[:axis], tuple(itertools.chain.from_iterable(parts)), *key[axis:]) for key, parts in together.items()]
