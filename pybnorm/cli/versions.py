"""``pybnorm versions``: versions of a library side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import IO, Any

import click

from pybnorm._text import visible
from pybnorm.check.compare import versions as matrices
from pybnorm.cli import output


@click.command(short_help="Show what each version of a library gets wrong.")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True)
@output.document_option("the tables")
@output.document_option("the tables", "Markdown")
@output.html_option("")
@click.option(
    "--without", default="", metavar="TEXT", help="Leave cases out whose message has TEXT in one of the runs."
)
@click.pass_context
def versions(context: click.Context, /, paths: tuple[str, ...], without: str, **_: Any) -> None:
    """Versions of one library side by side: what each gets wrong, and each case's first bad and first good version.

    RUN is a folder of check --save, or a file of check --json, the oldest version first.

    \b
    Exit status:
      0  the matrix was written, whatever it shows
      2  bad arguments, or it could not be written
    """
    from pybnorm.check.compare import pages

    with output.usage_errors():
        targets = output.targets(context, "versions")
        found = matrices.matrix(matrices.read(paths), without=without)
    writers: dict[str, Callable[[IO[str]], object]] = {
        "--json": functools.partial(output.write_json, output.document(matrices.SCHEMA, matrices.document(found))),
        "--markdown": lambda stream: stream.write(f"# pybnorm versions\n\n{matrices.markdown(found)}"),
        "--html": functools.partial(pages.write_versions, found=found),
    }
    for option, target in targets.items():
        target.put(writers[option])
    if "-" not in (context.params["json_target"], context.params["markdown_target"]):
        click.echo(visible(matrices.markdown(found)), file=output.standard_output(), nl=False)
