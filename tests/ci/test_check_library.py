"""The action and its script, with the variables that the service sets, on the real oneDNN."""

import json
import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tables import table

import pybnorm
from pybnorm.check.language.lines import packaged_suites

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci/check-library.sh"
ACTION = (ROOT / "action.yml").read_text()
WRONG = """
import numpy as np


class Kernel:
    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon, **_):
        shape = (1, -1) + (1,) * (x.ndim - 2)
        deviation = np.sqrt(running_variance.reshape(shape) + 2 * epsilon)
        return (x - running_mean.reshape(shape)) / deviation * scale.reshape(shape)
"""
CASE = "infer,spatial,f32,nchw,2x3x4x4"
DEFECT = "train,spatial,f32,nchw,32x2x56x56,fill=image"


@pytest.fixture
def service(tmp_path, load_library):
    """Variables of a step of the service; `pybnorm` is that of this interpreter."""
    load_library("onednn")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("pybnorm", "-m pybnorm"), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYBNORM_REQUIRE", "GITHUB_", "FORCE_COLOR"))}
    files = {n: tmp_path / n.lower() for n in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in files.values():
        file.write_text("")
    return own | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(pybnorm.__file__).parents[1]}:{tmp_path}",
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION": "check",
        "GITHUB_ACTION_PATH": str(ROOT),
        "RUNNER_TEMP": str(tmp_path),
        **{n: str(f) for n, f in files.items()},
    }


def ran(service, *command, folder="/", **variables):
    own = service | variables
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


@pytest.mark.slow
def test_the_documented_recipe_is_green_and_known_defects_are_notices(service, tmp_path):
    """The step that docs/ci.md shows, with another suite: a line that is right and one of a known defect of oneDNN.

    Its own suites are green on oneDNN in ci/cpu.sh. The second run is held against the first.
    """
    recipe = (ROOT / "docs/ci.md").read_text().partition("```yaml")[2].partition("```")[0]
    given = dict(re.findall(r'^          ([a-z-]+): "?([^"#\n]*?)"?(?: +#.*)?$', recipe, re.MULTILINE))
    assert set(given) == {"backend", "suite", "library", "baseline", "allow-known"}
    assert set(given["suite"].split()) <= set(packaged_suites())
    suite = tmp_path / "own.txt"
    suite.write_text(f"{CASE}\n{DEFECT}\n")
    inputs = {name.replace("-", "_").upper(): value for name, value in given.items()}
    inputs |= {"BACKEND": "onednn", "LIBRARY": "", "BASELINE": "", "OPTIONS": "--executor process", "SUITE": str(suite)}
    *_, check = re.findall(r"^      run: \|\n((?:        .*\n|\n)+)", ACTION, re.MULTILINE)
    step = ("bash", "-eo", "pipefail", "-c", textwrap.dedent(check))
    done = ran(service, *step, **inputs)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = tmp_path / "pybnorm-check"
    assert Path(service["GITHUB_OUTPUT"]).read_text().split() == ["exit-status=0", f"reports={reports}"]
    right, defect = json.loads((reports / "report.json").read_text())["cases"]
    assert (right["case"], right["status"], bool(right["allowed"])) == (CASE, "PASS", False)
    assert len(re.findall("^::notice title=onednn%3A ", done.stdout, re.MULTILINE)) == bool(defect["allowed"])
    assert "::error" not in done.stdout
    junit = ET.parse(reports / "junit.xml")
    assert len(junit.findall(".//testcase")) == 2
    assert junit.find(".//failure") is junit.find(".//error") is None
    assert "<!DOCTYPE html>" in (reports / "report.html").read_text()
    inputs["BASELINE"] = str(reports / "run")
    again = ran(service, *step, **inputs, GITHUB_ACTION="again")
    assert again.returncode == 0, again.stdout + again.stderr
    summary = Path(service["GITHUB_STEP_SUMMARY"]).read_text()
    assert ("**known defects, allowed**" in summary) == bool(defect["allowed"])
    assert "## Compared with run" in summary
    assert re.search(r"oneDNN \S+ \(A\) to oneDNN \S+ \(B\): no change in 2 cases", summary)
    assert (tmp_path / "pybnorm-again/compare.json").is_file()


def test_the_job_of_gitlab_calls_the_same(service, tmp_path):
    """Over a stand-in for the script, which says what it is given and ends in a status of its own."""
    text = (ROOT / "ci/gitlab.yml").read_text()
    (block,) = re.findall(r"^    - \|\n((?:      .*\n)+)", text, re.MULTILINE)
    variables = dict(re.findall(r'^    ([A-Z_]+): "?([^"#\n]*?)"?(?: #.*)?$', text, re.MULTILINE))
    declared = {name.replace("-", "_").upper() for name in re.findall(r"^  ([a-z-]+):\n    desc", ACTION, re.MULTILINE)}
    assert set(variables) == declared - {"ARTIFACT", "EXIT_STATUS", "REPORTS"} | {"SOURCE", "REVISION"}
    scripts = tmp_path / "pybnorm/ci"
    scripts.mkdir(parents=True)
    (scripts / SCRIPT.name).write_text('printf "%s\\n" "$@"\nexit 7\n')
    own = service | variables | {"INSTALL": "false"}
    given = {"BACKEND": "onednn", "SUITE": "smoke own.txt", "LIBRARY": "a file", "BASELINE": "before/run"}
    for more, words in (
        ({}, ["--out", "reports", "--suite", "smoke", "--"]),
        (given | {"ALLOW_KNOWN": "true", "OPTIONS": "--executor process"},
         ["--out", "reports", "--backend", "onednn", "--library", "a file", "--baseline", "before/run",
          "--suite", "smoke", "--suite", "own.txt", "--allow-known", "--", "--executor", "process"]),
    ):  # fmt: skip
        done = ran(own | more, "bash", "-eo", "pipefail", "-c", textwrap.dedent(block), folder=tmp_path)
        assert (done.returncode, done.stdout.splitlines()) == (7, words), done.stderr


def test_the_inputs_that_the_action_reads_are_declared():
    declared = re.findall(r"^  ([a-z-]+):\n    description:", ACTION.partition("outputs:")[0], re.MULTILINE)
    assert sorted(declared) == sorted(set(re.findall(r"inputs\.([a-z-]+)", ACTION)))


@pytest.mark.slow
def test_what_is_wrong_is_an_annotation_and_the_exit_status(service, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    out = tmp_path / "out"
    words = ("--executor", "process", "--implementation", f"{tmp_path}/wrong.py:Kernel", "--case", CASE)
    done = ran(service, "bash", SCRIPT, "--out", out, "--", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^::error title=.*FAIL::infer,spatial", done.stdout, re.MULTILINE)
    assert "- **FAIL**: " in Path(service["GITHUB_STEP_SUMMARY"]).read_text()


@table(
    ("arguments", "said"),
    [
        ((), "--out is needed"),
        (("--out",), "--out needs a value"),
        (("--out", "here", "--library", "/nowhere"), "whose library it is"),
        (("--out", "here", "--library", "/nowhere", "--backend", "onednn"), "the name of a file"),
        (("--out", "here", "--baseline", "/nowhere"), "--baseline /nowhere is not there"),
        (("--aut", "here"), "what is --aut?"),
        (("--out", "of an earlier run"), "there is a run in"),
    ],
)
def test_what_is_missing_is_named_and_an_earlier_run_is_not_written_over(service, tmp_path, arguments, said):
    (tmp_path / "of an earlier run/run").mkdir(parents=True)
    done = ran(service, "bash", SCRIPT, *arguments, folder=tmp_path)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
