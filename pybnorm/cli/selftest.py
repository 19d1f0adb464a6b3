"""``pybnorm selftest``: the judge's own tests."""

from __future__ import annotations

import functools

import click

from pybnorm._text import visible
from pybnorm.cli import output

__all__ = ["selftest"]


@click.command()
@click.option("--whole", is_flag=True, help="Sums of up to 10^6 terms, too; half an hour in place of a minute.")
@click.option("--keep", metavar="FILE", help="Keep what each setting gave in FILE, and do not run again what it has.")
@output.json_option("the tables")
@click.pass_context
def selftest(context: click.Context, whole: bool, keep: str | None, json_target: str | None) -> None:
    """Run simulated kernels, right and wrong, through the judge: does it find what it should, and nothing else?

    \b
    Needs no vendor library. Exit status:
      0  no correct kernel was objected to, every bug was found as required
      1  otherwise
    """
    from pybnorm.check.selftest import detection, faults, power

    with output.usage_errors():
        targets = output.targets(context, "selftest", json=json_target)
        if keep is not None:
            power.kept(keep)
    with output.progress(output.console(stderr=json_target == "-")) as progress:
        task = progress.add_task("selftest")

        def step(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)

        found = detection.run(progress=step)
        seen = power.run(power.WHOLE if whole else power.QUICK, progress=step, keep=keep)
    of_calls = faults.run()
    good = found.good and seen.good and all(fault.good for fault in of_calls)
    if json_target != "-":
        text = f"{detection.render(found)}\n\n{faults.render(of_calls)}\n\n{power.render(seen)}"
        click.echo(visible(text), file=output.standard_output())
    if "--json" in targets:
        content = {"power": seen.to_json(), "faults": [vars(fault) for fault in of_calls], "good": good}
        document = output.document("pybnorm.selftest/1", found.to_json() | content)
        targets["--json"].put(functools.partial(output.write_json, document))
    context.exit(0 if good else 1)
