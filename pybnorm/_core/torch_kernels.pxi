# Kernels in PyTorch's operators of batch norm, and in those of pybnorm.torch, computed by plans on any device.
#
# PyTorch's C++ autograd stays around its own: no Python runs in a step. What reaches a kernel is PyTorch's stable C
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
    int (*aoti_torch_new_tensor_handle)(void *tensor, void **made) noexcept nogil
    int (*aoti_torch_new_uninitialized_tensor)(void **made) noexcept nogil
    int (*aoti_torch_delete_tensor_object)(void *tensor) noexcept nogil
    int (*aoti_torch_get_data_ptr)(void *tensor, void **address) noexcept nogil
    int (*aoti_torch_get_dim)(void *tensor, int64_t *rank) noexcept nogil
    int (*aoti_torch_get_sizes)(void *tensor, int64_t **sizes) noexcept nogil
    int (*aoti_torch_get_strides)(void *tensor, int64_t **strides) noexcept nogil
    int (*aoti_torch_get_dtype)(void *tensor, int32_t *dtype) noexcept nogil
    int (*aoti_torch_get_device_type)(void *tensor, int32_t *device) noexcept nogil
    int (*aoti_torch_get_device_index)(void *tensor, int32_t *index) noexcept nogil
    int (*aoti_torch_empty_strided)(
        int64_t rank, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index,
        void **made
    ) noexcept nogil
    int (*aoti_torch_is_defined)(void *tensor, uint8_t *defined) noexcept nogil
    uint8_t (*aoti_torch_grad_mode_is_enabled)() noexcept nogil
    int (*torch_list_size)(void *list, size_t *size) noexcept nogil
    int (*torch_list_get_item)(void *list, size_t index, uint64_t *value) noexcept nogil
    int (*torch_delete_list)(void *list) noexcept nogil
    void (*operator_delete)(void *memory) noexcept nogil
    void (*throw_runtime_error)(const char *text) noexcept nogil
    int (*aoti_torch_get_current_cuda_stream)(int32_t index, void **stream) noexcept nogil
    int (*aoti_torch_create_cuda_guard)(int32_t index, void **guard) noexcept nogil
    int (*aoti_torch_delete_cuda_guard)(void *guard) noexcept nogil

# In the order of the members.
cdef tuple _TORCH_SYMBOLS = (
    b"aoti_torch_library_init_impl", b"torch_library_impl", b"aoti_torch_delete_library_object",
    b"aoti_torch_new_tensor_handle", b"aoti_torch_new_uninitialized_tensor", b"aoti_torch_delete_tensor_object",
    b"aoti_torch_get_data_ptr", b"aoti_torch_get_dim", b"aoti_torch_get_sizes", b"aoti_torch_get_strides",
    b"aoti_torch_get_dtype", b"aoti_torch_get_device_type", b"aoti_torch_get_device_index",
    b"aoti_torch_empty_strided", b"aoti_torch_is_defined", b"aoti_torch_grad_mode_is_enabled", b"torch_list_size",
    b"torch_list_get_item", b"torch_delete_list",
)
# Of the C++ runtime: what optional values were made for, and the one way to give PyTorch an error.
cdef tuple _CXX_SYMBOLS = (b"_ZdlPv", b"_ZSt21__throw_runtime_errorPKc")
cdef tuple _CUDA_SYMBOLS = (
    b"aoti_torch_get_current_cuda_stream", b"aoti_torch_create_cuda_guard", b"aoti_torch_delete_cuda_guard",
)

cdef _TorchShim _torch
cdef dict _torch_libraries = {}  # addresses of PyTorch's libraries, by dispatch key and operator: each has one kernel
cdef object _torch_threads = None
cdef object _torch_host = None

cdef enum:
    _TORCH_TEXT = 2048
    _TORCH_MOST = 14  # arguments of an operator
    _TORCH_MOST_RESULTS = 4
    # Numbers of PyTorch's, which its interface keeps.
    _TORCH_UINT8 = 0
    _TORCH_FLOAT16 = 5
    _TORCH_FLOAT32 = 6
    _TORCH_FLOAT64 = 7
    _TORCH_BFLOAT16 = 15
    _TORCH_CPU = 0
    _TORCH_CUDA = 1
    # What a plan is for, beside dims and the like.
    _TRAINS = 1
    _UPDATES = 2
    _ACTIVATES = 4
    _ADDS = 8
    _OWN = 16  # parameters are of x's own 16 bits
    _SUMS = 32  # the gradients of parameters alone
    # What a kernel did.
    _REFUSED = 0
    _DONE = 1
    _FAILED = 2
    # Operators, as in the tables below; each backward is the number after its forward.
    _NATIVE = 0
    _NATIVE_BACKWARD = 1
    _CUDNN = 2
    _CUDNN_BACKWARD = 3
    _MIOPEN = 4
    _MIOPEN_BACKWARD = 5
    _OURS = 6
    _OURS_BACKWARD = 7
    _TORCH_OPERATORS = 8

cdef uint64_t _TORCH_VERSION = (<uint64_t>2 << 56) | (<uint64_t>10 << 48)  # of the interface that is spoken here

cdef tuple _TORCH_NAMES = (
    "native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    "miopen_batch_norm", "miopen_batch_norm_backward", "batch_norm_", "batch_norm_backward",
)
# Of each argument: a tensor, an optional one, a bool, an integer, a float, an optional float or a list of bools.
cdef const char *_torch_kinds[_TORCH_OPERATORS]
_torch_kinds[_NATIVE] = b"toooobff"
_torch_kinds[_NATIVE_BACKWARD] = b"ttooooobfl"
_torch_kinds[_CUDNN] = _torch_kinds[_MIOPEN] = b"ttooobff"
_torch_kinds[_CUDNN_BACKWARD] = b"tttooooft"
_torch_kinds[_MIOPEN_BACKWARD] = b"tttoooof"
# Ours begin with the arguments of PyTorch's. Forward goes on with residual, relu and fallback; backward with bias, y,
# whether there was a residual, and fallback.
_torch_kinds[_OURS] = b"toooobffobb"
_torch_kinds[_OURS_BACKWARD] = b"ttooooobfloobb"


cdef struct _TorchKey:
    int32_t operation
    int32_t dtype
    int32_t rank
    int32_t flags
    int32_t device
    int32_t index
    double epsilon
    double factor
    int64_t dims[PBN_MAX_RANK]
    int64_t strides[PBN_MAX_RANK]


cdef struct _TorchTensor:
    void *handle
    uintptr_t address
    int32_t dtype
    int32_t device
    int32_t index
    int64_t rank
    int64_t *dims
    int64_t *strides


cdef double _torch_float(uint64_t value) noexcept nogil:
    cdef double found
    memcpy(&found, &value, sizeof(found))
    return found


cdef bint _torch_read(void *handle, _TorchTensor *found) noexcept nogil:
    """Read a tensor's dtype, dims and strides; false where PyTorch does not give all of them."""
    cdef void *address = NULL
    found.handle = handle
    if (
        _torch.aoti_torch_get_data_ptr(handle, &address) != 0
        or _torch.aoti_torch_get_dim(handle, &found.rank) != 0
        or _torch.aoti_torch_get_sizes(handle, &found.dims) != 0
        or _torch.aoti_torch_get_strides(handle, &found.strides) != 0
        or _torch.aoti_torch_get_dtype(handle, &found.dtype) != 0
        or _torch.aoti_torch_get_device_type(handle, &found.device) != 0
        or _torch.aoti_torch_get_device_index(handle, &found.index) != 0
    ):
        return False
    found.address = <uintptr_t>address
    return True


cdef int32_t _torch_wide(const _TorchTensor *x) noexcept nogil:
    """The dtype of saved statistics beside x."""
    return _TORCH_FLOAT64 if x.dtype == _TORCH_FLOAT64 else _TORCH_FLOAT32


cdef int32_t _torch_parameters(const _TorchTensor *x, void **handles, int count) noexcept nogil:
    """The dtype of parameters and running statistics beside x: x's own where the first one that is there has it."""
    cdef int32_t dtype = -1
    cdef int i
    for i in range(count):
        if handles[i] != NULL and _torch.aoti_torch_get_dtype(handles[i], &dtype) == 0:
            break
    return dtype if dtype == x.dtype else _torch_wide(x)


cdef int _torch_item(int32_t dtype) noexcept nogil:
    return 8 if dtype == _TORCH_FLOAT64 else 4 if dtype == _TORCH_FLOAT32 else 2


cdef bint _torch_vector(void *handle, const _TorchTensor *x, int32_t dtype, uintptr_t *address) noexcept nogil:
    """The address of an optional vector beside x; 0 where there is none. Whether plans take it."""
    cdef _TorchTensor vector
    address[0] = 0
    if handle == NULL:
        return True
    if not _torch_read(handle, &vector) or vector.device != x.device or vector.index != x.index:
        return False
    if vector.dtype != dtype or vector.rank != 1 or vector.dims[0] != x.dims[1]:
        return False
    if (vector.strides[0] != 1 and x.dims[1] != 1) or vector.address == 0:
        return False
    if vector.address % _torch_item(vector.dtype) != 0:
        return False
    address[0] = vector.address
    return True


cdef bint _torch_data(void *handle, _TorchTensor *x) noexcept nogil:
    """Say whether plans take a data tensor: dense, contiguous or channels last."""
    cdef int64_t packed = 1
    cdef int64_t last = 1
    cdef bint contiguous = True
    cdef bint channels_last = True
    cdef int64_t i
    if handle == NULL or not _torch_read(handle, x) or x.rank < 2 or x.rank > PBN_MAX_RANK:
        return False
    if x.device != _TORCH_CPU and x.device != _TORCH_CUDA:
        return False
    if x.dtype != _TORCH_BFLOAT16 and (x.dtype < _TORCH_FLOAT16 or x.dtype > _TORCH_FLOAT64):
        return False
    if x.address % _torch_item(x.dtype) != 0:
        return False
    for i in range(x.rank - 1, -1, -1):
        if x.dims[i] == 0 or x.address == 0:
            return False
        contiguous = contiguous and (x.strides[i] == packed or x.dims[i] == 1)
        packed *= x.dims[i]
    last = x.dims[1]
    channels_last = (x.rank == 4 or x.rank == 5) and (x.strides[1] == 1 or x.dims[1] == 1)  # as PyTorch has it
    for i in range(x.rank - 1, -1, -1):
        if i == 1:
            continue
        channels_last = channels_last and (x.strides[i] == last or x.dims[i] == 1)
        last *= x.dims[i]
    return contiguous or channels_last


cdef bint _torch_alike(const _TorchTensor *one, const _TorchTensor *x) noexcept nogil:
    """Say whether two tensors have one dtype, device, shape and order of elements."""
    cdef int64_t i
    if one.dtype != x.dtype or one.rank != x.rank or one.device != x.device or one.index != x.index:
        return False
    for i in range(x.rank):
        if one.dims[i] != x.dims[i] or (x.dims[i] != 1 and one.strides[i] != x.strides[i]):
            return False
    return True


cdef void _torch_key(
    _TorchKey *key, int operation, _TorchTensor *x, int flags, double epsilon, double factor
) noexcept nogil:
    cdef int64_t i
    memset(key, 0, sizeof(key[0]))
    key.operation, key.dtype, key.rank, key.flags = operation, x.dtype, <int32_t>x.rank, flags
    key.device, key.index, key.epsilon, key.factor = x.device, x.index, epsilon, factor
    for i in range(x.rank):
        key.dims[i], key.strides[i] = x.dims[i], x.strides[i]


cdef int _torch_fail(object error, char *text) except -1:
    """Makes an exception the text of the error that PyTorch will raise."""
    name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    shown = f"{name}{error}".encode(errors="replace")[:_TORCH_TEXT - 1]
    memcpy(text, <const char *>shown, len(shown))
    text[len(shown)] = 0
    return 0


cdef object _torch_constant(_TorchKey *key, int value):
    """A vector that takes the place of a scale or bias. Keep it until the call has returned."""
    dtype = key.dtype if key.dtype == _TORCH_FLOAT64 or key.flags & _OWN else _TORCH_FLOAT32
    return _torch_host.constant(value, key.dims[1], dtype, key.index if key.device == _TORCH_CUDA else None)


cdef int _torch_run(_TorchKey *key, pbn_arguments *arguments, char *text) noexcept with gil:
    """Run a key's plan on addresses. Constants take the place of a scale or bias that is not there.

    `text`: the error after _FAILED. _REFUSED: nothing was written; the kernel that was there before gets the call.
    """
    cdef Plan plan
    cdef Handle handle
    cdef void *guard = NULL
    cdef void *stream = NULL
    cdef void *memory = NULL
    cdef void *space = NULL
    cdef int64_t size
    cdef int64_t one = 1
    cdef Cache ready
    workspace = ones = zeros = means = None
    try:
        if key.device == _TORCH_CUDA and (
            _torch.aoti_torch_create_cuda_guard(key.index, &guard) != 0
            or _torch.aoti_torch_get_current_cuda_stream(key.index, &stream) != 0
        ):
            return _REFUSED
        name = PyBytes_FromStringAndSize(<char *>key, sizeof(key[0]))
        ready = _torch_threads.ready
        found = (<dict>ready).get(name)
        if found is None:
            found = _torch_host.plan(
                name, key.operation, key.dtype, [key.dims[i] for i in range(key.rank)],
                [key.strides[i] for i in range(key.rank)], key.index if key.device == _TORCH_CUDA else None,
                (key.flags & _UPDATES) != 0, (key.flags & _ACTIVATES) != 0,
                (key.flags & _ADDS) != 0, (key.flags & _OWN) != 0, (key.flags & _SUMS) != 0, key.epsilon, key.factor,
            )
        plan = found
        if plan is None:
            return _REFUSED
        handle = plan._owner()
        if key.device == _TORCH_CUDA and plan.workspace_size:
            size = plan.workspace_size
            if _torch.aoti_torch_empty_strided(
                1, &size, &one, _TORCH_UINT8, key.device, key.index, &memory
            ) != 0 or _torch.aoti_torch_get_data_ptr(memory, &space) != 0:
                return _REFUSED
            workspace = <uintptr_t>space, size
        if key.device == _TORCH_CUDA:
            handle._follow(key.index, <uintptr_t>stream)
        if arguments.scale.address == 0:
            ones = _torch_constant(key, 1)
            arguments.scale.address = ones.data_ptr()
        if arguments.bias.address == 0 and (key.operation != PBN_OP_BACKWARD or key.flags & _ACTIVATES):
            zeros = _torch_constant(key, 0)
            arguments.bias.address = zeros.data_ptr()
        if arguments.running_mean.address == 0 and key.operation == PBN_OP_FORWARD_INFERENCE:  # of a gradient
            means = _torch_constant(key, 0)
            arguments.running_mean.address = means.data_ptr()
        plan._call(handle, arguments, workspace, None)
    except KeyboardInterrupt:  # while it waited for the handle's lock
        PyErr_SetInterrupt()
        return _REFUSED
    except (errors.ArgumentError, errors.UnsupportedError, errors.ClosedError):
        return _REFUSED
    except BaseException as error:
        _torch_fail(error, text)
        return _FAILED
    finally:
        if memory != NULL:  # returns to the stream's pool, after the call
            _torch.aoti_torch_delete_tensor_object(memory)
        if guard != NULL:
            _torch.aoti_torch_delete_cuda_guard(guard)
    return _DONE


cdef void _torch_free(uint64_t *handles, int count) noexcept nogil:
    cdef int i
    for i in range(count):
        _torch.aoti_torch_delete_tensor_object(<void *>handles[i])


cdef void _torch_drop(int which, uint64_t *stack) noexcept nogil:
    """Give back what a kernel owns."""
    cdef const char *kind = _torch_kinds[which]
    cdef int i
    for i in range(<int>strlen(kind)):
        if kind[i] == c"t":
            _torch_free(&stack[i], 1)
        elif kind[i] == c"o" and stack[i] != 0:
            _torch_free(<uint64_t *>stack[i], 1)
            _torch.operator_delete(<void *>stack[i])
        elif kind[i] == c"l":
            _torch.torch_delete_list(<void *>stack[i])


cdef void _torch_handles(int which, uint64_t *stack, void **given) noexcept nogil:
    """The tensors of a call: NULL for those that are not there, for which PyTorch also gives tensors of nothing."""
    cdef const char *kind = _torch_kinds[which]
    cdef uint8_t defined
    cdef int i
    for i in range(<int>strlen(kind)):
        given[i] = NULL
        if kind[i] == c"t":
            given[i] = <void *>stack[i]
        elif kind[i] == c"o" and stack[i] != 0:
            given[i] = <void *>(<uint64_t *>stack[i])[0]
        defined = 1
        if given[i] != NULL and (_torch.aoti_torch_is_defined(given[i], &defined) != 0 or not defined):
            given[i] = NULL


cdef bint _torch_results(
    const _TorchTensor *x, int32_t dtype, int64_t length, int count, bint gradient, uint64_t *made, uintptr_t *addresses
) noexcept nogil:
    """Make results: one like x, two vectors of `dtype` and `length`, and one like x, or of no bytes: no `gradient`."""
    cdef int64_t none = 0
    cdef int64_t one = 1
    cdef void *handle = NULL
    cdef void *address = NULL
    cdef int i
    cdef int status
    for i in range(count):
        if i == 0 or (i == 3 and gradient):
            status = _torch.aoti_torch_empty_strided(x.rank, x.dims, x.strides, x.dtype, x.device, x.index, &handle)
        elif i < 3:
            status = _torch.aoti_torch_empty_strided(1, &length, &one, dtype, x.device, x.index, &handle)
        else:
            status = _torch.aoti_torch_empty_strided(1, &none, &one, _TORCH_UINT8, x.device, x.index, &handle)
        if status != 0:
            _torch_free(made, i)
            return False
        made[i] = <uint64_t>handle
        if _torch.aoti_torch_get_data_ptr(handle, &address) != 0:
            _torch_free(made, i + 1)
            return False
        addresses[i] = <uintptr_t>address
    return True


cdef bint _torch_empty(const _TorchTensor *x, uint64_t *made) noexcept nogil:
    """Put an empty tensor of x's dtype in the place of a result; if there is memory."""
    cdef int64_t none = 0
    cdef int64_t one = 1
    cdef void *handle = NULL
    if _torch.aoti_torch_empty_strided(1, &none, &one, x.dtype, x.device, x.index, &handle) != 0:
        return False
    _torch_free(made, 1)
    made[0] = <uint64_t>handle
    return True


cdef int _torch_forward(int which, uint64_t *stack, void **handles, uint64_t *made, char *text) noexcept nogil:
    cdef _TorchTensor x
    cdef _TorchTensor residual
    cdef _TorchKey key
    cdef int flags = 0
    cdef uintptr_t vectors[4]
    cdef uintptr_t results[4]
    cdef pbn_arguments arguments
    cdef int32_t dtype
    cdef bint training = (stack[5] & 0xff) != 0
    cdef int outputs = 4 if which == _CUDNN else 3
    cdef int64_t count = 1
    cdef int64_t i
    cdef int status
    memset(&arguments, 0, sizeof(arguments))
    if not _torch_data(handles[0], &x):
        return _REFUSED
    dtype = _torch_parameters(&x, &handles[1], 4)
    flags = _OWN if dtype != _torch_wide(&x) else 0
    for i in range(4):
        if not _torch_vector(handles[i + 1], &x, dtype, &vectors[i]):
            return _REFUSED
    for i in range(x.rank):
        count *= 1 if i == 1 else x.dims[i]
    # Of one value per channel PyTorch has an error of its own, or a running variance that is not finite.
    if (vectors[2] == 0) != (vectors[3] == 0) or (count == 1 if training else vectors[2] == 0):
        return _REFUSED
    if which == _OURS:
        flags |= (_ACTIVATES if stack[9] & 0xff else 0)
        if handles[8] != NULL:
            if not flags & _ACTIVATES or not _torch_data(handles[8], &residual) or not _torch_alike(&residual, &x):
                return _REFUSED
            flags |= _ADDS
            arguments.z.address = residual.address
    if training or which == _OURS or x.device == _TORCH_CUDA:  # else PyTorch's backward asks for the parameters' dtype
        dtype = _torch_wide(&x)
    if not _torch_results(&x, dtype, x.dims[1] if training else 0, outputs, False, made, results):
        return _REFUSED
    if training:
        _torch_key(
            &key, PBN_OP_FORWARD_TRAINING, &x,
            flags | _TRAINS | (_UPDATES if vectors[2] != 0 else 0),
            _torch_float(stack[7]), _torch_float(stack[6]) if vectors[2] != 0 else 0,
        )
        arguments.saved_mean.address, arguments.saved_inv_variance.address = results[1], results[2]
    else:
        _torch_key(&key, PBN_OP_FORWARD_INFERENCE, &x, flags, _torch_float(stack[7]), 0)
    arguments.x.address, arguments.y.address = x.address, results[0]
    arguments.scale.address, arguments.bias.address = vectors[0], vectors[1]
    arguments.running_mean.address, arguments.running_variance.address = vectors[2], vectors[3]
    status = _torch_run(&key, &arguments, text)
    if status != _DONE:
        _torch_free(made, outputs)
    return status


cdef int _torch_backward(int which, uint64_t *stack, void **handles, uint64_t *made, char *text) noexcept nogil:
    cdef _TorchTensor dy
    cdef _TorchTensor x
    cdef _TorchKey key
    cdef _TorchTensor y
    cdef uintptr_t vectors[4]
    cdef uintptr_t results[4]
    cdef uint64_t wanted[4]
    cdef pbn_arguments arguments
    cdef bint vendor = which == _CUDNN_BACKWARD or which == _MIOPEN_BACKWARD  # of training, and take x first
    cdef bint constant = not vendor and (stack[7] & 0xff) == 0  # the statistics are the running ones
    cdef bint adds = which == _OURS_BACKWARD and (stack[12] & 0xff) != 0
    cdef bint alone  # dx by constants: an inference of dy, with mean and bias 0
    cdef int statistics = 3 if constant else 5
    cdef int outputs = 4 if which == _OURS_BACKWARD else 3
    cdef int flags = _UPDATES if constant else _TRAINS
    cdef int32_t dtype
    cdef int i
    cdef int status
    memset(&arguments, 0, sizeof(arguments))
    for i in range(3):
        wanted[i] = 1
        if not vendor and _torch.torch_list_get_item(<void *>stack[9], <size_t>i, &wanted[i]) != 0:
            return _REFUSED
        wanted[i] &= 0xff
    wanted[3] = adds
    alone = constant and wanted[0] != 0 and wanted[1] == 0 and wanted[2] == 0
    if handles[statistics] == NULL or handles[statistics + 1] == NULL:
        return _REFUSED
    if not _torch_data(handles[vendor], &dy) or not _torch_data(handles[not vendor], &x):
        return _REFUSED
    if not _torch_alike(&dy, &x):
        return _REFUSED
    dtype = _torch_parameters(&x, &handles[2], 3 if constant else 1)
    flags |= _OWN if dtype != _torch_wide(&x) else 0
    if constant and not alone and handles[2] == NULL and flags & _OWN:  # whose sums are float32
        return _REFUSED
    for i in range(3):
        if not _torch_vector(
            handles[2 if i == 0 else statistics + i - 1], &x, dtype if i == 0 or constant else _torch_wide(&x),
            &vectors[i],
        ):
            return _REFUSED
    if which == _OURS_BACKWARD and (handles[11] != NULL or adds):
        if constant or handles[11] == NULL or not _torch_data(handles[11], &y) or not _torch_alike(&y, &x):
            return _REFUSED
        if not _torch_vector(handles[10], &x, dtype, &vectors[3]):
            return _REFUSED
        flags |= _ACTIVATES | (_ADDS if adds else 0)
        arguments.y.address, arguments.bias.address = y.address, vectors[3]
    if wanted[0] == 0 and not flags & _ACTIVATES:
        flags |= _SUMS
    if not _torch_results(&x, dtype, 0 if alone else x.dims[1], outputs, adds, made, results):
        return _REFUSED
    arguments.x.address, arguments.dy.address, arguments.dx.address = x.address, dy.address, results[0]
    arguments.scale.address, arguments.dscale.address, arguments.dbias.address = vectors[0], results[1], results[2]
    if constant:
        arguments.running_mean.address, arguments.running_variance.address = vectors[1], vectors[2]
    else:
        arguments.saved_mean.address, arguments.saved_inv_variance.address = vectors[1], vectors[2]
    if alone:
        arguments.x.address, arguments.y.address, arguments.running_mean.address = dy.address, results[0], 0
        _torch_key(&key, PBN_OP_FORWARD_INFERENCE, &x, flags & _OWN, _torch_float(stack[8]), 0)
    else:
        _torch_key(&key, PBN_OP_BACKWARD, &x, flags, _torch_float(stack[7 if vendor else 8]), 0)
    if adds:
        arguments.dz.address = results[3]
    status = _torch_run(&key, &arguments, text)
    if status == _DONE and which == _NATIVE_BACKWARD and flags & _SUMS and not _torch_empty(&x, &made[0]):
        status = _REFUSED
    for i in range(outputs if which == _OURS_BACKWARD and status == _DONE else 0):  # nobody wants some of them
        if wanted[i] == 0 and not _torch_empty(&x, &made[i]):
            status = _REFUSED
    if status != _DONE:
        _torch_free(made, outputs)
    return status


cdef object _torch_python(int kind, uint64_t value, void *handle):
    """An argument as Python has it."""
    cdef size_t size = 0
    cdef size_t i
    cdef uint64_t item = 0
    if kind == c"b":
        return (value & 0xff) != 0
    if kind == c"f":
        return _torch_float(value)
    if kind == c"l":
        found = []
        if _torch.torch_list_size(<void *>value, &size) != 0:
            raise MemoryError
        for i in range(size):
            if _torch.torch_list_get_item(<void *>value, i, &item) != 0:
                raise MemoryError
            found.append((item & 0xff) != 0)
        return found
    if handle == NULL:
        return None
    if _torch_host.steals and _torch.aoti_torch_new_tensor_handle(handle, &handle) != 0:
        raise MemoryError
    return _torch_host.tensor(PyCapsule_New(handle, NULL, NULL))


cdef int _torch_elsewhere(
    int which, uint64_t *stack, void **handles, uint64_t *made, char *text
) noexcept with gil:
    """Have a call computed without our kernel: by PyTorch's own, or for an operator of ours by its Python function."""
    cdef const char *kind = _torch_kinds[which]
    cdef int32_t device
    cdef void *handle = NULL
    cdef int done = 0
    cdef int i
    cuda = False
    try:
        arguments = []
        for i in range(<int>strlen(kind)):
            arguments.append(_torch_python(kind[i], stack[i], handles[i]))
            if handles[i] != NULL and _torch.aoti_torch_get_device_type(handles[i], &device) == 0:
                cuda = cuda or device == _TORCH_CUDA
        results = _torch_host.own(_TORCH_NAMES[which], cuda, arguments)
        for tensor in results:
            if tensor is not None:
                handle = PyCapsule_GetPointer(_torch_host.handle(tensor), NULL)
            elif _torch.aoti_torch_new_uninitialized_tensor(&handle) != 0:
                raise MemoryError
            made[done] = <uint64_t>handle
            done += 1
    except BaseException as error:
        _torch_free(made, done)
        _torch_fail(error, text)
        if isinstance(error, KeyboardInterrupt):
            PyErr_SetInterrupt()  # within autograd: a RuntimeError alone would be taken for one
        return _FAILED
    return _DONE


cdef void _torch_call(int which, uint64_t *stack, uint64_t outputs) noexcept nogil:
    """A call of an operator: arguments are on the stack, and results in their place afterwards."""
    cdef void *handles[_TORCH_MOST]
    cdef uint64_t made[_TORCH_MOST_RESULTS]
    cdef char text[_TORCH_TEXT]
    cdef int status
    text[0] = 0
    _torch_handles(which, stack, handles)
    if which % 2 == 0:
        status = _torch_forward(which, stack, handles, made, text)
    else:
        status = _torch_backward(which, stack, handles, made, text)
    if status == _REFUSED:
        status = _torch_elsewhere(which, stack, handles, made, text)
    _torch_drop(which, stack)
    if status == _FAILED:
        _torch.throw_runtime_error(text)
    memcpy(stack, made, outputs * sizeof(made[0]))


cdef void _torch_native(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_NATIVE, stack, outputs)


cdef void _torch_native_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_NATIVE_BACKWARD, stack, outputs)


cdef void _torch_cudnn(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_CUDNN, stack, outputs)


cdef void _torch_cudnn_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_CUDNN_BACKWARD, stack, outputs)


cdef void _torch_miopen(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_MIOPEN, stack, outputs)


cdef void _torch_miopen_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_MIOPEN_BACKWARD, stack, outputs)


cdef void _torch_ours(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_OURS, stack, outputs)


cdef void _torch_ours_backward(uint64_t *stack, uint64_t inputs, uint64_t outputs) noexcept nogil:
    _torch_call(_OURS_BACKWARD, stack, outputs)


cdef _torch_kernel _torch_kernels[_TORCH_OPERATORS]
_torch_kernels[_NATIVE] = _torch_native
_torch_kernels[_NATIVE_BACKWARD] = _torch_native_backward
_torch_kernels[_CUDNN] = _torch_cudnn
_torch_kernels[_CUDNN_BACKWARD] = _torch_cudnn_backward
_torch_kernels[_MIOPEN] = _torch_miopen
_torch_kernels[_MIOPEN_BACKWARD] = _torch_miopen_backward
_torch_kernels[_OURS] = _torch_ours
_torch_kernels[_OURS_BACKWARD] = _torch_ours_backward


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


def install_torch_kernels(threads, host, operators, files):
    """Have PyTorch's dispatcher call these kernels and no others, in this process; what is there already stays.

    Parameters
    ----------
    threads : threading.local
        With the cache ``ready``.
    host : object
        What a kernel asks in Python. ``plan(...)``: makes the plan of a
        key and its parts, and keeps it in that cache; ``constant(value, length, dtype, index)``: a vector on
        the CPU, or a GPU of that index; ``own(name, cuda, arguments)``: the
        results of the kernel that would be called without this one; ``tensor(capsule)``, ``handle(tensor)``: between
        PyTorch's handles and its tensors; ``steals``: whether the first takes the handle.
    operators : sequence of (str, str)
        Dispatch keys and names of PyTorch's operators.
    files : (str, str or None)
        PyTorch's libraries, the second for tensors on a GPU.
    """
    global _torch, _torch_threads, _torch_host
    cdef _TorchShim found
    cdef void *library = NULL
    cdef int status = 0
    cdef int i
    memset(&found, 0, sizeof(found))
    _torch_look_up(files[0], _TORCH_SYMBOLS, <void **>&found)
    _torch_look_up("libstdc++.so.6", _CXX_SYMBOLS, <void **>&found.operator_delete)
    if files[1] is not None:
        _torch_look_up(files[1], _CUDA_SYMBOLS, <void **>&found.aoti_torch_get_current_cuda_stream)
    _torch = found
    _torch_threads, _torch_host = threads, host
    for pair in [pair for pair in _torch_libraries if pair not in operators]:
        _torch_remove(pair)
    for pair in [pair for pair in operators if pair not in _torch_libraries]:
        key, name = (<str>pair[0]).encode(), (<str>pair[1]).encode()
        i = _TORCH_NAMES.index(pair[1])
        status = _torch.aoti_torch_library_init_impl(
            b"pybnorm" if i >= _OURS else b"aten", <const char *><bytes>key, b"pybnorm", 0, &library
        )
        if status == 0:
            _torch_libraries[pair] = <uintptr_t>library
            status = _torch.torch_library_impl(library, <const char *><bytes>name, _torch_kernels[i], _TORCH_VERSION)
        if status != 0:
            remove_torch_kernels()
            raise errors.LibraryLoadError(
                "PyTorch did not take the kernels; what it wrote to standard error says why", backend="torch"
            )


cdef int _torch_remove(tuple pair) except -1:
    _torch.aoti_torch_delete_library_object(<void *><uintptr_t>_torch_libraries.pop(pair))
    return 0


def remove_torch_kernels():
    """PyTorch's own kernels are in their place again."""
    for pair in list(_torch_libraries):
        _torch_remove(pair)
