# A handle's life: opened, borrowed, forked, closed.

cdef uint64_t _handles_made = 0


cdef class _HandleLife:
    """The objects that a handle owns, from opening to closing."""
    cdef const pbn_backend *table
    cdef pbn_handle *handle
    cdef pbn_handle *native  # which computes what has a defect, where the handle avoids; else NULL
    cdef const pbn_backend *native_table
    cdef str no_native  # why it is not there
    cdef bint borrowed
    cdef bint forked
    cdef int device_id  # -1 if it is not known
    cdef uint64_t serial  # which of this process's handles it is: an address may come again
    cdef bint several  # whether there are other devices, whose memory may be given
    # Lock order. Held during a vendor's call, and while plans and descriptors are made or kept. Arrays are read before
    # it is taken: their protocols may wait for another thread, which may wait for this lock. No other handle's lock and
    # not `_load_lock` is taken while it is held, so no two threads can wait for one another. A handle that is made
    # loads native under its own: no other thread knows it yet.
    cdef _Lock lock
    cdef Cache descriptors
    cdef Cache plans
    cdef object caches  # of modules that make calls ready for this handle, by owner: emptied when it closes
    cdef void *scratch
    cdef size_t scratch_size
    cdef readonly str backend
    cdef readonly object library
    cdef readonly object device
    cdef str card  # the device's name for the table of defects; empty where it is not known
    cdef str policy
    cdef bint avoids  # whether native computes what the library gets wrong or does not have
    cdef str unseen  # what to say of a version that no run has seen
    cdef tuple defects  # of this library, that its entry points have; with their weaknesses where the handle avoids all
    cdef tuple weak  # weaknesses that some of its algorithms do not have
    cdef int tuned  # whether those hold the defects of tuned kernels
    cdef bint in_place  # the judge's: an output may be an input itself; to callers that is refused
    cdef object __weakref__

    def __cinit__(self):
        self.handle = self.native = NULL
        self.scratch = NULL
        self.scratch_size = 0
        self.forked = False
        self.device_id = -1
        self.lock = _Lock()
        self.descriptors = Cache()
        self.plans = Cache()
        self.caches = collections.defaultdict(Cache)

    def __init__(self, backend, *, device=None, stream=None, known_defects=None):
        cdef const pbn_backend *table
        cdef pbn_handle *handle = NULL
        cdef int status
        backend = _backend_on(backend, device)
        address = None if stream is None else _stream(stream)
        policy = _policy(known_defects)
        library = load(backend)
        with self.lock:
            if self.table != NULL:
                raise errors.ArgumentError("self", "an initialised handle", "a new one")
            table = _table(backend)
            with nogil:
                status = table.handle_create(&handle)
            if status != 0:
                raise _error(table, status, "create", ())
            self._adopt(table, handle, library, False, policy)
        if address is not None:
            try:
                self.set_stream(address)
            except BaseException:
                self.close()
                raise

    cdef int _adopt(self, const pbn_backend *table, pbn_handle *handle, object library, bint borrowed,
                    str policy) except -1:
        cdef char card[PBN_TEXT_MAX]
        global _handles_made
        _handles_made += 1
        self.serial = _handles_made
        self.table = table
        self.handle = handle
        self.borrowed = borrowed
        self.library = library
        self.policy = policy
        self.unseen = defects.unrecorded(library.backend, library.version)
        if self.unseen and policy != "ignore":
            _tell_once(self.unseen)
        self.backend = library.backend
        known = defects._of_library(library, True)
        self.weak = tuple([d for d in known if d.ways and d.effect == defects.Effect.WEAK])
        self.tuned = -1
        self._look_up()
        self.device_id = table.handle_device(handle)
        self.avoids = policy in ("avoid", "avoid_all") and not self.backend.startswith("native")
        if self.avoids:
            _open_native(<Handle>self)
        if self.device_id >= 0:
            self.device = self.device_id
        found = self.device_id >= 0 and table.card != NULL and table.card(self.device_id, card, sizeof(card))
        self.card = (<bytes>card).decode("ascii", "replace") if found else ""
        self.several = self.device_id >= 0 and table.memory_device != NULL and table.device_count() > 1
        _handles.add(self)
        return 0

    cdef int _look_up(self) except -1:
        """Take the defects from the table: a framework may have had the library tune since this was asked last."""
        cdef bint tuned = defects._takes_by_time(self.backend) or (
            self.table.takes_by_time != NULL and self.table.takes_by_time(self.handle) > 0
        )
        if tuned != self.tuned:
            self.defects = defects._of_library(self.library, self.policy == "avoid_all", tuned)
            self.tuned = tuned
        return 0

    @staticmethod
    def from_pointer(backend, pointer, *, known_defects=None):
        """Use a vendor's handle that somebody else owns.

        Parameters
        ----------
        backend : str
        pointer : int
            ``cudnnHandle_t``, ``miopenHandle_t`` or ``dnnl_stream_t`` that outlives this object.
        known_defects : str, optional
            As for `Handle`.

        Returns
        -------
        Handle
            ``close()`` leaves the vendor's object alone.

        Raises
        ------
        ArgumentError
            `pointer` is 0.
        LibraryNotFoundError, LibraryLoadError
            The backend's library is not here, or cannot be used.

        Examples
        --------
        >>> with pybnorm.Handle("onednn") as owner:
        ...     pybnorm.Handle.from_pointer("onednn", owner.pointer).pointer == owner.pointer
        True
        """
        cdef uintptr_t address = _arguments.pointer(pointer, "pointer")
        policy = _policy(known_defects)
        library = load(backend)
        cdef const pbn_backend *table = _table(backend)
        cdef Handle self = Handle.__new__(Handle)
        cdef pbn_handle *handle = NULL
        cdef int status = table.handle_borrow(<void *>address, &handle)
        if status != 0:
            raise _error(table, status, "from_pointer", ())
        self._adopt(table, handle, library, True, policy)
        return self

    @property
    def pointer(self):
        """Address of the vendor's handle."""
        with self.lock:
            self._check_open()
            return <uintptr_t>self.table.handle_pointer(self.handle)

    @property
    def closed(self):
        """True once `close` has been called."""
        return self.handle == NULL

    @property
    def workspace_nbytes(self):
        """Bytes of workspace the handle keeps for calls on CPU arrays; grows with the largest call."""
        return self.scratch_size

    @property
    def known_defects(self):
        """The word given to `Handle` for calls that have a known defect."""
        self._check_open()
        return self.policy

    cdef tuple _met(self, object call):
        self._check_open()
        return tuple([d for d in self.defects if d.predicate(call)])

    @property
    def stream(self):
        """The stream that calls go to, as an integer."""
        with self.lock:
            self._check_open()
            return self._stream()

    cdef uintptr_t _stream(self) except? 1:
        cdef void *stream = NULL
        cdef int status = self.table.stream_get(self.handle, &stream)
        if status != 0:
            raise _error(self.table, status, "get_stream", ())
        return <uintptr_t>stream

    cdef int _go_to(self, uintptr_t stream) except -1:
        cdef int status = self.table.stream_set(self.handle, <void *>stream)
        if status != 0:
            raise _error(self.table, status, "set_stream", ())
        return 0

    def set_stream(self, stream):
        """Send later calls to `stream`: an integer, an object with ``__cuda_stream__``, a stream of hip-python.

        Vendor symbols: ``cudnnSetStream``, ``miopenSetStream``; oneDNN takes a ``dnnl_stream_t``.
        """
        cdef uintptr_t address = _stream(stream)
        with self.lock:
            self._check()
            self._go_to(address)

    def query_runtime_error(self, mode="blocking"):
        """Read what the kernels of this handle's calls have recorded on the device; the vendor then forgets it.

        A call returns success once its kernel is launched. cuDNN's kernels of `Mode.SPATIAL_PERSISTENT` sum in fixed
        point and, by NVIDIA's documentation, record it when that overflows; no other batch-norm kernel is said to
        record anything. None is therefore no proof that the results are correct. Errors of CUDA itself come with the
        next call or synchronisation, not from here. The record is the handle's and holds one error.

        Parameters
        ----------
        mode : str
            ``"blocking"``: after all work of the handle's stream, for which it waits; ``"nonblocking"``: at once,
            ``"CUDNN_STATUS_RUNTIME_IN_PROGRESS"`` while the stream has work left; ``"raw"``: at once, whatever has run.
            The first two ask the stream that the calls were made on: not after `set_stream`.

        Returns
        -------
        str or None
            The vendor's name of the status, such as ``"CUDNN_STATUS_RUNTIME_FP_OVERFLOW"``; None for success.

        Raises
        ------
        ArgumentError
            Another mode, or a closed handle.
        UnsupportedError
            The backend's kernels record nothing, or the library lacks the symbol.

        Examples
        --------
        ::

            handle.forward_training(x, scale, bias, y, mode="persistent")  # a cuDNN handle
            assert handle.query_runtime_error() is None
        VendorError
            The query itself failed.

        Notes
        -----
        Vendor symbol: ``cudnnQueryRuntimeError``, with ``CUDNN_ERRQUERY_BLOCKING``, ``_NONBLOCKING`` or ``_RAWCODE``;
        deprecated in cuDNN 9. MIOpen and oneDNN have no such query.
        """
        cdef int query = _arguments.runtime_query(mode)
        cdef int recorded = 0
        cdef int status
        with self.lock:
            self._check()
            if self.table.runtime_error == NULL:
                raise _unsupported(<Handle>self, "query_runtime_error", "its kernels record no errors")
            with nogil:
                status = self.table.runtime_error(self.handle, query, &recorded)
            if status != 0:
                raise _error(self.table, status, "query_runtime_error", ())
            return None if recorded == 0 else self.table.status_name(recorded).decode("utf-8", "replace")

    def follow_stream(self, array):
        """Send later calls to the stream that is current for an array in its framework.

        Parameters
        ----------
        array : array
            Of the handle's device and of a framework whose type has DLPack's table of C functions, as PyTorch's from
            2.10 on.

        Returns
        -------
        bool
            False where the framework does not say it in C or the array is not of this kind of device; nothing has
            changed then. True on the CPU, which has no streams to follow.

        Raises
        ------
        ArgumentError
            An array of another device.
        ClosedError, VendorError

        Notes
        -----
        Vendor symbols: ``cudnnGetStream``, and where it differs ``cudnnSetStream``; ``miopenGetStream``,
        ``miopenSetStream``.
        """
        cdef uintptr_t current = 0
        cdef int32_t device = -1
        self._check()
        if not _current_stream(array, self.table.device_type, &device, &current):
            return False
        if self.table.device_type == PBN_DEVICE_CPU:
            return True
        self._follow(device, current)
        return True

    cdef int _follow(self, int32_t device, uintptr_t current) except -1:
        """Has later calls go to a stream of a device, which has to be this one's."""
        with self.lock:
            self._check()
            self._same_device(device, "array")
            if self._stream() != current:
                self._go_to(current)
        return 0

    cdef int _check_open(self) except -1:
        if self.handle == NULL:
            raise errors.ClosedError("handle")
        return 0

    cdef int _check(self) except -1:
        self._check_open()
        if self.forked:
            raise errors.ArgumentError(
                "handle",
                "a handle made before fork()",
                "one made in this process, as threads do not survive a fork"
                if self.table.device_type == PBN_DEVICE_CPU else
                "one of a process started by multiprocessing's spawn or forkserver: device contexts do not survive a "
                "fork, and this process cannot make others",
            )
        return 0

    cdef int _after_fork(self) except -1:
        self.lock = _Lock()  # the old one's owner may not exist in this process
        self.forked = True
        return 0

    def close(self):
        """Destroy the vendor's handle if it is ours; further calls do nothing.

        Raises
        ------
        VendorError
            The vendor reports a failure, for example of earlier asynchronous work. The handle is closed all the same.
        ContextLostError
            The device's context is lost. The handle is closed all the same, and plans of it can still be dropped.
        """
        cdef int status = 0
        with self.lock:
            if self.handle != NULL:
                status = self._release()
        if status != 0:
            raise _error(self.table, status, "destroy", ())

    cdef int _release(self) noexcept:
        cdef pbn_handle *handle = self.handle
        cdef int status
        self.handle = NULL
        if self.forked:  # the vendor's destroy would wait for threads, or talk to a device, of the parent
            return 0
        for cache in list(self.caches.values()):
            cache.clear()
        self.plans.clear()
        with nogil:
            if self.native != NULL:
                self.native_table.handle_destroy(self.native)
            status = self.table.handle_destroy(handle)
            free(self.scratch)
        self.native = NULL
        self.scratch = NULL
        self.scratch_size = 0
        self.descriptors.clear()
        return status

    def __enter__(self):
        self._check()
        return self

    def __exit__(self, exception_type, *_):
        try:
            self.close()
        except errors.VendorError:
            # A lost device context makes destroy fail too; the first error is the one to see.
            if exception_type is None:
                raise

    def __del__(self):
        if self.handle == NULL:
            return
        if sys is None or sys.is_finalizing():
            # The driver may have shut down already: destroying then crashes in some vendors.
            self.handle = NULL
            return
        text = None
        try:
            if not self.borrowed and not self.forked:
                text = repr(self)
        finally:
            self._release()  # before the warning, which may be an exception
        if text is not None:
            warnings.warn(f"unclosed {text}", ResourceWarning, stacklevel=2, source=self)

    def __reduce__(self):
        raise TypeError("a Handle belongs to its process and cannot be copied or pickled")

    def __repr__(self):
        with self.lock:
            if self.handle == NULL:
                return "<Handle closed>"
            where = "" if self.device is None else f" device={self.device}"
            where += " made before fork()" if self.forked else ""
            return f"<Handle {self.backend} {'.'.join(map(str, self.library.version))}{where} at {self.pointer:#x}>"

    cdef int _same_device(self, object device_id, str argument) except -1:
        if self.device is not None and device_id not in (self.device, -1):
            raise errors.ArgumentError(
                argument, f"memory of device {device_id}", f"memory of device {self.device}, the handle's"
            )
        return 0
