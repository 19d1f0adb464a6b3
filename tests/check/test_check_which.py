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


def only(fits):
    assert len(fits) == 1
    return fits[0]


def test_pytorchs_results_are_as_defined(call):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(a.copy()) for name, a in call.items()}
    new = [tensors[n].clone() for n in ("running_mean", "running_variance")]
    y, mean, inverse = torch.native_batch_norm(tensors["x"], tensors["scale"], tensors["bias"], *new, True, 0.1, 1e-5)
    fits = which_convention(
        **tensors,
        y=y,
        saved_mean=mean,
        saved_inv_variance=inverse,
        new_running_mean=new[0],
        new_running_variance=new[1],
    )
    assert [(fit.output, fit.convention) for fit in fits] == [
        (name, "as defined")
        for name in ("y", "saved_mean", "saved_inv_variance", "new_running_mean", "new_running_variance")
    ]


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
    fit = only(which_convention(**call | last, axis=-1, training=False))
    assert (fit.convention, fit.ratio <= 1) == ("as defined", True)
    own = normalized(call, *moments(call["x"]))
    assert "x's own statistics" in only(which_convention(**call, y=own, training=False)).convention


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
    fit = only(which_convention(**call, y=normalized(call, mean, variance, 3.7e-4)))
    assert (fit.convention, fit.hint) == ("", "epsilon=0.00037 fits")
    new = (0.77 * call["running_mean"] + 0.23 * mean).astype(f32)
    fit = only(which_convention(**call, new_running_mean=new))
    assert (fit.convention, fit.hint) == ("", "factor=0.23 fits")
    strange = which_convention(**call, y=call["x"] ** 2)
    assert (strange[0].convention, strange[0].hint) == ("", "")
    assert "no convention fits" in str(strange[0])


def test_what_these_data_do_not_tell_is_said(call):
    wide = call | {"x": 300 * call["x"]}
    fit = only(which_convention(**wide, y=normalized(wide, *moments(wide["x"]))))
    assert fit.convention == "as defined"
    assert "epsilon is missing" in fit.alike


def test_arguments_are_looked_at(call):
    with pytest.raises(ArgumentError, match="results"):
        which_convention(**call)
    with pytest.raises(ArgumentError, match="dy"):
        which_convention(call["x"], dx=call["x"])
    with pytest.raises(ArgumentError, match="running_mean"):
        which_convention(call["x"], new_running_mean=np.ones(6, f32))
    for count in (5, 7):
        with pytest.raises(ArgumentError, match="6 elements"):
            which_convention(call["x"], saved_mean=np.ones(count, f32))
    with pytest.raises(ArgumentError, match="shape"):
        which_convention(call["x"], y=call["x"][1:])
    for y in (None, call["x"]):
        with pytest.raises(ArgumentError, match="True with saved_mean"):
            which_convention(**call, y=y, saved_mean=np.ones(6, f32), training=False)
    for hostile in (call["x"].astype(int), call["x"].view("V4"), range(10**15), None):
        with pytest.raises(ArgumentTypeError, match=r"^x: got"):
            which_convention(hostile, y=call["x"])
    with pytest.raises(ArgumentError, match="axis"):
        which_convention(call["x"], y=call["x"], axis=4)


def test_a_file_is_answered_on_the_command_line(call, tmp_path):
    mean, variance = moments(call["x"])
    file = tmp_path / "mine.npz"
    np.savez(file, **call, saved_inv_variance=variance.astype(f32), saved_mean=mean.astype(f32), epsilon=1e-5)
    result = CliRunner().invoke(main, ["check", "--data", str(file)])
    assert result.exit_code == 0, result.output
    assert "saved_mean: as defined" in result.output
    assert "saved_inv_variance: the variance is saved, not the inverse standard deviation" in result.output
    np.savez(file, **call, y=call["x"] ** 2)
    result = CliRunner().invoke(main, ["check", "--data", str(file)])
    assert result.exit_code == 1
    assert "No convention that is known explains y." in result.output
    np.savez(file, **call, momentum=0.1)
    result = CliRunner().invoke(main, ["check", "--data", str(file)])
    assert result.exit_code == 2
    assert "with momentum" in result.output
