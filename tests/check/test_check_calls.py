"""The call that a problem asks for follows the core's table of operations and tensors."""

import pytest

from pybnorm import _core
from pybnorm.check import calls
from pybnorm.check.data import Inputs
from pybnorm.check.problem import OPERATIONS, Problem


@pytest.mark.parametrize("word", OPERATIONS)
def test_the_tensors_of_a_call_are_those_of_the_core(word):
    problem = Problem.parse(f"{word},spatial,f32,nchw,4x3x5x5")
    rows = [row for row in _core.tensors(problem.operation) if row.when in ("always", "running", "saved")]
    found = calls.tensors(problem)
    assert [(t.name, t.data, t.written) for t in found] == [(r.name, not r.vector, r.written) for r in rows]
    assert {t.values for t in found} - {""} <= set(Inputs.__dataclass_fields__)
    assert all(t.values for t in found if not t.written), "what a call reads has values"


def test_a_new_line_of_the_core_is_a_new_tensor_of_the_call(monkeypatch):
    row = _core.Tensor("dy", False, False, "always")
    listed = _core.tensors
    monkeypatch.setattr(_core, "tensors", lambda operation: (*listed(operation), row))
    for operation, before in calls.TENSORS.items():
        assert calls._table(operation) == (*before, calls.Tensor("dy", True, False, "dy", "always"))


def test_statistics_that_a_problem_has_not_are_not_given():
    problem = Problem.parse("train,spatial,f32,nchw,4x3x5x5,running=0,saved=0")
    assert [t.name for t in calls.tensors(problem)] == ["x", "scale", "bias", "y"]
