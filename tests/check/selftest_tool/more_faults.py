"""Faults of calls with an activation and of composed calls; `pybnorm.check.selftest.faults` has those of plain ones."""

import numpy as np

from pybnorm.check.language.calls import COMPOSED
from pybnorm.check.selftest.faults import (
    GAPS,
    Fault,
    Faulty,
    aligned,
    changes,
    changes_input,
    not_written,
    other_order,
    reads,
    reads_gap,
    second_call,
    shares,
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


_FROM_X = ("frozen", "training_grad", "backward_reduce", "backward_elemt", "elemt", "sync_train", "sync_backward")
_FROM_DY = tuple(word for word in _FROM_X if word not in ("elemt", "sync_train"))
_TO_DX = tuple(word for word in _FROM_DY if word != "backward_reduce")
_TO_Y = ("elemt", "sync_train")
_TO_DSCALE = tuple(word for word in _FROM_DY if word != "backward_elemt")
_BY_INVERSE = ("backward_reduce", "backward_elemt", "elemt")
_GATHERED = ("gather_stats,spatial,f32,nchw,4x6,fill=randn", "gather_stats,spatial,f64,nchw,5x3,fill=randn")


def _composed(words, dtypes=("f32",), rest=""):
    return tuple(f"{word},spatial,{dtype},nchw,4x6x3x5,fill=randn{rest}" for word in words for dtype in dtypes)


_EACH = ("f32", "f16", "bf16")
_FUSED = tuple(
    f"{o},spatial,{d},nchw,4x6x3x5,fill=randn,activation={a},residual=1"
    for o, a in (("train", "relu"), ("train", "clamp"), ("infer", "clipped_relu"))
    for d in ("f32", "bf16")
)
_MASKED = tuple(f"backward,spatial,{d},nchw,4x6x3x5,fill=randn,activation=relu,residual=1" for d in ("f32", "bf16"))
FAULTS = {
    "the gradient passes a ReLU at 0": Fault(
        _mask_with_zero,
        tuple(
            f"backward,spatial,{d},nchw,8x6x4x6,fill=randn,activation=relu,residual=1" for d in ("f32", "f16", "bf16")
        ),
    ),
    "reads one element behind the residual": Fault(reads("z", 1), _FUSED),
    "reads one element before the residual": Fault(reads("z", -1), _FUSED),
    "writes into the residual": Fault(changes("z"), _FUSED),
    "takes the residual of the image before": Fault(changes_input("z", lambda a: np.roll(a, 1, axis=0)), _FUSED),
    "reads one element behind forward's result": Fault(reads("y", 1), _MASKED),
    "writes into forward's result": Fault(changes("y"), _MASKED),
    "takes forward's result of the image before": Fault(changes_input("y", lambda a: np.roll(a, 1, axis=0)), _MASKED),
    "gradient of the residual not written": Fault(not_written("dz"), _MASKED),
    "writes one element behind the residual's gradient": Fault(writes("dz", 1), _MASKED),
    "gradient of the residual has the memory of dx": Fault(shares("dz", "dx"), _MASKED),
    "writes into dy where it masks it": Fault(_masks_dy, _MASKED),
    "composed: reads one element behind x": Fault(reads("x", 1), _composed(_FROM_X, _EACH)),
    "composed: reads one element before x": Fault(reads("x", -1), _composed(_FROM_X, _EACH)),
    "composed: reads one element behind dy": Fault(reads("dy", 1), _composed(_FROM_DY)),
    "composed: reads one element before dy": Fault(reads("dy", -1), _composed(_FROM_DY)),
    "composed: reads one element behind a given mean": Fault(reads("mean", 1), _composed((*_TO_DX[:2], *_BY_INVERSE))),
    "composed: reads one element behind a given inverse": Fault(reads("inv_variance", 1), _composed(_BY_INVERSE)),
    "composed: reads one element behind a given sum": Fault(reads("sum_dy", 1), _composed(("backward_elemt",))),
    "composed: reads one element behind the ranks' means": Fault(reads("means", 1), _GATHERED),
    "composed: reads one element before the ranks' squares": Fault(reads("m2s", -1), _GATHERED),
    "composed: reads the gaps of a strided tensor": Fault(
        reads_gap, tuple(f"{word},spatial,f32,{GAPS}" for word in _FROM_X)
    ),
    "composed: writes one element behind dx": Fault(writes("dx", 1), _composed(_TO_DX, _EACH)),
    "composed: writes one element before y": Fault(writes("y", -1), _composed(_TO_Y, _EACH)),
    "composed: writes one element behind dbias": Fault(writes("dbias", 1), _composed(_TO_DSCALE)),
    "composed: writes one element behind the sum of dy x": Fault(
        writes("sum_dy_xmu", 1), _composed(("backward_reduce",))
    ),
    "composed: writes one element behind the saved mean": Fault(writes("saved_mean", 1), _composed(("sync_train",))),
    "composed: writes one element behind the merged inverse": Fault(writes("inv_variance", 1), _GATHERED),
    "composed: writes into x": Fault(changes("x"), _composed(_FROM_X)),
    "composed: writes into dy": Fault(changes("dy"), _composed(_FROM_DY)),
    "composed: writes into a given mean": Fault(changes("mean"), _composed((*_TO_DX[:2], *_BY_INVERSE))),
    "composed: writes into the saved mean": Fault(changes("saved_mean"), _composed(("sync_backward",))),
    "composed: writes into the ranks' squares": Fault(changes("m2s"), _GATHERED),
    "composed: result not written": Fault(not_written("y", "dx", "sum_dy"), _composed(_FROM_X)),
    "composed: merged mean not written": Fault(not_written("mean"), _GATHERED),
    "composed: dscale not written": Fault(not_written("dscale"), _composed(_TO_DSCALE)),
    "composed: running statistics not written": Fault(
        not_written("running_mean", "running_variance"), (*_composed(("sync_train",)), *_GATHERED)
    ),
    "composed: second call is wrong": Fault(second_call, (*_composed(_FROM_X, rest=",repeats=2"),)),
    "composed: dscale has the memory of dbias": Fault(shares("dscale", "dbias"), _composed(_TO_DSCALE)),
    "composed: the sum of dy has the memory of that of dy x": Fault(
        shares("sum_dy", "sum_dy_xmu"), _composed(("backward_reduce",))
    ),
    "composed: running mean has the memory of the saved mean": Fault(
        shares("running_mean", "saved_mean"), _composed(("sync_train",))
    ),
    "composed: merged mean has the memory of the variance": Fault(shares("mean", "variance"), _GATHERED),
    "composed: reads from the aligned address before x": Fault(
        aligned(16, skips=False), _composed(_FROM_X, ("f32", "bf16"), ",misalign=1")
    ),
    "composed: leaves out what lies before an aligned address": Fault(
        aligned(16, skips=True),
        _composed(tuple(word for word in _FROM_X if word != "backward_reduce"), ("f32", "bf16"), ",misalign=1"),
    ),
    "composed: takes channels-last memory for channels-first": Fault(
        other_order("x"), tuple(line.replace("nchw", "nhwc") for line in _composed(_FROM_X))
    ),
    "composed: takes strided memory for packed": Fault(
        other_order("x"), tuple(f"{word},spatial,f32,{GAPS}" for word in _FROM_X)
    ),
}
