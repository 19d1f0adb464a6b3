"""Hostile values: what a caller's mistake, or an object that lies about itself, brings to an argument.

Each is made anew for every try, from the good value in whose place it goes; its name is the expression that makes it.
None of them is an address of memory that cannot be touched but where it must be refused: a wrong address is the
caller's.
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import pybnorm
from pybnorm._arrays import Buffer


class Value(NamedTuple):
    """One kind of hostile value."""

    name: str
    make: Callable[[Any], Any]
    address: bool = False
    """Whether it can be taken for the address of memory; never given to an argument that is one."""


VALUES: list[Value] = []


def each(texts):
    """The expressions of a text, which " | " or a new line parts."""
    return re.split(r" \| |\n", texts.strip())


NAMES = "array | decimal | fractions | itertools | math | ml_dtypes | pathlib | struct | types | unittest.mock | uuid"
MODULES = {name.rpartition(".")[2]: importlib.import_module(name) for name in each(NAMES)}


def value(text, form="{}", address=False):
    """What an expression makes, of `good`: an array of zeros where the good value is none of NumPy's."""
    code = compile(form.format(text), text, "eval")

    def make(good):
        return eval(code, globals() | MODULES, {"good": good if type(good) is np.ndarray else zeros()})

    return Value(form.format(text) if form != "{}" else text, make, address)


def values(texts, form="{}", address=False):
    """One value for each expression, put into the form."""
    VALUES.extend(value(text, form, address) for text in each(texts))


def zeros():
    return np.zeros((2, 3, 2, 2), np.float32)


# ---------------------------------------------------------------- no array, no number, no text


def nested(depth):
    made = []
    for _ in range(depth):
        made = [made]
    return made


def itself():
    made = []
    made.append(made)
    return made


def generator():
    yield from (2, 3, 2, 2)


class Other(enum.IntEnum):
    ONE = 1


class Own(Exception):
    """What a hostile object raises itself."""


def fails(*_, **__):
    raise Own("this object fails on purpose")


failing = property(fails)
hash_1 = lambda _: 1  # noqa: E731

values("""
None | True | False | np.True_ | np.False_ | ... | NotImplemented | int | object | len | math | uuid.UUID(int=1)
object() | ValueError('x') | lambda *_: 1 | {} | {'a': 1} | {None: object()} | set() | {1, 2} | [] | () | [1.0] | [None]
(0, 0) | (10**400, 1) | (math.nan, math.nan) | ('a', 'b') | nested(2000) | itself() | range(10**15) | slice(None)
itertools.count() | itertools.repeat(1) | itertools.cycle('ab') | map(lambda _: None, itertools.repeat(1))
types.SimpleNamespace() | types.MappingProxyType({'x': 1})
""")
values(
    """
(1, 2) | (1, 1) | (True, False) | (1, object()) | (2, 3, 2, 2) | (2, -3, 2, 2) | (2**31, 3) | (2**62,) * 3 | (2.0, 3.0)
(1,) * 9 | [1] * 100_000 | generator() | range(3)
mock.MagicMock()
""",  # the last one's __index__ is 1
    address=True,
)

# ---------------------------------------------------------------- numbers

values("""
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
values(
    """
1 | 2 | 3 | 7 | 64 | 2**31 | 2**53 + 1 | 2**63 | 2**64 - 1 | np.int8(1) | np.uint8(1) | np.int64(1) | np.uint64(1)
type('Int', (int,), {})(1) | type('Int', (int,), {'__eq__': fails, '__hash__': hash_1})(1) | Other.ONE
""",
    address=True,
)

# ---------------------------------------------------------------- text and bytes

VALUES.extend(
    value(repr(text))
    for text in ("", " ", "x", "1", "0.5", "nan", "1e400", "True", "None", "auto", "fast", "plain", "\0", "a\0b",
                 "\udcff", "a\udc80b", "\x1b[2J", "é", "\n", "%s%n", "{}", "-1", "a,b,c", "٣")
)  # fmt: skip
values(r"""
'x' * 100_000 | b'' | b'1' | b'x' | b'\xff\xfe' | b'\0' | bytearray(b'1') | bytearray(64) | memoryview(b'1')
released() | np.str_('1') | np.bytes_(b'1') | type('Str', (str,), {})('x')
type('Str', (str,), {'__hash__': None})('x')
array.array('f', [0.5] * 24) | array.array('i', [1, 2])
type('Str', (str,), dict.fromkeys(('lower', 'strip', 'split', 'encode', 'startswith'), fails))('x')
pathlib.Path('nothing-here') | pathlib.Path('\udcff') | pathlib.Path('.')
""")


def released():
    view = memoryview(bytes(96))
    view.release()
    return view


# ---------------------------------------------------------------- arrays


def read_only(good):
    made = np.ascontiguousarray(good).copy()
    made.flags.writeable = False
    return made


def stepped(array, step):
    return array[tuple(slice(None, None, step) for _ in array.shape)]


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
    def shape(self):
        raise Own("shape")

    def __array_ufunc__(self, *_, **__):
        raise Own("ufunc")

    def __array_function__(self, *_, **__):
        raise Own("function")


values(
    "'f2' | 'f8' | '>f4' | '<i4' | 'u1' | '?' | 'c8' | 'O' | 'S4' | 'U1' | 'M8[s]' | 'V4' | 'longdouble'\n"
    "[('a', 'f4'), ('b', 'i4')] | [('a', 'f4')] | ml_dtypes.bfloat16 | ml_dtypes.float8_e5m2 | ml_dtypes.int4",
    "np.zeros(good.shape, {})",
)
values(
    "(0, *good.shape[1:]) | () | (1,) | good.shape + (1,) * (9 - good.ndim) | (1,) * 32\n"
    "[max(1, d - 1) for d in good.shape] | [d + 1 for d in good.shape]",
    "np.zeros({}, good.dtype)",
)
values("""
np.full(good.shape, None, object) | read_only(good) | stepped(np.ascontiguousarray(good), -1)
np.broadcast_to(np.zeros((), good.dtype), good.shape) | np.zeros(good.shape[::-1], good.dtype).T
np.lib.stride_tricks.as_strided(np.zeros(good.size + 8, good.dtype), good.shape, (good.itemsize,) * good.ndim)
np.ndarray(good.shape, good.dtype, np.zeros(good.nbytes + 1, np.uint8), 1)
stepped(np.zeros([2 * d for d in good.shape], good.dtype), 2) | np.full_like(good, np.nan) | np.full_like(good, np.inf)
good.tolist() | [[1.0], [1.0, 2.0]] | np.ma.array(np.zeros_like(good), mask=True)
np.zeros((2, 3), good.dtype).view(np.matrix) | np.zeros(good.shape, good.dtype).view(Lying)
np.zeros(good.shape, good.dtype).view(Failing) | np.array(['x']) | np.array('x') | [good] | (good, good, good)
memoryview(np.zeros_like(good))
""")
values("np.array(1) | np.array([1]) | good.ctypes.data", address=True)


ROOM = 1 << 15
"""Bytes of memory on either side of what a `Buffer` or a DLPack tensor describes. Wider elements, more lanes, other
strides and other dims reach beyond the array: it must still be memory of theirs, since a wrong size is the caller's."""


def lent_with_room(good):
    """A copy of the array, or where it is none of float32 an array of zeros; and the memory in whose midst it is."""
    given = good if good.dtype == np.float32 else zeros()
    memory = np.zeros(2 * ROOM + given.nbytes + 64, np.uint8)
    start = ROOM + -(memory.ctypes.data + ROOM) % 64
    lent = memory[start : start + given.nbytes].view(np.float32).reshape(given.shape)
    lent[...] = given
    return lent, memory


def buffer(good, **changed):
    """A `Buffer` of a copy of the array; with fields changed."""
    lent, memory = lent_with_room(good)
    steps = tuple(s // lent.itemsize for s in lent.strides)
    made = Buffer(lent.ctypes.data, lent.shape, steps, pybnorm.DataType.FLOAT32, 1, -1, True, memory)
    return made._replace(**changed)


values(
    """
pointer=0 | pointer=-8 | pointer=2**64 | pointer=2**64 - 8 | pointer=None | pointer=1.5 | pointer=object()
pointer='1' | dims=None | dims=5 | dims=(2, 3) | dims=('a', None) | dims=('a', 3, 4, 4) | dims=(2.0, 3.0, 2.0, 2.0)
dims=(-2, 3, 2, 2) | dims=(2**62, 2**62, 2, 2) | dims=[2, 3, 2, 2] | strides=(1,) | strides=None
strides=(1, True, 1, 1) | strides=(10**30, 1, 1, 1) | strides=(-12, -4, -2, -1)
dtype=None | dtype='f32' | dtype=99 | dtype=np.dtype('f4') | device_type=99 | device_type=2 | device_type=None
device_type=[] | device_id='x' | device_id=None | device_id=10**30 | writable=False | writable=None
""",
    "buffer(good, {})",
)

# ---------------------------------------------------------------- lying protocols


def liar(**methods):
    """An object with these special methods."""
    return type("Liar", (), methods)()


def changing(*answers):
    """Answers in turn, by a state of the object's own."""

    def answer(self, *_):
        at = self.__dict__["at"] = self.__dict__.get("at", -1) + 1
        return answers[at % len(answers)]

    return answer


values(
    "__index__ | __int__ | __float__ | __bool__ | __hash__ | __iter__ | __repr__ | __fspath__ | __array__\n"
    "__buffer__ | __cuda_stream__ | __call__ | __getattribute__",
    "liar({}=fails)",
)
values(
    """
__index__=lambda s: '1' | __index__=lambda s: 10**400 | __index__=lambda s: -1 | __float__=lambda s: '1'
__float__=lambda s: math.nan | __float__=changing(0.5, math.nan, -1.0, 1e300) | __complex__=lambda s: 1j
__bool__=lambda s: 2 | __eq__=fails, __hash__=hash_1 | __eq__=lambda s, o: True, __hash__=hash_1
__eq__=lambda s, o: np.array([1, 2]), __hash__=hash_1 | __hash__=lambda s: '1'
__len__=fails, __getitem__=lambda s, i: 1 | __len__=lambda s: -1, __getitem__=lambda s, i: 1
__len__=lambda s: 2**62, __iter__=lambda s: iter((2, 3)), __getitem__=lambda s, i: 1
__len__=lambda s: 1, __iter__=lambda s: iter((2, 3, 2, 2)) | __getitem__=lambda s, i: 1
__getitem__=fails, __len__=lambda s: 4 | __iter__=lambda s: 1 | __iter__=lambda s: itertools.repeat(2)
__iter__=lambda s: s, __next__=fails | __iter__=changing(iter((2, 3)), iter(('a',)), iter(()))
__repr__=lambda s: 1 | __repr__=lambda s: '\\udcff\\0\\x1b[2J' | __repr__=fails, __str__=fails, __format__=fails
__getattr__=lambda s, name: s | __getattr__=lambda s, name: None | __getattr__=lambda s, name: fails
__class__=failing | __fspath__=lambda s: 1 | __fspath__=lambda s: '\\udcff' | __fspath__=lambda s: 'a\\0b'
__array__=lambda s, *_, **__: 'x' | __array__=changing(zeros(), np.zeros(3, np.float32), np.zeros((), object))
name='float32', isnative=True, __name__='float32' | name=failing | __cuda_stream__=lambda s: (0, 'x')
__cuda_stream__=(0,) | cuda_stream='x' | keys=fails, __getitem__=fails
items=lambda s: zip(itertools.count(), itertools.repeat(1)), keys=lambda s: itertools.count(), __getitem__=hash_1
""",
    "liar({})",
)
values("liar(__index__=changing(1, -1, 2**70, 3))", address=True)
values(
    "np.ndarray | pybnorm.Handle | pybnorm.TensorDescriptor | Buffer | int | float | str | tuple | dict | pybnorm.Mode",
    "liar(__class__=property(lambda s: {}))",
)
values("np.ndarray | pybnorm.Handle", "mock.Mock(spec={})")

_GOOD = {"shape": (2, 3, 2, 2), "typestr": "<f4", "data": (0, False), "version": 3}
for _text in each("""
failing | None | 'x' | {} | {**_GOOD, 'data': ('x', False)} | {**_GOOD, 'data': None} | {**_GOOD, 'data': (0,)}
{**_GOOD, 'data': (-1, False)} | {**_GOOD, 'shape': None} | {**_GOOD, 'shape': itertools.count()}
{**_GOOD, 'shape': (-1, 3, 2, 2)} | {**_GOOD, 'shape': (2**62, 2**62)} | {**_GOOD, 'shape': (2.0, 3.0)}
{**_GOOD, 'typestr': 'x'} | {**_GOOD, 'typestr': None} | {**_GOOD, 'typestr': 4} | {**_GOOD, 'strides': (1,)}
{**_GOOD, 'strides': ('a', None, 1, 1)} | {**_GOOD, 'version': 'x'} | {**_GOOD, 'stream': 'x'}
{**_GOOD, 'mask': object()} | type('M', (dict,), {'__getitem__': fails, 'get': fails})(_GOOD)
"""):
    values(
        "__cuda_array_interface__ | __array_interface__", f"liar({{}}={_text.replace('{', '{{').replace('}', '}}')})"
    )
values("liar(__cuda_array_interface__=_GOOD)")  # of the other, at NULL, NumPy itself reads what it points to

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


class Producer:
    """An object that hands out one DLPack structure."""

    def __init__(self, good, version=0, name=None, told=(1, 0), **fields):
        lent, memory = lent_with_room(good)
        self.lent, self.told = memory, told
        self.sizes = (ctypes.c_int64 * 8)(*(lent.shape + (1,) * (8 - lent.ndim)))
        tensor = Tensor(lent.ctypes.data, 1, 0, lent.ndim, 2, 32, 1, ctypes.addressof(self.sizes), None, 0, None, None)
        for field, content in fields.items():
            setattr(tensor, field, content)
        self.made = Versioned(version, 0, None, None, 0, tensor) if version else tensor
        self.name = name or (b"dltensor_versioned" if version else b"dltensor")

    def __dlpack__(self, **_):
        return _capsule(ctypes.addressof(self.made), self.name, None)

    def __dlpack_device__(self):
        return self.told


TENSORS = """
lanes=1 | shape=0 | shape=0, ndim=0 | data=0 | data=0, byte_offset=64 | byte_offset=2**64 - 1 | byte_offset=1
ndim=2**30 | ndim=65 | ndim=-1 | lanes=4 | lanes=0 | bits=7 | code=99 | code=0 | code=5, bits=64
device_type=99 | device_type=-1 | device_type=2 | device_id=7
"""  # the first is as it should be
for _version in (0, 1, 99):
    values(TENSORS, f"Producer(good, {_version}, {{}})")
values(
    """
name=b'x' | name=b'used_dltensor' | told=None | told=(1,) | told=('x', 'y') | told=(1, 0, 0) | told=10**30
told=(10**30, 0) | told=(99, 0) | told=(2, 0) | told=(-1, -1)
""",
    "Producer(good, {})",
)
values(
    """
__dlpack__=fails, __dlpack_device__=lambda s: (1, 0)
__dlpack__=lambda s, **_: None, __dlpack_device__=lambda s: (1, 0)
__dlpack__=lambda s, **_: 'x', __dlpack_device__=lambda s: (1, 0) | __dlpack__=1, __dlpack_device__=2
__dlpack__=lambda s: None, __dlpack_device__=lambda s: (1, 0) | __dlpack__=lambda s, **_: None, __dlpack_device__=fails
__dlpack__=lambda s, **_: None
""",
    "liar({})",
)
values("zeros().__dlpack__()")

# ---------------------------------------------------------------- ours, not as they should be


def closed(made):
    made.close()
    return made


# Another descriptor is no larger than good data, which functions of addresses are given for it.
values("""
closed(pybnorm.Handle('onednn')) | closed(pybnorm.TensorDescriptor('onednn', 'f32', (2, 3, 2, 2)))
pybnorm.TensorDescriptor('onednn', 'f64', (5, 2))
np.float32 | np.int8 | np.dtype('f8') | np.dtype('>f4') | np.dtype([('a', 'f4')]) | np.dtype('V4') | np.dtype(object)
""")
UNMADE = "pybnorm.Handle | pybnorm.TensorDescriptor | pybnorm.ForwardTrainingPlan | pybnorm.Plan"
values(UNMADE, "{0}.__new__({0})")
values(
    "Mode.PER_ACTIVATION | DataType.FLOAT64 | Operation.BACKWARD | Activation.CLAMP | Layout.STRIDED \n"
    "Capability.RUNS | Capability(0)",
    "pybnorm.{}",
    address=True,
)
