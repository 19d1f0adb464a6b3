"""What every test folder shares: absence of a vendor library is a named skip, or a failure where it is required.

PYBNORM_REQUIRE, a comma separated list of backend names, says which libraries this runner must have;
PYBNORM_REQUIRE_DEVICE which of them must also find a device to compute on, PYBNORM_REQUIRE_PACKAGES which Python
packages must be here for the tests that need them.
"""

from __future__ import annotations

import collections
import importlib
import os
from pathlib import Path

import pytest

import pybnorm

# Child processes import the package that this one has: in a clone, the installed one, not the sources beside the tests.
# Those started with -c or -m also look into their working directory first, which is therefore never the clone's root
# (`elsewhere`).
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(pybnorm.__file__).parents[1]), os.environ.get("PYTHONPATH")])
)


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory):
    """Every test starts in an empty folder."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


def _listed(variable, backend):
    return backend in os.environ.get(variable, "").replace(" ", "").split(",")


def absent(variable, backend, reason):
    """Skip with the reason, or fail where the runner must have it."""
    if _listed(variable, backend):
        pytest.fail(f"{backend} is listed in {variable} but: {reason}")
    pytest.skip(f"{backend}: {reason}")


def library(backend):
    """The backend's loaded library."""
    try:
        return pybnorm.load(backend)
    except pybnorm.LibraryError as error:
        absent("PYBNORM_REQUIRE", backend, str(error).partition(" To have one")[0])


@pytest.fixture(scope="session")
def load_library():
    """`library`, for tests that choose the backend themselves."""
    return library


@pytest.fixture(scope="session", params=pybnorm.backends())
def backend(request):
    """The name of each backend whose library is on this machine."""
    library(request.param)
    return request.param


def opened_handle(backend):
    """A handle of the backend, whose library is here."""
    try:
        return pybnorm.Handle(backend)
    except pybnorm.NotInitializedError as error:
        absent("PYBNORM_REQUIRE_DEVICE", backend, f"the library is here but not a device: {error.text or error}")


@pytest.fixture(scope="session")
def need_device():
    """For tests that choose the backend themselves: library and device are here, or the test does not run."""

    def need(backend):
        library(backend)
        opened_handle(backend).close()

    return need


@pytest.fixture(scope="session")
def need_package():
    """An imported package, or the test does not run; a failure where PYBNORM_REQUIRE_PACKAGES lists it."""

    def need(name):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            absent("PYBNORM_REQUIRE_PACKAGES", name, str(error))

    return need


@pytest.fixture(scope="session")
def handle(backend):
    """An open handle of each backend that finds a device."""
    opened = opened_handle(backend)
    with opened:
        yield opened


def pytest_terminal_summary(terminalreporter):
    """What was skipped, by reason: a line each, however many tests share it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
