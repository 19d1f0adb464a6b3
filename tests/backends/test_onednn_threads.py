"""How many threads oneDNN's calls start, seen from the system."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
import numpy as np
import pybnorm

def threads_started(dims, layout):
    x = np.ones(dims, np.float32)
    if layout == "nhwc":
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    vectors = [np.ones((1, dims[1], 1, 1), np.float32) for _ in range(6)]
    mean, inv, scale, bias, dscale, dbias = vectors
    with pybnorm.Handle("onednn") as handle:
        before = len(os.listdir("/proc/self/task"))
        y = np.empty_like(x)
        handle.forward_training(x, scale, bias, y, saved_mean=mean, saved_inv_variance=inv)
        handle.backward(x, y, scale, np.empty_like(x), dscale, dbias, saved_mean=mean, saved_inv_variance=inv)
        return len(os.listdir("/proc/self/task")) - before

print(*(threads_started(dims, layout) for dims, layout in SHAPES))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in Linux's /proc")
def test_small_calls_start_no_threads_and_large_ones_do(tmp_path):
    shapes = [((2, 16, 8, 8), "nchw"), ((2, 16, 32, 32), "nhwc"), ((2, 16, 64, 64), "nchw")]
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"SHAPES = {shapes}\n{SCRIPT}"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0 0 2\n"), done.stderr
