"""DirectML's four batch normalization operators, by their names, on every backend.

================================================  ========  ==========================================
function                                          level     operator description
================================================  ========  ==========================================
`batch_normalization`                             1.0       ``DML_BATCH_NORMALIZATION_OPERATOR_DESC``
`batch_normalization_grad`                        3.1       ``DML_BATCH_NORMALIZATION_GRAD_OPERATOR_DESC``
`batch_normalization_training`                    4.1       ``DML_BATCH_NORMALIZATION_TRAINING_OPERATOR_DESC``
`batch_normalization_training_grad`               4.1       ``DML_BATCH_NORMALIZATION_TRAINING_GRAD_OPERATOR_DESC``
================================================  ========  ==========================================

"Level" is the ``DML_FEATURE_LEVEL`` that introduced it. Arguments are the fields of the description in snake_case
without "Tensor", in the order of the description. What all of them require, as DirectML does:

* one DataType, float32 or float16, for all tensors, statistics too;
* one DimensionCount for all, 1 to 8 (before feature level 3.1 `batch_normalization` took 4 only);
* each size of a parameter tensor is 1, which broadcasts (and is summed over in a gradient), or that of the input. So
  any subset of the axes can carry parameters, not only the channels.

The one thing more that is asked here: parameter tensors are contiguous. float16 parameters are widened to float32 on
the device, and results in float16 are rounded once.

Variances are variances, biased, to which epsilon is added: not inverse standard deviations. "The gradient of a
preceding layer" in DirectML's text is the gradient with respect to this operator's output, from the layer after it.

`workspace` is an array of bytes or (address, bytes) of at least `workspace_size` bytes, aligned to 64; it is what
DirectML calls the temporary resource. None will do on CPU backends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import Handle
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.operations import elementwise
from pybnorm.operations.preparation import Recipe, alias, operation, prepare
from pybnorm.operations.program import Program, unsupported

__all__ = [
    "ACTIVATIONS", "Activation", "batch_normalization", "batch_normalization_grad", "batch_normalization_training",
    "batch_normalization_training_grad", "workspace_size",
]  # fmt: skip

Dims = tuple[int, ...]
_OPERATORS: dict[str, Recipe] = {}

ACTIVATIONS = (
    "celu", "elu", "gelu", "hard_sigmoid", "identity", "leaky_relu", "linear", "parametric_softplus", "relu",
    "scaled_elu", "scaled_tanh", "shrink", "sigmoid", "softplus", "softsign", "tanh", "thresholded_relu",
)  # fmt: skip
"""Activations that DirectML can fuse into these operators: the X of ``DML_OPERATOR_ACTIVATION_X``."""


class Activation(NamedTuple):
    """A fused activation, ``DML_OPERATOR_ACTIVATION_<KIND>``.

    ``identity``, ``linear`` (``alpha * value + beta``) and ``relu`` (``max(value, 0)``) are computed; the others are
    known by name and refused with `UnsupportedError`, because no backend offers a primitive for them yet.
    """

    kind: str
    """One of `ACTIVATIONS`."""
    alpha: float = 1.0
    """Of ``linear``."""
    beta: float = 0.0
    """Of ``linear``."""


@operation("input mean variance scale bias output", _OPERATORS)
def batch_normalization(
    p: Program, input: Any, mean: Any, variance: Any, scale: Any, bias: Any, output: Any, spatial: bool = True,
    epsilon: float = 1e-5, fused_activation: Activation | str | None = None, *, workspace: Any = None,
) -> None:  # fmt: skip
    """Normalize by given statistics.

    ``output = fused_activation(scale * (input - mean) / sqrt(variance + epsilon) + bias)``

    Parameters
    ----------
    input : array, rank 1 to 8
        float32 or float16.
    mean, variance, scale, bias : array, rank and dtype of `input`
        Each size 1 or that of `input`. The four may differ in their sizes.
    output : array, shape and dtype of `input`
        Written.
    spatial : bool
        False is the caller's word that statistics are given per location: the last two sizes of `mean` and `variance`
        must not broadcast then. DirectML deprecated the field at feature level 4.0 and ignores it since; True checks
        nothing and changes nothing.
    epsilon : float
        Finite, at least 0.
    fused_activation : Activation, str or None
        A name alone means an `Activation` of that kind.

    Notes
    -----
    Calls (`pybnorm.operations`): forward_inference. Where the four differ in their sizes, first one forward_inference
    on zeros for each that is smaller than the union of them, which spreads it; for ``linear``, multiply and fill on
    scale and bias; for ``relu``, forward_inference into scratch and relu from there.

    Examples
    --------
    >>> x, output = np.float32([[[1, 2, 3]]]), np.empty((1, 1, 3), np.float32)
    >>> mean, variance, scale, bias = np.float32([2, 1, 1, 0]).reshape(4, 1, 1, 1)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.directml.batch_normalization(
    ...         handle, x, mean, variance, scale, bias, output, epsilon=0, fused_activation="relu"
    ...     )
    >>> output
    array([[[0., 0., 1.]]], dtype=float32)
    """
    x = _data(p, "input", input)
    given = {"mean": mean, "variance": variance, "scale": scale, "bias": bias}
    vectors = {name: _parameter(p, name, array, x) for name, array in given.items()}
    y = _data(p, "output", output, x, output=True)
    if not _arguments.boolean(spatial, "spatial"):
        for name in ("mean", "variance"):
            if vectors[name].dims[-2:] != x.dims[-2:]:
                allowed = f"Height and Width of input, {x.dims[-2:]}, because spatial is False"
                raise ArgumentError(name, f"dims {vectors[name].dims}", allowed)
    activation = _activation(p.handle, fused_activation, "batch_normalization")
    axis = _kept(*(v.dims for v in vectors.values()))
    spread = _spread(p, vectors, tuple(d if a in axis else 1 for a, d in enumerate(x.dims)))
    gain, shift = _linear(p, activation, spread["scale"], spread["bias"])
    target = p.scratch_like(y) if activation.kind == "relu" else y  # rounding to y's dtype commutes with max(value, 0)
    p.then("forward_inference", x, gain, shift, spread["mean"], spread["variance"], target, epsilon=epsilon, axis=axis)
    if target is not y:
        elementwise.relu(p, target, y)


@operation(
    "input input_gradient mean variance scale output_gradient output_scale_gradient output_bias_gradient", _OPERATORS
)
def batch_normalization_grad(
    p: Program, input: Any, input_gradient: Any, mean: Any, variance: Any, scale: Any, output_gradient: Any,
    output_scale_gradient: Any, output_bias_gradient: Any, epsilon: float = 1e-5, *, workspace: Any = None,
    _operation: str = "backward_frozen",
) -> None:  # fmt: skip
    """Gradients of `batch_normalization`: the statistics are constants.

    ``output_gradient = input_gradient * scale / sqrt(variance + epsilon)``,
    ``output_scale_gradient = sum(input_gradient * (input - mean) / sqrt(variance + epsilon))``,
    ``output_bias_gradient = sum(input_gradient)``, the sums over the axes in which the parameters have size 1.

    Parameters
    ----------
    input, input_gradient : array, rank 1 to 8, one shape
        float32 or float16.
    mean, variance, scale : array, rank and dtype of `input`, one shape
        Each size 1 or that of `input`.
    output_gradient : array, shape and dtype of `input`
        Written.
    output_scale_gradient, output_bias_gradient : array, shape and dtype of `mean`
        Written. As in DirectML, no output is optional.
    epsilon : float
        Finite, at least 0.

    Notes
    -----
    Calls (`pybnorm.operations`): backward_frozen; its workspace.

    Examples
    --------
    >>> x, dy, dx = np.float32([[[1, 2, 3]]]), np.float32([[[0, 0, 1]]]), np.empty((1, 1, 3), np.float32)
    >>> mean, variance, scale, dscale, dbias = np.ones((5, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.directml.batch_normalization_grad(
    ...         handle, x, dy, mean, variance, scale, dx, dscale, dbias, epsilon=0
    ...     )
    >>> dx, dscale.ravel(), dbias.ravel()
    (array([[[0., 0., 1.]]], dtype=float32), array([2.], dtype=float32), array([1.], dtype=float32))
    """
    x = _data(p, "input", input)
    dy = _data(p, "input_gradient", input_gradient, x)
    mu = _parameter(p, "mean", mean, x)
    v, s = (_parameter(p, n, a, x, like=("mean", mu)) for n, a in (("variance", variance), ("scale", scale)))
    dx = _data(p, "output_gradient", output_gradient, x, output=True)
    given = {"output_scale_gradient": output_scale_gradient, "output_bias_gradient": output_bias_gradient}
    ds, db = (_parameter(p, n, a, x, like=("mean", mu), output=True) for n, a in given.items())
    results = {"dx": dx, "dscale": ds, "dbias": db}
    p.then(_operation, x, dy, scale=s, mean=mu, variance=v, **results, epsilon=epsilon, axis=_kept(mu.dims))


@operation("input scale bias fused_add output output_mean output_variance", _OPERATORS)
def batch_normalization_training(
    p: Program, input: Any, scale: Any, bias: Any, fused_add: Any, output: Any, output_mean: Any, output_variance: Any,
    epsilon: float = 1e-5, fused_activation: Activation | str | None = None, *, workspace: Any = None,
) -> None:  # fmt: skip
    """Normalize by the batch's own statistics, and return them.

    ``output = fused_activation(scale * (input - mean) / sqrt(variance + epsilon) + bias + fused_add)``; mean and
    biased variance are taken over the axes in which `scale` has size 1.

    Parameters
    ----------
    scale, bias : array, rank and dtype of `input`, one shape
        Each size 1 or that of `input`.
    fused_add : array, shape and dtype of `input`, or None
        Added before the activation.
    output_mean, output_variance : array, shape and dtype of `scale`
        Written. The variance is the biased one, also where only one element goes into it: 0 then.
    input, output, epsilon, fused_activation
        As in `batch_normalization`.

    Notes
    -----
    Calls (`pybnorm.operations`): axpby to copy `fused_add`; forward_training with running statistics of factor 1,
    whose variance is the unbiased one, and multiply by (m - 1) / m; multiply and fill on scale and bias for
    ``linear``; for ``relu`` all that into scratch instead of `output`, and relu from there. No digit of the variance is
    lost, as would be in ``1 / inv_variance**2 - epsilon``.

    Examples
    --------
    >>> x, output = np.float32([[[1, 2, 3]]]), np.empty((1, 1, 3), np.float32)
    >>> scale, bias, mean, variance = np.ones((4, 1, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.directml.batch_normalization_training(
    ...         handle, x, scale, bias, None, output, mean, variance, epsilon=0
    ...     )
    >>> output.round(3), mean.ravel(), variance.ravel().round(3)
    (array([[[-0.225,  1.   ,  2.225]]], dtype=float32), array([2.], dtype=float32), array([0.667], dtype=float32))
    """
    x = _data(p, "input", input)
    s = _parameter(p, "scale", scale, x)
    b = _parameter(p, "bias", bias, x, like=("scale", s))
    z = None if fused_add is None else _data(p, "fused_add", fused_add, x)
    y = _data(p, "output", output, x, output=True)
    given = {"output_mean": output_mean, "output_variance": output_variance}
    mean, variance = (_parameter(p, n, a, x, like=("scale", s), output=True) for n, a in given.items())
    activation = _activation(p.handle, fused_activation, "batch_normalization_training")
    axis = _kept(s.dims)
    count = _arguments.numel(x.dims) // _arguments.numel(s.dims)
    gain, shift = _linear(p, activation, s, b)
    target = p.scratch_like(y) if activation.kind == "relu" else y
    if z is not None:
        p.then("axpby", 1.0, z, 0.0, target)
    options: dict[str, Any] = {"beta": 0.0 if z is None else activation.alpha, "epsilon": epsilon, "axis": axis}
    options |= {"saved_mean": mean, "saved_inv_variance": _vector(p, s.dims)}
    unbiased, factor = _vector(p, s.dims, 0.0), _vector(p, s.dims, float(count > 1))
    if count > 1:  # of factor 1, but 0 * NaN would still be NaN
        options |= {"running_mean": _vector(p, s.dims, 0.0), "running_variance": unbiased}
        options["exponential_average_factor"] = 1.0
    p.then("forward_training", x, gain, shift, target, **options)
    if target is not y:
        elementwise.relu(p, target, y)
    if count > 1:
        p.then("multiply", unbiased, factor, variance, alpha=(count - 1) / count)
    else:  # times 0: NaN where the one element is not finite
        p.then("multiply", mean, factor, variance)


batch_normalization_training_grad = alias(
    batch_normalization_grad,
    "batch_normalization_training_grad",
    """Gradients of `batch_normalization_training` without its fused parts.

    With ``c = 1 / sqrt(variance + epsilon)`` and averages over the axes in which the parameters have size 1:
    ``output_gradient = scale * c * (input_gradient - average(input_gradient) - (input - mean) * c**2 *
    average(input_gradient * (input - mean)))``; the other two as in `batch_normalization_grad`. DirectML's page
    defines its "InputCentered" by itself; that it means ``input - mean`` is what makes the formula the gradient.

    Parameters
    ----------
    mean, variance : array
        What `batch_normalization_training` returned.
    epsilon : float
        That of the forward call.
    input, input_gradient, scale, output_gradient, output_scale_gradient, output_bias_gradient
        As in `batch_normalization_grad`.

    Notes
    -----
    Calls (`pybnorm.operations`): training_grad; its workspace.

    Examples
    --------
    >>> x, dy, dx = np.float32([[[1, 2, 4]]]), np.float32([[[0, 0, 1]]]), np.empty((1, 1, 3), np.float32)
    >>> mean, variance, scale, dscale, dbias = np.float32([7 / 3, 14 / 9, 1, 0, 0]).reshape(5, 1, 1, 1)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.directml.batch_normalization_training_grad(
    ...         handle, x, dy, mean, variance, scale, dx, dscale, dbias, epsilon=0
    ...     )
    >>> dx.round(3), dscale.ravel().round(3), dbias.ravel()
    (array([[[ 0.115, -0.172,  0.057]]], dtype=float32), array([1.336], dtype=float32), array([1.], dtype=float32))
    """,
    _OPERATORS,
    _operation="training_grad",
)


def workspace_size(handle: Handle, operator: str, *arguments: Any, **options: Any) -> int:
    """Bytes of workspace that an operator needs, aligned to 64; what DirectML calls the temporary resource size.

    Parameters
    ----------
    handle : Handle
    operator : str
        Name of one of this module's four operators.
    *arguments, **options
        Those of the operator, without `handle` and `workspace`. No array's memory is read or written.

    Returns
    -------
    int

    Examples
    --------
    >>> x, parameter = np.zeros((8, 64, 32, 32), np.float32), np.ones((1, 64, 1, 1), np.float32)
    >>> with pybnorm.Handle("onednn") as handle:
    ...     pybnorm.directml.workspace_size(
    ...         handle, "batch_normalization", x, parameter, parameter, parameter, parameter, x.copy()
    ...     ) >= 0
    True
    """
    recipe = _OPERATORS.get(str.__str__(operator)) if issubclass(type(operator), str) else None
    if recipe is None:
        raise ArgumentError("operator", operator, "one of " + ", ".join(_OPERATORS))
    prepared, addresses, _ = prepare(handle, recipe, recipe.bind(arguments, options))
    prepared.check(addresses)
    return prepared.nbytes


# ---------------------------------------------------------------- rules


def _data(p: Program, name: str, array: Any, x: Buffer | None = None, *, output: bool = False) -> Buffer:
    """Check the input (x is None), or an array of its sizes."""
    buffer = p.array(name, array, output=output)
    if x is None:
        _arguments.dims(buffer.dims, name, low=1, high=8)
        if buffer.dtype not in (DataType.FLOAT32, DataType.FLOAT16):
            raise ArgumentTypeError(name, f"dtype {buffer.dtype.short}", "f32 or f16: what DirectML's operator takes")
        x = buffer
    return _noted(p, name, buffer, output, x.dtype, ("input", x.dims))


def _parameter(
    p: Program, name: str, array: Any, x: Buffer, *, like: tuple[str, Buffer] | None = None, output: bool = False
) -> Buffer:
    buffer = p.handle.buffer(array, name, output=output)
    if len(buffer.dims) != len(x.dims):
        raise ArgumentError(name, f"dims {buffer.dims}", f"the DimensionCount of input, {len(x.dims)}")
    if any(d not in (1, of_x) for d, of_x in zip(buffer.dims, x.dims, strict=True)):
        raise ArgumentError(name, f"dims {buffer.dims}", f"each size 1 or that of input, {x.dims}")
    if not _arguments.is_packed_vector(buffer.dims, buffer.strides):
        raise ArgumentError(name, f"strides {buffer.strides}", "a contiguous array")
    sizes = (name, buffer.dims) if like is None else (like[0], like[1].dims)
    return _noted(p, name, buffer, output, x.dtype, sizes)


def _noted(p: Program, name: str, buffer: Buffer, output: bool, dtype: DataType, sizes: tuple[str, Dims]) -> Buffer:
    """The array, which must have the input's type and the sizes of the tensor that is named."""
    if buffer.dims != sizes[1]:
        raise ArgumentError(name, f"dims {buffer.dims}", f"the Sizes of {sizes[0]}, {sizes[1]}")
    if buffer.dtype != dtype:
        raise ArgumentTypeError(name, f"dtype {buffer.dtype.short}", f"the DataType of input, {dtype.short}")
    p.note(name, buffer, output)
    return buffer


def _vector(p: Program, dims: Dims, value: float | None = None) -> Buffer:
    """A vector of one value, or for a result."""
    vector = p.scratch(dims, DataType.FLOAT32)
    if value is not None:
        p.fill(value, vector)
    return vector


def _kept(*sizes: Dims) -> Dims:
    """The axes in which any of these has parameters."""
    return tuple(a for a, of_axis in enumerate(zip(*sizes, strict=True)) if any(d != 1 for d in of_axis))


def _spread(p: Program, vectors: dict[str, Buffer], union: Dims) -> dict[str, Buffer]:
    """The vectors in the sizes of `union`: themselves, or spread as the bias of a normalization of zeros."""
    result, smaller = dict(vectors), [name for name, v in vectors.items() if v.dims != union]
    if not smaller:
        return result
    zeros, ones = _vector(p, union, 0.0), _vector(p, union, 1.0)
    for name in smaller:
        v = vectors[name]
        result[name] = _vector(p, union)
        zero, one = (b._replace(dims=v.dims, strides=_arguments.packed_strides(v.dims)) for b in (zeros, ones))
        p.then("forward_inference", zeros, one, v, zero, one, result[name], epsilon=0.0, axis=_kept(v.dims))
    return result


def _linear(p: Program, activation: Activation, scale: Buffer, bias: Buffer) -> tuple[Buffer, Buffer]:
    """Scale and bias with ``alpha * value + beta`` taken in, in float32."""
    if (activation.alpha, activation.beta) == (1.0, 0.0):
        return scale, bias
    ones, gain, shift = (_vector(p, scale.dims, value) for value in (1.0, None, activation.beta))
    p.then("multiply", scale, ones, gain, alpha=activation.alpha)
    p.then("multiply", bias, ones, shift, alpha=activation.alpha, beta=1.0)
    return gain, shift


def _activation(handle: Handle, value: Any, function: str) -> Activation:
    allowed = "None, an Activation or one of the names " + ", ".join(ACTIVATIONS)
    if value is None:
        return Activation("identity")
    found = Activation(value) if issubclass(type(value), str) else value
    _arguments.instance(found, Activation, "fused_activation", allowed)
    if found.kind not in ACTIVATIONS:
        raise ArgumentError("fused_activation", value, allowed)
    if found.kind in ("identity", "relu"):
        return Activation(found.kind)  # whatever alpha and beta it was made with
    if found.kind == "linear":
        alpha = _arguments.scalar(found.alpha, "fused_activation.alpha", DataType.FLOAT32)
        return Activation("linear", alpha, _arguments.scalar(found.beta, "fused_activation.beta", DataType.FLOAT32))
    text = (
        f"the fused activation {found.kind!r} needs a primitive that the backends do not offer; "
        "fused_activation can be None, 'identity', 'linear' or 'relu'"
    )
    raise unsupported(handle, f"directml.{function}", text)
