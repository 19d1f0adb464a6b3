# Known defects: calls are looked up in the table before they are made.

cdef str _POLICY = "PYBNORM_KNOWN_DEFECTS"
cdef tuple _POLICIES = ("warn", "avoid", "avoid_all", "error", "ignore")
cdef set _told = set()  # the warnings that this process gives once: of unseen versions, of means far from 0
cdef list _TRAINED = ["y", "saved_inv_variance", "running_variance"]


cdef str _policy(object value):
    """The handle's policy for known defects: the argument, else the environment variable, else ``"warn"``."""
    name = "known_defects"
    if value is None:
        value, name = os.environ.get(_POLICY, "").strip() or "warn", _POLICY
    if not isinstance(value, str) or value not in _POLICIES:
        raise errors.ArgumentError(name, value, f"one of {', '.join(_POLICIES)}")
    return value


cdef int _open_native(Handle handle) except -1:
    """Open native for the calls of a handle that avoids, on its device; or note why that cannot be."""
    cdef const pbn_backend *table
    cdef int status
    try:
        backend = _backend_on("native", str(_device_name(handle.table.device_type)).lower())
        load(backend)
    except errors.PybnormError as error:
        handle.no_native = str(error)
        return 0
    table = _table(backend)
    status = table.handle_create(&handle.native)
    if status != 0:
        handle.no_native = str(_error(table, status, "create", ()))
    elif handle.device_id >= 0 and table.handle_device(handle.native) != handle.device_id:
        table.handle_destroy(handle.native)  # that of a borrowed handle need not be current
        handle.native = NULL
        handle.no_native = f"device {handle.device_id}, the handle's, was not current when the handle was made"
    handle.native_table = table
    return 0


cdef object _not_avoided(Handle handle, str name, str fault, str why):
    """The error of a call that the library gets wrong or does not have, and that native does not compute."""
    return _unsupported(handle, name, f"{fault}; native does not compute it here: {why}")


cdef str _fault(tuple met):
    """The known defects of a call, for errors and reasons."""
    return f"known defect {', '.join([d.id for d in met])}: {met[0].what}"


cdef object _asked(Handle handle, const pbn_call *call, bint saved, uintptr_t alignment, bint inplace=False):
    """The argument of the predicates of the table of defects."""
    cdef const pbn_tensor *x = call.x_desc
    cdef bint running = call.operation != PBN_OP_FORWARD_TRAINING or call.running_mean != NULL
    return defects.Call(
        Operation(call.operation), Mode(call.mode), DataType(x.dtype), tuple([x.dims[i] for i in range(x.rank)]),
        Layout(x.layout), saved, call.beta, alignment, inplace, running, handle.card,
    )


cdef tuple _over(int operation):
    """The input and the output of a batch-norm call that may be one array."""
    return ("dy", "dx") if operation == PBN_OP_BACKWARD else ("x", "y")


cdef str _not_in_place(Handle handle, const pbn_call *call, bint saved):
    """Why a call is wrong where it writes y over x, or dx over dy; empty where it is correct."""
    cdef const char *why = NULL
    cdef const pbn_tensor *x = call.x_desc
    if not _normalizes(call.operation) or not (
        handle.table.capability(call.operation, call.mode, x.dtype, x.layout, x.rank, &why) & PBN_CAP_IN_PLACE
    ):
        return f"{_CALL_NAMES[call.operation]} is not known to be correct there"
    asked = _asked(handle, call, saved, 16, True)
    met = [d for d in handle.defects if d.refused and d.predicate(asked)]
    return _said(met[0], _results(call.operation)) if met else ""


cdef str _family(str algorithm):
    """Its name in the table: "graph" of "graph:2"."""
    return algorithm.partition(":")[0]


cdef list _results(int operation):
    """The outputs that a call may write."""
    return [tensor.name for tensor in tensors(operation) if tensor.written]


cdef str _said(object defect, list written):
    """Say what it makes of a call that writes `written`."""
    word = "inexact" if defect.note == "sums in chains" else "wrong"  # correct, but less exact than others
    what = f"{word} {', '.join([n for n in defect.outputs if n in written])}" if defect.outputs else "the call fails"
    text = f"known defect {defect.id}, {what}: {defect.what}"
    return text + (f" ({', '.join(defect.links)})" if defect.links else "")


cdef str _on_card(Handle handle, const pbn_call *call):
    """On which card a batch-norm call has failed, and what is known of that; empty where it makes no difference."""
    if not _normalizes(call.operation) or not handle.card:
        return ""
    asked = _asked(handle, call, call.saved_mean != NULL, 16)
    build = _find.file_digest(handle.library.path)
    met = defects.known_defects(handle.backend, asked, handle.library.version, build)
    return "; ".join([f"on {handle.card}", *[_said(d, []) for d in met if d.cards]])


cdef int _tell_once(str text) except -1:
    """Warn of a version that no run has seen, once in a process."""
    if text not in _told:
        _told.add(text)
        errors._warn(f"{text}. pybnorm check --suite bugs shows which it has", errors.UnseenLibraryWarning)
    return 0


cdef bint _are_far(Handle handle, const pbn_call *call) except -1:
    """Say whether a training call's statistics show that its variance has lost digits; waits for them."""
    cdef bint far
    if handle.table.far_from_zero == NULL or handle.policy == "ignore" or call.saved_mean == NULL:
        return False
    if call.operation != PBN_OP_FORWARD_TRAINING or call.mode == Mode.PER_ACTIVATION:
        return False
    with nogil:
        far = handle.table.far_from_zero(handle.handle, call) == 1
    return far


cdef int _tell_of_means(Handle handle, str name) except -1:
    """Warn of a variance that has lost digits, once in a process."""
    for defect in defects._of_library(handle.library, True):
        if defect.far and defect.id not in _told:
            _told.add(defect.id)
            errors._warn(
                f"{handle.backend} {name}: a mean is 1000 times its deviation or more; {_said(defect, _TRAINED)}. "
                "Handle(known_defects='avoid_all') has native compute such calls", errors.KnownDefectWarning,
            )
    return 0


cdef int _warn_of_defects(Handle handle, tuple met, object asked, str name, list written) except -1:
    """Warn of a batch-norm call with known defects that reach what it writes, or refuse it.

    Called when a plan is made, and so once for each kind of call.
    """
    met = tuple([d for d in met if not d.outputs or any([output in written for output in d.outputs])])
    if met and handle.policy == "error":
        raise _unsupported(
            handle, name,
            f"{_said(met[0], written)}. Handle(known_defects='avoid') has native compute it, 'ignore' makes the call",
        )
    shape = "x".join(map(str, asked.dims))
    for defect in met:
        errors._warn(
            f"{handle.backend} {name} of {asked.dtype.short} {shape}: {_said(defect, written)}. "
            "Handle(known_defects='avoid') has native compute it, 'error' refuses such calls, 'ignore' is silent",
            errors.KnownDefectWarning,
        )
    return 0
