# cython: language_level=3, freethreading_compatible=True, embedsignature=True, embedsignature.format=python
"""Handles, tensor descriptors and the batch-norm calls of the vendor libraries.

The only compiled module. It sees ``include/pybnorm/shim.h``, never a vendor header. A call validates once
(`pybnorm._arguments`), releases the GIL, goes through the backend's table of functions and raises only if the
status is not 0. Nothing on that path prints, synchronises or allocates device memory.
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.math cimport copysign
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() nogil

from pybnorm._shim cimport (
    PBN_ACTIVATION_NONE,
    PBN_CLASS_ALLOCATION,
    PBN_CLASS_BAD_PARAMETER,
    PBN_CLASS_EXECUTION,
    PBN_CLASS_NOT_INITIALIZED,
    PBN_CLASS_NOT_SUPPORTED,
    PBN_CLASS_VERSION,
    PBN_E_ARGUMENT,
    PBN_E_DEVICE,
    PBN_E_INTERNAL,
    PBN_E_LIBRARY,
    PBN_E_MEMORY,
    PBN_E_NOT_LOADED,
    PBN_E_SYMBOL,
    PBN_E_UNSUPPORTED,
    PBN_E_VERSION,
    PBN_E_WORKSPACE,
    PBN_FORK_BEFORE,
    PBN_FORK_CHILD,
    PBN_MAX_RANK,
    PBN_OP_AXPBY,
    PBN_OP_BACKWARD,
    PBN_OP_DERIVE,
    PBN_OP_FILL,
    PBN_OP_FORWARD_INFERENCE,
    PBN_OP_FORWARD_TRAINING,
    PBN_OP_RELU,
    PBN_OP_RELU_BACKWARD,
    PBN_SPATIAL,
    PBN_TEXT_MAX,
    pbn_backend,
    pbn_call,
    pbn_handle,
    pbn_library,
    pbn_plan,
    pbn_tensor,
)

import atexit
import collections
import os
import sys
import threading
import warnings
import weakref

from pybnorm import _arguments, _arrays, _find, errors
from pybnorm.enums import Activation, Capability, DataType, Layout, Mode, Operation

cdef extern from *:
    """
    #include "pybnorm/shim.h"
    #define PBN_ADDRESS(name) &pbn_backend_##name,
    static const pbn_backend *const pbn_backends[] = { PBN_BACKENDS(PBN_ADDRESS) };
    enum { PBN_BACKEND_COUNT = sizeof pbn_backends / sizeof pbn_backends[0] };
    """
    const pbn_backend *pbn_backends[]
    enum:
        PBN_BACKEND_COUNT

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **pointer, size_t alignment, size_t size)

__all__ = [
    "BackwardPlan",
    "CallList",
    "ForwardInferencePlan",
    "ForwardTrainingPlan",
    "Handle",
    "Library",
    "Plan",
    "TensorDescriptor",
    "algorithms",
    "axpby",
    "backends",
    "batch_normalization_backward",
    "batch_normalization_forward_inference",
    "batch_normalization_forward_training",
    "capability",
    "current_stream",
    "derive_bn_tensor_descriptor",
    "fill",
    "has_symbol",
    "load",
    "loaded",
    "numbered_algorithms",
    "relu",
    "relu_backward",
    "signature",
]

cdef object _load_lock = threading.RLock()  # a signal handler may come here while its thread is here
cdef set _loading = set()  # backends
cdef dict _libraries = {}  # backend name -> Library; written under _load_lock, never removed
cdef dict _OWN_STATUS = {
    PBN_E_UNSUPPORTED: "PBN_E_UNSUPPORTED",
    PBN_E_NOT_LOADED: "PBN_E_NOT_LOADED",
    PBN_E_SYMBOL: "PBN_E_SYMBOL",
    PBN_E_LIBRARY: "PBN_E_LIBRARY",
    PBN_E_VERSION: "PBN_E_VERSION",
    PBN_E_ARGUMENT: "PBN_E_ARGUMENT",
    PBN_E_WORKSPACE: "PBN_E_WORKSPACE",
    PBN_E_MEMORY: "PBN_E_MEMORY",
    PBN_E_INTERNAL: "PBN_E_INTERNAL",
    PBN_E_DEVICE: "PBN_E_DEVICE",
}
cdef dict _VENDOR_CLASSES = {
    PBN_CLASS_BAD_PARAMETER: errors.BadParameterError,
    PBN_CLASS_NOT_SUPPORTED: errors.NotSupportedError,
    PBN_CLASS_ALLOCATION: errors.AllocationError,
    PBN_CLASS_NOT_INITIALIZED: errors.NotInitializedError,
    PBN_CLASS_EXECUTION: errors.ExecutionError,
    PBN_CLASS_VERSION: errors.VersionMismatchError,
}
# DLPack device types whose memory a backend's calls can reach, by the backend's own type.
cdef dict _REACHABLE = {
    1: frozenset({1, 3, 11}),  # CPU: also CUDA's and ROCm's pinned host memory
    2: frozenset({2, 13}),     # CUDA: also managed memory
    10: frozenset({10}),       # ROCm
}
cdef dict _DEVICE_NAMES = {
    1: "CPU",
    2: "CUDA",
    3: "CUDA pinned host",
    10: "ROCm",
    11: "ROCm pinned host",
    13: "CUDA managed",
}
cdef Py_ssize_t _DESCRIPTOR_CACHE = 64
cdef Py_ssize_t _PLAN_CACHE = 256  # more than the kinds of call of a large network
cdef size_t _WORKSPACE_ALIGNMENT = 64
cdef int _forks = 0  # how many lie between the process that loaded this module and this one
cdef bint _exiting = False


# ---------------------------------------------------------------- libraries

class Library(collections.namedtuple("Library", "backend label version path found_via attempts device_type")):
    """A loaded vendor library.

    Attributes
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``.
    label : str
        The vendor's spelling of it.
    version : tuple of int
        (major, minor, patch) as the running library reports it.
    path : str
        Resolved path of the file that is mapped.
    found_via : str
        The step of the search that found it.
    attempts : tuple of (str, str, str)
        Steps that failed before, as (how, file, why).
    device_type : int
        DLPack device type of the memory its calls take.
    """

    __slots__ = ()


cdef const pbn_backend *_table(object backend) except NULL:
    cdef int i
    cdef bytes name
    if isinstance(backend, str):
        name = (<str>backend).encode("utf-8", "surrogatepass")
        for i in range(PBN_BACKEND_COUNT):
            if name == pbn_backends[i].name:
                return pbn_backends[i]
    kind = errors.ArgumentError if isinstance(backend, str) else errors.ArgumentTypeError
    raise kind("backend", backend, "one of " + ", ".join(map(repr, backends())))


def backends():
    """Names of all backends this build knows, loaded or not.

    Returns
    -------
    tuple of str
    """
    return tuple(pbn_backends[i].name.decode() for i in range(PBN_BACKEND_COUNT))


def loaded(backend):
    """The backend's `Library` if it has been loaded by this process, else ``None``."""
    _table(backend)
    return _libraries.get(backend)


def load(backend, path=None):
    """Load a backend's vendor library, once per process.

    Called by itself the first time a backend is used. A failure is not remembered: the next call searches again. What a
    library prints to standard output while it is loaded goes to standard error.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``.
    path : str or os.PathLike, optional
        The file to load. Without it ``PYBNORM_LIB_<BACKEND>`` and then the search of `pybnorm._find` decide.

    Returns
    -------
    Library

    Raises
    ------
    LibraryNotFoundError
        No step found one; the message lists all of them.
    LibraryLoadError, SymbolNotFoundError, LibraryVersionError
        The named file is no library, lacks a symbol or is of a version this backend does not speak; or another
        file has been loaded already.
    """
    _table(backend)  # an unknown name is refused here
    if path is not None:
        path = _arguments.path(path, "path")
    library = _libraries.get(backend)
    if library is None:
        with _load_lock:
            library = _libraries.get(backend)
            if library is None:
                if backend in _loading:
                    raise errors.BusyError(f"{backend}: this thread is loading its library already, further up")
                _loading.add(backend)
                try:
                    library = _load(backend, path)
                    _libraries[backend] = library
                finally:
                    _loading.discard(backend)
    if path is not None and not _same_file(library.path, path):
        raise errors.LibraryLoadError(
            f"{backend}: {path} cannot be loaded, this process already uses {library.path}", backend=backend
        )
    return library


def _same_file(a, b):
    try:
        return os.path.samefile(a, b)
    except OSError:
        return a == b


cdef object _load(str backend, object path):
    def open_library(file, no_load):
        cdef const pbn_backend *table = _table(backend)
        cdef pbn_library result
        cdef bytes name = os.fsencode(file)
        cdef const char *c_name = name
        cdef int c_no_load = bool(no_load)
        cdef int status
        if b"\0" in name:
            raise _find.OpenFailed("open", "the path contains a null character")
        with nogil:
            status = table.load(c_name, c_no_load, &result)
        if status != 0:
            kind = {PBN_E_SYMBOL: "symbol", PBN_E_VERSION: "version"}.get(status, "open")
            raise _find.OpenFailed(kind, (<bytes>result.message).decode("utf-8", "replace"))
        return (
            os.fsdecode(<bytes>result.path),
            (result.version[0], result.version[1], result.version[2]),
        )

    (file, version), found_via, attempts = _find.find(_find.SPECS[backend], open_library, path)
    cdef const pbn_backend *table = _table(backend)
    return Library(
        backend, table.label.decode(), version, file, found_via, tuple(tuple(a) for a in attempts), table.device_type
    )


def has_symbol(backend, name):
    """Whether the loaded library has an optional symbol.

    Parameters
    ----------
    backend : str
    name : str
        Vendor symbol, for example ``"miopenBatchNormalizationForwardTraining_V2"``.

    Returns
    -------
    bool or None
        ``None`` if the backend does not use such a symbol.
    """
    load(backend)
    name = _arguments.text(name, "name")
    cdef bytes symbol = name.encode("utf-8", "surrogatepass")
    cdef int found = _table(backend).has_symbol(symbol)
    return None if found < 0 else bool(found)


def capability(backend, operation, mode, dtype, layout, rank):
    """What a backend does with one combination.

    Parameters
    ----------
    backend : str
    operation : Operation
    mode : Mode
        Ignored for the elementwise operations.
    dtype : DataType
        Element type of x.
    layout : Layout
        Memory order of x.
    rank : int
        2 to 8.

    Returns
    -------
    bits : Capability
        No bit set if the combination is refused.
    reason : str
        Why it is refused; empty otherwise.
    """
    load(backend)
    cdef const pbn_backend *table = _table(backend)
    cdef int c_operation = _arguments.operation(operation)
    cdef int c_mode = _arguments.mode(mode)
    cdef int c_dtype = _arguments.data_type(dtype)
    if not isinstance(layout, int) or isinstance(layout, bool) or layout not in (0, 1, 2):
        raise errors.ArgumentError("layout", layout, "one of " + ", ".join(f"Layout.{v.name}" for v in Layout))
    if isinstance(rank, bool) or not isinstance(rank, int) or not 2 <= rank <= 8:
        raise errors.ArgumentError("rank", rank, "an integer from 2 to 8")
    cdef int c_layout = layout
    cdef int c_rank = rank
    cdef const char *why = NULL
    cdef uint32_t bits
    with nogil:
        bits = table.capability(c_operation, c_mode, c_dtype, c_layout, c_rank, &why)
    return Capability(bits), "" if bits or why == NULL else why.decode()


# ---------------------------------------------------------------- failures

cdef object _error(const pbn_backend *table, int status, str function, tuple descriptors):
    """The exception for a status; must run on the thread of the call, before any other call."""
    cdef char text[PBN_TEXT_MAX]
    text[0] = 0
    table.last_error(status, text, sizeof(text))
    backend = table.name.decode()
    library = _libraries.get(backend)
    details = dict(
        backend=backend,
        function=function,
        status=status,
        text=(<bytes>text).decode("utf-8", "replace").strip(),
        library=library.path if library else "",
        version=library.version if library else (),
        descriptors=descriptors,
    )
    if status > 0:
        cls = _VENDOR_CLASSES.get(table.status_class(status), errors.InternalError)
        if table.context_lost != NULL and table.context_lost(status, text, sizeof(text)):
            cls = errors.ContextLostError
            details["text"] = "; ".join(filter(None, [details["text"], (<bytes>text).decode("utf-8", "replace")]))
        return cls(status_name=table.status_name(status).decode("utf-8", "replace"), **details)
    name = _OWN_STATUS.get(status, "PBN_E_INTERNAL")
    if status == PBN_E_UNSUPPORTED:
        cls = errors.UnsupportedError
    elif status == PBN_E_MEMORY:
        cls = errors.AllocationError
    elif status == PBN_E_ARGUMENT:
        cls = errors.BadParameterError
    elif status == PBN_E_DEVICE:
        cls = errors.ExecutionError
    else:
        cls = errors.InternalError
    return cls(status_name=name, **details)


# ---------------------------------------------------------------- tensor descriptors

cdef class TensorDescriptor:
    """Shape, memory order and element type of a tensor, as a vendor's descriptor.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``; its library is loaded if it is not yet.
    dtype : DataType or str or numpy.dtype
        float32, float64, float16 or bfloat16.
    dims : sequence of int
        (N, C, spatial...), 2 to 8 sizes from 1 to 2**31 - 1.
    strides : sequence of int, optional
        In elements, positive, not overlapping, at most 2**31 - 1. Default: packed, channels first.

    Attributes
    ----------
    backend, dtype, dims, strides, layout
        As given, in canonical form.
    nbytes : int
        From the first to the last byte, as the vendor reports it.
    pointer : int
        The vendor's descriptor, for calls outside pybnorm.

    Raises
    ------
    ArgumentError
        A bad shape or stride.
    UnsupportedError, VendorError
        The vendor cannot describe such a tensor.

    Notes
    -----
    Vendor symbols: ``cudnnCreateTensorDescriptor``, ``cudnnSetTensorNdDescriptor``, ``cudnnGetTensorNdDescriptor``,
    ``cudnnGetTensorSizeInBytes``, ``cudnnDestroyTensorDescriptor``; ``miopenCreateTensorDescriptor``,
    ``miopenSetTensorDescriptor``, ``miopenGetTensorDescriptor``, ``miopenGetTensorNumBytes``,
    ``miopenDestroyTensorDescriptor``; ``dnnl_memory_desc_create_with_strides``, ``dnnl_memory_desc_query``,
    ``dnnl_memory_desc_get_size``, ``dnnl_memory_desc_destroy``.

    A descriptor never changes, so several threads may use it at once. `close` ends its use; the vendor's object
    goes with the last reference, so that a call in another thread never sees it destroyed.
    """

    cdef const pbn_backend *table
    cdef pbn_tensor tensor
    cdef bint open
    cdef bint created
    cdef readonly str backend
    cdef readonly object dtype
    cdef readonly tuple dims
    cdef readonly tuple strides
    cdef readonly object layout
    cdef object __weakref__

    def __cinit__(self):
        memset(&self.tensor, 0, sizeof(self.tensor))
        self.open = self.created = False

    def __init__(self, backend, dtype, dims, strides=None):
        shape = _arguments.dims(dims)
        if strides is None:
            steps = _arguments.packed_strides(shape)
            # A packed tensor past the vendors' int strides is refused like any other.
            steps = _arguments.strides(steps, shape)
        else:
            steps = _arguments.strides(strides, shape)
        kind = _arguments.data_type(dtype)
        load(backend)
        cdef const pbn_backend *table = _table(backend)
        cdef bint again
        with cython.critical_section(self):
            again = self.table != NULL
            if not again:
                self._create(table)
        if again:
            raise errors.ArgumentError("self", "an initialised descriptor", "a new one")
        self._set(kind, shape, steps)

    cdef int _create(self, const pbn_backend *table) except -1:
        cdef int status
        status = table.tensor_create(&self.tensor)
        if status != 0:
            raise _error(table, status, "tensor_descriptor_create", ())
        self.table = table
        self.backend = table.name.decode()
        self.open = self.created = True
        return 0

    cdef int _set(self, object dtype, tuple dims, tuple strides) except -1:
        cdef int64_t c_dims[PBN_MAX_RANK]
        cdef int64_t c_strides[PBN_MAX_RANK]
        cdef int rank = len(dims)
        cdef int status, i
        for i in range(rank):
            c_dims[i] = dims[i]
            c_strides[i] = strides[i]
        status = self.table.tensor_set(&self.tensor, dtype, rank, c_dims, c_strides)
        if status != 0:
            self.open = False
            raise _error(
                self.table, status, "tensor_descriptor_set", (f"dtype={dtype.short} dims={dims} strides={strides}",)
            )
        self._mirror()
        return 0

    cdef int _mirror(self) except -1:
        """Copies the record into the Python attributes."""
        self.dtype = DataType(self.tensor.dtype)
        self.dims = tuple(self.tensor.dims[i] for i in range(self.tensor.rank))
        self.strides = tuple(self.tensor.strides[i] for i in range(self.tensor.rank))
        self.layout = Layout(self.tensor.layout)
        return 0

    @staticmethod
    def from_pointer(backend, pointer):
        """Wrap a vendor's descriptor that somebody else owns.

        Parameters
        ----------
        backend : str
        pointer : int
            A set ``cudnnTensorDescriptor_t``, ``miopenTensorDescriptor_t`` or ``dnnl_memory_desc_t`` that outlives
            this object. Its shape and strides must satisfy the same rules.

        Returns
        -------
        TensorDescriptor
            ``close()`` leaves the vendor's object alone.
        """
        cdef uintptr_t address = _arguments.pointer(pointer, "pointer")
        load(backend)
        cdef const pbn_backend *table = _table(backend)
        cdef TensorDescriptor self = TensorDescriptor.__new__(TensorDescriptor)
        cdef int status = table.tensor_borrow(<void *>address, &self.tensor)
        if status != 0:
            raise _error(table, status, "tensor_descriptor_get", ())
        self.table = table
        self.backend = backend
        self.open = self.created = True
        self._mirror()
        _arguments.strides(self.strides, _arguments.dims(self.dims, "pointer"), "pointer")
        return self

    def query(self):
        """What the vendor's descriptor says, read back from the library.

        Returns
        -------
        dtype : DataType
        dims, strides : tuple of int
        """
        _check_open(self)
        cdef int dtype = 0, rank = 0
        cdef int64_t dims[PBN_MAX_RANK]
        cdef int64_t strides[PBN_MAX_RANK]
        cdef int status = self.table.tensor_get(&self.tensor, &dtype, &rank, dims, strides)
        if status != 0:
            raise _error(self.table, status, "tensor_descriptor_get", (repr(self),))
        return DataType(dtype), tuple(dims[i] for i in range(rank)), tuple(strides[i] for i in range(rank))

    @property
    def nbytes(self):
        """Bytes from the first to the last element, as the vendor reports it."""
        _check_open(self)
        cdef size_t size = 0
        cdef int status = self.table.tensor_size(&self.tensor, &size)
        if status != 0:
            raise _error(self.table, status, "tensor_descriptor_size", (repr(self),))
        return size

    @property
    def pointer(self):
        """Address of the vendor's descriptor."""
        _check_open(self)
        return <uintptr_t>self.tensor.vendor

    @property
    def closed(self):
        """Whether `close` has been called."""
        return not self.open

    def close(self):
        """End the use of this descriptor; further calls do nothing."""
        self.open = False

    def __enter__(self):
        _check_open(self)
        return self

    def __exit__(self, *_):
        self.close()

    def __dealloc__(self):
        # Descriptors are host memory in all three vendors, so destroying late is safe at shutdown too.
        if self.created:
            self.created = False
            self.table.tensor_destroy(&self.tensor)

    def __reduce__(self):
        raise TypeError("a TensorDescriptor belongs to its process and cannot be pickled")

    def __repr__(self):
        if not self.open:
            return "<TensorDescriptor closed>"
        return f"<TensorDescriptor {self.backend} {self.dtype.short} dims={self.dims} strides={self.strides}>"


cdef int _check_open(TensorDescriptor descriptor) except -1:
    if not descriptor.open:
        raise errors.ClosedError("descriptor")
    return 0


cdef TensorDescriptor _descriptor(object value, str argument, const pbn_backend *table):
    """The argument as an open descriptor of this backend; the handle that `table` is of has been checked."""
    if not isinstance(value, TensorDescriptor):
        raise errors.ArgumentTypeError(argument, value, "a TensorDescriptor")
    cdef TensorDescriptor descriptor = <TensorDescriptor>value
    if not descriptor.open:
        raise errors.ClosedError(argument)
    if descriptor.table != table:
        raise errors.ArgumentError(
            argument, f"a descriptor of backend {descriptor.backend}", f"one of backend {table.name.decode()}"
        )
    return descriptor


def derive_bn_tensor_descriptor(x_desc, mode):
    """Descriptor of scale, bias and statistics for data described by `x_desc`.

    Parameters
    ----------
    x_desc : TensorDescriptor
        Rank 2 to 8.
    mode : Mode

    Returns
    -------
    TensorDescriptor
        Same rank; (1, C, 1...) for the spatial modes, (1, C, spatial...) for per-activation; float64 for float64
        data, else float32; packed, channels first.

    Raises
    ------
    UnsupportedError
        The backend has no such mode or dtype.

    Notes
    -----
    Vendor symbols: ``cudnnDeriveBNTensorDescriptor``, ``miopenDeriveBNTensorDescriptor``; oneDNN has none.
    """
    if not isinstance(x_desc, TensorDescriptor):
        raise errors.ArgumentTypeError("x_desc", x_desc, "a TensorDescriptor")
    cdef TensorDescriptor x = _descriptor(x_desc, "x_desc", (<TensorDescriptor>x_desc).table)
    cdef int c_mode = _arguments.mode(mode)
    cdef TensorDescriptor derived = TensorDescriptor.__new__(TensorDescriptor)
    _check_capability(x.table, PBN_OP_DERIVE, c_mode, x, "derive_bn_tensor_descriptor")
    derived._create(x.table)
    cdef int status = x.table.derive(&derived.tensor, &x.tensor, c_mode)
    if status != 0:
        raise _error(x.table, status, "derive_bn_tensor_descriptor", (f"x={x!r} mode={Mode(c_mode).name}",))
    derived._mirror()
    return derived


cdef int _check_capability(
    const pbn_backend *table, int operation, int mode, TensorDescriptor x, str function
) except -1:
    cdef const char *why = NULL
    if table.capability(operation, mode, x.tensor.dtype, x.tensor.layout, x.tensor.rank, &why) != 0:
        return 0
    library = _libraries.get(x.backend)
    raise errors.UnsupportedError(
        backend=x.backend,
        function=function,
        status=PBN_E_UNSUPPORTED,
        status_name="PBN_E_UNSUPPORTED",
        text=why.decode() if why != NULL else "",
        library=library.path,
        version=library.version,
        descriptors=(f"x={x!r} mode={Mode(mode).name}",),
    )


# ---------------------------------------------------------------- handles

cdef class Handle:
    """A vendor library's handle: the device and stream that calls go to.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``; its library is loaded if it is not yet.
    stream : int or object with ``__cuda_stream__``, optional
        Stream for the calls; default: the vendor's default stream. For oneDNN a ``dnnl_stream_t``.

    Attributes
    ----------
    backend : str
    library : Library
    device : int or None
        Ordinal of the device that was current when the handle was made, where that can be known; of a cuDNN handle that
        somebody else made the device of its stream, if that is not the default one. Its calls go there, whichever
        device is current then, and leave that one current.
    pointer : int
        The vendor's handle (``cudnnHandle_t``, ``miopenHandle_t``, ``dnnl_stream_t``).

    Raises
    ------
    LibraryNotFoundError
        The vendor's library is not on this machine; the message lists every place tried.
    NotInitializedError
        The library is there but finds no device.

    Notes
    -----
    Vendor symbols: ``cudnnCreate``, ``cudnnSetStream``, ``cudnnGetStream``, ``cudnnDestroy``; ``miopenCreate``,
    ``miopenSetStream``, ``miopenGetStream``, ``miopenDestroy``; ``dnnl_engine_create``, ``dnnl_stream_create``.

    Calls through one handle are serialised by a lock. Calls on a device return before they ran: keep the arrays
    alive, and do not read results, until the stream has been synchronised.
    """

    cdef const pbn_backend *table
    cdef pbn_handle *handle
    cdef bint borrowed
    cdef bint forked
    cdef int device_id  # -1 where it is not known
    cdef bint several  # whether there are other devices, whose memory may be given
    cdef object lock
    cdef dict descriptors
    cdef dict plans
    cdef readonly dict _ready  # what pybnorm.functional has made ready for this handle
    cdef readonly dict _prepared  # and pybnorm.operations
    cdef void *scratch
    cdef size_t scratch_size
    cdef readonly str backend
    cdef readonly object library
    cdef readonly object device
    cdef object __weakref__

    def __cinit__(self):
        self.handle = NULL
        self.scratch = NULL
        self.scratch_size = 0
        self.forked = False
        self.device_id = -1
        self.lock = threading.RLock()
        self.descriptors = {}
        self.plans = {}
        self._ready = {}
        self._prepared = {}

    def __init__(self, backend, *, stream=None):
        cdef const pbn_backend *table
        cdef pbn_handle *handle = NULL
        cdef int status
        address = None if stream is None else _stream(stream)
        library = load(backend)
        with self.lock:
            if self.table != NULL:
                raise errors.ArgumentError("self", "an initialised handle", "a new one")
            table = _table(backend)
            with nogil:
                status = table.handle_create(&handle)
            if status != 0:
                raise _error(table, status, "create", ())
            self._adopt(table, handle, library, False)
        if address is not None:
            try:
                self.set_stream(address)
            except BaseException:
                self.close()
                raise

    cdef int _adopt(self, const pbn_backend *table, pbn_handle *handle, object library, bint borrowed) except -1:
        self.table = table
        self.handle = handle
        self.borrowed = borrowed
        self.library = library
        self.backend = library.backend
        self.device_id = table.handle_device(handle)
        if self.device_id >= 0:
            self.device = self.device_id
        self.several = self.device_id >= 0 and table.memory_device != NULL and table.device_count() > 1
        _handles.add(self)
        return 0

    @staticmethod
    def from_pointer(backend, pointer):
        """Use a vendor's handle that somebody else owns.

        Parameters
        ----------
        backend : str
        pointer : int
            ``cudnnHandle_t``, ``miopenHandle_t`` or ``dnnl_stream_t`` that outlives this object.

        Returns
        -------
        Handle
            ``close()`` leaves the vendor's object alone.
        """
        cdef uintptr_t address = _arguments.pointer(pointer, "pointer")
        library = load(backend)
        cdef const pbn_backend *table = _table(backend)
        cdef Handle self = Handle.__new__(Handle)
        cdef pbn_handle *handle = NULL
        cdef int status = table.handle_borrow(<void *>address, &handle)
        if status != 0:
            raise _error(table, status, "from_pointer", ())
        self._adopt(table, handle, library, True)
        return self

    @property
    def pointer(self):
        """Address of the vendor's handle."""
        with self.lock:
            self._check_open()
            return <uintptr_t>self.table.handle_pointer(self.handle)

    @property
    def closed(self):
        """Whether `close` has been called."""
        return self.handle == NULL

    @property
    def workspace_nbytes(self):
        """Bytes of workspace the handle keeps for calls on CPU arrays; grows with the largest call."""
        return self.scratch_size

    @property
    def stream(self):
        """The stream that calls go to, as an integer."""
        cdef void *stream = NULL
        with self.lock:
            self._check_open()
            status = self.table.stream_get(self.handle, &stream)
            if status != 0:
                raise _error(self.table, status, "get_stream", ())
        return <uintptr_t>stream

    def set_stream(self, stream):
        """Send later calls to `stream`: an integer or an object with ``__cuda_stream__``.

        Vendor symbols: ``cudnnSetStream``, ``miopenSetStream``; oneDNN takes a ``dnnl_stream_t``.
        """
        cdef uintptr_t address = _stream(stream)
        cdef int status
        with self.lock:
            self._check()
            status = self.table.stream_set(self.handle, <void *>address)
            if status != 0:
                raise _error(self.table, status, "set_stream", ())

    def query_runtime_error(self, mode="blocking"):
        """What the kernels of this handle's calls have recorded on the device, and the vendor then forgets.

        A call returns success once its kernel is launched. cuDNN's kernels of `Mode.SPATIAL_PERSISTENT` sum in fixed
        point and, by NVIDIA's documentation, record it when that overflows; no other batch-norm kernel is said to
        record anything. None is therefore no proof that the results are right, and errors of CUDA itself come with the
        next call or synchronisation, not from here. The record is the handle's and holds one error.

        Parameters
        ----------
        mode : str
            ``"blocking"``: after all work of the handle's stream, for which it waits; ``"nonblocking"``: at once,
            ``"CUDNN_STATUS_RUNTIME_IN_PROGRESS"`` while the stream has work left; ``"raw"``: at once, whatever has run.
            The first two ask the stream that the calls were made on: not after `set_stream`.

        Returns
        -------
        str or None
            The vendor's name of the status, such as ``"CUDNN_STATUS_RUNTIME_FP_OVERFLOW"``; None for success.

        Raises
        ------
        ArgumentError
            Another mode, or a closed handle.
        UnsupportedError
            The backend's kernels record nothing, or the library lacks the symbol.
        VendorError
            The query itself failed.

        Notes
        -----
        Vendor symbol: ``cudnnQueryRuntimeError``, with ``CUDNN_ERRQUERY_BLOCKING``, ``_NONBLOCKING`` or ``_RAWCODE``;
        deprecated in cuDNN 9. MIOpen and oneDNN have no such query.
        """
        cdef int query = _arguments.runtime_query(mode)
        cdef int recorded = 0
        cdef int status
        with self.lock:
            self._check()
            if self.table.runtime_error == NULL:
                raise _unsupported(self, "query_runtime_error", "its kernels record no errors")
            with nogil:
                status = self.table.runtime_error(self.handle, query, &recorded)
            if status != 0:
                raise _error(self.table, status, "query_runtime_error", ())
            return None if recorded == 0 else self.table.status_name(recorded).decode("utf-8", "replace")

    def follow_stream(self, array):
        """Send later calls to the stream that is current for an array in its framework.

        Parameters
        ----------
        array : array
            Of the handle's device and of a framework whose type has DLPack's table of C functions, as PyTorch's from
            2.10 on.

        Returns
        -------
        bool
            False where the framework does not say it in C or the array is not of this kind of device; nothing has
            changed then. True on the CPU, which has no streams to follow.

        Raises
        ------
        ArgumentError
            An array of another device.
        ClosedError, VendorError

        Notes
        -----
        Vendor symbols: ``cudnnGetStream``, and where it differs ``cudnnSetStream``; ``miopenGetStream``,
        ``miopenSetStream``.
        """
        cdef uintptr_t current = 0
        cdef int32_t device = -1
        cdef void *mine = NULL
        cdef int status
        self._check()
        if not _current_stream(array, self.table.device_type, &device, &current):
            return False
        if self.table.device_type == 1:
            return True
        with self.lock:
            self._check()
            self._same_device(device, "array")
            status = self.table.stream_get(self.handle, &mine)
            if status != 0:
                raise _error(self.table, status, "get_stream", ())
            if <uintptr_t>mine != current:
                status = self.table.stream_set(self.handle, <void *>current)
                if status != 0:
                    raise _error(self.table, status, "set_stream", ())
        return True

    cdef int _check_open(self) except -1:
        if self.handle == NULL:
            raise errors.ClosedError("handle")
        return 0

    cdef int _check(self) except -1:
        self._check_open()
        if self.forked:
            raise errors.ArgumentError(
                "handle",
                "a handle made before fork()",
                "one made in this process, as threads do not survive a fork" if self.table.device_type == 1 else
                "one of a process started by multiprocessing's spawn or forkserver: device contexts do not survive a "
                "fork, and this process cannot make others",
            )
        return 0

    cdef int _after_fork(self) except -1:
        self.lock = threading.RLock()  # its owner may not exist in this process
        self.forked = True
        return 0

    def close(self):
        """Destroy the vendor's handle if it is ours; further calls do nothing.

        Raises
        ------
        VendorError
            The vendor reports a failure, for example of earlier asynchronous work. The handle is closed all the same.
        ContextLostError
            The device's context is lost. The handle is closed all the same, and plans of it can still be dropped.
        """
        cdef int status = 0
        with self.lock:
            if self.handle != NULL:
                status = self._release()
        if status != 0:
            raise _error(self.table, status, "destroy", ())

    cdef int _release(self) noexcept:
        cdef pbn_handle *handle = self.handle
        cdef int status
        self.handle = NULL
        if self.forked:  # the vendor's destroy would wait for threads, or talk to a device, of the parent
            return 0
        self._ready.clear()
        self._prepared.clear()
        self.plans.clear()
        with nogil:
            status = self.table.handle_destroy(handle)
            free(self.scratch)
        self.scratch = NULL
        self.scratch_size = 0
        self.descriptors.clear()
        return status

    def __enter__(self):
        self._check()
        return self

    def __exit__(self, exception_type, *_):
        try:
            self.close()
        except errors.VendorError:
            # A lost device context makes destroy fail too; the first error is the one to see.
            if exception_type is None:
                raise

    def __del__(self):
        if self.handle == NULL:
            return
        if sys is None or sys.is_finalizing():
            # The driver may have shut down already: destroying then crashes in some vendors.
            self.handle = NULL
            return
        text = None
        try:
            if not self.borrowed and not self.forked:
                text = repr(self)
        finally:
            self._release()  # before the warning, which may be an exception
        if text is not None:
            warnings.warn(f"unclosed {text}", ResourceWarning, stacklevel=2, source=self)

    def __reduce__(self):
        raise TypeError("a Handle belongs to its process and cannot be pickled")

    def __repr__(self):
        with self.lock:
            if self.handle == NULL:
                return "<Handle closed>"
            where = "" if self.device is None else f" device={self.device}"
            where += " made before fork()" if self.forked else ""
            return f"<Handle {self.backend} {'.'.join(map(str, self.library.version))}{where} at {self.pointer:#x}>"

    # -------- arrays

    cdef object _buffer(self, object array, str argument, bint output):
        buffer = _arrays.as_buffer(array, argument)
        if buffer.device_type not in _REACHABLE[self.table.device_type]:
            raise errors.ArgumentError(
                argument,
                f"memory of device type {_DEVICE_NAMES.get(buffer.device_type, buffer.device_type)}",
                f"{_DEVICE_NAMES[self.table.device_type]} memory, which backend {self.backend} computes on",
            )
        buffer = self._placed(buffer, argument)
        if output and not buffer.writable:
            raise errors.ArgumentError(argument, "a read-only array", "a writable one")
        return buffer

    cdef int _same_device(self, object device_id, str argument) except -1:
        if self.device is not None and device_id not in (self.device, -1):
            raise errors.ArgumentError(
                argument, f"memory of device {device_id}", f"memory of device {self.device}, the handle's"
            )
        return 0

    cdef object _placed(self, object memory, str argument):
        """A Buffer or Memory, whose protocol may not have said its device: the driver does."""
        if memory.device_id == -1 and self.table.memory_device != NULL and type(memory.pointer) is int:
            if 0 < memory.pointer < 1 << 64:
                memory = memory._replace(device_id=self.table.memory_device(<void *><uintptr_t>memory.pointer))
        self._same_device(memory.device_id, argument)
        return memory

    cdef int _here(self, uintptr_t address, str argument) except -1:
        """Refuses a bare address of another device; asks the driver only where there is another one."""
        if self.several and address != 0:
            self._same_device(self.table.memory_device(<void *>address), argument)
        return 0

    cdef object _pointer(self, object value, str argument, bint optional=False):
        address = (_arguments.optional_pointer if optional else _arguments.pointer)(value, argument)
        self._here(address, argument)
        return address

    cdef object _data(self, object array, str argument, bint output=False):
        buffer = self._buffer(array, argument, output)
        shape = _arguments.dims(buffer.dims, argument)
        steps = tuple([s if d != 1 else max(1, s) for d, s in zip(shape, buffer.strides, strict=True)])
        _arguments.strides(steps, shape, argument)
        return buffer._replace(dims=shape, strides=steps)

    cdef uintptr_t _parameter(
        self, object array, str argument, TensorDescriptor param, list kept, bint output=False
    ) except? 0:
        """The address of a parameter array; `kept` holds its memory until the call has returned."""
        buffer = self._buffer(array, argument, output)
        if buffer.dtype != param.dtype:
            raise errors.ArgumentTypeError(argument, f"dtype {buffer.dtype.short}", param.dtype.short)
        _arguments.parameter_dims(argument, buffer.dims, buffer.strides, param.dims)
        kept.append(buffer)
        return _address(buffer, argument)

    cdef TensorDescriptor _described(self, object buffer):
        """The descriptor of an array, from the handle's bounded cache."""
        key = (buffer.dtype, buffer.dims, buffer.strides)
        found = self.descriptors.get(key)
        if found is None or not (<TensorDescriptor>found).open:
            if len(self.descriptors) >= _DESCRIPTOR_CACHE:
                self.descriptors.pop(next(iter(self.descriptors)), None)
            found = TensorDescriptor(self.backend, *key)
            self.descriptors[key] = found
        return <TensorDescriptor>found

    cdef TensorDescriptor _derived(self, TensorDescriptor x, object mode):
        key = (x.dtype, x.dims, x.strides, mode)
        found = self.descriptors.get(key)
        if found is None or not (<TensorDescriptor>found).open:
            if len(self.descriptors) >= _DESCRIPTOR_CACHE:
                self.descriptors.pop(next(iter(self.descriptors)), None)
            found = derive_bn_tensor_descriptor(x, mode)
            self.descriptors[key] = found
        return <TensorDescriptor>found

    cdef tuple _kind(self, object array, str argument, bint output):
        """(what decides which plan serves an array, what to call that with).

        The second is the array itself, or, where only a protocol of its own describes it, the answer: it is asked once.
        """
        cdef _DLTensor view
        cdef int64_t shape[_VIEW_RANK]
        cdef int64_t strides[_VIEW_RANK]
        if type(array) is _ndarray:
            if _of_numpy(array, output, &view, shape, strides):
                return _signed(&view), array
        elif _seen(array, _exchange_of(type(array), output), &view):
            return _signed(&view), array
        buffer = self._data(array, argument, output)
        address = _address(buffer, argument)
        return (buffer.device_type, buffer.device_id, *_key(buffer), _alignment(address)), buffer

    cdef tuple _activation(self, object activation, object low, object high, object x):
        bounded = low is not None or high is not None  # by numbers that x's dtype limits
        return _arguments.activation(activation, low, high, self._data(x, "x").dtype if bounded else DataType.FLOAT32)

    cdef object _scalar(self, object value, str name, object x):
        """alpha or beta as a float, converted once; whether x's dtype can hold a float is checked when planned."""
        return value if type(value) is float else _arguments.scalar(value, name, self._data(x, "x").dtype)

    def _look(self, tuple names, tuple arguments):
        """What decides which calls serve these arguments, and where their arrays are.

        Parameters
        ----------
        names : tuple of (str or None)
            Of each argument; None: no array.
        arguments : tuple

        Returns
        -------
        key : tuple or None
            None where an argument is of a type whose objects may change, or are equal to others that are not allowed.
        addresses : tuple of int
            Of the arrays in order, 0 for one that is None, behind a 0 for the workspace.
        values : list
            The arguments; those that were asked by a protocol of their own as what that said. They have to live until
            the calls were made.

        Raises
        ------
        ArgumentError, ArgumentTypeError, ClosedError
        """
        cdef _DLTensor view
        cdef int64_t shape[_VIEW_RANK]
        cdef int64_t strides[_VIEW_RANK]
        cdef Py_ssize_t i
        cdef list key = [], addresses = [0], values = list(arguments)
        cdef bint keep = True
        self._check()
        for i in range(len(arguments)):
            value = arguments[i]
            if names[i] is None:
                if issubclass(type(value), (_arrays.np.floating, _arrays.np.integer)):
                    value = values[i] = value.item()
                if type(value) is float:
                    key.append(_keyed(value))
                elif value is None or type(value) is int:
                    key.append((value,))  # which is no 1.0
                elif (type(value) is list or type(value) is tuple) and all([type(v) is int for v in value]):
                    key.append((type(value), *value))
                else:
                    keep = False
                continue
            if value is None:
                key.append(None)
                addresses.append(0)
                continue
            if type(value) is _ndarray:
                if _of_numpy(value, False, &view, shape, strides):
                    key.append((_signed(&view), value.flags.writeable))
                    addresses.append(<uintptr_t>view.data)
                    continue
            elif _seen(value, _exchange_of(type(value), True), &view):
                key.append(_signed(&view))
                addresses.append(0 if view.data == NULL else <uintptr_t>view.data + view.byte_offset)
                continue
            buffer = values[i] = self._buffer(value, names[i], False)
            keep = (
                keep and type(buffer.dtype) is DataType and type(buffer.dims) is tuple and type(buffer.strides) is tuple
                and type(buffer.writable) is bool
                and all([type(n) is int for n in (*buffer.dims, *buffer.strides, buffer.device_type, buffer.device_id)])
            )
            key.append(buffer[1:7])  # all but the address and what keeps it alive
            addresses.append(0 if buffer.pointer == 0 else _address(buffer, names[i]))  # 0: no elements, or a query
        return tuple(key) if keep else None, tuple(addresses), values

    cdef Plan _cached(self, object key):
        """The plan of a call, with this handle until `Plan._leave`.

        None where this thread is in the midst of it further up: a signal handler has come back here.
        """
        cdef Plan plan
        try:
            plan = self.plans.get(key)
        except Exception:  # an argument without a hash, which is refused further on
            return None
        if plan is None or plan.busy == PyThread_get_thread_ident():
            return None
        with cython.critical_section(plan):
            plan.users += 1
            plan.handle = self
        return plan

    cdef Plan _keep(self, object key, Plan plan):
        plan.users = 1
        plan.arrays = True
        with self.lock:
            # Where another has been kept since, this one goes with its call.
            if key not in self.plans and self.handle != NULL:
                if len(self.plans) >= _PLAN_CACHE:
                    self.plans.pop(next(iter(self.plans)), None)
                self.plans[key] = plan
        return plan

    def forward_training(
        self,
        x,
        scale,
        bias,
        y,
        *,
        mode=Mode.SPATIAL,
        alpha=1.0,
        beta=0.0,
        epsilon=1e-5,
        exponential_average_factor=0.1,
        running_mean=None,
        running_variance=None,
        saved_mean=None,
        saved_inv_variance=None,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
        algorithm=None,
        workspace=None,
    ):
        """Batch norm with the statistics of the batch, on arrays.

        ``y = alpha * act(scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``

        Parameters
        ----------
        x : array, shape (N, C, spatial...), rank 2 to 8
            Logical order N, C, spatial; any layout, given by its strides.
        scale, bias : array
            `derived` shape: (1, C, 1...) or (C,) for the spatial modes, (1, C, spatial...) for per-activation;
            contiguous; float64 for float64 x, else float32.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        mode : Mode
        alpha, beta : float
            Blending of the result with the prior y.
        epsilon : float
            Added to the variance; finite, not negative.
        exponential_average_factor : float
            ``running = (1 - factor) * running + factor * batch``; from 0 to 1.
        running_mean, running_variance : array, derived shape, optional
            Updated in place; both or none. The batch variance enters unbiased, ``m / (m - 1)`` times the biased one.
        saved_mean, saved_inv_variance : array, derived shape, optional
            Written; both or none. The second is ``1 / sqrt(biased variance + epsilon)``.
        activation : Activation
            What ``act`` is, in the vendor's own fused kernel. Without `algorithm` refused where
            `Capability.ACTIVATION` is not set; with one, NONE or RELU as in `plan_forward_training`.
        activation_low, activation_high : float, optional
            The bounds that the activation has: high of CLIPPED_RELU, low and high of CLAMP.
        algorithm : str, optional
            Default: the vendor's entry point for the mode, and nothing else. A name as `plan_forward_training` takes
            it. What a kind of call needs is made at its first call and kept by the handle, for the 256 newest kinds.
        workspace : array or (int, int), optional
            Device memory for backends that need some (`workspace_size`). On the CPU the handle keeps its own.

        Raises
        ------
        ArgumentError
            A bad argument; nothing was called and nothing written.
        UnsupportedError
            The backend has no right path for the combination.
        VendorError
            The vendor returned a status other than success.

        Notes
        -----
        Vendor symbols: see `batch_normalization_forward_training`.
        """
        cdef Plan plan
        self._check()
        has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
        has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
        x_kind, x = self._kind(x, "x", False)
        y_kind, y = self._kind(y, "y", True)
        mode, algorithm = _mode(mode), _named(algorithm)
        alpha, beta = self._scalar(alpha, "alpha", x), self._scalar(beta, "beta", x)
        epsilon = _arguments.epsilon(epsilon)
        factor = _arguments.factor(exponential_average_factor)
        act = self._activation(activation, activation_low, activation_high, x)
        key = (
            PBN_OP_FORWARD_TRAINING, algorithm, x_kind, y_kind, mode, _keyed(alpha), _keyed(beta), _keyed(epsilon),
            _keyed(factor), has_running, has_saved, act,
        )
        plan = self._cached(key)
        if plan is None:
            plan = self._keep(
                key,
                _plan_forward_training(
                    self, x, y, mode, algorithm, alpha, beta, epsilon, factor, has_running, has_saved, act, None
                ),
            )
        try:
            plan(x, scale, bias, y, running_mean, running_variance, saved_mean, saved_inv_variance, workspace)
        finally:
            plan._leave()

    def forward_inference(
        self,
        x,
        scale,
        bias,
        running_mean,
        running_variance,
        y,
        *,
        mode=Mode.SPATIAL,
        alpha=1.0,
        beta=0.0,
        epsilon=1e-5,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
        algorithm=None,
        workspace=None,
    ):
        """Batch norm with given statistics, on arrays.

        ``y = alpha * act(scale * (x - running_mean) / sqrt(running_variance + epsilon) + bias) + beta * y``

        Parameters
        ----------
        x : array, shape (N, C, spatial...), rank 2 to 8
        scale, bias, running_mean, running_variance : array, derived shape
            As in `forward_training`. `running_variance` is a variance, not an inverse deviation; where it is below
            -`epsilon` the result is NaN.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        mode, alpha, beta, epsilon, activation, activation_low, activation_high, algorithm, workspace
            As in `forward_training`.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see `batch_normalization_forward_inference`.
        """
        cdef Plan plan
        self._check()
        x_kind, x = self._kind(x, "x", False)
        y_kind, y = self._kind(y, "y", True)
        mode, algorithm = _mode(mode), _named(algorithm)
        alpha, beta = self._scalar(alpha, "alpha", x), self._scalar(beta, "beta", x)
        epsilon = _arguments.epsilon(epsilon)
        act = self._activation(activation, activation_low, activation_high, x)
        key = (
            PBN_OP_FORWARD_INFERENCE, algorithm, x_kind, y_kind, mode, _keyed(alpha), _keyed(beta), _keyed(epsilon),
            act,
        )
        plan = self._cached(key)
        if plan is None:
            plan = self._keep(
                key, _plan_forward_inference(self, x, y, mode, algorithm, alpha, beta, epsilon, act, None)
            )
        try:
            plan(x, scale, bias, running_mean, running_variance, y, workspace)
        finally:
            plan._leave()

    def backward(
        self,
        x,
        dy,
        scale,
        dx,
        dscale,
        dbias,
        *,
        mode=Mode.SPATIAL,
        alpha_data=1.0,
        beta_data=0.0,
        alpha_param=1.0,
        beta_param=0.0,
        epsilon=1e-5,
        saved_mean=None,
        saved_inv_variance=None,
        bias=None,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
        y=None,
        algorithm=None,
        workspace=None,
    ):
        """Gradients of `forward_training`, on arrays.

        With ``xhat = (x - mean) * inv`` and sums over the reduced axes of m elements each:
        ``dbias' = sum(dy)``, ``dscale' = sum(dy * xhat)``,
        ``dx' = scale * inv * (dy - dbias' / m - xhat * dscale' / m)``;
        then ``dx = alpha_data * dx' + beta_data * dx`` and likewise ``dscale``, ``dbias`` by the parameter pair.
        With an activation the given dy is the gradient at its output, and what stands for dy in the formulas is dy
        where ``low < scale * xhat + bias <= high`` (RELU: above 0), else 0.

        Parameters
        ----------
        x, dy : array, shape (N, C, spatial...), rank 2 to 8, one dtype
        scale : array, derived shape
        dx : array, shape and dtype of x
            Written. Read only if `beta_data` is not 0.
        dscale, dbias : array, derived shape
            Written. Read only if `beta_param` is not 0.
        mode : Mode
        alpha_data, beta_data, alpha_param, beta_param : float
        epsilon : float
            Used only without saved statistics.
        saved_mean, saved_inv_variance : array, derived shape, optional
            From `forward_training`, or any values of your own: they are taken as they are. Both or none; without
            them mean and inverse deviation are computed from x.
        bias : array, derived shape, optional
            Given with an activation, and only then.
        activation, activation_low, activation_high, algorithm, workspace
            As in `forward_training`.
        y : array, shape and dtype of x, optional
            What forward wrote: given where an algorithm is named and an activation fused, and only then.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see `batch_normalization_backward`.
        """
        cdef Plan plan
        self._check()
        has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
        x_kind, x = self._kind(x, "x", False)
        dy_kind, dy = self._kind(dy, "dy", False)
        dx_kind, dx = self._kind(dx, "dx", True)
        mode, algorithm = _mode(mode), _named(algorithm)
        alpha_data, beta_data = self._scalar(alpha_data, "alpha_data", x), self._scalar(beta_data, "beta_data", x)
        alpha_param = self._scalar(alpha_param, "alpha_param", x)
        beta_param = self._scalar(beta_param, "beta_param", x)
        epsilon = _arguments.epsilon(epsilon)
        act = self._activation(activation, activation_low, activation_high, x)
        _arguments.activation_bias(act[0], bias)
        key = (
            PBN_OP_BACKWARD, algorithm, x_kind, dy_kind, dx_kind, mode, _keyed(alpha_data), _keyed(beta_data),
            _keyed(alpha_param), _keyed(beta_param), _keyed(epsilon), has_saved, act,
        )
        plan = self._cached(key)
        if plan is None:
            plan = self._keep(
                key,
                _plan_backward(
                    self, x, dy, dx, mode, algorithm, alpha_data, beta_data, alpha_param, beta_param, epsilon,
                    has_saved, act, None,
                ),
            )
        try:
            _arguments.activation_result((<BackwardPlan>plan).masked, y)
            plan(x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, workspace, y, bias)
        finally:
            plan._leave()

    def axpby(self, a, x, b, y, *, workspace=None):
        """``y = a * x + b * y`` elementwise, on arrays of one shape and dtype; each with its own strides.

        With ``b = 0`` the prior y is not read. Vendor symbols: see the module function `axpby`.
        """
        self._check()
        kept = []
        xb = self._data(x, "x")
        yb = self._data(y, "y", True)
        values = _arguments.axpby(a, b, xb, yb)
        space = self._workspace(workspace, kept)
        with self.lock:
            self._check()
            _axpby(
                self, values, self._described(xb), _address(xb, "x"), self._described(yb), _address(yb, "y"), space,
                True,
            )

    def fill(self, value, y):
        """``y = value`` everywhere, on an array of any strides; what lies between its elements is not written.

        Parameters
        ----------
        value : float
            Finite and in the range of y's dtype, to which it is rounded.
        y : array, rank 2 to 8
            Written.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see the module function `fill`.
        """
        self._check()
        yb = self._data(y, "y", True)
        number = _arguments.fill(value, yb)
        with self.lock:
            self._check()
            _fill(self, number, self._described(yb), _address(yb, "y"))

    def relu(self, x, y):
        """``y = max(x, 0)`` elementwise, on arrays of one shape and dtype; each with its own strides.

        Parameters
        ----------
        x : array, rank 2 to 8
        y : array, shape and dtype of x
            Written.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see the module function `relu`.
        """
        self._check()
        xb = self._data(x, "x")
        yb = self._data(y, "y", True)
        _arguments.relu(xb, yb)
        with self.lock:
            self._check()
            _relu(self, self._described(xb), _address(xb, "x"), self._described(yb), _address(yb, "y"))

    def relu_backward(self, x, dy, dx):
        """``dx = dy where x > 0, else 0`` elementwise, on arrays of one shape and dtype.

        Parameters
        ----------
        x : array, rank 2 to 8
            The input of `relu`, or its output: only the sign is read.
        dy, dx : array, shape and dtype of x
            dx is written.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`.

        Notes
        -----
        Vendor symbols: see the module function `relu_backward`.
        """
        self._check()
        xb = self._data(x, "x")
        dyb = self._data(dy, "dy")
        dxb = self._data(dx, "dx", True)
        _arguments.relu_backward(xb, dyb, dxb)
        with self.lock:
            self._check()
            _relu_backward(
                self, self._described(xb), _address(xb, "x"), self._described(dyb), _address(dyb, "dy"),
                self._described(dxb), _address(dxb, "dx"),
            )

    def buffer(self, array, argument, *, output=False):
        """Describe an array that this handle's calls can reach, without calling the vendor.

        Parameters
        ----------
        array : array
        argument : str
            The name that errors give it.
        output : bool
            Whether it must be writable.

        Returns
        -------
        Buffer

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not an array, on another device, or read-only where it must be writable.
        """
        self._check()
        return self._buffer(array, _name(argument), _arguments.boolean(output, "output"))

    def memory(self, workspace):
        """Address and bytes of a workspace that this handle's calls can reach; (0, 0) for ``None``.

        Parameters
        ----------
        workspace : array or (int, int) or None

        Returns
        -------
        (int, int)

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not contiguous memory, on another device, or read-only.
        """
        self._check()
        return self._workspace(workspace, [])

    def descriptor(self, array, argument="array"):
        """The descriptor of a data array, from the handle's bounded cache; the array's memory is not touched.

        Parameters
        ----------
        array : array, rank 2 to 8
        argument : str
            The name that errors give it.

        Returns
        -------
        TensorDescriptor

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
        """
        self._check()
        buffer = self._data(array, _name(argument))
        with self.lock:
            self._check()
            return self._described(buffer)

    def workspace_size(
        self,
        operation,
        x_desc,
        *,
        mode=Mode.SPATIAL,
        y_desc=None,
        dy_desc=None,
        dx_desc=None,
        alpha=1.0,
        beta=0.0,
        alpha_param=1.0,
        beta_param=0.0,
        epsilon=1e-5,
        running=True,
        saved=True,
        algorithm=None,
        activation=Activation.NONE,
        activation_low=None,
        activation_high=None,
    ):
        """Bytes of workspace that a call needs.

        Parameters
        ----------
        operation : Operation
            One of the three batch-norm calls or `Operation.AXPBY`.
        x_desc : TensorDescriptor
        mode : Mode
        y_desc, dy_desc, dx_desc : TensorDescriptor, optional
            Default: `x_desc`.
        alpha, beta : float
            The data pair of the call.
        alpha_param, beta_param : float
            The parameter pair; backward only.
        epsilon : float
        running, saved : bool
            Whether the call passes running and saved statistics.
        algorithm : str, optional
            That of the call; not with `Operation.AXPBY`.
        activation, activation_low, activation_high
            Those of the call; a batch-norm call's only.

        Returns
        -------
        int
            0 where the vendor needs none.
        """
        self._check()
        op = _arguments.operation(operation)
        if op not in (
            Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD, Operation.AXPBY
        ):
            raise errors.ArgumentError("operation", op, "a batch-norm call or Operation.AXPBY")
        _arguments.boolean(running, "running")
        _arguments.boolean(saved, "saved")
        cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", self.table)
        cdef TensorDescriptor yd = xd if y_desc is None else _descriptor(y_desc, "y_desc", self.table)
        cdef TensorDescriptor dyd = xd if dy_desc is None else _descriptor(dy_desc, "dy_desc", self.table)
        cdef TensorDescriptor dxd = xd if dx_desc is None else _descriptor(dx_desc, "dx_desc", self.table)
        cdef TensorDescriptor pd
        cdef pbn_call call
        cdef size_t size = 0
        cdef int status
        cdef char here
        memset(&call, 0, sizeof(call))
        call.operation = op
        if op == Operation.FORWARD_TRAINING:
            values = _arguments.forward_training(mode, alpha, beta, xd, yd, None, 0.0, epsilon, False)
        elif op == Operation.FORWARD_INFERENCE:
            values = _arguments.forward_inference(mode, alpha, beta, xd, yd, None, epsilon)
        elif op == Operation.BACKWARD:
            values = _arguments.backward(mode, alpha, beta, alpha_param, beta_param, xd, dyd, dxd, None, epsilon)
            call.alpha_param, call.beta_param = values[3], values[4]
            call.dy_desc, call.dx_desc = &dyd.tensor, &dxd.tensor
        else:
            values = (Mode.SPATIAL, *_arguments.axpby(alpha, beta, xd, yd))
        act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
        if op == Operation.AXPBY and act[0] != Activation.NONE:
            raise errors.ArgumentError("activation", act[0], "Activation.NONE with Operation.AXPBY")
        call.activation, call.activation_low, call.activation_high = act
        if algorithm is not None:
            if op == Operation.FORWARD_TRAINING:
                plan = _plan_forward_training(
                    self, xd, yd, mode, algorithm, alpha, beta, epsilon, 0.0, running, saved, act, None
                )
            elif op == Operation.FORWARD_INFERENCE:
                plan = _plan_forward_inference(
                    self, xd, yd, mode, algorithm, alpha, beta, epsilon, act, None
                )
            elif op == Operation.BACKWARD:
                plan = _plan_backward(
                    self, xd, dyd, dxd, mode, algorithm, alpha, beta, alpha_param, beta_param, epsilon, saved,
                    act, None,
                )
            else:
                raise errors.ArgumentError("algorithm", algorithm, "None with Operation.AXPBY")
            return (<Plan>plan).workspace_size
        with self.lock:
            self._check()
            _check_capability(self.table, op, values[0], xd, "workspace_size")
            if op != Operation.AXPBY:
                pd = self._derived(xd, values[0])
                call.param_desc = &pd.tensor
            call.mode = values[0]
            call.alpha, call.beta = values[1], values[2]
            call.epsilon = values[-1]
            call.x_desc = &xd.tensor
            if op != Operation.BACKWARD:
                call.y_desc = &yd.tensor
            # The query reads no memory: only whether the statistics are there.
            if running:
                call.running_mean = call.running_variance = &here
            if saved:
                call.saved_mean = call.saved_inv_variance = &here
            self._check()  # a signal handler may have closed it since
            with nogil:
                status = self.table.workspace_size(self.handle, &call, &size)
            if status != 0:
                raise _error(self.table, status, "workspace_size", (f"x={xd!r}",))
        return size

    def plan_forward_training(
        self,
        x,
        y=None,
        *,
        mode=Mode.SPATIAL,
        algorithm="auto",
        alpha=1.0,
        beta=0.0,
        epsilon=1e-5,
        exponential_average_factor=0.1,
        running=True,
        saved=True,
        activation=Activation.NONE,
        z=None,
        tune=False,
    ):
        """Make a forward training call ready: everything but the pointers is validated and fixed now.

        ``y = act(bn(x) + z)`` where an activation, and with it a residual z, is fused; ``y = alpha * bn(x) + beta * y``
        where not.

        Parameters
        ----------
        x, y : TensorDescriptor or array
            What the tensors of the calls will look like; y like x by default. Of an array the alignment counts too:
            later addresses must be no less aligned; for descriptors it is 16 bytes. Parameters aligned to less than
            16 bytes: on cuDNN ``"ex"`` and ``"graph"`` refuse them, and what ``"auto"`` chose of these goes through the
            plain entry point for that call.
        mode : Mode
        algorithm : str or None
            ``"auto"``: the fastest whose error stays in the stable class of the bound; ``"fast"``: also those whose
            range is limited (cuDNN's persistent sums in fixed point) or that are less exact where a channel begins with
            a value far from its others (``"rows"``); a name of `algorithms`: that one and nothing else.
            ``"graph:2"`` is the third plan in the order of cuDNN's heuristic. None: the vendor's entry point for the
            mode, as `forward_training` calls it. The same bits at every call: inference, ``"spatial"``, and ``"ex"``
            and ``"graph"`` with saved statistics, as far as was seen on one device; the sums of ``"columns"`` and
            ``"rows"``, and backward's of statistics that are not saved, differ in their last digits on large maps.
        alpha, beta, epsilon, exponential_average_factor
            As in `forward_training`.
        running, saved : bool
            Whether the calls pass running and saved statistics.
        activation : Activation
            NONE, or RELU by the vendor's fused kernel. cuDNN: algorithm ``"ex"`` (``"auto"`` takes it), float32,
            float16 and bfloat16, packed channels-last tensors with channels in multiples of 4, alpha 1 and beta 0,
            saved statistics, and addresses aligned to 16 bytes. A NaN in front of the activation comes out as NaN or
            as 0. MIOpen: algorithm None, where `Capability.ACTIVATION` is set. oneDNN has none.
        z : bool, TensorDescriptor or array, optional
            What the residual looks like, dims and dtype of x; True: like x. Only with an activation.
        tune : bool
            With ``"auto"`` or ``"fast"``: measure their candidates once, in memory of its own, and remember the fastest
            in a file (`pybnorm.tuning`); ``reason`` has the times. It takes seconds, and on CUDA the packages
            ``cuda-core`` and ``cuda-bindings``. Not while a stream is captured into a graph.

        Returns
        -------
        ForwardTrainingPlan
            Its calls take `z` if planned, and `reserve` where `Plan.reserve_size` is not 0: device memory, aligned to
            64 bytes, that they write and that the calls of `plan_backward` are given unchanged.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            As in `forward_training`; UnsupportedError where the algorithm named cannot do it, with the reason.
        LibraryNotFoundError
            `tune` without those packages.

        Notes
        -----
        Vendor symbols with an activation: ``cudnnBatchNormalizationForwardTrainingEx`` with
        ``CUDNN_BATCHNORM_OPS_BN_ACTIVATION`` or ``_ADD_ACTIVATION``, and its queries of workspace and reserve space.
        """
        self._check()
        if _arguments.boolean(tune, "tune"):
            return _tuned(
                self, PBN_OP_FORWARD_TRAINING, x, algorithm,
                dict(
                    y=y, mode=mode, alpha=alpha, beta=beta, epsilon=epsilon,
                    exponential_average_factor=exponential_average_factor, running=running, saved=saved,
                    activation=activation, z=z,
                ),
            )
        return _plan_forward_training(
            self, x, y, mode, algorithm, alpha, beta, epsilon, exponential_average_factor, running, saved,
            (_arguments.plan_activation(activation), 0.0, 0.0), z,
        )

    def plan_forward_inference(
        self, x, y=None, *, mode=Mode.SPATIAL, algorithm="auto", alpha=1.0, beta=0.0, epsilon=1e-5,
        activation=Activation.NONE, z=None, tune=False,
    ):
        """Make a forward inference call ready; parameters as in `plan_forward_training`.

        cuDNN fuses RELU and a residual into its pointwise graph: packed channels-last float32, float16 and bfloat16
        with any number of channels, alpha 1 and beta 0. A NaN stays one.

        Returns
        -------
        ForwardInferencePlan
            Its calls take `z` if planned.
        """
        self._check()
        if _arguments.boolean(tune, "tune"):
            return _tuned(
                self, PBN_OP_FORWARD_INFERENCE, x, algorithm,
                dict(
                    y=y, mode=mode, alpha=alpha, beta=beta, epsilon=epsilon, activation=activation, z=z
                ),
            )
        return _plan_forward_inference(
            self, x, y, mode, algorithm, alpha, beta, epsilon, (_arguments.plan_activation(activation), 0.0, 0.0), z
        )

    def plan_backward(
        self,
        x,
        dy=None,
        dx=None,
        *,
        mode=Mode.SPATIAL,
        algorithm="auto",
        alpha_data=1.0,
        beta_data=0.0,
        alpha_param=1.0,
        beta_param=0.0,
        epsilon=1e-5,
        saved=True,
        activation=Activation.NONE,
        z=None,
        tune=False,
    ):
        """Make a backward call ready; parameters as in `plan_forward_training`, dy and dx like x by default.

        With an activation, dy is the gradient at its output. `z` says that forward added a residual, and what its
        gradient dz looks like: ``dz = dy where y > 0, else 0``, of which dx, dscale and dbias are made.

        With ``saved=False`` the statistics are those of x and epsilon. On cuDNN ``"graph"``, ``"columns"``, ``"rows"``
        and, over packed channels-last tensors that are not float64, ``"ex"`` compute them first, into the workspace;
        the others leave that to cuDNN, whose kernels for it are its slow ones.

        Returns
        -------
        BackwardPlan
            With an activation its calls take `bias` and, but for algorithm None, `y`, forward's result and like x; with
            z also `dz`, which is written, and `reserve` as forward left it where `Plan.reserve_size` is not 0.

        Notes
        -----
        Vendor symbols with an activation: ``cudnnBatchNormalizationBackwardEx`` and its queries.
        """
        self._check()
        if _arguments.boolean(tune, "tune"):
            return _tuned(
                self, PBN_OP_BACKWARD, x, algorithm,
                dict(
                    dy=dy, dx=dx, mode=mode, alpha_data=alpha_data, beta_data=beta_data, alpha_param=alpha_param,
                    beta_param=beta_param, epsilon=epsilon, saved=saved, activation=activation, z=z,
                ),
            )
        return _plan_backward(
            self, x, dy, dx, mode, algorithm, alpha_data, beta_data, alpha_param, beta_param, epsilon, saved,
            (_arguments.plan_activation(activation), 0.0, 0.0), z,
        )

    cdef tuple _workspace(self, object workspace, list kept, str name="workspace"):
        """(address, bytes) of the workspace argument; `kept` holds its memory until the call has returned."""
        if workspace is None:
            return 0, 0
        if isinstance(workspace, tuple) and len(workspace) == 2:
            return _workspace_pair(self, workspace[0], workspace[1], name)
        memory = _arrays.as_memory(workspace, name)
        device_type = memory.device_type
        if not memory.writable:
            raise errors.ArgumentError(name, "read-only memory", "writable memory")
        if device_type not in _REACHABLE[self.table.device_type]:
            raise errors.ArgumentError(
                name,
                f"memory of device type {_DEVICE_NAMES.get(device_type, device_type)}",
                f"{_DEVICE_NAMES[self.table.device_type]} memory",
            )
        memory = self._placed(memory, name)
        kept.append(memory)
        return memory.pointer, memory.nbytes

    cdef int _ensure_workspace(self, pbn_call *call, bint own, str function) except -1:
        """Checks the caller's workspace, or lends the handle's own to a call on CPU arrays."""
        cdef size_t need = 0
        self._check()
        cdef int status = self.table.workspace_size(self.handle, call, &need)
        if status != 0:
            raise _error(self.table, status, function, _shown(call))
        if need <= call.workspace_size and (need == 0 or <uintptr_t>call.workspace % _WORKSPACE_ALIGNMENT == 0):
            return 0
        if own and call.workspace == NULL and self.table.device_type == 1:
            if need > self.scratch_size:
                free(self.scratch)
                self.scratch = NULL
                self.scratch_size = 0
                if posix_memalign(&self.scratch, _WORKSPACE_ALIGNMENT, need) != 0:
                    self.scratch = NULL
                    raise errors.AllocationError(
                        backend=self.backend, function=function, status=PBN_E_MEMORY, status_name="PBN_E_MEMORY",
                        text=f"{need} bytes of workspace", library=self.library.path, version=self.library.version,
                    )
                self.scratch_size = need
            call.workspace = self.scratch
            call.workspace_size = self.scratch_size
            return 0
        raise errors.WorkspaceError(
            "workspace",
            f"{call.workspace_size} bytes at {<uintptr_t>call.workspace:#x}",
            f"at least {need} bytes, aligned to {_WORKSPACE_ALIGNMENT}, on the handle's device",
        )


cdef object _handles = weakref.WeakSet()


def _after_fork_in_child():
    global _forks, _load_lock
    _forks += 1
    _load_lock = threading.RLock()
    _loading.clear()
    _tell_of_fork(PBN_FORK_CHILD)
    for handle in list(_handles):
        (<Handle>handle)._after_fork()


def _tell_of_fork(int stage):
    cdef int i
    with nogil:  # it may wait for a call
        for i in range(PBN_BACKEND_COUNT):
            if pbn_backends[i].at_fork != NULL:
                pbn_backends[i].at_fork(stage)


os.register_at_fork(before=lambda: _tell_of_fork(PBN_FORK_BEFORE), after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit():
    global _exiting
    _exiting = True


cdef object _stream(object stream):
    """A stream's address: an integer, or what ``__cuda_stream__`` gives."""
    try:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            said = protocol() if callable(protocol) else protocol
            stream = 0 if said[1] is None else said[1]
    except Exception as error:
        shown = f"{type(stream).__name__} whose __cuda_stream__ failed: {type(error).__name__}: {error}"
        raise errors.ArgumentError("stream", shown, "an integer or an object with __cuda_stream__") from error
    if stream is None:
        raise errors.ArgumentTypeError("stream", stream, "an integer or an object with __cuda_stream__")
    return _arguments.optional_pointer(stream, "stream")


cdef str _name(object argument):
    if not isinstance(argument, str):
        raise errors.ArgumentTypeError("argument", argument, "the array's name, a string")
    return str(argument)


cdef tuple _workspace_pair(Handle handle, object address, object size, str name="workspace"):
    a = _arguments.optional_pointer(address, name)
    n = _arguments.byte_count(size, f"{name}_size")
    if a == 0 and n != 0:
        raise errors.ArgumentError(name, address, f"a non-NULL address for {name}_size {n}")
    handle._here(a, name)
    return a, n


cdef tuple _pointers(Handle handle, str name_a, object a, str name_b, object b):
    """Both addresses, or (0, 0) for None or 0 twice."""
    found = handle._pointer(a, name_a, True), handle._pointer(b, name_b, True)
    _arguments.pair(name_a, found[0] or None, name_b, found[1] or None)
    return found


cdef object _unsupported(Handle handle, str function, str text):
    return errors.UnsupportedError(
        backend=handle.backend, function=function, status=PBN_E_UNSUPPORTED, status_name="PBN_E_UNSUPPORTED", text=text,
        library=handle.library.path, version=handle.library.version,
    )


cdef Handle _handle(object value):
    if not isinstance(value, Handle):
        raise errors.ArgumentTypeError("handle", value, "a Handle")
    cdef Handle handle = <Handle>value
    handle._check()
    return handle


cdef tuple _shown(const pbn_call *call):
    """The descriptors of a call, for error messages."""
    lines = []
    _show(lines, "x", call.x_desc)
    _show(lines, "y", call.y_desc)
    _show(lines, "dy", call.dy_desc)
    _show(lines, "dx", call.dx_desc)
    _show(lines, "z", call.z_desc)
    _show(lines, "dz", call.dz_desc)
    _show(lines, "param", call.param_desc)
    if call.param_desc != NULL:
        lines.append(f"mode={Mode(call.mode).name} alpha={call.alpha} beta={call.beta} epsilon={call.epsilon}")
    if call.activation != PBN_ACTIVATION_NONE:
        name = Activation(call.activation).name
        lines.append(f"activation={name} low={call.activation_low} high={call.activation_high}")
    return tuple(lines)


cdef int _show(list lines, str name, const pbn_tensor *t) except -1:
    if t != NULL and t.rank > 0:
        dims = tuple([t.dims[i] for i in range(t.rank)])
        strides = tuple([t.strides[i] for i in range(t.rank)])
        lines.append(f"{name}: {DataType(t.dtype).short} dims={dims} strides={strides}")
    return 0


cdef uintptr_t _address(object buffer, str argument) except 0:
    """Where an array lies; a `Buffer` may have been made of any number."""
    cdef uintptr_t address = 0
    try:
        address = buffer.pointer
    except (OverflowError, TypeError):
        pass
    if address == 0:
        raise errors.ArgumentError(argument, f"address {buffer.pointer!r}", "a non-NULL address of 64 bits")
    return address


cdef object _region(str name, uintptr_t address, TensorDescriptor t):
    cdef int size = t.dtype.itemsize
    return _arguments.Region(name, address, t.dims, tuple([s * size for s in t.strides]), size)


cdef object _memory_region(tuple workspace, str name="workspace"):
    return _arguments.Region(name, workspace[0], (workspace[1],), (1,), 1)


cdef int _run(Handle handle, pbn_call *call, str name) except -1:
    """Hop two: without the GIL into the backend's table; an exception is built only when the status is not 0."""
    handle._check()  # an array's own protocol, or a signal handler, may have closed it since
    cdef const pbn_backend *table = handle.table
    cdef pbn_handle *c_handle = handle.handle
    cdef int status
    with nogil:
        if call.operation == PBN_OP_FORWARD_TRAINING:
            status = table.forward_training(c_handle, call)
        elif call.operation == PBN_OP_FORWARD_INFERENCE:
            status = table.forward_inference(c_handle, call)
        elif call.operation == PBN_OP_BACKWARD:
            status = table.backward(c_handle, call)
        elif call.operation == PBN_OP_AXPBY:
            status = table.axpby(c_handle, call)
        elif call.operation == PBN_OP_FILL:
            status = table.fill(c_handle, call)
        elif call.operation == PBN_OP_RELU:
            status = table.relu(c_handle, call)
        else:
            status = table.relu_backward(c_handle, call)
    if status != 0:
        raise _error(handle.table, status, name, _shown(call))
    return 0


cdef int _forward_training(
    Handle handle, tuple values,
    TensorDescriptor xd, uintptr_t x, TensorDescriptor yd, uintptr_t y, TensorDescriptor pd,
    uintptr_t scale, uintptr_t bias, uintptr_t running_mean, uintptr_t running_variance,
    uintptr_t saved_mean, uintptr_t saved_inv_variance, tuple act, tuple workspace,
) except -1:
    cdef pbn_call call
    outputs = [_region("y", y, yd)]
    inputs = [_region("x", x, xd), _region("scale", scale, pd), _region("bias", bias, pd)]
    if running_mean:
        outputs.append(_region("running_mean", running_mean, pd))
        outputs.append(_region("running_variance", running_variance, pd))
    if saved_mean:
        outputs.append(_region("saved_mean", saved_mean, pd))
        outputs.append(_region("saved_inv_variance", saved_inv_variance, pd))
    if workspace[1]:
        outputs.append(_memory_region(workspace))
    _arguments.disjoint(outputs, inputs)
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_FORWARD_TRAINING
    call.mode, call.alpha, call.beta, call.factor, call.epsilon = values
    call.activation, call.activation_low, call.activation_high = act
    call.x_desc, call.x = &xd.tensor, <void *>x
    call.y_desc, call.y = &yd.tensor, <void *>y
    call.param_desc, call.scale, call.bias = &pd.tensor, <void *>scale, <void *>bias
    call.running_mean, call.running_variance = <void *>running_mean, <void *>running_variance
    call.saved_mean, call.saved_inv_variance = <void *>saved_mean, <void *>saved_inv_variance
    call.workspace, call.workspace_size = <void *><uintptr_t>workspace[0], workspace[1]
    name = "batch_normalization_forward_training"
    _check_capability(handle.table, PBN_OP_FORWARD_TRAINING, call.mode, xd, name)
    handle._ensure_workspace(&call, False, name)
    return _run(handle, &call, name)


cdef int _forward_inference(
    Handle handle, tuple values,
    TensorDescriptor xd, uintptr_t x, TensorDescriptor yd, uintptr_t y, TensorDescriptor pd,
    uintptr_t scale, uintptr_t bias, uintptr_t running_mean, uintptr_t running_variance,
    tuple act, tuple workspace,
) except -1:
    cdef pbn_call call
    outputs = [_region("y", y, yd)]
    if workspace[1]:
        outputs.append(_memory_region(workspace))
    _arguments.disjoint(
        outputs,
        [
            _region("x", x, xd),
            _region("scale", scale, pd),
            _region("bias", bias, pd),
            _region("running_mean", running_mean, pd),
            _region("running_variance", running_variance, pd),
        ],
    )
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_FORWARD_INFERENCE
    call.mode, call.alpha, call.beta, call.epsilon = values
    call.activation, call.activation_low, call.activation_high = act
    call.x_desc, call.x = &xd.tensor, <void *>x
    call.y_desc, call.y = &yd.tensor, <void *>y
    call.param_desc, call.scale, call.bias = &pd.tensor, <void *>scale, <void *>bias
    call.running_mean, call.running_variance = <void *>running_mean, <void *>running_variance
    call.workspace, call.workspace_size = <void *><uintptr_t>workspace[0], workspace[1]
    name = "batch_normalization_forward_inference"
    _check_capability(handle.table, PBN_OP_FORWARD_INFERENCE, call.mode, xd, name)
    handle._ensure_workspace(&call, False, name)
    return _run(handle, &call, name)


cdef int _backward(
    Handle handle, tuple values,
    TensorDescriptor xd, uintptr_t x, TensorDescriptor dyd, uintptr_t dy, TensorDescriptor dxd, uintptr_t dx,
    TensorDescriptor pd, uintptr_t scale, uintptr_t bias, uintptr_t dscale, uintptr_t dbias,
    uintptr_t saved_mean, uintptr_t saved_inv_variance, tuple act, tuple workspace,
) except -1:
    cdef pbn_call call
    outputs = [_region("dx", dx, dxd), _region("dscale", dscale, pd), _region("dbias", dbias, pd)]
    inputs = [_region("x", x, xd), _region("dy", dy, dyd), _region("scale", scale, pd)]
    if bias:
        inputs.append(_region("bias", bias, pd))
    if saved_mean:
        inputs.append(_region("saved_mean", saved_mean, pd))
        inputs.append(_region("saved_inv_variance", saved_inv_variance, pd))
    if workspace[1]:
        outputs.append(_memory_region(workspace))
    _arguments.disjoint(outputs, inputs)
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_BACKWARD
    call.mode, call.alpha, call.beta, call.alpha_param, call.beta_param, call.epsilon = values
    call.activation, call.activation_low, call.activation_high = act
    call.x_desc, call.x = &xd.tensor, <void *>x
    call.dy_desc, call.dy = &dyd.tensor, <void *>dy
    call.dx_desc, call.dx = &dxd.tensor, <void *>dx
    call.param_desc, call.scale, call.bias = &pd.tensor, <void *>scale, <void *>bias
    call.dscale, call.dbias = <void *>dscale, <void *>dbias
    call.saved_mean, call.saved_inv_variance = <void *>saved_mean, <void *>saved_inv_variance
    call.workspace, call.workspace_size = <void *><uintptr_t>workspace[0], workspace[1]
    name = "batch_normalization_backward"
    _check_capability(handle.table, PBN_OP_BACKWARD, call.mode, xd, name)
    handle._ensure_workspace(&call, False, name)
    return _run(handle, &call, name)


cdef int _axpby(
    Handle handle, tuple values, TensorDescriptor xd, uintptr_t x, TensorDescriptor yd, uintptr_t y,
    tuple workspace, bint own,
) except -1:
    cdef pbn_call call
    outputs = [_region("y", y, yd)]
    if workspace[1]:
        outputs.append(_memory_region(workspace))
    _arguments.disjoint(outputs, [_region("x", x, xd)])
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_AXPBY
    call.alpha, call.beta = values
    call.x_desc, call.x = &xd.tensor, <void *>x
    call.y_desc, call.y = &yd.tensor, <void *>y
    call.workspace, call.workspace_size = <void *><uintptr_t>workspace[0], workspace[1]
    _check_capability(handle.table, PBN_OP_AXPBY, 1, xd, "axpby")
    handle._ensure_workspace(&call, own, "axpby")
    return _run(handle, &call, "axpby")


cdef int _fill(Handle handle, object value, TensorDescriptor yd, uintptr_t y) except -1:
    cdef pbn_call call
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_FILL
    call.alpha = value
    call.y_desc, call.y = &yd.tensor, <void *>y
    _arguments.disjoint([_region("y", y, yd)], [])
    _check_capability(handle.table, PBN_OP_FILL, 1, yd, "fill")
    return _run(handle, &call, "fill")


cdef int _relu(
    Handle handle, TensorDescriptor xd, uintptr_t x, TensorDescriptor yd, uintptr_t y
) except -1:
    cdef pbn_call call
    _arguments.disjoint([_region("y", y, yd)], [_region("x", x, xd)])
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_RELU
    call.x_desc, call.x = &xd.tensor, <void *>x
    call.y_desc, call.y = &yd.tensor, <void *>y
    _check_capability(handle.table, PBN_OP_RELU, 1, xd, "relu")
    return _run(handle, &call, "relu")


cdef int _relu_backward(
    Handle handle, TensorDescriptor xd, uintptr_t x, TensorDescriptor dyd, uintptr_t dy,
    TensorDescriptor dxd, uintptr_t dx,
) except -1:
    cdef pbn_call call
    _arguments.disjoint([_region("dx", dx, dxd)], [_region("x", x, xd), _region("dy", dy, dyd)])
    memset(&call, 0, sizeof(call))
    call.operation = PBN_OP_RELU_BACKWARD
    call.x_desc, call.x = &xd.tensor, <void *>x
    call.dy_desc, call.dy = &dyd.tensor, <void *>dy
    call.dx_desc, call.dx = &dxd.tensor, <void *>dx
    _check_capability(handle.table, PBN_OP_RELU_BACKWARD, 1, xd, "relu_backward")
    return _run(handle, &call, "relu_backward")


# ---------------------------------------------------------------- calls in a row

cdef enum:
    _SLOT_BITS = 56
    _MAX_SLOTS = 32


SLOT_BITS = _SLOT_BITS
cdef uint64_t _OFFSET = (<uint64_t>1 << _SLOT_BITS) - 1


cdef struct _Place:
    size_t member  # of pbn_call, in bytes from its begin
    int slot
    size_t offset


cdef struct _Extent:
    int slot
    size_t start, end, element
    bint written


cdef dict _members():
    """Where pbn_call has the address of each tensor."""
    cdef pbn_call c
    cdef char *start = <char *>&c
    return {
        "x": <char *>&c.x - start, "dy": <char *>&c.dy - start, "y": <char *>&c.y - start,
        "dx": <char *>&c.dx - start, "scale": <char *>&c.scale - start, "bias": <char *>&c.bias - start,
        "running_mean": <char *>&c.running_mean - start, "running_variance": <char *>&c.running_variance - start,
        "saved_mean": <char *>&c.saved_mean - start, "saved_inv_variance": <char *>&c.saved_inv_variance - start,
        "dscale": <char *>&c.dscale - start, "dbias": <char *>&c.dbias - start,
    }


cdef dict _MEMBERS = _members()
cdef dict _CALL_NAMES = {
    PBN_OP_FORWARD_TRAINING: "batch_normalization_forward_training",
    PBN_OP_FORWARD_INFERENCE: "batch_normalization_forward_inference",
    PBN_OP_BACKWARD: "batch_normalization_backward",
    PBN_OP_AXPBY: "axpby",
    PBN_OP_FILL: "fill",
    PBN_OP_RELU: "relu",
    PBN_OP_RELU_BACKWARD: "relu_backward",
}
# The tensors that each has a descriptor of.
cdef dict _DESCRIBED = {
    PBN_OP_FORWARD_TRAINING: ("x", "y"),
    PBN_OP_FORWARD_INFERENCE: ("x", "y"),
    PBN_OP_BACKWARD: ("x", "dy", "dx"),
    PBN_OP_AXPBY: ("x", "y"),
    PBN_OP_FILL: ("y",),
    PBN_OP_RELU: ("x", "y"),
    PBN_OP_RELU_BACKWARD: ("x", "dy", "dx"),
}


cdef class CallList:
    """A handle's calls in a row, checked once and run again and again on other memory.

    An address in them is made up of a slot and an offset, ``slot << 56 | offset``; where the slots begin is said at
    each run. Slot 0 is the workspace.

    Parameters
    ----------
    handle : Handle
        Later runs are given it again: the list does not keep it.
    """

    cdef const pbn_backend *table
    cdef pbn_call *calls
    cdef int *ends  # of each call's part of `places`
    cdef int count
    cdef _Place *places
    cdef _Extent *extents
    cdef int extent_count
    cdef int slots
    cdef dict descriptors

    def __cinit__(self, Handle handle not None):
        handle._check()
        self.table = handle.table
        self.descriptors = {}

    def __dealloc__(self):
        free(self.calls)
        free(self.ends)
        free(self.places)
        free(self.extents)

    def __len__(self):
        return self.count

    cdef TensorDescriptor _own(self, Handle handle, object buffer):
        """A descriptor that nobody else can change; the pieces of an array share theirs."""
        key = _key(buffer)
        found = self.descriptors.get(key)
        if found is None:
            found = self.descriptors[key] = TensorDescriptor(handle.backend, *key)
        return found

    def append(self, Handle handle not None, object operation, dict arrays not None, object workspace, **values):
        """One call more.

        Parameters
        ----------
        handle : Handle
        operation : Operation
        arrays : dict of str to Buffer
            Every tensor of the call by its name; parameters in their derived shape.
        workspace : (int, int)
            Offset in slot 0 and bytes.
        **values
            mode and scalars by the names that `Handle`'s methods have for them.

        Raises
        ------
        ArgumentError, UnsupportedError
            As that method.
        """
        cdef pbn_call call
        cdef TensorDescriptor xd = None, yd = None, dyd = None, dxd = None, pd = None
        cdef int op = _arguments.operation(operation)
        cdef size_t offset, nbytes
        cdef void *grown
        cdef int place = self.ends[self.count - 1] if self.count else 0
        handle._check()
        if handle.table != self.table:
            raise ValueError("a handle of another backend")
        if op not in _DESCRIBED:
            raise errors.ArgumentError("operation", operation, "an operation that computes")
        for name in _DESCRIBED[op]:
            if name not in arrays:
                needed = ", ".join(_DESCRIBED[op])
                raise errors.ArgumentError("arrays", f"no {name}", f"{needed}, for {_CALL_NAMES[op]}")
        memset(&call, 0, sizeof(call))
        call.operation = op
        call.alpha_param = 1.0
        if "x" in arrays:
            xd = self._own(handle, arrays["x"])
            call.x_desc = &xd.tensor
        if "y" in arrays:
            yd = self._own(handle, arrays["y"])
            call.y_desc = &yd.tensor
        if "dy" in arrays:
            dyd = self._own(handle, arrays["dy"])
            call.dy_desc = &dyd.tensor
        if "dx" in arrays:
            dxd = self._own(handle, arrays["dx"])
            call.dx_desc = &dxd.tensor
        call.mode = PBN_SPATIAL
        if op == PBN_OP_FORWARD_TRAINING:
            call.mode, call.alpha, call.beta, call.factor, call.epsilon = _arguments.forward_training(
                values["mode"], values["alpha"], values["beta"], xd, yd, None, values["exponential_average_factor"],
                values["epsilon"], "running_mean" in arrays,
            )
        elif op == PBN_OP_FORWARD_INFERENCE:
            call.mode, call.alpha, call.beta, call.epsilon = _arguments.forward_inference(
                values["mode"], values["alpha"], values["beta"], xd, yd, None, values["epsilon"]
            )
        elif op == PBN_OP_BACKWARD:
            call.mode, call.alpha, call.beta, call.alpha_param, call.beta_param, call.epsilon = _arguments.backward(
                values["mode"], values["alpha_data"], values["beta_data"], values["alpha_param"],
                values["beta_param"], xd, dyd, dxd, None, values["epsilon"],
            )
        elif op == PBN_OP_AXPBY:
            call.alpha, call.beta = _arguments.axpby(values["a"], values["b"], xd, yd)
        elif op == PBN_OP_FILL:
            call.alpha = _arguments.fill(values["value"], yd)
        elif op == PBN_OP_RELU:
            _arguments.relu(xd, yd)
        else:
            _arguments.relu_backward(xd, dyd, dxd)
        _check_capability(self.table, op, call.mode, yd if xd is None else xd, _CALL_NAMES[op])
        if op in (PBN_OP_FORWARD_TRAINING, PBN_OP_FORWARD_INFERENCE, PBN_OP_BACKWARD):
            key = _key(arrays["x"]), call.mode
            pd = self.descriptors.get(key)
            if pd is None:
                pd = self.descriptors[key] = derive_bn_tensor_descriptor(xd, Mode(call.mode))
            call.param_desc = &pd.tensor
        pair = _arguments.items(workspace, "workspace", "offset and bytes", 2)
        if len(pair) != 2:
            raise errors.ArgumentError("workspace", workspace, "offset and bytes")
        offset, nbytes = _arguments.byte_count(pair[0], "workspace"), _arguments.byte_count(pair[1], "workspace")
        call.workspace, call.workspace_size = <void *>offset, nbytes
        self.slots = max(self.slots, 1)  # slot 0 is the workspace's
        grown = realloc(self.calls, (self.count + 1) * sizeof(pbn_call))
        if grown == NULL:
            raise MemoryError
        self.calls = <pbn_call *>grown
        grown = realloc(self.ends, (self.count + 1) * sizeof(int))
        if grown == NULL:
            raise MemoryError
        self.ends = <int *>grown
        grown = realloc(self.places, (place + <int>len(arrays)) * sizeof(_Place))
        if grown == NULL:
            raise MemoryError
        self.places = <_Place *>grown
        for name, buffer in arrays.items():
            self.places[place].member = _MEMBERS[name]
            self.places[place].slot = self._slot(buffer.pointer)
            self.places[place].offset = buffer.pointer & _OFFSET
            place += 1
        self.calls[self.count], self.ends[self.count] = call, place
        self.count += 1

    cdef int _slot(self, object address) except -1:
        slot = address >> _SLOT_BITS
        if not 0 <= slot < _MAX_SLOTS:
            raise errors.ArgumentError("address", f"slot {slot}", f"slots from 0 to {_MAX_SLOTS - 1}")
        self.slots = max(self.slots, slot + 1)
        return slot

    def reach(self, address, nbytes, element, written):
        """Say that memory is read or written, for `apart`."""
        address, nbytes = _arguments.pointer(address, "address"), _arguments.byte_count(nbytes, "nbytes")
        element, written = _arguments.integer(element, "element", 1, 16), _arguments.boolean(written, "written")
        cdef void *grown = realloc(self.extents, (self.extent_count + 1) * sizeof(_Extent))
        cdef _Extent *extent
        if grown == NULL:
            raise MemoryError
        self.extents = <_Extent *>grown
        extent = &self.extents[self.extent_count]
        extent.slot, extent.start = self._slot(address), address & _OFFSET
        extent.end, extent.element, extent.written = extent.start + <size_t>nbytes, element, written
        self.extent_count += 1

    cdef int _begins(self, tuple addresses, uintptr_t *begins) except -1:
        cdef int i
        if len(addresses) < self.slots or len(addresses) > _MAX_SLOTS:
            given = f"{len(addresses)} addresses for {self.slots} slots"
            raise errors.ArgumentError("addresses", given, "one for each slot")
        try:
            for i in range(<int>len(addresses)):
                begins[i] = addresses[i] if type(addresses[i]) is int else _arguments.pointer(addresses[i], "addresses")
        except OverflowError:
            raise errors.ArgumentError("addresses", addresses[i], "an address of 64 bits") from None
        return 0

    def apart(self, tuple addresses not None, workspace=0):
        """Whether the memory is there and aligned, and no written range overlaps another.

        False says no more than that some are in doubt: interleaved views may be apart.

        Parameters
        ----------
        addresses : tuple of int
            As in `run`.
        workspace : int
            Bytes of slot 0 that are written.
        """
        cdef uintptr_t begins[_MAX_SLOTS]
        cdef uintptr_t start, end, other
        cdef size_t written = _arguments.byte_count(workspace, "workspace")
        cdef _Extent *a
        cdef _Extent *b
        cdef int i, j
        self._begins(addresses, begins)
        for i in range(self.extent_count):
            a = &self.extents[i]
            start, end = begins[a.slot] + a.start, begins[a.slot] + a.end
            if start == 0 or start % a.element or end < start or (start < begins[0] + written and begins[0] < end):
                return False
            for j in range(i):
                b = &self.extents[j]
                other = begins[b.slot]
                if (a.written or b.written) and start < other + b.end and other + b.start < end:
                    return False
        return True

    def run(self, Handle handle not None, tuple addresses not None):
        """Make the calls.

        Parameters
        ----------
        handle : Handle
            Of the backend that the list was made for.
        addresses : tuple of int
            Where the slots begin.

        Raises
        ------
        ClosedError, VendorError
        """
        cdef uintptr_t begins[_MAX_SLOTS]
        cdef pbn_call call  # a copy: other threads run this list too
        cdef _Place *place
        cdef int i, j = 0
        if handle.table != self.table:
            raise ValueError("a handle of another backend")
        self._begins(addresses, begins)
        with handle.lock:
            for i in range(self.count):
                call = self.calls[i]
                while j < self.ends[i]:
                    place = &self.places[j]
                    (<uintptr_t *>(<char *>&call + place.member))[0] = begins[place.slot] + place.offset
                    j += 1
                if call.workspace_size:
                    call.workspace = <void *>(begins[0] + <uintptr_t>call.workspace)
                else:
                    call.workspace = NULL
                _run(handle, &call, _CALL_NAMES[call.operation])


# ---------------------------------------------------------------- the calls on addresses

def batch_normalization_forward_training(
    handle,
    mode,
    alpha,
    beta,
    x_desc,
    x,
    y_desc,
    y,
    param_desc,
    scale,
    bias,
    exponential_average_factor,
    running_mean,
    running_variance,
    epsilon,
    saved_mean,
    saved_inv_variance,
    *,
    activation=Activation.NONE,
    activation_low=None,
    activation_high=None,
    workspace=0,
    workspace_size=0,
):
    """The vendor's forward training call on addresses, in the vendors' argument order.

    Parameters
    ----------
    handle : Handle
    mode : Mode
    alpha, beta : float
        Host-side; put into the scalar type this vendor reads.
    x_desc, y_desc, param_desc : TensorDescriptor
        Of the handle's backend; `param_desc` as `derive_bn_tensor_descriptor` gives it.
    x, y, scale, bias : int
        Addresses in the backend's memory.
    exponential_average_factor : float
        From 0 to 1.
    running_mean, running_variance : int or None
        Updated in place; both or none.
    epsilon : float
    saved_mean, saved_inv_variance : int or None
        Written; both or none.
    activation, activation_low, activation_high
        As in `Handle.forward_training`.
    workspace, workspace_size : int
        Address and bytes, at least `Handle.workspace_size`, aligned to 64.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        As in `Handle.forward_training`, which has the formula.

    Notes
    -----
    Vendor symbols: ``cudnnBatchNormalizationForwardTraining``; ``miopenBatchNormalizationForwardTraining_V2`` or,
    where it is missing, ``miopenBatchNormalizationForwardTraining``, with an activation
    ``miopenBatchNormForwardTrainingActivation``; ``dnnl_primitive_execute`` of a batch normalization forward primitive.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    cdef TensorDescriptor pd = _descriptor(param_desc, "param_desc", h.table)
    running = _pointers(h, "running_mean", running_mean, "running_variance", running_variance)
    saved = _pointers(h, "saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    values = _arguments.forward_training(
        mode, alpha, beta, xd, yd, pd, exponential_average_factor, epsilon, running[0] != 0
    )
    act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    scale, bias = h._pointer(scale, "scale"), h._pointer(bias, "bias")
    with h.lock:
        h._check()
        _forward_training(h, values, xd, x, yd, y, pd, scale, bias, running[0], running[1], saved[0], saved[1], act, ws)


def batch_normalization_forward_inference(
    handle,
    mode,
    alpha,
    beta,
    x_desc,
    x,
    y_desc,
    y,
    param_desc,
    scale,
    bias,
    running_mean,
    running_variance,
    epsilon,
    *,
    activation=Activation.NONE,
    activation_low=None,
    activation_high=None,
    workspace=0,
    workspace_size=0,
):
    """The vendor's forward inference call on addresses, in the vendors' argument order.

    Parameters
    ----------
    handle, mode, alpha, beta, x_desc, x, y_desc, y, param_desc, scale, bias, epsilon, activation, activation_low, \
activation_high, workspace, workspace_size
        As in `batch_normalization_forward_training`.
    running_mean, running_variance : int
        Addresses of the given statistics; required.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        As in `Handle.forward_inference`, which has the formula.

    Notes
    -----
    Vendor symbols: ``cudnnBatchNormalizationForwardInference``; ``miopenBatchNormalizationForwardInference_V2`` or,
    where it is missing, ``miopenBatchNormalizationForwardInference``, with an activation
    ``miopenBatchNormForwardInferenceActivation``; ``dnnl_primitive_execute`` of a batch normalization forward primitive
    with global statistics.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    cdef TensorDescriptor pd = _descriptor(param_desc, "param_desc", h.table)
    values = _arguments.forward_inference(mode, alpha, beta, xd, yd, pd, epsilon)
    act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    scale, bias = h._pointer(scale, "scale"), h._pointer(bias, "bias")
    mean = h._pointer(running_mean, "running_mean")
    variance = h._pointer(running_variance, "running_variance")
    with h.lock:
        h._check()
        _forward_inference(h, values, xd, x, yd, y, pd, scale, bias, mean, variance, act, ws)


def batch_normalization_backward(
    handle,
    mode,
    alpha_data,
    beta_data,
    alpha_param,
    beta_param,
    x_desc,
    x,
    dy_desc,
    dy,
    dx_desc,
    dx,
    param_desc,
    scale,
    dscale,
    dbias,
    epsilon,
    saved_mean,
    saved_inv_variance,
    *,
    bias=None,
    activation=Activation.NONE,
    activation_low=None,
    activation_high=None,
    workspace=0,
    workspace_size=0,
):
    """The vendor's backward call on addresses, in the vendors' argument order.

    Parameters
    ----------
    handle, mode, param_desc, scale, epsilon, activation, activation_low, activation_high, workspace, workspace_size
        As in `batch_normalization_forward_training`.
    alpha_data, beta_data : float
        Blend dx.
    alpha_param, beta_param : float
        Blend dscale and dbias.
    x_desc, dy_desc, dx_desc : TensorDescriptor
    x, dy, dx, dscale, dbias : int
        Addresses; all required.
    saved_mean, saved_inv_variance : int or None
        Both, taken as they are, or none: recomputed from x and epsilon.
    bias : int or None
        Given with an activation, and only then.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError
        As in `Handle.backward`, which has the formula.

    Notes
    -----
    Vendor symbols: ``cudnnBatchNormalizationBackward``; ``miopenBatchNormalizationBackward_V2`` or, where it is
    missing, ``miopenBatchNormalizationBackward``, with an activation ``miopenBatchNormBackwardActivation``;
    ``dnnl_primitive_execute`` of a batch normalization backward primitive.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor dyd = _descriptor(dy_desc, "dy_desc", h.table)
    cdef TensorDescriptor dxd = _descriptor(dx_desc, "dx_desc", h.table)
    cdef TensorDescriptor pd = _descriptor(param_desc, "param_desc", h.table)
    saved = _pointers(h, "saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    values = _arguments.backward(mode, alpha_data, beta_data, alpha_param, beta_param, xd, dyd, dxd, pd, epsilon)
    act = _arguments.activation(activation, activation_low, activation_high, xd.dtype)
    bias = h._pointer(bias, "bias", True)
    _arguments.activation_bias(act[0], bias or None)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, dy, dx = h._pointer(x, "x"), h._pointer(dy, "dy"), h._pointer(dx, "dx")
    scale = h._pointer(scale, "scale")
    dscale, dbias = h._pointer(dscale, "dscale"), h._pointer(dbias, "dbias")
    with h.lock:
        h._check()
        _backward(h, values, xd, x, dyd, dy, dxd, dx, pd, scale, bias, dscale, dbias, saved[0], saved[1], act, ws)


def axpby(handle, a, x_desc, x, b, y_desc, y, *, workspace=0, workspace_size=0):
    """``y = a * x + b * y`` elementwise on addresses; with ``b = 0`` the prior y is not read.

    Parameters
    ----------
    handle : Handle
    a, b : float
    x_desc, y_desc : TensorDescriptor
        Same dims and dtype; each with its own strides.
    x, y : int
        Addresses.
    workspace, workspace_size : int

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnTransformTensor``; ``miopenOpTensor``; for oneDNN plain C in the adapter.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    values = _arguments.axpby(a, b, xd, yd)
    ws = _workspace_pair(h, workspace, workspace_size)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    with h.lock:
        h._check()
        _axpby(h, values, xd, x, yd, y, ws, False)


def fill(handle, value, y_desc, y):
    """``y = value`` everywhere, on an address; what lies between the elements is not written.

    Parameters
    ----------
    handle : Handle
    value : float
        Finite and in the range of y's dtype, to which it is rounded.
    y_desc : TensorDescriptor
    y : int
        Address.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnSetTensor``; ``miopenSetTensor``; for oneDNN plain C in the adapter.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    number = _arguments.fill(value, yd)
    y = h._pointer(y, "y")
    with h.lock:
        h._check()
        _fill(h, number, yd, y)


def relu(handle, x_desc, x, y_desc, y):
    """``y = max(x, 0)`` elementwise, on addresses.

    Parameters
    ----------
    handle : Handle
    x_desc, y_desc : TensorDescriptor
        Same dims and dtype; each with its own strides.
    x, y : int
        Addresses.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnActivationForward``; ``miopenActivationForward`` (float32 and float16, packed, x and y in
    one layout); for oneDNN plain C in the adapter. A NaN stays one; MIOpen makes a NaN of minus infinity too.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor yd = _descriptor(y_desc, "y_desc", h.table)
    _arguments.relu(xd, yd)
    x, y = h._pointer(x, "x"), h._pointer(y, "y")
    with h.lock:
        h._check()
        _relu(h, xd, x, yd, y)


def relu_backward(handle, x_desc, x, dy_desc, dy, dx_desc, dx):
    """``dx = dy where x > 0, else 0`` elementwise, on addresses.

    Parameters
    ----------
    handle : Handle
    x_desc, dy_desc, dx_desc : TensorDescriptor
        Same dims and dtype; each with its own strides.
    x : int
        Address of the input of `relu`, or of its output: only the sign is read.
    dy, dx : int
        Addresses.

    Raises
    ------
    ArgumentError, UnsupportedError, VendorError

    Notes
    -----
    Vendor symbols: ``cudnnActivationBackward`` (x, dy and dx of the same strides); ``miopenActivationBackward``
    (float32 and float16, packed, all in one layout); for oneDNN plain C in the adapter. Where x is not above 0, a dy
    that is not finite gives NaN on MIOpen.
    """
    cdef Handle h = _handle(handle)
    cdef TensorDescriptor xd = _descriptor(x_desc, "x_desc", h.table)
    cdef TensorDescriptor dyd = _descriptor(dy_desc, "dy_desc", h.table)
    cdef TensorDescriptor dxd = _descriptor(dx_desc, "dx_desc", h.table)
    _arguments.relu_backward(xd, dyd, dxd)
    x, dy, dx = h._pointer(x, "x"), h._pointer(dy, "dy"), h._pointer(dx, "dx")
    with h.lock:
        h._check()
        _relu_backward(h, xd, x, dyd, dy, dxd, dx)


# ---------------------------------------------------------------- plans

def algorithms(backend):
    """Names that a plan's ``algorithm`` takes on a backend.

    Parameters
    ----------
    backend : str

    Returns
    -------
    tuple of str
        ``"auto"``, ``"fast"`` and ``"plain"``, the vendor's entry point for the mode, on every backend.
    """
    cdef const pbn_backend *table = _table(backend)
    return ("auto", "fast", *(("plain",) if table.algorithms == NULL else _names(table.algorithms)))


def numbered_algorithms(backend):
    """Those of `algorithms` that also take a plan's number behind a colon, ``"graph:2"``.

    Parameters
    ----------
    backend : str

    Returns
    -------
    tuple of str
    """
    cdef const pbn_backend *table = _table(backend)
    return () if table.numbered == NULL else _names(table.numbered)


cdef tuple _names(const char *const *texts):
    names = []
    while texts[len(names)] != NULL:
        names.append(texts[len(names)].decode())
    return tuple(names)


cdef enum:
    _SPANS = 13  # the most tensors of a call, its workspace and its reserve
    _VIEW_RANK = 8  # the most axes of an array that a key is made of


# DLPack 1.3's exchange of tensors in C: what a framework's array type has as ``__dlpack_c_exchange_api__``, a capsule
# of this table. One call fills a view of the array, without a Python object, a copy or a synchronisation.
cdef struct _DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides  # NULL: packed, the last axis innermost
    uint64_t byte_offset


cdef struct _DLExchange:
    uint32_t major
    uint32_t minor
    _DLExchange *previous
    void *allocator
    void *managed_from_object
    void *managed_to_object
    int (*view_of_object)(void *array, _DLTensor *out) except -1
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream) except -1


cdef dict _exchanges = {}  # array type -> (address of its table, 0 where it has none; whether it is writable)


cdef _DLExchange *_exchange_of(object kind, bint output) except? NULL:
    """An array type's table; for outputs PyTorch's only, whose arrays are never read-only: a view does not say."""
    cdef _DLExchange *table = NULL
    found = _exchanges.get(kind)
    if found is not None:
        return NULL if output and not found[1] else <_DLExchange *><uintptr_t>found[0]
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is not None and PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        table = <_DLExchange *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        while table != NULL and table.major != 1:
            table = table.previous
        if table != NULL and table.view_of_object == NULL:
            table = NULL
    writable = (kind.__module__ or "").partition(".")[0] == "torch"
    if len(_exchanges) < 64:  # types, of which a process has few
        # Never replaced: another thread may hold what it has found by a borrowed reference only.
        _exchanges.setdefault(kind, (<uintptr_t>table, writable))
    return NULL if output and not writable else table


cdef bint _seen(object array, _DLExchange *table, _DLTensor *view):
    """Fills a view by the array type's table; False where the table is missing or does not take this array."""
    if table == NULL:
        return False
    cdef int i
    try:
        table.view_of_object(<void *>array, view)
    except Exception:
        return False
    if not 0 <= view.ndim <= _VIEW_RANK or (view.shape == NULL and view.ndim != 0):
        return False
    # PyTorch's tensors may be negated lazily, of which the view says nothing: imaginary parts of a conjugate, whose
    # memory is every other number.
    for i in range(view.ndim):
        if view.strides == NULL or (view.shape[i] > 1 and view.strides[i] & 1):
            return True
    negated = getattr(array, "is_neg", None)
    try:
        return negated is None or not negated()
    except Exception:
        return False


cdef object _ndarray = _arrays.np.ndarray


cdef bint _of_numpy(object array, bint output, _DLTensor *view, int64_t *shape, int64_t *strides):
    """Fills a view of a NumPy array by the buffer protocol, for less than NumPy's attributes take.

    False where that does not say all (bfloat16), or the array is an output and may not be written.
    """
    cdef Py_buffer held
    cdef bint good
    cdef int i
    try:
        PyObject_GetBuffer(array, &held, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if output else 0))
    except Exception:
        return False
    # Any other format, "=f" of an array that is not aligned among them, is left to the way that names it.
    good = held.format != NULL and held.format[0] != 0 and held.format[1] == 0 and held.ndim <= _VIEW_RANK
    if good:
        good = held.format[0] in (b"f", b"d", b"e")
    if good:
        for i in range(held.ndim):
            if held.strides[i] % held.itemsize != 0:
                good = False
            shape[i], strides[i] = held.shape[i], held.strides[i] // held.itemsize
        view.data, view.byte_offset = held.buf, 0
        view.device_type, view.device_id = 1, 0
        view.ndim, view.shape, view.strides = held.ndim, shape, strides
        view.code, view.bits, view.lanes = 2, <uint8_t>(8 * held.itemsize), 1
    PyBuffer_Release(&held)  # the array itself lives on
    return good


cdef bint _current_stream(object array, int device_type, int32_t *device, uintptr_t *stream) except -1:
    """Whether the array is of such a device and its framework says in C which stream is current there."""
    cdef _DLTensor view
    cdef _DLExchange *table = _exchange_of(type(array), False)
    cdef void *found = NULL
    if table == NULL or table.current_stream == NULL or not _seen(array, table, &view):
        return False
    if view.device_type != device_type:
        return False
    if table.current_stream(view.device_type, view.device_id, &found) != 0:
        return False
    device[0], stream[0] = view.device_id, <uintptr_t>found
    return True


def current_stream(array):
    """The stream that is current for an array in its framework.

    Parameters
    ----------
    array : array

    Returns
    -------
    int or None
        None where the framework's type has no DLPack table of C functions, or the array is not on a GPU.
    """
    cdef uintptr_t stream = 0
    cdef int32_t device
    if _current_stream(array, 2, &device, &stream) or _current_stream(array, 10, &device, &stream):
        return stream
    return None


def signature(array):
    """What decides which plan serves an array: a key for a dictionary.

    Parameters
    ----------
    array : array

    Returns
    -------
    bytes, tuple or None
        Device, dtype, shape, strides, and the alignment of the address up to 16; of NumPy's arrays not the last, for
        which no plan of the CPU asks. None where the framework's type has no DLPack table of C functions, or the table
        does not take this array.
    """
    cdef _DLTensor view
    if type(array) is _ndarray:
        return array.dtype, array.shape, array.strides
    if not _seen(array, _exchange_of(type(array), False), &view):
        return None
    return _signed(&view)


cdef object _signed(const _DLTensor *view):
    cdef int64_t found[4 + 2 * _VIEW_RANK]
    cdef uintptr_t address = (<uintptr_t>view.data + view.byte_offset) | 16
    cdef int i
    found[0] = ((<int64_t>view.device_type) << 32) | view.device_id
    found[1] = ((<int64_t>view.code) << 32) | ((<int64_t>view.bits) << 16) | view.lanes
    found[2] = <int64_t>(address & (~address + 1))
    found[3] = view.strides == NULL
    for i in range(view.ndim):
        found[4 + i] = view.shape[i]
        found[4 + view.ndim + i] = 0 if view.strides == NULL else view.strides[i]
    return PyBytes_FromStringAndSize(<char *>found, (4 + 2 * view.ndim) * sizeof(int64_t))


cdef bint _is_dtype(const _DLTensor *view, int dtype) noexcept:
    if view.lanes != 1:
        return False
    if dtype == 3:  # DataType.BFLOAT16; DLPack has a code of its own for it
        return view.code == 4 and view.bits == 16
    return view.code == 2 and view.bits == (32 if dtype == 0 else 64 if dtype == 1 else 16)


cdef class Plan:
    """A call made ready by `Handle.plan_forward_training`, `~Handle.plan_forward_inference` or `~Handle.plan_backward`.

    Its calls pass addresses: of integers only that they are not NULL, aligned and apart from one another is checked,
    and where a process sees several devices that their memory is not another one's, for some 50 ns each; arrays are
    held against what was planned. They are read first; then one thread at a time runs a plan: the handle's
    lock sees to it. A signal handler that comes in between cannot call the same plan: BusyError. On a device it can be
    captured into a graph after its first run.

    Attributes
    ----------
    algorithm : str
        The one that runs, for cuDNN a name of `algorithms`.
    reason : str
        Why it was chosen.
    workspace_size : int
        Bytes that each call needs, aligned to 64; on the CPU the handle lends its own.
    reserve_size : int
        Bytes, aligned to 64, that forward training's call writes and its backward's reads; 0 without a fused residual.
    """

    cdef pbn_plan *plan
    cdef const pbn_backend *table
    cdef pbn_call call
    cdef Handle handle  # None in the handle's own cache, while no call has it
    cdef TensorDescriptor xd, yd, dxd, pd, zd  # yd: in backward dy's; zd: z's or dz's, None without
    cdef size_t data_span, other_span, out_span, param_span, residual_span
    cdef uintptr_t starts[_SPANS]
    cdef uintptr_t ends[_SPANS]
    cdef bint writes[_SPANS]
    cdef int spans
    cdef int device_id  # of the handle, -1 where that is not known
    cdef bint doubtful  # an address is misaligned, or its memory ends behind the last byte
    cdef unsigned long busy  # the thread whose call is under way, whose state `call` and the spans are; 0: none
    cdef int users  # of one in the handle's own cache: calls that have it
    cdef bint arrays  # of a Handle's own calls, which take no bare addresses
    cdef int forks  # as `_forks` was
    cdef uintptr_t alignment  # of the data addresses that it was made for, a power of two up to 16
    cdef size_t data_element, param_element
    cdef str name
    cdef readonly str algorithm
    cdef readonly str reason
    cdef readonly size_t workspace_size
    cdef readonly size_t reserve_size

    def __cinit__(self):
        self.plan = NULL
        self.busy = self.users = 0
        memset(&self.call, 0, sizeof(self.call))

    def __init__(self):
        raise TypeError(f"{type(self).__name__} is made by a Handle's plan_ methods")

    def __dealloc__(self):
        # As with a handle: the vendor's part of it is left to the parent process, and at exit to the system.
        if self.plan != NULL and self.forks == _forks and not _exiting:
            self.table.plan_destroy(self.plan)

    def __repr__(self):
        if self.xd is None:
            return f"<{type(self).__name__} never made>"
        return f"<{type(self).__name__} {self.algorithm} of {self.xd.backend}, x {self.xd!r}>"

    def _candidates(self, bint fast):
        """Algorithms that may take this plan's place, as ``"auto"`` or ``"fast"`` allows; some cannot be built."""
        cdef pbn_call call
        cdef const char *found
        cdef Handle handle = self._owner()
        with handle.lock:
            call = self.call
        # Of the last call's pointers nothing is asked, but of those it was made for their alignment.
        call.x = <void *>self.alignment
        call.dy = call.z = NULL
        call.y = call.dx = call.dz = NULL
        names = []
        while self.table.plan_candidate != NULL:
            found = self.table.plan_candidate(&call, fast, len(names))
            if found == NULL:
                break
            names.append(found.decode())
        return tuple(names)

    def _no_addresses(self):
        """Its calls take arrays only from now on: for callers whose own arguments are arrays."""
        self.arrays = True

    cdef Handle _owner(self):
        if self.handle is None:
            raise errors.ClosedError("plan")
        return self.handle

    cdef int _leave(self) except -1:
        """What `Handle._cached` has begun: in the cache it does not keep its handle alive."""
        with cython.critical_section(self):
            self.users -= 1
            if self.users == 0:
                self.handle = None
        return 0

    cdef int _begin(self, Handle handle) except -1:
        """Takes the plan for one call, under the handle's lock: a lock that lets its own thread in again."""
        handle._check()
        if self.busy:
            raise errors.BusyError(
                f"{self.name}: this plan is already running in this thread, where a signal handler has called it "
                "again; it needs a plan of its own"
            )
        self.busy = PyThread_get_thread_ident()
        self.spans, self.doubtful = 0, False
        return 0

    cdef int _make(self, object algorithm) except -1:
        """Everything but the call's descriptors and scalars, which the caller has set."""
        cdef const pbn_backend *table = self.table
        cdef const char *chosen = NULL
        cdef const char *why = NULL
        cdef int status
        cdef bytes name
        if algorithm is not None:
            _arguments.algorithm(algorithm, algorithms(self.handle.backend), numbered_algorithms(self.handle.backend))
        self.device_id = -1 if self.handle.device is None else self.handle.device
        self.data_span = _span_bytes(self.xd)
        self.other_span = _span_bytes(self.yd)
        self.out_span = _span_bytes(self.dxd) if self.dxd is not None else 0
        self.residual_span = _span_bytes(self.zd) if self.zd is not None else 0
        self.param_span = _span_bytes(self.pd)
        self.data_element, self.param_element = self.xd.dtype.itemsize, self.pd.dtype.itemsize
        self.forks = _forks
        self.alignment = (
            <uintptr_t>self.call.x | <uintptr_t>self.call.y | <uintptr_t>self.call.dy | <uintptr_t>self.call.dx
            | <uintptr_t>self.call.z | <uintptr_t>self.call.dz | 16
        )
        self.alignment &= ~self.alignment + 1
        self.handle._check()  # an array's own protocol, or a signal handler, may have closed it since
        if table.plan_create == NULL or algorithm is None:
            if algorithm is not None and self.call.activation != PBN_ACTIVATION_NONE:
                raise _unsupported(
                    self.handle, self.name,
                    "no named algorithm of this backend has an activation; algorithm None has one where "
                    "Capability.ACTIVATION is set",
                )
            status = table.workspace_size(self.handle.handle, &self.call, &self.workspace_size)
            if status != 0:
                raise _error(table, status, self.name, _shown(&self.call))
            self.algorithm = "plain"
            only = table.plan_create == NULL
            self.reason = "the one entry point of this backend" if only else "the entry point, and nothing else"
        else:
            name = (<str>algorithm).encode("ascii")
            chosen = name
            with nogil:
                status = table.plan_create(self.handle.handle, &self.call, chosen, &self.plan)
            if status != 0:
                raise _error(table, status, self.name, (*_shown(&self.call), f"algorithm={algorithm}"))
            table.plan_info(self.plan, &self.workspace_size, &self.reserve_size, &chosen, &why)
            self.algorithm, self.reason = chosen.decode(), why.decode()
        # Of the pointers only their presence and alignment counted.
        self.call.x = self.call.dy = self.call.z = NULL
        self.call.y = self.call.dx = self.call.dz = NULL
        return 0

    cdef uintptr_t _fuse(self, tuple activation, object algorithm, tuple z) except? 0:
        """Sets the activation, as `_arguments.activation` gives it, and what is added before it.

        Returns the address of a residual that is an array, else 0.
        """
        if algorithm is not None:
            _arguments.plan_activation(activation[0])
        self.call.activation, self.call.activation_low, self.call.activation_high = activation
        if z is None:
            return 0
        if algorithm is None:
            shown = True if z[1] is None else z[1]
            raise errors.ArgumentError("z", shown, "None with algorithm None: no entry point adds a residual")
        zd, address = _planned(self.handle, z[0], z[1], "z")
        _arguments.residual(activation[0], zd, self.xd)
        self.zd = zd
        return address

    cdef uintptr_t _data(self, object value, str name, TensorDescriptor planned, bint output, list kept) except 0:
        cdef uintptr_t address
        if type(value) is int and not self.arrays:
            return _plan_address(self.handle, value, name)
        address = self._viewed(value, &planned.tensor, False, output)
        if address != 0:
            return address
        buffer = self.handle._buffer(value, name, output)
        if (buffer.dtype, buffer.dims) != (planned.dtype, planned.dims) or any(
            [d != 1 and s != t for d, s, t in zip(buffer.dims, buffer.strides, planned.strides, strict=True)]
        ):  # axes of length 1 have no place in memory
            raise errors.ArgumentError(
                name,
                f"{buffer.dtype.short} dims={buffer.dims} strides={buffer.strides}",
                f"what was planned, {planned.dtype.short} dims={planned.dims} strides={planned.strides}",
            )
        kept.append(buffer)
        return _address(buffer, name)

    cdef uintptr_t _vector(self, object value, str name, bint output, list kept) except 0:
        cdef uintptr_t address
        if type(value) is int and not self.arrays:
            return _plan_address(self.handle, value, name)
        address = self._viewed(value, &self.pd.tensor, True, output)
        return address if address != 0 else self.handle._parameter(value, name, self.pd, kept, output)

    cdef uintptr_t _viewed(self, object value, const pbn_tensor *planned, bint vector, bint output) except? 0:
        """The address of an array that is what was planned, by its framework's C table or as NumPy's.

        0 where it is neither or is something else, which the way through Python names or takes.
        """
        cdef _DLTensor view
        cdef int64_t shape[_VIEW_RANK]
        cdef int64_t strides[_VIEW_RANK]
        cdef int64_t packed = 1
        cdef int i, k
        if type(value) is _ndarray:
            if not _of_numpy(value, output, &view, shape, strides):
                return 0
        else:
            if not _seen(value, _exchange_of(type(value), output), &view):
                return 0
        if (
            view.device_type != self.table.device_type
            or (self.device_id != -1 and view.device_id != self.device_id)
            or not _is_dtype(&view, planned.dtype)
            or view.data == NULL
        ):
            return 0
        # Both from the last axis on; axes of length 1 have no place in memory, and a vector may leave them out.
        k = planned.rank - 1
        for i in range(view.ndim - 1, -1, -1):
            if view.shape[i] == 1 and (vector or (k >= 0 and planned.dims[k] == 1)):
                k -= 0 if vector else 1
                continue
            while vector and k >= 0 and planned.dims[k] == 1:
                k -= 1
            if k < 0 or view.shape[i] != planned.dims[k]:
                return 0
            if (packed if view.strides == NULL else view.strides[i]) != (packed if vector else planned.strides[k]):
                return 0
            packed *= view.shape[i]
            k -= 1
        while vector and k >= 0 and planned.dims[k] == 1:
            k -= 1
        if k != -1:
            return 0
        return <uintptr_t>view.data + view.byte_offset

    cdef void _mark(self, uintptr_t address, size_t size, bint written, size_t element) noexcept:
        if address % element or address + size < address:
            self.doubtful = True
        if self.spans == _SPANS:  # no call has so many; what is behind is left to _overlap
            self.doubtful = True
            return
        self.starts[self.spans] = address
        self.ends[self.spans] = address + size
        self.writes[self.spans] = written
        self.spans += 1

    cdef bint _apart(self) noexcept:
        cdef int i, j
        for i in range(self.spans):
            for j in range(i):
                if (
                    (self.writes[i] or self.writes[j])
                    and self.starts[i] < self.ends[j]
                    and self.starts[j] < self.ends[i]
                ):
                    return False
        return True

    cdef int _overlap(self) except -1:
        """Names what is wrong, if it is: ranges that overlap may be views that interleave."""
        cdef pbn_call *call = &self.call
        outputs, inputs = [], [_region("x", <uintptr_t>call.x, self.xd)]
        if call.operation == PBN_OP_BACKWARD:
            outputs.append(_region("dx", <uintptr_t>call.dx, self.dxd))
            inputs.append(_region("dy", <uintptr_t>call.dy, self.yd))
            if call.y != NULL:
                inputs.append(_region("y", <uintptr_t>call.y, self.xd))
            if call.dz != NULL:
                outputs.append(_region("dz", <uintptr_t>call.dz, self.zd))
        else:
            outputs.append(_region("y", <uintptr_t>call.y, self.yd))
            if call.z != NULL:
                inputs.append(_region("z", <uintptr_t>call.z, self.zd))
        written = call.operation == PBN_OP_FORWARD_TRAINING
        for name, address, output in (
            ("scale", <uintptr_t>call.scale, False),
            ("bias", <uintptr_t>call.bias, False),
            ("dscale", <uintptr_t>call.dscale, True),
            ("dbias", <uintptr_t>call.dbias, True),
            ("running_mean", <uintptr_t>call.running_mean, written),
            ("running_variance", <uintptr_t>call.running_variance, written),
            ("saved_mean", <uintptr_t>call.saved_mean, written),
            ("saved_inv_variance", <uintptr_t>call.saved_inv_variance, written),
        ):
            if address:
                (outputs if output else inputs).append(_region(name, address, self.pd))
        if call.workspace_size:
            outputs.append(_memory_region((<uintptr_t>call.workspace, call.workspace_size)))
        if call.reserve_size:
            outputs.append(_memory_region((<uintptr_t>call.reserve, call.reserve_size), "reserve"))
        _arguments.disjoint(outputs, inputs)
        return 0

    cdef int _space(self, object given, str name, list kept, void **address, size_t *size) except -1:
        """Address and bytes of a workspace or reserve."""
        if given is None:
            address[0], size[0] = NULL, 0
        elif type(given) is tuple and len(<tuple>given) == 2 and type((<tuple>given)[0]) is int:
            size[0] = _arguments.byte_count((<tuple>given)[1], name)
            # (0, 0) is Handle.memory(None)
            if (<tuple>given)[0] == 0:
                _workspace_pair(self.handle, 0, size[0], name)
                address[0] = NULL
            else:
                address[0] = <void *>_plan_address(self.handle, (<tuple>given)[0], name)
        else:
            start, count = self.handle._workspace(given, kept, name)
            address[0], size[0] = <void *><uintptr_t>start, count
        return 0

    cdef int _go(self, Handle handle) except -1:
        """Checks and makes the call that is in `call`, whose spans have been marked."""
        cdef const pbn_backend *table = self.table
        cdef pbn_handle *c_handle
        cdef bint lent = False
        cdef int status
        if self.reserve_size and _short(self.call.reserve, self.call.reserve_size, self.reserve_size):
            raise errors.WorkspaceError(
                "reserve",
                f"{self.call.reserve_size} bytes at {<uintptr_t>self.call.reserve:#x}",
                f"at least {self.reserve_size} bytes, aligned to {_WORKSPACE_ALIGNMENT}, on the handle's device",
            )
        if self.call.reserve_size:
            self._mark(<uintptr_t>self.call.reserve, self.call.reserve_size, True, 1)
        if self.workspace_size and _short(self.call.workspace, self.call.workspace_size, self.workspace_size):
            lent = self.plan == NULL and self.call.workspace == NULL
            if not lent:
                raise errors.WorkspaceError(
                    "workspace",
                    f"{self.call.workspace_size} bytes at {<uintptr_t>self.call.workspace:#x}",
                    f"at least {self.workspace_size} bytes, aligned to {_WORKSPACE_ALIGNMENT}, on the handle's device",
                )
        elif self.call.workspace_size:
            self._mark(<uintptr_t>self.call.workspace, self.call.workspace_size, True, 1)
        if self.doubtful or not self._apart():
            self._overlap()
        if self.workspace_size == 0:  # whatever was given: the vendor is not to use it
            self.call.workspace, self.call.workspace_size = NULL, 0
        # A signal handler may have run until here, and closed the handle or made it lend a larger workspace elsewhere.
        if lent:
            handle._ensure_workspace(&self.call, True, self.name)
        if self.plan == NULL:
            return _run(handle, &self.call, self.name)
        handle._check()
        c_handle = handle.handle
        with nogil:
            status = table.plan_run(c_handle, self.plan, &self.call)
        if status != 0:
            raise _error(table, status, self.name, (*_shown(&self.call), f"algorithm={self.algorithm}"))
        return 0

    cdef void _lend(self, const pbn_call *given) noexcept:
        self.call.workspace, self.call.workspace_size = given.workspace, given.workspace_size
        self.call.reserve, self.call.reserve_size = given.reserve, given.reserve_size

    cdef int _statistics(self, object mean, object variance, str what, bint planned) except -1:
        """A pair must be there exactly where it was planned."""
        if (mean is None) != (not planned) or (variance is None) != (not planned):
            raise errors.ArgumentError(
                f"{what}_mean", "a pair that is" + (" not given" if planned else " given"),
                "both, as planned" if planned else f"none: the plan was made with {what}=False",
            )
        return 0

    cdef bint _given(self, object value, str name, bint planned) except -1:
        """What an activation or a residual adds to a call must be there exactly where it was planned."""
        if (value is not None) != planned:
            what = "z" if name in ("z", "dz") else "an activation"
            raise errors.ArgumentError(
                name, value, f"what was planned, with {what}" if planned else f"None: the plan was made without {what}"
            )
        return planned


cdef inline bint _short(void *address, size_t size, size_t need) noexcept:
    """Whether a workspace or reserve is too small, or not aligned as its user wants it."""
    return size < need or <uintptr_t>address % _WORKSPACE_ALIGNMENT != 0


cdef tuple _key(object buffer):
    return buffer.dtype, buffer.dims, buffer.strides


cdef object _alignment(uintptr_t addresses):
    """The largest power of two up to 16 that divides all of them."""
    return (addresses | 16) & (~(addresses | 16) + 1)


cdef object _named(object algorithm):
    """A call's algorithm as far as the cache of plans needs it; the rest is checked when the plan is made."""
    if algorithm is not None and not isinstance(algorithm, str):
        raise errors.ArgumentTypeError("algorithm", algorithm, "a string or None")
    return algorithm


cdef object _mode(object mode):
    return mode if type(mode) is Mode else _arguments.mode(mode)


cdef object _keyed(object value):
    """A float as part of a key: 0.0 and -0.0 are equal, but not the same to a vendor."""
    return (value, copysign(1.0, value)) if <double>value == 0.0 else value


cdef inline uintptr_t _plan_address(Handle handle, object value, str name) except 0:
    cdef uintptr_t address
    try:
        address = value
    except OverflowError:
        raise errors.ArgumentError(name, value, "an address from 1 to 2**64 - 1") from None
    if address == 0:
        raise errors.ArgumentError(name, value, "an address other than NULL")
    if handle.several:
        handle._here(address, name)
    return address


cdef size_t _span_bytes(TensorDescriptor t):
    cdef size_t last = 0
    for d, s in zip(t.dims, t.strides):
        last += (d - 1) * s
    return (last + 1) * t.dtype.itemsize


cdef object _like(Handle handle, object tensor, str name, object default):
    """What `tensor` says of itself: a descriptor or a `Buffer`; read before the handle's lock is taken."""
    if tensor is None and default is not None:
        return default
    if isinstance(tensor, TensorDescriptor):
        return _descriptor(tensor, name, handle.table)
    return handle._data(tensor, name)


cdef tuple _residual(Handle handle, object z, object x):
    """(what z looks like, where it lies if it is there), or None without one."""
    if z is None or z is False:
        return None
    return _like(handle, None if z is True else z, "z", x), None if z is True else z


cdef tuple _planned(Handle handle, object like, object given, str name):
    """A private descriptor of what `_like` found, which nobody else can change, and the address given or 0."""
    cdef bint placed = given is not None and not isinstance(like, TensorDescriptor)
    cdef uintptr_t address = 0
    if placed and like.pointer:  # without elements there is none
        address = _address(like, name)
    return TensorDescriptor(handle.backend, like.dtype, like.dims, like.strides), address


cdef object _tuned(Handle handle, int operation, object x, object algorithm, dict options):
    """A plan that measurements chose. Who measures needs devices and the judge, storeys above this one: found late."""
    from pybnorm import tuning

    if algorithm is None:
        raise errors.ArgumentError("tune", True, "False with algorithm None: there is nothing to choose")
    plan, reason = tuning.choose(handle, Operation(operation), x, algorithm, options)
    (<Plan>plan).reason = reason
    return plan


cdef object _plan_forward_training(
    Handle handle, object x, object y, object mode, object algorithm, object alpha, object beta, object epsilon,
    object factor, object running, object saved, tuple activation, object z,
):
    cdef ForwardTrainingPlan plan = ForwardTrainingPlan.__new__(ForwardTrainingPlan)
    cdef char here
    handle._check()
    plan.running, plan.saved = _arguments.boolean(running, "running"), _arguments.boolean(saved, "saved")
    x_like = _like(handle, x, "x", None)
    y_like = _like(handle, y, "y", x_like)
    z = _residual(handle, z, x_like)
    values = _arguments.forward_training(mode, alpha, beta, x_like, y_like, None, factor, epsilon, plan.running)
    with handle.lock:
        handle._check()
        plan.handle, plan.table = handle, handle.table
        plan.name = "batch_normalization_forward_training"
        plan.xd, x_address = _planned(handle, x_like, x, "x")
        plan.yd, y_address = _planned(handle, y_like, y, "y")
        _check_capability(plan.table, PBN_OP_FORWARD_TRAINING, values[0], plan.xd, plan.name)
        plan.pd = derive_bn_tensor_descriptor(plan.xd, values[0])
        memset(&plan.call, 0, sizeof(plan.call))
        plan.call.operation = PBN_OP_FORWARD_TRAINING
        plan.call.mode, plan.call.alpha, plan.call.beta, plan.call.factor, plan.call.epsilon = values
        plan.call.x_desc, plan.call.y_desc, plan.call.param_desc = &plan.xd.tensor, &plan.yd.tensor, &plan.pd.tensor
        plan.call.x, plan.call.y = <void *><uintptr_t>x_address, <void *><uintptr_t>y_address
        plan.call.z = <void *>plan._fuse(activation, algorithm, z)
        if plan.zd is not None:
            plan.call.z_desc = &plan.zd.tensor
        if plan.running:
            plan.call.running_mean = plan.call.running_variance = &here
        if plan.saved:
            plan.call.saved_mean = plan.call.saved_inv_variance = &here
        plan._make(algorithm)
    return plan


cdef object _plan_forward_inference(
    Handle handle, object x, object y, object mode, object algorithm, object alpha, object beta, object epsilon,
    tuple activation, object z,
):
    cdef ForwardInferencePlan plan = ForwardInferencePlan.__new__(ForwardInferencePlan)
    handle._check()
    x_like = _like(handle, x, "x", None)
    y_like = _like(handle, y, "y", x_like)
    z = _residual(handle, z, x_like)
    values = _arguments.forward_inference(mode, alpha, beta, x_like, y_like, None, epsilon)
    with handle.lock:
        handle._check()
        plan.handle, plan.table = handle, handle.table
        plan.name = "batch_normalization_forward_inference"
        plan.xd, x_address = _planned(handle, x_like, x, "x")
        plan.yd, y_address = _planned(handle, y_like, y, "y")
        _check_capability(plan.table, PBN_OP_FORWARD_INFERENCE, values[0], plan.xd, plan.name)
        plan.pd = derive_bn_tensor_descriptor(plan.xd, values[0])
        memset(&plan.call, 0, sizeof(plan.call))
        plan.call.operation = PBN_OP_FORWARD_INFERENCE
        plan.call.mode, plan.call.alpha, plan.call.beta, plan.call.epsilon = values
        plan.call.x_desc, plan.call.y_desc, plan.call.param_desc = &plan.xd.tensor, &plan.yd.tensor, &plan.pd.tensor
        plan.call.x, plan.call.y = <void *><uintptr_t>x_address, <void *><uintptr_t>y_address
        plan.call.z = <void *>plan._fuse(activation, algorithm, z)
        if plan.zd is not None:
            plan.call.z_desc = &plan.zd.tensor
        plan._make(algorithm)
    return plan


cdef object _plan_backward(
    Handle handle, object x, object dy, object dx, object mode, object algorithm, object alpha_data, object beta_data,
    object alpha_param, object beta_param, object epsilon, object saved, tuple activation, object z,
):
    cdef BackwardPlan plan = BackwardPlan.__new__(BackwardPlan)
    cdef char here
    handle._check()
    plan.saved = _arguments.boolean(saved, "saved")
    x_like = _like(handle, x, "x", None)
    dy_like = _like(handle, dy, "dy", x_like)
    dx_like = _like(handle, dx, "dx", x_like)
    z = _residual(handle, z, x_like)
    values = _arguments.backward(
        mode, alpha_data, beta_data, alpha_param, beta_param, x_like, dy_like, dx_like, None, epsilon
    )
    with handle.lock:
        handle._check()
        plan.handle, plan.table = handle, handle.table
        plan.name = "batch_normalization_backward"
        plan.xd, x_address = _planned(handle, x_like, x, "x")
        plan.yd, dy_address = _planned(handle, dy_like, dy, "dy")
        plan.dxd, dx_address = _planned(handle, dx_like, dx, "dx")
        _check_capability(plan.table, PBN_OP_BACKWARD, values[0], plan.xd, plan.name)
        plan.pd = derive_bn_tensor_descriptor(plan.xd, values[0])
        memset(&plan.call, 0, sizeof(plan.call))
        plan.call.operation = PBN_OP_BACKWARD
        plan.call.mode, plan.call.alpha, plan.call.beta = values[:3]
        plan.call.alpha_param, plan.call.beta_param, plan.call.epsilon = values[3:]
        plan.call.x_desc, plan.call.dy_desc, plan.call.dx_desc = &plan.xd.tensor, &plan.yd.tensor, &plan.dxd.tensor
        plan.call.param_desc = &plan.pd.tensor
        plan.call.x, plan.call.dy = <void *><uintptr_t>x_address, <void *><uintptr_t>dy_address
        plan.call.dx = <void *><uintptr_t>dx_address
        plan.call.dz = <void *>plan._fuse(activation, algorithm, z)
        if plan.zd is not None:
            plan.call.dz_desc = &plan.zd.tensor
        plan.activated = plan.call.activation != PBN_ACTIVATION_NONE
        plan.masked = plan.activated and algorithm is not None  # entry points make the mask from x and the bias
        if plan.masked:
            plan.call.y_desc = &plan.xd.tensor
        if plan.saved:
            plan.call.saved_mean = plan.call.saved_inv_variance = &here
        plan._make(algorithm)
    return plan


cdef class ForwardTrainingPlan(Plan):
    """A forward training call made ready; see `Plan` and `Handle.forward_training`."""

    cdef bint running
    cdef bint saved

    def __call__(
        self, x, scale, bias, y, running_mean=None, running_variance=None, saved_mean=None, saved_inv_variance=None,
        workspace=None, z=None, reserve=None,
    ):
        """Run it: addresses, or arrays as planned; the statistics and z exactly where they were planned.

        `reserve` is written, for the backward of this call: an array or (address, bytes), as `workspace` is.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        BusyError
            Called by a signal handler in the midst of a call of this plan.
        """
        cdef list kept = []
        cdef Handle handle = self._owner()
        cdef pbn_call *call = &self.call
        cdef pbn_call given  # read before the lock is taken: an array's protocol may wait for another thread
        handle._check()
        self._statistics(running_mean, running_variance, "running", self.running)
        self._statistics(saved_mean, saved_inv_variance, "saved", self.saved)
        given.x = <void *>self._data(x, "x", self.xd, False, kept)
        given.y = <void *>self._data(y, "y", self.yd, True, kept)
        given.scale = <void *>self._vector(scale, "scale", False, kept)
        given.bias = <void *>self._vector(bias, "bias", False, kept)
        if self.running:
            given.running_mean = <void *>self._vector(running_mean, "running_mean", True, kept)
            given.running_variance = <void *>self._vector(running_variance, "running_variance", True, kept)
        if self.saved:
            given.saved_mean = <void *>self._vector(saved_mean, "saved_mean", True, kept)
            given.saved_inv_variance = <void *>self._vector(saved_inv_variance, "saved_inv_variance", True, kept)
        if self._given(z, "z", self.zd is not None):
            given.z = <void *>self._data(z, "z", self.zd, False, kept)
        self._space(workspace, "workspace", kept, &given.workspace, &given.workspace_size)
        self._space(reserve, "reserve", kept, &given.reserve, &given.reserve_size)
        with handle.lock:
            self._begin(handle)
            try:
                call.x, call.y, call.scale, call.bias = given.x, given.y, given.scale, given.bias
                self._lend(&given)
                self._mark(<uintptr_t>call.x, self.data_span, False, self.data_element)
                self._mark(<uintptr_t>call.y, self.other_span, True, self.data_element)
                self._mark(<uintptr_t>call.scale, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.bias, self.param_span, False, self.param_element)
                if self.running:
                    call.running_mean, call.running_variance = given.running_mean, given.running_variance
                    self._mark(<uintptr_t>call.running_mean, self.param_span, True, self.param_element)
                    self._mark(<uintptr_t>call.running_variance, self.param_span, True, self.param_element)
                if self.saved:
                    call.saved_mean, call.saved_inv_variance = given.saved_mean, given.saved_inv_variance
                    self._mark(<uintptr_t>call.saved_mean, self.param_span, True, self.param_element)
                    self._mark(<uintptr_t>call.saved_inv_variance, self.param_span, True, self.param_element)
                if self.zd is not None:
                    call.z = given.z
                    self._mark(<uintptr_t>call.z, self.residual_span, False, self.data_element)
                self._go(handle)
            finally:
                self.busy = 0


cdef class ForwardInferencePlan(Plan):
    """A forward inference call made ready; see `Plan` and `Handle.forward_inference`."""

    def __call__(self, x, scale, bias, running_mean, running_variance, y, workspace=None, z=None):
        """Run it: addresses, or arrays as planned; z exactly where it was planned.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        BusyError
            Called by a signal handler in the midst of a call of this plan.
        """
        cdef list kept = []
        cdef Handle handle = self._owner()
        cdef pbn_call *call = &self.call
        cdef pbn_call given
        handle._check()
        given.x = <void *>self._data(x, "x", self.xd, False, kept)
        given.y = <void *>self._data(y, "y", self.yd, True, kept)
        given.scale = <void *>self._vector(scale, "scale", False, kept)
        given.bias = <void *>self._vector(bias, "bias", False, kept)
        given.running_mean = <void *>self._vector(running_mean, "running_mean", False, kept)
        given.running_variance = <void *>self._vector(running_variance, "running_variance", False, kept)
        if self._given(z, "z", self.zd is not None):
            given.z = <void *>self._data(z, "z", self.zd, False, kept)
        self._space(workspace, "workspace", kept, &given.workspace, &given.workspace_size)
        given.reserve, given.reserve_size = NULL, 0
        with handle.lock:
            self._begin(handle)
            try:
                call.x, call.y, call.scale, call.bias = given.x, given.y, given.scale, given.bias
                call.running_mean, call.running_variance = given.running_mean, given.running_variance
                self._lend(&given)
                self._mark(<uintptr_t>call.x, self.data_span, False, self.data_element)
                self._mark(<uintptr_t>call.y, self.other_span, True, self.data_element)
                self._mark(<uintptr_t>call.scale, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.bias, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.running_mean, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.running_variance, self.param_span, False, self.param_element)
                if self.zd is not None:
                    call.z = given.z
                    self._mark(<uintptr_t>call.z, self.residual_span, False, self.data_element)
                self._go(handle)
            finally:
                self.busy = 0


cdef class BackwardPlan(Plan):
    """A backward call made ready; see `Plan` and `Handle.backward`."""

    cdef bint saved
    cdef bint activated
    cdef bint masked  # by y, forward's result

    def __call__(
        self, x, dy, scale, dx, dscale, dbias, saved_mean=None, saved_inv_variance=None, workspace=None, y=None,
        bias=None, dz=None, reserve=None,
    ):
        """Run it: addresses, or arrays as planned; the saved statistics exactly where they were planned.

        With an activation also the bias and, but for algorithm None, y, the forward's result; with z also dz, written,
        and where the plan's `reserve_size` is not 0 the reserve that forward wrote: an array or (address, bytes), as
        `workspace` is.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        BusyError
            Called by a signal handler in the midst of a call of this plan.
        """
        cdef list kept = []
        cdef Handle handle = self._owner()
        cdef pbn_call *call = &self.call
        cdef pbn_call given
        handle._check()
        self._statistics(saved_mean, saved_inv_variance, "saved", self.saved)
        given.x = <void *>self._data(x, "x", self.xd, False, kept)
        given.dy = <void *>self._data(dy, "dy", self.yd, False, kept)
        given.dx = <void *>self._data(dx, "dx", self.dxd, True, kept)
        given.scale = <void *>self._vector(scale, "scale", False, kept)
        given.dscale = <void *>self._vector(dscale, "dscale", True, kept)
        given.dbias = <void *>self._vector(dbias, "dbias", True, kept)
        if self.saved:
            given.saved_mean = <void *>self._vector(saved_mean, "saved_mean", False, kept)
            given.saved_inv_variance = <void *>self._vector(saved_inv_variance, "saved_inv_variance", False, kept)
        if y is not None and self.activated and not self.masked:
            raise errors.ArgumentError("y", y, "None: the entry point masks by x and the bias")
        if self._given(y, "y", self.masked):
            given.y = <void *>self._data(y, "y", self.xd, False, kept)
        if self._given(bias, "bias", self.activated):
            given.bias = <void *>self._vector(bias, "bias", False, kept)
        if self._given(dz, "dz", self.zd is not None):
            given.dz = <void *>self._data(dz, "dz", self.zd, True, kept)
        self._space(workspace, "workspace", kept, &given.workspace, &given.workspace_size)
        self._space(reserve, "reserve", kept, &given.reserve, &given.reserve_size)
        with handle.lock:
            self._begin(handle)
            try:
                call.x, call.dy, call.dx = given.x, given.dy, given.dx
                call.scale, call.dscale, call.dbias = given.scale, given.dscale, given.dbias
                self._lend(&given)
                self._mark(<uintptr_t>call.x, self.data_span, False, self.data_element)
                self._mark(<uintptr_t>call.dy, self.other_span, False, self.data_element)
                self._mark(<uintptr_t>call.dx, self.out_span, True, self.data_element)
                self._mark(<uintptr_t>call.scale, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.dscale, self.param_span, True, self.param_element)
                self._mark(<uintptr_t>call.dbias, self.param_span, True, self.param_element)
                if self.saved:
                    call.saved_mean, call.saved_inv_variance = given.saved_mean, given.saved_inv_variance
                    self._mark(<uintptr_t>call.saved_mean, self.param_span, False, self.param_element)
                    self._mark(<uintptr_t>call.saved_inv_variance, self.param_span, False, self.param_element)
                if self.masked:
                    call.y = given.y
                    self._mark(<uintptr_t>call.y, self.data_span, False, self.data_element)
                if self.activated:
                    call.bias = given.bias
                    self._mark(<uintptr_t>call.bias, self.param_span, False, self.param_element)
                if self.zd is not None:
                    call.dz = given.dz
                    self._mark(<uintptr_t>call.dz, self.residual_span, True, self.data_element)
                self._go(handle)
            finally:
                self.busy = 0
