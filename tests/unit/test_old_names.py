"""Arguments under the names that they had in the last version."""

import json

import numpy as np
import pytest

import pybnorm
from pybnorm import ArgumentError, ArgumentTypeError, _names, functional, operations, reference, sync
from pybnorm.layer import BatchNorm, Info

RNG = np.random.default_rng(7)
X = RNG.standard_normal((4, 3, 5, 5), np.float32)
SCALE, BIAS, MEAN = RNG.standard_normal((3, 3), np.float32)
VARIANCE = RNG.random(3, np.float32) + np.float32(0.5)
FROZEN = {"scale": SCALE, "mean": MEAN, "variance": VARIANCE}


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
    return reference.backward_frozen(X, X, **FROZEN, prior_dx=X, **blend)


def training(_, **blend):
    return reference.training_grad(X, X, **FROZEN, prior_dx=X, **blend)


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


def at_addresses(handle, **blend):
    dx, dscale, dbias = np.ones_like(X), np.empty(3, np.float32), np.empty(3, np.float32)
    x, scale = handle.descriptor(X, "x"), SCALE.reshape(1, 3, 1, 1)
    space = np.empty(1 << 16, np.uint8)
    pybnorm.batch_normalization_backward(
        handle, "spatial", alpha_param=1.0, beta_param=0.0, x_desc=x, x=X.ctypes.data, dy_desc=x, dy=X.ctypes.data,
        dx_desc=x, dx=dx.ctypes.data, param_desc=handle.descriptor(scale, "scale"), scale=scale.ctypes.data,
        dscale=dscale.ctypes.data, dbias=dbias.ctypes.data, epsilon=1e-5, saved_mean=None, saved_inv_variance=None,
        workspace=-(-space.ctypes.data // 64) * 64, workspace_size=space.nbytes - 64, **blend,
    )  # fmt: skip
    return [dx, dscale, dbias]


def given(handle, **blend):
    dx = np.ones_like(X)
    operations.backward_frozen(handle, X, X, **FROZEN, dx=dx, **blend)
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
                *(gradients, frozen, training, planned, given, at_addresses, blended(of_layer)),
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


# The arguments that could be given by position, in the order that positions had.
DY = RNG.standard_normal(X.shape, np.float32)
REDUCE = {"dy": DY, "x": X, "mean": MEAN, "inv_variance": BIAS}
ELEMT = REDUCE | {"scale": SCALE, "sum_dy": SCALE * 2, "sum_dy_xmu": SCALE * 3, "count": 100}
GIVEN = {"mean": MEAN, "variance": VARIANCE, "scale": SCALE}


def of_handle(handle, operation, outputs, last=()):
    """A call of an operation; `last` are outputs that could be given by position, too."""

    def call(*front, **given):
        arrays = {name: np.full(X.shape if name == "dx" else 3, np.nan, np.float32) for name in outputs}
        if len(front) > 2:
            front += tuple(arrays[name] for name in last)
        else:
            given |= {name: arrays[name] for name in last}
        given |= {name: array for name, array in arrays.items() if name not in last}
        getattr(operations, operation)(handle, *front, **given)
        return list(arrays.values())

    return call


@pytest.mark.parametrize(
    ("front", "order", "call"),
    [
        ((), REDUCE, lambda _: reference.backward_reduce),
        ((), ELEMT, lambda _: lambda *a, **given: [reference.backward_elemt(*a, **given)]),
        ((X, DY), GIVEN, lambda _: reference.backward_frozen),
        ((X, DY), GIVEN, lambda _: reference.training_grad),
        ((), REDUCE, lambda h: of_handle(h, "backward_reduce", ("sum_dy", "sum_dy_xmu", "dscale", "dbias"))),
        ((), ELEMT, lambda h: of_handle(h, "backward_elemt", ("dx",), ("dx",))),
        ((X, DY), GIVEN, lambda h: of_handle(h, "backward_frozen", *[("dx", "dscale", "dbias")] * 2)),
        ((X, DY), GIVEN, lambda h: of_handle(h, "training_grad", ("dx", "dscale"), ("dx",))),
    ],
)
def test_positions_mean_what_they_meant_and_warn(handle, front, order, call):
    """PyTorch has dy before x, this package x before dy: a silent change would swap two arrays."""
    call = call(handle)
    wanted = call(*front, **order)
    with pytest.warns(DeprecationWarning, match="read as " + ", ".join(f"{name}=..." for name in order)) as caught:
        found = call(*front, *order.values())
    for got, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, right)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    first = next(iter(order))
    with pytest.raises(TypeError, match=f"multiple values for argument '{first}'"):
        call(*front, *order.values(), **{first: X})
    with pytest.raises(TypeError, match="at most"):
        call(*front, *order.values(), *[X] * 9)
    with pytest.raises(TypeError, match=r"missing .* argument.*'mean'"):
        call(*front, **{name: value for name, value in order.items() if name != "mean"})


def test_positions_of_a_query_mean_what_they_meant_and_warn(handle):
    wanted = operations.plan(handle, "backward_frozen", X, X, **GIVEN, dx=X)
    with pytest.warns(DeprecationWarning, match=r"mean=\.\.\., variance=\.\.\., scale=\.\.\., dx=\.\.\.$"):
        assert operations.plan(handle, "backward_frozen", X, X, *GIVEN.values(), X) == wanted


def test_the_old_name_of_an_operation_warns_and_is_the_new_one(handle):
    text = "inverse_deviation is deprecated; its new name is inverse_standard_deviation"
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert operations.inverse_deviation is operations.inverse_standard_deviation
    assert caught[0].filename == __file__
    wanted = operations.plan(handle, "inverse_standard_deviation", VARIANCE, MEAN)
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert operations.plan(handle, "inverse_deviation", VARIANCE, MEAN) == wanted
    assert caught[0].filename == __file__
    assert "inverse_deviation" not in operations.__all__
    with pytest.raises(AttributeError, match="has no attribute 'inverse'"):
        operations.inverse  # noqa: B018


@pytest.mark.parametrize(
    ("make", "front", "later"),
    [
        ("plan_forward_training", (X, SCALE, BIAS, 0, 3, 3, 3, 3, None), ("z", "reserve")),
        ("plan_forward_inference", (X, SCALE, BIAS, MEAN, VARIANCE, 0, None), ("z",)),
        ("plan_backward", (X, X, SCALE, 0, 3, 3, MEAN, VARIANCE, None), ("y", "bias", "dz", "reserve")),
    ],
)
def test_what_follows_the_workspace_of_a_plan_warns_by_position(handle, make, front, later):
    plan = getattr(handle, make)(X)
    front = [np.empty(a or X.shape, np.float32) if isinstance(a, int) else a for a in front]
    for place, name in enumerate(later):
        text = f"{', '.join(later[: place + 1])} by name: .* read as .*{name}=...$"
        with pytest.warns(DeprecationWarning, match=text) as caught, pytest.raises(ArgumentError) as positional:
            plan(*front, *[None] * place, SCALE)
        with pytest.raises(ArgumentError) as named:
            plan(*front, **{name: SCALE})
        assert caught[0].filename == __file__
        assert str(positional.value) == str(named.value)
        assert named.value.argument == name
    with pytest.raises(TypeError, match="multiple values for argument"):
        plan(*front, SCALE, **{later[0]: SCALE})


V = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda h: h.forward_training(X, V, V, X, eps=1e-3), r"Handle.forward_training\(\) .* 'eps' .*'epsilon'"),
        (lambda h: h.forward_inference(X, V, V, V, V, X, axis=1), "'axis' .*'mode'"),
        (lambda h: h.backward(X, X, V, X, V, V, saved_invstd=V), "'saved_invstd' .*'saved_inv_variance'"),
        (lambda h: h.workspace_size(2, X, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: h.plan_forward_training(X, momentum=0.1), "'momentum' .*'exponential_average_factor'"),
        (lambda h: h.plan_forward_inference(X, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: h.plan_backward(X, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: pybnorm.batch_normalization_forward_training(*[h] * 17, eps=1), "'eps' .*'epsilon'"),
        (lambda h: pybnorm.batch_normalization_forward_inference(*[h] * 14, bn_bias=1), "'bn_bias' .*'bias'"),
        (lambda h: pybnorm.batch_normalization_backward(h, 0, eps=1), "'eps' .*'epsilon'"),
        (
            lambda h: operations.forward_training(h, X, V, V, X, momentum=0.1),
            "'momentum' .*'exponential_average_factor'",
        ),
        (lambda h: operations.backward_frozen(h, X, X, gamma=V, mean=V, variance=V), "'gamma' .*'scale'"),
        (lambda h: operations.plan(h, "stats", X, mode=1), "'mode' .*'axis'"),
        (lambda h: functional.batch_norm_training(X, V, V, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: functional.batch_norm_inference(X, V, V, V, running_var=V), "'running_var' .*'running_variance'"),
        (lambda h: functional.batch_norm_backward(X, X, V, invstd=V), "'invstd' .*'saved_inv_variance'"),
        (lambda h: reference.forward_training(X, gamma=V, bias=V), "'gamma' .*'scale'"),
        (lambda h: reference.stats(X, epsilom=1e-3), "'epsilom' .*'epsilon'"),
        (lambda h: BatchNorm.spatial(h, momentum=0.1), "'momentum' .*'exponential_average_factor'"),
        (
            lambda h: BatchNorm.spatial(h).forward_training(X, V, V, X, eps=1e-3),
            "BatchNorm.forward_training.* 'eps'",
        ),
        (lambda h: BatchNorm.spatial(h).forward_inference(X, V, V, X, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: BatchNorm.spatial(h).backward(X, X, V, X, V, V, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: sync.SyncBatchNorm(h, None, 3, dim=1), "'dim' .*'axis'"),
        (lambda h: sync.SyncBatchNorm.forward(None, X, V, V, X, eps=1e-3), "'eps' .*'epsilon'"),
        (lambda h: sync.SyncBatchNorm.backward(None, X, X, V, X, grad_bias=V), "'grad_bias' .*'dbias'"),
    ],
)
def test_an_unknown_name_says_which_one_was_meant(handle, call, text):
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument {text}" if text[0] == "'" else text):
        call(handle)


def test_a_name_like_none_is_an_error_without_a_guess(handle):
    for call in (handle.forward_training, functional.batch_norm_training, BatchNorm.spatial(handle).forward_training):
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'qqqqqqqq'$"):
            call(X, V, V, X, qqqqqqqq=1)
    assert all(name not in names for name, names in _names.HINTS.items())
