"""The log of graphs, and ``PYBNORM_LOG_LEVEL``, or hipDNN's variable where that is not set."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from pybnorm.errors import ArgumentError, PybnormError

_log = logging.getLogger("pybnorm.graph")
logging.getLogger("pybnorm").addHandler(logging.NullHandler())  # silent by default
_Method = TypeVar("_Method", bound=Callable[..., Any])

_LEVELS = {"off": logging.CRITICAL + 1} | {
    word: logging.getLevelName(word.upper()) for word in ("info", "warn", "error", "fatal")
}  # hipDNN's words; nothing here logs a fatal message


def _staged(needed: int, reached: int | None = None) -> Callable[[_Method], _Method]:
    """A method of a graph that needs one stage and reaches another; what it raises is logged."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
            try:
                self._require(needed, method.__name__)
                result = method(self, *arguments, **options)
            except PybnormError as error:
                _log.error("%s: %s: %s", self._label(), method.__name__, error)
                raise
            self._stage = self._stage if reached is None else reached
            return result

        return wrapper  # type: ignore[return-value]

    return decorate


def _configure_logging() -> None:
    variable = "PYBNORM_LOG_LEVEL" if "PYBNORM_LOG_LEVEL" in os.environ else "HIPDNN_LOG_LEVEL"
    value = os.environ.get(variable)
    if value is None:
        return
    level = _LEVELS.get(value.strip().lower())
    if level is None:
        raise ArgumentError(variable, value, ", ".join(_LEVELS))
    logger = logging.getLogger("pybnorm")
    logger.setLevel(level)
    listening = [*logger.handlers, *logging.getLogger().handlers]
    if all(isinstance(h, logging.NullHandler) for h in listening):  # else the application configured logging
        stream = logging.StreamHandler()
        stream.setFormatter(logging.Formatter("[%(levelname)s] %(name)s: %(message)s"))
        logger.addHandler(stream)
