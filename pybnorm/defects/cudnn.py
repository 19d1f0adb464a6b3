"""Known defects of cuDNN."""

from __future__ import annotations

from pybnorm.defects.kinds import BACKWARD, LONG_CHAIN, SIXTEEN_BITS, TRAINING, Call, Defect, Effect, Run, chained
from pybnorm.enums import DataType, Layout, Mode, Operation

__all__ = ["DEFECTS", "RUNS"]

_PER_CHANNEL = ("spatial", "ex", "graph")
"""Algorithms that sum in floating point and take the statistics from centred values."""


def _large_persistent(call: Call) -> bool:
    """Tell whether several blocks add a channel, in fixed point; one block adds in floating point."""
    if call.mode != Mode.SPATIAL_PERSISTENT or call.operation == Operation.FORWARD_INFERENCE:
        return False
    if call.dtype == DataType.FLOAT64:
        return False
    backward = call.operation == Operation.BACKWARD
    single = 8192 if backward else 16384
    most = 4 * single if call.dtype in SIXTEEN_BITS else single
    return call.m > most and (call.saved or not backward)


_H200 = "NVIDIA H200 (compute capability 9.0)"
RUNS = (
    Run((9, 19, 0), "de527175e4292cd0", "of the machine", _H200, "2026-11-23", "cudnn-versions.md"),
    Run((9, 28, 1), "", "PyPI nvidia-cudnn-cu13 9.28.1.4", _H200, "2026-11-23", "cudnn-versions.md"),
)

DEFECTS = (
    Defect(
        id="cudnn-inference-rows",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.FAILS,
        outputs=(),
        what="spatial inference refuses N >= 65536 as not supported",
        links=("pytorch/pytorch#19911", "microsoft/onnxruntime#7095"),
        example="PointNet on a cloud of points as 65,536 rows",
        case="infer,spatial,f32,nchw,65536x2x1x1,fill=randn",
        predicate=lambda p: (
            p.operation == Operation.FORWARD_INFERENCE and p.mode != Mode.PER_ACTIVATION and p.dims[0] >= 65536
        ),
        note="NOT_SUPPORTED",
        ways=("pointwise",),
    ),
    Defect(
        id="cudnn-per-activation-rows",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.FAILS,
        outputs=(),
        what="per-activation training refuses N > 131070 as not supported, and inference N > 262136",
        links=("pytorch/pytorch#2917",),
        example="BatchNorm1d on 140,000 rows",
        case="train,peract,f32,nchw,131071x2x1x1,fill=randn",
        predicate=lambda p: (
            p.mode == Mode.PER_ACTIVATION
            and p.operation != Operation.BACKWARD
            and p.dims[0] > (131070 if p.operation == Operation.FORWARD_TRAINING else 262136)
        ),
        note="NOT_SUPPORTED",
    ),
    Defect(
        id="cudnn-per-activation-chains",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.WRONG,
        outputs=("dx",),
        what="per-activation backward without saved statistics sums them in one chain, which misses the bound from "
        "some 700,000 values on (1.4 times at a million)",
        links=(),
        example="BatchNorm1d on 1,000,000 rows whose saved statistics were not kept",
        case="backward,peract,f32,nchw,1000000x2x1x1,fill=randn,saved=0",
        predicate=lambda p: (
            p.mode == Mode.PER_ACTIVATION
            and p.operation == Operation.BACKWARD
            and not p.saved
            and p.dims[0] > LONG_CHAIN
        ),
        ratio=4.0,
        rounded=True,
    ),
    Defect(
        id="cudnn-persistent-fixed-point",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.WRONG,
        outputs=(*TRAINING, *BACKWARD),
        what="mode SPATIAL_PERSISTENT adds what several blocks of a channel have summed in fixed point (training of "
        "more than 16384 values for each channel, 65536 of 16 bits; backward with saved statistics of half as many): "
        "an absolute error of about 1e-6, so that gradients and deviations below 1e-4 lose their digits, and infinite "
        "sums above 1e10",
        links=("pytorch/pytorch#13844",),
        example="gradients of 1e-6, as late in a training",
        case="train,persistent,f32,nchw,4x4x4x4096,fill=range,magnitude=1e-06,eps=0",
        predicate=_large_persistent,
        ratio=1e7,
        fills=("range", "sqrteps"),
        ways=_PER_CHANNEL,
    ),
    Defect(
        id="cudnn-misaligned",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.FAILS,
        outputs=(),
        what="the entry points read pairs of 16-bit elements unless all tensors are channels-last: an address that is "
        "no multiple of 4 would lose the CUDA context, so that it is refused before the call",
        links=(),
        example="a float16 view that begins at an odd element",
        case="train,spatial,f16,nchw,4x6x8x8,fill=randn,misalign=1",
        predicate=lambda p: p.dtype in SIXTEEN_BITS and p.alignment < 4 and p.layout != Layout.CHANNELS_LAST,
        note="4-byte aligned",
    ),
    Defect(
        id="cudnn-channels-last-inference",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.WEAK,
        outputs=("y",),
        what="channels-last inference computes x * a + b, whose error grows with mean / deviation: 4e-4 of y at 1e4, "
        "where the channels-first kernel errs by 5e-8",
        links=(),
        example="pressures in pascal, 101,325 and 10 more or less, channels last",
        case="infer,spatial,f32,nhwc,8x16x14x14,fill=randn,kappa=10000",
        predicate=lambda p: (
            p.operation == Operation.FORWARD_INFERENCE
            and p.mode != Mode.PER_ACTIVATION
            and p.layout == Layout.CHANNELS_LAST
            and p.dtype != DataType.FLOAT64
        ),
        ways=("pointwise",),
        better=True,
    ),
    chained("cudnn", RUNS),
    Defect(
        id="cudnn-channels-last-gradients",
        backend="cudnn",
        seen=(RUNS[0]._replace(date="2026-11-27", file="cuda-auto.txt"),),
        effect=Effect.WEAK,
        outputs=BACKWARD,
        what="channels-last backward by the Ex entry points or a graph adds in steps of its own: gradients whose sums "
        "need no rounding are off by up to 2e-5 (6,272 terms and more; not seen to 2,048, nor by mode spatial)",
        links=(),
        example="a channels-last ResNet on 8 images, 64 channels of 28x28",
        case="backward,spatial,f32,nhwc,8x64x28x28,algorithm=ex",
        predicate=lambda p: (
            p.operation == Operation.BACKWARD
            and p.mode != Mode.PER_ACTIVATION
            and p.layout == Layout.CHANNELS_LAST
            and p.saved
            and p.dtype != DataType.FLOAT64
            and p.m > 2048
        ),
        ratio={"dx": 10.0, "dscale": 40.0, "dbias": 25.0},
        exact=True,
        ways=("spatial",),
    ),
    Defect(
        id="cudnn-persistent-mean",
        backend="cudnn",
        seen=RUNS,
        effect=Effect.WEAK,
        outputs=("saved_mean", "running_mean"),
        what="persistent training adds in steps of its own: the mean of data whose sums need no rounding is off by up "
        "to 4e-7 of their size (401,408 terms; not seen to 100,352)",
        links=(),
        example="ResNet's first batch norm on 32 images, 112x112",
        case="train,persistent,f32,nchw,32x4x112x112",
        predicate=lambda p: (
            p.mode == Mode.SPATIAL_PERSISTENT and p.operation == Operation.FORWARD_TRAINING and p.m > 100_352
        ),
        ratio={"saved_mean": 4.0, "running_mean": 1.0},
        exact=True,
    ),
)
