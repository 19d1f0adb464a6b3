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


def run(code, threads, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in Linux's /proc")
def test_small_calls_start_no_threads_and_large_ones_do(tmp_path):
    shapes = [((2, 16, 8, 8), "nchw"), ((2, 16, 32, 32), "nhwc"), ((2, 16, 64, 64), "nchw")]
    assert run(f"SHAPES = {shapes}\n{SCRIPT}", 3, tmp_path) == ["0", "0", "2"]


SUMS = """
import hashlib, os
import numpy as np
import pybnorm

def digest(dims, layout, dtype):
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal(dims, np.float32).astype(dtype) for _ in range(2))
    if layout == "nhwc":
        x, dy = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in (x, dy))
    mean, inv, scale, bias, dscale, dbias = (np.ones((1, dims[1], 1, 1), np.float32) for _ in range(6))
    y, dx, made = np.empty_like(x), np.empty_like(x), hashlib.sha256()
    with pybnorm.Handle("onednn") as handle:
        keep = dict(saved_mean=mean, saved_inv_variance=inv)
        handle.forward_training(x, scale, bias, y, algorithm="auto", **keep)
        handle.backward(x, dy, scale, dx, dscale, dbias, algorithm="auto", **keep)
    for a in (y, mean, inv, dx, dscale, dbias):
        made.update(a.tobytes())
    return made.hexdigest()

def digests():
    from ml_dtypes import bfloat16
    return [digest(dims, layout, dtype) for dims, layout in SHAPES for dtype in (np.float32, bfloat16)]
"""


def test_threads_share_sums_and_change_no_bit(tmp_path):
    """Of rows, and of columns that are enough for all threads without others beside them."""
    rows = [((4, 37, 64, 65), "nchw"), ((2, 5, 150, 150), "nchw"), ((3, 1, 200, 201), "nchw")]
    shapes = [*rows, ((64, 401, 2, 2), "nchw"), ((3, 1603, 8, 8), "nhwc")]
    code = f"SHAPES = {shapes}\n{SUMS}\nprint(*digests())"
    assert run(code, 3, tmp_path) == run(code, 1, tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_sums_alone_what_threads_have_shared(tmp_path):
    shapes = [((4, 37, 64, 65), "nchw"), ((64, 37, 8, 8), "nchw"), ((64, 37, 9, 9), "nhwc")]
    code = f"""SHAPES = {shapes}
{SUMS}
digests()
child = os.fork()
if child == 0:
    print(*digests(), flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
"""
    assert run(code, 3, tmp_path) == run(f"SHAPES = {shapes}\n{SUMS}\nprint(*digests())", 1, tmp_path)
