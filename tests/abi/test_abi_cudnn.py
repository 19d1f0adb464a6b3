"""The cuDNN backend's constants and prototypes against NVIDIA's own headers.

The headers come in wheels: nvidia-cudnn-cu12 (or -cu13) for cudnn.h, nvidia-cuda-runtime-cu12 for the CUDA headers
it includes, and nvidia-cuda-nvcc-cu12 for the crt/ folder those include in turn; or from an installed toolkit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "abi_cudnn.cpp"
BACKEND = HERE.parents[1] / "pybnorm" / "backends" / "cudnn" / "api.h"


@pytest.fixture
def check(abi):
    return abi("cudnn")


@pytest.fixture
def flags(check, cudnn_places):
    return check.includes(cudnn_places)


def test_declarations_are_the_vendors(check, flags):
    result = check.compile(SOURCE, flags)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("declared", "altered", "complaint"),
    [
        ("C(CUDNN_DATA_BFLOAT16, 9)", "C(CUDNN_DATA_BFLOAT16, 10)", "value of CUDNN_DATA_BFLOAT16 differs"),
        ("C(CUDA_ERROR_INVALID_PC, 718)", "C(CUDA_ERROR_INVALID_PC, 721)", "value of CUDA_ERROR_INVALID_PC differs"),
        (
            "int *recorded, int mode, void *tag",
            "int *recorded, int mode",
            "prototype of cudnnQueryRuntimeError differs",
        ),
        (
            "const void *activation, const void *x_desc, size_t",
            "const void *x_desc, size_t",
            "ReserveSpaceSize differs",
        ),
        ("double factor,", "float factor,", "prototype of cudnnBatchNormalizationForwardTraining differs"),
        ("(const void *desc, size_t *bytes)", "(const void *desc, int *bytes)", "cudnnGetTensorSizeInBytes differs"),
        ("(void *handle, void **stream)", "(void *handle)", "prototype of cudnnGetStream differs"),
    ],
)
def test_a_wrong_declaration_is_caught(check, flags, tmp_path, declared, altered, complaint):
    text = BACKEND.read_text()
    assert text.count(declared) == 1
    (tmp_path / "cudnn").mkdir()
    (tmp_path / "cudnn" / "api.h").write_text(text.replace(declared, altered))
    result = check.compile(SOURCE, flags, backends=tmp_path)
    assert result.returncode != 0
    assert complaint in result.stderr
