"""The sums that the adapter of oneDNN makes in C, of every kind of processor that this one can run."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "pybnorm" / "backends" / "onednn"
COMPILER = shlex.split(os.environ.get("CC", "cc"))


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C compiler is here")
def test_sums_of_rows_and_columns_are_those_in_double(tmp_path):
    program = tmp_path / "sums"
    flags = ["-std=c11", "-Wall", "-Werror", "-O1", f"-I{SOURCES}", "-o", program, "-lm"]
    subprocess.run([*COMPILER, HERE / "sums_worker.c", *flags], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[:1000]
    assert "kinds 0" not in done.stdout
