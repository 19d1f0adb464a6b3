"""CuPy's names for cuDNN's batch norm, on NumPy's arrays, against the reference."""

import ml_dtypes
import numpy as np
import pytest
from tables import table

import pybnorm
from pybnorm.cupy import (
    batch_normalization_backward as backward,
)
from pybnorm.cupy import (
    batch_normalization_forward_inference as inference,
)
from pybnorm.cupy import (
    batch_normalization_forward_training as training,
)
from pybnorm.cupy import (
    batch_normalization_forward_training_ex as training_ex,
)
from pybnorm.errors import ArgumentError, ArgumentTypeError

CASES = {  # shape, is_for_conv2d, d_layout, axis of the channels in x as four axes
    "images": ((4, 6, 5, 3), True, 0),
    "channels last": ((4, 5, 3, 6), True, 1),
    "rows": ((9, 7), False, 0),
    "volumes of features": ((5, 2, 3, 2), False, 0),
    "one axis": ((8,), False, 0),
}
TOLERANCE = {"f4": 2e-5, "f2": 4e-3, "bf16": 3e-2}
DTYPES = {"f4": np.float32, "f2": np.float16, "bf16": ml_dtypes.bfloat16}


class Case:
    """Arrays of one case, and what the definition makes of them in float64."""

    def __init__(self, name, mode, kind, strided=False):
        shape, self.conv, self.layout = CASES[name]
        self.mode, self.tolerance = mode, TOLERANCE[kind]
        generator = np.random.default_rng(3)
        last = self.conv and self.layout == 1
        columns = shape if self.conv else (shape[0], int(np.prod(shape[1:])))
        channel = 3 if last else 1
        self.axes = (0,) if mode == 0 else tuple(a for a in range(len(columns)) if a != channel)
        kept = [1 if a in self.axes else n for a, n in enumerate(columns)]
        # Parameters of an image are in the order C, H, W whatever the layout of x.
        order = (0, 3, 1, 2) if last else tuple(range(len(columns)))

        def data():
            made = (generator.standard_normal(shape) * 1.5 + 2).astype(DTYPES[kind])
            return np.repeat(made, 2, axis=-1)[..., ::2] if strided else made

        def vector(low):
            values = (generator.random([kept[a] for a in order]) + low).astype(DTYPES[kind])
            return values.reshape(-1) if mode else values[0]

        def wide(values):  # in the place of x's axes
            placed = np.asarray(values, np.float64).reshape([kept[a] for a in order])
            return placed.transpose(0, 2, 3, 1) if last else placed

        self.columns, self.wide = columns, wide
        self.x, self.gy = data(), data()
        self.gamma, self.beta, self.mean, self.var = (vector(low) for low in (0.5, -0.5, -0.5, 0.5))
        self.how = self.conv, mode

    def definition(self, epsilon):
        x, gy = (a.astype(np.float64).reshape(self.columns) for a in (self.x, self.gy))
        options = {"axis": self.axes, "keepdims": True}
        mean, variance = x.mean(**options), x.var(**options)
        inverse = 1 / np.sqrt(variance + epsilon)
        normal, gamma, beta = (x - mean) * inverse, self.wide(self.gamma), self.wide(self.beta)
        ggamma, gbeta = (gy * normal).sum(**options), gy.sum(**options)
        count = x.size / mean.size
        gx = gamma * inverse * (gy - gbeta / count - normal * ggamma / count)
        given = gamma * (x - self.wide(self.mean)) / np.sqrt(self.wide(self.var) + epsilon) + beta
        unbiased = variance * count / (count - 1)
        return normal * gamma + beta, mean, inverse, unbiased, gx, ggamma, gbeta, given

    def near(self, got, right, vector=False):
        got = self.wide(got) if vector else np.asarray(got, np.float64).reshape(self.columns)
        np.testing.assert_allclose(got, right, atol=self.tolerance * (1 + np.abs(right).max()), rtol=0)


@pytest.fixture(autouse=True)
def onednn(load_library):
    load_library("onednn")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("name", list(CASES))
def test_results_are_the_definition(name, mode, kind, strided):
    case, epsilon, decay = Case(name, mode, kind, strided), 0.0625, 0.75
    y, mean, inverse, unbiased, gx, ggamma, gbeta, given = case.definition(epsilon)
    kept = [case.mean.copy(), case.var.copy()]
    if strided:
        kept = [np.repeat(a, 2, axis=-1)[..., ::2] for a in kept]
    before = [case.wide(a) for a in kept]
    arrays = case.x, case.gamma, case.beta
    found = training(*arrays, *kept, None, None, epsilon, decay, *case.how, False, case.layout)
    case.near(found[0], y)
    assert (found[0].dtype, found[0].shape, found[0].flags.c_contiguous) == (case.x.dtype, case.x.shape, True)
    for got, right in zip(found[1:], (mean, inverse), strict=True):
        case.near(got, right, vector=True)
        assert (got.shape, got.dtype) == (case.gamma.shape, np.float32)
    for got, prior, right in zip(kept, before, (mean, unbiased), strict=True):
        case.near(got, decay * prior + (1 - decay) * right, vector=True)

    gradients = backward(case.x, case.gamma, case.gy, *found[1:], epsilon, *case.how, False, case.layout)
    case.near(gradients[0], gx)
    for got, right in zip(gradients[1:], (ggamma, gbeta), strict=True):
        case.near(got, right, vector=True)
        assert (got.shape, got.dtype) == (case.gamma.shape, case.gamma.dtype)

    case.near(inference(*arrays, case.mean, case.var, epsilon, *case.how, case.layout), given)


def test_statistics_may_be_given_to_write():
    case = Case("images", 1, "f4")
    kept = [np.zeros(6, np.float32), np.ones(6, np.float32)]
    y, mean, inverse = training(case.x, case.gamma, case.beta, *kept, None, None, 1e-5, 0.9, True, 1, False)
    for dtype in (np.float32, np.float64):
        out, others = [np.zeros(6, dtype), np.zeros(6, dtype)], [np.zeros(6, np.float32), np.ones(6, np.float32)]
        only = training(case.x, case.gamma, case.beta, *others, *out, 1e-5, 0.9, True, 1, False)
        np.testing.assert_array_equal(only, y)
        np.testing.assert_array_equal(out, [mean, inverse])
        np.testing.assert_array_equal(others, kept)
        extended = training_ex(case.x, case.gamma, case.beta, *others, *out, 1e-5, 0.9, True, 1, False)
        assert (len(extended), extended[0]) == (2, None)
    extended = training_ex(case.x, case.gamma, case.beta, *kept, None, None, 1e-5, 0.9, True, 1, False)
    assert (len(extended), extended[0]) == (4, None)
    back = [case.x, case.gamma, case.gy, mean, inverse, 1e-5, True, 1, False]
    np.testing.assert_array_equal(backward(*back, reserve_space=None)[0], backward(*back)[0])


@table(
    ("wrong", "argument"),
    [
        ({"x": [1.0]}, "x"),
        ({"x": np.zeros((2, 3), np.float32)}, "x"),
        ({"x": np.zeros((2, 6, 5, 3), np.int32)}, "x"),
        ({"gamma": np.ones(5, np.float32)}, "gamma"),
        ({"beta": None}, "beta"),
        ({"running_mean": np.ones(5, np.float32)}, "running_mean"),
        ({"running_var": np.broadcast_to(np.float32(1), (6,))}, "running_var"),
        ({"mean": np.ones(6, np.float32)}, "inv_std"),
        ({"mean": np.ones(6, np.float32), "inv_std": np.ones(7, np.float32)}, "inv_std"),
        ({"eps": -1.0}, "eps"),
        ({"decay": 1.5}, "decay"),
        ({"is_for_conv2d": 1}, "is_for_conv2d"),
        ({"cudnn_mode": 3}, "cudnn_mode"),
        ({"debug": None}, "debug"),
        ({"d_layout": 2}, "d_layout"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(wrong, argument):
    case = Case("images", 1, "f4")
    good = {
        "x": case.x, "gamma": case.gamma, "beta": case.beta, "running_mean": case.mean, "running_var": case.var,
        "mean": None, "inv_std": None, "eps": 1e-5, "decay": 0.9, "is_for_conv2d": True, "cudnn_mode": 1,
        "debug": False,
    }  # fmt: skip
    before = [case.mean.copy(), case.var.copy()]
    with pytest.raises(ArgumentError) as caught:
        training(**(good | wrong))
    assert caught.value.argument == argument
    np.testing.assert_array_equal(before, [case.mean, case.var])
    with pytest.raises(ArgumentTypeError, match="reserve_space"):
        backward(case.x, case.gamma, case.gy, case.mean, case.var, 1e-5, True, 1, False, reserve_space=1)


def test_the_module_is_found_by_its_name():
    assert pybnorm.cupy.batch_normalization_forward_training is training
