"""Finds whether a case could have failed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pybnorm.check.judging.bounds.classes import LONG, Tier, tiers
from pybnorm.check.judging.bounds.composed import expect
from pybnorm.check.judging.bounds.expected import Expected
from pybnorm.check.language import activations
from pybnorm.check.language.data import Inputs, round_to
from pybnorm.check.language.problem import Problem
from pybnorm.enums import Mode, Operation
from pybnorm.reference.namespaces import Array, Foreign


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
    count = int(np.prod(problem.parameter_dims))
    small, small_inputs = _few(problem, inputs, sorted({*range(min(3, count)), count - 1}))
    baseline = expect(small, small_inputs)
    tier = [t for t in tiers(small, "y") if one_pass or not t.one_pass][-1]
    if not _ordinary(baseline, tier)[-1]:
        small, small_inputs = _few(problem, inputs, _with_an_ordinary_last(problem, inputs, tier))
        baseline = expect(small, small_inputs)
    bounds = _bounds(baseline, one_pass)
    blind = [
        name
        for name, changed, other in _changes(small, small_inputs)
        if not _moved(bounds, baseline.varied(changed, other))
    ]
    if "x" in blind and small.operation == Operation.BACKWARD and small.recomputes and small.m >= LONG:
        whole = _changed_statistic(small, small_inputs, "x")
        if _moved(bounds, baseline.varied(small, whole)):
            blind.remove("x")
    return blind


def _few(problem: Problem, inputs: Inputs, chosen: list[int]) -> tuple[Problem, Inputs]:
    per_activation = problem.mode == Mode.PER_ACTIVATION
    few = Inputs(**{name: _pick(a, chosen, per_activation) for name, a in inputs.arrays().items()})
    return dataclasses.replace(problem, dims=few.x.shape, strides=()), few


def _with_an_ordinary_last(problem: Problem, inputs: Inputs, tier: Tier) -> list[int]:
    """Statistics to look at where the last one is special: one that can be judged comes last, if there is any."""
    count = int(np.prod(problem.parameter_dims))
    candidates = sorted({*range(min(16, count)), count - 1})
    ordinary = _ordinary(expect(*_few(problem, inputs, candidates)), tier)
    last = max((i for i, good in zip(candidates, ordinary, strict=True) if good), default=count - 1)
    return [*(i for i in candidates[:3] if i != last), last]


def _ordinary(expected: Expected, tier: Tier) -> Array:
    """Say which statistics are ordinary, and have elements between the limits of an activation."""
    ordinary = expected.ordinary(tier).ravel()
    problem = expected.problem
    if not problem.activation:
        return ordinary
    x = expected.inputs.x.astype(np.float64)
    shows = activations.inside(problem, _before_activation(problem, expected.inputs)) * (x != expected.statistics[0])
    axes = 0 if problem.mode == Mode.PER_ACTIVATION else (0, *range(2, x.ndim))
    return ordinary & shows.any(axis=axes).ravel()


def _pick(array: Array, chosen: list[int], per_activation: bool) -> Array:
    if per_activation:
        return array.reshape(array.shape[0], -1)[:, np.array(chosen)]
    if isinstance(array, Foreign):
        return np.take(array, chosen, axis=1)
    return array[:, np.array(chosen)]  # take would copy all of an array that is not contiguous, such as a NaN prior


def _bounds(expected: Expected, one_pass: bool) -> dict[str, list[tuple[Array, Array]]]:
    """Every output with its loosest bound, in the blocks of `Expected.parts`."""
    result = {}
    for name in sorted(expected.outputs, key=lambda name: name in ("y", "dx")):  # small ones first: most show there
        tier = [t for t in tiers(expected.problem, name) if one_pass or not t.one_pass][-1]
        result[name] = [(part.reference.copy(), part.classes[0][0]) for part in expected.parts(name, None, (tier,))]
    return result


def _moved(before: dict[str, list[tuple[Array, Array]]], after: Expected) -> bool:
    with np.errstate(all="ignore"):
        return any(
            bool(np.any(np.abs(part.reference - right) > bound))
            for name, blocks in before.items()
            for part, (right, bound) in zip(after.parts(name, None, ()), blocks, strict=True)
        )


_SHOW_EPSILON = ("exact", "sqrteps", "paired")
"""Fills whose epsilon is comparable with the variance."""


def _before_activation(problem: Problem, inputs: Inputs) -> Array:
    """Give what the activation is applied to; where it is given, what came of it."""
    if inputs.y is not None:
        return inputs.y.astype(np.float64)
    statistics = None
    if problem.operation == Operation.FORWARD_INFERENCE:
        variance = inputs.need("variance").astype(np.float64)
        statistics = inputs.need("mean"), 1 / np.sqrt(variance + problem.epsilon)
    elif not problem.recomputes:
        statistics = inputs.need("saved_mean"), inputs.need("saved_inv_variance")
    result = activations.before(problem, inputs.x, inputs.scale, inputs.need("bias"), statistics)
    return result if inputs.z is None else result + inputs.z.astype(np.float64)


def _weights(dy: Array, problem: Problem) -> Array:
    last = np.zeros(dy.shape)
    per_activation = problem.mode == Mode.PER_ACTIVATION
    rows, own = (a.reshape(len(dy), -1) if per_activation else a for a in (dy, last))
    own[:, -1] = np.abs(rows[:, -1].astype(np.float64))
    last[~np.isfinite(last)] = 0
    return last


def _weighty(dy: Array, problem: Problem) -> int:
    """Index of the last element of the last statistic if its dy is not 0, else of one whose dy is largest."""
    last = _weights(dy, problem)
    return dy.size - 1 if last.flat[-1] or not last.any() else int(last.argmax())


def _further(value: Array) -> Array:
    return value + max(1.0, abs(value))


def _changed(
    problem: Problem, inputs: Inputs, name: str, change: Callable[[Array], Array], place: int | None = None
) -> Inputs:
    old = getattr(inputs, name)
    data = old.shape == inputs.x.shape
    dtype = problem.dtype if data else problem.parameter_dtype
    new = old.astype(np.float64)
    if place is None:
        place = old.size - 1
        if data and problem.activation:
            place = activations.passing(problem, inputs.x, _before_activation(problem, inputs), inputs.dy)
        elif data and name == "x" and inputs.dy is not None:
            place = _weighty(inputs.dy, problem)
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


def _composed_changes(problem: Problem, inputs: Inputs) -> Iterator[tuple[str, Problem, Inputs]]:
    """Change the inputs of a composed operation: all that its call is given, where the result depends on it."""
    blends = "alpha" in problem.options
    sums = problem.composed != "backward_elemt" and bool(problem.alpha_param)
    statistics_in_dx = problem.composed not in ("frozen", "backward_reduce") and bool(problem.alpha)
    dy = inputs.need("dy").astype(np.float64)
    # where x has the most weight
    places: dict[str, int | None] = dict.fromkeys(("x", "dy"), int(_weights(dy, problem).argmax()))
    changes: dict[str, Callable[[Array], Array]] = {"dy": _further}
    if sums or statistics_in_dx:
        changes["x"] = lambda value: value + _spread(inputs)
    if problem.alpha and blends:
        changes["scale"] = lambda value: np.where(value == 0, 1.0, 1.5 * value)
    if problem.takes_variance:
        deviation = math.sqrt(abs(float(inputs.need("variance").astype(np.float64).flat[-1])) + problem.epsilon)
        changes["variance"] = lambda value: 4 * value if value < 1e30 else value / 4
    else:
        deviation = 1 / (float(inputs.need("saved_inv_variance").astype(np.float64).flat[-1]) or 1.0)
        changes["saved_inv_variance"] = lambda value: 1.5 * value
    mean, spread = ("mean", "variance") if problem.takes_variance else ("saved_mean", "saved_inv_variance")
    if sums or statistics_in_dx:
        changes[mean] = lambda value: value + (deviation or 1.0)
    if sums and not statistics_in_dx:  # they show where the sums are not 0
        axes = (0, *range(2, dy.ndim))
        with np.errstate(all="ignore"):
            centred = inputs.x.astype(np.float64) - inputs.need(mean).astype(np.float64)
            total, moment = (np.abs(terms.sum(axis=axes)) for terms in (dy, dy * centred))
            finite = np.isfinite(total) & np.isfinite(moment)
            for name, size in ((mean, total), (spread, moment)):
                places[name] = int(np.where(finite, size, -1).argmax())
    if inputs.sum_dy is not None and problem.alpha:
        changes["sum_dy"] = lambda value: value + problem.count
        changes["sum_dy_xmu"] = lambda value: value + problem.count * abs(deviation)
    if problem.beta:
        changes["prior"] = _further
    if problem.beta_param:
        changes |= dict.fromkeys(("prior_scale", "prior_bias"), _further)
    in_sums = {"frozen": ("x",), "backward_reduce": ("x", "dy")}.get(problem.composed, ()) if problem.m >= LONG else ()
    for name, change in changes.items():
        if name in in_sums:
            yield name, problem, _changed_statistic(problem, inputs, name)
        else:
            yield name, problem, _changed(problem, inputs, name, change, places.get(name))
    options = {name: 1.5 * getattr(problem, name) for name in ("alpha", "beta", "alpha_param", "beta_param")}
    if problem.fill in _SHOW_EPSILON and "eps" in problem.options:
        options["eps"] = 2 * problem.epsilon or 1.0
    for name, value in options.items():
        if name in problem.options and (value or name.startswith("alpha")):
            changed: dict[str, Any] = {name: value or 0.5}
            yield name, dataclasses.replace(problem, **changed), inputs


def _gathered_changes(problem: Problem, inputs: Inputs) -> Iterator[tuple[str, Problem, Inputs]]:
    """Change statistics that are merged; the last rank has elements."""
    changes: dict[str, Callable[[Array], Array]] = {
        "x": lambda value: value + 1 + np.abs(value),
        "m2s": lambda value: 4 * value + 1e-30,
    }
    if problem.running and problem.factor != 1:
        changes |= {"mean": _further, "variance": lambda value: 4 * value + 1e-30}
    for name, change in changes.items():
        yield name, problem, _changed(problem, inputs, name, change)
    options: dict[str, Any] = {}
    if problem.running and problem.old == "drawn":
        options["factor"] = problem.factor / 2 or 0.5
    if problem.fill in _SHOW_EPSILON:
        options["eps"] = 2 * problem.epsilon or 1.0
    for name, value in options.items():
        changed: dict[str, Any] = {name: value, "old": "drawn"}
        yield name, dataclasses.replace(problem, **changed), inputs


def _changes(problem: Problem, inputs: Inputs) -> Iterator[tuple[str, Problem, Inputs]]:
    if problem.composed == "gather_stats":
        yield from _gathered_changes(problem, inputs)
        return
    if problem.composed and problem.operation == Operation.BACKWARD:
        yield from _composed_changes(problem, inputs)
        return
    operation, m = problem.operation, problem.m
    backward = operation == Operation.BACKWARD
    normal_is_zero = problem.recomputes and m == 1
    dx_is_zero = problem.recomputes and m <= 2

    def array(name: str, change: Callable[[Array], Array]) -> tuple[str, Problem, Inputs]:
        return name, problem, _changed(problem, inputs, name, change)

    def option(name: str, value: float) -> tuple[str, Problem, Inputs]:
        changes: dict[str, Any] = {name: value, "old": "drawn"}  # the inputs are there already
        return name, dataclasses.replace(problem, **changes), inputs

    spread = _spread(inputs)
    shows_x = operation == Operation.FORWARD_TRAINING and problem.saved
    shows_normal = not normal_is_zero and bool(problem.alpha or (backward and problem.alpha_param))
    updates = operation == Operation.FORWARD_TRAINING and problem.running
    if shows_x or shows_normal or updates:
        yield array("x", lambda value: value + spread)
    if problem.alpha and not normal_is_zero and not (backward and dx_is_zero):
        yield array("scale", lambda value: np.where(value == 0, 1.0, 1.5 * value))
    if (
        problem.fill in _SHOW_EPSILON
        and not ((backward and problem.saved) or problem.inverse)
        and (shows_x or shows_normal)
    ):
        yield option("eps", 2 * problem.epsilon if problem.epsilon else 1.0)
    low, high = activations.limits(problem) if problem.activation else (0.0, 0.0)
    beyond = 1 + abs(low) + (high if high < math.inf else 0.0)
    if inputs.bias is not None and problem.alpha and inputs.y is None:
        yield array("bias", lambda value: _further(value) - (4 * abs(value) + 2 * beyond if backward else 0.0))
    if inputs.dy is not None and (problem.alpha or problem.alpha_param):
        yield array("dy", _further)
    for name in ("z", "y"):
        if getattr(inputs, name) is not None and problem.alpha:
            yield array(name, _further if name == "z" else lambda value: -beyond - abs(value))
    reads_statistics = operation == Operation.FORWARD_INFERENCE and problem.alpha and not problem.inverse
    reads_running = updates and problem.factor != 1
    if reads_statistics or reads_running:
        deviation = math.sqrt(abs(float(inputs.need("variance").astype(np.float64).flat[-1]))) or 1.0
        yield array("mean", lambda value: value + deviation)
        yield array("variance", lambda value: 4 * value if value < 1e30 else value / 4)
    if updates and problem.old == "drawn":
        yield option("factor", problem.factor / 2 if problem.factor else 0.5)
    if (backward and problem.saved) or (problem.inverse and problem.alpha):
        one_deviation = 1 / (float(inputs.need("saved_inv_variance").astype(np.float64).flat[-1]) or 1.0)
        yield array("saved_mean", lambda value: value + one_deviation)
        yield array("saved_inv_variance", lambda value: 1.5 * value)
    if not (backward and (normal_is_zero or dx_is_zero)):
        yield option("alpha", 1.5 * problem.alpha or 0.5)
    if problem.beta:
        yield option("beta", 1.5 * problem.beta)
        yield array("prior", _further)
    if backward:
        yield option("alpha_param", 1.5 * problem.alpha_param or 0.5)
        if problem.beta_param:
            yield option("beta_param", 1.5 * problem.beta_param)
            yield array("prior_scale", _further)
            yield array("prior_bias", _further)
