"""Finds the convention that anybody's arrays follow: `pybnorm.check.which_convention`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pybnorm import _arguments, _files
from pybnorm._arrays import as_buffer, numpy_dtype
from pybnorm.check.judging.bounds import Expected, expect, judge
from pybnorm.check.judging.conventions import alike, convention_of, fitted
from pybnorm.check.judging.standalone import as_numpy
from pybnorm.check.language.data import Inputs, round_to
from pybnorm.check.language.problem import Problem
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.reference.namespaces import Array
from pybnorm.reference.rounding import _data_type

RESULTS = {
    "y": "y",
    "dx": "dx",
    "dscale": "dscale",
    "dbias": "dbias",
    "saved_mean": "saved_mean",
    "saved_inv_variance": "saved_inv_variance",
    "new_running_mean": "running_mean",
    "new_running_variance": "running_variance",
}
"""Arguments that are results, and the outputs of a case that they are."""
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
    call = _Call({n: _numpy(n, a) for n, a in given.items() if a is not None}, axis)
    results = [n for n in RESULTS if n in call.arrays]
    if not results:
        raise ArgumentError("results", "none", " | ".join(RESULTS))
    backward = [n for n in results if n in ("dx", "dscale", "dbias")]
    forward = [n for n in results if n not in backward]
    if not training and forward not in ([], ["y"]):
        raise ArgumentError("training", False, f"True with {' and '.join(n for n in forward if n != 'y')}")
    operation = Operation.FORWARD_TRAINING if training else Operation.FORWARD_INFERENCE
    found = call.fits(operation, forward, epsilon, factor) if forward else []
    return found + (call.fits(Operation.BACKWARD, backward, epsilon, factor) if backward else [])


class _Call:
    """Arrays with the channels on axis 1."""

    def __init__(self, arrays: Mapping[str, Array], axis: int) -> None:
        x = arrays["x"]
        if x.ndim < 2:
            raise ArgumentError("x", f"rank {x.ndim}", "rank 2 at least: images and channels")
        axis = _arguments.integer(axis, "axis", low=-x.ndim, high=x.ndim - 1) % x.ndim
        self.dims = np.moveaxis(x, axis, 1).shape
        self.parameter_dims = (1, self.dims[1], *(1,) * (len(self.dims) - 2))
        self.dtype = _data_type(x, "x")
        self.kind = np.float64 if self.dtype == DataType.FLOAT64 else np.float32
        self.arrays: dict[str, Array] = {}
        for name, array in arrays.items():
            if name in ("x", "y", "dy", "dx"):
                if array.shape != x.shape:
                    raise ArgumentError(name, f"shape {array.shape}", f"that of x, {x.shape}")
                self.arrays[name] = round_to(np.moveaxis(array, axis, 1).astype(np.float64), self.dtype)
            elif array.size != self.dims[1]:
                raise ArgumentError(name, f"shape {array.shape}", f"{self.dims[1]} elements, one for each channel")
            else:
                self.arrays[name] = array.reshape(self.parameter_dims).astype(self.kind)

    def fits(self, operation: Operation, results: list[str], epsilon: float, factor: float) -> list[Fit]:
        """The convention of each result of one operation."""
        backward, arrays = operation == Operation.BACKWARD, self.arrays

        def vector(name: str, default: float) -> Array:
            return arrays.get(name, np.full(self.parameter_dims, default, self.kind))

        statistics = ("running_mean", "running_variance")
        needed = ["dy"] if backward else [n for n in statistics if f"new_{n}" in results]
        if operation == Operation.FORWARD_INFERENCE:
            needed = [*statistics]
        if missing := [n for n in needed if n not in arrays]:
            raise ArgumentError(missing[0], None, f"an array: {' and '.join(results)} follow from it")
        running = any(n in arrays for n in statistics)
        problem = Problem(operation, Mode.SPATIAL, self.dtype, self.dims, fill="randn", eps=epsilon)
        if operation == Operation.FORWARD_TRAINING:
            problem = dataclasses.replace(problem, factor=factor, running=running)
        elif backward:
            problem = dataclasses.replace(problem, saved=False)
        none = np.full(self.dims, np.nan, numpy_dtype(self.dtype))
        inputs = Inputs(arrays["x"], vector("scale", 1.0), bias=vector("bias", 0.0), prior=none)
        if backward:
            inputs.dy = arrays["dy"]
            inputs.prior_scale = inputs.prior_bias = np.full(self.parameter_dims, np.nan, self.kind)
        elif running:
            inputs.mean, inputs.variance = vector("running_mean", 0.0), vector("running_variance", 1.0)
        expected = expect(problem, inputs)
        return [_fit(expected, name, RESULTS[name], arrays[name]) for name in results]


def _fit(expected: Expected, name: str, output: str, got: Array) -> Fit:
    verdict = judge(expected, output, got)
    if verdict.status.correct:
        return Fit(name, "as defined", verdict.ratio, tuple(alike(expected, output, got)))
    found = convention_of(expected, output, got)
    if found is not None:
        return Fit(name, str(found), verdict.ratio)
    return Fit(name, "", verdict.ratio, hint=fitted(expected, output, got))


def _numpy(name: str, value: Any) -> Array:
    array = as_numpy(name, value)
    as_buffer(array, name)  # refuses what are no floating-point numbers
    return array


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
