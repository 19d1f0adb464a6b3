"""Plans that were measured: ``handle.plan_forward_training(..., tune=True)`` and its like end here.

`choose` measures the candidates of ``"auto"`` or ``"fast"`` once and remembers the fastest in a file, by version of
the library and of pybnorm, by device, driver and problem. The next plan of the problem, in this process or another,
measures nothing. The choice of the backend's own rules stays unless another is faster by `MARGIN`; only what was judged
right on ordinary data (the stable class of `pybnorm.check.bounds`) can take its place.

The file is that of ``PYBNORM_TUNE_CACHE``, else ``pybnorm/tuning.json`` in ``XDG_CACHE_HOME`` or ``~/.cache``. It is
JSON and replaced as a whole, under a lock on its folder, so that processes may share it. Where it cannot be read or
written a warning is logged and what was measured lives as long as the process. A file that begins as one of this module
and is damaged is renamed to ``*.corrupt-*`` before another takes its place; any other file is left alone.

While a graph is captured nothing can be measured: where the handle's own stream is captured `choose` refuses. It does
not see captures on other streams; one that forbids allocation in other threads (mode *global*) is broken by measuring.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pybnorm
from pybnorm import _arguments, _core, _files, _text, _trials, devices
from pybnorm._arrays import CUDA
from pybnorm._trials import METHODS, NotMeasuredError, Task, Tensor, Trial
from pybnorm.enums import Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, PybnormError

__all__ = ["MARGIN", "VARIABLE", "cache_file", "choose", "clear", "entries"]

VARIABLE = "PYBNORM_TUNE_CACHE"
MARGIN = 0.02
"""Share of the rules' choice's time that another must save to take its place."""
FORMAT = 1
LOCK_SECONDS = 5.0
"""How long a write waits for another process's."""
_TENSORS = {
    Operation.FORWARD_TRAINING: ("y",),
    Operation.FORWARD_INFERENCE: ("y",),
    Operation.BACKWARD: ("dy", "dx"),
}
_NUMBERS = (
    *("alpha", "beta", "alpha_data", "beta_data", "alpha_param", "beta_param"),
    *("epsilon", "exponential_average_factor"),
)
_MARK = "pybnorm tuning"  # key of the format's number in the file
_KIND = _files.Kind("a file of remembered choices that pybnorm made", rf'\s*\{{\s*"{_MARK}"\s*:')
_LARGEST = 1 << 28
"""Bytes of the file; an entry has some hundreds."""
_log = logging.getLogger("pybnorm.tuning")
Entry = dict[str, Any]


# ---------------------------------------------------------------- the choice


def choose(
    handle: _core.Handle, operation: Operation, x: Any, algorithm: str, options: Mapping[str, Any]
) -> tuple[Any, str]:
    """The fastest plan by measurement, and why.

    Parameters
    ----------
    handle : Handle
    operation : Operation
        FORWARD_TRAINING, FORWARD_INFERENCE or BACKWARD.
    x : TensorDescriptor or array
    algorithm : str
        ``"auto"`` or ``"fast"``, whose candidates are measured.
    options : mapping
        The other arguments of the handle's ``plan_`` method.

    Returns
    -------
    plan : Plan
        Of `handle`.
    reason : str

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An algorithm by name; the handle's stream is being captured; whatever the ``plan_`` method raises.
    LibraryNotFoundError
        CUDA without the packages ``cuda-core`` and ``cuda-bindings``, which measuring and the device's name take.
    """
    if not isinstance(algorithm, str):
        raise ArgumentTypeError("algorithm", algorithm, "a string")
    if algorithm not in ("auto", "fast"):
        raise ArgumentError(
            "algorithm", algorithm, "'auto' or 'fast' with tune=True, which measures what they may take"
        )
    make = functools.partial(getattr(handle, METHODS[operation]), x, **options)
    plan = make(algorithm=algorithm)
    names = tuple(plan._candidates(algorithm == "fast"))
    if len(names) < 2:
        return plan, f"{plan.reason}; nothing to measure it against"
    known = ("mode", "running", "saved", *_TENSORS[operation], *_NUMBERS)
    strange = [
        name
        for name, value in options.items()
        if name not in known and value is not None and not (isinstance(value, int) and value == 0)
    ]
    if strange:
        return plan, f"{plan.reason}; not measured: with {', '.join(strange)} there is nothing to judge by"
    own = plan.algorithm.partition("+")[0]  # "dense+spatial" is the algorithm "dense"
    names = names if own in names else (own, *names)
    task = _task(handle, operation, x, options)
    key = _key(handle, algorithm, task)
    found = _remembered(key, names, make, plan, own)
    if found is not None:
        return found
    with _store.measuring:  # one measurement at a time, else they would be of one another
        found = _remembered(key, names, make, plan, own)
        if found is not None:
            return found
        if _capturing(handle):
            raise ArgumentError(
                "tune", True, "False while the handle's stream is captured into a graph: plan, or tune, before"
            )
        _log.info("measuring %s for %s", ", ".join(names), key)
        try:
            trials = _trials.run(task, handle.backend, handle.device or 0, names, own)
        except NotMeasuredError as error:
            return plan, f"{plan.reason}; not measured: {error}"
        except PybnormError:
            raise
        except Exception as error:  # of cuda.core, whose classes differ between releases: no memory, a lost context
            _log.warning("measuring failed", exc_info=True)
            return plan, f"{plan.reason}; not measured: {type(error).__name__}: {error}"
        entry = _decision(trials, own)
        if entry is None:
            notes = "; ".join(f"{name}: {trial.note}" for name, trial in trials.items())
            return plan, f"{plan.reason}; not measured: no candidate ran within its bound ({notes})"[:500]
        _store.put(key, entry)
    return _chosen(make, plan, own, entry), _reason(entry)


def _remembered(key: str, names: tuple[str, ...], make: Any, plan: Any, own: str) -> tuple[Any, str] | None:
    entry = _store.get(key)
    if entry is None or entry["algorithm"] not in names:
        return None
    try:
        return _chosen(make, plan, own, entry), f"{_reason(entry)}; remembered"
    except PybnormError as error:
        _log.warning("%s was remembered and cannot be built any more (%s); measuring anew", entry["algorithm"], error)
        return None


def _chosen(make: Any, plan: Any, own: str, entry: Entry) -> Any:
    return plan if entry["algorithm"] == own else make(algorithm=entry["algorithm"])


def _decision(trials: Mapping[str, Trial], own: str) -> Entry | None:
    """What is remembered of the trials; None where nothing could be timed."""
    times = {name: trial.seconds for name, trial in trials.items() if trial.seconds is not None}
    if not times:
        return None
    best = min(times, key=lambda name: times[name])
    rule = times.get(own)
    if rule is not None and times[best] > rule * (1 - MARGIN):
        best = own
    return {
        "algorithm": best,
        "seconds": times[best],
        "rule": own,
        "rule_seconds": rule,
        "trials": {n: t.seconds if t.seconds is not None else t.note for n, t in trials.items()},
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _reason(entry: Entry) -> str:
    text = f"measured: {entry['seconds'] * 1e6:.1f} us"
    if entry["algorithm"] == entry["rule"]:
        return f"{text}, which no other way beats by {MARGIN:.0%}"
    if entry["rule_seconds"] is None:
        return f"{text}; {entry['rule']} (the rule's choice) did not run within its bound"
    return f"{text} against {entry['rule_seconds'] * 1e6:.1f} us of {entry['rule']} (the rule's choice)"


# ---------------------------------------------------------------- the problem and its key


def _task(handle: _core.Handle, operation: Operation, x: Any, options: Mapping[str, Any]) -> Task:
    """The problem in canonical form; the plan that the rules made has validated it."""
    others = _TENSORS[operation]
    tensors: dict[str, Tensor] = {}
    addresses = 0
    for name in ("x", *others):
        given = x if name == "x" else options[name]
        if given is None:
            tensors[name] = tensors["x"]
            continue
        described = given
        if not isinstance(given, _core.TensorDescriptor):
            described = handle.descriptor(given, name)
            addresses |= handle.buffer(given, name).pointer
        tensors[name] = Tensor(described.dtype, described.dims, described.strides)
    kept: dict[str, Any] = {"mode": _arguments.mode(options["mode"])}
    for name, value in options.items():
        if name in ("running", "saved"):
            kept[name] = bool(value)
        elif name in _NUMBERS:
            kept[name] = float(value)
    first = tensors["x"]
    with (
        _core.TensorDescriptor(handle.backend, first.dtype, first.dims, first.strides) as x_desc,
        _core.derive_bn_tensor_descriptor(x_desc, kept["mode"]) as derived,
    ):
        parameter = Tensor(derived.dtype, derived.dims, derived.strides)
    return Task(operation, tensors, parameter, _alignment(addresses), kept)


def _alignment(addresses: int) -> int:
    """The largest power of two up to 16 that divides all of them; 16 where none is known."""
    bits = addresses | 16
    return bits & -bits


def _key(handle: _core.Handle, algorithm: str, task: Task) -> str:
    """One line that names what a measurement depends on."""
    library = handle.library
    device, driver = _device(library.device_type, handle.device or 0)
    words = [
        f"{handle.backend} {'.'.join(map(str, library.version))}",
        f"pybnorm {pybnorm.__version__}",
        device,
        driver,
        algorithm,
        task.operation.name.lower(),
    ]
    for name, tensor in task.tensors.items():
        if name == "x" or tensor != task.tensors["x"]:
            dims, strides = ("x".join(map(str, values)) for values in (tensor.dims, tensor.strides))
            words.append(f"{name} {tensor.dtype.short} {dims} strides {strides}")
    words.append(f"aligned {task.alignment}")
    for name, value in task.options.items():
        if name == "mode":
            words.append(value.name.lower())
        elif name.startswith(("alpha", "beta")):  # whether it blends, not by how much
            plain = 1.0 if name.startswith("alpha") else 0.0
            words.append(f"{name} {value:g}" if value in (0.0, 1.0) else f"{name} other") if value != plain else None
        elif name == "epsilon":  # what cuDNN's graphs can read as float32, or not
            words.append("epsilon" if value == 0 or value >= 2.0**-126 else "epsilon small")
        elif name in ("running", "saved"):
            words.append(f"{name} {int(value)}")
    return " | ".join(filter(None, words))


@functools.cache
def _device(device_type: int, ordinal: int) -> tuple[str, str]:
    """(name of a device, its driver)."""
    with _trials.undisturbed(device_type):
        return devices.device_for(device_type, ordinal).name, devices.driver(device_type)


def _capturing(handle: _core.Handle) -> bool:
    if handle.library.device_type != CUDA:
        return False
    from pybnorm.devices import cuda

    return cuda.capturing(handle.stream)


# ---------------------------------------------------------------- the file


def cache_file() -> str | None:
    """Path of the file; None where this user has no home."""
    named = os.environ.get(VARIABLE)
    if named:
        return os.path.abspath(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification has relative ones ignored
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "pybnorm", "tuning.json") if os.path.isabs(base) else None


def entries() -> dict[str, dict[str, Any]]:
    """What the file holds: by problem ``algorithm``, ``seconds``, the ``rule``'s choice, ``rule_seconds`` and more."""
    path = cache_file()
    return {} if path is None else _read(path)[0]


def clear() -> int:
    """Forget everything, in the file and in this process.

    Returns
    -------
    int
        Entries that were in the file.

    Raises
    ------
    OSError
        The file cannot be removed.
    ArgumentError
        What is there is not of this format.
    """
    _store.forget()
    path = cache_file()
    if path is None or not os.path.lexists(path):
        return 0
    _files.check(VARIABLE, path, _KIND)
    with _locked(path):
        found, state = _read(path)
        if state == "foreign":
            raise ArgumentError(VARIABLE, path, "a file of this version of pybnorm, which alone is cleared")
        _files.remove(VARIABLE, path, _KIND)
    return len(found)


class _Store:
    """Entries by file and key: in memory, and in the file."""

    def __init__(self) -> None:
        self.new_locks()
        self.known: dict[tuple[str | None, str], Entry] = {}
        self.seen: dict[str, object] = {}
        self.warned: set[str] = set()

    def new_locks(self) -> None:
        """Also after a fork: whoever held them does not exist in the child."""
        self.lock = threading.Lock()
        self.measuring = threading.Lock()

    def forget(self) -> None:
        """Of memory only."""
        with self.lock:
            self.known.clear()
            self.seen.clear()

    def get(self, key: str) -> Entry | None:
        """From memory, else from the file if it has changed since it was read."""
        path = cache_file()
        with self.lock:
            if (path, key) not in self.known and path is not None:
                signature = _signature(path)
                if signature is not None and self.seen.get(path) != signature:
                    self.seen[path] = signature
                    found, state = _read(path)
                    if state != "good":
                        self.warn(path, f"{path} holds no choices of this version of pybnorm and is not read")
                    for name, entry in found.items():
                        self.known.setdefault((path, name), entry)
            return self.known.get((path, key))

    def put(self, key: str, entry: Entry) -> None:
        """Into memory, and beside what others have written into the file."""
        path = cache_file()
        with self.lock:
            self.known[path, key] = entry
            if path is None:
                self.warn("", "no home and no " + VARIABLE + ": choices are not kept beyond this process")
                return
            try:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with _locked(path):
                    found, state = _read(path)
                    if state == "foreign":
                        self.warn(path, f"{path} is not of this version of pybnorm: left alone, choices are not kept")
                        return
                    if state == "corrupt":
                        aside = f"{path}.corrupt-{time.time_ns()}"
                        os.rename(_files.check(VARIABLE, path, _KIND), aside)
                        _log.warning("%s was corrupt and is now %s", *map(_text.one_line, (path, aside)))
                    _write(path, found | {key: entry})
            except (OSError, ArgumentError) as error:
                self.warn(path, f"{path} cannot be written ({error}): choices are not kept beyond this process")

    def warn(self, path: str, text: str) -> None:
        """Once for each file."""
        if path not in self.warned:
            self.warned.add(path)
            _log.warning("%s", _text.one_line(text))


def _signature(path: str) -> object:
    """What differs between two states of a file; None without one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: str) -> tuple[dict[str, Entry], str]:
    """(valid entries, ``"good"``, ``"corrupt"`` or ``"foreign"``); an absent file is good."""
    try:
        text = _files.read(path, _LARGEST)
    except FileNotFoundError:
        return {}, "good"
    except (OSError, ValueError):
        return {}, "foreign"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # no UTF-8, no JSON
        return {}, "corrupt" if _KIND.made(path) else "foreign"
    if not isinstance(content, dict) or content.get(_MARK) != FORMAT or not isinstance(content.get("entries"), dict):
        return {}, "foreign"
    if not _KIND.made(path):  # it may have the key, but not in front
        return {}, "foreign"
    good = {k: e for k, e in content["entries"].items() if k == _text.one_line(k) and _is_entry(e)}
    return good, "good"


def _is_entry(entry: object) -> bool:
    def seconds(value: object) -> bool:
        return isinstance(value, float) and math.isfinite(value) and value > 0

    def name(value: object) -> bool:
        return isinstance(value, str) and value == _text.one_line(value)

    return (
        isinstance(entry, dict)
        and name(entry.get("algorithm"))
        and name(entry.get("rule"))
        and seconds(entry.get("seconds"))
        and (entry.get("rule_seconds") is None or seconds(entry["rule_seconds"]))
    )


def _write(path: str, content: Mapping[str, Entry]) -> None:
    with _files.replaced(VARIABLE, path, _KIND) as file:
        file.write(json.dumps({_MARK: FORMAT, "entries": content}, indent=1, allow_nan=False).encode() + b"\n")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Alone among the processes that write.

    The lock is on the folder, because the file is replaced and a file beside it would stay there. Where the file system
    has none, two processes that write at once may lose an entry, which is then measured again.
    """
    folder = os.open(os.path.dirname(os.path.realpath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(f"its lock is held for more than {LOCK_SECONDS:g} s") from None
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(folder)


_store = _Store()
os.register_at_fork(after_in_child=_store.new_locks)
