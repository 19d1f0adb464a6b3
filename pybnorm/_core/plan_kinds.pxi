# The three kinds of plan, and how they are planned.

cdef object _NONE = Activation.NONE


cdef inline bint _short(void *address, size_t size, size_t need) noexcept:
    """Say whether a workspace or reserve is too small, or not aligned as its user wants it."""
    return size < need or <uintptr_t>address % _WORKSPACE_ALIGNMENT != 0


cdef object _space_error(str name, void *address, size_t size, size_t need):
    return errors.WorkspaceError(
        name,
        f"{size} bytes at {<uintptr_t>address:#x}",
        f"at least {need} bytes, aligned to {_WORKSPACE_ALIGNMENT}, on the handle's device",
    )


cdef size_t _aligned(size_t size) noexcept:
    """The next multiple of a workspace's alignment."""
    return (size + _WORKSPACE_ALIGNMENT - 1) // _WORKSPACE_ALIGNMENT * _WORKSPACE_ALIGNMENT


cdef tuple _key(object buffer):
    return buffer.dtype, buffer.dims, buffer.strides


cdef object _named(object algorithm):
    """A call's algorithm as far as the cache of plans needs it; the rest is checked when the plan is made."""
    if algorithm is not None and not isinstance(algorithm, str):
        raise errors.ArgumentTypeError("algorithm", algorithm, "a string or None")
    return algorithm


cdef object _mode(object mode):
    return mode if type(mode) is Mode else _arguments.mode(mode)


cdef void _begin(pbn_call *call, pbn_arguments *given, int operation) noexcept:
    memset(call, 0, sizeof(call[0]))  # of whose bytes a key is made
    if given != NULL:
        memset(given, 0, sizeof(given[0]))
    call.operation, call.mode = operation, PBN_SPATIAL


cdef bytes _scalar_bytes(const pbn_call *call):
    """Operation, mode, scalars and activation as part of a key: 0.0 and -0.0 are not the same to a vendor."""
    return PyBytes_FromStringAndSize(<char *>call, <char *>&call.x_desc - <char *>call)


cdef int _common(
    Handle handle, pbn_call *call, const pbn_arguments *given, object mode, object alpha, object beta, object epsilon,
    object activation, object low, object high,
) except -1:
    """Sets what the batch-norm calls on arrays and on addresses have in common."""
    call.mode, call.alpha, call.beta = _mode(mode), _number(alpha, "alpha"), _number(beta, "beta")
    call.epsilon = _number(epsilon, "epsilon")
    if activation is _NONE and low is None and high is None:
        return 0
    dtype = DataType.FLOAT32
    if low is not None or high is not None:  # numbers that x's dtype limits
        x = <object>(given.x.object if given.x.like == NULL else given.x.like)
        dtype = _like(handle, x, "x", None).dtype
    call.activation, call.activation_low, call.activation_high = _arguments.activation(activation, low, high, dtype)
    return 0


cdef enum:
    _FEW = 24  # bytes of operation, mode, alpha and beta, which are all that an elementwise call has
    _KEY = 128  # integers that are enough for a key: scalars, at most three data tensors and the parameters'


cdef inline char *_append(char *end, const void *what, size_t size) noexcept:
    memcpy(end, what, size)
    return end + size


cdef inline char *_append_descriptor(char *end, TensorDescriptor descriptor) noexcept:
    return _append(end, PyBytes_AS_STRING(descriptor.key), PyBytes_GET_SIZE(descriptor.key))


cdef Plan _kept(
    Handle handle, pbn_call *call, pbn_arguments *given, list held, object algorithm=None, bint unbiased=True,
    object param=None,
):
    """The plan of this kind of call, which the handle keeps.

    Its key is all that decides it: the scalars, which statistics are there, the algorithm, and what each data tensor
    looks like, by its descriptor or as an array (device, dtype, shape, strides, alignment). Parameters that are arrays
    are not part of it, but for whether scale has x's own 16 bits: their shape and dtype follow from this, x and the
    mode, and every call checks them. Nor are values and addresses. `held` has what the arguments borrow, until the call
    has returned.
    """
    cdef int64_t key[_KEY]
    cdef char *end = <char *>key
    cdef const char *x
    cdef const pbn_row *row
    cdef pbn_argument *argument
    cdef Plan plan
    cdef int i = _FIRST_ROWS[call.operation]
    cdef int has = 0
    cdef bint at = False
    cdef object found
    handle._check()
    end = _append(end, call, <char *>&call.x_desc - <char *>call if _normalizes(call.operation) else _FEW)
    x = end
    while i < PBN_ROWS and pbn_rows[i].operation == call.operation:
        row = &pbn_rows[i]
        argument = <pbn_argument *>_argument(given, row)
        if row.when & (PBN_RUNNING | PBN_SAVED):
            has |= _is_given(handle, row, given, at, held)
        elif row.when == PBN_ALWAYS and not row.vector:
            at = argument.like != NULL
            if at:
                end = _append_descriptor(end, <TensorDescriptor>argument.like)
            else:
                end += handle._kind(argument, _ROW_NAMES[i], row.written, <int64_t *>end, held)
        i += 1
    has |= (1 << 16) if unbiased else 0
    if param is not None:
        end = _append_descriptor(end, <TensorDescriptor>param)
    elif _normalizes(call.operation):
        param = handle._own_parameters(<int64_t *>x, <object>given.x.object, <object>given.scale.object)
        has |= (1 << 17) if param is not None else 0
    end = _append(end, &has, sizeof(has))
    found = PyBytes_FromStringAndSize(<char *>key, end - <char *>key)
    if algorithm is not None or (held and not at):
        found = (found, _named(algorithm), *[_buffer_key(buffer) for buffer in held])
    has &= 0xffff
    plan = handle._cached(found)
    if plan is None:
        plan = _plan(handle, call, _looks(call.operation, given), has, algorithm, param, True, unbiased)
        plan.lends = plan.lends and not at  # whoever has only addresses brings the workspace, too
        handle._keep(found, plan, _ADDRESSES if at else _ARRAYS)
    return plan


cdef int _is_given(Handle handle, const pbn_row *row, pbn_arguments *given, bint at, list held) except -1:
    """Its `when` if a statistic is given, else 0; addresses of 0 are none. Of a pair both are given, or none."""
    cdef pbn_argument *argument = <pbn_argument *>_argument(given, row)
    cdef const pbn_argument *first = _argument(given, row - 1)
    value = <object>argument.object
    if at and value is not None and (type(value) is not int or not value):
        value = handle._pointer(value, row.name.decode(), True) or None
        held.append(value)
        argument.object = <void *>value
    if row[-1].when == row.when and (value is None) != (<object>first.object is None):
        _arguments.pair(row[-1].name.decode(), <object>first.object, row.name.decode(), value)
    return 0 if value is None else row.when


cdef dict _looks(int operation, const pbn_arguments *given):
    """The data tensors of a call, by name: descriptors or arrays that look like them."""
    cdef const pbn_argument *argument
    cdef int i = _FIRST_ROWS[operation]
    looks = {}
    while i < PBN_ROWS and pbn_rows[i].operation == operation:
        argument = _argument(given, &pbn_rows[i])
        if pbn_rows[i].when == PBN_ALWAYS and not pbn_rows[i].vector:
            looks[_ROW_NAMES[i]] = <object>(argument.object if argument.like == NULL else argument.like)
        i += 1
    return looks


cdef int _make(
    Handle handle, pbn_call *call, pbn_arguments *given, object workspace, object algorithm=None, bint unbiased=True,
    TensorDescriptor param=None,
) except -1:
    held = []
    plan = _kept(handle, call, given, held, algorithm, unbiased, param)
    plan._call(handle, given, workspace, None)
    return 0


cdef inline uintptr_t _bare_address(Handle handle, object value, tuple names, int i) except 0:
    """An address given as an int; `names[i]` is the argument."""
    cdef uintptr_t address
    try:
        address = value
    except OverflowError:
        raise errors.ArgumentError(names[i], value, "an address from 1 to 2**64 - 1") from None
    if address == 0:
        raise errors.ArgumentError(names[i], value, "an address other than NULL")
    if handle.several:
        handle._here(address, names[i])
    return address


cdef size_t _span_bytes(TensorDescriptor t):
    cdef size_t last = 0
    for d, s in zip(t.dims, t.strides):
        last += (d - 1) * s
    return (last + 1) * t.dtype.itemsize


cdef object _like(Handle handle, object tensor, str name, object default):
    """A descriptor or a `Buffer` of `tensor`, read before the handle's lock is taken."""
    if tensor is None and default is not None:
        return default
    if isinstance(tensor, TensorDescriptor):
        return _descriptor(tensor, name, handle.table)
    return handle._data(tensor, name)


cdef object _unrepeated(Plan plan):
    """Why the plan's bits are not known to repeat, or None."""
    cdef const pbn_backend *table = plan.table if plan.maker == NULL else plan.maker
    cdef const char *why
    cdef bytes name = plan.algorithm.encode("ascii")
    if table.unrepeated == NULL:
        return f"the bits of {table.name.decode()}'s batch norms are not known to repeat by any of its ways"
    why = table.unrepeated(&plan.call, NULL if plan.plan == NULL else <const char *>name)
    return None if why == NULL else why.decode()


cdef Plan _plan(
    Handle handle, const pbn_call *wanted, dict tensors, int has, object algorithm, object param=None,
    bint warns=True, bint unbiased=True, uintptr_t alignment=0,
):
    """A call made ready.

    `wanted`: operation, mode, scalars and activation. `tensors`: what data tensors look like, descriptors or arrays, by
    name; the others look like x. `has`: PBN_RUNNING, PBN_SAVED, PBN_RESIDUAL. `param`: of the parameters, a descriptor
    or their dtype; derived where it is None. `warns`: of known defects; not for a query. `unbiased`: whether the
    running variance takes that one.
    `alignment`: of data tensors that are descriptors; 0: 16.
    """
    kind = _PLANS.get(wanted.operation, Plan)
    cdef Plan plan = kind.__new__(kind)
    cdef pbn_call *call = &plan.call
    cdef const pbn_row *row
    cdef TensorDescriptor x, own, statistics
    cdef _Argument *argument
    cdef int i
    cdef int operation = wanted.operation
    cdef int first = _FIRST_ROWS[operation]
    cdef bint placed
    handle._check()
    if wanted.activation != PBN_ACTIVATION_NONE:
        has |= PBN_ACTIVATED
        if algorithm is not None:  # the entry points make the mask from x and the bias
            has |= PBN_MASKED
    plan.call, plan.serial = wanted[0], handle.serial
    while first + plan.count < PBN_ROWS and pbn_rows[first + plan.count].operation == operation:
        argument = &plan.arguments[plan.count]
        argument.row = &pbn_rows[first + plan.count]
        argument.planned = argument.row.when == PBN_ALWAYS or (argument.row.when & has) != 0
        plan.count += 1
    plan.names = _ROW_NAMES[first:first + plan.count]
    if _normalizes(operation):
        plan.source, plan.target = [plan.names.index(name) for name in _over(operation)]
    given, likes, alike = {}, {}, {}  # arrays are read before the handle's lock is taken: that may wait for a thread
    for i in range(plan.count):
        row = plan.arguments[i].row
        if plan.arguments[i].planned and not row.vector:
            name = "z" if row.when == PBN_RESIDUAL else plan.names[i]
            given[i] = tensors.get(name)
            if given[i] is True:
                given[i] = None
            likes[plan.names[i]] = _like(handle, given[i], name, likes.get("x"))
            if row.when == PBN_ALWAYS:
                alike[name] = likes[name]
    if type(param) is DataType:
        dims = _arguments.derived_dims(likes["x"].dims, Mode(call.mode))
        param = TensorDescriptor(handle.backend, param, dims, _arguments.packed_strides(dims))
    _check_scalars(call, alike, param, (has & PBN_RUNNING) != 0)
    if algorithm is not None:
        _arguments.plan_activation(call.activation)
    if has & PBN_RESIDUAL:
        z = tensors["z"]
        if algorithm is None:
            raise errors.ArgumentError("z", z, "None with algorithm None: no entry point adds a residual")
        if not call.sums_only:  # there it is no residual
            _arguments.residual(Activation(call.activation), likes["dz" if "dz" in likes else "z"], likes["x"])
    with handle.lock:
        handle._check()
        plan.table, plan.name = handle.table, _CALL_NAMES[operation]
        plan.handle, plan.lends = handle, handle.table.device_type == PBN_DEVICE_CPU
        plan.device_id = -1 if handle.device is None else handle.device
        plan.forks = _forks
        found = [None] * plan.count
        for i in range(plan.count):
            argument = &plan.arguments[i]
            if argument.planned and not argument.row.vector:
                like = likes[plan.names[i]]
                found[i] = own = TensorDescriptor(handle.backend, like.dtype, like.dims, like.strides)
                _set_descriptor(call, argument.row, own)
                placed = given[i] is not None and not isinstance(like, TensorDescriptor)
                if placed and like.pointer:  # without elements there is none
                    _set_address(call, argument.row, _address(like, "z" if argument.row.when else plan.names[i]))
        x = <TensorDescriptor>found[plan.names.index("x" if "x" in likes else "y")]
        refusal, own = None, param
        try:
            _check_capability(plan.table, operation, call.mode, x, plan.name)
            for i in range(plan.count):
                row = plan.arguments[i].row
                if plan.arguments[i].planned:
                    _check_needs(plan.table, operation, call.mode, x, row.needs, f"tensor {plan.names[i]!r}")
            if param is not None and param.dtype != _arguments.derived_data_type(x.dtype):
                what = f"parameters of {x.dtype.short}"
                _check_needs(plan.table, operation, call.mode, x, PBN_CAP_OWN_PARAMETERS, what)
            if _normalizes(operation) and param is None:
                own = derive_bn_tensor_descriptor(x, Mode(call.mode))
        except errors.UnsupportedError as error:
            refusal = plan._refused(handle, algorithm, error)
            own = _parameters_of(x, call.mode) if param is None else param
        if _normalizes(operation):
            if param is not None:
                own = TensorDescriptor(handle.backend, param.dtype, param.dims, param.strides)
            call.param_desc = &own.tensor
            statistics = own if own.dtype == _arguments.derived_data_type(x.dtype) else _parameters_of(x, call.mode)
        for i in range(plan.count):
            argument = &plan.arguments[i]
            if not argument.planned:
                continue
            if argument.row.vector:
                found[i] = statistics if _is_statistic(call, plan.names[i]) else own
                if argument.row.when & (PBN_RUNNING | PBN_SAVED | PBN_CONSTANT):
                    _set_address(call, argument.row, <uintptr_t>&_there)
            argument.span = _span_bytes(found[i])
            argument.element = found[i].dtype.itemsize
        plan.descriptors = tuple(found)
        if alignment:
            call.x = <void *>alignment
        plan._make(handle, algorithm, warns, refusal)
        plan.reason += f"; {handle.unseen}" if handle.unseen else ""
        if _normalizes(operation):
            differs = _unrepeated(plan)
            plan.deterministic = differs is None
            if call.deterministic and differs is not None:
                raise _unsupported(handle, plan.name, f"deterministic=True: {differs}")
        if not unbiased and has & PBN_RUNNING and operation == PBN_OP_FORWARD_TRAINING and call.factor != 0:
            _keep_biased(plan, handle)
    return plan


cdef int _keep_biased(Plan plan, Handle handle) except -1:
    """Has a training's running variance take the biased variance, v, which is v * m / (m - 1) to every library.

    The library updates a copy, r' = (1 - f) * r + f * v * m / (m - 1), of which r' * (m - 1) / m + r * (1 - f) / m
    is what was asked for.
    """
    cdef TensorDescriptor vector = plan.descriptors[plan.names.index("running_variance")]
    cdef TensorDescriptor x = plan.descriptors[0]
    cdef double m = _arguments.reduced_count(x.dims, Mode(plan.call.mode))
    cdef double f = plan.call.factor
    size = _aligned(_span_bytes(vector))
    inner = handle.workspace_size(Operation.AXPBY, vector, alpha=(m - 1) / m, beta=(1 - f) / m)
    plan.behind = _aligned(plan.workspace_size)
    copy, real = [
        _arrays.Buffer(
            slot << _SLOT_BITS, vector.dims, vector.strides, vector.dtype, handle.table.device_type,
            plan.device_id, True, None,
        )
        for slot in (0, 1)
    ]
    plan.before = CallList(handle)
    if f != 1:
        plan.before.append(handle, Operation.AXPBY, {"x": real, "y": copy}, (size, inner), a=1.0, b=0.0)
    else:  # cuDNN and MIOpen add 0 times the copy, which may be NaN
        plan.before.append(handle, Operation.FILL, {"y": copy}, (size, inner), value=0.0)
    after = CallList(handle)
    after.append(
        handle, Operation.AXPBY, {"x": copy, "y": real}, (size, inner), a=(m - 1) / m, b=(1 - f) / m
    )
    plan.after, plan.workspace_size = after, plan.behind + size + inner
    plan.reason += "; the running variance takes the biased variance: a copy is updated, and added to it by axpby"
    return 0


cdef int _has(object running, object saved, object z=None, int operation=PBN_OP_FORWARD_TRAINING) except -1:
    """List what a call has, for `_plan`; running statistics are constants to backward."""
    cdef int given = PBN_CONSTANT if operation == PBN_OP_BACKWARD else PBN_RUNNING
    return (
        (given if _arguments.boolean(running, "running") else 0)
        | (PBN_SAVED if _arguments.boolean(saved, "saved") else 0)
        | (0 if z is None or z is False else PBN_RESIDUAL)
    )


cdef class ForwardTrainingPlan(Plan):
    """A forward training call made ready; see `Plan` and `Handle.forward_training`.

    Examples
    --------
    >>> with pybnorm.Handle("native") as handle:
    ...     plan = handle.plan_forward_training(np.ones((2, 3, 4, 5), np.float32))
    >>> type(plan).__name__, plan.algorithm, plan.deterministic
    ('ForwardTrainingPlan', 'plain', True)
    """

    def __call__(
        self, x, scale, bias, y, running_mean=None, running_variance=None, saved_mean=None, saved_inv_variance=None,
        workspace=None, *, z=None, reserve=None,
    ):
        """Run it on addresses, or on arrays as planned; statistics and z are given exactly where they were planned.

        `reserve` is written, for the backward of this call: an array or (address, bytes), as `workspace` is.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        """
        cdef pbn_arguments arguments
        memset(&arguments, 0, sizeof(arguments))
        arguments.x.object, arguments.scale.object, arguments.bias.object = <void *>x, <void *>scale, <void *>bias
        arguments.y.object = <void *>y
        arguments.running_mean.object = <void *>running_mean
        arguments.running_variance.object = <void *>running_variance
        arguments.saved_mean.object = <void *>saved_mean
        arguments.saved_inv_variance.object = <void *>saved_inv_variance
        arguments.z.object = <void *>z
        self._call(self._owner(), &arguments, workspace, reserve)


cdef class ForwardInferencePlan(Plan):
    """A forward inference call made ready; see `Plan` and `Handle.forward_inference`.

    Examples
    --------
    >>> with pybnorm.Handle("native") as handle:
    ...     plan = handle.plan_forward_inference(np.ones((2, 3, 4, 5), np.float32))
    >>> type(plan).__name__, plan.algorithm, plan.deterministic
    ('ForwardInferencePlan', 'plain', True)
    """

    def __call__(self, x, scale, bias, running_mean, running_variance, y, workspace=None, *, z=None):
        """Run it on addresses, or on arrays as planned; z is given exactly where it was planned.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        """
        cdef pbn_arguments arguments
        memset(&arguments, 0, sizeof(arguments))
        arguments.x.object, arguments.scale.object, arguments.bias.object = <void *>x, <void *>scale, <void *>bias
        arguments.running_mean.object = <void *>running_mean
        arguments.running_variance.object = <void *>running_variance
        arguments.y.object = <void *>y
        arguments.z.object = <void *>z
        self._call(self._owner(), &arguments, workspace, None)


cdef class BackwardPlan(Plan):
    """A backward call made ready; see `Plan` and `Handle.backward`.

    Examples
    --------
    >>> with pybnorm.Handle("native") as handle:
    ...     plan = handle.plan_backward(np.ones((2, 3, 4, 5), np.float32))
    >>> type(plan).__name__, plan.algorithm, plan.deterministic
    ('BackwardPlan', 'plain', True)
    """

    def __call__(
        self, x, dy, scale, dx, dscale, dbias, saved_mean=None, saved_inv_variance=None, workspace=None, *,
        y=None, bias=None, dz=None, reserve=None, running_mean=None, running_variance=None,
    ):
        """Run it on addresses, or on arrays as planned; statistics are given exactly where they were planned.

        With an activation also the bias and, but for algorithm None, y, the forward's result; with z also dz, written,
        and where the plan's `reserve_size` is not 0 the reserve that forward wrote: an array or (address, bytes), as
        `workspace` is.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        """
        cdef pbn_arguments arguments
        memset(&arguments, 0, sizeof(arguments))
        arguments.x.object, arguments.dy.object, arguments.scale.object = <void *>x, <void *>dy, <void *>scale
        arguments.dx.object, arguments.dscale.object, arguments.dbias.object = <void *>dx, <void *>dscale, <void *>dbias
        arguments.saved_mean.object = <void *>saved_mean
        arguments.saved_inv_variance.object = <void *>saved_inv_variance
        arguments.y.object = <void *>y
        arguments.bias.object, arguments.dz.object = <void *>bias, <void *>dz
        arguments.running_mean.object = <void *>running_mean
        arguments.running_variance.object = <void *>running_variance
        self._call(self._owner(), &arguments, workspace, reserve)


cdef dict _PLANS = {
    PBN_OP_FORWARD_TRAINING: ForwardTrainingPlan,
    PBN_OP_FORWARD_INFERENCE: ForwardInferencePlan,
    PBN_OP_BACKWARD: BackwardPlan,
}
