"""Bad arguments that `tests/fuzz` has no place for: float32's limits, one element, and the text of refusals.

That each bad argument of each call is refused by its name, and nothing written, is test_fuzz's.
"""

import types

import numpy as np
import pytest
from place import device_of
from tables import table

import pybnorm

DIMS = (4, 3, 5, 6)


@pytest.fixture
def good(handle):
    """Arrays of the three calls."""
    device = device_of(handle)

    def arrays(value, *names, dims=(3,)):
        return {n: device.from_numpy(np.full(dims, value, np.float32)) for n in names}

    data, vectors = arrays(7, "x", "y", "dy", "dx", dims=DIMS), ("running_mean", "running_variance")
    saved = arrays(7, "saved_mean", "saved_inv_variance")
    inference = {n: data[n] for n in ("x", "y")} | arrays(1, "scale", "bias", *vectors)
    calls = {"training": inference | arrays(7, *vectors) | saved, "inference": inference}
    gradients = {n: data[n] for n in ("x", "dy", "dx")} | arrays(7, "scale", "dscale", "dbias")
    calls["backward"] = gradients | arrays(1, *saved)
    return types.SimpleNamespace(handle=handle, device=device, array=device.from_numpy, calls=calls)


def refuse(good, call, argument, **changes):
    method = getattr(good.handle, call if call == "backward" else f"forward_{call}")
    with pytest.raises(pybnorm.ArgumentError) as info:
        method(**good.calls[call] | changes)
    assert info.value.argument == argument, info.value
    assert info.value.allowed
    good.device.synchronize()
    written = [v for n, v in good.calls[call].items() if n in ("y", "dx", "dscale", "dbias") or call == "training"]
    for array in written:
        values = good.device.to_numpy(array)
        assert (values == values.flat[0]).all()
    return info.value


def test_the_order_of_inference_is_said(good):
    error = refuse(good, "inference", "y", y=good.calls["inference"]["running_mean"])
    assert "x, scale, bias, running_mean, running_variance, y" in error.allowed


@table("call", ["training", "inference", "backward"])
@table(
    ("name", "value"),
    [("epsilon", 1e-50), ("epsilon", 1e39), *((n, v) for n in ("alpha", "beta") for v in (1e39, -1e-50))],
)
def test_numbers_that_float32_has_not(good, call, name, value):
    refuse(good, call, name, **{name: value})


def test_more_numbers_that_float32_has_not(good):
    refuse(good, "training", "exponential_average_factor", exponential_average_factor=1e-46)
    for name in ("alpha_param", "beta_param"):
        for value in (1e39, -1e-50):
            refuse(good, "backward", name, **{name: value})


def test_one_element_per_statistic_with_running_statistics(good):
    one, other = (good.array(np.ones((1, 3, 1, 1), np.float32)) for _ in range(2))
    refuse(good, "training", "x", x=one, y=other)


def test_unsupported_names_the_descriptors(good):
    """The message of a refusal has the reason and what was asked for."""
    backend = good.handle.backend
    if backend == "cudnn" or backend.startswith("native"):
        pytest.skip(f"{backend}: has every dtype of this package")
    x = good.array(np.ones(DIMS, np.float64))
    y = good.array(np.full(DIMS, 7.0))
    one = good.array(np.ones(3))
    with pytest.raises(pybnorm.UnsupportedError) as info:
        good.handle.forward_inference(x, one, one, one, one, y)
    assert info.value.backend == backend
    assert info.value.text
    assert "f64" in str(info.value)
    assert str(DIMS) in str(info.value)
    assert info.value.library in str(info.value)
    assert (good.device.to_numpy(y) == 7.0).all()


def test_a_vendor_status_arrives_with_everything(good):
    """cuDNN refuses inference past N = 65535 in the spatial mode with its own status."""
    if good.handle.backend != "cudnn":
        pytest.skip(f"{good.handle.backend}: no case is known that passes our rules and gets a vendor status")
    x = good.array(np.ones((65536, 1, 1, 1), np.float32))
    y = good.array(np.full((65536, 1, 1, 1), 7, np.float32))
    one = good.array(np.ones(1, np.float32))
    with pytest.raises(pybnorm.NotSupportedError) as info:
        good.handle.forward_inference(x, one, one, one, one, y)
    error = info.value
    assert error.status == 3000
    assert "CUDNN_STATUS_NOT_SUPPORTED" in str(error)
    assert "(65536, 1, 1, 1)" in str(error)
    assert error.library in str(error)
    assert "batch_normalization_forward_inference" in str(error)
    assert (good.device.to_numpy(y) == 7).all()
