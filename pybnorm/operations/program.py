"""Programs: an operation's primitive calls, checked before the first is made."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pybnorm import _arguments
from pybnorm._arguments import ALIGNMENT
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import SLOT_BITS, CallList, Handle, algorithms, capability, tell_of_defects
from pybnorm._core import Plan as Way
from pybnorm.defects import Call
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, UnsupportedError, WorkspaceError
from pybnorm.operations import ways
from pybnorm.operations.views import Axis, Dims, _pieces, _views

_log = logging.getLogger("pybnorm.operations")


class Derived(NamedTuple):
    """The result of `derive`."""

    dims: Dims
    """Shape of scale, bias and statistics: x's rank, 1 in the reduced axes."""
    data_type: DataType
    """float64 for float64 data, else float32."""


class Plan(NamedTuple):
    """The result of `plan`."""

    operation: str
    nbytes: int
    """Bytes of workspace."""
    calls: tuple[str, ...]
    """The primitive calls in order, such as ``"backward SPATIAL f32 (4, 3, 5) by graph"``; without a way those of the
    entry points."""
    copies: tuple[str, ...]
    """Arrays that are copied because no view of them serves, with the reason."""


def _derived(dims: Dims, kept: Dims) -> Dims:
    return tuple(d if a in kept else 1 for a, d in enumerate(dims))


class _Shape:
    """The statistics of x for a choice of axes: their shape, number and dtype."""

    def __init__(self, x: Buffer, axis: Axis) -> None:
        self.kept = _arguments.axes(axis, len(x.dims))
        self.derived = _derived(x.dims, self.kept)
        self.count = math.prod(self.derived)
        if self.count == 0:
            raise ArgumentError("x", f"dims {x.dims} with axis {axis}", "at least one statistic")
        self.m = math.prod(x.dims) // self.count
        self.dtype = _arguments.derived_data_type(x.dtype)


class _Step(NamedTuple):
    """One primitive call."""

    operation: Operation
    arrays: dict[str, Buffer]
    values: dict[str, Any]
    inner: int
    """Bytes of workspace that the vendor's call asks for."""
    text: str
    way: Way | None = None
    """None: the entry point."""


RECIPES: dict[str, Any] = {}
"""The operations of this package by name, each a `preparation.Recipe`."""
_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)
_RUNNING, _SAVED = ("running_mean", "running_variance"), ("saved_mean", "saved_inv_variance")
_Pair: TypeAlias = "tuple[Buffer, Buffer] | None"


def _named(names: tuple[str, str], pair: _Pair) -> dict[str, Buffer]:
    return dict(zip(names, pair or (), strict=False))


class _Wanted(NamedTuple):
    """A batch-norm call without its data."""

    method: str
    parameters: dict[str, Buffer]
    options: dict[str, Any]


class Program:
    """Checks an operation's arguments, and collects its primitive calls and the scratch memory that they need.

    Collecting executes nothing: if a backend refuses any call, no call was made. The workspace query and the execution
    are the same code. Arrays have addresses of a slot and an offset, as in `CallList`: slot 0 is the workspace, slot
    i + 1 the array argument i. `finish` makes a `Prepared`, which runs at any addresses.

    With `deterministic` only ways are taken whose bits are known to repeat.
    """

    def __init__(self, handle: Handle, *, deterministic: bool = False) -> None:
        self.handle = handle
        # A handle that avoids defects has native's plans, where the library's own call has one.
        several = algorithms(handle.backend) != ("auto", "fast", "plain")
        self.plans = several or handle.known_defects.startswith("avoid")
        self.deterministic = deterministic
        self.device = handle.library.device_type, -1 if handle.device is None else handle.device
        self.steps: list[_Step] = []
        self._asked: list[tuple[Call, list[str], Way | None]] = []  # batch-norm calls, and what they write
        self.copies: list[str] = []
        self.used = 0  # bytes of scratch in use
        self.most = 0  # the same at its highest
        self.inner = 0  # the largest workspace that a call asks for
        self.inputs: list[_arguments.Region] = []
        self.outputs: list[_arguments.Region] = []
        self.known: dict[tuple[float, DataType], Buffer] = {}
        """Vectors of one value that the caller keeps; no call writes them."""
        self._constants: dict[tuple[float, int, DataType], Buffer] = {}
        self._packed: dict[tuple[int, Dims], Buffer] = {}
        self._pending: list[tuple[Buffer, Buffer]] = []
        self._inside = False  # part of another operation, which has noted the arrays

    def then(self, operation: str, *arguments: Any, **options: Any) -> None:
        """Add another operation's calls. The caller has noted the arrays; scratch memory is free again afterwards."""
        recipe = RECIPES[operation]
        outer = self.used, self._constants, self._packed, self._pending, self._inside
        self._constants, self._packed, self._pending, self._inside = {}, {}, [], True
        recipe.make(self, *arguments, **options, **recipe.fixed)
        self._round()
        self.used, self._constants, self._packed, self._pending, self._inside = outer

    # -------- arguments

    def data(
        self, name: str, array: Any, like: Buffer | None = None, other: str = "x", *, output: bool = False,
        empty: bool = False,
    ) -> Buffer:  # fmt: skip
        """Check a data array: x, y, dy or dx. `empty`: axes may have length 0."""
        buffer = self.handle.buffer(array, name, output=output)
        if like is not None:
            if buffer.dims != like.dims:
                raise ArgumentError(name, f"dims {buffer.dims}", f"the dims of {other}, {like.dims}")
            if buffer.dtype != like.dtype:
                raise ArgumentTypeError(
                    name, f"dtype {buffer.dtype.short}", f"the dtype of {other}, {like.dtype.short}"
                )
        if empty and 0 in buffer.dims and 1 <= len(buffer.dims) <= 8:
            return buffer._replace(strides=_arguments.packed_strides(buffer.dims))
        dims = _arguments.dims(buffer.dims, name, low=1)
        strides = tuple([s if d > 1 else max(1, s) for d, s in zip(dims, buffer.strides, strict=True)])
        buffer = buffer._replace(dims=dims, strides=_arguments.strides(strides, dims, name))
        self.note(name, buffer, output)
        return buffer

    def array(self, name: str, array: Any, *, output: bool = False) -> Buffer:
        """Check an array of positive strides that do not overlap; axes may be empty."""
        buffer = self.handle.buffer(array, name, output=output)
        if 0 not in buffer.dims:
            steps = tuple(max(1, s) if d == 1 else s for d, s in zip(buffer.dims, buffer.strides, strict=True))
            buffer = buffer._replace(strides=_arguments.strides(steps, buffer.dims, name))
        return buffer

    def flat(self, name: str, array: Any, dims: Dims, output: bool = False) -> Buffer:
        """Check a contiguous array of these dims; returns a view with one axis."""
        buffer = self.handle.buffer(array, name, output=output)
        _arguments.parameter_dims(name, buffer.dims, buffer.strides, dims)
        buffer = buffer._replace(dims=(math.prod(dims),), strides=(1,))
        self.note(name, buffer, output)
        return buffer

    def parameter(self, name: str, array: Any, shape: _Shape, default: float | None = None) -> Buffer:
        """A parameter vector in the vendors' dtype, widened if it is a 16-bit one."""
        if array is None and default is not None:
            return self.constant(default, shape)
        if array is None:
            raise ArgumentError(name, None, f"an array of shape {shape.derived}")
        buffer = self.flat(name, array, shape.derived)
        _parameter_dtype(name, buffer.dtype, shape.dtype)
        return buffer if buffer.dtype == shape.dtype else self.widen(buffer)

    def result(self, name: str, array: Any, shape: _Shape, *, prior: bool = False) -> Buffer:
        """A vector in the vendors' dtype for a result; scratch if `array` is None.

        A 16-bit `array` gets the rounded values at the end. `prior`: its value is read first.
        """
        if array is None:
            return self.vector(shape)
        buffer = self.flat(name, array, shape.derived, True)
        _parameter_dtype(name, buffer.dtype, shape.dtype)
        if buffer.dtype == shape.dtype:
            return buffer
        wide = self.widen(buffer) if prior else self.vector(shape)
        self._pending.append((wide, buffer))
        return wide

    def scalars(self, shape: _Shape, **values: float) -> list[float]:
        """alpha and beta in canonical form."""
        return [_arguments.scalar(value, name, shape.dtype) for name, value in values.items()]

    def note(self, name: str, buffer: Buffer, output: bool) -> None:
        """Note memory that is read, or written if `output`; written memory may overlap no other."""
        if self._inside or 0 in buffer.dims:
            return
        (self.outputs if output else self.inputs).append(region(name, buffer))

    # -------- scratch

    def scratch(self, dims: Dims, dtype: DataType, strides: Dims | None = None) -> Buffer:
        """An uninitialised dense array in the workspace."""
        start = self.used
        nbytes = math.prod(dims) * dtype.itemsize
        self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.most = max(self.most, self.used)
        steps = _arguments.packed_strides(dims) if strides is None else strides
        return Buffer(start, dims, steps, dtype, *self.device, True, None)

    def scratch_like(self, array: Buffer) -> Buffer:
        """A new array with the dims, dtype and memory order of another one, without its gaps."""
        strides, step = [0] * len(array.dims), 1
        for a in sorted(range(len(array.dims)), key=lambda a: (array.strides[a], -a)):
            strides[a] = step
            step *= array.dims[a]
        return self.scratch(array.dims, array.dtype, tuple(strides))

    def vector(self, shape: _Shape) -> Buffer:
        """An uninitialised parameter vector."""
        return self.scratch((shape.count,), shape.dtype)

    def constant(self, value: float, shape: _Shape, dtype: DataType | None = None) -> Buffer:
        """A parameter vector of one value that is only read; calls share it."""
        key = value, shape.count, dtype or shape.dtype
        known = self.known.get((value, key[2]))
        if known is not None and shape.count <= known.dims[0]:
            return known._replace(dims=(shape.count,))
        if key not in self._constants:
            vector = self.scratch((shape.count,), key[2])
            self.fill(value, vector)
            self._constants[key] = vector
        return self._constants[key]

    # -------- vector algebra

    def product(
        self, a: Buffer, b: Buffer, out: Buffer | None = None, *, alpha: float = 1.0, beta: float = 0.0
    ) -> Buffer:
        """``out = alpha * a * b + beta * out``."""
        shape = _Shape(a, 0)
        target = self.vector(shape) if out is None else out
        zeros, ones = self.constant(0.0, shape), self.constant(1.0, shape)
        self.inference(shape.kept, a, b, zeros, zeros, ones, target, alpha=alpha, beta=beta)
        return target

    def inverse(self, variance: Buffer, epsilon: float, out: Buffer | None = None) -> Buffer:
        """``out = 1 / sqrt(variance + epsilon)``."""
        shape = _Shape(variance, 0)
        target = self.vector(shape) if out is None else out
        zeros, ones = self.constant(0.0, shape), self.constant(1.0, shape)
        self.inference(shape.kept, ones, ones, zeros, zeros, variance, target, epsilon=epsilon)
        return target

    def widen(self, narrow: Buffer, out: Buffer | None = None) -> Buffer:
        """float32 values of a 16-bit vector: the saved means of a training with one element per statistic."""
        shape = _Shape(narrow, 0)
        target = self.vector(shape) if out is None else out
        ones, zeros = self.constant(1.0, shape), self.constant(0.0, shape)
        self.training(shape.kept, narrow, ones, zeros, None, epsilon=1.0, saved=(target, self.vector(shape)))
        return target

    def narrow(self, wide: Buffer, target: Buffer) -> None:
        """Round a float32 vector: the inference of zeros, with the vector as the bias."""
        shape = _Shape(target, 0)
        zeros, ones = self.constant(0.0, shape), self.constant(1.0, shape)
        self.inference(shape.kept, self.constant(0.0, shape, target.dtype), zeros, wide, zeros, ones, target)

    # -------- primitives

    def training(
        self, kept: Dims, x: Buffer, scale: Buffer, bias: Buffer, y: Buffer | None, *, running: _Pair = None,
        saved: _Pair = None, **options: float,
    ) -> None:  # fmt: skip
        """Forward training; y None: scratch."""
        parameters = {"scale": scale, "bias": bias, **_named(_RUNNING, running), **_named(_SAVED, saved)}
        options = {"alpha": 1.0, "beta": 0.0, "epsilon": 0.0, "exponential_average_factor": 0.0, **options}
        self._call(_Wanted("forward_training", parameters, options), kept, {"x": x, "y": y})

    def inference(
        self, kept: Dims, x: Buffer, scale: Buffer, bias: Buffer, mean: Buffer, variance: Buffer, y: Buffer,
        **options: float,
    ) -> None:  # fmt: skip
        """Forward inference; nothing for an empty x. With ``inverse`` `variance` is 1 / sqrt(variance + epsilon)."""
        if 0 not in x.dims:
            parameters = {"scale": scale, "bias": bias, "running_mean": mean, "running_variance": variance}
            options = {"alpha": 1.0, "beta": 0.0, "epsilon": 0.0, **options}
            self._call(_Wanted("forward_inference", parameters, options), kept, {"x": x, "y": y})

    def gradient(
        self, kept: Dims, x: Buffer, dy: Buffer, scale: Buffer, dx: Buffer | None, dscale: Buffer, dbias: Buffer, *,
        saved: _Pair = None, running: _Pair = None, **options: float,
    ) -> None:  # fmt: skip
        """Backward; dx None: scratch. `running`: statistics that are constants."""
        parameters = {"scale": scale, "dscale": dscale, "dbias": dbias}
        parameters |= _named(_SAVED, saved) | _named(_RUNNING, running)
        options = {"alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0, "epsilon": 0.0, **options}
        self._call(_Wanted("backward", parameters, options), kept, {"x": x, "dy": dy, "dx": dx})

    def axpby(self, a: float, x: Buffer, b: float, y: Buffer) -> None:
        """``y = a * x + b * y``."""
        for xs, ys in _pieces(x, y):
            xd = self.handle.descriptor(xs, "x")
            inner = self.handle.workspace_size(
                Operation.AXPBY, xd, y_desc=self.handle.descriptor(ys, "y"), alpha=a, beta=b
            )
            text = f"axpby {xs.dtype.short} {xs.dims}"
            self._step(Operation.AXPBY, {"x": xs, "y": ys}, {"a": a, "b": b}, inner, text)

    def fill(self, value: float, y: Buffer) -> None:
        """``y = value``."""
        for ys, _ in _pieces(y, y):
            layout = _arguments.layout_of(ys.dims, ys.strides)
            bits, why = capability(self.handle.backend, Operation.FILL, Mode.SPATIAL, ys.dtype, layout, len(ys.dims))
            if not bits:  # there is no workspace query, which would check it
                raise unsupported(self.handle, "fill", why, (f"y: {ys.dtype.short} {ys.dims} {ys.strides}",))
            self._step(Operation.FILL, {"y": ys}, {"value": value}, 0, f"fill {ys.dtype.short} {ys.dims}")

    def _step(
        self, operation: Operation, arrays: dict[str, Buffer], values: dict[str, Any], inner: int, text: str,
        way: Way | None = None,
    ) -> None:  # fmt: skip
        self.inner = max(self.inner, inner)
        self.steps.append(_Step(operation, arrays, values, inner, text, way))

    def _call(self, wanted: _Wanted, kept: Dims, data: dict[str, Buffer | None]) -> None:
        """Add a batch-norm call on the first view that the backend supports, or on packed copies.

        `data` starts with x; a scratch array replaces None.
        """
        refusal = None
        present = {name: buffer for name, buffer in data.items() if buffer is not None}
        for mode, axes in _views(kept, list(present.values())):
            mark = self.used
            viewed = ways.viewed(present, axes)
            try:
                self._emit(
                    wanted, mode, {n: viewed[n] if n in viewed else self.scratch_like(viewed["x"]) for n in data}
                )
                return
            except UnsupportedError as error:
                self.used = mark
                refusal = refusal or error
        reason = "its axes of either kind do not merge"
        if refusal is not None:
            reason = f"the backend has no path for a view: {refusal.text}"
        try:
            self._on_copies(wanted, kept, data, reason)
        except UnsupportedError as error:
            raise (refusal or error) from None

    def _on_copies(self, wanted: _Wanted, kept: Dims, data: dict[str, Buffer | None], reason: str) -> None:
        x = _need(data["x"])
        output = "dx" if wanted.method == "backward" else "y"
        # All calls of a program use one order, so that they share the copies.
        order = [*kept, *(a for a in range(len(x.dims)) if a not in kept)]
        dims = tuple(x.dims[a] for a in order)
        packed, back = {}, []
        for name, buffer in data.items():
            key = (buffer.pointer, buffer.dims) if buffer is not None and name != output else None
            if key is not None and key in self._packed:
                packed[name] = self._packed[key]
                continue
            packed[name] = self.scratch(dims, x.dtype)
            if buffer is None:
                continue
            original = buffer._replace(dims=dims, strides=tuple(buffer.strides[a] for a in order))
            self.copies.append(f"{name} of {wanted.method}: {reason}")
            if key is None:
                back.append((packed[name], original))
            else:
                self._packed[key] = packed[name]
            if key is not None or wanted.options["beta"] != 0.0:
                self.axpby(1.0, original, 0.0, packed[name])
        count = math.prod(x.dims[a] for a in kept)
        m = math.prod(dims) // count
        viewed = {n: b._replace(dims=(1, count, m), strides=(count * m, m, 1)) for n, b in packed.items()}
        self._emit(wanted, Mode.SPATIAL, viewed)
        for source, target in back:
            self.axpby(1.0, source, 0.0, target)

    def _emit(self, wanted: _Wanted, mode: Mode, data: dict[str, Buffer]) -> None:
        """One call on views that the vendors know."""
        method, parameters, options = wanted
        operation, values, way = Operation[method.upper()], {"mode": mode, **options}, None
        saved, running = "saved_mean" in parameters, "running_mean" in parameters
        constant = operation == Operation.BACKWARD and running  # a plan computes it, and says its workspace
        if self.plans or constant:
            way = ways.auto(self.handle, operation, data, parameters, values, self.deterministic)
        descriptors = {f"{name}_desc": self.handle.descriptor(buffer, name) for name, buffer in data.items()}
        x, x_desc = data["x"], descriptors.pop("x_desc")
        asked: dict[str, Any] = {n: v for n, v in values.items() if n not in ("exponential_average_factor", "inverse")}
        asked |= {"running": running, "saved": saved, **descriptors}
        # The plain algorithm is for data that are less aligned: whatever defects it has.
        asked["algorithm"] = None if way is None else "plain"
        try:
            inner = 0 if constant else self.handle.workspace_size(operation, x_desc, **asked)
        except NotImplementedError:  # the vendor's own error, too
            if way is None:
                raise
            inner = 0
        written = [n for n in (*data, *parameters) if n not in ("x", "dy", "z", "scale", "bias")]
        layout, alignment = _arguments.layout_of(x.dims, x.strides), ways.alignment_of(data.values())
        running = running or operation != Operation.FORWARD_TRAINING
        call = Call(operation, mode, x.dtype, x.dims, layout, saved, options["beta"], alignment, running=running)
        self._asked.append((call, written, way))
        text = f"{method} {mode.name} {x.dtype.short} {x.dims}" + (" of 1/sigma" if "inverse" in options else "")
        if way is not None:  # the entry point's too: calls on data that are less aligned go there
            inner, text = max(inner, way.workspace_size), f"{text} by {way.algorithm}"
        self._step(operation, data | ways.shaped(parameters, x.dims, mode), values, inner, text, way)

    # -------- the end

    def finish(self, least: int = 0) -> Prepared:
        """Make it ready to run, in a workspace of at least so many bytes."""
        self._round()
        for asked in self._asked:
            tell_of_defects(self.handle, *asked)
        return Prepared(self, least)

    def _round(self) -> None:
        """Round results to their 16-bit arrays."""
        for wide, target in self._pending:
            self.narrow(wide, target)
        self._pending.clear()


class Prepared:
    """An operation, checked and ready to run any number of times, on arrays at any addresses.

    Its workspace has the scratch arrays, then the largest workspace of a call.
    """

    def __init__(self, program: Program, least: int = 0) -> None:
        self.nbytes = max(least, program.most + program.inner)
        self.calls = tuple([step.text for step in program.steps])
        self.copies = tuple(program.copies)
        self._regions = program.outputs, program.inputs
        self._list = CallList(program.handle)
        for step in program.steps:
            inner = program.most, step.inner
            self._list.append(program.handle, step.operation, step.arrays, inner, step.way, **step.values)
        for regions, written in ((program.outputs, True), (program.inputs, False)):
            for region in regions:
                self._list.reach(region.pointer, region.end - region.pointer, region.itemsize, written)
        self.written = self._list.written()

    def check(self, addresses: tuple[int, ...], workspace: int = 0) -> None:
        """Refuse an output that overlaps an array, or a workspace of so many bytes; its address comes first."""
        if self._list.apart(addresses, workspace):
            return
        outputs, inputs = ([_moved(r, addresses) for r in regions] for regions in self._regions)
        for region in (*outputs, *inputs):
            if region.pointer == 0:
                raise ArgumentError(region.name, "address 0", "a non-NULL address of 64 bits")
        if workspace:
            outputs.append(_arguments.Region("workspace", addresses[0], (workspace,), (1,), 1))
        _arguments.disjoint(outputs, inputs)

    def execute(self, handle: Handle, operation: str, addresses: tuple[int, ...], workspace: Any) -> None:
        """Check the workspace and overlaps, then make the calls, on the handle that it was prepared for."""
        address, size = (0, 0) if workspace is None else handle.memory(workspace)
        given = workspace is not None
        if self.nbytes and given and (size < self.nbytes or address % ALIGNMENT):
            raise WorkspaceError("workspace", f"{size} bytes at {address:#x}", self._needed(operation))
        if given:
            addresses = (address, *addresses[1:])
        self.check(addresses, self.nbytes if given else 0)
        for copy in self.copies:
            _log.info("%s: copied %s", operation, copy)
        if given or not self.nbytes:
            self._list.run(handle, addresses)
            return
        if handle.library.device_type != CPU:
            raise WorkspaceError("workspace", "None", self._needed(operation))
        with _kept_of(handle).lent(self.nbytes) as start:
            self._list.run(handle, (start, *addresses[1:]))

    def _needed(self, operation: str) -> str:
        return f"at least {self.nbytes} bytes for {operation}, aligned to {ALIGNMENT}, on the handle's device"


def _moved(region: _arguments.Region, addresses: tuple[int, ...]) -> _arguments.Region:
    slot, offset = divmod(region.pointer, 1 << SLOT_BITS)
    return region._replace(pointer=addresses[slot] + offset)


class _Kept:
    """The workspace that a handle of a CPU backend keeps."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.memory = np.empty(0, np.uint8)
        self._usable = self._address = 0
        self._in_use = False

    @contextlib.contextmanager
    def lent(self, nbytes: int) -> Iterator[int]:
        """The address of so many bytes. A signal handler's call inside a call of its thread gets other memory."""
        with self.lock:
            if self._in_use:
                other = np.empty(nbytes + ALIGNMENT, np.uint8)
                yield _aligned(other)
                return
            self._in_use = True
            try:
                if self._usable < nbytes:
                    self._usable = 0
                    self.memory = np.empty(0, np.uint8)  # freed first, so that both never exist at once
                    self.memory = np.empty(nbytes + ALIGNMENT, np.uint8)
                    self._address = _aligned(self.memory)
                    self._usable = nbytes
                yield self._address
            finally:
                self._in_use = False


def _aligned(memory: np.ndarray[Any, Any]) -> int:
    return -(-int(memory.ctypes.data) // ALIGNMENT) * ALIGNMENT


_kept: weakref.WeakKeyDictionary[Handle, _Kept] = weakref.WeakKeyDictionary()


def _kept_of(handle: Handle) -> _Kept:
    return _kept.get(handle) or _kept.setdefault(handle, _Kept())  # no lock: a fork could leave it taken


def _parameter_dtype(name: str, dtype: DataType, expected: DataType) -> None:
    allowed = (expected, *_NARROW) if expected == DataType.FLOAT32 else (expected,)
    if dtype not in allowed:
        raise ArgumentTypeError(name, f"dtype {dtype.short}", " or ".join(d.short for d in allowed))


def region(name: str, buffer: Buffer) -> _arguments.Region:
    """The memory of an array, with its name in errors."""
    size = buffer.dtype.itemsize
    return _arguments.Region(name, buffer.pointer, buffer.dims, tuple([s * size for s in buffer.strides]), size)


def unsupported(handle: Handle, function: str, text: str, descriptors: tuple[str, ...] = ()) -> UnsupportedError:
    """The error for a call that a handle's backend cannot make."""
    return UnsupportedError(
        backend=handle.backend,
        function=function,
        status=-1,
        status_name="PBN_E_UNSUPPORTED",
        text=text,
        library=handle.library.path,
        version=handle.library.version,
        descriptors=descriptors,
    )


def _need(buffer: Buffer | None) -> Buffer:
    assert buffer is not None
    return buffer
