"""The pytest plugin: what each status becomes, which cases are collected, and what is left of its processes."""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_runs import made_result
from simulated import alive, interruptible
from tables import table

import _pybnorm_pytestplugin
import pybnorm
import pybnorm.pytest_plugin  # before a run in this process, which would forget it
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import BackendInfo
from pybnorm.check.language.lines import load_suite
from pybnorm.check.run import executors

pytest_plugins = ("pytester",)

HERE = Path(__file__).parent
MODULE = "_pybnorm_pytestplugin"
CASE = "train,spatial,f32,nchw,8x3x4x4"
CASE_3D = "train,spatial,f32,nchw,8x3x4"
STRIDED = "infer,spatial,f64,nchw,2x3x4x4"  # oneDNN computes no float64
SEEDS = [f"{CASE_3D},seed={i}" for i in range(1, 13)]
ACTIVE = bool(importlib.metadata.entry_points(group="pytest11", name="pybnorm"))
ONEDNN = ("--pybnorm-backend", "onednn")

OPENERS = """
import os, pathlib, simulated

def noting(opener):
    (pathlib.Path(__file__).parent / f"pid{os.getpid()}").touch()
    return opener("onednn")

def open_exiting(backend):
    return noting(simulated.open_exiting)

def open_hanging(backend):
    return noting(simulated.open_hanging)
"""
OPENED = "import pybnorm.pytest_plugin, openers\npybnorm.pytest_plugin.open_session = openers.{}\n"


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with a test of its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]))
    for name in ("PYTEST_ADDOPTS", "PYBNORM_REQUIRE", "PYBNORM_REQUIRE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    pytester.makepyfile(test_own="def test_own(): pass", openers=OPENERS)
    pytester.makeini(  # other tests may have imported benchmarks
        "[pytest]\naddopts = --strict-config --strict-markers\nxfail_strict = true\n"
        "filterwarnings =\n  error\n  ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    )
    return pytester


@pytest.fixture
def run(project, onednn):
    """Runs pytest with the plugin and the real oneDNN in a process; `opener` is the kernels' in its workers."""

    def start(*arguments, opener=None, conftest=""):
        project.makeconftest(OPENED.format(opener) * bool(opener) + conftest)
        return project.runpytest_subprocess(*loaded(), *arguments, timeout=200)

    return start


class MadeFarm:
    """oneDNN, a library that is named and cannot be used, and none else."""

    def describe(self, backend):
        if backend == "onednn":
            return [BackendInfo(backend, "oneDNN", (3, 2, 0), "/lib", "made", device="a CPU")]
        if backend == "miopen" and "PYBNORM_LIB_MIOPEN" in os.environ:
            attempts = (("PYBNORM_LIB_MIOPEN", "/nowhere/libMIOpen.so", "no such file"),)
            return [BackendInfo(backend, problem="no", attempts=attempts, override="PYBNORM_LIB_MIOPEN")]
        return [BackendInfo(backend, problem="no", attempts=(("loader", f"lib{backend}", "gone"),), hint="install it")]

    def executor(self, backend, cases):
        return ThreadPoolExecutor(1)


@pytest.fixture
def made(project, monkeypatch):
    """Runs pytest with the plugin here; a case's seed is the number of its status, and of 100 on it is known."""
    monkeypatch.delenv("PYBNORM_LIB_MIOPEN", raising=False)

    def run_cases(executor, info, problems, opener):
        for problem in problems:
            status = list(Status)[problem.seed % 100]
            known = "a-known-defect" if problem.seed >= 100 else ""
            message = f"message of {status.value}"
            yield made_result(status, str(problem), info.backend, message=message, known=known)

    def opened(kind, **options):
        start.options = options
        return contextlib.nullcontext(MadeFarm())

    def start(*arguments, conftest=""):
        project.makeconftest(conftest)
        return project.runpytest_inprocess(*loaded(), *arguments)

    monkeypatch.setattr(executors, "opened", opened)
    monkeypatch.setattr(executors, "run_cases", run_cases)
    return start


def loaded():
    # hypothesis' plugin imports all of it at the end of every run: more than a second of processor time.
    return ("-p", "no:hypothesispytest", *(() if ACTIVE else ("-p", MODULE)))


def cases(*lines):
    return tuple(itertools.chain.from_iterable(("--pybnorm-case", line) for line in lines))


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


@table("missing", ["", "_core", "check", "pytest_plugin", "rich"])
def test_a_partly_installed_package_registers_nothing(tmp_path, monkeypatch, missing):
    (tmp_path / "pybnorm").mkdir()
    for part in {"__init__", "_core", "check", "pytest_plugin"} - {missing}:
        (tmp_path / "pybnorm" / f"{part}.py").touch()
    (tmp_path / "pybnorm" / (missing or "more")).mkdir()  # of sources only, as _core in a tree that is not built
    find = importlib.util.find_spec
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pybnorm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing == "rich" else find(name))
    asked = []
    group = SimpleNamespace(addoption=lambda name, **_: asked.append(name))
    _pybnorm_pytestplugin.pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))
    assert len(asked) == (0 if missing else 6)
    _pybnorm_pytestplugin.pytest_configure(SimpleNamespace(getoption=lambda name, default: default))


def test_a_package_that_does_not_import_is_a_usage_error(made, monkeypatch):
    monkeypatch.delattr(pybnorm, "pytest_plugin")
    monkeypatch.setitem(sys.modules, "pybnorm.pytest_plugin", None)
    broken = made("--pybnorm-suite", "smoke")
    assert broken.ret == pytest.ExitCode.USAGE_ERROR
    broken.stderr.fnmatch_lines(["ERROR: pybnorm cannot be imported: *"])


# ---------------------------------------------------------------- which cases


@pytest.mark.slow
def test_cases_are_items_beside_the_projects_own(run, pytester, onednn):
    lines = cases(CASE, STRIDED, "infer,spatial,f32,nchw/nhwc,2x3x4")
    result = run("-v", "-rs", "--junit-xml=j.xml", *ONEDNN, *lines)
    result.assert_outcomes(passed=4, skipped=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            f"onednn: oneDNN {'.'.join(map(str, onednn.version))}, *on *",
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
        (["--deselect", f"pybnorm::onednn::{CASE}"], 3),
    ],
)
def test_one_can_be_chosen(made, selection, passed):
    lines = [CASE, CASE_3D, "infer,spatial,f32,nhwc,2x3x4"]
    result = made(*ONEDNN, "--pybnorm-jobs", "3", "--pybnorm-timeout", "9", *cases(*lines), *selection)
    assert result.parseoutcomes()["passed"] == passed
    assert made.options == {"jobs": 3, "timeout": 9.0, "share": None}


@pytest.mark.slow
def test_a_suite_or_a_backend_alone_is_enough(made):
    outcomes = made(*ONEDNN, "pybnorm::", "--collect-only", "-q").parseoutcomes()
    assert outcomes == made("--pybnorm-suite", "smoke", "pybnorm::onednn", "--collect-only", "-q").parseoutcomes()
    assert outcomes["tests"] == len(load_suite("smoke"))


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
def test_a_bad_argument_is_a_usage_error(made, arguments, text):
    result = made(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*rror: {text}" if "argument" in text else f"ERROR: {text}"])


# ---------------------------------------------------------------- absent libraries


def test_an_absent_backend_that_was_asked_for_is_an_error_with_the_search(made):
    result = made("--pybnorm-backend", "cudnn", *cases(CASE))
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    lines = ["cudnn: absent: no", "    loader: libcudnn: gone", "    to have it: install it"]
    result.stdout.fnmatch_lines(["*_ ERROR collecting pybnorm _*", *lines])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_library_that_was_named_and_cannot_be_used_is_an_error_even_if_not_asked_for(made, monkeypatch):
    made(*cases(CASE)).assert_outcomes(passed=2)
    monkeypatch.setenv("PYBNORM_LIB_MIOPEN", "/nowhere/libMIOpen.so")
    result = made("--continue-on-collection-errors", *cases(CASE))
    result.assert_outcomes(errors=1, passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*_ ERROR collecting pybnorm _*", "    PYBNORM_LIB_MIOPEN: /nowhere/libMIOpen.so: *", "ERROR pybnorm::miopen*"]
    )


# ---------------------------------------------------------------- statuses

OUTCOMES = {status: "passed" if status.good else "failed" for status in Status}
OUTCOMES |= {Status.ERROR: "error", Status.UNSUPPORTED: "skipped"}


def outcomes(pytester):
    kinds = {"failure": "failed", "skipped": "skipped", "error": "error"}
    found = {}
    for test in ET.parse(pytester.path / "j.xml").iter("testcase"):
        child = next((c for c in test if c.tag in kinds), None)
        expected = child is not None and child.get("type") == "pytest.xfail"
        kind = "passed" if child is None else "xfailed" if expected else kinds[child.tag]
        found[test.get("name")] = kind, child
    return found


@pytest.mark.slow
@pytest.mark.parametrize("allow", [False, True])
def test_what_each_status_becomes(made, pytester, allow):
    lines = {f"{CASE},seed={i + k}": (s, k) for i, s in enumerate(Status) for k in (0, 100)}
    lines[CASE] = lines.pop(f"{CASE},seed=0")
    result = made(
        *("--junit-xml=j.xml", *ONEDNN, "pybnorm::", "-W", "default", "-rx"),
        *(["--pybnorm-allow-known"] if allow else []),
        *cases(*lines),
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
    result.stdout.fnmatch_lines([f"*AccuracyWarning: WARN onednn {CASE},seed=1: message of WARN*"])
    text = result.stdout.str()
    assert text.count("AccuracyWarning: ") == 6  # WARN, CHAIN and MISTRUSTED
    assert "Traceback" not in text


def of(status, known=0):
    return (*ONEDNN, *cases(f"{CASE},seed={known + list(Status).index(status)}"), "pybnorm::")


@pytest.mark.slow
def test_known_defects_and_nothing_else_succeed_where_they_are_allowed(made):
    assert made(*of(Status.FAIL, 100)).ret == pytest.ExitCode.TESTS_FAILED
    allowed = made(*of(Status.FAIL, 100), "--pybnorm-allow-known")
    allowed.assert_outcomes(xfailed=1)
    assert allowed.ret == 0
    made(*of(Status.FAIL, 100), "--pybnorm-allow-known", "--runxfail").assert_outcomes(failed=1)


@pytest.mark.slow
def test_a_warning_can_be_made_a_failure(made):
    result = made(*of(Status.WARN))  # filterwarnings = error
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"WARN onednn {CASE},seed=1", "  message of WARN"])
    category = "pybnorm.pytest_plugin.AccuracyWarning"
    made(*of(Status.WARN), "-W", f"default::{category}").assert_outcomes(passed=1, warnings=1)


@pytest.mark.slow
def test_a_run_that_judged_nothing_is_no_success(made):
    result = made(*of(Status.UNSUPPORTED), "test_own.py")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["pybnorm: no backend supports any of these cases, so nothing was checked."])


def test_a_failure_is_reported_as_by_the_check(made):
    result = made(*of(Status.FAIL), "test_own.py")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    line = f"{CASE},seed={list(Status).index(Status.FAIL)}"
    result.stdout.fnmatch_lines(
        [
            f"*_ onednn {line} _*",
            "onednn: oneDNN *",
            f"FAIL onednn {line}",
            "  y: FAIL, wrong: inf times the bound *",
            "*index*reference*got*error / bound*",
            "* nan *inf*",
            f"  pybnorm check --backend onednn --case '{line}'",
            "*MIOpenDriver*",
            f"FAILED pybnorm::onednn::{line}*",
        ]
    )
    for word in ("Traceback", "_CaseError", "def runtest"):
        assert word not in result.stdout.str()


def test_an_item_that_is_repeated_runs_again(made, pytester):
    text = (
        "import pathlib\nfrom _pytest.runner import runtestprotocol\ndef pytest_runtest_protocol(item, nextitem):\n"
        "    reports = runtestprotocol(item, nextitem=nextitem, log=False)\n"
        "    pathlib.Path(f'first-{item.name}').write_text(reports[1].outcome)"
    )
    fails = f"{CASE},seed={list(Status).index(Status.FAIL)}"
    made(*ONEDNN, "pybnorm::", *cases(CASE_3D, fails), conftest=text).assert_outcomes(passed=1, failed=1)
    assert [(pytester.path / f"first-{case}").read_text() for case in (CASE_3D, fails)] == ["passed", "failed"]


# ---------------------------------------------------------------- processes


@pytest.mark.slow
def test_a_library_that_dies_fails_its_item_and_no_process_is_left(run, pytester):
    result = run(*ONEDNN, "--pybnorm-jobs", "2", "pybnorm::", *cases(*SEEDS, CASE), opener="open_exiting")
    result.assert_outcomes(failed=1, passed=12)
    text = "  the library's process died: exit status 0"
    command = f"  pybnorm check --backend onednn --case '{CASE}'"
    result.stdout.fnmatch_lines([f"CRASHED onednn {CASE}", text, command])
    assert 2 <= len(processes(pytester)) <= 3
    assert not any(map(alive, processes(pytester)))


@pytest.mark.slow
def test_the_first_failure_ends_what_runs_ahead(run, pytester):
    text = (
        "import pathlib, time\ndef pytest_runtest_teardown(item):\n"
        "    while len(list(pathlib.Path().glob('pid*'))) < 2:  # both have begun\n"
        "        time.sleep(0.01)\n"
        "    raise OSError"
    )
    arguments = ("-x", "--pybnorm-timeout", "900", *ONEDNN, "--pybnorm-jobs", "2", "pybnorm::", *cases(CASE_3D, CASE))
    run(*arguments, opener="open_hanging", conftest=text).assert_outcomes(passed=1, errors=1)
    assert len(processes(pytester)) == 2
    assert not any(map(alive, processes(pytester)))


@pytest.mark.slow
def test_an_interrupt_ends_the_processes_too(project, onednn):
    project.makeconftest(OPENED.format("open_hanging"))
    command = [sys.executable, "-m", "pytest", *loaded(), *ONEDNN, *cases(CASE), "pybnorm::"]
    pipes = {"cwd": project.path, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=interruptible, **pipes) as process:
        while not processes(project):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        assert all(map(alive, processes(project)))
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, out
    assert "KeyboardInterrupt" in out
    assert not any(map(alive, processes(project)))


@pytest.mark.slow
def test_distributed_workers_have_a_process_each(run, made, pytester):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    arguments = ("-n", "2", *ONEDNN, *cases(*SEEDS, CASE, streams := f"{CASE_3D},streams=2"))
    result = run(*arguments, opener="open_exiting")
    result.assert_outcomes(failed=1, passed=13, skipped=1)
    result.stdout.fnmatch_lines([f"CRASHED onednn {CASE}"])
    assert len(processes(pytester)) in (2, 3)  # one may have come in place of that which died
    assert not any(map(alive, processes(pytester)))
    refused = run(*arguments, f"pybnorm::onednn::{streams}", opener="open_exiting")
    refused.assert_outcomes(skipped=1)
    assert refused.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    refused = made(*arguments, "--pybnorm-jobs", "2")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: --pybnorm-jobs: not with pytest-xdist, *"])
