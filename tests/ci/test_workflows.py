"""Workflows, and the scripts that ask the service for something, over a stand-in for its program gh."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tables import table

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


@table(("kept", "asked"), [("3", "3"), ("2", "32"), ("none", "32")])
def test_the_newest_run_that_kept_the_artifact_is_the_baseline(service, tmp_path, kept, asked):
    calls = str(tmp_path / "calls")
    done, told = ran(service | {"KEPT": kept, "CALLS": calls}, "last-run.sh", "onednn-newest", str(tmp_path / "last"))
    assert done.stdout == f"baseline={'' if kept == 'none' else tmp_path / 'last/run'}\n"
    assert "".join(re.findall(r"run download (\d) .*--name onednn-newest ", told)) == asked
    assert ("nothing to compare with" in done.stderr) == (kept == "none")


def test_a_difference_is_an_issue_and_told_there_again(service, tmp_path):
    body, calls = Path(service["CALLS"] + ".body"), Path(service["CALLS"])
    ran(service, "difference-issue.sh", "cudnn-newest", str(tmp_path))
    assert "It left no report" in body.read_text()
    reports = tmp_path / "pybnorm-check"
    reports.mkdir()
    (reports / "summary.md").write_text("## 3 of 214 are wrong\n" + "a line of a report\n" * 5000)
    title = "onednn-newest: wrong, or not as in its last run"
    new = f"issue create --repo owner/name --title {title} --body-file"
    for open_issue, asked in (("", new), (title, "issue comment 7 --repo owner/name")):
        calls.write_text("")
        _, told = ran(service | {"OPEN": open_issue}, "difference-issue.sh", "onednn-newest", str(tmp_path))
        assert asked in told
        assert ("issue create" in told) == (not open_issue)
        text = body.read_text()
        assert text.startswith("Run: https://service/owner/name/actions/runs/9\n\n## 3 of 214 are wrong")
        assert 50_000 < len(text) <= 65_536


FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))


@table("file", FILES)
def test_a_workflow_runs_scripts_that_there_are_and_hides_no_status(file):
    text = file.read_text()
    scripts = re.findall(r"bash (ci/[\w-]+\.sh)", text)
    assert scripts or "uses: ./.pybnorm" in text
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    assert not any(word in text for word in ("continue-on-error", "||"))
    assert re.findall(r"uses: (?!\./)(?!\S+@[0-9a-f]{40} # v[\d.]+$).*", text, re.MULTILINE) == []
    assert file.stem in {"check", "cpu", "cuda", "rocm", "miopen-on-cpu", "release", "vendors"}


@table("file", [f for f in FILES if "uses: ./\n" in f.read_text()])
def test_what_a_workflow_gives_the_action_it_takes(file):
    declared = set(re.findall(r"^  ([a-z-]+):\n    description:", (ROOT / "action.yml").read_text(), re.MULTILINE))
    steps = re.findall(r"uses: \./\n        with:\n((?:          .*\n)+)", file.read_text())
    assert steps
    assert set(re.findall(r"^          ([a-z-]+):", "".join(steps), re.MULTILINE)) <= declared


def test_the_workflow_that_others_call_is_the_action_as_a_job():
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    called = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    inputs = called[True]["workflow_call"]["inputs"]  # YAML's "on" is a truth value
    labels = inputs.pop("runs-on")
    assert json.loads(labels["default"]) == "ubuntu-latest"
    assert {n: v | {"type": "string"} for n, v in action["inputs"].items()} == inputs
    own, checked_out, _, step = called["jobs"]["check"]["steps"]
    assert "repository" not in own["with"]
    # Not github.repository and github.sha, which are the caller's.
    assert checked_out["with"].items() >= {
        ("repository", "${{ job.workflow_repository }}"),
        ("ref", "${{ job.workflow_sha }}"),
    }
    assert step["uses"] == "./" + checked_out["with"]["path"]
    assert step["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in inputs}
    given = called[True]["workflow_call"]["outputs"]
    assert given["exit-status"]["description"] == action["outputs"]["exit-status"]["description"]
    assert called["permissions"] == {"contents": "read"}


@table("page", [".github/workflows/cpu.yml", "docs/ci.md"])
def test_a_call_of_the_workflow_gives_what_it_takes(page):
    yaml = pytest.importorskip("yaml")
    texts = re.findall(r"```yaml\n(jobs:\n.*?)```", (ROOT / page).read_text(), re.DOTALL)
    jobs = [j for text in texts or [(ROOT / page).read_text()] for j in yaml.safe_load(text)["jobs"].values()]
    (call,) = [job for job in jobs if "/workflows/check.yml" in job.get("uses", "")]
    called = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    assert call["with"].keys() <= called[True]["workflow_call"]["inputs"].keys()
    assert json.loads(call["with"].get("runs-on", "[]")) in ([], ["self-hosted", "cuda"])


SERVICE = {"CONDA", "GITHUB_ACTION", "GITHUB_ACTION_PATH", "GITHUB_OUTPUT", "GITHUB_REF_NAME", "PATH", "RUNNER_TEMP"}


@table("file", [*FILES, ROOT / "action.yml"])
def test_each_script_of_a_workflow_is_bash_and_has_its_variables(file):
    read = pytest.importorskip("yaml").safe_load(file.read_text())
    for job in read.get("jobs", {"action": read.get("runs")}).values():
        for step in (step for step in job.get("steps", ()) if "run" in step):
            plain = re.sub(r"\$\{\{.*?\}\}", "value", step["run"])
            done = subprocess.run(["bash", "-n"], input=plain, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{plain}\n{done.stderr}"
            names = {name for of in (read, job, step) for name in of.get("env", ())}
            assert set(re.findall(r"\$\{?#?([A-Z][A-Z_]+)", plain)) <= names | SERVICE, plain


# ---------------------------------------------------------------- the quick run

TESTS = """
import pytest
from tables import table

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.parametrize("number", range(10))
def test_many(number):
    pass

@table("number", range(10))
def test_one(number):
    print("row", number)
"""


@pytest.fixture
def small(tmp_path):
    """A project with the settings and hooks of this one, and twelve tests."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "tables.py"):
        shutil.copy2(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "tests/test_small.py").write_text(TESTS)
    settings = re.search(
        r"^\[tool\.pytest\.ini_options\]\n(?:.+\n)+", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    (tmp_path / "pyproject.toml").write_text(settings[0])

    def run(*words):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYBNORM_REQUIRE"))}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(re.findall(r"::(test_\w+(?:\[\d\])?) ", done.stdout)), done.stdout

    return run


@pytest.mark.slow
def test_pytest_by_itself_leaves_out_slow_tests_and_most_parameters_and_says_so(small):
    ran, said = small("-s")
    assert ran == ["test_many[0]", "test_many[9]", "test_one"]
    assert re.findall(r"row (\d)", said) == ["0", "9"]
    pytest.importorskip("xdist")
    parallel = small("-p", "xdist", "-n", "2", "-q")[1]
    assert "3 passed" in parallel
    for text in (said, parallel):
        assert "quick run: slow tests and most parameters are left out; all of them: pytest --full -n auto" in text


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--full",), ("tests/test_small.py",), ("-k", "test")])
def test_what_selects_tests_itself_leaves_out_nothing_but_combinations(small, tmp_path, words):
    """Which meet in pairs; rows that somebody wrote all run."""
    rows = "[(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 2)]"  # each pair of the last is in another
    lists = "".join(f'@pytest.mark.parametrize("{name}", [1, 2])\n' for name in "abc")
    tests = "def test_row(a, b, c):\n    pass\n", "def test_product(a, b, c):\n    pass\n"
    with (tmp_path / "tests/test_small.py").open("a") as file:
        file.write(f'\n@pytest.mark.parametrize("a, b, c", {rows})\n{tests[0]}\n{lists}{tests[1]}')
    ran, said = small(*words, "-s")
    assert len(ran) == 12
    assert len(re.findall(r"row \d", said)) == 10
    assert (said.count("::test_row["), said.count("::test_product[")) == (5, 4)
    assert "left out" not in said


@pytest.mark.slow
def test_the_quick_run_comes_into_every_file():
    """A function of each file is not marked slow; of those with parameters some run."""
    left_out = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        quick = [f for f in functions if "pytest.mark.slow" not in map(ast.unparse, f.decorator_list)]
        if functions and not quick:
            left_out.append(file.name)
    slow = ["forks", "source_distribution", "fourth_backend", "outside_backend"]  # builds, and processes by the dozen
    assert left_out == [f"test_{name}.py" for name in slow]


@table(
    ("files", "changes", "status", "said"),
    [
        ((), "## 0.2.0 (2027-01-01)\n\n- New.\n\n## 0.1.0\n\n- Old.\n", 0, "\n- New."),
        ((), "## 0.2.0 (2027-01-01)\n\n## 0.1.0\n\n- Old.\n", 1, "CHANGELOG.md has no 0.2.0"),
        (("7.fix.md", "README.md"), "## 0.2.0\n\n- New.\n", 1, "not in CHANGELOG.md yet: changelog.d/7.fix.md"),
    ],
)
def test_a_release_has_notes_and_leaves_none_behind(files, changes, status, said, tmp_path):
    (tmp_path / "ci").mkdir()
    (tmp_path / "changelog.d").mkdir()
    shutil.copy2(ROOT / "ci/release-notes.sh", tmp_path / "ci")
    (tmp_path / "CHANGELOG.md").write_text(changes)
    for name in files:
        (tmp_path / "changelog.d" / name).write_text("A fix.\n")
    command = ["bash", str(tmp_path / "ci/release-notes.sh"), "0.2.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert done.stdout.rstrip() == said if status == 0 else said in done.stderr


def test_files_of_the_changelog_have_a_kind_that_it_knows():
    project = (ROOT / "pyproject.toml").read_text()
    kinds = re.findall(r'directory = "(\w+)", name', project)
    found = [path.name for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]
    assert kinds == ["breaking", "feature", "fix"]
    assert [name for name in found if not re.fullmatch(rf"(\d+|\+[\w-]+)\.({'|'.join(kinds)})\.md", name)] == []
