"""A run saved in a folder: every output bit for bit, and a journal with which an interrupted run is resumed.

::

    run.json           the document of the finished run, as ``pybnorm check --json`` writes it (schema.json)
    journal.jsonl      one line per start (environment and libraries) and one per finished case, written as it finishes
    outputs/*.npz      what one case's first call wrote on one backend

Inputs are a function of the problem's line. An output file is an ``.npz`` whose first member, ``header``, is JSON with
dtype, shape and digest of each array, to compare without unpacking. The other members hold the arrays' bytes as planes,
the first byte of every element, then the second: planes of exponents compress well.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from pybnorm import __version__, _arguments, _files
from pybnorm._text import reason
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import (
    SCHEMA,
    BackendInfo,
    CaseResult,
    LostNode,
    from_json,
    json_parts,
    to_json,
    version_text,
)
from pybnorm.check.language import calls
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import environment
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError
from pybnorm.reference.namespaces import Array

DOCUMENT = "run.json"
JOURNAL = "journal.jsonl"
OUTPUTS = "outputs"
JOURNAL_SCHEMA = "pybnorm.journal/1"
LARGEST = 1 << 31
"""Largest document or journal that is read, in bytes: some hundred thousand cases."""
_UNPACKED = 1 << 26
"""Largest document of an archive of collect: two suites have a twentieth of it, and zeros unpack to 1,000 times it."""
_RUN_KIND = _files.Kind("the run.json of a saved run", r'\s*\{\s*"schema":\s*"pybnorm\.check/')
_JOURNAL_KIND = _files.Kind("a journal of pybnorm", r'\{"schema": "pybnorm\.journal/')
_OUTPUTS_SCHEMA = "pybnorm.outputs/1"
_OUTPUTS_KIND = _files.Kind("outputs that pybnorm saved", r'PK\x03\x04.{26}header\.npy.*?"schema": "pybnorm\.outputs/')
_SAVED = re.compile(rf"{OUTPUTS}/[0-9a-f]{{32}}\.npz")
_HEADER_LARGEST = 1 << 16
AGAIN = (Status.RESOURCE, Status.TIMEOUT, Status.ERROR)
"""Cases with these statuses run again when a run is resumed: the cause was the machine at the time (memory, disk, load)
or an option, or there is no verdict. A crash is the library's fault and stays."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # of a document's parts
_DTYPES = {d.name.lower(): d for d in DataType}


def digest(array: Array) -> str:
    """BLAKE2b of dtype, shape and bytes: equal if and only if the arrays are equal in every bit."""
    state = hashlib.blake2b(f"{array.dtype.name}{array.shape}".encode(), digest_size=16)
    state.update(np.ascontiguousarray(array).view(np.uint8).data)
    return state.hexdigest()


def write_outputs(folder: str | os.PathLike[str], backend: str, problem: Problem, outputs: Mapping[str, Array]) -> str:
    """Save one case's outputs, whole or not at all, and return the file, relative to `folder`, which is made.

    Raises OSError: it cannot be written. Raises ArgumentError: another file has its name.
    """
    header: dict[str, Any] = {"schema": _OUTPUTS_SCHEMA, "backend": backend, "case": str(problem), "arrays": {}}
    members: dict[str, Array] = {}
    for name, array in outputs.items():
        if array.dtype.name not in _DTYPES:
            raise ArgumentError(f"outputs[{name}]", array.dtype.name, " | ".join(_DTYPES))
        header["arrays"][name] = {"dtype": array.dtype.name, "shape": list(array.shape), "digest": digest(array)}
        little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.byteorder == ">" else array
        flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)
        members[name] = np.ascontiguousarray(flat.T)
    line = f"{backend} {problem}".encode(errors="backslashreplace")  # a file of Python's, whose name is any bytes
    file = f"{hashlib.blake2b(line, digest_size=16).hexdigest()}.npz"
    place = Path(folder) / OUTPUTS
    place.mkdir(parents=True, exist_ok=True)
    with (
        _files.replaced("--save", place / file, _OUTPUTS_KIND) as stream,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        members = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)} | members
        for name, member in members.items():
            # the header is stored as it is, so that the file's first bytes say what it is
            title = zipfile.ZipInfo("header.npy") if name == "header" else f"{name}.npy"
            with archive.open(title, "w", force_zip64=True) as target:
                np.lib.format.write_array(target, member, allow_pickle=False)
    return f"{OUTPUTS}/{file}"


def read_outputs(folder: str | os.PathLike[str], saved: str) -> dict[str, Array]:
    """The arrays that `write_outputs` kept, equal in every bit. Raises ArgumentError: there is no whole file."""
    with _opened(folder, saved) as archive:
        header = _header(archive)
        arrays = {}
        for name, about in header["arrays"].items():
            native = numpy_dtype(_DTYPES[about["dtype"]])
            planes = archive.array(name, functools.partial(_bounded, math.prod(about["shape"]) * native.itemsize))
            flat = np.ascontiguousarray(planes.T).reshape(-1).view(native.newbyteorder("<"))
            arrays[name] = flat.astype(native, copy=False).reshape(about["shape"])
            if digest(arrays[name]) != about["digest"]:
                raise ValueError(f"{name} does not have its digest")
        return arrays


def output_digests(folder: str | os.PathLike[str], saved: str, backend: str = "", case: str = "") -> dict[str, str]:
    """Digest of each array in a file of `write_outputs`, which is not unpacked; of this backend and case, if named."""
    with _opened(folder, saved) as archive:
        header = _header(archive)
        if case:
            _check_owner(header, backend, case)
        return {name: str(about["digest"]) for name, about in header["arrays"].items()}


def whole(folder: str | os.PathLike[str], result: CaseResult) -> bool:
    """Tell whether the outputs of a result are there with every byte, and are its own."""
    try:
        with _opened(folder, result.saved) as archive:
            _check_owner(_header(archive), result.backend, result.case)
            damaged = archive.zip.testzip()  # by checksums, in pieces
    except ArgumentError:
        return False
    return damaged is None


def _header(archive: _files.Archive) -> dict[str, Any]:
    text = archive.array("header", functools.partial(_bounded, _HEADER_LARGEST))
    header: dict[str, Any] = json.loads(text.tobytes())
    if set(header["arrays"]) != archive.members.keys() - {"header"}:
        raise ValueError("its arrays are not those of its header")
    return header


def _bounded(largest: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if (size := math.prod(shape) * dtype.itemsize) > largest:  # it may unpack to a thousand times its size
        raise ValueError(f"an array has {size} bytes, more than {largest}")


def _check_owner(header: Mapping[str, Any], backend: str, case: str) -> None:
    if (header["backend"], header["case"]) != (backend, case):
        raise ValueError(f"it is of {header['backend']}, {header['case']}, not of {backend}, {case}")
    try:
        problem = Problem.parse(case)
    except ArgumentError:  # written by a version with more options
        return
    names = {tensor.name: tensor for tensor in calls.outputs(problem)}
    if header["arrays"].keys() != names.keys():
        raise ValueError(f"it has {', '.join(header['arrays'])}, not {', '.join(sorted(names))}")
    for name, about in header["arrays"].items():
        dims, _ = calls.kind(problem, names[name])
        if math.prod(about["shape"]) != math.prod(dims):
            raise ValueError(f"its {name} has the shape {about['shape']}, not {list(dims)}")


@contextlib.contextmanager
def _opened(folder: str | os.PathLike[str], saved: str) -> Iterator[_files.Archive]:
    file, allowed = Path(folder) / saved, "a whole file of pybnorm check --save"
    if not _SAVED.fullmatch(saved):  # of another's journal: it may name any file
        raise ArgumentError("outputs", str(file), f"{allowed} (a run has no such file)")
    with _files.archive("outputs", file, allowed) as archive:
        yield archive


def write_run(folder: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write the finished run's document, whole or not at all; ArgumentError: another file has its name."""
    with _files.replaced("--save", Path(folder) / DOCUMENT, _RUN_KIND) as stream:
        for part in json_parts(document):
            stream.write(part.encode())


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document of a run: of a folder's ``run.json``, else of its journal, or of ``check --json`` or ``collect``.

    ``cases`` and ``backends`` are lists of `CaseResult` and `BackendInfo`; the rest is as in the file. A journal has
    ``environment``, ``backends``, ``cases`` and ``complete`` (False). Raises ArgumentError: there is no run in `path`.
    """
    place = Path(_arguments.path(path, "path", "a folder of check --save or a file of check --json"))
    file = place / DOCUMENT if os.path.isdir(place) else place
    if file != place and not file.exists() and (place / JOURNAL).exists():
        return _journal_document(place)
    try:
        # a case as soon as it is read: as dicts they take several times their size
        zipped = file.suffix == ".zip"
        text = (
            _files.member(file, DOCUMENT, min(LARGEST, _UNPACKED)) if zipped else _files.read(file, LARGEST)
        ).decode()  # the bytes are gone before the text becomes objects
        document = json.loads(text, object_hook=_case)
        _check_schema(document, SCHEMA)
        _check_environment(document["environment"])
        results: dict[tuple[str, str], CaseResult] = {}
        for result in document["cases"]:
            if not isinstance(result, CaseResult):
                raise TypeError(f"a case is {result!r}")
            if results.setdefault((result.backend, result.case), result) is not result:
                raise ValueError(f"it has a case twice: {result.backend} {result.case}")
        document["cases"] = list(results.values())
        document["backends"] = [from_json(BackendInfo, info) for info in document["backends"]]
        document["lost_nodes"] = [from_json(LostNode, node) for node in document.get("lost_nodes", ())]
    except (OSError, *_DAMAGED) as error:
        below = place / "run"  # as ci/check-library.sh leaves it
        near = f" (did you mean {str(below)!r}?)" if os.path.exists(below / DOCUMENT) else ""
        why = reason(error) if file == place or file.exists() else f"it has no {DOCUMENT}"
        text = f"a folder of check --save or a file of check --json ({why}){near}"
        raise ArgumentError("RUN", str(path), text) from None
    return dict(document)


def _check_schema(document: Mapping[str, Any], own: str) -> None:
    """Raise for a document of another kind, or of another version of this one."""
    schema = document.get("schema")
    if schema == own:
        return
    if type(schema) is not str or schema.partition("/")[0] != own.partition("/")[0]:
        raise ValueError(f"its schema is {schema!r}, not {own!r}")
    written = document.get("environment")
    by = written.get("pybnorm") if isinstance(written, dict) else None
    raise ValueError(
        f"pybnorm {by or 'of another version'} wrote it as {schema!r}; this is pybnorm {__version__}, which reads "
        f"{own!r}: read it with a pybnorm of that version or a later one, or run the check again with this one"
    )


def _case(value: dict[str, Any]) -> Any:
    return from_json(CaseResult, value) if {"backend", "case", "status"} <= value.keys() else value


def _journal_document(folder: Path) -> dict[str, Any]:
    try:
        starts, results, _ = _lines(folder / JOURNAL)
    except OSError as error:
        raise ArgumentError("RUN", str(folder), f"a folder of check --save ({reason(error)})") from None
    if not starts:
        raise ArgumentError("RUN", str(folder), f"a {JOURNAL} with at least the line of its start")
    every = [info for start in starts for info in start.backends]
    ran = {info.backend for info in every if not info.problem}
    backends = {(i.backend, i.id): i for i in every if not (i.problem and i.backend in ran)}
    cases = {(result.backend, result.case): result for result in results}
    found = {"backends": list(backends.values()), "cases": list(cases.values())}
    return {"environment": starts[-1].environment, **found, "complete": False}


class Journal:
    """Finished cases of a run, on the disk as soon as they are finished.

    What a kill left of a line is cut off when the next run opens the journal. `folder` is made if it is not there.
    Raises ArgumentError: it cannot be written, holds a run and `resume` is false, is in use by another process, or its
    journal is damaged before its last line.
    """

    def __init__(self, folder: str | os.PathLike[str], resume: bool = False) -> None:
        self.folder = Path(folder)
        self._finished: dict[tuple[str, str], CaseResult] = {}
        try:
            (self.folder / OUTPUTS).mkdir(parents=True, exist_ok=True)
            _files.check("--save", self.folder / DOCUMENT, _RUN_KIND)
            journal = self.folder / JOURNAL
            if journal.exists() and not (journal.is_file() and not journal.stat().st_size):
                _files.check("--save", journal, _JOURNAL_KIND)  # an empty one is of a run that ended before it began
            self._stream: IO[bytes] = open(journal, "a+b", buffering=0)  # noqa: SIM115 (close())
        except ArgumentError:
            raise
        except (OSError, ValueError) as error:
            raise ArgumentError("--save", str(folder), f"a folder that can be written ({reason(error)})") from None
        try:
            self._open(resume)
        except BaseException:
            self._stream.close()
            raise

    def _open(self, resume: bool) -> None:
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError("--save", str(self.folder), "a folder that no other run is writing to") from None
        except OSError:
            pass  # a file system without locks
        self._starts, results, end = _lines(self.folder / JOURNAL)
        if not resume and (self._starts or results or (self.folder / DOCUMENT).exists()):
            allowed = "a folder without a run, or --resume to go on with this one"
            raise ArgumentError("--save", str(self.folder), allowed)
        self._stream.truncate(end)
        last = {(result.backend, result.case): result for result in results}
        for key, result in last.items():
            if result.status in AGAIN:
                continue
            if not result.saved or whole(self.folder, result):
                self._finished[key] = result
                continue
            file = self.folder / result.saved
            with contextlib.suppress(OSError):
                if _SAVED.fullmatch(result.saved) and file.is_file() and not file.is_symlink():
                    file.unlink()  # too little may be left to say what it is

    def begin(self, backends: Iterable[BackendInfo]) -> None:
        """Note which libraries run, once they are known and before the first `append`.

        Raises ArgumentError: the journal's cases were run by another version of pybnorm, under other environment
        variables of the vendors, or by a library of another version, file or device.
        """
        infos = list(backends)
        now = environment.machine()
        before = _identities(info for start in self._starts for info in start.backends)
        for start in self._starts:
            old = start.environment
            _same(self.folder, "pybnorm", str(old.get("pybnorm")), now["pybnorm"])
            _same(self.folder, "environment", settings(old), settings(now))
        for backend, ids in _identities(infos).items():
            if backend in before and not ids <= before[backend]:
                _same(self.folder, backend, *("; ".join(sorted(texts)) for texts in (before[backend], ids)))
        self.enter(infos)

    def enter(self, backends: Iterable[BackendInfo]) -> None:
        """Note that libraries have joined those of `begin`."""
        self._write({"schema": JOURNAL_SCHEMA, "environment": environment.machine(), "backends": list(backends)})

    def libraries(self) -> list[BackendInfo]:
        """Libraries that finished cases ran on."""
        used = {(r.backend, r.library) for r in self._finished.values()}
        every = {(i.backend, i.id): i for start in self._starts for i in start.backends if i.id}
        return [info for key, info in every.items() if key in used]

    def append(self, result: CaseResult) -> None:
        """Note one finished case."""
        self._write(result)
        self._finished[result.backend, result.case] = result

    def finished(self) -> dict[tuple[str, str], CaseResult]:
        """Finished cases by (backend, case); of earlier runs those with whole outputs and no status of `AGAIN`."""
        return dict(self._finished)

    def _write(self, value: Any) -> None:
        data = json.dumps(to_json(value), allow_nan=False).encode() + b"\n"
        while data:  # an unbuffered write may be a partial one
            data = data[self._stream.write(data) :]

    def close(self) -> None:
        """Close the file; the folder may be used by another run."""
        self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Start(NamedTuple):
    """A line that a run begins with."""

    environment: dict[str, Any]
    backends: list[BackendInfo]


def _check_environment(environment: Any) -> None:
    if not isinstance(environment, dict) or not all(
        isinstance(environment.get(name, {}), dict) for name in ("variables", "drivers")
    ):
        raise TypeError("its environment is not described by names")


def _lines(file: Path) -> tuple[list[_Start], list[CaseResult], int]:
    """Whole lines of a journal by kind, and how many bytes they are; an unfinished last line is left out."""
    data = _files.read(file, LARGEST)
    end = data.rfind(b"\n") + 1
    starts: list[_Start] = []
    results: list[CaseResult] = []
    for number, text in enumerate(data[:end].splitlines(), 1):
        try:
            line = json.loads(text)
            if "schema" in line:
                _check_schema(line, JOURNAL_SCHEMA)
                _check_environment(line["environment"])
                starts.append(_Start(line["environment"], [from_json(BackendInfo, b) for b in line["backends"]]))
            else:
                results.append(from_json(CaseResult, line))
        except _DAMAGED as error:
            reason = f"a line of JSON, a start or a case ({type(error).__name__}: {error})"
            raise ArgumentError(f"{file}:{number}", text.decode(errors="replace"), reason) from None
    return starts, results, end


def _identities(infos: Iterable[BackendInfo]) -> dict[str, set[str]]:
    """By backend, the libraries that can run."""
    found: dict[str, set[str]] = {}
    for info in infos:
        if not info.problem:
            text = f"{version_text(info)}, {info.path}, on {info.device}"
            found.setdefault(info.backend, set()).add(text + (info.driver and f" with {info.driver}"))
    return found


def settings(environment: Mapping[str, Any]) -> str:
    """The environment variables under which a run's libraries computed, as a shell would set them."""
    chosen = {n: v for n, v in environment.get("variables", {}).items() if not n.startswith("PYBNORM_REQUIRE")}
    return " ".join(f"{name}={value}" for name, value in chosen.items()) or "no variable set"


def _same(folder: Path, what: str, before: str, now: str) -> None:
    if before != now:
        allowed = f"the {what} that ran its finished cases: {before}; now it is {now}"
        raise ArgumentError("--resume", str(folder), allowed)
