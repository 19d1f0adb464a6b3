"""Workflows, and the scripts that ask the service for something, over a stand-in for its program gh."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Logs what it is asked. Runs 3 and 2 ended; the older one has kept what is asked for. One issue is open.
GH = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
while [ $# -gt 0 ]; do
    case $1 in --dir) folder=$2 ;; --body-file) cp "$2" "$CALLS.body" ;; esac
    words+=" $1"
    shift
done
case $words in
    " run list"*) printf '3\\n2\\n' ;;
    " run download $KEPT"*) mkdir -p "$folder/run" ;;
    " run download"*) echo 'no artifact matches' >&2; exit 1 ;;
    " issue list"*) echo "[{\\"number\\": 7, \\"title\\": \\"$OPEN\\"}, {\\"number\\": 8, \\"title\\": \\"other\\"}]" ;;
esac
"""


@pytest.fixture
def service(tmp_path):
    """The variables of a step; `gh` is the one above."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gh").write_text(GH)
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_WORKFLOW": "vendors",
        "GITHUB_SERVER_URL": "https://service",
        "GITHUB_RUN_ID": "9",
        "KEPT": "none",
        "OPEN": "",
    }


def ran(service, script, *arguments):
    done = subprocess.run(
        ["bash", ROOT / "ci" / script, *arguments], env=service, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, Path(service["CALLS"]).read_text()


@pytest.mark.parametrize(("kept", "asked"), [("3", ["3"]), ("2", ["3", "2"])])
def test_the_newest_run_that_kept_the_artifact_is_the_baseline(service, tmp_path, kept, asked):
    done, calls = ran(service | {"KEPT": kept}, "last-run.sh", "onednn-newest", str(tmp_path / "last"))
    assert done.stdout == f"baseline={tmp_path}/last/run\n"
    assert re.findall(r"run download (\d) .*--name onednn-newest ", calls) == asked


def test_without_a_run_there_is_nothing_to_compare_with(service, tmp_path):
    done, _ = ran(service, "last-run.sh", "onednn-newest", str(tmp_path / "last"))
    assert done.stdout == "baseline=\n"
    assert "nothing to compare with" in done.stderr


def test_a_difference_is_an_issue_and_told_there_again(service, tmp_path):
    reports = tmp_path / "pybnorm-check"
    reports.mkdir()
    (reports / "summary.md").write_text("## 3 of 214 are wrong\n" + "a line of a report\n" * 5000)
    title = "onednn-newest: wrong, or not as in its last run"
    _, calls = ran(service, "difference-issue.sh", "onednn-newest", str(tmp_path))
    assert f"issue create --repo owner/name --title {title} --body-file" in calls
    body = Path(service["CALLS"] + ".body").read_text()
    assert body.startswith("Run: https://service/owner/name/actions/runs/9\n\n## 3 of 214 are wrong")
    assert 50_000 < len(body) <= 65_536
    Path(service["CALLS"]).write_text("")
    _, calls = ran(service | {"OPEN": title}, "difference-issue.sh", "onednn-newest", str(tmp_path))
    assert "issue comment 7 --repo owner/name" in calls
    assert "issue create" not in calls


def test_a_step_that_left_no_report_is_an_issue_too(service, tmp_path):
    ran(service, "difference-issue.sh", "cudnn-newest", str(tmp_path))
    assert "It left no report" in Path(service["CALLS"] + ".body").read_text()


FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_workflows_are_those_that_are_documented():
    assert {f.stem for f in FILES} == {"cpu", "cuda", "rocm", "miopen-on-cpu", "release", "vendors"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_workflow_runs_scripts_that_there_are_and_hides_no_status(file):
    text = file.read_text()
    scripts = re.findall(r"bash (ci/[\w-]+\.sh)", text)
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    assert "continue-on-error" not in text
    assert "||" not in text
    assert re.findall(r"uses: (?!\./)(?!\S+@[0-9a-f]{40} # v[\d.]+$).*", text, re.MULTILINE) == []


@pytest.mark.parametrize("file", [f for f in FILES if "uses: ./" in f.read_text()], ids=lambda f: f.stem)
def test_what_a_workflow_gives_the_action_it_takes(file):
    declared = set(re.findall(r"^  ([a-z-]+):\n    description:", (ROOT / "action.yml").read_text(), re.MULTILINE))
    steps = re.findall(r"uses: \./\n        with:\n((?:          .*\n)+)", file.read_text())
    assert steps
    for step in steps:
        assert set(re.findall(r"^          ([a-z-]+):", step, re.MULTILINE)) <= declared
