"""The commands, on the libraries of this machine."""

import json
import os
import subprocess
import sys
import time

import pytest

import pybnorm

NOWHERE = {f"PYBNORM_LIB_{name.upper()}": "/nonexistent/library.so" for name in pybnorm.backends()}


def run(*arguments, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYBNORM_REQUIRE", "FORCE_COLOR"))}
    return subprocess.run(
        [sys.executable, "-m", "pybnorm", *arguments],
        env=clean | variables,
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


# ---------------------------------------------------------------- without a library


def test_with_no_library_the_check_says_so_names_what_to_install_and_exits_with_2():
    done = without_library("check")
    assert done.returncode == 2, done.stderr
    assert "No vendor library could run, so nothing was checked" in done.stdout
    assert "pip install onednn-cpu-gomp" in done.stdout
    assert "pip install nvidia-cudnn" in done.stdout
    assert "ROCm" in done.stdout
    for name in pybnorm.backends():
        assert f"{name}: absent: " in done.stdout
    assert "PASS" not in done.stdout


@pytest.mark.parametrize("variable", ["PYBNORM_REQUIRE", "PYBNORM_REQUIRE_DEVICE"])
def test_a_required_library_that_is_absent_is_a_failure(variable):
    done = without_library("check", "--backend", "onednn", **{variable: "onednn, cudnn"})
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
        assert backend["hint"]
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
