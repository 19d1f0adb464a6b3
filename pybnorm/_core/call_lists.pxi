# Calls in a row, run without Python in between.

cdef enum:
    _SLOT_BITS = 56
    _MAX_SLOTS = 32


SLOT_BITS = _SLOT_BITS
cdef uint64_t _OFFSET = (<uint64_t>1 << _SLOT_BITS) - 1


cdef struct _Way:  # of a call
    pbn_plan *plan  # NULL: none yet, or none at all
    bint given  # a `Plan` of `CallList.given`, which has it
    uintptr_t alignment  # of the data that a given one is for; data at other addresses go to the entry point


cdef struct _Place:
    size_t member  # of pbn_call, in bytes from its begin
    int slot
    size_t offset


cdef int _resize(void **memory, size_t count, size_t size) except -1:
    """Make room for `count` elements of a size."""
    cdef void *grown = realloc(memory[0], count * size)
    if grown == NULL:
        raise MemoryError
    memory[0] = grown
    return 0


cdef class CallList:
    """CallList(handle)\n--\n\nA handle's calls in a row, checked once and run again and again on other
    memory.

    An address in them is made up of a slot and an offset, ``slot << 56 | offset``; where the slots begin is said at
    each run. Slot 0 is the workspace.

    Parameters
    ----------
    handle : Handle
        Later runs are given it again: the list does not keep it. Runs with another handle are slower where the backend
        has plans of its own, which belong to a handle.
    """

    cdef const pbn_backend *table
    cdef pbn_call *calls
    cdef int *ends  # of each call's part of `places`
    cdef int count
    cdef _Place *places
    cdef _Extent *extents
    cdef int extent_count
    cdef int slots
    cdef dict descriptors
    # By call. Those that are not given are made when it first runs, under the lock of the handle that they belong to.
    cdef _Way *ways
    cdef list given  # by call: a Plan or None
    cdef bint planned  # whether the backend makes such plans
    cdef uint64_t serial  # of that handle
    cdef int forks  # as `_forks` was

    def __cinit__(self, Handle handle not None):
        handle._check()
        self.table = handle.table
        self.descriptors, self.given = {}, []
        self.serial, self.forks = handle.serial, _forks
        self.planned = self.table.plan_create != NULL

    def __dealloc__(self):
        cdef int i
        if self.forks == _forks and not _exiting:  # as for a Plan
            for i in range(self.count):
                if self.ways[i].plan != NULL and not self.ways[i].given:
                    self.table.plan_destroy(self.ways[i].plan)
        free(self.ways)
        free(self.calls)
        free(self.ends)
        free(self.places)
        free(self.extents)

    def __len__(self):
        return self.count

    cdef int _not_ours(self, Handle handle) except -1:
        handle._check()
        raise errors.ArgumentError("handle", handle.backend, "a handle of the list's own backend")

    cdef TensorDescriptor _own(self, Handle handle, object buffer):
        """A descriptor that nobody else can change; the pieces of an array share theirs."""
        key = _key(buffer)
        found = self.descriptors.get(key)
        if found is None:
            found = self.descriptors[key] = TensorDescriptor(handle.backend, *key)
        return found

    def append(
        self, Handle handle not None, object operation, dict arrays not None, object workspace, Plan plan=None, **values
    ):
        """Add one call.

        Parameters
        ----------
        handle : Handle
        operation : Operation
        arrays : dict of str to Buffer
            Every tensor of the call by its name; parameters in their derived shape.
        workspace : (int, int)
            Offset in slot 0 and bytes.
        plan : Plan, optional
            What `way_of` said of this call: runs with this handle go that way.
        **values
            mode and scalars by the names that `Handle`'s methods have for them.

        Raises
        ------
        ArgumentError, UnsupportedError
            As that method.
        """
        cdef pbn_call call
        cdef TensorDescriptor own, pd
        cdef int op = _arguments.operation(operation)
        cdef int row
        cdef size_t offset, nbytes
        cdef const pbn_backend *maker
        cdef int place = self.ends[self.count - 1] if self.count else 0
        handle._check()
        if handle.table != self.table:
            self._not_ours(handle)
        if op not in _CALL_NAMES:
            raise errors.ArgumentError("operation", operation, "an operation that computes")
        memset(&call, 0, sizeof(call))
        call.operation = op
        described = {}
        strange = arrays.keys() - {tensor.name for tensor in tensors(op)}
        if strange:
            raise errors.ArgumentError("arrays", min(strange), f"the tensors of {_CALL_NAMES[op]} alone")
        for row in range(PBN_ROWS):
            if pbn_rows[row].operation != op or pbn_rows[row].vector:
                continue
            name = _ROW_NAMES[row]
            if name in arrays:
                own = self._own(handle, arrays[name])
                _set_descriptor(&call, &pbn_rows[row], own)
                if pbn_rows[row].when == PBN_ALWAYS:
                    described[name] = own
            elif pbn_rows[row].when == PBN_ALWAYS:
                needed = ", ".join([t.name for t in tensors(op) if not t.vector and t.when == "always"])
                raise errors.ArgumentError("arrays", f"no {name}", f"{needed}, for {_CALL_NAMES[op]}")
        _set_scalars(&call, values)
        _check_scalars(&call, described, None, "running_mean" in arrays)
        own = described.get("x", described.get("y"))
        maker = self.table if plan is None or plan.maker == NULL else plan.maker
        _check_capability(maker, op, call.mode, own, _CALL_NAMES[op])
        for row in range(PBN_ROWS):
            if pbn_rows[row].operation == op and _ROW_NAMES[row] in arrays:
                _check_needs(maker, op, call.mode, own, pbn_rows[row].needs, f"tensor {_ROW_NAMES[row]!r}")
        if call.inverse:
            _check_needs(maker, op, call.mode, own, PBN_CAP_INVERSE, "inverse variance")
        if _normalizes(op):
            key = _key(arrays["x"]), call.mode
            pd = self.descriptors.get(key)
            if pd is None:
                pd = _parameters_of(own, call.mode) if maker != self.table else derive_bn_tensor_descriptor(
                    own, Mode(call.mode)
                )
                self.descriptors[key] = pd
            call.param_desc = &pd.tensor
        pair = _arguments.items(workspace, "workspace", "offset and bytes", 2)
        if len(pair) != 2:
            raise errors.ArgumentError("workspace", workspace, "offset and bytes")
        offset, nbytes = _arguments.byte_count(pair[0], "workspace"), _arguments.byte_count(pair[1], "workspace")
        call.workspace, call.workspace_size = <void *>offset, nbytes
        call.share = _arguments.scalar(values.get("share", 0.0), "share", DataType.FLOAT32)
        call.sums_only = _arguments.boolean(values.get("sums_only", False), "sums_only")
        missing = [t.name for t in tensors(op) if t.when == "always" and t.name not in arrays]
        if missing and call.share == 0 and not call.sums_only:  # a part of a batch norm needs less
            raise errors.ArgumentError("arrays", f"no {missing[0]}", f"every tensor of {_CALL_NAMES[op]}")
        if (call.share != 0 or call.sums_only) if plan is None else not self._takes(plan, &call):
            raise errors.ArgumentError("plan", plan, f"what way_of said of this {_CALL_NAMES[op]} by the list's handle")
        self.slots = max(self.slots, 1)  # slot 0 is the workspace's
        _resize(<void **>&self.calls, self.count + 1, sizeof(pbn_call))
        _resize(<void **>&self.ends, self.count + 1, sizeof(int))
        _resize(<void **>&self.ways, self.count + 1, sizeof(_Way))
        self.ways[self.count] = _Way(NULL, False, 1)
        if plan is not None:
            # native takes any, and on the CPU no kernel depends on it.
            alignment = 1 if plan.maker != NULL or self.table.device_type == PBN_DEVICE_CPU else plan.alignment
            self.ways[self.count] = _Way(plan.plan, True, alignment)
        self.given.append(plan)
        _resize(<void **>&self.places, place + <int>len(arrays), sizeof(_Place))
        for name, buffer in arrays.items():
            self.places[place].member = _MEMBERS[name]
            self.places[place].slot = self._slot(buffer.pointer)
            self.places[place].offset = buffer.pointer & _OFFSET
            place += 1
        self.calls[self.count], self.ends[self.count] = call, place
        self.count += 1

    cdef bint _takes(self, Plan plan, const pbn_call *call) noexcept:
        """Say whether the plan is the list's handle's, and one of such a call."""
        return (
            plan.plan != NULL and plan.serial == self.serial
            and plan.call.operation == call.operation and plan.call.sums_only == call.sums_only
            and plan.call.inverse == call.inverse
            and (plan.call.share != 0) == (call.share != 0)
        )

    cdef int _slot(self, object address) except -1:
        slot = address >> _SLOT_BITS
        if not 0 <= slot < _MAX_SLOTS:
            raise errors.ArgumentError("address", f"slot {slot}", f"slots from 0 to {_MAX_SLOTS - 1}")
        self.slots = max(self.slots, slot + 1)
        return slot

    def reach(self, address, nbytes, element, written):
        """Say that memory is read or written, for `apart`."""
        address, nbytes = _arguments.pointer(address, "address"), _arguments.byte_count(nbytes, "nbytes")
        element, written = _arguments.integer(element, "element", 1, 16), _arguments.boolean(written, "written")
        cdef _Extent *extent
        _resize(<void **>&self.extents, self.extent_count + 1, sizeof(_Extent))
        extent = &self.extents[self.extent_count]
        extent.slot, extent.start = self._slot(address), address & _OFFSET
        extent.end, extent.element, extent.written = extent.start + <size_t>nbytes, element, written
        self.extent_count += 1

    cdef int _begins(self, tuple addresses, uintptr_t *begins) except -1:
        cdef int i
        if len(addresses) < self.slots or len(addresses) > _MAX_SLOTS:
            given = f"{len(addresses)} addresses for {self.slots} slots"
            raise errors.ArgumentError("addresses", given, "one for each slot")
        try:
            for i in range(<int>len(addresses)):
                begins[i] = addresses[i] if type(addresses[i]) is int else _arguments.pointer(addresses[i], "addresses")
        except OverflowError:
            raise errors.ArgumentError("addresses", addresses[i], "an address of 64 bits") from None
        return 0

    def apart(self, tuple addresses not None, workspace=0):
        """Say whether the memory is there and aligned, and no written range overlaps another.

        False says no more than that some are in doubt: interleaved views may be apart.

        Parameters
        ----------
        addresses : tuple of int
            As in `run`.
        workspace : int
            Bytes of slot 0 that are written.
        """
        cdef uintptr_t begins[_MAX_SLOTS]
        cdef size_t written = _arguments.byte_count(workspace, "workspace")
        self._begins(addresses, begins)
        return _apart(self.extents, self.extent_count, begins, written)

    def written(self):
        """The slots whose memory is written, without that of the workspace."""
        return sorted({self.extents[i].slot for i in range(self.extent_count) if self.extents[i].written} - {0})

    def run(self, Handle handle not None, tuple addresses not None):
        """Make the calls.

        Parameters
        ----------
        handle : Handle
            Of the backend that the list was made for.
        addresses : tuple of int
            Where the slots begin.

        Raises
        ------
        ClosedError, VendorError
        """
        cdef uintptr_t begins[_MAX_SLOTS]
        cdef pbn_call call  # a copy: other threads run this list too
        cdef _Place *place
        cdef _Lock lock
        cdef pbn_plan *plan
        cdef const pbn_backend *maker
        cdef int i, j = 0
        cdef bint mine = handle.serial == self.serial
        if handle.table != self.table:
            self._not_ours(handle)
        self._begins(addresses, begins)
        for i in range(self.ends[self.count - 1] if self.count else 0):  # before any call
            if begins[self.places[i].slot] == 0:
                raise errors.ArgumentError("addresses", addresses, "an address for each array's slot")
        lock = handle.lock
        lock.acquire()
        try:
            for i in range(self.count):
                call = self.calls[i]
                while j < self.ends[i]:
                    place = &self.places[j]
                    (<uintptr_t *>(<char *>&call + place.member))[0] = begins[place.slot] + place.offset
                    j += 1
                if call.workspace_size:
                    call.workspace = <void *>(begins[0] + <uintptr_t>call.workspace)
                else:
                    call.workspace = NULL
                plan, algorithm, maker = NULL, None, NULL
                if mine and _normalizes(call.operation):
                    if not self.ways[i].given:
                        if self.planned and self.ways[i].plan == NULL:
                            self._plan(handle, &call, i)
                        plan = self.ways[i].plan
                    elif not _data_bits(&call) & (self.ways[i].alignment - 1):
                        plan, algorithm = self.ways[i].plan, (<Plan>self.given[i]).algorithm
                        maker = (<Plan>self.given[i]).maker
                    elif call.share != 0 or call.sums_only:
                        raise errors.ArgumentError("addresses", addresses, "ones as aligned as those it was made for")
                elif call.share != 0 or call.sums_only:
                    raise errors.ArgumentError("handle", handle, "the list's own")
                _run(handle, &call, plan, _CALL_NAMES[call.operation], algorithm, maker)
        finally:
            lock.release()

    cdef int _plan(self, Handle handle, const pbn_call *call, int i) except -1:
        """Plans a call of the list, under the handle's lock: what does not depend on addresses is then done once."""
        cdef int status
        handle._check()
        with nogil:
            status = self.table.plan_create(handle.handle, call, NULL, &self.ways[i].plan)
        if status != 0:
            raise _error(self.table, status, _CALL_NAMES[call.operation], _shown(call))
        self.planned = self.ways[i].plan != NULL
        return 0
