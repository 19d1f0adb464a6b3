"""``y = value``: every dtype, rank and memory order, exactly rounded, and nothing written beside it."""

import ml_dtypes
import numpy as np
import pytest
from place import device_of
from tables import table

import pybnorm
from pybnorm import DataType, Mode, Operation, _arguments
from pybnorm.reference import round_to

NUMPY = {
    DataType.FLOAT32: np.dtype(np.float32),
    DataType.FLOAT64: np.dtype(np.float64),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
# Exact, ties, above and below ties of either 16-bit type, its subnormals and its ends.
VALUES = [0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2049.0,
          6.0e-5, 6.2e-5, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 65504.0, -65504.0]  # fmt: skip
LAYOUTS = ["packed", "channels last", "gaps"]


def array(dims, dtype, layout):
    """An array of nines and the memory it lies in."""
    shape = [d + 1 for d in dims] if layout == "gaps" else dims
    memory = np.full(shape, 9.0).astype(NUMPY[dtype])
    if layout == "channels last":
        memory = np.moveaxis(np.full((dims[0], *dims[2:], dims[1]), 9.0).astype(NUMPY[dtype]), -1, 1)
    return memory[tuple(slice(0, d) for d in dims)], memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(3, 5), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 4), (2, 2, 1, 3, 2, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", list(NUMPY), ids=lambda d: d.short)
def test_fill(handle, dtype, dims, layout):
    device = device_of(handle)
    y, memory = array(dims, dtype, layout)
    strides = tuple(s // y.itemsize for s in y.strides)
    bits, why = pybnorm.capability(
        handle.backend, Operation.FILL, Mode.SPATIAL, dtype, _arguments.layout_of(dims, strides), len(dims)
    )
    placed = device.from_numpy(y)
    if not bits or (handle.backend == "cudnn" and layout == "gaps" and len(dims) > 5):
        assert handle.backend != "onednn", why
        with pytest.raises(pybnorm.UnsupportedError):
            handle.fill(1.0, placed)
        assert device.to_numpy(placed).tobytes() == y.tobytes()
        return
    for value in VALUES:
        placed = device.from_numpy(y)
        handle.fill(value, placed)
        got = device.to_numpy(placed)
        right = round_to(np.array([value]), NUMPY[dtype])[0]
        assert got.tobytes() == np.full(dims, right).astype(NUMPY[dtype]).tobytes(), value
        if layout == "gaps":
            span = _arguments.span(dims, strides)
            whole = np.lib.stride_tricks.as_strided(got, (span,), (got.itemsize,)).astype(np.float64)
            before = np.lib.stride_tricks.as_strided(memory, (span,), (got.itemsize,)).astype(np.float64)
            mine = np.zeros(span, bool)
            np.lib.stride_tricks.as_strided(mine, dims, strides)[...] = True
            assert (whole[~mine] == before[~mine]).all(), value


@table(
    ("dtype", "value"),
    [
        (DataType.FLOAT32, 1e39),
        (DataType.FLOAT16, 65505.0),
        (DataType.BFLOAT16, 3.4e38),
    ],
)
def test_a_value_beyond_the_type(handle, dtype, value):
    device = device_of(handle)
    placed = device.from_numpy(np.full((2, 3), 9.0).astype(NUMPY[dtype]))
    with pytest.raises(pybnorm.ArgumentError) as caught:
        handle.fill(value, placed)
    assert caught.value.argument == "value"
    assert dtype.name.lower() in caught.value.allowed
    assert (device.to_numpy(placed).astype(float) == 9).all()
