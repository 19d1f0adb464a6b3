# DLPack's C exchange of tensors and streams.

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
