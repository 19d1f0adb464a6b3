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
EPSILON, MOMENTUM = 1e-3, 0.2

dtypes = pytest.mark.parametrize("dtype", NUMPY, ids=lambda d: d.short)
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name.lower())
shapes = pytest.mark.parametrize("dims", SHAPES, ids=str)


@pytest.fixture
def bench(right):
    return Bench(right)


def problem_of(operation, dtype, dims, layout, **options):
    return Problem(
        operation, Mode.SPATIAL, dtype, dims, _arguments.packed_strides(dims, layout), fill="randn", **options
    )


class Parts:
    """A graph with an x and the parameters that were asked for."""

    def __init__(self, problem, *names):
        self.graph = new_graph(problem.dtype)
        self.problem, self.c = problem, problem.dims[1]
        self.x = self.data("x")
        for name in names:
            setattr(self, name, self.parameter(name))

    def data(self, name):
        return self.graph.tensor(name=name, dim=self.problem.dims, stride=self.problem.strides)

    def parameter(self, name):
        return self.graph.tensor(
            name=name, dim=self.problem.parameter_dims, stride=(self.c, 1, *[1] * 6)[: len(self.problem.dims)]
        )


def given_to(p, inputs, names=("x", "scale", "bias", "mean", "variance")):
    return {getattr(p, name): getattr(inputs, name) for name in names}


def floats():
    return Graph().set_io_data_type("float").set_intermediate_data_type("float")


def outputs(*tensors):
    for tensor in tensors:
        tensor.set_output(True)
    return list(tensors)


# ---------------------------------------------------------------- nodes


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("running", [True, False])
def test_training(bench, dims, layout, dtype, running):
    options = {"factor": MOMENTUM} if running else {}
    problem = problem_of(Operation.FORWARD_TRAINING, dtype, dims, layout, eps=EPSILON, running=running, **options)
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias", "mean", "variance")
    attributes = BatchnormAttributes().set_epsilon(TensorAttributes(EPSILON))
    if running:
        attributes.set_previous_running_stats(p.mean, p.variance, TensorAttributes(MOMENTUM))
    made = p.graph.batchnorm(p.x, p.scale, p.bias, attributes)
    assert running or made[3:] == (None, None)
    made = outputs(*(t for t in made if t is not None))
    if not build(bench, p.graph, dtype, layout):
        return
    names = ("x", "scale", "bias", *(("mean", "variance") if running else ()))
    got = bench.run(p.graph, given_to(p, inputs, names), made)
    expected = expect(problem, inputs)
    names = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
    for name, values in zip(names, got, strict=False):
        judge(expected, name, values, bench)


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("form", ["inv_variance", "variance"])
def test_inference(bench, dims, layout, dtype, form):
    problem = problem_of(Operation.FORWARD_INFERENCE, dtype, dims, layout, eps=EPSILON)
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias", "mean", "spread")
    if form == "variance":
        node, spread, expected = BatchnormInferenceAttributesVarianceExt(), inputs.variance, expect(problem, inputs)
        y = p.graph.batchnorm_inference_variance_ext(p.x, p.mean, p.spread, p.scale, p.bias, EPSILON, node)
    else:
        spread, expected = inverse(problem, inputs)
        y = p.graph.batchnorm_inference(p.x, p.mean, p.spread, p.scale, p.bias, BatchnormInferenceAttributes())
    outputs(y)
    if not build(bench, p.graph, dtype, layout):
        return
    given = {p.x: inputs.x, p.scale: inputs.scale, p.bias: inputs.bias, p.mean: inputs.mean, p.spread: spread}
    (got,) = bench.run(p.graph, given, [y], by="tensor")
    judge(expected, "y", got, bench)


def inverse(problem, inputs):
    """An inverse standard deviation as stored, and what is right for exactly it."""
    spread = (1 / np.sqrt(inputs.variance.astype(np.float64) + problem.epsilon)).astype(np.float32)
    exact = dataclasses.replace(inputs, variance=spread.astype(np.float64) ** -2)
    return spread, expect(dataclasses.replace(problem, eps=0.0), exact)


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("saved", [True, False])
def test_backward(bench, dims, layout, dtype, saved):
    problem = problem_of(Operation.BACKWARD, dtype, dims, layout, eps=EPSILON, saved=saved)
    inputs = generate(problem)
    p = Parts(problem, "scale", "mean", "inv_variance")
    dy = p.data("dy")
    attributes = BatchnormBackwardAttributes()
    if saved:
        attributes.set_saved_mean_and_inv_variance(p.mean, p.inv_variance)
    else:
        attributes.set_epsilon(EPSILON)
    made = outputs(*p.graph.batchnorm_backward(dy, p.x, p.scale, attributes))
    if not build(bench, p.graph, dtype, layout):
        return
    given = {p.x: inputs.x, dy: inputs.dy, p.scale: inputs.scale}
    if saved:
        given |= {p.mean: inputs.saved_mean, p.inv_variance: inputs.saved_inv_variance}
    got = bench.run(p.graph, given, made)
    expected = expect(problem, inputs)
    for name, values in zip(("dx", "dscale", "dbias"), got, strict=True):
        judge(expected, name, values, bench)


@dtypes
@layouts
def test_pointwise_alone(bench, layout, dtype):
    dims = (4, 5, 6, 7)
    problem = problem_of(Operation.BACKWARD, dtype, dims, layout)
    inputs = generate(problem)
    x, dy = (a.astype(np.float64) for a in (inputs.x, inputs.dy))
    right = {"relu": np.maximum(x, 0), "drelu": np.where(x > 0, dy, 0), "sum": x + dy, "double": x + x}
    for name, values in right.items():
        p = Parts(problem)
        b = p.data("b")
        made = {
            "relu": lambda p=p: p.graph.relu(p.x),
            "drelu": lambda p=p, b=b: p.graph.relu_backward(b, p.x),
            "sum": lambda p=p, b=b: p.graph.add(p.x, b),
            "double": lambda p=p: p.graph.add(p.x, p.x),
        }[name]()
        outputs(made)
        p.graph.build(bench.handle)
        given = {p.x: inputs.x} if name in ("relu", "double") else {p.x: inputs.x, b: inputs.dy}
        (got,) = bench.run(p.graph, given, [made])
        p_ = bounds.precision(dtype)
        slack = 0.0 if name in ("relu", "drelu") else (p_.u_out + 2 * p_.u) * np.abs(values) + p_.tiny_out
        assert (np.abs(got.astype(np.float64) - values) <= slack).all(), name


# ---------------------------------------------------------------- nodes joined by virtual tensors


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("order", ["bn first", "shortcut first"])
def test_sum_and_relu_are_rounded_once(bench, dims, layout, dtype, order):
    problem = problem_of(Operation.FORWARD_INFERENCE, dtype, dims, layout, eps=EPSILON, beta=1.0)
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias", "mean", "variance")
    shortcut = p.data("shortcut")
    node = BatchnormInferenceAttributesVarianceExt()
    y = p.graph.batchnorm_inference_variance_ext(p.x, p.mean, p.variance, p.scale, p.bias, EPSILON, node)
    total = p.graph.add(y, shortcut) if order == "bn first" else p.graph.add(shortcut, y)
    out = p.graph.relu(total)
    outputs(out)
    if not build(bench, p.graph, dtype, layout):
        return
    (got,) = bench.run(p.graph, given_to(p, inputs) | {shortcut: inputs.prior}, [out])
    expected = expect(problem, inputs)
    if bench.handle.backend == "miopen" and dtype == DataType.FLOAT16:
        # MIOpen adds in the data's own type: what it adds to the shortcut has been rounded, too.
        u = bounds.precision(dtype).u_out
        for index, right, bound in parts(expected):
            term = np.abs(right - inputs.prior[index].astype(np.float64))
            error = np.abs(got[index].astype(np.float64) - np.maximum(right, 0))
            assert (error <= bound + u * (1 + u) * (term + bound)).all(), problem
        return
    judge_relu(expected, got, bench)


@dtypes
@layouts
@shapes
@pytest.mark.parametrize("x_dy_in_one_layout", [True, False])
def test_gradient_through_relu(bench, dims, layout, dtype, x_dy_in_one_layout):
    """hipDNN's fusion: inference, ReLU gradient with the mask of its virtual y, batch norm gradient."""
    problem = problem_of(Operation.BACKWARD, dtype, dims, layout)
    forward = problem_of(Operation.FORWARD_INFERENCE, dtype, dims, layout, eps=0.0)
    inputs, before = generate(problem), generate(forward)
    before.x, before.scale, before.mean = inputs.x, inputs.scale, inputs.saved_mean
    before.variance = inputs.saved_inv_variance.astype(np.float64) ** -2
    masked, undecided = inputs.dy.copy(), 0
    for index, right, bound in parts(expect(forward, before)):
        near = np.abs(right) <= bound
        undecided += int(np.count_nonzero(near))
        inputs.dy[index][near] = 0  # either mask is right there
        masked[index] = np.where(right > 0, inputs.dy[index], 0)
    assert undecided <= 0.01 * masked.size
    expected = expect(problem, dataclasses.replace(inputs, dy=masked))

    p = Parts(problem, "scale", "bias", "mean", "inv_variance")
    dy = p.data("dy")
    if not x_dy_in_one_layout:
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        dy.set_stride(_arguments.packed_strides(dims, other))
    y = p.graph.batchnorm_inference(p.x, p.mean, p.inv_variance, p.scale, p.bias, BatchnormInferenceAttributes())
    drelu = p.graph.pointwise(y, dy, PointwiseAttributes().set_mode("relu_bwd"))
    attributes = BatchnormBackwardAttributes().set_saved_mean_and_inv_variance(p.mean, p.inv_variance)
    made = outputs(*p.graph.batchnorm_backward(drelu, p.x, p.scale, attributes))
    copied = None if not x_dy_in_one_layout else layout  # MIOpen has no copy between layouts
    if not build(bench, p.graph, dtype, copied):
        return
    given = {p.x: inputs.x, dy: inputs.dy, p.scale: inputs.scale, p.bias: before.bias}
    given |= {p.mean: inputs.saved_mean, p.inv_variance: inputs.saved_inv_variance}
    got = bench.run(p.graph, given, made)
    for name, values in zip(("dx", "dscale", "dbias"), got, strict=True):
        judge(expected, name, values, bench)


def test_forward_and_backward_in_one_graph(bench):
    """Saved statistics may stay inside."""
    dtype, layout, dims = DataType.FLOAT32, Layout.CHANNELS_FIRST, (4, 5, 6, 8)
    problem = problem_of(Operation.BACKWARD, dtype, dims, layout, eps=EPSILON, saved=False)
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias")
    dy = p.data("dy")
    _, mean, inv, _, _ = p.graph.batchnorm(p.x, p.scale, p.bias, BatchnormAttributes().set_epsilon(EPSILON))
    attributes = BatchnormBackwardAttributes().set_saved_mean_and_inv_variance(mean, inv)
    dx, dscale, _ = p.graph.batchnorm_backward(dy, p.x, p.scale, attributes)
    made = outputs(dx, dscale)
    p.graph.build(bench.handle)
    bias = np.zeros(problem.parameter_dims, np.float32)
    got = bench.run(p.graph, {p.x: inputs.x, dy: inputs.dy, p.scale: inputs.scale, p.bias: bias}, made)
    expected = expect(problem, inputs)
    judge(expected, "dx", got[0])
    judge(expected, "dscale", got[1])


def test_next_running_statistics_may_be_the_previous_ones_memory(bench):
    problem = problem_of(
        Operation.FORWARD_TRAINING, DataType.FLOAT32, (4, 5, 6, 8), Layout.CHANNELS_FIRST, eps=EPSILON, factor=MOMENTUM
    )
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias", "mean", "variance")
    attributes = BatchnormAttributes().set_epsilon(EPSILON)
    attributes.set_previous_running_stats(p.mean, p.variance, MOMENTUM)
    y, _, _, next_mean, next_variance = p.graph.batchnorm(p.x, p.scale, p.bias, attributes)
    outputs(y, next_mean, next_variance)
    p.graph.build(bench.handle)
    device = bench.device
    memory = {t: device.from_numpy(a) for t, a in (given_to(p, inputs) | {y: np.full_like(inputs.x, np.nan)}).items()}
    memory |= {next_mean: memory[p.mean].pointer, next_variance: memory[p.variance].pointer}
    size = p.graph.get_workspace_size()
    p.graph.execute(bench.handle, memory, device.empty_bytes(size) if size else None)
    device.synchronize()
    expected = expect(problem, inputs)
    for tensor, name in ((y, "y"), (p.mean, "running_mean"), (p.variance, "running_variance")):
        judge(expected, name, device.to_numpy(memory[tensor]))


def test_sixteen_bit_parameters(bench):
    """The data type of a parameter may be set to 16 bits; the arithmetic stays float32."""
    problem = problem_of(
        Operation.FORWARD_INFERENCE, DataType.FLOAT32, (4, 5, 6, 8), Layout.CHANNELS_FIRST, eps=EPSILON
    )
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias", "mean", "variance")
    p.scale.set_data_type("bfloat16")
    inputs.scale = inputs.scale.astype(NUMPY[DataType.BFLOAT16])
    node = BatchnormInferenceAttributesVarianceExt()
    y = p.graph.batchnorm_inference_variance_ext(p.x, p.mean, p.variance, p.scale, p.bias, EPSILON, node)
    outputs(y)
    p.graph.build(bench.handle)
    given = given_to(p, inputs)
    (got,) = bench.run(p.graph, given, [y])
    judge(expect(problem, inputs), "y", got, bench)


# ---------------------------------------------------------------- intermediate data types


def test_an_intermediate_that_would_be_rounded_once_more_is_refused(bench):
    """float32 between two batch norms of bfloat16 data: no primitive holds it, so it is not done silently."""
    problem = problem_of(Operation.FORWARD_INFERENCE, DataType.BFLOAT16, (4, 5, 6, 8), Layout.CHANNELS_FIRST)

    def chain(kind):
        p = Parts(problem, "scale", "bias", "mean", "variance")
        node = BatchnormInferenceAttributesVarianceExt()
        first = p.graph.batchnorm_inference_variance_ext(p.x, p.mean, p.variance, p.scale, p.bias, EPSILON, node)
        if kind is not None:
            first.set_data_type(kind)
        second = p.graph.batchnorm_inference_variance_ext(first, p.mean, p.variance, p.scale, p.bias, EPSILON, node)
        outputs(second)
        p.graph.build(bench.handle)
        return p.graph

    with pytest.raises(pybnorm.UnsupportedError, match=r"stored in bf16.*set its data type to bf16"):
        chain(None)
    assert chain("bfloat16").get_workspace_size() > 0


def test_sum_of_two_batch_norms(bench):
    """One of them is added before rounding, the other is rounded before: refused unless it says so."""
    problem = problem_of(Operation.FORWARD_INFERENCE, DataType.BFLOAT16, (4, 5, 6, 8), Layout.CHANNELS_FIRST)
    for kind in (None, "bfloat16"):
        p = Parts(problem, "scale", "bias", "mean", "variance")
        arguments = (p.mean, p.variance, p.scale, p.bias, EPSILON, BatchnormInferenceAttributesVarianceExt())
        a = p.graph.batchnorm_inference_variance_ext(p.x, *arguments)
        b = p.graph.batchnorm_inference_variance_ext(p.data("x2"), *arguments)
        outputs(p.graph.relu(p.graph.add(a, b)))
        if kind is None:
            with pytest.raises(pybnorm.UnsupportedError, match="rounded once more"):
                p.graph.build(bench.handle)
        elif bench.handle.backend != "miopen":
            a.set_data_type(kind)
            p.graph.build(bench.handle)


def test_workspace_is_what_virtual_tensors_take(bench):
    problem = problem_of(Operation.FORWARD_INFERENCE, DataType.FLOAT32, (4, 5, 6, 8), Layout.CHANNELS_FIRST)
    sizes = []
    for relu in (False, True):
        p = Parts(problem, "scale", "bias", "mean", "variance")
        node = BatchnormInferenceAttributesVarianceExt()
        y = p.graph.batchnorm_inference_variance_ext(p.x, p.mean, p.variance, p.scale, p.bias, EPSILON, node)
        outputs(p.graph.relu(y) if relu else y)
        p.graph.build(bench.handle)
        sizes.append(p.graph.get_workspace_size())
    assert sizes[1] - sizes[0] >= 4 * np.prod(problem.dims)


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
    problem = problem_of(
        Operation.FORWARD_INFERENCE, DataType.FLOAT32, (4, 5, 6, 8), Layout.CHANNELS_FIRST, eps=EPSILON
    )
    inputs = generate(problem)
    p = Parts(problem, "scale", "bias", "mean", "variance")
    epsilon = TensorAttributes(EPSILON)
    node = BatchnormInferenceAttributesVarianceExt()
    y = p.graph.batchnorm_inference_variance_ext(p.x, p.mean, p.variance, p.scale, p.bias, epsilon, node)
    outputs(y)
    p.graph.build(bench.handle)
    epsilon.set_value(100.0)
    node.set_name("later")
    given = given_to(p, inputs)
    (got,) = bench.run(p.graph, given, [y])
    judge(expect(problem, inputs), "y", got, bench)


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


def wrong(argument, change, dims=(4, 5, 6, 8)):
    """A training graph spoilt by `change` is refused by validate with this argument."""
    graph, t = training(floats(), dims)
    change(graph, t)
    with pytest.raises(ArgumentError) as info:
        graph.validate()
    assert argument in info.value.argument, info.value
    with pytest.raises(ArgumentError, match="described"):
        graph.get_workspace_size()


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
        (
            "graph",
            lambda g, t: (
                [v.set_output(False) for v in t.values()][:0]
                or [t[n].set_output(True) for n in ("x", "scale", "bias", "prev_mean", "prev_variance")]
            ),
        ),
        ("compute_data_type", lambda g, t: g.set_compute_data_type("half")),
    ],
)
def test_wrong_graphs(argument, change):
    wrong(argument, change)


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


def test_what_is_no_communicator_is_refused():
    wrong("x of bn", lambda g, t: None, dims=(1, 5, 1, 1))
    with pytest.raises(ArgumentError, match="communicator"):
        floats().set_communicator("MPI_COMM_WORLD")


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
    with pytest.raises(ArgumentError):
        PointwiseAttributes().set_mode("tanh")
    with pytest.raises(ArgumentError):
        PointwiseAttributes().set_mode(2.5)


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


def test_missing_and_unknown_uids(built):
    for name in ("x", "scale", "out", "next_mean", "prev_variance"):
        pack = dict(built.pack)
        del pack[built.uid(name)]
        error = refused(built, "variant_pack", pack)
        assert f"no entry for {built.uid(name)} " in str(error)
    refused(built, "variant_pack", {**built.pack, 12345: built.pack[built.uid("x")]})
    refused(built, "variant_pack", {**built.pack, "x": built.pack[built.uid("x")]})
    refused(built, "variant_pack", {**built.pack, Tensor(): built.pack[built.uid("x")]})
    refused(built, "variant_pack", [built.pack])
    refused(built, "(x)", {**built.pack, built.t["x"]: built.pack[built.uid("x")]})


def test_virtual_tensors_and_scalars_take_no_memory(built):
    error = refused(
        built, f"variant_pack[{built.uid('y')}]", {**built.pack, built.uid("y"): built.pack[built.uid("x")]}
    )
    assert "virtual" in str(error)
    scalar = next(uid for uid, record in built.graph._by_uid.items() if record is None)
    error = refused(built, "variant_pack", {**built.pack, scalar: built.pack[built.uid("x")]})
    assert "by value" in str(error)


def test_memory_must_be_what_the_tensor_says(built):
    place = built.device.from_numpy
    x, scale, out = built.uid("x"), built.uid("scale"), built.uid("out")
    for uid, array in [
        (x, np.ones((4, 5, 6, 7), np.float32)),
        (x, np.ones((4, 5, 48), np.float32)),
        (x, np.ones((3, 5, 6, 8), np.float32)),  # of the right strides
        (x, np.ones((4, 5, 6, 8), np.float16)),
        (x, np.moveaxis(np.ones((4, 6, 8, 5), np.float32), -1, 1)),
        (scale, np.ones(6, np.float32)),
        (scale, np.ones(5, np.float64)),
        (scale, np.ones((5, 2), np.float32)[:, 0]),
    ]:
        refused(built, f"variant_pack[{uid}]", {**built.pack, uid: place(array)})
    for value in (0, None, "x", object()):
        refused(built, f"variant_pack[{x}]", {**built.pack, x: value})
    refused(built, f"variant_pack[{x}]", {**built.pack, x: built.pack[x].pointer + 2})
    refused(built, f"variant_pack[{out}]", {**built.pack, out: built.pack[out]._replace(writable=False)})
    other = 2 if built.handle.library.device_type == 1 else 1
    refused(built, f"variant_pack[{x}]", {**built.pack, x: built.pack[x]._replace(device_type=other)})


def test_overlaps(built):
    x, out, mean = built.uid("x"), built.uid("out"), built.uid("mean")
    refused(built, "OUT_0", {**built.pack, out: built.pack[x]})
    refused(built, "MEAN", {**built.pack, mean: built.pack[built.uid("scale")]})
    refused(built, "bn::", {**built.pack, mean: built.pack[built.uid("inv_variance")]})
    refused(built, "bn::", {**built.pack, built.uid("next_mean"): built.pack[built.uid("prev_variance")]})
    # An output where the workspace is.
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
def logger():
    root = logging.getLogger("pybnorm")
    level, handlers = root.level, list(root.handlers)
    yield root
    root.setLevel(level)
    root.handlers[:] = handlers


def test_log_level_by_variable(monkeypatch, logger, caplog):
    for word, level in (("off", 51), ("info", logging.INFO), ("WARN", logging.WARNING), ("error", logging.ERROR)):
        monkeypatch.setenv("PYBNORM_LOG_LEVEL", word)
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
    """Values in steps of 1/4, the clips among them, and large ones: exact, for every result is representable."""
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
        want = np.where(wide >= upper, 0, np.where(wide > lower, given, slope * given))
    else:
        want = np.minimum(np.where(wide > lower, wide, lower + slope * (wide - lower)), upper)
    np.testing.assert_array_equal(got, want.astype(NUMPY[dtype]))


@pytest.mark.parametrize("clipped", [False, True])
def test_a_virtual_float32_before_clips_would_be_rounded_first(bench, clipped):
    """Rounding and ReLU commute; rounding and a clip that is no value of the type do not."""
    p = Parts(problem_of(Operation.FORWARD_INFERENCE, DataType.FLOAT16, (4, 5, 6, 8), LAYOUTS[0]), "m", "v", "s", "b")
    p.graph.set_intermediate_data_type("float")
    y = p.graph.batchnorm_inference(p.x, p.m, p.v, p.s, p.b, BatchnormInferenceAttributes())
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
