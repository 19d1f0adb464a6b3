"""A kernel of one's own, wrong on purpose: ``pybnorm check --implementation examples/my_kernel.py:MyKernel``."""

import numpy as np


class MyKernel:
    """Inference in float32."""

    dtypes = ("f32",)

    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
        """The formula, and one element that is forgotten."""
        y = scale * (x - running_mean) / np.sqrt(running_variance + np.float32(epsilon)) + bias
        y.flat[-1] = 0
        return y
