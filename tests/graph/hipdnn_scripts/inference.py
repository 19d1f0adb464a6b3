"""Inference in float16: batch norm, a residual, ReLU; the graph goes through JSON first. In hipDNN's own Python."""

import hipdnn_frontend as hipdnn
import numpy as np

N, C, H, W = 2, 16, 7, 5

graph = hipdnn.Graph()
graph.set_name("inference")
graph.set_io_data_type(hipdnn.DataType.HALF)
graph.set_intermediate_data_type(hipdnn.DataType.HALF)
graph.set_compute_data_type(hipdnn.DataType.FLOAT)

x = hipdnn.Tensor.create([N, C, H, W], hipdnn.DataType.HALF)
residual = hipdnn.Graph.tensor_like(x, "residual")
for uid, tensor in enumerate((x, residual), 1):
    tensor.set_uid(uid)
vectors = [hipdnn.Tensor.create([1, C, 1, 1], hipdnn.DataType.FLOAT).set_uid(uid) for uid in (3, 4, 5, 6)]
epsilon = hipdnn.Tensor()
epsilon.set_value(1e-5)

normalized = graph.batchnorm_inference_variance_ext(
    x, *vectors, epsilon, hipdnn.BatchnormInferenceAttributesVarianceExt()
)
add = hipdnn.PointwiseAttributes()
add.set_mode(hipdnn.PointwiseMode.ADD)
total = graph.pointwise(normalized, residual, add)
relu = hipdnn.PointwiseAttributes()
relu.set_mode(hipdnn.PointwiseMode.RELU_FWD)
y = graph.pointwise(total, relu)
y.set_uid(7).set_output(True)

assert graph.validate().is_good()
handle = hipdnn.create_handle()
restored = hipdnn.Graph()
error = restored.from_json(handle, graph.to_json())
assert error.is_good(), error.get_message()
assert restored.create_execution_plans([hipdnn.HeuristicMode.FALLBACK]).is_good()
error = restored.check_support()
assert error.is_good(), error.get_message()
assert restored.build_plans(hipdnn.BuildPlanPolicy.ALL).is_good()

rng = np.random.default_rng(5)
inputs = [rng.uniform(-2, 2, t.get_dim()).astype(np.float16) for t in (x, residual)]
inputs += [rng.uniform(0.5, 2, t.get_dim()).astype(np.float32) for t in vectors]
buffers = {}
for uid, data in enumerate(inputs, 1):
    buffers[uid] = hipdnn.DeviceBuffer(data.nbytes)
    buffers[uid].copy_from_host(data.tobytes())
buffers[7] = hipdnn.DeviceBuffer(inputs[0].nbytes)

for index in range(restored.get_execution_plan_count()):
    size = restored.get_workspace_size_plan_at_index(index)
    workspace = hipdnn.DeviceBuffer(size) if size else None
    pack = {uid: buffer.ptr() for uid, buffer in buffers.items()}
    error = restored.execute_plan_at_index(handle, pack, workspace.ptr() if workspace else 0, index)
    assert error.is_good(), error.get_message()
results = {"y": np.frombuffer(buffers[7].copy_to_host(), dtype=np.float16).reshape([N, C, H, W])}
