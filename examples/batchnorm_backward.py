"""Batch norm gradients as a graph, from saved statistics.

hipDNN's sample BnBackward. One command: ``python examples/batchnorm_backward.py --dtype f16 --backend cudnn``.
"""

import sys

import example

from pybnorm import Mode, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.graph import BatchnormBackwardAttributes, Graph

N, C, H, W = 16, 16, 16, 16


def main(this: example.Example) -> None:
    """One node; dx, dscale and dbias are judged."""
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    problem = Problem(Operation.BACKWARD, Mode.SPATIAL, this.dtype, dims, strides, fill="randn", seed=this.seed)
    inputs = generate(problem)

    graph = Graph().set_name("backward")
    graph.set_io_data_type(this.dtype).set_intermediate_data_type("float").set_compute_data_type("float")
    x, dy = (graph.tensor(name=name, dim=dims, stride=strides) for name in ("x", "dy"))
    scale, mean, inv_variance = (
        graph.tensor(name=name, dim=(1, C, 1, 1), data_type="float") for name in ("scale", "mean", "inv_variance")
    )
    attributes = BatchnormBackwardAttributes().set_name("bn").set_saved_mean_and_inv_variance(mean, inv_variance)
    outputs = graph.batchnorm_backward(dy, x, scale, attributes)
    for tensor in outputs:
        tensor.set_output(True)
    graph.build(this.handle)

    made = dict(zip(outputs, (this.empty(dims), this.channels(C), this.channels(C)), strict=True))
    given = {x: this.data(inputs.x), dy: this.data(inputs.dy), scale: this.parameter(inputs.scale)}
    given |= {mean: this.parameter(inputs.saved_mean), inv_variance: this.parameter(inputs.saved_inv_variance)}
    graph.execute(this.handle, {**given, **made}, this.workspace(graph.get_workspace_size()))

    expected = bounds.expect(problem, inputs)
    for name, memory in zip(("dx", "dscale", "dbias"), made.values(), strict=True):
        this.check(expected, name, memory)


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
