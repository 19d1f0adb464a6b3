# Kernels for PyTorch's dispatcher: its own operators of batch norm on the CPU, computed by plans.
#
# PyTorch's C++ autograd stays around them: no Python runs in a step. What reaches a kernel is PyTorch's stable C
# interface (torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h, as of PyTorch 2.10): its functions
# are looked up at run time, as a vendor's are. A kernel gets its arguments as 64-bit values on a stack: a tensor as a
# handle that it owns, an optional one as NULL or the address of such a value, a list as a handle, a float by its bits.

ctypedef void (*_torch_kernel)(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil

cdef struct _TorchShim:
    int (*aoti_torch_library_init_impl)(
        const char *space, const char *key, const char *file, uint32_t line, void **made
    ) noexcept nogil
    int (*torch_library_impl)(void *library, const char *name, _torch_kernel kernel, uint64_t version) noexcept nogil
    int (*aoti_torch_delete_library_object)(void *library) noexcept nogil
    int (*torch_call_dispatcher)(
        const char *name, const char *overload, uint64_t *stack, uint64_t version
    ) noexcept nogil
    int (*aoti_torch_delete_tensor_object)(void *tensor) noexcept nogil
    int (*aoti_torch_get_data_ptr)(void *tensor, void **address) noexcept nogil
    int (*aoti_torch_get_dim)(void *tensor, int64_t *rank) noexcept nogil
    int (*aoti_torch_get_sizes)(void *tensor, int64_t **sizes) noexcept nogil
    int (*aoti_torch_get_strides)(void *tensor, int64_t **strides) noexcept nogil
    int (*aoti_torch_get_dtype)(void *tensor, int32_t *dtype) noexcept nogil
    int (*aoti_torch_empty_strided)(
        int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index,
        void **made
    ) noexcept nogil
    int (*aoti_torch_is_defined)(void *tensor, uint8_t *defined) noexcept nogil
    int (*torch_delete_list)(void *list) noexcept nogil
    void (*operator_delete)(void *memory) noexcept nogil
    void (*throw_runtime_error)(const char *text) noexcept nogil

# In the order of the members.
cdef tuple _TORCH_SYMBOLS = (
    b"aoti_torch_library_init_impl", b"torch_library_impl", b"aoti_torch_delete_library_object",
    b"torch_call_dispatcher", b"aoti_torch_delete_tensor_object", b"aoti_torch_get_data_ptr", b"aoti_torch_get_dim",
    b"aoti_torch_get_sizes", b"aoti_torch_get_strides", b"aoti_torch_get_dtype", b"aoti_torch_empty_strided",
    b"aoti_torch_is_defined", b"torch_delete_list",
)
# Of the C++ runtime: what optional values were made for, and the one way to give PyTorch an error.
cdef tuple _CXX_SYMBOLS = (b"_ZdlPv", b"_ZSt21__throw_runtime_errorPKc")

cdef _TorchShim _torch
cdef void *_torch_library = NULL
cdef object _torch_threads = None
cdef object _torch_plan = None

cdef enum:
    _TORCH_TEXT = 512
    # Numbers of PyTorch's, which its interface keeps.
    _TORCH_FLOAT16 = 5
    _TORCH_FLOAT32 = 6
    _TORCH_FLOAT64 = 7
    _TORCH_BFLOAT16 = 15
    _TORCH_CPU = 0
    # What a plan is for, beside dims and the like.
    _TRAINS = 1
    _UPDATES = 2
    # What a kernel did.
    _REFUSED = 0
    _DONE = 1
    _FAILED = 2

cdef uint64_t _TORCH_VERSION = (<uint64_t>2 << 56) | (<uint64_t>10 << 48)  # of the interface that is spoken here


cdef struct _TorchKey:
    int32_t operation
    int32_t dtype
    int32_t rank
    int32_t flags
    double epsilon
    double factor
    int64_t dims[PBN_MAX_RANK]
    int64_t strides[PBN_MAX_RANK]


cdef struct _TorchTensor:
    void *handle
    uintptr_t address
    int32_t dtype
    int64_t rank
    int64_t *dims
    int64_t *strides


cdef double _torch_float(uint64_t value) noexcept nogil:
    return (<double *>&value)[0]


cdef bint _torch_read(void *handle, _TorchTensor *found) noexcept nogil:
    """What a tensor is; whether PyTorch told all of it."""
    cdef void *address = NULL
    found.handle = handle
    if (
        _torch.aoti_torch_get_data_ptr(handle, &address) != 0
        or _torch.aoti_torch_get_dim(handle, &found.rank) != 0
        or _torch.aoti_torch_get_sizes(handle, &found.dims) != 0
        or _torch.aoti_torch_get_strides(handle, &found.strides) != 0
        or _torch.aoti_torch_get_dtype(handle, &found.dtype) != 0
    ):
        return False
    found.address = <uintptr_t>address
    return True


cdef bint _torch_vector(uint64_t value, int64_t channels, uintptr_t *address) noexcept nogil:
    """The address of an optional vector of float32; 0 where there is none. Whether plans take it."""
    cdef _TorchTensor vector
    address[0] = 0
    if value == 0:
        return True
    if not _torch_read(<void *>(<uint64_t *>value)[0], &vector):
        return False
    if vector.dtype != _TORCH_FLOAT32 or vector.rank != 1 or vector.dims[0] != channels:
        return False
    if (vector.strides[0] != 1 and channels != 1) or vector.address == 0 or vector.address % 4 != 0:
        return False
    address[0] = vector.address
    return True


cdef bint _torch_data(uint64_t value, _TorchTensor *x) noexcept nogil:
    """Whether plans take a data tensor: dense, contiguous or channels last, aligned."""
    cdef int64_t packed = 1
    cdef int64_t last = 1
    cdef bint contiguous = True
    cdef bint channels_last = True
    cdef int64_t i
    if not _torch_read(<void *>value, x) or x.rank < 2 or x.rank > PBN_MAX_RANK or x.address % 16 != 0:
        return False
    if x.dtype != _TORCH_FLOAT32 and x.dtype != _TORCH_FLOAT16 and x.dtype != _TORCH_BFLOAT16:
        return False
    for i in range(x.rank - 1, -1, -1):
        if x.dims[i] == 0 or x.address == 0:
            return False
        contiguous = contiguous and (x.strides[i] == packed or x.dims[i] == 1)
        packed *= x.dims[i]
    last = x.dims[1]
    channels_last = x.strides[1] == 1 or x.dims[1] == 1
    for i in range(x.rank - 1, -1, -1):
        if i == 1:
            continue
        channels_last = channels_last and (x.strides[i] == last or x.dims[i] == 1)
        last *= x.dims[i]
    return contiguous or channels_last


cdef void _torch_key(
    _TorchKey *key, int operation, _TorchTensor *x, int flags, double epsilon, double factor
) noexcept nogil:
    cdef int64_t i
    memset(key, 0, sizeof(key[0]))
    key.operation, key.dtype, key.rank, key.flags = operation, x.dtype, <int32_t>x.rank, flags
    key.epsilon, key.factor = epsilon, factor
    for i in range(x.rank):
        key.dims[i], key.strides[i] = x.dims[i], x.strides[i]


cdef int _torch_run(
    _TorchKey *key, uintptr_t *addresses, int count, int scale, int bias, char *text
) noexcept with gil:
    """Run a key's plan on addresses, 0 for those that are not there, in the order of the table.

    `scale` and `bias`: where constants take the place of a vector that is not there; -1: none does. `text`: the error
    after _FAILED. _REFUSED: nothing was written; PyTorch's own kernel gets the call.
    """
    cdef Plan plan
    cdef void *given[PBN_MOST_TENSORS]
    cdef int i
    try:
        name = PyBytes_FromStringAndSize(<char *>key, sizeof(key[0]))
        found = _torch_threads.ready.get(name)
        if found is None:
            found = _torch_plan(
                name, key.operation, key.dtype, [key.dims[i] for i in range(key.rank)],
                [key.strides[i] for i in range(key.rank)], (key.flags & _TRAINS) != 0, (key.flags & _UPDATES) != 0,
                key.epsilon, key.factor,
            )
        plan, ones, zeros = found
        if plan is None:
            return _REFUSED
        if addresses[scale] == 0:
            addresses[scale] = ones.ctypes.data
        if bias >= 0 and addresses[bias] == 0:
            addresses[bias] = zeros.ctypes.data
        for i in range(plan.count):
            given[i] = <void *>plan if i < count and addresses[i] != 0 else <void *>None
        plan._call(plan._owner(), given, None, None, addresses)
    except KeyboardInterrupt:  # while it waited for the handle's lock
        PyErr_SetInterrupt()
        return _REFUSED
    except (errors.ArgumentError, errors.UnsupportedError, errors.ClosedError):
        return _REFUSED
    except BaseException as error:
        shown = f"{type(error).__name__}: {error}".encode()[:_TORCH_TEXT - 1]
        memcpy(text, <const char *>shown, len(shown))
        text[len(shown)] = 0
        return _FAILED
    return _DONE


cdef void _torch_drop(uint64_t *stack, int tensors, int optional) noexcept nogil:
    """Give back what a kernel owns: tensors, then optional ones."""
    cdef int i
    for i in range(tensors + optional):
        if stack[i] != 0 and i >= tensors:
            _torch.aoti_torch_delete_tensor_object(<void *>(<uint64_t *>stack[i])[0])
            _torch.operator_delete(<void *>stack[i])
        elif i < tensors:
            _torch.aoti_torch_delete_tensor_object(<void *>stack[i])


cdef void _torch_absent(uint64_t *stack, int first, int count) noexcept nogil:
    """Make NULL of optional tensors that PyTorch gives as tensors of nothing."""
    cdef uint8_t defined
    cdef int i
    for i in range(first, first + count):
        defined = 1
        if stack[i] != 0:
            _torch.aoti_torch_is_defined(<void *>(<uint64_t *>stack[i])[0], &defined)
        if defined == 0:
            _torch_drop(&stack[i], 0, 1)
            stack[i] = 0


cdef bint _torch_results(_TorchTensor *x, int64_t length, uint64_t *made, uintptr_t *addresses) noexcept nogil:
    """A tensor like x and two vectors of float32 as long as `length`; whether there is memory for them."""
    cdef int64_t one = 1
    cdef void *handle = NULL
    cdef void *address = NULL
    cdef int i
    cdef int status
    for i in range(3):
        if i == 0:
            status = _torch.aoti_torch_empty_strided(x.rank, x.dims, x.strides, x.dtype, _TORCH_CPU, 0, &handle)
        else:
            status = _torch.aoti_torch_empty_strided(1, &length, &one, _TORCH_FLOAT32, _TORCH_CPU, 0, &handle)
        if status == 0:
            made[i] = <uint64_t>handle
            status = _torch.aoti_torch_get_data_ptr(handle, &address)
            addresses[i] = <uintptr_t>address
            if status != 0:
                _torch_drop(made, i + 1, 0)
                return False
        else:
            _torch_drop(made, i, 0)
            return False
    return True


cdef int _torch_forward(uint64_t *stack, uint64_t *made, char *text) noexcept nogil:
    cdef _TorchTensor x
    cdef _TorchKey key
    cdef uintptr_t vectors[4]
    cdef uintptr_t results[3]
    cdef uintptr_t addresses[8]
    cdef bint training = (stack[5] & 0xff) != 0
    cdef int64_t count = 1
    cdef int64_t i
    cdef int status
    if not _torch_data(stack[0], &x):
        return _REFUSED
    for i in range(4):
        if not _torch_vector(stack[i + 1], x.dims[1], &vectors[i]):
            return _REFUSED
    for i in range(x.rank):
        count *= 1 if i == 1 else x.dims[i]
    # Of one value per channel PyTorch has an error of its own, or a running variance that is not finite.
    if (vectors[2] == 0) != (vectors[3] == 0) or (count == 1 if training else vectors[2] == 0):
        return _REFUSED
    if not _torch_results(&x, x.dims[1] if training else 0, made, results):
        return _REFUSED
    if training:
        _torch_key(
            &key, PBN_OP_FORWARD_TRAINING, &x, _TRAINS | (_UPDATES if vectors[2] != 0 else 0), _torch_float(stack[7]),
            _torch_float(stack[6]) if vectors[2] != 0 else 0,
        )
        addresses[0], addresses[1], addresses[2], addresses[3] = x.address, vectors[0], vectors[1], results[0]
        addresses[4], addresses[5], addresses[6], addresses[7] = vectors[2], vectors[3], results[1], results[2]
        status = _torch_run(&key, addresses, 8, 1, 2, text)
    else:
        _torch_key(&key, PBN_OP_FORWARD_INFERENCE, &x, 0, _torch_float(stack[7]), 0)
        addresses[0], addresses[1], addresses[2], addresses[3] = x.address, vectors[0], vectors[1], vectors[2]
        addresses[4], addresses[5] = vectors[3], results[0]
        status = _torch_run(&key, addresses, 6, 1, 2, text)
    if status != _DONE:
        _torch_drop(made, 3, 0)
    return status


cdef int _torch_backward(uint64_t *stack, uint64_t *made, char *text) noexcept nogil:
    cdef _TorchTensor dy
    cdef _TorchTensor x
    cdef _TorchKey key
    cdef uintptr_t vectors[3]
    cdef uintptr_t results[3]
    cdef uintptr_t addresses[8]
    cdef int64_t i
    cdef int status
    if (stack[7] & 0xff) == 0 or stack[5] == 0 or stack[6] == 0:
        return _REFUSED
    if not _torch_data(stack[0], &dy) or not _torch_data(stack[1], &x) or dy.dtype != x.dtype or dy.rank != x.rank:
        return _REFUSED
    for i in range(x.rank):
        if dy.dims[i] != x.dims[i] or (x.dims[i] != 1 and dy.strides[i] != x.strides[i]):
            return _REFUSED
    for i in range(3):
        if not _torch_vector(stack[2 if i == 0 else i + 4], x.dims[1], &vectors[i]):
            return _REFUSED
    if not _torch_results(&x, x.dims[1], made, results):
        return _REFUSED
    _torch_key(&key, PBN_OP_BACKWARD, &x, _TRAINS, _torch_float(stack[8]), 0)
    addresses[0], addresses[1], addresses[2], addresses[3] = x.address, dy.address, vectors[0], results[0]
    addresses[4], addresses[5], addresses[6], addresses[7] = results[1], results[2], vectors[1], vectors[2]
    status = _torch_run(&key, addresses, 8, 2, -1, text)
    if status != _DONE:
        _torch_drop(made, 3, 0)
    return status


cdef int _torch_forward_elsewhere(uint64_t *stack) noexcept nogil:
    """PyTorch's own forward, by the operators whose kernels stay as they are. They take what is on the stack."""
    cdef uint64_t running
    cdef int i
    if stack[3] == 0 or stack[4] == 0:
        if stack[3] != stack[4]:
            return 1
        stack[3], stack[4], stack[5] = stack[5], stack[6], stack[7]
        return _torch.torch_call_dispatcher("aten::_native_batch_norm_legit", "no_stats", stack, _TORCH_VERSION)
    for i in range(3, 5):
        running = (<uint64_t *>stack[i])[0]
        _torch.operator_delete(<void *>stack[i])
        stack[i] = running
    return _torch.torch_call_dispatcher("aten::_native_batch_norm_legit", "", stack, _TORCH_VERSION)


cdef int _torch_ones(int64_t channels, int32_t dtype, void **made) noexcept nogil:
    """A vector of ones of a floating dtype."""
    cdef int64_t one = 1
    cdef int64_t i
    cdef void *address = NULL
    if dtype != _TORCH_FLOAT16 and dtype != _TORCH_BFLOAT16 and dtype != _TORCH_FLOAT64:
        dtype = _TORCH_FLOAT32
    if _torch.aoti_torch_empty_strided(1, &channels, &one, dtype, _TORCH_CPU, 0, made) != 0:
        return 1
    if _torch.aoti_torch_get_data_ptr(made[0], &address) != 0:
        _torch.aoti_torch_delete_tensor_object(made[0])
        return 1
    for i in range(channels):
        if dtype == _TORCH_FLOAT64:
            (<double *>address)[i] = 1
        elif dtype == _TORCH_FLOAT32:
            (<float *>address)[i] = 1
        else:
            (<uint16_t *>address)[i] = 0x3C00 if dtype == _TORCH_FLOAT16 else 0x3F80
    return 0


cdef int _torch_backward_elsewhere(uint64_t *stack) noexcept nogil:
    """PyTorch's own backward, as `_torch_forward_elsewhere`: this operator has the same kernel, and wants a weight."""
    cdef uint64_t arguments[11]
    cdef _TorchTensor x
    cdef _TorchTensor mean
    cdef int64_t none = 0
    cdef int64_t one = 1
    cdef void *made = NULL
    cdef int status
    memcpy(arguments, stack, 10 * sizeof(stack[0]))
    if not _torch_read(<void *>stack[1], &x) or x.rank < 2:
        return 1
    if stack[2] != 0:
        arguments[2] = (<uint64_t *>stack[2])[0]
        _torch.operator_delete(<void *>stack[2])
    else:
        if stack[5] == 0 or not _torch_read(<void *>(<uint64_t *>stack[5])[0], &mean):
            mean.dtype = x.dtype
        if _torch_ones(x.dims[1], mean.dtype, &made) != 0:
            return 1
        arguments[2] = <uint64_t>made
    if _torch.aoti_torch_empty_strided(1, &none, &one, _TORCH_FLOAT32, _TORCH_CPU, 0, &made) != 0:
        return 1
    arguments[10] = <uint64_t>made  # what cuDNN reserves, of which there is nothing
    status = _torch.torch_call_dispatcher("aten::batch_norm_backward", "", arguments, _TORCH_VERSION)
    memcpy(stack, arguments, 3 * sizeof(stack[0]))
    return status


cdef void _torch_batch_norm(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    """aten::native_batch_norm."""
    cdef uint64_t made[3]
    cdef char text[_TORCH_TEXT]
    cdef int status
    _torch_absent(stack, 1, 4)
    status = _torch_forward(stack, made, text)
    if status == _REFUSED:
        if _torch_forward_elsewhere(stack) == 0:
            return
        _torch.throw_runtime_error("PyTorch's own native_batch_norm failed; what it wrote to standard error says why")
    _torch_drop(stack, 1, 4)
    if status == _FAILED:
        _torch.throw_runtime_error(text)
    memcpy(stack, made, sizeof(made))


cdef void _torch_batch_norm_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    """aten::native_batch_norm_backward."""
    cdef uint64_t made[3]
    cdef char text[_TORCH_TEXT]
    cdef int status
    _torch_absent(stack, 2, 5)
    status = _torch_backward(stack, made, text)
    if status == _REFUSED:
        if _torch_backward_elsewhere(stack) == 0:
            return
        _torch.throw_runtime_error(
            "PyTorch's own native_batch_norm_backward failed; what it wrote to standard error says why"
        )
    _torch_drop(stack, 2, 5)
    _torch.torch_delete_list(<void *>stack[9])
    if status == _FAILED:
        _torch.throw_runtime_error(text)
    memcpy(stack, made, sizeof(made))


cdef int _torch_look_up(str file, tuple names, void **slots) except -1:
    """Fill slots with a loaded library's functions."""
    cdef pbn_library library
    cdef int i
    path = os.fsencode(file)
    if pbn_dl_open(&library, path, True) != 0:
        raise errors.LibraryLoadError(f"{file}: {library.message.decode(errors='replace')}", backend="torch")
    for i, name in enumerate(names):
        slots[i] = pbn_dl_symbol(library.handle, <const char *><bytes>name)
        if slots[i] == NULL:
            raise errors.SymbolNotFoundError(
                f"{file} has no symbol {name.decode()}; PyTorch 2.10 or newer has it", backend="torch"
            )
    return 0


def install_torch_kernels(file, threads, plan_of):
    """Have PyTorch's dispatcher call the kernels, in this process.

    Parameters
    ----------
    file : str
        PyTorch's library, which is loaded.
    threads : threading.local
        With the cache ``ready``.
    plan_of : callable
        Makes (plan, ones, zeros) of a key and its parts, and keeps them in that cache.
    """
    global _torch, _torch_library, _torch_threads, _torch_plan
    cdef _TorchShim found
    cdef void *library = NULL
    _torch_look_up(file, _TORCH_SYMBOLS, <void **>&found)
    _torch_look_up("libstdc++.so.6", _CXX_SYMBOLS, <void **>&found.operator_delete)
    _torch = found
    _torch_threads, _torch_plan = threads, plan_of
    status = _torch.aoti_torch_library_init_impl(b"aten", b"CPU", b"pybnorm", 0, &library)
    if status == 0:
        status = _torch.torch_library_impl(library, b"native_batch_norm", _torch_batch_norm, _TORCH_VERSION)
        status |= _torch.torch_library_impl(
            library, b"native_batch_norm_backward", _torch_batch_norm_backward, _TORCH_VERSION
        )
        if status != 0:
            _torch.aoti_torch_delete_library_object(library)
    if status != 0:
        raise errors.LibraryLoadError(
            "PyTorch did not take the kernels; what it wrote to standard error says why", backend="torch"
        )
    _torch_library = library


def remove_torch_kernels():
    """PyTorch's own kernels are in their place again."""
    global _torch_library
    if _torch_library != NULL:
        _torch.aoti_torch_delete_library_object(_torch_library)
        _torch_library = NULL
