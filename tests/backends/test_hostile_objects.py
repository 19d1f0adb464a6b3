"""Objects that lie, or are no arrays or numbers: refused by the name of the argument, on oneDNN."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import pybnorm
from pybnorm import functional, graph, operations
from pybnorm._arrays import Memory

X = np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4)
V = np.ones(3, np.float32)


@pytest.fixture(scope="module")
def handle(need_device):
    need_device("onednn")
    with pybnorm.Handle("onednn") as made:
        yield made


def kind(value):
    return f"{type(value).__name__}-{getattr(value, 'dtype', '')}"


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


def test_iterables_of_operations_and_graphs(handle):
    means = np.ones((2, 3), np.float32)
    for counts in (5, itertools.count(1), "12", [1, True], [1.0, 2.0], np.array(3), None):
        with pytest.raises(pybnorm.ArgumentError, match=r"^counts: got "):
            operations.gather_stats(handle, means, means, counts, mean=V.copy())
    for axis in (np.array(1), itertools.count(), [[1]], None, 1.0, b"1", True):
        with pytest.raises(pybnorm.ArgumentError, match=r"^axis: got "):
            operations.forward_training(handle, X, V, V, np.zeros_like(X), axis=axis)
    for name in ([], {}, 5, "nothing"):
        with pytest.raises(pybnorm.ArgumentError, match=r"^operation: got "):
            operations.plan(handle, name)
    for modes in (5, None, itertools.repeat(graph.HeuristicMode.A), [5], 1.5):
        made = graph.Graph()
        x = made.tensor(name="x", dim=(2, 3, 4, 4), stride=(48, 16, 4, 1), data_type="f32", uid=1)
        made.relu(x).set_output(True).set_data_type("f32")
        with pytest.raises(pybnorm.ArgumentError, match=r"^modes: got "):
            made.build(handle, modes)
    for attributes in (graph.BatchnormAttributes(), graph.BatchnormBackwardAttributes()):
        for peers in (5, None, itertools.repeat(graph.TensorAttributes()), [5]):
            with pytest.raises(pybnorm.ArgumentError, match=r"^peer_stats: got "):
                attributes.set_peer_stats(peers)
    with pytest.raises(pybnorm.ArgumentError, match=r"^dim: got "):
        graph.TensorAttributes().set_dim(itertools.count(1))


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


@pytest.mark.parametrize(
    "changes",
    [{"dims": 5}, {"dims": (2, 3)}, {"dims": ("a", 3, 4, 4)}, {"strides": (1, True, 1, 1)}, {"dtype": "f32"},
     {"pointer": "1"}, {"device_type": []}, {"device_id": None}],
    ids=str,
)  # fmt: skip
def test_a_buffer_that_was_made_of_anything(handle, changes):
    buffer = handle.buffer(X, "x")._replace(**changes)
    for call in (lambda: handle.fill(1.0, buffer), lambda: operations.fill(handle, 1.0, buffer)):
        with pytest.raises(pybnorm.ArgumentError, match=r"^y: got "):
            call()
    memory = Memory(X.ctypes.data, X.nbytes, 1, 0, True, X)._replace(
        **{n: v for n, v in changes.items() if n in Memory._fields}
    )
    if memory != (X.ctypes.data, X.nbytes, 1, 0, True, X):
        with pytest.raises(pybnorm.ArgumentError, match=r"^workspace: got "):
            handle.memory(memory)


class AsksForTrouble:
    def __getattr__(self, name):
        raise ZeroDivisionError(name)


def test_what_else_once_was_an_error_of_something_else(handle):
    for stream in (AsksForTrouble(), type("Short", (), {"__cuda_stream__": (0,)})()):
        with pytest.raises(pybnorm.ArgumentError, match=r"^stream: got .* whose __cuda_stream__ failed"):
            handle.set_stream(stream)
    for name in (None, 5, b"x"):
        with pytest.raises(pybnorm.ArgumentTypeError, match=r"^argument: got "):
            handle.buffer(X, name)
        with pytest.raises(pybnorm.ArgumentTypeError, match=r"^argument: got "):
            handle.descriptor(X, name)
    with pytest.raises(pybnorm.ArgumentTypeError, match=r"^output: got 1"):
        handle.buffer(X, "x", output=1)
    vectors = dict.fromkeys(("scale", "mean", "inv_variance", "sum_dy", "sum_dy_xmu"), V)
    with pytest.raises(pybnorm.ArgumentError, match=r"^count: got "):
        operations.backward_elemt(handle, x=X, dy=X, **vectors, count=10**400, dx=np.zeros_like(X))
    for name in ("running_mean", "running_variance"):
        arrays = {"running_mean": V.copy(), "running_variance": V.copy()} | {name: AsksForTrouble()}
        with pytest.raises(pybnorm.ArgumentError, match=f"^{name}: got .*ZeroDivisionError"):
            functional.batch_norm_training(X, V, V, **arrays)
    with pytest.raises(pybnorm.ArgumentError, match=r"^out: got dims \(3,\)"):
        functional.batch_norm_inference(X, running_mean=V, running_variance=V, out=V.copy())
    with pytest.raises(pybnorm.ArgumentError, match=r"^out\[0\]: got dims \(3,\)"):
        functional.batch_norm_training(X, V, V, out=(V.copy(), None, None))
