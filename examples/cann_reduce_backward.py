"""CANN's batch norm by parts, in two phases: the statistics of a rank's batch, then the sums of its backward pass.

``aclnnBatchNormStats`` and ``aclnnBatchNormReduceBackward``. One command:
``python examples/cann_reduce_backward.py --dtype bf16``.
"""

import sys

import example
import numpy as np

from pybnorm import Mode, Operation, cann, reference
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem

N, C, H, W = 16, 16, 16, 16
EPSILON = 1e-5


def main(this: example.Example) -> None:
    """Each call as bytes and an executor first, then with a workspace; six outputs are judged."""
    dims, strides = (N, C, H, W), this.strides((N, C, H, W))
    # A mean of three deviations: differences from it are summed, so nothing cancels.
    options = {"fill": "randn", "kappa": 3.0, "eps": EPSILON, "seed": this.seed}
    problem = Problem(
        Operation.FORWARD_TRAINING, Mode.SPATIAL, this.dtype, dims, strides, running=False, **options
    )  # fmt: skip
    inputs = generate(problem)
    dy = generate(Problem(Operation.BACKWARD, Mode.SPATIAL, this.dtype, dims, strides, **options)).need("dy")
    x, grad_out = this.data(inputs.x), this.data(dy)

    mean, invstd = this.channels(C), this.channels(C)
    nbytes, executor = cann.batch_norm_stats_get_workspace_size(this.handle, x, EPSILON, mean, invstd)
    cann.batch_norm_stats(this.workspace(nbytes), nbytes, executor)

    names = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
    sums = {name: this.channels(C) for name in names}
    nbytes, executor = cann.batch_norm_reduce_backward_get_workspace_size(
        this.handle, grad_out, x, mean, invstd, None, True, True, True, *sums.values()
    )
    cann.batch_norm_reduce_backward(this.workspace(nbytes), nbytes, executor)

    expected = bounds.expect(problem, inputs)
    this.check(expected, "saved_mean", mean)
    this.check(expected, "saved_inv_variance", invstd)

    # The sums are judged for the mean and the inverse standard deviation as they were handed over.
    mu, inv = (this.read(a).astype(np.float64).reshape(1, C, 1, 1) for a in (mean, invstd))
    right = reference.backward_reduce(x=inputs.x, dy=dy, mean=mu, inv_variance=inv)
    x64, dy64 = inputs.x.astype(np.float64), np.abs(dy.astype(np.float64))
    u, h = bounds.precision(this.dtype).u, bounds.depth(N * H * W)
    total = h * u * dy64.sum((0, 2, 3), keepdims=True)
    moment = (h + 4) * u * (dy64 * np.abs(x64 - mu)).sum((0, 2, 3), keepdims=True)
    weight = inv * moment + 9 * u * (np.abs(right.dscale) + inv * moment)  # a product behind the sum, which is stored
    wanted = (right.sum_dy, right.sum_dy_xmu, right.dscale, right.dbias)
    for name, value, error in zip(names, wanted, (total, moment, weight, total), strict=True):
        this.check_within(name, sums[name], value.reshape(C), error.reshape(C))


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main))
