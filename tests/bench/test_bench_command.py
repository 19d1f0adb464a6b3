"""Where `pybnorm bench` finds the benchmarks, what it says where there are none, and which files it replaces."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import pybnorm
from pybnorm import cli

ROOT = Path(__file__).parents[2]
ABSENT = "Error: the benchmarks are not installed with pybnorm, they are in its source tree: get the source"


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["bench", *arguments])


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """As if the package lay in no source tree; the current folder is another one."""
    monkeypatch.setattr(pybnorm, "__file__", str(tmp_path / "site" / "pybnorm" / "__init__.py"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", [["device", "--backend", "onednn"], ["sync"]])
def test_without_the_source_tree_it_says_where_they_are(installed, arguments):
    done = invoke(*arguments)
    assert (done.exit_code, done.output.startswith(ABSENT)) == (2, True), done.output


def test_the_command_is_listed_without_them(installed, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "raw_cudnn.c").touch()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise AssertionError('run')")  # not for a list
    assert (
        "bench     Measure speed and memory, in pybnorm's source tree.\n"
        in CliRunner().invoke(cli.main, ["--help"]).output
    )


def test_in_the_source_tree_they_are_found(installed, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = list(sys.path)
    done = invoke("reference", "--repeats", "0")
    assert (done.exit_code, "--repeats" in done.output) == (2, True), done.output
    assert sys.path == path


@pytest.mark.slow
def test_a_tree_that_is_not_built_takes_the_installed_package(tmp_path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pybnorm").mkdir()
    (tmp_path / "pybnorm" / "__init__.py").write_text("raise AssertionError('not built')")
    for module, arguments, said in (
        ("benchmarks", ["device"], "Usage: pybnorm bench device"),
        ("benchmarks.sync", [], "--ranks"),
    ):
        command = [sys.executable, "-m", module, *arguments, "--help"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(("option", "name"), [("--plot", "mine.svg"), ("--json", "mine.json")])
def test_what_pybnorm_did_not_make_is_not_replaced(monkeypatch, tmp_path, option, name):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pybnorm, "__file__", str(ROOT / "pybnorm" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("<svg/>")
    done = invoke("device", "--backend", "onednn", option, name)
    assert (done.exit_code, f"{option}: got {name}, allowed: a new file or an earlier" in done.output) == (2, True)
    assert Path(name).read_text() == "<svg/>"


@pytest.mark.parametrize("arguments", [["--shapes", "{}"], ["--plot", "{}.txt"]])
def test_what_it_is_given_is_shown(monkeypatch, arguments):
    monkeypatch.chdir(ROOT)
    done = invoke("device", *(a.format("\x1b]0;title\x07\u202e") for a in arguments))
    assert done.exit_code == 2
    assert "\\x1b]0;title\\x07\\u202e" in done.output
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
