"""Operations checked once, and kept by their handle."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm._core import SLOT_BITS, Handle
from pybnorm.operations.program import Prepared, Program
from pybnorm.operations.recipes import _NAMES, _RECIPES

MOST_PREPARED = 256
"""Kinds of operations that a handle keeps ready, those that came up last."""


def prepare(
    handle: Handle, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Prepared, tuple[int, ...], list[Any]]:
    """Check an operation, or find one alike that was checked before; for use inside the package.

    Parameters
    ----------
    handle : Handle
    operation : str
        Name of an operation of this module.
    arguments : tuple
        Those of the operation behind `handle`.
    options : dict
        The rest by name, all of them: defaults are not filled in, and `workspace` is an argument of `Prepared.execute`.

    Returns
    -------
    Prepared
    addresses : tuple of int
        Those of the arrays, for `Prepared.execute`.
    held : list
        What has to live as long as these addresses are used: the arguments, or what they said of themselves.

    Raises
    ------
    ArgumentError, ArgumentTypeError, ClosedError, UnsupportedError
        As the operation would, before anything is written.
    """
    _arguments.instance(handle, Handle, "handle", "a Handle")
    names, arrays = _NAMES[operation]
    key, addresses, held = handle._look(arrays, (*arguments, *[options[name] for name in names[len(arguments) :]]))
    known = handle._prepared
    found = None if key is None else known.get((operation, key))
    if found is not None:
        return found, addresses, held
    found = _prepare(handle, operation, arrays, held)
    if key is not None:
        known[operation, key] = found
        while len(known) > MOST_PREPARED:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread with this handle has changed it
                known.pop(next(iter(known)), None)
        if handle.closed:  # by another thread, meanwhile
            known.clear()
    return found, addresses, held


def _prepare(handle: Handle, operation: str, arrays: tuple[str | None, ...], values: Sequence[Any]) -> Prepared:
    made = Program(handle)
    given: list[Any] = []
    slot = 0
    for name, value in zip(arrays, values, strict=True):
        slot += name is not None
        if name is not None and value is not None:
            given.append(handle.buffer(value, name)._replace(pointer=slot << SLOT_BITS, owner=None))
        else:
            given.append(value)
    _RECIPES[operation](made, *given)
    return made.finish()


def _perform(handle: Handle, workspace: Any, operation: str, *arguments: Any, **options: Any) -> None:
    prepared, addresses, _held = prepare(handle, operation, arguments, options)
    prepared.execute(handle, operation, addresses, workspace)
