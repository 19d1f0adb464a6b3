"""The extension list and the options of its build; everything else is in pyproject.toml.

Environment variables, for builds of one's own:

PBN_OPTIMIZE
    0 to 3, the compiler's level of optimization. Default 3; 0 builds in a tenth of the time. Only 3 is stripped.
PBN_SANITIZE
    ``address``, ``undefined``, ``address,undefined`` or ``thread``: an extension that the sanitizers' runtime watches,
    built with -O1 unless PBN_OPTIMIZE says otherwise. ci/sanitize.sh runs tests with it.
"""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

# A vendor is one file, or one folder whose adapter.c includes the others; native has a file for each kind of GPU, too.
ADAPTERS = ("*.c", "*/adapter.c", "native/cuda.c", "native/hip.c")
BACKENDS = sorted(str(p) for glob in ADAPTERS for p in Path("pybnorm/backends").glob(glob))
INCLUDED = (*Path("include").rglob("*.h"), *Path("pybnorm/backends").glob("*/*.*"), *Path("pybnorm/_core").glob("*"))


def option(name, default, allowed):
    """The value of an environment variable, which must be one of those allowed."""
    value = os.environ.get(name, "").strip() or default
    if value not in allowed:
        sys.exit(f"setup.py: {name} is {value!r}, allowed is one of: {' '.join(filter(None, allowed))}; or unset")
    return value


sanitizers = option("PBN_SANITIZE", "", ("", "address", "undefined", "address,undefined", "thread"))
optimize = option("PBN_OPTIMIZE", "1" if sanitizers else "3", ("0", "1", "2", "3"))
sanitize = []
if sanitizers:
    # Python's own flags define what a signed overflow gives, with which it would not be reported.
    sanitize = [f"-fsanitize={sanitizers}", "-fno-wrapv", "-fno-omit-frame-pointer", "-g"]
    # Undefined behaviour ends the process: a report alone is lost where a test reads the output.
    sanitize += ["-fno-sanitize-recover=undefined"] * ("undefined" in sanitizers)
# A release is stripped: Python's own flags ask for debugging symbols, five times the size of all else.
release = optimize == "3" and not sanitizers

core = Extension(
    "pybnorm._core",
    ["pybnorm/_core.pyx", *BACKENDS],
    include_dirs=["include"],
    depends=sorted(map(str, INCLUDED)),
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=[
        "-std=c11",
        "-fno-math-errno",  # nobody reads a square root's, without which compilers vectorise it
        "-ffp-contract=fast",  # a product and its sum in one instruction, which C11 alone forbids
        "-fvisibility=hidden",
        f"-O{optimize}",
        *["-g0"] * release,
        *sanitize,
    ],
    extra_link_args=["-Wl,-s"] * release + sanitize,
    libraries=["dl", "m"],
)
setup(ext_modules=cythonize([core], compiler_directives={"language_level": "3"}))
