"""What every test folder shares: absence of a vendor library is told by its reason, or a failure where it is required.

Tests of a backend that is not here are not made, thousands as they are: tests/backends/test_absence.py has a skip for
its library and one for its device, and the end of a run has a line.

PYBNORM_REQUIRE, a comma separated list of backend names, says which libraries this runner must have;
PYBNORM_REQUIRE_DEVICE which of them must also find a device to compute on, PYBNORM_REQUIRE_PACKAGES which Python
packages must be here for the tests that need them.

A test with several parameters runs in combinations that have every pair of their values, not in their full product.
A test of a table is one test (`tables.table`), whose failure names each wrong row.
`pytest` by itself is quick: it leaves out the tests that are marked `slow` and, of a test with many parameters or rows,
all but `QUICK_PARAMETERS` spread over them; so of a file's tests that each start a process. `--full` runs everything;
so does what selects tests itself: files, -k, -m, --lf.
"""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pytest

try:
    import pybnorm
except ImportError as error:
    if error.name != "pybnorm":
        raise
    sys.exit(f"ERROR: {error}")  # not built, or not installed: one sentence says it all, a traceback hides it
import tables


def hide_outside_backends(folder):
    """Have this process and its children see none of the backends that other distributions here have.

    The first distribution of a name counts: `folder` gets one of each name, without entry points, and comes first.
    """
    points = importlib.metadata.entry_points(group="pybnorm.backends")
    for name in {point.dist.metadata["Name"] for point in points}:
        place = Path(folder, f"{name.replace('-', '_')}-0.dist-info")
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


_SHADOWS = tempfile.TemporaryDirectory()
hide_outside_backends(_SHADOWS.name)

# Child processes import the package that this one has: in a clone, the installed one, not the sources beside the tests.
# Those started with -c or -m also look into their working directory first, which is therefore never the clone's root
# (`elsewhere`).
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(pybnorm.__file__).parents[1]), os.environ.get("PYTHONPATH")])
)

# oneDNN's threads sleep between two calls instead of spinning, which costs a third of the processor time of its tests
# and, with as many test processes as cores, takes it from the other. Before libgomp is loaded, and for child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests judge results themselves; test_known_defects.py is about the warning.
os.environ["PYBNORM_KNOWN_DEFECTS"] = "ignore"


QUICK_PARAMETERS = 2


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="pybnorm: slow tests and all parameters, too")
    parser.addoption("--quick-run", action="store_true", help="pybnorm: what pytest does without a selection")


def pytest_configure(config):
    option = config.option
    selects = option.keyword or option.markexpr or getattr(option, "lf", False) or option.full
    if config.args_source is not pytest.Config.ArgsSource.ARGS and not selects:
        option.quick_run = True  # an option, which pytest-xdist hands to its workers
    if option.quick_run:
        tables.MOST = QUICK_PARAMETERS


def pytest_unconfigure():
    _SHADOWS.cleanup()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if named(config):  # of what was selected
        functions = collections.defaultdict(list)
        for item in items:
            functions[item.nodeid.partition("[")[0]].append(item)
        specs = {name: [getattr(item, "callspec", None) for item in made] for name, made in functions.items()}
        chosen = set().union(*(pairwise(made, specs[name], made[0]) for name, made in functions.items()))
        items[:] = [item for item in items if item in chosen]
    if config.option.quick_run:
        items[:] = quick(items)


def named(config):
    """Whether tests are selected by name: then each combination of parameters has to be there for the selection."""
    return config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args)


def pairwise(tests, specs, function):
    """A function's tests in which every pair of values of three parameters or more is met; all, if it has fewer."""
    together = _together(function)
    pairs = [_pairs(spec.params if spec else {}, together) for spec in specs]
    missing = set().union(*pairs)
    chosen = {i for i, met in enumerate(pairs) if not met}  # of these nothing is combined
    while missing:
        best = max(range(len(tests)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [tests[i] for i in sorted(chosen)]


def _together(function):
    """Names of each mark's parameters: rows that somebody wrote."""
    return [_names(mark) for mark in function.iter_markers("parametrize")]


def _pairs(params, together):
    """The pairs of parameters' values in a call, if it combines three lists or more; a tuple of values is several."""
    if len(together) + len(params.keys() - set().union(*together)) < 3:
        return set()
    values = set()
    for name, value in params.items():
        parts = value if isinstance(value, tuple) and not all(isinstance(part, int) for part in value) else (value,)
        values.update((name, place, repr(part)) for place, part in enumerate(parts))
    return set(itertools.combinations(sorted(values), 2))


def quick(items):
    """The tests that are not slow: the first and the last parameters of a function, tests in processes of a file."""
    functions = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            child = "child" in item.fixturenames  # tests/unit/conftest.py
            functions[item.path if child else item.nodeid.partition("[")[0]].append(item)
    chosen = set().union(*(tables.some(made, QUICK_PARAMETERS) for made in functions.values()))
    return [item for item in items if item in chosen]


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


@functools.cache
def missing(backend, device):
    """What is not here of a backend, its library or, asked for that too, a device: the reason; None if all is."""
    try:
        pybnorm.load(backend)
        if device:
            pybnorm.Handle(backend).close()
    except pybnorm.LibraryError as error:
        return str(error).partition(" To have one")[0]
    except pybnorm.NotInitializedError as error:
        return f"the library is here but not a device: {error.text or error}"
    return None


def backends_made_for(device):
    """The backends that tests are made for: those that are here or must be; all of them if none is."""
    here = [
        name
        for name in pybnorm.backends()
        if missing(name, device) is None
        or (_listed("PYBNORM_REQUIRE", name) and missing(name, False) is not None)
        or _listed("PYBNORM_REQUIRE_DEVICE", name)
    ]
    return here or list(pybnorm.backends())


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """`backend`: the name of each whose library is here; with `handle` each that has a device as well.

    What would be left out is not made, unless a name may ask for it.
    """
    names = metafunc.fixturenames
    if "backend" in names and "backend" not in set().union(*_together(metafunc.definition)):
        metafunc.parametrize("backend", backends_made_for("handle" in names), indirect=True, scope="session")
    yield
    calls = metafunc._calls
    if not named(metafunc.config):
        calls[:] = pairwise(calls, calls, metafunc.definition)
    if metafunc.config.option.quick_run:
        fast = [call for call in calls if "slow" not in [mark.name for mark in call.marks]]
        calls[:] = tables.some(fast or calls, QUICK_PARAMETERS)


def _names(mark):
    names = mark.args[0]
    return {n.strip() for n in (names.split(",") if isinstance(names, str) else names)}


def library(backend):
    """The backend's loaded library."""
    if why := missing(backend, False):
        absent("PYBNORM_REQUIRE", backend, why)
    return pybnorm.load(backend)


@pytest.fixture(scope="session")
def made_for():
    """`backends_made_for`, for its test."""
    return backends_made_for


@pytest.fixture(scope="session")
def load_library():
    """`library`, for tests that choose the backend themselves."""
    return library


@pytest.fixture(scope="session")
def backend(request):
    """The name of each backend whose library is on this machine; its values come from `pytest_generate_tests`."""
    library(request.param)
    return request.param


def opened_handle(backend, policy=None):
    """A handle of the backend, whose library is here."""
    if why := missing(backend, True):
        absent("PYBNORM_REQUIRE_DEVICE", backend, why)
    return pybnorm.Handle(backend, known_defects=policy)


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


@pytest.fixture(scope="session")
def right(backend):
    """The same, where results have to be correct: native computes what MIOpen gets wrong or does not have."""
    with opened_handle(backend, "avoid" if backend == "miopen" else None) as opened:
        yield opened


def pytest_terminal_summary(terminalreporter):
    """Backends no test was made for; what was skipped, a line per reason; and what a test that passed has to say."""
    for name in pybnorm.backends():
        if name not in backends_made_for(True):
            terminalreporter.write_line(f"no tests that compute on {name}: {missing(name, True)}")
    reports = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    for report in terminalreporter.stats.get("passed", []):
        for name, text in report.user_properties:
            if name == "notice":
                terminalreporter.write_line(f"NOTICE: {text}")
    config = terminalreporter.config
    if config.option.quick_run:
        text = "quick run: slow tests and most parameters are left out; all of them: pytest --full -n auto"
        terminalreporter.write_line(text)
