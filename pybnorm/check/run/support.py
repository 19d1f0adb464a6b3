"""Recorded support: which combinations a library is known to run, so that one it no longer runs is a failure.

``support/BACKEND.json`` holds records, each for a range of versions, both ends included; the newest ``first`` counts.
``pybnorm info --claims`` makes one. Conditions that no query knows, such as the largest batch, are added by hand::

    {"first": [3, 2], "last": null, "source": "...", "below": {"batch": null, "elements": 2147483648},
     "combinations": [{"operations": ["train"], "modes": ["spatial"], "dtypes": ["f16"], "layouts": ["nchw", "nhwc"],
                       "ranks": [2, 3, 4], "blends": true}]}

It holds for the entry point and for auto, fast and plain. ``blends``: alpha and beta may be other than 1 and 0.

``pybnorm claims record RUN`` makes a record of one version, build (the file's digest) and device; it holds beside the
other. Its ``repeatable`` lists what gave the same bits at every equal call, for x of up to so many elements.

The variable ``PYBNORM_CLAIMS`` names a folder with more records, in files of the same names.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pybnorm import _arguments, _files
from pybnorm._text import reason
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.language.problem import MODES, Problem
from pybnorm.enums import Layout
from pybnorm.errors import ArgumentError

CLAIMED = "claimed"
NOT_CLAIMED = "not claimed"
NEWLY_UNSUPPORTED = "newly unsupported"
NO_LONGER_REPEATABLE = "no longer repeatable"
LOST = (NEWLY_UNSUPPORTED, NO_LONGER_REPEATABLE)
"""Statuses that are failures, whatever defects are known."""

_LAYOUTS = {Layout.CHANNELS_FIRST: "nchw", Layout.CHANNELS_LAST: "nhwc", Layout.STRIDED: "strides"}
_ANY_WAY = ("", "auto", "fast", "plain")  # a supported combination runs with these; other algorithms may refuse it
_WORDS = ("operations", "modes", "dtypes", "layouts")
_KINDS = (*_WORDS, "algorithms", "saved")
VARIABLE = "PYBNORM_CLAIMS"
"""Names a folder with records of the user's own."""
_FACTORS = (1e-30, 1e30)  # magnitudes that every backend can read, whatever type its factors have


def check(
    backend: str,
    version: Sequence[int],
    device: str,
    problem: Problem,
    status: Status,
    repeat: str = "",
    build: str = "",
) -> str:
    """The record of a case that ended with `status` and `repeat`; "" in a version without a record."""
    records = [r for r in (record_of(backend, version), run_of(backend, version, device, build)) if r is not None]
    if not records:
        return ""
    if repeat not in ("", "equal") and any(repeatable(record, problem) for record in records):
        return NO_LONGER_REPEATABLE
    if not any(claimed(record, problem) for record in records):
        return NOT_CLAIMED
    return NEWLY_UNSUPPORTED if status == Status.UNSUPPORTED else CLAIMED


def claimed(record: Mapping[str, Any], problem: Problem) -> bool:
    """Tell whether a record says that `problem` runs."""
    batch, elements = record["below"]["batch"], record["below"]["elements"]
    if batch is not None and problem.dims[0] >= batch:
        return False
    if _arguments.span(problem.dims, problem.strides) >= elements or not _ordinary(problem):
        return False
    kind, blends = _kind(problem), _factors(problem) != (1, 0, 1, 0)
    return any(
        all(kind[n] in c[n] for n in _WORDS) and len(problem.dims) in c["ranks"] and (c["blends"] or not blends)
        for c in record["combinations"]
    )


def _factors(problem: Problem) -> tuple[float, float, float, float]:
    return problem.alpha, problem.beta, problem.alpha_param, problem.beta_param


def _ordinary(problem: Problem) -> bool:
    """Tell whether it is of the calls that combinations are recorded of."""
    if problem.fill in ("range", "special"):
        return False  # an adapter may refuse the values: statistics that another form of them cannot hold
    given = problem.misalign, problem.saves_variance, problem.streams > 1, not problem.unbiased
    if problem.algorithm not in _ANY_WAY or any(given) or not _plain(problem):
        return False
    if problem.parameter_dtype != problem.default_params:
        return False
    return all(not f or _FACTORS[0] <= abs(f) <= _FACTORS[1] for f in _factors(problem))


def _plain(problem: Problem) -> bool:
    return not (problem.inplace or problem.activation or problem.inverse)


def repeatable(record: Mapping[str, Any], problem: Problem) -> bool:
    """Tell whether a record says that equal calls of `problem` give the same bits."""
    kind = _kind(problem)
    return _plain(problem) and any(
        math.prod(problem.dims) <= row["elements"] and all(value in row[name] for name, value in kind.items())
        for row in record.get("repeatable", ())
    )


def _kind(problem: Problem) -> dict[str, Any]:
    """The key of a record of repeatability, in the names of a record."""
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

    def holds(first: list[int], last: list[int] | None) -> bool:
        return list(version[: len(first)]) >= first and (last is None or list(version[: len(last)]) <= last)

    found = [r for r in records(backend) if not _is_of_run(r) and holds(r["first"], r["last"])]
    return max(found, key=lambda record: list(record["first"]), default=None)


def run_of(backend: str, version: Sequence[int], device: str, build: str = "") -> dict[str, Any] | None:
    """The record that a run of this version, build and device made; else one of no named build."""
    own = {_key(r): r for r in reversed(records(backend)) if _is_of_run(r)}
    version = tuple(version)
    return own.get((version, device, build)) or own.get((version, device, ""))


def _key(record: Mapping[str, Any]) -> tuple[tuple[int, ...], str, str]:
    return tuple(record["first"]), record.get("device", ""), record.get("build", "")


def _is_of_run(record: Mapping[str, Any]) -> bool:
    return "repeatable" in record


@functools.cache
def records(backend: str) -> tuple[dict[str, Any], ...]:
    """The records of a backend: the user's own, then those of this package."""
    own = read(VARIABLE, Path(os.environ[VARIABLE]) / f"{backend}.json") if os.environ.get(VARIABLE) else []
    file = importlib.resources.files("pybnorm.check.run") / "support" / f"{backend}.json"
    return (*own, *(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ()))


def read(argument: str, file: Path) -> list[dict[str, Any]]:
    """The records of a file, which need not be there; `argument` is what the error names beside it."""
    try:
        found: list[dict[str, Any]] = json.loads(_files.read(file, _LARGEST).decode())
        if not _files.is_like(found, [_RECORD]):
            raise ValueError("a record has another form")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(argument, str(file), f"records of pybnorm claims ({reason(error)})") from None
    return found


_RECORD: dict[str, Any] = {
    "first": [int],
    "last": ([int], type(None)),
    "below": {"batch": (int, type(None)), "elements": int},
    "combinations": [{key: [str] for key in _WORDS} | {"ranks": [int], "blends": bool}],
    "device?": str,
    "build?": str,
    "repeatable?": [{key: [str] for key in (*_WORDS, "algorithms")} | {"saved": [bool], "elements": int}],
}
"""The form of a record; a name with ? may be missing."""
_LARGEST = 1 << 26
"""Bytes of a file of records."""


def of_run(
    results: Iterable[CaseResult], version: Sequence[int], device: str, source: str, build: str = ""
) -> dict[str, Any]:
    """A record of what one version of a library did in a run on one device: combinations of which no case was refused.

    `results`: of one library. `device`, `build`: name and digest, as `pybnorm.check.judging.results.BackendInfo` has
    them. `source`: where the run was made.
    """
    ran: dict[tuple[Any, ...], bool] = {}
    sizes: dict[tuple[Any, ...], list[int]] = {}
    differ = set()
    reach = 0
    for result in results:
        try:
            problem = Problem.parse(result.case)
        except ArgumentError:
            continue
        kind = _kind(problem)
        if _ordinary(problem):
            blends = _factors(problem) != (1, 0, 1, 0)
            key = *(kind[name] for name in _WORDS), len(problem.dims), blends
            ran[key] = ran.get(key, True) and result.status != Status.UNSUPPORTED
            reach = max(reach, _arguments.span(problem.dims, problem.strides))
        if result.repeat and result.status.good and _plain(problem):
            key = tuple(kind.values())
            sizes.setdefault(key, []).append(math.prod(problem.dims))
            if result.repeat != "equal":
                differ.add(key)
    single: dict[tuple[Any, ...], list[int]] = {}
    for (*combination, rank, blends), runs in ran.items():
        other = ran.get((*combination, rank, not blends), False)
        if runs and blends <= ran.get((*combination, rank, False), True) and (blends or not other):
            single.setdefault((*combination, blends), []).append(rank)
    same = [(*((part,) for part in key), max(found)) for key, found in sizes.items() if key not in differ]
    return {
        "first": list(version),
        "last": list(version),
        "device": device,
        **({"build": build} if build else {}),
        "source": source,
        "below": {"batch": None, "elements": reach + 1},
        "combinations": _combinations(single),
        "repeatable": [
            {name: list(part) for name, part in zip(_KINDS, group, strict=False)} | {"elements": group[6]}
            for group in _joined(same, 5, 3, 2, 1, 0, 4)
        ],
    }


def with_record(known: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    """The text of a file of records with one more, in place of that of the same version, device and build, or none."""
    version, device, build = _key(record)
    replaced = (version, device, build), (version, device, "")
    kept = [r for r in known if not (_is_of_run(r) and _key(r) in replaced)]
    text = json.dumps([*kept, record], indent=1)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{re.sub(chr(10) + ' *', ' ', m[1])}]", text) + "\n"


def recorded(rows: Iterable[Mapping[str, Any]], version: Sequence[int], source: str) -> dict[str, Any]:
    """A record, made at `source`, of what a library says that it runs, to be reviewed; `rows` as of ``info --json``."""
    single: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if row["capability"] and row["operation"] in ("train", "infer", "backward"):
            key = (row["operation"], row["mode"], row["dtype"], row["layout"], "BLEND" in row["capability"])
            single.setdefault(key, set()).update(row["ranks"])
    return {
        "first": list(version),
        "last": None,
        "source": source,
        "below": {"batch": None, "elements": 2**31 - 1},
        "combinations": _combinations(single),
    }


def _combinations(single: Mapping[tuple[Any, ...], Iterable[int]]) -> list[dict[str, Any]]:
    """Combinations of words and whether they blend, with their ranks; those that differ in one list are joined."""
    groups = [(*((part,) for part in key[:4]), tuple(sorted(ranks)), key[4]) for key, ranks in single.items()]
    names = (*_WORDS, "ranks")
    return [dict(zip(names, map(list, g), strict=False)) | {"blends": g[5]} for g in _joined(groups, 3, 2, 0, 1)]


def _joined(groups: list[tuple[Any, ...]], *axes: int) -> list[tuple[Any, ...]]:
    """Groups that differ in one list only are one, along each of the axes in turn."""
    for axis in axes:
        together: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for group in groups:
            together.setdefault((*group[:axis], *group[axis + 1 :]), []).append(group[axis])
        joined = ((key, tuple(itertools.chain.from_iterable(parts))) for key, parts in together.items())
        groups = [(*key[:axis], parts, *key[axis:]) for key, parts in joined]
    return groups
