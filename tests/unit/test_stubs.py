"""The stub of the compiled module: what editors show of it is what it says and takes."""

import ast
import importlib.util
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

import pybnorm
from pybnorm import _core

ROOT = Path(__file__).parents[2]
STUB = Path(pybnorm.__file__).with_name("_core.pyi")
TEXT = STUB.read_text(encoding="utf-8")
PLANS = ("Plan", "ForwardTrainingPlan", "ForwardInferencePlan", "BackwardPlan")


def script():
    spec = importlib.util.spec_from_file_location("stub_docs", ROOT / "ci" / "stub-docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def definitions():
    """Path and node of each function and class, methods included."""
    for node in ast.parse(TEXT).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{own.name}", own) for own in node.body if isinstance(own, ast.FunctionDef))


def test_docstrings_are_those_of_the_module():
    assert script().documented(TEXT) == TEXT, "run python ci/stub-docs.py"
    special = ("__init__", "__new__", "__enter__", "__exit__", "__len__")
    values = [f"Plan.{name}" for name in ("algorithm", "reason", "workspace_size", "reserve_size", "deterministic")]
    without = [path for path, node in definitions() if not ast.get_docstring(node)]
    assert [path for path in without if path.rpartition(".")[2] not in special] == values


def test_the_script_writes_what_the_module_says():
    said = '"""Load a backend\'s vendor library, once per process."""'
    assert said in TEXT
    older = TEXT.replace(said, '"""Of another day."""').replace(
        '    """What `load` has loaded in this process."""', "    ..."
    )
    assert script().documented(older) == TEXT


def test_no_private_name_is_in_it():
    names = [path.rpartition(".")[2] for path, _ in definitions()]
    names += [n.target.id for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.AnnAssign)]
    assert [name for name in names if name.startswith("_") and not name.startswith("__")] == []
    shown = [name for kind in (pybnorm.Handle, pybnorm.TensorDescriptor, *(getattr(_core, k) for k in PLANS))
             for name in dir(kind) if name.startswith("_") and not name.startswith("__")]  # fmt: skip
    assert shown == []


@table("path", [path for path, _ in definitions() if not path.endswith(("__call__", *PLANS))])
def test_every_callable_has_a_signature(path):
    thing = _core
    for name in path.split("."):
        thing = getattr(thing, name)
    if callable(thing) and path != "Cache" and not path.endswith(("__len__", "__init__", "__new__")):
        inspect.signature(thing)


@pytest.mark.slow
def test_stubtest_and_a_strict_user_agree(tmp_path):
    pytest.importorskip("mypy")
    allowed = ROOT / "tests" / "typed" / "stubtest.txt"
    command = [sys.executable, "-m", "mypy.stubtest", "pybnorm._core", "--allowlist", str(allowed)]
    done = subprocess.run(
        # Not in the tree, whose package need not be built: what is installed is asked.
        [*command, "--ignore-disjoint-bases"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pyright = shutil.which("pyright")
    if pyright:  # mypy reads the user's script in ci/lint.sh
        done = subprocess.run([pyright], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout
