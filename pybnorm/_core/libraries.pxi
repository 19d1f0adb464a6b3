# Libraries: loaded once, under a lock; what each can do.

cdef object _load_lock = threading.RLock()  # a signal handler may come here while its thread is here
cdef set _loading = set()  # backends
cdef dict _libraries = {}  # backend name -> Library; written under _load_lock, never removed


class Library(collections.namedtuple("Library", "backend label version path found_via attempts device_type")):
    """A loaded vendor library.

    Attributes
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``.
    label : str
        The vendor's spelling of it.
    version : tuple of int
        (major, minor, patch) as the running library reports it.
    path : str
        Resolved path of the file that is mapped.
    found_via : str
        The step of the search that found it.
    attempts : tuple of (str, str, str)
        Steps that failed before, as (how, file, why).
    device_type : int
        DLPack device type of the memory its calls take.
    """

    __slots__ = ()


cdef const pbn_backend *_table(object backend) except NULL:
    cdef int i
    cdef bytes name
    if isinstance(backend, str):
        name = (<str>backend).encode("utf-8", "surrogatepass")
        for i in range(PBN_BACKEND_COUNT):
            if name == pbn_backends[i].name:
                return pbn_backends[i]
    kind = errors.ArgumentError if isinstance(backend, str) else errors.ArgumentTypeError
    raise kind("backend", backend, "one of " + ", ".join(map(repr, backends())))


def backends():
    """Names of all backends this build knows, loaded or not.

    Returns
    -------
    tuple of str
    """
    return tuple(pbn_backends[i].name.decode() for i in range(PBN_BACKEND_COUNT))


def loaded(backend):
    """The backend's `Library` if it has been loaded by this process, else ``None``."""
    _table(backend)
    return _libraries.get(backend)


def load(backend, path=None):
    """Load a backend's vendor library, once per process.

    Called by itself the first time a backend is used. A failure is not remembered: the next call searches again. What a
    library prints to standard output while it is loaded goes to standard error.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"`` or ``"onednn"``.
    path : str or os.PathLike, optional
        The file to load. Without it ``PYBNORM_LIB_<BACKEND>`` and then the search of `pybnorm._find` decide.

    Returns
    -------
    Library

    Raises
    ------
    LibraryNotFoundError
        No step found one; the message lists all of them.
    LibraryLoadError, SymbolNotFoundError, LibraryVersionError
        The named file is no library, lacks a symbol or is of a version this backend does not speak; or another
        file has been loaded already.
    """
    _table(backend)  # an unknown name is refused here
    if path is not None:
        path = _arguments.path(path, "path")
    library = _libraries.get(backend)
    if library is None:
        with _load_lock:
            library = _libraries.get(backend)
            if library is None:
                if backend in _loading:
                    raise errors.BusyError(f"{backend}: this thread is loading its library already, further up")
                _loading.add(backend)
                try:
                    library = _load(backend, path)
                    _libraries[backend] = library
                finally:
                    _loading.discard(backend)
    if path is not None and not _same_file(library.path, path):
        raise errors.LibraryLoadError(
            f"{backend}: {path} cannot be loaded, this process already uses {library.path}", backend=backend
        )
    return library


def _same_file(a, b):
    try:
        return os.path.samefile(a, b)
    except OSError:
        return a == b


cdef object _load(str backend, object path):
    def open_library(file, no_load):
        cdef const pbn_backend *table = _table(backend)
        cdef pbn_library result
        cdef bytes name = os.fsencode(file)
        cdef const char *c_name = name
        cdef int c_no_load = bool(no_load)
        cdef int status
        if b"\0" in name:
            raise _find.OpenFailed("open", "the path contains a null character")
        with nogil:
            status = table.load(c_name, c_no_load, &result)
        if status != 0:
            kind = {PBN_E_SYMBOL: "symbol", PBN_E_VERSION: "version"}.get(status, "open")
            raise _find.OpenFailed(kind, (<bytes>result.message).decode("utf-8", "replace"))
        return (
            os.fsdecode(<bytes>result.path),
            (result.version[0], result.version[1], result.version[2]),
        )

    (file, version), found_via, attempts = _find.find(_find.SPECS[backend], open_library, path)
    cdef const pbn_backend *table = _table(backend)
    return Library(
        backend, table.label.decode(), version, file, found_via, tuple(tuple(a) for a in attempts), table.device_type
    )


def has_symbol(backend, name):
    """Whether the loaded library has an optional symbol.

    Parameters
    ----------
    backend : str
    name : str
        Vendor symbol, for example ``"miopenBatchNormalizationForwardTraining_V2"``.

    Returns
    -------
    bool or None
        ``None`` if the backend does not use such a symbol.
    """
    load(backend)
    name = _arguments.text(name, "name")
    cdef bytes symbol = name.encode("utf-8", "surrogatepass")
    cdef int found = _table(backend).has_symbol(symbol)
    return None if found < 0 else bool(found)


def capability(backend, operation, mode, dtype, layout, rank):
    """What a backend does with one combination.

    Parameters
    ----------
    backend : str
    operation : Operation
    mode : Mode
        Ignored for the elementwise operations.
    dtype : DataType
        Element type of x.
    layout : Layout
        Memory order of x.
    rank : int
        2 to 8.

    Returns
    -------
    bits : Capability
        No bit set if the combination is refused.
    reason : str
        Why it is refused; empty otherwise.
    """
    load(backend)
    cdef const pbn_backend *table = _table(backend)
    cdef int c_operation = _arguments.operation(operation)
    cdef int c_mode = _arguments.mode(mode)
    cdef int c_dtype = _arguments.data_type(dtype)
    if not isinstance(layout, int) or isinstance(layout, bool) or layout not in (0, 1, 2):
        raise errors.ArgumentError("layout", layout, "one of " + ", ".join(f"Layout.{v.name}" for v in Layout))
    if isinstance(rank, bool) or not isinstance(rank, int) or not 2 <= rank <= 8:
        raise errors.ArgumentError("rank", rank, "an integer from 2 to 8")
    cdef int c_layout = layout
    cdef int c_rank = rank
    cdef const char *why = NULL
    cdef uint32_t bits
    with nogil:
        bits = table.capability(c_operation, c_mode, c_dtype, c_layout, c_rank, &why)
    return Capability(bits), "" if bits or why == NULL else why.decode()
