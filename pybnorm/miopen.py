"""MIOpen's batch-norm calls by MIOpen's names and argument order, on every backend.

The calls of MIOpen's batch-norm page, plain and ``_V2``, in snake case. The mathematics is that of `pybnorm.Handle`;
what differs from MIOpen is what its documentation leaves open or its library gets wrong:

* Of a pair (running mean and variance, saved mean and inverse variance, estimated mean and variance) both are given or
  none. With ``strict=False`` they count as none where one is NULL, as MIOpen silently does.
* Inference without estimates normalizes by the batch, as MIOpen documents. Here both estimates must be absent, and the
  call is forward training without statistics, so it works where the vendor's own does not.
* alpha and beta are Python floats and blend on every backend. MIOpen reads ``float *`` whatever the data are and
  refuses all but 1 and 0, in training with a status that does not tell the cause.
* The batch variance enters the running variance unbiased, times m / (m - 1), as MIOpen computes and does not say. With
  m = 1 that is undefined: running statistics are refused, where MIOpen leaves the correction out.
* ``saved_inv_variance`` is 1 / sqrt(biased variance + epsilon), an inverse standard deviation.
* epsilon must be finite and not negative. Where variance + epsilon is 0 the result is that of the division: NaN where
  x is the mean, infinite elsewhere; MIOpen takes the absolute value first.
* The output pointers of backward are all required; MIOpen does not look at two of them.
* Mode is PER_ACTIVATION (0) or SPATIAL (1), MIOpen's two; it takes any other number for the first.
* Parameters of float64 data are float64, also in `derive_bn_tensor_descriptor`; MIOpen derives float32.

The ``_v2`` calls take a descriptor for each parameter. Parameters of data that are not float64 may each be float32,
float16 or bfloat16. Where all have the derived dtype, vendor symbols and workspace are the plain call's; else those of
`pybnorm.operations`, which widens 16-bit parameters in the workspace and rounds results once.

The calls with an activation, which MIOpen 3.5 added, are that library's own fused ones where the loaded library has
them, the mode is SPATIAL (its per-activation kernels leave the activation out and report success) and the parameters
have the derived dtype. Elsewhere they are composed: batch norm into scratch, rounded there to the data's dtype, and
the activation from there, so that of float16 and bfloat16 data the gradient's mask is that of the rounded value. RELU
is one call; CLIPPEDRELU and CLAMP are some ten of relu_backward, which picks the elements on one side of a bound, fill
and axpby, and exact but for the bounds' rounding. The activation comes first, alpha and beta blend its result.

MIOpen's newest additions, ``..._V3``, ``...Activation_V2`` and the two of ``...InvVariance``, are in neither 3.4.0 nor
3.5.1, and are composed here: of copies of the running statistics, and of the calls that there are. The library's own
``miopenBatchNormalizationForwardInferenceInvVariance`` is called where it has one.

Arguments of every call
-----------------------
handle : Handle
    Of any backend.
bn_mode : Mode
    `Mode.PER_ACTIVATION` or `Mode.SPATIAL`; their numbers are ``miopenBatchNormMode_t``'s.
..._desc : TensorDescriptor
    Of the handle's backend, rank 2 to 8; those of parameters as `derive_bn_tensor_descriptor` gives them.
data and parameters : int or array
    An address in memory of the handle's device, or an array that lies in memory as its descriptor says. None or 0 is
    NULL, where NULL is allowed.
workspace : array or (int, int), optional
    MIOpen has no such argument. Device backends need it for alpha and beta other than 1 and 0, for parameters of
    mixed dtypes, and for composed calls; without it they raise WorkspaceError, which says how many bytes. On the CPU
    pybnorm keeps its own.
strict : bool, default True
    Whether NULL in one of a pair is refused. False: as in MIOpen running and saved statistics are then neither read nor
    written, inference normalizes by the batch, and backward takes the statistics of x.

Errors name MIOpen's arguments, in snake case.
"""

from __future__ import annotations

import enum
import functools
import inspect
import numbers
import re
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

from pybnorm import _arguments, operations
from pybnorm import _core as core
from pybnorm._arrays import Buffer
from pybnorm._core import Handle, TensorDescriptor
from pybnorm.enums import Activation, Capability, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError
from pybnorm.operations import activated
from pybnorm.operations.elementwise import RELU, Limits
from pybnorm.operations.program import _need, region

__all__ = [
    "ActivationDescriptor", "ActivationMode", "batch_norm_backward_activation",
    "batch_norm_forward_inference_activation", "batch_norm_forward_inference_activation_inv_variance",
    "batch_norm_forward_training_activation", "batch_norm_forward_training_activation_v2",
    "batch_normalization_backward", "batch_normalization_backward_v2", "batch_normalization_forward_inference",
    "batch_normalization_forward_inference_inv_variance", "batch_normalization_forward_inference_v2",
    "batch_normalization_forward_training", "batch_normalization_forward_training_v2",
    "batch_normalization_forward_training_v3", "cumulative_average_factor", "derive_bn_tensor_descriptor",
]  # fmt: skip

_P = ParamSpec("_P")


class _Operand(NamedTuple):
    """One argument of MIOpen's, as it is here."""

    name: str
    descriptor: str
    """Descriptors of the ``_v2`` calls; the plain ones have one for all parameters."""
    optional: bool = False
    written: bool = False


OPERANDS = {
    "x": _Operand("x", "x_desc"),
    "dy": _Operand("dy", "dy_desc"),
    "y": _Operand("y", "y_desc", written=True),
    "dx": _Operand("dx", "dx_desc", written=True),
    "bn_scale": _Operand("scale", "scale_desc"),
    "bn_bias": _Operand("bias", "bias_desc"),
    "result_bn_scale_diff": _Operand("dscale", "scale_desc", written=True),
    "result_bn_bias_diff": _Operand("dbias", "bias_desc", written=True),
    "result_running_mean": _Operand("running_mean", "saved_mean_desc", True, True),
    "result_running_variance": _Operand("running_variance", "saved_var_desc", True, True),
    "prev_result_running_mean": _Operand("previous_mean", "saved_mean_desc", True),
    "prev_result_running_variance": _Operand("previous_variance", "saved_var_desc", True),
    "next_result_running_mean": _Operand("running_mean", "saved_mean_desc", True, True),
    "next_result_running_variance": _Operand("running_variance", "saved_var_desc", True, True),
    "result_save_mean": _Operand("saved_mean", "saved_mean_desc", True, True),
    "result_save_inv_variance": _Operand("saved_inv_variance", "saved_var_desc", True, True),
    "estimated_mean": _Operand("running_mean", "est_mean_desc", True),
    "estimated_variance": _Operand("running_variance", "est_variance_desc", True),
    "estimated_inv_variance": _Operand("inv_variance", "est_inv_variance_desc", True),
    "saved_mean": _Operand("saved_mean", "saved_mean_desc", True),
    "saved_inv_variance": _Operand("saved_inv_variance", "saved_var_desc", True),
}
_SCALARS = {name: name for name in ("alpha", "beta", "epsilon", "workspace")} | {
    "alpha_data_diff": "alpha",
    "beta_data_diff": "beta",
    "alpha_param_diff": "alpha_param",
    "beta_param_diff": "beta_param",
    "exp_avg_factor": "exponential_average_factor",
}
_DATA = ("x", "dy", "y", "dx")
_OF_ALL = ("bn_scale_bias_mean_var_desc", "bn_scale_bias_diff_desc")  # the plain calls' descriptor of parameters
_PAIRS = (
    ("result_running_mean", "result_running_variance"),
    ("result_save_mean", "result_save_inv_variance"),
    ("prev_result_running_mean", "prev_result_running_variance"),
    ("next_result_running_mean", "next_result_running_variance"),
    ("prev_result_running_mean", "next_result_running_mean"),
    ("prev_result_running_variance", "next_result_running_variance"),
    ("estimated_mean", "estimated_variance"),
    ("estimated_mean", "estimated_inv_variance"),
    ("saved_mean", "saved_inv_variance"),
)


def _of(operation: Operation) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """A function that has MIOpen's signature and documentation alone becomes the call."""

    def decorate(function: Callable[_P, None]) -> Callable[_P, None]:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        defaults = {p.name: p.default for p in parameters}
        front = tuple([p.name for p in parameters if p.kind != p.KEYWORD_ONLY])
        required = tuple([p.name for p in parameters if p.default is p.empty])

        @functools.wraps(function)
        def called(*positional: _P.args, **named: _P.kwargs) -> None:
            values = core.bound(defaults, front, required, positional, named)
            if values is None:
                values = signature.bind(*positional, **named).args  # raises Python's own TypeError
            _run(operation, dict(zip(defaults, values, strict=True)))

        called._operation = operation  # type: ignore[attr-defined]
        return called

    return decorate


def _form(
    plainer: Callable[..., None], changes: dict[str, str], doc: str, operation: Operation | None = None
) -> Callable[..., None]:
    """A call with some arguments of a plainer one replaced by others; `doc` says what these are, but for descriptors.

    It begins with MIOpen's name, which the call has in snake case. The operation is the plainer one's, unless given.
    `changes` has names of arguments, new ones separated by spaces.
    """
    parameters = []
    for parameter in inspect.signature(plainer).parameters.values():
        for new in changes.get(parameter.name, parameter.name).split():
            described = new == parameter.name or parameter.name.endswith("_desc")
            parameters.append(parameter.replace(name=new, annotation=parameter.annotation if described else Any))
    names, before = [p.name for p in parameters], inspect.signature(plainer).parameters
    text, _, example = inspect.cleandoc(doc).partition("\n\nExamples\n")
    text += "" if "\nParameters\n" in text else "\n\nParameters\n----------"
    told = {told for line in text.splitlines() for told in line.partition(" : ")[0].split(", ")}
    for new in [n for n in names if n not in before and n not in told]:
        of = [n for n, operand in OPERANDS.items() if operand.descriptor == new and n in names]
        kind = "ActivationDescriptor or None\n    None is PASTHRU."
        text += f"\n{new} : " + (f"TensorDescriptor\n    Of {' and '.join(f'`{n}`' for n in of)}." if of else kind)
        told.add(new)
    text += f"\n{', '.join(n for n in names if n not in told)}\n    As in `{plainer.__name__}`.\n\nExamples\n"

    def function() -> None: ...

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    name = re.sub("_?([A-Z])", r"_\1", doc.split("``")[1].removeprefix("miopen")).lower().lstrip("_")
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text + (example or f"--------\nThat of `{plainer.__name__}`, with the other arguments.")
    return _of(operation or plainer._operation)(function)  # type: ignore[attr-defined]


def cumulative_average_factor(n: int) -> float:
    """The exponential average factor that makes running statistics the plain average over all calls so far.

    ``1 / (1 + n)``: with it the running mean after call n is the mean of the n + 1 batch means. MIOpen's and cuDNN's
    pages advise it; neither library computes it, a call uses the factor as given.

    Parameters
    ----------
    n : int
        Calls before this one: 0 for the first, which so replaces the initial values.

    Returns
    -------
    float

    Examples
    --------
    >>> [round(pybnorm.miopen.cumulative_average_factor(n), 3) for n in range(3)]
    [1.0, 0.5, 0.333]
    """
    return 1 / (1 + _arguments.count(n, "n", 0))


def derive_bn_tensor_descriptor(x_desc: TensorDescriptor, bn_mode: object) -> TensorDescriptor:
    """``miopenDeriveBNTensorDescriptor``: the descriptor of scale, bias and statistics.

    Parameters
    ----------
    x_desc : TensorDescriptor
        Rank 2 to 8; MIOpen itself writes out of bounds below 4 and refuses more than 5.
    bn_mode : Mode

    Returns
    -------
    TensorDescriptor
        (1, C, 1...) for SPATIAL, (1, C, spatial...) for PER_ACTIVATION; float64 for float64 data, else float32;
        packed. MIOpen's first argument, the descriptor to be set, is the result here.

    Notes
    -----
    Vendor symbols: see `pybnorm.derive_bn_tensor_descriptor`.

    Examples
    --------
    >>> x_desc = pybnorm.TensorDescriptor("onednn", "f16", (8, 64, 32, 32))
    >>> pybnorm.miopen.derive_bn_tensor_descriptor(x_desc, "spatial")
    <TensorDescriptor onednn f32 dims=(1, 64, 1, 1) strides=(64, 1, 1, 1)>
    """
    return core.derive_bn_tensor_descriptor(x_desc, _mode_of(bn_mode))


# ---------------------------------------------------------------- forward training


@_of(Operation.FORWARD_TRAINING)
def batch_normalization_forward_training(
    handle: Handle, bn_mode: object, alpha: float, beta: float, x_desc: TensorDescriptor, x: Any,
    y_desc: TensorDescriptor, y: Any, bn_scale_bias_mean_var_desc: TensorDescriptor, bn_scale: Any, bn_bias: Any,
    exp_avg_factor: float, result_running_mean: Any, result_running_variance: Any, epsilon: float,
    result_save_mean: Any, result_save_inv_variance: Any, *, workspace: Any = None, strict: bool = True,
) -> None:  # fmt: skip
    """``miopenBatchNormalizationForwardTraining``: normalize by the statistics of the batch.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``,
    ``running = (1 - factor) * running + factor * batch``.

    Parameters
    ----------
    handle, bn_mode, workspace, strict
        See the module.
    alpha, beta : float
        With beta 0 the prior y is not read.
    x_desc, y_desc : TensorDescriptor
        One shape and dtype, each its own strides.
    x, y : int or array
        y is written.
    bn_scale_bias_mean_var_desc : TensorDescriptor
        Of all parameters: the derived shape; float64 for float64 data, else float32.
    bn_scale, bn_bias : int or array
    exp_avg_factor : float
        From 0 to 1, used as given; `cumulative_average_factor` for a plain average.
    result_running_mean, result_running_variance : int or array or None
        Updated in place; both or none.
    epsilon : float
    result_save_mean, result_save_inv_variance : int or array or None
        Written; both or none.

    Notes
    -----
    Vendor symbols: see `pybnorm.batch_normalization_forward_training`.
    Workspace: `Handle.workspace_size` of `Operation.FORWARD_TRAINING`.

    Examples
    --------
    >>> from pybnorm import miopen
    >>> x = np.float32([[[[1, 2, 3]]]])
    >>> y, (scale, bias, mean, variance) = np.empty_like(x), np.ones((4, 1), np.float32)
    >>> data = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    >>> derived = miopen.derive_bn_tensor_descriptor(data, "spatial")
    >>> with pybnorm.Handle("onednn") as handle:
    ...     miopen.batch_normalization_forward_training(
    ...         handle, "spatial", 1, 0, data, x, data, y, derived, scale, bias, 0.5, mean, variance, 0, None, None
    ...     )
    >>> y.round(3), mean, variance
    (array([[[[-0.225,  1.   ,  2.225]]]], dtype=float32), array([1.5], dtype=float32), array([1.], dtype=float32))
    """


batch_normalization_forward_training_v2 = _form(
    batch_normalization_forward_training,
    {"bn_scale_bias_mean_var_desc": "scale_desc bias_desc saved_mean_desc saved_var_desc"},
    """``miopenBatchNormalizationForwardTraining_V2``: a descriptor for each parameter, dtypes may differ.""",
)
batch_normalization_forward_training_v3 = _form(
    batch_normalization_forward_training_v2,
    {
        "result_running_mean": "prev_result_running_mean prev_result_running_variance",
        "result_running_variance": "next_result_running_mean next_result_running_variance",
    },
    """``miopenBatchNormalizationForwardTraining_V3``: running statistics are read from one pair and written to another.

    ``next = (1 - factor) * prev + factor * batch``

    Parameters
    ----------
    prev_result_running_mean, prev_result_running_variance : int or array or None
        Read only. They may be the next ones, which is the call of ``_v2``; a part of them may not.
    next_result_running_mean, next_result_running_variance : int or array or None
        Written. All four are given or none.
    """,
)


# ---------------------------------------------------------------- forward inference


batch_normalization_forward_inference = _form(
    batch_normalization_forward_training,
    {"exp_avg_factor": "estimated_mean estimated_variance", "result_running_mean": "", "result_running_variance": ""}
    | {"result_save_mean": "", "result_save_inv_variance": ""},
    """``miopenBatchNormalizationForwardInference``: normalize by estimated statistics, or the batch's without them.

    ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``. Workspace:
    `Handle.workspace_size` of `Operation.FORWARD_INFERENCE`, without estimates of `Operation.FORWARD_TRAINING` with
    ``running=False, saved=False``. Vendor symbols: see `pybnorm.batch_normalization_forward_inference`.

    Parameters
    ----------
    estimated_mean, estimated_variance : int or array or None
        A mean and a variance, not an inverse standard deviation. Both, or none: then those of x are used, the
        variance biased, and only y is written.
    """,
    Operation.FORWARD_INFERENCE,
)
batch_normalization_forward_inference_v2 = _form(
    batch_normalization_forward_inference,
    {"bn_scale_bias_mean_var_desc": "scale_desc bias_desc est_mean_desc est_variance_desc"},
    """``miopenBatchNormalizationForwardInference_V2``: a descriptor for each parameter, dtypes may differ.""",
)
batch_normalization_forward_inference_inv_variance = _form(
    batch_normalization_forward_inference_v2,
    {"est_variance_desc": "est_inv_variance_desc", "estimated_variance": "estimated_inv_variance", "epsilon": ""},
    """``miopenBatchNormalizationForwardInferenceInvVariance``: normalize by an inverse standard deviation.

    ``y = alpha * (scale * (x - mean) * inv_variance + bias) + beta * y``

    Parameters
    ----------
    estimated_mean, estimated_inv_variance : int or array or None
        The latter is ``1 / sqrt(variance + epsilon)``. Both, or none: then those of x are used, with epsilon 1e-5.
    """,
)


# ---------------------------------------------------------------- backward


@_of(Operation.BACKWARD)
def batch_normalization_backward(
    handle: Handle, bn_mode: object, alpha_data_diff: float, beta_data_diff: float, alpha_param_diff: float,
    beta_param_diff: float, x_desc: TensorDescriptor, x: Any, dy_desc: TensorDescriptor, dy: Any,
    dx_desc: TensorDescriptor, dx: Any, bn_scale_bias_diff_desc: TensorDescriptor, bn_scale: Any,
    result_bn_scale_diff: Any, result_bn_bias_diff: Any, epsilon: float, saved_mean: Any, saved_inv_variance: Any,
    *, workspace: Any = None, strict: bool = True,
) -> None:  # fmt: skip
    """``miopenBatchNormalizationBackward``: gradients of forward training.

    With ``xhat = (x - mean) * inv``: ``dbias = sum(dy)``, ``dscale = sum(dy * xhat)``,
    ``dx = scale * inv * (dy - dbias / m - xhat * dscale / m)``; dx is blended by the data pair, dscale and dbias by
    the parameter pair.

    Parameters
    ----------
    handle, bn_mode, workspace, strict
        See the module.
    alpha_data_diff, beta_data_diff, alpha_param_diff, beta_param_diff : float
        With a beta of 0 its prior is not read.
    x_desc, dy_desc, dx_desc : TensorDescriptor
        One shape and dtype, each its own strides.
    x, dy, dx : int or array
        dx is written.
    bn_scale_bias_diff_desc : TensorDescriptor
        Of all parameters: the derived shape; float64 for float64 data, else float32.
    bn_scale : int or array
    result_bn_scale_diff, result_bn_bias_diff : int or array
        Written; both required.
    epsilon : float
        Used only without saved statistics; must then be that of the forward call.
    saved_mean, saved_inv_variance : int or array or None
        As forward training wrote them, taken as they are; both, or none: computed from x.

    Notes
    -----
    Vendor symbols: see `pybnorm.batch_normalization_backward`.
    Workspace: `Handle.workspace_size` of `Operation.BACKWARD`.

    Examples
    --------
    >>> from pybnorm import miopen
    >>> x, dy = np.float32([[[[1, 2, 3]]]]), np.float32([[[[0, 0, 1]]]])
    >>> dx, (scale, dscale, dbias) = np.empty_like(x), np.ones((3, 1), np.float32)
    >>> data = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    >>> derived = miopen.derive_bn_tensor_descriptor(data, "spatial")
    >>> with pybnorm.Handle("onednn") as handle:
    ...     miopen.batch_normalization_backward(
    ...         handle, "spatial", 1, 0, 1, 0, data, x, data, dy, data, dx, derived, scale, dscale, dbias, 0, None, None
    ...     )
    >>> dx.round(3), dscale.round(3), dbias
    (array([[[[ 0.204, -0.408,  0.204]]]], dtype=float32), array([1.225], dtype=float32), array([1.], dtype=float32))
    """


batch_normalization_backward_v2 = _form(
    batch_normalization_backward,
    {"bn_scale_bias_diff_desc": "scale_desc bias_desc saved_mean_desc saved_var_desc"},
    """``miopenBatchNormalizationBackward_V2``: a descriptor for each parameter, dtypes may differ.""",
)


# ---------------------------------------------------------------- the calls with an activation


class ActivationMode(enum.IntEnum):
    """The activations that MIOpen's batch norm takes, with ``miopenActivationMode_t``'s numbers."""

    PASTHRU = 0
    """None."""
    RELU = 3
    """``max(x, 0)``"""
    CLIPPEDRELU = 7
    """``min(max(x, 0), alpha)``"""
    CLAMP = 10
    """``min(max(x, alpha), beta)``"""


class ActivationDescriptor(NamedTuple):
    """The activation that ``miopenSetActivationDescriptor`` sets.

    Parameters
    ----------
    mode : ActivationMode
    alpha, beta : float
        The bounds that `mode` reads; others are ignored, as MIOpen does. CLIPPEDRELU's must be above 0, CLAMP's beta
        above its alpha.

    Examples
    --------
    >>> pybnorm.miopen.ActivationDescriptor(pybnorm.miopen.ActivationMode.CLIPPEDRELU, alpha=6.0)
    ActivationDescriptor(mode=<ActivationMode.CLIPPEDRELU: 7>, alpha=6.0, beta=0.0)
    """

    mode: ActivationMode
    alpha: float = 0.0
    beta: float = 0.0


batch_norm_forward_training_activation = _form(
    batch_normalization_forward_training_v2,
    {"result_save_inv_variance": "result_save_inv_variance activ_desc"},
    """``miopenBatchNormForwardTrainingActivation``: forward training, then an activation.

    ``y = alpha * act(scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``

    Examples
    --------
    >>> from pybnorm import miopen
    >>> x = np.float32([[[[1, 2, 3]]]])
    >>> y, (scale, bias, mean, variance) = np.empty_like(x), np.ones((4, 1), np.float32)
    >>> data = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
    >>> derived = 4 * [miopen.derive_bn_tensor_descriptor(data, "spatial")]
    >>> relu = miopen.ActivationDescriptor(miopen.ActivationMode.RELU)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     miopen.batch_norm_forward_training_activation(
    ...         handle, "spatial", 1, 0, data, x, data, y, *derived, scale, bias,
    ...         0.5, mean, variance, 0, None, None, relu,
    ...     )
    >>> y.round(3), mean, variance
    (array([[[[0.   , 1.   , 2.225]]]], dtype=float32), array([1.5], dtype=float32), array([1.], dtype=float32))
    """,
)
batch_norm_forward_training_activation_v2 = _form(
    batch_normalization_forward_training_v3,
    {"result_save_inv_variance": "result_save_inv_variance activ_desc"},
    """``miopenBatchNormForwardTrainingActivation_V2``: the call of ``..._v3``, then an activation.""",
)
batch_norm_forward_inference_activation = _form(
    batch_normalization_forward_inference_v2,
    {"epsilon": "epsilon activ_desc"},
    """``miopenBatchNormForwardInferenceActivation``: forward inference, then an activation.""",
)
batch_norm_forward_inference_activation_inv_variance = _form(
    batch_normalization_forward_inference_inv_variance,
    {"estimated_inv_variance": "estimated_inv_variance activ_desc"},
    """``miopenBatchNormForwardInferenceActivationInvVariance``: ``..._inv_variance``, then an activation.""",
)
batch_norm_backward_activation = _form(
    batch_normalization_backward_v2,
    {"bn_scale": "bn_scale bn_bias", "saved_inv_variance": "saved_inv_variance activ_desc"},
    """``miopenBatchNormBackwardActivation``: gradients of forward training followed by an activation.

    dy is the gradient at the activation's output. What `batch_normalization_backward` has for dy is here dy where
    ``0 < scale * xhat + bias`` (RELU), ``0 < ... <= alpha`` (CLIPPEDRELU) or ``alpha < ... <= beta`` (CLAMP), else 0.

    Parameters
    ----------
    bn_bias : int or array or None
        Required but with PASTHRU, which does not read it.
    """,
)


# ---------------------------------------------------------------- what the calls do


_NO_ACTIVATION: tuple[dict[str, Any], Limits | None] = ({}, None)
_BOUNDS = ("activation_low", "activation_high")
_NEUTRAL = {
    ActivationMode.PASTHRU: (Activation.NONE, ()),
    ActivationMode.RELU: (Activation.RELU, ()),
    ActivationMode.CLIPPEDRELU: (Activation.CLIPPED_RELU, _BOUNDS[1:]),
    ActivationMode.CLAMP: (Activation.CLAMP, _BOUNDS),
}


def _run(operation: Operation, given: dict[str, Any]) -> None:
    """Make a call by MIOpen's names, by which `given` has its arguments."""
    mode, handle = _mode_of(given["bn_mode"]), given["handle"]
    _arguments.instance(handle, Handle, "handle", "a Handle")
    strict = _arguments.boolean(given["strict"], "strict")
    shared = next((name for name in _OF_ALL if name in given), None)
    found: dict[str, Buffer | None] = {}
    act, limits = _NO_ACTIVATION
    for name, operand in OPERANDS.items():
        if name not in given or (name == "bn_bias" and operation == Operation.BACKWARD and not act):
            continue
        described = shared if shared is not None and name not in _DATA else operand.descriptor
        absent = operand.optional and (given[name] is None or _arguments.index(given[name]) == 0)
        found[name] = None if absent else _buffer(handle, name, given[name], described, given[described])
        if name == "x":
            act, limits = _activation(given.get("activ_desc"), _need(found[name]))
    for first, second in _PAIRS:
        if first in found and second in found:
            if not strict and None in (found[first], found[second]):
                found[first] = found[second] = None
            _arguments.pair(first, found[first], second, found[second])
    names = {OPERANDS[name].name: name for name in found} | {_SCALARS[n]: n for n in given if n in _SCALARS}
    arrays = {OPERANDS[name].name: buffer for name, buffer in found.items()}
    options = {_SCALARS[name]: value for name, value in given.items() if name in _SCALARS}
    try:
        _call(handle, operation, mode, arrays, options, act, limits)
    except ClosedError:
        raise
    except ArgumentError as error:
        regions: dict[bool, list[_arguments.Region]] = {True: [], False: []}
        for name, buffer in found.items():
            if buffer is not None and buffer.pointer:
                regions[OPERANDS[name].written].append(region(name, buffer))
        _arguments.disjoint(regions[True], regions[False])  # in MIOpen's words, if that is what was wrong
        raise type(error)(names.get(error.argument, error.argument), error.value, error.allowed) from error


def _call(
    handle: Handle, operation: Operation, mode: Mode, arrays: dict[str, Any], options: dict[str, Any],
    act: dict[str, Any], limits: Limits | None,
) -> None:  # fmt: skip
    """The vendor's own call where it takes all this, else one of `pybnorm.operations`, or a composed one."""
    x: Buffer = arrays["x"]
    if operation == Operation.FORWARD_INFERENCE and arrays["running_mean"] is None:
        operation = Operation.FORWARD_TRAINING
        estimates = ("running_mean", "running_variance", "inv_variance")
        arrays = {name: array for name, array in arrays.items() if name not in estimates}
    previous = [(n, arrays.pop(n)) for n in ("previous_mean", "previous_variance") if n in arrays]
    if any(b is not None and b.pointer != arrays[n.replace("previous", "running")].pointer for n, b in previous):
        arrays |= dict(previous)
    options = {"epsilon": 1e-5, **options}  # which inference by an inverse standard deviation has none of
    axis, derived = _arguments.kept_axes(len(x.dims), mode), _arguments.derived_data_type(x.dtype)
    uniform = all(array is None or name in _DATA or array.dtype == derived for name, array in arrays.items())
    plain = not {"previous_mean", "inv_variance"} & arrays.keys()  # what vendors' entry points take
    fused = uniform and plain
    if fused and act:
        layout = _arguments.layout_of(x.dims, x.strides)
        bits, _ = core.capability(handle.backend, operation, mode, x.dtype, layout, len(x.dims))
        fused = Capability.ACTIVATION in bits
    if fused:
        getattr(handle, operation.name.lower())(**arrays, mode=mode, **options, **act)
        return
    options["axis"] = axis
    if plain and not act:
        getattr(operations, operation.name.lower())(handle, **arrays, **options)
    elif operation == Operation.BACKWARD and limits is not None:
        activated.activated_backward(handle, limits=limits, **options, **arrays)
    else:
        training = operation == Operation.FORWARD_TRAINING
        activated.activated_forward(handle, limits=limits, training=training, **options, **arrays)


def _buffer(handle: Handle, name: str, value: Any, desc_name: str, descriptor: TensorDescriptor) -> Buffer:
    """The array or address that an argument is, as its descriptor says that it lies."""
    _arguments.instance(descriptor, TensorDescriptor, desc_name, "a TensorDescriptor")
    if descriptor.closed:
        raise ClosedError(desc_name)
    if descriptor.backend != handle.backend:
        given = f"a descriptor of backend {descriptor.backend}"
        raise ArgumentError(desc_name, given, f"one of backend {handle.backend}")
    if value is None or issubclass(type(value), numbers.Integral):
        address = _arguments.pointer(0 if value is None else value, name)
        device_type = handle.library.device_type
        return Buffer(address, descriptor.dims, descriptor.strides, descriptor.dtype, device_type, -1, True, descriptor)
    buffer = handle.buffer(value, name)
    if buffer.dtype != descriptor.dtype:
        raise ArgumentTypeError(name, f"dtype {buffer.dtype.short}", f"{descriptor.dtype.short}, as {desc_name} says")
    lies, said = ([(d, s) for d, s in zip(a.dims, a.strides, strict=True) if d != 1] for a in (buffer, descriptor))
    if lies != said:
        allowed = f"dims {descriptor.dims} with strides {descriptor.strides}, as {desc_name} says"
        given = f"dims {buffer.dims} with strides {buffer.strides}"
        raise ArgumentError(name, given, f"{allowed}; axes of length 1 may be left out")
    return buffer._replace(dims=descriptor.dims, strides=descriptor.strides)


def _mode_of(bn_mode: object) -> Mode:
    """One of MIOpen's two modes."""
    mode = _arguments.mode(bn_mode, "bn_mode")
    if mode == Mode.SPATIAL_PERSISTENT:
        raise ArgumentError("bn_mode", mode, "Mode.PER_ACTIVATION or Mode.SPATIAL, MIOpen's two modes")
    return mode


def _activation(descriptor: object, x: Buffer) -> tuple[dict[str, Any], Limits | None]:
    """The activation as `Handle` takes it, and as operations do."""
    if descriptor is None:
        return _NO_ACTIVATION
    if not issubclass(type(descriptor), ActivationDescriptor):
        raise ArgumentTypeError("activ_desc", descriptor, "an ActivationDescriptor or None")
    assert isinstance(descriptor, ActivationDescriptor)
    try:
        mode = ActivationMode(descriptor.mode)
    except ValueError:
        allowed = ", ".join(f"ActivationMode.{m.name}" for m in ActivationMode)
        allowed = f"one of {allowed}: batch norm takes no other"
        raise ArgumentError("activ_desc", f"mode {descriptor.mode!r}", allowed) from None
    kind, names = _NEUTRAL[mode]
    bounds = dict(zip(names, (descriptor.alpha, descriptor.beta), strict=False))
    try:
        found, low, high = _arguments.activation(kind, bounds.get(_BOUNDS[0]), bounds.get(_BOUNDS[1]), x.dtype)
    except ArgumentError as error:
        words = dict(zip(names, ("activ_desc.alpha", "activ_desc.beta"), strict=False))
        raise type(error)(words.get(error.argument, error.argument), error.value, error.allowed) from error
    if found == Activation.NONE:
        return _NO_ACTIVATION
    return {"activation": found, **bounds}, RELU if found == Activation.RELU else (low, high, 0.0)
