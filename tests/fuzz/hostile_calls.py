"""Every public callable, with good arguments in whose place hostile ones go.

What there is to call is read from the package: each name of a public module's `__all__`, functions as they are, classes
by their constructor and their own public methods. An argument is known by its name; where a module or a call means
something else by the name, `GOOD` says so. A callable whose good arguments are not known here is an error: a new public
name is covered, or left out below with a reason.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pybnorm
from pybnorm import _core

LEFT_OUT = {
    "pybnorm.__main__": "the command line, whose arguments are text: tests/check",
    "pybnorm.cli": "the command line, whose arguments are text: tests/check",
    "pybnorm.pytest_plugin": "pytest calls it",
    "pybnorm.devices.cuda": "needs CUDA; pybnorm.devices.device_for is how it is asked for",
    "pybnorm.devices.hip": "needs ROCm; pybnorm.devices.device_for is how it is asked for",
}
"""Modules, with those below them."""
PUBLIC = {
    "pybnorm.check.run.archive": ("read_run",),
    "pybnorm.check.judging.bounds": ("judge", "expect"),
    "pybnorm.check.language.vendor_lines": ("benchdnn", "cudnn_call", "miopen_driver", "vendor_lines"),
    "pybnorm.check.compare.comparison": ("is_run", "read"),
    "pybnorm.check.language.data": ("generate",),
}
"""What callers use of the modules below `pybnorm.check` other than `problem`; the rest is the command's own."""
REFUSED = {
    "pybnorm._core.Handle.query_runtime_error": "oneDNN's kernels record no errors",
    "pybnorm.check.run.archive.read_run": "there is no run",
    "pybnorm.check.compare.comparison.read": "there is no run",
}
"""Whose good call is refused here."""
ALLOCATES = {
    ("pybnorm.devices.cpu.Device.empty_bytes", "nbytes"),
    ("pybnorm.devices.cpu.Device.time", "repeats"),
    ("pybnorm.hipdnn.DeviceBuffer", "size_bytes"),
    ("pybnorm.sync.SyncBatchNorm", "channels"),
}
"""Memory that the caller asks for: a MemoryError is the answer where there is none."""
CALLED_BACK = {("pybnorm.reference.reduce_blocks", "function"), ("pybnorm.devices.cpu.Device.time", "call")}
"""Functions of the caller, whose own errors pass through."""
NOT_CALLED = {
    "pybnorm.devices.Device": "the base class of pybnorm.devices.cpu.Device, which is called",
    "pybnorm._core.bound": "operations bind their arguments with it: tests/operations/test_operation_calls.py",
    "pybnorm._core.install_torch_kernels": "pybnorm.torch gives itself: tests/pytorch/test_installation.py",
    "pybnorm._core.remove_torch_kernels": "as install_torch_kernels",
    "pybnorm.check.Worker": "starts a process at each call: tests/check",
    "pybnorm.torch.install": "stays for the process: tests/pytorch/test_installation.py",
    "pybnorm.torch.Installation": "install makes it",
    **{
        f"pybnorm._core.{name}": "of the package's own modules, which give what they have made"
        for name in ["allow_in_place", "cache", "defects_of", "look", "refuse_addresses", "tell_of_defects", "way_of"]
    },
    **{
        f"pybnorm.torch.{name}": "PyTorch's own constructors and methods, with its errors"
        for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
    },
}

T = tuple[int, ...]
DIMS, CHANNELS = (2, 3, 2, 2), 3


class World:
    """What good arguments are made of, once per process."""

    def __init__(self) -> None:
        self.handle = pybnorm.Handle("onednn")
        self.folder = Path(tempfile.mkdtemp(prefix="pybnorm-hostile-"))
        self.random = np.random.default_rng(0)
        memory = np.zeros((1 << 16) + 64, np.uint8)
        self.space = memory[-memory.ctypes.data % 64 :][: 1 << 16]
        self.data = self.random.standard_normal(DIMS).astype(np.float32)
        self.x_desc = pybnorm.TensorDescriptor("onednn", "f32", DIMS)
        self.opened: Any = None
        self.param_desc = pybnorm.TensorDescriptor("onednn", "f32", (1, CHANNELS, 1, 1))

    def session(self) -> Any:
        from pybnorm.check.run.session import open_session

        if self.opened is None:
            self.opened = open_session("onednn")
        return self.opened


def data(w: World) -> Any:
    return w.data.copy()


def vector(w: World) -> Any:
    return np.full(CHANNELS, 1.5, np.float32)


class Address(NamedTuple):
    """A good value that is an address; `owner` keeps the memory."""

    pointer: int
    owner: Any


def at(make: Callable[[World], Any]) -> Callable[[World], Address]:
    def made(w: World) -> Address:
        array = make(w)
        return Address(array.ctypes.data, array)

    return made


def is_(value: Any) -> Callable[[World], Any]:
    return lambda w: value


def torch_tensor(shape: T) -> Callable[[World], Any]:
    return lambda w: __import__("torch").full(shape, 1.5)


def model(w: World) -> Any:
    nn = __import__("torch").nn
    return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU())


def problem(w: World) -> Any:
    from pybnorm.check import Problem

    return Problem.parse("train,spatial,f32,nchw,2x3x2x2,fill=randn")


def expected(w: World) -> Any:
    from pybnorm.check.judging import bounds

    return bounds.expect(problem(w), inputs(w))


def inputs(w: World) -> Any:
    from pybnorm.check.language import data as made

    return made.generate(problem(w))


def made_outputs(w: World) -> Any:
    from pybnorm.check import arguments
    from pybnorm.check.language.calls import outputs

    return {tensor.name: arguments(problem(w))[tensor.name] for tensor in outputs(problem(w))}


def executor(name: str) -> Callable[[World], Any]:
    """The first phase of a call of CANN's."""

    def made(w: World) -> Any:
        call = TARGETS[f"pybnorm.cann.{name}_get_workspace_size"]
        return call.function(**call.good(w))[1]

    return made


def plan(name: str) -> Callable[[World], Any]:
    return lambda w: getattr(w.handle, name)(w.x_desc)


def call_list(w: World) -> Any:
    made = _core.CallList(w.handle)
    made.append(w.handle, pybnorm.Operation.FILL, {"y": slotted(w)}, (0, 0), value=0.0)
    return made


def slotted(w: World) -> Any:
    """Memory at the begin of slot 1."""
    return w.handle.buffer(w.data, "y")._replace(pointer=1 << _core.SLOT_BITS, owner=None)


def graph(stage: int = 9) -> Callable[[World], Any]:
    """A graph of one batch norm, that many of whose steps are done."""

    def made(w: World) -> Any:
        from pybnorm.graph import BatchnormInferenceAttributes, Graph

        g = Graph().set_io_data_type("f32").set_intermediate_data_type("f32").set_compute_data_type("f32")
        x = g.tensor(name="x", dim=DIMS, stride=(12, 4, 2, 1), uid=1)
        names = ("mean", "inv_variance", "scale", "bias")
        rest = [g.tensor(name=n, dim=(1, 3, 1, 1), stride=(3, 1, 1, 1), uid=2 + i) for i, n in enumerate(names)]
        y = g.batchnorm_inference(x, *rest, BatchnormInferenceAttributes())
        y.set_output(True).set_uid(6)
        steps = (g.validate, lambda: g.build_operation_graph(w.handle), g.create_execution_plans, g.check_support)
        for step in (*steps, g.build_plans)[:stage]:
            step()
        return g

    return made


def tensor(dims: T | None = None) -> Callable[[World], Any]:
    def made(w: World) -> Any:
        from pybnorm.graph import TensorAttributes

        made = TensorAttributes()
        if dims is None:
            return made.set_value(0.5)
        steps = tuple(int(np.prod(dims[i + 1 :])) for i in range(len(dims)))
        return made.set_dim(dims).set_stride(steps).set_data_type("f32")

    return made


def attributes(name: str) -> Callable[[World], Any]:
    def made(w: World) -> Any:
        from pybnorm import graph as module

        made = getattr(module, name)()
        if name == "PointwiseAttributes":
            return made.set_mode("RELU_FWD")
        if name == "BatchnormAttributes":
            return made.set_epsilon(1e-5)
        if name == "BatchnormBackwardAttributes":
            return made.set_saved_mean_and_inv_variance(tensor((1, 3, 1, 1))(w), tensor((1, 3, 1, 1))(w))
        return made

    return made


def layer(stage: int) -> Callable[[World], Any]:
    def made(w: World) -> Any:
        from pybnorm.layer import BatchNorm

        made = BatchNorm(w.handle, "spatial")
        if stage:
            made.stage(w.data)
        if stage > 1:
            made.forward_training(w.data, vector(w), vector(w), data(w))
        return made

    return made


class Mirror:
    """A communicator of two ranks, of which the other one sends what this one does."""

    rank, size, devices = 0, 2, (1,)

    def vector(self, values: Any, device_type: int, stream: int) -> Any:
        return values.copy()

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        received.reshape(2, -1)[:] = send.reshape(-1)

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        received[...] = 2 * send

    def read(self, vector: Any, out: Any, stream: int) -> None:
        out[...] = vector


def synchronized(w: World) -> Any:
    from pybnorm.sync import SyncBatchNorm

    return SyncBatchNorm(w.handle, Mirror(), CHANNELS)


def trained(w: World) -> Any:
    made = synchronized(w)
    made.forward(w.data, vector(w), vector(w), data(w), saved_mean=vector(w), saved_inv_variance=vector(w))
    return made


def named(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


COMMON: dict[str, Callable[[World], Any]] = {
    "handle": lambda w: w.handle,
    "backend": is_("onednn"),
    "mode": is_("spatial"),
    "dtype": is_("f32"),
    "dims": is_(DIMS),
    "strides": is_((12, 4, 2, 1)),
    "epsilon": is_(1e-5),
    "workspace": lambda w: w.space,
    **named("x y dy dx input output grad_out grad_input", data),
    **named("input_gradient output_gradient", data),
    **named("x_desc y_desc dy_desc dx_desc", lambda w: w.x_desc),
    **named("scale bias running_mean running_variance saved_mean saved_inv_variance", vector),
    **named("mean variance inv_variance dscale dbias sum_dy sum_dy_xmu", vector),
    **named("alpha alpha_param a", is_(1.0)),
    **named("beta beta_param b value", is_(0.0)),
    "axis": is_(1),
    "count": is_(8),
    "name": is_("x"),
}
DESCRIBED = {
    **named("x y dy dx", at(data)),
    **named("scale bias running_mean running_variance saved_mean saved_inv_variance", at(vector)),
    **named("dscale dbias", at(vector)),
    "param_desc": lambda w: w.param_desc,
    "exponential_average_factor": is_(0.1),
    "workspace": at(lambda w: w.space),
    "workspace_size": is_(1 << 16),
}
LEFT = object()
"""An argument that is left away in the good call."""
MIOPEN = {
    **named("x y dy dx", data),
    **named("bn_scale bn_bias result_running_mean result_running_variance result_save_mean", vector),
    **named("result_save_inv_variance estimated_mean estimated_variance estimated_inv_variance", vector),
    **named("result_bn_scale_diff result_bn_bias_diff saved_mean saved_inv_variance", vector),
    **named("bn_scale_bias_mean_var_desc bn_scale_bias_diff_desc scale_desc", lambda w: w.param_desc),
    **named("bias_desc saved_mean_desc saved_var_desc est_mean_desc", lambda w: w.param_desc),
    **named("est_variance_desc est_inv_variance_desc", lambda w: w.param_desc),
    **dict.fromkeys(
        (f"{when}_result_running_{what}" for when in ("prev", "next") for what in ("mean", "variance")), vector
    ),
    "bn_mode": is_("spatial"),
    **named("alpha_data_diff alpha_param_diff", is_(1.0)),
    **named("beta_data_diff beta_param_diff", is_(0.0)),
    "exp_avg_factor": is_(0.1),
    "activ_desc": is_(None),
    "n": is_(3),
}
_PLANNED = (*(name for name in COMMON if name != "workspace"), "z", "dz", "reserve")
ADDRESSES = {
    "pybnorm.graph.Graph.execute_plan_at_index": ("variant_pack", "workspace"),
    "pybnorm.hipdnn.Graph": ("variant_pack", "workspace"),
    "pybnorm.hipdnn": ("stream",),
    **{f"pybnorm._core.{name}": tuple(DESCRIBED) for name in ("axpby", "fill", "relu", "relu_backward")},
    **{
        f"pybnorm._core.batch_normalization_{name}": tuple(DESCRIBED)
        for name in ("forward_training", "forward_inference", "backward")
    },
    "pybnorm._core.Handle.from_pointer": ("pointer",),
    "pybnorm._core.TensorDescriptor.from_pointer": ("pointer",),
    "pybnorm._core.Handle": ("stream",),
    "pybnorm._core.Handle.set_stream": ("stream",),
    "pybnorm._core.CallList.run": ("addresses",),
    **{f"pybnorm._core.{name}.__call__": _PLANNED for name in ("ForwardTrainingPlan", "ForwardInferencePlan")},
    "pybnorm._core.BackwardPlan.__call__": _PLANNED,
    "pybnorm.cann": ("stream", "workspace"),
    "pybnorm.miopen": tuple(k for k in MIOPEN if "desc" not in k),
}
"""Arguments that are addresses, of a callable or of all of a module."""


def rows(w: World) -> Any:
    return np.full((2, CHANNELS), 1.5, np.float32)


STATISTICS = {
    **{"means": rows, "m2s": rows, "variances": LEFT, "counts": is_((4, 4)), "exponential_average_factor": is_(0.1)},
}
CANN = {
    **named("mean invstd weight bias running_mean running_var mean_all", vector),
    **named("grad_weight grad_bias invstd_all", vector),
    **named("input_g weight_g bias_g", is_(True)),
    "counter": lambda w: np.full(2, 4, np.int32),
    "counts": lambda w: np.full(2, 4, np.float32),
    "eps": is_(1e-5),
    "momentum": is_(0.1),
    "workspace_size": is_(1 << 16),
    "stream": LEFT,
}
GATHERED = {"mean": rows, "invstd": rows}


def wide(w: World) -> Any:
    return np.full((1, CHANNELS, 1, 1), 1.5, np.float32)


GRAPH = {
    **named("x dy loss input in_0 a b tensor", tensor(DIMS)),
    **dict.fromkeys(("scale", "bias", "mean", "inv_variance", "variance"), tensor((1, 3, 1, 1))),
    **{"epsilon": tensor(), "momentum": tensor(), "dim": is_(DIMS), "stride": is_((12, 4, 2, 1)), "uid": is_(7)},
    **{
        "data_type": is_("f32"),
        "is_virtual": is_(False),
        "is_pass_by_value": is_(False),
        "communicator": lambda w: Mirror(),
        "unbiased": is_(False),
        "output": is_(True),
        "value": tensor(DIMS),  # of a setter
        "name": is_("n"),
        "in_0": tensor(DIMS),
    },
    **{"peer_stats": is_([]), "mode": is_("RELU_FWD"), "modes": is_(["FALLBACK"]), "dims": is_(DIMS)},
    "attributes": LEFT,
    **{"index": is_(0), "text": lambda w: graph(0)(w).to_json(), "variant_pack": lambda w: pack(w)},
}


def hipdnn_graph(stage: int = 9) -> Callable[[World], Any]:
    def made(w: World) -> Any:
        from pybnorm import hipdnn

        g = hipdnn.Graph()
        g.from_json(graph(0)(w).to_json())
        steps = (g.validate, lambda: g.build_operation_graph(w.handle), g.create_execution_plans, g.check_support)
        for step in (*steps, g.build_plans)[:stage]:
            step()
        return g

    return made


def hipdnn_object(name: str, *arguments: Any, **options: Any) -> Callable[[World], Any]:
    return lambda w: getattr(__import__("pybnorm.hipdnn").hipdnn, name)(*arguments, **options)


hipdnn_handle = hipdnn_object("Handle", backend="onednn")


def pack(w: World) -> Any:
    return {1: w.data, **{uid: vector(w) for uid in (2, 3, 4, 5)}, 6: data(w)}


GOOD: dict[str, dict[str, Any]] = {
    "pybnorm.torch": {
        **{"input": torch_tensor(DIMS), "momentum": is_(0.1), "eps": is_(1e-5), "model": model},
        **dict.fromkeys(("running_mean", "running_var", "weight", "bias"), torch_tensor((CHANNELS,))),
    },
    "pybnorm._core": {
        **{"name": is_("dnnl_version"), "path": LEFT, "layout": is_(0), "rank": is_(4), "operation": is_("backward")},
        **{"array": data, "stream": LEFT, "activation": LEFT, "algorithm": LEFT},
    },
    **{f"pybnorm._core.{name}": DESCRIBED for name in ("axpby", "fill", "relu", "relu_backward")},
    "pybnorm._core.batch_normalization_forward_training": DESCRIBED,
    "pybnorm._core.batch_normalization_forward_inference": DESCRIBED,
    "pybnorm._core.batch_normalization_backward": {
        **{**DESCRIBED, "bias": LEFT},
    },
    "pybnorm._core.describe": {"argument": is_("x")},
    "pybnorm._core.Handle.set_stream": {"stream": is_(0)},
    "pybnorm._core.Handle.backward": {"bias": LEFT, "y": LEFT},
    "pybnorm._core.Handle.buffer": {"argument": is_("x"), "output": is_(False)},
    "pybnorm._core.Handle.descriptor": {"argument": is_("x")},
    "pybnorm._core.Handle.query_runtime_error": {"mode": LEFT},
    "pybnorm._core.Handle.plan_forward_training": {"y": LEFT},
    "pybnorm._core.Handle.plan_forward_inference": {"y": LEFT},
    "pybnorm._core.Handle.plan_backward": {"dy": LEFT, "dx": LEFT},
    "pybnorm._core.Handle.from_pointer": {"pointer": lambda w: w.handle.pointer},
    "pybnorm._core.TensorDescriptor.from_pointer": {"pointer": lambda w: w.x_desc.pointer},
    "pybnorm._core.BackwardPlan.__call__": {"bias": LEFT, "y": LEFT},
    "pybnorm._core.CallList.append": {
        **{"operation": is_(pybnorm.Operation.FILL), "arrays": lambda w: {"y": slotted(w)}, "workspace": is_((0, 0))},
        "value": is_(0.0),
    },
    "pybnorm._core.CallList.reach": {
        **{"address": is_(1 << _core.SLOT_BITS), "nbytes": is_(16), "element": is_(4), "written": is_(True)},
    },
    "pybnorm._core.CallList.apart": {"addresses": is_((0, 64)), "workspace": is_(0)},
    "pybnorm._core.CallList.run": {"addresses": lambda w: (0, w.data.ctypes.data)},
    "pybnorm.functional": {
        **{"out": LEFT, "algorithm": LEFT, "exponential_average_factor": is_(0.1)},
    },
    "pybnorm.operations": {
        **{"source": data, "target": data, "out": data, **STATISTICS, "rank": is_(4)},
        **{"operation": is_("relu"), "arguments": lambda w: (w.data, data(w)), "options": is_({})},
    },
    "pybnorm.operations.multiply": {"a": data, "b": data},
    "pybnorm.cann": CANN,
    "pybnorm.cann.gather_stats_with_counts": GATHERED,
    "pybnorm.cann.batch_norm_gather_stats_with_counts_get_workspace_size": GATHERED,
    **{
        f"pybnorm.cann.batch_norm_{name}": {"executor": executor(f"batch_norm_{name}")}
        for name in ("stats", "gather_stats_with_counts", "elemt", "reduce_backward", "elemt_backward")
    },
    "pybnorm.cann.Executor": {
        **{"function": is_("batch_norm_stats"), "call": lambda w: executor("batch_norm_stats")(w)._call},
    },
    "pybnorm.miopen": MIOPEN,
    "pybnorm.miopen.ActivationDescriptor": {"mode": is_(0)},
    "pybnorm.cupy": {
        **named("gamma beta running_mean running_var var", vector),
        **named("mean inv_std", vector),
        **{"x": data, "gy": data, "eps": is_(1e-5), "decay": is_(0.9), "is_for_conv2d": is_(True)},
        **{"cudnn_mode": is_(1), "debug": is_(False), "d_layout": is_(0), "reserve_space": LEFT},
    },
    "pybnorm.directml": {
        **named("mean variance scale bias output_scale_gradient output_bias_gradient", wide),
        **{"fused_add": data, "output_mean": wide, "output_variance": wide, "kind": is_("relu"), "spatial": is_(True)},
        **{"operator": is_("batch_normalization"), "options": is_({})},
        "arguments": lambda w: (w.data, wide(w), wide(w), wide(w), wide(w), data(w)),
    },
    "pybnorm.reference": {
        **{"out": LEFT, "prior": LEFT, "priors": LEFT, "data_type": is_("f32"), "unbiased": LEFT},
        **{"values": lambda w: w.data.astype(np.float64), "dtype": is_(np.float32)},
        **{"arrays": lambda w: [w.data], "parameters": lambda w: [vector(w)]},
        "function": is_(lambda x, *_: x),
        **STATISTICS,
        **named("prior_dx prior_dscale prior_dbias", LEFT),
    },
    "pybnorm.known_defects": {"call": problem, "version": is_((3, 2, 0))},
    "pybnorm.defects": {
        **{"output": is_("y"), "identity": is_("onednn-long-sums")},
        **{"version": is_((3, 2, 0)), "build": is_("")},
    },
    "pybnorm.graph": GRAPH,
    **{
        f"pybnorm.{module}.{name}": {"value": is_(0.5)}
        for module in ("graph", "hipdnn")
        for name in (
            "Tensor",
            *(f"PointwiseAttributes.set_relu_{clip}" for clip in ("lower_clip", "upper_clip", "lower_clip_slope")),
        )
    },
    "pybnorm.graph.Graph.execute_plan_at_index": {"workspace": lambda w: np.zeros(1 << 16, np.uint8)},
    "pybnorm.devices.cpu.Device.refill": {
        "buffer": lambda w: pybnorm.devices.device_for(1).from_numpy(np.zeros(4, np.float32)),
        "data": is_(np.zeros(16, np.uint8)),
    },
    "pybnorm.hipdnn": {
        **GRAPH,
        **{"code": LEFT, "err_msg": is_("x"), "stream": is_(0), "backend": is_("onednn"), "size_bytes": is_(8)},
        **{"policy": LEFT, "engine_id": is_(0), "handle": lambda w: w.handle, "data": is_(b"12345678")},
        **{"json_string": lambda w: graph(0)(w).to_json(), "plan_index": is_(0), "engineId": is_(0)},
        **{"knob_settings": is_([]), "dtype": is_("float32")},
    },
    "pybnorm.hipdnn.Graph.from_binary": {"data": lambda w: hipdnn_graph(0)(w).to_binary()},
    **{
        f"pybnorm.hipdnn.{name}": {"handle": hipdnn_handle}
        for name in ("destroy_handle", "get_loaded_engine_plugin_paths", "get_stream", "set_stream")
    },
    "pybnorm.hipdnn.Graph.from_compiled_plan_binary": {"data": lambda w: hipdnn_graph()(w).to_binary()},
    "pybnorm.hipdnn.Graph.execute": {"workspace": LEFT},
    "pybnorm.hipdnn.Graph.execute_plan_at_index": {"workspace": lambda w: np.zeros(1 << 16, np.uint8)},
    "pybnorm.hipdnn.Graph.pointwise": {"rest": lambda w: (attributes("PointwiseAttributes")(w),)},
    **{
        f"pybnorm.{module}.Graph.{call}": {"attributes": attributes(name)}
        for module in ("graph", "hipdnn")
        for call, name in {
            "batchnorm": "BatchnormAttributes",
            "batchnorm_inference": "BatchnormInferenceAttributes",
            "batchnorm_inference_variance_ext": "BatchnormInferenceAttributesVarianceExt",
            "batchnorm_backward": "BatchnormBackwardAttributes",
        }.items()
    },
    "pybnorm.graph.Graph.pointwise": {"rest": lambda w: (attributes("PointwiseAttributes")(w),)},
    "pybnorm.graph.Graph.execute": {"variant_pack": pack},
    "pybnorm.layer.Info.from_gocudnn_json": {"text": lambda w: layer(2)(w).info().to_gocudnn_json()},
    "pybnorm.layer": {
        **{
            "exponential_average_factor": is_(0.1),
            "initial_running_variance": is_(1.0),
            "device": LEFT,
            "options": is_({}),
            "operation": is_("backward"),
        },
        **{"info": lambda w: layer(2)(w).info(), "text": lambda w: layer(2)(w).info().to_json()},
        **{"data_type": is_("f32"), "nan_policy": is_("propagate")},
    },
    "pybnorm.layer.Info": {
        **named("running_mean running_variance saved_mean saved_inv_variance", wide),
        **{"dims": is_((1, CHANNELS, 1, 1)), "strides": is_((CHANNELS, 1, 1, 1)), "format": is_(0)},
    },
    "pybnorm.sync": {
        **{"communicator": lambda w: Mirror(), "channels": is_(CHANNELS), "deterministic": is_(False)},
        **{"counts": is_((8, 8)), "exponential_average_factor": is_(0.1), "call": is_("forward"), "options": is_({})},
        "arguments": lambda w: (w.data, vector(w), vector(w), data(w)),
    },
    "pybnorm.devices": {"device_type": is_(1), "device_id": is_(0)},
    "pybnorm.devices.cpu": {
        **{
            "array": data,
            "buffer": lambda w: pybnorm.devices.device_for(1).from_numpy(w.data),
            "nbytes": is_(64),
            "dtype": LEFT,
        },
        **{"call": is_(lambda *_: None), "repeats": is_(2), "function": is_(lambda: None)},
    },
    "pybnorm.check": {
        **{
            "line": is_("train,spatial,f32,nchw,2x3x2x2"),
            "text": is_("train,spatial,f32,nchw,2x3x2x2"),
            "name": is_("suite"),
        },
        **{
            "problem": problem,
            "operation": is_(pybnorm.Operation.FORWARD_TRAINING),
            "dtype": is_("f32"),
            "strides": LEFT,
            "scale": LEFT,
            "saved": is_(True),
        },
        **{"name_or_path": is_("smoke"), "cases": is_(["train,spatial,f32,nchw,2x3x2x2"]), "suites": is_([])},
        **{"m": is_(8), "fill": is_("exact"), "case": is_("train,spatial,f32,nchw,2x3x2x2")},
    },
    "pybnorm.check.run_case": {"session": lambda w: w.session()},
    "pybnorm.check.judge": {"outputs": made_outputs},
    "pybnorm.check.run.archive": {"path": is_("nothing-here")},
    "pybnorm.check.compare.comparison": {"runs": is_([]), "path": is_("nothing-here"), "paths": is_(["nothing-here"])},
    "pybnorm.defects.Defect.largest": {"output": is_("y")},
    "pybnorm.defects.Defect.on_card": {"device": is_("a card")},
    "pybnorm.check.judging.bounds": {
        "inputs": lambda w: inputs(w),
        "expected": expected,
        "output": is_("y"),
        "got": data,
    },
}
"""Good arguments that differ from `COMMON`, of a module and the modules below it or of a callable."""


def fresh_handle(w: World) -> Any:
    return pybnorm.Handle("onednn")


STAGES = {
    **{"build_operation_graph": 1, "create_execution_plans": 2, "check_support": 3, "build_plans": 4},
    **{"get_workspace_size": 9, "execute": 9, "get_execution_plan_count": 9, "to_compiled_plan_binary": 9},
    **{"get_plan_name": 3, "get_plan_name_at_index": 3, "build_plan_at_index": 3, "execute_plan_at_index": 9},
    **{"get_workspace_size_plan_at_index": 9, "get_ranked_engine_ids": 2, "get_execution_plan_engine_id": 3},
    **{"create_execution_plan_ext": 2, "get_autotune_workspace_size": 9},
}
"""How many steps of a graph's life are done when a method is called; some are of one module alone."""
SELVES: dict[str, Callable[[World], Any]] = {
    "pybnorm._core.Handle": lambda w: w.handle,
    "pybnorm._core.TensorDescriptor": lambda w: w.x_desc,
    "pybnorm._core.CallList": call_list,
    "pybnorm._core.ForwardTrainingPlan": plan("plan_forward_training"),
    "pybnorm._core.ForwardInferencePlan": plan("plan_forward_inference"),
    "pybnorm._core.BackwardPlan": plan("plan_backward"),
    "pybnorm._core.Handle.close": fresh_handle,
    "pybnorm._core.TensorDescriptor.close": lambda w: pybnorm.TensorDescriptor("onednn", "f32", DIMS),
    **{
        f"pybnorm.graph.{name}": attributes(name)
        for name in (
            *("BatchnormAttributes", "BatchnormInferenceAttributes", "BatchnormInferenceAttributesVarianceExt"),
            *("BatchnormBackwardAttributes", "PointwiseAttributes"),
        )
    },
    "pybnorm.defects.Defect": is_(pybnorm.defects.DEFECTS[0]),
    "pybnorm.graph.TensorAttributes": tensor(DIMS),
    "pybnorm.graph.Tensor": tensor(DIMS),
    "pybnorm.graph.Graph": graph(0),
    **{f"pybnorm.graph.Graph.{name}": graph(stage) for name, stage in STAGES.items()},
    "pybnorm.hipdnn.Graph": hipdnn_graph(0),
    **{f"pybnorm.hipdnn.Graph.{name}": hipdnn_graph(stage) for name, stage in STAGES.items()},
    "pybnorm.hipdnn.PointwiseAttributes": hipdnn_object("PointwiseAttributes"),
    "pybnorm.hipdnn.Tensor": hipdnn_object("Tensor", 0.5),
    "pybnorm.hipdnn.TensorAttributes": hipdnn_object("Tensor", 0.5),
    "pybnorm.hipdnn.Handle": hipdnn_handle,
    "pybnorm.hipdnn.Error": hipdnn_object("Error"),
    "pybnorm.hipdnn.DeviceBuffer": hipdnn_object("DeviceBuffer", 8, backend="onednn"),
    "pybnorm.graph.Graph.build": graph(0),
    "pybnorm.layer.BatchNorm": layer(2),
    "pybnorm.layer.BatchNorm.stage": layer(0),
    "pybnorm.layer.Info": lambda w: layer(2)(w).info(),
    "pybnorm.sync.SyncBatchNorm": trained,
    "pybnorm.devices.cpu.Device": lambda w: pybnorm.devices.device_for(1),
}
"""Objects that methods are called on, of a class or of a method."""


# ---------------------------------------------------------------- what there is to call


class Target:
    """One callable."""

    def __init__(self, module: str, name: str, function: Callable[..., Any], owner: type | None, method: bool) -> None:
        self.module, self.name, self.function, self.owner, self.method = module, name, function, owner, method
        self.starred: str | None = None
        known: dict[str, Any] = dict(COMMON)
        path = name.split(".")
        scopes = [".".join(path[:length]) for length in range(1, len(path) + 1)]
        for scope in scopes:
            known |= GOOD.get(scope, {})
        self.addresses = {a for scope in scopes for a in ADDRESSES.get(scope, ())}
        self.makers: dict[str, Callable[[World], Any]] = {}
        self.parameters: list[str] = []
        self.positional: list[str] = []
        missing = []
        for parameter in _parameters(function, owner, method):
            parameter_name = parameter.name
            if parameter.kind == parameter.VAR_KEYWORD:
                if parameter_name != "values":
                    continue
                parameter_name = "value"  # of CallList.append, which takes the scalars of each operation
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                self.positional.append(parameter_name)
                self.starred = parameter_name if parameter.kind == parameter.VAR_POSITIONAL else self.starred
            self.parameters.append(parameter_name)
            maker = known.get(parameter_name, LEFT)
            if maker is not LEFT:
                self.makers[parameter_name] = maker
            elif parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL:
                missing.append(parameter_name)
        if missing:
            raise LookupError(f"{name}: no good value is known for {', '.join(missing)} (tests/fuzz/hostile_calls.py)")
        self.own: Callable[[World], Any] | None = None
        if method:
            self.own = next((SELVES[scope] for scope in reversed(scopes) if scope in SELVES), None)
            if self.own is None:
                raise LookupError(f"{name}: no object is known to call it on (tests/fuzz/hostile_calls.py)")
            if owner is not None and module == "pybnorm._core":
                self.parameters.insert(0, "self")  # a Python class is as its constructor leaves it

    def replaced(self, parameter: str, good: Any, value: Any) -> Any:
        """What is given as `parameter`: of several positional ones the first is hostile."""
        return [value, *good[1:]] if parameter == self.starred else value

    def good(self, w: World) -> dict[str, Any]:
        """Good arguments, made anew."""
        made = {name: maker(w) for name, maker in self.makers.items()}
        if self.own is not None:
            made["self"] = self.own(w)
        return made

    def unmade(self, w: World) -> Any:
        """An object of the class whose constructor did not run."""
        assert self.owner is not None
        if self.owner is _core.CallList:  # whose constructor is its __cinit__, which always runs
            return _core.CallList(fresh_handle(w))
        return self.owner.__new__(self.owner)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call it with these."""
        arguments = {n: a.pointer if type(a) is Address else a for n, a in arguments.items()}
        first = [arguments.pop("self")] if self.method else []
        for name in self.parameters:
            if name not in arguments or name == "self" or not (name in self.positional or self.starred in arguments):
                continue
            value = arguments.pop(name)
            first += value if name == self.starred else [value]
        return self.function(*first, **arguments)


def _parameters(function: Callable[..., Any], owner: type | None, method: bool) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:  # Cython's constructors and __call__: from the stub
        assert owner is not None
        return _stub(owner.__name__, "__init__" if function is owner else "__call__")
    return found[1:] if method else found


def _stub(owner: str, method: str) -> list[inspect.Parameter]:
    tree = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text("utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    given = next((node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == method), None)
    if given is None:
        return []
    kind = inspect.Parameter
    needed = len(given.args) - len(given.defaults)
    made = [
        kind(a.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if index < needed else None)
        for index, a in enumerate(given.args)
    ]
    return made[1:] + [
        kind(a.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]


def modules() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Public modules, and the names of each."""
    yield "pybnorm._core", tuple(name for name in _core.__all__ if name != "Cache")  # a dictionary of modules here
    yield "pybnorm", tuple(pybnorm.__all__)
    for info in pkgutil.walk_packages(pybnorm.__path__, "pybnorm."):
        path = info.name.split(".")
        if any(part.startswith("_") and part != "__main__" for part in path):
            continue
        if any(".".join(path[:length]) in LEFT_OUT for length in range(1, len(path) + 1)):
            continue
        if path[1] == "torch" and not _has("torch"):
            continue
        module = importlib.import_module(info.name)
        if path[2:] and path[1:] != ["check", "problem"] and path[1] != "devices":
            names = PUBLIC.get(info.name, ())  # a part of a package: what is public is in the package's own list
        else:
            names = module.__all__
        yield info.name, tuple(names)


def _has(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def targets() -> dict[str, Target]:
    """Every public callable by its name; each under the first module that has it."""
    made: dict[str, Target] = {}
    seen: set[int] = set()
    for module, names in modules():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            if (
                not (inspect.isroutine(thing) or inspect.isclass(thing))
                or id(thing) in seen
                or f"{module}.{name}" in NOT_CALLED
            ):
                continue
            seen.add(id(thing))
            for target in _targets(module, name, thing):
                made[target.name] = target
    return made


def _targets(module: str, name: str, thing: Any) -> Iterator[Target]:
    path = f"{module}.{name}"
    if not inspect.isclass(thing):
        yield Target(module, path, thing, None, False)
        return
    if issubclass(thing, BaseException) or getattr(thing, "_is_protocol", False):
        return  # made by us; or a description of objects of others
    if not (issubclass(thing, tuple | enum.Enum | _core.Plan) or _is_record(thing)):
        yield Target(module, path, thing, thing, False)
    own = {name: raw for base in reversed(thing.__mro__) if _is_ours(base) for name, raw in vars(base).items()}
    for attribute, raw in own.items():
        if (attribute.startswith("_") and attribute != "__call__") or module in PUBLIC:
            continue
        function = getattr(thing, attribute)
        if callable(function) and not inspect.isclass(function) and not isinstance(function, thing):
            yield Target(
                module, f"{path}.{attribute}", function, thing, not isinstance(raw, staticmethod | classmethod)
            )


def _is_ours(thing: type) -> bool:
    return thing.__module__.partition(".")[0] == "pybnorm"


def _is_record(thing: type) -> bool:
    """Whether its constructor takes what it is given, as generated by Python."""
    return dataclasses.is_dataclass(thing) and not hasattr(thing, "__post_init__")


TARGETS: dict[str, Target] = {}
TARGETS.update(targets())
