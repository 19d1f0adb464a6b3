"""Exceptions carry what they say and survive a process border."""

import copy
import pickle

import numpy as np
import pytest
from tables import table

from pybnorm import errors

VENDOR = {
    "backend": "cudnn",
    "function": "batch_normalization_backward",
    "status": 2000,
    "status_name": "CUDNN_STATUS_BAD_PARAM",
    "text": "epsilon < 0.0",
    "library": "/lib/libcudnn.so.9",
    "version": (9, 27, 0),
    "descriptors": ("x: f32 dims=(2, 3)",),
}
VENDORS = {  # and the built-in family of each
    "AllocationError": MemoryError,
    "BadParameterError": ValueError,
    "ContextLostError": RuntimeError,
    "ExecutionError": RuntimeError,
    "InternalError": RuntimeError,
    "NotInitializedError": RuntimeError,
    "NotSupportedError": NotImplementedError,
    "UnsupportedError": NotImplementedError,
    "VersionMismatchError": RuntimeError,
}
EXAMPLES = [
    (errors.ArgumentError("epsilon", -1.0, "a finite number >= 0"), ValueError),
    (errors.ArgumentTypeError("x", None, "an array"), TypeError),
    (errors.ArgumentTypeError("x", None, "an array"), ValueError),
    (errors.ClosedError("handle"), Exception),
    (errors.BusyError("this plan is already running"), Exception),
    (errors.WorkspaceError("workspace", "0 bytes", "at least 64 bytes"), Exception),
    (errors.RankError("rank 0: the call failed on rank 2", (2,)), RuntimeError),
    (
        errors.LibraryNotFoundError("no cuDNN", backend="cudnn", attempts=(("pip", "libcudnn.so.9", "absent"),)),
        ImportError,
    ),
    (errors.LibraryLoadError("cannot open", backend="onednn", attempts=()), OSError),
    (errors.LibraryVersionError("version 2", backend="onednn"), Exception),
    (errors.SymbolNotFoundError("symbol cudnnCreate is missing", backend="cudnn"), AttributeError),
    *((getattr(errors, name)(**VENDOR), family) for name, family in VENDORS.items()),
]


@table(("error", "family"), EXAMPLES)
@table("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_survives(error, family, through):
    again = through(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert isinstance(again, errors.PybnormError)
    assert isinstance(again, family)


def test_every_public_class_is_an_example():
    others = {"PybnormError", "LibraryError", "BackendError", "VendorError"}
    others |= {"KnownDefectWarning", "UnseenLibraryWarning"}
    assert {type(e).__name__ for e, _ in EXAMPLES} | others == set(errors.__all__)


def test_messages_have_everything():
    text = str(errors.BadParameterError(**VENDOR))
    for part in ("cudnn", "2000", "CUDNN_STATUS_BAD_PARAM", "epsilon < 0.0", "batch_normalization_backward"):
        assert part in text
    assert "/lib/libcudnn.so.9 9.27.0" in text
    assert "x: f32 dims=(2, 3)" in text
    assert "pip: libcudnn.so.9: absent" in next(str(e) for e, family in EXAMPLES if family is ImportError)


def test_a_value_that_cannot_be_shown():
    class Bad:
        def __repr__(self):
            raise RuntimeError

    for value, shown in (
        (Bad(), "<Bad>"),
        ("a" * 5, "aaaaa"),
        (list(range(1000)), "a list"),
        (dict.fromkeys(range(1000)), "a dict"),
        (np.ones((2, 2)), "a ndarray"),
        ((1, 2), "(1, 2)"),
    ):
        assert errors.ArgumentError("x", value, "b").value.strip("'") == shown


@pytest.mark.parametrize("value", ["\x1b" * 10**6, b"\0" * 10**6], ids=["str", "bytes"])
def test_a_long_value_is_cut_before_it_is_cleaned(monkeypatch, value):
    cleaned = []
    clean = errors.one_line
    monkeypatch.setattr(errors, "one_line", lambda text: cleaned.append(len(text)) or clean(text))
    error = errors.ArgumentError("x", value, "a short one")
    assert (len(error.value), error.value[-3:]) == (300, "...")
    assert len(cleaned) == 3
    assert max(cleaned) < 1000
