"""Faults of calls with an activation and of composed calls; `pybnorm.check.selftest.faults` has those of plain ones."""

import numpy as np

from pybnorm.check.language import calls
from pybnorm.check.language.calls import COMPOSED
from pybnorm.check.language.problem import Problem
from pybnorm.check.selftest.faults import (
    GAPS,
    Fault,
    Faulty,
    changes,
    changes_input,
    not_written,
    packed_from,
    reads,
    reads_gap,
    second_call,
    shares,
    skips_to_aligned,
    writes,
)
from pybnorm.check.selftest.simulated import array_of
from selftest_tool.composed import Activated, Composed

_COMPOSED_CALLS = frozenset(composed.name for composed in COMPOSED.values())


def _mask_with_zero(buffers, right, before):
    """A gradient passes where forward's result is 0, too; the kernel looks for this change."""
    right()


def _masks_dy(buffers, right, before):
    """Leaves the masked gradient where the whole one was."""
    right()
    array_of(buffers["dy"])[...] = array_of(buffers["dz"])


class FaultyCalls(Faulty, Activated, Composed):
    """Kernels with activations and composed calls, all of which go through a fault."""

    def passes(self, value):
        return value >= self.limits[0] if self.change is _mask_with_zero else super().passes(value)

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in _COMPOSED_CALLS:
            return found
        return lambda **named: self.through(found, named)


def _beside(line):
    """Reads beside and writes into each tensor that the call reads; writes beside and leaves each that it writes."""
    for tensor in calls.tensors(Problem.parse(line)):
        wrong = {"writes behind": writes(tensor.name, 1), "writes before": writes(tensor.name, -1)}
        wrong["does not write"] = not_written(tensor.name)
        if not tensor.written:
            wrong = {"reads behind": reads(tensor.name, 1), "reads before": reads(tensor.name, -1)}
            wrong["changes"] = changes(tensor.name)
        yield from ((f"{line}: {what} {tensor.name}", Fault(change, (line,))) for what, change in wrong.items())


def _lines(words, of="f32,nchw,4x6x3x5,fill=randn"):
    return tuple(f"{word},spatial,{of}" for word in words)


def _shared(line, one, other):
    return {f"{line}: {one} has the memory of {other}": Fault(shares(one, other), (line,))}


_FROM_X = tuple(word for word in COMPOSED if word != "gather_stats")
_GATHERED = "gather_stats,spatial,f32,nchw,4x6,fill=randn"
_FUSED = "spatial,{},nchw,4x6x3x5,fill=randn,activation={},residual=1"
_FUSED_LINES = (
    f"train,{_FUSED.format('f32', 'relu')}",
    f"train,{_FUSED.format('bf16', 'clamp')}",
    f"infer,{_FUSED.format('bf16', 'clipped_relu')}",
)
_MASKED = tuple(f"backward,{_FUSED.format(dtype, 'relu')}" for dtype in ("f32", "bf16"))
_SECOND = tuple(f"{line},repeats=2" for line in _lines(_FROM_X))
_LESS = tuple(word for word in _FROM_X if word != "backward_reduce")
_MISALIGNED = "bf16,nchw,4x6x3x5,fill=randn,misalign=1"
FAULTS = {
    "the gradient passes a ReLU at 0": Fault(
        _mask_with_zero, tuple(line.replace("4x6x3x5", "8x6x4x6") for line in _MASKED)
    ),
    "takes the residual of the image before": Fault(changes_input("z", lambda a: np.roll(a, 1, axis=0)), _FUSED_LINES),
    "takes forward's result of the image before": Fault(changes_input("y", lambda a: np.roll(a, 1, axis=0)), _MASKED),
    "writes into dy where it masks it": Fault(_masks_dy, _MASKED),
    "reads the gaps of a strided tensor": Fault(reads_gap, _lines(_FROM_X, f"f32,{GAPS}")),
    "second call is wrong": Fault(second_call, _SECOND),
    "reads from the aligned address before x": Fault(packed_from("x", 16), _lines(_FROM_X, _MISALIGNED)),
    "leaves out what lies before an aligned address": Fault(skips_to_aligned(16), _lines(_LESS, _MISALIGNED)),
    "takes channels-last for channels-first": Fault(packed_from("x"), _lines(_FROM_X, "f32,nhwc,4x6x3x5,fill=randn")),
    "takes strided memory for packed": Fault(packed_from("x"), _lines(_FROM_X, f"f32,{GAPS}")),
    **_shared(_MASKED[0], "dz", "dx"),
    **_shared(*_lines(["frozen"]), "dscale", "dbias"),
    **_shared(*_lines(["backward_reduce"]), "sum_dy", "sum_dy_xmu"),
    **_shared(*_lines(["sync_train"]), "running_mean", "saved_mean"),
    **_shared(_GATHERED, "mean", "variance"),
}
for _line in (*_lines(_FROM_X), _GATHERED, *_FUSED_LINES, *_MASKED):
    FAULTS |= dict(_beside(_line))
