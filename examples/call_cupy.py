"""cuDNN on CuPy's arrays, on CuPy's current stream. ``python examples/call_cupy.py``; needs an NVIDIA GPU."""

import cupy

import pybnorm
from pybnorm import functional

rng = cupy.random.default_rng(0)
x = rng.standard_normal((32, 64, 28, 28), dtype=cupy.float32).astype(cupy.float16)
scale, bias = cupy.ones(64, cupy.float32), cupy.zeros(64, cupy.float32)

with cupy.cuda.Stream() as stream:
    y, mean, inv_variance = functional.batch_norm_training(x, scale, bias)
    dx, dscale, dbias = functional.batch_norm_backward(x, y, scale, mean, inv_variance)
stream.synchronize()  # calls are asynchronous
print(f"{type(y).__module__}: {y.dtype} {y.shape}, standard deviation {float(y.astype('f').std()):.3f}")

with pybnorm.Handle("cudnn") as handle:
    plan = handle.plan_forward_training(x, y, running=False, algorithm="auto")
    workspace = cupy.empty(plan.workspace_size, cupy.uint8)
    plan(x, scale, bias, y, None, None, mean, inv_variance, workspace)
    handle.synchronize()
    print(plan.algorithm, "-", plan.reason)
