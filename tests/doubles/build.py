"""Compile a vendor library's double: the same soname, the same symbols, no vendor.

The prototypes come from the adapter's own file, so a double cannot drift from what the adapter calls; tests/abi holds
that file against the vendors' headers.
"""

import os
import re
import shlex
import subprocess
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
    """Builds doubles below one folder; objects are compiled once and linked often."""

    def __init__(self, folder):
        self.folder = folder
        self.compiler = shlex.split(os.environ.get("CC", "cc"))
        self._objects = {}
        self._count = 0

    def build(self, backend, *, version=None, without=(), soname=None, defines=(), place=""):
        """One double in a folder of its own, named by its soname.

        Without some symbols; with more macros, ``NAME=VALUE``; with the function that says which device is current it
        notes that, see places.c.
        """
        vendor = VENDORS[backend]
        unknown = set(without) - set(self.symbols(backend))
        if unknown:
            raise ValueError(f"{backend} has no symbols {sorted(unknown)}")
        self._count += 1
        folder = self.folder / f"{backend}-{self._count}"
        folder.mkdir(parents=True)
        library = folder / (soname or vendor.soname)
        version = vendor.version if version is None else version
        noted = ("-finstrument-functions",) if place else ()
        macros = (f"DOUBLE_VERSION={version}", *defines)
        objects = [self._object(backend, "defaults.c", ()), self._object(backend, f"{backend}.c", macros, noted)]
        if place:
            objects.append(self._object(backend, "places.c", (f'DOUBLE_PLACE="{place}"',)))
        flags = ["-shared", f"-Wl,-soname,{library.name}"]
        if without:
            script = folder / "exports.map"
            script.write_text("{ local: " + " ".join(f"{name};" for name in without) + " };\n")
            flags.append(f"-Wl,--version-script={script}")
        self._run(*flags, "-o", str(library), *map(str, objects))
        return library

    def plain(self, name, source="int pybnorm_test_nothing;"):
        """A library that is nobody's double, from C text."""
        self._count += 1
        folder = self.folder / f"plain-{self._count}"
        folder.mkdir(parents=True)
        (folder / "plain.c").write_text(source + "\n")
        library = folder / name
        self._run("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(library), str(folder / "plain.c"))
        return library

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

    def _object(self, backend, source, defines, flags=()):
        key = (f"{backend}/{source}", defines, flags)
        if key not in self._objects:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{backend}-object-{len(self._objects)}.o"
            header = ADAPTERS / VENDORS[backend].prototypes
            words = ["-c", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fPIC", "-O0"]
            words += [f'-DDOUBLE_BACKEND="{header}"', f"-DDOUBLE_SYMBOLS={VENDORS[backend].symbols}"]
            self._run(*words, *(f"-D{define}" for define in defines), *flags, "-o", str(path), str(HERE / source))
            self._objects[key] = path
        return self._objects[key]

    def _run(self, *arguments, source=None):
        done = subprocess.run([*self.compiler, *arguments], input=source, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join([*self.compiler, *arguments])}\n{done.stderr}")
        return done.stdout
