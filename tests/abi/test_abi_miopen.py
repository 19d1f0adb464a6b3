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
V2_SCALE = "void *variance_desc, const void *scale, \\\n              void *dscale,"
NEWER = '#include <miopen/version.h>\nstatic_assert(MIOPEN_VERSION_MAJOR * 100 + MIOPEN_VERSION_MINOR >= 305, "");\n'
NEWEST = "#include <miopen/miopen.h>\nauto *made = &miopenBatchNormalizationForwardInferenceInvVariance;\n"
BACKEND = HERE.parents[1] / "pybnorm" / "backends" / "miopen.c"


@pytest.fixture
def check(abi):
    return abi("miopen")


@pytest.fixture
def flags(check):
    roots = [Path(os.environ[name], "include") for name in ("ROCM_PATH", "ROCM_HOME") if os.environ.get(name)]
    places = [*roots, Path("/opt/rocm/include")]
    found = check.includes({"miopen/miopen.h": places, "hip/hip_runtime_api.h": places})
    flags = [*found, "-D__HIP_PLATFORM_AMD__"]  # HIP's headers ask for it outside of hipcc
    return [*flags, "-DNEWER_HEADER"] if check.holds(NEWEST, flags) else flags


def test_declarations_are_the_vendors(check, flags):
    result = check.compile(SOURCE, flags)
    assert result.returncode == 0, result.stderr


OF_3_5 = [
    ("(void *handle, int *policy)", "(void *handle, double *policy)", "prototype of miopenGetTuningPolicy differs"),
    ("C(miopenActivationCLAMP, 10)", "C(miopenActivationCLAMP, 9)", "value of miopenActivationCLAMP differs"),
    ("void *variance, double epsilon, void *activation))", "void *variance, void *activation))", "InferenceActivation"),
    ("const void *bias, void *dscale,", "void *dscale,", "prototype of miopenBatchNormBackwardActivation differs"),
]


@pytest.mark.parametrize(
    ("declared", "altered", "complaint"),
    [
        *OF_3_5,
        ("C(miopenBFloat16, 5)", "C(miopenBFloat16, 4)", "value of miopenBFloat16 differs"),
        ("double factor, void *running_mean,  ", "float factor, void *running_mean,  ", "ForwardTraining differs"),
        ("(void *desc, size_t *bytes)", "(void *desc, int *bytes)", "prototype of miopenGetTensorNumBytes differs"),
        (V2_SCALE, V2_SCALE.replace(" const void *scale,", ""), "miopenBatchNormalizationBackward_V2 differs"),
        ("hipGetDevice, (int *ordinal)", "hipGetDevice, (void)", "prototype of hipGetDevice differs"),
    ],
)
def test_a_wrong_declaration_is_caught(check, flags, tmp_path, declared, altered, complaint):
    text = BACKEND.read_text()
    assert text.count(declared) == 1
    if (declared, altered, complaint) in OF_3_5 and not check.holds(NEWER, flags):
        pytest.skip("miopen: this header is older than 3.5, which added these")
    (tmp_path / "miopen.c").write_text(text.replace(declared, altered))
    result = check.compile(SOURCE, flags, backends=tmp_path)
    assert result.returncode != 0
    assert complaint in result.stderr
