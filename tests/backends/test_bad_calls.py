"""Bad arguments that `tests/fuzz` has no place for: float32's limits, one element, and the text of refusals.

That each bad argument of each call is refused by its name, and nothing written, is test_fuzz's.
"""

import numpy as np
import pytest
from place import device_of
from tables import table
from test_calls import LAYOUTS, OPERATIONS, Case, problem_of

import pybnorm
from pybnorm import DataType, Mode
from pybnorm.check.language.calls import METHODS

DIMS = (4, 3, 5, 6)
TRAIN, INFER, BACKWARD = OPERATIONS


def refuse(handle, operation, argument, **changes):
    case = Case(handle, problem_of(operation, Mode.SPATIAL, DataType.FLOAT32, LAYOUTS[0], DIMS, fill="randn"))
    arrays = {**case.given, **case.made}
    with pytest.raises(pybnorm.ArgumentError) as info:
        getattr(handle, METHODS[operation])(**arrays | {n: arrays.get(v, v) for n, v in changes.items()})
    assert info.value.argument == argument, info.value
    assert info.value.allowed
    case.device.synchronize()
    case.unchanged(arrays)
    return info.value


def test_the_order_of_inference_is_said(handle):
    error = refuse(handle, INFER, "y", y="running_mean")
    assert "x, scale, bias, running_mean, running_variance, y" in error.allowed


@table("operation", OPERATIONS)
@table(
    ("name", "value"),
    [("epsilon", 1e-50), ("epsilon", 1e39), *((n, v) for n in ("alpha", "beta") for v in (1e39, -1e-50))],
)
def test_numbers_that_float32_has_not(handle, operation, name, value):
    refuse(handle, operation, name, **{name: value})


def test_more_numbers_that_float32_has_not(handle):
    refuse(handle, TRAIN, "exponential_average_factor", exponential_average_factor=1e-46)
    for name in ("alpha_param", "beta_param"):
        for value in (1e39, -1e-50):
            refuse(handle, BACKWARD, name, **{name: value})


def test_one_element_per_statistic_with_running_statistics(handle):
    case = Case(handle, problem_of(TRAIN, Mode.SPATIAL, DataType.FLOAT32, LAYOUTS[0], DIMS, fill="randn"))
    one, other = (case.device.from_numpy(np.ones((1, 3, 1, 1), np.float32)) for _ in range(2))
    with pytest.raises(pybnorm.ArgumentError, match=r"^x: "):
        handle.forward_training(**{**case.given, **case.made, "x": one, "y": other})
    case.unchanged(case.made)


def test_unsupported_names_the_descriptors(handle):
    """The message of a refusal has the reason and what was asked for."""
    backend = handle.backend
    if backend == "cudnn" or backend.startswith("native"):
        pytest.skip(f"{backend}: has every dtype of this package")
    device = device_of(handle)
    x = device.from_numpy(np.ones(DIMS, np.float64))
    y = device.from_numpy(np.full(DIMS, 7.0))
    one = device.from_numpy(np.ones(3))
    with pytest.raises(pybnorm.UnsupportedError) as info:
        handle.forward_inference(x, one, one, one, one, y)
    assert info.value.backend == backend
    assert info.value.text
    assert "f64" in str(info.value)
    assert str(DIMS) in str(info.value)
    assert info.value.library in str(info.value)
    assert (device.to_numpy(y) == 7.0).all()


def test_a_vendor_status_arrives_with_everything(handle):
    """cuDNN refuses inference past N = 65535 in the spatial mode with its own status."""
    if handle.backend != "cudnn":
        pytest.skip(f"{handle.backend}: no case is known that passes our rules and gets a vendor status")
    device = device_of(handle)
    x = device.from_numpy(np.ones((65536, 1, 1, 1), np.float32))
    y = device.from_numpy(np.full((65536, 1, 1, 1), 7, np.float32))
    one = device.from_numpy(np.ones(1, np.float32))
    with pytest.raises(pybnorm.NotSupportedError) as info:
        handle.forward_inference(x, one, one, one, one, y)
    error = info.value
    assert error.status == 3000
    assert "CUDNN_STATUS_NOT_SUPPORTED" in str(error)
    assert "(65536, 1, 1, 1)" in str(error)
    assert error.library in str(error)
    assert "batch_normalization_forward_inference" in str(error)
    assert (device.to_numpy(y) == 7).all()
