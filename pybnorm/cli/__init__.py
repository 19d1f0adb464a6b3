"""The command ``pybnorm``: what is here, and is it right?

Each command is a module of this package. It is imported when the command is run or listed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import click

import pybnorm
from pybnorm._text import visible

__all__ = ["main"]

INTERRUPTED = 130  # as shells have it: 128 + SIGINT
ARGUMENTS = "pybnorm.arguments"
"""Key of click's ``Context.meta`` with what the command was called with."""
_COMMANDS = ("bench", "check", "claims", "collect", "compare", "info", "report", "selftest", "versions")


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # All are imported for an unknown name: click suggests similar ones from self.commands.
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                self.add_command(getattr(importlib.import_module(f"{__name__}.{name}"), name))
        return super().get_command(ctx, cmd_name)

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **options: Any) -> click.Context:
        given = list(args)  # which click empties
        with _shown():
            context = super().make_context(info_name, args, *more, **options)
        context.meta[ARGUMENTS] = given
        return context

    def invoke(self, ctx: click.Context) -> Any:
        with _shown():
            return super().invoke(ctx)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Report an interrupt, and click's errors in one line: without hidden characters, which what they quote may have.

    They come without the usage of the command, which ``--help`` shows.
    """
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except click.ClickException as error:
        vars(error)["message"] = visible(error.message)
        if isinstance(error, click.UsageError) and not isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.ctx = None
        raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pybnorm.__version__, prog_name="pybnorm")
def main() -> None:
    """Batch normalization of every vendor library on this machine, held against a float64 reference."""
