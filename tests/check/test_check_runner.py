"""Running a case: statuses of what goes wrong, repeated calls, processes that die."""

import json
import math
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from simulated import Kernels, array_of, open_aborting, open_exiting, open_nothing, open_simulated, session

from pybnorm import devices, errors
from pybnorm.check import report
from pybnorm.check.bounds import Status
from pybnorm.check.data import generate
from pybnorm.check.problem import Problem
from pybnorm.check.runner import BackendInfo, CaseResult, Session, Worker, classify, execute, run_case

CASE = Problem.parse("train,spatial,f32,nchw,8x3x4x4")
CASE_3D = Problem.parse("train,spatial,f32,nchw,8x3x4")


def vendor_error(kind, status_name="STATUS", text=""):
    return kind(backend="onednn", function="f", status=1, status_name=status_name, text=text)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (vendor_error(errors.UnsupportedError), Status.UNSUPPORTED),
        (vendor_error(errors.NotSupportedError), Status.UNSUPPORTED),
        (vendor_error(errors.AllocationError), Status.RESOURCE),
        (MemoryError(), Status.RESOURCE),
        (
            vendor_error(errors.InternalError, text="hiprtc: fatal error: 'type_traits' file not found"),
            Status.BUILD_FAILED,
        ),
        (vendor_error(errors.InternalError, "miopenStatusUnknownError"), Status.FAIL),
        (vendor_error(errors.BadParameterError), Status.FAIL),
        (vendor_error(errors.ExecutionError), Status.FAIL),
        (errors.ArgumentError("x", 1, "2"), Status.FAIL),
        (ValueError(), Status.FAIL),
    ],
)
def test_what_an_exception_stands_for(error, status):
    assert classify(error) == status

    class Raising(Kernels):
        def forward_training(self, *_, **__):
            raise error

    result = run_case(CASE, Session("onednn", Raising(), devices.device_for(1)))
    assert result.status == status
    assert type(error).__name__ in result.message


def test_a_call_sees_exactly_the_generated_inputs_inside_guards():
    seen = {}

    class Looking(Kernels):
        def backward(self, x, dy, scale, dx, dscale, dbias, **options):
            seen.update(x=x, dy=dy, scale=scale, dx=dx, dscale=dscale, dbias=dbias, **options)
            seen["values"] = {k: array_of(v).copy() for k, v in seen.items() if hasattr(v, "pointer")}
            super().backward(x, dy, scale, dx, dscale, dbias, **options)

    problem = Problem.parse("backward,spatial,bf16,strides=300x1x40x3,4x3x4x5,beta_param=1")
    inputs = generate(problem)
    observed = execute(problem, inputs, Session("onednn", Looking(), devices.device_for(1)))
    assert observed.damage == []
    assert list(observed.outputs) == ["dx", "dscale", "dbias"]
    for name in ("x", "dy", "dx"):
        assert seen[name].strides == problem.strides
        assert seen[name].dims == problem.dims
        assert seen[name].pointer % 64 == 0
    names = {"scale": "scale", "saved_mean": "saved_mean", "dscale": "prior_scale", "dbias": "prior_bias", "x": "x"}
    for name, field in names.items():
        assert seen["values"][name].tobytes() == getattr(inputs, field).tobytes()
    assert np.isnan(seen["values"]["dx"]).all()
    assert (seen["beta_param"], seen["beta_data"], seen["workspace"]) == (1.0, 0.0, None)


def test_unwritten_results_are_failures():
    class Lazy(Kernels):
        def forward_training(self, *_, **__):
            pass

    result = run_case(CASE, Session("onednn", Lazy(), devices.device_for(1)))
    verdicts = {v.output: v for v in result.verdicts}
    assert result.status == Status.FAIL
    for name in ("y", "saved_mean", "saved_inv_variance"):
        assert verdicts[name].over == verdicts[name].elements
        assert verdicts[name].ratio == math.inf
    assert verdicts["running_mean"].status == Status.FAIL


class Alternating(Kernels):
    """Adds `error` to one element of y in every second call."""

    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def forward_training(self, x, scale, bias, y, **options):
        super().forward_training(x, scale, bias, y, **options)
        self.calls += 1
        if self.calls % 2 == 0:
            array_of(y)[0, 0, 0, 0] += self.error


def test_repeats_are_compared_by_bit_and_a_harmless_difference_is_recorded():
    problem = Problem.parse("train,spatial,f32,nchw,8x3x4x4,fill=randn")
    assert run_case(problem, session()).repeat == "equal"
    result = run_case(problem, Session("onednn", Alternating(1e-6), devices.device_for(1)))
    assert (result.status, result.repeat) == (Status.PASS, "y")


def test_a_wrong_second_call_fails_the_case():
    result = run_case(CASE, Session("onednn", Alternating(0.5), devices.device_for(1)))
    assert (result.status, result.repeat) == (Status.FAIL, "y")
    assert "second of two equal calls" in next(v.note for v in result.verdicts if v.output == "y")


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("opener", [open_exiting, open_aborting])
def test_a_dying_library_takes_one_case_with_it(opener):
    with Worker("onednn", opener) as worker:
        assert worker.run(CASE_3D).status == Status.PASS
        crashed = worker.run(CASE)
        assert crashed.status == Status.CRASHED
        assert crashed.case == str(CASE)
        assert worker.run(CASE_3D).status == Status.PASS


def test_a_worker_is_another_process_and_results_come_back_whole():
    with Worker("onednn", open_simulated) as worker:
        assert worker.submit(os.getpid).result() != os.getpid()
        there, here = worker.run(CASE), run_case(CASE, session())
    there.seconds = here.seconds = 0
    assert there == here


def test_an_interrupt_of_the_terminal_does_not_reach_a_worker_not_even_while_it_starts(capfd):
    with Worker("onednn", open_simulated) as worker:
        before = set(multiprocessing.active_children())
        pending = worker.submit(os.getpid)
        (process,) = set(multiprocessing.active_children()) - before
        for _ in range(50):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.01)
        assert pending.result() == process.pid
        os.kill(process.pid, signal.SIGINT)
        assert worker.submit(os.getpid).result() == process.pid
        assert worker.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert capfd.readouterr().err == ""


def test_a_worker_can_be_ended_in_the_middle_of_a_case():
    worker = Worker("onednn", open_simulated)
    worker.submit(os.getpid).result()
    started = time.monotonic()
    pending = worker.submit(time.sleep, 60)
    while not pending.running():
        time.sleep(0.01)
    worker.kill()
    assert time.monotonic() - started < 20


def test_a_session_that_does_not_open_is_a_failure_of_the_case():
    with Worker("onednn", open_nothing) as worker:
        result = worker.run(CASE)
    assert (result.status, result.message) == (Status.FAIL, "OSError: no such device")


# ---------------------------------------------------------------- reports


def results_of(*statuses):
    return [CaseResult("onednn", "train,spatial,f32,nchw,2x3", status) for status in statuses]


@pytest.mark.parametrize(
    ("statuses", "missing", "code"),
    [
        ([Status.PASS, Status.WARN, Status.UNSUPPORTED], [], 0),
        ([Status.PASS], ["cudnn"], 1),
        ([], ["cudnn"], 1),
        ([], [], 2),
        ([Status.UNSUPPORTED], [], 2),
        *[([Status.PASS, s], [], 1) for s in Status if s.value not in ("PASS", "WARN", "UNSUPPORTED")],
    ],
)
def test_exit_statuses(statuses, missing, code):
    assert report.exit_status(results_of(*statuses), missing) == code


def test_json_is_strict_and_complete():
    result = run_case(Problem.parse("infer,spatial,f32,nchw,4x3x4x4"), session(bug="NaN in one element"))
    text = json.dumps(report.to_json(result), allow_nan=False)
    data = json.loads(text)
    assert data["status"] == "FAIL"
    assert data["repro"] == "pybnorm check --backend onednn --case 'infer,spatial,f32,nchw,4x3x4x4'"
    assert data["ratio"] == "inf"
    (verdict,) = data["verdicts"]
    assert verdict["over"] == 1
    assert verdict["worst"][0]["got"] == "nan"
    assert verdict["worst"][0]["index"] == [2, 0, 0, 0]


def test_a_repro_line_carries_the_library_that_was_named(monkeypatch):
    monkeypatch.setenv("PYBNORM_LIB_ONEDNN", "/a b/libdnnl.so.3")
    (result,) = results_of(Status.FAIL)
    assert report.repro(result).startswith("PYBNORM_LIB_ONEDNN='/a b/libdnnl.so.3' pybnorm check --backend onednn")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001234, "1e-03"), (0.5, "0.50"), (99.4, "99.40"), (12345.0, "1e+04"), (math.inf, "inf")],
)
def test_ratios_are_short(value, text):
    assert report.ratio_text(value) == text


def test_a_backend_that_is_absent_is_not_loaded():
    assert not BackendInfo("cudnn", problem="no file").loaded
    assert BackendInfo("cudnn", path="/x/libcudnn.so.9").loaded
