"""Operations checked once, and kept by their handle."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec

from pybnorm import _arguments, _names
from pybnorm._core import Handle, cache, look
from pybnorm.operations import ways
from pybnorm.operations.program import RECIPES, Prepared, Program

MOST_PREPARED = 256
"""Kinds of operations that a handle keeps ready, those that came up last."""

_P = ParamSpec("_P")


class Recipe:
    """How an operation becomes the steps of a program, and how its function takes arguments.

    Parameters
    ----------
    name : str
        In errors and messages.
    make : callable
        Called with a `Program`, then with the arguments by name.
    arrays : str
        Which of its arguments are arrays.
    fixed : dict
        Arguments that are not the caller's.
    old : dict
        Deprecated names of arguments, with the new ones.
    order : str
        Arguments by name only that positions after the others meant until this version.
    """

    def __init__(
        self, name: str, make: Callable[..., Any], arrays: str, fixed: dict[str, Any], old: dict[str, str],
        order: str = "",
    ) -> None:  # fmt: skip
        declared, self.name, self.make, self.fixed, self.old = set(arrays.split()), name, make, fixed, old
        self.order = order
        given = list(inspect.signature(make).parameters.values())[1:]  # the first is the program
        self.parameters = [p for p in given if p.name not in ("workspace", "handle") and p.name[0] != "_"]
        self.names = tuple([p.name for p in self.parameters])
        if not declared <= set(self.names):
            missing = ", ".join(sorted(declared - set(self.names)))
            raise TypeError(f"{make.__name__} has no argument {missing}")
        self.arrays = tuple([name if name in declared else None for name in self.names])

    def function(
        self, module: str, doc: str, body: str, *, name: str = "", query: bool = False, **use: Any
    ) -> Callable[..., Any]:
        """A function with ``handle`` and then the arguments of the recipe, which makes the call `body` with them.

        Its text is made, as `dataclasses` does: Python's own binding of arguments is faster than any other, and its
        errors name the function. `body` may use ``handle``, ``workspace`` (no argument of a `query`), ``values``, a
        tuple in the order of the recipe, and the names in `use`.
        """
        given = [inspect.Parameter("handle", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Handle")]
        given += self.parameters
        if not query:
            given.append(inspect.Parameter("workspace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any"))
        signature = inspect.Signature(given)
        given += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in self.old]
        # whoever gives the old name leaves out the new one: it and those that follow are checked by the recipe
        first = next((i for i, p in enumerate(given) if p.name in self.old.values()), len(given))
        given[first:] = [p.replace(default=None) if p.default is p.empty else p for p in given[first:]]
        use = {**self.make.__globals__, "Handle": Handle, "renamed": _names.renamed, **use}
        use["unexpected"] = _names.unexpected
        name = name or self.name
        lines = [f" if unknown: raise unexpected({name}, unknown)"]
        for n, new in self.old.items():  # a look at None is what the new name pays
            lines.append(f" if {n} is not None: {new} = renamed({new!r}, {new}, {n!r}, {n}, defaults[{new!r}])")
        if self.order:
            lines += self._by_position(name, given, use)
        use["defaults"] = {p.name: p.default for p in given}
        shown = [p if p.default is p.empty else p.replace(default=_Default(p.name)) for p in given]
        shown.append(inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD))
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in shown])
        values = "".join([f"{n}, " for n in self.names])
        lines.append(f" return {body.replace('values', f'({values})')}")
        exec("\n".join([f"def {name}{bare}:", *lines]), use)
        made: Callable[..., Any] = use[name]
        made.__module__, made.__doc__ = module, doc
        made.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": "None"}
        made.__signature__ = signature  # type: ignore[attr-defined]  # without deprecated names
        return made

    def _by_position(self, name: str, given: list[inspect.Parameter], use: dict[str, Any]) -> list[str]:
        """Lines that take positions as the last version did; `given` gets what they need."""
        first = next(i for i, p in enumerate(given) if p.kind == p.KEYWORD_ONLY)
        front = ", ".join([p.name for p in given[:first]])
        required = tuple([p.name for p in given[first:] if p.default is p.empty])
        given[first:] = [p.replace(default=_MISSING) if p.name in required else p for p in given[first:]]
        pairs = ", ".join([f"{p.name!r}: {p.name}" for p in given[first:]])
        given.insert(first, inspect.Parameter("positional", inspect.Parameter.VAR_POSITIONAL))
        use |= {"by_name": _names.by_name, "missing": _MISSING}
        return [
            f" if {' or '.join(['positional', *[f'{n} is missing' for n in required]])}:",
            f"  named = {{n: v for n, v in {{{pairs}}}.items() if v is not defaults[n]}}",
            f"  return {name}({front}, **by_name({name!r}, {self.order!r}, positional, named, {required!r}))",
        ]

    @functools.cached_property
    def bind(self) -> Callable[..., tuple[Any, ...]]:
        """The arguments of a query, a handle in front, as a tuple in the order of the recipe."""
        return self.function(__name__, "", "values", query=True)


_MISSING = object()


class _Default:
    """A default value in a function's text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"defaults[{self.name!r}]"


def operation(
    arrays: str,
    recipes: dict[str, Recipe] = RECIPES,
    run: Callable[..., None] | None = None,
    order: str = "",
    **old: str,
) -> Callable[[Callable[Concatenate[Program, _P], None]], Callable[Concatenate[Handle, _P], None]]:
    """Make a recipe an operation: a function of a handle in place of the program.

    `arrays` names the arguments that are arrays, `order` those that could be given by position until this version,
    `old` has deprecated names of arguments. Functions of this package get
    the documentation of ``axis`` and ``workspace`` and of the errors that all raise; other modules keep their own
    `recipes` and may have a `run`.
    """

    def register(make: Callable[Concatenate[Program, _P], None]) -> Callable[Concatenate[Handle, _P], None]:
        recipe = Recipe(make.__name__.lstrip("_"), make, arrays, {}, old, order)
        return _registered(recipe, make.__doc__ or "", recipes, run)

    return register


def alias(
    function: Callable[Concatenate[Handle, _P], None],
    name: str,
    doc: str,
    recipes: dict[str, Recipe] = RECIPES,
    **fixed: Any,
) -> Callable[Concatenate[Handle, _P], None]:
    """The same recipe by another name, with `fixed` arguments that are not the caller's."""
    known = recipes[function.__name__]
    arrays = " ".join(filter(None, known.arrays))
    return _registered(Recipe(name, known.make, arrays, fixed, known.old, known.order), doc, recipes, None)


def _registered(
    recipe: Recipe, doc: str, recipes: dict[str, Recipe], run: Callable[..., None] | None
) -> Callable[..., None]:
    recipes[recipe.name] = recipe
    module, doc = recipe.make.__module__, inspect.cleandoc(doc)
    if recipes is RECIPES:
        module = "pybnorm.operations"
        head, _, notes = doc.partition("\n\nNotes\n")
        head, _, raises = head.partition("\n\nRaises\n------\n")
        head = head.replace("\n----------\n", "\n----------\nhandle : Handle\n", 1)
        if "workspace" not in head:
            head += f"\n{'axis, ' if 'axis' in recipe.names else ''}workspace\n    See the module."
        head += f"\n\nRaises\n------\n{raises or 'ArgumentError, UnsupportedError, VendorError'}"
        doc = f"{head}\n\nNotes\n{notes}\n"
    return recipe.function(module, doc, "run(handle, workspace, recipe, values)", run=run or perform, recipe=recipe)


def prepare(handle: Handle, recipe: Recipe, values: tuple[Any, ...]) -> tuple[Prepared, tuple[int, ...], list[Any]]:
    """Check an operation, or find one alike that was checked before; for use inside the package.

    Parameters
    ----------
    handle : Handle
    recipe : Recipe
    values : tuple
        Its arguments, all of them.

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
    key, addresses, held = look(handle, recipe.arrays, values)
    known = cache(handle, "operations")
    found = None if key is None else known.get((recipe, key))
    if found is not None:
        return found, addresses, held
    found = _prepare(handle, recipe, held)
    if key is not None:
        known.keep((recipe, key), found, MOST_PREPARED)
        if handle.closed:  # by another thread, meanwhile
            known.clear()
    return found, addresses, held


class Checked(NamedTuple):
    """An operation that has been checked, and where its arrays lie."""

    handle: Handle
    operation: str
    prepared: Prepared
    addresses: tuple[int, ...]
    held: list[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of workspace."""
        return self.prepared.nbytes

    def execute(self, workspace: Any) -> None:
        """Make the calls."""
        self.prepared.execute(self.handle, self.operation, self.addresses, workspace)


def prepare_named(handle: Handle, operation: str, *arguments: Any, **options: Any) -> Any:
    """`prepare` of an operation of this package, with the defaults of its function."""
    recipe = RECIPES[operation]
    return prepare(handle, recipe, recipe.bind(handle, *arguments, **options))


def _prepare(handle: Handle, recipe: Recipe, values: list[Any]) -> Prepared:
    made = Program(handle)
    given: dict[str, Any] = {}
    slot = 0
    for name, array, value in zip(recipe.names, recipe.arrays, values, strict=True):
        slot += array is not None
        if array is not None and value is not None:
            given[name] = ways.slotted(handle.buffer(value, name), slot)
        else:
            given[name] = value
    recipe.make(made, **given, **recipe.fixed)
    return made.finish()


def perform(handle: Handle, workspace: Any, recipe: Recipe, values: tuple[Any, ...]) -> None:
    """Check an operation and make its calls."""
    prepared, addresses, _held = prepare(handle, recipe, values)
    prepared.execute(handle, recipe.name, addresses, workspace)
