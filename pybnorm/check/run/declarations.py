"""Declarations of an implementation: the cases that it claims, and the conventions that they are judged by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pybnorm.check.language import calls
from pybnorm.check.language.problem import DATA_TYPES, LAYOUTS, MODES, Problem
from pybnorm.errors import ArgumentError

DERIVED = "derived"
_SAVED = ("inverse standard deviation", "variance")
_OUTPUTS = tuple(
    dict.fromkeys(
        tensor.name
        for tensors in (*calls.EVERY.values(), *(composed.tensors for composed in calls.COMPOSED.values()))
        for tensor in tensors
        if tensor.written
    )
)
_LEAST: dict[str, Callable[[Problem], float]] = {
    "m": lambda problem: problem.m,
    "epsilon": lambda problem: problem.epsilon,
    "rank": lambda problem: len(problem.dims),
    "images": lambda problem: problem.dims[0],
    "channels": lambda problem: problem.dims[1],
}
_PAIRS = {"saved": ("saved_mean", "saved_inv_variance"), "running": ("running_mean", "running_variance")}
"""Fields of a problem without which training has no such results."""


class Declarations:
    """The attributes of an object that say what it claims (`pybnorm.check.run.implementations`)."""

    def __init__(self, spec: str, target: Any) -> None:
        self._spec, self._target = spec, target
        self.dtypes = self._words("dtypes", DATA_TYPES)
        self.parameters = self._words("parameters", (*DATA_TYPES, DERIVED))
        self.layouts = self._words("layouts", (*LAYOUTS, "strides"))
        self.modes = self._words("modes", MODES)
        self.outputs = self._words("outputs", _OUTPUTS)
        self.unbiased = getattr(target, "unbiased", True)
        if not isinstance(self.unbiased, bool):
            raise ArgumentError(f"{spec}.unbiased", self.unbiased, "True | False")
        self.saved = getattr(target, "saved", _SAVED[0])
        if self.saved not in _SAVED:
            raise ArgumentError(f"{spec}.saved", self.saved, " | ".join(_SAVED))
        self.minimum = getattr(target, "minimum", {})
        known = isinstance(self.minimum, Mapping) and all(
            name in _LEAST and isinstance(value, (int, float)) for name, value in self.minimum.items()
        )
        if not known:
            raise ArgumentError(f"{spec}.minimum", self.minimum, f"a mapping of numbers by {' | '.join(_LEAST)}")

    def _words(self, name: str, allowed: Collection[str]) -> tuple[str, ...] | None:
        """An attribute that is some of a few words; None where it is left out, which claims all."""
        value = getattr(self._target, name, None)
        if value is None:
            return None
        words = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Collection) else (value,)
        if wrong := [word for word in words if word not in allowed]:
            raise ArgumentError(f"{self._spec}.{name}", wrong[0], " | ".join(allowed))
        return words

    def applied(self, problem: Problem) -> Problem | str:
        """The problem that is run and judged for `problem`, or why it is not claimed."""
        token = str(problem).split(",")
        for title, words, word in (
            ("data", self.dtypes, problem.dtype.short),
            ("mode", self.modes, token[1]),
            ("layout", self.layouts, token[3].partition("=")[0]),
        ):
            if words is not None and word not in words:
                return f"does not claim {title} {word}"
        if reason := self._refused_parameters(problem):
            return reason
        for name, least in self.minimum.items():
            if _LEAST[name](problem) < least:
                return f"claims {name} >= {least:g} only"
        found = self._with_its_outputs(problem)
        if isinstance(found, str):
            return found
        return self._refused_by_itself(found) or found

    def _refused_parameters(self, problem: Problem) -> str:
        if self.parameters is None or problem.parameter_dtype.short in self.parameters:
            return ""
        if DERIVED in self.parameters and problem.parameter_dtype == problem.default_params:
            return ""
        return f"does not claim parameters of {problem.parameter_dtype.short} beside {problem.dtype.short}"

    def _with_its_outputs(self, problem: Problem) -> Problem | str:
        """The problem without the results that it does not give, by the conventions of those that it gives."""
        changes: dict[str, Any] = {}
        lacks = [t.name for t in calls.outputs(problem) if self.outputs is not None and t.name not in self.outputs]
        for field, pair in _PAIRS.items() if problem.word == "train" else ():
            if set(lacks) & set(pair):
                changes[field] = False
                lacks = [name for name in lacks if name not in pair]
        if lacks:
            return f"does not give {' and '.join(lacks)}"
        if problem.word == "train" and problem.running and "running" not in changes and not self.unbiased:
            changes["unbiased"] = False
        if self.saved == "variance" and problem.saved and "saved" not in changes:
            if problem.word == "backward":
                return "saves the variance, and backward cases give the inverse standard deviation"
            if problem.word == "train":
                changes["saves_variance"] = True
        if "running" in changes:
            changes |= {"unbiased": True, "old": "drawn"}
        return dataclasses.replace(problem, **changes) if changes else problem

    def _refused_by_itself(self, problem: Problem) -> str:
        supports = getattr(self._target, "supports", None)
        answer = True if supports is None else supports(problem)
        if isinstance(answer, str):
            return answer
        return "" if answer or answer is None else "does not claim this case"
