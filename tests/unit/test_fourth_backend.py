"""A backend more in the tree, and a tensor more in the table: everything else finds them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = "    /* the next one goes here */\n"
ONE_MORE = "    X(loop)             \\\n"
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
AMAX = "VECTOR(FORWARD_TRAINING, y_amax, WRITTEN, AMAX, AMAX)"
TENSOR = {  # what is in the tree, and a line after it
    SHIM: {
        "    void *dscale, *dbias;\n": "    void *y_amax;\n",
        "typedef enum pbn_capability {\n": "    PBN_CAP_AMAX = 1 << 20,\n",
    },
    "pybnorm/_core/calls.pxi": {
        "        pbn_argument dscale, dbias;\n": "        pbn_argument y_amax;\n",
        "        PBN_ALWAYS = 0,\n": "        PBN_AMAX = 32,\n",
        "        VECTOR(FORWARD_TRAINING, bias, READ, ALWAYS, RUNS)\n": f"        {AMAX}\n",
        "cdef dict _WHEN = {\n": "    32: 'amax',\n",
    },
    "pybnorm/enums.py": {"    RUNS = 1\n": "    AMAX = 1 << 20\n"},
}
USE_TENSOR = """
import numpy as np
import pybnorm
from pybnorm import _arrays, _core

assert [t.needs for t in _core.tensors("train") if t.name == "y_amax"] == [pybnorm.Capability.AMAX]
x, y = np.float32([[[1, 2, 3]]]), np.empty((1, 1, 3), np.float32)
one, zero, amax = np.float32([1]), np.float32([0]), np.float32([7])
arrays = {"x": x, "scale": one, "bias": zero, "y": y}
arrays = {name: _arrays.as_buffer(array, name)._replace(pointer=0) for name, array in arrays.items()}
scalars = {"mode": "spatial", "alpha": 1, "beta": 0, "epsilon": 0, "exponential_average_factor": 1}
backends = ["native", "loop"]
try:
    backends.append(pybnorm.load("onednn").backend)
except pybnorm.LibraryNotFoundError:
    pass
for backend in backends:
    with pybnorm.Handle(backend) as handle:
        handle.forward_training(x, one, zero, y, epsilon=0)
        plan = handle.plan_forward_training(x, running=False, saved=False, epsilon=0)
        plan(x, one, zero, np.empty_like(y))
        mean, variance = np.float32([2]), np.float32([2 / 3])
        handle.forward_inference(x, one, zero, mean, variance, y, epsilon=0)
        handle.backward(x, y, one, np.empty_like(x), np.empty_like(one), np.empty_like(one), epsilon=0)
        calls = _core.CallList(handle)
        calls.append(handle, "train", arrays, (0, 0), **scalars)
        try:
            calls.append(handle, "train", arrays | {"y_amax": arrays["bias"]}, (0, 0), **scalars)
        except pybnorm.UnsupportedError as error:
            assert f"{backend} batch_normalization_forward_training" in str(error), error
            assert "no tensor 'y_amax' here: Capability.AMAX is not set" in str(error), error
        else:
            raise AssertionError(f"{backend} takes a tensor that it does not know")
"""


def sources(folder):
    """Text of what a person writes, by path."""
    found = {p for part in ("include", "pybnorm") for p in (folder / part).rglob("*")}
    found |= {folder / "setup.py", folder / "pyproject.toml"}
    found = {p for p in found if p.suffix in SOURCES and p.name != "_core.c" and "__pycache__" not in p.parts}
    return {str(p.relative_to(folder)): p.read_text() for p in found}


def copied(folder):
    made = shutil.ignore_patterns("*.so", "*.pyd", "_core.c", "__pycache__")
    for part in ("include", "pybnorm"):
        shutil.copytree(ROOT / part, folder / part, ignore=made)
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        shutil.copy(file, folder)


def added(text, lines):
    """The text with a line after each of those that are keys."""
    for line, more in lines.items():
        assert text.count(line) == 1, line
        text = text.replace(line, line + more)
    return text


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with the example's backend in it and a row more in the table of tensors, built."""
    folder = tmp_path_factory.mktemp("fourth") / "tree"
    copied(folder)
    for name, lines in TENSOR.items():
        (folder / name).write_text(added((ROOT / name).read_text(), lines))
    shim = (folder / SHIM).read_text()
    assert shim.count(LINE) == 1
    (folder / SHIM).write_text(shim.replace(LINE, ONE_MORE + LINE))
    shutil.copy(ROOT / "examples" / "loop_backend" / "loop.c", folder / ADDED)
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
    assert {"cudnn", "miopen", "onednn", "native"} < set(told)
    before, after = sources(ROOT), sources(tree)
    before |= {name: added(before[name], lines) for name, lines in TENSOR.items()}
    assert {name for name in before.keys() | after if before.get(name) != after.get(name)} == {SHIM, ADDED}
    assert set(after[SHIM].splitlines()) - set(before[SHIM].splitlines()) == {ONE_MORE.rstrip("\n")}


@pytest.mark.slow
def test_a_tensor_that_no_backend_knows_is_refused_by_name(tree):
    """Every call still works, and no backend leaves it unwritten in silence."""
    done = run(tree, "-c", USE_TENSOR)
    assert done.returncode == 0, done.stderr
