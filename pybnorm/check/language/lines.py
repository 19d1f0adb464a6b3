"""Lines with alternatives, and suite files: the problems of them, each once."""

from __future__ import annotations

import importlib.resources
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Sequence

from pybnorm import _arguments, _files
from pybnorm._text import reason
from pybnorm.check.language.problem import Problem
from pybnorm.errors import ArgumentError

CASES_MAX = 200_000
"""Problems of a run: as many are read in seconds and kept in some hundred megabytes."""
INCLUDES_MAX = 20
"""Suites that include one another in a row."""
SUITE_LARGEST = 1 << 25
"""Bytes of a suite file."""


def expand(line: str) -> Iterator[Problem]:
    """Every problem of a line whose tokens may hold alternatives separated by ``/``, the last token varying fastest.

    Parameters
    ----------
    line : str

    Yields
    ------
    Problem

    Raises
    ------
    ArgumentError
        As for `Problem.parse`; more than `CASES_MAX` problems, before the first.

    Examples
    --------
    >>> [str(problem) for problem in pybnorm.check.expand("train/infer,spatial,f32,nchw,2x3x4x4,eps=0.001")]
    ['train,spatial,f32,nchw,2x3x4x4,eps=0.001', 'infer,spatial,f32,nchw,2x3x4x4,eps=0.001']
    """
    choices = []
    line = _arguments.text(line, "line")
    for token in line.strip().split(","):
        one = token.strip().startswith("data=")  # a name, with its folders
        first, *rest = (part.strip() for part in ([token] if one else token.split("/")))
        name, equals, _ = first.partition("=")
        choices.append([first, *(f"{name}={part}" if equals else part for part in rest)])
    _count(math.prod(map(len, choices)), line)
    for tokens in itertools.product(*choices):
        yield Problem.parse(",".join(tokens))


def _count(cases: int, source: str) -> None:
    if cases > CASES_MAX:
        allowed = f"at most {CASES_MAX} cases, alternatives multiplied out; these are {cases}"
        raise ArgumentError("case", source, allowed)


def select(cases: Sequence[str], suites: Sequence[str]) -> list[Problem]:
    """The problems of lines (`expand`) and of suites (`load_suite`), each once; of the suite smoke if neither."""
    reader = _Reader()
    cases = _arguments.items(cases, "cases", "a sequence of lines", CASES_MAX)
    suites = _arguments.items(suites, "suites", "a sequence of names or paths of suites", CASES_MAX)
    for case in cases:
        reader.take(case)
    for suite in suites or (() if cases else ("smoke",)):
        reader.load(_arguments.path(suite, "suite", _suites_allowed()), None, ())
    return list(reader.problems)


def packaged_suites() -> tuple[str, ...]:
    """Names of the suites that come with the package, in alphabetical order."""
    return tuple(sorted(f.name.removesuffix(".txt") for f in _packaged().iterdir() if f.name.endswith(".txt")))


def load_suite(name_or_path: str | os.PathLike[str]) -> list[Problem]:
    """The problems of a packaged suite, or of a file."""
    reader = _Reader()
    reader.load(_arguments.path(name_or_path, "name_or_path", _suites_allowed()), None, ())
    return list(reader.problems)


def read_suite(text: str, name: str = "suite") -> list[Problem]:
    r"""The problems of a suite file: one line each, alternatives multiplied out, ``#`` starts a comment.

    ``@other`` on a line of its own includes all problems of another suite: a file, relative to the one that names it
    (here to the current folder), else a packaged suite. A problem that came before, from either file, is kept once.
    Alternatives of one line that mean the same, such as nchw/nhwc of one channel, are one problem.

    Parameters
    ----------
    text : str
        What the file holds.
    name : str
        What errors call it.

    Returns
    -------
    list of Problem

    Raises
    ------
    ArgumentError
        With the file's name and line number in front of the bad token, also for a problem on two lines of one file and
        for suites that include each other in a circle, in a chain of more than `INCLUDES_MAX`, or have more than
        `CASES_MAX` problems.

    Examples
    --------
    >>> text = "# two cases\ntrain/infer,spatial,f32,nchw,2x3x4x4\n"
    >>> len(pybnorm.check.read_suite(text))
    2
    """
    reader, name = _Reader(), _arguments.text(name, "name")
    reader.read(_arguments.text(text, "text"), name, pathlib.Path(), (name,))
    return list(reader.problems)


def _suites_allowed() -> str:
    return f"{' | '.join(packaged_suites())} | a readable file"


def _packaged() -> importlib.resources.abc.Traversable:
    return importlib.resources.files("pybnorm.check.language") / "suites"


class _Reader:
    """The problems of lines and suite files, each once and each file once."""

    def __init__(self) -> None:
        self.problems: dict[Problem, None] = {}
        self._seen: set[str] = set()
        self._lines = 0

    def take(self, line: str) -> list[Problem]:
        """The problems of one line, which are added."""
        found = []
        for problem in expand(line):
            self._lines += 1  # also of what came before: it takes its time too
            _count(self._lines, line)
            found.append(problem)
            self.problems[problem] = None
        return found

    def load(self, name: str, folder: pathlib.Path | None, chain: tuple[str, ...]) -> None:
        """Read the suite `name`; `folder` is that of the file which includes it."""
        path = pathlib.Path(name) if folder is None else folder / name
        try:
            packaged = name in packaged_suites() and not (folder is not None and path.is_file())
            label, key = (name, name) if packaged else (str(path), os.path.realpath(path))
            if key in chain:
                circle = " -> ".join((*chain, key))
                raise ArgumentError("suite", circle, "suites that do not include each other in a circle")
            if len(chain) > INCLUDES_MAX:
                raise ArgumentError("suite", label, f"includes at most {INCLUDES_MAX} deep")
            if key in self._seen:  # it would add nothing
                return
            self._seen.add(key)
            file = _packaged() / f"{name}.txt"
            text = file.read_text("utf-8") if packaged else _files.read(path, SUITE_LARGEST).decode()
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            raise ArgumentError("suite", name, f"{_suites_allowed()} ({reason(error)})") from None
        self.read(text, label, None if packaged else path.parent, (*chain, key))

    def read(self, text: str, name: str, folder: pathlib.Path | None, chain: tuple[str, ...]) -> None:
        """Read a suite's lines."""
        empty = True
        lines: dict[Problem, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            body = line.partition("#")[0].strip()
            if not body:
                continue
            empty = False
            try:
                if body.startswith("@"):
                    self.load(body.removeprefix("@").strip(), folder, chain)
                    continue
                for problem in self.take(body):
                    if lines.setdefault(problem, number) != number:
                        raise ArgumentError("case", str(problem), f"each case once; it is on line {lines[problem]} too")
            except ArgumentError as error:
                raise ArgumentError(f"{name}:{number}: {error.argument}", error.value, error.allowed) from None
        if empty:
            raise ArgumentError(name, "no case", "at least one case")
