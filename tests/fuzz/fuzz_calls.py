"""Random calls of the public API, each a function of (seed, index) alone.

A call starts as a good one, on the arrays of a `Problem`, and one or two of its arguments are then changed, most often
to something that must be refused. What it is in the end is not the generator's word but `fuzz_rules`', which looks at
the arguments; what a good call must do is judged by the reference and the bounds of `pybnorm.check`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_rules as rules
import numpy as np
from fuzz_rules import Unsure

import pybnorm
from pybnorm import Activation, Capability, DataType, Layout, Mode, Operation, TensorDescriptor, operations, reference
from pybnorm._arrays import Buffer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

from test_calls import NO_BLENDING, Case, bytes_of, expected_axpby, expected_support, stores_of

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
PARAMETERS = {
    TRAIN: ("scale", "bias", "running_mean", "running_variance", "saved_mean", "saved_inv_variance"),
    INFER: ("scale", "bias", "running_mean", "running_variance"),
    BACKWARD: ("scale", "dscale", "dbias", "saved_mean", "saved_inv_variance"),
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
BAD_NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e39, -1e39, 10**400, None, "1", True, [1.0], 1j, object]
NO_ARRAYS = [None, 3, "x", [1.0], object, 1.0, b"x" * 64, {}]


class Call:
    """One call: what is called, with what, what it must do, and how its result is judged."""

    def __init__(self, kind: str, level: str, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.kind, self.level, self.call, self.arguments = kind, level, call, arguments
        self.case: Case | None = None
        self.kept: list[Any] = []  # memory that must outlive the call
        self.changed: list[str] = []
        self.support: bool | None = True
        self.wrong: Callable[[Call], list[str]] = lambda call: []
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

    def make(self, index: int) -> Call:
        """The call of that index."""
        rng = np.random.default_rng((self.seed, index))
        if self.handle is None:
            kinds, weights = (self.describe, self.derive), (0.6, 0.4)
        else:
            kinds = (self.batch_norm, self.elementwise, self.size, self.derive, self.describe, self.operation)
            weights = (0.5, 0.16, 0.08, 0.06, 0.08, 0.12)
        call = kinds[rng.choice(len(kinds), p=weights)](rng)
        if call.level == "arrays" and call.kind in dir(pybnorm.Handle) and rng.random() < 0.02:
            call.call, call.changed = getattr(self.closed, call.kind), ["self"]
            call.wrong = lambda c: ["the handle is closed"]
        for _ in range(rng.choice(3, p=(0.4, 0.5, 0.1))):
            self.change(call, rng)
        return call

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
            call.wrong = lambda c: batch_norm_rules(self.handle, operation, c.arguments, need)
        else:
            if space is None:
                space, lent = None, None
            else:
                lent = (space.pointer, space.nbytes)  # calls on addresses have no memory of the handle's
            arguments = self.on_addresses(case, options, lent)
            name = f"batch_normalization_{operation.name.lower()}"
            call = Call(name, level, getattr(pybnorm, name), arguments)
            call.wrong = lambda c: address_rules(self.handle, operation, c.arguments, need)
        call.case, call.support, call.kept = case, support, [space, arrays]
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
        if Capability.ACTIVATION in bits:  # judged in tests/backends/test_activation.py; its workspace is another
            call.changed.append("activation")
        else:
            call.support = False

    def on_addresses(self, case: Case, options: dict[str, Any], lent: tuple[int, int] | None) -> dict[str, Any]:
        arrays, problem = named(case), case.problem
        described = {
            n: TensorDescriptor(self.backend, b.dtype, b.dims, b.strides) for n, b in arrays.items() if n in DATA
        }
        arguments: dict[str, Any] = {"handle": self.handle, **options}
        for name, descriptor in described.items():
            arguments |= {f"{name}_desc": descriptor, name: arrays[name].pointer}
        dtype = DataType.FLOAT64 if problem.dtype == DataType.FLOAT64 else DataType.FLOAT32
        dims = rules.parameter_dims(problem.dims, problem.mode)
        arguments["param_desc"] = TensorDescriptor(self.backend, dtype, dims)
        arguments |= {n: arrays[n].pointer if n in arrays else None for n in PARAMETERS[problem.operation]}
        return arguments | {"workspace": lent[0] if lent else 0, "workspace_size": lent[1] if lent else 0}

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
        call.wrong = lambda c: elementwise_rules(self.handle, kind, names, c)
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
        call.wrong = lambda c: size_rules(self.handle, c.arguments)
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
        call.wrong = lambda c: [
            *rules.descriptor("x_desc", c.arguments["x_desc"], self.backend),
            *([] if rules.mode(c.arguments["mode"]) is not None else ["mode is none of the three"]),
        ]
        wide = DataType.FLOAT64 if dtype == DataType.FLOAT64 else DataType.FLOAT32
        wanted = wide, rules.parameter_dims(dims, mode)
        call.judge = lambda c, result: expect((result.dtype, result.dims) == wanted, f"derived {result!r}")
        return call

    def describe(self, rng: np.random.Generator) -> Call:
        dims = tuple(int(v) for v in rng.integers(1, 9, rng.integers(2, 9)))
        dtype, strides = pick(rng, list(DataType)), strides_of(rng, dims)
        call = Call("TensorDescriptor", "descriptors", TensorDescriptor, {})
        call.arguments = {"backend": self.backend, "dtype": dtype, "dims": dims, "strides": strides}
        call.support = None if self.backend == "onednn" else True  # oneDNN has an ordering rule of its own
        call.wrong = lambda c: descriptor_rules(c.arguments)
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
        call.wrong = lambda c: operation_rules(self.handle, problem.operation, c.arguments)
        call.judge = lambda c, result: judged(c.case)
        return call

    # -------- changes

    def change(self, call: Call, rng: np.random.Generator) -> None:
        """Replace one argument, most often by one that must be refused."""
        name = pick(rng, [n for n in call.arguments if n not in call.changed])
        old = call.arguments[name]
        new = self.replacement(call, name, old, rng)
        if new is SAME:
            return
        call.arguments[name] = new
        call.changed.append(name)

    def replacement(self, call: Call, name: str, old: Any, rng: np.random.Generator) -> Any:
        if name == "handle":
            return pick(rng, (self.closed, None, "handle", 3, self.handle.pointer))
        if name in ("mode",):
            return made(pick(rng, (7, -1, None, "x", True, 2.5, object, [], 10**30, "SPATIAL", 1)))
        if name in ("operation",):
            return made(pick(rng, (99, None, "none", True, Operation.FILL, "DERIVE", Operation.RELU, object)))
        if name == "backend":
            return made(pick(rng, ("nothing", None, 3, b"cudnn", "", "\\ud800", object)))
        if name == "axis":
            return made(pick(rng, (9, -9, (1, 1), 1.5, "1", True, None, (0, object), 10**30)))
        if name in ("running", "saved") and call.kind == "workspace_size":
            return made(pick(rng, ("yes", 1, None, object)))
        if name == "epsilon":
            return made(pick(rng, [*BAD_NUMBERS, -1e-9, -1]))
        if name == "exponential_average_factor":
            return made(pick(rng, [*BAD_NUMBERS, -0.1, 1.1, -1e-300]))
        if name in ("alpha", "beta", "alpha_param", "beta_param", "a", "b", "value"):
            return made(pick(rng, [*BAD_NUMBERS, 7e4, 3.5e38]))
        if name == "activation":
            return made(pick(rng, (None, 4, -1, "tanh", True, 2.5, object, "none", "clamp")))
        if name in ("activation_low", "activation_high"):
            return made(pick(rng, [*BAD_NUMBERS, -2.0]))
        if name == "workspace_size":
            return made(pick(rng, (-1, 2**64, None, "0", True, 1.5, 8)))
        if name == "workspace" and call.level == "addresses":
            return made(pick(rng, (-1, 2**64, "w", True, 1.5, int(old or 0) + 4, object)))
        if name == "workspace":
            start, size = old if isinstance(old, tuple) and len(old) == 2 else (64, 0)
            overlapping = next(t.pointer for t in map(rules.tensor_of, call.arguments.values()) if t is not None)
            return made(pick(rng, ((0, 64), (start, max(0, size - 1)), (start + 4, size), (-1, 5), (start, -1), "w",
                                   (start, True), (start,), (start, 2**64), 3, (overlapping, max(size, 64)),
                                   (2**64 - 64, 64), object)))  # fmt: skip
        if name == "dtype":
            return made(pick(rng, ("int8", None, 9, "f8", np.int32, True, object, np.dtype(">f4"))))
        if name == "dims":
            lengths = (old[:1], (*old, 2, 2, 2, 2, 2, 2, 2), (), None, 3, "dims")
            return pick(rng, (*lengths, *((first, *old[1:]) for first in (0, -1, 2**31, 1.5, True))))
        if name == "strides":
            at = int(rng.integers(len(old)))
            swapped = [*old[:at], pick(rng, (0, -1, 2**31, 1, 1.5, None, old[at] // 2)), *old[at + 1 :]]
            return made(pick(rng, (tuple(swapped), tuple(swapped), old[:-1], "strides", 3, (*old, 1))))
        if name.endswith("_desc"):
            return self.other_descriptor(old, rng)
        if call.level == "addresses":
            # Other arrays of the call, of the same length: of a shorter one nobody could know that it is.
            alike = {n for names in (DATA, *PARAMETERS.values()) if name in names for n in names}
            others = [v for n, v in call.arguments.items() if n != name and n in alike and v]
            return made(pick(rng, (None, 0, -1, 2**64, "x", 1.5, True, int(old or 64) + 1, *others, object)))
        return self.other_array(call, name, old, rng)

    def other_descriptor(self, old: Any, rng: np.random.Generator) -> Any:
        if not isinstance(old, TensorDescriptor):
            return SAME
        choice = int(rng.integers(6))
        if choice < 3:
            return (None, 3, self.closed_descriptor)[choice]
        dims, dtype = old.dims, old.dtype  # never more memory than there is: a lone descriptor is believed
        if choice == 3:
            dims = (dims[0], dims[1] - 1, *dims[2:]) if dims[1] > 1 else (dims[0], 1)
        elif choice == 4:
            dtype = pick(rng, [d for d in DataType if d != dtype and d.itemsize <= dtype.itemsize] or [dtype])
        else:
            dims = (*dims, 1) if len(dims) < 8 else dims[:-1]
        try:
            return TensorDescriptor(self.backend, dtype, dims)
        except pybnorm.UnsupportedError:
            return None

    def other_array(self, call: Call, name: str, old: Any, rng: np.random.Generator) -> Any:
        tensor = rules.tensor_of(old)
        if tensor is None or rng.random() < 0.15:
            if self.device.device_type == 1 and rng.random() < 0.3:
                return pick(rng, (np.zeros((2, 3), np.int32), np.zeros((2, 3), ">f4"), np.zeros((2, 3), np.complex64)))
            return made(pick(rng, NO_ARRAYS))
        device = self.device.device_type
        old = Buffer(tensor.pointer, tensor.dims, tensor.strides, tensor.dtype, device, -1, True, old)
        others = [v for n, v in call.arguments.items() if n != name and rules.tensor_of(v) is not None]
        dims, strides = tensor.dims, tensor.strides
        at = int(rng.integers(len(dims))) if dims else 0
        smaller = next((i for i, d in enumerate(dims) if d > 1), None)
        choices = [
            old._replace(pointer=old.pointer + 1),
            old._replace(pointer=0),
            old._replace(pointer=-8),
            old._replace(pointer=2**64 - 8),
            old._replace(pointer=2**64),
            old._replace(writable=False),
            old._replace(device_type=2 if device != 2 else 1),
            old._replace(device_type=device, device_id=7),
            old._replace(dims=dims[:1], strides=strides[:1]),
            old._replace(dims=(*dims, *(1,) * 8), strides=(*strides, *(1,) * 8)),
            old._replace(dims=(*dims[:at], 0, *dims[at + 1 :])),
            old._replace(dims=(*dims[:at], -1, *dims[at + 1 :])),
            old._replace(dims=(*dims[:at], 2**31, *dims[at + 1 :])),
            old._replace(dtype=DataType.FLOAT16 if old.dtype != DataType.FLOAT16 else DataType.BFLOAT16),
            *others,
        ]
        if smaller is not None:
            less = (*dims[:smaller], dims[smaller] - 1, *dims[smaller + 1 :])
            choices.append(old._replace(dims=less))
            choices += [
                old._replace(strides=(*strides[:smaller], s, *strides[smaller + 1 :])) for s in (0, -1, 2**31, 10**30)
            ]
            if len([d for d in dims if d > 1]) > 1:
                choices.append(old._replace(strides=(1,) * len(dims)))
        return pick(rng, choices)


SAME = object()


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


# ---------------------------------------------------------------- rules of whole calls


def batch_norm_rules(handle: Any, operation: Operation, arguments: dict[str, Any], need: int) -> list[str]:
    """`Handle.forward_training`, `forward_inference` and `backward`."""
    wrong: list[str] = []
    tensors = {}
    for name in DATA:
        if name in arguments:
            found, tensors[name] = rules.data(name, arguments[name], handle, name in OUTPUTS[operation])
            wrong += found
    bn_mode = rules.mode(arguments["mode"])
    x = tensors["x"]
    if bn_mode is None:
        wrong.append("mode is none of the three")
    wide = x is not None and x.dtype == DataType.FLOAT64
    for name in SCALARS[operation]:
        wrong += rules.scalar(name, arguments[name], wide)
    wrong += rules.epsilon(arguments["epsilon"])
    if operation == TRAIN:
        wrong += rules.factor(arguments["exponential_average_factor"])
    wrong += pairs(operation, arguments)
    wrong += rules.activation(arguments, wide) or rules.activation_bias(arguments, operation == BACKWARD, (None,))
    if wrong or x is None or bn_mode is None:
        return wrong
    for name, tensor in tensors.items():
        if (tensor.dims, tensor.dtype) != (x.dims, x.dtype):
            wrong.append(f"{name} is not like x")
    dims = rules.parameter_dims(x.dims, bn_mode)
    dtype = DataType.FLOAT64 if wide else DataType.FLOAT32
    for name in with_bias(operation, arguments):
        if arguments.get(name) is None and any(name in pair for pair in PAIRS[operation]):
            continue
        found, tensor = rules.param(name, arguments[name], handle, dims, {dtype}, name in OUTPUTS[operation])
        wrong += found
        if tensor is not None:
            tensors[name] = tensor
    m = int(np.prod(x.dims)) // int(np.prod(dims))
    if operation == TRAIN and arguments.get("running_mean") is not None and m == 1:
        wrong.append("one element per statistic with running statistics")
    if wrong:
        return wrong
    found, lent = rules.space(arguments["workspace"], need, handle.library.device_type == 1)
    if found:
        return found
    outputs = {n: t for n, t in tensors.items() if n in OUTPUTS[operation]}
    inputs = {n: t for n, t in tensors.items() if n not in outputs}
    return rules.sharing(outputs | ({"workspace": lent} if lent else {}), inputs)


def with_bias(operation: Operation, arguments: dict[str, Any]) -> tuple[str, ...]:
    """The parameters of a call; backward has a bias with an activation."""
    bias = arguments.get("bias")
    given = operation == BACKWARD and bias is not None and not (type(bias) is int and bias == 0)
    return (*PARAMETERS[operation], *(("bias",) if given else ()))


def pairs(operation: Operation, arguments: dict[str, Any], null: tuple[Any, ...] = (None,)) -> list[str]:
    def absent(name: str) -> bool:
        value = arguments.get(name)
        return any(value is n or (n is not None and type(value) is type(n) and value == n) for n in null)

    return [f"of {a} and {b} one is given" for a, b in PAIRS[operation] if absent(a) != absent(b)]


def address_rules(handle: Any, operation: Operation, arguments: dict[str, Any], need: int) -> list[str]:
    """The calls on addresses."""
    if arguments["handle"] is not handle:
        return ["handle is no open handle"]
    wrong: list[str] = []
    names = [n for n in DATA if n in arguments]
    for name in (*names, "param"):
        wrong += rules.descriptor(f"{name}_desc", arguments[f"{name}_desc"], handle.backend)
    bn_mode = rules.mode(arguments["mode"])
    if bn_mode is None:
        wrong.append("mode is none of the three")
    if wrong:
        return wrong
    described = {n: arguments[f"{n}_desc"] for n in names}
    x, parameter = described["x"], arguments["param_desc"]
    wide = x.dtype == DataType.FLOAT64
    for name in SCALARS[operation]:
        wrong += rules.scalar(name, arguments[name], wide)
    wrong += rules.epsilon(arguments["epsilon"])
    if operation == TRAIN:
        wrong += rules.factor(arguments["exponential_average_factor"])
    wrong += pairs(operation, arguments, (None, 0))
    wrong += rules.activation(arguments, wide) or rules.activation_bias(arguments, operation == BACKWARD, (None, 0))
    for name, descriptor in described.items():
        if (descriptor.dims, descriptor.dtype) != (x.dims, x.dtype):
            wrong.append(f"{name}_desc is not like x's")
    dims = rules.parameter_dims(x.dims, bn_mode)
    if parameter.dims != dims or parameter.dtype != (DataType.FLOAT64 if wide else DataType.FLOAT32):
        wrong.append("param_desc is not the derived one")
    if parameter.strides != rules_packed(parameter.dims):
        wrong.append("param_desc is not packed")
    tensors = {}
    for name in (*names, *with_bias(operation, arguments)):
        value = arguments[name]
        if any(name in pair for pair in PAIRS[operation]) and (value is None or (value == 0 and type(value) is int)):
            continue
        descriptor = described.get(name, parameter)
        found = rules.address(name, value, rules.ITEM[descriptor.dtype])
        wrong += found
        if not found:
            tensors[name] = rules.Tensor(descriptor.dims, descriptor.strides, descriptor.dtype, int(value))
    m = int(np.prod(x.dims)) // int(np.prod(dims))
    if operation == TRAIN and arguments.get("running_mean") and m == 1:
        wrong.append("one element per statistic with running statistics")
    if wrong:
        return wrong
    start, size = arguments["workspace"], arguments["workspace_size"]
    found, lent = rules.space((start, size), need, False)
    if size is None or found:
        return found or ["workspace_size is no number"]
    outputs = {n: t for n, t in tensors.items() if n in OUTPUTS[operation]}
    inputs = {n: t for n, t in tensors.items() if n not in outputs}
    return rules.sharing(outputs | ({"workspace": lent} if lent else {}), inputs)


def rules_packed(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(dims[i + 1 :])) for i in range(len(dims)))


def elementwise_rules(handle: Any, kind: str, names: tuple[str, ...], call: Call) -> list[str]:
    arguments, wrong, tensors = call.arguments, [], {}
    if call.level == "addresses" and arguments["handle"] is not handle:
        return ["handle is no open handle"]
    for name in names:
        if call.level == "arrays":
            found, tensors[name] = rules.data(name, arguments[name], handle, name == names[-1])
            wrong += found
            continue
        descriptor = arguments[f"{name}_desc"]
        found = rules.descriptor(f"{name}_desc", descriptor, handle.backend)
        wrong += found
        if not found:
            found = rules.address(name, arguments[name], rules.ITEM[descriptor.dtype])
            wrong += found
            start = 0 if found else int(arguments[name])
            tensors[name] = rules.Tensor(descriptor.dims, descriptor.strides, descriptor.dtype, start)
    if wrong:
        return wrong
    first = tensors[names[0]]
    wrong += [f"{n} is not like x" for n, t in tensors.items() if (t.dims, t.dtype) != (first.dims, first.dtype)]
    wide = first.dtype == DataType.FLOAT64
    for name in ("a", "b"):
        if name in arguments:
            wrong += rules.scalar(name, arguments[name], wide)
    if kind == "fill":
        number = rules.numbers_of(arguments["value"])
        largest = {DataType.FLOAT16: 65504.0, DataType.BFLOAT16: 255 * 2.0**120}.get(first.dtype, rules.FLOAT32_MAX)
        if number is None or not np.isfinite(number) or (not wide and abs(number) > largest):
            wrong.append("value is no number of the type")
    if wrong:
        return wrong
    outputs = {names[-1]: tensors[names[-1]]}
    if kind == "axpby":
        found, lent = axpby_space(handle, tensors, call)
        if found:
            return found
        outputs |= {"workspace": lent} if lent else {}
    return rules.sharing(outputs, {n: t for n, t in tensors.items() if n != names[-1]})


def axpby_space(handle: Any, tensors: dict[str, Any], call: Call) -> tuple[list[str], Any]:
    """Whether the workspace is one that the call may have."""
    described = [TensorDescriptor(handle.backend, t.dtype, t.dims, t.strides) for t in tensors.values()]
    factors = {"alpha": call.arguments["a"], "beta": call.arguments["b"]}
    try:
        need = handle.workspace_size("axpby", described[0], y_desc=described[1], **factors)
    except pybnorm.UnsupportedError:
        need = 0
    cpu = handle.library.device_type == 1
    if call.level == "arrays":
        return rules.space(call.arguments.get("workspace"), need, cpu)
    return rules.space((call.arguments.get("workspace", 0), call.arguments.get("workspace_size", 0)), need, False)


def size_rules(handle: Any, arguments: dict[str, Any]) -> list[str]:
    wrong = rules.descriptor("x_desc", arguments["x_desc"], handle.backend)
    operation = rules.operation(arguments["operation"])
    if operation not in (TRAIN, INFER, BACKWARD, Operation.AXPBY):
        wrong.append("operation has no workspace")
    wrong += [f"{n} is no bool" for n in ("running", "saved") if not isinstance(arguments[n], bool)]
    if wrong:
        return wrong
    wide = arguments["x_desc"].dtype == DataType.FLOAT64
    wrong += [] if rules.mode(arguments["mode"]) is not None else ["mode is none of the three"]
    for name in ("alpha", "beta", "alpha_param", "beta_param"):
        if name in arguments and (name in ("alpha", "beta") or operation == BACKWARD):
            wrong += rules.scalar(name, arguments[name], wide)
    return wrong + rules.epsilon(arguments["epsilon"])


def descriptor_rules(arguments: dict[str, Any]) -> list[str]:
    dims, strides = arguments["dims"], arguments["strides"]
    wrong = []
    if arguments["backend"] not in pybnorm.backends():
        wrong.append("backend is none of the three")
    if not isinstance(arguments["dtype"], (DataType, str)) or arguments["dtype"] not in (
        *DataType, "f32", "f64", "f16", "bf16",
    ):  # fmt: skip
        wrong.append("dtype is none of the four")
    for name, value in (("dims", dims), ("strides", strides)):
        if not isinstance(value, tuple) or any(type(v) is not int for v in value):
            wrong.append(f"{name} is no sequence of integers")
    return wrong or rules.sizes("dims", dims) or rules.steps("strides", dims, strides, False)


def operation_rules(handle: Any, operation: Operation, arguments: dict[str, Any]) -> list[str]:
    """The operations of the array level: parameters may be narrower, x of any rank, axes any."""
    if arguments["handle"] is not handle:
        return ["handle is no open handle"]
    axis = arguments["axis"]
    given = axis if isinstance(axis, tuple) else (axis,)
    if any(type(a) is not int for a in given):
        return ["axis is no integer"]
    wrong: list[str] = []
    tensors = {}
    outputs = OUTPUTS[operation]
    if operation == BACKWARD and all(arguments[n] is None for n in outputs):
        return ["no output is asked for"]
    for name in DATA:
        if name in arguments and not (name == "dx" and arguments[name] is None):
            tensor = rules.tensor_of(arguments[name])
            if tensor is None:
                return [f"{name} is not an array of the four types"]
            wrong += rules.memory(name, tensor, handle, name in outputs)
            if not 1 <= len(tensor.dims) <= 8 or any(d < 0 or d > rules.INT_MAX for d in tensor.dims):
                wrong.append(f"{name} has no allowed shape")
            elif 0 in tensor.dims:
                raise Unsure
            else:
                wrong += rules.steps(name, tensor.dims, tensor.strides, True)
            tensors[name] = tensor
    if wrong:
        return wrong
    x = tensors["x"]
    rank = len(x.dims)
    if any(not -rank <= a < rank for a in given) or len({a % rank for a in given}) != len(given):
        wrong.append("axis is out of range, or twice")
    wide = x.dtype == DataType.FLOAT64
    for name in SCALARS[operation]:
        wrong += rules.scalar(name, arguments[name], wide)
    wrong += rules.epsilon(arguments["epsilon"])
    if operation == TRAIN:
        wrong += rules.factor(arguments["exponential_average_factor"])
    wrong += pairs(operation, arguments)
    wrong += [f"{n} is not like x" for n, t in tensors.items() if (t.dims, t.dtype) != (x.dims, x.dtype)]
    if wrong:
        return wrong
    kept = {a % rank for a in given}
    dims = tuple(d if a in kept else 1 for a, d in enumerate(x.dims))
    allowed = {DataType.FLOAT64} if wide else {DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16}
    optional = {name for pair in PAIRS[operation] for name in pair}
    names = [n for n in arguments if n in PARAMETERS[operation]]
    for name in names:
        if arguments[name] is None and (name in optional or name in ("scale", "bias", "dscale", "dbias")):
            continue
        found, tensor = rules.param(name, arguments[name], handle, dims, allowed, name in outputs)
        wrong += found
        if tensor is not None:
            tensors[name] = tensor
    m = int(np.prod(x.dims)) // int(np.prod(dims))
    if operation == TRAIN and arguments.get("running_mean") is not None and m == 1:
        wrong.append("one element per statistic with running statistics")
    if wrong:
        return wrong
    need = 0 if arguments["workspace"] is None else 1
    found, lent = rules.space(arguments["workspace"], need and 1, True)
    if found or need:
        if found and not isinstance(arguments["workspace"], tuple):
            return found
        raise Unsure  # how much is needed is asked, not written down here
    written = {n: t for n, t in tensors.items() if n in outputs}
    read = {n: t for n, t in tensors.items() if n not in outputs}
    return rules.sharing(written | ({"workspace": lent} if lent else {}), read)


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
    known = defects.explain(library.backend, library.version, case.problem, verdicts)
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
