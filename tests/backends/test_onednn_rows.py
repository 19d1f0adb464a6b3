"""oneDNN's algorithms "rows" and "folded": statistics, sums and elementwise passes by its other primitives."""

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
@pytest.mark.parametrize(
    "where",
    [
        "nchw,4x19x29x31,algorithm=rows",
        "nchw,37x19x3x5,algorithm=rows",  # short rows, several of them in each step
        "nchw,37x19x3x5,algorithm=folded",
        "nhwc,4x19x29x31,algorithm=folded",  # 3,596 rows: 112 times 32, and 12
    ],
)
def test_a_call_is_within_the_bound(session, where, operation, dtype, fill):
    word, _, options = operation.partition(",")
    layout, dims, algorithm = where.split(",")
    line = f"{word},spatial,{dtype},{layout},{dims},fill={fill},{algorithm},repeats=1,{options}".rstrip(",")
    result = runner.run_case(Problem.parse(line), session)
    assert result.status == Status.PASS, result


@pytest.mark.parametrize("operation", PLANS, ids=lambda o: o.name.lower())
def test_auto_takes_what_has_vector_kernels(handle, operation):
    def chosen(*dims, mode="spatial", last=False, algorithm="auto"):
        x = np.zeros(dims, np.float32)
        x = np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1) if last else x
        plan = getattr(handle, PLANS[operation])(x, mode=mode, algorithm=algorithm)
        assert plan.reason
        return plan.algorithm

    assert chosen(2, 3, 16, 16) == chosen(2, 3, 4, 4, 8) == "rows"
    assert chosen(40, 19) == chosen(9, 19, 5, 7, last=True) == "folded"
    assert chosen(40, 16) == chosen(9, 16, 5, 7, last=True) == chosen(2, 3, 16, 16, mode="per_activation") == "plain"
    assert chosen(640, 3, 2, 2) == ("rows" if operation == Operation.FORWARD_INFERENCE else "folded")
    few = "rows" if operation == Operation.FORWARD_INFERENCE else "plain"
    assert chosen(2, 8, 4, 4) == chosen(64, 3, 2, 2) == few
    assert chosen(2, 8, 8, 8) == "rows"
    for dims, algorithm in (((2, 3), "rows"), ((1, 3, 5, 7), "folded")):
        with pytest.raises(pybnorm.UnsupportedError, match=r"channels-first|several images"):
            chosen(*dims, algorithm=algorithm)


@pytest.mark.parametrize("operation", ["train", "infer", "backward"])
def test_rows_of_one_element_are_none(session, operation):
    """oneDNN 3.2 gives every channel the factor of the first there, and its reduction refuses."""
    one, two = (Problem.parse(f"{operation},spatial,f32,nchw,30x3x1x{s},fill=randn,algorithm=rows") for s in (1, 2))
    assert runner.run_case(one, session).status == Status.UNSUPPORTED
    assert runner.run_case(two, session).status == Status.PASS


@pytest.mark.parametrize(("algorithm", "last"), [("rows", False), ("folded", False), ("folded", True)])
def test_an_infinity_and_a_nan_stay_in_their_channel(handle, algorithm, last):
    x = np.random.default_rng(1).standard_normal((20, 3, 5, 7)).astype(np.float32)
    x[0, 0, 0, 0], x[19, 1, 4, 6] = np.nan, np.inf
    x = np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1) if last else x
    scale, bias = np.ones((2, 1, 3, 1, 1), np.float32)
    y, mean, inv_variance = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    plan = handle.plan_forward_training(x, algorithm=algorithm, running=False)
    plan(x=x, scale=scale, bias=bias, y=y, saved_mean=mean, saved_inv_variance=inv_variance)
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2]).all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("operation", PLANS, ids=lambda o: o.name.lower())
def test_in_place_it_is_still_right(session, layout, operation):
    """The steps would read what they have written; then the entry point computes."""
    word = {"FORWARD_TRAINING": "train", "FORWARD_INFERENCE": "infer"}.get(operation.name, "backward")
    line = f"{word},spatial,f32,{layout},21x19x5x3,fill=randn,algorithm=folded,inplace=1"
    assert runner.run_case(Problem.parse(line), session).status == Status.PASS
