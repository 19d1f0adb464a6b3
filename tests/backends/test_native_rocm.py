"""native on ROCm: as far as no GPU is needed; and where a device is, in the rig or an AMD card's, a few calls.

The rig's kernels run on a CPU. Code for AMD's cards is made by clang, where clang and HIP's headers are here.
"""

import glob
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_calls import Case
from test_native_cuda import SOURCE_FILES, SOURCES, instances

import pybnorm
from pybnorm import devices, functional
from pybnorm._arrays import ROCM
from pybnorm.check.language.problem import Problem

ARCHITECTURES = ("gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201")
COMPILERS = sorted(glob.glob("/usr/bin/clang++-[0-9]*"))
HEADERS = ("-nogpuinc", "-nogpulib", "-include", "__clang_hip_runtime_wrapper.h", "-include", "hip/hip_runtime.h")
AMD = ("-x", "hip", "--offload-device-only", "-std=c++17", "-O3", "-w", *HEADERS)


@pytest.fixture
def device(need_device):
    need_device("native_rocm")
    return devices.device_for(ROCM)


def test_every_kernel_compiles_for_amd(tmp_path):
    """Each with what hipRTC puts before it: HIP's device headers. The other macros and the card are taken in turn."""
    if not COMPILERS or not os.path.exists("/usr/include/hip/hip_runtime.h"):
        pytest.skip("clang, or HIP's headers, are not here")
    turn, seen = itertools.cycle(ARCHITECTURES), {}
    source = tmp_path / "kernel.hip"
    files = "".join(f'#include "{SOURCES / file}"\n' for file in SOURCE_FILES)
    source.write_text(f"#define index number_of\n{files}")  # <strings.h> has an index()
    for name, values in list(instances())[::7]:
        options = [f"-DKERNEL_{name}=1", *(f"-D{key}={int(value)}" for key, value in values.items())]
        command = [COMPILERS[-1], f"--offload-arch={next(turn)}", *AMD, *options, "-S", str(source), "-o", "-"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, (options, made.stderr[-2000:])
        seen[name] = made.stdout
        assert f"\n{name}:" in made.stdout  # the kernel's own name, which a launch asks for
    assert len(seen) == 10


def test_a_handle_is_of_a_device_or_says_what_is_missing(load_library):
    load_library("native_rocm")
    try:
        with pybnorm.Handle("native", device="rocm") as handle:
            assert handle.backend == "native_rocm"
    except pybnorm.NotInitializedError as error:
        assert "hipError" in str(error)


@pytest.mark.parametrize("dims", ["4x6x5x3", "64x32x7x9", "3x20", "2x3x40x41"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16,params=f16"])
def test_calls_with_a_handle(device, dims, dtype):
    dtype, _, params = dtype.partition(",")
    with pybnorm.Handle("native", device="rocm") as handle:
        for word in ("train", "backward"):
            line = f"{word},spatial,{dtype},nchw,{dims},fill=randn,kappa=1.5,{params}".rstrip(",")
            case = Case(handle, Problem.parse(line))
            case.run_arrays()
            case.judge()


def test_functional_calls_take_it(device):
    assert functional._backend_of(ROCM) == "native_rocm"


COUNT = """
import os, sys
import numpy as np
import pybnorm
from pybnorm import devices
from pybnorm._arrays import ROCM
device = devices.device_for(ROCM)
with pybnorm.Handle("native", device="rocm") as handle:
    x, y = (device.from_numpy(np.ones((4, 8), np.float32)) for _ in range(2))
    handle.relu(x, y)
folder = os.path.join(sys.argv[1], "pybnorm")
print(*sorted(f"{name}@{os.stat(os.path.join(folder, name)).st_mtime_ns}" for name in os.listdir(folder)))
"""


def test_compiled_kernels_are_kept_for_their_card(device, tmp_path):
    def kept(**variables):
        done = subprocess.run(
            [sys.executable, "-c", COUNT, str(tmp_path)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), **variables},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = kept()
    assert len(first) == 1
    assert kept() == first  # read, and not written again
    if "hipcpu" in device.name:
        assert len(kept(HIPCPU_ARCH="gfx90a")) == 2
    assert Path(tmp_path, "pybnorm", first[0].partition("@")[0]).read_bytes().startswith(b"PBNKERN\0")
