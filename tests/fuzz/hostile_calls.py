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
import re
import tempfile
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
DIMS, CHANNELS = (2, 3, 2, 2), 3
LINE = "train,spatial,f32,nchw,2x3x2x2"
LEFT = object()
"""An argument that is left away in the good call."""

# A scope, which is a module, a class or a callable, as a regular expression without the leading "pybnorm."; below it
# names of arguments and the good value, evaluated anew for each call with the names of `World`. An inner scope goes
# before an outer one, a later line before an earlier one. "@" in place of "=": the argument is an address in that
# scope. `self` is what a method is called on.
GOOD = """
pybnorm
    handle = handle
    backend = 'onednn'
    mode bn_mode = 'spatial'
    dtype data_type = 'f32'
    dims dim = DIMS
    stride = (12, 4, 2, 1)
    epsilon eps = 1e-5
    momentum exponential_average_factor exp_avg_factor = 0.1
    workspace = space
    workspace_size = 1 << 16
    x y dy dx gy got array source target grad_out grad_input input_gradient output_gradient = data()
    input output fused_add = data()
    x_desc y_desc dy_desc dx_desc = x_desc
    param_desc bn_scale_bias_mean_var_desc bn_scale_bias_diff_desc scale_desc bias_desc = param_desc
    saved_mean_desc saved_var_desc est_mean_desc est_variance_desc est_inv_variance_desc = param_desc
    scale bias running_mean running_variance running_var saved_mean saved_inv_variance weight gamma = vector()
    mean variance inv_variance dscale dbias sum_dy sum_dy_xmu var inv_std invstd mean_all invstd_all = vector()
    grad_weight grad_bias = vector()
    means m2s = rows()
    counts = (4, 4)
    alpha alpha_param a alpha_data_diff alpha_param_diff = 1.0
    beta beta_param b value beta_data_diff beta_param_diff = 0.0
    axis = 1
    rank = 4
    count = 8
    argument = 'x'
    operation = 'backward'
    options = {}
    version = (3, 2, 0)
    path = 'nothing-here'
    line text = LINE
    problem call = problem()
    communicator = Mirror()
torch
    input = torch_tensor(DIMS)
    running_mean running_var weight bias = torch_tensor((CHANNELS,))
    model = model()
_core
    name = 'dnnl_version'
    layout = 0
    path output = LEFT
_core.(axpby|fill|relu|relu_backward|batch_normalization_.*)
    x y dy dx @ at(data())
    scale bias running_mean running_variance saved_mean saved_inv_variance dscale dbias @ at(vector())
    workspace @ at(space)
    workspace_size @ 1 << 16
_core.(batch_normalization_backward|Handle.backward)
    bias = LEFT
_core.Handle.(backward|plan_forward_.*)
    y = LEFT
_core.Handle
    self = handle
    stream @ LEFT
_core.Handle.close
    self = pybnorm.Handle('onednn')
_core.Handle.set_stream
    stream @ 0
_core.Handle.query_runtime_error
    mode = LEFT
_core.Handle.plan_backward
    dy dx = LEFT
_core.Handle.from_pointer
    pointer @ handle.pointer
_core.TensorDescriptor
    self = x_desc
    strides = (12, 4, 2, 1)
_core.TensorDescriptor.close
    self = pybnorm.TensorDescriptor('onednn', 'f32', DIMS)
_core.TensorDescriptor.from_pointer
    pointer @ x_desc.pointer
_core.(Forward.*|Backward)Plan
    self = plan(path[2])
_core.(Forward.*|Backward)Plan.__call__
    x y dy dx @ data()
    scale bias running_mean running_variance saved_mean saved_inv_variance dscale dbias @ vector()
    z dz reserve @ LEFT
_core.BackwardPlan.__call__
    bias y running_mean running_variance = LEFT
_core.CallList
    self = call_list()
_core.CallList.append
    operation = pybnorm.Operation.FILL
    arrays = {'y': slotted()}
    workspace = (0, 0)
_core.CallList.reach
    address = 1 << _core.SLOT_BITS
    nbytes = 16
    element = 4
    written = True
_core.CallList.apart
    addresses = (0, 64)
    workspace = 0
_core.CallList.run
    addresses @ (0, memory.ctypes.data)
functional
    out = LEFT
operations
    out = data()
    operation = 'relu'
    arguments = (data(), data())
operations.multiply
    a b = data()
cann
    input_g weight_g bias_g = True
    counter = np.full(2, 4, np.int32)
    counts = np.full(2, 4, np.float32)
    workspace @ space
    stream @ LEFT
cann.(batch_norm_)?gather_stats_with_counts(_get_workspace_size)?
    mean invstd = rows()
cann.batch_norm_(stats|gather_stats_with_counts|elemt|reduce_backward|elemt_backward)
    executor = executor(path[2])
cann.Executor
    function = 'batch_norm_stats'
    call = executor('batch_norm_stats')._call
miopen
    x y dy dx @ data()
    bn_scale bn_bias result_running_mean result_running_variance result_save_mean @ vector()
    result_save_inv_variance estimated_mean estimated_variance estimated_inv_variance @ vector()
    result_bn_scale_diff result_bn_bias_diff saved_mean saved_inv_variance @ vector()
    prev_result_running_mean next_result_running_mean @ vector()
    prev_result_running_variance next_result_running_variance @ vector()
    activ_desc = None
    n = 3
cupy
    beta = vector()
    decay = 0.9
    is_for_conv2d = True
    cudnn_mode = 1
    debug = False
directml
    mean variance scale bias output_scale_gradient output_bias_gradient output_mean output_variance = wide()
    operator = 'batch_normalization'
    arguments = (data(), wide(), wide(), wide(), wide(), data())
reference
    out prior prior_dx prior_dscale prior_dbias = LEFT
    values = data().astype(np.float64)
    dtype = np.float32
    arrays = [data()]
    function = lambda x, *_: x
    parameters = [vector()]
defects
    output = 'y'
    identity = 'onednn-long-sums'
defects.Defect
    self = pybnorm.defects.DEFECTS[0]
    device = 'a card'
(graph|hipdnn)
    x dy loss input in_0 a b tensor value = tensor(DIMS)
    scale bias mean inv_variance variance = tensor((1, 3, 1, 1))
    epsilon momentum = tensor()
    uid = 7
    is_virtual is_pass_by_value unbiased = False
    output = True
    name = 'n'
    peer_stats = []
    mode = 'RELU_FWD'
    attributes = LEFT
    index = 0
    text json_string = graph(0).to_json()
    variant_pack = pack()
(graph|hipdnn).(Tensor|PointwiseAttributes.set_relu_(lower_clip|upper_clip|lower_clip_slope))
    value = 0.5
graph.Tensor(Attributes)?
    self = tensor(DIMS)
graph.(Batchnorm|Pointwise).*
    self = attributes(path[2])
graph.Graph
    self = graph(stage(path))
(graph|hipdnn).Graph.execute_plan_at_index
    variant_pack @ pack()
    workspace @ np.zeros(1 << 16, np.uint8)
(graph|hipdnn).Graph.(batchnorm.*|pointwise)
    attributes = attributes(ATTRIBUTES[path[3]])
    rest = (attributes('PointwiseAttributes'),)
hipdnn
    stream @ 0
    size_bytes = 8
    engine_id plan_index engineId = 0
    data = b'12345678'
    dtype = 'float32'
hipdnn.(destroy_handle|get_loaded_engine_plugin_paths|get_stream|set_stream)
    handle = pybnorm.hipdnn.Handle(backend='onednn')
hipdnn.(Handle|Error|DeviceBuffer|PointwiseAttributes|Tensor.*)
    self = hipdnn_object(path[2])
hipdnn.Graph
    self = hipdnn_graph(stage(path))
    variant_pack @ pack()
    workspace @ LEFT
hipdnn.Graph.from_binary
    data = hipdnn_graph(0).to_binary()
hipdnn.Graph.from_compiled_plan_binary
    data = hipdnn_graph(9).to_binary()
layer
    info = layer(2).info()
    text = layer(2).info().to_json()
    nan_policy = 'propagate'
layer.BatchNorm
    self = layer(2)
layer.BatchNorm.stage
    self = layer(0)
layer.Info
    self = layer(2).info()
    running_mean running_variance saved_mean saved_inv_variance = wide()
    dims = (1, CHANNELS, 1, 1)
    strides = (CHANNELS, 1, 1, 1)
    format = 0
layer.Info.from_gocudnn_json
    text = layer(2).info().to_gocudnn_json()
sync
    channels = CHANNELS
    counts = (8, 8)
    call = 'forward'
    arguments = (data(), vector(), vector(), data())
sync.SyncBatchNorm
    self = trained()
devices
    device_type = 1
devices.cpu.Device
    self = cpu
    buffer = cpu.from_numpy(data())
    nbytes = 64
    dtype = LEFT
    call = lambda *_: None
devices.cpu.Device.refill
    buffer = cpu.from_numpy(np.zeros(4, np.float32))
    data = np.zeros(16, np.uint8)
check
    operation = pybnorm.Operation.FORWARD_TRAINING
    scale = LEFT
check.run_case
    session = session()
check.judge
    outputs = made_outputs()
check.compare.comparison
    runs = []
    paths = ['nothing-here']
check.judging.bounds
    inputs = inputs()
    expected = expected()
    output = 'y'
"""
STAGES = {
    name: stage
    for stage, names in {
        1: "build_operation_graph",
        2: "create_execution_plans create_execution_plan_ext get_ranked_engine_ids",
        3: "check_support get_plan_name get_plan_name_at_index build_plan_at_index get_execution_plan_engine_id",
        4: "build_plans",
        9: "get_workspace_size execute get_execution_plan_count to_compiled_plan_binary execute_plan_at_index "
        "get_workspace_size_plan_at_index get_autotune_workspace_size",
    }.items()
    for name in names.split()
}
"""How many steps of a graph's life are done when a method is called; some are of one module alone."""
ATTRIBUTES = {
    "batchnorm": "BatchnormAttributes",
    "batchnorm_inference": "BatchnormInferenceAttributes",
    "batchnorm_inference_variance_ext": "BatchnormInferenceAttributesVarianceExt",
    "batchnorm_backward": "BatchnormBackwardAttributes",
    "pointwise": "PointwiseAttributes",
}


class Address(NamedTuple):
    """A good value that is an address; `owner` keeps the memory."""

    pointer: int
    owner: Any


class Mirror:
    """A communicator of two ranks, of which the other one sends what this one does."""

    rank, size, devices = 0, 2, (1,)

    def vector(self, values, device_type, stream):
        return values.copy()

    def all_gather(self, send, received, stream):
        received.reshape(2, -1)[:] = send.reshape(-1)

    def all_reduce(self, send, received, stream):
        received[...] = 2 * send

    def read(self, vector, out, stream):
        out[...] = vector


class World:
    """What good arguments are made of, once per process: the names of `GOOD`."""

    def __init__(self):
        self.handle = pybnorm.Handle("onednn")
        self.folder = Path(tempfile.mkdtemp(prefix="pybnorm-hostile-"))
        memory = np.zeros((1 << 16) + 64, np.uint8)
        self.space = memory[-memory.ctypes.data % 64 :][: 1 << 16]
        self.memory = np.random.default_rng(0).standard_normal(DIMS).astype(np.float32)
        self.x_desc = pybnorm.TensorDescriptor("onednn", "f32", DIMS)
        self.param_desc = pybnorm.TensorDescriptor("onednn", "f32", (1, CHANNELS, 1, 1))
        self.cpu = pybnorm.devices.device_for(1)
        self.opened = None
        self.names = globals() | {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}

    def session(self):
        from pybnorm.check.run.session import open_session

        self.opened = self.opened or open_session("onednn")
        return self.opened

    def data(self):
        return self.memory.copy()

    def vector(self, *before, after=()):
        return np.full((*before, CHANNELS, *after), 1.5, np.float32)

    def rows(self):
        return self.vector(2)

    def wide(self):
        return self.vector(1, after=(1, 1))

    def pack(self):
        return {1: self.memory, **{uid: self.vector() for uid in (2, 3, 4, 5)}, 6: self.data()}

    def at(self, array):
        return Address(array.ctypes.data, array)

    def torch_tensor(self, shape):
        return importlib.import_module("torch").full(shape, 1.5)

    def model(self):
        nn = importlib.import_module("torch").nn
        return nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU())

    def problem(self):
        return pybnorm.check.Problem.parse(f"{LINE},fill=randn")

    def inputs(self):
        from pybnorm.check.language import data

        return data.generate(self.problem())

    def expected(self):
        from pybnorm.check.judging import bounds

        return bounds.expect(self.problem(), self.inputs())

    def made_outputs(self):
        from pybnorm.check.language.calls import outputs

        arguments = pybnorm.check.arguments(self.problem())
        return {tensor.name: arguments[tensor.name] for tensor in outputs(self.problem())}

    def executor(self, name):
        """The first phase of a call of CANN's."""
        call = TARGETS[f"pybnorm.cann.{name}_get_workspace_size"]
        return call.function(**call.good(self))[1]

    def slotted(self):
        """Memory at the begin of slot 1."""
        return self.handle.buffer(self.memory, "y")._replace(pointer=1 << _core.SLOT_BITS, owner=None)

    def plan(self, name):
        operation = re.sub("(?=[A-Z])", "_", name.removesuffix("Plan")).lower()
        return getattr(self.handle, f"plan{operation}")(self.x_desc)

    def call_list(self):
        made = _core.CallList(self.handle)
        made.append(self.handle, pybnorm.Operation.FILL, {"y": self.slotted()}, (0, 0), value=0.0)
        return made

    def stage(self, path):
        return STAGES.get(path[-1], 0)

    def graph(self, stage):
        """A graph of one batch norm, that many of whose steps are done."""
        from pybnorm.graph import BatchnormInferenceAttributes, Graph

        g = Graph().set_io_data_type("f32").set_intermediate_data_type("f32").set_compute_data_type("f32")
        x = g.tensor(name="x", dim=DIMS, stride=(12, 4, 2, 1), uid=1)
        names = ("mean", "inv_variance", "scale", "bias")
        rest = [g.tensor(name=n, dim=(1, 3, 1, 1), stride=(3, 1, 1, 1), uid=2 + i) for i, n in enumerate(names)]
        g.batchnorm_inference(x, *rest, BatchnormInferenceAttributes()).set_output(True).set_uid(6)
        return self.stepped(g, stage)

    def hipdnn_graph(self, stage):
        g = pybnorm.hipdnn.Graph()
        g.from_json(self.graph(0).to_json())
        return self.stepped(g, stage)

    def hipdnn_object(self, name):
        kind = getattr(pybnorm.hipdnn, "Tensor" if name == "TensorAttributes" else name)
        options = {"backend": "onednn"} if name in ("Handle", "DeviceBuffer") else {}
        return kind(*{"Tensor": (0.5,), "TensorAttributes": (0.5,), "DeviceBuffer": (8,)}.get(name, ()), **options)

    def stepped(self, g, stage):
        steps = g.validate, lambda: g.build_operation_graph(self.handle), g.create_execution_plans, g.check_support
        for step in (*steps, g.build_plans)[:stage]:
            step()
        return g

    def tensor(self, dims=None):
        made = pybnorm.graph.TensorAttributes()
        if dims is None:
            return made.set_value(0.5)
        steps = tuple(int(np.prod(dims[i + 1 :])) for i in range(len(dims)))
        return made.set_dim(dims).set_stride(steps).set_data_type("f32")

    def attributes(self, name):
        made = getattr(pybnorm.graph, name)()
        if name == "PointwiseAttributes":
            return made.set_mode("RELU_FWD")
        if name == "BatchnormAttributes":
            return made.set_epsilon(1e-5)
        if name == "BatchnormBackwardAttributes":
            return made.set_saved_mean_and_inv_variance(*(self.tensor((1, 3, 1, 1)) for _ in range(2)))
        return made

    def layer(self, stage):
        made = pybnorm.layer.BatchNorm(self.handle, "spatial")
        if stage:
            made.stage(self.memory)
        if stage > 1:
            made.forward_training(self.memory, self.vector(), self.vector(), self.data())
        return made

    def trained(self):
        made = pybnorm.sync.SyncBatchNorm(self.handle, Mirror(), CHANNELS)
        saved = {"saved_mean": self.vector(), "saved_inv_variance": self.vector()}
        made.forward(self.memory, self.vector(), self.vector(), self.data(), **saved)
        return made


# ---------------------------------------------------------------- what there is to call


def sections():
    """`GOOD`, as a regular expression of a scope and its lines: names, whether they are addresses, the expression."""
    made = []
    for line in GOOD.strip().splitlines():
        if not line.startswith(" "):
            made.append((re.compile("" if line == "pybnorm" else line), []))
        else:
            names, sign, expression = re.fullmatch(r" +([\w ]+) ([=@]) (.+)", line).groups()
            code = LEFT if expression == "LEFT" else compile(expression, f"good {names}", "eval")
            made[-1][1].append((names.split(), sign == "@", code))
    return made


SECTIONS = sections()


class Target:
    """One callable."""

    def __init__(self, module, name, function, owner, method):
        self.module, self.name, self.function, self.owner, self.method = module, name, function, owner, method
        self.path = name.split(".")
        known, self.addresses = {}, set()
        for length in range(1, len(self.path) + 1):
            scope = ".".join(self.path[1:length])
            for names, address, code in (line for head, lines in SECTIONS if head.fullmatch(scope) for line in lines):
                known |= dict.fromkeys(names, code)
                self.addresses |= {*names} if address else set()
        self.makers, self.parameters, self.positional, self.starred = {}, [], [], None
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
            if (maker := known.get(parameter_name, LEFT)) is not LEFT:
                self.makers[parameter_name] = maker
            elif parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL:
                missing.append(parameter_name)
        if method:
            if "self" in known:
                self.makers["self"] = known["self"]
            else:
                missing.append("self")
            if owner is not None and module == "pybnorm._core":
                self.parameters.insert(0, "self")  # a Python class is as its constructor leaves it
        if missing:
            raise LookupError(f"{name}: no good value is known for {', '.join(missing)} (tests/fuzz/hostile_calls.py)")

    def replaced(self, parameter, good, value):
        """What is given as `parameter`: of several positional ones the first is hostile."""
        return [value, *good[1:]] if parameter == self.starred else value

    def good(self, w):
        """Good arguments, made anew."""
        return {name: eval(maker, w.names, {"path": self.path}) for name, maker in self.makers.items()}

    def unmade(self):
        """An object of the class whose constructor did not run."""
        if self.owner is _core.CallList:  # whose constructor is its __cinit__, which always runs
            return _core.CallList(pybnorm.Handle("onednn"))
        return self.owner.__new__(self.owner)

    def call(self, arguments):
        """Call it with these."""
        arguments = {n: a.pointer if type(a) is Address else a for n, a in arguments.items()}
        first = [arguments.pop("self")] if self.method else []
        for name in self.parameters:
            if name not in arguments or name == "self" or not (name in self.positional or self.starred in arguments):
                continue
            value = arguments.pop(name)
            first += value if name == self.starred else [value]
        return self.function(*first, **arguments)


def _parameters(function, owner, method):
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:  # Cython's constructors and __call__: from the stub
        return _stub(owner.__name__, "__init__" if function is owner else "__call__")
    return found[1:] if method else found


def _stub(owner, method):
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


def modules():
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


def _has(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def targets():
    """Every public callable by its name; each under the first module that has it."""
    made, seen = {}, set()
    for module, names in modules():
        for name in names:
            thing = getattr(importlib.import_module(module), name)
            called = (inspect.isroutine(thing) or inspect.isclass(thing)) and f"{module}.{name}" not in NOT_CALLED
            if called and id(thing) not in seen:
                seen.add(id(thing))
                made |= {target.name: target for target in _targets(module, name, thing)}
    return made


def _targets(module, name, thing):
    path = f"{module}.{name}"
    if not inspect.isclass(thing):
        yield Target(module, path, thing, None, False)
        return
    if issubclass(thing, BaseException) or getattr(thing, "_is_protocol", False):
        return  # made by us; or a description of objects of others
    # The constructor of a record takes what it is given, as generated by Python.
    record = dataclasses.is_dataclass(thing) and not hasattr(thing, "__post_init__")
    if not (issubclass(thing, tuple | enum.Enum | _core.Plan) or record):
        yield Target(module, path, thing, thing, False)
    ours = [base for base in reversed(thing.__mro__) if base.__module__.partition(".")[0] == "pybnorm"]
    for attribute, raw in {name: raw for base in ours for name, raw in vars(base).items()}.items():
        if (attribute.startswith("_") and attribute != "__call__") or module in PUBLIC:
            continue
        function = getattr(thing, attribute)
        if callable(function) and not inspect.isclass(function) and not isinstance(function, thing):
            method = not isinstance(raw, staticmethod | classmethod)
            yield Target(module, f"{path}.{attribute}", function, thing, method)


TARGETS = {}
TARGETS.update(targets())
