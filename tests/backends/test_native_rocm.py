"""native on ROCm: as far as no GPU is needed; and where a device is, in the rig or an AMD card's, a few calls.

The rig's kernels run on a CPU. Code for AMD's cards is made by clang, where clang and HIP's headers are here.
"""

import glob
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_native_cuda import SOURCE_FILES, SOURCES, instances

import pybnorm
from pybnorm import devices, functional
from pybnorm._arrays import ROCM

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


@pytest.mark.parametrize("shape", [(4, 6, 5, 3), (64, 32, 7, 9), (3, 20), (2, 3, 40, 41)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])  # of parameters, too
def test_calls_with_a_handle(device, shape, dtype):
    random = np.random.default_rng(7)
    x, dy = (random.normal(3, 2, shape).astype(dtype) for _ in range(2))
    scale, bias = (random.normal(1, 1, shape[1]).astype(dtype) for _ in range(2))
    axes, across = (0, *range(2, len(shape))), (1, -1, *(1 for _ in shape[2:]))
    with pybnorm.Handle("native", device="rocm") as handle:
        handle.set_stream(device.stream)
        saved = scale.astype("float32" if dtype == "float16" else dtype)
        on = [device.from_numpy(a) for a in (x, scale, bias, x, saved, saved, dy, x, scale, bias)]
        x_, scale_, bias_, y_, mean_, inverse_, dy_, dx_, dscale_, dbias_ = on
        memory = device.from_numpy(np.zeros(1 << 16, np.float32))
        options = {"saved_mean": mean_, "saved_inv_variance": inverse_, "workspace": (memory.pointer, 1 << 18)}
        handle.forward_training(x_, scale_, bias_, y_, **options)
        handle.backward(x_, dy_, scale_, dx_, dscale_, dbias_, **options)
        y, dx, dscale, dbias = map(device.to_numpy, (y_, dx_, dscale_, dbias_))
    wide, g = x.astype("f8"), dy.astype("f8")
    inverse = 1 / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
    hat = (wide - wide.mean(axes, keepdims=True)) * inverse
    a, b = (v.astype("f8").reshape(across) for v in (scale, bias))
    sums = (g * hat).sum(axes, keepdims=True), g.sum(axes, keepdims=True)
    n = x.size / shape[1]
    bound = {"float32": 3e-6, "float64": 1e-13, "float16": 1e-3}[dtype]
    for seen, expected in (
        (y, hat * a + b),
        (dx, a * inverse * (g - sums[1] / n - hat * sums[0] / n)),
        (dscale, sums[0].ravel()),
        (dbias, sums[1].ravel()),
    ):
        assert abs(seen - expected).max() <= bound * max(1, abs(expected).max())


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
