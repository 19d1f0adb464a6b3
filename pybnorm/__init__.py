"""One Python API for every vendor's batch normalization.

``import pybnorm`` loads no vendor library; the first use of a backend loads its own, once. Submodules, such as
``pybnorm.functional``, are imported when they are first used.
"""

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

if _COMMAND := sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) - 1 :][:2] == ["-m", "pybnorm"]:
    # `python -m pybnorm` is starting: an interrupt during the imports below ends it without a traceback
    from _pybnorm_command import interrupted

    sys.excepthook = interrupted

try:
    from pybnorm._core import (
        BackwardPlan,
        ForwardInferencePlan,
        ForwardTrainingPlan,
        Handle,
        Library,
        Plan,
        TensorDescriptor,
        algorithms,
        axpby,
        backends,
        batch_normalization_backward,
        batch_normalization_forward_inference,
        batch_normalization_forward_training,
        capability,
        derive_bn_tensor_descriptor,
        fill,
        has_symbol,
        load,
        loaded,
        relu,
        relu_backward,
    )
except ImportError:
    _found = importlib.machinery.PathFinder.find_spec("_core", __path__)
    _here = Path(__file__).resolve().parent
    if (_found and _found.has_location) or not (_here / "_core.pyx").is_file():  # the folder _core has no location
        raise
    _what = (
        f"pybnorm is imported from its source tree {_here.parent}, where its extension is not built for Python "
        f"{sys.version_info[0]}.{sys.version_info[1]}: build it there with `pip install -e .`, or run Python in "
        "another folder, where it finds the installed package."
    )
    if _COMMAND:
        sys.exit(f"pybnorm: {_what}")
    raise ImportError(_what, name="pybnorm") from None
from pybnorm.defects import _set_reader, known_defects
from pybnorm.diagnostics import vendor_stderr
from pybnorm.enums import Activation, Capability, DataType, Layout, Mode, Operation, StatusClass
from pybnorm.errors import (
    AllocationError,
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    BadParameterError,
    BusyError,
    ClosedError,
    ContextLostError,
    ExecutionError,
    InternalError,
    KnownDefectWarning,
    LibraryError,
    LibraryLoadError,
    LibraryNotFoundError,
    LibraryVersionError,
    NotInitializedError,
    NotSupportedError,
    PybnormError,
    RankError,
    SymbolNotFoundError,
    UnseenLibraryWarning,
    UnsupportedError,
    VendorError,
    VersionMismatchError,
    WorkspaceError,
)

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "AllocationError",
    "ArgumentError",
    "ArgumentTypeError",
    "BackendError",
    "BackwardPlan",
    "BadParameterError",
    "BusyError",
    "Capability",
    "ClosedError",
    "ContextLostError",
    "DataType",
    "ExecutionError",
    "ForwardInferencePlan",
    "ForwardTrainingPlan",
    "Handle",
    "InternalError",
    "KnownDefectWarning",
    "Layout",
    "Library",
    "LibraryError",
    "LibraryLoadError",
    "LibraryNotFoundError",
    "LibraryVersionError",
    "Mode",
    "NotInitializedError",
    "NotSupportedError",
    "Operation",
    "Plan",
    "PybnormError",
    "RankError",
    "StatusClass",
    "SymbolNotFoundError",
    "TensorDescriptor",
    "UnseenLibraryWarning",
    "UnsupportedError",
    "VendorError",
    "VersionMismatchError",
    "WorkspaceError",
    "algorithms",
    "axpby",
    "backends",
    "batch_normalization_backward",
    "batch_normalization_forward_inference",
    "batch_normalization_forward_training",
    "capability",
    "derive_bn_tensor_descriptor",
    "fill",
    "get_include",
    "has_symbol",
    "known_defects",
    "load",
    "loaded",
    "relu",
    "relu_backward",
    "vendor_stderr",
]

_SUBMODULES = frozenset(
    {
        "cann",
        "check",
        "cupy",
        "defects",
        "devices",
        "diagnostics",
        "directml",
        "enums",
        "errors",
        "functional",
        "graph",
        "hipdnn",
        "layer",
        "miopen",
        "operations",
        "reference",
        "sync",
        "torch",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:  # of an optional package; hasattr and inspect expect an AttributeError
        raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted(globals().keys() | _SUBMODULES)


def _problem(case: str) -> Any:
    return importlib.import_module(f"{__name__}.check.language.problem").Problem.parse(case)


_set_reader(_problem)


def get_include() -> str:
    """Folder of the C headers, for compilers.

    A Cython module compiled with it can ``from pybnorm._shim cimport`` the structures and enumerations of
    ``pybnorm/shim.h``.

    Returns
    -------
    str
        For the compiler's option ``-I``.

    Examples
    --------
    >>> Extension("mine", ["mine.pyx"], include_dirs=[pybnorm.get_include()])  # doctest: +SKIP
    """
    here = Path(__file__).parent
    installed = here / "include"
    return str(installed if installed.is_dir() else here.parent / "include")
