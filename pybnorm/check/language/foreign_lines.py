"""Common parts of the readers of other tools' lines: a line's words, and the cases made of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm.check.language.problem import Problem, is_integer
from pybnorm.enums import Operation
from pybnorm.errors import ArgumentError


class Read(NamedTuple):
    """A problem, and in what it is not what the tool would run."""

    problem: Problem
    notes: tuple[str, ...] = ()


class Several(NamedTuple):
    """The cases of a line, which may name many."""

    found: tuple[Read, ...]
    refused: dict[str, int]
    """By the feature that no case has, how many of the tool's problems need it."""
    notes: tuple[str, ...] = ()
    """What was not looked at."""


_SHELL = re.compile(r"[|;&]+|[0-9]?>.*|<.*")
"""Words at which a command ends that was pasted from a shell."""


def words(line: str, tool: str, begins: Callable[[str], bool]) -> list[str]:
    """Give what follows the word that a command `begins` with, wherever it stands: after variables, or in a log."""
    line = _arguments.text(line, tool)
    try:
        found = shlex.split(line.replace("`", " "))  # Markdown's
    except ValueError as error:
        raise ArgumentError(tool, line, f"a command line of {tool} ({error})") from None
    first = max((i + 1 for i, word in enumerate(found) if begins(word)), default=0)
    last = next((i for i, word in enumerate(found) if i >= first and _SHELL.fullmatch(word)), len(found))
    return found[first:last]


def is_program(word: str, name: str) -> bool:
    """Say whether a word of a command names a program, wherever it lies."""
    return re.split(r"[/\\]", word)[-1].removesuffix(".exe") == name


def whole(text: str, tool: str, word: str) -> int:
    """A whole number; else the error names the word that it is in."""
    if not is_integer(text):
        raise ArgumentError(tool, word, "a whole number there")
    return int(text)


def made(values: dict[str, Any]) -> Problem:
    """The problem of its fields; training has running statistics where it can."""
    problem = {"operation": values.pop("operation"), **values}
    if problem["operation"] == Operation.FORWARD_TRAINING:
        m = _arguments.reduced_count(problem["dims"], problem["mode"])
        problem["running"] = bool(problem.get("running", True)) and m > 1
    return Problem(**problem)
