"""Kernels in C, computed by plans: in the operators of `pybnorm.torch.operators`, and in PyTorch's own by `install`."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from pybnorm import _arguments, _core, functional
from pybnorm._arrays import CPU, Buffer
from pybnorm.enums import DataType, Mode, Operation
from pybnorm.errors import ArgumentError, LibraryError, LibraryNotFoundError, LibraryVersionError
from pybnorm.torch import calls, operators
from pybnorm.torch.calls import REFUSALS

__all__ = ["Installation", "install"]

_DTYPES = {5: DataType.FLOAT16, 6: DataType.FLOAT32, 7: DataType.FLOAT64, 15: DataType.BFLOAT16}  # by PyTorch's numbers
_UNBLENDED = {"alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0}
_log = logging.getLogger("pybnorm.torch")
_lock = threading.Lock()
_installed: set[Installation] = set()
_registered: list[tuple[str, str]] = []  # dispatch keys, and operators whose kernels are registered under them
_theirs: dict[tuple[str, bool], Callable[..., Any]] = {}  # PyTorch's own kernels, which ours are registered over


class Installation:
    """The effect of `install`: `remove` undoes it, and so does the end of a ``with`` block.

    Attributes
    ----------
    devices : tuple of str
        Where plans compute by it: "cpu", "cuda".

    Examples
    --------
    >>> installation = pybnorm.torch.install()
    >>> installation.remove()
    >>> installation
    <Installation on cpu, removed>
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices

    def remove(self) -> None:
        """PyTorch's own kernels compute again, once nothing else is installed. A second time does nothing."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
                _register()

    def __repr__(self) -> str:
        where = " and ".join(self.devices)
        return f"<Installation on {where}{'' if self in _installed else ', removed'}>"

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def install(*, cuda: bool = False) -> Installation:
    """Have PyTorch's own batch norm on the CPU computed by pybnorm: ``torch.nn.BatchNorm2d`` and the like, unchanged.

    The kernels of ``aten::native_batch_norm`` and ``aten::native_batch_norm_backward`` are replaced in this process,
    for all threads. PyTorch's autograd stays around them, so little Python runs in a step. ``torch.compile`` makes
    code of its own in place of both.

    Parameters
    ----------
    cuda : bool
        Also on GPUs, with ``aten::cudnn_batch_norm`` and its backward; of a PyTorch for ROCm, which calls its devices
        cuda too, with ``aten::miopen_batch_norm``.

    Returns
    -------
    Installation
        For ``with``, or to `~Installation.remove`. Without either it is for good.

    Raises
    ------
    LibraryVersionError
        PyTorch is older than 2.10.
    LibraryNotFoundError
        With `cuda`: NVRTC or hipRTC, which compiles the kernels, is not here.
    ArgumentError
        `cuda` with a PyTorch that has none.

    Notes
    -----
    Beside 16-bit parameters the saved statistics are float32. PyTorch's own backward on a CPU takes 16 bits only: run
    the backward of such a model in the ``with`` block, too.
    PyTorch warns once, on standard error, that its kernels are overridden. An error of its own kernels comes as
    RuntimeError, whatever its class was.

    Examples
    --------
    >>> import torch
    >>> norm = torch.nn.BatchNorm2d(16)
    >>> with pybnorm.torch.install():
    ...     y = norm(torch.randn(4, 16, 8, 8))
    >>> bool(y.mean().abs() < 1e-5)
    True
    """
    if not _spoken():
        raise LibraryVersionError(
            f"install() needs PyTorch 2.10 or newer, this is {torch.__version__}; use convert()", backend="torch"
        )
    _arguments.instance(cuda, bool, "cuda", "a bool")
    place = calls.gpu() if cuda else None
    if cuda and place is None:
        raise ArgumentError("cuda", True, f"False with this PyTorch, {torch.__version__}, which has no CUDA or ROCm")
    found = []
    for key, backend in (("CUDA", place.backend), ("CPU", "native")) if place else (("CPU", "native"),):
        try:
            _core.load(backend)
            found.append(key)
        except LibraryNotFoundError:
            if not found:
                raise
    made = Installation(tuple(map(str.lower, found)))
    with _lock:
        _installed.add(made)
        try:
            _register()
        except BaseException:
            _installed.remove(made)
            raise
    return made


def _spoken() -> bool:
    """Say whether PyTorch has the interface that the kernels speak."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def _operators(key: str) -> tuple[str, ...]:
    """PyTorch's operators of batch norm under a dispatch key, without their backwards."""
    place = calls.gpu() if key == "CUDA" else None
    return "native_batch_norm", *(() if place is None else (place.operator,))


def _register() -> None:
    """Have the kernels in the operators of this package, and where those who asked for them want them."""
    keys = sorted({device.upper() for made in _installed for device in made.devices})
    names = [(key, name + suffix) for key in keys for name in _operators(key) for suffix in ("", "_backward")]
    place = calls.gpu()
    names += [(key, name) for key in ("CPU", *(() if place is None else ("CUDA",))) for name in operators.BY_CALLS]
    if names == _registered:
        return
    try:
        files = "libtorch_cpu.so", None if place is None else place.library
        _core.install_torch_kernels(functional._local, _Host(names), names, files)
    except BaseException:
        _registered.clear()
        calls.compiled = False
        raise
    _registered[:] = names
    calls.compiled = True


class _Host:
    """The part of the kernels that is Python."""

    def __init__(self, names: list[tuple[str, str]]) -> None:
        between = torch._C._aoti  # which older ones do not have
        self.tensor = between.alloc_tensor_by_stealing_from_void_ptr
        self.handle = between.unsafe_alloc_void_ptr_from_tensor
        probe = torch.empty(0, device="cpu")
        self.tensor(self.handle(probe))
        self.steals = probe._use_count() == 1
        self.kernels: dict[tuple[str, bool], Callable[..., Any]] = {}
        for key, name in names:
            if name in operators.BY_CALLS:
                continue
            place = name, key == "CUDA"
            if (key, name) not in _registered and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                kernel = torch.library.get_kernel(f"aten::{name}", key)
                keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                _theirs[place] = functools.partial(kernel.call_boxed, keys)
            if place in _theirs:
                self.kernels[place] = _theirs[place]

    def own(self, name: str, cuda: bool, arguments: list[Any]) -> Any:
        """Results of the kernel that would be called without ours."""
        if name in operators.BY_CALLS:
            try:
                return operators.BY_CALLS[name](*arguments)
            except BaseException as error:
                calls.raised.error = error  # PyTorch makes a RuntimeError of it
                raise
        packed = arguments[:2] if name == "native_batch_norm_backward" else arguments[:1]
        packed[-1] = calls.dense(packed[-1])
        if len(packed) > 1:
            packed[0] = calls.like(packed[0], packed[1])
        if name.startswith("native") and any([one is not other for one, other in zip(packed, arguments, strict=False)]):
            return getattr(torch.ops.aten, name).default(*packed, *arguments[len(packed) :])  # which ours take now
        return self.theirs(name, cuda, arguments)

    def theirs(self, name: str, cuda: bool, arguments: list[Any]) -> Any:
        """Results of PyTorch's own kernel."""
        _log.info("%s: PyTorch's own kernel", name)
        return self.kernels[name, cuda](*arguments)

    @staticmethod
    @functools.cache
    def constant(value: int, length: int, dtype: int, index: int | None) -> torch.Tensor:
        """A vector for a parameter that is not there; it is filled when this returns, for whichever stream."""
        if index is not None and torch.cuda.is_current_stream_capturing():
            raise ArgumentError("weight", None, "a tensor in the first call of its kind while a graph is captured")
        made = torch.full((length,), value, dtype=getattr(torch, _DTYPES[dtype].name.lower()), device="cpu")
        return made if index is None else made.to(f"cuda:{index}")

    @staticmethod
    def plan(
        key: bytes, operation: int, dtype: int, dims: list[int], strides: list[int], index: int | None, running: bool,
        relu: bool, residual: bool, own: bool, sums: bool, epsilon: float, factor: float,
    ) -> Any:  # fmt: skip
        """The plan of a key in this thread; None: there is none."""
        found: Any = None
        if index is not None and torch.cuda.is_current_stream_capturing():
            return found  # none can be made now, but later
        gpu = None if index is None else calls.gpu()
        backend, place = ("native", (CPU, 0)) if gpu is None else (gpu.backend, (gpu.memory, index or 0))
        x = Buffer(0, tuple(dims), tuple(strides), _DTYPES[dtype], *place, True, None)
        try:
            handle = functional._default_handle(x, backend, index is not None)
            like = _core.TensorDescriptor(backend, x.dtype, x.dims, x.strides)
            options: dict[str, Any] = {"epsilon": epsilon, "parameters": x.dtype if own else None}
            if relu:
                options |= {"activation": "relu", "z": residual}
            if operation == Operation.FORWARD_TRAINING:
                options |= {"exponential_average_factor": factor, "running": running}
                found = handle.plan_forward_training(like, **options)
            elif operation == Operation.FORWARD_INFERENCE:
                found = handle.plan_forward_inference(like, **options)
            elif sums:
                values = {"mode": Mode.SPATIAL, "epsilon": options.pop("epsilon"), **_UNBLENDED}
                options |= {"sums_only": True, "bound": True}
                has = running, not running
                found = _core.way_of(handle, Operation.BACKWARD, {"x": like}, values, *has, False, 16, **options)
            else:
                found = handle.plan_backward(like, running=running, saved=not running, **options)
        except REFUSALS:
            pass
        functional._local.ready.keep(key, found, functional.MOST_READY)
        return found


def _start() -> None:
    """Give the operators of this package their kernels; where PyTorch does not take them, their functions compute."""
    if _spoken():
        try:
            _register()
        except LibraryError as error:
            _log.info("the operators of pybnorm.torch are computed by Python: %s", error)


@atexit.register
def _remove() -> None:
    """Threads of autograd may still run when Python no longer does."""
    with _lock:
        _installed.clear()
        _registered.clear()
        calls.compiled = False
        _core.remove_torch_kernels()


_start()
