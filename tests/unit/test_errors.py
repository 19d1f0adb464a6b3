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

EXAMPLES = [
    errors.ArgumentError("epsilon", -1.0, "a finite number >= 0"),
    errors.ArgumentTypeError("x", None, "an array"),
    errors.ClosedError("handle"),
    errors.BusyError("this plan is already running"),
    errors.WorkspaceError("workspace", "0 bytes", "at least 64 bytes"),
    errors.RankError("rank 0: the call failed on rank 2", (2,)),
    errors.LibraryNotFoundError("no cuDNN", backend="cudnn", attempts=(("pip", "libcudnn.so.9", "absent"),)),
    errors.LibraryLoadError("cannot open", backend="onednn", attempts=()),
    errors.LibraryVersionError("version 2", backend="onednn"),
    errors.SymbolNotFoundError("symbol cudnnCreate is missing", backend="cudnn"),
    *[
        cls(**VENDOR)
        for cls in (
            errors.AllocationError,
            errors.BadParameterError,
            errors.ContextLostError,
            errors.ExecutionError,
            errors.InternalError,
            errors.NotInitializedError,
            errors.NotSupportedError,
            errors.UnsupportedError,
            errors.VersionMismatchError,
        )
    ],
]


@table("error", EXAMPLES)
@table("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_survives(error, through):
    again = through(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(again, errors.PybnormError)


def test_every_public_class_is_an_example():
    abstract = {"PybnormError", "LibraryError", "BackendError", "VendorError"}
    assert {type(e).__name__ for e in EXAMPLES} | abstract | {"KnownDefectWarning", "UnseenLibraryWarning"} == set(
        errors.__all__
    )


def test_vendor_message_has_everything():
    text = str(errors.BadParameterError(**VENDOR))
    for part in ("cudnn", "2000", "CUDNN_STATUS_BAD_PARAM", "epsilon < 0.0", "batch_normalization_backward"):
        assert part in text
    assert "/lib/libcudnn.so.9 9.27.0" in text
    assert "x: f32 dims=(2, 3)" in text


def test_library_message_lists_the_attempts():
    text = str(next(e for e in EXAMPLES if isinstance(e, errors.LibraryNotFoundError)))
    assert "pip: libcudnn.so.9: absent" in text


@pytest.mark.parametrize(
    ("cls", "families"),
    [
        (errors.BadParameterError, (ValueError, RuntimeError)),
        (errors.NotSupportedError, (NotImplementedError,)),
        (errors.UnsupportedError, (NotImplementedError,)),
        (errors.AllocationError, (MemoryError,)),
        (errors.LibraryNotFoundError, (ImportError,)),
        (errors.LibraryLoadError, (OSError,)),
        (errors.SymbolNotFoundError, (AttributeError,)),
        (errors.ArgumentError, (ValueError,)),
        (errors.RankError, (RuntimeError,)),
        (errors.ArgumentTypeError, (TypeError, ValueError)),
    ],
)
def test_builtin_families(cls, families):
    assert all(issubclass(cls, family) for family in families)


def test_a_value_that_cannot_be_shown():
    class Bad:
        def __repr__(self):
            raise RuntimeError

    assert errors.ArgumentError("x", Bad(), "an array").value == "<Bad>"
    assert len(errors.ArgumentError("x", "a" * 5, "b").value) == 5
    assert errors.ArgumentError("x", list(range(1000)), "b").value == "a list"
    assert errors.ArgumentError("x", dict.fromkeys(range(1000)), "b").value == "a dict"
    assert errors.ArgumentError("x", np.ones((2, 2)), "b").value == "a ndarray"
    assert errors.ArgumentError("x", (1, 2), "b").value == "(1, 2)"


@pytest.mark.parametrize("value", ["\x1b" * 10**6, b"\0" * 10**6], ids=["str", "bytes"])
def test_a_long_value_is_cut_before_it_is_cleaned(monkeypatch, value):
    cleaned = []
    clean = errors.one_line
    monkeypatch.setattr(errors, "one_line", lambda text: cleaned.append(len(text)) or clean(text))
    error = errors.ArgumentError("x", value, "a short one")
    assert len(error.value) == 300
    assert error.value.endswith("...")
    assert len(cleaned) == 3
    assert max(cleaned) < 1000
