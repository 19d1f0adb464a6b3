"""``pybnorm selftest``: the judge's own tests."""

from __future__ import annotations

import functools

import click

from pybnorm._text import visible
from pybnorm.cli import output

__all__ = ["selftest"]


@click.command()
@output.json_option("the table")
@click.pass_context
def selftest(context: click.Context, json_target: str | None) -> None:
    """Run simulated kernels, right and wrong, through the judge: does it find what it should, and nothing else?

    \b
    Needs no vendor library. Exit status:
      0  no correct kernel was objected to, every bug was found often enough
      1  otherwise
    """
    from pybnorm.check.selftest import detection

    with output.usage_errors():
        targets = output.targets(context, "selftest", json=json_target)
    with output.progress(output.console(stderr=json_target == "-")) as progress:
        task = progress.add_task("selftest")
        found = detection.run(
            progress=lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
        )
    if json_target != "-":
        click.echo(visible(detection.render(found)), file=output.standard_output())
    if "--json" in targets:
        document = output.document("pybnorm.selftest/1", found.to_json())
        targets["--json"].put(functools.partial(output.write_json, document))
    context.exit(0 if found.good else 1)
