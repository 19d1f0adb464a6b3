"""Training: a batch through batch norm, then its running statistics once more, in hipDNN's own Python."""

import hipdnn_frontend as hipdnn
import numpy as np

N, C, H, W = 4, 8, 6, 5


def vector(name):
    return hipdnn.Tensor.create([1, C, 1, 1], hipdnn.DataType.FLOAT).set_name(name)


graph = hipdnn.Graph()
graph.set_name("training").set_io_data_type(hipdnn.DataType.FLOAT)
graph.set_intermediate_data_type(hipdnn.DataType.FLOAT).set_compute_data_type(hipdnn.DataType.FLOAT)

x = hipdnn.Tensor.create([N, C, H, W], hipdnn.DataType.FLOAT).set_name("x")
scale, bias, running_mean, running_variance = map(vector, ("scale", "bias", "running_mean", "running_variance"))
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
for error in (graph.validate(), graph.build_operation_graph(handle), graph.create_execution_plans()):
    assert error.is_good(), error.get_message()
for error in (graph.check_support(), graph.build_plans()):
    assert error.is_good(), error.get_message()

rng = np.random.default_rng(3)
inputs = {t.get_name(): rng.uniform(0.5, 2, t.get_dim()).astype(np.float32) for t in (x, scale, bias)}
inputs |= {t.get_name(): rng.uniform(0.5, 2, t.get_dim()).astype(np.float32) for t in (running_mean, running_variance)}

buffers = {}
for tensor in (x, scale, bias, running_mean, running_variance, *outputs):
    buffers[tensor] = hipdnn.DeviceBuffer(4 * tensor.get_volume())
    if tensor.get_name() in inputs:
        buffers[tensor].copy_from_host(inputs[tensor.get_name()].tobytes())
    else:
        buffers[tensor].zeros()
pack = {tensor.get_uid(): buffer.ptr() for tensor, buffer in buffers.items()}
workspace = hipdnn.DeviceBuffer(max(graph.get_workspace_size(), 1))

first = graph.execute(handle, pack, workspace.ptr())
assert first.is_good(), first.get_message()
# A second batch: what was next is previous now.
for before, after in ((running_mean, outputs[3]), (running_variance, outputs[4])):
    buffers[before].copy_from_host(buffers[after].copy_to_host())
second = graph.execute(handle, variant_pack=pack, workspace=workspace.ptr())
assert second.is_good(), second.get_message()

names = ("y", "mean", "inv_variance", "next_running_mean", "next_running_variance")
results = {
    name: np.frombuffer(buffers[tensor].copy_to_host(), dtype=np.float32).reshape(tensor.get_dim())
    for name, tensor in zip(names, outputs)  # noqa: B905
}
hipdnn.destroy_handle(handle)
