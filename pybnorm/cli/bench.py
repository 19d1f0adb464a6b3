"""``pybnorm bench``: speed and memory, where the source tree with its benchmarks is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

import pybnorm


def _benchmarks() -> click.Group:
    """The commands of the source tree that this package or the current folder belongs to."""
    for tree in (Path(pybnorm.__file__).parents[1], Path.cwd()):
        if (tree / "benchmarks" / "rivals.py").is_file():
            sys.path.insert(0, str(tree))
            try:
                return importlib.import_module("benchmarks.command").bench
            finally:
                sys.path.remove(str(tree))
    raise click.UsageError(
        "the benchmarks are not installed with pybnorm, they are in its source tree: "
        "get the source, change to its folder and run pybnorm bench there"
    )


class _Bench(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        try:
            return _benchmarks().list_commands(ctx)
        except click.UsageError:  # the help is there everywhere
            return []

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        self.commands = _benchmarks().commands  # from which click suggests similar ones
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Bench)
def bench() -> None:
    """Measure speed and memory, in pybnorm's source tree."""
