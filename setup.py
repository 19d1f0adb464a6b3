"""The extension list; everything else is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

BACKENDS = ["cudnn", "miopen", "onednn"]  # PBN_BACKENDS in include/pybnorm/shim.h

setup(
    ext_modules=cythonize(
        [
            Extension(
                "pybnorm._core",
                ["pybnorm/_core.pyx", *(f"pybnorm/backends/{name}.c" for name in BACKENDS)],
                include_dirs=["include"],
                depends=["include/pybnorm/shim.h", "include/pybnorm/dl.h", "include/pybnorm/adapter.h"],
                define_macros=[("_GNU_SOURCE", None)],
                extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden"],
                libraries=["dl", "m"],
            )
        ],
        compiler_directives={"language_level": "3"},
    )
)
