"""A run kept in a folder: every output bit for bit, and a journal from which an interrupted run goes on.

::

    run.json           the document of the finished run, as ``pybnorm check --json`` writes it (schema.json)
    journal.jsonl      one line per start (environment and libraries), one per finished case, as they finish
    outputs/*.npz      what one case's first call wrote on one backend

Inputs are not kept: they are a function of the problem's line (`pybnorm.check.data`).

An output file is an ordinary ``.npz``, which `numpy.load` opens. Its member ``header`` is JSON with the backend, the
case, and dtype, shape and digest of each array, so that equal outputs are seen without unpacking them. The other
members hold the arrays' bytes as planes, the first byte of every element, then the second, and so on: the planes of
exponents compress, which interleaved with mantissas they do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from pybnorm.check import report
from pybnorm.check.bounds import Status
from pybnorm.check.data import numpy_dtype
from pybnorm.check.problem import Problem
from pybnorm.check.runner import BackendInfo, CaseResult
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError

__all__ = ["Journal", "digest", "output_digests", "read_outputs", "read_run", "settings", "write_outputs", "write_run"]

Array = npt.NDArray[Any]

DOCUMENT = "run.json"
JOURNAL = "journal.jsonl"
OUTPUTS = "outputs"
JOURNAL_SCHEMA = "pybnorm.journal/1"
AGAIN = (Status.RESOURCE, Status.TIMEOUT)
"""Statuses with which a case of an interrupted run is run again: they are the machine's at that time, its memory, disk
and load, or the option's. A crash is the library's, and stays."""
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # of a document's parts
_DTYPES = {d.name.lower(): d for d in DataType}


def digest(array: Array) -> str:
    """BLAKE2b of dtype, shape and bytes: equal exactly where the arrays are equal in every bit."""
    state = hashlib.blake2b(f"{array.dtype.name}{array.shape}".encode(), digest_size=16)
    state.update(np.ascontiguousarray(array).view(np.uint8).data)
    return state.hexdigest()


# ---------------------------------------------------------------- outputs


def write_outputs(folder: str | os.PathLike[str], backend: str, problem: Problem, outputs: Mapping[str, Array]) -> str:
    """Keep one case's outputs.

    The file appears whole or not at all, whatever happens to the process meanwhile.

    Parameters
    ----------
    folder : str or path-like
        Of the archive; made if it is not there.
    backend : str
    problem : Problem
    outputs : mapping of str to ndarray
        float64, float32, float16 or bfloat16 arrays of any shape.

    Returns
    -------
    str
        The file, relative to `folder`.

    Raises
    ------
    OSError
        It cannot be written.
    """
    header: dict[str, Any] = {"backend": backend, "case": str(problem), "arrays": {}}
    members: dict[str, Array] = {}
    for name, array in outputs.items():
        if array.dtype.name not in _DTYPES:
            raise ArgumentError(f"outputs[{name}]", array.dtype.name, " | ".join(_DTYPES))
        header["arrays"][name] = {"dtype": array.dtype.name, "shape": list(array.shape), "digest": digest(array)}
        little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.byteorder == ">" else array
        flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)
        members[name] = np.ascontiguousarray(flat.T)
    file = f"{hashlib.blake2b(f'{backend} {problem}'.encode(), digest_size=16).hexdigest()}.npz"
    place = Path(folder) / OUTPUTS
    place.mkdir(parents=True, exist_ok=True)
    with _whole(place / file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        for name, member in {"header": text, **members}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as target:
                np.lib.format.write_array(target, member, allow_pickle=False)
    return f"{OUTPUTS}/{file}"


def read_outputs(folder: str | os.PathLike[str], saved: str) -> dict[str, Array]:
    """The arrays that `write_outputs` kept, equal in every bit.

    Raises
    ------
    ArgumentError
        There is no such file, or it is damaged.
    """
    file = Path(folder) / saved
    with _opened(file) as archive:
        header = _header(archive)
        arrays = {}
        for name, about in header["arrays"].items():
            planes = archive[name]
            native = numpy_dtype(_DTYPES[about["dtype"]])
            flat = np.ascontiguousarray(planes.T).reshape(-1).view(native.newbyteorder("<"))
            arrays[name] = flat.astype(native, copy=False).reshape(about["shape"])
            if digest(arrays[name]) != about["digest"]:
                raise ValueError(f"{name} does not have its digest")
        return arrays


def output_digests(folder: str | os.PathLike[str], saved: str) -> dict[str, str]:
    """Digest of each array in a file of `write_outputs`, without unpacking the arrays.

    Raises
    ------
    ArgumentError
        There is no such file, or it is damaged.
    """
    file = Path(folder) / saved
    with _opened(file) as archive:
        return {name: str(about["digest"]) for name, about in _header(archive)["arrays"].items()}


def _header(archive: Any) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(archive["header"].tobytes())
    return header


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        # a stream of our own, because numpy.load leaves its own open where the file is damaged
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            yield archive
    except Exception as error:  # whatever zipfile, zlib and NumPy make of damage: a dozen kinds, and not documented
        raise ArgumentError("outputs", str(file), f"a whole file of pybnorm check --save ({error})") from None


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[IO[bytes]]:
    """A stream to a temporary neighbour of `file`, renamed to it once everything is written."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")  # not of tempfile, whose mode bars others
    try:
        with temporary.open("xb") as stream:
            yield stream
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- run.json


def write_run(folder: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write the finished run's document, whole or not at all.

    Raises
    ------
    OSError
        It cannot be written.
    """
    with _whole(Path(folder) / DOCUMENT) as stream:
        stream.write(json.dumps(report.to_json(document), indent=1, allow_nan=False).encode() + b"\n")


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document of a run: of a folder's ``run.json``, else of its journal, or of a file of ``check --json``.

    Returns
    -------
    dict
        ``cases`` and ``backends`` are lists of `CaseResult` and `BackendInfo`; the rest is as in the file. From a
        journal: ``environment``, ``backends``, ``cases`` and ``complete`` (False).

    Raises
    ------
    ArgumentError
        There is no run in `path`.
    """
    place = Path(path)
    if place.is_dir() and not (place / DOCUMENT).exists() and (place / JOURNAL).exists():
        return _journal_document(place)
    file = place / DOCUMENT if place.is_dir() else place
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.get("schema") != report.SCHEMA:
            raise ValueError(f"its schema is {document.get('schema')!r}, not {report.SCHEMA!r}")
        _check_environment(document["environment"])
        document["cases"] = [report.result_from_json(case) for case in document["cases"]]
        document["backends"] = [report.backend_from_json(info) for info in document["backends"]]
    except (OSError, *_DAMAGED) as error:
        raise ArgumentError("RUN", str(path), f"a folder of check --save or a file of check --json ({error})") from None
    return dict(document)


def _journal_document(folder: Path) -> dict[str, Any]:
    try:
        lines, _ = _lines(folder / JOURNAL)
    except OSError as error:
        raise ArgumentError("RUN", str(folder), f"a folder of check --save ({error})") from None
    starts = [line for line in lines if isinstance(line, _Start)]
    if not starts:
        raise ArgumentError("RUN", str(folder), f"a {JOURNAL} with at least the line of its start")
    backends = {info.backend: info for start in starts for info in start.backends}
    cases = {(line.backend, line.case): line for line in lines if isinstance(line, CaseResult)}
    return {
        "environment": starts[-1].environment,
        "backends": list(backends.values()),
        "cases": list(cases.values()),
        "complete": False,
    }


# ---------------------------------------------------------------- journal


class Journal:
    """Finished cases of a run, on the disk as soon as they are finished.

    A line is handed to the operating system whole before `append` returns, so it outlives a killed process; what a
    kill left of a line is cut off when the next run opens the journal.

    Parameters
    ----------
    folder : str or path-like
        Made if it is not there.
    resume : bool
        Go on with the run in `folder`, if there is one; without it there must be none.

    Raises
    ------
    ArgumentError
        The folder cannot be written, holds a run and `resume` is false, is in use by another process, or its journal
        is damaged before its last line.
    """

    def __init__(self, folder: str | os.PathLike[str], resume: bool = False) -> None:
        self.folder = Path(folder)
        self._finished: dict[tuple[str, str], CaseResult] = {}
        self._starts: list[_Start] = []
        try:
            (self.folder / OUTPUTS).mkdir(parents=True, exist_ok=True)
            self._stream: IO[bytes] = open(self.folder / JOURNAL, "a+b", buffering=0)  # noqa: SIM115 (close())
        except OSError as error:
            raise ArgumentError("--save", str(folder), f"a folder that can be written ({error})") from None
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
        lines, end = _lines(self.folder / JOURNAL)
        if not resume and (lines or (self.folder / DOCUMENT).exists()):
            raise ArgumentError(
                "--save", str(self.folder), "a folder without a run, or --resume to go on with this one"
            )
        self._stream.truncate(end)
        for line in lines:
            if isinstance(line, _Start):
                self._starts.append(line)
            elif line.status in AGAIN or (line.saved and not (self.folder / line.saved).is_file()):
                self._finished.pop((line.backend, line.case), None)
            else:
                self._finished[line.backend, line.case] = line

    def begin(self, backends: Iterable[BackendInfo]) -> None:
        """Note which libraries run, once they are known and before the first `append`.

        Raises
        ------
        ArgumentError
            The journal's cases were run by another version of pybnorm, under other environment variables of the
            vendors, or by a library of another version, file or device.
        """
        infos = list(backends)
        environment = report.environment()
        before = {info.backend: info for start in self._starts for info in start.backends if not info.problem}
        for start in self._starts:
            old = start.environment
            _same(self.folder, "pybnorm", str(old.get("pybnorm")), environment["pybnorm"])
            _same(self.folder, "environment", settings(old), settings(environment))
        for info in infos:
            if info.backend in before and not info.problem:
                _same(self.folder, info.backend, _identity(before[info.backend]), _identity(info))
        self._write({"schema": JOURNAL_SCHEMA, "environment": environment, "backends": infos})

    def append(self, result: CaseResult) -> None:
        """Note one finished case.

        Raises
        ------
        OSError
            It cannot be written.
        """
        self._write(result)
        self._finished[result.backend, result.case] = result

    def finished(self) -> dict[tuple[str, str], CaseResult]:
        """Finished cases by (backend, case), of earlier runs too.

        Not those whose output file is gone, nor of an earlier run those of a status of `AGAIN`.
        """
        return dict(self._finished)

    def _write(self, value: Any) -> None:
        data = json.dumps(report.to_json(value), allow_nan=False).encode() + b"\n"
        while data:  # an unbuffered write may be a partial one
            data = data[self._stream.write(data) :]

    def close(self) -> None:
        """Close the file; the folder may be used by another run."""
        self._stream.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass
class _Start:
    """A line that a run begins with."""

    environment: dict[str, Any]
    backends: list[BackendInfo]


def _check_environment(environment: Any) -> None:
    if not isinstance(environment, dict) or not isinstance(environment.get("variables", {}), dict):
        raise TypeError("its environment is not described by names")


def _lines(file: Path) -> tuple[list[_Start | CaseResult], int]:
    """Whole lines of a journal, and how many bytes they are; an unfinished last line is left out."""
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    lines: list[_Start | CaseResult] = []
    for number, text in enumerate(data[:end].splitlines(), 1):
        try:
            line = json.loads(text)
            if line.get("schema", JOURNAL_SCHEMA) != JOURNAL_SCHEMA:
                raise ValueError(f"its schema is {line['schema']!r}, not {JOURNAL_SCHEMA!r}")
            if "schema" in line:
                _check_environment(line["environment"])
                lines.append(_Start(line["environment"], [report.backend_from_json(b) for b in line["backends"]]))
            else:
                lines.append(report.result_from_json(line))
        except _DAMAGED as error:
            reason = f"a line of JSON, a start or a case ({type(error).__name__}: {error})"
            raise ArgumentError(f"{file}:{number}", text.decode(errors="replace"), reason) from None
    return lines, end


def _identity(info: BackendInfo) -> str:
    return f"{report.version_text(info)}, {info.path}, on {info.device}" + (info.driver and f" with {info.driver}")


def settings(environment: Mapping[str, Any]) -> str:
    """The environment variables under which a run's libraries computed, as a shell would set them."""
    chosen = {n: v for n, v in environment.get("variables", {}).items() if not n.startswith("PYBNORM_REQUIRE")}
    return " ".join(f"{name}={value}" for name, value in chosen.items()) or "no variable set"


def _same(folder: Path, what: str, before: str, now: str) -> None:
    if before != now:
        raise ArgumentError(
            "--resume", str(folder), f"the {what} that ran its finished cases: {before}; now it is {now}"
        )
