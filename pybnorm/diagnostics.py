"""What a vendor library writes to standard error, for the error that it belongs to.

MIOpen keeps no text about an error: its status has a name and no more, and the explanation goes through C++'s
``std::cerr`` to file descriptor 2, at every log level, with no callback or file to send it to instead. The descriptor
and the stream are the whole process's, so nothing here happens unasked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

from pybnorm.errors import BackendError

__all__ = ["Captured", "vendor_stderr"]

_one_at_a_time = threading.RLock()


def _after_fork_in_child() -> None:
    """Whoever held it may not exist in this process."""
    global _one_at_a_time  # noqa: PLW0603
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Captured:
    """What was written inside a `vendor_stderr` block.

    Attributes
    ----------
    text : str
        Empty until the block has ended.
    """

    def __init__(self) -> None:
        self.text = ""


@contextlib.contextmanager
def vendor_stderr() -> Iterator[Captured]:
    """Give a vendor's error the text that its library writes to standard error.

    File descriptor 2 points to a temporary file while the block runs. At its end the descriptor is what it was, and all
    that was written goes there, unchanged and in order, only later. If a `BackendError` leaves the block, its ``text``
    gets what was written, too.

    Yields
    ------
    Captured

    Notes
    -----
    For the whole process: what other threads and child processes write to descriptor 2 in the meantime is in the text
    as well, and is delayed with it; if the process dies inside the block it is lost. One block at a time: another
    thread's waits, an inner one captures for itself. Best around one call.

    Examples
    --------
    ::

        with pybnorm.vendor_stderr():
            handle.forward_training(x, scale, bias, y)
    """
    captured = Captured()
    with _one_at_a_time, tempfile.TemporaryFile() as file:
        _flush()
        try:
            before: int | None = os.dup(2)
        except OSError:  # closed, as in a process without a terminal
            before = None
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        except BackendError as error:
            captured.text = _end(file.fileno(), before)
            error.add_text(captured.text)
            raise
        except BaseException:
            captured.text = _end(file.fileno(), before)
            raise
        captured.text = _end(file.fileno(), before)


def _end(file: int, before: int | None) -> str:
    """Put descriptor 2 back, pass on what was captured, and return it."""
    _flush()
    if before is None:
        os.close(2)
    else:
        os.dup2(before, 2)
        os.close(before)
    size = os.lseek(file, 0, os.SEEK_END)
    os.lseek(file, 0, os.SEEK_SET)
    data = b""
    while len(data) < size:
        part = os.read(file, size - len(data))
        if not part:
            break
        data += part
    rest = memoryview(data)
    with contextlib.suppress(OSError):  # nobody reads standard error: no reason to fail
        while rest and before is not None:
            rest = rest[os.write(2, rest) :]
    return data.decode("utf-8", "replace").strip()


def _flush() -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
