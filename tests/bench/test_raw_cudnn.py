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
    """A driver on the host, and a cuDNN that computes, off by the variable SLIP."""
    folder = tmp_path_factory.mktemp("fakes")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    flags = *DOUBLE, "-DDOUBLE_VERSION=91900", "-include", "stdlib.h"
    flags += ('-DDOUBLE_SLIP=(getenv("SLIP") ? strtof(getenv("SLIP"), NULL) : 0)',)
    for source, name, *options in (
        ("driver.c", "libcuda.so.1", "-D_POSIX_C_SOURCE=200809L"),
        ("../doubles/cudnn.c", "libcudnn.so", *flags),
    ):
        command = [compiler, *STRICT, "-Wno-unused-parameter", "-O1", "-shared", "-fPIC", *options, str(HERE / source)]
        subprocess.run([*command, "-o", str(folder / name), "-lm"], check=True, timeout=120)
    return str(folder), str(folder / "libcudnn.so")


def run(program, *arguments, lines="", **variables):
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    return subprocess.run([program, *arguments], input=lines, env=os.environ | variables, **options)


def answers(program, fakes, lines, **variables):
    """What it says of each line."""
    lines = [f"{line}\n" for line in lines]
    done = run(program, fakes[1], lines="".join(lines), LD_LIBRARY_PATH=fakes[0], **variables)
    assert done.returncode == 0
    device, *found = map(json.loads, done.stdout.splitlines())
    assert device == {"device": "a host"}
    assert len(found) == len(lines)
    return found


@pytest.mark.slow
def test_why_it_does_not_start(program, fakes, monkeypatch):
    for arguments, variables, code, start, said in (
        (["libcudnn.so.9"], {"CUDA_VISIBLE_DEVICES": ""}, rivals.NO_DEVICE, "no CUDA device: ", ""),
        ([], {}, 2, "", "usage"),
        (["/nonexistent/libcudnn.so"], {"LD_LIBRARY_PATH": fakes[0]}, 1, "", "/nonexistent/libcudnn.so"),
    ):
        done = run(program, *arguments, **variables)
        assert done.returncode == code
        assert done.stderr.startswith(start)
        assert said in done.stderr
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


def test_it_checks_what_it_measures(program, fakes):
    shapes = "3 5 4 7", "2 3 2 3 4", "6 4", "5 1 3"
    kinds = itertools.product(("train", "infer", "backward"), ("nchw", "nhwc"), shapes)
    lines = [f"time {operation} f32 {layout} 2 3 {shape}" for operation, layout, shape in kinds]
    for answer in answers(program, fakes, lines):
        assert answer["error"] < 1e-6
        assert answer["seconds"] > 0
        assert answer["replays"] == 3
        assert answer["method"] == "events around calls"  # this driver captures nothing
    assert min(answer["error"] for answer in answers(program, fakes, lines, SLIP="0.1")) > TOLERANCE
    assert {answer["error"] for answer in answers(program, fakes, lines, SLIP="nan")} == {None}


def test_it_refuses_what_is_no_command(program, fakes):
    shapes = ["f64 nchw 1 1 2 2", "f32 chwn 1 1 2 2", "f32 nchw 0 1 2 2", "f32 nchw 99 1 2 2", "f32 nchw 1 0 2 2"]
    shapes += ["f32 nchw 1 1 2", "f32 nchw 1 1 2 0", "f32 nchw 1 1 2 2x", "f32 nchw 1 1 70000 70000"]
    bad = ["", "measure", "time relu f32 nchw 1 1 2 2", *(f"time train {shape}" for shape in shapes)]
    bad += ["time train f32 nchw 1 1 1 1 1 1 1 1 1 1 1", "host train 0 1", "host train 1", "host train 1 1 1"]
    bad += ["time train f32 nchw 1 1 2 2 2 2 2 2"]  # of more axes than the double computes with: the vendor's error
    hosts = [f"host {('train', 'infer', 'backward')[i % 3]} 5 10" for i in range(len(bad))]
    found = answers(program, fakes, [line for pair in zip(bad, hosts, strict=True) for line in pair])
    assert found[:-2:2] == [{"failure": "not a command"}] * (len(bad) - 1)
    assert found[-2]["failure"].startswith("cudnnSetTensorNdDescriptor(")
    assert found[-2]["failure"].endswith("CUDNN_STATUS_DOUBLE")
    assert all(answer["microseconds"] > 0 for answer in found[1::2])  # the next command runs


@pytest.mark.slow
def test_from_python(fakes, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", fakes[0])
    case = Case(None, (2, 3, 4), DataType.FLOAT32, Layout.CHANNELS_LAST, (None, None), *[None] * 6)
    for slip, good in (("0", True), ("0.1", False)):
        monkeypatch.setenv("SLIP", slip)
        raw = rivals.Raw(fakes[1])
        try:
            assert raw.device == "a host"
            assert (raw.time(case, "backward", 2)["error"] < TOLERANCE) == good
            assert raw.host("train", 2, 3)["microseconds"] > 0
        finally:
            raw.close()
