"""The rivals of `benchmarks.device`, where they are here: PyTorch, cudnn-frontend, NumPy."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.case import EPSILON, FACTOR, Case, Contender
from benchmarks.machine import Machine, TorchCuda, optional
from benchmarks.timing import Call
from pybnorm.enums import DataType

__all__ = ["CPU_RIVALS", "GPU_RIVALS", "Frontend", "numpy_formula", "torch_calls"]

GPU_RIVALS = ("torch", "torch-native", "cudnn-frontend")
"""PyTorch's default path and its own kernels; cudnn-frontend's graphs."""
CPU_RIVALS = ("torch", "numpy")


# ---------------------------------------------------------------- PyTorch


def torch_calls(case: Case, operation: str, *, native: bool = False) -> Contender:
    """PyTorch's eager call.

    ``F.batch_norm``, and for backward the operator that its autograd calls: ``aten.cudnn_batch_norm_backward``, but
    ``aten.native_batch_norm_backward`` on the CPU, for bfloat16, which PyTorch does not give to cuDNN, and if `native`.
    """
    torch = optional("torch")
    machine = case.machine
    functional = torch.nn.functional.batch_norm
    here = functools.partial(torch_tensor, torch, machine)
    sets = [(here(s.x), here(s.dy)) for s in case.sets]
    scale, bias, mean, variance = map(here, (case.scale, case.bias, case.running_mean, case.running_variance))
    saved_mean, saved_inv = here(case.saved_mean), here(case.saved_inv_variance)
    running = [mean.clone(), variance.clone()]

    aten = torch.ops.aten
    bare: list[Any]
    tail: tuple[Any, ...]
    if operation == "train":
        bare = [functools.partial(functional, x, *running, scale, bias, True, FACTOR, EPSILON) for x, _ in sets]
    elif operation == "infer":
        bare = [functools.partial(functional, x, mean, variance, scale, bias, False, FACTOR, EPSILON) for x, _ in sets]
    elif machine.gpu and not native and case.dtype != DataType.BFLOAT16:
        tail = (scale, mean, variance, saved_mean, saved_inv, EPSILON, torch.empty(0, dtype=torch.uint8, device="cuda"))
        if len(case.dims) == 3:  # whose channels-last memory PyTorch copies: x in forward, dy in backward
            bare = [functools.partial(_backward_of_copy, aten, x.contiguous(), dy, tail) for x, dy in sets]
        else:
            bare = [functools.partial(aten.cudnn_batch_norm_backward, x, dy, *tail) for x, dy in sets]
    else:
        tail = (scale, mean, variance, saved_mean, saved_inv, True, EPSILON, [True, True, True])
        bare = [functools.partial(aten.native_batch_norm_backward, dy, x, *tail) for x, dy in sets]

    off = functools.partial(torch.backends.cudnn.flags, enabled=False)
    return replace(_returning(machine, operation, bare, running), context=off if native else contextlib.nullcontext)


def _returning(machine: Machine, operation: str, bare: Sequence[Call], running: Sequence[Any]) -> Contender:
    """Calls that return PyTorch's tensors, one for each buffer set."""
    # As many results stay as there are buffer sets, or all calls would write into the same memory.
    results: collections.deque[Any] = collections.deque(maxlen=len(bare))

    def outputs() -> dict[str, Any]:
        result = results[-1]
        if operation == "backward":
            found = dict(zip(("dx", "dscale", "dbias"), result, strict=True))
        else:
            found = {"y": result[0] if isinstance(result, tuple) else result}
        if operation == "train":
            found |= {"running_mean": running[0], "running_variance": running[1]}
        return found if machine.gpu else {name: tensor.float().numpy() for name, tensor in found.items()}

    def keep(call: Call) -> None:
        results.append(call())

    return Contender(tuple(functools.partial(keep, call) for call in bare), outputs, bare=bare[0])


def _backward_of_copy(aten: Any, x: Any, dy: Any, tail: tuple[Any, ...]) -> Any:
    return aten.cudnn_batch_norm_backward(x, dy.contiguous(), *tail)


def torch_tensor(torch: Any, machine: Any, array: Any) -> Any:
    """A PyTorch tensor over an array of the machine."""
    if torch.is_tensor(array):
        return array
    view = machine.view(array)
    if view.dtype.name == "bfloat16":
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(view)


# ---------------------------------------------------------------- NumPy


def numpy_formula(case: Case, operation: str) -> Contender:
    """The formula as anybody writes it in NumPy, in float32, to which 16-bit data are converted; float64 stays."""
    machine: Any = case.machine
    kind = np.float64 if case.dtype == DataType.FLOAT64 else np.float32
    axes = (0, *range(2, len(case.dims)))
    shape = [1] * len(case.dims)
    shape[1] = case.dims[1]

    def vector(array: Any) -> Any:
        return machine.view(array).reshape(shape)

    scale, bias, mean, variance = map(vector, (case.scale, case.bias, case.running_mean, case.running_variance))
    saved_mean, saved_inv = vector(case.saved_mean), vector(case.saved_inv_variance)
    running = [mean.copy(), variance.copy()]
    count = kind(np.prod(case.dims) // case.dims[1])
    epsilon, factor = kind(EPSILON), kind(FACTOR)
    gradients: dict[str, Any] = {}

    def train(x: Any, y: Any) -> None:
        values = x.astype(kind, copy=False)
        batch_mean = values.mean(axis=axes, keepdims=True)
        batch_variance = values.var(axis=axes, keepdims=True)
        y[...] = (values - batch_mean) * (scale / np.sqrt(batch_variance + epsilon)) + bias
        running[0] += factor * (batch_mean - running[0])
        running[1] += factor * (batch_variance * (count / (count - 1)) - running[1])

    def infer(x: Any, y: Any) -> None:
        y[...] = (x.astype(kind, copy=False) - mean) * (scale / np.sqrt(variance + epsilon)) + bias

    def backward(x: Any, dy: Any, dx: Any) -> None:
        normal = (x.astype(kind, copy=False) - saved_mean) * saved_inv
        gradient = dy.astype(kind, copy=False)
        dbias = gradient.sum(axis=axes, keepdims=True)
        dscale = (gradient * normal).sum(axis=axes, keepdims=True)
        dx[...] = scale * saved_inv * (gradient - dbias / count - normal * (dscale / count))
        gradients.update(dscale=dscale, dbias=dbias)

    sets = [tuple(map(machine.view, (s.x, s.dy, s.y))) for s in case.sets]
    if operation == "backward":
        calls = [functools.partial(backward, *arrays) for arrays in sets]
    else:
        chosen = train if operation == "train" else infer
        calls = [functools.partial(chosen, x, y) for x, _, y in sets]

    def outputs() -> dict[str, Any]:
        y = sets[0][2]
        if operation == "backward":
            return {"dx": y} | {name: value.ravel() for name, value in gradients.items()}
        found = {"y": y}
        if operation == "train":
            found |= {"running_mean": running[0].ravel(), "running_variance": running[1].ravel()}
        return found

    return Contender(tuple(calls), outputs)


# ---------------------------------------------------------------- cudnn-frontend


class Frontend:
    """Graphs of the Python package ``nvidia-cudnn-frontend``, the first plan that its heuristics give.

    Inference is a graph of pointwise nodes with inverse standard deviations: no engine has the node for it.
    """

    def __init__(self, machine: TorchCuda) -> None:
        self._cudnn = optional("cudnn")
        self._machine = machine
        self._handle = self._cudnn.create_handle()
        self._cudnn.set_stream(handle=self._handle, stream=machine.stream)

    def close(self) -> None:
        """Destroy the handle."""
        self._cudnn.destroy_handle(self._handle)

    def contender(self, case: Case, operation: str) -> Contender:
        """A built graph of the operation; whatever the package raises where it has none."""
        cudnn, torch = self._cudnn, self._machine.torch
        types = {
            DataType.FLOAT32: cudnn.data_type.FLOAT,
            DataType.FLOAT16: cudnn.data_type.HALF,
            DataType.BFLOAT16: cudnn.data_type.BFLOAT16,
        }
        float32 = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=types[case.dtype],
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
        )
        ones = (1,) * (len(case.dims) - 2)

        def vector(array: Any) -> Any:
            return array.reshape(1, -1, *ones)

        first = case.sets[0]
        tensors = {"scale": vector(case.scale)}
        x = graph.tensor_like(first.x)
        scale = graph.tensor_like(tensors["scale"])
        fixed = {scale: tensors["scale"]}
        # What the calls differ in: (graph tensor, how to get it from a buffer set).
        moving: list[tuple[Any, Callable[[Any], Any]]] = [(x, lambda s: s.x)]
        results: dict[str, Any] = {}
        if operation == "train":
            running = [vector(v) for v in case.running()]
            saved = [vector(case.unwritten()) for _ in range(2)]
            scalars = [torch.full((1, 1, *ones), value) for value in (EPSILON, FACTOR)]
            given = [graph.tensor_like(t) for t in (vector(case.bias), *running, *scalars)]
            bias, mean, variance, epsilon, momentum = given
            made = graph.batchnorm(
                name="bn",
                input=x,
                scale=scale,
                bias=bias,
                in_running_mean=mean,
                in_running_var=variance,
                epsilon=epsilon,
                momentum=momentum,
            )
            made[0].set_output(True)
            moving.append((made[0], lambda s: s.y))
            for node, tensor in zip(made[1:], (*saved, *running), strict=True):
                node.set_output(True).set_data_type(float32)
                fixed[node] = tensor
            fixed |= dict(zip(given, (vector(case.bias), *running, *scalars), strict=True))
            names = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")
            results = {"y": first.y} | dict(zip(names, (*running, *saved), strict=True))
        elif operation == "infer":
            vectors = [vector(v) for v in (case.running_mean, (case.running_variance + EPSILON).rsqrt(), case.bias)]
            mean, inverse, bias = (graph.tensor_like(v) for v in vectors)
            fixed |= dict(zip((mean, inverse, bias), vectors, strict=True))
            y = graph.add(graph.mul(graph.mul(graph.sub(x, mean), inverse), scale), bias)
            y.set_output(True).set_data_type(types[case.dtype])
            moving.append((y, lambda s: s.y))
            results = {"y": first.y}
        else:
            vectors = [vector(v) for v in (case.saved_mean, case.saved_inv_variance)]
            mean, inverse = (graph.tensor_like(v) for v in vectors)
            dy = graph.tensor_like(first.dy)
            fixed |= dict(zip((mean, inverse), vectors, strict=True))
            moving.append((dy, lambda s: s.dy))
            dx, dscale, dbias = graph.batchnorm_backward(
                name="bn", grad=dy, input=x, scale=scale, mean=mean, inv_variance=inverse
            )
            dx.set_output(True).set_dim(list(first.y.shape)).set_stride(list(first.y.stride()))  # it infers NHWC
            moving.append((dx, lambda s: s.y))
            results = {"dx": first.y, "dscale": vector(case.unwritten()), "dbias": vector(case.unwritten())}
            for node, name in ((dscale, "dscale"), (dbias, "dbias")):
                node.set_output(True).set_data_type(float32)
                fixed[node] = results[name]
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = self._machine.empty_bytes(max(graph.get_workspace_size(), 1))
        calls = []
        for tensors_of_call in case.sets:
            pack = fixed | {node: pick(tensors_of_call) for node, pick in moving}
            calls.append(functools.partial(graph.execute, pack, workspace, handle=self._handle))
        flat = {name: array if name in ("y", "dx") else array.flatten() for name, array in results.items()}
        # flatten() of a contiguous vector is a view, so these show what later calls write.
        return Contender(tuple(calls), lambda: flat)


# ---------------------------------------------------------------- what is here


def presence(name: str, machine: Machine) -> dict[str, str]:
    """``{"version": ...}`` of a rival that is a Python package, or ``{"absent": why}``."""
    if name == "numpy":
        return {"version": np.__version__}
    torch = optional("torch")
    if torch is None:
        return {"absent": "PyTorch is not installed"}
    if machine.gpu and not isinstance(machine, TorchCuda):
        return {"absent": "this PyTorch is built without CUDA"}
    if name == "cudnn-frontend":
        cudnn = optional("cudnn")
        if not hasattr(cudnn, "pygraph"):
            return {"absent": "the package nvidia-cudnn-frontend is not installed"}
        return {"version": str(cudnn.__version__), "cudnn": str(cudnn.backend_version())}
    found = {"version": str(torch.__version__)}
    if machine.gpu:
        found["cudnn"] = str(torch.backends.cudnn.version())
    else:
        found["threads"] = str(torch.get_num_threads())
    return found
