"""Writes what the compiled module says of its functions and classes into its stub, which editors read.

python ci/stub-docs.py      after a change of a docstring in pybnorm/_core; tests/unit/test_stubs.py holds them equal
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pybnorm import _core

WIDTH = 120
STUB = Path(_core.__file__).with_name("_core.pyi")


def first_paragraph(thing: Any) -> str:
    """The first paragraph after the signature that Cython writes."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    name = getattr(thing, "__name__", "")
    if name and paragraphs[0].startswith(f"{name}("):
        del paragraphs[0]
    return " ".join(paragraphs[0].split()) if paragraphs else ""


def nodes(body: list[ast.stmt], of: Any) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, Any]]:
    """Definitions of a stub, and what they are stubs of; of special methods those of ``__call__``."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            thing = inspect.getattr_static(of, node.name)
            if node.name == "__call__" or not node.name.startswith("__"):
                yield node, getattr(of, node.name) if isinstance(thing, staticmethod) else thing
            if isinstance(node, ast.ClassDef):
                yield from nodes(node.body, thing)


def documented(text: str) -> str:
    """The stub `text`, each definition with the first paragraph of its docstring."""
    lines = text.splitlines()
    for node, thing in reversed(list(nodes(ast.parse(text).body, _core))):
        first, last = node.body[0], node.body[-1]
        said = first_paragraph(thing)
        if not said:
            continue
        indent = " " * (node.col_offset + 4)
        old = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if isinstance(node, ast.FunctionDef) or old:  # a body of ... or a docstring
            end = first if isinstance(node, ast.ClassDef) else last
            head = lines[first.lineno - 1][: first.col_offset].rstrip()
            lines[first.lineno - 1 : end.end_lineno] = [head] * bool(head)
            at = first.lineno - 1 + bool(head)
        else:
            at = min([first, *getattr(first, "decorator_list", [])], key=lambda n: n.lineno).lineno - 1
        lines[at:at] = textwrap.wrap(f'"""{said}"""', WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB.write_text(documented(STUB.read_text(encoding="utf-8")), encoding="utf-8")
