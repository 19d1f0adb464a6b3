"""NumPy arrays as a plan takes them by the buffer protocol: what that does not say is refused by name as before."""

import numpy as np
import pytest
from tables import table

import pybnorm

SHAPE = (4, 8, 3, 5)


@pytest.fixture
def arrays(load_library):
    load_library("onednn")
    rng = np.random.default_rng(0)
    with pybnorm.Handle("onednn") as handle:
        x = rng.standard_normal(SHAPE).astype(np.float32)
        vectors = [np.ones(8, np.float32), np.zeros(8, np.float32)]
        yield handle.plan_forward_training(x, running=False, saved=False), x, *vectors, np.full_like(x, np.nan)


def right(x):
    x = x.astype(np.float64)
    return (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)


def test_strides_of_axes_that_are_one_long_and_shapes_of_vectors_do_not_matter(arrays):
    plan, x, scale, bias, y = arrays
    plan(x, scale.reshape(1, 8, 1, 1), bias.reshape(8, 1, 1), y)
    assert np.allclose(y, right(x), atol=1e-5)


def test_a_read_only_input_is_taken_and_a_read_only_output_is_not(arrays):
    plan, x, scale, bias, y = arrays
    for array in (x, scale, bias):
        array.flags.writeable = False
    plan(x, scale, bias, y)
    assert np.allclose(y, right(x), atol=1e-5)
    y[...] = 3
    y.flags.writeable = False
    with pytest.raises(pybnorm.ArgumentError, match=r"y.*read-only"):
        plan(x, scale, bias, y)
    assert (y == 3).all()


def unaligned(shape):
    return np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)[1:].view(np.float32).reshape(shape)


@table(
    ("name", "make"),
    [
        ("x", lambda: np.ones((4, 8, 5, 3), np.float32)),
        ("x", lambda: np.ones((8, 4, 3, 5), np.float32).transpose(1, 0, 2, 3)),
        ("x", lambda: np.ones(SHAPE, np.float64)),
        ("x", lambda: np.ones(SHAPE, np.float16)),
        ("x", lambda: np.ones(SHAPE, np.int32)),
        ("x", lambda: np.ones(SHAPE, ">f4")),
        ("x", lambda: np.ma.ones(SHAPE, np.float32)),
        ("x", lambda: unaligned(SHAPE)),
        ("x", lambda: np.ones((4, 8, 3, 10), np.float32)[..., ::-2]),
        ("scale", lambda: np.ones(7, np.float32)),
        ("scale", lambda: np.ones(16, np.float32)[::2]),
        ("scale", lambda: np.ones(8, np.float64)),
        ("scale", lambda: np.ones((8, 8), np.float32)),
        ("scale", lambda: unaligned((8,))),
        ("scale", lambda: np.zeros(8, [("a", "f4"), ("b", "i1")])["a"]),
    ],
)
def test_what_is_something_else_is_refused_by_name(arrays, name, make):
    plan, x, scale, bias, y = arrays
    given = {"x": x, "scale": scale} | {name: make()}
    with pytest.raises(pybnorm.ArgumentError, match=name):
        plan(given["x"], given["scale"], bias, y)
    assert np.isnan(y).all()
