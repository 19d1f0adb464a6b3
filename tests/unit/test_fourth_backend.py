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
SHIM, ADDED = "include/pybnorm/shim.h", "pybnorm/backends/loop.c"
SOURCES = {".c", ".h", ".json", ".py", ".pxd", ".pxi", ".pyx", ".toml"}
CHANGES = {  # what is in the tree, and a line after it: a tensor of training
    SHIM: {
        "    void *dscale, *dbias;\n": "    void *y_amax;\n",
        "typedef enum pbn_capability {\n": "    PBN_CAP_AMAX = 1 << 20,\n",
    },
    "pybnorm/_core/calls.pxi": {
        "        pbn_argument dscale, dbias;\n": "        pbn_argument y_amax;\n",
        "        PBN_ALWAYS = 0,\n": "        PBN_AMAX = 32,\n",
        "        VECTOR(FORWARD_TRAINING, bias, READ, ALWAYS, RUNS)\n": (
            "        VECTOR(FORWARD_TRAINING, y_amax, WRITTEN, AMAX, AMAX)\n"
        ),
        "cdef dict _WHEN = {\n": "    32: 'amax',\n",
    },
    "pybnorm/enums.py": {"    RUNS = 1\n": "    AMAX = 1 << 20\n"},
}
USE = """
import json
import sys
import numpy as np
import pybnorm
from pybnorm import _arrays, _core

assert pybnorm.__file__.startswith(sys.argv[1]), pybnorm.__file__
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
        assert abs(y - np.float32([-1.2247449, 0, 1.2247449])).max() < 1e-6, (backend, y)
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
print(json.dumps({name: pybnorm.load(name).version if name == "loop" else None for name in pybnorm.backends()}))
"""


def sources(folder):
    """Text of what a person writes, by path."""
    found = {p for part in ("include", "pybnorm") for p in (folder / part).rglob("*")}
    found |= {folder / "setup.py", folder / "pyproject.toml"}
    found = {p for p in found if p.suffix in SOURCES and p.name != "_core.c" and "__pycache__" not in p.parts}
    return {str(p.relative_to(folder)): p.read_text() for p in found}


def run(tree, *words, cwd):
    """Python on the copy of the package."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PBN_", "PYBNORM_"))}
    environment |= {"PYTHONPATH": str(tree), "PBN_OPTIMIZE": "0", "CFLAGS": "-g0"}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_file_and_one_line_are_a_backend_and_a_tensor_is_refused_where_it_is_not_known(tmp_path):
    """Every call still works, and no backend leaves the tensor unwritten in silence."""
    tree = tmp_path / "tree"
    for part in ("include", "pybnorm"):
        made = shutil.ignore_patterns("*.so", "*.pyd", "_core.c", "__pycache__")
        shutil.copytree(ROOT / part, tree / part, ignore=made)
    for file in [*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]:
        shutil.copy(file, tree)
    for name, lines in CHANGES.items():
        text = (ROOT / name).read_text()
        for line, more in lines.items():
            assert text.count(line) == 1, line
            text = text.replace(line, line + more)
        (tree / name).write_text(text)
    before = sources(tree)
    assert before[SHIM].count(LINE) == 1
    (tree / SHIM).write_text(before[SHIM].replace(LINE, "    X(loop)             \\\n" + LINE))
    shutil.copy(ROOT / "examples" / "loop_backend" / "loop.c", tree / ADDED)
    run(tree, "setup.py", "-q", "build_ext", "--inplace", cwd=tree)
    told = json.loads(run(tree, "-c", USE, str(tree), cwd=tmp_path))
    assert told["loop"] == [1, 0, 0]
    assert {"cudnn", "miopen", "onednn", "native"} < set(told)
    after = sources(tree)
    assert {name for name in before.keys() | after if before.get(name) != after.get(name)} == {SHIM, ADDED}
