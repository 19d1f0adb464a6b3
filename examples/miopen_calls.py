"""MIOpen's three batch-norm calls in its names and argument order, with a cumulative average of the statistics.

One command: ``python examples/miopen_calls.py --backend miopen``.
"""

import dataclasses
import sys

import example

from pybnorm import Mode, Operation, TensorDescriptor, miopen
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem

N, C, H, W = 16, 16, 16, 16
EPSILON, BATCHES = 1e-5, 3


def main(this: example.Example) -> None:
    """Train on three batches, infer with the average of their statistics, and go back; every output is judged."""
    handle, mode = this.handle, Mode.SPATIAL
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    data = TensorDescriptor(handle.backend, this.dtype, dims, strides)
    derived = miopen.derive_bn_tensor_descriptor(data, mode)

    def problem(operation: Operation, batch: int = 0, **options: float) -> Problem:
        seed = this.seed + batch
        return Problem(operation, mode, this.dtype, dims, strides, fill="randn", eps=EPSILON, seed=seed, **options)

    first = generate(problem(Operation.FORWARD_TRAINING))
    scale, bias = this.parameter(first.scale), this.parameter(first.bias)
    mean, variance = this.parameter(first.mean), this.parameter(first.variance)
    saved_mean, saved_inv_variance = this.channels(C), this.channels(C)
    for n in range(BATCHES):
        factor = miopen.cumulative_average_factor(n)
        case = problem(Operation.FORWARD_TRAINING, n, factor=factor)
        before = (this.read(a).reshape(case.parameter_dims).copy() for a in (mean, variance))
        inputs = dataclasses.replace(first, x=generate(case).x, **dict(zip(("mean", "variance"), before, strict=True)))
        x, y = this.data(inputs.x), this.empty(dims)
        miopen.batch_normalization_forward_training(
            handle, mode, 1.0, 0.0, data, x, data, y, derived, scale, bias, factor, mean, variance, EPSILON,
            saved_mean, saved_inv_variance,
        )  # fmt: skip
        expected = bounds.expect(case, inputs)
        made = (y, saved_mean, saved_inv_variance, mean, variance)
        for name, buffer in zip(expected.outputs, made, strict=True):
            this.check(expected, name, buffer)

    case = problem(Operation.FORWARD_INFERENCE)
    running = {n: this.read(a).reshape(case.parameter_dims) for n, a in (("mean", mean), ("variance", variance))}
    inputs = dataclasses.replace(generate(case), scale=first.scale, bias=first.bias, **running)
    x, y = this.data(inputs.x), this.empty(dims)
    miopen.batch_normalization_forward_inference(
        handle, mode, 1.0, 0.0, data, x, data, y, derived, scale, bias, mean, variance, EPSILON
    )
    this.check(bounds.expect(case, inputs), "y", y)

    case = problem(Operation.BACKWARD)
    inputs = generate(case)
    x, dy, dx = this.data(inputs.x), this.data(inputs.dy), this.empty(dims)
    dscale, dbias = this.channels(C), this.channels(C)
    miopen.batch_normalization_backward(
        handle, mode, 1.0, 0.0, 1.0, 0.0, data, x, data, dy, data, dx, derived, this.parameter(inputs.scale), dscale,
        dbias, EPSILON, this.parameter(inputs.saved_mean), this.parameter(inputs.saved_inv_variance),
    )  # fmt: skip
    expected = bounds.expect(case, inputs)
    for name, buffer in (("dx", dx), ("dscale", dscale), ("dbias", dbias)):
        this.check(expected, name, buffer)


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
