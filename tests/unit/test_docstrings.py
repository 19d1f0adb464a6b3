"""numpydoc's checks of public functions: all parameters and results are documented, and none that is not there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from tables import table

import pybnorm

CODES = {
    "GL08": "no docstring",
    "PR01": "a parameter is not documented",
    "PR02": "what is documented is no parameter",
    "RT01": "no Returns",
    "YD01": "no Yields",
}
FRAGMENT = re.compile(r'(?:\A|:(?:  #.*)?\n)\s*[rf]?"""((?:Of|That of|Those|What|Whether|How|Where|Which) .*)')


@table("name", ["pybnorm", *(f"pybnorm.{name}" for name in sorted(pybnorm._SUBMODULES))])
def test_functions_are_documented(name, monkeypatch, need_package):
    need_package("numpydoc")
    from numpydoc import docscrape, validate

    if name == "pybnorm.torch":
        pytest.importorskip("torch")
    module, source = importlib.import_module(name), inspect.getsource

    def getsource(thing):
        try:
            return source(thing)
        except OSError:  # a function that was made of a recipe: the operations, which return nothing
            return "def made(): ..."

    monkeypatch.setattr(inspect, "getsource", getsource)
    wrong = []
    functions = {n: getattr(module, n) for n in module.__all__ if inspect.isroutine(getattr(module, n))}
    for function, thing in functions.items():
        if function.startswith("batch_norm_") and name == "pybnorm.cann":
            continue  # the two phases: their arguments are those of the one call, which they name
        errors = validate.validate(docscrape.get_doc_object(thing))["errors"]
        wrong += [(function, text) for code, text in errors if code in CODES]
    assert not wrong, "\n".join(f"{function}: {text}" for function, text in wrong)


def test_a_first_line_is_no_fragment():
    """It is a sentence, or a noun phrase that stands alone."""
    files = Path(pybnorm.__file__).parent.rglob("*.py")
    assert [f"{file.name}: {line}" for file in files for line in FRAGMENT.findall(file.read_text("utf-8"))] == []
