"""The commands, on the libraries of this machine and on results that are made up."""

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
from command_here import clean_environment, run
from made_runs import made_result
from rich.console import Console
from simulated import interruptible
from tables import table

import pybnorm
from pybnorm import _files, cli
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.lines import load_suite
from pybnorm.check.run import executors
from pybnorm.check.run.runner import BackendInfo
from pybnorm.cli import info, output
from pybnorm.defects import DEFECTS
from pybnorm.errors import ArgumentError

HERE = Path(__file__).parent
CASE = "infer,spatial,f32,nchw,2x3x4x4"
SEEDS = f"{CASE},seed="
ONEDNN = ("check", "--backend", "onednn")
NATIVE = f"check --backend native --executor process --case {CASE}"
FILLED = "train,spatial,f32,nchw,2x3x4x5,fill="
NOWHERE = {f"PYBNORM_LIB_{name.upper()}": f"{__file__}/library.so" for name in pybnorm.backends()}


def check(*arguments, **variables):
    """The check of oneDNN without a process of its own."""
    return run(*ONEDNN, "--executor", "process", *arguments, **variables)


def seeds(last):
    return SEEDS + "/".join(map(str, range(1, last + 1)))


def started(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "pybnorm", *arguments]
    return subprocess.Popen(command, env=clean_environment(), cwd=HERE, **pipes, **options)


def process(*command, **variables):
    pipes = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run(command, env=clean_environment() | variables, cwd=HERE, **pipes)


def python(code, *arguments):
    return process(sys.executable, "-c", code, *arguments)


@pytest.fixture
def made(monkeypatch):
    """Libraries that are made up: oneDNN, all of whose cases pass but those of which the seed has a result here."""
    results = {}

    def describe(self, backend):
        there = BackendInfo(backend, "oneDNN", (3, 2, 0), "/lib", "made", device="a device", id="made")
        return [there if backend == "onednn" else BackendInfo(backend, problem="no file")]

    def run_cases(executor, info, problems, *_, **__):
        for problem in problems:
            status, known = results.get(problem.seed, (Status.PASS, ""))
            yield made_result(status, str(problem), info.backend, known=known)

    monkeypatch.setattr(executors.Farm, "describe", describe)
    monkeypatch.setattr(executors, "run_cases", run_cases)
    return results


def of_these(monkeypatch, *backends):
    monkeypatch.setattr(pybnorm, "backends", lambda: backends)


def without_finding(*arguments):
    """Nothing is named, everything is searched, nothing is there."""
    package = Path(pybnorm.__file__).parents[1]
    return run(*arguments, PYTHONPATH=os.pathsep.join(map(str, (HERE / "nothing_here", package))))


# ---------------------------------------------------------------- without a library


@pytest.mark.slow
def test_without_a_vendors_library_the_check_is_of_native_or_says_what_to_install():
    done = without_finding("check", "--case", CASE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"native {pybnorm.__version__}: the one supported case")
    vendors = ("cudnn", "miopen", "onednn")
    done = without_finding("check", *(f"--backend={name}" for name in vendors))
    assert done.returncode == 2, done.stderr
    assert all(text in done.stdout for text in ("pip install onednn-cpu-gomp", "pip install nvidia-cudnn", "ROCm"))
    for name in vendors:
        assert f"{name}: absent: " in done.stdout
        assert f"    system loader: lib{name}-nowhere.so: " in done.stdout
    assert "PASS" not in done.stdout


@pytest.mark.slow
def test_a_named_file_that_is_no_library_is_a_failure_with_its_reason_and_no_advice_to_install(
    onednn, tmp_path, monkeypatch
):
    file = tmp_path / "libMIOpen.so.1"
    file.write_text("not ELF, but long enough to be read as the header that it does not have")
    of_these(monkeypatch, "onednn", "miopen")
    named = {"PYBNORM_LIB_MIOPEN": str(file), "PYBNORM_LIB_ONEDNN": ""}  # set to nothing is not set
    done = run("check", "--jobs", "1", "--case", CASE, **named)
    assert (done.returncode, done.stderr) == (1, "")
    assert "onednn: 1 case, 1 PASS" in done.stdout
    assert "PYBNORM_LIB_MIOPEN names a file that cannot be used" in done.stdout
    assert "was asked for" not in done.stdout
    of_these(monkeypatch, "miopen")
    for text in (done.stdout, run("info", **named).stdout):
        assert f"PYBNORM_LIB_MIOPEN: {file}: " in text
        assert "invalid ELF header" in text
        assert "to have it" not in text
        assert "pip install" not in text


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
        *((["--list", "--shard", word], f"--shard: got {word}") for word in ("0/3", "4/3", "1", "a/b", "999/999")),
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
    done = run("check", *arguments, **NOWHERE)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Errno" not in done.stderr


@table(
    ("arguments", "variables", "text"),
    [
        (["check"], {"PYBNORM_REQUIRE": "cudn"}, "PYBNORM_REQUIRE: got cudn (did you mean 'cudnn'?), allowed: cudnn"),
        (["check"], {"PYBNORM_JUDGE": "nump"}, "PYBNORM_JUDGE: got nump (did you mean 'numpy'?), allowed: numpy | cup"),
        *([(["check"], {"PYBNORM_JUDGE": "cupy"}, "cupy is not")] if not importlib.util.find_spec("cupy") else []),
        (["info", "--claims", "mkl"], {}, "mkl"),
        (["compare", "."], {}, "(it has no run.json)"),
    ],
)
def test_variables_and_other_commands_are_refused_alike(arguments, variables, text):
    done = run(*arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


@pytest.mark.slow
def test_info_lists_every_attempt_for_an_absent_library(tmp_path, monkeypatch):
    file = tmp_path / "info.json"
    of_these(monkeypatch, "cudnn", "native")
    run("info", "--json", file, **NOWHERE)
    data = json.loads(file.read_text())
    assert data["environment"]["pybnorm"] == pybnorm.__version__
    absent, _ = data["backends"]
    assert (absent["loaded"], absent["hint"], absent["override"]) == (False, "", "PYBNORM_LIB_CUDNN")
    assert absent["attempts"][0][1] == f"{__file__}/library.so"
    of_these(monkeypatch, "cudnn")
    printed, brief = without_finding("info", "-v", "--json", file).stdout, without_finding("info").stdout
    (absent,) = json.loads(file.read_text())["backends"]
    assert absent["override"] == ""
    assert ("system loader: " in printed, "system loader: " in brief) == (True, False)
    assert all(f"to have it {absent['hint']}" in " ".join(text.split()) for text in (printed, brief))
    assert "\ncudnn\n  absent     " in brief
    assert max(map(len, brief.splitlines())) <= 80


# ---------------------------------------------------------------- on oneDNN


@pytest.mark.slow
def test_a_run_is_told_alike_in_its_table_and_its_document(onednn, tmp_path):
    target, line = tmp_path / "run.json", "backward,spatial,f32,nhwc,4x6x5x5,fill=randn,kappa=3,saved=0"
    cases = ("--case", "infer/train,spatial,f32/f64,nchw,2x3x4x4", "--case", line)
    done = run(*ONEDNN, *cases, "-v", "--json", target)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(target.read_text())
    assert (data["exit_status"], data["complete"]) == (0, True)
    assert [c["status"] for c in data["cases"]] == ["PASS", "UNSUPPORTED"] * 2 + ["PASS"]
    (backend,) = data["backends"]
    assert (backend["version"], backend["path"]) == (list(onednn.version), onednn.path)
    for case in data["cases"]:
        assert case["case"] in done.stdout
        assert case["repro"] == f"pybnorm check --backend onednn --case '{case['case']}'"
        assert case["repeat"] == ("equal" if case["status"] == "PASS" else "")
    assert case["repro"] in done.stdout
    rows = [text.split() for text in done.stdout.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["PASS"] and row[-1] == line and len(row) == 6]
    assert 0 < float(row[1]) < 1
    assert row[4] == "="
    done = check(*cases, "--json")
    assert [c["status"] for c in json.loads(done.stdout)["cases"]] == [c["status"] for c in data["cases"]]
    assert "3 PASS" in done.stderr


@pytest.mark.slow
def test_a_library_of_a_given_file_is_the_one_that_is_checked(onednn, tmp_path):
    """Whatever the environment names; the first line says which file was loaded, and how it was found."""
    own = tmp_path / "libmine.so"
    own.symlink_to(onednn.path)
    done = run(*ONEDNN, "--case", CASE, "--library", own, PYBNORM_LIB_ONEDNN="/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"onednn: oneDNN {'.'.join(map(str, onednn.version))}, {own} (found via PYBNORM_LIB_")
    explained = run(*ONEDNN, "--library", __file__, "--explain", CASE)
    assert explained.returncode == 1
    assert "the library named by PYBNORM_LIB_ONEDNN cannot be used, and no other is tried" in explained.stdout


KNOWN = (Status.FAIL, "X-1")


@table(
    ("result", "options", "variables", "status", "text"),
    [
        ((Status.CHAIN, ""), [], {}, 0, "1 only within that of long chains of sums (CHAIN)"),
        ((Status.CHAIN, ""), ["--strict"], {}, 1, ""),
        (KNOWN, [], {}, 1, "1 FAIL (0 new, 1 known)"),
        (KNOWN, ["--allow-known"], {}, 0, "1 FAIL (0 new, 1 known, allowed)"),
        ((Status.FAIL, ""), ["--allow-known"], {}, 1, "1 FAIL"),
        ((Status.UNSUPPORTED, ""), [], {}, 2, "No backend supports any of these cases"),
        ((Status.PASS, ""), [], {}, 0, "onednn: 1 case, 1 PASS"),
        ((Status.PASS, ""), ["--json", "/dev/full"], {}, 2, "onednn: 1 case, 1 PASS"),
        ((Status.PASS, ""), ["--json", "/dev/full"], {}, 2, "Error: --json /dev/full cannot be written: No space left"),
        *(
            ((Status.PASS, ""), options, variables, 1, "cudnn was asked for and could not run")
            for options, variables in (
                (["--backend", "cudnn"], {}),
                (["--require", "cudnn"], {}),
                ([], {"PYBNORM_REQUIRE": "onednn, cudnn"}),
                ([], {"PYBNORM_REQUIRE_DEVICE": "cudnn"}),
            )
        ),
    ],
)
def test_what_decides_the_exit_status(made, result, options, variables, status, text):
    made[0] = result
    done = check("--case", CASE, *options, **variables)
    assert done.returncode == status
    assert text in done.stdout + done.stderr
    assert "onednn was asked for" not in done.stdout


def test_a_first_run_is_smoke_and_ends_in_its_verdict_and_one_command(made):
    brief, full = (check(*more).stdout for more in ([], ["-v"]))
    for text in (brief, full):
        *_, verdict, last = text.splitlines()
        assert f"all {len(load_suite('smoke'))} supported cases are within their bounds" in verdict
        assert last == "Next: pybnorm check --suite standard"
    assert ("no record of a run" in brief, "no record of a run" in full) == (False, True)
    assert "Next:" not in check("--case", CASE).stdout


def test_fail_fast_stops_after_the_first_failure(made, tmp_path):
    made[3], target = (Status.FAIL, ""), tmp_path / "run.json"
    done = check("--case", seeds(9), "--json", target, "--fail-fast")
    assert done.returncode == 1, done.stdout
    data = json.loads(target.read_text())
    assert not data["complete"]
    assert [c["case"] for c in data["cases"]] == [f"{SEEDS}{seed}" for seed in (1, 2, 3)]
    assert "stopped by --fail-fast" in done.stdout
    assert check("--case", seeds(9), "--json", target).returncode == 1
    assert len(json.loads(target.read_text())["cases"]) == 9


# ---------------------------------------------------------------- targets that take nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "redirection", "reason"),
    [
        (NATIVE, ">/dev/full", "No space left on device"),
        (f"{NATIVE} --json", ">/dev/full", "No space left on device"),
        ("info", ">&-", "it is closed"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_one_line(command, redirection, reason):
    done = process("sh", "-c", f'exec "$0" -m pybnorm {command} {redirection}', sys.executable)
    assert done.stderr.endswith(f"Error: standard output cannot be written: {reason}\n")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["", "--json"])
def test_a_reader_that_has_seen_enough_is_no_verdict(option):
    command = f"{NATIVE} {option} 2>&1"
    done = process("bash", "-c", f'"$0" -m pybnorm {command} | true; exit "${{PIPESTATUS[0]}}"', sys.executable)
    assert (done.returncode, done.stderr) == (141, "")


def wait_for(process, journal, lines):
    """Until a run has noted its start and some cases."""
    while not journal.is_file() or journal.read_text().count("\n") < lines:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_comes_to_nothing_leaves_the_reports_that_were_there(onednn, plots, tmp_path):
    files = {option: tmp_path / f"report{option}" for option in ("--json", "--junit", "--html")}
    options = [word for option, file in files.items() for word in (option, str(file))]

    def texts():
        return [file.read_text() for file in files.values()]

    assert check("--case", CASE, *options).returncode == 0
    yesterday, folder = texts(), tmp_path / "run"
    arguments = ("--executor", "process", "--case", seeds(3000), "--save", str(folder), *options)
    with started(*ONEDNN, *arguments) as child:
        wait_for(child, folder / "journal.jsonl", 3)
        meanwhile = texts(), sorted(tmp_path.iterdir())
        child.kill()
        child.communicate(timeout=60)
    # nothing hidden that the kill would have left
    assert meanwhile == (yesterday, sorted((*files.values(), folder)))
    assert texts() == yesterday
    # refused after the targets were opened: the journal is of another environment
    before = sorted(tmp_path.iterdir())
    assert run(*ONEDNN, *arguments, "--resume", ONEDNN_MAX_CPU_ISA="SSE41").returncode == 2
    assert texts() == yesterday
    assert sorted(tmp_path.iterdir()) == before
    for file in files.values():
        file.chmod(0o600)
    assert check("--case", "infer,spatial,f32,nchw,9x3x4x4", *options).returncode == 0
    assert all("9x3x4x4" in text for text in texts())
    assert {file.stat().st_mode & 0o777 for file in files.values()} == {0o600}
    assert sorted(tmp_path.iterdir()) == before


def test_a_target_behind_a_link_is_written_where_it_points(made, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    assert check("--case", CASE, "--json", link).returncode == 0
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
    for option, name in (("--json", "old.html"), ("--html", "old.json"), ("--junit", "old.json")):
        yield [option, name], new
    for first, second in (("both", "both"), ("both", "./both"), ("both", "spelling/both"), ("old.json", "hard")):
        yield ["--json", first, "--html", second], f"another file than {first} of --json"
    yield ["--junit", "both", "--html", str(folder / "both")], "another file than both of --junit"
    for name in ("run.json", "journal.jsonl"):
        yield ["--save", "kept", "--html", f"spelling/kept/{name}"], f"another file than kept/{name} of --save"
    yield ["--json", "fresh", "--html", "thesis"], new  # nothing stays of the one that could be written
    yield ["--save", ""], "--save: got , allowed: the name of a folder"
    yield ["--save", "thesis"], "--save: got thesis"
    yield ["--save", "sub", "--json", "thesis"], new


def test_what_pybnorm_did_not_make_is_never_replaced(plots, tmp_path, monkeypatch):
    """Refused by name, with 2, before the run; nothing changes and nothing is left beside it."""
    monkeypatch.chdir(tmp_path)

    def state():
        return {f: f.read_bytes() if f.is_file() and not f.is_symlink() else None for f in sorted(tmp_path.rglob("*"))}

    cases = [(["check", "--case", CASE, *options], text) for options, text in refusals(tmp_path)]
    cases += [([*command, "--json", "old.json"], "--json") for command in (["compare", "."], ["selftest"])]
    before = state()
    for options, text in cases:
        done = run(*options)
        assert (done.returncode, text in done.stderr) == (2, True), (options, done.stderr)
        assert options[0] != "check" or f"{options[-2]}: got {options[-1]}" in done.stderr
        assert state() == before, options


MADE_HERE = _files.Kind("a file of tests", "made here")


def replace(file, meanwhile=lambda: None, text=b"made here"):
    with _files.replaced("--x", file, MADE_HERE) as stream:
        stream.write(text)
        meanwhile()


def test_a_report_that_appears_during_the_run_is_not_lost(tmp_path):
    file = tmp_path / "file"
    with pytest.raises(ArgumentError, match="another file"):
        replace(file, lambda: file.write_text("thesis"))
    assert [f.read_text() for f in tmp_path.iterdir()] == ["thesis"]
    file.write_text("made here before")
    with pytest.raises(ZeroDivisionError):
        replace(file, lambda: 1 / 0)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["made here before"]
    replace(file, text=b"made here now")
    assert [f.read_text() for f in tmp_path.iterdir()] == ["made here now"]


def test_an_empty_file_is_replaced_and_never_removed(tmp_path):
    number, name = tempfile.mkstemp(dir=tmp_path)
    os.close(number)
    with pytest.raises(ArgumentError, match="this is another file"):
        _files.remove("--x", name, MADE_HERE)
    _files.try_to_write("--x", name, MADE_HERE)
    with pytest.raises(ArgumentError, match="this is another file"):
        replace(name, lambda: Path(name).write_text("thesis"))  # by somebody else, during the run
    assert Path(name).read_text() == "thesis"
    os.truncate(name, 0)
    replace(name)
    assert [(f.read_text(), f.stat().st_mode & 0o777) for f in tmp_path.iterdir()] == [("made here", 0o600)]


def test_a_link_to_the_report_of_another_user_is_not_followed(tmp_path, monkeypatch):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("made here")
    link.symlink_to(file)
    assert _files.check("--x", link, MADE_HERE) == str(file)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ArgumentError, match="no link to another user's file"):
        _files.check("--x", link, MADE_HERE)
    assert _files.check("--x", file, MADE_HERE) == str(file)


# ---------------------------------------------------------------- interrupts


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_an_interrupt_leaves_an_incomplete_run_that_goes_on_where_it_ended(onednn, tmp_path):
    folder, target = tmp_path / "run", tmp_path / "result.json"
    save = ("--jobs", "1", "--json", str(target), "--save", str(folder), "--case", seeds(400))
    with started(*ONEDNN, *save, start_new_session=True, preexec_fn=interruptible) as child:
        first = child.stdout.readline()
        wait_for(child, folder / "journal.jsonl", 10)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: the workers too
        rest, errors = child.communicate(timeout=120)
    interrupted = json.loads(target.read_text())
    for host in {case["host"] for case in interrupted["cases"]}:
        with pytest.raises(ProcessLookupError):
            os.kill(int(host.rpartition(":")[2]), 0)
    assert first.startswith("onednn: oneDNN")
    assert (child.returncode, errors) == (130, "")
    count = len(interrupted["cases"])
    assert (interrupted["complete"], interrupted["exit_status"], 9 <= count < 400) == (False, 130, True)
    assert {c["status"] for c in interrupted["cases"]} == {"PASS"}
    assert f"onednn: {count} cases, {count} PASS\n" in rest
    assert f"incomplete: {count} of 400 cases\n" in rest
    *_, told, again, last = rest.splitlines()
    assert told == "interrupted"
    assert again == f"go on with it: pybnorm {' '.join([*ONEDNN, *save])} --resume"
    assert re.fullmatch(rf"oneDNN [\d.]+: so far, all {count} supported cases are within .*\.", last), last
    assert run(*ONEDNN, *save).returncode == 2  # holds a run already
    done = run(*ONEDNN, *save, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((folder / "run.json").read_text())
    assert data["complete"]
    assert [c["case"] for c in data["cases"]] == [f"{SEEDS}{seed}" for seed in range(1, 401)]
    assert data["cases"] == json.loads(target.read_text())["cases"]
    finished = {c["case"]: c for c in data["cases"]}
    assert [finished[c["case"]] for c in interrupted["cases"]] == interrupted["cases"]  # host and time: not run twice
    assert all((folder / c["saved"]).is_file() for c in data["cases"])
    assert sorted(line["case"] for line in lines_of(folder / "journal.jsonl") if "case" in line) == sorted(finished)


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_of_info_waits_for_no_library_that_hangs(interrupts):
    code = """
import importlib, os, signal, time
import pybnorm
from pybnorm.cli import main
pybnorm.backends = lambda: ("native",)
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
    done = python(f"again = {interrupts - 1}{code}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def limited(size, *arguments):
    """The check with files of up to `size` bytes."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}));"
    code += "from pybnorm.cli import main; main(prog_name='pybnorm')"
    return python(code, *ONEDNN, "--executor", "process", *map(str, arguments))


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 6000])
def test_a_journal_that_takes_no_more_ends_the_run_with_one_line(onednn, tmp_path, size):
    done = limited(size, "--case", seeds(50), "--save", tmp_path / "run")
    assert done.returncode == 2, done.stdout
    assert done.stderr == f"Error: --save {tmp_path}/run cannot be written: File too large\n"
    if size > 1000:
        assert "stopped by --save, which takes no more" in done.stdout
        assert " PASS\n" in done.stdout  # what was judged is told


@pytest.mark.slow
def test_outputs_that_cannot_be_kept_end_the_run(onednn, tmp_path):
    """The journal would take more; the large outputs of the first case do not go beside it."""
    folder, target = tmp_path / "run", tmp_path / "run.json"
    large = "infer,spatial,f32,nchw,8x16x64x64,fill=randn,repeats=1"  # 2 MB
    arguments = ("--save", folder, "--json", target, "--case", large, "--case", seeds(30))
    done = limited(1_000_000, *arguments)
    assert (done.returncode, done.stderr) == (2, f"Error: --save {folder} cannot be written: File too large\n")
    assert "onednn: 1 case, 1 RESOURCE\n" in done.stdout
    data = json.loads(target.read_text())
    assert (data["complete"], data["exit_status"]) == (False, 2)
    assert [c["case"] for c in data["cases"]] == [large]
    again = check(*arguments, "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "onednn: 31 cases, 31 PASS\n" in again.stdout


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


# ---------------------------------------------------------------- completion


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
    cut = shell == "bash"  # which replaces what stands behind the last = only
    for line, answers in {
        "pybnorm chec": ["plain,check"],
        "pybnorm check --suite smok": ["plain,smoke"],
        "pybnorm check --suite=smok": ["plain,smoke" if cut else "plain,--suite=smoke"],
        "pybnorm check --suite ./mine": ["file,./mine"],
        f"pybnorm check --case {FILLED}randn/le": ["plain,randn/level" if cut else f"plain,{FILLED}randn/level"],
        f"pybnorm check --case '{FILLED}le": [f"plain,{FILLED}level"],
        "pybnorm check --backend ": [f"plain,{name}" for name in pybnorm.backends()],
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        complete.typed = ""
        assert complete.complete().split("\n") == answers


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_real_shell_completes(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    line = f"pybnorm check --case {FILLED}lev"
    script, answer = {
        "bash": (
            f"""eval "$(_PYBNORM_COMPLETE=bash_source pybnorm)"; COMP_LINE='{line}' COMP_POINT={len(line)}
            _pybnorm_completion pybnorm; echo "${{COMPREPLY[@]}}" """,
            "level\n",
        ),
        "fish": (f"_PYBNORM_COMPLETE=fish_source pybnorm | source; complete -C'{line}'", f"{FILLED}level\n"),
    }[shell]
    (tmp_path / "pybnorm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pybnorm "$@"\n')
    (tmp_path / "pybnorm").chmod(0o755)
    done = process(shell, "-c", script, PATH=f"{tmp_path}:{os.environ['PATH']}", HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == (answer, "")


# ---------------------------------------------------------------- what there is


@pytest.mark.slow
def test_info_describes_what_is_loaded(onednn, tmp_path, monkeypatch):
    of_these(monkeypatch, "miopen", "onednn")
    done = run("info", "--json", tmp_path / "info.json")
    assert done.returncode == 0
    assert onednn.path in done.stdout
    assert onednn.found_via in done.stdout
    lines = done.stdout.splitlines()
    absent = [lines[i + 1].startswith("  absent ") for i, line in enumerate(lines) if re.match("onednn|miopen", line)]
    assert (len(absent), absent) == (2, sorted(absent))  # what is here comes first
    known = [d.id for d in DEFECTS if d.backend == "onednn" and d.in_version(onednn.version)]
    assert all(f"- {identity}: " in done.stdout for identity in known)
    found = json.loads((tmp_path / "info.json").read_text())["backends"][1]
    assert (found["loaded"], found["problem"], found["known_defects"]) == (True, "", known)
    assert found["device"]
    answers = {
        (c["operation"], c["mode"], c["dtype"], c["layout"]): c["capability"]
        for c in found["capabilities"]
        if 4 in c["ranks"]
    }
    assert "RUNS" in answers["backward", "spatial", "f32", "nhwc"]
    assert answers["train", "spatial", "f64", "nchw"] == ""
    assert all(c["reason"] for c in found["capabilities"] if not c["capability"])
    (record,) = json.loads(run("info", "--claims", "onednn").stdout)
    assert record["first"] == list(onednn.version)
    assert record["source"].endswith(f" on {found['device']}")
    assert {d for c in record["combinations"] for d in c["dtypes"]} >= {"f32"}


@pytest.mark.parametrize(("version", "said"), [((3, 5, 1), False), ((3, 6, 0), True)])
def test_info_says_which_versions_no_run_has_seen(version, said):
    console = Console(file=io.StringIO(), width=300)
    row = {"operation": "train", "mode": "spatial", "dtype": "f32", "layout": "nchw", "ranks": [4]}
    row |= {"capability": "RUNS", "reason": ""}
    info._print_info(console, BackendInfo("miopen", "MIOpen", path="/libMIOpen.so", version=version), [row])
    assert ("it is taken to have the known defects of 3.5.1" in " ".join(console.file.getvalue().split())) == said


# ---------------------------------------------------------------- lines and suites


@pytest.mark.slow
def test_list_prints_lines_and_loads_nothing(monkeypatch):
    case = "train/infer,spatial,f32,nchw,2x3x4x4"
    done = run("check", "--case", case, "--list", **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "train,spatial,f32,nchw,2x3x4x4\ninfer,spatial,f32,nchw,2x3x4x4\n"
    verbose = run("check", "--case", case, "--list", "-v").stdout.splitlines()
    assert [line for line in verbose if not line.startswith(" ")] == done.stdout.splitlines()
    assert any("MIOpenDriver bnorm" in line for line in verbose)
    assert any("--bnorm" in line for line in verbose)
    command = importlib.import_module("pybnorm.cli.check")
    monkeypatch.setattr(command, "packaged_suites", lambda: ("smoke", "bugs"))  # of the largest it takes seconds
    rows = dict(line.split()[:2] for line in run("check", "--list-suites").stdout.splitlines())
    assert {name: int(count) for name, count in rows.items()} == {n: len(load_suite(n)) for n in ("smoke", "bugs")}


def test_suites_of_files_and_cases_add_up_and_a_bad_line_has_its_place(tmp_path):
    suites = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for suite, of in zip(suites, ("1/2 # two", "2/3"), strict=True):
        suite.write_text(SEEDS + of + "\n")
    done = run("check", "--suite", suites[0], "--case", SEEDS + "9", "--suite", suites[1], "--list")
    assert done.stdout.splitlines() == [SEEDS + seed for seed in "9123"]
    suites[0].write_text("\ninfer,spatial,f32,nchw,2x3x4x\n")
    done = run("check", "--suite", suites[0])
    assert done.returncode == 2
    assert f"{suites[0]}:2: dims: got 2x3x4x" in done.stderr


def test_why_an_implementation_cannot_be_imported_is_said_once():
    done = run("check", "--implementation", "no_such_module:f")
    assert (done.returncode, done.stdout.count("No module named"), "ArgumentError" in done.stdout) == (2, 1, False)


@pytest.mark.slow
def test_shards_are_all_cases_once():
    case = ("check", "--list", "--suite", "smoke")
    whole = run(*case).stdout.split("\n")
    shares = [run(*case, "--shard", f"{k}/3").stdout.split("\n") for k in (1, 2, 3)]
    assert sorted(itertools.chain(*shares)) == sorted([*whole, "", ""])


def test_helps_are_whole_sentences_in_sections(tmp_path, monkeypatch):
    commands = run("--help").stdout.partition("Commands:")[2].strip().splitlines()
    assert len(commands) == 9
    assert all(line.endswith(".") and not line.endswith("...") for line in commands)
    shown = run("check", "--help").stdout
    assert [title for title in ("What to run:", "How:", "What to write:", "Other options:") if title not in shown] == []
    assert shown.partition("Other options:")[2].split() == ["-h,", "--help", "Show", "this", "message", "and", "exit."]
    monkeypatch.chdir(HERE.parents[1])  # where the benchmarks are
    assert "'device'" in run("bench", "devic").stderr
    for group in ("bench", "claims"):
        assert "..." not in run(group, "--help").stdout.partition("Commands:")[2]
    monkeypatch.chdir(tmp_path)  # where none are
    monkeypatch.setattr(pybnorm, "__file__", str(tmp_path / "pybnorm" / "__init__.py"))
    done = run("bench", "--help")
    assert (done.returncode, "source tree" in done.stdout) == (0, True)
    assert run("bench", "device").returncode == 2
