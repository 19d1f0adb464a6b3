"""A call that lacks an argument, or has one by another system's name, is told its name: every public callable."""

from __future__ import annotations

import warnings

import hostile_calls
import pytest

from pybnorm import _names

TARGETS = hostile_calls.TARGETS
TAKES_ANY = ("CallList.append", "Problem", "pybnorm.torch.")
"""Where a keyword of another name is a value, a key of a case's line, or PyTorch's own."""
BOTH = {"axis", "mode"}
"""Names that both have meanings here, so that neither is taken for the other's other name."""


@pytest.fixture(scope="module")
def world(need_device):
    need_device("onednn")  # what the good values are made of
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = hostile_calls.World()
        yield made
        made.handle.close()
        if made.opened is not None:
            made.opened.handle.close()


def parameters(target):
    return hostile_calls._parameters(target.function, target.owner, target.method)


def required(target):
    """Names of arguments that each call has; what precedes ``*arguments`` is not: they would take its place."""
    found = parameters(target)
    if any(p.kind == p.VAR_POSITIONAL for p in found):
        return []
    return [p.name for p in found if p.kind != p.VAR_KEYWORD and p.default is p.empty]


def other_names(target):
    """Pairs of a name that others give one of the arguments, and the name that it has here."""
    names = [p.name for p in parameters(target)]
    for word, meant in _names.HINTS.items():
        here = next((name for name in meant if name in names), None)
        if not (here is None or here in BOTH or word in (*names, *_names.OLD)):
            yield word, here


def error(target, arguments):
    try:
        target.call(arguments)
    except Exception as raised:
        return raised
    return None


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if required(target)])
def test_a_missing_argument_is_named(world, name):
    target = TARGETS[name]
    for missing in required(target):
        given = target.good(world)
        del given[missing]
        raised = error(target, given)
        assert isinstance(raised, TypeError | ValueError), missing
        assert f"'{missing}'" in str(raised) or str(raised).startswith(f"{missing}: got None"), missing


@pytest.mark.parametrize(
    "name", [n for n, t in TARGETS.items() if len(required(t)) > 1 and t.module == "pybnorm._core"]
)
def test_only_what_is_missing_is_named(world, name):
    """By position, too, where Cython stops before it looks at any argument."""
    target = TARGETS[name]
    names = [p.name for p in parameters(target) if p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    good = target.good(world)
    values = [good[n].pointer if type(good[n]) is hostile_calls.Address else good[n] for n in names]
    own = [good["self"]] if target.method else []
    for count in range(len(names)):
        with pytest.raises(TypeError) as caught:
            target.function(*own, *values[:count])
        left = names[count:]
        assert str(caught.value).endswith(f"{', '.join(map(repr, left))}"), count
        assert f" missing {len(left)} required positional argument" in str(caught.value)


TOLD = [n for n, target in TARGETS.items() if any(other_names(target)) and not any(part in n for part in TAKES_ANY)]


@pytest.mark.parametrize("name", TOLD)
def test_a_name_of_another_system_gets_ours(world, name):
    target = TARGETS[name]
    for word, here in other_names(target):
        raised = error(target, target.good(world) | {word: 0.5})
        told = f"got an unexpected keyword argument '{word}' (did you mean '{here}'?)"
        assert str(raised).endswith((told, f"allowed: {here} alone, which is its new name")), word


def test_epsilon_and_the_factor_are_of_every_module(world):
    """What is told apart above has the parameters that PyTorch's users write."""
    found = {TARGETS[name].module for name in TARGETS for word, _ in other_names(TARGETS[name]) if word == "eps"}
    modules = ("_core", "functional", "graph", "hipdnn", "layer", "miopen", "operations", "reference", "sync")
    assert {f"pybnorm.{module}" for module in modules} <= found
    for word in ("momentum", "affine", "track_running_stats"):
        assert sum(word in dict(other_names(target)) for target in TARGETS.values()) > 9, word
