"""What is written to standard error inside a block: for the error, and for whoever reads it."""

import os
import pickle

import pytest

import pybnorm
from pybnorm import errors


def failure():
    return errors.InternalError(
        backend="miopen", function="f", status=5, status_name="miopenStatusInternalError", text="MIOpen failed",
        library="libMIOpen.so.1", version=(3, 4, 0), descriptors=("x: f32",),
    )  # fmt: skip


def fail(text, error, seen=None):
    """Write, look at what has come through so far, and raise."""
    os.write(2, text)
    if seen is not None:
        assert seen.readouterr().err == ""
    raise error


def test_the_error_gets_the_text_and_the_reader_too(capfd):
    with pytest.raises(errors.InternalError) as caught, pybnorm.vendor_stderr() as captured:
        fail(b"MIOpen Error: no such kernel\n", failure(), capfd)
    assert caught.value.text == "MIOpen failed\nMIOpen Error: no such kernel"
    assert captured.text == "MIOpen Error: no such kernel"
    assert str(caught.value).splitlines() == [
        "miopen f: miopenStatusInternalError (5): MIOpen failed", "MIOpen Error: no such kernel",
        "  library: libMIOpen.so.1 3.4.0", "  x: f32",
    ]  # fmt: skip
    assert capfd.readouterr().err == "MIOpen Error: no such kernel\n"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.text, str(again)) == (caught.value.text, str(caught.value))


def test_without_an_error_nothing_is_lost(capfd):
    with pybnorm.vendor_stderr() as outer:
        os.write(2, b"outer\n")
        with pybnorm.vendor_stderr() as inner:
            os.write(2, b"inner\xff\n")
    assert (inner.text, outer.text) == ("inner\ufffd", "outer\ninner\ufffd")
    assert capfd.readouterr().err == "outer\ninner\ufffd\n"
    with pytest.raises(errors.InternalError) as caught, pybnorm.vendor_stderr():
        raise failure()
    assert caught.value.text == "MIOpen failed"
    with pytest.raises(ZeroDivisionError), pybnorm.vendor_stderr() as captured:
        fail(b"before\n", ZeroDivisionError())
    assert captured.text == "before"
    assert capfd.readouterr().err == "before\n"


def test_long_texts_are_whole_for_the_reader_and_cut_for_the_error(capfd):
    line = b"0123456789abcdef" * 8192
    with pytest.raises(errors.InternalError) as caught, pybnorm.vendor_stderr() as captured:
        fail(line, failure())
    assert len(captured.text) == len(line)
    assert len(caught.value.text) == len("MIOpen failed\n") + 4000
    assert len(capfd.readouterr().err) == len(line)


def test_a_process_without_standard_error(child):
    told = child(
        """
        import pybnorm
        os.close(2)
        with pybnorm.vendor_stderr() as captured:
            os.write(2, b"text")
        report([captured.text, attempt(lambda: os.fstat(2))["error"]])
        """
    )
    assert told == ["text", "OSError"]


def test_no_descriptor_is_left_open():
    def number():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system has no /proc/self/fd to count descriptors by")
    before = number()
    for _ in range(5):
        with pybnorm.vendor_stderr():
            pass
    assert number() == before
