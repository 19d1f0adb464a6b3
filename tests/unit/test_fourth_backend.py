"""A fourth backend in the tree: one C file and one line of the shim, and everything else finds it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = "    /* the next one goes here */"
SHIM, ADDED = "include/pybnorm/shim.h", "pybnorm/backends/loop.c"
SOURCES = {".c", ".h", ".json", ".py", ".pxd", ".pxi", ".pyx", ".toml"}

USE = """
import sys
import numpy as np
import pybnorm

assert pybnorm.__file__.startswith(sys.argv[1]), pybnorm.__file__
x = np.random.default_rng(0).standard_normal((4, 3, 5, 2))
one, zero, y = np.ones(3), np.zeros(3), np.empty_like(x)
with pybnorm.Handle("loop") as handle:
    handle.forward_training(x, one, zero, y, epsilon=1e-5)
plain = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
assert abs(y - plain).max() < 1e-13
"""
CASES = {
    "train,spatial,f32,nhwc,4x3x5x2": "PASS",
    "infer,peract,f64,nchw,4x3x5": "PASS",
    "backward,spatial,f32,nchw,4x3x5x2": "PASS",
    "train,spatial,bf16,nchw,4x3x5x2": "UNSUPPORTED",
}


def sources(folder):
    """Text of what a person writes, by path."""
    found = {p for part in ("include", "pybnorm") for p in (folder / part).rglob("*")}
    found |= {folder / "setup.py", folder / "pyproject.toml"}
    found = {p for p in found if p.suffix in SOURCES and p.name != "_core.c" and "__pycache__" not in p.parts}
    return {str(p.relative_to(folder)): p.read_text() for p in found}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the example's backend in it, built."""
    folder = tmp_path_factory.mktemp("fourth") / "tree"
    made = shutil.ignore_patterns("*.so", "*.pyd", "_core.c", "__pycache__")
    for part in ("include", "pybnorm"):
        shutil.copytree(ROOT / part, folder / part, ignore=made)
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        shutil.copy(file, folder)
    shutil.copy(ROOT / "examples" / "loop_backend" / "loop.c", folder / ADDED)
    shim = (folder / SHIM).read_text()
    assert shim.count(LINE) == 1
    (folder / SHIM).write_text(shim.replace(LINE, f"    X(loop)             \\\n{LINE}"))
    done = run(folder, "setup.py", "-q", "build_ext", "--inplace", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(tree, *words, cwd=None):
    """Python on the copy of the package."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PBN_", "PYBNORM_"))}
    environment |= {"PYTHONPATH": str(tree), "PBN_OPTIMIZE": "0"}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd or tree.parent, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_one_file_and_one_line_are_a_backend(tree):
    done = run(tree, "-c", USE, str(tree))
    assert done.returncode == 0, done.stderr
    done = run(tree, "-m", "pybnorm", "info", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = {backend["backend"]: backend for backend in json.loads(done.stdout)["backends"]}
    assert told["loop"]["version"] == [1, 0, 0], done.stdout
    assert {"cudnn", "miopen", "onednn"} < set(told)
    cases = [word for case in CASES for word in ("--case", case)]
    done = run(tree, "-m", "pybnorm", "check", "--backend", "loop", *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loop: 4 cases, 3 PASS, 1 UNSUPPORTED" in done.stdout
    before, after = sources(ROOT), sources(tree)
    assert {name for name in before.keys() | after if before.get(name) != after.get(name)} == {SHIM, ADDED}
    assert set(after[SHIM].splitlines()) - set(before[SHIM].splitlines()) == {"    X(loop)             \\"}
