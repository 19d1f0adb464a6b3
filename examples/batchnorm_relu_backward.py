"""Gradients of batch norm followed by a ReLU, as one graph: the ReLU's mask is computed again from x.

hipDNN's sample FusedBnInfDReluBnBwd: inference, ReLU gradient, batch norm gradient; two virtual tensors between them.
One command: ``python examples/batchnorm_relu_backward.py --dtype bf16``.
"""

import dataclasses
import sys

import example
import numpy as np

from pybnorm import Mode, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.graph import (
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    Graph,
    PointwiseAttributes,
    PointwiseMode,
)

N, C, H, W = 16, 16, 16, 16


def main(this: example.Example) -> None:
    """Three nodes; what comes out is judged as the gradient for dy masked by the reference."""
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    options = {"fill": "randn", "seed": this.seed}
    problem = Problem(Operation.BACKWARD, Mode.SPATIAL, this.dtype, dims, strides, **options)
    inputs = generate(problem)
    forward = Problem(Operation.FORWARD_INFERENCE, Mode.SPATIAL, this.dtype, dims, strides, eps=0.0, **options)
    before = generate(forward)
    before.x, before.scale, before.mean = inputs.x, inputs.scale, inputs.saved_mean
    before.variance = inputs.saved_inv_variance.astype(np.float64) ** -2

    # Where y is so near 0 that no bound decides its sign, dy is 0: either mask is right there.
    masked = inputs.dy.copy()
    expected_y = bounds.expect(forward, before)
    tier = next(t for t in bounds.tiers(forward, "y") if not t.one_pass)
    for part in expected_y.parts("y", None, (tier,)):
        undecided = np.abs(part.reference) <= part.classes[0][0]
        inputs.dy[part.index][undecided] = 0
        masked[part.index] = np.where(part.reference > 0, inputs.dy[part.index], 0)
    expected = bounds.expect(problem, dataclasses.replace(inputs, dy=masked))

    graph = Graph().set_name("relu backward")
    graph.set_io_data_type(this.dtype).set_intermediate_data_type("float").set_compute_data_type("float")
    x, dy = (graph.tensor(name=name, dim=dims, stride=strides) for name in ("x", "dy"))
    scale, bias, mean, inv_variance = (
        graph.tensor(name=name, dim=(1, C, 1, 1), data_type="float")
        for name in ("scale", "bias", "mean", "inv_variance")
    )
    node = BatchnormInferenceAttributes().set_name("bn_inference")
    y = graph.batchnorm_inference(x, mean, inv_variance, scale, bias, node)
    drelu = graph.pointwise(y, dy, PointwiseAttributes().set_name("drelu").set_mode(PointwiseMode.RELU_BWD))
    attributes = BatchnormBackwardAttributes().set_name("bn_backward")
    attributes.set_saved_mean_and_inv_variance(mean, inv_variance)
    outputs = graph.batchnorm_backward(drelu, x, scale, attributes)
    for tensor in outputs:
        tensor.set_output(True)
    graph.build(this.handle)

    made = dict(zip(outputs, (this.empty(dims), this.channels(C), this.channels(C)), strict=True))
    given = {x: this.data(inputs.x), dy: this.data(inputs.dy), scale: this.parameter(inputs.scale)}
    given |= {bias: this.parameter(before.bias), mean: this.parameter(inputs.saved_mean)}
    given[inv_variance] = this.parameter(inputs.saved_inv_variance)
    graph.execute(this.handle, {**given, **made}, this.workspace(graph.get_workspace_size()))
    for name, memory in zip(("dx", "dscale", "dbias"), made.values(), strict=True):
        this.check(expected, name, memory)


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
