"""oneDNN's algorithm "rows": channels-first memory by its layer normalization, reduction and binary primitives."""

import numpy as np
import pytest

import pybnorm
from pybnorm import Operation
from pybnorm.check import runner
from pybnorm.check.bounds import Status
from pybnorm.check.problem import Problem
from pybnorm.check.session import open_session

PLANS = {
    Operation.FORWARD_TRAINING: "plan_forward_training",
    Operation.FORWARD_INFERENCE: "plan_forward_inference",
    Operation.BACKWARD: "plan_backward",
}


@pytest.fixture(scope="module")
def session():
    opened = open_session("onednn")
    with opened.handle:
        yield opened


@pytest.fixture
def handle(session):
    return session.handle


@pytest.mark.parametrize("fill", ["randn", "exact", "sqrteps", "special", "randn,kappa=100"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("operation", ["train", "infer", "backward", "backward,saved=0", "train,alpha=2,beta=0.5"])
def test_a_call_by_rows_is_within_the_bound(session, operation, dtype, fill):
    word, _, options = operation.partition(",")
    line = f"{word},spatial,{dtype},nchw,4x19x29x31,fill={fill},algorithm=rows,repeats=1,{options}".rstrip(",")
    result = runner.run_case(Problem.parse(line), session)
    assert result.status == Status.PASS, result


@pytest.mark.parametrize("operation", PLANS, ids=lambda o: o.name.lower())
def test_auto_takes_rows_where_they_are_long(handle, operation):
    def chosen(*dims, mode="spatial", **options):
        plan = getattr(handle, PLANS[operation])(np.zeros(dims, np.float32), mode=mode, algorithm="auto", **options)
        assert plan.reason
        return plan.algorithm

    assert chosen(2, 3, 16, 16) == chosen(2, 3, 4, 4, 4) == "rows"
    assert chosen(2, 3, 2, 2) == chosen(2, 3) == chosen(2, 3, 16, 16, mode="per_activation") == "plain"
    with pytest.raises(pybnorm.UnsupportedError, match="channels-first"):
        getattr(handle, PLANS[operation])(np.zeros((2, 3), np.float32), algorithm="rows")


@pytest.mark.parametrize("operation", ["train", "infer", "backward"])
def test_rows_of_one_element_are_none(session, operation):
    """oneDNN 3.2 gives every channel the factor of the first there, and its reduction refuses."""
    one, two = (Problem.parse(f"{operation},spatial,f32,nchw,30x3x1x{s},fill=randn,algorithm=rows") for s in (1, 2))
    assert runner.run_case(one, session).status == Status.UNSUPPORTED
    assert runner.run_case(two, session).status == Status.PASS


def test_an_infinity_and_a_nan_stay_in_their_channel(handle):
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 7)).astype(np.float32)
    x[0, 0, 0, 0], x[1, 1, 0, 0] = np.nan, np.inf
    scale, bias = np.ones((2, 1, 3, 1, 1), np.float32)
    y, mean, inv_variance = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    plan = handle.plan_forward_training(x, algorithm="rows", running=False)
    plan(x=x, scale=scale, bias=bias, y=y, saved_mean=mean, saved_inv_variance=inv_variance)
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2]).all()
