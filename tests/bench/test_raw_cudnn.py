"""The C program: it compiles without a warning, says when there is no device, and finds a wrong result."""

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import rivals
from benchmarks.case import TOLERANCE, Case
from pybnorm import DataType, Layout

HERE = Path(__file__).parent
BACKEND = HERE.parents[1] / "pybnorm" / "backends" / "cudnn" / "api.h"
DOUBLE = (f'-DDOUBLE_BACKEND="{BACKEND}"', "-DDOUBLE_SYMBOLS=PBN_CUDNN_SYMBOLS", "-DDOUBLE_COMPUTES")
STRICT = ("-Wall", "-Wextra", "-Werror")

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler is here")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return rivals.build_raw(str(tmp_path_factory.mktemp("raw")), *STRICT)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """A driver on the host, and cuDNNs: one that computes, one slightly off, one whose results are not numbers."""
    folder = tmp_path_factory.mktemp("fakes")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))

    def library(source, name, *flags):
        command = [compiler, *STRICT, "-Wno-unused-parameter", "-O1", "-shared", "-fPIC", *flags, str(HERE / source)]
        subprocess.run([*command, "-o", str(folder / name), "-lm"], check=True, timeout=120)
        return str(folder / name)

    library("driver.c", "libcuda.so.1", "-D_POSIX_C_SOURCE=200809L")
    flags = *DOUBLE, "-DDOUBLE_VERSION=91900"
    slips = {"right": "0", "off": "0.1f", "nan": "NAN"}
    made = [
        library("../doubles/cudnn.c", f"{name}.so", *flags, f"-DDOUBLE_SLIP={slip}") for name, slip in slips.items()
    ]
    return str(folder), *made


def run(program, *arguments, lines="", **variables):
    return subprocess.run(
        [program, *arguments],
        input=lines,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_device_it_says_so(program):
    done = run(program, "libcudnn.so.9", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == rivals.NO_DEVICE
    assert done.stderr.startswith("no CUDA device: ")
    assert done.stdout == ""


def test_bad_arguments(program):
    done = run(program)
    assert done.returncode == 2
    assert "usage" in done.stderr


@pytest.mark.slow
def test_without_a_library(program, fakes):
    done = run(program, "/nonexistent/libcudnn.so", LD_LIBRARY_PATH=fakes[0])
    assert done.returncode == 1
    assert "/nonexistent/libcudnn.so" in done.stderr


def test_it_checks_what_it_measures(program, fakes):
    folder, right, off, nan = fakes
    kinds = itertools.product(
        ("train", "infer", "backward"), ("nchw", "nhwc"), ("3 5 4 7", "2 3 2 3 4", "6 4", "5 1 3")
    )
    lines = "".join(f"time {operation} f32 {layout} 2 3 {shape}\n" for operation, layout, shape in kinds)

    def answers(library):
        device, *found = map(json.loads, run(program, library, lines=lines, LD_LIBRARY_PATH=folder).stdout.splitlines())
        assert device == {"device": "a host"}
        assert len(found) == 24
        return found

    for answer in answers(right):
        assert answer["error"] < 1e-6
        assert answer["seconds"] > 0
        assert answer["replays"] == 3
        assert answer["method"] == "events around calls"  # this driver captures nothing
    assert min(answer["error"] for answer in answers(off)) > TOLERANCE
    assert {answer["error"] for answer in answers(nan)} == {None}


def test_host_time(program, fakes):
    folder, right, *_ = fakes
    lines = "".join(f"host {operation} 5 10\n" for operation in ("train", "infer", "backward"))
    done = run(program, right, lines=lines, LD_LIBRARY_PATH=folder)
    answers = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert len(answers) == 3
    assert all(answer["microseconds"] > 0 for answer in answers)
    assert done.returncode == 0


def test_it_refuses_what_is_no_command(program, fakes):
    shapes = ["f64 nchw 1 1 2 2", "f32 chwn 1 1 2 2", "f32 nchw 0 1 2 2", "f32 nchw 99 1 2 2", "f32 nchw 1 0 2 2"]
    shapes += ["f32 nchw 1 1 2", "f32 nchw 1 1 2 0", "f32 nchw 1 1 2 2x", "f32 nchw 1 1 70000 70000"]
    bad = ["", "measure", "time relu f32 nchw 1 1 2 2", *(f"time train {shape}" for shape in shapes)]
    bad += ["time train f32 nchw 1 1 1 1 1 1 1 1 1 1 1", "host train 0 1", "host train 1", "host train 1 1 1"]
    lines = "".join(f"{line}\nhost infer 1 1\n" for line in bad)
    done = run(program, fakes[1], lines=lines, LD_LIBRARY_PATH=fakes[0])
    answers = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert answers[::2] == [{"failure": "not a command"}] * len(bad)
    assert ["microseconds" in answer for answer in answers[1::2]] == [True] * len(bad)


def test_a_vendor_error_is_told_and_the_next_command_runs(program, fakes):
    lines = "time train f32 nchw 1 1 2 2 2 2 2 2\nhost infer 1 1\n"  # of more axes than the double computes with
    done = run(program, fakes[1], lines=lines, LD_LIBRARY_PATH=fakes[0])
    refused, answered = map(json.loads, done.stdout.splitlines()[1:])
    assert refused["failure"].startswith("cudnnSetTensorNdDescriptor(")
    assert refused["failure"].endswith("CUDNN_STATUS_DOUBLE")
    assert "microseconds" in answered


@pytest.mark.slow
def test_from_python(fakes, monkeypatch):
    folder, right, off, _ = fakes
    monkeypatch.setenv("LD_LIBRARY_PATH", folder)
    case = Case(None, (2, 3, 4), DataType.FLOAT32, Layout.CHANNELS_LAST, (None, None), *[None] * 6)
    for library, good in ((right, True), (off, False)):
        raw = rivals.Raw(library)
        try:
            assert raw.device == "a host"
            assert (raw.time(case, "backward", 2)["error"] < TOLERANCE) == good
            assert raw.host("train", 2, 3)["microseconds"] > 0
        finally:
            raw.close()


@pytest.mark.slow
def test_why_it_does_not_start(fakes, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="status 3: no CUDA device"):
        rivals.Raw("libcudnn.so.9")
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(RuntimeError, match="compiler failed"):
        rivals.Raw(fakes[1])
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RuntimeError, match="no C compiler"):
        rivals.Raw(fakes[1])
