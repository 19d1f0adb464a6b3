# Calls: the table of operations and tensors, and what every kind of call has in common.

cdef extern from *:
    """
    /* The tensors of all calls, by name. `object` is borrowed; `address`, where it is not 0, is known to be what was
     * planned, and the object is not looked at. Neither: the call does not have the tensor. `like`: the descriptor of
     * an object that is an address. */
    typedef struct pbn_argument {
        void *object;
        uintptr_t address;
        void *like;
    } pbn_argument;
    typedef struct pbn_arguments {
        pbn_argument x, dy, z, y, dx, dz, scale, bias, running_mean, running_variance, saved_mean, saved_inv_variance;
        pbn_argument dscale, dbias;
    } pbn_arguments;

    /* One line for each tensor of each operation, in the order of a plan's arguments: its name, which is that of its
     * member in pbn_call and in pbn_arguments; whether the call writes it; when it is there; the capability that a
     * backend needs to know it. DATA has a descriptor of its own, VECTOR that of the parameters. Argument checks,
     * overlap checks, refusals, plans, call lists, workspace queries and entry points are all made from this table. */
    enum {
        PBN_ALWAYS = 0,
        PBN_RUNNING = 1,   /* the call has running statistics */
        PBN_SAVED = 2,     /* it has saved ones */
        PBN_RESIDUAL = 4,  /* something is added before the activation */
        PBN_ACTIVATED = 8, /* it has an activation */
        PBN_MASKED = 16,   /* the activation's gradient is masked by forward's result */
        PBN_CONSTANT = 32, /* backward's statistics are running ones */
        PBN_READ = 0,
        PBN_WRITTEN = 1
    };
    typedef struct pbn_row {
        int operation;
        const char *name;
        size_t address, descriptor; /* offsets in pbn_call */
        size_t argument;            /* offset in pbn_arguments */
        int vector, written, when;
        uint32_t needs;
    } pbn_row;
    #define ROW(op, name, descriptor, vector, access, when, needs) \
        {PBN_OP_##op, #name, offsetof(pbn_call, name), offsetof(pbn_call, descriptor), offsetof(pbn_arguments, name), \
         vector, PBN_##access, PBN_##when, PBN_CAP_##needs},
    #define DATA(op, name, access, when, needs) ROW(op, name, name##_desc, 0, access, when, needs)
    #define VECTOR(op, name, access, when, needs) ROW(op, name, param_desc, 1, access, when, needs)
    static const pbn_row pbn_rows[] = {
        DATA(FORWARD_TRAINING, x, READ, ALWAYS, RUNS)
        VECTOR(FORWARD_TRAINING, scale, READ, ALWAYS, RUNS)
        VECTOR(FORWARD_TRAINING, bias, READ, ALWAYS, RUNS)
        DATA(FORWARD_TRAINING, y, WRITTEN, ALWAYS, RUNS)
        VECTOR(FORWARD_TRAINING, running_mean, WRITTEN, RUNNING, RUNS)
        VECTOR(FORWARD_TRAINING, running_variance, WRITTEN, RUNNING, RUNS)
        VECTOR(FORWARD_TRAINING, saved_mean, WRITTEN, SAVED, RUNS)
        VECTOR(FORWARD_TRAINING, saved_inv_variance, WRITTEN, SAVED, RUNS)
        DATA(FORWARD_TRAINING, z, READ, RESIDUAL, RESIDUAL)
        DATA(FORWARD_INFERENCE, x, READ, ALWAYS, RUNS)
        VECTOR(FORWARD_INFERENCE, scale, READ, ALWAYS, RUNS)
        VECTOR(FORWARD_INFERENCE, bias, READ, ALWAYS, RUNS)
        VECTOR(FORWARD_INFERENCE, running_mean, READ, ALWAYS, RUNS)
        VECTOR(FORWARD_INFERENCE, running_variance, READ, ALWAYS, RUNS)
        DATA(FORWARD_INFERENCE, y, WRITTEN, ALWAYS, RUNS)
        DATA(FORWARD_INFERENCE, z, READ, RESIDUAL, RESIDUAL)
        DATA(BACKWARD, x, READ, ALWAYS, RUNS)
        DATA(BACKWARD, dy, READ, ALWAYS, RUNS)
        VECTOR(BACKWARD, scale, READ, ALWAYS, RUNS)
        DATA(BACKWARD, dx, WRITTEN, ALWAYS, RUNS)
        VECTOR(BACKWARD, dscale, WRITTEN, ALWAYS, RUNS)
        VECTOR(BACKWARD, dbias, WRITTEN, ALWAYS, RUNS)
        VECTOR(BACKWARD, saved_mean, READ, SAVED, RUNS)
        VECTOR(BACKWARD, saved_inv_variance, READ, SAVED, RUNS)
        VECTOR(BACKWARD, running_mean, READ, CONSTANT, CONSTANTS)
        VECTOR(BACKWARD, running_variance, READ, CONSTANT, CONSTANTS)
        DATA(BACKWARD, y, READ, MASKED, RUNS)
        VECTOR(BACKWARD, bias, READ, ACTIVATED, RUNS)
        DATA(BACKWARD, dz, WRITTEN, RESIDUAL, RESIDUAL)
        DATA(AXPBY, x, READ, ALWAYS, RUNS)
        DATA(AXPBY, y, WRITTEN, ALWAYS, RUNS)
        DATA(FILL, y, WRITTEN, ALWAYS, RUNS)
        DATA(RELU, x, READ, ALWAYS, RUNS)
        DATA(RELU, y, WRITTEN, ALWAYS, RUNS)
        DATA(RELU_BACKWARD, x, READ, ALWAYS, RUNS)
        DATA(RELU_BACKWARD, dy, READ, ALWAYS, RUNS)
        DATA(RELU_BACKWARD, dx, WRITTEN, ALWAYS, RUNS)
    };
    #undef VECTOR
    #undef DATA
    #undef ROW
    enum { PBN_ROWS = sizeof pbn_rows / sizeof pbn_rows[0] };
    """
    struct pbn_argument:
        void *object
        uintptr_t address
        void *like
    struct pbn_arguments:
        pbn_argument x
        pbn_argument dy
        pbn_argument z
        pbn_argument y
        pbn_argument dx
        pbn_argument dz
        pbn_argument scale
        pbn_argument bias
        pbn_argument running_mean
        pbn_argument running_variance
        pbn_argument saved_mean
        pbn_argument saved_inv_variance
        pbn_argument dscale
        pbn_argument dbias
    struct pbn_row:
        int operation
        const char *name
        size_t address
        size_t descriptor
        size_t argument
        int vector
        int written
        int when
        uint32_t needs
    const pbn_row pbn_rows[]
    enum:
        PBN_ALWAYS
        PBN_RUNNING
        PBN_SAVED
        PBN_RESIDUAL
        PBN_ACTIVATED
        PBN_MASKED
        PBN_CONSTANT
        PBN_ROWS


Tensor = collections.namedtuple("Tensor", "name vector written when needs")
Tensor.__doc__ = """A tensor of a call: name, parameter or not, written or not, when it is there, capability needed."""
cdef dict _WHEN = {
    PBN_ALWAYS: "always", PBN_RUNNING: "running", PBN_SAVED: "saved", PBN_RESIDUAL: "residual",
    PBN_ACTIVATED: "activation", PBN_MASKED: "mask", PBN_CONSTANT: "constant",
}
cdef tuple _ROW_NAMES = tuple([pbn_rows[row].name.decode() for row in range(PBN_ROWS)])
cdef int[PBN_ROWS] _FIRST_ROWS  # by operation
for _row in range(PBN_ROWS - 1, -1, -1):
    _FIRST_ROWS[pbn_rows[_row].operation] = _row
cdef dict _MEMBERS = {_ROW_NAMES[row]: pbn_rows[row].address for row in range(PBN_ROWS)}  # offsets in pbn_call
cdef dict _CALL_NAMES = {
    PBN_OP_FORWARD_TRAINING: "batch_normalization_forward_training",
    PBN_OP_FORWARD_INFERENCE: "batch_normalization_forward_inference",
    PBN_OP_BACKWARD: "batch_normalization_backward",
    PBN_OP_AXPBY: "axpby",
    PBN_OP_FILL: "fill",
    PBN_OP_RELU: "relu",
    PBN_OP_RELU_BACKWARD: "relu_backward",
}


def tensors(operation):
    """The tensors of an operation's call, in the order of a plan's arguments.

    Parameters
    ----------
    operation : Operation

    Returns
    -------
    tuple of Tensor
    """
    cdef int op = _arguments.operation(operation)
    return tuple([
        Tensor(
            _ROW_NAMES[row], bool(pbn_rows[row].vector), bool(pbn_rows[row].written), _WHEN[pbn_rows[row].when],
            Capability(pbn_rows[row].needs),
        )
        for row in range(PBN_ROWS)
        if pbn_rows[row].operation == op
    ])


cdef inline bint _normalizes(int operation) noexcept:
    """Say whether it is one of the three batch-norm calls, which have parameters."""
    return operation in (PBN_OP_FORWARD_TRAINING, PBN_OP_FORWARD_INFERENCE, PBN_OP_BACKWARD)


cdef inline const pbn_argument *_argument(const pbn_arguments *arguments, const pbn_row *row) noexcept:
    return <const pbn_argument *>(<const char *>arguments + row.argument)


cdef int _check_needs(
    const pbn_backend *table, int operation, int mode, TensorDescriptor x, uint32_t needs, str what
) except -1:
    """Refuses what the backend does not know: it would be ignored, left as it was, or read as something else."""
    cdef const char *why = NULL
    cdef const pbn_tensor *t = &x.tensor
    if needs & ~table.capability(operation, mode, t.dtype, t.layout, t.rank, &why):
        raise _not_supported(
            x.backend, _CALL_NAMES[operation], f"the backend has no {what} here: {Capability(needs)!r} is not set"
        )
    return 0


cdef bint _is_statistic(const pbn_call *call, str name):
    """Say whether a vector is float32 beside parameters of 16 bits: statistics and sums as they were computed."""
    if name.startswith("running"):
        return call.inverse
    return name.startswith("saved") or (name in ("dscale", "dbias") and call.share != 0)


cdef void _set_address(pbn_call *call, const pbn_row *row, uintptr_t address) noexcept:
    (<void **>(<char *>call + row.address))[0] = <void *>address


cdef uintptr_t _get_address(const pbn_call *call, const pbn_row *row) noexcept:
    return <uintptr_t>(<void **>(<char *>call + row.address))[0]


cdef void _set_descriptor(pbn_call *call, const pbn_row *row, TensorDescriptor descriptor) noexcept:
    (<const pbn_tensor **>(<char *>call + row.descriptor))[0] = &descriptor.tensor


cdef pbn_call _model  # of no call: its members' places are those of any
cdef dict _SCALARS = {
    "alpha": <uintptr_t>&_model.alpha - <uintptr_t>&_model,
    "beta": <uintptr_t>&_model.beta - <uintptr_t>&_model,
    "alpha_param": <uintptr_t>&_model.alpha_param - <uintptr_t>&_model,
    "beta_param": <uintptr_t>&_model.beta_param - <uintptr_t>&_model,
    "exponential_average_factor": <uintptr_t>&_model.factor - <uintptr_t>&_model,
    "epsilon": <uintptr_t>&_model.epsilon - <uintptr_t>&_model,
}
_SCALARS |= {"a": _SCALARS["alpha"], "b": _SCALARS["beta"], "value": _SCALARS["alpha"]}


cdef inline double *_scalar(pbn_call *call, str name) except NULL:
    cdef size_t place = _SCALARS[name]
    return <double *>(<char *>call + place)


cdef double _number(object value, str name) except? -1:
    """A scalar as a float, converted once; its rule and x's dtype are looked at when the call is planned."""
    if type(value) is float:
        return value
    if name == "epsilon":
        return _arguments.epsilon(value)
    return _arguments.factor(value) if name == "exponential_average_factor" else _arguments.scalar(value, name)


cdef int _set_scalars(pbn_call *call, dict values) except -1:
    """Sets the mode and the scalars from what they are called in `Handle`'s methods."""
    for name in _arguments.SCALARS[Operation(call.operation)]:
        if name == "mode":
            call.mode = _mode(values[name])
        else:
            _scalar(call, name)[0] = _number(values[name], name)
    call.inverse = _arguments.boolean(values.get("inverse", False), "inverse")
    return 0


cdef int _check_scalars(pbn_call *call, dict tensors, object param, bint running) except -1:
    """Checks the scalars and the shapes of the tensors, x or the one that there is first."""
    op = Operation(call.operation)
    values = {name: call.mode if name == "mode" else _scalar(call, name)[0] for name in _arguments.SCALARS[op]}
    _arguments.call(op, tensors, param, running, **values)
    return 0


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


cdef str _STREAMS = "an integer, an object with __cuda_stream__ or a stream of hip-python"


cdef object _stream(object stream):
    """A stream's address: an integer, what ``__cuda_stream__`` gives, or a stream of hip-python."""
    try:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            said = protocol() if callable(protocol) else protocol
            stream = 0 if said[1] is None else said[1]
        elif _arrays.of_hip_python(stream):
            stream = int(stream)  # hip-python's pointers have no __index__
    except Exception as error:
        shown = f"{type(stream).__name__} whose __cuda_stream__ failed: {type(error).__name__}: {error}"
        raise errors.ArgumentError("stream", shown, _STREAMS) from error
    if stream is None:
        raise errors.ArgumentTypeError("stream", stream, _STREAMS)
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


cdef Handle _handle(object value):
    if not isinstance(value, Handle):
        raise errors.ArgumentTypeError("handle", value, "a Handle")
    cdef Handle handle = <Handle>value
    handle._check()
    return handle


cdef tuple _shown(const pbn_call *call):
    """The descriptors of a call, for error messages."""
    cdef const pbn_tensor *t
    cdef int row = _FIRST_ROWS[call.operation]
    described = {}
    while row < PBN_ROWS and pbn_rows[row].operation == call.operation:
        t = (<const pbn_tensor **>(<char *>call + pbn_rows[row].descriptor))[0]
        described["param" if pbn_rows[row].vector else _ROW_NAMES[row]] = _described(t)
        row += 1
    lines = [f"{name}: {text}" for name, text in described.items() if text]
    if call.param_desc != NULL:
        lines.append(f"mode={Mode(call.mode).name} alpha={call.alpha} beta={call.beta} epsilon={call.epsilon}")
    if call.activation != PBN_ACTIVATION_NONE:
        name = Activation(call.activation).name
        lines.append(f"activation={name} low={call.activation_low} high={call.activation_high}")
    return tuple(lines)


cdef str _described(const pbn_tensor *t):
    if t == NULL or t.rank == 0:
        return ""
    dims = tuple([t.dims[i] for i in range(t.rank)])
    strides = tuple([t.strides[i] for i in range(t.rank)])
    return f"{DataType(t.dtype).short} dims={dims} strides={strides}"


cdef uintptr_t _data_bits(const pbn_call *call) noexcept:
    """The addresses of the data tensors, or-ed together."""
    cdef uintptr_t bits = 0
    cdef int row = _FIRST_ROWS[call.operation]
    while row < PBN_ROWS and pbn_rows[row].operation == call.operation:
        if not pbn_rows[row].vector:
            bits |= _get_address(call, &pbn_rows[row])
        row += 1
    return bits


cdef uintptr_t _address(object buffer, str argument) except 0:
    """Say where an array lies; a `Buffer` may have been made of any number."""
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


cdef int _run(
    Handle handle, pbn_call *call, pbn_plan *plan, str name, str algorithm, const pbn_backend *maker=NULL
) except -1:
    """Runs the vendor's plan, or its entry point where there is none, without the GIL; under the handle's lock.

    `maker`: the backend that made the plan, where that is not the handle's: native, on the handle's stream.
    """
    handle._check()  # an array's own protocol, or a signal handler, may have closed it since
    cdef const pbn_backend *table = handle.table if maker == NULL else maker
    cdef pbn_handle *c_handle = handle.handle if maker == NULL else handle.native
    cdef int status
    if maker != NULL and table.device_type != PBN_DEVICE_CPU:
        table.stream_set(c_handle, <void *>handle._stream())
    with nogil:
        if plan != NULL:
            status = table.plan_run(c_handle, plan, call)
        elif call.operation == PBN_OP_FORWARD_TRAINING:
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
        shown = _shown(call) if plan == NULL or table.algorithms == NULL else (*_shown(call), f"algorithm={algorithm}")
        raise _error(table, status, name, shown, _on_card(handle, call) if table == handle.table else "")
    return 0


cdef struct _Extent:
    int slot  # what the addresses count from
    uintptr_t start, end
    size_t element
    bint written


cdef bint _apart(const _Extent *extents, int count, const uintptr_t *begins, size_t workspace) noexcept:
    """Say whether all memory is there and aligned, and nothing written overlaps; slot 0 begins with a workspace.

    False says no more than that some is in doubt: interleaved views may be apart.
    """
    cdef uintptr_t start, end, other
    cdef int i, j
    for i in range(count):
        start, end = begins[extents[i].slot] + extents[i].start, begins[extents[i].slot] + extents[i].end
        if start == 0 or start % extents[i].element or end < start:
            return False
        if start < begins[0] + workspace and begins[0] < end:
            return False
        for j in range(i):
            other = begins[extents[j].slot]
            if (
                (extents[i].written or extents[j].written)
                and start < other + extents[j].end
                and other + extents[j].start < end
            ):
                return False
    return True
