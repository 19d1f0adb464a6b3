"""Threads at once, with a GIL and without: what each gets is, bit for bit, what one thread alone gets."""

import concurrent.futures
import importlib
import os
import subprocess
import sys
import sysconfig
import threading
import time

import numpy as np
import pytest

import pybnorm
from pybnorm._core import Cache, _Lock

THREADS = 6
DIMS = [(2, 3, 4, 4), (4, 8, 5, 5), (3, 16, 3, 3)]
BLEND = {"alpha": 0.5, "beta": 0.25}  # needs workspace, which a handle has once


@pytest.fixture(autouse=True)
def hurried(need_device):
    """With a GIL, threads take turns far more often than they would."""
    need_device("onednn")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(work, threads=THREADS):
    """Results of work(0), work(1), ... in threads that begin together; what one of them raises is raised."""
    begin = threading.Barrier(threads)

    def run(i):
        begin.wait(60)
        return work(i)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


class Data:
    """Arrays of one thread, which have neither shape nor values in common with its neighbours'."""

    def __init__(self, seed, dims=None):
        random = np.random.default_rng(seed)
        self.dims = dims or DIMS[seed % len(DIMS)]
        self.x, self.dy, self.prior = random.standard_normal((3, *self.dims)).astype(np.float32)
        self.scale, self.bias, self.mean = random.standard_normal((3, self.dims[1])).astype(np.float32)
        self.variance = random.uniform(0.5, 2, self.dims[1]).astype(np.float32)

    def vectors(self, count):
        return np.full((count, self.dims[1]), np.nan, np.float32)


def training(handle, d, algorithm=None):
    y, (mean, inv) = d.prior.copy(), d.vectors(2)
    running = d.mean.copy(), d.variance.copy()
    handle.forward_training(
        d.x, d.scale, d.bias, y, running_mean=running[0], running_variance=running[1], saved_mean=mean,
        saved_inv_variance=inv, algorithm=algorithm, **BLEND,
    )  # fmt: skip
    return [a.tobytes() for a in (y, *running, mean, inv)]


def inference(handle, d, algorithm=None):
    y = d.prior.copy()
    handle.forward_inference(d.x, d.scale, d.bias, d.mean, d.variance, y, algorithm=algorithm, **BLEND)
    return [y.tobytes()]


def backward(handle, d, algorithm=None):
    dx, (dscale, dbias) = np.full_like(d.x, np.nan), d.vectors(2)
    handle.backward(d.x, d.dy, d.scale, dx, dscale, dbias, algorithm=algorithm)
    return [a.tobytes() for a in (dx, dscale, dbias)]


def addresses(handle, d):
    """On addresses, with descriptors of its own."""
    y = d.prior.copy()
    with pybnorm.TensorDescriptor("onednn", "f32", d.dims) as x_desc:
        p_desc = pybnorm.derive_bn_tensor_descriptor(x_desc, 1)
        size = handle.workspace_size("forward_inference", x_desc, **BLEND)
        space = np.empty(size + 64, np.uint8)
        pybnorm.batch_normalization_forward_inference(
            handle, 1, BLEND["alpha"], BLEND["beta"], x_desc, d.x.ctypes.data, x_desc, y.ctypes.data, p_desc,
            *(v.ctypes.data for v in (d.scale, d.bias, d.mean, d.variance)), 1e-5,
            workspace=-(-space.ctypes.data // 64) * 64, workspace_size=size,
        )  # fmt: skip
        p_desc.close()
    return [y.tobytes()]


def everything(handle, d):
    return [
        found
        for algorithm in (None, "auto")
        for call in (training, inference, backward)
        for found in call(handle, d, algorithm)
    ] + addresses(handle, d)


def alone(call, *arguments):
    """The results for each thread's data, by one thread."""
    with pybnorm.Handle("onednn") as handle:
        return [call(handle, Data(i), *arguments) for i in range(THREADS)]


def test_one_handle():
    right = alone(everything)
    with pybnorm.Handle("onednn") as handle:

        def work(i):
            d = Data(i)
            return all(everything(handle, d) == right[i] for _ in range(40))

        assert at_once(work) == [True] * THREADS


def test_a_handle_each_made_and_closed_over_and_over():
    right = alone(everything)

    def work(i):
        d, good = Data(i), []
        for _ in range(10):
            with pybnorm.Handle("onednn") as handle:
                good += [everything(handle, d) == right[i] for _ in range(3)]
        return all(good)

    assert at_once(work) == [True] * THREADS


@pytest.mark.parametrize("given", ["arrays", "addresses"])
def test_one_plan(given):
    """Each call has addresses of its own; they wait for one another at the handle's lock."""
    data = [Data(i, DIMS[1]) for i in range(THREADS)]

    def call(plan, d):
        y, (mean, inv) = d.prior.copy(), d.vectors(2)
        running = d.mean.copy(), d.variance.copy()
        arrays = d.x, d.scale, d.bias, y, *running, mean, inv
        plan(*(arrays if given == "arrays" else [a.ctypes.data for a in arrays]))
        return [a.tobytes() for a in (y, *running, mean, inv)]

    with pybnorm.Handle("onednn") as handle:
        plan = handle.plan_forward_training(data[0].x, algorithm="auto", **BLEND)
        right = [call(plan, d) for d in data]
        assert len(set(map(tuple, right))) == THREADS
        assert at_once(lambda i: all(call(plan, data[i]) == right[i] for _ in range(300))) == [True] * THREADS


def test_plans_of_one_handle_made_and_dropped():
    data = [Data(i) for i in range(THREADS)]

    def call(handle, d):
        dx, (dscale, dbias) = np.full_like(d.x, np.nan), d.vectors(2)
        handle.plan_backward(d.x, saved=False)(d.x, d.dy, d.scale, dx, dscale, dbias)
        return [a.tobytes() for a in (dx, dscale, dbias)]

    with pybnorm.Handle("onednn") as handle:
        right = [call(handle, d) for d in data]
        assert at_once(lambda i: all(call(handle, data[i]) == right[i] for _ in range(60))) == [True] * THREADS


def test_descriptors_closed_by_other_threads():
    """Each answers as it was made, or says that it is closed."""
    shelf = [pybnorm.TensorDescriptor("onednn", "f32", (1, 1, 1, 1)) for _ in range(8)]

    def work(i):
        refused = 0
        for n in range(300):
            dims = (1 + (n + i) % 7, 2 + i, 3, 1 + n % 5)
            old, shelf[n % 8] = shelf[n % 8], pybnorm.TensorDescriptor("onednn", "f32", dims)
            other = shelf[(n + 3 * i) % 8]
            try:
                assert other.query() == (pybnorm.DataType.FLOAT32, other.dims, other.strides)
                assert other.nbytes == 4 * np.prod(other.dims)
                derived = pybnorm.derive_bn_tensor_descriptor(other, "spatial")
                assert derived.query()[1] == (1, other.dims[1], 1, 1)
                derived.close()
            except pybnorm.ClosedError:
                refused += 1
            old.close()
            with pytest.raises(pybnorm.ClosedError):
                old.query()
        return refused

    refused = at_once(work)
    assert all(r < 300 for r in refused)


def test_a_handle_closed_by_another_thread():
    """What came first is right; what did not says that the handle is closed."""
    right = alone(training)
    for _ in range(30):
        handle = pybnorm.Handle("onednn")
        pointer, text = handle.pointer, repr(handle)

        def work(i, handle=handle, pointer=pointer, text=text):
            d, good = Data(i), []
            try:
                if i == 0:
                    for _ in range(5):
                        good.append(training(handle, d) == right[i])
                    handle.close()
                while i % 2 == 0:
                    good.append(training(handle, d) == right[i])
                while True:
                    good.append(handle.pointer == pointer and handle.stream == pointer)
                    good.append(repr(handle) in (text, "<Handle closed>"))
            except pybnorm.ClosedError:
                return all(good)

        assert at_once(work) == [True] * THREADS


@pytest.fixture
def functional():
    # Where oneDNN is not, as in the rig, the packages of this module need not be either.
    return importlib.import_module("pybnorm.functional")


def test_functional_with_a_handle_of_each_thread():
    data = [Data(i) for i in range(THREADS)]
    right = [composed(d, 1e-5, None) for d in data]
    assert at_once(lambda i: all(composed(data[i], 1e-5, None) == right[i] for _ in range(60))) == [True] * THREADS


def composed(d, epsilon, handle):
    functional = importlib.import_module("pybnorm.functional")
    mean, variance = d.mean.copy(), d.variance.copy()
    kind = {"epsilon": epsilon, "handle": handle}
    running = {"running_mean": mean, "running_variance": variance}
    y, saved_mean, saved_inv = functional.batch_norm_training(d.x, d.scale, d.bias, **running, **kind)
    grads = functional.batch_norm_backward(d.x, d.dy, d.scale, saved_mean, saved_inv, **kind)
    z = functional.batch_norm_inference(d.x, scale=d.scale, bias=d.bias, **running, **kind)
    return [a.tobytes() for a in (y, saved_mean, saved_inv, mean, variance, *grads, z)]


def test_functional_with_one_handle_that_keeps_few_kinds(monkeypatch, functional):
    monkeypatch.setattr(functional, "MOST_READY", 2)
    data, kinds = [Data(i) for i in range(THREADS)], [1e-5 * (1 + k) for k in range(3)]
    with pybnorm.Handle("onednn") as handle:
        right = [[composed(d, epsilon, handle) for epsilon in kinds] for d in data]

        def work(i):
            return all([composed(data[i], epsilon, handle) for epsilon in kinds] == right[i] for _ in range(30))

        assert at_once(work) == [True] * THREADS
        assert len(pybnorm._core.cache(handle, "functional")) <= 2


def test_kinds_are_forgotten_by_several_threads_at_once():
    ready = Cache()
    at_once(lambda i: [ready.keep((i, n), print, 2) for n in range(5000)])
    assert len(ready) <= 2


def told(code, folder, *options):
    """What a script prints, on one thread of OpenMP, where MIOpen is not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYBNORM_LIB_MIOPEN": str(folder / "nothing.so")}
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


if sysconfig.get_config_var("Py_GIL_DISABLED"):

    def test_the_gil_stays_off(tmp_path):
        code = "import sys, pybnorm, pybnorm.functional; pybnorm.load('onednn'); print(sys._is_gil_enabled())"
        assert told(code, tmp_path, "-W", "error") == "False\n"


CROSSED = """
import signal, threading, numpy as np, pybnorm
from pybnorm import _core

x, v = np.ones((2, 3, 4, 4), np.float32), np.ones(3, np.float32)
handles = [pybnorm.Handle("onednn") for _ in range(2)]
inside = threading.Barrier(2)


class Crossed:
    "An array that uses the other thread's handle before it says where it is, while the other does the same."

    def __init__(self, memory, other):
        self.memory, self.other, self.met = memory, other, False

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.met:
            self.met = True
            inside.wait(60)
            self.other.fill(2.0, np.empty_like(x))
            inside.wait(60)
        return self.memory.__dlpack__(**options)


class Number:
    "A scalar that does."

    def __init__(self, other):
        self.other = other

    def __float__(self):
        inside.wait(60)
        self.other.fill(2.0, np.empty_like(x))
        inside.wait(60)
        return 1.0


def calls(mine, other):
    d = mine.descriptor(x)
    yield lambda c: mine.forward_training(c(x), v, v, np.empty_like(x))
    yield lambda c: mine.forward_training(x, c(v), v, np.empty_like(x))
    yield lambda c: mine.forward_training(x, v, v, np.empty_like(x), running_mean=c(v + 0), running_variance=v + 0)
    yield lambda c: mine.forward_inference(x, v, c(v), v, v, np.empty_like(x))
    yield lambda c: mine.backward(x, c(x), v, np.empty_like(x), v.copy(), v.copy())
    yield lambda c: mine.backward(x, x, c(v), np.empty_like(x), v.copy(), v.copy())
    yield lambda c: mine.fill(1.0, c(np.empty_like(x)))
    yield lambda c: mine.axpby(1.0, c(x), 0.0, np.empty_like(x))
    yield lambda c: mine.axpby(1.0, x, 0.0, np.empty_like(x), workspace=c(np.empty(64, np.uint8)))
    yield lambda c: mine.relu(c(x), np.empty_like(x))
    yield lambda c: mine.relu_backward(x, c(x), np.empty_like(x))
    yield lambda c: mine.descriptor(c(x))
    yield lambda c: mine.plan_forward_training(c(x))
    yield lambda c: mine.plan_forward_inference(x, c(x))
    yield lambda c: mine.plan_backward(x, dx=c(x))
    plan = mine.plan_forward_inference(x)
    yield lambda c: plan(x, c(v), v, v, v, np.empty_like(x))
    yield lambda c: plan(x, v, v, v, v, np.empty_like(x), workspace=c(np.empty(64, np.uint8)))
    yield lambda c: mine.forward_training(x, v, v, np.empty_like(x), alpha=Number(other))
    yield lambda c: mine.plan_forward_training(x, epsilon=Number(other))
    yield lambda c: mine.fill(Number(other), np.empty_like(x))


def run(mine, other):
    for call in calls(mine, other):
        call(lambda memory: Crossed(memory, other))


threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in (handles, handles[::-1])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(100)
    assert not thread.is_alive(), "a call waits for another's lock"

# A signal handler that does what it interrupts, here in the midst of a load and of a call.
find, told = _core._find.find, []


def finding(*arguments):
    signal.raise_signal(signal.SIGUSR1)
    return find(*arguments)


def again(*_):
    try:
        pybnorm.load("miopen")
    except pybnorm.PybnormError as error:
        told.append(type(error).__name__)


signal.signal(signal.SIGUSR1, again)
_core._find.find = finding
again()
assert told == ["BusyError", "LibraryLoadError"], told
_core._find.find = find
for handle in handles:
    handle.close()
print("done")
"""


def test_arrays_and_signal_handlers_that_use_the_other_handle(tmp_path):
    """No lock is held while an array says what it is, so two threads cannot wait for one another."""
    assert told(CROSSED, tmp_path).startswith("done\n")


WAITING = """
import signal, threading
from pybnorm._core import _Lock

lock, taken, enough = _Lock(), threading.Event(), threading.Event()


def other():
    with lock, lock:  # twice, as a signal handler in the midst of a call does
        taken.set()
        enough.wait(100)


def handler(*_):
    told.append("handled")
    if len(told) == 1:
        raise KeyboardInterrupt
    enough.set()


told = []
signal.signal(signal.SIGALRM, handler)
thread = threading.Thread(target=other)
thread.start()
taken.wait(100)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.3)
    with lock:
        told.append("taken from its owner")
except KeyboardInterrupt:
    told.append("interrupted")
with lock:
    told.append("thread alive" if not enough.is_set() else "taken")
signal.setitimer(signal.ITIMER_REAL, 0)
thread.join(100)
for _ in range(3):  # whoever gave it back has given it back for good
    free = threading.Thread(target=lambda: [lock.__enter__(), lock.__exit__(), told.append("free")])
    free.start()
    free.join(100)
print(*[word for word in told if word != "handled"], sep=", ")
"""


def test_who_waits_for_a_handle_can_be_interrupted(tmp_path):
    assert told(WAITING, tmp_path) == "interrupted, taken, free, free, free\n"


def test_a_lock_keeps_threads_apart():
    lock, total = _Lock(), [0]

    def work(_):
        for _ in range(2000):
            with lock:
                before = total[0]
                if before % 50 == 0:
                    time.sleep(0)  # another thread's turn, which it must not use
                total[0] = before + 1

    at_once(work)
    assert total[0] == 2000 * THREADS
