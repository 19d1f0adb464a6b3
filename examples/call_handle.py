"""A vendor's own entry points, on arrays: forward training, then backward. ``python examples/call_handle.py``"""

import numpy as np

import pybnorm

rng = np.random.default_rng(0)
x = rng.normal(3, 2, (8, 16, 14, 14)).astype(np.float32)
scale, bias = np.full(16, 2, np.float32), np.full(16, 1, np.float32)
y, (mean, inv_variance) = np.empty_like(x), np.empty((2, 16), np.float32)
dx, (dscale, dbias) = np.empty_like(x), np.empty((2, 16), np.float32)

with pybnorm.Handle("onednn") as handle:
    print(handle.library.label, ".".join(map(str, handle.library.version)))
    handle.forward_training(x, scale, bias, y, saved_mean=mean, saved_inv_variance=inv_variance, epsilon=1e-5)
    handle.backward(
        x, np.ones_like(x), scale, dx, dscale, dbias, saved_mean=mean, saved_inv_variance=inv_variance, epsilon=1e-5
    )

print(f"y has mean {y.mean():.3f} (the bias) and standard deviation {y.std():.3f} (the scale)")
print(f"a gradient of ones: dbias {dbias[0]:.0f} (the number of values), largest |dx| {np.abs(dx).max():.0e} (none)")
