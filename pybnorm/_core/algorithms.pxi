# Names of algorithms.

def algorithms(backend):
    """Names that a plan's ``algorithm`` takes on a backend.

    Parameters
    ----------
    backend : str

    Returns
    -------
    tuple of str
        ``"auto"``, ``"fast"`` and ``"plain"``, the vendor's entry point for the mode, on every backend.

    Raises
    ------
    ArgumentError
        There is no such backend.

    Examples
    --------
    >>> pybnorm.algorithms("onednn")
    ('auto', 'fast', 'plain')
    """
    cdef const pbn_backend *table = _table(backend)
    return ("auto", "fast", *(("plain",) if table.algorithms == NULL else _decoded(table.algorithms)))


def numbered_algorithms(backend):
    """The algorithms that also take a plan's number after a colon, ``"graph:2"``.

    Parameters
    ----------
    backend : str

    Returns
    -------
    tuple of str
    """
    cdef const pbn_backend *table = _table(backend)
    return () if table.numbered == NULL else _decoded(table.numbered)


cdef tuple _decoded(const char *const *texts):
    names = []
    while texts[len(names)] != NULL:
        names.append(texts[len(names)].decode())
    return tuple(names)
