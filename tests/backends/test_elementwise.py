"""max(x, 0), its gradient and y = value on every backend that can execute: exact, whatever the layouts.

axpby, which rounds, is in test_calls.py.
"""

import itertools

import numpy as np
import pytest
from place import device_of
from tables import table
from test_calls import SENTINEL, bytes_of

import pybnorm
from pybnorm import DataType, Layout, Mode, Operation, _arguments
from pybnorm.check.language.data import numpy_dtype
from pybnorm.reference import round_to

SHAPES = [(6, 5), (4, 3, 7), (4, 5, 6, 7), (2, 3, 2, 3, 4), (2, 3, 2, 3, 2, 2), (1, 1), (3, 1, 1, 2)]
LAYOUTS = [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST, Layout.STRIDED]
# Exact, ties, above and below ties of either 16-bit type, its subnormals and its ends.
VALUES = [0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2049.0,
          6.0e-5, 6.2e-5, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 65504.0, -65504.0]  # fmt: skip


def expected_support(backend, name, kinds):
    """Say whether a backend must compute on tensors described like this."""
    layouts, dtype = [kind.layout for kind in kinds], kinds[0].dtype
    if backend == "miopen" and name == "fill":
        return dtype != DataType.FLOAT64
    if backend == "miopen":
        packed = Layout.STRIDED not in layouts and len(set(layouts)) == 1
        return packed and dtype in (DataType.FLOAT32, DataType.FLOAT16)
    if backend == "cudnn":
        if len(kinds[0].dims) > 5 and Layout.STRIDED in layouts:
            return False
        strides = {tuple(s for s, d in zip(k.strides, k.dims, strict=True) if d > 1) for k in kinds}
        return name != "relu_backward" or len(strides) == 1
    return True


def lay(values, layout):
    """The values in a layout; gaps hold the sentinel."""
    strides = _arguments.packed_strides(values.shape, layout if layout != Layout.STRIDED else Layout.CHANNELS_LAST)
    steps = [s * values.itemsize * (1 + (layout == Layout.STRIDED)) for s in strides]
    span = values.itemsize + sum((d - 1) * s for d, s in zip(values.shape, steps, strict=True))
    view = np.ndarray(values.shape, values.dtype, np.full(span, SENTINEL, np.uint8), strides=steps)
    view[...] = values
    return view


def values_of(dtype, shape, seed):
    values = np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))
    tiny = {DataType.FLOAT16: 2.0**-14, DataType.FLOAT64: 2.0**-1022}.get(dtype, 2.0**-126)
    special = np.array([0.0, -0.0, tiny, -tiny, 1.0, -1.0], values.dtype)
    values.flat[: special.size] = special[: values.size]
    return values


def run(handle, name, level, tensors, right, *values):
    """The call, whose result is the last of the arrays, or its refusal; nothing else is written."""
    device = device_of(handle)
    buffers = [device.from_numpy(tensor) for tensor in tensors]
    kinds = [pybnorm.TensorDescriptor(handle.backend, b.dtype, b.dims, b.strides) for b in buffers]
    bits, why = pybnorm.capability(
        handle.backend, Operation[name.upper()], Mode.SPATIAL, kinds[0].dtype, kinds[0].layout, len(buffers[0].dims)
    )
    must = expected_support(handle.backend, name, kinds)
    assert bits or not must, why

    def call():
        if level == "arrays":
            getattr(handle, name)(*values, *buffers)
        else:
            pairs = [value for kind, b in zip(kinds, buffers, strict=True) for value in (kind, b.pointer)]
            getattr(pybnorm, name)(handle, *values, *pairs)

    if must:
        call()
    else:
        with pytest.raises(pybnorm.UnsupportedError) as info:
            call()
        assert info.value.text
    device.synchronize()
    got = [device.to_numpy(buffer) for buffer in buffers]
    for before, after in zip(tensors, got if not must else got[:-1], strict=False):
        assert (bytes_of(after)[0] == bytes_of(before)[0]).all(), "changed"
    raw, used = bytes_of(got[-1])
    assert (raw[~used] == SENTINEL).all(), "wrote into the gaps"
    if must:
        assert np.array_equal(got[-1].astype(np.float64), np.broadcast_to(right, got[-1].shape).astype(np.float64))
        return got[-1]
    return None


@pytest.mark.parametrize("level", ["arrays", "addresses"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(DataType), ids=lambda d: d.short)
@pytest.mark.parametrize("layouts", [*[(v,) * 3 for v in LAYOUTS], *itertools.permutations(LAYOUTS)], ids=str)
def test_relu_is_exact(handle, layouts, dtype, shape, level):
    values, upstream = values_of(dtype, shape, 1), values_of(dtype, shape, 2).ravel()[::-1].reshape(shape)
    x, dy = lay(values, layouts[0]), lay(upstream, layouts[1])
    y, dx = (lay(np.full(shape, np.nan, values.dtype), layout) for layout in layouts[1:])
    run(handle, "relu", level, [x, y], np.where(values > 0, values, 0))
    run(handle, "relu_backward", level, [x, dy, dx], np.where(values > 0, upstream, 0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("dims", [(3, 5), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 3, 4), (2, 2, 1, 3, 2, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", list(DataType), ids=lambda d: d.short)
def test_fill_rounds_once(handle, dtype, dims, layout):
    for value in VALUES:
        y = lay(np.full(dims, 9.0).astype(numpy_dtype(dtype)), layout)
        right = round_to(np.array([value]), y.dtype)[0]
        got = run(handle, "fill", "arrays", [y], right, value)
        assert got is None or (np.signbit(got) == np.signbit(value)).all()


@table(("dtype", "value"), [("f32", 1e39), ("f16", 65505.0), ("bf16", 3.4e38)])
def test_a_value_beyond_the_type(handle, dtype, value):
    device, dtype = device_of(handle), _arguments.data_type(dtype)
    placed = device.from_numpy(np.full((2, 3), 9.0).astype(numpy_dtype(dtype)))
    with pytest.raises(pybnorm.ArgumentError) as caught:
        handle.fill(value, placed)
    assert caught.value.argument == "value"
    assert dtype.name.lower() in caught.value.allowed
    assert (device.to_numpy(placed).astype(float) == 9).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_not_finite(handle, dtype):
    """NaN stays NaN and passes no gradient; MIOpen's kernels multiply by the mask."""
    device = device_of(handle)
    nan, inf = np.nan, np.inf
    values = np.array([nan, inf, -inf, 1, -1, 0, 2, -2], dtype).reshape(1, 1, 2, 4)
    upstream = np.array([1, 1, 1, nan, nan, inf, inf, -inf], dtype).reshape(1, 1, 2, 4)
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


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_elements_at_any_address(handle, dtype):
    dims, device, kind = (2, 3, 5, 7), device_of(handle), numpy_dtype(_arguments.data_type(dtype))
    whole = [device.from_numpy(np.full(212, value).astype(kind)) for value in (3.0, -2.0, 9.0)]
    strides = _arguments.packed_strides(dims)
    x, dy, y = (b._replace(pointer=b.pointer + 2, dims=dims, strides=strides) for b in whole)
    for name, arguments, right in (
        ("axpby", (2.0, x, 0.0, y), 6),
        ("fill", (1.5, y), 1.5),
        ("relu", (x, y), 3),
        ("relu_backward", (x, dy, y), -2),
    ):
        try:
            getattr(handle, name)(*arguments)
        except pybnorm.UnsupportedError:
            assert handle.backend == "miopen"
            assert dtype == "bf16"
            continue
        device.synchronize()
        got = device.to_numpy(whole[-1]).astype(float)
        assert (got[1:-1] == right).all(), name
        assert got[0] == got[-1] == 9, name
