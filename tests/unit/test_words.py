"""The words that editors show are those that are read."""

import typing

import pytest

import pybnorm
from pybnorm import _arguments, _words


@pytest.mark.parametrize(
    ("words", "table"),
    [
        (_words.ModeWord, _arguments._MODES),
        (_words.LayoutWord, _arguments._LAYOUTS),
        (_words.DataTypeWord, _arguments._DATA_TYPES),
        (_words.ActivationWord, _arguments._ACTIVATIONS),
        (_words.OperationWord, _arguments._OPERATIONS),
    ],
)
def test_each_word_is_read_and_each_that_is_read_is_one(words, table):
    assert sorted(typing.get_args(words)) == sorted(word for word in table if isinstance(word, str))


def test_backends_and_their_algorithms():
    vendors = typing.get_args(_words.BackendWord)
    assert set(vendors) <= set(pybnorm.backends())
    assert [name for name in pybnorm.backends() if name in vendors] == list(vendors)
    names = {name for backend in vendors for name in pybnorm.algorithms(backend)}
    assert set(typing.get_args(_words.AlgorithmWord)) == names
