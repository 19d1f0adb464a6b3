"""``prefer="measured"``: PyTorch's own call timed against ours by the first call of its kind, for this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pybnorm import defects, devices
from pybnorm._arrays import CPU
from pybnorm._core import Cache
from pybnorm.devices.timing import best_in_turn
from pybnorm.enums import DataType, Layout, Mode, Operation
from pybnorm.torch import installation

__all__ = ["Found", "choose", "known", "layout_of", "place"]

MARGIN = 0.03
"""Share of our time that PyTorch's call must save to be taken."""
MOST_KINDS = 4096
"""Kinds of calls whose times are kept."""
TURNS = 5
_PIECE = 2e-3  # seconds of calls queued on a GPU; what the host takes to start them is little of it
_SUMMED_AS = 3, 2
"""oneDNN's version whose long chains of sums PyTorch's kernels on the CPU have, but those for float32 images over
channels-first memory: on the fills image, sparse and level of `pybnorm check` training misses the bound of blocked sums
from 512 terms on, as does 16-bit backward over channels-last memory on ramp from 524,288 on."""
_CUDNN_IMAGES, _CUDNN_ELEMENTS = 880_801, 1 << 31
"""With more PyTorch takes its own kernels instead of cuDNN's."""
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_OPERATIONS = {
    "training": Operation.FORWARD_TRAINING, "inference": Operation.FORWARD_INFERENCE, "backward": Operation.BACKWARD
}  # fmt: skip
_log = logging.getLogger("pybnorm.torch")
_found = Cache()
_measuring = threading.Lock()  # two measurements at once would disturb each other


class Found(NamedTuple):
    """Whether a kind of call is PyTorch's, and why."""

    theirs: bool
    why: str


def choose(
    operation: str,
    data: dict[str, Any],
    vectors: dict[str, Any],
    options: dict[str, Any],
    ours: Callable[[], tuple[Callable[..., Any], bool]],
    theirs: Callable[..., Any],
) -> Found | None:
    """What is taken; measured where it is not known, None where nothing can be: in a captured graph, within `install`.

    Parameters
    ----------
    operation : str
    data, vectors, options : dict
        As `functional` has them. What a call would write of them is copied before.
    ours : callable
        Prepares our call.
    theirs : callable
        PyTorch's own call.
    """
    x = data["x"]
    given = [array for name, array in data.items() if name in ("x", "dy")]
    address = functools.reduce(int.__or__, (array.data_ptr() for array in given), 16)
    key = (
        *_kind(operation, x), address & -address, options["epsilon"], options.get("saved"),
        torch.backends.cudnn.enabled, torch.get_num_threads(),
        tuple(None if vector is None else (vector.dtype, vector.shape) for vector in vectors.values()),
    )  # fmt: skip
    with _measuring:
        found: Found | None = _found.get(key)
        mixed = bool(installation._installed)  # the dispatcher would have ours timed as PyTorch's
        if found is None and not mixed and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            arrays = [*given, *vectors.values(), None]
            found = _measured(operation, arrays, ours()[0], theirs, address & -address)
            _found.keep(key, found, MOST_KINDS)
            _log.info("%s of %s %s: %s", operation, str(x.dtype)[6:], tuple(x.shape), found.why)
    return found


def known(operation: str, x: torch.Tensor) -> Found | None:
    """What was found last for calls with tensors like x."""
    kind = _kind(operation, x)
    return next((found for key, found in reversed(list(_found.items())) if key[: len(kind)] == kind), None)


def _kind(operation: str, x: torch.Tensor) -> tuple[Any, ...]:
    return operation, x.device, x.dtype, x.shape, x.stride()


def _measured(
    operation: str, arrays: list[Any], ours: Callable[..., Any], theirs: Callable[..., Any], alignment: int
) -> Found:
    x = arrays[0]
    if not _right(operation, x, alignment):
        return Found(False, "PyTorch's own kernel is not measured: it is known to err on such calls")
    gpu = x.is_cuda
    with torch.no_grad(), torch.cuda.device(x.device) if gpu else contextlib.nullcontext():
        if operation == "training":
            arrays[3:5] = [None if array is None else array.clone() for array in arrays[3:5]]  # running statistics
        result = ours(*arrays)
        try:
            if _forms(theirs(*arrays)) != _forms(result):
                return Found(False, "PyTorch's own kernel is not measured: its results have other dtypes or strides")
            del result
            works = [[functools.partial(call, *arrays)] for call in (theirs, ours)]
            seconds = [t.seconds for t in best_in_turn(works, TURNS, *((_queued, _PIECE) if gpu else ()))]
        except RuntimeError as error:  # of PyTorch: no memory, or what it does not take
            return Found(False, f"PyTorch's own kernel failed: {' '.join(str(error).split())[:200]}")
    own, other = (f"{second * 1e6:.1f} us" for second in seconds)
    if seconds[0] < (1 - MARGIN) * seconds[1]:
        return Found(True, f"PyTorch's own kernel: measured here, {own} against {other} ({place(x.device)})")
    return Found(False, f"measured here, {other} against {own} of PyTorch's own kernel ({place(x.device)})")


def _forms(results: Any) -> list[Any]:
    results = results if isinstance(results, tuple) else (results,)
    return [None if result is None else (result.dtype, result.shape, result.stride()) for result in results]


def _queued(work: Callable[[], object]) -> float:
    """Seconds from the first kernel to the last: of the host too, where the device waits for it."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def _right(operation: str, x: torch.Tensor, alignment: int) -> bool:
    """Whether no error of PyTorch's kernel is known: its own, or its library's (docs/results/implementations*.txt)."""
    layout, halves = layout_of(x), x.element_size() == 2
    if layout is None or (x.is_cuda and torch.version.hip):  # MIOpen's kernels were not judged as PyTorch calls them
        return False
    if halves and layout == "last" and x.dim() != 4 and operation != "inference":
        return False
    mode, backend = Mode.SPATIAL, "cudnn" if x.is_cuda else "onednn"
    if x.is_cuda:
        cudnn = torch.backends.cudnn.enabled and x.dim() > 2 and x.dtype != torch.bfloat16
        if not cudnn or x.shape[0] > _CUDNN_IMAGES or x.numel() >= _CUDNN_ELEMENTS:
            return not (halves and operation == "backward" and layout == "first")  # summed in 16 bits
        if layout == "last" and operation != "inference":
            mode = Mode.SPATIAL_PERSISTENT
    elif layout == "first" and x.numel() > x.shape[0] * x.shape[1] and not (halves and operation == "training"):
        return True
    call = defects.Call(
        _OPERATIONS[operation], mode, DataType[str(x.dtype)[6:].upper()], tuple(x.shape),
        Layout.CHANNELS_FIRST if layout == "first" else Layout.CHANNELS_LAST, alignment=alignment,
    )  # fmt: skip
    met = {defect.id for defect in defects.known_defects(backend, call, None if x.is_cuda else _SUMMED_AS)}
    return not met - ({"cudnn-channels-last-inference"} if halves else set())  # which is below 16 bits' own rounding


def layout_of(x: torch.Tensor) -> str | None:
    """Where the channels of packed memory are, "first" or "last"; None: elsewhere."""
    if x.is_contiguous():
        return "first"
    return "last" if x.dim() in _LAST and x.is_contiguous(memory_format=_LAST[x.dim()]) else None


@functools.cache
def place(device: torch.device) -> str:
    """The device, and the versions that times on it depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else devices.device_for(CPU).name
    version = torch.backends.cudnn.version() if device.type == "cuda" and not torch.version.hip else None
    cudnn = "" if version is None else f", cuDNN {version // 10000}.{version // 100 % 100}"
    return f"{name}, PyTorch {'.'.join(torch.__version__.split('.')[:2])}{cudnn}"


def _after_fork_in_child() -> None:
    global _measuring  # noqa: PLW0603 (another thread may have held it)
    _measuring = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
