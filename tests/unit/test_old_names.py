"""Arguments under the names that they had in the last version."""

import json

import numpy as np
import pytest

import pybnorm
from pybnorm import ArgumentTypeError, functional, operations, reference
from pybnorm.layer import BatchNorm, Info

RNG = np.random.default_rng(7)
X = RNG.standard_normal((4, 3, 5, 5), np.float32)
SCALE, BIAS, MEAN = RNG.standard_normal((3, 3), np.float32)
VARIANCE = RNG.random(3, np.float32) + np.float32(0.5)


@pytest.fixture
def handle():
    with pybnorm.Handle("onednn") as opened:
        yield opened


def infer(_, **statistics):
    return [functional.batch_norm_inference(X, SCALE, BIAS, **statistics)]


def made(handle, **options):
    with BatchNorm.spatial(handle, **options) as layer:
        layer.stage(X)
        layer.forward_training(X, SCALE, BIAS, np.empty_like(X))
        return [layer.info().running_mean]


def trained(handle, **options):
    with BatchNorm.spatial(handle) as layer:
        layer.stage(X)
        layer.forward_training(X, SCALE, BIAS, np.empty_like(X), **options)
        return [layer.info().running_mean]


def gradients(_, **blend):
    return reference.backward(X, X, SCALE, prior_dx=X, **blend)


def frozen(_, **blend):
    return reference.backward_frozen(X, X, MEAN, VARIANCE, SCALE, prior_dx=X, **blend)


def training(_, **blend):
    return reference.training_grad(X, X, MEAN, VARIANCE, SCALE, prior_dx=X, **blend)


def blended(call):
    def function(handle, **blend):
        dx, dscale, dbias = np.ones_like(X), np.empty(3, np.float32), np.empty(3, np.float32)
        call(handle)(X, X, *(SCALE, dx, dscale, dbias), **blend)
        return [dx, dscale, dbias]

    return function


def of_layer(handle):
    layer = BatchNorm.spatial(handle)
    layer.stage(X)
    layer.forward_training(X, SCALE, BIAS, np.empty_like(X))
    return layer.backward


def planned(handle, **blend):
    plan = handle.plan_backward(X, saved=False, **blend)
    dx = np.ones_like(X)
    plan(X, X, SCALE, dx, np.empty(3, np.float32), np.empty(3, np.float32))
    return [dx]


def given(handle, **blend):
    dx = np.ones_like(X)
    operations.backward_frozen(handle, X, X, MEAN, VARIANCE, SCALE, dx, **blend)
    return [dx]


def inferred(handle, **statistics):
    y = np.empty_like(X)
    operations.forward_inference(handle, X, SCALE, BIAS, y=y, **statistics)
    return [y]


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        (inferred, {"mean": MEAN, "variance": VARIANCE}, {"running_mean": MEAN, "running_variance": VARIANCE}),
        (infer, {"mean": MEAN, "variance": VARIANCE}, {"running_mean": MEAN, "running_variance": VARIANCE}),
        (made, {"averaging_factor": 0.5}, {"exponential_average_factor": 0.5}),
        (trained, {"averaging_factor": 0.5}, {"exponential_average_factor": 0.5}),
        *[
            (call, {"alpha_data": 0.5, "beta_data": 2.0}, {"alpha": 0.5, "beta": 2.0})
            for call in (
                *(gradients, frozen, training, planned, given, blended(of_layer)),
                blended(lambda handle: handle.backward),
                blended(lambda handle: lambda *arrays, **blend: operations.backward(handle, *arrays, **blend)),
            )
        ],
    ],
)
def test_an_old_name_warns_and_means_the_new_one(handle, call, old, new):
    wanted = call(handle, **new)
    with pytest.warns(DeprecationWarning, match="its new name is") as caught:
        found = call(handle, **old)
    for got, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, right)
    assert {str(w.message) for w in caught} == {
        f"{o} is deprecated; its new name is {n}" for o, n in zip(old, new, strict=True)
    }
    assert {w.filename for w in caught} == {__file__}  # where the caller wrote it
    with pytest.raises(ArgumentTypeError, match=next(iter(old))):
        call(handle, **old, **new)


def test_the_state_of_a_layer_of_the_last_version_is_read(handle):
    with BatchNorm.spatial(handle, exponential_average_factor=0.25) as layer:
        layer.stage(X)
        info = layer.info()
    with pytest.warns(DeprecationWarning, match="its new name is exponential_average_factor"):
        assert info.exponential_factor == 0.25
    values = json.loads(info.to_json())
    values["exponential_factor"] = values.pop("exponential_average_factor")
    assert Info.from_json(json.dumps(values | {"version": 1})) == info
