"""The cases of a check as pytest's test items, for projects that run pybnorm in their own tests.

::

    pytest --pybnorm-suite standard --pybnorm-backend cudnn        their tests and these
    pytest --pybnorm-suite standard pybnorm::cudnn                 these only
    pytest --pybnorm-suite standard pybnorm::cudnn::LINE           one of them

Each case runs in a process of the check's pool (`pybnorm.check.run.executors`). With several processes, cases run
before the items that report them. Under pytest-xdist each of its workers has one such process.

==============  ==================================================================================
PASS            passed
WARN, CHAIN     passed, with an `AccuracyWarning`
UNSUPPORTED     skipped, for the backend's reason; if all cases are, the run is no success (status 5)
ERROR           an error, with the text that ``pybnorm check`` has for it
any other       failed, with the text that ``pybnorm check`` has for it
known defect    as its status says; with ``--pybnorm-allow-known`` an expected failure
==============  ==================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest

from pybnorm import backends
from pybnorm._text import visible
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import BackendInfo, CaseResult, verdict_text
from pybnorm.check.language.lines import select
from pybnorm.check.language.problem import Problem
from pybnorm.check.report import terminal
from pybnorm.check.report.console import Console
from pybnorm.check.run import executors
from pybnorm.check.run.session import open_session
from pybnorm.errors import ArgumentError

__all__ = ["AccuracyWarning", "Backend", "Case", "Plugin", "Root"]

ROOT = "pybnorm"
"""First part of every item's node id; the others are the backend and the case."""


class AccuracyWarning(UserWarning):
    """A result is outside the bound of a stable kernel, but within that of a kernel with one-pass variance."""


class _CaseError(Exception):
    """A case that failed; the item has the text."""


def _printed(function: Callable[..., None], *arguments: Any) -> str:
    stream = io.StringIO()
    function(Console(file=stream, width=terminal.WIDTH, color_system=None), *arguments)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


# ---------------------------------------------------------------- items


class Case(pytest.Item):
    """One case on one backend."""

    def __init__(self, *, problem: Problem, runs: _Runs, **rest: Any) -> None:
        super().__init__(**rest)
        self.problem, self._runs = problem, runs
        self._text = ""
        self._result: CaseResult

    def setup(self) -> None:
        """Run the case, if no process has done so yet. A case that could not run is an error, not a failed test."""
        self._result = self._runs.result(self.problem)
        texts = [_printed(terminal.print_backends, [self._runs.info]), _printed(terminal.print_details, [self._result])]
        self._text = "\n".join(texts)
        if self._result.status == Status.ERROR:
            pytest.fail(self._text, pytrace=False)

    def runtest(self) -> None:
        """Report the result in pytest's terms."""
        result = self._result
        if result.status == Status.UNSUPPORTED:
            pytest.skip(f"{result.backend}: {visible(result.message.partition(chr(10))[0])}")
        if result.status in (Status.WARN, Status.CHAIN, Status.MISTRUSTED):
            warnings.warn_explicit(_short(result), AccuracyWarning, ROOT, 0)
        if result.status.good:
            return
        if result.known and self.config.getoption("pybnorm_allow_known"):
            pytest.xfail(f"{result.status.value}, known defect: {result.known}")
        raise _CaseError(_short(result))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The text of ``pybnorm check`` in place of a traceback, which would show this module."""
        if isinstance(excinfo.value, (_CaseError, AccuracyWarning, pytest.xfail.Exception)):
            return self._text
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """No file, and a headline."""
        return self.config.rootpath / ROOT, None, f"{self._runs.info.backend} {self.name}"


def _short(result: CaseResult) -> str:
    parts = [f"{v.output}: {verdict_text(v)}" for v in result.verdicts if v.status != Status.PASS]
    text = "; ".join(filter(None, [visible(result.message), *parts]))
    return f"{result.status.value} {result.backend} {result.case}: {text}"


class Backend(pytest.Collector):
    """All cases on one backend."""

    def __init__(self, *, info: BackendInfo, plugin: Plugin, **rest: Any) -> None:
        super().__init__(**rest)
        self._info, self._plugin = info, plugin

    def collect(self) -> Iterator[pytest.Item]:
        """The items; an error if the library, which was asked for, cannot run."""
        if self._info.problem:
            raise self.CollectError(_printed(_print_absent, [self._info]))
        runs = _Runs(self._plugin, self._info)
        for problem in self._plugin.problems:
            if self._plugin.wants(self.name, problem):
                yield Case.from_parent(self, name=str(problem), problem=problem, runs=runs)


class Root(pytest.Collector):
    """All cases on all backends."""

    def __init__(self, *, plugin: Plugin, **rest: Any) -> None:
        super().__init__(**rest)
        self._plugin = plugin

    def collect(self) -> Iterator[pytest.Collector]:
        """The backends that can run, and those that were asked for; an error if there is none."""
        infos = self._plugin.describe()
        shown = [i for i in infos if not i.problem or i.override or i.backend in self._plugin.asked]
        if not shown:
            raise self.CollectError("no vendor library can run\n" + _printed(_print_absent, infos))
        for info in shown:
            yield Backend.from_parent(self, name=info.backend, info=info, plugin=self._plugin)


def _print_absent(console: Console, infos: Sequence[BackendInfo]) -> None:
    for info in infos:
        terminal.print_backends(console, [info])
        if not info.override:  # else print_backends has printed the attempts
            terminal.print_attempts(console, info, whole=True)


# ---------------------------------------------------------------- running


class _Runs:
    """The results of one backend's cases."""

    def __init__(self, plugin: Plugin, info: BackendInfo) -> None:
        self.info, self._plugin = info, plugin
        self._executor: Any = None
        self._ahead: Generator[CaseResult, None, None]
        self._expected: set[str] = set()
        self._done: dict[str, CaseResult] = {}

    def result(self, problem: Problem) -> CaseResult:
        """The result of a case. Asked again (pytest-rerunfailures), it runs the case again."""
        if self._executor is None:
            self._start()
        case = str(problem)
        if case not in self._expected:
            self._expected.add(case)
            self._done[case] = next(self._run([problem]))
        while case not in self._done:
            result = next(self._ahead)
            self._done[result.case] = result
        self._expected.remove(case)  # not before: an interrupt must find it
        return self._done.pop(case)

    def _start(self) -> None:
        problems = self._plugin.selected(self.info.backend)
        self._executor = self._plugin.farm.executor(self.info.backend, len(problems))
        self._expected = set(map(str, problems))
        self._ahead = self._run(problems)
        self._plugin.config.add_cleanup(self.close)

    def _run(self, problems: Sequence[Problem]) -> Generator[CaseResult, None, None]:
        return executors.run_cases(self._executor, self.info, problems, opener=open_session)

    def close(self) -> None:
        """End the processes; at once if not all that was begun is needed."""
        self._ahead.close()
        self._executor.shutdown(wait=not self._expected, cancel_futures=True)


class Plugin:
    """The hooks, registered for a run that has cases.

    Raises UsageError: a suite, case or backend that does not exist, or options that exclude each other.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.asked = set(config.getoption("pybnorm_backend") or ())
        self._wanted: set[tuple[str, str]] = set()
        self._infos: list[BackendInfo] = []
        self._items: list[Case] = []
        self._ran = self._judged = False
        worker = getattr(config, "workerinput", None)  # of pytest-xdist
        self._distributed = worker is not None
        share = None if worker is None else (int(worker["workerid"].removeprefix("gw")), worker["workercount"])
        jobs = config.getoption("pybnorm_jobs")
        if jobs is not None and (worker is not None or config.getoption("dist", "no") != "no"):
            raise pytest.UsageError("--pybnorm-jobs: not with pytest-xdist, whose workers have one process each")
        timeout = config.getoption("pybnorm_timeout") or executors.TIMEOUT
        try:
            self.problems = select(config.getoption("pybnorm_case") or (), config.getoption("pybnorm_suite") or ())
            for name in self.asked:
                if name not in backends():
                    raise ArgumentError("--pybnorm-backend", name, " | ".join(backends()))
        except ArgumentError as error:
            raise pytest.UsageError(str(error)) from None
        resources = contextlib.ExitStack()
        config.add_cleanup(resources.close)  # however the run ends
        self.farm: Any = resources.enter_context(executors.opened("pool", jobs=jobs, timeout=timeout, share=share))

    def wants(self, backend: str, problem: Problem | None = None) -> bool:
        """Say whether a backend, and a case on it, was named by its node id, or no node id is ours."""
        cases = {case for name, case in self._wanted if name in ("", backend)}
        return not self._wanted or "" in cases or (str(problem) in cases if problem else bool(cases))

    def describe(self) -> list[BackendInfo]:
        """The backends of this run."""
        names = [b for b in backends() if (b in self.asked or not self.asked) and self.wants(b)]
        self._infos = []
        for name in names:
            self._infos += executors.described(name, functools.partial(self.farm.describe, name), "--pybnorm-timeout")
        return self._infos

    def selected(self, backend: str) -> list[Problem]:
        """The cases of a backend that this process is going to run, as far as that is known."""
        if self._distributed:
            return []
        return [i.problem for i in self._items if i.parent is not None and i.parent.name == backend]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Take our node ids out of the arguments: pytest would look for their file."""
        theirs = []
        for argument in self.config.args:
            first, *parts = argument.split("::")
            if first == ROOT and parts:
                self._wanted.add(self._node(argument, parts))
            else:
                theirs.append(argument)
        self.config.args[:] = theirs

    def _node(self, argument: str, parts: list[str]) -> tuple[str, str]:
        backend, *rest = parts
        chosen = [b for b in backends() if b in self.asked or not self.asked]
        if backend and backend not in chosen:
            raise pytest.UsageError(f"not found: {argument} (backends of this run: {', '.join(chosen)})")
        case = "::".join(rest)
        try:
            case = case and str(Problem.parse(case))
        except ArgumentError as error:
            raise pytest.UsageError(f"not found: {argument} ({error})") from None
        if case and case not in map(str, self.problems):
            raise pytest.UsageError(f"not found: {argument} (none of the {len(self.problems)} cases of this run)")
        if backend:
            self.asked.add(backend)
        return backend, case

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add our items, before -k and others choose among all."""
        items += session.genitems(Root.from_parent(session, name=ROOT, nodeid=ROOT, plugin=self))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which of ours were chosen."""
        self._items = [item for item in session.items if isinstance(item, Case)]

    def pytest_report_collectionfinish(self) -> list[str]:
        """Show the backends of the run."""
        return _printed(terminal.print_backends, self._infos).splitlines()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note whether any case is judged."""
        if report.when == "call" and report.nodeid.startswith(f"{ROOT}::"):
            self._ran = True
            self._judged = self._judged or not report.skipped or hasattr(report, "wasxfail")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Change the status of a run in which the backends refused every case: it has checked nothing."""
        if self._nothing and not self._distributed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Explain that exit status."""
        if self._nothing:
            terminalreporter.write_line("pybnorm: no backend supports any of these cases, so nothing was checked.")

    @property
    def _nothing(self) -> bool:
        return self._ran and not self._judged
