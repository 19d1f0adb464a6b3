"""The extension list and the options of its build; everything else is in pyproject.toml.

Environment variables, for builds of one's own:

PBN_OPTIMIZE
    0 to 3, the compiler's level of optimization. Default 3; 0 builds in a tenth of the time. Only 3 is stripped.
PBN_SANITIZE
    ``address``, ``undefined``, ``address,undefined`` or ``thread``: an extension that the sanitizers' runtime watches,
    built with -O1 unless PBN_OPTIMIZE says otherwise. ci/sanitize.sh runs tests with it.
"""

import os
import re
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

# A vendor is one file, or one folder whose adapter.c includes the others.
BACKENDS = sorted(map(str, [*Path("pybnorm/backends").glob("*.c"), *Path("pybnorm/backends").glob("*/adapter.c")]))
INCLUDED = (*Path("include").rglob("*.h"), *Path("pybnorm/backends").glob("*/*.[ch]"), *Path("pybnorm/_core").glob("*"))


def option(name, default, allowed):
    """The value of an environment variable, which must be one of those allowed."""
    value = os.environ.get(name, "").strip() or default
    if value not in allowed:
        sys.exit(f"setup.py: {name} is {value!r}, allowed is one of: {' '.join(filter(None, allowed))}; or unset")
    return value


def named(extensions):
    """Extensions whose refusals of a call name the argument: Cython's own say how many there are, and no hint.

    Each wrapper leaves by one label when its arguments were refused; `pbn_name_arguments` (_core/refusals.pxi) is
    called there. A wrapper of another form keeps Cython's words, and tests/fuzz/test_named_arguments.py fails.
    """
    path = Path("pybnorm/_core.c")
    text = path.read_text("utf-8")
    functions = text.split("\n}\n")
    for index, function in enumerate(functions):
        names = re.search(r" __pyx_pyargnames\[\] = (\{&.*?,0\});", function)
        needed = re.search(r'__Pyx_RaiseArgtupleInvalid\("\w+", [01], ([1-9]\d*|0), \d+, __pyx_nargs\);', function)
        parsed = re.search(r"\(__pyx_kwds, \w+, __pyx_pyargnames, (\w+), values", function)
        title = re.search(r'__Pyx_AddTraceback\("pybnorm\._core\.(?:_(?=Handle)|_\w+\.)?([\w.]+)"', function)
        end = "\n  __pyx_L3_error:;\n"
        if names and needed and parsed and title and "pbn_name_arguments" not in function:
            words = "__pyx_kwds" if parsed[1] in ("0", "__pyx_v_unknown") else "NULL"  # any keyword is taken
            own = re.sub(r"^Handle\w+", "Handle", title[1])  # of whose parts it is made
            call = f'"{own}", {needed[1]}, (PyObject **const[]){names[1]}, values, __pyx_nargs, {words}'
            functions[index] = function.replace(end, f"{end}  pbn_name_arguments({call});\n", 1)
    changed = "\n}\n".join(functions)
    if changed != text:
        path.write_text(changed, "utf-8")
    return extensions


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
        "-fvisibility=hidden",
        f"-O{optimize}",
        *["-g0"] * release,
        *sanitize,
    ],
    extra_link_args=["-Wl,-s"] * release + sanitize,
    libraries=["dl", "m"],
)
setup(ext_modules=named(cythonize([core], compiler_directives={"language_level": "3"})))
