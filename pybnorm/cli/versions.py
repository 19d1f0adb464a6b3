"""``pybnorm versions``: versions of a library side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import IO

import click

from pybnorm._text import visible
from pybnorm.check.compare import versions as matrices
from pybnorm.cli import output

__all__ = ["versions"]


@click.command(short_help="Show what each version of a library gets wrong.")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True)
@output.json_option("the tables")
@output.markdown_option("the tables")
@click.option("--html", "html_target", metavar="FILE", help="Write one self-contained page.")
@click.option(
    "--without", default="", metavar="TEXT", help="Leave cases out whose message has TEXT in one of the runs."
)
@click.pass_context
def versions(
    context: click.Context,
    paths: tuple[str, ...],
    json_target: str | None,
    markdown_target: str | None,
    html_target: str | None,
    without: str,
) -> None:
    """Versions of one library side by side: what each gets wrong, and each case's first bad and first good version.

    RUN is a folder of check --save, or a file of check --json, the oldest version first.

    \b
    Exit status:
      0  the matrix was written, whatever it shows
      2  bad arguments, or it could not be written
    """
    from pybnorm.check.compare import pages
    from pybnorm.check.report import html

    with output.usage_errors():
        if html_target is not None:
            html.require()
        asked = {"json": json_target, "markdown": markdown_target, "html": html_target}
        targets = output.targets(context, "versions", **asked)
        found = matrices.matrix(matrices.read(paths), without=without)
    writers: dict[str, Callable[[IO[str]], object]] = {
        "--json": functools.partial(output.write_json, output.document(matrices.SCHEMA, matrices.document(found))),
        "--markdown": lambda stream: stream.write(f"# pybnorm versions\n\n{matrices.markdown(found)}"),
        "--html": functools.partial(pages.write_versions, found=found),
    }
    for option, target in targets.items():
        target.put(writers[option])
    if "-" not in (json_target, markdown_target):
        click.echo(visible(matrices.markdown(found)), file=output.standard_output(), nl=False)
