"""The pytest plugin, in pytest runs of its own: what each status becomes, which cases are collected, what is left."""

import importlib.metadata
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from simulated import alive, interruptible

import pybnorm
from pybnorm.check.judging.bounds import Status

pytest_plugins = ("pytester",)

HERE = Path(__file__).parent
PACKAGE = Path(pybnorm.__file__).parent
MODULE = "_pybnorm_pytestplugin"
CASE = "train,spatial,f32,nchw,8x3x4x4"
CASE_3D = "train,spatial,f32,nchw,8x3x4"
STRIDED = "infer,spatial,f64,nchw,2x3x4x4"  # oneDNN computes no float64
ACTIVE = bool(importlib.metadata.entry_points(group="pytest11", name="pybnorm"))

OPENERS = """
import os, pathlib, simulated
FOLDER = pathlib.Path(__file__).parent

def open_noting(backend):
    (FOLDER / f"pid{os.getpid()}").touch()
    return simulated.session()

def open_wrong(backend):
    return simulated.session(bug="NaN in one element")

def open_hanging(backend):
    (FOLDER / f"pid{os.getpid()}").touch()
    return simulated.open_hanging(backend)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest with the plugin in a process, in a folder with a test of its own and `conftest`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]))
    for name in ("PYTEST_ADDOPTS", "PYBNORM_REQUIRE", "PYBNORM_REQUIRE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(test_own="def test_own(): pass", openers=OPENERS)
    pytester.makeini(
        "[pytest]\naddopts = --strict-config --strict-markers\nfilterwarnings = error\nxfail_strict = true"
    )

    def start(*arguments, conftest=None):
        if conftest is not None:
            pytester.makeconftest(conftest)
        return pytester.runpytest_subprocess(*loaded(), *arguments)

    return start


def loaded():
    # hypothesis' plugin imports all of it at the end of every run: more than a second of processor time.
    return ("-p", "no:hypothesispytest", *(() if ACTIVE else ("-p", MODULE)))


def cases(*lines):
    return tuple(itertools.chain.from_iterable(("--pybnorm-case", line) for line in lines))


def opener(name):
    return f"import pybnorm.pytest_plugin, openers, simulated\npybnorm.pytest_plugin.open_session = {name}"


def processes(pytester):
    return [int(file.name.removeprefix("pid")) for file in pytester.path.glob("pid*")]


# ---------------------------------------------------------------- nothing asked


@pytest.mark.slow
def test_without_its_options_nothing_is_imported_or_collected(run, pytester):
    pytester.makepyfile(
        test_own="import sys\ndef test_own():\n    assert not [m for m in sys.modules if m.split('.')[0] == 'pybnorm']"
    )
    result = run("-v", "--pybnorm-jobs", "2", "--pybnorm-timeout", "5", "--pybnorm-allow-known")
    result.assert_outcomes(passed=1)
    assert "onednn" not in result.stdout.str()
    assert "--pybnorm-suite" in run("--help").stdout.str()


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["_core", "check", "pytest_plugin", "rich"])
def test_a_partly_installed_package_registers_nothing(run, pytester, monkeypatch, missing):
    folder = pytester.mkdir("installed")
    shutil.copy2(PACKAGE.parent / f"{MODULE}.py", folder)
    (folder / "pybnorm").mkdir()
    for part in ("__init__", "_core", "check", "pytest_plugin"):
        (folder / "pybnorm" / f"{part}.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert "--pybnorm-suite" in run("--help").stdout.str()
    broken = run("--pybnorm-suite", "smoke")  # all is there, and does not work
    assert broken.ret == pytest.ExitCode.USAGE_ERROR
    broken.stderr.fnmatch_lines(["ERROR: pybnorm cannot be imported: undefined symbol"])
    if missing == "rich":
        hidden = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'rich' else f(n)"
        (folder / "sitecustomize.py").write_text(hidden)
    else:
        (folder / "pybnorm" / f"{missing}.py").unlink()
        (folder / "pybnorm" / missing).mkdir()  # of sources only, as _core in a tree that is not built
    assert "--pybnorm" not in run("--help").stdout.str()
    run().assert_outcomes(passed=1)


# ---------------------------------------------------------------- a real library


@pytest.fixture
def onednn(load_library):
    return load_library("onednn")


@pytest.mark.slow
def test_cases_are_items_beside_the_projects_own(run, pytester, onednn):
    lines = cases(CASE, STRIDED, "infer,spatial,f32,nchw/nhwc,2x3x4")
    result = run("-v", "-rs", "--junit-xml=j.xml", "--pybnorm-backend", "onednn", *lines)
    result.assert_outcomes(passed=4, skipped=1)
    assert result.ret == 0
    version = ".".join(map(str, onednn.version))
    result.stdout.fnmatch_lines(
        [
            f"onednn: oneDNN {version}, *on *",
            "test_own.py::test_own PASSED*",
            f"pybnorm::onednn::{CASE} PASSED*",
            f"pybnorm::onednn::{STRIDED} SKIPPED*",
            "pybnorm::onednn::infer,spatial,f32,nhwc,2x3x4 PASSED*",
            "SKIPPED [[]1[]] *: onednn: *float64",
        ]
    )
    tests = {(t.get("classname"), t.get("name")) for t in ET.parse(pytester.path / "j.xml").iter("testcase")}
    assert ("pybnorm.onednn", CASE) in tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "passed"),
    [
        (["pybnorm::"], 3),
        (["pybnorm::onednn"], 3),
        ([f"pybnorm::onednn::{CASE_3D}"], 1),
        ([f"pybnorm::onednn::{CASE_3D},beta=0", "test_own.py"], 2),
        (["test_own.py"], 4),
        (["-k", "onednn and nhwc"], 1),
        (["--deselect", f"pybnorm::onednn::{CASE}"], 2),
    ],
)
def test_one_can_be_chosen(run, onednn, selection, passed):
    lines = [CASE, CASE_3D, "infer,spatial,f32,nhwc,2x3x4"]
    result = run("--pybnorm-backend", "onednn", *cases(*lines), *selection)
    assert result.parseoutcomes()["passed"] == passed + ("--deselect" in selection)


@pytest.mark.slow
def test_a_suite_or_a_backend_alone_is_enough(run, onednn):
    outcomes = run("--pybnorm-backend", "onednn", "pybnorm::", "--collect-only", "-q").parseoutcomes()
    assert outcomes == run("--pybnorm-suite", "smoke", "pybnorm::onednn", "--collect-only", "-q").parseoutcomes()
    lines = pybnorm.check.language.lines.load_suite("smoke")
    assert outcomes["tests"] == len(lines)


@pytest.mark.slow
def test_a_run_that_judged_nothing_is_no_success(run, onednn):
    result = run("--pybnorm-backend", "onednn", *cases(STRIDED))
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["pybnorm: no backend supports any of these cases, so nothing was checked."])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--pybnorm-suite", "nosuch"], "suite: got nosuch, allowed: *smoke*"),
        (["--pybnorm-case", "train,spatial"], "case: got train,spatial, *"),
        (["--pybnorm-backend", "nosuch"], "--pybnorm-backend: got nosuch, allowed: cudnn | miopen | *"),
        (["--pybnorm-case", CASE, "pybnorm::nosuch"], "not found: pybnorm::nosuch (backends of this run: *onednn*"),
        (["--pybnorm-case", CASE, "pybnorm::onednn::x"], "not found: pybnorm::onednn::x (case: got x, *"),
        (["--pybnorm-case", CASE, f"pybnorm::onednn::{CASE_3D}"], "not found: *none of the 1 cases of this run)"),
        (["--pybnorm-timeout", "nan"], "argument --pybnorm-timeout: got nan, allowed: seconds > 0, at most 1000000"),
        (["--pybnorm-timeout", "inf"], "argument --pybnorm-timeout: got inf, allowed: seconds > 0, at most 1000000"),
        (["--pybnorm-jobs", "0"], "argument --pybnorm-jobs: got 0, allowed: an integer >= 1"),
    ],
)
def test_a_bad_argument_is_a_usage_error(run, arguments, text):
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*rror: {text}" if "argument" in text else f"ERROR: {text}"])


# ---------------------------------------------------------------- absent libraries


@pytest.mark.slow
def test_an_absent_backend_that_was_asked_for_is_an_error_with_the_search(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "nothing_here"), os.environ["PYTHONPATH"]]))
    # that folder's module imports pybnorm before pytest can rewrite it, of which it warns where pybnorm is installed
    early = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    result = run(*early, "--pybnorm-backend", "cudnn", *cases(CASE))
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    lines = ["cudnn: absent: *", "    *libcudnn-nowhere.so: *", "    to have it: *"]
    result.stdout.fnmatch_lines(["*_ ERROR collecting pybnorm _*", *lines])
    result.stdout.no_fnmatch_line("*Traceback*")
    result = run(*early, *cases(CASE))
    result.assert_outcomes(passed=2)  # by native, which needs no library


@pytest.mark.slow
def test_a_library_that_was_named_and_cannot_be_used_is_an_error_even_if_not_asked_for(run, monkeypatch, onednn):
    monkeypatch.setenv("PYBNORM_LIB_MIOPEN", "/nowhere/libMIOpen.so")
    result = run("--continue-on-collection-errors", *cases(CASE))
    outcomes = result.parseoutcomes()
    assert outcomes["errors"] == 1
    assert outcomes["passed"] >= 2
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*_ ERROR collecting pybnorm _*", "    PYBNORM_LIB_MIOPEN: /nowhere/libMIOpen.so: *", "ERROR pybnorm::miopen*"]
    )


# ---------------------------------------------------------------- statuses

MADE = """
import pybnorm.pytest_plugin as plugin
from pybnorm.check.judging.bounds import Status
from pybnorm.check.run.runner import CaseResult

def made(executor, info, problems, opener):
    for problem in problems:
        number = problem.seed
        status = list(Status)[number % 100]
        known = "a-known-defect" if number >= 100 else ""
        yield CaseResult(info.backend, str(problem), status, message=f"message of {status.value}", known=known)

plugin.executors.run_cases = made
"""
OUTCOMES = {status: "passed" if status.good else "failed" for status in Status}
OUTCOMES |= {Status.ERROR: "error", Status.UNSUPPORTED: "skipped"}


def outcomes(pytester):
    kinds = {"failure": "failed", "skipped": "skipped", "error": "error"}
    found = {}
    for test in ET.parse(pytester.path / "j.xml").iter("testcase"):
        child = next((c for c in test if c.tag in kinds), None)
        kind = "passed" if child is None else kinds[child.tag]
        expected = child is not None and child.get("type") == "pytest.xfail"
        found[test.get("name")] = "xfailed" if expected else kind, child
    return found


@pytest.mark.slow
@pytest.mark.parametrize("allow", [False, True])
def test_what_each_status_becomes(run, pytester, onednn, allow):
    lines = {f"{CASE},seed={i + k}": (s, k) for i, s in enumerate(Status) for k in (0, 100)}
    lines[CASE] = lines.pop(f"{CASE},seed=0")
    result = run(
        *("--junit-xml=j.xml", "--pybnorm-backend", "onednn", "pybnorm::", "-W", "default", "-rx"),
        *(["--pybnorm-allow-known"] if allow else []),
        *cases(*lines),
        conftest=MADE,
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    found = outcomes(pytester)
    assert set(found) == set(lines)
    for line, (status, known) in lines.items():
        expected = "xfailed" if allow and known and OUTCOMES[status] == "failed" else OUTCOMES[status]
        kind, element = found[line]
        assert kind == expected, line
        if kind == "failed":
            assert f"{status.value} onednn {line}\n" in element.text
            assert f"message of {status.value}" in element.text
            assert ("known defect: a-known-defect" in element.text) == bool(known)
            assert f"pybnorm check --backend onednn --case '{line}'" in element.text
        elif kind == "xfailed":
            assert element.get("message") == f"{status.value}, known defect: a-known-defect"
        elif kind == "skipped":
            assert element.get("message") == "onednn: message of UNSUPPORTED"
    result.stdout.fnmatch_lines([f"*AccuracyWarning: WARN onednn {CASE},seed=1: message of WARN"])
    text = result.stdout.str()
    assert text.count("AccuracyWarning: ") == 6  # WARN, CHAIN and MISTRUSTED
    assert "Traceback" not in text


@pytest.mark.slow
def test_known_defects_and_nothing_else_succeed_where_they_are_allowed(run, onednn):
    fail = 100 + list(Status).index(Status.FAIL)
    arguments = ("--pybnorm-backend", "onednn", *cases(f"{CASE},seed={fail}"), "pybnorm::")
    assert run(*arguments, conftest=MADE).ret == pytest.ExitCode.TESTS_FAILED
    allowed = run(*arguments, "--pybnorm-allow-known")
    allowed.assert_outcomes(xfailed=1)
    assert allowed.ret == 0
    run(*arguments, "--pybnorm-allow-known", "--runxfail").assert_outcomes(failed=1)


@pytest.mark.slow
def test_a_warning_can_be_made_a_failure(run, onednn):
    arguments = ("--pybnorm-backend", "onednn", *cases(f"{CASE},seed=1"), "pybnorm::")
    result = run(*arguments, conftest=MADE)  # filterwarnings = error
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"WARN onednn {CASE},seed=1", "  message of WARN"])
    category = "pybnorm.pytest_plugin.AccuracyWarning"
    run(*arguments, "-W", f"default::{category}").assert_outcomes(passed=1, warnings=1)


# ---------------------------------------------------------------- processes


def test_a_failure_is_reported_as_by_the_check(run, onednn):
    result = run("--pybnorm-backend", "onednn", *cases(CASE), conftest=opener("openers.open_wrong"))
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            f"*_ onednn {CASE} _*",
            "onednn: oneDNN *",
            f"FAIL onednn {CASE}",
            "  y: FAIL, wrong: inf times the bound *",
            "*index*reference*got*error / bound*",
            "* nan *inf*",
            f"  pybnorm check --backend onednn --case '{CASE}'",
            "*MIOpenDriver*",
            f"FAILED pybnorm::onednn::{CASE}*",
        ]
    )
    for word in ("Traceback", "_CaseError", "def runtest"):
        assert word not in result.stdout.str()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "word", "text"),
    [
        ("simulated.open_exiting", "CRASHED", "the library's process died: exit status 0"),
        ("simulated.open_aborting", "CRASHED", "the library's process died: SIGABRT"),
        ("openers.open_hanging", "TIMEOUT", "not done after 8 s; the process was killed"),
        ("simulated.open_nothing", "ERROR", "OSError: no such device"),
    ],
)
def test_a_library_that_dies_fails_its_item_and_not_the_session(run, onednn, name, word, text):
    arguments = ("--pybnorm-backend", "onednn", "--pybnorm-timeout", "8", "--pybnorm-jobs", "1", "pybnorm::")
    result = run(*arguments, *cases(CASE, CASE_3D), conftest=opener(name))
    if name == "simulated.open_nothing":
        result.assert_outcomes(errors=2)
    else:
        result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [f"{word} onednn {CASE}", f"  {text}", f"  pybnorm check --backend onednn --case '{CASE}'"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_processes_as_jobs_and_none_is_left(run, pytester, onednn, jobs):
    lines = [f"{CASE},seed={i}" for i in range(1, 13)]
    arguments = ("--pybnorm-backend", "onednn", "--pybnorm-jobs", str(jobs), "pybnorm::", *cases(*lines))
    run(*arguments, conftest=opener("openers.open_noting")).assert_outcomes(passed=12)
    assert len(processes(pytester)) == jobs
    assert not any(map(alive, processes(pytester)))


@pytest.mark.slow
def test_the_first_failure_ends_what_runs_ahead(run, pytester, onednn):
    started = time.monotonic()
    arguments = ("-x", "--pybnorm-backend", "onednn", "--pybnorm-jobs", "2", "pybnorm::", *cases(CASE_3D, CASE))
    text = (
        "\nimport pathlib, time\ndef pytest_runtest_teardown(item):\n"
        "    while len(list(pathlib.Path().glob('pid*'))) < 2:  # both have begun\n"
        "        time.sleep(0.01)\n"
        "    raise OSError"
    )
    run(*arguments, conftest=opener("openers.open_hanging") + text).assert_outcomes(passed=1, errors=1)
    assert time.monotonic() - started < 60
    assert len(processes(pytester)) == 2
    assert not any(map(alive, processes(pytester)))


@pytest.mark.slow
def test_an_item_that_is_repeated_runs_again(run, pytester, onednn):
    text = (
        opener("simulated.open_exiting")
        + "\nimport pathlib\nfrom _pytest.runner import runtestprotocol\ndef pytest_runtest_protocol(item, nextitem):\n"
        + "    reports = runtestprotocol(item, nextitem=nextitem, log=False)\n"
        + "    pathlib.Path(f'first-{item.name}').write_text(reports[1].outcome)"
    )
    arguments = ("--pybnorm-backend", "onednn", "pybnorm::", *cases(CASE_3D, CASE))
    run(*arguments, conftest=text).assert_outcomes(passed=1, failed=1)
    assert [(pytester.path / f"first-{case}").read_text() for case in (CASE_3D, CASE)] == ["passed", "failed"]


@pytest.mark.slow
def test_an_interrupt_ends_the_processes_too(run, pytester, onednn):
    pytester.makeconftest(opener("openers.open_hanging"))
    command = [sys.executable, "-m", "pytest", *loaded(), "--pybnorm-backend", "onednn", *cases(CASE), "pybnorm::"]
    with subprocess.Popen(
        command, cwd=pytester.path, stdout=subprocess.PIPE, text=True, preexec_fn=interruptible
    ) as process:
        while not processes(pytester):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        assert all(map(alive, processes(pytester)))
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    assert "KeyboardInterrupt" in out
    assert not any(map(alive, processes(pytester)))


@pytest.mark.slow
def test_distributed_workers_have_a_process_each(run, pytester, onednn):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    lines = [f"{CASE},seed={i}" for i in range(1, 13)]
    arguments = ("-n", "2", "--pybnorm-backend", "onednn", *cases(*lines, STRIDED))
    run(*arguments, conftest=opener("openers.open_noting")).assert_outcomes(passed=14)
    assert len(processes(pytester)) == 2
    assert not any(map(alive, processes(pytester)))
    run(*arguments, f"pybnorm::onednn::{lines[3]}").assert_outcomes(passed=1)
    wrong = run(*arguments, "pybnorm::onednn", conftest=opener("openers.open_wrong"))
    wrong.assert_outcomes(failed=13)
    wrong.stdout.fnmatch_lines([f"FAIL onednn {lines[0]}", "* nan *inf*"])
    refused = run(*arguments, "--pybnorm-jobs", "2")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: --pybnorm-jobs: not with pytest-xdist, *"])
    real = run("-n", "2", "--pybnorm-backend", "onednn", *cases(STRIDED), "pybnorm::", conftest="")
    real.assert_outcomes(skipped=1)
    assert real.ret == pytest.ExitCode.NO_TESTS_COLLECTED
