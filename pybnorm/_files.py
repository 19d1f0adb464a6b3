"""Replaces and removes only regular files that pybnorm made, recognised by their content.

Anything else under the name (another file, a folder, a device, a link to another user's file) is left unchanged and
named in an error. An empty file, such as mktemp makes, holds nothing that could be lost: it may be replaced, but is
never removed. A link stays a link; the rule applies to its target. A file is replaced as a whole or not at all, and no
temporary file remains.

Only regular files of limited size are read: a device or pipe may never end. Of an archive no array is unpacked before
its size is known and wanted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import re
import shutil
import stat
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from pybnorm._text import reason
from pybnorm.errors import ArgumentError

HEAD = 1 << 14
"""Bytes read at each end of a file to recognise its maker: PDF names it at the end, all others at the beginning."""


class Kind:
    """A kind of file that pybnorm makes: its name with an article, and a regular expression for its beginning."""

    def __init__(self, name: str, header: str) -> None:
        self.name = name
        self._header = re.compile(header.encode(), re.DOTALL)

    def made(self, path: str | os.PathLike[str]) -> bool:
        """Say whether the regular file at `path` says that it is of this kind."""
        try:
            with opened(path) as file:
                head = file.read(HEAD)
                file.seek(max(len(head), os.fstat(file.fileno()).st_size - HEAD))
                return self._header.match(head + file.read(HEAD)) is not None
        except OSError:
            return False


def check(argument: str, path: str | os.PathLike[str], kind: Kind, *, empty: bool = False) -> str:
    """The path, with links resolved, where a file of `kind`, or with `empty` an empty file, may be replaced."""
    name = os.fspath(path)
    try:
        place = os.path.realpath(name)
        found = os.lstat(place) if name else None
    except FileNotFoundError:
        return place
    except (OSError, ValueError) as error:  # no folder on the way; NUL, surrogates
        raise ArgumentError(argument, name, f"a file that can be written ({reason(error)})") from None
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

    `check` is asked before the block and after it.
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
    """Check before a long run that `replaced` will work after it; changes nothing."""
    temporary = _neighbour(check(argument, path, kind, empty=True))
    with open(temporary, "xb"):
        os.unlink(temporary)


def remove(argument: str, path: str | os.PathLike[str], kind: Kind) -> None:
    """Remove a file of `kind`; a link to it stays."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(check(argument, path, kind))


def read(path: str | os.PathLike[str], largest: int) -> bytes:
    """All of a regular file of at most `largest` bytes; any other is an OSError, an impossible name a ValueError."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= largest else b""  # so much is reserved at once
        if len(data) > size:  # it grows
            data += file.read(largest)
    if max(size, len(data)) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest} bytes", os.fspath(path))
    return data


def member(path: str | os.PathLike[str], name: str, largest: int) -> bytes:
    """One file of an archive of `pybnorm collect`, unpacked where it has at most `largest` bytes."""
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive, archive.open(name) as stream:
            data = stream.read(largest + 1)
    except (zipfile.BadZipFile, KeyError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise ValueError(f"it is no archive of pybnorm collect: {error}") from None
    if len(data) > largest:
        raise ValueError(f"its {name} has more than {largest} bytes")
    return data


def is_like(value: Any, form: Any) -> bool:
    """Return True where a value of JSON has a form.

    That is a type; a tuple: one of its forms; a list: any number of its only item; a dict: the names that must be
    there, but for those that end in ``?``.
    """
    if isinstance(form, tuple):
        return any(is_like(value, one) for one in form)
    if isinstance(form, list):
        return type(value) is list and all(is_like(item, form[0]) for item in value)
    if isinstance(form, type):
        return type(value) is form
    if type(value) is not dict:
        return False
    return all(
        is_like(value[name.rstrip("?")], part) if name.rstrip("?") in value else name.endswith("?")
        for name, part in form.items()
    )


def same(first: str, second: str) -> bool:
    """Say whether two paths name one file, existing or not, also through symbolic or hard links."""
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
    """A regular file, for reading; errors as of `read`."""
    # do not wait for the other end of a pipe; do not take over a terminal
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
        yield file


_DIRECTORY = 1 << 20
"""Bytes that are read at once of an archive at most, and so of its directory."""
_ARRAY_HEADER = 1 << 14
_PIECE = 1 << 18


class _Pieces:
    """A file that is not read in large pieces: `zipfile` reads a directory whole, of whatever size it says."""

    def __init__(self, file: IO[bytes]) -> None:
        self._read, self.seek, self.tell, self.seekable = file.read, file.seek, file.tell, file.seekable

    def read(self, size: int = -1, /) -> bytes:
        data = self._read(_DIRECTORY + 1 if size < 0 else min(size, _DIRECTORY + 1))
        if len(data) > _DIRECTORY:
            raise ValueError(f"its directory has more than {_DIRECTORY} bytes")
        return data


class Archive:
    """A NumPy archive (``numpy.savez``) that nobody vouches for; `members` has each array's entry by its name."""

    def __init__(self, opened_zip: zipfile.ZipFile) -> None:
        self.zip = opened_zip
        self.members: dict[str, zipfile.ZipInfo] = {}
        for member in opened_zip.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename or name in self.members:
                raise ValueError(f"{member.filename!r} is no array, or is there twice")
            if member.flag_bits & 1:
                raise ValueError(f"{name} is encrypted")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{name} is compressed by another method than deflate ({member.compress_type})")
            self.members[name] = member

    def array(self, name: str, wanted: Callable[[Any, tuple[int, ...]], None]) -> Any:
        """Unpack one array; `wanted` is given dtype and shape before there is memory, and raises if it is too large."""
        with self.zip.open(self.members[name]) as stream:
            start = stream.read(8)
            if start[:6] != b"\x93NUMPY" or start[6:] not in (b"\1\0", b"\2\0"):
                raise ValueError(f"{name} is no array of NumPy")
            length = stream.read(2 if start[6] == 1 else 4)
            size = int.from_bytes(length, "little")
            if size > _ARRAY_HEADER:
                raise ValueError(f"the header of {name} has {size} bytes, more than {_ARRAY_HEADER}")
            header = io.BytesIO(length + stream.read(size))
            shape, in_order_of_fortran, dtype = (
                np.lib.format.read_array_header_1_0(header)
                if start[6] == 1
                else np.lib.format.read_array_header_2_0(header)
            )
            if dtype.hasobject:
                raise ValueError(f"{name} has Python objects")
            wanted(dtype, shape)
            if min(shape, default=0) < 0:
                raise ValueError(f"{name} has the shape {shape}")
            data = bytearray(math.prod(shape) * dtype.itemsize)
            view, done = memoryview(data), 0
            while piece := stream.read(min(_PIECE, len(data) - done)):
                view[done : done + len(piece)] = piece
                done += len(piece)
            if done < len(data) or stream.read(1):  # reading the end compares the checksum
                raise ValueError(f"{name} has more or fewer bytes than its shape")
        array = np.frombuffer(data, dtype)
        return array.reshape(shape[::-1]).T if in_order_of_fortran else array.reshape(shape)


@contextlib.contextmanager
def archive(argument: str, path: str | os.PathLike[str], allowed: str) -> Iterator[Archive]:
    """An archive of arrays in a regular file; whatever is raised in the block becomes an `ArgumentError`."""
    try:
        with opened(path) as file, zipfile.ZipFile(_Pieces(file)) as members:
            yield Archive(members)
    except ArgumentError:
        raise
    except Exception as error:  # what zipfile, zlib and NumPy make of damage: a dozen kinds, and not documented
        raise ArgumentError(argument, os.fspath(path), f"{allowed} ({reason(error)})") from None
