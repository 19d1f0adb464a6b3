# Kernels of batch norm, an addition and ReLU as one operator, forward and backward, for PyTorch's dispatcher.
#
# Both directions use plans that were made together. Whatever a kernel does not take as it is, the operator's kernel in
# Python gets, which asks for the same plans and copies what they cannot read.

cdef enum:
    _PLANS_ALIGNMENT = 16  # of all tensors


cdef object _torch_join(bytes name, const _TorchKey *key, const _TorchJoin *join):
    """The plans of a key, or None; the host is asked once."""
    cdef int i
    try:
        return (<dict>_torch_joined)[name]
    except KeyError:
        pass
    tensors = []
    for i in range(3):
        tensors.append(_torch_python(c"t", 0, join.handles[i]))
    return _torch_host.join(
        name, *tensors, (key.flags & _RESIDUAL) != 0, (key.flags & _UPDATES) != 0, key.factor, key.epsilon
    )


cdef bint _torch_joined_vectors(
    void **handles, int count, const _TorchTensor *x, uintptr_t *addresses
) noexcept nogil:
    """Addresses of vectors, 0 for those that are not there; whether plans with ReLU take them."""
    cdef int i
    for i in range(count):
        if not _torch_vector(handles[i], x, &addresses[i]) or addresses[i] % _PLANS_ALIGNMENT != 0:
            return False
    return True


cdef int64_t _torch_reserve_size(const _TorchTensor *x) noexcept nogil:
    """Bytes with a residual, as the operator's shapes have it."""
    cdef int64_t places = 1
    cdef int64_t i
    for i in range(x.rank):
        places *= 1 if i == 1 else x.dims[i]
    return (x.dims[1] + 63) // 64 * 64 * ((places + 31) // 32 * 4) + 4096


cdef int _torch_relu(uint64_t *stack, void **handles, uint64_t *made, char *text, bint packed) noexcept nogil:
    cdef _TorchTensor x
    cdef _TorchTensor z
    cdef _TorchKey key
    cdef _TorchJoin join
    cdef uintptr_t vectors[4]
    cdef uintptr_t results[4]
    cdef uintptr_t addresses[9]
    cdef bint residual = handles[5] != NULL
    cdef int64_t i
    cdef int status
    if not _torch_data(handles[0], &x) or not _torch_joined_vectors(&handles[1], 4, &x, vectors):
        return _REFUSED
    if vectors[0] == 0 or vectors[1] == 0 or (vectors[2] == 0) != (vectors[3] == 0):
        return _REFUSED
    if residual and (not _torch_data(handles[5], &z) or not _torch_alike(&z, &x)):
        return _REFUSED
    join.size = _torch_reserve_size(&x) if residual else 0
    if packed:
        if not _torch_packed(&x, join.size, made, results):
            return _REFUSED
    elif not _torch_results(&x, x.dims[1], 4, join.size, made, results):
        return _REFUSED
    for i in range(3):
        join.handles[i] = handles[i]
    join.backward, join.reserve = False, results[3]
    join.space = results[2] + _packed_length(x.dims[1]) if packed else 0
    _torch_key(
        &key, PBN_OP_FORWARD_TRAINING, &x, _joined_flags(residual, vectors[2] != 0), _torch_float(stack[7]),
        _torch_float(stack[6]),
    )
    addresses[0], addresses[1], addresses[2], addresses[3] = x.address, vectors[0], vectors[1], results[0]
    addresses[4], addresses[5], addresses[6], addresses[7] = vectors[2], vectors[3], results[1], results[2]
    addresses[8] = z.address if residual else 0
    status = _torch_run(&key, addresses, 9, -1, -1, &join, text)
    if status != _DONE:
        _torch_free(made, 4)
    return status


cdef int _joined_flags(bint residual, bint running) noexcept nogil:
    return _TRAINS | _JOINED | (_RESIDUAL if residual else 0) | (_UPDATES if running else 0)


cdef int _torch_relu_backward(
    uint64_t *stack, void **handles, uint64_t *made, char *text, bint packed
) noexcept nogil:
    cdef _TorchTensor x
    cdef _TorchTensor dy
    cdef _TorchTensor y
    cdef _TorchTensor reserve
    cdef _TorchKey key
    cdef _TorchJoin join
    cdef uintptr_t vectors[4]  # weight, bias, mean, inverse
    cdef uintptr_t results[4]
    cdef uintptr_t addresses[11]
    cdef bint residual = (stack[8] & 0xff) != 0
    cdef int status
    if not _torch_data(handles[0], &x) or not _torch_data(handles[1], &dy) or not _torch_data(handles[4], &y):
        return _REFUSED
    if not _torch_alike(&dy, &x) or not _torch_alike(&y, &x):
        return _REFUSED
    if not _torch_joined_vectors(&handles[2], 2, &x, vectors):
        return _REFUSED
    join.reserve = join.size = join.space = 0
    if packed:
        if not _torch_unpacked(handles[5], &x, residual, &vectors[2], &join):
            return _REFUSED
    elif not _torch_joined_vectors(&handles[5], 2, &x, &vectors[2]):
        return _REFUSED
    if vectors[0] == 0 or vectors[1] == 0 or vectors[2] == 0 or vectors[3] == 0:
        return _REFUSED
    if residual and not packed:
        if handles[7] == NULL or not _torch_read(handles[7], &reserve) or reserve.dtype != _TORCH_UINT8:
            return _REFUSED
        if reserve.rank != 1 or reserve.strides[0] != 1 or reserve.device != x.device or reserve.index != x.index:
            return _REFUSED
        join.reserve, join.size = reserve.address, reserve.dims[0]
    results[3] = 0
    if not _torch_results(&x, x.dims[1], 3 if packed and not residual else 4, -2 if residual else -1, made, results):
        return _REFUSED
    if packed and not residual and not _torch_nothing(made, 3, 4):
        _torch_free(made, 3)
        return _REFUSED
    join.handles[0], join.handles[1], join.handles[2], join.backward = handles[0], handles[2], handles[3], True
    _torch_key(
        &key, PBN_OP_FORWARD_TRAINING, &x, _joined_flags(residual, (stack[9] & 0xff) != 0), _torch_float(stack[11]),
        _torch_float(stack[10]),
    )
    addresses[0], addresses[1], addresses[2], addresses[3] = x.address, dy.address, vectors[0], results[0]
    addresses[4], addresses[5], addresses[6], addresses[7] = results[1], results[2], vectors[2], vectors[3]
    addresses[8], addresses[9], addresses[10] = y.address, vectors[1], results[3] if residual else 0
    status = _torch_run(&key, addresses, 11, -1, -1, &join, text)
    if status != _DONE:
        _torch_free(made, 4)
    return status
