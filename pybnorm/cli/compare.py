"""``pybnorm compare``: hold runs against each other."""

from __future__ import annotations

import functools
from typing import Any

import click
from rich.text import Text

from pybnorm.check.compare import comparison as comparing
from pybnorm.check.compare import document as compare_document
from pybnorm.check.compare import terminal as compare_terminal
from pybnorm.cli import output


@click.command(short_help="Compare runs: two libraries, or two versions of one.")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True)
@output.document_option("the tables")
@output.html_option()
@click.option("--allow-known", is_flag=True, help="Known defects do not make the exit status 1.")
@click.option("-v", "--verbose", is_flag=True, help="Lists in full.")
@click.pass_context
def compare(context: click.Context, /, paths: tuple[str, ...], allow_known: bool, verbose: bool, **files: Any) -> None:
    """Hold runs against each other: two vendors, two versions of a library, two machines.

    RUN is a folder of check --save, or a file of check --json, of which only statuses and ratios can be compared. Older
    versions come first. Every two backends of all runs are compared on the cases that both have; outputs by the sum of
    both sides' error bounds.

    \b
    Exit status:
      0  all is equal, within the sum of both bounds, or agrees in its status
      1  a difference is beyond the bounds or undecided, one side passes where
         the other fails, or a later run fails or refuses what an earlier one
         of the same backend did not, could not run that backend any more, or
         is not complete and lacks its cases (of a backend that a machine of
         another kind does not have, there is a notice only); or two libraries
         or more agree with one another and not with the reference
      2  there is nothing to compare; bad arguments; or the result could not
         be written
    130  interrupted
    """
    from pybnorm.check.compare import pages

    silent = files["json_target"] == "-"
    console = output.console(stderr=silent)
    with output.usage_errors():
        runs = comparing.read(paths)
        output.spare_runs(context, runs)
        targets = output.targets(context, "compare")
        with output.progress(console) as progress:
            task = progress.add_task("compare")
            comparison = comparing.compare(
                runs, lambda done, total: progress.update(task, completed=done, total=total), allow_known
            )
    if not silent:
        compare_terminal.print_comparison(console, comparison, verbose)
    output.put_json(targets, compare_document.contents(comparison))
    if "--html" in targets:
        targets["--html"].put(functools.partial(pages.write_comparison, comparison=comparison))
    if comparison.exit_status == 2:
        alone = len(comparison.runs) == 1 and len(comparison.runs[0].backends) == 1
        why = "this is one run of one library" if alone else "no two backends of these runs judged the same case"
        console.print(Text(f"Nothing to compare: {why}.", "bold red"))
    context.exit(comparison.exit_status)
