"""Inputs of a problem: a function of its line and of nothing else.

The generator is counter-based (SplitMix64 over the element's logical index), so a value depends neither on the layout,
nor on how many values were drawn before, nor on the machine or the NumPy version: it is made of 64-bit integer
operations and of IEEE additions, multiplications, divisions and square roots, never of a libm function.

Data arrays are made in chunks of `CHUNK` elements, straight into their stored dtype; a few MiB beside the arrays
themselves whatever the size. Only the exact fill needs more: the order of one statistic's elements is a sort of its m
keys, about 40 m bytes. `pybnorm.check.language.fills` says what each fill is for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pybnorm import _arguments, _files, _words
from pybnorm._arrays import numpy_dtype
from pybnorm.check.language import activations, calls
from pybnorm.check.language.fills import GUARD, KINDS, Chunk, Kind, exact_means, paired_size, reach, round_to
from pybnorm.check.language.generator import uniform
from pybnorm.check.language.problem import FILE, Problem, checked, vector_dtype
from pybnorm.enums import DataType, Operation
from pybnorm.errors import ArgumentError
from pybnorm.reference.namespaces import Array, Namespace

__all__ = ["Inputs", "generate", "names", "numpy_dtype", "read", "round_to", "sums_are_exact"]


_ACTIVATED = np.array([0.25, -0.25, 0.125])
_SHARES = np.array([0.5, -0.25, 0.75])


@dataclasses.dataclass
class Inputs:
    """The inputs of a call, as stored, in logical N, C, spatial order; ``None`` where the operation has no such array.

    ``mean`` and ``variance`` are the estimated statistics of inference and the running statistics before training;
    ``prior`` is y or dx before the call. Where beta is 0 a prior is all NaN, because it must not be read.
    """

    x: Array
    scale: Array
    bias: Array | None = None
    dy: Array | None = None
    mean: Array | None = None
    variance: Array | None = None
    saved_mean: Array | None = None
    saved_inv_variance: Array | None = None
    prior: Array | None = None
    prior_scale: Array | None = None
    prior_bias: Array | None = None
    z: Array | None = None
    """Residual, added before the activation."""
    y: Array | None = None
    """Forward's result, which backward masks dy by."""
    sum_dy: Array | None = None
    """Of all ranks, as is the next."""
    sum_dy_xmu: Array | None = None
    m2s: Array | None = None
    """Sums of squared deviations of each rank, whose means are x."""

    def need(self, name: str) -> Array:
        """The array of that field, which the operation is known to have."""
        value: Array | None = getattr(self, name)
        assert value is not None, name
        return value

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by field name."""
        items = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in items if value is not None}


def sums_are_exact(problem: Problem) -> bool:
    """Say whether every sum of `problem` is free of rounding in the compute type, whatever the order.

    Sums of squares of the largest value must stay below 2**24 (float32) squares of its unit, which is 1/2 for exact
    and `paired_unit`'s for paired. Epsilon must be the fill's own, else the normalized values of exact are not short.
    """
    if problem.composed == "gather_stats" or (problem.composed == "sync_train" and problem.fill != "exact"):
        return False  # statistics of parts, which are not short numbers, are merged with weights
    if problem.fill not in ("exact", "paired") or problem.epsilon != problem.default_epsilon:
        return False
    digits = 53 if problem.dtype == DataType.FLOAT64 else 24
    largest = 2 * (float(np.abs(exact_means(problem)).max()) + reach(problem))
    largest = paired_size(problem) if problem.fill == "paired" else largest
    return problem.m * largest**2 < 2.0**digits


def generate(problem: Problem, judge: Namespace | None = None) -> Inputs:
    """The inputs of `problem`.

    Parameters
    ----------
    problem : Problem
    judge : Namespace, optional
        Makes data, to the same bits, as arrays of another namespace (`pybnorm.check.run.judge_devices`); the rest is
        NumPy's.

    Returns
    -------
    Inputs
        Data in the problem's dtype and dims, parameters and statistics in `vector_dtype` and ``parameter_dims``.
    """
    checked(problem)
    _arguments.instance(
        judge, (Namespace, type(None)), "judge", "a Namespace of pybnorm.check.run.judge_devices.chosen, or None"
    )
    if problem.fill == FILE:
        inputs = read(problem)
        data = {n: a for n, a in inputs.arrays().items() if n in ("x", "dy", "prior", "y", "z", "m2s")}
        return dataclasses.replace(inputs, **{n: judge.of(a) for n, a in data.items()}) if judge else inputs
    fill = KINDS[problem.fill](problem)
    fill.judge = judge
    values: dict[str, Array] = {"scale": fill.scale()}
    operation = problem.operation
    if problem.activation:
        share = 0.125 if operation == Operation.FORWARD_INFERENCE else 1.0  # its variance may be large
        values["bias"] = values["scale"] * fill.cycle(_ACTIVATED) * share
    elif operation != Operation.BACKWARD:
        values["bias"] = fill.bias()
    if problem.inverse:
        values["saved_mean"], values["saved_inv_variance"] = fill.saved()
    elif operation == Operation.FORWARD_INFERENCE or (operation == Operation.FORWARD_TRAINING and problem.running):
        values["mean"], values["variance"] = fill.estimates()
        if problem.activation and operation == Operation.FORWARD_INFERENCE:
            values["mean"] = fill.saved()[0]
    if operation == Operation.BACKWARD:
        if problem.takes_variance:
            values["mean"], values["variance"] = fill.estimates()
        elif problem.saved:
            values["saved_mean"], values["saved_inv_variance"] = fill.saved()
    _alter(problem, values, fill)
    for name in ("prior_scale", "prior_bias") if operation == Operation.BACKWARD else ():
        chunk = Chunk(problem, name, 0, fill.channels)
        drawn = fill.prior(chunk) if problem.beta_param else np.full(fill.channels, np.nan)
        values[name] = drawn.reshape(problem.parameter_dims)
    stored = {name: round_to(v, vector_dtype(problem, name)) for name, v in values.items()}
    stored["x"] = fill.data("x")
    if operation == Operation.BACKWARD:
        stored["dy"] = fill.data("dy")
    nothing = np.array(np.nan, numpy_dtype(problem.dtype))
    stored["prior"] = fill.data("prior") if problem.beta else np.broadcast_to(nothing, problem.dims)
    if problem.composed == "gather_stats":
        _make_ranks(problem, stored, fill)
    if problem.residual and operation != Operation.BACKWARD:
        stored["z"] = fill.data("z")
    if problem.masked and operation == Operation.BACKWARD:
        saved = (stored["saved_mean"], stored["saved_inv_variance"]) if problem.saved else None
        stored["y"] = fill.data("z") if problem.residual else fill.empty()
        given = stored["x"], stored["scale"], stored["bias"], saved, stored["y"]
        activations.store(problem, *given, lambda values: round_to(values, problem.dtype))
    return Inputs(**stored)


def _alter(problem: Problem, values: dict[str, Array], fill: Kind) -> None:
    """Apply the options scale, sign and old to the parameters, and add what a composed operation is given beside."""
    every_second = fill.every_second()
    if problem.composed == "backward_elemt":
        values["sum_dy"] = fill.cycle(_SHARES) * problem.count  # of all ranks, unlike those of x and dy
        with np.errstate(divide="ignore"):
            values["sum_dy_xmu"] = fill.cycle(np.roll(_SHARES, 1)) / values["saved_inv_variance"] * problem.count
    if problem.scale == "zero":
        values["scale"] = np.where(every_second, 0.0, values["scale"])
    if problem.scale == "small":
        factor = np.where(every_second, fill.cycle(np.array([1e-7, 1e-30]), step=2), 1.0)
        values |= {name: values[name] * factor for name in ("scale", "bias") if name in values}
    if problem.sign == "negative":
        values["saved_inv_variance"] = np.where(every_second, -1.0, 1.0) * values["saved_inv_variance"]
    if problem.old == "nan":
        values |= dict.fromkeys(("mean", "variance"), np.full(problem.parameter_dims, np.nan))


def _make_ranks(problem: Problem, stored: dict[str, Array], fill: Kind) -> None:
    """Sums of squared deviations beside x, the ranks' means; NaN of a rank that has no elements."""
    counts = np.array(problem.counts, np.float64).reshape(-1, 1)
    drawn = uniform(fill.words("m2s", math.prod(problem.dims))).reshape(problem.dims)
    squares = counts * fill.estimates()[1] * (0.5 + drawn)
    stored["m2s"] = round_to(np.where(counts == 0, np.nan, squares), problem.dtype)
    stored["x"] = round_to(np.where(counts == 0, np.nan, stored["x"].astype(np.float64)), problem.dtype)


def surrounded(values: Array, steps: tuple[int, ...]) -> Array | None:
    """A large array that `generate` made, with its room for guards, as bytes; None if it has none or other `steps`."""
    owner = values.base
    if type(owner) is not np.ndarray or values.strides != steps or not values.flags.c_contiguous:
        return None
    if owner.dtype != np.uint8 or owner.ndim != 1 or owner.size != values.nbytes + 2 * GUARD + _arguments.ALIGNMENT:
        return None
    start = values.ctypes.data - owner.ctypes.data - GUARD
    return owner[start : start + values.nbytes + 2 * GUARD] if 0 <= start <= _arguments.ALIGNMENT else None


# ---------------------------------------------------------------- a file's


def names(problem: Problem) -> dict[str, tuple[str, tuple[int, ...], DataType, bool]]:
    """List what an archive for `problem` may hold: name to field, shape, dtype, and whether it must be there."""
    betas = {"prior": problem.beta, "prior_scale": problem.beta_param, "prior_bias": problem.beta_param}

    def name(tensor: calls.Tensor) -> str:
        """The argument; of inference from the inverse standard deviation the field, as no argument has that name."""
        is_inverse = problem.inverse and not problem.composed and tensor.values.startswith("saved")
        return tensor.values if is_inverse else tensor.name

    return {
        name(t): (t.values, *calls.kind(problem, t), bool(betas.get(t.values, True)))
        for t in calls.tensors(problem)
        if t.values
    }


def read(problem: Problem) -> Inputs:
    """The inputs of `problem` from its file: a NumPy archive (``numpy.savez``).

    Names are those of the call's arguments: ``x``, ``scale``, ``bias``; ``dy``, ``saved_mean``, ``saved_inv_variance``
    of backward; ``running_mean``, ``running_variance``; ``y``, ``dx``, ``dscale``, ``dbias`` for what is there before
    the call, where beta is not 0. Numbers of any type are rounded to the problem's, once; bfloat16 may also be
    uint16 bits. Data have the dims of the line; parameters as many elements as there are statistics, in any shape.

    Raises
    ------
    ArgumentError
        The file cannot be read, or an array is missing, unknown or of another shape or type.
    """
    allowed = names(problem)
    with _files.archive("data", problem.data, "a NumPy archive (numpy.savez) that can be read") as archive:
        _check_names(problem, allowed, archive.members)
        stored = {}
        for name, (field, dims, dtype, _) in allowed.items():
            if name in archive.members:
                values = archive.array(name, functools.partial(_check_array, name, dims, dtype))
                stored[field] = _as_stored(values, dims, dtype)
            else:
                stored[field] = np.full(dims, np.nan, numpy_dtype(dtype))
    stored.setdefault("scale", round_to(np.ones(problem.parameter_dims), problem.parameter_dtype))
    return Inputs(**stored)


def _check_names(problem: Problem, allowed: dict[str, Any], members: Collection[str]) -> None:
    """Raise where a file has not the arrays of the problem's call."""
    unknown = [name for name in members if name not in allowed]
    missing = [name for name, (_, _, _, needed) in allowed.items() if needed and name not in members]
    if unknown or missing:
        what = f"without {', '.join(missing)}" if missing else f"with {', '.join(unknown)}"
        needed = ", ".join(f"{n}{'' if must else ' (or not)'}" for n, (_, _, _, must) in allowed.items())
        known = [(word, name) for word in unknown for name in _words.ARGUMENTS.get(word.lower(), ()) if name in missing]
        hints = [f"what is {word} there is {name} here" for word, name in known]
        left = [name for name in missing if name not in dict(known).values()]
        for option, second in (("running", "variance"), ("saved", "inv_variance")):
            pair = f"{option}_mean", f"{option}_{second}"
            if set(pair) <= set(left) and option in problem.options:
                hints.append(f"{option}=0 in the case is without {' and '.join(pair)}")
        hint = f" ({'; '.join(hints)})" if hints else ""
        raise ArgumentError("data", f"{problem.data} {what}", f"an archive with {needed} for {problem.word}{hint}")


def _check_array(name: str, dims: tuple[int, ...], dtype: DataType, kind: np.dtype[Any], shape: Sequence[int]) -> None:
    """Raise where an array of a file is another than the line says, before it is unpacked."""
    if shape != dims if name in ("x", "dy", "y", "dx") else math.prod(shape) != math.prod(dims):
        text = "x".join(map(str, shape)) or "a number"
        raise ArgumentError(f"data: {name}", text, f"{'x'.join(map(str, dims))}, as the line says")
    if kind.kind not in "fiub" and not _are_bits(kind, dtype):
        kinds = "real numbers, or bfloat16 as uint16 bits" if dtype == DataType.BFLOAT16 else "real numbers"
        raise ArgumentError(f"data: {name}", kind, kinds)


def _are_bits(kind: np.dtype[Any], dtype: DataType) -> bool:
    return dtype == DataType.BFLOAT16 and kind.itemsize == 2 and kind.kind in "uV"


def _as_stored(values: Array, dims: tuple[int, ...], dtype: DataType) -> Array:
    values = values.reshape(dims)
    if _are_bits(values.dtype, dtype):
        return np.ascontiguousarray(values).view(numpy_dtype(dtype))
    return round_to(values.astype(np.float64), dtype)
