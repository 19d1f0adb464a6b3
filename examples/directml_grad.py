"""DirectML's batch norm with given statistics and a fused ReLU, and its gradient operator.

One command: ``python examples/directml_grad.py --dtype f16 --backend cudnn``. Statistics and parameters have the data's
dtype, as DirectML wants them.
"""

import sys

import example
import numpy as np

from pybnorm import directml, reference
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import numpy_dtype

N, C, H, W = 16, 16, 16, 16
EPSILON = 1e-5


def main(this: example.Example) -> None:
    """The two operators, each with the temporary resource that it asks for; four outputs are judged."""
    random, dtype = np.random.default_rng(this.seed), numpy_dtype(this.dtype)
    x, dy = (random.normal(0.5, 2, (N, C, H, W)).astype(dtype) for _ in range(2))
    mean, scale, bias = (random.normal(0.5, 1, (1, C, 1, 1)).astype(dtype) for _ in range(3))
    variance = random.uniform(0.5, 3, (1, C, 1, 1)).astype(dtype)
    data, gradient = this.data(x), this.data(dy)
    mu, v, gain, shift = (this.device.from_numpy(a) for a in (mean, variance, scale, bias))

    y = this.empty(x.shape)
    arguments = data, mu, v, gain, shift, y, True, EPSILON, "relu"
    nbytes = directml.workspace_size(this.handle, "batch_normalization", *arguments)
    directml.batch_normalization(this.handle, *arguments, workspace=this.workspace(nbytes))

    # The gradient operator has no activation: `gradient` is that of the ReLU's input.
    dx, dscale, dbias = this.empty(x.shape), this.empty(scale.shape), this.empty(bias.shape)
    arguments = data, gradient, mu, v, gain, dx, dscale, dbias, EPSILON
    nbytes = directml.workspace_size(this.handle, "batch_normalization_grad", *arguments)
    directml.batch_normalization_grad(this.handle, *arguments, workspace=this.workspace(nbytes))

    right = reference.forward_inference(x, scale, bias, mean, variance, epsilon=EPSILON).y
    want = reference.backward_frozen(x, dy, scale=scale, mean=mean, variance=variance, epsilon=EPSILON)
    x, dy, mean, variance, scale, bias = (a.astype(np.float64) for a in (x, dy, mean, variance, scale, bias))
    u, r = bounds.precision(this.dtype).u, 1 / np.sqrt(variance + EPSILON)
    zero, h = np.zeros_like(r), bounds.depth(N * H * W)
    this.check_within("y", y, right, bounds.forward_error(x, mean, r, scale, bias, (zero, 4 * u * r), u), relu=True)
    this.check_within("dx", dx, want.dx, bounds.forward_error(dy, zero, r, scale, zero, (zero, 4 * u * r), u))
    moment = (np.abs(dy) * np.abs(x - mean)).sum((0, 2, 3), keepdims=True)
    this.check_within("dscale", dscale, want.dscale, r * (h + 4) * u * moment + 9 * u * np.abs(want.dscale))
    this.check_within("dbias", dbias, want.dbias, h * u * np.abs(dy).sum((0, 2, 3), keepdims=True))


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main, dtypes=("f32", "f16")))
