"""The comparer is itself held: a check that cannot fail proves nothing."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("abi_same_self.cpp")


def test_accepts_what_is_the_same_and_numbers_what_is_not(abi):
    result = abi("abi").compile(SOURCE, [])
    assert result.returncode == 0, result.stderr


def test_a_difference_stops_the_compiler_and_is_named(abi):
    result = abi("abi").compile(SOURCE, ["-DMUST_FAIL"])
    assert result.returncode != 0
    assert "value of VENDOR_B differs" in result.stderr
    assert "prototype of vendor_call differs" in result.stderr
