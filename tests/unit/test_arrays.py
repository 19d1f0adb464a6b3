"""What each protocol says of an array, and what is refused by name."""

import array
import ctypes
import gc
import operator
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from tables import table

from pybnorm import functional
from pybnorm._arrays import ROCM, Buffer, Memory, as_buffer, as_memory
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError

DTYPES = [
    (np.dtype(np.float32), DataType.FLOAT32),
    (np.dtype(np.float64), DataType.FLOAT64),
    (np.dtype(np.float16), DataType.FLOAT16),
    (np.dtype(ml_dtypes.bfloat16), DataType.BFLOAT16),
]


# ---- NumPy


@pytest.mark.parametrize(("dtype", "expected"), DTYPES)
def test_numpy(dtype, expected):
    x = np.zeros((2, 3, 4, 5), dtype)
    buffer = as_buffer(x, "x")
    assert buffer == Buffer(x.ctypes.data, (2, 3, 4, 5), (60, 20, 5, 1), expected, 1, 0, True, x)
    assert buffer.owner is x
    assert type(buffer.dtype) is DataType


@pytest.mark.parametrize("dtype", [d for d, _ in DTYPES])
@pytest.mark.parametrize(
    ("index", "strides"),
    [
        ((slice(None), slice(None, None, 2)), (60, 40, 5, 1)),
        ((slice(None), slice(None), slice(None, None, -1)), (60, 20, -5, 1)),
        ((slice(1, 2), slice(2, 3)), (60, 20, 5, 1)),
        ((Ellipsis, slice(None, None, -3)), (60, 20, 5, -3)),
    ],
)
def test_numpy_views(dtype, index, strides):
    x = np.arange(120).reshape(2, 3, 4, 5).astype(dtype)
    view = x[index]
    buffer = as_buffer(view, "x")
    assert (buffer.dims, buffer.strides) == (view.shape, strides)
    # The pointer is that of element 0, wherever the strides lead from there.
    last = tuple(n - 1 for n in view.shape)
    offset = sum(i * s for i, s in zip(last, buffer.strides, strict=True))
    for position, where in ((0, 0), (offset, last)):
        raw = ctypes.string_at(buffer.pointer + position * dtype.itemsize, dtype.itemsize)
        assert raw == (view[(0, 0, 0, 0)] if where == 0 else view[where]).tobytes()


def test_numpy_transposed_broadcast_scalar_and_empty():
    x = np.zeros((2, 3, 4), np.float32)
    assert as_buffer(x.transpose(0, 2, 1), "x")[1:3] == ((2, 4, 3), (12, 1, 4))
    wide = np.broadcast_to(np.float32([1, 2, 3]), (5, 3))
    assert as_buffer(wide, "x")[1:3] == ((5, 3), (0, 1))
    assert not as_buffer(wide, "x").writable
    assert as_buffer(np.array(3.0), "x")[1:4] == ((), (), DataType.FLOAT64)
    assert as_buffer(np.zeros((0, 3), np.float16), "x").dims == (0, 3)


def test_numpy_subclasses():
    class Sub(np.ndarray):
        pass

    x = np.zeros(3, np.float32).view(Sub)
    assert as_buffer(x, "x").owner is x
    with pytest.raises(ArgumentTypeError, match=r"scale: got a masked array"):
        as_buffer(np.ma.masked_array(np.zeros(3), [True, False, False]), "scale")


OTHERS = ["i4", "u2", "?", "c8", "O", "U3", "f4,i4", ml_dtypes.float8_e4m3fn, "M8[s]", ">f4", ">f8", ">f2", "g"]


@table("dtype", [*OTHERS, np.dtype(ml_dtypes.bfloat16).newbyteorder()])
def test_numpy_dtypes_that_are_refused(dtype):
    x = np.zeros(3, dtype)
    with pytest.raises(ArgumentTypeError) as caught:
        as_buffer(x, "running_mean")
    text = str(caught.value)
    assert text.startswith("running_mean: got an array of dtype ")
    assert str(x.dtype) in text
    assert text.endswith("allowed: float32, float64, float16 or bfloat16")
    assert ("byte order" in text) == (not x.dtype.isnative)


def test_strides_that_are_not_whole_elements():
    records = np.zeros(4, np.dtype([("a", "f4"), ("b", "i1")]))
    with pytest.raises(ArgumentError, match=r"x: got strides of \(5,\) bytes, allowed: multiples of the 4 byte"):
        as_buffer(records["a"], "x")
    # Along an axis of length 1 nothing is stepped.
    assert as_buffer(records["a"][:1], "x").dims == (1,)


def test_an_address_that_is_not_aligned():
    raw = np.zeros(17, np.uint8)
    x = raw[1:].view(np.float32)
    with pytest.raises(ArgumentError, match=r"bias: got address 0x.*aligned to 4 bytes"):
        as_buffer(x, "bias")


@pytest.mark.parametrize("value", [None, "abc", [1.0, 2.0], (1.0,), 3, 1.5, object(), {"a": 1}, np.float32, ...])
def test_no_array_at_all(value):
    for function in (as_buffer, as_memory):
        with pytest.raises(ArgumentTypeError, match=r"^dy: got ") as caught:
            function(value, "dy")
        assert isinstance(caught.value, TypeError)
        assert "DLPack" in caught.value.allowed


def test_nothing_is_kept_or_lost():
    x = np.zeros((4, 4), np.float32)
    before = sys.getrefcount(x)
    for _ in range(10):
        as_buffer(x, "x")
        as_buffer(memoryview(x), "x")
        as_buffer(Exporter(x), "x")
        as_memory(x, "x")
    assert sys.getrefcount(x) == before


# ---- buffer protocol


@pytest.mark.parametrize(("code", "expected"), [("f", DataType.FLOAT32), ("d", DataType.FLOAT64)])
def test_array_array(code, expected):
    x = array.array(code, [1, 2, 3])
    buffer = as_buffer(x, "x")
    assert buffer[:-1] == (x.buffer_info()[0], (3,), (1,), expected, 1, 0, True)


def test_memoryview():
    memory = bytearray(64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    grid = memoryview(memory).cast("B").cast("f", (4, 4))
    assert as_buffer(grid, "x")[:-1] == (address, (4, 4), (4, 1), DataType.FLOAT32, 1, 0, True)
    assert as_buffer(memoryview(memory).cast("d")[::2], "x")[:3] == (address, (4,), (2,))
    assert as_buffer(memoryview(memory).cast("d")[::-1], "x")[:3] == (address + 56, (8,), (-1,))
    assert as_buffer(memoryview(memory).cast("f").toreadonly(), "x").writable is False
    assert as_buffer(memoryview(bytes(8)).cast("f"), "x").writable is False


def test_half_and_ctypes_buffers():
    half = np.zeros((2, 3), np.float16)
    assert as_buffer(memoryview(half), "x")[1:4] == ((2, 3), (3, 1), DataType.FLOAT16)
    matrix = ((ctypes.c_float * 3) * 2)()
    assert as_buffer(matrix, "x")[:4] == (ctypes.addressof(matrix), (2, 3), (3, 1), DataType.FLOAT32)
    assert as_buffer(np.float64(2), "x").dims == ()


@pytest.mark.parametrize("value", [b"abcd", bytearray(4), array.array("i", [1]), memoryview(np.zeros(2, ">f4"))])
def test_buffers_of_other_types(value):
    with pytest.raises(ArgumentTypeError, match=r"x: got an array of dtype"):
        as_buffer(value, "x")


def test_a_buffer_stays_exported_as_long_as_its_description_lives():
    memory = bytearray(16)
    buffer = as_buffer(memoryview(memory).cast("f"), "x")
    with pytest.raises(BufferError):
        memory.extend(b"more")
    assert buffer.dims == (4,)
    del buffer
    gc.collect()
    memory.extend(b"more")


def test_a_released_buffer_is_an_error_that_names_the_argument():
    view = memoryview(bytearray(16)).cast("f")
    view.release()
    with pytest.raises(ArgumentError, match=r"x: got builtins.memoryview whose buffer protocol failed: ValueError"):
        as_buffer(view, "x")


# ---- __cuda_array_interface__


class Cai:
    def __init__(self, **fields):
        self.__cuda_array_interface__ = {
            "shape": (2, 3, 4),
            "typestr": "<f4",
            "data": (0x7F0000000100, False),
            "version": 3,
        } | fields


@pytest.mark.parametrize(
    ("typestr", "expected"),
    [("<f4", DataType.FLOAT32), ("<f8", DataType.FLOAT64), ("<f2", DataType.FLOAT16)],
)
def test_cuda_array_interface(typestr, expected):
    x = Cai(typestr=typestr)
    assert as_buffer(x, "x") == Buffer(0x7F0000000100, (2, 3, 4), (12, 4, 1), expected, 2, -1, True, x)


@pytest.mark.parametrize("module", ["hip._util.types", "rocm.bindings.util.types", "hipster.types"])
def test_arrays_of_hip_python_are_rocms(module):
    """Their type strings are any of NumPy's names, and nothing in them says whose memory it is."""
    kind = type("DeviceArray", (Cai,), {"__module__": module})
    if module == "hipster.types":
        assert as_buffer(kind(), "x").device_type == 2
        with pytest.raises(ArgumentError, match=r"x: got hipster\.types\.DeviceArray whose .* failed: ValueError"):
            as_buffer(kind(typestr="float32"), "x")
        return
    for typestr, dtype in (("<f4", DataType.FLOAT32), ("float32", DataType.FLOAT32), ("half", DataType.FLOAT16)):
        x = kind(typestr=typestr)
        assert as_buffer(x, "x") == Buffer(0x7F0000000100, (2, 3, 4), (12, 4, 1), dtype, ROCM, -1, True, x)
    memory = kind(typestr="B", shape=(64,))  # as hipMalloc gives it
    assert as_memory(memory, "workspace") == Memory(0x7F0000000100, 64, ROCM, -1, True, memory)
    with pytest.raises(ArgumentTypeError, match=r"\|u1"):
        as_buffer(memory, "x")
    with pytest.raises(ArgumentError, match=r"__cuda_array_interface__ failed: TypeError"):
        as_buffer(kind(typestr="no type"), "x")


def test_hip_pythons_own_array():
    pytest.importorskip("hip")
    from hip import _util  # no module in version 10, but an attribute

    x = _util.types.DeviceArray(0x7F0000000100).configure(typestr="float32", shape=(2, 3), itemsize=4, _force=True)
    assert as_buffer(x, "x") == Buffer(0x7F0000000100, (2, 3), (3, 1), DataType.FLOAT32, ROCM, -1, True, x)


def test_cuda_array_interface_strides_flags_and_streams():
    assert as_buffer(Cai(strides=None), "x").strides == (12, 4, 1)
    assert as_buffer(Cai(strides=(48, 4, 12)), "x").strides == (12, 1, 3)
    assert as_buffer(Cai(strides=(-48, 0, 4)), "x").strides == (-12, 0, 1)
    assert as_buffer(Cai(data=(0x100, True)), "x").writable is False
    assert as_buffer(Cai(stream=7, descr=[("", "<f4")], mask=None), "x").writable is True
    assert as_buffer(Cai(shape=()), "x")[1:3] == ((), ())
    assert as_buffer(Cai(shape=(0, 3), data=(0, False)), "x")[:3] == (0, (0, 3), (3, 1))
    with pytest.raises(ArgumentError, match=r"strides of"):
        as_buffer(Cai(strides=(49, 16, 4)), "x")
    with pytest.raises(ArgumentTypeError, match=r"masked"):
        as_buffer(Cai(mask=object()), "x")


@pytest.mark.parametrize("typestr", [">f4", "<i4", "|u1", "<c8", "|b1", "<V2"])
def test_cuda_array_interface_types_that_are_refused(typestr):
    with pytest.raises(ArgumentTypeError) as caught:
        as_buffer(Cai(typestr=typestr), "saved_mean")
    assert typestr in str(caught.value)
    assert caught.value.argument == "saved_mean"


@pytest.mark.parametrize(
    "fields",
    [
        {"data": None},
        {"shape": 3},
        {"shape": "abc"},
        {"shape": (2, -3, 4)},
        {"shape": (2, 3.0, 4)},
        {"typestr": None},
        {"data": ("no", "pointer", 3)},
        {"data": ("x", 0)},
        {"strides": 4},
        {"strides": "abc"},
        {"strides": (16, 4)},
    ],
)
def test_cuda_array_interface_that_is_malformed(fields):
    with pytest.raises(ArgumentError, match=r"x: got .*Cai whose __cuda_array_interface__ failed") as caught:
        as_buffer(Cai(**fields), "x")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("field", ["shape", "strides"])
def test_cuda_array_interface_that_never_ends_is_not_taken_in(field):
    numbers = iter([1] * 100_000)
    with pytest.raises(ArgumentError, match=f"{field} of more than 64 axes"):
        as_buffer(Cai(**{field: numbers}), "x")
    assert operator.length_hint(numbers) > 99_000


def test_cuda_array_interface_at_null_is_refused():
    with pytest.raises(ArgumentError, match=r"address 0"):
        as_buffer(Cai(data=(0, False)), "x")
    with pytest.raises(ArgumentError, match=r"address 0"):
        as_buffer(Cai(data=(None, False)), "x")


class Property:
    def __init__(self, error):
        self.error = error

    @property
    def __cuda_array_interface__(self):
        raise self.error


def test_a_protocol_that_is_absent_is_a_miss_and_one_that_fails_is_an_error():
    with pytest.raises(ArgumentTypeError, match=r"^x: got <"):
        as_buffer(Property(AttributeError("not on this device")), "x")
    with pytest.raises(
        ArgumentError, match=r"x: got .*Property whose .* failed: RuntimeError: requires grad"
    ) as caught:
        as_buffer(Property(RuntimeError("requires grad")), "x")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_cuda_array_interface_takes_the_device_from_dlpack_where_there_is_one():
    class Both(Cai):
        def __dlpack_device__(self):
            return (13, 3)

        def __dlpack__(self, **_):
            raise AssertionError("not needed")

    assert as_buffer(Both(), "x")[4:6] == (13, 3)


def test_bfloat16_which_the_interface_lacks_comes_by_dlpack():
    class Both(Cai):
        def __init__(self):
            super().__init__(typestr="<V2")
            self.capsule = Capsule(code=4, bits=16, device=(2, 1))
            self.__dlpack_device__ = self.capsule.__dlpack_device__
            self.__dlpack__ = self.capsule.__dlpack__

    assert as_buffer(Both(), "x")[3:6] == (DataType.BFLOAT16, 2, 1)


# ---- DLPack


class Exporter:
    """An object that has DLPack only."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]  # fmt: skip


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


class Capsule:
    """A producer whose every field can be chosen, and that counts how often its tensor is deleted."""

    def __init__(
        self,
        *,
        versioned=True,
        dims=(2, 3),
        strides=(3, 1),
        code=2,
        bits=32,
        lanes=1,
        device=(1, 0),
        data=None,
        byte_offset=0,
        flags=0,
        major=1,
        name=None,
        old=False,
    ):
        self.memory = np.zeros(64, np.float64)
        self.shape = (ctypes.c_int64 * max(len(dims), 1))(*dims)
        self.strides = None if strides is None else (ctypes.c_int64 * max(len(strides), 1))(*strides)
        tensor = _Tensor(
            self.memory.ctypes.data if data is None else data, *device, len(dims), code, bits, lanes,
            ctypes.addressof(self.shape), None if self.strides is None else ctypes.addressof(self.strides), byte_offset,
        )  # fmt: skip
        self.deleted = 0
        self.asked = []
        self.old = old
        self.device = device

        @_DELETER
        def deleter(_):
            self.deleted += 1

        self.deleter = deleter
        address = ctypes.cast(deleter, ctypes.c_void_p)
        self.managed = (
            _Versioned(major, 0, None, address, flags, tensor) if versioned else _Managed(tensor, None, address)
        )
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")

        @_DESTRUCTOR
        def destructor(capsule):
            if _raw_is_valid(capsule, self.name):  # a consumer would have renamed it
                self.deleter(ctypes.addressof(self.managed))

        self.destructor = destructor

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        self.asked.append(kwargs)
        if self.old and set(kwargs) - {"stream"}:
            raise TypeError("unexpected keyword argument 'max_version'")
        return _new_capsule(ctypes.addressof(self.managed), self.name, self.destructor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_dlpack_of_numpy(dtype):
    x = np.zeros((2, 3, 4), dtype)[:, ::2]
    assert as_buffer(Exporter(x), "x")[:-1] == as_buffer(x, "x")[:-1]


@pytest.mark.xfail(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy before 2.1 exports no read-only array")
def test_dlpack_honours_read_only():
    x = np.zeros(3, np.float32)
    x.flags.writeable = False
    assert as_buffer(Exporter(x), "x").writable is False
    assert as_buffer(Capsule(flags=1), "x").writable is False
    assert as_buffer(Capsule(flags=2), "x").writable is False  # what is written to a copy is lost
    assert as_buffer(Capsule(flags=4), "x").writable is True
    assert as_buffer(Capsule(versioned=False), "x").writable is True


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    ("code", "bits", "expected"),
    [
        (2, 32, DataType.FLOAT32),
        (2, 64, DataType.FLOAT64),
        (2, 16, DataType.FLOAT16),
        (4, 16, DataType.BFLOAT16),
    ],
)
def test_dlpack_fields(versioned, code, bits, expected):
    producer = Capsule(versioned=versioned, code=code, bits=bits, strides=(8, 2), byte_offset=16, device=(10, 5))
    buffer = as_buffer(producer, "x")
    assert buffer[:-1] == (producer.memory.ctypes.data + 16, (2, 3), (8, 2), expected, 10, 5, True)


def test_dlpack_without_strides_is_packed():
    assert as_buffer(Capsule(dims=(2, 3, 4), strides=None), "x").strides == (12, 4, 1)
    assert as_buffer(Capsule(dims=(2, 0, 4), strides=None), "x").strides == (4, 4, 1)
    assert as_buffer(Capsule(dims=(), strides=None), "x")[1:3] == ((), ())
    assert as_buffer(Capsule(dims=(), strides=()), "x")[1:3] == ((), ())


@pytest.mark.slow
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_tensor_is_deleted_once_and_not_before_its_description(versioned):
    producer = Capsule(versioned=versioned)
    buffer = as_buffer(producer, "x")
    gc.collect()
    assert producer.deleted == 0
    del buffer
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"code": 0}, {"major": 2}, {"data": 0}, {"name": b"used_dltensor"}, {"byte_offset": 2}]
)
def test_dlpack_tensor_is_deleted_once_after_an_error(fields):
    producer = Capsule(**fields)
    with pytest.raises(ArgumentError):
        as_buffer(producer, "x")
    gc.collect()
    assert producer.deleted == 1


def test_dlpack_is_asked_without_a_copy_and_without_synchronisation():
    on_cpu, on_device = Capsule(), Capsule(device=(2, 0))
    as_buffer(on_cpu, "x")
    as_buffer(on_device, "x")
    assert on_cpu.asked == [{"max_version": (1, 1), "copy": False}]
    assert on_device.asked == [{"max_version": (1, 1), "copy": False, "stream": -1}]


@pytest.mark.parametrize(("device", "kwargs"), [((1, 0), {}), ((10, 0), {"stream": -1})])
def test_dlpack_of_old_producers(device, kwargs):
    producer = Capsule(old=True, versioned=False, device=device)
    assert as_buffer(producer, "x").device_type == device[0]
    assert producer.asked[1:] == [kwargs]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"code": 0}, "int32"),
        ({"code": 1, "bits": 8}, "uint8"),
        ({"code": 5, "bits": 64}, "complex64"),
        ({"code": 6, "bits": 8}, "bool8"),
        ({"bits": 8}, "float8"),
        ({"lanes": 4}, "float32x4"),
        ({"code": 99}, "code 99 32"),
    ],
)
def test_dlpack_types_that_are_refused(fields, name):
    with pytest.raises(ArgumentTypeError, match=rf"x: got an array of dtype {name}, allowed"):
        as_buffer(Capsule(**fields), "x")


def test_dlpack_that_cannot_be_read():
    with pytest.raises(ArgumentError, match=r"DLPack 2.0"):
        as_buffer(Capsule(major=2), "x")
    with pytest.raises(ArgumentError, match=r"unused DLPack capsule"):
        as_buffer(Capsule(name=b"used_dltensor"), "x")
    with pytest.raises(ArgumentError, match=r"address 0"):
        as_buffer(Capsule(data=0), "x")
    with pytest.raises(ArgumentError, match=r"aligned to 4"):
        as_buffer(Capsule(byte_offset=2), "x")


@pytest.mark.parametrize("answer", [None, 3, "text"])
def test_dlpack_that_returns_no_capsule(answer):
    producer = SimpleNamespace(__dlpack__=lambda **_: answer, __dlpack_device__=lambda: (1, 0))
    with pytest.raises(ArgumentError, match=r"unused DLPack capsule"):
        as_buffer(producer, "x")


@pytest.mark.parametrize("error", [BufferError("requires a gradient"), RuntimeError("no"), TypeError("no")])
def test_dlpack_that_fails_names_the_argument(error):
    class Failing(Exporter):
        def __dlpack__(self, **kwargs):
            raise error

    with pytest.raises(ArgumentError, match=r"scale: got .*Failing whose __dlpack__ failed") as caught:
        as_buffer(Failing(np.zeros(3)), "scale")
    assert caught.value.__cause__ is error


# ---- PyTorch, by its attributes


class Tensor:
    """What is used of torch.Tensor."""

    def __init__(self, device="cpu", index=None, dtype="float32", neg=False):
        self.device = SimpleNamespace(type=device, index=index)
        self.dtype = f"torch.{dtype}"
        self.shape = (2, 3)
        self.neg = neg

    def data_ptr(self):
        return 0x1000

    def stride(self):
        return (1, 2)

    def element_size(self):
        return {"float64": 8, "float32": 4, "uint8": 1, "int64": 8}.get(self.dtype[6:], 2)

    def is_neg(self):
        return self.neg

    def __dlpack__(self, **_):
        raise AssertionError("slower, and refuses what requires a gradient")


@pytest.fixture
def torch(monkeypatch):
    module = ModuleType("torch")
    module.Tensor = Tensor
    module.version = SimpleNamespace(hip=None)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", DataType.FLOAT32),
        ("float64", DataType.FLOAT64),
        ("float16", DataType.FLOAT16),
        ("bfloat16", DataType.BFLOAT16),
    ],
)
def test_torch(torch, dtype, expected):
    x = Tensor(dtype=dtype)
    assert as_buffer(x, "x") == Buffer(0x1000, (2, 3), (1, 2), expected, 1, 0, True, x)


def test_torch_devices(torch):
    assert as_buffer(Tensor("cuda", 3), "x")[4:6] == (2, 3)
    torch.version.hip = "6.4.1"  # a ROCm build says cuda too
    assert as_buffer(Tensor("cuda", 3), "x")[4:6] == (10, 3)
    assert as_buffer(Tensor("cpu"), "x")[4:6] == (1, 0)
    with pytest.raises(ArgumentError, match=r"x: got a tensor on .*meta"):
        as_buffer(Tensor("meta"), "x")


def test_torch_tensors_that_are_refused(torch):
    with pytest.raises(ArgumentTypeError, match=r"dtype torch.int64"):
        as_buffer(Tensor(dtype="int64"), "x")
    with pytest.raises(ArgumentError, match=r"lazily negated"):
        as_buffer(Tensor(neg=True), "x")

    class Sparse(Tensor):
        def data_ptr(self):
            raise RuntimeError("no storage")

    with pytest.raises(ArgumentError, match=r"x: got .*Sparse whose PyTorch's tensor attributes failed: .*no storage"):
        as_buffer(Sparse(), "x")


def test_torch_that_is_being_imported_is_no_obstacle(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert as_buffer(Capsule(), "x").dims == (2, 3)


@pytest.mark.filterwarnings("default")
def test_the_real_torch_on_the_cpu():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16, requires_grad=True).permute(0, 2, 3, 1)
    with torch.no_grad():
        assert as_buffer(x, "x")[:-1] == (x.data_ptr(), (2, 4, 5, 3), x.stride(), DataType.BFLOAT16, 1, 0, True)
    with pytest.raises(ArgumentError, match=r"requires a gradient"):
        as_buffer(x, "x")
    detached = x.detach()
    assert as_buffer(Exporter(detached), "x")[:-1] == as_buffer(detached, "x")[:-1]
    with pytest.raises(ArgumentError, match=r"__dlpack__ failed"):
        as_buffer(Exporter(x), "x")
    with pytest.raises(ArgumentError, match=r"failed"):
        as_buffer(torch.zeros(2, 2).to_sparse(), "x")
    with pytest.raises(ArgumentError, match=r"lazily negated"):
        as_buffer(torch.zeros(2, dtype=torch.complex64).conj().imag, "x")


# ---- contiguous memory


def test_as_memory():
    for x, nbytes in (
        (np.zeros(100, np.uint8), 100),
        (np.zeros((3, 4), np.float32), 48),
        (np.zeros((0, 4)), 0),
        (np.array(1.0), 8),
        (bytearray(7), 7),
        (np.zeros((5, 1), "i8")[::1], 40),
    ):
        memory = as_memory(x, "workspace")
        assert (memory.nbytes, memory.device_type, memory.device_id, memory.writable) == (nbytes, 1, 0, True)
        if isinstance(x, np.ndarray):
            assert memory.pointer == x.ctypes.data
    assert as_memory(b"abc", "workspace").writable is False
    assert as_memory(Capsule(code=1, bits=8, dims=(9,), strides=(1,), device=(2, 1)), "workspace")[1:4] == (9, 2, 1)
    assert as_memory(Cai(typestr="|u1", shape=(12,)), "workspace")[:3] == (0x7F0000000100, 12, 2)


def test_as_memory_of_its_own_kind():
    memory = Memory(64, 128, 2, 0, True, None)
    assert as_memory(memory, "workspace") is memory
    buffer = Buffer(64, (2, 3), (3, 1), DataType.FLOAT64, 2, 1, True, None)
    assert as_memory(buffer, "workspace") == Memory(64, 48, 2, 1, True, None)


@pytest.mark.parametrize(
    "x", [np.zeros((4, 4))[:, ::2], np.zeros((4, 4)).T, np.zeros(4)[::-1], np.broadcast_to(1.0, 3)]
)
def test_as_memory_must_be_contiguous(x):
    with pytest.raises(ArgumentError, match=r"workspace: got dims .* allowed: C-contiguous memory"):
        as_memory(x, "workspace")


def test_as_memory_at_null_is_refused():
    with pytest.raises(ArgumentError, match=r"address 0"):
        as_memory(Cai(data=(0, False)), "workspace")
    assert as_memory(Cai(data=(0, False), shape=(0,)), "workspace").nbytes == 0


def test_references_to_objects_are_no_memory():
    """Whatever protocol says that they are there."""
    structure = np.zeros(4, np.dtype([("a", "f4"), ("b", "O")]))
    for x in (structure, memoryview(np.zeros(4, object)), (ctypes.py_object * 4)()):
        with pytest.raises(ArgumentTypeError, match=r"workspace: got .*references to Python objects"):
            as_memory(x, "workspace")


def test_what_jax_traces_is_refused_by_a_sentence():
    """Of the names that JAX's classes have, which is not on every machine."""
    traced = type("DynamicJaxprTracer", (), {"__module__": "jax._src.interpreters.partial_eval", "__dlpack__": None})()
    for call in (
        lambda: as_buffer(traced, "x"),
        lambda: functional.batch_norm_training(traced, None, None),
    ):
        with pytest.raises(ArgumentTypeError, match=r"x: got a DynamicJaxprTracer of JAX, .*outside of jax.jit.*FFI"):
            call()
