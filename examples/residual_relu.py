"""The end of a residual block as one graph: relu(batch norm(x) + shortcut), rounded once.

hipDNN's sample FusedBnTrainingActiv with an addition. One command: ``python examples/residual_relu.py --dtype bf16``.
"""

import sys

import example

from pybnorm import Mode, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.graph import BatchnormAttributes, Graph

N, C, H, W = 16, 16, 16, 16
EPSILON = 1e-5


def main(this: example.Example) -> None:
    """Three nodes; the batch norm's call adds the shortcut, which is its prior y with beta = 1."""
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    problem = Problem(
        Operation.FORWARD_TRAINING, Mode.SPATIAL, this.dtype, dims, strides,
        fill="randn", eps=EPSILON, beta=1.0, running=False, seed=this.seed,
    )  # fmt: skip
    inputs = generate(problem)

    graph = Graph().set_name("residual")
    graph.set_io_data_type(this.dtype).set_intermediate_data_type("float").set_compute_data_type("float")
    x, shortcut = (graph.tensor(name=name, dim=dims, stride=strides) for name in ("x", "shortcut"))
    scale, bias = (graph.tensor(name=name, dim=(1, C, 1, 1), data_type="float") for name in ("scale", "bias"))
    attributes = BatchnormAttributes().set_name("bn").set_epsilon(EPSILON)
    y, mean, inv_variance, _, _ = graph.batchnorm(x, scale, bias, attributes)
    out = graph.relu(graph.add(y, shortcut, name="add"), name="relu")
    for tensor in (out, mean, inv_variance):
        tensor.set_output(True)
    graph.build(this.handle)

    made = {out: this.empty(dims), mean: this.channels(C), inv_variance: this.channels(C)}
    given = {x: this.data(inputs.x), shortcut: this.data(inputs.prior)}
    given |= {scale: this.parameter(inputs.scale), bias: this.parameter(inputs.bias)}
    graph.execute(this.handle, {**given, **made}, this.workspace(graph.get_workspace_size()))

    expected = bounds.expect(problem, inputs)
    this.check_relu(expected, made[out])
    this.check(expected, "saved_mean", made[mean])
    this.check(expected, "saved_inv_variance", made[inv_variance])


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
