"""Known defects of oneDNN."""

from __future__ import annotations

import functools

from pybnorm.defects.kinds import BACKWARD, LONG_CHAIN, TRAINING, Defect, Effect, Run
from pybnorm.enums import Operation

_CHAIN = 64
"""Terms from which a single chain of sums may miss the bound: seen from 128 on."""

_EPYC, _EPYC_2 = "AMD EPYC (AVX512, BF16)", "AMD EPYC (AVX2)"
RUNS = (
    Run((3, 2, 0), "52cedc518dcdb2e9", "PyPI onednn-cpu-gomp 2023.2.0", _EPYC_2, "2026-11-28", "defects-onednn.txt"),
    Run((3, 6, 2), "", "PyPI paddlepaddle 3.3.1", _EPYC, "2026-11-23", "onednn-versions.md"),
    Run((3, 7, 2), "", "Debian libdnnl3.6 3.7.2+ds-2", _EPYC, "2026-11-23", "onednn-versions.md"),
    Run((3, 12, 1), "", "Debian libdnnl3.6 3.12.1+ds-3", _EPYC, "2026-11-23", "onednn-versions.md"),
    Run((3, 13, 2), "27983893a9834f4d", "PyPI onednn 2026.1.0, SYCL", _EPYC_2, "2026-11-28", "defects-onednn.txt"),
)

_defect = functools.partial(Defect, backend="onednn", seen=RUNS)
DEFECTS = (
    _defect(
        id="onednn-long-sums",
        effect=Effect.WRONG,
        outputs=(*TRAINING, "dx", "dscale"),
        what="a thread sums its part of a statistic in one float32 chain, which on ordinary data misses the bound from "
        "some 450,000 terms on (3.13 by SYCL: 4,000,000); so the result depends on the number of threads",
        example="a plane of 1000x1000, or 32 images of 128x128",
        case="train,spatial,f32,nchw,1x1x2048x4096,fill=randn",
        predicate=lambda p: p.recomputes and p.m > LONG_CHAIN,
        note="sums in chains",
        ratio=1024.0,  # of one chain of 2^24 terms: m / (16 + 4 sqrt(m))
        rounded=True,
    ),
    _defect(
        id="onednn-chained-sums",
        effect=Effect.WEAK,
        outputs=(*TRAINING, "dx", "dscale"),
        what="the same chain of up to 400,000 terms: a few hundred are enough to miss the bound of blocked sums where "
        "roundings add up, on data of one sign, equal values, or few that are not 0 (1 to 23 times the bound)",
        example="ResNet's 32x64x56x56 on images that are not centred",
        case="train,spatial,f32,nchw,1280x4x1x2,fill=sparse",
        predicate=lambda p: p.recomputes and _CHAIN < p.m <= LONG_CHAIN,
        note="sums in chains",
        ratio=160.0,  # of the longest chain: m / (16 + 4 sqrt(m))
        rounded=True,
        better=True,
    ),
    _defect(
        id="onednn-chained-gradients",
        seen=(RUNS[0], RUNS[-1]),
        effect=Effect.WEAK,
        outputs=BACKWARD,
        what="backward sums dy, and its products with x, in chains as long as one thread's part: gradients of few "
        "values, whose roundings add up, miss the bound, equal ones of float32 from 2,000 terms on (1 to 20 times)",
        example="the gradient of a mean over 32 images of 28x28",
        case="backward,spatial,bf16,nhwc,1x2x512x512,fill=ramp,repeats=1",
        predicate=lambda p: p.operation == Operation.BACKWARD and p.m > 1024,
        note="sums in chains",
        ratio=160.0,
        rounded=True,
        better=True,
    ),
)
