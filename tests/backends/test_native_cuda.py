"""native on CUDA as far as no GPU is needed: every kernel compiles, and a handle says what it lacks."""

import ctypes
import itertools
import re
from pathlib import Path

import pytest

import pybnorm

SOURCES = Path(__file__).parents[2] / "pybnorm" / "backends" / "native"
SOURCE_FILES = re.findall(r'SOURCE\("(.+?)"\)', (SOURCES / "cuda.c").read_text())
ROWS, COLUMNS = ("rows", "row_sums", "row_apply"), ("tiles", "column_sums", "column_apply")
ARCHITECTURES = (75, 80, 86, 90, 120)


def instances():
    """Each kernel in each direction and dtype, also of parameters; the other macros are taken in turn."""
    turns = {"fused": (0, 1), "narrow": (1, 0, 0), "by": (1, 2, 1)}
    turns = {name: itertools.cycle(values) for name, values in turns.items()}
    for own, dtype, backward in itertools.product((0, 1), range(4), (0, 1)):
        full = {0: 4, 1: 2}.get(dtype, 8)
        for name in (*ROWS, *COLUMNS, "row_sums any", "any_apply", "finish", "merge", "elements"):
            if (name in ("merge", "elements") and (backward or own)) or (own and dtype < 2):
                continue
            form, vector = 1, 1 if next(turns["narrow"]) else full
            if name in ROWS:
                form, vector = (0, full) if vector == 1 else (1, full)
            elif name in ("row_sums any", "any_apply"):
                form, vector = 2, 1
            values = {"DTYPE": dtype, "PARAM": dtype if own else dtype == 1, "FORM": form, "VECTOR": vector}
            yield name.split()[0], values | {"BACKWARD": backward and next(turns["by"]), "FUSED": next(turns["fused"])}


@pytest.fixture(scope="module")
def nvrtc():
    try:
        return ctypes.CDLL(pybnorm.load("native_cuda").path)
    except pybnorm.LibraryNotFoundError:
        pytest.skip("NVRTC is not here")


def compiled(nvrtc, name, values, architecture):
    source = b"".join((SOURCES / file).read_bytes() for file in SOURCE_FILES)
    options = ["-w", "--std=c++17", f"--gpu-architecture=sm_{architecture}", f"-DKERNEL_{name}=1"]
    options += [f"-D{key}={int(value)}" for key, value in values.items()]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cuh", 0, None, None) == 0
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, (options, log.value.decode())
    assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
    image = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetCUBIN(program, image) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


@pytest.mark.slow
def test_every_kernel_compiles(nvrtc):
    turn = itertools.cycle(ARCHITECTURES)
    count = 0
    for name, values in instances():
        assert name.encode() in compiled(nvrtc, name, values, next(turn))  # which a launch asks for
        count += 1
    assert count == 116


def test_a_handle_is_of_a_device_or_says_what_is_missing(nvrtc):
    try:
        with pybnorm.Handle("native", device="cuda") as handle:
            assert handle.backend == "native_cuda"
    except pybnorm.NotInitializedError as error:
        assert "libcuda.so.1" in str(error) or "CUDA_ERROR" in str(error)


def test_the_word_of_a_device():
    with pybnorm.Handle("native", device="cpu") as handle:
        assert handle.backend == "native"
    for device in ("hip", "CUDA", 1, "cpu_"):
        with pytest.raises(pybnorm.ArgumentError, match="allowed: None, or of backend 'native': 'cpu', 'cuda', 'rocm'"):
            pybnorm.Handle("native", device=device)


@pytest.mark.parametrize("backend", ["native_cuda", "native_rocm"])
def test_capability_is_that_of_the_cpu_and_more(load_library, backend):
    load_library(backend)
    both = ("native", backend)
    for operation in ("train", "infer", "backward"):
        cpu, gpu = (pybnorm.capability(b, operation, "spatial", "f16", "strided", 5)[0] for b in both)
        assert pybnorm.Capability.RUNS | pybnorm.Capability.RESIDUAL in gpu
        assert gpu & cpu == cpu
