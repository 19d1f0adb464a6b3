"""Descriptors, addresses and a workspace of the caller's: the vendors' own argument order.

``python examples/call_addresses.py``
"""

import numpy as np

import pybnorm

DIMS = (8, 16, 14, 14)
x = np.random.default_rng(0).normal(3, 2, DIMS).astype(np.float32)
y, dx = np.empty_like(x), np.empty_like(x)
scale, bias, mean, variance, saved_mean, saved_inv_variance, dscale, dbias = np.ones((8, 16), np.float32)
bias[:] = 0


def address(array):
    """What C calls a pointer; the array has to stay alive until the call has ended."""
    return array.ctypes.data


data = pybnorm.TensorDescriptor("onednn", "f32", DIMS)
parameters = pybnorm.derive_bn_tensor_descriptor(data, pybnorm.Mode.SPATIAL)
print("derived:", parameters)
workspace = np.empty(65536, np.uint8)
with pybnorm.Handle("onednn") as handle:
    nbytes = max(handle.workspace_size(operation, data) for operation in ("train", "backward"))
    where = {"workspace": (address(workspace) + 63) // 64 * 64, "workspace_size": nbytes}
    pybnorm.batch_normalization_forward_training(
        handle, "spatial", 1.0, 0.0, data, address(x), data, address(y), parameters, address(scale), address(bias),
        0.1, address(mean), address(variance), 1e-5, address(saved_mean), address(saved_inv_variance),
        **where,
    )  # fmt: skip
    pybnorm.batch_normalization_backward(
        handle, "spatial", 1.0, 0.0, 1.0, 0.0, data, address(x), data, address(y), data, address(dx), parameters,
        address(scale), address(dscale), address(dbias), 1e-5, address(saved_mean), address(saved_inv_variance),
        **where,
    )  # fmt: skip
print(f"running mean {mean[0]:.3f} is 0.9 of 1 and 0.1 of the batch's {saved_mean[0]:.3f}")
print(f"dscale {dscale[0]:.0f} is the sum of y squared, {(y[:, 0] ** 2).sum():.0f}")
