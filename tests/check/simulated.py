"""Openers of sessions for worker processes, which import them by name: simulated kernels, and libraries that die."""

import os
import signal
import threading
from pathlib import Path

from pybnorm import devices
from pybnorm.check.run.runner import Session
from pybnorm.check.selftest.simulated import BUGS, STYLES, Kernels, array_of, session
from pybnorm.devices import cpu

__all__ = ["BUGS", "STYLES", "Kernels", "array_of", "session"]


def alive(pid):
    """Whether a process computes; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def interruptible():
    """For ``preexec_fn``: a job that a script starts with & or nohup ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Watched(Kernels):
    """Calls `before` and `after` with the tensors and options of each call, by name."""

    def __init__(self, before=lambda call: None, after=lambda call: None):
        super().__init__()
        self.before, self.after = before, after

    def forward_training(self, x, scale, bias, y, **options):
        self._around(super().forward_training, {"x": x, "scale": scale, "bias": bias, "y": y}, options)

    def backward(self, x, dy, scale, dx, dscale, dbias, **options):
        tensors = {"x": x, "dy": dy, "scale": scale, "dx": dx, "dscale": dscale, "dbias": dbias}
        self._around(super().backward, tensors, options)

    def _around(self, method, tensors, options):
        self.before(tensors | options)
        method(*tensors.values(), **options)
        self.after(tensors | options)


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


class _Fallible(cpu.Device):
    """Fails for good after a kernel's fault, as a CUDA context does."""

    faults = 0

    def synchronize(self):
        if _Fallible.faults:
            raise RuntimeError("an illegal memory access was encountered")


def _fault():
    _Fallible.faults += 1
    raise RuntimeError("an illegal memory access was encountered")


def open_faulting(backend):
    return Session(backend, _Dying(_fault), _Fallible())


def faults():
    return _Fallible.faults


def _hang():
    threading.Event().wait()


def open_hanging(backend):
    return Session("onednn", _Dying(_hang), devices.device_for(1))
