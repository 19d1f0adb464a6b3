"""Results of a run: one per case and backend, the libraries and nodes it ran on, and their JSON form.

The second half holds the texts and counts that the terminal, the HTML page and the JUnit file have in common.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pybnorm._text import one_line
from pybnorm.check.judging.bounds import Point, Status, Verdict
from pybnorm.check.language.problem import DATA_TYPES, LAYOUTS, MODES

SCHEMA = "pybnorm.check/1"
"""Name of the JSON document of a run; ``pybnorm/check/schema.json`` describes it."""
_RUNNING = {"running_mean": "run.mean", "running_variance": "run.var"}
_TRAINED = {"y": "y", "saved_mean": "mean", "saved_inv_variance": "inv.var", **_RUNNING}
_GRADIENTS = {"dx": "dx", "dscale": "dscale", "dbias": "dbias"}
OUTPUTS = {
    "train": _TRAINED,
    "infer": {"y": "y"},
    "backward": {**_GRADIENTS, "dz": "dz"},
    "frozen": _GRADIENTS,
    "training_grad": _GRADIENTS,
    "backward_reduce": {name: name for name in ("sum_dy", "sum_dy_xmu", "dscale", "dbias")},
    "backward_elemt": {"dx": "dx"},
    "elemt": {"y": "y"},
    "sync_train": _TRAINED,
    "sync_backward": _GRADIENTS,
    "gather_stats": {"mean": "merged mean", "variance": "merged var", "inv_variance": "merged inv.var", **_RUNNING},
}
"""Outputs of each operation, with their titles in tables and plots."""
TITLES = {name: title for outputs in OUTPUTS.values() for name, title in outputs.items()}
"""The title of each output."""
NO_VERDICT = (*(Status.ERROR, Status.RESOURCE, Status.BUILD_FAILED, Status.RAISED, Status.CRASHED, Status.TIMEOUT),)
"""Statuses of cases that were to run and were not judged."""
_Kind = TypeVar("_Kind")
_HOST = re.compile(r"host-[0-9a-f]{8}")
_CODE = re.compile(r"PBN_E_\w+ \(-?\d+\): ")
_WHERE = re.compile(r"\w+Error: (?:\w+ \w+: )?" + f"(?:{_CODE.pattern})?")


@dataclasses.dataclass
class BackendInfo:
    """A backend's library as the process that loaded it describes it."""

    backend: str
    label: str = ""
    version: tuple[int, ...] = ()
    path: str = ""
    found_via: str = ""
    attempts: tuple[tuple[str, str, str], ...] = ()
    device: str = ""
    problem: str = ""
    """Why no case can run; empty if cases can."""
    hint: str = ""
    """How to install the library, if it was searched for and not found."""
    override: str = ""
    """The environment variable that names the library's file, if that file cannot be used."""
    driver: str = ""
    """Version of the CUDA driver or HIP runtime, as it reports it; empty on the CPU."""
    digest: str = ""
    """Of the file (`pybnorm.check.run.environment.file_digest`): the same file is the same library wherever it lies."""
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    """The environment variables that the library, its driver or its runtime reads."""
    cpu_flags: list[str] = dataclasses.field(default_factory=list)
    """Instruction sets of the processor, if the library computes on it."""
    id: str = ""
    """Value of `CaseResult.library` in this library's results: its version, and a digest of everything that
    distinguishes one node's library from another's. Empty if it cannot run."""

    @property
    def loaded(self) -> bool:
        """True where the library could be loaded, usable or not."""
        return bool(self.path)


@dataclasses.dataclass(repr=False)
class CaseResult:
    """The outcome of one problem on one backend.

    Examples
    --------
    >>> line = "infer,spatial,f32,nchw,2x3x4x5"
    >>> pybnorm.check.judge(line, {"y": np.zeros((2, 3, 4, 5), np.float32)}).status
    <Status.FAIL: 'FAIL'>
    """

    backend: str
    case: str
    status: Status
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    message: str = ""
    """The error, the damage, or the inputs whose change a mistrusted case would not notice."""
    repeat: str = ""
    """"equal" if every call gave the same bits, else the outputs that differ; "" after a single call."""
    capability: str = ""
    seconds: float = 0.0
    """Time of the calls, without data, judging and the first use of the library."""
    known: str = ""
    """ids of the known defects (`pybnorm.check.judging.known_defects`) that explain the status, joined by ", "."""
    claim: str = ""
    """"claimed", "not claimed", "newly unsupported" (status FAIL), "no longer repeatable" (status NONDETERMINISTIC), or
    "" if nothing is recorded (`pybnorm.check.run.support`)."""
    saved: str = ""
    """File with the outputs, relative to the archive's folder."""
    host: str = ""
    """"hostname:process id" of the process that ran the case."""
    library: str = ""
    """`BackendInfo.id` of the library that it ran on; empty for simulated kernels, and if nothing ran."""
    visible: str = ""
    """The devices that the process was given, such as "CUDA_VISIBLE_DEVICES=1"."""
    node: str = ""
    """The MPI rank or dask worker that ran it."""
    judge: str = ""
    """The judge: numpy, cupy or torch (`pybnorm.check.run.judge_devices`)."""
    allowed: bool = False
    """It is wrong by known defects, and ``--allow-known`` lets them pass."""

    @property
    def good(self) -> bool:
        """True where a run with nothing but such cases exits with 0."""
        return self.status.good or self.allowed

    @property
    def ratio(self) -> float:
        """Worst error / bound of all outputs."""
        return max((v.ratio for v in self.verdicts), default=0.0)

    def __repr__(self) -> str:
        found = self.message or ", ".join(f"{v.output} {cell_text(v)}" for v in self.verdicts)
        text = " ".join(filter(None, (self.status.value, self.backend, self.case)))
        return f"<CaseResult {one_line(f'{text}: {found}')[:300]}>"

    def _repr_html_(self) -> str:
        rows = [
            (v.output, v.status.value, cell_text(v), "; ".join(filter(None, (v.where, v.note)))) for v in self.verdicts
        ]
        text = ": ".join(filter(None, (f"{self.status.value} {self.backend} {self.case}", self.message)))
        return html_table(text, ("output", "status", "error / bound", ""), rows)


@dataclasses.dataclass
class LostNode:
    """A node that was taken out of a run."""

    node: str
    host: str
    backend: str
    """The backend that it can no longer run; empty: all of them."""
    reason: str


def host_digest(name: str) -> str:
    """The name of a host in documents: a digest, so that they can be attached to tickets."""
    if _HOST.fullmatch(name):  # a digest already, read from a journal
        return name
    return "host-" + hashlib.blake2b(name.encode(errors="backslashreplace"), digest_size=4).hexdigest()


_AS_THEY_ARE = (str, int, bool, type(None))


def to_json(value: Any) -> Any:
    """`value` as plain values for `json.dumps`; NaN and infinity, which JSON does not have, become strings."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
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
    return value.value if isinstance(value, Status) else value


def json_parts(document: Mapping[str, Any]) -> Iterator[str]:
    """The text of ``to_json(document)``, a line for each list item: all at once takes many times its size."""
    for number, (name, value) in enumerate(document.items()):
        yield f"{',' if number else '{'}\n {json.dumps(str(name))}: "
        if isinstance(value, (list, tuple, Iterator)):
            before = "["
            for item in value:
                yield f"{before}\n  {json.dumps(to_json(item), allow_nan=False)}"
                before = ","
            yield "\n ]" if before == "," else "[]"
        else:
            # strings of JSON hold no newline, so each one here ends a line
            yield json.dumps(to_json(value), indent=1, allow_nan=False).replace("\n", "\n ")
    yield "\n}\n" if document else "{}\n"


def _plain(kind: type[Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return sys.intern(value) if kind is str else value  # few strings but the cases differ in a run

    return read


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(map(int, values))
    if not all(0 <= n < 1 << 31 for n in found):
        raise ValueError(f"{found} has other numbers than an index or a version")
    return found


_READERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: _plain(kind) for kind in (str, int, bool)},
    "float": float,  # "inf" and "nan" are strings in JSON
    "Status": Status,
    "list[str]": lambda values: list(map(str, values)),
    "dict[str, str]": lambda values: {str(k): str(v) for k, v in values.items()},
    "dict[str, float]": lambda values: {str(k): float(v) for k, v in values.items()},
    "tuple[int, ...]": _numbers,
    "tuple[tuple[str, str, str], ...]": lambda values: tuple((str(a), str(b), str(c)) for a, b, c in values),
    "list[Verdict]": lambda values: [from_json(Verdict, value) for value in values],
    "list[Point]": lambda values: [from_json(Point, value) for value in values],
}
"""Readers of the values of a field, by its annotation."""


def from_json(kind: type[_Kind], data: Mapping[str, Any]) -> _Kind:
    """The `CaseResult`, `BackendInfo` or `LostNode` that `to_json` of this or another version wrote."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    found = kind(**{name: _READERS[types[name]](value) for name, value in data.items() if name in types})
    if isinstance(found, CaseResult) and found.case.count(",") < 4:  # whatever options later versions have
        raise ValueError(f"a case is {found.case!r}")
    return found


def html_table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for notebooks."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(one_line(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><caption>{html.escape(one_line(caption))}</caption>{line('th', titles)}{body}</table>"


def is_implementation(backend: str) -> bool:
    """Say whether a result's backend is no library but a Python object, MODULE:OBJECT."""
    return ":" in backend


def repro(result: CaseResult) -> str:
    """The command that runs this one case again, and has the same judge."""
    judge = f"--judge {result.judge} " if result.judge not in ("", "numpy") else ""
    if is_implementation(result.backend):
        return f"pybnorm check --implementation {shlex.quote(result.backend)} {judge}--case '{result.case}'"
    command = f"pybnorm check --backend {result.backend} {judge}--case '{result.case}'"
    variable = f"PYBNORM_LIB_{result.backend.upper()}"
    if result.backend.isidentifier() and variable in os.environ:  # of another's run: it may be any text
        command = f"{variable}={shlex.quote(os.environ[variable])} {command}"
    return command


def label(info: BackendInfo, infos: Iterable[BackendInfo]) -> str:
    """The name of one library of a run: its backend's, with its id if nodes had several of this backend."""
    several = sum(i.backend == info.backend and not i.problem for i in infos) > 1
    return f"{info.backend}@{info.id}" if several and info.id else info.backend


def labels(results: Sequence[CaseResult]) -> list[str]:
    """The `label` of each result's library."""
    libraries = {(r.backend, r.library) for r in results if r.library}
    several = Counter(backend for backend, _ in libraries)
    return [f"{r.backend}@{r.library}" if several[r.backend] > 1 and r.library else r.backend for r in results]


def by_label(results: Sequence[CaseResult]) -> dict[str, list[CaseResult]]:
    """The results of each library, by its name."""
    found: dict[str, list[CaseResult]] = {}
    for name, result in zip(labels(results), results, strict=True):
        found.setdefault(name, []).append(result)
    return found


def library_text(info: BackendInfo) -> str:
    """Everything that distinguishes two libraries of one backend, in one line."""
    parts = [f"{info.label} {version_text(info)}".strip(), info.path, info.digest, f"on {info.device}", info.driver]
    return ", ".join([*filter(None, parts), *(f"{k}={v}" for k, v in info.variables.items())])


def not_run(results: Sequence[CaseResult]) -> str:
    """A line that counts the cases without a verdict; empty if there are none."""
    count = sum(r.status == Status.ERROR for r in results)
    are = "is" if count == 1 else "are"
    return f"NOT ALL RUN: {count} of {cases_text(len(results))} {are} ERROR, which is no verdict" if count else ""


def lost_text(lost: LostNode) -> str:
    """Say in one line why a node was taken out."""
    place = f"{lost.node} on {lost.host}" if lost.host else lost.node
    return f"{place}: taken out{lost.backend and f' for {lost.backend}'}: {lost.reason}"


def allow_known(results: Iterable[CaseResult]) -> None:
    """Let known defects pass, where they are all that is wrong with a case."""
    for result in results:
        result.allowed = bool(result.known) and not result.status.good and result.status != Status.ERROR


def exit_status(results: Sequence[CaseResult], missing: Sequence[str], strict: bool = False) -> int:
    """0: every case is good (`strict`: CHAIN is not), and at least one was not refused.

    1: a case is not shown to be correct, or a backend that was asked for (`missing`) could not run. 2: nothing was
    judged, or a case is ERROR, whatever the others are: not every case has a verdict.
    """
    if any(r.status == Status.ERROR for r in results):
        return 2
    if missing or any(not r.good or (strict and r.status == Status.CHAIN) for r in results):
        return 1
    return 0 if any(r.status != Status.UNSUPPORTED for r in results) else 2


def ratio_text(value: float) -> str:
    """An error / bound ratio in four or five characters."""
    if not math.isfinite(value):
        return "inf"
    if value == 0:
        return "0"
    return f"{value:.2f}" if 0.01 <= value < 100 else f"{value:.0e}"


def point_titles(verdict: Verdict) -> list[str]:
    """The titles of `point_cells` of a verdict."""
    return ["index", "reference", "got", f"bound ({verdict.tier})", "error / bound"]


def point_cells(point: Point) -> list[str]:
    """A point as the cells of a table."""
    numbers = f"{point.reference:.9g}", f"{point.got:.9g}", f"{point.bound:.3g}", ratio_text(point.ratio)
    return [",".join(map(str, point.index)), *numbers]


def cases_text(count: int, kind: str = "") -> str:
    """``1 case``, ``2 cases``."""
    return f"{count} {kind}case{'' if count == 1 else 's'}"


def version_text(info: BackendInfo) -> str:
    """The version as people write it."""
    return ".".join(map(str, info.version))


def without_codes(message: str) -> str:
    """A message without the codes of this package's own statuses, which say nothing that its words do not."""
    return _CODE.sub("", message)


def plain(reason: str) -> str:
    """Say why a case was refused, without the function and its status: these differ where the reason does not.

    Examples
    --------
    >>> from pybnorm.check.judging.results import plain
    >>> plain("UnsupportedError: onednn backward: PBN_E_UNSUPPORTED (-1): a CPU has no streams")
    'a CPU has no streams'
    """
    return _WHERE.sub("", reason, count=1) if _WHERE.match(reason) else reason


def verdict_text(verdict: Verdict) -> str:
    """A verdict in one line: the status, how far off, where, and why."""
    parts = [f"{verdict.status.value}, {size_text(verdict)}"]
    if verdict.status == Status.PASS and verdict.noticed:
        parts.append(f"a relative error of {verdict.noticed:.1e} would have been noticed")
    if verdict.over or verdict.where:
        parts.append(verdict.where or f"{verdict.over} of {verdict.elements} elements")
    if verdict.unjudged:
        parts.append(f"{verdict.unjudged} not judged (reference not finite or out of range)")
    if verdict.note:
        parts.append(verdict.note)
    return "; ".join(parts)


def size_text(verdict: Verdict) -> str:
    """Say how far off an output is, such as "wrong: 4.90 times the bound (A 5.10, B 4.90)"."""
    classes = ", ".join(f"{name} {ratio_text(ratio)}" for name, ratio in verdict.ratios.items())
    times, tier = decisive(verdict)
    if verdict.status == Status.FAIL:
        how = f": {ratio_text(times)} times the bound" if tier else ", within the bound"
        return f"wrong{how} ({classes})"
    if verdict.status == Status.WARN and tier:
        return f"{ratio_text(times)} times the bound of class {tier}, within that of class {verdict.tier} ({classes})"
    return f"error / bound by class: {classes}"


def groups(results: Iterable[CaseResult]) -> dict[tuple[str, str, str], list[CaseResult]]:
    """Results by mode, dtype and layout, in the language's order; all strided layouts are one group."""
    found: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        _, mode, dtype, layout = result.case.split(",")[:4]
        found.setdefault((mode, dtype, layout.partition("=")[0]), []).append(result)
    return dict(sorted(found.items(), key=lambda item: [place(word) for word in item[0]]))


def place(word: str) -> int:
    """Position of a mode, dtype or layout among its kind; unknown words come last."""
    return next((list(words).index(word) for words in (MODES, DATA_TYPES, (*LAYOUTS, "strides")) if word in words), 99)


def decisive(verdict: Verdict) -> tuple[float, str]:
    """The worst error / bound that made the status, and the class of that bound; (0, "") where no bound made it."""
    strictest = next(iter(verdict.ratios), verdict.tier)
    if verdict.status == Status.FAIL:
        ratio = verdict.ratios.get(verdict.tier, verdict.ratio)
        return (ratio, verdict.tier) if ratio > 1 else (0.0, "")
    if verdict.status == Status.WARN and verdict.ratio <= 1:
        return 0.0, ""
    return verdict.ratio, strictest


def _weight(verdict: Verdict) -> tuple[int, float]:
    return verdict.status.severity, decisive(verdict)[0]


def worst_verdict(result: CaseResult) -> Verdict | None:
    """The output that made the case's status, by the largest ratio; None without verdicts."""
    return max(result.verdicts, key=_weight, default=None)


def badness(result: CaseResult) -> tuple[int, float]:
    """The key that sorts cases: their status, then the ratio that made it."""
    worst = worst_verdict(result)
    return result.status.severity, decisive(worst)[0] if worst is not None else 0.0


def worst_verdicts(results: Iterable[CaseResult]) -> dict[str, Verdict]:
    """The worst verdict on each output: by its status, then by the ratio that made it."""
    worst: dict[str, Verdict] = {}
    for verdict in (v for r in results for v in r.verdicts):
        if verdict.output not in worst or _weight(verdict) > _weight(worst[verdict.output]):
            worst[verdict.output] = verdict
    return worst


def cell_text(verdict: Verdict) -> str:
    """The ratio that made a status, with the class that holds the output, or whose bound it is beyond."""
    ratio, tier = decisive(verdict)
    named = tier if verdict.status == Status.FAIL else verdict.tier
    if verdict.status in (Status.PASS, Status.WARN, Status.FAIL) and named != next(iter(verdict.ratios), named):
        return ratio_text(ratio or verdict.ratio) + named
    return ratio_text(ratio or verdict.ratio)
