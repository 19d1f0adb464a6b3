# Plans: a call validated once.

cdef class Plan:
    """A call made ready by `Handle.plan_forward_training`, `~Handle.plan_forward_inference` or `~Handle.plan_backward`.

    Its calls pass addresses: of integers only that they are not NULL, aligned and apart from one another is checked,
    and where a process sees several devices that their memory is not another one's, for some 50 ns each; arrays are
    held against what was planned. They are read first; then one thread at a time runs a plan: the handle's
    lock sees to it. A signal handler that comes in between cannot call the same plan: BusyError. On a device it can be
    captured into a graph after its first run.

    Attributes
    ----------
    algorithm : str
        The one that runs, for cuDNN a name of `algorithms`.
    reason : str
        Why it was chosen.
    workspace_size : int
        Bytes that each call needs, aligned to 64; on the CPU the handle lends its own.
    reserve_size : int
        Bytes, aligned to 64, that forward training's call writes and its backward's reads; 0 without a fused residual.
    """

    cdef pbn_plan *plan
    cdef const pbn_backend *table
    cdef pbn_call call
    cdef Handle handle  # None in the handle's own cache, while no call has it
    cdef TensorDescriptor xd, yd, dxd, pd, zd  # yd: in backward dy's; zd: z's or dz's, None without
    cdef size_t data_span, other_span, out_span, param_span, residual_span
    cdef uintptr_t starts[_SPANS]
    cdef uintptr_t ends[_SPANS]
    cdef bint writes[_SPANS]
    cdef int spans
    cdef int device_id  # of the handle, -1 where that is not known
    cdef bint doubtful  # an address is misaligned, or its memory ends behind the last byte
    cdef unsigned long busy  # the thread whose call is under way, whose state `call` and the spans are; 0: none
    cdef int users  # of one in the handle's own cache: calls that have it
    cdef bint arrays  # of a Handle's own calls, which take no bare addresses
    cdef int forks  # as `_forks` was
    cdef uintptr_t alignment  # of the data addresses that it was made for, a power of two up to 16
    cdef size_t data_element, param_element
    cdef str name
    cdef readonly str algorithm
    cdef readonly str reason
    cdef readonly size_t workspace_size
    cdef readonly size_t reserve_size

    def __cinit__(self):
        self.plan = NULL
        self.busy = self.users = 0
        memset(&self.call, 0, sizeof(self.call))

    def __init__(self):
        raise TypeError(f"{type(self).__name__} is made by a Handle's plan_ methods")

    def __dealloc__(self):
        # As with a handle: the vendor's part of it is left to the parent process, and at exit to the system.
        if self.plan != NULL and self.forks == _forks and not _exiting:
            self.table.plan_destroy(self.plan)

    def __repr__(self):
        if self.xd is None:
            return f"<{type(self).__name__} never made>"
        return f"<{type(self).__name__} {self.algorithm} of {self.xd.backend}, x {self.xd!r}>"

    def _candidates(self, bint fast):
        """Algorithms that may take this plan's place, as ``"auto"`` or ``"fast"`` allows; some cannot be built."""
        cdef pbn_call call
        cdef const char *found
        cdef Handle handle = self._owner()
        with handle.lock:
            call = self.call
        # Of the last call's pointers nothing is asked, but of those it was made for their alignment.
        call.x = <void *>self.alignment
        call.dy = call.z = NULL
        call.y = call.dx = call.dz = NULL
        names = []
        while self.table.plan_candidate != NULL:
            found = self.table.plan_candidate(&call, fast, len(names))
            if found == NULL:
                break
            names.append(found.decode())
        return tuple(names)

    def _no_addresses(self):
        """Its calls take arrays only from now on: for callers whose own arguments are arrays."""
        self.arrays = True

    cdef Handle _owner(self):
        if self.handle is None:
            raise errors.ClosedError("plan")
        return self.handle

    cdef int _leave(self) except -1:
        """What `Handle._cached` has begun: in the cache it does not keep its handle alive."""
        with cython.critical_section(self):
            self.users -= 1
            if self.users == 0:
                self.handle = None
        return 0

    cdef int _begin(self, Handle handle) except -1:
        """Takes the plan for one call, under the handle's lock: a lock that lets its own thread in again."""
        handle._check()
        if self.busy:
            raise errors.BusyError(
                f"{self.name}: this plan is already running in this thread, where a signal handler has called it "
                "again; it needs a plan of its own"
            )
        self.busy = PyThread_get_thread_ident()
        self.spans, self.doubtful = 0, False
        return 0

    cdef int _make(self, object algorithm) except -1:
        """Everything but the call's descriptors and scalars, which the caller has set."""
        cdef const pbn_backend *table = self.table
        cdef const char *chosen = NULL
        cdef const char *why = NULL
        cdef int status
        cdef bytes name
        if algorithm is not None:
            _arguments.algorithm(algorithm, algorithms(self.handle.backend), numbered_algorithms(self.handle.backend))
        self.device_id = -1 if self.handle.device is None else self.handle.device
        self.data_span = _span_bytes(self.xd)
        self.other_span = _span_bytes(self.yd)
        self.out_span = _span_bytes(self.dxd) if self.dxd is not None else 0
        self.residual_span = _span_bytes(self.zd) if self.zd is not None else 0
        self.param_span = _span_bytes(self.pd)
        self.data_element, self.param_element = self.xd.dtype.itemsize, self.pd.dtype.itemsize
        self.forks = _forks
        self.alignment = (
            <uintptr_t>self.call.x | <uintptr_t>self.call.y | <uintptr_t>self.call.dy | <uintptr_t>self.call.dx
            | <uintptr_t>self.call.z | <uintptr_t>self.call.dz | 16
        )
        self.alignment &= ~self.alignment + 1
        self.handle._check()  # an array's own protocol, or a signal handler, may have closed it since
        _warn_of_defects(self.handle, &self.call, self.call.saved_mean != NULL, self.name)
        if table.plan_create == NULL or algorithm is None:
            if algorithm is not None and self.call.activation != PBN_ACTIVATION_NONE:
                raise _unsupported(
                    self.handle, self.name,
                    "no named algorithm of this backend has an activation; algorithm None has one where "
                    "Capability.ACTIVATION is set",
                )
            status = table.workspace_size(self.handle.handle, &self.call, &self.workspace_size)
            if status != 0:
                raise _error(table, status, self.name, _shown(&self.call))
            self.algorithm = "plain"
            only = table.plan_create == NULL
            self.reason = "the one entry point of this backend" if only else "the entry point, and nothing else"
        else:
            name = (<str>algorithm).encode("ascii")
            chosen = name
            with nogil:
                status = table.plan_create(self.handle.handle, &self.call, chosen, &self.plan)
            if status != 0:
                raise _error(table, status, self.name, (*_shown(&self.call), f"algorithm={algorithm}"))
            table.plan_info(self.plan, &self.workspace_size, &self.reserve_size, &chosen, &why)
            self.algorithm, self.reason = chosen.decode(), why.decode()
        # Of the pointers only their presence and alignment counted.
        self.call.x = self.call.dy = self.call.z = NULL
        self.call.y = self.call.dx = self.call.dz = NULL
        return 0

    cdef uintptr_t _fuse(self, tuple activation, object algorithm, tuple z) except? 0:
        """Sets the activation, as `_arguments.activation` gives it, and what is added before it.

        Returns the address of a residual that is an array, else 0.
        """
        if algorithm is not None:
            _arguments.plan_activation(activation[0])
        self.call.activation, self.call.activation_low, self.call.activation_high = activation
        if z is None:
            return 0
        if algorithm is None:
            shown = True if z[1] is None else z[1]
            raise errors.ArgumentError("z", shown, "None with algorithm None: no entry point adds a residual")
        zd, address = _planned(self.handle, z[0], z[1], "z")
        _arguments.residual(activation[0], zd, self.xd)
        self.zd = zd
        return address

    cdef uintptr_t _data(self, object value, str name, TensorDescriptor planned, bint output, list kept) except 0:
        cdef uintptr_t address
        if type(value) is int and not self.arrays:
            return _plan_address(self.handle, value, name)
        address = self._viewed(value, &planned.tensor, False, output)
        if address != 0:
            return address
        buffer = self.handle._buffer(value, name, output)
        if (buffer.dtype, buffer.dims) != (planned.dtype, planned.dims) or any(
            [d != 1 and s != t for d, s, t in zip(buffer.dims, buffer.strides, planned.strides, strict=True)]
        ):  # axes of length 1 have no place in memory
            raise errors.ArgumentError(
                name,
                f"{buffer.dtype.short} dims={buffer.dims} strides={buffer.strides}",
                f"what was planned, {planned.dtype.short} dims={planned.dims} strides={planned.strides}",
            )
        kept.append(buffer)
        return _address(buffer, name)

    cdef uintptr_t _vector(self, object value, str name, bint output, list kept) except 0:
        cdef uintptr_t address
        if type(value) is int and not self.arrays:
            return _plan_address(self.handle, value, name)
        address = self._viewed(value, &self.pd.tensor, True, output)
        return address if address != 0 else self.handle._parameter(value, name, self.pd, kept, output)

    cdef uintptr_t _viewed(self, object value, const pbn_tensor *planned, bint vector, bint output) except? 0:
        """The address of an array that is what was planned, by its framework's C table or as NumPy's.

        0 where it is neither or is something else, which the way through Python names or takes.
        """
        cdef _DLTensor view
        cdef int64_t shape[_VIEW_RANK]
        cdef int64_t strides[_VIEW_RANK]
        cdef int64_t packed = 1
        cdef int i, k
        if type(value) is _ndarray:
            if not _of_numpy(value, output, &view, shape, strides):
                return 0
        else:
            if not _seen(value, _exchange_of(type(value), output), &view):
                return 0
        if (
            view.device_type != self.table.device_type
            or (self.device_id != -1 and view.device_id != self.device_id)
            or not _is_dtype(&view, planned.dtype)
            or view.data == NULL
        ):
            return 0
        # Both from the last axis on; axes of length 1 have no place in memory, and a vector may leave them out.
        k = planned.rank - 1
        for i in range(view.ndim - 1, -1, -1):
            if view.shape[i] == 1 and (vector or (k >= 0 and planned.dims[k] == 1)):
                k -= 0 if vector else 1
                continue
            while vector and k >= 0 and planned.dims[k] == 1:
                k -= 1
            if k < 0 or view.shape[i] != planned.dims[k]:
                return 0
            if (packed if view.strides == NULL else view.strides[i]) != (packed if vector else planned.strides[k]):
                return 0
            packed *= view.shape[i]
            k -= 1
        while vector and k >= 0 and planned.dims[k] == 1:
            k -= 1
        if k != -1:
            return 0
        return <uintptr_t>view.data + view.byte_offset

    cdef void _mark(self, uintptr_t address, size_t size, bint written, size_t element) noexcept:
        if address % element or address + size < address:
            self.doubtful = True
        if self.spans == _SPANS:  # no call has so many; what is behind is left to _overlap
            self.doubtful = True
            return
        self.starts[self.spans] = address
        self.ends[self.spans] = address + size
        self.writes[self.spans] = written
        self.spans += 1

    cdef bint _apart(self) noexcept:
        cdef int i, j
        for i in range(self.spans):
            for j in range(i):
                if (
                    (self.writes[i] or self.writes[j])
                    and self.starts[i] < self.ends[j]
                    and self.starts[j] < self.ends[i]
                ):
                    return False
        return True

    cdef int _overlap(self) except -1:
        """Names what is wrong, if it is: ranges that overlap may be views that interleave."""
        cdef pbn_call *call = &self.call
        outputs, inputs = [], [_region("x", <uintptr_t>call.x, self.xd)]
        if call.operation == PBN_OP_BACKWARD:
            outputs.append(_region("dx", <uintptr_t>call.dx, self.dxd))
            inputs.append(_region("dy", <uintptr_t>call.dy, self.yd))
            if call.y != NULL:
                inputs.append(_region("y", <uintptr_t>call.y, self.xd))
            if call.dz != NULL:
                outputs.append(_region("dz", <uintptr_t>call.dz, self.zd))
        else:
            outputs.append(_region("y", <uintptr_t>call.y, self.yd))
            if call.z != NULL:
                inputs.append(_region("z", <uintptr_t>call.z, self.zd))
        written = call.operation == PBN_OP_FORWARD_TRAINING
        for name, address, output in (
            ("scale", <uintptr_t>call.scale, False),
            ("bias", <uintptr_t>call.bias, False),
            ("dscale", <uintptr_t>call.dscale, True),
            ("dbias", <uintptr_t>call.dbias, True),
            ("running_mean", <uintptr_t>call.running_mean, written),
            ("running_variance", <uintptr_t>call.running_variance, written),
            ("saved_mean", <uintptr_t>call.saved_mean, written),
            ("saved_inv_variance", <uintptr_t>call.saved_inv_variance, written),
        ):
            if address:
                (outputs if output else inputs).append(_region(name, address, self.pd))
        if call.workspace_size:
            outputs.append(_memory_region((<uintptr_t>call.workspace, call.workspace_size)))
        if call.reserve_size:
            outputs.append(_memory_region((<uintptr_t>call.reserve, call.reserve_size), "reserve"))
        _arguments.disjoint(outputs, inputs)
        return 0

    cdef int _space(self, object given, str name, list kept, void **address, size_t *size) except -1:
        """Address and bytes of a workspace or reserve."""
        if given is None:
            address[0], size[0] = NULL, 0
        elif type(given) is tuple and len(<tuple>given) == 2 and type((<tuple>given)[0]) is int:
            size[0] = _arguments.byte_count((<tuple>given)[1], name)
            # (0, 0) is Handle.memory(None)
            if (<tuple>given)[0] == 0:
                _workspace_pair(self.handle, 0, size[0], name)
                address[0] = NULL
            else:
                address[0] = <void *>_plan_address(self.handle, (<tuple>given)[0], name)
        else:
            start, count = self.handle._workspace(given, kept, name)
            address[0], size[0] = <void *><uintptr_t>start, count
        return 0

    cdef int _go(self, Handle handle) except -1:
        """Checks and makes the call that is in `call`, whose spans have been marked."""
        cdef const pbn_backend *table = self.table
        cdef pbn_handle *c_handle
        cdef bint lent = False
        cdef int status
        if self.reserve_size and _short(self.call.reserve, self.call.reserve_size, self.reserve_size):
            raise errors.WorkspaceError(
                "reserve",
                f"{self.call.reserve_size} bytes at {<uintptr_t>self.call.reserve:#x}",
                f"at least {self.reserve_size} bytes, aligned to {_WORKSPACE_ALIGNMENT}, on the handle's device",
            )
        if self.call.reserve_size:
            self._mark(<uintptr_t>self.call.reserve, self.call.reserve_size, True, 1)
        if self.workspace_size and _short(self.call.workspace, self.call.workspace_size, self.workspace_size):
            lent = self.plan == NULL and self.call.workspace == NULL
            if not lent:
                raise errors.WorkspaceError(
                    "workspace",
                    f"{self.call.workspace_size} bytes at {<uintptr_t>self.call.workspace:#x}",
                    f"at least {self.workspace_size} bytes, aligned to {_WORKSPACE_ALIGNMENT}, on the handle's device",
                )
        elif self.call.workspace_size:
            self._mark(<uintptr_t>self.call.workspace, self.call.workspace_size, True, 1)
        if self.doubtful or not self._apart():
            self._overlap()
        if self.workspace_size == 0:  # whatever was given: the vendor is not to use it
            self.call.workspace, self.call.workspace_size = NULL, 0
        # A signal handler may have run until here, and closed the handle or made it lend a larger workspace elsewhere.
        if lent:
            handle._ensure_workspace(&self.call, True, self.name)
        if self.plan == NULL:
            return _run(handle, &self.call, self.name)
        handle._check()
        c_handle = handle.handle
        with nogil:
            status = table.plan_run(c_handle, self.plan, &self.call)
        if status != 0:
            raise _error(table, status, self.name, (*_shown(&self.call), f"algorithm={self.algorithm}"))
        return 0

    cdef void _lend(self, const pbn_call *given) noexcept:
        self.call.workspace, self.call.workspace_size = given.workspace, given.workspace_size
        self.call.reserve, self.call.reserve_size = given.reserve, given.reserve_size

    cdef int _statistics(self, object mean, object variance, str what, bint planned) except -1:
        """A pair must be there exactly where it was planned."""
        if (mean is None) != (not planned) or (variance is None) != (not planned):
            raise errors.ArgumentError(
                f"{what}_mean", "a pair that is" + (" not given" if planned else " given"),
                "both, as planned" if planned else f"none: the plan was made with {what}=False",
            )
        return 0

    cdef bint _given(self, object value, str name, bint planned) except -1:
        """What an activation or a residual adds to a call must be there exactly where it was planned."""
        if (value is not None) != planned:
            what = "z" if name in ("z", "dz") else "an activation"
            raise errors.ArgumentError(
                name, value, f"what was planned, with {what}" if planned else f"None: the plan was made without {what}"
            )
        return planned
