"""A staged layer: train on one backend, infer from its JSON on any other. ``python examples/call_layer.py``"""

import numpy as np

import pybnorm
from pybnorm.layer import BatchNorm, Info

rng = np.random.default_rng(0)
scale, bias = np.ones((2, 1, 16, 1, 1), np.float32)
y = np.empty((8, 16, 14, 14), np.float32)

with pybnorm.Handle("onednn") as handle, BatchNorm.spatial(handle, exponential_average_factor=0.5) as layer:
    for step in range(8):
        x = rng.normal(3, 2, y.shape).astype(np.float32)
        if step == 0:
            layer.stage(x)
        layer.forward_training(x, scale, bias, y)
    text = layer.info().to_json()

print(f"{len(text)} characters: {text[:72]}...")
with pybnorm.Handle("onednn") as handle, BatchNorm.restore(handle, Info.from_json(text)) as layer:
    layer.forward_inference(x, scale, bias, y)
    info = layer.info()
print(f"running mean {info.running_mean.mean():.2f}, variance {info.running_variance.mean():.2f}; of the data 3 and 4")
print(f"y by them: mean {y.mean():.2f} (the bias), standard deviation {y.std():.2f} (the scale)")
