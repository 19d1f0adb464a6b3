"""The judge of a case: NumPy, or CuPy or PyTorch on the GPU that the library computes on.

NumPy is the definition. On a GPU the same functions run on arrays of another namespace
(`pybnorm.reference.namespaces`), in float64, in the memory that the library has read and written; data are made there,
to the same bits. Sums are added in another order, so that results differ by some 1e-15 of what was added.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pybnorm._arrays import CPU
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.language.problem import Problem
from pybnorm.errors import ArgumentError, LibraryNotFoundError
from pybnorm.reference import namespaces
from pybnorm.reference.namespaces import Namespace

VARIABLE = "PYBNORM_JUDGE"
"""Names the judge: numpy, cupy or torch. Not set: by the problem and the device."""
LEAST = 1 << 20
"""Elements of x from which a GPU is quicker."""


def check(here: bool) -> None:
    """Raise before a run for what would make an error of each case; `here`: cases run on this machine."""
    word = os.environ.get(VARIABLE, "")
    if word and word not in namespaces.NAMES:
        raise ArgumentError(VARIABLE, word, " | ".join(namespaces.NAMES))
    if word and here and importlib.util.find_spec(word) is None:
        raise ArgumentError(VARIABLE, word, f"a judge whose package is installed: {word} is not")


def reason(problem: Problem) -> str:
    """Why only NumPy can judge a problem, or nothing."""
    return "memory between fences is pages of the CPU" if problem.fence else ""


def instead(results: Iterable[CaseResult]) -> list[str]:
    """Notes on cases that another judge than the named one had: a line per reason."""
    word = os.environ.get(VARIABLE, "")
    found: Counter[str] = Counter()
    for result in results:
        if word and result.judge not in ("", word):
            found[reason(Problem.parse(result.case)) or f"{word} has no arrays where the library computes"] += 1
    return [f"{n} case{'s' * (n > 1)} judged by numpy, not {word}: {why}" for why, n in found.items()]


def chosen(problem: Problem, device: Any) -> Namespace | None:
    """The judge of `problem` on `device`; None: NumPy. Raises where the variable names none that can be imported."""
    check(here=False)
    word = os.environ.get(VARIABLE, "")
    if word == "numpy" or reason(problem):
        return None
    if word:
        found = namespaces.namespace(word, device.device_id)
        return found if found.on_cpu == (device.device_type == CPU) else None
    if device.device_type == CPU or math.prod(problem.dims) < LEAST:
        return None
    for name in ("cupy", "torch"):
        with contextlib.suppress(LibraryNotFoundError):
            if not (found := namespaces.namespace(name, device.device_id)).on_cpu:
                return found
    return None
