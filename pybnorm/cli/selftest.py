"""``pybnorm selftest``: the judge's own tests."""

from __future__ import annotations

import click

from pybnorm._text import visible
from pybnorm.cli import output


@click.command(short_help="Show that the judge finds wrong kernels.")
@output.document_option("the tables")
@click.pass_context
def selftest(context: click.Context, json_target: str | None) -> None:
    """Run simulated kernels, right and wrong, through the judge: does it find what it should, and nothing else?

    \b
    Needs no vendor library. Exit status:
      0  no correct kernel was objected to, every bug was found as required
      1  otherwise
    """
    from pybnorm.check.selftest import detection, faults

    with output.usage_errors():
        targets = output.targets(context, "selftest")
    with output.progress(output.console(stderr=json_target == "-")) as progress:
        task = progress.add_task("selftest")

        def step(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)

        found = detection.run(progress=step)
        of_calls = faults.run()
    good = found.good and all(fault.good for fault in of_calls)
    if json_target != "-":
        verdict = (
            "The judge found every bug as required and objected to no correct kernel."
            if good
            else "The judge is NOT as required: see the lines MISSED and FALSE ALARM."
        )
        text = f"{detection.render(found)}\n\n{faults.render(of_calls)}\n\n{verdict}"
        click.echo(visible(text), file=output.standard_output())
    content = {"faults": [vars(fault) for fault in of_calls], "good": good}
    output.put_json(targets, output.document("pybnorm.selftest/1", found.to_json() | content))
    context.exit(0 if good else 1)
