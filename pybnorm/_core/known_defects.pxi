# What the table of known defects says of a call, before it is made.

cdef str _POLICY = "PYBNORM_KNOWN_DEFECTS"
cdef tuple _POLICIES = ("warn", "error", "ignore")


cdef str _policy(object value):
    """What a handle does about known defects: as its maker says, else as the environment does."""
    name = "known_defects"
    if value is None:
        value, name = os.environ.get(_POLICY, "").strip() or "warn", _POLICY
    if not isinstance(value, str) or value not in _POLICIES:
        raise errors.ArgumentError(name, value, f"one of {', '.join(_POLICIES)}")
    return value


cdef int _warn_of_defects(Handle handle, const pbn_call *call, bint saved, str name) except -1:
    """Warns of, or refuses, a batch-norm call that the table knows to go wrong. Once for each kind of call: of plans
    and lists of calls when they are made."""
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
            raise _unsupported(handle, name, text)
        shape = "x".join(map(str, asked.dims))
        warnings.warn(
            f"{handle.backend} {name} of {asked.dtype.short} {shape}: {text}. "
            "Handle(known_defects='error') refuses such calls, 'ignore' is silent",
            errors.KnownDefectWarning, stacklevel=1,
        )
    return 0
