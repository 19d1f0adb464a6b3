"""What each protocol says of an array, and what is refused by name."""

import array
import ctypes
import gc
import operator
import re
import sys
from types import ModuleType, SimpleNamespace

import c_table
import ml_dtypes
import numpy as np
import pytest
from tables import table

from pybnorm import functional
from pybnorm._arrays import ROCM, Buffer, Memory, as_buffer, as_memory
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError

DTYPES = {
    np.dtype(np.float32): DataType.FLOAT32,
    np.dtype(np.float64): DataType.FLOAT64,
    np.dtype(np.float16): DataType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): DataType.BFLOAT16,
}
ADDRESS = 0x7F0000000100


class Cai:
    """An object that has `__cuda_array_interface__` only."""

    def __init__(self, **fields):
        said = {"shape": (2, 3, 4), "typestr": "<f4", "data": (ADDRESS, False), "version": 3}
        self.__cuda_array_interface__ = said | fields


class Exporter:
    """An object that has DLPack only: an array's, or an error."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        if isinstance(self.array, Exception):
            raise self.array
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return (1, 0) if isinstance(self.array, Exception) else self.array.__dlpack_device__()


class Property:
    def __init__(self, error):
        self.error = error

    @property
    def __cuda_array_interface__(self):
        raise self.error


class Versioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", c_table.View),
    ]


called_with_address = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


class Capsule:
    """A producer whose every field can be chosen, and that counts how often its tensor is deleted."""

    def __init__(self, versioned=True, dims=(2, 3), strides=(3, 1), code=2, bits=32, lanes=1, device=(1, 0), data=None,
                 byte_offset=0, flags=0, major=1, name=None, old=False):  # fmt: skip
        self.memory = np.zeros(64, np.float64)
        self.arrays = [None if a is None else (ctypes.c_int64 * max(len(a), 1))(*a) for a in (dims, strides)]
        address = self.memory.ctypes.data if data is None else data
        tensor = c_table.View(address, device, len(dims), code, bits, lanes, *self.arrays, byte_offset)
        self.deleted, self.asked, self.old, self.device = 0, [], old, device

        def deleter(_):
            self.deleted += 1

        def destructor(capsule):
            if raw_is_valid(capsule, self.name):  # a consumer would have renamed it
                deleter(capsule)

        self.deleter, self.destructor = called_with_address(deleter), called_with_address(destructor)
        delete = ctypes.cast(self.deleter, ctypes.c_void_p)
        old_style = c_table.Managed(tensor, None, delete)
        self.managed = Versioned((major, 0), None, delete, flags, tensor) if versioned else old_style
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        self.asked.append(kwargs)
        if self.old and set(kwargs) - {"stream"}:
            raise TypeError("unexpected keyword argument 'max_version'")
        destructor = ctypes.cast(self.destructor, ctypes.c_void_p)
        return c_table.new_capsule(ctypes.addressof(self.managed), self.name, destructor)


def returning(answer):
    return SimpleNamespace(__dlpack__=lambda **_: answer, __dlpack_device__=lambda: (1, 0))


# ---- what is refused

RECORDS = np.zeros(4, np.dtype([("a", "f4"), ("b", "i1")]))


def released():
    view = memoryview(bytearray(16)).cast("f")
    view.release()
    return view


def of_type(dtype, made):
    return ArgumentTypeError, rf"^x: got an array of dtype .*{dtype}.*, allowed", made


CAI = r"^x: got .*Cai whose __cuda_array_interface__ failed"
SWAPPED = [np.dtype(dtype).newbyteorder() for dtype in ("f4", "f8", "f2", ml_dtypes.bfloat16)]
OTHERS = ["i4", "u2", "?", "c8", "O", "U3", "f4,i4", ml_dtypes.float8_e4m3fn, "M8[s]", "g"]
REFUSED = [
    *(of_type(re.escape(str(np.dtype(t))), lambda t=t: np.zeros(3, t)) for t in OTHERS),
    *((ArgumentTypeError, rf"^x: got .* {t} .*byte order", lambda t=t: np.zeros(3, t)) for t in SWAPPED),
    (ArgumentTypeError, r"^x: got a masked array", lambda: np.ma.masked_array(np.zeros(3), [True, False, False])),
    (ArgumentError, r"^x: got strides of \(5,\) bytes, allowed: multiples of the 4 byte", lambda: RECORDS["a"]),
    (ArgumentError, r"^x: got address 0x.*aligned to 4 bytes", lambda: np.zeros(17, np.uint8)[1:].view(np.float32)),
    (ArgumentError, r"^x: got builtins.memoryview whose buffer protocol failed: ValueError", released),
    of_type("uint8", lambda: b"abcd"),
    of_type("uint8", lambda: bytearray(4)),
    of_type("int32", lambda: array.array("i", [1])),
    of_type(">f4", lambda: memoryview(np.zeros(2, ">f4"))),
    *(of_type(t.replace("|", r"\|"), lambda t=t: Cai(typestr=t)) for t in (">f4", "<i4", "|u1", "<c8", "|b1", "<V2")),
    (ArgumentError, r"^x: got strides of", lambda: Cai(strides=(49, 16, 4))),
    (ArgumentTypeError, r"^x: .*masked", lambda: Cai(mask=object())),
    *((ArgumentError, CAI, lambda fields=fields: Cai(**fields))
      for fields in (
          {"data": None}, {"shape": 3}, {"shape": "abc"}, {"shape": (2, -3, 4)}, {"shape": (2, 3.0, 4)},
          {"typestr": None}, {"data": ("no", "pointer", 3)}, {"data": ("x", 0)}, {"strides": 4}, {"strides": "abc"},
          {"strides": (16, 4)})),
    (ArgumentError, r"^x: .*address 0", lambda: Cai(data=(0, False))),
    (ArgumentError, r"^x: .*address 0", lambda: Cai(data=(None, False))),
    (ArgumentTypeError, r"^x: got <", lambda: Property(AttributeError("not on this device"))),
    (ArgumentError, r"^x: got .*Property whose .* failed: RuntimeError: requires grad",
     lambda: Property(RuntimeError("requires grad"))),
    of_type("int32", lambda: Capsule(code=0)),
    of_type("uint8", lambda: Capsule(code=1, bits=8)),
    of_type("complex64", lambda: Capsule(code=5, bits=64)),
    of_type("bool8", lambda: Capsule(code=6, bits=8)),
    of_type("float8", lambda: Capsule(bits=8)),
    of_type("float32x4", lambda: Capsule(lanes=4)),
    of_type("code 99 32", lambda: Capsule(code=99)),
    (ArgumentError, r"^x: .*DLPack 2.0", lambda: Capsule(major=2)),
    (ArgumentError, r"^x: .*unused DLPack capsule", lambda: Capsule(name=b"used_dltensor")),
    (ArgumentError, r"^x: .*address 0", lambda: Capsule(data=0)),
    (ArgumentError, r"^x: .*aligned to 4", lambda: Capsule(byte_offset=2)),
    *((ArgumentError, r"^x: .*unused DLPack capsule", lambda answer=answer: returning(answer))
      for answer in (None, 3, "text")),
    *((ArgumentError, r"^x: got .*Exporter whose __dlpack__ failed", lambda error=error: Exporter(error))
      for error in (BufferError("requires a gradient"), RuntimeError("no"), TypeError("no"))),
]  # fmt: skip


@table(("kind", "told", "make"), REFUSED)
def test_what_is_refused(kind, told, make):
    value = make()
    with pytest.raises(kind, match=told) as caught:
        as_buffer(value, "x")
    assert (type(caught.value), caught.value.argument) == (kind, "x")
    assert "failed" not in told or caught.value.__cause__ is not None
    if isinstance(value, Capsule):
        del caught  # its traceback holds the tensor
        assert value.deleted == 1


@table("value", [None, "abc", [1.0, 2.0], (1.0,), 3, 1.5, object(), {"a": 1}, np.float32, ...])
def test_no_array_at_all(value):
    for function in (as_buffer, as_memory):
        with pytest.raises(ArgumentTypeError, match=r"(?s)^dy: got .*allowed: .*DLPack") as caught:
            function(value, "dy")
        assert isinstance(caught.value, TypeError)


@table("field", ["shape", "strides"])
def test_cuda_array_interface_that_never_ends_is_not_taken_in(field):
    numbers = iter([1] * 100_000)
    with pytest.raises(ArgumentError, match=f"{field} of more than 64 axes"):
        as_buffer(Cai(**{field: numbers}), "x")
    assert operator.length_hint(numbers) > 99_000


# ---- NumPy and buffers


@table("dtype", DTYPES)
@table(
    ("index", "strides"),
    [
        ((), (60, 20, 5, 1)),
        ((slice(None), slice(None, None, 2)), (60, 40, 5, 1)),
        ((slice(None), slice(None), slice(None, None, -1)), (60, 20, -5, 1)),
        ((slice(1, 2), slice(2, 3)), (60, 20, 5, 1)),
        ((Ellipsis, slice(None, None, -3)), (60, 20, 5, -3)),
    ],
)
def test_numpy(dtype, index, strides):
    view = np.arange(120).reshape(2, 3, 4, 5).astype(dtype)[index]
    buffer = as_buffer(view, "x")
    assert buffer == Buffer(view.ctypes.data, view.shape, strides, DTYPES[dtype], 1, 0, True, view)
    assert buffer.owner is view
    assert type(buffer.dtype) is DataType
    # The pointer is that of element 0, wherever the strides lead from there.
    last = tuple(n - 1 for n in view.shape)
    offset = sum(i * s for i, s in zip(last, buffer.strides, strict=True))
    for position, where in ((0, (0, 0, 0, 0)), (offset, last)):
        raw = ctypes.string_at(buffer.pointer + position * dtype.itemsize, dtype.itemsize)
        assert raw == view[where].tobytes()


def test_numpy_transposed_broadcast_scalar_empty_and_of_a_subclass():
    x = np.zeros((2, 3, 4), np.float32)
    assert as_buffer(x.transpose(0, 2, 1), "x")[1:3] == ((2, 4, 3), (12, 1, 4))
    wide = np.broadcast_to(np.float32([1, 2, 3]), (5, 3))
    assert as_buffer(wide, "x")[1:3] == ((5, 3), (0, 1))
    assert not as_buffer(wide, "x").writable
    assert as_buffer(np.array(3.0), "x")[1:4] == ((), (), DataType.FLOAT64)
    assert as_buffer(np.zeros((0, 3), np.float16), "x").dims == (0, 3)
    assert as_buffer(RECORDS["a"][:1], "x").dims == (1,)  # along an axis of length 1 nothing is stepped
    sub = x.view(type("Sub", (np.ndarray,), {}))
    assert as_buffer(sub, "x").owner is sub


def test_nothing_is_kept_or_lost():
    x = np.zeros((4, 4), np.float32)
    before = sys.getrefcount(x)
    for _ in range(10):
        as_buffer(x, "x")
        as_buffer(memoryview(x), "x")
        as_buffer(Exporter(x), "x")
        as_memory(x, "x")
    assert sys.getrefcount(x) == before


def test_buffers():
    for code, expected in (("f", DataType.FLOAT32), ("d", DataType.FLOAT64)):
        x = array.array(code, [1, 2, 3])
        assert as_buffer(x, "x")[:-1] == (x.buffer_info()[0], (3,), (1,), expected, 1, 0, True)
    memory = bytearray(64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    grid = memoryview(memory).cast("B").cast("f", (4, 4))
    assert as_buffer(grid, "x")[:-1] == (address, (4, 4), (4, 1), DataType.FLOAT32, 1, 0, True)
    assert as_buffer(memoryview(memory).cast("d")[::2], "x")[:3] == (address, (4,), (2,))
    assert as_buffer(memoryview(memory).cast("d")[::-1], "x")[:3] == (address + 56, (8,), (-1,))
    assert as_buffer(memoryview(memory).cast("f").toreadonly(), "x").writable is False
    assert as_buffer(memoryview(bytes(8)).cast("f"), "x").writable is False
    half = np.zeros((2, 3), np.float16)
    assert as_buffer(memoryview(half), "x")[1:4] == ((2, 3), (3, 1), DataType.FLOAT16)
    matrix = ((ctypes.c_float * 3) * 2)()
    assert as_buffer(matrix, "x")[:4] == (ctypes.addressof(matrix), (2, 3), (3, 1), DataType.FLOAT32)
    assert as_buffer(np.float64(2), "x").dims == ()


def test_a_buffer_stays_exported_as_long_as_its_description_lives():
    memory = bytearray(16)
    buffer = as_buffer(memoryview(memory).cast("f"), "x")
    with pytest.raises(BufferError):
        memory.extend(b"more")
    assert buffer.dims == (4,)
    del buffer
    gc.collect()
    memory.extend(b"more")


# ---- __cuda_array_interface__


def test_cuda_array_interface():
    for typestr, expected in (("<f4", DataType.FLOAT32), ("<f8", DataType.FLOAT64), ("<f2", DataType.FLOAT16)):
        x = Cai(typestr=typestr)
        assert as_buffer(x, "x") == Buffer(ADDRESS, (2, 3, 4), (12, 4, 1), expected, 2, -1, True, x)
    assert as_buffer(Cai(strides=None), "x").strides == (12, 4, 1)
    assert as_buffer(Cai(strides=(48, 4, 12)), "x").strides == (12, 1, 3)
    assert as_buffer(Cai(strides=(-48, 0, 4)), "x").strides == (-12, 0, 1)
    assert as_buffer(Cai(data=(0x100, True)), "x").writable is False
    assert as_buffer(Cai(stream=7, descr=[("", "<f4")], mask=None), "x").writable is True
    assert as_buffer(Cai(shape=()), "x")[1:3] == ((), ())
    assert as_buffer(Cai(shape=(0, 3), data=(0, False)), "x")[:3] == (0, (0, 3), (3, 1))


@table("module", ["hip._util.types", "rocm.bindings.util.types", "hipster.types"])
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
        assert as_buffer(x, "x") == Buffer(ADDRESS, (2, 3, 4), (12, 4, 1), dtype, ROCM, -1, True, x)
    memory = kind(typestr="B", shape=(64,))  # as hipMalloc gives it
    assert as_memory(memory, "workspace") == Memory(ADDRESS, 64, ROCM, -1, True, memory)
    with pytest.raises(ArgumentTypeError, match=r"\|u1"):
        as_buffer(memory, "x")
    with pytest.raises(ArgumentError, match=r"__cuda_array_interface__ failed: TypeError"):
        as_buffer(kind(typestr="no type"), "x")


def test_hip_pythons_own_array():
    pytest.importorskip("hip")
    from hip import _util  # no module in version 10, but an attribute

    x = _util.types.DeviceArray(ADDRESS).configure(typestr="float32", shape=(2, 3), itemsize=4, _force=True)
    assert as_buffer(x, "x") == Buffer(ADDRESS, (2, 3), (3, 1), DataType.FLOAT32, ROCM, -1, True, x)


def test_what_the_interface_lacks_comes_by_dlpack():
    """The device, and bfloat16."""
    x = Cai()
    x.__dlpack_device__ = lambda: (13, 3)
    x.__dlpack__ = lambda **_: pytest.fail("not needed")
    assert as_buffer(x, "x")[4:6] == (13, 3)
    x, capsule = Cai(typestr="<V2"), Capsule(code=4, bits=16, device=(2, 1))
    x.__dlpack_device__, x.__dlpack__ = capsule.__dlpack_device__, capsule.__dlpack__
    assert as_buffer(x, "x")[3:6] == (DataType.BFLOAT16, 2, 1)


# ---- DLPack


@pytest.mark.xfail(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy before 2.1 exports no read-only array")
def test_dlpack_honours_read_only():
    x = np.zeros(3, np.float32)
    x.flags.writeable = False
    assert as_buffer(Exporter(x), "x").writable is False
    assert as_buffer(Capsule(flags=1), "x").writable is False
    assert as_buffer(Capsule(flags=2), "x").writable is False  # what is written to a copy is lost
    assert as_buffer(Capsule(flags=4), "x").writable is True
    assert as_buffer(Capsule(versioned=False), "x").writable is True


@table("versioned", [True, False])
@table(("code", "bits", "name"), [(2, 32, "float32"), (2, 64, "float64"), (2, 16, "float16"), (4, 16, "bfloat16")])
def test_dlpack(versioned, code, bits, name):
    """Its fields, and that its tensor is deleted once, and not before its description."""
    producer = Capsule(versioned=versioned, code=code, bits=bits, strides=(8, 2), byte_offset=16, device=(10, 5))
    buffer = as_buffer(producer, "x")
    assert buffer[:-1] == (producer.memory.ctypes.data + 16, (2, 3), (8, 2), DTYPES[np.dtype(name)], 10, 5, True)
    assert producer.deleted == 0
    del buffer
    assert producer.deleted == 1


def test_dlpack_of_numpy_and_without_strides():
    for dtype in (np.float32, np.float64, np.float16):
        x = np.zeros((2, 3, 4), dtype)[:, ::2]
        assert as_buffer(Exporter(x), "x")[:-1] == as_buffer(x, "x")[:-1]
    assert as_buffer(Capsule(dims=(2, 3, 4), strides=None), "x").strides == (12, 4, 1)
    assert as_buffer(Capsule(dims=(2, 0, 4), strides=None), "x").strides == (4, 4, 1)
    for strides in (None, ()):
        assert as_buffer(Capsule(dims=(), strides=strides), "x")[1:3] == ((), ())


def test_dlpack_is_asked_without_a_copy_and_without_synchronisation():
    """Old producers do not take all keywords."""
    for device, stream in (((1, 0), {}), ((2, 0), {"stream": -1}), ((10, 0), {"stream": -1})):
        producer, old = Capsule(device=device), Capsule(old=True, versioned=False, device=device)
        assert as_buffer(producer, "x").device_type == as_buffer(old, "x").device_type == device[0]
        assert producer.asked == [{"max_version": (1, 1), "copy": False, **stream}]
        assert old.asked[1:] == [stream]


# ---- PyTorch, by its attributes


class Tensor:
    """What is used of torch.Tensor."""

    def __init__(self, device="cpu", index=None, dtype="float32", neg=False):
        self.device = SimpleNamespace(type=device, index=index)
        self.dtype, self.shape, self.neg = f"torch.{dtype}", (2, 3), neg

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


class Sparse(Tensor):
    def data_ptr(self):
        raise RuntimeError("no storage")


def test_torch(monkeypatch):
    torch = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)  # being imported, as yet without names
    assert as_buffer(Capsule(), "x").dims == (2, 3)
    torch.Tensor, torch.version = Tensor, SimpleNamespace(hip=None)
    for dtype, expected in DTYPES.items():
        x = Tensor(dtype=dtype.name)
        assert as_buffer(x, "x") == Buffer(0x1000, (2, 3), (1, 2), expected, 1, 0, True, x)
    assert as_buffer(Tensor("cuda", 3), "x")[4:6] == (2, 3)
    torch.version.hip = "6.4.1"  # a ROCm build says cuda too
    assert as_buffer(Tensor("cuda", 3), "x")[4:6] == (10, 3)
    for x, told in (
        (Tensor("meta"), r"x: got a tensor on .*meta"),
        (Tensor(dtype="int64"), r"dtype torch.int64"),
        (Tensor(neg=True), r"lazily negated"),
        (Sparse(), r"x: got .*Sparse whose PyTorch's tensor attributes failed: .*no storage"),
    ):
        with pytest.raises(ArgumentTypeError if "dtype" in told else ArgumentError, match=told):
            as_buffer(x, "x")


@pytest.mark.filterwarnings("default")
def test_the_real_torch_on_the_cpu():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16, requires_grad=True).permute(0, 2, 3, 1)
    with torch.no_grad():
        assert as_buffer(x, "x")[:-1] == (x.data_ptr(), (2, 4, 5, 3), x.stride(), DataType.BFLOAT16, 1, 0, True)
    detached = x.detach()
    assert as_buffer(Exporter(detached), "x")[:-1] == as_buffer(detached, "x")[:-1]
    for refused, told in (
        (x, r"requires a gradient"),
        (Exporter(x), r"__dlpack__ failed"),
        (torch.zeros(2, 2).to_sparse(), r"failed"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, r"lazily negated"),
    ):
        with pytest.raises(ArgumentError, match=told):
            as_buffer(refused, "x")


def test_what_jax_traces_is_refused_by_a_sentence():
    """Of the names that JAX's classes have, which is not on every machine."""
    traced = type("DynamicJaxprTracer", (), {"__module__": "jax._src.interpreters.partial_eval", "__dlpack__": None})()
    for call in (lambda: as_buffer(traced, "x"), lambda: functional.batch_norm_training(traced, None, None)):
        with pytest.raises(ArgumentTypeError, match=r"x: got a DynamicJaxprTracer of JAX, .*outside of jax.jit.*FFI"):
            call()


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
    assert as_memory(Cai(typestr="|u1", shape=(12,)), "workspace")[:3] == (ADDRESS, 12, 2)
    assert as_memory(Cai(data=(0, False), shape=(0,)), "workspace").nbytes == 0
    memory = Memory(64, 128, 2, 0, True, None)
    assert as_memory(memory, "workspace") is memory
    buffer = Buffer(64, (2, 3), (3, 1), DataType.FLOAT64, 2, 1, True, None)
    assert as_memory(buffer, "workspace") == Memory(64, 48, 2, 1, True, None)


CONTIGUOUS = r"workspace: got dims .* allowed: C-contiguous memory"
REFERENCES = r"workspace: got .*references to Python objects"  # whatever protocol says that they are there


@table(
    ("kind", "told", "x"),
    [
        (ArgumentError, CONTIGUOUS, np.zeros((4, 4))[:, ::2]),
        (ArgumentError, CONTIGUOUS, np.zeros((4, 4)).T),
        (ArgumentError, CONTIGUOUS, np.zeros(4)[::-1]),
        (ArgumentError, CONTIGUOUS, np.broadcast_to(1.0, 3)),
        (ArgumentError, r"workspace: .*address 0", Cai(data=(0, False))),
        (ArgumentTypeError, REFERENCES, np.zeros(4, np.dtype([("a", "f4"), ("b", "O")]))),
        (ArgumentTypeError, REFERENCES, memoryview(np.zeros(4, object))),
        (ArgumentTypeError, REFERENCES, (ctypes.py_object * 4)()),
    ],
)
def test_what_is_no_memory(kind, told, x):
    with pytest.raises(kind, match=told):
        as_memory(x, "workspace")
