"""Calls of another shape, beside a case: what a kernel keeps from one call to the next shows in them.

The first case of each operation, mode, dtype and layout that a process runs on an implementation has a neighbour: a
small case of another shape with as many channels. It is called between the case's two equal calls, and judged: it is
wrong where the kernel still has the first one's state. Then it is called again and again on another thread while the
second equal call runs, which is wrong where both share memory. Arrays that the first call returned must be what they
were.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import threading
from collections.abc import Iterator

from pybnorm._arrays import CPU
from pybnorm.check.judging.bounds import Status, expect
from pybnorm.check.judging.standalone import as_numpy
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import FILE, Problem
from pybnorm.check.run.guarded import execute, same_bits
from pybnorm.check.run.implementations import Implementation
from pybnorm.check.run.session import Session
from pybnorm.errors import ArgumentError
from pybnorm.reference.namespaces import Array

_FEWEST = 4
"""Calls on the second thread: results may lie in a few buffers in turn."""


def neighbour_of(problem: Problem) -> Problem | None:
    """A small case of another shape with as many channels; None where the line allows none."""
    if problem.fill == FILE or problem.composed in ("gather_stats", "sync_train", "sync_backward"):
        return None
    images, channels, *space = problem.dims
    dims = (5 - min(images, 3), channels, *(min(n, 5) + 1 for n in space))
    layout = str(problem).split(",")[3]
    line = ",".join([*str(problem).split(",")[:3], layout, "x".join(map(str, dims)), "fill=randn"])
    own = ("algorithm", "inverse", "saved", "running", "activation", "residual", "params", "inplace", "unbiased")
    try:
        other = Problem.parse(line)
        same = {name: getattr(problem, name) for name in (*own, "saves_variance", "factor")}
        return dataclasses.replace(other, **same)
    except ArgumentError:
        return None


class Neighbour:
    """The other calls of a case; of a library, and of a case that is not the first of its kind, there are none."""

    def __init__(self, problem: Problem, session: Session) -> None:
        self.damage: list[str] = []
        self._problem: Problem | None = None
        handle = session.handle
        if not isinstance(handle, Implementation) or problem.repeats < 2 or problem.fence or problem.misalign:
            return
        key = problem.operation, problem.composed, problem.mode, problem.dtype, problem.layout
        if key in handle.neighbours:
            return
        handle.neighbours.add(key)
        self._problem, self._handle = neighbour_of(problem), handle
        own = copy.copy(handle)
        own._returned = {}
        self._session = dataclasses.replace(session, handle=own)

    @contextlib.contextmanager
    def beside(self, first: dict[str, Array]) -> Iterator[None]:
        """Make the neighbour's call, then on another thread until the block ends; `first` must be what it was."""
        problem = self._problem
        if problem is None:
            yield
            return
        returned = dict(self._handle._returned)
        inputs = generate(problem)
        try:
            outputs = execute(problem, inputs, self._session).outputs
        except Exception:  # what it cannot do is said where it is a case
            yield
            return
        verdicts = judge_call(expect(problem, inputs), outputs)
        wrong = [name for name, verdict in verdicts.items() if verdict.status == Status.FAIL]
        if wrong:
            self.damage.append(f"{', '.join(wrong)} wrong in a call after it of another shape: {problem}")
        done, raised = threading.Event(), []

        def call() -> None:
            try:
                for number in itertools.count():
                    if number >= _FEWEST and done.is_set():
                        return
                    execute(problem, inputs, self._session)
            except Exception as error:
                raised.append(error)

        thread = (
            threading.Thread(target=call, name="pybnorm neighbour") if self._session.device.device_type == CPU else None
        )
        if thread:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread:
                thread.join()
        if raised:
            self.damage.append(f"a call on a second thread raised {type(raised[0]).__name__}: {raised[0]}")
        for name, value in returned.items():
            if name in first and first[name].size == value.size:
                now = as_numpy(name, value).reshape(first[name].shape)
                if not same_bits(now, first[name]):
                    self.damage.append(f"{name} that a call returned changed in calls of another shape and thread")
