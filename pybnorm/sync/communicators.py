"""Communicators: what `SyncBatchNorm` needs of one, and adapters for those that it knows."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pybnorm._arrays import CPU, CUDA, ROCM
from pybnorm.errors import ArgumentError, ArgumentTypeError

Array = npt.NDArray[Any]
_NOTHING = contextlib.nullcontext()


@runtime_checkable
class Communicator(Protocol):
    """The members of a communicator that `SyncBatchNorm` needs. An object with them is used directly.

    One may also have ``begin_read``, with the arguments of `read`: it begins the copy and returns a function that waits
    for it. Backward then computes meanwhile.

    `vector` makes all vectors: contiguous, one-dimensional, of float32 or float64. A stream is an address, 0 on the
    CPU.

    Examples
    --------
    >>> class Twin:  # of a second rank that has the same data
    ...     rank, size, devices = 0, 2, (1,)
    ...     def vector(self, values, device_type, stream):
    ...         return values.copy()
    ...     def all_gather(self, send, received, stream):
    ...         received[:] = np.tile(send, 2)
    ...     def all_reduce(self, send, received, stream):
    ...         received[:] = send * 2
    ...     def read(self, vector, out, stream):
    ...         out[:] = vector
    >>> isinstance(Twin(), pybnorm.sync.Communicator)
    True
    """

    rank: int
    size: int
    devices: tuple[int, ...]
    """DLPack device types of the memory that its collectives move. The constructor exchanges its headers in memory of
    the first."""

    def vector(self, values: Array, device_type: int, stream: int) -> Any:
        """A copy of a NumPy vector in memory of this type on the current device, complete on return."""

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        """Write the vectors of all ranks to `received`, in the order of the ranks."""

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        """Write the sum over all ranks to `received`."""

    def read(self, vector: Any, out: Array, stream: int) -> None:
        """Copy a vector to a NumPy vector in the order of the stream, and wait for the copy."""


class _Mpi:
    """mpi4py: ``MPI_Allgather`` and ``MPI_Allreduce`` on host memory."""

    devices = (CPU,)

    def __init__(self, communicator: Any) -> None:
        mpi = importlib.import_module("mpi4py.MPI")
        if communicator == mpi.COMM_NULL or communicator.Is_inter():
            raise ArgumentError("communicator", communicator, "an intracommunicator that this process is part of")
        self._communicator, self._sum = communicator, mpi.SUM
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()

    def vector(self, values: Array, device_type: int, stream: int) -> Any:
        return values.copy()

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        self._communicator.Allgather(send, received)

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        self._communicator.Allreduce(send, received, self._sum)

    def read(self, vector: Any, out: Array, stream: int) -> None:
        out[:] = vector


class _Torch:
    """``torch.distributed``: all_gather of one tensor, and all_reduce, on any of its backends.

    Each call runs with the handle's stream as PyTorch's current one. That orders collectives and the vendor's kernels
    without a wait on the host. What is read from a device comes over pinned memory.
    """

    def __init__(self, communicator: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._distributed = importlib.import_module("torch.distributed")
        self._group = communicator
        distributed = self._distributed  # the first name is that of PyTorch 2.13 and later
        self._gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self.rank, self.size = communicator.rank(), communicator.size()
        config = self._distributed.get_backend_config(communicator)  # "cpu:gloo,cuda:nccl"
        named = [pair.partition(":")[0] for pair in str(config).split(",")]
        device = ROCM if getattr(self._torch.version, "hip", None) else CUDA
        found = {"cpu": CPU} | ({"cuda": device} if self._torch.cuda.is_available() else {})
        self.devices = tuple(kind for name, kind in found.items() if name in named)
        if not self.devices:
            raise ArgumentError("communicator", f"a process group for {config}", "one whose backend is for cpu or cuda")
        # Asked at each call: PyTorch's own objects for streams take ten times as long. PyTorch 1 does not have it.
        self._current = getattr(self._torch._C, "_cuda_getCurrentRawStream", None)
        self._kept: tuple[int, int, Any] = (-1, -1, None)
        self._pinned: dict[tuple[int, Any], tuple[Any, Array]] = {}
        self._copied: Any = None

    def vector(self, values: Array, device_type: int, stream: int) -> Any:
        tensor = self._torch.from_numpy(values.copy())
        if device_type == CPU:
            return tensor
        place = self._torch.cuda.current_device()
        with self._on(stream, place):
            moved = tensor.to(f"cuda:{place}")
            self._torch.cuda.current_stream().synchronize()
        return moved

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        if send.is_cpu:  # gloo has gathered into one tensor only since PyTorch 2
            rows = list(received.view(self.size, -1).unbind())
            self._distributed.all_gather(rows, send, group=self._group)
            return
        with self._on(stream, send.get_device()):
            self._gather(received, send, group=self._group)

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        with self._on(stream, send.get_device()):
            received.copy_(send)
            self._distributed.all_reduce(received, group=self._group)

    def read(self, vector: Any, out: Array, stream: int) -> None:
        self.begin_read(vector, out, stream)()

    def begin_read(self, vector: Any, out: Array, stream: int) -> Callable[[], None]:
        """Begin what `read` does; the function that is returned ends it. One read at a time."""
        place, torch = vector.get_device(), self._torch
        if place < 0:
            return functools.partial(torch.from_numpy(out).copy_, vector)
        key = vector.numel(), vector.dtype
        if key not in self._pinned:
            made = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._pinned[key] = made, made.numpy()
            self._copied = self._copied or torch.cuda.Event()
        pinned, values = self._pinned[key]
        with self._on(stream, place):
            pinned.copy_(vector, non_blocking=True)
            self._copied.record(self._stream(stream, place))

        def end() -> None:
            self._copied.synchronize()
            out[:] = values

        return end

    def _on(self, stream: int, place: int) -> Any:
        """Make a stream PyTorch's current one of a device; -1 is the CPU."""
        if place < 0 or (self._current is not None and self._current(place) == stream):
            return _NOTHING
        return self._torch.cuda.stream(self._stream(stream, place))

    def _stream(self, stream: int, place: int) -> Any:
        """PyTorch's object for a stream; the last one is kept."""
        if self._kept[:2] != (stream, place):
            cuda = self._torch.cuda
            # ExternalStream(0) would be a new stream of PyTorch's pool, not the default stream.
            made = cuda.ExternalStream(stream, device=place) if stream else cuda.default_stream(place)
            self._kept = stream, place, made
        return self._kept[2]


class _Cupy:
    """CuPy's ``NcclCommunicator``: ``ncclAllGather`` and ``ncclAllReduce``, RCCL's in CuPy for ROCm."""

    def __init__(self, communicator: Any) -> None:
        self._cupy = importlib.import_module("cupy")
        self._nccl = importlib.import_module("cupy.cuda.nccl")
        self._communicator = communicator
        self.rank, self.size = communicator.rank_id(), communicator.size()
        self.devices = (ROCM if self._cupy.cuda.runtime.is_hip else CUDA,)

    def vector(self, values: Array, device_type: int, stream: int) -> Any:
        with self._cupy.cuda.Device(self._communicator.device_id()), self._cupy.cuda.ExternalStream(stream) as queue:
            vector = self._cupy.asarray(values)
            queue.synchronize()
        return vector

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        self._communicator.allGather(send.data.ptr, received.data.ptr, send.size, self._kind(send), stream)

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        operation = self._nccl.NCCL_SUM
        self._communicator.allReduce(send.data.ptr, received.data.ptr, send.size, self._kind(send), operation, stream)

    def read(self, vector: Any, out: Array, stream: int) -> None:
        vector.get(stream=self._cupy.cuda.ExternalStream(stream), out=out)

    def _kind(self, vector: Any) -> int:
        return int(self._nccl.NCCL_FLOAT64 if vector.dtype == np.float64 else self._nccl.NCCL_FLOAT32)


class _Nccl4py:
    """nccl4py's ``nccl.core.Communicator``, with memory from ``cuda.core``, which nccl4py requires."""

    devices = (CUDA,)

    def __init__(self, communicator: Any) -> None:
        self._core = importlib.import_module("cuda.core")
        self._sum = importlib.import_module("nccl.core").SUM
        self._communicator = communicator
        self.rank, self.size = int(communicator.rank), int(communicator.nranks)
        self._device = communicator.device

    def vector(self, values: Array, device_type: int, stream: int) -> Any:
        queue = self._queue(stream)
        memory = self._device.allocate(values.nbytes, stream=queue)
        memory.copy_from(self._core.Buffer.from_handle(values.ctypes.data, values.nbytes), stream=queue)
        queue.sync()
        place = {"data": (int(memory.handle), False), "strides": None, "version": 3}
        interface = {"shape": values.shape, "typestr": values.dtype.str, **place}
        return types.SimpleNamespace(memory=memory, nbytes=values.nbytes, __cuda_array_interface__=interface)

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        self._communicator.allgather(send, received, stream=stream)

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        self._communicator.allreduce(send, received, self._sum, stream=stream)

    def read(self, vector: Any, out: Array, stream: int) -> None:
        queue = self._queue(stream)
        self._core.Buffer.from_handle(out.ctypes.data, out.nbytes).copy_from(vector.memory, stream=queue)
        queue.sync()

    def _queue(self, stream: int) -> Any:
        return self._core.Stream.from_handle(stream) if stream else self._device.default_stream


_ADAPTERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mpi4py": (_Mpi, ("Allgather", "Allreduce", "Get_rank")),
    "torch": (_Torch, ("allgather", "allreduce", "rank", "size")),
    "cupy": (_Cupy, ("allGather", "allReduce", "rank_id", "size")),
    "nccl": (_Nccl4py, ("allgather", "allreduce", "nranks")),
}
"""By the package of a communicator's class: the adapter, and the members that it needs."""
_ADAPTERS["cupy_backends"] = _ADAPTERS["cupy"]  # the package of the class NcclCommunicator


def _connect(communicator: Any) -> Communicator:
    """Choose the adapter by the package of the communicator's class."""
    for cls in type(communicator).__mro__:
        adapter, members = _ADAPTERS.get(cls.__module__.partition(".")[0], (None, ()))
        if adapter is not None and all(hasattr(communicator, name) for name in members):
            connected: Communicator = adapter(communicator)
            return connected
    with contextlib.suppress(Exception):  # raised by the object's attributes
        if isinstance(communicator, Communicator) and issubclass(type(communicator.size), int):
            return communicator
    raise ArgumentTypeError(
        "communicator",
        communicator,
        "an mpi4py communicator, a torch.distributed process group, a cupy.cuda.nccl.NcclCommunicator, an "
        "nccl.core.Communicator, or an object with the members of pybnorm.sync.Communicator",
    )
