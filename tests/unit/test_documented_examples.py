"""Every public function has an example, and all examples of the documentation run, on oneDNN."""

import doctest
import importlib
import inspect

import numpy as np
import pytest

import pybnorm

MODULES = ["pybnorm", *(f"pybnorm.{name}" for name in sorted(pybnorm._SUBMODULES))]
OPTIONS = doctest.NORMALIZE_WHITESPACE
# In the module's own: the phases of one call, and a pair that needs both.
ELSEWHERE = ("pybnorm.cann.batch_norm_", "pybnorm.hipdnn.")


def public(module):
    """(name, thing) of the functions and classes of a module and of the classes' own methods."""
    yield module.__name__, module
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing):
            yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for own in vars(thing):
                if not own.startswith("_") and callable(getattr(thing, own)):
                    yield f"{module.__name__}.{name}.{own}", getattr(thing, own)


@pytest.fixture(params=MODULES)
def module(request):
    if request.param == "pybnorm.torch":
        pytest.importorskip("torch")
    return importlib.import_module(request.param)


def test_examples_run(module, need_device, monkeypatch, tmp_path):
    need_device("onednn")
    parser, runner, said = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=OPTIONS), []
    for name, thing in public(module):
        names = {"np": np, "pybnorm": pybnorm}
        test = parser.get_doctest(inspect.getdoc(thing) or "", names, name, None, 0)
        runner.run(test, out=said.append)
    assert not said, "".join(said)


def test_functions_have_one(module):
    functions = {n: getattr(module, n) for n in module.__all__ if inspect.isroutine(getattr(module, n))}
    without = [n for n, thing in functions.items() if "\nExamples\n" not in (inspect.getdoc(thing) or "")]
    assert [n for n in without if not f"{module.__name__}.{n}".startswith(ELSEWHERE)] == []
