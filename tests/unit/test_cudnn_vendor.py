"""cuDNN's plain calls, descriptors, borrowed objects and statuses, on the double that writes down what reaches it.

Both as cuDNN 9 and as cuDNN 8, of which only the statuses and tensors of rank 2 differ.
"""

import functools

import pytest

VERSIONS = {9: 91900, 8: 8907}
DTYPES = {"f32": 0, "f64": 1, "f16": 2, "bf16": 9}  # cuDNN's numbers

PRELUDE = """
    from pybnorm import Mode

    library.double_descriptor.restype = ctypes.c_void_p

    def fail(status, function=""):
        number("status").value = status
        (ctypes.c_char * 64).in_dll(library, "double_failing").value = function.encode()

    def foreign(dtype, dims, strides):
        ints = ctypes.c_int * len(dims)
        return library.double_descriptor(dtype, len(dims), ints(*dims), ints(*strides))

    def places(*names):
        return {name: 0x10000 * (i + 1) for i, name in enumerate(names)}
"""


@pytest.fixture(params=list(VERSIONS), ids=["9", "8"])
def major(request):
    return request.param


@pytest.fixture
def play(run, doubles, major):
    """Runs a script behind `PRELUDE` on the double of the version."""
    names = {"version": VERSIONS[major], "soname": f"libcudnn.so.{major}"}
    without = ["cudnnGetLastErrorString"] if major == 8 else []
    file = doubles.build("cudnn", defines=("DOUBLE_RECORDS",), without=without, **names)
    return functools.partial(run, PRELUDE, file=file)


def test_what_reaches_the_plain_calls(play):
    """Every pointer, factor and descriptor of every call, by dtype and mode."""
    found, live, version = play(
        """
        p = places("x", "y", "dy", "dx", "scale", "bias", "rm", "rv", "sm", "si", "dscale", "dbias")
        found = {}
        with pybnorm.Handle("cudnn") as h:
            for dtype in values["dtypes"]:
                x = pybnorm.TensorDescriptor("cudnn", dtype, (2, 3, 4, 5))
                y = pybnorm.TensorDescriptor("cudnn", dtype, (2, 3, 4, 5), (60, 1, 15, 3))
                for mode in Mode:
                    v = pybnorm.derive_bn_tensor_descriptor(x, mode)
                    pybnorm.batch_normalization_forward_training(
                        h, mode, 2.0, 3.0, x, p["x"], y, p["y"], v, p["scale"], p["bias"], 0.25, p["rm"], p["rv"], 0.5,
                        p["sm"], p["si"])
                    pybnorm.batch_normalization_forward_inference(
                        h, mode, 2.0, 3.0, x, p["x"], y, p["y"], v, p["scale"], p["bias"], p["rm"], p["rv"], 0.5)
                    pybnorm.batch_normalization_backward(
                        h, mode, 2.0, 3.0, 4.0, 5.0, x, p["x"], y, p["dy"], x, p["dx"], v, p["scale"], p["dscale"],
                        p["dbias"], 0.5, p["sm"], p["si"])
                    found[f"{dtype} {int(mode)}"] = taken()
                pybnorm.axpby(h, 2.0, x, p["x"], 3.0, y, p["y"])
                pybnorm.fill(h, 1.5, y, p["y"])
                pybnorm.relu(h, x, p["x"], y, p["y"])
                pybnorm.relu_backward(h, x, p["x"], x, p["dy"], x, p["dx"])
                found[dtype] = taken()
            del x, y, v
        report([found, number("live").value, pybnorm.loaded("cudnn").version])
        """,
        dtypes=list(DTYPES),
    )
    names = ["x", "y", "dy", "dx", "scale", "bias", "rm", "rv", "sm", "si", "dscale", "dbias"]
    p = {name: f"{0x10000 * (i + 1):#x}" for i, name in enumerate(names)}
    saved = f"sm={p['sm']} si={p['si']}"
    for dtype, kind in DTYPES.items():
        first, last = f"{kind}:2,3,4,5/60,20,5,1", f"{kind}:2,3,4,5/60,1,15,3"
        x, y = f"x={first}@{p['x']}", f"y={last}@{p['y']}"
        for mode in range(3):
            dims = "1,3,4,5/60,20,5,1" if mode == 0 else "1,3,1,1/3,1,1,1"
            scale = f"scale={int(dtype == 'f64')}:{dims}@{p['scale']}"
            running = f"bias={p['bias']} rm={p['rm']} rv={p['rv']}"
            assert found[f"{dtype} {mode}"] == [
                f"cudnnBatchNormalizationForwardTraining mode={mode} alpha=2 beta=3 {x} {y} {scale} {running} {saved} "
                "factor=0.25 epsilon=0.5",
                f"cudnnBatchNormalizationForwardInference mode={mode} alpha=2 beta=3 {x} {y} {scale} {running} "
                "epsilon=0.5",
                f"cudnnBatchNormalizationBackward mode={mode} alpha=2 beta=3 alpha_param=4 beta_param=5 {x} "
                f"dy={last}@{p['dy']} dx={first}@{p['dx']} {scale} dscale={p['dscale']} dbias={p['dbias']} {saved} "
                "epsilon=0.5",
            ], (dtype, mode)
        # relu's backward takes y's place for x: where x > 0 is where y > 0
        assert found[dtype] == [
            f"cudnnTransformTensor alpha=2 beta=3 {x} {y}",
            f"cudnnSetTensor value=1.5 {y}",
            f"cudnnActivationForward act=1,1,0 alpha=1 beta=0 {x} {y}",
            f"cudnnActivationBackward act=1,1,0 alpha=1 beta=0 y={first}@{p['x']} dy={first}@{p['dy']} {x} "
            f"dx={first}@{p['dx']}",
        ], dtype
    assert live == 0
    assert version == ([9, 19, 0] if version[0] == 9 else [8, 9, 7])


def test_sizes_and_the_furthest_element(play, major):
    sizes, extents, (made, bits, reason) = play(
        """
        def made(dims, strides=None, dtype="f32"):
            return attempt(lambda: pybnorm.TensorDescriptor("cudnn", dtype, dims, strides).nbytes)

        most = 2**31 - 1
        sizes = [made((2, 3, 4, 5), None, d) for d in values["dtypes"]]
        sizes += [made((2, 3, 4), (100, 10, 2)), made((2, 3, 4, 5, 6), (1000, 300, 60, 7, 1))]
        sizes.append(made((2, 3, 2, 2, 2, 2, 2)))
        extents = [made((2, n, 1, 1), (most - less, 1, 1, 1)) for n, less in ((1, 1), (1, 0), (2, 2), (2, 1))]
        bits = pybnorm.capability("cudnn", pybnorm.Operation.FORWARD_TRAINING, 1, 0, 0, 2)
        report([sizes, extents, [made((2, 3)), int(bits[0]), bits[1]]])
        """,
        dtypes=list(DTYPES),
    )
    assert [size["value"] for size in sizes] == [480, 960, 240, 240, 508, 7256, 768]
    assert [extent.get("value") for extent in extents] == [4 * (2**31 - 1), None, 4 * (2**31 - 1), None]
    for refused in (extents[1], extents[3]):
        assert (refused["error"], "32 bits" in refused["text"]) == ("UnsupportedError", True)
    if major == 9:
        assert (made["value"], bits != 0) == (24, True)
    else:
        assert made["error"] == "UnsupportedError"
        assert "describe the tensor as (N, C, 1, 1)" in made["text"]
        assert (bits, "(N, C, 1, 1)" in reason) == (0, True)


def test_handles_and_descriptors_of_others(play):
    """They are used and never destroyed; a foreign descriptor that no call could take is refused."""
    found = play(
        """
        owner = pybnorm.Handle("cudnn", stream=0x5000)
        lent = pybnorm.Handle.from_pointer("cudnn", owner.pointer)
        p = places("x", "y")
        found = {"stream": lent.stream, "same": lent.pointer == owner.pointer}
        x = pybnorm.TensorDescriptor.from_pointer("cudnn", foreign(2, (2, 3, 4, 5), (60, 1, 15, 3)))
        found["read"] = [x.dtype.short, x.dims, x.strides, x.layout.name, x.nbytes]
        flat = pybnorm.TensorDescriptor.from_pointer("cudnn", foreign(9, (2, 3, 4), (12, 4, 1)))
        pybnorm.relu(lent, x, p["x"], x, p["y"])
        pybnorm.relu(lent, flat, p["x"], flat, p["y"])
        found["calls"] = taken()
        live = number("live").value  # one for rank 3 as cuDNN computes with it; the calls' go with the handle
        flat.close()
        x.close()
        del x, flat
        found["dropped"] = live - number("live").value
        lent.set_stream(0x6000)
        found["stream of both"] = owner.stream
        lent.close()
        found["closed"] = [taken(), number("live").value]
        owner.close()
        found["owner closed"] = [taken(), number("live").value]
        found["refused"] = [attempt(lambda: pybnorm.TensorDescriptor.from_pointer("cudnn", foreign(*case)))["error"]
                            for case in [(3, (2, 3, 4, 5), (60, 20, 5, 1)), (0, (2, 3, 4, 5), (0, 20, 5, 1)),
                                         (0, (2, 3, 4, 5), (60, -20, 5, 1)), (0, (2,), (1,))]]
        report(found)
        """
    )
    assert found.pop("calls") == [
        f"cudnnActivationForward act=1,1,0 alpha=1 beta=0 x={tensor}@0x10000 y={tensor}@0x20000"
        for tensor in ("2:2,3,4,5/60,1,15,3", "9:2,3,4,1/12,4,1,1")
    ]
    assert found == {
        "stream": 0x5000, "same": True, "read": ["f16", [2, 3, 4, 5], [60, 1, 15, 3], "CHANNELS_LAST", 240],
        "dropped": 1, "stream of both": 0x6000, "closed": [[], 1], "owner closed": [["cudnnDestroy"], 0],
        "refused": ["UnsupportedError"] * 4,
    }  # fmt: skip


STATUSES = {  # what each means to a caller
    9: {
        "NotInitializedError": (1001, 1005, 1008, 3005, 3006, 3008, 3009),
        "VersionMismatchError": (1002, 1003),
        "NotSupportedError": (1004, 3000, 3004),
        "ExecutionError": (1006, 1007, 5000, 5003),
        "BadParameterError": (2000, 2002),
        "InternalError": (4000, 4001, 6000),
        "AllocationError": (4003, 4004),
    },
    8: {
        "NotInitializedError": (1, 10, 11),
        "AllocationError": (2,),
        "BadParameterError": (3, 5),
        "InternalError": (4, 7, 15, 2000),
        "NotSupportedError": (6, 9),
        "ExecutionError": (8, 12, 13),
        "VersionMismatchError": (14,),
    },
}


def test_statuses_have_their_class_and_name(play, major):
    kinds = {status: kind for kind, statuses in STATUSES[major].items() for status in statuses}
    found, created = play(
        """
        x = pybnorm.TensorDescriptor("cudnn", "f32", (2, 3, 4, 5))
        found = {}
        with pybnorm.Handle("cudnn") as handle:
            for status in values["statuses"]:
                fail(status, "cudnnSetTensor")
                try:
                    pybnorm.fill(handle, 1.0, x, 4096)
                except pybnorm.VendorError as error:
                    found[status] = [type(error).__name__, error.status, error.status_name, error.text]
            fail(0)
        fail(values["statuses"][0], "cudnnCreate")
        report([found, attempt(lambda: pybnorm.Handle("cudnn"))["error"]])
        """,
        statuses=list(kinds),
    )
    text = "said the double" if major == 9 else ""
    assert found == {str(s): [kind, s, "CUDNN_STATUS_DOUBLE", text] for s, kind in kinds.items()}
    assert created == "NotInitializedError"


def test_what_fails_in_the_middle_leaves_nothing_behind(play):
    """relu's descriptor of the activation, and the second descriptor of a tensor."""
    found = play(
        """
        found = []
        with pybnorm.Handle("cudnn") as handle:
            x = pybnorm.TensorDescriptor("cudnn", "f32", (2, 3, 4, 5))
            calls = (lambda: pybnorm.relu(handle, x, 4096, x, 8192),
                     lambda: pybnorm.relu_backward(handle, x, 4096, x, 8192, x, 12288))
            for call in calls:
                call()  # what the handle keeps for these calls is made now
            start = number("live").value
            internal = 4000 if pybnorm.loaded("cudnn").version[0] == 9 else 4
            for part in ("CreateActivationDescriptor", "SetActivationDescriptor", "ActivationForward",
                         "ActivationBackward"):
                fail(internal, "cudnn" + part)
                answers = [attempt(call).get("error") for call in calls]
                found.append([answers, number("live").value - start])
            fail(0)
        report(found)
        """
    )
    internal = "InternalError"
    assert [answers for answers, _ in found] == [[internal] * 2] * 2 + [[internal, None], [None, internal]]
    assert {left for _, left in found} == {0}


def test_plans_of_either_version(play):
    """Over channels-first memory "auto" is the plain entry point; named algorithms say why not."""
    algorithm, lines, named = play(
        """
        with pybnorm.Handle("cudnn") as handle:
            x = pybnorm.TensorDescriptor("cudnn", "f32", (2, 8, 4, 5))
            plan = handle.plan_backward(x, saved=False, beta_param=0.5, alpha_param=2.0)
            p = places("x", "dy", "scale", "dx", "dscale", "dbias")
            plan(**p, workspace=(1 << 20, 1 << 20))
            named = {name: attempt(lambda: repr(handle.plan_forward_training(x, algorithm=name)))
                     for name in ("spatial", "persistent", "graph")}
            report([plan.algorithm, taken(), named])
        """
    )
    assert algorithm in ("plain", "spatial")
    assert len(lines) == 1
    assert "beta=0 alpha_param=2 beta_param=0.5 " in lines[0]
    assert "value" in named["spatial"]
    assert "value" in named["persistent"]
    assert named["graph"]["error"] in ("InternalError", "UnsupportedError")
    assert "graph" in named["graph"]["text"]
