# Batch norm, an addition and ReLU with PyTorch's own autograd in C++ around them, so that no Python runs in backward.
#
# PyTorch's stable C interface cannot make a node of its autograd. But PyTorch has an operator, and its backward, for
# kernels from elsewhere: none is there for it on CUDA, and its node of autograd takes four tensors and keeps the result
# and what is returned beside it. It is aten::_scaled_dot_product_fused_attention_overrideable; a call of ours uses
#
#     query, key, value, attn_bias   for x, weight, bias, residual
#     dropout_p, scale, is_causal    for factor, epsilon, deterministic
#     output                         for y
#     logsumexp                      for what backward reads, as bytes: the batch's mean and inverse standard deviation,
#                                    a small workspace for both directions, and the reserve
#     cum_seq_q, cum_seq_k           only where Python computed, for the inverse and the reserve, with the mean before
#     max_q, max_k                   for whether there are running statistics, and that the call is ours
#
# It has no place for running statistics, which have no derivative: they are left in the thread for the kernel. Where
# there are none left the call is somebody else's, and gets the error that it would get without these kernels.
#
# Batch norm alone must not keep its result, which ReLU may write over: it goes through aten::miopen_batch_norm, which
# PyTorch without ROCm has with its node of autograd, and without a kernel that computes.

cdef extern from *:
    """
    struct pbn_statistics { void *mean, *variance; int here, calling; };
    static __thread struct pbn_statistics pbn_left;
    """
    struct pbn_statistics:
        void *mean
        void *variance
        int here  # a call of ours that has not reached its kernel
        int calling
    pbn_statistics pbn_left  # for this thread's next call

cdef dict _NOTHING_NAMED = {}
cdef dict _torch_errors = {}  # by thread: raised in Python within a call of ours

cdef enum:
    _OURS = 0x706E6F72  # in max_k
    _RELU_ARGUMENTS = 14
    _ROOM = 32768  # bytes of workspace: what plans of small tensors need, whose memory takes longer than their work

cdef const char *_NOT_OURS = (
    b"this operator is not implemented for this device; pybnorm's kernel under its name is for pybnorm's own calls"
)


cdef bint _torch_is_ours(bint alike, char *text) noexcept nogil:
    """Whether this is the call of ours that the thread began; `alike`: as ours look; `text`: what to say if not."""
    if not pbn_left.here or not alike:
        memcpy(text, _NOT_OURS, strlen(_NOT_OURS) + 1)
        return False
    pbn_left.here = False  # what Python calls on the way may be somebody else's
    return True


cdef bint _torch_keep(object error) except -1:
    """Keep an exception for the call of ours within which it was raised: PyTorch has its text alone. Whether one is."""
    if pbn_left.calling:
        _torch_errors[PyThread_get_thread_ident()] = error
    return pbn_left.calling


cdef object _torch_through(object operator, tuple given, dict named, object mean, object variance):
    """The first result of an operator whose kernel is ours, with running statistics, or the error raised in it."""
    global pbn_left
    cdef pbn_statistics before = pbn_left  # of a call within which Python, a hook of autograd say, made this one
    cdef void *kept[2]
    cdef int i
    kept[0] = kept[1] = NULL
    try:
        if mean is not None:
            kept[0] = PyCapsule_GetPointer(_torch_host.handle(mean), NULL)
        if variance is not None:
            kept[1] = PyCapsule_GetPointer(_torch_host.handle(variance), NULL)
        pbn_left.mean, pbn_left.variance = kept[0], kept[1]
        pbn_left.here = pbn_left.calling = True
        return operator(*given, **named)[0]
    except RuntimeError:
        error = _torch_errors.get(PyThread_get_thread_ident())
        if error is None:
            raise
        raise error from None
    finally:
        _torch_errors.pop(PyThread_get_thread_ident(), None)
        pbn_left = before
        for i in range(2):
            if kept[i] != NULL:
                _torch.aoti_torch_delete_tensor_object(kept[i])


def call_miopen(operator, x, weight, bias, mean, variance, factor, epsilon):
    """Batch norm by the batch's statistics through PyTorch's operator for MIOpen: y, which autograd knows.

    Parameters
    ----------
    operator : callable
        The operator.
    x, weight, bias : Tensor
    mean, variance : Tensor or None
        Running statistics, of which autograd keeps nothing.
    factor, epsilon
        As ``batch_norm_training`` has them.
    """
    given = x, weight, bias, None, None, True, factor, epsilon
    return _torch_through(operator, given, _NOTHING_NAMED, mean, variance)


def call_overridable(
    operator, x, weight, bias, mean, variance, residual, double factor, double epsilon, bint deterministic,
):
    """``relu(batch_norm(x) + residual)`` through PyTorch's overridable operator: y, which autograd knows.

    Parameters
    ----------
    operator : callable
        The operator.
    x, weight, bias : Tensor
    mean, variance : Tensor or None
        Running statistics.
    residual : Tensor or None
    factor, epsilon, deterministic
        As ``batch_norm_relu_training`` has them.
    """
    given = x, weight, bias, residual, factor, deterministic, False
    return _torch_through(operator, given, {"scale": epsilon}, mean, variance)


cdef bint _torch_nothing(uint64_t *made, int first, int end) noexcept nogil:
    """Make results that are no tensors; whether there is memory."""
    cdef void *handle = NULL
    cdef int i
    for i in range(first, end):
        if _torch.aoti_torch_new_uninitialized_tensor(&handle) != 0:
            _torch_free(&made[first], i - first)
            return False
        made[i] = <uint64_t>handle
    return True


cdef int64_t _packed_length(int64_t channels) noexcept nogil:
    """Bytes of a vector of float32 before the next part, aligned as workspaces are."""
    return (4 * channels + 63) // 64 * 64


def packed_parts(channels):
    """Where the inverse standard deviation and the reserve begin in what forward packed."""
    return _packed_length(channels), 2 * _packed_length(channels) + _ROOM


cdef bint _torch_packed(const _TorchTensor *x, int64_t reserve, uint64_t *made, uintptr_t *addresses) noexcept nogil:
    """Make y and one tensor for the rest, of which addresses are told; whether there is memory."""
    cdef int64_t length = _packed_length(x.dims[1])
    cdef int64_t size = 2 * length + _ROOM + reserve
    cdef int64_t one = 1
    cdef void *handle = NULL
    cdef void *address = NULL
    if not _torch_results(x, 0, 1, 0, made, addresses):
        return False
    if _torch.aoti_torch_empty_strided(1, &size, &one, _TORCH_UINT8, x.device, x.index, &handle) != 0:
        _torch_free(made, 1)
        return False
    made[1] = <uint64_t>handle
    if _torch.aoti_torch_get_data_ptr(handle, &address) != 0 or not _torch_nothing(made, 2, 4):
        _torch_free(made, 2)
        return False
    addresses[1] = <uintptr_t>address
    addresses[2], addresses[3] = addresses[1] + length, addresses[1] + 2 * length + _ROOM
    return True


cdef bint _torch_unpacked(
    void *handle, const _TorchTensor *x, bint residual, uintptr_t *vectors, _TorchJoin *join
) noexcept nogil:
    """Addresses in what forward packed; whether it looks as that does."""
    cdef _TorchTensor packed
    cdef int64_t length = _packed_length(x.dims[1])
    if handle == NULL or not _torch_read(handle, &packed) or packed.dtype != _TORCH_UINT8 or packed.rank != 1:
        return False
    join.size = _torch_reserve_size(x) if residual else 0
    if packed.dims[0] != 2 * length + _ROOM + join.size or packed.strides[0] != 1 or packed.address % 64 != 0:
        return False
    if packed.device != x.device or packed.index != x.index:
        return False
    vectors[0], vectors[1] = packed.address, packed.address + length
    join.space = packed.address + 2 * length
    join.reserve = join.space + _ROOM if residual else 0
    return True


cdef int _torch_overridable(uint64_t *stack, void **handles, uint64_t *made, char *text) noexcept nogil:
    cdef uint64_t question[_RELU_ARGUMENTS]
    cdef void *given[_RELU_ARGUMENTS]
    cdef pbn_statistics running = pbn_left
    cdef int status
    if not _torch_is_ours(stack[7] != 0, text):
        return _FAILED
    memset(given, 0, sizeof(given))
    given[0], given[1], given[2], given[5] = handles[0], handles[1], handles[2], handles[3]
    given[3], given[4] = running.mean, running.variance
    question[6], question[7] = stack[4], (<uint64_t *>stack[7])[0]
    question[8], question[9] = False, stack[5]  # no fallback
    status = _torch_relu(question, given, made, text, True)
    if status == _REFUSED:
        status = _torch_elsewhere(_RELU, question, given, made, text, False)
    if status == _DONE:
        made[4], made[5] = running.mean != NULL, _OURS
        if not _torch_nothing(made, 6, _TORCH_MOST_RESULTS):
            _torch_free(made, 4)
            memcpy(text, b"out of memory", 14)
            return _FAILED
    return status


cdef int _torch_overridable_backward(uint64_t *stack, void **handles, uint64_t *made, char *text) noexcept nogil:
    cdef uint64_t question[_RELU_ARGUMENTS]
    cdef void *given[_RELU_ARGUMENTS]
    cdef bint tracked = _torch.aoti_torch_grad_mode_is_enabled()
    cdef int status = _REFUSED
    if stack[11] != _OURS or stack[16] == 0:
        memcpy(text, _NOT_OURS, strlen(_NOT_OURS) + 1)
        return _FAILED
    memset(given, 0, sizeof(given))
    given[0], given[1], given[2], given[3] = handles[1], handles[0], handles[2], handles[3]
    given[4], given[5], given[6], given[7] = handles[6], handles[7], handles[8], handles[9]
    question[8] = handles[4] != NULL
    question[9] = stack[10]
    question[10], question[11] = stack[12], (<uint64_t *>stack[16])[0]
    question[12] = False  # no fallback
    question[13] = stack[13]
    if not tracked:
        status = _torch_relu_backward(question, given, made, text, given[6] == NULL)
    if status == _REFUSED:
        status = _torch_elsewhere(_RELU_BACKWARD, question, given, made, text, tracked)
    return status
