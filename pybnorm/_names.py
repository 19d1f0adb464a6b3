"""Names of arguments: those of other systems, those of the last version, and positions that became names."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from pybnorm.errors import ArgumentTypeError

__all__ = ["HINTS", "OLD", "by_name", "own", "refused", "renamed", "unexpected", "warn"]

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])

OLD = {"alpha_data": "alpha", "beta_data": "beta"}
"""Names of the last version, which `own` takes for the new ones."""

HINTS = {
    **dict.fromkeys(("input", "data"), ("x",)),
    **dict.fromkeys(("output", "result"), ("y", "out")),
    **dict.fromkeys(("grad", "grad_out", "grad_output", "grad_y"), ("dy",)),
    **dict.fromkeys(("grad_in", "grad_input", "grad_x"), ("dx",)),
    **dict.fromkeys(("grad_weight", "grad_scale", "dgamma", "dweight"), ("dscale",)),
    **dict.fromkeys(("grad_bias", "dbeta", "dshift"), ("dbias",)),
    **dict.fromkeys(("weight", "gamma"), ("scale",)),
    **dict.fromkeys(("shift", "offset", "beta"), ("bias",)),
    **dict.fromkeys(("eps", "variance_epsilon"), ("epsilon",)),
    **dict.fromkeys(
        ("momentum", "factor", "average_factor", "averaging_factor", "decay"), ("exponential_average_factor",)
    ),
    **{"affine": ("scale",), "num_features": ("channels",), "track_running_stats": ("running_mean",)},
    **dict.fromkeys(("moving_mean", "running_avg", "mean"), ("running_mean", "saved_mean")),
    **dict.fromkeys(("running_var", "moving_var", "moving_variance"), ("running_variance",)),
    "var": ("variance", "running_variance"),
    "variance": ("running_variance",),
    **dict.fromkeys(("save_mean", "batch_mean"), ("saved_mean", "mean")),
    **dict.fromkeys(
        ("invstd", "inv_std", "rstd", "inv_var", "save_invstd", "save_inv_variance", "saved_invstd", "saved_inv_std"),
        ("saved_inv_variance", "inv_variance"),
    ),
    **dict.fromkeys(("axes", "dim", "mode"), ("axis",)),
    "axis": ("mode",),
}
"""What other systems, or other levels of this package, call an argument, and what it is called here: the first that
the function has."""


def unexpected(function: Callable[..., Any], given: Iterable[str]) -> TypeError:
    """The error of keywords that a function does not have, with the name that was probably meant.

    Functions whose host time counts end their arguments with ``**unknown: NoReturn`` and raise this if it is not empty;
    others are decorated by `own`.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    owner = getattr(function, "__self__", None)
    shown = function.__qualname__ if owner is None else f"{type(owner).__name__}.{function.__name__}"
    if shown.startswith("_"):  # of a private class, whose public one inherits it
        shown = function.__name__
    return _unknown(shown, names, next(name for name in given if name not in names))


def _unknown(function: str, names: Collection[str], word: str) -> TypeError:
    near = [name for name in HINTS.get(word.lower(), ()) if name in names]
    near = near or difflib.get_close_matches(word, names, 1)
    hint = "".join(f" (did you mean {name!r}?)" for name in near[:1])
    return TypeError(f"{function}() got an unexpected keyword argument {word!r}{hint}")


def refused(function: str, names: Collection[str], missing: Collection[str], given: Iterable[str]) -> TypeError | None:
    """What a compiled function says of a call whose arguments it refused; None where it is neither of these.

    Parameters
    ----------
    function : str
    names : sequence of str
        Its arguments.
    missing : sequence of str
        Those that the call should have and has not.
    given : iterable of str
        The call's keywords.
    """
    for word in given:
        if word not in names:
            return _unknown(function, names, word)
    if not missing:
        return None
    what = f"{len(missing)} required positional argument{'s' * (len(missing) > 1)}"
    return TypeError(f"{function}() missing {what}: {', '.join(map(repr, missing))}")


def own(order: str = "") -> Callable[[_Function], _Function]:
    """A function that takes names of the last version and tells which name was meant by an unknown one.

    Its keyword-only arguments could be given by position until this version, in the order of `order`. For functions
    that take microseconds themselves: a call costs 0.2 us more.
    """

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters
        most = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())

        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            if order and len(arguments) > most:
                options = by_name(function.__qualname__, order, arguments[most:], options)
                arguments = arguments[:most]
            if not options.keys() <= parameters.keys():
                options = _today(function, options, parameters)
            return function(*arguments, **options)

        return called  # type: ignore[return-value]

    return decorate


def _today(function: Callable[..., Any], options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Arguments by the names that they have now."""
    today = {name: value for name, value in options.items() if name in names}
    for name, value in options.items():
        if name in names:
            continue
        if OLD.get(name) not in names:
            raise unexpected(function, [name])
        today[OLD[name]] = renamed(OLD[name], today.get(OLD[name]), name, value)
    return today


def renamed(argument: str, value: _T, old: str, given: _T | None, default: object = None) -> _T:
    """The value of an argument that had another name until this version; the old name warns.

    Public functions take the old name as their last keyword, None by default. Where host time counts they call this
    only if it is not None.
    """
    if given is None:
        return value
    if not (value is default or (type(value) is float and value == default)):
        raise ArgumentTypeError(old, given, f"{argument} alone, which is its new name")
    warn(f"{old} is deprecated; its new name is {argument}", DeprecationWarning)
    return given


def by_name(
    function: str, order: str, positional: Collection[Any], given: dict[str, Any], required: Collection[str] = ()
) -> dict[str, Any]:
    """The arguments of a call, all by name, where some were given by position as in the last version; warns.

    Parameters
    ----------
    function : str
    order : str
        What positions meant until this version, where they have no meaning now.
    positional : tuple
    given : dict
        The arguments that were given by name.
    required : sequence of str

    Raises
    ------
    TypeError
        Too many, one twice, or a required one is missing.
    """
    names = order.split()
    if len(positional) > len(names):
        raise TypeError(f"{function}() takes its arguments by name, and at most {', '.join(names)} by position")
    names = names[: len(positional)]
    for name in names:
        if name in given:
            raise TypeError(f"{function}() got multiple values for argument {name!r}")
    if names:
        text = f"{function} takes {', '.join(names)} by name: by position, which is deprecated, they were read as "
        warn(text + ", ".join(f"{name}=..." for name in names), DeprecationWarning)
    given = given | dict(zip(names, positional, strict=True))
    missing = [repr(name) for name in required if name not in given]
    if missing:
        raise TypeError(f"{function}() missing required keyword-only arguments: {', '.join(missing)}")
    return given


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the line outside of pybnorm that made the call, by which Python decides whether to show it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__package__") or "").partition(".")[0] == "pybnorm":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
