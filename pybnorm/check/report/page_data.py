"""Tables of a page whose rows its script makes when they are looked at: their data, short for thousands of rows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pybnorm._text import visible
from pybnorm.check.judging.results import ratio_text

Block = tuple[Any, ...]
"""Of a row's details: ("p", text), ("pre", text) or ("table", caption, titles, rows of texts) or ("picture",
caption, rows of `pybnorm.check.judging.bounds.Verdict.picture`)."""


class Column(NamedTuple):
    """One column.

    `kind`: "pick": one of few texts, which the table can be filtered by, shown where there are two or more; "word": a
    pick that is always shown; "badge": a pick that is a status; "hidden": one that is only filtered by; "ratio": a
    number, "" for none, or a pair with the smallest error that would have been noticed; "case": a case; "note": a text
    below the case. `order`: of the texts of a pick; else as they come.
    """

    title: str
    kind: str
    cells: Sequence[Any]
    order: Sequence[str] = ()


_CODED = ("pick", "word", "badge", "hidden", "note")


def script(
    columns: Sequence[Column],
    commands: Mapping[str, str] | None = None,
    details: Mapping[int, list[Block]] | None = None,
) -> str:
    """The text of a script element, which no text in it can end: a table for the page's script.

    `commands`: by a text of the column "library", the command that runs a case, with CASE in its place. `details`: by
    row: what is shown where its case is opened.
    """
    found = {
        "columns": [_packed(column) for column in columns],
        "commands": commands or {},
        "rows": len(columns[0].cells) if columns else 0,
        "details": {str(row): blocks for row, blocks in (details or {}).items()},
    }
    text = json.dumps(_shown(found), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _packed(column: Column) -> dict[str, Any]:
    """A column's texts, each once, and its cells: places of texts in base 36, each as often as follows its ``*``.

    A case's cell has how many words it shares with the case above, from the first on, and places of the others.
    """
    packed = []
    if column.kind == "case":
        words: dict[str, int] = {}
        above: list[str] = []
        for cell in column.cells:
            line = cell.split(",")
            shared = next((i for i, (a, b) in enumerate(zip(above, line, strict=False)) if a != b), len(above))
            shared = min(shared, len(line))
            places = [words.setdefault(word, len(words)) for word in line[shared:]]
            packed.append(" ".join(map(_base36, [shared, *places])))
            above = line
        values = list(words)
    else:
        texts = column.cells if column.kind in _CODED else [_short(cell) for cell in column.cells]
        there = dict.fromkeys(texts)
        values = list(dict.fromkeys([*(value for value in column.order if value in there), *there]))
        at = {value: _base36(i) for i, value in enumerate(values)}
        for text, same in itertools.groupby(texts):
            count = sum(1 for _ in same)
            packed.append(at[text] + (f"*{_base36(count)}" if count > 1 else ""))
    return {"title": column.title, "kind": column.kind, "values": values, "cells": "|".join(packed)}


def _base36(number: int) -> str:
    return np.base_repr(number, 36).lower()


def _short(cell: Any) -> str:
    """A number with the digits that are shown, and no others."""
    if isinstance(cell, tuple):
        return " ".join(map(_short, cell))
    if cell == "":
        return ""
    return re.sub(r"^0(?=\.)|(?<=e[+-])0", "", ratio_text(cell))


def _shown(value: Any) -> Any:
    """Before JSON escapes them: the page would have its escapes as the hidden characters again."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(key): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, (list, tuple)) else value
