"""Replaces and removes only regular files that pybnorm made, recognised by their content.

Anything else under the name (another file, a folder, a device, a link to another user's file) is left unchanged and
named in an error. An empty file, such as mktemp makes, holds nothing that could be lost: it may be replaced, but is
never removed. A link stays a link; the rule applies to its target. A file is replaced as a whole or not at all, and no
temporary file remains.

Only regular files of limited size are read: a device or pipe may never end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from typing import IO

from pybnorm.errors import ArgumentError

__all__ = ["HEAD", "Kind", "check", "opened", "read", "remove", "replaced", "same", "try_to_write"]

HEAD = 1 << 14
"""Bytes read at each end of a file to recognise its maker: PDF names it at the end, all others at the beginning."""


class Kind:
    """A kind of file that pybnorm makes.

    Parameters
    ----------
    name : str
        Name with an article, for messages.
    header : str
        Regular expression that matches at the beginning of such a file.
    """

    def __init__(self, name: str, header: str) -> None:
        self.name = name
        self._header = re.compile(header.encode(), re.DOTALL)

    def made(self, path: str | os.PathLike[str]) -> bool:
        """Whether the regular file at `path` says that it is of this kind."""
        try:
            with opened(path) as file:
                head = file.read(HEAD)
                file.seek(max(len(head), os.fstat(file.fileno()).st_size - HEAD))
                return self._header.match(head + file.read(HEAD)) is not None
        except OSError:
            return False


def check(argument: str, path: str | os.PathLike[str], kind: Kind, *, empty: bool = False) -> str:
    """The path, with links resolved, where a file of `kind`, or with `empty` an empty file, may be replaced.

    Raises
    ------
    ArgumentError
        Something else is there.
    """
    name = os.fspath(path)
    try:
        place = os.path.realpath(name)
        found = os.lstat(place) if name else None
    except FileNotFoundError:
        return place
    except (OSError, ValueError) as error:  # no folder on the way; NUL, surrogates
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(argument, name, f"a file that can be written ({reason})") from None
    if found is None:
        raise ArgumentError(argument, name, "the name of a file")
    if not stat.S_ISREG(found.st_mode):
        raise ArgumentError(argument, name, f"a new file or {kind.name}; this is no regular file")
    if os.path.islink(name) and found.st_uid != os.geteuid():
        raise ArgumentError(argument, name, "no link to another user's file")
    if not (empty and found.st_size == 0) and not kind.made(place):
        raise ArgumentError(
            argument, name, f"a new file or {kind.name}, which alone is replaced or removed; this is another file"
        )
    if not os.access(place, os.W_OK):
        raise ArgumentError(argument, name, f"a file that can be written ({os.strerror(errno.EACCES)})")
    return place


@contextlib.contextmanager
def replaced(argument: str, path: str | os.PathLike[str], kind: Kind) -> Iterator[IO[bytes]]:
    """A stream to a new file, which replaces `path` when the block ends without an exception.

    Raises
    ------
    ArgumentError
        As `check`, before the block and after it.
    OSError
        It cannot be written.
    """
    place = check(argument, path, kind, empty=True)
    temporary = _neighbour(place)
    try:
        with open(temporary, "xb") as stream:
            yield stream
        check(argument, place, kind, empty=True)
        with contextlib.suppress(OSError):  # no file yet, or another user's
            shutil.copymode(place, temporary)
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def try_to_write(argument: str, path: str | os.PathLike[str], kind: Kind) -> None:
    """Check before a long run that `replaced` will work after it; changes nothing.

    Raises
    ------
    ArgumentError, OSError
        As `replaced`.
    """
    temporary = _neighbour(check(argument, path, kind, empty=True))
    with open(temporary, "xb"):
        os.unlink(temporary)


def remove(argument: str, path: str | os.PathLike[str], kind: Kind) -> None:
    """Remove a file of `kind`; a link to it stays.

    Raises
    ------
    ArgumentError
        As `check`.
    OSError
        It cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(check(argument, path, kind))


def read(path: str | os.PathLike[str], largest: int) -> bytes:
    """All of a regular file.

    Parameters
    ----------
    path : str or path-like
    largest : int
        Bytes.

    Raises
    ------
    OSError
        It cannot be read, is no regular file, or is larger.
    ValueError
        No file can have the name.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= largest else b""  # so much is reserved at once
        if len(data) > size:  # it grows
            data += file.read(largest)
    if max(size, len(data)) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest} bytes", os.fspath(path))
    return data


def same(first: str, second: str) -> bool:
    """Whether two paths name one file, existing or not, also through symbolic or hard links."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _neighbour(place: str) -> str:
    folder, name = os.path.split(place)
    return os.path.join(folder, f".{name[:200]}.{uuid.uuid4().hex}")  # not tempfile: its mode excludes other users


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A regular file, for reading.

    Raises
    ------
    OSError, ValueError
        As `read`.
    """
    # do not wait for the other end of a pipe; do not take over a terminal
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
        yield file
