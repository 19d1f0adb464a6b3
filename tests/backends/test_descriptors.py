"""Descriptors and the derive call on the real libraries; none of it needs a device."""

import gc

import pytest
from tables import table

import pybnorm
from pybnorm import DataType, Layout, Mode, _arguments

SHAPES = [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 3, 2, 2, 2, 2), (2, 3, 1, 2, 1, 2, 3, 2)]
FLOATS = [DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16]


@table("layout", [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST])
@table("dtype", list(DataType))
@table("dims", SHAPES)
def test_the_vendor_repeats_what_was_set(backend, dims, dtype, layout):
    strides = _arguments.packed_strides(dims, layout)
    with pybnorm.TensorDescriptor(backend, dtype, dims, strides) as descriptor:
        assert descriptor.query() == (dtype, dims, strides)
        assert (descriptor.dtype, descriptor.dims, descriptor.strides) == (dtype, dims, strides)
        assert descriptor.layout is _arguments.layout_of(dims, strides)
        assert descriptor.nbytes == _arguments.numel(dims) * dtype.itemsize
        assert descriptor.pointer


def test_gaps_count_in_the_size(backend):
    descriptor = pybnorm.TensorDescriptor(backend, "f32", (2, 3, 4, 5), (200, 50, 10, 2))
    assert descriptor.layout is Layout.STRIDED
    span = 4 * (200 + 2 * 50 + 3 * 10 + 4 * 2 + 1)
    # oneDNN counts whole strides of the outermost axis, the others up to the last element.
    assert descriptor.nbytes == (4 * 2 * 200 if backend == "onednn" else span)


@table("mode", list(Mode))
@table("dtype", FLOATS)
@table("layout", [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST])
@table("dims", SHAPES)
def test_derive(backend, dims, dtype, layout, mode):
    x = pybnorm.TensorDescriptor(backend, dtype, dims, _arguments.packed_strides(dims, layout))
    bits, reason = pybnorm.capability(backend, "derive", mode, dtype, x.layout, len(dims))
    if not bits:
        assert reason
        with pytest.raises(pybnorm.UnsupportedError) as info:
            pybnorm.derive_bn_tensor_descriptor(x, mode)
        assert reason in str(info.value)
        return
    derived = pybnorm.derive_bn_tensor_descriptor(x, mode)
    shape = _arguments.derived_dims(dims, mode)
    assert derived.dims == shape
    assert derived.dtype is DataType.FLOAT32
    assert derived.strides == _arguments.packed_strides(shape)


def test_every_backend_derives_both_common_modes(backend):
    """The refusals above cannot be all there is."""
    for mode in (Mode.PER_ACTIVATION, Mode.SPATIAL):
        for dims in SHAPES[:4]:
            x = pybnorm.TensorDescriptor(backend, "f32", dims)
            assert pybnorm.derive_bn_tensor_descriptor(x, mode).dims == _arguments.derived_dims(dims, mode)


def test_derive_of_float64(backend):
    x = pybnorm.TensorDescriptor(backend, "f64", (2, 3, 4, 5))
    bits, _ = pybnorm.capability(backend, "derive", 1, "f64", 0, 4)
    assert bool(bits) == (backend != "miopen")  # MIOpen derives float32 for it
    if bits:
        assert pybnorm.derive_bn_tensor_descriptor(x, 1).dtype is DataType.FLOAT64


def test_close_is_idempotent_and_final(backend):
    descriptor = pybnorm.TensorDescriptor(backend, "f32", (2, 3))
    descriptor.close()
    descriptor.close()
    assert descriptor.closed
    assert repr(descriptor) == "<TensorDescriptor closed>"
    for use in (descriptor.query, lambda: descriptor.nbytes, lambda: descriptor.pointer, descriptor.__enter__):
        with pytest.raises(pybnorm.ClosedError):
            use()
    with pytest.raises(pybnorm.ClosedError):
        pybnorm.derive_bn_tensor_descriptor(descriptor, 1)


def test_a_foreign_descriptor_is_read_and_left_alone(backend):
    owner = pybnorm.TensorDescriptor(backend, "f16", (2, 3, 4, 5), (60, 1, 15, 3))
    borrowed = pybnorm.TensorDescriptor.from_pointer(backend, owner.pointer)
    assert (borrowed.dtype, borrowed.dims, borrowed.strides) == (owner.dtype, owner.dims, owner.strides)
    assert borrowed.pointer == owner.pointer
    borrowed.close()
    del borrowed
    gc.collect()
    assert owner.query() == (DataType.FLOAT16, (2, 3, 4, 5), (60, 1, 15, 3))


# Each other bad argument is in tests/fuzz.
@table(("dims", "strides"), [((2, 3), (1, 1)), ((2, 70000, 70000), None)])  # the packed stride of N is past int32
def test_strides_that_overlap_or_are_too_large_are_refused(backend, dims, strides):
    with pytest.raises(pybnorm.ArgumentError) as info:
        pybnorm.TensorDescriptor(backend, "f32", dims, strides)
    assert info.value.argument == "strides"
    assert info.value.value in str(info.value)


def test_a_refusal_has_a_reason_and_a_yes_has_none(backend):
    for operation in ("derive", "forward_training", "forward_inference", "backward", "axpby"):
        for mode in Mode:
            for dtype in DataType:
                for layout in Layout:
                    for rank in range(2, 9):
                        bits, reason = pybnorm.capability(backend, operation, mode, dtype, layout, rank)
                        assert bool(reason) != bool(bits), (operation, mode, dtype, layout, rank)


def test_without_a_device_create_says_so(backend):
    """On a machine with no GPU the vendor's own number and text arrive; with one a handle opens."""
    try:
        with pybnorm.Handle(backend) as opened:
            assert opened.pointer
    except pybnorm.NotInitializedError as error:
        assert error.status > 0
        assert str(error.status) in str(error)
        assert error.status_name.isupper() or error.status_name.startswith("miopen")
        assert error.library == pybnorm.load(backend).path
