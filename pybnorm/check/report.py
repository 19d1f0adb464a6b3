"""What a check found, as tables for people and as JSON for programs."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pybnorm.check.bounds import Point, Status, Verdict
from pybnorm.check.runner import BackendInfo, CaseResult

__all__ = [
    "environment",
    "exit_status",
    "print_attempts",
    "print_backends",
    "print_details",
    "print_results",
    "print_totals",
    "repro",
    "to_json",
]

STYLES = {
    Status.PASS: "green",
    Status.WARN: "yellow",
    Status.UNSUPPORTED: "cyan",
    Status.INCONCLUSIVE: "magenta",
    Status.MISTRUSTED: "magenta",
    Status.RESOURCE: "red",
    Status.BUILD_FAILED: "red",
    Status.CRASHED: "bold red",
    Status.FAIL: "bold red",
}
OUTPUTS = {
    "train": {
        "y": "y",
        "saved_mean": "mean",
        "saved_inv_variance": "inv.var",
        "running_mean": "run.mean",
        "running_variance": "run.var",
    },
    "infer": {"y": "y"},
    "backward": {"dx": "dx", "dscale": "dscale", "dbias": "dbias"},
}
"""Columns of each operation's table."""
_VARIABLES = (
    "PYBNORM_",
    "CUDNN_",
    "CUDA_VISIBLE",
    "MIOPEN_",
    "HIP_VISIBLE",
    "ROCR_VISIBLE",
    "ONEDNN_",
    "DNNL_",
    "OMP_",
)


def repro(result: CaseResult) -> str:
    """The command that runs this one case again."""
    command = f"pybnorm check --backend {result.backend} --case '{result.case}'"
    variable = f"PYBNORM_LIB_{result.backend.upper()}"
    if variable in os.environ:
        command = f"{variable}={shlex.quote(os.environ[variable])} {command}"
    return command


def exit_status(results: Sequence[CaseResult], missing: Sequence[str]) -> int:
    """0, 1 or 2.

    0: every case is PASS, WARN or UNSUPPORTED and at least one was judged. 1: any other status, INCONCLUSIVE included,
    because such a case has not been shown to be right; or a backend that was asked for (`missing`) could not run.
    2: nothing was judged: no backend could run, or none supports any of the cases.
    """
    if missing or any(not r.status.good for r in results):
        return 1
    return 0 if any(r.status != Status.UNSUPPORTED for r in results) else 2


# ---------------------------------------------------------------- terminal


def ratio_text(value: float) -> str:
    """An error / bound ratio in four or five characters."""
    if not math.isfinite(value):
        return "inf"
    if value == 0:
        return "0"
    return f"{value:.2f}" if 0.01 <= value < 100 else f"{value:.0e}"


def print_backends(console: Console, infos: Iterable[BackendInfo]) -> None:
    """One line per backend: what runs, or why it does not."""
    for info in infos:
        if info.problem:
            word = f"unusable: {info.label} {version_text(info)}, {info.path}: " if info.loaded else "absent: "
            console.print(Text.assemble((f"{info.backend}: ", "bold"), (word, "yellow"), info.problem))
            if info.override:
                print_attempts(console, info)
        else:
            text = f"{info.label} {version_text(info)}, {info.path} (found via {info.found_via}), on {info.device}"
            console.print(Text.assemble((f"{info.backend}: ", "bold"), text))


def print_attempts(console: Console, info: BackendInfo) -> None:
    """Every file that was tried, and why it did not serve."""
    for how, file, why in info.attempts:
        console.print(f"    {how}: {file}: {why}", soft_wrap=True, markup=False)


def version_text(info: BackendInfo) -> str:
    """The version as people write it."""
    return ".".join(map(str, info.version))


def print_results(console: Console, results: Sequence[CaseResult]) -> None:
    """A table per backend and operation: status, worst error / bound of each output, and the case.

    A letter behind a ratio above 1 is the class that holds the output nevertheless.
    """
    for backend in dict.fromkeys(r.backend for r in results):
        own = [r for r in results if r.backend == backend]
        for word, columns in OUTPUTS.items():
            rows = [r for r in own if r.case.startswith(word + ",")]
            if not rows:
                continue
            prefix = repro(rows[0]).removesuffix(f"'{rows[0].case}'")
            console.print(Text(f"{backend} {word}: worst error / bound; to run one again: {prefix}'CASE'", "bold"))
            table = Table(box=box.SIMPLE_HEAD)
            table.add_column("status", no_wrap=True)
            for title in columns.values():
                table.add_column(title, justify="right", no_wrap=True)
            table.add_column("repeat", no_wrap=True)
            table.add_column("CASE", overflow="fold")
            for result in rows:
                by_name = {v.output: v for v in result.verdicts}
                cells = [_cell(by_name.get(name)) for name in columns]
                repeat = "" if not result.repeat else "=" if result.repeat == "equal" else "differs"
                status = Text(result.status.value, STYLES[result.status])
                table.add_row(status, *cells, repeat, result.case)
            console.print(table)


def _cell(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("")
    text = ratio_text(verdict.ratio)
    if verdict.status in (Status.PASS, Status.WARN) and verdict.tier != next(iter(verdict.ratios)):
        text += verdict.tier
    return Text(text, "" if verdict.status == Status.PASS else STYLES[verdict.status])


def print_details(console: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """What is wrong with each case that did not pass, and its repro line; of all cases if `verbose`."""
    refusals: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.status == Status.UNSUPPORTED:
            refusals.setdefault(f"{result.backend}: {result.message.splitlines()[0]}", []).append(result)
    for reason, refused in refusals.items():  # few reasons, many cases
        console.print(Text.assemble((Status.UNSUPPORTED.value, STYLES[Status.UNSUPPORTED]), f" {reason}"))
        for result in refused:
            console.print(f"  {repro(result)}", markup=False, highlight=False, soft_wrap=True)
    for result in results:
        if result.status == Status.UNSUPPORTED or (result.status == Status.PASS and not verbose):
            continue
        console.print(Text.assemble((result.status.value, STYLES[result.status]), f" {result.backend} {result.case}"))
        if result.message:
            console.print(f"  {result.message}", markup=False, highlight=False)
        for verdict in result.verdicts:
            if verdict.status != Status.PASS or verbose:
                _print_verdict(console, verdict)
        console.print(f"  {repro(result)}", markup=False, highlight=False, soft_wrap=True)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    classes = ", ".join(f"{name} {ratio_text(ratio)}" for name, ratio in verdict.ratios.items())
    parts = [f"  {verdict.output}: {verdict.status.value}, worst error / bound by class: {classes}"]
    if verdict.over:
        parts.append(f"{verdict.over} of {verdict.elements} elements over the bound")
    if verdict.unjudged:
        parts.append(f"{verdict.unjudged} not judged (reference not finite or out of range)")
    if verdict.note:
        parts.append(verdict.note)
    console.print("; ".join(parts), markup=False, highlight=False)
    if verdict.status == Status.PASS or not verdict.worst:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for title in ("index", "reference", "got", f"bound ({verdict.tier})", "error / bound"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in verdict.worst:
        numbers = (f"{point.reference:.9g}", f"{point.got:.9g}", f"{point.bound:.3g}", ratio_text(point.ratio))
        table.add_row(",".join(map(str, point.index)), *numbers)
    console.print(table)


def print_totals(console: Console, results: Sequence[CaseResult], seconds: float) -> None:
    """Cases of each status, per backend."""
    for backend in dict.fromkeys(r.backend for r in results):
        own = [r for r in results if r.backend == backend]
        counts = Counter(r.status for r in own)
        text = Text.assemble((f"{backend}: ", "bold"), f"{len(own)} cases")
        for status in Status:
            if counts[status]:
                text.append(f", {counts[status]} ")
                text.append(status.value, STYLES[status])
        console.print(text)
    console.print(f"{seconds:.1f} s", highlight=False)


# ---------------------------------------------------------------- JSON


def environment() -> dict[str, Any]:
    """The machine and what can change a library's behaviour on it."""
    from pybnorm import __version__

    return {
        "pybnorm": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def to_json(value: Any) -> Any:
    """`value` as something `json.dumps` writes without NaN or Infinity tokens, which are not JSON."""
    if isinstance(value, Status):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, CaseResult):
        return to_json(vars(value) | {"ratio": value.ratio, "repro": repro(value)})
    if isinstance(value, (Point, Verdict, BackendInfo)):
        return to_json(vars(value))
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value
