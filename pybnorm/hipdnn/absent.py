"""Refusal of the names of hipDNN's Python that `pybnorm.hipdnn` lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_HERE = (
    "this package has batch norm, ReLU and addition; a handle's backend is its only engine, with one plan, without "
    "knobs and plugins, and pybnorm.devices has streams and times"
)


def _refuse(owner: str, name: str) -> NoReturn:
    """Raise the `AttributeError` of a name that is absent; `owner` is a class, or empty for the module."""
    shown = f"{owner}.{name}" if owner else name
    raise AttributeError(f"pybnorm.hipdnn.{shown} is not here: {_HERE}")


class _Chosen(type):
    """Metaclass of an enumeration's names, some of which are here: any other is refused by a sentence."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            here = ", ".join(member for member in vars(cls) if member.isupper())
            raise AttributeError(f"pybnorm.hipdnn.{cls.__name__}.{name} is not here; these are: {here}")


class _Refusing:
    """Objects whose absent attributes are refused by a sentence."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            _refuse(type(self).__name__, name)
