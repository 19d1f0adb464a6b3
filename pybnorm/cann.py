"""CANN's batch normalization by parts, ``aclnnBatchNorm...``, by its names, on every backend.

For synchronized batch normalization a rank computes `stats`, the ranks exchange them and `gather_stats_with_counts`
merges them, `elemt` normalizes; on the way back `reduce_backward` computes the sums, the ranks add them up, and
`elemt_backward` finishes. Each exists in two forms:

two phases, as in CANN
    ``size, executor = batch_norm_X_get_workspace_size(handle, ...)`` checks everything, touches no memory and returns
    the bytes of workspace and a single-use `Executor`, which holds the arrays; then
    ``batch_norm_X(workspace, workspace_size, executor, stream)`` computes.
one call
    ``X(handle, ..., workspace=None)``; None is enough on CPU backends.

Arguments are CANN's in snake_case, in CANN's order, after the handle. What all of them require, as CANN does: float32,
float16 or bfloat16; input and what has its shape of rank 2 to 8 with the channels on axis 1, at least one; vectors of
shape (C,), each of its own dtype. Any strides without overlap, of vectors too; the vectors are packed on the device.
What computes, and whose workspace is needed, is the operation of the same name in `pybnorm.operations`.

An error's text ends in the status that CANN gives for the same mistake: 161001, ``ACLNN_ERR_PARAM_NULLPTR``, or 161002,
``ACLNN_ERR_PARAM_INVALID``. Where CANN's pages, releases and chips disagree, the functions say what holds here.

Examples
--------
The two phases:

>>> x, (mean, invstd) = np.float32([[[1, 2, 3]]]), np.empty((2, 1), np.float32)
>>> with pybnorm.Handle("onednn") as handle:
...     nbytes, executor = pybnorm.cann.batch_norm_stats_get_workspace_size(handle, x, 0.0, mean, invstd)
...     pybnorm.cann.batch_norm_stats(pybnorm.devices.device_for(1).empty_bytes(nbytes), nbytes, executor)
>>> mean, invstd.round(3)
(array([2.], dtype=float32), array([1.225], dtype=float32))
"""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol

from pybnorm import _arguments
from pybnorm._arguments import ALIGNMENT
from pybnorm._arrays import Buffer
from pybnorm._core import Handle
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, WorkspaceError
from pybnorm.operations.preparation import Checked, Recipe, operation, perform, prepare
from pybnorm.operations.program import Program

__all__ = [
    "Executor", "batch_norm_elemt", "batch_norm_elemt_backward", "batch_norm_elemt_backward_get_workspace_size",
    "batch_norm_elemt_get_workspace_size", "batch_norm_gather_stats_with_counts",
    "batch_norm_gather_stats_with_counts_get_workspace_size", "batch_norm_reduce_backward",
    "batch_norm_reduce_backward_get_workspace_size", "batch_norm_stats", "batch_norm_stats_get_workspace_size", "elemt",
    "elemt_backward", "gather_stats_with_counts", "reduce_backward", "stats",
]  # fmt: skip

_DTYPES = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)
_NULLPTR = "ACLNN_ERR_PARAM_NULLPTR, 161001"
_INVALID = "ACLNN_ERR_PARAM_INVALID, 161002"
_RECIPES: dict[str, Recipe] = {}
_P = ParamSpec("_P")
_MASKS = {"sum_dy": "input_g", "sum_dy_xmu": "input_g", "grad_weight": "weight_g", "grad_bias": "bias_g"}


class Executor:
    """A checked call, to be executed once; what the first phase returns.

    It keeps the arrays and their addresses, so an array's memory must not be moved or resized before the second phase.

    Attributes
    ----------
    function : str
        The second phase it belongs to, such as ``"batch_norm_stats"``.
    workspace_size : int
        Bytes of workspace that the second phase needs, aligned to 64.

    Examples
    --------
    >>> x, (mean, invstd) = np.float32([[[1, 2, 3]]]), np.empty((2, 1), np.float32)
    >>> with pybnorm.Handle("native") as handle:
    ...     pybnorm.cann.batch_norm_stats_get_workspace_size(handle, x, 0.0, mean, invstd)[1]
    <pybnorm.cann.Executor of batch_norm_stats, 128 bytes of workspace>
    """

    def __init__(self, function: str, call: Checked) -> None:
        _arguments.instance(call, Checked, "call", "what a first phase makes")
        self.function = function
        self.workspace_size = call.nbytes
        self._call: Checked | None = call
        self._lock = threading.Lock()

    @property
    def used(self) -> bool:
        """True once it has been executed."""
        return self._call is None

    def __repr__(self) -> str:
        state = "used" if self.used else f"{self.workspace_size} bytes of workspace"
        return f"<pybnorm.cann.Executor of {self.function}, {state}>"

    def _execute(self, function: str, workspace: Any, workspace_size: Any, stream: Any) -> None:
        if function != self.function:
            raise ArgumentError("executor", f"an executor of {self.function}", f"one of {function} ({_INVALID})")
        with self._lock:
            if self._call is None:
                allowed = f"a new one: an executor is for one execution ({_INVALID})"
                raise ArgumentError("executor", f"an executor of {function} that has been used", allowed)
            handle = self._call.handle
            memory, previous = self._memory(handle, workspace, workspace_size), handle.stream
            if stream is not None:
                handle.set_stream(stream)
            call, self._call = self._call, None
            try:
                call.execute(memory if self.workspace_size else None)
            finally:
                if stream is not None:
                    handle.set_stream(previous)

    def _memory(self, handle: Handle, workspace: Any, workspace_size: Any) -> tuple[int, int]:
        """Address and bytes, checked before the executor is used up."""
        size = _arguments.optional_pointer(workspace_size, "workspace_size")
        if workspace is None or issubclass(type(workspace), int):
            address = _arguments.optional_pointer(workspace, "workspace")
        else:
            address, available = handle.memory(workspace)
            if available < size:
                raise WorkspaceError("workspace_size", str(size), f"at most the {available} bytes of workspace")
        if size < self.workspace_size:
            allowed = f"at least {self.workspace_size} bytes, what {self.function}_get_workspace_size returned"
            raise WorkspaceError("workspace_size", str(size), allowed)
        if self.workspace_size and address == 0:
            raise WorkspaceError("workspace", str(workspace), f"{self.workspace_size} bytes of memory ({_NULLPTR})")
        if self.workspace_size and address % ALIGNMENT:
            raise WorkspaceError("workspace", f"{address:#x}", f"an address aligned to {ALIGNMENT}")
        return address, size if address else 0


# ---------------------------------------------------------------- two phases


class _Second(Protocol):
    """The second phase of a function."""

    def __call__(self, workspace: Any, workspace_size: int, executor: Executor, stream: Any = None) -> None: ...


@contextlib.contextmanager
def _status(recipe: Recipe) -> Iterator[None]:
    """CANN's status of a mistake in an argument, where the error has none."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in recipe.names or "ACLNN" in error.allowed:
            raise
        raise type(error)(error.argument, error.value, f"{error.allowed} ({_INVALID})") from None


def _run(handle: Handle, workspace: Any, recipe: Recipe, values: tuple[Any, ...]) -> None:
    with _status(recipe):
        perform(handle, workspace, recipe, _unmasked(recipe, values))


def _unmasked(recipe: Recipe, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values without arrays that a mask leaves out: nothing looks at them."""
    off = {mask for mask, value in zip(recipe.names, values, strict=True) if value is False}
    return tuple([None if _MASKS.get(n) in off else value for n, value in zip(recipe.names, values, strict=True)])


def _phases(one: Callable[_P, None]) -> tuple[Callable[_P, tuple[int, Executor]], _Second]:
    """The two phases of a function that also exists as one call."""
    recipe = _RECIPES[one.__name__]
    name = f"batch_norm_{recipe.name}"
    cann = name.title().replace("_", "")

    def checked(handle: Handle, values: tuple[Any, ...]) -> tuple[int, Executor]:
        with _status(recipe):
            call = Checked(handle, recipe.name, *prepare(handle, recipe, _unmasked(recipe, values)), recipe.arrays)
            call.prepared.check(call.addresses)
        return call.nbytes, Executor(name, call)

    def second(workspace: Any, workspace_size: int, executor: Executor, stream: Any = None) -> None:
        if executor is None:
            raise ArgumentTypeError("executor", None, f"an Executor ({_NULLPTR})")
        _arguments.instance(executor, Executor, "executor", "an Executor")
        executor._execute(name, workspace, workspace_size, stream)

    first = f"{name}_get_workspace_size"
    doc = _FIRST.format(cann=cann, one=recipe.name, second=name)
    query = recipe.query(__name__, doc, first, checked)
    query.__annotations__["return"] = "tuple[int, Executor]"
    second.__name__ = second.__qualname__ = name
    second.__doc__ = _SECOND.format(cann=cann, first=first)
    return query, second


_FIRST = """First phase of ``aclnn{cann}``; see `{one}` for arguments and mathematics.

Counts are read here, not in the second phase.

Returns
-------
(int, Executor)
    Bytes of workspace, and the executor for `{second}`.

Raises
------
ArgumentError, ArgumentTypeError, UnsupportedError
"""
_SECOND = """Second phase of ``aclnn{cann}``.

Parameters
----------
workspace : array, int or None
    Memory on the handle's device, or its address, aligned to 64; None or 0 where none is needed.
workspace_size : int
    Its bytes, at least what the first phase returned.
executor : Executor
    Of `{first}`; not used before. One whose workspace was refused can still be used.
stream : int or object with ``__cuda_stream__``, optional
    Stream to compute on. The handle has its own stream back afterwards; None: that one.

Raises
------
ArgumentError
    The executor has been used, or is of another function.
WorkspaceError, VendorError
"""


# ---------------------------------------------------------------- the functions


@operation("grad_out input mean invstd weight sum_dy sum_dy_xmu grad_weight grad_bias", _RECIPES, _run)
def reduce_backward(
    p: Program, grad_out: Any, input: Any, mean: Any, invstd: Any, weight: Any, input_g: bool, weight_g: bool,
    bias_g: bool, sum_dy: Any, sum_dy_xmu: Any, grad_weight: Any, grad_bias: Any, *, averages: bool = False,
    workspace: Any = None,
) -> None:  # fmt: skip
    """The sums of a backward pass over one rank's batch (``aclnnBatchNormReduceBackward``).

    ``sum_dy = sum(grad_out)``, ``sum_dy_xmu = sum(grad_out * (input - mean))``, ``grad_weight = sum_dy_xmu * invstd``,
    ``grad_bias = sum(grad_out)``, over all axes but 1.

    Parameters
    ----------
    grad_out, input : array, one shape and dtype
        Rank 2 to 8, (N, C, ...). Axes other than 1 may be empty: the outputs are zeros then.
    mean, invstd : array, shape (C,)
        In synchronized batch normalization those of all ranks. `invstd` is 1 / sqrt(variance + epsilon) and is used
        as given.
    weight : array, shape (C,), or None
        Checked and otherwise ignored, as in CANN: the result does not depend on it.
    input_g, weight_g, bias_g : bool
        Whether `sum_dy` and `sum_dy_xmu`, `grad_weight`, `grad_bias` are wanted.
    sum_dy, sum_dy_xmu, grad_weight, grad_bias : array, shape (C,), or None
        Written where the mask is True. Masked off they may be None and are not looked at.
    averages : bool
        True: `sum_dy` and `sum_dy_xmu` get averages, the sums divided by the elements of a channel in `input`.

    Notes
    -----
    Sums, as CANN's current page, its kernel and PyTorch's ``batch_norm_backward_reduce`` have it. Older pages speak of
    the "mean of" the gradient, and older PyTorch returned averages under nearly the same names (``mean_dy``):
    `averages` is for code that was written for those.

    CANN computes ``sum(grad_out * input) - mean * sum(grad_out)`` in float32, which cancels when the mean is large
    against the deviation. Here differences from the mean are taken before they are summed.

    For an empty batch CANN's newest chips write zeros, as is done here, and others leave the outputs as they were. CANN
    does not compare the shapes of `grad_out` and `input`; here they must be equal. Memory layouts need not be.

    Examples
    --------
    >>> x, grad_out = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]])
    >>> mean, invstd, sum_dy, sum_dy_xmu, grad_weight, grad_bias = np.full((6, 1), 2, np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.cann.reduce_backward(
    ...         handle, grad_out, x, mean, invstd, None, True, True, True, sum_dy, sum_dy_xmu, grad_weight, grad_bias
    ...     )
    >>> sum_dy, sum_dy_xmu, grad_weight, grad_bias
    (array([1.], dtype=float32), array([1.], dtype=float32), array([2.], dtype=float32), array([1.], dtype=float32))
    """
    c = _Call(p)
    x = c.data("input", input)
    dy = c.data("grad_out", grad_out, x)
    mu, iv = c.vector("mean", mean, x), c.vector("invstd", invstd, x)
    if weight is not None:
        c.vector("weight", weight, x)
    given = {"input_g": input_g, "weight_g": weight_g, "bias_g": bias_g}
    masks = {name: _arguments.boolean(value, name) for name, value in given.items()}
    wanted = {"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "grad_weight": grad_weight, "grad_bias": grad_bias}
    names, results = {"grad_weight": "dscale", "grad_bias": "dbias"}, {}
    for name, array in wanted.items():
        if masks[_MASKS[name]]:
            results[names.get(name, name)] = c.vector(name, array, x, output=True, why=f"{_MASKS[name]} is True")
    scaled = []
    if _arguments.boolean(averages, "averages") and 0 not in x.dims:
        for name in [n for n in ("sum_dy", "sum_dy_xmu") if n in results]:
            scaled.append((p.scratch(mu.dims, DataType.FLOAT32), results[name]))
            results[name] = scaled[-1][0]
    if results:
        p.then("backward_reduce", x=x, dy=dy, mean=mu, inv_variance=iv, **results)
    for total, target in scaled:
        average = target if target.dtype == total.dtype else p.scratch(total.dims, total.dtype)
        p.axpby(x.dims[1] / math.prod(x.dims), total, 0.0, average)
        if average is not target:
            p.then("convert", average, target)
    c.finish()


batch_norm_reduce_backward_get_workspace_size, batch_norm_reduce_backward = _phases(reduce_backward)


@operation("input mean invstd", _RECIPES, _run)
def stats(p: Program, input: Any, eps: float, mean: Any, invstd: Any, *, workspace: Any = None) -> None:
    """Mean and inverse standard deviation of one rank's batch (``aclnnBatchNormStats``).

    ``mean = sum(input) / m``, ``invstd = 1 / sqrt(sum((input - mean)**2) / m + eps)`` over all axes but 1.

    Parameters
    ----------
    input : array
        Rank 2 to 8, (N, C, ...). Axes other than 1 may be empty.
    eps : float
        Finite, at least 0.
    mean, invstd : array, shape (C,), float32
        Written.

    Notes
    -----
    For an empty batch both are 0 here; CANN's `invstd` is NaN then. Neither is read by `gather_stats_with_counts` where
    the rank's count is 0.

    Examples
    --------
    >>> x, (mean, invstd) = np.float32([[[1, 2, 3]]]), np.empty((2, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.cann.stats(handle, x, 0.0, mean, invstd)
    >>> mean, invstd.round(3)
    (array([2.], dtype=float32), array([1.225], dtype=float32))
    """
    c = _Call(p)
    x = c.data("input", input)
    epsilon = _arguments.epsilon(eps, argument="eps")
    only = (DataType.FLOAT32,)
    mu = c.vector("mean", mean, x, output=True, dtypes=only)
    iv = c.vector("invstd", invstd, x, output=True, dtypes=only)
    if 0 in x.dims:
        for target in (mu, iv):
            p.fill(0.0, target)
    else:
        p.then("stats", x, mean=mu, inv_variance=iv, epsilon=epsilon)
    c.finish()


batch_norm_stats_get_workspace_size, batch_norm_stats = _phases(stats)


@operation("input mean invstd running_mean running_var mean_all invstd_all", _RECIPES, _run)
def gather_stats_with_counts(
    p: Program, input: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: float, eps: float,
    counts: Any, mean_all: Any, invstd_all: Any, *, workspace: Any = None,
) -> None:  # fmt: skip
    """Merge the statistics of all ranks (``aclnnBatchNormGatherStatsWithCounts``).

    With ``n = sum(counts)`` and ``variance_k = 1 / invstd_k**2 - eps``: ``mean_all = sum(counts_k * mean_k) / n``,
    ``invstd_all = 1 / sqrt(sum(counts_k * (variance_k + (mean_k - mean_all)**2)) / n + eps)``;
    ``running = (1 - momentum) * running + momentum * batch`` with the variance times n / (n - 1).

    Parameters
    ----------
    input : array
        The batch; only C and that it is valid matter, its memory is not read.
    mean, invstd : array, shape (R, C)
        A row for each rank, of what `stats` gave with the same `eps`.
    running_mean, running_var : array, shape (C,), or None
        Updated in place; both or none; need n > 1.
    momentum, eps : float
        From 0 to 1; finite, at least 0.
    counts : sequence of R numbers, on the host
        Elements per channel of each rank, whole numbers. Rows of ranks with 0 have no effect, whatever they hold.
    mean_all, invstd_all : array, shape (C,)
        Written.

    Notes
    -----
    CANN takes `counts` as a tensor on the device. Here they decide which calls are made, and reading them back would
    stall the stream, so they are given on the host, where a communicator has them anyway.

    The page writes "E[x] * momentum" in the rule of the running variance too; it means the variance.

    ``1 / invstd**2 - eps`` has few digits where eps is much larger than the variance. That is in the interface;
    `pybnorm.operations.gather_stats` takes sums of squares instead and has them all.

    Examples
    --------
    >>> x, counts = np.zeros((2, 1, 3), np.float32), np.float32([2, 1])
    >>> mean, invstd = np.float32([[1], [4]]), np.float32([[1], [1]])
    >>> mean_all, invstd_all = np.empty((2, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.cann.gather_stats_with_counts(
    ...         handle, x, mean, invstd, None, None, 0.1, 0.0, counts, mean_all, invstd_all
    ...     )
    >>> mean_all, invstd_all.round(3)
    (array([2.], dtype=float32), array([0.577], dtype=float32))
    """
    c = _Call(p)
    x = c.data("input", input, read=False)
    mu, iv = c.rows("mean", mean, x), c.rows("invstd", invstd, x)
    if iv.dims != mu.dims:
        raise ArgumentError("invstd", f"dims {iv.dims}", f"the dims of mean, {mu.dims}")
    running: dict[str, Buffer] = {}
    if _arguments.pair("running_mean", running_mean, "running_var", running_var):
        running["running_mean"] = c.vector("running_mean", running_mean, x, output=True, prior=True)
        running["running_variance"] = c.vector("running_var", running_var, x, output=True, prior=True)
    factor, epsilon = _arguments.factor(momentum, "momentum"), _arguments.epsilon(eps, argument="eps")
    elements = _whole_numbers("counts", counts)
    if len(elements) != mu.dims[0]:
        raise ArgumentError("counts", f"{len(elements)} counts", f"one for each of the {mu.dims[0]} rows of mean")
    if sum(elements) < (2 if running else 1):
        least = "above 1, because running statistics are updated" if running else "above 0"
        raise ArgumentError("counts", elements, f"a sum {least}")
    all_mean = c.vector("mean_all", mean_all, x, output=True)
    all_iv = c.vector("invstd_all", invstd_all, x, output=True)
    variances = p.scratch(mu.dims, DataType.FLOAT32)
    p.then("variance_from_inverse", c.packed(iv), variances, epsilon=epsilon)
    if mu.dtype != DataType.FLOAT32:
        narrow, mu = c.packed(mu), p.scratch(mu.dims, DataType.FLOAT32)
        p.then("convert", narrow, mu)
    p.then(
        "gather_stats", mu, None, elements, variances=variances, mean=all_mean, inv_variance=all_iv,
        **running, exponential_average_factor=factor, epsilon=epsilon,
    )  # fmt: skip
    c.finish()


batch_norm_gather_stats_with_counts_get_workspace_size, batch_norm_gather_stats_with_counts = _phases(
    gather_stats_with_counts
)


@operation("input weight bias mean invstd output", _RECIPES, _run)
def elemt(
    p: Program, input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float, output: Any,
    *, workspace: Any = None,
) -> None:  # fmt: skip
    """Normalize by the statistics of all ranks (``aclnnBatchNormElemt``).

    ``output = weight * (input - mean) * invstd + bias``

    Parameters
    ----------
    input : array
        Rank 2 to 8, (N, C, ...). Axes other than 1 may be empty: nothing is done then.
    weight, bias : array, shape (C,), or None
        None: 1 and 0.
    mean, invstd : array, shape (C,)
        `invstd` is 1 / sqrt(variance + eps).
    eps : float
        Without effect. CANN makes a variance of `invstd` by subtracting it and adds it again, so that it cancels but
        for rounding; here `invstd` is used as it is.
    output : array, shape and dtype of `input`
        Written.

    Examples
    --------
    >>> x, output = np.float32([[[1, 2, 3]]]), np.empty((1, 1, 3), np.float32)
    >>> weight, bias, mean, invstd = np.ones((4, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.cann.elemt(handle, x, weight, bias, mean, invstd, 1e-5, output)
    >>> output
    array([[[1., 2., 3.]]], dtype=float32)
    """
    c = _Call(p)
    x = c.data("input", input)
    scale = None if weight is None else c.vector("weight", weight, x)
    shift = None if bias is None else c.vector("bias", bias, x)
    mu, iv = c.vector("mean", mean, x), c.vector("invstd", invstd, x)
    _arguments.epsilon(eps, argument="eps")
    p.then("elemt", x, scale, shift, mu, iv, c.data("output", output, x, output=True))
    c.finish()


batch_norm_elemt_get_workspace_size, batch_norm_elemt = _phases(elemt)


@operation("grad_out input mean invstd weight sum_dy sum_dy_xmu grad_input", _RECIPES, _run)
def elemt_backward(
    p: Program, grad_out: Any, input: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any,
    counter: Any, grad_input: Any, *, averages: bool = False, workspace: Any = None,
) -> None:  # fmt: skip
    """The gradient of the input, from the sums of all ranks (``aclnnBatchNormElemtBackward``).

    With ``n = sum(counter)``: ``grad_input = weight * invstd * (grad_out - sum_dy / n - (input - mean) * invstd**2 *
    sum_dy_xmu / n)``.

    Parameters
    ----------
    grad_out, input, mean, invstd
        As in `reduce_backward`; of an empty batch nothing is done.
    weight : array, shape (C,), or None
        None: 1.
    sum_dy, sum_dy_xmu : array, shape (C,)
        Those of `reduce_backward`, added up over the ranks: sums, unless `averages`.
    counter : sequence of numbers, on the host
        Elements per channel of each rank, whole numbers, as for `gather_stats_with_counts`.
    grad_input : array, shape and dtype of `input`
        Written.
    averages : bool
        True: `sum_dy` and `sum_dy_xmu` are averages over the elements of all ranks, so that n above is 1.

    Notes
    -----
    CANN's page multiplies only the second difference by ``invstd * weight``; its kernel, PyTorch's
    ``batch_norm_backward_elemt`` and the gradient multiply both.

    Examples
    --------
    >>> x, grad_out, grad_input = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]]), np.empty((1, 1, 3), np.float32)
    >>> one, mean, counter = np.ones(1, np.float32), np.full(1, 2, np.float32), np.int32([3])
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.cann.elemt_backward(handle, grad_out, x, mean, one, one, one, one, counter, grad_input)
    >>> grad_input.round(3)
    array([[[ 0.   , -0.333,  0.333]]], dtype=float32)
    """
    c = _Call(p)
    x = c.data("input", input)
    dy = c.data("grad_out", grad_out, x)
    mu, iv = c.vector("mean", mean, x), c.vector("invstd", invstd, x)
    scale = None if weight is None else c.vector("weight", weight, x)
    sums = {name: c.vector(name, array, x) for name, array in (("sum_dy", sum_dy), ("sum_dy_xmu", sum_dy_xmu))}
    count = sum(_whole_numbers("counter", counter))
    if count < 1:
        raise ArgumentError("counter", counter, "a sum above 0")
    if _arguments.boolean(averages, "averages"):
        count = 1
    dx = c.data("grad_input", grad_input, x, output=True)
    p.then("backward_elemt", x=x, dy=dy, scale=scale, mean=mu, inv_variance=iv, **sums, count=count, dx=dx)
    c.finish()


batch_norm_elemt_backward_get_workspace_size, batch_norm_elemt_backward = _phases(elemt_backward)


# ---------------------------------------------------------------- rules


class _Call:
    """A program's arrays, checked by CANN's rules, and what is copied back to them at its end."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._back: list[tuple[Buffer, Buffer]] = []

    def data(
        self, name: str, array: Any, like: Buffer | None = None, *, output: bool = False, read: bool = True
    ) -> Buffer:
        """Check a tensor with the channels on axis 1, the input's (like is None) or one of the same shape."""
        buffer = self._array(name, array, output=output)
        if not 2 <= len(buffer.dims) <= 8:
            raise ArgumentError(name, f"dims {buffer.dims}", "rank 2 to 8")
        if buffer.dims[1] == 0:
            raise ArgumentError(name, f"dims {buffer.dims}", "at least one channel, on axis 1")
        if like is not None and buffer.dims != like.dims:
            raise ArgumentError(name, f"dims {buffer.dims}", f"the dims of input, {like.dims}")
        if like is not None and buffer.dtype != like.dtype:
            raise ArgumentTypeError(name, f"dtype {buffer.dtype.short}", f"the dtype of input, {like.dtype.short}")
        if output or read:
            self.program.note(name, buffer, output)
        return buffer

    def vector(
        self, name: str, array: Any, x: Buffer, *, output: bool = False, prior: bool = False, why: str = "",
        dtypes: tuple[DataType, ...] = _DTYPES,
    ) -> Buffer:  # fmt: skip
        """Check a vector of C elements; itself, or a packed copy, which is copied back at the end if it is an output.

        `prior`: an output that is also read.
        """
        buffer = self._array(name, array, output=output, why=why, dtypes=dtypes)
        if buffer.dims != x.dims[1:2]:
            raise ArgumentError(name, f"dims {buffer.dims}", f"the channels of input, {x.dims[1:2]}")
        self.program.note(name, buffer, output)
        if not output or buffer.strides == (1,):
            return self.packed(buffer)
        copy = self.packed(buffer) if prior else self.program.scratch(buffer.dims, buffer.dtype)
        self._back.append((copy, buffer))
        return copy

    def packed(self, buffer: Buffer) -> Buffer:
        """The array, or a copy of it without gaps."""
        if _arguments.is_packed_vector(buffer.dims, buffer.strides):
            return buffer
        copy = self.program.scratch(buffer.dims, buffer.dtype)
        self.program.axpby(1.0, buffer, 0.0, copy)
        return copy

    def finish(self) -> None:
        """Copy results back to vectors with gaps."""
        for copy, target in self._back:
            self.program.axpby(1.0, copy, 0.0, target)

    def _array(
        self, name: str, array: Any, *, output: bool = False, why: str = "", dtypes: tuple[DataType, ...] = _DTYPES
    ) -> Buffer:
        if array is None:
            raise ArgumentTypeError(name, None, f"an array{', because ' + why if why else ''} ({_NULLPTR})")
        buffer = self.program.array(name, array, output=output)
        if buffer.dtype not in dtypes:
            raise ArgumentTypeError(name, f"dtype {buffer.dtype.short}", " or ".join(d.short for d in dtypes))
        return buffer

    def rows(self, name: str, array: Any, x: Buffer) -> Buffer:
        """Check statistics with a row for each rank."""
        buffer = self._array(name, array)
        if len(buffer.dims) != 2 or buffer.dims[0] == 0 or buffer.dims[1] != x.dims[1]:
            allowed = f"(ranks, channels of input): (R, {x.dims[1]}), R at least 1"
            raise ArgumentError(name, f"dims {buffer.dims}", allowed)
        self.program.note(name, buffer, False)
        return buffer


def _whole_numbers(name: str, values: Any) -> list[int]:
    """Counts, also as floats, because CANN has them in tensors of float."""
    allowed = "a sequence of whole numbers >= 0, on the host"
    if values is None:
        raise ArgumentTypeError(name, None, f"{allowed} ({_NULLPTR})")
    try:
        if hasattr(values, "__cuda_array_interface__"):  # also PyTorch's tensors on a device
            values = "an array on a device"
        items = _arguments.items(values.tolist() if hasattr(values, "tolist") else values, name, allowed, 1 << 20)
    except Exception:  # the object's own
        raise ArgumentTypeError(name, values, allowed) from None
    result = []
    for item in items:
        if issubclass(type(item), bool) or not issubclass(type(item), numbers.Real):
            raise ArgumentTypeError(name, values, allowed)
        with contextlib.suppress(OverflowError):
            if (number := float(item)) == number // 1 and 0 <= number <= 2**63:
                result.append(int(number))
                continue
        raise ArgumentError(name, values, allowed)
    return result
