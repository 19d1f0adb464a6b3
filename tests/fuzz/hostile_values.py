"""Hostile values: what a caller's mistake, or an object that lies about itself, brings to an argument.

Each is made anew for every try, from the good value in whose place it goes. None of them is an address of memory that
cannot be touched but where it must be refused: a wrong address is the caller's.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import itertools
import math
import re
import struct
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import pybnorm
from pybnorm._arrays import Buffer


class Value(NamedTuple):
    """One kind of hostile value."""

    name: str
    make: Callable[[Any], Any]
    address: bool
    """Whether it can be taken for the address of memory; never given to an argument that is one."""


VALUES: list[Value] = []


def plain(name: str, make: Callable[[], Any], *, address: bool = False) -> None:
    VALUES.append(Value(name, lambda good: make(), address))


def from_array(name: str, make: Callable[[Any], Any]) -> None:
    """Of an argument whose good value is a NumPy array: of another one it is made of zeros."""
    VALUES.append(Value(name, lambda good: make(good if type(good) is np.ndarray else zeros()), False))


def zeros() -> Any:
    return np.zeros((2, 3, 2, 2), np.float32)


# ---------------------------------------------------------------- no array, no number, no text


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def generator() -> Iterator[int]:
    yield from (2, 3, 2, 2)


class Other(enum.IntEnum):
    ONE = 1


MODULES = {n: importlib.import_module(n) for n in ("array", "decimal", "fractions", "pathlib", "types", "uuid")}


def evaluated(texts: str, *, address: bool = False) -> None:
    """Each expression, under its own text."""
    for text in re.split(r" \| |\n", texts.strip()):
        plain(text, lambda text=text: eval(text, globals() | MODULES), address=address)


evaluated("""
None | True | False | np.True_ | np.False_ | ... | NotImplemented | int | object | len | math | uuid.UUID(int=1)
object() | ValueError('x') | lambda *_: 1 | {} | {'a': 1} | {None: object()} | set() | {1, 2} | [] | () | [1.0] | [None]
(0, 0) | (10**400, 1) | (math.nan, math.nan) | ('a', 'b') | nested(2000) | itself() | range(10**15) | slice(None)
itertools.count() | itertools.repeat(1) | itertools.cycle('ab') | map(lambda _: None, itertools.repeat(1))
types.SimpleNamespace() | types.MappingProxyType({'x': 1})
""")
evaluated(
    """
(1, 2) | (1, 1) | (True, False) | (1, object()) | (2, 3, 2, 2) | (2, -3, 2, 2) | (2**31, 3) | (2**62,) * 3 | (2.0, 3.0)
(1,) * 9 | [1] * 100_000 | generator() | range(3)
unittest.mock.MagicMock()
""",  # the last one's __index__ is 1
    address=True,
)


# ---------------------------------------------------------------- numbers

evaluated("""
-1 | 0 | -(2**31) | -(2**63) | -(10**400) | 2**64 | 10**400
0.0 | -0.0 | 0.5 | 1.0 | 1.5 | -1.5 | 5e-324 | 1e-46 | 1e-38 | 3.5e38 | 1e308 | math.nan | math.inf | -math.inf
1j | complex(1, 0) | complex(math.nan, 1) | decimal.Decimal('0.5') | decimal.Decimal('sNaN')
decimal.Decimal('1e999999') | fractions.Fraction(1, 3) | fractions.Fraction(10**400)
np.float16(0.5) | np.float32(0.5) | np.float64(0.5) | np.longdouble(0.5) | np.complex64(0.5) | np.complex128(0.5)
np.longdouble('1e4000') | np.complex64(1 + 5j) | np.float32(np.nan) | np.float64(np.inf) | ml_dtypes.bfloat16(1)
np.int8(-1) | np.datetime64('NaT') | np.timedelta64(1, 's') | np.void(b'1') | np.void(struct.pack('d', 0.5))
type('Float', (float,), {})(0.5) | type('Float', (float,), {'__float__': lambda s: math.nan})(0.5)
ctypes.c_int(1) | ctypes.c_void_p(None)
""")
evaluated(
    """
1 | 2 | 3 | 7 | 64 | 2**31 | 2**53 + 1 | 2**63 | 2**64 - 1 | np.int8(1) | np.uint8(1) | np.int64(1) | np.uint64(1)
type('Int', (int,), {})(1) | type('Int', (int,), {'__eq__': fails, '__hash__': hash_1})(1) | Other.ONE
""",
    address=True,
)

# ---------------------------------------------------------------- text and bytes

for _value in ("", " ", "x", "1", "0.5", "nan", "1e400", "True", "None", "auto", "fast", "plain", "\0", "a\0b",
               "\udcff", "a\udc80b", "\x1b[2J", "é", "\n", "%s%n", "{}", "-1", "a,b,c", "٣"):  # fmt: skip
    plain(f"str {_value!a}", lambda value=_value: value)
plain("10**5 letters", lambda: "x" * 100_000)
evaluated(r"""
b'' | b'1' | b'x' | b'\xff\xfe' | b'\0' | bytearray(b'1') | bytearray(64) | memoryview(b'1') | released()
array.array('f', [0.5] * 24) | array.array('i', [1, 2]) | np.str_('1') | np.bytes_(b'1') | type('Str', (str,), {})('x')
pathlib.Path('nothing-here') | pathlib.Path('\udcff') | pathlib.Path('.')
""")
plain("a str's subclass that has no hash", lambda: type("Str", (str,), {"__hash__": None})("x"))
plain(
    "a str's subclass whose methods fail",
    lambda: type("Str", (str,), dict.fromkeys(("lower", "strip", "split", "encode", "startswith"), fails))("x"),
)


def released() -> memoryview:
    view = memoryview(bytes(96))
    view.release()
    return view


# ---------------------------------------------------------------- arrays


def misaligned(good: Any) -> Any:
    memory = np.zeros(good.nbytes + 1, np.uint8)
    return np.ndarray(good.shape, good.dtype, memory, 1)


def read_only(good: Any) -> Any:
    made = np.ascontiguousarray(good).copy()
    made.flags.writeable = False
    return made


def reversed_(good: Any) -> Any:
    return np.ascontiguousarray(good)[tuple(slice(None, None, -1) for _ in good.shape)]


def overlapping(good: Any) -> Any:
    return np.lib.stride_tricks.as_strided(
        np.zeros(good.size + 8, good.dtype), good.shape, (good.itemsize,) * good.ndim
    )


class Lying(np.ndarray):
    """An array whose attributes are not those of its memory."""

    shape = property(lambda self: (10**6,))
    strides = property(lambda self: (4,))
    dtype = property(lambda self: np.dtype("f4"))
    ndim = property(lambda self: 1)
    size = property(lambda self: 10**6)


class Failing(np.ndarray):
    """An array that fails when it is asked for its shape."""

    @property
    def shape(self) -> Any:
        raise Own("shape")

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise Own("ufunc")

    def __array_function__(self, *_: Any, **__: Any) -> Any:
        raise Own("function")


for _dtype in ("f2", "f8", ">f4", "<i4", "u1", "?", "c8", "O", "S4", "U1", "M8[s]", "V4",
               "longdouble", [("a", "f4"), ("b", "i4")], [("a", "f4")],
               ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4):  # fmt: skip
    from_array(f"an array of {_dtype}", lambda good, dtype=_dtype: np.zeros(good.shape, dtype))
from_array("an array of None", lambda good: np.full(good.shape, None, object))
from_array("a read-only array", read_only)
from_array("an array of no elements", lambda good: np.zeros((0, *good.shape[1:]), good.dtype))
from_array("an array reversed", reversed_)
from_array("an array that overlaps itself", overlapping)
from_array("an array broadcast from one number", lambda good: np.broadcast_to(np.zeros((), good.dtype), good.shape))
from_array("a misaligned array", misaligned)
from_array("an array without axes", lambda good: np.zeros((), good.dtype))
from_array("an array of one element", lambda good: np.zeros((1,), good.dtype))
from_array("an array of nine axes", lambda good: np.zeros(good.shape + (1,) * (9 - good.ndim), good.dtype))
from_array("an array of 32 axes", lambda good: np.zeros((1,) * 32, good.dtype))
from_array("an array too small", lambda good: np.zeros([max(1, d - 1) for d in good.shape], good.dtype))
from_array("an array too large", lambda good: np.zeros([d + 1 for d in good.shape], good.dtype))
from_array("an array transposed", lambda good: np.zeros(good.shape[::-1], good.dtype).T)
from_array(
    "every second element",
    lambda good: np.zeros([2 * d for d in good.shape], good.dtype)[tuple(slice(None, None, 2) for _ in good.shape)],
)
from_array("an array of nan", lambda good: np.full_like(good, np.nan))
from_array("an array of inf", lambda good: np.full_like(good, np.inf))
from_array("an array as a list", lambda good: good.tolist())
from_array("a ragged list", lambda good: [[1.0], [1.0, 2.0]])
from_array("a masked array", lambda good: np.ma.array(np.zeros_like(good), mask=True))
from_array("a matrix", lambda good: np.zeros((2, 3), good.dtype).view(np.matrix))
from_array("an array of a class whose attributes lie", lambda good: np.zeros(good.shape, good.dtype).view(Lying))
from_array("an array of a class that fails", lambda good: np.zeros(good.shape, good.dtype).view(Failing))
plain("np.array(1)", lambda: np.array(1), address=True)
plain("np.array([1])", lambda: np.array([1]), address=True)
from_array("np.array(['x'])", lambda good: np.array(["x"]))
from_array("np.array('x')", lambda good: np.array("x"))
from_array("the array in a list", lambda good: [good])
from_array("the array thrice", lambda good: (good, good, good))
from_array("a memoryview of the array", lambda good: memoryview(np.zeros_like(good)))


def _address(good: Any) -> Any:
    return good.ctypes.data if type(good) is np.ndarray else 2**20


VALUES.append(Value("the array's address", _address, True))


ROOM = 1 << 15
"""Bytes of memory on either side of what a `Buffer` or a DLPack tensor describes. Wider elements, more lanes, other
strides and other dims reach beyond the array: it must still be memory of theirs, since a wrong size is the caller's."""


def lent_with_room(good: Any) -> tuple[Any, Any]:
    """A copy of the array, or where it is none of float32 an array of zeros; and the memory in whose midst it is."""
    given = good if type(good) is np.ndarray and good.dtype == np.float32 else zeros()
    memory = np.zeros(2 * ROOM + given.nbytes + 64, np.uint8)
    start = ROOM + -(memory.ctypes.data + ROOM) % 64
    lent = memory[start : start + given.nbytes].view(np.float32).reshape(given.shape)
    lent[...] = given
    return lent, memory


def buffer(good: Any, **changed: Any) -> Buffer:
    """A `Buffer` of a copy of the array; with fields changed."""
    lent, memory = lent_with_room(good)
    steps = tuple(s // lent.itemsize for s in lent.strides)
    made = Buffer(lent.ctypes.data, lent.shape, steps, pybnorm.DataType.FLOAT32, 1, -1, True, memory)
    return made._replace(**changed)


for _name, _changed in {
    "at NULL": {"pointer": 0},
    "at -8": {"pointer": -8},
    "at 2**64": {"pointer": 2**64},
    "at the end of memory": {"pointer": 2**64 - 8},
    "at None": {"pointer": None},
    "at 1.5": {"pointer": 1.5},
    "at an object": {"pointer": object()},
    "without dims": {"dims": None},
    "of dims that are no numbers": {"dims": ("a", None)},
    "of float dims": {"dims": (2.0, 3.0, 2.0, 2.0)},
    "of negative dims": {"dims": (-2, 3, 2, 2)},
    "of huge dims": {"dims": (2**62, 2**62, 2, 2)},
    "of list dims": {"dims": [2, 3, 2, 2]},
    "of fewer strides": {"strides": (1,)},
    "of strides None": {"strides": None},
    "of huge strides": {"strides": (10**30, 1, 1, 1)},
    "of negative strides": {"strides": (-12, -4, -2, -1)},
    "of no dtype": {"dtype": None},
    "of dtype 'f32'": {"dtype": "f32"},
    "of dtype 99": {"dtype": 99},
    "of NumPy's dtype": {"dtype": np.dtype("f4")},
    "on device type 99": {"device_type": 99},
    "on CUDA": {"device_type": 2},
    "on device type None": {"device_type": None},
    "on device 'x'": {"device_id": "x"},
    "on device 10**30": {"device_id": 10**30},
    "not writable": {"writable": False},
    "writable None": {"writable": None},
}.items():
    VALUES.append(Value(f"a Buffer {_name}", lambda good, changed=_changed: buffer(good, **changed), False))


# ---------------------------------------------------------------- lying protocols


class Own(Exception):
    """What a hostile object raises itself."""


def fails(*_: Any, **__: Any) -> Any:
    raise Own("this object fails on purpose")


def hash_1(_: Any) -> int:
    return 1


def lie(what: str, address: bool = False, /, **methods: Any) -> None:
    """An object with these special methods."""
    plain(f"an object whose {what}", lambda: type("Liar", (), dict(methods))(), address=address)


def changing(*answers: Any) -> Callable[[Any], Any]:
    """Answers in turn, by a state of the object's own."""

    def answer(self: Any, *_: Any) -> Any:
        at = self.__dict__["at"] = self.__dict__.get("at", -1) + 1
        return answers[at % len(answers)]

    return answer


@property  # type: ignore[misc]
def failing(self: Any) -> Any:
    raise Own("this attribute fails on purpose")


for _name in ("__index__", "__int__", "__float__", "__bool__", "__hash__", "__iter__", "__repr__", "__fspath__",
              "__array__", "__buffer__", "__cuda_stream__", "__call__"):  # fmt: skip
    lie(f"{_name} fails", **{_name: fails})
lie("__index__ is no int", __index__=lambda s: "1")
lie("__index__ is 10**400", __index__=lambda s: 10**400)
lie("__index__ is -1", __index__=lambda s: -1)
lie("__index__ changes", True, __index__=changing(1, -1, 2**70, 3))
lie("__float__ is no float", __float__=lambda s: "1")
lie("__float__ is nan", __float__=lambda s: math.nan)
lie("__float__ changes", __float__=changing(0.5, math.nan, -1.0, 1e300))
lie("__complex__ is 1j", __complex__=lambda s: 1j)
lie("__bool__ is no bool", __bool__=lambda s: 2)
lie("__eq__ fails", __eq__=fails, __hash__=hash_1)
lie("__eq__ is always true", __eq__=lambda s, o: True, __hash__=lambda s: hash(1))
lie("__eq__ is an array", __eq__=lambda s, o: np.array([1, 2]), __hash__=lambda s: hash(1))
lie("__hash__ is no int", __hash__=lambda s: "1")
lie("__len__ fails", __len__=fails, __getitem__=lambda s, i: 1)
lie("__len__ is negative", __len__=lambda s: -1, __getitem__=lambda s, i: 1)
lie("__len__ is 2**62", __len__=lambda s: 2**62, __iter__=lambda s: iter((2, 3)), __getitem__=lambda s, i: 1)
lie("__len__ is too small", __len__=lambda s: 1, __iter__=lambda s: iter((2, 3, 2, 2)))
lie("__getitem__ never ends", __getitem__=lambda s, i: 1)
lie("__getitem__ fails", __getitem__=fails, __len__=lambda s: 4)
lie("__iter__ is no iterator", __iter__=lambda s: 1)
lie("__iter__ never ends", __iter__=lambda s: itertools.repeat(2))
lie("__next__ fails", __iter__=lambda s: s, __next__=fails)
lie("__iter__ differs each time", __iter__=changing(iter((2, 3)), iter(("a",)), iter(())))
lie("__repr__ is no str", __repr__=lambda s: 1)
lie("__repr__ has surrogates", __repr__=lambda s: "\udcff\0\x1b[2J")
lie("__repr__ and __str__ and __format__ fail", __repr__=fails, __str__=fails, __format__=fails)
lie("every attribute fails", __getattribute__=fails)
lie("every attribute is itself", __getattr__=lambda s, name: s)
lie("every attribute is None", __getattr__=lambda s, name: None)
lie("every attribute is a method that fails", __getattr__=lambda s, name: fails)
lie("__class__ fails", __class__=failing)
lie("__fspath__ is no path", __fspath__=lambda s: 1)
lie("__fspath__ has a surrogate", __fspath__=lambda s: "\udcff")
lie("__fspath__ has a NUL", __fspath__=lambda s: "a\0b")
lie("__array__ is no array", __array__=lambda s, *_, **__: "x")
lie("__array__ changes", __array__=changing(zeros(), np.zeros(3, np.float32), np.zeros((), object)))
lie("name and isnative lie", name="float32", isnative=True, __name__="float32")
lie("name fails", name=failing)
lie("__cuda_stream__ lies", __cuda_stream__=lambda s: (0, "x"))
lie("cuda_stream lies", cuda_stream="x")
lie("keys fail", keys=fails, __getitem__=fails)
lie(
    "items never end",
    items=lambda s: zip(itertools.count(), itertools.repeat(1)),
    keys=lambda s: itertools.count(),
    __getitem__=lambda s, i: 1,
)


def is_a(kind: type) -> Callable[[], Any]:
    return lambda: type("Liar", (), {"__class__": property(lambda s: kind)})()


for _kind in (np.ndarray, pybnorm.Handle, pybnorm.TensorDescriptor, Buffer, int, float, str, tuple, dict, pybnorm.Mode):
    plain(f"an object whose __class__ is {_kind.__name__}", is_a(_kind))
plain("a mock of an array", lambda: unittest.mock.Mock(spec=np.ndarray))
plain("a mock of a handle", lambda: unittest.mock.Mock(spec=pybnorm.Handle))

_GOOD = {"shape": (2, 3, 2, 2), "typestr": "<f4", "data": (0, False), "version": 3}
for _name, _interface in {
    "fails": fails,
    "is None": None,
    "is a string": "x",
    "is empty": {},
    "is at NULL": _GOOD,
    "is at a string": {**_GOOD, "data": ("x", False)},
    "has no data": {**_GOOD, "data": None},
    "has a data of one": {**_GOOD, "data": (0,)},
    "has data at -1": {**_GOOD, "data": (-1, False)},
    "has no shape": {**_GOOD, "shape": None},
    "has an endless shape": {**_GOOD, "shape": itertools.count()},
    "has a negative shape": {**_GOOD, "shape": (-1, 3, 2, 2)},
    "has a huge shape": {**_GOOD, "shape": (2**62, 2**62)},
    "has a float shape": {**_GOOD, "shape": (2.0, 3.0)},
    "has a strange typestr": {**_GOOD, "typestr": "x"},
    "has no typestr": {**_GOOD, "typestr": None},
    "has a typestr that is no text": {**_GOOD, "typestr": 4},
    "has strides of another length": {**_GOOD, "strides": (1,)},
    "has strides that are no numbers": {**_GOOD, "strides": ("a", None, 1, 1)},
    "has a strange version": {**_GOOD, "version": "x"},
    "has a strange stream": {**_GOOD, "stream": "x"},
    "has an object mask": {**_GOOD, "mask": object()},
    "is a mapping that fails": type("M", (dict,), {"__getitem__": fails, "get": fails})(_GOOD),
}.items():
    _property = failing if _interface is fails else _interface
    lie(f"__cuda_array_interface__ {_name}", __cuda_array_interface__=_property)
    if _name != "is at NULL":  # NumPy itself reads what such an object points to
        lie(f"__array_interface__ {_name}", __array_interface__=_property)


# ---------------------------------------------------------------- DLPack


class Tensor(ctypes.Structure):
    """`DLTensor`, and what makes it a `DLManagedTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    """What stands before the tensor in a `DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
_NAMES = {True: b"dltensor_versioned", False: b"dltensor"}


class Producer:
    """An object that hands out one DLPack structure."""

    def __init__(self, good: Any, version: int, name: bytes | None, fields: dict[str, int], device: Any) -> None:
        lent, memory = lent_with_room(good)
        self.lent, self.device = memory, device
        self.sizes = (ctypes.c_int64 * 8)(*(lent.shape + (1,) * (8 - lent.ndim)))
        tensor = Tensor(lent.ctypes.data, 1, 0, lent.ndim, 2, 32, 1, ctypes.addressof(self.sizes), None, 0, None, None)
        for field, value in fields.items():
            setattr(tensor, field, value)
        self.made = Versioned(version, 0, None, None, 0, tensor) if version else tensor
        self.name = name or _NAMES[version > 0]

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(ctypes.addressof(self.made), self.name, None)

    def __dlpack_device__(self) -> Any:
        return self.device


_TENSORS: dict[str, dict[str, int]] = {
    "as it should be": {},
    "of shape NULL": {"shape": 0},
    "of shape NULL without axes": {"shape": 0, "ndim": 0},
    "at NULL": {"data": 0},
    "at NULL with an offset": {"data": 0, "byte_offset": 64},
    "with an offset of 2**64 - 1": {"byte_offset": 2**64 - 1},
    "with an offset of 1": {"byte_offset": 1},
    "of 2**30 axes": {"ndim": 2**30},
    "of 65 axes": {"ndim": 65},
    "of -1 axes": {"ndim": -1},
    "of 4 lanes": {"lanes": 4},
    "of no lanes": {"lanes": 0},
    "of 7 bits": {"bits": 7},
    "of type 99": {"code": 99},
    "of integers": {"code": 0},
    "of complex numbers": {"code": 5, "bits": 64},
    "on device type 99": {"device_type": 99},
    "on device type -1": {"device_type": -1},
    "on CUDA": {"device_type": 2},
    "on device 7": {"device_id": 7},
}
for _version in (0, 1, 99):
    for _name, _fields in _TENSORS.items():
        VALUES.append(
            Value(
                f"a DLPack tensor {_name}, version {_version}",
                lambda good, version=_version, fields=_fields: Producer(good, version, None, fields, (1, 0)),
                False,
            )
        )
for _name, _word in {"of another name": b"x", "used up": b"used_dltensor"}.items():
    VALUES.append(
        Value(f"a DLPack capsule {_name}", lambda good, word=_word: Producer(good, 0, word, {}, (1, 0)), False)
    )
for _device in (None, (1,), ("x", "y"), (1, 0, 0), 10**30, (10**30, 0), (99, 0), (2, 0), (-1, -1)):
    VALUES.append(
        Value(f"a DLPack tensor of device {_device}", lambda good, d=_device: Producer(good, 0, None, {}, d), False)
    )
lie("__dlpack__ fails", __dlpack__=fails, __dlpack_device__=lambda s: (1, 0))
lie("__dlpack__ is None", __dlpack__=lambda s, **_: None, __dlpack_device__=lambda s: (1, 0))
lie("__dlpack__ is a string", __dlpack__=lambda s, **_: "x", __dlpack_device__=lambda s: (1, 0))
lie("__dlpack__ takes no arguments", __dlpack__=lambda s: None, __dlpack_device__=lambda s: (1, 0))
lie("__dlpack__ is no method", __dlpack__=1, __dlpack_device__=2)
lie("__dlpack_device__ fails", __dlpack__=lambda s, **_: None, __dlpack_device__=fails)
lie("__dlpack__ has no device", __dlpack__=lambda s, **_: None)
plain("a DLPack capsule itself", lambda: np.zeros((2, 3, 2, 2), np.float32).__dlpack__())


# ---------------------------------------------------------------- ours, not as they should be


def closed(make: Callable[[], Any]) -> Any:
    made = make()
    made.close()
    return made


plain("a closed handle", lambda: closed(lambda: pybnorm.Handle("onednn")))
plain("a handle that was not made", lambda: pybnorm.Handle.__new__(pybnorm.Handle))
plain("a descriptor that was not made", lambda: pybnorm.TensorDescriptor.__new__(pybnorm.TensorDescriptor))
plain("a closed descriptor", lambda: closed(lambda: pybnorm.TensorDescriptor("onednn", "f32", (2, 3, 2, 2))))
# no larger than good data, which functions of addresses are given for it
plain("another descriptor", lambda: pybnorm.TensorDescriptor("onednn", "f64", (5, 2)))
plain("a plan that was not made", lambda: pybnorm.ForwardTrainingPlan.__new__(pybnorm.ForwardTrainingPlan))
plain("a plan's base class", lambda: pybnorm.Plan.__new__(pybnorm.Plan))
for _value in (
    *(pybnorm.Mode.PER_ACTIVATION, pybnorm.DataType.FLOAT64, pybnorm.Operation.BACKWARD, pybnorm.Activation.CLAMP),
    *(pybnorm.Layout.STRIDED, pybnorm.Capability.RUNS, pybnorm.Capability(0)),
):
    plain(repr(_value), lambda value=_value: value, address=True)
for _value in (
    np.float32,
    np.int8,
    np.dtype("f8"),
    np.dtype(">f4"),
    np.dtype([("a", "f4")]),
    np.dtype("V4"),
    np.dtype(object),
):
    plain(f"the type {_value!r}", lambda value=_value: value)


# ---------------------------------------------------------------- values of chance


def by_chance(rng: np.random.Generator, good: Any, address: bool) -> Any:
    """A value that no list holds; the same for the same generator."""
    kind = int(rng.integers(3 if address else 8))
    if kind == 0:
        return struct.unpack("d", rng.bytes(8))[0]
    if kind == 1:
        return "".join(map(chr, rng.integers(0, 0x10000, rng.integers(8))))
    if kind == 2:
        return rng.bytes(int(rng.integers(12)))
    if kind == 3:
        return int.from_bytes(rng.bytes(int(rng.integers(12))), "little", signed=True)
    if kind == 4:
        return tuple(by_chance(rng, good, address) for _ in range(rng.integers(5)))
    if kind == 5:
        dims = tuple(int(d) for d in rng.integers(0, 4, rng.integers(6)))
        made = np.zeros(dims, np.dtype("?bBhHiIqQefdgFDGSUVOMm"[int(rng.integers(22))]))
        axes = tuple(slice(None, None, int(rng.choice((-2, -1, 1, 2)))) for _ in dims)
        return made[(..., *axes)].transpose(rng.permutation(len(dims)))
    if kind == 6:
        steps = tuple(int(s) for s in rng.integers(-2, 9, rng.integers(6)))
        dims = tuple(int(d) for d in rng.integers(-1, 4, rng.integers(6)))
        field = ("pointer", "dims", "strides", "dtype", "device_type", "device_id")[int(rng.integers(6))]
        number = int(rng.integers(-9, 1))
        changed = {"dims": dims, "strides": steps, **dict.fromkeys(("pointer", "dtype", "device_id"), number)}
        changed["device_type"] = 11 - number
        return buffer(good, **{field: changed[field]})
    field = ("ndim", "code", "bits", "lanes", "device_type")[int(rng.integers(5))]
    number = int(rng.integers(-(2**31), 2**31)) if field in ("ndim", "device_type") else int(rng.integers(256))
    if field == "ndim" and 0 < number <= 64:  # more axes than sizes were lent
        number = -number
    return Producer(good, int(rng.integers(2)), None, {field: number}, (1, 0))
