"""Synchronized batch normalization: the statistics are those of the data of all ranks.

The vendors' libraries compute on one device. This module joins their split operations (`pybnorm.operations`) over a
communicator that the caller has: mpi4py, ``torch.distributed``, or NCCL and RCCL through CuPy or nccl4py.

========  ==========================================================  =======================================
forward   `stats` of the local x                                      all_gather of [mean, variance, count]
          `gather_stats`, in the order of the ranks; inference
backward  `backward_reduce` with the mean of all ranks                all_gather of [sum_dy, sum_dy_xmu] and a sum,
          `backward_elemt`                                            or all_reduce of more than 8 ranks
========  ==========================================================  =======================================

Each call makes one collective. Forward always gathers, because the merge squares the differences of the ranks' means:
with sums over ranks it would need a second collective. Backward gathers where that is fast, with few ranks, and where
results must repeat (``deterministic``).

Backward does not wait for the headers before it computes: it expects the number of elements of the last forward, and
computes dx again if the headers say another one.

Agreement. The constructor is a collective. All ranks exchange a header and compare it. If ranks disagree on channels,
dtype, backend, `deterministic` or `counts`, or if one got a bad argument, every rank raises an error. The agreement
fixes the size of all later messages. Each message carries the call's name, the rank's count and whether the rank
failed. A rank whose call fails before the collective (a wrong shape, a workspace that is too small, ...) still joins
it: this rank raises its own error, and the others raise `RankError`; their y or dx has been written over by then. A
rank that never calls looks like a slow one; only the time-out of the communicator, if it has one, ends the wait.
"""

from __future__ import annotations

import inspect
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pybnorm import _arguments
from pybnorm._arrays import CPU, note_written
from pybnorm._core import Cache, Handle, backends, look
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError, ClosedError, RankError
from pybnorm.operations.ways import slotted
from pybnorm.sync.communicators import Communicator, _connect
from pybnorm.sync.memory import _Memory
from pybnorm.sync.messages import FAILED, FORWARD, _agree, _Agreed
from pybnorm.sync.plans import _MOST, _BackwardPlan, _ForwardPlan, _OutsidePlan, _Terms

__all__ = ["Communicator", "RankError", "SyncBatchNorm"]


class _Later:
    """The counts of a forward that did not wait for them. `told` waits, and raises if a rank failed."""

    def __init__(self, told: Callable[[], tuple[int, ...]], running: bool) -> None:
        self.told: Callable[[], tuple[int, ...]] | None = told
        self._running = running
        self._outcome: int | Exception = 0

    def total(self) -> int:
        """Their sum. They are read once, by the call's backward or the next forward."""
        told = self.told
        if told is not None:
            try:
                self._outcome = sum(told())
                if self._outcome == 1 and self._running:
                    raise ArgumentError("x", "1 element on all ranks", "more where running statistics are updated")
            except Exception as error:  # the other one asks for it too
                self._outcome = error
            self.told = None  # only now: another thread that sees it takes the outcome
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class SyncBatchNorm:
    """Training-mode batch norm whose statistics are those of all ranks' data.

    The object owns all memory that calls need beside the caller's workspace: the messages, what is received, and the
    merged statistics. It serves one call at a time, on one stream. Calls are collectives: all ranks make them in the
    same order.

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
        True: each rank computes only in ways whose bits repeat, and backward gathers the sums of the ranks, however
        many, to add them in the same order. Results are then equal bit for bit between runs, wherever the ranks run.
        False: the fastest ways, and of more than 8 ranks all_reduce, which adds in the communicator's order.
    counts : sequence of int, optional
        Promised elements per statistic of each rank, for every call. Without it each message carries the count, and
        the host reads it, which for device memory waits for the stream once a call. With it nothing waits. Then a
        device does not see the failure of another rank: results are NaN, and `check` raises.

    Notes
    -----
    dscale and dbias stay sums over the local data, as in ``torch.nn.SyncBatchNorm``: data-parallel training averages
    or adds the gradients of all parameters afterwards.
    The batches of ranks may differ in size, and may be empty.

    Examples
    --------
    >>> import types
    >>> twin = types.SimpleNamespace(  # of a second rank that has the same data
    ...     rank=0, size=2, devices=(1,), vector=lambda values, *_: values.copy(),
    ...     all_gather=lambda send, received, _: np.copyto(received, np.tile(send, 2)),
    ...     all_reduce=lambda send, received, _: np.copyto(received, send * 2),
    ...     read=lambda vector, out, _: np.copyto(out, vector),
    ... )
    >>> x, y, (scale, bias, mean, inverse) = np.float32([[1], [3]]), np.empty((2, 1), np.float32), np.ones((4, 1), "f4")
    >>> with pybnorm.Handle("native") as handle:
    ...     norm = pybnorm.sync.SyncBatchNorm(handle, twin, 1)
    ...     size = norm.workspace_size("forward", x, scale, bias, y)
    ...     norm.forward(x, scale, bias, y, saved_mean=mean, saved_inv_variance=inverse)  # elements of all ranks
    ...     norm.backward(x, y, scale, np.empty_like(x), saved_mean=mean, saved_inv_variance=inverse)
    ...     norm.check()
    4
    4
    """

    _few = 8
    """Ranks up to which backward gathers also without `deterministic`: a gather and a sum are faster then."""
    _room: Callable[[int], tuple[tuple[int, int], Any]] | None = None
    """Where a call is given no workspace: makes one of so many bytes, and has what keeps it."""

    def __init__(
        self, handle: Handle, communicator: Any, channels: int | Sequence[int], dtype: object = DataType.FLOAT32, *,
        axis: int | Sequence[int] = 1, deterministic: bool = False, counts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._communicator = adapter = _connect(communicator)
        if adapter.size < 2:
            allowed = "2 ranks or more; operations.forward_training and backward are the batch norm of one"
            raise ArgumentError("communicator", f"{adapter.size} rank", allowed)
        failure: Exception | None = None
        mine = _Agreed()
        try:
            mine = self._prepare(handle, channels, dtype, axis, deterministic, counts)
        except Exception as error:  # any error: the other ranks wait in the exchange
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
        sizes = _arguments.dims(given, "channels", low=0)
        kind = _arguments.data_type(dtype)
        kept = _arguments.axes(axis, 8)  # only their number counts here: the rank of x is not known yet
        if len(kept) != len(sizes):
            raise ArgumentError("channels", sizes, f"a size for each of the {len(kept)} axes {axis}")
        repeating = _arguments.boolean(deterministic, "deterministic")
        promised = None if counts is None else self._check_counts(counts)
        self._promised = promised
        self._reads = self._device == CPU  # also promised counts: they are in host memory already
        # The next call is expected to have the counts of the last one; its programs are made before the collective, and
        # backward's runs before they are known.
        self._counts = promised or (2,) * adapter.size
        self._total = sum(self._counts)
        self._last: int | None = None
        self._owed: Exception | None = None
        """This rank's failure in a call whose headers no rank reads: the next forward raises it on all."""
        self._late: _Later | None = None
        """The counts of the last forward of which nobody has asked for them."""
        self._plans = Cache()
        own = None if promised is None else promised[adapter.rank]
        self._terms = _Terms(sizes, kind, axis, own)
        width = _arguments.derived_data_type(kind)
        self._memory = _Memory(handle, adapter, sizes, width, repeating, repeating or adapter.size <= self._few)
        told = 0 if promised is None else 1 + zlib.crc32(repr(promised).encode())
        backend = backends().index(handle.backend)
        return _Agreed(0, int(kind), backend, int(repeating), told, sizes)

    def _check_counts(self, counts: Any) -> tuple[int, ...]:
        given = _arguments.items(counts, "counts", "a sequence of integers", 1 << 20)
        try:
            numbers = tuple([operator.index(n) for n in given])
        except Exception as error:  # the object's own too
            raise ArgumentTypeError("counts", counts, "a sequence of integers") from error
        if len(numbers) != self._communicator.size or min(numbers) < 0 or not any(numbers):
            allowed = f"{self._communicator.size} numbers from 0, one for each rank, not all 0"
            raise ArgumentError("counts", list(numbers), allowed)
        return numbers

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the object owns."""
        return self._memory.nbytes

    # -------- calls

    def forward(
        self, x: Any, scale: Any, bias: Any, y: Any, *, alpha: float = 1.0, beta: float = 0.0, epsilon: float = 1e-5,
        exponential_average_factor: float = 0.1, unbiased: bool = True, running_mean: Any = None,
        running_variance: Any = None, saved_mean: Any = None, saved_inv_variance: Any = None, workspace: Any = None,
    ) -> int:  # fmt: skip
        """Normalize by the statistics of all ranks.

        ``y = alpha * (scale * (x - mean) / sqrt(variance + epsilon) + bias) + beta * y``;
        ``running = (1 - factor) * running + factor * batch`` with the variance over n - 1, n that of all ranks. The
        merge is Chan, Golub & LeVeque 1983 (`operations.gather_stats`).

        Parameters
        ----------
        x : array
            The local batch; reduced axes may be empty.
        scale, bias, y, unbiased, running_mean, running_variance
            As in `operations.forward_training`; running statistics get the same values on all ranks.
        alpha, beta, epsilon, exponential_average_factor : float
            Of this rank; ranks should give the same.
        saved_mean, saved_inv_variance : array, derived shape and dtype, optional
            Written, for `backward`; both or none.
        workspace : array or (address, bytes), optional
            At least `workspace_size` of the same arguments. None: on CPU backends the handle's.

        Returns
        -------
        int
            Elements per statistic of all ranks.
        """
        arrays = x, scale, bias, y, running_mean, running_variance, saved_mean, saved_inv_variance
        values = *arrays, alpha, beta, epsilon, exponential_average_factor, unbiased
        given = self._exchange(_ForwardPlan, values, self._counts, workspace, self._promised)
        plan, merge, addresses, room, told, _held = given
        counts = told()
        total = sum(counts)
        if counts != self._counts:
            if total == 1 and running_mean is not None:
                raise ArgumentError("x", "1 element on all ranks", "more of them where running statistics are updated")
            merge = plan.after(counts)
            # Never expect a total of 1, which the merge refuses where running statistics are updated.
            self._counts = counts if total > 1 else self._counts
        self._total = total
        self._memory.run(merge, "forward", addresses)
        plan.elementwise.execute(self._handle, "forward", addresses, room)
        return total

    def _begin(self, values: tuple[Any, ...]) -> tuple[_Later, Callable[[int, int], None]]:
        """`forward` of all its arguments to where ranks have sent their means and inverse standard deviations.

        The caller merges them on the device, so that nothing waits for the counts; it calls what is returned with the
        addresses of the results, in place of those of the saved statistics.
        """
        _, elementwise, addresses, room, told, held = self._exchange(_OutsidePlan, values, None, None, None)
        self._late = counts = _Later(told, values[4] is not None)

        def finish(mean: int, inverse: int) -> None:
            elementwise.execute(self._handle, "forward", (*addresses[:-2], mean, inverse), room)
            held.clear()

        return counts, finish

    def backward(
        self, x: Any, dy: Any, scale: Any, dx: Any, dscale: Any = None, dbias: Any = None, *, saved_mean: Any,
        saved_inv_variance: Any, alpha: float = 1.0, beta: float = 0.0, workspace: Any = None,
    ) -> int:  # fmt: skip
        """Gradients of `forward`.

        ``dx = scale * r * (dy - sum(dy) / n - (x - mean) * r**2 * sum(dy * (x - mean)) / n)`` with r the
        `saved_inv_variance`, and sums and n of all ranks; blended by alpha and beta. dscale and dbias are the sums of
        this rank's data.

        Parameters
        ----------
        x, dy : array, one shape and dtype
            The local batch; reduced axes may be empty.
        scale, dx, alpha, beta
            As in `operations.backward_elemt`.
        dscale, dbias : array, derived shape, optional
            Written; 0 where x is empty.
        saved_mean, saved_inv_variance : array, derived shape
            As `forward` wrote them.
        workspace : array or (address, bytes), optional
            As in `forward`.

        Returns
        -------
        int
            Elements per statistic of all ranks.
        """
        values = x, dy, scale, dx, dscale, dbias, saved_mean, saved_inv_variance, alpha, beta
        self._total = self._differentiate(values, self._total, workspace, self._promised)
        return self._total

    def _differentiate(self, values: tuple[Any, ...], expected: int, workspace: Any, known: Any) -> int:
        """`backward` of all its arguments, which expects so many elements.

        Where `known` counts are given a device waits for nothing. Of a rank that fails the others then get NaN.
        """
        given = self._exchange(_BackwardPlan, values, expected, workspace, known)
        plan, elemt, addresses, room, told, _held = given
        self._memory.add_rows()
        if plan.repeats:
            elemt.execute(self._handle, "backward", addresses, room)
        total = sum(told())
        if total != expected or not plan.repeats:
            plan.after(total).execute(self._handle, "backward", addresses, room)
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
        """
        if not issubclass(type(call), str) or call not in ("forward", "backward"):
            raise ArgumentError("call", call, "forward or backward")
        bound = inspect.signature(getattr(self, call)).bind(*arguments, **options)
        bound.apply_defaults()
        kind, expected = (_ForwardPlan, self._counts) if call == "forward" else (_BackwardPlan, self._total)
        values = tuple([bound.arguments[name] for name in (*kind.array_names, *kind.scalar_names)])
        nbytes: int = self._plan(kind, values, expected)[0].before.nbytes
        return nbytes

    def check(self) -> None:
        """Wait for the last call, and raise if a rank failed in it. Not a collective.

        Needed only if `counts` was given and the memory is a device's: other calls check that themselves.
        """
        if self._last is not None:
            self._memory.counts(self._last, self._handle.stream)()

    # -------- planning

    def _plan(self, kind: type[Any], values: tuple[Any, ...], expected: Any) -> tuple[Any, tuple[int, ...], list[Any]]:
        """The plan of a call, the addresses of its slots, and what must live as long as they are used.

        The first call with a given signature is validated and planned; later ones reuse the plan.
        """
        key, addresses, held = look(self._handle, kind.roles, values)
        plan = None if key is None else self._plans.get((kind, key))
        if plan is None:
            arrays: dict[str, Any] = dict(zip(kind.array_names, held, strict=False))
            for slot, (name, array) in enumerate(arrays.items(), len(self._memory.addresses)):
                if array is not None:
                    arrays[name] = slotted(self._handle.buffer(array, name), slot)
            scalars = dict(zip(kind.scalar_names, held[len(arrays) :], strict=True))
            plan = kind(self._memory, self._terms, arrays, scalars, expected)
            if key is not None:
                self._plans.keep((kind, key), plan, _MOST)
        return plan, (*self._memory.addresses, *addresses[1:]), held

    def _exchange(
        self, kind: type[Any], values: tuple[Any, ...], expected: Any, workspace: Any, known: tuple[int, ...] | None
    ) -> tuple[Any, Any, tuple[int, ...], Any, Callable[[], tuple[int, ...]], list[Any]]:
        """Plan a call, compute this rank's message and exchange it.

        Returns the plan; its program for what was expected; the addresses of its slots; the workspace; what waits for
        the counts of the ranks, or only their sum, and raises if a rank failed; and what must live until the end.
        """
        memory, code = self._memory, kind.code
        known = None if self._reads else known
        room: tuple[int, int] | None = None
        try:
            if self._owed is not None and code == FORWARD:
                raise self._owed
            late = self._late
            if code == FORWARD and late is not None and late.told is not None:  # before another read into its memory
                late.total()
            plan, addresses, held = self._plan(kind, values, expected)
            after = plan.after(expected)
            if workspace is None and self._room is not None and plan.before.nbytes:
                room, owner = self._room(plan.before.nbytes)
                held.append(owner)
            elif workspace is not None:
                room = self._handle.memory(workspace)  # looked at once for both programs
            plan.start(addresses, room)
            note_written(values[kind.written])
        except Exception as error:  # any error: the other ranks wait in the collective
            self._fail(code, error, known is None or known is self._promised)
        stream = self._handle.stream
        memory.exchange(code, plan.row, stream)
        self._last = code
        told = memory.counts(code, stream) if known is None else lambda: known
        return plan, after, addresses, room, told, held

    def _fail(self, code: int, error: Exception, told: bool) -> NoReturn:
        """Join a call's collective as a rank that failed; unless the others are told, they are in the next forward."""
        self._memory.exchange(code, FAILED, self._handle.stream)
        self._last, self._owed = code, None if told else error
        raise error
