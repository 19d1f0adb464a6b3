"""``pybnorm tune``: what tuning remembers."""

from __future__ import annotations

import click
from rich.text import Text

from pybnorm import tuning
from pybnorm._text import one_line
from pybnorm.cli import output

__all__ = ["tune"]


@click.command()
@click.option("--clear", is_flag=True, help="Forget all of it, so that the next plans are measured anew.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def tune(clear: bool, as_json: bool) -> None:
    """What plans with tune=True have measured and remembered on this machine, and in which file.

    PYBNORM_TUNE_CACHE names the file; without it it lies in the user's cache folder.
    """
    file = tuning.cache_file()
    found = tuning.entries()
    if clear:
        try:
            with output.usage_errors():
                tuning.clear()
        except OSError as error:
            raise output.WriteError(str(file), error) from None
    if as_json:
        output.write_json({"file": file, "cleared": clear, "entries": found}, output.standard_output())
        return
    console = output.console()
    console.print(Text(f"{one_line(str(file))}: {len(found)} {'forgotten' if clear else 'remembered'}"), soft_wrap=True)
    for problem, entry in ({} if clear else found).items():
        rule = entry["rule_seconds"]
        text = f"{entry['algorithm']} {entry['seconds'] * 1e6:.1f} us"
        if entry["algorithm"] != entry["rule"]:
            text += f" ({entry['rule']} " + (f"{rule * 1e6:.1f} us)" if rule is not None else "failed)")
        console.print(Text(f"{text}: {problem}"), soft_wrap=True)
