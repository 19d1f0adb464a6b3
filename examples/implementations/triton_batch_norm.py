"""A kernel in Triton, to start one's own from: pybnorm check --implementation triton_batch_norm.py:Triton

One program for each channel: two passes for the statistics, one for the result.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def training(
    x, y, scale, bias, mean, inverse, old_mean, old_variance, batch, inner, sn, sc, si, epsilon, factor,
    RUNNING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c, m = tl.program_id(0), batch * inner
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, m, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(x + i // inner * sn + c * sc + i % inner * si, i < m, 0.0).to(tl.float32)
    mu = tl.sum(total) / m
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, m, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i // inner * sn + c * sc + i % inner * si, i < m, 0.0).to(tl.float32)
        total += tl.where(i < m, (value - mu) * (value - mu), 0.0)
    r = 1 / tl.sqrt_rn(tl.sum(total) / m + epsilon)
    for start in range(0, m, BLOCK):
        i = start + tl.arange(0, BLOCK)
        place = i // inner * sn + c * sc + i % inner * si
        value = tl.load(x + place, i < m, 0.0).to(tl.float32)
        tl.store(y + place, ((value - mu) * r * tl.load(scale + c) + tl.load(bias + c)).to(y.dtype.element_ty), i < m)
    tl.store(mean + c, mu)
    tl.store(inverse + c, r)
    if RUNNING:
        tl.store(old_mean + c, (1 - factor) * tl.load(old_mean + c) + factor * mu)
        tl.store(old_variance + c, (1 - factor) * tl.load(old_variance + c) + factor * tl.sum(total) / (m - 1))


class Triton:
    """Training of float32, float16 and bfloat16, channels first or last."""

    name, version, arrays, device = "Triton example", triton.__version__, "torch", "cuda"
    dtypes, parameters, layouts = ("f32", "f16", "bf16"), ("f32",), ("nchw", "nhwc")

    def forward_training(
        self, x, y, scale, bias, epsilon, exponential_average_factor, running_mean=None, running_variance=None,
        saved_mean=None, saved_inv_variance=None,
    ):  # fmt: skip
        first = x.is_contiguous()
        if saved_mean is None:
            saved_mean, saved_inv_variance = torch.empty_like(scale), torch.empty_like(scale)
        channels, inner = x.shape[1], x[0, 0].numel()
        strides = (channels * inner, inner, 1) if first else (channels * inner, 1, channels)
        training[channels,](
            x, y, scale, bias, saved_mean, saved_inv_variance, running_mean, running_variance, len(x), inner, *strides,
            epsilon, exponential_average_factor, RUNNING=running_mean is not None, BLOCK=1024,
        )  # fmt: skip
