"""``pybnorm check``: run cases on the vendor libraries and judge every output."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import click
from rich.text import Text

import pybnorm
from pybnorm import _core
from pybnorm._text import one_line
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import (
    SCHEMA,
    CaseResult,
    allow_known,
    exit_status,
    is_implementation,
    lost_text,
    not_run,
    version_text,
)
from pybnorm.check.language import vendor_lines
from pybnorm.check.language.data import read
from pybnorm.check.language.lines import load_suite, packaged_suites, select
from pybnorm.check.language.problem import RANDOM, Problem
from pybnorm.check.report import terminal
from pybnorm.check.report.console import Console
from pybnorm.check.run import archive, executors, judge_devices, support
from pybnorm.check.run.session import open_session
from pybnorm.check.run.whole_run import WholeRun
from pybnorm.check.run.worker import Worker, check_timeout, failed
from pybnorm.cli import ARGUMENTS, INTERRUPTED, completion, output
from pybnorm.cli.sections import Sectioned
from pybnorm.errors import ArgumentError
from pybnorm.reference import namespaces

REQUIRE = "PYBNORM_REQUIRE"
_BESIDE = ("--backend", "--library", "--implementation", "--timeout", "--json", "--judge")
_DRAWN = 20
"""Cases with a drawn seed that are printed before the run; the report has all."""
REQUIRE_DEVICE = "PYBNORM_REQUIRE_DEVICE"


def _load_from(context: click.Context, file: str | None, backends: tuple[str, ...], executor: str) -> None:
    """Name the library's file to the processes that cases run in."""
    if file is None:
        return
    if len(backends) != 1:
        raise ArgumentError("--library", file, "with one --backend, whose library it is")
    if executor.startswith("dask"):
        raise ArgumentError("--library", file, "an executor on this machine: on each node the environment names it")
    if not os.path.isfile(file):
        raise ArgumentError("--library", file, "the name of a file")
    _export(context, _core.search_spec(backends[0]).variable, os.path.abspath(file))


def _export(context: click.Context, variable: str, value: str | None) -> None:
    """Set an environment variable, which the processes of cases read, until the command ends; None sets nothing."""
    if value is None:
        return
    before = os.environ.get(variable)
    os.environ[variable] = value
    own = functools.partial(os.environ.pop, variable, None)
    context.call_on_close(own if before is None else lambda: os.environ.update({variable: before}))


@click.command(cls=Sectioned, short_help="Judge libraries, or your own kernel, by an error bound.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=completion.Backend(),
    help="Backend to run; may be repeated. Default: all that load.",
)
@click.option("--library", metavar="FILE", help="The file of the one --backend's library.")
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    metavar="MODULE:OBJECT",
    help="Python object to run as if it were a library; may be repeated.",
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    shell_complete=completion.suites,
    help="Named suite, or a file of problem lines. May be repeated.",
)
@click.option(
    "--case",
    "cases",
    multiple=True,
    shell_complete=completion.cases,
    help="Problem line; a/b in a token means both. May be repeated.",
)
@click.option(
    "--shapes",
    multiple=True,
    metavar="random:COUNT[:SEED]",
    help="Cases of drawn shapes; the seed is printed. May be repeated.",
)
@click.option(
    "--from",
    "foreign",
    nargs=2,
    multiple=True,
    metavar="TOOL LINE",
    shell_complete=completion.words("benchdnn", "miopendriver"),
    help="A command of benchdnn or miopendriver, as cases. May be repeated.",
)
@click.option(
    "--data",
    "data",
    metavar="FILE",
    help="Tensors of a NumPy archive for the cases, instead of made ones; alone: which convention they follow.",
)
@click.option("--shard", metavar="K/N", help="The K-th of N equal shares of the cases, for machines without dask.")
@click.option("--list", "only_list", is_flag=True, help="Print the problem lines and run nothing; -v: vendors' lines.")
@click.option(
    "--list-suites",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, asked: _list_suites(context) if asked else None,
    help="Print the suites that there are, with their numbers of cases, and run nothing.",
)
@click.option(
    "--explain",
    "explained",
    metavar="CASE",
    shell_complete=completion.cases,
    help="Run one case and show how each output was judged.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. Default: one per core, or one per GPU.")
@click.option(
    "--timeout",
    type=float,
    help=f"Seconds for a case, after which its process is killed.  [default: {executors.TIMEOUT:g}]",
)
@click.option(
    "--executor",
    default="pool",
    show_default=True,
    shell_complete=completion.words("pool", "process", "dask"),
    help="pool | process | dask[:ADDRESS].",
)
@click.option("--same", is_flag=True, help="Refuse nodes (dask workers) whose libraries differ.")
@click.option(
    "--judge",
    type=click.Choice(namespaces.NAMES),
    expose_value=False,
    callback=lambda context, _, word: _export(context, judge_devices.VARIABLE, word),
    help=f"What judges, as in {judge_devices.VARIABLE}. "
    "Default: of large cases the GPU, by CuPy or PyTorch, else NumPy.",
)
@click.option("--fail-fast", is_flag=True, help="Stop after the first case that makes the exit status 1.")
@click.option("--allow-known", is_flag=True, help="Known defects do not make the exit status 1.")
@click.option("--strict", is_flag=True, help="CHAIN, less accurate than blocked sums, makes the exit status 1.")
@click.option(
    "--require",
    "needed",
    multiple=True,
    type=completion.Backend(),
    help="Must run; as in PYBNORM_REQUIRE_DEVICE.",
)
@click.option("--require-claims", is_flag=True, help="A library without a record of version and device exits with 1.")
@output.document_option("the table")
@output.document_option("the table", "Markdown")
@click.option("--junit", "junit_target", metavar="FILE", help="Write JUnit XML.")
@output.html_option()
@click.option("--save", "folder", metavar="DIR", help="Keep outputs and a journal, for compare and --resume.")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in the folder of --save.")
@click.option("-v", "--verbose", is_flag=True, help="Details and repro line of every case, not of failures only.")
@click.pass_context
def check(context: click.Context, /, **options: Any) -> None:
    """Run cases on the vendor libraries and judge every output by its error bound.

    \b
    One case: pybnorm check --backend onednn --case train,spatial,f32,nchw,8x64x32x32

    \b
    Exit status:
      0  all is correct, unsupported or only less accurate, and something ran
      1  something is wrong, or what is required is absent
      2  nothing could be judged, bad arguments, or a report was not written
    130  interrupted; what was finished is printed
    141  standard output was closed by its reader, such as head

    \b
    A case, options at their default left out:
      train|infer|backward|frozen|training_grad|backward_reduce|backward_elemt|
      elemt|gather_stats|sync_train|sync_backward,
      spatial|persistent|peract,f32|f64|f16|bf16,
      nchw|nhwc|strides=AxB...,NxCxHxW[,option=value...]
    """
    o = SimpleNamespace(**options)
    with output.usage_errors():
        _load_from(context, o.library, o.backends, o.executor)
    if o.explained is not None:
        _explain_case(context, o)
        return
    named = o.cases or o.suites or o.foreign or o.shapes
    if o.data is not None and not named:
        _which_convention(context, o.data)
    with output.usage_errors():
        problems = _share(_problems((*o.cases, *_read(o.foreign), *_drawn(o.shapes)), o.suites, o.data), o.shard)
        if o.only_list:
            _list(problems, o.verbose)
            return
        asked = (*o.backends, *_implementations(o.implementations))
        chosen = asked or pybnorm.backends()
        for name in chosen:
            support.records(name)  # before an hour is spent
        required = {variable: _required(variable) for variable in (REQUIRE, REQUIRE_DEVICE)}
        required[REQUIRE_DEVICE] += o.needed
        if o.resume and o.folder is None:
            raise ArgumentError("--resume", True, "with --save DIR, the folder of the interrupted run")
        if o.folder == "":
            raise ArgumentError("--save", o.folder, "the name of a folder")
        check_timeout("--timeout", o.timeout)
        if o.timeout is not None and o.executor == "process":
            raise ArgumentError("--timeout", o.timeout, "an executor other than process, which nothing could end")
        judge_devices.check(here=o.executor in ("pool", "process"))
        timeout = o.timeout or executors.TIMEOUT
        farm = context.with_resource(executors.opened(o.executor, jobs=o.jobs, timeout=timeout))
        silent = "-" in (o.json_target, o.markdown_target)
        console = output.console(stderr=silent)
        targets = output.targets(context, "check", o.folder)
        journal = None if o.folder is None else context.with_resource(archive.Journal(o.folder, resume=o.resume))
    started = time.monotonic()
    if any(f"seed={RANDOM}" in case for case in o.cases):
        for problem in problems[:_DRAWN]:
            click.echo(f"seed={RANDOM}: {problem}", err=silent)

    def ends(result: CaseResult) -> bool:
        return o.fail_fast and exit_status(_allowed([result], o.allow_known), [], o.strict) == 1

    run = WholeRun(farm, journal, o.same, ends)
    with output.usage_errors():  # --same, or a journal of other libraries
        run.describe(list(dict.fromkeys((*chosen, *required[REQUIRE], *required[REQUIRE_DEVICE]))))
        if not run.interrupted:
            terminal.print_backends(console, run.found)
    with run.uninterrupted():
        with output.usage_errors(), output.progress(console) as progress:
            task = progress.add_task("check", total=None)
            run.run(
                problems,
                lambda name, done, total: progress.update(task, description=name, completed=done, total=total),
            )
        document = _document(run, farm, required, asked, o)
        trouble = _save(run, document, o.folder, output.write_reports(document, targets))
    if not silent:
        terminal.print_results(console, run.results, o.verbose)
    terminal.print_details(console, run.results, o.verbose)
    terminal.print_totals(console, run.results, time.monotonic() - started, judge_devices.instead(run.results))
    _explain(console, run, document, len(problems), _resumption(context, o.folder))
    if o.verbose or o.require_claims:
        _explain_records(console, document["without_record"])
    terminal.print_conclusions(console, run.found, run.results, not _ended(run))
    if document["exit_status"] == 0 and not named:
        console.print("Next: pybnorm check --suite standard", highlight=False)
    if trouble is not None:
        raise trouble
    context.exit(document["exit_status"])


def _which_convention(context: click.Context, file: str) -> None:
    """Print which conventions the arrays of a file follow; exit with 1 if one follows none that is known."""
    from pybnorm.check.judging.which import read_call, which_convention

    with output.usage_errors():
        call = read_call(file)
        try:
            fits = which_convention(**call)
        except ArgumentError as error:
            raise ArgumentError(f"--data {file}: {error.argument}", error.value, error.allowed) from None
    for fit in fits:
        click.echo(one_line(str(fit)))
    wrong = [fit.output for fit in fits if not fit.convention]
    if wrong:
        click.echo(f"No convention that is known explains {' and '.join(wrong)}.")
    else:
        click.echo("Every result follows a convention that is known.")
    context.exit(1 if wrong else 0)


def _explain_case(context: click.Context, o: SimpleNamespace) -> None:
    """Run one case on each backend, in a process of its own, and print how it was judged."""
    from pybnorm.check.report import explain

    with output.usage_errors():
        for option in context.command.params:
            value = context.params.get(str(option.name))
            if not {"--explain", *_BESIDE} & set(option.opts) and value and value != option.get_default(context):
                raise ArgumentError("--explain", f"beside {option.opts[-1]}", "alone, or beside " + ", ".join(_BESIDE))
        check_timeout("--timeout", o.timeout)
        line = _one_case(o.explained)
        asked = (*o.backends, *_implementations(o.implementations))
        targets = output.targets(context, "explain")
    console = output.console(stderr=o.json_target == "-")
    found: list[dict[str, Any]] = []
    results: list[CaseResult] = []
    for backend in asked or pybnorm.backends():
        with Worker(backend, timeout=o.timeout or executors.TIMEOUT) as worker:
            info = worker.describe()
            if info.problem:
                console.print(f"{backend}: {info.problem}", markup=False, soft_wrap=True)
                continue
            try:
                arguments = (explain.explain_line, open_session, backend, line)
                result, explanation = worker.call(*arguments, timeout=worker.timeout)
            except Exception as error:
                result, explanation = failed(backend, line, error), None
        results.append(result)
        found.append({"result": result, "explanation": explanation and dataclasses.asdict(explanation)})
        if o.json_target == "-":
            continue
        console.print(Text.assemble((result.status.value, terminal.STYLES[result.status]), f" {backend} {line}"))
        for text in [result.message] if result.message else []:
            console.print(text, soft_wrap=True)
        for text in explain.lines(explanation) if explanation else ():
            console.print(text, soft_wrap=True)
    missing = [backend for backend in asked if backend not in {r.backend for r in results}]
    output.put_json(targets, output.document(explain.SCHEMA, {"cases": found}))
    context.exit(exit_status(results, missing))


def _one_case(text: str) -> str:
    """The case of --explain."""
    if text in packaged_suites():
        allowed = f"one case; this is a suite, whose cases pybnorm check --list --suite {text} prints"
        raise ArgumentError("--explain", text, allowed)
    _named("--explain", text)
    problems = select([text], ())
    if len(problems) > 1:
        names = " and ".join(map(str, problems[:2])) + (", ..." if len(problems) > 2 else "")
        raise ArgumentError("--explain", text, f"one case; these are {len(problems)}: {names}")
    return str(problems[0])


def _share(problems: list[Problem], shard: str | None) -> list[Problem]:
    """Every N-th case, from the K-th on: neighbours, which take about the same time, go to all shares alike."""
    if shard is None:
        return problems
    first, _, count = shard.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise ArgumentError("--shard", shard, "K/N, such as 2/5 for the second of five shares")
    found = problems[int(first) - 1 :: int(count)]
    if not found:
        raise ArgumentError("--shard", shard, f"at most {len(problems)} shares, one for each case")
    return found


def _drawn(words: Sequence[str]) -> list[str]:
    """Cases of drawn shapes; the words that draw the same again are said on standard error."""
    from pybnorm.check.language.drawn_shapes import drawn_cases, read_shapes

    cases = []
    for word in words:
        count, seed = read_shapes(word)
        click.echo(f"--shapes random:{count}:{seed}", err=True)
        cases += [str(problem) for problem in drawn_cases(count, seed)]
    return cases


def _read(foreign: Sequence[tuple[str, str]]) -> list[str]:
    """Read other tools' lines as cases; say on standard error what is not as the tool would do it."""
    from pybnorm.check.language import vendor_lines_read

    cases = []
    for tool, line in foreign:
        several = vendor_lines_read.read_all(tool, line)
        cases += [str(found.problem) for found in several.found]
        counts = Counter(note for found in several.found for note in found.notes)
        notes = [note + (f" ({count} problems)" if len(several.found) > 1 else "") for note, count in counts.items()]
        refused = [f"{count} not read: {feature}" for feature, count in several.refused.items()]
        for note in (*several.notes, *notes, *refused):
            click.echo(f"{one_line(line)}: {one_line(note)}", err=True)
    return cases


def _problems(cases: tuple[str, ...], suites: tuple[str, ...], file: str | None) -> list[Problem]:
    """The problems asked for, with the tensors of a file if one is named."""
    if file is None:
        try:
            return select(cases, suites)
        except ArgumentError:
            for case in cases:
                _named("--case", case)
            for suite in suites:
                _named("--suite", suite)
            raise
    if suites or not cases:
        raise ArgumentError("--data", file, "with --case, which says what call the tensors are for, or alone")
    problems = select([f"{case},data={os.path.abspath(file)}" for case in cases], ())
    for problem in problems:
        read(problem)  # what is missing or of another shape is told before anything runs
    return problems


def _named(option: str, value: str) -> None:
    """Have an error name the option that it is of, and the option's value."""
    try:
        select(*(((), [value]) if option == "--suite" else ([value], ())))
    except ArgumentError as error:
        if error.value == value:
            raise ArgumentError(option, value, error.allowed) from None
        raise click.UsageError(f"{option} {one_line(value)}: {error}") from None


def _list_suites(context: click.Context) -> None:
    stream = output.standard_output()
    for name in packaged_suites():
        stream.write(f"{name:16} {len(load_suite(name)):6} cases\n")
    stream.flush()
    context.exit()


def _list(problems: Sequence[Problem], verbose: bool) -> None:
    stream = output.standard_output()
    for problem in problems:
        stream.write(f"{problem}\n")
        for tool, line in (vendor_lines.vendor_lines(problem) if verbose else {}).items():
            stream.write(f"    {tool}: {line}\n")
    stream.flush()


def _required(variable: str) -> tuple[str, ...]:
    names = tuple(filter(None, map(str.strip, os.environ.get(variable, "").split(","))))
    for name in names:
        if name not in pybnorm.backends():
            raise ArgumentError(variable, name, " | ".join(pybnorm.backends()))
    return names


def _implementations(specs: tuple[str, ...]) -> tuple[str, ...]:
    for spec in specs:
        if not is_implementation(spec):
            raise ArgumentError("--implementation", spec, "MODULE:OBJECT, FILE.py:OBJECT or aten:MODULE")
    return specs


def _allowed(results: list[CaseResult], known: bool) -> list[CaseResult]:
    """`results`; with --allow-known, what known defects explain is allowed."""
    if known:
        allow_known(results)
    return results


def _without_record(run: WholeRun) -> list[str]:
    """Libraries of which no run of their version on the device is recorded, such as "onednn 3.2.0 on AMD EPYC"."""
    usable = [i for i in run.found if not i.problem and not is_implementation(i.backend)]
    bare = [i for i in usable if support.run_of(i.backend, i.version, i.device, i.digest) is None]
    return list(dict.fromkeys(f"{i.backend} {version_text(i)} on {i.device}" for i in bare))


def _document(
    run: WholeRun, farm: executors.Farm, required: dict[str, tuple[str, ...]], backends: tuple[str, ...],
    o: SimpleNamespace,
) -> dict[str, Any]:  # fmt: skip
    """The run as JSON has it. `required` is by variable; `backends` are those of --backend."""
    missing = [
        i.backend
        for i in run.found
        if (i.backend in required[REQUIRE] and not i.loaded)
        or (i.backend in required[REQUIRE_DEVICE] and i.problem)
        or (i.backend in backends and i.problem and run.results)
    ]
    overrides = [i.override for i in run.found if i.override]
    bare = _without_record(run)
    absent = missing + overrides + (bare if o.require_claims else [])
    results = _allowed(run.results, o.allow_known)
    status = exit_status(results, absent, o.strict)
    if run.interrupted:
        status = INTERRUPTED
    if run.not_saved:
        status = output.WriteError.exit_code
    return output.document(
        SCHEMA,
        {
            "backends": run.found,
            "cases": results,
            "required_but_absent": missing,
            "unusable_overrides": overrides,
            "lost_nodes": farm.lost,
            "without_record": bare,
            "complete": not (_ended(run) or not_run(results)),
            "exit_status": status,
        },
    )


def _save(
    run: WholeRun, document: dict[str, Any], folder: str | None, failed: output.WriteError | None
) -> output.WriteError | None:
    """Write the run into the folder of --save; the first thing that could not be written."""
    trouble = output.WriteError(f"--save {folder}", run.not_saved) if run.not_saved else failed
    if folder is None or not run.begun:  # then what an earlier run left there is all that there is
        return trouble
    try:
        archive.write_run(folder, document)
    except (OSError, ArgumentError) as error:
        return trouble or output.WriteError(f"--save {folder}", error)
    return trouble


def _ended(run: WholeRun) -> str:
    """Say why the run ended early, or nothing."""
    if run.interrupted:
        return "interrupted"
    if run.not_saved:
        return "stopped by --save, which takes no more"
    return "stopped by --fail-fast" if run.stopped else ""


def _explain(console: Console, run: WholeRun, document: dict[str, Any], problems: int, resumption: str) -> None:
    """Print what the exit status depends on beside the statuses of the cases, and how to go on."""
    for lost in document["lost_nodes"]:
        console.print(Text(one_line(lost_text(lost)), "red"), soft_wrap=True)
    if _ended(run):
        usable = len({i.backend for i in run.found if not i.problem})
        console.print(f"incomplete: {len(run.results)} of {usable * problems} cases", highlight=False)
        console.print(Text(_ended(run), "bold red"))
        if not run.not_saved:
            console.print(resumption, markup=False, highlight=False, soft_wrap=True)
    else:
        _explain_absence(console, run, document)
    if text := not_run(run.results):
        console.print(Text(text, "bold red"))


def _explain_records(console: Console, names: Sequence[str]) -> None:
    """Say of which libraries no run is recorded, and how to record one."""
    for name in names:
        backend = name.partition(" ")[0]
        console.print(
            f"{name}: no record of a run of this version there, so nothing that it no longer does would show. "
            f"To make one: pybnorm claims record RUN --backend {backend} --into DIR, then PYBNORM_CLAIMS=DIR",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _resumption(context: click.Context, folder: str | None) -> str:
    """Say how to go on with a run that has ended early."""
    if folder is None:
        return "a run with --save DIR can be gone on with"
    given: list[str] = context.meta.get(ARGUMENTS, ["check"])
    resumed = [*given, *([] if "--resume" in given else ["--resume"])]
    return f"go on with it: pybnorm {shlex.join(resumed)}"


def _explain_absence(console: Console, run: WholeRun, document: dict[str, Any]) -> None:
    for name in document["required_but_absent"]:
        console.print(Text(f"{name} was asked for and could not run", "bold red"))
    for variable in document["unusable_overrides"]:
        console.print(Text(f"{variable} names a file that cannot be used", "bold red"))
    if not run.results:
        asked = any(is_implementation(item.backend) for item in run.found)
        what = "Nothing that was asked for" if asked else "No vendor library"
        console.print(Text(f"{what} could run, so nothing was checked.", "bold red"))
        for item in run.found:
            if item.hint:  # what is said of the others stands above
                console.print(f"  {item.backend}:", markup=False)
                terminal.print_attempts(console, item, whole=True)
    elif all(r.status == Status.UNSUPPORTED for r in run.results):
        console.print(Text("No backend supports any of these cases, so nothing was checked.", "bold red"))
