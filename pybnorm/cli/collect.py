"""``pybnorm collect``: one file for a report."""

from __future__ import annotations

import os
import zipfile

import click

from pybnorm.check.run import collection
from pybnorm.cli import completion, output


@click.command(short_help="Write one file for a report of a fault.")
@click.option("--backend", type=completion.Backend(), help="This alone.")
@click.option("-o", "target", metavar="FILE.zip", default="pybnorm-report.zip", show_default=True, help="The file.")
def collect(backend: str | None, target: str) -> None:
    """Write one file for a report: libraries, devices, settings, and what the suites smoke and bugs find.

    It takes three minutes at most, asks for nothing and sends nothing. Names of users, their home folders and the
    machine's name are taken out.

    \b
    Exit status:
      0  the file is written, whatever the check found
      2  bad arguments, or it could not be written
    """
    if os.path.lexists(target):
        raise click.BadParameter(f"{target!r} is there already; name a file that is not", param_hint="-o")
    found = collection.collected(backend, lambda name: click.echo(f"{name} ...", err=True))
    console = output.console()
    console.print(f"{target} holds:", markup=False, soft_wrap=True)
    for name, text in found.items():
        console.print(f"  {name:<12} {len(text.encode()):>9} bytes", markup=False)
    try:
        with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as file:
            for name, text in found.items():
                file.writestr(name, text)
    except OSError as error:
        raise click.BadParameter(f"{target!r} cannot be written: {error.strerror}", param_hint="-o") from None
    console.print(f"Written; nothing was sent. Look at it: pybnorm report {target}", markup=False, soft_wrap=True)
