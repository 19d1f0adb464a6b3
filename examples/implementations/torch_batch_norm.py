"""PyTorch's own batch norm: pybnorm check --implementation torch_batch_norm.py:Native, or Every, Cuda or Cudnn"""

import torch


class Every:
    """PyTorch's kernels on the CPU, wrong ones too (docs/results/findings.md)."""

    name, version, arrays, device, cudnn = "PyTorch", torch.__version__, "torch", "cpu", False
    parameters = "derived"

    def forward(self, x, scale, bias, mean, variance, factor, epsilon):
        with torch.backends.cudnn.flags(enabled=self.cudnn):
            call = torch.ops.aten._batch_norm_impl_index
            return call(x, scale, bias, mean, variance, True, factor, epsilon, self.cudnn)

    def gradients(self, forward, dy, x, scale, mean, inverse, epsilon):
        call = torch.ops.aten._batch_norm_impl_index_backward
        order, every = torch._prims_common.suggest_memory_format(x), (True, True, True)
        if forward[4] == 1:  # cuDNN: as PyTorch's autograd does
            x, dy = (a.contiguous(memory_format=order) for a in (x, dy))
        return call(forward[4], x, dy, scale, None, None, mean, inverse, True, epsilon, every, forward[3])

    def flat(self, *parameters):
        return [p if p is None else p.flatten() for p in parameters]

    def forward_training(
        self, x, scale, bias, epsilon, exponential_average_factor, running_mean=None, running_variance=None
    ):
        flat = self.flat(scale, bias, running_mean, running_variance)
        y, mean, inverse, *_ = self.forward(x, *flat, exponential_average_factor, epsilon)
        names = ("y", "running_mean", "running_variance", "saved_mean", "saved_inv_variance")
        return dict(zip(names, (y, *flat[2:], mean, inverse), strict=True))

    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
        scale, bias, mean, variance = self.flat(scale, bias, running_mean, running_variance)
        with torch.backends.cudnn.flags(enabled=self.cudnn):
            return torch.batch_norm(x, scale, bias, mean, variance, False, 0.0, epsilon, self.cudnn)

    def backward(self, x, dy, scale, epsilon, saved_mean=None, saved_inv_variance=None):
        scale, mean, inverse = self.flat(scale, saved_mean, saved_inv_variance)
        forward = self.forward(x, scale, torch.zeros_like(scale), None, None, 0.0, epsilon)  # it names the kernel
        mean, inverse = forward[1:3] if mean is None else (mean, inverse)
        return tuple(self.gradients(forward, dy, x, scale, mean, inverse, epsilon))


class Native(Every):
    """The layouts in which PyTorch is correct: in others it takes the sums of 16-bit gradients in 16 bits."""

    def supports(self, problem):
        own = "nchw" in str(problem) or ("nhwc" in str(problem) and len(problem.dims) in (4, 5))
        known = problem.word == "backward" and problem.dtype.itemsize == 2 and not own
        return "a known finding: sums of 16 bits" if known else True


class Cuda(Every):
    """PyTorch's kernels for CUDA."""

    name, device = "PyTorch CUDA", "cuda"


class Cudnn(Cuda):
    """What PyTorch takes where cuDNN is on."""

    name, cudnn = "PyTorch cuDNN", True
