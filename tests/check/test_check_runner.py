"""Running a case: statuses of what goes wrong, repeated calls, processes that die."""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from simulated import (
    Kernels,
    Watched,
    alive,
    array_of,
    open_aborting,
    open_hanging,
    open_nothing,
    open_simulated,
    session,
)
from tables import table

from pybnorm import devices, errors
from pybnorm.check.judging.bounds import Status, untrusted
from pybnorm.check.judging.results import exit_status, repro
from pybnorm.check.language import calls
from pybnorm.check.language.data import generate
from pybnorm.check.language.lines import expand
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import guarded
from pybnorm.check.run.guarded import same_bits
from pybnorm.check.run.runner import CaseResult, Session, classify, execute, run_case
from pybnorm.check.run.session import open_session
from pybnorm.check.run.worker import TimeLimitError, Worker

CASE = Problem.parse("train,spatial,f32,nchw,8x3x4x4")
CASE_3D = Problem.parse("train,spatial,f32,nchw,8x3x4")


def vendor_error(kind, status_name="STATUS", text=""):
    return kind(backend="onednn", function="f", status=1, status_name=status_name, text=text)


def raising(error):
    def before(call):
        raise error

    return before


def on(kernels):
    return Session("onednn", kernels, devices.device_for(1))


@table(
    ("error", "status"),
    [
        (vendor_error(errors.UnsupportedError), Status.UNSUPPORTED),
        (vendor_error(errors.NotSupportedError), Status.UNSUPPORTED),
        (vendor_error(errors.AllocationError), Status.RESOURCE),
        (MemoryError(), Status.RESOURCE),
        (type("OutOfMemoryError", (RuntimeError,), {})(), Status.RESOURCE),
        (
            vendor_error(errors.InternalError, text="hiprtc: fatal error: 'type_traits' file not found"),
            Status.BUILD_FAILED,
        ),
        (vendor_error(errors.InternalError, "miopenStatusUnknownError"), Status.FAIL),
        (vendor_error(errors.BadParameterError), Status.FAIL),
        (vendor_error(errors.ExecutionError), Status.FAIL),
        (errors.ArgumentError("x", 1, "2"), Status.ERROR),  # this package's refusal of a case is its own mistake
        (errors.ArgumentError("algorithm", "small", "auto"), Status.UNSUPPORTED),
        (errors.LibraryLoadError("gone", backend="onednn"), Status.ERROR),
        (ValueError(), Status.ERROR),
    ],
)
def test_what_an_exception_stands_for(error, status):
    result = run_case(CASE, on(Watched(raising(error))))
    assert classify(error) == result.status == status
    assert type(error).__name__ in result.message


def test_what_no_plan_offers_is_refused_and_no_error(onednn):
    session = open_session("onednn")
    line = "train/infer/backward,spatial/peract,f32/f64,nchw,4x3x5x4,algorithm=auto/plain/graph,activation="
    with session.handle:
        for problem in expand(line + "relu/clamp/clipped_relu"):
            result = run_case(problem, session)
            assert result.status == Status.UNSUPPORTED, (str(problem), result.message)


def test_a_call_sees_exactly_the_generated_inputs_inside_guards():
    seen = {}

    def look(call):
        seen.update(call, values={k: array_of(v).copy() for k, v in call.items() if hasattr(v, "pointer")})

    problem = Problem.parse("backward,spatial,bf16,strides=300x1x40x3,4x3x4x5,beta_param=1")
    inputs = generate(problem)
    observed = execute(problem, inputs, on(Watched(look)))
    assert observed.damage == []
    assert list(observed.outputs) == ["dx", "dscale", "dbias"]
    for name in ("x", "dy", "dx"):
        assert (seen[name].strides, seen[name].dims, seen[name].pointer % 64) == (problem.strides, problem.dims, 0)
    names = {"scale": "scale", "saved_mean": "saved_mean", "dscale": "prior_scale", "dbias": "prior_bias", "x": "x"}
    for name, field in names.items():
        assert seen["values"][name].tobytes() == getattr(inputs, field).tobytes()
    assert np.isnan(seen["values"]["dx"]).all()
    assert (seen["beta_param"], seen["beta"], seen["workspace"]) == (1.0, 0.0, None)


def test_unwritten_results_are_failures():
    class Lazy(Kernels):
        def forward_training(self, *_, **__):
            pass

    result = run_case(CASE, on(Lazy()))
    verdicts = {v.output: v for v in result.verdicts}
    assert result.status == Status.FAIL
    for name in ("y", "saved_mean", "saved_inv_variance"):
        assert verdicts[name].over == verdicts[name].elements
        assert verdicts[name].ratio == math.inf
    assert verdicts["running_mean"].status == Status.FAIL


def wrong(error, of=lambda call: call % 2 == 0):
    """Kernels that add `error` to one element of y in the calls, counted from 1, that `of` says."""
    count = itertools.count(1)

    def after(call):
        if of(next(count)):
            array_of(call["y"])[0, 0, 0, 0] += error

    return Watched(after=after)


def test_repeats_are_compared_by_bit_and_a_harmless_difference_fails_only_where_the_same_bits_are_asked_for():
    line = "train,spatial,f32,nchw,8x3x4x4,fill=randn"
    assert run_case(Problem.parse(line), session()).repeat == "equal"
    result = run_case(Problem.parse(line), on(wrong(1e-6)))
    assert (result.status, result.repeat) == (Status.PASS, "y")
    bitwise = Problem.parse(f"{line},bitwise=1")
    assert run_case(bitwise, session()).status == Status.PASS
    result = run_case(bitwise, on(wrong(1e-6)))
    assert (result.status, result.message) == (Status.NONDETERMINISTIC, "other bits at another equal call: y")
    assert exit_status([result], []) == 1
    assert run_case(bitwise, on(wrong(0.5))).status == Status.FAIL
    once = run_case(Problem.parse(f"{line},repeats=1"), session())
    assert (once.status, once.repeat) == (Status.PASS, "")


@table(("repeats", "number", "status"), [(2, 2, "FAIL"), (5, 6, "PASS"), (20, 7, "FAIL")])
def test_every_repeat_is_looked_at(repeats, number, status):
    kernels = wrong(0.5, lambda call: call == number)
    result = run_case(Problem.parse(f"train,spatial,f32,nchw,8x3x4x4,repeats={repeats}"), on(kernels))
    assert (result.status.value, result.repeat) == (status, "y" if status == "FAIL" else "equal")
    notes = " ".join(v.note for v in result.verdicts)
    assert (f"in call {number} of {repeats}" in notes) == (status == "FAIL")


def test_what_is_only_read_keeps_its_memory_and_what_is_written_gets_new():
    seen = []
    place = on(
        Watched(lambda call: seen.append({n: (call[n].pointer, call[n].owner.memory) for n in ("x", "bias", "y")}))
    )
    assert run_case(Problem.parse("train,spatial,f32,nchw,8x3x4x4,repeats=3"), place).status == Status.PASS
    assert {name: len({call[name][0] for call in seen}) for name in seen[0]} == {"x": 1, "bias": 1, "y": 3}


def test_an_input_that_is_changed_is_made_again_for_the_next_call():
    seen = []

    def after(call):
        seen.append(float(array_of(call["x"])[0, 0, 0, 0]))
        array_of(call["x"])[0, 0, 0, 0] += 1

    result = run_case(CASE, on(Watched(after=after)))
    assert (result.status, "changed its input x" in result.message) == (Status.FAIL, True)
    assert seen[0] == seen[1]


def test_equal_bits_are_told_from_equal_values():
    ones = np.ones((3, 5, 7), np.float32)
    zeros = np.zeros((3, 40000), np.float32)
    signed = zeros.copy()
    signed[2, 39999] = -0.0
    nan = np.full(4, np.nan)
    assert same_bits(ones.transpose(2, 0, 1), np.broadcast_to(np.float32(1), (7, 3, 5)))
    assert same_bits(nan, nan.copy())
    assert not same_bits(zeros, signed)
    assert same_bits(np.float32(1)[()] * np.ones(()), np.ones(()))


@pytest.mark.parametrize(("options", "what"), [(",saved=0", "saved_inv_variance"), (",running=0", "running_variance")])
def test_statistics_that_were_not_asked_for_stay_untouched(monkeypatch, options, what):
    uploads = []
    described = guarded.described
    monkeypatch.setattr(guarded, "described", lambda *given: uploads.append(described(*given)) or uploads[-1])
    problem = Problem.parse("train,spatial,f32,nchw,8x3x4x4" + options)
    assert run_case(problem, session()).status == Status.PASS

    def write(call):
        """Where the case keeps memory for a statistic, given or not."""
        names = [tensor.name for tensor in calls.TENSORS[problem.operation]]  # in the order of execute
        place = uploads[names.index(what) - len(names)]
        array_of(place._replace(pointer=place.pointer + 256, dims=(1,), strides=(1,)))[0] = 1

    result = run_case(problem, on(Watched(after=write)))
    assert (result.status, result.message) == (Status.FAIL, f"changed what was not given to it, {what}")


class Streams(Kernels):
    """Remembers which stream it was told to use at each call."""

    def __init__(self):
        super().__init__()
        self.stream, self.seen = 0, []

    def set_stream(self, stream):
        self.stream = stream

    def forward_inference(self, x, *arguments, **options):
        self.seen.append((self.stream, x.device_id))
        super().forward_inference(x, *arguments, **options)

    def workspace_size(self, *_, **__):
        return 0


def test_repeats_take_turns_on_streams_and_memory_goes_with_them(monkeypatch):
    made = []

    class Numbered(type(devices.device_for(1))):
        device_type = 2

        def __init__(self, device_id=0):
            super().__init__(0)
            self.number = len(made) + 1
            made.append(self)

        @property
        def stream(self):
            return self.number

        def from_numpy(self, array, dtype=None):  # the device's number in place of its ordinal, to be seen by the call
            return super().from_numpy(array, dtype)._replace(device_id=self.number)

    monkeypatch.setattr(devices, "device_for", lambda *_: Numbered())
    monkeypatch.setattr(Session, "workspace_size", lambda *_: 0)
    kernels = Streams()
    place = Session("onednn", kernels, Numbered())
    line = "infer,spatial,f32,nchw,2x3x4x4,repeats=5"
    assert run_case(Problem.parse(line + ",streams=3"), place).status == Status.PASS
    assert kernels.seen == [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2)]
    assert kernels.stream == 1
    kernels.seen.clear()
    assert run_case(Problem.parse(line), place).status == Status.PASS
    assert set(kernels.seen) == {(1, 1)}
    assert len(made) == 3


def test_a_parameter_type_that_the_package_refuses_is_unsupported():
    problem = Problem.parse("train,spatial,f16,nchw,8x3x4x4,params=f16")
    result = run_case(problem, on(Watched(raising(errors.ArgumentTypeError("scale", "dtype f16", "f32")))))
    assert result.status == Status.UNSUPPORTED
    assert "scale: got dtype f16, allowed: f32" in result.message
    result = run_case(CASE, on(Watched(raising(errors.ArgumentError("scale", "dtype f16", "f32")))))
    assert result.status == Status.ERROR  # not what the case is about


# ---------------------------------------------------------------- processes


@pytest.mark.slow
def test_a_dying_library_takes_one_case_with_it():
    with Worker("onednn", open_aborting) as worker:
        assert worker.run(CASE_3D).status == Status.PASS
        crashed = worker.run(CASE)
        assert (crashed.status, crashed.message) == (Status.CRASHED, "the library's process died: SIGABRT")
        assert crashed.case == str(CASE)
        assert worker.run(CASE_3D).status == Status.PASS


@pytest.mark.slow
def test_a_hanging_library_takes_one_case_and_its_time_with_it():
    with Worker("onednn", open_hanging, timeout=60) as worker:
        assert worker.run(CASE_3D).status == Status.PASS
        before = worker.pid
        worker.timeout = 1
        result = worker.run(CASE)
        worker.timeout = 60
        assert (result.status, result.case) == (Status.TIMEOUT, str(CASE))
        assert result.message == "not done after 1 s; the process was killed"
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        assert worker.run(CASE_3D).status == Status.PASS
        assert worker.pid != before


def test_a_worker_is_another_process_with_its_own_variables_and_output(capfd):
    with Worker("onednn", open_simulated, environment={"OMP_NUM_THREADS": "3"}) as worker:
        assert worker.call(os.getpid) == worker.pid != os.getpid()
        assert worker.call(os.getenv, "OMP_NUM_THREADS") == "3"
        assert worker.call(os.getenv, "PATH") == os.environ["PATH"]
        worker.call(os.write, 1, b"from a library")
        there, here = worker.run(CASE), run_case(CASE, session())
        assert there.host.endswith(f":{worker.pid}")
        assert worker.call(divmod, 7, 2) == (3, 1)
        for function, arguments, kind, text in (
            (divmod, (7, 0), ZeroDivisionError, "by zero|modulo"),
            (threading.Lock, (), TypeError, "cannot pickle"),
            (raise_unpicklable, (), RuntimeError, "ValueError: held by a lock"),
            (raise_keyword_only, (), RuntimeError, "KeywordOnlyError: by name"),
        ):
            with pytest.raises(kind, match=text):
                worker.call(function, *arguments)
        assert worker.call(divmod, 9, 4) == (2, 1)
    there.seconds = here.seconds = 0
    there.host = here.host
    assert there == here
    out, err = capfd.readouterr()
    assert (out, "from a library" in err) == ("", True)


@table("timeout", [0, -1.0, math.nan, math.inf, 1e7, "60", [60]])
def test_a_worker_refuses_what_is_no_time_to_wait(timeout):
    with pytest.raises(errors.ArgumentError, match=r"^timeout: got .*, allowed: seconds > 0, at most 1000000$"):
        Worker("onednn", timeout=timeout)


def test_an_interrupt_of_the_terminal_does_not_reach_a_worker_not_even_while_it_starts(capfd):
    with Worker("onednn", open_simulated) as worker:
        worker._start()
        assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
        assert worker.call(os.getpid) == worker.pid
        os.kill(worker.pid, signal.SIGINT)
        assert worker.call(signal.getsignal, signal.SIGINT) == signal.SIG_IGN
    assert capfd.readouterr().err == ""


def raise_unpicklable():
    error = ValueError("held by a lock")
    error.lock = threading.Lock()
    raise error


class KeywordOnlyError(Exception):
    def __init__(self, *, text):
        super().__init__(text)


def raise_keyword_only():
    raise KeywordOnlyError(text="by name")


def start_and_report(seconds):
    """What a library does that starts a compiler."""
    return subprocess.Popen(["sleep", str(seconds)]).pid


def waits_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_what_a_worker_has_started_ends_with_it():
    worker = Worker("onednn")
    child = worker.call(start_and_report, 60)
    assert alive(child)
    with pytest.raises(TimeLimitError):
        worker.call(time.sleep, 60, timeout=0.2)
    assert waits_for(lambda: not alive(child))
    worker.close()


@pytest.mark.slow
def test_a_busy_worker_ends_when_its_owner_is_killed():
    code = (
        "import sys, time; sys.path[:] = {!r}; from pybnorm.check.run.worker import Worker; worker = Worker('onednn');"
        "worker.call(len, ''); print(worker.pid, flush=True); worker.call(time.sleep, 60)"
    )
    with subprocess.Popen([sys.executable, "-c", code.format(sys.path)], stdout=subprocess.PIPE, text=True) as owner:
        worker = int(owner.stdout.readline())
        assert alive(worker)
        owner.kill()
    assert waits_for(lambda: not alive(worker))


def test_a_session_that_does_not_open_is_no_verdict():
    with Worker("onednn", open_nothing) as worker:
        result = worker.run(CASE)
    assert (result.status, result.message) == (Status.ERROR, "OSError: no such device")


# ---------------------------------------------------------------- reports


def results_of(*statuses):
    return [CaseResult("onednn", "train,spatial,f32,nchw,2x3", status) for status in statuses]


@table(
    ("statuses", "missing", "code"),
    [
        ([Status.PASS, Status.WARN, Status.UNSUPPORTED], [], 0),
        ([Status.PASS], ["cudnn"], 1),
        ([], ["cudnn"], 1),
        ([], [], 2),
        ([Status.UNSUPPORTED], [], 2),
        ([Status.MISTRUSTED], [], 0),
        *[([Status.PASS, s], [], 1) for s in Status if not s.good and s != Status.ERROR],
        ([Status.PASS, Status.ERROR], [], 2),
        ([Status.FAIL, Status.ERROR], ["cudnn"], 2),
    ],
)
def test_exit_statuses(statuses, missing, code):
    assert exit_status(results_of(*statuses), missing) == code


def test_a_repro_line_carries_the_library_that_was_named(monkeypatch):
    monkeypatch.setenv("PYBNORM_LIB_ONEDNN", "/a b/libdnnl.so.3")
    (result,) = results_of(Status.FAIL)
    assert repro(result).startswith("PYBNORM_LIB_ONEDNN='/a b/libdnnl.so.3' pybnorm check --backend onednn")


BLIND = "backward,spatial,f32,nchw,1x16x1"  # m = 1, and given statistics at which the fill exact makes dx 0


def test_what_one_fill_cannot_show_another_does():
    assert untrusted(Problem.parse(BLIND), generate(Problem.parse(BLIND)))
    result = run_case(Problem.parse(BLIND), session())
    assert (result.status, result.message) == (Status.PASS, "")
    assert all("fill=randn shows scale, saved_inv_variance, alpha, which fill=exact does not" in v.note
               for v in result.verdicts)  # fmt: skip

    class Deaf(Kernels):
        def backward(self, *arguments, alpha=1.0, **options):
            super().backward(*arguments, alpha=1.5, **options)

    result = run_case(Problem.parse(BLIND), on(Deaf()))
    (dx,) = [v for v in result.verdicts if v.status == Status.FAIL]
    assert dx.output == "dx"
    assert "fill=randn shows" in dx.note


def test_an_epsilon_is_shown_by_a_fill_that_has_it_beside_the_variance_and_what_none_shows_is_a_warning():
    result = run_case(Problem.parse("infer,spatial,f32,nchw,4x3x4x4,eps=1e-09"), session())
    assert (result.status, "fill=sqrteps shows eps" in result.verdicts[0].note) == (Status.PASS, True)
    result = run_case(Problem.parse("infer,spatial,f32,nchw,4x3x4x4,fill=randn,alpha=1e-12,beta=1"), session())
    assert (result.status, result.good) == (Status.MISTRUSTED, True)
    assert "a change would not be noticed of: x, scale, bias" in result.message
