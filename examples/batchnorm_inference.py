"""Batch norm inference as a graph, from an inverse standard deviation and from a variance.

hipDNN's samples BnInference and BnInferenceWithVariance. One command: ``python examples/batchnorm_inference.py``.
"""

import dataclasses
import sys

import example
import numpy as np

from pybnorm import Mode, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.graph import BatchnormInferenceAttributes, BatchnormInferenceAttributesVarianceExt, Graph

N, C, H, W = 16, 16, 16, 16
EPSILON = 1e-5


def main(this: example.Example) -> None:
    """One graph with one node for each of the two forms."""
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    problem = Problem(
        Operation.FORWARD_INFERENCE, Mode.SPATIAL, this.dtype, dims, strides, fill="randn", eps=EPSILON, seed=this.seed
    )
    inputs = generate(problem)
    for form in ("inverse standard deviation", "variance"):
        graph = Graph().set_name(form)
        graph.set_io_data_type(this.dtype).set_intermediate_data_type("float").set_compute_data_type("float")
        x = graph.tensor(name="x", dim=dims, stride=strides)
        mean, spread, scale, bias = (
            graph.tensor(name=name, dim=(1, C, 1, 1), data_type="float") for name in ("mean", form, "scale", "bias")
        )
        if form == "variance":
            given = inputs.variance
            expected = bounds.expect(problem, inputs)
            node = BatchnormInferenceAttributesVarianceExt().set_name("bn")
            y = graph.batchnorm_inference_variance_ext(x, mean, spread, scale, bias, EPSILON, node)
        else:
            given = (1 / np.sqrt(inputs.variance.astype(np.float64) + EPSILON)).astype(np.float32)
            # The reference takes a variance: of the inverse standard deviation as stored, in float64.
            exact = dataclasses.replace(inputs, variance=given.astype(np.float64) ** -2)
            expected = bounds.expect(dataclasses.replace(problem, eps=0.0), exact)
            y = graph.batchnorm_inference(x, mean, spread, scale, bias, BatchnormInferenceAttributes().set_name("bn"))
        y.set_output(True)
        graph.build(this.handle)

        result = this.empty(dims)
        pack = {
            x: this.data(inputs.x),
            mean: this.parameter(inputs.mean),
            spread: this.parameter(given),
            scale: this.parameter(inputs.scale),
            bias: this.parameter(inputs.bias),
            y: result,
        }
        graph.execute(this.handle, pack, this.workspace(graph.get_workspace_size()))
        this.check(expected, "y", result)


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
