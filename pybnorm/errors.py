"""All exceptions that pybnorm raises.

Argument errors are raised before a vendor library sees the call. Vendor errors carry the vendor's
number, name and text. All can be pickled, so that they can be sent between processes.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from pybnorm._text import one_line, visible
from pybnorm._words import meant

__all__ = [
    "AllocationError", "ArgumentError", "ArgumentTypeError", "BackendError", "BadParameterError", "BusyError",
    "ClosedError", "ContextLostError", "ExecutionError", "InternalError", "KnownDefectWarning", "LibraryError",
    "LibraryLoadError", "LibraryNotFoundError", "LibraryVersionError", "NotInitializedError", "NotSupportedError",
    "PybnormError", "RankError", "SymbolNotFoundError", "UnseenLibraryWarning", "UnsupportedError", "VendorError",
    "VersionMismatchError", "WorkspaceError",
]  # fmt: skip


class PybnormError(Exception):
    """Base class of every pybnorm exception."""

    def __reduce__(self) -> Any:
        # Exceptions with keyword-only attributes do not pickle by themselves.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[PybnormError], args: tuple[Any, ...], state: dict[str, Any]) -> PybnormError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


_HINT = re.compile(r" \(did you mean [^()]*\?\)$")


class ArgumentError(PybnormError, ValueError):
    """An argument has a value that is not allowed.

    Attributes
    ----------
    argument : str
        Name of the argument.
    value : str
        What was given, as text.
    allowed : str
        What would have been accepted.
    """

    def __init__(self, argument: str, value: object, allowed: str) -> None:
        self.argument = one_line(argument)
        self.value = _cut(str.__str__(value)) if issubclass(type(value), str) else _shown(value)
        self.allowed = one_line(allowed)
        hint = _HINT.search(text := f"{self.allowed}{_near(value, self.allowed)}")
        words, near = (text[: hint.start()], hint.group()) if hint else (text, "")  # there may be many words
        super().__init__(f"{self.argument}: got {self.value}{near}, allowed: {words}")


def _near(value: object, allowed: str) -> str:
    """The word that was probably meant, where `allowed` is a list of words."""
    if " | " not in allowed and not allowed.startswith("one of "):
        return ""
    parts = re.split(r" \| |, ", allowed.removeprefix("one of "))
    return meant(value, [word for part in parts if re.fullmatch(r"[\w-]+", word := part.strip("'"))])


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type that is not allowed."""


class ClosedError(ArgumentError):
    """A handle or descriptor was used after ``close()``."""

    def __init__(self, argument: str) -> None:
        super().__init__(argument, "a closed object", "an open one")


class WorkspaceError(ArgumentError):
    """The call needs a workspace and got none, or one that is too small or misaligned."""


class BusyError(PybnormError, RuntimeError):
    """A signal handler loaded the library whose load it had interrupted."""


class RankError(PybnormError, RuntimeError):
    """Another rank failed, or made another call, so this rank's call cannot be completed.

    Attributes
    ----------
    ranks : tuple of int
        The ranks concerned, if known.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    if "\n" in text or (len(text) > 100 and issubclass(type(value), (list, tuple, dict, set))):
        text = f"a {type(value).__name__}"  # its values say less than its type
    return _cut(text)


def _cut(text: str) -> str:
    """Cut to at most 300 characters on one line; cleaning all of a long text would cost seconds."""
    text = one_line(text[:301])
    return text if len(text) <= 300 else text[:297] + "..."


class LibraryError(PybnormError):
    """A vendor library cannot be used.

    Attributes
    ----------
    backend : str
        A name of `pybnorm.backends`; ``"cuda"``, ``"amdhip64"`` or ``"hip"`` where a runtime is missing.
    attempts : tuple of (str, str, str)
        Every file tried, as (how, file, why it failed).
    """

    def __init__(self, message: str, *, backend: str, attempts: tuple[tuple[str, str, str], ...] = ()) -> None:
        self.backend = backend
        self.attempts = tuple(attempts)
        lines = [f"  {how}: {file}: {why}" for how, file, why in self.attempts]
        super().__init__("\n".join(map(one_line, [message, *lines])))


class LibraryNotFoundError(LibraryError, ImportError):
    """No step of the search found a library; the message lists them all."""


class LibraryLoadError(LibraryError, OSError):
    """A library that was named explicitly cannot be opened."""

    def __str__(self) -> str:  # OSError would print its first two arguments as (errno, text)
        return str(self.args[0])


class SymbolNotFoundError(LibraryError, AttributeError):
    """The library lacks a symbol that the call needs."""


class LibraryVersionError(LibraryError, RuntimeError):
    """This backend does not support the library's version."""


class BackendError(PybnormError):
    """A call reached a backend and failed there.

    Attributes
    ----------
    backend : str
        A name of `pybnorm.backends`; ``"cuda"`` or ``"hip"`` where that runtime failed itself.
    function : str
        The call that failed.
    status : int
        The vendor's own number if positive, one of pybnorm's if negative.
    status_name : str
        The vendor's name of the status.
    text : str
        The vendor's last-error text, or pybnorm's reason; may be empty.
    library : str
        Resolved path of the library.
    version : tuple of int
        Its version.
    descriptors : tuple of str
        The descriptors of the call, in readable form.
    """

    def __init__(
        self, *, backend: str, function: str, status: int, status_name: str, text: str = "", library: str = "",
        version: tuple[int, ...] = (), descriptors: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.backend = backend
        self.function = function
        self.status = status
        self.status_name = status_name
        self.text = text
        self.library = library
        self.version = tuple(version)
        self.descriptors = tuple(descriptors)
        super().__init__(self._message())

    def _message(self) -> str:
        message = f"{self.backend} {self.function}: {self.status_name} ({self.status})"
        if self.text:
            message += f": {self.text}"
        if self.library:
            message += f"\n  library: {self.library} {'.'.join(map(str, self.version))}".rstrip()
        return visible("\n".join([message, *(f"  {line}" for line in self.descriptors)]))

    def add_text(self, text: str) -> None:
        """Append more text to `text` and to the message; of a long one the last 4,000 characters."""
        if text:
            self.text = "\n".join(filter(None, [self.text, text[-4000:]]))
            self.args = (self._message(),)


class UnsupportedError(BackendError, NotImplementedError):
    """This backend has no correct way to compute the combination; the vendor was not called."""


class KnownDefectWarning(UserWarning):
    """A vendor's call that a known defect of that library makes wrong; see `pybnorm.known_defects`."""


class UnseenLibraryWarning(UserWarning):
    """A version of a vendor's library that no run has seen; see `pybnorm.defects.unrecorded`."""


class VendorError(BackendError, RuntimeError):
    """The vendor library returned a non-zero status."""


class BadParameterError(VendorError, ValueError):
    """The vendor refused an argument."""


class NotSupportedError(VendorError, NotImplementedError):
    """The vendor does not support the combination."""


class AllocationError(VendorError, MemoryError):
    """The vendor, or the adapter, could not allocate."""


class NotInitializedError(VendorError):
    """No device, no driver, or a part of the library is missing."""


class ExecutionError(VendorError):
    """The call failed while running."""


class ContextLostError(ExecutionError):
    """The device's context is lost: no call will succeed on it any more in this process.

    A kernel, not necessarily of this call or of this library, accessed memory that is not there or failed in another
    way that the driver does not recover from. Handles, plans and descriptors can still be closed; work on the device
    needs a new process. The text names the driver's error.
    """


class VersionMismatchError(VendorError):
    """Parts of the vendor library are of different versions."""


class InternalError(VendorError):
    """The vendor reported an internal failure, or a status it does not document."""


def _warn(text: str, category: type[Warning]) -> None:
    """Warn at the line outside of pybnorm that made the call, by which Python decides whether to show it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__package__") or "").partition(".")[0] == "pybnorm":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
