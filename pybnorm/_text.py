"""Text from outside, made safe to show: on a terminal, in a log, in XML.

A suite file, another machine's run, a remembered choice, an environment variable or a vendor's message may hold
characters that control a terminal or are invisible: escape sequences, C1 controls, overrides of the writing
direction, line separators. `visible` writes them as escapes, as in Python's literals.
"""

from __future__ import annotations

import os
import re
from typing import IO

__all__ = ["one_line", "reason", "visible", "write_visible"]

# All of Unicode's Cc, Cf, Cs, Zl and Zp except tab and newline, and characters that XML does not allow.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff\U000110bd\U000110cd"
    "\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f"
)
_ANY = re.compile(f"[{_HIDDEN}]")
_ANY_OR_NEWLINE = re.compile(f"[\n{_HIDDEN}]")


def visible(text: str) -> str:
    """`text` with escapes for control and invisible characters; tabs and newlines stay."""
    return _ANY.sub(_written, text)


def one_line(text: str) -> str:
    """Do as `visible`, newlines too, so that a name, value, path or case cannot fake a line of output."""
    return _ANY_OR_NEWLINE.sub(_written, text)


def write_visible(target: str | os.PathLike[str] | IO[str], text: str) -> None:
    """Write `visible` text to an open stream, or to a file in place of what is there."""
    if isinstance(target, (str, os.PathLike)):
        with open(target, "w", encoding="utf-8") as stream:
            stream.write(visible(text))
    else:
        target.write(visible(text))


def _written(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def reason(error: BaseException | str) -> str:
    """An error in words: that of the system without its number and the file, which the message names already."""
    return error.strerror if isinstance(error, OSError) and error.strerror else f"{error}"
