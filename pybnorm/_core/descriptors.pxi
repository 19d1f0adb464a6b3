# Tensor descriptors and the derive call.

cdef class TensorDescriptor:
    """TensorDescriptor(backend, dtype, dims, strides=None)\n--\n\nShape, memory order and
    element type of a tensor, as a vendor's descriptor.

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

    Examples
    --------
    >>> pybnorm.TensorDescriptor("onednn", "f32", (8, 64, 32, 32))
    <TensorDescriptor onednn f32 dims=(8, 64, 32, 32) strides=(65536, 1024, 32, 1)>
    >>> pybnorm.TensorDescriptor("onednn", "bf16", (8, 64, 32, 32), (65536, 1, 2048, 64))
    <TensorDescriptor onednn bf16 dims=(8, 64, 32, 32) strides=(65536, 1, 2048, 64)>
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
    cdef bytes key  # dtype, dims and strides: descriptors that agree in it stand for each other in a plan
    cdef object __weakref__

    def __cinit__(self):
        memset(&self.tensor, 0, sizeof(self.tensor))
        self.open = self.created = False

    def __init__(self, backend, dtype, dims, strides=None):
        shape = _arguments.dims(dims)
        steps = _arguments.strides(_arguments.packed_strides(shape) if strides is None else strides, shape)
        kind = _arguments.data_type(dtype)
        backend = load(backend).backend
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
        cdef Py_ssize_t size = self.tensor.rank * sizeof(int64_t)
        self.key = (
            # dtype, and rank, which follows it in memory
            PyBytes_FromStringAndSize(<char *>&self.tensor.dtype, 2 * sizeof(int32_t))
            + PyBytes_FromStringAndSize(<char *>self.tensor.dims, size)
            + PyBytes_FromStringAndSize(<char *>self.tensor.strides, size)
        )
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

        Raises
        ------
        ArgumentError
            `pointer` is 0, or the shape or strides are against the rules.
        LibraryNotFoundError, LibraryLoadError
            The backend's library is not here, or cannot be used.

        Examples
        --------
        >>> owner = pybnorm.TensorDescriptor("onednn", "f32", (2, 3, 4))
        >>> pybnorm.TensorDescriptor.from_pointer("onednn", owner.pointer).dims
        (2, 3, 4)
        """
        cdef uintptr_t address = _arguments.pointer(pointer, "pointer")
        backend = load(backend).backend
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
        """The descriptor's contents, read back from the vendor's library.

        Returns
        -------
        dtype : DataType
        dims, strides : tuple of int

        Raises
        ------
        ClosedError
            After `close`.

        Examples
        --------
        >>> pybnorm.TensorDescriptor("onednn", "f32", (2, 3, 4)).query()
        (DataType.FLOAT32, (2, 3, 4), (12, 4, 1))
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
        """True once `close` has been called."""
        return not self.open

    def close(self):
        """End the use of this descriptor; further calls do nothing.

        Examples
        --------
        >>> desc = pybnorm.TensorDescriptor("onednn", "f32", (2, 3, 4))
        >>> desc.close()
        >>> desc.closed
        True
        """
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

    Examples
    --------
    >>> x_desc = pybnorm.TensorDescriptor("onednn", "bf16", (8, 64, 32, 32))
    >>> pybnorm.derive_bn_tensor_descriptor(x_desc, "spatial")
    <TensorDescriptor onednn f32 dims=(1, 64, 1, 1) strides=(64, 1, 1, 1)>
    >>> pybnorm.derive_bn_tensor_descriptor(x_desc, "per_activation")
    <TensorDescriptor onednn f32 dims=(1, 64, 32, 32) strides=(65536, 1024, 32, 1)>
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


cdef TensorDescriptor _parameters_of(TensorDescriptor x, int mode):
    """The same by the rule, for a call that the backend does not have."""
    dims = _arguments.derived_dims(x.dims, Mode(mode))
    return TensorDescriptor(x.backend, _arguments.derived_data_type(x.dtype), dims, _arguments.packed_strides(dims))


cdef int _check_capability(
    const pbn_backend *table, int operation, int mode, TensorDescriptor x, str function
) except -1:
    cdef const char *why = NULL
    if table.capability(operation, mode, x.tensor.dtype, x.tensor.layout, x.tensor.rank, &why) != 0:
        return 0
    text = why.decode() if why != NULL else ""
    raise _not_supported(x.backend, function, text, (f"x={x!r} mode={Mode(mode).name}",))
