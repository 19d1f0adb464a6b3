"""``pybnorm claims``: records of what a version of a library does, made of runs."""

from __future__ import annotations

from pathlib import Path

import click

import pybnorm
from pybnorm.check.judging.results import by_label, label, version_text
from pybnorm.check.run import archive, support
from pybnorm.cli import completion, output
from pybnorm.errors import ArgumentError


@click.group(short_help="Keep what a version of a library can do.")
def claims() -> None:
    """Records of what a version of a library runs, and what of it gives the same bits at every call on a device.

    pybnorm check holds a library against the records of its version and of the device: what was recorded and is
    refused, or no longer repeatable, is a failure. check --require-claims demands that there is a record.
    """


@claims.command(short_help="Record what a run found of one backend.")
@click.argument("run", metavar="RUN")
@click.option("--backend", required=True, type=completion.Backend(), help="Whose record to make.")
@output.document_option("its text")
@click.option("--into", "folder", metavar="DIR", help="Write it into DIR/BACKEND.json, for PYBNORM_CLAIMS=DIR.")
@click.pass_context
def record(context: click.Context, run: str, backend: str, json_target: str | None, folder: str | None) -> None:
    """Record what RUN, a folder of check --save or a file of check --json, found of one backend.

    The record, which is JSON, is printed, or written to the file of --json, or put into the file of a folder in place
    of an earlier one of the same version, build and device.
    """
    with output.usage_errors():
        if folder is not None and json_target is not None:
            raise ArgumentError("--json", "beside --into", "one of them")
        targets = output.targets(context, "claims", json=json_target if folder else json_target or "-")
        document = archive.read_run(run)
        infos = [info for info in document["backends"] if info.backend == backend and not info.problem]
        if len(infos) != 1:
            allowed = f"a run with one library of {backend}"
            raise ArgumentError("RUN", f"{run}, which has {len(infos)}", allowed)
        (info,) = infos
        if not document.get("complete", True):
            raise ArgumentError("RUN", f"{run}, which is not complete", "a finished run: check --save DIR --resume")
        results = by_label(document["cases"]).get(label(info, document["backends"]), [])
        source = f"pybnorm {pybnorm.__version__} check, {info.label} {version_text(info)} on {info.device}"
        made = support.of_run(results, info.version, info.device, source, info.digest)
        if not made["combinations"]:
            raise ArgumentError("RUN", run, "a run in which this backend computed something")
        known = support.read("--into", Path(folder) / f"{backend}.json") if folder is not None else []
        text = support.with_record(known, made)
    if folder is None:
        targets["--json"].put(lambda stream: stream.write(text))
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{backend}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise output.WriteError(f"--into {folder}", error) from None
