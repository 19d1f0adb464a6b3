"""Faults that only a whole call shows: of memory, of a second call, of values that are not finite.

Each is put into the simulated two-pass kernel (`pybnorm.check.selftest.simulated`) and must be FAIL, or what is named,
in every case that is listed for it; the kernel without it must pass the same case, or be WARN where an infinity is open
to formulas.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm import _arguments, devices
from pybnorm._arrays import Buffer
from pybnorm.check.bounds import Status
from pybnorm.check.calls import COMPOSED
from pybnorm.check.problem import Problem
from pybnorm.check.runner import run_case
from pybnorm.check.selftest.composed import Composed
from pybnorm.check.selftest.simulated import Kernels, array_of
from pybnorm.check.session import Session

__all__ = ["FAULTS", "UNSEEN", "Fault", "Seen", "render", "run"]

Array = npt.NDArray[Any]
Call = Callable[[], None]
Change = Callable[[dict[str, Buffer], Call, int], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong, and the cases that must show it."""

    change: Change
    """Gets the call's buffers by name, the right call, and how many calls came before."""
    cases: tuple[str, ...]
    status: Status = Status.FAIL
    """What it must make of each."""


class _Activated(Kernels):
    """Kernels with an activation behind them, of what may have a residual added."""

    passes: Any = staticmethod(np.greater)
    """Where a gradient passes, of a result and 0."""

    def backward(self, *, dy: Buffer, activation: Any = None, **named: Any) -> None:  # type: ignore[override]
        if not activation:
            super().backward(dy=dy, **named)
            return
        bias, given, dz = (named.pop(name, None) for name in ("bias", "y", "dz"))
        gradient, zero = array_of(dy), np.float32(0)
        if given is not None:
            passes = self.passes(array_of(given), zero)
        else:
            rows = self.rows(array_of(named["x"]), named["mode"])
            mean, r, scale, shift = (
                self.parameter(b, np.float32)
                for b in (named["saved_mean"], named["saved_inv_variance"], named["scale"], bias)
            )
            passes = self.back(self.passes((rows - mean) * r * scale + shift, zero), gradient.shape, named["mode"])
        kept = gradient.copy()
        gradient[...] = np.where(passes, gradient, gradient.dtype.type(0))
        if dz is not None:
            array_of(dz)[...] = gradient
        super().backward(dy=dy, **named)
        gradient[...] = kept

    def forward_training(self, **named: Any) -> None:  # type: ignore[override]
        behind = {name: named.pop(name, None) for name in _BEHIND}
        super().forward_training(**named)
        self._finish(named["y"], **behind)

    def forward_inference(self, **named: Any) -> None:  # type: ignore[override]
        behind = {name: named.pop(name, None) for name in _BEHIND}
        super().forward_inference(**named)
        self._finish(named["y"], **behind)

    def _finish(self, y: Buffer, activation: Any, activation_low: Any, activation_high: Any, z: Buffer | None) -> None:
        if activation:
            out = array_of(y)
            values = out.astype(np.float32)
            if z is not None:
                values = values + array_of(z).astype(np.float32)
            low, high = (0.0 if activation_low is None else activation_low), activation_high
            values = np.maximum(values, np.float32(low))
            out[...] = (values if high is None else np.minimum(values, np.float32(high))).astype(out.dtype)


_COMPOSED_CALLS = frozenset(composed.name for composed in COMPOSED.values())
_BEHIND = ("activation", "activation_low", "activation_high", "z")


class _Faulty(_Activated, Composed):
    """Kernels whose calls go through a fault."""

    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self.change, self.calls = change, 0
        if change is _mask_with_zero:
            self.passes = np.greater_equal

    def _through(self, call: Callable[..., None], named: dict[str, Any]) -> None:
        def right() -> None:
            call(**named)

        with np.errstate(all="ignore"):
            if self.change is None:
                right()
            else:
                self.change({n: b for n, b in named.items() if isinstance(b, Buffer)}, right, self.calls)
        self.calls += 1

    def forward_training(self, **named: Any) -> None:  # type: ignore[override]
        self._through(super().forward_training, named)

    def forward_inference(self, **named: Any) -> None:  # type: ignore[override]
        self._through(super().forward_inference, named)

    def backward(self, **named: Any) -> None:  # type: ignore[override]
        self._through(super().backward, named)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _COMPOSED_CALLS:
            return found
        return lambda **named: self._through(found, named)


def _beside(buffer: Buffer, elements: int) -> Array:
    """The element so many behind the last of a buffer; negative: before its first."""
    values = array_of(buffer)
    span = _arguments.span(buffer.dims, buffer.strides)
    offset = (span - 1 + elements if elements > 0 else elements) * values.dtype.itemsize
    memory: Any = (ctypes.c_char * values.dtype.itemsize).from_address(buffer.pointer + offset)
    return np.ndarray((1,), values.dtype, buffer=memory)


def _result(buffers: dict[str, Buffer]) -> Array:
    return array_of(next(buffers[name] for name in ("dx", "y", "sum_dy", "mean") if name in buffers))


def _reads(name: str, elements: int) -> Change:
    """Adds what lies beside an input to one element of the result."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        right()
        out, stray = _result(buffers), _beside(buffers[name], elements)
        out.flat[0] = out.flat[0] + stray[0] * out.dtype.type(2.0**-10)

    return change


def _reads_gap(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    right()
    x, out = buffers["x"], _result(buffers)
    span = _arguments.span(x.dims, x.strides)
    memory: Any = (ctypes.c_char * (span * out.dtype.itemsize)).from_address(x.pointer)
    out.flat[0] = out.flat[0] + np.ndarray(span, out.dtype, buffer=memory)[x.strides[0] - 1]


def _writes(name: str, elements: int) -> Change:
    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        right()
        _beside(buffers[name], elements)[0] = 0

    return change


def _changes(name: str) -> Change:
    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        right()
        values = array_of(buffers[name])
        values.flat[0] = values.flat[0] + 1

    return change


def _not_written(*names: str) -> Change:
    """Leaves results as they were before the call."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        old = {name: array_of(buffers[name]).copy() for name in names if name in buffers}
        right()
        for name, values in old.items():
            array_of(buffers[name])[...] = values

    return change


def _block_not_written(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    old = _result(buffers).copy()
    right()
    _result(buffers)[-1, -1, -1] = old[-1, -1, -1]


def _second_call(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    right()
    if before % 2:
        out = _result(buffers)
        out[...] = out * out.dtype.type(1.25)


def _first_call(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    right()
    if not before:
        out = _result(buffers)
        out[...] = out * out.dtype.type(1.25)


def _in_place(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    """Reads its input once more when the first image of the result is written."""
    source, result = array_of(buffers["x"] if "y" in buffers else buffers["dy"]), _result(buffers)
    kept = source.copy()
    right()
    if source.ctypes.data == result.ctypes.data:
        first = result[:1].copy()
        source[1:] = kept[1:]
        right()
        result[:1] = first


def _input(name: str, change: Callable[[Array], Array]) -> Change:
    """The call sees a changed input, which is put back."""

    def through(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        values = array_of(buffers[name])
        kept = values.copy()
        values[...] = change(values.astype(np.float64)).astype(values.dtype)
        right()
        array_of(buffers[name])[...] = kept

    return through


def _output(change: Callable[[Array], Array], *names: str) -> Change:
    """What is written is changed."""

    def through(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        right()
        for name in names:
            if name in buffers:
                values = array_of(buffers[name])
                values[...] = change(values)

    return through


def _spread(values: Array) -> Array:
    """A NaN of one channel in all of them."""
    return values + values.sum(axis=1, keepdims=True) * values.dtype.type(0)


def _saturated(values: Array) -> Array:
    """The largest finite number for infinity."""
    kind = values.dtype.type
    largest = np.nextafter(kind(np.inf), kind(0))
    result: Array = np.where(np.isinf(values), np.copysign(largest, values), values)
    return result


def _mask_with_zero(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    """A gradient passes where forward's result is 0, too; the kernel looks for this change."""
    right()


def _masks_dy(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    """Leaves the masked gradient where the whole one was."""
    right()
    array_of(buffers["dy"])[...] = array_of(buffers["dz"])


def _differs(buffers: dict[str, Buffer], right: Call, before: int) -> None:
    """The last bit of a result is another one at every second call."""
    right()
    if before % 2:
        out = _result(buffers)
        out.flat[0] = np.nextafter(out.flat[0], out.dtype.type(np.inf))


def _shares(one: str, other: str) -> Change:
    """Two outputs through the same memory of the kernel's own: the first gets what the second is."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        right()
        array_of(buffers[one])[...] = array_of(buffers[other])

    return change


def _aligned(bytes_: int, skips: bool) -> Change:
    """Begins at an aligned address: before the first element, or, if it skips, behind it."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        x = buffers["x"]
        values = array_of(x)
        off = x.pointer % bytes_ // values.dtype.itemsize
        if skips:
            out = _result(buffers)
            old = out.copy()
            right()
            head = -off % (bytes_ // values.dtype.itemsize)
            out.flat[:head] = old.flat[:head]
            return
        kept = values.copy()
        span = off + values.size
        memory: Any = (ctypes.c_char * (span * values.dtype.itemsize)).from_address(
            x.pointer - off * values.dtype.itemsize
        )
        values[...] = np.ndarray(span, values.dtype, buffer=memory).copy()[: values.size].reshape(values.shape)
        right()
        values[...] = kept

    return change


def _other_order(name: str) -> Change:
    """Takes the memory of an input for packed channels-first, whatever its strides are."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        buffer = buffers[name]
        values = array_of(buffer)
        kept = values.copy()
        memory: Any = (ctypes.c_char * (values.size * values.dtype.itemsize)).from_address(buffer.pointer)
        values[...] = np.ndarray(values.shape, values.dtype, buffer=memory).copy()
        right()
        values[...] = kept

    return change


_ALL = ("y", "dx", "saved_mean", "saved_inv_variance", "running_mean", "running_variance", "dscale", "dbias")
_TRAIN = "train,spatial,f32,nchw,4x6x3x5,fill=randn"
_BACKWARD = "backward,spatial,f32,nchw,4x6x3x5,fill=randn"
_INFER = "infer,spatial,f32,nchw,4x6x3x5,fill=randn"
_SHORT = tuple(
    f"{operation},spatial,{dtype},nchw,4x6x3x5,fill=randn"
    for operation in ("train", "infer", "backward")
    for dtype in ("f16", "bf16")
)
_GAPS = "strides=360x60x18x3,2x4x3x5,fill=randn"
_OPERATIONS = ("train", "backward", "infer")
_STRIDED = tuple(f"{o},spatial,f32,{_GAPS}" for o in _OPERATIONS)
_LAST = tuple(f"{o},spatial,f32,nhwc,4x6x3x5,fill=randn" for o in _OPERATIONS)
_MISALIGNED = tuple(
    f"{o},spatial,{d},nchw,4x6x3x5,fill=randn,misalign={by}" for o in _OPERATIONS for d, by in (("f32", 1), ("bf16", 3))
)
_FUSED = tuple(
    f"{o},spatial,{d},nchw,4x6x3x5,fill=randn,activation={a},residual=1"
    for o, a in (("train", "relu"), ("train", "clamp"), ("infer", "clipped_relu"))
    for d in ("f32", "bf16")
)
_MASKED = tuple(f"backward,spatial,{d},nchw,4x6x3x5,fill=randn,activation=relu,residual=1" for d in ("f32", "bf16"))
_NAN = tuple(f"{o},spatial,f32,nchw,4x6x3x5,fill=special" for o in ("train", "infer", "backward"))

_FROM_X = ("frozen", "training_grad", "backward_reduce", "backward_elemt", "elemt", "sync_train", "sync_backward")
_FROM_DY = tuple(word for word in _FROM_X if word not in ("elemt", "sync_train"))
_TO_DX = tuple(word for word in _FROM_DY if word != "backward_reduce")
_TO_Y = ("elemt", "sync_train")
_TO_DSCALE = tuple(word for word in _FROM_DY if word != "backward_elemt")
_BY_INVERSE = ("backward_reduce", "backward_elemt", "elemt")
_GATHERED = ("gather_stats,spatial,f32,nchw,4x6,fill=randn", "gather_stats,spatial,f64,nchw,5x3,fill=randn")


def _composed(words: tuple[str, ...], dtypes: tuple[str, ...] = ("f32",), rest: str = "") -> tuple[str, ...]:
    return tuple(f"{word},spatial,{dtype},nchw,4x6x3x5,fill=randn{rest}" for word in words for dtype in dtypes)


_EACH = ("f32", "f16", "bf16")
_FAULTS_OF_COMPOSED: dict[str, Fault] = {
    "composed: reads one element behind x": Fault(_reads("x", 1), _composed(_FROM_X, _EACH)),
    "composed: reads one element before x": Fault(_reads("x", -1), _composed(_FROM_X, _EACH)),
    "composed: reads one element behind dy": Fault(_reads("dy", 1), _composed(_FROM_DY)),
    "composed: reads one element before dy": Fault(_reads("dy", -1), _composed(_FROM_DY)),
    "composed: reads one element behind a given mean": Fault(_reads("mean", 1), _composed((*_TO_DX[:2], *_BY_INVERSE))),
    "composed: reads one element behind a given inverse": Fault(_reads("inv_variance", 1), _composed(_BY_INVERSE)),
    "composed: reads one element behind a given sum": Fault(_reads("sum_dy", 1), _composed(("backward_elemt",))),
    "composed: reads one element behind the ranks' means": Fault(_reads("means", 1), _GATHERED),
    "composed: reads one element before the ranks' squares": Fault(_reads("m2s", -1), _GATHERED),
    "composed: reads the gaps of a strided tensor": Fault(
        _reads_gap, tuple(f"{word},spatial,f32,{_GAPS}" for word in _FROM_X)
    ),
    "composed: writes one element behind dx": Fault(_writes("dx", 1), _composed(_TO_DX, _EACH)),
    "composed: writes one element before y": Fault(_writes("y", -1), _composed(_TO_Y, _EACH)),
    "composed: writes one element behind dbias": Fault(_writes("dbias", 1), _composed(_TO_DSCALE)),
    "composed: writes one element behind the sum of dy x": Fault(
        _writes("sum_dy_xmu", 1), _composed(("backward_reduce",))
    ),
    "composed: writes one element behind the saved mean": Fault(_writes("saved_mean", 1), _composed(("sync_train",))),
    "composed: writes one element behind the merged inverse": Fault(_writes("inv_variance", 1), _GATHERED),
    "composed: writes into x": Fault(_changes("x"), _composed(_FROM_X)),
    "composed: writes into dy": Fault(_changes("dy"), _composed(_FROM_DY)),
    "composed: writes into a given mean": Fault(_changes("mean"), _composed((*_TO_DX[:2], *_BY_INVERSE))),
    "composed: writes into the saved mean": Fault(_changes("saved_mean"), _composed(("sync_backward",))),
    "composed: writes into the ranks' squares": Fault(_changes("m2s"), _GATHERED),
    "composed: result not written": Fault(_not_written("y", "dx", "sum_dy"), _composed(_FROM_X)),
    "composed: merged mean not written": Fault(_not_written("mean"), _GATHERED),
    "composed: dscale not written": Fault(_not_written("dscale"), _composed(_TO_DSCALE)),
    "composed: running statistics not written": Fault(
        _not_written("running_mean", "running_variance"), (*_composed(("sync_train",)), *_GATHERED)
    ),
    "composed: second call is wrong": Fault(_second_call, (*_composed(_FROM_X, rest=",repeats=2"),)),
    "composed: dscale has the memory of dbias": Fault(_shares("dscale", "dbias"), _composed(_TO_DSCALE)),
    "composed: the sum of dy has the memory of that of dy x": Fault(
        _shares("sum_dy", "sum_dy_xmu"), _composed(("backward_reduce",))
    ),
    "composed: running mean has the memory of the saved mean": Fault(
        _shares("running_mean", "saved_mean"), _composed(("sync_train",))
    ),
    "composed: merged mean has the memory of the variance": Fault(_shares("mean", "variance"), _GATHERED),
    "composed: reads from the aligned address before x": Fault(
        _aligned(16, skips=False), _composed(_FROM_X, ("f32", "bf16"), ",misalign=1")
    ),
    "composed: leaves out what lies before an aligned address": Fault(
        _aligned(16, skips=True),
        _composed(tuple(word for word in _FROM_X if word != "backward_reduce"), ("f32", "bf16"), ",misalign=1"),
    ),
    "composed: takes channels-last memory for channels-first": Fault(
        _other_order("x"), tuple(line.replace("nchw", "nhwc") for line in _composed(_FROM_X))
    ),
    "composed: takes strided memory for packed": Fault(
        _other_order("x"), tuple(f"{word},spatial,f32,{_GAPS}" for word in _FROM_X)
    ),
}

FAULTS: dict[str, Fault] = {
    "reads one element behind x": Fault(_reads("x", 1), (_TRAIN, _BACKWARD, _INFER, *_SHORT)),
    "reads three elements behind x": Fault(_reads("x", 3), (_TRAIN, _BACKWARD, _INFER, *_SHORT)),
    "reads one element before x": Fault(_reads("x", -1), (_TRAIN, _BACKWARD, _INFER, *_SHORT)),
    "reads one element behind dy": Fault(_reads("dy", 1), (_BACKWARD,)),
    "reads one element before dy": Fault(_reads("dy", -1), (_BACKWARD,)),
    "reads one element behind the scale": Fault(_reads("scale", 1), (_TRAIN, _BACKWARD, _INFER)),
    "reads the gaps of a strided tensor": Fault(_reads_gap, _STRIDED),
    "writes one element behind y": Fault(_writes("y", 1), (_TRAIN, _INFER)),
    "writes one element before y": Fault(_writes("y", -1), (_TRAIN, _INFER)),
    "writes one element behind dx": Fault(_writes("dx", 1), (_BACKWARD,)),
    "writes one element behind dbias": Fault(_writes("dbias", 1), (_BACKWARD,)),
    "writes one element behind the saved mean": Fault(_writes("saved_mean", 1), (_TRAIN,)),
    "writes into x": Fault(_changes("x"), (_TRAIN, _BACKWARD, _INFER)),
    "writes into dy": Fault(_changes("dy"), (_BACKWARD,)),
    "writes into the scale": Fault(_changes("scale"), (_TRAIN, _BACKWARD, _INFER)),
    "writes into the running mean of inference": Fault(_changes("running_mean"), (_INFER,)),
    "result not written": Fault(_not_written("y", "dx"), (_TRAIN, _BACKWARD, _INFER)),
    "saved statistics not written": Fault(_not_written("saved_mean", "saved_inv_variance"), (_TRAIN,)),
    "running statistics not written": Fault(_not_written("running_mean", "running_variance"), (_TRAIN,)),
    "dscale not written": Fault(_not_written("dscale"), (_BACKWARD,)),
    "last row of the result not written": Fault(_block_not_written, (_TRAIN, _BACKWARD, _INFER)),
    "second call is wrong": Fault(_second_call, tuple(f"{line},repeats=2" for line in (_TRAIN, _BACKWARD, _INFER))),
    "first call is wrong": Fault(_first_call, tuple(f"{line},repeats=2" for line in (_TRAIN, _BACKWARD, _INFER))),
    "reads its input after it was overwritten": Fault(
        _in_place, tuple(f"{line},inplace=1" for line in (_TRAIN, _BACKWARD))
    ),
    "running mean has the memory of the saved mean": Fault(_shares("running_mean", "saved_mean"), (_TRAIN,)),
    "saved mean has the memory of the running mean": Fault(_shares("saved_mean", "running_mean"), (_TRAIN,)),
    "dscale has the memory of dbias": Fault(_shares("dscale", "dbias"), (_BACKWARD,)),
    "reads from the aligned address before x": Fault(_aligned(16, skips=False), _MISALIGNED),
    "reads from the address before x that 64 divides": Fault(_aligned(64, skips=False), _MISALIGNED),
    "leaves out what lies before an aligned address": Fault(_aligned(16, skips=True), _MISALIGNED),
    "takes channels-last memory for channels-first": Fault(_other_order("x"), _LAST),
    "takes dy's channels-last memory for channels-first": Fault(_other_order("dy"), _LAST[1:2]),
    "takes strided memory for packed": Fault(_other_order("x"), _STRIDED),
    "the gradient passes a ReLU at 0": Fault(
        _mask_with_zero,
        tuple(
            f"backward,spatial,{d},nchw,8x6x4x6,fill=randn,activation=relu,residual=1" for d in ("f32", "f16", "bf16")
        ),
    ),
    "reads one element behind the residual": Fault(_reads("z", 1), _FUSED),
    "reads one element before the residual": Fault(_reads("z", -1), _FUSED),
    "writes into the residual": Fault(_changes("z"), _FUSED),
    "takes the residual of the image before": Fault(_input("z", lambda a: np.roll(a, 1, axis=0)), _FUSED),
    "reads one element behind forward's result": Fault(_reads("y", 1), _MASKED),
    "writes into forward's result": Fault(_changes("y"), _MASKED),
    "takes forward's result of the image before": Fault(_input("y", lambda a: np.roll(a, 1, axis=0)), _MASKED),
    "gradient of the residual not written": Fault(_not_written("dz"), _MASKED),
    "writes one element behind the residual's gradient": Fault(_writes("dz", 1), _MASKED),
    "gradient of the residual has the memory of dx": Fault(_shares("dz", "dx"), _MASKED),
    "writes into dy where it masks it": Fault(_masks_dy, _MASKED),
    "another last bit at another call": Fault(
        _differs, tuple(f"{line},bitwise=1" for line in (_TRAIN, _BACKWARD, _INFER)), Status.NONDETERMINISTIC
    ),
    "NaN in x taken for 0": Fault(_input("x", lambda a: np.where(np.isnan(a), 0, a)), _NAN),
    "values of x that are not finite taken for 0": Fault(_input("x", lambda a: np.where(np.isfinite(a), a, 0)), _NAN),
    "x clamped to the range of float16": Fault(
        _input("x", lambda a: np.clip(a, -65504, 65504)), tuple(f"{line},seed=2" for line in _NAN)
    ),
    "results that are not finite 0": Fault(_output(lambda a: np.where(np.isfinite(a), a, 0), *_ALL), _NAN),
    "infinite results saturated": Fault(
        _output(_saturated, "y", "dx"),
        (
            "infer,spatial,f16,nchw,4x6x5x3,fill=randn,alpha=60000",
            *(
                f"{operation},spatial,{dtype},nchw,4x6x5x3,fill=randn,alpha=2e+38"
                for operation in ("train", "backward")
                for dtype in ("f32", "bf16")
            ),
        ),
    ),
    "NaN of one channel in all": Fault(_output(_spread, "y", "dx"), _NAN),
    "results by maximum with 0, which drops NaN": Fault(
        _output(lambda a: np.fmax(a, a.dtype.type(-1e30)), *_ALL), _NAN
    ),
    "small statistics flushed to 0": Fault(
        _output(lambda a: np.where(np.abs(a) < 1e-12, 0, a), "saved_mean"),
        ("train,spatial,f32,nchw,4x6x3x5,fill=range,magnitude=1e-15",),
    ),
    **_FAULTS_OF_COMPOSED,
}
"""What goes wrong in a call."""

UNSEEN = {
    "-0 where +0 is right": "the two are equal in IEEE 754, and no output of batch norm tells them apart",
    "results that differ from call to call within the bound": "noted beside the verdict; bitwise=1 asks for the same",
    "the gradient passes a ReLU at a 0 that backward makes again": "rounding decides whether it is 0, or beside it",
    "float32 denormals flushed to 0": "the bound allows it: libraries run in that mode",
    "a call on memory of another kind": "the simulated kernels run in host memory; each library's own cases have it",
}
"""What cannot be seen, with the reason."""


@dataclasses.dataclass
class Seen:
    """What the judge made of one fault."""

    fault: str
    found: list[str]
    missed: list[str]
    """Cases in which it had another status than it must have."""
    alarms: list[str]
    """Cases that the right kernel did not pass."""

    @property
    def good(self) -> bool:
        """Found wherever it must be, and nothing else objected to."""
        return not self.missed and not self.alarms


def run() -> list[Seen]:
    """Judge every fault in every case listed for it, and the right kernel in the same cases."""
    passed: dict[str, Status] = {}
    report = []
    for name, fault in FAULTS.items():
        seen = Seen(name, [], [], [])
        for line in fault.cases:
            problem = Problem.parse(line)
            if line not in passed:
                passed[line] = run_case(problem, _session(None)).status
            if passed[line] not in (Status.PASS, Status.WARN):
                seen.alarms.append(f"{line}: {passed[line].value}")
            status = run_case(problem, _session(fault.change)).status
            (seen.found if status == fault.status else seen.missed).append(line)
        report.append(seen)
    return report


def _session(change: Change | None) -> Session:
    return Session("onednn", _Faulty(change), devices.device_for(1))


def render(report: list[Seen]) -> str:
    """As a table."""
    lines = [f"{'fault of a call':<58}{'cases found':>14}{'missed':>8}"]
    for seen in report:
        lines.append(f"{seen.fault:<58}{len(seen.found):>14}{len(seen.missed):>8}")
    for seen in report:
        lines += [f"MISSED {seen.fault}: {line}" for line in seen.missed]
        lines += [f"FALSE ALARM right kernel: {line}" for line in seen.alarms]
    lines += ["", "cannot be seen in a call:"]
    lines += [f"    {name}: {reason}" for name, reason in UNSEEN.items()]
    return "\n".join(lines)
