"""Where `pybnorm bench` finds the benchmarks, what it says where there are none, and which files it replaces."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import pybnorm
from pybnorm import cli

ROOT = Path(__file__).parents[2]


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """As if the package lay in no source tree; the current folder is another one."""
    monkeypatch.setattr(pybnorm, "__file__", str(tmp_path / "site" / "pybnorm" / "__init__.py"))
    monkeypatch.chdir(tmp_path)


def test_where_they_are(installed, tmp_path, monkeypatch):
    for arguments in (["device", "--backend", "onednn"], ["sync"]):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert done.output.startswith("Error: the benchmarks are not installed with pybnorm, they are in its source")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "rivals.py").touch()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise AssertionError('run')")  # not for a list
    listed = CliRunner().invoke(cli.main, ["--help"]).output
    assert "bench     Measure speed and memory, in pybnorm's source tree.\n" in listed
    monkeypatch.chdir(ROOT)
    path = list(sys.path)
    done = invoke("reference", "--repeats", "0")
    assert (done.exit_code, "--repeats" in done.output) == (2, True), done.output
    assert sys.path == path


@pytest.mark.slow
def test_a_tree_that_is_not_built_takes_the_installed_package(tmp_path):
    """And a library that is absent is named."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pybnorm").mkdir()
    (tmp_path / "pybnorm" / "__init__.py").write_text("raise AssertionError('not built')")
    absent = "/nonexistent/libcudnn.so"
    for arguments, code, said in (
        (["benchmarks", "device", "--backend", "cudnn"], 2, absent),
        (["benchmarks.sync", "--help"], 0, "--ranks"),
    ):
        environment = os.environ | {"PYBNORM_LIB_CUDNN": absent}
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run([sys.executable, "-m", *arguments], check=False, **options)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(("option", "name"), [("--plot", "mine.svg"), ("--json", "mine.json")])
def test_what_pybnorm_did_not_make_is_not_replaced(monkeypatch, tmp_path, option, name):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pybnorm, "__file__", str(ROOT / "pybnorm" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("<svg/>")
    done = invoke("device", "--backend", "onednn", option, name)
    assert (done.exit_code, f"{option}: got {name}, allowed: a new file or an earlier" in done.output) == (2, True)
    assert Path(name).read_text() == "<svg/>"


def test_what_it_is_given_is_shown(monkeypatch):
    monkeypatch.chdir(ROOT)
    for option, value in (("--shapes", "{}"), ("--plot", "{}.txt")):
        done = invoke("device", option, value.format("\x1b]0;title\x07\u202e"))
        assert done.exit_code == 2
        assert "\\x1b]0;title\\x07\\u202e" in done.output
        assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
