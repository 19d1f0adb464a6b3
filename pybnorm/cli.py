"""The command ``pybnorm``: what is here, and is it right?"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, TypeVar, cast

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import pybnorm
from pybnorm import _files
from pybnorm._text import one_line, visible
from pybnorm.check import executors, report, runner
from pybnorm.check.bounds import Status
from pybnorm.check.console import Console
from pybnorm.check.problem import Problem, select
from pybnorm.check.worker import Worker
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

__all__ = ["main"]

REQUIRE = "PYBNORM_REQUIRE"
REQUIRE_DEVICE = "PYBNORM_REQUIRE_DEVICE"
_OPERATIONS = {
    Operation.FORWARD_TRAINING: "train",
    Operation.FORWARD_INFERENCE: "infer",
    Operation.BACKWARD: "backward",
    Operation.AXPBY: "axpby",
}
_MODES = {Mode.SPATIAL: "spatial", Mode.SPATIAL_PERSISTENT: "persistent", Mode.PER_ACTIVATION: "peract"}
_LAYOUTS = {Layout.CHANNELS_FIRST: "nchw", Layout.CHANNELS_LAST: "nhwc", Layout.STRIDED: "strides"}
_RANKS = range(2, 9)


_INTERRUPTED = 130  # as shells have it: 128 + SIGINT
_NO_READER = 141  # 128 + SIGPIPE
_Result = TypeVar("_Result")


class _WriteError(click.ClickException):
    """A target that does not take what is written to it; nothing was shown, so nothing was judged."""

    exit_code = 2

    def __init__(self, target: str, error: Exception | str) -> None:
        super().__init__(one_line(f"{target} cannot be written: {error}"))


class _Output:
    """Standard output, or error, that says in one line when it takes no more.

    A reader that has seen enough, such as head, ends the command quietly, as SIGPIPE ends others: status 141. It is
    not 1, which is a verdict.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._guarded(lambda: self._stream.write(text))

    def writelines(self, parts: Iterable[str]) -> None:
        for part in parts:
            self.write(part)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # for what is flushed at the end
            raise click.exceptions.Exit(_NO_READER) from None
        except OSError as error:
            raise _WriteError("standard output", error) from None


def _output() -> IO[str]:
    if sys.stdout is None:
        raise _WriteError("standard output", "it is closed")
    return cast(IO[str], _Output(sys.stdout))


def _console(stderr: bool = False) -> Console:
    if not stderr:
        stream = _output()
    elif sys.stderr is not None:
        stream = cast(IO[str], _Output(sys.stderr))
    else:
        return Console(quiet=True)
    return Console(file=stream, width=None if stream.isatty() else report.WIDTH)


class _Commands(click.Group):
    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _shown():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _shown():
            return super().invoke(ctx)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Errors that click prints hold what the user, a file or a library has said; an interrupt is no error."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(_INTERRUPTED) from None
    except click.ClickException as error:
        vars(error)["message"] = visible(error.message)
        raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pybnorm.__version__, prog_name="pybnorm")
def main() -> None:
    """Batch normalization of every vendor library on this machine, held against a float64 reference."""


def _write_json(value: Any, stream: IO[str]) -> None:
    if isinstance(value, dict):
        stream.writelines(report.json_parts(value))
    else:
        stream.write(json.dumps(report.to_json(value), indent=1, allow_nan=False) + "\n")
    stream.flush()


def _kinds(document: str) -> dict[str, _files.Kind]:
    """By option, what the reports of one command look like at their beginning; only such are replaced."""
    from pybnorm.bench import plot

    return {
        "--json": _files.Kind(f"an earlier JSON of pybnorm {document}", rf'\s*\{{\s*"schema":\s*"pybnorm\.{document}/'),
        "--junit": _files.Kind("an earlier JUnit report of pybnorm", r'<\?xml[^>]*>\s*<testsuites name="pybnorm '),
        "--html": _files.Kind(
            f"an earlier page of pybnorm {document}",
            rf'<!DOCTYPE html>.*?<meta name="generator" content="pybnorm {document}"',
        ),
        "--plot": plot.KIND,
    }


class _Target:
    """Where a report goes; tried before a long run whose result it could not take.

    A file is written as a hidden neighbour that takes its place once it is whole: whatever ends the run, what was there
    stays, and nothing lies beside it. Character devices and pipes are written to as they are.

    Raises
    ------
    ArgumentError
        It cannot be written, or is a file that pybnorm did not make.
    """

    def __init__(self, option: str, target: str, kind: _files.Kind) -> None:
        self.option, self.target, self._kind = option, target, kind
        self._name = f"{option} {target}"
        self._stream: IO[str] | None = None
        if target == "-":
            if option != "--json":
                raise ArgumentError(option, target, "a file; --json alone writes to standard output")
            self._name = "standard output"
            self._stream = _output()
            return
        try:
            if _is_stream(target):
                # a pipe that nobody reads is refused in place of waited for
                number = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                os.set_blocking(number, True)
                self._stream = open(number, "w", encoding="utf-8")  # noqa: SIM115 (__exit__)
                return
            _files.try_to_write(option, target, kind)
        except (OSError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ArgumentError(option, target, f"a file that can be written ({reason})") from None

    def put(self, write: Callable[[IO[str]], object]) -> None:
        """Have `write` write all of the report.

        Raises
        ------
        _WriteError
            The target does not take it.
        """
        try:
            if self._stream is not None:
                write(self._stream)
                self._stream.flush()
                return
            with _files.replaced(self.option, self.target, self._kind) as file:
                text = io.TextIOWrapper(file, "utf-8", errors="replace", newline="\n")
                write(text)
                text.flush()
                text.detach()
        except (OSError, ArgumentError) as error:
            raise _WriteError(self._name, error) from None

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None and not isinstance(self._stream, _Output):
            with contextlib.suppress(OSError):  # once more what the write has said
                self._stream.close()


def _is_stream(target: str) -> bool:
    try:
        mode = os.stat(target).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _targets(
    context: click.Context, document: str, folder: str | None = None, **options: str | None
) -> dict[str, _Target]:
    """The targets of the options that were given, until the command ends; `folder` is that of --save.

    Raises
    ------
    ArgumentError
        As `_Target`; two name one file, of which one report would be lost.
    """
    named = {f"--{name}": target for name, target in options.items() if target is not None}
    taken = {} if folder is None else {os.path.join(folder, name): "--save" for name in ("run.json", "journal.jsonl")}
    for option, target in named.items():
        for other, its in taken.items():
            if target != "-" and not _is_stream(target) and _files.same(target, other):
                raise ArgumentError(option, target, f"another file than {other} of {its}")
        taken[target] = option
    kinds = _kinds(document)
    return {option: context.with_resource(_Target(option, target, kinds[option])) for option, target in named.items()}


# ---------------------------------------------------------------- info


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--claims", "as_claims", metavar="BACKEND", help="Print a support record of BACKEND, to be reviewed.")
@click.option(
    "--timeout", type=float, default=60.0, show_default=True, help="Seconds that a library may take to load and answer."
)
def info(as_json: bool, as_claims: str | None, timeout: float) -> None:
    """What libraries there are, where they were found, and what they can do; why the others are absent."""
    try:
        executors.check_timeout("--timeout", timeout)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    if as_claims is not None:
        _print_claims(as_claims, timeout)
        return
    console = None if as_json else _console()
    found: list[runner.BackendInfo] = []
    abilities: dict[str, list[dict[str, Any]]] = {}
    for name in pybnorm.backends():
        with Worker(name, timeout=timeout) as worker:
            found.append(executors.described(name, worker.describe))
            if found[-1].loaded:
                abilities[name] = worker.call(_abilities, name, timeout=timeout)
    if console is None:
        backends = [vars(i) | {"loaded": i.loaded, "capabilities": abilities.get(i.backend, [])} for i in found]
        _write_json({"environment": report.environment(), "backends": backends}, _output())
        return
    machine = report.environment()
    console.print(f"pybnorm {machine['pybnorm']}, Python {machine['python']}, {machine['platform']}")
    for item in found:
        _print_info(console, item, abilities.get(item.backend, []))


def _print_claims(backend: str, timeout: float) -> None:
    from pybnorm.check import support

    if backend not in pybnorm.backends():
        raise click.UsageError(str(ArgumentError("--claims", backend, " | ".join(pybnorm.backends()))))
    with Worker(backend, timeout=timeout) as worker:
        item = executors.described(backend, worker.describe)
        if not item.loaded:
            raise click.ClickException(f"{backend}: {item.problem}")
        rows = worker.call(_abilities, backend, timeout=timeout)
    _write_json([support.recorded(rows, item.version, f"{item.label} {report.version_text(item)}")], _output())


def _abilities(backend: str) -> list[dict[str, Any]]:
    """Every combination that the capability query knows, ranks with equal answers together."""
    rows = []
    for operation, word in _OPERATIONS.items():
        for mode, mode_word in _MODES.items():
            for dtype in DataType:
                for layout, layout_word in _LAYOUTS.items():
                    answers: dict[tuple[str, str], list[int]] = {}
                    for rank in _RANKS:
                        bits, reason = pybnorm.capability(backend, operation, mode, dtype, layout, rank)
                        words = runner.capability_words(bits)
                        answers.setdefault((words, reason), []).append(rank)
                    for (words, reason), ranks in answers.items():
                        rows.append(
                            {
                                "operation": word,
                                "mode": mode_word,
                                "dtype": dtype.short,
                                "layout": layout_word,
                                "ranks": ranks,
                                "capability": words,
                                "reason": reason,
                            }
                        )
    return rows


def _print_info(console: Console, item: runner.BackendInfo, rows: list[dict[str, Any]]) -> None:
    item = report.shown(item)
    console.print()
    console.print(Text.assemble((item.backend, "bold"), f"  {item.label} {report.version_text(item)}".rstrip()))
    if item.loaded:
        console.print(f"  path       {item.path}", soft_wrap=True)
        console.print(f"  found via  {item.found_via}", soft_wrap=True)
    if item.device:
        console.print(f"  device     {item.device}")
    if item.problem:
        console.print(Text.assemble(("  absent     " if not item.loaded else "  unusable   ", "yellow"), item.problem))
        if not item.loaded:
            report.print_attempts(console, item)
        if item.hint:
            console.print(f"  to have it {item.hint}", soft_wrap=True, markup=False)
    if not rows:
        return
    table = Table(box=None, padding=(0, 3, 0, 2))
    table.add_column("dtype")
    for word in _MODES.values():
        table.add_column(word)
    for dtype in DataType:
        own = [r for r in rows if r["dtype"] == dtype.short and r["operation"] != "axpby"]
        table.add_row(dtype.short, *(_ability_text([r for r in own if r["mode"] == word]) for word in _MODES.values()))
    console.print(table)
    reasons = dict.fromkeys(r["reason"] for r in rows if r["reason"])
    for reason in reasons:
        console.print(f"    - {reason}", markup=False, soft_wrap=True)


def _ability_text(rows: list[dict[str, Any]]) -> str:
    """The operations that run, grouped by the layouts and ranks in which they do."""
    groups: dict[str, list[str]] = {}
    for operation in dict.fromkeys(r["operation"] for r in rows):
        places = []
        for layout in _LAYOUTS.values():
            chosen = (r for r in rows if r["operation"] == operation and r["layout"] == layout and r["capability"])
            ranks = sorted(rank for r in chosen for rank in r["ranks"])
            if ranks:
                span = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"
                places.append(f"{layout} {span}D")
        groups.setdefault(", ".join(places), []).append(operation)
    return "\n".join(f"{'/'.join(words)}: {places}" for places, words in groups.items() if places) or "-"


# ---------------------------------------------------------------- check


@main.command()
@click.option("--backend", "backends", multiple=True, help="Backend to run; may be repeated. Default: all that load.")
@click.option("--case", "cases", multiple=True, help="Problem line; a/b in a token means both. May be repeated.")
@click.option("--suite", "suites", multiple=True, help="Named suite, or a file of problem lines. May be repeated.")
@click.option("--list", "only_list", is_flag=True, help="Print the problem lines and run nothing; -v: vendors' lines.")
@click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write JSON to FILE, or to standard output in place of the table.",
)
@click.option("--junit", "junit_target", metavar="FILE", help="Write JUnit XML.")
@click.option("--html", "html_target", metavar="FILE", help="Write one self-contained page with plots.")
@click.option("--save", "folder", metavar="DIR", help="Keep outputs and a journal, for compare and --resume.")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in the folder of --save.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. Default: one per core, or one per GPU.")
@click.option(
    "--timeout",
    type=float,
    help=f"Seconds for a case, after which its process is killed.  [default: {executors.TIMEOUT:g}]",
)
@click.option("--executor", default="pool", show_default=True, help="pool | process | mpi | dask[:ADDRESS].")
@click.option("--same", is_flag=True, help="Refuse nodes (MPI ranks, dask workers) whose libraries differ.")
@click.option(
    "--scheduler-timeout",
    type=float,
    help=f"Seconds that dask's scheduler and workers have to answer.  [default: {executors.CONNECT:g}]",
)
@click.option("--fail-fast", is_flag=True, help="Stop after the first case that makes the exit status 1.")
@click.option("--allow-known", is_flag=True, help="Known defects do not make the exit status 1.")
@click.option("--require", "needed", multiple=True, metavar="BACKEND", help="Must run; as in PYBNORM_REQUIRE_DEVICE.")
@click.option("-v", "--verbose", is_flag=True, help="Details and repro line of every case, not of failures only.")
@click.pass_context
def check(
    context: click.Context,
    backends: tuple[str, ...],
    cases: tuple[str, ...],
    suites: tuple[str, ...],
    only_list: bool,
    json_target: str | None,
    junit_target: str | None,
    html_target: str | None,
    folder: str | None,
    resume: bool,
    jobs: int | None,
    timeout: float | None,
    executor: str,
    same: bool,
    scheduler_timeout: float | None,
    fail_fast: bool,
    allow_known: bool,
    needed: tuple[str, ...],
    verbose: bool,
) -> None:
    """Run cases on the vendor libraries and judge every output by its error bound.

    \b
    Exit status:
      0  every case is PASS, WARN or UNSUPPORTED, and at least one was judged
      1  any other status; a backend of PYBNORM_REQUIRE is absent, one of
         PYBNORM_REQUIRE_DEVICE, --require or --backend could not run beside
         others, or a file that PYBNORM_LIB_<BACKEND> names cannot be used
      2  nothing could be judged: no library, no supported case, bad arguments;
         a case is ERROR, which is no verdict: the library could not be used on
         any node that tried, or pybnorm itself failed; nodes differ that must
         not (--same); or the result could not be written
    130  interrupted; what was finished is printed
    141  standard output was closed by its reader, such as head

    \b
    A case, options at their default left out:
      train|infer|backward,spatial|persistent|peract,f32|f64|f16|bf16,
      nchw|nhwc|strides=AxB...,NxCxHxW[,option=value...]
    Options: see the documentation of pybnorm.check.problem.
    """
    from pybnorm.check import html

    try:
        problems = select(cases, suites)
        if only_list:
            _list(problems, verbose)
            return
        chosen = _backends(backends, "--backend") or pybnorm.backends()
        required = {variable: _required(variable) for variable in (REQUIRE, REQUIRE_DEVICE)}
        required[REQUIRE_DEVICE] += _backends(needed, "--require")
        if resume and folder is None:
            raise ArgumentError("--resume", True, "with --save DIR, the folder of the interrupted run")
        if folder == "":
            raise ArgumentError("--save", folder, "the name of a folder")
        executors.check_timeout("--timeout", timeout)
        if timeout is not None and executor == "process":
            raise ArgumentError("--timeout", timeout, "an executor other than process, which nothing could end")
        if html_target is not None:
            html.require()
        executors.check_timeout("--scheduler-timeout", scheduler_timeout)
        opened = executors.opened(executor, jobs=jobs, timeout=timeout or executors.TIMEOUT, connect=scheduler_timeout)
        farm = context.with_resource(opened)
        if farm is None:  # a rank that has served its first one
            return
        console = _console(stderr=json_target == "-")
        targets = _targets(context, "check", folder, json=json_target, junit=junit_target, html=html_target)
        journal = _journal(context, folder, resume)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    started = time.monotonic()
    names = list(dict.fromkeys((*chosen, *required[REQUIRE], *required[REQUIRE_DEVICE])))
    if farm.notice:
        click.echo(farm.notice, err=True)
    run = _Run(
        farm, console, journal, same, lambda r: fail_fast and report.exit_status([_allowed(r, allow_known)], []) == 1
    )
    try:
        run.all(names, problems)
    except ArgumentError as error:  # the journal is of other libraries
        raise click.UsageError(str(error)) from None
    found, results, interrupted = run.found, run.results, run.interrupted
    not_run = report.not_run(results)
    complete = not (interrupted or run.stopped or run.trouble or not_run)
    missing = [
        i.backend
        for i in found
        if (i.backend in required[REQUIRE] and not i.loaded)
        or (i.backend in required[REQUIRE_DEVICE] and i.problem)
        or (i.backend in backends and i.problem and results)
    ]
    overrides = [i.override for i in found if i.override]
    judged = [_allowed(r, allow_known) for r in results]
    status = _INTERRUPTED if interrupted else report.exit_status(judged, missing + overrides)
    if run.trouble is not None:
        status = run.trouble.exit_code
    document = {
        "schema": report.SCHEMA,
        "environment": report.environment(),
        "backends": found,
        "cases": results,
        "required_but_absent": missing,
        "unusable_overrides": overrides,
        "lost_nodes": farm.lost,
        "complete": complete,
        "exit_status": status,
    }
    failed = _write_reports(document, targets)
    trouble = run.trouble or failed
    if journal is not None:
        from pybnorm.check import archive

        try:
            archive.write_run(journal.folder, document)
        except (OSError, ArgumentError) as error:
            trouble = trouble or _WriteError(f"--save {folder}", error)
    if json_target != "-":
        report.print_results(console, results, verbose)
    report.print_details(console, results, verbose)
    report.print_totals(console, results, time.monotonic() - started)
    for lost in farm.lost:
        console.print(Text(one_line(report.lost_text(lost)), "red"), soft_wrap=True)
    if interrupted or run.stopped or run.trouble:
        usable = len({i.backend for i in found if not i.problem})
        console.print(f"incomplete: {len(results)} of {usable * len(problems)} cases", highlight=False)
        reason = "stopped by --save, which takes no more" if run.trouble else "stopped by --fail-fast"
        console.print(Text("interrupted" if interrupted else reason, "bold red"))
    else:
        _explain(console, found, results, missing, overrides)
    if not_run:
        console.print(Text(not_run, "bold red"))
    if trouble is not None:
        raise trouble
    context.exit(status)


def _allowed(result: runner.CaseResult, allow_known: bool) -> runner.CaseResult:
    """`result` as the exit status sees it."""
    return dataclasses.replace(result, status=Status.WARN) if allow_known and result.known else result


def _list(problems: Sequence[Problem], verbose: bool) -> None:
    from pybnorm.check import vendor_lines

    stream = _output()
    for problem in problems:
        stream.write(f"{problem}\n")
        for tool, line in (vendor_lines.vendor_lines(problem) if verbose else {}).items():
            stream.write(f"    {tool}: {line}\n")
    stream.flush()


def _journal(context: click.Context, folder: str | None, resume: bool) -> Any:
    if folder is None:
        return None
    from pybnorm.check import archive

    return context.with_resource(archive.Journal(folder, resume=resume))


def _write_reports(document: dict[str, Any], targets: dict[str, _Target]) -> _WriteError | None:
    """Write every report that was asked for; the first trouble with one, which does not keep others from it."""
    from pybnorm.check import html, junit

    environment, backends, results = (document[key] for key in ("environment", "backends", "cases"))

    def write(option: str, stream: IO[str]) -> None:
        if option == "--json":
            _write_json(document, stream)
        elif option == "--junit":
            junit.write(stream, environment, backends, results, document["required_but_absent"])
        else:
            html.write(stream, environment, backends, results, document["lost_nodes"])

    trouble: _WriteError | None = None
    for option, target in targets.items():
        try:
            target.put(functools.partial(write, option))
        except _WriteError as error:
            trouble = trouble or error
    return trouble


def _required(variable: str) -> tuple[str, ...]:
    names = (name.strip() for name in os.environ.get(variable, "").split(","))
    return _backends(tuple(filter(None, names)), variable)


def _backends(names: tuple[str, ...], argument: str) -> tuple[str, ...]:
    known = pybnorm.backends()
    for name in names:
        if name not in known:
            raise ArgumentError(argument, name, " | ".join(known))
    return names


class _Run:
    """Every case on every backend that can run, and what came of it in the order of the cases."""

    def __init__(
        self,
        farm: executors.Farm,
        console: Console,
        journal: Any,
        same: bool,
        ends: Callable[[runner.CaseResult], bool],
    ) -> None:
        self._farm, self._console, self._journal, self._same, self._ends = farm, console, journal, same, ends
        self.found: list[runner.BackendInfo] = []
        self.results: list[runner.CaseResult] = []
        self.interrupted = self.stopped = False
        self.trouble: _WriteError | None = None
        """What --save does not take; it ends the run."""

    def all(self, names: Sequence[str], problems: Sequence[Problem]) -> None:
        """Run; an interrupt leaves what is finished."""
        try:
            for name in names:
                self.found.append(executors.described(name, functools.partial(self._farm.describe, name)))
                self.found += self._farm.others(name)
            self._alike()
            report.print_backends(self._console, self.found)
            if self._journal is not None:
                self._noted(self._journal.begin, self.found)
            usable = list({i.backend: i for i in reversed(self.found) if not i.problem}.values())[::-1]
            done = {} if self._journal is None else self._journal.finished()
            self._entered([] if self._journal is None else self._journal.libraries())
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            terminal = self._console.is_terminal
            with Progress(*columns, console=self._console, transient=True, disable=not terminal) as progress:
                task = progress.add_task("check", total=len(usable) * len(problems))
                for item in usable:
                    progress.update(task, description=item.backend)
                    before = {str(p): done[item.backend, str(p)] for p in problems if (item.backend, str(p)) in done}
                    progress.advance(task, len(before))
                    self._one(item, problems, before, lambda: progress.advance(task))
                    if self.stopped:
                        break
        except KeyboardInterrupt:
            self.interrupted = True
        except _WriteError as error:
            self.trouble = error

    def _one(
        self,
        item: runner.BackendInfo,
        problems: Sequence[Problem],
        finished: dict[str, runner.CaseResult],
        advance: Callable[[], None],
    ) -> None:
        rest = [p for p in problems if str(p) not in finished]
        entries = {i.id: i for i in self.found if i.backend == item.backend}
        executor = self._farm.executor(item.backend, len(rest))
        complete = False
        try:
            keep = None if self._journal is None else str(self._journal.folder.resolve())
            with contextlib.closing(executors.run_cases(executor, item, rest, keep, entries=entries)) as results:
                for result in results:
                    self._entered(entries.values())
                    finished[result.case] = result
                    self._note(result)
                    advance()
                    if self._ends(result):
                        self.stopped = True
                        break
            complete = not self.stopped
        finally:
            executor.shutdown(wait=complete, cancel_futures=True)
            self.results += [finished[str(p)] for p in problems if str(p) in finished]

    def _entered(self, entries: Iterable[runner.BackendInfo]) -> None:
        """Have an entry of every library that gave a result, of the interrupted run too."""
        here = {(info.backend, info.id) for info in self.found}
        new = [info for info in entries if (info.backend, info.id) not in here]
        if new:
            self.found += new
            self.found.sort(key=lambda info: pybnorm.backends().index(info.backend))
            self._alike()
            if self._journal is not None:
                self._noted(self._journal.enter, self.found)

    def _alike(self) -> None:
        """Refuse what differs, if the user wants it so.

        Raises
        ------
        ArgumentError
            Nodes have different libraries, or some have none.
        """
        if not self._same:
            return
        for backend in dict.fromkeys(i.backend for i in self.found):
            own = [i for i in self.found if i.backend == backend]
            texts = [report.lost_text(lost) for lost in self._farm.lost if lost.backend in ("", backend)]
            if len(own) > 1:
                texts += [report.library_text(info) for info in own]
            if texts:
                raise ArgumentError("--same", backend, f"nodes that are alike; here are: {'; '.join(texts)}")

    def _note(self, result: runner.CaseResult) -> None:
        if self._journal is None:
            return
        _, lost, reason = result.message.partition(runner.NOT_KEPT)
        if lost:
            raise _WriteError(f"--save {self._journal.folder}", reason)
        self._noted(self._journal.append, result)

    def _noted(self, note: Callable[[Any], None], value: Any) -> None:
        try:
            note(value)
        except OSError as error:
            raise _WriteError(f"--save {self._journal.folder}", error) from None


def _explain(
    console: Console,
    found: list[runner.BackendInfo],
    results: list[runner.CaseResult],
    missing: list[str],
    overrides: list[str],
) -> None:
    """Why the exit status is what the statuses alone do not show."""
    for name in missing:
        console.print(Text(f"{name} was asked for and could not run", "bold red"))
    for variable in overrides:
        console.print(Text(f"{variable} names a file that cannot be used", "bold red"))
    if not results:
        console.print(Text("No vendor library could run, so nothing was checked.", "bold red"))
        for item in found:
            console.print(f"  {item.backend}: {item.problem}", markup=False, soft_wrap=True)
            if not item.loaded and not item.override:
                report.print_attempts(console, item)
            if item.hint:
                console.print(f"    to have it: {item.hint}", markup=False, soft_wrap=True)
    elif all(r.status == Status.UNSUPPORTED for r in results):
        console.print(Text("No backend supports any of these cases, so nothing was checked.", "bold red"))


# ---------------------------------------------------------------- bench


@main.group()
def bench() -> None:
    """Measure speed and memory."""


@bench.command("reference")
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Timed calls of each side.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def bench_reference(context: click.Context, repeats: int, as_json: bool) -> None:
    """The float64 reference against plain NumPy; exits with 1 beyond its limits of time and memory."""
    from pybnorm.bench import reference

    result = reference.run(repeats=repeats)
    if as_json:
        _write_json(result, _output())
    else:
        click.echo(visible(reference.render(result)), file=_output())
    context.exit(0 if result["within_limits"] else 1)


class _NothingToMeasure(click.ClickException):
    """No library or no device."""

    exit_code = 2


@bench.command("device")
@click.option(
    "--backend",
    type=click.Choice(["cudnn", "onednn"]),
    default="cudnn",
    show_default=True,
    help="cudnn for a GPU, onednn for the CPU.",
)
@click.option("--algorithm", "algorithms", multiple=True, help="Of the plans. Default: auto, and fast on cuDNN.")
@click.option("--shapes", multiple=True, metavar="NAME|NxCxHxW", help="Default: h200; small on the CPU.")
@click.option("--dtype", "dtypes", multiple=True, help="f32, f16 or bf16. Default: all.")
@click.option("--layout", "layouts", multiple=True, help="nchw or nhwc. Default: both.")
@click.option("--operation", "operations", multiple=True, help="train, infer or backward. Default: all.")
@click.option(
    "--rival", "rivals", multiple=True, help="What to hold it against; none: nothing. Default: all there are."
)
@click.option("--quick", is_flag=True, help="Fewer measurements of each time, and by default small shapes.")
@click.option("--host/--no-host", default=True, show_default=True, help="Measure host time per call.")
@click.option("--tune", is_flag=True, help="Also the plans of auto and fast that tune=True chooses.")
@click.option("--seconds", type=click.FloatRange(min=0), default=float("inf"), help="Begin no shape after this time.")
@click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write JSON to FILE, or to standard output in place of the tables.",
)
@click.option("--plot", "plot_target", metavar="FILE", help="Draw bytes per second against size: .svg, .png or .pdf.")
@click.pass_context
def bench_device(
    context: click.Context,
    backend: str,
    algorithms: tuple[str, ...],
    shapes: tuple[str, ...],
    dtypes: tuple[str, ...],
    layouts: tuple[str, ...],
    operations: tuple[str, ...],
    rivals: tuple[str, ...],
    quick: bool,
    host: bool,
    tune: bool,
    seconds: float,
    json_target: str | None,
    plot_target: str | None,
) -> None:
    """Device and host time of batch norm, against a copy and against what else is here.

    Options that name something may be repeated. Shapes have names too: h200, resnet50, mobilenetv2, unet3d, small.
    Rivals are torch, torch-native (its kernels without cuDNN), cudnn-frontend and raw (a C program, built on the spot)
    on a GPU; torch and numpy on the CPU.

    \b
    Exit status:
      0  everything that pybnorm ran was right
      1  a call of pybnorm failed or its result was wrong, or nothing was measured
      2  no library, no device, or bad arguments; or the result could not be written
    130  interrupted; what was finished is printed
    """
    from pybnorm.bench import device, plot

    try:
        if plot_target is not None:
            plot.check(plot_target)
        console = _console(stderr=json_target == "-")
        targets = _targets(context, "bench", json=json_target, plot=plot_target)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("bench", total=None, completed=-1)
            result = device.run(
                backend,
                algorithms=algorithms,
                shapes=shapes,
                dtypes=dtypes or device.DTYPES,
                layouts=layouts or tuple(device.LAYOUTS),
                operations=operations or device.OPERATIONS,
                rivals=None if not rivals else tuple(name for name in rivals if name != "none"),
                quick=quick,
                host=host,
                tune=tune,
                seconds=seconds,
                progress=lambda text, total: progress.update(task, description=text, total=total, advance=1),
            )
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:
        raise _NothingToMeasure(str(error)) from None
    if "--json" in targets:
        document = {"schema": "pybnorm.bench/1", "environment": report.environment()} | result
        targets["--json"].put(functools.partial(_write_json, document))
    if json_target != "-":
        device.render(result, console)
    if plot_target is not None:
        try:
            plot.draw(result, plot_target)
        except (OSError, ArgumentError) as error:
            raise _WriteError(f"--plot {plot_target}", error) from None
    context.exit(_INTERRUPTED if result["stopped"] == "interrupted" else 0 if result["good"] else 1)


# ---------------------------------------------------------------- tune


@main.command()
@click.option("--clear", is_flag=True, help="Forget all of it, so that the next plans are measured anew.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def tune(clear: bool, as_json: bool) -> None:
    """What plans with tune=True have measured and remembered on this machine, and in which file.

    PYBNORM_TUNE_CACHE names the file; without it it lies in the user's cache folder.
    """
    from pybnorm import tuning

    file = tuning.cache_file()
    found = tuning.entries()
    if clear:
        try:
            tuning.clear()
        except ArgumentError as error:
            raise click.UsageError(str(error)) from None
        except OSError as error:
            raise _WriteError(str(file), error) from None
    if as_json:
        _write_json({"file": file, "cleared": clear, "entries": found}, _output())
        return
    console = _console()
    console.print(Text(f"{one_line(str(file))}: {len(found)} {'forgotten' if clear else 'remembered'}"), soft_wrap=True)
    for problem, entry in ({} if clear else found).items():
        rule = entry["rule_seconds"]
        text = f"{entry['algorithm']} {entry['seconds'] * 1e6:.1f} us"
        if entry["algorithm"] != entry["rule"]:
            text += f" ({entry['rule']} " + (f"{rule * 1e6:.1f} us)" if rule is not None else "failed)")
        console.print(Text(f"{text}: {problem}"), soft_wrap=True)


# ---------------------------------------------------------------- compare


@main.command("compare")
@click.argument("paths", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write JSON to FILE, or to standard output in place of the tables.",
)
@click.option("--html", "html_target", metavar="FILE", help="Write one self-contained page with plots.")
@click.option("-v", "--verbose", is_flag=True, help="Lists in full.")
@click.pass_context
def compare_runs(
    context: click.Context, paths: tuple[str, ...], json_target: str | None, html_target: str | None, verbose: bool
) -> None:
    """Hold runs against each other: two vendors, two versions of a library, two machines.

    RUN is a folder of check --save, or a file of check --json, of which only statuses and ratios can be compared. Older
    versions come first. Every two backends of all runs are compared on the cases that both have; outputs by the sum of
    both sides' error bounds.

    \b
    Exit status:
      0  all is equal, within the sum of both bounds, or agrees in its status
      1  a difference is beyond the bounds or undecided, one side passes where
         the other fails, or a later run fails or refuses what an earlier one
         of the same backend did not, could not run that backend any more, or
         is not complete and lacks its cases. (Of a backend that a machine of
         another kind does not have, there is a notice only.)
      2  there is nothing to compare; bad arguments; or the result could not
         be written
    130  interrupted
    """
    from pybnorm.check import compare, compare_terminal, html

    console = _console(stderr=json_target == "-")
    try:
        if html_target is not None:
            html.require()
        runs = compare.read(paths)
        for option, target in (("--json", json_target), ("--html", html_target)):
            if target is not None and compare.is_run(target, runs):
                raise ArgumentError(option, target, f"not a run, which it would destroy; {option}=FILE is unmistakable")
        targets = _targets(context, "compare", json=json_target, html=html_target)
        columns = (TextColumn("compare"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("compare")
            comparison = compare.compare(runs, lambda done, total: progress.update(task, completed=done, total=total))
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    if json_target != "-":
        compare_terminal.print_comparison(console, comparison, verbose)
    if "--json" in targets:
        targets["--json"].put(functools.partial(_write_json, compare.contents(comparison)))
    if "--html" in targets:
        targets["--html"].put(functools.partial(html.write_comparison, comparison=comparison))
    if comparison.exit_status == 2:
        console.print(Text("Nothing to compare: no two backends of these runs judged the same case.", "bold red"))
    context.exit(comparison.exit_status)


# ---------------------------------------------------------------- selftest


@main.command()
@click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write JSON to FILE, or to standard output in place of the table.",
)
@click.pass_context
def selftest(context: click.Context, json_target: str | None) -> None:
    """Run simulated kernels, right and wrong, through the judge: does it find what it should, and nothing else?

    \b
    Needs no vendor library. Exit status:
      0  no correct kernel was objected to, every bug was found often enough
      1  otherwise
    """
    from pybnorm.check.selftest import detection

    try:
        targets = _targets(context, "selftest", json=json_target)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None
    console = _console(stderr=json_target == "-")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("selftest")
        found = detection.run(
            progress=lambda text, done, total: progress.update(task, description=text, completed=done, total=total)
        )
    if json_target != "-":
        click.echo(visible(detection.render(found)), file=_output())
    for target in targets.values():
        target.put(
            functools.partial(
                _write_json, {"schema": "pybnorm.selftest/1", "environment": report.environment()} | found.to_json()
            )
        )
    context.exit(0 if found.good else 1)
