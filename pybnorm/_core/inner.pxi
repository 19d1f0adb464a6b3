# What the package's own modules ask of handles and plans, and their users do not.


def cache(Handle handle not None, str owner):
    """Give the cache where module `owner` keeps calls made ready for this handle; closing it empties that."""
    return handle.caches[owner]


def bound(dict defaults not None, tuple front not None, tuple required not None, tuple positional not None,
          dict named not None):
    """A call's arguments in the order of `defaults`, or None where they do not fit.

    `front`: those that may be given by position; `required`: those whose default stands for none.
    """
    cdef dict values = defaults.copy()
    cdef Py_ssize_t i
    if len(positional) > len(front):
        return None
    for i in range(len(positional)):
        if front[i] in named:
            return None
        values[front[i]] = positional[i]
    values.update(named)
    if len(values) != len(defaults):
        return None
    for name in required:
        if values[name] is defaults[name]:
            return None
    return tuple(values.values())


def defects_of(Handle handle not None, call):
    """The known defects that a `defects.Call` has."""
    return handle._met(call)


def tell_of_defects(Handle handle not None, call, list written not None, Plan way=None):
    """Warn of a call that has known defects, or refuse it, as the handle's policy says.

    Parameters
    ----------
    handle : Handle
    call : defects.Call
    written : list of str
    way : Plan, optional
        What makes the call; by default the entry point.
    """
    met = handle._met(call)
    if way is not None:
        met = () if way.maker != NULL else tuple([d for d in met if _family(way.algorithm) not in d.ways])
    if met and handle.avoids:
        raise _not_avoided(handle, _CALL_NAMES[call.operation], _fault(met), handle.no_native or "it refuses the call")
    if met and handle.policy != "ignore":
        _warn_of_defects(handle, met, call, _CALL_NAMES[call.operation], written)


def allow_in_place(Handle handle not None, bint allowed):
    """Set whether an output may be an input itself; to callers that is refused, the judge asks for it."""
    handle.in_place = allowed


def look(Handle handle not None, tuple names not None, tuple arguments not None):
    """The key of the calls that serve these arguments, and the addresses of their arrays.

    Parameters
    ----------
    names : tuple of (str or None)
        Of each argument; None: no array.
    arguments : tuple

    Returns
    -------
    key : tuple or None
        None if some argument is mutable or cannot be compared safely; the call is then not cached.
    addresses : tuple of int
        A 0 for the workspace, then the arrays' in order, 0 for one that is None.
    values : list
        The arguments, each array that only a protocol of its own describes replaced by the `Buffer` it gave. Keep
        them alive until the calls were made.

    Raises
    ------
    ArgumentError, ArgumentTypeError, ClosedError
    """
    return handle._look(names, arguments)


def refuse_addresses(Plan plan not None):
    """Have calls of a plan take arrays only from now on: for callers whose own arguments are arrays."""
    plan.takes = _ARRAYS


def way_of(
    Handle handle not None, operation, dict tensors not None, dict values not None, running, saved, deterministic,
    alignment, share=0.0, sums_only=False, bound=False, parameters=None,
):
    """The way that ``"auto"`` takes for a batch-norm call, for `CallList.append`.

    Parameters
    ----------
    handle : Handle
    operation : Operation
    tensors : dict of str to TensorDescriptor
        Data tensors by name; x and those that are not like it. With z the statistics of ranks are merged.
    values : dict
        mode and scalars, as in `CallList.append`.
    running, saved : bool
        Whether the call has these statistics.
    deterministic : bool
        Only ways whose bits repeat.
    alignment : int
        Of the data, a power of two up to 16: what is less aligned goes to the entry point.
    share : float
        1 over the number of values that backward's given sums, or the merged statistics, are of; 0: none.
    sums_only : bool
        Whether y or dx is left alone.
    bound : bool
        Whether the plan keeps the handle and can be called.
    parameters : DataType, optional
        As in `Handle.plan_forward_training`.

    Returns
    -------
    Plan

    Raises
    ------
    ArgumentError, UnsupportedError
    """
    cdef pbn_call call
    cdef Plan plan
    _begin(&call, NULL, _arguments.operation(operation))
    if not _normalizes(call.operation):
        raise errors.ArgumentError("operation", operation, "a batch-norm call")
    _set_scalars(&call, values)
    call.share, call.sums_only = share, sums_only
    call.deterministic = _arguments.boolean(deterministic, "deterministic")
    has = _has(running, saved, tensors.get("z"), call.operation)
    plan = _plan(handle, &call, tensors, has, "auto", parameters, False, True, alignment)
    if not bound:
        plan.handle = None  # whose lists have it: it would be a circle
    return plan


cdef object _signature(Plan plan):
    """The arguments of its calls: from x to the results by position, the rest by keyword."""
    if plan.descriptors is None:
        raise errors.ClosedError("plan")
    kinds = inspect.Parameter
    parameters = [
        kinds(plan.names[i], kinds.KEYWORD_ONLY if plan.arguments[i].row.when else kinds.POSITIONAL_OR_KEYWORD)
        for i in range(plan.count)
        if plan.arguments[i].planned
    ]
    parameters.append(kinds("workspace", kinds.KEYWORD_ONLY, default=None))
    if plan.reserve_size:
        parameters.append(kinds("reserve", kinds.KEYWORD_ONLY))
    return inspect.Signature(parameters, return_annotation=None)
