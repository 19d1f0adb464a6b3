"""Faults that only a whole call shows: of memory, of a second call, of values that are not finite.

Each is put into the simulated two-pass kernel and must be FAIL, or what is named, in every case that is listed for it;
the kernel without it must pass the same case, or be WARN where an infinity is open to formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pybnorm import _arguments, devices
from pybnorm._arrays import Buffer
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import run_case
from pybnorm.check.run.session import Session
from pybnorm.check.selftest.simulated import Kernels, array_of, memory
from pybnorm.reference.namespaces import Array

Call = Callable[[], None]
Change = Callable[[dict[str, Buffer], Call, int], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and the cases that must show it."""

    change: Change
    """Gets the call's buffers by name, the right call, and how many calls came before."""
    cases: tuple[str, ...]
    status: Status = Status.FAIL
    """What it must make of each."""


class Faulty(Kernels):
    """Kernels whose calls go through a fault."""

    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self.change, self.calls = change or (lambda buffers, right, before: right()), 0

    def through(self, call: Callable[..., None], named: dict[str, Any]) -> None:
        """Call through the fault."""
        buffers = {n: b for n, b in named.items() if isinstance(b, Buffer)}
        with np.errstate(all="ignore"):
            self.change(buffers, functools.partial(call, **named), self.calls)
        self.calls += 1

    def forward_training(self, **named: Any) -> None:  # type: ignore[override]  # noqa: D102
        self.through(super().forward_training, named)

    def forward_inference(self, **named: Any) -> None:  # type: ignore[override]  # noqa: D102
        self.through(super().forward_inference, named)

    def backward(self, **named: Any) -> None:  # type: ignore[override]  # noqa: D102
        self.through(super().backward, named)


def _beside(buffer: Buffer, elements: int) -> Array:
    """The element so many behind the last of a buffer; negative: before its first."""
    dtype = numpy_dtype(buffer.dtype)
    offset = _arguments.span(buffer.dims, buffer.strides) - 1 + elements if elements > 0 else elements
    return memory(buffer.pointer + offset * dtype.itemsize, dtype, (1,))


def _result(buffers: dict[str, Buffer]) -> Array:
    return array_of(next(buffers[name] for name in ("dx", "y", "sum_dy", "mean") if name in buffers))


def _after(alter: Callable[[dict[str, Buffer], int], object]) -> Change:
    """The right call, and then what `alter` does to its buffers; it is told how many calls came before, too."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        right()
        alter(buffers, before)

    return change


def _leaves(parts: Callable[[dict[str, Buffer]], Iterable[Array]]) -> Change:
    """Leaves views of results as they were before the call."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        old = [(view, view.copy()) for view in parts(buffers)]
        right()
        for view, values in old:
            view[...] = values

    return change


def _sees(name: str, other: Callable[[Buffer, Array], Array]) -> Change:
    """The call sees other values of an input, which are put back."""

    def change(buffers: dict[str, Buffer], right: Call, before: int) -> None:
        values = array_of(buffers[name])
        kept = values.copy()
        values[...] = other(buffers[name], kept)
        right()
        values[...] = kept

    return change


def _add(values: Array, more: Any) -> None:
    values.flat[0] = values.flat[0] + more


def reads(name: str, elements: int) -> Change:
    """Adds what lies beside an input to one element of the result."""

    def alter(buffers: dict[str, Buffer], before: int) -> None:
        out = _result(buffers)
        _add(out, _beside(buffers[name], elements)[0] * out.dtype.type(2.0**-10))

    return _after(alter)


def _reads_gap(buffers: dict[str, Buffer], before: int) -> None:
    x, out = buffers["x"], _result(buffers)
    _add(out, memory(x.pointer + (x.strides[0] - 1) * out.itemsize, out.dtype, ())[()])


reads_gap = _after(_reads_gap)
"""Adds what lies in a gap of x to one element of the result."""


def writes(name: str, elements: int) -> Change:
    """Writes beside an output."""
    return _after(lambda buffers, _: _beside(buffers[name], elements).fill(0))


def changes(name: str) -> Change:
    """Writes into an input."""
    return _after(lambda buffers, _: _add(array_of(buffers[name]), 1))


def not_written(*names: str) -> Change:
    """Leaves results as they were before the call."""
    return _leaves(lambda buffers: [array_of(buffers[name]) for name in names if name in buffers])


def skips_to_aligned(bytes_: int) -> Change:
    """Leaves out the elements of the result before an aligned address of x."""

    def head(buffers: dict[str, Buffer]) -> list[Array]:
        out = _result(buffers)
        return [out.reshape(-1)[: -buffers["x"].pointer % bytes_ // out.itemsize]]

    return _leaves(head)


def _quarter_more(buffers: dict[str, Buffer]) -> None:
    out = _result(buffers)
    out[...] = out * out.dtype.type(1.25)


second_call = _after(lambda buffers, before: _quarter_more(buffers) if before % 2 else None)
"""Every second call is wrong."""


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


def changes_input(name: str, change: Callable[[Array], Array]) -> Change:
    """The call sees a changed input."""
    return _sees(name, lambda _, values: change(values.astype(np.float64)).astype(values.dtype))


def packed_from(name: str, bytes_: int = 1) -> Change:
    """Takes the memory from an aligned address on for an input that is packed channels-first."""
    return _sees(name, lambda b, values: memory(b.pointer - b.pointer % bytes_, values.dtype, values.shape).copy())


def _output(change: Callable[[Array], Array], *names: str) -> Change:
    def alter(buffers: dict[str, Buffer], before: int) -> None:
        for values in (array_of(buffers[name]) for name in names if name in buffers):
            values[...] = change(values)

    return _after(alter)


def _saturated(values: Array) -> Array:
    kind = values.dtype.type
    largest = np.nextafter(kind(np.inf), kind(0))
    return np.where(np.isinf(values), np.copysign(largest, values), values)


def _next(values: Array) -> None:
    values.flat[0] = np.nextafter(values.flat[0], values.dtype.type(np.inf))


def shares(one: str, other: str) -> Change:
    """Two outputs through the same memory of the kernel's own: the first gets what the second is."""
    return _after(lambda buffers, _: np.copyto(array_of(buffers[one]), array_of(buffers[other])))


_ALL = ("y", "dx", "saved_mean", "saved_inv_variance", "running_mean", "running_variance", "dscale", "dbias")
_FORWARD_FIRST = ("train", "infer", "backward")


def _cases(*tensors: str, operations: Sequence[str] = ("train", "backward", "infer")) -> tuple[str, ...]:
    """Every operation on each of the tensors, by dtype, layout and options."""
    return tuple(f"{operation},spatial,{tensor}" for operation in operations for tensor in tensors)


GAPS = "strides=360x60x18x3,2x4x3x5,fill=randn"
_PLAIN = _TRAIN, _BACKWARD, _INFER = _cases("f32,nchw,4x6x3x5,fill=randn")
_SHORT = _cases("f16,nchw,4x6x3x5,fill=randn", "bf16,nchw,4x6x3x5,fill=randn", operations=_FORWARD_FIRST)
_STRIDED = _cases(f"f32,{GAPS}")
_LAST = _cases("f32,nhwc,4x6x3x5,fill=randn")
_MISALIGNED = _cases("f32,nchw,4x6x3x5,fill=randn,misalign=1", "bf16,nchw,4x6x3x5,fill=randn,misalign=3")
_NAN = _cases("f32,nchw,4x6x3x5,fill=special", operations=_FORWARD_FIRST)
_REPEATED = tuple(f"{line},repeats=2" for line in _PLAIN)

FAULTS: dict[str, Fault] = {
    "reads one element behind x": Fault(reads("x", 1), (*_PLAIN, *_SHORT)),
    "reads three elements behind x": Fault(reads("x", 3), (*_PLAIN, *_SHORT)),
    "reads one element before x": Fault(reads("x", -1), (*_PLAIN, *_SHORT)),
    "reads one element behind dy": Fault(reads("dy", 1), (_BACKWARD,)),
    "reads one element before dy": Fault(reads("dy", -1), (_BACKWARD,)),
    "reads one element behind the scale": Fault(reads("scale", 1), _PLAIN),
    "reads the gaps of a strided tensor": Fault(reads_gap, _STRIDED),
    "writes one element behind y": Fault(writes("y", 1), (_TRAIN, _INFER)),
    "writes one element before y": Fault(writes("y", -1), (_TRAIN, _INFER)),
    "writes one element behind dx": Fault(writes("dx", 1), (_BACKWARD,)),
    "writes one element behind dbias": Fault(writes("dbias", 1), (_BACKWARD,)),
    "writes one element behind the saved mean": Fault(writes("saved_mean", 1), (_TRAIN,)),
    "writes into x": Fault(changes("x"), _PLAIN),
    "writes into dy": Fault(changes("dy"), (_BACKWARD,)),
    "writes into the scale": Fault(changes("scale"), _PLAIN),
    "writes into the running mean of inference": Fault(changes("running_mean"), (_INFER,)),
    "result not written": Fault(not_written("y", "dx"), _PLAIN),
    "saved statistics not written": Fault(not_written("saved_mean", "saved_inv_variance"), (_TRAIN,)),
    "running statistics not written": Fault(not_written("running_mean", "running_variance"), (_TRAIN,)),
    "dscale not written": Fault(not_written("dscale"), (_BACKWARD,)),
    "last row of the result not written": Fault(_leaves(lambda b: [_result(b)[-1, -1, -1]]), _PLAIN),
    "second call is wrong": Fault(second_call, _REPEATED),
    "first call is wrong": Fault(_after(lambda b, before: None if before else _quarter_more(b)), _REPEATED),
    "reads its input after it was overwritten": Fault(
        _in_place, tuple(f"{line},inplace=1" for line in (_TRAIN, _BACKWARD))
    ),
    "running mean has the memory of the saved mean": Fault(shares("running_mean", "saved_mean"), (_TRAIN,)),
    "saved mean has the memory of the running mean": Fault(shares("saved_mean", "running_mean"), (_TRAIN,)),
    "dscale has the memory of dbias": Fault(shares("dscale", "dbias"), (_BACKWARD,)),
    "reads from the aligned address before x": Fault(packed_from("x", 16), _MISALIGNED),
    "reads from the address before x that 64 divides": Fault(packed_from("x", 64), _MISALIGNED),
    "leaves out what lies before an aligned address": Fault(skips_to_aligned(16), _MISALIGNED),
    "takes channels-last memory for channels-first": Fault(packed_from("x"), _LAST),
    "takes dy's channels-last memory for channels-first": Fault(packed_from("dy"), _LAST[1:2]),
    "takes strided memory for packed": Fault(packed_from("x"), _STRIDED),
    "another last bit at another call": Fault(
        _after(lambda buffers, before: _next(_result(buffers)) if before % 2 else None),
        tuple(f"{line},bitwise=1" for line in _PLAIN),
        Status.NONDETERMINISTIC,
    ),
    "NaN in x taken for 0": Fault(changes_input("x", lambda a: np.where(np.isnan(a), 0, a)), _NAN),
    "values of x that are not finite taken for 0": Fault(
        changes_input("x", lambda a: np.where(np.isfinite(a), a, 0)), _NAN
    ),
    "x clamped to the range of float16": Fault(
        changes_input("x", lambda a: np.clip(a, -65504, 65504)), tuple(f"{line},seed=2" for line in _NAN)
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
    "NaN of one channel in all": Fault(
        _output(lambda a: a + a.sum(axis=1, keepdims=True) * a.dtype.type(0), "y", "dx"), _NAN
    ),
    "results by maximum with 0, which drops NaN": Fault(
        _output(lambda a: np.fmax(a, a.dtype.type(-1e30)), *_ALL), _NAN
    ),
    "small statistics flushed to 0": Fault(
        _output(lambda a: np.where(np.abs(a) < 1e-12, 0, a), "saved_mean"),
        ("train,spatial,f32,nchw,4x6x3x5,fill=range,magnitude=1e-15",),
    ),
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
    """The judge's answer to one fault."""

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


def run(faults: Mapping[str, Fault] = FAULTS, kernels: type[Faulty] = Faulty) -> list[Seen]:
    """Judge every fault in every case listed for it, and the right kernel in the same cases."""

    def status_of(problem: Problem, change: Change | None) -> Status:
        return run_case(problem, Session("onednn", kernels(change), devices.device_for(1))).status

    passed: dict[str, Status] = {}
    report = []
    for name, fault in faults.items():
        seen = Seen(name, [], [], [])
        for line in fault.cases:
            problem = Problem.parse(line)
            if line not in passed:
                passed[line] = status_of(problem, None)
            if passed[line] not in (Status.PASS, Status.WARN):
                seen.alarms.append(f"{line}: {passed[line].value}")
            status = status_of(problem, fault.change)
            (seen.found if status == fault.status else seen.missed).append(line)
        report.append(seen)
    return report


def render(report: list[Seen]) -> str:
    """Write a table."""
    lines = [f"{'fault of a call':<58}{'cases found':>14}{'missed':>8}"]
    for seen in report:
        lines.append(f"{seen.fault:<58}{len(seen.found):>14}{len(seen.missed):>8}")
    for seen in report:
        lines += [f"MISSED {seen.fault}: {line}" for line in seen.missed]
        lines += [f"FALSE ALARM right kernel: {line}" for line in seen.alarms]
    lines += ["", "cannot be seen in a call:"]
    lines += [f"    {name}: {reason}" for name, reason in UNSEEN.items()]
    return "\n".join(lines)
