"""Cases dealt out to nodes, the dask workers of a job. A node that fails changes no verdict.

A case is given to one node at a time. A node that cannot open its library, ends or does not answer is named and taken
out, and its cases go to others; so does a case that came back as ERROR. A case that `LIVES` nodes failed, or for which
no node is left, is an error and no verdict.

A case may end its nodes, or run on nodes that something else ends. So a case that was running on a lost node waits
until all others are done: it then takes no node that they need, and does not go from one dying node to the next. A node
lost alone counts against its case. Nodes lost at the same time do not: the cause was common, such as their rack's
power, and a case that does end its nodes will meet another. So no case takes more than `LIVES` nodes by itself. A call
that was cancelled, because a client lost its connection to the scheduler, is made again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one from Python 3.11
from typing import Any

from pybnorm import __version__
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import CaseResult, LostNode
from pybnorm.check.run.environment import visible
from pybnorm.check.run.worker import DiedError, TimeLimitError

LIVES = 3
"""Nodes that may fail with a case before it is given up."""
GRACE = 30.0
"""Seconds beyond a case's time limit after which a node is held to be lost."""
_TICK = 0.2
_POLL = 2.0
"""Seconds between two questions to the scheduler, which workers there are."""


class NotRunError(RuntimeError):
    """A case that no node could run."""


class _LostError(RuntimeError):
    """A node ended with a call of its."""


class _ReturnedError(RuntimeError):
    """A call that was not made; its node is not to blame."""


@dataclasses.dataclass
class Greeting:
    """How a node describes itself."""

    host: str
    pid: int
    visible: str
    """Devices that its launcher gave it."""
    version: str = __version__


def greet() -> Greeting:
    """The greeting of this process."""
    return Greeting(socket.gethostname(), os.getpid(), visible())


class Node:
    """A worker; ``submit(function, *arguments)`` calls there and gives a future, `slots` calls at a time."""

    def __init__(self, name: str, submit: Callable[..., Future[Any]], slots: int = 1) -> None:
        self.name, self.submit, self.slots = name, submit, slots
        self.host = ""
        self.index = 0
        """Among the nodes of its host that its launcher gave the same devices."""
        self.environments: dict[str, dict[str, str]] = {}
        """By backend, the variables of the process there that holds its library."""
        self.ended = ""
        """Why it is lost to all; empty while it is there."""

    def __str__(self) -> str:
        return f"{self.name} on {self.host}" if self.host else self.name


def greeted(nodes: Sequence[Node], seconds: float | None) -> Iterator[tuple[Node, str]]:
    """Have every node describe itself in so many seconds; yields the nodes that cannot be used, with the reason."""
    end = None if seconds is None else time.monotonic() + seconds
    asked = [(node, node.submit(greet)) for node in nodes]
    places: collections.Counter[tuple[str, str]] = collections.Counter()
    for node, future in asked:
        try:
            greeting = future.result(None if end is None else max(0.0, end - time.monotonic()))
        except FutureTimeoutError:
            node.ended = f"did not answer in {seconds:g} s"
        except (Exception, CancelledError) as error:
            node.ended = f"{type(error).__name__}: {error}"
        else:
            node.host = greeting.host
            node.index = places[greeting.host, greeting.visible]
            places[greeting.host, greeting.visible] += 1
            if greeting.version != __version__:
                node.ended = f"has pybnorm {greeting.version}, and this is {__version__}"
        if node.ended:
            yield node, node.ended


class _Work:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.future: Future[Any] = Future()
        self.failed: dict[Node, str] = {}
        """Nodes that failed with it, and why."""
        self.value: Any = None
        """The last node's result, if there is one; its status is ERROR."""


@dataclasses.dataclass(eq=False)
class _Seat:
    """A node and its calls for one backend."""

    node: Node
    hands: dict[Future[Any], _Work] = dataclasses.field(default_factory=dict)
    """Its calls, oldest first."""
    since: float = 0.0
    """When it last became busy or finished a call."""
    errors: int = 0
    """ERRORs in a row."""


class Dealer(Executor):
    """Calls on whichever node is free.

    ``wrap(node, function, arguments)`` is what is called on the node, and its arguments. A node that finishes no call
    in `seconds` is lost. `lost` grows by those that are taken out.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        backend: str,
        wrap: Callable[[Node, Callable[..., Any], tuple[Any, ...]], tuple[Any, ...]],
        seconds: float | None,
        lost: list[LostNode],
    ) -> None:
        self._backend, self._wrap, self._seconds, self._lost = backend, wrap, seconds, lost
        self._seats = {node: _Seat(node) for node in nodes if not node.ended}
        self._waiting: collections.deque[_Work] = collections.deque()
        self._full = False
        """Whether every node is busy; a new call then does not ask each node again."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watching, name="pybnorm nodes", daemon=True)
        self._watch.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call an importable function on some node."""
        if kwargs:
            raise TypeError("a node's calls have positional arguments only")
        work = _Work(fn, args)
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("the executor is shut down")
            self._waiting.append(work)
            if not self._full:
                self._deal(self._seats.values())
        return work.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Submit no more calls; nodes finish those they have."""
        if wait and not cancel_futures:
            while True:
                with self._lock:
                    pending = [w.future for w in self._waiting]
                    pending += [w.future for s in self._seats.values() for w in s.hands.values()]
                if not pending:
                    break
                with contextlib.suppress(Exception, CancelledError):
                    pending[0].result()
        self._closed.set()
        with self._lock:
            for work in self._waiting:
                work.future.cancel()
            self._waiting.clear()
        if threading.current_thread() is not self._watch:
            self._watch.join()

    # every method below is called with the lock held, but for _watching and _done

    def _deal(self, seats: Iterable[_Seat]) -> None:
        # one more than it can run, so that it has the next when it has finished one; everybody one before that
        chosen = list(seats)
        for extra in (0, 1):
            for seat in chosen:
                while self._waiting and len(seat.hands) < seat.node.slots + extra and seat.node in self._seats:
                    work = self._next(seat.node)
                    if work is None:
                        break
                    self._give(seat, work)
        self._full = bool(self._waiting)

    def _next(self, node: Node) -> _Work | None:
        for _ in range(len(self._waiting)):
            work = self._waiting.popleft()
            if work.future.cancelled():
                continue
            if all(other in work.failed for other in self._seats):
                self._give_up(work)
            elif node in work.failed:
                self._waiting.append(work)
            else:
                return work
        return None

    def _give(self, seat: _Seat, work: _Work) -> None:
        if not work.future.running() and not work.future.set_running_or_notify_cancel():
            return
        if not seat.hands:
            seat.since = time.monotonic()
        try:
            future = seat.node.submit(*self._wrap(seat.node, work.function, work.arguments))
        except Exception as error:
            self._waiting.appendleft(work)
            self._take_out(seat, f"{type(error).__name__}: {error}", everywhere=True)
            return
        seat.hands[future] = work
        future.add_done_callback(lambda done: self._done(seat, done))

    def _done(self, seat: _Seat, future: Future[Any]) -> None:
        with self._lock:
            work = seat.hands.pop(future, None)
            if work is None:  # it was given to another node meanwhile: that one's answer counts
                return
            seat.since = time.monotonic()
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._answered(seat, work, future.result())
            elif isinstance(error, (DiedError, TimeLimitError)):  # the library's own ending, which is a verdict
                seat.errors = 0
                work.future.set_exception(error)
            elif isinstance(error, _ReturnedError):
                self._waiting.appendleft(work)
            else:
                everywhere = isinstance(error, (_LostError, CancelledError))
                reason = f"{error}" if isinstance(error, _LostError) else f"{type(error).__name__}: {error}"
                self._failed(seat, work, reason, lost=everywhere)
                self._take_out(seat, reason.partition("\n")[0], everywhere)
            self._deal([seat] if self._full and seat.node in self._seats else self._seats.values())
            self._finish()

    def _answered(self, seat: _Seat, work: _Work, value: Any) -> None:
        result = value[0] if isinstance(value, tuple) and value else value
        if isinstance(result, CaseResult):
            result.node = str(seat.node.name)
            if result.status == Status.ERROR:
                seat.errors += 1
                work.value = value
                self._failed(seat, work, result.message)
                if seat.errors >= LIVES:
                    reason = f"{LIVES} cases in a row ended in an error: {result.message}".partition("\n")[0]
                    self._take_out(seat, reason, everywhere=False)
                return
        seat.errors = 0
        work.future.set_result(value)

    def _failed(self, seat: _Seat, work: _Work, reason: str, lost: bool = False) -> None:
        work.failed[seat.node] = reason
        self._full = False
        if len(work.failed) >= LIVES:
            self._give_up(work)
        elif lost:
            self._waiting.append(work)
        else:
            self._waiting.appendleft(work)

    def _take_out(self, seat: _Seat, reason: str, everywhere: bool, alone: bool = True) -> None:
        if self._seats.pop(seat.node, None) is None:
            return
        if everywhere:
            seat.node.ended = reason
        for number, (future, work) in enumerate(list(seat.hands.items())):
            if everywhere and number < seat.node.slots:  # it was running that one
                if alone:
                    self._failed(seat, work, reason, lost=True)
                else:
                    self._waiting.append(work)
            else:
                self._waiting.appendleft(work)
            seat.hands.pop(future)
            future.cancel()
        self._lost.append(LostNode(seat.node.name, seat.node.host, "" if everywhere else self._backend, reason))
        self._full = False

    def _give_up(self, work: _Work) -> None:
        if work.future.cancelled():
            return
        if not work.future.running() and not work.future.set_running_or_notify_cancel():
            return
        if work.value is not None:
            work.future.set_result(work.value)
            return
        reasons = "; ".join(f"{node}: {reason}" for node, reason in work.failed.items()) or "no node is left"
        work.future.set_exception(NotRunError(reasons))

    def _finish(self) -> None:
        """Give up what no node is left for."""
        if not self._seats:
            while self._waiting:
                self._give_up(self._waiting.popleft())

    def _watching(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                now = time.monotonic()
                lost = []
                for seat in self._seats.values():
                    if seat.node.ended:
                        lost.append((seat, seat.node.ended))
                    elif self._seconds is not None and seat.hands and now - seat.since > self._seconds:
                        lost.append((seat, f"gave no answer in {self._seconds:g} s"))
                for seat, reason in lost:
                    self._take_out(seat, reason, everywhere=True, alone=len(lost) == 1)
                if not self._full:
                    self._deal(self._seats.values())
                self._finish()


class DaskNodes:
    """The workers of a dask cluster."""

    def __init__(self, client: Any) -> None:
        import distributed

        self._client = client
        as_completed: Any = distributed.as_completed
        self._completed = as_completed(loop=client.loop, with_results=True, raise_errors=False)
        self._open: dict[Any, Future[Any]] = {}
        self._missed: set[Any] = set()  # of these, what the scheduler did not know when it was last asked
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._cancelled: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.nodes = [self._node(address, about) for address, about in self._workers().items()]
        self._threads = [
            threading.Thread(target=target, name="pybnorm dask", daemon=True)
            for target in (self._collecting, self._polling)
        ]
        for thread in self._threads:
            thread.start()

    def _node(self, address: str, about: Any) -> Node:
        def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            return self._submit(address, function, arguments)

        node = Node(f"worker {about['name']}", submit, int(about["nthreads"]))
        node.address = address  # type: ignore[attr-defined]
        return node

    def _workers(self) -> dict[str, Any]:
        # not by scheduler_info(), which gives what the client has kept, where it could not ask or where its own look,
        # of every few seconds, came in between: and that one has no workers in it
        answer = self._client.sync(self._client.scheduler.identity)
        return answer["workers"]

    def _submit(self, address: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        ours: Future[Any] = Future()
        theirs = self._client.submit(function, *arguments, workers=[address], allow_other_workers=False, pure=False)
        with self._lock:
            self._open[theirs] = ours
        # later and elsewhere: cancelling asks the scheduler, and the canceller may hold a lock
        ours.add_done_callback(lambda done: self._cancelled.put(theirs) if done.cancelled() else None)
        self._completed.add(theirs)
        self._some.set()
        return ours

    def _collecting(self) -> None:
        while not self._closed.is_set():
            try:
                batch = self._completed.next_batch(block=True)
            except StopIteration:
                self._some.wait(_TICK)
                self._some.clear()
                continue
            except Exception:
                if self._closed.is_set():
                    return
                raise
            for theirs, result in batch:
                with self._lock:
                    ours = self._open.pop(theirs, None)
                if ours is None or not ours.set_running_or_notify_cancel():
                    continue
                if theirs.status == "finished":
                    ours.set_result(result)
                else:
                    error = theirs.exception() if theirs.status == "error" else None
                    ours.set_exception(_as_ours(error))

    def _polling(self) -> None:
        while not self._closed.wait(_POLL):
            self._cancel()
            try:
                present, reason = self._workers(), "its worker is gone"
                running = self._client.sync(self._client.scheduler.processing)
            except Exception as error:
                if self._client.status in ("running", "connecting"):
                    continue  # it connects anew, or ends after its time to do so
                present, reason, running = {}, f"the scheduler is gone ({type(error).__name__})", {}
            for node in self.nodes:
                if node.address not in present and not node.ended:  # type: ignore[attr-defined]
                    node.ended = reason
            self._ask_again({key for keys in running.values() for key in keys})

    def _ask_again(self, running: set[str]) -> None:
        """Return the calls that the scheduler has forgotten, as when a connection breaks; dask may never say so.

        A call that ended is unknown too until dask says so: only what is missed twice is forgotten.
        """
        with self._lock:
            missed = {theirs for theirs in self._open if theirs.status == "pending" and theirs.key not in running}
            calls = [(theirs, self._open.pop(theirs)) for theirs in missed & self._missed]
            self._missed = missed
        for theirs, ours in calls:
            self._cancelled.put(theirs)
            if ours.set_running_or_notify_cancel():
                ours.set_exception(_as_ours(None))

    def _cancel(self) -> None:
        futures = []
        with contextlib.suppress(queue.Empty):
            while True:
                futures.append(self._cancelled.get_nowait())
        if futures:
            with contextlib.suppress(Exception):  # the scheduler is gone, and they with it
                self._client.cancel(futures)

    def close(self) -> None:
        """Stop listening; the client is its owner's."""
        self._closed.set()
        for theirs in list(self._open):
            self._cancelled.put(theirs)
        self._cancel()
        with self._completed.lock:  # those that a client without a scheduler made end never
            self._completed.futures.clear()
        self._some.set()
        for thread in self._threads:
            thread.join()


def _as_ours(error: BaseException | None) -> BaseException:
    if error is None:
        return _ReturnedError("its call was cancelled")
    if type(error).__name__ == "KilledWorker":
        return _LostError("its worker died")
    return error
