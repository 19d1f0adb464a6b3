"""What torch.compile makes of batch norm on the CPU: pybnorm check --implementation torch_compiled.py:Compiled

It needs a C++ compiler. The gradient is PyTorch's own, so it takes no saved statistics.
"""

import torch
from torch_batch_norm import Every

compiled = torch.compile(torch.nn.functional.batch_norm, dynamic=True)


class Compiled(Every):
    """torch.nn.functional.batch_norm, compiled once for each rank and dtype."""

    name = "torch.compile"
    outputs = ("y", "running_mean", "running_variance", "dx", "dscale", "dbias")
    minimum = {"m": 2}  # noqa: RUF012 (a declaration)

    def forward_training(
        self, x, scale, bias, epsilon, exponential_average_factor=0.0, running_mean=None, running_variance=None
    ):
        scale, bias, mean, variance = self.flat(scale, bias, running_mean, running_variance)
        y = compiled(x, mean, variance, scale, bias, training=True, momentum=exponential_average_factor, eps=epsilon)
        return {"y": y, "running_mean": mean, "running_variance": variance}

    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
        scale, bias, mean, variance = self.flat(scale, bias, running_mean, running_variance)
        return compiled(x, mean, variance, scale, bias, training=False, eps=epsilon)

    def backward(self, x, dy, scale, epsilon):
        (scale,) = self.flat(scale)
        given = [a.detach().requires_grad_() for a in (x, scale, torch.zeros_like(scale))]
        y = compiled(given[0], None, None, *given[1:], training=True, eps=epsilon)
        return torch.autograd.grad(y, given, dy)
