"""Random calls of the public API, each a function of (seed, index) alone.

A call starts as a good one, on the arrays of a `Problem`; then none, one or two of its arguments are replaced by
something that must be refused whatever the others are. What a good call must do is judged by the reference and the
bounds of `pybnorm.check`.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import decimal
import fractions
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pybnorm
from pybnorm import Activation, Capability, DataType, Layout, Mode, Operation, TensorDescriptor, operations, reference
from pybnorm._arrays import Buffer, as_buffer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from test_calls import NO_BLENDING, PARAMETERS, Case, bytes_of, expected_axpby, expected_support, stores_of

from pybnorm.check.judging import bounds
from pybnorm.check.language import calls
from pybnorm.check.language.problem import Problem

TRAIN, INFER, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD
SMALL = [(6, 5), (4, 3, 7), (3, 4, 4, 6), (1, 4, 5, 5), (2, 3, 2, 3, 4)]  # one work group: see ci/miopen-on-cpu
# Few of them: MIOpen compiles a kernel for each. 13x13 and 35x35 are shapes that MIOpen 3.4 gets wrong in backward.
SHAPES = [*SMALL, (2, 3, 13, 13), (1, 2, 35, 35)]
NATIVE = {DataType.FLOAT64: np.float64, DataType.FLOAT32: np.float32, DataType.FLOAT16: np.float16}
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
SCALARS = {
    TRAIN: ("alpha", "beta"),
    INFER: ("alpha", "beta"),
    BACKWARD: ("alpha", "beta", "alpha_param", "beta_param"),
}
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

    def __init__(self, kind: str, level: str, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.kind, self.level, self.call, self.arguments = kind, level, call, arguments
        self.case: Case | None = None
        self.kept: list[Any] = []  # memory that must outlive the call
        self.changed: list[str] = []
        self.outputs: tuple[str, ...] = ()
        self.support: bool | None = True
        self.activated = False  # its results are judged, and its workspace asked for, in tests/backends/test_activation
        self.judge: Callable[[Call, Any], str] = lambda call, result: "returned"

    def __str__(self) -> str:
        shown = ", ".join(f"{n}={_shown(v)}" for n, v in self.arguments.items())
        return f"{self.kind} on {self.level}, changed {self.changed or 'nothing'}: ({shown})"


def _shown(value: Any) -> str:
    if isinstance(value, Buffer):
        kind = f"{value.dtype.short} dims={value.dims} strides={value.strides} device={value.device_type}"
        return f"<{kind} at {value.pointer:#x}{'' if value.writable else ' read-only'}>"
    if isinstance(value, np.ndarray):
        return f"<numpy {value.dtype} {value.shape}>"
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


class Maker:
    """Makes calls for one backend."""

    def __init__(self, backend: str, seed: int, handle: pybnorm.Handle | None, device: Any) -> None:
        self.backend, self.seed, self.handle, self.device = backend, seed, handle, device
        self.closed = None
        if handle is not None:
            self.closed = pybnorm.Handle(backend)
            self.closed.close()
        self.closed_descriptor = TensorDescriptor(backend, "f32", (2, 3))
        self.closed_descriptor.close()
        self.foreign = [TensorDescriptor("native", "f32", (2, 3))] * (backend != "native")

    def make(self, index: int) -> Call:
        """The call of that index."""
        rng = np.random.default_rng((self.seed, index))
        call = self.good(rng)
        if call.level == "arrays" and call.kind in dir(pybnorm.Handle) and rng.random() < 0.02:
            call.call, call.changed = getattr(self.closed, call.kind), ["self"]
        for _ in range(rng.choice(3, p=(0.4, 0.5, 0.1))):
            self.change(call, rng)
        return call

    def good(self, rng: np.random.Generator) -> Call:
        """A call of which nothing is changed."""
        if self.handle is None:
            kinds, weights = (self.describe, self.derive), (0.6, 0.4)
        else:
            kinds = (self.batch_norm, self.elementwise, self.size, self.derive, self.describe, self.operation)
            weights = (0.5, 0.16, 0.08, 0.06, 0.08, 0.12)
        return kinds[rng.choice(len(kinds), p=weights)](rng)

    # -------- batch norm

    def problem(self, rng: np.random.Generator) -> Problem:
        operation = pick(rng, (TRAIN, INFER, BACKWARD))
        mode = pick(rng, (Mode.SPATIAL,) * 5 + (Mode.PER_ACTIVATION,) * 4 + (Mode.SPATIAL_PERSISTENT,))
        dtype = pick(rng, (DataType.FLOAT32,) * 5 + (DataType.FLOAT16, DataType.BFLOAT16) * 2 + (DataType.FLOAT64,))
        dims = pick(rng, SHAPES)
        options: dict[str, Any] = {"fill": pick(rng, ("randn", "exact")), "saved": bool(rng.integers(2))}
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

    def batch_norm(self, rng: np.random.Generator) -> Call:
        problem = self.problem(rng)
        case = Case(self.handle, problem)
        arrays = named(case)
        if rng.integers(2) and self.device.device_type == 1:
            arrays = {n: as_numpy(b) for n, b in arrays.items()}  # the same memory, as NumPy's arrays
        operation, level = problem.operation, pick(rng, ("arrays", "addresses"))
        support = supported(self.backend, problem)
        need = 0
        if support is not False:
            try:
                need = size_of(case)
            except pybnorm.UnsupportedError:
                if support:
                    raise
                support = False
        space = self.device.empty_bytes(need) if need else None
        lent = (space.pointer, space.nbytes) if space and (self.device.device_type != 1 or rng.integers(2)) else None
        options = calls.options(problem)
        if level == "arrays":
            name = calls.METHODS[operation]
            arguments = {**arrays, **options, "workspace": lent}
            call = Call(name, level, getattr(self.handle, name), arguments)
        else:
            if space is None:
                space, lent = None, None
            else:
                lent = (space.pointer, space.nbytes)  # calls on addresses have no memory of the handle's
            arguments = {"handle": self.handle, **case.addresses(), **options}
            arguments |= {"workspace": lent[0] if lent else 0, "workspace_size": lent[1] if lent else 0}
            name = f"batch_normalization_{operation.name.lower()}"
            call = Call(name, level, getattr(pybnorm, name), arguments)
        call.case, call.support, call.kept, call.outputs = case, support, [space, arrays], OUTPUTS[operation]
        call.judge = lambda c, result: judged(c.case)
        if rng.random() < 0.1:
            self.activate(call, problem, rng)
        return call

    def activate(self, call: Call, problem: Problem, rng: np.random.Generator) -> None:
        """Give the call a good activation, which a backend without `Capability.ACTIVATION` must refuse."""
        call.arguments |= pick(rng, ACTIVATIONS)
        if problem.operation == BACKWARD:
            call.arguments["bias"] = call.arguments["scale"]
        layout = layout_of(problem.dims, problem.strides)
        bits, _ = pybnorm.capability(
            self.backend, problem.operation, problem.mode, problem.dtype, layout, len(problem.dims)
        )
        call.activated = Capability.ACTIVATION in bits
        call.support = None if call.activated else False

    # -------- elementwise

    def elementwise(self, rng: np.random.Generator) -> Call:
        kind = pick(rng, ("axpby", "fill", "relu", "relu_backward"))
        dtype, dims = pick(rng, list(DataType)), pick(rng, SMALL)
        names = {"axpby": ("x", "y"), "fill": ("y",), "relu": ("x", "y"), "relu_backward": ("x", "dy", "dx")}[kind]
        order = strides_of(rng, dims)
        orders = [order if rng.random() < 0.7 else strides_of(rng, dims) for _ in names]
        values = [reference.round_to(rng.normal(0, 1, dims), numpy_of(dtype)) for _ in names]
        a, b = pick(rng, ((1.0, 0.0), (2.0, -0.5), (0.0, 1.0), (-1.5, 0.0)))
        if kind != "axpby" or b == 0:
            values[-1] = np.full(dims, np.nan, numpy_of(dtype))
        buffers = {n: self.device.from_numpy(strided(v, s)) for n, v, s in zip(names, values, orders, strict=True)}
        level = pick(rng, ("arrays", "addresses"))
        arguments: dict[str, Any] = {"axpby": {"a": a, "b": b}, "fill": {"value": 0.1}}.get(kind, {})
        if level == "arrays":
            arguments = {**arguments, **buffers}
            function = getattr(self.handle, kind)
        else:
            function = getattr(pybnorm, kind)
            arguments = {"handle": self.handle, **arguments}
            for name, buffer in buffers.items():
                described = TensorDescriptor(self.backend, dtype, buffer.dims, buffer.strides)
                arguments |= {f"{name}_desc": described, name: buffer.pointer}
        call = Call(kind, level, function, arguments)
        strides = [b.strides for b in buffers.values()]
        call.support = elementwise_support(self.backend, kind, dtype, strides, dims, (a, b))
        call.kept = [buffers]
        if kind == "axpby" and call.support and self.device.device_type != 1:
            described = [TensorDescriptor(self.backend, dtype, b.dims, b.strides) for b in buffers.values()]
            need = self.handle.workspace_size("axpby", described[0], y_desc=described[1], alpha=a, beta=b)
            if need:
                space = self.device.empty_bytes(need)
                named = {"workspace": space.pointer, "workspace_size": space.nbytes}
                arguments |= named if level == "addresses" else {"workspace": (space.pointer, space.nbytes)}
                call.kept.append(space)
        call.outputs = names[-1:]
        right = elementwise_right(kind, dict(zip(names, values, strict=True)), a, b, dtype)
        call.judge = lambda c, result: elementwise_judged(self.device, buffers[names[-1]], right, kind, self.backend)
        return call

    # -------- queries

    def size(self, rng: np.random.Generator) -> Call:
        problem = self.problem(rng)
        descriptor = TensorDescriptor(self.backend, problem.dtype, problem.dims, problem.strides)
        arguments: dict[str, Any] = {"operation": problem.operation, "x_desc": descriptor, "mode": problem.mode}
        arguments |= {"alpha": problem.alpha, "beta": problem.beta, "epsilon": problem.epsilon}
        arguments |= {"running": problem.running, "saved": problem.saved}
        if problem.operation == BACKWARD:
            arguments |= {"alpha_param": problem.alpha_param, "beta_param": problem.beta_param}
        call = Call("workspace_size", "descriptors", self.handle.workspace_size, arguments)
        call.support = supported(self.backend, problem)
        call.judge = lambda c, result: expect(isinstance(result, int) and result >= 0, f"size {result!r}")
        return call

    def derive(self, rng: np.random.Generator) -> Call:
        dtype, dims = pick(rng, list(DataType)), pick(rng, [*SHAPES, (2, 3, 2, 2, 2, 2), (3, 2, 1, 1, 1, 1, 1, 4)])
        mode = pick(rng, list(Mode))
        descriptor = TensorDescriptor(self.backend, dtype, dims, strides_of(rng, dims))
        call = Call("derive_bn_tensor_descriptor", "descriptors", pybnorm.derive_bn_tensor_descriptor, {})
        call.arguments = {"x_desc": descriptor, "mode": mode}
        call.support = self.backend == "cudnn" or (
            mode != Mode.SPATIAL_PERSISTENT and not (self.backend == "miopen" and dtype == DataType.FLOAT64)
        )
        wide = DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32
        wanted = wide, parameter_dims(dims, mode)
        call.judge = lambda c, result: expect((result.dtype, result.dims) == wanted, f"derived {result!r}")
        return call

    def describe(self, rng: np.random.Generator) -> Call:
        dims = tuple(int(v) for v in rng.integers(1, 9, rng.integers(2, 9)))
        dtype, strides = pick(rng, list(DataType)), strides_of(rng, dims)
        call = Call("TensorDescriptor", "descriptors", TensorDescriptor, {})
        call.arguments = {"backend": self.backend, "dtype": dtype, "dims": dims, "strides": strides}
        call.support = None if self.backend == "onednn" else True  # oneDNN has an ordering rule of its own
        call.judge = lambda c, result: expect(
            result.query() == (dtype, dims, strides), f"described as {result.query()}"
        )
        return call

    # -------- the array level's operations

    def operation(self, rng: np.random.Generator) -> Call:
        problem = self.problem(rng)
        while problem.mode == Mode.SPATIAL_PERSISTENT:
            problem = self.problem(rng)
        case = Case(self.handle, problem)
        arrays, options = named(case), calls.options(problem)
        options.pop("mode")
        rank = len(problem.dims)
        options["axis"] = 1 if problem.mode == Mode.SPATIAL else tuple(range(1, rank))
        name = calls.METHODS[problem.operation]
        space = None
        if self.device.device_type != 1:
            try:
                size = operations.workspace_size(self.handle, name, **arrays, **options)
                space = self.device.empty_bytes(size) if size else None
            except pybnorm.UnsupportedError:
                pass
        arguments = {"handle": self.handle, **arrays, **options}
        arguments["workspace"] = (space.pointer, space.nbytes) if space else None
        call = Call(f"operations.{name}", "arrays", getattr(operations, name), arguments)
        call.case, call.kept = case, [space]
        # Views and copies make more possible than one call of the vendor's; that nothing is lost is tested elsewhere.
        call.support = None
        call.outputs = OUTPUTS[problem.operation]
        call.judge = lambda c, result: judged(c.case)
        return call

    # -------- changes

    def change(self, call: Call, rng: np.random.Generator) -> None:
        """Replace one argument by one that must be refused."""
        name = pick(rng, [n for n in call.arguments if n not in call.changed])
        call.arguments[name] = made(pick(rng, self.replacements(call, name, call.arguments[name])))
        call.changed.append(name)

    def replacements(self, call: Call, name: str, old: Any) -> Any:
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

    def absent(self, call: Call, name: str) -> tuple[None, ...]:
        """None where an argument is needed, as one of a pair is while there is the other one."""
        pair = next((p for pairs in PAIRS.values() for p in pairs if name in p), ())
        free = call.kind.startswith("operations.") and name in ("scale", "bias", "dx", "dscale", "dbias")
        return () if free or set(pair) & set(call.changed) or call.arguments[name] is None else (None,)

    @staticmethod
    def would_overlap(call: Call, name: str, other: str) -> bool:
        """Whether an argument must not be another one's memory."""
        if other == name or other in call.changed or {name, other} in IN_PLACE or call.arguments[other] is None:
            return False
        return name in call.outputs or other in call.outputs

    def other_workspaces(self, call: Call, old: Any) -> Any:
        if call.level == "addresses":
            return -1, 2**64, "w", True, 1.5, object
        start, size = old if isinstance(old, tuple) else (64, 0)
        wrong = [(0, 64), (-1, 5), (start, -1), "w", (start, True), (start,), (start, 2**64), 3, object]
        if call.kind.startswith("operations."):  # which do not look at memory that they do not need
            return wrong
        good = (buffer_of(v) for n, v in call.arguments.items() if n not in call.changed)
        return [*wrong, (2**64 - 64, 64), (next(buffer.pointer for buffer in good if buffer), max(size, 64))]

    def other_descriptors(self, call: Call, old: Any) -> Any:
        """No descriptors; and, where it must agree with others, one that describes no more memory than there is."""
        others = [n for n in call.arguments if n.endswith("_desc")]
        wrong: list[Any] = [None, 3, self.closed_descriptor]
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
                wrong += [TensorDescriptor(self.backend, dtype, shape)] if shape != dims or dtype != old.dtype else []
        return wrong

    def other_arrays(self, call: Call, name: str, old: Any, others: list[Any]) -> list[Any]:
        old = buffer_of(old)
        if old is None:
            return list(NO_ARRAYS)
        dims, strides, device = old.dims, old.strides, self.device.device_type
        data, alone = name in DATA, not any(n in DATA and n != name for n in call.arguments)
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
        if not (data and call.kind.startswith("operations.")):
            choices.append(old._replace(dims=dims[:1], strides=strides[:1]))
        held = data and not alone and not set(DATA) & set(call.changed)  # against data that are as they were
        for at, length in enumerate(dims):
            sizes = [-1, 2**31] if call.kind.startswith("operations.") else [0, -1, 2**31]
            steps = [0, -1, 2**31, 10**30] if length > 1 else []
            if length > 1 and not data:
                sizes, steps = [*sizes, length - 1], [*steps, 2 * strides[at]]
            elif length > 1 and held:
                sizes.append(length - 1)
            choices += [old._replace(dims=(*dims[:at], d, *dims[at + 1 :])) for d in sizes]
            choices += [old._replace(strides=(*strides[:at], s, *strides[at + 1 :])) for s in steps]
        if sum(d > 1 for d in dims) > 1:
            choices.append(old._replace(strides=(1,) * len(dims)))
        if held or not (data or call.kind.startswith("operations.")):
            choices.append(old._replace(dtype=DataType.FLOAT16 if old.dtype != DataType.FLOAT16 else DataType.BFLOAT16))
        if held and name in call.outputs:  # one element on is no call in place
            alike = [buffer_of(call.arguments[n]) for n in DATA if n in call.arguments and n != name]
            choices += [b._replace(pointer=b.pointer + b.dtype.itemsize) for b in alike if b]
        return choices


def buffer_of(value: Any) -> Buffer | None:
    """What an array says of itself; None if it is none."""
    return as_buffer(value, "x") if isinstance(value, np.ndarray) else value if isinstance(value, Buffer) else None


def parameter_dims(dims: tuple[int, ...], bn_mode: Mode) -> tuple[int, ...]:
    return tuple(d if i == 1 or (i > 1 and bn_mode == Mode.PER_ACTIVATION) else 1 for i, d in enumerate(dims))


def pick(rng: np.random.Generator, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def made(value: Any) -> Any:
    return object() if value is object else value


def expect(right: bool, text: str) -> str:
    assert right, text
    return "right"


def numpy_of(dtype: DataType) -> Any:
    from pybnorm.check.language import data

    return data.numpy_dtype(dtype)


def strides_of(rng: np.random.Generator, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Packed channels first or last, or with a gap after the last axis."""
    order = [0, *range(2, len(dims)), 1] if rng.random() < 0.25 else list(range(len(dims)))
    strides, step = [0] * len(dims), 1
    gap = int(rng.random() < 0.15)
    for axis in reversed(order):
        strides[axis] = step
        step *= dims[axis] + gap
        gap = 0
    return tuple(strides)


def strided(values: Any, strides: tuple[int, ...]) -> Any:
    span = 1 + sum((d - 1) * s for d, s in zip(values.shape, strides, strict=True))
    memory = np.zeros(span, values.dtype)
    view = np.lib.stride_tricks.as_strided(memory, values.shape, [s * values.itemsize for s in strides])
    view[...] = values
    return view


def as_numpy(buffer: Buffer) -> Any:
    """A NumPy array of the same memory on the CPU; bfloat16, which NumPy has not, as it is."""
    if buffer.dtype not in NATIVE:
        return buffer
    import ctypes

    size = 1 + sum((d - 1) * s for d, s in zip(buffer.dims, buffer.strides, strict=True))
    memory = (ctypes.c_char * (size * buffer.dtype.itemsize)).from_address(buffer.pointer)
    flat = np.frombuffer(memory, NATIVE[buffer.dtype])
    return np.lib.stride_tricks.as_strided(flat, buffer.dims, [s * flat.itemsize for s in buffer.strides])


def named(case: Case) -> dict[str, Buffer]:
    """The case's arrays by the names of `Handle`'s arguments."""
    return {**case.given, **case.made}


def size_of(case: Case) -> int:
    memory = case.workspace(case.descriptors())
    return memory.nbytes if memory is not None else 0


# ---------------------------------------------------------------- what a backend must be able to do


def layout_of(dims: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    for layout, order in (
        (Layout.CHANNELS_FIRST, range(len(dims))),
        (Layout.CHANNELS_LAST, [0, *range(2, len(dims)), 1]),
    ):
        step, packed = 1, True
        for axis in reversed(list(order)):
            packed = packed and (dims[axis] == 1 or strides[axis] == step)
            step *= dims[axis]
        if packed:
            return layout
    return Layout.STRIDED


def supported(backend: str, problem: Problem) -> bool | None:
    layout = layout_of(problem.dims, problem.strides)
    support = expected_support(backend, problem.operation, problem.mode, problem.dtype, layout)
    if layout == Layout.STRIDED:
        support = False if backend == "miopen" else None if support else support
    if support and problem.beta != 0 and (backend, problem.dtype) in NO_BLENDING:
        return False
    return support


def elementwise_support(
    backend: str, kind: str, dtype: DataType, strides: list[tuple[int, ...]], dims: tuple[int, ...],
    factors: tuple[float, float],
) -> bool | None:  # fmt: skip
    layouts = {layout_of(dims, s) for s in strides}
    if backend in ("onednn", "native"):
        return True  # plain C in the adapter
    if backend == "cudnn":
        return True if len(layouts) == 1 else None
    if kind == "fill":
        return dtype != DataType.FLOAT64
    if kind == "axpby":
        return expected_axpby(backend, dtype, *factors)
    if len(layouts) > 1 or Layout.STRIDED in layouts:
        return False
    return dtype in (DataType.FLOAT32, DataType.FLOAT16)


# ---------------------------------------------------------------- results


def judged(case: Case) -> str:
    """Every output within its bound, or a known defect; every gap and every input as it was."""
    case.device.synchronize()
    verdicts = []
    for output in case.expected.outputs:
        got = case.device.to_numpy(case.made[output])
        verdicts.append(bounds.judge(case.expected, output, got.reshape(case.made[output].dims)))
        raw, used = bytes_of(got)
        assert (raw[~used] == 0xA5).all(), f"wrote into the gaps of {output}"
    case.unchanged(case.given)
    failed = [v for v in verdicts if v.status not in (bounds.Status.PASS, bounds.Status.WARN)]
    if not failed:
        return "warned" if any(v.status == bounds.Status.WARN for v in verdicts) else "right"
    from pybnorm.check.judging import known_defects as defects

    library = case.handle.library
    problems = [case.problem, dataclasses.replace(case.problem, strides=())]  # operations copy what the vendor has not
    known = next(filter(None, (defects.explain(library.backend, library.version, p, verdicts) for p in problems)), ())
    assert known, f"{case.problem}: {[str(v) for v in failed]}"
    return "known " + ", ".join(d.id for d in known)


def elementwise_right(kind: str, values: dict[str, Any], a: float, b: float, dtype: DataType) -> tuple[Any, Any, Any]:
    """What is right, and the two terms that are added."""
    wide = {n: v.astype(np.float64) for n, v in values.items()}
    zero = np.zeros_like(next(iter(wide.values())))
    if kind == "axpby":
        left, right = a * wide["x"], b * wide["y"] if b else zero
    elif kind == "fill":
        left, right = zero + reference.round_to(np.array(0.1), numpy_of(dtype)).astype(np.float64), zero
    elif kind == "relu":
        left, right = np.maximum(wide["x"], 0), zero
    else:
        left, right = np.where(wide["x"] > 0, wide["dy"], 0), zero
    return left + right, left, right


def elementwise_judged(device: Any, buffer: Buffer, right: tuple[Any, Any, Any], kind: str, backend: str) -> str:
    device.synchronize()
    got = device.to_numpy(buffer).astype(np.float64)
    value, left, other = right
    error = np.abs(got - value)
    if kind != "axpby":
        assert (error == 0).all(), f"{kind}: off by {error.max()}"
        return "right"
    p = bounds.precision(buffer.dtype)
    bound = 2 * p.u * (np.abs(left) + np.abs(other)) + p.u_out * np.abs(value)
    bound = bound * (1 + 4 * p.u_out) + p.tiny_out
    if stores_of(backend, buffer.dtype).terms:
        bound = bound + p.u_out * (1 + p.u_out) * (np.abs(left) + np.abs(other))
    assert (error <= bound).all(), f"axpby: error / bound = {(error / bound).max()}"
    return "right"
