"""New arrays of the caller's framework, from its allocator, on its stream. ``python examples/call_functional.py``"""

import numpy as np

from pybnorm import functional

rng = np.random.default_rng(0)
x, dy = rng.normal(3, 2, (2, 8, 16, 14, 14)).astype(np.float32)
scale, bias = np.ones(16, np.float32), np.zeros(16, np.float32)
running = {"running_mean": np.zeros(16, np.float32), "running_variance": np.ones(16, np.float32)}

y, mean, inv_variance = functional.batch_norm_training(x, scale, bias, **running)
print(f"training: mean {abs(y.mean()):.3f}, standard deviation {y.std():.3f}", end="; ")
print(f"running mean {running['running_mean'][0]:.3f}")
dx, dscale, dbias = functional.batch_norm_backward(x, dy, scale, mean, inv_variance)
print(f"backward: {type(dx).__name__} {dx.shape}, dscale {dscale.shape}, dbias {dbias.shape}")
y = functional.batch_norm_inference(x, **running, scale=scale, bias=bias)
print(f"inference with running statistics: mean {y.mean():.3f}")

last = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)  # channels last in memory, the same dims
y_last = functional.batch_norm_training(last, scale, bias)[0]
print(f"channels last: strides {y_last.strides}, kept; largest difference", end=" ")
print(f"{np.abs(y_last - functional.batch_norm_training(x, scale, bias)[0]).max():.0e}")
