"""The programs of a call: what a rank computes before the collective, and what it computes after it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pybnorm import _arguments
from pybnorm._arrays import Buffer, as_buffer
from pybnorm._core import Cache
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.operations.program import Prepared
from pybnorm.sync.memory import _Memory
from pybnorm.sync.messages import _BASE, _COUNT, _DIGITS, _WEIGHT, BACKWARD, FORWARD, _digits

_MOST = 64
"""Plans that an object keeps, and programs that a plan keeps."""


class _Terms(NamedTuple):
    """The terms that the ranks agreed on."""

    channels: tuple[int, ...]
    dtype: DataType
    axis: Any
    promised: int | None
    """Elements per statistic of this rank, if all ranks said so."""

    def examine(self, x: Buffer) -> tuple[int, tuple[int, ...]]:
        """Elements per statistic of the local x, and the derived shape."""
        if x.dtype != self.dtype:
            raise ArgumentTypeError("x", f"dtype {x.dtype.short}", f"{self.dtype.short}, as agreed by all ranks")
        rank = len(x.dims)
        if not 1 <= rank <= 8:
            raise ArgumentError("x", f"dims {x.dims}", "rank 1 to 8")
        kept = _arguments.axes(self.axis, rank)
        if tuple(x.dims[a] for a in kept) != self.channels:
            allowed = f"sizes {self.channels} along axis {self.axis}, as agreed by all ranks"
            raise ArgumentError("x", f"dims {x.dims}", allowed)
        count = math.prod(x.dims[a] for a in range(rank) if a not in kept)
        given = f"{count} elements per statistic"
        if count >= _BASE**_DIGITS:
            raise ArgumentError("x", given, f"fewer than {_BASE**_DIGITS}")
        if self.promised is not None and count != self.promised:
            raise ArgumentError("x", given, f"{self.promised}, as counts promised for this rank")
        return count, tuple(d if a in kept else 1 for a, d in enumerate(x.dims))


class _Plan:
    """A call for arrays of one description.

    All checks are made here, before the collective. The caller's arrays have the slots after those of the memory.
    """

    code: int
    """In the header of the message."""
    name: str
    array_names: tuple[str, ...]
    scalar_names: tuple[str, ...]
    roles: tuple[str | None, ...]
    """The names of arrays, then None for each scalar."""
    written: slice
    """Those that a call writes."""
    before: Prepared
    """The part before the collective. It checks overlaps and the workspace for the whole call."""

    def __init__(
        self, memory: _Memory, terms: _Terms, arrays: dict[str, Any], scalars: dict[str, Any], expected: Any
    ) -> None:
        self.memory, self.axis, self.arrays, self.scalars = memory, terms.axis, arrays, scalars
        self.expected = expected
        self.elements, self.derived = terms.examine(as_buffer(arrays["x"], "x"))  # None is none of its arrays
        self.row: int | str = self.code if self.elements or self.code == BACKWARD else "empty"
        """The vector with this rank's message. That of an empty forward never changes."""
        self._first = memory.started()  # becomes `before`; it notes all arrays of the call
        self._known = Cache()
        header = memory.started()
        for place, digit in enumerate(_digits(self.elements), 2 * memory.section + _COUNT):
            header.then("fill", digit, memory.part(self.code, place, (1,)))
        if self.code == FORWARD:
            header.then("fill", float(self.elements), memory.part(FORWARD, 2 * memory.section + _WEIGHT, (1,)))
        self._header = header.finish()
        self._prepare()

    def _prepare(self) -> None:
        raise NotImplementedError

    def _data(self, name: str, x: Buffer | None = None, *, output: bool = False) -> Buffer:
        return self._first.data(name, self.arrays[name], x, output=output, empty=True)

    def _vectors(self, *names: str, output: bool = False) -> list[Buffer]:
        """Check parameters; flat views of those that are given."""
        given = [(name, self.arrays[name]) for name in names]
        return [self._first.flat(n, array, self.derived, output) for n, array in given if array is not None]

    def after(self, outcome: Any) -> Prepared:
        """The program that depends on the counts of all ranks (forward) or on their sum (backward)."""
        found: Prepared | None = self._known.get(outcome)
        if found is None:
            found = self._after(outcome)
            self._known.keep(outcome, found, _MOST)
        return found

    def _after(self, outcome: Any) -> Prepared:
        raise NotImplementedError

    def start(self, addresses: tuple[int, ...], workspace: Any) -> None:
        """Compute this rank's message. The header is written only if its count changes."""
        memory = self.memory
        if self.row == self.code and self.elements != memory.carried[self.code]:
            memory.carried[self.code] = -1
            memory.run(self._header, self.name)
            memory.carried[self.code] = self.elements
        self.before.execute(memory.handle, self.name, addresses, workspace)


class _ForwardPlan(_Plan):
    """`SyncBatchNorm.forward` for arrays of one description."""

    code, name = FORWARD, "forward"
    array_names = "x", "scale", "bias", "y", "running_mean", "running_variance", "saved_mean", "saved_inv_variance"
    scalar_names = "alpha", "beta", "epsilon", "exponential_average_factor", "unbiased"
    roles = *array_names, *(None,) * 5
    written = slice(3, 8)

    def _prepare(self) -> None:
        memory, arrays, scalars = self.memory, self.arrays, self.scalars
        x = self._data("x")
        y = self._data("y", x, output=True)
        self._vectors("scale", "bias")
        saved, running = ("saved_mean", "saved_inv_variance"), ("running_mean", "running_variance")
        mean, variance = memory.statistic(0), memory.statistic(1)
        self._merged = {name: scalars[name] for name in ("epsilon", "exponential_average_factor", "unbiased")}
        self._merged |= {"mean": memory.statistic(0, flat=True), "variance": memory.statistic(1, flat=True)}
        if _arguments.pair(saved[0], arrays[saved[0]], saved[1], arrays[saved[1]]):
            given = self._vectors(*saved, output=True)
            for name, vector in zip(saved, given, strict=True):
                if vector.dtype != memory.dtype:
                    raise ArgumentTypeError(name, f"dtype {vector.dtype.short}", memory.dtype.short)
            mean = arrays[saved[0]]
            self._merged |= dict(zip(("mean", "inv_variance"), given, strict=True))
        if _arguments.pair(running[0], arrays[running[0]], running[1], arrays[running[1]]):
            self._merged |= dict(zip(running, self._vectors(*running, output=True), strict=True))
        data = {"alpha": scalars["alpha"], "beta": scalars["beta"], "axis": self.axis, "epsilon": scalars["epsilon"]}
        # y, not yet written, is where the statistics' own call writes what nobody reads.
        unread = y if _arguments.scalar(scalars["beta"], "beta", x.dtype) == 0 and y.strides == x.strides else None
        if self.elements:
            parts = {"mean": memory.part(FORWARD), "variance": memory.part(FORWARD, memory.section)}
            both = memory.part(FORWARD, 0, (2 * memory.section,))
            own = {"epsilon": scalars["epsilon"], "axis": self.axis, "_sample": both, "_y": unread}
            self._first.then("stats", x, **parts, **own)
        self.elementwise = memory.program(
            "forward_inference", x, arrays["scale"], arrays["bias"], mean, variance, y, **data
        )
        self.before = self._first.finish(self.elementwise.nbytes)

    def _after(self, outcome: Any) -> Prepared:
        return self.memory.merge(outcome, **self._merged)


class _OutsidePlan(_ForwardPlan):
    """Forward without the merge: ranks send inverse standard deviations, and read the saved statistics afterwards."""

    def _prepare(self) -> None:
        memory, arrays, epsilon = self.memory, self.arrays, self.scalars["epsilon"]
        x = self._data("x")
        y = self._data("y", x, output=True)
        self._vectors("scale", "bias", "saved_mean", "saved_inv_variance")
        self._vectors("running_mean", "running_variance", output=True)
        if self.elements:
            parts = {"mean": memory.part(FORWARD), "inv_variance": memory.part(FORWARD, memory.section)}
            unread = y if y.strides == x.strides else None
            self._first.then("stats", x, **parts, epsilon=epsilon, axis=self.axis, _y=unread)
        given = [arrays[name] for name in ("scale", "bias", "saved_mean", "saved_inv_variance")]
        self.elementwise = memory.program("forward_inference_inv_variance", x, *given, y, axis=self.axis)
        self.before = self._first.finish(self.elementwise.nbytes)

    def _after(self, outcome: Any) -> Prepared:
        return self.elementwise


class _BackwardPlan(_Plan):
    """`SyncBatchNorm.backward` for arrays of one description."""

    code, name = BACKWARD, "backward"
    array_names = "x", "dy", "scale", "dx", "dscale", "dbias", "saved_mean", "saved_inv_variance"
    scalar_names = "alpha", "beta"
    roles = *array_names, None, None
    written = slice(3, 6)

    def _prepare(self) -> None:
        arrays = self.arrays
        dtype = arrays["x"].dtype
        self._blend = {name: _arguments.scalar(self.scalars[name], name, dtype) for name in ("alpha", "beta")}
        self.repeats = self._blend["beta"] == 0
        """Whether the part after the collective may run twice: it reads nothing that it writes."""
        for name in ("saved_mean", "saved_inv_variance"):
            if arrays[name] is None:
                raise ArgumentError(name, None, "what forward wrote")
        x = self._data("x")
        self._common = {"x": x, "dy": self._data("dy", x), "mean": arrays["saved_mean"]}
        self._common["inv_variance"] = arrays["saved_inv_variance"]
        self._dx = self._data("dx", x, output=True)
        self._vectors("saved_mean", "saved_inv_variance", "scale")
        self._vectors("dscale", "dbias", output=True)
        sums = self._sums(BACKWARD)
        wanted = {name: arrays[name] for name in ("dscale", "dbias")}
        unread = self._dx if self._blend["beta"] == 0 and self._dx.strides == x.strides else None
        self._first.then("backward_reduce", **self._common, **sums, **wanted, axis=self.axis, _dx=unread)
        self.before = self._first.finish(self.after(self.expected).nbytes)

    def _after(self, outcome: Any) -> Prepared:
        given = self._common | self._sums("sums") | self._blend
        given |= {"scale": self.arrays["scale"], "count": outcome, "dx": self._dx, "axis": self.axis}
        return self.memory.program("backward_elemt", **given)

    def _sums(self, vector: int | str) -> dict[str, Buffer]:
        """The two sums in a vector."""
        memory = self.memory
        return {name: memory.part(vector, i * memory.section) for i, name in enumerate(("sum_dy", "sum_dy_xmu"))}
