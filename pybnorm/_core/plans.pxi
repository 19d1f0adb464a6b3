# Plans: a call validated once.

cdef enum:
    _ADDRESSES = 1
    _ARRAYS = 2

cdef char _there  # its address marks statistics as present while a plan is made; nothing reads it


cdef struct _Argument:  # of a plan's calls, by its line in the table
    const pbn_row *row
    bint planned
    size_t span
    size_t element


cdef int _given_space(
    Handle handle, object given, str name, list kept, void **address, size_t *size
) except -1:
    """Address and bytes of a workspace or reserve."""
    if type(given) is tuple and len(<tuple>given) == 2 and type((<tuple>given)[0]) is int:
        count = (<tuple>given)[1]
        try:
            size[0] = count if type(count) is int else _arguments.byte_count(count, name)
        except OverflowError:
            _arguments.byte_count(count, name)
            raise
        # (0, 0) is Handle.memory(None)
        if (<tuple>given)[0] == 0:
            _workspace_pair(handle, 0, size[0], name)
            address[0] = NULL
        else:
            address[0] = <void *>_bare_address(handle, (<tuple>given)[0], (name,), 0)
    else:
        start, count = handle._workspace(given, kept, name)
        address[0], size[0] = <void *><uintptr_t>start, count
    return 0


cdef class Plan:
    """A call made ready by `Handle.plan_forward_training`, `~Handle.plan_forward_inference` or `~Handle.plan_backward`.

    Call it with addresses or with arrays. Of an address only this is checked: that it is not NULL, is aligned, lies
    apart from what the call writes and, where a process sees several devices, is not of another one. An array has to
    look as planned. A plan does not change when it is called: threads may share it, and wait for one another at the
    handle's lock only; a signal handler may call it in the midst of its call. On a device it can be captured into a
    graph after its first run. `inspect.signature` of a plan lists the arguments that it takes.

    Attributes
    ----------
    algorithm : str
        The one that runs, for cuDNN a name of `algorithms`; ``"native"`` where a handle that avoids known defects has
        our own kernels compute the call.
    reason : str
        Why it was chosen.
    workspace_size : int
        Bytes that each call needs, aligned to 64; on the CPU the handle lends its own.
    deterministic : bool
        Whether equal calls are known to give the same bits, on one device and version, on a CPU with as many threads.
    reserve_size : int
        Bytes, aligned to 64, that forward training's call writes and its backward's reads; 0 without a fused residual.

    Examples
    --------
    >>> x = np.float32([[[1, 2, 3, 4]]])
    >>> y, scale, bias = np.empty_like(x), np.ones(1, np.float32), np.zeros(1, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     plan = handle.plan_forward_training(x, y, running=False, saved=False, epsilon=0)
    ...     plan(x, scale, bias, y)
    >>> y.round(3), plan.algorithm, plan.reason
    (array([[[-1.342, -0.447,  0.447,  1.342]]], dtype=float32), 'plain', 'the one entry point of this backend')
    """

    # Nothing of this changes once the plan is made, so that a call needs no lock of the plan's own.
    cdef pbn_plan *plan  # NULL: calls go to the backend's entry point
    cdef const pbn_backend *table
    cdef const pbn_backend *maker  # of `plan`, where that is not the handle's backend; else NULL
    cdef pbn_call call  # all but the addresses
    cdef _Argument arguments[PBN_ROWS]  # no operation has more than all of them
    cdef int count
    cdef int source, target  # of a batch norm: the arguments that may be one array
    cdef tuple names
    cdef tuple descriptors  # by argument, of this plan only; None if the argument is not planned
    cdef Handle handle  # None in the handle's own cache, where it would be a circle
    cdef int takes  # _ADDRESSES, _ARRAYS
    cdef bint lends  # the handle's own workspace, where a call brings none
    cdef int device_id  # of the handle, -1 where that is not known
    cdef int forks  # as `_forks` was
    cdef uintptr_t alignment  # of the data addresses that it was made for, a power of two up to 16
    cdef str name
    cdef readonly str algorithm
    cdef readonly str reason
    cdef readonly size_t workspace_size
    cdef readonly size_t reserve_size
    cdef readonly bint deterministic
    cdef uint64_t serial  # of the handle
    cdef bint in_place, looked  # a call has written y over x, or dx over dy, and may; its statistics were looked at
    # Around a training that keeps the biased variance; None in others.
    cdef CallList before
    cdef CallList after
    cdef size_t behind  # where their part of the workspace begins

    def __cinit__(self):
        self.plan = NULL
        self.takes = _ADDRESSES | _ARRAYS
        memset(&self.call, 0, sizeof(self.call))

    def __init__(self):
        raise TypeError(f"{type(self).__name__} is made by a Handle's plan_ methods")

    def __dealloc__(self):
        # After a fork the vendor's part belongs to the parent process; at exit the system frees it.
        if self.plan != NULL and self.forks == _forks and not _exiting:
            (self.table if self.maker == NULL else self.maker).plan_destroy(self.plan)

    def __reduce__(self):
        raise TypeError("a plan belongs to its handle and cannot be copied or pickled; threads may share it")

    def __repr__(self):
        if self.descriptors is None:
            return f"<{type(self).__name__} never made>"
        x = self.descriptors[0]
        return f"<{type(self).__name__} {self.algorithm} of {x.backend}, x {x!r}>"

    def __getattr__(self, name):
        # A property of this name would be in the way of inspect.signature() of the class.
        if name == "__signature__":
            return _signature(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    cdef Handle _owner(self):
        if self.handle is None:
            raise errors.ClosedError("plan")
        return self.handle

    cdef int _make(self, Handle handle, object algorithm, bint warns, object refusal) except -1:
        """Makes the vendor's plan of `call`, whose addresses are those that it is made for; then clears them.

        `refusal`: why the vendor has no such call, which native then computes; None: it has.
        """
        cdef const pbn_backend *table = handle.table
        cdef const char *chosen = NULL, *why = NULL
        cdef int status = 0
        cdef bint one_way = table.algorithms == NULL
        cdef bytes name
        cdef int i
        if algorithm is not None:
            _arguments.algorithm(algorithm, algorithms(handle.backend), numbered_algorithms(handle.backend))
            if one_way and self.call.activation != PBN_ACTIVATION_NONE:
                raise _unsupported(
                    handle, self.name,
                    "no named algorithm of this backend has an activation; algorithm None has one where "
                    "Capability.ACTIVATION is set",
                )
        self.alignment = _alignment(_data_bits(&self.call))
        handle._check()  # an array's own protocol, or a signal handler, may have closed it since
        if table.takes_by_time != NULL:
            handle._look_up()
        if refusal is not None:
            self._by_native(handle, f"what the library refuses: {refusal.text}")
            self._clear()
            return 0
        asked = None
        if (handle.defects or handle.weak) and _normalizes(self.call.operation):
            asked = _asked(handle, &self.call, self.call.saved_mean != NULL, self.alignment)
            met = handle._met(asked)
            if met and self._otherwise(handle, algorithm, met):
                self._clear()
                return 0
            met = tuple([d for d in met if d.effect != defects.Effect.WEAK])
            if met and warns and handle.policy != "ignore":
                written = [
                    self.names[i] for i in range(self.count)
                    if self.arguments[i].planned and self.arguments[i].row.written
                ]
                _warn_of_defects(handle, met, asked, self.name, written)
        if table.plan_create != NULL and _normalizes(self.call.operation):
            if algorithm is not None:
                name = (<str>algorithm).encode("ascii")
                chosen = name
            with nogil:
                status = table.plan_create(handle.handle, &self.call, chosen, &self.plan)
            if status != 0:
                shown = _shown(&self.call)
                error = _error(table, status, self.name, shown if one_way else (*shown, f"algorithm={algorithm}"))
                return self._make(handle, algorithm, warns, self._refused(handle, algorithm, error))
        if self.plan != NULL:
            table.plan_info(self.plan, &self.workspace_size, &self.reserve_size, &chosen, &why)
            self.algorithm, self.reason = chosen.decode(), why.decode()
            if algorithm in ("auto", "fast") and asked is not None:
                weak = [d.id for d in handle.weak if _family(self.algorithm) in d.ways and d.predicate(asked)]
                self.reason += f"; without the entry point's weakness {', '.join(weak)}" if weak else ""
        else:
            if _normalizes(self.call.operation) or self.call.operation == PBN_OP_AXPBY:
                status = table.workspace_size(handle.handle, &self.call, &self.workspace_size)
            if status != 0:
                error = _error(table, status, self.name, _shown(&self.call))
                return self._make(handle, algorithm, warns, self._refused(handle, algorithm, error))
            self.algorithm = "plain"
            self.reason = "the one entry point of this backend" if one_way else "the entry point, and nothing else"
        self._clear()
        return 0

    cdef void _clear(self) noexcept:
        cdef int i
        for i in range(self.count):
            if not self.arguments[i].row.vector:
                _set_address(&self.call, self.arguments[i].row, 0)

    cdef bint _otherwise(self, Handle handle, object algorithm, tuple met) except -1:
        """Say whether another algorithm of the library, or native, takes the place of a call with known defects."""
        if algorithm in ("auto", "fast") and self._by_way(handle, algorithm, met):
            return True
        if algorithm in (None, "auto", "fast") and handle.avoids:
            self._by_native(handle, _fault(met))
            return True
        return False

    cdef object _refused(self, Handle handle, object algorithm, object error):
        """The error of a call that the library does not have, where native computes it; else raise it."""
        if (
            algorithm in (None, "auto", "fast") and not handle.backend.startswith("native")
            and isinstance(error, NotImplementedError) and _normalizes(self.call.operation)
        ):
            if handle.avoids:
                return error
            error.add_text("Handle(known_defects='avoid') has native compute it")
        raise error

    cdef bint _by_way(self, Handle handle, str algorithm, tuple met) except -1:
        """Say whether an algorithm of the library does the call without the defects: its choice, else one by name."""
        cdef const pbn_backend *table = handle.table
        cdef const char *chosen = NULL, *why = NULL
        cdef bytes name
        cdef int status
        ways = defects._ways(met)
        for way in (algorithm, "auto", *ways) if ways else ():
            name = (<str>way).encode("ascii")
            chosen = name
            with nogil:
                status = table.plan_create(handle.handle, &self.call, chosen, &self.plan)
            if status != 0:
                self.plan = NULL
                continue
            table.plan_info(self.plan, &self.workspace_size, &self.reserve_size, &chosen, &why)
            self.algorithm, self.reason = chosen.decode(), why.decode()
            if _family(self.algorithm) in ways:
                self.reason += f"; avoids {_fault(met)}"
                return True
            table.plan_destroy(self.plan)
            self.plan = NULL
        self.workspace_size = self.reserve_size = 0
        return False

    cdef int _by_native(self, Handle handle, str fault) except -1:
        """Have native compute the call on the same memory; raise why it does not."""
        cdef const char *chosen = NULL, *why = NULL
        cdef int status = 0, mode = self.call.mode
        if handle.native != NULL:
            self.call.mode = PBN_SPATIAL if mode == Mode.SPATIAL_PERSISTENT else mode  # the same mathematics
            with nogil:
                status = handle.native_table.plan_create(handle.native, &self.call, NULL, &self.plan)
        if handle.native == NULL or status != 0:
            self.plan, self.call.mode = NULL, mode
            error = _error(handle.native_table, status, self.name, ()) if status != 0 else None
            if error is not None and not isinstance(error, NotImplementedError):
                raise error  # no memory, a lost device: not a matter of this call
            raise _not_avoided(handle, self.name, fault, handle.no_native if error is None else error.text)
        self.maker = handle.native_table
        self.maker.plan_info(self.plan, &self.workspace_size, &self.reserve_size, &chosen, &why)
        self.algorithm, self.reason = "native", f"avoids {fault}"
        return 0

    cdef int _call(
        self, Handle handle, const pbn_arguments *arguments, object workspace, object reserve
    ) except -1:
        """Reads the arguments, checks them and makes the call."""
        cdef pbn_call call  # this call's own: other threads and signal handlers run this plan too
        cdef _Extent extents[PBN_ROWS + 2]
        cdef const _Argument *argument
        cdef const pbn_argument *passed
        cdef uintptr_t address
        cdef uintptr_t nowhere = 0
        cdef bint lent = False, far = False
        cdef list kept = None  # memory of arrays, until the call has returned; calls on addresses need none
        cdef _Lock lock
        cdef int i, n = 0
        cdef int source = 0  # its extent
        memcpy(&call, &self.call, sizeof(call))  # an assignment copies twice
        handle._check()
        for i in range(self.count):
            argument = &self.arguments[i]
            passed = _argument(arguments, argument.row)
            value = None if passed.object == NULL else <object>passed.object
            if argument.row.when != PBN_ALWAYS:
                if (value is None and passed.address == 0) == argument.planned:
                    raise self._not_as_planned(i, value)
                if not argument.planned:
                    continue
            if i == self.source:
                source = n
            if passed.address != 0:
                address = passed.address
            elif type(value) is int and self.takes & _ADDRESSES:
                address = _bare_address(handle, value, self.names, i)
            elif self.takes & _ARRAYS:
                kept = [] if kept is None else kept
                address = self._array_address(handle, value, i, kept)
            else:
                address = handle._pointer(value, self.names[i])
            _set_address(&call, argument.row, address)
            extents[n] = _Extent(0, address, address + argument.span, argument.element, argument.row.written)
            n += 1
        if workspace is not None:
            kept = [] if kept is None else kept
            _given_space(handle, workspace, "workspace", kept, &call.workspace, &call.workspace_size)
        if reserve is not None:
            kept = [] if kept is None else kept
            _given_space(handle, reserve, "reserve", kept, &call.reserve, &call.reserve_size)
        if self.reserve_size and _short(call.reserve, call.reserve_size, self.reserve_size):
            raise _space_error("reserve", call.reserve, call.reserve_size, self.reserve_size)
        if self.workspace_size and _short(call.workspace, call.workspace_size, self.workspace_size):
            lent = self.lends and call.workspace == NULL
            if not lent:
                raise _space_error("workspace", call.workspace, call.workspace_size, self.workspace_size)
        if call.reserve_size:
            extents[n] = _Extent(0, <uintptr_t>call.reserve, <uintptr_t>call.reserve + call.reserve_size, 1, True)
            n += 1
        if call.workspace_size and not lent:
            extents[n] = _Extent(0, <uintptr_t>call.workspace, <uintptr_t>call.workspace + call.workspace_size, 1, True)
            n += 1
        if self.in_place:
            if self._is_over(&call):
                extents[source].end = extents[source].start
        if not _apart(extents, n, &nowhere, 0):
            self._overlap(handle, &call)
        if self.workspace_size == 0:  # whatever was given: the vendor is not to use it
            call.workspace, call.workspace_size = NULL, 0
        lock = handle.lock  # the one that is taken, whichever the handle has after a fork
        lock.acquire()
        try:
            if lent:
                handle._lend(&call, self.workspace_size, self.name)
            if self.after is None:
                _run(handle, &call, self.plan, self.name, self.algorithm, self.maker)
            else:
                variance = (<uintptr_t>call.workspace + self.behind, <uintptr_t>call.running_variance)
                self.before.run(handle, variance)
                call.running_variance = <void *><uintptr_t>variance[0]
                if self.behind == 0:
                    call.workspace, call.workspace_size = NULL, 0
                _run(handle, &call, self.plan, self.name, self.algorithm, self.maker)
                self.after.run(handle, variance)
            if not self.looked and self.maker == NULL:
                far, self.looked = _are_far(handle, &call), True
        finally:
            lock.release()
        if far:
            _tell_of_means(handle, self.name)
        written = None
        for i in range(self.count):
            passed = _argument(arguments, self.arguments[i].row)
            if self.arguments[i].row.written and passed.object != NULL:
                found = _exchanges.get(type(<object>passed.object))
                if type(<object>passed.object) is _arrays.Buffer or (found is not None and found[1]):  # PyTorch's
                    written = [] if written is None else written
                    written.append(<object>passed.object)
        if written is not None:
            _arrays.note_written(written)
        return 0

    cdef bint _is_over(self, const pbn_call *call) noexcept:
        return (
            _get_address(call, self.arguments[self.source].row) == _get_address(call, self.arguments[self.target].row)
        )

    cdef object _not_as_planned(self, int i, object value):
        """The error of an argument that is given but was not planned, or planned but not given."""
        cdef bint planned = self.arguments[i].planned
        cdef int when = self.arguments[i].row.when
        name = self.names[i]
        if when in (PBN_RUNNING, PBN_SAVED, PBN_CONSTANT):
            what = "saved" if when == PBN_SAVED else "running"
            return errors.ArgumentError(
                f"{what}_mean", "a pair that is" + (" not given" if planned else " given"),
                "both, as planned" if planned else f"none: the plan was made with {what}=False",
            )
        if when == PBN_MASKED and self.call.activation != PBN_ACTIVATION_NONE and not planned:
            return errors.ArgumentError(name, value, "None: the entry point masks by x and the bias")
        what = "z" if when == PBN_RESIDUAL else "an activation"
        return errors.ArgumentError(
            name, value, f"what was planned, with {what}" if planned else f"None: the plan was made without {what}"
        )

    cdef uintptr_t _array_address(self, Handle handle, object value, int i, list kept) except 0:
        """Say where an array lies that looks as planned; `kept` holds its memory."""
        cdef const pbn_row *row = self.arguments[i].row
        cdef TensorDescriptor planned = self.descriptors[i]
        cdef uintptr_t address = self._viewed(value, &planned.tensor, row.vector, row.written)
        if address != 0:
            return address
        name = self.names[i]
        if row.vector:
            return handle._parameter(value, name, planned, kept, row.written)
        buffer = handle._buffer(value, name, row.written)
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

    cdef uintptr_t _viewed(self, object value, const pbn_tensor *planned, bint vector, bint output) except? 0:
        """The address of an array that is what was planned, by its framework's C table or as NumPy's.

        0 if it is neither or is not what was planned: `as_buffer` then takes it or has the error.
        """
        cdef _View found
        cdef _DLTensor *view = &found.tensor
        cdef int64_t packed = 1
        cdef int i, k
        if not _viewed(value, output, &found):
            return 0
        if (
            view.device_type != self.table.device_type
            or (self.device_id != -1 and view.device_id != self.device_id)
            or not _is_dtype(view, planned.dtype)
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
        return _start(&found)

    cdef int _overlap(self, Handle handle, pbn_call *call) except -1:
        """Names what is wrong, if it is: ranges that overlap may be views that interleave."""
        cdef const _Argument *argument
        cdef int i
        outputs, inputs = [], []
        for i in range(self.count):
            argument = &self.arguments[i]
            if argument.planned:
                (outputs if argument.row.written else inputs).append(
                    _region(self.names[i], _get_address(call, argument.row), self.descriptors[i])
                )
        if call.workspace_size:
            outputs.append(_memory_region((<uintptr_t>call.workspace, call.workspace_size)))
        if call.reserve_size:
            outputs.append(_memory_region((<uintptr_t>call.reserve, call.reserve_size), "reserve"))
        if handle.in_place:
            taken = [output[1:] for output in outputs]
            inputs = [given for given in inputs if given[1:] not in taken]
        elif _normalizes(call.operation):
            if self._is_over(call) and self._may_write_over(handle, self.source, self.target):
                source = self.names[self.source]
                _arguments.disjoint(outputs, [read for read in inputs if read.name != source])
                self.in_place = True
                return 0
        _arguments.disjoint(outputs, inputs)
        return 0

    cdef bint _may_write_over(self, Handle handle, int source, int target) except -1:
        """Say whether the call is correct where its output is its input.

        Raises UnsupportedError where it is not, though others of the backend are; False where none is.
        """
        cdef const char *why = NULL
        cdef const pbn_call *call = &self.call
        cdef const pbn_tensor *x = call.x_desc
        cdef const pbn_backend *table = self.table if self.maker == NULL else self.maker
        if not table.capability(call.operation, call.mode, x.dtype, x.layout, x.rank, &why) & PBN_CAP_IN_PLACE:
            return False
        if call.beta != 0 or self.descriptors[source].strides != self.descriptors[target].strides:
            return False
        reason = _not_in_place(handle, call, call.saved_mean != NULL) if self.maker == NULL else ""
        if reason:
            text = f"{self.names[target]} may not be {self.names[source]} here: {reason}"
            raise _unsupported(handle, self.name, text)
        return True
