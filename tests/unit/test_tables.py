"""Tests of tables: each wrong row is named, and a row leaves nothing to the next; which values meet."""

import itertools
import os

import pytest
import tables
from tables import spread, table


@pytest.fixture(autouse=True)
def every_row(monkeypatch):
    monkeypatch.setattr(tables, "MOST", None)


def test_each_wrong_row_is_named():
    @table("number, word", [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def check(number, word):
        assert len(word) == 3
        assert number != 2

    with pytest.raises(AssertionError, match=r"3 of 4 rows:\nrow 1, number=2, word='two'.*\nrow 2.*\nrow 3, number=4"):
        check()


def test_a_table_is_skipped_where_all_rows_are():
    @table("number", [1, 2])
    @table("letter", "ab")
    def check(number, letter):
        if number == 2 or letter == "b":
            pytest.skip(f"not {number}")

    check()
    with pytest.raises(pytest.skip.Exception, match="not 2"):
        table("number", [2, 2])(lambda number: pytest.skip(f"not {number}"))()


def test_a_row_leaves_nothing_to_the_next(tmp_path, monkeypatch):
    @table("number", [1, 2])
    def check(number, tmp_path, monkeypatch):
        assert "PYBNORM_OF_A_ROW" not in os.environ
        monkeypatch.setenv("PYBNORM_OF_A_ROW", str(number))
        (tmp_path / "file").touch(exist_ok=False)

    check(tmp_path=tmp_path, monkeypatch=monkeypatch)


def test_a_row_with_a_mark_is_refused():
    with pytest.raises(AssertionError, match="a test of its own"):
        table("number", [pytest.param(1, marks=pytest.mark.slow)])


def test_every_pair_of_the_shorter_lists_meets():
    rows = spread(range(7), "ab", "xyz", turn=5)
    assert [number for number, *_ in rows] == list(range(7))
    assert {(a, b) for _, a, b in rows} == set(itertools.product("ab", "xyz"))
