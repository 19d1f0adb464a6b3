"""Objects that lie, or are no arrays or numbers, on oneDNN; tests/fuzz has each argument's hostile values."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tables import table

import pybnorm
from pybnorm import functional
from pybnorm._arrays import Memory

X = np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4)
V = np.ones(3, np.float32)


@pytest.fixture(scope="module")
def handle(need_device):
    need_device("onednn")
    with pybnorm.Handle("onednn") as made:
        yield made


def test_functional_tells_equal_values_of_other_types_apart(handle):
    """A call with 1 is kept; True, 1.0 and 1 + 0j are equal to 1 and have its hash."""
    for mine in (None, handle):
        training = functools.partial(functional.batch_norm_training, X, V, V, handle=mine)
        running = {"running_mean": np.zeros(3, np.float32), "running_variance": np.ones(3, np.float32)}
        statistics = dict.fromkeys(running, V)
        inference = functools.partial(functional.batch_norm_inference, X, **statistics, handle=mine)
        backward = functools.partial(functional.batch_norm_backward, X, X, V, handle=mine)
        for call, name, others in (
            (training, "mode", (True, 1.0, np.True_, 1 + 0j)),
            (inference, "mode", (True, 1.0)),
            (backward, "mode", (True, 1.0)),
            (training, "epsilon", (True, np.True_, 1 + 0j)),
            (inference, "epsilon", (True, 1 + 0j)),
            (backward, "epsilon", (True, 1 + 0j)),
            (functools.partial(training, **running), "exponential_average_factor", (True, np.True_, 1 + 0j)),
        ):
            for _ in range(2):
                call(**{name: 1})
                for other in others:
                    with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: got "):
                        call(**{name: other})
        for value in ([], {}, np.ones(3), Unhashable()):
            for name in ("mode", "epsilon", "algorithm"):
                with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: got "):
                    training(**{name: value})


class Unhashable:
    def __hash__(self):
        raise ZeroDivisionError


class OnlyDlpack:
    """An array of a framework of which nothing but DLPack is known."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__()


def test_no_scale_for_a_framework_that_makes_no_arrays(handle):
    x, y, v = OnlyDlpack(X), OnlyDlpack(np.zeros_like(X)), OnlyDlpack(V.copy())
    for name, scale, bias in (("scale", None, v), ("bias", v, None)):
        with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: got None, allowed: an array: of OnlyDlpack"):
            functional.batch_norm_training(x, scale, bias, handle=handle, out=(y, None, None))
    functional.batch_norm_inference(x, running_mean=v, running_variance=v, handle=handle, out=y)  # NumPy's
    assert np.allclose(y.array, (X - 1) / np.sqrt(1 + 1e-5))
    *_, saved = functional.batch_norm_training(x, V, V, handle=handle, out=(y, None, None))
    assert isinstance(saved, np.ndarray)


@table("changes", [{"pointer": "1"}, {"nbytes": -1}, {"device_type": []}, {"device_id": None}, {"writable": False}])
def test_memory_that_was_made_of_anything(handle, changes):
    with pytest.raises(pybnorm.ArgumentError, match=r"^workspace: got "):
        handle.memory(Memory(X.ctypes.data, X.nbytes, 1, 0, True, X)._replace(**changes))


def test_outputs_of_other_dims(handle):
    with pytest.raises(pybnorm.ArgumentError, match=r"^out: got dims \(3,\)"):
        functional.batch_norm_inference(X, running_mean=V, running_variance=V, out=V.copy())
    with pytest.raises(pybnorm.ArgumentError, match=r"^out\[0\]: got dims \(3,\)"):
        functional.batch_norm_training(X, V, V, out=(V.copy(), None, None))
