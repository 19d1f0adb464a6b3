"""max(x, 0) and its gradient on every backend that can execute: exact, whatever the layouts."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from place import device_of

import pybnorm
from pybnorm import DataType, Layout, Mode, Operation

NUMPY = {
    DataType.FLOAT32: np.float32,
    DataType.FLOAT64: np.float64,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
}
SHAPES = [(6, 5), (4, 3, 7), (4, 5, 6, 7), (2, 3, 2, 3, 4), (2, 3, 2, 3, 2, 2), (1, 1), (3, 1, 1, 2)]
SENTINEL = 7


def expected_support(backend, name, kinds):
    """Whether a backend must compute on tensors described like this."""
    layouts = [kind.layout for kind in kinds]
    if backend == "miopen":
        packed = Layout.STRIDED not in layouts and len(set(layouts)) == 1
        return packed and kinds[0].dtype in (DataType.FLOAT32, DataType.FLOAT16)
    if backend == "cudnn":
        if len(kinds[0].dims) > 5 and Layout.STRIDED in layouts:
            return False
        strides = {tuple(s for s, d in zip(k.strides, k.dims, strict=True) if d > 1) for k in kinds}
        return name == "relu" or len(strides) == 1
    return True


def lay(values, layout):
    """The values in a layout; gaps hold the sentinel."""
    if layout == Layout.CHANNELS_FIRST:
        return np.ascontiguousarray(values)
    if layout == Layout.CHANNELS_LAST:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)
    memory = np.full([2 * d for d in values.shape], SENTINEL, values.dtype)
    view = memory[tuple(slice(0, d) for d in values.shape)]
    view[...] = values
    return view


def values_of(dtype, shape, seed):
    values = np.random.default_rng(seed).standard_normal(shape).astype(NUMPY[dtype])
    tiny = {DataType.FLOAT16: 2.0**-14, DataType.FLOAT64: 2.0**-1022}.get(dtype, 2.0**-126)
    special = np.array([0.0, -0.0, tiny, -tiny, 1.0, -1.0], NUMPY[dtype])
    values.flat[: special.size] = special[: values.size]
    return values


LAYOUTS = [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST, Layout.STRIDED]


@pytest.mark.parametrize("level", ["arrays", "addresses"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMPY, ids=lambda d: d.short)
@pytest.mark.parametrize("layouts", [*[(v,) * 3 for v in LAYOUTS], *itertools.permutations(LAYOUTS)], ids=str)
def test_results_are_exact(handle, layouts, dtype, shape, level):
    device = device_of(handle)
    values, upstream = values_of(dtype, shape, 1), values_of(dtype, shape, 2).ravel()[::-1].copy().reshape(shape)
    x, dy = device.from_numpy(lay(values, layouts[0])), device.from_numpy(lay(upstream, layouts[1]))
    y, dx = (device.from_numpy(lay(np.full(shape, np.nan, NUMPY[dtype]), layout)) for layout in layouts[1:])
    run(handle, "relu", level, dtype, [x, y], lambda: np.where(values > 0, values, 0), device)
    run(handle, "relu_backward", level, dtype, [x, dy, dx], lambda: np.where(values > 0, upstream, 0), device)
    assert np.array_equal(device.to_numpy(x), values)
    assert np.array_equal(device.to_numpy(dy), upstream)


def run(handle, name, level, dtype, buffers, right, device):
    """The call, and its result or its refusal."""
    kinds = [pybnorm.TensorDescriptor(handle.backend, b.dtype, b.dims, b.strides) for b in buffers]
    operation = Operation.RELU if name == "relu" else Operation.RELU_BACKWARD
    must = expected_support(handle.backend, name, kinds)
    bits, why = pybnorm.capability(
        handle.backend, operation, Mode.SPATIAL, dtype, kinds[0].layout, len(buffers[0].dims)
    )
    assert bits or not must, why
    result = buffers[-1]
    before = device.to_numpy(result)

    def call():
        if level == "arrays":
            getattr(handle, name)(*buffers)
        else:
            pairs = [value for kind, b in zip(kinds, buffers, strict=True) for value in (kind, b.pointer)]
            getattr(pybnorm._core, name)(handle, *pairs)

    if not must:
        with pytest.raises(pybnorm.UnsupportedError) as info:
            call()
        assert info.value.text
        device.synchronize()
        assert np.array_equal(device.to_numpy(result), before, equal_nan=True)
        return
    call()
    device.synchronize()
    got = device.to_numpy(result)
    assert np.array_equal(got.astype(np.float64), right().astype(np.float64))
    if got.base is not None and got.ndim and kinds[-1].layout == Layout.STRIDED:
        size = got.dtype.itemsize
        span = 1 + sum((d - 1) * s // size for d, s in zip(got.shape, got.strides, strict=True))
        flat = np.lib.stride_tricks.as_strided(got, (span,), (size,))
        used = np.zeros(span, bool)
        used[sum(np.ix_(*[np.arange(d) * s // size for d, s in zip(got.shape, got.strides, strict=True)])).ravel()] = (
            True
        )
        assert (flat[~used] == SENTINEL).all(), "wrote into the gaps"


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT16], ids=lambda d: d.short)
def test_values_that_are_not_finite(handle, dtype):
    """NaN stays NaN and passes no gradient; MIOpen's kernels multiply by the mask."""
    device = device_of(handle)
    nan, inf = np.nan, np.inf
    values = np.array([nan, inf, -inf, 1, -1, 0, 2, -2], NUMPY[dtype]).reshape(1, 1, 2, 4)
    upstream = np.array([1, 1, 1, nan, nan, inf, inf, -inf], NUMPY[dtype]).reshape(1, 1, 2, 4)
    x, dy = device.from_numpy(values), device.from_numpy(upstream)
    y, dx = (device.from_numpy(np.full_like(values, 7)) for _ in range(2))
    handle.relu(x, y)
    handle.relu_backward(x, dy, dx)
    device.synchronize()
    product = handle.backend == "miopen"
    right = [nan, inf, nan if product else 0, 1, 0, 0, 2, 0]
    gradient = [0, 1, 0, nan, nan if product else 0, nan if product else 0, inf, nan if product else 0]
    assert np.array_equal(device.to_numpy(y).ravel().astype(float), right, equal_nan=True)
    assert np.array_equal(device.to_numpy(dx).ravel().astype(float), gradient, equal_nan=True)
