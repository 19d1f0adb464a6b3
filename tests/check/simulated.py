"""Batch norm kernels in NumPy, as libraries write them, with the faults that libraries have had.

They take `pybnorm._arrays.Buffer`s like a `pybnorm.Handle`, compute in float32 (float64 for float64 data) and store in
the dtype of the data, so the judge sees what it would see of a vendor. Nothing here uses the reference.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from pybnorm import _arguments, devices
from pybnorm.check.data import numpy_dtype
from pybnorm.check.runner import Session
from pybnorm.enums import DataType, Mode

STYLES = ("two_pass", "sequential", "welford", "folded", "one_pass")

BUGS = (
    "dropped element",
    "vector tail",
    "unbiased variance normalizes",
    "epsilon outside the root",
    "epsilon missing",
    "epsilon 1e-3",
    "variance as inverse",
    "dx without mean(dy)",
    "dx without projection",
    "dscale and dbias through 16 bit",
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


def array_of(buffer):
    """A writable NumPy view of a Buffer."""
    dtype = numpy_dtype(buffer.dtype)
    size = _arguments.span(buffer.dims, buffer.strides) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(buffer.pointer)
    return np.ndarray(buffer.dims, dtype, buffer=memory, strides=tuple(s * dtype.itemsize for s in buffer.strides))


class Kernels:
    """A handle whose calls are NumPy code."""

    def __init__(self, style="two_pass", bug=None):
        assert style in STYLES
        assert bug is None or bug in BUGS
        self.style, self.bug = style, bug

    # ---------------------------------------------------------------- pieces

    def rows(self, array, mode):
        """(statistics, m) in the compute type."""
        work = np.float64 if array.dtype == np.float64 else np.float32
        if mode == Mode.PER_ACTIVATION:
            return array.reshape(array.shape[0], -1).T.astype(work)
        return np.moveaxis(array, 1, 0).reshape(array.shape[1], -1).astype(work)

    def back(self, rows, shape, mode):
        if mode == Mode.PER_ACTIVATION:
            return rows.T.reshape(shape)
        return np.moveaxis(rows.reshape(shape[1], shape[0], *shape[2:]), 0, 1)

    def sum(self, values):
        if self.bug == "dropped element":
            values = values[:, :-1]
        if self.bug == "vector tail":
            whole = values.shape[1] // 4 * 4
            tail = values[:, whole:]
            values = np.concatenate([values[:, :whole], np.repeat(tail[:, :1], tail.shape[1], axis=1)], axis=1)
        if self.style == "sequential":
            return np.add.accumulate(values, axis=1)[:, -1:]
        return np.ascontiguousarray(values).sum(axis=1, keepdims=True)

    def statistics(self, x):
        m = x.dtype.type(x.shape[1])
        if self.style == "welford":
            mean, second = np.zeros_like(x[:, :1]), np.zeros_like(x[:, :1])
            last = x.shape[1] - (self.bug == "dropped element")
            for i in range(last):
                delta = x[:, i : i + 1] - mean
                mean = mean + delta / x.dtype.type(i + 1)
                second = second + delta * (x[:, i : i + 1] - mean)
            return mean, second / m
        mean = self.sum(x) / m
        if self.style == "one_pass":
            return mean, self.sum(x * x) / m - mean * mean
        centred = x - mean
        return mean, self.sum(centred * centred) / m

    def inverse(self, variance, epsilon, m):
        work = variance.dtype.type
        epsilon = work({"epsilon missing": 0.0, "epsilon 1e-3": 1e-3}.get(self.bug, epsilon))
        if self.bug == "unbiased variance normalizes" and m > 1:
            variance = variance * work(m) / work(m - 1)
        with np.errstate(all="ignore"):
            if self.bug == "epsilon outside the root":
                return work(1) / (np.sqrt(variance) + epsilon)
            return work(1) / np.sqrt(variance + epsilon)

    def parameter(self, buffer, work):
        values = array_of(buffer).reshape(-1, 1).astype(work)
        return values

    def scale(self, buffer, work):
        values = self.parameter(buffer, work)
        return np.broadcast_to(values[:1], values.shape) if self.bug == "first channel's scale for all" else values

    def normalize(self, x, mean, inverse, scale, bias):
        with np.errstate(all="ignore"):
            if self.style == "folded":
                a = scale * inverse
                return x * a + (bias - mean * a)
            return (x - mean) * inverse * scale + bias

    def store(self, buffer, rows, mode, alpha, beta):
        out = array_of(buffer)
        values = self.back(rows, out.shape, mode)
        work = rows.dtype.type
        with np.errstate(all="ignore"):
            values = work(alpha) * values
            if (beta != 0 and self.bug != "prior ignored") or self.bug == "prior read with beta 0":
                values = values + work(beta) * out.astype(work)
            if self.bug == "NaN in one element":
                values.flat[values.size // 2] = np.nan
            values = values.astype(out.dtype)
        if self.bug == "result as channels first" and out.size:
            image = (ctypes.c_char * (out.size * out.itemsize)).from_address(buffer.pointer)
            np.ndarray(out.shape, out.dtype, buffer=image)[...] = values
        else:
            out[...] = values
        if self.bug == "writes past the end":
            end = buffer.pointer + _arguments.span(buffer.dims, buffer.strides) * out.itemsize
            ctypes.c_uint16.from_address(end).value = 0
        if self.bug == "writes into the gaps":
            span = _arguments.span(buffer.dims, buffer.strides)
            image = (ctypes.c_char * (span * out.itemsize)).from_address(buffer.pointer)
            np.ndarray(span, out.dtype, buffer=image)[buffer.strides[0] - 1] = 0

    def store_parameter(self, buffer, values, alpha=1.0, beta=0.0):
        out = array_of(buffer)
        work = values.dtype.type
        values = work(alpha) * values.reshape(out.shape)
        if beta != 0:
            values = values + work(beta) * out
        out[...] = values

    # ---------------------------------------------------------------- calls

    def forward_training(
        self,
        x,
        scale,
        bias,
        y,
        *,
        mode,
        alpha,
        beta,
        epsilon,
        exponential_average_factor,
        workspace,
        running_mean=None,
        running_variance=None,
        saved_mean=None,
        saved_inv_variance=None,
    ):
        rows = self.rows(array_of(x), mode)
        work, m = rows.dtype.type, rows.shape[1]
        mean, variance = self.statistics(rows)
        inverse = self.inverse(variance, epsilon, m)
        used = variance if self.bug == "variance as inverse" else inverse
        result = self.normalize(rows, mean, used, self.scale(scale, work), self.parameter(bias, work))
        self.store(y, result, mode, alpha, beta)
        if saved_mean is not None:
            self.store_parameter(saved_mean, mean)
            self.store_parameter(saved_inv_variance, used)
        if running_mean is not None:
            f = work(exponential_average_factor)
            if self.bug == "old and new swapped in the running average":
                f = 1 - f
            batch = variance if self.bug == "biased running variance" else variance * work(m) / work(m - 1)
            for buffer, new in ((running_mean, mean), (running_variance, batch)):
                old = self.parameter(buffer, work)
                self.store_parameter(buffer, (1 - f) * old + f * new)
        if self.bug == "changes its input":
            array_of(x).flat[0] = 0.125

    def forward_inference(
        self, x, scale, bias, running_mean, running_variance, y, *, mode, alpha, beta, epsilon, workspace
    ):
        rows = self.rows(array_of(x), mode)
        work = rows.dtype.type
        variance = self.parameter(running_variance, work)
        inverse = variance if self.bug == "variance as inverse" else self.inverse(variance, epsilon, rows.shape[1])
        mean = self.parameter(running_mean, work)
        self.store(
            y,
            self.normalize(rows, mean, inverse, self.scale(scale, work), self.parameter(bias, work)),
            mode,
            alpha,
            beta,
        )

    def backward(
        self,
        x,
        dy,
        scale,
        dx,
        dscale,
        dbias,
        *,
        mode,
        alpha_data,
        beta_data,
        alpha_param,
        beta_param,
        epsilon,
        workspace,
        saved_mean=None,
        saved_inv_variance=None,
    ):
        rows, grad = self.rows(array_of(x), mode), self.rows(array_of(dy), mode)
        work, m = rows.dtype.type, rows.dtype.type(rows.shape[1])
        if saved_mean is None or self.bug == "recomputes saved statistics":
            mean, variance = self.statistics(rows)
            inverse = self.inverse(variance, epsilon, rows.shape[1])
        else:
            mean, inverse = self.parameter(saved_mean, work), self.parameter(saved_inv_variance, work)
            if self.bug == "variance as inverse":
                inverse = self.inverse(inverse, epsilon, rows.shape[1])
        normal = (rows - mean) * inverse
        g_bias = self.sum(grad)
        if self.style == "one_pass":
            g_scale = (self.sum(grad * rows) - mean * g_bias) * inverse
        else:
            g_scale = self.sum(grad * normal)
        if self.bug == "dscale and dbias through 16 bit":
            short = array_of(x).dtype if array_of(x).itemsize == 2 else numpy_dtype(DataType.BFLOAT16)
            g_bias, g_scale = g_bias.astype(short).astype(work), g_scale.astype(short).astype(work)
        mean_dy = 0 if self.bug == "dx without mean(dy)" else g_bias / m
        projection = 0 if self.bug == "dx without projection" else normal * (g_scale / m)
        self.store(dx, self.scale(scale, work) * inverse * (grad - mean_dy - projection), mode, alpha_data, beta_data)
        self.store_parameter(dscale, g_scale, alpha_param, beta_param)
        self.store_parameter(dbias, g_bias, alpha_param, beta_param)


def session(style="two_pass", bug=None):
    """A session on simulated kernels, under the name of the CPU backend."""
    return Session("onednn", Kernels(style, bug), devices.device_for(1))


# ---------------------------------------------------------------- openers for worker processes


class _Dying(Kernels):
    """Dies as libraries do, on tensors of four axes."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward_training(self, x, *arguments, **options):
        if len(x.dims) == 4:
            self.how()
        super().forward_training(x, *arguments, **options)


def _exit():
    os._exit(0)  # success, as MIOpen's own exit() on an unexpected layout


def open_simulated(backend):
    return session()


def open_exiting(backend):
    return Session(backend, _Dying(_exit), devices.device_for(1))


def open_aborting(backend):
    return Session(backend, _Dying(os.abort), devices.device_for(1))


def open_nothing(backend):
    raise OSError("no such device")
