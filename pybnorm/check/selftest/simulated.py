"""Batch norm kernels in NumPy, as libraries write them, with the faults that libraries have had.

They take the buffers that a `pybnorm.Handle` takes, compute in float32 (float64 for float64 data) and store in the
dtype of the data, so the judge sees what it would see of a vendor. Nothing here uses the reference. The judge's own
test bench: `pybnorm.check.selftest.detection` and the tests run cases on them.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from pybnorm import _arguments, devices
from pybnorm._arrays import Buffer
from pybnorm.check.language.data import numpy_dtype
from pybnorm.check.run.session import Session
from pybnorm.enums import DataType, Mode
from pybnorm.reference.namespaces import Array

STYLES = ("two_pass", "sequential", "welford", "folded", "one_pass")
"""Correct ways to compute; the last is correct as far as its cancellation lets it be."""

BUGS = (
    "dropped element",
    "vector tail",
    "unbiased variance normalizes",
    "partial sums through 16 bit",
    "epsilon outside the root",
    "epsilon missing",
    "epsilon 1e-3",
    "variance as inverse",
    "dx without mean(dy)",
    "dx without projection",
    "dscale and dbias through 16 bit",
    "16-bit results truncated",
    "biased running variance",
    "old and new swapped in the running average",
    "recomputes saved statistics",
    "first channel's scale for all",
    "result as channels first",
    "prior read with beta 0",
    "prior ignored",
    "writes past the end",
    "writes into the gaps",
    "changes its input",
    "NaN in one element",
)

CHUNK = 4096
"""Elements that a work group of the vector kernels reads at a time, four by each thread."""
PARTIAL = 256
"""Elements of a partial sum."""
LANES = 64
"""Chains of the Welford kernel, merged at the end; one where there are fewer elements than `CHUNK`."""


def memory(pointer: int, dtype: np.dtype[Any], dims: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Array:
    """A writable NumPy array over host memory, which is not checked; packed, or with `strides` in elements."""
    size = math.prod(dims) if strides is None else _arguments.span(dims, strides)
    held: Any = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
    steps = None if strides is None else tuple(s * dtype.itemsize for s in strides)
    return np.ndarray(dims, dtype, buffer=held, strides=steps)


def array_of(buffer: Buffer) -> Array:
    """A buffer in host memory as a NumPy array."""
    return memory(buffer.pointer, numpy_dtype(buffer.dtype), buffer.dims, buffer.strides)


def _truncated(values: Array, dtype: np.dtype[Any]) -> Array:
    """Stored in a 16-bit dtype without the bits that do not fit."""
    if numpy_dtype(DataType.BFLOAT16) == dtype:
        bits = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return bits.astype(np.uint16).view(dtype)
    near = values.astype(dtype)
    too_far = np.abs(near.astype(values.dtype)) > np.abs(values)
    return np.where(too_far, np.nextafter(near, dtype.type(0)), near)


class Kernels:
    """A handle whose calls are NumPy code."""

    def __init__(self, style: str = "two_pass", bug: str | None = None) -> None:
        assert style in STYLES
        assert bug is None or bug in BUGS
        self.style, self.bug = style, bug

    def rows(self, array: Array, mode: Mode) -> Array:
        """(statistics, m) in the compute type."""
        work = np.float64 if array.dtype == np.float64 else np.float32
        if mode == Mode.PER_ACTIVATION:
            return array.reshape(array.shape[0], -1).T.astype(work)
        return np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(work)

    def back(self, rows: Array, shape: tuple[int, ...], mode: Mode) -> Array:
        """Bring (statistics, m) back to `shape`."""
        if mode == Mode.PER_ACTIVATION:
            return rows.T.reshape(shape)
        return np.moveaxis(rows.reshape(shape[1], shape[0], *shape[2:]), 0, 1)

    def short(self, like: Array) -> np.dtype[Any]:
        """The 16-bit dtype that a careless kernel would pass values through."""
        return like.dtype if like.itemsize == 2 else numpy_dtype(DataType.BFLOAT16)

    def sum(self, values: Array, short: np.dtype[Any]) -> Array:
        """Over the last axis, which stays with length 1."""
        if self.bug == "dropped element":
            values = values[:, :-1]
        if self.bug == "vector tail":
            # of the last chunk, thread i reads four elements from i on and not from 4 i on
            whole = values.shape[1] // CHUNK * CHUNK
            fours = (values.shape[1] - whole) // 4
            places = whole + (np.arange(fours)[:, None] + np.arange(4)).ravel()
            rest = values[:, whole + 4 * fours :]
            values = np.concatenate([values[:, :whole], values[:, places], rest], axis=1)
        if self.bug == "partial sums through 16 bit":
            missing = -values.shape[1] % PARTIAL
            blocks = np.pad(values, ((0, 0), (0, missing))).reshape(values.shape[0], -1, PARTIAL)
            values = blocks.sum(axis=2).astype(short).astype(values.dtype)
        if self.style == "sequential":
            return np.add.accumulate(values, axis=1)[:, -1:]
        return np.ascontiguousarray(values).sum(axis=1, keepdims=True)

    def welford(self, x: Array) -> tuple[Array, Array]:
        """Mean and biased variance by Welford's recurrence in a few chains, merged as Chan, Golub & LeVeque do."""
        work, count = x.dtype.type, x.shape[1]
        if self.bug == "dropped element":
            x = x[:, :-1]
        chains = LANES if x.shape[1] >= CHUNK else 1
        length, rest = divmod(x.shape[1], chains)
        lanes = x[:, : length * chains].reshape(len(x), length, chains)
        mean, second = np.zeros_like(lanes[:, 0]), np.zeros_like(lanes[:, 0])
        for i in range(length):
            delta = lanes[:, i] - mean
            mean = mean + delta / work(i + 1)
            second = second + delta * (lanes[:, i] - mean)
        means, squares = np.hstack([mean, x[:, length * chains :]]), np.pad(second, ((0, 0), (0, rest)))
        total, sizes = (means[:, :1], squares[:, :1]), [length] * chains + [1] * rest
        for i in range(1, len(sizes)):
            before, delta = work(sum(sizes[:i])), means[:, i : i + 1] - total[0]
            share = work(sizes[i]) / (before + work(sizes[i]))
            total = total[0] + delta * share, total[1] + squares[:, i : i + 1] + delta * delta * (before * share)
        return total[0], total[1] / work(count)

    def statistics(self, x: Array, short: np.dtype[Any]) -> tuple[Array, Array]:
        """Mean and biased variance of (statistics, m)."""
        m = x.dtype.type(x.shape[1])
        if self.style == "welford":
            return self.welford(x)
        mean = self.sum(x, short) / m
        if self.style == "one_pass":
            return mean, self.sum(x * x, short) / m - mean * mean
        centred = x - mean
        return mean, self.sum(centred * centred, short) / m

    def inverse(self, variance: Array, epsilon: float, m: int) -> Array:
        """1 / sqrt(variance + epsilon)."""
        work = variance.dtype.type
        epsilon = work({"epsilon missing": 0.0, "epsilon 1e-3": 1e-3}.get(self.bug or "", epsilon))
        if self.bug == "unbiased variance normalizes" and m > 1:
            variance = variance * work(m) / work(m - 1)
        if self.bug == "epsilon outside the root":
            return work(1) / (np.sqrt(variance) + epsilon)
        return work(1) / np.sqrt(variance + epsilon)

    def parameter(self, buffer: Buffer, work: Any) -> Array:
        """(statistics, 1) in the compute type."""
        return array_of(buffer).reshape(-1, 1).astype(work)

    def scale(self, buffer: Buffer, work: Any) -> Array:
        """The scales."""
        values = self.parameter(buffer, work)
        return np.broadcast_to(values[:1], values.shape) if self.bug == "first channel's scale for all" else values

    def normalize(self, x: Array, mean: Array, inverse: Array, scale: Array, bias: Array) -> Array:
        """The y of (statistics, m)."""
        if self.style == "folded":
            a = scale * inverse
            return x * a + (bias - mean * a)
        return (x - mean) * inverse * scale + bias

    def store(self, buffer: Buffer, rows: Array, mode: Mode, alpha: float, beta: float) -> None:
        """Blend and write y or dx."""
        out = array_of(buffer)
        values = self.back(rows, out.shape, mode)
        work = rows.dtype.type
        values = work(alpha) * values
        if (beta != 0 and self.bug != "prior ignored") or self.bug == "prior read with beta 0":
            values = values + work(beta) * out.astype(work)
        if self.bug == "NaN in one element":
            values.flat[values.size // 2] = np.nan
        if self.bug == "16-bit results truncated" and out.itemsize == 2:
            values = _truncated(values, out.dtype)
        values = values.astype(out.dtype)
        if self.bug == "result as channels first" and out.size:
            memory(buffer.pointer, out.dtype, out.shape)[...] = values
        else:
            out[...] = values
        if self.bug == "writes past the end":
            end = buffer.pointer + _arguments.span(buffer.dims, buffer.strides) * out.itemsize
            memory(end, np.dtype(np.uint16), ())[...] = 0
        if self.bug == "writes into the gaps":
            memory(buffer.pointer + (buffer.strides[0] - 1) * out.itemsize, out.dtype, ())[...] = 0

    def store_parameter(self, buffer: Buffer, values: Array, alpha: float = 1.0, beta: float = 0.0) -> None:
        """Blend and write a parameter."""
        out = array_of(buffer)
        work = values.dtype.type
        values = work(alpha) * values.reshape(out.shape)
        if beta != 0:
            values = values + work(beta) * out
        out[...] = values

    @np.errstate(all="ignore")
    def forward_training(
        self, x: Buffer, scale: Buffer, bias: Buffer, y: Buffer, *, mode: Mode, epsilon: float, **other: Any
    ) -> None:
        """Do as `pybnorm.Handle.forward_training`."""
        rows = self.rows(array_of(x), mode)
        work, m = rows.dtype.type, rows.shape[1]
        mean, variance = self.statistics(rows, self.short(array_of(x)))
        inverse = self.inverse(variance, epsilon, m)
        used = variance if self.bug == "variance as inverse" else inverse
        result = self.normalize(rows, mean, used, self.scale(scale, work), self.parameter(bias, work))
        self.store(y, result, mode, other["alpha"], other["beta"])
        if "saved_mean" in other:
            self.store_parameter(other["saved_mean"], mean)
            self.store_parameter(other["saved_inv_variance"], used)
        if "running_mean" in other:
            f = work(other["exponential_average_factor"])
            if self.bug == "old and new swapped in the running average":
                f = 1 - f
            batch = variance if self.bug == "biased running variance" else variance * work(m) / work(m - 1)
            for buffer, new in ((other["running_mean"], mean), (other["running_variance"], batch)):
                old = self.parameter(buffer, work)
                self.store_parameter(buffer, (1 - f) * old + f * new)
        if self.bug == "changes its input":
            array_of(x).flat[0] = 0.125

    @np.errstate(all="ignore")
    def forward_inference(
        self, x: Buffer, scale: Buffer, bias: Buffer, running_mean: Buffer, running_variance: Buffer, y: Buffer, *,
        mode: Mode, epsilon: float, **other: Any,
    ) -> None:  # fmt: skip
        """Do as `pybnorm.Handle.forward_inference`."""
        rows = self.rows(array_of(x), mode)
        work = rows.dtype.type
        variance = self.parameter(running_variance, work)
        inverse = variance if self.bug == "variance as inverse" else self.inverse(variance, epsilon, rows.shape[1])
        mean = self.parameter(running_mean, work)
        result = self.normalize(rows, mean, inverse, self.scale(scale, work), self.parameter(bias, work))
        self.store(y, result, mode, other["alpha"], other["beta"])

    @np.errstate(all="ignore")
    def backward(
        self, x: Buffer, dy: Buffer, scale: Buffer, dx: Buffer, dscale: Buffer, dbias: Buffer, *,
        mode: Mode, epsilon: float, **other: Any,
    ) -> None:  # fmt: skip
        """Do as `pybnorm.Handle.backward`."""
        rows, grad = self.rows(array_of(x), mode), self.rows(array_of(dy), mode)
        work, m = rows.dtype.type, rows.dtype.type(rows.shape[1])
        short = self.short(array_of(x))
        if "saved_mean" not in other or self.bug == "recomputes saved statistics":
            mean, variance = self.statistics(rows, short)
            inverse = self.inverse(variance, epsilon, rows.shape[1])
        else:
            mean, inverse = (self.parameter(other[name], work) for name in ("saved_mean", "saved_inv_variance"))
            if self.bug == "variance as inverse":
                inverse = self.inverse(inverse, epsilon, rows.shape[1])
        normal = (rows - mean) * inverse
        g_bias = self.sum(grad, short)
        if self.style == "one_pass":
            g_scale = (self.sum(grad * rows, short) - mean * g_bias) * inverse
        else:
            g_scale = self.sum(grad * normal, short)
        if self.bug == "dscale and dbias through 16 bit":
            g_bias, g_scale = g_bias.astype(short).astype(work), g_scale.astype(short).astype(work)
        mean_dy: Any = 0 if self.bug == "dx without mean(dy)" else g_bias / m
        projection: Any = 0 if self.bug == "dx without projection" else normal * (g_scale / m)
        result = self.scale(scale, work) * inverse * (grad - mean_dy - projection)
        self.store(dx, result, mode, other["alpha"], other["beta"])
        for buffer, sums in ((dscale, g_scale), (dbias, g_bias)):
            self.store_parameter(buffer, sums, other["alpha_param"], other["beta_param"])


def session(style: str = "two_pass", bug: str | None = None) -> Session:
    """A session on simulated kernels, under the name of the CPU backend."""
    return Session("onednn", Kernels(style, bug), devices.device_for(1))
