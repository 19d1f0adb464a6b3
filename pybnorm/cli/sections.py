"""A command whose options stand in sections, with a hint for a value that is named without its option."""

from __future__ import annotations

import os

import click

import pybnorm

_SECTIONS = {"--backend": "What to run", "--jobs": "How", "--json": "What to write", "--help": "Other options"}
"""Titles by the first option of each section."""


class Sectioned(click.Command):
    """A command with its options' help in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section."""
        records: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            title = _SECTIONS.get(parameter.opts[-1], next(reversed(records), ""))
            records.setdefault(title, []).extend(filter(None, [parameter.get_help_record(ctx)]))
        for title, found in records.items():
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
