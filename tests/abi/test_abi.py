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

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BACKENDS = ROOT / "pybnorm" / "backends"
FILES = {"cudnn": "cudnn/api.h", "miopen": "miopen/api.h", "onednn": "onednn/api.h"}
NEWER = '#include <miopen/version.h>\nstatic_assert(MIOPEN_VERSION_MAJOR * 100 + MIOPEN_VERSION_MINOR >= 305, "");\n'
NEWEST = "#include <miopen/miopen.h>\nauto *made = &miopenBatchNormalizationForwardInferenceInvVariance;\n"
THREE = '#include <oneapi/dnnl/dnnl_version.h>\nstatic_assert(DNNL_VERSION_MAJOR == 3, "");\n'


def from_environment(*names):
    """The include folders of the installations that these variables name."""
    return [Path(os.environ[name], "include") for name in names if os.environ.get(name)]


def wheels(*names):
    """The include folders of NVIDIA's wheels below every entry of sys.path."""
    return [Path(entry, "nvidia", name, "include") for name in names for entry in sys.path if entry]


def headers(backend):
    """The folders to look for each header in, the first match wins; the compiler's own search path comes last."""
    if backend == "cudnn":
        toolkit = from_environment("CUDA_HOME", "CUDA_PATH") + wheels("cu13", "cuda_runtime")
        toolkit.append(Path("/usr/local/cuda/include"))
        return {
            "cudnn.h": from_environment("CUDNN_PATH") + wheels("cudnn"),
            "cuda_runtime_api.h": toolkit,
            "cuda.h": toolkit,
            "crt/host_defines.h": toolkit + wheels("cuda_nvcc", "cuda_crt"),
        }
    if backend == "onednn":
        return {"oneapi/dnnl/dnnl.h": [*from_environment("DNNLROOT", "CONDA_PREFIX"), Path(sys.prefix, "include")]}
    places = [*from_environment("ROCM_PATH", "ROCM_HOME"), Path("/opt/rocm/include")]
    return {"miopen/miopen.h": places, "hip/hip_runtime_api.h": places}


class AbiCheck:
    """The compiler and the headers of one backend's check, for this machine or for aarch64."""

    def __init__(self, backend, aarch64=False):
        self.backend = backend
        self.required = not aarch64 and backend in os.environ.get("PYBNORM_REQUIRE", "").replace(" ", "").split(",")
        clang = ["clang++", "--target=aarch64-linux-gnu"]  # the C++ library's own headers are this machine's
        clang += [f"-isystem{folder}" for folder in Path("/usr/include").glob("*-linux-gnu/c++/*")]
        choices = [["aarch64-linux-gnu-g++"], clang] if aarch64 else [[os.environ.get("CXX", "c++")]]
        self.compiler = next((choice for choice in choices if shutil.which(choice[0])), [])
        self.flags = []
        if not self.compiler:
            self.unavailable(f"no C++ compiler: {' or '.join(choice[0] for choice in choices)} is not on PATH")
        if backend not in FILES:
            return
        for header, places in headers(backend).items():
            found = next((place for place in places if (place / header).is_file()), None)
            if found is not None:
                self.flags += ["-isystem", str(found)]
            elif not self.holds(f"#if !__has_include(<{header}>)\n#error absent\n#endif\n"):
                tried = ", ".join(map(str, places)) or "no other place"
                self.unavailable(f"header {header} not found (compiler's search path; {tried})")
        if backend == "onednn" and not self.holds(THREE):
            self.unavailable("the headers are not those of oneDNN 3")
        if backend == "miopen":
            self.flags.append("-D__HIP_PLATFORM_AMD__")  # HIP's headers ask for it outside of hipcc
            self.flags += ["-DNEWER_HEADER"] * self.holds(NEWEST)

    def unavailable(self, reason):
        """Skip, or fail where PYBNORM_REQUIRE lists this backend."""
        if self.required:
            pytest.fail(f"{self.backend} ABI check is required (PYBNORM_REQUIRE) but cannot run: {reason}")
        pytest.skip(f"{self.backend} ABI check: {reason}")

    def run(self, *words, text=None):
        """Syntax and static assertions only: nothing is linked or run."""
        command = [*self.compiler, "-std=c++17", "-fsyntax-only", *self.flags, *words]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=False)

    def holds(self, text):
        """Say whether a piece of C++ compiles: an assertion about the headers."""
        return self.run("-x", "c++", "-", text=text).returncode == 0

    def compile(self, *words, backends=BACKENDS):
        """Compile against the C files in `backends`; the caller judges the result."""
        folders = [f"-I{folder}" for folder in (HERE, ROOT / "include", backends)]
        return self.run("-Wall", "-Wextra", "-Werror", *folders, *words)


@pytest.mark.parametrize(("name", "aarch64"), [*((name, False) for name in FILES), ("onednn", True)])
def test_declarations_are_the_vendors(name, aarch64):
    result = AbiCheck(name, aarch64).compile(str(HERE / f"abi_{name}.cpp"))
    assert result.returncode == 0, result.stderr


V2_SCALE = "PBN_MIOPEN_V2, const void *scale, PBN_MIOPEN_GRADIENTS)"
OF_3_5 = [
    ("(void *handle, int *policy)", "(void *handle, double *policy)", "prototype of miopenGetTuningPolicy differs"),
    ("C(miopenActivationCLAMP, 10)", "C(miopenActivationCLAMP, 9)", "value of miopenActivationCLAMP differs"),
    ("PBN_MIOPEN_INFERENCE, void *activation))", "void *scale, void *activation))", "InferenceActivation"),
    ("const void *bias, PBN_MIOPEN_GRADIENTS", "PBN_MIOPEN_GRADIENTS", "miopenBatchNormBackwardActivation differs"),
]
WRONG = {  # in each list that is compared: what is declared, what it is made, and the complaint
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
        ("C(miopenBFloat16, 5)", "C(miopenBFloat16, 4)", "value of miopenBFloat16 differs"),
        ("double factor, void *running_mean,", "float factor, void *running_mean,", "ForwardTraining differs"),
        ("(void *desc, size_t *bytes)", "(void *desc, int *bytes)", "prototype of miopenGetTensorNumBytes differs"),
        (V2_SCALE, V2_SCALE.replace(" const void *scale,", ""), "miopenBatchNormalizationBackward_V2 differs"),
        ("hipGetDevice, (int *ordinal)", "hipGetDevice, (void)", "prototype of hipGetDevice differs"),
    ],
    "onednn": [
        ("C(dnnl_query_dims, 257)", "C(dnnl_query_dims, 258)", "value of dnnl_query_dims differs"),
        ("C(DNNL_ARG_DIFF_SHIFT, 256)", "C(DNNL_ARG_DIFF_SHIFT, 257)", "value of DNNL_ARG_DIFF_SHIFT differs"),
        ("dst, float epsilon,", "dst, double epsilon,", "normalization_forward_primitive_desc_create differs"),
        ("int rank, const int64_t *", "int rank, const int32_t *", "dnnl_memory_desc_create_with_strides differs"),
        ("(void *engine, int *kind)", "(void *engine)", "prototype of dnnl_engine_get_kind differs"),
        ("unsigned cpu_runtime, gpu_runtime;", "unsigned gpu_runtime, cpu_runtime;", "member cpu_runtime"),
        ("    int arg;\n", "    int64_t arg;\n", "member arg of dnnl_exec_arg_t differs"),
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_wrong_declarations_are_caught(tmp_path, name):
    """All of a vendor's in one file, of which the compiler names each."""
    check, text = AbiCheck(name), (BACKENDS / FILES[name]).read_text()
    wrong = WRONG[name] + (OF_3_5 if name == "miopen" and check.holds(NEWER) else [])
    for declared, altered, _ in wrong:
        assert text.count(declared) == 1
        text = text.replace(declared, altered)
    (tmp_path / FILES[name]).parent.mkdir()
    (tmp_path / FILES[name]).write_text(text)
    result = check.compile(str(HERE / f"abi_{name}.cpp"), backends=tmp_path)
    assert [complaint for *_, complaint in wrong if complaint not in result.stderr] == []


def test_the_comparer_accepts_what_is_the_same_and_names_what_is_not():
    check, source = AbiCheck("comparer"), str(HERE / "abi_same_self.cpp")
    result = check.compile(source)
    assert result.returncode == 0, result.stderr
    complaints = check.compile(source, "-DMUST_FAIL").stderr
    assert "value of VENDOR_B differs" in complaints
    assert "prototype of vendor_call differs" in complaints
