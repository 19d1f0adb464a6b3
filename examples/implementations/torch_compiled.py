"""What torch.compile makes of batch norm on the CPU: pybnorm check --implementation torch_compiled.py:Compiled

It needs a C++ compiler. The gradient is PyTorch's own, so it takes no saved statistics.
"""

import torch

compiled = torch.compile(torch.nn.functional.batch_norm, dynamic=True)


class Compiled:
    """torch.nn.functional.batch_norm, compiled once for each rank and dtype."""

    name, version, arrays = "torch.compile", torch.__version__, "torch"

    def forward_training(
        self, x, scale, bias, epsilon, exponential_average_factor=0.0, running_mean=None, running_variance=None,
        saved_mean=None,
    ):  # fmt: skip
        if saved_mean is not None:
            raise NotImplementedError("torch.nn.functional.batch_norm returns no statistics")
        flat = [a if a is None else a.flatten() for a in (running_mean, running_variance, scale, bias)]
        y = compiled(x, *flat, training=True, momentum=exponential_average_factor, eps=epsilon)
        return {"y": y, "running_mean": flat[0], "running_variance": flat[1]}

    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
        flat = [a.flatten() for a in (running_mean, running_variance, scale, bias)]
        return compiled(x, *flat, training=False, eps=epsilon)

    def backward(self, x, dy, scale, epsilon):
        given = [x.detach().requires_grad_(), scale.flatten().requires_grad_(), torch.zeros_like(scale.flatten())]
        y = compiled(given[0], None, None, given[1], given[2].requires_grad_(), training=True, eps=epsilon)
        return torch.autograd.grad(y, given, dy)
