"""Elementwise calls of a program, on copies where the backend does not take the arrays as they are."""

from __future__ import annotations

import math

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import capability
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.errors import UnsupportedError
from pybnorm.operations.program import _NARROW, Program, unsupported
from pybnorm.operations.views import _pieces

Arrays = dict[str, Buffer]
Limits = tuple[float, float, float]
"""An activation's low, high, and slope below low."""
RELU: Limits = (0.0, math.inf, 0.0)


def relu(p: Program, x: Buffer, y: Buffer) -> None:
    """``y = max(x, 0)``."""
    _apply(p, Operation.RELU, {"x": x}, "y", y)


def relu_backward(p: Program, x: Buffer, dy: Buffer, dx: Buffer) -> None:
    """``dx = dy where x > 0, else 0``."""
    _apply(p, Operation.RELU_BACKWARD, {"x": x, "dy": dy}, "dx", dx)


def activation(p: Program, limits: Limits, x: Buffer, y: Buffer) -> None:
    """``y = min(x, high)`` above low, below it ``low + slope * (x - low)``, exact but for the roundings of both.

    Of calls that every backend has: relu_backward picks the elements on one side of a limit.
    """
    low, high, slope = limits
    if limits == RELU:
        relu(p, x, y)
        return
    x, result = _computed(p, x, y, "activation")
    above = result if high == math.inf else p.scratch_like(x)
    if low == slope == 0:
        relu(p, x, above)
    else:
        below = _filled(p, (1 - slope) * low, x)
        if slope != 0:
            p.axpby(slope, x, 1.0, below)
        _picked(p, _distance(p, 1.0, low, x), x, below, above)
    if high != math.inf:
        _picked(p, _distance(p, -1.0, high, above), above, _filled(p, high, x), result)
    if result is not y:
        _narrowed(p, result, y)


def activation_backward(p: Program, limits: Limits, x: Buffer, dy: Buffer, dx: Buffer) -> None:
    """``dx = dy`` above low and not above high, where the activation passes x on; 0 above, ``slope * dy`` else."""
    low, high, slope = limits
    if limits == RELU:
        relu_backward(p, x, dy, dx)
        return
    x, result = _computed(p, x, dx, "activation_backward")
    if result is not dx:
        dy = _widened(p, "dy", dy, "activation_backward")
    distance = x if low == 0 else _distance(p, 1.0, low, x)
    passed = result if high == math.inf else p.scratch_like(x)
    if slope == 0:
        relu_backward(p, distance, dy, passed)
    else:
        below = p.scratch_like(x)
        p.axpby(slope, dy, 0.0, below)
        _picked(p, distance, dy, below, passed)
    if high != math.inf:
        relu_backward(p, _not_above(p, _distance(p, 1.0, high, x)), passed, result)
    if result is not dx:
        _narrowed(p, result, dx)


def _computed(p: Program, x: Buffer, out: Buffer, method: str) -> tuple[Buffer, Buffer]:
    """x and where to put the result, in float32 where the backend has no kernel for their dtype."""
    if out.dtype not in _NARROW or not _refusal(p, Operation.RELU, out.dtype, Layout.CHANNELS_FIRST, 2):
        return x, out
    wide = _widened(p, "x", x, method)
    return wide, p.scratch(wide.dims, wide.dtype)


def _filled(p: Program, value: float, like: Buffer) -> Buffer:
    made = p.scratch_like(like)
    p.fill(value, made)
    return made


def _distance(p: Program, sign: float, limit: float, x: Buffer) -> Buffer:
    """``sign * (x - limit)``, whose sign is exact."""
    made = _filled(p, -sign * limit, x)
    p.axpby(sign, x, 1.0, made)
    return made


def _not_above(p: Program, distance: Buffer) -> Buffer:
    """0 where the distance is above 0, else 1."""
    ones, picked = _filled(p, 1.0, distance), p.scratch_like(distance)
    relu_backward(p, distance, ones, picked)
    p.axpby(-1.0, picked, 1.0, ones)
    return ones


def _picked(p: Program, distance: Buffer, above: Buffer, below: Buffer, y: Buffer) -> None:
    """``y = above`` where the distance is above 0, else below."""
    rest = p.scratch_like(distance)
    relu_backward(p, _not_above(p, distance), below, rest)
    relu_backward(p, distance, above, y)
    p.axpby(1.0, rest, 1.0, y)


def axpby(p: Program, a: float, x: Buffer, b: float, y: Buffer) -> None:
    """``y = a * x + b * y``, 16-bit arrays in float32 where the backend can but copy them."""
    try:
        p.axpby(a, x, b, y)
    except UnsupportedError:
        if y.dtype not in _NARROW or (a, b) == (1.0, 0.0):
            raise
        wide = _widened(p, "x", x, "axpby")
        result = _widened(p, "y", y, "axpby") if b != 0 else p.scratch(wide.dims, wide.dtype)
        p.axpby(a, wide, b, result)
        _narrowed(p, result, y)


def _refusal(p: Program, operation: Operation, dtype: DataType, layout: Layout, rank: int) -> str:
    bits, why = capability(p.handle.backend, operation, Mode.SPATIAL, dtype, layout, rank)
    return "" if bits else why


def _apply(p: Program, operation: Operation, inputs: Arrays, name: str, output: Buffer) -> None:
    """Apply to the arrays themselves, else to dense copies in one memory order, else to those in float32."""
    method, arrays = operation.name.lower(), inputs | {name: output}
    first = next(_pieces(*arrays.values()))
    why = ""
    if any(b.strides != first[-1].strides for b in first):
        # only a backend that takes any strides takes several orders; cuDNN's gradient does not
        why = _refusal(p, operation, output.dtype, Layout.STRIDED, len(first[0].dims))
        if operation == Operation.RELU_BACKWARD:
            why = f"its memory order is not that of {name}"
    for b in first:
        why = why or _refusal(p, operation, b.dtype, _arguments.layout_of(b.dims, b.strides), len(b.dims))
    if not why:
        _emit(p, operation, arrays)
        return
    missing = _refusal(p, operation, output.dtype, Layout.CHANNELS_FIRST, 2)
    if missing and output.dtype not in _NARROW:
        described = f"{name}: {output.dtype.short} dims={output.dims} strides={output.strides}"
        raise unsupported(p.handle, method, missing, (described,))
    if missing:
        wide = {n: _widened(p, n, b, method) for n, b in inputs.items()}
        like = next(iter(wide.values()))
        result = p.scratch(like.dims, like.dtype)
        _emit(p, operation, wide | {name: result})
        _narrowed(p, result, output)
        return
    target = output
    if math.prod(output.dims) != _arguments.span(output.dims, output.strides):
        target = p.scratch(output.dims, output.dtype)
        p.copies.append(f"{name} of {method}: {why}")
    copies = {n: _in_order(p, b, target, f"{n} of {method}: {why}") for n, b in inputs.items()}
    _emit(p, operation, {n: _flat(b) for n, b in (copies | {name: target}).items()})
    if target is not output:
        p.axpby(1.0, target, 0.0, output)


def _emit(p: Program, operation: Operation, arrays: Arrays) -> None:
    for pieces in _pieces(*arrays.values()):
        text = f"{operation.name.lower()} {pieces[0].dtype.short} {pieces[0].dims}"
        p._step(operation, dict(zip(arrays, pieces, strict=True)), {}, 0, text)


def _in_order(p: Program, array: Buffer, like: Buffer, reason: str) -> Buffer:
    """The array, or a copy in the memory order of the dense `like`."""
    if array.strides == like.strides:
        return array
    p.copies.append(reason)
    copy = p.scratch(like.dims, like.dtype, like.strides)
    p.axpby(1.0, array, 0.0, copy)
    return copy


def _flat(dense: Buffer) -> Buffer:
    return dense._replace(dims=(math.prod(dense.dims),), strides=(1,))


def _widened(p: Program, name: str, array: Buffer, method: str) -> Buffer:
    """The values of a 16-bit array in float32, as a vector in the order of its axes."""
    packed = _arguments.packed_strides(array.dims)
    reason = f"{name} of {method}: computed in float32, as the backend has no {array.dtype.short} kernel"
    if array.strides == packed:
        p.copies.append(reason)
    return p.widen(_flat(_in_order(p, array, array._replace(strides=packed), reason)))


def _narrowed(p: Program, wide: Buffer, target: Buffer) -> None:
    """Round such a vector once."""
    packed = _arguments.packed_strides(target.dims)
    rounded = target if target.strides == packed else p.scratch(target.dims, target.dtype)
    p.narrow(wide, _flat(rounded))
    if rounded is not target:
        p.axpby(1.0, rounded, 0.0, target)
