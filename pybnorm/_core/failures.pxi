# Failures of a vendor's call as exceptions.

cdef dict _OWN_STATUS = {
    PBN_E_UNSUPPORTED: ("PBN_E_UNSUPPORTED", errors.UnsupportedError),
    PBN_E_NOT_LOADED: ("PBN_E_NOT_LOADED", errors.InternalError),
    PBN_E_SYMBOL: ("PBN_E_SYMBOL", errors.InternalError),
    PBN_E_LIBRARY: ("PBN_E_LIBRARY", errors.InternalError),
    PBN_E_VERSION: ("PBN_E_VERSION", errors.InternalError),
    PBN_E_ARGUMENT: ("PBN_E_ARGUMENT", errors.BadParameterError),
    PBN_E_WORKSPACE: ("PBN_E_WORKSPACE", errors.InternalError),
    PBN_E_MEMORY: ("PBN_E_MEMORY", errors.AllocationError),
    PBN_E_INTERNAL: ("PBN_E_INTERNAL", errors.InternalError),
    PBN_E_DEVICE: ("PBN_E_DEVICE", errors.ExecutionError),
}


cdef dict _VENDOR_CLASSES = {
    PBN_CLASS_BAD_PARAMETER: errors.BadParameterError,
    PBN_CLASS_NOT_SUPPORTED: errors.NotSupportedError,
    PBN_CLASS_ALLOCATION: errors.AllocationError,
    PBN_CLASS_NOT_INITIALIZED: errors.NotInitializedError,
    PBN_CLASS_EXECUTION: errors.ExecutionError,
    PBN_CLASS_VERSION: errors.VersionMismatchError,
}


cdef object _error(const pbn_backend *table, int status, str function, tuple descriptors, str where=""):
    """The exception for a status; must run on the thread of the call, before any other call.

    `where`: more to be said of a vendor's status.
    """
    cdef char text[PBN_TEXT_MAX]
    text[0] = 0
    table.last_error(status, text, sizeof(text))
    backend = table.name.decode()
    library = _libraries.get(backend)
    details = dict(
        backend=backend,
        function=function,
        status=status,
        text=(<bytes>text).decode("utf-8", "replace").strip(),
        library=library.path if library else "",
        version=library.version if library else (),
        descriptors=descriptors,
    )
    if status > 0:
        details["text"] = "; ".join(filter(None, [details["text"], where]))
        cls = _VENDOR_CLASSES.get(table.status_class(status), errors.InternalError)
        if table.context_lost != NULL and table.context_lost(status, text, sizeof(text)):
            cls = errors.ContextLostError
            details["text"] = "; ".join(filter(None, [details["text"], (<bytes>text).decode("utf-8", "replace")]))
        return cls(status_name=table.status_name(status).decode("utf-8", "replace"), **details)
    name, cls = _OWN_STATUS.get(status, _OWN_STATUS[PBN_E_INTERNAL])
    return cls(status_name=name, **details)


cdef object _not_supported(str backend, str function, str text, tuple descriptors=()):
    """The error of what the vendor is not asked for."""
    library = _libraries[backend]
    return errors.UnsupportedError(
        backend=backend, function=function, status=PBN_E_UNSUPPORTED, status_name="PBN_E_UNSUPPORTED", text=text,
        library=library.path, version=library.version, descriptors=descriptors,
    )


cdef object _unsupported(Handle handle, str function, str text):
    return _not_supported(handle.backend, function, text)
