# Backends, of this distribution and of others; their libraries: loaded once, under a lock; what each can do.

cdef object _load_lock = threading.RLock()  # a signal handler may come here while its thread is here
cdef set _loading = set()  # backends
cdef dict _libraries = {}  # backend name -> Library; written under _load_lock, never removed


class Library(collections.namedtuple("Library", "backend label version path found_via attempts device_type")):
    """A loaded vendor library.

    Attributes
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"``, ``"onednn"``, ``"native"``, ``"native_cuda"`` or ``"native_rocm"``.
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

    Examples
    --------
    >>> pybnorm.load("native").version
    (0, 1, 0)
    """

    __slots__ = ()


cdef extern from *:
    """
    enum { PBN_MOST_BACKENDS = 64 };
    static const pbn_backend *pbn_tables[PBN_MOST_BACKENDS];
    """
    enum:
        PBN_MOST_BACKENDS
    const pbn_backend *_tables "pbn_tables"[]  # this build's, then those of other distributions; none is ever removed

cdef int _table_count = 0
cdef bint _looked_outside = False
cdef dict _broken = {}  # name of a backend of another distribution -> why it cannot be used


cdef tuple _words(const char *text):
    return tuple((<bytes>text).decode().split()) if text != NULL else ()


cdef str _word(const char *text):
    return (<bytes>text).decode() if text != NULL else ""


cdef int _add(const pbn_backend *table, str file) except -1:
    """Take a backend in; `file` is the library that it is compiled into."""
    global _table_count
    cdef str name = table.name.decode()
    cdef const pbn_search *search = &table.search
    if _table_count == PBN_MOST_BACKENDS:
        raise errors.LibraryLoadError(f"{name}: there are {PBN_MOST_BACKENDS} backends already", backend=name)
    _find.SPECS[name] = _find.LibrarySpec(
        backend=name,
        label=table.label.decode(),
        sonames=_words(search.sonames),
        hint=_word(search.hint),
        loaded_names=_words(search.loaded_names),
        pathfinder=_word(search.pathfinder),
        rocm_sdk=_word(search.rocm_sdk),
        rocm_sdk_needs=_words(search.rocm_sdk_needs),
        distributions=_words(search.distributions),
        roots=_words(search.roots),
        folders=_words(search.folders),
        variables=_words(search.variables),
        file="" if search.sonames != NULL else file,
    )
    _tables[_table_count] = table
    _table_count += 1
    return 0


def _add_this_builds_backends():
    cdef int i
    for i in range(PBN_BACKEND_COUNT):
        _add(pbn_backends[i], __file__)


_add_this_builds_backends()


cdef int _look_outside() except -1:
    """Take in the backends of other distributions, once; of one that cannot be used a warning says why."""
    global _looked_outside
    with _load_lock:
        if _looked_outside:
            return 0
        _looked_outside = True
        found = sorted(importlib.metadata.entry_points(group="pybnorm.backends"), key=lambda point: point.name)
        for point in found:
            try:
                _add_outside(point)
            except Exception as error:
                where = f"the entry point {point.name} = {point.value} of the group pybnorm.backends"
                if not isinstance(error, errors.LibraryError):
                    error = errors.LibraryLoadError(f"{type(error).__name__}: {error}", backend=point.name)
                error.args = (f"{where} gives no backend: {error}",)
                _broken.setdefault(point.name, error)
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return 0


cdef int _add_outside(object point) except -1:
    cdef pbn_library library
    cdef const pbn_backend *table
    cdef str name = point.name
    cdef bytes c_file
    if _find_table(name) != NULL:
        raise errors.LibraryLoadError(f"there is a backend {name!r} already", backend=name)
    file = point.load()
    file = os.fspath(file() if callable(file) else file)
    c_file = os.fsencode(file)
    if pbn_dl_open(&library, c_file, 0) != 0:
        raise errors.LibraryLoadError((<bytes>library.message).decode("utf-8", "replace"), backend=name)
    table = <const pbn_backend *>pbn_dl_symbol(library.handle, b"pbn_backend_" + name.encode())
    if table == NULL:
        raise errors.SymbolNotFoundError(f"{file} has no symbol pbn_backend_{name}", backend=name)
    if table.contract != PBN_CONTRACT:
        raise errors.LibraryVersionError(
            f"{file} was compiled for contract {table.contract} of pybnorm/shim.h, this pybnorm has {PBN_CONTRACT}: "
            "compile it anew", backend=name
        )
    if table.name != <bytes>name.encode():
        raise errors.LibraryLoadError(f"{file} is of a backend named {table.name!r}", backend=name)
    return _add(table, os.fsdecode(<bytes>library.path))


cdef const pbn_backend *_find_table(str backend):
    cdef int i
    cdef bytes name = backend.encode("utf-8", "surrogatepass")
    for i in range(_table_count):
        if name == _tables[i].name:
            return _tables[i]
    return NULL


cdef object _backend_on(object backend, object device):
    """The name of a backend's table for a device: its own, or one of that name with the device's behind it."""
    if device is None or not isinstance(backend, str):
        return backend
    cdef list named = []
    for i in range(_table_count):
        name = _tables[i].name.decode()
        own = str(_device_name(_tables[i].device_type)).lower()
        if name in (backend, f"{backend}_{own}"):
            named.append(own)
            if isinstance(device, str) and own == device:
                return name
    raise errors.ArgumentError("device", device, f"None, or of backend {backend!r}: " + ", ".join(map(repr, named)))


cdef const pbn_backend *_table(object backend) except NULL:
    cdef const pbn_backend *table
    if not isinstance(backend, str):
        raise errors.ArgumentTypeError("backend", backend, "one of " + ", ".join(map(repr, backends())))
    backend = str.__str__(backend)  # a subclass may hash and compare as it likes
    table = _find_table(<str>backend)
    if table == NULL:
        _look_outside()
        table = _find_table(<str>backend)
    if table == NULL:
        if backend in _broken:
            raise _broken[backend].with_traceback(None)
        raise errors.ArgumentError("backend", backend, "one of " + ", ".join(map(repr, backends())))
    return table


def backends():
    """Names of all backends, loaded or not: those of this build, then those of other distributions.

    Another distribution adds one with an entry point of the group ``pybnorm.backends``; the first call looks for them,
    and warns of one that cannot be used.

    Returns
    -------
    tuple of str

    Examples
    --------
    >>> pybnorm.backends()
    ('cudnn', 'miopen', 'onednn', 'native', 'native_cuda', 'native_rocm')
    """
    _look_outside()
    return tuple(_tables[i].name.decode() for i in range(_table_count))


def search_spec(backend):
    """Say where a backend's library is looked for.

    Parameters
    ----------
    backend : str

    Returns
    -------
    pybnorm._find.LibrarySpec
    """
    return _find.SPECS[_table(backend).name.decode()]


def device_types(backend):
    """DLPack device types of the memory that a backend's calls reach; its device's own comes first.

    Parameters
    ----------
    backend : str

    Returns
    -------
    tuple of int
    """
    cdef const pbn_backend *table = _table(backend)
    return table.device_type, *(table.also_reached[i] for i in range(3) if table.also_reached[i] != 0)


cdef bint _reaches(const pbn_backend *table, object device_type) except -1:
    return device_type == table.device_type or (
        device_type != 0
        and device_type in (table.also_reached[0], table.also_reached[1], table.also_reached[2])
    )


cdef object _device_name(object device_type):
    return _DEVICE_NAMES.get(device_type, device_type)


def loaded(backend):
    """The libraries that `load` has loaded in this process.

    Parameters
    ----------
    backend : str

    Returns
    -------
    Library or None
        None before the first `load`.

    Raises
    ------
    ArgumentError
        There is no such backend.

    Examples
    --------
    >>> pybnorm.load("onednn") == pybnorm.loaded("onednn")
    True
    """
    return _libraries.get(_table(backend).name.decode())


def load(backend, path=None):
    """Load a backend's vendor library, once per process.

    Called by itself the first time a backend is used. A failure is not remembered: the next call searches again. What a
    library prints to standard output while it is loaded goes to standard error.

    Parameters
    ----------
    backend : str
        ``"cudnn"``, ``"miopen"``, ``"onednn"``, ``"native"``, ``"native_cuda"`` or ``"native_rocm"``.
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

    Examples
    --------
    >>> library = pybnorm.load("onednn")
    >>> library.label, library.version >= (3, 0)
    ('oneDNN', True)
    """
    backend = _table(backend).name.decode()  # an unknown name is refused here
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

    (file, version), found_via, attempts = _find.find(search_spec(backend), open_library, path)
    cdef const pbn_backend *table = _table(backend)
    return Library(
        backend, table.label.decode(), version, file, found_via, tuple(tuple(a) for a in attempts), table.device_type
    )


def has_symbol(backend, name):
    """Say whether the loaded library has an optional symbol.

    Parameters
    ----------
    backend : str
    name : str
        Vendor symbol, for example ``"miopenBatchNormalizationForwardTraining_V2"``.

    Returns
    -------
    bool or None
        ``None`` if the backend does not use such a symbol.

    Raises
    ------
    ArgumentError
        There is no such backend.
    LibraryNotFoundError, LibraryLoadError
        The backend's library is not here, or cannot be used.

    Examples
    --------
    >>> pybnorm.has_symbol("onednn", "dnnl_primitive_execute")
    True
    """
    load(backend)
    name = _arguments.text(name, "name")
    cdef bytes symbol = name.encode("utf-8", "surrogatepass")
    cdef int found = _table(backend).has_symbol(symbol)
    return None if found < 0 else bool(found)


def capability(backend, operation, mode, dtype, layout, rank):
    """Say whether and how a backend computes one combination.

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
    rank : int or sequence of int
        2 to 8; or the dims of x, of which known defects depend.

    Returns
    -------
    bits : Capability
        No bit set if the combination is refused.
    reason : str
        Why it is refused; where it is not, the known defects that the vendor's own call has with these dims; empty
        otherwise, and where only a rank is given.

    Raises
    ------
    ArgumentError
        A word or a rank that does not exist.
    LibraryNotFoundError, LibraryLoadError
        The backend's library is not here, or cannot be used.

    Examples
    --------
    >>> pybnorm.capability("onednn", "train", "spatial", "f32", "nchw", 4)
    (Capability.RUNS|Capability.BLEND_SCRATCH|Capability.HOST_STEPS, '')
    >>> pybnorm.capability("onednn", "train", "spatial", "f64", "nchw", 4)
    (Capability(0), "oneDNN's CPU batch normalization has no float64")
    """
    load(backend)
    cdef const pbn_backend *table = _table(backend)
    cdef int c_operation = _arguments.operation(operation)
    cdef int c_mode = _arguments.mode(mode)
    cdef int c_dtype = _arguments.data_type(dtype)
    dims = None
    if isinstance(rank, (tuple, list)):
        dims = _arguments.dims(rank, "rank")
        rank = len(dims)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 2 <= rank <= 8:
        raise errors.ArgumentError("rank", rank, "an integer from 2 to 8, or the dims of x")
    cdef int c_layout = _arguments.layout(layout)
    cdef int c_rank = rank
    cdef const char *why = NULL
    cdef uint32_t bits
    with nogil:
        bits = table.capability(c_operation, c_mode, c_dtype, c_layout, c_rank, &why)
    if bits and dims is not None and _normalizes(c_operation):
        call = defects.Call(Operation(c_operation), Mode(c_mode), DataType(c_dtype), dims, Layout(c_layout))
        known = defects._of_library(load(backend))
        return Capability(bits), "; ".join([_said(d, _results(c_operation)) for d in known if d.predicate(call)])
    return Capability(bits), "" if bits or why == NULL else why.decode()
