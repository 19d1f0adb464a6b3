"""Calls go to their handle's device and leave the thread's own current; memory of other devices is refused.

On doubles that note which device is current at each call. What two real devices say: tests/devices/test_two_devices.py.
"""

import pytest
from doubles.build import HERE

HOST = ("TensorDescriptor", "TensorNdDescriptor", "ErrorString", "GetVersion", "GetTensorSize", "GetTensorNumBytes")

PLACES = """
    import ctypes, threading
    import numpy as np
    import pybnorm
    from pybnorm import Operation
    from pybnorm._arrays import Buffer, Memory, as_buffer

    cuda = values["backend"] == "cudnn"
    TYPE = 2 if cuda else 10
    driver = ctypes.CDLL(values["driver"]) if cuda else None
    pybnorm.load(values["backend"], values["file"])
    library = ctypes.CDLL(values["file"])
    log = (ctypes.c_char * (1 << 16)).in_dll(library, "double_places")
    said = (driver, "driver") if cuda else (library, "double")
    memory = (ctypes.c_ulonglong * 40).in_dll(said[0], f"{said[1]}_memory")
    if not cuda:
        ctypes.c_int.in_dll(library, "double_devices").value = 3

    def go(device):
        driver.driver_go(device) if cuda else library.hipSetDevice(max(device, 0))

    def current():
        found = ctypes.c_int(-1)
        return driver.driver_current() if cuda else library.hipGetDevice(ctypes.byref(found)) or found.value

    def number(name):
        return ctypes.c_int.in_dll(said[0], f"{said[1]}_{name}")

    def belongs(slot, start, end, device, kind=2, special=0):
        "Says to the driver whose memory that is; special: managed, or of HIP's pinned."
        last = [kind, special] if cuda else [special, kind == 1]
        memory[5 * slot : 5 * slot + 5] = [start, end, device, *last]

    def taken():
        lines = [line.split() for line in log.value.decode().splitlines()]
        log.value = b""
        return lines

    def handle_of(device):
        go(device)
        handle = pybnorm.Handle(values["backend"])
        assert handle.device == device
        return handle

    kept = [np.zeros(512, "f4") for _ in range(12)]

    def array(i, device, shape=(2, 3, 4, 5)):
        b = as_buffer(kept[i][: int(np.prod(shape))].reshape(shape), "x")
        return b._replace(device_type=TYPE, device_id=device)

    def everything(h, d):
        "Each call of a handle, by name."
        x, y, dx = array(0, d), array(1, d), array(2, d)
        v = [array(3 + i, d, (3,)) for i in range(8)]
        space = Memory(kept[11].ctypes.data // 64 * 64 + 64, 1024, TYPE, d, True, None)
        listed = pybnorm._core.CallList(h)
        listed.append(h, Operation.FILL, {"y": x._replace(pointer=1 << 56)}, (0, 0), value=1.0)
        plans = [h.plan_forward_training(x), h.plan_forward_inference(x), h.plan_backward(x, saved=False)]
        yield "training", lambda: h.forward_training(x, v[0], v[1], y, saved_mean=v[2], saved_inv_variance=v[3])
        yield "inference", lambda: h.forward_inference(x, v[0], v[1], v[2], v[3], y)
        yield "backward", lambda: h.backward(x, y, v[0], dx, v[4], v[5], saved_mean=v[2], saved_inv_variance=v[3])
        yield "axpby", lambda: h.axpby(2.0, x, 0.0, y)
        yield "fill", lambda: h.fill(1.0, y)
        yield "relu", lambda: h.relu(x, y)
        yield "relu_backward", lambda: h.relu_backward(x, y, dx)
        yield "list", lambda: listed.run(h, (0, y.pointer))
        yield "plan training", lambda: plans[0](x, v[0], v[1], y, v[2], v[3], v[4], v[5])
        yield "plan inference", lambda: plans[1](x.pointer, v[0].pointer, v[1], v[2], v[3], y)
        yield "plan backward", lambda: plans[2](x, y, v[0], dx, v[4], v[5], workspace=space)
        yield "set_stream", lambda: h.set_stream(0)
        yield "stream", lambda: h.stream
        if cuda:
            yield "query", h.query_runtime_error
            last, made = pybnorm.TensorDescriptor("cudnn", "f16", (2, 8, 3, 5), (120, 1, 40, 8)), []
            for name in ("ex", "graph"):
                yield f"{name} made", lambda name=name: made.append(
                    h.plan_forward_training(last, activation="relu", algorithm=name))
                yield f"{name} run", lambda: made[-1](*[4096 * i for i in range(1, 9)], workspace=(1 << 20, 1 << 16))
                yield f"{name} dropped", made.clear
"""


@pytest.fixture
def places(child, doubles, beside):
    """Runs a script behind `PLACES` on a double of the backend that the test names."""

    def run(backend, script, **values):
        if backend == "miopen":
            driver, file = "", doubles.build("miopen", defines=("DOUBLE_COMPUTES",), place="hipGetDevice")
        else:
            driver = doubles.plain("libcuda.so.1", (HERE / "cuda.c").read_text())
            file = beside(doubles.build("cudnn", defines=("DOUBLE_RECORDS",), place="cuCtxGetDevice"))
        return child(PLACES, script, backend=backend, driver=driver, file=file, **values)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cudnn", "miopen"])
def test_every_call_is_made_on_its_handles_device(places, backend):
    found = places(
        backend,
        """
        handles = {d: handle_of(d) for d in (0, 2)}
        calls = [(d, name, call) for d, h in handles.items() for name, call in everything(h, d)]
        found = []

        def go_through(froms):
            for start in froms:
                for d, name, call in calls:
                    go(start)
                    taken()
                    before = number("switches").value
                    call()
                    found.append([d, start, name, taken(), current(), number("switches").value - before])

        go_through([0, 1, 2, -1] if cuda else [0, 1, 2])
        thread = threading.Thread(target=go_through, args=[[-1] if cuda else [0]])  # in which nothing is current
        thread.start()
        thread.join()
        for d, h in handles.items():
            go(1)
            taken()
            before = number("switches").value
            h.close()
            found.append([d, 1, "close", taken(), current(), number("switches").value - before])
        report(found)
        """,
    )
    assert len({name for _, _, name, *_ in found}) == (21 if backend == "cudnn" else 14)
    called = set()
    for device, start, name, lines, after, switches in found:
        case = f"{name} of a handle of device {device} while {start} is current"
        calls = [(function, int(place)) for function, place in lines if not any(part in function for part in HOST)]
        assert calls, case
        assert {place for _, place in calls} == {device}, f"{case}: {calls}"
        assert after == start, case
        # A new plan of MIOpen asks whether the library tunes now, and its first training what it saved: there and back
        # once more for each, and not at later calls.
        asks = backend == "miopen" and (device, name) not in called
        first = (2, 4, 6) if "train" in name else (2, 4)
        assert switches in ((0,) if device == start else first if asks else (2,)), case
        called.add((device, name))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cudnn", "miopen"])
def test_memory_of_another_device_is_refused_by_name(places, backend):
    """Arrays, workspace, reserve and bare addresses; the driver says it where the array does not."""
    found = places(
        backend,
        """
        handle = handle_of(0)
        go(1)
        x, y, dx = array(0, 0), array(1, 0), array(2, 0)
        far, unsaid = array(1, 2), array(1, -1)
        v = [array(3 + i, 0, (3,)) for i in range(8)]
        begin = kept[1].ctypes.data
        belongs(0, begin, begin + kept[1].nbytes, 2)
        begin = kept[10].ctypes.data
        belongs(1, begin, begin + kept[10].nbytes, 2)
        aligned = (kept[10].ctypes.data + 63) // 64 * 64
        plan = handle.plan_forward_training(x)
        xd = pybnorm.TensorDescriptor(values["backend"], "f32", x.dims)
        pd = pybnorm.derive_bn_tensor_descriptor(xd, pybnorm.Mode.SPATIAL)
        p = [b.pointer for b in (x, y, *v)]
        b = pybnorm
        refused = [
            ("y", lambda: handle.relu(x, far)),
            ("y", lambda: handle.relu(x, unsaid)),
            ("y", lambda: handle.buffer(unsaid, "y")),
            ("scale", lambda: handle.forward_training(x, array(10, 2, (3,)), v[1], y._replace(pointer=dx.pointer))),
            ("workspace", lambda: handle.memory(Memory(aligned, 64, TYPE, 2, True, None))),
            ("workspace", lambda: handle.memory(Memory(aligned, 64, TYPE, -1, True, None))),
            ("workspace", lambda: handle.memory((aligned, 64))),
            ("y", lambda: plan(x.pointer, v[0], v[1], p[1], *v[2:6])),
            ("scale", lambda: plan(x.pointer, kept[10].ctypes.data, v[1], dx.pointer, *v[2:6])),
            ("workspace", lambda: plan(x, v[0], v[1], dx, *v[2:6], workspace=(aligned, 64))),
            ("reserve", lambda: plan(x, v[0], v[1], dx, *v[2:6], reserve=(aligned, 64))),
            ("y", lambda: plan(x, v[0], v[1], far, *v[2:6])),
            ("y", lambda: b.relu(handle, xd, p[0], xd, p[1])),
            ("dy", lambda: b.relu_backward(handle, xd, p[0], xd, p[1], xd, dx.pointer)),
            ("y", lambda: b.fill(handle, 1.0, xd, p[1])),
            ("x", lambda: b.axpby(handle, 1.0, xd, p[1], 0.0, xd, dx.pointer)),
            ("workspace", lambda: b.axpby(
                handle, 1.0, xd, p[0], 0.0, xd, dx.pointer, workspace=aligned, workspace_size=64)),
            ("y", lambda: b.batch_normalization_forward_training(
                handle, "spatial", 1.0, 0.0, xd, p[0], xd, p[1], pd, p[2], p[3], 0.1, 0, 0, 1e-5, 0, 0)),
            ("saved_inv_variance", lambda: b.batch_normalization_forward_training(
                handle, "spatial", 1.0, 0.0, xd, p[0], xd, dx.pointer, pd, p[2], p[3], 0.1, 0, 0, 1e-5, p[4], aligned)),
            ("x", lambda: b.batch_normalization_forward_inference(
                handle, "spatial", 1.0, 0.0, xd, p[1], xd, dx.pointer, pd, p[2], p[3], p[4], p[5], 1e-5)),
            ("dy", lambda: b.batch_normalization_backward(
                handle, "spatial", 1.0, 0.0, 1.0, 0.0, xd, p[0], xd, p[1], xd, dx.pointer, pd, p[2], p[3], p[4], 1e-5,
                0, 0)),
        ]
        taken()
        found = [[name, attempt(call)] for name, call in refused]
        answers = [found, [line for line in taken() if "Batch" in line[0] or "Activation" in line[0]], current()]
        # every device reaches managed and pinned memory, and the driver does not know all
        belongs(0, 0, 0, 0)
        good = []
        for kind, special in ((2, 1), (1, 0), (None, 0)):
            begin = kept[1].ctypes.data if kind else 0
            belongs(0, begin, begin + (kept[1].nbytes if kind else 0), 2, kind or 0, special)
            handle.relu(x, unsaid)
            pybnorm.fill(handle, 1.0, xd, p[1])
            plan(x.pointer, v[0], v[1], p[1], v[2], v[3], v[4], v[5])
            good.append(handle.buffer(unsaid, "y").device_id)
        belongs(0, kept[1].ctypes.data, kept[1].ctypes.data + kept[1].nbytes, 0)
        good.append(handle.buffer(unsaid, "y").device_id)
        left = 0 if cuda else ctypes.c_int.in_dll(library, "double_last_error").value
        # with one device there is nothing to ask about bare addresses, and nothing about arrays that say theirs
        before = number("questions").value
        handle.relu(x, y)
        asked = [number("questions").value - before]
        number("devices").value = 1
        with handle_of(0) as alone:
            before = number("questions").value
            alone.plan_forward_training(x)(x.pointer, v[0], v[1], p[1], v[2], v[3], v[4], v[5])
            pybnorm.fill(alone, 1.0, xd, p[1])
            asked.append(number("questions").value - before)
        report([*answers, good, left, asked])
        """,
    )
    refused, called, after, good, left, asked = found
    for name, result in refused:
        assert result.get("error") == "ArgumentError", (name, result)
        assert result["text"] == f"{name}: got memory of device 2, allowed: memory of device 0, the handle's"
    assert (called, after, left) == ([], 1, 0)
    assert good == [-1, -1, -1, 0]
    assert asked == [0, 0]


def test_a_stream_of_another_device_is_not_followed(places):
    result, stream, followed = places(
        "cudnn",
        """
        import sys
        sys.path.insert(0, values["folder"])
        import c_table
        handle = handle_of(0)
        result = attempt(lambda: handle.follow_stream(c_table.Exchanging(device=(2, 1))))
        stream = handle.stream
        report([result, stream, handle.follow_stream(c_table.Exchanging(device=(2, 0)))])
        """,
        folder=HERE.parent,
    )
    assert result["text"] == "array: got memory of device 1, allowed: memory of device 0, the handle's"
    assert (stream, followed) == (0, True)


@pytest.mark.parametrize("backend", ["cudnn", "miopen"])
def test_a_device_that_is_gone(places, backend):
    """Its handle's calls are refused with a sentence; handle and plans can still be dropped."""
    found = places(
        backend,
        """
        handle = handle_of(2)
        x, y = array(0, 2), array(1, 2)
        plan = handle.plan_forward_training(x, algorithm="plain" if cuda else None)
        go(1)
        if cuda:
            (ctypes.c_int * 3).in_dll(driver, "driver_gone")[2] = 1
        else:
            number("gone").value = 2
        taken()
        results = [attempt(lambda: handle.relu(x, y)), attempt(lambda: plan(*[4096 * i for i in range(1, 9)]))]
        results.append(attempt(lambda: handle.set_stream(0)))
        calls = [line for line in taken() if "Activation" in line[0] or "Batch" in line[0] or "Stream" in line[0]]
        del plan
        handle.close()
        report([results, calls, current(), [name for name, _ in taken() if name.endswith("Destroy")]])
        """,
    )
    results, calls, after, destroyed = found
    assert calls == []
    assert after == 1
    assert len(destroyed) == 1
    for result in results:
        assert result["error"] == "ExecutionError", result
        assert "PBN_E_DEVICE" in result["text"]
        assert "a new handle is needed" in result["text"]


def test_the_context_that_is_asked_whether_it_is_lost_is_the_handles(places):
    found = places(
        "cudnn",
        """
        handles = [handle_of(d) for d in (0, 2)]
        go(1)
        (ctypes.c_int * 3).in_dll(driver, "driver_lost")[2] = 700
        ctypes.c_int.in_dll(library, "double_status").value = 5000
        (ctypes.c_char * 64).in_dll(library, "double_failing").value = b"cudnnSetTensor"
        found = [attempt(lambda: h.fill(1.0, array(0, h.device)))["error"] for h in handles]
        (ctypes.c_char * 64).in_dll(library, "double_failing").value = b"cudnnDestroy"
        found += [attempt(h.close)["error"] for h in handles]
        (ctypes.c_char * 64).in_dll(library, "double_failing").value = b"cudnnCreate"
        found.append(attempt(lambda: pybnorm.Handle("cudnn"))["error"])
        report([found, current()])
        """,
    )
    assert found == [["ExecutionError", "ContextLostError"] * 2 + ["ExecutionError"], 1]


def test_a_borrowed_handle_is_where_its_stream_is(places):
    found = places(
        "cudnn",
        """
        owner = handle_of(2)
        go(0)
        found = []
        for stream in (0, 0x3000, 0x2000):
            owner.set_stream(stream)
            borrowed = pybnorm.Handle.from_pointer("cudnn", owner.pointer)
            taken()
            borrowed.fill(1.0, array(0, borrowed.device))
            found.append([borrowed.device, taken()[-1], current()])
            borrowed.close()
        report(found)
        """,
    )
    assert found == [[d, ["cudnnSetTensor", str(d)], 0] for d in (0, 2, 1)]


def test_a_handle_follows_the_current_stream_and_sets_it_only_when_it_changed(run):
    seen, closed = run(
        """
        import numpy
        sys.path.insert(0, values["folder"])
        import c_table

        here, there, host = (c_table.Exchanging(device=device) for device in [(2, 0), (2, 3), (1, 0)])
        seen = []
        with pybnorm.Handle("cudnn") as handle:
            for array in (here, here, there, there, host, numpy.ones(3), here, here):
                seen.append([handle.follow_stream(array), handle.stream, number("sets").value])
                if len(seen) == 7:
                    handle.set_stream(77)
        report([seen, attempt(lambda: handle.follow_stream(here))["error"]])
        """,
        folder=HERE.parent,
    )
    streams, sets = [2000, 2000, 2003, 2003, 2003, 2003, 2000, 2000], [1, 1, 2, 2, 2, 2, 3, 5]
    follows = [True] * 4 + [False] * 2 + [True] * 2
    assert seen == list(map(list, zip(follows, streams, sets, strict=True)))
    assert closed == "ClosedError"
