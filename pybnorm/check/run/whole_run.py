"""A whole run: every case on every backend that can run, its journal, and how it ends early."""

from __future__ import annotations

import contextlib
import functools
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from pybnorm._text import reason as in_words
from pybnorm.check.judging.results import BackendInfo, CaseResult, library_text, lost_text
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import executors
from pybnorm.check.run.archive import Journal
from pybnorm.check.run.runner import NOT_KEPT
from pybnorm.errors import ArgumentError


class _NotSavedError(Exception):
    """The folder of --save cannot be written."""


class WholeRun:
    """Every case on every backend that can run; the results in the order of the cases.

    `journal` gets every result, and has those of the run that is resumed. `same`: refuse nodes that differ. `ends`
    tells whether the run ends after a result.
    """

    def __init__(
        self, farm: executors.Farm, journal: Journal | None, same: bool, ends: Callable[[CaseResult], bool]
    ) -> None:
        self._farm, self._journal, self._same, self._ends = farm, journal, same, ends
        self._problems: Sequence[Problem] = ()
        self._finished: dict[tuple[str, str], CaseResult] = {}
        self._done: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        self._asked = False
        self.found: list[BackendInfo] = []
        self.stopped = False
        self.begun = False
        """The libraries are known, and the run was not interrupted before."""
        self.not_saved = ""
        """Why the folder of --save cannot be written, which ended the run; else empty."""

    @property
    def results(self) -> list[CaseResult]:
        """Every result, in the order of the libraries and cases; what the journal has is one."""
        keys = [(info.backend, str(p)) for info in self._usable() for p in self._problems]
        return [self._finished[key] for key in keys if key in self._finished]

    @property
    def interrupted(self) -> bool:
        """Tell whether an interrupt kept cases from being run."""
        return self._asked and not (self.begun and len(self.results) == len(self._usable()) * len(self._problems))

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Within it, an interrupt ends the run between two cases, and breaks off nothing."""
        own = threading.current_thread() is threading.main_thread()  # no other thread gets any
        before = signal.getsignal(signal.SIGINT) if own else None
        if before in (None, signal.SIG_IGN):
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, *_: object) -> None:
        self._asked = True
        self._done.put(None)  # allowed in a signal's handler, even while the same thread waits there

    def describe(self, backends: Sequence[str]) -> None:
        """Find the libraries of `backends`. An interrupt breaks it off."""
        try:
            for name in backends:
                self.found += executors.described(name, functools.partial(self._farm.describe, name))
            self._check_same()
        except KeyboardInterrupt:
            self._asked = True

    def run(self, problems: Sequence[Problem], progress: Callable[[str, int, int], object]) -> None:
        """Run `problems` on the libraries that were found; `progress` gets a backend, cases finished and all cases."""
        if self._asked:
            return
        try:
            if self._journal is not None:
                self._write(self._journal.begin, self.found)
                self._finished = self._journal.finished()
                self._add(self._journal.libraries())
            self._problems, self.begun = problems, True
            usable = self._usable()
            for info in usable:
                if not self.stopped:
                    self._on_one(info, lambda name, done: progress(name, done, len(usable) * len(problems)))
        except _NotSavedError as error:
            self.not_saved = str(error)

    def _usable(self) -> list[BackendInfo]:
        """Each backend that can run, by the first of its libraries."""
        return list({i.backend: i for i in reversed(self.found) if not i.problem}.values())[::-1]

    def _on_one(self, info: BackendInfo, progress: Callable[[str, int], object]) -> None:
        """Run on one backend the problems that have no result."""
        before = self.results
        finished = {(r.backend, r.case) for r in before}
        progress(info.backend, len(before))
        rest = [p for p in self._problems if (info.backend, str(p)) not in finished]
        entries = {i.id: i for i in self.found if i.backend == info.backend}
        self._done = queue.SimpleQueue()
        if self._asked:  # before this queue was there; from here on an interrupt is in it
            return
        executor = self._farm.executor(info.backend, len(rest))
        complete = False
        try:
            keep = None if self._journal is None else str(self._journal.folder.resolve())
            cases = executors.run_cases(executor, info, rest, keep, entries=entries, done=self._done)
            with contextlib.closing(cases) as results:
                for count, result in enumerate(results, len(before) + 1):
                    self._add(entries.values())
                    self._keep(result)
                    progress(info.backend, count)
                    if self._ends(result):
                        self.stopped = True
                        break
            complete = not (self.stopped or self._asked)
        finally:
            executor.shutdown(wait=complete, cancel_futures=True)

    def _add(self, entries: Iterable[BackendInfo]) -> None:
        """List every library that gave a result, in the interrupted run too."""
        here = {(info.backend, info.id) for info in self.found}
        new = [info for info in entries if (info.backend, info.id) not in here]
        if new:
            self.found += new
            order = list(dict.fromkeys(info.backend for info in self.found))
            self.found.sort(key=lambda info: order.index(info.backend))
            self._check_same()
            if self._journal is not None:
                self._write(self._journal.enter, self.found)

    def _check_same(self) -> None:
        if not self._same:
            return
        for backend in dict.fromkeys(i.backend for i in self.found):
            own = [i for i in self.found if i.backend == backend]
            texts = [lost_text(lost) for lost in self._farm.lost if lost.backend in ("", backend)]
            if len(own) > 1:
                texts += [library_text(info) for info in own]
            if texts:
                raise ArgumentError("--same", backend, f"nodes that are alike; here are: {'; '.join(texts)}")

    def _keep(self, result: CaseResult) -> None:
        """Write a result to the journal, and have it even where that fails."""
        self._finished[result.backend, result.case] = result
        if self._journal is None:
            return
        _, lost, reason = result.message.partition(NOT_KEPT)
        if lost:
            raise _NotSavedError(reason)
        self._write(self._journal.append, result)

    def _write(self, write: Callable[[Any], None], value: Any) -> None:
        try:
            write(value)
        except OSError as error:
            raise _NotSavedError(in_words(error)) from None
