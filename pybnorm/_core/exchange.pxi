# What an array is: its key and its address, read from what its type says in C. DLPack's structures are here only.

cdef enum:
    _VIEW_RANK = 8  # the most axes of an array that a key is made of
    _SIGN = 4 + 2 * _VIEW_RANK  # and its integers
    _CAPSULE_RANK = 64  # as NumPy's; more is a broken or hostile object
    _DL_FLOAT = 2
    _DL_BFLOAT = 4
    _DL_READ_ONLY = 1
    _DL_IS_COPIED = 2


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


cdef struct _DLManaged:
    _DLTensor tensor
    void *context
    void *deleter


cdef struct _DLManagedVersioned:
    uint32_t major
    uint32_t minor
    void *context
    void *deleter
    uint64_t flags
    _DLTensor tensor


# DLPack 1.3's exchange of tensors in C: what a framework's array type has as ``__dlpack_c_exchange_api__``, a capsule
# of this table. One call fills a view of the array, without a Python object, a copy or a synchronisation.
cdef struct _DLExchange:
    uint32_t major
    uint32_t minor
    _DLExchange *previous
    void *allocator
    void *managed_from_object
    void *managed_to_object
    int (*view_of_object)(void *array, _DLTensor *out) except -1
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream) except -1


cdef struct _View:
    _DLTensor tensor
    bint read_only
    int64_t shape[_VIEW_RANK]  # of a NumPy array; a framework's view points to its own
    int64_t strides[_VIEW_RANK]


cdef dict _exchanges = {}  # array type -> (address of its table, 0 where it has none; whether it is writable)
cdef dict _numpy_dtypes = {}  # NumPy's dtype -> the number of a DataType
cdef object _ndarray = _arrays.np.ndarray
cdef object _float32 = _arrays.np.dtype(_arrays.np.float32)


def _read_capsule(capsule, str argument):
    """Read a DLPack capsule without consuming it: its destructor still releases the tensor.

    Returns
    -------
    tuple
        Address, dims, strides, (code, bits, lanes), device type, device, writable.
    """
    cdef _DLManagedVersioned *versioned
    cdef _DLTensor *tensor
    cdef bint writable = True  # the older form has no flag for it
    cdef object address  # of any size, for what is wrong with it
    cdef int i
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <_DLManagedVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if versioned.major != 1:  # of another major version only this field and the deleter may be read
            said = f"a tensor of DLPack {versioned.major}.{versioned.minor}"
            raise errors.ArgumentError(argument, said, "DLPack 1, or older")
        tensor = &versioned.tensor
        writable = not versioned.flags & (_DL_READ_ONLY | _DL_IS_COPIED)  # results written to a copy would be lost
    elif PyCapsule_IsValid(capsule, "dltensor"):
        tensor = &(<_DLManaged *>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    else:
        raise errors.ArgumentError(argument, f"a __dlpack__ that returns {capsule!r}", "an unused DLPack capsule")
    if not 0 <= tensor.ndim <= _CAPSULE_RANK or (tensor.ndim and tensor.shape == NULL):
        said = f"a tensor of DLPack with ndim {tensor.ndim}{' and shape NULL' if tensor.shape == NULL else ''}"
        raise errors.ArgumentError(argument, said, f"0 to {_CAPSULE_RANK} axes, and their sizes")
    dims = tuple([tensor.shape[i] for i in range(tensor.ndim)])
    if any([dim < 0 for dim in dims]):
        raise errors.ArgumentError(argument, f"a tensor of DLPack with shape {dims}", "sizes of 0 or more")
    if tensor.strides == NULL:
        strides = _arrays._packed(dims)
    else:
        strides = tuple([tensor.strides[i] for i in range(tensor.ndim)])
    address = <uintptr_t>tensor.data
    if address:
        address += tensor.byte_offset
    dtype = tensor.code, tensor.bits, tensor.lanes
    return address, dims, strides, dtype, tensor.device_type, tensor.device_id, writable


_arrays._read_capsule = _read_capsule


cdef _DLExchange *_exchange_of(object kind, bint output) except? NULL:
    """The array type's table of C functions, or NULL.

    For outputs only PyTorch's: a view does not say whether its array is read-only, and PyTorch's never are.
    """
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


cdef bint _viewed(object array, bint output, _View *view) except -1:
    """Fills a view of an array; False where its type does not say in C what it is, or it is an output and read-only."""
    if type(array) is _ndarray:
        return _of_numpy(array, output, view)
    view.read_only = False
    return _of_framework(array, _exchange_of(type(array), output), &view.tensor)


cdef bint _of_framework(object array, _DLExchange *table, _DLTensor *view) except -1:
    """Fills a view by the array type's table; False where the table is missing or does not take this array."""
    if table == NULL:
        return False
    try:
        table.view_of_object(<void *>array, view)
    except Exception:
        return False
    if not 0 <= view.ndim <= _VIEW_RANK or (view.shape == NULL and view.ndim != 0):
        return False
    # A view does not say that PyTorch's tensor is negated lazily, nor that a gradient is wanted through it. Both are
    # asked at every call: no key of a kept plan has them.
    negated = getattr(array, "is_neg", None)
    try:
        return negated is None or not (negated() or _arrays.wants_gradient(array))
    except Exception:
        return False


cdef int _number_of(object dtype) except -2:
    """The DataType of a NumPy dtype; -1 for any other, for which `as_buffer` has the error."""
    if dtype is _float32:  # the usual one is not looked up
        return PBN_FLOAT32
    found = _numpy_dtypes.get(dtype)
    if found is None:
        found = _arrays._data_type(dtype)
        if found is None:
            return -1
        _numpy_dtypes[dtype] = found = int(found)
    return found


cdef bint _of_numpy(object array, bint output, _View *view) except -1:
    """Fills a view of a NumPy array by the buffer protocol, for less than NumPy's attributes take.

    False if it is not aligned, if its strides are no whole elements, or if it has another dtype: `as_buffer` then takes
    it or has the error.
    """
    cdef Py_buffer held
    cdef _DLTensor *tensor = &view.tensor
    cdef int dtype = _number_of(array.dtype)
    cdef bint good
    cdef int i
    if dtype == -1:
        return False
    try:
        PyObject_GetBuffer(array, &held, PyBUF_STRIDES)  # not its format: NumPy would write that as text, or refuse to
    except Exception:
        return False
    good = held.ndim <= _VIEW_RANK and <uintptr_t>held.buf % held.itemsize == 0 and not (output and held.readonly)
    if good:
        for i in range(held.ndim):
            if held.strides[i] % held.itemsize != 0:
                good = False
            view.shape[i], view.strides[i] = held.shape[i], held.strides[i] // held.itemsize
        tensor.data, tensor.byte_offset = held.buf, 0
        tensor.device_type, tensor.device_id = PBN_DEVICE_CPU, 0
        tensor.ndim, tensor.shape, tensor.strides = held.ndim, view.shape, view.strides
        tensor.code = _DL_BFLOAT if dtype == PBN_BFLOAT16 else _DL_FLOAT
        tensor.bits, tensor.lanes = <uint8_t>(8 * held.itemsize), 1
        view.read_only = held.readonly
    PyBuffer_Release(&held)  # the array itself lives on
    return good


cdef inline uintptr_t _start(const _View *view) noexcept:
    """Say where the array lies; 0 without memory."""
    return 0 if view.tensor.data == NULL else <uintptr_t>view.tensor.data + view.tensor.byte_offset


cdef bint _current_stream(object array, int32_t device_type, int32_t *device, uintptr_t *stream) except -1:
    """Say whether the array is of such a device and its framework says in C which stream is current there."""
    cdef _DLTensor view
    cdef _DLExchange *table = _exchange_of(type(array), False)
    cdef void *found = NULL
    if table == NULL or table.current_stream == NULL or not _of_framework(array, table, &view):
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
    cdef int32_t device, kind
    for kind in (PBN_DEVICE_CUDA, PBN_DEVICE_ROCM):
        if _current_stream(array, kind, &device, &stream):
            return stream
    return None


def describe(array, argument):
    """The part of a plan's key that an array makes, and the address of the array.

    Parameters
    ----------
    array : array
    argument : str
        Its name in errors.

    Returns
    -------
    key : bytes or tuple
        Device, dtype, shape, strides, whether it is read-only, and the alignment of its address up to 16.
    address : int

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `as_buffer`: it is no array.
    """
    cdef _View view
    if _viewed(array, False, &view):
        return _signed(&view), _start(&view)
    buffer = _arrays.as_buffer(array, argument)
    return _buffer_key(buffer), buffer.pointer


cdef tuple _buffer_key(object buffer):
    """The key of an array that a `Buffer` describes; `as_buffer` has seen to it that its fields cannot change."""
    return *buffer[1:7], _alignment(buffer.pointer & 31)


cdef object _signed(const _View *view):
    cdef int64_t found[_SIGN]
    return PyBytes_FromStringAndSize(<char *>found, _sign(view, found))


cdef size_t _sign(const _View *view, int64_t *found) noexcept:
    """Write an array's part of a key, which says how long it is; return its bytes."""
    cdef const _DLTensor *tensor = &view.tensor
    cdef int i
    found[0] = ((<int64_t>tensor.device_type) << 32) | tensor.device_id
    found[1] = ((<int64_t>tensor.code) << 32) | ((<int64_t>tensor.bits) << 16) | tensor.lanes
    found[2] = _alignment(_start(view))
    found[3] = (tensor.ndim << 2) | (2 if view.read_only else 0) | (tensor.strides == NULL)
    for i in range(tensor.ndim):
        found[4 + i] = tensor.shape[i]
        found[4 + tensor.ndim + i] = 0 if tensor.strides == NULL else tensor.strides[i]
    return (4 + 2 * tensor.ndim) * sizeof(int64_t)


cdef bint _is_dtype(const _DLTensor *view, int dtype) noexcept:
    if view.lanes != 1:
        return False
    if dtype == PBN_BFLOAT16:  # DLPack has a code of its own for it
        return view.code == _DL_BFLOAT and view.bits == 16
    return view.code == _DL_FLOAT and view.bits == (32 if dtype == PBN_FLOAT32 else 64 if dtype == PBN_FLOAT64 else 16)


cdef inline uintptr_t _alignment(uintptr_t addresses) noexcept:
    """The largest power of two up to 16 that divides all of them."""
    return (addresses | 16) & (~(addresses | 16) + 1)
