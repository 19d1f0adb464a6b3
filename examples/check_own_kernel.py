"""Is a kernel of one's own right? Arguments, the kernel, the verdict. ``python examples/check_own_kernel.py``"""

import numpy as np

import pybnorm


def good(x, scale, bias, running_mean, running_variance, epsilon):
    """Inference as it is written on a blackboard."""
    return scale * (x - running_mean) / np.sqrt(running_variance + np.float32(epsilon)) + bias


def careless(x, scale, bias, running_mean, running_variance, epsilon):
    """The same, with one value forgotten."""
    y = good(x, scale, bias, running_mean, running_variance, epsilon)
    y.flat[-1] = 0
    return y


line = "infer,spatial,f32,nchw,8x16x14x14,fill=randn"
names = ("x", "scale", "bias", "running_mean", "running_variance", "epsilon")
for kernel in (good, careless):
    given = pybnorm.check.arguments(line)
    result = pybnorm.check.judge(line, {"y": kernel(*(given[name] for name in names))})
    print(f"{kernel.__name__}: {result.status.name}, {result.verdicts[0].ratio:.3g} times its bound")
    worst = result.verdicts[0].worst[0]
    print(f"    worst at {worst.index}: got {worst.got:.8f}, right {worst.reference:.8f} +- {worst.bound:.0e}")
