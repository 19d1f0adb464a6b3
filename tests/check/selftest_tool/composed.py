"""The calls that are composed of a vendor's, simulated: right kernels in float64, a line or two each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pybnorm._arrays import Buffer
from pybnorm.check.selftest.simulated import array_of

__all__ = ["Composed"]

Array = npt.NDArray[Any]


class Composed:
    """A handle with the functions of `pybnorm.check.language.calls.COMPOSED`."""

    def backward_frozen(self, **given: Any) -> None:
        """The gradient of inference, whose statistics are constants."""
        self._gradients(given, constant=True)

    def training_grad(self, **given: Any) -> None:
        """The gradient of training, by mean and variance."""
        self._gradients(given, constant=False)

    def sync_backward(self, **given: Any) -> None:
        """The gradient of training over ranks, which are one batch here."""
        self._gradients(given, constant=False)

    def _gradients(self, given: Mapping[str, Any], constant: bool) -> None:
        v = _values(given)
        mean = v["mean"] if "mean" in v else v["saved_mean"]
        inverse = 1 / np.sqrt(v["variance"] + v["epsilon"]) if "variance" in v else v["saved_inv_variance"]
        normal = (v["x"] - mean) * inverse
        dbias, dscale = _sums(mean, v["dy"], v["dy"] * normal)
        m = normal.size // mean.size
        inner = v["dy"] if constant else v["dy"] - dbias / m - normal * dscale / m
        _write(given, "dx", v["scale"] * inverse * inner, v["alpha"], v["beta"])
        for name, result in (("dscale", dscale), ("dbias", dbias)):
            _write(given, name, result, v.get("alpha_param", 1.0), v.get("beta_param", 0.0))

    def backward_reduce(self, **given: Any) -> None:
        """The sums of backward."""
        v = _values(given)
        total, moment = _sums(v["mean"], v["dy"], v["dy"] * (v["x"] - v["mean"]))
        for name, result in (("sum_dy", total), ("sum_dy_xmu", moment), ("dbias", total)):
            _write(given, name, result)
        _write(given, "dscale", moment * v["inv_variance"])

    def backward_elemt(self, **given: Any) -> None:
        """Dx by sums that are given."""
        v = _values(given)
        slope = v["sum_dy_xmu"] / v["count"] * v["inv_variance"] ** 2
        inner = v["dy"] - v["sum_dy"] / v["count"] - (v["x"] - v["mean"]) * slope
        _write(given, "dx", v["scale"] * v["inv_variance"] * inner, v["alpha"], v["beta"])

    def elemt(self, **given: Any) -> None:
        """Y by statistics that are given."""
        v = _values(given)
        result = v["scale"] * v["inv_variance"] * (v["x"] - v["mean"]) + v["bias"]
        _write(given, "y", result, v["alpha"], v["beta"])

    def gather_stats(self, **given: Any) -> None:
        """The statistics of ranks, merged."""
        v = _values(given)
        shape = v["mean"].shape
        counts = np.array(v["counts"], np.float64)
        own = counts > 0
        counts, means, squares = (a[own] for a in (counts[:, None], v["means"], v["m2s"]))
        mean = (means * counts).sum(axis=0) / counts.sum()
        variance = (squares + counts * (means - mean) ** 2).sum(axis=0) / counts.sum()
        mean, variance = mean.reshape(shape), variance.reshape(shape)
        _write(given, "mean", mean)
        _write(given, "variance", variance)
        _write(given, "inv_variance", 1 / np.sqrt(variance + v["epsilon"]))
        _average(given, v, mean, variance, counts.sum())

    def sync_train(self, **given: Any) -> None:
        """Training over ranks, which are one batch here."""
        v = _values(given)
        m = v["x"].size // v["saved_mean"].size
        mean = _sums(v["saved_mean"], v["x"])[0] / m
        variance = _sums(mean, (v["x"] - mean) ** 2)[0] / m
        inverse = 1 / np.sqrt(variance + v["epsilon"])
        _write(given, "y", (v["x"] - mean) * inverse * v["scale"] + v["bias"], v["alpha"], v["beta"])
        _write(given, "saved_mean", mean)
        _write(given, "saved_inv_variance", inverse)
        _average(given, v, mean, variance, m)


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    return {n: array_of(v).astype(np.float64) if isinstance(v, Buffer) else v for n, v in given.items()}


def _sums(like: Array, *terms: Array) -> list[Array]:
    """Over the axes that statistics do not have."""
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1)
    return [a.sum(axis=axes, keepdims=True) for a in terms]


def _write(given: Mapping[str, Any], name: str, result: Array, alpha: float = 1.0, beta: float = 0.0) -> None:
    out = array_of(given[name])
    out[...] = alpha * result + (beta * out.astype(np.float64) if beta else 0.0)


def _average(given: Mapping[str, Any], v: Mapping[str, Any], mean: Array, variance: Array, m: Any) -> None:
    """Running statistics, if they are given."""
    f = v["exponential_average_factor"]
    for name, new in (("running_mean", mean), ("running_variance", variance * m / (m - 1))):
        if name in given:
            _write(given, name, (1 - f) * v[name] + f * new)
