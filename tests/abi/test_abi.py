"""Each vendor backend's constants, structures and prototypes against the vendor's own headers.

cudnn: the wheels nvidia-cudnn-cu12 (or -cu13) for cudnn.h, nvidia-cuda-runtime-cu12 for the CUDA headers it includes,
and nvidia-cuda-nvcc-cu12 for the crt/ folder those include in turn; or an installed toolkit.
miopen: a ROCm installation or a distribution's packages (Debian: libmiopen-dev, libamdhip64-dev).
onednn: the wheel onednn-devel (install it without its dependencies: only headers are needed), which puts them below the
environment's include folder, or an installed oneDNN 3. Debian bookworm's libdnnl-dev is oneDNN 2. The newest are those
of a build with SYCL. Builds for aarch64, with ACL or without, have the same; a compiler for aarch64 reads them, too.

A vendor header or compiler that is not there skips the test with the exact reason, unless the environment variable
PYBNORM_REQUIRE (comma separated backend names) lists the backend: on a runner that must have it, absence is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BACKENDS = ROOT / "pybnorm" / "backends"
FILES = {"cudnn": "cudnn/api.h", "miopen": "miopen/api.h", "onednn": "onednn/api.h"}
V2_SCALE = "PBN_MIOPEN_V2, const void *scale, PBN_MIOPEN_GRADIENTS)"
NEWER = '#include <miopen/version.h>\nstatic_assert(MIOPEN_VERSION_MAJOR * 100 + MIOPEN_VERSION_MINOR >= 305, "");\n'
NEWEST = "#include <miopen/miopen.h>\nauto *made = &miopenBatchNormalizationForwardInferenceInvVariance;\n"
THREE = '#include <oneapi/dnnl/dnnl_version.h>\nstatic_assert(DNNL_VERSION_MAJOR == 3, "");\n'


def site_directories(*parts: str) -> list[Path]:
    """The folder `parts` below every entry of sys.path (where wheels put headers)."""
    return [Path(entry, *parts) for entry in sys.path if entry]


def from_environment(*names: str) -> list[Path]:
    """The include folders of the installations that these variables name."""
    return [Path(os.environ[name], "include") for name in names if os.environ.get(name)]


def cudnn_headers() -> dict[str, list[Path]]:
    """cudnn.h and all that it includes: where each is looked for."""
    toolkit = [
        *from_environment("CUDA_HOME", "CUDA_PATH"),
        *site_directories("nvidia", "cu13", "include"),
        *site_directories("nvidia", "cuda_runtime", "include"),
        Path("/usr/local/cuda/include"),
    ]
    crt = [
        *toolkit,
        *site_directories("nvidia", "cuda_nvcc", "include"),
        *site_directories("nvidia", "cuda_crt", "include"),
    ]
    return {
        "cudnn.h": [*from_environment("CUDNN_PATH"), *site_directories("nvidia", "cudnn", "include")],
        "cuda_runtime_api.h": toolkit,
        "cuda.h": toolkit,
        "crt/host_defines.h": crt,
    }


class AbiCheck:
    """The compiler and the headers of one backend's check, for this machine or for aarch64."""

    def __init__(self, backend: str, aarch64: bool = False) -> None:
        self.backend = backend
        self.required = not aarch64 and backend in os.environ.get("PYBNORM_REQUIRE", "").replace(" ", "").split(",")
        clang = ["clang++", "--target=aarch64-linux-gnu"]  # the C++ library's own headers are this machine's
        clang += [f"-isystem{folder}" for folder in Path("/usr/include").glob("*-linux-gnu/c++/*")]
        choices = [["aarch64-linux-gnu-g++"], clang] if aarch64 else [[os.environ.get("CXX", "c++")]]
        self.compiler = next((choice for choice in choices if shutil.which(choice[0])), [])
        if not self.compiler:
            self.unavailable(f"no C++ compiler: {' or '.join(choice[0] for choice in choices)} is not on PATH")

    def unavailable(self, reason: str) -> None:
        """Skip, or fail where PYBNORM_REQUIRE lists this backend."""
        if self.required:
            pytest.fail(f"{self.backend} ABI check is required (PYBNORM_REQUIRE) but cannot run: {reason}")
        pytest.skip(f"{self.backend} ABI check: {reason}")

    def includes(self, headers: Mapping[str, Iterable[Path]]) -> list[str]:
        """Compiler flags that make each header reachable.

        Parameters
        ----------
        headers
            For each header, the directories to look into, first match wins; the compiler's own
            search path comes last.
        """
        flags: list[str] = []
        for header, directories in headers.items():
            places = list(directories)
            found = next((place for place in places if (place / header).is_file()), None)
            if found is not None:
                flags += ["-isystem", str(found)]
            elif not self._preprocesses(header):
                tried = ", ".join(str(place) for place in places) or "no other place"
                self.unavailable(f"header {header} not found (compiler's search path; {tried})")
        return flags

    def _preprocesses(self, header: str) -> bool:
        text = f"#if !__has_include(<{header}>)\n#error absent\n#endif\n"
        command = [*self.compiler, "-std=c++17", "-x", "c++", "-E", "-"]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0

    def holds(self, text: str, flags: Iterable[str]) -> bool:
        """Whether a piece of C++ compiles: a static assertion about the headers."""
        command = [*self.compiler, "-std=c++17", "-fsyntax-only", *flags, "-x", "c++", "-"]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0

    def compile(
        self, source: Path, flags: Iterable[str], backends: Path = ROOT / "pybnorm" / "backends"
    ) -> subprocess.CompletedProcess[str]:
        """Compile `source` against the C files in `backends`; the caller judges the result.

        Syntax and static assertions only: nothing is linked or run.
        """
        folders = [HERE, ROOT / "include", backends]
        command = [*self.compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
        command += [flag for folder in folders for flag in ("-I", str(folder))]
        return subprocess.run([*command, *flags, str(source)], text=True, capture_output=True, check=False)


def flags_of(check):
    """What makes the headers reachable, or a skip."""
    if check.backend == "cudnn":
        return check.includes(cudnn_headers())
    if check.backend == "onednn":
        places = [*from_environment("DNNLROOT", "CONDA_PREFIX"), Path(sys.prefix, "include")]
        found = check.includes({"oneapi/dnnl/dnnl.h": places})
        if not check.holds(THREE, found):
            check.unavailable("the headers are not those of oneDNN 3")
        return found
    places = [*from_environment("ROCM_PATH", "ROCM_HOME"), Path("/opt/rocm/include")]
    found = check.includes({"miopen/miopen.h": places, "hip/hip_runtime_api.h": places})
    flags = [*found, "-D__HIP_PLATFORM_AMD__"]  # HIP's headers ask for it outside of hipcc
    return [*flags, "-DNEWER_HEADER"] if check.holds(NEWEST, flags) else flags


@pytest.mark.parametrize(("name", "aarch64"), [*((name, False) for name in FILES), ("onednn", True)])
def test_declarations_are_the_vendors(name, aarch64):
    check = AbiCheck(name, aarch64)
    result = check.compile(HERE / f"abi_{name}.cpp", flags_of(check))
    assert result.returncode == 0, result.stderr


OF_3_5 = [
    ("(void *handle, int *policy)", "(void *handle, double *policy)", "prototype of miopenGetTuningPolicy differs"),
    ("C(miopenActivationCLAMP, 10)", "C(miopenActivationCLAMP, 9)", "value of miopenActivationCLAMP differs"),
    ("PBN_MIOPEN_INFERENCE, void *activation))", "void *scale, void *activation))", "InferenceActivation"),
    ("const void *bias, PBN_MIOPEN_GRADIENTS", "PBN_MIOPEN_GRADIENTS", "miopenBatchNormBackwardActivation differs"),
]
WRONG = {
    "cudnn": [
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
    "miopen": [
        *OF_3_5,
        ("C(miopenBFloat16, 5)", "C(miopenBFloat16, 4)", "value of miopenBFloat16 differs"),
        ("double factor, void *running_mean,", "float factor, void *running_mean,", "ForwardTraining differs"),
        ("(void *desc, size_t *bytes)", "(void *desc, int *bytes)", "prototype of miopenGetTensorNumBytes differs"),
        (V2_SCALE, V2_SCALE.replace(" const void *scale,", ""), "miopenBatchNormalizationBackward_V2 differs"),
        ("hipGetDevice, (int *ordinal)", "hipGetDevice, (void)", "prototype of hipGetDevice differs"),
    ],
    "onednn": [
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
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name in FILES for wrong in WRONG[name]])
def test_a_wrong_declaration_is_caught(tmp_path, name, wrong):
    check, (declared, altered, complaint) = AbiCheck(name), wrong
    flags, text = flags_of(check), (BACKENDS / FILES[name]).read_text()
    assert text.count(declared) == 1
    if wrong in OF_3_5 and not check.holds(NEWER, flags):
        pytest.skip("miopen: this header is older than 3.5, which added these")
    (tmp_path / FILES[name]).parent.mkdir(exist_ok=True)
    (tmp_path / FILES[name]).write_text(text.replace(declared, altered))
    result = check.compile(HERE / f"abi_{name}.cpp", flags, backends=tmp_path)
    assert result.returncode != 0
    assert complaint in result.stderr


def test_the_comparer_accepts_what_is_the_same_and_numbers_what_is_not():
    result = AbiCheck("abi").compile(HERE / "abi_same_self.cpp", [])
    assert result.returncode == 0, result.stderr


def test_a_difference_stops_the_compiler_and_is_named():
    result = AbiCheck("abi").compile(HERE / "abi_same_self.cpp", ["-DMUST_FAIL"])
    assert result.returncode != 0
    assert "value of VENDOR_B differs" in result.stderr
    assert "prototype of vendor_call differs" in result.stderr
