"""Batch norm of inference folded into one multiplication and one addition, and into a convolution."""

import numpy as np
import pytest

from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.operations import fold


def draw(seed=5, channels=6):
    rng = np.random.default_rng(seed)
    mean, scale, bias = rng.normal(0, 2, (3, channels))
    return mean, rng.uniform(0.1, 4, channels), scale, bias


def test_it_is_what_inference_does():
    mean, variance, scale, bias = draw()
    x = np.random.default_rng(6).normal(size=(9, 6))
    folded = fold(mean, variance, scale, bias, epsilon=1e-3)
    right = scale * (x - mean) / np.sqrt(variance + 1e-3) + bias
    np.testing.assert_allclose(folded.a * x + folded.b, right, rtol=1e-13, atol=1e-13)
    without = fold(mean, variance)
    np.testing.assert_allclose(without.a * x + without.b, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_of_pytorch_takes_it(transposed):
    torch = pytest.importorskip("torch")
    mean, variance, scale, bias = map(torch.from_numpy, draw())
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    conv, norm = kind(3, 6, 3, padding=1).double(), torch.nn.BatchNorm2d(6).double().eval()
    for name, values in (("running_mean", mean), ("running_var", variance), ("weight", scale), ("bias", bias)):
        getattr(norm, name).data.copy_(values)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        right = norm(conv(x))
        a, b = fold(norm.running_mean, norm.running_var, norm.weight, norm.bias, epsilon=norm.eps)
        conv.weight *= a.reshape((1, -1, 1, 1) if transposed else (-1, 1, 1, 1))
        conv.bias.copy_(a * conv.bias + b)
        torch.testing.assert_close(conv(x), right, rtol=1e-12, atol=1e-12)


def test_arguments_are_looked_at():
    mean, variance, scale, bias = draw()
    with pytest.raises(ArgumentError, match="scale"):
        fold(mean, variance, scale[1:], bias)
    with pytest.raises(ArgumentTypeError, match="variance"):
        fold(mean, 1.0)
    for no_array in (np.int8, np.ndarray, np.dtype("f4"), np.float64):  # each has an attribute `shape`
        with pytest.raises(ArgumentTypeError, match="bias"):
            fold(mean, variance, scale, no_array)
    with pytest.raises(ArgumentError, match="epsilon"):
        fold(mean, variance, epsilon=-1e-5)
