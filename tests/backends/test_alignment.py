"""Addresses of little alignment are served or refused: cuDNN's kernels would take the CUDA context with them."""

import subprocess
import sys
from pathlib import Path

from alignment_worker import CASES, OPERATIONS, algorithms, main


def test_little_alignment_is_served_or_refused(handle, capfd):
    if handle.backend == "cudnn":  # in a process whose context may be lost
        command = [sys.executable, str(Path(__file__).with_name("alignment_worker.py")), handle.backend]
        status = subprocess.run(command, timeout=600, check=False).returncode
    else:
        status = main(handle.backend)
    told = capfd.readouterr()
    assert status == 0, told
    lines = told.out.splitlines()
    assert len(lines) == len(CASES) * len(OPERATIONS) * len(algorithms(handle.backend))
    served = [line for line in lines if ": right" in line]
    assert len(served) > len(lines) / 4
    if handle.backend == "cudnn":
        refused = [line for line in lines if line not in served and line.startswith(("auto", "fast", "plain"))]
        # Whatever offset the plain entry point takes, auto takes; what none takes is a 2-byte offset of channels-first.
        assert not [line for line in refused if "data +2" not in line and "parameters +0" in line], refused
