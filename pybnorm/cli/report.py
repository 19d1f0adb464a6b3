"""``pybnorm report``: the reports of a run that is kept."""

from __future__ import annotations

from typing import Any

import click

from pybnorm._text import visible
from pybnorm.check.compare import comparison as compare
from pybnorm.check.report import markdown, terminal
from pybnorm.check.run import archive
from pybnorm.cli import output
from pybnorm.errors import ArgumentError


@click.command(short_help="Show a saved run, or write it as a page or JUnit XML.")
@click.argument("run", metavar="RUN")
@output.document_option("the table")
@click.option("--junit", "junit_target", metavar="FILE", help="Write JUnit XML.")
@output.html_option()
@output.document_option("the table", "Markdown")
@click.option("--annotations", is_flag=True, help="Print what is wrong as GitHub's runner takes it, and nothing else.")
@click.option("-v", "--verbose", is_flag=True, help="Details and repro line of every case, not of failures only.")
@click.pass_context
def report(context: click.Context, /, run: str, annotations: bool, verbose: bool, **files: Any) -> None:
    """Show a run that is kept, or write it as a page, as JUnit XML, as Markdown.

    RUN is a folder of check --save, or a file of check --json or collect. Nothing is run or judged again.

    \b
    Exit status:
      0  the run is shown and written, whatever it found
      2  there is no run; bad arguments; or a report could not be written
    """
    silent = "-" in (files["json_target"], files["markdown_target"])
    with output.usage_errors():
        if annotations and silent:
            raise ArgumentError("--annotations", True, "without --json or --markdown on standard output")
        document = archive.read_run(run)
        output.spare_runs(context, compare.read([run]))
        targets = output.targets(context, "check")
    results = document["cases"]
    if annotations:
        stream = output.standard_output()
        stream.writelines(f"{visible(line)}\n" for line in markdown.ci_annotations(results))
        stream.flush()
    elif not silent:
        console = output.console()
        terminal.print_backends(console, document["backends"])
        terminal.print_results(console, results, verbose)
        terminal.print_details(console, results, verbose)
        terminal.print_totals(console, results, sum(r.seconds for r in results))
        terminal.print_conclusions(console, document["backends"], results, document.get("complete", True))
    if trouble := output.write_reports(document, targets):
        raise trouble
