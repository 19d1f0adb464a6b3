"""Batch norm by parts: statistics, the elementwise half, and sums of the backward pass, along any axes.

``python examples/call_operations.py``
"""

import numpy as np

import pybnorm
from pybnorm import operations, reference

rng = np.random.default_rng(0)
x, dy = rng.normal(3, 2, (2, 8, 16, 14, 14)).astype(np.float32)
mean, inv_variance, scale, bias, sum_dy, sum_dy_xmu = np.ones((6, 1, 16, 1, 1), np.float32)
y, dx = np.empty_like(x), np.empty_like(x)

with pybnorm.Handle("onednn") as handle:
    operations.stats(handle, x, mean=mean, inv_variance=inv_variance)
    operations.elemt(handle, x, scale, bias, mean, inv_variance, y)
    operations.backward_reduce(handle, x=x, dy=dy, mean=mean, sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu)
    operations.backward_elemt(
        handle, x=x, dy=dy, scale=scale, mean=mean, inv_variance=inv_variance, sum_dy=sum_dy, sum_dy_xmu=sum_dy_xmu,
        count=x.size // 16, dx=dx,
    )  # fmt: skip
    # Parameters along the last two axes: one statistic for each place of the image.
    place, place_inv = np.empty((2, 1, 1, 14, 14), np.float32)
    operations.stats(handle, x, mean=place, inv_variance=place_inv, axis=(2, 3))

right = reference.backward(x=x, dy=dy, scale=scale, saved_mean=mean, saved_inv_variance=inv_variance)
print(f"y: mean {y.mean():.3f}, standard deviation {y.std():.3f}")
print(f"dx by halves against NumPy in float64: largest difference {np.abs(dx - right.dx).max():.0e}")
print(f"{place.size} places, their means from {place.min():.2f} to {place.max():.2f}")
