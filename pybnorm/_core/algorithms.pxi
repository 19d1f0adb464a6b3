# Names of algorithms.

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
    """Those of `algorithms` that also take a plan's number after a colon, ``"graph:2"``.

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
