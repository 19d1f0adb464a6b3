"""`unbiased=False` over cuDNN's double, which reads running statistics whatever their factor, as cuDNN does."""

from __future__ import annotations

from typing import Any

SCRIPT = """
    shape = (3, 5, 4, 6)
    x = memory(shape, np.random.default_rng(1).standard_normal(shape) + 2)
    y, vectors = memory(shape), [memory((5,), 1.0) for _ in range(6)]
    scale, bias, mean, variance, saved_mean, saved_inverse = vectors
    told = {}
    with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", "f32", shape) as desc:
        for factor in (1.0, 0.25):
            for algorithm in ("spatial", "graph"):
                mean[:], variance[:] = 0.5, np.nan if factor == 1 else 2.0
                plan = handle.plan_forward_training(
                    desc, algorithm=algorithm, unbiased=False, exponential_average_factor=factor)
                space = memory((plan.workspace_size,), 0xff, np.uint8)
                plan(*[a.ctypes.data for a in (x, scale, bias, y, *vectors[2:])], (space.ctypes.data, space.nbytes))
                want = (1 - factor) * 2.0 + factor * x.astype("f8").var((0, 2, 3))
                told[f"{algorithm} {factor}"] = far(variance, want)
    report([told, whole()])
"""


def test_with_factor_one_nothing_that_was_in_the_workspace_is_left(compute: Any) -> None:
    told, whole = compute(SCRIPT)
    assert whole
    assert max(told.values()) < 1e-5, told
