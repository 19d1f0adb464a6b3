"""The start of the command ``pybnorm``: an interrupt while it imports what it needs is one line and the status 130.

`pybnorm.cli` says so of everything later. This module lies outside of the package, because importing anything of the
package imports the extension, NumPy and more.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType

__all__ = ["interrupted", "main"]

_STATUS = 130  # as shells have it: 128 + SIGINT


def interrupted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """`sys.excepthook` of the command."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
        print("interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(_STATUS)  # Python would end itself by the signal after any hook


def main() -> None:
    """Run the command."""
    sys.excepthook = interrupted
    from pybnorm.cli import main as command

    if "_PYBNORM_COMPLETE" in os.environ:
        import pybnorm.cli.shells  # noqa: F401 (it makes itself known to click)

    command(prog_name="pybnorm")
