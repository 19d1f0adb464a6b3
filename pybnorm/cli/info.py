"""``pybnorm info``: what libraries there are, and what they can do."""

from __future__ import annotations

import itertools
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from rich.table import Table
from rich.text import Text

import pybnorm
from pybnorm.check.judging.results import BackendInfo, version_text
from pybnorm.check.language.problem import LAYOUTS, MODES, OPERATIONS
from pybnorm.check.report import terminal
from pybnorm.check.report.console import Console
from pybnorm.check.run import executors
from pybnorm.check.run.environment import machine
from pybnorm.check.run.session import capability_words
from pybnorm.check.run.worker import Worker, check_timeout
from pybnorm.cli import completion, output
from pybnorm.defects import DEFECTS, Defect, unrecorded
from pybnorm.enums import DataType, Layout, Operation
from pybnorm.errors import ArgumentError

_OPERATIONS = OPERATIONS | {"axpby": Operation.AXPBY}
_LAYOUTS = LAYOUTS | {"strides": Layout.STRIDED}
_RANKS = range(2, 9)
_FOLDED = 80
"""Columns of sentences, also where lines may be longer."""


@click.command(short_help="List the libraries of this machine.")
@output.document_option("the text")
@click.option(
    "--claims", "as_claims", type=completion.Backend(), help="Print a support record of BACKEND, to be reviewed."
)
@click.option(
    "--timeout", type=float, default=60.0, show_default=True, help="Seconds that a library may take to load and answer."
)
@click.option("-v", "--verbose", is_flag=True, help="Every place where an absent library was searched for.")
@click.pass_context
def info(context: click.Context, json_target: str | None, as_claims: str | None, timeout: float, verbose: bool) -> None:
    """Show what libraries there are, where they were found, and what they can do; why the others are absent."""
    with output.usage_errors():
        check_timeout("--timeout", timeout)
        if as_claims is not None and json_target is not None:
            raise ArgumentError("--json", "beside --claims", "one of them: a record is JSON already")
        targets = output.targets(context, "info")
    if as_claims is not None:
        _print_claims(as_claims, timeout)
        return
    console = output.console(stderr=json_target == "-")
    found, abilities = _asked([Worker(name, timeout=timeout) for name in pybnorm.backends()], console)
    backends = [
        vars(i)
        | {"loaded": i.loaded, "capabilities": abilities.get(i.backend, [])}
        | {"known_defects": [d.id for d in _known_defects(i)]}
        for i in found
    ]
    output.put_json(targets, output.document("pybnorm.info/1", {"backends": backends}))
    if json_target == "-":
        return
    here = machine()
    console.print(f"pybnorm {here['pybnorm']}, Python {here['python']}, {here['platform']}")
    for item in map(terminal.shown, sorted(found, key=lambda i: (not i.loaded, bool(i.problem)))):
        console.print()
        if item.loaded or not item.hint or verbose:  # no hint: the file that was named, or a library that dies
            _print_info(console, item, abilities.get(item.backend, []))
        else:
            console.print(Text(item.backend, "bold"))
            _print_folded(console, "  absent     ", f"{item.problem} -v says where it was searched for")
            _print_folded(console, "  to have it ", item.hint)


def _asked(workers: list[Worker], console: Console) -> tuple[list[BackendInfo], dict[str, list[dict[str, Any]]]]:
    """Ask all backends at once what they are and can do: most of the time is the start of a process."""
    with ThreadPoolExecutor(len(workers)) as threads, output.progress(console) as progress:
        try:
            answers = list(progress.track(threads.map(_ask, workers), len(workers), description="info"))
        except BaseException as error:  # such as Ctrl-C: nothing waits for a library that hangs
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave a process to be waited for
            for worker in workers:
                worker.end()
            raise
    return [item for item, _ in answers], {item.backend: rows for item, rows in answers if item.loaded}


def _ask(worker: Worker) -> tuple[BackendInfo, list[dict[str, Any]]]:
    with worker:
        (item,) = executors.described(worker.backend, lambda: [worker.describe()])
        rows = worker.call(_abilities, worker.backend, timeout=worker.timeout) if item.loaded else []
    return item, rows


def _print_claims(backend: str, timeout: float) -> None:
    from pybnorm.check.run import support

    item, rows = _ask(Worker(backend, timeout=timeout))
    if not item.loaded:
        raise click.ClickException(f"{backend}: {item.problem}")
    source = " on ".join(filter(None, (f"{item.label} {version_text(item)}", item.device)))
    output.write_json([support.recorded(rows, item.version, source)], output.standard_output())


def _abilities(backend: str) -> list[dict[str, Any]]:
    """Every combination that the capability query knows, ranks with equal answers together."""
    rows = []
    for (operation, op), (mode, m), dtype, (layout, place) in itertools.product(
        _OPERATIONS.items(), MODES.items(), DataType, _LAYOUTS.items()
    ):
        answers: dict[tuple[str, str], list[int]] = {}
        for rank in _RANKS:
            bits, reason = pybnorm.capability(backend, op, m, dtype, place, rank)
            answers.setdefault((capability_words(bits), reason), []).append(rank)
        case = {"operation": operation, "mode": mode, "dtype": dtype.short, "layout": layout}
        rows += [case | {"ranks": r, "capability": words, "reason": reason} for (words, reason), r in answers.items()]
    return rows


def _print_info(console: Console, item: BackendInfo, rows: list[dict[str, Any]]) -> None:
    console.print(Text.assemble((item.backend, "bold"), f"  {item.label} {version_text(item)}".rstrip()))
    if item.loaded:
        console.print(f"  path       {item.path}", soft_wrap=True)
        console.print(f"  found via  {item.found_via}", soft_wrap=True)
        if item.digest:
            console.print(f"  build      {item.digest} (digest of the file)", soft_wrap=True)
    if item.device:
        console.print(f"  device     {item.device}")
    if item.problem:
        console.print(Text.assemble(("  absent     " if not item.loaded else "  unusable   ", "yellow"), item.problem))
        if not item.loaded:
            terminal.print_attempts(console, item)
        if item.hint:
            _print_folded(console, "  to have it ", item.hint)
    if not rows:
        return
    table = Table(box=None, padding=(0, 3, 0, 2))
    table.add_column("dtype")
    for word in MODES:
        table.add_column(word)
    for dtype in DataType:
        own = [r for r in rows if r["dtype"] == dtype.short and r["operation"] != "axpby"]
        table.add_row(dtype.short, *(_ability_text([r for r in own if r["mode"] == word]) for word in MODES))
    console.print(table)
    for reason in dict.fromkeys(r["reason"] for r in rows if r["reason"]):
        _print_folded(console, "    - ", reason)
    known = _known_defects(item)
    if known:
        console.print("  known defects of this version")
    for defect in known:
        _print_folded(console, "    - ", f"{defect.id}: {defect.what}")
    if without := unrecorded(item.backend, item.version, item.digest):
        _print_folded(console, "  ", f"{without}; pybnorm check --suite bugs --backend {item.backend} shows it")


def _print_folded(console: Console, before: str, text: str) -> None:
    """Text behind `before`, below which its other lines stand; paths and words in one piece."""
    width = min(console.width, _FOLDED)
    for line in textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=" " * len(before),
        break_long_words=False, break_on_hyphens=False,
    ):  # fmt: skip
        console.print(line, markup=False, soft_wrap=True)


def _known_defects(item: BackendInfo) -> list[Defect]:
    own = [d for d in DEFECTS if item.loaded and d.backend == item.backend and d.on_card(item.device)]
    return [d for d in own if d.in_version(item.version, item.digest)]


def _ability_text(rows: list[dict[str, Any]]) -> str:
    """The operations that run, grouped by the layouts and ranks in which they do."""
    groups: dict[str, list[str]] = {}
    for operation in dict.fromkeys(r["operation"] for r in rows):
        places = []
        for layout in _LAYOUTS:
            chosen = (r for r in rows if r["operation"] == operation and r["layout"] == layout and r["capability"])
            ranks = sorted(rank for r in chosen for rank in r["ranks"])
            if ranks:
                span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
                places.append(f"{layout} {span}D")
        groups.setdefault(", ".join(places), []).append(operation)
    return "\n".join(f"{'/'.join(words)}: {places}" for places, words in groups.items() if places) or "-"
