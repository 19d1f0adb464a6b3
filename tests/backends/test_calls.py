"""One suite for every backend that can execute: the reference and the a-priori bound judge each output.

What a backend must be able to do is written down here (`expected_support`), so that lost coverage is a failure and
a refusal is checked like a result: UnsupportedError with a reason, outputs untouched.
"""

import ctypes
import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest
from place import device_of
from tables import table

import pybnorm
from pybnorm import Capability, DataType, Layout, Mode, Operation, _arguments
from pybnorm.check.judging import bounds
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language import calls, data
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem

LAYOUTS = [Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST]
SHAPES = [(6, 5), (4, 3, 7), (4, 5, 6, 7), (2, 3, 2, 3, 4)]
OPERATIONS = [Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD]
PARAMETERS = {operation: [t.name for t in calls.TENSORS[operation] if not t.data] for operation in OPERATIONS}
SENTINEL = 0xA5


def expected_support(backend, operation, mode, dtype, layout):
    """Whether a backend must execute a combination of rank 2 to 5; None where it depends on the machine."""
    if backend == "cudnn":
        return True
    if mode == Mode.SPATIAL_PERSISTENT:
        return False
    if backend.startswith("native"):
        return True
    if dtype == DataType.FLOAT64:
        return False
    if backend == "onednn":
        return True
    if layout == Layout.CHANNELS_LAST:  # MIOpen: spatial, and until 3.4 training and backward only
        return mode == Mode.SPATIAL and (
            operation != Operation.FORWARD_INFERENCE or pybnorm.load(backend).version >= (3, 5)
        )
    return True


BLENDS = Capability.BLEND_NATIVE | Capability.BLEND_SCRATCH

NO_BLENDING = {
    # miopenOpTensor, MIOpen's only addition, has no bfloat16 kernel: its OpenCL source does not compile for that type.
    ("miopen", DataType.BFLOAT16),
}
"""Where beta other than 0 on y or dx must be refused although batch norm with beta = 0 runs; axpby but copies."""


def expected_axpby(backend, dtype, a, b):
    """Say whether a backend must compute axpby; None where it depends on the machine."""
    if (backend, dtype) in NO_BLENDING:
        return (a, b) == (1.0, 0.0)
    if backend == "miopen":
        return dtype != DataType.FLOAT64
    return True if backend == "cudnn" else None


class Stores(NamedTuple):
    """How a backend's y, dx and axpby results reach memory."""

    last: int = 1
    """What the store may move a value by, in unit roundoffs of its type: 1 is rounding to nearest, 2 truncation."""
    terms: bool = False
    """Both terms of a blend are rounded to the type before they are added."""


STORES = {
    # MIOpen 3.4's kernels cut the lower half of the float32 off: of 360 values of y each was the truncated one, and
    # 185 the nearest. test_a_store_rounds_or_truncates sees it, and fails for a MIOpen that rounds.
    ("miopen", DataType.BFLOAT16): Stores(last=2),
    # MIOpen's batch norm takes alpha = 1, beta = 0 only, and miopenOpTensor computes in the type of its tensors. With
    # l = alpha * result and r = beta * prior, l is rounded when it is stored in the workspace, r as a product, and
    # l + r once more: u (|l| + |E|) + u |r| + u |l + r|, where only the last is in the common bound. In axpby l is a
    # product, too. test_a_blend_rounds_once_or_more sees it.
    ("miopen", DataType.FLOAT16): Stores(terms=True),
}
"""The backends whose stores are coarser than one rounding to nearest, which every other one is held to."""


def stores_of(backend, dtype):
    return STORES.get((backend, dtype), Stores())


def rounded_terms(stores, u, left, right, bound):
    """What rounding both terms adds to the bound of left + right; `bound` holds the error of left.

    An error of a term is in the rounded sum (1 + u) times; underflow (2**-25) is far below the bound's 2**-14. The
    tests' factors are numbers of the type, so that rounding them costs nothing.
    """
    return u * (1 + u) * (np.abs(left) + np.abs(right) + bound) if stores.terms else 0.0


class Expected(bounds.Expected):
    """What is right, with the common bounds but for what STORES says of the backend."""

    def __init__(self, problem, inputs):
        super().__init__(problem, inputs)
        self.stores = stores_of("miopen", problem.dtype)
        self.common = self.precision
        self.precision = self.common._replace(u_out=self.stores.last * self.common.u_out)

    def parts(self, output, got, classes):
        for part in super().parts(output, got, classes):
            if output in ("y", "dx") and self.problem.beta != 0:
                right = self.problem.beta * self.inputs.prior[part.index].astype(np.float64)
                left = part.reference - right
                wider = [
                    (bound + rounded_terms(self.stores, self.common.u_out, left, right, bound), undecided)
                    for bound, undecided in part.classes
                ]
                part = dataclasses.replace(part, classes=wider)
            yield part


class Case:
    """A problem's arrays on a backend's device, and the call on them at either level."""

    def __init__(self, handle, problem, strides=None, device=None, inputs=None):
        self.handle, self.problem = handle, problem
        self.device = device or device_of(handle)
        self.inputs = inputs or data.generate(problem)
        own = (handle.backend, problem.dtype) in STORES
        self.expected = (Expected if own else bounds.expect)(problem, self.inputs)
        steps = strides or {}
        self.given, self.made = {}, {}
        for tensor in calls.tensors(problem):
            dims, dtype = calls.kind(problem, tensor)
            nothing = np.full(dims, np.nan, data.numpy_dtype(dtype))
            values = getattr(self.inputs, tensor.values) if tensor.values else nothing
            (self.made if tensor.written else self.given)[tensor.name] = self.place(values, steps.get(tensor.name))
        self.before = {name: self.device.to_numpy(b) for name, b in {**self.given, **self.made}.items()}

    def place(self, array, strides=None):
        """A copy on the device; data in the problem's strides (or the given ones), gaps filled with a sentinel."""
        if array.shape != self.problem.dims or (array.shape == self.problem.parameter_dims and strides is None):
            return self.device.from_numpy(np.ascontiguousarray(array))
        steps = strides or self.problem.strides
        memory = np.full(_arguments.span(array.shape, steps) * array.itemsize, SENTINEL, np.uint8)
        view = np.ndarray(array.shape, array.dtype, memory, strides=[s * array.itemsize for s in steps])
        view[...] = array
        return self.device.from_numpy(view)

    def workspace(self, descriptors):
        p = self.problem
        size = self.handle.workspace_size(
            p.operation,
            descriptors["x"],
            **{f"{n}_desc": descriptors[n] for n in ("y", "dy", "dx") if n in descriptors},
            **calls.workspace_options(p),
            **calls.activation_options(p),
        )
        return self.device.empty_bytes(size) if size else None

    def descriptors(self):
        data_buffers = {n: b for n, b in {**self.given, **self.made}.items() if n in ("x", "y", "dy", "dx")}
        return {
            n: pybnorm.TensorDescriptor(self.handle.backend, b.dtype, b.dims, b.strides)
            for n, b in data_buffers.items()
        }

    def run_arrays(self, sized=True):
        """The upper level: arrays. Without `sized` the workspace's size is not asked for."""
        memory = self.workspace(self.descriptors()) if sized else None
        call = getattr(self.handle, calls.METHODS[self.problem.operation])
        workspace = (memory.pointer, memory.nbytes) if memory else None
        call(**self.given, **self.made, **calls.options(self.problem), workspace=workspace)

    def run_addresses(self, sized=True):
        """The lower level: descriptors and addresses. Without `sized` the workspace's size is not asked for."""
        memory = self.workspace(self.descriptors()) if sized else None
        space = {"workspace": memory.pointer, "workspace_size": memory.nbytes} if memory else {}
        call = getattr(pybnorm, f"batch_normalization_{self.problem.operation.name.lower()}")
        call(self.handle, **self.addresses(), **calls.options(self.problem), **space)

    def planned(self, algorithm=None):
        """A plan, and what calls it."""
        arrays, p = {**self.given, **self.made}, self.problem
        like = {n: arrays[n] for n in ("x", "y", "dy", "dx") if n in arrays}
        if p.residual:
            like["z"] = arrays.get("z", arrays.get("dz"))
        if p.operation == Operation.BACKWARD:
            like.pop("y", None)
        stated = calls.stated(p)
        make = getattr(self.handle, f"plan_{calls.METHODS[p.operation]}")
        plan = make(**like, **stated, **calls.options(p) | {"algorithm": algorithm})
        space = self.device.empty_bytes(plan.workspace_size) if plan.workspace_size else None
        return plan, functools.partial(plan, **arrays, workspace=space)

    def outputs(self):
        """The written arrays, as bytes by name."""
        self.device.synchronize()
        return {name: self.device.to_numpy(array).tobytes() for name, array in self.made.items()}

    def run_plan(self, algorithm=None):
        """By a plan, which is returned."""
        plan, run = self.planned(algorithm)
        run()
        return plan

    def addresses(self):
        """Descriptors, and the addresses of all that the call on addresses takes: None of what is absent."""
        described = self.descriptors()
        arguments = {f"{n}_desc": descriptor for n, descriptor in described.items()}
        wide = DataType.FLOAT64 if self.problem.dtype == DataType.FLOAT64 else DataType.FLOAT32
        dims = self.problem.parameter_dims
        arguments["param_desc"] = pybnorm.TensorDescriptor(self.handle.backend, wide, dims)
        return (
            arguments
            | dict.fromkeys(PARAMETERS[self.problem.operation])
            | {n: b.pointer for n, b in {**self.given, **self.made}.items()}
        )

    def verdicts(self):
        """The verdict on each output; every gap and every input is as it was."""
        self.device.synchronize()
        found = []
        for output in self.expected.outputs:
            got = self.device.to_numpy(self.made[output])
            found.append(bounds.judge(self.expected, output, got.reshape(self.expected.outputs[output].shape)))
            raw, used = bytes_of(got)
            assert (raw[~used] == SENTINEL).all(), f"{self.problem}: wrote into the gaps of {output}"
        self.unchanged(self.given)
        return found

    def judge(self, allowed=(Status.PASS,)):
        """Every output within bound."""
        for verdict in self.verdicts():
            assert verdict.status in allowed, f"{self.problem}: {verdict}"
            assert verdict.elements > 0

    def unchanged(self, names):
        for name in names:
            now = self.device.to_numpy({**self.given, **self.made}[name])
            assert (bytes_of(now)[0] == bytes_of(self.before[name])[0]).all(), f"{self.problem}: {name} was changed"


def bytes_of(view):
    """The bytes from the first to the last element, and which of them belong to elements."""
    size = view.itemsize + sum((d - 1) * s for d, s in zip(view.shape, view.strides, strict=True))
    used = np.zeros(size, bool)
    raw = np.frombuffer(ctypes.string_at(view.ctypes.data, size), np.uint8)
    offsets = sum(np.ix_(*[np.arange(d) * s for d, s in zip(view.shape, view.strides, strict=True)])).ravel()
    for byte in range(view.itemsize):
        used[offsets + byte] = True
    return raw, used


def problem_of(operation, mode, dtype, layout, dims, **options):
    if operation != Operation.FORWARD_TRAINING:
        options.pop("running", None)
        options.pop("factor", None)
    if operation == Operation.FORWARD_INFERENCE:
        options.pop("saved", None)
    if operation != Operation.BACKWARD:
        options = {k: v for k, v in options.items() if not k.endswith("_param")}
    return Problem(operation, mode, dtype, dims, _arguments.packed_strides(dims, layout), **options)


def supported(handle, problem):
    """Whether to run; what is written down as supported must be, and what is not must be refused."""
    bits, reason = pybnorm.capability(
        handle.backend, problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
    )
    must = expected_support(handle.backend, problem.operation, problem.mode, problem.dtype, problem.layout)
    assert must is None or must == bool(bits), f"{problem}: {reason}"
    if not bits:
        return False
    assert bool(bits & BLENDS) == ((handle.backend, problem.dtype) not in NO_BLENDING), f"{problem}: {bits!r}"
    again = stores_of(handle.backend, problem.dtype).terms and Capability.BLEND_SCRATCH in bits
    assert (Capability.BLEND_ROUNDS in bits) == again, f"{problem}: {bits!r}"
    return problem.beta == 0 or bool(bits & BLENDS)


def refused(case, run):
    """With a reason, when the workspace is asked for and when the call is made; nothing is written."""
    for attempt in (lambda: case.workspace(case.descriptors()), lambda: run(case, sized=False)):
        with pytest.raises(pybnorm.UnsupportedError) as info:
            attempt()
        assert info.value.text
        assert info.value.status < 0
        case.device.synchronize()
        case.unchanged({**case.given, **case.made})


def execute(handle, problem, level, strides=None, allowed=(Status.PASS,)):
    case = Case(handle, problem, strides)
    run = Case.run_arrays if level == "arrays" else Case.run_addresses
    if supported(handle, problem):
        run(case)
        case.judge(allowed)
    else:
        refused(case, run)


@pytest.mark.parametrize("level", ["arrays", "addresses"])
@pytest.mark.parametrize("fill", ["exact", "randn"])
@pytest.mark.parametrize("dims", SHAPES, ids=lambda d: "x".join(map(str, d)))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", list(DataType), ids=lambda v: v.short)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda v: v.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_plain(handle, operation, mode, dtype, layout, dims, fill, level):
    """alpha = 1, beta = 0 over NaN priors."""
    execute(handle, problem_of(operation, mode, dtype, layout, dims, fill=fill), level)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.5), (-0.5, 0.0), (0.0, 1.0), (1.0, -1.0)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", list(DataType), ids=lambda v: v.short)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda v: v.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_blending(handle, operation, mode, dtype, layout, alpha, beta):
    """alpha and beta of data and parameters, each pair different from the other; beta = 0 over NaN."""
    options = {"alpha": alpha, "beta": beta, "alpha_param": beta + 0.25, "beta_param": alpha, "fill": "randn"}
    problem = problem_of(operation, mode, dtype, layout, (4, 5, 6, 7), **options)
    execute(handle, problem, "arrays")
    execute(handle, problem, "addresses")


LINES = [
    # Each pair of statistics given or absent; the running variance is unbiased (m is small enough to tell).
    "train,spatial/peract/persistent,f32,nchw,5x3x2x2,fill=randn,running=0/1,saved=0/1",
    "train,spatial/peract/persistent,f32,nchw,16x1x4x4,fill=randn,factor=0/1",
    "backward,spatial/peract/persistent,f32/f64/f16/bf16,nchw,4x5x6x8,fill=randn,kappa=3,saved=0,eps=0.01",
    "backward,spatial/peract/persistent,f32/f64/f16/bf16,nhwc,4x5x6x8,fill=randn,saved=0,eps=0.01",
    "backward,spatial/peract/persistent,f32/f16,nchw,6x5,fill=randn,saved=0,eps=0.01",
    "train/infer,spatial,f32,nchw,4x5x6x8,fill=randn,eps=0/1e-7/0.001/1",
    "backward,spatial,f32,nchw,4x5x6x8,fill=randn,eps=0/1e-7/0.001/1,saved=0",
    # Higher ranks are folded.
    "train/infer/backward,spatial/peract,f32,nchw,2x3x2x3x2x2,fill=randn",
    "train/infer/backward,spatial/peract,f32,nhwc,2x3x2x1x2x2x2,fill=randn",
    "train/infer/backward,spatial/peract,f32,nchw/nhwc,2x3x1x2x2x1x2x2,fill=randn",
]


@table("problem", [problem for line in LINES for problem in expand(line)])
def test_statistics_epsilon_and_ranks(handle, problem):
    execute(handle, problem, "arrays")


GAPPED = {
    "rows": lambda d: (d[1] * d[2] * (d[3] + 2), d[2] * (d[3] + 2), d[3] + 2, 1),
    "images": lambda d: (d[1] * d[2] * d[3] + 8, d[2] * d[3], d[3], 1),
    "every other": lambda d: tuple(2 * s for s in _arguments.packed_strides(d)),
    "hw swapped": lambda d: (d[1] * d[2] * d[3], d[2] * d[3], 1, d[2]),
    "cn swapped": lambda d: (d[2] * d[3], d[0] * d[2] * d[3], d[3], 1),
    "nhwc channel slice": lambda d: (d[2] * d[3] * (d[1] + 3), 1, d[3] * (d[1] + 3), d[1] + 3),
}


def right_or_refused(case, has_it):
    """Right and inside its own elements, or refused with a reason; never a wrong value or a touched gap."""
    try:
        case.run_arrays()
    except pybnorm.UnsupportedError as error:
        assert error.text
        assert not has_it
        case.unchanged({**case.given, **case.made})
    else:
        case.judge()


@pytest.mark.parametrize("view", GAPPED)
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.BFLOAT16], ids=lambda v: v.short)
@pytest.mark.parametrize("mode", [Mode.PER_ACTIVATION, Mode.SPATIAL], ids=lambda v: v.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_strided_views(handle, operation, mode, dtype, view):
    dims = (4, 5, 6, 8)
    problem = Problem(operation, mode, dtype, dims, GAPPED[view](dims), fill="randn")
    right_or_refused(Case(handle, problem), handle.backend == "cudnn")  # which takes every one of these


@pytest.mark.parametrize("other", [("y", "dy"), ("dx",), ("dy", "dx")], ids="+".join)
@pytest.mark.parametrize("mode", [Mode.PER_ACTIVATION, Mode.SPATIAL], ids=lambda v: v.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
def test_layouts_may_differ_between_the_arrays(handle, operation, mode, other):
    dims = (4, 5, 6, 8)
    problem = problem_of(operation, mode, DataType.FLOAT32, LAYOUTS[0], dims, fill="randn")
    last = _arguments.packed_strides(dims, Layout.CHANNELS_LAST)
    right_or_refused(Case(handle, problem, dict.fromkeys(other, last)), handle.backend != "miopen")


@pytest.mark.parametrize("dtype", list(DataType), ids=lambda v: v.short)
@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (2.0, -0.5), (0.0, 1.0), (-1.5, 1.0)])
@pytest.mark.parametrize("y_layout", LAYOUTS, ids=lambda v: v.name)
def test_axpby(handle, dtype, a, b, y_layout):
    dims, kind, device = (3, 4, 5, 6), data.numpy_dtype(dtype), device_of(handle)
    bits, reason = pybnorm.capability(handle.backend, "axpby", Mode.SPATIAL, dtype, Layout.CHANNELS_FIRST, 4)
    rng = np.random.default_rng(1)
    x = rng.standard_normal(dims).astype(kind)
    prior = (rng.standard_normal(dims) if b else np.full(dims, np.nan)).astype(kind)
    last = np.ascontiguousarray(prior.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    xb, yb = (device.from_numpy(v) for v in (x, last if y_layout == Layout.CHANNELS_LAST else prior))
    must = expected_axpby(handle.backend, dtype, a, b)
    assert not must or bits, reason

    def sized():
        described = [pybnorm.TensorDescriptor(handle.backend, t.dtype, t.dims, t.strides) for t in (xb, yb)]
        return handle.workspace_size("axpby", described[0], y_desc=described[1], alpha=a, beta=b)

    if must is False or not bits:
        for attempt in (lambda: handle.axpby(a, xb, b, yb), sized):
            with pytest.raises(pybnorm.UnsupportedError) as info:
                attempt()
            assert info.value.text
            assert info.value.status < 0
        device.synchronize()
        assert np.array_equal(device.to_numpy(yb), prior, equal_nan=True)
        return
    size = sized()
    packed = handle.backend == "miopen" and y_layout != Layout.CHANNELS_FIRST and (a, b) != (1.0, 0.0)
    assert size == (-(-x.nbytes // 256) * 256 * (2 if b else 1) if packed else 0)
    handle.axpby(a, xb, b, yb, workspace=device.empty_bytes(size) if size else None)
    device.synchronize()
    got = device.to_numpy(yb).astype(np.float64)
    left, right = a * x.astype(np.float64), b * prior.astype(np.float64) if b else 0.0
    precision, stores = bounds.precision(dtype), stores_of(handle.backend, dtype)
    bound = 2 * precision.u * (np.abs(left) + np.abs(right)) + precision.tiny_out
    bound += stores.last * precision.u_out * np.abs(left + right)
    if b:
        bound = bound + rounded_terms(stores, precision.u_out, left, right, 0.0)
    assert (np.abs(got - (left + right)) <= bound).all()


def constant_result(handle, operation, dtype, value, **options):
    """y or dx of a call whose unblended result is plus and minus `value`, a float32 number, without any rounding.

    Forward, x is its mean and the bias is the value; backward, x is its mean, dy is plus and minus 1 and the scale is
    the value, so that dbias and dscale are 0.
    """
    kind = data.numpy_dtype(dtype)
    x = np.zeros((2, 2, 2, 2), kind)
    sign = np.array([1, -1]).reshape(1, 2, 1, 1) * np.ones(x.shape)
    if operation == Operation.BACKWARD:
        sign *= np.array([1, -1]).reshape(2, 1, 1, 1)
    prior = (options.pop("prior", np.nan) * sign).astype(kind)
    device = device_of(handle)
    out, zero, one = device.from_numpy(prior), np.zeros((1, 2, 1, 1), np.float32), np.ones((1, 2, 1, 1), np.float32)
    b = {n: device.from_numpy(a) for n, a in {"x": x, "dy": sign.astype(kind), "zero": zero, "one": one}.items()}
    made = [device.from_numpy(np.full_like(zero, np.nan)) for _ in range(2)]
    memory = device.empty_bytes(4096)
    options["workspace"] = memory.pointer, memory.nbytes
    if operation == Operation.BACKWARD:
        scale = device.from_numpy(np.full_like(one, value))
        handle.backward(
            b["x"], b["dy"], scale, out, *made, saved_mean=b["zero"], saved_inv_variance=b["one"], **options
        )
    else:
        bias = device.from_numpy((value * np.array([1, -1])).astype(np.float32).reshape(1, 2, 1, 1))
        if operation == Operation.FORWARD_TRAINING:
            handle.forward_training(b["x"], b["one"], bias, out, **options)
        else:
            handle.forward_inference(b["x"], b["one"], bias, b["zero"], b["one"], out, **options)
    device.synchronize()
    return device.to_numpy(out).astype(np.float64) * sign


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16], ids=lambda v: v.short)
def test_a_store_rounds_or_truncates(handle, dtype, operation):
    """As STORES says: three quarters of a unit above 1 are 1 when truncated, and a unit above 1 when rounded."""
    if not pybnorm.capability(handle.backend, operation, Mode.SPATIAL, dtype, LAYOUTS[0], 4)[0]:
        assert expected_support(handle.backend, operation, Mode.SPATIAL, dtype, LAYOUTS[0]) is None
        return
    unit = 2 * bounds.precision(dtype).u_out
    got = constant_result(handle, operation, dtype, 1 + 0.75 * unit)
    truncates = stores_of(handle.backend, dtype).last == 2
    assert (got == (1 if truncates else 1 + unit)).all(), got
    assert (constant_result(handle, operation, dtype, 1 + 0.25 * unit) == 1).all()


@pytest.mark.parametrize("operation", [*OPERATIONS, Operation.AXPBY], ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16], ids=lambda v: v.short)
def test_a_blend_rounds_once_or_more(handle, dtype, operation):
    """As STORES says: 1 + 3/8 of a unit, and again 3/8, are 1 + a unit; but 1 where the first is rounded alone."""
    bits, _ = pybnorm.capability(handle.backend, operation, Mode.SPATIAL, dtype, LAYOUTS[0], 4)
    if (handle.backend, dtype) in NO_BLENDING:  # axpby of these copies
        assert not bits & (BLENDS | Capability.BLEND_ROUNDS)
        return
    assert (Capability.BLEND_ROUNDS in bits) == bool(stores_of(handle.backend, dtype).terms), f"{bits!r}"
    unit = 2 * bounds.precision(dtype).u_out
    if operation == Operation.AXPBY:  # the product is 1 + (8 + j) units + 3/8 of one
        device, kind, j = device_of(handle), data.numpy_dtype(dtype), 0.375 / unit / 8
        x, y = (device.from_numpy(np.full((2, 3), v).astype(kind)) for v in (1 + 8 * unit, 0.375 * unit))
        handle.axpby(1 + j * unit, x, 1.0, y)
        device.synchronize()
        got = device.to_numpy(y).astype(np.float64) - (8 + j) * unit
    else:
        got = constant_result(handle, operation, dtype, 1 + 0.375 * unit, beta=1.0, prior=0.375 * unit)
    once, more = 1 + unit, 1.0
    assert (got == (more if stores_of(handle.backend, dtype).terms else once)).all(), got


def test_one_element_per_statistic(handle):
    """m = 1: y is the bias, the saved deviation is 1/sqrt(epsilon), and nothing is NaN."""
    problem = problem_of(
        Operation.FORWARD_TRAINING, Mode.SPATIAL, DataType.FLOAT32, LAYOUTS[0], (1, 5, 1, 1),
        running=False, fill="randn", eps=0.01,
    )  # fmt: skip
    weak = pybnorm.known_defects(handle.backend, problem, handle.library.version)  # MIOpen 3.5: mad() leaves x^2 - x^2
    allowed = (Status.PASS, Status.WARN) if any(d.id == "miopen-one-pass-variance" for d in weak) else (Status.PASS,)
    execute(handle, problem, "arrays", allowed=allowed)


def test_a_nan_stays_in_its_channel(handle):
    problem = problem_of(
        Operation.FORWARD_TRAINING, Mode.SPATIAL, DataType.FLOAT32, LAYOUTS[0], (4, 5, 6, 8), fill="randn"
    )
    case = Case(handle, problem)
    x = case.inputs.x.copy()
    x[1, 2, 3, 4] = np.nan
    case.given["x"] = case.place(x)
    case.run_arrays()
    case.device.synchronize()
    y = case.device.to_numpy(case.made["y"])
    assert np.isnan(y[:, 2]).all()
    assert np.isfinite(np.delete(y, 2, axis=1)).all()
