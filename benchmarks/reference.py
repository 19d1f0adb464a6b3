"""Speed and memory of `pybnorm.reference` against plain NumPy.

The yardstick is what anybody would write: ``numpy.var`` and one normalization pass over the same data, already in
float64. Both sides are measured in one run, turn by turn, in CPU seconds of this process: neither uses a second thread,
and what else runs on the machine is not counted.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import pybnorm
from pybnorm import _arguments, reference
from pybnorm.enums import DataType, Layout, Mode
from pybnorm.errors import ArgumentError

__all__ = ["LIMIT_BYTES", "LIMIT_RATIO", "OPERATIONS", "SHAPES", "render", "run"]

LIMIT_RATIO = 3.0
"""The reference may take this many times the yardstick."""
LIMIT_BYTES = 128 << 20
"""Memory beyond inputs and results stays below this."""
SHAPES = ((32, 64, 56, 56), (256, 256, 14, 14), (64, 512, 7, 7), (1, 3, 1024, 1024))
"""The layers of an image network, from long reductions to short ones, and one image with few channels."""
OPERATIONS = ("forward_training", "forward_inference", "backward", "backward_saved")
"""``backward`` recomputes the statistics, ``backward_saved`` is given them."""

Array = npt.NDArray[Any]


def run(
    *,
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtypes: Sequence[DataType | str] = (DataType.FLOAT32, DataType.FLOAT64),
    layouts: Sequence[Layout] = (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST),
    operations: Sequence[str] = OPERATIONS,
    mode: Mode | int | str = Mode.SPATIAL,
    repeats: int = 7,
) -> dict[str, Any]:
    """Measure the reference and the yardstick.

    Parameters
    ----------
    shapes : sequence of sequence of int
        Shapes of x, (N, C, spatial...).
    dtypes : sequence of DataType or str
        dtypes of x and dy; the yardstick always gets float64.
    layouts : sequence of Layout
        `CHANNELS_FIRST`, `CHANNELS_LAST`; both sides get the same one.
    operations : sequence of str
        Among `OPERATIONS`.
    mode : Mode
        Mode of every call.
    repeats : int
        Timed calls of each side, at least 1, after an untimed one; the median counts.

    Returns
    -------
    dict
        ``rows``: one dict for each measurement with operation, shape, dtype, layout, CPU seconds
        and yardstick_seconds, ratio, nanoseconds_per_element and extra_bytes (peak traced memory of one call less its
        results);
        ``limit_ratio`` and ``limit_bytes``; ``within_limits``; ``mode``, ``repeats``, ``libraries`` and ``machine``.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    bn_mode = _arguments.mode(mode)
    if repeats < 1:
        raise ArgumentError("repeats", repeats, "at least 1")
    for operation in operations:
        if operation not in OPERATIONS:
            raise ArgumentError("operations", operation, ", ".join(OPERATIONS))
    rows = []
    for shape in shapes:
        dims = _arguments.dims(shape, "shapes")
        for dtype in map(_arguments.data_type, dtypes):
            for layout in layouts:
                case = _Case(dims, dtype, layout, bn_mode)
                rows += [_measure(case, operation, repeats) for operation in operations]
    return {
        "rows": rows,
        "limit_ratio": LIMIT_RATIO,
        "limit_bytes": LIMIT_BYTES,
        "within_limits": all(r["ratio"] <= LIMIT_RATIO and r["extra_bytes"] < LIMIT_BYTES for r in rows),
        "mode": bn_mode.name,
        "repeats": repeats,
        "libraries": {
            "pybnorm": pybnorm.__version__,
            "numpy": np.__version__,
            "ml_dtypes": importlib.metadata.version("ml_dtypes"),
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
    }


def render(result: Mapping[str, Any]) -> str:
    """The rows of `run` as a plain table, limits and machine below."""
    heads = ("CPU ms", 9), ("NumPy ms", 10), ("ratio", 7), ("extra MiB", 11)
    head = f"{'operation':<18}{'shape':<18}{'dtype':<6}{'layout':<16}"
    lines = [head + "".join(f"{text:>{width}}" for text, width in heads)]
    for row in result["rows"]:
        beyond = row["ratio"] > result["limit_ratio"] or row["extra_bytes"] >= result["limit_bytes"]
        lines.append(
            f"{row['operation']:<18}{'x'.join(map(str, row['shape'])):<18}{row['dtype']:<6}{row['layout']:<16}"
            f"{row['seconds'] * 1e3:>9.2f}{row['yardstick_seconds'] * 1e3:>10.2f}{row['ratio']:>7.2f}"
            f"{row['extra_bytes'] / 2**20:>11.1f}{' !' if beyond else ''}"
        )
    machine, libraries = result["machine"], result["libraries"]
    lines.append(
        f"limits: ratio {result['limit_ratio']:g}, extra {result['limit_bytes'] >> 20} MiB; "
        f"mode {result['mode']}, median of {result['repeats']}"
    )
    lines.append(f"{machine['processor']}, {machine['architecture']}, {machine['cores']} cores, {machine['system']}")
    lines.append(", ".join(f"{name} {version}" for name, version in libraries.items()))
    return "\n".join(lines)


class _Case:
    """Arrays of one shape, dtype and layout, and the statistics of x."""

    def __init__(self, dims: tuple[int, ...], dtype: DataType, layout: Layout, mode: Mode) -> None:
        self.dims, self.dtype, self.layout, self.mode = dims, dtype, layout, mode
        generator = np.random.default_rng(0)
        self.x, self.dy = self._array(generator), self._array(generator)
        self.x64 = self.x.astype(np.float64)  # keeps the layout
        self.axes = _arguments.reduced_axes(len(dims), mode)
        self.mean = self.x64.mean(axis=self.axes, keepdims=True)
        self.variance = self.x64.var(axis=self.axes, keepdims=True)
        self.inv = 1.0 / np.sqrt(self.variance + 1e-5)
        self.scale, self.bias = np.ones_like(self.mean), np.zeros_like(self.mean)

    def _array(self, generator: np.random.Generator) -> Array:
        steps = _arguments.packed_strides(self.dims, self.layout)
        order = sorted(range(len(self.dims)), key=lambda a: -steps[a])
        inverse = sorted(range(len(self.dims)), key=order.__getitem__)
        values = generator.standard_normal([self.dims[a] for a in order]).transpose(inverse)
        return reference.round_to(values, _NUMPY_TYPES[self.dtype]())

    def yardstick(self) -> tuple[Array, Array]:
        variance = np.var(self.x64, axis=self.axes, keepdims=True)
        y = self.x64 - self.mean
        y *= self.inv
        return variance, y

    def call(self, operation: str) -> Callable[[], tuple[Any, ...]]:
        x, dy, scale = self.x, self.dy, self.scale
        return {
            "forward_training": lambda: reference.forward_training(x, scale, self.bias, mode=self.mode),
            "forward_inference": lambda: reference.forward_inference(
                x, scale, self.bias, self.mean, self.variance, mode=self.mode
            ),
            "backward": lambda: reference.backward(x, dy, scale, mode=self.mode),
            "backward_saved": lambda: reference.backward(
                x, dy, scale, mode=self.mode, saved_mean=self.mean, saved_inv_variance=self.inv
            ),
        }[operation]


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


_NUMPY_TYPES: dict[DataType, Callable[[], np.dtype[Any]]] = {
    DataType.FLOAT32: lambda: np.dtype(np.float32),
    DataType.FLOAT64: lambda: np.dtype(np.float64),
    DataType.FLOAT16: lambda: np.dtype(np.float16),
    DataType.BFLOAT16: _bfloat16,
}


def _measure(case: _Case, operation: str, repeats: int) -> dict[str, Any]:
    call = case.call(operation)
    call()
    case.yardstick()
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_seconds(call))
        theirs.append(_seconds(case.yardstick))
    seconds, yardstick = statistics.median(ours), statistics.median(theirs)
    return {
        "operation": operation,
        "shape": list(case.dims),
        "dtype": case.dtype.short,
        "layout": case.layout.name.lower(),
        "seconds": seconds,
        "yardstick_seconds": yardstick,
        "ratio": seconds / yardstick,
        "nanoseconds_per_element": 1e9 * seconds / math.prod(case.dims),
        "extra_bytes": _extra_bytes(call),
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _extra_bytes(call: Callable[[], tuple[Any, ...]]) -> int:
    """Peak of what one call allocates, less what it returns. NumPy reports its arrays to tracemalloc."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        results = call()
        peak = tracemalloc.get_traced_memory()[1]
        returned: int = sum(a.nbytes for a in results if a is not None)
        return peak - before - returned
    finally:
        if not tracing:
            tracemalloc.stop()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"
