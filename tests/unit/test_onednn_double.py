"""The adapter of oneDNN on a double that keeps the rules of the vendor's objects: whose they are, and none is left."""

import functools

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


@pytest.fixture
def play(child, doubles):
    """Runs a script behind `PRELUDE`."""
    return functools.partial(child, PRELUDE, file=doubles.build("onednn"))


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


CALLS = """
    memory_desc_create_with_strides primitive_attr_create primitive_attr_set_scratchpad_mode
    batch_normalization_forward_primitive_desc_create primitive_create memory_create memory_set_data_handle
    primitive_execute stream_wait
"""
STATUSES = {
    1: ("AllocationError", "dnnl_out_of_memory"),
    2: ("BadParameterError", "dnnl_invalid_arguments"),
    3: ("NotSupportedError", "dnnl_unimplemented"),
    5: ("ExecutionError", "dnnl_runtime_error"),
    98: ("InternalError", "\ufffd\ufffd"),
    99: ("InternalError", "unknown dnnl_status_t"),
}


def test_a_call_of_the_vendor_that_fails_leaves_nothing_behind(play):
    """Each of them in turn, and the handle works on."""
    answers = play(
        """
        answers = {}
        for name, call in (("create", lambda handle: None), ("train", train), ("back", back), ("infer", infer)):
            answers[name] = []
            told = True
            while told:
                failed = len(answers[name])
                fails_in.value, status.value = (failed + 1, (1, 2, 3, 5, 98, 99)[failed % 6])
                told = handle = None
                try:
                    handle = pybnorm.Handle("onednn")
                    call(handle)
                except pybnorm.VendorError as error:
                    told = error
                if handle is not None:
                    fails_in.value = 0
                    call(handle)
                    handle.close()
                if told:
                    answers[name].append([told.status, type(told).__name__, told.status_name, live.value, told.text])
        report(answers)
        """
    )
    # The first line is the library's; to what it does not have a second one names native.
    calls = {name: {text.partition("\n")[0] for *_, text in answer} for name, answer in answers.items()}
    assert calls["create"] == {"from dnnl_engine_create", "from dnnl_stream_create"}
    for name in ("train", "back", "infer"):
        assert calls[name] >= {f"from dnnl_{call}" for call in CALLS.split()}, name
    assert "from dnnl_batch_normalization_backward_primitive_desc_create" in calls["back"]
    for answer in answers.values():
        for status, *found, _ in answer:
            assert found == [*STATUSES[status], 0]


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
    words = {"format": "no strides", "blocks": "inner blocks", "offset": "offset", "padding": "padded"}
    for name, said in {**words, "kind": "CPU engine"}.items():
        assert answers[name].get("error") == "UnsupportedError", name
        assert said in answers[name]["text"]
