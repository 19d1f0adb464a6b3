"""MIOpen's names and argument order on every backend. ``python examples/call_miopen.py``"""

import numpy as np

import pybnorm
from pybnorm import Mode, TensorDescriptor, miopen

DIMS = (8, 16, 14, 14)
rng = np.random.default_rng(0)
scale, bias, mean, variance, saved_mean, saved_inv_variance = np.ones((6, 16), np.float32)
y = np.empty(DIMS, np.float32)

with pybnorm.Handle("onednn") as handle:  # or "miopen", with arrays of an AMD GPU
    data = TensorDescriptor(handle.backend, "f32", DIMS)
    derived = miopen.derive_bn_tensor_descriptor(data, Mode.SPATIAL)
    for step in range(4):
        x = rng.normal(3, 2, DIMS).astype(np.float32)
        miopen.batch_normalization_forward_training(
            handle, Mode.SPATIAL, 1.0, 0.0, data, x, data, y, derived, scale, bias,
            miopen.cumulative_average_factor(step), mean, variance, 1e-5, saved_mean, saved_inv_variance,
        )  # fmt: skip
    miopen.batch_normalization_forward_inference(
        handle, Mode.SPATIAL, 1.0, 0.0, data, x, data, y, derived, scale, bias, mean, variance, 1e-5
    )
print(f"the average of four batches: mean {mean.mean():.2f}, variance {variance.mean():.2f}; of the data 3 and 4")
print(f"inference: mean {y.mean():.2f} (the bias), standard deviation {y.std():.2f} (the scale)")
