# A handle's arrays: descriptors of them, keys of calls, workspaces.

cdef object _keyed(object value):
    """A float as part of a key: 0.0 and -0.0 are equal, but not the same to a vendor."""
    return (value, copysign(1.0, value)) if <double>value == 0.0 else value


cdef class _HandleArrays(_HandleLife):
    """A handle's view of arrays: their memory, descriptors and keys."""

    cdef object _buffer(self, object array, str argument, bint output):
        return self._reached(_arrays.as_buffer(array, argument), argument, output)

    cdef object _reached(self, object memory, str argument, bint output):
        """A Buffer or Memory that calls reach; where its protocol has not said its device, the driver does."""
        if not _reaches(self.table, memory.device_type):
            raise errors.ArgumentError(
                argument,
                f"memory of device type {_device_name(memory.device_type)}",
                f"{_device_name(self.table.device_type)} memory, which backend {self.backend} computes on",
            )
        if memory.device_id == -1 and self.table.memory_device != NULL and type(memory.pointer) is int:
            if 0 < memory.pointer < 1 << 64:
                memory = memory._replace(device_id=self.table.memory_device(<void *><uintptr_t>memory.pointer))
        self._same_device(memory.device_id, argument)
        if output and not memory.writable:
            raise errors.ArgumentError(argument, "a read-only array", "a writable one")
        return memory

    cdef int _here(self, uintptr_t address, str argument) except -1:
        """Refuses a bare address of another device; asks the driver only where there is another one."""
        if self.several and address != 0:
            self._same_device(self.table.memory_device(<void *>address), argument)
        return 0

    cdef object _pointer(self, object value, str argument, bint optional=False):
        address = (_arguments.optional_pointer if optional else _arguments.pointer)(value, argument)
        self._here(address, argument)
        return address

    cdef object _data(self, object array, str argument, bint output=False):
        buffer = self._buffer(array, argument, output)
        shape = _arguments.dims(buffer.dims, argument)
        steps = tuple([s if d != 1 else max(1, s) for d, s in zip(shape, buffer.strides, strict=True)])
        _arguments.strides(steps, shape, argument)
        return buffer._replace(dims=shape, strides=steps)

    cdef uintptr_t _parameter(
        self, object array, str argument, TensorDescriptor param, list kept, bint output=False
    ) except? 0:
        """The address of a parameter array; `kept` holds its memory until the call has returned."""
        buffer = self._buffer(array, argument, output)
        if buffer.dtype != param.dtype:
            wanted = "f64, as x has: convert it, or x to f32" if param.dtype == DataType.FLOAT64 else param.dtype.short
            raise errors.ArgumentTypeError(argument, f"dtype {buffer.dtype.short}", wanted)
        _arguments.parameter_dims(argument, buffer.dims, buffer.strides, param.dims)
        kept.append(buffer)
        return _address(buffer, argument)

    cdef TensorDescriptor _described(self, object buffer):
        """The descriptor of an array, from the handle's bounded cache."""
        key = (buffer.dtype, buffer.dims, buffer.strides)
        found = (<dict>self.descriptors).get(key)
        if found is None or not (<TensorDescriptor>found).open:
            found = TensorDescriptor(self.backend, *key)
            self.descriptors.keep(key, found, _DESCRIPTOR_CACHE)
        return <TensorDescriptor>found

    cdef size_t _kind(self, pbn_argument *argument, str name, bint output, int64_t *key, list held) except 0:
        """Write an array's part of a plan's key, return its bytes, and set the array's address.

        It is a 0 where the array's own protocol, which is asked only once, gave a `Buffer`. This takes the array's
        place; `held`, which has it until the call has returned, is the rest of the key.
        """
        cdef _View view
        array = <object>argument.object
        if _viewed(array, output, &view):
            argument.address = _start(&view)
            if argument.address != 0:
                return _sign(&view, key)
        buffer = self._data(array, name, output)
        argument.address = _address(buffer, name)
        held.append(buffer)
        argument.object = <void *>buffer
        key[0] = 0
        return sizeof(int64_t)

    cdef object _own_parameters(self, const int64_t *key, object x, object scale):
        """The dtype of scale where that is x's own of 16 bits, which decides that of all parameters; else None.

        `key`: that of x, as `_kind` wrote it.
        """
        cdef _View view
        if key[0] == 0:
            own = x.dtype
        elif ((key[1] >> 16) & 0xffff) != 16:
            return None
        else:
            own = DataType.BFLOAT16 if key[1] >> 32 == _DL_BFLOAT else DataType.FLOAT16
        if own.itemsize != 2:
            return None
        if _viewed(scale, False, &view):
            return own if _is_dtype(&view.tensor, own) else None
        return own if self._buffer(scale, "scale", False).dtype is own else None

    cdef tuple _look(self, tuple names, tuple arguments):
        cdef _View view
        cdef Py_ssize_t i
        cdef list key = [], addresses = [0], values = list(arguments)
        cdef bint keep = True
        self._check()
        for i in range(len(arguments)):
            value = arguments[i]
            if names[i] is None:
                if issubclass(type(value), (_arrays.np.floating, _arrays.np.integer)):
                    value = values[i] = value.item()
                if type(value) is float:
                    key.append(_keyed(value))
                elif value is None or type(value) is int:
                    key.append((value,))  # which is no 1.0
                elif type(value) is bool or type(value) is str:
                    key.append((type(value), value))
                elif type(type(value)) is type and issubclass(type(value), tuple) and type(value) is not tuple:
                    fields = [(type(v), _keyed(v) if type(v) is float else v) for v in <tuple>value]
                    keep = keep and all([kind is float or kind is int or kind is str for kind, _ in fields])
                    key.append((type(value), *fields))  # a named one's
                elif (type(value) is list or type(value) is tuple) and all([type(v) is int for v in value]):
                    key.append((type(value), *value))
                else:
                    keep = False
                continue
            if value is None:
                key.append(None)
                addresses.append(0)
                continue
            if _viewed(value, type(value) is not _ndarray, &view):  # a NumPy array's key says whether it is read-only
                key.append(_signed(&view))
                addresses.append(_start(&view))
                continue
            buffer = values[i] = self._buffer(value, names[i], False)
            key.append(_buffer_key(buffer))
            addresses.append(0 if buffer.pointer == 0 else _address(buffer, names[i]))  # 0: no elements, or a query
        return tuple(key) if keep else None, tuple(addresses), values

    cdef Plan _cached(self, object key):
        """The plan kept for this kind of call, or None."""
        try:
            return (<dict>self.plans).get(key)
        except Exception:  # an argument without a hash, which is refused further on
            return None

    cdef Plan _keep(self, object key, Plan plan, int takes):
        """Keeps a plan for later calls of its kind; the oldest of too many goes."""
        plan.handle = None  # which has the plan: it would be a circle
        plan.takes = takes
        with self.lock:
            if self.handle != NULL:
                self.plans.keep(key, plan, _PLAN_CACHE)
        return plan

    def buffer(self, array, argument, *, output=False):
        """Describe an array that this handle's calls can reach, without calling the vendor.

        Parameters
        ----------
        array : array
        argument : str
            The name that errors give it.
        output : bool
            Whether it must be writable.

        Returns
        -------
        Buffer

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not an array, on another device, or read-only where it must be writable.
        """
        self._check()
        return self._buffer(array, _name(argument), _arguments.boolean(output, "output"))

    def memory(self, workspace):
        """Address and bytes of a workspace that this handle's calls can reach; (0, 0) for ``None``.

        Parameters
        ----------
        workspace : array or (int, int) or None

        Returns
        -------
        (int, int)

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Not contiguous memory, on another device, or read-only.
        """
        self._check()
        return self._workspace(workspace, [])

    def descriptor(self, array, argument="array"):
        """The descriptor of a data array, from the handle's bounded cache; the array's memory is not touched.

        Parameters
        ----------
        array : array, rank 2 to 8
        argument : str
            The name that errors give it.

        Returns
        -------
        TensorDescriptor

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
        """
        self._check()
        buffer = self._data(array, _name(argument))
        with self.lock:
            self._check()
            return self._described(buffer)

    cdef tuple _workspace(self, object workspace, list kept, str name="workspace"):
        """(address, bytes) of the workspace argument; `kept` holds its memory until the call has returned."""
        if workspace is None:
            return 0, 0
        if isinstance(workspace, tuple) and len(workspace) == 2:
            return _workspace_pair(self, workspace[0], workspace[1], name)
        memory = self._reached(_arrays.as_memory(workspace, name), name, True)
        kept.append(memory)
        _arrays.note_written((workspace,))
        return memory.pointer, memory.nbytes

    cdef int _lend(self, pbn_call *call, size_t need, str function) except -1:
        """Gives a call the handle's own workspace, under its lock; it grows with the largest call."""
        if need > self.scratch_size:
            free(self.scratch)
            self.scratch = NULL
            self.scratch_size = 0
            if posix_memalign(&self.scratch, _WORKSPACE_ALIGNMENT, need) != 0:
                self.scratch = NULL
                raise errors.AllocationError(
                    backend=self.backend, function=function, status=PBN_E_MEMORY, status_name="PBN_E_MEMORY",
                    text=f"{need} bytes of workspace", library=self.library.path, version=self.library.version,
                )
            self.scratch_size = need
        call.workspace = self.scratch
        call.workspace_size = self.scratch_size
        return 0


cdef object _handles = weakref.WeakSet()
