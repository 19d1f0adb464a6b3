"""Kernels in PyTorch's dispatcher: its own batch norm, and our operators with ReLU, computed by plans."""

from __future__ import annotations

import atexit
import functools
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch

from pybnorm import _arguments, _core, functional
from pybnorm._arrays import CPU, Buffer
from pybnorm.enums import DataType, Operation
from pybnorm.errors import ArgumentError, LibraryLoadError, LibraryNotFoundError, LibraryVersionError
from pybnorm.torch.calls import REFUSALS

__all__ = ["Installation", "Joined", "at_end", "install", "join", "lend", "overridable"]

_DTYPES = {5: DataType.FLOAT16, 6: DataType.FLOAT32, 15: DataType.BFLOAT16}  # by PyTorch's numbers
_CUDA = 2  # as DLPack has it
_NATIVE = ("native_batch_norm", "native_batch_norm_backward")
_OPERATORS = {"CPU": _NATIVE, "CUDA": (*_NATIVE, "cudnn_batch_norm", "cudnn_batch_norm_backward")}
_BACKENDS = {"CPU": "onednn", "CUDA": "cudnn"}
_BEFORE = "BackendSelect"  # a dispatch key that comes before those of devices
_MIOPEN_SCHEMAS = (
    "aten::miopen_batch_norm(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
    "bool training, float exponential_average_factor, float epsilon) -> (Tensor, Tensor, Tensor)",
    "aten::miopen_batch_norm_backward(Tensor input, Tensor grad_output, Tensor weight, Tensor? running_mean, "
    "Tensor? running_var, Tensor? save_mean, Tensor? save_var, float epsilon) -> (Tensor, Tensor, Tensor)",
)
"""Of PyTorch's operator for MIOpen and its backward, as the kernels have them (torch_overridable.pxi)."""
_SCHEMAS = (
    "aten::_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor attn_bias, bool[4] grad_input_mask, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
    "Tensor philox_offset, *, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias)",
)
"""Of its overridable operator and its backward, likewise."""
_log = logging.getLogger("pybnorm.torch")
_lock = threading.Lock()
_installed: set[Installation] = set()
_registered: list[tuple[str, str]] = []  # dispatch keys, and operators whose kernels are registered under them
_joined: dict[str, Joined] = {}  # by dispatch key
_tracked: dict[str, Callable[..., Any]] = {}  # of those, backward whose results have derivatives
_forget: list[Callable[[], None]] = []  # what to do when the kernels are gone
_theirs: dict[tuple[str, bool], Callable[..., Any]] = {}  # PyTorch's own kernels, which ours are registered over
_lent: dict[str, Callable[..., Any]] = {}  # Python's kernels of PyTorch's operators for MIOpen


class Joined(NamedTuple):
    """Our operators with ReLU, for kernels in C: what those cannot do goes to the ones in Python.

    Attributes
    ----------
    kernels : dict
        Python's, by operator.
    tracked : dict
        Of those, in Python, whose results have derivatives.
    plans : callable
        Both directions' of x, weight, bias, whether there is a residual, running statistics, factor, epsilon; or None.
    ready : Cache
        What it returned.
    """

    kernels: dict[str, Callable[..., Any]]
    tracked: dict[str, Callable[..., Any]]
    plans: Callable[..., Any]
    ready: _core.Cache


class Installation:
    """What `install` did: `remove` undoes it, and so does the end of a ``with`` block.

    Attributes
    ----------
    devices : tuple of str
        Where plans compute by it: "cpu", "cuda".
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices

    def remove(self) -> None:
        """PyTorch's own kernels compute again, once nothing else is installed. A second time does nothing."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
                _register()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def install(*, cuda: bool = False) -> Installation:
    """Have PyTorch's own batch norm on the CPU computed by oneDNN: ``torch.nn.BatchNorm2d`` and the like, unchanged.

    The kernels of ``aten::native_batch_norm`` and ``aten::native_batch_norm_backward`` are replaced in this process,
    for all threads. PyTorch's autograd stays around them, so little Python runs in a step. What pybnorm does not take
    (float64, 16-bit parameters, gaps between elements, gradients in another layout, evaluation's gradients, what
    ``torch.use_deterministic_algorithms`` rules out) PyTorch's own kernels still compute. ``torch.compile`` makes code
    of its own in place of both.

    Parameters
    ----------
    cuda : bool
        Also on CUDA, computed by cuDNN, with ``aten::cudnn_batch_norm`` and its backward; the CPU's only where oneDNN
        is here. Tested and timed on an H200 (PyTorch 2.11, cuDNN 9.19).

    Returns
    -------
    Installation
        For ``with``, or to `~Installation.remove`. Without either it is for good.

    Raises
    ------
    LibraryVersionError
        PyTorch is older than 2.10.
    LibraryNotFoundError
        No oneDNN is here; with `cuda` no cuDNN.
    ArgumentError
        `cuda` with a PyTorch that has none.

    Notes
    -----
    PyTorch warns once, on standard error, that its kernels are overridden. An error of its own kernels comes as
    RuntimeError, whatever its class was. While ``torch.backends.cudnn.enabled`` is False all calls on CUDA are its own.

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
    if cuda and torch.version.cuda is None:
        raise ArgumentError("cuda", True, f"False with this PyTorch, {torch.__version__}, which has no CUDA")
    found = []
    for key in ("CUDA", "CPU") if cuda else ("CPU",):
        try:
            _core.load(_BACKENDS[key])
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


def join(key: str, joined: Joined) -> bool:
    """Have kernels in C for operators of ours under a dispatch key; whether PyTorch has what they need.

    Parameters
    ----------
    key : str
        "CUDA" or "CPU".
    joined : Joined
    """
    if not _spoken():
        return False
    with _lock:
        _joined[key] = joined
        try:
            _register()
        except LibraryLoadError as error:
            del _joined[key]
            _log.info("operators with ReLU stay in Python: %s", error)
            return False
    return True


def lend(kernels: dict[str, Callable[..., Any]], tracked: dict[str, Callable[..., Any]]) -> Any:
    """PyTorch's operator for MIOpen with kernels in C, which has them where PyTorch is not for ROCm; else None.

    They are under the dispatch key that comes before those of devices, where PyTorch has none of its own.

    Parameters
    ----------
    kernels, tracked : dict
        Python's, by operator: forward's and backward's; and of backward that whose results have derivatives.
    """
    found: list[Any] = [getattr(torch.ops.aten, name, None) for name in kernels]
    if not _spoken() or torch.version.hip or [one and str(one.default._schema) for one in found] != [*_MIOPEN_SCHEMAS]:
        return None
    with _lock:
        if not _lent and any(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _BEFORE) for name in kernels
        ):
            return None
        _lent.update(kernels)
        _tracked.update(tracked)
        try:
            _register()
        except LibraryLoadError as error:
            _lent.clear()
            _tracked.clear()
            _log.info("the derivative of batch norm stays in Python: %s", error)
            return None
    return found[0].default._op


def _places(key: str) -> list[tuple[str, str]]:
    forward, back = (schema[len("aten::") :].partition("(")[0] for schema in _SCHEMAS)
    return [(key, forward), (key, back), (f"Autograd{key}", back)]


@functools.cache
def overridable(key: str) -> Any:
    """PyTorch's operator whose autograd in C++ is for kernels from elsewhere; None where it is another, or taken."""
    found: list[Any] = [getattr(torch.ops.aten, name, None) for _, name in _places(key)[:2]]
    if any(one is None or str(one.default._schema) != schema for one, schema in zip(found, _SCHEMAS, strict=True)):
        return None
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", place) for place, name in _places(key)):
        return None
    return found[0].default._op


def _spoken() -> bool:
    """Whether PyTorch has the interface that the kernels speak."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def _register() -> None:
    """Have the kernels where those who asked for them want them, and nowhere else."""
    keys = sorted({device.upper() for made in _installed for device in made.devices})
    operators = [(key, name) for key in keys for name in _OPERATORS[key]]
    operators += [(key, name) for key in sorted(_joined) for name in _joined[key].kernels]
    operators += [place for key in sorted(_joined) if overridable(key) for place in _places(key)]
    operators += [(_BEFORE, name) for name in _lent]
    operators += [(f"Autograd{key}", name) for key in ("CPU", "CUDA") for name in _lent if name in _tracked]
    if operators == _registered:
        return
    if operators:
        files = "libtorch_cpu.so", "libtorch_cuda.so" if torch.version.cuda is not None else None
        try:
            _core.install_torch_kernels(functional._local, _Host(operators), operators, files)
        except BaseException:
            _gone()
            raise
    else:
        _core.remove_torch_kernels()
    _registered[:] = operators


def _gone() -> None:
    """No kernel is registered now: calls stay in Python."""
    _registered[:] = []
    for forget in _forget:
        forget()


def at_end(forget: Callable[[], None]) -> None:
    """Have a function called when the kernels are gone, at the end of the process say."""
    _forget.append(forget)


class _Host:
    """What the kernels ask in Python."""

    deterministic = staticmethod(torch._C._get_deterministic_algorithms)
    cudnn = staticmethod(torch._C._get_cudnn_enabled)

    def __init__(self, operators: list[tuple[str, str]]) -> None:
        between = torch._C._aoti  # which older ones do not have
        self.tensor = between.alloc_tensor_by_stealing_from_void_ptr
        self.handle = between.unsafe_alloc_void_ptr_from_tensor
        probe = torch.empty(0, device="cpu")
        self.tensor(self.handle(probe))
        self.steals = probe._use_count() == 1
        self.kernels: dict[tuple[str, bool], Callable[..., Any]] = {}
        self.joined, self.tracked = _core.Cache(), dict(_tracked)
        self.ours = {name for one in _joined.values() for name in one.kernels} | _lent.keys()
        for one in _joined.values():
            self.joined, self.plans = one.ready, one.plans
            self.tracked |= one.tracked
        for kernels in (_lent, *(one.kernels for one in _joined.values())):
            self.kernels |= {(name, cuda): kernel for name, kernel in kernels.items() for cuda in (False, True)}
        for key, name in operators:
            if name in self.ours:
                continue
            place = name, key == "CUDA"
            if (key, name) not in _registered and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                kernel = torch.library.get_kernel(f"aten::{name}", key)
                keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                _theirs[place] = functools.partial(kernel.call_boxed, keys)
            if place in _theirs:
                self.kernels[place] = _theirs[place]

    def own(self, name: str, cuda: bool, arguments: list[Any]) -> Any:
        """Results of the kernel that would be called without ours: PyTorch's own, or that in Python."""
        if name not in self.ours:
            _log.info("%s: PyTorch's own kernel", name)
        return self.kernels[name, cuda](*arguments)

    def join(self, key: bytes, *call: Any) -> Any:
        """The plans with ReLU of a key, for all threads; None: there are none."""
        found = self.plans(*call)
        self.joined.keep(key, found, functional.MOST_READY)
        return found

    @staticmethod
    def plan(
        key: bytes,
        operation: int,
        dtype: int,
        dims: list[int],
        strides: list[int],
        index: int | None,
        running: bool,
        repeats: bool,
        both: bool,
        epsilon: float,
        factor: float,
    ) -> tuple[Any, Any, Any]:
        """The plan of a key in this thread, and constants for parameters that are not there; None: there is none.

        `both`: a training whose backward has no plan has none either.
        """
        found: tuple[Any, Any, Any] = None, None, None
        if index is not None and torch.cuda.is_current_stream_capturing():
            return found  # none can be made now, but later
        backend, place = ("onednn", (CPU, 0)) if index is None else ("cudnn", (_CUDA, index))
        x = Buffer(0, tuple(dims), tuple(strides), _DTYPES[dtype], *place, True, None)
        try:
            handle = functional._default_handle(x, backend, index is not None)
            like = _core.TensorDescriptor(backend, x.dtype, x.dims, x.strides)
            options: dict[str, Any] = {"epsilon": epsilon, "deterministic": repeats}
            if operation == Operation.FORWARD_TRAINING:
                options |= {"exponential_average_factor": factor, "running": running}
                plan: Any = handle.plan_forward_training(like, **options)
                if both:
                    handle.plan_backward(like, epsilon=epsilon, deterministic=repeats)
            elif operation == Operation.FORWARD_INFERENCE:
                plan = handle.plan_forward_inference(like, **options)
            else:
                plan = handle.plan_backward(like, **options)
            found = plan, *(_constant(value, dims[1], index) for value in (1.0, 0.0))
        except REFUSALS:
            pass
        functional._local.ready.keep(key, found, functional.MOST_READY)
        return found


def _constant(value: float, length: int, index: int | None) -> torch.Tensor:
    """A vector that is there when this returns, for whichever stream."""
    made = torch.full((length,), value, device="cpu")
    return made if index is None else made.to(f"cuda:{index}")


@atexit.register
def _remove() -> None:
    """Threads of autograd may still run when Python no longer does."""
    with _lock:
        _installed.clear()
        _joined.clear()
        _lent.clear()
        _tracked.clear()
        _register()
        _gone()
