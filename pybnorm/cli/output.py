"""Outputs of every command: standard output, the console, and the files of ``--json``, ``--html`` and the like."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar, cast

import click
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pybnorm import _files
from pybnorm._text import one_line, reason
from pybnorm.check.judging.results import json_parts, to_json
from pybnorm.check.report import terminal
from pybnorm.check.report.console import Console
from pybnorm.check.run.environment import machine
from pybnorm.errors import ArgumentError

_ALSO_STANDARD = ("--json", "--markdown")
EVERY = 30.0
"""Seconds between lines of progress."""
NO_READER = 141  # 128 + SIGPIPE
_Result = TypeVar("_Result")
_Command = TypeVar("_Command", bound=Callable[..., Any])


class WriteError(click.ClickException):
    """A target that cannot be written. Nothing was shown, so the exit status is no verdict."""

    exit_code = 2

    def __init__(self, target: str, error: Exception | str) -> None:
        super().__init__(one_line(f"{target} cannot be written: {reason(error)}"))


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an `ArgumentError` into click's error for bad usage, with exit status 2."""
    try:
        yield
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None


# ---------------------------------------------------------------- the terminal


class _Output:
    """Standard output or error. A failed write ends the command with one line.

    If the reader has closed its end, as head does, the command ends quietly with status 141, as SIGPIPE ends others.
    The status is not 1, which is a verdict.
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
            raise click.exceptions.Exit(NO_READER) from None
        except OSError as error:
            raise WriteError("standard output", error) from None


def standard_output() -> IO[str]:
    """Standard output, guarded. Raises WriteError: it is closed."""
    if sys.stdout is None:
        raise WriteError("standard output", "it is closed")
    return cast(IO[str], _Output(sys.stdout))


def console(stderr: bool = False) -> Console:
    """A console on standard output; on standard error where JSON takes standard output."""
    if not stderr:
        stream = standard_output()
    elif sys.stderr is not None:
        stream = cast(IO[str], _Output(sys.stderr))
    else:
        return Console(quiet=True)
    return Console(file=stream, width=None if stream.isatty() else terminal.WIDTH)


class _Lines(Progress):
    """Progress where no terminal shows a bar: a line on standard error, every half minute."""

    def __init__(self, on: Console) -> None:
        super().__init__(console=on, disable=True)
        self._start = time.monotonic()
        self._next = self._start + EVERY

    def stop(self) -> None:
        """Nothing was started; rich before 14.3 would write a blank line."""

    def update(self, task_id: TaskID, **values: Any) -> None:
        super().update(task_id, **values)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            task = next(task for task in self.tasks if task.id == task_id)
            of = "" if task.total is None else f" of {task.total:g}"
            of += f", {now - self._start:.0f} s"
            if task.time_remaining:
                of += f", {task.speed:.3g}/s, {task.time_remaining:.0f} s left"
            with contextlib.suppress(OSError):  # nobody reads standard error
                click.echo(f"{task.description}: {task.completed:g}{of}", err=True)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return TaskProgressColumn.render_speed(task.speed)


def progress(on: Console) -> Progress:
    """A progress bar on a terminal, else a line on standard error every `EVERY` seconds; with rate and time left."""
    if not on.is_terminal:
        return _Lines(on)
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=on, transient=True)


# ---------------------------------------------------------------- documents


def document_option(instead: str, name: str = "JSON") -> Callable[[_Command], _Command]:
    """The option ``--json [FILE]``, or that of another format; `instead` says what it replaces on standard output."""
    return click.option(
        f"--{name.lower()}",
        f"{name.lower()}_target",
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        help=f"Write {name} to FILE, or to standard output in place of {instead}.",
    )


def html_option(more: str = " with plots") -> Callable[[_Command], _Command]:
    """The option ``--html FILE``, which is refused at once where the packages of a page are not installed."""
    text = f"Write one self-contained page{more}."
    return click.option("--html", "html_target", metavar="FILE", callback=_with_packages, help=text)


def _with_packages(context: click.Context, parameter: click.Parameter, target: str | None) -> str | None:
    from pybnorm.check.report import html

    with usage_errors():
        if target is not None:
            html.require()
    return target


def document(schema: str, content: dict[str, Any]) -> dict[str, Any]:
    """A JSON document of a command: its schema, this machine, the content."""
    return {"schema": schema, "environment": machine()} | content


def write_json(value: Any, stream: IO[str]) -> None:
    """Write a value as JSON, a dictionary part by part."""
    if isinstance(value, dict):
        stream.writelines(json_parts(value))
    else:
        stream.write(json.dumps(to_json(value), indent=1, allow_nan=False) + "\n")
    stream.flush()


def put_json(targets: dict[str, Target], value: dict[str, Any]) -> None:
    """Write a document to the target of ``--json``, if there is one."""
    if "--json" in targets:
        targets["--json"].put(lambda stream: write_json(value, stream))


# ---------------------------------------------------------------- files


def kind(option: str, command: str) -> _files.Kind:
    """Know a report that `command` wrote for `option` by its beginning; only such a file is replaced."""
    record = option == "--json" and command == "claims"
    what, beginning = {
        "--json": ("JSON", r'\s*\[\s*\{\s*"first":' if record else rf'\s*\{{\s*"schema":\s*"pybnorm\.{command}/'),
        "--junit": ("JUnit report", r'<\?xml[^>]*>\s*<testsuites name="pybnorm '),
        "--html": ("page", rf'<!DOCTYPE html>.*?<meta name="generator" content="pybnorm {command}"'),
        "--markdown": ("Markdown", rf"# pybnorm {command}\n"),
    }.get(option, ("plot", r"(?:<\?xml|\x89PNG|%PDF-).*?pybnorm bench"))
    return _files.Kind(f"an earlier {what} of pybnorm {command}", beginning)


class Target:
    """The place of a report. It is tried before the run, so that a long run is not lost at its end.

    A file is written under a hidden name beside its place and renamed once it is whole: if the run ends early, the old
    file stays and no other is left. Character devices and pipes are written to directly.

    Raises ArgumentError: it cannot be written, or is a file that pybnorm did not make.
    """

    def __init__(self, option: str, target: str, made: _files.Kind) -> None:
        self.option, self.target, self._kind = option, target, made
        self._name = f"{option} {target}"
        self._stream: IO[str] | None = None
        if target == "-":
            if option not in _ALSO_STANDARD:
                raise ArgumentError(option, target, f"a file; {' and '.join(_ALSO_STANDARD)} write to standard output")
            self._name = "standard output"
            self._stream = standard_output()
            return
        try:
            if _is_stream(target):
                # A pipe without a reader is refused: without O_NONBLOCK this would wait for one.
                number = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                os.set_blocking(number, True)
                self._stream = open(number, "w", encoding="utf-8")  # noqa: SIM115 (__exit__)
                return
            _files.try_to_write(option, target, made)
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            raise ArgumentError(option, target, f"a file that can be written ({reason(error)})") from None

    def put(self, write: Callable[[IO[str]], object]) -> None:
        """Have `write` write the whole report. Raises WriteError: the target cannot be written."""
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
            raise WriteError(self._name, error) from None

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None and not isinstance(self._stream, _Output):
            with contextlib.suppress(OSError):  # the failed write was reported already
                self._stream.close()


def _is_stream(target: str) -> bool:
    try:
        mode = os.stat(target).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def write_reports(document: Mapping[str, Any], targets: Mapping[str, Target]) -> WriteError | None:
    """Write every report of a run that was asked for. An error does not keep the others from it; the first is returned.

    `document` is as of `pybnorm.check.run.archive.read_run`.
    """
    from pybnorm.check.report import html, junit, markdown

    environment, backends, results = (document[key] for key in ("environment", "backends", "cases"))
    missing, lost = document.get("required_but_absent", ()), document.get("lost_nodes", ())
    complete = document.get("complete", True)
    writers: dict[str, Callable[[IO[str]], object]] = {
        "--json": lambda stream: write_json(document, stream),
        "--junit": lambda stream: junit.write(stream, environment, backends, results, missing),
        "--html": lambda stream: html.write(stream, environment, backends, results, lost, complete),
        "--markdown": lambda stream: markdown.write(stream, backends, results, complete),
    }
    trouble: WriteError | None = None
    for option, target in targets.items():
        try:
            target.put(writers[option])
        except WriteError as error:
            trouble = trouble or error
    return trouble


def spare_runs(context: click.Context, runs: Sequence[Any]) -> None:
    """Refuse a report in place of one of the runs that it is made of, or of another run."""
    from pybnorm.check.compare import comparison

    for option in ("--json", "--junit", "--html"):
        target = context.params.get(f"{option[2:]}_target")
        if target is not None and comparison.is_run(target, runs):
            raise click.UsageError(
                f"{option} would overwrite the run {one_line(target)}; use {option}=FILE to write elsewhere"
            )


def targets(
    context: click.Context, command: str, folder: str | None = None, **options: str | None
) -> dict[str, Target]:
    """Open the targets of the command's options that were given; the context closes them. `folder` is that of --save.

    `options` are others than the command line's. Raises ArgumentError: as `Target`; two options name one file, and one
    report would be lost.
    """
    names = [str(parameter.name) for parameter in context.command.params]
    asked = {name.removesuffix("_target"): context.params.get(name) for name in names if name.endswith("_target")}
    named = {f"--{name}": target for name, target in (asked | options).items() if target is not None}
    taken = {} if folder is None else {os.path.join(folder, name): "--save" for name in ("run.json", "journal.jsonl")}
    for option, target in named.items():
        for other, its in taken.items():
            if (target == "-" == other) or (
                "-" not in (target, other) and not _is_stream(target) and _files.same(target, other)
            ):
                raise ArgumentError(option, target, f"another file than {other} of {its}")
        taken[target] = option
    return {o: context.with_resource(Target(o, target, kind(o, command))) for o, target in named.items()}
