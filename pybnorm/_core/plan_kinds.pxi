# The three kinds of plan, and how they are planned.

cdef inline bint _short(void *address, size_t size, size_t need) noexcept:
    """Whether a workspace or reserve is too small, or not aligned as its user wants it."""
    return size < need or <uintptr_t>address % _WORKSPACE_ALIGNMENT != 0


cdef tuple _key(object buffer):
    return buffer.dtype, buffer.dims, buffer.strides


cdef object _alignment(uintptr_t addresses):
    """The largest power of two up to 16 that divides all of them."""
    return (addresses | 16) & (~(addresses | 16) + 1)


cdef object _named(object algorithm):
    """A call's algorithm as far as the cache of plans needs it; the rest is checked when the plan is made."""
    if algorithm is not None and not isinstance(algorithm, str):
        raise errors.ArgumentTypeError("algorithm", algorithm, "a string or None")
    return algorithm


cdef object _mode(object mode):
    return mode if type(mode) is Mode else _arguments.mode(mode)


cdef object _keyed(object value):
    """A float as part of a key: 0.0 and -0.0 are equal, but not the same to a vendor."""
    return (value, copysign(1.0, value)) if <double>value == 0.0 else value


cdef inline uintptr_t _plan_address(Handle handle, object value, str name) except 0:
    cdef uintptr_t address
    try:
        address = value
    except OverflowError:
        raise errors.ArgumentError(name, value, "an address from 1 to 2**64 - 1") from None
    if address == 0:
        raise errors.ArgumentError(name, value, "an address other than NULL")
    if handle.several:
        handle._here(address, name)
    return address


cdef size_t _span_bytes(TensorDescriptor t):
    cdef size_t last = 0
    for d, s in zip(t.dims, t.strides):
        last += (d - 1) * s
    return (last + 1) * t.dtype.itemsize


cdef object _like(Handle handle, object tensor, str name, object default):
    """What `tensor` says of itself: a descriptor or a `Buffer`; read before the handle's lock is taken."""
    if tensor is None and default is not None:
        return default
    if isinstance(tensor, TensorDescriptor):
        return _descriptor(tensor, name, handle.table)
    return handle._data(tensor, name)


cdef tuple _residual(Handle handle, object z, object x):
    """(what z looks like, where it lies if it is there), or None without one."""
    if z is None or z is False:
        return None
    return _like(handle, None if z is True else z, "z", x), None if z is True else z


cdef tuple _planned(Handle handle, object like, object given, str name):
    """A private descriptor of what `_like` found, which nobody else can change, and the address given or 0."""
    cdef bint placed = given is not None and not isinstance(like, TensorDescriptor)
    cdef uintptr_t address = 0
    if placed and like.pointer:  # without elements there is none
        address = _address(like, name)
    return TensorDescriptor(handle.backend, like.dtype, like.dims, like.strides), address


cdef object _tuner = None


def set_tuner(tuner):
    """Have `tuner` choose the plans of ``tune=True``.

    Parameters
    ----------
    tuner : callable
        Takes a handle, the operation, x, the algorithm and the other arguments; returns a plan and its reason.
    """
    global _tuner
    _tuner = tuner


cdef object _tuned(Handle handle, int operation, object x, object algorithm, dict options):
    """A plan that measurements chose."""
    if algorithm is None:
        raise errors.ArgumentError("tune", True, "False with algorithm None: there is nothing to choose")
    plan, reason = _tuner(handle, Operation(operation), x, algorithm, options)
    (<Plan>plan).reason = reason
    return plan


cdef object _plan_forward_training(
    Handle handle, object x, object y, object mode, object algorithm, object alpha, object beta, object epsilon,
    object factor, object running, object saved, tuple activation, object z,
):
    cdef ForwardTrainingPlan plan = ForwardTrainingPlan.__new__(ForwardTrainingPlan)
    cdef char here
    handle._check()
    plan.running, plan.saved = _arguments.boolean(running, "running"), _arguments.boolean(saved, "saved")
    x_like = _like(handle, x, "x", None)
    y_like = _like(handle, y, "y", x_like)
    z = _residual(handle, z, x_like)
    values = _arguments.forward_training(mode, alpha, beta, x_like, y_like, None, factor, epsilon, plan.running)
    with handle.lock:
        handle._check()
        plan.handle, plan.table = handle, handle.table
        plan.name = "batch_normalization_forward_training"
        plan.xd, x_address = _planned(handle, x_like, x, "x")
        plan.yd, y_address = _planned(handle, y_like, y, "y")
        _check_capability(plan.table, PBN_OP_FORWARD_TRAINING, values[0], plan.xd, plan.name)
        plan.pd = derive_bn_tensor_descriptor(plan.xd, values[0])
        memset(&plan.call, 0, sizeof(plan.call))
        plan.call.operation = PBN_OP_FORWARD_TRAINING
        plan.call.mode, plan.call.alpha, plan.call.beta, plan.call.factor, plan.call.epsilon = values
        plan.call.x_desc, plan.call.y_desc, plan.call.param_desc = &plan.xd.tensor, &plan.yd.tensor, &plan.pd.tensor
        plan.call.x, plan.call.y = <void *><uintptr_t>x_address, <void *><uintptr_t>y_address
        plan.call.z = <void *>plan._fuse(activation, algorithm, z)
        if plan.zd is not None:
            plan.call.z_desc = &plan.zd.tensor
        if plan.running:
            plan.call.running_mean = plan.call.running_variance = &here
        if plan.saved:
            plan.call.saved_mean = plan.call.saved_inv_variance = &here
        plan._make(algorithm)
    return plan


cdef object _plan_forward_inference(
    Handle handle, object x, object y, object mode, object algorithm, object alpha, object beta, object epsilon,
    tuple activation, object z,
):
    cdef ForwardInferencePlan plan = ForwardInferencePlan.__new__(ForwardInferencePlan)
    handle._check()
    x_like = _like(handle, x, "x", None)
    y_like = _like(handle, y, "y", x_like)
    z = _residual(handle, z, x_like)
    values = _arguments.forward_inference(mode, alpha, beta, x_like, y_like, None, epsilon)
    with handle.lock:
        handle._check()
        plan.handle, plan.table = handle, handle.table
        plan.name = "batch_normalization_forward_inference"
        plan.xd, x_address = _planned(handle, x_like, x, "x")
        plan.yd, y_address = _planned(handle, y_like, y, "y")
        _check_capability(plan.table, PBN_OP_FORWARD_INFERENCE, values[0], plan.xd, plan.name)
        plan.pd = derive_bn_tensor_descriptor(plan.xd, values[0])
        memset(&plan.call, 0, sizeof(plan.call))
        plan.call.operation = PBN_OP_FORWARD_INFERENCE
        plan.call.mode, plan.call.alpha, plan.call.beta, plan.call.epsilon = values
        plan.call.x_desc, plan.call.y_desc, plan.call.param_desc = &plan.xd.tensor, &plan.yd.tensor, &plan.pd.tensor
        plan.call.x, plan.call.y = <void *><uintptr_t>x_address, <void *><uintptr_t>y_address
        plan.call.z = <void *>plan._fuse(activation, algorithm, z)
        if plan.zd is not None:
            plan.call.z_desc = &plan.zd.tensor
        plan._make(algorithm)
    return plan


cdef object _plan_backward(
    Handle handle, object x, object dy, object dx, object mode, object algorithm, object alpha_data, object beta_data,
    object alpha_param, object beta_param, object epsilon, object saved, tuple activation, object z,
):
    cdef BackwardPlan plan = BackwardPlan.__new__(BackwardPlan)
    cdef char here
    handle._check()
    plan.saved = _arguments.boolean(saved, "saved")
    x_like = _like(handle, x, "x", None)
    dy_like = _like(handle, dy, "dy", x_like)
    dx_like = _like(handle, dx, "dx", x_like)
    z = _residual(handle, z, x_like)
    values = _arguments.backward(
        mode, alpha_data, beta_data, alpha_param, beta_param, x_like, dy_like, dx_like, None, epsilon
    )
    with handle.lock:
        handle._check()
        plan.handle, plan.table = handle, handle.table
        plan.name = "batch_normalization_backward"
        plan.xd, x_address = _planned(handle, x_like, x, "x")
        plan.yd, dy_address = _planned(handle, dy_like, dy, "dy")
        plan.dxd, dx_address = _planned(handle, dx_like, dx, "dx")
        _check_capability(plan.table, PBN_OP_BACKWARD, values[0], plan.xd, plan.name)
        plan.pd = derive_bn_tensor_descriptor(plan.xd, values[0])
        memset(&plan.call, 0, sizeof(plan.call))
        plan.call.operation = PBN_OP_BACKWARD
        plan.call.mode, plan.call.alpha, plan.call.beta = values[:3]
        plan.call.alpha_param, plan.call.beta_param, plan.call.epsilon = values[3:]
        plan.call.x_desc, plan.call.dy_desc, plan.call.dx_desc = &plan.xd.tensor, &plan.yd.tensor, &plan.dxd.tensor
        plan.call.param_desc = &plan.pd.tensor
        plan.call.x, plan.call.dy = <void *><uintptr_t>x_address, <void *><uintptr_t>dy_address
        plan.call.dx = <void *><uintptr_t>dx_address
        plan.call.dz = <void *>plan._fuse(activation, algorithm, z)
        if plan.zd is not None:
            plan.call.dz_desc = &plan.zd.tensor
        plan.activated = plan.call.activation != PBN_ACTIVATION_NONE
        plan.masked = plan.activated and algorithm is not None  # entry points make the mask from x and the bias
        if plan.masked:
            plan.call.y_desc = &plan.xd.tensor
        if plan.saved:
            plan.call.saved_mean = plan.call.saved_inv_variance = &here
        plan._make(algorithm)
    return plan


cdef class ForwardTrainingPlan(Plan):
    """A forward training call made ready; see `Plan` and `Handle.forward_training`."""

    cdef bint running
    cdef bint saved

    def __call__(
        self, x, scale, bias, y, running_mean=None, running_variance=None, saved_mean=None, saved_inv_variance=None,
        workspace=None, z=None, reserve=None,
    ):
        """Run it: addresses, or arrays as planned; the statistics and z exactly where they were planned.

        `reserve` is written, for the backward of this call: an array or (address, bytes), as `workspace` is.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        BusyError
            Called by a signal handler in the midst of a call of this plan.
        """
        cdef list kept = []
        cdef Handle handle = self._owner()
        cdef pbn_call *call = &self.call
        cdef pbn_call given  # read before the lock is taken: an array's protocol may wait for another thread
        handle._check()
        self._statistics(running_mean, running_variance, "running", self.running)
        self._statistics(saved_mean, saved_inv_variance, "saved", self.saved)
        given.x = <void *>self._data(x, "x", self.xd, False, kept)
        given.y = <void *>self._data(y, "y", self.yd, True, kept)
        given.scale = <void *>self._vector(scale, "scale", False, kept)
        given.bias = <void *>self._vector(bias, "bias", False, kept)
        if self.running:
            given.running_mean = <void *>self._vector(running_mean, "running_mean", True, kept)
            given.running_variance = <void *>self._vector(running_variance, "running_variance", True, kept)
        if self.saved:
            given.saved_mean = <void *>self._vector(saved_mean, "saved_mean", True, kept)
            given.saved_inv_variance = <void *>self._vector(saved_inv_variance, "saved_inv_variance", True, kept)
        if self._given(z, "z", self.zd is not None):
            given.z = <void *>self._data(z, "z", self.zd, False, kept)
        self._space(workspace, "workspace", kept, &given.workspace, &given.workspace_size)
        self._space(reserve, "reserve", kept, &given.reserve, &given.reserve_size)
        with handle.lock:
            self._begin(handle)
            try:
                call.x, call.y, call.scale, call.bias = given.x, given.y, given.scale, given.bias
                self._lend(&given)
                self._mark(<uintptr_t>call.x, self.data_span, False, self.data_element)
                self._mark(<uintptr_t>call.y, self.other_span, True, self.data_element)
                self._mark(<uintptr_t>call.scale, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.bias, self.param_span, False, self.param_element)
                if self.running:
                    call.running_mean, call.running_variance = given.running_mean, given.running_variance
                    self._mark(<uintptr_t>call.running_mean, self.param_span, True, self.param_element)
                    self._mark(<uintptr_t>call.running_variance, self.param_span, True, self.param_element)
                if self.saved:
                    call.saved_mean, call.saved_inv_variance = given.saved_mean, given.saved_inv_variance
                    self._mark(<uintptr_t>call.saved_mean, self.param_span, True, self.param_element)
                    self._mark(<uintptr_t>call.saved_inv_variance, self.param_span, True, self.param_element)
                if self.zd is not None:
                    call.z = given.z
                    self._mark(<uintptr_t>call.z, self.residual_span, False, self.data_element)
                self._go(handle)
            finally:
                self.busy = 0


cdef class ForwardInferencePlan(Plan):
    """A forward inference call made ready; see `Plan` and `Handle.forward_inference`."""

    def __call__(self, x, scale, bias, running_mean, running_variance, y, workspace=None, z=None):
        """Run it: addresses, or arrays as planned; z exactly where it was planned.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        BusyError
            Called by a signal handler in the midst of a call of this plan.
        """
        cdef list kept = []
        cdef Handle handle = self._owner()
        cdef pbn_call *call = &self.call
        cdef pbn_call given
        handle._check()
        given.x = <void *>self._data(x, "x", self.xd, False, kept)
        given.y = <void *>self._data(y, "y", self.yd, True, kept)
        given.scale = <void *>self._vector(scale, "scale", False, kept)
        given.bias = <void *>self._vector(bias, "bias", False, kept)
        given.running_mean = <void *>self._vector(running_mean, "running_mean", False, kept)
        given.running_variance = <void *>self._vector(running_variance, "running_variance", False, kept)
        if self._given(z, "z", self.zd is not None):
            given.z = <void *>self._data(z, "z", self.zd, False, kept)
        self._space(workspace, "workspace", kept, &given.workspace, &given.workspace_size)
        given.reserve, given.reserve_size = NULL, 0
        with handle.lock:
            self._begin(handle)
            try:
                call.x, call.y, call.scale, call.bias = given.x, given.y, given.scale, given.bias
                call.running_mean, call.running_variance = given.running_mean, given.running_variance
                self._lend(&given)
                self._mark(<uintptr_t>call.x, self.data_span, False, self.data_element)
                self._mark(<uintptr_t>call.y, self.other_span, True, self.data_element)
                self._mark(<uintptr_t>call.scale, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.bias, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.running_mean, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.running_variance, self.param_span, False, self.param_element)
                if self.zd is not None:
                    call.z = given.z
                    self._mark(<uintptr_t>call.z, self.residual_span, False, self.data_element)
                self._go(handle)
            finally:
                self.busy = 0


cdef class BackwardPlan(Plan):
    """A backward call made ready; see `Plan` and `Handle.backward`."""

    cdef bint saved
    cdef bint activated
    cdef bint masked  # by y, forward's result

    def __call__(
        self, x, dy, scale, dx, dscale, dbias, saved_mean=None, saved_inv_variance=None, workspace=None, y=None,
        bias=None, dz=None, reserve=None,
    ):
        """Run it: addresses, or arrays as planned; the saved statistics exactly where they were planned.

        With an activation also the bias and, but for algorithm None, y, the forward's result; with z also dz, written,
        and where the plan's `reserve_size` is not 0 the reserve that forward wrote: an array or (address, bytes), as
        `workspace` is.

        Raises
        ------
        ArgumentError, WorkspaceError, VendorError
        BusyError
            Called by a signal handler in the midst of a call of this plan.
        """
        cdef list kept = []
        cdef Handle handle = self._owner()
        cdef pbn_call *call = &self.call
        cdef pbn_call given
        handle._check()
        self._statistics(saved_mean, saved_inv_variance, "saved", self.saved)
        given.x = <void *>self._data(x, "x", self.xd, False, kept)
        given.dy = <void *>self._data(dy, "dy", self.yd, False, kept)
        given.dx = <void *>self._data(dx, "dx", self.dxd, True, kept)
        given.scale = <void *>self._vector(scale, "scale", False, kept)
        given.dscale = <void *>self._vector(dscale, "dscale", True, kept)
        given.dbias = <void *>self._vector(dbias, "dbias", True, kept)
        if self.saved:
            given.saved_mean = <void *>self._vector(saved_mean, "saved_mean", False, kept)
            given.saved_inv_variance = <void *>self._vector(saved_inv_variance, "saved_inv_variance", False, kept)
        if y is not None and self.activated and not self.masked:
            raise errors.ArgumentError("y", y, "None: the entry point masks by x and the bias")
        if self._given(y, "y", self.masked):
            given.y = <void *>self._data(y, "y", self.xd, False, kept)
        if self._given(bias, "bias", self.activated):
            given.bias = <void *>self._vector(bias, "bias", False, kept)
        if self._given(dz, "dz", self.zd is not None):
            given.dz = <void *>self._data(dz, "dz", self.zd, True, kept)
        self._space(workspace, "workspace", kept, &given.workspace, &given.workspace_size)
        self._space(reserve, "reserve", kept, &given.reserve, &given.reserve_size)
        with handle.lock:
            self._begin(handle)
            try:
                call.x, call.dy, call.dx = given.x, given.dy, given.dx
                call.scale, call.dscale, call.dbias = given.scale, given.dscale, given.dbias
                self._lend(&given)
                self._mark(<uintptr_t>call.x, self.data_span, False, self.data_element)
                self._mark(<uintptr_t>call.dy, self.other_span, False, self.data_element)
                self._mark(<uintptr_t>call.dx, self.out_span, True, self.data_element)
                self._mark(<uintptr_t>call.scale, self.param_span, False, self.param_element)
                self._mark(<uintptr_t>call.dscale, self.param_span, True, self.param_element)
                self._mark(<uintptr_t>call.dbias, self.param_span, True, self.param_element)
                if self.saved:
                    call.saved_mean, call.saved_inv_variance = given.saved_mean, given.saved_inv_variance
                    self._mark(<uintptr_t>call.saved_mean, self.param_span, False, self.param_element)
                    self._mark(<uintptr_t>call.saved_inv_variance, self.param_span, False, self.param_element)
                if self.masked:
                    call.y = given.y
                    self._mark(<uintptr_t>call.y, self.data_span, False, self.data_element)
                if self.activated:
                    call.bias = given.bias
                    self._mark(<uintptr_t>call.bias, self.param_span, False, self.param_element)
                if self.zd is not None:
                    call.dz = given.dz
                    self._mark(<uintptr_t>call.dz, self.residual_span, True, self.data_element)
                self._go(handle)
            finally:
                self.busy = 0
