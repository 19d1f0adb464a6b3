"""Finds whether a case could have failed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pybnorm.check.judging.bounds.classes import LONG, Tier, tiers
from pybnorm.check.judging.bounds.composed import expect
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.language import activations
from pybnorm.check.language.data import Inputs, round_to
from pybnorm.check.language.lines import load_suite
from pybnorm.check.language.problem import FILE, Problem, vector_dtype
from pybnorm.enums import Mode, Operation
from pybnorm.reference.namespaces import Array, Foreign

SUITES = ("smoke", "standard")
"""Suites whose cases notice a change of each input, as a test finds; a run of the first reads no other."""
_HOW = frozenset(
    {"strides", "inplace", "bitwise", "misalign", "fence", "repeats", "streams"} | {"unbiased", "saves_variance"}
)
_NAMES = [field.name for field in dataclasses.fields(Problem) if field.name not in _HOW]
_MOST = 1 << 16
FEW = 24
"""Cases of a process that are computed in less time than the larger suite is read."""
_computed: dict[tuple[object, ...], list[str]] = {}  # of this process


def blind_inputs(problem: Problem, inputs: Inputs, one_pass: bool = False) -> list[str]:
    """`untrusted` of a problem and its inputs, computed once in a process; the larger suite is read after a few."""
    if problem.fill == FILE:  # whose content may change
        return untrusted(problem, inputs, one_pass)
    key = (one_pass, *case_key(problem))
    if key not in _computed:
        suites = SUITES if len(_computed) >= FEW else SUITES[:1]
        if not one_pass and any(key[1:] in _keys(suite) for suite in suites):
            return []
        if len(_computed) == _MOST:
            _computed.clear()
        _computed[key] = untrusted(problem, inputs, one_pass)
    return list(_computed[key])


def case_key(problem: Problem) -> tuple[object, ...]:
    """The options of a case that decide what it notices."""
    return tuple(getattr(problem, name) for name in _NAMES)


@functools.cache
def _keys(suite: str) -> frozenset[tuple[object, ...]]:
    return frozenset(map(case_key, load_suite(suite)))


def untrusted(problem: Problem, inputs: Inputs, one_pass: bool = False) -> list[str]:
    """Inputs whose change this case would not notice; not empty means MISTRUSTED.

    Each input that the operation reads is changed in one place, and the reference must move by more than the bound in
    some output: by the loosest stable bound, or with `one_pass`, for a case that only the one-pass bound accepted, by
    that. Four statistics are looked at, the first three and the last. The last one is changed. If it is constant, not
    finite, out of range or masked by an activation, an ordinary one is changed instead. Where backward takes the
    statistics of a long sum from x, one x is next to nothing: if it does not show, all of the statistic is changed.

    Not required, because the formulas do not depend on it (or, for epsilon, because only some fills make it
    comparable with the variance):

    * epsilon unless the fill is exact, sqrteps or paired; epsilon in backward with saved statistics
    * x, scale and epsilon where m = 1 and the statistics come from x: x_hat is 0, and dx with it, so that alpha does
      not show either (but the statistics that training saves or updates show x)
    * scale and alpha in backward where m <= 2 and the statistics come from x: dx is 0 up to epsilon
    * what only alpha = 0 hides, a prior where its beta is 0, running priors where the factor is 1
    """
    count = math.prod(problem.parameter_dims)

    def few(chosen: list[int]) -> tuple[Problem, Inputs, Expected]:
        small = Inputs(**{name: _pick(a, chosen, problem.mode) for name, a in inputs.arrays().items()})
        other = dataclasses.replace(problem, dims=small.x.shape, strides=())
        return other, small, expect(other, small)

    small, small_inputs, baseline = few(sorted({*range(min(3, count)), count - 1}))
    tier = _loosest(small, "y", one_pass)
    if not _ordinary(small, small_inputs, baseline, tier)[-1]:
        candidates = sorted({*range(min(16, count)), count - 1})
        ordinary = _ordinary(*few(candidates), tier)
        last = max((i for i, good in zip(candidates, ordinary, strict=True) if good), default=count - 1)
        small, small_inputs, baseline = few([*(i for i in candidates[:3] if i != last), last])
    bounds = {}
    for name in sorted(baseline.outputs, key=lambda name: name in ("y", "dx")):  # small ones first: most show there
        parts = baseline.parts(name, None, (_loosest(small, name, one_pass),))
        bounds[name] = [(part.reference.copy(), part.classes[0][0]) for part in parts]

    def shows(changed: Problem, other: Inputs) -> bool:
        after = baseline.varied(changed, other)
        with np.errstate(all="ignore"):
            return any(
                bool(np.any(np.abs(part.reference - right) > bound))
                for name, blocks in bounds.items()
                for part, (right, bound) in zip(after.parts(name, None, ()), blocks, strict=True)
            )

    blind = [name for name, changed, other in _changes(small, small_inputs) if not shows(changed, other)]
    whole = small.operation == Operation.BACKWARD and small.recomputes and small.m >= LONG
    if whole and "x" in blind and shows(small, _changed_statistic(small, small_inputs, "x")):
        blind.remove("x")
    return blind


def _loosest(problem: Problem, output: str, one_pass: bool) -> Tier:
    return [t for t in tiers(problem, output) if one_pass or not t.one_pass][-1]


def _ordinary(problem: Problem, inputs: Inputs, expected: Expected, tier: Tier) -> Array:
    """Say which statistics are ordinary, and have elements between the limits of an activation."""
    ordinary = expected.ordinary(tier).ravel()
    if not problem.activation:
        return ordinary
    shows = activations.inside(problem, _before_activation(problem, inputs))
    shows *= inputs.x.astype(np.float64) != expected.statistics[0]
    return ordinary & shows.any(axis=problem.reduced_axes).ravel()


def _pick(array: Array, chosen: list[int], mode: Mode) -> Array:
    if mode == Mode.PER_ACTIVATION:
        return array.reshape(array.shape[0], -1)[:, np.array(chosen)]
    if isinstance(array, Foreign):
        return np.take(array, chosen, axis=1)
    return array[:, np.array(chosen)]  # take would copy all of an array that is not contiguous, such as a NaN prior


_SHOW_EPSILON = ("exact", "sqrteps", "paired")
"""Fills whose epsilon is comparable with the variance."""


def _before_activation(problem: Problem, inputs: Inputs) -> Array:
    """Give what the activation is applied to; where it is given, what came of it."""
    if inputs.y is not None:
        return inputs.y.astype(np.float64)
    statistics = expect(problem, inputs).statistics
    result = activations.before(problem, inputs.x, inputs.scale, inputs.need("bias"), statistics)
    return result if inputs.z is None else result + inputs.z.astype(np.float64)


def _last_weights(dy: Array, problem: Problem) -> Array:
    """|dy| of the last statistic, where it is finite; 0 of the others."""
    weights = np.zeros(dy.shape)
    rows, own = (a.reshape(len(dy), -1) if problem.mode == Mode.PER_ACTIVATION else a for a in (dy, weights))
    own[:, -1] = np.abs(rows[:, -1].astype(np.float64))
    weights[~np.isfinite(weights)] = 0
    return weights


def _further(value: Array) -> Array:
    return value + max(1.0, abs(value))


def _changed(
    problem: Problem, inputs: Inputs, name: str, change: Callable[[Array], Array], place: int | None = None
) -> Inputs:
    old = getattr(inputs, name)
    data = old.shape == inputs.x.shape
    dtype = problem.dtype if data else vector_dtype(problem, name)
    new = old.astype(np.float64)
    if place is None:
        place = old.size - 1
        if data and problem.activation:
            place = activations.passing(problem, inputs.x, _before_activation(problem, inputs), inputs.dy)
        elif data and name == "x" and inputs.dy is not None:
            weights = _last_weights(inputs.dy, problem)  # if dy of the last element is 0, where it is largest
            place = place if weights.flat[-1] or not weights.any() else int(weights.argmax())
    before = float(new.flat[place])
    with np.errstate(invalid="ignore", over="ignore"):
        after = change(new.flat[place])
        # where the type's range ends: as far the other way, else with the other sign
        for new.flat[place] in (after, 2 * before - after, -before):
            stored_ = round_to(new, dtype)
            if np.isfinite(stored_.astype(np.float64).flat[place]):
                break
    return dataclasses.replace(inputs, **{name: stored_})


def _spread(inputs: Inputs) -> float:
    """Width of x's values in the last statistic; something else where they are equal."""
    last = inputs.x.reshape(*inputs.x.shape[:2], -1)[:, -1].astype(np.float64)
    with np.errstate(invalid="ignore"):
        spread = float(last.max() - last.min())
    return spread if 0 < spread < math.inf else 1.0 + abs(float(last.flat[-1]))


def _changed_statistic(problem: Problem, inputs: Inputs, name: str) -> Inputs:
    """The inputs with all of the last statistic changed: one element is next to nothing in a long sum."""
    new = getattr(inputs, name).astype(np.float64)
    dy = inputs.need("dy")[:, -1].astype(np.float64)
    new[:, -1] += _spread(inputs) * np.sign(dy) if name == "x" else 1.0 + np.abs(dy)
    return dataclasses.replace(inputs, **{name: round_to(new, problem.dtype)})


_Changes = dict[str, Callable[[Array], Array]]


def _changes(problem: Problem, inputs: Inputs) -> Iterator[tuple[str, Problem, Inputs]]:
    """Change each input and option that the results depend on: its name, and the problem and inputs with the change."""
    arrays, places = _arrays(problem, inputs)
    long_sums = {"frozen": ("x",), "backward_reduce": ("x", "dy")} if problem.m >= LONG else {}
    for name, change in arrays.items():
        if name in long_sums.get(problem.composed, ()):
            yield name, problem, _changed_statistic(problem, inputs, name)
        else:
            yield name, problem, _changed(problem, inputs, name, change, places.get(name))
    for name, value in _options(problem).items():
        changed: dict[str, Any] = {name: value, "old": "drawn"}  # the inputs are there already
        yield name, dataclasses.replace(problem, **changed), inputs


def _shown(problem: Problem) -> tuple[bool, bool]:
    """Say whether x_hat shows in y or dx, and in dscale."""
    composed = problem.composed
    zero = problem.recomputes and problem.m == 1
    sums = problem.operation == Operation.BACKWARD and composed != "backward_elemt" and bool(problem.alpha_param)
    return not zero and composed not in ("frozen", "backward_reduce") and bool(problem.alpha), not zero and sums


def _scaled(problem: Problem) -> bool:
    """Say whether the result is other than 0 before it is multiplied by alpha."""
    zero = problem.operation == Operation.BACKWARD and problem.recomputes and problem.m <= 2
    return "alpha" in problem.options and not zero


def _arrays(problem: Problem, inputs: Inputs) -> tuple[_Changes, dict[str, int]]:
    """Changes of arrays, and places of those that are not `_changed`'s own."""
    if problem.composed == "gather_stats":  # statistics that are merged; the last rank has elements
        merged: _Changes = {"x": lambda value: value + 1 + np.abs(value), "m2s": lambda value: 4 * value + 1e-30}
        old: _Changes = {"mean": _further, "variance": merged["m2s"]}
        return merged | (old if problem.running and problem.factor != 1 else {}), {}
    training, backward = (problem.operation == o for o in (Operation.FORWARD_TRAINING, Operation.BACKWARD))
    (in_data, in_sums), composed = _shown(problem), problem.composed if backward else ""
    shown, updates = in_data or in_sums, training and problem.running
    changes: _Changes = {}
    places: dict[str, int] = {}
    if shown or updates or (training and problem.saved):
        spread = _spread(inputs)
        changes["x"] = lambda value: value + spread
    if problem.alpha and _scaled(problem) and not (problem.recomputes and problem.m == 1):
        changes["scale"] = lambda value: np.where(value == 0, 1.0, 1.5 * value)
    low, high = activations.limits(problem) if problem.activation else (0.0, 0.0)
    beyond = 1 + abs(low) + (high if high < math.inf else 0.0)
    if inputs.bias is not None and problem.alpha and inputs.y is None and not composed:
        changes["bias"] = lambda value: _further(value) - (4 * abs(value) + 2 * beyond if backward else 0.0)
    if inputs.dy is not None and (problem.alpha or problem.alpha_param):
        changes["dy"] = _further
    if inputs.z is not None and problem.alpha:
        changes["z"] = _further
    if inputs.y is not None and problem.alpha:
        changes["y"] = lambda value: -beyond - abs(value)
    reads = problem.operation == Operation.FORWARD_INFERENCE and bool(problem.alpha)
    names = ("saved_mean", "saved_inv_variance")
    if problem.takes_variance or (reads and not problem.inverse) or (updates and problem.factor != 1):
        names = ("mean", "variance")
        variance = float(inputs.need("variance").astype(np.float64).flat[-1])
        deviation = math.sqrt(abs(variance) + problem.epsilon) or 1.0
        changes["variance"] = lambda value: 4 * value if value < 1e30 else value / 4
    elif composed or (backward and problem.saved) or (reads and problem.inverse):
        deviation = 1 / (float(inputs.need("saved_inv_variance").astype(np.float64).flat[-1]) or 1.0)
        changes["saved_inv_variance"] = lambda value: 1.5 * value
    if names[1] in changes and (shown or not composed):
        changes[names[0]] = lambda value: value + (deviation or 1.0)
    if composed:
        places = dict.fromkeys(("x", "dy"), int(_last_weights(inputs.need("dy"), problem).argmax()))
        if in_sums and not in_data:
            places |= _places_of_sums(problem, inputs, names)
    if inputs.sum_dy is not None and problem.alpha:
        changes["sum_dy"] = lambda value: value + problem.count
        changes["sum_dy_xmu"] = lambda value: value + problem.count * abs(deviation)
    if problem.beta:
        changes["prior"] = _further
    if backward and problem.beta_param:
        changes |= dict.fromkeys(("prior_scale", "prior_bias"), _further)
    return changes, places


def _places_of_sums(problem: Problem, inputs: Inputs, names: tuple[str, str]) -> dict[str, int]:
    """Find where statistics show that only dscale has: where its sums are not 0."""
    dy = inputs.need("dy").astype(np.float64)
    axes = problem.reduced_axes
    with np.errstate(all="ignore"):
        centred = inputs.x.astype(np.float64) - inputs.need(names[0]).astype(np.float64)
        total, moment = (np.abs(terms.sum(axis=axes)) for terms in (dy, dy * centred))
        finite = np.isfinite(total) & np.isfinite(moment)
        sizes = zip(names, (total, moment), strict=True)
        return {name: int(np.where(finite, size, -1).argmax()) for name, size in sizes}


def _options(problem: Problem) -> dict[str, float]:
    """Other values of the options that the results depend on."""
    training, backward = (problem.operation == o for o in (Operation.FORWARD_TRAINING, Operation.BACKWARD))
    shown = problem.composed == "gather_stats" or (training and problem.saved) or any(_shown(problem))
    given = problem.inverse or (backward and problem.saved)
    shown = problem.takes_variance or (shown and "eps" in problem.options and not given)
    values: dict[str, tuple[Any, float]] = {
        "eps": (shown and problem.fill in _SHOW_EPSILON, 2 * problem.epsilon or 1.0),
        "factor": (training and problem.running and problem.old == "drawn", problem.factor / 2 or 0.5),
        "alpha": (_scaled(problem), 1.5 * problem.alpha or 0.5),
        "beta": (problem.beta, 1.5 * problem.beta),
        "alpha_param": (backward and "alpha_param" in problem.options, 1.5 * problem.alpha_param or 0.5),
        "beta_param": (backward and problem.beta_param, 1.5 * problem.beta_param),
    }
    return {name: value for name, (asked, value) in values.items() if asked}
