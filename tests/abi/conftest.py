"""Compile a backend's declarations against the vendor's own headers.

A vendor header or compiler that is not there skips the test with the exact reason, unless the
environment variable PYBNORM_REQUIRE (comma separated backend names) lists the backend: on a
runner that must have it, absence is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def site_directories(*parts: str) -> list[Path]:
    """The folder `parts` below every entry of sys.path (where wheels put headers)."""
    return [Path(entry, *parts) for entry in sys.path if entry]


def from_environment(*names: str) -> list[Path]:
    """The include folders of the installations that these variables name."""
    return [Path(os.environ[name], "include") for name in names if os.environ.get(name)]


def cudnn_headers() -> dict[str, list[Path]]:
    """cudnn.h and all that it includes: where each is looked for."""
    toolkit = [
        *from_environment("CUDA_HOME", "CUDA_PATH"),
        *site_directories("nvidia", "cu13", "include"),
        *site_directories("nvidia", "cuda_runtime", "include"),
        Path("/usr/local/cuda/include"),
    ]
    crt = [
        *toolkit,
        *site_directories("nvidia", "cuda_nvcc", "include"),
        *site_directories("nvidia", "cuda_crt", "include"),
    ]
    return {
        "cudnn.h": [*from_environment("CUDNN_PATH"), *site_directories("nvidia", "cudnn", "include")],
        "cuda_runtime_api.h": toolkit,
        "cuda.h": toolkit,
        "crt/host_defines.h": crt,
    }


class AbiCheck:
    """The compiler and the headers of one backend's check."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.required = backend in os.environ.get("PYBNORM_REQUIRE", "").replace(" ", "").split(",")
        name = os.environ.get("CXX", "c++")
        path = shutil.which(name)
        if path is None:
            self.unavailable(f"no C++ compiler: {name!r} is not on PATH")
        self.compiler = path

    def unavailable(self, reason: str) -> None:
        """Skip, or fail where PYBNORM_REQUIRE lists this backend."""
        if self.required:
            pytest.fail(f"{self.backend} ABI check is required (PYBNORM_REQUIRE) but cannot run: {reason}")
        pytest.skip(f"{self.backend} ABI check: {reason}")

    def includes(self, headers: Mapping[str, Iterable[Path]]) -> list[str]:
        """Compiler flags that make each header reachable.

        Parameters
        ----------
        headers
            For each header, the directories to look into, first match wins; the compiler's own
            search path comes last.
        """
        flags: list[str] = []
        for header, directories in headers.items():
            places = list(directories)
            found = next((place for place in places if (place / header).is_file()), None)
            if found is not None:
                flags += ["-isystem", str(found)]
            elif not self._preprocesses(header):
                tried = ", ".join(str(place) for place in places) or "no other place"
                self.unavailable(f"header {header} not found (compiler's search path; {tried})")
        return flags

    def _preprocesses(self, header: str) -> bool:
        text = f"#if !__has_include(<{header}>)\n#error absent\n#endif\n"
        command = [self.compiler, "-std=c++17", "-x", "c++", "-E", "-"]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0

    def holds(self, text: str, flags: Iterable[str]) -> bool:
        """Whether a piece of C++ compiles: a static assertion about the headers."""
        command = [self.compiler, "-std=c++17", "-fsyntax-only", *flags, "-x", "c++", "-"]
        return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0

    def compile(
        self, source: Path, flags: Iterable[str], backends: Path = ROOT / "pybnorm" / "backends"
    ) -> subprocess.CompletedProcess[str]:
        """Compile `source` against the C files in `backends`; the caller judges the result.

        Syntax and static assertions only: nothing is linked or run.
        """
        folders = [HERE, ROOT / "include", backends]
        command = [self.compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
        command += [flag for folder in folders for flag in ("-I", str(folder))]
        return subprocess.run([*command, *flags, str(source)], text=True, capture_output=True, check=False)


@pytest.fixture
def abi():
    """`abi("cudnn")` is the check of that backend."""
    return AbiCheck


@pytest.fixture
def site():
    """`site("nvidia", "cudnn", "include")`: that folder below every entry of sys.path."""
    return site_directories


@pytest.fixture
def cudnn_places():
    """Where the headers of cuDNN are looked for."""
    return cudnn_headers()
