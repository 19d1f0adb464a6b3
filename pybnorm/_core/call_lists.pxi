# Calls in a row, run without Python in between.

cdef dict _members():
    """Where pbn_call has the address of each tensor."""
    cdef pbn_call c
    cdef char *start = <char *>&c
    return {
        "x": <char *>&c.x - start, "dy": <char *>&c.dy - start, "y": <char *>&c.y - start,
        "dx": <char *>&c.dx - start, "scale": <char *>&c.scale - start, "bias": <char *>&c.bias - start,
        "running_mean": <char *>&c.running_mean - start, "running_variance": <char *>&c.running_variance - start,
        "saved_mean": <char *>&c.saved_mean - start, "saved_inv_variance": <char *>&c.saved_inv_variance - start,
        "dscale": <char *>&c.dscale - start, "dbias": <char *>&c.dbias - start,
    }


cdef dict _MEMBERS = _members()
cdef dict _CALL_NAMES = {
    PBN_OP_FORWARD_TRAINING: "batch_normalization_forward_training",
    PBN_OP_FORWARD_INFERENCE: "batch_normalization_forward_inference",
    PBN_OP_BACKWARD: "batch_normalization_backward",
    PBN_OP_AXPBY: "axpby",
    PBN_OP_FILL: "fill",
    PBN_OP_RELU: "relu",
    PBN_OP_RELU_BACKWARD: "relu_backward",
}
# The tensors that each has a descriptor of.
cdef dict _DESCRIBED = {
    PBN_OP_FORWARD_TRAINING: ("x", "y"),
    PBN_OP_FORWARD_INFERENCE: ("x", "y"),
    PBN_OP_BACKWARD: ("x", "dy", "dx"),
    PBN_OP_AXPBY: ("x", "y"),
    PBN_OP_FILL: ("y",),
    PBN_OP_RELU: ("x", "y"),
    PBN_OP_RELU_BACKWARD: ("x", "dy", "dx"),
}


cdef class CallList:
    """A handle's calls in a row, checked once and run again and again on other memory.

    An address in them is made up of a slot and an offset, ``slot << 56 | offset``; where the slots begin is said at
    each run. Slot 0 is the workspace.

    Parameters
    ----------
    handle : Handle
        Later runs are given it again: the list does not keep it.
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

    def __cinit__(self, Handle handle not None):
        handle._check()
        self.table = handle.table
        self.descriptors = {}

    def __dealloc__(self):
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

    def append(self, Handle handle not None, object operation, dict arrays not None, object workspace, **values):
        """One call more.

        Parameters
        ----------
        handle : Handle
        operation : Operation
        arrays : dict of str to Buffer
            Every tensor of the call by its name; parameters in their derived shape.
        workspace : (int, int)
            Offset in slot 0 and bytes.
        **values
            mode and scalars by the names that `Handle`'s methods have for them.

        Raises
        ------
        ArgumentError, UnsupportedError
            As that method.
        """
        cdef pbn_call call
        cdef TensorDescriptor xd = None, yd = None, dyd = None, dxd = None, pd = None
        cdef int op = _arguments.operation(operation)
        cdef size_t offset, nbytes
        cdef void *grown
        cdef int place = self.ends[self.count - 1] if self.count else 0
        handle._check()
        if handle.table != self.table:
            self._not_ours(handle)
        if op not in _DESCRIBED:
            raise errors.ArgumentError("operation", operation, "an operation that computes")
        for name in _DESCRIBED[op]:
            if name not in arrays:
                needed = ", ".join(_DESCRIBED[op])
                raise errors.ArgumentError("arrays", f"no {name}", f"{needed}, for {_CALL_NAMES[op]}")
        memset(&call, 0, sizeof(call))
        call.operation = op
        call.alpha_param = 1.0
        if "x" in arrays:
            xd = self._own(handle, arrays["x"])
            call.x_desc = &xd.tensor
        if "y" in arrays:
            yd = self._own(handle, arrays["y"])
            call.y_desc = &yd.tensor
        if "dy" in arrays:
            dyd = self._own(handle, arrays["dy"])
            call.dy_desc = &dyd.tensor
        if "dx" in arrays:
            dxd = self._own(handle, arrays["dx"])
            call.dx_desc = &dxd.tensor
        call.mode = PBN_SPATIAL
        if op == PBN_OP_FORWARD_TRAINING:
            call.mode, call.alpha, call.beta, call.factor, call.epsilon = _arguments.forward_training(
                values["mode"], values["alpha"], values["beta"], xd, yd, None, values["exponential_average_factor"],
                values["epsilon"], "running_mean" in arrays,
            )
        elif op == PBN_OP_FORWARD_INFERENCE:
            call.mode, call.alpha, call.beta, call.epsilon = _arguments.forward_inference(
                values["mode"], values["alpha"], values["beta"], xd, yd, None, values["epsilon"]
            )
        elif op == PBN_OP_BACKWARD:
            call.mode, call.alpha, call.beta, call.alpha_param, call.beta_param, call.epsilon = _arguments.backward(
                values["mode"], values["alpha_data"], values["beta_data"], values["alpha_param"],
                values["beta_param"], xd, dyd, dxd, None, values["epsilon"],
            )
        elif op == PBN_OP_AXPBY:
            call.alpha, call.beta = _arguments.axpby(values["a"], values["b"], xd, yd)
        elif op == PBN_OP_FILL:
            call.alpha = _arguments.fill(values["value"], yd)
        elif op == PBN_OP_RELU:
            _arguments.relu(xd, yd)
        else:
            _arguments.relu_backward(xd, dyd, dxd)
        _check_capability(self.table, op, call.mode, yd if xd is None else xd, _CALL_NAMES[op])
        if op in (PBN_OP_FORWARD_TRAINING, PBN_OP_FORWARD_INFERENCE, PBN_OP_BACKWARD):
            key = _key(arrays["x"]), call.mode
            pd = self.descriptors.get(key)
            if pd is None:
                pd = self.descriptors[key] = derive_bn_tensor_descriptor(xd, Mode(call.mode))
            call.param_desc = &pd.tensor
            _warn_of_defects(handle, &call, "saved_mean" in arrays, _CALL_NAMES[op])
        pair = _arguments.items(workspace, "workspace", "offset and bytes", 2)
        if len(pair) != 2:
            raise errors.ArgumentError("workspace", workspace, "offset and bytes")
        offset, nbytes = _arguments.byte_count(pair[0], "workspace"), _arguments.byte_count(pair[1], "workspace")
        call.workspace, call.workspace_size = <void *>offset, nbytes
        self.slots = max(self.slots, 1)  # slot 0 is the workspace's
        grown = realloc(self.calls, (self.count + 1) * sizeof(pbn_call))
        if grown == NULL:
            raise MemoryError
        self.calls = <pbn_call *>grown
        grown = realloc(self.ends, (self.count + 1) * sizeof(int))
        if grown == NULL:
            raise MemoryError
        self.ends = <int *>grown
        grown = realloc(self.places, (place + <int>len(arrays)) * sizeof(_Place))
        if grown == NULL:
            raise MemoryError
        self.places = <_Place *>grown
        for name, buffer in arrays.items():
            self.places[place].member = _MEMBERS[name]
            self.places[place].slot = self._slot(buffer.pointer)
            self.places[place].offset = buffer.pointer & _OFFSET
            place += 1
        self.calls[self.count], self.ends[self.count] = call, place
        self.count += 1

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
        cdef void *grown = realloc(self.extents, (self.extent_count + 1) * sizeof(_Extent))
        cdef _Extent *extent
        if grown == NULL:
            raise MemoryError
        self.extents = <_Extent *>grown
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
        """Whether the memory is there and aligned, and no written range overlaps another.

        False says no more than that some are in doubt: interleaved views may be apart.

        Parameters
        ----------
        addresses : tuple of int
            As in `run`.
        workspace : int
            Bytes of slot 0 that are written.
        """
        cdef uintptr_t begins[_MAX_SLOTS]
        cdef uintptr_t start, end, other
        cdef size_t written = _arguments.byte_count(workspace, "workspace")
        cdef _Extent *a
        cdef _Extent *b
        cdef int i, j
        self._begins(addresses, begins)
        for i in range(self.extent_count):
            a = &self.extents[i]
            start, end = begins[a.slot] + a.start, begins[a.slot] + a.end
            if start == 0 or start % a.element or end < start or (start < begins[0] + written and begins[0] < end):
                return False
            for j in range(i):
                b = &self.extents[j]
                other = begins[b.slot]
                if (a.written or b.written) and start < other + b.end and other + b.start < end:
                    return False
        return True

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
        cdef int i, j = 0
        if handle.table != self.table:
            self._not_ours(handle)
        self._begins(addresses, begins)
        with handle.lock:
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
                _run(handle, &call, _CALL_NAMES[call.operation])
