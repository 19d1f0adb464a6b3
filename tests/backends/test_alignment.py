"""Addresses of little alignment are served or refused: cuDNN's kernels would take the CUDA context with them."""

import subprocess
import sys
from pathlib import Path

import pytest
from alignment_worker import CASES

import pybnorm

WORKER = Path(__file__).with_name("alignment_worker.py")


@pytest.mark.parametrize("operation", ["train", "infer", "backward"])
@pytest.mark.parametrize("algorithm", ["auto", "fast", "plain", "ex", "graph", "pointwise"])
def test_little_alignment_is_served_or_refused(handle, algorithm, operation):
    if algorithm not in pybnorm.algorithms(handle.backend):
        pytest.skip(f"{handle.backend} has no algorithm {algorithm}")
    done = subprocess.run(
        [sys.executable, str(WORKER), handle.backend, operation, algorithm],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(CASES)
    refused = [line for line in lines if ": refused" in line]
    if algorithm in ("auto", "fast", "plain") and handle.backend == "cudnn":
        # Whatever offset the plain entry point takes, auto takes; what none takes is a 2-byte offset of channels-first.
        assert not [line for line in refused if "data +2" not in line and "parameters +0" in line], refused
