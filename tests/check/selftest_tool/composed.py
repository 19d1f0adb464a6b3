"""Right kernels for calls with an activation, and, in float64, for those that are composed of a vendor's."""

import numpy as np

from pybnorm._arrays import Buffer, as_buffer
from pybnorm.check.selftest.simulated import Kernels, array_of


class Activated(Kernels):
    """Kernels that apply the activation themselves."""

    limits = z = None

    def passes(self, value):
        """Where a gradient passes."""
        return (value > self.limits[0]) & (value <= self.limits[1])

    def normalize(self, *arguments):
        values = super().normalize(*arguments)
        values = values if self.z is None else values + self.z
        return values if self.limits is None else np.clip(values, *self.limits)

    def _finished(self, method, given, activation=None, z=None, activation_low=None, activation_high=None):
        low, high = (0.0 if activation_low is None else activation_low), activation_high
        self.limits = (np.float32(low), np.float32(np.inf if high is None else high)) if activation else None
        self.z = None if z is None else self.rows(array_of(z), given["mode"])
        method(**given)

    def forward_training(self, **named):
        behind = {name: named.pop(name) for name in _BEHIND if name in named}
        self._finished(super().forward_training, named, **behind)

    def forward_inference(self, **named):
        behind = {name: named.pop(name) for name in _BEHIND if name in named}
        self._finished(super().forward_inference, named, **behind)

    def backward(self, *, dy, bias=None, y=None, dz=None, **named):
        behind = {name: named.pop(name) for name in _BEHIND if name in named}
        self._finished(lambda **_: None, named, **behind)
        if self.limits is not None:
            x, mode = array_of(named["x"]), named["mode"]
            if y is None:
                statistics = (named["saved_mean"], named["saved_inv_variance"], named["scale"], bias)
                arrays = (self.parameter(b, np.float32) for b in statistics)
                value = self.back(Kernels.normalize(self, self.rows(x, mode), *arrays), x.shape, mode)
            else:
                value = array_of(y).astype(np.float32)
            masked = np.where(self.passes(value), array_of(dy), np.zeros((), x.dtype))
            if dz is not None:
                array_of(dz)[...] = masked
            dy = as_buffer(masked, "dy")
        super().backward(dy=dy, **named)


_BEHIND = ("activation", "activation_low", "activation_high", "z")


class Composed:
    """A handle with the functions of `pybnorm.check.language.calls.COMPOSED`."""

    def backward_frozen(self, **given):
        """The gradient of inference, whose statistics are constants."""
        self._gradients(given, constant=True)

    def training_grad(self, **given):
        """The gradient of training, by mean and variance."""
        self._gradients(given, constant=False)

    def sync_backward(self, **given):
        """The gradient of training over ranks, which are one batch here."""
        self._gradients(given, constant=False)

    def _gradients(self, given, constant):
        v = _values(given)
        mean = v["mean"] if "mean" in v else v["saved_mean"]
        inverse = 1 / np.sqrt(v["variance"] + v["epsilon"]) if "variance" in v else v["saved_inv_variance"]
        normal = (v["x"] - mean) * inverse
        dbias, dscale = _sums(mean, v["dy"], v["dy"] * normal)
        m = normal.size // mean.size
        inner = v["dy"] if constant else v["dy"] - dbias / m - normal * dscale / m
        self.write(given, "dx", v["scale"] * inverse * inner, v["alpha"], v["beta"])
        for name, result in (("dscale", dscale), ("dbias", dbias)):
            self.write(given, name, result, v.get("alpha_param", 1.0), v.get("beta_param", 0.0))

    def backward_reduce(self, **given):
        """The sums of backward."""
        v = _values(given)
        total, moment = _sums(v["mean"], v["dy"], v["dy"] * (v["x"] - v["mean"]))
        for name, result in (("sum_dy", total), ("sum_dy_xmu", moment), ("dbias", total)):
            self.write(given, name, result)
        self.write(given, "dscale", moment * v["inv_variance"])

    def backward_elemt(self, **given):
        """Dx by sums that are given."""
        v = _values(given)
        slope = v["sum_dy_xmu"] / v["count"] * v["inv_variance"] ** 2
        inner = v["dy"] - v["sum_dy"] / v["count"] - (v["x"] - v["mean"]) * slope
        self.write(given, "dx", v["scale"] * v["inv_variance"] * inner, v["alpha"], v["beta"])

    def elemt(self, **given):
        """Y by statistics that are given."""
        v = _values(given)
        result = v["scale"] * v["inv_variance"] * (v["x"] - v["mean"]) + v["bias"]
        self.write(given, "y", result, v["alpha"], v["beta"])

    def gather_stats(self, **given):
        """The statistics of ranks, merged."""
        v = _values(given)
        shape = v["mean"].shape
        counts = np.array(v["counts"], np.float64)
        own = counts > 0
        counts, means, squares = (a[own] for a in (counts[:, None], v["means"], v["m2s"]))
        mean = (means * counts).sum(axis=0) / counts.sum()
        variance = (squares + counts * (means - mean) ** 2).sum(axis=0) / counts.sum()
        mean, variance = mean.reshape(shape), variance.reshape(shape)
        self.write(given, "mean", mean)
        self.write(given, "variance", variance)
        self.write(given, "inv_variance", 1 / np.sqrt(variance + v["epsilon"]))
        self.average(given, v, mean, variance, counts.sum())

    def sync_train(self, **given):
        """Training over ranks, which are one batch here."""
        v = _values(given)
        m = v["x"].size // v["saved_mean"].size
        mean = _sums(v["saved_mean"], v["x"])[0] / m
        variance = _sums(mean, (v["x"] - mean) ** 2)[0] / m
        inverse = 1 / np.sqrt(variance + v["epsilon"])
        self.write(given, "y", (v["x"] - mean) * inverse * v["scale"] + v["bias"], v["alpha"], v["beta"])
        self.write(given, "saved_mean", mean)
        self.write(given, "saved_inv_variance", inverse)
        self.average(given, v, mean, variance, m)

    def write(self, given, name, result, alpha=1.0, beta=0.0):
        """Blended with what is there."""
        out = array_of(given[name])
        out[...] = alpha * result + (beta * out.astype(np.float64) if beta else 0.0)

    def average(self, given, v, mean, variance, m):
        """Running statistics, if they are given."""
        f = v["exponential_average_factor"]
        for name, new in (("running_mean", mean), ("running_variance", variance * m / (m - 1))):
            if name in given:
                self.write(given, name, (1 - f) * v[name] + f * new)


def _values(given):
    return {n: array_of(v).astype(np.float64) if isinstance(v, Buffer) else v for n, v in given.items()}


def _sums(like, *terms):
    """Over the axes that statistics do not have."""
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1)
    return [a.sum(axis=axes, keepdims=True) for a in terms]
