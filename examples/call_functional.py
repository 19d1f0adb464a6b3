"""New arrays of the caller's framework, from its allocator, on its stream. ``python examples/call_functional.py``"""

import numpy as np

from pybnorm import functional

rng = np.random.default_rng(0)
x, dy = rng.normal(3, 2, (2, 8, 16, 14, 14)).astype(np.float32)
scale, running_variance, bias, running_mean = np.repeat(np.float32([[1], [1], [0], [0]]), 16, axis=1)

y, mean, inv_variance = functional.batch_norm_training(x, scale, bias, running_mean, running_variance)
print(f"training: mean {abs(y.mean()):.3f}, standard deviation {y.std():.3f}; running mean {running_mean[0]:.3f}")
dx, dscale, dbias = functional.batch_norm_backward(x, dy, scale, mean, inv_variance)
print(f"backward: {type(dx).__name__} {dx.shape}, dscale {dscale.shape}, dbias {dbias.shape}")
y = functional.batch_norm_inference(x, scale, bias, running_mean, running_variance)
print(f"inference with running statistics: mean {y.mean():.3f}")

last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)  # channels last in memory, the same dims
y_last = functional.batch_norm_training(last, scale, bias)[0]
print(f"channels last: strides {y_last.strides}, kept; largest difference", end=" ")
print(f"{np.abs(y_last - functional.batch_norm_training(x, scale, bias)[0]).max():.0e}")
