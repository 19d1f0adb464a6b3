"""Completion in a shell: backends, suites, and the words and values of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

import pybnorm
from pybnorm.check.language.lines import packaged_suites
from pybnorm.check.language.problem import (
    ACTIVATIONS,
    CHOICES,
    COMPOSED,
    DATA_TYPES,
    FILLS,
    FLAGS,
    LAYOUTS,
    MODES,
    OPERATIONS,
    OPTIONS,
    RANDOM,
)
from pybnorm.errors import ArgumentError

_VALUES = {
    "fill": FILLS,
    "activation": tuple(ACTIVATIONS),
    "params": tuple(DATA_TYPES),
    "seed": (RANDOM,),
    **{name: tuple(filter(None, words)) for name, words in CHOICES.items()},
    **dict.fromkeys(FLAGS, ("0", "1")),
}
"""Of the options of a case that have words for values, but for the algorithms, which backends have."""


class Backend(click.ParamType):  # type: ignore[type-arg]
    """The name of a backend."""

    name = "backend"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what is no backend, and name the one that is most like it."""
        known = pybnorm.backends()
        if value not in known:
            raise click.UsageError(str(ArgumentError(param.opts[-1] if param else "", value, " | ".join(known))))
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names of backends that begin so."""
        return _begun(pybnorm.backends(), incomplete)


def suites(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of packaged suites that begin so; files, where none does."""
    return _begun(packaged_suites(), incomplete) or [CompletionItem(incomplete, type="file")]


def words(*all_: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Complete one of these words."""
    return lambda context, parameter, incomplete: _begun(all_, incomplete)


def cases(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A case whose last word, of those that its place has, is completed."""
    before, comma, last = incomplete.rpartition(",")
    tokens = before.split(",") if comma else []
    places = [[*OPERATIONS, *COMPOSED], list(MODES), list(DATA_TYPES), list(LAYOUTS)]
    possible: Iterable[str] = ()
    name, equals, values = last.partition("=")
    # of alternatives the last one is completed
    done, slash, rest = (values if equals else last).rpartition("/")
    head = before + comma + name * bool(equals) + equals + done + slash
    if len(tokens) < len(places):
        possible = [f"{word}," for word in places[len(tokens)]]
    elif len(tokens) > len(places) and equals:
        algorithms = (word for backend in pybnorm.backends() for word in pybnorm.algorithms(backend))
        possible = dict.fromkeys(algorithms) if name == "algorithm" else _VALUES.get(name, ())
    elif len(tokens) > len(places):
        given = {token.partition("=")[0] for token in tokens[5:]}
        possible = [f"{name}=" for name in OPTIONS.get(tokens[0].partition("/")[0], ()) if name not in given]
    return [CompletionItem(head + word) for word in possible if word.startswith(rest)]


def _begun(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]
