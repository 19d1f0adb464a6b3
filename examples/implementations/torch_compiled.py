"""What torch.compile makes of batch norm: pybnorm check --implementation torch_compiled.py:Compiled, or CompiledCuda"""

import torch
from torch_batch_norm import Native

forward = torch.compile(torch.ops.aten.native_batch_norm.default, dynamic=True)
backward = torch.compile(torch.ops.aten.native_batch_norm_backward.default, dynamic=True)


class Compiled(Native):
    """On the CPU, which needs a C++ compiler."""

    name = "torch.compile"

    def forward(self, x, scale, bias, mean, variance, factor, epsilon):
        return forward(x, scale, bias, mean, variance, True, factor, epsilon)

    def gradients(self, _, dy, x, scale, mean, inverse, epsilon):
        return backward(dy, x, scale, None, None, mean, inverse, True, epsilon, [True, True, True])


class CompiledCuda(Compiled):
    """For CUDA, in Triton."""

    name, device = "torch.compile CUDA", "cuda"
