"""Every example runs with one command, and says so when a result is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from example_here import run_here

from pybnorm import graph

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = {p.stem: p.read_text() for p in EXAMPLES.glob("*.py")}
NAMES = sorted(name for name, text in SAMPLES.items() if "import example\n" in text and "pybnorm.graph" in text)
MISMATCH, ABSENT = 1, 2


def run(name, *options):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_hipdnns_samples_are_there():
    assert {"batchnorm_training", "batchnorm_inference", "batchnorm_backward"} < set(NAMES)
    assert len(NAMES) == 5


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_one_command(handle, name, dtype, layout, monkeypatch):
    monkeypatch.setenv("PYBNORM_KNOWN_DEFECTS", "avoid" if handle.backend == "miopen" else "ignore")
    start = run if (dtype, layout) == ("f32", "nchw") else run_here
    done = start(name, "--backend", handle.backend, "--dtype", dtype, "--layout", layout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 3
    for line in lines[1:]:
        assert "  ok" in line, done.stdout


@pytest.fixture
def module(monkeypatch):
    """Imports an example into this process."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name):
        for stale in ("example", name):
            monkeypatch.delitem(sys.modules, stale, raising=False)
        return __import__("example"), __import__(name)

    yield load
    for name in ("example", *NAMES):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_result_is_a_mismatch(backend, handle, name, module, monkeypatch, capsys):
    """Half of the scale given as twice what it is must not pass unnoticed."""
    original = graph.Graph.execute

    def wrong(self, handle, pack, workspace=None):
        for record in self._records.values():
            if record.name == "scale":
                for key in pack:
                    uid = key if isinstance(key, int) else key.get_uid()
                    if uid == record.uid:
                        handle.axpby(0.0, shaped(pack[key]), 2.0, shaped(pack[key], 1))
        return original(self, handle, pack, workspace)

    def shaped(buffer, away=0):
        count = buffer.dims[1] if len(buffer.dims) > 1 else buffer.dims[0]
        view = buffer._replace(dims=(1, count // 2), strides=(count, 1))
        return view._replace(pointer=buffer.pointer + (count // 2) * 4 * away)

    example, program = module(name)
    assert example.run(program.__doc__, program.main, ["--backend", backend]) == 0
    assert "WRONG" not in capsys.readouterr().out
    monkeypatch.setattr(graph.Graph, "execute", wrong)
    assert example.run(program.__doc__, program.main, ["--backend", backend]) == MISMATCH
    assert "WRONG" in capsys.readouterr().out


def test_an_absent_library_is_said(monkeypatch):
    monkeypatch.setenv("PYBNORM_LIB_ONEDNN", str(EXAMPLES / "example.py"))
    done = run("batchnorm_training", "--backend", "onednn")
    assert done.returncode == ABSENT
    assert "PYBNORM_LIB_ONEDNN" in done.stderr


def test_the_command_line_names_what_is_allowed():
    done = run("batchnorm_training", "--dtype", "f64")
    assert done.returncode == 2
    assert "f32" in done.stderr
