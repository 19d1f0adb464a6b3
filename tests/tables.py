"""Tests of tables: one test for all rows, which names each wrong one; and few tuples in which values meet in pairs."""

import functools
import inspect
import itertools
import math

import pytest

MOST = None
"""Rows that a quick run takes of each table, set by conftest.py; None is all of them."""


def table(names, rows):
    """As `pytest.mark.parametrize`, but one test for all rows: it fails with each wrong row's place, values and error.

    For rows that are quick and leave nothing behind. Each has its own part of `monkeypatch` and an own `tmp_path`.
    """
    rows = list(rows)
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    assert not any(getattr(row, "marks", ()) for row in rows), "a row with a mark is a test of its own"
    rows = [row.values if hasattr(row, "marks") else row if len(names) > 1 else (row,) for row in rows]
    assert rows
    assert all(len(row) == len(names) for row in rows)

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            wrong, skipped, chosen = [], [], some(list(enumerate(rows)), MOST)
            for place, row in chosen:
                try:
                    _one(test, place, fixtures | dict(zip(names, row, strict=True)))
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as error:
                    wrong.append((place, row, error))
            if wrong:
                lines = [f"row {place}, {_shown(names, row)}: {error!r}" for place, row, error in wrong]
                raise AssertionError("\n".join([f"{len(wrong)} of {len(chosen)} rows:", *lines])) from wrong[0][2]
            if len(skipped) == len(chosen):
                raise skipped[0]

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in names]
        assert len(kept) == len(signature.parameters) - len(names), names
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


def _one(test, place, arguments):
    own = dict(arguments)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(place)
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        with own["monkeypatch"].context() as own["monkeypatch"]:
            test(**own)
    else:
        test(**own)


def _shown(names, row):
    return ", ".join(f"{name}={value!r:.200}" for name, value in zip(names, row, strict=True))


def some(values, most):
    """The first, the last and between; all of them if `most` is None."""
    last, count = len(values) - 1, len(values) if most is None else min(most, len(values))
    return [values[last * i // max(count - 1, 1)] for i in range(count)]


def spread(longest, *shorter, turn=0):
    """Tuples of values of each list: every one of the longest, and every pair of the shorter ones' values."""
    pairs = list(itertools.product(*shorter))
    assert len(longest) >= math.prod(map(len, shorter))
    return [(value, *pairs[(i + turn) % len(pairs)]) for i, value in enumerate(longest)]
