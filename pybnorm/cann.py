"""CANN's batch normalization by parts, ``aclnnBatchNorm...``, by its names, on every backend.

For synchronized batch normalization a rank computes `stats`, the ranks exchange them and `gather_stats_with_counts`
merges them, `elemt` normalizes; on the way back `reduce_backward` computes the sums, the ranks add them up, and
`elemt_backward` finishes. Each exists in two forms:

two phases, as in CANN
    ``size, executor = batch_norm_X_get_workspace_size(handle, ...)`` checks everything, touches no memory and returns
    the bytes of workspace and a single-use `Executor`, which holds the arrays; then
    ``batch_norm_X(workspace, workspace_size, executor, stream)`` computes.
one call
    ``X(handle, ..., workspace=None)``; None will do on CPU backends.

Arguments are CANN's in snake_case, in CANN's order, after the handle. What all of them require, as CANN does: float32,
float16 or bfloat16; input and what has its shape of rank 2 to 8 with the channels on axis 1, at least one; vectors of
shape (C,), each of its own dtype. Any strides without overlap, of vectors too; the vectors are packed on the device.

CANN's status of the same mistake stands at the end of an error's text: 161001, ``ACLNN_ERR_PARAM_NULLPTR``, or 161002,
``ACLNN_ERR_PARAM_INVALID``. Where CANN's pages, releases and chips disagree, the functions say what holds here.
"""

from __future__ import annotations

import numbers
import threading
from typing import Any, NoReturn

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import Handle
from pybnorm._sequence import Scratch, Sequence, data_buffer, disjoint
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, WorkspaceError

__all__ = [
    "Executor",
    "batch_norm_elemt",
    "batch_norm_elemt_backward",
    "batch_norm_elemt_backward_get_workspace_size",
    "batch_norm_elemt_get_workspace_size",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_gather_stats_with_counts_get_workspace_size",
    "batch_norm_reduce_backward",
    "batch_norm_reduce_backward_get_workspace_size",
    "batch_norm_stats",
    "batch_norm_stats_get_workspace_size",
    "elemt",
    "elemt_backward",
    "gather_stats_with_counts",
    "reduce_backward",
    "stats",
]

_DTYPES = (DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16)
_NULLPTR = "ACLNN_ERR_PARAM_NULLPTR, 161001"
_INVALID = "ACLNN_ERR_PARAM_INVALID, 161002"


class Executor:
    """A checked call, to be executed once; what the first phase returns.

    It keeps the arrays and their addresses, so an array's memory must not be moved or resized before the second phase.

    Attributes
    ----------
    function : str
        The second phase it belongs to, such as ``"batch_norm_stats"``.
    workspace_size : int
        Bytes of workspace that the second phase needs, aligned to 64.
    """

    def __init__(self, function: str, sequence: Sequence) -> None:
        _arguments.instance(sequence, Sequence, "sequence", "what a first phase makes")
        self.function = function
        self.workspace_size = sequence.check()
        self._sequence: Sequence | None = sequence
        self._lock = threading.Lock()

    @property
    def used(self) -> bool:
        """Whether it has been executed."""
        return self._sequence is None

    def __repr__(self) -> str:
        state = "used" if self.used else f"{self.workspace_size} bytes of workspace"
        return f"<pybnorm.cann.Executor of {self.function}, {state}>"

    def _execute(self, function: str, workspace: Any, workspace_size: Any, stream: Any) -> None:
        if function != self.function:
            raise ArgumentError("executor", f"an executor of {self.function}", f"one of {function} ({_INVALID})")
        with self._lock:
            if self._sequence is None:
                allowed = f"a new one: an executor is for one execution ({_INVALID})"
                raise ArgumentError("executor", f"an executor of {function} that has been used", allowed)
            memory = self._memory(self._sequence.handle, workspace, workspace_size)
            handle, previous = self._sequence.handle, None
            if stream is not None:
                previous = handle.stream
                handle.set_stream(stream)
            sequence, self._sequence = self._sequence, None
            try:
                sequence.run(memory)
            finally:
                if previous is not None:
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
        if self.workspace_size and address % 64:
            raise WorkspaceError("workspace", f"{address:#x}", "an address aligned to 64")
        return address, size if address else 0


# ---------------------------------------------------------------- reduce backward


def batch_norm_reduce_backward_get_workspace_size(
    handle: Handle,
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
    sum_dy: Any,
    sum_dy_xmu: Any,
    grad_weight: Any,
    grad_bias: Any,
) -> tuple[int, Executor]:
    """First phase of ``aclnnBatchNormReduceBackward``; see `reduce_backward` for arguments and mathematics.

    Returns
    -------
    (int, Executor)
        Bytes of workspace, and the executor for `batch_norm_reduce_backward`.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    return _prepared(
        "batch_norm_reduce_backward",
        _reduce_backward(
            handle, grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g, sum_dy, sum_dy_xmu, grad_weight,
            grad_bias,
        ),
    )  # fmt: skip


def batch_norm_reduce_backward(workspace: Any, workspace_size: int, executor: Executor, stream: Any = None) -> None:
    """Second phase of ``aclnnBatchNormReduceBackward``.

    Parameters
    ----------
    workspace : array, int or None
        Memory on the handle's device, or its address, aligned to 64; None or 0 where none is needed.
    workspace_size : int
        Its bytes, at least what the first phase returned.
    executor : Executor
        Of `batch_norm_reduce_backward_get_workspace_size`; not used before. One whose workspace was refused can still
        be used.
    stream : int or object with ``__cuda_stream__``, optional
        Stream to compute on. The handle has its own stream back afterwards; None: that one.

    Raises
    ------
    ArgumentError
        The executor has been used, or is of another function.
    WorkspaceError, VendorError
    """
    _execute("batch_norm_reduce_backward", workspace, workspace_size, executor, stream)


def reduce_backward(
    handle: Handle,
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
    sum_dy: Any,
    sum_dy_xmu: Any,
    grad_weight: Any,
    grad_bias: Any,
    *,
    workspace: Any = None,
) -> None:
    """The sums of a backward pass over one rank's batch (``aclnnBatchNormReduceBackward``).

    ``sum_dy = sum(grad_out)``, ``sum_dy_xmu = sum(grad_out * (input - mean))``, ``grad_weight = sum_dy_xmu * invstd``,
    ``grad_bias = sum(grad_out)``, over all axes but 1.

    Parameters
    ----------
    handle : Handle
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
    workspace
        See the module.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        With CANN's status in the text; nothing has been written then.
    UnsupportedError, WorkspaceError, VendorError

    Notes
    -----
    Sums, as CANN's current page, its kernel and PyTorch's ``batch_norm_backward_reduce`` have it. Older pages speak of
    the "mean of" the gradient, and older PyTorch returned averages under nearly the same names (``mean_dy``); divide
    by the count for those.

    CANN computes ``sum(grad_out * input) - mean * sum(grad_out)`` in float32, which cancels when the mean is large
    against the deviation. Here differences from the mean are taken before they are summed.

    For an empty batch CANN's newest chips write zeros, as is done here, and others leave the outputs as they were. CANN
    does not compare the shapes of `grad_out` and `input`; here they must be equal. Memory layouts need not be.

    Calls (`pybnorm.operations`): backward_reduce; axpby for vectors that are not contiguous.
    Workspace: that of backward_reduce, which includes an array of x's size.
    """
    _reduce_backward(
        handle, grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g, sum_dy, sum_dy_xmu, grad_weight,
        grad_bias,
    ).run(workspace)  # fmt: skip


def _reduce_backward(
    handle: Handle,
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
    sum_dy: Any,
    sum_dy_xmu: Any,
    grad_weight: Any,
    grad_bias: Any,
) -> Sequence:
    c = _Call(handle)
    x = c.data("input", input)
    dy = c.data("grad_out", grad_out, x)
    mu = c.vector("mean", mean, x)
    iv = c.vector("invstd", invstd, x)
    if weight is not None:
        c.vector("weight", weight, x)
    masks = {"input_g": input_g, "weight_g": weight_g, "bias_g": bias_g}
    masks = {name: _arguments.boolean(value, name) for name, value in masks.items()}
    wanted = {
        "sum_dy": (sum_dy, "input_g"),
        "sum_dy_xmu": (sum_dy_xmu, "input_g"),
        "grad_weight": (grad_weight, "weight_g"),
        "grad_bias": (grad_bias, "bias_g"),
    }
    names = {"grad_weight": "dscale", "grad_bias": "dbias"}
    results = {}
    for name, (array, mask) in wanted.items():
        if masks[mask]:
            results[names.get(name, name)] = c.vector(name, array, x, output=True, why=f"{mask} is True")
    c.check_overlaps()
    if results:
        c.then("backward_reduce", dy, x, mu, iv, **results)
    return c.finish()


# ---------------------------------------------------------------- stats


def batch_norm_stats_get_workspace_size(
    handle: Handle, input: Any, eps: float, mean: Any, invstd: Any
) -> tuple[int, Executor]:
    """First phase of ``aclnnBatchNormStats``; see `stats`, and `batch_norm_reduce_backward_get_workspace_size`."""
    return _prepared("batch_norm_stats", _stats(handle, input, eps, mean, invstd))


def batch_norm_stats(workspace: Any, workspace_size: int, executor: Executor, stream: Any = None) -> None:
    """Second phase of ``aclnnBatchNormStats``; arguments as in `batch_norm_reduce_backward`."""
    _execute("batch_norm_stats", workspace, workspace_size, executor, stream)


def stats(handle: Handle, input: Any, eps: float, mean: Any, invstd: Any, *, workspace: Any = None) -> None:
    """Mean and inverse deviation of one rank's batch (``aclnnBatchNormStats``).

    ``mean = sum(input) / m``, ``invstd = 1 / sqrt(sum((input - mean)**2) / m + eps)`` over all axes but 1.

    Parameters
    ----------
    handle : Handle
    input : array
        Rank 2 to 8, (N, C, ...). Axes other than 1 may be empty.
    eps : float
        Finite, at least 0.
    mean, invstd : array, shape (C,), float32
        Written.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        With CANN's status in the text; nothing has been written then.
    UnsupportedError, WorkspaceError, VendorError

    Notes
    -----
    For an empty batch both are 0 here; CANN's `invstd` is NaN then. Neither is read by `gather_stats_with_counts` where
    the rank's count is 0.

    Calls (`pybnorm.operations`): stats; fill for an empty batch. Workspace: that of stats.
    """
    _stats(handle, input, eps, mean, invstd).run(workspace)


def _stats(handle: Handle, input: Any, eps: float, mean: Any, invstd: Any) -> Sequence:
    c = _Call(handle)
    x = c.data("input", input)
    epsilon = _scalar("eps", eps)
    only = (DataType.FLOAT32,)
    mu = c.vector("mean", mean, x, output=True, dtypes=only)
    iv = c.vector("invstd", invstd, x, output=True, dtypes=only)
    c.check_overlaps()
    if 0 in x.dims:
        for target in (mu, iv):
            c.then("fill", 0.0, target)
    else:
        c.then("stats", x, mean=mu, inv_variance=iv, epsilon=epsilon)
    return c.finish()


# ---------------------------------------------------------------- gather


def batch_norm_gather_stats_with_counts_get_workspace_size(
    handle: Handle,
    input: Any,
    mean: Any,
    invstd: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
    mean_all: Any,
    invstd_all: Any,
) -> tuple[int, Executor]:
    """First phase of ``aclnnBatchNormGatherStatsWithCounts``; see `gather_stats_with_counts`.

    Returns and raises as `batch_norm_reduce_backward_get_workspace_size`. `counts` is read here, not in the second
    phase.
    """
    return _prepared(
        "batch_norm_gather_stats_with_counts",
        _gather(handle, input, mean, invstd, running_mean, running_var, momentum, eps, counts, mean_all, invstd_all),
    )


def batch_norm_gather_stats_with_counts(
    workspace: Any, workspace_size: int, executor: Executor, stream: Any = None
) -> None:
    """Second phase of ``aclnnBatchNormGatherStatsWithCounts``; arguments as in `batch_norm_reduce_backward`."""
    _execute("batch_norm_gather_stats_with_counts", workspace, workspace_size, executor, stream)


def gather_stats_with_counts(
    handle: Handle,
    input: Any,
    mean: Any,
    invstd: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
    mean_all: Any,
    invstd_all: Any,
    *,
    workspace: Any = None,
) -> None:
    """Merge the statistics of all ranks (``aclnnBatchNormGatherStatsWithCounts``).

    With ``n = sum(counts)`` and ``variance_k = 1 / invstd_k**2 - eps``: ``mean_all = sum(counts_k * mean_k) / n``,
    ``invstd_all = 1 / sqrt(sum(counts_k * (variance_k + (mean_k - mean_all)**2)) / n + eps)``;
    ``running = (1 - momentum) * running + momentum * batch`` with the variance times n / (n - 1).

    Parameters
    ----------
    handle : Handle
    input : array
        The batch; only C and that it is valid matter, its memory is not read.
    mean, invstd : array, shape (R, C)
        A row for each rank, of what `stats` gave with the same `eps`.
    running_mean, running_var : array, shape (C,), or None
        Updated in place; both or none; need n > 1.
    momentum : float
        From 0 to 1.
    eps : float
        Finite, at least 0.
    counts : sequence of R numbers, on the host
        Elements per channel of each rank, whole numbers. Rows of ranks with 0 have no effect, whatever they hold.
    mean_all, invstd_all : array, shape (C,)
        Written.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        With CANN's status in the text; nothing has been written then.
    UnsupportedError, WorkspaceError, VendorError

    Notes
    -----
    CANN takes `counts` as a tensor on the device. Here they decide which calls are made, and reading them back would
    stall the stream, so they are given on the host, where a communicator has them anyway.

    The page writes "E[x] * momentum" in the rule of the running variance too; it means the variance.

    ``1 / invstd**2 - eps`` has few digits where eps is much larger than the variance. That is in the interface;
    `pybnorm.operations.gather_stats` takes sums of squares instead and has them all.

    Calls (`pybnorm.operations`): variance_from_inverse, gather_stats; convert for 16-bit rows, axpby for arrays that
    are not contiguous.
    Workspace: 1 to 3 float32 arrays of (R, C), and what the calls ask for.
    """
    _gather(
        handle, input, mean, invstd, running_mean, running_var, momentum, eps, counts, mean_all, invstd_all
    ).run(workspace)  # fmt: skip


def _gather(
    handle: Handle,
    input: Any,
    mean: Any,
    invstd: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
    mean_all: Any,
    invstd_all: Any,
) -> Sequence:
    c = _Call(handle)
    x = c.data("input", input, read=False)
    mu = c.rows("mean", mean, x)
    iv = c.rows("invstd", invstd, x)
    if iv.dims != mu.dims:
        _invalid("invstd", f"dims {iv.dims}", f"the dims of mean, {mu.dims}")
    running: tuple[Any, Any] = (None, None)
    if _arguments.pair("running_mean", running_mean, "running_var", running_var):
        running = (
            c.vector("running_mean", running_mean, x, output=True, prior=True),
            c.vector("running_var", running_var, x, output=True, prior=True),
        )
    factor = _scalar("momentum", momentum)
    epsilon = _scalar("eps", eps)
    elements = _whole_numbers("counts", counts)
    if len(elements) != mu.dims[0]:
        _invalid("counts", f"{len(elements)} counts", f"one for each of the {mu.dims[0]} rows of mean")
    if sum(elements) < (1 if running[0] is None else 2):
        least = "above 0" if running[0] is None else "above 1, because running statistics are updated"
        _invalid("counts", elements, f"a sum {least}")
    all_mean = c.vector("mean_all", mean_all, x, output=True)
    all_iv = c.vector("invstd_all", invstd_all, x, output=True)
    c.check_overlaps()

    variances = c.scratch(mu.dims)
    c.then("variance_from_inverse", c.packed(iv), variances, epsilon=epsilon)
    c.then(
        "gather_stats", c.wide(mu), None, elements, variances=variances, mean=all_mean, inv_variance=all_iv,
        running_mean=running[0], running_variance=running[1], exponential_average_factor=factor, epsilon=epsilon,
    )  # fmt: skip
    return c.finish()


# ---------------------------------------------------------------- elemt


def batch_norm_elemt_get_workspace_size(
    handle: Handle, input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float, output: Any
) -> tuple[int, Executor]:
    """First phase of ``aclnnBatchNormElemt``; see `elemt`, and `batch_norm_reduce_backward_get_workspace_size`."""
    return _prepared("batch_norm_elemt", _elemt(handle, input, weight, bias, mean, invstd, eps, output))


def batch_norm_elemt(workspace: Any, workspace_size: int, executor: Executor, stream: Any = None) -> None:
    """Second phase of ``aclnnBatchNormElemt``; arguments as in `batch_norm_reduce_backward`."""
    _execute("batch_norm_elemt", workspace, workspace_size, executor, stream)


def elemt(
    handle: Handle,
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    invstd: Any,
    eps: float,
    output: Any,
    *,
    workspace: Any = None,
) -> None:
    """Normalize by the statistics of all ranks (``aclnnBatchNormElemt``).

    ``output = weight * (input - mean) * invstd + bias``

    Parameters
    ----------
    handle : Handle
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
    workspace
        See the module.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        With CANN's status in the text; nothing has been written then.
    UnsupportedError, WorkspaceError, VendorError

    Notes
    -----
    Calls (`pybnorm.operations`): elemt; axpby for vectors that are not contiguous. Workspace: that of elemt.
    """
    _elemt(handle, input, weight, bias, mean, invstd, eps, output).run(workspace)


def _elemt(
    handle: Handle, input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float, output: Any
) -> Sequence:
    c = _Call(handle)
    x = c.data("input", input)
    scale = None if weight is None else c.vector("weight", weight, x)
    shift = None if bias is None else c.vector("bias", bias, x)
    mu = c.vector("mean", mean, x)
    iv = c.vector("invstd", invstd, x)
    _scalar("eps", eps)
    y = c.data("output", output, x, output=True)
    c.check_overlaps()
    c.then("elemt", x, scale, shift, mu, iv, y)
    return c.finish()


# ---------------------------------------------------------------- elemt backward


def batch_norm_elemt_backward_get_workspace_size(
    handle: Handle,
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    counter: Any,
    grad_input: Any,
) -> tuple[int, Executor]:
    """First phase of ``aclnnBatchNormElemtBackward``; see `elemt_backward`.

    Returns and raises as `batch_norm_reduce_backward_get_workspace_size`. `counter` is read here, not in the second
    phase.
    """
    return _prepared(
        "batch_norm_elemt_backward",
        _elemt_backward(handle, grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, counter, grad_input),
    )


def batch_norm_elemt_backward(workspace: Any, workspace_size: int, executor: Executor, stream: Any = None) -> None:
    """Second phase of ``aclnnBatchNormElemtBackward``; arguments as in `batch_norm_reduce_backward`."""
    _execute("batch_norm_elemt_backward", workspace, workspace_size, executor, stream)


def elemt_backward(
    handle: Handle,
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    counter: Any,
    grad_input: Any,
    *,
    workspace: Any = None,
) -> None:
    """The gradient of the input, from the sums of all ranks (``aclnnBatchNormElemtBackward``).

    With ``n = sum(counter)``: ``grad_input = weight * invstd * (grad_out - sum_dy / n - (input - mean) * invstd**2 *
    sum_dy_xmu / n)``.

    Parameters
    ----------
    handle : Handle
    grad_out, input : array, one shape and dtype
        Rank 2 to 8, (N, C, ...). Axes other than 1 may be empty: nothing is done then.
    mean, invstd : array, shape (C,)
        Of all ranks.
    weight : array, shape (C,), or None
        None: 1.
    sum_dy, sum_dy_xmu : array, shape (C,)
        Those of `reduce_backward`, added up over the ranks: sums, not averages.
    counter : sequence of numbers, on the host
        Elements per channel of each rank, whole numbers, as for `gather_stats_with_counts`.
    grad_input : array, shape and dtype of `input`
        Written.
    workspace
        See the module.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        With CANN's status in the text; nothing has been written then.
    UnsupportedError, WorkspaceError, VendorError

    Notes
    -----
    CANN's page multiplies only the second difference by ``invstd * weight``; its kernel, PyTorch's
    ``batch_norm_backward_elemt`` and the gradient multiply both.

    Calls (`pybnorm.operations`): backward_elemt; axpby for vectors that are not contiguous.
    Workspace: that of backward_elemt.
    """
    _elemt_backward(handle, grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, counter, grad_input).run(
        workspace
    )


def _elemt_backward(
    handle: Handle,
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any,
    sum_dy: Any,
    sum_dy_xmu: Any,
    counter: Any,
    grad_input: Any,
) -> Sequence:
    c = _Call(handle)
    x = c.data("input", input)
    dy = c.data("grad_out", grad_out, x)
    mu = c.vector("mean", mean, x)
    iv = c.vector("invstd", invstd, x)
    scale = None if weight is None else c.vector("weight", weight, x)
    sums = c.vector("sum_dy", sum_dy, x), c.vector("sum_dy_xmu", sum_dy_xmu, x)
    count = sum(_whole_numbers("counter", counter))
    if count < 1:
        _invalid("counter", counter, "a sum above 0")
    dx = c.data("grad_input", grad_input, x, output=True)
    c.check_overlaps()
    c.then("backward_elemt", dy, x, mu, iv, scale, *sums, count, dx)
    return c.finish()


# ---------------------------------------------------------------- rules


class _Call(Sequence):
    """A sequence of operations on arrays that CANN's rules have been checked for."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self._inputs: dict[str, Buffer] = {}
        self._outputs: dict[str, Buffer] = {}
        self._back: list[tuple[Scratch, Buffer]] = []

    def data(
        self, name: str, array: Any, like: Buffer | None = None, *, output: bool = False, read: bool = True
    ) -> Buffer:
        """Check a tensor with the channels on axis 1, the input's (like is None) or one of the same shape."""
        buffer = self._array(name, array, output=output)
        if not 2 <= len(buffer.dims) <= 8:
            _invalid(name, f"dims {buffer.dims}", "rank 2 to 8")
        if buffer.dims[1] == 0:
            _invalid(name, f"dims {buffer.dims}", "at least one channel, on axis 1")
        if like is not None and buffer.dims != like.dims:
            _invalid(name, f"dims {buffer.dims}", f"the dims of input, {like.dims}")
        if like is not None and buffer.dtype != like.dtype:
            _invalid(name, f"dtype {buffer.dtype.short}", f"the dtype of input, {like.dtype.short}", ArgumentTypeError)
        if output or read:
            (self._outputs if output else self._inputs)[name] = buffer
        return buffer

    def vector(
        self,
        name: str,
        array: Any,
        x: Buffer,
        *,
        output: bool = False,
        prior: bool = False,
        why: str = "",
        dtypes: tuple[DataType, ...] = _DTYPES,
    ) -> Buffer | Scratch:
        """Check a vector of C elements; itself, or a packed copy, which is copied back at the end if it is an output.

        `prior`: an output that is also read.
        """
        buffer = self._array(name, array, output=output, why=why, dtypes=dtypes)
        if buffer.dims != x.dims[1:2]:
            _invalid(name, f"dims {buffer.dims}", f"the channels of input, {x.dims[1:2]}")
        (self._outputs if output else self._inputs)[name] = buffer
        if not output:
            return self.packed(buffer)
        if buffer.strides == (1,):
            return buffer
        copy = self.packed(buffer) if prior else self.scratch(buffer.dims, buffer.dtype)
        assert isinstance(copy, Scratch)
        self._back.append((copy, buffer))
        return copy

    def rows(self, name: str, array: Any, x: Buffer) -> Buffer:
        """Check statistics with a row for each rank."""
        buffer = self._array(name, array)
        if len(buffer.dims) != 2 or buffer.dims[0] == 0 or buffer.dims[1] != x.dims[1]:
            _invalid(name, f"dims {buffer.dims}", f"(ranks, channels of input): (R, {x.dims[1]}), R at least 1")
        self._inputs[name] = buffer
        return buffer

    def packed(self, buffer: Buffer) -> Buffer | Scratch:
        """The array, or a copy of it without gaps."""
        if _arguments.is_packed_vector(buffer.dims, buffer.strides):
            return buffer
        copy = self.scratch(buffer.dims, buffer.dtype)
        self.then("axpby", 1.0, buffer, 0.0, copy)
        return copy

    def wide(self, buffer: Buffer) -> Buffer | Scratch:
        """The array, or a float32 copy of one of 16 bits."""
        if buffer.dtype == DataType.FLOAT32:
            return buffer
        copy = self.scratch(buffer.dims)
        self.then("convert", self.packed(buffer), copy)
        return copy

    def check_overlaps(self) -> None:
        """Outputs have memory of their own."""
        disjoint(self._outputs, self._inputs)

    def finish(self) -> Sequence:
        """Copy results back to vectors with gaps."""
        for copy, target in self._back:
            self.then("axpby", 1.0, copy, 0.0, target)
        return self

    def _array(
        self, name: str, array: Any, *, output: bool = False, why: str = "", dtypes: tuple[DataType, ...] = _DTYPES
    ) -> Buffer:
        if array is None:
            raise ArgumentTypeError(name, None, f"an array{', because ' + why if why else ''} ({_NULLPTR})")
        try:
            buffer = data_buffer(self.handle, array, name, output=output)
        except ArgumentTypeError as error:  # of no known dtype
            _invalid(name, error.value, error.allowed, ArgumentTypeError)
        if buffer.dtype not in dtypes:
            allowed = " or ".join(d.short for d in dtypes)
            _invalid(name, f"dtype {buffer.dtype.short}", allowed, ArgumentTypeError)
        return buffer


def _invalid(name: str, value: object, allowed: str, kind: type[ArgumentError] = ArgumentError) -> NoReturn:
    raise kind(name, value, f"{allowed} ({_INVALID})") from None


def _scalar(name: str, value: Any) -> float:
    if name == "momentum":
        return _arguments.factor(value, name)
    try:
        return _arguments.epsilon(value)
    except ArgumentError as error:
        raise type(error)(name, value, error.allowed) from None


def _whole_numbers(name: str, values: Any) -> list[int]:
    """Counts, also as floats, because CANN has them in tensors of float."""
    allowed = "a sequence of whole numbers >= 0, on the host"
    if values is None:
        raise ArgumentTypeError(name, None, f"{allowed} ({_NULLPTR})")
    try:
        on_device = hasattr(values, "__cuda_array_interface__")  # also PyTorch's tensors on a device
    except Exception:  # the object's own
        _invalid(name, values, allowed, ArgumentTypeError)
    if on_device:
        raise ArgumentTypeError(name, "an array on a device", allowed)
    try:
        items = _arguments.items(values.tolist() if hasattr(values, "tolist") else values, name, allowed, 1 << 20)
    except Exception:  # the object's own
        _invalid(name, values, allowed, ArgumentTypeError)
    result = []
    for item in items:
        if issubclass(type(item), bool) or not issubclass(type(item), numbers.Real):
            _invalid(name, values, allowed, ArgumentTypeError)
        try:
            number = float(item)
        except OverflowError:
            number = -1.0
        if not 0 <= number <= 2**63 or number != number // 1:
            _invalid(name, values, allowed)
        result.append(int(number))
    return result


def _prepared(function: str, sequence: Sequence) -> tuple[int, Executor]:
    executor = Executor(function, sequence)
    return executor.workspace_size, executor


def _execute(function: str, workspace: Any, workspace_size: int, executor: Any, stream: Any) -> None:
    if executor is None:
        raise ArgumentTypeError("executor", None, f"an Executor ({_NULLPTR})")
    _arguments.instance(executor, Executor, "executor", "an Executor")
    executor._execute(function, workspace, workspace_size, stream)
