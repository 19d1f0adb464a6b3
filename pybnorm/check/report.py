"""What a check found, as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pybnorm._text import one_line
from pybnorm.check.bounds import Point, Status, Verdict
from pybnorm.check.environment import cpu_flags
from pybnorm.check.nodes import LostNode
from pybnorm.check.problem import DATA_TYPES, LAYOUTS, MODES, Problem
from pybnorm.check.runner import BackendInfo, CaseResult
from pybnorm.check.support import NEWLY_UNSUPPORTED
from pybnorm.errors import ArgumentError

__all__ = [
    "SCHEMA",
    "backend_from_json",
    "environment",
    "exit_status",
    "groups",
    "json_parts",
    "place",
    "print_attempts",
    "print_backends",
    "print_details",
    "print_results",
    "print_totals",
    "ratio_text",
    "repro",
    "result_from_json",
    "shown",
    "to_json",
    "vendor_lines",
    "verdict_text",
    "version_text",
    "worst_ratios",
]

SCHEMA = "pybnorm.check/1"
"""Of the JSON document of a run; ``schema.json`` beside this file describes it."""
STYLES = {
    Status.PASS: "green",
    Status.WARN: "yellow",
    Status.UNSUPPORTED: "cyan",
    Status.INCONCLUSIVE: "magenta",
    Status.MISTRUSTED: "magenta",
    Status.ERROR: "red",
    Status.RESOURCE: "red",
    Status.BUILD_FAILED: "red",
    Status.CRASHED: "bold red",
    Status.TIMEOUT: "bold red",
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
MANY = 200
"""Cases above which the terminal shows groups of them in place of each."""
DETAILS = 50
"""Failures shown with their points, where there are many cases."""
WIDTH = 200
"""Columns of what is not a terminal: no case line is folded there."""
REFUSALS = 3
"""Cases shown of each reason to refuse, where there are many."""
_VARIABLES = (
    "PYBNORM_",
    "CUDNN_",
    "CUDA_VISIBLE",
    "NVIDIA_TF32_OVERRIDE",
    "MIOPEN_",
    "HIP_VISIBLE",
    "ROCR_VISIBLE",
    "HSA_",
    "ONEDNN_",
    "DNNL_",
    "OMP_",
)
_DRIVERS = {
    "nvidia": ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
    "amdgpu": ("/sys/module/amdgpu/version", r"(\S+)"),
    "rocm": ("/opt/rocm/.info/version", r"(\S+)"),
}
_HOST = re.compile(r"host-[0-9a-f]{8}")


def repro(result: CaseResult) -> str:
    """The command that runs this one case again."""
    command = f"pybnorm check --backend {result.backend} --case '{result.case}'"
    variable = f"PYBNORM_LIB_{result.backend.upper()}"
    if variable in os.environ:
        command = f"{variable}={shlex.quote(os.environ[variable])} {command}"
    return command


def label(info: BackendInfo, infos: Iterable[BackendInfo]) -> str:
    """The name of one library of a run: its backend's, with its id where nodes had others of the same backend."""
    several = sum(i.backend == info.backend and not i.problem for i in infos) > 1
    return f"{info.backend}@{info.id}" if several and info.id else info.backend


def labels(results: Sequence[CaseResult]) -> list[str]:
    """By result, the name of the library that it is of, as `label` has it."""
    libraries: dict[str, set[str]] = {}
    for result in results:
        if result.library:
            libraries.setdefault(result.backend, set()).add(result.library)
    several = {backend for backend, ids in libraries.items() if len(ids) > 1}
    return [f"{r.backend}@{r.library}" if r.backend in several and r.library else r.backend for r in results]


def by_label(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """The results of each library, by its name."""
    found: dict[str, list[CaseResult]] = {}
    for name, result in zip(labels(results), results, strict=True):
        found.setdefault(name, []).append(result)
    return found


def library_text(info: BackendInfo) -> str:
    """What makes one library of a backend differ from another, in one line."""
    parts = [f"{info.label} {version_text(info)}", info.path, info.digest, f"on {info.device}", info.driver]
    return ", ".join([*filter(None, parts), *(f"{k}={v}" for k, v in info.variables.items())])


def not_run(results: Sequence[CaseResult]) -> str:
    """That there are cases without a verdict, in one line; empty if there are none."""
    count = sum(r.status == Status.ERROR for r in results)
    return f"NOT ALL RUN: {count} of {len(results)} cases are ERROR, which is no verdict" if count else ""


def lost_text(lost: LostNode) -> str:
    """What became of a node, in one line."""
    place = f"{lost.node} on {lost.host}" if lost.host else lost.node
    return f"{place}: taken out{lost.backend and f' for {lost.backend}'}: {lost.reason}"


def exit_status(results: Sequence[CaseResult], missing: Sequence[str]) -> int:
    """0, 1 or 2.

    0: every case is PASS, WARN or UNSUPPORTED and at least one was judged. 1: any other status, INCONCLUSIVE included,
    because such a case has not been shown to be right; or a backend that was asked for (`missing`) could not run.
    2: nothing was judged: no backend could run, or none supports any of the cases. 2 also where a case is ERROR,
    whatever the others are: there is no verdict on all of them.
    """
    if any(r.status == Status.ERROR for r in results):
        return 2
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
    every = [shown(info) for info in infos]
    for info in every:
        name = label(info, every)
        if info.problem:
            word = f"unusable: {info.label} {version_text(info)}, {info.path}: " if info.loaded else "absent: "
            console.print(Text.assemble((f"{name}: ", "bold"), (word, "yellow"), info.problem))
            if info.override:
                print_attempts(console, info)
        else:
            text = f"{info.label} {version_text(info)}, {info.path} (found via {info.found_via}), on {info.device}"
            text += info.driver and f", {info.driver}"
            text += "".join(one_line(f", {k}={v}") for k, v in info.variables.items()) if name != info.backend else ""
            console.print(Text.assemble((f"{name}: ", "bold"), text))


def shown(info: BackendInfo) -> BackendInfo:
    """`info` as it may be printed; rich would drop the carriage return of a path or message."""
    texts: dict[str, Any] = {n: one_line(v) for n, v in vars(info).items() if isinstance(v, str)}
    return dataclasses.replace(info, **texts)


def print_attempts(console: Console, info: BackendInfo) -> None:
    """Every file that was tried, and why it did not serve."""
    for how, file, why in info.attempts:
        console.print(one_line(f"    {how}: {file}: {why}"), soft_wrap=True, markup=False)


def version_text(info: BackendInfo) -> str:
    """The version as people write it."""
    return ".".join(map(str, info.version))


def print_results(console: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """A table per backend and operation: status, worst error / bound of each output, and the case.

    A letter behind a ratio above 1 is the class that holds the output nevertheless. Of more than `MANY` cases only
    those that are neither PASS nor UNSUPPORTED have a row, unless `verbose`; a table of groups comes before them.
    """
    many = len(results) > MANY and not verbose
    for backend, own in by_label(results).items():
        for word, columns in OUTPUTS.items():
            rows = [r for r in own if r.case.startswith(word + ",")]
            if not rows:
                continue
            if many:
                _print_groups(console, f"{backend} {word}", rows, columns)
                rows = [r for r in rows if r.status not in (Status.PASS, Status.UNSUPPORTED)]
            if rows:
                _print_rows(console, f"{backend} {word}", rows, columns)
    if many:
        console.print(f"{len(results)} cases; PASS and UNSUPPORTED have no row, all have one with -v", highlight=False)


def _print_rows(console: Console, title: str, rows: Sequence[CaseResult], columns: Mapping[str, str]) -> None:
    prefix = repro(rows[0]).removesuffix(f"'{rows[0].case}'")
    console.print(Text(f"{title}: worst error / bound; to run one again: {prefix}'CASE'", "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("status", no_wrap=True)
    for name in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("repeat", no_wrap=True)
    known = any(r.known for r in rows)
    if known:
        table.add_column("known")
    table.add_column("CASE", overflow="fold")
    for result in rows:
        by_name = {v.output: v for v in result.verdicts}
        cells: list[Text | str] = [_cell(by_name.get(name)) for name in columns]
        cells.append("" if not result.repeat else "=" if result.repeat == "equal" else "differs")
        if known:
            cells.append(Text(result.known))
        table.add_row(Text(result.status.value, STYLES[result.status]), *cells, Text(result.case))
    console.print(table)


def _print_groups(console: Console, title: str, rows: Sequence[CaseResult], columns: Mapping[str, str]) -> None:
    """Cases of each dtype and layout: how many have which status, and the worst error / bound."""
    console.print(Text(f"{title}: worst error / bound of each group, inf left out", "bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("mode", "dtype", "layout"):
        table.add_column(name, no_wrap=True)
    table.add_column("cases", justify="right", no_wrap=True)
    present = [status for status in Status if any(r.status == status for r in rows)]
    for status in present:
        table.add_column(status.value, justify="right", no_wrap=True)
    for name in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    for group, members in groups(rows).items():
        counts = Counter(r.status for r in members)
        cells = [Text(str(counts[s] or ""), STYLES[s]) for s in present]
        worst = worst_ratios(members)
        table.add_row(*group, str(len(members)), *cells, *(ratio_text(worst[n]) if n in worst else "" for n in columns))
    console.print(table)


def groups(results: Iterable[CaseResult]) -> dict[tuple[str, str, str], list[CaseResult]]:
    """Results by mode, dtype and layout, in the order of the language; every strided layout is one."""
    found: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        _, mode, dtype, layout = result.case.split(",")[:4]
        found.setdefault((mode, dtype, layout.partition("=")[0]), []).append(result)
    return dict(sorted(found.items(), key=lambda item: [place(word) for word in item[0]]))


def place(word: str) -> int:
    """Where a mode, dtype or layout stands among its kind; what is unknown comes last."""
    return next((list(words).index(word) for words in (MODES, DATA_TYPES, (*LAYOUTS, "strides")) if word in words), 99)


def worst_ratios(results: Iterable[CaseResult]) -> dict[str, float]:
    """Largest finite error / bound of each output."""
    worst: dict[str, float] = {}
    for verdict in (v for r in results for v in r.verdicts):
        if math.isfinite(verdict.ratio):
            worst[verdict.output] = max(verdict.ratio, worst.get(verdict.output, 0.0))
    return worst


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
            reason = result.message.partition("\n")[0]
            refusals.setdefault(f"{result.backend}: {reason}", []).append(result)
    few = verbose or len(results) <= MANY
    shown = None if few else REFUSALS
    for reason, refused in refusals.items():  # few reasons, many cases
        console.print(Text.assemble((Status.UNSUPPORTED.value, STYLES[Status.UNSUPPORTED]), f" {reason}"))
        for result in refused[:shown]:
            console.print(f"  {repro(result)}", markup=False, highlight=False, soft_wrap=True)
        if shown and len(refused) > shown:
            console.print(f"  and {len(refused) - shown} more cases", highlight=False)
    detailed = [r for r in results if r.status != Status.UNSUPPORTED and (r.status != Status.PASS or verbose)]
    for result in detailed if few else detailed[:DETAILS]:
        console.print(Text.assemble((result.status.value, STYLES[result.status]), f" {result.backend} {result.case}"))
        if result.known:
            console.print(Text(f"  known defect: {result.known}", "yellow"))
        if result.claim == NEWLY_UNSUPPORTED:
            console.print(Text(f"  support: {result.claim}", "bold red"))
        if result.message:
            console.print(f"  {result.message}", markup=False, highlight=False)
        for verdict in result.verdicts:
            if verdict.status != Status.PASS or verbose:
                _print_verdict(console, verdict)
        console.print(f"  {repro(result)}", markup=False, highlight=False, soft_wrap=True)
        for line in vendor_lines(result.case).values():
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if not few and len(detailed) > DETAILS:
        console.print(f"and details of {len(detailed) - DETAILS} more cases, all with -v, --json or --html")


def vendor_lines(case: str) -> dict[str, str]:
    """How the vendors' own tools write the case, by tool; empty for a line of another version's language."""
    from pybnorm.check import vendor_lines

    try:
        return vendor_lines.vendor_lines(Problem.parse(case))
    except ArgumentError:
        return {}


def verdict_text(verdict: Verdict) -> str:
    """Status, worst ratios and counts of an output in one line."""
    classes = ", ".join(f"{name} {ratio_text(ratio)}" for name, ratio in verdict.ratios.items())
    parts = [f"{verdict.status.value}, worst error / bound by class: {classes}"]
    if verdict.over:
        parts.append(f"{verdict.over} of {verdict.elements} elements over the bound")
    if verdict.unjudged:
        parts.append(f"{verdict.unjudged} not judged (reference not finite or out of range)")
    if verdict.note:
        parts.append(verdict.note)
    return "; ".join(parts)


def _print_verdict(console: Console, verdict: Verdict) -> None:
    console.print(f"  {verdict.output}: {verdict_text(verdict)}", markup=False, highlight=False)
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
    for backend, own in by_label(results).items():
        counts = Counter(r.status for r in own)
        text = Text.assemble((f"{backend}: ", "bold"), f"{len(own)} cases")
        for status in Status:
            if counts[status]:
                text.append(f", {counts[status]} ")
                text.append(status.value, STYLES[status])
                known = sum(bool(r.known) for r in own if r.status == status)
                if known:
                    text.append(f" ({known} known)")
        console.print(text)
    console.print(f"{seconds:.1f} s", highlight=False)


# ---------------------------------------------------------------- JSON


def environment() -> dict[str, Any]:
    """The machine and what can change a library's behaviour on it.

    Neither user nor host name is in it, for it is made to be attached to tickets: ``host`` is a digest of the name,
    by which the runs of one machine are known to be of one machine. Libraries and devices are in `BackendInfo`, which
    their own processes fill.
    """
    from pybnorm import __version__

    return {
        "pybnorm": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "ml_dtypes": importlib.metadata.version("ml_dtypes"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": host_digest(platform.node()),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processors": os.cpu_count(),
        "processors_usable": len(os.sched_getaffinity(0)),
        **_cpu(),
        "drivers": _drivers(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def host_digest(name: str) -> str:
    """What stands for a host name in documents."""
    if _HOST.fullmatch(name):  # it is one, read from a journal
        return name
    return "host-" + hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


def _cpu(file: str = "/proc/cpuinfo") -> dict[str, Any]:
    """Model, and the instruction sets that libraries choose their kernels by."""
    model = ""
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = (part.strip() for part in line.partition(":"))
                if name in ("model name", "cpu model"):
                    model = value
                    break  # every further processor says the same
    except OSError:
        pass
    return {"cpu": model or platform.processor(), "cpu_flags": cpu_flags(file)}


def _drivers() -> dict[str, str]:
    """Versions of the GPUs' kernel drivers and of ROCm, from files: no library is loaded here."""
    found = {}
    for name, (file, pattern) in _DRIVERS.items():
        try:
            with open(file, encoding="utf-8", errors="replace") as stream:
                match = re.search(pattern, stream.read(4096))
        except OSError:
            continue
        if match:
            found[name] = match[1]
    return found


def to_json(value: Any) -> Any:
    """`value` as something `json.dumps` writes without NaN or Infinity tokens, which are not JSON."""
    if isinstance(value, Status):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, CaseResult):
        host, colon, process = value.host.rpartition(":")
        anonymous = {"host": host_digest(host) + colon + process} if value.host else {}
        return to_json(vars(value) | {"ratio": value.ratio, "repro": repro(value)} | anonymous)
    if isinstance(value, LostNode):
        return vars(value) | {"host": host_digest(value.host) if value.host else ""}
    if isinstance(value, (Point, Verdict, BackendInfo)):
        return to_json(vars(value))
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, Iterator)):
        return [to_json(v) for v in value]
    return value


def json_parts(document: Mapping[str, Any]) -> Iterator[str]:
    """The text of ``to_json(document)``, an item of its lists at a time; all at once takes many times its size."""

    def text(value: Any, margin: str) -> str:
        # no line ends within a text of JSON
        return json.dumps(to_json(value), indent=1, allow_nan=False).replace("\n", margin)

    for number, (name, value) in enumerate(document.items()):
        yield f"{',' if number else '{'}\n {json.dumps(str(name))}: "
        if isinstance(value, (list, tuple, Iterator)):
            before = "["
            for item in value:
                yield f"{before}\n  {text(item, chr(10) + '  ')}"
                before = ","
            yield "\n ]" if before == "," else "[]"
        else:
            yield text(value, "\n ")
    yield "\n}\n" if document else "{}\n"


def result_from_json(data: Mapping[str, Any]) -> CaseResult:
    """The result that `to_json` wrote.

    Fields that this version does not know are left out, and fields that are not there are at their default, so that
    runs of other versions can be compared.

    Raises
    ------
    KeyError, TypeError, ValueError
        `data` is no result.
    """
    own = _own(CaseResult, data)
    own["status"] = Status(data["status"])
    own["verdicts"] = [_verdict_from_json(v) for v in data.get("verdicts", ())]
    own["seconds"] = float(data.get("seconds", 0.0))
    return CaseResult(**own)


def _verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    own = _own(Verdict, data)
    own["status"] = Status(data["status"])
    own["ratio"] = float(data["ratio"])  # "inf" and "nan" are text in JSON
    own["ratios"] = {name: float(ratio) for name, ratio in data["ratios"].items()}
    own["worst"] = [_point_from_json(p) for p in data.get("worst", ())]
    return Verdict(**own)


def _point_from_json(data: Mapping[str, Any]) -> Point:
    numbers = (float(data[name]) for name in ("reference", "got", "bound", "ratio"))
    return Point(tuple(int(i) for i in data["index"]), *numbers)


_PLAIN = {"str": str, "int": int, "bool": bool}  # annotations, which are text, of fields that JSON holds as they are


def backend_from_json(data: Mapping[str, Any]) -> BackendInfo:
    """The description of a library that `to_json` wrote.

    Raises
    ------
    KeyError, TypeError, ValueError
        `data` is no description.
    """
    own = _own(BackendInfo, data)
    own["version"] = tuple(int(n) for n in data.get("version", ()))
    own["variables"] = {str(k): str(v) for k, v in data.get("variables", {}).items()}
    own["cpu_flags"] = [str(flag) for flag in data.get("cpu_flags", ())]
    own["attempts"] = tuple((str(how), str(file), str(why)) for how, file, why in data.get("attempts", ()))
    return BackendInfo(**own)


def _own(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, value in data.items():
        needed = _PLAIN.get(str(fields.get(name)))
        if needed is not None and not isinstance(value, needed):
            raise TypeError(f"{name} is {value!r}, not {needed.__name__}")
    # a run's results have few texts but their cases
    return {n: sys.intern(v) if type(v) is str else v for n, v in data.items() if n in fields}
