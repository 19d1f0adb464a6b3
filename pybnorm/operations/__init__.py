"""The neutral operations: what MIOpen, cuDNN, DirectML, CANN and hipDNN do with batch norm, on every backend.

Each operation is composed once from the primitives that every backend has: forward training, forward inference,
backward, axpby, fill and relu; `plan` names its calls. Nothing here depends on the vendor and nothing is computed on
the host: products and roots of parameter vectors are vendor calls too, on the handle's stream, without synchronisation.

Every function takes the handle first, then arrays of any framework (`pybnorm._arrays.as_buffer`), the outputs among
them given by the caller, and writes nothing before all arguments have been checked. Shared arguments:

axis
    The axes that parameters keep, an int or a tuple; negative ones count from the end. Any subset of the axes of an x
    of rank 1 to 8, also none and all. ``axis=1`` is the vendors' spatial mode, all axes but 0 the per-activation one.
data (x, y, dy, dx)
    One shape and dtype; any positive strides without overlap, each its own.
parameters (scale, bias, statistics and their gradients)
    `derive`'s shape, axes of length 1 may be left out; contiguous; float64 for float64 data, else float32, float16 or
    bfloat16, whatever the data. 16-bit parameters are widened to float32 in the workspace and results rounded once.
workspace
    An array of bytes or (address, bytes), at least `workspace_size` of the same arguments, aligned to 64. None: on
    CPU backends memory that this module keeps per handle; elsewhere WorkspaceError if the
    operation needs any.

Ways. Where a library has several for one call, a spatial one goes the way that a plan's ``"auto"`` takes, and `plan`
names it. The first call of a kind prepares it, so that one comes before a capture into a device's graph. `Handle`'s
calls stay the entry points'.

Folding. The vendors know two kinds of kept axes and 4 or 5 axes. Other calls are views of the same memory: axes of
length 1 are dropped, axes of one kind that are contiguous to each other in every array are merged, and what is left
is given as (R, K, R...) in spatial mode if there is one kept group, or as (R, K, K...) in per-activation mode if there
is one reduced group. Where no view serves, or the backend has no path for one, arrays are copied packed through axpby
in the workspace. That is never silent: `plan` lists the copies and the logger ``pybnorm.operations`` names each.

Host time. The first call with given shapes, strides, dtypes, devices and scalars is validated, and kept by the handle
(`MOST_PREPARED` of them). Later calls only check that memory does not overlap, and run in C. Calls with scalars of
other types than Python's and NumPy's numbers are validated each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pybnorm import _arguments
from pybnorm._core import Handle
from pybnorm.errors import ArgumentError
from pybnorm.operations import preparation, program
from pybnorm.operations.folding import Folded, fold
from pybnorm.operations.gradients import backward, backward_elemt, backward_frozen, backward_reduce, training_grad
from pybnorm.operations.normalization import (
    elemt,
    forward_inference,
    forward_inference_inv_variance,
    forward_training,
    gather_stats,
    stats,
)
from pybnorm.operations.preparation import MOST_PREPARED
from pybnorm.operations.program import RECIPES, Derived, Plan, _derived
from pybnorm.operations.vectors import (
    axpby,
    convert,
    fill,
    inverse_standard_deviation,
    multiply,
    relu,
    relu_backward,
    variance_from_inverse,
)
from pybnorm.operations.views import Axis

__all__ = [
    "MOST_PREPARED",
    "Derived",
    "Folded",
    "Plan",
    "axpby",
    "backward",
    "backward_elemt",
    "backward_frozen",
    "backward_reduce",
    "convert",
    "derive",
    "elemt",
    "fill",
    "fold",
    "forward_inference",
    "forward_inference_inv_variance",
    "forward_training",
    "gather_stats",
    "inverse_standard_deviation",
    "multiply",
    "plan",
    "relu",
    "relu_backward",
    "stats",
    "training_grad",
    "variance_from_inverse",
    "workspace_size",
]


def derive(dims: Sequence[int], dtype: object, axis: Axis = 1) -> Derived:
    """Shape and dtype of scale, bias and statistics.

    Parameters
    ----------
    dims : sequence of int
        Shape of x, rank 1 to 8.
    dtype : DataType, str or dtype
        dtype of x.
    axis : int or tuple of int
        The axes that parameters keep; any subset, negative ones count from the end.

    Returns
    -------
    Derived
        dims, of x's rank with 1 in the reduced axes; data_type, float64 for float64 x, else float32.

    Notes
    -----
    Makes no vendor call: vendors know two of the subsets only (`pybnorm.derive_bn_tensor_descriptor`). The rule for
    any is that of DirectML's ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``.

    Examples
    --------
    >>> pybnorm.operations.derive((8, 64, 32, 32), "f32", axis=(0, 1)).dims
    (8, 64, 1, 1)
    """
    shape = _arguments.dims(dims, low=1)
    kind = _arguments.data_type(dtype)
    return Derived(_derived(shape, _arguments.axes(axis, len(shape))), _arguments.derived_data_type(kind))


def plan(handle: Handle, operation: str, *arguments: Any, **options: Any) -> Plan:
    """The calls that an operation would make; nothing is executed, and no array's memory is read or written.

    Parameters
    ----------
    handle : Handle
    operation : str
        Name of an operation of this module, such as ``"backward_frozen"``.
    *arguments, **options
        Those of the operation, without `handle` and `workspace`. Arrays may be `pybnorm._arrays.Buffer` with any
        address, also 0: where arrays lie is not looked at, and overlaps are not.

    Returns
    -------
    Plan

    Examples
    --------
    >>> x, parameter = np.zeros((8, 64, 32, 32), np.float32), np.zeros((1, 64, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     plan = pybnorm.operations.plan(handle, "stats", x, mean=parameter)
    >>> plan.operation, plan.copies
    ('stats', ())
    """
    found = _prepared(handle, operation, arguments, options)
    return Plan(operation, found.nbytes, found.calls, found.copies)


def workspace_size(handle: Handle, operation: str, *arguments: Any, **options: Any) -> int:
    """Bytes of workspace that an operation needs, aligned to 64.

    Parameters
    ----------
    handle, operation, *arguments, **options
        As in `plan`.

    Returns
    -------
    int
        0 where none is needed.

    Examples
    --------
    >>> x, parameter = np.zeros((8, 64, 32, 32), np.float32), np.zeros((1, 64, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     nbytes = pybnorm.operations.workspace_size(handle, "stats", x, mean=parameter)
    >>> nbytes > 0
    True
    """
    return _prepared(handle, operation, arguments, options).nbytes


def _prepared(handle: Handle, operation: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> program.Prepared:
    operation = _arguments.text(operation, "operation")
    if operation not in RECIPES:
        raise ArgumentError("operation", operation, "one of " + ", ".join(RECIPES))
    if "workspace" in options:
        raise ArgumentError("workspace", "an argument of a query", "no workspace: its size is what is asked for")
    recipe = RECIPES[operation]
    return preparation.prepare(handle, recipe, recipe.bind(arguments, options))[0]
