"""The console of every table and message: what came from outside is shown, never obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Span, Text

from pybnorm._text import visible


class Console(rich.console.Console):
    """rich's, of which neither a string nor a `Text` can move the cursor, change colours or use rich's markup.

    Everything that is printed passes `render`, table cells too; a string passes `render_str` first.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "emoji": False, "highlight": False} | options))

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as `Text`."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of anything."""
        if isinstance(renderable, Text) and visible(renderable.plain) != renderable.plain:
            renderable = _shown(renderable)
        return super().render(renderable, options)


def number(title: str) -> Column:
    """A table's column of numbers."""
    return Column(title, justify="right", no_wrap=True)


def print_points(console: rich.console.Console, titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table of the worst elements of an output."""
    table = Table(*map(number, titles), box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _shown(text: Text) -> Text:
    """`text` with its hidden characters written out, and its styles where they were."""
    places = [0]
    for character in text.plain:
        places.append(places[-1] + len(visible(character)))
    shown = text.blank_copy(visible(text.plain))
    shown.spans = [Span(places[start], places[end], style) for start, end, style in text.spans]
    return shown
