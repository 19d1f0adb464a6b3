"""The arguments of `pybnorm.miopen`'s calls: as arrays of the handle's, and what is made of them."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from pybnorm import _arguments, operations
from pybnorm import _core as core
from pybnorm._arrays import Buffer
from pybnorm._core import Handle, TensorDescriptor
from pybnorm.enums import Activation, Capability, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError
from pybnorm.operations import activated
from pybnorm.operations.program import _need, region

__all__ = ["OPERANDS", "mode_of", "run"]


class _Operand(NamedTuple):
    """One argument of MIOpen's, as it is here."""

    name: str
    descriptor: str
    """Of the ``_v2`` calls; the plain ones have one for all parameters."""
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
_SCALARS = {
    "alpha": "alpha",
    "beta": "beta",
    "alpha_data_diff": "alpha",
    "beta_data_diff": "beta",
    "alpha_param_diff": "alpha_param",
    "beta_param_diff": "beta_param",
    "exp_avg_factor": "exponential_average_factor",
    "epsilon": "epsilon",
    "workspace": "workspace",
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


_STATISTICS = (
    *("running_mean", "running_variance", "saved_mean", "saved_inv_variance"),
    *("previous_mean", "previous_variance", "inv_variance"),
)


def run(operation: Operation, given: dict[str, Any], activation: Callable[[object, Buffer], dict[str, Any]]) -> None:
    """Make a call by MIOpen's names, by which `given` has its arguments; `activation` reads its descriptor."""
    mode, handle = mode_of(given["bn_mode"]), given["handle"]
    _arguments.instance(handle, Handle, "handle", "a Handle")
    strict = _arguments.boolean(given["strict"], "strict")
    shared = next((name for name in _OF_ALL if name in given), None)
    found: dict[str, Buffer | None] = {}
    act: dict[str, Any] = {}
    for name, operand in OPERANDS.items():
        if name not in given or (name == "bn_bias" and operation == Operation.BACKWARD and not act):
            continue
        described = shared if shared is not None and name not in _DATA else operand.descriptor
        absent = operand.optional and _is_null(given[name])
        found[name] = None if absent else _buffer(handle, name, given[name], described, given[described])
        if name == "x":
            act = activation(given.get("activ_desc"), _need(found[name]))
    for first, second in _PAIRS:
        if first in found and second in found:
            if not strict and None in (found[first], found[second]):
                found[first] = found[second] = None
            _arguments.pair(first, found[first], second, found[second])
    names = {OPERANDS[name].name: name for name in found} | {_SCALARS[n]: n for n in given if n in _SCALARS}
    arrays = {OPERANDS[name].name: buffer for name, buffer in found.items()}
    options = {_SCALARS[name]: value for name, value in given.items() if name in _SCALARS}
    try:
        _call(handle, operation, mode, arrays, options, act)
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
    act: dict[str, Any],
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
    composed = bool(act) or "previous_mean" in arrays or "inv_variance" in arrays
    options = {"epsilon": 1e-5, **options}  # which inference by an inverse standard deviation has none of
    method, axis = operation.name.lower(), _arguments.kept_axes(len(x.dims), mode)
    derived = _arguments.derived_data_type(x.dtype)
    uniform = all(array is None or name in _DATA or array.dtype == derived for name, array in arrays.items())
    fused = uniform and not {"previous_mean", "inv_variance"} & arrays.keys()
    if fused and act:
        layout = _arguments.layout_of(x.dims, x.strides)
        bits, _ = core.capability(handle.backend, operation, mode, x.dtype, layout, len(x.dims))
        fused = Capability.ACTIVATION in bits
    if fused:
        getattr(handle, method)(**arrays, mode=mode, **options, **act)
    elif composed:
        bounds = act.get("activation_low"), act.get("activation_high")
        kind, low, high = _arguments.activation(act.get("activation", Activation.NONE), *bounds, x.dtype)
        options |= {"kind": int(kind), "low": low, "high": high}
        if operation == Operation.BACKWARD:
            activated.activated_backward(handle, axis=axis, y=None, dz=None, **options, **arrays)
            return
        statistics = dict.fromkeys(_STATISTICS)
        options["factor"] = options.pop("exponential_average_factor", 0.0)
        training = operation == Operation.FORWARD_TRAINING
        activated.activated_forward(handle, axis=axis, training=training, z=None, **options, **{**statistics, **arrays})
    else:
        getattr(operations, method)(handle, axis=axis, **arrays, **options)


def _is_null(value: Any) -> bool:
    return value is None or (
        issubclass(type(value), numbers.Integral) and not issubclass(type(value), bool) and value == 0
    )


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
    if _steps(buffer.dims, buffer.strides) != _steps(descriptor.dims, descriptor.strides):
        allowed = f"dims {descriptor.dims} with strides {descriptor.strides}, as {desc_name} says"
        given = f"dims {buffer.dims} with strides {buffer.strides}"
        raise ArgumentError(name, given, f"{allowed}; axes of length 1 may be left out")
    return buffer._replace(dims=descriptor.dims, strides=descriptor.strides)


def _steps(dims: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(d, s) for d, s in zip(dims, strides, strict=True) if d != 1]


def mode_of(bn_mode: object) -> Mode:
    """One of MIOpen's two modes."""
    try:
        mode = _arguments.mode(bn_mode)
    except ArgumentError as error:
        raise type(error)("bn_mode", error.value, error.allowed) from error
    if mode == Mode.SPATIAL_PERSISTENT:
        raise ArgumentError("bn_mode", mode, "Mode.PER_ACTIVATION or Mode.SPATIAL, MIOpen's two modes")
    return mode
