"""One tree of processes that forks after oneDNN has computed with several threads; see test_forks.py.

Every child has LIMIT seconds and is then killed by a signal that nothing handles: a hang is a failure.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback

import numpy as np
from click.testing import CliRunner

import pybnorm
from pybnorm import cli, diagnostics, functional, operations, reference

LIMIT = int(sys.argv[1])
rng = np.random.default_rng(0)
x, dy = rng.normal(size=(2, 32, 32, 16, 16)).astype("f4")
scale, bias, mean, variance = rng.uniform(0.5, 2, size=(4, 32)).astype("f4")
y, dx = np.empty((2, *x.shape), "f4")
dscale, dbias, got_mean, got_variance = np.empty((4, 32), "f4")
gaps, result = np.empty((2, 32, 32, 16, 17), "f4")[..., :16]
gaps[...] = x


TRAINED = reference.forward_training(x, scale, bias).y
INFERRED = reference.forward_inference(x, scale, bias, mean, variance).y
RIGHT = reference.backward(x, dy, scale)
GRADIENTS = RIGHT.dx, RIGHT.dscale.ravel(), RIGHT.dbias.ravel()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=5e-3)


def compute(handle):
    """Every batch-norm call of a handle, a plan and a composed operation."""
    handle.forward_training(x, scale, bias, y)
    close(y, TRAINED)
    handle.forward_training(gaps, scale, bias, result)  # by kernels that ask for threads only when they run
    close(result, TRAINED)
    handle.forward_inference(x, scale, bias, mean, variance, y)
    close(y, INFERRED)
    handle.backward(x, dy, scale, dx, dscale, dbias)
    for got, want in zip((dx, dscale, dbias), GRADIENTS, strict=True):
        close(got, want)
    operations.stats(handle, x, mean=got_mean, variance=got_variance)
    close(got_mean, x.mean((0, 2, 3)))
    close(got_variance, x.var((0, 2, 3)))


def compute_without_handle(_=None):
    close(functional.batch_norm_training(x, scale, bias)[0], TRAINED)
    running = {"running_mean": mean, "running_variance": variance}
    close(functional.batch_norm_inference(x, **running, scale=scale, bias=bias), INFERRED)
    return os.getpid()


def tasks():
    return len(os.listdir("/proc/self/task"))


def in_a_child(work):
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(LIMIT)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"{work.__name__} in a forked child: exit status {status}"


def with_all_threads():
    """Before the parent had OpenMP: nothing is lost, and nothing is held back."""
    before = tasks()
    with pybnorm.Handle("onednn") as own:
        compute(own)
    assert tasks() > before


def of_the_old_handle():
    told = {name: getattr(handle, name) for name in seen}
    assert told == seen, (told, seen)
    assert "made before fork()" in repr(handle), repr(handle)
    repr(plan), repr(description)
    assert description.dims == x.shape
    addresses = [array.ctypes.data for array in (x, y, scale, bias)]
    for call in (compute, lambda old: old.set_stream(old.stream), lambda _: plan(*addresses)):
        try:
            call(handle)
        except pybnorm.ArgumentError as error:
            assert "made before fork()" in str(error), error
            assert "one made in this process" in str(error), error
        else:
            raise AssertionError("a handle of the parent was taken")
    handle.close()
    assert repr(handle) == "<Handle closed>"


def of_a_new_handle():
    """What the error for the old one advises."""
    openmp = ctypes.CDLL("libgomp.so.1")
    number, before = openmp.omp_get_max_threads(), tasks()
    with pybnorm.Handle("onednn") as own:
        assert "fork" not in repr(own)
        compute(own)
        compute(own)
        with pybnorm.Handle.from_pointer("onednn", own.pointer) as borrowed:
            compute(borrowed)
        assert tasks() == before  # one thread computed
        assert openmp.omp_get_max_threads() == number > 1  # and the process' own setting is as it was
        failures = []

        def elsewhere():
            try:
                compute(own)
                compute_without_handle()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not failures, failures
        assert tasks() <= before + 1
        in_a_child(compute_without_handle)
    result = CliRunner().invoke(cli.main, ["info"], catch_exceptions=False)
    assert (result.exit_code, "oneDNN" in result.output) == (0, True), result.output


def of_locks_that_others_held():
    with diagnostics.vendor_stderr() as captured:
        os.write(2, b"captured")
    assert "captured" in captured.text
    compute_without_handle()


with open("/proc/self/maps") as file:
    maps = file.read()
if "libgomp.so.1" not in maps:  # else somebody else may have used it
    in_a_child(with_all_threads)
handle = pybnorm.Handle("onednn")
alone = tasks()
description = pybnorm.TensorDescriptor("onednn", "f32", x.shape)
plan = handle.plan_forward_training(description)
compute(handle)
compute_without_handle()
assert tasks() > alone, "the parent computed with one thread, so that nothing here is tested"
seen = {
    name: getattr(handle, name)
    for name in ("backend", "closed", "device", "library", "pointer", "stream", "workspace_nbytes")
}
in_a_child(of_the_old_handle)
in_a_child(of_a_new_handle)

going, inside = threading.Event(), threading.Event()


def hold():
    """A thread that the child lacks, inside what only one may enter; it computes in the meantime."""
    with diagnostics.vendor_stderr(), pybnorm.Handle("onednn") as own:
        inside.set()
        mine = np.empty_like(x)
        while not going.is_set():
            own.forward_training(x, scale, bias, mine)


thread = threading.Thread(target=hold)
thread.start()
inside.wait()
try:
    in_a_child(of_locks_that_others_held)
finally:
    going.set()
    thread.join()

with multiprocessing.get_context("fork").Pool(2) as pool:
    workers = pool.map_async(compute_without_handle, range(4), 1).get(LIMIT)
assert os.getpid() not in workers
forks = [threading.Thread(target=in_a_child, args=(compute_without_handle,)) for _ in range(2)]  # at one time
for thread in forks:
    thread.start()
for thread in forks:
    thread.join()
with contextlib.suppress(ChildProcessError):
    assert os.waitpid(-1, os.WNOHANG)[0] == 0
compute(handle)
handle.close()
print("done")
