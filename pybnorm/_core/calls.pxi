# Vendor calls: filled in, checked and run.

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
        for i in range(_table_count):
            if _tables[i].at_fork != NULL:
                _tables[i].at_fork(stage)


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
