"""The MIOpen backend's constants and prototypes against AMD's own headers.

They come with a ROCm installation or with a distribution's packages: miopen.h, and hip_runtime_api.h that it includes
(Debian: libmiopen-dev, libamdhip64-dev).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "abi_miopen.cpp"
BACKEND = HERE.parents[1] / "pybnorm" / "backends" / "miopen.c"


@pytest.fixture
def check(abi):
    return abi("miopen")


@pytest.fixture
def flags(check):
    roots = [Path(os.environ[name], "include") for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    places = [*roots, Path("/opt/rocm/include")]
    found = check.includes({"miopen/miopen.h": places, "hip/hip_runtime_api.h": places})
    return [*found, "-D__HIP_PLATFORM_AMD__"]  # HIP's headers ask for it outside of hipcc


def test_declarations_are_the_vendors(check, flags):
    result = check.compile(SOURCE, flags)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("declared", "altered", "complaint"),
    [
        ("C(miopenBFloat16, 5)", "C(miopenBFloat16, 4)", "value of miopenBFloat16 differs"),
        ("double factor, void *running_mean,  ", "float factor, void *running_mean,  ", "ForwardTraining differs"),
        ("(void *desc, size_t *bytes)", "(void *desc, int *bytes)", "prototype of miopenGetTensorNumBytes differs"),
        ("void *dx, void *scale_desc,", "void *dx,", "prototype of miopenBatchNormalizationBackward_V2 differs"),
        ("hipGetDevice, (int *ordinal)", "hipGetDevice, (void)", "prototype of hipGetDevice differs"),
    ],
)
def test_a_wrong_declaration_is_caught(check, flags, tmp_path, declared, altered, complaint):
    text = BACKEND.read_text()
    assert text.count(declared) == 1
    (tmp_path / "miopen.c").write_text(text.replace(declared, altered))
    result = check.compile(SOURCE, flags, backends=tmp_path)
    assert result.returncode != 0
    assert complaint in result.stderr
