"""ONNX Runtime, its model made here: pybnorm check --implementation onnxruntime_batch_norm.py:OnnxRuntime"""

import functools

import numpy as np
import onnxruntime

TYPES = {"float32": 1, "float16": 10, "float64": 11, "bfloat16": 16}
INPUTS, OUTPUTS = ("x", "scale", "bias", "mean", "variance"), ("y", "new_mean", "new_variance")


class OnnxRuntime:
    """BatchNormalization: its running variance is the biased one, and it has no saved statistics."""

    name, version = "ONNX Runtime", onnxruntime.__version__
    outputs, unbiased = ("y", "running_mean", "running_variance"), False
    dtypes = ("f32", "f16", "bf16")  # epsilon and momentum are float32, which is too little for float64

    def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
        return run(x, (scale, bias, running_mean, running_variance), epsilon, 0.0, 0)[0]

    def forward_training(self, x, scale, bias, running_mean, running_variance, epsilon, exponential_average_factor):
        return tuple(run(x, (scale, bias, running_mean, running_variance), epsilon, 1 - exponential_average_factor, 1))


def run(x, parameters, epsilon, momentum, training):
    try:  # what it has no kernel for
        made = session(x.dtype.name, parameters[0].dtype.name, epsilon, momentum, training)
    except Exception as error:
        raise NotImplementedError(str(error).partition(". Op with name")[0]) from None
    return made.run(None, dict(zip(INPUTS, (np.ascontiguousarray(x), *(p.ravel() for p in parameters)), strict=True)))


@functools.lru_cache(256)
def session(dtype, parameter, epsilon, momentum, training):
    outputs = OUTPUTS if training else OUTPUTS[:1]
    node = [field(1, name) for name in INPUTS] + [field(2, name) for name in outputs] + [field(4, "BatchNormalization")]
    for name, number in (("epsilon", epsilon), ("momentum", momentum)):
        node.append(field(5, field(1, name) + b"\x15" + np.float32(number).tobytes() + field(20, 1)))
    node.append(field(5, field(1, "training_mode") + field(3, training) + field(20, 2)))
    graph = field(1, b"".join(node)) + field(2, "graph")
    for number, name in [*((11, name) for name in INPUTS), *((12, name) for name in outputs)]:
        kind = TYPES[dtype if name in "xy" else parameter]
        graph += field(number, field(1, name) + field(2, field(1, field(1, kind))))
    model = field(1, 8) + field(7, graph) + field(8, field(2, 15))
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def varint(n):
    return bytes([n]) if n < 128 else bytes([n % 128 + 128]) + varint(n // 128)


def field(number, value):
    data = value.encode() if isinstance(value, str) else value
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(data)) + data
