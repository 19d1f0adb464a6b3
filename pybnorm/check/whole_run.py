"""A whole run: every case on every backend that can run, its journal, and how it ends early."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pybnorm.check import executors
from pybnorm.check.archive import Journal
from pybnorm.check.problem import Problem
from pybnorm.check.results import BackendInfo, CaseResult, library_text, lost_text
from pybnorm.check.runner import NOT_KEPT
from pybnorm.errors import ArgumentError

__all__ = ["WholeRun"]


class _NotSavedError(Exception):
    """The folder of --save cannot be written."""


class WholeRun:
    """Every case on every backend that can run; the results in the order of the cases.

    Parameters
    ----------
    farm : Farm
        Where cases run (`pybnorm.check.executors.opened`).
    journal : Journal, optional
        Gets every result, and has those of the run that is resumed.
    same : bool
        Refuse nodes that differ.
    ends : callable
        Whether the run ends after a result.
    """

    def __init__(
        self, farm: executors.Farm, journal: Journal | None, same: bool, ends: Callable[[CaseResult], bool]
    ) -> None:
        self._farm, self._journal, self._same, self._ends = farm, journal, same, ends
        self.found: list[BackendInfo] = []
        self.results: list[CaseResult] = []
        self.interrupted = self.stopped = False
        self.not_saved = ""
        """Why the folder of --save cannot be written, which ended the run; else empty."""

    @contextlib.contextmanager
    def _ending_early(self) -> Iterator[None]:
        """After an interrupt, and if nothing more can be saved, the run ends with what it has."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True
        except _NotSavedError as error:
            self.not_saved = str(error)

    def describe(self, backends: Sequence[str]) -> None:
        """Find the libraries of `backends`.

        Raises
        ------
        ArgumentError
            With `same`: nodes have different libraries, or some have none.
        """
        with self._ending_early():
            for name in backends:
                self.found.append(executors.described(name, functools.partial(self._farm.describe, name)))
                self.found += self._farm.others(name)
            self._check_same()

    def run(self, problems: Sequence[Problem], progress: Callable[[str, int, int], object]) -> None:
        """Run `problems` on the libraries that were found, unless an interrupt has ended the run.

        Parameters
        ----------
        problems : sequence of Problem
        progress : callable
            Called with a backend, the number of finished cases and that of all cases.

        Raises
        ------
        ArgumentError
            As `describe`; or the journal is of other libraries.
        """
        if self.interrupted:
            return
        with self._ending_early():
            if self._journal is not None:
                self._write(self._journal.begin, self.found)
            usable = list({i.backend: i for i in reversed(self.found) if not i.problem}.values())[::-1]
            before = {} if self._journal is None else self._journal.finished()
            self._add([] if self._journal is None else self._journal.libraries())
            total = len(usable) * len(problems)
            for info in usable:
                finished = {str(p): before[info.backend, str(p)] for p in problems if (info.backend, str(p)) in before}
                self._on_one(info, problems, finished, lambda name, done: progress(name, done, total))
                if self.stopped:
                    break

    def _on_one(
        self,
        info: BackendInfo,
        problems: Sequence[Problem],
        finished: dict[str, CaseResult],
        progress: Callable[[str, int], object],
    ) -> None:
        """Run on one backend the problems that are not in `finished`, which gets their results."""
        progress(info.backend, len(self.results) + len(finished))
        rest = [p for p in problems if str(p) not in finished]
        entries = {i.id: i for i in self.found if i.backend == info.backend}
        executor = self._farm.executor(info.backend, len(rest))
        complete = False
        try:
            keep = None if self._journal is None else str(self._journal.folder.resolve())
            with contextlib.closing(executors.run_cases(executor, info, rest, keep, entries=entries)) as results:
                for result in results:
                    self._add(entries.values())
                    try:
                        self._save(result)
                    except _NotSavedError:
                        finished[result.case] = result
                        raise
                    finished[result.case] = result  # not before: an interrupted run tells of what the journal has
                    progress(info.backend, len(self.results) + len(finished))
                    if self._ends(result):
                        self.stopped = True
                        break
            complete = not self.stopped
        finally:
            executor.shutdown(wait=complete, cancel_futures=True)
            self.results += [finished[str(p)] for p in problems if str(p) in finished]

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

    def _save(self, result: CaseResult) -> None:
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
            raise _NotSavedError(str(error)) from None
