"""MIOpen explains an error on standard error and nowhere else: `pybnorm.vendor_stderr` has it, and it comes through."""

import numpy as np
import pytest
from place import device_of

import pybnorm

DIMS = (2, 3, 24, 24)  # channels-last training of this size: MIOpen 3.4 asks for a kernel that it did not compile


def test_the_error_has_miopens_text(handle, capfd):
    if handle.backend != "miopen":
        pytest.skip(f"{handle.backend}: errors have the library's own text")
    device = device_of(handle)
    memory = np.ascontiguousarray(np.random.default_rng(0).normal(size=(2, 24, 24, 3)).astype(np.float32))
    x = device.from_numpy(memory.transpose(0, 3, 1, 2))
    y = device.from_numpy(memory.transpose(0, 3, 1, 2))
    one = device.from_numpy(np.ones(3, np.float32))
    texts = []
    for capture in (False, True):
        try:
            if capture:
                with pybnorm.vendor_stderr():
                    handle.forward_training(x, one, one, y)
            else:
                handle.forward_training(x, one, one, y)
        except pybnorm.VendorError as error:
            texts.append(error.text)
    if not texts:
        pytest.skip("miopen: this library computes what 3.4 fails at")
    plain, captured = texts
    assert "MIOpen Error" not in plain
    assert captured.startswith(plain)
    assert "MIOpen Error: " in captured
    assert capfd.readouterr().err.count("MIOpen Error: ") == 2
