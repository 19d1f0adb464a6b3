"""The adapter of oneDNN on a double that keeps the rules of the vendor's objects: whose they are, and none is left."""

import textwrap
from pathlib import Path

import pytest

PRELUDE = """
    import ctypes
    import numpy as np
    import pybnorm

    pybnorm.load("onednn", values["file"])
    library = ctypes.CDLL(values["file"])
    live, primitives, fails_in, status = (
        ctypes.c_int.in_dll(library, f"double_{n}") for n in ("live", "primitives", "fails_in", "status")
    )
    ones = np.ones(3, "f4")

    def train(handle, n=2, **options):
        x = np.ones((n, 3, 2, 2), "f4")
        handle.forward_training(x, ones, ones, np.empty_like(x), **options)

    def back(handle, **options):
        x = np.ones((2, 3, 2, 2), "f4")
        handle.backward(x, x, ones, np.empty_like(x), np.empty(3, "f4"), np.empty(3, "f4"), **options)

    def infer(handle, **options):
        x = np.ones((2, 3, 2, 2), "f4")
        handle.forward_inference(x, ones, ones, ones, ones, np.empty_like(x), **options)
    """


@pytest.fixture(scope="module")
def library(doubles):
    return Path(doubles.build("onednn", defines=("DOUBLE_RECORDS",)))


@pytest.fixture
def play(child, library):
    """Runs a script behind `PRELUDE`."""
    return lambda script: child(textwrap.dedent(PRELUDE) + textwrap.dedent(script), file=str(library))


def test_a_stream_of_another_engine_gets_primitives_of_its_own(play):
    """A stream of the same engine keeps those that there are."""
    counts, alive = play(
        """
        def made(call):
            before = primitives.value
            call()
            return primitives.value - before

        def new(name, *arguments):
            pointer = ctypes.c_void_p()
            assert getattr(library, name)(ctypes.byref(pointer), *arguments) == 0
            return pointer

        handle = pybnorm.Handle("onednn")
        own = handle.stream
        engine = new("dnnl_engine_create", 1, ctypes.c_size_t(0))
        first, second = (new("dnnl_stream_create", engine, 1) for _ in range(2))
        counts = [made(lambda: train(handle)), made(lambda: train(handle))]
        for stream in (first.value, second.value, own, own):
            handle.set_stream(stream)
            counts.append(made(lambda: train(handle)))
        borrowed = pybnorm.Handle.from_pointer("onednn", first.value)
        counts.append(made(lambda: train(borrowed)))
        borrowed.close()
        handle.close()
        for name, object in (("stream", first), ("stream", second), ("engine", engine)):
            getattr(library, f"dnnl_{name}_destroy")(object)
        report([counts, live.value])
        """
    )
    assert counts == [1, 0, 1, 0, 1, 0, 1]
    assert alive == 0


def test_the_primitive_that_was_used_longest_ago_makes_room(play):
    made, alive = play(
        """
        def used(*sizes):
            before = primitives.value
            for n in sizes:
                train(handle, n)
            return primitives.value - before

        handle = pybnorm.Handle("onednn")
        made = [used(*range(2, 66)), used(*range(2, 66)), used(2), used(66), used(2), used(*range(4, 67)), used(3)]
        epsilons = primitives.value
        for epsilon in (1e-5, 1e-4, 1e-5):
            train(handle, 70, epsilon=epsilon)
        made.append(primitives.value - epsilons)
        handle.close()
        report([made, live.value])
        """
    )
    assert made == [64, 0, 0, 1, 0, 0, 1, 2]
    assert alive == 0


def test_a_call_of_the_vendor_that_fails_leaves_nothing_behind(play):
    """Each of them in turn, and the handle works on."""
    answers = play(
        """
        answers = {}
        for name, call in (("create", lambda handle: None), ("train", train), ("back", back), ("infer", infer)):
            failed = 0
            while True:
                fails_in.value, status.value = (failed + 1, (1, 2, 3, 5, 98, 99)[failed % 6])
                try:
                    handle = pybnorm.Handle("onednn")
                except pybnorm.VendorError as error:
                    told = error
                else:
                    told = None
                    try:
                        call(handle)
                    except pybnorm.VendorError as error:
                        told = error
                    fails_in.value = 0
                    call(handle)
                    handle.close()
                if told is None:
                    break
                failed += 1
                answers.setdefault(name, []).append(
                    [type(told).__name__, told.status, told.status_name, told.text, live.value]
                )
        report(answers)
        """
    )
    names = ["dnnl_out_of_memory", "dnnl_invalid_arguments", "dnnl_unimplemented", "dnnl_runtime_error"]
    names += ["\ufffd\ufffd", "unknown dnnl_status_t"]
    kinds = ["AllocationError", "BadParameterError", "NotSupportedError", "ExecutionError"]
    kinds += ["InternalError", "InternalError"]
    # The first line is the library's; to what it does not have a second one names native.
    calls = {name: {text.partition("\n")[0] for *_, text, _ in answer} for name, answer in answers.items()}
    assert calls["create"] == {"from dnnl_engine_create", "from dnnl_stream_create"}
    for name in ("train", "back", "infer"):
        assert calls[name] >= {
            f"from dnnl_{call}"
            for call in (
                "memory_desc_create_with_strides",
                "primitive_attr_create",
                "primitive_attr_set_scratchpad_mode",
                "batch_normalization_forward_primitive_desc_create",
                "primitive_create",
                "memory_create",
                "memory_set_data_handle",
                "primitive_execute",
                "stream_wait",
            )
        }, name
    assert "from dnnl_batch_normalization_backward_primitive_desc_create" in calls["back"]
    for answer in answers.values():
        for i, (kind, status, status_name, _, alive) in enumerate(answer):
            assert (kind, status) == (kinds[i % 6], (1, 2, 3, 5, 98, 99)[i % 6])
            assert status_name == names[i % 6]
            assert alive == 0


def test_what_is_no_plain_memory_of_the_cpu_is_not_borrowed(play):
    answers = play(
        """
        answers = {}
        x = pybnorm.TensorDescriptor("onednn", "f32", (2, 3, 4, 5))
        handle = pybnorm.Handle("onednn")
        borrow = lambda: str(pybnorm.TensorDescriptor.from_pointer("onednn", x.pointer).dims)
        for name, number in (("", 0), ("format", 1), ("blocks", 1), ("offset", 8), ("padding", 1), ("kind", 2)):
            knob = ctypes.c_int.in_dll(library, f"double_{name}") if name else ctypes.c_int()
            before, knob.value = knob.value, number
            call = borrow if name != "kind" else lambda: handle.set_stream(handle.stream)
            answers[name] = attempt(call)
            knob.value = before
        report(answers)
        """
    )
    assert answers.pop("") == {"value": "(2, 3, 4, 5)"}
    words = {
        "format": "no strides",
        "blocks": "inner blocks",
        "offset": "offset",
        "padding": "padded",
        "kind": "CPU engine",
    }
    for name, said in words.items():
        assert answers[name].get("error") == "UnsupportedError", name
        assert said in answers[name]["text"]
