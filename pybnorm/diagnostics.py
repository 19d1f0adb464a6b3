"""Adds what a vendor library writes to standard error to the exception of the call.

MIOpen's status has a name and no text: the explanation goes through C++'s ``std::cerr`` to file descriptor 2, at every
log level, and cannot be sent elsewhere. The descriptor belongs to the whole process, so it is captured only on request.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from pybnorm.errors import BackendError

__all__ = ["Captured", "vendor_stderr"]

_one_at_a_time = threading.RLock()


def _after_fork_in_child() -> None:
    """The thread that held the lock may not exist in the child."""
    global _one_at_a_time  # noqa: PLW0603
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Captured:
    """Text that was written inside a `vendor_stderr` block.

    Attributes
    ----------
    text : str
        Empty until the block has ended.

    Examples
    --------
    >>> import os
    >>> with pybnorm.vendor_stderr() as captured:
    ...     _ = os.write(2, b"a library's warning")
    >>> captured.text
    "a library's warning"
    """

    def __init__(self) -> None:
        self.text = ""


@contextlib.contextmanager
def vendor_stderr() -> Iterator[Captured]:
    """Add what the library writes to standard error to a `BackendError` raised in the block.

    File descriptor 2 points to a temporary file while the block runs. At its end the descriptor is restored, and what
    was written is passed on to it, unchanged and in order. A `BackendError` that leaves the block also gets it as
    ``text``.

    Yields
    ------
    Captured

    Notes
    -----
    Acts on the whole process: output of other threads and child processes is captured and delayed too, and is lost if
    the process dies inside the block. One block runs at a time: other threads wait; an inner block captures its own
    output. Best used around one call.

    Examples
    --------
    ::

        with pybnorm.vendor_stderr():
            handle.forward_training(x, scale, bias, y)
    """
    captured = Captured()
    with _one_at_a_time, _file() as file:
        _flush()
        try:
            before: int | None = os.dup(2)
        except OSError:  # closed, as in a process without a terminal
            before = None
        os.dup2(file.fileno(), 2)
        failure: BackendError | None = None
        try:
            yield captured
        except BackendError as error:
            failure = error
            raise
        finally:
            captured.text = _end(file, before)
            if failure is not None:
                failure.add_text(captured.text)


def _file() -> IO[bytes]:
    """A file that nothing else sees: in memory where the system has such, at a tenth of the time of one on a disk."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return os.fdopen(os.memfd_create("pybnorm stderr"), "w+b", 0)
    return tempfile.TemporaryFile()


def _end(file: IO[bytes], before: int | None) -> str:
    """Put descriptor 2 back, pass on what was captured, and return it."""
    _flush()
    if before is None:
        os.close(2)
    else:
        os.dup2(before, 2)
        os.close(before)
    file.seek(0)
    data = file.read()
    if before is not None:
        with contextlib.suppress(OSError), open(2, "wb", closefd=False) as stream:  # if nobody reads it, all is well
            stream.write(data)
    return data.decode("utf-8", "replace").strip()


def _flush() -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
