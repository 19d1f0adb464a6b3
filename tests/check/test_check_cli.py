"""The commands, on the libraries of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pybnorm

HERE = Path(__file__).parent
NOTHING_HERE = str(Path(__file__).with_name("nothing_here.py"))
ONE_CASE = ("check", "--backend", "onednn", "--case", "infer,spatial,f32,nchw,2x3x4x4")
NOWHERE = {f"PYBNORM_LIB_{name.upper()}": "/nonexistent/library.so" for name in pybnorm.backends()}


def clean_environment():
    dropped = ("PYBNORM_REQUIRE", "PYBNORM_LIB_", "FORCE_COLOR")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


def run(*arguments, program=("-m", "pybnorm"), **variables):
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env=clean_environment() | variables,
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def onednn():
    """The loaded library; its absence is a skip, or a failure where PYBNORM_REQUIRE lists it."""
    try:
        return pybnorm.load("onednn")
    except pybnorm.LibraryError as error:
        if "onednn" in os.environ.get("PYBNORM_REQUIRE", ""):
            pytest.fail(f"onednn is listed in PYBNORM_REQUIRE but: {error}")
        pytest.skip(f"onednn: {error}")


def without_library(*arguments, **variables):
    return run(*arguments, **(NOWHERE | variables))


def without_finding(*arguments, **variables):
    """Nothing is named, everything is searched, nothing is there."""
    package = Path(pybnorm.__file__).parents[1]
    return run(*arguments, program=(NOTHING_HERE,), PYTHONPATH=str(package), **variables)


# ---------------------------------------------------------------- without a library


def test_with_no_library_the_check_says_so_names_what_to_install_and_exits_with_2():
    done = without_finding("check")
    assert done.returncode == 2, done.stderr
    assert "No vendor library could run, so nothing was checked" in done.stdout
    assert "pip install onednn-cpu-gomp" in done.stdout
    assert "pip install nvidia-cudnn" in done.stdout
    assert "ROCm" in done.stdout
    for name in pybnorm.backends():
        assert f"{name}: absent: " in done.stdout
        assert f"    system loader: lib{name}-nowhere.so: " in done.stdout
    assert "PASS" not in done.stdout


def test_a_named_file_that_is_no_library_is_a_failure_with_its_reason_and_no_advice_to_install(tmp_path):
    file = tmp_path / "libdnnl.so.3"
    file.write_text("not ELF, but long enough to be read as the header that it does not have")
    done = run("check", "--backend", "onednn", PYBNORM_LIB_ONEDNN=str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"PYBNORM_LIB_ONEDNN: {file}: " in done.stdout
    assert "invalid ELF header" in done.stdout
    assert "PYBNORM_LIB_ONEDNN names a file that cannot be used" in done.stdout
    assert "pip install" not in done.stdout
    done = run("info", PYBNORM_LIB_ONEDNN=str(file))
    part = done.stdout[done.stdout.index("\nonednn ") :]
    assert f"PYBNORM_LIB_ONEDNN: {file}: " in part
    assert "invalid ELF header" in part
    assert "to have it" not in part


@pytest.mark.parametrize("variable", ["PYBNORM_REQUIRE", "PYBNORM_REQUIRE_DEVICE"])
def test_a_required_library_that_is_absent_is_a_failure(variable):
    done = without_finding("check", "--backend", "onednn", **{variable: "onednn, cudnn"})
    assert done.returncode == 1
    assert "cudnn was asked for and could not run" in done.stdout
    assert "onednn was asked for and could not run" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        (["--case", "train,spatial,f32,nchw"], {}, "operation,mode,dtype,layout,dims"),
        (["--case", "train,spatial,f7,nchw,2x3"], {}, "dtype: got f7, allowed: f32 | f64 | f16 | bf16"),
        (["--backend", "mkl"], {}, "--backend: got mkl, allowed: cudnn | miopen | onednn"),
        (["--suite", "all"], {}, "--suite: got all, allowed: smoke |"),
        ([], {"PYBNORM_REQUIRE": "cudn"}, "PYBNORM_REQUIRE: got cudn, allowed: cudnn"),
        (["--unknown"], {}, "No such option"),
    ],
)
def test_bad_arguments_exit_with_2_before_any_library_is_loaded(arguments, variables, text):
    done = run("check", *arguments, **variables)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stdout == ""


def test_info_lists_every_attempt_for_an_absent_library():
    done = without_library("info")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("/nonexistent/library.so") >= 3
    data = json.loads(without_library("info", "--json").stdout)
    assert [b["backend"] for b in data["backends"]] == list(pybnorm.backends())
    for backend in data["backends"]:
        assert not backend["loaded"]
        assert backend["attempts"][0][1] == "/nonexistent/library.so"
        assert backend["override"] == f"PYBNORM_LIB_{backend['backend'].upper()}"
        assert backend["hint"] == ""
    for backend in json.loads(without_finding("info", "--json").stdout)["backends"]:
        assert backend["override"] == ""
        assert backend["hint"]
        assert f"  to have it {backend['hint']}\n" in without_finding("info").stdout
    assert data["environment"]["pybnorm"] == pybnorm.__version__


# ---------------------------------------------------------------- on oneDNN


def test_the_smoke_suite_passes_on_onednn_within_its_time(onednn, tmp_path):
    target = tmp_path / "smoke.json"
    started = time.monotonic()
    done = run("check", "--backend", "onednn", "--json", str(target))
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    data = json.loads(target.read_text())
    statuses = [c["status"] for c in data["cases"]]
    assert set(statuses) <= {"PASS", "UNSUPPORTED"}
    assert statuses.count("PASS") >= 100
    assert data["exit_status"] == 0
    assert data["complete"]
    (backend,) = data["backends"]
    assert backend["version"] == list(onednn.version)
    assert backend["path"] == onednn.path
    for case in data["cases"]:
        assert case["case"] in done.stdout
        assert case["repro"] == f"pybnorm check --backend onednn --case '{case['case']}'"
        assert case["repeat"] == ("equal" if case["status"] == "PASS" else "")
        if case["status"] == "UNSUPPORTED":
            assert "Unsupported" in case["message"]
    assert seconds < 30


def test_a_case_prints_its_ratio_and_its_repro_line(onednn):
    line = "backward,spatial,bf16,nhwc,4x6x5x5,fill=randn,kappa=3,saved=0"
    done = run("check", "--backend", "onednn", "--case", line, "-v")
    assert done.returncode == 0, done.stdout
    assert f"pybnorm check --backend onednn --case '{line}'" in done.stdout
    assert "onednn: 1 cases, 1 PASS" in done.stdout
    rows = [text.split() for text in done.stdout.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["PASS"] and row[-1] == line and len(row) == 6]
    assert 0.5 < float(row[1]) < 1
    assert row[4] == "="


def test_json_alone_goes_to_standard_output(onednn):
    done = run("check", "--backend", "onednn", "--json", "--case", "infer,spatial,f32/f64,nchw,2x3x4x4")
    assert done.returncode == 0
    data = json.loads(done.stdout)
    assert [c["status"] for c in data["cases"]] == ["PASS", "UNSUPPORTED"]
    assert "1 PASS" in done.stderr


def test_nothing_but_unsupported_cases_is_not_success(onednn):
    done = run("check", "--backend", "onednn", "--case", "infer,spatial,f64,nchw,2x3x4x4")
    assert done.returncode == 2
    assert "No backend supports any of these cases" in done.stdout


def test_a_mistrusted_case_exits_with_1_and_says_why(onednn):
    done = run(
        "check", "--backend", "onednn", "--case", "infer,spatial,bf16,nchw,4x3x4x4,fill=randn,alpha=1e-06,beta=1"
    )
    assert done.returncode == 1
    assert "a change would not be noticed of: x, scale, bias, mean, variance, alpha" in done.stdout


def test_a_backend_that_was_asked_for_by_name_must_run(onednn):
    arguments = ("check", "--case", "infer,spatial,f32,nchw,2x3x4x4", "--backend", "onednn", "--backend", "cudnn")
    done = run(*arguments, PYBNORM_LIB_CUDNN="/nonexistent/library.so")
    assert done.returncode == 1
    assert "onednn: 1 cases, 1 PASS" in done.stdout
    assert "cudnn was asked for and could not run" in done.stdout


def test_a_named_file_that_cannot_be_used_fails_a_run_in_which_others_pass(onednn):
    case = "infer,spatial,f32,nchw,2x3x4x4"
    done = run("check", "--case", case, PYBNORM_LIB_MIOPEN=__file__)
    assert "onednn: 1 cases, 1 PASS" in done.stdout
    assert f"PYBNORM_LIB_MIOPEN: {__file__}: " in done.stdout
    assert "PYBNORM_LIB_MIOPEN names a file that cannot be used" in done.stdout
    assert "was asked for" not in done.stdout
    assert done.returncode == 1
    # set to nothing is not set
    done = run("check", "--backend", "onednn", "--case", case, PYBNORM_LIB_ONEDNN="", PYBNORM_LIB_MIOPEN=__file__)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- targets that take nothing


@pytest.mark.parametrize("target", ["/nonexistent/x.json", os.path.dirname(__file__)])
def test_a_json_target_that_cannot_be_opened_is_refused_before_the_run(target):
    done = run(*ONE_CASE, "--json", target)
    assert done.returncode == 2
    assert f"--json: got {target}, allowed: a file that can be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_json_target_that_takes_nothing_is_one_line_after_the_table(onednn):
    done = run(*ONE_CASE, "--json", "/dev/full")
    assert done.returncode == 2
    assert "onednn: 1 cases, 1 PASS" in done.stdout
    assert done.stderr == "Error: --json /dev/full cannot be written: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("redirection", "reason"),
    [(">&-", "it is closed"), (">/dev/full", "[Errno 28] No space left on device")],
)
@pytest.mark.parametrize("command", ["check --case infer,spatial,f32,nchw,2x3x4x4", "info", "info --json"])
def test_a_standard_output_that_takes_nothing_is_one_line(command, redirection, reason):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m pybnorm {command} {redirection}', sys.executable],
        env=clean_environment(),
        cwd=HERE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == f"Error: standard output cannot be written: {reason}\n"
    assert done.returncode == 2


# ---------------------------------------------------------------- interrupts


def test_an_interrupt_leaves_an_incomplete_table_and_json(onednn, tmp_path):
    suite, target = tmp_path / "long.txt", tmp_path / "result.json"
    suite.write_text("".join(f"infer,spatial,f32,nchw,2x3x4x4,seed={seed}\n" for seed in range(1, 20001)))
    with subprocess.Popen(
        [sys.executable, "-m", "pybnorm", "check", "--backend", "onednn", "--suite", str(suite), "--json", str(target)],
        env=clean_environment(),
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        first = process.stdout.readline()
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers too
        rest, errors = process.communicate(timeout=120)
    assert first.startswith("onednn: oneDNN")
    assert process.returncode == 130, errors
    assert errors == ""
    data = json.loads(target.read_text())
    assert not data["complete"]
    assert data["exit_status"] == 130
    assert 0 < len(data["cases"]) < 20000
    assert {c["status"] for c in data["cases"]} == {"PASS"}
    assert rest.count("PASS ") >= len(data["cases"])
    assert f"incomplete: {len(data['cases'])} of 20000 cases\n" in rest
    assert rest.endswith("interrupted\n")


def test_a_suite_may_be_a_file(onednn, tmp_path):
    suite = tmp_path / "mine.txt"
    suite.write_text("infer,spatial,f32,nchw,2x3x4x4 # one\n")
    done = run("check", "--backend", "onednn", "--suite", str(suite))
    assert done.returncode == 0
    assert "onednn: 1 cases, 1 PASS" in done.stdout
    suite.write_text("\ninfer,spatial,f32,nchw,2x3x4x\n")
    done = run("check", "--suite", str(suite))
    assert done.returncode == 2
    assert f"{suite}:2: dims: got 2x3x4x" in done.stderr


def test_info_describes_what_is_loaded(onednn):
    done = run("info")
    assert done.returncode == 0
    assert onednn.path in done.stdout
    assert onednn.found_via in done.stdout
    data = json.loads(run("info", "--json").stdout)
    found = next(b for b in data["backends"] if b["backend"] == "onednn")
    assert found["loaded"]
    assert found["problem"] == ""
    assert found["device"]
    answers = {
        (c["operation"], c["mode"], c["dtype"], c["layout"]): c["capability"]
        for c in found["capabilities"]
        if 4 in c["ranks"]
    }
    assert "RUNS" in answers["backward", "spatial", "f32", "nhwc"]
    assert answers["train", "spatial", "f64", "nchw"] == ""
    assert all(c["reason"] for c in found["capabilities"] if not c["capability"])


def test_the_reference_benchmark_prints_json():
    done = run("bench", "reference", "--repeats", "0")
    assert done.returncode == 2
    assert "--repeats" in done.stderr
