"""Finds the convention that anybody's arrays follow: `pybnorm.check.which_convention`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pybnorm import _arguments, _files
from pybnorm._arrays import as_buffer
from pybnorm.check.judging.bounds import expect, judge
from pybnorm.check.judging.conventions import alike, convention_of, fitted
from pybnorm.check.judging.standalone import as_numpy
from pybnorm.check.language.data import Inputs, round_to
from pybnorm.check.language.problem import Problem
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.reference.namespaces import Array
from pybnorm.reference.rounding import _data_type

RESULTS = ("y", "dx", "dscale", "dbias", "saved_mean", "saved_inv_variance", "new_running_mean", "new_running_variance")
"""Arguments that are results; without "new_" the outputs of a case that they are."""
ARRAYS = ("x", "scale", "bias", "dy", "running_mean", "running_variance", *RESULTS)
NUMBERS = ("epsilon", "factor", "axis", "training")


@dataclasses.dataclass(frozen=True)
class Fit:
    """The convention that one result follows.

    Examples
    --------
    >>> x = np.float32([[-1], [1]])
    >>> [fit] = pybnorm.check.which_convention(x, y=x, epsilon=0)
    >>> fit.output, fit.convention
    ('y', 'as defined')
    """

    output: str
    """Name of the argument."""
    convention: str
    """"as defined", or how it differs; empty if no convention fits."""
    ratio: float
    """Worst error / bound of the definition."""
    alike: tuple[str, ...] = ()
    """Conventions that these data do not tell from it."""
    hint: str = ""
    """The epsilon or factor that fits best, where no convention does."""

    def __str__(self) -> str:
        text = self.convention or f"no convention fits ({self.ratio:.3g} times the bound of the definition)"
        more = [f"not told from: {'; '.join(self.alike)}"] if self.alike else []
        return "; ".join([f"{self.output}: {text}", *more, *filter(None, [self.hint])])


def which_convention(
    x: Any,
    *,
    y: Any = None,
    scale: Any = None,
    bias: Any = None,
    dy: Any = None,
    dx: Any = None,
    dscale: Any = None,
    dbias: Any = None,
    running_mean: Any = None,
    running_variance: Any = None,
    new_running_mean: Any = None,
    new_running_variance: Any = None,
    saved_mean: Any = None,
    saved_inv_variance: Any = None,
    epsilon: float = 1e-5,
    factor: float = 0.1,
    axis: int = 1,
    training: bool = True,
) -> list[Fit]:
    """The conventions that the results of somebody's batch norm follow.

    Each result that is given is held against the definition, and where it differs against the conventions of other
    software. Nothing is run.

    Parameters
    ----------
    x : array
        NumPy, PyTorch, CuPy or JAX arrays, on any device, here and below.
    y, dx, dscale, dbias, saved_mean, saved_inv_variance, new_running_mean, new_running_variance : array, optional
        Results. What is saved may be the variance or its root as well: that is what is asked.
    scale, bias : array, optional
        1 and 0 where left out.
    dy : array, optional
        The gradient of y, of which dx, dscale and dbias are.
    running_mean, running_variance : array, optional
        Of before training, or what inference is given.
    epsilon, factor : float, optional
        What was asked for: new = factor * batch + (1 - factor) * old.
    axis : int, optional
        The axis of the channels.
    training : bool, optional
        False: y is of inference, by `running_mean` and `running_variance`.

    Returns
    -------
    list of Fit
        One for each result, in the order above.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no result, or an array is missing, of another shape, or none.

    Examples
    --------
    >>> x = np.random.default_rng(1).normal(1, 2, (8, 4, 5, 5)).astype(np.float32)
    >>> mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    >>> old = np.ones(4, np.float32)
    >>> fits = pybnorm.check.which_convention(
    ...     x, running_mean=old, new_running_mean=0.1 * old + 0.9 * mean, saved_mean=mean, saved_inv_variance=variance
    ... )
    >>> for fit in fits:
    ...     print(fit)
    saved_mean: as defined
    saved_inv_variance: the variance is saved, not the inverse standard deviation (oneDNN saves the variance; cuDNN, MIOpen and PyTorch the inverse standard deviation)
    new_running_mean: momentum is the other way round: running = factor * old + (1 - factor) * batch (Keras, TensorFlow, ONNX and flax: momentum = 1 - factor of PyTorch, cuDNN and MIOpen)
    """  # noqa: E501
    given = {name: value for name, value in locals().items() if name in ARRAYS}
    epsilon, factor = _arguments.scalar(epsilon, "epsilon"), _arguments.scalar(factor, "factor")
    training = _arguments.boolean(training, "training")
    if x is None:
        raise ArgumentTypeError("x", None, "an array")
    for name, array in given.items():
        if array is not None:
            given[name] = as_numpy(name, array)
            as_buffer(given[name], name)  # refuses what are no floating-point numbers
    arrays = _by_channel({n: a for n, a in given.items() if a is not None}, axis)
    results = [n for n in RESULTS if n in arrays]
    if not results:
        raise ArgumentError("results", "none", " | ".join(RESULTS))
    backward = [n for n in results if n in ("dx", "dscale", "dbias")]
    forward = [n for n in results if n not in backward]
    if not training and forward not in ([], ["y"]):
        raise ArgumentError("training", False, f"True with {' and '.join(n for n in forward if n != 'y')}")
    operation = Operation.FORWARD_TRAINING if training else Operation.FORWARD_INFERENCE
    found = [*_fits(arrays, operation, forward, epsilon, factor)] if forward else []
    return found + ([*_fits(arrays, Operation.BACKWARD, backward, epsilon, factor)] if backward else [])


def _by_channel(arrays: Mapping[str, Array], axis: int) -> dict[str, Array]:
    """Arrays with the channels on axis 1, those of x's shape rounded to its dtype."""
    x = arrays["x"]
    if x.ndim < 2:
        raise ArgumentError("x", f"rank {x.ndim}", "rank 2 at least: images and channels")
    axis = _arguments.integer(axis, "axis", low=-x.ndim, high=x.ndim - 1) % x.ndim
    dtype = _data_type(x, "x")
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        if name in ("x", "y", "dy", "dx"):
            if array.shape != x.shape:
                raise ArgumentError(name, f"shape {array.shape}", f"that of x, {x.shape}")
            found[name] = round_to(np.moveaxis(array, axis, 1).astype(np.float64), dtype)
        elif array.size != x.shape[axis]:
            raise ArgumentError(name, f"shape {array.shape}", f"{x.shape[axis]} elements, one for each channel")
        else:
            shape = (1, array.size, *(1,) * (x.ndim - 2))
            found[name] = array.reshape(shape).astype(np.float64 if dtype == DataType.FLOAT64 else np.float32)
    return found


def _fits(
    arrays: Mapping[str, Array], operation: Operation, results: list[str], epsilon: float, factor: float
) -> Iterator[Fit]:
    """The convention of each result of one operation."""
    backward, x = operation == Operation.BACKWARD, arrays["x"]
    vectors, dtype = (1, x.shape[1], *(1,) * (x.ndim - 2)), _data_type(x, "x")

    def vector(name: str, default: float) -> Array:
        return arrays.get(name, np.full(vectors, default, np.float64 if dtype == DataType.FLOAT64 else np.float32))

    statistics = ["running_mean", "running_variance"]
    needed = ["dy"] if backward else [n for n in statistics if f"new_{n}" in results]
    if operation == Operation.FORWARD_INFERENCE:
        needed = statistics
    if missing := [n for n in needed if n not in arrays]:
        raise ArgumentError(missing[0], None, f"an array: {' and '.join(results)} follow from it")
    running = any(n in arrays for n in statistics)
    problem = Problem(operation, Mode.SPATIAL, dtype, x.shape, fill="randn", eps=epsilon)
    inputs = Inputs(x, vector("scale", 1.0), bias=vector("bias", 0.0), prior=np.full_like(x, np.nan))
    if operation == Operation.FORWARD_TRAINING:
        problem = dataclasses.replace(problem, factor=factor, running=running)
    if backward:
        problem = dataclasses.replace(problem, saved=False)
        inputs.dy = arrays["dy"]
        inputs.prior_scale = inputs.prior_bias = vector("", np.nan)
    elif running:
        inputs.mean, inputs.variance = vector("running_mean", 0.0), vector("running_variance", 1.0)
    expected = expect(problem, inputs)
    for name in results:
        output, got = name.removeprefix("new_"), arrays[name]
        verdict = judge(expected, output, got)
        if verdict.status.correct:
            yield Fit(name, "as defined", verdict.ratio, tuple(alike(expected, output, got)))
        elif found := convention_of(expected, output, got):
            yield Fit(name, str(found), verdict.ratio)
        else:
            yield Fit(name, "", verdict.ratio, hint=fitted(expected, output, got))


def read_call(path: str) -> dict[str, Any]:
    """The arguments of `which_convention` that a NumPy archive (``numpy.savez``) has."""
    known = f"an archive with {', '.join((*ARRAYS, *NUMBERS))}, of which x is needed"
    with _files.archive("--data", path, known) as archive:
        wrong = [name for name in archive.members if name not in (*ARRAYS, *NUMBERS)]
        if wrong or "x" not in archive.members:
            raise ArgumentError("--data", f"{path} {f'with {wrong[0]}' if wrong else 'without x'}", known)

        def wanted(dtype: Any, shape: tuple[int, ...]) -> None:
            if math.prod(shape) * dtype.itemsize > 1 << 36:
                raise ValueError(f"an array has the shape {shape}")

        found: dict[str, Any] = {name: archive.array(name, wanted) for name in archive.members}
    for name in NUMBERS:
        if name in found:
            if found[name].size != 1:
                raise ArgumentError("--data", f"{path}, whose {name} has the shape {found[name].shape}", "a number")
            found[name] = found[name].item()
    if "training" in found:
        found["training"] = bool(found["training"])
    return found
