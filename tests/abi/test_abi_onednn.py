"""The oneDNN backend's constants, structures and prototypes against oneDNN's own headers.

The headers come in the wheel onednn-devel (install it without its dependencies: only headers are needed), which puts
them below the environment's include folder, or from an installed oneDNN 3. Debian bookworm's libdnnl-dev is oneDNN 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "abi_onednn.cpp"
BACKEND = HERE.parents[1] / "pybnorm" / "backends" / "onednn" / "api.h"

VERSION_CHECK = """
#include <oneapi/dnnl/dnnl_version.h>
static_assert(DNNL_VERSION_MAJOR == 3, "the headers found are of another major version");
"""


@pytest.fixture
def check(abi):
    return abi("onednn")


@pytest.fixture
def flags(check, tmp_path):
    places = [Path(os.environ[name], "include") for name in ("DNNLROOT", "CONDA_PREFIX") if os.environ.get(name)]
    found = check.includes({"oneapi/dnnl/dnnl.h": [*places, Path(sys.prefix, "include")]})
    source = tmp_path / "version.cpp"
    source.write_text(VERSION_CHECK)
    result = check.compile(source, found)
    if result.returncode != 0:
        check.unavailable(f"the headers are not those of oneDNN 3: {result.stderr.splitlines()[0]}")
    return found


def test_declarations_are_the_vendors(check, flags):
    result = check.compile(SOURCE, flags)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("declared", "altered", "complaint"),
    [
        ("C(dnnl_query_dims, 257)", "C(dnnl_query_dims, 258)", "value of dnnl_query_dims differs"),
        ("C(DNNL_ARG_DIFF_SHIFT, 256)", "C(DNNL_ARG_DIFF_SHIFT, 257)", "value of DNNL_ARG_DIFF_SHIFT differs"),
        (
            "const void *src, const void *dst, float epsilon,",
            "const void *src, const void *dst, double epsilon,",
            "prototype of dnnl_batch_normalization_forward_primitive_desc_create differs",
        ),
        (
            "int rank, const int64_t *dims, int data_type,",
            "int rank, const int32_t *dims, int data_type,",
            "prototype of dnnl_memory_desc_create_with_strides differs",
        ),
        ("(void *engine, int *kind)", "(void *engine)", "prototype of dnnl_engine_get_kind differs"),
        ("unsigned cpu_runtime, gpu_runtime;", "unsigned gpu_runtime, cpu_runtime;", "member cpu_runtime"),
        ("    int arg;\n", "    int64_t arg;\n", "member arg of dnnl_exec_arg_t differs"),
    ],
)
def test_a_wrong_declaration_is_caught(check, flags, tmp_path, declared, altered, complaint):
    text = BACKEND.read_text()
    assert text.count(declared) == 1
    (tmp_path / "onednn").mkdir()
    (tmp_path / "onednn" / "api.h").write_text(text.replace(declared, altered))
    result = check.compile(SOURCE, flags, backends=tmp_path)
    assert result.returncode != 0
    assert complaint in result.stderr
