"""Random problems, and every way that the package has to make their calls, each judged by the reference and the bound.

A way takes part in what its words can say: `Way.said` makes its own problem of each. Run by hand, for any backend:
``python3 tests/random_problems.py BACKEND COUNT SEED [--most=ELEMENTS] [--policy=POLICY] [WAY...]``
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys

import numpy as np

import pybnorm
from pybnorm import cann, devices, directml, functional, operations
from pybnorm._arrays import CPU, Buffer
from pybnorm.check.judging.bounds import Status, expect
from pybnorm.check.judging.known_defects import explain
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.judging.standalone import settle
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate, numpy_dtype
from pybnorm.check.language.problem import OPTIONS, Problem
from pybnorm.check.run.guarded import execute
from pybnorm.check.run.runner import classify
from pybnorm.check.run.session import Session
from pybnorm.enums import Capability, DataType, Mode, Operation
from pybnorm.errors import ArgumentError
from pybnorm.graph import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    Graph,
)
from pybnorm.layer import BatchNorm, Info

COPIES = 1 << 24
"""Bytes of workspace that copies of data off their alignment have room in, which descriptors do not say."""
DTYPES = ["f32", "f32", "f16", "bf16"]
TRAINING, INFERENCE, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD


# ---------------------------------------------------------------- problems


def _plane(pick: random.Random, rank: int) -> tuple[int, ...]:
    """Spatial sizes: small, or near an edge of some kernel's variants, primes among them."""
    square = pick.choice([7, 11, 13, 14, 17, 33, 35, 64, 72, 73])
    long = pick.choice([61, 67, 127, 513, 1024, 1025, 1026, 1031, 4097, 4099, 4100, 5000])
    small = int(2 ** pick.uniform(0, 6)), int(2 ** pick.uniform(0, 6))
    h, w = pick.choice([small, (1, 1), (1, int(2 ** pick.uniform(0, 11))), (square, square), (1, long)])
    if rank == 3:
        return (h * w,)
    if rank == 5:
        d = next((d for d in pick.sample([2, 3, 5, 7], 4) if h % d == 0), 1)
        return d, h // d, w
    return h, w


def _dims(pick: random.Random, most: int) -> tuple[int, ...]:
    while True:
        rank, c = pick.choice([2, 3, 4, 4, 4, 4, 5]), pick.choice([1, 2, 3, 5, 8, 16, 33])
        if rank == 2:
            found = pick.choice([2, 5, 48, 257, 513, 769, 1024, 1025, 4097]), c
        else:
            found = pick.choice([1, 1, 2, 3, 4, 8, 32, 33, 64, 256, 769]), c, *_plane(pick, rank)
        if np.prod(found) <= most:
            return found


def _line(pick: random.Random, most: int) -> str:
    operation = pick.choice(["train", "train", "infer", "backward", "backward"])
    kind = [pick.choice(["spatial", "spatial", "spatial", "peract"]), pick.choice(DTYPES)]
    parts = [operation, *kind, pick.choice(["nchw", "nchw", "nhwc"]), "x".join(map(str, _dims(pick, most)))]
    fill = pick.choice(["randn"] * 6 + ["exact", "ramp", "relu", "image", "sparse", "sqrteps", "constant", "level"])
    parts += [f"fill={fill}"] + [f"kappa={pick.choice([1, 30, 1000])}"] * (fill == "randn" and pick.random() < 0.3)
    if operation == "train":
        parts += [f"factor={pick.choice([0, 0.1, 1])}"] + ["running=0"] * (pick.random() < 0.2)
    if operation == "backward":
        parts += [f"alpha_param={pick.choice([-1, 0.5])}", "beta_param=2"] * (pick.random() < 0.2)
    parts += ["saved=0"] * (operation != "infer" and pick.random() < 0.4)
    parts += [f"beta={pick.choice([0.5, -1])}"] * (pick.random() < 0.2) + ["alpha=0.75"] * (pick.random() < 0.2)
    parts += [f"misalign={pick.choice([1, 3])}"] * (pick.random() < 0.05)
    return ",".join([*parts, f"repeats=1,seed={pick.randrange(1000)}"])


def problems(count: int, seed: int, most: int = 400_000) -> list[Problem]:
    """So many problems of no more than `most` elements, the same for a seed everywhere."""
    pick, found = random.Random(seed), []
    while len(found) < count:
        try:
            found.append(Problem.parse(_line(pick, most)))
        except ArgumentError:  # options that exclude one another, or a single element for each statistic
            continue
    return found


# ---------------------------------------------------------------- ways


def changed(problem: Problem, **options: object) -> Problem:
    """The problem with those options that its operation has."""
    return dataclasses.replace(problem, **{n: v for n, v in options.items() if n in OPTIONS[problem.operation]})


class Way:
    """The three calls as a `pybnorm.check` session makes them, by a vendor's handle that ignores known defects."""

    fixed: dict[str, object] = {}  # noqa: RUF012
    """Options of a problem that the way has no words for, and what they are then."""
    modes = (Mode.SPATIAL, Mode.PER_ACTIVATION)
    policy = "ignore"

    def __init__(self, backend: str, policy: str | None = None) -> None:
        self.device = devices.device_for(pybnorm.load(backend).device_type)
        self.handle = pybnorm.Handle(backend, stream=self.device.stream or None, known_defects=policy or self.policy)

    def said(self, problem: Problem) -> Problem | None:
        """The problem in the way's words; None where they cannot say it."""
        if problem.mode not in self.modes:
            return None
        return changed(problem, **self.fixed)

    def inputs(self, problem: Problem, given):
        """The data, changed where the way's words cannot say them."""
        return given

    def read(self, buffer: Buffer):
        """A vector's values, which may lie inside other memory."""
        copy = self.device.from_numpy(np.zeros(buffer.dims, numpy_dtype(buffer.dtype)))
        operations.axpby(self.handle, 1.0, buffer, 0.0, copy)
        self.device.synchronize()
        return self.device.to_numpy(copy)

    def memory(self, nbytes: int, least: int = 0):
        """A workspace: None on a CPU, where the handle lends its own."""
        nbytes = max(nbytes, least)
        return self.device.empty_bytes(nbytes) if nbytes and self.device.device_type != CPU else None


class Avoid(Way):
    """The entry points of a handle that avoids."""

    policy = "avoid"

    def _call(self, operation, x, options, tensors):
        numbers = {n: v for n, v in options.items() if n not in ("exponential_average_factor", "workspace")}
        like = {f"{n}_desc": self.handle.descriptor(b) for n, b in tensors.items() if n in ("y", "dy", "dx")}
        stated = {n: f"{n}_mean" in tensors for n in ("running", "saved")}
        nbytes = self.handle.workspace_size(operation, self.handle.descriptor(x), **like, **numbers, **stated)
        call = getattr(self.handle, operation.name.lower())
        call(x=x, **tensors, **(options | {"workspace": self.memory(nbytes, COPIES)}))

    def _split(self, arguments):
        tensors = {n: v for n, v in arguments.items() if isinstance(v, Buffer)}
        return {n: v for n, v in arguments.items() if n not in tensors}, tensors

    def forward_training(self, *, x, **arguments):
        """As the entry point."""
        self._call(TRAINING, x, *self._split(arguments))

    def forward_inference(self, *, x, **arguments):
        """As the entry point."""
        self._call(INFERENCE, x, *self._split(arguments))

    def backward(self, *, x, **arguments):
        """As the entry point."""
        self._call(BACKWARD, x, *self._split(arguments))


class Plan(Avoid):
    """Plans with algorithm "auto"."""

    policy = "ignore"

    def _call(self, operation, x, options, tensors):
        options.pop("workspace")
        like = {n: tensors[n] for n in ("y", "dy", "dx") if n in tensors}
        named = {TRAINING: ("running", "saved"), INFERENCE: (), BACKWARD: ("saved",)}[operation]
        stated = {n: f"{n}_mean" in tensors for n in named}
        make = getattr(self.handle, f"plan_{operation.name.lower()}")
        plan = make(x, **like, **options, **stated, algorithm="auto")
        plan(x=x, **tensors, workspace=self.memory(plan.workspace_size))


class _Home(functional._Home):
    """A framework with the device's own memory, for the backends whose frameworks are not here."""

    has_memory = True

    def __init__(self, way: Way) -> None:
        self.way = way

    def memory(self, nbytes, device):
        """Of the device."""
        return lambda: self.way.device.empty_bytes(nbytes)

    def address(self, memory):
        """Its address."""
        return memory.pointer


class Functional(Way):
    """`pybnorm.functional`."""

    fixed = {"alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0}  # noqa: RUF012

    def said(self, problem):
        """Training returns the statistics."""
        found = super().said(problem)
        return changed(found, saved=True) if problem.operation == TRAINING else found

    def _call(self, name, *arguments, out, **options):
        own = functional._home_of
        functional._home_of = lambda array: _Home(self) if self.device.device_type != CPU else own(array)
        try:
            getattr(functional, f"batch_norm_{name}")(*arguments, **options, handle=self.handle, out=out)
        finally:
            functional._home_of = own

    def forward_training(
        self, *, x, scale, bias, y, saved_mean, saved_inv_variance, running_mean=None, running_variance=None,
        alpha, beta, workspace, **options,
    ):  # fmt: skip
        """batch_norm_training."""
        out = y, saved_mean, saved_inv_variance
        running = {"running_mean": running_mean, "running_variance": running_variance}
        self._call("training", x, scale, bias, **running, out=out, **options)

    def forward_inference(
        self, *, x, scale, bias, running_mean, running_variance, y, alpha, beta, workspace, **options
    ):  # fmt: skip
        """batch_norm_inference."""
        vectors = {"running_mean": running_mean, "running_variance": running_variance, "scale": scale, "bias": bias}
        self._call("inference", x, **vectors, out=y, **options)

    def backward(
        self, *, x, dy, scale, dx, dscale, dbias, saved_mean=None, saved_inv_variance=None,
        alpha, beta, alpha_param, beta_param, workspace, **options,
    ):  # fmt: skip
        """batch_norm_backward."""
        self._call("backward", x, dy, scale, saved_mean, saved_inv_variance, out=(dx, dscale, dbias), **options)


class Operations(Way):
    """`pybnorm.operations`."""

    def _call(self, name, options, **tensors):
        if "mode" in options:
            rank, mode = len(tensors["x"].dims), options.pop("mode")
            options["axis"] = tuple(range(1, rank)) if mode == Mode.PER_ACTIVATION else 1
        options.pop("workspace", None)
        nbytes = operations.workspace_size(self.handle, name, **tensors, **options)
        getattr(operations, name)(self.handle, **tensors, **options, workspace=self.memory(nbytes))

    def _named(self, name, arguments):
        tensors = {n: v for n, v in arguments.items() if isinstance(v, Buffer)}
        self._call(name, {n: v for n, v in arguments.items() if n not in tensors}, **tensors)

    def forward_training(self, **arguments):
        """operations.forward_training."""
        self._named("forward_training", arguments)

    def forward_inference(self, **arguments):
        """operations.forward_inference."""
        self._named("forward_inference", arguments)

    def backward(self, **arguments):
        """operations.backward."""
        self._named("backward", arguments)


class Halves(Operations):
    """The halves of training and backward in `pybnorm.operations`, and inference from the inverse deviation."""

    fixed = {"running": False, "inverse": True, "alpha_param": 1.0, "beta_param": 0.0}  # noqa: RUF012
    modes = (Mode.SPATIAL,)

    def said(self, problem):
        """Backward takes statistics; of 16 bits it rounds dx twice, as it says, for which the bound has no room."""
        if problem.operation == BACKWARD:
            problem = dataclasses.replace(problem, dtype=DataType.FLOAT32, params=None, alpha=1.0, beta=0.0)
        return super().said(changed(problem, saved=True))

    def forward_inference_inv_variance(self, **arguments):
        """operations.forward_inference_inv_variance."""
        self._named("forward_inference_inv_variance", arguments)

    def forward_training(
        self, *, x, scale, bias, y, saved_mean, saved_inv_variance, alpha, beta, epsilon, mode, workspace,
        exponential_average_factor,
    ):  # fmt: skip
        """Stats, then inference from the inverse deviation."""
        given = {"mean": saved_mean, "inv_variance": saved_inv_variance}
        self._call("stats", {"epsilon": epsilon}, x=x, **given)
        self._call(
            "forward_inference_inv_variance", {"alpha": alpha, "beta": beta}, x=x, scale=scale, bias=bias, **given, y=y
        )

    def backward(
        self, *, x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, **options
    ):  # fmt: skip
        """backward_reduce, then backward_elemt."""
        given = {"mean": saved_mean, "inv_variance": saved_inv_variance}
        sums = {n: self.device.from_numpy(np.zeros(scale.dims, np.float32)) for n in ("sum_dy", "sum_dy_xmu")}
        self._call("backward_reduce", {}, x=x, dy=dy, **given, **sums, dscale=dscale, dbias=dbias)
        count = int(np.prod(x.dims)) // x.dims[1]
        self._call("backward_elemt", {"count": count}, x=x, dy=dy, scale=scale, **given, **sums, dx=dx)


class Layer(Way):
    """`pybnorm.layer`: statistics go in by `restore` and are copied out."""

    def said(self, problem):
        """A layer keeps all statistics, and backward takes them from it."""
        found = super().said(problem)
        if problem.operation == INFERENCE:
            return found
        if problem.operation == TRAINING and problem.m == 1:
            return None
        return changed(found, saved=True, running=True)

    def _layer(self, x, mode, epsilon, state, factor=0.5):
        like = next(iter(state.values()))
        zeros = np.zeros(like.dims, numpy_dtype(like.dtype))
        names = "running_mean", "running_variance", "saved_mean", "saved_inv_variance"
        values = {n: self.read(state[n]) if n in state else zeros for n in names}
        packed = tuple(int(np.prod(like.dims[a + 1 :])) for a in range(len(like.dims)))
        info = Info(
            mode, pybnorm.Layout.CHANNELS_FIRST, like.dtype, "propagate", like.dims, packed, epsilon, factor, **values
        )
        return BatchNorm.restore(self.handle, info, device=self.device)

    def _workspace(self, layer, operation, x, options):
        numbers = {n: v for n, v in options.items() if n in ("alpha", "beta", "alpha_param", "beta_param")}
        return self.memory(layer.workspace_size(operation, self.handle.descriptor(x), **numbers), COPIES)

    def forward_training(
        self, *, x, scale, bias, y, running_mean, running_variance, saved_mean, saved_inv_variance, mode, epsilon,
        exponential_average_factor, workspace, **options,
    ):  # fmt: skip
        """BatchNorm.forward_training."""
        running = {"running_mean": running_mean, "running_variance": running_variance}
        with self._layer(x, mode, epsilon, running, exponential_average_factor) as layer:
            layer.forward_training(x, scale, bias, y, **options, workspace=self._workspace(layer, TRAINING, x, options))
            for name, target in (
                running | {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
            ).items():
                operations.axpby(self.handle, 1.0, getattr(layer, name), 0.0, target)
            self.device.synchronize()

    def forward_inference(
        self, *, x, scale, bias, running_mean, running_variance, y, mode, epsilon, workspace, **options
    ):  # fmt: skip
        """BatchNorm.forward_inference."""
        running = {"running_mean": running_mean, "running_variance": running_variance}
        with self._layer(x, mode, epsilon, running) as layer:
            workspace = self._workspace(layer, INFERENCE, x, options)
            layer.forward_inference(x, scale, bias, y, **options, workspace=workspace)
            self.device.synchronize()

    def backward(
        self, *, x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, mode, epsilon, workspace, **options
    ):  # fmt: skip
        """BatchNorm.backward."""
        saved = {"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
        with self._layer(x, mode, epsilon, saved) as layer:
            workspace = self._workspace(layer, BACKWARD, x, options)
            layer.backward(x, dy, scale, dx, dscale, dbias, **options, workspace=workspace)
            self.device.synchronize()


class Graphs(Way):
    """`pybnorm.graph`."""

    fixed = {"alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0}  # noqa: RUF012
    modes = (Mode.SPATIAL,)

    def said(self, problem):
        """One element for each channel is refused; inference takes either form of the deviation."""
        if problem.m == 1 and problem.operation != INFERENCE:
            return None
        if problem.operation == INFERENCE:
            problem = dataclasses.replace(problem, inverse=problem.seed % 2 == 1)
        return super().said(problem)

    def _tensors(self, **buffers):
        graph = Graph().set_io_data_type(buffers["x"].dtype).set_compute_data_type("float")
        graph.set_intermediate_data_type("float")
        made = {}
        for name, buffer in buffers.items():
            made[name] = graph.tensor(name=name, dim=buffer.dims, stride=buffer.strides, data_type=buffer.dtype)
        return graph, made

    def _run(self, graph, pairs):
        """Run with tensors and their memory; a tensor may be None."""
        for tensor, buffer, written in pairs:
            if written:
                tensor.set_output(True).set_data_type(buffer.dtype).set_dim(buffer.dims).set_stride(buffer.strides)
        graph.build(self.handle)
        nbytes = graph.get_workspace_size()
        memory = self.device.empty_bytes(nbytes) if nbytes else None
        graph.execute(self.handle, {tensor: buffer for tensor, buffer, _ in pairs}, memory)

    def forward_training(
        self, *, x, scale, bias, y, epsilon, exponential_average_factor, running_mean=None, running_variance=None,
        saved_mean=None, saved_inv_variance=None, **options,
    ):  # fmt: skip
        """A batchnorm node."""
        graph, t = self._tensors(x=x, scale=scale, bias=bias)
        attributes = BatchnormAttributes().set_epsilon(epsilon)
        pairs = [(t["x"], x, False), (t["scale"], scale, False), (t["bias"], bias, False)]
        if running_mean is not None:
            for name, buffer in (("running_mean", running_mean), ("running_variance", running_variance)):
                t[name] = graph.tensor(name=name, dim=buffer.dims, stride=buffer.strides, data_type=buffer.dtype)
                pairs.append((t[name], buffer, False))
            attributes.set_previous_running_stats(t["running_mean"], t["running_variance"], exponential_average_factor)
        results = graph.batchnorm(t["x"], t["scale"], t["bias"], attributes)
        written = y, saved_mean, saved_inv_variance, running_mean, running_variance
        pairs += [(r, b, True) for r, b in zip(results, written, strict=True) if b is not None]
        self._run(graph, pairs)

    def _inference(self, x, scale, bias, mean, spread, y, epsilon):
        graph, t = self._tensors(x=x, mean=mean, spread=spread, scale=scale, bias=bias)
        rest = t["x"], t["mean"], t["spread"], t["scale"], t["bias"]
        if epsilon is None:
            result = graph.batchnorm_inference(*rest, BatchnormInferenceAttributes())
        else:
            result = graph.batchnorm_inference_variance_ext(*rest, epsilon, BatchnormInferenceAttributesVarianceExt())
        given = {"x": x, "mean": mean, "spread": spread, "scale": scale, "bias": bias}
        self._run(graph, [*[(t[n], b, False) for n, b in given.items()], (result, y, True)])

    def forward_inference(self, *, x, scale, bias, running_mean, running_variance, y, epsilon, **options):
        """An inference node with the variance."""
        self._inference(x, scale, bias, running_mean, running_variance, y, epsilon)

    def forward_inference_inv_variance(self, *, x, scale, bias, mean, inv_variance, y, **options):
        """An inference node."""
        self._inference(x, scale, bias, mean, inv_variance, y, None)

    def backward(
        self, *, x, dy, scale, dx, dscale, dbias, epsilon, saved_mean=None, saved_inv_variance=None, **options
    ):  # fmt: skip
        """A backward node."""
        given = {"x": x, "dy": dy, "scale": scale}
        attributes = BatchnormBackwardAttributes()
        if saved_mean is not None:
            given |= {"mean": saved_mean, "inv_variance": saved_inv_variance}
        graph, t = self._tensors(**given)
        if saved_mean is None:
            attributes.set_epsilon(epsilon)
        else:
            attributes.set_saved_mean_and_inv_variance(t["mean"], t["inv_variance"])
        results = graph.batchnorm_backward(t["dy"], t["x"], t["scale"], attributes)
        pairs = [(t[n], b, False) for n, b in given.items()]
        self._run(graph, pairs + [(r, b, True) for r, b in zip(results, (dx, dscale, dbias), strict=True)])


class DirectML(Way):
    """`pybnorm.directml`: parameters have the type of x, and statistics are variances."""

    fixed = {"alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0, "running": False}  # noqa: RUF012

    def said(self, problem):
        """Training returns variances, which f16 has no digits for to judge; backward takes them."""
        if problem.dtype not in (DataType.FLOAT32, DataType.FLOAT16):
            return None
        own = {"params": problem.dtype}
        if problem.operation == TRAINING:
            own["saved"] = problem.dtype == DataType.FLOAT32
        if problem.operation == BACKWARD:
            own |= {"saved": True, "eps": 0.0, "fill": "randn", "magnitude": None}
        return super().said(changed(problem, **own))

    def inputs(self, problem, given):
        """Inverse deviations whose variances need no rounding."""
        if problem.operation != BACKWARD:
            return given
        exponents = np.clip(np.round(np.log2(np.abs(given.saved_inv_variance))), -6, 6)
        return dataclasses.replace(given, saved_inv_variance=2.0**exponents)

    def _call(self, name, *arguments, **options):
        nbytes = directml.workspace_size(self.handle, name, *arguments, **options)
        getattr(directml, name)(self.handle, *arguments, **options, workspace=self.memory(nbytes))

    def forward_training(
        self, *, x, scale, bias, y, epsilon, saved_mean=None, saved_inv_variance=None, **options
    ):  # fmt: skip
        """BATCH_NORMALIZATION_TRAINING; the inverse deviation of its variance."""
        blank = np.zeros(scale.dims, numpy_dtype(scale.dtype))
        mean = saved_mean or self.device.from_numpy(blank)
        variance = self.device.from_numpy(blank)
        self._call("batch_normalization_training", x, scale, bias, None, y, mean, variance, epsilon=epsilon)
        if saved_inv_variance is not None:
            given = {"variance": variance, "inv_variance": saved_inv_variance, "epsilon": epsilon}
            nbytes = operations.workspace_size(self.handle, "inverse_standard_deviation", **given)
            operations.inverse_standard_deviation(self.handle, **given, workspace=self.memory(nbytes))

    def forward_inference(self, *, x, scale, bias, running_mean, running_variance, y, epsilon, **options):
        """BATCH_NORMALIZATION."""
        self._call("batch_normalization", x, running_mean, running_variance, scale, bias, y, epsilon=epsilon)

    def backward(
        self, *, x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, epsilon, **options
    ):  # fmt: skip
        """BATCH_NORMALIZATION_TRAINING_GRAD."""
        inverse = self.read(saved_inv_variance)
        variance = self.device.from_numpy(1 / (inverse * inverse))
        given = x, dy, saved_mean, variance, scale, dx, dscale, dbias
        self._call("batch_normalization_training_grad", *given, epsilon=epsilon)


class Cann(Way):
    """`pybnorm.cann`: the calls of synchronized batch norm, for one rank."""

    fixed = Functional.fixed | {"running": False, "inverse": True}
    modes = (Mode.SPATIAL,)

    def said(self, problem):
        """All statistics are given and taken; backward as in `Halves`."""
        if problem.operation == BACKWARD:
            problem = dataclasses.replace(problem, dtype=DataType.FLOAT32, params=None, alpha=1.0, beta=0.0)
        return super().said(changed(problem, saved=True))

    def _call(self, name, *arguments):
        nbytes, executor = getattr(cann, f"batch_norm_{name}_get_workspace_size")(self.handle, *arguments)
        memory = self.device.empty_bytes(nbytes) if nbytes else None
        getattr(cann, f"batch_norm_{name}")(memory, nbytes, executor)

    @staticmethod
    def _vectors(*buffers):
        return [b._replace(dims=(b.dims[1],), strides=(1,)) for b in buffers]

    def forward_training(
        self, *, x, scale, bias, y, saved_mean, saved_inv_variance, epsilon, **options
    ):  # fmt: skip
        """Statistics, then the elements."""
        weight, shift, mean, inverse = self._vectors(scale, bias, saved_mean, saved_inv_variance)
        self._call("stats", x, epsilon, mean, inverse)
        self._call("elemt", x, weight, shift, mean, inverse, epsilon, y)

    def forward_inference_inv_variance(self, *, x, scale, bias, mean, inv_variance, y, **options):
        """The elements."""
        self._call("elemt", x, *self._vectors(scale, bias, mean, inv_variance), 1e-5, y)

    def backward(
        self, *, x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, **options
    ):  # fmt: skip
        """The sums, then the elements."""
        weight, mean, inverse, dscale, dbias = self._vectors(scale, saved_mean, saved_inv_variance, dscale, dbias)
        sums = [self.device.from_numpy(np.zeros(weight.dims, np.float32)) for _ in range(2)]
        self._call("reduce_backward", dy, x, mean, inverse, weight, True, True, True, *sums, dscale, dbias)
        count = int(np.prod(x.dims)) // x.dims[1]
        self._call("elemt_backward", dy, x, mean, inverse, weight, *sums, [count], dx)


WAYS = {
    "avoid": Avoid, "plan": Plan, "functional": Functional, "operations": Operations, "halves": Halves,
    "layer": Layer, "graph": Graphs, "directml": DirectML, "cann": Cann,
}  # fmt: skip


# ---------------------------------------------------------------- running them


class _Session(Session):
    """A way in the place of a handle, which brings its own workspace."""

    def capability(self, problem: Problem) -> Capability:
        return Capability(0)

    def workspace_size(self, problem: Problem) -> int:
        return 0


def run(problem: Problem, way: Way) -> CaseResult:
    """The verdict on a problem that the way has said; `known` names what explains it."""
    backend = way.handle.backend
    result = CaseResult(backend, str(problem), Status.PASS)
    try:
        inputs = way.inputs(problem, generate(problem))
        observed = execute(problem, inputs, _Session(backend, way, way.device))
        settle(result, problem, inputs, judge_call(expect(problem, inputs), observed.outputs))
        if observed.damage:
            result.status, result.message = Status.FAIL, "; ".join(observed.damage)
    except Exception as error:
        result.status, result.message = classify(error), f"{type(error).__name__}: {error}"
    version = way.handle.library.version
    known = explain(backend, version, problem, result.verdicts, result.status, result.message)
    result.known = ", ".join(d.id for d in known)
    return result


def main(backend: str, count: str, seed: str, *rest: str) -> int:
    """Print what is not right, and a line of counts for each way."""
    names = [name for name in rest if not name.startswith("--")] or list(WAYS)
    policy = next((r.partition("=")[2] for r in rest if r.startswith("--policy=")), None)
    most = next((int(r.partition("=")[2]) for r in rest if r.startswith("--most=")), 400_000)
    wrong = 0
    for name in names:
        way, tally, refused = WAYS[name](backend, policy), collections.Counter(), collections.Counter()
        for problem in problems(int(count), int(seed), most):
            said = way.said(problem)
            if said is None:
                tally["not said"] += 1
                continue
            result = run(said, way)
            tally[result.status.name] += 1
            if result.status == Status.UNSUPPORTED:
                refused[result.message[:150]] += 1
            elif result.status != Status.PASS:
                wrong += result.status not in (Status.WARN, Status.INCONCLUSIVE, Status.MISTRUSTED)
                worst = ", ".join(
                    f"{v.output} {v.status.name} {v.ratio:.3g} {v.note}"
                    for v in result.verdicts
                    if v.status != Status.PASS
                )
                print(name, result.status.name, said, result.known, result.message[:300], worst, flush=True)
        print(name, dict(tally), flush=True)
        for text, times in refused.most_common():
            print(f"    {times} UNSUPPORTED: {text}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
