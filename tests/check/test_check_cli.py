"""The commands, on the libraries of this machine."""

import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete, get_completion_class
from click.testing import CliRunner
from command_here import clean_environment, run
from rich.console import Console
from simulated import interruptible
from tables import table

import pybnorm
from pybnorm import cli
from pybnorm.check.language.lines import load_suite, packaged_suites
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import BackendInfo
from pybnorm.cli import info, main, output
from pybnorm.defects import DEFECTS

HERE = Path(__file__).parent
NOTHING_HERE = Path(__file__).with_name("nothing_here")
ONE_CASE = ("check", "--backend", "onednn", "--case", "infer,spatial,f32,nchw,2x3x4x4")
FILLED = "train,spatial,f32,nchw,2x3x4x5,fill="
NOWHERE = {f"PYBNORM_LIB_{name.upper()}": f"{__file__}/library.so" for name in pybnorm.backends()}


def started(arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", "pybnorm", *arguments], env=clean_environment(), cwd=HERE, **pipes, **options
    )


def process(*arguments, program, **variables):
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
def onednn(load_library):
    return load_library("onednn")


def without_library(*arguments, **variables):
    return run(*arguments, **(NOWHERE | variables))


def without_finding(*arguments, **variables):
    """Nothing is named, everything is searched, nothing is there."""
    package = Path(pybnorm.__file__).parents[1]
    return run(*arguments, PYTHONPATH=os.pathsep.join(map(str, (NOTHING_HERE, package))), **variables)


# ---------------------------------------------------------------- without a library


@pytest.mark.slow
def test_with_no_vendors_library_the_check_is_of_native():
    done = without_finding("check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2].startswith(f"native {pybnorm.__version__}: all ")


@pytest.mark.slow
def test_with_no_library_of_those_asked_for_the_check_says_what_to_install_and_exits_with_2():
    done = without_finding("check", *(f"--backend={name}" for name in ("cudnn", "miopen", "onednn")))
    assert done.returncode == 2, done.stderr
    assert "pip install onednn-cpu-gomp" in done.stdout
    assert "pip install nvidia-cudnn" in done.stdout
    assert "ROCm" in done.stdout
    for name in ("cudnn", "miopen", "onednn"):
        assert f"{name}: absent: " in done.stdout
        assert f"    system loader: lib{name}-nowhere.so: " in done.stdout
    assert "PASS" not in done.stdout


@pytest.mark.slow
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
    part = done.stdout[done.stdout.index("\nonednn ") :].partition("\nnative")[0]
    assert f"PYBNORM_LIB_ONEDNN: {file}: " in part
    assert "invalid ELF header" in part
    assert "to have it" not in part


@pytest.mark.slow
@table(
    ("arguments", "text"),
    [
        (["--case", "train,spatial,f32,nchw"], "operation,mode,dtype,layout,dims"),
        (["--case", "train,spatial,f7,nchw,2x3"], "dtype: got f7, allowed: f32 | f64 | f16 | bf16"),
        (["--case", "train,spatail,f32,nchw,2x3"], "--case train,spatail,f32,nchw,2x3: mode: got spatail (did you"),
        (["--case", "infer,spatial,f32,nchw,2x3", "--case", "infer,spatial,f32,nchw,2y3"], "--case infer,spatial,f32,n"
         "chw,2y3: dims"),
        (["--case", f"infer,spatial,f32,nchw,{'9' * 5000}x3"], "allowed: positive integers joined by x"),
        (["--case", f"infer,spatial,f32,nchw,2x3,seed={'9' * 5000}"], "allowed: an integer from 0 to"),
        (["--backend", "mkl"], "--backend: got mkl, allowed: cudnn | miopen | onednn"),
        (["--backend", "onednm"], "--backend: got onednm (did you mean 'onednn'?), allowed"),
        (["--require", "mkl"], "--require: got mkl, allowed: cudnn | miopen | onednn"),
        (["--suite", "all"], "suite: got all, allowed: "),
        (["--suite", "smoke", "--suite", "standart"], "--suite: got standart (did you mean 'standard'?)"),
        (["--data", "/no/such.npz"], "No such file or directory"),
        (["--library", __file__], "with one --backend, whose library it is"),
        (["--library", f"{__file__}/x", "--backend", "onednn"], "the name of a file"),
        (["--library", __file__, "--backend", "onednn", "--executor", "dask"], "an executor on this machine"),
        (["--executor", "pol"], "--executor: got pol (did you mean 'pool'?), allowed: pool | process | dask"),
        (["--executor", "process", "--jobs", "2"], "--jobs: got 2, allowed: not with --executor process"),
        (["--executor", "process", "--timeout", "2"], "--timeout: got 2.0, allowed: an executor other than process"),
        (["--jobs", "0"], "0 is not in the range x>=1"),
        *((["--timeout", word], "allowed: seconds > 0, at most 1000000") for word in ("0", "nan", "inf", "1e300")),
        (["--resume"], "--resume: got True, allowed: with --save DIR"),
        (["--save", "/proc/nowhere"], "--save: got /proc/nowhere, allowed: a folder that can be written"),
        *(([option, "-"], f"{option}: got -, allowed: a file; --json and") for option in ("--junit", "--html")),
        *(
            ([option, f"{__file__}/x"], f"{option}: got {__file__}/x, allowed: a file that can be written")
            for option in ("--json", "--junit", "--html")
        ),
        (["smoke"], "smoke is no argument (did you mean --suite smoke?)"),
        (["onednn"], "onednn is no argument (did you mean --backend onednn?)"),
        (["train,spatial,f32,nchw,2x3"], "(did you mean --case train,spatial,f32,nchw,2x3?)"),
        ([__file__], f"(did you mean --suite {__file__}?)"),
        (["nonsense"], "unexpected extra argument"),
        (["--unknown"], "No such option"),
        (["--suit", "smoke"], "--suite"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_before_anything_runs(arguments, text):
    done = without_library("check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Errno" not in done.stderr


def test_a_variable_that_names_no_backend_is_refused():
    done = run("check", PYBNORM_REQUIRE="cudn")
    assert done.returncode == 2
    assert "PYBNORM_REQUIRE: got cudn (did you mean 'cudnn'?), allowed: cudnn" in done.stderr


@pytest.mark.slow
def test_info_lists_every_attempt_for_an_absent_library():
    data = json.loads(without_library("info", "--json").stdout)
    assert [b["backend"] for b in data["backends"]] == list(pybnorm.backends())
    for backend in data["backends"]:
        assert not backend["loaded"]
        assert backend["attempts"][0][1] == f"{__file__}/library.so"
        assert backend["override"] == f"PYBNORM_LIB_{backend['backend'].upper()}"
        assert backend["hint"] == ""
    printed, brief = without_finding("info", "-v").stdout, without_finding("info").stdout
    assert "system loader: " in printed
    assert "system loader: " not in brief
    for backend in json.loads(without_finding("info", "--json").stdout)["backends"]:
        if backend["loaded"]:
            continue
        assert backend["override"] == ""
        assert backend["hint"]
        for text in (printed, brief):
            assert f"to have it {backend['hint']}" in " ".join(text.split())
        assert f"\n{backend['backend']}\n  absent     " in brief
    absent = brief.replace(brief[brief.index("\nnative ") : brief.index("\nnative_cuda")], "")  # the rest is a table
    assert max(map(len, absent.splitlines())) <= 80
    assert data["environment"]["pybnorm"] == pybnorm.__version__


# ---------------------------------------------------------------- on oneDNN


@pytest.mark.slow
def test_the_smoke_suite_passes_on_onednn(onednn, tmp_path):
    target = tmp_path / "smoke.json"
    done = run("check", "--backend", "onednn", "-v", "--json", str(target))
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
            reasons = ("Unsupported", "ArgumentTypeError: scale: ", "a CPU has no streams")
            assert any(reason in case["message"] for reason in reasons)


@pytest.mark.slow
def test_a_library_of_a_given_file_is_the_one_that_is_checked(onednn, tmp_path):
    """Whatever the environment names; the first line says which file was loaded, and how it was found."""
    own = tmp_path / "libmine.so"
    own.symlink_to(onednn.path)
    done = run(*ONE_CASE, "--library", str(own), PYBNORM_LIB_ONEDNN="/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"onednn: oneDNN {'.'.join(map(str, onednn.version))}, {own} (found via PYBNORM_LIB_")
    explained = run("check", "--backend", "onednn", "--library", __file__, "--explain", ONE_CASE[-1])
    assert explained.returncode == 1
    assert "the library named by PYBNORM_LIB_ONEDNN cannot be used, and no other is tried" in explained.stdout


@pytest.mark.slow
def test_a_case_prints_its_ratio_and_its_repro_line(onednn):
    line = "backward,spatial,f32,nhwc,4x6x5x5,fill=randn,kappa=3,saved=0"
    done = run("check", "--backend", "onednn", "--case", line, "-v")
    assert done.returncode == 0, done.stdout
    assert f"pybnorm check --backend onednn --case '{line}'" in done.stdout
    assert "onednn: 1 case, 1 PASS" in done.stdout
    rows = [text.split() for text in done.stdout.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["PASS"] and row[-1] == line and len(row) == 6]
    assert 0 < float(row[1]) < 1
    assert row[4] == "="


@pytest.mark.slow
def test_json_alone_goes_to_standard_output(onednn):
    done = run("check", "--backend", "onednn", "--json", "--case", "infer,spatial,f32/f64,nchw,2x3x4x4")
    assert done.returncode == 0
    data = json.loads(done.stdout)
    assert [c["status"] for c in data["cases"]] == ["PASS", "UNSUPPORTED"]
    assert "1 PASS" in done.stderr


@pytest.mark.slow
def test_nothing_but_unsupported_cases_is_not_success(onednn):
    done = run("check", "--backend", "onednn", "--case", "infer,spatial,f64,nchw,2x3x4x4")
    assert done.returncode == 2
    assert "No backend supports any of these cases" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--backend", "cudnn"), {}),
        (("--require", "cudnn"), {}),
        ((), {"PYBNORM_REQUIRE": "onednn, cudnn"}),
        ((), {"PYBNORM_REQUIRE_DEVICE": "cudnn"}),
    ],
)
def test_a_backend_that_was_asked_for_must_run(onednn, options, variables):
    done = run(*ONE_CASE, *options, PYBNORM_LIB_CUDNN=f"{__file__}/library.so", **variables)
    assert done.returncode == 1
    assert "onednn: 1 case, 1 PASS" in done.stdout
    assert "cudnn was asked for and could not run" in done.stdout
    assert "onednn was asked for" not in done.stdout


@pytest.mark.slow
def test_a_named_file_that_cannot_be_used_fails_a_run_in_which_others_pass(onednn):
    case = "infer,spatial,f32,nchw,2x3x4x4"
    done = run("check", "--case", case, PYBNORM_LIB_MIOPEN=__file__)
    assert "onednn: 1 case, 1 PASS" in done.stdout
    assert f"PYBNORM_LIB_MIOPEN: {__file__}: " in done.stdout
    assert "PYBNORM_LIB_MIOPEN names a file that cannot be used" in done.stdout
    assert "was asked for" not in done.stdout
    assert done.returncode == 1
    # set to nothing is not set
    done = run("check", "--backend", "onednn", "--case", case, PYBNORM_LIB_ONEDNN="", PYBNORM_LIB_MIOPEN=__file__)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- targets that take nothing


@pytest.mark.slow
def test_a_json_target_that_takes_nothing_is_one_line_after_the_table(onednn):
    done = run(*ONE_CASE, "--json", "/dev/full")
    assert done.returncode == 2
    assert "onednn: 1 case, 1 PASS" in done.stdout
    assert done.stderr == "Error: --json /dev/full cannot be written: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirection", "reason"),
    [
        ("check --case infer,spatial,f32,nchw,2x3x4x4", ">/dev/full", "No space left on device"),
        ("info", ">&-", "it is closed"),
        ("info --json", ">/dev/full", "No space left on device"),
    ],
)
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


@pytest.mark.slow
def test_a_run_that_comes_to_nothing_leaves_the_reports_that_were_there(onednn, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    files = {option: tmp_path / f"report{option}" for option in ("--json", "--junit", "--html")}
    options = [word for option, file in files.items() for word in (option, str(file))]

    def reports():
        return [file.read_text() for file in files.values()]

    assert run(*ONE_CASE, *options).returncode == 0
    yesterday = reports()
    suite, folder = tmp_path / "long.txt", tmp_path / "run"
    suite.write_text("".join(f"infer,spatial,f32,nchw,2x3x4x4,seed={seed}\n" for seed in range(1, 5001)))
    arguments = ("check", "--backend", "onednn", "--suite", str(suite), "--save", str(folder), *options)
    with started(arguments) as process:
        wait_for(process, folder / "journal.jsonl", 3)
        meanwhile = reports(), sorted(tmp_path.iterdir())
        process.kill()
        process.communicate(timeout=60)
    # nothing hidden that the kill would have left
    assert meanwhile == (yesterday, sorted((*files.values(), suite, folder)))
    assert reports() == yesterday
    # refused after the targets were opened: the journal is of another environment
    before = sorted(tmp_path.iterdir())
    assert run(*arguments, "--resume", ONEDNN_MAX_CPU_ISA="SSE41").returncode == 2
    assert reports() == yesterday
    assert sorted(tmp_path.iterdir()) == before
    for file in files.values():
        file.chmod(0o600)
    assert run(*ONE_CASE, "--case", "infer,spatial,f32,nchw,9x3x4x4", *options).returncode == 0
    assert all("9x3x4x4" in text for text in reports())
    assert {file.stat().st_mode & 0o777 for file in files.values()} == {0o600}
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_target_behind_a_link_is_written_where_it_points(onednn, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    assert run(*ONE_CASE, "--json", str(link)).returncode == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())["exit_status"] == 0


def refusals(folder):
    """Options that would lose a file, and what is said of them; made in `folder`."""
    thesis, link = folder / "thesis", folder / "link"
    thesis.write_text("of years")
    link.symlink_to(thesis)
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "spelling").symlink_to(folder)
    page, data = folder / "old.html", folder / "old.json"
    page.write_text('<!DOCTYPE html>\n<meta name="generator" content="pybnorm check">')
    data.write_text('{"schema": "pybnorm.check/1"}')
    os.link(data, folder / "hard")
    new = "allowed: a new file or an earlier"
    for option in ("--json", "--junit", "--html"):
        for name in ("thesis", "link"):
            yield [option, name], new
        for name in ("sub", "loop", "/"):
            yield [option, name], "this is no regular file"
        yield [option, "pipe"], "No such device or address"  # nobody reads it
        yield [option, ""], "allowed: the name of a file"
        yield [option, "no/where"], "No such file or directory"
        yield [option, "x" * 300], "File name too long"
    yield ["--json", "old.html"], new
    yield ["--html", "old.json"], new
    yield ["--junit", "old.json"], new
    for first, second in (("both", "both"), ("both", "./both"), ("both", "spelling/both"), ("old.json", "hard")):
        yield ["--json", first, "--html", second], f"another file than {first} of --json"
    yield ["--junit", "both", "--html", str(folder / "both")], "another file than both of --junit"
    for name in ("run.json", "journal.jsonl"):
        yield ["--save", "kept", "--html", f"spelling/kept/{name}"], f"another file than kept/{name} of --save"
    yield ["--json", "fresh", "--html", "thesis"], new  # nothing stays of the one that could be written
    yield ["--save", ""], "--save: got , allowed: the name of a folder"
    yield ["--save", "thesis"], "--save: got thesis"
    yield ["--save", "sub", "--json", "thesis"], new


def test_what_pybnorm_did_not_make_is_never_replaced(tmp_path, monkeypatch):
    """Refused by name, with 2, before the run; nothing changes and nothing is left beside it."""
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)

    def state():
        return {f: f.read_bytes() if f.is_file() and not f.is_symlink() else None for f in sorted(tmp_path.rglob("*"))}

    cases = list(refusals(tmp_path))
    before = state()
    for options, text in cases:
        done = CliRunner().invoke(cli.main, ["check", "--case", "infer,spatial,f32,nchw,2x3", *options])
        assert (done.exit_code, text in done.output) == (2, True), (options, done.output)
        assert f"{options[-2]}: got {options[-1]}" in done.output
        assert state() == before, options
    for command in (["compare", "."], ["selftest"]):
        done = CliRunner().invoke(cli.main, [*command, "--json", "old.json"])
        assert done.exit_code == 2, done.output
        assert state() == before, command


def test_a_report_that_appears_during_the_run_is_not_lost(tmp_path):
    from pybnorm import _files
    from pybnorm.errors import ArgumentError

    kind, file = _files.Kind("a file of tests", "made here"), tmp_path / "file"

    def write(meanwhile):
        with _files.replaced("--x", file, kind) as stream:
            stream.write(b"made here")
            meanwhile()

    with pytest.raises(ArgumentError, match="another file"):
        write(lambda: file.write_text("thesis"))
    assert [f.read_text() for f in tmp_path.iterdir()] == ["thesis"]
    file.write_text("made here before")
    with pytest.raises(ZeroDivisionError):
        write(lambda: 1 / 0)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["made here before"]
    with _files.replaced("--x", file, kind) as stream:
        stream.write(b"made here now")
    assert [f.read_text() for f in tmp_path.iterdir()] == ["made here now"]


def test_an_empty_file_is_replaced_and_never_removed(tmp_path):
    from pybnorm import _files
    from pybnorm.errors import ArgumentError

    kind = _files.Kind("a file of tests", "made here")
    number, name = tempfile.mkstemp(dir=tmp_path)
    os.close(number)
    with pytest.raises(ArgumentError, match="this is another file"):
        _files.remove("--x", name, kind)
    _files.try_to_write("--x", name, kind)
    with pytest.raises(ArgumentError, match="this is another file"), _files.replaced("--x", name, kind):
        Path(name).write_text("thesis")  # by somebody else, during the run
    assert Path(name).read_text() == "thesis"
    os.truncate(name, 0)
    with _files.replaced("--x", name, kind) as stream:
        stream.write(b"made here")
    assert [(f.read_text(), f.stat().st_mode & 0o777) for f in tmp_path.iterdir()] == [("made here", 0o600)]


def test_a_link_to_the_report_of_another_user_is_not_followed(tmp_path, monkeypatch):
    from pybnorm import _files
    from pybnorm.errors import ArgumentError

    kind, file, link = _files.Kind("a file of tests", "made here"), tmp_path / "file", tmp_path / "link"
    file.write_text("made here")
    link.symlink_to(file)
    assert _files.check("--x", link, kind) == str(file)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ArgumentError, match="no link to another user's file"):
        _files.check("--x", link, kind)
    assert _files.check("--x", file, kind) == str(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirection"), [("check --backend onednn", "2>&1"), ("info", ""), ("info --json", "2>&1")]
)
def test_a_reader_that_has_seen_enough_is_no_verdict(onednn, command, redirection):
    script = f'"$0" -m pybnorm {command} {redirection} | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable],
        env=clean_environment(),
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.slow
def test_a_library_that_does_not_answer_is_told_from_one_that_died(onednn):
    done = run(*ONE_CASE, "--timeout", "0.001")
    assert done.returncode == 2
    assert "onednn: absent: did not answer in 0.001 s (--timeout)\n" in done.stdout


# ---------------------------------------------------------------- interrupts


def wait_for(process, journal, lines):
    """Until a run has noted its start and some cases."""
    while not journal.is_file() or journal.read_text().count("\n") < lines:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@pytest.mark.slow
def test_an_interrupt_leaves_an_incomplete_table_and_json(onednn, tmp_path):
    suite, target = tmp_path / "long.txt", tmp_path / "result.json"
    suite.write_text("".join(f"infer,spatial,f32,nchw,2x3x4x4,seed={seed}\n" for seed in range(1, 5001)))
    arguments = ("check", "--backend", "onednn", "--suite", str(suite), "--json", str(target))
    arguments = (*arguments, "--save", str(tmp_path / "run"))
    with started(arguments, start_new_session=True, preexec_fn=interruptible) as process:
        first = process.stdout.readline()
        wait_for(process, tmp_path / "run" / "journal.jsonl", 10)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers too
        rest, errors = process.communicate(timeout=120)
    for host in {case["host"] for case in json.loads(target.read_text())["cases"]}:
        with pytest.raises(ProcessLookupError):
            os.kill(int(host.rpartition(":")[2]), 0)
    assert first.startswith("onednn: oneDNN")
    assert process.returncode == 130, errors
    assert errors == ""
    data = json.loads(target.read_text())
    assert not data["complete"]
    assert data["exit_status"] == 130
    assert 0 < len(data["cases"]) < 5000
    assert {c["status"] for c in data["cases"]} == {"PASS"}
    assert f"onednn: {len(data['cases'])} cases, {len(data['cases'])} PASS\n" in rest
    assert f"incomplete: {len(data['cases'])} of 5000 cases\n" in rest
    *_, told, again, last = rest.splitlines()
    assert told == "interrupted"
    given = f"check --backend onednn --suite {suite} --json {target} --save {tmp_path / 'run'}"
    assert again == f"go on with it: pybnorm {given} --resume"
    assert re.fullmatch(rf"oneDNN [\d.]+: so far, all {len(data['cases'])} supported cases are within .*\.", last), last


def test_progress_goes_to_standard_error_where_no_terminal_shows_it(monkeypatch, capsys):
    monkeypatch.setattr(output, "EVERY", 0.0)
    with output.progress(output.console()) as progress:
        task = progress.add_task("check")
        progress.update(task, description="onednn", completed=3, total=7)
        time.sleep(0.01)
        progress.update(task, completed=5, total=7)
    captured = capsys.readouterr()
    assert re.fullmatch(r"(onednn: 3 of 7, \d+ s\n){1,2}onednn: 5 of 7, \d+ s, [\d.e+]+/s, 1 s left\n", captured.err)
    assert captured.out == ""
    monkeypatch.setattr(output, "EVERY", 1e9)
    with output.progress(output.console()) as progress:
        progress.update(progress.add_task("check"), description="onednn", completed=3, total=7)
    assert capsys.readouterr().err == ""


@table(
    ("option", "typed", "found"),
    [
        ("--backend", "on", ["onednn"]),
        ("--suite", "sta", ["standard"]),
        ("--suite", "./mine", ["./mine"]),
        ("--case", "train,sp", ["train,spatial,"]),
        ("--explain", "train/inf", ["train/infer,"]),
        ("--case", "train,spatial,f32,nchw,2x3x4x5,fill=ra", [f"{FILLED}{w}" for w in ("randn", "ramp", "range")]),
        ("--case", f"{FILLED}exact/pa", [f"{FILLED}exact/paired"]),
        ("--case", f"{FILLED}exact,saved=", [f"{FILLED}exact,saved=0", f"{FILLED}exact,saved=1"]),
        ("--case", f"{FILLED}exact,algorithm=gr", [f"{FILLED}exact,algorithm=graph"]),
        ("--require", "cu", ["cudnn"]),
        ("--executor", "p", ["pool", "process"]),
        ("--from", "mi", ["miopendriver"]),
        ("--case", "train,spatial,f32,nchw,2x3x4x5,rep", ["train,spatial,f32,nchw,2x3x4x5,repeats="]),
        ("--case", "train,spatial,f32,nchw,2x", []),
        ("--case", "nonsense,spatial,f32,nchw,2x3,", []),
    ],
)
def test_a_shell_completes(option, typed, found):
    complete = ShellComplete(cli.main, {}, "pybnorm", "_PYBNORM_COMPLETE")
    assert [item.value for item in complete.get_completions(["check", option], typed)] == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_up_to_the_cursor_is_completed(shell, monkeypatch):
    importlib.import_module("pybnorm.cli.shells")  # as the command does where a shell asks
    complete = get_completion_class(shell)(cli.main, {}, "pybnorm", "_PYBNORM_COMPLETE")

    def asked(line):
        monkeypatch.setenv("COMP_LINE", line)
        complete.typed = ""
        return complete.complete().split("\n")

    cut = shell == "bash"  # which replaces what stands behind the last = only
    assert asked("pybnorm chec") == ["plain,check"]
    assert asked("pybnorm check --suite smok") == ["plain,smoke"]
    assert asked("pybnorm check --suite=smok") == ["plain,smoke" if cut else "plain,--suite=smoke"]
    assert asked("pybnorm check --suite ./mine") == ["file,./mine"]
    assert asked(f"pybnorm check --case {FILLED}randn/le") == [
        "plain,randn/level" if cut else f"plain,{FILLED}randn/level"
    ]
    assert asked(f"pybnorm check --case '{FILLED}le") == [f"plain,{FILLED}level"]
    assert asked("pybnorm check --backend ") == [f"plain,{name}" for name in pybnorm.backends()]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_real_shell_completes(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    line = f"pybnorm check --case {FILLED}lev"
    asked = {
        "bash": f"COMP_LINE='{line}' COMP_POINT={len(line)}; _pybnorm_completion pybnorm; echo \"${{COMPREPLY[@]}}\"",
        "fish": f"complete -C'{line}'",
    }
    load = {
        "bash": 'eval "$(_PYBNORM_COMPLETE=bash_source pybnorm)"',
        "fish": "_PYBNORM_COMPLETE=fish_source pybnorm | source",
    }
    (tmp_path / "pybnorm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pybnorm "$@"\n')
    (tmp_path / "pybnorm").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = f"{load[shell]}\n{asked[shell]}"
    done = subprocess.run([shell, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == {"bash": "level\n", "fish": f"{FILLED}level\n"}[shell]


@pytest.mark.slow
def test_the_suites_are_listed_with_their_sizes():
    done = run("check", "--list-suites")
    assert done.returncode == 0
    rows = dict(line.split()[:2] for line in done.stdout.splitlines())
    assert tuple(rows) == packaged_suites()
    assert int(rows["smoke"]) == len(load_suite("smoke"))


@pytest.mark.slow
def test_a_suite_may_be_a_file(onednn, tmp_path):
    suite = tmp_path / "mine.txt"
    suite.write_text("infer,spatial,f32,nchw,2x3x4x4 # one\n")
    done = run("check", "--backend", "onednn", "--suite", str(suite))
    assert done.returncode == 0
    assert "onednn: 1 case, 1 PASS" in done.stdout
    suite.write_text("\ninfer,spatial,f32,nchw,2x3x4x\n")
    done = run("check", "--suite", str(suite))
    assert done.returncode == 2
    assert f"{suite}:2: dims: got 2x3x4x" in done.stderr


@pytest.mark.slow
def test_info_describes_what_is_loaded(onednn):
    done = run("info")
    assert done.returncode == 0
    assert onednn.path in done.stdout
    assert onednn.found_via in done.stdout
    lines = done.stdout.splitlines()
    heads = [i for i, line in enumerate(lines) if line.partition(" ")[0] in pybnorm.backends()]
    absent = [lines[i + 1].startswith("  absent ") for i in heads]
    assert (len(heads), absent) == (len(pybnorm.backends()), sorted(absent))  # what is here comes first
    known = [d.id for d in DEFECTS if d.backend == "onednn" and d.in_version(onednn.version)]
    assert all(f"- {identity}: " in done.stdout for identity in known)
    assert "miopen-backward" not in done.stdout
    data = json.loads(run("info", "--json").stdout)
    found = next(b for b in data["backends"] if b["backend"] == "onednn")
    assert found["loaded"]
    assert found["problem"] == ""
    assert found["device"]
    assert found["known_defects"] == known
    answers = {
        (c["operation"], c["mode"], c["dtype"], c["layout"]): c["capability"]
        for c in found["capabilities"]
        if 4 in c["ranks"]
    }
    assert "RUNS" in answers["backward", "spatial", "f32", "nhwc"]
    assert answers["train", "spatial", "f64", "nchw"] == ""
    assert all(c["reason"] for c in found["capabilities"] if not c["capability"])


@pytest.mark.parametrize(("version", "said"), [((3, 5, 1), False), ((3, 6, 0), True)])
def test_info_says_which_versions_no_run_has_seen(version, said):

    console = Console(file=io.StringIO(), width=300)
    row = {"operation": "train", "mode": "spatial", "dtype": "f32", "layout": "nchw", "ranks": [4]}
    row |= {"capability": "RUNS", "reason": ""}
    info._print_info(console, BackendInfo("miopen", "MIOpen", path="/libMIOpen.so", version=version), [row])
    assert ("it is taken to have the known defects of 3.5.1" in " ".join(console.file.getvalue().split())) == said


# ---------------------------------------------------------------- how a run is made

INFER = "infer,spatial,f32,nchw,2x3x4x4,seed="
LONG = "train,spatial,f32,nchw,1x1x1000x1000,fill=randn"  # a known defect of oneDNN up to 3.2


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_list_prints_lines_and_loads_nothing():
    case = "train/infer,spatial,f32,nchw,2x3x4x4"
    done = without_library("check", "--case", case, "--list")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "train,spatial,f32,nchw,2x3x4x4\ninfer,spatial,f32,nchw,2x3x4x4\n"
    verbose = without_library("check", "--case", case, "--list", "-v").stdout.splitlines()
    assert [line for line in verbose if not line.startswith(" ")] == done.stdout.splitlines()
    assert any("MIOpenDriver bnorm" in line for line in verbose)
    assert any("--bnorm" in line for line in verbose)


def test_suites_and_cases_add_up(tmp_path):
    suites = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for suite, seeds in zip(suites, ("1/2", "2/3"), strict=True):
        suite.write_text(INFER + seeds + "\n")
    done = run("check", "--suite", str(suites[0]), "--case", INFER + "9", "--suite", str(suites[1]), "--list")
    assert done.stdout.splitlines() == [INFER + seed for seed in "9123"]


@pytest.mark.slow
def test_fail_fast_stops_after_the_first_failure(onednn, tmp_path):
    suite, target = tmp_path / "suite.txt", tmp_path / "run.json"
    wrong = "train,spatial,f32,nchw,4x3x4x4,fill=constant,magnitude=1e+10"  # no bound says anything of it
    suite.write_text(f"{INFER}1/2\n{wrong}\n{INFER}{'/'.join(map(str, range(3, 60)))}\n")
    arguments = ("check", "--backend", "onednn", "--suite", str(suite), "--jobs", "1", "--json", str(target))
    done = run(*arguments, "--fail-fast")
    assert done.returncode == 1, done.stdout
    data = json.loads(target.read_text())
    assert not data["complete"]
    assert [c["case"] for c in data["cases"]][:3] == [INFER + "1", INFER + "2", wrong]
    assert len(data["cases"]) < 20
    assert "stopped by --fail-fast" in done.stdout
    assert run(*arguments).returncode == 1
    assert len(json.loads(target.read_text())["cases"]) == 60


@pytest.mark.slow
def test_long_chains_of_sums_fail_only_where_strictness_is_asked_for(onednn, tmp_path):
    target = tmp_path / "run.json"
    arguments = ("check", "--backend", "onednn", "--case", LONG, "--json", str(target))
    done = run(*arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0
    assert "1 only within that of long chains of sums (CHAIN)" in done.stdout
    (case,) = json.loads(target.read_text())["cases"]
    assert case["status"] == "CHAIN"
    assert run(*arguments, "--strict", OMP_NUM_THREADS="1").returncode == 1
    wrong = ("--case", "train,spatial,f32,nchw,4x3x4x4,fill=constant,magnitude=1e10")
    assert run(*arguments, *wrong, "--allow-known", OMP_NUM_THREADS="1").returncode == 1


@pytest.mark.slow
def test_a_case_beyond_its_time_is_a_timeout_and_the_rest_goes_on(onednn, tmp_path):
    target = tmp_path / "run.json"
    slow = "train,spatial,f32,nchw,1x1x2000x2000,repeats=1000"  # minutes
    cases = ("--case", slow, "--case", INFER + "1/2/3")
    done = run("check", "--backend", "onednn", *cases, "--timeout", "8", "--jobs", "1", "--json", str(target))
    assert done.returncode == 1
    statuses = {c["case"]: c["status"] for c in json.loads(target.read_text())["cases"]}
    assert statuses == {slow: "TIMEOUT"} | {INFER + seed: "PASS" for seed in "123"}
    assert "not done after 8 s; the process was killed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("word", "text"), [("nump", "numpy | cupy | torch"), ("cupy", "cupy is not")])
def test_a_judge_that_is_not_there_is_refused_before_the_run(word, text):
    if word == "cupy" and importlib.util.find_spec("cupy"):
        pytest.skip("CuPy is installed")
    done = run(*ONE_CASE, PYBNORM_JUDGE=word)
    assert done.returncode == 2
    assert f"PYBNORM_JUDGE: got {word}" in done.stderr
    assert text in done.stderr
    assert "judged" not in done.stdout


@pytest.mark.slow
def test_a_saved_run_has_its_outputs_and_resumes_where_it_was_interrupted(onednn, tmp_path):
    folder, suite = tmp_path / "run", tmp_path / "suite.txt"
    suite.write_text(f"{INFER}{'/'.join(map(str, range(1, 401)))}\n")
    arguments = [
        *("check", "--backend", "onednn", "--suite", str(suite), "--jobs", "1", "--save", str(folder)),
        *("--json", str(tmp_path / "run.json")),
    ]
    with started(arguments, preexec_fn=interruptible) as process:
        journal = folder / "journal.jsonl"
        wait_for(process, journal, 10)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    interrupted = json.loads((folder / "run.json").read_text())
    before = [c["case"] for c in interrupted["cases"]]
    assert 9 <= len(before) < 400
    assert not interrupted["complete"]
    assert run(*arguments).returncode == 2  # holds a run already
    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((folder / "run.json").read_text())
    assert data["complete"]
    assert [c["case"] for c in data["cases"]] == [f"{INFER}{seed}" for seed in range(1, 401)]
    assert data["cases"] == json.loads((tmp_path / "run.json").read_text())["cases"]
    again = {c["case"]: c for c in data["cases"]}
    assert [again[c["case"]] for c in interrupted["cases"]] == interrupted["cases"]  # host and time: not run twice
    assert all((folder / c["saved"]).is_file() for c in data["cases"])
    cases = [line["case"] for line in lines_of(journal) if "case" in line]
    assert sorted(cases) == sorted(again)


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_of_info_waits_for_no_library_that_hangs(interrupts):
    code = """
import importlib, os, signal, time
from pybnorm.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
info, once = importlib.import_module("pybnorm.cli.info"), [signal.SIGINT]
def ask(worker):
    with worker:
        for number in once[:1]:
            once.clear()
            os.kill(os.getpid(), number)
        worker.call(time.sleep, 600)
def end(worker, end=info.Worker.end):
    if again:
        os.kill(os.getpid(), signal.SIGINT)
    end(worker)
info._ask, info.Worker.end = ask, end
main(["info"], prog_name="pybnorm")
"""
    done = process(program=("-c", f"again = {interrupts - 1}{code}"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize(("at", "saves"), [(2, True), (4, True), (4, False)])
def test_an_interrupt_beside_a_result_loses_and_repeats_nothing(onednn, tmp_path, at, saves):
    """After the last case it changes nothing: the run is complete."""
    folder, target = tmp_path / "run", tmp_path / "run.json"
    arguments = ["check", "--backend", "onednn", "--jobs", "1", "--case", f"{INFER}1/2/3/4", "--json", str(target)]
    arguments += ["--save", str(folder)] if saves else []
    code = f"""
import signal
from pybnorm.check.run.whole_run import WholeRun
from pybnorm.cli import main
keep, kept = WholeRun._keep, []
def interrupted(self, result):
    kept.append(result)
    if len(kept) == {at}:
        signal.raise_signal(signal.SIGINT)
    keep(self, result)
WholeRun._keep = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
main(prog_name="pybnorm")
"""
    done = process(*arguments, program=("-c", code))
    told = json.loads(target.read_text())["cases"]
    assert at <= len(told) <= 4
    assert done.returncode == (0 if len(told) == 4 else 130), done.stdout + done.stderr
    if saves:
        assert run(*arguments, "--resume").returncode == 0
        assert json.loads((folder / "run.json").read_text())["cases"][: len(told)] == told
        cases = [line["case"] for line in lines_of(folder / "journal.jsonl") if "case" in line]
        assert cases == [f"{INFER}{seed}" for seed in (1, 2, 3, 4)]


def limited(size):
    """The command with files of up to `size` bytes, in its workers too."""
    return (
        "-c",
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}));"
        "from pybnorm.cli import main; main(prog_name='pybnorm')",
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 6000])
def test_a_journal_that_takes_no_more_ends_the_run_with_one_line(onednn, tmp_path, size):
    folder = tmp_path / "run"
    arguments = ("check", "--backend", "onednn", "--case", INFER + "/".join(map(str, range(50))), "--save", str(folder))
    done = process(*arguments, program=limited(size))
    assert done.returncode == 2, done.stdout
    assert done.stderr == f"Error: --save {folder} cannot be written: File too large\n"
    if size > 1000:
        assert "stopped by --save, which takes no more" in done.stdout
        assert " PASS\n" in done.stdout  # what was judged is told


@pytest.mark.slow
def test_outputs_that_cannot_be_kept_end_the_run(onednn, tmp_path):
    """The journal would take more; the large outputs of the first case do not go beside it."""
    folder, target = tmp_path / "run", tmp_path / "run.json"
    large = "infer,spatial,f32,nchw,8x16x64x64,fill=randn,repeats=1"  # 2 MB
    cases = ("--case", large, "--case", INFER + "/".join(map(str, range(30))))
    arguments = ("check", "--backend", "onednn", "--jobs", "1", "--save", str(folder), "--json", str(target), *cases)
    done = process(*arguments, program=limited(1_000_000))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr == f"Error: --save {folder} cannot be written: File too large\n"
    assert "onednn: 1 case, 1 RESOURCE\n" in done.stdout
    data = json.loads(target.read_text())
    assert not data["complete"]
    assert data["exit_status"] == 2
    assert [c["case"] for c in data["cases"]] == [large]
    again = run(*arguments, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "onednn: 31 cases, 31 PASS\n" in again.stdout


@pytest.mark.slow
def test_a_support_record_of_this_machine_is_printed(onednn):
    done = run("info", "--claims", "onednn")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert record["first"] == list(onednn.version)
    assert record["source"].endswith(f" on {pybnorm.devices.device_for(1).name}")
    assert {d for c in record["combinations"] for d in c["dtypes"]} >= {"f32"}
    assert run("info", "--claims", "mkl").returncode == 2
    assert without_library("info", "--claims", "onednn").returncode == 1


@pytest.mark.slow
def test_shards_are_all_cases_once():
    case = ("check", "--backend", "native", "--list", "--suite", "smoke")
    whole = run(*case).stdout.split("\n")
    shares = [run(*case, "--shard", f"{k}/3").stdout.split("\n") for k in (1, 2, 3)]
    assert sorted(itertools.chain(*shares)) == sorted([*whole, "", ""])
    for word in ("0/3", "4/3", "1", "1/0", "a/b", "9999/100000"):
        done = run(*case, "--shard", word)
        assert (done.returncode, "--shard: got" in done.stderr) == (2, True), word


def test_helps_are_whole_sentences_in_sections(tmp_path, monkeypatch):
    commands = run("--help").stdout.partition("Commands:")[2].strip().splitlines()
    assert len(commands) == 9
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)
    shown = run("check", "--help").stdout
    assert [title for title in ("What to run:", "How:", "What to write:", "Other options:") if title not in shown] == []
    assert shown.partition("Other options:")[2].split() == ["-h,", "--help", "Show", "this", "message", "and", "exit."]
    monkeypatch.chdir(tmp_path)  # where no benchmarks are
    monkeypatch.setattr(pybnorm, "__file__", str(tmp_path / "pybnorm" / "__init__.py"))
    done = CliRunner().invoke(main, ["bench", "--help"])
    assert (done.exit_code, "source tree" in done.output) == (0, True)
    assert CliRunner().invoke(main, ["bench", "device"]).exit_code == 2


@pytest.mark.slow
def test_a_first_run_ends_in_its_verdict_and_one_command(onednn, monkeypatch):
    command = importlib.import_module("pybnorm.cli.check")
    monkeypatch.setattr(command, "select", lambda *_: [Problem.parse(ONE_CASE[-1])])  # in place of the suite smoke
    monkeypatch.setattr(command.support, "run_of", lambda *_: None)  # as of a version that the package has none of
    said = [CliRunner().invoke(main, ["check", "--backend", "onednn", *more]).stdout for more in ([], ["-v"])]
    for text in said:
        *_, verdict, last = text.splitlines()
        assert "the one supported case is within its bounds" in verdict
        assert last == "Next: pybnorm check --suite standard"
    assert ["no record of a run" in text for text in said] == [False, True]
    assert "Next:" not in CliRunner().invoke(main, ONE_CASE).stdout


def test_a_group_suggests_the_command_that_was_meant_and_cuts_no_help(monkeypatch):
    monkeypatch.chdir(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))  # where the benchmarks are
    assert "'device'" in run("bench", "devic").stderr
    for group in ("bench", "claims"):
        assert "..." not in run(group, "--help").stdout.partition("Commands:")[2]


def test_why_an_implementation_cannot_be_imported_is_said_once():
    done = run("check", "--implementation", "no_such_module:f")
    assert done.returncode == 2
    assert done.stdout.count("No module named") == 1
    assert "ArgumentError" not in done.stdout


def test_a_folder_without_a_run_is_said_to_have_none(tmp_path):
    assert "(it has no run.json)" in run("compare", tmp_path).stderr
