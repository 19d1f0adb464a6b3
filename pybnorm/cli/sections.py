"""A command whose options stand in sections, with a hint for a value that is named without its option."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

import pybnorm

__all__ = ["Sectioned"]


class Sectioned(click.Command):
    """A command with its options' help in sections.

    Parameters
    ----------
    sections : mapping of str to sequence of str
        Options by title, such as ``--json``. Those that are named nowhere come last, with ``--help``.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section."""
        records = {p.opts[-1]: p.get_help_record(ctx) for p in self.get_params(ctx)}
        named = {option for options in self.sections.values() for option in options}
        rest = [option for option in records if option not in named]
        for title, options in (*self.sections.items(), ("Other options", rest)):
            found = [record for option in options if (record := records[option]) is not None]
            with formatter.section(title):
                formatter.write_dl(found)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; an argument that is the value of an option is told which may have been meant."""
        from pybnorm.check.language.lines import packaged_suites

        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            meant = [("--suite", word) for word in given if word in packaged_suites() or os.path.isfile(word)]
            meant += [("--backend", word) for word in given if word in pybnorm.backends()]
            meant += [("--case", word) for word in given if "," in word]
            for option, word in meant:
                if f"({word}" in error.message:
                    raise click.UsageError(f"{word} is no argument (did you mean {option} {word}?)", ctx) from None
            raise
