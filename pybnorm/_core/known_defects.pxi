# Known defects: calls are looked up in the table before they are made.

cdef str _POLICY = "PYBNORM_KNOWN_DEFECTS"
cdef tuple _POLICIES = ("warn", "error", "ignore")


cdef str _policy(object value):
    """The handle's policy for known defects: the argument, else the environment variable, else ``"warn"``."""
    name = "known_defects"
    if value is None:
        value, name = os.environ.get(_POLICY, "").strip() or "warn", _POLICY
    if not isinstance(value, str) or value not in _POLICIES:
        raise errors.ArgumentError(name, value, f"one of {', '.join(_POLICIES)}")
    return value


cdef int _warn_of_defects(Handle handle, const pbn_call *call, bint saved, str name) except -1:
    """Warn of a batch-norm call with a known defect, or refuse it.

    Called when a plan or a list of calls is made, and so once for each kind of call.
    """
    if not handle.defects:
        return 0
    cdef const pbn_tensor *x = call.x_desc
    asked = defects.Call(
        Operation(call.operation), Mode(call.mode), DataType(x.dtype), tuple([x.dims[i] for i in range(x.rank)]),
        Layout(x.layout), saved, call.beta,
    )
    for defect in handle.defects:
        if not defect.predicate(asked):
            continue
        what = f"wrong {', '.join(defect.outputs)}" if defect.outputs else "the call fails"
        text = f"known defect {defect.id}, {what}: {defect.what}"
        if defect.links:
            text += f" ({', '.join(defect.links)})"
        if handle.policy == "error":
            raise _unsupported(handle, name, f"{text}. Handle(known_defects='ignore') makes the call all the same")
        shape = "x".join(map(str, asked.dims))
        _arguments.warn(
            f"{handle.backend} {name} of {asked.dtype.short} {shape}: {text}. "
            "Handle(known_defects='error') refuses such calls, 'ignore' is silent",
            errors.KnownDefectWarning,
        )
    return 0
