"""A plan is validated once; then it takes arrays with little host time. ``python examples/call_plan.py``"""

import time

import numpy as np

import pybnorm

x = np.random.default_rng(0).normal(3, 2, (8, 64, 28, 28)).astype(np.float32)
y, (scale, bias, mean, inv_variance) = np.empty_like(x), np.ones((4, 64), np.float32)

for name in ("onednn", "native"):
    with pybnorm.Handle(name) as handle:
        plan = handle.plan_forward_training(x, y, running=False)
        plan(x, scale, bias, y, None, None, mean, inv_variance)  # the first call is slower
        start = time.perf_counter()
        for _ in range(20):
            plan(x, scale, bias, y, None, None, mean, inv_variance)
        each = (time.perf_counter() - start) / 20
        print(f"{name}: {plan.algorithm}, {1e6 * each:.0f} us a call, {plan.workspace_size} bytes")
        print(f"    {plan.reason}")
print(f"y has mean {y.mean():.3f} (the bias) and standard deviation {y.std():.3f} (the scale)")
