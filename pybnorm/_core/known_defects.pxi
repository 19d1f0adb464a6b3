# Known defects: calls are looked up in the table before they are made.

cdef str _POLICY = "PYBNORM_KNOWN_DEFECTS"
cdef tuple _POLICIES = ("warn", "avoid", "avoid_all", "error", "ignore")
cdef object _avoider = None


def set_avoider(avoider):
    """Have `avoider` find other calls where one has a known defect.

    Parameters
    ----------
    avoider : callable
        Takes a handle, the `defects.Call`, slot and descriptor of each tensor by its name, the scalars, and the
        defects, none where the call is refused as its arrays lie; returns a `CallList`, the bytes of workspace that it
        needs, and what is copied.
    """
    global _avoider
    _avoider = avoider


cdef str _policy(object value):
    """The handle's policy for known defects: the argument, else the environment variable, else ``"warn"``."""
    name = "known_defects"
    if value is None:
        value, name = os.environ.get(_POLICY, "").strip() or "warn", _POLICY
    if not isinstance(value, str) or value not in _POLICIES:
        raise errors.ArgumentError(name, value, f"one of {', '.join(_POLICIES)}")
    return value


cdef object _asked(const pbn_call *call, bint saved, uintptr_t alignment):
    """What the table's predicates are asked about."""
    cdef const pbn_tensor *x = call.x_desc
    return defects.Call(
        Operation(call.operation), Mode(call.mode), DataType(x.dtype), tuple([x.dims[i] for i in range(x.rank)]),
        Layout(x.layout), saved, call.beta, alignment,
    )


cdef str _family(str algorithm):
    """Its name in the table: "graph" of "graph:2", "dense" of "dense+ex"."""
    return algorithm.partition(":")[0].partition("+")[0]


cdef str _said(object defect):
    what = f"wrong {', '.join(defect.outputs)}" if defect.outputs else "the call fails"
    text = f"known defect {defect.id}, {what}: {defect.what}"
    return text + (f" ({', '.join(defect.links)})" if defect.links else "")


cdef int _warn_of_defects(Handle handle, tuple met, object asked, str name) except -1:
    """Warn of a batch-norm call with known defects, or refuse it.

    Called when a plan is made, and so once for each kind of call.
    """
    if handle.policy == "error":
        raise _unsupported(
            handle, name, f"{_said(met[0])}. Handle(known_defects='avoid') goes another way, 'ignore' makes the call"
        )
    shape = "x".join(map(str, asked.dims))
    for defect in met:
        _names.warn(
            f"{handle.backend} {name} of {asked.dtype.short} {shape}: {_said(defect)}. "
            "Handle(known_defects='avoid') goes another way, 'error' refuses such calls, 'ignore' is silent",
            errors.KnownDefectWarning,
        )
    return 0
