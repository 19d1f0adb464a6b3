"""Batch norm training as a graph: y, the saved and the running statistics.

hipDNN's sample BnTraining, with running statistics. One command: ``python examples/batchnorm_training.py``.
"""

import sys

import example

from pybnorm import Mode, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.graph import BatchnormAttributes, Graph

N, C, H, W = 16, 16, 16, 16
EPSILON, MOMENTUM = 1e-5, 0.1


def main(this: example.Example) -> None:
    """Build the graph stage by stage, execute it, and judge its five outputs."""
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    problem = Problem(
        Operation.FORWARD_TRAINING, Mode.SPATIAL, this.dtype, dims, strides,
        fill="randn", eps=EPSILON, factor=MOMENTUM, seed=this.seed,
    )  # fmt: skip
    inputs = generate(problem)

    graph = Graph().set_name("training")
    graph.set_io_data_type(this.dtype).set_intermediate_data_type("float").set_compute_data_type("float")
    x = graph.tensor(name="x", dim=dims, stride=strides)
    scale, bias, mean, variance = (
        graph.tensor(name=name, dim=(1, C, 1, 1), data_type="float")
        for name in ("scale", "bias", "prev_running_mean", "prev_running_variance")
    )
    attributes = BatchnormAttributes().set_name("bn").set_epsilon(EPSILON)
    attributes.set_previous_running_stats(mean, variance, MOMENTUM)
    outputs = graph.batchnorm(x, scale, bias, attributes)
    for tensor in outputs:
        tensor.set_output(True)

    graph.validate()
    graph.build_operation_graph(this.handle)
    graph.create_execution_plans()
    graph.check_support()
    graph.build_plans()

    given = {x: this.data(inputs.x), scale: this.parameter(inputs.scale), bias: this.parameter(inputs.bias)}
    given |= {mean: this.parameter(inputs.mean), variance: this.parameter(inputs.variance)}
    made = dict(zip(outputs, (this.empty(dims), *(this.channels(C) for _ in range(4))), strict=True))
    pack = {tensor.get_uid(): memory for tensor, memory in {**given, **made}.items()}
    graph.execute(this.handle, pack, this.workspace(graph.get_workspace_size()))

    expected = bounds.expect(problem, inputs)
    names = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
    for name, memory in zip(names, made.values(), strict=True):
        this.check(expected, name, memory)


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
