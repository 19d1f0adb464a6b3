"""The part of pybnorm that every pytest run loads: options, and nothing more until one of them is used.

The plugin itself is `pybnorm.pytest_plugin`. This module lies outside of the package, because importing anything of the
package imports the extension, NumPy and more. In an environment where a part of all that is missing, there are no
options either.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util

import pytest

_NEEDED = ("numpy", "ml_dtypes", "rich")
_PARTS = ("_core", "check", "pytest_plugin")


def _installed() -> bool:
    """Tell whether all that the plugin imports can be found, without importing it."""
    package = importlib.util.find_spec("pybnorm")
    if package is None or package.submodule_search_locations is None:
        return False
    folders = list(package.submodule_search_locations)
    parts = (importlib.machinery.PathFinder.find_spec(part, folders) for part in _PARTS)
    # In a source tree that is not built, _core is a folder of sources only, which has no location.
    return all(p and p.has_location for p in parts) and all(map(importlib.util.find_spec, _NEEDED))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:  # TIMEOUT_MAX of pybnorm.check.run.executors, which is not imported here
        raise argparse.ArgumentTypeError(f"got {text}, allowed: seconds > 0, at most 1000000")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: an integer >= 1")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which are those of ``pybnorm check``."""
    if not _installed():
        return
    group = parser.getgroup("pybnorm", "batch normalization of vendor libraries, one test per case and backend")
    group.addoption(
        "--pybnorm-suite",
        action="append",
        metavar="NAME|FILE",
        help="Suite of cases; may be repeated. Default: smoke, where a backend is named and no case.",
    )
    group.addoption(
        "--pybnorm-case", action="append", metavar="LINE", help="Problem line; a/b in a token means both. Repeatable."
    )
    group.addoption(
        "--pybnorm-backend",
        action="append",
        metavar="NAME",
        help="Backend to run, which must be there; may be repeated. Default: all that are.",
    )
    group.addoption(
        "--pybnorm-timeout", type=_seconds, metavar="S", help="Seconds for a case, after which its process is killed."
    )
    group.addoption(
        "--pybnorm-jobs", type=_count, metavar="N", help="Processes. Default: one per core, or one per GPU."
    )
    group.addoption(
        "--pybnorm-allow-known", action="store_true", help="Cases that fail by a known defect are expected to."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin if there are cases to run."""
    options = ("pybnorm_suite", "pybnorm_case", "pybnorm_backend")
    if not any(config.getoption(name, None) for name in options):
        return
    try:
        from pybnorm import pytest_plugin
    except ImportError as error:
        raise pytest.UsageError(f"pybnorm cannot be imported: {error}") from None
    config.pluginmanager.register(pytest_plugin.Plugin(config), "pybnorm.pytest_plugin")
