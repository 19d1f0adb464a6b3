"""Ways around known defects: a call that its library gets wrong, made of calls that the same library gets right.

Sums over parts
    A statistic's N * H * W elements are cut into parts that the library sums rightly: (N, C, H*W) is looked at as
    (n, k * C * h, 1, w) with k * n = N and h * w = H*W, rows as channels, whose parameters are repeated; backward over
    it gives dscale and dbias of each part, and backward over the (k, C, 1, h) results, given as its dy, their sums.
    Where no cut is correct, images are copied with up to three zeros behind each: every kernel takes this length. dx, y
    and what else is elementwise then come from forward inference, whose kernels have no such defects.
Images
    Inference of more images than the library takes is made of calls for some of them each.
Channels
    Statistics for each activation are those of a channel where all activations are looked at as channels.
Addresses
    Data at addresses that the library does not take are copied.
Float32
    16-bit data are copied to float32, which is exact, computed there, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from pybnorm import _arguments
from pybnorm._arrays import Buffer
from pybnorm._core import SLOT_BITS, CallList, Handle, defects_of
from pybnorm.defects import Call, Defect, Effect
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.operations import program
from pybnorm.operations.program import Program, _Shape, unsupported

Arrays: TypeAlias = "dict[str, Buffer]"
_PART = 65536  # elements: a chain of so many float32 additions is still far inside every bound
_MOST_COPIES = 256
_MOST_CALLS = 4096
_ALIGNED = 16  # bytes; scratch memory is aligned better
_VECTOR = 4  # values that a kernel reads at a time
_SPLIT = 1.0 + 2.0**-16  # Veltkamp's factor for 8 of 24 bits, scaled by 2**-16 so that nothing overflows


def avoid(
    p: Program, call: Call, data: Arrays, parameters: Arrays, options: dict[str, Any], met: tuple[Defect, ...]
) -> None:  # fmt: skip
    """Put a call into a program by another way than the one that has the defects `met`.

    Raises
    ------
    UnsupportedError
        There is none; the message names the defects.
    """
    method, mode = call.operation.name.lower(), call.mode
    if met and any(way(p, call, data, parameters, options) for way in (_copied, _images, _activations)):
        return
    if call.dtype in program._NARROW:
        _in_float32(p, method, mode, data, parameters, options)
        return
    done = False
    if mode == Mode.SPATIAL and method == "backward":
        done = _backward(p, data, parameters, options)
    elif mode == Mode.SPATIAL and method == "forward_training":
        done = _other_view(p, data, parameters, options) or _training(p, data, parameters, options)
    elif mode == Mode.PER_ACTIVATION:  # whose defects have ways of their own
        done = _activations(p, call, data, parameters, options, right=False)
    if not done:
        names = ", ".join(d.id for d in met)
        text = f"known defect {names}: {met[0].what}; no other way of this library is known to be correct"
        raise unsupported(p.handle, method, text)


def _right(p: Program, operation: Operation, dims: tuple[int, ...]) -> bool:
    """Say whether a spatial float32 call without a blend is correct; backward's sums may be of one sign."""
    met = defects_of(p.handle, Call(operation, Mode.SPATIAL, DataType.FLOAT32, dims, saved=False, running=False))
    return all(d.effect == Effect.WEAK for d in met)


def _view(buffer: Buffer, *dims: int) -> Buffer:
    """Packed memory with other dims."""
    return buffer._replace(dims=dims, strides=_arguments.packed_strides(dims))


# ---------------------------------------------------------------- the same call on other memory


def _copied(p: Program, call: Call, data: Arrays, parameters: Arrays, options: dict[str, Any]) -> bool:
    """The call on copies, where their alignment is all that it needs."""
    if call.alignment >= _ALIGNED or defects_of(p.handle, call._replace(alignment=_ALIGNED)):
        return False
    copies = {name: p.scratch(buffer.dims, buffer.dtype, buffer.strides) for name, buffer in data.items()}
    out = "dx" if "dx" in data else "y"
    for name, buffer in data.items():
        p.copies.append(f"{name} of {call.operation.name.lower()}: at an address that is no multiple of {_ALIGNED}")
        if name != out or options["beta"] != 0:
            p.axpby(1.0, buffer, 0.0, copies[name])
    p._emit(call.operation.name.lower(), call.mode, copies, parameters, options)
    p.axpby(1.0, copies[out], 0.0, data[out])
    return True


def _images(p: Program, call: Call, data: Arrays, parameters: Arrays, options: dict[str, Any]) -> bool:
    """Inference of so many images at a time as the library takes."""
    n, rest = call.dims[0], call.dims[1:]
    size = _taken(p, call)
    if not size or n // size > _MOST_CALLS:
        return False
    for first in range(0, n, size):
        dims = min(size, n - first), *rest
        piece = {
            name: b._replace(pointer=b.pointer + first * b.strides[0] * b.dtype.itemsize, dims=dims)
            for name, b in data.items()
        }
        p._emit("forward_inference", call.mode, piece, parameters, options)
    return True


def _taken(p: Program, call: Call) -> int:
    """Count the images of an inference that the library takes at a time; 0 for none, and for other calls."""
    if call.operation != Operation.FORWARD_INFERENCE:
        return 0
    size = call.dims[0]
    while size > 1 and defects_of(p.handle, call._replace(dims=(size, *call.dims[1:]))):
        size = -(-size // 2)
    return 0 if defects_of(p.handle, call._replace(dims=(size, *call.dims[1:]))) else size


def _activations(
    p: Program, call: Call, data: Arrays, parameters: Arrays, options: dict[str, Any], right: bool = True
) -> bool:
    """Activations as channels; `right`: only where that has no defect, and parameters have the order of the memory."""
    last = call.layout == Layout.CHANNELS_LAST and not right
    if call.mode != Mode.PER_ACTIVATION or not (call.layout == Layout.CHANNELS_FIRST or last):
        return False
    dims = call.dims[0], math.prod(call.dims[1:]), 1, 1
    channels = call._replace(mode=Mode.SPATIAL, dims=dims)
    if right and defects_of(p.handle, channels) and not _taken(p, channels):
        return False
    viewed = {name: _view(buffer, *dims) for name, buffer in data.items()}
    ordered = _transposed(p, call, parameters) if last else parameters
    p._emit(call.operation.name.lower(), Mode.SPATIAL, viewed, ordered, options)
    if last:
        for name in [n for n in parameters if n in _WRITTEN[call.operation]]:
            p.axpby(1.0, _across(ordered[name], call), 0.0, _shaped(parameters[name], call))
    return True


_WRITTEN = {
    Operation.FORWARD_TRAINING: ("saved_mean", "saved_inv_variance", "running_mean", "running_variance"),
    Operation.FORWARD_INFERENCE: (),
    Operation.BACKWARD: ("dscale", "dbias"),
}


def _shaped(vector: Buffer, call: Call) -> Buffer:
    return _view(vector, call.dims[1], math.prod(call.dims[2:]))


def _across(vector: Buffer, call: Call) -> Buffer:
    """The same (C, H*W) of parameters that lie as channels-last memory does."""
    return _shaped(vector, call)._replace(strides=(1, call.dims[1]))


def _transposed(p: Program, call: Call, parameters: Arrays) -> Arrays:
    """Copies of per-activation parameters in the order of channels-last memory."""
    found = {name: p.scratch(_flat(vector).dims, vector.dtype) for name, vector in parameters.items()}
    for name, vector in parameters.items():
        p.axpby(1.0, _shaped(vector, call), 0.0, _across(found[name], call))
    return found


# ---------------------------------------------------------------- float32


def _in_float32(p: Program, method: str, mode: Mode, data: Arrays, parameters: Arrays, options: dict[str, Any]) -> None:
    wide = {}
    for name, buffer in data.items():
        output = name in ("y", "dx")
        wide[name] = p.scratch(buffer.dims, DataType.FLOAT32, buffer.strides)
        if not output or options["beta"] != 0:
            _widen(p, buffer, wide[name])
    p._emit(method, mode, wide, parameters, options)
    out = "dx" if "dx" in data else "y"
    _round(p, wide[out], data[out])


def _flat(buffer: Buffer) -> Buffer:
    """Dense memory as (1, 1, 1, n), in which per-activation parameters have an element for each of it."""
    return _view(buffer, 1, 1, 1, math.prod(buffer.dims))


def _widen(p: Program, narrow: Buffer, wide: Buffer) -> None:
    """Exact: the mean of a single element. Its y and its deviation are rubbish, and so are the parameters."""
    mark = p.used
    source, mean = _flat(narrow), _flat(wide)
    unused, y = p.scratch(mean.dims, mean.dtype), p.scratch(source.dims, source.dtype)
    parameters = {"scale": unused, "bias": unused, "saved_mean": mean}
    parameters["saved_inv_variance"] = p.scratch(mean.dims, mean.dtype)
    options = {"alpha": 1.0, "beta": 0.0, "epsilon": 1.0, "exponential_average_factor": 0.0}
    p._emit("forward_training", Mode.PER_ACTIVATION, {"x": source, "y": y}, parameters, options, raw=True)
    p.used = mark


def _round(p: Program, wide: Buffer, narrow: Buffer) -> None:
    """Round once, to nearest: the inference of zeros, with the values as the bias. `wide` is overwritten."""
    mark = p.used
    bias, target = _flat(wide), _flat(narrow)
    if narrow.dtype == DataType.BFLOAT16 and defects_of(
        p.handle, Call(Operation.FORWARD_INFERENCE, Mode.PER_ACTIVATION, narrow.dtype, target.dims)
    ):
        bias = _to_eight_bits(p, bias)
    zeros = p.scratch(bias.dims, bias.dtype)
    p.fill(0.0, zeros)
    # the same memory: zero is zero in every type
    x = _view(zeros._replace(dtype=narrow.dtype), *target.dims)
    parameters = {"scale": zeros, "bias": bias, "running_mean": zeros, "running_variance": zeros}
    options = {"alpha": 1.0, "beta": 0.0, "epsilon": 1.0}
    p._emit("forward_inference", Mode.PER_ACTIVATION, {"x": x, "y": target}, parameters, options, raw=True)
    p.used = mark


def _to_eight_bits(p: Program, values: Buffer) -> Buffer:
    """The nearest numbers of 8 significant bits, which a library that truncates to bfloat16 leaves alone.

    Veltkamp's splitting; `values` are overwritten.
    """
    other = p.scratch(values.dims, values.dtype)
    p.axpby(_SPLIT, values, 0.0, other)
    p.axpby(1.0, other, -(2.0**-16), values)
    p.axpby(1.0, other, -1.0, values)
    p.axpby(2.0**16, values, 0.0, other)
    return other


# ---------------------------------------------------------------- sums over parts


def _factors(size: int) -> Iterator[tuple[int, int]]:
    """All (h, w) with h * w = size, h ascending."""
    small = [h for h in range(1, math.isqrt(size) + 1) if size % h == 0]
    for h in small:
        yield h, size // h
    for w in reversed(small):
        if w * w != size:
            yield size // w, w


class _Parts:
    """The parts of packed float32 data that their library sums rightly."""

    def __init__(self, p: Program, x: Buffer) -> None:
        self.p = p
        n, c = x.dims[:2]
        plane = math.prod(x.dims[2:])
        if _arguments.layout_of(x.dims, x.strides) == Layout.CHANNELS_LAST:
            n, plane = n * plane, 1
        self.c, self.m, self.image = c, n * plane, (n, c, 1, plane)
        self.shape = _Shape(x._replace(dims=(c,), strides=(1,)), 0)
        whole = defects_of(p.handle, Call(Operation.FORWARD_TRAINING, Mode.SPATIAL, x.dtype, (n, c, 1, plane)))
        chained = any(d.rounded and d.effect == Effect.WEAK for d in whole)
        short = min(_PART, 2 * math.isqrt(self.m)) if chained else _PART
        lengths = dict.fromkeys((plane, -(-plane // _VECTOR) * _VECTOR))
        right = (
            (n // k, k, h, w)
            for length in lengths
            for most, copies in ((short, 0), (_PART, 0), (n * length, 0), (n * length, _MOST_COPIES))
            for k, _ in _factors(n)
            for h, w in _factors(length)
            if n // k * w <= most
            and _right(p, Operation.BACKWARD, (n // k, k * c * h, 1, w))
            and (self._summed(k, h) is not None or (k * c <= copies and self._lengthened(k, h)))
        )
        self.found: tuple[int, int, int, int] | None = next(right, None)

    @property
    def cut(self) -> tuple[int, int, int, int]:
        """n, k, h, w."""
        assert self.found is not None
        return self.found

    def _summed(self, k: int, h: int) -> Operation | None:
        """The call that adds the results of the parts."""
        dims = (k, self.c, 1, h)
        if _right(self.p, Operation.BACKWARD, dims):
            return Operation.BACKWARD
        return Operation.FORWARD_TRAINING if _right(self.p, Operation.FORWARD_TRAINING, dims) else None

    def _lengthened(self, k: int, h: int) -> bool:
        """Say whether the parts' results with zeros behind them can be summed, in parts themselves."""
        blocks = -(-h // _PART)
        return all(
            _right(self.p, Operation.BACKWARD, d) for d in ((1, k * self.c * blocks, 1, _PART), (k, self.c, 1, blocks))
        )

    def _of_parts(self, vector: Buffer) -> Buffer:
        """A vector of parameters, repeated for each part."""
        p, (_, k, h, _) = self.p, self.cut
        dims = k, self.c, 1, h
        zeros, ones = p.constant(0.0, self.shape), p.constant(1.0, self.shape)
        blank, result = p.scratch(dims, DataType.FLOAT32), p.scratch(dims, DataType.FLOAT32)
        p.fill(0.0, blank)
        p.inference((1,), blank, ones, vector, zeros, ones, result)
        return result

    def _sum(self, parts: Buffer, total: Buffer) -> None:
        p, (_, k, h, _) = self.p, self.cut
        mark = p.used
        parts = _view(parts, k, self.c, 1, h)
        zeros, ones = p.constant(0.0, self.shape), p.constant(1.0, self.shape)
        unused = p.vector(self.shape)
        how = self._summed(k, h)
        if how is None:  # a prime number of them, too large
            longer = self._longer(parts)
            _Parts(p, longer).sums(longer, longer, None, None, None, total)
        elif how == Operation.BACKWARD:
            p.gradient((1,), parts, parts, ones, None, unused, total, saved=(zeros, ones))
        else:
            p.training((1,), parts, ones, zeros, None, epsilon=1.0, saved=(total, unused))
            p.axpby(float(k * h), total, 0.0, unused)
            p.axpby(1.0, unused, 0.0, total)
        p.used = mark

    def _longer(self, parts: Buffer) -> Buffer:
        """The same rows with zeros behind, of a length that can be summed."""
        p, (k, c, _, h) = self.p, parts.dims
        length = -(-h // _PART) * _PART
        longer = p.scratch((k, c, 1, length), DataType.FLOAT32)
        p.fill(0.0, longer)
        for row in range(k * c):
            source, target = (b._replace(pointer=b.pointer + row * n * 4) for b, n in ((parts, h), (longer, length)))
            p.axpby(1.0, _view(source, h), 0.0, _view(target, h))
        return longer

    def _whole_vectors(self, data: Buffer) -> Buffer:
        """The images with zeros behind, where the cut is one of longer images."""
        (n, c, _, plane), (_, _, h, w) = self.image, self.cut
        if h * w == plane:
            return data
        longer = self.p.scratch((n, c, 1, h * w), data.dtype)
        self.p.fill(0.0, longer)
        self.p.axpby(1.0, _view(data, *self.image), 0.0, longer._replace(dims=self.image))
        return longer

    def sums(
        self, x: Buffer, dy: Buffer, mean: Buffer | None, inv: Buffer | None, moment: Buffer | None, total: Buffer
    ) -> None:
        """``total = sum(dy)``, ``moment = sum(dy * (x - mean) * inv)``; mean None: 0, inv None: 1."""
        p, (n, k, h, w) = self.p, self.cut
        p.constant(0.0, self.shape), p.constant(1.0, self.shape)  # outlive the scratch below
        mark = p.used
        longer = self._whole_vectors(x)
        x, dy = longer, longer if dy is x else self._whole_vectors(dy)
        rows = k * self.c * h
        shape = _Shape(total._replace(dims=(rows,), strides=(1,)), 0)
        ones = p.filled(1.0, shape)
        first, second = p.vector(shape), p.vector(shape)
        saved = []
        for vector, value in ((mean, 0.0), (inv, 1.0)):
            if vector is not None:
                saved.append(_view(self._of_parts(vector), rows))
            else:
                saved.append(ones if value else p.filled(0.0, shape))
        p.gradient(
            (1,), _view(x, n, rows, 1, w), _view(dy, n, rows, 1, w), ones, None, first, second,
            saved=(saved[0], saved[1]),
        )  # fmt: skip
        if moment is not None:
            self._sum(first, moment)
        self._sum(second, total)
        p.used = mark

    def statistics(self, x: Buffer) -> tuple[Buffer, Buffer]:
        """Mean and biased variance, the latter as the mean square of the differences."""
        p, shape = self.p, self.shape
        mean, variance, rest = p.vector(shape), p.vector(shape), p.vector(shape)
        zeros, ones = p.constant(0.0, shape), p.constant(1.0, shape)
        self.sums(x, x, None, None, None, rest)
        p.axpby(1.0 / self.m, rest, 0.0, mean)
        mark = p.used
        centred = p.scratch(x.dims, x.dtype, x.strides)
        p.inference((1,), x, ones, zeros, mean, ones, centred)
        moment = p.vector(shape)
        self.sums(centred, centred, None, None, moment, rest)
        p.axpby(1.0 / self.m, rest, 1.0, mean)
        p.axpby(1.0 / self.m, moment, 0.0, variance)
        p.used = mark
        return mean, variance


def _backward(p: Program, data: Arrays, parameters: Arrays, options: dict[str, Any]) -> bool:
    x, dy, dx = data["x"], data["dy"], data["dx"]
    parts = _Parts(p, x)
    if parts.found is None:
        return False
    shape = parts.shape
    vectors = {name: _view(vector, parts.c) for name, vector in parameters.items()}
    zeros, ones = p.constant(0.0, shape), p.constant(1.0, shape)
    if "saved_mean" in vectors:
        mean, inv = vectors["saved_mean"], vectors["saved_inv_variance"]
    else:
        mean, variance = parts.statistics(x)
        inv = p.inverse(variance, options["epsilon"])
    moment, total = p.vector(shape), p.vector(shape)
    parts.sums(x, dy, mean, inv, moment, total)
    average, slope = p.vector(shape), p.vector(shape)
    gain = p.product(vectors["scale"], inv)
    p.axpby(1.0 / parts.m, total, 0.0, average)
    p.product(p.product(moment, inv), gain, slope, alpha=-1.0 / parts.m)
    p.inference((1,), dy, gain, zeros, average, ones, dx, alpha=options["alpha"], beta=options["beta"])
    p.inference((1,), x, slope, zeros, mean, ones, dx, alpha=options["alpha"], beta=1.0)
    for source, target in ((moment, vectors["dscale"]), (total, vectors["dbias"])):
        p.axpby(options["alpha_param"], source, options["beta_param"], target)
    return True


def _training(p: Program, data: Arrays, parameters: Arrays, options: dict[str, Any]) -> bool:
    x, y = data["x"], data["y"]
    parts = _Parts(p, x)
    if parts.found is None:
        return False
    vectors = {name: _view(vector, parts.c) for name, vector in parameters.items()}
    mean, variance = parts.statistics(x)
    p.inference(
        (1,), x, vectors["scale"], vectors["bias"], mean, variance, y,
        alpha=options["alpha"], beta=options["beta"], epsilon=options["epsilon"],
    )  # fmt: skip
    if "saved_mean" in vectors:
        p.axpby(1.0, mean, 0.0, vectors["saved_mean"])
        p.inverse(variance, options["epsilon"], vectors["saved_inv_variance"])
    if "running_mean" in vectors:
        f, unbiased = options["exponential_average_factor"], parts.m / max(1, parts.m - 1)
        p.axpby(f, mean, 1.0 - f, vectors["running_mean"])
        p.axpby(f * unbiased, variance, 1.0 - f, vectors["running_variance"])
    return True


def _other_view(p: Program, data: Arrays, parameters: Arrays, options: dict[str, Any]) -> bool:
    """Channels-last memory is a matrix: its rows need not be cut into N and H*W as they are."""
    x = data["x"]
    if _arguments.layout_of(x.dims, x.strides) != Layout.CHANNELS_LAST:
        return False
    c = x.dims[1]
    rows = math.prod(x.dims) // c
    for n, plane in ((1, rows), (rows, 1), *_factors(rows)):
        dims = n, c, 1, plane
        strides = plane * c, 1, plane * c, c
        if _arguments.layout_of(dims, strides) != Layout.CHANNELS_LAST:
            continue  # one and the same memory, of another kind to the library
        if not defects_of(
            p.handle, Call(Operation.FORWARD_TRAINING, Mode.SPATIAL, x.dtype, dims, Layout.CHANNELS_LAST)
        ):
            viewed = {name: b._replace(dims=dims, strides=strides) for name, b in data.items()}
            p._emit("forward_training", Mode.SPATIAL, viewed, parameters, options)
            return True
    return False


def plan(
    handle: Handle, call: Call, tensors: dict[str, tuple[int, Any]], options: dict[str, Any], met: tuple[Defect, ...]
) -> tuple[CallList, int, tuple[str, ...]]:  # fmt: skip
    """A batch-norm call that avoids the defects `met`, the workspace that it needs, and what it copies.

    `tensors` have the slots of the list and what says dtype, dims and strides; see `CallList`.
    """
    p = Program(handle, plans=False)
    arrays = {
        name: Buffer(slot << SLOT_BITS, like.dims, like.strides, like.dtype, *p.device, True, None)
        for name, (slot, like) in tensors.items()
    }
    data = {name: arrays.pop(name) for name in [*arrays] if name in ("x", "y", "dy", "dx")}
    if met:
        avoid(p, call, data, arrays, options, met)
    else:  # refused as its arrays lie
        p._call(call.operation.name.lower(), _arguments.kept_axes(len(call.dims), call.mode), {**data}, arrays, options)
    found = p.finish()
    return found._list, found.nbytes, found.copies
