"""Which convention anybody's arrays follow: as a function, and from a file on the command line."""

import numpy as np
import pytest
from click.testing import CliRunner

from pybnorm.check import which_convention
from pybnorm.cli import main
from pybnorm.errors import ArgumentError, ArgumentTypeError

f32 = np.float32


@pytest.fixture
def call():
    rng = np.random.default_rng(2)
    x = rng.normal(1, 0.3, (8, 6, 5, 4)).astype(f32)
    scale, bias, old_mean, old_variance = (rng.normal(1, 0.3, 6).astype(f32) ** 2 for _ in range(4))
    return {"x": x, "scale": scale, "bias": bias, "running_mean": old_mean, "running_variance": old_variance}


def moments(x, axes=(0, 2, 3)):
    mean = x.mean(axis=axes, dtype=np.float64)
    return mean, x.var(axis=axes, dtype=np.float64)


def normalized(call, mean, variance, epsilon=1e-5):
    shape = (1, -1, 1, 1)
    y = (call["x"] - mean.reshape(shape)) / np.sqrt(variance + epsilon).reshape(shape)
    return (call["scale"].reshape(shape) * y + call["bias"].reshape(shape)).astype(f32)


def test_pytorchs_results_are_as_defined(call):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(a.copy()) for name, a in call.items()}
    new = [tensors[n].clone() for n in ("running_mean", "running_variance")]
    y, mean, inverse = torch.native_batch_norm(tensors["x"], tensors["scale"], tensors["bias"], *new, True, 0.1, 1e-5)
    results = {"y": y, "saved_mean": mean, "saved_inv_variance": inverse}
    results |= {"new_running_mean": new[0], "new_running_variance": new[1]}
    said = {fit.output: fit.convention for fit in which_convention(**tensors, **results)}
    assert said == dict.fromkeys(results, "as defined")


def test_kerass_results_are_told_apart(call):
    mean, variance = moments(call["x"])
    keras = {
        "y": normalized(call, mean, variance, 1e-3),
        "new_running_mean": (0.8 * call["running_mean"] + 0.2 * mean).astype(f32),
        "new_running_variance": (0.8 * call["running_variance"] + 0.2 * variance).astype(f32),
    }
    said = {fit.output: fit.convention for fit in which_convention(**call, **keras, factor=0.8)}
    assert said["y"].startswith("epsilon is 0.001, not 1e-05 (the default of Keras")
    assert said["new_running_mean"].startswith("momentum is the other way round")
    assert "biased variance" in said["new_running_variance"]
    assert "momentum is the other way round" in said["new_running_variance"]
    right = which_convention(**call, **keras, factor=0.2, epsilon=1e-3)
    assert [fit.convention == "as defined" for fit in right] == [True, True, False]
    assert right[2].convention.startswith("running_variance takes the biased variance")


def test_inference_and_channels_last(call):
    y = normalized(call, call["running_mean"], call["running_variance"])
    last = {"x": np.moveaxis(call["x"], 1, -1), "y": np.moveaxis(y, 1, -1)}
    (fit,) = which_convention(**call | last, axis=-1, training=False)
    assert (fit.convention, fit.ratio <= 1) == ("as defined", True)
    own = normalized(call, *moments(call["x"]))
    (fit,) = which_convention(**call, y=own, training=False)
    assert "x's own statistics" in fit.convention


def test_gradients(call):
    x, dy = call["x"].astype(float), np.random.default_rng(3).normal(size=call["x"].shape).astype(f32)
    mean, variance = (a.reshape(1, -1, 1, 1) for a in moments(call["x"]))
    normal = (x - mean) / np.sqrt(variance + 1e-5)
    scale = call["scale"].reshape(1, -1, 1, 1)
    evaluated = (scale * dy / np.sqrt(variance + 1e-5)).astype(f32)
    dscale, dbias = ((dy * a).sum(axis=(0, 2, 3)).astype(f32) for a in (normal, np.ones_like(normal)))
    del call["running_mean"], call["running_variance"], call["bias"]
    fits = which_convention(**call, dy=dy, dx=evaluated, dscale=dscale / 160, dbias=dbias)
    said = [fit.convention for fit in fits]
    assert said[0].startswith("dx is that of evaluation")
    assert said[1] == "dscale is a mean, not a sum"
    assert said[2] == "as defined"


def test_an_epsilon_and_a_factor_that_nobody_uses_are_fitted(call):
    mean, variance = moments(call["x"])
    (fit,) = which_convention(**call, y=normalized(call, mean, variance, 3.7e-4))
    assert (fit.convention, fit.hint) == ("", "epsilon=0.00037 fits")
    new = (0.77 * call["running_mean"] + 0.23 * mean).astype(f32)
    (fit,) = which_convention(**call, new_running_mean=new)
    assert (fit.convention, fit.hint) == ("", "factor=0.23 fits")
    strange = which_convention(**call, y=call["x"] ** 2)
    assert (strange[0].convention, strange[0].hint) == ("", "")
    assert "no convention fits" in str(strange[0])


def test_what_these_data_do_not_tell_is_said(call):
    wide = call | {"x": 300 * call["x"]}
    (fit,) = which_convention(**wide, y=normalized(wide, *moments(wide["x"])))
    assert fit.convention == "as defined"
    assert "epsilon is missing" in fit.alike


X = object()
"""The call's x."""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "results"),
        ({"dx": X, "scale": None}, "dy"),
        ({"new_running_mean": np.ones(6, f32), "running_mean": None}, "running_mean"),
        ({"saved_mean": np.ones(5, f32)}, "6 elements"),
        ({"saved_mean": np.ones(7, f32)}, "6 elements"),
        ({"y": np.ones((7, 6, 5, 4), f32)}, "shape"),
        ({"y": X, "saved_mean": np.ones(6, f32), "training": False}, "True with saved_mean"),
        ({"y": None, "saved_mean": np.ones(6, f32), "training": False}, "True with saved_mean"),
        ({"y": X, "axis": 4}, "axis"),
        *(({"x": x, "y": X}, "^x: got") for x in (np.ones((2, 3), int), np.ones(3, "V4"), range(10**15), None)),
    ],
)
def test_arguments_are_looked_at(call, changes, text):
    changes = {name: call["x"] if value is X else value for name, value in changes.items()}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
        which_convention(**call | changes)


def test_a_file_is_answered_on_the_command_line(call, tmp_path):
    mean, variance = moments(call["x"])
    file = tmp_path / "mine.npz"

    def answer(code, **results):
        np.savez(file, **call, **results)
        result = CliRunner().invoke(main, ["check", "--data", str(file)])
        assert result.exit_code == code, result.output
        return result.output

    said = answer(0, saved_inv_variance=variance.astype(f32), saved_mean=mean.astype(f32), epsilon=1e-5)
    assert "saved_mean: as defined" in said
    assert "saved_inv_variance: the variance is saved, not the inverse standard deviation" in said
    assert "No convention that is known explains y." in answer(1, y=call["x"] ** 2)
    assert "with momentum" in answer(2, momentum=0.1)
