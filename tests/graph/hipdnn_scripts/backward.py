"""The gradients of batch norm and ReLU from what training saved, y computed anew; in hipDNN's own Python."""

import hipdnn_frontend as hipdnn
import numpy as np

N, C, H, W = 3, 8, 4, 6

graph = hipdnn.Graph()
graph.set_name("backward")
graph.set_io_data_type(hipdnn.DataType.FLOAT)
graph.set_intermediate_data_type(hipdnn.DataType.FLOAT)
graph.set_compute_data_type(hipdnn.DataType.FLOAT)

dims = {"dy": [N, C, H, W], "x": [N, C, H, W]}
dims |= {name: [1, C, 1, 1] for name in ("scale", "bias", "mean", "inv_variance")}
t = {name: hipdnn.Tensor.create(dim, hipdnn.DataType.FLOAT).set_name(name) for name, dim in dims.items()}

normalize = hipdnn.BatchnormInferenceAttributes()
normalize.set_name("bn")
y = graph.batchnorm_inference(
    x=t["x"], mean=t["mean"], inv_variance=t["inv_variance"], scale=t["scale"], bias=t["bias"], attributes=normalize
)
activation = hipdnn.PointwiseAttributes()
activation.set_name("drelu")
activation.set_mode(hipdnn.PointwiseMode.RELU_BWD)
gradient = graph.pointwise(y, t["dy"], activation)

backward = hipdnn.BatchnormBackwardAttributes()
backward.set_name("dbn")
backward.set_saved_mean_and_inv_variance(t["mean"], t["inv_variance"])
outputs = graph.batchnorm_backward(gradient, t["x"], t["scale"], backward)
for tensor in outputs:
    tensor.set_output(True)

handle = hipdnn.Handle()
assert graph.validate().is_good()
assert graph.build_operation_graph(handle).is_good()
engines = graph.get_ranked_engine_ids()
error = graph.create_execution_plan_ext(engines[0])
assert error.is_good(), error.get_message()
error = graph.check_support()
assert error.is_good(), error.get_message()
assert graph.build_plans().is_good()
assert graph.get_execution_plan_engine_id() == engines[0]

rng = np.random.default_rng(9)
inputs = {name: rng.uniform(-1, 1, dim).astype(np.float32) for name, dim in dims.items()}
inputs["mean"] = inputs["x"].mean((0, 2, 3), keepdims=True)
inputs["inv_variance"] = 1 / np.sqrt(inputs["x"].var((0, 2, 3), keepdims=True) + np.float32(1e-5))

buffers = {}
for name, tensor in t.items():
    buffers[tensor] = hipdnn.DeviceBuffer(inputs[name].nbytes)
    buffers[tensor].copy_from_host(inputs[name].tobytes())
for tensor in outputs:
    buffers[tensor] = hipdnn.DeviceBuffer(4 * tensor.get_volume())
workspace = hipdnn.DeviceBuffer(max(graph.get_workspace_size(), 1))
# Memory as its object, by tensor and by NumPy's integers.
pack = {tensor: buffer for tensor, buffer in buffers.items() if tensor is not outputs[0]}
pack[np.int64(outputs[0].get_uid())] = np.uint64(buffers[outputs[0]].ptr())
error = graph.execute(handle, pack, workspace)
assert error.is_good(), error.get_message()
results = {
    name: np.frombuffer(buffers[tensor].copy_to_host(), dtype=np.float32).reshape(tensor.get_dim())
    for name, tensor in zip(("dx", "dscale", "dbias"), outputs)  # noqa: B905
}
