"""Every public function, class and method has an example, and all examples of the documentation run, on oneDNN."""

import doctest
import enum
import importlib
import inspect
import re

import numpy as np
import pytest

import pybnorm

MODULES = ["pybnorm", *(f"pybnorm.{name}" for name in sorted(pybnorm._SUBMODULES))]
OPTIONS = doctest.NORMALIZE_WHITESPACE
# The module shows the phases of a call, hipDNN's Graph its names. A worker's life is the check's, defects are data.
ELSEWHERE = ("pybnorm.cann.batch_norm_", "pybnorm.hipdnn.", "pybnorm.check.Worker.", "pybnorm.defects.Defect")


def shown(thing):
    return (inspect.getdoc(thing) or "").partition("\nExamples\n")[2]


def methods(kind):
    """Public methods of a class, also of our classes that it is made of."""
    names = {n for base in kind.__mro__ if base.__module__.startswith("pybnorm") for n in vars(base)}
    return {name: getattr(kind, name) for name in sorted(names) if name[0] != "_" and callable(getattr(kind, name))}


def public(module):
    """(name, thing) of the functions and classes of a module and of the classes' own methods."""
    yield module.__name__, module
    for name in module.__all__:
        thing = getattr(module, name)
        if callable(thing):
            yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for own, method in methods(thing).items():
                yield f"{module.__name__}.{name}.{own}", method


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


def without_example(module):
    """Functions; classes that are not plain values; methods that neither their own nor the class's example calls."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isroutine(thing) and not shown(thing):
            yield name
        if not inspect.isclass(thing) or issubclass(thing, (BaseException, enum.Enum, tuple)):
            continue
        every, text = methods(thing), re.sub("#.*", "", shown(thing))
        if not text and not any(shown(method) for method in every.values()):
            yield name
        for own, method in every.items():
            called = own if not own.startswith(("set_", "get_")) else r"[sg]et_\w+"  # of those one stands for all
            if not shown(method) and not re.search(rf"\b{called}(\(|=lambda )", text):
                yield f"{name}.{own}"


def test_each_has_one(module):
    found = [f"{module.__name__}.{name}" for name in without_example(module)]
    assert [name for name in found if not name.startswith(ELSEWHERE)] == []
