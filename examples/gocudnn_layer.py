"""gocudnn's layer: stage, train, write its state as JSON, restore it on this or another backend, infer.

One command: ``python examples/gocudnn_layer.py --backend cudnn --infer-backend onednn``.
"""

import argparse
import dataclasses
import sys

import example

import pybnorm
from pybnorm import Mode, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.layer import BatchNorm, Info

N, C, H, W = 16, 16, 16, 16
EPSILON, FACTOR, BATCHES = 1e-4, 0.25, 3


def problem_of(this: example.Example, operation: Operation, batch: int = 0) -> Problem:
    """A batch as `pybnorm.check` describes it."""
    dims = (N, C, H, W)
    options = {"factor": FACTOR} if operation == Operation.FORWARD_TRAINING else {}
    return Problem(
        operation, Mode.SPATIAL, this.dtype, dims, this.strides(dims), fill="randn", eps=EPSILON,
        seed=this.seed + batch, **options,
    )  # fmt: skip


def train(this: example.Example) -> Info:
    """Three batches forward and the last one back, all judged; the layer's state."""
    handle, dims = this.handle, (N, C, H, W)
    with BatchNorm.spatial(handle, epsilon=EPSILON, exponential_average_factor=FACTOR, device=this.device) as layer:
        first = generate(problem_of(this, Operation.FORWARD_TRAINING))
        layer.stage(this.data(first.x))
        assert layer.bias_scale_properties().dims == first.scale.shape
        scale, bias = this.parameter(first.scale), this.parameter(first.bias)
        for n in range(BATCHES):
            problem, before = problem_of(this, Operation.FORWARD_TRAINING, n), layer.info()
            inputs = dataclasses.replace(
                first, x=generate(problem).x, mean=before.running_mean, variance=before.running_variance
            )
            x, y = this.data(inputs.x), this.empty(dims)
            workspace = this.workspace(layer.workspace_size("forward_training", handle.descriptor(x)))
            layer.forward_training(x, scale, bias, y, workspace=workspace)
            expected = bounds.expect(problem, inputs)
            this.check(expected, "y", y)
            for name in ("saved_mean", "saved_inv_variance", "running_mean", "running_variance"):
                this.check(expected, name, getattr(layer, name))

        problem, info = problem_of(this, Operation.BACKWARD), layer.info()
        inputs = dataclasses.replace(
            generate(problem), x=inputs.x, scale=first.scale, saved_mean=info.saved_mean,
            saved_inv_variance=info.saved_inv_variance,
        )  # fmt: skip
        dx, dscale, dbias = this.empty(dims), this.channels(C), this.channels(C)
        workspace = this.workspace(layer.workspace_size("backward", handle.descriptor(x)))
        layer.backward(x, this.data(inputs.dy), scale, dx, dscale, dbias, workspace=workspace)
        expected = bounds.expect(problem, inputs)
        for name, buffer in (("dx", dx), ("dscale", dscale), ("dbias", dbias)):
            this.check(expected, name, buffer)
        return info


def infer(this: example.Example, info: Info) -> None:
    """A layer of that state, on this backend; its y is judged."""
    with BatchNorm.restore(this.handle, info, device=this.device) as layer:
        problem = problem_of(this, Operation.FORWARD_INFERENCE)
        inputs = dataclasses.replace(generate(problem), mean=info.running_mean, variance=info.running_variance)
        x, y = this.data(inputs.x), this.empty((N, C, H, W))
        workspace = this.workspace(layer.workspace_size("forward_inference", this.handle.descriptor(x)))
        scale, bias = this.parameter(inputs.scale), this.parameter(inputs.bias)
        layer.forward_inference(x, scale, bias, y, workspace=workspace)
        this.check(bounds.expect(problem, inputs), "y", y)


def main(this: example.Example) -> None:
    """Train on one backend, infer on the other one, or on the same one again."""
    trained = train(this)
    text = trained.to_json()
    other = this.options.infer_backend or this.options.backend
    print(f"  {len(text)} characters of JSON, restored on {other}")
    second = example.Example(argparse.Namespace(**{**vars(this.options), "backend": other}))
    with second.handle:
        restored = Info.from_json(text)
        infer(second, restored)
    if restored != trained:
        print("  WRONG: the state has changed on the way")
    this.good &= second.good and restored == trained


def options_of(parser: argparse.ArgumentParser) -> None:
    """What this example has besides."""
    parser.add_argument("--infer-backend", choices=pybnorm.backends(), help="default: that of --backend")


if __name__ == "__main__":
    sys.exit(example.run(__doc__, main, options_of=options_of))
