"""A forked child of a process that has computed with several threads computes too, and never waits for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_children_of_a_process_with_openmp_threads(load_library, tmp_path):
    load_library("onednn")
    worker = Path(__file__).with_name("fork_worker.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(worker), "120"], env=os.environ | {"OMP_NUM_THREADS": "3"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "captured")
