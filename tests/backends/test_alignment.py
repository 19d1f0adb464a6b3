"""Addresses of little alignment are served or refused: cuDNN's kernels would take the CUDA context with them."""

import subprocess
import sys
from pathlib import Path

from alignment_worker import ALGORITHMS, CASES, OPERATIONS

import pybnorm


def test_little_alignment_is_served_or_refused(handle):
    command = [sys.executable, str(Path(__file__).with_name("alignment_worker.py")), handle.backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(CASES) * len(OPERATIONS) * len({*ALGORITHMS} & {*pybnorm.algorithms(handle.backend)})
    served = [line for line in lines if ": right" in line]
    assert len(served) > len(lines) / 4
    if handle.backend == "cudnn":
        refused = [line for line in lines if line not in served and line.startswith(("auto", "fast", "plain"))]
        # Whatever offset the plain entry point takes, auto takes; what none takes is a 2-byte offset of channels-first.
        assert not [line for line in refused if "data +2" not in line and "parameters +0" in line], refused
