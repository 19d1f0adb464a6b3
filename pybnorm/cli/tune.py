"""``pybnorm tune``: what tuning remembers."""

from __future__ import annotations

import functools

import click
from rich.text import Text

from pybnorm import tuning
from pybnorm._text import one_line
from pybnorm.cli import output

__all__ = ["tune"]


@click.command()
@click.option("--clear", is_flag=True, help="Forget all of it, so that the next plans are measured anew.")
@output.json_option("the table")
@click.pass_context
def tune(context: click.Context, clear: bool, json_target: str | None) -> None:
    """What plans with tune=True have measured and remembered on this machine, and in which file.

    PYBNORM_TUNE_CACHE names the file; without it it lies in the user's cache folder.
    """
    with output.usage_errors():
        targets = output.targets(context, "tune", json=json_target)
    file = tuning.cache_file()
    found = tuning.entries()
    if clear:
        try:
            with output.usage_errors():
                tuning.clear()
        except OSError as error:
            raise output.WriteError(str(file), error) from None
    if "--json" in targets:
        document = output.document("pybnorm.tune/1", {"file": str(file), "cleared": clear, "entries": found})
        targets["--json"].put(functools.partial(output.write_json, document))
    if json_target == "-":
        return
    console = output.console()
    console.print(Text(f"{one_line(str(file))}: {len(found)} {'forgotten' if clear else 'remembered'}"), soft_wrap=True)
    for problem, entry in ({} if clear else found).items():
        rule = entry["rule_seconds"]
        text = f"{entry['algorithm']} {entry['seconds'] * 1e6:.1f} us"
        if entry["algorithm"] != entry["rule"]:
            text += f" ({entry['rule']} " + (f"{rule * 1e6:.1f} us)" if rule is not None else "failed)")
        console.print(Text(f"{text}: {problem}"), soft_wrap=True)
