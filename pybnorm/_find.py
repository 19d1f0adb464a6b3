"""Finds vendor libraries, and records every place that was tried.

Files are opened by the caller's ``open_library`` only; the vendors' Python packages (``cuda.pathfinder``,
``rocm_sdk``) may open some themselves, and what a file needs and the loader misses is opened first where it lies beside
the file: some wheels are linked without a run path. `_STEPS` is the order of the search, docs/environment.md says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from pybnorm.errors import (
    LibraryError,
    LibraryLoadError,
    LibraryNotFoundError,
    LibraryVersionError,
    SymbolNotFoundError,
)

__all__ = ["SPECS", "LibrarySpec", "OpenFailed", "file_digest", "find"]

_ENDS = 1 << 20

Attempts = tuple[tuple[str, str, str], ...]

# Kinds of failure of a file that was named explicitly.
_NAMED_FILE_ERRORS: dict[str, type[LibraryError]] = {
    "open": LibraryLoadError,
    "symbol": SymbolNotFoundError,
    "version": LibraryVersionError,
}


class OpenFailed(Exception):
    """A file could not be used as the library.

    `kind` is ``"open"``: the loader refused it; ``"symbol"``: a required symbol is missing; or ``"version"``: the
    backend does not support its version. `message` is the loader's text, the symbol or the version.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, message
        super().__init__(kind, message)

    def __str__(self) -> str:
        return self.message


Opened = TypeVar("Opened")
OpenLibrary = Callable[[str, bool], Opened]
"""Opens a path or bare soname and resolves its symbols; with True only if it is already loaded."""


@dataclass(frozen=True)
class LibrarySpec:
    """The places where one vendor's library may be.

    Sonames carry their version: the unversioned name is a development link that wheels do not have
    and that may point at another release.
    """

    backend: str
    label: str
    sonames: tuple[str, ...]
    """Sonames that were seen, best first. The search then takes any other number: see `names`."""
    hint: str
    """How to install it."""
    loaded_names: tuple[str, ...] = ()
    """More names under which a loaded copy is recognised; no file is opened by them."""
    pathfinder: str = ""
    """Its name in ``cuda.pathfinder``."""
    rocm_sdk: str = ""
    """Its name in ``rocm_sdk``."""
    rocm_sdk_needs: tuple[str, ...] = ()
    """Its dependencies, by ``rocm_sdk``'s names; loaded first if the library cannot be opened without."""
    distributions: tuple[str, ...] = ()
    """Python distributions that carry the file."""
    roots: tuple[str, ...] = ()
    """Environment variables that name the root of an installation."""
    folders: tuple[str, ...] = ()
    """Fixed directories, as glob patterns; ``{prefix}`` is this Python's. Highest version first."""
    variables: tuple[str, ...] = ()
    """Prefixes of the environment variables that it or its dependencies read."""
    file: str = ""
    """The backend's own file, if it needs no other library."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sonames, and a name with ``*`` for every other number, of which the highest comes first."""
        families = dict.fromkeys(name.partition(".so.")[0] for name in self.sonames if ".so." in name)
        return (*self.sonames, *(f"{family}.so.*" for family in families))

    @property
    def variable(self) -> str:
        """The environment variable that overrides the search."""
        return f"PYBNORM_LIB_{self.backend.upper()}"


SPECS: dict[str, LibrarySpec] = {}
"""Every backend's library, by the backend's name; `pybnorm._core` fills it from the backends' tables."""


class _Candidate(NamedTuple):
    """A file to open."""

    how: str
    file: str
    no_load: bool = False
    repair: Callable[[], None] | None = None
    """Called once if the loader refuses the file, which is then opened again."""


class _Miss(NamedTuple):
    """A place without the file."""

    how: str
    file: str
    why: str


_Step = Callable[[LibrarySpec], Iterator["_Candidate | _Miss"]]

_LEFT_OUT = (
    "in its list of files, and not there: pip install --target leaves out what a wheel has for lib; install into a "
    "virtual environment or with --prefix"
)


def _own_file(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    if spec.file:
        yield _Candidate("the backend's own file", spec.file)


def _in_process(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    # The loader compares DT_SONAME too, so this also finds copies that were opened by absolute path.
    how = "already in the process"
    for name in spec.names + spec.loaded_names:
        if "*" not in name:
            yield _Candidate(how, name, no_load=True)
            continue
        mapped = [path for path in _mapped_files() if _is_named(os.path.basename(path), name)]
        for path in sorted(mapped, key=_version_of, reverse=True):
            yield _Candidate(how, path, no_load=True)


def _mapped_files() -> set[str]:
    try:
        with open("/proc/self/maps", errors="surrogateescape") as file:
            return {line[line.index("/") :].rstrip("\n") for line in file if "/" in line}
    except OSError:
        return set()


def _cuda_pathfinder(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    if not spec.pathfinder:
        return
    how = "cuda.pathfinder"
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        # Versions before 1.7 do not know cuDNN; it also refuses when cuBLAS, which it loads first, is absent.
        path = pathfinder.load_nvidia_dynamic_lib(spec.pathfinder).abs_path
    except Exception as error:
        yield _Miss(how, spec.pathfinder, _one_line(error))
        return
    yield _Candidate(how, path) if path else _Miss(how, spec.pathfinder, "it does not know the path")


def _rocm_sdk(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    if not spec.rocm_sdk:
        return
    how = "rocm_sdk"
    try:
        rocm_sdk = importlib.import_module("rocm_sdk")
        # It may run a tool to find the GPU target, and prints that tool's errors to stdout.
        with contextlib.redirect_stdout(sys.stderr):
            path = os.fspath(rocm_sdk.find_libraries(spec.rocm_sdk)[0])
    except Exception as error:  # some versions raise UnboundLocalError for a package that is not installed
        yield _Miss(how, spec.rocm_sdk, _one_line(error))
        return

    def preload() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            rocm_sdk.preload_libraries(*spec.rocm_sdk_needs, rtld_global=False)

    yield _Candidate(how, path, repair=preload)


def _distributions(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    # The installer's file list also covers --user and other schemes, where the file is not under sys.prefix.
    for name in spec.distributions:
        how = f"distribution {name}"
        try:
            listed = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            yield _Miss(how, spec.sonames[0], "not installed")
            continue
        by_name = sorted(listed, key=lambda f: _version_of(f.name), reverse=True)
        paths = [Path(str(f.locate())) for soname in spec.names for f in by_name if _is_named(f.name, soname)]
        found = [_existing(how, str(path.parent.resolve() / path.name)) for path in dict.fromkeys(paths)]
        if not any(isinstance(place, _Candidate) for place in found) and _is_recorded(name, spec.names):
            yield _Miss(how, spec.sonames[0], _LEFT_OUT)
        else:
            yield from found or [_Miss(how, spec.sonames[0], "not in its list of files")]


def _is_recorded(distribution: str, sonames: tuple[str, ...]) -> bool:
    # From Python 3.12 on `importlib.metadata.files` leaves out what is not there.
    try:
        record = importlib.metadata.distribution(distribution).read_text("RECORD") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    names = [line.partition(",")[0].rpartition("/")[2] for line in record.splitlines()]
    return any(_is_named(name, soname) for name in names for soname in sonames)


def _system(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    for soname in spec.names:
        if "*" not in soname:
            yield _Candidate("system loader", soname)
            continue
        for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
            yield from _within("LD_LIBRARY_PATH", os.path.abspath(folder), soname)
        for name in sorted(_configured(soname) - {*spec.sonames}, key=_version_of, reverse=True):
            yield _Candidate("system loader", name)


def _configured(soname: str) -> set[str]:
    """The names like `soname` that the loader's cache lists: the loader itself opens exact names only."""
    family = re.escape(soname.removesuffix("*").encode())
    try:
        cache = Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return set()
    return {name.decode() for name in re.findall(rb"(?<=[\0/])" + family + rb"\d+(?:\.\d+)*(?=\0)", cache)}


def _roots(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    for variable in spec.roots:
        yield from _root(spec, variable, ("lib", "lib64"))


def _folders(spec: LibrarySpec) -> Iterator[_Candidate | _Miss]:
    for template in spec.folders:
        pattern = template.replace("{prefix}", glob.escape(sys.prefix))
        folders = sorted(glob.glob(pattern), key=_version_in, reverse=True)
        if not folders:
            yield _Miss("fixed directory", pattern, "no such directory")
        for folder in folders:
            for soname in spec.names:
                yield from _within("fixed directory", folder, soname)


_STEPS: tuple[_Step, ...] = (
    _own_file,
    _in_process,
    _cuda_pathfinder,
    _rocm_sdk,
    _distributions,
    lambda spec: _root(spec, "CONDA_PREFIX", ("lib",)),
    _system,
    _roots,
    _folders,
)


def find(
    spec: LibrarySpec, open_library: OpenLibrary[Opened], path: str | os.PathLike[str] | None = None
) -> tuple[Opened, str, Attempts]:
    """Open the first library that can be used, or `path` alone, which overrides the environment variable.

    Returns what ``open_library(file, no_load)`` returned, the step that found it, and what failed before as
    (how, file, why). A file that was named and cannot be used is a LibraryLoadError, SymbolNotFoundError or
    LibraryVersionError; a LibraryNotFoundError says that no step found one.
    """
    how, named = ("path", os.fsdecode(path)) if path is not None else (spec.variable, os.environ.get(spec.variable))
    if not named:  # an empty variable counts as not set
        return _search(spec, open_library)
    # An absolute path: the loader would search for a bare name and could open another file.
    file = os.path.abspath(os.path.expanduser(named))
    try:
        if not os.path.isfile(file):
            raise OpenFailed("open", "is a directory" if os.path.isdir(file) else "no such file")
        opened, preloaded = _opened(open_library, file)
    except OpenFailed as error:
        _trace(spec, how, file, str(error))
        raise _NAMED_FILE_ERRORS[error.kind](
            f"{spec.label}: the library named by {how} cannot be used, and no other is tried",
            backend=spec.backend,
            attempts=((how, file, str(error)),),
        ) from error
    _trace(spec, how + preloaded, file, "opened")
    return opened, how + preloaded, ()


_PRELOADED = ", what it needs preloaded"
_NOT_FOUND = re.compile(r"\b(lib[^\s/:]+\.so[.\d]*)(?=:)")  # in what the loader says of a library that it misses


def _opened(open_library: OpenLibrary[Opened], file: str, no_load: bool = False) -> tuple[Opened, str]:
    """Open a file, before it what the loader misses and finds beside it; and what to add to how it was found."""
    preloaded: set[str] = set()
    while True:
        try:
            return open_library(file, no_load), _PRELOADED if preloaded else ""
        except OpenFailed as error:
            missed = _NOT_FOUND.search(error.message)
            if no_load or error.kind != "open" or missed is None or not os.path.isabs(file):
                raise
            beside = os.path.join(os.path.dirname(file), missed[1])
            if beside in preloaded or beside == file or not os.path.isfile(beside):
                raise
            preloaded.add(beside)
            with contextlib.suppress(OpenFailed):  # then the file says again what it misses
                _opened(_open_dependency, beside)


def _open_dependency(file: str, _no_load: bool) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(file)  # stays open; RTLD_LOCAL, and found by its name by what is opened later
    except OSError as error:
        raise OpenFailed("open", str(error)) from error


def _search(spec: LibrarySpec, open_library: OpenLibrary[Opened]) -> tuple[Opened, str, Attempts]:
    attempts: list[tuple[str, str, str]] = []
    failed: set[str] = set()

    def remember(how: str, file: str, why: str) -> None:
        _trace(spec, how, file, why)
        attempts.append((how, file, why))

    for step in _STEPS:
        for place in step(spec):
            if isinstance(place, _Miss):
                remember(*place)
                continue
            how, file, no_load, _ = place
            same = os.path.realpath(file) if os.path.isabs(file) else ""
            if same in failed:
                remember(how, file, "the same file as above")
                continue
            for preload in (place.repair, None):
                try:
                    opened, preloaded = _opened(open_library, file, no_load)
                except OpenFailed as error:
                    remember(how, file, str(error))
                    if same:
                        failed.add(same)
                    if error.kind != "open" or preload is None:
                        break
                    try:
                        preload()
                    except Exception as trouble:
                        remember(how, file, f"preloading what it needs: {_one_line(trouble)}")
                        break
                    how += _PRELOADED
                else:
                    _trace(spec, how + preloaded, file, "opened")
                    return opened, how + preloaded, tuple(attempts)
    names = " or ".join(spec.sonames)
    raise LibraryNotFoundError(
        f"{spec.label}: no usable {names} found. To have one: {spec.hint}; or set {spec.variable} to the file. Tried:",
        backend=spec.backend,
        attempts=tuple(attempts),
    )


def _root(spec: LibrarySpec, variable: str, subfolders: tuple[str, ...]) -> Iterator[_Candidate | _Miss]:
    root = os.environ.get(variable, "")
    if not root:
        yield _Miss(variable, f"${variable}/{subfolders[0]}", "the variable is not set")
        return
    for subfolder in subfolders:
        for soname in spec.names:
            yield from _within(variable, os.path.abspath(os.path.join(root, subfolder)), soname)


def _is_named(name: str, soname: str) -> bool:
    return re.fullmatch(re.escape(soname).replace(r"\*", r"\d+(\.\d+)*"), name) is not None


def _within(how: str, folder: str, soname: str) -> Iterator[_Candidate | _Miss]:
    """The file, or the files of a name with ``*``, in one folder."""
    if "*" not in soname:
        yield _existing(how, os.path.join(folder, soname))
        return
    try:
        names = [name for name in os.listdir(folder) if _is_named(name, soname)]
    except OSError:
        names = []
    for name in sorted(names, key=_version_of, reverse=True):
        yield _existing(how, os.path.join(folder, name))


def _existing(how: str, file: str) -> _Candidate | _Miss:
    return _Candidate(how, file) if os.path.isfile(file) else _Miss(how, file, "no such file")


def _version_of(file: str) -> tuple[int, ...]:
    """The numbers after ``.so``: 4 and 8 for libz3.so.4.8."""
    return _version_in(file.rpartition(".so")[2])


def _version_in(folder: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", folder))


def _one_line(error: Exception) -> str:
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _trace(spec: LibrarySpec, how: str, file: str, outcome: str) -> None:
    if os.environ.get("PYBNORM_DEBUG_LOAD", "") not in ("", "0") and sys.stderr is not None:
        print(f"pybnorm: {spec.backend}: {how}: {file}: {outcome}", file=sys.stderr)


def file_digest(path: str) -> str:
    """A digest of a file's size and of its first and last MiB; empty if the file cannot be read.

    A vendor's library may have a gigabyte, so not all of it is read; build ids and symbol tables lie at the ends.
    """
    state = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            state.update(size.to_bytes(8, "little"))
            state.update(stream.read(_ENDS))
            stream.seek(max(0, size - _ENDS))
            state.update(stream.read(_ENDS))
    except OSError:
        return ""
    return state.hexdigest()
