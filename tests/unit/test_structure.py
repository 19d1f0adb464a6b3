"""The house: who imports whom, one copy of each number, documented and typed surfaces."""

import functools
import graphlib
import importlib
import importlib.metadata
import inspect
import itertools
import re
from pathlib import Path

import pytest
from tables import table

import pybnorm
from pybnorm import _arrays, enums

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "pybnorm"

# Storeys from the top down; a module imports only from storeys below its own (or inside its own package).
STOREYS = [
    {"__main__"},
    {"cli", "pytest_plugin"},
    {"check"},
    {"hipdnn", "torch", "cupy"},
    {"layer", "graph", "miopen", "directml", "cann"},
    {"sync"},
    {"operations", "functional"},
    {"devices", "reference"},
    {"__init__"},
    {"_core"},
    {"defects"},
    {"_arguments", "_arrays", "_files", "_find", "diagnostics"},
    {"enums", "errors"},
    {"_text", "_words"},
]
ROOMS = ["language", "judging", "run", "report", "compare"]
"""Of the check: a later room imports from an earlier one; the selftest and the public names import from all."""
# Of the room that runs: what makes results.
MAKERS = {"implementations", "session", "guarded", "runner", "worker", "executors", "whole_run"}
FORBIDDEN = {  # sharper than the storeys
    "reference": {"_core", "devices", "_arrays", "_find"},
    "_arguments": {"_arrays", "_find"},
    "_find": {"_arguments", "_arrays"},
    "_arrays": {"_find"},
    "errors": {"enums"},
}


def storey(name):
    return next(i for i, names in enumerate(STOREYS) if name in names)


def module_of(path):
    parts = ["pybnorm", *path.relative_to(SOURCE).with_suffix("").parts]
    if path.suffix != ".py":
        return "pybnorm._core"  # of many files one extension
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyx"), *SOURCE.rglob("*.pxi")])
MODULES = {module_of(path) for path in FILES}


IMPORT = re.compile(r"^[ \t]*(?:from (\.*[\w.]*) )?c?import (\([^)]*\)|[^\n#]+)", re.M)


def imports(path):
    """The package's modules that a file imports, inside functions too."""
    package, found = module_of(path).split("."), set()
    package += [""] * (path.name == "__init__.py")
    for base, names in IMPORT.findall(path.read_text()):
        parts = base.lstrip(".")
        level = len(base) - len(parts)
        base = ".".join([*package[: len(package) - level], *filter(None, [parts])]) if level else parts
        for name in re.findall(r"(?:^|,)\s*([\w.]+)", names.strip("()")):
            target = f"{base}.{name}" if base else name
            found.add(target if target in MODULES else base)
    return found & MODULES - {module_of(path)}


@functools.cache  # not while tests are collected, which every process of a run does
def graph():
    """The imports of each module."""
    found = {module: set() for module in MODULES}
    for path in FILES:
        found[module_of(path)] |= imports(path)
    return found


def room(module):
    """The module or folder of the package that a module is or lies in."""
    return (*module.split("."), "__init__")[1]


@table("module", sorted(MODULES))
def test_imports_point_one_way(module):
    name = room(module)
    for target in {room(other) for other in graph()[module]} - {name}:
        assert storey(target) > storey(name), f"{name} imports {target}"
        assert target not in FORBIDDEN.get(name, set()), f"{name} imports {target}"


def sizes(path):
    """Lines of a file, and of each class in it from its head to the next thing at the margin."""
    lines = path.read_text().splitlines()
    name = str(path.relative_to(SOURCE))
    yield name, len(lines)
    heads = [i for i, line in enumerate(lines) if re.match(r"[^\s#)\]}]", line)] + [len(lines)]
    for start, end in itertools.pairwise(heads):
        if found := re.match(r"(?:cdef )?class (\w+)", lines[start]):
            yield f"{name}: {found[1]}", end - start


def test_a_reader_finds_the_end_of_every_file_and_class():
    found = dict(size for path in FILES for size in sizes(path))
    assert found["_core/handle_calls.pxi: _HandleCalls"] > 200  # classes are seen, Cython's too
    assert not {n: size for n, size in found.items() if size > (500 if ": " in n else 1000)}


def test_nothing_in_the_wheel_needs_the_benchmarks():
    """Only `pybnorm bench` looks for them, when it runs."""
    named = [p for p in FILES if re.search(r"""(import|from|["'])\s*benchmarks\b""", p.read_text())]
    assert named == [SOURCE / "cli" / "bench.py"]


def circle(graph):
    """The modules of a circle of imports, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def test_no_modules_import_one_another():
    assert not circle(graph()), " -> ".join(circle(graph()))


def test_rooms_of_the_check_are_in_order():
    """And every module of it is in one."""
    own = {module: module.split(".")[2] for module in MODULES if module.startswith("pybnorm.check.")}
    assert set(own.values()) == {*ROOMS, "selftest"}
    for module, name in own.items():
        later = {*ROOMS[ROOMS.index(name) + 1 :], "selftest"} if name != "selftest" else set()
        assert not later & {own.get(target) for target in graph()[module]}, module


def test_every_package_is_in_the_wheel():
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)[1]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCE.rglob("__init__.py")}
    assert set(re.findall(r'"(.+?)"', listed)) == found | {"pybnorm.include"}


def test_what_shows_results_makes_none():
    makers = {f"pybnorm.check.run.{name}" for name in MAKERS}
    readers = {m for m in MODULES if m.startswith(("pybnorm.check.report.", "pybnorm.check.compare."))}
    assert makers <= MODULES
    # It runs the case that it shows.
    assert {m for m in readers if graph()[m] & makers} == {"pybnorm.check.report.explain"}
    assert not graph()["pybnorm.check.run.archive"] & makers


def test_only_commands_print():
    printers = {"pybnorm.check.report.terminal", "pybnorm.check.compare.terminal"}
    importers = {module for module, targets in graph().items() if targets & printers}
    # the plugin prints the text of the command where pytest wants one
    assert {m for m in importers if room(m) != "cli"} == {"pybnorm.pytest_plugin"}


@table("path", sorted((SOURCE / "backends").rglob("*.[ch]")))
def test_backend_files_include_only_the_contract(path):
    included = re.findall(r'^\s*#\s*include\s*([<"][^>"]+[>"])', path.read_text(), re.M)
    ours = {i for i in included if i.startswith('"')}
    folder = set() if path.parent.name == "backends" else {f'"{p.name}"' for p in path.parent.iterdir()}
    shared = {'"../native/blend.c"', '"../native/elementwise.c"'}  # of CPUs
    assert ours <= {'"pybnorm/shim.h"', '"pybnorm/dl.h"', '"pybnorm/adapter.h"'} | shared | folder
    names = ["float", "limits", "math", "stdatomic", "stdbool", "stddef", "stdint", "stdio", "stdlib", "string"]
    standard = {f"<{name}.h>" for name in [*names, "cpuid", "immintrin", "pthread", "sys/stat"]}
    assert {i for i in included if i.startswith("<")} <= standard


def test_backend_list_agrees_everywhere():
    shim = (ROOT / "include/pybnorm/shim.h").read_text()
    listed = re.findall(r"X\((\w+)\)", re.search(r"#define PBN_BACKENDS\(X\)((?:.*\\\n)*.*\n)", shim)[1])
    assert tuple(listed) == pybnorm.backends()
    texts = [p.read_text() for p in (SOURCE / "backends").rglob("*.c")]
    defined = [name for text in texts for name in re.findall(r"^const pbn_backend pbn_backend_(\w+) =", text, re.M)]
    assert sorted(listed) == sorted(defined)


@table(
    ("enumeration", "c_name", "prefix"),
    [
        (enums.Mode, "mode", ""),
        (enums.DataType, "dtype", ""),
        (enums.Layout, "layout", ""),
        (enums.Operation, "operation", "OP_"),
        (enums.Activation, "activation", "ACTIVATION_"),
        (enums.Capability, "capability", "CAP_"),
        (enums.StatusClass, "status_class", "CLASS_"),
    ],
)
def test_python_enums_are_those_of_the_shim(enumeration, c_name, prefix):
    shim = (ROOT / "include/pybnorm/shim.h").read_text()
    body = re.search(rf"typedef enum pbn_{c_name} \{{(.*?)\}} pbn_{c_name};", shim, re.S)[1]
    values = {name: int(value) for name, value in re.findall(r"(\w+) = (-?\d+)", body)}
    assert values == {f"PBN_{prefix}{name}": member.value for name, member in enumeration.__members__.items()}


def test_device_types_are_those_of_the_shim():
    shim = (ROOT / "include/pybnorm/shim.h").read_text()
    values = {name: int(value) for name, value in re.findall(r"PBN_DEVICE_(\w+) = (\d+)", shim)}
    assert len(values) == len(set(values.values())) == 6
    assert (values["CPU"], values["CUDA"], values["ROCM"]) == (_arrays.CPU, _arrays.CUDA, _arrays.ROCM)
    files = [p for ending in ("*.py", "*.pyx", "*.pxi", "*.c", "*.h") for p in SOURCE.rglob(ending)]
    bare = [p for p in files if p.name != "_core.c" and re.search(r"device_type *(=|==|!=) *[1-9]", p.read_text())]
    assert not bare, "write CPU, CUDA, ROCM or PBN_DEVICE_..."


def test_enumerations_print_their_names():
    assert (str(enums.Mode.SPATIAL), repr(enums.Mode.SPATIAL)) == ("SPATIAL", "Mode.SPATIAL")
    assert f"{enums.Layout.STRIDED} {enums.Operation.FILL:>5} {enums.DataType.FLOAT16:d}" == "STRIDED  FILL 2"
    both = enums.Capability.RUNS | enums.Capability.FOLDED
    assert (str(both), repr(both)) == ("RUNS|FOLDED", "Capability.RUNS|Capability.FOLDED")
    assert (str(enums.Capability(0)), repr(enums.Capability(0))) == ("0", "Capability(0)")


@table("name", sorted(pybnorm._SUBMODULES))
def test_the_list_of_public_names_is_complete(name):
    if name == "torch":
        pytest.importorskip("torch")
    module = importlib.import_module(f"pybnorm.{name}")
    assert [n for n in module.__all__ if not hasattr(module, n)] == []
    own = {
        n
        for n, thing in vars(module).items()
        if not n.startswith("_")
        and (inspect.isclass(thing) or inspect.isroutine(thing))
        and thing.__module__.startswith(module.__name__)
    }
    assert own <= set(module.__all__)
    assert list(module.__all__) == sorted(set(module.__all__), key=lambda n: (not n.isupper(), n[0].islower(), n))


def test_the_version_is_written_once():
    config = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "pybnorm.__version__" }' in config
    if (installed := next(iter(importlib.metadata.distributions(name="pybnorm")), None)) is not None:
        assert installed.version == pybnorm.__version__
