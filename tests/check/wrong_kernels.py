"""Implementations that are wrong, each in one way, for ``--implementation wrong_kernels:NAME``."""

import os
import threading
import time

import numpy as np


class Right:
    """A training of float32 that returns names; the others change something of it."""

    name = "kernels"
    version = "1.2+local"

    def forward_training(self, x, scale, bias, epsilon, running_mean, running_variance, exponential_average_factor):
        used, factor, m = self.used(x), np.float32(exponential_average_factor), x.size // x.shape[1]
        mean = used.sum(axis=(0, 2, 3), keepdims=True) / np.float32(m)
        variance = ((used - mean) ** 2).sum(axis=(0, 2, 3), keepdims=True) / np.float32(m)
        inverse = 1 / np.sqrt(variance + np.float32(epsilon))
        found = {
            "y": scale * (x - mean) * inverse + bias,
            "saved_mean": mean,
            "saved_inv_variance": inverse,
            "running_mean": running_mean + factor * (mean - running_mean),
            "running_variance": running_variance + factor * (variance * self.correction(m) - running_variance),
        }
        return self.results(found)

    def used(self, x):
        return x

    def correction(self, m):
        return np.float32(m / (m - 1))

    def results(self, found):
        return found


def of(member, change):
    """`Right` with another `used`, `correction` or `results`."""
    return type("Of", (Right,), {member: lambda self, value: change(value)})


ORDER = ("y", "running_mean", "running_variance", "saved_mean", "saved_inv_variance")
AsTuple = of("results", lambda found: tuple(found[name] for name in ORDER))
Flat = of("results", lambda found: {n: value if n == "y" else value.ravel() for n, value in found.items()})


class InPlace(Right):
    def forward_training(self, *, y, saved_mean, saved_inv_variance, **others):
        others = {name: value for name, value in others.items() if name not in ("mode", "alpha", "beta")}
        found = super().forward_training(**others)
        y[...], saved_mean[...], saved_inv_variance[...] = found["y"], found["saved_mean"], found["saved_inv_variance"]
        others["running_mean"][...] = found["running_mean"]
        others["running_variance"][...] = found["running_variance"]


class Dropped(Right):
    """The last element is in no sum."""

    def used(self, x):
        used = x.copy()
        used[-1, :, -1, -1] = 0
        return used


class Writes(Right):
    def used(self, x):
        used = x.copy()
        x += 1
        return used


class SameBuffer(Right):
    """Returns y in a buffer that the next call returns again."""

    def __init__(self):
        self.buffers = {}

    def results(self, found):
        y = self.buffers.setdefault((found["y"].shape, found["y"].dtype), np.empty_like(found["y"]))
        y[...] = found["y"]
        return found | {"y": y}


class Planned(Right):
    """Takes the number of terms from the first call with as many channels, whatever the shape of later ones."""

    def __init__(self):
        self.counts = {}

    def correction(self, m):
        return np.float32(self.m / (self.m - 1))

    def used(self, x):
        self.m = self.counts.setdefault(x.shape[1], x.size // x.shape[1])
        return x


class Shared(Right):
    """Has scratch memory that every call uses, on whatever thread."""

    def used(self, x):
        self.scratch = x
        for _ in range(20):
            time.sleep(0.001)
            if self.scratch is not x:
                return x * np.float32(1.5)
        return x


class OfThread(Right):
    """Has a table that its first thread alone fills."""

    def used(self, x):
        return x if threading.current_thread() is threading.main_thread() else x * np.float32(1.5)


class Overlapping(Right):
    """Returns y in memory that overlaps that of the call before it."""

    def __init__(self):
        self.memory, self.calls = np.zeros(1 << 14, np.float32), 0

    def results(self, found):
        if threading.current_thread() is not threading.main_thread():
            return found
        start, size = 8 * self.calls, found["y"].size
        y = self.memory[start : start + size].reshape(found["y"].shape)
        self.calls += 1
        y[...] = found["y"]
        return found | {"y": y}


Biased = of("correction", lambda m: np.float32(1))
Shape = of("results", lambda found: found | {"y": found["y"][:, :, :-1]})
Dtype = of("results", lambda found: found | {"saved_mean": found["saved_mean"].astype(np.float64)})
Text = of("results", lambda found: found | {"y": "y"})
Name = of("results", lambda found: found | {"variance": found["saved_mean"]})
Two = of("results", lambda found: (found["y"], found["saved_mean"]))
Nothing = of("results", lambda found: None)
Less = of("results", lambda found: {name: value for name, value in found.items() if name != "saved_mean"})
Crashes = of("results", lambda found: os.abort())


class Raises(Right):
    def results(self, found):
        raise ValueError("no such\nkernel")


class Refuses(Right):
    def results(self, found):
        raise NotImplementedError("float32 is not built in")


class Memory(Right):
    def results(self, found):
        raise MemoryError("2 GiB")


class Unwritten(Right):
    """Takes y and does not write it."""

    def forward_training(self, *, y, **others):
        del others["saved_mean"], others["saved_inv_variance"], others["mode"], others["alpha"], others["beta"]
        found = super().forward_training(**others)
        del found["y"]
        return found


class Device(Right):
    device = "tpu"


class Late(Right):
    def __init__(self):
        raise OSError("no driver")


class Empty:
    pass
