"""Training, inference in float16 through JSON, and gradients through an activation, in hipDNN's own Python."""

import hipdnn_frontend as hipdnn
import numpy as np

N, C, H, W = 4, 8, 6, 5
FLOAT, HALF = hipdnn.DataType.FLOAT, hipdnn.DataType.HALF
rng = np.random.default_rng(3)


def new_graph(name, kind=FLOAT):
    graph = hipdnn.Graph()
    graph.set_name(name).set_io_data_type(kind)
    graph.set_intermediate_data_type(kind).set_compute_data_type(FLOAT)
    return graph


def vectors(*names):
    return [hipdnn.Tensor.create([1, C, 1, 1], FLOAT).set_name(name) for name in names]


def good(*errors):
    for error in errors:
        assert error.is_good(), error.get_message()


def place(tensors, outputs, low=0.5):
    """Values of the inputs by name, and a buffer for each tensor."""
    inputs, buffers = {}, {}
    for tensor in tensors:
        kind = np.float16 if tensor.get_data_type() == HALF else np.float32
        inputs[tensor.get_name()] = rng.uniform(low, 2, tensor.get_dim()).astype(kind)
        buffers[tensor] = hipdnn.DeviceBuffer(inputs[tensor.get_name()].nbytes)
        buffers[tensor].copy_from_host(inputs[tensor.get_name()].tobytes())
    for tensor in outputs:
        buffers[tensor] = hipdnn.DeviceBuffer(4 * tensor.get_volume())
        buffers[tensor].zeros()
    return inputs, buffers


def results(names, outputs, buffers):
    found = {}
    for name, tensor in zip(names, outputs, strict=True):
        flat = np.frombuffer(buffers[tensor].copy_to_host(), dtype=np.float32)
        found[name] = flat.reshape(tensor.get_dim())
    return found


# Training: a batch through batch norm, then its running statistics once more.
graph = new_graph("training")
x = hipdnn.Tensor.create([N, C, H, W], FLOAT).set_name("x")
scale, bias, running_mean, running_variance = vectors("scale", "bias", "running_mean", "running_variance")
epsilon, momentum = hipdnn.Tensor(), hipdnn.Tensor()
epsilon.set_value(1e-3)
momentum.set_value(0.25)
attributes = hipdnn.BatchnormAttributes()
attributes.set_name("bn")
attributes.set_epsilon(epsilon)
attributes.set_previous_running_stats(running_mean, running_variance, momentum)
outputs = graph.batchnorm(x, scale, bias, attributes)
for tensor in outputs:
    tensor.set_output(True)
handle = hipdnn.create_handle()
good(graph.validate(), graph.build_operation_graph(handle), graph.create_execution_plans())
good(graph.check_support(), graph.build_plans())
inputs, buffers = place((x, scale, bias, running_mean, running_variance), outputs)
pack = {tensor.get_uid(): buffer.ptr() for tensor, buffer in buffers.items()}
workspace = hipdnn.DeviceBuffer(max(graph.get_workspace_size(), 1))
good(graph.execute(handle, pack, workspace.ptr()))
for before, after in ((running_mean, outputs[3]), (running_variance, outputs[4])):  # what was next is previous now
    buffers[before].copy_from_host(buffers[after].copy_to_host())
good(graph.execute(handle, variant_pack=pack, workspace=workspace.ptr()))
names = ("y", "mean", "inv_variance", "next_running_mean", "next_running_variance")
training = inputs, results(names, outputs, buffers)
hipdnn.destroy_handle(handle)

# Inference: batch norm, a residual, ReLU; the graph goes through JSON first.
graph = new_graph("inference", HALF)
x = hipdnn.Tensor.create([N, C, H, W], HALF).set_name("x")
tensors = [x, hipdnn.Graph.tensor_like(x, "residual"), *vectors("mean", "variance", "scale", "bias")]
for uid, tensor in enumerate(tensors, 1):
    tensor.set_uid(uid)
epsilon.set_value(1e-5)
normalize = hipdnn.BatchnormInferenceAttributesVarianceExt()
y = graph.batchnorm_inference_variance_ext(x, *tensors[2:], epsilon, normalize)
add, relu = hipdnn.PointwiseAttributes(), hipdnn.PointwiseAttributes()
add.set_mode(hipdnn.PointwiseMode.ADD)
relu.set_mode(hipdnn.PointwiseMode.RELU_FWD)
y = graph.pointwise(graph.pointwise(y, tensors[1], add), relu)
y.set_uid(7).set_output(True)
handle = hipdnn.create_handle()
restored = hipdnn.Graph()
good(graph.validate(), restored.from_json(handle, graph.to_json()))
good(restored.create_execution_plans([hipdnn.HeuristicMode.FALLBACK]), restored.check_support())
good(restored.build_plans(hipdnn.BuildPlanPolicy.ALL))
inputs, buffers = place(tensors, [y], -2)
buffers = {tensor.get_uid(): buffer for tensor, buffer in buffers.items()}
buffers[4].copy_from_host(np.abs(inputs["variance"]).tobytes())
for index in range(restored.get_execution_plan_count()):
    size = restored.get_workspace_size_plan_at_index(index)
    workspace = hipdnn.DeviceBuffer(size) if size else None
    pack = {uid: buffer.ptr() for uid, buffer in buffers.items()}
    good(restored.execute_plan_at_index(handle, pack, workspace.ptr() if workspace else 0, index))
flat = np.frombuffer(buffers[7].copy_to_host(), dtype=np.float16)[: N * C * H * W]
inference = inputs, {"y": flat.reshape([N, C, H, W])}

# The gradients of batch norm and ReLU from what training saved, y computed anew.
graph = new_graph("backward")
dy, x = (hipdnn.Tensor.create([N, C, H, W], FLOAT).set_name(name) for name in ("dy", "x"))
mean, inv_variance, scale, bias = vectors("mean", "inv_variance", "scale", "bias")
normalize, drelu = hipdnn.BatchnormInferenceAttributes(), hipdnn.PointwiseAttributes()
normalize.set_name("bn")
y = graph.batchnorm_inference(
    x=x, mean=mean, inv_variance=inv_variance, scale=scale, bias=bias, attributes=normalize
)  # fmt: skip
drelu.set_name("drelu")
drelu.set_mode(hipdnn.PointwiseMode.RELU_BWD)
gradient = graph.pointwise(y, dy, drelu)
backward = hipdnn.BatchnormBackwardAttributes()
backward.set_saved_mean_and_inv_variance(mean, inv_variance)
outputs = graph.batchnorm_backward(gradient, x, scale, backward)
for tensor in outputs:
    tensor.set_output(True)
handle = hipdnn.Handle()
good(graph.validate(), graph.build_operation_graph(handle))
engines = graph.get_ranked_engine_ids()
good(graph.create_execution_plan_ext(engines[0]), graph.check_support(), graph.build_plans())
assert graph.get_execution_plan_engine_id() == engines[0]
inputs, buffers = place((dy, x, mean, inv_variance, scale, bias), outputs, -1)
workspace = hipdnn.DeviceBuffer(max(graph.get_workspace_size(), 1))
# Memory as its object, by tensor and by NumPy's integers.
pack = {tensor: buffer for tensor, buffer in buffers.items() if tensor is not outputs[0]}
pack[np.int64(outputs[0].get_uid())] = np.uint64(buffers[outputs[0]].ptr())
good(graph.execute(handle, pack, workspace))
backward = inputs, results(("dx", "dscale", "dbias"), outputs, buffers)
