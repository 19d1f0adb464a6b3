"""What an implementation does not claim is UNSUPPORTED; what it claims is judged by its conventions."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from pybnorm import devices
from pybnorm.check.judging.bounds import Status, expect
from pybnorm.check.judging.bounds.classes import tiers
from pybnorm.check.judging.bounds.terms import terms
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.check.report.explain import explain_line
from pybnorm.check.run.implementations import Implementation
from pybnorm.check.run.runner import run_case
from pybnorm.check.run.session import Session, open_session
from pybnorm.errors import ArgumentError

sys.path.append(str(Path(__file__).parents[2] / "examples" / "implementations"))
from numpy_one_liner import OneLiner

TRAIN = "train,spatial,f32,nchw,8x3x4x4"


def declaring(kernel=OneLiner, **attributes):
    target = type("Declaring", (kernel,), attributes | {"name": "it"})()
    found = Implementation("here:it", target)
    return Session("here:it", found, devices.device_for(found.memory_type))


class Otherwise(OneLiner):
    """Training with one result that is another number."""

    def forward_training(self, x, scale, bias, epsilon, exponential_average_factor, running_mean, running_variance):
        f = np.float32(exponential_average_factor)
        running = {"running_mean": running_mean, "running_variance": running_variance}
        found = super().forward_training(x, scale, bias, epsilon, f, **running)
        variance = x.astype(np.float32).var((0, *range(2, x.ndim)), keepdims=True)
        return found | {
            self.result: self.other(variance, (1 - f) * running_variance + f * variance).astype(scale.dtype)
        }


class Biased(Otherwise):
    """Its running variance is ONNX's."""

    result, other = "running_variance", staticmethod(lambda variance, running: running)


class SavesVariance(Otherwise):
    """What it saves is the variance."""

    result, other = "saved_inv_variance", staticmethod(lambda variance, running: variance)


@pytest.mark.parametrize(
    ("attributes", "claimed", "other", "reason"),
    [
        ({"dtypes": ("f32", "bf16")}, TRAIN, "train,spatial,f16,nchw,8x3x4x4", "does not claim data f16"),
        ({"layouts": "nchw"}, TRAIN, "train,spatial,f32,nhwc,8x3x4x4", "does not claim layout nhwc"),
        ({"layouts": ("nchw",)}, TRAIN, "infer,spatial,f32,strides=96x32x8x1,2x3x4x4", "does not claim layout strides"),
        ({"modes": ["spatial"]}, TRAIN, "train,peract,f32,nchw,8x3x4x4", "does not claim mode peract"),
        ({"parameters": ("f32",)}, TRAIN, TRAIN + ",params=f64", "does not claim parameters of f64 beside f32"),
        ({"parameters": "derived"}, "train,spatial,f64,nchw,8x3x4x4", TRAIN + ",params=f16",
         "does not claim parameters of f16 beside f32"),
        ({"minimum": {"m": 128}}, TRAIN, "train,spatial,f32,nchw,7x3x4x4", "claims m >= 128 only"),
        ({"minimum": {"epsilon": 1e-5}}, TRAIN, TRAIN + ",eps=0", "claims epsilon >= 1e-05 only"),
        ({"outputs": ("y", "dx", "dscale")}, TRAIN, "backward,spatial,f32,nchw,8x3x4x4", "does not give dbias"),
        ({"supports": lambda self, case: case.dims[1] != 5 or "C = 5 is odd"}, TRAIN, "train,spatial,f32,nchw,8x5x4",
         "C = 5 is odd"),
        ({"supports": lambda self, case: case.word == "train"}, TRAIN, "infer,spatial,f32,nchw,8x3x4",
         "does not claim this case"),
        ({"saved": "variance"}, TRAIN + ",saved=0", "backward,spatial,f32,nchw,8x3x4x4", "saves the variance, and"),
    ],
)  # fmt: skip
def test_what_is_not_claimed_is_unsupported(attributes, claimed, other, reason):
    session = declaring(**attributes)
    assert run_case(Problem.parse(claimed), session).status == Status.PASS
    assert run_case(Problem.parse(other), declaring()).status == Status.PASS
    result = run_case(Problem.parse(other), session)
    assert result.status == Status.UNSUPPORTED
    assert result.message.startswith(f"it {reason}")
    assert result.case == other


FILLS = ("exact", "randn", "randn,factor=1", "randn,kappa=3", "sqrteps", "relu")


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    ("kernel", "claims", "wrong"),
    [
        (Biased, {"unbiased": False}, []),
        (Biased, {"unbiased": True}, ["running_variance"]),
        (OneLiner, {"unbiased": False}, ["running_variance"]),
        (SavesVariance, {"saved": "variance"}, []),
        (SavesVariance, {"saved": "inverse standard deviation"}, ["saved_inv_variance"]),
        (OneLiner, {"saved": "variance"}, ["saved_inv_variance"]),
    ],
)
def test_a_result_is_judged_by_the_convention_that_is_declared(fill, kernel, claims, wrong):
    result = run_case(Problem.parse(f"{TRAIN},fill={fill}"), declaring(kernel, **claims))
    assert [v.output for v in result.verdicts if v.status == Status.FAIL] == wrong


def test_explain_takes_the_declared_convention_too():
    result, explanation = explain_line(lambda backend: declaring(Biased, unbiased=False), "here:it", TRAIN)
    assert result.status == Status.PASS
    assert {shown.status for shown in explanation.outputs} == {Status.PASS}


def test_training_without_a_result_is_judged_without_it():
    class Bare(OneLiner):
        def forward_training(self, x, scale, bias, epsilon):
            return super().forward_training(x, scale, bias, epsilon, 0.0)["y"]

    assert run_case(Problem.parse(TRAIN), declaring(Bare)).status == Status.UNSUPPORTED
    result = run_case(Problem.parse(TRAIN), declaring(Bare, outputs=("y",), unbiased=False))
    assert (result.status, [v.output for v in result.verdicts]) == (Status.PASS, ["y"])


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"dtypes": ("f32", "f8")}, "here:it.dtypes: got f8, allowed: f32 | f64 | f16 | bf16"),
        ({"layouts": 3}, "here:it.layouts: got 3"),
        ({"outputs": ("z",)}, "here:it.outputs: got z"),
        ({"unbiased": 0}, "here:it.unbiased: got 0, allowed: True | False"),
        ({"saved": "sigma"}, "here:it.saved: got sigma, allowed: inverse standard deviation | variance"),
        ({"minimum": {"width": 3}}, "here:it.minimum: got "),
        ({"parameters": "float32"}, "here:it.parameters: got float32"),
    ],
)
def test_an_attribute_that_says_nothing_is_refused_by_name(attributes, told):
    with pytest.raises(ArgumentError) as caught:
        declaring(**attributes)
    assert told in str(caught.value)


def test_what_supports_raises_is_told():
    def supports(self, case):
        return case.width

    result = run_case(Problem.parse(TRAIN), declaring(supports=supports))
    assert result.status == Status.RAISED
    assert "width" in result.message


# ---------------------------------------------------------------- the language


@pytest.mark.parametrize("token", ["unbiased=0", "saved=variance", "unbiased=0,saved=variance"])
def test_the_conventions_are_words_of_a_case(token, load_library):
    line = f"{TRAIN},{token}"
    assert str(Problem.parse(line)) == line
    load_library("onednn")
    session = open_session("onednn")
    with session.handle:
        result = run_case(Problem.parse(line), session)
    assert result.status == Status.UNSUPPORTED
    assert "no vendor's call has it" in result.message


@pytest.mark.parametrize(
    "case",
    ["infer,{},unbiased=0", "backward,{},saved=variance", "train,{},unbiased=0,running=0", "train,{},saved=sigma"],
)
def test_the_conventions_are_of_training(case):
    with pytest.raises(ArgumentError):
        Problem.parse(case.format("spatial,f32,nchw,8x3"))


@pytest.mark.parametrize("output", ["running_variance", "saved_inv_variance"])
def test_the_terms_of_their_bounds_add_up(output):
    problem = Problem.parse(f"{TRAIN},fill=randn,unbiased=0,saved=variance")
    expected = expect(problem, generate(problem))
    for tier in tiers(problem, output):
        (part,) = expected.parts(output, None, (tier,))
        bound = float(part.classes[0][0][0, 1, 0, 0])
        total = sum(term.size for term in terms(expected, output, (0, 1, 0, 0), tier))
        assert math.isclose(total, bound, rel_tol=1e-12)
