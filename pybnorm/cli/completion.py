"""What a shell completes: backends, suites, and the words of a case."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

import pybnorm
from pybnorm.check.problem import (
    COMPOSED,
    COMPOSED_OPTIONS,
    DATA_TYPES,
    LAYOUTS,
    MODES,
    OPERATIONS,
    OPTIONS,
    packaged_suites,
)

__all__ = ["backends", "cases", "suites"]


def backends(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of backends that begin so."""
    return [CompletionItem(name) for name in pybnorm.backends() if name.startswith(incomplete)]


def suites(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of packaged suites that begin so; files, where none does."""
    found = [CompletionItem(name) for name in packaged_suites() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def cases(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A case whose last word, of those that its place has, is completed."""
    before, comma, last = incomplete.rpartition(",")
    tokens = before.split(",") if comma else []
    options = {word: OPTIONS[operation] for word, operation in OPERATIONS.items()} | COMPOSED_OPTIONS
    places = [[*OPERATIONS, *COMPOSED], list(MODES), list(DATA_TYPES), list(LAYOUTS)]
    words: list[str] = []
    if len(tokens) < len(places):
        words = places[len(tokens)]
    elif len(tokens) > len(places):
        given = {token.partition("=")[0] for token in tokens[5:]}
        words = [f"{name}=" for name in options.get(tokens[0].partition("/")[0], ()) if name not in given]
    done, slash, rest = last.rpartition("/")  # alternatives: the last one is completed
    return [CompletionItem(before + comma + done + slash + word) for word in words if word.startswith(rest)]
