"""16-bit data that oneDNN has no kernel for: computed in float32, rounded once, in blocks of channels."""

import json
import os
import re
import subprocess
import sys

import pytest

import pybnorm
from pybnorm import DataType, Layout, Mode, Operation

BLOCKS = [  # 13,448 elements a channel: blocks of 19 channels and 18, or of 16, 16 and 5
    "train/infer/backward,spatial,f16/bf16,nchw/nhwc,8x37x41x41,fill=randn/exact,repeats=1",
    "train/infer/backward,spatial,f16,nchw/nhwc,8x37x41x41,alpha=2,beta=0.5,repeats=1",
    "train/infer/backward,peract,f16/bf16,nchw/nhwc,8x37x41x41,repeats=1",
    "backward,spatial,f16/bf16,nchw/nhwc,8x37x41x41,saved=0,repeats=1",
    "train/infer/backward,spatial,f16,strides=130000x3500x85x2,8x37x41x41,repeats=1",
]


def check(directory, *arguments):
    """The cases of ``pybnorm check`` where oneDNN has kernels for neither 16-bit type."""
    report = directory / "report.json"
    command = [sys.executable, "-P", "-m", "pybnorm", "check", "--backend", "onednn", f"--json={report}", *arguments]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())["cases"]


@pytest.mark.slow
def test_every_type_but_float64_runs_on_a_processor_without_avx512(tmp_path):
    cases = check(tmp_path, "--suite", "smoke", *(f"--case={line}" for line in BLOCKS))
    refused = [c["case"] for c in cases if c["status"] == "UNSUPPORTED"]
    elsewhere = (",f64,", ",persistent,", "params=", "streams=")  # what oneDNN has nowhere
    assert [line for line in refused if not any(word in line for word in elsewhere)] == []
    ran = [c for c in cases if c["status"] == "PASS"]
    assert len(ran) > 250
    assert len(ran) + len(refused) == len(cases)
    for case in ran:
        assert ("WIDENED" in case["capability"]) == bool(re.search(",b?f16,", case["case"])), case


def test_the_query_tells_what_is_widened():
    for dtype, operation in ((DataType.FLOAT16, Operation.BACKWARD), (DataType.FLOAT32, Operation.FORWARD_TRAINING)):
        bits, _ = pybnorm.capability("onednn", operation, Mode.SPATIAL, dtype, Layout.CHANNELS_FIRST, 4)
        assert bits & pybnorm.Capability.RUNS
        assert dtype == DataType.FLOAT16 or not bits & pybnorm.Capability.WIDENED
