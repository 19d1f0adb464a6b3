"""Compile a vendor library's double: the same soname, the same symbols, no vendor.

The prototypes come from the adapter's own file, so a double cannot drift from what the adapter calls; tests/abi holds
that file against the vendors' headers.
"""

import functools
import os
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ADAPTERS = HERE.parents[1] / "pybnorm" / "backends"


@dataclass(frozen=True)
class Vendor:
    """What the builder must know of one vendor."""

    prototypes: str
    """The file of the backends that has them."""
    symbols: str
    """The adapter's list macro, ``(REQUIRED, OPTIONAL)`` of ``(result, name, parameters)``."""
    soname: str
    version: int
    """A version the adapter speaks, as the double's file spells it."""
    other_version: int
    """One it does not speak: the oldest it speaks is newer."""


VENDORS = {
    "cudnn": Vendor("cudnn/api.h", "PBN_CUDNN_SYMBOLS", "libcudnn.so.9", 91900, 7605),
    "miopen": Vendor("miopen/api.h", "PBN_MIOPEN_SYMBOLS", "libMIOpen.so.1", 3004000, 1005000),
    "onednn": Vendor("onednn/api.h", "PBN_DNNL_SYMBOLS", "libdnnl.so.3", 3002000, 2007000),
}


class Doubles:
    """Builds doubles below one folder, each in a folder of its own; what is the same is compiled once."""

    def __init__(self, folder):
        self.folder = folder
        self.compiler = shlex.split(os.environ.get("CC", "cc"))
        self.folder.mkdir(parents=True, exist_ok=True)

    def build(self, backend, *, version=None, without=(), soname=None, defines=(), place=""):
        """One double, named by its soname.

        Without some symbols; with more macros, ``NAME=VALUE``; with the function that says which device is current it
        notes that, see places.c.
        """
        vendor = VENDORS[backend]
        unknown = set(without) - set(self.symbols(backend))
        if unknown:
            raise ValueError(f"{backend} has no symbols {sorted(unknown)}")
        words = ["-std=c11", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
        words += [f'-DDOUBLE_BACKEND="{ADAPTERS / vendor.prototypes}"', f"-DDOUBLE_SYMBOLS={vendor.symbols}"]
        words += [f"-D{macro}" for macro in (f"DOUBLE_VERSION={version or vendor.version}", *defines)]
        words += [str(HERE / "defaults.c"), str(HERE / f"{backend}.c")]
        if place:
            words += ["-finstrument-functions", f'-DDOUBLE_PLACE="{place}"', str(HERE / "places.c")]
        data = self._compiled(soname or vendor.soname, *words)
        for name in without:  # it is there by another name, which the table of hashes does not have
            data = data.replace(f"\0{name}\0".encode(), f"\0{name[:-1]}_\0".encode())
        return self._placed(soname or vendor.soname, data)

    def plain(self, name, source="int pybnorm_test_nothing;"):
        """A library that is nobody's double, from C text."""
        return self._placed(name, self._compiled(name, "-x", "c", "-", source=source + "\n"))

    @functools.cache  # noqa: B019
    def symbols(self, backend, kind=""):
        """Names in the adapter's list; kind ``"REQUIRED"`` or ``"OPTIONAL"`` selects."""
        # The preprocessor reads the list: what it expands to is what the adapter resolves.
        source = (
            f'#include "{ADAPTERS / VENDORS[backend].prototypes}"\n'
            "#define PBN_TEST_REQUIRED(result, name, parameters) @REQUIRED:name@\n"
            "#define PBN_TEST_OPTIONAL(result, name, parameters) @OPTIONAL:name@\n"
            f"{VENDORS[backend].symbols}(PBN_TEST_REQUIRED, PBN_TEST_OPTIONAL)\n"
        )
        text = self._run("-E", "-P", "-x", "c", "-", source=source)
        found = re.findall(r"@\s*(REQUIRED|OPTIONAL)\s*:\s*(\w+)\s*@", text)
        if not found:
            raise RuntimeError(f"no symbols in {VENDORS[backend].symbols}")
        return tuple(name for which, name in found if kind in ("", which))

    def _placed(self, name, data=b""):
        """A file in a folder of its own."""
        file = Path(tempfile.mkdtemp(dir=self.folder), name)
        file.write_bytes(data)
        return file

    @functools.cache  # noqa: B019
    def _compiled(self, soname, *words, source=None):
        """A library's bytes."""
        file = self._placed(soname)
        self._run("-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", str(file), *words, source=source)
        return file.read_bytes()

    def _run(self, *arguments, source=None):
        done = subprocess.run([*self.compiler, *arguments], input=source, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join([*self.compiler, *arguments])}\n{done.stderr}")
        return done.stdout
