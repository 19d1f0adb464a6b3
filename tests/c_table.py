"""Arrays of a framework that says in C, by DLPack's table, what they are and which stream is current."""

import ctypes


class View(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", View), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


FILL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))
STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("managed", ctypes.c_void_p * 3),
        ("view", FILL),
        ("stream", STREAM),
    ]


@FILL
def fill_view(array, out):
    view = out[0]
    view.data, view.byte_offset, view.ndim = array.address, 0, len(array.shape)
    view.device[:] = array.device
    view.code, view.bits, view.lanes = array.dtype
    array.kept = (ctypes.c_int64 * 12)(*array.shape), (ctypes.c_int64 * 12)(*array.steps)
    view.shape, view.strides = array.kept
    return 0


@STREAM
def current(device_type, device_id, out):
    out[0] = 1000 * device_type + device_id
    return 0


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def managed_tensor(array):
    """What DLPack's capsule points to; it lives as long as the array keeps it."""
    managed = Managed()
    tensor = managed.tensor
    tensor.data, tensor.ndim, tensor.device[:] = array.address, len(array.shape), array.device
    tensor.code, tensor.bits, tensor.lanes = array.dtype
    managed.arrays = tuple((ctypes.c_int64 * tensor.ndim)(*values) for values in (array.shape, array.steps))
    tensor.shape, tensor.strides = (ctypes.cast(a, ctypes.POINTER(ctypes.c_int64)) for a in managed.arrays)
    return managed


NAME = b"dlpack_exchange_api"  # a capsule keeps the pointer only


def table_of(fill, stream=None, version=1):
    """A table, which has to outlive its capsule, and the capsule."""
    table = Table((version, 3), None, (None, None, None), fill, STREAM() if stream is None else stream)
    return table, new_capsule(ctypes.addressof(table), NAME, None)


TABLE, CAPSULE = table_of(fill_view, current)


class Exchanging:
    __dlpack_c_exchange_api__ = CAPSULE

    def __init__(self, shape=(2, 3), steps=(3, 1), dtype=(2, 32, 1), device=(1, 0), address=4096):
        self.shape, self.steps, self.dtype, self.device, self.address = shape, steps, dtype, device, address
