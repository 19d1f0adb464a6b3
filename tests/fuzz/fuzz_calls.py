"""Random calls of the public API, each a function of (seed, index) alone.

A call starts as a good one, on the arrays of a `Problem`; then none, one or two of its arguments are replaced by
something that must be refused whatever the others are. What a good call must do is judged by the reference and the
bounds of `pybnorm.check`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import dataclasses
import decimal
import fractions
import os
import sys
import traceback
from pathlib import Path

import numpy as np
from processes import ACCEPTED, RAW

import pybnorm
from pybnorm import (
    Activation,
    Capability,
    DataType,
    Layout,
    Mode,
    Operation,
    TensorDescriptor,
    _arguments,
    devices,
    operations,
    reference,
)
from pybnorm._arrays import Buffer, as_buffer
from pybnorm.errors import WorkspaceError

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from test_calls import NO_BLENDING, PARAMETERS, Case, expected_axpby, expected_support

from pybnorm.check.judging import bounds, known_defects
from pybnorm.check.language import calls
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.language.problem import Problem

TRAIN, INFER, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD
SMALL = [(6, 5), (4, 3, 7), (3, 4, 4, 6), (1, 4, 5, 5), (2, 3, 2, 3, 4)]  # one work group: see ci/miopen-on-cpu
# Few of them: MIOpen compiles a kernel for each. 13x13 and 35x35 are shapes that MIOpen 3.4 gets wrong in backward.
SHAPES = [*SMALL, (2, 3, 13, 13), (1, 2, 35, 35)]
DATA = ("x", "y", "dy", "dx")
OUTPUTS = {
    TRAIN: ("y", "running_mean", "running_variance", "saved_mean", "saved_inv_variance"),
    INFER: ("y",),
    BACKWARD: ("dx", "dscale", "dbias"),
}
PAIRS = {
    TRAIN: (("running_mean", "running_variance"), ("saved_mean", "saved_inv_variance")),
    INFER: (),
    BACKWARD: (("saved_mean", "saved_inv_variance"),),
}
ELEMENTWISE = {"axpby": ("x", "y"), "fill": ("y",), "relu": ("x", "y"), "relu_backward": ("x", "dy", "dx")}
ACTIVATIONS = [
    {"activation": "relu"},
    {"activation": Activation.CLIPPED_RELU, "activation_high": 6.0},
    {"activation": 3, "activation_low": -1.0, "activation_high": 1.0},
]


class Answers:
    """A number that raises an error when it is converted to one."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    __index__ = __iter__ = __float__


NO_NUMBERS = [
    None, "1", True, [1.0], 1j, object, np.True_, b"1", bytearray(b"1"), memoryview(b"1"), array.array("b", b"1"),
    np.void(b"1"), np.array("1"), np.array(b"1"), np.str_("1"), np.array(True), np.array(1, object), {},
    np.datetime64(1, "s"), np.timedelta64(1, "s"), np.array([1.0]), np.ones(3), np.complex64(1 + 5j), np.array(1 + 5j),
    Answers(ZeroDivisionError()), Answers(TypeError()), Answers(RuntimeError()),
]  # fmt: skip
NO_INTEGERS = [*NO_NUMBERS, 1.0, 1.5, np.float32(1), np.array(1), fractions.Fraction(1), decimal.Decimal(1)]
BAD_NUMBERS = [float("nan"), float("inf"), -float("inf"), 10**400, *NO_NUMBERS]
NO_ARRAYS = [3, "x", [1.0], object, 1.0, b"x" * 64, {}]
BAD = {
    "mode": (7, -1, "x", [], 10**30, *NO_INTEGERS),
    "operation": (99, "none", Operation.FILL, "DERIVE", Operation.RELU, *NO_INTEGERS),
    "backend": ("nothing", None, 3, b"cudnn", "", "\\ud800", object),
    "axis": (9, -9, (1, 1), 1.5, "1", True, None, 10**30, *((0, value) for value in NO_INTEGERS)),
    "running": ("yes", 1, None, object),
    "saved": ("yes", 1, None, object),
    "epsilon": (*BAD_NUMBERS, 1e39, -1e-9, -1),
    "exponential_average_factor": (*BAD_NUMBERS, -0.1, 1.1, -1e-300),
    **dict.fromkeys(("alpha", "beta", "alpha_param", "beta_param", "a", "b", "value"), BAD_NUMBERS),
    **dict.fromkeys(("activation_low", "activation_high"), BAD_NUMBERS),
    "activation": (None, 4, -1, "tanh", True, 2.5, object),
    "workspace_size": (-1, 2**64, "0", *NO_INTEGERS),
    "dtype": ("int8", 9, "f8", np.int32, np.dtype(">f4"), *NO_INTEGERS),
}
"""Values that an argument must not have, whatever the others are; `object` stands for a new one."""
IN_PLACE = ({"x", "y"}, {"dx", "dy"})  # some may share memory: tests/backends/test_in_place.py


class Call:
    """One call: what is called, with what, what it must do, and how its result is judged."""

    def __init__(self, kind, level, call, arguments, judge=lambda result: "returned"):
        self.kind, self.level, self.call, self.arguments, self.judge = kind, level, call, arguments, judge
        self.case = None
        self.kept = []  # memory that must outlive the call
        self.changed = []
        self.outputs = ()
        self.support = True  # None: either
        self.activated = False  # its results are judged, and its workspace asked for, in tests/backends/test_activation

    def __str__(self):
        shown = ", ".join(f"{n}={_shown(v)}" for n, v in self.arguments.items())
        return f"{self.kind} on {self.level}, changed {self.changed or 'nothing'}: ({shown})"

    def perform(self, launches=lambda: 0):
        """Make the call; what became of it, in a word or two. AssertionError: something is wrong."""
        launched = launches()
        try:
            result = self.call(**self.arguments)
        except pybnorm.UnsupportedError as error:
            assert error.text, "refused without a reason"
            self.untouched(launches() - launched)
            assert self.changed or self.support is not True, f"refused: {error.text}"
            return "unsupported, and bad" if self.changed else "unsupported"
        except pybnorm.ArgumentError as error:
            assert error.argument, "no argument is named"
            assert error.allowed, "what is allowed is not said"
            self.untouched(launches() - launched)
            known = self.changed or (self.activated and isinstance(error, WorkspaceError))
            assert known, f"good, but refused: {error}"
            return "refused" if self.changed else "refused, its workspace"
        except pybnorm.VendorError as error:
            what = "bad and let through" if self.changed else "the vendor failed"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from None
        assert not self.changed, "bad and accepted"
        assert self.support is not False, "accepted although this backend must refuse it"
        if self.activated:
            self.case.device.synchronize()
            return "accepted, with an activation"
        return self.judge(result)

    def untouched(self, launched=0):
        assert launched == 0, f"{launched} kernels were launched"
        if self.case is not None:
            self.case.device.synchronize()
            self.case.unchanged({**self.case.given, **self.case.made})


def _shown(value):
    if isinstance(value, Buffer):
        kind = f"{value.dtype.short} dims={value.dims} strides={value.strides} device={value.device_type}"
        return f"<{kind} at {value.pointer:#x}{'' if value.writable else ' read-only'}>"
    if isinstance(value, np.ndarray):
        return f"<numpy {value.dtype} {value.shape}>"
    return f"{value!r:.200}"


class Maker:
    """Makes calls for one backend."""

    def __init__(self, seed, backend, handle=None, device=None):
        self.backend, self.seed, self.handle, self.device, self.closed = backend, seed, handle, device, None
        self.tally = collections.Counter()
        self.counters = None
        """How many kernels the rig's HIP runtime was asked for; None on any other machine."""
        self.closed_descriptor = TensorDescriptor(backend, "f32", (2, 3))
        self.closed_descriptor.close()
        self.foreign = [TensorDescriptor("native", "f32", (2, 3))] * (backend != "native")

    def start(self):
        """Open a handle, where there is a device."""
        with contextlib.suppress(pybnorm.NotInitializedError):
            self.handle = pybnorm.Handle(self.backend)
            self.device = devices.device_for(self.handle.library.device_type, self.handle.device or 0)
            if self.device.stream:
                self.handle.set_stream(self.device.stream)
            self.closed = pybnorm.Handle(self.backend)
            self.closed.close()
            if self.backend == "miopen":
                for name in ("libamdhip64.so.7", "libamdhip64.so.6"):  # the one that libMIOpen brought
                    with contextlib.suppress(OSError, AttributeError):
                        self.counters = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD).hipcpuCounters

    def launches(self):
        numbers = [ctypes.c_size_t() for _ in range(3)]
        if self.counters is not None:
            self.counters(*map(ctypes.byref, numbers))
        return numbers[0].value

    def perform(self, index):
        """Make the call of that index; what became of it, and a word of it."""
        try:
            call = self[index]
            became = call.perform(self.launches)
        except Exception as error:
            return RAW, str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        kind = f"{call.kind} on {call.level}"
        self.tally.update([became, f"kind: {kind}", *(f"changed: {kind}, {name}" for name in call.changed)])
        return ACCEPTED, became

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, index))
        call = self.good(rng)
        if call.level == "arrays" and call.kind in dir(pybnorm.Handle) and rng.random() < 0.02:
            call.call, call.changed = getattr(self.closed, call.kind), ["self"]
        for _ in range(rng.choice(3, p=(0.4, 0.5, 0.1))):
            name = pick(rng, [n for n in call.arguments if n not in call.changed])
            call.arguments[name] = made(pick(rng, self.replacements(call, name, call.arguments[name])))
            call.changed.append(name)
        return call

    def good(self, rng):
        """A call of which nothing is changed."""
        if self.handle is None:
            kinds, weights = (self.describe, self.derive), (0.6, 0.4)
        else:
            kinds = (self.batch_norm, self.elementwise, self.size, self.derive, self.describe, self.operation)
            weights = (0.5, 0.16, 0.08, 0.06, 0.08, 0.12)
        return kinds[rng.choice(len(kinds), p=weights)](rng)

    # -------- batch norm

    def problem(self, rng):
        operation = pick(rng, (TRAIN, INFER, BACKWARD))
        mode = pick(rng, (Mode.SPATIAL,) * 5 + (Mode.PER_ACTIVATION,) * 4 + (Mode.SPATIAL_PERSISTENT,))
        dtype = pick(rng, (DataType.FLOAT32,) * 5 + (DataType.FLOAT16, DataType.BFLOAT16) * 2 + (DataType.FLOAT64,))
        dims = pick(rng, SHAPES)
        options = {"fill": pick(rng, ("randn", "exact")), "saved": bool(rng.integers(2))}
        if operation == INFER:
            options.pop("saved")
        if operation == TRAIN:
            m = dims[0] if mode == Mode.PER_ACTIVATION else int(np.prod(dims)) // dims[1]
            options |= {"running": m > 1 and bool(rng.integers(2)), "factor": pick(rng, (0.0, 0.25, 1.0))}
        options["alpha"], options["beta"] = pick(rng, ((1.0, 0.0),) * 3 + ((2.0, 0.5), (-0.5, 0.0), (0.0, 1.0)))
        if operation == BACKWARD:
            options["alpha_param"], options["beta_param"] = pick(rng, ((1.0, 0.0),) * 2 + ((-2.0, 0.5), (0.5, 0.0)))
        strides = strides_of(rng, dims)
        if dims[0] == 1 and mode == Mode.PER_ACTIVATION:  # x looks like its own parameters, which `Case` packs
            strides = ()
        return Problem(operation, mode, dtype, dims, strides, **options)

    def batch_norm(self, rng):
        problem = self.problem(rng)
        case = Case(self.handle, problem)
        arrays = {**case.given, **case.made}
        if rng.integers(2) and self.device.device_type == 1:
            arrays = {n: as_numpy(b) for n, b in arrays.items()}  # the same memory, as NumPy's arrays
        operation, level = problem.operation, pick(rng, ("arrays", "addresses"))
        support, space = supported(self.backend, problem), None
        if support is not False:
            try:
                space = case.workspace(case.descriptors())
            except pybnorm.UnsupportedError:
                if support:
                    raise
                support = False
        lent = (space.pointer, space.nbytes) if space else None
        if level == "arrays":
            if self.device.device_type == 1 and rng.integers(2):
                lent = None  # the handle lends its own
            name = calls.METHODS[operation]
            arguments = {**arrays, **calls.options(problem), "workspace": lent}
            call = Call(name, level, getattr(self.handle, name), arguments)
        else:
            arguments = {"handle": self.handle, **case.addresses(), **calls.options(problem)}
            arguments |= dict(zip(("workspace", "workspace_size"), lent or (0, 0), strict=True))
            name = f"batch_normalization_{operation.name.lower()}"
            call = Call(name, level, getattr(pybnorm, name), arguments)
        call.case, call.support, call.kept, call.outputs = case, support, [space, arrays], OUTPUTS[operation]
        call.judge = lambda result: judged(case)
        if rng.random() < 0.1:
            self.activate(call, problem, rng)
        return call

    def activate(self, call, problem, rng):
        """Give the call a good activation, which a backend without `Capability.ACTIVATION` must refuse."""
        call.arguments |= pick(rng, ACTIVATIONS)
        if problem.operation == BACKWARD:
            call.arguments["bias"] = call.arguments["scale"]
        bits, _ = pybnorm.capability(
            self.backend, problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
        )
        call.activated = Capability.ACTIVATION in bits
        call.support = None if call.activated else False

    # -------- elementwise

    def elementwise(self, rng):
        kind = pick(rng, list(ELEMENTWISE))
        dtype, dims, names = pick(rng, list(DataType)), pick(rng, SMALL), ELEMENTWISE[kind]
        order = strides_of(rng, dims)
        orders = [order if rng.random() < 0.7 else strides_of(rng, dims) for _ in names]
        values = {n: reference.round_to(rng.normal(0, 1, dims), numpy_dtype(dtype)) for n in names}
        a, b = pick(rng, ((1.0, 0.0), (2.0, -0.5), (0.0, 1.0), (-1.5, 0.0)))
        if kind != "axpby" or b == 0:
            values[names[-1]] = np.full(dims, np.nan, numpy_dtype(dtype))
        buffers = {n: self.device.from_numpy(strided(values[n], s)) for n, s in zip(names, orders, strict=True)}
        described = {n: TensorDescriptor(self.backend, dtype, b.dims, b.strides) for n, b in buffers.items()}
        level, arguments = pick(rng, ("arrays", "addresses")), {"axpby": {"a": a, "b": b}, "fill": {"value": 0.1}}
        arguments = dict(arguments.get(kind, {}))
        if level == "arrays":
            call = Call(kind, level, getattr(self.handle, kind), arguments | buffers)
        else:
            for name, buffer in buffers.items():
                arguments |= {f"{name}_desc": described[name], name: buffer.pointer}
            call = Call(kind, level, getattr(pybnorm, kind), {"handle": self.handle, **arguments})
        call.support = elementwise_support(self.backend, kind, dtype, [d.layout for d in described.values()], (a, b))
        call.kept = [buffers]
        if kind == "axpby" and call.support and self.device.device_type != 1:
            need = self.handle.workspace_size("axpby", described["x"], y_desc=described["y"], alpha=a, beta=b)
            if need:
                space = self.device.empty_bytes(need)
                pair = {"workspace": space.pointer, "workspace_size": space.nbytes}
                call.arguments |= pair if level == "addresses" else {"workspace": (space.pointer, space.nbytes)}
                call.kept.append(space)
        call.outputs = names[-1:]
        call.judge = lambda result: elementwise_judged(self.device, kind, values, (a, b), buffers[names[-1]])
        return call

    # -------- queries

    def size(self, rng):
        problem = self.problem(rng)
        descriptor = TensorDescriptor(self.backend, problem.dtype, problem.dims, problem.strides)
        arguments = {"operation": problem.operation, "x_desc": descriptor}
        names = ["mode", "alpha", "beta", "epsilon", "running", "saved"]
        names += ["alpha_param", "beta_param"] * (problem.operation == BACKWARD)
        arguments |= {name: getattr(problem, name) for name in names}
        call = Call("workspace_size", "descriptors", self.handle.workspace_size, arguments)
        call.support = supported(self.backend, problem)
        call.judge = lambda result: expect(isinstance(result, int) and result >= 0, f"size {result!r}")
        return call

    def derive(self, rng):
        dtype, dims = pick(rng, list(DataType)), pick(rng, [*SHAPES, (2, 3, 2, 2, 2, 2), (3, 2, 1, 1, 1, 1, 1, 4)])
        mode = pick(rng, list(Mode))
        arguments = {"x_desc": TensorDescriptor(self.backend, dtype, dims, strides_of(rng, dims)), "mode": mode}
        call = Call("derive_bn_tensor_descriptor", "descriptors", pybnorm.derive_bn_tensor_descriptor, arguments)
        call.support = self.backend == "cudnn" or (
            mode != Mode.SPATIAL_PERSISTENT and not (self.backend == "miopen" and dtype == DataType.FLOAT64)
        )
        wide = DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32
        wanted = wide, _arguments.derived_dims(dims, mode)
        call.judge = lambda result: expect((result.dtype, result.dims) == wanted, f"derived {result!r}")
        return call

    def describe(self, rng):
        dims = tuple(int(v) for v in rng.integers(1, 9, rng.integers(2, 9)))
        dtype, strides = pick(rng, list(DataType)), strides_of(rng, dims)
        arguments = {"backend": self.backend, "dtype": dtype, "dims": dims, "strides": strides}
        call = Call("TensorDescriptor", "descriptors", TensorDescriptor, arguments)
        call.support = None if self.backend == "onednn" else True  # oneDNN has an ordering rule of its own
        call.judge = lambda result: expect(result.query() == (dtype, dims, strides), f"described as {result.query()}")
        return call

    # -------- the array level's operations

    def operation(self, rng):
        problem = self.problem(rng)
        while problem.mode == Mode.SPATIAL_PERSISTENT:
            problem = self.problem(rng)
        case = Case(self.handle, problem)
        arguments = {**case.given, **case.made, **calls.options(problem)}
        arguments.pop("mode")
        arguments["axis"] = 1 if problem.mode == Mode.SPATIAL else tuple(range(1, len(problem.dims)))
        name, space = calls.METHODS[problem.operation], None
        if self.device.device_type != 1:
            with contextlib.suppress(pybnorm.UnsupportedError):
                size = operations.workspace_size(self.handle, name, **arguments)
                space = self.device.empty_bytes(size) if size else None
        arguments["workspace"] = (space.pointer, space.nbytes) if space else None
        call = Call(f"operations.{name}", "arrays", getattr(operations, name), {"handle": self.handle, **arguments})
        call.case, call.kept, call.outputs = case, [space], OUTPUTS[problem.operation]
        # Views and copies make more possible than one call of the vendor's; that nothing is lost is tested elsewhere.
        call.support = None
        call.judge = lambda result: judged(case)
        return call

    # -------- changes

    def replacements(self, call, name, old):
        """Values that must be refused in the argument's place."""
        if name == "handle":
            return self.closed, None, "handle", 3, self.handle.pointer
        if name in BAD:
            return BAD[name]
        if name == "workspace":
            return self.other_workspaces(call, old)
        if name == "dims":
            lengths = (old[:1], (*old, 2, 2, 2, 2, 2, 2, 2), (), None, 3, "dims")
            return *lengths, *((first, *old[1:]) for first in (0, -1, 2**31, *NO_INTEGERS))
        if name == "strides":
            whole = old[:-1], "strides", 3, (*old, 1)
            return *whole, *((first, *old[1:]) for first in (0, -1, 2**31, *NO_INTEGERS))
        if name.endswith("_desc"):
            return self.other_descriptors(call, old)
        absent = self.absent(call, name)
        others = {n: v for n, v in call.arguments.items() if self.would_overlap(call, name, n)}
        if call.level == "addresses":
            # Other arrays of the call, of the same length: of a shorter one nobody could know that it is.
            alike = {n for names in (DATA, *PARAMETERS.values()) if name in names for n in names}
            same = [v for n, v in others.items() if n in alike and v]
            values = [value for value in NO_INTEGERS if value is not None]
            return *absent, *(0 for _ in absent), -1, 2**64, *values, int(old or 64) + 1, *same
        return *absent, *self.other_arrays(call, name, old, [b for b in map(buffer_of, others.values()) if b])

    def absent(self, call, name):
        """None where an argument is needed, as one of a pair is while there is the other one."""
        pair = next((p for pairs in PAIRS.values() for p in pairs if name in p), ())
        free = call.kind.startswith("operations.") and name in ("scale", "bias", "dx", "dscale", "dbias")
        return () if free or set(pair) & set(call.changed) or call.arguments[name] is None else (None,)

    @staticmethod
    def would_overlap(call, name, other):
        """Whether an argument must not be another one's memory."""
        if other == name or other in call.changed or {name, other} in IN_PLACE or call.arguments[other] is None:
            return False
        return name in call.outputs or other in call.outputs

    def other_workspaces(self, call, old):
        if call.level == "addresses":
            return -1, 2**64, "w", True, 1.5, object
        start, size = old if isinstance(old, tuple) else (64, 0)
        wrong = [(0, 64), (-1, 5), (start, -1), "w", (start, True), (start,), (start, 2**64), 3, object]
        if call.kind.startswith("operations."):  # which do not look at memory that they do not need
            return wrong
        good = (buffer_of(v) for n, v in call.arguments.items() if n not in call.changed)
        return [*wrong, (2**64 - 64, 64), (next(buffer.pointer for buffer in good if buffer), max(size, 64))]

    def other_descriptors(self, call, old):
        """No descriptors; and, where it must agree with others, one that describes no more memory than there is."""
        others = [n for n in call.arguments if n.endswith("_desc")]
        wrong = [None, 3, self.closed_descriptor]
        wrong += self.foreign if call.kind != "derive_bn_tensor_descriptor" else []
        if len(others) == 1 or set(others) & set(call.changed):
            return wrong
        dims = old.dims
        smaller = [(old.dtype, (dims[0], max(1, dims[1] - 1), *dims[2:])), (old.dtype, (*dims, 1))]
        smaller += [(d, dims) for d in DataType if d != old.dtype and d.itemsize <= old.dtype.itemsize]
        if call.arguments.get("param_desc") is old:  # of another mode
            smaller.append((old.dtype, call.arguments["x_desc"].dims))
        for dtype, shape in smaller:
            with contextlib.suppress(pybnorm.UnsupportedError):
                wrong += [TensorDescriptor(self.backend, dtype, shape)] if (dtype, shape) != (old.dtype, dims) else []
        return wrong

    def other_arrays(self, call, name, old, others):
        old = buffer_of(old)
        if old is None:
            return list(NO_ARRAYS)
        dims, strides, device = old.dims, old.strides, self.device.device_type
        data, alone = name in DATA, not any(n in DATA and n != name for n in call.arguments)
        operation = call.kind.startswith("operations.")
        pointers = (old.pointer + 1, 0, -8, 2**64 - 8, 2**64)
        choices = [*NO_ARRAYS, *others, *(old._replace(pointer=pointer) for pointer in pointers)]
        choices += [np.zeros((2, 3), kind) for kind in (np.int32, ">f4", np.complex64) if device == 1]
        choices.append(old._replace(device_type=2 if device != 2 else 1))
        if name in call.outputs:
            choices.append(old._replace(writable=False))
        if self.handle.device is not None:
            choices.append(old._replace(device_id=7))
        if data:
            choices.append(old._replace(dims=(*dims, *(1,) * 8), strides=(*strides, *(1,) * 8)))
        if not (data and operation):
            choices.append(old._replace(dims=dims[:1], strides=strides[:1]))
        held = data and not alone and not set(DATA) & set(call.changed)  # against data that are as they were
        for at, length in enumerate(dims):
            sizes = [-1, 2**31] if operation else [0, -1, 2**31]
            steps = [0, -1, 2**31, 10**30] if length > 1 else []
            if length > 1 and not data:
                sizes, steps = [*sizes, length - 1], [*steps, 2 * strides[at]]
            elif length > 1 and held:
                sizes.append(length - 1)
            choices += [old._replace(dims=(*dims[:at], d, *dims[at + 1 :])) for d in sizes]
            choices += [old._replace(strides=(*strides[:at], s, *strides[at + 1 :])) for s in steps]
        if sum(d > 1 for d in dims) > 1:
            choices.append(old._replace(strides=(1,) * len(dims)))
        if held or not (data or operation):
            choices.append(old._replace(dtype=DataType.FLOAT16 if old.dtype != DataType.FLOAT16 else DataType.BFLOAT16))
        if held and name in call.outputs:  # one element on is no call in place
            alike = [buffer_of(call.arguments[n]) for n in DATA if n in call.arguments and n != name]
            choices += [b._replace(pointer=b.pointer + b.dtype.itemsize) for b in alike if b]
        return choices


def buffer_of(value):
    """What an array says of itself; None if it is none."""
    return as_buffer(value, "x") if isinstance(value, np.ndarray) else value if isinstance(value, Buffer) else None


def pick(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def made(value):
    return object() if value is object else value


def expect(right, text):
    assert right, text
    return "right"


def strides_of(rng, dims):
    """Packed channels first or last, or with a gap after the last axis."""
    order = [0, *range(2, len(dims)), 1] if rng.random() < 0.25 else list(range(len(dims)))
    strides, step = [0] * len(dims), 1
    gap = int(rng.random() < 0.15)
    for axis in reversed(order):
        strides[axis] = step
        step *= dims[axis] + gap
        gap = 0
    return tuple(strides)


def strided(values, strides):
    memory = np.zeros(_arguments.span(values.shape, strides), values.dtype)
    view = np.lib.stride_tricks.as_strided(memory, values.shape, [s * values.itemsize for s in strides])
    view[...] = values
    return view


def as_numpy(buffer):
    """A NumPy array of the same memory on the CPU; bfloat16, which NumPy has not, as it is."""
    if buffer.dtype == DataType.BFLOAT16:
        return buffer
    nbytes = _arguments.span(buffer.dims, buffer.strides) * buffer.dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * nbytes).from_address(buffer.pointer), numpy_dtype(buffer.dtype))
    return np.lib.stride_tricks.as_strided(flat, buffer.dims, [s * flat.itemsize for s in buffer.strides])


# ---------------------------------------------------------------- what a backend must be able to do


def supported(backend, problem):
    support = expected_support(backend, problem.operation, problem.mode, problem.dtype, problem.layout)
    if problem.layout == Layout.STRIDED:
        support = False if backend == "miopen" else None if support else support
    if support and problem.beta != 0 and (backend, problem.dtype) in NO_BLENDING:
        return False
    return support


def elementwise_support(backend, kind, dtype, layouts, factors):
    if backend in ("onednn", "native"):
        return True  # plain C in the adapter
    if backend == "cudnn":
        return True if len(set(layouts)) == 1 else None
    if kind == "fill":
        return dtype != DataType.FLOAT64
    if kind == "axpby":
        return expected_axpby(backend, dtype, *factors)
    if len(set(layouts)) > 1 or Layout.STRIDED in layouts:
        return False
    return dtype in (DataType.FLOAT32, DataType.FLOAT16)


# ---------------------------------------------------------------- results


def judged(case):
    """Every output within its bound, or a known defect; every gap and every input as it was."""
    verdicts = case.verdicts()
    failed = [v for v in verdicts if v.status not in (bounds.Status.PASS, bounds.Status.WARN)]
    if not failed:
        return "warned" if any(v.status == bounds.Status.WARN for v in verdicts) else "right"
    library = case.handle.library
    problems = [case.problem, dataclasses.replace(case.problem, strides=())]  # operations copy what the vendor has not
    explained = (known_defects.explain(library.backend, library.version, p, verdicts) for p in problems)
    known = next(filter(None, explained), ())
    assert known, f"{case.problem}: {[str(v) for v in failed]}"
    return "known " + ", ".join(d.id for d in known)


def elementwise_judged(device, kind, values, factors, buffer):
    """Exact; a sum within three roundings of both terms."""
    device.synchronize()
    got = device.to_numpy(buffer).astype(np.float64)
    wide, terms = {n: v.astype(np.float64) for n, v in values.items()}, ()
    if kind == "axpby":
        terms = [f * v for f, v in zip(factors, wide.values(), strict=True) if f]
        right = sum(terms)
    elif kind == "fill":
        right = reference.round_to(np.array(0.1), numpy_dtype(buffer.dtype)).astype(np.float64)
    else:
        right = np.where(wide["x"] > 0, wide["dy" if "dy" in wide else "x"], 0)
    unit = bounds.precision(buffer.dtype)
    bound = sum(3 * unit.u_out * np.abs(term) + unit.tiny_out for term in terms)
    assert (np.abs(got - right) <= bound).all(), f"{kind}: off by {np.abs(got - right).max()}"
    return "right"
