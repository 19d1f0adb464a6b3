"""Cases whose shapes are drawn: the same of the same seed, of every kind, and read from the command line."""

import math

import pytest
from click.testing import CliRunner

from pybnorm.check.language.drawn_shapes import drawn_cases, read_shapes
from pybnorm.cli import main
from pybnorm.errors import ArgumentError


@pytest.mark.slow
def test_a_seed_draws_the_same_cases_of_every_kind_and_another_one_others():
    cases, again, other = (drawn_cases(1000, seed) for seed in (1, 1, 8))
    assert cases == again
    assert len(set(cases)) == 1000
    assert not set(cases) & set(other)
    assert {len(p.dims) for p in cases} == {2, 3, 4, 5}
    assert len({(p.operation, p.dtype, p.mode) for p in cases}) == 3 * 4 * 2
    assert {p.dims[1] % 32 for p in cases} == set(range(32))
    assert len({p.dims[1] for p in cases}) > 150
    assert max(math.prod(p.dims) for p in cases) <= 1 << 17
    assert {p.saved for p in cases} == {True, False}


def test_the_command_line_says_the_seed():
    result = CliRunner().invoke(main, ["check", "--shapes", "random:5:42", "--list"])
    assert result.exit_code == 0
    assert "--shapes random:5:42" in result.stderr
    assert result.stdout.split() == [str(p) for p in drawn_cases(5, 42)]
    drawn = CliRunner().invoke(main, ["check", "--shapes", "random:5", "--list"])
    word = drawn.stderr.strip().removeprefix("--shapes ")
    again = CliRunner().invoke(main, ["check", "--shapes", word, "--list"])
    assert drawn.stdout == again.stdout != result.stdout


@pytest.mark.parametrize(
    "word", ["", "random", "random:", "random:0", "random:x", "random:5:x", "drawn:5", "random:99999"]
)
def test_another_word_is_refused(word):
    with pytest.raises(ArgumentError, match="random:COUNT"):
        read_shapes(word)
