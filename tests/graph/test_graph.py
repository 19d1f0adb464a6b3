"""Graphs give what the reference gives, within bound; wrong graphs and wrong calls are refused by name."""

import dataclasses
import logging

import numpy as np
import pytest
from graph_bench import NUMPY, Bench, build, judge, judge_relu, new_graph, parts
from tables import table

import pybnorm
from pybnorm import ArgumentError, DataType, Layout, Mode, Operation, UnsupportedError, _arguments
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import expect
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.graph import (
    BatchnormAttributes,
    BatchnormBackwardAttributes,
    BatchnormInferenceAttributes,
    BatchnormInferenceAttributesVarianceExt,
    Graph,
    HeuristicMode,
    PointwiseAttributes,
    PointwiseMode,
    Tensor,
    TensorAttributes,
)
from pybnorm.operations import program

# Those of tests/backends/test_calls.py: MIOpen compiles kernels for each.
SHAPES = [(6, 5), (4, 3, 7), (4, 5, 6, 7), (2, 3, 2, 3, 4)]
LAYOUTS = [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST]
DIMS = (4, 5, 6, 8)
EPSILON, MOMENTUM = 1e-3, 0.2
TRAIN, INFER, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD
VECTORS = ("scale", "bias", "mean", "variance")

dtypes = pytest.mark.parametrize("dtype", NUMPY, ids=lambda d: d.short)
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name.lower())
shapes = pytest.mark.parametrize("dims", SHAPES, ids=str)


@pytest.fixture
def bench(right):
    return Bench(right)


def floats():
    return Graph().set_io_data_type("float").set_intermediate_data_type("float")


def outputs(*tensors):
    for tensor in tensors:
        tensor.set_output(True)
    return list(tensors)


class Parts:
    """A problem, its inputs, and a graph with an x and the parameters that were asked for."""

    def __init__(self, operation, *names, dtype=DataType.FLOAT32, dims=DIMS, layout=LAYOUTS[0], **options):
        strides = _arguments.packed_strides(dims, layout)
        self.problem = Problem(operation, Mode.SPATIAL, dtype, dims, strides, fill="randn", **options)
        self.inputs, self.layout, self.graph = generate(self.problem), layout, new_graph(dtype)
        self.x, self.names = self.data("x"), names
        for name in names:
            stride = (dims[1], 1, *[1] * 6)[: len(dims)]
            setattr(self, name, self.graph.tensor(name=name, dim=self.problem.parameter_dims, stride=stride))

    def data(self, name):
        return self.graph.tensor(name=name, dim=self.problem.dims, stride=self.problem.strides)

    def normalized(self, x=None, epsilon=EPSILON):
        """The inference of an x by mean and variance."""
        node = BatchnormInferenceAttributesVarianceExt()
        parameters = self.mean, self.variance, self.scale, self.bias
        return self.graph.batchnorm_inference_variance_ext(x or self.x, *parameters, epsilon, node)

    def given(self):
        """The inputs by tensor; `inv_variance` is what training saved, `mean` beside it, too."""
        found = {"mean": "saved_mean", "inv_variance": "saved_inv_variance"} if "inv_variance" in self.names else {}
        return {getattr(self, n): getattr(self.inputs, found.get(n, n)) for n in ("x", *self.names)}

    def check(self, bench, made, more=(), *, expected=None, layout=..., by="uid"):
        """Build with these outputs by name, unless the backend refuses; run, and judge each."""
        outputs(*made.values())
        if build(bench, self.graph, self.problem.dtype, self.layout if layout is ... else layout):
            got = bench.run(self.graph, self.given() | dict(more), list(made.values()), by=by)
            for name, values in zip(made, got, strict=True):
                judge(expected or expect(self.problem, self.inputs), name, values, bench)


# ---------------------------------------------------------------- nodes


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("running", [True, False, "biased"])
def test_training(bench, dims, layout, dtype, running):
    options = {"factor": MOMENTUM, "unbiased": running != "biased"} if running else {}
    p = Parts(TRAIN, *VECTORS[: 4 if running else 2], dtype=dtype, dims=dims, layout=layout, eps=EPSILON,
              running=bool(running), **options)  # fmt: skip
    attributes = BatchnormAttributes().set_epsilon(TensorAttributes(EPSILON)).set_unbiased(running != "biased")
    if running:
        attributes.set_previous_running_stats(p.mean, p.variance, TensorAttributes(MOMENTUM))
    made = p.graph.batchnorm(p.x, p.scale, p.bias, attributes)
    assert running or made[3:] == (None, None)
    names = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
    made = {name: tensor for name, tensor in zip(names, made, strict=True) if tensor is not None}
    p.check(bench, made)
    if running == "biased":
        again = Graph()
        again.from_json(p.graph.to_json())
        assert again.to_json() == p.graph.to_json()
        p.graph = again
        p.check(bench, made)


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("form", ["inv_variance", "variance"])
def test_inference(bench, dims, layout, dtype, form):
    p = Parts(INFER, *VECTORS, dtype=dtype, dims=dims, layout=layout, eps=EPSILON)
    if form == "variance":
        return p.check(bench, {"y": p.normalized()}, by="tensor")
    y = p.graph.batchnorm_inference(p.x, p.mean, p.variance, p.scale, p.bias, BatchnormInferenceAttributes())
    # an inverse standard deviation as stored, and what is right for exactly it
    inverse = (1 / np.sqrt(p.inputs.variance.astype(np.float64) + EPSILON)).astype(np.float32)
    exact = dataclasses.replace(p.inputs, variance=inverse.astype(np.float64) ** -2)
    p.check(bench, {"y": y}, {p.variance: inverse}, expected=expect(dataclasses.replace(p.problem, eps=0.0), exact))


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("saved", [True, False])
def test_backward(bench, dims, layout, dtype, saved):
    names = ("scale", "mean", "inv_variance") if saved else ("scale",)
    p = Parts(BACKWARD, *names, dtype=dtype, dims=dims, layout=layout, eps=EPSILON, saved=saved)
    dy, attributes = p.data("dy"), BatchnormBackwardAttributes()
    if saved:
        attributes.set_saved_mean_and_inv_variance(p.mean, p.inv_variance)
    else:
        attributes.set_epsilon(EPSILON)
    made = p.graph.batchnorm_backward(dy, p.x, p.scale, attributes)
    p.check(bench, dict(zip(("dx", "dscale", "dbias"), made, strict=True)), {dy: p.inputs.dy})


@dtypes
@layouts
def test_pointwise_alone(bench, layout, dtype):
    for name in ("relu", "drelu", "sum", "double"):
        p = Parts(BACKWARD, dtype=dtype, dims=(4, 5, 6, 7), layout=layout)
        x, dy = (a.astype(np.float64) for a in (p.inputs.x, p.inputs.dy))
        b = p.data("b")
        made, right = {
            "relu": (lambda p=p: p.graph.relu(p.x), np.maximum(x, 0)),
            "drelu": (lambda p=p, b=b: p.graph.relu_backward(b, p.x), np.where(x > 0, dy, 0)),
            "sum": (lambda p=p, b=b: p.graph.add(p.x, b), x + dy),
            "double": (lambda p=p: p.graph.add(p.x, p.x), x + x),
        }[name]
        (made,) = outputs(made())
        p.graph.build(bench.handle)
        (got,) = bench.run(p.graph, p.given() | ({b: p.inputs.dy} if name in ("drelu", "sum") else {}), [made])
        u = bounds.precision(dtype)
        slack = 0.0 if "relu" in name else (u.u_out + 2 * u.u) * np.abs(right) + u.tiny_out
        assert (np.abs(got.astype(np.float64) - right) <= slack).all(), name


# ---------------------------------------------------------------- nodes joined by virtual tensors


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("order", ["bn first", "shortcut first"])
def test_sum_and_relu_are_rounded_once(bench, dims, layout, dtype, order):
    p = Parts(INFER, *VECTORS, dtype=dtype, dims=dims, layout=layout, eps=EPSILON, beta=1.0)
    shortcut, y = p.data("shortcut"), p.normalized()
    total = p.graph.add(y, shortcut) if order == "bn first" else p.graph.add(shortcut, y)
    (out,) = outputs(p.graph.relu(total))
    if not build(bench, p.graph, dtype, layout):
        return
    (got,) = bench.run(p.graph, p.given() | {shortcut: p.inputs.prior}, [out])
    judge_relu(expect(p.problem, p.inputs), got, bench, p.inputs.prior)


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("x_dy_in_one_layout", [True, False])
def test_gradient_through_relu(bench, dims, layout, dtype, x_dy_in_one_layout):
    """hipDNN's fusion: inference, ReLU gradient with the mask of its virtual y, batch norm gradient."""
    kind = {"dtype": dtype, "dims": dims, "layout": layout}
    p = Parts(BACKWARD, "scale", "mean", "inv_variance", **kind)
    forward, inputs, undecided = Parts(INFER, "bias", **kind, eps=0.0), p.inputs, 0
    before = forward.inputs
    before.x, before.scale, before.mean = inputs.x, inputs.scale, inputs.saved_mean
    before.variance = inputs.saved_inv_variance.astype(np.float64) ** -2
    masked = inputs.dy.copy()
    for index, right, bound in parts(expect(forward.problem, before)):
        near = np.abs(right) <= bound
        undecided += int(np.count_nonzero(near))
        inputs.dy[index][near] = 0  # either mask is right there
        masked[index] = np.where(right > 0, inputs.dy[index], 0)
    assert undecided <= 0.01 * masked.size

    dy, bias = p.data("dy"), p.graph.tensor(name="bias", dim=p.problem.parameter_dims)
    if not x_dy_in_one_layout:
        dy.set_stride(_arguments.packed_strides(dims, LAYOUTS[1 - LAYOUTS.index(layout)]))
    y = p.graph.batchnorm_inference(p.x, p.mean, p.inv_variance, p.scale, bias, BatchnormInferenceAttributes())
    drelu = p.graph.pointwise(y, dy, PointwiseAttributes().set_mode("relu_bwd"))
    attributes = BatchnormBackwardAttributes().set_saved_mean_and_inv_variance(p.mean, p.inv_variance)
    made = dict(zip(("dx", "dscale", "dbias"), p.graph.batchnorm_backward(drelu, p.x, p.scale, attributes),
                    strict=True))  # fmt: skip
    expected = expect(p.problem, dataclasses.replace(inputs, dy=masked))
    copied = layout if x_dy_in_one_layout else None  # MIOpen has no copy between layouts
    p.check(bench, made, {dy: inputs.dy, bias: before.bias}, expected=expected, layout=copied)


def test_forward_and_backward_in_one_graph(bench):
    """Saved statistics may stay inside."""
    p = Parts(BACKWARD, "scale", eps=EPSILON, saved=False)
    dy, bias = p.data("dy"), p.graph.tensor(name="bias", dim=p.problem.parameter_dims)
    _, mean, inv, _, _ = p.graph.batchnorm(p.x, p.scale, bias, BatchnormAttributes().set_epsilon(EPSILON))
    attributes = BatchnormBackwardAttributes().set_saved_mean_and_inv_variance(mean, inv)
    dx, dscale, _ = p.graph.batchnorm_backward(dy, p.x, p.scale, attributes)
    zeros = np.zeros(p.problem.parameter_dims, np.float32)
    p.check(bench, {"dx": dx, "dscale": dscale}, {dy: p.inputs.dy, bias: zeros})


def test_next_running_statistics_may_be_the_previous_ones_memory(bench):
    p = Parts(TRAIN, *VECTORS, eps=EPSILON, factor=MOMENTUM)
    attributes = BatchnormAttributes().set_epsilon(EPSILON)
    attributes.set_previous_running_stats(p.mean, p.variance, MOMENTUM)
    y, _, _, next_mean, next_variance = p.graph.batchnorm(p.x, p.scale, p.bias, attributes)
    outputs(y, next_mean, next_variance)
    p.graph.build(bench.handle)
    device = bench.device
    memory = {t: device.from_numpy(a) for t, a in (p.given() | {y: np.full_like(p.inputs.x, np.nan)}).items()}
    memory |= {next_mean: memory[p.mean].pointer, next_variance: memory[p.variance].pointer}
    size = p.graph.get_workspace_size()
    p.graph.execute(bench.handle, memory, device.empty_bytes(size) if size else None)
    device.synchronize()
    for tensor, name in ((y, "y"), (p.mean, "running_mean"), (p.variance, "running_variance")):
        judge(expect(p.problem, p.inputs), name, device.to_numpy(memory[tensor]))


def test_sixteen_bit_parameters(bench):
    """The data type of a parameter may be set to 16 bits; the arithmetic stays float32."""
    p = Parts(INFER, *VECTORS, eps=EPSILON)
    p.scale.set_data_type("bfloat16")
    p.inputs.scale = p.inputs.scale.astype(NUMPY[DataType.BFLOAT16])
    p.check(bench, {"y": p.normalized()})


# ---------------------------------------------------------------- intermediate data types


@pytest.mark.parametrize("joined", ["one after the other", "sum"])
def test_an_intermediate_that_would_be_rounded_once_more_is_refused(bench, joined):
    """float32 between two batch norms of bfloat16 data: no primitive holds it, so it is not done silently.

    Of a sum one is added before rounding, the other is rounded before: refused unless it says so.
    """
    for kind in (None, "bfloat16"):
        p = Parts(INFER, *VECTORS, dtype=DataType.BFLOAT16)
        first = p.normalized()
        second = p.normalized(first if joined != "sum" else p.data("x2"))
        outputs(second if joined != "sum" else p.graph.relu(p.graph.add(first, second)))
        if kind is None:
            text = "rounded once more" if joined == "sum" else r"stored in bf16.*set its data type to bf16"
            with pytest.raises(UnsupportedError, match=text):
                p.graph.build(bench.handle)
        elif joined != "sum" or bench.handle.backend != "miopen":
            first.set_data_type(kind)
            p.graph.build(bench.handle)
            assert joined == "sum" or p.graph.get_workspace_size() > 0


def test_workspace_is_what_virtual_tensors_take(bench):
    sizes = []
    for relu in (False, True):
        p = Parts(INFER, *VECTORS)
        outputs(p.graph.relu(p.normalized()) if relu else p.normalized())
        p.graph.build(bench.handle)
        sizes.append(p.graph.get_workspace_size())
    assert sizes[1] - sizes[0] >= 4 * np.prod(DIMS)


# ---------------------------------------------------------------- life cycle


@pytest.fixture
def made():
    """A described training graph and its tensors; no backend needed."""
    return training(floats())


def training(graph, dims=(4, 5, 6, 8), running=True):
    strides = _arguments.packed_strides(dims)
    t = {"x": graph.tensor(name="x", dim=dims, stride=strides)}
    for name in ("scale", "bias", "prev_mean", "prev_variance"):
        t[name] = graph.tensor(name=name, dim=(1, dims[1], *[1] * (len(dims) - 2)))
    attributes = BatchnormAttributes().set_name("bn").set_epsilon(EPSILON)
    if running:
        attributes.set_previous_running_stats(t["prev_mean"], t["prev_variance"], MOMENTUM)
    names = ("y", "mean", "inv_variance", "next_mean", "next_variance")
    t |= dict(zip(names, graph.batchnorm(t["x"], t["scale"], t["bias"], attributes), strict=True))
    for name in names:
        if t[name] is not None:
            t[name].set_output(True)
    return graph, t


def test_stages_come_in_order(made, bench):
    graph, _ = made
    handle = bench.handle
    steps = [
        graph.validate,
        lambda: graph.build_operation_graph(handle),
        graph.create_execution_plans,
        graph.check_support,
        graph.build_plans,
        graph.get_workspace_size,
    ]
    for done in range(1, len(steps)):
        for early in steps[done:]:
            with pytest.raises(ArgumentError) as info:
                early()
            assert info.value.argument == "graph"
        with pytest.raises(ArgumentError, match="before execute"):
            graph.execute(handle, {}, None)
        steps[done - 1]()
    graph.get_workspace_size()
    graph.relu(graph.tensor(name="late", dim=(2, 3), stride=(3, 1)))  # a new node starts over
    with pytest.raises(ArgumentError, match="described"):
        graph.execute(handle, {}, None)


def test_validate_fills_in_what_follows(made):
    graph, t = made
    graph.validate()
    assert t["y"].get_dim() == [4, 5, 6, 8]
    assert t["y"].get_stride() == t["x"].get_stride()
    assert t["mean"].get_dim() == [1, 5, 1, 1]
    assert t["mean"].get_stride() == [5, 1, 5, 5]  # hipDNN's
    assert t["next_mean"].get_data_type() == DataType.FLOAT32
    half, u = training(Graph().set_io_data_type("half").set_intermediate_data_type("float"))
    half.validate()
    assert u["y"].get_data_type() == DataType.FLOAT16
    assert u["mean"].get_data_type() == DataType.FLOAT32


def test_uids_are_given_around_those_that_were_set(made, bench):
    graph, t = made
    t["x"].set_uid(2)
    t["y"].set_uid(-7)
    graph.validate()
    assert not t["scale"].has_uid()
    graph.build_operation_graph(bench.handle)
    uids = [tensor.get_uid() for tensor in t.values()]
    assert len(set(uids)) == len(uids)
    assert (t["x"].get_uid(), t["y"].get_uid()) == (2, -7)


def test_changes_after_building_have_no_effect(bench):
    p, epsilon = Parts(INFER, *VECTORS, eps=EPSILON), TensorAttributes(EPSILON)
    (y,) = outputs(p.normalized(epsilon=epsilon))
    p.graph.build(bench.handle)
    epsilon.set_value(100.0)
    (got,) = bench.run(p.graph, p.given(), [y])
    judge(expect(p.problem, p.inputs), "y", got, bench)


def test_attributes_are_taken_as_they_are_when_the_node_is_added():
    """C++ passes them by value."""
    graph = floats()
    attributes = PointwiseAttributes().set_mode(PointwiseMode.RELU_FWD)
    x = graph.tensor(name="x", dim=(2, 3), stride=(3, 1))
    first = graph.pointwise(x, attributes)
    outputs(first, graph.pointwise(first, attributes))
    attributes.set_mode(PointwiseMode.ADD)
    graph.validate()
    assert [n.name for n in graph._nodes] == ["Pointwise_0", "Pointwise_1"]


def test_the_workspace_is_enough_wherever_it_starts(bench):
    """A virtual tensor of whole units of 64 bytes and nothing else in the workspace."""
    graph = floats()
    x = graph.tensor(name="x", dim=(4, 4, 4, 4), stride=(64, 16, 4, 1))
    out = graph.relu(graph.relu(x))
    outputs(out)
    graph.build(bench.handle)
    values = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 4, 4, 4)
    (got,) = bench.run(graph, {x: values}, [out])
    assert np.array_equal(got, np.maximum(values, 0))


def test_plans_and_modes(made, bench):
    graph, _ = made
    assert graph.get_execution_plan_count() == 0
    graph.validate()
    graph.build_operation_graph(bench.handle)
    for modes in ([HeuristicMode.A, HeuristicMode.FALLBACK], "B", ("fallback",)):
        graph.create_execution_plans(modes)
        assert graph.get_execution_plan_count() == 1
    for modes in (["fast"], [1], [None]):
        with pytest.raises(ArgumentError) as info:
            graph.create_execution_plans(modes)
        assert info.value.argument == "modes"


# ---------------------------------------------------------------- graphs that are wrong


@table(
    ("argument", "change"),
    [
        ("x of bn", lambda g, t: t["x"].set_dim((4,)).set_stride((1,))),
        ("x of bn", lambda g, t: t.update(_=setattr(t["x"], "_stride", ()))),
        ("stride of x of bn", lambda g, t: t["x"].set_stride((1, 1, 1, 1))),
        ("y of bn", lambda g, t: t["y"].set_dim((4, 5, 6, 7))),
        ("stride of y of bn", lambda g, t: t["y"].set_stride((1, 1, 1, 1))),
        ("scale of bn", lambda g, t: t["scale"].set_dim((1, 6, 1, 1))),
        ("scale of bn", lambda g, t: t["scale"].set_dim((5,))),
        ("bias of bn", lambda g, t: t["bias"].set_dim((4, 5, 1, 1))),
        ("scale of bn", lambda g, t: t["scale"].set_stride((10, 2, 1, 1))),
        ("mean of bn", lambda g, t: t["mean"].set_dim((1, 4, 1, 1))),
        ("prev_running_mean of bn", lambda g, t: t["prev_mean"].set_dim((1, 4, 1, 1))),
        ("x of bn", lambda g, t: t["x"].set_is_virtual(True)),
        ("x of bn", lambda g, t: t["x"].set_value(1.0)),
        ("uid", lambda g, t: (t["x"].set_uid(3), t["y"].set_uid(3))),
        ("data_type", lambda g, t: t["y"].set_data_type("half")),
        ("graph", lambda g, t: [v.set_output(n in ("x", "scale", "bias", "prev_mean", "prev_variance"))
                                for n, v in t.items()]),
        ("compute_data_type", lambda g, t: g.set_compute_data_type("half")),
    ],
)  # fmt: skip
def test_wrong_graphs(argument, change):
    """A training graph spoilt by `change` is refused by validate with this argument."""
    graph, t = training(floats())
    change(graph, t)
    with pytest.raises(ArgumentError) as info:
        graph.validate()
    assert argument in info.value.argument, info.value
    with pytest.raises(ArgumentError, match="described"):
        graph.get_workspace_size()


def one_node(kind="batchnorm", x=(4, 5), dy=None, bias=True, **slots):
    """A graph of one batch norm whose attributes have these slots; True is a tensor of their own."""
    graph = floats()

    def parameter(name):
        return graph.tensor(name=name, dim=(1, 5))

    attributes = (BatchnormAttributes if kind == "batchnorm" else BatchnormBackwardAttributes)()
    for name, value in slots.items():
        own = [parameter(name)] if name == "peer_stats" else parameter(name)
        getattr(attributes, f"set_{name}")(own if value is True else value)
    data = [graph.tensor(name=n, dim=d, stride=(5, 1)) for n, d in (("dy", dy or x), ("x", x))]
    if kind == "batchnorm":
        outputs(graph.batchnorm(data[1], parameter("scale"), parameter("bias") if bias else None, attributes)[0])
    else:
        outputs(graph.batchnorm_backward(*data, parameter("scale"), attributes)[0])
    return graph


PREVIOUS = {"epsilon": 0.1, "prev_running_mean": True, "prev_running_variance": True}


@table(
    ("argument", "described"),
    [
        ("x of", {"x": (1, 5), "epsilon": EPSILON}),  # one element for each statistic
        ("x of", {"kind": "backward", "x": (1, 5), "epsilon": EPSILON}),
        ("dy of", {"kind": "backward", "dy": (3, 5), "epsilon": EPSILON}),
        ("epsilon of", {}),
        ("momentum of", PREVIOUS),
        ("prev_running_variance of", {"epsilon": 0.1, "prev_running_mean": True, "momentum": 0.1}),
        ("prev_running_mean of", {"epsilon": 0.1, "momentum": 0.1}),
        ("inv_variance of", {"kind": "backward", "mean": True}),
        ("mean of", {"kind": "backward", "inv_variance": True}),
        ("epsilon of", {"kind": "backward"}),
        ("bias of", {"epsilon": 0.1, "bias": False}),
        ("peer_stats of", {"epsilon": 0.1, "peer_stats": True}),  # which need a communicator
        ("peer_stats of", {"kind": "backward", "epsilon": EPSILON, "peer_stats": True}),  # and saved statistics
        *[("epsilon", {"epsilon": value}) for value in (-1.0, 1e39)],
        *[("momentum", {**PREVIOUS, "momentum": value}) for value in (-1.0, 1e39)],
    ],
)
def test_groups_are_complete_or_absent_and_values_in_their_ranges(argument, described):
    with pytest.raises(ArgumentError) as info:
        one_node(**described).validate()
    assert info.value.argument.startswith(argument), info.value


def test_pointwise_rules():
    def build_one(mode, *dims, **clips):
        graph = floats()
        tensors = [graph.tensor(name=f"t{i}", dim=d, stride=_arguments.packed_strides(d)) for i, d in enumerate(dims)]
        attributes = PointwiseAttributes()
        if mode is not None:
            attributes.set_mode(mode)
        for name, value in clips.items():
            getattr(attributes, f"set_{name}")(value)
        outputs(graph.pointwise(*tensors, attributes))
        graph.validate()

    build_one(PointwiseMode.ADD, (2, 3), (2, 3))
    build_one("relu_fwd", (2, 3), relu_lower_clip=0.0, relu_lower_clip_slope=0.0)
    for arguments, clips, name in [
        ((None, (2, 3)), {}, "mode"),
        ((PointwiseMode.ADD, (2, 3)), {}, "inputs"),
        ((PointwiseMode.RELU_FWD, (2, 3), (2, 3)), {}, "inputs"),
        ((PointwiseMode.ADD, (2, 3), (1, 3)), {}, "in_1"),
        ((PointwiseMode.RELU_FWD, (2, 3)), {"relu_upper_clip": 0.0}, "relu_upper_clip"),
        ((PointwiseMode.RELU_FWD, (2, 3)), {"relu_upper_clip": -1.0, "relu_lower_clip": 1.0}, "relu_upper_clip"),
        ((PointwiseMode.ADD, (2, 3), (2, 3)), {"relu_lower_clip_slope": 0.1}, "relu_lower_clip_slope"),
    ]:
        with pytest.raises(ArgumentError) as info:
            build_one(*arguments, **clips)
        assert info.value.argument.startswith(f"{name} of"), info.value


def test_empty_and_foreign():
    with pytest.raises(ArgumentError, match="no nodes"):
        Graph().validate()
    first = floats()
    inner = first.relu(first.tensor(name="x", dim=(2, 3), stride=(3, 1)))
    second = floats()
    outputs(second.relu(inner))
    with pytest.raises(ArgumentError, match="no node before produces"):
        second.validate()


def test_tensor_setters_refuse_what_is_wrong():
    for call, argument in [
        (lambda: Tensor().set_dim((0, 2)), "dim"),
        (lambda: Tensor().set_dim("ab"), "dim"),
        (lambda: Tensor().set_stride((0, 1)), "stride"),
        (lambda: Tensor().set_data_type("int8"), "data_type"),
        (lambda: Tensor().set_data_type("double"), "data_type"),
        (lambda: Tensor().set_uid("a"), "uid"),
        (lambda: Tensor().set_uid(2**63), "uid"),
        (lambda: Tensor().set_name(3), "name"),
        (lambda: Tensor().set_is_virtual(1), "is_virtual"),
        (lambda: Tensor().set_output("yes"), "output"),
        (lambda: Tensor().set_value(float("nan")), "value"),
        (lambda: BatchnormAttributes().set_epsilon("x"), "epsilon"),
        (lambda: BatchnormAttributes().set_prev_running_mean(3.0), "prev_running_mean"),
        (lambda: Graph().set_io_data_type("float128"), "io_data_type"),
        (lambda: Graph().batchnorm(3, 4, 5, BatchnormAttributes()), "x"),
        (lambda: Graph().relu(3), "in_0"),
        (lambda: Graph().pointwise(Tensor()), "inputs"),
        (lambda: Graph().batchnorm(Tensor(), Tensor(), Tensor(), PointwiseAttributes()), "attributes"),
        (lambda: Graph().tensor(3), "attributes"),
        (lambda: BatchnormAttributes().set_unbiased(0.5), "unbiased"),
        (lambda: PointwiseAttributes().set_mode("tanh"), "mode"),
        (lambda: PointwiseAttributes().set_mode(2.5), "mode"),
        (lambda: floats().set_communicator("MPI_COMM_WORLD"), "communicator"),
    ]:
        with pytest.raises(ArgumentError) as info:
            call()
        assert info.value.argument == argument
    scalar = TensorAttributes(0.5)
    assert scalar.get_pass_by_value()
    assert scalar.get_value() == 0.5
    assert not scalar.clear_value().get_pass_by_value()
    like = Graph.tensor_like(Tensor.create((2, 3), "half").set_uid(4), "copy")
    assert (like.get_name(), like.has_uid(), like.get_stride()) == ("copy", False, [3, 1])


def test_data_types_must_be_known():
    graph, _ = training(Graph().set_intermediate_data_type("float"))
    with pytest.raises(ArgumentError, match="set_io_data_type"):
        graph.validate()
    graph, t = training(Graph().set_io_data_type("float"))
    t["y"].set_output(False)
    with pytest.raises(ArgumentError, match="set_intermediate_data_type"):
        graph.validate()


# ---------------------------------------------------------------- calls that are wrong


class Built:
    """A built training graph with memory for everything."""

    def __init__(self, bench):
        self.handle, self.device = bench.handle, bench.device
        self.graph, self.t = training(floats())
        self.t["out"] = self.graph.relu(self.t["y"])
        self.t["y"].set_output(False)
        self.t["out"].set_output(True)
        self.graph.build(self.handle)
        rng = np.random.default_rng(0)
        self.pack = {}
        for name, tensor in self.t.items():
            if name != "y":
                values = rng.random(tensor.get_dim(), np.float32)
                self.pack[tensor.get_uid()] = self.device.from_numpy(values)
        self.size = self.graph.get_workspace_size()
        self.workspace = self.device.empty_bytes(self.size)

    def uid(self, name):
        return self.t[name].get_uid()

    def contents(self):
        self.device.synchronize()
        return {k: self.device.to_numpy(b).tobytes() for k, b in self.pack.items()}


@pytest.fixture
def built(bench):
    return Built(bench)


def refused(built, argument, pack=None, workspace="right", handle=None, kind=ArgumentError):
    before = built.contents()
    memory = built.workspace if isinstance(workspace, str) else workspace
    with pytest.raises(kind) as info:
        built.graph.execute(handle or built.handle, built.pack if pack is None else pack, memory)
    assert argument in info.value.argument, info.value
    assert built.contents() == before
    return info.value


def test_a_pack_has_each_tensor_and_nothing_else(built):
    x, pack = built.pack[built.uid("x")], built.pack
    for name in ("x", "scale", "out", "next_mean", "prev_variance"):
        without = {uid: array for uid, array in pack.items() if uid != built.uid(name)}
        assert f"no entry for {built.uid(name)} " in str(refused(built, "variant_pack", without))
    for key in (12345, "x", Tensor()):
        refused(built, "variant_pack", {**pack, key: x})
    refused(built, "variant_pack", [pack])
    refused(built, "(x)", {**pack, built.t["x"]: x})
    virtual = built.uid("y")
    assert "virtual" in str(refused(built, f"variant_pack[{virtual}]", {**pack, virtual: x}))
    scalar = next(uid for uid, record in built.graph._by_uid.items() if record is None)
    assert "by value" in str(refused(built, "variant_pack", {**pack, scalar: x}))


def test_memory_must_be_what_the_tensor_says(built):
    x, scale, out = built.uid("x"), built.uid("scale"), built.uid("out")
    other = 2 if built.handle.library.device_type == 1 else 1
    for uid, array in [
        (x, np.ones((4, 5, 6, 7), np.float32)),
        (x, np.ones((4, 5, 48), np.float32)),
        (x, np.ones((3, 5, 6, 8), np.float32)),  # of the right strides
        (x, np.ones((4, 5, 6, 8), np.float16)),
        (x, np.moveaxis(np.ones((4, 6, 8, 5), np.float32), -1, 1)),
        (scale, np.ones(6, np.float32)),
        (scale, np.ones(5, np.float64)),
        (scale, np.ones((5, 2), np.float32)[:, 0]),
        *[(x, value) for value in (0, None, "x", object(), built.pack[x].pointer + 2)],
        (x, built.pack[x]._replace(device_type=other)),
        (out, built.pack[out]._replace(writable=False)),
    ]:
        memory = built.device.from_numpy(array) if isinstance(array, np.ndarray) else array
        refused(built, f"variant_pack[{uid}]", {**built.pack, uid: memory})


def test_overlaps(built):
    for argument, name, other in [
        ("OUT_0", "out", "x"),
        ("MEAN", "mean", "scale"),
        ("bn::", "mean", "inv_variance"),
        ("bn::", "next_mean", "prev_variance"),
    ]:
        refused(built, argument, {**built.pack, built.uid(name): built.pack[built.uid(other)]})
    # An output where the workspace is.
    mean = built.uid("mean")
    inside = built.pack[mean]._replace(pointer=-(-built.workspace.pointer // 64) * 64 + 64)
    refused(built, "", {**built.pack, mean: inside})


def test_workspace(built):
    address, size = built.workspace.pointer, built.workspace.nbytes
    assert size == built.size > 4 * 4 * 5 * 6 * 8
    for workspace in (None, (address, size - 1), built.device.empty_bytes(size - 1), (0, 0)):
        refused(built, "workspace", workspace=workspace, kind=pybnorm.WorkspaceError)
    for workspace in (address, "much", (address,)):
        with pytest.raises((ArgumentError, TypeError)):
            built.graph.execute(built.handle, built.pack, workspace)
    built.graph.execute(built.handle, built.pack, (address, size))
    built.device.synchronize()


def test_handles(built):
    for handle in ("onednn", 3):
        refused(built, "handle", handle=handle)
    with pytest.raises(ArgumentError):
        Graph().build_operation_graph(None)
    closed = pybnorm.Handle(built.handle.backend)
    closed.close()
    refused(built, "handle", handle=closed, kind=pybnorm.ClosedError)
    graph, _ = training(floats())
    graph.validate()
    with pytest.raises(pybnorm.ClosedError):
        graph.build_operation_graph(closed)
    with pytest.raises(pybnorm.ClosedError):
        training(floats())[0].build(closed)


def test_a_graph_is_bound_to_its_backend(built, monkeypatch):
    class Other:
        backend = "other"

    monkeypatch.setattr(built.graph, "_handle", Other())
    refused(built, "handle")


def test_what_the_backend_refuses_is_named_before_anything_runs(bench):
    graph, _ = training(floats(), dims=(2, 3, 4, 5))
    graph.validate()
    graph.build_operation_graph(bench.handle)
    graph.create_execution_plans()

    def refuse(*_arguments, **_options):
        raise pybnorm.UnsupportedError(
            backend="b", function="f", status=-1, status_name="PBN_E_UNSUPPORTED", text="no path"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pybnorm.graph.lowering.prepare", refuse)
        with pytest.raises(pybnorm.UnsupportedError, match="bn: no path"):
            graph.check_support()
    with pytest.raises(ArgumentError):
        graph.build_plans()


def test_nothing_is_allocated_behind_the_callers_back(built, monkeypatch):
    """Every operation gets its part of the workspace, so neither module nor handle keeps memory of its own."""
    seen = []
    execute = program.Prepared.execute

    def spy(prepared, handle, operation, addresses, workspace):
        if operation == "forward_training":
            seen.append(workspace)
        execute(prepared, handle, operation, addresses, workspace)

    monkeypatch.setattr(program.Prepared, "execute", spy)
    with pybnorm.Handle(built.handle.backend) as handle:
        if built.device.stream:
            handle.set_stream(built.device.stream)
        built.graph.execute(handle, built.pack, built.workspace)
        built.device.synchronize()
        assert handle.workspace_nbytes == 0
        assert handle not in program._kept
    assert len(seen) == 1
    start, end = built.workspace.pointer, built.workspace.pointer + built.size
    assert seen[0] is None or start <= seen[0][0] <= seen[0][0] + seen[0][1] <= end


# ---------------------------------------------------------------- logging


@pytest.fixture
def logger(monkeypatch):
    monkeypatch.delenv("PYBNORM_LOG_LEVEL", raising=False)
    root = logging.getLogger("pybnorm")
    level, handlers = root.level, list(root.handlers)
    yield root
    root.setLevel(level)
    root.handlers[:] = handlers


def test_log_level_by_variable(monkeypatch, logger):
    """hipDNN's where ours is not set."""
    for name, words in (
        ("HIPDNN_LOG_LEVEL", (("info", 20), ("fatal", 50), ("off", 51))),
        ("PYBNORM_LOG_LEVEL", (("off", 51), ("info", 20), ("WARN", 30), ("error", 40))),
    ):
        for word, level in words:
            monkeypatch.setenv(name, word)
            Graph()
            assert logger.level == level
    monkeypatch.setenv("PYBNORM_LOG_LEVEL", "loud")
    with pytest.raises(ArgumentError) as info:
        Graph()
    assert info.value.argument == "PYBNORM_LOG_LEVEL"


def test_what_is_logged(monkeypatch, logger, caplog):
    monkeypatch.setenv("PYBNORM_LOG_LEVEL", "info")
    graph, _ = training(Graph().set_name("g").set_io_data_type("float").set_intermediate_data_type("float"))
    graph.validate()
    assert any("validated" in r.getMessage() and "bn (batchnorm)" in r.getMessage() for r in caplog.records)
    caplog.clear()
    with pytest.raises(ArgumentError):
        graph.build_plans()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "build_plans" in record.getMessage()
    monkeypatch.setenv("PYBNORM_LOG_LEVEL", "off")
    Graph()
    caplog.clear()
    with pytest.raises(ArgumentError):
        graph.build_plans()
    assert not caplog.records


# ---------------------------------------------------------------- clips

CLIPS = [
    (None, 6.0, None),
    (-1.0, None, None),
    (-1.5, 2.0, None),
    (None, None, 0.25),
    (-0.5, 1.5, 0.5),
    (0.5, None, -1.0),
]


@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.BFLOAT16], ids=lambda d: d.short)
@pytest.mark.parametrize("clips", CLIPS, ids=str)
@pytest.mark.parametrize("mode", [PointwiseMode.RELU_FWD, PointwiseMode.RELU_BWD], ids=lambda m: m.name)
def test_clips_and_the_slope_below(bench, mode, clips, dtype):
    """Values in steps of 1/4, clips among them, and large ones: exact. At the upper clip dy passes, as in hipDNN."""
    graph = Graph().set_io_data_type(dtype).set_intermediate_data_type(dtype)
    values = np.concatenate([np.arange(-32, 32) / 4, [1e30, -1e30] * 4]).reshape(2, 3, 12).astype(NUMPY[dtype])
    slopes = (np.arange(72).reshape(values.shape) - 30).astype(NUMPY[dtype])
    x, dy = (graph.tensor(name=n, dim=values.shape, stride=(36, 12, 1)) for n in ("x", "dy"))
    attributes = PointwiseAttributes().set_mode(mode)
    for name, clip in zip(("lower_clip", "upper_clip", "lower_clip_slope"), clips, strict=True):
        if clip is not None:
            getattr(attributes, f"set_relu_{name}")(clip)
    lower, upper, slope = clips[0] or 0.0, np.inf if clips[1] is None else clips[1], clips[2] or 0.0
    backward = mode == PointwiseMode.RELU_BWD
    (out,) = outputs(graph.pointwise(x, *([dy] if backward else []), attributes))
    if not build(bench, graph, dtype, Layout.CHANNELS_FIRST):
        return
    (got,) = bench.run(graph, {x: values} | ({dy: slopes} if backward else {}), [out])
    wide, given = values.astype("f8"), slopes.astype("f8")
    if backward:
        want = np.where(wide > upper, 0, np.where(wide > lower, given, slope * given))
    else:
        want = np.minimum(np.where(wide > lower, wide, lower + slope * (wide - lower)), upper)
    np.testing.assert_array_equal(got, want.astype(NUMPY[dtype]))


@pytest.mark.parametrize("clipped", [False, True])
def test_a_virtual_float32_before_clips_would_be_rounded_first(bench, clipped):
    """Rounding and ReLU commute; rounding and a clip that is no value of the type do not."""
    p = Parts(INFER, *VECTORS, dtype=DataType.FLOAT16)
    y = p.graph.batchnorm_inference(p.x, p.mean, p.variance, p.scale, p.bias, BatchnormInferenceAttributes())
    attributes = PointwiseAttributes().set_mode("relu_fwd")
    if clipped:
        attributes.set_relu_upper_clip(0.1)
    outputs(p.graph.pointwise(y, attributes))
    p.graph.validate()
    p.graph.build_operation_graph(bench.handle)
    if clipped:
        with pytest.raises(UnsupportedError, match="rounded once more"):
            p.graph.create_execution_plans()
    else:
        p.graph.create_execution_plans()
