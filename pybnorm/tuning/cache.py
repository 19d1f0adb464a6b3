"""What tuning remembers: in memory, and in a file that processes share.

The file is that of ``PYBNORM_TUNE_CACHE``, else ``pybnorm/tuning.json`` in ``XDG_CACHE_HOME`` or ``~/.cache``. It is
JSON. A write replaces all of it, under a lock on its folder. If it cannot be read or written, a warning is logged and
choices last as long as the process. A damaged file of this module is renamed to ``*.corrupt-*`` and a new one written;
any other file is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pybnorm import _files, _text
from pybnorm.errors import ArgumentError

__all__ = ["VARIABLE", "Entry", "cache_file", "clear", "entries", "store"]

VARIABLE = "PYBNORM_TUNE_CACHE"
FORMAT = 1
LOCK_SECONDS = 5.0
"""How long a write waits for the lock."""
_MARK = "pybnorm tuning"  # key of the format's number in the file
_KIND = _files.Kind("a file of remembered choices that pybnorm made", rf'\s*\{{\s*"{_MARK}"\s*:')
_LARGEST = 1 << 28
"""Bytes of the file; an entry has some hundreds."""
_log = logging.getLogger("pybnorm.tuning")
Entry = dict[str, Any]


def cache_file() -> str | None:
    """Path of the file.

    Returns
    -------
    str or None
        None where this user has no home.

    Examples
    --------
    >>> pybnorm.tuning.cache_file().endswith("tuning.json")
    True
    """
    named = os.environ.get(VARIABLE)
    if named:
        return os.path.abspath(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification has relative ones ignored
        base = os.path.expanduser("~/.cache")
    return os.path.join(base, "pybnorm", "tuning.json") if os.path.isabs(base) else None


def entries() -> dict[str, dict[str, Any]]:
    """What the file holds.

    Returns
    -------
    dict of str to dict
        By problem: ``algorithm``, ``seconds``, the ``rule``'s choice, ``rule_seconds`` and more.

    Examples
    --------
    >>> {key: entry["algorithm"] for key, entry in pybnorm.tuning.entries().items()}  # before any tuning
    {}
    """
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

    Examples
    --------
    >>> pybnorm.tuning.clear()  # nothing was there
    0
    """
    store.forget()
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


store = _Store()
os.register_at_fork(after_in_child=store.new_locks)
