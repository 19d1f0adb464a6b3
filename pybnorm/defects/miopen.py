"""Known defects of MIOpen.

The names of variants are those of MIOpen's solvers: which loop of its kernel a problem gets depends on sizes alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from pybnorm.defects import kinds
from pybnorm.defects.kinds import BACKWARD, ONE_PASS, SIXTEEN_BITS, TRAINING, Call, Defect, Effect, Run, Version, where
from pybnorm.enums import DataType, Layout, Mode, Operation

_CHANNELS_LAST = {"mode": Mode.SPATIAL, "layout": Layout.CHANNELS_LAST}
_LARGE = 32 * 1024 * 1024


def _plane(call: Call) -> int:
    return math.prod(call.dims[2:])


def _spatial(call: Call, operation: Operation) -> bool:
    return call.operation == operation and call.mode == Mode.SPATIAL and call.layout == Layout.CHANNELS_FIRST


def _backward_variant_1(call: Call) -> bool:
    n, plane = call.dims[0], _plane(call)
    if not _spatial(call, Operation.BACKWARD):
        return False
    if call.dtype == DataType.FLOAT16 and 60 < plane < 200:
        return True
    return n * plane < _LARGE and (plane > 1024 or (plane > 512 and n >= 32))


def _training_variant_1(call: Call) -> bool:
    n, plane = call.dims[0], _plane(call)
    if not _spatial(call, Operation.FORWARD_TRAINING):
        return False
    if call.dtype in SIXTEEN_BITS:
        return plane > 512 or (n >= 256 and plane > 60)
    return n * plane < _LARGE and plane > 1024 and n <= 768


def _training_variant_2(call: Call) -> bool:
    n, plane = call.dims[0], _plane(call)
    if not _spatial(call, Operation.FORWARD_TRAINING) or call.dtype in SIXTEEN_BITS:
        return False
    return (n > 768 and plane > 150) or (plane > 512 and (n * plane >= _LARGE or plane <= 1024))


def _crosses(call: Call) -> bool:
    """Tell whether a read of four values reaches past an image into other data, or the last ones are left out.

    The images of a single channel follow one another, so there only the end of the last one counts.
    """
    n, c, plane = call.dims[0], call.dims[1], _plane(call)
    return plane % 4 != 0 and (c > 1 or (n * plane) % 4 != 0)


def _backward_variant_2(call: Call) -> bool:
    return _spatial(call, Operation.BACKWARD) and call.dims[0] * _plane(call) >= _LARGE and _plane(call) > 512


_CPU_RIG = "MIOpen's kernels on a CPU, as gfx1100"
_SEEN = _CPU_RIG, "2026-11-28", "defects-miopen.txt"
_MIOPEN_34 = Run((3, 4, 0), "470572c299bd1e1c", "Debian libmiopen1 6.4.3+dfsg", *_SEEN)
_MIOPEN_35 = Run((3, 5, 1), "6efe605b9ddd1028", "Debian libmiopen1 7.2.4+dfsg", *_SEEN)
RUNS = (_MIOPEN_34, _MIOPEN_35)
_MIOPEN_READ = ((2, 20), (3, 5))
_defect = functools.partial(Defect, backend="miopen", seen=RUNS)


def _over_sums(
    identity: str, run: Run, fixed: Version | None, what: str, example: str, case: str,
    predicate: Callable[[Call], bool],
) -> Defect:  # fmt: skip
    """The entry of MIOpen's kernels that keep partial results in their output before all of their input is read."""
    return _defect(
        id=identity,
        first=run.version[:2] if fixed is None else (),
        seen=(run,),
        fixed=fixed,
        effect=Effect.WRONG,
        outputs=("y", *BACKWARD),
        what="kernels keep partial results in y, or dx, before they have read all of x, or dy, and so are wrong where "
        f"the two are one array: {what}",
        example=f"y written over x, as by InPlace-ABN to save memory, {example}",
        case=case,
        predicate=where(predicate, inplace=True, mode=Mode.SPATIAL, operation=ONE_PASS),
        ratio=1e10,  # sums of all values in place of one: 3e9 was seen of 246,080 values
        refused=True,
    )


DEFECTS = (
    _defect(
        id="miopen-backward-vector-tail",
        read=_MIOPEN_READ,
        effect=Effect.WRONG,
        outputs=BACKWARD,
        what="backward reads four values at a time across the end of an image, into the next channel, where H*W is "
        "not a multiple of 4 (kernel variant 1: H*W > 1024; H*W > 512 with N >= 32; float16 with 60 < H*W < 200)",
        links=("ROCm/MIOpen#2024",),
        example="Inception's planes of 35x35, 73x73 and 147x147, such as 16x96x35x35",
        case="backward,spatial,f32,nchw,2x3x33x33",
        predicate=lambda p: _backward_variant_1(p) and _crosses(p),
        ratio={"dx": 1e6, "dscale": 1e7, "dbias": 1e7},
    ),
    _defect(
        id="miopen-backward-statistics-tail",
        read=_MIOPEN_READ,
        effect=Effect.WRONG,
        outputs=("dx", "dscale"),
        what="backward without saved statistics recomputes them with the wrong elements at the end where H*W >= 4096 "
        "and N*H*W is not a multiple of 4096 (kernel variant 1)",
        links=("ROCm/rocm-libraries#9030", "ROCm/MIOpen#762"),
        example="MobileNet's first layer, 1x16x112x112, whose saved statistics were not kept",
        case="backward,spatial,f32,nchw,2x3x72x72,saved=0",
        # a single read of four at the end of a single channel is right again
        predicate=lambda p: (
            _backward_variant_1(p)
            and not p.saved
            and _plane(p) >= 4096
            and (p.dims[0] * _plane(p)) % 4096 not in ((0, 4) if p.dims[1] == 1 else (0,))
        ),
        ratio=1e6,
    ),
    _defect(
        id="miopen-tuned-backward",
        first=(3, 5),
        seen=(_MIOPEN_35,),
        effect=Effect.WRONG,
        outputs=BACKWARD,
        what="tuning times kernel variant 1 of backward for every size and keeps it where it is fastest, although it "
        "reads four values at a time across the end of an image where H*W is not a multiple of 4: once a program of "
        "this user has tuned batch norm (miopenSetTuningPolicy, MIOPEN_FIND_ENFORCE)",
        links=("ROCm/MIOpen#2024",),
        example="ResNet's last planes, 7x7, after torch.backends.cudnn.benchmark",
        case="backward,spatial,f32,nchw,4x4x7x7,fill=randn",
        predicate=lambda p: _spatial(p, Operation.BACKWARD) and _crosses(p),
        ratio={"dx": 1e6, "dscale": 1e7, "dbias": 1e7},
        tuned=True,
    ),
    _defect(
        id="miopen-training-vector-tail",
        read=_MIOPEN_READ,
        effect=Effect.WRONG,
        outputs=TRAINING,
        what="training reads four values at a time across the end of an image, into the next channel, where "
        "H*W >= 4096 is not a multiple of 4 (kernel variant 1)",
        example="Inception's planes of 73x73 and 147x147",
        case="train,spatial,f32,nchw,2x3x73x73",
        predicate=lambda p: _training_variant_1(p) and _plane(p) >= 4096 and _crosses(p),
        ratio=1e5,
    ),
    _defect(
        id="miopen-training-stash",
        seen=(_MIOPEN_34,),
        read=((2, 20), (3, 4)),
        fixed=(3, 5),
        effect=Effect.WRONG,
        # Which of them: what the groups write over one another depends on the order in which they run.
        outputs=("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance"),
        what="float32 training keeps four partial results in y for each 1024 values of an image, which overlap other "
        "data where the last part holds fewer than four, H*W % 1024 in 1, 2, 3 with H*W > 1024 (kernel variant 2: "
        "N > 768, or N*H*W >= 2^25)",
        example="1,024 frames of an STFT with n_fft=2048, which has 1,025 bins",
        case="train,spatial,f32,nchw,769x2x1x1025",
        predicate=lambda p: _training_variant_2(p) and _plane(p) > 1024 and 0 < _plane(p) % 1024 < 4,
        ratio={"y": 1e6, "saved_mean": 1e5, "saved_inv_variance": 1e6, "running_mean": 1e5, "running_variance": 1e6},
    ),
    _over_sums(
        "miopen-in-place-f32",
        _MIOPEN_34,
        (3, 5),  # which has miopen-in-place
        "float32 training of 512 < H*W <= 1024, of N > 768 with H*W > 150, or of N*H*W >= 2^25 (kernel variant 2), and "
        "backward of N*H*W >= 2^25",
        "of ResNet's planes of 28x28",
        "train,spatial,f32,nchw,2x3x1x600,fill=randn,inplace=1",
        lambda p: _training_variant_2(p) or _backward_variant_2(p),
    ),
    _over_sums(
        "miopen-in-place",
        _MIOPEN_35,
        None,
        "channels-last training and backward, training of N > 768 with H*W > 150, and in float32 of 512 < H*W <= 1024 "
        "with N > 2, and both of N*H*W >= 2^25 (kernel variant 2)",
        "of any channels-last network",
        "train,spatial,f32,nchw,769x2x1x160,fill=randn,inplace=1",
        lambda p: (
            p.layout == Layout.CHANNELS_LAST
            or (_plane(p) > 150 and p.dims[0] > 768)
            or (p.dims[0] > 2 and _training_variant_2(p))
            or _backward_variant_2(p)
        ),
    ),
    _defect(
        id="miopen-tuned-in-place",
        first=(3, 5),
        seen=(_MIOPEN_35,),
        effect=Effect.WRONG,
        outputs=(*TRAINING, *BACKWARD),
        what="tuning (miopenSetTuningPolicy, MIOPEN_FIND_ENFORCE) runs a call's kernels one after another on the "
        "caller's arrays, so that where y is x, or dx is dy, all but the first read what was written over; and it may "
        "keep kernel variant 2, which is wrong there, for any size",
        example="any in-place call under torch.backends.cudnn.benchmark",
        case="train,spatial,f32,nchw,4x4x8x8,fill=randn,inplace=1",
        predicate=where(inplace=True),
        ratio=1e9,
        tuned=True,
        refused=True,
    ),
    _defect(
        id="miopen-tuned-running-statistics",
        first=(3, 5),
        seen=(),
        effect=Effect.WRONG,
        outputs=("running_mean", "running_variance"),
        what="a call that is tuned updates the running statistics once for each kernel tried (ROCm 7.0 and 7.1)",
        links=("ROCm/rocm-libraries#2104",),
        example="the first training steps after torch.backends.cudnn.benchmark = True",
        case="train,spatial,f32,nchw,4x16x14x14,fill=randn,repeats=3",
        predicate=where(mode=Mode.SPATIAL, operation=Operation.FORWARD_TRAINING, running=True),
        ratio=1e8,
        tuned=True,
        builds={_MIOPEN_35.build: False},
    ),
    _defect(
        id="miopen-nhwc-training-kernel",
        seen=(_MIOPEN_34,),
        fixed=(3, 5),
        effect=Effect.FAILS,
        what="channels-last float32 training asks for a kernel that its program lacks where 512 < H*W <= 1024, or "
        "N > 768 and H*W > 150 (kernel variant 2)",
        example="channels-last planes of 28x28 in float32",
        case="train,spatial,f32,nhwc,2x3x1x513",
        predicate=where(
            lambda p: 512 < _plane(p) <= 1024 or (p.dims[0] > 768 and _plane(p) > 150),
            **_CHANNELS_LAST,
            operation=Operation.FORWARD_TRAINING,
            dtype=DataType.FLOAT32,
        ),
        note="Empty code object path",
    ),
    _defect(
        id="miopen-gfx115x-reductions",
        seen=(),
        read=((3, 4), (3, 4)),
        effect=Effect.FAILS,
        what="on gfx115x (Radeon 8060S, 890M) spatial training and backward add by instructions that these cards lack, "
        "and so do not compile; inference and per-activation calls do, and native computes on the CPU",
        links=("ROCm/rocm-libraries#2169", "ROCm/rocm-libraries#3158", "ROCm/MIOpen#3943"),
        example="any BatchNorm2d in training on a Ryzen AI MAX+ 395",
        case="train,spatial,f32,nchw,20x100x35x45,fill=randn",
        predicate=where(mode=Mode.SPATIAL, operation=ONE_PASS),
        note="Code object build failed",
        cards=("gfx115",),
        builds={_MIOPEN_35.build: False},
    ),
    _defect(
        id="miopen-nhwc-stash",
        first=(3, 5),
        seen=(_MIOPEN_35,),
        effect=Effect.WRONG,
        outputs=(*TRAINING, *BACKWARD),
        what="16-bit channels-last training and backward keep float32 partial results of four channels in two rows of "
        "y or dx, and those of the last four channels overlap those of the second four where C / 4 is odd, but 1",
        example="channels-last float16 with 12, 20, 28 or 36 channels",
        case="train,spatial,f16,nhwc,2x12x5x5,fill=randn",
        predicate=where(
            lambda p: p.dims[1] % 8 == 4 and p.dims[1] > 4 and _plane(p) > 1,
            **_CHANNELS_LAST,
            operation=ONE_PASS,
            dtype=SIXTEEN_BITS,
        ),
        ratio=dict.fromkeys((*TRAINING, *BACKWARD), 1e7)
        | {"y": 1e8, "saved_inv_variance": 1e9, "running_variance": 1e8},
    ),
    _defect(
        id="miopen-bf16-truncation",
        effect=Effect.WRONG,
        outputs=("y", "dx"),
        what="bfloat16 results are truncated, not rounded to nearest: an error of up to twice the bound",
        example="any network under torch.autocast(dtype=torch.bfloat16)",
        case="infer,spatial,bf16,nchw,4x6x5x5,fill=randn",
        predicate=where(dtype=DataType.BFLOAT16),
        ratio=2.0,
    ),
    _defect(
        id="miopen-f16-blend",
        effect=Effect.WRONG,
        outputs=("y", "dx"),
        what="miopenOpTensor, through which alpha and beta go, computes in float16: a blended result is rounded up to "
        "four times, and what cancels between result and prior leaves those errors behind",
        example="a residual added by beta = 1 in float16",
        case="train,spatial,f16,nchw,4x6x8x9,fill=randn,beta=0.5",
        predicate=where(lambda p: p.beta != 0, dtype=DataType.FLOAT16),
        ratio=16.0,
    ),
    _defect(
        id="miopen-one-pass-variance",
        read=_MIOPEN_READ,
        effect=Effect.WEAK,
        outputs=(*TRAINING, "dx", "dscale"),
        what="spatial training, and backward without saved statistics, compute the variance as E[x^2] - mean^2 in "
        "float32, whose error grows with (mean / deviation)^2",
        links=("ROCm/rocm-libraries#5013", "ROCm/MIOpen#3900"),
        example="images of 0 to 255 that are not centred",
        case="train,spatial,f32,nchw,4x3x8x8,fill=randn,kappa=100",
        predicate=where(mode=Mode.SPATIAL, recomputes=True),
        better=True,
        far=True,
    ),
    kinds.chained("miopen", RUNS, better=True),
    _defect(
        id="miopen-inference-absolute-variance",
        effect=Effect.WEAK,
        outputs=("y",),
        what="inference takes 1/sqrt(|variance + epsilon|): a negative running variance, which no batch has, gives "
        "finite results where a square root gives NaN, and so is not noticed",
        example="a checkpoint whose running variance is damaged",
        case="infer,spatial,f32,nchw,16x8x10x8,fill=special,seed=14",
        predicate=where(operation=Operation.FORWARD_INFERENCE),
        note="|variance + epsilon|",
    ),
)
