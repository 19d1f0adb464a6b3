"""Recipes: each operation in terms of the program's steps."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.operations.program import Program, _need, _parameter_dtype, _Shape
from pybnorm.operations.views import Axis, _row, _rows


class _Gradients(NamedTuple):
    """The arguments that the three backward operations share."""

    shape: _Shape
    x: Buffer
    dy: Buffer
    dx: Buffer | None
    dscale: Buffer
    dbias: Buffer
    factors: tuple[float, float, float, float]
    """alpha_data, beta_data, alpha_param, beta_param."""


def _gradients(
    p: Program,
    x: Any,
    dy: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    axis: Axis,
) -> _Gradients:
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb)
    a_data, b_data, a_param, b_param = p.scalars(
        shape, alpha_data=alpha_data, beta_data=beta_data, alpha_param=alpha_param, beta_param=beta_param
    )
    if dx is None and dscale is None and dbias is None:
        raise ArgumentError("dx", None, "an array, or one for dscale or dbias")
    dxb = None if dx is None else p.data("dx", dx, xb, output=True)
    blended = b_param != 0
    return _Gradients(
        shape,
        xb,
        dyb,
        dxb,
        p.result("dscale", dscale, shape, prior=blended),
        p.result("dbias", dbias, shape, prior=blended),
        # A scratch dx has no prior.
        (a_data, b_data if dx is not None else 0.0, a_param, b_param),
    )


def _runs(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, row behind the last, count) of neighbouring rows with the same count; none of 0."""
    runs: list[tuple[int, int, int]] = []
    for row, count in enumerate(counts):
        if count and runs and runs[-1][1:] == (row, count):
            runs[-1] = (runs[-1][0], row + 1, count)
        elif count:
            runs.append((row, row + 1, count))
    return runs


_RECIPES: dict[str, Callable[..., None]] = {}
_NAMES: dict[str, tuple[tuple[str, ...], tuple[str | None, ...]]] = {}
"""Of each operation: the names of its arguments, and of those that are arrays."""


def _recipe(arrays: str, *, also: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a recipe under its own name and `also`; `arrays` says which of its arguments are arrays."""
    declared = set(arrays.split())

    def register(recipe: Callable[..., None]) -> Callable[..., None]:
        names = tuple(inspect.signature(recipe).parameters)[1:]  # the first is the program
        if not declared <= set(names):
            raise TypeError(f"{recipe.__name__} has no argument {', '.join(sorted(declared - set(names)))}")
        for operation in (recipe.__name__.removeprefix("_do_"), *also.split()):
            _RECIPES[operation] = recipe
            _NAMES[operation] = names, tuple([name if name in declared else None for name in names])
        return recipe

    return register


@_recipe("x mean variance inv_variance")
def _do_stats(p: Program, x: Any, mean: Any, variance: Any, inv_variance: Any, epsilon: float, axis: Axis) -> None:
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    epsilon = _arguments.epsilon(epsilon)
    if mean is None and variance is None and inv_variance is None:
        raise ArgumentError("mean", None, "an array, or one for variance or inv_variance")
    saved = p.result("mean", mean, shape), p.result("inv_variance", inv_variance, shape)
    target = None if variance is None else p.result("variance", variance, shape)
    running = None
    if target is not None and shape.m > 1:
        running = p.filled(0.0, shape), p.filled(0.0, shape)
    ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)
    p.training(shape.kept, xb, ones, zeros, None, epsilon=epsilon, factor=1.0, running=running, saved=saved)
    if running is not None:
        p.axpby((shape.m - 1) / shape.m, running[1], 0.0, _need(target))
    elif target is not None:
        p.product(saved[0], zeros, target)  # 0, and NaN where the one element is not finite


@_recipe("x scale bias y running_mean running_variance saved_mean saved_inv_variance")
def _do_forward_training(
    p: Program,
    x: Any,
    scale: Any,
    bias: Any,
    y: Any,
    alpha: float,
    beta: float,
    epsilon: float,
    exponential_average_factor: float,
    running_mean: Any,
    running_variance: Any,
    saved_mean: Any,
    saved_inv_variance: Any,
    axis: Axis,
) -> None:
    xb = p.data("x", x)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    epsilon = _arguments.epsilon(epsilon)
    factor = _arguments.factor(exponential_average_factor)
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    has_saved = _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance)
    if has_running and shape.m == 1:
        raise ArgumentError(
            "x",
            f"dims {xb.dims} with axis {axis}",
            "at least two elements per statistic when running statistics are updated",
        )
    running = saved = None
    if has_running:
        running = (
            p.result("running_mean", running_mean, shape, prior=True),
            p.result("running_variance", running_variance, shape, prior=True),
        )
    if has_saved:
        saved = (
            p.result("saved_mean", saved_mean, shape),
            p.result("saved_inv_variance", saved_inv_variance, shape),
        )
    gain, offset = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
    p.training(
        shape.kept, xb, gain, offset, yb,
        alpha=alpha, beta=beta, epsilon=epsilon, factor=factor, running=running, saved=saved,
    )  # fmt: skip


@_recipe("x scale bias mean variance y")
def _do_forward_inference(
    p: Program,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    y: Any,
    alpha: float,
    beta: float,
    epsilon: float,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    epsilon = _arguments.epsilon(epsilon)
    gain, offset = p.parameter("scale", scale, shape, 1.0), p.parameter("bias", bias, shape, 0.0)
    centre, spread = p.parameter("mean", mean, shape), p.parameter("variance", variance, shape)
    p.inference(shape.kept, xb, gain, offset, centre, spread, yb, alpha=alpha, beta=beta, epsilon=epsilon)


@_recipe("x scale bias mean inv_variance y", also="elemt")
def _do_forward_inference_inv_variance(
    p: Program,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    inv_variance: Any,
    y: Any,
    alpha: float,
    beta: float,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    yb = p.data("y", y, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    gain = p.parameter("inv_variance", inv_variance, shape)
    if scale is not None:
        gain = p.product(p.parameter("scale", scale, shape), gain)
    offset, centre = p.parameter("bias", bias, shape, 0.0), p.parameter("mean", mean, shape)
    p.inference(shape.kept, xb, gain, offset, centre, p.constant(1.0, shape), yb, alpha=alpha, beta=beta)


@_recipe("x dy scale dx dscale dbias saved_mean saved_inv_variance")
def _do_backward(
    p: Program,
    x: Any,
    dy: Any,
    scale: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    axis: Axis,
) -> None:
    g = _gradients(p, x, dy, dx, dscale, dbias, alpha_data, beta_data, alpha_param, beta_param, axis)
    epsilon = _arguments.epsilon(epsilon)
    saved = None
    if _arguments.pair("saved_mean", saved_mean, "saved_inv_variance", saved_inv_variance):
        saved = (
            p.parameter("saved_mean", saved_mean, g.shape),
            p.parameter("saved_inv_variance", saved_inv_variance, g.shape),
        )
    gain = p.parameter("scale", scale, g.shape, 1.0)
    p.gradient(g.shape.kept, g.x, g.dy, gain, g.dx, g.dscale, g.dbias, *g.factors, epsilon=epsilon, saved=saved)


@_recipe("x dy mean variance scale dx dscale dbias")
def _do_backward_frozen(
    p: Program,
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    epsilon: float,
    axis: Axis,
) -> None:
    g = _gradients(p, x, dy, dx, dscale, dbias, alpha_data, beta_data, alpha_param, beta_param, axis)
    epsilon = _arguments.epsilon(epsilon)
    centre, spread = p.parameter("mean", mean, g.shape), p.parameter("variance", variance, g.shape)
    gain = p.parameter("scale", scale, g.shape, 1.0)
    zeros = p.constant(0.0, g.shape)
    if g.dx is not None:
        alpha, beta, *_ = g.factors
        p.inference(g.shape.kept, g.dy, gain, zeros, zeros, spread, g.dx, alpha=alpha, beta=beta, epsilon=epsilon)
    if dscale is not None or dbias is not None:
        saved = centre, p.inverse(spread, epsilon)
        ones = p.constant(1.0, g.shape)
        p.gradient(
            g.shape.kept, g.x, g.dy, ones, None, g.dscale, g.dbias, 1.0, 0.0, *g.factors[2:], epsilon=0.0, saved=saved
        )


@_recipe("x dy mean variance scale dx dscale dbias")
def _do_training_grad(
    p: Program,
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    scale: Any,
    dx: Any,
    dscale: Any,
    dbias: Any,
    alpha_data: float,
    beta_data: float,
    alpha_param: float,
    beta_param: float,
    epsilon: float,
    axis: Axis,
) -> None:
    g = _gradients(p, x, dy, dx, dscale, dbias, alpha_data, beta_data, alpha_param, beta_param, axis)
    epsilon = _arguments.epsilon(epsilon)
    saved = (
        p.parameter("mean", mean, g.shape),
        p.inverse(p.parameter("variance", variance, g.shape), epsilon),
    )
    gain = p.parameter("scale", scale, g.shape, 1.0)
    p.gradient(g.shape.kept, g.x, g.dy, gain, g.dx, g.dscale, g.dbias, *g.factors, epsilon=0.0, saved=saved)


@_recipe("dy x mean inv_variance sum_dy sum_dy_xmu dscale dbias")
def _do_backward_reduce(
    p: Program,
    dy: Any,
    x: Any,
    mean: Any,
    inv_variance: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    dscale: Any,
    dbias: Any,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb, empty=True)
    centre = p.parameter("mean", mean, shape)
    inv = None
    if dscale is not None or inv_variance is not None:
        inv = p.parameter("inv_variance", inv_variance, shape)
    named = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "dscale": dscale, "dbias": dbias}
    wanted = {name: p.result(name, array, shape) for name, array in named.items() if array is not None}
    if shape.m == 0:
        for target in wanted.values():
            p.fill(0.0, target)
        return
    if not wanted:
        return
    totals = [wanted[name] for name in ("sum_dy", "dbias") if name in wanted]
    total = totals[0] if totals else p.vector(shape)
    moment = wanted.get("sum_dy_xmu") or p.vector(shape)
    ones = p.constant(1.0, shape)
    p.gradient(shape.kept, xb, dyb, ones, None, moment, total, saved=(centre, ones))
    if "dscale" in wanted:
        p.product(moment, _need(inv), wanted["dscale"])
    for other in totals[1:]:
        p.axpby(1.0, total, 0.0, other)


@_recipe("means m2s variances mean variance inv_variance running_mean running_variance")
def _do_gather_stats(
    p: Program,
    means: Any,
    m2s: Any,
    counts: Sequence[int],
    variances: Any,
    mean: Any,
    variance: Any,
    inv_variance: Any,
    running_mean: Any,
    running_variance: Any,
    exponential_average_factor: float,
    epsilon: float,
) -> None:
    rows = p.data("means", means)
    if len(rows.dims) != 2:
        raise ArgumentError("means", f"dims {rows.dims}", "two axes: ranks and statistics")
    if rows.dtype not in (DataType.FLOAT32, DataType.FLOAT64):
        raise ArgumentTypeError("means", f"dtype {rows.dtype.short}", "f32 or f64")
    if (m2s is None) == (variances is None):
        given = "None" if m2s is None else "an array beside variances"
        raise ArgumentError("m2s", given, "one of m2s and variances")
    squares = p.data(*(("m2s", m2s) if variances is None else ("variances", variances)), rows, "means")
    numbers = _arguments.counts(counts, rows.dims[0])
    n = sum(numbers)
    factor, epsilon = _arguments.factor(exponential_average_factor), _arguments.epsilon(epsilon)
    shape = _Shape(rows, 1)
    has_running = _arguments.pair("running_mean", running_mean, "running_variance", running_variance)
    if has_running and n == 1:
        raise ArgumentError("counts", numbers, "a sum above 1 when running statistics are updated")
    if not has_running and mean is None and variance is None and inv_variance is None:
        raise ArgumentError("mean", None, "an array, or one for variance, inv_variance or the running statistics")
    centre, spread = p.result("mean", mean, shape), p.result("variance", variance, shape)
    inverse = None if inv_variance is None else p.result("inv_variance", inv_variance, shape)
    running = None
    if has_running:
        running = [
            p.result("running_mean", running_mean, shape, prior=factor != 1.0),
            p.result("running_variance", running_variance, shape, prior=factor != 1.0),
        ]

    runs = _runs(numbers)
    length = sum(stop - start for start, stop, _ in runs)
    within = [1.0 / n if variances is None else count / n for _, _, count in runs]
    if length == 1:
        (start, _, _), single = runs[0], within[0]
        p.axpby(1.0, _row(rows, start), 0.0, centre)
        p.axpby(single, _row(squares, start), 0.0, spread)
    else:
        places = [0, *itertools.accumulate(stop - start for start, stop, _ in runs)][:-1]
        ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)

        def weighted(source: Buffer, factors: Sequence[float], gap: bool) -> Buffer:
            """Rows of ranks that have elements, each times its factor; `gap`: the other rows are there too."""
            target = p.scratch((length, rows.dims[1]), rows.dtype)
            for (start, stop, _), place, weight in zip(runs, places, factors, strict=True):
                after = place + stop - start
                taken = _rows(source, start, stop) if gap else _rows(source, place, after)
                p.axpby(weight, taken, 0.0, _rows(target, place, after))
            return target

        shares = [count / n for _, _, count in runs]
        present = rows if length == rows.dims[0] else weighted(rows, [1.0] * len(runs), True)
        shared, unused = weighted(rows, shares, True), p.vector(shape)
        p.gradient((1,), shared, shared, ones, None, unused, centre, saved=(zeros, ones))
        apart = p.scratch(present.dims, rows.dtype)
        p.inference((1,), present, ones, zeros, centre, ones, apart)
        between = weighted(apart, shares, False)
        p.gradient((1,), present, between, ones, None, spread, unused, saved=(centre, ones))
        inside, total = weighted(squares, within, True), p.vector(shape)
        p.gradient((1,), inside, inside, ones, None, unused, total, saved=(zeros, ones))
        p.axpby(1.0, total, 1.0, spread)
    if inverse is not None:
        p.inverse(spread, epsilon, inverse)
    if running is not None:
        p.axpby(factor, centre, 1.0 - factor, running[0])
        p.axpby(factor * (n / (n - 1)), spread, 1.0 - factor, running[1])


@_recipe("dy x mean inv_variance scale sum_dy sum_dy_xmu dx")
def _do_backward_elemt(
    p: Program,
    dy: Any,
    x: Any,
    mean: Any,
    inv_variance: Any,
    scale: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    count: int,
    dx: Any,
    alpha: float,
    beta: float,
    axis: Axis,
) -> None:
    xb = p.data("x", x, empty=True)
    shape = _Shape(xb, axis)
    dyb = p.data("dy", dy, xb, empty=True)
    dxb = p.data("dx", dx, xb, output=True, empty=True)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    n = _arguments.count(count, "count", 1)
    centre, inv = p.parameter("mean", mean, shape), p.parameter("inv_variance", inv_variance, shape)
    gain = inv if scale is None else p.product(p.parameter("scale", scale, shape), inv)
    average = p.vector(shape)
    p.axpby(1.0 / n, p.parameter("sum_dy", sum_dy, shape), 0.0, average)
    slope = p.product(p.product(p.parameter("sum_dy_xmu", sum_dy_xmu, shape), inv), inv)
    slope = p.product(slope, gain, alpha=-1.0 / n)
    ones, zeros = p.constant(1.0, shape), p.constant(0.0, shape)
    p.inference(shape.kept, dyb, gain, zeros, average, ones, dxb, alpha=alpha, beta=beta)
    p.inference(shape.kept, xb, slope, zeros, centre, ones, dxb, alpha=alpha, beta=1.0)


def _vectors(p: Program, first: str, array: Any) -> _Shape:
    """The shape that the first of several vectors sets for all."""
    buffer = p.handle.buffer(array, first)
    return _Shape(buffer, tuple(range(len(buffer.dims))))


@_recipe("a b out")
def _do_multiply(p: Program, a: Any, b: Any, out: Any, alpha: float, beta: float) -> None:
    shape = _vectors(p, "a", a)
    alpha, beta = p.scalars(shape, alpha=alpha, beta=beta)
    left, right = p.parameter("a", a, shape), p.parameter("b", b, shape)
    p.product(left, right, p.result("out", out, shape, prior=beta != 0), alpha=alpha, beta=beta)


@_recipe("variance inv_variance")
def _do_inverse_deviation(p: Program, variance: Any, inv_variance: Any, epsilon: float) -> None:
    shape = _vectors(p, "variance", variance)
    spread = p.parameter("variance", variance, shape)
    p.inverse(spread, _arguments.epsilon(epsilon), p.result("inv_variance", inv_variance, shape))


@_recipe("inv_variance variance")
def _do_variance_from_inverse(p: Program, inv_variance: Any, variance: Any, epsilon: float) -> None:
    shape = _vectors(p, "inv_variance", inv_variance)
    inv, target = p.parameter("inv_variance", inv_variance, shape), p.result("variance", variance, shape)
    deviation = p.inverse(p.product(inv, inv), 0.0)
    zeros, ones = p.constant(0.0, shape), p.constant(1.0, shape)
    shift = p.constant(-_arguments.epsilon(epsilon), shape)
    p.inference((0,), deviation, deviation, shift, zeros, ones, target)


@_recipe("source target")
def _do_convert(p: Program, source: Any, target: Any) -> None:
    shape = _vectors(p, "source", source)
    value, result = p.flat("source", source, shape.derived), p.flat("target", target, shape.derived, True)
    _parameter_dtype("target", result.dtype, shape.dtype)
    if value.dtype == result.dtype:
        p.axpby(1.0, value, 0.0, result)
    elif result.dtype == shape.dtype:
        p.widen(value, result)
    else:
        p.narrow(value if value.dtype == shape.dtype else p.widen(value), result)


@_recipe("x y")
def _do_axpby(p: Program, a: float, x: Any, b: float, y: Any) -> None:
    xb = p.data("x", x)
    yb = p.data("y", y, xb, output=True)
    a, b = _arguments.axpby(a, b, xb, yb)
    p.axpby(a, xb, b, yb)


@_recipe("y")
def _do_fill(p: Program, value: float, y: Any) -> None:
    yb = p.data("y", y, output=True)
    p.fill(_arguments.fill(value, yb), yb)


@_recipe("x y")
def _do_relu(p: Program, x: Any, y: Any) -> None:
    xb = p.data("x", x)
    p.relu(xb, p.data("y", y, xb, output=True))


@_recipe("x dy dx")
def _do_relu_backward(p: Program, x: Any, dy: Any, dx: Any) -> None:
    xb = p.data("x", x)
    p.relu_backward(xb, p.data("dy", dy, xb), p.data("dx", dx, xb, output=True))
