"""The call that a problem asks for follows the core's table of operations and tensors."""

import numpy as np
import pytest
from selftest_tool.composed import Composed
from simulated import Kernels, array_of, session

from pybnorm import _core, devices
from pybnorm._arrays import as_buffer
from pybnorm.check.judging.bounds import Status
from pybnorm.check.language import calls
from pybnorm.check.language.data import Inputs
from pybnorm.check.language.problem import OPERATIONS, Problem
from pybnorm.check.run.runner import Session, run_case
from pybnorm.check.run.session import open_session
from pybnorm.errors import ArgumentError


@pytest.mark.parametrize("word", OPERATIONS)
def test_the_tensors_of_a_call_are_those_of_the_core(word):
    problem = Problem.parse(f"{word},spatial,f32,nchw,4x3x5x5")
    rows = [row for row in _core.tensors(problem.operation) if row.when in ("always", "running", "saved")]
    found = calls.tensors(problem)
    assert [(t.name, t.data, t.written) for t in found] == [(r.name, not r.vector, r.written) for r in rows]
    assert {t.values for t in found} - {""} <= set(Inputs.__dataclass_fields__)
    assert all(t.values for t in found if not t.written), "what a call reads has values"


def test_statistics_that_a_problem_has_not_are_not_given():
    problem = Problem.parse("train,spatial,f32,nchw,4x3x5x5,running=0,saved=0")
    assert [t.name for t in calls.tensors(problem)] == ["x", "scale", "bias", "y"]


class TakesStatisticsAgain(Kernels):
    """Right unless y lies where x was: it stores y, and then takes the statistics to save from x."""

    def forward_training(self, x, scale, bias, y, *, saved_mean, saved_inv_variance, **options):
        super().forward_training(x, scale, bias, y, **options)
        mean, variance = self.statistics(self.rows(array_of(x), options["mode"]), np.float32)
        self.store_parameter(saved_mean, mean)
        self.store_parameter(saved_inv_variance, self.inverse(variance, options["epsilon"], 20))


class ReadsDyTwice(Kernels):
    """Right unless dx lies where dy was: it sums dy for dbias after dx is there."""

    def backward(self, x, dy, scale, dx, dscale, dbias, **options):
        super().backward(x, dy, scale, dx, dscale, dbias, **options)
        self.store_parameter(dbias, self.sum(self.rows(array_of(dy), options["mode"]), np.float32))


@pytest.mark.parametrize(
    ("kernels", "word", "outputs"),
    [
        (TakesStatisticsAgain, "train", {"saved_mean", "saved_inv_variance"}),
        (ReadsDyTwice, "backward", {"dbias"}),
    ],
)
def test_a_kernel_that_reads_what_it_wrote_is_found_in_place_only(kernels, word, outputs):
    here = Session("onednn", kernels(), devices.device_for(1))
    line = f"{word},spatial,f32,nchw,4x3x5x5,fill=randn"
    assert run_case(Problem.parse(line), here).status == Status.PASS
    assert run_case(Problem.parse(f"{line},inplace=1"), session()).status == Status.PASS
    found = run_case(Problem.parse(f"{line},inplace=1"), here)
    assert found.status == Status.FAIL
    assert {v.output for v in found.verdicts if v.status == Status.FAIL} == outputs


@pytest.mark.parametrize("word", OPERATIONS)
def test_onednn_computes_in_place_and_callers_are_still_refused(load_library, word):
    load_library("onednn")
    problem = Problem.parse(f"{word},spatial,f32,nchw,4x6x5x7,fill=randn,inplace=1")
    here = open_session("onednn")
    with here.handle:
        result = run_case(problem, here)
        assert (result.status, result.message) == (Status.PASS, "")
        arrays = {t.name: np.ones((4, 6, 5, 7) if t.data else 6, np.float32) for t in calls.tensors(problem)}
        arrays |= {output: arrays[source] for output, source in calls.overwritten(problem).items()}
        with pytest.raises(ArgumentError, match="memory that overlaps"):
            getattr(here.handle, calls.METHODS[problem.operation])(**arrays)


class FromInverse(Composed):
    forward_inference_inv_variance = Composed.elemt


class FromVariance(Composed):
    """Takes the inverse standard deviation for a variance."""

    def forward_inference_inv_variance(self, *, inv_variance, **given):
        taken = 1 / np.sqrt(array_of(inv_variance) + np.float32(1e-5))
        self.elemt(inv_variance=as_buffer(taken, "inv_variance"), **given)


@pytest.mark.parametrize("fill", ["exact", "randn"])
@pytest.mark.parametrize("mode", ["spatial", "peract"])
def test_inference_from_the_inverse_standard_deviation(load_library, mode, fill):
    problem = Problem.parse(f"infer,{mode},f32,nchw,8x6x5x7,fill={fill},inverse=1,alpha=2,beta=0.5")
    place = devices.device_for(1)
    assert run_case(problem, Session("onednn", FromInverse(), place)).status == Status.PASS
    wrong = run_case(problem, Session("onednn", FromVariance(), place))
    assert [(v.output, v.status) for v in wrong.verdicts] == [("y", Status.FAIL)]
    assert run_case(problem, Session("onednn", Kernels(), place)).status == Status.UNSUPPORTED
    load_library("onednn")
    here = open_session("onednn")
    with here.handle:
        assert run_case(problem, here).status == Status.PASS
