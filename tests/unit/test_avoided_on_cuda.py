"""Calls with known defects on CUDA: native computes them on the handle's device and stream, or an error says why not.

On doubles of the driver, whose kernels note their stream, of NVRTC and of cuDNN.
"""

import pytest
from doubles.build import HERE

NVRTC = """
    #define ANSWER(name, ...) int name(__VA_ARGS__) { return 0; }
    #define SIZE(name) int name(void *program, unsigned long *size) { return *size = 4, 0; }
    #define IMAGE(name) int name(void *program, char *image) { return *image = 0; }
    int nvrtcVersion(int *major, int *minor) { return *major = 14, *minor = 0; }
    const char *nvrtcGetErrorString(int status) { return "an error of the test"; }
    int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char *const *headers,
                           const char *const *names) { return *program = &names, 0; }
    ANSWER(nvrtcCompileProgram, void *program, int count, const char *const *options)
    ANSWER(nvrtcDestroyProgram, void **program)
    SIZE(nvrtcGetPTXSize) SIZE(nvrtcGetCUBINSize) SIZE(nvrtcGetProgramLogSize)
    IMAGE(nvrtcGetPTX) IMAGE(nvrtcGetCUBIN) IMAGE(nvrtcGetProgramLog)
    int nvrtcGetNumSupportedArchs(int *count) { return *count = 1, 0; }
    int nvrtcGetSupportedArchs(int *archs) { return *archs = 80, 0; }
"""

SCRIPT = """
    import ctypes
    import numpy as np
    import pybnorm
    from pybnorm import operations
    from pybnorm._arrays import CUDA, Buffer

    os.environ.update(values["variables"])
    driver = ctypes.CDLL(values["driver"])
    driver.driver_go(1)
    pybnorm.load("cudnn", values["file"])
    launches = ctypes.c_int.in_dll(driver, "driver_launches")
    streams = (ctypes.c_void_p * 64).in_dll(driver, "driver_streams")
    ROWS = 131071  # of which cuDNN's per-activation training refuses to take so many

    def buffer(*dims):
        kept.append(np.zeros(dims, "f4"))
        steps = tuple(step // 4 for step in kept[-1].strides)
        return Buffer(kept[-1].ctypes.data, dims, steps, pybnorm.DataType.FLOAT32, CUDA, 1, True, None)

    kept = []
    x, y, scale, bias, mean, inverse = buffer(ROWS, 2, 1), buffer(ROWS, 2, 1), *(buffer(1, 2, 1) for _ in range(4))

    def planned(handle, algorithm=None, **options):
        return handle.plan_forward_training(x, y, mode="per_activation", running=False, algorithm=algorithm, **options)

    def taken():
        found = streams[: launches.value]
        launches.value = 0
        return found
"""


@pytest.fixture
def play(child, doubles, computing):
    driver = doubles.plain("libcuda.so.1", "#define DOUBLE_LAUNCHES\n" + (HERE / "cuda.c").read_text())

    def behind(script, nvrtc=None):
        nvrtc = nvrtc or doubles.plain("libnvrtc.so.14", NVRTC)  # newer than any that is known
        variables = {"PYBNORM_LIB_NATIVE_CUDA": nvrtc, "XDG_CACHE_HOME": doubles.folder}
        return child(SCRIPT, script, driver=driver, file=computing, variables=variables)

    return behind


def test_native_computes_on_the_handles_stream(play):
    """By a plan, by the entry point and by operations; also after the stream has changed, and over the input."""
    own, plans, sizes, runs, calls, none = play(
        """
        with pybnorm.Handle("native_cuda") as native:
            own = planned(native).workspace_size
        handle = pybnorm.Handle("cudnn", stream=0x2000, known_defects="avoid")
        plans, runs = [planned(handle, algorithm) for algorithm in (None, "auto", "fast")], []
        size = handle.workspace_size("train", handle.descriptor(x), mode="per_activation", running=False)
        space = (buffer(max(size, 64) // 4).pointer // 64 * 64, size) if size else None
        given = {"saved_mean": mean, "saved_inv_variance": inverse}
        for stream in (0x2000, 0):
            handle.set_stream(stream)
            for plan in plans:
                plan(x, scale, bias, y, **given, workspace=space)
                runs.append(taken())
            plans[0](x, scale, bias, x, **given, workspace=space)
            runs.append(taken())
            handle.forward_training(x, scale, bias, y, mode="per_activation", **given, workspace=space)
            runs.append(taken())
            operations.forward_training(handle, x, scale, bias, y, axis=(1, 2), workspace=space)
            runs.append(taken())
        calls = operations.plan(handle, "forward_training", x, scale, bias, y, axis=(1, 2)).calls
        plain = handle.plan_forward_training(pybnorm.TensorDescriptor("cudnn", "f32", (4, 2)), mode="per_activation")
        handle.close()
        report([own, [[p.algorithm, p.reason] for p in plans], [p.workspace_size for p in plans] + [size], runs, calls,
                plain.algorithm])
        """,
    )
    reason = "avoids known defect cudnn-per-activation-rows: per-activation training refuses N > 131070"
    assert [(name, text.startswith(reason)) for name, text in plans] == [("native", True)] * 3
    assert sizes == [own] * 4
    assert [set(run) for run in runs] == [{0x2000}] * 6 + [{None}] * 6
    assert calls == ["forward_training PER_ACTIVATION f32 (131071, 2, 1) by native"]
    assert none != "native"


def test_where_native_is_not_there_the_error_says_why(play, tmp_path):
    errors = play(
        """
        handle = pybnorm.Handle("cudnn", known_defects="avoid")
        calls = {
            "plan": lambda: planned(handle), "auto": lambda: planned(handle, "auto"),
            "size": lambda: handle.workspace_size("train", handle.descriptor(x), mode="per_activation"),
            "operation": lambda: operations.plan(handle, "forward_training", x, scale, bias, y, axis=(1, 2))}
        report({name: attempt(call) for name, call in calls.items()})
        """,
        tmp_path / "no library",
    )
    # Statistics over these axes are also a channel's of a view, which cuDNN computes.
    assert errors.pop("operation")["value"]["calls"] == ["forward_training SPATIAL f32 (1, 2, 131071) by graph"]
    for name, error in errors.items():
        assert error["error"] == "UnsupportedError", name
        assert "known defect cudnn-per-activation-rows: " in error["text"], name
        assert "native does not compute it here: " in error["text"], name
        assert "no library" in error["text"], name


def test_native_is_not_opened_on_another_device_than_the_handles(play):
    answer, device = play(
        """
        owner = pybnorm.Handle("cudnn", stream=0x2000, known_defects="ignore")
        driver.driver_go(0)
        with pybnorm.Handle.from_pointer("cudnn", owner.pointer, known_defects="avoid") as handle:
            report([attempt(lambda: planned(handle)), handle.device])
        """,
    )
    assert device == 1
    assert "device 1, the handle's, was not current when the handle was made" in answer["text"]
