"""A graph with hipDNN's and cudnn-frontend's names: batch norm, then ReLU. ``python examples/call_graph.py``"""

import numpy as np

import pybnorm
from pybnorm.graph import BatchnormAttributes, Graph

DIMS, STRIDES = (8, 16, 14, 14), (3136, 196, 14, 1)
data = np.random.default_rng(0).normal(3, 2, DIMS).astype(np.float32)
scale_data, bias_data, mean_data, inv_data = np.ones((4, 16), np.float32)
result = np.empty_like(data)

graph = Graph().set_name("bn_relu").set_io_data_type("float").set_compute_data_type("float")
graph.set_intermediate_data_type("float")
x = graph.tensor(name="x", dim=DIMS, stride=STRIDES)
scale, bias = (graph.tensor(name=name, dim=(1, 16, 1, 1), data_type="float") for name in ("scale", "bias"))
y, mean, inv_variance, _, _ = graph.batchnorm(x, scale, bias, BatchnormAttributes().set_epsilon(1e-5))
out = graph.relu(y)
for tensor in (out, mean, inv_variance):
    tensor.set_output(True)

with pybnorm.Handle("onednn") as handle:
    graph.build(handle)
    pack = {x: data, scale: scale_data, bias: bias_data, out: result, mean: mean_data, inv_variance: inv_data}
    size = graph.get_workspace_size()
    graph.execute(handle, pack, np.empty(size, np.uint8) if size else None)
print(f"the mean that the graph saved: {mean_data.mean():.2f}; values below 0 after the ReLU: {(result < 0).sum()}")
print(f"share of zeros: {(result == 0).mean():.2f}")
