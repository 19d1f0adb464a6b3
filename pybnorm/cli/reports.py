"""The reports of a run, by the option that asks for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

from pybnorm.check.report import html, junit, markdown
from pybnorm.cli import output


def write(document: Mapping[str, Any], targets: Mapping[str, output.Target]) -> output.WriteError | None:
    """Write every report of a run that was asked for. An error does not keep the others from it; the first is returned.

    `document` is as of `pybnorm.check.run.archive.read_run`, `targets` as of `output.targets`.
    """
    environment, backends, results = (document[key] for key in ("environment", "backends", "cases"))
    missing, lost = document.get("required_but_absent", ()), document.get("lost_nodes", ())
    writers: dict[str, Callable[[IO[str]], object]] = {
        "--json": lambda stream: output.write_json(document, stream),
        "--junit": lambda stream: junit.write(stream, environment, backends, results, missing),
        "--html": lambda stream: html.write(
            stream, environment, backends, results, lost, document.get("complete", True)
        ),
        "--markdown": lambda stream: markdown.write(stream, backends, results, document.get("complete", True)),
    }
    trouble: output.WriteError | None = None
    for option, target in targets.items():
        try:
            target.put(writers[option])
        except output.WriteError as error:
            trouble = trouble or error
    return trouble
