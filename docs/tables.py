"""Tables of the pages, made of the code that they are about: ``{pybnorm} NAME`` in a page."""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from docutils import nodes
from docutils.statemachine import StringList
from numpydoc.docscrape import ClassDoc
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

import _pybnorm_pytestplugin
import pybnorm
from pybnorm import errors
from pybnorm.check.judging import bounds
from pybnorm.check.judging.results import OUTPUTS
from pybnorm.check.language import lines, problem
from pybnorm.check.language.problem import Problem

Row = tuple[str, ...]


def options() -> Iterator[Row]:
    """Every option of the problem language: values, default, and the operations that have it."""
    yield "option", "of", "default", "what it is"
    texts = {name: " ".join(text) for p in ClassDoc(Problem)["Parameters"] for name, text in _named(p)}
    defaults = {field.name: field.default for field in dataclasses.fields(Problem)}
    for name in dict.fromkeys(itertools.chain(*problem.OPTIONS.values())):
        of = [word for word, own in problem.OPTIONS.items() if name in own]
        default = defaults[name]
        shown = {None: "its own", "": "none", True: "1", False: "0"}.get(default, getattr(default, "name", default))
        yield (
            f"``{name}=``",
            "all" if len(of) == len(problem.OPTIONS) else ", ".join(of),
            str(shown).lower(),
            texts[name],
        )


def _named(parameter: Any) -> Iterator[tuple[str, list[str]]]:
    for name in parameter.name.split(", "):
        yield name, parameter.desc


def operations() -> Iterator[Row]:
    """Every operation and its outputs."""
    yield "operation", "what is called", "outputs"
    for word, operation in problem.OPERATIONS.items():
        yield f"``{word}``", f"the vendor's {operation.name.lower().replace('_', ' ')}", ", ".join(OUTPUTS[word])
    for word in problem.COMPOSED:
        name = {"frozen": "backward_frozen"}.get(word, word)
        name = (
            f"pybnorm.sync, {name.removeprefix('sync_')}" if name.startswith("sync_") else f"pybnorm.operations.{name}"
        )
        yield f"``{word}``", f"``{name}``", ", ".join(OUTPUTS.get(word, ()))


def suites() -> Iterator[Row]:
    """Every packaged suite, its cases, and what its file says of itself."""
    yield "suite", "cases", "what it is"
    for name in lines.packaged_suites():
        source = importlib.resources.files("pybnorm.check.language").joinpath(f"suites/{name}.txt").read_text()
        head = [line.lstrip("# ").strip() for line in re.match(r"(?:#.*\n)*", source)[0].splitlines()]  # type: ignore[index]
        text = " ".join(line for line in head if line and "a/b in a token" not in line)
        yield f"``{name}``", str(len(lines.load_suite(name))), text


def statuses() -> Iterator[Row]:
    """Every status, from good to bad, and whether it makes a run fail."""
    yield "status", "a run with it exits with", "what it says"
    source = inspect.getsource(bounds.Status)
    for status in bounds.Status:
        text = re.search(rf'{status.name} = .*\n\s+"""((?:.|\n)*?)"""', source)
        assert text, status
        exits = "0" if status.good else "2" if status == bounds.Status.ERROR else "1"
        yield f"``{status.value}``", exits, " ".join(text[1].split())


def exceptions() -> Iterator[Row]:
    """Every exception, what it is also, and what it says of itself."""
    yield "exception", "is also", "when"
    for name in errors.__all__:
        kind = getattr(errors, name)
        bases = [b.__name__ for b in kind.__mro__[1:] if b.__name__ not in ("object", "BaseException", "Exception")]
        yield f"``{name}``", ", ".join(bases), (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")


def algorithms() -> Iterator[Row]:
    """Every algorithm that a plan can take, by backend."""
    yield "backend", "algorithms"
    for backend in pybnorm.backends():
        yield f"``{backend}``", ", ".join(f"``{name}``" for name in pybnorm.algorithms(backend))


def pytest_options() -> Iterator[Row]:
    """Every option that the plugin adds to pytest."""
    yield "option", "what it does"
    found = pytest.Parser(_ispytest=True)
    _pybnorm_pytestplugin.pytest_addoption(found)
    for option in found.getgroup("pybnorm").options:
        name, value = option.names()[0], option.attrs().get("metavar")
        yield f"``{name}{f' {value}' if value else ''}``", option.attrs()["help"]


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    f.__name__: f for f in (options, operations, suites, statuses, exceptions, algorithms, pytest_options)
}


class Table(SphinxDirective):
    """``{pybnorm} NAME``: one of `TABLES`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table, parsed as the page's own Markdown is."""
        first, *rest = TABLES[self.arguments[0]]()
        lines = ["```{list-table}", ":header-rows: 1", ""]
        for row in (first, *rest):
            lines += [f"{'  -' if i else '* -'} {cell}" for i, cell in enumerate(row)]
        lines.append("```")
        parsed = nodes.section()
        parsed.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, f"<{self.arguments[0]}>"), parsed)
        return parsed.children


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("pybnorm", Table)
    return {"parallel_read_safe": True}
