"""Operations checked once, and kept by their handle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

from pybnorm import _arguments
from pybnorm._arrays import note_written
from pybnorm._core import Handle, bound, cache, look
from pybnorm.operations import ways
from pybnorm.operations.program import RECIPES, Prepared, Program

MOST_PREPARED = 256
"""Kinds of operations that a handle keeps ready, those that came up last."""

_P = ParamSpec("_P")
_RAISED = """ArgumentError, ArgumentTypeError
    Naming the argument, its value and what is allowed; nothing has been written then.
UnsupportedError, WorkspaceError, VendorError"""


class Recipe:
    """The steps that an operation becomes, and the arguments that its function takes.

    `make` is called with a `Program` and the arguments by name, of which `arrays` says those that are arrays and
    `fixed` those that are not the caller's.
    """

    def __init__(self, name: str, make: Callable[..., Any], arrays: str, fixed: dict[str, Any]) -> None:
        declared, self.name, self.make, self.fixed = set(arrays.split()), name, make, fixed
        given = list(inspect.signature(make).parameters.values())[1:]  # the first is the program
        self.parameters = [p for p in given if p.name not in ("workspace", "handle") and p.name[0] != "_"]
        self.names = tuple([p.name for p in self.parameters])
        self.front = tuple([p.name for p in self.parameters if p.kind != p.KEYWORD_ONLY])
        self.defaults = {p.name: p.default for p in self.parameters}
        self.required = tuple([p.name for p in self.parameters if p.default is p.empty])
        if not declared <= set(self.names):
            missing = ", ".join(sorted(declared - set(self.names)))
            raise TypeError(f"{make.__name__} has no argument {missing}")
        self.arrays = tuple([name if name in declared else None for name in self.names])

    def function(self, module: str, doc: str, run: Callable[..., None]) -> Callable[..., None]:
        """A function with ``handle``, the arguments of the recipe and ``workspace``.

        It calls ``run(handle, workspace, recipe, values)``.
        """
        defaults, front, required = self.defaults, self.front, self.required

        def made(handle: Handle, *positional: Any, workspace: Any = None, **named: Any) -> None:
            values = bound(defaults, front, required, positional, named)
            run(handle, workspace, self, self.bind(positional, named) if values is None else values)

        last = inspect.Parameter("workspace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any)
        return self._dressed(made, self.name, module, doc, [*self.parameters, last])

    def query(self, module: str, doc: str, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function with ``handle`` and the arguments of the recipe, which returns ``run(handle, values)``."""

        def made(handle: Handle, *positional: Any, **named: Any) -> Any:
            return run(handle, self.bind(positional, named))

        return self._dressed(made, name, module, doc, self.parameters)

    def _dressed(
        self, made: Callable[..., Any], name: str, module: str, doc: str, parameters: list[inspect.Parameter]
    ) -> Callable[..., Any]:
        handle = inspect.Parameter("handle", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Handle)
        signature = inspect.Signature([handle, *parameters])
        made.__name__ = made.__qualname__ = name
        made.__module__, made.__doc__ = module, doc
        made.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": None}
        made.__signature__ = signature  # type: ignore[attr-defined]
        made.__wrapped__ = self.make  # type: ignore[attr-defined]  # in whose module its annotations have a meaning
        return made

    def bind(self, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Arguments in the order of the recipe. `inspect.Signature.bind`, which is slow, only says what is wrong."""
        values = bound(self.defaults, self.front, self.required, positional, named)
        if values is None:
            try:
                inspect.Signature(self.parameters).bind(*positional, **named)
            except TypeError as error:
                raise TypeError(f"{self.name}() {error}") from None
            raise TypeError(f"{self.name}() takes other arguments")
        return values


def operation(
    arrays: str, recipes: dict[str, Recipe] = RECIPES, run: Callable[..., None] | None = None
) -> Callable[[Callable[Concatenate[Program, _P], None]], Callable[Concatenate[Handle, _P], None]]:
    """Make a recipe an operation: a function of a handle in place of the program.

    `arrays` names the arguments that are arrays. Functions get the documentation of ``handle``, ``axis`` and
    ``workspace`` and of the errors that all raise; other modules keep their own `recipes` and may have a `run`.
    """

    def register(make: Callable[Concatenate[Program, _P], None]) -> Callable[Concatenate[Handle, _P], None]:
        recipe = Recipe(make.__name__.lstrip("_"), make, arrays, {})
        return _registered(recipe, make.__doc__ or "", recipes, run)

    return register


def alias(
    function: Callable[Concatenate[Handle, _P], None], name: str, doc: str, recipes: dict[str, Recipe] = RECIPES,
    **fixed: Any,
) -> Callable[Concatenate[Handle, _P], None]:  # fmt: skip
    """The same recipe by another name, with `fixed` arguments that are not the caller's."""
    known = recipes[function.__name__]
    arrays = " ".join(filter(None, known.arrays))
    return _registered(Recipe(name, known.make, arrays, fixed), doc, recipes, None)


def _registered(
    recipe: Recipe, doc: str, recipes: dict[str, Recipe], run: Callable[..., None] | None
) -> Callable[..., None]:
    recipes[recipe.name] = recipe
    ours = recipes is RECIPES
    doc = inspect.cleandoc(doc)
    sections = "\n\nNotes\n", "\n\nExamples\n"
    place = min((doc.find(name) for name in sections if name in doc), default=len(doc))
    head, _, raises = doc[:place].partition("\n\nRaises\n------\n")
    head = head.replace("\n----------\n", "\n----------\nhandle : Handle\n", 1)
    if "workspace" not in head:
        head += f"\n{'axis, ' if 'axis' in recipe.names else ''}workspace\n    See the module."
    raises = raises or ("ArgumentError, UnsupportedError, VendorError" if ours else _RAISED)
    doc = f"{head}\n\nRaises\n------\n{raises}{doc[place:]}\n"
    module = "pybnorm.operations" if ours else recipe.make.__module__
    return recipe.function(module, doc, run or perform)


def prepare(handle: Handle, recipe: Recipe, values: tuple[Any, ...]) -> tuple[Prepared, tuple[int, ...], list[Any]]:
    """Check an operation with all its arguments, or find one alike that was checked before; for use inside the package.

    Returns the addresses of its arrays too, and what has to live as long as these are used: the arguments, or what
    they said of themselves.
    """
    if type(handle) is not Handle:
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
    arrays: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of workspace."""
        return self.prepared.nbytes

    def execute(self, workspace: Any) -> None:
        """Make the calls."""
        self.prepared.execute(self.handle, self.operation, self.addresses, workspace)
        _note(self.arrays, self.prepared, self.held)


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
    _note(recipe.arrays, prepared, values)


def _note(names: tuple[str | None, ...], prepared: Prepared, values: Sequence[Any]) -> None:
    """Say which of an operation's arrays were written; those that are no array have no name."""
    arrays = [value for name, value in zip(names, values, strict=True) if name is not None]
    note_written([arrays[slot - 1] for slot in prepared.written])
