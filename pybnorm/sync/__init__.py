"""Batch normalization over the data of all ranks of a communicator that exists already.

The vendors' libraries compute on one device. Here their split operations (`pybnorm.operations`) are joined over
mpi4py, ``torch.distributed``, or NCCL and RCCL through CuPy or nccl4py:

========  ==========================================================  =======================================
forward   `stats` of the local x                                      all_gather of [mean, M2, count]
          `gather_stats`, in the order of the ranks; `elemt`
backward  `backward_reduce` with the mean of all ranks                all_reduce of [sum_dy, sum_dy_xmu]
          `backward_elemt`                                            (``deterministic``: all_gather and a sum)
========  ==========================================================  =======================================

One collective for each call. Forward always gathers: the differences of the ranks' means are taken before they are
squared, which sums over ranks could do only in a second collective.

Agreement. The constructor is a collective: all ranks exchange a header and compare it, so that ranks that disagree on
channels, dtype, backend, `deterministic` or `counts`, or that have been given a bad argument, end in an error on every
rank. What was agreed there fixes the size of every later message, so calls need no header of their own: each message
carries the call's name, the rank's count and whether the rank failed. A rank whose call fails before the collective
(a wrong shape, a workspace that is too small, ...) joins it nevertheless and says so: it raises its own error and the
others raise `RankError`. A rank that never calls at all cannot be told from a slow one; the communicator's own
time-out, if it has one, is what ends that.
"""

from __future__ import annotations

import inspect
import math
import operator
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pybnorm import _arguments, operations
from pybnorm._arguments import ALIGNMENT
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import SLOT_BITS, Handle, backends
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError, RankError, WorkspaceError
from pybnorm.operations.preparation import Checked, prepare_named
from pybnorm.sync.communicators import Array, Communicator, _connect
from pybnorm.sync.messages import (
    _ALIGN,
    _BASE,
    _CODE,
    _COUNT,
    _DIGITS,
    _FAILED_RANK,
    _FAILURES,
    _HEADER,
    BACKWARD,
    FAILED,
    FORWARD,
    _agree,
    _Agreed,
    _digits,
    _number,
    _raise_failed,
    _ranks,
)

__all__ = ["Communicator", "RankError", "SyncBatchNorm"]


class SyncBatchNorm:
    """Training-mode batch norm whose statistics are those of all ranks' data.

    Holds all memory that calls need beside the caller's workspace: two messages, what is received, and the merged
    statistics. One object serves one call at a time, on one stream; calls are collectives, in the same order on all
    ranks.

    Parameters
    ----------
    handle : Handle
        Of the device that this rank computes on. The collectives run on its stream.
    communicator : mpi4py.MPI.Comm, torch.distributed.ProcessGroup, NcclCommunicator or nccl.core.Communicator
        Of 2 or more ranks. It must move the memory that the backend computes on: mpi4py and gloo for CPU backends,
        NCCL or RCCL for those of GPUs. For MPI on GPU memory, or anything else, give a `Communicator`.
    channels : int or tuple of int
        Sizes of the kept axes; for spatial batch norm the number of channels.
    dtype : DataType, str or dtype
        dtype of the data; messages are of `operations.derive`'s dtype.
    axis : int or tuple of int
        The axes that parameters keep.
    deterministic : bool
        Backward gathers the sums of the ranks and adds them in one call, on every rank in the same order, so that
        results are equal bit for bit between runs, wherever the ranks run. False: all_reduce, whose order is the
        communicator's. Forward is always of the first kind.
    counts : sequence of int, optional
        Elements per statistic of each rank in every call, by promise. Without it they are part of each message and
        read on the host, which for device memory waits for the stream once a call. With it nothing waits, and the
        failure of another rank is not seen on devices: results are NaN then, and `check` raises.

    Raises
    ------
    ArgumentError
        On all ranks: one rank got a bad argument, or they disagree. On this rank alone: not a communicator.
    ArgumentError
        A communicator of one rank: most often a launcher that was forgotten. Batch norm of one rank is
        `operations.forward_training` and `operations.backward`.
    RankError
        Another rank got a bad argument.

    Notes
    -----
    dscale and dbias stay sums over the local data, as in ``torch.nn.SyncBatchNorm``: data-parallel training averages
    or adds all gradients of parameters afterwards, and these with them.
    Ranks may bring batches of different sizes, also empty ones.
    """

    def __init__(
        self,
        handle: Handle,
        communicator: Any,
        channels: int | Sequence[int],
        dtype: object = DataType.FLOAT32,
        *,
        axis: int | Sequence[int] = 1,
        deterministic: bool = False,
        counts: Sequence[int] | None = None,
    ) -> None:
        self._communicator = adapter = _connect(communicator)
        if adapter.size < 2:
            allowed = "2 ranks or more; operations.forward_training and backward are the batch norm of one"
            raise ArgumentError("communicator", f"{adapter.size} rank", allowed)
        failure: Exception | None = None
        mine = _Agreed()
        try:
            mine = self._prepare(handle, channels, dtype, axis, deterministic, counts)
        except Exception as error:  # whatever it is, the others wait in the exchange
            failure = error
        _agree(adapter, mine, failure)

    def _prepare(
        self, handle: Handle, channels: Any, dtype: object, axis: Any, deterministic: bool, counts: Any
    ) -> _Agreed:
        adapter = self._communicator
        _arguments.instance(handle, Handle, "handle", "a Handle")
        if handle.closed:
            raise ClosedError("handle")
        self._handle, self._device = handle, handle.library.device_type
        if self._device not in adapter.devices:
            raise ArgumentError(
                "communicator",
                f"one for memory of DLPack device type {' or '.join(map(str, adapter.devices))}",
                f"one for memory of type {self._device}, which {handle.backend} computes on",
            )
        given = (channels,) if hasattr(type(channels), "__index__") else channels
        self._channels = _arguments.dims(given, "channels", low=0)
        self._dtype = _arguments.data_type(dtype)
        self._axis = axis
        kept = operations.kept_axes(axis, 8)  # the rank is x's, and negative axes count from its end
        if len(kept) != len(self._channels):
            raise ArgumentError("channels", self._channels, f"a size for each of the {len(kept)} axes {axis}")
        self._deterministic = _arguments.boolean(deterministic, "deterministic")
        self._promised = None if counts is None else self._check_counts(counts)
        self._reads = self._promised is None or self._device == CPU  # on the host they are there anyway
        # What is expected of the next call: what the last one had.
        self._counts = self._promised or [2] * adapter.size
        self._total = sum(self._counts)
        self._last: tuple[int, bool] | None = None
        self._plans: dict[Any, Any] = {}
        self._allocate()
        told = 0 if self._promised is None else 1 + zlib.crc32(repr(self._promised).encode())
        backend = backends().index(handle.backend)
        return _Agreed(0, int(self._dtype), backend, int(self._deterministic), told, self._channels)

    def _check_counts(self, counts: Any) -> list[int]:
        given = _arguments.items(counts, "counts", "a sequence of integers", 1 << 20)
        try:
            numbers = [operator.index(n) for n in given]
        except Exception as error:  # the object's own too
            raise ArgumentTypeError("counts", counts, "a sequence of integers") from error
        if len(numbers) != self._communicator.size or min(numbers) < 0 or not any(numbers):
            allowed = f"{self._communicator.size} numbers from 0, one for each rank, not all 0"
            raise ArgumentError("counts", numbers, allowed)
        return numbers

    def _allocate(self) -> None:
        """All memory of the object: messages with their constant parts, what is received, merged statistics."""
        rank, size = self._communicator.rank, self._communicator.size
        self._parameter_dtype = _arguments.derived_data_type(self._dtype)
        width = math.prod(self._channels)
        self._section = section = -(-width // _ALIGN) * _ALIGN
        length = 2 * section + _HEADER
        number = np.float64 if self._parameter_dtype == DataType.FLOAT64 else np.float32
        self._nbytes = 0

        def message(code: int, fill: float = 0.0) -> Any:
            values = np.zeros(length, number)
            values[: 2 * section] = fill
            values[2 * section + _CODE] = code
            if code == FAILED:
                values[2 * section + _FAILURES], values[2 * section + _FAILED_RANK] = 1, rank + 1
            return self._new(values)

        # A row of NaN, so that no result looks right where the others do not read the header.
        self._failed = message(FAILED, math.nan)
        self._empty = message(FORWARD)
        self._rows = {FORWARD: message(FORWARD), BACKWARD: message(BACKWARD)}
        self._received = self._new(np.zeros(size * length, number))
        self._sums = self._new(np.zeros(length, number))
        self._statistics = self._new(np.zeros(3 * section, number))  # mean, inverse standard deviation, local variance
        self._headers = self._new(np.zeros(size * _HEADER, number))
        self._host = np.zeros(size * _HEADER, number)
        self._scratch: Any = None
        self._room_nbytes = 0

        received = self._handle.buffer(self._received, "communicator", output=True)
        item = received.dtype.itemsize
        self._means = received._replace(dims=(size, width), strides=(length, 1))
        self._m2s = self._means._replace(pointer=received.pointer + section * item)
        heads = self._means._replace(pointer=received.pointer + 2 * section * item, dims=(size, _HEADER))
        both = self._means._replace(dims=(size, 2 * section))
        forward, backward = self._rows[FORWARD], self._rows[BACKWARD]
        self._row_mean, self._row_m2 = (self._view(forward, start) for start in (0, section))
        self._row_sums = [self._view(backward, start) for start in (0, section)]
        self._all_sums = [self._view(self._sums, start) for start in (0, section)]
        self._mean, self._inv, self._variance = (self._view(self._statistics, i * section) for i in range(3))
        places = [2 * section + _COUNT + place for place in range(_DIGITS)]
        self._places = {code: [self._view(row, place, (1,)) for place in places] for code, row in self._rows.items()}
        self._carried = dict.fromkeys(self._rows, 0)
        zeros = self._view(self._empty, 0, (2 * section,))
        total = self._view(self._sums, 0, (2 * section,))
        self._add_rows = self._program("backward_reduce", x=both, dy=both, mean=zeros, sum_dy=total, axis=1)
        packed = self._view(self._headers, 0, (size, _HEADER))
        self._pack = {
            True: self._program("axpby", 1.0, heads, 0.0, packed),
            False: self._program(
                "axpby",
                1.0,
                self._view(self._sums, 2 * section, (_HEADER,)),
                0.0,
                self._view(self._headers, 0, (_HEADER,)),
            ),
        }
        merges = [self._merge(counts, {}) for counts in ([1] * size, [0] + [1] * (size - 1))]
        self._room(max(program.nbytes for program in (*merges, self._add_rows, *self._pack.values())))

    # -------- memory

    def _new(self, values: Array) -> Any:
        self._nbytes += values.nbytes
        return self._communicator.vector(values, self._device, self._handle.stream)

    def _view(self, vector: Any, start: int, dims: tuple[int, ...] | None = None) -> Buffer:
        """Part of a vector; by default as long as a parameter."""
        buffer: Buffer = self._handle.buffer(vector, "communicator", output=True)
        shape = self._channels if dims is None else dims
        pointer = buffer.pointer + start * buffer.dtype.itemsize
        return buffer._replace(pointer=pointer, dims=shape, strides=_arguments.packed_strides(shape))

    def _room(self, nbytes: int) -> Any:
        """Workspace for what depends on nothing but channels, ranks and who is empty; on the CPU the handle's."""
        if self._device == CPU or not nbytes:
            return None
        if self._room_nbytes < nbytes:
            self._room_nbytes = -(-nbytes // 4) * 4
            self._scratch = self._new(np.zeros(self._room_nbytes // 4, np.float32))
        return self._scratch

    @property
    def nbytes(self) -> int:
        """Bytes that the object holds."""
        return self._nbytes

    # -------- calls

    def forward(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        y: Any,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        epsilon: float = 1e-5,
        exponential_average_factor: float = 0.1,
        running_mean: Any = None,
        running_variance: Any = None,
        saved_mean: Any = None,
        saved_inv_variance: Any = None,
        workspace: Any = None,
    ) -> int:
        """Normalize by the statistics of all ranks.

        ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``;
        ``running = (1 - factor) * running + factor * batch`` with the variance over n - 1, n that of all ranks. The
        merge is Chan, Golub & LeVeque 1983 (`operations.gather_stats`).

        Parameters
        ----------
        x : array
            The local batch; its axes that are reduced may be empty.
        scale, bias : array, derived shape, or None
            None: 1 and 0.
        y : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        alpha, beta, epsilon, exponential_average_factor : float
            Of this rank; ranks should give the same.
        running_mean, running_variance : array, derived shape, optional
            Updated in place, to the same values on all ranks; both or none.
        saved_mean, saved_inv_variance : array, derived shape and dtype, optional
            Written, for `backward`; both or none.
        workspace : array or (address, bytes), optional
            At least `workspace_size` of the same arguments. None: on CPU backends the handle's.

        Returns
        -------
        int
            Elements per statistic of all ranks.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            This rank failed. No rank has any element; one has, and running statistics are to be updated.
        RankError
            Another rank failed, or called `backward`.

        Notes
        -----
        Calls: those of `operations.stats`, axpby, `operations.gather_stats` and `operations.elemt`.
        Workspace: the larger one of `operations.stats` and `operations.elemt`.
        """
        arrays = {
            "x": x,
            "scale": scale,
            "bias": bias,
            "y": y,
            "running_mean": running_mean,
            "running_variance": running_variance,
            "saved_mean": saved_mean,
            "saved_inv_variance": saved_inv_variance,
        }
        scalars = {
            "alpha": alpha,
            "beta": beta,
            "epsilon": epsilon,
            "exponential_average_factor": exponential_average_factor,
        }
        failure, plan = None, None
        try:
            plan = self._plan("forward", arrays, scalars)
            elemt, merge = plan.program("elemt"), plan.merge(self._counts)
            self._check_workspace(workspace, plan)
            if plan.elements:
                self._carry(FORWARD, plan.elements)
                plan.program("stats").execute(workspace)
                plan.program("axpby").execute(self._room(plan.program("axpby").nbytes))
        except Exception as error:  # whatever it is, the others wait in the collective
            failure = error
        row = self._failed if plan is None or failure else self._rows[FORWARD] if plan.elements else self._empty
        self._communicator.all_gather(row, self._received, self._handle.stream)
        counts = self._outcome(FORWARD, True, failure)
        assert plan is not None
        if counts != self._counts:
            if sum(counts) == 1 and running_mean is not None:
                raise ArgumentError("x", "1 element on all ranks", "more of them where running statistics are updated")
            merge = plan.merge(counts)
            self._counts = counts if sum(counts) > 1 else self._counts  # 1 is refused, if only sometimes
        merge.execute(self._room(merge.nbytes))
        elemt.execute(workspace)
        return sum(counts)

    def backward(
        self,
        x: Any,
        dy: Any,
        scale: Any,
        dx: Any,
        dscale: Any = None,
        dbias: Any = None,
        *,
        saved_mean: Any,
        saved_inv_variance: Any,
        alpha: float = 1.0,
        beta: float = 0.0,
        workspace: Any = None,
        alpha_data: float | None = None,
        beta_data: float | None = None,
    ) -> int:
        """Gradients of `forward`.

        ``dx = scale * inv * (dy - sum(dy) / n - (x - mean) * inv**2 * sum(dy * (x - mean)) / n)`` with sums and n of
        all ranks, blended by the data pair; dscale and dbias are the sums of this rank's data.

        Parameters
        ----------
        x, dy : array, one shape and dtype
            The local batch; the axes that are reduced may be empty.
        scale : array, derived shape, or None
            None: 1.
        dx : array, shape and dtype of x
            Written. Read only if `beta` is not 0.
        dscale, dbias : array, derived shape, optional
            Written; 0 where x is empty.
        saved_mean, saved_inv_variance : array, derived shape
            As `forward` wrote them.
        alpha, beta : float
        workspace : array or (address, bytes), optional
            As in `forward`.
        alpha_data, beta_data : float, optional
            Deprecated names of `alpha` and `beta`.

        Returns
        -------
        int
            Elements per statistic of all ranks.

        Raises
        ------
        ArgumentError, UnsupportedError, VendorError
            This rank failed. No rank has any element.
        RankError
            Another rank failed; with `deterministic` also if it called `forward`. Without it the two calls are
            different collectives, and what happens then is the communicator's matter.

        Notes
        -----
        Calls: those of `operations.backward_reduce` and `operations.backward_elemt`.
        Workspace: the larger one of the two.
        """
        if alpha_data is not None or beta_data is not None:
            alpha = _arguments.renamed("alpha", alpha, "alpha_data", alpha_data, 1.0)
            beta = _arguments.renamed("beta", beta, "beta_data", beta_data, 0.0)
        arrays = {
            "x": x,
            "dy": dy,
            "scale": scale,
            "dx": dx,
            "dscale": dscale,
            "dbias": dbias,
            "saved_mean": saved_mean,
            "saved_inv_variance": saved_inv_variance,
        }
        scalars = {"alpha": alpha, "beta": beta}
        failure, plan = None, None
        try:
            plan = self._plan("backward", arrays, scalars)
            elemt = plan.elemt(self._total)
            self._check_workspace(workspace, plan)
            self._carry(BACKWARD, plan.elements)
            plan.program("backward_reduce").execute(workspace)
        except Exception as error:
            failure = error
        row = self._failed if failure else self._rows[BACKWARD]
        if self._deterministic:
            self._communicator.all_gather(row, self._received, self._handle.stream)
        else:
            self._communicator.all_reduce(row, self._sums, self._handle.stream)
        total = sum(self._outcome(BACKWARD, self._deterministic, failure))
        assert plan is not None
        if self._deterministic:
            self._add_rows.execute(self._room(self._add_rows.nbytes))
        if total != self._total:
            elemt, self._total = plan.elemt(total), total
        elemt.execute(workspace)
        return total

    def workspace_size(self, call: str, *arguments: Any, **options: Any) -> int:
        """Bytes of workspace that a call needs, aligned to 64. Not a collective.

        Parameters
        ----------
        call : str
            ``"forward"`` or ``"backward"``.
        *arguments, **options
            Those of the call, without `workspace`.

        Returns
        -------
        int

        Raises
        ------
        ArgumentError, UnsupportedError
            As the call would.
        """
        if not issubclass(type(call), str) or call not in ("forward", "backward"):
            raise ArgumentError("call", call, "forward or backward")
        bound = inspect.signature(getattr(self, call)).bind(*arguments, **options)
        bound.apply_defaults()
        bound.arguments.pop("workspace")
        arrays = {name: value for name, value in bound.arguments.items() if name not in _SCALARS}
        scalars = {name: value for name, value in bound.arguments.items() if name in _SCALARS}
        return self._plan(call, arrays, scalars).nbytes

    def check(self) -> None:
        """Wait for the last call and raise if a rank had failed in it. Not a collective.

        Only where `counts` was given and memory is a device's do calls not see that themselves.

        Raises
        ------
        RankError
        """
        if self._last is not None:
            self._heads(*self._last)

    # -------- before the collective

    def _plan(self, call: str, arrays: dict[str, Any], scalars: dict[str, Any]) -> _Placed:
        """Everything that may be refused, before anything is done; kept for the next call with such arrays."""
        names = (*arrays, *[None] * len(scalars))
        kinds, addresses, held = self._handle._look(names, (*arrays.values(), *scalars.values()))
        plan = None if kinds is None else self._plans.get((call, kinds))
        if plan is None:
            given = zip(arrays, held, strict=False)  # as they said once; the scalars are behind them
            buffers = {n: None if a is None else self._handle.buffer(a, n) for n, a in given}
            scalars = dict(zip(scalars, held[len(arrays) :], strict=True))
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            apart = {
                n: None if b is None else b._replace(pointer=(i + 1) * _SLOT, owner=None)
                for i, (n, b) in enumerate(buffers.items())
            }
            plan = _Plan(self, apart, scalars) if call == "forward" else _BackwardPlan(self, apart, scalars)
            if kinds is not None:
                self._plans[call, kinds] = plan
        return _Placed(plan, addresses[1:], held)

    def _examine(self, x: Any) -> tuple[int, tuple[int, ...]]:
        """Elements per statistic of the local x, and the derived shape."""
        buffer = self._handle.buffer(x, "x")
        if buffer.dtype != self._dtype:
            raise ArgumentTypeError("x", f"dtype {buffer.dtype.short}", f"{self._dtype.short}, as agreed by all ranks")
        rank = len(buffer.dims)
        if not 1 <= rank <= 8:
            raise ArgumentError("x", f"dims {buffer.dims}", "rank 1 to 8")
        kept = operations.kept_axes(self._axis, rank)
        sizes = tuple(buffer.dims[a] for a in kept)
        if sizes != self._channels:
            allowed = f"sizes {self._channels} along axis {self._axis}, as agreed by all ranks"
            raise ArgumentError("x", f"dims {buffer.dims}", allowed)
        count = math.prod(buffer.dims[a] for a in range(rank) if a not in kept)
        if count >= _BASE**_DIGITS:
            raise ArgumentError("x", f"{count} elements per statistic", f"fewer than {_BASE**_DIGITS}")
        if self._promised is not None and count != self._promised[self._communicator.rank]:
            promised = self._promised[self._communicator.rank]
            raise ArgumentError("x", f"{count} elements per statistic", f"{promised}, as counts promised for this rank")
        return count, tuple(d if a in kept else 1 for a, d in enumerate(buffer.dims))

    def _parameter(self, name: str, array: Any, derived: tuple[int, ...], narrow: bool = True) -> Buffer:
        """A vector that the merge writes, flat."""
        buffer: Buffer = self._handle.buffer(array, name, output=True)
        _arguments.parameter_dims(name, buffer.dims, buffer.strides, derived)
        if not narrow and buffer.dtype != self._parameter_dtype:
            raise ArgumentTypeError(name, f"dtype {buffer.dtype.short}", self._parameter_dtype.short)
        return buffer._replace(dims=(math.prod(derived),), strides=(1,))

    def _program(self, operation: str, *arguments: Any, **options: Any) -> Checked:
        # Checked now and executed later: all refusals come before the collective.
        return Checked(self._handle, operation, *prepare_named(self._handle, operation, *arguments, **options))

    def _merge(self, counts: Sequence[int], options: dict[str, Any]) -> Any:
        width = (math.prod(self._channels),)
        flat: dict[str, Any] = dict.fromkeys(("variances", "variance", "running_mean", "running_variance"))
        flat |= {"mean": self._mean, "inv_variance": self._inv, "epsilon": 0.0, "exponential_average_factor": 0.0}
        flat |= options
        for name in ("mean", "inv_variance"):
            flat[name] = flat[name]._replace(dims=width, strides=(1,))
        return self._program("gather_stats", self._means, self._m2s, counts, **flat)

    def _check_workspace(self, workspace: Any, plan: _Placed) -> None:
        address, size = self._handle.memory(workspace)
        if workspace is None and (self._device == CPU or not plan.nbytes):
            return
        if size < plan.nbytes or address % ALIGNMENT:
            given = "None" if workspace is None else f"{size} bytes at {address:#x}"
            allowed = f"at least {plan.nbytes} bytes, aligned to {ALIGNMENT}"
            raise WorkspaceError("workspace", given, allowed)

    def _carry(self, code: int, count: int) -> None:
        """Put the count into a message, if it is not the one that it carries already."""
        if self._carried[code] != count:
            self._carried[code] = -1
            for place, digit in zip(self._places[code], _digits(count), strict=True):
                operations.fill(self._handle, digit, place)
            self._carried[code] = count

    # -------- after it

    def _outcome(self, code: int, gathered: bool, failure: Exception | None) -> list[int]:
        """Counts of the ranks, or of all together; raises on every rank if one failed."""
        self._last = code, gathered
        if failure is not None:
            raise failure
        if not self._reads:
            assert self._promised is not None
            return self._promised
        counts = self._heads(code, gathered)
        if not any(counts):
            raise ArgumentError("x", "no elements on any rank", "at least one rank with elements")
        return counts

    def _heads(self, code: int, gathered: bool) -> list[int]:
        """Read the headers of the last messages."""
        self._pack[gathered].execute(self._room(self._pack[gathered].nbytes))
        self._communicator.read(self._headers, self._host, self._handle.stream)
        size, me = self._communicator.size, self._communicator.rank
        heads = self._host.reshape(size, _HEADER)
        if not gathered:
            head = heads[0]
            failures = round(float(head[_FAILURES]))
            if failures == 1:
                _raise_failed((round(float(head[_FAILED_RANK])) - 1,), me)
            if head[_CODE] != code * size:
                raise RankError(f"rank {me}: the call cannot be completed, because it failed on {failures} other ranks")
            return [_number(head[_COUNT : _COUNT + _DIGITS])]
        failed = tuple(np.flatnonzero(heads[:, _CODE] == FAILED).tolist())
        if failed:
            _raise_failed(failed, me)
        others = tuple(np.flatnonzero(heads[:, _CODE] != code).tolist())
        if others:
            names = {FORWARD: "forward", BACKWARD: "backward"}
            raise RankError(f"rank {me} called {names[code]}, but {_ranks(others)} did not: other calls", others)
        return [_number(head[_COUNT : _COUNT + _DIGITS]) for head in heads]


# Argument i is planned at address (i + 1) * _SLOT: beyond all memory, and far enough from the others.
_SLOT = 1 << SLOT_BITS
_PLANS = 64
_SCALARS = ("alpha", "beta", "epsilon", "exponential_average_factor")


class _Movable:
    """An operation checked for arrays at made-up addresses, and executed wherever they are."""

    def __init__(self, call: Checked) -> None:
        self._call = call
        self._last: tuple[tuple[int, ...], Checked] | None = None

    @property
    def nbytes(self) -> int:
        return self._call.nbytes

    def at(self, addresses: tuple[int, ...]) -> Checked:
        """The call for arrays at these addresses; arrays that overlap are refused here."""
        if self._last is None or self._last[0] != addresses:
            moved = tuple([_moved(address, addresses) for address in self._call.addresses])
            self._call.prepared.check(moved)
            self._last = addresses, self._call._replace(addresses=moved)
        return self._last[1]


def _moved(address: int, addresses: tuple[int, ...]) -> int:
    slot, offset = divmod(address, _SLOT)
    return addresses[slot - 1] + offset if slot else address


class _Plan:
    """A forward call, for arrays of one description."""

    def __init__(self, layer: SyncBatchNorm, arrays: dict[str, Any], scalars: dict[str, Any]) -> None:
        self._layer = weakref.proxy(layer)  # which keeps the plan: its memory must not wait for the cycle collector
        self._arrays, self._scalars = arrays, scalars
        self.elements, self._derived = layer._examine(arrays["x"])
        self.programs: dict[Any, _Movable] = {}
        self._prepare()
        self.nbytes = max(p.nbytes for name, p in self.programs.items() if name != "axpby")

    def _prepare(self) -> None:
        layer, arrays, scalars, derived = self._layer, self._arrays, self._scalars, self._derived
        mean, inv = layer._mean, layer._inv
        saved = arrays["saved_mean"], arrays["saved_inv_variance"]
        if _arguments.pair("saved_mean", saved[0], "saved_inv_variance", saved[1]):
            mean = layer._parameter("saved_mean", saved[0], derived, narrow=False)
            inv = layer._parameter("saved_inv_variance", saved[1], derived, narrow=False)
        self._merged = {
            "mean": mean,
            "inv_variance": inv,
            "epsilon": scalars["epsilon"],
            "exponential_average_factor": scalars["exponential_average_factor"],
        }
        running = arrays["running_mean"], arrays["running_variance"]
        if _arguments.pair("running_mean", running[0], "running_variance", running[1]):
            self._merged["running_mean"] = layer._parameter("running_mean", running[0], derived)
            self._merged["running_variance"] = layer._parameter("running_variance", running[1], derived)
        if self.elements:
            targets = {"mean": layer._row_mean, "variance": layer._variance, "inv_variance": None}
            self._add("stats", arrays["x"], **targets, epsilon=scalars["epsilon"], axis=layer._axis)
            self._add("axpby", float(self.elements), layer._variance, 0.0, layer._row_m2)
        shaped = [v._replace(dims=derived, strides=_arguments.packed_strides(derived)) for v in (mean, inv)]
        data = {"alpha": scalars["alpha"], "beta": scalars["beta"], "axis": layer._axis}
        self._add("elemt", arrays["x"], arrays["scale"], arrays["bias"], *shaped, arrays["y"], **data)

    def _add(self, operation: str, *arguments: Any, **options: Any) -> None:
        self.programs[operation] = _Movable(self._layer._program(operation, *arguments, **options))

    def merge(self, counts: Sequence[int]) -> _Movable:
        """`gather_stats` of ranks with these counts."""
        key = tuple(counts)
        if key not in self.programs:
            self._keep_few()
            self.programs[key] = _Movable(self._layer._merge(counts, self._merged))
        return self.programs[key]

    def _keep_few(self) -> None:
        if len(self.programs) >= _PLANS:
            self.programs = {name: p for name, p in self.programs.items() if isinstance(name, str)}


class _BackwardPlan(_Plan):
    """A backward call, for arrays of one description."""

    def _prepare(self) -> None:
        layer, arrays = self._layer, self._arrays
        self._blend = {name: _arguments.scalar(self._scalars[name], name, layer._dtype) for name in ("alpha", "beta")}
        self._common = {"x": arrays["x"], "dy": arrays["dy"]}
        for name in ("saved_mean", "saved_inv_variance"):  # the operations call them mean and inv_variance
            if arrays[name] is None:
                raise ArgumentError(name, None, "what forward wrote")
            self._common[name.removeprefix("saved_")] = arrays[name]
        sums = dict(zip(("sum_dy", "sum_dy_xmu"), layer._row_sums, strict=True))
        wanted = {"dscale": arrays["dscale"], "dbias": arrays["dbias"]}
        self._add("backward_reduce", **self._common, **sums, **wanted, axis=layer._axis)
        self.elemt(layer._total)

    def elemt(self, total: int) -> _Movable:
        """`backward_elemt` for so many elements on all ranks."""
        if total not in self.programs:
            self._keep_few()
            layer, arrays = self._layer, self._arrays
            sums = dict(zip(("sum_dy", "sum_dy_xmu"), layer._all_sums, strict=True))
            given = {**self._common, **sums, "scale": arrays["scale"], "count": total, "dx": arrays["dx"]}
            program = layer._program("backward_elemt", **given, **self._blend, axis=layer._axis)
            self.programs[total] = _Movable(program)
        return self.programs[total]


class _Placed:
    """A plan with the arrays of one call."""

    def __init__(self, plan: Any, addresses: tuple[int, ...], held: object) -> None:
        self._plan, self._addresses = plan, addresses
        self._held = held  # arrays that came by a protocol live as long as what they gave
        self.elements: int = plan.elements
        self.nbytes: int = plan.nbytes

    def program(self, name: str) -> Any:
        return self._plan.programs[name].at(self._addresses)

    def merge(self, counts: Sequence[int]) -> Any:
        return self._plan.merge(counts).at(self._addresses)

    def elemt(self, total: int) -> Any:
        return self._plan.elemt(total).at(self._addresses)
