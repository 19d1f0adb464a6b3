"""Known defects of cuDNN."""

from __future__ import annotations

import functools

from pybnorm.defects import kinds
from pybnorm.defects.kinds import BACKWARD, BY_CHANNEL, LONG_CHAIN, SIXTEEN_BITS, TRAINING, Call, Defect, Effect, where
from pybnorm.enums import DataType, Layout, Mode, Operation

_PER_CHANNEL = ("spatial", "ex", "graph")
"""Algorithms that sum in floating point and take the statistics from centred values."""


def _large_persistent(call: Call) -> bool:
    """Tell whether several blocks add a channel, in fixed point; one block adds in floating point."""
    backward = call.operation == Operation.BACKWARD
    single = 8192 if backward else 16384
    most = 4 * single if call.dtype in SIXTEEN_BITS else single
    return call.m > most and (call.saved or not backward)


_H200 = "NVIDIA H200 (compute capability 9.0)"
RUNS = (
    kinds.Run((9, 19, 0), "de527175e4292cd0", "of the machine", _H200, "2026-11-23", "cudnn-versions.md"),
    kinds.Run((9, 28, 1), "", "PyPI nvidia-cudnn-cu13 9.28.1.4", _H200, "2026-11-23", "cudnn-versions.md"),
)

_defect = functools.partial(Defect, backend="cudnn", seen=RUNS)
_NOT_DOUBLE = (*SIXTEEN_BITS, DataType.FLOAT32)
DEFECTS = (
    _defect(
        id="cudnn-inference-rows",
        effect=Effect.FAILS,
        what="spatial inference refuses N >= 65536 as not supported",
        links=("pytorch/pytorch#19911", "microsoft/onnxruntime#7095"),
        example="PointNet on a cloud of points as 65,536 rows",
        case="infer,spatial,f32,nchw,65536x2x1x1,fill=randn",
        predicate=where(lambda p: p.dims[0] >= 65536, operation=Operation.FORWARD_INFERENCE, mode=BY_CHANNEL),
        note="NOT_SUPPORTED",
        ways=("pointwise",),
    ),
    _defect(
        id="cudnn-per-activation-rows",
        effect=Effect.FAILS,
        what="per-activation training refuses N > 131070 as not supported, and inference N > 262136",
        links=("pytorch/pytorch#2917",),
        example="BatchNorm1d on 140,000 rows",
        case="train,peract,f32,nchw,131071x2x1x1,fill=randn",
        predicate=where(
            lambda p: p.dims[0] > (131070 if p.operation == Operation.FORWARD_TRAINING else 262136),
            mode=Mode.PER_ACTIVATION,
            operation=(Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE),
        ),
        note="NOT_SUPPORTED",
    ),
    _defect(
        id="cudnn-per-activation-chains",
        effect=Effect.WRONG,
        outputs=("dx",),
        what="per-activation backward without saved statistics sums them in one chain, which misses the bound from "
        "some 700,000 values on (1.4 times at a million)",
        example="BatchNorm1d on 1,000,000 rows whose saved statistics were not kept",
        case="backward,peract,f32,nchw,1000000x2x1x1,fill=randn,saved=0",
        predicate=where(
            lambda p: p.dims[0] > LONG_CHAIN, mode=Mode.PER_ACTIVATION, operation=Operation.BACKWARD, saved=False
        ),
        ratio=4.0,
        rounded=True,
    ),
    _defect(
        id="cudnn-persistent-fixed-point",
        effect=Effect.WRONG,
        outputs=(*TRAINING, *BACKWARD),
        what="mode SPATIAL_PERSISTENT adds what several blocks of a channel have summed in fixed point (training of "
        "more than 16384 values for each channel, 65536 of 16 bits; backward with saved statistics of half as many): "
        "an absolute error of about 1e-6, so that gradients and deviations below 1e-4 lose their digits, and infinite "
        "sums above 1e10",
        links=("pytorch/pytorch#13844",),
        example="gradients of 1e-6, as late in a training",
        case="train,persistent,f32,nchw,4x4x4x4096,fill=range,magnitude=1e-06,eps=0",
        predicate=where(_large_persistent, mode=Mode.SPATIAL_PERSISTENT, operation=kinds.ONE_PASS, dtype=_NOT_DOUBLE),
        ratio=1e7,
        fills=("range", "sqrteps"),
        ways=_PER_CHANNEL,
    ),
    _defect(
        id="cudnn-misaligned",
        effect=Effect.FAILS,
        what="the entry points read pairs of 16-bit elements unless all tensors are channels-last: an address that is "
        "no multiple of 4 would lose the CUDA context, so that it is refused before the call",
        example="a float16 view that begins at an odd element",
        case="train,spatial,f16,nchw,4x6x8x8,fill=randn,misalign=1",
        predicate=where(lambda p: p.alignment < 4 and p.layout != Layout.CHANNELS_LAST, dtype=SIXTEEN_BITS),
        note="4-byte aligned",
    ),
    _defect(
        id="cudnn-channels-last-inference",
        effect=Effect.WEAK,
        outputs=("y",),
        what="channels-last inference computes x * a + b, whose error grows with mean / deviation: 4e-4 of y at 1e4, "
        "where the channels-first kernel errs by 5e-8",
        example="pressures in pascal, 101,325 and 10 more or less, channels last",
        case="infer,spatial,f32,nhwc,8x16x14x14,fill=randn,kappa=10000",
        predicate=where(
            operation=Operation.FORWARD_INFERENCE, mode=BY_CHANNEL, layout=Layout.CHANNELS_LAST, dtype=_NOT_DOUBLE
        ),
        ways=("pointwise",),
        better=True,
    ),
    kinds.chained("cudnn", RUNS),
    _defect(
        id="cudnn-channels-last-gradients",
        seen=(RUNS[0]._replace(date="2026-11-27", file="cuda-auto.txt"),),
        effect=Effect.WEAK,
        outputs=BACKWARD,
        what="channels-last backward by the Ex entry points or a graph adds in steps of its own: gradients whose sums "
        "need no rounding are off by up to 2e-5 (6,272 terms and more; not seen to 2,048, nor by mode spatial)",
        example="a channels-last ResNet on 8 images, 64 channels of 28x28",
        case="backward,spatial,f32,nhwc,8x64x28x28,algorithm=ex",
        predicate=where(
            lambda p: p.saved and p.m > 2048,
            operation=Operation.BACKWARD,
            mode=BY_CHANNEL,
            layout=Layout.CHANNELS_LAST,
            dtype=_NOT_DOUBLE,
        ),
        ratio={"dx": 10.0, "dscale": 40.0, "dbias": 25.0},
        exact=True,
        ways=("spatial",),
    ),
    _defect(
        id="cudnn-persistent-mean",
        effect=Effect.WEAK,
        outputs=("saved_mean", "running_mean"),
        what="persistent training adds in steps of its own: the mean of data whose sums need no rounding is off by up "
        "to 4e-7 of their size (401,408 terms; not seen to 100,352)",
        example="ResNet's first batch norm on 32 images, 112x112",
        case="train,persistent,f32,nchw,32x4x112x112",
        predicate=where(lambda p: p.m > 100_352, mode=Mode.SPATIAL_PERSISTENT, operation=Operation.FORWARD_TRAINING),
        ratio={"saved_mean": 4.0, "running_mean": 1.0},
        exact=True,
    ),
)
